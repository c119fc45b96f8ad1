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
from gpuprefetch.transforms.ops import ARGS, OPS
from gpuprefetch.transforms.slots import (
    Choice,
    Columns,
    Distort,
    Floats,
    Mix,
    One,
    Order,
    Picture,
    Row,
    Slots,
    Table,
)
from gpuprefetch.transforms.timm import from_augment, from_timm, is_augment

# Filters that torchvision has for tensors.
FILTERS = ("nearest", "bilinear")
_ADJUSTMENTS = ("brightness", "contrast", "saturation", "hue")


def compiled(op: Any) -> Slots | Mix | None:
    """What draws for a transform, for each image of a batch; None where there is no such form.

    Args:
        op: of torchvision, v1 or v2, or of timm; a container as RandomApply, if all that it holds
            has such a form. Subclasses have none: they may do anything.
    """
    op = twin(from_timm(op))
    name = name_of(op)
    if is_augment(op):
        return from_augment(op)
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


# --- One op ---


def _given(values: Sequence[float], u: Floats, picture: Picture) -> Columns:
    return values


def _between(low: float, high: float, u: Floats, picture: Picture) -> Columns:
    return [low + (high - low) * u[0]]


def _blur(op: Any, u: Floats, picture: Picture) -> Columns:
    sigma = op.sigma[0] + (op.sigma[1] - op.sigma[0]) * u[0]
    return [sigma, sigma, *op.kernel_size]


def _rotation(op: Any, u: Floats, picture: Picture) -> Columns:
    return [
        *_between(op.degrees[0], op.degrees[1], u, picture),
        *(op.center or (math.nan, math.nan)),
        *_fill(op),
    ]


def _affine(op: Any, u: Floats, picture: Picture) -> Columns:
    def drawn(number: int, bounds: Sequence[float]) -> Floats:
        return np.asarray(bounds[0] + (bounds[1] - bounds[0]) * u[number])

    x, y = (
        share * side for share, side in zip(op.translate or (0, 0), picture[1::-1], strict=True)
    )
    shear = op.shear or (0, 0)
    return [
        drawn(0, op.degrees),
        np.rint(drawn(1, (-x, x))),
        np.rint(drawn(2, (-y, y))),
        drawn(3, op.scale or (1, 1)),
        drawn(4, shear[:2]),
        drawn(5, shear[2:] or (0, 0)),
        *(op.center or (math.nan, math.nan)),
        *_fill(op),
    ]


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


def _switch(name: str, *attributes: str) -> Callable[[Any], One]:
    """An op of which nothing is drawn, but whether."""

    def compiler(op: Any) -> One:
        values = [float(getattr(op, attribute)) for attribute in attributes]
        return One(name, partial(_given, values), 0, getattr(op, "p", 1.0))

    return compiler


def _jitter(op: Any) -> Order:
    ranges = {name: getattr(op, name) for name in _ADJUSTMENTS}
    return Order(
        tuple(
            One(name.upper(), partial(_between, *bounds), 1)
            for name, bounds in ranges.items()
            if bounds is not None
        )
    )


def _distort(op: Any) -> Distort:
    names = (*_ADJUSTMENTS, "contrast")
    adjust = [One(n.upper(), partial(_between, *getattr(op, n)), 1, op.p) for n in names]
    return Distort((*adjust, One("PERMUTE", _permuted, 3, op.p)))


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

# What their magnitude becomes: the op, the column of its arguments, and the argument.
_OF_MAGNITUDE: dict[str, tuple[str, int, Callable[[float, float], float]]] = {
    "Identity": ("IDENTITY", 0, lambda m, white: 0.0),
    "ShearX": ("AFFINE", 4, lambda m, white: math.degrees(math.atan(m))),
    "ShearY": ("AFFINE", 5, lambda m, white: math.degrees(math.atan(m))),
    "TranslateX": ("AFFINE", 1, lambda m, white: int(m)),
    "TranslateY": ("AFFINE", 2, lambda m, white: int(m)),
    "Rotate": ("ROTATE", 0, lambda m, white: m),
    "Brightness": ("BRIGHTNESS", 0, lambda m, white: 1 + m),
    "Color": ("SATURATION", 0, lambda m, white: 1 + m),
    "Contrast": ("CONTRAST", 0, lambda m, white: 1 + m),
    "Sharpness": ("SHARPNESS", 0, lambda m, white: 1 + m),
    "Posterize": ("POSTERIZE", 0, lambda m, white: int(m)),
    "Solarize": ("SOLARIZE", 0, lambda m, white: white * m),
    "AutoContrast": ("AUTOCONTRAST", 0, lambda m, white: 0.0),
    "Equalize": ("EQUALIZE", 0, lambda m, white: 0.0),
    "Invert": ("INVERT", 0, lambda m, white: 0.0),
}
# A step: its name, its chance, and the bins of the magnitudes that it draws from.
_Step = tuple[str, float, Sequence[int]]


def _table(
    op: Any,
    policies: Sequence[Sequence[_Step]],
    bins: int,
    layers: int,
    *,
    space: Any = None,
    most: bool = False,
) -> Table | None:
    """The table of ``op``, whose magnitudes are divided into ``bins``."""
    space = space or op._AUGMENTATION_SPACE
    if not {name for policy in policies for name, *_ in policy} <= _OF_MAGNITUDE.keys():
        return None  # of a later torchvision
    shape = (len(policies), max(map(len, policies)))
    codes, columns = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int64)
    args, chances = np.zeros((*shape, ARGS)), np.zeros(shape)
    for i, policy in enumerate(policies):
        for j, (name, chance, _) in enumerate(policy):
            form, columns[i, j], _ = _OF_MAGNITUDE[name]
            if form in ("AFFINE", "ROTATE"):
                center = (0.0, 0.0) if name.startswith("Shear") else (math.nan, math.nan)
                before = (0, 0, 0, 1, 0, 0) if form == "AFFINE" else (0,)
                given = (*before, *center, *_fill(op))
                args[i, j, : len(given)], form = given, _moving(form, op)
            codes[i, j], chances[i, j] = OPS[form].code, chance
    magnitudes = partial(_magnitudes, policies, space, bins)
    return Table(codes, args, columns, magnitudes, chances, layers, most=most)


def _magnitudes(
    policies: Sequence[Sequence[_Step]], space: Any, bins: int, picture: Picture
) -> Floats:
    longest = max(map(len, policies))
    drawn = max(len(step[2]) for policy in policies for step in policy)
    table = np.zeros((len(policies), longest, drawn, 2))
    for i, policy in enumerate(policies):
        for j, (name, _, chosen) in enumerate(policy):
            function, signed = space[name]
            values = function(bins, picture.height, picture.width)
            make = _OF_MAGNITUDE[name][2]
            for k, number in enumerate(chosen):
                value = 0.0 if values is None else float(values[number])
                table[i, j, k] = [
                    make(v, picture.white) for v in (-value if signed else value, value)
                ]
    return table


def _rand_augment(op: Any) -> Table | None:
    policies = [[(name, 1.0, [op.magnitude])] for name in op._AUGMENTATION_SPACE]
    return _table(op, policies, op.num_magnitude_bins, op.num_ops)


def _trivial_augment(op: Any) -> Table | None:
    every = range(op.num_magnitude_bins)
    policies = [[(name, 1.0, every)] for name in op._AUGMENTATION_SPACE]
    return _table(op, policies, op.num_magnitude_bins, 1)


def _auto_augment(op: Any) -> Table | None:
    policies = [[(name, p, [number or 0]) for name, p, number in each] for each in op._policies]
    return _table(op, policies, 10, 1)


def _aug_mix(op: Any) -> Mix | None:
    space = op._AUGMENTATION_SPACE if op.all_ops else op._PARTIAL_AUGMENTATION_SPACE
    policies = [[(name, 1.0, range(op.severity))] for name in space]
    fixed = op.chain_depth > 0
    layers = op.chain_depth if fixed else 3
    chain = _table(op, policies, 10, layers, space=space, most=not fixed)
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
        None if op.expand else One(_moving("ROTATE", op), partial(_rotation, op), 1)
    ),
    "RandomSolarize": _switch("SOLARIZE", "threshold"),
    "RandomVerticalFlip": _switch("VFLIP"),
    "TrivialAugmentWide": _trivial_augment,
}
