"""Whether several ranks surely train on the same samples, because nobody shares these out."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from gpuprefetch.core.source import sampler_of

# Of accelerator.prepare(), to whoever took the two in another order.
INTO_PREPARED = (
    "put the prefetcher into what accelerator.prepare(loader) returns: prepared.base_dataloader = "
    "DataPrefetcher(prepared.base_dataloader, device=accelerator.device)"
)


def same_on_ranks(prefetcher: Any, loader: Any) -> str | None:
    """What to tell the first of several ranks that surely read the same, if they do."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks < 2 or dist.get_rank() or not isinstance(loader, DataLoader):
        return None
    sampler = getattr(loader, sampler_of(loader))
    if _is_exactly(sampler, "BatchSampler"):
        sampler = sampler.sampler
    replacement = getattr(sampler, "replacement", False)  # each rank may well draw its own
    if replacement or not _is_exactly(sampler, "RandomSampler", "SequentialSampler"):
        return None
    if (accelerate := sys.modules.get("accelerate.state")) is not None:
        active = accelerate.GradientState().active_dataloader
        if getattr(active, "base_dataloader", None) is prefetcher:
            return None  # accelerate iterates it: it shards, or one rank reads for all
    name = type(sampler).__name__
    return (
        f"Every rank reads the whole dataset: there are {ranks} of them, and each DataLoader has a "
        f"{name}. Build it with sampler=DistributedSampler(dataset, shuffle=...), also for "
        "Lightning, which adds one to a DataLoader only. With Hugging Face accelerate "
        f"{INTO_PREPARED}. Where a rank's dataset is its part already, or each is to read all: "
        "warnings.filterwarnings('ignore', 'Every rank reads')."
    )


def _is_exactly(sampler: Any, *names: str) -> bool:
    """Whether it is of one of torch's classes, or torchdata's: a subclass may share out."""
    modules = (torch.utils.data, sys.modules.get("torchdata.stateful_dataloader.sampler"))
    return type(sampler) in [getattr(module, name, None) for module in modules for name in names]
