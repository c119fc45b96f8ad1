"""The launch table: what the resampling kernels read besides pixels, and at which offset.

A table is a 1-D array of words of 8 bytes. It begins with COLOR_WORDS for each channel: the scales
of all channels in float64, then their shifts. After them come the images, an :data:`IMAGE` each.

With three channels, the words of the image in line 1 of the table (the second one) are::

    0 .. 2      scales of red, green, blue
    3 .. 5      shifts of red, green, blue
    6 .. 27     image 0
    28 .. 49    image 1: 28 address, 29 .. 31 strides, 32 row, 33 taps_x, 34 .. 37 filter_y, ...

The launcher writes these fields by name. The kernel's constants are made by :func:`offset`, so both
sides follow this file.
"""

import numpy as np
import numpy.typing as npt

WORD_BYTES = 8
COLOR_WORDS = 2

IMAGE = np.dtype(
    [
        ("address", np.int64),  # of the first pixel, in bytes from where the launch's images begin
        ("strides", np.int64, 3),  # between channels, rows and pixels, in values
        ("row", np.int64),  # of the result
        ("taps_x", np.int64),  # source pixels that an output pixel weighs along x
        ("filter_y", np.float64, 4),  # origin, step, radius, 1 / stretch
        ("filter_x", np.float64, 4),
        ("edges_y", np.int64, 4),  # low, high, first, last
        ("edges_x", np.int64, 4),
    ]
)
IMAGE_WORDS = IMAGE.itemsize // WORD_BYTES

Words = npt.NDArray[np.void]  # of IMAGE


def offset(name: str) -> int:
    """The word of an image at which one of its fields begins."""
    assert IMAGE.fields is not None
    return int(IMAGE.fields[name][1]) // WORD_BYTES


def table_words(images: int, channels: int) -> int:
    """The length of the table of a number of images."""
    return COLOR_WORDS * channels + IMAGE_WORDS * images
