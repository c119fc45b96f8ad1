"""The launch table: what the resampling kernels read besides pixels, and at which offset.

A table is a 1-D array of words of 8 bytes. It begins with COLOR_WORDS for each channel: the scales
of all channels in float64, then their shifts. After them come the images, an :data:`IMAGE` each.

With three channels, the words of the image in line 1 of the table (the second one) are::

    0 .. 2      scales of red, green, blue
    3 .. 5      shifts of red, green, blue
    6 .. 27     image 0
    28 .. 49    image 1: 28 address, 29 .. 31 strides, 32 row, 33 taps_x, 34 .. 37 filter_y, ...

Where the results have sizes of their own, :data:`OWN_IMAGE` takes the place of :data:`IMAGE`: it
also says where the launch writes to. The programs of such a launch are numbered from the first
image to the last, and each searches for its image among these numbers.

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
OWN_IMAGE = np.dtype(
    [
        *IMAGE.descr,
        ("out_offset", np.int64),  # of the result's first value, in values from that of result 0
        ("out_strides", np.int64, 3),  # between channels, rows and pixels of the result, in values
        ("out_size", np.int64, 2),  # height, width of the result
        ("tiles_before", np.int64),  # programs of the launch that are for images before this one
    ]
)
OWN_IMAGE_WORDS = OWN_IMAGE.itemsize // WORD_BYTES

Words = npt.NDArray[np.void]  # of IMAGE, or of OWN_IMAGE


def offset(name: str) -> int:
    """The word of an image at which one of its fields begins."""
    assert OWN_IMAGE.fields is not None
    return int(OWN_IMAGE.fields[name][1]) // WORD_BYTES


def table_words(images: int, channels: int, *, own_sizes: bool = False) -> int:
    """The length of the table of a number of images; ``own_sizes`` is that of their results."""
    return COLOR_WORDS * channels + (OWN_IMAGE_WORDS if own_sizes else IMAGE_WORDS) * images
