"""Columns: the parts of a batch that have one entry per sample, found after the collate function.

:func:`mark` finds the lists, :func:`fate` tells whether they hold all boxes, masks and points, and
:func:`unstack` takes stacks apart again before later transforms move what is in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

import torch
from torch.utils.data import default_collate

from gpuprefetch.core.nested import children_of, map_leaves
from gpuprefetch.images.fate import Fate
from gpuprefetch.images.prepared import ENCODED
from gpuprefetch.images.walk import (
    PLAIN_TYPES,
    Contents,
    Follower,
    PerSample,
    is_follower,
    is_image,
    is_per_sample,
    walk,
)

Structure = TypeVar("Structure")  # a batch; the same structure comes back


@dataclass(frozen=True, slots=True)
class Owners:
    """The samples that a collate function got, each walked once.

    Attributes:
        samples: those that have an image, in their order. Empty for an item that the dataset made
            whole, as with ``batch_size=None``.
        followers: how many boxes, masks and points all samples have.
    """

    samples: list[Contents]
    followers: int

    @staticmethod
    def of(samples: object) -> Owners:
        """Walk the samples, or one item.

        Raises:
            TypeError: if a sample has a tensor where another one has an encoded image.
        """
        if not isinstance(samples, list):
            return Owners([], len(walk(samples).followers))
        contents = [walk(sample) for sample in samples]
        with_image = [found for found in contents if found.images]
        if 0 < len(with_image) < len(contents):
            _refuse_mixed(samples, contents)
        return Owners(with_image, sum(len(found.followers) for found in contents))

    def own_each(self, entries: Sequence[object]) -> bool:
        """Whether each entry of a list holds objects of its own sample, and of no other one."""
        known = set[int]().union(*(sample.parts for sample in self.samples))
        shared = [known & walk(entry).parts for entry in entries]
        pairs = zip(shared, self.samples, strict=True)
        return all(ids and ids <= sample.parts for ids, sample in pairs)


def _refuse_mixed(samples: Sequence[object], contents: Sequence[Contents]) -> None:
    """Refuse a tensor in the place where another sample has an encoded image.

    The transforms would leave it as it is.
    """
    model = next(number for number, found in enumerate(contents) if found.images)
    for number, sample in enumerate(samples):
        is_holder = bool(contents[number].images)
        tensor = None if is_holder else _in_place_of_image(samples[model], sample)
        if tensor is not None:
            raise TypeError(
                f"Sample {model} of a batch has an EncodedImage where sample {number} has a tensor "
                f"{tuple(tensor.shape)}, which no transform would change. Return "
                "EncodedImage(data, index, path) in all samples. For pixels data may be "
                "torchcodec.encoders.PngEncoder(tensor).to_tensor()."
            )


def _in_place_of_image(model: object, sample: object) -> torch.Tensor | None:
    """The first tensor of a sample that is where a sample like it has an encoded image."""
    if is_image(model):
        return sample if isinstance(sample, torch.Tensor) else None
    if isinstance(model, Mapping) and isinstance(sample, Mapping):
        pairs = [(model[key], sample[key]) for key in model if key in sample]
    else:
        parts = (children_of(model, is_image) or (), children_of(sample, None) or ())
        pairs = list(zip(*parts, strict=False))
    found = (_in_place_of_image(one, other) for one, other in pairs)
    return next((tensor for tensor in found if tensor is not None), None)


def mark(batch: Structure, owners: Owners) -> Structure:
    """Make a :class:`PerSample` of every list that has one entry per sample.

    Such a list lies beside a list of the images, or its entries hold objects of their own samples.

    Example:
        For two samples ``(image, {"boxes": boxes})``, ``zip`` makes ``((image, image), ({...},
        {...}))``. The second tuple lies beside the images: it becomes a :class:`PerSample`.
    """
    if not owners.samples:
        return batch
    columns = {id(column) for column in _columns(batch, owners, beside_images=False)}

    def is_column(node: object) -> bool:
        return id(node) in columns or is_image(node)

    def marked(leaf: Any) -> object:
        return PerSample(leaf, type(leaf)) if id(leaf) in columns else leaf

    return map_leaves(marked, batch, is_column)  # type: ignore[no-any-return]


def _columns(node: object, owners: Owners, *, beside_images: bool) -> Iterator[Sequence[Any]]:
    """The lists in a node that have one entry per sample."""
    if isinstance(node, ENCODED):
        return
    if _is_list_of(node, len(owners.samples)) and not walk(node).images:
        if beside_images or owners.own_each(node):
            yield node
            return
    children = children_of(node, None) or ()
    if PLAIN_TYPES.issuperset(map(type, children)):
        return
    beside_images = any(
        _is_list_of(child, len(owners.samples)) and all(map(is_image, child)) for child in children
    )
    for child in children:
        yield from _columns(child, owners, beside_images=beside_images)


def _is_list_of(node: object, count: int) -> TypeGuard[Sequence[Any]]:
    return isinstance(node, (list, tuple)) and type(node) in (list, tuple) and len(node) == count


def fate(batch: object, owners: Owners) -> Fate | None:
    """What a collate function did with boxes, masks and points; None if the samples have none."""
    if not owners.followers:
        return None
    count = len(owners.samples)
    found = walk(batch)
    stacks = sum(_is_stack(follower, count) for follower in found.followers)
    kept = len(found.in_columns) + stacks * count
    return Fate.KEPT if kept == owners.followers else Fate.LOST


def _is_stack(follower: Follower, count: int) -> bool:
    """Whether masks or points have one entry per sample; boxes differ in number."""
    return not hasattr(follower, "format") and len(follower) == count


def unstack(batch: Structure, count: int) -> Structure:
    """Make a :class:`PerSample` of every stack of ``count`` masks or points."""

    def split(leaf: object) -> object:
        if is_per_sample(leaf) or not is_follower(leaf) or not _is_stack(leaf, count):
            return leaf
        from torchvision import tv_tensors

        entries = [tv_tensors.wrap(entry, like=leaf) for entry in torch.unbind(leaf)]
        return PerSample(entries, stack)

    return map_leaves(split, batch, is_per_sample)  # type: ignore[no-any-return]


def stack(entries: Sequence[Follower]) -> torch.Tensor:
    """Stack masks or points of equal shapes, which stay what they are."""
    from torchvision import tv_tensors

    stacked = default_collate([entry.as_subclass(torch.Tensor) for entry in entries])
    wrapped: torch.Tensor = tv_tensors.wrap(stacked, like=entries[0])
    return wrapped
