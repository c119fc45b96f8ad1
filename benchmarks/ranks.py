"""This process among those that torchrun has started; without torchrun, the only one."""

import contextlib
import gc
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))


@contextlib.contextmanager
def process_group(cpu: bool) -> Iterator[torch.device]:
    """Join the others, with a GPU of its own, and give that; where nothing failed, leave them."""
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
