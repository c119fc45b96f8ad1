"""Faults that a check has to notice, planted in the transforms that the package is given.

A check compares what the package makes of a list of transforms with what it must be, known from
elsewhere. It runs once as it is, and once with each of its mistakes: the package gets a faulty
list then, and what it is compared with stays as it is. No module is patched, so that a fault is
the same in workers, in other processes and on a GPU::

    RandomCrop(28) -> Shifted(RandomCrop(28)), one pixel further down and to the right
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import kornia.augmentation as K
import numpy as np
import torch
from torchvision.transforms import v2

from gpuprefetch import CenterCrop, RandomResizedCrop
from gpuprefetch.transforms.head import FusedTransform, Transform
from gpuprefetch.transforms.random import Keys
from gpuprefetch.transforms.sampling import (
    CenterCropOp,
    Floats,
    RandomCropOp,
    ResizedCropOp,
    Sampling,
)

Result = dict[str, Any]
Change = Callable[[Transform], Transform]


class _OffByOne:
    """A crop that begins a pixel after its place, where the picture has that pixel."""

    def __call__(self, sampling: Sampling, keys: Keys, like: Floats | None = None) -> Sampling:
        made = super().__call__(sampling, keys, like)  # type: ignore[misc]
        end = made.origin + made.step * (made.length - 0.5) + 0.5
        shift = np.where(end + 1 <= sampling.high + 1e-6, 1.0, 0.0)
        shifted: Sampling = replace(made, origin=made.origin + shift)
        if isinstance(self, ResizedCropOp):  # which reads nothing beside its part
            shifted = replace(shifted, low=made.low + shift, high=made.high + shift)
        return shifted


class _ResizedCrop(_OffByOne, ResizedCropOp):
    pass


class _RandomCrop(_OffByOne, RandomCropOp):
    pass


class _CenterCrop(_OffByOne, CenterCropOp):
    pass


SHIFTED = {ResizedCropOp: _ResizedCrop, RandomCropOp: _RandomCrop, CenterCropOp: _CenterCrop}


class Shifted(FusedTransform):
    """A crop in a list, off by one pixel."""

    def __init__(self, crop: FusedTransform) -> None:
        kind = SHIFTED[type(crop.op)]
        given = {field.name: getattr(crop.op, field.name) for field in fields(crop.op)}
        super().__init__(kind(**given))


class UniformAspect(FusedTransform):
    """A RandomResizedCrop whose aspect ratios are those of a narrow range in the middle."""

    def __init__(self, crop: FusedTransform) -> None:
        low, high = crop.op.ratio
        super().__init__(replace(crop.op, ratio=(low**0.5, high**0.5)))


def shifted(transform: Transform) -> Transform:
    crops = isinstance(transform, FusedTransform) and type(transform.op) in SHIFTED
    return Shifted(transform) if crops else transform


def center_shifted(transform: Transform) -> Transform:
    return Shifted(transform) if isinstance(transform, CenterCrop) else transform


def never_flipping(transform: Transform) -> Transform:
    flips = isinstance(transform, K.RandomHorizontalFlip | K.RandomVerticalFlip)
    return type(transform)(p=0.0) if flips else transform


def never_inverting(transform: Transform) -> Transform:
    return v2.RandomInvert(0.0) if isinstance(transform, v2.RandomInvert) else transform


def narrower(transform: Transform) -> Transform:
    return UniformAspect(transform) if isinstance(transform, RandomResizedCrop) else transform


def _normalize(change: Callable[[torch.Tensor, torch.Tensor], tuple[Any, Any]]) -> Change:
    def changed(transform: Transform) -> Transform:
        if not isinstance(transform, K.Normalize | v2.Normalize):
            return transform
        flags = getattr(transform, "flags", vars(transform))
        given = (torch.as_tensor(flags[name]).flatten() for name in ("mean", "std"))
        mean, std = change(*given)
        return type(transform)(mean=mean.tolist(), std=std.tolist())

    return changed


CROP = "a crop off by one pixel"
CENTER = "CenterCrop off by one pixel"
FLIP = "never flipping"
ASPECT = "narrower aspect ratios"
SWAPPED = "R and B swapped in Normalize"
STD = "std off by 1 %"
SWAPPED_COLORS = "R and B swapped in the pictures"  # of batches: accuracy.py makes it
POLICY = "a policy left out"
CHANGES: dict[str, Change] = {
    CROP: shifted,
    CENTER: center_shifted,
    FLIP: never_flipping,
    ASPECT: narrower,
    POLICY: never_inverting,
    SWAPPED: _normalize(lambda mean, std: (mean.flip(0), std.flip(0))),
    STD: _normalize(lambda mean, std: (mean, std * 1.01)),
}


def planted(transforms: Sequence[Transform], mistake: str) -> list[Transform]:
    """The list with a fault of :data:`CHANGES` in it; as it is without one."""
    if not mistake:
        return list(transforms)
    change = CHANGES[mistake]
    made = [change(transform) for transform in transforms]
    if all(a is b for a, b in zip(made, transforms, strict=True)):
        raise ValueError(f"{mistake!r} changes none of {transforms}.")
    return made


def judged(
    name: str, check: Callable[[str], Result], mistakes: Sequence[str], **facts: Any
) -> Result:
    """What a check finds, and whether it notices each mistake: for :func:`bench.verdict`."""
    result = {"check": name, **facts, **check("")}
    result["mistakes"] = {
        mistake: "missed" if check(mistake)["ok"] else "noticed" for mistake in mistakes
    }
    return result
