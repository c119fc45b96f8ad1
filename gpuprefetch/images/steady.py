"""Datasets whose samples depend on nothing but a list of files, and whether that has changed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import PurePath
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from gpuprefetch.core.loaders import length_of
from gpuprefetch.images.folder import EncodedImageFolder

Dataset = Any  # of any class

# A list of more samples is not compared: that takes milliseconds, and an epoch of so many is long.
MOST = 1 << 18
# Values that nobody can change in place.
_FIXED = (int, float, str, bytes, type(None), np.number, np.bool_, np.str_, np.bytes_, PurePath)


@dataclass(frozen=True, slots=True, eq=False)
class Steady:
    """What the samples of a dataset are made of: its files and targets, and subsets of these.

    Two are equal if they have the very same entries: the datasets give the same samples, as nobody
    can change an entry of what :meth:`of` gives. A dataset with code of its own could read anything
    else, and has none.

    Example:
        >>> Steady.of(Subset(folder, [5, 8]))
        Steady(dataset=..., length=2, contents=[5, 8], parts=(Steady(dataset=folder, ...),))
    """

    dataset: int  # its identity: that of its state, which views of it share
    length: int  # as the dataset says it: samplers go by that
    contents: Sequence[object]
    parts: tuple[Steady, ...] = ()

    @classmethod
    def of(cls, dataset: Dataset) -> Steady | None:
        """What a dataset's samples are made of; None where that is not known, or could change."""
        now = cls.as_it_is(dataset)
        return now if now is not None and now._is_fixed() else None

    @classmethod
    def as_it_is(cls, dataset: Dataset) -> Steady | None:
        """The same, also of entries that could change: to compare it with what was."""
        length = length_of(dataset)
        at_once = getattr(type(dataset), "__getitems__", None)  # which torch's fetcher prefers
        if length is None or at_once not in (None, Subset.__getitems__):
            return None
        contents = _contents(dataset)
        if contents is None or len(contents) > MOST:
            return None
        parts = [cls.as_it_is(part) for part in _within(dataset)]
        known = tuple(part for part in parts if part is not None)
        if len(known) < len(parts):
            return None
        copied = contents if isinstance(contents, range) else [*contents]
        return cls(id(getattr(dataset, "__dict__", dataset)), length, copied, known)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Steady)
            and (self.dataset, self.length) == (other.dataset, other.length)
            and _are_same(self.contents, other.contents)
            and self.parts == other.parts
        )

    def _is_fixed(self) -> bool:
        entries: Iterable[object] = self.contents
        if set(map(type, entries)) == {tuple}:  # paths and targets
            entries = chain.from_iterable(self.contents)  # type: ignore[arg-type]
        kinds = set(map(type, entries))
        return all(issubclass(kind, _FIXED) for kind in kinds) and all(
            part._is_fixed() for part in self.parts
        )


def _are_same(first: Sequence[object], second: Sequence[object]) -> bool:
    """Whether two lists have the same objects. Equal ones need not be of one truth, as arrays."""
    if isinstance(first, range) or isinstance(second, range):
        return first == second
    return len(first) == len(second) and all(map(operator.is_, first, second))


def _contents(dataset: Dataset) -> Sequence[object] | None:
    """The entries that say which samples a dataset has; None where something else says it."""
    reads = getattr(type(dataset), "__getitem__", None)
    if reads is Subset.__getitem__:
        indices = dataset.indices
        return indices if isinstance(indices, (list, tuple, range)) else None
    if reads is ConcatDataset.__getitem__:
        return list(dataset.cumulative_sizes)
    if reader_of(dataset) is not EncodedImageFolder.__getitem__:
        return None
    facts = vars(dataset)
    samples = facts.get("samples")
    listed = isinstance(samples, list) and facts.get("target_transform") is None
    return samples if listed else None


def _within(dataset: Dataset) -> list[Dataset]:
    """The datasets that a view of datasets is of; none for a folder."""
    reads = getattr(type(dataset), "__getitem__", None)
    if reads is Subset.__getitem__:
        return [dataset.dataset]
    return [*dataset.datasets] if reads is ConcatDataset.__getitem__ else []


def first_file(dataset: Dataset) -> str:
    """The path of a folder's first file, also of a subset of the folder; empty for others."""
    if reader_of(dataset) is EncodedImageFolder.__getitem__:
        samples = vars(dataset).get("samples")
        return str(samples[0][0]) if samples else ""
    return next((path for part in _within(dataset) if (path := first_file(part))), "")


def reader_of(dataset: Dataset) -> Callable[..., object] | None:
    """What reads a sample of a folder: its class's ``__getitem__``, or what a view says of itself.

    None for a class that computes the attributes that are read.
    """
    kind: Any = type(dataset)
    computed = [hasattr(kind, name) for name in ("samples", "target_transform")]
    if any(computed) or kind.__getattribute__ is not object.__getattribute__:
        return None
    reads: Callable[..., object] | None = getattr(
        kind, "_reads_like", getattr(kind, "__getitem__", None)
    )
    return reads
