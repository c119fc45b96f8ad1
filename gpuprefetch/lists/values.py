"""Values that an op of a list is not for, as 0 to 255 for a Normalize in [0, 1] units.

What is certain is an error. What is only likely is a warning, on the first batch that reaches the
op: to look at values makes the host wait for the device.
"""

import warnings
from collections.abc import Sequence

import numpy as np
import torch

from gpuprefetch.lists.forms import Form, Values, image_dtype, undoes
from gpuprefetch.policies.known import Constants, constants, flatten, is_on_device, name_of
from gpuprefetch.policies.per_image import Loop, PerImage, refuse_integers
from gpuprefetch.policies.registry import Is, LibraryOp, has
from gpuprefetch.transforms.head import Head, Transform

# Filters and noise leave [0, 1] by less than this on each side; what is normalized, or in 0 to 255,
# by more.
LOW = -0.5
HIGH = 2.0
# No mean of images in [0, 1] is above 1, and no std above 0.5. A Normalize that undoes another one
# has a large std, 1 / std of the other, but a negative mean.
CERTAIN_MEAN = 2.0
CERTAIN_STD = 10.0
# No value is above that in [0, 1], nor normalized.
HIGHEST = 10.0


def _is_known(op: object) -> bool:
    return name_of(op) is not None or is_on_device(op)


def _ops_of(transform: LibraryOp) -> Sequence[LibraryOp]:
    if isinstance(transform, PerImage):
        return transform.recipe.ops
    return [transform.op if isinstance(transform, Loop) else transform]


class ValueCheck:
    """Looks at the values that reach the ops of a list, at each op once."""

    def __init__(self, head: Head, tail: Sequence[Transform]) -> None:
        self._fused = (head.mean, head.std) if head.mean and head.std else None
        self._seen = set[int]()
        # Whether the source was uint8, so that the list began with values in [0, 1].
        self._scaled: bool | None = None
        self._tail = [op for transform in tail for op in _ops_of(transform)]
        values = Values.UNKNOWN if self._fused is None else Values.NORMALIZED
        form = Form(torch.float32, values)
        for op in self._tail:
            found = constants(op)
            if found is not None and form.values is Values.NORMALIZED and not undoes(*found):
                raise ValueError(
                    "transforms normalize twice, and the second Normalize gets values that are not "
                    f"in [0, 1] any more. Leave one of them out, such as that with mean {found[0]}."
                )
            form = form.after(op)

    def begin(self, images: torch.Tensor | None = None) -> None:
        """Look at the images that the list begins with; None for decoded ones."""
        if self._scaled is not None:
            return
        self._scaled = images is None or not images.is_floating_point()
        if self._fused is not None:
            values = (0.0, 1.0) if images is None or self._scaled else _range(images)
            self._normalized(self._fused, *values)

    def reach(self, transform: LibraryOp, images: object) -> None:
        """Look at images that a transform after the fused ones gets; the first one of a list."""
        if isinstance(images, list) and images:
            images = images[0][None]
        if id(transform) in self._seen or not isinstance(images, torch.Tensor):
            return
        self._seen.add(id(transform))
        self._painted(transform, images)
        recipe = transform.recipe if isinstance(transform, PerImage) else None
        if recipe is None or not recipe.scaled or images.is_floating_point():
            for op in _ops_of(transform):
                self._look(op, images)
        elif recipe.normalize is not None:
            self._normalized(recipe.normalize, 0.0, 1.0)

    def _look(self, op: LibraryOp, images: torch.Tensor) -> None:
        normalize = constants(op)
        name = type(op).__name__
        if name == "ToDtype" and _is_known(op):
            self._cast(op, images)
        elif normalize is not None:
            refuse_integers(images)
            self._normalized(normalize, *_range(images))
        elif has(op, Is.UNIT) and images.is_floating_point():
            low, high = _range(images)
            if not LOW <= low <= high <= HIGH:
                _warn(f"{name} is for values in [0, 1], and gets {low:.4g} to {high:.4g}", name)

    def _painted(self, transform: LibraryOp, images: torch.Tensor) -> None:
        form = Form(images.dtype)
        for op in _ops_of(transform):
            form = form.after(op)
            if not form.is_float or (most := _most(op)) <= HIGHEST:
                continue
            if not images.is_floating_point() or _range(images)[1] <= HIGHEST:
                name = type(op).__name__
                text = f"{name} is given {most:g}, a value of 0 to 255, and images are floating"
                _warn(f"{text} point here, [0, 1] before Normalize. Divide it by 255", name)

    def _normalized(self, normalize: Constants, low: float, high: float) -> None:
        mean, std = normalize
        if LOW <= low <= high <= HIGH:
            certain = max(mean) > CERTAIN_MEAN or (min(mean) >= 0 and max(std) > CERTAIN_STD)
            text = (
                f"Normalize with mean {mean} and std {std} is for values of 0 to 255, and images "
                "are in [0, 1] here. Divide both by 255"
            )
            if certain and self._scaled:
                raise ValueError(f"{text}.")
            if certain or max(mean) > 1:
                _warn(text, "Normalize")
        elif 0 <= min(mean) and 0 < max(mean) <= 1 and max(std) <= 1:
            text = f"Normalize with mean {mean} is for values in [0, 1], and gets "
            _warn(f"{text}{low:.4g} to {high:.4g}", "Normalize")

    def _cast(self, op: LibraryOp, images: torch.Tensor) -> None:
        dtype = image_dtype(op, torch.Tensor)
        if op.scale or dtype is None or dtype.is_floating_point == images.is_floating_point():
            return
        if dtype.is_floating_point and any(map(constants, self._tail)):
            return  # which is looked at
        if dtype.is_floating_point or _range(images)[1] <= HIGH:
            _warn(f"ToDtype leaves values as they are. For {dtype} it takes scale=True", "ToDtype")


def _most(op: LibraryOp) -> float:
    """The largest value that one of torchvision's ops paints with, or one of those in it."""
    if name_of(op) is None:
        return 0.0
    given = [getattr(op, name, None) for name in ("fill", "value")]
    numbers = [x for v in given if isinstance(v, (int, float, list, tuple)) for x in np.ravel(v)]
    return max([0.0, *numbers, *map(_most, flatten(getattr(op, "transforms", [])))])


def _range(images: torch.Tensor) -> tuple[float, float]:
    if not images.numel():
        return 0.0, 1.0
    low, high = images.detach().aminmax()
    return float(low), float(high)


def _warn(text: str, name: str) -> None:
    warnings.warn(
        f"{text}. If you mean that, call the {name} from a function in the list.", stacklevel=2
    )
