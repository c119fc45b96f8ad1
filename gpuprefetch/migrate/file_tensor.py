"""What torchvision.io and TorchCodec give to a dataset, while a view of it gives a sample.

Their ``decode_image`` and its kin call operators, of ``torch.ops.image`` and of TorchCodec. These
give a tensor without pixels, which says what is in a file's header, and which becomes pixels as
soon as anybody uses it::

    image = decode_image(path)            a FileTensor
    image.shape, image.dtype, len(image)  known by the header
    self.transform(image)                 the file goes to the device
    image[:, :100], image / 255           pixels, which the operator itself has decoded

A file that the prefetcher's decoders might read otherwise than the operator does is decoded at
once: what is no JPEG, and a JPEG that is gray or CMYK, or to be turned by its EXIF orientation.
TorchCodec turns them always, torchvision where it is told to.

A FileTensor that the dataset keeps may be used at any time, and is the file's pixels then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from gpuprefetch.core.nested import Leaf, map_leaves
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.folder import LARGE, fault_of
from gpuprefetch.images.header import (
    ImageHeader,
    decode_cpu,
    loads_truncated,
    read_header,
    reason_of,
)
from gpuprefetch.images.host_memory import lacks_memory
from gpuprefetch.images.jpeg import JPEG, may_be_turned
from gpuprefetch.lists.forms import tensors
from gpuprefetch.migrate.replaced import Replaced, reading
from gpuprefetch.migrate.sample import current
from gpuprefetch.migrate.taken import Takes

T = TypeVar("T")
S = TypeVar("S", bound=torch.Tensor)
Call = Callable[..., object]

FORM = tensors(torch.Tensor)  # of images that a dataset reads so
_UNCHANGED = 0  # of torchvision's ImageReadMode
_RGB = 3
_MADE_UP = (3, 64, 64)  # the shape of a bad file, whose sample fails in decode
_TORCH = torch.Tensor
# What is known of a tensor without its pixels, which is the first argument.
_KNOWN: frozenset[Call] = frozenset(
    [
        *(
            getattr(_TORCH, name).__get__
            for name in (
                "shape dtype device ndim layout itemsize nbytes is_cuda is_leaf is_meta is_sparse"
                " requires_grad"
            ).split()
        ),
        *(
            getattr(_TORCH, name)
            for name in (
                "size dim ndimension numel nelement __len__ __hash__ element_size get_device"
                " is_floating_point is_complex is_signed"
            ).split()
        ),
        torch.numel,
        torch.is_floating_point,
        torch.is_complex,
    ]
)


class ReadFile:
    """A file that an operator has read.

    Args:
        file: its bytes.
        library: whose operator it is.
        decode: gives its pixels.
        pixels: them, if the operator has decoded them already.
        error: of the operator, which is kept back from the dataset.
    """

    def __init__(
        self,
        file: EncodedImage,
        library: str,
        decode: Callable[[], torch.Tensor],
        pixels: torch.Tensor | None = None,
        error: Exception | None = None,
    ) -> None:
        self._file = file
        self._library = library
        self._decode = decode
        self._pixels = pixels
        self._decoded_at_once = pixels is not None
        self.is_taken = False  # by a transform
        self.error = error
        self.touched = ""  # by which function first
        current.open(self)

    @property
    def name(self) -> str:
        return f"the image {self.path!r}" if self.path else "an image"

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def use(self) -> str:
        """Why the prefetcher does not decode it, in words; empty if it does."""
        if self.touched:
            return f"uses .{self.touched} of {self.name}"
        if self._decoded_at_once:
            return f"reads {self.name}, which is no RGB JPEG or is turned, by {self._library}"
        return ""

    def pixels(self) -> torch.Tensor:
        """The tensor that the dataset has, ``(C, H, W)``."""
        if self._pixels is None:
            with reading.set_aside():  # this package's own decoder is TorchCodec's
                made = self._decode()
            if self._pixels is None:  # no other thread was faster
                self._pixels = made
        return self._pixels

    def touch(self, function: Call) -> torch.Tensor:
        """The tensor for a function, which may change it or tell of its pixels."""
        pixels = self.pixels()
        self.touched = self.touched or _name_of(function)
        return pixels

    @property
    def waits(self) -> bool:
        """Whether its pixels are still to be decoded, by whoever needs them."""
        return not self.use

    @property
    def has_pixels(self) -> bool:
        return self._pixels is not None

    def wait_again(self) -> None:
        """Forget the pixels, and what was done to them."""
        self._pixels = None
        self.touched = ""

    def left_encoded(self, takes: Takes) -> EncodedImage | None:
        """The file, of an image that nothing has touched; None if the device gets its pixels."""
        takes.refuse_form(FORM, self.name)
        if not (takes.leaves_tensors_encoded and self.waits):
            return None
        self.is_taken = True
        return self._file

    def error_left(self) -> Exception | None:
        """The library's error, if nothing else would tell of it: no transform has got the file."""
        if self.is_taken:
            return None
        if not (self.has_pixels or self.error):
            try:
                self.pixels()
            except RuntimeError as error:
                self.error = error
        return self.error

    def forget_error(self) -> None:
        """Do not hold the error, whose traceback holds what holds this."""
        self.error = None


class FileTensor(torch.Tensor):
    """A tensor without pixels, which stands for those of a file."""

    @staticmethod
    def __new__(
        cls, read: ReadFile, shape: Sequence[int], dtype: torch.dtype = torch.uint8
    ) -> FileTensor:
        cpu = torch.device("cpu")
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=cpu)

    def __init__(
        self, read: ReadFile, shape: Sequence[int], dtype: torch.dtype = torch.uint8
    ) -> None:
        super().__init__()
        self.read = read

    @staticmethod
    def of_file(file: EncodedImage) -> FileTensor:
        """The pixels of a file that the prefetcher decodes."""
        header = read_header(file.data, oriented=False)
        read = ReadFile(file, "this package", lambda: decode_cpu(file.data, header))
        return FileTensor(read, (3, header.height, header.width))

    @classmethod
    def __torch_function__(
        cls,
        func: Call,
        types: Iterable[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named = kwargs or {}
        if func in _KNOWN and args and isinstance(args[0], FileTensor):
            known = args[0].read.pixels() if args[0].read.has_pixels else args[0]
            with torch._C.DisableTorchFunctionSubclass():
                return func(known, *args[1:], **named)
        given, named = _with_pixels(func, (args, named))
        return func(*given, **named)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own gives no types
        cls,
        func: Call,
        types: Iterable[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given, named = _with_pixels(func, (args, kwargs or {}))
        return func(*given, **named)

    def as_subclass(self, cls: type[S]) -> S:
        # torch would make a subclass of the pixels' own tensor, which belongs to another object.
        return self.read.touch(_TORCH.as_subclass).as_subclass(cls)


def _with_pixels(function: Call, given: T) -> T:
    """Arguments with pixels in the places of all that have none yet."""

    def real(leaf: Leaf) -> Leaf:
        return leaf.read.touch(function) if isinstance(leaf, FileTensor) else leaf

    made: T = map_leaves(real, given)
    return made


def _name_of(function: Call) -> str:
    """How a use is told of: the name of an attribute or of a function."""
    name: str = getattr(function, "__name__", type(function).__name__)
    if name in ("__get__", "__set__"):
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    return name


# --- The operators ---


@dataclass(frozen=True, slots=True)
class _Library:
    """Where operators are that read files.

    Attributes:
        name: of the module that users import.
        owner: gives what has the operators; None if it is not imported.
        turns: whether all of them apply the EXIF orientation.
    """

    name: str
    owner: Callable[[], object]
    turns: bool


_TORCHVISION = _Library("torchvision.io", lambda: torch.ops.image, turns=False)
_TORCHCODEC = _Library(
    "TorchCodec", lambda: sys.modules.get("torchcodec.decoders._image_decoders"), turns=True
)


@dataclass(frozen=True, slots=True, eq=False)
class _ReadBytes:
    """The bytes that an operator has read in this sample, and from where."""

    data: torch.Tensor
    path: str
    fault: str  # why these are no image; empty if they may be one


def _read_file(path: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The bytes of a file: none of one that is empty, or no regular file, which is a bad image."""
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return read(path)  # whose error it is
    fault = fault_of(status)
    if status.st_size and not fault:
        data = read(path)
    elif current.may_catch:
        try:
            return read(path)
        except Exception as error:
            current.gets(error)
            raise
    else:
        data = torch.empty(0, dtype=torch.uint8, device="cpu")
    current.open(_ReadBytes(data, path, fault))
    return data


def _read_by_torchvision(path: str) -> torch.Tensor:
    return _read_file(path, _torchvisions.original)


def _read_by_torchcodec(source: object) -> torch.Tensor:
    if isinstance(source, str | Path):
        return _read_file(os.fspath(source), _torchcodecs.original)
    return _torchcodecs.original(source)


_torchvisions = reading.replaces(_TORCHVISION.owner, "read_file", _read_by_torchvision)
_torchcodecs = reading.replaces(_TORCHCODEC.owner, "_source_to_tensor", _read_by_torchcodec)


def _format_of(data: torch.Tensor) -> str:
    """The format of a file, and ``"jpeg"`` of what is no image: that decoder refuses it."""
    before = fault = _fault_of(data)
    try:
        found = _formats.original(data)
        fault = ""
    except ValueError as error:
        if current.gets(error):
            raise
        found = "jpeg"
        fault = fault or _refused(_TORCHCODEC, str(error).partition(". ")[0])
    if fault != before:
        current.open(_ReadBytes(data, _path_of(data), fault))
    return found


_formats = reading.replaces(_TORCHCODEC.owner, "_detect_image_format", _format_of)


def _read_as(data: torch.Tensor) -> list[_ReadBytes]:
    """What is known of bytes: the latest first."""
    read = [each for each in reversed(current.opened) if isinstance(each, _ReadBytes)]
    return [each for each in read if each.data is data]


def _path_of(data: torch.Tensor) -> str:
    return next((each.path for each in _read_as(data)), "")


def _fault_of(data: torch.Tensor) -> str:
    return next((each.fault for each in _read_as(data)), "")


def _file_of(data: torch.Tensor) -> EncodedImage:
    """The file whose bytes these are; what the dataset has done to them counts."""
    file = EncodedImage(data.numpy().tobytes(), -1, _path_of(data))
    if fault := _fault_of(data):
        file._condemn(fault)
    return file


class _Operator:
    """An operator that decodes: ``(data, mode, ...)``.

    Args:
        library: which has it.
        name: of the operator.
        takes_jpegs: whether it decodes JPEGs.
    """

    def __init__(self, library: _Library, name: str, *, takes_jpegs: bool) -> None:
        self._library = library
        self._takes_jpegs = takes_jpegs
        self._own: Replaced[..., torch.Tensor] = reading.replaces(
            library.owner, name, self._decoded
        )

    def _decoded(
        self, data: torch.Tensor, mode: int = _UNCHANGED, *more: object, **named: object
    ) -> torch.Tensor:
        plain = isinstance(data, torch.Tensor) and data.device.type == "cpu"
        if not plain or data.dtype != torch.uint8 or data.dim() != 1 or data.numel() > LARGE:
            return self._own.original(data, mode, *more, **named)  # whose error it may be
        file = _file_of(data)
        turns = any(more) or bool(named.get("apply_exif_orientation")) or self._library.turns

        def decode() -> torch.Tensor:
            # Of a copy: the dataset may use its own memory for the next file.
            data = torch.frombuffer(bytearray(file.data), dtype=torch.uint8)
            return self._own.original(data, mode, *more, **named)

        header = _header_of(file) if self._takes_jpegs else None
        alike = header is not None and _is_decoded_alike(file, header, mode, turns=turns)
        # What may be damaged is decoded here if the dataset may catch the error.
        if header is not None and alike and (header.is_sound or not current.may_catch):
            read = ReadFile(file, self._library.name, decode)
            return FileTensor(read, (3, header.height, header.width))
        try:
            pixels = self._own.original(data, mode, *more, **named)
        except RuntimeError as error:
            if lacks_memory(error):
                raise
            if current.gets(error):
                raise
            if not file._fault:
                file._condemn(_refused(self._library, reason_of(error)))
            return FileTensor(ReadFile(file, self._library.name, decode, error=error), _MADE_UP)
        read = ReadFile(file, self._library.name, decode, pixels)
        return FileTensor(read, pixels.shape, pixels.dtype)


def _header_of(file: EncodedImage) -> ImageHeader | None:
    """The header of a JPEG; None for any other file."""
    if (header := file._read_if_jpeg()) is not None or not file.data.startswith(JPEG):
        return header
    try:
        with reading.set_aside():
            return read_header(file.data, oriented=False)
    except ValueError:
        return None


def _is_decoded_alike(file: EncodedImage, header: ImageHeader, mode: int, *, turns: bool) -> bool:
    """Whether the prefetcher's decoders give what an operator gives of such a file."""
    colors = header.components == 3 and mode in (_UNCHANGED, _RGB)
    turned = turns and bool(header.exif) and may_be_turned(file.data)
    # The operators decode no truncated file, whatever Pillow is told.
    return colors and not (turned or loads_truncated())


def _refused(library: _Library, reason: str) -> str:
    return f"{library.name} cannot decode it: {reason.rstrip('.')}"


for _name in ("decode_image", "decode_jpeg"):
    _Operator(_TORCHVISION, _name, takes_jpegs=True)
for _name in ("decode_png", "decode_webp"):
    _Operator(_TORCHVISION, _name, takes_jpegs=False)
_Operator(_TORCHCODEC, "_decode_jpeg", takes_jpegs=True)
for _name in ("_decode_png", "_decode_webp"):
    _Operator(_TORCHCODEC, _name, takes_jpegs=False)


def decoded_by_torchvision(file: EncodedImage) -> torch.Tensor:
    """The tensor ``(3, H, W)`` that ``decode_image()`` gives of a file, or that it was made of."""
    if file.data.startswith(JPEG):
        data = torch.frombuffer(bytearray(file.data), dtype=torch.uint8)
        made: torch.Tensor = torch.ops.image.decode_image(data, _RGB, False)
        return made
    return decode_cpu(file.data)
