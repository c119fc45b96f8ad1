"""The copy of a loader that is iterated: its workers pack images, and its batches are noted."""

from __future__ import annotations

import operator
import weakref
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

from torch.utils.data import DataLoader

from gpuprefetch.core.epoch import Lookahead
from gpuprefetch.core.loaders import TorchLoader, changed, is_stream
from gpuprefetch.core.nested import Loader
from gpuprefetch.core.samplers import Key, sampler_name
from gpuprefetch.core.workers import WorkerStart
from gpuprefetch.images.collate import Announced, HostStage, announce
from gpuprefetch.images.notes import Notes
from gpuprefetch.images.packer import Packer
from gpuprefetch.images.samples import Origin, Repeats


def has_keys(loader: Loader) -> TypeGuard[TorchLoader]:
    """Whether a sampler says what batches are, and may be wrapped: torchdata's may not."""
    return (
        isinstance(loader, DataLoader)
        and not hasattr(loader, "state_dict")
        and not is_stream(loader)
    )


def _listed(batch: Key | Sequence[Key]) -> Sequence[Key]:
    """The samples of a batch, in an array if they are integers."""
    if isinstance(batch, (Iterator, str)):  # to be read by the dataset
        return [batch]
    for read in (lambda key: array("q", [operator.index(key)]), partial(array, "q"), list):
        with suppress(TypeError, ValueError, OverflowError):
            return read(batch)
    return [batch]  # whatever the dataset takes


class NotedSampler:
    """Stands before the sampler of a loader, and notes what it gives: batches of keys, or keys.

    Each batch also says the names and repeats of its samples to the process that reads it.
    """

    def __init__(self, loader: TorchLoader, name: str, collate: HostStage) -> None:
        self._sampler = getattr(loader, name)
        self._gives_batches = name == "batch_sampler"
        self._token = collate.token
        self._dataset = loader.dataset
        self._in_workers = loader.num_workers > 0
        self._notes = Notes()

    def note_into(self, notes: Notes) -> None:
        """Write the notes of the epoch that begins now."""
        self._notes = notes

    def __iter__(self) -> Iterator[Key | Sequence[Key]]:
        return self._noted(self._notes)

    def _noted(self, notes: Notes) -> Iterator[Key | Sequence[Key]]:
        epoch = notes
        counted = Repeats(self._dataset)
        for batch in self._sampler:
            if self._gives_batches and isinstance(batch, Iterator):
                batch = list(batch)  # read once, here
            if epoch is not self._notes:  # the iterator of an earlier one goes on
                epoch = self._notes
                counted = Repeats(self._dataset)
            keys = _listed(batch)
            names, repeats = counted.add(keys)
            notes.add(keys, names, repeats)
            if self._in_workers:
                yield Announced(keys, batch, self._token, names, repeats)
            else:
                yield announce(batch, self._token, names, repeats)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy in the making has no _sampler
            raise AttributeError(name)
        return getattr(self._sampler, name)


def noting_sampler(loader: Loader) -> NotedSampler | None:
    """The sampler that notes the batches of a loader from :func:`with_packing`, if it has one."""
    sampler = getattr(loader, sampler_name(loader), None)
    return sampler if isinstance(sampler, NotedSampler) else None


def with_packing(loader: TorchLoader, packer: Packer) -> TorchLoader:
    """A copy of a loader whose workers pack encoded images, and whose batches are noted."""
    clone = changed(loader)
    if hasattr(loader, "next_iter_state"):
        loader.next_iter_state = None  # a StatefulDataLoader's: good for one epoch, the clone's
        vars(clone)["_initial_iter_for_state_dict"] = False  # of the iterator that it leaves here
    packer.share.share_memory_()  # not in a deep copy of the prefetcher
    collate = HostStage(loader.collate_fn, packer)
    clone.collate_fn = collate
    stateful = hasattr(loader, "next_iter_state")
    clone.worker_init_fn = WorkerStart(loader.worker_init_fn, packer.on_gpu, stateful)
    if has_keys(clone):
        name = sampler_name(clone)
        # DataLoader locks the name, not the value.
        vars(clone)[name] = NotedSampler(clone, name, collate)
    return clone


class LivingWorkers:
    """The copy of a loader with persistent workers, which serve one epoch after the other.

    Seed and epoch reach these workers through an :class:`Origin` in shared memory.
    """

    def __init__(self) -> None:
        self._loader: TorchLoader | None = None
        self._origin = Origin(0)
        self._epoch: weakref.ref[Lookahead] | None = None  # the latest

    @property
    def loader(self) -> TorchLoader | None:
        """The copy, whose length and iterator go on from epoch to epoch."""
        return self._loader

    def drop(self) -> None:
        """Start others for the next epoch."""
        self._loader = None
        self._epoch = None

    def begin(
        self, loader: TorchLoader, packer: Packer, seed: int, epoch: int, *, anew: bool
    ) -> tuple[TorchLoader, Packer]:
        """The copy to iterate, and the packer that its workers have; ``anew`` starts others."""
        running = None if self._epoch is None else self._epoch()
        if running is not None and not running.close():  # its thread waits for the same workers
            self._loader = None
        if self._loader is None or anew:
            self._origin = Origin(seed, epoch)
            self._origin.share()
            self._loader = with_packing(loader, replace(packer, origin=self._origin))
        self._origin.set(seed, epoch)
        return self._loader, replace(packer, origin=self._origin)

    def serve(self, epoch: Lookahead) -> None:
        """Remember an epoch that waits for these workers."""
        self._epoch = weakref.ref(epoch)
