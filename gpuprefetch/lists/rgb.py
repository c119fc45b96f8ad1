"""Which ops do nothing to a picture that is RGB: they make RGB of it, or a picture.

Pictures come from the decoder as RGB, so a list needs none of these. A function is known by its
compiled code, which is one of the ways below to write it. It is never called to find out: what it
does to one picture says nothing of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import torch

from gpuprefetch.lists.code import is_written_as
from gpuprefetch.policies.known import name_of
from gpuprefetch.policies.registry import Is, LibraryOp, has
from gpuprefetch.policies.timm import is_timm

if TYPE_CHECKING:
    from PIL.Image import Image


def makes_rgb(op: LibraryOp) -> bool:
    """Whether an op gives an RGB picture as it is, and whatever else as RGB.

    These are ``v2.RGB``, timm's ``MaybeConvertMode``, classes that are called as open_clip's, and
    functions such as ``lambda image: image.convert("RGB")``, alone or in a ``Lambda``.
    """
    if is_timm(op, "MaybeConvertMode"):
        return bool(op.mode == "RGB")
    if name_of(op) == "Lambda":
        return is_written_as(op.lambd, _WAYS)
    if name_of(op) == "RGB" or is_written_as(op, _WAYS):
        return True
    kind = type(op)
    reads = getattr(kind, "__getattribute__", None)
    if hasattr(kind, "mode") or reads is not object.__getattribute__ or not callable(op):
        return False
    called = is_written_as(kind.__call__, [_converted_unless_array])
    return called and getattr(op, "mode", None) == "RGB"


def makes_picture(op: LibraryOp) -> bool:
    """Whether an op makes an RGB picture of the pixels of one."""
    return name_of(op) == "ToPILImage" and op.mode in (None, "RGB")


class Modes(Enum):
    """The PIL modes of pictures that a pipeline gives three channels, as those of RGB."""

    RGB = "RGB alone"
    GRAY = "RGB and L"
    ANY = "all"

    def take(self, mode: str) -> bool:
        return self is Modes.ANY or mode == "RGB" or (self is Modes.GRAY and mode == "L")


def modes_for(pipeline: Sequence[LibraryOp]) -> Modes:
    """The modes that a pipeline takes where its images are decoded to RGB before the first op.

    Example:
        ============================================  ====
        ``[v2.RGB(), v2.Resize(28)]``                 ANY
        ``[v2.Resize(28), v2.RGB()]``                 GRAY
        ``[v2.Resize(28), v2.Grayscale(3)]``          GRAY
        ``[v2.Resize(28), v2.ToTensor()]``            RGB
        ============================================  ====

        A gray picture is resized alike as RGB. One with a palette is not: its numbers are no
        colors.
    """
    for position, op in enumerate(pipeline):
        if makes_rgb(op):
            return Modes.GRAY if position else Modes.ANY
        if name_of(op) == "Grayscale" and op.num_output_channels == 3:
            return Modes.GRAY
        if name_of(op) is None or not has(op, Is.CROPS | Is.FLIPS):
            break
    return Modes.RGB


def _converted(image: Image) -> Image:
    return image.convert("RGB")


def _converted_by_name(image: Image) -> Image:
    return image.convert(mode="RGB")


def _assigned(image: Image) -> Image:
    image = image.convert("RGB")
    return image  # noqa: RET504  # as many write it


def _unless_it_is(image: Image) -> Image:
    return image.convert("RGB") if image.mode != "RGB" else image


def _if_it_is(image: Image) -> Image:
    return image if image.mode == "RGB" else image.convert("RGB")


def _assigned_unless_it_is(image: Image) -> Image:
    if image.mode != "RGB":
        image = image.convert("RGB")
    return image


def _returned_unless_it_is(image: Image) -> Image:
    if image.mode != "RGB":
        return image.convert("RGB")
    return image


def _converted_unless_array(self: LibraryOp, image: LibraryOp) -> LibraryOp:
    if isinstance(image, (np.ndarray, torch.Tensor)):
        return image
    return image.convert(self.mode)


_WAYS = (
    _converted,
    _converted_by_name,
    _assigned,
    _unless_it_is,
    _if_it_is,
    _assigned_unless_it_is,
    _returned_unless_it_is,
)
