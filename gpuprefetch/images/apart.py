"""Run a user's collate function in the loop's process, after the transforms.

MixUp in a ``collate_fn`` needs transformed images. The workers then send the images of a batch
apart from the rest of its samples, and the collate function runs on the device::

    worker   (image, 3), (image, 5)  ->  Apart([image, image], [(hole, 3), (hole, 5)])
    device   images decoded, transformed
             (image, 3), (image, 5)  ->  collate_fn
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from gpuprefetch.core.nested import map_leaves, select, to_device
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.guard import is_marked
from gpuprefetch.images.places import is_place, place_views
from gpuprefetch.transforms.random import SeededDraws

Sample = TypeVar("Sample")


class Apart(NamedTuple):
    """A batch whose collate function is still to run.

    Attributes:
        images: collated by torch's default collate, and later transformed.
        samples: ``(N,)`` objects, the samples with a hole in place of their image. An array has one
            row per image, so that a bad image takes its sample along.
    """

    images: Any
    samples: npt.NDArray[np.object_]


class _Hole:
    """Stands in a sample for its image. The class itself does, because it pickles to itself."""


def is_image(leaf: object) -> bool:
    return is_marked(leaf) or (isinstance(leaf, torch.Tensor) and leaf.dim() == 3)


def image_of(sample: object) -> Any:
    """The image of a sample: the encoded one, else the first 3-D tensor; None without any."""
    images = select(sample, is_image)
    encoded = [image for image in images if is_marked(image)]
    return next(iter(encoded or images), None)


def set_apart(samples: Sequence[Any]) -> Apart:
    """Take the images out of a batch of samples."""
    images = [image_of(sample) for sample in samples]
    count = sum(isinstance(image, EncodedImage) for image in select(samples[0], is_image))
    if count > 1:
        raise TypeError(
            f"A collate_fn that runs after the transforms takes one image a sample, got {count}. "
            "Leave collate_fn out: the default one takes any number."
        )
    rest = np.empty(len(samples), dtype=object)
    for i, (sample, image) in enumerate(zip(samples, images, strict=True)):
        rest[i] = _without(sample, image)
    return Apart(default_collate(images), rest)


def _without(sample: Sample, image: object) -> Sample:
    """The sample with a hole in place of its image."""
    holed: Sample = map_leaves(lambda leaf: _Hole if leaf is image else leaf, sample, is_image)
    return holed


def collate_apart(
    collate: Callable[[list[Any]], Any], device: torch.device, batch: Apart, seed: int
) -> Any:
    """Run the user's collate function on samples that have their transformed image again."""
    images, samples = batch
    placed = len(samples) > 0 and bool(select(samples[0], is_place))
    views = images if placed else [images]
    for view in views:
        known = isinstance(view, torch.Tensor | list)
        if not known or len(view) != len(samples):
            count = len(view) if known else type(view).__name__
            raise ValueError(
                f"The collate_fn gets each of {len(samples)} samples with its image, and "
                f"transforms made {count} of them. Leave collate_fn out, or let transforms give "
                "(N, C, H, W)."
            )
    # Rows of each view, or images of their own sizes.
    rows = zip(samples.tolist(), *views, strict=True)
    with SeededDraws(seed):
        collated = collate([_with(sample, pictures) for sample, *pictures in rows])
    return to_device(collated, device)


def _with(sample: Sample, views: Sequence[torch.Tensor]) -> Sample:
    """The sample with the views of its image in their places, and with copies of its tensors.

    The dataset may keep the tensors that it gave, and a collate function may write into them.
    """

    def own(leaf: object) -> object:
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

    placed: Sample = place_views(map_leaves(own, sample, is_image), _Hole, views)
    return placed
