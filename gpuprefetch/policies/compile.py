"""The compiler: a random transform of torchvision or timm as slots, with its own distribution.

The attributes of a transform are read once; then each batch only samples. :data:`COMPILERS` has a
row for each transform that is known.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeGuard

import numpy as np
import torch

from gpuprefetch.policies.known import filter_of, flatten, name_of, twin
from gpuprefetch.policies.ops import Family, Filter, Op
from gpuprefetch.policies.slots import (
    Columns,
    Floats,
    Mix,
    Picture,
    Slots,
    Step,
    choice,
    one,
    order,
    row,
    table,
)
from gpuprefetch.policies.spatial import Affine
from gpuprefetch.policies.timm import COLORS, Transform, from_augment

# Filters that torchvision has for tensors.
FILTERS = (Filter.NEAREST.value, Filter.BILINEAR.value)
_NONE = (math.nan,) * 3  # for a fill or a center of None
# The attributes of ColorJitter and RandomPhotometricDistort, and the ops that they are ranges of.
_ADJUSTMENTS = {
    "brightness": Op.BRIGHTNESS,
    "contrast": Op.CONTRAST,
    "saturation": Op.SATURATION,
    "hue": Op.HUE,
}


class _NoForm(Exception):
    """A transform has no such form."""


def compiled(op: Transform) -> Slots | Mix | None:
    """The slots of torchvision's or timm's ``op``, which sample for each image; None if unknown."""
    try:
        return _slots(op)
    except _NoForm:
        return None


def _slots(op: Transform) -> Slots | Mix:
    op = twin(op)
    make = COMPILERS.get(name_of(op) or "")
    of_pil = hasattr(op, "interpolation") and filter_of(op) not in FILTERS
    reshapes = getattr(op, "expand", False) or getattr(op, "num_output_channels", 3) != 3
    # One fill for images and another one for masks is a dict.
    if make is None or of_pil or reshapes or isinstance(getattr(op, "fill", None), dict):
        raise _NoForm
    return make(op)


def _fill(op: Transform) -> Sequence[float]:
    """The three values around a picture that is moved."""
    return _NONE if op.fill is None else [*np.broadcast_to(np.ravel(op.fill), 3).astype(float)]


def _moving(
    family: Family,
    op: Transform,
    sample: Callable[[Transform, Floats, Picture], Columns],
    numbers: int,
    p: float = 1.0,
) -> Slots:
    return one(Op.sampling(family, Filter(filter_of(op))), partial(sample, op), numbers, p)


# --- One op ---

Range = Sequence[float]  # low, high
Column = float | Range


def _is_range(column: Column) -> TypeGuard[Range]:
    return np.ndim(column) > 0


def _within(bounds: Range, u: Floats) -> Floats:
    low, high = bounds
    return low + (high - low) * u


def _sampled(columns: Sequence[Column], u: Floats, picture: Picture) -> Columns:
    """Numbers as they are, and of each range uniform ones."""
    numbers = iter(u)
    return [_within(column, next(numbers)) if _is_range(column) else column for column in columns]


def _one(op: Op, *columns: Column, p: float = 1.0) -> Slots:
    return one(op, partial(_sampled, columns), sum(map(_is_range, columns)), p)


def _switch(op: Op, *attributes: str) -> Callable[[Transform], Slots]:
    """A transform with fixed arguments: only whether it runs is sampled."""
    return lambda transform: _one(
        op, *(getattr(transform, a) for a in attributes), p=getattr(transform, "p", 1.0)
    )


def _solarized(op: Transform, u: Floats, picture: Picture) -> Columns:
    if picture.white == 1 < op.threshold:
        raise ValueError(
            f"RandomSolarize(threshold={op.threshold}) is for values of 0 to 255, and images are "
            f"in [0, 1] here. Divide it by 255: threshold={op.threshold} / 255."
        )
    return [op.threshold]


def _blurred(op: Transform, u: Floats, picture: Picture) -> Columns:
    sigma = _within(op.sigma, u[0])
    return [sigma, sigma, *op.kernel_size]


def _turned(angle: Floats) -> Floats:
    """The angle of an affine map for torchvision's of a rotation, which turns the other way."""
    return -(angle % 360)


def _rotated(op: Transform, u: Floats, picture: Picture) -> Columns:
    angle = _within(op.degrees, u[0])
    return [_turned(angle), 0, 0, 1, 0, 0, *(op.center or _NONE[:2]), *_fill(op)]


def _affine(op: Transform, u: Floats, picture: Picture) -> Columns:
    far_x, far_y = np.multiply(op.translate or (0, 0), (picture.width, picture.height))
    shear = (*(op.shear or (0, 0)), 0, 0)
    ranges = op.degrees, (-far_x, far_x), (-far_y, far_y), op.scale or (1, 1), shear[:2], shear[2:4]
    angle, x, y, *rest = map(_within, ranges, u)
    return [angle, np.rint(x), np.rint(y), *rest, *(op.center or _NONE[:2]), *_fill(op)]


def _perspective(op: Transform, u: Floats, picture: Picture) -> Columns:
    """Each corner moves inwards; the coefficients of the map from where it is to where it was."""
    size = np.array([picture.width, picture.height])
    bound = (op.distortion_scale * (size // 2)).astype(int) + 1
    far = np.array([(0, 0), (1, 0), (1, 1), (0, 1)])
    inwards = np.floor(u.T.reshape(-1, 4, 2) * bound)
    moved = np.where(far, size - bound + inwards, inwards)
    x, y = np.moveaxis(moved, 2, 0)
    corners = (far * (size - 1)).astype(float)
    system = np.zeros((len(moved), 8, 8))
    for axis in range(2):
        half = system[:, axis::2]
        half[:, :, 3 * axis : 3 * axis + 3] = np.stack([x, y, np.ones_like(x)], axis=2)
        half[:, :, 6:] = -corners[:, axis, None] * moved
    try:
        found = np.linalg.solve(system, np.broadcast_to(corners.reshape(8, 1), (len(moved), 8, 1)))
    except np.linalg.LinAlgError:  # corners of a few pixels that met
        found = np.linalg.pinv(system) @ corners.reshape(8, 1)
    return [*found[..., 0].T, *_fill(op)]


def _erased(op: Transform, u: Floats, picture: Picture) -> Columns:
    """The box of the first of ten tries that is smaller than the picture; no height without one."""
    height = picture.height
    width = picture.width
    area = height * width * (op.scale[0] + (op.scale[1] - op.scale[0]) * u[:10])
    low, high = np.log(op.ratio)
    aspect = np.exp(low + (high - low) * u[10:20])
    h = np.rint(np.sqrt(area * aspect))
    w = np.rint(np.sqrt(area / aspect))
    fits = (h < height) & (w < width)
    first = (fits.argmax(axis=0), np.arange(u.shape[1]))
    h = np.where(fits.any(axis=0), h[first], 0)
    w = w[first]
    top = np.floor(u[20] * (height - h + 1))
    left = np.floor(u[21] * (width - w + 1))
    if op.value is None:
        return [top, left, h, w, np.floor(u[22] * 2**24)]
    if len(op.value) not in (1, picture.channels):
        raise ValueError(
            f"RandomErasing(value={op.value}) is for images of {len(op.value)} channels, and these "
            f"have {picture.channels}. Give one value for all."
        )
    return [top, left, h, w, *(op.value * 3)[:3]]


def _permuted(u: Floats, picture: Picture) -> Columns:
    return [*np.argsort(u[: picture.channels], axis=0)]


def _jitter(op: Transform) -> Slots:
    ranges = [(adjusts, getattr(op, name)) for name, adjusts in _ADJUSTMENTS.items()]
    return order([_one(adjusts, bounds) for adjusts, bounds in ranges if bounds is not None])


def _distort(op: Transform) -> Slots:
    """Contrast comes before saturation and hue, or after them."""
    brightness, contrast, *rest = (
        _one(adjusts, getattr(op, name), p=op.p) for name, adjusts in _ADJUSTMENTS.items()
    )
    either = choice([row([contrast, *rest]), row([*rest, contrast])], (0.5, 0.5))
    return row([brightness, either, one(Op.PERMUTE, _permuted, 3, op.p)])


# --- Containers ---


def _row(transforms: Transform, p: float = 1.0) -> Slots:
    parts = list[Slots]()
    for op in flatten(transforms):
        if name_of(op) == "Identity":
            continue
        part = _slots(op)
        if isinstance(part, Mix):
            raise _NoForm
        parts.append(part)
    return row(parts, p)


def _choice(op: Transform) -> Slots:
    chances = np.array(op.p if op.p is not None else [1] * len(op.transforms), dtype=float)
    return choice([*map(_row, op.transforms)], chances / chances.sum())


# --- RandAugment and its kin ---

# The argument that the magnitude is, of what moves pixels.
_MOVES = {
    "ShearX": Affine.SHEAR_X,
    "ShearY": Affine.SHEAR_Y,
    "TranslateX": Affine.TRANSLATE_X,
    "TranslateY": Affine.TRANSLATE_Y,
    "Rotate": Affine.ANGLE,
}


# torchvision's own tables: by name, a function of bins, height and width that gives magnitudes, and
# whether these have a sign.
Space = dict[str, tuple[Callable[[int, int, int], torch.Tensor | None], bool]]


def _space(op: Transform) -> Space:
    few = getattr(op, "all_ops", True) is False
    space: Space = op._PARTIAL_AUGMENTATION_SPACE if few else op._AUGMENTATION_SPACE
    return space


def _magnitudes(
    op: Transform, name: str, numbers: Sequence[int], bins: int, picture: Picture
) -> Floats:
    """``(B, 2)``: the magnitudes with these numbers, with one sign and the other."""
    function, signed = _space(op)[name]
    values = function(bins, picture.height, picture.width)
    chosen = np.zeros(len(numbers)) if values is None else np.asarray(values)[list(numbers)]
    both: Floats = chosen.astype(float)[:, None] * ((-1, 1) if signed else (1, 1))
    if name in ("Brightness", "Color", "Contrast", "Sharpness"):
        return 1 + both
    if name.startswith("Shear"):
        return np.asarray(np.degrees(np.arctan(both)))
    if name == "Solarize":
        return both * picture.white
    if name == "Rotate":
        return _turned(both)
    return np.trunc(both) if name.startswith(("Translate", "Posterize")) else both


def _step(op: Transform, name: str, numbers: Sequence[int], bins: int, chance: float = 1.0) -> Step:
    magnitudes = partial(_magnitudes, op, name, numbers, bins)
    if name in COLORS:
        return Step(COLORS[name], magnitudes, chance=chance)
    if name not in _MOVES:  # of a later torchvision
        raise _NoForm
    center = (0.0, 0.0) if name.startswith("Shear") else _NONE[:2]
    given = (0, 0, 0, 1, 0, 0, *center, *_fill(op))
    moves = Op.sampling(Family.AFFINE, Filter(filter_of(op)))
    return Step(moves, magnitudes, _MOVES[name], given, chance)


def _one_of(op: Transform, numbers: Sequence[int], layers: int = 1, bins: int = 0) -> Slots:
    bins = bins or op.num_magnitude_bins
    return table([[_step(op, name, numbers, bins)] for name in _space(op)], layers)


def _auto_augment(op: Transform) -> Slots:
    policies = [
        [_step(op, name, [magnitude or 0], 10, chance) for name, chance, magnitude in policy]
        for policy in op._policies
    ]
    return table(policies, 1)


def _aug_mix(op: Transform) -> Mix:
    if op.alpha != 1:
        raise _NoForm
    return Mix(_one_of(op, range(op.severity), op.chain_depth or -1, 10), op.mixture_width)


COMPILERS: dict[str, Callable[[Transform], Slots | Mix]] = {
    "AugMix": _aug_mix,
    "AutoAugment": _auto_augment,
    "ColorJitter": _jitter,
    "GaussianBlur": lambda op: one(Op.BLUR, partial(_blurred, op), 1),
    "Grayscale": _switch(Op.GRAYSCALE),
    "RandAugment": lambda op: _one_of(op, [op.magnitude], op.num_ops),
    "RandomAdjustSharpness": _switch(Op.SHARPNESS, "sharpness_factor"),
    "RandomAffine": lambda op: _moving(Family.AFFINE, op, _affine, 6),
    "RandomApply": lambda op: _row(op.transforms, op.p),
    "RandomAutocontrast": _switch(Op.AUTOCONTRAST),
    "RandomChannelPermutation": lambda op: one(Op.PERMUTE, _permuted, 3),
    "RandomChoice": _choice,
    "RandomEqualize": _switch(Op.EQUALIZE),
    "RandomErasing": lambda op: one(
        Op.ERASE_NOISE if op.value is None else Op.ERASE, partial(_erased, op), 23, op.p
    ),
    "RandomGrayscale": _switch(Op.GRAYSCALE),
    "RandomHorizontalFlip": _switch(Op.HFLIP),
    "RandomInvert": _switch(Op.INVERT),
    "RandomOrder": lambda op: order([*map(_row, op.transforms)]),
    "RandomPerspective": lambda op: _moving(Family.PERSPECTIVE, op, _perspective, 8, op.p),
    "RandomPhotometricDistort": _distort,
    "RandomPosterize": _switch(Op.POSTERIZE, "bits"),
    "RandomRotation": lambda op: _moving(Family.AFFINE, op, _rotated, 1),
    "RandomSolarize": lambda op: one(Op.SOLARIZE, partial(_solarized, op), 0, op.p),
    "RandomVerticalFlip": _switch(Op.VFLIP),
    "TrivialAugmentWide": lambda op: _one_of(op, range(op.num_magnitude_bins)),
    "timm AugMixAugment": from_augment,
    "timm AutoAugment": from_augment,
    "timm RandAugment": from_augment,
}
