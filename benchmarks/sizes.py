"""Images/s of the loader alone where results have sizes of their own, beside one size.

    python benchmarks/sizes.py --data PHOTOS --output benchmarks/results/sizes-h100.json

Each column decodes, resizes, flips and normalizes the same photos:

    one size        224 x 224 of each, in one tensor
    list            a shorter side of 176 to 208 pixels, sampled: about as many pixels as 224 x 224
    padded          the same in one tensor, with a multiple of 32
    detection       a shorter side of 480 to 800, the longer one of 1,333 at most, as a list
    torchvision     the same by torchvision's ops on PIL images, in the DataLoader's workers
    patches         SmartResize and Patches as Qwen2-VL has them, at most 1,003,520 pixels

The pixels of a result are in the file: rates per image of columns with other sizes differ by them.
Rounds take the columns in turn and then the other way round.
"""

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import clock
import harness
import loaders
import photos
import torch
import train

RESIZES = {
    "one size": "Resize((224, 224))",
    "list": "RandomShortestSize([176, 192, 208])",
    "padded": "RandomShortestSize([176, 192, 208])",
    "detection": "RandomShortestSize([480, ..., 800], max_size=1333)",
    "torchvision": "RandomShortestSize([480, ..., 800], max_size=1333)",
    "patches": "SmartResize(28)",
}
LARGE = ("detection", "torchvision")  # in batches of an eighth


def _transforms(column: str) -> list[Any]:
    from torchvision.transforms import v2

    import gpuprefetch

    first = {
        "one size": v2.Resize((224, 224)),
        "patches": gpuprefetch.SmartResize(28),
    }.get(column)
    if first is None:
        sides = range(480, 801, 32) if column in LARGE else range(176, 209, 16)
        first = v2.RandomShortestSize(list(sides), max_size=1333 if column in LARGE else None)
    floats = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    flips = [] if column == "patches" else [v2.RandomHorizontalFlip()]
    normalize = v2.Normalize(loaders.MEAN, loaders.STD)
    return [first, *flips, *floats, normalize]


def build(column: str, settings: loaders.Settings) -> Any:
    """The batches of a column: what it makes of the images, and the targets."""
    # Imported before there is a CUDA context: it prepares the environment for it.
    from gpuprefetch import DataPrefetcher, EncodedImageFolder, Patches

    transforms = _transforms(column)
    if column == "torchvision":
        return _Moved(_plain(transforms, settings), settings.device)
    return DataPrefetcher(
        loaders.data_loader(EncodedImageFolder(settings.data), settings),
        device=settings.device,
        transforms=transforms,
        memory_format=None if column == "patches" else torch.channels_last,
        results={"padded": "padded", "patches": Patches(14, 2, 2)}.get(column),
    )


def _pairs(samples: list[Any]) -> tuple[list[Any], torch.Tensor]:
    images, targets = zip(*samples, strict=True)
    return list(images), torch.tensor(targets)


def _plain(transforms: list[Any], settings: loaders.Settings) -> Any:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    dataset = ImageFolder(settings.data, v2.Compose(transforms))
    return loaders.data_loader(dataset, settings, collate_fn=_pairs)


class _Moved:
    """torchvision's lists of images, copied to the device as its references do."""

    def __init__(self, loader: Any, device: str) -> None:
        self._loader = loader
        self._device = device

    def __iter__(self) -> Iterator[Any]:
        for images, target in self._loader:
            moved = [image.to(self._device, non_blocking=True) for image in images]
            yield moved, target.to(self._device, non_blocking=True)


def measure(column: str, settings: dict[str, Any], timing: dict[str, Any]) -> dict[str, Any]:
    """One column, in this process."""
    pixels: list[float] = []

    def one(batch: tuple[Any, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        images, target = batch
        if column == "patches":
            values, grids = images
            pixels.append(float(grids.cpu().prod(1).sum()) * 14 * 14 if len(pixels) < 3 else 0.0)
            return values[:, :, None, None], target
        if column == "padded":
            pixels.append(float(images.sizes.prod(1).sum()))
            return images.images, target
        pixels.append(float(sum(image.shape[-2] * image.shape[-1] for image in images)))
        return (images if isinstance(images, torch.Tensor) else images[0][None]), target

    device = settings["device"]
    batches = build(column, loaders.Settings(**settings))
    with train.stream_of("own", device):
        step = train.make_step("none", "eager", device)
        found = clock.measure(map(one, batches), step, device=device, loops=["step"], **timing)
    stats = batches.stats.as_dict() if hasattr(batches, "stats") else None
    mean = statistics.fmean(value for value in pixels if value) / settings["batch_size"]
    facts = {"pixels": round(mean), "resize": RESIZES[column], "first_batch": found["first_batch"]}
    return {**facts, **found["loops"]["step"], "stats": stats}


def main(words: list[str] | None = None) -> None:
    parser = harness.timed_parser(__doc__)
    parser.add_argument("--columns", nargs="+", choices=list(RESIZES), default=list(RESIZES))
    args: argparse.Namespace = harness.parse_arguments(parser, words, **harness.TIMED_TINY)
    device = harness.Device()
    document = harness.Document("sizes", args, device, anew=True)
    document.content["photos"] = {"sample": photos.photo_facts(args.data, args.files)}
    timing = harness.timing(args)
    for number, column in harness.in_rounds(args.columns, args.rounds):
        settings = harness.settings(args)
        if column in LARGE:
            settings["batch_size"] = max(args.batch_size // 8, 1)
        task = {"column": column, "settings": settings, "timing": timing}
        found = harness.run_child(__file__, task, device=device, timeout=args.timeout)
        row = {"column": column, "round": number, "batch_size": settings["batch_size"]}
        document.add(row | found)


if __name__ == "__main__":
    harness.child_main(measure)
    main()
