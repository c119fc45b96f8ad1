"""Pictures that are decoded already, as bytes of a file: PPM, which holds pixels as they are.

A dataset that decodes in its own way hands such files on. They take the way of all files that
workers decode, and their decode is a copy.
"""

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# As to_ppm() writes it. Pillow reads what differs: comments, other spaces, text, 16 bits.
_BEGINNING = re.compile(rb"P6\n([1-9]\d{0,9}) ([1-9]\d{0,9})\n255\n")


class Ppm(NamedTuple):
    """What a file says of itself: the size of its picture, and where the pixels begin."""

    height: int
    width: int
    start: int


def to_ppm(pixels: npt.NDArray[np.uint8]) -> bytes:
    """The file of pixels ``(H, W, 3)``, RGB."""
    height, width, _ = pixels.shape
    return b"P6\n%d %d\n255\n" % (width, height) + pixels.tobytes()


def read_ppm(data: bytes) -> Ppm | None:
    """What a file of :func:`to_ppm` says of itself; None for any other, and for a truncated one."""
    found = _BEGINNING.match(data)
    if found is None:
        return None
    width, height = map(int, found.groups())
    start = found.end()
    return Ppm(height, width, start) if len(data) == start + 3 * height * width else None


def decode_ppm(data: bytes, ppm: Ppm) -> npt.NDArray[np.uint8]:
    """A copy of its pixels, ``(H, W, 3)``."""
    pixels = np.frombuffer(data, dtype=np.uint8, offset=ppm.start)
    return pixels.reshape(ppm.height, ppm.width, 3).copy()
