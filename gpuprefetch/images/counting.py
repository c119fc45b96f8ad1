"""How many samples a batch has, whatever a collate function has made of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from gpuprefetch.core.nested import Batch, moves_itself
from gpuprefetch.images.encoded import EncodedImages
from gpuprefetch.images.prepared import PreparedImages
from gpuprefetch.transforms.results import PackedPatches


def count_images(batch: Batch, packed: Sequence[PreparedImages] = ()) -> int:
    """How many samples a batch has; 0 where nothing tells it.

    Encoded images, ``packed``, know their samples. Otherwise the parts of the batch vote, each one
    for the lengths that it has: the length that most parts have is the batch's, of several the
    first one. Samples that nothing has collated are counted, and an image alone is one::

        ((clip, clip), (0, 1))               2, and not the frames of a clip
        ((inputs, mask), labels)             the length of labels
        {"boxes": [...], "images": images}   the length of images
        [(image, 0), (image, 1)]             2
        (image, 0)                           1
    """
    samples = {sample for images in packed for sample in images.who.samples}
    if len(samples) > 1 and min(samples) >= 0:
        return len(samples)
    if isinstance(batch, list) and batch and all(map(_is_sample, batch)):
        return len(batch)
    if isinstance(batch, (list, tuple)) and _are_images(batch, (3,)):
        return len(batch)
    values = _values(batch)
    parts = [batch] if values is None else values
    heard = [(part, found) for part in parts if (found := _lengths(part))]
    if not heard:
        return 0
    if len(heard) == 1 and _is_image(heard[0][0]):
        return 1
    votes = Counter(length for _, found in heard for length in dict.fromkeys(found))
    return max(votes, key=votes.__getitem__)


def _lengths(part: object) -> list[int]:
    """How many samples a part of a batch may be of, the likeliest number first."""
    if isinstance(part, torch.Tensor):
        return [part.size(0)] if part.dim() else []  # a nested tensor has no len()
    if isinstance(part, (PreparedImages, EncodedImages)):
        return [len(part)]
    if isinstance(part, PackedPatches):
        return [len(part.image_grid_thw)]
    values = _values(part)
    if values is None:
        return []
    if not isinstance(part, (list, tuple)) or hasattr(part, "_fields"):
        return [length for value in values for length in _lengths(value)]
    if not values or _is_sample(values[0]) or not (first := _lengths(values[0])):
        return [len(values)]
    if _are_images(values, (1, 3)):
        return [len(values), *first]
    alike = all(_lengths(value)[:1] == first[:1] for value in values[1:])
    return [*first[:1], len(values)] if alike else [len(values)]


def _values(part: Batch) -> list[Batch] | None:
    """The parts of a structure; None for what is none."""
    if isinstance(part, Mapping):  # also one that moves itself, as transformers' BatchFeature
        return list(part.values())
    if isinstance(part, (torch.Tensor, PackedPatches)) or moves_itself(part):
        return None
    if isinstance(part, (list, tuple)):
        return list(part)
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return [getattr(part, field.name, None) for field in dataclasses.fields(part)]
    return None


def _is_sample(part: object) -> bool:
    return isinstance(part, (tuple, Mapping)) or dataclasses.is_dataclass(part)


def _are_images(parts: Batch, channels: tuple[int, ...]) -> bool:
    return len(parts) > 0 and all(_is_image(part, channels) for part in parts)


def _is_image(part: object, channels: tuple[int, ...] = (1, 3)) -> bool:
    """Whether something looks like an image (C, H, W)."""
    return isinstance(part, torch.Tensor) and part.dim() == 3 and part.size(0) in channels
