"""How a loader settles: its speed, the workers' share and its memory from the first batch on.

    python benchmarks/settling.py --data PHOTOS --mode compile --seconds 30

Every ``--steps`` steps a row: seconds since the first step, which compiles; the step; what the loop
waited for in it; the share that the workers had decoded of its images, and the share asked of them
now; how long an image took in the GPU's decoder, and the level of what batches on their way may
take: 0 is the least, and 5 brings a second decoder.
"""

import time
from typing import Any

import clock
import harness
import loaders
import train

COUNTED = ["cpu_images", "gpu_images", "decode_seconds", "wait_seconds"]


def rows(batches: Any, step: Any, args: Any) -> list[dict[str, Any]]:
    """The rows of ``args.seconds`` of an endless DataPrefetcher."""
    from gpuprefetch._turns import turns

    iterator, throttle = iter(batches), clock.Throttle(args.device)
    step(*next(iterator))
    clock.synchronize(args.device)
    marks, found, began = clock.Marks(args.device), [], time.perf_counter()
    marks.add()
    before = batches.stats.as_dict()
    while time.perf_counter() < began + args.seconds:
        for _ in range(args.steps):
            throttle.wait()
            step(*next(iterator))
        marks.add()
        stats = batches.stats.as_dict()
        cpu, gpu, decode, wait = (stats[name] - before[name] for name in COUNTED)
        before = stats
        level = max((turn.level for turn in turns.values()), default=0)
        row: dict[str, Any] = {
            "seconds": time.perf_counter() - began,
            "wait_ms": 1000 * wait / args.steps,
            "cpu_share": cpu / max(cpu + gpu, 1),
            "cpu_share_asked": stats["share"],
            "decode_us_per_image": 1e6 * decode / gpu if gpu else None,
            "memory_level": f"level {level}",
        }
        found.append(row)
    clock.synchronize(args.device)
    for row, seconds in zip(found, marks.seconds(), strict=True):
        row["step_ms"] = 1000 * seconds / args.steps
    return found


def main() -> None:
    parser = harness.argument_parser(__doc__, timed=False)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--mode", default="eager", choices=list(train.MODES))
    parser.add_argument("--steps", type=int, default=25, help="of a row")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--stream", default="own", choices=train.STREAMS, help="of the training")
    parser.add_argument("--cpu-share", type=float, help="of the images; by default it is found")
    args = harness.parse_arguments(parser)
    document = harness.Document("settling", args, harness.Device())
    settings = loaders.Settings(**harness.settings(args))
    options = {} if args.cpu_share is None else {"cpu_share": args.cpu_share}
    batches = loaders.build("gpuprefetch", settings, options)  # first: it prepares the environment
    with train.stream_of(args.stream, args.device):
        for row in rows(batches, train.make_step(args.model, args.mode, args.device), args):
            document.add(row)


if __name__ == "__main__":
    main()
