"""Slots: in each of them every image of a batch has an op, drawn in NumPy from the image's key."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpuprefetch.policies.ops import ARGS, OPS, Program
from gpuprefetch.transforms.random import Keys, fold, uniform

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Columns = Sequence[npt.ArrayLike]


class Picture(NamedTuple):
    """What arguments depend on, besides random numbers."""

    height: int
    width: int
    channels: int = 3
    white: float = 255.0  # 1.0 in floating point


class Slots(NamedTuple):
    """What a transform is compiled to."""

    size: int
    numbers: int  # random ones that it takes for an image
    # Writes (N, size) codes and (N, size, ARGS) arguments, zeros before, of (numbers, N) of them.
    draw: Callable[[Floats, Picture, Ints, Floats], None]


def one(
    name: str, sample: Callable[[Floats, Picture], Columns], draws: int, p: float = 1.0
) -> Slots:
    """One op, for each image with a chance of ``p``; its arguments are sampled from ``draws``."""

    def draw(u: Floats, picture: Picture, codes: Ints, args: Floats) -> None:
        for column, values in enumerate(sample(u[1:], picture)):
            args[:, 0, column] = values
        codes[:, 0] = (u[0] < p) * OPS[name]

    return Slots(1, 1 + draws, draw)


def row(parts: Sequence[Slots], p: float = 1.0) -> Slots:
    """Slots one after the other; ``p`` is the chance that an image goes through them at all."""

    def draw(u: Floats, picture: Picture, codes: Ints, args: Floats) -> None:
        _draw_each(parts, u[1:], picture, codes, args)
        codes *= (u[0] < p)[:, None]

    return Slots(_size(parts), 1 + _numbers(parts), draw)


def order(parts: Sequence[Slots]) -> Slots:
    """The same in an order that each image draws."""
    part_of = np.repeat(np.arange(len(parts)), [part.size for part in parts])

    def draw(u: Floats, picture: Picture, codes: Ints, args: Floats) -> None:
        _draw_each(parts, u[len(parts) :], picture, codes, args)
        drawn = np.argsort(u[part_of].T, axis=1, kind="stable")
        images = np.arange(len(drawn))[:, None]
        codes[:], args[:] = codes[images, drawn], args[images, drawn]

    return Slots(_size(parts), len(parts) + _numbers(parts), draw)


def choice(parts: Sequence[Slots], p: Sequence[float]) -> Slots:
    """Each image goes through one of the parts, chosen with the chances ``p``, which sum to 1."""

    def draw(u: Floats, picture: Picture, codes: Ints, args: Floats) -> None:
        chosen, first = np.searchsorted(np.cumsum(p)[:-1], u[0], side="right"), 1
        for number, (count, numbers, draw_part) in enumerate(parts):
            images = np.flatnonzero(chosen == number)
            some_codes, some_args = codes[images, :count], args[images, :count]
            draw_part(u[first : first + numbers, images], picture, some_codes, some_args)
            codes[images, :count], args[images, :count] = some_codes, some_args
            first += numbers

    return Slots(max(part.size for part in parts), 1 + _numbers(parts), draw)


class Step(NamedTuple):
    """An op of RandAugment or its kin."""

    name: str
    magnitudes: Callable[[Picture], Any]  # (B, 2): of B bins, with one sign and the other
    column: int | slice = 0  # which of the arguments they are ...
    given: Sequence[float] = ()  # ... of these
    chance: float = 1.0  # of the step, once it is chosen
    center: float = 0.0  # of normal levels
    other: str = ""  # the op in half of its draws


def table(
    policies: Sequence[Sequence[Step]],
    layers: int,
    *,
    weights: Any = None,
    noise: tuple[float, float] | None = None,
) -> Slots:
    """Slots with one of many ops each: RandAugment and its kin.

    Of the policies each image draws one per layer, without replacement where they have ``weights``;
    for ``layers`` of -1 it draws how many, 1 to 3. A step runs with its own chance. ``noise`` is
    the deviation and the upper bound of normal levels, which the bins divide; deviation inf is for
    uniform ones up to the center, None for bins with equal chances.
    """
    if layers == 0:
        return row(())
    most, layers = layers < 0, layers if layers > 0 else 3
    depth = max(map(len, policies))
    blank = Step("IDENTITY", policies[0][0].magnitudes, chance=0.0)
    steps = [s for policy in policies for s in (*policy, *[blank] * (depth - len(policy)))]
    every_code = np.array([[OPS[s.name], OPS[s.other or s.name]] for s in steps], np.int32)
    chances, centers = np.array([(s.chance, s.center) for s in steps]).T
    count, choices = layers * depth, layers if weights is None else len(policies)

    @lru_cache(maxsize=4)
    def every_argument(picture: Picture) -> Floats:
        magnitudes = [step.magnitudes(picture) for step in steps]
        args = np.zeros((len(steps), len(magnitudes[0]), 2, ARGS))
        for own, step, values in zip(args, steps, magnitudes, strict=True):
            own[..., : len(step.given)] = step.given
            own[..., step.column] = values
        return args

    def bins_of(center: Floats, u: Floats, v: Floats, bins: int) -> Any:
        if noise is None:
            return (u * bins).astype(np.int64)
        deviation, upper = noise
        normal = np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * np.pi * v)
        level = center * u if deviation == math.inf else center + deviation * normal
        return np.rint(np.clip(level / upper, 0, 1) * (bins - 1)).astype(np.int64)

    def draw(u: Floats, picture: Picture, codes: Ints, args: Floats) -> None:
        u, chooses, layer = u[: 5 * count], u[5 * count : -1], u[-1]
        if weights is None:
            chosen = (chooses * len(policies)).astype(np.int64).T
        else:  # Efraimidis and Spirakis: the largest of u ** (1 / weight)
            chosen = np.argsort(np.log1p(-chooses.T) / -np.asarray(weights), axis=1)[:, :layers]
        step = (chosen[:, :, None] * depth + np.arange(depth)).reshape(codes.shape)
        runs, level, second, sign, other = u.reshape(5, count, -1).transpose(0, 2, 1)
        kept = runs < chances[step]
        if most:
            kept &= np.arange(count) // depth <= np.floor(layer * layers)[:, None]
        codes[:] = every_code[step, (other >= 0.5).astype(np.int64)] * kept
        given = every_argument(picture)
        bins = bins_of(centers[step], level, second, given.shape[1])
        args[:] = given[step, bins, (sign > 0.5).astype(np.int64)]

    return Slots(count, 5 * count + choices + 1, draw)


class Mix(NamedTuple):
    """AugMix: the weighted mean of an image and of what ``width`` chains of ops make of it.

    The weights are uniform over all that sum to 1: AugMix's ``alpha`` of 1.
    """

    chain: Slots
    width: int

    def draw(self, keys: Keys, picture: Picture) -> Program:
        """The chains, one after the other, with the weights."""
        each = fold(keys, np.arange(self.width)[:, None])
        program = program_of([self.chain], each.ravel(), picture)
        own = _dirichlet(fold(keys, -1), 2)
        weights = _dirichlet(fold(keys, -2), self.width) * own[1]
        program.weights = np.concatenate([own[:1], weights]).astype(np.float32)
        return program


def program_of(
    parts: Sequence[Slots], keys: Keys, picture: Picture, finals: Sequence[Slots] = ()
) -> Program:
    every = (*parts, *finals)
    u = np.ascontiguousarray(uniform(keys, _numbers(every)).T)
    codes = np.zeros((len(keys), _size(every)), np.int32)
    args = np.zeros((*codes.shape, ARGS))
    _draw_each(every, u, picture, codes, args)
    return Program(codes, args, _size(finals))


def _draw_each(
    parts: Sequence[Slots], u: Floats, picture: Picture, codes: Ints, args: Floats
) -> None:
    number = slot = 0
    for part in parts:
        after, last = number + part.numbers, slot + part.size
        part.draw(u[number:after], picture, codes[:, slot:last], args[:, slot:last])
        number, slot = after, last


def _size(parts: Sequence[Slots]) -> int:
    return sum(part.size for part in parts)


def _numbers(parts: Sequence[Slots]) -> int:
    return sum(part.numbers for part in parts)


def _dirichlet(keys: Keys, count: int) -> Floats:
    each = fold(keys, np.arange(count)[:, None])
    gammas = -np.log1p(-uniform(each.ravel(), 1)).reshape(each.shape)
    return np.asarray(gammas / gammas.sum(axis=0))
