"""Run a user's collate function in the loop's process, after the transforms.

MixUp in a ``collate_fn`` needs transformed images. The workers then send the images of a batch
apart from the rest of its samples, and the collate function runs on the device::

    worker   (image, 3), (image, 5)  ->  Apart([image, image], [(hole, 3), (hole, 5)])
    device   images decoded, transformed
             (image, 3), (image, 5)  ->  collate_fn

Padded images and patches are made of all images of a batch. The collate function gets a stand-in
for each image then, and the column of these becomes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from gpuprefetch.core.nested import map_leaves, select, to_device
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.guard import is_marked
from gpuprefetch.images.places import is_place, place_views
from gpuprefetch.transforms.random import SeededDraws
from gpuprefetch.transforms.results import PackedPatches, PaddedImages, PaddedPatches

Sample = TypeVar("Sample")
# Made of all images of a batch: no sample has a row of its own in it.
_WHOLE = (PaddedImages, PackedPatches, PaddedPatches)
CHOOSE_BEFORE = (  # what to write where a sample has no image
    "Choose the samples before: DataLoader(Subset(dataset, indices), ...). Files that cannot be "
    'decoded are left out by accelerate(loader, on_error="skip").'
)


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
    for number, (sample, image) in enumerate(zip(samples, images, strict=True)):
        if image is None:
            raise TypeError(
                "A collate_fn that runs after the transforms takes one image a sample, and sample "
                f"{number} of the batch, {type(sample).__name__}, has none. {CHOOSE_BEFORE}"
            )
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
    views = list(images) if placed else [images]
    given = [_given(view, number, len(samples)) for number, view in enumerate(views)]
    # Rows of each view, images of their own sizes, or what stands for these.
    rows = zip(samples.tolist(), *given, strict=True)
    with SeededDraws(seed):
        collated = collate([_with(sample, pictures) for sample, *pictures in rows])
    moved = to_device(collated, device)
    whole = any(view is not rows for view, rows in zip(views, given, strict=True))
    return _joined(moved, views, len(samples)) if whole else moved


def _given(view: object, number: int, count: int) -> Any:
    """What the collate function gets for the images of a view, one by one."""
    if isinstance(view, _WHOLE):
        return [_Part(number, position) for position in range(count)]
    known = isinstance(view, torch.Tensor | list)
    if not known or len(view) != count:  # type: ignore[arg-type]
        made = len(view) if known else type(view).__name__  # type: ignore[arg-type]
        raise ValueError(
            f"The collate_fn gets each of {count} samples with its image, and "
            f"transforms made {made} of them. Leave collate_fn out, or let transforms give "
            "(N, C, H, W)."
        )
    return view


class _Part:
    """Stands for an image in what is made of all images of a batch, as padded ones or patches."""

    def __init__(self, view: int, position: int) -> None:
        self.view = view
        self.position = position

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # others look for special methods
            raise AttributeError(name)
        _refuse_use(f"uses .{name} of an image")

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], *call: object, **named: object) -> Any:
        _refuse_use(f"calls {getattr(func, '__name__', 'a function of torch')} of images")


def _refuse_use(what: str) -> NoReturn:
    raise ValueError(
        f"The collate_fn {what}, and results makes one of all of them after it. Let it put the "
        "images of the samples into one list, in their order, as tuple(zip(*samples)) does, or "
        "leave results out: it gets one tensor for each then."
    )


def _collate_parts(parts: Sequence[_Part], *, collate_fn_map: object = None) -> list[_Part]:
    return [*parts]


default_collate_fn_map[_Part] = _collate_parts


def _joined(batch: Any, views: Sequence[object], count: int) -> Any:
    """A batch with what was made of all images in place of the column of their parts."""
    found = set()

    def is_column(node: object) -> bool:
        return isinstance(node, (list, tuple)) and bool(node) and isinstance(node[0], _Part)

    def join(leaf: Any) -> Any:
        if isinstance(leaf, _Part):
            _refuse_use("leaves an image apart from the others")
        if not is_column(leaf):
            return leaf
        places = [(part.view, part.position) for part in leaf if isinstance(part, _Part)]
        view = places[0][0]
        if len(places) != len(leaf) or places != [(view, i) for i in range(count)]:
            _refuse_use("leaves images out, or puts them into another order")
        found.add(view)
        return views[view]

    made = map_leaves(join, batch, is_column)
    if not found:
        _refuse_use("leaves the images out")
    return made


def _with(sample: Sample, views: Sequence[torch.Tensor]) -> Sample:
    """The sample with the views of its image in their places, and with copies of its tensors.

    The dataset may keep the tensors that it gave, and a collate function may write into them.
    """

    def own(leaf: object) -> object:
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

    placed: Sample = place_views(map_leaves(own, sample, is_image), _Hole, views)
    return placed
