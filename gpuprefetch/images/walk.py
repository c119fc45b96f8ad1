"""One walk of a sample or a batch finds its images, boxes, masks and points, and its columns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from gpuprefetch.core.nested import children_of
from gpuprefetch.images.encoded import EncodedImage, EncodedImages
from gpuprefetch.images.prepared import ENCODED, PreparedImages

EncodedLeaf = EncodedImage | EncodedImages | PreparedImages
Follower = torch.Tensor  # one of torchvision's BoundingBoxes, KeyPoints and Mask


class PerSample(list[Any]):
    """A list within a batch that has one entry per sample.

    Args:
        entries: one per sample.
        restore: makes what the loop gets of the entries, such as ``tuple`` or a stack.

    Example:
        A collate function made ``("cat", "dog")`` beside two images. ``mark()`` makes it
        ``PerSample(["cat", "dog"], tuple)``. If the second image is bad, ``with_entries(["cat"])``
        is left, and the loop gets ``restored()``, which is ``("cat",)``.
    """

    def __init__(
        self, entries: Iterable[Any], restore: Callable[[list[Any]], object] = list
    ) -> None:
        super().__init__(entries)
        self.restore = restore

    def with_entries(self, entries: Iterable[Any]) -> PerSample:
        return PerSample(entries, self.restore)

    def restored(self) -> object:
        return self.restore(self)


def is_per_sample(node: object) -> bool:
    return isinstance(node, PerSample)


@dataclass(frozen=True, slots=True)
class Contents:
    """What one walk finds in a sample or a batch, in the order of its leaves.

    Attributes:
        images: encoded images, and batches of them.
        followers: boxes, masks and points that are in no column.
        columns: the lists with one entry per sample; raw samples have none.
        in_columns: boxes, masks and points in these lists.
        parts: identities of all objects and structures, by which a part of a batch is recognized
            as a part of a sample.

    Example:
        >>> found = walk((image, {"boxes": boxes, "name": "cat"}))
        >>> found.images, found.followers
        ([image], [boxes])
        >>> len(found.parts)  # the tuple, the image, the dict and the boxes
        4
    """

    images: list[EncodedLeaf]
    followers: list[Follower]
    columns: list[PerSample]
    in_columns: list[Follower]
    parts: set[int]

    @property
    def has_followers(self) -> bool:
        return bool(self.followers or self.in_columns)


def walk(structure: object) -> Contents:
    found = Contents([], [], [], [], set())
    _visit(structure, found, found.followers)
    return found


# Plain values are no parts of a sample: two samples may hold the same string.
_PLAIN = (str, bytes, int, float, complex, type(None))
PLAIN_TYPES = {*_PLAIN, bool}


def _visit(node: object, found: Contents, followers: list[Follower]) -> None:
    """Note what is in a node. Its boxes, masks and points go into ``followers``."""
    if isinstance(node, _PLAIN):
        return
    found.parts.add(id(node))
    if isinstance(node, ENCODED):
        found.images.append(node)
        return
    if is_follower(node):
        followers.append(node)
        return
    if isinstance(node, PerSample):
        found.columns.append(node)
        followers = found.in_columns
    children = children_of(node, None) or ()
    # A sample may hold thousands of numbers, as the polygons of COCO: skip them at once.
    if not PLAIN_TYPES.issuperset(map(type, children)):
        for child in children:
            _visit(child, found, followers)


def follower_types() -> tuple[type, ...]:
    """Empty before torchvision's module is imported: no object has one of its types."""
    tv = sys.modules.get("torchvision.tv_tensors")
    return () if tv is None else (tv.BoundingBoxes, tv.KeyPoints, tv.Mask)


def is_follower(leaf: object) -> TypeGuard[Follower]:
    """Whether a leaf is boxes, a mask or points."""
    return isinstance(leaf, torch.Tensor) and isinstance(leaf, follower_types())


def is_image(leaf: object) -> bool:
    return isinstance(leaf, ENCODED)
