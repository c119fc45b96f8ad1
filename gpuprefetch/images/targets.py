"""Boxes, masks and points follow their image through the fused transforms."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from gpuprefetch.core.nested import children_of, map_leaves, objects, select
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.prepared import ENCODED, is_encoded

# Note [Coordinates]
# Pixel k reaches from k to k + 1, for boxes and points alike, as in COCO and torchvision's models.
# Its center is at k + 0.5 then, but at k in sampling rows and in kornia. torchvision's transforms
# agree, but mirror points to W - 1 - x: a pixel off what they do with boxes, and with the image.

Size = tuple[int, int]


# Whether this thread collates samples whose masks and points have followed their images.
followed = ContextVar("followed", default=False)


def _is_image(leaf: Any) -> bool:
    return isinstance(leaf, ENCODED)


def images_of(sample: Any) -> list[Any]:
    return select(sample, _is_image)


def followers(batch: Any) -> list[Any]:
    tv = sys.modules.get("torchvision.tv_tensors")  # nobody has any before it is imported
    if tv is None:
        return []
    kinds = (tv.BoundingBoxes, tv.KeyPoints, tv.Mask)
    return [leaf for leaf in objects(batch, _is_image) if isinstance(leaf, kinds)]


def refuse_unfollowed(*batches: Any) -> None:
    """Refuse to move the images of a batch away from boxes, masks and points beside them."""
    if followers(batches):
        raise ValueError(
            "Boxes, masks and points follow the EncodedImage of their sample if a DataLoader's "
            "dataset returns both; these came otherwise. Return both, or transform there. If they "
            "need not follow, return plain tensors: mask.as_subclass(torch.Tensor)."
        )


def follow(samples: Any, size: Size | None, draw: Callable[[list[EncodedImage]], Any]) -> Any:
    """Move boxes, masks and points as the fused transforms are going to sample their images.

    ``draw`` gives rows, sizes and errors of images. The samples are the same object where nothing
    moves.
    """
    if size is None or not followers(samples):
        return samples
    each = samples if isinstance(samples, list) else [samples]
    # Others, as the None of a sample that its dataset could not read, are the collate function's.
    numbers = [i for i, sample in enumerate(each) if images_of(sample) or followers(sample)]
    images = [images_of(each[i]) for i in numbers]
    if not all(images) or (each is not samples and len(images[0]) > 1 and _is_batch(samples)):
        raise ValueError(
            "Boxes, masks and points follow the EncodedImage of their sample, and a sample has "
            f"{'none' if not all(images) else 'a list of them'}. Return both, with "
            "batch_size=None in a tuple or a dict, as a list is one of samples, or plain tensors "
            "instead of tv_tensors."
        )
    rows, sizes, errors = draw([image for found in images for image in found])
    tv = sys.modules["torchvision.tv_tensors"]
    for kind in (tv.Mask, tv.KeyPoints):
        default_collate_fn_map.setdefault(kind, _stack_followed)

    def move(found: list[EncodedImage], first: int, leaf: Any) -> Any:
        """Move a part of a sample, whose images ``found`` have the rows from ``first`` on."""
        places = range(first, first + len(found))
        if _is_image(leaf):
            image = copy.copy(leaf)
            image._row = rows[next(p for p, i in zip(places, found, strict=True) if i is leaf)]
            return image
        if not followers(leaf):
            return leaf
        canvas = tuple(getattr(leaf, "canvas_size", leaf.shape[-2:]))
        readable = [place for place in places if place not in errors]
        fitting = [place for place in readable if tuple(sizes[place]) == canvas]
        if readable and not fitting:
            image = found[readable[0] - first]
            height, width = sizes[readable[0]]
            raise ValueError(
                f"{type(leaf).__name__} is for a picture of {' x '.join(map(str, canvas))} (height "
                f"x width), but {image.path or image.index!r} has {height} x {width}. Pictures are "
                "turned by their EXIF orientation with apply_exif=True only."
            )
        return sampled(leaf, rows[next(iter(fitting or places))], size)

    moved = list(each)
    first = 0
    for number, found in zip(numbers, images, strict=True):
        moved[number] = map_leaves(partial(move, found, first), each[number], _is_image)
        first += len(found)
    return moved if each is samples else moved[0]


def _is_batch(item: Any) -> bool:
    """Whether an item of a dataset holds images in a list, one for each of its samples."""
    return any(not isinstance(leaf, EncodedImage) for leaf in select(item, is_encoded))


# torch's unsigned types of more than 8 bits know few operations: the same bits, signed, know all.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def sampled(leaf: Any, row: Any, size: Size) -> Any:
    from torchvision import tv_tensors

    if not isinstance(leaf, tv_tensors.Mask):
        origin, step, low = row[::-1, :3].T
        # A single pixel, from corner to corner, has no step: it becomes the whole picture.
        step = np.where(step == 0, 1 / np.array(size[::-1]), step)
        origin = np.where(row[::-1, 1] == 0, low + step / 2 - 0.5, origin)
        origin, step = torch.from_numpy(np.stack([origin, step])).to(leaf.device)
        points = (_points_of(leaf) - 0.5 - origin) / step + 0.5  # Note [Coordinates]
        return _at_points(leaf, points, size)
    mask = leaf.as_subclass(torch.Tensor).view(_SIGNED.get(leaf.dtype, leaf.dtype))
    for dim, (origin, step, low, high, first, last) in zip((-2, -1), row, strict=True):
        index = np.arange(size[dim])
        pixel = np.floor(origin + step * index + 0.5).clip(low, high - 1)  # the nearest one
        # The second bound is for a file that could not be read, whose size is made up.
        pixel = pixel.clip(0, mask.shape[dim] - 1).astype(np.int64)
        mask = mask.index_select(dim, torch.from_numpy(pixel).to(leaf.device))
        padding = torch.from_numpy((index < first) | (index >= last)).to(leaf.device)
        mask.masked_fill_(padding[:, None] if dim == -2 else padding, 0)
    return tv_tensors.Mask(mask.view(leaf.dtype))


def _points_of(leaf: Any) -> torch.Tensor:
    """``(P, 2)`` float64, x and y of all points, or of the four corners of all boxes."""
    from torchvision.transforms.v2 import functional as F

    values = leaf.as_subclass(torch.Tensor).double()
    if hasattr(leaf, "format"):
        if not values.shape[-1]:
            raise ValueError(
                f"BoundingBoxes of shape {tuple(values.shape)} hold none, which is (0, 4): give "
                "them torch.tensor(boxes).reshape(-1, 4)."
            )
        if values.shape[-1] != 4:
            raise ValueError(
                f"Boxes of format {leaf.format.value} do not follow their image: a crop that is "
                "stretched leaves no rectangles of them. Give corners, as KeyPoints (N, 4, 2)."
            )
        values = F.convert_bounding_box_format(values, leaf.format, type(leaf.format).XYXY)
        values = values[:, [0, 1, 2, 1, 2, 3, 0, 3]]
    return torch.Tensor(values.reshape(-1, 2))


def _at_points(leaf: Any, points: torch.Tensor, canvas: Size) -> Any:
    """``leaf`` with its points elsewhere; a box becomes the upright one around its corners."""
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import functional as F

    if hasattr(leaf, "format"):
        corners, xyxy = points.reshape(-1, 4, 2), type(leaf.format).XYXY
        points = torch.cat([corners.amin(1), corners.amax(1)], dim=1)
        points = F.clamp_bounding_boxes(points, xyxy, canvas, leaf.clamping_mode)
        points = F.convert_bounding_box_format(points, xyxy, leaf.format)
    points = points if leaf.is_floating_point() else points.round()
    moved = points.reshape(leaf.shape).to(leaf.dtype)
    return tv_tensors.wrap(moved, like=leaf, canvas_size=canvas)


def _stack(batch: Any) -> Any:
    """Masks and points of equal shapes stay what they are."""
    from torchvision import tv_tensors

    stacked = default_collate([entry.as_subclass(torch.Tensor) for entry in batch])
    return tv_tensors.wrap(stacked, like=batch[0])


def _stack_followed(batch: Any, *, collate_fn_map: Any = None) -> Any:
    """Entry of the default collate, which other loaders of the process have as well."""
    stacked = _stack(batch)
    return stacked if followed.get() else stacked.as_subclass(torch.Tensor)


class PerSample(list[Any]):
    """A list within a batch that has one entry per sample; ``kind`` makes of it what it was."""

    def __init__(self, entries: Iterable[Any], kind: Callable[[Any], Any] = list) -> None:
        super().__init__(entries)
        self.kind = kind

    def of(self, entries: Iterable[Any]) -> PerSample:
        return PerSample(entries, self.kind)


def is_per_sample(node: Any) -> bool:
    return isinstance(node, PerSample)


def mark(batch: Any, samples: Any) -> Any:
    """Make a :class:`PerSample` of every list that has an entry per sample, in a batch of images.

    It stands beside a list of the images, or its entries hold objects of their samples.
    """
    samples = [s for s in samples if images_of(s)] if isinstance(samples, list) else []
    if not samples:
        return batch
    beside_images = set[int]()

    @cache
    def held() -> list[set[int]]:
        return [set(_parts(sample)) for sample in samples]

    def is_column(node: Any) -> bool:
        if _is_image(node):
            return True
        children = children_of(node, None) or ()
        if any(has_entries(child) and all(map(_is_image, child)) for child in children):
            beside_images.update(map(id, children))
        if not has_entries(node) or images_of(node):
            return False
        return id(node) in beside_images or _are_entries(node, held())

    def has_entries(node: Any) -> bool:
        return type(node) in (list, tuple) and len(node) == len(samples)

    def marked(leaf: Any) -> Any:
        return PerSample(leaf, type(leaf)) if type(leaf) in (list, tuple) else leaf

    return map_leaves(marked, batch, is_column)


def _parts(node: Any) -> Iterator[int]:
    """The identities of the objects and structures in a sample."""
    if not isinstance(node, (str, bytes, int, float, complex, type(None))):
        yield id(node)
        for child in children_of(node, _is_image) or ():
            yield from _parts(child)


def _are_entries(node: list[Any], held: list[set[int]]) -> bool:
    """Whether each entry of a list is of its sample, whose parts are ``held``."""
    known = set[int]().union(*held)
    found = [known.intersection(_parts(entry)) for entry in node]
    return all(ids and ids <= parts for ids, parts in zip(found, held, strict=True))


def fate(batch: Any, samples: Any) -> str:
    """What the collate function made of the tv_tensors: "kept", "lost", or "" without any."""
    if not (before := followers(samples)):
        return ""
    count = sum(bool(images_of(s)) for s in samples) if isinstance(samples, list) else 0
    batch = unstack(batch, count)
    after = followers(select(batch, is_per_sample))
    return "kept" if len(after) == len(before) else "lost"


def unstack(batch: Any, count: int) -> Any:
    """Make a :class:`PerSample` of every stack of ``count`` masks or points."""

    def split(leaf: Any) -> Any:
        boxes = hasattr(leaf, "format")
        if is_per_sample(leaf) or boxes or not followers(leaf) or len(leaf) != count:
            return leaf
        from torchvision import tv_tensors

        return PerSample((tv_tensors.wrap(e, like=leaf) for e in torch.unbind(leaf)), _stack)

    return map_leaves(split, batch, is_per_sample)
