"""Crops, flips and colors of pipelines, each against torchvision's own op or against NumPy.

The two sides share nothing: torchvision samples from torch's generator, and the package from its
seed. So their distributions are compared, of the place and size of the part, of its aspect ratio,
and of its flips.
"""

import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import faults
import independent
import numpy as np
import torch
from bench import pictures
from faults import Result
from independent import MEAN, STD, Pixels
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from gpuprefetch import DataPrefetcher, EncodedImage, convert_transforms

BATCH = 64
SEED = 5
SEED_OF_TORCHVISION = 11
TO_FLOAT = (v2.ToImage(), v2.ToDtype(torch.float32, scale=True))
PICTURES = 24  # of which colors are compared
SIZE = (40, 48)
CENTER = (32, 38)
# Levels, of the mean over all pixels: another decoder's may be a level off now and then.
LEVELS = 1.0


@dataclass(frozen=True)
class Placed:
    """A pipeline that cuts a part out of pictures of one size, and what it must not hide."""

    size: tuple[int, int]  # of the pictures
    ops: Sequence[torch.nn.Module]
    mistakes: Sequence[str]

    @property
    def pipeline(self) -> v2.Compose:
        return v2.Compose([*self.ops, *TO_FLOAT])


PLACES = {
    "RandomResizedCrop, RandomHorizontalFlip": Placed(
        (20, 24),
        [v2.RandomResizedCrop((24, 20), (0.3, 0.8), (0.4, 2.5)), v2.RandomHorizontalFlip(0.5)],
        [faults.CROP, faults.FLIP, faults.ASPECT],
    ),
    "RandomCrop, RandomVerticalFlip": Placed(
        (24, 30),
        [v2.RandomCrop((20, 24)), v2.RandomVerticalFlip(0.3)],
        [faults.CROP, faults.FLIP],
    ),
    "Resize, CenterCrop": Placed(
        (25, 31), [v2.Resize((25, 31)), v2.CenterCrop((20, 24))], [faults.CENTER]
    ),
}


def of_ours(
    pipeline: v2.Compose, files: Sequence[Any], mistake: str = "", **options: Any
) -> Pixels:
    """What the package makes of samples, ``(N, 3, h, w)``; ``options`` are a prefetcher's.

    But for ``workers`` and ``sampler``, which are a loader's.
    """
    loading = {"num_workers": options.pop("workers", 0), "sampler": options.pop("sampler", None)}
    pinned = torch.device(options.get("device", "cpu")).type == "cuda"
    loader = DataLoader(list(files), BATCH, pin_memory=pinned, **loading)
    transforms = faults.planted(convert_transforms(pipeline), mistake)
    prefetcher = DataPrefetcher(loader, transforms=transforms, **options)
    return np.concatenate([batch.cpu().numpy() for batch in prefetcher])


@functools.cache
def of_torchvision(name: str, count: int) -> dict[str, Pixels]:
    """Places of what torchvision makes of a PIL image, time and again, with its random numbers."""
    placed = PLACES[name]
    image = Image.open(io.BytesIO(independent.ramp(*placed.size))).convert("RGB")
    with torch.random.fork_rng([]):
        torch.manual_seed(SEED_OF_TORCHVISION)
        made = [placed.pipeline(image).numpy() * 255 for _ in range(count)]
    return independent.places(made, *placed.size)


def compared(name: str, ours: Pixels, count: int) -> Result:
    """Whether our results of a ramp are distributed as ``count`` of torchvision's."""
    placed = PLACES[name]
    found = independent.places(ours * 255, *placed.size)
    apart = independent.apart(found, of_torchvision(name, count))
    # Nothing lies outside of the picture; a part is read to half a pixel.
    outside = (found["top"] < 0) | (found["left"] < 0)
    outside |= found["top"] + found["height"] > placed.size[0] + 1
    outside |= found["left"] + found["width"] > placed.size[1] + 1
    return {
        "ok": max(apart.values()) <= 1 and not outside.any(),
        "crops": len(ours),
        "outside": int(outside.sum()),
        "apart": {column: round(value, 3) for column, value in apart.items()},
    }


def places(name: str, mistake: str, count: int, **options: Any) -> Result:
    """The same of ``count`` results of the package."""
    placed = PLACES[name]
    file = independent.ramp(*placed.size)
    images = [EncodedImage(file, number) for number in range(count)]
    ours = of_ours(placed.pipeline, images, mistake, **{"seed": SEED} | options)
    return compared(name, ours, count)


# With a policy after the crop, Normalize is in its program, and not in the fused launch.
COLORS = {
    "Normalize": ([], lambda levels: levels),
    "RandomInvert, Normalize": ([v2.RandomInvert(1.0)], lambda levels: 255 - levels),
}


def colors(name: str, mistake: str, **options: Any) -> Result:
    """Whether normalized pictures are what NumPy makes of PIL's."""
    policies, change = COLORS[name]
    pipeline = v2.Compose([v2.CenterCrop(CENTER), *policies, *TO_FLOAT, v2.Normalize(MEAN, STD)])
    drawn = [pictures.draw(*SIZE, seed=number) for number in range(PICTURES)]
    # Decoders enlarge subsampled colors in different ways.
    files = [pictures.encode(each, "JPEG", quality=95, subsampling=0) for each in drawn]
    top = (SIZE[0] - CENTER[0]) // 2
    left = (SIZE[1] - CENTER[1]) // 2
    rows = slice(top, top + CENTER[0])
    columns = slice(left, left + CENTER[1])
    decoded = np.stack([pictures.read_with_pil(file)[rows, columns] for file in files])
    levels = change(decoded.transpose(0, 3, 1, 2).astype(np.float64))
    images = [EncodedImage(file, number) for number, file in enumerate(files)]
    values = of_ours(pipeline, images, mistake, **options)
    found = independent.normalization(values, levels)
    back = values * np.reshape(STD, (3, 1, 1)) + np.reshape(MEAN, (3, 1, 1))
    off = float(np.abs(back * 255 - levels).mean())
    return found | {"ok": found["ok"] and off <= LEVELS, "mean_levels": off}


def checks(count: int, **options: Any) -> list[Result]:
    """Every pipeline's result, and whether it notices its mistakes."""
    results = []
    for name, placed in PLACES.items():
        results.append(
            faults.judged(
                f"draws, {name}",
                lambda mistake, name=name: places(name, mistake, count, **options),
                placed.mistakes,
            )
        )
    for name in COLORS:
        results.append(
            faults.judged(
                f"colors, {name}",
                lambda mistake, name=name: colors(name, mistake, **options),
                [faults.SWAPPED, faults.STD, faults.CENTER],
            )
        )
    return results
