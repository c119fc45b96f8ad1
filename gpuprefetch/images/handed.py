"""The collate function that a prefetcher hands out: no other loader gives batches half done.

A framework that takes a loader apart, as accelerate's ``skip_first_batches``, builds another
DataLoader of its parts, without the prefetcher. Its batches would hold encoded images, or tensors
that no transform has seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from torch.utils.data import DataLoader

from gpuprefetch.core.loaders import changed
from gpuprefetch.core.nested import Batch, Loader, Sample, select
from gpuprefetch.core.repeating import with_epochs
from gpuprefetch.images.guard import UndecodedError, is_marked

_WHAT_TO_DO = (
    "Put the prefetcher around that one too: prefetcher.over(loader). After accelerate's rest = "
    "skip_first_batches(prepared, n): "
    "rest.base_dataloader = prepared.base_dataloader.over(rest.base_dataloader)."
)


@dataclass(frozen=True)
class HandedOut:
    """The collate function of a prefetcher's loader, as anybody but the prefetcher gets it.

    Args:
        collate_fn: the loader's own.
        drops: what a batch would lack, in words; "" if only encoded images would be left as they
            are.
    """

    collate_fn: Callable[[list[Sample]], Batch]
    drops: str

    def __call__(self, samples: list[Sample]) -> Batch:
        """Collate where nothing is lost by it, else raise :class:`UndecodedError`."""
        if self.drops:
            self._refuse(self.drops)
        batch = self.collate_fn(samples)
        if select(batch, is_marked):
            self._refuse("decode")
        return batch

    def _refuse(self, lacks: str) -> NoReturn:
        raise UndecodedError(
            f"A DataLoader was made of a DataPrefetcher's parts, and its batches lack {lacks}. "
            f"{_WHAT_TO_DO}"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy in the making has no collate_fn
            raise AttributeError(name)
        return getattr(self.collate_fn, name)


def to_iterate(loader: Loader) -> Loader:
    """The loader that a prefetcher iterates in place of a given one; mostly that one itself.

    One that was made of a prefetcher's parts gets the collate function of the first loader, and
    one that repeats itself gets epochs.
    """
    loader = with_epochs(loader)
    given = getattr(loader, "collate_fn", None)
    if isinstance(loader, DataLoader) and isinstance(given, HandedOut):
        return changed(loader, collate_fn=given.collate_fn)
    return loader
