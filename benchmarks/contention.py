"""Where the training thread's time goes: a step as its host sees it, and the CPU time of threads.

    python benchmarks/contention.py --data PHOTOS --output benchmarks/results/contention.json
    python benchmarks/contention.py --data PHOTOS --shares 0 0.4 --without nothing decode,launch

The host of a fast model is late where a step takes longer than its kernels, although the loop does
not wait for data: other threads have the locks it needs, or the cores. What a part of the loader
costs it shows when that part is left out: ``decode`` takes pixels that are there already,
``launch`` leaves the result as it is; such batches are wrong, and only their time counts. Without
``handovers`` the allocator sees to the memory of batches, as it does for any tensor that is used on
two streams, and looks after its events at each allocation of the model's.
Of a thread, ``queued_ms`` is how long it stood in line for a core, where Linux counts that.
``python_lock_ms`` is how long the training thread slept for Python's lock in a step, and
``python_lock_sleeps`` how often, at least (see sleeps.py); null where that cannot be seen.

All variants run in one process, after one compilation, with a loader of their own each.
"""

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clock
import harness
import loaders
import torch
import train
from sleeps import Sleeps

import gpuprefetch  # before the context: it prepares the environment

WITHOUT = ["nothing", "decode", "launch", "handovers"]
FIELDS = ["user_ms", "system_ms", "queued_ms", "sleeps", "preemptions"]


def threads() -> dict[tuple[int, str], list[float]]:
    """CPU milliseconds and context switches so far of each thread of this process."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    tick, found = 1000 / os.sysconf("SC_CLK_TCK"), {}
    for task in Path("/proc/self/task").iterdir():
        try:
            stat = (task / "stat").read_text()
            status = (task / "status").read_text()
            waits = task / "schedstat"  # not every kernel has it
            queued = int(waits.read_text().split()[1]) / 1e6 if waits.exists() else 0.0
        except OSError:  # it ended meanwhile
            continue
        name = stat[stat.index("(") + 1 : stat.rindex(")")]
        user, system = (tick * int(word) for word in stat.rpartition(")")[2].split()[11:13])
        switches = [int(line.split()[1]) for line in status.splitlines() if "ctxt" in line]
        found[int(task.name), names.get(int(task.name), name)] = [user, system, queued, *switches]
    return found


def used_since(before: dict[tuple[int, str], list[float]], steps: int) -> dict[str, Any]:
    """What each thread took of a step since ``before``."""
    used = {}
    for (number, name), new in threads().items():
        old = before.get((number, name), [0.0] * len(FIELDS))
        if sum(new[:2]) > sum(old[:2]):
            spent = ((b - a) / steps for a, b in zip(old, new, strict=True))
            used[f"{name} {number}"] = dict(zip(FIELDS, spent, strict=True))
    return used


def of_a_step(sleeps: Sleeps, seconds: float) -> dict[str, float | None]:
    """How long, and how often, the training thread slept for Python's lock in such a step."""
    share, count = sleeps.python, sleeps.count
    return {
        "python_lock_ms": None if share is None else 1000 * share * seconds,
        "python_lock_sleeps": None if count is None else count * seconds,
    }


def leave_out(batches: Any, without: list[str]) -> None:
    """Have a prefetcher's images made, or handed over, without some of the work."""
    from gpuprefetch import _epoch
    from gpuprefetch._pipeline import ImageJob
    from gpuprefetch._stream import handoff

    def marked(batch: Any, ready: torch.cuda.Event, device: torch.device, handovers: Any) -> None:
        handoff(batch, ready, device)

    _epoch.handoff = marked if "handovers" in without else handoff  # type: ignore[attr-defined]

    class Job(ImageJob):
        if "launch" in without:

            def _launch(self, launch: Any) -> None:
                pass

    batches._pipeline.job = Job
    if "decode" in without:
        batches._pipeline.decoder.packed = lambda *given, **options: True


def run(
    batches: Iterator[Any], step: Any, seconds: float, device: str
) -> tuple[list[float], list[float], float]:
    """Seconds in ``next`` and in the step's launches, of each step, and all of them together."""
    waits, hosts = [], []
    clock.synchronize(device)
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or not waits:
        before = time.perf_counter()
        batch = next(batches)
        ready = time.perf_counter()
        step(*batch)
        waits.append(ready - before)
        hosts.append(time.perf_counter() - ready)
    clock.synchronize(device)
    return waits, hosts, time.perf_counter() - begin


def measure(stream: str, settings: dict[str, Any], **task: Any) -> dict[str, Any]:
    """All variants, in this process, with the training on one of ``train.STREAMS``."""
    with train.stream_of(stream, settings["device"]):
        return run_variants(shared=loaders.Settings(**settings), **task)


def run_variants(
    model: str,
    mode: str,
    variants: list[tuple[float | str, str]],
    shared: loaders.Settings,
    timing: dict[str, float],
) -> dict[str, Any]:
    """All variants, on the current stream."""
    resident = iter(loaders.build("synthetic", shared, {}))
    step = train.make_step(model, mode, shared.device)
    run(resident, step, timing["warmup"], shared.device)
    with Sleeps() as sleeps:
        before = threads()
        _, hosts, ceiling = run(resident, step, timing["seconds"], shared.device)
        used = used_since(before, len(hosts))
    best = ceiling / len(hosts)
    alone = {
        "ceiling_ms": 1000 * best,
        "ceiling_host_ms": 1000 * statistics.median(hosts),
        "ceiling_threads": used,
        **{f"ceiling_{name}": value for name, value in of_a_step(sleeps, best).items()},
    }
    results: list[dict[str, Any]] = []
    for share, without in variants:
        batches = loaders.build("gpuprefetch", shared, {"cpu_share": share})
        assert isinstance(batches, gpuprefetch.DataPrefetcher)
        leave_out(batches, without.split(","))
        iterator = iter(batches)
        run(iterator, step, timing["warmup"], shared.device)
        with Sleeps() as sleeps:
            before, cpu, stats = threads(), clock.cpu_seconds(), batches.stats.as_dict()
            waits, hosts, wall = run(iterator, step, timing["seconds"], shared.device)
            steps, used, now = len(waits), used_since(before, len(waits)), batches.stats.as_dict()
            cpu = clock.cpu_seconds() - cpu
        results.append(
            {
                "share": share,
                "without": without,
                "step_ms": 1000 * wall / steps,
                "ratio": best * steps / wall,
                "wait_ms": 1000 * statistics.fmean(waits),
                "host_ms": 1000 * statistics.median(hosts),
                "host_ms_p90": 1000 * statistics.quantiles([*hosts, hosts[-1]], n=10)[-1],
                "busy_cores": cpu / wall,
                "share_at_the_end": now["share"],
                "decode_ms": 1000 * (now["decode_seconds"] - stats["decode_seconds"]) / steps,
                **of_a_step(sleeps, wall / steps),
                "threads": used,
            }
        )
        del iterator, batches
        # Each is complete: what was measured is kept if a later one fails.
        print(harness.RESULT + json.dumps({**alone, "variants": results}), flush=True)
    return {**alone, "variants": results}


def main() -> None:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--mode", default="compile", choices=list(train.MODES))
    parser.add_argument("--shares", nargs="+", default=["0.0", "0.2", "0.4", "auto"])
    known = ", ".join(WITHOUT)
    parser.add_argument(
        "--without", nargs="+", default=WITHOUT[:1], help=f"{known}; or several: a,b"
    )
    parser.add_argument("--stream", default="own", choices=train.STREAMS, help="of the training")
    args = harness.parse_arguments(parser)
    if unknown := {part for parts in args.without for part in parts.split(",")} - {*WITHOUT}:
        parser.error(f"--without takes {known}, got {', '.join(sorted(unknown))}")
    if args.cpu and args.without != WITHOUT[:1]:
        parser.error("--without leaves out what runs on a GPU: not with --cpu")
    shares = [share if share == "auto" else float(share) for share in args.shares]
    device = harness.Device()
    document = harness.Document("contention", args, device)
    task = {
        "model": args.model,
        "mode": args.mode,
        "variants": [(share, without) for share in shares for without in args.without],
        "settings": harness.settings(args),
        "timing": {"warmup": args.warmup, "seconds": args.seconds},
        "stream": args.stream,
    }
    result = harness.run_child(__file__, task, device=device, timeout=args.timeout)
    variants = result.pop("variants", [])
    for variant in variants:
        document.add({**result, **variant})
    if len(variants) < len(task["variants"]):
        document.add({"error": f"ended after {len(variants)} variants", **result})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        harness.child_main(measure)
    main()
