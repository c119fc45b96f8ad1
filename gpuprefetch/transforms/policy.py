"""The compiler: a random transform of torchvision or timm as slots, with its own distribution.

What an op of the list is made of is read from its attributes once; each batch then only draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from gpuprefetch.transforms.known import filter_of, flatten, name_of, twin
from gpuprefetch.transforms.slots import (
    Choice,
    Columns,
    Floats,
    Mix,
    One,
    Order,
    Picture,
    Row,
    Slots,
    Step,
    Table,
)
from gpuprefetch.transforms.timm import COLORS, from_augment

# Filters that torchvision has for tensors.
FILTERS = ("nearest", "bilinear")
_ADJUSTMENTS = ("brightness", "contrast", "saturation", "hue")


def compiled(op: Any) -> Slots | Mix | None:
    """What draws for a transform, for each image of a batch; None where there is no such form.

    Args:
        op: of torchvision, v1 or v2, or of timm; a container as RandomApply, if all that it holds
            has such a form. Subclasses have none: they may do anything.
    """
    op = twin(op)
    name = name_of(op)
    if name is None or name not in COMPILERS:
        return None
    if hasattr(op, "interpolation") and filter_of(op) not in FILTERS:
        return None
    if isinstance(getattr(op, "fill", None), dict):
        return None  # one for images and another one for masks
    return COMPILERS[name](op)


def _fill(op: Any) -> tuple[float, float, float]:
    """The three values around a picture that is moved; NaN for torchvision's None."""
    if op.fill is None:
        return (math.nan,) * 3
    values = np.ravel(op.fill).astype(float).tolist()
    values = values * 3 if len(values) == 1 else values
    return (values[0], values[1], values[2])


def _moving(name: str, op: Any) -> str:
    return f"{name}_{filter_of(op).upper()}"


def _center(op: Any) -> Sequence[float]:
    return op.center or (math.nan, math.nan)


# --- One op ---


def _drawn(columns: Sequence[Any], u: Floats, picture: Picture) -> list[Any]:
    """Each column is a number, or drawn between two."""
    numbers = iter(u)
    return [
        column[0] + (column[1] - column[0]) * next(numbers) if np.ndim(column) else column
        for column in columns
    ]


def _one(name: str, *columns: Any, p: float = 1.0) -> One:
    return One(name, partial(_drawn, columns), sum(map(np.ndim, columns)), p)


def _switch(name: str, *attributes: str) -> Callable[[Any], One]:
    """An op of which nothing is drawn, but whether."""
    return lambda op: _one(name, *(getattr(op, a) for a in attributes), p=getattr(op, "p", 1.0))


def _blur(op: Any, u: Floats, picture: Picture) -> Columns:
    (sigma,) = _drawn([op.sigma], u, picture)
    return [sigma, sigma, *op.kernel_size]


def _affine(op: Any, u: Floats, picture: Picture) -> Columns:
    far_x, far_y = (
        share * side for share, side in zip(op.translate or (0, 0), picture[1::-1], strict=True)
    )
    shear = (*(op.shear or (0, 0)), 0, 0)
    ranges = op.degrees, (-far_x, far_x), (-far_y, far_y), op.scale or (1, 1), shear[:2], shear[2:4]
    angle, x, y, *rest = _drawn(ranges, u, picture)
    return [angle, np.rint(x), np.rint(y), *rest, *_center(op), *_fill(op)]


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


def _erasing(op: Any) -> One:
    name = "ERASE_NOISE" if op.value is None else "ERASE"
    return One(name, partial(_erased, op), 23, op.p)


def _permuted(u: Floats, picture: Picture) -> Columns:
    order = np.argsort(u[: picture.channels], axis=0)
    return [*order] if picture.channels > 1 else [np.zeros(u.shape[1])]


def _jitter(op: Any) -> Order:
    ranges = {name: getattr(op, name) for name in _ADJUSTMENTS}
    return Order(tuple(_one(n.upper(), drawn) for n, drawn in ranges.items() if drawn is not None))


def _distort(op: Any) -> Row:
    """Contrast comes before saturation and hue, or after them."""
    brightness, contrast, *rest = (_one(n.upper(), getattr(op, n), p=op.p) for n in _ADJUSTMENTS)
    either = Choice((Row((contrast, *rest)), Row((*rest, contrast))), (0.5, 0.5))
    return Row((brightness, either, One("PERMUTE", _permuted, 3, op.p)))


def _gray(op: Any) -> One | None:
    same = getattr(op, "num_output_channels", 3) == 3  # else it gives another shape
    return One("GRAYSCALE", p=getattr(op, "p", 1.0)) if same else None


# --- Containers ---


def _inner(transforms: Any) -> list[Slots] | None:
    parts = [compiled(op) for op in flatten(transforms) if name_of(op) != "Identity"]
    slots = [part for part in parts if part is not None and not isinstance(part, Mix)]
    return slots if len(slots) == len(parts) else None


def _apply(op: Any) -> Row | None:
    inner = _inner(op.transforms)
    return None if inner is None else Row(tuple(inner), op.p)


def _rows(op: Any) -> tuple[Row, ...] | None:
    inner = [_inner(transform) for transform in op.transforms]
    return None if None in inner else tuple(Row(tuple(parts or ())) for parts in inner)


def _choice(op: Any) -> Choice | None:
    chances = np.array(op.p if op.p is not None else [1] * len(op.transforms), dtype=float)
    rows = _rows(op)
    return None if rows is None else Choice(rows, tuple((chances / chances.sum()).tolist()))


def _order(op: Any) -> Order | None:
    rows = _rows(op)
    return None if rows is None else Order(rows)


# --- RandAugment and its kin ---

# The argument that the magnitude is, of what moves pixels.
_MOVES = {"ShearX": 4, "ShearY": 5, "TranslateX": 1, "TranslateY": 2, "Rotate": 0}


def _magnitudes(op: Any, name: str, numbers: Sequence[int], bins: int, picture: Picture) -> Any:
    """``(B, 2)``: the magnitudes with these numbers, with one sign and the other."""
    few = getattr(op, "all_ops", True) is False
    space = op._PARTIAL_AUGMENTATION_SPACE if few else op._AUGMENTATION_SPACE
    function, signed = space[name]
    values = function(bins, picture.height, picture.width)
    chosen = np.zeros(len(numbers)) if values is None else np.asarray(values)[list(numbers)]
    both = chosen.astype(float)[:, None] * ((-1, 1) if signed else (1, 1))
    if name in ("Brightness", "Color", "Contrast", "Sharpness"):
        return 1 + both
    if name.startswith("Shear"):
        return np.degrees(np.arctan(both))
    if name == "Solarize":
        return both * picture.white
    return np.trunc(both) if name.startswith(("Translate", "Posterize")) else both


def _step(
    op: Any, name: str, numbers: Sequence[int], chance: float = 1.0, *, bins: int = 0
) -> Step | None:
    """A step of ``op``; None for one of a later torchvision."""
    magnitudes = partial(_magnitudes, op, name, numbers, bins or op.num_magnitude_bins)
    if name not in _MOVES:
        return Step(COLORS[name], magnitudes, chance=chance) if name in COLORS else None
    center = (0.0, 0.0) if name.startswith("Shear") else (math.nan, math.nan)
    form, before = ("ROTATE", (0,)) if name == "Rotate" else ("AFFINE", (0, 0, 0, 1, 0, 0))
    given = (*before, *center, *_fill(op))
    return Step(_moving(form, op), magnitudes, _MOVES[name], given, chance)


def _table(policies: list[list[Any]], layers: int = 1, *, most: bool = False) -> Table | None:
    unknown = any(None in policy for policy in policies)
    return None if unknown else Table(policies, layers, most=most)


def _rand_augment(op: Any) -> Table | None:
    return _table([[_step(op, n, [op.magnitude])] for n in op._AUGMENTATION_SPACE], op.num_ops)


def _trivial_augment(op: Any) -> Table | None:
    every = range(op.num_magnitude_bins)
    return _table([[_step(op, name, every)] for name in op._AUGMENTATION_SPACE])


def _auto_augment(op: Any) -> Table | None:
    return _table(
        [[_step(op, name, [m or 0], p, bins=10) for name, p, m in each] for each in op._policies]
    )


def _aug_mix(op: Any) -> Mix | None:
    space = op._AUGMENTATION_SPACE if op.all_ops else op._PARTIAL_AUGMENTATION_SPACE
    fixed, severity = op.chain_depth > 0, range(op.severity)
    steps = [[_step(op, name, severity, bins=10)] for name in space]
    chain = _table(steps, op.chain_depth if fixed else 3, most=not fixed)
    return None if chain is None else Mix(chain, op.mixture_width, op.alpha)


COMPILERS: dict[str, Callable[[Any], Slots | Mix | None]] = {
    "AugMix": _aug_mix,
    "AutoAugment": _auto_augment,
    "ColorJitter": _jitter,
    "GaussianBlur": lambda op: One("BLUR", partial(_blur, op), 1),
    "Grayscale": _gray,
    "RandAugment": _rand_augment,
    "RandomAdjustSharpness": _switch("SHARPNESS", "sharpness_factor"),
    "RandomAffine": lambda op: One(_moving("AFFINE", op), partial(_affine, op), 6),
    "RandomApply": _apply,
    "RandomAutocontrast": _switch("AUTOCONTRAST"),
    "RandomChannelPermutation": lambda op: One("PERMUTE", _permuted, 3),
    "RandomChoice": _choice,
    "RandomEqualize": _switch("EQUALIZE"),
    "RandomErasing": _erasing,
    "RandomGrayscale": _gray,
    "RandomHorizontalFlip": _switch("HFLIP"),
    "RandomInvert": _switch("INVERT"),
    "RandomOrder": _order,
    "RandomPerspective": lambda op: One(
        _moving("PERSPECTIVE", op), partial(_perspective, op), 8, op.p
    ),
    "RandomPhotometricDistort": _distort,
    "RandomPosterize": _switch("POSTERIZE", "bits"),
    "RandomRotation": lambda op: (
        None if op.expand else _one(_moving("ROTATE", op), op.degrees, *_center(op), *_fill(op))
    ),
    "RandomSolarize": _switch("SOLARIZE", "threshold"),
    "RandomVerticalFlip": _switch("VFLIP"),
    "TrivialAugmentWide": _trivial_augment,
    "timm AugMixAugment": from_augment,
    "timm AutoAugment": from_augment,
    "timm RandAugment": from_augment,
}
