"""Stand-ins for a picture that have its size and no pixels, and note what is done with them.

A dataset's own transform of a picture and its target runs in a worker on such a stand-in::

    RandomIoUCrop          F.crop(picture, 3, 5, 40, 60)     noted: the launch cuts this part out
    RandomHorizontalFlip   F.horizontal_flip(picture)        noted: the launch mirrors it
    ToImage                F.to_image(picture)               a stand-in for a tensor from here on
    ToDtype                F.to_dtype(image, float32, ...)   noted: the launch does it

Boxes, masks and whatever else is beside the picture are real, and move as the transform moves them.
What needs pixels is a :class:`.recorded.RecordingError`.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, Self

import torch

from gpuprefetch.core.errors import scope
from gpuprefetch.images.recorded import (
    CONVERSIONS,
    GEOMETRY,
    SAME_SIZE,
    Recording,
    needs_pixels,
)
from gpuprefetch.transforms.sampling import Size

_OTHER_NAMES = {"hflip": "horizontal_flip", "vflip": "vertical_flip"}  # v1's


class _Kinds(NamedTuple):
    """The classes of stand-ins, which exist once torchvision and PIL are there."""

    picture: type
    image: type
    pure: type  # an image that is none of torchvision's kinds of tensors
    functions: dict[str, Callable[..., Any]]  # of torchvision, by name, that take stand-ins


def _note(stand_in: Any, name: str, arguments: dict[str, Any]) -> Any:
    """A stand-in for what a function makes of one."""
    return _made(stand_in.recording.then(name, arguments))


def _made(recording: Recording) -> Any:
    kinds = _kinds()
    if not recording.is_tensor:
        return kinds.picture(recording)
    return (kinds.pure if recording.is_pure else kinds.image)(recording)


def stand_in_for(size: Size, *, converts: bool, is_tensor: bool) -> Any:
    """A stand-in for an image of this (height, width)."""
    return _made(Recording(size, converts=converts, is_tensor=is_tensor))


def recording_of(made: object) -> Recording | None:
    """What was noted by a stand-in; None for anything else."""
    return getattr(made, "recording", None) if isinstance(made, _kinds()[:2]) else None


@functools.cache
def _kinds() -> _Kinds:
    picture = _picture_kind()
    image, pure = _image_kinds()
    noted = {name: _noting(name) for name in (*GEOMETRY, *SAME_SIZE)}
    asked: dict[str, Callable[..., Any]] = {
        "get_size": lambda given: list(given.recording.size),
        "get_dimensions": lambda given: [3, *given.recording.size],
        "get_num_channels": lambda given: 3,
    }
    from torchvision.transforms.v2 import functional as F
    from torchvision.transforms.v2.functional import _utils

    for name, kernel in {**noted, **asked}.items():
        if (function := getattr(F, name, None)) is None:
            continue
        F.register_kernel(name, image)(kernel)
        if name not in CONVERSIONS:  # PIL images pass through these
            _utils._register_kernel_internal(function, picture)(kernel)
    others = {
        "to_tensor": lambda given: _note(_as_pure(given), "to_dtype", _TO_FLOAT),
        "pil_to_tensor": _as_pure,
        "to_image": _as_image,
        "convert_image_dtype": _convert,
        "get_image_size": lambda given: list(given.recording.size[::-1]),
        "get_image_num_channels": lambda given: 3,
    }
    old = {other: noted[name] for other, name in _OTHER_NAMES.items()}
    return _Kinds(picture, image, pure, {**noted, **asked, **others, **old})


# What makes tensors of PIL images.
_CONVERTERS = frozenset(("to_tensor", "pil_to_tensor", "to_image", "convert_image_dtype"))
_TO_FLOAT = {"dtype": torch.float32, "scale": True}


def _as_image(given: Any) -> Any:
    return _made(replace(given.recording, is_tensor=True, is_pure=False))


def _as_pure(given: Any) -> Any:
    return _made(replace(given.recording, is_tensor=True, is_pure=True))


def _convert(given: Any, dtype: torch.dtype = torch.float32) -> Any:
    return _note(given, "to_dtype", {"dtype": dtype, "scale": True})


def _noting(name: str) -> Callable[..., Any]:
    """A function that takes a stand-in, and notes that it was called."""
    from torchvision.transforms.v2 import functional as F

    function = getattr(F, name, None)
    # The arguments after the image, which may be given by position.
    names = [*inspect.signature(function).parameters][1:] if function else []

    def noted(given: Any, *values: Any, **named: Any) -> Any:
        if len(values) > len(names):
            raise needs_pixels(f"F.{name}, called with arguments without their names,")
        arguments = dict(zip(names, values, strict=False)) | named
        arguments.pop("inplace", None)
        return _note(given, name, arguments)

    return noted


def _picture_kind() -> type:
    from PIL import Image

    flips = {
        Image.Transpose.FLIP_LEFT_RIGHT: "horizontal_flip",
        Image.Transpose.FLIP_TOP_BOTTOM: "vertical_flip",
    }

    class PictureSize(Image.Image):
        """Stands for a PIL image in RGB."""

        stands_for = Image.Image

        def __init__(self, recording: Recording) -> None:
            self.recording = recording

        @property
        def mode(self) -> str:
            return "RGB"

        @property
        def size(self) -> Size:
            height, width = self.recording.size
            return width, height

        @property
        def width(self) -> int:
            return self.recording.size[1]

        @property
        def height(self) -> int:
            return self.recording.size[0]

        def getbands(self) -> tuple[str, ...]:
            return ("R", "G", "B")

        @property  # type: ignore[misc]
        def im(self) -> NoReturn:  # type: ignore[override]
            raise needs_pixels("something that was called")

        @property
        def __array_interface__(self) -> NoReturn:
            raise needs_pixels("NumPy")

        def load(self) -> NoReturn:
            raise needs_pixels("a method of PIL")

        def __getstate__(self) -> NoReturn:
            raise needs_pixels("a copy")

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("__"):  # others look for special methods
                raise AttributeError(name)
            raise needs_pixels(f"what reads .{name}")

        def copy(self) -> Self:
            return self

        def convert(self, mode: str | None = None, *options: object, **named: object) -> Self:
            if mode not in (None, "RGB") or options or named:
                raise needs_pixels(f"convert({mode!r})")
            return self

        def resize(self, size: Any, resample: Any = None, *options: object, **named: object) -> Any:
            if options or named:
                raise needs_pixels("resize() with a box or a reducing_gap")
            how = Image.Resampling.BICUBIC if resample is None else resample
            wanted = [int(side) for side in size][::-1]
            return _note(self, "resize", {"size": wanted, "interpolation": int(how)})

        def crop(self, box: Any = None) -> Any:
            if box is None:
                return self
            left, top, right, bottom = map(round, box)
            part = {"top": top, "left": left, "height": bottom - top, "width": right - left}
            return _note(self, "crop", part)

        def transpose(self, method: Any) -> Any:
            if method not in flips:
                raise needs_pixels(f"transpose({method!r})")
            return _note(self, flips[method], {})

    return PictureSize


# What tells of a tensor without its values.
_FORM = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in "shape dtype device ndim layout requires_grad is_cuda".split()
) | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.is_floating_point, torch.Tensor.is_complex}


def _image_kinds() -> tuple[type, type]:
    from torchvision import tv_tensors

    class ImageSize(tv_tensors.Image):  # type: ignore[misc]
        """Stands for a tensor ``(3, H, W)``."""

        stands_for = tv_tensors.Image

        def __new__(cls, recording: Recording) -> Self:
            form = torch.empty((), dtype=recording.dtype).expand(3, *recording.size)
            return form.as_subclass(cls)

        def __init__(self, recording: Recording) -> None:
            self.recording = recording

        @classmethod
        def wrap(cls, tensor: torch.Tensor, like: object, **options: object) -> torch.Tensor:
            return tensor

        @classmethod
        def __torch_function__(
            cls,
            func: Callable[..., Any],
            types: Sequence[type],
            args: Sequence[Any] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            if func in _FORM:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            raise needs_pixels(getattr(func, "__name__", "a function of torch"))

        def as_subclass(self, kind: type) -> Any:
            return _as_pure(self) if kind is torch.Tensor else self

        def contiguous(self, **options: object) -> Self:
            return self

        def clone(self, **options: object) -> Self:
            return self

        def to(self, *given: object, **named: object) -> Any:
            dtype = named.pop("dtype", None) or (given[0] if len(given) == 1 else None)
            if named or not isinstance(dtype, torch.dtype):
                raise needs_pixels("to()")
            return _note(self, "to_dtype", {"dtype": dtype, "scale": False})

        def float(self) -> Any:
            return self.to(torch.float32)

        def flip(self, *dims: Any) -> Any:
            axes = {-1: "horizontal_flip", 2: "horizontal_flip"}
            axes |= {-2: "vertical_flip", 1: "vertical_flip"}
            flat = [*dims[0]] if dims and isinstance(dims[0], Sequence) else [*dims]
            made: Any = self
            for axis in flat:
                if axis not in axes:
                    raise needs_pixels(f"flip({axis})")
                made = _note(made, axes[axis], {})
            return made

    class PureSize(ImageSize):
        """Stands for a tensor that is no Image."""

        stands_for = torch.Tensor

    return ImageSize, PureSize


# --- torchvision's functions, while a transform runs on a stand-in ---


class _Functions:
    """Lets torchvision's functions take stand-ins, in all threads and for nothing else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: list[tuple[Any, str, Any]] = []

    def enter(self) -> None:
        kinds = _kinds()
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            for module, names in _modules().items():
                for name in names & kinds.functions.keys():
                    if hasattr(module, name):
                        self._replace(module, name, _either, kinds.functions[name])
            self._replace(_to_dtype(), "transform", _by_kind, kinds.image)
            for module in _modules_with_fills():
                self._replace(module, "_get_fill", _fill_by_kind, kinds[:3])

    def _replace(self, owner: Any, name: str, around: Callable[..., Any], by: object) -> None:
        function = getattr(owner, name)
        self._before.append((owner, name, function))
        setattr(owner, name, around(function, by))

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            while not self._users and self._before:
                setattr(*self._before.pop())


def _modules() -> dict[ModuleType, AbstractSet[str]]:
    """Modules of torchvision, and their functions that take a picture by themselves.

    Most of v2's find what to do by the kind of what they get, and know stand-ins.
    """
    from torchvision.transforms import functional
    from torchvision.transforms.v2 import functional as v2

    return {functional: _kinds().functions.keys(), v2: _CONVERTERS}


def _to_dtype() -> type:
    from torchvision.transforms import v2

    kind: type = v2.ToDtype
    return kind


def _modules_with_fills() -> list[ModuleType]:
    """Modules of torchvision's ops that have a color of padding for each class of image."""
    from torchvision.transforms.v2 import _auto_augment, _geometry

    return [_auto_augment, _geometry]


@functools.cache
def _fill_by_kind(
    function: Callable[..., Any], kinds: tuple[type, ...]
) -> Callable[[dict[object, object], type], object]:
    """The function that looks up the color for a class, which also takes that of a stand-in."""

    @functools.wraps(function)
    def called(colors: dict[object, object], kind: Any) -> object:
        return function(colors, kind.stands_for if kind in kinds else kind)

    return called


@functools.cache
def _by_kind(transform: Callable[..., Any], kind: type) -> Callable[..., Any]:
    """The method of ToDtype, which looks for the dtype of an image by its class."""

    @functools.wraps(transform)
    def called(op: Any, given: Any, params: dict[str, Any]) -> Any:
        if not (isinstance(given, kind) and isinstance(op.dtype, dict)):
            return transform(op, given, params)
        key = given.stands_for  # type: ignore[attr-defined]
        dtype = op.dtype[key] if key in op.dtype else op.dtype["others"]
        return _note(given, "to_dtype", {"dtype": dtype, "scale": op.scale}) if dtype else given

    return called


@functools.cache
def _either(function: Callable[..., Any], noted: Callable[..., Any]) -> Callable[..., Any]:
    """A function, and what is called in its place with a stand-in."""
    kinds = _kinds()[:2]
    first = next(iter(inspect.signature(function).parameters))

    @functools.wraps(function)
    def called(*values: Any, **named: Any) -> Any:
        given = values[0] if values else named.get(first)
        if not isinstance(given, kinds):
            return function(*values, **named)
        named.pop(first, None)
        return noted(given, *values[1:], **named)

    return called


_functions = _Functions()


@scope
def recording() -> Iterator[None]:
    """Let torchvision's functions take stand-ins in this block."""
    _functions.enter()
    try:
        yield
    finally:
        _functions.leave()
