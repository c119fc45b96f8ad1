"""The compiler: a random transform of torchvision or timm as slots, with its own distribution.

What an op of the list is made of is read from its attributes once; each batch then only draws.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from gpuprefetch.policies.known import filter_of, flatten, name_of, twin
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
from gpuprefetch.policies.timm import COLORS, from_augment

# Filters that torchvision has for tensors.
FILTERS = ("nearest", "bilinear")
_NONE = (math.nan,) * 3  # for a fill or a center of None
_ADJUSTMENTS = ("brightness", "contrast", "saturation", "hue")


class _NoForm(Exception):
    """A transform has no such form."""


def compiled(op: Any) -> Slots | Mix | None:
    """What draws for torchvision's or timm's ``op`` for each image; None where nothing does."""
    try:
        return _slots(op)
    except _NoForm:
        return None


def _slots(op: Any) -> Slots | Mix:
    op = twin(op)
    make = COMPILERS.get(name_of(op) or "")
    of_pil = hasattr(op, "interpolation") and filter_of(op) not in FILTERS
    reshapes = getattr(op, "expand", False) or getattr(op, "num_output_channels", 3) != 3
    # One fill for images and another one for masks is a dict.
    if make is None or of_pil or reshapes or isinstance(getattr(op, "fill", None), dict):
        raise _NoForm
    return make(op)


def _fill(op: Any) -> Sequence[float]:
    """The three values around a picture that is moved."""
    return _NONE if op.fill is None else [*np.broadcast_to(np.ravel(op.fill), 3).astype(float)]


def _moving(name: str, op: Any, sample: Any, draws: int, p: float = 1.0) -> Slots:
    return one(f"{name}_{filter_of(op).upper()}", partial(sample, op), draws, p)


# --- One op ---


def _drawn(columns: Sequence[Any], u: Floats, picture: Any = None) -> list[Any]:
    """Numbers as they are, and of each range (low, high) uniform ones."""
    numbers = iter(u)
    return [
        column[0] + (column[1] - column[0]) * next(numbers) if np.ndim(column) else column
        for column in columns
    ]


def _one(name: str, *columns: Any, p: float = 1.0) -> Slots:
    return one(name, partial(_drawn, columns), sum(map(np.ndim, columns)), p)


def _switch(name: str, *attributes: str) -> Callable[[Any], Slots]:
    """Of such an op nothing is drawn, but whether."""
    return lambda op: _one(name, *(getattr(op, a) for a in attributes), p=getattr(op, "p", 1.0))


def _solarized(op: Any, u: Floats, picture: Picture) -> Columns:
    if picture.white == 1 < op.threshold:
        raise ValueError(
            f"RandomSolarize(threshold={op.threshold}) is for values of 0 to 255, and images are "
            f"in [0, 1] here. Divide it by 255: threshold={op.threshold} / 255."
        )
    return [op.threshold]


def _blurred(op: Any, u: Floats, picture: Picture) -> Columns:
    (sigma,) = _drawn([op.sigma], u)
    return [sigma, sigma, *op.kernel_size]


def _turned(angle: Any) -> Any:
    """The angle of an affine map for torchvision's of a rotation, which turns the other way."""
    return -(angle % 360)


def _rotated(op: Any, u: Floats, picture: Picture) -> Columns:
    (angle,) = _drawn([op.degrees], u)
    return [_turned(angle), 0, 0, 1, 0, 0, *(op.center or _NONE[:2]), *_fill(op)]


def _affine(op: Any, u: Floats, picture: Picture) -> Columns:
    far_x, far_y = np.multiply(op.translate or (0, 0), (picture.width, picture.height))
    shear = (*(op.shear or (0, 0)), 0, 0)
    ranges = op.degrees, (-far_x, far_x), (-far_y, far_y), op.scale or (1, 1), shear[:2], shear[2:4]
    angle, x, y, *rest = _drawn(ranges, u)
    return [angle, np.rint(x), np.rint(y), *rest, *(op.center or _NONE[:2]), *_fill(op)]


def _perspective(op: Any, u: Floats, picture: Picture) -> Columns:
    """Each corner moves inwards; the coefficients of the map from where it is to where it was."""
    size = np.array([picture.width, picture.height])
    bound = (op.distortion_scale * (size // 2)).astype(int) + 1
    far = np.array([(0, 0), (1, 0), (1, 1), (0, 1)])
    inwards = np.floor(u.T.reshape(-1, 4, 2) * bound)
    moved = np.where(far, size - bound + inwards, inwards)
    x, y = moved[..., 0], moved[..., 1]
    corners = (far * (size - 1)).astype(float)
    system = np.zeros((len(moved), 8, 8))
    for axis in range(2):
        half, source = system[:, axis::2], corners[:, axis]
        half[:, :, 3 * axis : 3 * axis + 3] = np.stack([x, y, np.ones_like(x)], axis=2)
        half[:, :, 6:] = -source[:, None] * moved
    try:
        found = np.linalg.solve(system, np.broadcast_to(corners.reshape(8, 1), (len(moved), 8, 1)))
    except np.linalg.LinAlgError:  # corners of a few pixels that met
        found = np.linalg.pinv(system) @ corners.reshape(8, 1)
    return [*found[..., 0].T, *_fill(op)]


def _erased(op: Any, u: Floats, picture: Picture) -> Columns:
    """The box of the first of ten tries that is smaller than the picture; none of no height."""
    height, width = picture.height, picture.width
    area = height * width * (op.scale[0] + (op.scale[1] - op.scale[0]) * u[:10])
    low, high = np.log(op.ratio)
    aspect = np.exp(low + (high - low) * u[10:20])
    h, w = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (h < height) & (w < width)
    first = (fits.argmax(axis=0), np.arange(u.shape[1]))
    h, w = np.where(fits.any(axis=0), h[first], 0), w[first]
    top, left = np.floor(u[20] * (height - h + 1)), np.floor(u[21] * (width - w + 1))
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


def _jitter(op: Any) -> Slots:
    ranges = {name: getattr(op, name) for name in _ADJUSTMENTS}
    return order([_one(n.upper(), drawn) for n, drawn in ranges.items() if drawn is not None])


def _distort(op: Any) -> Slots:
    """Contrast comes before saturation and hue, or after them."""
    brightness, contrast, *rest = (_one(n.upper(), getattr(op, n), p=op.p) for n in _ADJUSTMENTS)
    either = choice([row([contrast, *rest]), row([*rest, contrast])], (0.5, 0.5))
    return row([brightness, either, one("PERMUTE", _permuted, 3, op.p)])


# --- Containers ---


def _row(transforms: Any, p: float = 1.0) -> Slots:
    parts = [_slots(op) for op in flatten(transforms) if name_of(op) != "Identity"]
    if any(isinstance(part, Mix) for part in parts):
        raise _NoForm
    return row(parts, p)  # type: ignore[arg-type]


def _choice(op: Any) -> Slots:
    chances = np.array(op.p if op.p is not None else [1] * len(op.transforms), dtype=float)
    return choice([*map(_row, op.transforms)], chances / chances.sum())


# --- RandAugment and its kin ---

# The argument that the magnitude is, of what moves pixels.
_MOVES = {"ShearX": 4, "ShearY": 5, "TranslateX": 1, "TranslateY": 2, "Rotate": 0}


def _space(op: Any) -> Any:
    few = getattr(op, "all_ops", True) is False
    return op._PARTIAL_AUGMENTATION_SPACE if few else op._AUGMENTATION_SPACE


def _magnitudes(op: Any, name: str, numbers: Sequence[int], bins: int, picture: Picture) -> Any:
    """``(B, 2)``: the magnitudes with these numbers, with one sign and the other."""
    function, signed = _space(op)[name]
    values = function(bins, picture.height, picture.width)
    chosen = np.zeros(len(numbers)) if values is None else np.asarray(values)[list(numbers)]
    both = chosen.astype(float)[:, None] * ((-1, 1) if signed else (1, 1))
    if name in ("Brightness", "Color", "Contrast", "Sharpness"):
        return 1 + both
    if name.startswith("Shear"):
        return np.degrees(np.arctan(both))
    if name == "Solarize":
        return both * picture.white
    if name == "Rotate":
        return _turned(both)
    return np.trunc(both) if name.startswith(("Translate", "Posterize")) else both


def _step(op: Any, name: str, numbers: Sequence[int], bins: int, chance: float = 1.0) -> Step:
    magnitudes = partial(_magnitudes, op, name, numbers, bins)
    if name in COLORS:
        return Step(COLORS[name], magnitudes, chance=chance)
    if name not in _MOVES:  # of a later torchvision
        raise _NoForm
    center = (0.0, 0.0) if name.startswith("Shear") else _NONE[:2]
    given = (0, 0, 0, 1, 0, 0, *center, *_fill(op))
    return Step(f"AFFINE_{filter_of(op).upper()}", magnitudes, _MOVES[name], given, chance)


def _one_of(op: Any, numbers: Sequence[int], layers: int = 1, bins: int = 0) -> Slots:
    bins = bins or op.num_magnitude_bins
    return table([[_step(op, name, numbers, bins)] for name in _space(op)], layers)


def _auto_augment(op: Any) -> Slots:
    return table([[_step(op, n, [m or 0], 10, p) for n, p, m in each] for each in op._policies], 1)


def _aug_mix(op: Any) -> Mix:
    if op.alpha != 1:
        raise _NoForm
    return Mix(_one_of(op, range(op.severity), op.chain_depth or -1, 10), op.mixture_width)


COMPILERS: dict[str, Callable[[Any], Slots | Mix]] = {
    "AugMix": _aug_mix,
    "AutoAugment": _auto_augment,
    "ColorJitter": _jitter,
    "GaussianBlur": lambda op: one("BLUR", partial(_blurred, op), 1),
    "Grayscale": _switch("GRAYSCALE"),
    "RandAugment": lambda op: _one_of(op, [op.magnitude], op.num_ops),
    "RandomAdjustSharpness": _switch("SHARPNESS", "sharpness_factor"),
    "RandomAffine": lambda op: _moving("AFFINE", op, _affine, 6),
    "RandomApply": lambda op: _row(op.transforms, op.p),
    "RandomAutocontrast": _switch("AUTOCONTRAST"),
    "RandomChannelPermutation": lambda op: one("PERMUTE", _permuted, 3),
    "RandomChoice": _choice,
    "RandomEqualize": _switch("EQUALIZE"),
    "RandomErasing": lambda op: one(
        "ERASE_NOISE" if op.value is None else "ERASE", partial(_erased, op), 23, op.p
    ),
    "RandomGrayscale": _switch("GRAYSCALE"),
    "RandomHorizontalFlip": _switch("HFLIP"),
    "RandomInvert": _switch("INVERT"),
    "RandomOrder": lambda op: order([*map(_row, op.transforms)]),
    "RandomPerspective": lambda op: _moving("PERSPECTIVE", op, _perspective, 8, op.p),
    "RandomPhotometricDistort": _distort,
    "RandomPosterize": _switch("POSTERIZE", "bits"),
    "RandomRotation": lambda op: _moving("AFFINE", op, _rotated, 1),
    "RandomSolarize": lambda op: one("SOLARIZE", partial(_solarized, op), 0, op.p),
    "RandomVerticalFlip": _switch("VFLIP"),
    "TrivialAugmentWide": lambda op: _one_of(op, range(op.num_magnitude_bins)),
    "timm AugMixAugment": from_augment,
    "timm AutoAugment": from_augment,
    "timm RandAugment": from_augment,
}
