"""What results must be, told without the package: NumPy, PIL and torchvision's own ops.

A crop is read back from its values. :func:`ramp` draws a picture whose red grows along x and whose
green along y, so that a line through a row of the result says where it begins and how far it goes.
For a part of 20 columns from column 5 on, brought to 40, mirrored::

    left 5, width 20, mirrored 1
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from bench import pictures

Pixels = np.ndarray[Any, Any]

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
DARK = 20.0  # levels of the first pixel of a ramp
RANGE = 215.0  # levels from there to the last one
# A line through the pixels between these parts of the result: the others lie at the edge of the
# part, beyond which a filter reads nothing.
INNER = (0.2, 0.8)
PLACE = ("top", "left", "height", "width", "flipped", "mirrored")
# By chance the largest distance of two samples' distributions is above this times sqrt(2 / n) once
# in 10,000 times.
DISTANCE = 2.23
# Parts of std, and levels, that a line through the values may be off by.
SLOPE = 0.004
OFFSET = 0.5


def ramp(height: int, width: int) -> bytes:
    """A JPEG that tells where each of its parts comes from."""
    picture = np.full((height, width, 3), 128.0)
    picture[..., 0] = DARK + RANGE * np.arange(width) / (width - 1)
    picture[..., 1] = DARK + RANGE * np.arange(height)[:, None] / (height - 1)
    made = picture.round().astype(np.uint8)
    return pictures.encode(made, "JPEG", quality=100, subsampling=0)


def _axis(profile: Pixels, length: int) -> tuple[float, float, float]:
    """First pixel, length, and 1 if mirrored, of the part that an axis of a result shows."""
    size = len(profile)
    source = (profile - DARK) / RANGE * (length - 1)
    index = np.arange(size)
    inner = index[int(INNER[0] * size) : int(np.ceil(INNER[1] * size))]
    step, origin = np.polyfit(inner, source[inner], 1)
    mirrored = float(step < 0)
    first = origin + step * (size - 1) if mirrored else origin
    step = abs(step)
    return first - 0.5 * step + 0.5, step * size, mirrored


def place(values: Pixels, height: int, width: int) -> dict[str, float]:
    """Where a result, ``(3, h, w)`` in levels, comes from in a ramp of this height and width."""
    top, high, flipped = _axis(values[1].mean(1), height)
    left, wide, mirrored = _axis(values[0].mean(0), width)
    found = (top, left, high, wide, flipped, mirrored)
    return dict(zip(PLACE, found, strict=True))


def places(results: Sequence[Pixels], height: int, width: int) -> dict[str, Pixels]:
    """Columns of what :func:`place` says of all results, and their aspect ratios."""
    found = [place(values, height, width) for values in results]
    columns = {name: np.array([each[name] for each in found]).round() for name in PLACE}
    exact = np.array([[each["width"], each["height"]] for each in found])
    columns["aspect"] = np.log(exact[:, 0] / exact[:, 1]).round(1)
    return columns


def distance(one: Pixels, other: Pixels) -> float:
    """Kolmogorov and Smirnov's, between the distributions of two samples."""
    values = np.union1d(one, other)
    below = [
        np.searchsorted(np.sort(each), values, side="right") / len(each) for each in (one, other)
    ]
    return float(np.abs(below[0] - below[1]).max())


def limit(one: int, other: int) -> float:
    """The distance that two samples of these sizes have by chance once in 10,000 times."""
    return DISTANCE * float(np.sqrt((one + other) / (one * other)))


def apart(ours: dict[str, Pixels], theirs: dict[str, Pixels]) -> dict[str, float]:
    """How far the columns of two samples are apart, in limits: above 1 is no chance."""
    return {
        name: distance(column, theirs[name]) / limit(len(column), len(theirs[name]))
        for name, column in ours.items()
    }


def normalization(values: Pixels, levels: Pixels) -> dict[str, Any]:
    """Whether values, ``(N, 3, h, w)``, are the levels, normalized with MEAN and STD.

    A line through the values of each channel has the slope ``1 / (255 std)`` and goes through
    ``-mean / std``. It is not moved by rounding, or by another decoder's.
    """
    slopes = []
    offsets = []
    for channel, (mean, std) in enumerate(zip(MEAN, STD, strict=True)):
        given = levels[:, channel].astype(np.float64).ravel() / 255
        got = values[:, channel].astype(np.float64).ravel()
        slope, offset = np.polyfit(given, got, 1)
        slopes.append(abs(float(slope) * std - 1))
        # In the middle of the range: at 0 an error of the slope counts as well.
        middle = float(slope * mean + offset)
        offsets.append(abs(middle * std * 255))
    return {
        "ok": max(slopes) <= SLOPE and max(offsets) <= OFFSET,
        "std_error": max(slopes),
        "mean_error_levels": max(offsets),
    }
