"""The collate function that a prefetcher hands out: no other loader gives batches half done.

A framework that takes a loader apart, as accelerate's ``skip_first_batches``, builds another
DataLoader of its parts, without the prefetcher. Its batches would hold encoded images, or tensors
that no transform has seen. They are :class:`Unfinished` instead, and ``batch.to(device)``, which
such frameworks call, finishes them::

    skip_first_batches(prepared, 3)    DataLoader(dataset, collate_fn=HandedOut, ...)
    worker of that DataLoader          samples  ->  Unfinished
    accelerate, in the main process    Unfinished.to(device)  ->  the batch of the prefetcher
"""

from __future__ import annotations

import secrets
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch.utils.data import DataLoader

from gpuprefetch.core.loaders import changed, loader_within
from gpuprefetch.core.nested import Batch, Loader, Sample, select, to_device
from gpuprefetch.core.repeating import with_epochs
from gpuprefetch.images.guard import UndecodedError, is_marked

_MADE = "A DataLoader was made of a DataPrefetcher's parts, and its batches"
_WHAT_TO_DO = (
    "Put the prefetcher around that one too: prefetcher.over(loader). After accelerate's rest = "
    "skip_first_batches(prepared, n): "
    "rest.base_dataloader = prepared.base_dataloader.over(rest.base_dataloader)."
)
_LATE = f"{_MADE} are decoded and transformed when they are asked for, and not ahead. {_WHAT_TO_DO}"
_UNFINISHED = f"{_MADE} are not decoded and transformed before batch.to(device). {_WHAT_TO_DO}"


class _Given:
    """A loader of batches that come one by one from elsewhere."""

    def __init__(self) -> None:
        self.batches: deque[Batch] = deque()

    def __iter__(self) -> Iterator[Batch]:
        while self.batches:
            yield self.batches.popleft()
        raise RuntimeError(
            "on_error has left out all images of a batch, and the loader that was made of a "
            f'DataPrefetcher\'s parts has no other one yet. Use on_error="replace". {_WHAT_TO_DO}'
        )


class Finisher:
    """Makes the prefetcher's batches of those that another loader gave, one by one.

    Args:
        begin: the prefetcher's batches, of those that a loader gives, in the epoch of a number.
        device: where they arrive.
        length: of an epoch, in batches. After as many the next epoch begins.
    """

    def __init__(
        self, begin: Callable[[Loader, int], Iterator[Batch]], device: torch.device, length: int
    ) -> None:
        self.device = device
        self._begin = begin
        self._length = length
        self._given = _Given()
        self._count = 0  # of batches so far
        self._epoch: int | None = None
        self._finished: Iterator[Batch] = iter(())

    def finish(self, batch: Batch, epoch: int) -> Batch:
        """The prefetcher's batch; the first one is of the epoch of this number."""
        if not self._count:
            warnings.warn(_LATE, stacklevel=3)
        epoch += self._count // max(self._length, 1)
        if self._epoch != epoch:
            self._finished = self._begin(self._given, epoch)
            self._epoch = epoch
        self._count += 1
        self._given.batches.append(batch)
        return next(self._finished)


# By the token of the function that was handed out, in the process that has done it.
_finishers: WeakValueDictionary[bytes, Finisher] = WeakValueDictionary()


def registered(finisher: Finisher) -> bytes:
    """The token by which this process finds a finisher, as long as it is alive."""
    token = secrets.token_bytes()
    _finishers[token] = finisher
    return token


class Unfinished:
    """A batch of a loader that was made of a prefetcher's parts; :meth:`to` finishes it."""

    def __init__(
        self, batch: Batch, epoch: int, token: bytes, finisher: Finisher | None = None
    ) -> None:
        self._batch = batch
        self._epoch = epoch
        self._token = token
        self._finisher = finisher

    def __reduce__(self) -> tuple[type[Unfinished], tuple[object, ...]]:
        return Unfinished, (self._batch, self._epoch, self._token)

    def to(self, device: torch.device | str | int, *args: object, **kwargs: object) -> Batch:
        """The batch as the prefetcher gives it, on ``device``."""
        finisher = self._finisher or _finishers.get(self._token)
        if finisher is None:
            raise UndecodedError(_UNFINISHED)
        batch = finisher.finish(self._batch, self._epoch)
        asked = torch.device(device)
        return batch if asked == finisher.device else to_device(batch, asked)

    def _refuse(self, *args: object) -> NoReturn:
        # A ** of what raises an AttributeError says that it is no mapping.
        raise TypeError(_UNFINISHED)

    __iter__ = __getitem__ = __len__ = keys = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        raise UndecodedError(_UNFINISHED)


class HandedOut:
    """The collate function of a prefetcher's loader, as anybody but the prefetcher gets it.

    Args:
        collate_fn: the loader's own.
        drops: what tensors would lack, in words; "" if only encoded images would be left undone.
        epoch: reads the number of the epoch that comes.
        token: of :func:`registered`; empty if nothing finishes what is left undone.
        finisher: kept alive with this function.
    """

    def __init__(
        self,
        collate_fn: Callable[[list[Sample]], Batch],
        drops: str,
        epoch: Callable[[], int],
        token: bytes = b"",
        finisher: Finisher | None = None,
    ) -> None:
        self.collate_fn = collate_fn
        self._drops = drops
        self._number = epoch
        self._epoch: int | None = None
        self._token = token
        self._finisher = finisher

    def __call__(self, samples: list[Sample]) -> Batch:
        """Collate. What is then left undone is :class:`Unfinished`, or an error."""
        if self._epoch is None:  # once, as the loader begins: a sampler may number ahead
            self._epoch = self._number()
        if self._drops and not self._token:
            raise UndecodedError(f"{_MADE} lack {self._drops}. {_WHAT_TO_DO}")
        batch = self.collate_fn(samples)
        if not self._drops and not select(batch, is_marked):
            return batch
        if not self._token:
            raise UndecodedError(f"{_MADE} lack decode. {_WHAT_TO_DO}")
        return Unfinished(batch, self._epoch, self._token, self._finisher)

    def __reduce__(self) -> tuple[Callable[..., HandedOut], tuple[object, ...]]:
        return _received, (self.collate_fn, self._drops, self._number(), self._token)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy in the making has no collate_fn
            raise AttributeError(name)
        return getattr(self.collate_fn, name)


def _received(
    collate_fn: Callable[[list[Sample]], Batch], drops: str, epoch: int, token: bytes
) -> HandedOut:
    """The same in a worker; the finisher stays behind."""
    return HandedOut(collate_fn, drops, lambda: epoch, token)


def to_iterate(loader: Loader) -> Loader:
    """The loader that a prefetcher iterates in place of a given one; mostly that one itself.

    One that was made of a prefetcher's parts gets the collate function of the first loader, one
    that repeats itself gets epochs, and a WebLoader of webdataset's has a DataLoader in it.
    """
    loader = with_epochs(loader_within(loader))
    given = getattr(loader, "collate_fn", None)
    if isinstance(loader, DataLoader) and isinstance(given, HandedOut):
        return changed(loader, collate_fn=given.collate_fn)
    return loader
