"""What the segments of a JPEG say: its size, its scans, and whether the GPU may decode it.

No picture is decoded here, and PIL is not needed.
"""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Span = tuple[int, int]  # first byte, and the one after the last

# A JPEG is a row of segments, each with a marker (FF and one of these), a length of two bytes and
# its payload. The payload of a start of scan is followed by compressed data without a length:
#
#     FFD8 | FFE0 len JFIF... | FFDB len tables | FFC0 len frame | FFC4 len tables | FFDA len scan,
#     compressed data ... | FFD9
JPEG = b"\xff\xd8\xff"
_SOF0 = 0xC0  # the frame header of a baseline JPEG
_DHT = 0xC4  # Huffman tables
_EOI = 0xD9  # end of the image
_SOS = 0xDA  # start of a scan
_DQT = 0xDB  # quantization tables
_DRI = 0xDD  # restart interval
_APP0 = 0xE0  # JFIF
_APP1 = 0xE1  # EXIF, XMP
_APP2 = 0xE2  # an index of several pictures, color profiles
_APP13 = 0xED  # Photoshop
_APP14 = 0xEE  # Adobe
_COM = 0xFE  # comment
_FRAME_HEADERS = {*range(0xC0, 0xD0)} - {_DHT, 0xC8, 0xCC}
_PIL_READS = {_APP1, _APP2, _APP13, _APP14}
_NO_SEGMENT = {0x00, 0x01, *range(0xD0, 0xD9), 0xFF}  # no length follows these
_IRREGULAR = 0  # stands for a marker: something between the segments
_FORTY_TWO = (b"*\0", b"\0*")  # of a TIFF header, which EXIF data begin with

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


@dataclass(slots=True)
class JpegHeader:
    """What the segments of a JPEG say.

    Attributes:
        height: of the picture as it is stored.
        width: of the same.
        gpu: whether nvJPEG gives libjpeg's picture: see Note [Files for the GPU].
        scans: how many the compressed data has.
        app1: the payloads of the APP1 segments before the first scan.
        later_app1: the payloads of those after it.
        components: how many a pixel has: 1 if it is gray, 3 if it has colors, 4 in CMYK.
        plain: whether it has none of the metadata that PIL reads as it opens a file, but for JFIF.
    """

    height: int
    width: int
    gpu: bool
    scans: int
    app1: _Spans
    later_app1: _Spans
    components: int
    plain: bool = False


def read_jpeg(data: bytes) -> JpegHeader:
    """Read the segments of a JPEG.

    Raises:
        ValueError: for a broken or truncated header.
        IndexError: for a truncated one.
        struct.error: for a truncated one.
    """
    found = _jpeg_segments(data)
    frames = [span for marker in found.keys() & _FRAME_HEADERS for span in found[marker]]
    if len(frames) != 1:
        raise ValueError(f"broken JPEG: {len(frames)} frame headers instead of one")
    height, width, components = struct.unpack_from(">HHB", data, frames[0][0] + 1)
    app1 = found.get(_APP1, [])
    if height in _GPU_SIDES and width in _GPU_SIDES and _decodes_on_gpu(data, found):
        # Such a file has one scan, and nothing after it.
        plain = _PIL_READS.isdisjoint(found) and all(b - a >= 14 for a, b in found.get(_APP0, ()))
        return JpegHeader(height, width, True, 1, app1, [], components, plain)
    scans, later_app1 = _after_first_scan(data, found[_SOS][0][1])
    return JpegHeader(height, width, False, scans, app1, later_app1, components)


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


def exif_spans(data: bytes, segments: Sequence[Span]) -> tuple[Span, ...]:
    """The spans of everything that a decoder could take for an orientation.

    PIL and TorchCodec's CUDA decoder look for the "Exif" identifier. TorchCodec's CPU decoder takes
    the first APP1 segment whatever its identifier, even one after the first scan. All of them need
    the 42 of the TIFF header.
    """
    forty_twos = [a for a, b in segments if data[a + 8 : min(a + 10, b)] in _FORTY_TWO]
    return tuple((start, start + 10) for start in forty_twos)


# The orientation's tag in either order of bytes, and the whole entry that says 1: do not turn.
_ORIENTATION = {b"II": b"\x12\x01", b"MM": b"\x01\x12"}
_UPRIGHT = {
    b"II": b"\x12\x01\x03\x00\x01\x00\x00\x00\x01\x00",
    b"MM": b"\x01\x12\x00\x03\x00\x00\x00\x01\x00\x01",
}


def may_be_turned(data: bytes) -> bool:
    """Whether a decoder that applies the EXIF orientation could turn this JPEG.

    Decoders read broken EXIF differently, so any bytes that look like the tag count, such as those
    of a thumbnail may.

    Raises:
        ValueError: if it is no JPEG.
    """
    jpeg = read_jpeg(data)
    for start, stop in (*jpeg.app1, *jpeg.later_app1):
        segment = data[start:stop]
        for order in _ORIENTATION.keys() & {segment[6:8]} or _ORIENTATION:
            if segment.count(_ORIENTATION[order]) != segment.count(_UPRIGHT[order]):
                return True
    return False


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
    frame = data[slice(*found[_SOF0][0])]
    scan = data[slice(*found[_SOS][0])]
    tables = tuple(
        tuple(data[start:stop] for start, stop in found.get(marker, ())) for marker in (_DHT, _DQT)
    )
    ids = frame[6::3]
    return (
        _is_baseline(frame[:1] + frame[5:], scan, *tables)
        and (len(ids) == 1 or _is_ycbcr(data, found, ids))
        and not any(data.startswith(b"MPF\0", start) for start, _ in found.get(_APP2, ()))
        and _is_whole(data, found, frame)
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


def _is_whole(data: bytes, found: _Segments, frame: bytes) -> bool:
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
