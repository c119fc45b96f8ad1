"""Images/s of training with a GPU for each process, beside the same step on a resident batch.

    torchrun --standalone --nproc-per-node=1 benchmarks/scaling.py --data PHOTOS --output x1.json
    torchrun --standalone --nproc-per-node=2 benchmarks/scaling.py --data PHOTOS --output x2.json

The rates are of all processes together. DistributedDataParallel keeps them in step, so steps are
counted, not seconds. With one process there is none, as in the training example. The step runs on a
stream of its own, as in train.py.
"""

import argparse
from typing import Any

import clock
import harness
import loaders
import torch
import train
from ranks import RANK, WORLD, process_group
from torch.nn.parallel import DistributedDataParallel

import gpuprefetch  # noqa: F401  # before the context: it prepares the environment


def wrapped(model: torch.nn.Module) -> torch.nn.Module:
    """As the training example has it."""
    if WORLD == 1:
        return model
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    parallel.broadcast_buffers = False  # as an argument it has another name since torch 2.15
    return parallel


def measure(
    batches: loaders.Batches, step: Any, args: argparse.Namespace, *, warmup_steps: int
) -> dict[str, Any]:
    """Rate of ``step(*batch)`` on all processes, in ``repeats`` windows of ``steps`` each."""
    windows = [warmup_steps, *[args.steps] * args.repeats]
    seconds = clock.time_steps(batches, step, device=args.device, windows=windows)
    images = WORLD * args.batch_size * args.steps
    result = {"images_per_second": clock.quartiles([images / s for s in seconds])}
    if hasattr(batches, "stats"):
        result["stats"] = batches.stats.as_dict()  # of the first rank
    return result


def run(args: argparse.Namespace) -> None:
    document = harness.Document("scaling", args, harness.Device())
    settings = loaders.Settings(**harness.settings(args))
    with train.stream_of("own", args.device):
        for model in args.models:
            # In the first step cuDNN times its algorithms: in one that waits for no other rank.
            train.make_step(model, "eager", args.device)(*next(iter(loaders.synthetic(settings))))
            clock.synchronize(args.device)
            step = train.make_step(model, "eager", args.device, wrapped)
            for column in args.columns:
                batches = loaders.build(column, settings)
                # A resident batch has nothing to settle.
                warmup_steps = args.steps if column == "synthetic" else args.warmup_steps
                measured = measure(batches, step, args, warmup_steps=warmup_steps)
                what = {"model": model, "column": column, "processes": WORLD}
                if RANK == 0:
                    document.add({**what, "batch_size": args.batch_size, **measured})


def main(words: list[str] | None = None) -> None:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet18", "resnet50"])
    parser.add_argument("--columns", nargs="+", default=["synthetic", "gpuprefetch"])
    parser.add_argument("--warmup-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=60, help="of each repeat")
    parser.add_argument("--repeats", type=int, default=5)
    tiny = {"warmup_steps": 1, "steps": 2, "repeats": 2}
    args = harness.parse_arguments(parser, words, **tiny)
    if RANK:
        args.output = None
    with process_group(args.cpu):
        run(args)


if __name__ == "__main__":
    main()
