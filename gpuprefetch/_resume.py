"""Exact resume in the middle of an epoch: what the loop has had, and in which order."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset


def kind(loader: Any) -> str:
    """What of a loader must be the same for one's state to mean something to another."""
    batch_size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    own = "a" if is_stateful(loader) else "no"
    shared = ""
    if isinstance(getattr(loader, "dataset", None), IterableDataset) and not is_stateful(loader):
        # The workers share its samples out, and each makes batches of what it has.
        shared = f"samples shared out to {max(getattr(loader, 'num_workers', 0), 1)} workers, "
    generators = len(_generators(loader))
    return f"{shared}{batch_size=}, {generators} generators and {own} state of its own"


def in_order(loader: Any) -> bool:
    """Whether the number of a batch says which of the sampler's it is, or the loader knows."""
    workers = getattr(loader, "num_workers", 0)
    return workers < 2 or getattr(loader, "in_order", True) or is_stateful(loader)


def is_stateful(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def changed(loader: DataLoader[Any], **values: Any) -> DataLoader[Any]:
    """A copy of a loader, with workers of its own, and other attributes.

    DataLoader forbids some of these changes, not the values.
    """
    clone = copy.copy(loader)
    clone._iterator = None
    vars(clone).update(values)
    return clone


def sampler_of(loader: Any) -> str:
    """The attribute of a loader that says which samples come next."""
    return "sampler" if getattr(loader, "batch_sampler", None) is None else "batch_sampler"


def _samplers(loader: Any) -> Iterator[Any]:
    """The samplers of a loader and those within them.

    As in torch's ``BatchSampler(sampler)`` and accelerate's ``SkipBatchSampler(batch_sampler)``.
    """
    found, seen = [loader], list[int]()
    for outer in found:  # which grows
        for name in ("sampler", "batch_sampler"):
            inner = getattr(outer, name, None)
            if inner is not None and id(inner) not in seen:
                seen.append(id(inner))
                found.append(inner)
    yield from found[1:]


def _generators(loader: Any) -> list[torch.Generator]:
    found = [getattr(sampler, "generator", None) for sampler in _samplers(loader)]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def owners(loader: Any) -> list[Any]:
    """Who numbers epochs, of a loader and its parts: whatever has a ``set_epoch``."""
    found = (loader, *_samplers(loader), getattr(loader, "dataset", None))
    each = {id(owner): owner for owner in found}.values()
    return [owner for owner in each if callable(getattr(owner, "set_epoch", None))]


def beginning(loader: Any) -> dict[str, Any]:
    """The place of an epoch of ``loader`` that begins now, without the loader's own state."""
    states = [torch.get_rng_state(), *(g.get_state() for g in _generators(loader))]
    continued = isinstance(loader, DataLoader) and (
        loader._iterator is not None or isinstance(loader.generator, _SeedApart)
    )
    epochs = [getattr(owner, "epoch", None) for owner in owners(loader)]
    return {
        "batches": 0,
        "random_states": [state.numpy().tobytes().hex() for state in states],
        "continued": continued,
        "epochs": [e if type(e) is int else None for e in epochs],
    }


def own_state(loader: Any) -> Any:
    """The state of a loader that has one, else None."""
    if not is_stateful(loader):
        return None
    state = loader.state_dict()
    # What workers send is a copy already. In this process a dataset may hand out live objects.
    return state if getattr(loader, "num_workers", 0) else copy.deepcopy(state)


def _decoded(state: str | torch.Tensor) -> torch.Tensor:
    if isinstance(state, torch.Tensor):  # of an older version; torch.load may have moved it
        return state.cpu()
    return torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)


@contextlib.contextmanager
def _drawn_from(loader: Any, saved: list[Any]) -> Iterator[list[torch.Tensor]]:
    """Draw from the saved states; torch's own then is what it was, unless the list is cleared."""
    states = [_decoded(state) for state in saved]
    before = torch.get_rng_state()
    # Where the caller has restored it, these draws count: the next epoch would repeat the order.
    undone = [] if torch.equal(before, states[0]) else [before]
    torch.set_rng_state(states[0])
    # A sampler may have made one since: that draws a seed of its own for each epoch.
    for generator, state in zip(_generators(loader), states[1:], strict=False):
        generator.set_state(state)
    try:
        yield undone
    finally:
        for state in undone:
            torch.set_rng_state(state)


class _SeedApart(torch.Generator):
    """For workers that start where those of the uninterrupted run live on.

    Workers draw a seed when they start, before the sampler draws, from the same generator.
    """


class _Rest:
    """A sampler without what it gave before the interruption."""

    def __init__(self, sampler: Any, done: int) -> None:
        self._sampler, self._done = sampler, done

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._sampler), self._done, None)

    def __len__(self) -> int:
        return max(len(self._sampler) - self._done, 0)


def _next_of(iterator: Any) -> Any:
    """The next batch of a DataLoader's iterator, or of any.

    Torch's own marks each for its profiler, in which a thread gives up the GIL several times: half
    of the 0.4 ms that it takes to fetch a batch.
    """
    torchs = type(iterator).__module__ == DataLoader.__module__ and hasattr(iterator, "_next_data")
    # It also warns of an iterable dataset that is longer than it says.
    if torchs and not isinstance(iterator._dataset, IterableDataset):
        return iterator._next_data()
    return next(iterator)


class Source:
    """The batches of an epoch, each with the state that the loader itself has behind it, or None.

    Args:
        loader: any iterable; a stateful one has ``state_dict`` and ``load_state_dict``, as
            torchdata's ``StatefulDataLoader`` has.
        resumed: the ``place`` of an earlier epoch, to go on there, in the order it had. A
            stateful loader does so by itself. Of a map-style dataset nothing is read that was left
            out; of an iterable one, and by a DataLoader with an ``__iter__`` of its own, the
            batches are read and dropped.

    Attributes:
        place: where the epoch begins: ``batches`` that the loop has had, the loader's own state
            after them as ``loader``, the generators' ``random_states`` that the order is drawn
            from, torch's own first, in hexadecimal digits, whether it is ``continued`` by workers
            of an epoch before, and the samplers' ``epochs``, None where one does not tell its own.
    """

    def __init__(self, loader: Any, resumed: dict[str, Any] | None = None) -> None:
        self._loader, self._ahead = loader, list[tuple[Any, Any]]()
        self._iterator: Iterator[Any]
        if resumed:
            self.place = dict(resumed)
            saved, left, ordered = resumed["random_states"], None, True
            if is_stateful(loader) and isinstance(loader, DataLoader) and not loader.num_workers:
                # Its dataset may restore torch's generator, which then stays as it is.
                if ordered := not isinstance(loader.dataset, IterableDataset):
                    left = self._left_by_a_trial()
                else:
                    saved = [torch.get_rng_state()]
            with _drawn_from(loader, saved) as undone:
                self._resume(ordered)
                if left is not None and torch.equal(left, torch.get_rng_state()):
                    undone.clear()
                try:
                    # A loader without workers draws its order with the first batch: here.
                    self._ahead = list(islice(self, 1))
                except BaseException:
                    self.close()
                    raise
            return
        self.place = beginning(loader)
        self._iterator = iter(loader)
        self.place["loader"] = own_state(loader)

    def _left_by_a_trial(self) -> torch.Tensor:
        """What torch's generator is after a resume that did not begin with the saved state.

        Where it is the same after one that did, the dataset has restored it.
        """
        loader, before = self._loader, torch.get_rng_state()
        self._resume(True)
        left = torch.get_rng_state()
        torch.set_rng_state(before)
        self._loader = loader
        return left

    def _resume(self, ordered: bool) -> None:
        loader, done = self._loader, self.place["batches"]
        stateful, skipped = is_stateful(loader), 0
        if isinstance(loader, DataLoader):
            lasting = stateful and loader.persistent_workers  # they keep their datasets' states
            self._loader = rest = loader if lasting else changed(loader)
            seed = hash((torch.initial_seed(), self.place["epoch"], done))
            apart = _SeedApart().manual_seed(seed)
            if self.place["continued"] or not ordered:
                rest.generator = apart
            if loader.persistent_workers and not lasting:
                loader.generator = apart  # for the next epoch, which starts its workers anew
        if stateful:
            self._loader.load_state_dict(copy.deepcopy(self.place["loader"]))
        elif (
            isinstance(loader, DataLoader)
            and type(loader).__iter__ is DataLoader.__iter__  # else it may count its batches
            and not isinstance(loader.dataset, IterableDataset)
        ):
            name = sampler_of(loader)
            self._loader = changed(rest, **{name: _Rest(getattr(loader, name), done)})
        else:
            skipped = done
        self._iterator = iter(self._loader)
        next(islice(self._iterator, skipped, skipped), None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> tuple[Any, Any]:
        """The next batch and the loader's state after it.

        Raises:
            StopIteration: with the state as its value, which begins the next epoch.
        """
        if self._ahead:
            return self._ahead.pop()
        try:
            batch = _next_of(self._iterator)
        except StopIteration:
            raise StopIteration(own_state(self._loader)) from None
        return batch, own_state(self._loader)

    def close(self, *, abandoned: bool = False) -> None:
        """Shut down the workers, unless they are persistent and nobody else waits for them.

        Args:
            abandoned: whether a thread does, one that was not waited for.
        """
        iterator, self._iterator = self._iterator, iter(())
        if abandoned and getattr(self._loader, "_iterator", None) is iterator:
            self._loader._iterator = None  # the next epoch makes another
        self._loader, self._ahead = None, []
        # Not left to the garbage collector: an exception from a worker is in a cycle with the
        # loader's iterator. Collected with its queues, that waits 5 s for each worker in vain.
        if abandoned or not getattr(iterator, "_persistent_workers", True):
            getattr(iterator, "_shutdown_workers", lambda: None)()
        if abandoned and hasattr(iterator, "_workers_status"):
            # When it looks at them next it finds them dead. It would not ask for those shut down.
            iterator._workers_status = [True] * len(iterator._workers_status)
