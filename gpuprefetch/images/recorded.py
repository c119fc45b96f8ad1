"""What a dataset's own transform did with a picture, noted as the functions that it called.

The first of these functions are ops of the fused launch, as far as one resampling takes them; the
rest is called on the device, image by image. Which pictures note them is in :mod:`.sized`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from gpuprefetch.core.errors import add_note
from gpuprefetch.transforms.head import Head, Interpolation, Resize, pair
from gpuprefetch.transforms.sampling import (
    CenterCropOp,
    Fill,
    FlipOp,
    HeadOp,
    PartOp,
    Sampling,
    Size,
)


class RecordingError(RuntimeError):
    """A transform needs the pixels of its picture; the message says what for.

    Python takes a TypeError of an operator for an operator that is missing.
    """


class Call(NamedTuple):
    """A function of torchvision's v2 that gets an image and other arguments."""

    name: str
    arguments: dict[str, Any]

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """What it makes of an image ``(3, H, W)``."""
        from torchvision.transforms.v2 import functional as F

        arguments = {
            name: value.to(image.device) if isinstance(value, torch.Tensor) else value
            for name, value in self.arguments.items()
        }
        try:
            made: torch.Tensor = getattr(F, self.name)(image, **arguments)
        except Exception as error:
            form = f"{image.dtype} {tuple(image.shape)}"
            add_note(error, f"raised by F.{self.name} in the transform of the dataset, on {form}")
            raise
        return made


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """A transform that a dataset called with a picture and other values; its call is put off."""

    transform: Callable[..., object]
    beside: tuple[object, ...]  # the picture, in the order of the arguments
    takes_tensor: bool = False  # whether it got an image as a tensor, and no PIL image
    takes_pure: bool = False  # whether that tensor was none of torchvision's kinds
    state: tuple[object, ...] = ()  # of what is beside the picture, when it was called


_KEY = np.zeros(1, np.uint64)  # of ops that sample nothing
# Functions that leave an image its size. Others that a transform calls are refused.
SAME_SIZE = frozenset(
    "adjust_brightness adjust_contrast adjust_gamma adjust_hue adjust_saturation adjust_sharpness"
    " affine autocontrast elastic equalize erase gaussian_blur gaussian_noise grayscale_to_rgb"
    " invert jpeg normalize permute_channels perspective posterize rgb_to_grayscale rotate solarize"
    " to_dtype".split()
)
GEOMETRY = frozenset(
    "center_crop crop horizontal_flip pad resize resized_crop vertical_flip".split()
)
CONVERSIONS = frozenset(("to_dtype", "normalize"))


@dataclass(frozen=True, slots=True)
class Recording:
    """What a transform did with a stand-in.

    Attributes:
        size: (height, width) now.
        calls: all that was done, in order.
        head: the first of these calls, as far as one launch takes them.
        rest: those after them.
        dtype: of the image now.
        is_tensor: whether the stand-in stands for a tensor, and no longer for a PIL image.
        is_pure: whether that tensor is none of torchvision's kinds.
        converts: whether the launch may take conversions and Normalize, too.
    """

    size: Size
    calls: tuple[Call, ...] = ()
    head: Head = field(default_factory=Head)
    rest: tuple[Call, ...] = ()
    dtype: torch.dtype = torch.uint8
    is_tensor: bool = False
    is_pure: bool = False
    converts: bool = True

    def then(self, name: str, arguments: dict[str, Any]) -> Recording:
        """With one more function that was called on the picture."""
        call = Call(name, self._as_on_tensors(name, arguments))
        if name in GEOMETRY:
            return self._moved(call)
        if name not in SAME_SIZE:
            raise needs_pixels(f"F.{name}")
        if arguments.get("expand"):
            raise RecordingError(f"F.{name}(expand=True) gives it a size that is not followed")
        if name == "rgb_to_grayscale" and arguments.get("num_output_channels", 1) != 3:
            raise RecordingError(
                "F.rgb_to_grayscale makes one channel of three, unless num_output_channels=3"
            )
        return self._converted(call) if name in CONVERSIONS else self._later(call)

    def _as_on_tensors(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments that do to a tensor what these do to the picture as it is now."""
        from torchvision.transforms import InterpolationMode

        if name not in ("resize", "resized_crop") or self.is_tensor:
            return arguments
        arguments = arguments | {"antialias": True}
        if arguments.get("interpolation") in (InterpolationMode.NEAREST, 0):
            arguments["interpolation"] = InterpolationMode.NEAREST_EXACT
        return arguments

    def _moved(self, call: Call) -> Recording:
        if (how := _filter_named(call.arguments)) in ("box", "hamming"):
            raise needs_pixels(f"F.{call.name} with the filter {how!r}, which is for PIL images,")
        fuses = _fuses(call)
        head: Head | None = self.head if fuses and not self.rest else None
        sampling = Sampling.identity([self.size])
        for op in _ops_of(call, self.size, is_float=self.dtype.is_floating_point):
            sampling = op(sampling, _KEY)
            head = None if head is None else head.then(op, call.name)
        height, width = sampling.length[0].astype(int).tolist()
        if height < 1 or width < 1:
            raise RecordingError(f"F.{call.name} gives an image of {height} x {width} pixels")
        moved = replace(self, size=(height, width))
        return moved._later(call) if head is None else moved._joined(call, head)

    def _converted(self, call: Call) -> Recording:
        """After a conversion of dtypes or a Normalize."""
        if call.name == "normalize":
            ready = self.converts and self.dtype == torch.float32 and not self.rest
            constants = [np.ravel(call.arguments[name]).tolist() for name in ("mean", "std")]
            constants = [values * 3 if len(values) == 1 else values for values in constants]
            head = self.head.normalized(*constants) if ready else None
            return self._later(call) if head is None else self._joined(call, head)
        dtype = call.arguments.get("dtype", torch.float)
        if not isinstance(dtype, torch.dtype):
            raise RecordingError(f"F.to_dtype gets the dtype {dtype!r}")
        if dtype == self.dtype:
            return self
        levels = self.dtype == torch.uint8 and bool(call.arguments.get("scale"))
        ready = self.converts and levels and dtype == torch.float32 and not self.rest
        converted = replace(self, dtype=dtype)
        return converted._joined(call, self.head) if ready else converted._later(call)

    def _joined(self, call: Call, head: Head) -> Recording:
        return replace(self, calls=(*self.calls, call), head=head)

    def _later(self, call: Call) -> Recording:
        return replace(self, calls=(*self.calls, call), rest=(*self.rest, call))

    def within(self, launch: Head) -> bool:
        """Whether a launch with the constants of another head takes the first calls."""
        head = self.head
        padded = any(getattr(op, "pad", False) for op in head.ops)
        resized = any(hasattr(op, "interpolation") for op in head.ops)
        colors = (head.fill, head.mask_fill) == (launch.fill, launch.mask_fill)
        filters = _filter_of(head) == _filter_of(launch)
        constants = _are_close(head.mean, launch.mean) and _are_close(head.std, launch.std)
        return bool((colors or not padded) and (filters or not resized) and constants)


def _are_close(some: list[float] | None, others: list[float] | None) -> bool:
    if some is None or others is None:
        return some is others
    return len(some) == len(others) and bool(np.allclose(some, others, rtol=1e-6))


def _filter_of(head: Head) -> tuple[str, bool]:
    return head.interpolation, head.antialias


def _fuses(call: Call) -> bool:
    """Whether the launch does what a call does."""
    given = call.arguments
    resizes = call.name in ("resize", "resized_crop")
    how = given.get("interpolation", "bilinear")
    sharp = "nearest" in _filter_named(given)
    if resizes and not (sharp or given.get("antialias", True)):
        return False
    if resizes and not _is_filter(how):
        return False
    return bool(given.get("padding_mode", "constant") == "constant")


_OF_PIL = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")


def _filter_named(given: dict[str, Any]) -> str:
    """The name of the filter that a call asks for, which may be PIL's number of it."""
    how = given.get("interpolation", "bilinear")
    return _OF_PIL[how] if isinstance(how, int) else str(getattr(how, "value", how))


def _is_filter(how: Interpolation) -> bool:
    try:
        Resize(1, how)
    except ValueError:
        return False
    return True


def _ops_of(call: Call, size: Size, *, is_float: bool) -> list[HeadOp]:
    """The fused ops for a call on an image of a (height, width)."""
    given = call.arguments
    name = call.name
    if name in ("horizontal_flip", "vertical_flip"):
        axis = int(name == "horizontal_flip")
        return [FlipOp(axis, p=1.0, p_batch=1.0, same_on_batch=False)]
    if name == "center_crop":
        wanted = _size(given["output_size"])
        assert wanted is not None
        return [CenterCropOp(pair(wanted, name), pad=True)]
    if name == "crop":
        return [_part(given, size)]
    if name == "pad":
        return [_padding(given, size, is_float=is_float)]
    how = given.get("interpolation", "bilinear")
    resize = Resize(
        _size(given["size"]), how if _is_filter(how) else "bilinear", given.get("max_size")
    ).op
    return [resize] if name == "resize" else [_part(given, size), resize]


def _size(size: int | Sequence[int] | None) -> int | Sequence[int] | None:
    """A size as :class:`Resize` has it: a list of one number is that of the shorter side."""
    return size[0] if isinstance(size, Sequence) and len(size) == 1 else size


def _part(given: dict[str, Any], size: Size) -> PartOp:
    top, left, height, width = (int(given[name]) for name in ("top", "left", "height", "width"))
    # What lies outside of the image is black, as in torchvision.
    beyond = min(top, left) < 0 or top + height > size[0] or left + width > size[1]
    return PartOp(top, left, height, width, pad=beyond)


def _padding(given: dict[str, Any], size: Size, *, is_float: bool) -> PartOp:
    """Padding as the part that reaches beyond the image."""
    padding = given["padding"]
    sides = [padding] if isinstance(padding, int) else [*padding]
    left, top, right, bottom = map(int, {1: sides * 4, 2: sides * 2}.get(len(sides), sides))
    levels = [float(level) for level in np.ravel(given.get("fill") or 0)]
    levels = levels * 3 if len(levels) == 1 else levels
    color = tuple(level * (255 if is_float else 1) for level in levels)
    fill = Fill(color, 0.0) if any(color) else None
    height, width = size
    return PartOp(-top, -left, top + height + bottom, left + width + right, fill, pad=True)


def needs_pixels(what: str) -> RecordingError:
    return RecordingError(f"{what} needs the pixels of the picture")
