"""What a user is told once of a loader that works, but is slow or reads too much."""

from __future__ import annotations

import warnings

import torch

from gpuprefetch.connections import shortage
from gpuprefetch.core.nested import Batch, Loader, tensors
from gpuprefetch.core.ranks import same_on_ranks
from gpuprefetch.images.collate import encoded_leaves

_UNPINNED = (
    "The wrapped loader does not pin its memory, so copies to the GPU block and overlap less. Pass "
    "pin_memory=True to the DataLoader."
)


class Advice:
    """Warns once of each kind in the life of a prefetcher."""

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self._told_of_ranks = False
        self._saw_batch = device.type != "cuda"  # what makes copies slow is of no interest there
        self._can_pin = hasattr(loader, "pin_memory")  # which a list of batches has not

    def of_ranks(self, prefetcher: object, loader: Loader) -> None:
        """Warn where every rank reads the whole dataset."""
        if not self._told_of_ranks and (words := same_on_ranks(prefetcher, loader)):
            self._told_of_ranks = True
            warnings.warn(words, stacklevel=3)

    def of_first_batch(self, batch: Batch) -> None:
        """Warn of what makes decode or copies slow, at the first batch."""
        if self._saw_batch:
            return
        self._saw_batch = True
        parts = [images.pixels for images in encoded_leaves(batch)]
        if parts and (text := shortage()):
            warnings.warn(text, stacklevel=2)
        host = (part for part in parts or tensors(batch) if part.device.type == "cpu")
        if self._can_pin and any(part.numel() and not part.is_pinned() for part in host):
            warnings.warn(_UNPINNED, stacklevel=2)
