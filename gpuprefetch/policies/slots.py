"""Slots: every image of a batch has an op in each, sampled in NumPy from the key of the image."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpuprefetch.policies.ops import ARGS, Op
from gpuprefetch.policies.program import Program
from gpuprefetch.transforms.random import Keys, fold, uniform

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]
Columns = Sequence[npt.ArrayLike]


class Picture(NamedTuple):
    """What arguments depend on, besides random numbers."""

    height: int
    width: int
    channels: int = 3
    white: float = 255.0  # 1.0 in floating point


class Slots(NamedTuple):
    """What a transform is compiled to.

    ``RandomApply([ColorJitter(0.5, 0.5), RandomInvert()], p=0.3)``, for instance, has 3 slots: two
    for brightness and contrast, in an order that each image samples, and one for the inversion. For
    an image they need 8 uniform numbers::

        0          whether it goes through them at all
        1, 2       the order of brightness and contrast
        3, 4       brightness: whether, and how much
        5, 6       contrast: the same
        7          inversion: whether

    ``sample`` gets (8, N) numbers, and writes (N, 3) codes and (N, 3, ARGS) arguments.
    """

    size: int
    numbers: int  # uniform ones that it needs for an image
    # Writes (N, size) codes and (N, size, ARGS) arguments, zeros before, from (numbers, N) of them.
    sample: Callable[[Floats, Picture, Ints, Floats], None]


def one(
    op: Op, sample: Callable[[Floats, Picture], Columns], numbers: int, p: float = 1.0
) -> Slots:
    """One op, for each image with a chance of ``p``.

    ``sample`` makes columns of arguments from ``(numbers, N)`` uniform ones.
    """

    def sample_one(u: Floats, picture: Picture, codes: Ints, args: Floats) -> None:
        for column, values in enumerate(sample(u[1:], picture)):
            args[:, 0, column] = values
        codes[:, 0] = (u[0] < p) * op

    return Slots(1, 1 + numbers, sample_one)


def row(parts: Sequence[Slots], p: float = 1.0) -> Slots:
    """Slots one after the other; ``p`` is the chance that an image goes through them at all."""

    def sample(u: Floats, picture: Picture, codes: Ints, args: Floats) -> None:
        _sample_each(parts, u[1:], picture, codes, args)
        codes *= (u[0] < p)[:, None]

    return Slots(_size(parts), 1 + _numbers(parts), sample)


def order(parts: Sequence[Slots]) -> Slots:
    """The same in an order that each image samples."""
    part_of = np.repeat(np.arange(len(parts)), [part.size for part in parts])

    def sample(u: Floats, picture: Picture, codes: Ints, args: Floats) -> None:
        _sample_each(parts, u[len(parts) :], picture, codes, args)
        sampled = np.argsort(u[part_of].T, axis=1, kind="stable")
        images = np.arange(len(sampled))[:, None]
        codes[:] = codes[images, sampled]
        args[:] = args[images, sampled]

    return Slots(_size(parts), len(parts) + _numbers(parts), sample)


def choice(parts: Sequence[Slots], p: Sequence[float] | Floats) -> Slots:
    """Each image goes through one of the parts, chosen with the chances ``p``, which sum to 1."""

    def sample(u: Floats, picture: Picture, codes: Ints, args: Floats) -> None:
        chosen = np.searchsorted(np.cumsum(p)[:-1], u[0], side="right")
        first = 1
        for number, part in enumerate(parts):
            images = np.flatnonzero(chosen == number)
            some_codes = codes[images, : part.size]
            some_args = args[images, : part.size]
            part.sample(u[first : first + part.numbers, images], picture, some_codes, some_args)
            codes[images, : part.size] = some_codes
            args[images, : part.size] = some_args
            first += part.numbers

    return Slots(max(part.size for part in parts), 1 + _numbers(parts), sample)


class Step(NamedTuple):
    """An op of RandAugment or its kin."""

    op: Op
    magnitudes: Callable[[Picture], Floats]  # (B, 2): of B bins, with one sign and the other
    column: int | slice = 0  # which of the arguments they are ...
    given: Sequence[float] = ()  # ... of these
    chance: float = 1.0  # of the step, once it is chosen
    center: float = 0.0  # of normal levels
    other: Op | None = None  # the op for half of the images


class Noise(NamedTuple):
    """The distribution of a magnitude's level, which is cut to 0 to ``upper``."""

    deviation: float  # of a normal one around a step's center; inf for a uniform one up to it
    upper: float


def table(
    policies: Sequence[Sequence[Step]],
    layers: int,
    *,
    weights: npt.ArrayLike | None = None,
    noise: Noise | None = None,
) -> Slots:
    """Slots with one of many ops each: RandAugment and its kin.

    Each image samples one of the policies per layer, without replacement where they have
    ``weights``; for ``layers`` of -1 it samples how many layers, 1 to 3. A step runs with its own
    chance. ``noise`` chooses a step's bin of magnitudes; without, all have equal chances.
    """
    if layers == 0:
        return row(())
    depth = max(map(len, policies))
    blank = Step(Op.IDENTITY, policies[0][0].magnitudes, chance=0.0)
    steps = [s for policy in policies for s in (*policy, *[blank] * (depth - len(policy)))]
    chooser = _Chooser(
        policies=len(policies),
        layers=layers if layers > 0 else 3,
        depth=depth,
        some_layers=layers < 0,
        weights=None if weights is None else np.asarray(weights),
    )
    count = chooser.layers * depth
    codes_of = np.array([[s.op, s.op if s.other is None else s.other] for s in steps], np.int32)
    chances = np.array([step.chance for step in steps])
    centers = np.array([step.center for step in steps])

    @lru_cache(maxsize=4)
    def args_of(picture: Picture) -> Floats:
        return _all_arguments(steps, picture)

    def sample(u: Floats, picture: Picture, codes: Ints, args: Floats) -> None:
        step, kept = chooser.sample(u[5 * count :])
        # Each has the shape of the codes. A level needs two numbers; `other` chooses the filter.
        runs, level, second, sign, other = u[: 5 * count].reshape(5, count, -1).transpose(0, 2, 1)
        kept &= runs < chances[step]
        codes[:] = codes_of[step, (other >= 0.5).astype(np.int64)] * kept
        given = args_of(picture)
        bins = _bins(noise, centers[step], level, second, given.shape[1])
        args[:] = given[step, bins, (sign > 0.5).astype(np.int64)]

    return Slots(count, 5 * count + chooser.numbers, sample)


@dataclass(frozen=True, slots=True)
class _Chooser:
    """Which steps an image goes through: one policy per layer, each of ``depth`` steps."""

    policies: int
    layers: int
    depth: int
    some_layers: bool  # whether an image samples how many of the layers
    weights: Floats | None

    @property
    def numbers(self) -> int:
        return 1 + (self.layers if self.weights is None else self.policies)

    def sample(self, u: Floats) -> tuple[Indices, npt.NDArray[np.bool_]]:
        """``(N, layers * depth)`` steps from ``(numbers, N)``, and whether their layer counts."""
        if self.weights is None:
            chosen = (u[:-1] * self.policies).astype(np.int64).T
        else:  # Efraimidis and Spirakis: the largest of u ** (1 / weight)
            chosen = np.argsort(np.log1p(-u[:-1].T) / -self.weights, axis=1)[:, : self.layers]
        step = chosen[:, :, None] * self.depth + np.arange(self.depth)
        step = step.reshape(len(chosen), self.layers * self.depth)
        if not self.some_layers:
            return step, np.ones(step.shape, bool)
        layer = np.arange(step.shape[1]) // self.depth
        return step, layer <= np.floor(u[-1] * self.layers)[:, None]


def _all_arguments(steps: Sequence[Step], picture: Picture) -> Floats:
    """``(steps, bins, 2 signs, ARGS)``."""
    magnitudes = [step.magnitudes(picture) for step in steps]
    args = np.zeros((len(steps), len(magnitudes[0]), 2, ARGS))
    for own, step, values in zip(args, steps, magnitudes, strict=True):
        own[..., : len(step.given)] = step.given
        own[..., step.column] = values
    return args


def _bins(noise: Noise | None, center: Floats, u: Floats, v: Floats, bins: int) -> Indices:
    """The bin of each level, from two uniform numbers."""
    if noise is None:
        return (u * bins).astype(np.int64)
    normal = np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * np.pi * v)
    flat = noise.deviation == math.inf
    level = center * u if flat else center + noise.deviation * normal
    return np.rint(np.clip(level / noise.upper, 0, 1) * (bins - 1)).astype(np.int64)


class Mix(NamedTuple):
    """AugMix: the weighted mean of an image and of what ``width`` chains of ops make of it.

    The weights are uniform over all that sum to 1: AugMix's ``alpha`` of 1.
    """

    chain: Slots
    width: int

    def sample(self, keys: Keys, picture: Picture) -> Program:
        """The chains, one after the other, with the weights."""
        each = fold(keys, np.arange(self.width)[:, None])
        program = program_of([self.chain], each.ravel(), picture)
        own = _dirichlet(fold(keys, -1), 2)
        weights = _dirichlet(fold(keys, -2), self.width) * own[1]
        mixed = np.concatenate([own[:1], weights]).astype(np.float32)
        return replace(program, weights=mixed)


def program_of(
    parts: Sequence[Slots], keys: Keys, picture: Picture, finals: Sequence[Slots] = ()
) -> Program:
    """A program for images with these keys; ``finals`` come after normalization."""
    every = (*parts, *finals)
    u = np.ascontiguousarray(uniform(keys, _numbers(every)).T)
    codes = np.zeros((len(keys), _size(every)), np.int32)
    args = np.zeros((*codes.shape, ARGS))
    _sample_each(every, u, picture, codes, args)
    return Program(codes, args, _size(finals))


def _sample_each(
    parts: Sequence[Slots], u: Floats, picture: Picture, codes: Ints, args: Floats
) -> None:
    number = 0
    slot = 0
    for part in parts:
        after = number + part.numbers
        last = slot + part.size
        part.sample(u[number:after], picture, codes[:, slot:last], args[:, slot:last])
        number = after
        slot = last


def _size(parts: Sequence[Slots]) -> int:
    return sum(part.size for part in parts)


def _numbers(parts: Sequence[Slots]) -> int:
    return sum(part.numbers for part in parts)


def _dirichlet(keys: Keys, count: int) -> Floats:
    """``(count, N)`` that sum to 1."""
    each = fold(keys, np.arange(count)[:, None])
    gammas = -np.log1p(-uniform(each.ravel(), 1)).reshape(each.shape)
    return np.asarray(gammas / gammas.sum(axis=0))
