import io
import pickle
import struct
import warnings
import zlib

import numpy as np
import pictures
import pytest
import torch
from PIL import Image, ImageOps
from torchcodec import decoders

from gpuprefetch import _format
from gpuprefetch._format import ImageHeader, decode_cpu, read_header, upright

RGB = pictures.draw(61, 83)
GRAY = pictures.draw(61, 83, 1)
RGBA = pictures.draw(61, 83, 4)
DEEP = np.random.default_rng(0).integers(0, 65536, (19, 23, 4))
INDEXES = np.random.default_rng(1).integers(0, 16, (19, 23))
PALETTE = np.random.default_rng(2).integers(0, 256, (16, 3), np.uint8)
FRAMES = [Image.fromarray(pictures.draw(61, 83, seed=seed)) for seed in range(3)]
BLENDED = [Image.fromarray(pictures.draw(61, 83, 4, seed)) for seed in range(3)]


def patch(data, find, offset, value):
    """Overwrite bytes at an offset behind the first occurrence of ``find``."""
    data, pos = bytearray(data), data.index(find) + offset
    data[pos : pos + len(value)] = value
    return bytes(data)


def before_last_scan(data, inserted):
    start = data.rindex(b"\xff\xda")
    return data[:start] + inserted + data[start:]


def palette_image(colors):
    return Image.fromarray(RGB).quantize(colors)


def gif_on_larger_screen(**options):
    """A frame that leaves a border of the screen uncovered, above and to the left of it too."""
    data = bytearray(pictures.encode(palette_image(64), "GIF", **options))
    data[6:10] = struct.pack("<HH", 100, 90)
    descriptor = data.index(b",", 13 + 3 * 64)
    data[descriptor + 1 : descriptor + 5] = struct.pack("<HH", 7, 5)
    return bytes(data)


def gif_with_local_palette():
    data = pictures.encode(palette_image(64), "GIF")
    colors, rest = data[13 : 13 + 3 * 64], bytearray(data[13 + 3 * 64 :])
    descriptor = rest.index(b",")
    rest[descriptor + 9] |= 0x80 | 5
    reversed_colors = bytes(255 - color for color in colors)
    return data[:13] + reversed_colors + rest[: descriptor + 10] + colors + rest[descriptor + 10 :]


def gif_without_palette():
    data = pictures.encode(Image.fromarray(GRAY), "GIF")
    return data[:10] + bytes([data[10] & 0x7F]) + data[11:13] + data[13 + 768 :]


def gif_with_gray_ramp(local):
    """A ramp of grays that is too short, or the palette of a frame beside a global one."""
    data = pictures.encode(Image.fromarray(GRAY), "GIF")
    ramp, rest = bytes(np.arange(256).repeat(3).tolist()), bytearray(data[13 + 768 :])
    if not local:
        return data[:10] + bytes([data[10] & 0xF8 | 1]) + data[11 : 13 + 12] + bytes(rest)
    descriptor = rest.index(b",")
    rest[descriptor + 9] |= 0x80 | 7
    return data[:13] + ramp[::-1] + rest[: descriptor + 10] + ramp + rest[descriptor + 10 :]


JPEGS = {
    "4:4:4": pictures.encode_jpeg(RGB, subsampling="4:4:4"),
    "4:2:2": pictures.encode_jpeg(RGB, subsampling="4:2:2"),
    "4:2:0": pictures.encode_jpeg(RGB),
    "4:4:0": pictures.encode_jpeg(RGB, subsampling="4:4:0"),
    "4:1:1": pictures.encode_jpeg(RGB, subsampling="4:1:1"),
    "progressive": pictures.encode_jpeg(RGB, progressive=True),
    "restart": pictures.encode_jpeg(RGB, restart_marker_blocks=3),
    "gray": pictures.encode(GRAY, "JPEG"),
    "rgb": pictures.encode(RGB, "JPEG", keep_rgb=True),
    "cmyk": pictures.encode_cmyk_jpeg(RGBA),
    "ycck": pictures.encode_cmyk_jpeg(RGBA, ycck=True),
    "turned": pictures.encode_jpeg(RGB, orientation=6),
}
PNGS = {
    "rgb": pictures.encode(RGB, "PNG"),
    "rgb transparent": pictures.encode_png(RGB, 2, chunks=[(b"tRNS", b"\0\1\0\2\0\3")]),
    "rgba": pictures.encode(RGBA, "PNG"),
    "gray": pictures.encode(GRAY, "PNG"),
    "gray transparent": pictures.encode_png(GRAY, 0, chunks=[(b"tRNS", b"\0\1")]),
    "gray alpha": pictures.encode(Image.fromarray(RGBA).convert("LA"), "PNG"),
    "bilevel": pictures.encode(Image.fromarray(GRAY).convert("1"), "PNG"),
    "palette": pictures.encode(palette_image(200), "PNG"),
    "palette transparent": pictures.encode(
        palette_image(200), "PNG", transparency=bytes(range(99))
    ),
    "palette too small": pictures.encode_png(INDEXES, 3, palette=PALETTE[:9]),
    "animated": pictures.encode(FRAMES[0], "PNG", save_all=True, append_images=FRAMES[1:]),
    "turned": pictures.encode(RGB, "PNG", exif=pictures.exif(6)),
    **{
        f"{bit_depth} bits, type {color_type}, {interlaced=}": pictures.encode_png(
            INDEXES % (1 << bit_depth),
            color_type,
            bit_depth=bit_depth,
            palette=PALETTE[: 1 << bit_depth] if color_type == 3 else None,
            interlaced=interlaced,
        )
        for bit_depth in (1, 2, 4, 8)
        for color_type in (0, 3)
        for interlaced in (False, True)
    },
    **{
        f"16 bits, type {color_type}": pictures.encode_png(
            DEEP[..., :channels].squeeze(), color_type, bit_depth=16, interlaced=color_type == 6
        )
        for color_type, channels in ((0, 1), (2, 3), (4, 2), (6, 4))
    },
    "16 bits, dark": pictures.encode_png(DEEP[..., 0] // 200, 0, bit_depth=16),
}
WEBPS = {
    "lossy": pictures.encode(RGB, "WEBP"),
    "lossy alpha": pictures.encode(RGBA, "WEBP"),
    "lossless": pictures.encode(RGB, "WEBP", lossless=True),
    "lossless alpha": pictures.encode(RGBA, "WEBP", lossless=True),
    "lossless exact": pictures.encode(RGBA, "WEBP", lossless=True, exact=True),
    "animated": pictures.encode(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:]),
    "animated alpha": pictures.encode(BLENDED[0], "WEBP", save_all=True, append_images=BLENDED[1:]),
    "turned": pictures.encode(RGB, "WEBP", exif=pictures.exif(6)),
}
GIFS = {
    "rgb": pictures.encode(RGB, "GIF"),
    "16 colors": pictures.encode(palette_image(16), "GIF"),
    "gray": pictures.encode(GRAY, "GIF"),
    "not interlaced": pictures.encode(GRAY, "GIF", interlace=0),
    "transparent": pictures.encode(palette_image(64), "GIF", transparency=5),
    "animated": pictures.encode(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]),
    "animated alpha": pictures.encode(BLENDED[0], "GIF", save_all=True, append_images=BLENDED[1:]),
    "larger screen": gif_on_larger_screen(),
    "larger screen transparent": gif_on_larger_screen(transparency=5),
    "smaller screen": patch(pictures.encode(GRAY, "GIF"), b"GIF", 6, struct.pack("<HH", 20, 30)),
    "control without transparency": gif_on_larger_screen(comment=b"", duration=100).replace(
        b"!\xf9\x04\0\x0a\0\0", b"!\xf9\x04\0\x0a\0\5"
    ),
    "local palette": gif_with_local_palette(),
    "no palette": gif_without_palette(),
    "short ramp": gif_with_gray_ramp(local=False),
    "local ramp": gif_with_gray_ramp(local=True),
}
FILES = {
    (image_format, kind): data
    for image_format, files in (("jpeg", JPEGS), ("png", PNGS), ("webp", WEBPS), ("gif", GIFS))
    for kind, data in files.items()
}
# Each damages its own path through the code.
DAMAGED = [
    ("jpeg", "4:2:0"), ("jpeg", "progressive"), ("jpeg", "restart"), ("jpeg", "gray"),
    ("jpeg", "cmyk"), ("jpeg", "turned"),
    ("png", "turned"), ("png", "palette transparent"), ("png", "16 bits, type 6"),
    ("webp", "turned"), ("webp", "lossless"), ("webp", "animated alpha"),
    ("gif", "transparent"), ("gif", "animated"),
]  # fmt: skip


def to_array(image):
    return image.permute(1, 2, 0).numpy()


def pil_or_none(data):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pictures.read_with_pil(data)
    except (
        Exception
    ):  # the kinds of exceptions that damaged files make PIL raise are not documented
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
    np.testing.assert_array_equal(to_array(image), pictures.read_with_pil(data))

    header = read_header(data)
    with Image.open(io.BytesIO(data)) as opened:
        assert header.format == opened.format.lower()
        assert (header.width, header.height) == opened.size
    assert header.orientation == (6 if kind == "turned" else 1)
    assert pickle.loads(pickle.dumps(header)) == header


def test_drawn_files_are_what_they_claim():
    # guards the test above: two decoders may agree on a file that was written wrongly
    for kind in ("4:4:0", "4:1:1"):
        read = pictures.read_with_pil(JPEGS[kind])
        drawn = RGB[: read.shape[0], : read.shape[1]]
        assert np.abs(read.astype(int) - drawn).mean() < 8
    for pixels in (RGB, RGBA):
        written = pictures.encode_png(pixels, {3: 2, 4: 6}[pixels.shape[2]], interlaced=True)
        np.testing.assert_array_equal(pictures.read_with_pil(written), pixels[..., :3])
    for kind in ("larger screen", "larger screen transparent"):
        assert pictures.read_with_pil(GIFS[kind]).shape == (90, 100, 3)


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
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
def test_orientation(image_format, orientation):
    data = pictures.encode(RGB, image_format, exif=pictures.exif(orientation))
    assert read_header(data).orientation == orientation
    np.testing.assert_array_equal(to_array(decode_cpu(data)), pictures.read_with_pil(data))
    with Image.open(io.BytesIO(data)) as image:
        turned = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    np.testing.assert_array_equal(to_array(decode_cpu(data, apply_exif=True)), turned)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("shape", [(3, 5, 4), (2, 3, 1, 7)])
def test_upright(shape, orientation):
    stored = torch.arange(np.prod(shape)).reshape(shape)
    flat = stored.flatten(0, -3)
    turned = [
        np.asarray(
            ImageOps.exif_transpose(
                with_orientation(Image.fromarray(plane.int().numpy()), orientation)
            )
        )
        for plane in flat
    ]
    result = upright(stored, orientation)
    np.testing.assert_array_equal(result.flatten(0, -3).numpy(), np.stack(turned))
    assert result.shape[:-2] == stored.shape[:-2]


def with_orientation(image, orientation):
    image.getexif()[0x0112] = orientation
    return image


@pytest.mark.parametrize("orientation", [0, 9, -1])
def test_upright_refuses(orientation):
    with pytest.raises(ValueError, match=f"from 1 to 8, got {orientation}"):
        upright(torch.zeros(3, 2, 2), orientation)


@pytest.mark.parametrize("byte_order", ["<", ">"])
@pytest.mark.parametrize("kind", [3, 4])
def test_kinds_of_exif(byte_order, kind):
    exif = pictures.exif(6, byte_order=byte_order, kind=kind)
    assert read_header(pictures.encode(RGB, "JPEG", exif=exif)).orientation == 6
    for length in range(len(exif) - 4):  # cut off, the last 4 bytes are no part of the entry
        jpeg = pictures.insert_segment(JPEGS["4:2:0"], 0xE1, exif[:length])
        assert read_header(jpeg).orientation in ((1, 6) if length >= len(exif) - 8 else (1,))
        decode_cpu(jpeg, apply_exif=True)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_orientation_that_does_not_exist(orientation):
    data = pictures.encode(RGB, "JPEG", exif=pictures.exif(orientation))
    assert read_header(data).orientation == 1
    np.testing.assert_array_equal(
        to_array(decode_cpu(data, apply_exif=True)), to_array(decode_cpu(data))
    )


EXIF = pictures.exif(6)
PNG_EXIF, PNG_EXIF_3 = (pictures.png_chunk(b"eXIf", pictures.exif(n)[6:]) for n in (6, 3))
RAW_EXIF = b"\nexif\n      %d\n%b\n" % (len(EXIF), EXIF.hex().encode())
ZIPPED_EXIF = b"\0" + zlib.compress(RAW_EXIF)


def with_png_chunks(before=b"", behind=b"", end=b""):
    data = PNGS["rgb"]
    return data[:33] + before + data[33:-12] + behind + data[-12:] + end


def raw_profile(kind, payload):
    chunk = pictures.png_chunk(kind, b"Raw profile type exif\0" + payload)
    return with_png_chunks(chunk)


PLACES = {
    "JPEG segments": (
        pictures.insert_segment(
            pictures.insert_segment(JPEGS["4:2:0"], 0xE1, b"Exif\0\0" + EXIF[20:]), 0xE1, EXIF[:20]
        ),
        6,
    ),
    "PNG chunks": (with_png_chunks(PNG_EXIF_3, PNG_EXIF), 6),
    "PNG, behind its end": (with_png_chunks(PNG_EXIF, end=PNG_EXIF_3), 6),
    "PNG text": (raw_profile(b"tEXt", RAW_EXIF), 6),
    "PNG text, compressed": (raw_profile(b"zTXt", ZIPPED_EXIF), 6),
    "PNG text beside a chunk": (
        raw_profile(b"tEXt", RAW_EXIF)[:-12] + PNG_EXIF_3 + PNGS["rgb"][-12:], 3
    ),
    "WebP without its flag": (patch(WEBPS["turned"], b"VP8X", 8, b"\0"), 1),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_places_of_an_orientation(place):
    data, orientation = PLACES[place]
    assert read_header(data).orientation == orientation
    with Image.open(io.BytesIO(data)) as image:
        turned = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    np.testing.assert_array_equal(to_array(decode_cpu(data, apply_exif=True)), turned)


@pytest.mark.parametrize("text", [b"", b"\nexif\n", b"\nexif\n 4\nwhat", b"\nexif\n 4\n\xff"])
def test_broken_text_is_no_orientation(text):
    for kind, payload in ((b"tEXt", text), (b"zTXt", text), (b"zTXt", b"\0" + zlib.compress(text))):
        assert read_header(raw_profile(kind, payload)).orientation == 1


XMP = b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta/>"
HIDDEN = {
    "exif": JPEGS["turned"],
    "behind xmp": pictures.insert_segment(JPEGS["turned"], 0xE1, XMP),
    "twice": pictures.insert_segment(JPEGS["turned"], 0xE1, pictures.exif(3)),
    "no identifier": pictures.insert_segment(
        JPEGS["4:2:0"], 0xE1, pictures.exif(6).replace(b"Exif", b"Fixe")
    ),
    "broken byte order": pictures.insert_segment(
        JPEGS["4:2:0"], 0xE1, pictures.exif(6).replace(b"MM", b"??")
    ),
    "behind the first scan": before_last_scan(
        JPEGS["progressive"], pictures.insert_segment(bytes(2), 0xE1, pictures.exif(3))[2:]
    ),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_exif_spans_hide_the_orientation(kind):
    data = bytearray(HIDDEN[kind])
    stored = pictures.read_with_pil(bytes(data))
    if kind != "behind xmp":  # TorchCodec looks at the first APP1 segment only
        # guards the test itself: untouched, this file is turned by TorchCodec, against PIL
        assert not np.array_equal(to_array(decoders.decode_jpeg(bytes(data))), stored)
    for start, stop in read_header(bytes(data)).exif:
        data[start:stop] = bytes(stop - start)
    np.testing.assert_array_equal(to_array(decoders.decode_jpeg(bytes(data))), stored)
    assert read_header(bytes(data)).orientation == 1
    assert read_header(bytes(data)).exif == ()


def test_orientation_is_that_of_the_exif_segment():
    orientations = {kind: read_header(data).orientation for kind, data in HIDDEN.items()}
    assert orientations == {
        "exif": 6,
        "behind xmp": 6,
        "twice": 3,
        "no identifier": 1,
        "broken byte order": 1,
        "behind the first scan": 1,
    }
    assert read_header(pictures.insert_segment(JPEGS["4:2:0"], 0xE1, XMP)).exif == ()


def test_no_span_reaches_beyond_its_segment():
    comment = pictures.insert_segment(PLAIN, 0xFE, b"*\0")
    assert read_header(pictures.insert_segment(comment, 0xE1, b"Exif")).exif == ()


def test_orientation_that_is_no_number():
    for broken in ((0x0112, 2, 1), (0x0112, 3, 3), (0x0112, 12, 1)):
        good, bad = struct.pack(">HHI", 0x0112, 3, 1), struct.pack(">HHI", *broken)
        exif = pictures.exif(6).replace(good, bad)
        assert read_header(pictures.encode(RGB, "JPEG", exif=exif)).orientation == 1


def test_png_orientation_behind_the_pixels():
    data = PNGS["rgb"]
    chunk = pictures.png_chunk(b"eXIf", pictures.exif(6)[6:])
    assert read_header(data[:-12] + chunk + data[-12:]).orientation == 6


def with_component_ids(data, ids):
    for number, component in enumerate(ids):
        data = patch(data, SOF0, 10 + 3 * number, bytes([component]))
        data = patch(data, SOS, 5 + 2 * number, bytes([component]))
    return data


def with_huffman_table(number, lengths, symbols):
    """A file that defines a table before its own ones."""
    table = bytes([number, *lengths, *bytes(16 - len(lengths)), *symbols])
    return pictures.insert_segment(PLAIN, 0xC4, table)


SOF0, DHT, SOS, DQT = b"\xff\xc0", b"\xff\xc4", b"\xff\xda", b"\xff\xdb"
PLAIN = JPEGS["4:2:0"]
NO_JFIF = PLAIN[:2] + PLAIN[20:]
ADOBE = b"Adobe\0\x64\0\0\0\0"
GPU = {
    **{
        kind: JPEGS[kind]
        for kind in ("4:4:4", "4:2:2", "4:2:0", "4:4:0", "gray", "restart", "turned")
    },
    "no JFIF": NO_JFIF,
    "component ids 0, 1, 2 with JFIF": with_component_ids(PLAIN, b"\0\1\2"),
    "component ids 0, 1, 2 with Adobe": pictures.insert_segment(
        with_component_ids(NO_JFIF, b"\0\1\2"), 0xEE, ADOBE + b"\1"
    ),
    "exif and ICC": pictures.insert_segment(
        pictures.encode_jpeg(RGB, icc_profile=bytes(200_000)), 0xE1, XMP
    ),
    "comment": pictures.insert_segment(PLAIN, 0xFE, b"\xff\xd8\xff\xda"),
    "zeros at the end": PLAIN + bytes(9),
    "smallest": pictures.encode_jpeg(RGB[:16, :16]),
    "its own Huffman tables": pictures.encode_jpeg(RGB, optimize=True),
    "restarts in rows": pictures.encode_jpeg(RGB, restart_marker_rows=1),
    "restarts of gray": pictures.encode(RGB[..., 0], "JPEG", restart_marker_blocks=1),
    "a restart interval longer than the picture": pictures.insert_segment(PLAIN, 0xDD, b"\xff\xff"),
}
DATA = PLAIN.index(SOS) + 14  # where the compressed data begin
RESTART = JPEGS["restart"]
FIRST, SECOND = b"\xff\xd0", b"\xff\xd1"
CPU = {
    **{kind: JPEGS[kind] for kind in ("4:1:1", "progressive", "rgb", "cmyk", "ycck")},
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
    "component ids 0, 1, 2": with_component_ids(NO_JFIF, b"\0\1\2"),
    "Adobe RGB": pictures.insert_segment(NO_JFIF, 0xEE, ADOBE + b"\0"),
    "Adobe RGB against JFIF": pictures.insert_segment(PLAIN, 0xEE, ADOBE + b"\0"),
    "a scan of one component": patch(PLAIN, SOS, 4, b"\1"),
    "components in another order": patch(PLAIN, SOS, 5, b"\1\0\3\x11\2\x11"),
    "Huffman table 2": patch(with_huffman_table(2, [1], b"\0"), SOS, 6, b"\x20"),
    "a part of the spectrum": patch(PLAIN, SOS, 12, b"\x3e"),
    "16-bit quantization": pictures.insert_segment(PLAIN, 0xDB, b"\x10" + b"\0\1" * 64),
    "no Huffman tables": PLAIN.replace(DHT, b"\xff\xfe"),
    "no quantization tables": PLAIN.replace(DQT, b"\xff\xfe"),
    "fill bytes": PLAIN[:2] + b"\xff\xff" + PLAIN[2:],
    "junk between segments": PLAIN[:20] + b"junk" + PLAIN[20:],
    "a second start": PLAIN[:2] + PLAIN,
    "several pictures": pictures.insert_segment(PLAIN, 0xE2, b"MPF\0II*\0"),
    "cut off": PLAIN[:-1],
    "junk at the end": PLAIN + b"junk",
    "narrow": pictures.encode_jpeg(RGB[:, :15]),
    "low": pictures.encode_jpeg(RGB[:15]),
    "wide": pictures.encode_jpeg(np.zeros((16, 16385, 3), np.uint8)),
    "a segment of an unknown kind": pictures.insert_segment(PLAIN, 0xF0, b"what"),
    "a segment for arithmetic coding": pictures.insert_segment(PLAIN, 0xCC, b"\0\x10"),
    "two components of one id": with_component_ids(PLAIN, b"\1\1\3"),
    "quantization table 4": pictures.insert_segment(PLAIN, 0xDB, b"\4" + bytes(64)),
    "quantization table of 63": pictures.insert_segment(PLAIN, 0xDB, bytes(64)),
    "quantization table that is missing": patch(PLAIN, SOF0, 12, b"\2"),
    "Huffman table that is missing": patch(JPEGS["gray"], SOS, 6, b"\1"),
    "Huffman table without symbols": pictures.insert_segment(PLAIN, 0xC4, bytes(17)),
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
    "fill bytes behind restarts": RESTART[:-2] + b"\xff" + RESTART[-2:],
    "cut off, with an end": RESTART[: RESTART.index(SECOND)] + b"\xff\xd9",
    "a restart too few": RESTART.replace(FIRST, b"", 1),
    "a restart too many": RESTART[:-2] + FIRST + RESTART[-2:],
    "restarts in another order": RESTART.replace(FIRST, SECOND, 1),
    "restarts in a picture of another size": patch(RESTART, SOF0, 5, b"\0\x18"),
    "restarts without an interval": RESTART.replace(b"\xff\xdd", b"\xff\xfe"),
    "a restart interval of three bytes": pictures.insert_segment(PLAIN, 0xDD, bytes(3)),
    "a restart interval of no bytes": pictures.insert_segment(PLAIN, 0xDD, b""),
    "a restart interval of no bytes before one": pictures.insert_segment(RESTART, 0xDD, b""),
    "JFIF of 13 bytes": pictures.insert_segment(
        with_component_ids(NO_JFIF, b"\0\1\2"), 0xE0, b"JFIF\0" + bytes(8)
    ),
    "Adobe of 7 bytes": pictures.insert_segment(
        pictures.insert_segment(with_component_ids(NO_JFIF, b"\0\1\2"), 0xFE, b"\1"),
        0xEE, ADOBE[:7],
    ),
}  # fmt: skip


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


@pytest.mark.parametrize(("image_format", "kind"), FILES)
def test_only_jpeg_is_for_the_gpu(image_format, kind):
    header = read_header(FILES[image_format, kind])
    assert image_format == "jpeg" or (not header.gpu and header.exif == ())


@pytest.mark.parametrize("data", [b"", b"\xff\xd8", b"text\n", b"BM" + bytes(60), bytes(1000)])
def test_no_image(data):
    with pytest.raises(ValueError, match="not a JPEG, PNG, WebP or GIF file"):
        read_header(data)
    with pytest.raises(ValueError, match="not a JPEG, PNG, WebP or GIF file"):
        decode_cpu(data)


@pytest.mark.parametrize(
    "begin",
    [b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF\xff\0\0\0WEBPVP8X"],
)
def test_random_bytes(begin):
    rng = np.random.default_rng(0)
    for length in (*range(20), 100, 1000, 100_000):
        data = begin + rng.bytes(length)
        with pytest.raises(ValueError):
            decode_cpu(data)


BOMBS = {
    "png": patch(PNGS["rgb"], b"IHDR", 4, struct.pack(">II", 20_000, 20_000)),
    "gif": patch(GIFS["rgb"], b"GIF", 6, struct.pack("<HH", 20_000, 20_000)),
    "webp": patch(WEBPS["turned"], b"VP8X", 12, b"\xff\xff\0\xff\xff\0"),
    "jpeg": patch(PLAIN, SOF0, 5, struct.pack(">HH", 20_000, 20_000)),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_decompression_bomb(kind):
    side = 65536 if kind == "webp" else 20_000
    with pytest.raises(
        ValueError, match=f"{side} x {side} = {side**2} pixels .* {_format.MAX_PIXELS}"
    ):
        read_header(BOMBS[kind])
    assert _format.MAX_PIXELS == 2 * Image.MAX_IMAGE_PIXELS


def test_bomb_of_many_scans():
    # 12 bytes a scan, of which each would go over 16 million pixels.
    data = pictures.encode(np.zeros((4000, 4000), np.uint8), "JPEG", progressive=True)
    last = data[data.rindex(SOS) : -2]
    assert len(last) < 2500
    for scans, refused in ((10, False), (200, True)):
        bomb = data[:-2] + last * scans + data[-2:]
        if refused:
            with pytest.raises(ValueError, match=r"JPEG with 2\d\d scans of 16000000 pixels"):
                decode_cpu(bomb)
        else:
            assert read_header(bomb).width == 4000


def test_scans_that_are_none():
    photo = pictures.encode(np.zeros((4000, 4000), np.uint8), "JPEG")
    film = photo + b"\0\0\0\x18ftypmp42" + (SOS + bytes(9)) * 200
    comment = pictures.insert_segment(bytes(2), 0xFE, SOS * 200)[2:]
    for data in (film, photo[:-2] + comment + photo[-2:]):
        header = read_header(data)
        assert (header.width, header.gpu) == (4000, False)


def test_scans_behind_junk():
    # Where a decoder looks for a restart, this is no segment that would hide what follows.
    data = pictures.encode(np.zeros((4000, 4000), np.uint8), "JPEG", progressive=True)
    last = data[data.rindex(SOS) : -2]
    with pytest.raises(ValueError, match=r"JPEG with 2\d\d scans"):
        read_header(data[:-2] + b"\xff\2\xff\xff" + last * 200 + data[-2:])


@pytest.mark.parametrize("filling", [b"\xff", b"\xff\0", b"\xff\xd0", b"\xff\xe1\0\2"])
def test_long_fillings_take_linear_time(filling):
    data = before_last_scan(JPEGS["progressive"], filling * 500_000)
    assert read_header(data).width == 83  # for hours, if each byte were looked at from each other


EXTREME = [(1, 1), (1, 10_000), (10_000, 1), (8, 65_500), (65_500, 8), (17, 3), (33, 47)]


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("size", EXTREME, ids=str)
def test_extreme_sizes(size, subsampling):
    height, width = size
    picture = pictures.draw(max(height, 16), max(width, 16))[:height, :width]
    data = pictures.encode_jpeg(picture, subsampling=subsampling)
    image = decode_cpu(data)
    assert image.shape == (3, *size)
    np.testing.assert_array_equal(to_array(image), pictures.read_with_pil(data))


@pytest.mark.parametrize("size", [(0, 83), (61, 0)])
def test_no_pixels(size):
    with pytest.raises(ValueError, match="= 0 pixels"):
        read_header(patch(PLAIN, SOF0, 5, struct.pack(">HH", *size)))


BROKEN = {
    "no scan": (PLAIN[:2] + b"\xff\xd9" + PLAIN[2:], "marker 0xd9 at byte 2"),
    "unknown marker": (PLAIN[:2] + b"\xff\x77\0\x09" + PLAIN[2:], "marker 0x77 at byte 2"),
    "segment too short": (PLAIN[:2] + b"\xff\xe0\0\1" + PLAIN[2:], "marker 0xe0 at byte 2"),
    "two frames": (pictures.insert_segment(PLAIN, 0xC1, bytes(15)), "2 frame headers"),
    "no frame": (PLAIN.replace(SOF0, b"\xff\xfe"), "0 frame headers"),
    "ends in the scan header": (PLAIN[: PLAIN.index(SOS) + 14], "truncated JPEG: its header ends"),
    "no PNG header": (PNGS["rgb"].replace(b"IHDR", b"IHDX"), "b'IHDX' instead of its header"),
    "first WebP chunk": (WEBPS["lossy"].replace(b"VP8 ", b"VP9 "), "b'VP9 ' instead of its first"),
    "WebP chunk too long": (patch(WEBPS["turned"], b"EXIF", 5, b"\1"), "b'EXIF' chunk ends beyond"),
    "WebP cut off": (WEBPS["lossy"][:-1], "truncated WebP"),
    "no GIF frame": (GIFS["no palette"][:13] + b";", "it holds no image"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_header(kind):
    data, reason = BROKEN[kind]
    assert pil_or_none(data) is None or kind == "segment too short"  # that one PIL forgives
    with pytest.raises(ValueError, match=reason):
        read_header(data)


def test_png_checksum():
    data = PNGS["turned"]
    with pytest.raises(ValueError, match="checksum of its b'eXIf' chunk"):
        decode_cpu(patch(data, b"eXIf", 8, b"x"))
    # PIL does not look at the checksums behind the pixels.
    data = PNGS["rgb"][:-12] + pictures.png_chunk(b"tEXt", b"a\0b")[:-1] + b"?" + PNGS["rgb"][-12:]
    np.testing.assert_array_equal(to_array(decode_cpu(data)), pictures.read_with_pil(data))


def frame_control(*numbers):
    return pictures.png_chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, *numbers, 1, 1, 0, 0))


def test_first_frame_is_the_picture():
    animated = pictures.png_chunk(b"acTL", struct.pack(">II", 2, 0))
    good = with_png_chunks(animated + frame_control(83, 61, 0, 0))
    np.testing.assert_array_equal(to_array(decode_cpu(good)), RGB)
    data = pictures.png_chunk(b"fdAT", bytes(9))
    for kind, chunk in (
        ("fcTL", frame_control(83, 1, 0, 0)),
        ("fcTL", frame_control(83, 61, 1, 0)),
        ("fdAT", frame_control(83, 61, 0, 0) + data),
    ):
        with pytest.raises(ValueError, match=f"begins with a b'{kind}' chunk"):
            decode_cpu(with_png_chunks(animated + chunk))


def test_png_data_end_at_another_chunk():
    data = PNGS["rgb"]
    start = data.index(b"IDAT") + 4
    first, second = data[start : start + 1000], data[start + 1000 : -16]
    for between, whole in ((b"", True), (pictures.png_chunk(b"tEXt", b"a\0b"), False)):
        parts = (pictures.png_chunk(b"IDAT", first), between, pictures.png_chunk(b"IDAT", second))
        cut = data[: start - 8] + b"".join(parts) + data[-12:]
        assert (pil_or_none(cut) is not None) == whole
        assert (ours_or_none(cut) is not None) == whole


def test_header_and_pixels_disagree(monkeypatch):
    header = ImageHeader("png", height=100, width=99)
    monkeypatch.setitem(_format._READERS, "png", lambda data: header)
    with pytest.raises(ValueError, match=r"decoded to \(3, 61, 83\), .* 99 x 100 pixels"):
        decode_cpu(PNGS["rgb"])


@pytest.mark.parametrize(("image_format", "files"), [("webp", WEBPS), ("gif", GIFS)])
def test_only_the_first_frame_is_decoded(image_format, files):
    data = files["animated"]
    last = data.rindex(b"VP8 ") if image_format == "webp" else len(data) - 100
    damaged = data[:last] + bytes(50) + data[last + 50 :]
    np.testing.assert_array_equal(to_array(decode_cpu(damaged)), pictures.read_with_pil(data))
    # guards the test itself: who decodes all frames trips over the damage
    with pytest.raises(RuntimeError, match="failed"):
        decoders.decode_image(damaged)


@pytest.mark.parametrize(("image_format", "kind"), DAMAGED)
def test_truncated(image_format, kind):
    data = FILES[image_format, kind]
    ends = {*range(0, len(data), max(1, len(data) // 60)), *range(len(data) - 16, len(data))}
    for end in sorted(ends):
        ours, theirs = ours_or_none(data[:end]), pil_or_none(data[:end])
        assert ours is None or np.array_equal(ours, theirs), end
    # Not so strict that it refuses all: an animation is whole when its first frame is.
    assert ours_or_none(data) is not None


def test_truncated_says_so():
    for end in (5, 300, len(PLAIN) // 2, len(PLAIN) - 2):
        with pytest.raises(ValueError, match="truncated"):
            decode_cpu(PLAIN[:end])


@pytest.mark.parametrize(("image_format", "kind"), DAMAGED)
def test_damaged(image_format, kind):
    data = FILES[image_format, kind]
    rng = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(12, len(data) if rng.random() < 0.6 else 400)] = rng.integers(256)
        ours, theirs = ours_or_none(bytes(damaged)), pil_or_none(bytes(damaged))
        if image_format == "webp" and theirs is None:
            continue  # decode_cpu() says what it does not notice
        assert ours is None or np.array_equal(ours, theirs)
