"""The presets of torchvision's references in their v2 form: transforms of a picture and its target.

A preset is called with both, in the dataset. Nothing here knows where it runs.
"""

from collections import defaultdict

import torch
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
COLOR = (123.0, 117.0, 104.0)  # of padding
SIDES = (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)
AUGMENTATIONS = ("hflip", "lsj", "multiscale", "ssd", "ssdlite")


class Preset:
    """Calls its transforms with a picture and its target."""

    def __init__(self, ops):
        self.transforms = v2.Compose(ops)

    def __call__(self, img, target):
        return self.transforms(img, target)


class FixedSizeCrop(torch.nn.Module):
    """A random part of ``side`` x ``side`` pixels, with a color below and beside it if needed."""

    def __init__(self, side, color):
        super().__init__()
        self.side = side
        self.color = color

    def forward(self, image, target):
        height, width = F.get_size(image)
        place = torch.rand(1)
        top, left = (int(max(length - self.side, 0) * place) for length in (height, width))
        size = (min(height, self.side), min(width, self.side))
        padding = [0, 0, self.side - size[1], self.side - size[0]]

        def cut(part, fill=None):
            return F.pad(F.crop(part, top, left, *size), padding, fill=fill)

        boxes = cut(target["boxes"])
        kept = (boxes[:, 2:] > boxes[:, :2]).all(1)
        moved = target | {"boxes": tv_tensors.wrap(boxes[kept], like=boxes)}
        moved["labels"] = target["labels"][kept]
        if "masks" in target:
            moved["masks"] = tv_tensors.Mask(cut(target["masks"], fill=0)[kept])
        return cut(image, fill=list(self.color)), moved


class PadIfSmaller(v2.Transform):
    """Pad below and to the right, up to ``side`` pixels."""

    def __init__(self, side, fill):
        super().__init__()
        self.side = side
        self.fill = fill

    def make_params(self, flat_inputs):
        height, width = F.get_size(flat_inputs[0])
        return {"padding": [0, 0, max(self.side - width, 0), max(self.side - height, 0)]}

    def transform(self, inpt, params):
        fill = self.fill[tv_tensors.Mask if isinstance(inpt, tv_tensors.Mask) else "others"]
        return self._call_kernel(F.pad, inpt, padding=params["padding"], fill=fill)


def detection(name, *, sides=SIDES, max_size=1333, side=1024):
    """The preset of a data augmentation; ``"eval"`` is that of evaluation."""
    flip = v2.RandomHorizontalFlip(p=0.5)
    fill = defaultdict(lambda: COLOR, {tv_tensors.Mask: 0})
    moves = {
        "eval": [],
        "hflip": [flip],
        "lsj": [v2.ScaleJitter((side, side), antialias=True), FixedSizeCrop(side, COLOR), flip],
        "multiscale": [v2.RandomShortestSize(sides, max_size=max_size), flip],
        "ssd": [v2.RandomPhotometricDistort(), v2.RandomZoomOut(fill), v2.RandomIoUCrop(), flip],
        "ssdlite": [v2.RandomIoUCrop(), flip],
    }
    boxes = [v2.ConvertBoundingBoxFormat(tv_tensors.BoundingBoxFormat.XYXY)]
    boxes.append(v2.SanitizeBoundingBoxes())
    to_float = [v2.ToImage(), v2.ToDtype(torch.float, scale=True)]
    ends = to_float if name == "eval" else to_float + boxes
    return Preset([*moves[name], *ends, v2.ToPureTensor()])


def segmentation(name, *, base_size=520, crop_size=480):
    """The preset of training, or that of evaluation for ``"eval"``."""
    types = {torch.Tensor: torch.float32, tv_tensors.Mask: torch.int64, "others": None}
    moves = [
        v2.RandomResize(base_size // 2, 2 * base_size),
        v2.RandomHorizontalFlip(0.5),
        PadIfSmaller(crop_size, {tv_tensors.Mask: 255, "others": 0}),
        v2.RandomCrop(crop_size),
    ]
    ends = [v2.PILToTensor(), v2.ToDtype(types, scale=True), v2.Normalize(MEAN, STD)]
    if name == "eval":
        moves = [v2.Resize((base_size, base_size))]
    return Preset([*moves, *ends, v2.ToPureTensor()])
