"""Slots: in each of them every image of a batch has an op, drawn in NumPy from the image's key.

What a transform is compiled to is made of these. All of it can be pickled. Each has a number of
``slots``, takes ``numbers`` of random ones for an image, and writes ``(N, slots)`` codes and
``(N, slots, ARGS)`` arguments, zeros before, from ``(numbers, N)`` of them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpuprefetch.transforms.ops import ARGS, OPS, Program
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


@dataclass(frozen=True)
class One:
    """One slot with one op, for each image with a chance of ``p``."""

    name: str
    sample: Callable[[Floats, Picture], Columns]  # arguments of (draws, N) uniform numbers
    draws: int
    p: float = 1.0
    slots = 1

    @property
    def numbers(self) -> int:
        return 1 + self.draws

    def draw(self, u: Floats, picture: Picture, codes: Ints, args: Floats) -> None:
        for column, values in enumerate(self.sample(u[1:], picture)):
            args[:, 0, column] = values
        codes[:, 0] = (u[0] < self.p) * OPS[self.name]


@dataclass(frozen=True)
class _Several:
    parts: "tuple[Slots, ...]"

    @property
    def slots(self) -> int:
        return sum(part.slots for part in self.parts)

    @property
    def numbers(self) -> int:
        return 1 + sum(part.numbers for part in self.parts)


@dataclass(frozen=True)
class Row(_Several):
    """Slots one after the other; ``p`` is the chance that an image goes through them at all."""

    p: float = 1.0

    def draw(self, u: Floats, picture: Picture, codes: Ints, args: Floats) -> None:
        draw_each(self.parts, u[1:], picture, codes, args)
        codes *= (u[0] < self.p)[:, None]


@dataclass(frozen=True)
class Order(_Several):
    """The same in an order that each image draws."""

    @property
    def numbers(self) -> int:
        return len(self.parts) + sum(part.numbers for part in self.parts)

    def draw(self, u: Floats, picture: Picture, codes: Ints, args: Floats) -> None:
        count = len(self.parts)
        draw_each(self.parts, u[count:], picture, codes, args)
        part_of = np.repeat(np.arange(count), [part.slots for part in self.parts])
        order = np.argsort(u[part_of].T, axis=1, kind="stable")
        rows = np.arange(len(order))[:, None]
        codes[:], args[:] = codes[rows, order], args[rows, order]


@dataclass(frozen=True)
class Choice(_Several):
    """Each image goes through one of the parts, chosen with the chances ``p``, which sum to 1."""

    p: tuple[float, ...]

    @property
    def slots(self) -> int:
        return max(part.slots for part in self.parts)

    def draw(self, u: Floats, picture: Picture, codes: Ints, args: Floats) -> None:
        choice, first = np.searchsorted(np.cumsum(self.p)[:-1], u[0], side="right"), 1
        for number, part in enumerate(self.parts):
            rows = np.flatnonzero(choice == number)
            some_codes, some_args = codes[rows, : part.slots], args[rows, : part.slots]
            part.draw(u[first : first + part.numbers, rows], picture, some_codes, some_args)
            codes[rows, : part.slots], args[rows, : part.slots] = some_codes, some_args
            first += part.numbers


@dataclass(frozen=True)
class Step:
    """An op of RandAugment or its kin."""

    name: str
    magnitudes: Callable[[Picture], npt.ArrayLike]  # (B, 2): B bins, with one sign and the other
    column: int = 0  # the argument that the magnitude is
    args: tuple[float, ...] = ()  # that are not drawn
    chance: float = 1.0  # of the step, once it is chosen
    center: float = 0.0  # of normal levels
    other: str = ""  # the op in half of its draws


@dataclass(frozen=True, eq=False)
class Table:
    """Slots with one of many ops each: RandAugment and its kin.

    Of P policies with J steps each image draws one per layer; a step runs with its own chance.
    """

    policies: Sequence[Sequence[Step]]
    layers: int
    weights: Any = None  # (P,): drawn without replacement; None for equal chances
    most: bool = False  # the depth is drawn, from 1 to the number of layers
    # Deviation and upper bound of normal levels, which the bins divide; deviation inf for uniform
    # ones up to the center. None where all bins are equal.
    noise: tuple[float, float] | None = None
    _steps: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        blank = Step("IDENTITY", self.policies[0][0].magnitudes, chance=0.0)
        depth = max(map(len, self.policies))
        every = [s for policy in self.policies for s in (*policy, *[blank] * (depth - len(policy)))]
        codes = np.array([[OPS[s.name], OPS[s.other or s.name]] for s in every], np.int32)
        numbers = np.array([(s.chance, s.center) for s in every]).T
        object.__setattr__(self, "_steps", (every, depth, codes, *numbers))

    @property
    def slots(self) -> int:
        return self.layers * max(map(len, self.policies))

    @property
    def numbers(self) -> int:
        chosen = self.layers if self.weights is None else len(self.policies)
        return 5 * self.slots + chosen + 1

    def draw(self, u: Floats, picture: Picture, codes: Ints, args: Floats) -> None:
        _, depth, every_code, chances, centers = self._steps
        u, choice, layers = u[: 5 * self.slots], u[5 * self.slots : -1], u[-1]
        if self.weights is None:
            chosen = (choice * len(self.policies)).astype(np.int64).T
        else:  # Efraimidis and Spirakis: the largest of u ** (1 / weight)
            chosen = np.argsort(np.log1p(-choice.T) / -np.asarray(self.weights), axis=1)[
                :, : self.layers
            ]
        step = (chosen[:, :, None] * depth + np.arange(depth)).reshape(codes.shape)
        runs, one, two, sign, other = u.reshape(5, self.slots, -1).transpose(0, 2, 1)
        kept = runs < chances[step]
        if self.most:
            kept &= np.arange(self.slots) // depth <= np.floor(layers * self.layers)[:, None]
        codes[:] = every_code[step, (other >= 0.5).astype(np.int64)] * kept
        given = _arguments(self, picture)
        bins = self._bins(centers, step, one, two, given.shape[1])
        args[:] = given[step, bins, (sign > 0.5).astype(np.int64)]

    def _bins(self, centers: Floats, step: Any, u: Floats, v: Floats, bins: int) -> Any:
        if self.noise is None:
            return (u * bins).astype(np.int64)
        deviation, upper = self.noise
        center = centers[step]
        level = center * u if deviation == math.inf else center + deviation * normal(u, v)
        return np.asarray(np.rint(np.clip(level / upper, 0, 1) * (bins - 1)), dtype=np.int64)


ROTATION = -1


@lru_cache(maxsize=16)
def _arguments(table: Table, picture: Picture) -> Floats:
    """``(P * J, B, 2, ARGS)``, of each step with each magnitude."""
    steps = table._steps[0]
    magnitudes = np.array([step.magnitudes(picture) for step in steps], np.float64)
    args = np.zeros((*magnitudes.shape, ARGS))
    for own, step, values in zip(args, steps, magnitudes, strict=True):
        own[..., : len(step.args)] = step.args
        if step.column == ROTATION:
            own[..., :6] = _rotation(values, picture)
        else:
            own[..., step.column] = values
    return args


def _rotation(angle: Floats, picture: Picture) -> Floats:
    """``(..., 6)``: from output to source coordinates, in pixels from the corner."""
    cos, sin = np.cos(np.radians(angle)), np.sin(np.radians(angle))
    x, y = picture.width / 2, picture.height / 2
    return np.stack([cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y], axis=-1)


Slots = One | Row | Order | Choice | Table


@dataclass(frozen=True)
class Mix:
    """AugMix: the weighted mean of an image and of what ``width`` chains of ops make of it.

    The weights are uniform over all that sum to 1: AugMix's ``alpha`` of 1.
    """

    chain: Table
    width: int

    def draw(self, keys: Keys, picture: Picture) -> Program:
        """The chains, one after the other, with the weights."""
        each = fold(keys, np.arange(self.width)[:, None])
        program = program_of([self.chain], each.ravel(), picture)
        program.rows = np.tile(np.arange(len(keys)), self.width)
        own = _dirichlet(fold(keys, -1), 2)
        weights = _dirichlet(fold(keys, -2), self.width) * own[1]
        program.weights = np.concatenate([own[:1], weights]).astype(np.float32)
        return program


def program_of(
    parts: Sequence[Slots], keys: Keys, picture: Picture, finals: Sequence[Slots] = ()
) -> Program:
    every = (*parts, *finals)
    u = np.ascontiguousarray(uniform(keys, sum(part.numbers for part in every)).T)
    codes = np.zeros((len(keys), sum(part.slots for part in every)), np.int32)
    args = np.zeros((*codes.shape, ARGS))
    draw_each(every, u, picture, codes, args)
    return Program(codes, args, sum(part.slots for part in finals))


def draw_each(
    parts: Sequence[Slots], u: Floats, picture: Picture, codes: Ints, args: Floats
) -> None:
    number = slot = 0
    for part in parts:
        after, last = number + part.numbers, slot + part.slots
        part.draw(u[number:after], picture, codes[:, slot:last], args[:, slot:last])
        number, slot = after, last


def normal(u: Floats, v: Floats) -> Floats:
    return np.asarray(np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * np.pi * v))


def _dirichlet(keys: Keys, count: int) -> Floats:
    each = fold(keys, np.arange(count)[:, None])
    gammas = -np.log1p(-uniform(each.ravel(), 1)).reshape(each.shape)
    return np.asarray(gammas / gammas.sum(axis=0))
