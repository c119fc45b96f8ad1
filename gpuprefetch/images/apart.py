"""A collate function that runs after the transforms, on images that workers sent without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from gpuprefetch.core.nested import map_leaves, select, to_device
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.guard import is_marked
from gpuprefetch.transforms.random import SeededDraws


class Apart(NamedTuple):
    """A batch whose collate function is still to come."""

    images: Any  # collated
    # (N,) objects, the samples with a hole where the image was: an array has one row per image, so
    # a bad image takes its sample along.
    samples: Any


class _Hole:
    """Where a sample's image was; the class itself, which pickles to itself."""


def is_image(leaf: Any) -> bool:
    return is_marked(leaf) or (isinstance(leaf, torch.Tensor) and leaf.dim() == 3)


def image_of(sample: Any) -> Any:
    """The image of a sample: the encoded one, else the first 3-D tensor; None without any."""
    images = select(sample, is_image)
    return next(filter(is_marked, images), images[0] if images else None)


def set_apart(samples: list[Any]) -> Apart:
    images = [image_of(sample) for sample in samples]
    count = sum(isinstance(image, EncodedImage) for image in select(samples[0], is_image))
    if count > 1:
        raise TypeError(
            f"A collate_fn that runs after the transforms takes one image a sample, got {count}. "
            "Leave collate_fn out: the default one takes any number."
        )
    rest = np.empty(len(samples), dtype=object)
    for i, (sample, image) in enumerate(zip(samples, images, strict=True)):
        rest[i] = _exchanged(sample, image, _Hole)
    return Apart(default_collate(images), rest)


def collate_apart(
    collate: Callable[[Any], Any], device: torch.device, batch: Apart, seed: int
) -> Any:
    images, samples = batch
    if not isinstance(images, torch.Tensor) or len(images) != len(samples):
        count = len(images) if isinstance(images, torch.Tensor) else type(images).__name__
        raise ValueError(
            f"The collate_fn gets each of {len(samples)} samples with its image, and transforms "
            f"made {count} of them. Leave collate_fn out, or let transforms give (N, C, H, W)."
        )
    put_back = zip(images.unbind(), samples.tolist(), strict=True)
    with SeededDraws(seed):
        collated = collate([_put_back(sample, image) for image, sample in put_back])
    return to_device(collated, device)


def _put_back(sample: Any, image: torch.Tensor) -> Any:
    """A sample with its image, and copies of its tensors: the dataset may keep those it gave."""

    def own(leaf: Any) -> Any:
        if leaf is _Hole:
            return image
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

    return map_leaves(own, sample, is_image)


def _exchanged(sample: Any, old: Any, new: Any) -> Any:
    return map_leaves(lambda leaf: new if leaf is old else leaf, sample, is_image)
