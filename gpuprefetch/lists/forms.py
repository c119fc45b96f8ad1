"""What images are at one place of a list: PIL images or tensors, their dtype, values and size.

For ``[v2.Resize(256), v2.CenterCrop(224), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]``:

    decoded       uint8    0 to 255  PIL or tensor  sizes differ
    Resize        uint8    0 to 255  PIL or tensor  sizes differ
    CenterCrop    uint8    0 to 255  PIL or tensor  one size
    ToImage       uint8    0 to 255  Image          one size
    ToDtype       float32  [0, 1]    Image          one size

A dataset shows what its transform begins with: :data:`PICTURES`, or tensors, ``tensors(kind)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Self

import torch

from gpuprefetch.policies.each import Each
from gpuprefetch.policies.known import constants, is_on_device, name_of, parts_of
from gpuprefetch.policies.per_image import Cast, ToFloat, ToUint8
from gpuprefetch.policies.registry import Is, LibraryOp, has, row_of
from gpuprefetch.policies.timm import from_timm

_OF_PICTURES = ("ToTensor", "PILToTensor")  # they leave tensors alone
_MAKE_TENSORS = (*_OF_PICTURES, "ToImage")


class Values(Enum):
    """The range of the values of images."""

    LEVELS = auto()  # 0 to 255
    UNIT = auto()  # [0, 1]
    NORMALIZED = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class Form:
    """What images are at one place of a list."""

    dtype: torch.dtype = torch.uint8
    values: Values = Values.LEVELS
    is_sized: bool = False  # whether all have one size
    is_tensor: bool = False  # else a PIL image, or perhaps one
    kind: type[torch.Tensor] | None = (
        None  # torch.Tensor or torchvision's Image; None where it is not known
    )
    is_picture: bool = False  # surely PIL images, as long as they are no tensors

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point

    def after(self, op: LibraryOp) -> Self:
        """The form of what an op of torchvision, timm, kornia or this library gives."""
        op = from_timm(op)
        if isinstance(op, ToUint8):
            return self._scaled_to(torch.uint8)
        if isinstance(op, ToFloat):
            return self if self.is_float else self._scaled_to(torch.float32)
        if isinstance(op, Cast):
            return replace(self, dtype=op.dtype or self.dtype)
        if (found := constants(op)) is not None:
            return replace(self, values=Values.UNIT if undoes(*found) else Values.NORMALIZED)
        if isinstance(op, Each) or (name_of(op) is None and not is_on_device(op)):
            return replace(self, values=Values.UNKNOWN)
        if type(op).__name__ == "Denormalize":
            return replace(self, values=Values.UNIT)
        if is_on_device(op) and has(op, Is.CROPS | Is.FLIPS) and not self.is_float:
            return self._scaled_to(torch.float32)._sized_by(op)
        return self._converted(op) if has(op, Is.CONVERTS) else self._sized_by(op)

    def lets_pass(self, op: LibraryOp) -> bool:
        """Whether a conversion leaves what it gets.

        A conversion of dtypes leaves PIL images, and one of PIL images leaves tensors.
        """
        name = type(op).__name__
        if self.is_tensor:
            return name in _OF_PICTURES
        return self.is_picture and name not in _MAKE_TENSORS

    def dtype_after(self, op: LibraryOp) -> torch.dtype:
        """What a conversion makes of these images."""
        if type(op).__name__ == "ToTensor":
            # torchvision reads the default dtype at each call, and it is read here once.
            return torch.get_default_dtype()
        return image_dtype(op, self.kind_after(op)) or self.dtype

    def kind_after(self, op: LibraryOp) -> type[torch.Tensor] | None:
        from torchvision import tv_tensors

        name = type(op).__name__
        if name == "ToImage":
            image: type[torch.Tensor] = tv_tensors.Image
            return image
        return torch.Tensor if name in (*_MAKE_TENSORS, "ToPureTensor") else self.kind

    def _scaled_to(self, dtype: torch.dtype) -> Self:
        """Levels become [0, 1] in floating point, and the other way round; other values stay."""
        scales = self.values in (Values.LEVELS, Values.UNIT)
        values = Values.UNIT if dtype.is_floating_point else Values.LEVELS
        return replace(self, dtype=dtype, values=values if scales else self.values)

    def _sized_by(self, op: LibraryOp) -> Self:
        return replace(self, is_sized=self.is_sized or fixes_size(op))

    def _converted(self, op: LibraryOp) -> Self:
        if self.lets_pass(op):
            return self
        tensors = replace(self, kind=self.kind_after(op), is_tensor=True)
        dtype = self.dtype_after(op)
        if dtype == self.dtype or not getattr(op, "scale", True):
            return replace(tensors, dtype=dtype)
        return tensors._scaled_to(dtype)


# What a list begins with where a dataset gives PIL images to it.
PICTURES = Form(is_picture=True)


def tensors(kind: type[torch.Tensor]) -> Form:
    """What a list begins with where it gets uint8 tensors ``(3, H, W)``.

    ``kind`` is torch.Tensor or torchvision's Image.
    """
    return Form(is_tensor=True, kind=kind)


def undoes(mean: Sequence[float], std: Sequence[float]) -> bool:
    """Whether a Normalize undoes another one: its mean is negative then, or 0."""
    return min(mean) < 0 or max(mean) == 0


def fixes_size(op: LibraryOp) -> bool:
    """Whether images have one size after this op, whatever they had before."""
    op = from_timm(op)
    size = getattr(op, "size", None)
    row = row_of(op)
    theirs = row is not None and row.library == "torchvision" and Is.CROPS in row.traits
    return theirs and isinstance(size, Sequence) and len(size) == 2


def varies_size(op: LibraryOp) -> bool:
    """Whether images of one size may have several after this op, or those of several still have."""
    op = from_timm(getattr(op, "op", op))  # which a Loop calls for each image
    crops = has(op, Is.CROPS) and not fixes_size(op)
    alone = has(op, Is.ALONE) and has(op, Is.MOVES)
    return (
        crops or alone or bool(getattr(op, "expand", False)) or any(map(varies_size, parts_of(op)))
    )


def image_dtype(op: LibraryOp, kind: type | None) -> torch.dtype | None:
    """What a conversion makes of images of ``kind``, None where it leaves their dtype."""
    from torchvision import tv_tensors

    dtype = getattr(op, "dtype", None)
    if isinstance(dtype, dict):
        keys = (kind,) if kind else (tv_tensors.Image, torch.Tensor)
        dtype = next((dtype[key] for key in (*keys, "others") if key in dtype), None)
    return dtype
