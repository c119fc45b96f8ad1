"""Calling a module with an encoded image is an error. A forward pre-hook checks every module call.

A module that is called with an encoded image may return the image unchanged, as torchvision's v2
transforms do with what they do not know. The pictures would then be trained on without that
transform, and nobody would notice.
"""

from __future__ import annotations

import sys
import threading
from typing import NoReturn

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from gpuprefetch.core.nested import select

_WHERE = (
    "Pass transforms to DataPrefetcher(loader, transforms=[...]), or leave them in an ImageFolder "
    "and call gpuprefetch.accelerate(loader). Call MixUp and CutMix in the training step."
)


# torchvision's v2 transforms that may get an encoded image: those that only call other transforms,
# each of which is checked itself, and those that leave images alone.
_PASS = frozenset(
    "Compose ClampBoundingBoxes ClampKeyPoints ConvertBoundingBoxFormat SanitizeBoundingBoxes"
    " SanitizeKeyPoints SetClampingMode".split()
)


# In the class of a module that calls only what checks its pictures itself.
STANDS_ASIDE = "_stands_aside"


class Messages(threading.local):
    """Messages of this thread to whoever notes them."""

    def __init__(self) -> None:
        self.messages: list[str] | None = None  # None while nobody notes them

    def __enter__(self) -> list[str]:
        self.messages = messages = list[str]()
        return messages

    def __exit__(self, *error: object) -> None:
        self.messages = None

    def add(self, message: str) -> None:
        if self.messages is not None:
            self.messages.append(message)


# Of all UndecodedErrors, also of those that are caught. A dataset that catches the error of one
# sample, and gives another sample, must not go unnoticed.
faults = Messages()
_MOST_FAULTS = 100  # of a sample, which is refused after one


class EndlessFaultsError(BaseException):
    """A dataset catches every UndecodedError and tries again; it hardly catches this."""


class UndecodedError(AttributeError, TypeError):
    """An encoded image was used as a picture; the message says by what."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        faults.add(str(self))
        if len(faults.messages or ()) > _MOST_FAULTS:
            raise EndlessFaultsError


class _NotDecoded(type):
    """The classes of encoded images.

    Who takes pictures alone names the class of what came instead: "Got <class ...>".
    """

    def __repr__(cls) -> str:
        name = f"{cls.__module__}.{cls.__qualname__}"
        return f"<class '{name}'>, which is not decoded and transformed yet. {_WHERE}"


class Encoded(metaclass=_NotDecoded):
    """Stands for a picture until a prefetcher decodes it. It has no attribute of a picture."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        raise UndecodedError(
            f"{type(self).__name__} has no attribute {name!r}: its images are not decoded and "
            f"transformed yet. {_WHERE}"
        )

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        # Without this method NumPy would make an array that holds the object.
        raise UndecodedError(
            f"NumPy cannot take {type(self).__name__}: it is not decoded and transformed yet. "
            f"{_WHERE}"
        )

    def _become_real(self) -> bool:
        """Become a picture, for a module; whether this is one now."""
        return False


def is_marked(leaf: object) -> bool:
    return isinstance(leaf, Encoded)


# The threads that read encoded images, and the hook. The hook costs each call of a module 4 us, so
# the training process has it only while it reads samples itself. A worker keeps it.
_readers: set[int] = set()
_hooks: list[RemovableHandle] = []


def begin_reading() -> None:
    """Refuse calls of modules with encoded images from now on; every encoded image calls this."""
    thread = threading.get_ident()
    if thread not in _readers or not _hooks:
        _readers.add(thread)
        if not _hooks:
            _hooks.append(register_module_forward_pre_hook(_refuse))


def end_reading() -> None:
    """This thread has its samples, and may run a model. The hook goes with its last reader."""
    _readers.discard(threading.get_ident())
    if _hooks:  # a thread that has ended reads nothing
        _readers.intersection_update(thread.ident for thread in threading.enumerate())
    while _hooks and not _readers:
        _hooks.pop().remove()


def _refuse(module: torch.nn.Module, args: tuple[object, ...]) -> None:
    # Keyword arguments are not seen: torchvision's v2 modules take none, others fail on them.
    if torch.compiler.is_compiling() or STANDS_ASIDE in vars(type(module)):
        return
    if all(leaf._become_real() for leaf in select(args, is_marked)):
        return
    kind = type(module)
    if kind is torch.nn.Sequential or (kind.__name__ in _PASS and _is_of_v2(kind)):
        return
    raise UndecodedError(
        f"{kind.__name__} was called with an encoded image, which it would return unchanged. "
        f"{_WHERE} If the call was for boxes or masks, leave the image out of it."
    )


def _is_of_v2(kind: type) -> bool:
    v2 = sys.modules.get("torchvision.transforms.v2")
    return getattr(v2, kind.__name__, None) is kind
