"""A loader made ready to be measured: without an end, and with other settings."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from gpuprefetch.core.source import changed, sampler_of
from gpuprefetch.core.stats import Stats
from gpuprefetch.images.share import Balancer
from gpuprefetch.prefetcher import DataPrefetcher


def probe(loader: Any, **values: Any) -> Any:
    """A copy of a DataLoader, or a prefetcher, with these attributes, whose epochs do not end."""
    if isinstance(loader, DataPrefetcher):
        clone, stage, balancer = copy.copy(loader), loader._pipeline, loader._balancer
        clone._loader = probe(loader._loader, **values)
        clone._progress.resumes = False
        share = stage.packer.share.clone().share_memory_()
        clone._balancer = Balancer(share, clone, fixed=balancer.chosen)
        packer = replace(stage.packer, share=share)
        stats = Stats()
        clone._pipeline = replace(
            stage,
            packer=packer,
            decoding=stage.decoding.anew(stats=stats),
            tolerance=replace(stage.tolerance, seen={}, stats=stats),
            stats=stats,
        )
        clone.stats = clone._pipeline.stats
        return clone
    values["persistent_workers"] = False
    if values.get("num_workers") and loader.prefetch_factor is None:
        values["prefetch_factor"] = 2
    if not isinstance(loader.dataset, IterableDataset):
        name = sampler_of(loader)
        values[name] = _Again(getattr(loader, name))
    return changed(loader, **values)


def endless(batches: Iterable[Any]) -> Generator[Any]:
    """Epoch after epoch."""
    empty = False
    while not empty:
        empty = True
        for batch in batches:
            empty = False
            yield batch
    raise ValueError("the loader has no batch to measure: its dataset or sampler is empty.")


class _Again:
    """A sampler from the start again wherever it ends, so that no epoch's start is measured."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        return endless(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


class Workers:
    """The processes that load, those started since this was made: without any, this thread."""

    def __init__(self) -> None:
        self._others = {child.pid for child in multiprocessing.active_children()}

    def busy_seconds(self) -> float:
        """For how long they have computed or waited for a core so far; 0 outside of Linux."""
        pids = {child.pid for child in multiprocessing.active_children()} - self._others
        seconds = 0.0
        for place in pids or ["thread-self"]:
            file = Path(f"/proc/{place}/schedstat")
            if file.exists():
                ran, queued, _ = file.read_text().split()
                seconds += (int(ran) + int(queued)) / 1e9
        return seconds
