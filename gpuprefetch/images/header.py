"""Read the header of an encoded image, and decode the image on the CPU as PIL does, bit for bit.

A header says what a file is, how large its picture is, how it is turned, and whether the GPU may
decode it.
"""

from __future__ import annotations

import contextlib
import io
import re
import struct
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.images.host_memory import has_room, lacks_memory
from gpuprefetch.images.jpeg import JPEG, Span, exif_spans, read_jpeg
from gpuprefetch.images.ppm import decode_ppm, read_ppm

if TYPE_CHECKING:
    from PIL import Image

Region: TypeAlias = tuple[slice, slice]  # rows and columns of a picture
WHOLE: Region = (slice(None), slice(None))

# Scans that a JPEG of the most pixels may have. A decoder goes over the whole picture for each
# scan, even for one of 12 bytes, at 35 ns a block of 64 pixels: 2 seconds for 16 scans.
MAX_SCANS = 16
# Memory that Pillow needs at most in _decode_other(), in bytes a pixel: 16 of a WebP and 7 of other
# pictures, which it has once, with 4 bytes, beside the 3 bytes of the result.
PILLOW_BYTES = 17
STRIP = 1 << 19  # pixels that are converted at a time
# Memory that Pillow needs to read a header, besides some copies of the file.
_HEADER_ROOM = 16 << 20


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What the bytes of an encoded image say about it.

    Attributes:
        format: PIL's name for it in lower case, by content and not by file name.
        height: of the picture as it is stored.
        width: of the same.
        orientation: EXIF's, 1 to 8. It is 1 if it is broken, and for a TIFF, which PIL turns
            whenever it decodes one.
        gpu: whether nvJPEG gives libjpeg's picture: see Note [Files for the GPU].
        exif: byte spans in a JPEG. With zeros over them no decoder finds an orientation.
        clipped: PIL's mode of a picture whose values ``convert("RGB")`` clips to 0 to 255, or "".
        damaged: whether it is a damaged JPEG that only Pillow reads, with LOAD_TRUNCATED_IMAGES.
        components: of a pixel of a JPEG; 0 where they are not known.
        plain: whether it is a JPEG for the GPU without metadata that may keep PIL from opening it.

    Example:
        A photo of 500 x 375 pixels has ``ImageHeader("jpeg", 375, 500, gpu=True)``. A camera that
        was held upright adds ``orientation=6, exif=((6, 16),)``.
    """

    format: str
    height: int
    width: int
    orientation: int = 1
    gpu: bool = False
    exif: tuple[Span, ...] = ()
    clipped: str = ""
    damaged: bool = False
    components: int = field(default=0, compare=False)
    plain: bool = field(default=False, compare=False)

    @property
    def is_sound(self) -> bool:
        """Whether Pillow, torchvision and TorchCodec decode the file without an error.

        They do so of each file for the GPU, whatever is in its compressed data. Of any other file
        only a decode can tell.
        """
        return self.gpu


def read_header(data: bytes | memoryview, *, oriented: bool = True) -> ImageHeader:
    """Read format and size of a file, or raise ValueError if it is no good image.

    Args:
        data: the file's bytes.
        oriented: whether to look for its EXIF orientation. PIL warns of broken metadata then: see
            Note [PIL's own settings].
    """
    data = bytes(data)
    try:
        header = _read(data, oriented)
        if header.format == "jpeg" or read_ppm(data) is not None:
            _warn_of_size(header)
    except (IndexError, struct.error) as error:
        raise ValueError(f"broken or truncated header, in a file of {len(data)} bytes") from error
    except Warning as error:  # a warning filter of the program made it an error
        raise ValueError(f"{type(error).__name__}: {error}") from error
    limit = max_pixels()
    pixels = header.height * header.width
    if pixels == 0 or (limit is not None and pixels > limit):
        raise ValueError(
            f"an image of {header.width} x {header.height} = {pixels} pixels is outside the limits "
            f"of 1 to {limit or 'any number'}: its header is broken or it is a decompression bomb"
        )
    return header


# Note [PIL's own settings]
# A program may set PIL's module variables and Python's warning filters, and a plain DataLoader
# obeys them. This package reads them at each call, in the process that decodes, and sets none.
#   1. Image.MAX_IMAGE_PIXELS: PIL refuses an image of more than twice as many pixels. So does this
#      package, even for a JPEG that PIL never sees. PIL warns of an image of more than once as
#      many. If the program's filters make an error of the warning, the file is bad for this reason.
#   2. ImageFile.LOAD_TRUNCATED_IMAGES: Pillow decodes a JPEG that TorchCodec refuses. The GPU gets
#      no such file: see Note [Files for the GPU].
#   3. Warning filters: none is set, not even for one call, as warnings.catch_warnings() swaps the
#      list that all threads share. PIL warns of broken EXIF data if an orientation is asked for.
# test_format.py::test_pils_settings and test_faults.py::test_nothing_global_changes hold them.


def max_pixels() -> int | None:
    """The most pixels of an image before PIL raises DecompressionBombError; None without bound."""
    from PIL import Image

    return None if Image.MAX_IMAGE_PIXELS is None else int(2 * Image.MAX_IMAGE_PIXELS)


def _warn_of_size(header: ImageHeader) -> None:
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS
    pixels = header.height * header.width
    if limit is not None and limit < pixels <= 2 * limit:
        warnings.warn(
            f"Image size ({pixels} pixels) exceeds limit of {limit} pixels, could be decompression "
            "bomb DOS attack.",
            Image.DecompressionBombWarning,
            stacklevel=2,
        )


def loads_truncated() -> bool:
    """Whether the program has Pillow decode truncated files."""
    from PIL import ImageFile

    return bool(ImageFile.LOAD_TRUNCATED_IMAGES)


def read_if_jpeg(data: bytes) -> ImageHeader | None:
    """What :func:`read_header` says of a JPEG; None where it would warn or fail, and of others."""
    if not data.startswith(JPEG):
        return None
    from PIL import Image

    try:
        header = _read_jpeg(data, oriented=False)
    except (ValueError, IndexError, struct.error):
        return None
    limit = Image.MAX_IMAGE_PIXELS  # PIL warns of a larger picture
    pixels = header.height * header.width
    return header if pixels and (limit is None or pixels <= limit) else None


# How many bytes of a large file are read, if it is no image.
_BEGINNING = 64 << 10
# How many bytes are read of an image: 64 MiB beside the pixels, and 32 bytes a pixel. Uncompressed
# pixels need up to 16 bytes, and 18 as text.
_BESIDE = 64 << 20
_PER_PIXEL = 32
# Formats whose first picture is read from the front to its end. Others, as TIFF, have no order.
_IN_ORDER = {"JPEG", "MPO", "PNG", "GIF", "BMP", "PPM"}


def bytes_worth_reading(file: BinaryIO, size: int) -> int:
    """How many of an open file's ``size`` bytes to read: few if it does not begin as an image."""
    load_decoders()
    from PIL import Image

    try:
        with Image.open(file) as picture:
            width, height = picture.size
            if picture.format in _IN_ORDER:
                return min(size, _BESIDE + _PER_PIXEL * width * height)
            return size
    except MemoryError:
        raise
    except Exception:  # the decoder will say what is wrong with the file
        return min(size, _BEGINNING)


def decode_cpu(
    data: bytes | memoryview | torch.Tensor,
    header: ImageHeader | None = None,
    *,
    apply_exif: bool = False,
    divisor: int = 1,
    part: Region = WHOLE,
) -> torch.Tensor:
    """Decode one image on the CPU as ``PIL.Image.open(file).convert("RGB")`` does, bit for bit.

    Transparency is dropped, not blended. The first frame of an animation is decoded. An orientation
    that a JPEG has only in XMP is ignored.

    Args:
        data: the file's bytes.
        header: of the file, if it has been read.
        apply_exif: whether to turn the picture upright.
        divisor: 2, 4 or 8 decodes a JPEG to that fraction of its size, rounded up.
        part: the rows and columns to return, of the picture that is divided and turned.

    Returns:
        ``(3, H, W)`` uint8.

    Raises:
        ValueError: for a truncated or broken file.
        MemoryError: for a lack of memory.
    """
    data = data.numpy().tobytes() if isinstance(data, torch.Tensor) else bytes(data)
    header = header or read_header(data, oriented=apply_exif)
    turns = apply_exif and header.orientation > 1
    early = WHOLE if turns else part
    if header.format == "jpeg" and divisor == 1 and not header.damaged:
        found = _cut(_decode_jpeg(data, header), early)
    elif (ppm := read_ppm(data)) is not None:
        found = _cut(torch.from_numpy(decode_ppm(data, ppm)).permute(2, 0, 1), early)
    else:
        found = _decode_other(data, divisor, early)
    if found.shape != (3, -(-header.height // divisor), -(-header.width // divisor)):
        raise ValueError(
            f"broken {header.format} image: it was decoded to {found.shape}, "
            f"but its header says {header.width} x {header.height} pixels"
        )
    if not turns:
        return found.image
    turned = found.image.mT if header.orientation >= 5 else found.image
    return turned.flip(((), (-1,), (-2, -1), (-2,))[(header.orientation - 1) % 4])[:, *part]


class _Decoded(NamedTuple):
    """A picture, or a part of it."""

    image: torch.Tensor
    shape: tuple[int, ...]  # of the whole picture


def _cut(image: torch.Tensor, part: Region) -> _Decoded:
    return _Decoded(image[:, *part], tuple(image.shape))


@cache
def load_decoders() -> None:
    """Import the decoders. Call this before workers are forked.

    A process that is forked while a thread imports a module has the module's lock without the
    thread that holds it, and would hang.
    """
    import numpy.ma  # noqa: F401  # numpy does so at the first unique()

    with contextlib.suppress(Exception):  # a loader without images needs none; others get an error
        from PIL import Image

        Image.init()
        from torchcodec import decoders  # noqa: F401  # as _decode_jpeg() does


def blank(data: bytes | memoryview, spans: Sequence[Span]) -> bytearray:
    """A copy of the data with zeros over some spans."""
    copied = bytearray(data)
    for start, stop in spans:
        copied[start:stop] = bytes(stop - start)
    return copied


def reason_of(error: RuntimeError) -> str:
    """What TorchCodec or torchvision says, without the C++ function, file and line before it."""
    return re.sub(r"^.*\.cpp:\d+, ", "", str(error).partition("\n")[0])


def _decode_jpeg(data: bytes, header: ImageHeader) -> torch.Tensor:
    from torchcodec import decoders

    encoded = torch.frombuffer(blank(data, header.exif), dtype=torch.uint8)
    try:
        image: torch.Tensor = decoders.decode_jpeg(encoded)
    except RuntimeError as error:
        reason = reason_of(error)
        # Only some versions pass on the words of torch's allocator.
        if lacks_memory(error) or not has_room(3 * header.height * header.width):
            raise MemoryError(reason) from error
        if loads_truncated():
            return _decode_other(data).image
        raise ValueError(f"broken or truncated jpeg image: {reason}") from error
    return image


@contextlib.contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """A ``PIL.Image.Image``; whatever PIL raises in the block becomes a ValueError.

    It becomes a MemoryError if there is not enough memory for a good picture of this size. PIL's
    own error does not tell the two apart: libjpeg reports a lack of memory as a broken data stream,
    and a few wrong bytes may ask for more memory than any machine has.
    """
    load_decoders()
    from PIL import Image, UnidentifiedImageError

    room = _HEADER_ROOM + 4 * len(data)
    try:
        with Image.open(io.BytesIO(data)) as picture:
            room += PILLOW_BYTES * picture.width * picture.height
            yield picture
    except UnidentifiedImageError:
        begins = f"it begins with {data[:12]!r}" if data else "it is empty"
        raise ValueError(
            "neither a JPEG nor another image that Pillow reads (PNG, WebP, GIF, BMP, TIFF, ...), "
            f"or its header is broken: {begins}"
        ) from None
    except Exception as error:  # PIL does not document what it raises for damaged files
        if not has_room(room):
            raise MemoryError(str(error)) from error
        raise ValueError(f"broken or truncated image: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _forgiven() -> Iterator[None]:
    """Read metadata in this block: broken metadata count as none."""
    try:
        yield
    except (MemoryError, Warning):
        raise
    except Exception as error:
        if lacks_memory(error):
            raise


def _read(data: bytes, oriented: bool) -> ImageHeader:
    if (ppm := read_ppm(data)) is not None:
        return ImageHeader("ppm", ppm.height, ppm.width)
    if not data.startswith(JPEG):
        return _read_other(data, oriented)
    try:
        return _read_jpeg(data, oriented)
    except _BombError:
        raise
    except (ValueError, IndexError, struct.error):
        if not loads_truncated():
            raise
        return replace(_read_other(data, oriented), damaged=True)


def _read_other(data: bytes, oriented: bool) -> ImageHeader:
    from PIL import Image

    with _opened(data) as picture:
        kind = picture.format.lower()
        width, height = picture.size
        orientation = 1
        if oriented or kind == "tiff":
            with _forgiven():
                if kind == "png" and not _ends_with_pixels(data):
                    picture.load()  # with the metadata after the pixels
                # PngImageFile.getexif() would decode every picture without an orientation.
                orientation = _orientation(Image.Image.getexif(picture))
        if kind == "tiff":  # PIL turns the picture as it decodes; before 11.1, the size only then
            width = picture.tag_v2[256]
            height = picture.tag_v2[257]
            if orientation >= 5:
                width, height = height, width
            orientation = 1
        clipped = picture.mode if picture.mode[0] in _DEEP else ""
    return ImageHeader(kind, height, width, orientation, clipped=clipped)


def _ends_with_pixels(png: bytes) -> bool:
    last = png.rfind(b"IDAT")
    end = last + 8 + int.from_bytes(png[last - 4 : last])
    return png[end + 4 : end + 8] == b"IEND"


def _decode_other(data: bytes, divisor: int = 1, part: Region = WHOLE) -> _Decoded:
    with _opened(data) as picture:
        if divisor > 1:
            picture.draft("RGB", [side // divisor for side in picture.size])
        picture.load()
        picture.info.pop("transparency", None)  # convert() drops it with a warning
        pixels = _rgb(picture, part)
        width, height = picture.size
    return _Decoded(torch.from_numpy(pixels).permute(2, 0, 1), (3, height, width))


def _rgb(picture: Image.Image, part: Region) -> npt.NDArray[np.uint8]:
    """``(H, W, 3)``, a picture of Pillow's or a part of it.

    Pillow copies a picture two or three times on its way to NumPy. Each copy of a large one is
    memory that the process has to be given first: 12 megapixels cost 130 ms at once, and 30 strip
    by strip.
    """
    width, height = picture.size
    rows = range(height)[part[0]]
    columns = range(width)[part[1]]
    pixels = np.empty((len(rows), len(columns), 3), dtype=np.uint8)
    step = max(STRIP // width, 1)
    for top in range(rows.start, rows.stop, step):
        bottom = min(top + step, rows.stop)
        box = (columns.start, top, columns.stop, bottom)
        strip = picture if box == (0, 0, width, height) else picture.crop(box)
        # convert() copies what is in RGB already.
        rgb = strip if strip.mode == "RGB" else strip.convert("RGB")
        pixels[top - rows.start : bottom - rows.start] = np.asarray(rgb)
    return pixels


def _orientation(exif: Any) -> int:
    """The orientation in a ``PIL.Image.Exif``; 1 if it has no valid one."""
    found = exif.get(0x0112, 1)
    return int(found) if found in range(1, 9) else 1


_DEEP = "IF"  # PIL's modes of one channel with more than 8 bits begin with these: I, I;16B, F


class _BombError(ValueError):
    """A file that could be read, and is refused."""


def _read_jpeg(data: bytes, oriented: bool) -> ImageHeader:
    jpeg = read_jpeg(data)
    pixels = jpeg.scans * jpeg.height * jpeg.width
    limit = max_pixels()
    if jpeg.scans > 1 and limit is not None and pixels > MAX_SCANS * limit:
        raise _BombError(
            f"a JPEG with {jpeg.scans} scans of {jpeg.height * jpeg.width} pixels is outside the "
            f"limit of {MAX_SCANS * limit} for all of them: it is a decompression bomb"
        )
    orientation = _read_exif(data, jpeg.app1) if oriented and jpeg.app1 else 1
    spans = exif_spans(data, [*jpeg.app1, *jpeg.later_app1])
    return ImageHeader(
        "jpeg",
        jpeg.height,
        jpeg.width,
        orientation,
        jpeg.gpu,
        spans,
        components=jpeg.components,
        plain=jpeg.plain,
    )


def _read_exif(data: bytes, segments: Sequence[Span]) -> int:
    """The orientation that PIL finds in a JPEG's APP1 segments. PIL joins what several hold."""
    from PIL import Image

    held = b"".join(data[a + 6 : b] for a, b in segments if data.startswith(b"Exif\0\0", a, b))
    with _forgiven():
        found = Image.Exif()
        found.load(held)
        return _orientation(found)
    return 1
