"""Draw forms.jpg: three photos as a list, as a padded tensor and as packed patches.

    python docs/forms.py PHOTO

The three are parts of one photo. The published picture has scikit-image's
``skimage/data/chelsea.png``, which is CC0.
"""

import sys
import tempfile
from pathlib import Path

from gpuprefetch import (
    DataPrefetcher,
    EncodedImageFolder,
    Padding,
    Patches,
    SmartResize,
)
from PIL import Image, ImageDraw, ImageFont
from torch.utils.data import DataLoader
from torchvision.transforms.v2.functional import to_pil_image

WIDTH = 830  # pixels, as a page shows them
GAP = 10
CAPTION = 30
PATCH = 14
ROOM = 2  # pixels around a patch
PICTURE = Path(__file__).with_suffix(".jpg")
# Left, top, right and bottom of each part, in sides of the photo.
PARTS = ((0, 0, 1, 1), (0.15, 0, 0.6, 1), (0.45, 0.2, 0.95, 0.9))
RESIZE = SmartResize(2 * PATCH, 28 * 28, 28 * 28 * 40)


def batch_of(photo, results):
    """Return what a prefetcher makes of the parts of a photo."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "photos")
        folder.mkdir()
        with Image.open(photo) as opened:
            whole = opened.convert("RGB")
        for number, part in enumerate(PARTS):
            sides = (whole.width, whole.height, whole.width, whole.height)
            box = [round(at * side) for at, side in zip(part, sides, strict=True)]
            whole.crop(box).save(folder / f"{number}.png")
        loader = DataLoader(EncodedImageFolder(root), batch_size=len(PARTS))
        prefetcher = DataPrefetcher(
            loader, transforms=[RESIZE], results=results, device="cpu"
        )
        ((images, _),) = prefetcher
    return images


def beside(tiles, gap):
    """Return pictures from left to right."""
    width = sum(tile.width + gap for tile in tiles) - gap
    whole = Image.new("RGB", (width, max(tile.height for tile in tiles)), "white")
    left = 0
    for tile in tiles:
        whole.paste(tile, (left, 0))
        left += tile.width + gap
    return whole


def list_of(photo):
    """Return the images of a list, and a caption."""
    images = batch_of(photo, "list")
    shapes = ", ".join(str(tuple(image.shape)) for image in images)
    return beside([*map(to_pil_image, images)], GAP), f'results="list": {shapes}'


def padded_of(photo):
    """Return the images of a padded tensor, which touch, and a caption."""
    padded = batch_of(photo, Padding(2 * PATCH, fill=0.6))
    shape = tuple(padded.images.shape)
    return beside(
        [*map(to_pil_image, padded.images)], 1
    ), f'results="padded": {shape}'


def patches_of(photo):
    """Return the patches in their order, and a caption."""
    rows, _ = batch_of(photo, Patches(PATCH, 2, 1))
    patches = [*map(to_pil_image, rows.view(-1, 3, PATCH, PATCH))]
    step = PATCH + ROOM
    across = WIDTH // step
    size = (across * step, -(-len(patches) // across) * step)
    whole = Image.new("RGB", size, "white")
    for number, patch in enumerate(patches):
        whole.paste(patch, (number % across * step, number // across * step))
    shape = tuple(rows.shape)
    return whole, f"results=Patches({PATCH}, 2, 1): {shape}, a patch a row"


def main(photo, output=PICTURE):
    """Draw the three forms of a photo's parts, one under the other."""
    rows = [list_of(photo), padded_of(photo), patches_of(photo)]
    height = sum(row.height + CAPTION + GAP for row, _ in rows)
    whole = Image.new("RGB", (WIDTH, height), "white")
    draw = ImageDraw.Draw(whole)
    font = ImageFont.load_default(19)
    top = 0
    for row, caption in rows:
        draw.text((0, top), caption, "black", font)
        whole.paste(row, (0, top + CAPTION))
        top += row.height + CAPTION + GAP
    whole.save(output, quality=80, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
