"""The order of the next epoch, drawn before that epoch begins, and whether it still holds then."""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from gpuprefetch.core.loaders import TorchLoader, length_of
from gpuprefetch.core.nested import Loader

Facts: TypeAlias = dict[str, object]
# Seeds that samplers and loaders may draw between two epochs: those of validation, for one.
MOST_DRAWS = 16
_PLAIN = (bool, int, float, str, bytes, type(None))


def facts_of(owner: object, *, without: frozenset[str] = frozenset()) -> Facts:
    """The attributes of an object, as they are now."""
    return {name: value for name, value in vars(owner).items() if name not in without}


def same(before: Facts, now: Facts) -> bool:
    """Whether each attribute is the same object, or an equal number or text."""
    return before.keys() == now.keys() and all(
        value is now[name] or _equal(value, now[name]) for name, value in before.items()
    )


def _equal(first: object, second: object) -> bool:
    return isinstance(first, _PLAIN) and type(first) is type(second) and first == second


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed, as torch's ``RandomSampler`` and ``DataLoader`` do once an epoch."""
    seed = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
    return int(seed.item())


class Starts:
    """The loaders of this process, by the seeds that each draws as its next epoch begins.

    A loader draws one from torch's default generator as its workers start, and persistent workers
    start once. So a validation with such a loader draws one more before the second epoch than
    before any other. What a loop does between two epochs is not known before it has done it once:
    until then another loader counts as that of its validation.

    Attributes:
        count: the loaders whose persistent workers have started.
    """

    def __init__(self) -> None:
        self.count = 0
        # Those that are still to draw, and how many seeds, in the order in which they were made.
        # The list is never changed, but replaced: threads read it.
        self._to_draw: list[tuple[weakref.ref[TorchLoader], int]] = []

    def made(self, loader: Loader) -> None:
        """Note a loader that will be iterated."""
        if isinstance(loader, DataLoader) and loader.generator is None:
            sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
            seeds = 1 + (type(sampler) is RandomSampler and sampler.generator is None)
            self._to_draw = [*self._without(loader), (weakref.ref(loader), seeds)]

    def begins(self, loader: TorchLoader) -> None:
        """Count a loader whose first iterator is about to be made, with persistent workers."""
        self.count += loader.generator is None
        self._to_draw = self._without(loader)

    def _without(self, loader: TorchLoader) -> list[tuple[weakref.ref[TorchLoader], int]]:
        kept = []
        for made, seeds in self._to_draw:
            other = made()
            if other is not None and other is not loader:
                kept.append((made, seeds))
        return kept

    def shown(self) -> None:
        """Forget the loaders that are there: a loop has shown which of them it validates with."""
        self._to_draw = []

    def expected(self, loader: TorchLoader) -> int:
        """The seeds that a validation is to draw between the first two epochs of a loader.

        It is the first other loader, over another dataset, that is still to draw one.
        """
        for made, seeds in self._to_draw:
            other = made()
            if other is not None and other.dataset is not loader.dataset:
                return seeds
        return 0


STARTS = Starts()


def _apart(state: torch.Tensor | None = None) -> torch.Generator:
    """A generator of its own, in the state of torch's default one, or in another state."""
    generator = torch.Generator("cpu")
    generator.set_state(torch.get_rng_state() if state is None else state)
    return generator


def draws_since(state: torch.Tensor) -> int | None:
    """How many seeds were drawn from torch's default generator since it was in ``state``.

    None if something else was drawn, or the generator was seeded anew.
    """
    now = torch.get_rng_state()
    generator = _apart(state)
    for draws in range(MOST_DRAWS):
        if torch.equal(generator.get_state(), now):
            return draws
        draw_seed(generator)
    return None


@dataclass(frozen=True, slots=True)
class Forecast:
    """The order of an epoch that has not begun.

    What was drawn for it came from copies: nobody can tell that it was made.

    Attributes:
        batches: gives the order, batch by batch.
        seed: what the sampler draws as the epoch begins; None if it draws nothing.
        epoch: the number that the sampler has then; None if it has none.
        state: of torch's default generator when the forecast was made.
        starts_workers: whether the loader draws a seed for its workers before.
        starts: the count of ``STARTS`` when the forecast was made.
    """

    batches: BatchSampler
    seed: int | None
    epoch: int | None
    state: torch.Tensor
    starts_workers: bool
    starts: int
    _batched: Facts
    _sampled: Facts

    @classmethod
    def of(
        cls, loader: TorchLoader, *, draws: int, advances: bool, starts_workers: bool
    ) -> Forecast | None:
        """The forecast for a loader; None where its order is not known beforehand.

        Args:
            loader: whose ``batch_sampler`` is torch's own, over one of torch's samplers.
            draws: the seeds that are expected to be drawn before the epoch begins.
            advances: whether the number of a ``DistributedSampler`` will be one higher.
            starts_workers: whether the loader draws a seed for its workers.
        """
        outer = loader.batch_sampler
        if not is_known(loader) or not isinstance(outer, BatchSampler):
            return None
        sampler = outer.sampler
        ordered = sampler
        state = torch.get_rng_state()
        seed = None
        epoch = None
        if isinstance(sampler, RandomSampler):
            generator = _apart(state)
            for _ in range(draws + starts_workers):
                draw_seed(generator)
            seed = draw_seed(generator)
            drawing = torch.Generator("cpu").manual_seed(seed)
            ordered = RandomSampler(
                sampler.data_source, sampler.replacement, sampler.num_samples, drawing
            )
        elif isinstance(sampler, DistributedSampler):
            epoch = sampler.epoch + advances
            ordered = copy.copy(sampler)
            ordered.set_epoch(epoch)
        return cls(
            batches=BatchSampler(ordered, outer.batch_size, outer.drop_last),
            seed=seed,
            epoch=epoch,
            state=state,
            starts_workers=starts_workers,
            starts=STARTS.count,
            _batched=facts_of(outer),
            _sampled=_facts(sampler),
        )

    def holds(self, loader: TorchLoader) -> bool:
        """Whether an epoch of the loader that begins now has this order; nothing is drawn."""
        outer = loader.batch_sampler
        if not is_known(loader) or not isinstance(outer, BatchSampler):
            return False
        if not same(self._batched, facts_of(outer)):
            return False
        if not same(self._sampled, _facts(outer.sampler)):
            return False
        if self.epoch is not None and self.epoch != getattr(outer.sampler, "epoch", None):
            return False
        if self.seed is None:
            return True
        generator = _apart()
        if self.starts_workers:
            draw_seed(generator)
        return draw_seed(generator) == self.seed

    def draws_again(self) -> int:
        """How many seeds were drawn since the forecast that may be drawn in each epoch."""
        draws = draws_since(self.state) or 0
        return max(draws - (STARTS.count - self.starts), 0)

    def draw(self) -> None:
        """Draw from torch's default generator what the epoch draws as it begins."""
        if self.starts_workers:
            draw_seed()
        if self.seed is not None:
            draw_seed()


def _facts(sampler: object) -> Facts:
    """What the order of a sampler depends on, but for the number of the epoch.

    What a sampler is over may be no part of the dataset, and be longer from one epoch to the next.
    """
    source = getattr(sampler, "data_source", getattr(sampler, "dataset", None))
    facts = facts_of(sampler, without=frozenset({"epoch"}))
    return facts | {"length of the source": length_of(source)}


def is_known(loader: TorchLoader) -> bool:
    """Whether the order of a loader's epoch is known before it begins.

    A sampler with a generator of its own draws from it in the middle of an epoch, too.
    """
    outer = getattr(loader, "batch_sampler", None)
    sampler = getattr(outer, "sampler", None)
    known = type(sampler) in (RandomSampler, SequentialSampler, DistributedSampler)
    return (
        type(outer) is BatchSampler
        and known
        and getattr(sampler, "generator", None) is None
        and loader.generator is None
        and torch.get_default_device().type == "cpu"
    )
