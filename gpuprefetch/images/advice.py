"""What a user is told once of a loader that works, but is slow or reads too much."""

from __future__ import annotations

import warnings

import torch
from torch.utils.data import DataLoader

from gpuprefetch.connections import shortage
from gpuprefetch.core.nested import Batch, Loader, tensors
from gpuprefetch.core.ranks import same_on_ranks
from gpuprefetch.core.remarks import remark
from gpuprefetch.images.collate import encoded_leaves
from gpuprefetch.images.share import usable_cores

_UNPINNED = (
    "The wrapped loader does not pin its memory, so copies to the GPU block and overlap less. Pass "
    "pin_memory=True to the DataLoader."
)
_NO_DEVICE = (
    "gpuprefetch: torch sees no CUDA device, so decode and transforms run on the CPU. The results "
    'are the same, and slower. If that is meant, say so: device="cpu".'
)
_NO_WORKERS = (
    "gpuprefetch: the DataLoader has num_workers=0, so the loop waits while each batch is read. "
    "Give it workers, one for each core that is free: DataLoader(..., num_workers={workers})."
)
_MOST_WORKERS = 8  # of what is advised: more is for the user to try


class Advice:
    """Warns once of each kind in the life of a prefetcher.

    ``chosen`` says that the user has chosen the device.
    """

    def __init__(self, loader: Loader, device: torch.device, *, chosen: bool) -> None:
        self._lacks_device = device.type == "cpu" and not chosen
        self._lacks_workers = isinstance(loader, DataLoader) and loader.num_workers == 0
        self._told_of_ranks = False
        self._saw_batch = device.type != "cuda"  # what makes copies slow is of no interest there
        self._can_pin = hasattr(loader, "pin_memory")  # which a list of batches has not

    def of_setting(self) -> None:
        """Remark on what makes every batch slow."""
        if self._lacks_device:
            remark(_NO_DEVICE)
        if self._lacks_workers:
            remark(_NO_WORKERS.format(workers=min(usable_cores(), _MOST_WORKERS)))

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
