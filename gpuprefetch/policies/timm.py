"""timm's transforms, as torchvision's or as slots with timm's own magnitudes."""

import math
import re
from functools import partial
from typing import Any

import numpy as np

from gpuprefetch.policies.ops import Op
from gpuprefetch.policies.slots import Floats, Mix, Noise, Picture, Slots, Step, table
from gpuprefetch.policies.spatial import Matrix

# A transform of torchvision or timm, or one of timm's ops, read by its attributes.
Transform = Any
# Levels that are sampled from a range are multiples of a thousandth of it.
_BINS = 1001
# The ops of torchvision's and timm's policies that move no pixels.
COLORS = {
    "AutoContrast": Op.AUTOCONTRAST,
    "Brightness": Op.BRIGHTNESS,
    "Color": Op.SATURATION,
    "Contrast": Op.CONTRAST,
    "Desaturate": Op.SATURATION,
    "Equalize": Op.EQUALIZE,
    "Identity": Op.IDENTITY,
    "Invert": Op.INVERT,
    "Posterize": Op.POSTERIZE,
    "Sharpness": Op.SHARPNESS,
    "Solarize": Op.SOLARIZE,
    "SolarizeAdd": Op.SOLARIZE_ADD,
}
# By PIL's numbers.
_FILTERS = {2: Op.MATRIX_BILINEAR, 3: Op.MATRIX_BICUBIC}
# Which of a matrix's numbers the magnitude is; all of them for a rotation.
_COLUMNS: dict[str, int | slice] = {
    "Rotate": slice(Matrix.FILL),
    "ShearX": Matrix.B,
    "ShearY": Matrix.D,
    "TranslateXRel": Matrix.C,
    "TranslateYRel": Matrix.F,
}


def is_timm(thing: object, name: str) -> bool:
    """Whether ``thing`` is of timm's class ``name``; timm need not be there."""
    kind = type(thing)
    return kind.__module__.startswith("timm.data.") and kind.__name__ == name


# They take a batch as it is: they sample nothing, or for each of its images.
_ON_BATCHES = frozenset(
    "MaybePILToTensor MaybeToTensor RandomErasing"
    " CenterCropOrPad CenterCropToSequence ResizeKeepRatioToSequence ResizeToSequence"
    " TrimBorder".split()
)
PASSES_TENSORS = _ON_BATCHES | frozenset(
    "RandomCropOrPad RandomCropToSequence RandomPad RandomResizedCropAndInterpolation"
    " RandomResizedCropToSequence ResizeKeepRatio".split()
)


def timm_class(op: Transform) -> type | None:
    """The class of timm's data that ``op`` is of, or derived from; None for anything else."""
    kinds = (kind for kind in type(op).__mro__ if kind.__module__.startswith("timm.data."))
    return next(kinds, None)


def samples_once(op: Transform) -> bool:
    """Whether one of timm's ops samples once a call, so that a batch would share the result."""
    kind = timm_class(op)
    return kind is not None and (kind is not type(op) or kind.__name__ not in _ON_BATCHES)


def samples_sizes(op: Transform) -> bool:
    kind = timm_class(op)
    return kind is not None and kind.__name__ == "ResizeKeepRatio"


def from_timm(op: Transform) -> Transform:
    """What one of timm's transforms stands for; the op itself where there is nothing."""
    name = type(op).__name__
    if not is_timm(op, name):
        return op
    from torchvision import transforms as v1
    from torchvision.transforms import v2

    if name == "MaybeToTensor":
        return v1.ToTensor()
    if name in ("MaybePILToTensor", "ToNumpy"):
        return v2.PILToTensor()
    if name == "RandomResizedCropAndInterpolation" and not isinstance(op.interpolation, tuple):
        return v2.RandomResizedCrop(op.size, op.scale, op.ratio, op.interpolation)
    if name == "RandomErasing" and op.max_count == 1 and not op.rand_color:
        low, high = (math.exp(value) for value in op.log_aspect_ratio)
        value = "random" if op.per_pixel else 0.0
        return v2.RandomErasing(op.probability, (op.min_area, op.max_area), (low, high), value)
    return op


def why_not(op: Transform) -> str:
    if type(op).__module__.startswith("albumentations."):
        return "it is albumentations', which takes NumPy arrays"
    if isinstance(getattr(op, "interpolation", None), tuple):
        return 'one launch has one filter, interpolation="random" needs two'
    if is_timm(op, "RandomErasing"):
        return (
            "timm's moves with one box alone, black or noise (re_count=1, re_mode const or pixel)"
        )
    if unknown := ", ".join(sorted(_unknown(op))):
        return f"it draws {unknown}, of which there is no form for a batch"
    if is_timm(op, "AugMixAugment") and op.alpha != 1:
        return f"it has a form for a batch with alpha=1, and its alpha is {op.alpha}"
    if hasattr(op, "transforms"):
        return (
            "it is a class of your own, which may do more than call its `transforms`. If it does "
            "not, give these in place of it"
        )
    return "it is not one of torchvision's own, nor among those of timm's that are known"


def is_augment(op: Transform) -> bool:
    """Whether an op is timm's RandAugment, AutoAugment or AugMix, of ops that are known."""
    return bool(_policies(op)) and not _unknown(op)


def from_augment(op: Transform) -> Slots | Mix:
    policies = _policies(op)
    mixes = is_timm(op, "AugMixAugment")
    first = policies[0][0]
    deviation = first.magnitude_std
    slots = table(
        [[*map(_step, policy)] for policy in policies],
        op.depth or -1 if mixes else getattr(op, "num_layers", 1),
        weights=getattr(op, "choice_weights", None),
        noise=Noise(deviation, first.magnitude_max or 10.0) if deviation > 0 else None,
    )
    return Mix(slots, op.width) if mixes else slots


def _policies(op: Transform) -> list[list[Transform]]:
    if is_timm(op, "AutoAugment"):
        return list(op.policy)
    known = is_timm(op, "RandAugment") or (is_timm(op, "AugMixAugment") and op.alpha == 1)
    return [[each] for each in op.ops] if known else []


def _unknown(op: Transform) -> set[str]:
    every = [each for policy in _policies(op) for each in policy]
    modes = {mode for each in every for mode in np.ravel(each.kwargs["resample"]).tolist()}
    filters = {f"PIL's filter {mode} (2 and 3 are known)" for mode in modes - _FILTERS.keys()}
    return {*map(_kind, every)} - COLORS.keys() - _COLUMNS.keys() | filters


def _kind(op: Transform) -> str:
    return re.sub("(Increasing|Original)$", "", op.name)


def _step(op: Transform) -> Step:
    kind = _kind(op)
    magnitudes = partial(_magnitudes, op)
    if kind in COLORS:  # 128 is the value from which SOLARIZE_ADD leaves pixels as they are
        return Step(COLORS[kind], magnitudes, 0, (0, 128), op.prob, op.magnitude)
    # Where two filters are offered, each is for half of the images.
    filtered = [_FILTERS[mode] for mode in np.ravel(op.kwargs["resample"]).tolist()]
    given = 1, 0, 0, 0, 1, 0, *op.kwargs["fillcolor"]
    column = _COLUMNS[kind]
    return Step(filtered[0], magnitudes, column, given, op.prob, op.magnitude, filtered[-1])


def _rotation(angle: Floats, picture: Picture) -> Floats:
    """``(..., 6)``: from output to source coordinates, in pixels from the corner."""
    cos = np.cos(np.radians(angle))
    sin = np.sin(np.radians(angle))
    x = picture.width / 2
    y = picture.height / 2
    return np.stack([cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y], axis=-1)


def _magnitudes(op: Transform, picture: Picture) -> Floats:
    """What the op makes of its levels, with both signs: ``(B, 2)``, for a rotation (B, 2, 6)."""
    if picture.white != 255:
        raise TypeError(
            "timm's policies take uint8 images, and these are in floating point. Put them before "
            "a conversion to float, or right after the crop in transforms."
        )
    upper = op.magnitude_max or 10.0
    fixed = np.array([max(0.0, min(op.magnitude, upper))])
    levels = np.linspace(0, upper, _BINS) if op.magnitude_std > 0 else fixed
    # As the op's own functions, which negate by chance, without the chance.
    kind = _kind(op)
    signed: Floats = levels[:, None] / 10 * (-1, 1)
    if kind == "Rotate":
        return _rotation(signed * 30.0, picture)
    if kind.startswith("Shear"):
        return signed * 0.3
    if kind in _COLUMNS:
        size = picture.width if "X" in kind else picture.height
        return signed * float(op.hparams.get("translate_pct", 0.45)) * size
    if op.name.endswith("Increasing") and kind in ("Brightness", "Color", "Contrast", "Sharpness"):
        return np.maximum(0.1, 1 + 0.9 * signed)
    if op.level_fn is None:
        return np.zeros_like(signed)
    values = [op.level_fn(level, op.hparams)[0] for level in levels.tolist()]
    column: Floats = np.array(values, dtype=np.float64)[:, None] * (1, 1)
    return np.clip(1 - column, 0, 1) if kind == "Desaturate" else column
