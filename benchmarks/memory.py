"""GPU memory: the largest batch that trains under a cap, and what a finished loader still holds.

    python benchmarks/memory.py --data PHOTOS --output benchmarks/results/memory.json
    python benchmarks/memory.py --data PHOTOS --models resnet50 --cap-gib 24 --resolution 0.02
    python benchmarks/memory.py --data PHOTOS --what idle

The cap holds for the whole device, context, decoders and pools outside torch's allocator included:
a ballast tensor leaves what a GPU with ``--cap-gib`` of memory has. Every probe of the search is a
separate process, which trains a few steps.
"""

import gc
import re
from collections.abc import Callable
from itertools import islice
from typing import Any

import clock
import harness
import loaders
import torch
import train

COLUMNS = ["torchvision", "gpuprefetch", "dali"]
MODELS = ["resnet18", "resnet50", "shufflenet_v2_x0_5"]
WHAT = ["largest", "idle"]
ESTIMATE_BATCHES = (32, 64)
# In the words of torch, cuDNN and cuBLAS, C++, nvJPEG and DALI.
OUT_OF_MEMORY = re.compile(
    "out of ?memory|alloc_failed|bad_?alloc|memory ?allocation|allocator (error|fail)"
    "|cuda allocation failed|can't allocate|could not allocate",
    re.IGNORECASE,
)


def used_gib(device: str = "cuda") -> float:
    """Memory in use on the whole device, by all processes; 0 for the CPU."""
    if device == "cpu":
        return 0.0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / harness.GIB


def prepare(column: str) -> None:
    if column.startswith("gpuprefetch"):
        import gpuprefetch  # noqa: F401  # before the context: it prepares the environment


def take_all_but(cap_gib: float) -> torch.Tensor:
    """A ballast that leaves as much of the device as if it had ``cap_gib`` in all."""
    free, total = torch.cuda.mem_get_info()
    ballast = total - int(cap_gib * harness.GIB)
    if not 0 <= ballast <= free:
        raise ValueError(
            f"cap_gib is {cap_gib}, but {free / harness.GIB:.1f} of {total / harness.GIB:.1f} GiB "
            "are free. Choose a cap below the first number, on a GPU that nobody else uses."
        )
    return torch.empty(ballast, dtype=torch.uint8, device="cuda")


def probe(
    model: str, column: str, settings: dict[str, Any], cap_gib: float, steps: int
) -> dict[str, Any]:
    """Train a few steps under the cap: ``{"fits": True}``, or False where the memory ran out."""
    # No more batches than steps: a full queue of large ones would fill the host's shared memory.
    shared = loaders.Settings(**settings, images=steps * settings["batch_size"])
    ballast = None
    try:
        prepare(column)
        if shared.device == "cuda":
            ballast = take_all_but(cap_gib)
        batches = loaders.build(column, shared)
        step = train.make_step(model, "eager", shared.device)
        # Trying algorithms takes workspace, more or less of it near the cap.
        torch.backends.cudnn.benchmark = False
        for images, target in islice(batches, steps):
            step(images, target)
        clock.synchronize(shared.device)
    except Exception as error:
        if not OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}"):
            raise
        return {"fits": False}
    del ballast
    return {"fits": True}


def estimate(model: str, settings: dict[str, Any], cap_gib: float) -> dict[str, Any]:
    """Where to start the search: from torch's own peak at two small batches."""
    peaks = []
    for batch_size in ESTIMATE_BATCHES:
        shared = loaders.Settings(**{**settings, "batch_size": batch_size})
        step = train.make_step(model, "eager", shared.device)
        torch.backends.cudnn.benchmark = False
        for images, target in islice(loaders.synthetic(shared), 3):
            step(images, target)
        peaks.append(torch.cuda.max_memory_allocated())
        del step, images, target
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    small, large = ESTIMATE_BATCHES
    per_image = (peaks[1] - peaks[0]) / (large - small)
    fixed = peaks[0] - small * per_image
    return {"batch_size": int((cap_gib * harness.GIB - fixed) / per_image)}


def largest(fits: Callable[[int], bool], guess: int, resolution: float) -> int:
    """The largest number that fits, to within ``resolution`` of it, found around a guess.

    Args:
        fits: monotone: True up to some number, False beyond it.
        guess: where to start.
        resolution: relative, such as 0.01.
    """
    low = 0
    high = 0
    stride = 0.04
    at = max(1, guess)
    while not (low and high):
        if fits(at):
            low = at
            at += max(1, int(stride * at))
        else:
            high = at
            at -= max(1, int(stride * at))
        if at < 1:
            return 0
        if low and high:
            break
        stride = min(0.5, 2 * stride)
    while high - low > max(1, int(resolution * low)):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def idle(column: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Device memory beyond the context around two epochs of a validation loader.

    ``held_gib`` is what the finished loader still holds: it is referenced before, and gone after.
    """
    shared = loaders.Settings(**settings)
    prepare(column)
    torch.ones(1, device=shared.device)
    before = used_gib(shared.device)
    used = {}
    batches = loaders.build(column, shared)
    for epoch in ("first", "second"):
        for _images, _target in batches:
            pass
        del _images, _target
        gc.collect()
        used[f"after_{epoch}_epoch_gib"] = used_gib(shared.device) - before
        if shared.device == "cuda":
            torch.cuda.empty_cache()
        used[f"after_{epoch}_empty_cache_gib"] = used_gib(shared.device) - before
    del batches
    gc.collect()
    if shared.device == "cuda":
        torch.cuda.empty_cache()
    used["without_loader_gib"] = used_gib(shared.device) - before
    held = used["after_second_empty_cache_gib"] - used["without_loader_gib"]
    return {"held_gib": held, **used}


def measure(what: str, **task: Any) -> dict[str, Any]:
    return {"probe": probe, "estimate": estimate, "idle": idle}[what](**task)


Child = Callable[[dict[str, Any]], dict[str, Any]]


def search(
    child: Child,
    task: dict[str, Any],
    guess: int,
    resolution: float,
    found: dict[str, Any],
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """The largest batch of one loader with one model, and every probe on the way there.

    Args:
        child: runs a task.
        task: of each probe, but for its batch size.
        guess: where to start.
        resolution: see :func:`largest`.
        found: gets ``batch_size``, the largest that has trained; ``finished``; ``probed``, what
            each batch size gave; and the ``error`` of a probe that failed for another reason.
        keep: gets ``found`` after each probe.
    """
    found.update(batch_size=0, finished=False, probed={})

    def fits(batch_size: int) -> bool:
        settings = {**task["settings"], "batch_size": batch_size}
        result = child({**task, "what": "probe", "settings": settings})
        if "error" in result and not OUT_OF_MEMORY.search(result["error"]):
            raise RuntimeError(result["error"])
        fit = found["probed"][batch_size] = result.get("fits", False)
        found["batch_size"] = max(found["batch_size"], batch_size if fit else 0)
        keep(found)
        print(f"  {task['column']} at batch {batch_size}: {fit}", flush=True)
        return fit

    try:
        largest(fits, guess, resolution)
        found["finished"] = True
    except RuntimeError as error:  # of one probe; the other loaders are still measured
        found["error"] = str(error)


def main(words: list[str] | None = None) -> None:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--columns", nargs="+", default=COLUMNS)
    parser.add_argument("--what", nargs="+", default=WHAT, choices=WHAT)
    parser.add_argument("--cap-gib", type=float, default=16.0)
    parser.add_argument("--resolution", type=float, default=0.01, help="of the largest batch")
    parser.add_argument("--guess", type=int, help="where the search starts, not at an estimate")
    parser.add_argument("--steps", type=int, default=6, help="that each probe trains")
    args = harness.parse_arguments(parser, words)
    if args.cpu and "largest" in args.what:
        parser.error("there is no memory to cap on the CPU; with --cpu take --what idle")
    device = harness.Device()
    document = harness.Document("memory", args, device)
    settings = harness.settings(args)

    def child(task: dict[str, Any]) -> dict[str, Any]:
        name, _ = loaders.parse(task.get("column", "synthetic"))
        environment = loaders.ENVIRONMENT.get(name)
        return harness.run_child(
            __file__, task, device=device, environment=environment, timeout=args.timeout
        )

    for column in args.columns if "idle" in args.what else ():
        what = {"what": "idle", "column": column}
        finite = {**settings, "train": False, "images": args.files}
        document.add({**what, **child({**what, "settings": finite})})
    for model in args.models if "largest" in args.what else ():
        task = {"model": model, "settings": settings, "cap_gib": args.cap_gib}
        guess = args.guess or child({**task, "what": "estimate"}).get("batch_size", args.batch_size)
        for column in args.columns:
            probe_task = {**task, "column": column, "steps": args.steps}
            found = {"what": "largest", "model": model, "column": column, "cap_gib": args.cap_gib}
            search(child, probe_task, guess, args.resolution, found, document.keep)
            guess = found["batch_size"] or guess  # the next loader's is not far
            document.add(found)


if __name__ == "__main__":
    harness.child_main(measure)
    main()
