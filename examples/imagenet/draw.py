"""Write a small image folder in ImageNet's layout: ten classes of drawn pictures.

    python draw.py FOLDER         # 400 training and 150 validation pictures, in three seconds
    python draw.py FOLDER 4 1     # 4 and 1 pictures of each class

A class is a shape and how it is filled. Place, size, turn and colors are left to chance, and so are
the picture's width and height and the kind of its file, to resemble a folder from the wild.
"""

import argparse
import itertools
import math
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

SHAPES = ["bar", "cross", "disk", "ring", "triangle"]
FILLS = ["plain", "striped"]
CLASSES = [f"{fill}_{shape}" for fill, shape in itertools.product(FILLS, SHAPES)]
TRAIN_PER_CLASS = 40
VAL_PER_CLASS = 15
SIDES = (60, 320)  # pixels, smallest and largest
# Raised when the pictures change, so that a folder drawn before is not taken for theirs.
VERSION = 1

# PIL mode, format and save options of each file kind, with its share of the files.
FILE_KINDS = [
    (0.50, "RGB", "JPEG", {"quality": 90}),
    (0.15, "RGB", "JPEG", {"quality": 95, "subsampling": "4:4:4"}),
    (0.10, "RGB", "JPEG", {"quality": 60, "subsampling": "4:2:2"}),
    (0.10, "RGB", "JPEG", {"quality": 85, "progressive": True}),
    (0.10, "L", "JPEG", {"quality": 85}),
    (0.03, "CMYK", "JPEG", {"quality": 85}),
    (0.02, "RGB", "PNG", {}),  # under the name .JPEG, as one file of ImageNet is
]


def drawn_folder():
    """Return the folder that stands in for a real one, drawn at the user's first call."""
    folder = own_folder(f"gpuprefetch-drawn-{VERSION}")
    if not folder.exists():
        print(f"drawing {len(CLASSES) * (TRAIN_PER_CLASS + VAL_PER_CLASS)} pictures in {folder}")
        write_folder(folder, TRAIN_PER_CLASS, VAL_PER_CLASS)
    return folder


def own_folder(name):
    """Return a path in the system's folder for temporary files, which nobody else has made.

    Everybody may write to that folder, and another's files would be taken for the drawn ones.
    """
    folder = Path(tempfile.gettempdir())
    if not hasattr(os, "getuid"):  # on Windows that folder is the user's own
        return folder / name
    folder /= f"{name}-{os.getuid()}"
    if os.path.lexists(folder) and folder.lstat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is somebody else's. Set TMPDIR to another folder.")
    return folder


def write_folder(folder, train_per_class, val_per_class):
    """Write ``folder/{train,val}/CLASS/*.JPEG``; the same numbers always give the same pictures."""
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when complete: an interrupted run leaves nothing that looks like the folder.
    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    for split, count in [("train", train_per_class), ("val", val_per_class)]:
        for (label, name), index in itertools.product(enumerate(CLASSES), range(count)):
            rng = np.random.default_rng([split == "val", label, index])
            path = unfinished / split / name / f"{name}_{index:04}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            save(draw(*name.split("_"), rng), path, rng)
    try:
        unfinished.rename(folder)
    except OSError:
        shutil.rmtree(unfinished)
        if not (folder / "val").is_dir():  # else another process was faster
            raise


def draw(fill, shape, rng):
    """Draw one picture.

    Args:
        fill: one of ``FILLS``.
        shape: one of ``SHAPES``.
        rng: numpy generator that decides the rest.

    Returns:
        ``(H, W, 3)`` uint8 array.
    """
    height, width = rng.integers(SIDES[0], SIDES[1], size=2, endpoint=True)
    y, x = np.mgrid[:height, :width] / min(height, width)
    y -= rng.uniform(0.4, 0.6) * y[-1, -1]
    x -= rng.uniform(0.4, 0.6) * x[-1, -1]
    angle = rng.uniform(-0.4, 0.4)
    u = (x * math.cos(angle) + y * math.sin(angle)) / rng.uniform(0.3, 0.42)
    v = (y * math.cos(angle) - x * math.sin(angle)) / rng.uniform(0.3, 0.42)

    back, front, stripe = colors(rng)
    canvas = back + (0.1 * y)[..., None]
    painted = np.broadcast_to(front, canvas.shape)
    if fill == "striped":
        odd = np.sin((u + v) * rng.uniform(9, 13) + rng.uniform(0, 6)) > 0
        painted = np.where(odd[..., None], stripe, front)
    canvas = np.where(inside(shape, u, v)[..., None], painted, canvas)
    canvas = canvas + rng.normal(scale=0.03, size=(height, width, 1))
    return (canvas.clip(0, 1) * 255).astype(np.uint8)


def inside(shape, u, v):
    """Tell which points of a square from -1 to 1 belong to the shape, as a boolean array."""
    radius = np.hypot(u, v)
    return {
        "bar": (abs(u) < 1) & (abs(v) < 0.28),
        "cross": (np.minimum(abs(u), abs(v)) < 0.28) & (np.maximum(abs(u), abs(v)) < 1),
        "disk": radius < 1,
        "ring": (radius < 1) & (radius > 0.6),
        "triangle": (v < 0.8) & (v > 2 * abs(u) - 1),
    }[shape]


def colors(rng):
    """Choose a background, front and stripe color; their brightness differs, for the gray files."""
    hues = rng.uniform(-0.15, 0.15, size=(3, 3))
    levels = np.array([[0.2], [0.8], [0.45]])
    if rng.random() < 0.5:
        levels = 1 - levels
    return levels + hues


def save(picture, path, rng):
    shares = [share for share, *_ in FILE_KINDS]
    _, mode, file_format, options = FILE_KINDS[rng.choice(len(FILE_KINDS), p=shares)]
    Image.fromarray(picture).convert(mode).save(path, file_format, **options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("train_per_class", type=int, nargs="?", default=TRAIN_PER_CLASS)
    parser.add_argument("val_per_class", type=int, nargs="?", default=VAL_PER_CLASS)
    write_folder(**vars(parser.parse_args()))
