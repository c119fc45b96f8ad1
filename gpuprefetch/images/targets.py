"""Boxes, masks and points follow their image through the fused transforms.

A worker does this before and after the user's collate function::

    samples -> follow() -> samples, moved -> collate_fn -> batch -> mark(), fate()

:func:`follow` moves what stands beside an image. images/columns.py then finds the lists of the
batch that have one entry per sample. The transforms after the fused ones move what is in these
lists: see images/tail.py.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from gpuprefetch.core.nested import map_leaves, objects, select
from gpuprefetch.images.columns import stack
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.prepared import is_encoded
from gpuprefetch.images.walk import (
    EncodedLeaf,
    Follower,
    follower_types,
    is_follower,
    is_image,
    walk,
)
from gpuprefetch.transforms.reference import TIE, Ints, finished_row
from gpuprefetch.transforms.sampling import BoxesOf, OneSampling, Size

# Note [Coordinates]
# Pixel k reaches from k to k + 1, for boxes and points alike, as in COCO and torchvision's models.
# Its center is at k + 0.5 then, but at k in sampling rows and in kornia. torchvision's transforms
# agree, but mirror points to W - 1 - x: a pixel off what they do with boxes, and with the image.

Structure = TypeVar("Structure")  # the samples of a batch; the same structure comes back


class Followed(NamedTuple):
    """The images that targets follow, in their order."""

    samplings: Sequence[OneSampling]
    sizes: Ints  # (N, 2), heights and widths by their headers; made up if these are bad
    errors: dict[int, str]  # position -> why the header is bad
    mask_fill: float | None  # of the padding; None where masks have none


# Samples the random parameters of all images at once, each with the boxes in it.
Sampler = Callable[[list[EncodedImage], list[BoxesOf]], Followed]

# Whether this thread collates samples whose masks and points have followed their images.
followed = ContextVar("followed", default=False)


def refuse_unfollowed(*batches: object) -> None:
    """Refuse to move the images of a batch away from boxes, masks and points beside them."""
    if any(map(is_follower, objects(batches))):
        raise ValueError(
            "Boxes, masks and points follow an EncodedImage that their sample has beside them, and "
            "these came otherwise. Return both from the dataset. If they need not follow, return "
            "plain tensors: mask.as_subclass(torch.Tensor)."
        )


def follow(samples: Structure, sample_for: Sampler) -> Structure:
    """Move boxes, masks and points as the fused transforms will move their image.

    Args:
        samples: what the collate function is to get: a list of samples, or one item.
        sample_for: samples the random parameters of all images at once.

    Returns:
        The samples with moved targets, or the same object if it has none. Their images are copies
        that know their sampling.
    """
    if not follower_types():
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
    boxes = [_boxes_in(contents[i].followers) for i in involved for _ in contents[i].images]
    samplings, sizes, errors, fill = sample_for(images, boxes)  # type: ignore[arg-type]
    placed = [
        _Placed(image, samplings[i], tuple(sizes[i]), i not in errors)
        for i, image in enumerate(images)
    ]
    _keep_stacks_of_followed()
    moved = list(each)
    remaining = iter(placed)
    for i in involved:
        own = [next(remaining) for _ in contents[i].images]
        moved[i] = map_leaves(partial(_moved, own, fill), each[i], is_image)
    return moved if each is samples else moved[0]  # type: ignore[return-value]


def _boxes_in(followers: Sequence[Follower]) -> BoxesOf:
    """The boxes of a sample, as torchvision's ops find them: the first ones."""
    from torchvision import tv_tensors

    found = (each for each in followers if isinstance(each, tv_tensors.BoundingBoxes))
    boxes = next(found, None)
    return None if boxes is None else partial(_boxes_at, boxes)


def _boxes_at(boxes: Follower, sampling: OneSampling) -> Follower:
    """Boxes in a picture that has been sampled this way."""
    whole = np.array_equal(sampling.row, finished_row(sampling.size))
    # Those of a picture that has not been moved reach beyond it as they did.
    return boxes if whole and sampling.left_out is None else _moved_by(sampling, boxes, None)


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
    sampling: OneSampling
    size: Size  # height and width by its header; made up if that is bad
    readable: bool  # whether the header is good


def _moved(images: Sequence[_Placed], mask_fill: float | None, leaf: object) -> object:
    """A leaf of a sample as it becomes when the sample's images are resampled."""
    if isinstance(leaf, EncodedImage):
        image = copy.copy(leaf)
        image._settle(next(placed.sampling for placed in images if placed.image is leaf))
        return image
    if is_follower(leaf):
        return _moved_by(_leader(images, leaf).sampling, leaf, mask_fill)
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


# In pixels, how far rounding may move what lies on the border of a picture.
_NOISE = 1e-6


def _moved_by(sampling: OneSampling, follower: Follower, mask_fill: float | None) -> Follower:
    from torchvision import tv_tensors

    y, x = (Axis(*columns) for columns in sampling.row.tolist())
    height, width = sampling.size
    if isinstance(follower, tv_tensors.Mask):
        if mask_fill is None:
            raise ValueError(
                "Padding has the color of pictures, which is none for the masks beside them. "
                "Write fill={tv_tensors.Image: (124, 116, 104), tv_tensors.Mask: 0}."
            )
        values = follower.as_subclass(torch.Tensor)
        values = values.view(_SIGNED.get(follower.dtype, follower.dtype))
        values = _nearest(values, -2, y, height, mask_fill)
        values = _nearest(values, -1, x, width, mask_fill)
        mask: Follower = tv_tensors.Mask(values.view(follower.dtype))
        return mask
    grids = [_grid(x, width), _grid(y, height)]
    origin, step = torch.tensor(grids, dtype=torch.float64, device=follower.device).unbind(1)
    points = _points_of(follower)
    if sampling.left_out is not None and isinstance(follower, tv_tensors.BoundingBoxes):
        gone = torch.from_numpy(sampling.left_out.boxes.repeat(4))  # their corners
        points[gone] = torch.from_numpy(sampling.left_out.corner[::-1].copy())
    points = (points - 0.5 - origin) / step + 0.5  # Note [Coordinates]
    if sampling.cuts is not None and getattr(follower, "clamping_mode", None) is not None:
        cuts = torch.from_numpy(sampling.cuts[::-1].copy())
        ends = ((cuts - 0.5 - origin[:, None]) / step[:, None] + 0.5).sort(dim=1).values
        inside = torch.tensor([[width], [height]]) - _NOISE
        ends[:, 0].masked_fill_(ends[:, 0] < _NOISE, -torch.inf)  # the canvas ends there
        ends[:, 1:].masked_fill_(ends[:, 1:] > inside, torch.inf)
        points = points.clamp(*ends.unbind(1))
    return _at_points(follower, points, sampling.size)


# torch's unsigned types of more than 8 bits know few operations: the same bits, signed, know all.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _nearest(mask: torch.Tensor, dim: int, axis: Axis, length: int, fill: float) -> torch.Tensor:
    """Resample one dimension to ``length``: the nearest pixel, and ``fill`` for padding."""
    index = np.arange(length)
    pixel = np.floor(axis.origin + axis.step * index + (0.5 + TIE)).clip(axis.low, axis.high - 1)
    # The size of an unreadable file is made up, and the mask may be smaller.
    pixel = pixel.clip(0, mask.shape[dim] - 1).astype(np.int64)
    resampled = mask.index_select(dim, torch.from_numpy(pixel).to(mask.device))
    padding = torch.from_numpy((index < axis.first) | (index >= axis.last)).to(mask.device)
    return resampled.masked_fill_(padding[:, None] if dim == -2 else padding, fill)


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


def _stack_followed(entries: Sequence[Follower], *, collate_fn_map: object = None) -> torch.Tensor:
    """Entry of the default collate: other loaders of the process get plain tensors, as before."""
    stacked = stack(entries)
    return stacked if followed.get() else stacked.as_subclass(torch.Tensor)


def _keep_stacks_of_followed() -> None:
    """Let the default collate stack masks and points as what they are."""
    tv = sys.modules["torchvision.tv_tensors"]
    for kind in (tv.Mask, tv.KeyPoints):
        default_collate_fn_map.setdefault(kind, _stack_followed)
