"""transformers' Qwen2-VL image processor as a loader, in the DataLoader's workers or on the GPU.

Both decode with ``torchvision.io.decode_image`` in the workers and call the processor once a batch,
with its torchvision backend. That was the fastest of eight ways on one thread (transformers 5.24).
Images a CPU second, of photos of about 470 x 400:

    decoded by, backend of the processor    one call a batch    one call a photo
    decode_image, torchvision                       150 to 168          142 to 159
    PIL, torchvision                                148 to 151          120 to 135
    decode_image, PIL                                 48 to 57            77 to 94
    PIL, PIL                                          54 to 55            81 to 87

A batch is ``(PackedPatches, target)`` on the device, in float32, as this library makes it.
"""

from functools import partial
from typing import Any

import loaders
import torch

PATCH = 14
MERGE = 2  # patches a side that the model merges
TEMPORAL = 2  # each patch is written as often
FACTOR = PATCH * MERGE  # both sides are multiples of it
LEAST_PIXELS = 56 * 56
MOST_PIXELS = 28 * 28 * 1280


def processor() -> Any:
    """The image processor, with the bounds above and this benchmark's normalization.

    Raises:
        loaders.Missing: transformers is not installed.
    """
    try:
        # Where it cannot use torchvision, the name at the top of the package is the PIL backend's.
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    except ImportError as error:
        raise loaders.Missing(f"transformers: {error}") from None
    return Qwen2VLImageProcessor(
        size={"shortest_edge": LEAST_PIXELS, "longest_edge": MOST_PIXELS},
        patch_size=PATCH,
        temporal_patch_size=TEMPORAL,
        merge_size=MERGE,
        image_mean=list(loaders.MEAN),
        image_std=list(loaders.STD),
    )


def in_workers(settings: loaders.Settings) -> loaders.Batches:
    """The workers decode and process; patches are pinned and moved."""
    from gpuprefetch import PackedPatches

    loader = _photos(settings, partial(_processed, processor()))

    def convert(batch: Any) -> tuple[Any, torch.Tensor]:
        (values, grids), target = loaders.moved(batch, settings.device)
        return PackedPatches(values, grids), target

    return loaders.Converted(loader, convert, _options("workers"))


def on_device(settings: loaders.Settings) -> loaders.Batches:
    """The workers decode; uint8 photos are pinned and moved, and processed on the device."""
    from gpuprefetch import PackedPatches

    process = processor()
    loader = _photos(settings, _collated)

    def convert(batch: Any) -> tuple[Any, torch.Tensor]:
        images, target = loaders.moved(batch, settings.device)
        found = process(images=images, return_tensors="pt")
        grids = found["image_grid_thw"].to(settings.device, non_blocking=True)
        return PackedPatches(found["pixel_values"], grids), target

    return loaders.Converted(loader, convert, _options(settings.device))


def _options(place: str) -> dict[str, Any]:
    return {"backend": "torchvision", "decode": "decode_image", "calls": "batch", "runs on": place}


def _photos(settings: loaders.Settings, collate: Any) -> Any:
    from torchvision.datasets import ImageFolder
    from torchvision.io import decode_image

    dataset = ImageFolder(settings.data, loader=partial(decode_image, mode="RGB"))
    return loaders.data_loader(dataset, settings, collate_fn=collate)


def _collated(samples: list[tuple[torch.Tensor, int]]) -> tuple[list[torch.Tensor], torch.Tensor]:
    images, target = zip(*samples, strict=True)
    return list(images), torch.tensor(target)


def _processed(process: Any, samples: list[tuple[torch.Tensor, int]]) -> Any:
    images, target = _collated(samples)
    found = process(images=images, return_tensors="pt")
    return (found["pixel_values"], found["image_grid_thw"]), target
