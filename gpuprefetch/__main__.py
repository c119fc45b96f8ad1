"""``python -m gpuprefetch selfcheck``: is this machine's decoding safe?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path


def _selfcheck(args: argparse.Namespace) -> int:
    from gpuprefetch._selfcheck import selfcheck

    report = selfcheck(args.device, args.rounds)
    print(report)
    if args.output:
        args.output.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    return 0 if report.ok else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0 if all is well, 1 if not, 2 if it could not run."""
    parser = argparse.ArgumentParser(prog="python -m gpuprefetch", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    check = commands.add_parser(
        "selfcheck", help="try whether any image is overwritten while a kernel still reads it"
    )
    check.add_argument("--device", help="such as cuda:1; the current one by default")
    check.add_argument("--rounds", type=int, default=1000, help="default: %(default)s")
    check.add_argument("--output", type=Path, help="JSON file to write the report to")
    check.set_defaults(run=_selfcheck)
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args))
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
