"""Read the header of an encoded image, and decode the image on the CPU as PIL does, bit for bit.

A header says what a file is, how large its picture is, and whether the GPU may decode it. Most of
this file answers the last question: see Note [Files for the GPU].
"""

import contextlib
import io
import re
import struct
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, BinaryIO

import numpy as np
import torch

from gpuprefetch.images.host_memory import has_room, lacks_memory

# Scans that a JPEG of the most pixels may have. A decoder goes over the whole picture for each
# scan, even for one of 12 bytes, at 35 ns a block of 64 pixels: 2 seconds for 16 scans.
MAX_SCANS = 16
# Memory that Pillow needs at most in _decode_other(), in bytes a pixel: two pictures of 4 bytes,
# and three copies of their 3 bytes. The coefficients of a progressive JPEG need 6, but earlier.
PILLOW_BYTES = 17
# Memory that Pillow needs to read a header, besides some copies of the file.
_HEADER_ROOM = 16 << 20


Span = tuple[int, int]  # first byte, and the one after the last


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
        if header.format == "jpeg":
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
# A program sets PIL's module variables and Python's warning filters, and a plain DataLoader obeys
# them. So does this package: it reads them at each call, in the process that decodes. It sets none.
#   1. Image.MAX_IMAGE_PIXELS: PIL refuses an image of more than twice as many pixels, and so do we,
#      also a JPEG that PIL never sees. Above once as many PIL warns, with the program's filters. An
#      error that these make of it is a bad file's reason, as a plain loader would raise it.
#   2. ImageFile.LOAD_TRUNCATED_IMAGES: a JPEG that our decoder refuses is what Pillow makes of it.
#      The GPU gets no such file: see Note [Files for the GPU].
#   3. No filter is set, not even for one call: warnings.catch_warnings() swaps the list that all
#      threads share. PIL's warnings of broken EXIF data come where an orientation is asked for.
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


def _loads_truncated() -> bool:
    from PIL import ImageFile

    return bool(ImageFile.LOAD_TRUNCATED_IMAGES)


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
) -> torch.Tensor:
    """Decode one image on the CPU as ``PIL.Image.open(file).convert("RGB")`` does, bit for bit.

    Transparency is dropped, not blended. The first frame of an animation is decoded. An orientation
    that a JPEG has only in XMP is ignored.

    Args:
        data: the file's bytes.
        header: of the file, if it has been read.
        apply_exif: whether to turn the picture upright.
        divisor: 2, 4 or 8 decodes a JPEG to that fraction of its size, rounded up.

    Returns:
        ``(3, H, W)`` uint8.

    Raises:
        ValueError: for a truncated or broken file.
        MemoryError: for a lack of memory.
    """
    data = data.numpy().tobytes() if isinstance(data, torch.Tensor) else bytes(data)
    header = header or read_header(data, oriented=apply_exif)
    if header.format == "jpeg" and divisor == 1 and not header.damaged:
        image = _decode_jpeg(data, header)
    else:
        image = _decode_other(data, divisor)
    if image.shape != (3, -(-header.height // divisor), -(-header.width // divisor)):
        raise ValueError(
            f"broken {header.format} image: it was decoded to {tuple(image.shape)}, "
            f"but its header says {header.width} x {header.height} pixels"
        )
    if apply_exif and header.orientation > 1:
        turned = image.mT if header.orientation >= 5 else image
        image = turned.flip(((), (-1,), (-2, -1), (-2,))[(header.orientation - 1) % 4])
    return image


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


def _decode_jpeg(data: bytes, header: ImageHeader) -> torch.Tensor:
    from torchcodec import decoders

    encoded = torch.frombuffer(blank(data, header.exif), dtype=torch.uint8)
    try:
        image: torch.Tensor = decoders.decode_jpeg(encoded)
    except RuntimeError as error:
        # TorchCodec's messages begin with the C++ function, file and line.
        reason = re.sub(r"^.*\.cpp:\d+, ", "", str(error).partition("\n")[0])
        # Only some versions pass on the words of torch's allocator.
        if lacks_memory(error) or not has_room(3 * header.height * header.width):
            raise MemoryError(reason) from error
        if _loads_truncated():
            return _decode_other(data)
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
    if not data.startswith(_JPEG):
        return _read_other(data, oriented)
    try:
        return _read_jpeg(data, oriented)
    except _BombError:
        raise
    except (ValueError, IndexError, struct.error):
        if not _loads_truncated():
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


def _decode_other(data: bytes, divisor: int = 1) -> torch.Tensor:
    with _opened(data) as picture:
        if divisor > 1:
            picture.draft("RGB", [side // divisor for side in picture.size])
        picture.load()
        picture.info.pop("transparency", None)  # convert() drops it with a warning
        pixels = np.array(picture.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _orientation(exif: Any) -> int:
    """The orientation in a ``PIL.Image.Exif``; 1 if it has no valid one."""
    found = exif.get(0x0112, 1)
    return int(found) if found in range(1, 9) else 1


_DEEP = "IF"  # PIL's modes of one channel with more than 8 bits begin with these: I, I;16B, F

# A JPEG is a row of segments, each with a marker (FF and one of these), a length of two bytes and
# its payload. The payload of a start of scan is followed by compressed data without a length:
#
#     FFD8 | FFE0 len JFIF... | FFDB len tables | FFC0 len frame | FFC4 len tables | FFDA len scan,
#     compressed data ... | FFD9
_JPEG = b"\xff\xd8\xff"
_SOF0 = 0xC0  # the frame header of a baseline JPEG
_DHT = 0xC4  # Huffman tables
_EOI = 0xD9  # end of the image
_SOS = 0xDA  # start of a scan
_DQT = 0xDB  # quantization tables
_DRI = 0xDD  # restart interval
_APP0 = 0xE0  # JFIF
_APP1 = 0xE1  # EXIF, XMP
_APP2 = 0xE2  # an index of several pictures, color profiles
_APP14 = 0xEE  # Adobe
_COM = 0xFE  # comment
_FRAME_HEADERS = {*range(0xC0, 0xD0)} - {_DHT, 0xC8, 0xCC}
_NO_SEGMENT = {0x00, 0x01, *range(0xD0, 0xD9), 0xFF}  # no length follows these
_IRREGULAR = 0  # stands for a marker: something between the segments
_FORTY_TWO = (b"*\0", b"\0*")

_Spans = list[Span]
_Segments = dict[int, _Spans]


def _jpeg_segments(data: bytes) -> _Segments:
    """Map each marker to the spans of its segments' payloads, up to the first start of scan."""
    found: _Segments = {}
    pos = 2
    while _SOS not in found:
        marker = data[pos + 1]
        if data[pos] != 0xFF or marker in _NO_SEGMENT:
            # Fill bytes, junk, a marker out of place: libjpeg and PIL look for the next marker.
            found[_IRREGULAR] = []
            pos = data.find(b"\xff", pos + 1)
            if pos < 0:
                raise ValueError("broken JPEG: no start of scan")
            continue
        length = data[pos + 2] << 8 | data[pos + 3]
        if marker < 0xC0 or marker == _EOI or length < 2:
            raise ValueError(f"broken JPEG header: marker {marker:#x} at byte {pos}")
        found.setdefault(marker, []).append((pos + 4, pos + 2 + length))
        pos += 2 + length
    if pos >= len(data):
        raise ValueError(f"truncated JPEG: its header ends at byte {pos}, the file at {len(data)}")
    return found


class _BombError(ValueError):
    """A file that could be read, and is refused."""


def _read_jpeg(data: bytes, oriented: bool) -> ImageHeader:
    found = _jpeg_segments(data)
    frames = [span for marker in found.keys() & _FRAME_HEADERS for span in found[marker]]
    if len(frames) != 1:
        raise ValueError(f"broken JPEG: {len(frames)} frame headers instead of one")
    height, width = struct.unpack_from(">HH", data, frames[0][0] + 1)
    gpu = height in _GPU_SIDES and width in _GPU_SIDES and _decodes_on_gpu(data, found)
    scans = 1  # a file for the GPU has one scan, and nothing after it
    later: _Spans = []
    if not gpu:
        scans, later = _after_first_scan(data, found[_SOS][0][1])
    limit = max_pixels()
    if scans > 1 and limit is not None and scans * height * width > MAX_SCANS * limit:
        raise _BombError(
            f"a JPEG with {scans} scans of {height * width} pixels is outside the limit of "
            f"{MAX_SCANS * limit} for all of them: it is a decompression bomb"
        )
    app1 = found.get(_APP1, [])
    orientation = _read_exif(data, app1) if oriented and app1 else 1
    exif = _exif_spans(data, app1 + later)
    return ImageHeader("jpeg", height, width, orientation, gpu, exif)


# Markers that a segment may follow. libjpeg skips or refuses all others.
_LATER_MARKERS = re.compile(rb"\xff[\xc0-\xcf\xd9-\xfe]")


def _after_first_scan(data: bytes, pos: int) -> tuple[int, _Spans]:
    """The number of scans, and the APP1 segments after the first, up to the image's end."""
    scans = 1
    app1 = []
    data += b"\0\0"  # the last marker may have no length
    while found := _LATER_MARKERS.search(data, pos):
        pos = found.end()
        marker = data[pos - 1]
        length = data[pos] << 8 | data[pos + 1]
        if marker == _EOI:
            break
        if marker == _SOS:
            scans += 1
        elif marker == _APP1:
            app1.append((pos + 2, pos + length))
        pos += length if length > 2 else 2
    return scans, app1


def _read_exif(data: bytes, segments: _Spans) -> int:
    """The orientation that PIL finds in a JPEG's APP1 segments. PIL joins what several hold."""
    from PIL import Image

    held = b"".join(data[a + 6 : b] for a, b in segments if data.startswith(b"Exif\0\0", a, b))
    with _forgiven():
        found = Image.Exif()
        found.load(held)
        return _orientation(found)
    return 1


def _exif_spans(data: bytes, segments: _Spans) -> tuple[Span, ...]:
    """The spans of everything that a decoder could take for an orientation.

    PIL and TorchCodec's CUDA decoder look for the "Exif" identifier. TorchCodec's CPU decoder takes
    the first APP1 segment whatever its identifier, even one after the first scan. All of them need
    the 42 of the TIFF header.
    """
    forty_twos = [a for a, b in segments if data[a + 8 : min(a + 10, b)] in _FORTY_TWO]
    return tuple((start, start + 10) for start in forty_twos)


# Note [Files for the GPU]
# NVIDIA does not document what nvJPEG does with a truncated file, or with one whose color space
# must be guessed. nvJPEG reports little damage, and a decoder that has refused a file cannot be
# used any more. So the GPU gets only files that leave nothing open. libjpeg decodes the others on
# the CPU.
# A file for the GPU has:
#   1. Baseline coding with 8 bits, one scan of all components, and the tables that baseline may
#      have, all of them in the file and none with codes or symbols that baseline cannot have.
#   2. Gray, or YCbCr by libjpeg's rules (JFIF, Adobe's transform, the component ids), none of which
#      says RGB.
#   3. One of the four common chroma samplings. Even gray has a sampling, and others than 1 x 1
#      exist.
#   4. Nothing between the segments, no segment of an unknown kind, and no second picture after the
#      first (an index of pictures, "MPF", would tell).
#   5. No marker in the compressed data but the restarts, each in its turn and as many as the size
#      asks for, and the end of the image at their end. This rule finds half of the damaged photos
#      that pass the others, for 10 us a photo. The rest cannot be found without a decode.
#   6. At least two bits for each block of 64 values: a code for the first value, and one for the
#      end of the others. A header that claims more pixels is broken.
# test_format.py::test_gpu and test_not_gpu hold each of them.
_GPU_SIDES = range(16, 16384 + 1)
_GPU_SAMPLINGS = {b"\x11", b"\x11\x11\x11", b"\x21\x11\x11", b"\x22\x11\x11", b"\x12\x11\x11"}
_GPU_SEGMENTS = {_SOF0, _DHT, _SOS, _DQT, _DRI, *range(_APP0, _APP0 + 16), _COM}
_GPU_HUFFMAN_TABLES = {0x00, 0x01, 0x10, 0x11}
_DC_SYMBOLS = {*range(12)}
_AC_SYMBOLS = {0x00, 0xF0, *(run << 4 | size for run in range(16) for size in range(1, 11))}
_MARKERS = re.compile(rb"\xff([^\0])")


def _decodes_on_gpu(data: bytes, found: _Segments) -> bool:
    if _SOF0 not in found or not _GPU_SEGMENTS.issuperset(found):
        return False
    frame, scan = (data[slice(*found[marker][0])] for marker in (_SOF0, _SOS))
    tables = tuple(
        tuple(data[start:stop] for start, stop in found.get(marker, ())) for marker in (_DHT, _DQT)
    )
    ids = frame[6::3]
    return (
        _is_baseline(frame[:1] + frame[5:], scan, *tables)
        and (len(ids) == 1 or _is_ycbcr(data, found, ids))
        and not any(data.startswith(b"MPF\0", start) for start, _ in found.get(_APP2, ()))
        and _whole(data, found, frame)
    )


@lru_cache(1024)  # an encoder writes the same headers into many files
def _is_baseline(
    frame: bytes, scan: bytes, huffman: tuple[bytes, ...], quantization: tuple[bytes, ...]
) -> bool:
    """Points 1 and 3 of Note [Files for the GPU], for a frame header without its size."""
    # Three bytes a component in the frame header, two in that of the scan.
    ids = frame[2::3]
    samplings = frame[3::3]
    quantizers = frame[4::3]
    coders = scan[2:-3:2]
    found = [_huffman_tables(segment) for segment in huffman]
    tables = frozenset().union(*found)
    return (
        frame[0] == 8
        and frame[1] == scan[0] == len(ids) == len({*ids}) == len(quantizers) == len(coders)
        and samplings in _GPU_SAMPLINGS
        and scan[1:-3:2] == ids
        and scan[-3:] == b"\x00\x3f\x00"
        and all(found)
        and _GPU_HUFFMAN_TABLES.issuperset(tables)
        and tables.issuperset(number for both in coders for number in (both >> 4, both & 15 | 16))
        and _quantization_tables(quantization).issuperset(quantizers)
    )


@lru_cache(1024)  # many encoders write the tables of the standard
def _huffman_tables(segment: bytes) -> frozenset[int]:
    """The ids of a segment's tables; empty if one of them is broken or not for baseline."""
    found = set()
    while segment:
        number = segment[0]
        lengths = segment[1:17]  # how many codes have 1, 2, ..., 16 bits
        symbols = segment[17 : 17 + sum(lengths)]
        codes = 0
        for bits, count in enumerate(lengths, 1):
            codes = 2 * codes + count
            if codes >= 1 << bits:  # no code may have all bits set
                return frozenset()
        allowed = _AC_SYMBOLS if number & 0x10 else _DC_SYMBOLS
        if not len(symbols) == sum(lengths) > 0 or not allowed.issuperset(symbols):
            return frozenset()
        found.add(number)
        segment = segment[17 + len(symbols) :]
    return frozenset(found)


def _quantization_tables(segments: Sequence[bytes]) -> set[int]:
    """The ids of some segments' tables; empty if one is not 64 values of 8 bits after its id."""
    ids = b"".join(segment[::65] for segment in segments)
    whole = all(len(segment) % 65 == 0 for segment in segments)
    return {*ids} if whole and max(ids, default=0) < 4 else set()


def _whole(data: bytes, found: _Segments, frame: bytes) -> bool:
    """Whether the compressed data have the markers that they must have, and no others."""
    if not data[-64:].rstrip(b"\0").endswith(b"\xff\xd9"):
        return False
    begin = found[_SOS][0][1]
    end = data.rindex(b"\xff\xd9")
    start, stop = found.get(_DRI, [(0, 0)])[-1]
    interval = int.from_bytes(data[start:stop])
    if begin >= end or (_DRI in found and any(stop - start != 2 for start, stop in found[_DRI])):
        return False
    height, width = struct.unpack_from(">HH", frame, 1)
    units = -(-width // (8 * (frame[7] >> 4))) * -(-height // (8 * (frame[7] & 15)))
    blocks = units * sum((sampling >> 4) * (sampling & 15) for sampling in frame[7::3])
    if 2 * blocks > 8 * (end - begin):
        return False
    if interval:
        restarts = [bytes([0xD0 | i % 8]) for i in range((units - 1) // interval)]
        return _MARKERS.findall(data, begin, end + 1) == restarts
    # Every photo comes here, so NumPy does it: a regular expression needs three times as long.
    codes = np.frombuffer(data, np.uint8, end + 1 - begin, begin)
    marks = (codes[:-1] == 0xFF).view(np.uint8)
    return not np.minimum(marks, codes[1:], out=marks).max()


def _is_ycbcr(data: bytes, found: _Segments, ids: bytes) -> bool:
    # libjpeg ignores a segment that is too short.
    jfif = any(data.startswith(b"JFIF\0", a) and b - a >= 14 for a, b in found.get(_APP0, ()))
    whole = (a for a, b in found.get(_APP14, ()) if data.startswith(b"Adobe", a) and b - a >= 12)
    adobe = {data[a + 11] for a in whole}
    return adobe <= {1} and ids != b"RGB" and (jfif or adobe == {1} or ids == b"\1\2\3")
