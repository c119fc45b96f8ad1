"""What a dataset has in place of its pictures, while a view of it gives a sample.

The code of a dataset may do anything with a picture before its transform and after it. So every
sample must show whether the transform got what was read, and that nothing touched what it gave::

    Image.open(path), self.loader(path)    a Picture, which says that it is a PIL image
    picture.convert("RGB")                 a Picture
    decode_image(path)                     a FileTensor: see file_tensor.py
    self.transform(picture)                a Result, which says that it is a tensor
    the sample that leaves the dataset     an EncodedImage

A Picture that is used in another way stands for the real one, whose pixels the transform takes as
they are at that moment, as it does of any real picture or tensor. A Result cannot be used at all.
An error that the dataset catches refuses the sample as well.

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
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, cast

import numpy as np
import torch

from gpuprefetch.core.nested import Leaf, Sample, map_leaves, select
from gpuprefetch.images.apart import image_of
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.folder import read_image, read_open
from gpuprefetch.images.guard import (
    Encoded,
    EndlessFaultsError,
    Messages,
    UndecodedError,
    begin_reading,
    faults,
    is_marked,
)
from gpuprefetch.images.header import read_header
from gpuprefetch.images.host_memory import lacks_memory
from gpuprefetch.images.joint import Promised, state_of
from gpuprefetch.images.places import ViewPlace
from gpuprefetch.images.ppm import to_ppm
from gpuprefetch.images.recorded import CONVERSIONS, GEOMETRY, SAME_SIZE, Joint
from gpuprefetch.lists.forms import PICTURES
from gpuprefetch.lists.rgb import Modes
from gpuprefetch.lists.views import ENCODED
from gpuprefetch.migrate.file_tensor import FileTensor, ReadFile
from gpuprefetch.migrate.replaced import reading
from gpuprefetch.migrate.sample import current
from gpuprefetch.migrate.taken import BY_HAND, Takes, form_of

if TYPE_CHECKING:
    from PIL import Image

AS_IT_IS = (
    "The loader may also stay as it is: DataPrefetcher(loader) moves the batches that its workers "
    "make ahead of the loop."
)
TWO_WAYS = (
    "Two ways work. Let a folder apply the transform, and a Subset choose the samples: "
    "Subset(ImageFolder(root, transform), indices). Or let __getitem__ return "
    f"{ENCODED} and apply no transform, and write {BY_HAND}"
)
OF_TENSORS = (
    "This transform takes tensors: there it is to begin with v2.ToImage(), v2.Compose([v2.ToImage()"
    ", transform]), and the folder needs loader=decode_image."
)
SEEDED = (
    "On the device each image is sampled anew. Those that __getitem__ returns as "
    f"{ENCODED}, without any transform, have the same random parameters as the other images of "
    f"their sample, and a tv_tensors.Mask beside one follows it: {BY_HAND} {AS_IT_IS}"
)
IN_WORKERS = "let the workers decode and call it: accelerate(loader, keep_unknown=True)."
NO_PICTURE = (
    "It takes PIL images, and tensors (3, H, W) of uint8 on the CPU. If it begins with "
    "ToPILImage(), it takes what that takes, and if it begins with ToTensor() or ToImage(), arrays "
    f"(H, W, 3) of uint8. Or let __getitem__ return {ENCODED}, apply no transform, and write "
    f"{BY_HAND} The same line takes tensors (C, H, W) that are all of one size."
)
IN_THREAD = (
    "calls its transform in a thread that it has started. Let that thread read the picture only, "
    "and call the transform where __getitem__ is called."
)
OF_THREADS = (
    "gave what __getitem__ has made in threads that the dataset has started. Let it ask for its "
    "samples where it is called: [self[index] for index in indices]. It only reads files here: "
    "the prefetcher decodes them, and more workers read more of them at a time."
)
KEPT = (
    "gave an image that it keeps from one call to the next, or has encoded itself. Here images are "
    "not transformed yet, and its own samples would not be either. Let it keep the "
    "bytes of files, and call its transform each time."
)


# --- A picture, before the transform ---


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
                current.hide(self)
                raise
        return self._real

    def _open(self) -> Image.Image:
        real = _pil_open.original(io.BytesIO(self._file.data))
        real.filename = self._file.path
        return cast("Image.Image", real)

    def judge(self, source: Any) -> None:
        """Have PIL open the file: the dataset may catch its error.

        Args:
            source: what the dataset opens. It is asked for the error, which names it.
        """
        if self._file._fault and not os.path.isdir(source):  # noqa: PTH112
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
            current.hide(self)
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
        if id(self._file.data) not in files:
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
_OWN = frozenset({"_file", "_is_decoded", "_is_rgb", "_loads", "_real", "touched"})


@functools.cache
def _broken() -> tuple[type[Exception], ...]:
    """What PIL raises for a file that it cannot open; a warning may be an error."""
    from PIL import Image

    return OSError, ValueError, SyntaxError, Warning, Image.DecompressionBombError


def _note(error: Exception) -> None:
    """Note PIL's error for a bad file, which the dataset gets."""
    if not lacks_memory(error):
        current.gets(error)


# --- What its transform gave ---


class Unusable(Encoded):
    """What a transform would have given: nothing can be done to it but to pass it on."""

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance() goes by
        return torch.Tensor

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_use(f".{name}")

    def __array__(self, *args: object, **named: object) -> NoReturn:
        _refuse_use("NumPy")

    @classmethod
    def __torch_function__(cls, *call: object, **named: object) -> NoReturn:
        _refuse_use("a function of torch")

    def __eq__(self, other: object) -> bool:
        if other is not None:  # which a tensor may be compared with, too
            _refuse_use("==")
        return False

    __hash__ = object.__hash__

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # A file of it would be read in the place of an image.
        _refuse_use("copy or pickle")


def _refuse_use(name: str) -> NoReturn:
    raise UndecodedError(
        f"what the transform gave is used in __getitem__, by {name}, and it is not transformed "
        "yet. Put that into the transform, or do it to the batch in the loop."
    )


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Unusable, *others: object) -> NoReturn:
        _refuse_use(name)

    return refuse


_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
_OTHERS = "lt le gt ge neg pos abs invert len iter getitem setitem bool float int".split()
for _name in [f"{kind}{op}" for op in _ARITHMETIC for kind in ("", "r", "i")] + _OTHERS:
    setattr(Unusable, f"__{_name}__", _refusing(f"__{_name}__"))


class Result(Unusable, EncodedImage):
    """What a transform gave for a picture, until the sample has left its dataset."""

    __slots__ = ()

    @staticmethod
    def of(file: EncodedImage) -> Result:
        result = Result(file.data, file.index, file.path)
        result._know(file)
        # Each call of a transform samples anew, so the images of a sample are sampled one by one.
        result._set_apart()
        return result


class LaterView(Unusable, ViewPlace):
    """A view that a transform gave beside its :class:`Result`, until the sample has left."""

    __slots__ = ()


class LeftEncoded:
    """Stands for a transform that runs on the device.

    Args:
        takes: what the transform takes.
        transform: itself, if it also takes what is beside the picture: the workers run it then.
    """

    def __init__(self, takes: Takes, transform: Callable[..., object] | None = None) -> None:
        self.takes = takes
        self.transform = transform

    def __call__(self, *given: object, **named: object) -> object:
        if self.transform is not None and len(given) > 1 and not named:
            return self._put_off(self.transform, given)
        result = Result.of(self._image_of(only_argument(given, named)))
        note_result(result)
        return result

    def _put_off(
        self, transform: Callable[..., object], given: tuple[object, ...]
    ) -> tuple[object, ...]:
        """What stands for the results of a transform of a picture and what is beside it."""
        first = given[0]
        others = tuple(_replaced(_real, [*given[1:]], (FileTensor,)))
        kind = form_of(first).kind
        result = Result.of(self._image_of(first))
        is_pure = kind is torch.Tensor
        result._put_off(Joint(transform, others, kind is not None, is_pure, state_of(others)))
        note_result(result)
        return result, *(Promised(result, number) for number in range(len(others)))

    def _image_of(self, given: object) -> EncodedImage:
        """The file of a picture that nothing has touched, and else one of its pixels."""
        if type(given) in (Result, LaterView):
            raise UndecodedError("the transform is called with what it has given already.")
        if isinstance(given, Encoded) and type(given) is not Picture:
            raise UndecodedError(
                "the transform is called with an EncodedImage. Pass transforms to DataPrefetcher."
            )
        if isinstance(given, FileTensor):
            return self._file_of(given)
        if type(given) is not Picture:
            name = "an image" if isinstance(given, torch.Tensor) else "a picture"
            return self._decoded(given, name, current.latest_use())
        if given.reaches("transform").touched or self.takes.opener is not None:
            return self._decoded(given.as_read(), given.name, given.use, given.path)
        return given.left_encoded(self.takes)

    def _file_of(self, given: FileTensor) -> EncodedImage:
        """The file of a tensor that nothing has touched, and else one of its pixels."""
        read = given.read
        if (file := read.left_encoded(self.takes)) is not None:
            return file
        return self._decoded(read.pixels(), read.name, read.use, read.path)

    def stand_in_for(self, given: object) -> Picture | FileTensor:
        """What stands for a file that nothing has touched: of the pixels of what is given."""
        if type(given) is Picture and not given.reaches("transform").touched:
            return given
        if type(given) is FileTensor and given.read.left_encoded(self.takes) is not None:
            return given
        file = self._image_of(given)
        if isinstance(given, torch.Tensor):
            return FileTensor.of_file(file)
        return Picture(file, is_rgb=True)

    def _decoded(self, given: object, name: str, use: str, path: str = "") -> EncodedImage:
        """A file of the pixels of what the transform gets."""
        pixels = self.takes.pixels_of(given, name)
        if pixels is None:
            raise UndecodedError(f"the transform gets a {_described(given)}. {NO_PICTURE}")
        decodes.add(use)
        return EncodedImage(to_ppm(pixels), current.index, path)


def only_argument(given: Sequence[object], named: Mapping[str, object]) -> object:
    """What a transform is called with, and nothing else."""
    if len(given) != 1 or named:
        raise UndecodedError(
            f"the transform is called with {len(given) + len(named)} arguments, and not with "
            "one picture."
        )
    return given[0]


@functools.cache
def _know_functions() -> None:
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


def _described(given: object) -> str:
    """What the transform gets, in words, where that is no picture."""
    kind = type(given)
    name = f"{kind.__module__}.{kind.__name__}".removeprefix("builtins.")
    if not isinstance(given, (np.ndarray, torch.Tensor)):
        return name
    place = ""
    if isinstance(given, torch.Tensor) and given.device.type != "cpu":
        place = f" on {given.device}"
    return f"{name} of {given.dtype} {tuple(given.shape)}{place}"


# --- A sample ---


def note_result(result: Result | LaterView) -> None:
    """Note what a transform gave: the sample has to hold it."""
    if current.results is None:
        return
    current.results.append(result)
    if len(current.results) > 1 and current.is_seeded_anew:
        raise UndecodedError(
            "torch's seed is set between the images of a sample, so that they are sampled alike. "
            f"{SEEDED}"
        )


def has_result() -> bool:
    """Whether a transform has given something for this sample."""
    return bool(current.results)


# What each picture whose pixels are handed on shows of why: what was done with its file, or "".
decodes = Messages()


def read_sample(get: Callable[[], Sample], who: str, key: object, ways: str = TWO_WAYS) -> Sample:
    """A sample of a view, with an :class:`EncodedImage` for each result of its transform.

    Args:
        get: gives the sample. Views within views are asked in it.
        who: is asked, for messages.
        key: of the sample in its dataset.
        ways: what to write in place of a dataset that is refused.

    Raises:
        UndecodedError: if its transform got no picture, or what it gave was touched.
    """
    if current.results is not None:
        return get()
    if "torchvision.transforms.v2.functional" in sys.modules:  # else nobody can call them
        _know_functions()
    read = functools.partial(_attempt, get, who, key, ways)
    with reading:
        try:
            return _decided(read, key)
        finally:
            current.forget_error()


def _decided(read: Callable[..., Sample], key: object) -> Sample:
    """The sample that a dataset decides on; what it has none for is for the prefetcher.

    No variable here holds an error, whose traceback holds the frames of all callers.
    """
    try:
        sample = read(keeps_back=False)
    except Exception as error:
        if error is not current.raised:
            raise
        with contextlib.suppress(Exception):
            return read(keeps_back=True)
        raise
    if current.raised is not None and _lacks_an_image(sample, key):
        with contextlib.suppress(Exception):
            return read(keeps_back=True)
    return sample


def _lacks_an_image(sample: Sample, key: object) -> bool:
    """Whether a sample has no image, or one of several that were asked for in one call."""
    several = isinstance(key, list) and isinstance(sample, list)
    return any(image_of(each) is None for each in (sample if several else [sample]))


def _attempt(
    get: Callable[[], Sample], who: str, key: object, ways: str, *, keeps_back: bool
) -> Sample:
    begun = current.begun(key, _called.__code__, keeps_back=keeps_back)
    with faults as messages, begun as results:
        try:
            sample = _shown(get, who, ways, messages, results)
            _refuse_left(results)
        finally:
            for picture in _kept_of(current.opened):
                if type(picture) is Picture:  # else a module got it, and it is real
                    picture.become_real()
            for each in current.opened:
                if type(each) is ReadFile:
                    each.forget_error()
    for result in results:
        # The sample has it wherever the dataset has put it, so it stays the same object.
        kind = ViewPlace if type(result) is LaterView else EncodedImage
        vars(object)["__class__"].__set__(result, kind)
    return sample


def _refuse_left(results: list[Encoded]) -> None:
    """Raise a library's error for a bad file of a sample, if nothing else would tell of it."""
    error = _error_left(results)
    try:
        if error is not None:
            raise error
    finally:
        del error  # its traceback holds this frame


def _error_left(results: list[Encoded]) -> Exception | None:
    """The error to raise; None if something else tells of it, or there is none."""
    read = [each for each in current.opened if type(each) is ReadFile]
    left = [each.error_left() for each in read]
    if current.hides:
        files = _data_of(results)
        left += [each.error_left(files) for each in [*current.hides] if type(each) is Picture]
    return next(filter(None, left), None)


def _data_of(made: list[Encoded]) -> set[int]:
    """The identities of the bytes that results stand for."""
    return {id(result.data) for result in made if isinstance(result, EncodedImage)}


def _called(get: Callable[[], Sample]) -> Sample:
    """Call a dataset: what is called from here on is its code."""
    return get()


def _shown(
    get: Callable[[], Sample],
    who: str,
    ways: str,
    messages: list[str],
    results: list[Encoded],
) -> Sample:
    """A sample that shows what became of its pictures."""
    try:
        sample = _called(get)
    except (Exception, EndlessFaultsError) as error:
        if messages:
            raise _refusal(who, messages, ways) from error
        raise
    if messages:  # and the dataset has caught the error
        raise _refusal(who, messages, ways)
    if fault := _fault_of(sample, results):
        raise UndecodedError(f"{who} {fault} {_fitting(ways)}")
    return _replaced(_left, sample, (Picture, FileTensor))


def _replaced(fn: Callable[[Leaf], Leaf], sample: Sample, kinds: tuple[type, ...]) -> Sample:
    """A sample with ``fn`` applied to its leaves; the same one if it has none of these kinds."""
    if not any(type(leaf) in kinds for leaf in select(sample, _is_not_real)):
        return sample
    return map_leaves(fn, sample, _is_not_real)


def _is_not_real(leaf: Leaf) -> bool:
    return is_marked(leaf) or type(leaf) is FileTensor


def _left(leaf: Leaf) -> Leaf:
    """What a sample holds in the place of a stand-in."""
    return LeftBehind(leaf.name) if type(leaf) is Picture else _real(leaf)


def _real(leaf: Leaf) -> Leaf:
    """The pixels of a tensor that has none yet, and anything else as it is."""
    return leaf.read.pixels() if type(leaf) is FileTensor else leaf


def _kept_of(opened: list[object]) -> list[Picture]:
    """The pictures of a sample that something else than this list holds."""
    counts = _references(opened)
    kept = [each for each, n in zip(opened, counts, strict=True) if n > _ALONE]
    return [each for each in kept if type(each) is Picture]


def _references(objects: Sequence[object]) -> list[int]:
    return [sys.getrefcount(each) for each in objects]


_ALONE = _references([object()])[0]


def _refusal(who: str, messages: list[str], ways: str) -> UndecodedError:
    message = f"{who}: {messages[0]}"
    messages.clear()  # the refusal is one of its own
    told = message.endswith(IN_WORKERS) or BY_HAND in message
    return UndecodedError(message if told else f"{message} {_fitting(ways)}")


def _fitting(ways: str) -> str:
    """What to write, for the images that the dataset has read in this sample."""
    reads_tensors = any(type(each) is ReadFile for each in current.opened)
    return f"{ways} {OF_TENSORS}" if reads_tensors and ways == TWO_WAYS else ways


def _fault_of(sample: Sample, made: list[Encoded]) -> str:
    """Why a sample does not show what becomes of its pictures; empty if it does."""
    marked = select(sample, is_marked)
    images = [image for image in marked if type(image) is not Picture]
    files = _data_of(made)
    for picture in marked:
        if type(picture) is Picture and not (made and picture.is_among(files)):
            return "gave a picture that its transform did not get."
    results = {id(result) for result in made}
    for image in images:
        if id(image) not in results:
            return _of_another_sample(image)
    if any(type(result) is LaterView for result in made):
        if len(images) < len(made):
            return "leaves out a view that its transform has made."
        if len(images) > len(made):
            return "gives a view in two places. Let the transform return it twice."
    if images:
        return ""
    if made:
        return "gave no image, though its transform has made one."
    return transformed_already(sample)


def _of_another_sample(image: Encoded) -> str:
    """Why a sample cannot hold an image that its own transform has not given."""
    if type(image) is Result:
        return IN_THREAD
    is_new = isinstance(image, EncodedImage) and image._apart and image._made >= current.since
    return OF_THREADS if is_new else KEPT


def transformed_already(sample: Sample) -> str:
    """The fault of a sample whose image is a tensor; empty without any."""
    if not isinstance(image_of(sample), torch.Tensor):
        return ""
    return (
        "gave an image that is transformed already: one that it has kept, or that another "
        "transform than its own has made. Let it call its transform each time."
    )


# --- PIL.Image.open ---


def _pil() -> object:
    from PIL import Image

    return Image


def _open(fp: Any, mode: str = "r", formats: Any = None) -> Any:
    """PIL.Image.open, for a thread that reads a sample of a view."""
    if mode != "r" or formats is not None:
        return _pil_open.original(fp, mode, formats)
    if isinstance(fp, (str, bytes, os.PathLike)):
        return opened(read_path(os.fsdecode(fp)), fp)
    return opened(read_file(fp, getattr(fp, "name", "")), fp)


def opened(file: EncodedImage, source: Any) -> Picture:
    """The picture of a file that a dataset opens: PIL's error, where that may be caught."""
    picture = Picture(file, is_rgb=False)
    header = file._read_if_jpeg()
    if not (header is not None and header.plain) and current.may_catch:
        picture.judge(source)
    return picture


def opened_as_rgb(file: EncodedImage, source: Any) -> Any:
    """The same of a file that is converted to RGB at once."""
    header = file._read_if_jpeg()
    if not (header is not None and header.plain) and current.may_catch:
        return opened(file, source).convert("RGB")
    return Picture(file, is_rgb=True)


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
