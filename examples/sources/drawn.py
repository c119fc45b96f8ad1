"""Drawn pictures: something for the recipes to write where they are given no data."""

import io

import numpy as np
from PIL import Image


def pictures(count=24):
    """Yield (bytes of a JPEG, label); the label is the picture's number."""
    for label in range(count):
        height = 60 + 7 * (label % 5)
        width = 90 - 6 * (label % 4)
        y, x = np.mgrid[:height, :width]
        planes = [128 + 90 * np.sin((label + 1) * (y * i + x) / 99) for i in range(3)]
        file = io.BytesIO()
        Image.fromarray(np.stack(planes, -1).astype(np.uint8)).save(file, "JPEG")
        yield file.getvalue(), label
