"""Draw test pictures, and write them as image files of all kinds; nothing here is read from disk.

Pictures are numpy arrays, ``(H, W)`` gray, ``(H, W, 3)`` RGB or ``(H, W, 4)`` RGBA, uint8.
"""

import functools
import io
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

# JPEG samplings that PIL does not write: the one that is written instead, and the factors of luma,
# (horizontal, vertical), in both. See encode_jpeg().
_RELABELED = {"4:4:0": ("4:2:2", (2, 1), (1, 2)), "4:1:1": ("4:2:0", (2, 2), (4, 1))}


def draw(height, width, channels=3, seed=0):
    """Draw smooth colors, a few hard-edged shapes and a little noise: what photos are made of."""
    return _drawn(height, width, channels, seed).copy()


@functools.lru_cache(1000)  # many tests draw the same ones
def _drawn(height, width, channels, seed):
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width].astype(np.float32)

    def waves(amplitude):
        fy, fx = rng.uniform(0.5, 3, 2) * 2 * np.pi / (height, width)
        return amplitude * np.sin(fy * y + fx * x + rng.uniform(0, 6))

    light = 128 + waves(70)
    planes = np.stack([light + waves(40) for _ in range(channels)], axis=-1)
    for _ in range(3):
        center, radii = rng.uniform(0, (height, width)), rng.uniform(2, (height / 3, width / 3))
        inside = ((y - center[0]) / radii[0]) ** 2 + ((x - center[1]) / radii[1]) ** 2 < 1
        planes[inside] = rng.uniform(0, 255, channels)
    planes += rng.normal(0, 4, planes.shape)
    picture = planes.clip(0, 255).astype(np.uint8)
    return picture[..., 0] if channels == 1 else picture


def encode(picture, image_format, **options):
    """Write an array, or a PIL image of any mode, with PIL."""
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def from_bytes(mode, picture):
    """Return a PIL image of a mode that its array does not tell."""
    return Image.frombytes(mode, picture.shape[1::-1], picture.tobytes())


def encode_jpeg(picture, *, subsampling="4:2:0", orientation=None, **options):
    """Write a JPEG; ``subsampling`` may also be "4:4:0" or "4:1:1".

    PIL writes neither, but 4:2:2 has the blocks of 4:4:0 (two of luma, one of each chroma) in the
    same order, and 4:2:0 those of 4:1:1. So the blocks are laid out as the other sampling, and the
    frame header is changed. The picture is cut to whole blocks.
    """
    if orientation is not None:
        options["exif"] = exif(orientation)
    if subsampling not in _RELABELED:
        return encode(picture, "JPEG", subsampling=subsampling, **options)
    written, (wide, high), (h, v) = _RELABELED[subsampling]
    rows, columns = picture.shape[0] // (8 * v), picture.shape[1] // (8 * h)
    picture = picture[: rows * 8 * v, : columns * 8 * h]
    ycbcr = np.asarray(Image.fromarray(picture).convert("YCbCr"))
    luma = ycbcr[..., 0].reshape(rows, v, 8, columns, h, 8).transpose(0, 3, 1, 4, 2, 5)
    luma = luma.reshape(rows, columns, high, wide, 8, 8).transpose(0, 2, 4, 1, 3, 5)
    luma = luma.reshape(rows * high * 8, columns * wide * 8)
    chroma = ycbcr[..., 1:].reshape(rows * 8, v, columns * 8, h, 2).mean((1, 3)).round()
    chroma = chroma.astype(np.uint8).repeat(high, 0).repeat(wide, 1)
    laid_out = from_bytes("YCbCr", np.dstack([luma, chroma]))
    data = bytearray(encode(laid_out, "JPEG", subsampling=written, **options))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", *picture.shape[:2])
    data[frame + 11] = h << 4 | v
    return bytes(data)


def encode_cmyk_jpeg(picture, *, ycck=False, **options):
    """Write ``(H, W, 4)`` inks, as Adobe's programs do.

    For YCCK only the color transform in Adobe's segment is changed: the file is a valid one of
    other colors.
    """
    data = encode(from_bytes("CMYK", picture), "JPEG", **options)
    return data.replace(b"Adobe\0\x64\0\0\0\0\0", b"Adobe\0\x64\0\0\0\0\2") if ycck else data


def png_chunk(kind, payload):
    checksum = zlib.crc32(kind + payload)
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", checksum)


def exif(orientation, *, byte_order=">", kind=3):
    """Return EXIF data with one entry before the orientation; ``kind`` 3 is SHORT, 4 is LONG."""
    begin = b"Exif\0\0" + {">": b"MM\0*", "<": b"II*\0"}[byte_order]
    entries = 8, 2, 0x010F, 2, 4, b"gpu\0", 0x0112, kind, 1
    value = struct.pack(byte_order + {3: "HH", 4: "I"}[kind], *[orientation, 0][: 5 - kind])
    return begin + struct.pack(byte_order + "IHHHI4sHHI", *entries) + value + bytes(4)


def insert_segment(jpeg, marker, payload):
    """Put a segment right behind the start of a JPEG."""
    begin = struct.pack(">BBH", 0xFF, marker, len(payload) + 2)
    return jpeg[:2] + begin + payload + jpeg[2:]


def write_folder(root, pictures, ending, **options):
    """A folder of two classes, which have the pictures in turn."""
    for i, picture in enumerate(pictures):
        path = root / "ab"[i % 2] / f"{i}.{ending}"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(picture).save(path, **options)
    return root


def files_of(folder):
    """The paths of a written folder's JPEGs, in the order of its pictures."""
    return sorted(map(str, folder.glob("*/*.jpg")), key=lambda path: int(Path(path).stem))


def read_with_pil(data):
    """Return ``(H, W, 3)``: what decode_cpu() is held to."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))
