"""Images/s of training with a GPU for each process, beside the same step on a resident batch.

    torchrun --standalone --nproc-per-node=1 benchmarks/scaling.py --data PHOTOS --output x1.json
    torchrun --standalone --nproc-per-node=2 benchmarks/scaling.py --data PHOTOS --output x2.json
    torchrun --standalone --nproc-per-node=2 benchmarks/scaling.py --data PHOTOS --cores-per-rank 4

The rates are of all processes together. DistributedDataParallel keeps them in step, so steps are
counted, not seconds. With one process there is none, as in the training example. The step runs on
another stream than the default, as in train.py. Each rank keeps to its cores: an equal part, or as
many as ``--cores-per-rank`` says, so that two ranks stand for the first two of eight.
"""

import argparse
import gc
from typing import Any

import clock
import harness
import loaders
import torch
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
            what: dict[str, Any] = {"model": model, "processes": WORLD, "cores": harness.cores()}
            if args.cores_per_rank:  # a separate row in the table
                what["model"] = f"{model}, {args.cores_per_rank} cores a GPU"
            for column in args.columns:
                batches = loaders.build(column, settings)
                # A resident batch has nothing to settle.
                warmup_steps = args.steps if column == "synthetic" else args.warmup_steps
                measured = measure(batches, step, args, warmup_steps=warmup_steps)
                del batches
                gc.collect()  # its threads and workers have ended when the next loader begins
                what |= {"column": column, "workers": args.workers, "batch_size": args.batch_size}
                if RANK == 0:
                    document.add({**what, **measured})


def main(words: list[str] | None = None) -> None:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet18", "resnet50"])
    parser.add_argument("--columns", nargs="+", help="loaders, with options")
    parser.add_argument("--cores-per-rank", type=int, help="default: an equal part of them all")
    parser.add_argument("--warmup-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=60, help="of each repeat")
    parser.add_argument("--repeats", type=int, default=5)
    tiny = {"warmup_steps": 1, "steps": 2, "repeats": 2}
    take_cores(parser.parse_args(words).cores_per_rank)  # before the workers are counted
    args = harness.parse_arguments(parser, words, **tiny)
    args.columns = args.columns or ["synthetic", "gpuprefetch"] + ["dali"] * (not args.cpu)
    if RANK:
        args.output = None
    with process_group(args.cpu):
        run(args)


if __name__ == "__main__":
    main()
