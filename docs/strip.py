"""Draw strip.jpg, the README's picture: a photo, and what seven epochs make of it.

    python docs/strip.py PHOTO

The published picture has scikit-image's ``skimage/data/chelsea.png``, which is CC0.
"""

import sys
import tempfile
from pathlib import Path

from gpuprefetch import DataPrefetcher, EncodedImageFolder, RandomResizedCrop
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch.utils.data import DataLoader
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import to_pil_image

COLUMNS = 4
DRAWS = 7
TILE = (200, 128)  # width and height; a README is 830 pixels wide
GAP = 10
CAPTION = 30
LETTERS = 23  # on a phone's 390 pixels, 11
PICTURE = Path(__file__).with_suffix(".jpg")
SEED = 25  # six different ops in seven epochs


def draws_of(photo, seed):
    """Return the results of the first epochs, each with the op that was sampled."""
    pipeline = [
        RandomResizedCrop(TILE[::-1], scale=(0.4, 1)),
        v2.RandomHorizontalFlip(),
    ]
    pipeline += [v2.TrivialAugmentWide()]
    with tempfile.TemporaryDirectory() as root:
        path = Path(root, "photos", photo.name)
        path.parent.mkdir()
        path.write_bytes(photo.read_bytes())
        loader = DataPrefetcher(
            DataLoader(EncodedImageFolder(root)), transforms=pipeline, seed=seed
        )
        (titles,) = loader.preview(1, draws=DRAWS).info["titles"]
        results = []
        for title in titles[1:]:
            ((image,), _) = next(iter(loader))
            results.append((to_pil_image(image.cpu()), op_of(title)))
    return results


def op_of(title):
    """Return what the policy sampled: a title has the crop and the flip first."""
    words = title.split(", ")
    while words and words[0].startswith(("crop", "flip")):
        words.pop(0)
    return ", ".join(words) or "crop and flip alone"


def strip(photo, seed=SEED):
    """Return the picture: the photo first, then its draws, in rows of four."""
    with Image.open(photo) as opened:
        original = ImageOps.fit(opened.convert("RGB"), TILE)
    tiles = [(original, "a photo"), *draws_of(photo, seed)]
    rows = -(-len(tiles) // COLUMNS)
    width = COLUMNS * (TILE[0] + GAP) - GAP
    whole = Image.new("RGB", (width, rows * (TILE[1] + CAPTION)), "white")
    draw = ImageDraw.Draw(whole)
    font = ImageFont.load_default(LETTERS)
    for number, (tile, caption) in enumerate(tiles):
        left = number % COLUMNS * (TILE[0] + GAP)
        top = number // COLUMNS * (TILE[1] + CAPTION)
        whole.paste(tile, (left, top))
        draw.text((left + 2, top + TILE[1] + 1), caption, "black", font)
    return whole


def main(photo, output=PICTURE):
    """Draw the picture of a photo."""
    strip(Path(photo)).save(output, quality=85, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
