"""The ranks of a distributed run: which one this is, and whether others get the same samples."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from gpuprefetch.core.loaders import is_stateful, is_stream
from gpuprefetch.core.nested import Loader
from gpuprefetch.core.samplers import (
    Sampler,
    attribute,
    generators_of,
    number,
    sampler_name,
    samplers_of,
)

# What to do instead of accelerator.prepare(prefetcher).
INTO_PREPARED = (
    "put the prefetcher into what accelerator.prepare(loader) returns: prepared.base_dataloader = "
    "DataPrefetcher(prepared.base_dataloader, device=accelerator.device)"
)

# Where samplers of torch, timm, torchvision and accelerate keep their rank, and how many there are.
_KNOWN_RANKS = (
    ("rank", ("num_replicas", "world_size")),
    ("process_index", ("num_processes",)),
)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train together."""

    rank: int = 0
    count: int = 1


def rank() -> int:
    """The rank by torch.distributed, else by torchrun's variables."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return _number_in("RANK", 0) if world_size() > 1 else 0


def world_size() -> int:
    """The number of ranks by torch.distributed, else by torchrun's variables."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return _number_in("WORLD_SIZE", 1)


def _number_in(variable: str, default: int) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdigit() else default


def ranks_of(loader: Loader) -> Ranks:
    """The ranks for all that is known: a sampler may know where torch.distributed does not run."""
    if world_size() > 1:
        return Ranks(rank(), world_size())
    for sampler in samplers_of(loader):
        for name, names_of_count in _KNOWN_RANKS:
            here = number(sampler, name)
            if here is not None:
                counts = (number(sampler, name) for name in names_of_count)
                return Ranks(here, next((count for count in counts if count is not None), 1))
    return Ranks()


def sampling_rank(loader: Loader) -> int:
    """The rank that random parameters depend on.

    0 if the sampler is known to give each rank different samples: a picture then has the same
    parameters on any rank.
    """
    if not isinstance(loader, DataLoader) or is_stream(loader) or shares_out(loader):
        return 0
    found = (number(sampler, "rank") for sampler in samplers_of(loader))
    return next((here for here in found if here is not None), rank())


def shares_out(loader: Loader) -> bool:
    """Whether the sampler is known to give each rank different samples, but for padding."""
    samplers = samplers_of(loader)
    replaced = any(attribute(sampler, "replacement") for sampler in samplers)
    return any(_shares_out(sampler, replaced=replaced) for sampler in samplers)


def _shares_out(sampler: Sampler, *, replaced: bool) -> bool:
    """The same of one sampler; ``replaced`` says that the order is drawn with replacement."""
    kind = type(sampler)
    if (kind.__module__, kind.__name__) == ("accelerate.data_loader", "BatchSamplerShard"):
        return not replaced
    if isinstance(sampler, DistributedSampler):  # as torch or torchdata wrote it
        where: str = type(sampler).__iter__.__module__
        return where.startswith(("torch.utils.data.", "torchdata."))
    return isinstance(sampler, range)


def may_share_state(loader: Loader) -> bool:
    """Whether a rank may load another's state: no order is drawn from what the state holds."""
    if is_stream(loader) or not isinstance(loader, DataLoader):
        return not is_stateful(loader)
    if shares_out(loader):
        return True
    samplers = samplers_of(loader)
    knows_rank = any(number(sampler, "rank") is not None for sampler in samplers)
    if knows_rank and not generators_of(loader):  # its order is a function of its rank
        return True
    plain = (torch.utils.data.SequentialSampler, torch.utils.data.BatchSampler)
    return all(type(sampler) in plain for sampler in samplers)


def same_on_ranks(prefetcher: object, loader: Loader) -> str | None:
    """A warning for rank 0 where all ranks are known to read the same samples, else None."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks < 2 or dist.get_rank() or not isinstance(loader, DataLoader):
        return None
    sampler: Sampler = getattr(loader, sampler_name(loader))
    if _is_exactly(sampler, "BatchSampler"):
        sampler = attribute(sampler, "sampler")
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


def _is_exactly(sampler: Sampler, *names: str) -> bool:
    """Whether it is of one of torch's classes, or torchdata's: a subclass may share out."""
    modules = (torch.utils.data, sys.modules.get("torchdata.stateful_dataloader.sampler"))
    return type(sampler) in [getattr(module, name, None) for module in modules for name in names]
