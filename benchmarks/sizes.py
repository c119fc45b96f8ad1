"""Images/s where results have sizes of their own, beside one size and beside other loaders.

    python benchmarks/sizes.py --data PHOTOS --output benchmarks/results/sizes-h100.json
    python benchmarks/sizes.py --data PHOTOS --output a.json --columns patches "transformers: GPU"

Each column decodes, resizes and normalizes the same photos, and all but patches flip them:

    one size                     224 x 224 of each, in one tensor
    list                         a shorter side of 176 to 208 pixels: about as many as 224 x 224
    padded                       the same in one tensor, with a multiple of 32
    detection                    a shorter side of 480 to 800, the longer one of 1,333 at most
    torchvision                  the same by torchvision's ops on PIL images, in the workers
    patches                      SmartResize and Patches as Qwen2-VL has them
    patches, small batches       the same in batches of an eighth, as its peers have them
    transformers: workers        Qwen2-VL's own image processor, in the workers
    transformers: GPU            the same on the GPU; the workers decode (processors.py)
    detection step: resident     a detector trains on batches that are on the device: the ceiling
    detection step: gpuprefetch  the loader of torchvision's references, moved by ``accelerate``
    detection step: torchvision  that loader as it is (detector.py)

The last three have boxes, which follow their photos, and the model normalizes. ``--size`` scales
all sizes but those of patches. The pixels of a result are in the file: rates per image of columns
with other sizes differ by them. Rounds take the columns in turn and then the other way round.
The file is continued: a column of a round that is in it is not run again.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import clock
import detector
import harness
import loaders
import photos
import processors
import torch
import train

NO_MODEL = "none"
COUNTED = 32  # the first batches, whose pixels are counted: for patches the host waits


def _small_sides(settings: loaders.Settings) -> list[int]:
    return [side * settings.size // 224 for side in (176, 192, 208)]


def _large_sides(settings: loaders.Settings) -> list[int]:
    return [side * settings.size // 224 for side in range(480, 801, 32)]


def _longest(settings: loaders.Settings) -> int:
    return 1333 * settings.size // 224


def _fixed(settings: loaders.Settings) -> str:
    return f"Resize(({settings.size}, {settings.size}))"


def _small(settings: loaders.Settings) -> str:
    return f"RandomShortestSize({_small_sides(settings)})"


def _large(settings: loaders.Settings) -> str:
    sides = _large_sides(settings)
    return f"RandomShortestSize([{sides[0]}, ..., {sides[-1]}], max_size={_longest(settings)})"


def _smart(settings: loaders.Settings) -> str:
    return f"SmartResize({processors.FACTOR})"


def _transforms(resize: Any, *, flips: bool = True) -> list[Any]:
    from torchvision.transforms import v2

    flip = [v2.RandomHorizontalFlip()] if flips else []
    floats = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    return [resize, *flip, *floats, v2.Normalize(loaders.MEAN, loaders.STD)]


def _prefetched(settings: loaders.Settings, transforms: list[Any], **options: Any) -> Any:
    from gpuprefetch import DataPrefetcher, EncodedImageFolder

    loader = loaders.data_loader(EncodedImageFolder(settings.data), settings)
    return DataPrefetcher(loader, device=settings.device, transforms=transforms, **options)


def _one_size(settings: loaders.Settings) -> Any:
    from torchvision.transforms import v2

    transforms = _transforms(v2.Resize((settings.size, settings.size)))
    return _prefetched(settings, transforms, memory_format=torch.channels_last)


def _listed(settings: loaders.Settings, results: str | None = None) -> Any:
    from torchvision.transforms import v2

    transforms = _transforms(v2.RandomShortestSize(_small_sides(settings)))
    options = {"memory_format": torch.channels_last, "results": results}
    return _prefetched(settings, transforms, **options)


def _detection_transforms(settings: loaders.Settings) -> list[Any]:
    from torchvision.transforms import v2

    resize = v2.RandomShortestSize(_large_sides(settings), max_size=_longest(settings))
    return _transforms(resize)


def _detection(settings: loaders.Settings) -> Any:
    transforms = _detection_transforms(settings)
    return _prefetched(settings, transforms, memory_format=torch.channels_last)


def _torchvision(settings: loaders.Settings) -> Any:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    dataset = ImageFolder(settings.data, v2.Compose(_detection_transforms(settings)))
    loader = loaders.data_loader(dataset, settings, collate_fn=_pairs)
    return loaders.Converted(loader, partial(loaders.moved, device=settings.device))


def _pairs(samples: list[Any]) -> tuple[list[Any], torch.Tensor]:
    images, targets = zip(*samples, strict=True)
    return list(images), torch.tensor(targets)


def _patches(settings: loaders.Settings) -> Any:
    from gpuprefetch import Patches, SmartResize

    bounds = (processors.LEAST_PIXELS, processors.MOST_PIXELS)
    transforms = _transforms(SmartResize(processors.FACTOR, *bounds), flips=False)
    form = Patches(processors.PATCH, processors.MERGE, processors.TEMPORAL)
    return _prefetched(settings, transforms, results=form)


@dataclass(frozen=True)
class Column:
    """How a column is made.

    Args:
        build: its loader, of ``(images, target)``.
        resize: what it does to each image, in words.
        part: its batches are the ``--batch-size`` by this.
        beside: the columns that it is compared with.
        trains: a detector takes the batches.
    """

    build: Callable[[loaders.Settings], Any]
    resize: Callable[[loaders.Settings], str]
    part: int = 1
    beside: tuple[str, ...] = ()
    trains: bool = False

    def batch_size(self, batch_size: int) -> int:
        return max(batch_size // self.part, 1)


def _stepping(loader: Callable[[loaders.Settings, list[int], int], Any], *beside: str) -> Column:
    def build(settings: loaders.Settings) -> Any:
        return loader(settings, _large_sides(settings), _longest(settings))

    return Column(build, _large, 16, beside, trains=True)


CEILING = "detection step: resident"
REFERENCE = "detection step: torchvision"
PROCESSORS = ("transformers: workers", "transformers: GPU")
COLUMNS = {
    "one size": Column(_one_size, _fixed),
    "list": Column(_listed, _small, beside=("one size",)),
    "padded": Column(partial(_listed, results="padded"), _small, beside=("one size",)),
    "detection": Column(_detection, _large, 8, ("torchvision",)),
    "torchvision": Column(_torchvision, _large, 8),
    "patches": Column(_patches, _smart),
    "patches, small batches": Column(_patches, _smart, 8, PROCESSORS),
    PROCESSORS[0]: Column(processors.in_workers, _smart, 8),
    PROCESSORS[1]: Column(processors.on_device, _smart, 8),
    CEILING: _stepping(detector.resident),
    "detection step: gpuprefetch": _stepping(detector.gpuprefetch, CEILING, REFERENCE),
    REFERENCE: _stepping(detector.torchvision, CEILING),
}


def tensors_of(images: Any) -> list[torch.Tensor]:
    """The tensors of a batch's images: one, or one for each image of a list."""
    from gpuprefetch import PackedPatches, PaddedImages

    if isinstance(images, PackedPatches):
        return [images.pixel_values]
    if isinstance(images, PaddedImages):
        return [images.images]
    return [images] if isinstance(images, torch.Tensor) else list(images)


def pixels_of(images: Any) -> int:
    """The pixels of a batch's images, without padding and repeated patches."""
    from gpuprefetch import PackedPatches, PaddedImages

    if isinstance(images, PackedPatches):
        return int(images.image_grid_thw.prod(1).sum()) * processors.PATCH**2
    if isinstance(images, PaddedImages):
        return int(images.sizes.prod(1).sum())
    return sum(tensor.numel() // tensor.shape[-3] for tensor in tensors_of(images))


def _facts(batch: tuple[Any, Any]) -> dict[str, Any]:
    """What the loop got: the same on every side, or the comparison says nothing."""
    images, target = batch
    tensors = tensors_of(images)
    values = torch.cat([tensor.cpu().float().flatten() for tensor in tensors])
    return {
        "images": len(target),
        "shape": list(tensors[0].shape),
        "dtype": str(tensors[0].dtype),
        "device": tensors[0].device.type,
        "mean": round(values.mean().item(), 3),
        "std": round(values.std().item(), 3),
    }


def _no_step(images: Any, target: Any) -> None:
    """The loader alone."""


class Counted:
    """Batches as they come; ``pixels`` has the mean of an image, for each of the first batches."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.pixels: list[float] = []
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return map(self._counted, self._batches)  # a generator would keep each batch for longer

    def _counted(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        images, target = batch
        if len(self.pixels) < COUNTED:
            self.pixels.append(pixels_of(images) / len(target))
        return batch


def measure(
    column: str, model: str, settings: dict[str, Any], timing: dict[str, Any]
) -> dict[str, Any]:
    """One column, in this process; ``model`` is a detector, or "none"."""
    # Before there is a CUDA context: it prepares the environment, and all columns have the same.
    import gpuprefetch  # noqa: F401

    shared = loaders.Settings(**settings)
    kind = COLUMNS[column]
    torch.manual_seed(0)
    try:
        batches = kind.build(shared)
    except loaders.Missing as reason:
        return {"skipped": str(reason)}
    device = shared.device
    with train.stream_of("own", device):
        step = _no_step if model == NO_MODEL else detector.Step(model, device)
        counted = Counted(batches)
        found = clock.measure(counted, step, device=device, loops=["step"], facts=_facts, **timing)
        if isinstance(step, detector.Step):
            step.check()
    return {
        "pixels": round(statistics.fmean(counted.pixels)),
        "resize": kind.resize(shared),
        "beside": list(kind.beside),
        "first_batch": found["first_batch"],
        **found["loops"]["step"],
        "options": getattr(batches, "options", {}),
        "stats": batches.stats.as_dict() if hasattr(batches, "stats") else None,
    }


def column_of(name: str, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys by which a column's results are known, and what :func:`measure` is given."""
    kind = COLUMNS[name]
    settings = harness.settings(args)
    settings["batch_size"] = kind.batch_size(args.batch_size)
    model = args.detection_model if kind.trains else NO_MODEL
    what = {
        "column": name,
        "model": model,
        "batch_size": settings["batch_size"],
        "workers": args.workers,
        "size": args.size,
    }
    task = {"column": name, "model": model, "settings": settings, "timing": harness.timing(args)}
    return what, task


def main(words: list[str] | None = None) -> None:
    parser = harness.timed_parser(__doc__)
    parser.add_argument("--columns", nargs="+", choices=list(COLUMNS), default=list(COLUMNS))
    parser.add_argument("--detection-model", choices=detector.MODELS, default=detector.MODELS[0])
    parser.add_argument("--stop-after", type=float, help="seconds, for a time that is limited")
    args: argparse.Namespace = harness.parse_arguments(parser, words, **harness.TIMED_TINY)
    device = harness.Device()
    document = harness.Document("sizes", args, device)
    document.note_photos("sample", photos.photo_facts(args.data, args.files))
    rounds = (
        (number, *column_of(name, args))
        for number, name in harness.in_rounds(args.columns, args.rounds)
    )
    harness.measure_rounds(__file__, document, rounds, device=device, args=args)


if __name__ == "__main__":
    harness.child_main(measure)
    main()
