"""Which ops make RGB of a picture, and do nothing to one that is RGB already.

Pictures come from the decoder as RGB, so a list needs none of these. A function is known by its
compiled code, which is one of the ways below to write it. It is never called to find out: what it
does to one picture says nothing of the next.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Sequence
from enum import Enum
from types import CodeType, FunctionType
from typing import TYPE_CHECKING

from gpuprefetch.policies.known import name_of
from gpuprefetch.policies.registry import Is, LibraryOp, has
from gpuprefetch.policies.timm import is_timm

if TYPE_CHECKING:
    from PIL.Image import Image

# What an instruction does to what: a local variable counts by its number, not by its name.
Code = tuple[tuple[str, object], ...]


def makes_rgb(op: LibraryOp) -> bool:
    """Whether an op gives an RGB picture as it is, and whatever else as RGB.

    These are ``v2.RGB``, timm's ``MaybeConvertMode``, and functions such as
    ``lambda image: image.convert("RGB")``, alone or in a ``Lambda``.
    """
    if is_timm(op, "MaybeConvertMode"):
        return bool(op.mode == "RGB")
    if name_of(op) == "Lambda":
        return _is_written_so(op.lambd)
    return name_of(op) == "RGB" or _is_written_so(op)


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


def _is_written_so(function: LibraryOp) -> bool:
    return isinstance(function, FunctionType) and _written(function.__code__) in _WAYS


def _written(code: CodeType) -> Code | None:
    """What a function of one picture does; None for one that has other arguments or a closure."""
    others = code.co_kwonlyargcount or code.co_freevars
    kinds = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR
    if code.co_argcount != 1 or others or code.co_flags & (kinds | inspect.CO_COROUTINE):
        return None
    return tuple(
        (each.opname, each.arg if each.opcode in dis.haslocal else each.argval)
        for each in dis.get_instructions(code)
    )


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


_WAYS = {
    _written(way.__code__)
    for way in (
        _converted,
        _converted_by_name,
        _assigned,
        _unless_it_is,
        _if_it_is,
        _assigned_unless_it_is,
        _returned_unless_it_is,
    )
}
