"""Random configurations of DataPrefetcher against the plain DataLoader, by content.

    python tests/checks/differential.py --cases 2000 --jobs 2 \\
        --output benchmarks/results/differential-cpu.json
    python tests/checks/differential.py --cases 300 --device cuda
    python tests/checks/differential.py --only 17        # one seed, with its script

A configuration (``configurations.py``) is a function of its seed. Its pictures tell which sample
they are of and where they were cut from it, so what a loop gets is judged (``judging.py``) without
a look inside:
every sample in the plain loader's order with its own label, right pixels, random parameters that
differ where they should (samples, batches, epochs, repeats, seeds) and agree where they should
(other workers, another batch, ranks, a resume, a replay).

All of it runs in child processes, so that a crash or a hang is seen. A failure is made simpler as
far as it stays the same, and ends in a script of at most 20 lines.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import configurations
import fuzz
import judging
import reproduce
import torch
from bench import harness
from judging import PENDING, RULES, Finding

PATIENCE = 120.0  # seconds for one configuration
MAX_FAILURES = 20  # of one job, which then ends


def run_cases(**task: Any) -> dict[str, Any]:
    """In a child: the configurations of a range of seeds; a line for each as it begins."""
    torch.set_num_threads(1)
    judging.impatient()
    pending = frozenset(task["pending"])
    counts = Counter[str]()
    kinds = Counter[str]()
    failures = list[Any]()
    for seed in range(task["first"], task["last"]):
        print("AT", seed, flush=True)
        if str(seed) in task["trap"]:  # the tests' own
            signal.raise_signal(signal.SIGSEGV) if task["trap"][
                str(seed)
            ] == "crash" else time.sleep(1000)
        config = configurations.draw(seed, task["device"])
        for name, value in configurations.counted(config).items():
            kinds[f"{name}: {value}"] += 1
        counts["cases"] += 1
        if findings := judging.check(config, pending, counts):
            least, finding = reproduce.simpler(config, findings[0], pending)
            failures.append(failure(seed, findings, reproduce.script(least, finding)))
            print(failures[-1]["what"], failures[-1]["script"], sep="\n", file=sys.stderr)
        if len(failures) >= MAX_FAILURES or time.time() > task["until"]:
            break
    return {"counts": counts, "kinds": kinds, "failures": failures}


def failure(seed: int, findings: list[Finding], text: str) -> dict[str, Any]:
    last = findings[0].right if findings[0].kind == "error" else ""
    what = [str(finding)[:600] for finding in findings]
    return {"seed": seed, "what": what, "traceback": last, "script": text}


def run_range(task: dict[str, Any]) -> dict[str, Any]:
    """Run a range of seeds in children; after a crash or a hang the next child goes on."""
    counts = Counter[str]()
    kinds = Counter[str]()
    failures = list[Any]()
    first = task["first"]
    while first < task["last"] and len(failures) < MAX_FAILURES:
        last = min(first + task["each"], task["last"])
        lines, ending, errors = _run_child({**task, "first": first, "last": last})
        if ending == "0":
            result = json.loads(lines[-1].removeprefix(harness.RESULT))
            counts.update(result["counts"])
            kinds.update(result["kinds"])
            failures += result["failures"]
            first = last
            if time.time() > task["until"]:
                break
            continue
        reached = [int(line.split()[1]) for line in lines if line.startswith("AT ")]
        seed = max(reached, default=first)
        config = configurations.draw(seed, task["device"])
        text = reproduce.script(config, Finding("error", ending))
        failures.append({"seed": seed, "what": [ending], "traceback": errors, "script": text})
        print(f"seed {seed}: {ending}\n{errors}\n{text}", file=sys.stderr)
        # What came before it in this child is run again: its counts went with it.
        if seed > first:
            before = run_range({**task, "last": seed, "each": seed - first})
            counts.update(before["counts"])
            kinds.update(before["kinds"])
            failures += before["failures"]
        counts["cases"] += 1
        first = seed + 1
    return {"counts": counts, "kinds": kinds, "failures": failures}


def start(task: dict[str, Any], out: Any, err: Any) -> subprocess.Popen[bytes]:
    """A child that writes to these files, in a session of its own."""
    command = harness.child_command(__file__, task, "-X", "faulthandler")
    return subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)


def _run_child(task: dict[str, Any]) -> tuple[list[str], str, str]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = start(task, out, err)
        try:
            return fuzz.watch(child, out, err, task["patience"])
        finally:  # its workers, too, are in its session
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def differential(args: argparse.Namespace) -> dict[str, Any]:
    """All cases, ``jobs`` children at a time: what came of them."""
    first = args.seed * args.cases if args.only is None else args.only
    last = first + (args.cases if args.only is None else 1)
    per_job = -(-(last - first) // args.jobs)
    until = time.time() + args.seconds if args.seconds else time.time() + 1e9
    shared = {"device": args.device, "pending": sorted(args.without), "until": until}
    shared |= {"patience": args.patience, "trap": args.trap, "each": args.each}
    tasks = [
        shared | {"first": at, "last": min(at + per_job, last)}
        for at in range(first, last, per_job)
    ]
    started = time.monotonic()
    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(run_range, tasks))
    counts: Counter[str] = sum((Counter(result["counts"]) for result in results), Counter())
    kinds: Counter[str] = sum((Counter(result["kinds"]) for result in results), Counter())
    failures = [failure for result in results for failure in result["failures"]]
    return {
        "device": args.device,
        "cases": counts.pop("cases", 0),
        "wrong": len(failures),
        "without": sorted(args.without),
        "counts": dict(counts),
        "kinds": dict(sorted(kinds.items())),
        "failures": failures,
        "seconds": round(time.monotonic() - started, 1),
    }


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = harness.output_parser(__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first case, times --cases")
    parser.add_argument("--only", type=int, help="the configuration of this seed alone")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="children at a time")
    parser.add_argument("--each", type=int, default=50, help="configurations of a child")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds for one of them")
    parser.add_argument("--seconds", type=float, help="fewer cases rather than longer")
    parser.add_argument(
        "--without",
        nargs="*",
        choices=sorted(RULES),
        default=sorted(PENDING),
        help="rules that are not in force: " + "; ".join(f"{k}: {v}" for k, v in RULES.items()),
    )
    parser.add_argument("--trap", type=json.loads, default={}, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> None:
    args = parse()
    document = harness.Document("differential", args, harness.Device(), anew=True)
    result = differential(args)
    print(json.dumps({key: value for key, value in result.items() if key != "failures"}, indent=1))
    for failed in result["failures"]:
        print(f"seed {failed['seed']}:", *failed["what"], failed["script"], sep="\n")
    document.keep(result)
    sys.exit(1 if result["failures"] else 0)


if __name__ == "__main__":
    harness.child_main(run_cases)
    main()
