"""A loader made ready to be measured: without an end, and with other settings."""

from __future__ import annotations

import multiprocessing
from collections.abc import Collection, Generator, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from gpuprefetch.core.loaders import changed, is_stream
from gpuprefetch.core.nested import Loader
from gpuprefetch.core.samplers import sampler_name
from gpuprefetch.prefetcher import DataPrefetcher

T = TypeVar("T")


def probe(loader: Loader, **values: object) -> Loader:
    """A copy of a DataLoader, or a prefetcher, with these attributes, whose epochs do not end."""
    if isinstance(loader, DataPrefetcher):
        return loader.over(probe(loader.wrapped, **values))
    values["persistent_workers"] = False
    if values.get("num_workers") and loader.prefetch_factor is None:
        values["prefetch_factor"] = 2
    if not is_stream(loader):
        name = sampler_name(loader)
        values[name] = _Again(getattr(loader, name))
    return changed(loader, **values)


def endless(batches: Iterable[T]) -> Generator[T]:
    """Epoch after epoch."""
    empty = False
    while not empty:
        empty = True
        for batch in batches:
            empty = False
            yield batch
    raise ValueError(
        "the loader has no batch to measure: its dataset or sampler is empty, or drop_last=True "
        "drops its only batch, which is not full."
    )


class _Again:
    """A sampler from the start again wherever it ends, so that no epoch's start is measured."""

    def __init__(self, sampler: Collection[object]) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[object]:
        return endless(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


class Workers:
    """The processes that were started since this was made: they load. Without any, this thread."""

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
