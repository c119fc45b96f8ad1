"""Boxes, masks and points follow their image through the fused transforms.

A worker does this before and after the user's collate function::

    samples -> follow() -> samples, moved -> collate_fn -> batch -> mark(), fate()

:func:`follow` moves what stands beside an image. :func:`mark` finds the lists of the batch that
have one entry per sample, and :func:`fate` tells whether all boxes, masks and points are in them.
The transforms after the fused ones then move these lists: see images/tail.py.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeGuard, TypeVar

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from gpuprefetch.core.nested import children_of, map_leaves, select
from gpuprefetch.images.encoded import (
    ENCODED,
    EncodedImage,
    EncodedImages,
    PreparedImages,
    is_encoded,
)
from gpuprefetch.images.fate import Fate
from gpuprefetch.transforms.reference import Ints
from gpuprefetch.transforms.sampling import Floats, Size

# Note [Coordinates]
# Pixel k reaches from k to k + 1, for boxes and points alike, as in COCO and torchvision's models.
# Its center is at k + 0.5 then, but at k in sampling rows and in kornia. torchvision's transforms
# agree, but mirror points to W - 1 - x: a pixel off what they do with boxes, and with the image.

EncodedLeaf = EncodedImage | EncodedImages | PreparedImages
Follower = torch.Tensor  # one of torchvision's BoundingBoxes, KeyPoints and Mask
Structure = TypeVar("Structure")  # a sample or a batch; the same structure comes back

# Samples rows, sizes and errors (position -> reason) for images, in their order.
Sampler = Callable[[list[EncodedImage]], tuple[Floats, Ints, dict[int, str]]]

# Whether this thread collates samples whose masks and points have followed their images.
followed = ContextVar("followed", default=False)


# --- The walk ---


class PerSample(list[Any]):
    """A list within a batch that has one entry per sample.

    Args:
        entries: one per sample.
        restore: makes what the loop gets of the entries, such as ``tuple`` or a stack.

    Example:
        A collate function made ``("cat", "dog")`` beside two images. :func:`mark` makes it
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
_PLAIN_TYPES = {*_PLAIN, bool}


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
    if not _PLAIN_TYPES.issuperset(map(type, children)):
        for child in children:
            _visit(child, found, followers)


def _follower_types() -> tuple[type, ...]:
    """Empty before torchvision's module is imported: no object has one of its types."""
    tv = sys.modules.get("torchvision.tv_tensors")
    return () if tv is None else (tv.BoundingBoxes, tv.KeyPoints, tv.Mask)


def is_follower(leaf: object) -> TypeGuard[Follower]:
    """Whether a leaf is boxes, a mask or points."""
    return isinstance(leaf, torch.Tensor) and isinstance(leaf, _follower_types())


def _is_image(leaf: object) -> bool:
    return isinstance(leaf, ENCODED)


def refuse_unfollowed(*batches: object) -> None:
    """Refuse to move the images of a batch away from boxes, masks and points beside them."""
    if walk(batches).has_followers:
        raise ValueError(
            "Boxes, masks and points follow an EncodedImage that their sample has beside them, and "
            "these came otherwise. Return both from the dataset. If they need not follow, return "
            "plain tensors: mask.as_subclass(torch.Tensor)."
        )


# --- Before the collate function: move what stands beside an image ---


def follow(samples: Structure, size: Size | None, sample_for: Sampler) -> Structure:
    """Move boxes, masks and points as the fused transforms will move their image.

    Args:
        samples: what the collate function is to get: a list of samples, or one item.
        size: of the result; None if the fused transforms give none.
        sample_for: samples the random parameters of all images at once.

    Returns:
        The samples with moved targets, or the same object if it has none. Their images are copies
        that know their sampling rows.
    """
    if size is None or not _follower_types():
        return samples
    each: list[Any] = samples if isinstance(samples, list) else [samples]
    contents = [walk(sample) for sample in each]
    if not any(found.followers for found in contents):
        return samples
    # A sample with neither, such as None for an unreadable file, is left to the collate function.
    involved = [i for i, found in enumerate(contents) if found.images or found.followers]
    if not all(contents[i].images for i in involved):
        raise _unmatched("none")
    if each is not samples and len(contents[0].images) > 1 and _holds_a_list_of_images(samples):
        raise _unmatched("a list of them")
    images = [image for i in involved for image in contents[i].images]
    rows, sizes, errors = sample_for(images)  # type: ignore[arg-type]
    placed = [
        _Placed(image, rows[i], tuple(sizes[i]), i not in errors) for i, image in enumerate(images)
    ]
    _keep_stacks_of_followed()
    moved = list(each)
    remaining = iter(placed)
    for i in involved:
        own = [next(remaining) for _ in contents[i].images]
        moved[i] = map_leaves(partial(_moved, own, size), each[i], _is_image)
    return moved if each is samples else moved[0]  # type: ignore[return-value]


def _unmatched(found: str) -> ValueError:
    return ValueError(
        f"Boxes, masks and points follow one EncodedImage, and a sample has {found}. Return it "
        "beside them, in a tuple or a dict: with batch_size=None a list is a batch. If they need "
        "not follow, return plain tensors: mask.as_subclass(torch.Tensor)."
    )


def _holds_a_list_of_images(item: object) -> bool:
    """Whether an item of a dataset holds a list of images, so that it is a batch itself."""
    return any(not isinstance(leaf, EncodedImage) for leaf in select(item, is_encoded))


@dataclass(frozen=True, slots=True)
class _Placed:
    """An image of a sample, and how the fused transforms will sample it."""

    image: EncodedLeaf
    row: Floats  # (2, 6)
    size: Size  # height and width by its header; made up if that is bad
    readable: bool  # whether the header is good


def _moved(images: Sequence[_Placed], size: Size, leaf: object) -> object:
    """A leaf of a sample as it becomes when the sample's images are resampled to ``size``."""
    if isinstance(leaf, ENCODED):
        image = copy.copy(leaf)
        image._row = next(placed.row for placed in images if placed.image is leaf)  # type: ignore[union-attr]
        return image
    if is_follower(leaf):
        return _moved_by(_leader(images, leaf).row, leaf, size)
    return leaf


def _leader(images: Sequence[_Placed], follower: Follower) -> _Placed:
    """The image that a follower belongs to: the first one of its size."""
    canvas = tuple(getattr(follower, "canvas_size", follower.shape[-2:]))
    readable = [placed for placed in images if placed.readable]
    for placed in readable:
        if placed.size == canvas:
            return placed
    if not readable:
        return images[0]  # its sample is left out, or replaced, whole
    image = readable[0].image
    assert isinstance(image, EncodedImage)
    height, width = readable[0].size
    raise ValueError(
        f"{type(follower).__name__} is for a picture of {' x '.join(map(str, canvas))} (height x "
        f"width), but {image.path or image.index!r} has {height} x {width}. If it is for the "
        "picture as its EXIF orientation turns it, pass apply_exif=True."
    )


class Axis(NamedTuple):
    """How one axis of an image is sampled: the columns of ``Sampling.rows()``, under their names.

    Example:
        ``Axis(origin=0.5, step=2, low=0, high=8, first=0, last=4)`` halves 8 pixels: output pixel
        ``j`` has its center at source coordinate ``0.5 + 2 * j``, between two pixels.
    """

    origin: float
    step: float
    low: float
    high: float
    first: float
    last: float


def _moved_by(row: Floats, follower: Follower, size: Size) -> Follower:
    from torchvision import tv_tensors

    y, x = (Axis(*columns) for columns in row.tolist())
    height, width = size
    if isinstance(follower, tv_tensors.Mask):
        values = follower.as_subclass(torch.Tensor)
        values = values.view(_SIGNED.get(follower.dtype, follower.dtype))
        values = _nearest(values, -2, y, height)
        values = _nearest(values, -1, x, width)
        mask: Follower = tv_tensors.Mask(values.view(follower.dtype))
        return mask
    grids = [_grid(x, width), _grid(y, height)]
    origin, step = torch.tensor(grids, dtype=torch.float64, device=follower.device).unbind(1)
    points = (_points_of(follower) - 0.5 - origin) / step + 0.5  # Note [Coordinates]
    return _at_points(follower, points, size)


# torch's unsigned types of more than 8 bits know few operations: the same bits, signed, know all.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _nearest(mask: torch.Tensor, dim: int, axis: Axis, length: int) -> torch.Tensor:
    """Resample one dimension to ``length``: the nearest pixel, and 0 for padding."""
    index = np.arange(length)
    pixel = np.floor(axis.origin + axis.step * index + 0.5).clip(axis.low, axis.high - 1)
    # The size of an unreadable file is made up, and the mask may be smaller.
    pixel = pixel.clip(0, mask.shape[dim] - 1).astype(np.int64)
    resampled = mask.index_select(dim, torch.from_numpy(pixel).to(mask.device))
    padding = torch.from_numpy((index < axis.first) | (index >= axis.last)).to(mask.device)
    return resampled.masked_fill_(padding[:, None] if dim == -2 else padding, 0)


def _grid(axis: Axis, length: int) -> tuple[float, float]:
    """Origin and step of an axis, where points move with the pixels.

    A picture of one pixel, resized from corner to corner, has no step: it becomes all of the
    result.
    """
    if axis.step:
        return axis.origin, axis.step
    step = 1 / length
    return axis.low + step / 2 - 0.5, step


def _points_of(follower: Follower) -> torch.Tensor:
    """``(P, 2)`` float64, x and y of all points, or of the four corners of all boxes."""
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import functional as F

    values = follower.as_subclass(torch.Tensor).double()
    if isinstance(follower, tv_tensors.BoundingBoxes):
        if not values.shape[-1]:
            raise ValueError(
                f"BoundingBoxes of shape {tuple(values.shape)} hold none, which is (0, 4): give "
                "them torch.tensor(boxes).reshape(-1, 4)."
            )
        if values.shape[-1] != 4:
            raise ValueError(
                f"Boxes of format {follower.format.value} do not follow their image: a crop that "
                "is stretched leaves no rectangles of them. Give corners, as KeyPoints (N, 4, 2)."
            )
        xyxy = type(follower.format).XYXY
        values = F.convert_bounding_box_format(values, follower.format, xyxy)
        values = values[:, [0, 1, 2, 1, 2, 3, 0, 3]]
    return torch.Tensor(values.reshape(-1, 2))


def _at_points(follower: Follower, points: torch.Tensor, canvas: Size) -> Follower:
    """The follower with its points elsewhere; a box becomes the upright one around its corners."""
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import functional as F

    if isinstance(follower, tv_tensors.BoundingBoxes):
        xyxy = type(follower.format).XYXY
        corners = points.reshape(-1, 4, 2)
        points = torch.cat([corners.amin(1), corners.amax(1)], dim=1)
        points = F.clamp_bounding_boxes(points, xyxy, canvas, follower.clamping_mode)
        points = F.convert_bounding_box_format(points, xyxy, follower.format)
    points = points if follower.is_floating_point() else points.round()
    moved = points.reshape(follower.shape).to(follower.dtype)
    wrapped: Follower = tv_tensors.wrap(moved, like=follower, canvas_size=canvas)
    return wrapped


def _stack(entries: Sequence[Follower]) -> torch.Tensor:
    """Stack masks or points of equal shapes, which stay what they are."""
    from torchvision import tv_tensors

    stacked = default_collate([entry.as_subclass(torch.Tensor) for entry in entries])
    wrapped: torch.Tensor = tv_tensors.wrap(stacked, like=entries[0])
    return wrapped


def _stack_followed(entries: Sequence[Follower], *, collate_fn_map: object = None) -> torch.Tensor:
    """Entry of the default collate: other loaders of the process get plain tensors, as before."""
    stacked = _stack(entries)
    return stacked if followed.get() else stacked.as_subclass(torch.Tensor)


def _keep_stacks_of_followed() -> None:
    """Let the default collate stack masks and points as what they are."""
    tv = sys.modules["torchvision.tv_tensors"]
    for kind in (tv.Mask, tv.KeyPoints):
        default_collate_fn_map.setdefault(kind, _stack_followed)


# --- After the collate function: find whose each part of the batch is ---


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
        if not isinstance(samples, list):
            return Owners([], len(walk(samples).followers))
        contents = [walk(sample) for sample in samples]
        with_image = [found for found in contents if found.images]
        return Owners(with_image, sum(len(found.followers) for found in contents))

    def own_each(self, entries: Sequence[object]) -> bool:
        """Whether each entry of a list holds objects of its own sample, and of no other one."""
        known = set[int]().union(*(sample.parts for sample in self.samples))
        shared = [known & walk(entry).parts for entry in entries]
        pairs = zip(shared, self.samples, strict=True)
        return all(ids and ids <= sample.parts for ids, sample in pairs)


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
        return id(node) in columns or _is_image(node)

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
    if _PLAIN_TYPES.issuperset(map(type, children)):
        return
    beside_images = any(
        _is_list_of(child, len(owners.samples)) and all(map(_is_image, child)) for child in children
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
        return PerSample(entries, _stack)

    return map_leaves(split, batch, is_per_sample)  # type: ignore[no-any-return]
