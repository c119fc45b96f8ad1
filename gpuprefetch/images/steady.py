"""Datasets whose samples depend on nothing but a list of files, and whether that has changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from gpuprefetch.images.folder import EncodedImageFolder

Dataset = Any  # of any class

# A list of more samples is not compared: that takes milliseconds, and an epoch of so many is long.
MOST = 1 << 18


@dataclass(frozen=True, slots=True)
class Steady:
    """What the samples of a dataset are made of: its files and targets, and subsets of these.

    Two are equal if the datasets give the same samples. A dataset with code of its own could read
    anything else, and has none.

    Example:
        >>> Steady.of(Subset(folder, [5, 8]))
        Steady(dataset=..., contents=[5, 8], parts=(Steady(dataset=folder, contents=[...]),))
    """

    dataset: int  # its identity: that of its state, which views of it share
    contents: list[object]
    parts: tuple[Steady, ...] = ()

    @classmethod
    def of(cls, dataset: Dataset) -> Steady | None:
        """What a dataset's samples are made of; None where that is not known."""
        identity = id(getattr(dataset, "__dict__", dataset))
        reads = getattr(type(dataset), "__getitem__", None)
        at_once = getattr(type(dataset), "__getitems__", None)  # which torch's fetcher prefers
        if at_once not in (None, Subset.__getitems__):
            return None
        if reads is Subset.__getitem__:
            indices = dataset.indices
            if not isinstance(indices, (list, tuple, range)) or len(indices) > MOST:
                return None
            return _around(identity, [*indices], [dataset.dataset])
        if reads is ConcatDataset.__getitem__:
            return _around(identity, [*dataset.cumulative_sizes], dataset.datasets)
        if reader_of(dataset) is not EncodedImageFolder.__getitem__:
            return None
        facts = vars(dataset)
        samples = facts.get("samples")
        if not isinstance(samples, list) or len(samples) > MOST:
            return None
        # A tuple cannot change, and each is compared by its identity first.
        plain = set(map(type, samples)) <= {tuple} and facts.get("target_transform") is None
        return cls(identity, [*samples]) if plain else None


def _around(identity: int, contents: list[object], datasets: list[Dataset]) -> Steady | None:
    parts = [Steady.of(dataset) for dataset in datasets]
    known = tuple(part for part in parts if part is not None)
    return Steady(identity, contents, known) if len(known) == len(parts) else None


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
