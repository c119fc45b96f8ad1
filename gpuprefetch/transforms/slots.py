"""Slots: in each of them every image of a batch has an op, drawn in NumPy from the image's key.

What a transform is compiled to is made of these. ``draw`` gives of N images with S slots the codes
``(N, S)`` int32 and the arguments ``(N, S, ARGS)`` float64 of :mod:`gpuprefetch.transforms.ops`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gpuprefetch.transforms.ops import ARGS, OPS, Program
from gpuprefetch.transforms.random import Keys, fold, uniform

Floats = npt.NDArray[np.float64]
Drawn = tuple[npt.NDArray[np.int32], Floats]
Columns = Sequence[npt.ArrayLike]


class Picture(NamedTuple):
    """What arguments depend on, besides random numbers: the images' size, and their white."""

    height: int
    width: int
    channels: int = 3
    white: float = 255.0  # 1.0 in floating point


class Slots(Protocol):
    """Something that takes a number of slots."""

    @property
    def slots(self) -> int:
        """How many."""

    def draw(self, keys: Keys, picture: Picture) -> Drawn:
        """The ops of the images with these ``(N,)`` keys."""


def nothing(u: Floats, picture: Picture) -> Columns:
    """The arguments of an op that has none."""
    return ()


@dataclass(frozen=True)
class One:
    """One slot with one op, for each image with a chance of ``p``.

    Attributes:
        name: of the op.
        sample: gives the columns of the arguments, from ``(draws, N)`` uniform numbers.
        draws: how many numbers that takes.
        p: the chance.
    """

    name: str
    sample: Callable[[Floats, Picture], Columns] = nothing
    draws: int = 0
    p: float = 1.0
    slots = 1

    def draw(self, keys: Keys, picture: Picture) -> Drawn:
        u = uniform(keys, 1 + self.draws).T
        args = np.zeros((len(keys), 1, ARGS))
        for column, values in enumerate(self.sample(u[1:], picture)):
            args[:, 0, column] = values
        codes = np.where(u[0] < self.p, OPS[self.name].code, 0)
        return codes[:, None].astype(np.int32), args


@dataclass(frozen=True)
class Row:
    """Slots one after the other; ``p`` is the chance that an image goes through them at all."""

    parts: tuple[Slots, ...]
    p: float = 1.0

    @property
    def slots(self) -> int:
        return sum(part.slots for part in self.parts)

    def draw(self, keys: Keys, picture: Picture) -> Drawn:
        codes, args = together(self.parts, keys, picture)
        if self.p < 1:
            codes = np.where(uniform(fold(keys, -1), 1) < self.p, codes, 0)
        return codes, args


@dataclass(frozen=True)
class Order:
    """The same in an order that each image draws."""

    parts: tuple[Slots, ...]

    @property
    def slots(self) -> int:
        return sum(part.slots for part in self.parts)

    def draw(self, keys: Keys, picture: Picture) -> Drawn:
        codes, args = together(self.parts, keys, picture)
        ranks = uniform(fold(keys, -1), len(self.parts))
        part_of = np.repeat(np.arange(len(self.parts)), [part.slots for part in self.parts])
        order = np.argsort(ranks[:, part_of], axis=1, kind="stable")
        args = np.take_along_axis(args, order[:, :, None], axis=1)
        return np.take_along_axis(codes, order, axis=1), args


@dataclass(frozen=True)
class Choice:
    """Each image goes through one of the parts, chosen with the chances ``p``, which sum to 1."""

    parts: tuple[Slots, ...]
    p: tuple[float, ...]

    @property
    def slots(self) -> int:
        return max(part.slots for part in self.parts)

    def draw(self, keys: Keys, picture: Picture) -> Drawn:
        choice = _chosen(uniform(fold(keys, -1), 1)[:, 0], self.p)
        codes = np.zeros((len(keys), self.slots), dtype=np.int32)
        args = np.zeros((len(keys), self.slots, ARGS))
        for number, part in enumerate(self.parts):
            rows = np.flatnonzero(choice == number)
            chosen = part.draw(fold(keys[rows], number), picture)
            codes[rows, : part.slots], args[rows, : part.slots] = chosen
        return codes, args


@dataclass(frozen=True)
class Distort:
    """RandomPhotometricDistort: its contrast comes before saturation and hue, or after them."""

    row: Row  # brightness, contrast, saturation, hue, contrast, permutation

    @property
    def slots(self) -> int:
        return self.row.slots

    def draw(self, keys: Keys, picture: Picture) -> Drawn:
        codes, args = self.row.draw(keys, picture)
        before = uniform(fold(keys, -1), 1)[:, 0] < 0.5
        # Not two chances for contrast, but one, in one of two places.
        codes[:, 4] = np.where(before, 0, codes[:, 1])
        codes[:, 1] *= before
        args[:, 4] = args[:, 1]
        return codes, args


@dataclass(frozen=True, eq=False)
class Table:
    """Slots with one of many ops each: RandAugment and its kin.

    Of P policies with J steps each image draws one per layer; a step runs with its own chance.

    Attributes:
        codes: ``(P, J)`` int32, of the op.
        args: ``(P, J, ARGS)``, the arguments that are not drawn.
        columns: ``(P, J)`` int64, the argument that the magnitude is; :data:`ROTATION` where it is
            the angle of a ``MATRIX`` op.
        magnitudes: gives ``(P, J, B, 2)``, the magnitudes of B bins with one sign and the other.
        chances: ``(P, J)``.
        layers: how many policies are drawn.
        weights: ``(P,)``, of the policies, drawn without replacement; None for equal chances.
        most: the depth is drawn, from 1 to the number of layers.
        noise: ``(centers (P, J), deviation, upper)`` of normal levels, which the bins divide;
            deviation inf for uniform ones up to the center. None where all bins are equal.
        others: ``(P, J)`` int32, the code of a step in half of its draws.
    """

    codes: npt.NDArray[np.int32]
    args: Floats
    columns: npt.NDArray[np.int64]
    magnitudes: Callable[[Picture], Floats]
    chances: Floats
    layers: int
    weights: Floats | None = None
    most: bool = False
    noise: tuple[Floats, float, float] | None = None
    others: npt.NDArray[np.int32] | None = None

    @property
    def slots(self) -> int:
        return self.layers * self.codes.shape[1]

    def draw(self, keys: Keys, picture: Picture) -> Drawn:
        count, (policies, steps) = len(keys), self.codes.shape
        if self.weights is None:
            chosen = (uniform(fold(keys, -1), self.layers) * policies).astype(np.int64)
        else:  # Efraimidis and Spirakis: the largest of u ** (1 / weight)
            u = uniform(fold(keys, -1), policies)
            chosen = np.argsort(np.log1p(-u) / -self.weights, axis=1)[:, : self.layers]
        entry = (chosen[:, :, None] * steps + np.arange(steps)).reshape(count, -1)
        u = uniform(keys, 5 * self.slots).reshape(count, self.slots, 5)
        magnitudes = _magnitudes(self, picture)
        bins = magnitudes.shape[2]
        bin_ = self._bins(entry, u[..., 1], u[..., 2], bins)
        flat = magnitudes.reshape(-1, bins, 2)[entry, bin_, (u[..., 3] > 0.5).astype(np.int64)]
        runs = u[..., 0] < self.chances.ravel()[entry]
        if self.most:
            depth = np.floor(uniform(fold(keys, -2), 1) * self.layers)
            runs &= np.repeat(np.arange(self.layers), steps) <= depth
        codes = self.codes.ravel()[entry]
        if self.others is not None:
            codes = np.where(u[..., 4] < 0.5, codes, self.others.ravel()[entry])
        args, column = self.args.reshape(-1, ARGS)[entry], self.columns.ravel()[entry]
        np.put_along_axis(args, np.maximum(column, 0)[..., None], flat[..., None], axis=2)
        turned = column == ROTATION
        if turned.any():
            args[turned, :6] = _rotation(flat[turned], picture)
        return np.where(runs, codes, 0).astype(np.int32), args

    def _bins(self, entry: Any, u: Floats, v: Floats, bins: int) -> npt.NDArray[np.int64]:
        if self.noise is None:
            return (u * bins).astype(np.int64)
        centers, deviation, upper = self.noise
        level = centers.ravel()[entry]
        if deviation == math.inf:
            level = level * u
        else:
            level = level + deviation * normal(u, v)
        return np.rint(np.clip(level / upper, 0, 1) * (bins - 1)).astype(np.int64)


ROTATION = -1


@lru_cache(maxsize=16)
def _magnitudes(table: Table, picture: Picture) -> Floats:
    return table.magnitudes(picture)


def _rotation(angle: Floats, picture: Picture) -> Floats:
    """``(M, 6)``: from output to source coordinates, in pixels from the corner."""
    cos, sin = np.cos(np.radians(angle)), np.sin(np.radians(angle))
    x, y = picture.width / 2, picture.height / 2
    return np.stack([cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y], axis=1)


@dataclass(frozen=True)
class Mix:
    """AugMix: the weighted mean of an image and of what ``width`` chains of ops make of it."""

    chain: Table
    width: int
    alpha: float

    def draw(self, keys: Keys, picture: Picture) -> tuple[Program, Floats]:
        """The chains, one after the other, and the weights ``(N, 1 + width)``, the image's first."""
        each = np.concatenate([fold(keys, number) for number in range(self.width)])
        rows = np.tile(np.arange(len(keys)), self.width)
        own = _dirichlet(fold(keys, -1), self.alpha, 2)
        weights = _dirichlet(fold(keys, -2), self.alpha, self.width) * own[:, 1:]
        program = program_of([self.chain], each, picture)
        program.rows = rows
        return program, np.concatenate([own[:, :1], weights], axis=1)


def program_of(
    parts: Sequence[Slots], keys: Keys, picture: Picture, finals: Sequence[Slots] = ()
) -> Program:
    """The program of a batch: the slots of ``parts``, and ``finals`` after normalization."""
    codes, args = together([*parts, *finals], keys, picture)
    codes, args = np.ascontiguousarray(codes.T), np.ascontiguousarray(args.transpose(1, 0, 2))
    return Program(codes, args, sum(part.slots for part in finals))


def together(parts: Sequence[Slots], keys: Keys, picture: Picture) -> Drawn:
    """The slots of several parts, side by side."""
    drawn = [part.draw(fold(keys, number), picture) for number, part in enumerate(parts)]
    codes = [np.zeros((len(keys), 0), dtype=np.int32), *(codes for codes, _ in drawn)]
    args = [np.zeros((len(keys), 0, ARGS)), *(args for _, args in drawn)]
    return np.concatenate(codes, axis=1), np.concatenate(args, axis=1)


def _chosen(u: Floats, p: Sequence[float]) -> npt.NDArray[np.int64]:
    """Indices with the chances ``p``."""
    return np.searchsorted(np.cumsum(p)[:-1], u, side="right").astype(np.int64)


def normal(u: Floats, v: Floats) -> Floats:
    """Normal numbers from uniform ones (Box and Muller)."""
    return np.asarray(np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * np.pi * v))


def _dirichlet(keys: Keys, alpha: float, count: int) -> Floats:
    """``(N, count)`` weights that sum to 1."""
    gammas = np.stack([_gamma(fold(keys, number), alpha) for number in range(count)], axis=1)
    return np.asarray(gammas / gammas.sum(axis=1, keepdims=True))


def _gamma(keys: Keys, alpha: float) -> Floats:
    """``(N,)`` gamma numbers (Marsaglia and Tsang, 2000), for ``alpha`` below 1 by a power."""
    tries = 8  # each is taken with a chance of at least 0.95
    u = uniform(keys, 3 * tries + 1)
    d = alpha + (alpha < 1) - 1 / 3
    x = normal(u[:, :tries], u[:, tries : 2 * tries])
    v = np.maximum(1 + x / math.sqrt(9 * d), 1e-9) ** 3
    taken = np.log1p(-u[:, 2 * tries : 3 * tries]) < x**2 / 2 + d - d * v + d * np.log(v)
    gamma = d * v[np.arange(len(keys)), taken.argmax(axis=1)]
    return np.asarray(gamma * (1 - u[:, -1]) ** (1 / alpha) if alpha < 1 else gamma)
