"""This process among those that torchrun has started; without torchrun, the only one."""

import contextlib
import gc
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
LOCAL_WORLD = int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def take_cores(count: int | None = None) -> None:
    """Keep to so many of the machine's cores, which no other rank keeps to; by default a fair part.

    To be called before there are threads: each has the cores of the one that started it.
    """
    cores = sorted(os.sched_getaffinity(0))
    if count and count * LOCAL_WORLD > len(cores):
        raise SystemExit(f"{LOCAL_WORLD} ranks of {count} cores need more than {len(cores)}")
    count = count or max(len(cores) // LOCAL_WORLD, 1)
    first = LOCAL_RANK * count
    os.sched_setaffinity(0, [cores[i % len(cores)] for i in range(first, first + count)])
    if LOCAL_WORLD > 1:
        os.environ["LOCAL_WORLD_SIZE"] = "1"  # or the library would share these out once more


@contextlib.contextmanager
def process_group(cpu: bool) -> Iterator[torch.device]:
    """Join the others, with one GPU each, and give that; where nothing failed, leave them."""
    device = torch.device("cpu" if cpu else f"cuda:{LOCAL_RANK}")
    if not cpu:
        torch.cuda.set_device(device)
    if WORLD > 1:
        options = {} if cpu else {"device_id": device}
        dist.init_process_group("gloo" if cpu else "nccl", **options)
    yield device
    if WORLD > 1:
        # A DDP model is in a cycle and holds the group, whose threads must have ended at exit.
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
