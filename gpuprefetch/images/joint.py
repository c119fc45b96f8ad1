"""A dataset's own transform of a picture and what is beside it, carried out in a worker.

The dataset calls it without its result: that comes once the sample is known, which the random
parameters belong to::

    dataset    image, target = transforms(picture, target)    an EncodedImage, and a Promised
    worker     transforms(stand-in, target)                   the target, and a recording
    device     the launch, and the calls that it does not take, as the recording has them
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, NoReturn

import numpy as np
import torch

from gpuprefetch.core.nested import children_of, map_leaves, select
from gpuprefetch.images.bad import name_of
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.guard import UndecodedError
from gpuprefetch.images.recorded import Call, Joint, Recording, RecordingError
from gpuprefetch.images.sized import recording, recording_of, stand_in_for
from gpuprefetch.images.walk import PLAIN_TYPES, follower_types, is_image
from gpuprefetch.transforms.head import Head
from gpuprefetch.transforms.random import (
    Keys,
    SeededDraws,
    derive,
    draws_of_sample,
)
from gpuprefetch.transforms.sampling import GivenOp, OneSampling, Sampling, Size, each_of


class Promised:
    """Stands in a sample for what its transform will give beside the image."""

    __slots__ = ("image", "number")

    def __init__(self, image: EncodedImage, number: int) -> None:
        self.image = image
        self.number = number

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_use(f".{name}")


def _refuse_use(what: str) -> NoReturn:
    raise UndecodedError(
        f"what the transform gave beside the image is used in __getitem__, by {what}, and it is "
        "not transformed yet. Put that into the transform, or do it in the loop."
    )


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Promised, *others: object) -> NoReturn:
        _refuse_use(f".{name}")

    return refuse


# Python looks for these in a class. Without them a comparison would be False, and no error.
_SPECIAL = (
    "eq ne lt le gt ge hash bool len iter contains getitem setitem delitem str format array"
    " int float index neg abs invert"
).split()
_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and or xor".split()
for _name in _SPECIAL + [f"{kind}{op}" for op in _ARITHMETIC for kind in ("", "r", "i")]:
    setattr(Promised, f"__{_name}__", _refusing(f"__{_name}__"))


class Outcome(NamedTuple):
    """What a transform made of one sample."""

    recording: Recording
    beside: tuple[object, ...]  # the image, as the transform gave it


def carried_out(joint: Joint, size: Size, *, converts: bool) -> Outcome:
    """Run a transform on a stand-in for a picture of this (height, width).

    Raises:
        RecordingError: if it needs pixels, or gives no image first.
    """
    picture = stand_in_for(size, converts=converts, is_tensor=joint.takes_tensor)
    with recording():
        made = joint.transform(picture, *joint.beside)
    if not isinstance(made, (list, tuple)) or len(made) != 1 + len(joint.beside):
        raise RecordingError(
            f"it gives a {type(made).__name__} for {1 + len(joint.beside)} values, and not as many"
        )
    first, *beside = made
    done = recording_of(first)
    if done is None:
        raise RecordingError(f"it gives a {type(first).__name__} that is not made of the picture")
    if not done.is_tensor:
        raise RecordingError("it gives a PIL image, which no batch can hold: add v2.ToImage() and")
    return Outcome(done, tuple(beside))


class _Settled(NamedTuple):
    """What has become of one image and of what is beside it."""

    sampling: OneSampling
    calls: tuple[Call, ...]  # for the device, after the launch
    beside: tuple[object, ...]


def settle(
    samples: object,
    images: Sequence[EncodedImage],
    sizes: Sequence[Size],
    errors: dict[int, str],
    keys: Keys,
    launch: Head,
) -> object:
    """Carry out the transforms whose call was put off.

    Args:
        samples: what the collate function is to get.
        images: the images in them.
        sizes: of each image; made up if it is bad.
        errors: position -> why the image is bad.
        keys: ``(N,)``, which random parameters come from.
        launch: the fused transforms, the first of which is a :class:`GivenOp`.

    Returns:
        The samples, whose images know their sampling, and with what the transforms gave beside
        these.
    """
    done = {}
    with recording():  # once for all of them
        for position, (image, size) in enumerate(zip(images, sizes, strict=True)):
            if position not in errors:
                done[id(image)] = _carried_out(image, size, derive(keys[position], 2), launch)
    common = next(iter(done.values()), None)
    result = (1, 1) if common is None else common.sampling.size
    for position in errors:
        image = images[position]
        done[id(image)] = _made_up(image, sizes[position], result, launch)
    moved = map_leaves(partial(_moved, done), samples, is_image)
    return map_leaves(partial(_kept_promise, done), moved, is_image)


def _carried_out(image: EncodedImage, size: Size, seed: int, launch: Head) -> _Settled:
    given = launch.ops[0]
    joint = image._joint
    assert isinstance(given, GivenOp)
    if joint is None:
        raise ValueError(
            f"{name_of(image.index, image.path)} did not go through the transform of its dataset, "
            "as the others do."
        )
    _refuse_other_size(image, joint, size)
    _refuse_changed(image, joint)
    try:
        with draws_of_sample(seed):
            outcome = carried_out(joint, size, converts=given.dtype is not None)
    except RecordingError as error:
        raise ValueError(
            f"The transform of {name_of(image.index, image.path)} cannot run ahead of its picture: "
            f"{error}. Leave its loader as it is: DataPrefetcher(loader)."
        ) from error
    recorded = outcome.recording
    calls = recorded.rest
    head = recorded.head
    if given.dtype is not None:
        if calls or recorded.dtype != given.dtype or not recorded.within(launch):
            raise ValueError(
                f"The transform did to {name_of(image.index, image.path)} what it did to no sample "
                "on trial, when accelerate() read it. Put the op that is so rare into "
                "torchvision's v2.RandomApply, or leave the loader as it is: "
                "DataPrefetcher(loader)."
            )
    elif not recorded.within(launch):
        head = Head()
        calls = recorded.calls
    (sampling,) = each_of(head.sample([size], np.zeros(1, np.uint64)))
    return _Settled(sampling, calls, outcome.beside)


def _made_up(image: EncodedImage, size: Size, result: Size, launch: Head) -> _Settled:
    """For a bad image, which nobody gets: of the size of another one's result."""
    joint = image._joint
    beside = () if joint is None else joint.beside
    canvas = (getattr(each, "canvas_size", None) for each in select(beside, _is_follower))
    # What is beside it stays as it was, where the transform refuses a size that is made up.
    with contextlib.suppress(Exception):
        if joint is not None:
            made_for = next(filter(None, canvas), (64, 64))
            with SeededDraws(0):
                beside = carried_out(joint, made_for, converts=True).beside
    (sampling,) = each_of(Sampling.identity([size]).resize(np.array([result], np.float64)))
    return _Settled(sampling, (), beside)


def _refuse_other_size(image: EncodedImage, joint: Joint, size: Size) -> None:
    """Refuse boxes, masks and points for a picture of another size."""
    for follower in select(joint.beside, _is_follower):
        canvas = tuple(getattr(follower, "canvas_size", follower.shape[-2:]))
        if canvas != size:
            raise ValueError(
                f"{type(follower).__name__} is for a picture of {' x '.join(map(str, canvas))} "
                f"(height x width), but {name_of(image.index, image.path)} has "
                f"{size[0]} x {size[1]}. If that is the picture as its EXIF orientation turns it, "
                "leave apply_exif=True out."
            )


def state_of(node: object) -> tuple[object, ...]:
    """What a structure holds now: it is equal later if nothing in it was replaced or changed.

    A tensor counts its own changes. Arrays and PIL images are compared by their bytes, and other
    objects by being the same.
    """
    children = children_of(node, None)
    if children is not None and PLAIN_TYPES.issuperset(map(type, children)):
        return tuple(children)  # such as the thousands of numbers of a polygon
    if children is not None:
        return tuple(part for child in children for part in state_of(child))
    if isinstance(node, torch.Tensor):
        return (_Same(node), 0 if node.is_inference() else node._version)
    if isinstance(node, bytearray):
        return (_Same(node), bytes(node))
    if isinstance(node, np.ndarray) or hasattr(node, "tobytes"):
        return (_Same(node), hash(node.tobytes()))
    return (node if type(node) in PLAIN_TYPES else _Same(node),)


class _Same:
    """Equal to nothing but the same object, which it keeps."""

    __slots__ = ("_held",)

    def __init__(self, held: object) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._held is self._held

    __hash__ = None  # type: ignore[assignment]


def _refuse_changed(image: EncodedImage, joint: Joint) -> None:
    """Refuse what was changed after the dataset called its transform, which runs now."""
    if state_of(joint.beside) != joint.state:
        raise ValueError(
            f"What stands beside {name_of(image.index, image.path)} was changed after the dataset "
            "called its transform, which runs when the batch is complete. Change it before the "
            "call, or give the transform a copy, as of a dictionary or a mask that the dataset "
            "uses for each sample again: self.transforms(image, copy.deepcopy(target))."
        )


def _is_follower(leaf: object) -> bool:
    return isinstance(leaf, follower_types())


def _moved(done: dict[int, _Settled], leaf: object) -> object:
    if not isinstance(leaf, EncodedImage):
        return leaf
    settled = done[id(leaf)]
    image = copy.copy(leaf)
    image._settle(settled.sampling, settled.calls)
    return image


def _kept_promise(done: dict[int, _Settled], leaf: object) -> object:
    if not isinstance(leaf, Promised):
        return leaf
    return done[id(leaf.image)].beside[leaf.number]


def carry_on(
    images: Sequence[torch.Tensor], calls: Sequence[tuple[Call, ...]], keys: Keys
) -> list[torch.Tensor]:
    """Carry out on each image ``(3, H, W)`` what its transform did and the launch did not."""
    made = []
    for image, own, key in zip(images, calls, keys, strict=True):
        with SeededDraws(derive(key, 3)):
            for call in own:
                image = call(image)
        made.append(image)
    return made
