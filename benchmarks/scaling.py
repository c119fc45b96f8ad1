"""Images/s of training with a GPU for each process, beside the same step on a resident batch.

    torchrun --standalone --nproc-per-node=1 benchmarks/scaling.py --data PHOTOS --output x1.json
    torchrun --standalone --nproc-per-node=2 benchmarks/scaling.py --data PHOTOS --output x2.json

The rates are of all processes together. DistributedDataParallel keeps them in step, so steps are
counted, not seconds. With one process there is none, as in the training example.
"""

import gc
import os
import statistics
from typing import Any

import clock
import harness
import loaders
import torch
import torch.distributed as dist
import train
from torch.nn.parallel import DistributedDataParallel

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))


def wrapped(model: torch.nn.Module) -> torch.nn.Module:
    return DistributedDataParallel(model) if WORLD > 1 else model


def measure(
    batches: loaders.Batches, step: Any, device: str, warmup_steps: int, steps: int, repeats: int
) -> dict[str, Any]:
    """Rate of ``step(*batch)`` on all processes, in ``repeats`` windows of ``steps`` each."""
    iterator, throttle = iter(batches), clock.Throttle(device)
    marks, images = clock.Marks(device), 0
    for taken in range(warmup_steps + steps * repeats):
        if taken >= warmup_steps and (taken - warmup_steps) % steps == 0:
            marks.add()
        throttle.wait()
        batch = next(iterator)
        step(*batch)
        images = len(batch[1])
        del batch
    marks.add()
    clock.synchronize(device)
    seconds = marks.seconds()
    return {
        "images_per_second": clock.quartiles([WORLD * images * steps / s for s in seconds]),
        "step_ms": statistics.median(1000 * s / steps for s in seconds),
    }


def main() -> None:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet18", "resnet50"])
    parser.add_argument("--loaders", nargs="+", default=["synthetic", "gpuprefetch"])
    parser.add_argument("--warmup-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=60, help="of each repeat")
    args = harness.parse_arguments(parser)
    import gpuprefetch  # noqa: F401  # before the context: it prepares the environment

    if not args.cpu:
        torch.cuda.set_device(LOCAL_RANK)
    if WORLD > 1:
        dist.init_process_group("gloo" if args.cpu else "nccl")
    if RANK:
        args.output = None
    document = harness.Document("scaling", args, harness.Device())
    settings = loaders.Settings(**harness.settings(args))
    for model in args.models:
        step = train.make_step(model, "eager", args.device, wrapped)
        for spec in args.loaders:
            loader, options = loaders.parse(spec)
            batches = loaders.build(loader, settings, options)
            measured = measure(
                batches, step, args.device, args.warmup_steps, args.steps, args.repeats
            )
            del batches
            gc.collect()
            what = {"model": model, "loader": spec, "processes": WORLD}
            if RANK == 0:
                document.add({**what, **measured})
    if WORLD > 1:
        del step
        gc.collect()  # a DDP model is in a cycle and holds the group
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
