import contextlib
import io
import pickle
import re
import struct
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from pictures import (
    draw,
    encode,
    encode_cmyk_jpeg,
    encode_jpeg,
    exif,
    from_bytes,
    insert_segment,
    png_chunk,
    read_with_pil,
)
from PIL import Image, ImageFile, ImageOps
from torchcodec import decoders

from gpuprefetch.images import header as images_header
from gpuprefetch.images.header import ImageHeader, blank, decode_cpu, read_header

RGB = draw(61, 83)
GRAY = draw(61, 83, 1)
RGBA = draw(61, 83, 4)
DEEP = np.random.default_rng(0).integers(0, 65536, (19, 23), np.uint16)
INDEXED = Image.fromarray(RGB).quantize(64)
FRAMES = [Image.fromarray(draw(61, 83, 4, seed)) for seed in range(3)]
ANIMATED = {"save_all": True, "append_images": FRAMES[1:]}


def patch(data, find, offset, value):
    """Overwrite bytes at an offset after the first occurrence of ``find``."""
    data, pos = bytearray(data), data.index(find) + offset
    data[pos : pos + len(value)] = value
    return bytes(data)


def before_last_scan(data, inserted):
    start = data.rindex(b"\xff\xda")
    return data[:start] + inserted + data[start:]


JPEGS = {
    **{
        name: encode_jpeg(RGB, subsampling=name)
        for name in ("4:4:4", "4:2:2", "4:2:0", "4:4:0", "4:1:1")
    },
    "progressive": encode_jpeg(RGB, progressive=True),
    "restart": encode_jpeg(RGB, restart_marker_blocks=3),
    "gray": encode(GRAY, "JPEG"),
    "rgb": encode(RGB, "JPEG", keep_rgb=True),
    "cmyk": encode_cmyk_jpeg(RGBA),
    "ycck": encode_cmyk_jpeg(RGBA, ycck=True),
    "turned": encode_jpeg(RGB, orientation=6),
}
# Modes, transparency, frames and orientations, each of which PIL reads in its own way.
OTHERS = {
    "png": {
        "rgb": encode(RGB, "PNG"),
        "rgba": encode(RGBA, "PNG"),
        "gray transparent": encode(GRAY, "PNG", transparency=1),
        "bilevel": encode(Image.fromarray(GRAY).convert("1"), "PNG"),
        "palette transparent": encode(INDEXED, "PNG", transparency=bytes(range(64))),
        "16 bits": encode(DEEP, "PNG"),
        "animated": encode(FRAMES[0], "PNG", **ANIMATED),
        "turned": encode(RGB, "PNG", exif=exif(6)),
    },
    "webp": {
        "rgb": encode(RGB, "WEBP"),
        "lossless alpha": encode(RGBA, "WEBP", lossless=True),
        "animated": encode(FRAMES[0], "WEBP", **ANIMATED),
        "turned": encode(RGB, "WEBP", exif=exif(6)),
    },
    "gif": {
        "rgb": encode(RGB, "GIF"),
        "transparent": encode(INDEXED, "GIF", transparency=5),
        "animated": encode(FRAMES[0], "GIF", **ANIMATED),
        "smaller screen": patch(encode(GRAY, "GIF"), b"GIF", 6, b"\x14\0\x1e\0"),
    },
    "bmp": {"rgb": encode(RGB, "BMP"), "palette": encode(INDEXED, "BMP")},
    "tiff": {
        "rgb": encode(RGB, "TIFF"),
        "lzw": encode(RGB, "TIFF", compression="tiff_lzw"),
        "cmyk": encode(from_bytes("CMYK", RGBA), "TIFF"),
    },
    "ppm": {"rgb": encode(RGB, "PPM")},
}
FILES = {
    (image_format, kind): data
    for image_format, files in ({"jpeg": JPEGS} | OTHERS).items()
    for kind, data in files.items()
}
PNG, PLAIN, PROGRESSIVE = OTHERS["png"]["rgb"], JPEGS["4:2:0"], JPEGS["progressive"]
# Each damages its own path through the code.
DAMAGED = [
    ("jpeg", "4:2:0"), ("jpeg", "progressive"), ("jpeg", "restart"), ("jpeg", "gray"),
    ("jpeg", "cmyk"), ("jpeg", "turned"),
    ("png", "turned"), ("webp", "turned"), ("gif", "animated"), ("bmp", "rgb"), ("tiff", "lzw"),
]  # fmt: skip


def to_array(image):
    return image.permute(1, 2, 0).numpy()


def pil_or_none(data):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return read_with_pil(data)
    except Exception:  # what damaged files make PIL raise is not documented
        return None


def ours_or_none(data):
    try:
        return to_array(decode_cpu(data))
    except ValueError:
        return None


@pytest.mark.parametrize(("image_format", "kind"), FILES)
@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_pixels_and_header_are_pils(image_format, kind):
    data = FILES[image_format, kind]
    image = decode_cpu(data)
    assert image.dtype == torch.uint8
    np.testing.assert_array_equal(to_array(image), read_with_pil(data))

    header = read_header(data)
    with Image.open(io.BytesIO(data)) as opened:
        assert header.format == opened.format.lower()
        assert (header.width, header.height) == opened.size
    assert header.orientation == (6 if kind == "turned" else 1)
    assert image_format == "jpeg" or (header.gpu, header.exif) == (False, ())
    assert pickle.loads(pickle.dumps(header)) == header


@pytest.mark.parametrize(("image_format", "kind"), FILES)
@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_large_pictures_are_read_strip_by_strip(image_format, kind, constants):
    constants(images_header, STRIP=200)  # pixels, of 5 rows or fewer
    data = FILES[image_format, kind]
    np.testing.assert_array_equal(to_array(decode_cpu(data)), read_with_pil(data))


@pytest.mark.parametrize("apply_exif", [False, True])
@pytest.mark.parametrize(("image_format", "kind"), FILES)
@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_a_part_is_that_of_the_whole_picture(image_format, kind, apply_exif):
    data = FILES[image_format, kind]
    for divisor in (1, 2, 4) if image_format == "jpeg" else (1,):
        whole = decode_cpu(data, apply_exif=apply_exif, divisor=divisor)
        _, height, width = whole.shape
        part = slice(height // 3, height), slice(1, width - 1)
        found = decode_cpu(data, apply_exif=apply_exif, divisor=divisor, part=part)
        assert torch.equal(found, whole[:, *part])


def test_drawn_files_are_what_they_claim():
    # guards the test above: two decoders may agree on a file that was written wrongly
    for kind in ("4:4:0", "4:1:1"):
        read = read_with_pil(JPEGS[kind])
        drawn = RGB[: read.shape[0], : read.shape[1]]
        assert np.abs(read.astype(int) - drawn).mean() < 8


def test_kinds_of_input():
    data = JPEGS["turned"]
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    before = tensor.clone()
    expected = decode_cpu(data)
    for source in (memoryview(data), tensor, tensor.repeat_interleave(2)[::2]):
        assert torch.equal(decode_cpu(source), expected)
    assert torch.equal(tensor, before)
    assert read_header(memoryview(data)) == read_header(data)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation(image_format, orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    data = encode(RGB, image_format, exif=tags)
    header = read_header(data)
    # PIL turns a TIFF whenever it decodes it.
    assert header.orientation == (1 if image_format == "TIFF" else orientation)
    stored = read_with_pil(data)
    assert (header.height, header.width) == stored.shape[:2]
    np.testing.assert_array_equal(to_array(decode_cpu(data)), stored)
    np.testing.assert_array_equal(to_array(decode_cpu(data, apply_exif=True)), turned(data))


def turned(data):
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


@pytest.mark.parametrize("byte_order", ["<", ">"])
@pytest.mark.parametrize("kind", [3, 4])
@pytest.mark.filterwarnings("ignore::UserWarning:PIL.TiffImagePlugin")
def test_exif_is_read_as_pil_reads_it(byte_order, kind):
    tags = exif(6, byte_order=byte_order, kind=kind)
    assert read_header(encode(RGB, "JPEG", exif=tags)).orientation == 6
    for length in range(len(tags)):  # cut off
        jpeg = insert_segment(PLAIN, 0xE1, tags[:length])
        with Image.open(io.BytesIO(jpeg)) as opened, contextlib.suppress(Exception):
            assert read_header(jpeg).orientation == opened.getexif().get(0x0112, 1)
        decode_cpu(jpeg, apply_exif=True)


def exif_of(kind, count):
    """The orientation as a value of another kind, or as several."""
    good, bad = (struct.pack(">HHI", 0x0112, *what) for what in ((3, 1), (kind, count)))
    return exif(6).replace(good, bad)


NO_ORIENTATION = [*map(exif, (0, 9, 65535)), exif_of(2, 1), exif_of(3, 3), exif_of(12, 1)]
EXIF = exif(6)
PNG_EXIF, PNG_EXIF_3 = (png_chunk(b"eXIf", exif(n)[6:]) for n in (6, 3))
RAW_EXIF = b"\nexif\n      %d\n%b\n" % (len(EXIF), EXIF.hex().encode())


def with_png_chunks(before=b"", after=b"", end=b""):
    return PNG[:33] + before + PNG[33:-12] + after + PNG[-12:] + end


def png_text(name, text):
    return png_chunk(b"tEXt", name + b"\0" + text)


RAW_PROFILE = png_text(b"Raw profile type exif", RAW_EXIF)
PNG_XMP = png_text(b"XML:com.adobe.xmp", b'<x tiff:Orientation="6"/>')


PLACES = {
    "JPEG segments": (
        insert_segment(insert_segment(PLAIN, 0xE1, b"Exif\0\0" + EXIF[20:]), 0xE1, EXIF[:20]),
        6,
    ),
    "PNG chunks": (with_png_chunks(PNG_EXIF_3, PNG_EXIF), 6),
    "PNG, after its end": (with_png_chunks(PNG_EXIF, end=PNG_EXIF_3), 6),
    "PNG, after its pixels": (with_png_chunks(after=PNG_EXIF), 6),
    "PNG text": (with_png_chunks(RAW_PROFILE), 6),
    "PNG text after its pixels, beside a chunk": (with_png_chunks(PNG_EXIF_3, RAW_PROFILE), 3),
    "PNG XMP": (with_png_chunks(PNG_XMP), 6),
    "WebP without its flag": (patch(OTHERS["webp"]["turned"], b"VP8X", 8, b"\0"), 1),
    **{
        f"one that does not exist, {number}": (encode(RGB, "JPEG", exif=tags), 1)
        for number, tags in enumerate(NO_ORIENTATION)
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning:PIL.TiffImagePlugin")
@pytest.mark.parametrize("place", PLACES)
def test_places_of_an_orientation(place):
    data, orientation = PLACES[place]
    assert read_header(data).orientation == orientation
    np.testing.assert_array_equal(to_array(decode_cpu(data, apply_exif=True)), turned(data))


def test_broken_metadata_are_no_orientation():
    for text in (b"", b"\nexif\n 4\nwhat", b"\nexif\n 4\n\xff"):
        data = with_png_chunks(png_text(b"Raw profile type exif", text))
        assert read_header(data).orientation == 1


@pytest.mark.parametrize("orientation", [PNG_EXIF, RAW_PROFILE, PNG_XMP])
def test_a_header_is_read_without_the_pixels(orientation):
    data = with_png_chunks(orientation)
    start = data.index(b"IDAT") + 4
    data = data[:start] + bytes(len(data) - 16 - start) + data[-16:]
    assert read_header(data).orientation == 6
    with pytest.raises(ValueError, match="broken or truncated image"):  # guards the test
        decode_cpu(data)


XMP = b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta/>"
HIDDEN = {  # and the orientation that PIL finds
    "exif": (JPEGS["turned"], 6),
    "after xmp": (insert_segment(JPEGS["turned"], 0xE1, XMP), 6),
    "twice": (insert_segment(JPEGS["turned"], 0xE1, exif(3)), 3),
    "no identifier": (insert_segment(PLAIN, 0xE1, EXIF.replace(b"Exif", b"Fixe")), 1),
    "broken byte order": (insert_segment(PLAIN, 0xE1, EXIF.replace(b"MM", b"??")), 1),
    "after the first scan": (
        before_last_scan(PROGRESSIVE, insert_segment(bytes(2), 0xE1, exif(3))[2:]),
        1,
    ),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_exif_spans_hide_the_orientation(kind):
    data, orientation = HIDDEN[kind]
    stored, header = read_with_pil(data), read_header(data)
    assert header.orientation == orientation
    if kind != "after xmp":  # TorchCodec looks at the first APP1 segment only
        # guards the test itself: untouched, this file is turned by TorchCodec, against PIL
        assert not np.array_equal(to_array(decoders.decode_jpeg(data)), stored)
    data = bytes(blank(data, header.exif))
    np.testing.assert_array_equal(to_array(decoders.decode_jpeg(data)), stored)
    header = read_header(data)
    assert (header.orientation, header.exif) == (1, ())


def test_no_span_reaches_beyond_its_segment():
    comment = insert_segment(PLAIN, 0xFE, b"*\0")
    assert read_header(insert_segment(comment, 0xE1, b"Exif")).exif == ()
    assert read_header(insert_segment(PLAIN, 0xE1, XMP)).exif == ()


def with_component_ids(data, ids):
    for number, component in enumerate(ids):
        data = patch(data, SOF0, 10 + 3 * number, bytes([component]))
        data = patch(data, SOS, 5 + 2 * number, bytes([component]))
    return data


def with_huffman_table(number, lengths, symbols):
    """A file that defines a table before its own ones."""
    table = bytes([number, *lengths, *bytes(16 - len(lengths)), *symbols])
    return insert_segment(PLAIN, 0xC4, table)


SOF0, DHT, SOS, DQT = b"\xff\xc0", b"\xff\xc4", b"\xff\xda", b"\xff\xdb"
NO_JFIF = PLAIN[:2] + PLAIN[20:]
OTHER_IDS = with_component_ids(NO_JFIF, b"\0\1\2")
ADOBE = b"Adobe\0\x64\0\0\0\0"
ON_CPU = ("4:1:1", "progressive", "rgb", "cmyk", "ycck")
GPU = {
    **{kind: data for kind, data in JPEGS.items() if kind not in ON_CPU},
    "no JFIF": NO_JFIF,
    "component ids 0, 1, 2 with JFIF": with_component_ids(PLAIN, b"\0\1\2"),
    "component ids 0, 1, 2 with Adobe": insert_segment(OTHER_IDS, 0xEE, ADOBE + b"\1"),
    "exif and ICC": insert_segment(encode_jpeg(RGB, icc_profile=bytes(200_000)), 0xE1, XMP),
    "comment": insert_segment(PLAIN, 0xFE, b"\xff\xd8\xff\xda"),
    "zeros at the end": PLAIN + bytes(9),
    "smallest": encode_jpeg(RGB[:16, :16]),
    "its own Huffman tables": encode_jpeg(RGB, optimize=True),
    "restarts in rows": encode_jpeg(RGB, restart_marker_rows=1),
    "restarts of gray": encode(RGB[..., 0], "JPEG", restart_marker_blocks=1),
    "a restart interval longer than the picture": insert_segment(PLAIN, 0xDD, b"\xff\xff"),
}
DATA = PLAIN.index(SOS) + 14  # where the compressed data begin
RESTART = JPEGS["restart"]
FIRST, SECOND = b"\xff\xd0", b"\xff\xd1"
CPU = {
    **{kind: JPEGS[kind] for kind in ON_CPU},
    "extended sequential": patch(PLAIN, SOF0, 1, b"\xc1"),
    "lossless": patch(PLAIN, SOF0, 1, b"\xc3"),
    "arithmetic": patch(PLAIN, SOF0, 1, b"\xc9"),
    "12 bits": patch(PLAIN, SOF0, 4, b"\x0c"),
    "4:1:0": patch(PLAIN, SOF0, 11, b"\x42"),
    "luma sampled less": patch(PLAIN, SOF0, 11, b"\x11\0\2\x22\1"),
    "4:4:4 with factors of 2": patch(PLAIN, SOF0, 11, b"\x22\0\2\x22\1\3\x22\1"),
    "gray with factors of 2": patch(JPEGS["gray"], SOF0, 11, b"\x22"),
    "component ids RGB": with_component_ids(NO_JFIF, b"RGB"),
    "component ids RGB against JFIF": with_component_ids(PLAIN, b"RGB"),
    "component ids 0, 1, 2": OTHER_IDS,
    "Adobe RGB": insert_segment(NO_JFIF, 0xEE, ADOBE + b"\0"),
    "Adobe RGB against JFIF": insert_segment(PLAIN, 0xEE, ADOBE + b"\0"),
    "a scan of one component": patch(PLAIN, SOS, 4, b"\1"),
    "components in another order": patch(PLAIN, SOS, 5, b"\1\0\3\x11\2\x11"),
    "Huffman table 2": patch(with_huffman_table(2, [1], b"\0"), SOS, 6, b"\x20"),
    "a part of the spectrum": patch(PLAIN, SOS, 12, b"\x3e"),
    "16-bit quantization": insert_segment(PLAIN, 0xDB, b"\x10" + b"\0\1" * 64),
    "no Huffman tables": PLAIN.replace(DHT, b"\xff\xfe"),
    "no quantization tables": PLAIN.replace(DQT, b"\xff\xfe"),
    "fill bytes": PLAIN[:2] + b"\xff\xff" + PLAIN[2:],
    "junk between segments": PLAIN[:20] + b"junk" + PLAIN[20:],
    "a second start": PLAIN[:2] + PLAIN,
    "several pictures": insert_segment(PLAIN, 0xE2, b"MPF\0II*\0"),
    "cut off": PLAIN[:-1],
    "junk at the end": PLAIN + b"junk",
    "narrow": encode_jpeg(RGB[:, :15]),
    "low": encode_jpeg(RGB[:15]),
    "more blocks than bits": patch(PLAIN, SOF0, 5, struct.pack(">HH", 2000, 2000)),
    "wide": encode_jpeg(np.zeros((16, 16385, 3), np.uint8)),
    "a segment of an unknown kind": insert_segment(PLAIN, 0xF0, b"what"),
    "a segment for arithmetic coding": insert_segment(PLAIN, 0xCC, b"\0\x10"),
    "two components of one id": with_component_ids(PLAIN, b"\1\1\3"),
    "quantization table 4": insert_segment(PLAIN, 0xDB, b"\4" + bytes(64)),
    "quantization table of 63": insert_segment(PLAIN, 0xDB, bytes(64)),
    "quantization table that is missing": patch(PLAIN, SOF0, 12, b"\2"),
    "Huffman table that is missing": patch(JPEGS["gray"], SOS, 6, b"\1"),
    "Huffman table without symbols": insert_segment(PLAIN, 0xC4, bytes(17)),
    "Huffman table with too few symbols": with_huffman_table(0, [1, 1], b"\0"),
    "Huffman table with too many codes": with_huffman_table(0, [3], b"\0\1\2"),
    "Huffman code of ones": with_huffman_table(0, [0, 4], b"\0\1\2\3"),
    "DC symbol 12": with_huffman_table(1, [1], b"\x0c"),
    "AC symbol of 11 bits": with_huffman_table(0x10, [1], b"\x0b"),
    "AC symbol of a run alone": with_huffman_table(0x11, [1], b"\x10"),
    "a marker in the data": PLAIN[:DATA] + b"\xff\xd3" + PLAIN[DATA:],
    "an end in the data": PLAIN[:DATA] + b"\xff\xd9" + PLAIN[DATA:],
    "fill bytes before the end": PLAIN[:-2] + b"\xff" + PLAIN[-2:],
    "no data": PLAIN[:DATA] + b"\xff\xd9",
    "fill bytes after restarts": RESTART[:-2] + b"\xff" + RESTART[-2:],
    "cut off, with an end": RESTART[: RESTART.index(SECOND)] + b"\xff\xd9",
    "a restart too few": RESTART.replace(FIRST, b"", 1),
    "a restart too many": RESTART[:-2] + FIRST + RESTART[-2:],
    "restarts in another order": RESTART.replace(FIRST, SECOND, 1),
    "restarts in a picture of another size": patch(RESTART, SOF0, 5, b"\0\x18"),
    "restarts without an interval": RESTART.replace(b"\xff\xdd", b"\xff\xfe"),
    "a restart interval of three bytes": insert_segment(PLAIN, 0xDD, bytes(3)),
    "a restart interval of no bytes": insert_segment(PLAIN, 0xDD, b""),
    "a restart interval of no bytes before one": insert_segment(RESTART, 0xDD, b""),
    "JFIF of 13 bytes": insert_segment(OTHER_IDS, 0xE0, b"JFIF\0" + bytes(8)),
    "Adobe of 7 bytes": insert_segment(insert_segment(OTHER_IDS, 0xFE, b"\1"), 0xEE, ADOBE[:7]),
}


@pytest.mark.parametrize("kind", GPU)
def test_gpu(kind):
    assert read_header(GPU[kind]).gpu


@pytest.mark.parametrize("kind", CPU)
def test_not_gpu(kind):
    data = CPU[kind]
    assert not read_header(data).gpu
    # Whatever it is: PIL's pixels, or an error.
    ours, theirs = ours_or_none(data), pil_or_none(data)
    assert ours is None or np.array_equal(ours, theirs)


@pytest.mark.parametrize(
    "begin", [b"", b"\xff\xd8\xff", PNG[:8], b"GIF89a", b"RIFF\xff\0\0\0WEBPVP8X", b"BM", b"II*\0"]
)
def test_random_bytes(begin):
    rng = np.random.default_rng(0)
    for length in (*range(20), 100, 1000, 100_000):
        data = begin + rng.bytes(length)
        with pytest.raises(ValueError):
            decode_cpu(data)


BOMBS = {
    "gif": patch(OTHERS["gif"]["rgb"], b"GIF", 6, struct.pack("<HH", 20_000, 20_000)),
    "bmp": patch(OTHERS["bmp"]["rgb"], b"BM", 18, struct.pack("<II", 20_000, 20_000)),
    "jpeg": patch(PLAIN, SOF0, 5, struct.pack(">HH", 20_000, 20_000)),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_decompression_bomb(monkeypatch, kind):
    with pytest.raises(ValueError, match=r"400000000 pixels.*178956970.* bomb"):
        read_header(BOMBS[kind])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # as users do who trust their files
    assert read_header(BOMBS[kind]).width == 20_000
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    with pytest.raises(ValueError, match=r"5063 pixels.*4000.* bomb"):
        read_header(PLAIN if kind == "jpeg" else OTHERS[kind]["rgb"])


@pytest.mark.parametrize(
    "data", [PNG, PLAIN, PROGRESSIVE, OTHERS["png"]["palette transparent"]], ids=range(4)
)
@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_pil_warns_of_large_images_and_so_do_we(monkeypatch, data):
    expected = read_with_pil(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 61 * 83 - 1)  # up to twice that it only warns
    with pytest.warns(Image.DecompressionBombWarning) as theirs:
        Image.open(io.BytesIO(data))
    with pytest.warns(Image.DecompressionBombWarning) as ours:
        np.testing.assert_array_equal(to_array(decode_cpu(data)), expected)
    assert str(ours[0].message) == str(theirs[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a program's guard
        with pytest.raises(ValueError, match=r"DecompressionBombWarning: Image size \(5063 pixels"):
            decode_cpu(data)


@pytest.mark.parametrize("kind", ["plain", "progressive", "damaged in the middle", "odd header"])
def test_truncated_jpegs_are_pils_if_it_takes_them(monkeypatch, kind):
    middle = len(PLAIN) // 2
    data = {
        "plain": PLAIN,
        "progressive": PROGRESSIVE,
        "damaged in the middle": PLAIN[:middle] + bytes(40) + PLAIN[middle + 40 :],
        "odd header": BROKEN["segment too short"][0],
    }[kind]
    ends = [*range(2, len(data), max(1, len(data) // 80)), len(data)]
    before = [ours_or_none(data[:end]) for end in ends]
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    read = 0
    for end, refused in zip(ends, before, strict=True):
        ours, theirs = ours_or_none(data[:end]), pil_or_none(data[:end])
        assert (ours is None) == (theirs is None), end
        assert ours is None or np.array_equal(ours, theirs), end
        read += ours is not None and refused is None
    assert read > 20 or kind == "odd header"
    for end in ends[:-1]:
        with contextlib.suppress(ValueError):
            assert not read_header(data[:end]).gpu


def test_bomb_of_many_scans(monkeypatch):
    # 12 bytes a scan, of which each would go over 16 million pixels.
    photo, data = (encode(np.zeros((4000, 4000), np.uint8), "JPEG", progressive=p) for p in (0, 1))
    last = data[data.rindex(SOS) : -2]
    assert len(last) < 2500
    # Where a decoder looks for a restart, junk is no segment that would hide what follows.
    for junk in (b"", b"\xff\2\xff\xff"):
        bomb = data[:-2] + junk + last * 200 + data[-2:]
        for truncated in (False, True):  # which forgives damage, and no bomb
            monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", truncated)
            with pytest.raises(ValueError, match=r"JPEG with 2\d\d scans of 16000000 pixels"):
                decode_cpu(bomb)
    scans = (SOS + bytes(9)) * 200
    film = photo + b"\0\0\0\x18ftypmp42" + scans
    comment = insert_segment(bytes(2), 0xFE, scans)[2:]
    for good in (film, photo[:-2] + comment + photo[-2:], data[:-2] + last * 10 + data[-2:]):
        assert (read_header(good).width, read_header(good).gpu) == (4000, False)


@pytest.mark.parametrize("filling", [b"\xff", b"\xff\0", b"\xff\xd0", b"\xff\xe1\0\2"])
def test_long_fillings_take_linear_time(filling):
    data = before_last_scan(PROGRESSIVE, filling * 500_000)
    assert read_header(data).width == 83  # for hours, if each byte were looked at from each other


BROKEN = {
    "no scan": (PLAIN[:2] + b"\xff\xd9" + PLAIN[2:], "marker 0xd9 at byte 2"),
    "unknown marker": (PLAIN[:2] + b"\xff\x77\0\x09" + PLAIN[2:], "marker 0x77 at byte 2"),
    "segment too short": (PLAIN[:2] + b"\xff\xe0\0\1" + PLAIN[2:], "marker 0xe0 at byte 2"),
    "two frames": (insert_segment(PLAIN, 0xC1, bytes(15)), "2 frame headers"),
    "no frame": (PLAIN.replace(SOF0, b"\xff\xfe"), "0 frame headers"),
    "ends in the scan header": (PLAIN[: PLAIN.index(SOS) + 14], "truncated JPEG: its header ends"),
    "no height": (patch(PLAIN, SOF0, 5, b"\0\0"), "= 0 pixels"),
    "no width": (patch(PLAIN, SOF0, 7, b"\0\0"), "= 0 pixels"),
    "PNG": (PNG.replace(b"IHDR", b"IHDX"), "its header is broken: it begins with b'.x89PNG"),
    "WebP": (OTHERS["webp"]["rgb"][:-1], "broken or truncated|its header is broken"),
    "TIFF": (OTHERS["tiff"]["rgb"][:9], "broken or truncated|its header is broken"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_headers_are_broken_for_pil(kind):
    data, _ = BROKEN[kind]
    assert pil_or_none(data) is None or kind == "segment too short"  # that one PIL forgives


NO_IMAGE = {
    "nothing": (b"", "it is empty"),
    "two bytes": (b"\xff\xd8", r"b'\\xff\\xd8'"),
    "text": (b"text\n", r"b'text\\n'"),
    "zeros": (bytes(1000), re.escape(repr(bytes(12)))),
    "a beginning": (PNG[:12], re.escape(repr(PNG[:12]))),
}

# What reads a file, the file, and what it says.
REFUSED = {
    **{
        f"{read.__name__}: {name}": (read, data, f"neither a JPEG nor .* Pillow reads.*{came}")
        for read in (read_header, decode_cpu)
        for name, (data, came) in NO_IMAGE.items()
    },
    **{f"broken header: {name}": (read_header, *BROKEN[name]) for name in BROKEN},
    "pixels of another size": (
        partial(decode_cpu, header=ImageHeader("png", height=100, width=99)),
        PNG,
        r"decoded to \(3, 61, 83\), .* 99 x 100 pixels",
    ),
    **{
        f"the first {end} bytes": (decode_cpu, PLAIN[:end], "truncated")
        for end in (5, 300, len(PLAIN) // 2, len(PLAIN) - 2)
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_whole_image_says_why(case):
    read, data, text = REFUSED[case]
    with pytest.raises(ValueError, match=text):
        read(data)


@pytest.mark.parametrize(("image_format", "kind"), DAMAGED)
def test_truncated(image_format, kind):
    data = FILES[image_format, kind]
    ends = {*range(0, len(data), max(1, len(data) // 60)), *range(len(data) - 16, len(data))}
    for end in sorted(ends):
        ours, theirs = ours_or_none(data[:end]), pil_or_none(data[:end])
        assert ours is None or np.array_equal(ours, theirs), end
    assert ours_or_none(data) is not None
