"""A detection model's training step, and photos with boxes for it.

The loader is torchvision's reference: PIL in the workers, its preset ``multiscale`` on picture and
boxes together, lists that are moved in the loop. This library's is the same loader, moved by
``accelerate``. A folder of photos has no boxes, so each photo gets some that are made up, by its
index: 1 to 13, about as many as COCO's photos have.

The model would resize once more what the preset has resized; ``_skip_resize``, which torchvision's
references set for this preset, leaves that out. It still normalizes and pads each batch.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import loaders
import torch
from torch.utils.data import Dataset

# The first one's step is the shorter: a slow loader shows.
MODELS = [
    "fasterrcnn_mobilenet_v3_large_fpn",
    "fasterrcnn_resnet50_fpn",
    "retinanet_resnet50_fpn",
]
# Random weights must not diverge in minutes.
RATE = 1e-5
CLASSES = 91  # of COCO, with the background
MOST_BOXES = 13
SIDES = (0.05, 0.5)  # of a box, in the picture's side
# Their sizes differ, as those of a loader's batches do.
RESIDENT = 16

Target = dict[str, torch.Tensor]


class Step:
    """A training step on ``(images, targets)``: bf16 autocast, channels_last, SGD.

    On a CPU it is float32: few have bf16.

    Args:
        model_name: of ``MODELS``; with random weights, all of them trained.
        device: ``"cuda"`` or ``"cpu"``.
    """

    def __init__(self, model_name: str, device: str) -> None:
        from torchvision.models import get_model

        torch.manual_seed(0)
        model = get_model(
            model_name, weights=None, weights_backbone=None, num_classes=CLASSES, _skip_resize=True
        )
        self._model = model.to(device, memory_format=torch.channels_last).train()
        self._optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        self._device = device
        self._loss = torch.zeros(())

    def __call__(self, images: Any, targets: Any) -> torch.Tensor:
        on_gpu = self._device == "cuda"
        with torch.autocast(self._device, torch.bfloat16, enabled=on_gpu):
            losses = self._model(list(images), list(targets))
            loss = torch.stack(list(losses.values())).sum()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        self._loss = loss.detach()
        return loss

    def check(self) -> None:
        """Raise where the last loss is no number: such a step has no proposals, and is too fast."""
        if not self._loss.isfinite():
            raise RuntimeError(f"the detector's loss is {self._loss.item()}: it has diverged")


def preset(sides: list[int], max_size: int) -> Callable[[Any, Target], tuple[Any, Target]]:
    """torchvision's ``multiscale`` preset, on a picture and its target."""
    from torchvision.transforms import v2

    return v2.Compose(
        [
            v2.RandomShortestSize(sides, max_size=max_size),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.SanitizeBoundingBoxes(),
            v2.ToPureTensor(),
        ]
    )


class Boxed(Dataset[tuple[Any, Target]]):
    """Photos in class folders with made-up boxes: the same ones for an index in every process.

    Args:
        folder: of class folders.
        transforms: called with the picture and its target, a dict of ``boxes`` and ``labels``.
    """

    def __init__(
        self, folder: str, transforms: Callable[[Any, Target], tuple[Any, Target]]
    ) -> None:
        from torchvision.datasets import ImageFolder

        self._paths = [path for path, _ in ImageFolder(folder).samples]
        self._transforms = transforms
        generator = torch.Generator().manual_seed(0)
        count = len(self._paths)
        self._counts = torch.randint(1, MOST_BOXES + 1, (count,), generator=generator)
        least, most = SIDES
        shape = (count, MOST_BOXES, 2)
        sides = least + (most - least) * torch.rand(shape, generator=generator)
        corners = (1 - sides) * torch.rand(shape, generator=generator)
        self._boxes = torch.cat([corners, corners + sides], dim=2)  # in the picture's sides
        self._labels = torch.randint(1, CLASSES, shape[:2], generator=generator)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Any, Target]:
        from PIL import Image
        from torchvision import tv_tensors

        with Image.open(self._paths[index]) as file:
            image = file.convert("RGB")
        width, height = image.size
        count = int(self._counts[index])
        boxes = self._boxes[index, :count] * torch.tensor([width, height, width, height])
        target = {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(height, width)),
            "labels": self._labels[index, :count],
        }
        return self._transforms(image, target)


def _zipped(samples: list[tuple[Any, Target]]) -> tuple[Any, ...]:
    return tuple(zip(*samples, strict=True))


def _loader(settings: loaders.Settings, sides: list[int], max_size: int) -> Any:
    dataset = Boxed(settings.data, preset(sides, max_size))
    return loaders.data_loader(dataset, settings, collate_fn=_zipped)


def torchvision(settings: loaders.Settings, sides: list[int], max_size: int) -> Any:
    """The reference: images and targets are pinned, and moved one by one."""
    move = partial(loaders.moved, device=settings.device)
    return loaders.Converted(_loader(settings, sides, max_size), move)


def gpuprefetch(settings: loaders.Settings, sides: list[int], max_size: int) -> Any:
    """The reference's loader, moved by ``accelerate``."""
    from gpuprefetch import accelerate

    loader = _loader(settings, sides, max_size)
    return accelerate(loader, device=settings.device, print_plan=False)


def resident(settings: loaders.Settings, sides: list[int], max_size: int) -> Any:
    """The reference's first batches, kept on the device, again and again: the ceiling."""
    images = RESIDENT * settings.batch_size
    few = replace(settings, images=images, persistent=False)

    def batches() -> Iterator[Any]:
        return itertools.cycle(list(torchvision(few, sides, max_size)))

    return loaders.Again(batches)
