"""Write a block of a page, or fail where it is stale: for the scripts beside it."""

import argparse
import re
import sys


def refresh(page, name, made, words=None, *, what, script, doc=None):
    """Put ``made`` between the markers of ``name`` in a page, unless it is empty.

    With ``--check`` among the words a page that says something else is an error. It
    says ``what`` is stale and which ``script`` to run.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(words)
    block = re.compile(
        rf"(<!-- {name}:start -->\n).*?(<!-- {name}:end -->)", flags=re.DOTALL
    )
    text = page.read_text()
    if len(block.findall(text)) != 1:
        raise ValueError(f"{page.name} must have the markers of {name}, once each")
    if not made:
        return
    written = block.sub(lambda found: f"{found[1]}{made}{found[2]}", text)
    if args.check and written != text:
        sys.exit(f"stale: {what} of {page.name}; run docs/{script}")
    page.write_text(written)
