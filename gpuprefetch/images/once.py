"""Prepare one batch outside of any epoch: nothing is counted, and no worker is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from gpuprefetch.core.loaders import TorchLoader
from gpuprefetch.core.nested import Batch, Sample
from gpuprefetch.core.ranks import Ranks
from gpuprefetch.core.samplers import Key
from gpuprefetch.core.stats import Stats
from gpuprefetch.core.streams import own_modes
from gpuprefetch.images.apart import Apart
from gpuprefetch.images.collate import HostStage, announce
from gpuprefetch.images.notes import Noted, Notes
from gpuprefetch.images.packer import Packer
from gpuprefetch.images.stage import Pipeline
from gpuprefetch.images.tolerance import Tolerance


class Named(NamedTuple):
    """The samples of a batch, as their random parameters depend on them."""

    names: Sequence[int]
    repeats: Sequence[int]


def read_samples(dataset: Any, keys: Sequence[Key]) -> list[Sample]:
    """Read samples in this process, as torch's fetcher does."""
    fetch = getattr(dataset, "__getitems__", None)
    return list(fetch(list(keys))) if fetch else [dataset[key] for key in keys]


def collated(
    loader: TorchLoader, packer: Packer, samples: list[Sample], named: Named | Noted
) -> Batch:
    """Collate and pack samples in this process, as a worker does."""
    collate = HostStage(loader.collate_fn, packer)
    announce(None, collate.token, named.names, named.repeats)
    return collate(samples)


def apart_from_epochs(
    pipeline: Pipeline,
    packer: Packer,
    on_error: str,
    *,
    ranks: Ranks,
    only: int | None = None,
    after: Callable[[Apart, int], object] | None = None,
) -> Pipeline:
    """A copy of a prefetcher's stage whose counters, bad images and notes are nobody's."""
    stats = Stats()
    return pipeline.for_epoch(
        packer=packer,
        tolerance=Tolerance(on_error, None, stats),
        decoding=pipeline.decoding.anew(stats=stats),
        stats=stats,
        balancer=None,
        notes=Notes(),
        ranks=ranks,
        only=only,
        after=after,
    )


def carry_out(stage: Pipeline, batch: Batch, number: int, epoch: int) -> Batch:
    """Decode and transform a batch, and wait for it."""
    device = stage.device
    cuda = device.type == "cuda"
    with own_modes(device), torch.cuda.device(device) if cuda else nullcontext():
        result = stage.run(batch, number, epoch, stage.cost(batch))
        if cuda:
            torch.cuda.current_stream().synchronize()  # until the decoder has read the buffer
    return result
