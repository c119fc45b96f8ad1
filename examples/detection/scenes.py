"""Write a small folder in COCO's layout: pictures of drawn shapes, and where each of them is.

    python scenes.py FOLDER           # 400 training and 100 validation pictures, in three seconds
    python scenes.py FOLDER 40 10

A picture holds one to four shapes of the five in the ImageNet example's draw.py, which draws them
and saves the files: baseline and progressive JPEG, gray, CMYK, and a few PNGs of the wrong name.
"""

import argparse
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "imagenet"))
from draw import SHAPES, colors, inside, own_folder, save

TRAIN = 400  # pictures
VAL = 100
SIDES = (96, 240)  # pixels, smallest and largest
RADII = (0.12, 0.26)  # of a shape, in the shorter side of its picture
MAX_SHAPES = 4
# Raised when the pictures change, so that a folder drawn before is not taken for theirs.
VERSION = 1


def drawn_folder():
    """Return the folder that stands in for a real one, drawn at the user's first call."""
    folder = own_folder(f"gpuprefetch-scenes-{VERSION}")
    if not folder.exists():
        print(f"drawing {TRAIN + VAL} pictures in {folder}")
        write_folder(folder, TRAIN, VAL)
    return folder


def write_folder(folder, train, val):
    """Write ``folder/{train,val}/*.jpg`` and ``folder/annotations/instances_{train,val}.json``."""
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when complete: an interrupted run leaves nothing that looks like the folder.
    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    (unfinished / "annotations").mkdir()
    for split, count in [("train", train), ("val", val)]:
        (unfinished / split).mkdir()
        content = write_split(unfinished / split, count)
        (unfinished / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    try:
        unfinished.rename(folder)
    except OSError:
        shutil.rmtree(unfinished)
        if not (folder / "annotations").is_dir():  # else another process was faster
            raise


def write_split(folder, count):
    """Write the pictures of a split; returns COCO's description of them."""
    images = []
    annotations = []
    for index in range(count):
        rng = np.random.default_rng([folder.name == "val", index])
        picture, shapes = draw_scene(rng)
        path = folder / f"{index:06}.jpg"
        save(picture, path, rng)
        height, width, _ = picture.shape
        images.append({"id": index, "file_name": path.name, "height": height, "width": width})
        for category, box in shapes:
            annotation = {"id": len(annotations) + 1, "image_id": index, "category_id": category}
            area = {"bbox": box, "area": box[2] * box[3], "iscrowd": 0}
            annotations.append(annotation | area)
    categories = [{"id": i, "name": name} for i, name in enumerate(SHAPES, start=1)]
    return {"images": images, "annotations": annotations, "categories": categories}


def draw_scene(rng):
    """Draw a picture, ``(H, W, 3)`` uint8; with it comes a list of (category, [x, y, w, h])."""
    height, width = map(int, rng.integers(*SIDES, size=2, endpoint=True))
    y, x = np.mgrid[:height, :width] + 0.5
    back, _, _ = colors(rng)
    canvas = back + 0.1 * y[..., None] / height
    shapes = []
    taken = np.zeros((height, width), dtype=bool)
    for _ in range(rng.integers(1, MAX_SHAPES, endpoint=True)):
        category = int(rng.integers(len(SHAPES)))
        radius = rng.uniform(*RADII) * min(height, width)
        center_y, center_x = rng.uniform(radius, (height - radius, width - radius))
        angle = rng.uniform(-0.4, 0.4)
        u = ((x - center_x) * math.cos(angle) + (y - center_y) * math.sin(angle)) / radius
        v = ((y - center_y) * math.cos(angle) - (x - center_x) * math.sin(angle)) / radius
        painted = inside(SHAPES[category], u, v)
        rows = np.flatnonzero(painted.any(1))
        columns = np.flatnonzero(painted.any(0))
        box = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
        if taken[box].any():
            continue  # no shape covers another
        taken[box] = True
        _, front, stripe = colors(rng)
        light = abs(front - back).mean() > abs(stripe - back).mean()
        canvas = np.where(painted[..., None], front if light else stripe, canvas)
        top = int(rows[0])
        left = int(columns[0])
        size = [int(columns[-1]) + 1 - left, int(rows[-1]) + 1 - top]
        shapes.append((category + 1, [left, top, *size]))
    canvas = canvas + rng.normal(scale=0.03, size=(height, width, 1))
    return (canvas.clip(0, 1) * 255).astype(np.uint8), shapes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("train", type=int, nargs="?", default=TRAIN)
    parser.add_argument("val", type=int, nargs="?", default=VAL)
    write_folder(**vars(parser.parse_args()))
