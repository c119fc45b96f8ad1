"""Exact resume in the middle of an epoch: what the loop has had, and in which order."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from gpuprefetch.core.errors import is_end, scope, text_of, unexpected_end
from gpuprefetch.core.state import decoded
from gpuprefetch.core.workers import gone


def kind(loader: Any) -> str:
    """What two loaders must have in common for one's state to mean something to the other."""
    batch_size = attribute(attribute(loader, "batch_sampler"), "batch_size")
    own, shared = "a" if is_stateful(loader) else "no", ""
    if isinstance(getattr(loader, "dataset", None), IterableDataset) and not is_stateful(loader):
        # The workers share its samples out, and each makes batches of what it has.
        shared = f"samples shared out to {max(getattr(loader, 'num_workers', 0), 1)} workers, "
    elif hasattr(loader, "next_iter_state"):  # torchdata's, whose state has one of each worker
        shared = f"{loader.num_workers} workers, "
    generators = len(_generators(loader))
    return f"{shared}{batch_size=}, {generators} generators and {own} state of its own"


def in_order(loader: Any) -> bool:
    """Whether the number of a batch says which of the sampler's it is, or the loader knows."""
    workers = getattr(loader, "num_workers", 0)
    return workers < 2 or getattr(loader, "in_order", True) or is_stateful(loader)


def rank() -> int:
    """Of torch.distributed, or else torchrun's for a process that has not initialized it."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return _number_in("RANK", 0) if world_size() > 1 else 0


def world_size() -> int:
    """How many ranks there are, likewise."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return _number_in("WORLD_SIZE", 1)


def _number_in(variable: str, default: int) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdigit() else default


def is_stateful(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def changed(loader: DataLoader[Any], **values: Any) -> DataLoader[Any]:
    """A copy of a loader, with workers of its own, and with attributes that DataLoader locks."""
    clone = copy.copy(loader)
    clone._iterator = None
    vars(clone).update(values)
    return clone


def sampler_of(loader: Any) -> str:
    """The attribute of a loader that says which samples come next."""
    return "sampler" if getattr(loader, "batch_sampler", None) is None else "batch_sampler"


MOST_SAMPLERS = 32  # of a loader: one that makes another when asked for it would have no end


def attribute(owner: Any, name: str) -> Any:
    """An attribute of a user's sampler; None where it has none, or a property of it fails."""
    try:
        return getattr(owner, name, None)
    except Exception:
        return None


def _samplers(loader: Any) -> list[Any]:
    """The samplers of a loader and those within them, as in ``BatchSampler(sampler)``."""
    found = [loader]
    for outer in found:  # which grows
        for name in ("sampler", "batch_sampler"):
            inner = attribute(outer, name)
            if inner is None or any(inner is other for other in found):
                continue
            # A property may make a sampler when it is asked for one: the first of a class will do.
            made = attribute(outer, name) is not inner
            if made and any(type(inner) is type(other) for other in found):
                continue
            if len(found) <= MOST_SAMPLERS:
                found.append(inner)
    return found[1:]


def _generators(loader: Any) -> list[torch.Generator]:
    found = [attribute(sampler, "generator") for sampler in _samplers(loader)]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def owners(loader: Any) -> list[Any]:
    """Who numbers epochs, of a loader and its parts: whatever has a ``set_epoch``."""
    found = (loader, *_samplers(loader), getattr(loader, "dataset", None))
    each = {id(owner): owner for owner in found}.values()
    return [owner for owner in each if callable(attribute(owner, "set_epoch"))]


def epochs_of(loader: Any) -> list[int | None]:
    """The number of the epoch that each of the owners is in; None where it has none."""
    epochs = [attribute(owner, "epoch") for owner in owners(loader)]
    return [epoch if type(epoch) is int else None for epoch in epochs]


def beginning(loader: Any) -> dict[str, Any]:
    """The place of an epoch of ``loader`` that begins now, without the loader's own state."""
    states = [torch.get_rng_state(), *(g.get_state() for g in _generators(loader))]
    continued = isinstance(loader, DataLoader) and (
        loader._iterator is not None or isinstance(loader.generator, _SeedApart)
    )
    return {
        "batches": 0,
        "random_states": [state.numpy().tobytes().hex() for state in states],
        "continued": continued,
        "epochs": epochs_of(loader),
        "samples": _samples_of(loader),
    }


def _samples_of(loader: Any) -> int | None:
    """How many a map-style dataset has, if it says so."""
    dataset: Any = getattr(loader, "dataset", None)
    with suppress(Exception):  # whatever its __len__ raises
        return None if isinstance(dataset, IterableDataset) else len(dataset)
    return None


def _refuse_another_length(loader: Any, place: dict[str, Any]) -> None:
    before, now = place.get("samples"), _samples_of(loader)
    # Lightning has the state of rank 0 loaded by all, whose datasets may be parts.
    if place["batches"] and place.get("drawn", [0])[0] == rank() and None not in (before, now):
        if before != now:
            raise ValueError(
                f"state is of the middle of an epoch of {before} samples; the dataset has {now}. "
                f"Build it as it was, or begin an epoch: set_epoch({place['epoch'] + 1})."
            )


def own_state(loader: Any) -> Any:
    """The state of a loader that has one, else None."""
    if not is_stateful(loader):
        return None
    state = loader.state_dict()
    # What workers send is a copy already. In this process a dataset may hand out live objects.
    return state if getattr(loader, "num_workers", 0) else copy.deepcopy(state)


def _restores(loader: Any) -> bool:
    """Whether the dataset goes back to a state of its own here, perhaps torch's generator too."""
    here = is_stateful(loader) and not getattr(loader, "num_workers", 0)
    return here and hasattr(getattr(loader, "dataset", None), "load_state_dict")


@scope
def _drawing_from(loader: Any, saved: list[Any]) -> Iterator[None]:
    """Draw from the saved states; after that torch's own is what it was."""
    before, states = torch.get_rng_state(), [decoded(state) for state in saved]
    # Not if the caller has restored it, as the next epoch would repeat the order; nor if the
    # dataset may have.
    undone = not _restores(loader) and not torch.equal(before, states[0])
    torch.set_rng_state(states[0])
    # A sampler may have made one since: that draws a seed of its own for each epoch.
    for generator, state in zip(_generators(loader), states[1:], strict=False):
        generator.set_state(state)
    try:
        yield
    finally:
        if undone:
            torch.set_rng_state(before)


_END = object()  # in place of a batch


class _SeedApart(torch.Generator):
    """For the seeds that workers draw as they start, where the uninterrupted run's live on."""


class Source(Iterator[tuple[Any, Any]]):
    """The batches of an epoch, each with the state that the loader itself has after it, or None.

    With the ``place`` of an earlier epoch it goes on there, in the same order: ``batches`` that the
    loop has had, the state after them of the ``loader``, the ``random_states`` that the order is
    drawn from, torch's and the generators', whether workers of an epoch before ``continued``, and
    the samplers' ``epochs``. A map-style dataset reads nothing that was left out; others do, and
    ``skip`` gets the batches.
    """

    def __init__(
        self,
        loader: Any,
        resumed: dict[str, Any] | None = None,
        skip: Callable[[Any], None] = lambda batch: None,
    ) -> None:
        self._loader, self._ahead = loader, list[tuple[Any, Any]]()
        self._skip = skip
        self._iterator: Iterator[Any] = iter(())
        self._alone = False  # whether the workers are of this epoch, whatever they are
        if not resumed:
            self.place = beginning(loader)
            self._iterator = iter(loader)
            self.place["loader"] = own_state(loader)
            return
        self.place = dict(resumed)
        _refuse_another_length(loader, resumed)
        # A stream that goes back by itself draws no order.
        ordered = not (_restores(loader) and isinstance(loader.dataset, IterableDataset))
        with _drawing_from(loader, resumed["random_states"]) if ordered else nullcontext():
            try:
                self._resume(loader, apart=resumed["continued"] or not ordered)
                # A loader without workers draws its order with the first batch: here.
                self._ahead = list(islice(self, 1))
            except BaseException:
                self.close()
                raise

    def _resume(self, loader: Any, *, apart: bool) -> None:
        """Begin after the batches that the loop has had; ``apart`` is the seed of the workers."""
        done, skipped, rest = self.place["batches"], 0, loader
        stateful, plain = is_stateful(loader), isinstance(loader, DataLoader)
        if plain and not (stateful and loader.persistent_workers):  # those keep datasets' states
            rest, self._alone = changed(loader), True
        if plain:
            seeds = _SeedApart().manual_seed(
                hash((torch.initial_seed(), self.place["epoch"], done))
            )
            rest.generator = seeds if apart else rest.generator
            if loader.persistent_workers and rest is not loader:
                loader.generator = seeds  # for the next epoch, which starts its workers anew
        if stateful:
            rest.load_state_dict(copy.deepcopy(self.place["loader"]))
        elif (
            plain
            and type(loader).__iter__ is DataLoader.__iter__  # else it may count its batches
            and not isinstance(loader.dataset, IterableDataset)
        ):
            name = sampler_of(loader)
            rest = changed(rest, **{name: islice(iter(getattr(loader, name)), done, None)})
        else:
            skipped = done
        self._loader, self._iterator = rest, iter(rest)
        for _ in range(skipped):
            batch = self._next_batch()
            if batch is _END:
                break
            self._skip(batch)

    def __next__(self) -> tuple[Any, Any]:
        """The next batch and the loader's state after it; the end has that as its value."""
        if self._ahead:
            return self._ahead.pop()
        if (batch := self._next_batch()) is _END:
            raise StopIteration(own_state(self._loader))
        return batch, own_state(self._loader)

    def _next_batch(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration as error:
            if not is_end(error):
                raise unexpected_end(error, "the dataset") from error
            return _END
        except (ConnectionError, EOFError, FileNotFoundError) as error:
            # A batch's memory is fetched from its worker, which may have been killed meanwhile.
            if text_of(error).startswith("Caught ") or not (pids := gone(self._iterator)):
                raise
            raise RuntimeError(f"DataLoader worker (pid(s) {pids}) exited unexpectedly") from error

    def close(self) -> None:
        """Shut down the workers, unless they are persistent and serve more epochs."""
        iterator, self._iterator = self._iterator, iter(())
        self._loader, self._ahead = None, []
        # Not left to the garbage collector: an exception from a worker is in a cycle with the
        # loader's iterator. Collected with its queues, that waits 5 s for each worker in vain.
        if self._alone or not getattr(iterator, "_persistent_workers", True):
            getattr(iterator, "_shutdown_workers", lambda: None)()
