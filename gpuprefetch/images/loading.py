"""The loader that is iterated, a copy of the user's: its workers pack, its batches are noted."""

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
from gpuprefetch.core.repeating import restarts
from gpuprefetch.core.samplers import Key, sampler_name
from gpuprefetch.core.workers import WorkerStart
from gpuprefetch.images.collate import Announced, HostStage, announce
from gpuprefetch.images.notes import Notes
from gpuprefetch.images.packer import Packer
from gpuprefetch.images.samples import Origin, Repeats


def has_keys(loader: Loader) -> TypeGuard[TorchLoader]:
    """Whether a loader's sampler gives keys, and may be wrapped: that of torchdata's may not."""
    return (
        isinstance(loader, DataLoader)
        and not hasattr(loader, "state_dict")
        and not is_stream(loader)
    )


def _listed(batch: Key | Sequence[Key]) -> Sequence[Key]:
    """The keys of a batch, in an array if they are integers."""
    if isinstance(batch, (Iterator, str)):  # a key, for the dataset to read
        return [batch]
    for read in (lambda key: array("q", [operator.index(key)]), partial(array, "q"), list):
        with suppress(TypeError, ValueError, OverflowError):
            return read(batch)
    return [batch]  # any other key


class NotedSampler:
    """Wraps the sampler of a loader, and notes what it gives: batches of keys, or keys.

    With each batch the names and repeats of its samples go to the process that reads it.
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
            if epoch is not self._notes:  # the iterator of an earlier epoch goes on
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
    """A copy of a loader. Its workers pack encoded images, and its batches are noted."""
    clone = changed(loader)
    if hasattr(loader, "next_iter_state"):
        loader.next_iter_state = None  # a StatefulDataLoader's: it is for one epoch, the clone's
        vars(clone)["_initial_iter_for_state_dict"] = (
            False  # about an iterator that stays with the user's
        )
    packer.share.share_memory_()  # again: a deep copy of the prefetcher is not in shared memory
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
    """The copy of a loader whose persistent workers serve one epoch after the other.

    An :class:`Origin` in shared memory tells the workers the seed and the epoch.
    """

    def __init__(self) -> None:
        self._loader: TorchLoader | None = None
        self._origin = Origin(0)
        self._epoch: weakref.ref[Lookahead] | None = None  # the latest

    @property
    def loader(self) -> TorchLoader | None:
        """The copy, whose iterator goes on from epoch to epoch."""
        return self._loader

    def drop(self) -> None:
        """Let the next epoch start other workers."""
        self._loader = None
        self._epoch = None

    def begin(
        self, loader: TorchLoader, packer: Packer, seed: int, epoch: int, *, anew: bool
    ) -> tuple[TorchLoader, Packer]:
        """The copy to iterate, and the packer of its workers; ``anew`` starts other workers."""
        running = None if self._epoch is None else self._epoch()
        if running is not None and not running.close():  # its thread waits for the same workers
            self._loader = None
        if self._loader is None or anew or restarts(self._loader) != restarts(loader):
            self._origin = Origin(seed, epoch)
            self._origin.share()
            self._loader = with_packing(loader, replace(packer, origin=self._origin))
        self._origin.set(seed, epoch)
        return self._loader, replace(packer, origin=self._origin)

    def serve(self, epoch: Lookahead) -> None:
        """Remember an epoch whose thread waits for these workers."""
        self._epoch = weakref.ref(epoch)
