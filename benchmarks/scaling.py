"""Images/s of training with a GPU for each process, beside the same step on a resident batch.

    torchrun --standalone --nproc-per-node=1 benchmarks/scaling.py --data PHOTOS --output x1.json
    torchrun --standalone --nproc-per-node=2 benchmarks/scaling.py --data PHOTOS --output x2.json
    torchrun --standalone --nproc-per-node=2 benchmarks/scaling.py --data PHOTOS --cores-per-rank 4
    torchrun --standalone --nproc-per-node=8 benchmarks/scaling.py --data PHOTOS --epochs 5 \\
        --files 13000

The rates are of all processes together. DistributedDataParallel keeps them in step, so steps are
counted, not seconds. With one process there is none, as in the training example. The step runs on
another stream than the default, as in train.py. Each rank keeps to its cores: an equal part, or as
many as ``--cores-per-rank`` says, so that two ranks stand for the first two of eight.

Each column runs in every round, and warms up until the first rank's windows stand still. With
``--epochs`` a rank has ``--files`` photos in each, by a ``DistributedSampler`` that is told its
number; the rates have the epochs' edges. ``host_gib`` is the machine's memory in use beyond what
was before the loader, ``shared_gib`` what of it is in ``/dev/shm``: of all ranks together.
"""

import argparse
import gc
import time
from collections.abc import Iterator
from typing import Any

import clock
import facts
import harness
import loaders
import photos
import torch
import torch.distributed as dist
import train
from ranks import RANK, WORLD, process_group, take_cores
from torch.nn.parallel import DistributedDataParallel

import gpuprefetch  # noqa: F401  # before the context: it prepares the environment


def wrapped(model: torch.nn.Module) -> torch.nn.Module:
    """As the training example has it."""
    if WORLD == 1:
        return model
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    parallel.broadcast_buffers = False  # as an argument it has another name since torch 2.15
    return parallel


class Numbered:
    """Batches of a loader that is told the number of each epoch, as a sampler of ranks must be."""

    def __init__(self, batches: loaders.Batches) -> None:
        self._batches = batches
        self._epoch = 0

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self._batches, "set_epoch"):
            self._batches.set_epoch(self._epoch)
        self._epoch += 1
        return iter(self._batches)


def agreed(flag: bool, args: argparse.Namespace) -> bool:
    """What the first rank says: all of them have to take as many steps."""
    if WORLD == 1:
        return flag
    said = torch.tensor([flag], device=args.device)
    dist.broadcast(said, 0)
    return bool(said)


def settle(loop: clock.Loop, args: argparse.Namespace) -> dict[str, Any]:
    """Windows of ``steps`` until the rate stands still, or for ``most_windows``.

    Slabs are pinned one by one in the first batches, and with eight ranks that takes long.
    """
    rates: list[float] = []
    while len(rates) < args.most_windows:
        begin = time.perf_counter()
        take(loop, args.steps)
        rates.append(1 / (time.perf_counter() - begin))
        if agreed(clock.stands_still(rates), args):
            break
    return {"settled": clock.stands_still(rates), "settle_steps": args.steps * len(rates)}


def take(loop: clock.Loop, steps: int) -> None:
    for _ in range(steps):
        loop.take()


def measure(batches: loaders.Batches, step: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Rate of ``step(*batch)`` on all processes: in ``repeats`` windows of ``steps``, or epochs."""
    if args.epochs:
        result = measure_epochs(batches, step, args)
    else:
        loop = clock.Loop(iter(batches), step, args.device)
        result = settle(loop, args)
        marks = clock.Marks(args.device)
        marks.add()
        for _ in range(args.repeats):
            take(loop, args.steps)
            marks.add()
        clock.synchronize(args.device)
        images = WORLD * args.batch_size * args.steps
        rates = [images / seconds for seconds in marks.seconds()]
        result["images_per_second"] = clock.quartiles(rates)
    if hasattr(batches, "stats"):
        result["stats"] = batches.stats.as_dict()  # of the first rank
    return result


def measure_epochs(batches: loaders.Batches, step: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Rate of whole epochs on all processes, but the first one; the times are the first rank's."""
    result = clock.measure_epochs(
        Numbered(batches), step, device=args.device, epochs=args.epochs, began=time.time()
    )
    result["images"] *= WORLD
    result["images_per_second_overall"] *= WORLD
    rates = [WORLD * rate for rate in result["images_per_second"]["values"]]
    return {**result, "images_per_second": clock.quartiles(rates), "epochs": args.epochs}


def wait_for_all() -> None:
    if WORLD > 1:
        dist.barrier()


def settings_of(args: argparse.Namespace) -> loaders.Settings:
    """Of an epoch without end, or of one that is this rank's share of the photos."""
    if not args.epochs:
        return loaders.Settings(**harness.settings(args))
    files = WORLD * args.files
    if RANK == 0:
        photos.photo_folder(args.data, files)  # not by all at once
    wait_for_all()
    return loaders.Settings(**harness.settings(args, files), images=args.files)


def run(args: argparse.Namespace) -> None:
    limit = harness.TimeLimit(args.stop_after)
    document = harness.Document("scaling", args, harness.Device())
    settings = settings_of(args)
    with train.stream_of("own", args.device):
        for model in args.models:
            # In the first step cuDNN times its algorithms: in one that waits for no other rank.
            train.make_step(model, "eager", args.device)(*next(iter(loaders.synthetic(settings))))
            clock.synchronize(args.device)
            step = train.make_step(model, "eager", args.device, wrapped)
            what: dict[str, Any] = {"model": model, "processes": WORLD, "cores": harness.cores()}
            if args.cores_per_rank:  # a separate row in the table
                what["model"] += f", {args.cores_per_rank} cores a GPU"
            if args.workers != harness.cores():
                what["model"] += f", {args.workers} workers a GPU"
            if args.epochs:
                what["model"] += f", epochs of {args.files:,} photos a GPU"
            what |= {"workers": args.workers, "batch_size": args.batch_size}
            for number, column in harness.in_rounds(args.columns, args.rounds):
                what |= {"column": column}
                if agreed(document.is_done(what, number), args):
                    continue
                if agreed(limit.is_over(), args):
                    return
                started = time.monotonic()
                wait_for_all()
                before = facts.host_memory()
                wait_for_all()  # no rank's loader is in what was before
                batches = loaders.build(column, settings)
                measured = measure(batches, step, args)
                after = facts.host_memory()
                measured |= {name: after[name] - before[name] for name in after}
                wait_for_all()  # every rank's loader is in it
                del batches
                gc.collect()  # its threads and workers have ended when the next loader begins
                limit.note(time.monotonic() - started)
                if RANK == 0:
                    document.add({**what, "round": number, **measured})


def main(words: list[str] | None = None) -> None:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet18", "resnet50"])
    parser.add_argument("--columns", nargs="+", help="loaders, with options")
    parser.add_argument("--cores-per-rank", type=int, help="default: an equal part of them all")
    parser.add_argument("--epochs", type=int, default=0, help="whole epochs of --files photos")
    parser.add_argument("--rounds", type=int, default=2, help="each the other way round")
    parser.add_argument("--steps", type=int, default=60, help="of each window")
    parser.add_argument("--most-windows", type=int, default=20, help="of the warm-up")
    parser.add_argument("--repeats", type=int, default=5, help="windows that are measured")
    parser.add_argument("--stop-after", type=float, help="seconds, for a time that is limited")
    tiny = {"rounds": 1, "most_windows": 1, "steps": 2, "repeats": 2}
    take_cores(parser.parse_args(words).cores_per_rank)  # before the workers are counted
    args = harness.parse_arguments(parser, words, **tiny)
    args.columns = args.columns or ["synthetic", "gpuprefetch"] + ["dali"] * (not args.cpu)
    if RANK:
        args.output = None
    with process_group(args.cpu):
        run(args)


if __name__ == "__main__":
    main()
