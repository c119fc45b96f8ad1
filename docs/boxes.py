"""Draw boxes.jpg: a photo with boxes, a mask and points, which follow it.

    python docs/boxes.py PHOTO

The published picture has scikit-image's ``skimage/data/chelsea.png``, which is CC0.
Its eyes and nose are at the places below.
"""

import sys
from pathlib import Path

import torch
from gpuprefetch import DataPrefetcher, EncodedImage, image_size
from PIL import Image, ImageDraw, ImageFont
from torch.utils.data import DataLoader
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

TILE = (200, 150)  # width and height; a page is 830 pixels wide
GAP = 10
CAPTION = 30
PICTURE = Path(__file__).with_suffix(".jpg")
SEED = 6
# All in sides of the photo: left, top, right and bottom, then x and y.
BOXES = (
    (0.30, 0.28, 0.456, 0.493),
    (0.656, 0.363, 0.76, 0.547),
    (0.505, 0.75, 0.65, 0.893),
)
POINTS = ((0.381, 0.373), (0.694, 0.437), (0.572, 0.873))
COLORS = ("red", "yellow", "cyan")
LISTS = {
    "RandomIoUCrop": [v2.RandomIoUCrop(), v2.SanitizeBoundingBoxes()],
    "crop and flip": [
        v2.RandomResizedCrop(TILE[::-1], (0.5, 0.7)),
        v2.RandomHorizontalFlip(1.0),
    ],
    "RandomAffine": [
        v2.Resize(TILE[::-1]),
        v2.RandomAffine((20, 30), scale=(0.7, 0.9)),
    ],
}


class Photo:
    """One sample: a photo, and what is beside it."""

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 1

    def __getitem__(self, index):
        height, width = canvas = image_size(self.path)
        boxes = torch.tensor(BOXES) * torch.tensor([width, height] * 2)
        points = torch.tensor(POINTS) * torch.tensor([width, height])
        target = {
            "boxes": tv_tensors.BoundingBoxes(
                boxes, format="XYXY", canvas_size=canvas
            ),
            "labels": torch.arange(len(boxes)),
            "mask": tv_tensors.Mask(ovals(boxes, canvas)),
            "points": tv_tensors.KeyPoints(points, canvas_size=canvas),
        }
        return EncodedImage(self.path.read_bytes(), index, str(self.path)), target


def ovals(boxes, canvas):
    """Return the largest ovals in boxes, ``(1, H, W)``."""
    y, x = torch.meshgrid(*map(torch.arange, canvas), indexing="ij")
    middle = (boxes[:, :2] + boxes[:, 2:]) / 2
    radius = (boxes[:, 2:] - boxes[:, :2]) / 2
    across, down = (
        (at - middle[:, i, None, None]) / radius[:, i, None, None]
        for i, at in enumerate((x, y))
    )
    return (across**2 + down**2 < 1).any(0, keepdim=True).byte()


def samples_of(photo):
    """Return the photo and what each list makes of it, with captions."""
    for caption, transforms in {"a photo": [], **LISTS}.items():
        loader = DataLoader(
            Photo(photo), collate_fn=lambda batch: tuple(zip(*batch, strict=True))
        )
        prefetcher = DataPrefetcher(
            loader, transforms=transforms, device="cpu", results="list", seed=SEED
        )
        (((image,), (target,)),) = prefetcher
        yield caption, image, target


def drawn(image, target):
    """Return an image in its tile, with what is beside it drawn upon it."""
    image = image if image.dtype == torch.uint8 else (image * 255).byte()
    height, width = image.shape[1:]
    scale = min(TILE[0] / width, TILE[1] / height)
    size = (round(height * scale), round(width * scale))
    picture = F.to_pil_image(F.resize(image, size))
    mask = F.to_pil_image(F.resize(target["mask"], size) * 110)
    picture.paste("lime", (0, 0), mask)
    draw = ImageDraw.Draw(picture)
    boxes = F.resize(target["boxes"], size).tolist()
    for box, label in zip(boxes, target["labels"].tolist(), strict=True):
        draw.rectangle(box, outline=COLORS[label], width=2)
    for x, y in F.resize(target["points"], size).tolist():
        draw.ellipse((x - 4, y - 4, x + 4, y + 4), "white", "black")
    return picture


def main(photo, output=PICTURE):
    """Draw the picture of a photo."""
    tiles = [(caption, drawn(*rest)) for caption, *rest in samples_of(photo)]
    width = len(tiles) * (TILE[0] + GAP) - GAP
    whole = Image.new("RGB", (width, TILE[1] + CAPTION), "white")
    draw = ImageDraw.Draw(whole)
    font = ImageFont.load_default(21)
    for number, (caption, tile) in enumerate(tiles):
        left = number * (TILE[0] + GAP)
        whole.paste(tile, (left, 0))
        draw.text((left + 2, TILE[1] + 1), caption, "black", font)
    whole.save(output, quality=85, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
