"""Encoded images are not taken for pictures without an error: every module is asked for them."""

from __future__ import annotations

import sys
import threading
from typing import Any, NoReturn

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from gpuprefetch.core.nested import select

_WHERE = (
    "Transforms belong in DataPrefetcher(loader, transforms=[...]), which runs them on the decoded "
    "images, or in the transform of an ImageFolder, which gpuprefetch.accelerate(loader) moves. "
    "What mixes images, as MixUp, belongs in the training step."
)


# Of torchvision's v2: what only calls others, which are asked themselves, or leaves images alone.
_PASS = frozenset(
    "Compose ClampBoundingBoxes ClampKeyPoints ConvertBoundingBoxFormat SanitizeBoundingBoxes"
    " SanitizeKeyPoints SetClampingMode".split()
)


class UndecodedError(AttributeError, TypeError):
    """An encoded image was taken for a picture; the message says by what."""


class Encoded:
    """What stands for a picture until a prefetcher makes it one; it has nothing of a picture."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise UndecodedError(
            f"{type(self).__name__} has no attribute {name!r}: its images are not decoded and "
            f"transformed yet. {_WHERE}"
        )

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:  # else an array that holds us
        raise UndecodedError(
            f"NumPy cannot take {type(self).__name__}: it is not decoded and transformed yet. "
            f"{_WHERE}"
        )


def is_marked(leaf: Any) -> bool:
    return isinstance(leaf, Encoded)


# Threads that read encoded images, and the hook. It costs each call of a module 4 us: the process
# that trains has it only while it reads samples itself. A worker keeps it.
_readers: set[int] = set()
_hooks: list[RemovableHandle] = []


def begin_reading() -> None:
    """Refuse modules that are called with what :func:`is_marked`; for each encoded image."""
    if (thread := threading.get_ident()) not in _readers or not _hooks:
        _readers.add(thread)
        if not _hooks:
            _hooks.append(register_module_forward_pre_hook(_refuse))


def end_reading() -> None:
    """This thread has its samples, and may run a model."""
    _readers.discard(threading.get_ident())
    if _hooks:  # nor does a thread that has ended
        _readers.intersection_update(thread.ident for thread in threading.enumerate())
    while _hooks and not _readers:
        _hooks.pop().remove()


def _refuse(module: torch.nn.Module, args: Any) -> None:
    # Keyword arguments are not seen: torchvision's v2 modules take none, others fail on them.
    if torch.compiler.is_compiling() or not select(args, is_marked):
        return
    kind, v2 = type(module), sys.modules.get("torchvision.transforms.v2")
    theirs = getattr(v2, kind.__name__, None) is kind
    if kind is torch.nn.Sequential or (theirs and kind.__name__ in _PASS):
        return
    raise UndecodedError(
        f"{kind.__name__} was called with an encoded image, which it would return unchanged. "
        f"{_WHERE} Call what is for boxes or masks alone without the image."
    )
