"""Exact resume in the middle of an epoch: where it stands, how it goes on, and which one is next.

A :class:`Place` says what the loop has had of an epoch, and what its order is drawn from. A
:class:`Source` gives the batches from a place on. :class:`Progress` numbers the epochs, and knows
the place of the latest one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain, islice

import torch
from torch.utils.data import DataLoader

from gpuprefetch.core.errors import is_end, scope, text_of, unexpected_end
from gpuprefetch.core.loaders import (
    LoaderState,
    changed,
    in_order,
    is_stateful,
    is_stream,
    length_of_dataset,
    own_state,
    restores_itself,
)
from gpuprefetch.core.nested import Batch, Loader
from gpuprefetch.core.ranks import may_share_state, rank, ranks_of
from gpuprefetch.core.samplers import (
    Key,
    epochs_of,
    generators_of,
    numbered_by_epoch,
    random_states,
    sampler_name,
    set_epoch,
)
from gpuprefetch.core.state import State, decoded
from gpuprefetch.core.workers import at_hand, gone, shut_down


class Use(Enum):
    """What became of the iterator over an epoch."""

    UNUSED = "nobody has asked it for a batch so far"
    USED = "the loop has asked it for a batch"
    DROPPED = "it was dropped unused, which is no epoch"


class Beginning(Enum):
    """How an epoch begins."""

    ANEW = "with its first batch, in an order that is drawn now"
    AT_PLACE = "after the batches that the loop has had, in the order of before"


@dataclass(frozen=True, slots=True)
class Reached:
    """How far the loop has come in an epoch."""

    batches: int = 0  # that the loop has had
    loader: LoaderState = None  # the loader's own state after these batches, if it has one
    ended: bool = False  # whether the loop has come to its end


@dataclass(slots=True)
class Place:
    """Where an epoch stands; its :class:`Source` and its ``Lookahead`` tell it, nobody else does.

    Example, of the second epoch of ``DataLoader(range(12), 2, shuffle=True)`` after 3 batches::

        Place(1, Reached(3), seed=0, random_states=["2a00..."], epochs=[], samples=12)
    """

    epoch: int
    # Replaced as one: a signal handler or a thread may save a state at any moment.
    reached: Reached = field(default_factory=Reached)
    seed: int | None = None  # of the random parameters; None before the epoch begins
    # What the order is drawn from: torch's state as the epoch began, and those of the samplers'
    # generators. Empty before the first epoch.
    random_states: Sequence[str | torch.Tensor] = ()
    continued: bool = False  # whether workers of an earlier epoch lived on
    epochs: Sequence[int | None] = ()  # the samplers' own numbers, see epochs_of()
    samples: int | None = None  # of a map-style dataset
    drawn: Sequence[int | None] | None = None  # a saved or copied one's: see Notes.drawn()
    use: Use = Use.UNUSED

    @property
    def batches(self) -> int:
        """How many batches the loop has had."""
        return self.reached.batches

    @classmethod
    def beginning(cls, loader: Loader, epoch: int, seed: int | None = None) -> Place:
        """The place of an epoch of ``loader`` that begins now, without the loader's own state."""
        return cls(
            epoch,
            seed=seed,
            random_states=random_states(loader),
            continued=isinstance(loader, DataLoader)
            and (loader._iterator is not None or isinstance(loader.generator, _SeedApart)),
            epochs=epochs_of(loader),
            samples=length_of_dataset(loader),
        )

    def again(self, epoch: int, seed: int) -> Place:
        """The same place, for an epoch that goes on here."""
        return replace(self, epoch=epoch, seed=seed, use=Use.UNUSED)

    def started(self, loader: LoaderState) -> None:
        """The epoch has begun, where the loader's own state is ``loader``."""
        self.reached = replace(self.reached, loader=loader)

    def asked(self) -> None:
        """The loop has asked for a batch."""
        self.use = Use.USED

    def handed_over(self, number: int, loader: LoaderState) -> None:
        """The loop has batch ``number``, after which the loader's own state is ``loader``."""
        self.reached = Reached(number + 1, loader)

    def end(self, loader: LoaderState) -> None:
        """The loop has come to the end, where the loader's own state is ``loader``."""
        self.reached = replace(self.reached, loader=loader, ended=True)

    def dropped(self) -> None:
        """The iterator was dropped, which counts if the loop has not asked for a batch."""
        if self.use is Use.UNUSED:
            self.use = Use.DROPPED

    @classmethod
    def of_state(cls, state: State) -> Place:
        """The place that a :func:`.core.state.checked` state was taken at; older ones say less."""
        return cls(
            state["epoch"],
            Reached(state["batches"], state["loader"], state.get("ended", False)),
            state["seed"],
            state["random_states"],
            state["continued"],
            state.get("epochs", ()),
            state.get("samples"),
            state.get("drawn"),
        )

    def taken(self, drawn: Callable[[int], Sequence[int | None]] | None) -> Place:
        """Where it stands at this moment, whatever the loop does meanwhile.

        ``drawn`` tells what was drawn for so many batches; without it the saved one's is kept.
        """
        now = replace(self)
        return now if drawn is None else replace(now, drawn=drawn(now.batches))

    def as_state(self) -> State:
        """What a state has of it, by the names in :data:`.core.state.FIELDS`."""
        reached = self.reached
        state = {
            "epoch": self.epoch,
            "batches": reached.batches,
            "random_states": self.random_states,
            "continued": self.continued,
            "epochs": self.epochs,
            "samples": self.samples,
            "loader": reached.loader,
        }
        if self.seed is not None:
            state["seed"] = self.seed
        if self.drawn is not None:
            state["drawn"] = self.drawn
        return state


class _SeedApart(torch.Generator):
    """For the seeds of workers that start again, where those of the uninterrupted run live on."""


_END = object()  # in place of a batch


class _Rest(Iterator[Key]):
    """What is left of a sampler's order, whose beginning can be drawn before it is asked for."""

    def __init__(self, order: Iterator[Key]) -> None:
        self._order = order

    def draw(self) -> None:
        """Let the sampler draw its order now."""
        self._order = chain(list(islice(self._order, 1)), self._order)

    def __next__(self) -> Key:
        return next(self._order)


class Source(Iterator[tuple[Batch, LoaderState]]):
    """The batches of an epoch, each with the state that the loader itself has after it, or None.

    A source that goes on at a place gives the batches after those the loop has had, in the same
    order. A map-style dataset reads nothing that was left out; others do, and ``skip`` gets the
    batches.

    Args:
        loader: whose batches they are.
        place: of the epoch.
        beginning: how it begins.
        skip: called with each batch that is read and left out.
        begun: the loader's iterator, if it has been made already.
        live_on: whether persistent workers serve another epoch, asked at the end of this one.
        at_end: called once the last batch has been given and the end has been told.
    """

    def __init__(
        self,
        loader: Loader,
        place: Place,
        beginning: Beginning = Beginning.ANEW,
        skip: Callable[[Batch], None] = lambda batch: None,
        *,
        begun: Iterator[Batch] | None = None,
        live_on: Callable[[], bool] = lambda: True,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.place = place
        self._loader = loader
        self._skip = skip
        self._live_on = live_on
        self._at_end = at_end
        self._iterator: Iterator[Batch] = iter(())
        self._first: list[tuple[Batch, LoaderState]] = []  # the first batch, where it has been read
        self._own_workers = False  # whether the workers end with the epoch, also persistent ones
        if beginning is Beginning.ANEW:
            self._iterator = iter(loader) if begun is None else begun
            place.started(own_state(loader))
            return
        _refuse_another_length(loader, place)
        # A stream that goes back by itself draws no order.
        draws = not (restores_itself(loader) and is_stream(loader))
        drawing: AbstractContextManager[None] = nullcontext()
        if draws:
            drawing = _drawing_from(loader, place.random_states)
        try:
            with drawing:
                self._resume(loader, apart=place.continued or not draws)
            if not self._first:
                # The saved states are those of the epoch's beginning: a dataset that draws in
                # this process would repeat what it drew for the first batches.
                self._first = list(islice(self, 1))
        except BaseException:
            self.close()
            raise

    def _resume(self, loader: Loader, *, apart: bool) -> None:
        """Begin after the batches that the loop has had.

        ``apart`` says that the workers' seed is not drawn from torch's generator: in the
        uninterrupted run no workers start here, or the order is drawn elsewhere.
        """
        done = self.place.batches
        stateful = is_stateful(loader)
        rest = loader
        if isinstance(loader, DataLoader):
            if not (stateful and loader.persistent_workers):  # those keep datasets' states
                rest = changed(loader)
                self._own_workers = True
            seeds = _SeedApart().manual_seed(hash((torch.initial_seed(), self.place.epoch, done)))
            if apart:
                rest.generator = seeds
            if loader.persistent_workers and rest is not loader:
                loader.generator = seeds  # for the next epoch, which starts its workers anew
        skipped = 0
        order: _Rest | None = None
        if stateful:
            rest.load_state_dict(copy.deepcopy(self.place.reached.loader))
        elif _can_cut_sampler(loader):
            name = sampler_name(loader)
            order = _Rest(islice(iter(getattr(loader, name)), done, None))
            rest = changed(rest, **{name: order})
        else:
            skipped = done
        self._loader = rest
        self._iterator = iter(rest)
        for _ in range(skipped):
            batch = self._next_batch()
            if batch is _END and not _is_of_this_rank(self.place):
                break  # another rank's stream may be longer
            if batch is _END:
                raise another_order(self.place)
            self._skip(batch)
        if order is None and not done:
            self._first = list(islice(self, 1))  # which draws the order
            if stateful and not self._first:
                # What the loader saved at an epoch's end may have a sampler give that end again.
                self._iterator = iter(rest)
                self._first = list(islice(self, 1))
        elif order is not None and not getattr(rest, "num_workers", 0):
            order.draw()

    def __next__(self) -> tuple[Batch, LoaderState]:
        """The next batch and the loader's state after it; the end has that as its value."""
        if self._first:
            return self._first.pop()
        batch = self._next_batch()
        if batch is _END:
            raise StopIteration(own_state(self._loader))
        return batch, own_state(self._loader)

    def _next_batch(self) -> Batch:
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

    def at_hand(self) -> bool:
        """Whether the next batch need not be waited for, as far as that is known."""
        return bool(self._first) or at_hand(self._iterator)

    def ended(self) -> None:
        """Whoever iterates has been told of the end."""
        self._at_end()

    def close(self) -> None:
        """Shut down the workers, unless they are persistent and serve more epochs."""
        iterator = self._iterator
        loader = self._loader
        self._iterator = iter(())
        self._loader = None
        self._first = []
        persistent = getattr(iterator, "_persistent_workers", True)
        if self._own_workers or not (persistent and self._live_on()):
            shut_down(iterator, loader)


def _can_cut_sampler(loader: Loader) -> bool:
    """Whether a loader gives later batches if its sampler does; another may count its batches."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not is_stream(loader)
    )


@scope
def _drawing_from(loader: Loader, saved: Sequence[str | torch.Tensor]) -> Iterator[None]:
    """Draw from the saved states; after that torch's own is what it was."""
    before = torch.get_rng_state()
    states = [decoded(state) for state in saved]
    # Not if the caller has restored it, as the next epoch would repeat the order; nor if the
    # dataset may have.
    undone = not restores_itself(loader) and not torch.equal(before, states[0])
    try:
        torch.set_rng_state(states[0])
        # A sampler may have made a generator since. Such a sampler draws a seed for each epoch.
        for generator, state in zip(generators_of(loader), states[1:], strict=False):
            generator.set_state(state)
        yield
    finally:
        if undone:
            torch.set_rng_state(before)


def _refuse_another_length(loader: Loader, place: Place) -> None:
    now = length_of_dataset(loader)
    known = place.samples is not None and now is not None
    if place.batches and _is_of_this_rank(place) and known and place.samples != now:
        raise ValueError(
            f"state is of the middle of an epoch of {place.samples} samples; the dataset has "
            f"{now}. Build it as it was, or begin an epoch: set_epoch({place.epoch + 1})."
        )


def _is_of_this_rank(place: Place) -> bool:
    """Whether a saved place is not another rank's: Lightning has that of rank 0 loaded by all."""
    return place.drawn is None or place.drawn[0] == rank()


def another_order(place: Place, advice: str = "") -> ValueError:
    """The error of a loader that does not give again what it gave before ``place``."""
    return ValueError(
        "the loader does not begin with the batches that it gave before the interruption. "
        "Build it as it was. The order must come from torch's default generator or the "
        "sampler's own `generator`, and not from an iterator of an earlier epoch. An "
        "iterable dataset must give the same samples each time that it is iterated, as "
        f"with a fixed seed.{advice} To begin an epoch in place of resuming this one: "
        f"set_epoch({place.epoch + 1})."
    )


@dataclass(frozen=True, slots=True)
class _LoadedSeed:
    """The seed of a loaded state, which counts until the script seeds torch."""

    seed: int
    torch_seed: int  # as the state was loaded


@dataclass
class Progress:
    """Numbers the epochs of a loader, and knows where the latest one stands.

    An iterator that is dropped unused is no epoch: the next one gets its number, and the place that
    it was to go on at.
    """

    kind: str  # of the loader: a state of another kind is refused
    epoch: int = 0  # number of the next one
    place: Place = field(default_factory=lambda: Place(0))  # of the latest one, or a loaded state's
    _next: Beginning = Beginning.ANEW
    _latest: Beginning = Beginning.ANEW
    _asked: bool = False  # whether set_epoch() gave the number of the next one
    _loaded_seed: _LoadedSeed | None = None

    def copied(self, place: Place | None = None) -> Progress:
        """Another one at the same place, whatever becomes of this one's epoch."""
        return replace(self, place=replace(self.place) if place is None else place)

    def anew(self) -> Progress:
        """Another one, whose next epoch has the same number and begins at its start."""
        other = self.copied()
        other.forget_unused()
        return replace(other, place=Place(other.epoch), _next=Beginning.ANEW)

    def reset(self, epoch: int) -> None:
        """Begin the next epoch, this one, at its start."""
        self.epoch = epoch
        self.place = Place(epoch)
        self._next = Beginning.ANEW
        self._latest = Beginning.ANEW
        self._asked = False

    @property
    def seed(self) -> int:
        """The seed where the user gave none: of what is resumed, a loaded state's, or torch's."""
        if self._next is Beginning.AT_PLACE and self.place.seed is not None:
            return self.place.seed
        now = torch.initial_seed()
        loaded = self._loaded_seed
        return now if loaded is None or loaded.torch_seed != now else loaded.seed

    def follow(self, loader: Loader) -> None:
        """Number the next epoch as a sampler does that is ahead, unless set_epoch() did."""
        if not self._asked and self._next is Beginning.ANEW:
            self.epoch = max([self.epoch, *(e for e in epochs_of(loader) if e is not None)])

    def begin(self, loader: Loader) -> tuple[int, Beginning]:
        """The number of an epoch that begins, and how: at :attr:`place` or anew."""
        self.forget_unused()
        self.follow(loader)
        self._asked = False
        self._latest = self._next
        self._next = Beginning.ANEW
        self.epoch += 1
        return self.epoch - 1, self._latest

    def next_epoch(self, loader: Loader) -> int:
        """The number that the next epoch will have."""
        number, _ = self.copied().begin(loader)
        return number

    def began(self, place: Place) -> None:
        """Follow an epoch, which stands at ``place`` from here on."""
        self.place = place

    def failed(self) -> None:
        """An epoch could not begin: the next one tries again."""
        self.epoch -= 1
        self._next = self._latest

    def forget_unused(self) -> None:
        """Take back an epoch whose iterator was dropped unused, as by Lightning's look at one."""
        if self.place.use is not Use.DROPPED or self._next is Beginning.AT_PLACE:
            return
        if self._latest is Beginning.AT_PLACE:
            self.epoch = self.place.epoch
            self._next = Beginning.AT_PLACE
        else:
            self.reset(self.place.epoch)  # the next one draws its order anew

    def set_epoch(self, loader: Loader, epoch: int) -> None:
        """Number the next epoch; one with another number than :attr:`place` begins at its start."""
        self.forget_unused()
        self.epoch = epoch
        if epoch != self.place.epoch and not self.place.reached.ended:
            self.reset(epoch)
        self._asked = True
        for part in numbered_by_epoch(loader):
            set_epoch(part, epoch)

    def load(self, loader: Loader, state: State) -> None:
        """Let the next epoch begin where a checked state was taken."""
        place = Place.of_state(state)
        self._loaded_seed = _LoadedSeed(state["seed"], torch.initial_seed())
        self.set_epoch(loader, place.epoch)
        for part, epoch in zip(numbered_by_epoch(loader), place.epochs, strict=False):
            if epoch is not None:  # a sampler's, which need not be ours
                set_epoch(part, epoch)
        self.place = place
        self._next = Beginning.AT_PLACE

    def save(self, loader: Loader, living: Loader | None) -> Place:
        """Where the latest epoch stands, or the next begins; workers of ``living`` live on."""
        self.forget_unused()
        self.follow(loader)
        if self.place.reached.ended or not self.place.random_states:
            return self._save_next(loader, living)
        if self.place.batches and not in_order(loader):
            raise ValueError(
                f"the loop has had {self.place.batches} batches, but with in_order=False it is not "
                "known which: resuming would leave some out and repeat others. Give the "
                "DataLoader in_order=True, or save no state of it."
            )
        return self.place

    def _save_next(self, loader: Loader, living: Loader | None) -> Place:
        if isinstance(loader, DataLoader):
            loader = changed(loader)  # an iterator that state_dict() makes is not the user's
        place = Place.beginning(loader if living is None else living, self.epoch)
        reached = self.place.reached
        if reached.ended:
            place.started(reached.loader)
            return place
        own = own_state(loader)
        place.started(own)
        if own is not None:
            # Another iterator would draw other seeds for its workers.
            self.place = place
            self._next = Beginning.AT_PLACE
        return place

    def refuse(self, loader: Loader, state: State, given_seed: int | None) -> None:
        """Refuse a state that this loader, with this seed on this rank, cannot go on from."""
        # A state of an older version does not know of shared samples, which are named first.
        if not self.kind.endswith(state.get("kind", "")):
            raise ValueError(
                f"state is of a loader with {state['kind']}; this one has {self.kind}. "
                "Build it as it was."
            )
        if given_seed is not None and (given_seed - state["seed"]) % 2**64:
            raise ValueError(
                f"state is of a prefetcher with seed={state['seed']}, and this one has "
                f"seed={given_seed}: it may be the state of another rank. Load this rank's own, "
                "give that seed, or leave seed out."
            )
        ranks = ranks_of(loader)
        here = ranks.rank
        if state["batches"] and state.get("world_size", ranks.count) != ranks.count:
            raise ValueError(
                f"state is of the middle of an epoch on {state['world_size']} ranks, and there are "
                f"{ranks.count}: others would get samples twice or never. Resume on as many, or "
                f"begin an epoch: set_epoch({state['epoch'] + 1})."
            )
        there = state.get("rank", state.get("drawn", [None])[0])
        if there in (None, here) or may_share_state(loader):
            return
        raise ValueError(
            f"state is of rank {there}, and this is rank {here}: both would sample the same from "
            "then on. Save and load a state for each rank. Where all ranks are to read the same: "
            f'load_state_dict(state | {{"rank": {here}}}).'
        )
