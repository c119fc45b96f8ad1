"""A picture that a dataset has opened, while the file stays encoded.

Where the dataset may catch PIL's error for a bad file, PIL opens and decodes it as it would without
stand-ins, unless the header shows that there is no error.

A Picture that the dataset keeps becomes the real one when the sample has left. Other code may get
it then, and torchvision's v2 would return a stand-in as it is.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, cast

import numpy as np

from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.folder import read_image, read_open
from gpuprefetch.images.guard import Encoded, UndecodedError, begin_reading
from gpuprefetch.images.header import read_header
from gpuprefetch.images.host_memory import lacks_memory
from gpuprefetch.images.recorded import CONVERSIONS, GEOMETRY, SAME_SIZE
from gpuprefetch.lists.forms import PICTURES
from gpuprefetch.lists.rgb import Modes
from gpuprefetch.migrate.replaced import reading
from gpuprefetch.migrate.sample import current
from gpuprefetch.migrate.taken import Takes

if TYPE_CHECKING:
    from PIL import Image


class _Attributes:
    """Lays out an object as PIL's pictures are, so that it can become one."""


class Picture(_Attributes, Encoded):
    """A file that was opened as a picture, and perhaps converted to RGB, and nothing else.

    Args:
        file: which it is.
        is_rgb: whether it was converted to RGB.
    """

    def __init__(self, file: EncodedImage, *, is_rgb: bool) -> None:
        begin_reading()
        self._file = file
        self._is_rgb = is_rgb
        self._real: Image.Image | None = None
        self._loads = is_rgb  # whether the dataset has had PIL decode the picture, by its own view
        self._fails_late = False  # whether the dataset gets an error from a later call
        self._is_decoded = False  # by PIL, for an error that the dataset might have caught
        self.touched = ""  # by which attribute first
        current.open(self)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance() goes by
        from PIL import Image

        if not self._is_rgb:
            with contextlib.suppress(*_broken()):
                return type(self._opened())
        return Image.Image

    @property
    def mode(self) -> str:
        return "RGB" if self._is_rgb else self._mode_of_pixels()

    @property
    def size(self) -> tuple[int, int]:
        """Width and height; made up for a bad file, whose sample fails in decode."""
        try:
            return self._opened().size
        except _broken():
            height, width = self.height_and_width()
            return width, height

    @property
    def width(self) -> int:
        return self.size[0]

    @property
    def height(self) -> int:
        return self.size[1]

    def convert(self, mode: str | None = None, *options: object, **named: object) -> Any:
        if mode == "RGB" and not (options or named) and self._waits("convert"):
            self._loads = True
            return Picture(self._file, is_rgb=True)
        return self._changed("convert")(mode, *options, **named)

    def copy(self) -> Any:
        """Another picture: what is done to one of them is not done to the other."""
        if not self._waits("copy"):
            return self._changed("copy")()
        self._loads = True
        return Picture(self._file, is_rgb=self.mode == "RGB")

    def load(self) -> PixelAccess:
        self._waits("load")
        self._loads = True
        return PixelAccess(self)

    def getexif(self) -> Image.Exif:
        """The metadata: a JPEG has them before its pixels, and PIL decodes others for them.

        A bad file has none, as its sample fails in decode.
        """
        try:
            opened = self._opened()
        except _broken():
            from PIL import Image

            return Image.Exif()
        if self.touched or opened.format not in _TELL_FIRST:
            return cast("Image.Exif", self._changed("getexif")())
        return opened.getexif()

    def close(self) -> None:
        pass

    def __enter__(self) -> Picture:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        # NumPy, copy and others ask for special methods that a picture may not have.
        if name.startswith("__") and name != "__array_interface__":
            raise AttributeError(name)
        return self._changed(name)

    def __copy__(self) -> Any:
        return self.copy()

    def __deepcopy__(self, known: object) -> object:
        return self.copy()

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        # A dataset may keep pictures in files, which others read. Pickle would compare the class of
        # the real one with this one's.
        return copy.copy, (self.as_read(),)

    def __eq__(self, other: object) -> bool:
        """Whether the pixels are the same, as of PIL's pictures."""
        one, two = (each.as_read() if type(each) is Picture else each for each in (self, other))
        return bool(one == two)

    __hash__ = object.__hash__

    def __array__(self, *args: Any, **named: Any) -> Any:
        self._changed("__array_interface__")
        return np.array(self._opened(), *args, **named)

    def _opened(self) -> Image.Image:
        """The real picture, which PIL decodes when its pixels are asked for."""
        if self._real is None:
            try:
                self._real = self._open()
            except Exception:
                self._fails_late = True
                raise
        return self._real

    def _open(self) -> Image.Image:
        real = _pil_open.original(io.BytesIO(self._file.data))
        real.filename = self._file.path
        return cast("Image.Image", real)

    def judge(self, source: object) -> None:
        """Have PIL open the file: the dataset may catch its error.

        Args:
            source: what the dataset opens. It is asked for the error, which names it.
        """
        if self._file._fault and not os.path.isdir(self._file.path):  # noqa: PTH112
            return  # PIL would wait for a FIFO for ever
        with contextlib.suppress(Exception):
            self._real = self._open()
            return
        try:
            _pil_open.original(source)
        except Exception as error:
            _note(error)
            raise

    def _waits(self, function: str) -> bool:
        """Whether the picture is still to be decoded, where a function would have PIL decode it.

        PIL does so if the file may be damaged, and the dataset may catch the error.
        """
        if self._loads or self.touched:
            return not self.touched
        header = self._file._read_if_jpeg()
        if (header is not None and header.is_sound) or not current.may_catch:
            return True
        try:
            real = self._opened()
        except _broken():  # which the dataset would have got before
            return True
        try:
            real.load()
        except Exception as error:
            _note(error)
            raise
        self._is_decoded = True
        self.touched = function
        return False

    def __setattr__(self, name: str, value: object) -> None:
        # PIL's functions that change a picture in place set its attributes.
        if name in _OWN or not _has(self._opened(), name):
            object.__setattr__(self, name, value)
            return
        setattr(self.as_read(), name, value)
        self.touched = self.touched or name

    def as_read(self) -> Image.Image:
        """The real picture, as the dataset has it."""
        real = self._opened()
        try:
            if self._is_rgb and not self.touched:
                real = self._real = real.convert("RGB")
            elif self._loads:
                real.load()  # PIL has attributes that are of a loaded picture alone, such as im
        except Exception:
            self._fails_late = True
            raise
        return real

    def _changed(self, name: str) -> Any:
        """An attribute of the real picture, which may change the picture or tell of its pixels."""
        value = getattr(self.as_read(), name)
        self.touched = self.touched or name
        return value

    def _become_real(self) -> bool:
        self.become_real()
        return type(self) is not Picture

    def become_real(self) -> None:
        """Turn into the picture that this one stands for, wherever the dataset has put it."""
        with contextlib.suppress(*_broken()):
            real = self._opened()
            if self._is_rgb and not self.touched:
                with contextlib.suppress(*_broken()):  # it is told when the picture is used
                    real = real.convert("RGB")
            elif self._loads:
                with contextlib.suppress(*_broken()):
                    real.load()
            vars(self).clear()
            vars(self).update(vars(real))
            vars(object)["__class__"].__set__(self, type(real))

    def height_and_width(self) -> list[int]:
        """The size by its header; made up for a bad file, whose sample fails in decode."""
        if self.touched:
            width, height = self._opened().size
            return [height, width]
        try:
            with reading.set_aside():
                header = read_header(self._file.data)
        except ValueError:
            return [64, 64]
        return [header.height, header.width]

    @property
    def name(self) -> str:
        return f"the picture {self._file.path!r}" if self._file.path else "a picture"

    @property
    def use(self) -> str:
        """What was done with the pixels, in words; empty if nothing was."""
        if self._is_decoded:
            return f"reads {self.name}, which may be damaged, where it may catch the error"
        return f"uses .{self.touched} of {self.name}" if self.touched else ""

    def reaches(self, function: str) -> Picture:
        """This picture, where a function would have PIL decode it."""
        self._waits(function)
        return self

    def left_encoded(self, takes: Takes) -> EncodedImage:
        """The file, of a picture that nothing has touched."""
        takes.refuse_form(PICTURES, self.name)
        if takes.modes is not Modes.ANY:
            takes.refuse_mode(self._mode_of_pixels(), self.name)
        return self._file

    def error_left(self, files: set[int]) -> Exception | None:
        """PIL's error of an earlier call than the one that raised it; None if a transform has it.

        The dataset goes on, though PIL would have raised the error where nothing catches it.
        """
        if self._fails_late and id(self._file.data) not in files:
            try:
                self.as_read()
            except Exception as error:
                return error
        return None

    @property
    def path(self) -> str:
        return self._file.path

    def is_among(self, files: set[int]) -> bool:
        """Whether its bytes have one of these identities; nobody can say if they were changed."""
        return bool(self.touched) or id(self._file.data) in files

    def _mode_of_pixels(self) -> str:
        """The mode; that of a file that PIL cannot open counts as RGB, as it fails in decode."""
        try:
            return "RGB" if self._is_rgb else self._opened().mode
        except _broken():
            return "RGB"


def _has(picture: Image.Image, name: str) -> bool:
    """Whether a picture has an attribute, which is not read: its pixels may not be there yet."""
    return name in vars(picture) or hasattr(type(picture), name)


class LeftBehind:
    """Stands in a sample for the picture beside what its transform gave: it cannot be used.

    Datasets of rows give it with the rest of the row, and collate functions leave it out.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # pickle and copy ask
            raise AttributeError(name)
        raise UndecodedError(
            f"{self._name} itself is used after its sample was made, by .{name}, and it stays in "
            "the workers: the device has what its transform gave. Let the dataset put into the "
            'sample what is needed of it, such as rows["size"] = [p.size for p in rows["image"]].'
        )


class PixelAccess:
    """What ``load()`` of a picture gives, which most code does not use: it lets PIL read a file."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture

    def __getitem__(self, place: object) -> Any:
        return self._picture._changed("load")()[place]

    def __setitem__(self, place: object, value: object) -> None:
        self._picture._changed("load")()[place] = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._picture._changed("load")(), name)


_TELL_FIRST = ("JPEG", "MPO")  # their metadata, before their pixels
# What a stand-in has besides the attributes of its picture.
_OWN = frozenset("_fails_late _file _is_decoded _is_rgb _loads _real touched".split())


@functools.cache
def _broken() -> tuple[type[Exception], ...]:
    """What PIL raises for a file that it cannot open; a warning may be an error."""
    from PIL import Image

    return OSError, ValueError, SyntaxError, Warning, Image.DecompressionBombError


def _note(error: Exception) -> None:
    """Note PIL's error for a bad file, which the dataset gets."""
    if not lacks_memory(error):
        current.gets(error)


@functools.cache
def know_functions() -> None:
    """Let torchvision's v2 functions take a picture, as they go by its exact class.

    They get the real one. Its size alone can be told without it.
    """
    from torchvision.transforms.v2 import functional as F
    from torchvision.transforms.v2.functional import _utils

    def size(picture: Picture) -> list[int]:
        return picture.height_and_width()

    def of_a_real_one(function: Callable[..., object]) -> Callable[..., object]:
        def call(picture: Picture, *given: object, **named: object) -> object:
            real = picture if picture._become_real() else picture.as_read()
            return function(real, *given, **named)

        return call

    _utils._register_kernel_internal(F.get_size, Picture)(size)
    asked = ("get_dimensions", "get_num_channels")
    for name in {*GEOMETRY, *SAME_SIZE, *asked} - {*CONVERSIONS}:
        if (function := getattr(F, name, None)) is not None:
            _utils._register_kernel_internal(function, Picture)(of_a_real_one(function))


# --- PIL.Image.open ---


def _pil() -> object:
    from PIL import Image

    return Image


def _open(fp: Any, mode: str = "r", formats: object = None) -> Any:
    """PIL.Image.open, for a thread that reads a sample of a view."""
    if mode != "r" or formats is not None:
        return _pil_open.original(fp, mode, formats)
    if isinstance(fp, (str, bytes, os.PathLike)):
        return opened(read_path(os.fsdecode(fp)), fp)
    return opened(read_file(fp, getattr(fp, "name", "")), fp)


def opened(file: EncodedImage, source: object) -> Picture:
    """The picture of a file that a dataset opens: PIL's error, where that may be caught."""
    picture = Picture(file, is_rgb=False)
    if _may_be_refused(file):
        picture.judge(source)
    return picture


def opened_as_rgb(file: EncodedImage, source: object) -> object:
    """The same of a file that is converted to RGB at once."""
    if _may_be_refused(file):
        return opened(file, source).convert("RGB")
    return Picture(file, is_rgb=True)


def _may_be_refused(file: EncodedImage) -> bool:
    """Whether PIL may not open a file, and the dataset may catch the error."""
    header = file._read_if_jpeg()
    return (header is None or not header.plain) and current.may_catch


_pil_open = reading.replaces(_pil, "open", _open)


def read_path(path: str | os.PathLike[str]) -> EncodedImage:
    with reading.set_aside():
        return read_image(path)


def read_file(file: BinaryIO, path: object = "", index: int = -1) -> EncodedImage:
    """Read an open file as an encoded image, from its beginning if it has one."""
    path = path if isinstance(path, str) else ""
    try:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
    except (AttributeError, io.UnsupportedOperation):
        return EncodedImage(file.read(), index, path)
    with reading.set_aside():
        return EncodedImage(read_open(file, size), index, path)
