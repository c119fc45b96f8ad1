"""Exact resume in the middle of an epoch: what the loop has had, and in which order."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader


def random_states(loader: Any) -> list[torch.Tensor]:
    """The states of the generators that an epoch's order is drawn from, torch's own first."""
    return [torch.get_rng_state(), *(g.get_state() for g in _generators(loader))]


def _generators(loader: Any) -> list[torch.Generator]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def _restore(loader: Any, states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for generator, state in zip(_generators(loader), states[1:], strict=True):
        generator.set_state(state)


@contextlib.contextmanager
def _drawn_from(loader: Any, states: list[torch.Tensor]) -> Iterator[None]:
    """Draw from the saved states; torch's own goes on behind as if nothing had been drawn."""
    before = torch.get_rng_state()
    _restore(loader, states)
    try:
        yield
    finally:
        torch.set_rng_state(before)


class _Rest:
    """A sampler without what it gave before the interruption."""

    def __init__(self, sampler: Any, done: int, prepare: Callable[[], None]) -> None:
        self._sampler, self._done, self._prepare = sampler, done, prepare

    def __iter__(self) -> Iterator[Any]:
        # Lazily, as samplers draw their order when the first index is asked for.
        self._prepare()
        yield from islice(iter(self._sampler), self._done, None)

    def __len__(self) -> int:
        return max(len(self._sampler) - self._done, 0)


def rest_of_epoch(
    loader: Any, states: list[torch.Tensor], done: int, continued: bool
) -> Iterator[Any]:
    """Iterate a loader from its batch ``done`` on, in the order that ``states`` give.

    ``continued`` says that the epoch was not the first one of persistent workers: a DataLoader
    draws a seed for its workers when it starts them, before the sampler draws, and not again.

    A map-style dataset reads nothing of what is left out; of an iterable one the batches are read
    and dropped.
    """
    with _drawn_from(loader, states):
        name = "batch_sampler" if getattr(loader, "batch_sampler", None) is not None else "sampler"
        if isinstance(loader, DataLoader) and not _is_iterable(loader):
            # In a copy, with workers of its own. DataLoader forbids the change, not the value.
            loader = copy.copy(loader)
            loader._iterator = None
            prepare = partial(_restore, loader, states) if continued else lambda: None
            vars(loader)[name] = _Rest(getattr(loader, name), done, prepare)
            source: Iterator[Any] = iter(loader)
        else:
            source = islice(iter(loader), done, None)
        # A loader without workers draws its order with the first batch: inside.
        first = list(islice(source, 1))
    return chain(first, source)


def _is_iterable(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, torch.utils.data.IterableDataset)
