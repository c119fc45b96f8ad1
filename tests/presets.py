"""torchvision's reference presets in their v2 form, in small, and datasets for them."""

import json
from collections import defaultdict

import numpy as np
import torch
from pictures import draw, encode
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import datasets, tv_tensors
from torchvision.datasets import wrap_dataset_for_transforms_v2
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
COLOR = (123.0, 117.0, 104.0)
SIDES = (40, 47, 54, 61)


class Cut(torch.nn.Module):
    """An op of a script's own: a random part of one size, of the picture and of its target."""

    def __init__(self, side, color):
        super().__init__()
        self.side = side
        self.color = color

    def forward(self, image, target):
        height, width = F.get_size(image)
        down, right = (max(side - self.side, 0) for side in (height, width))
        r = torch.rand(1)
        top, left = int(down * r), int(right * r)
        size = (min(height, self.side), min(width, self.side))
        given = [image, target["boxes"], *([target["masks"]] if "masks" in target else [])]
        moved = [F.crop(each, top, left, *size) for each in given]
        padding = [0, 0, self.side - size[1], self.side - size[0]]
        fills = [list(self.color), None, 0][: len(moved)]
        image, boxes, *masks = (
            F.pad(each, padding, fill=fill) for each, fill in zip(moved, fills, strict=True)
        )
        kept = (boxes[:, 2:] > boxes[:, :2]).all(1)
        target = target | {"boxes": tv_tensors.wrap(boxes[kept], like=boxes)}
        target["labels"] = target["labels"][kept]
        if masks:
            target["masks"] = tv_tensors.Mask(masks[0][kept])
        return image, target


class PadAtTheEnd(v2.Transform):
    """An op of a script's own, as torchvision documents them."""

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


class Preset:
    """As the presets of the references are called."""

    def __init__(self, ops):
        self.transforms = v2.Compose(ops)

    def __call__(self, img, target):
        return self.transforms(img, target)


def detection(name):
    """The training preset of a name."""
    flip = v2.RandomHorizontalFlip(p=0.5)
    fill = defaultdict(lambda: COLOR, {tv_tensors.Mask: 0})
    ops = {
        "hflip": [flip],
        "lsj": [v2.ScaleJitter((64, 64), antialias=True), Cut(64, COLOR), flip],
        "multiscale": [v2.RandomShortestSize(SIDES, max_size=101), flip],
        "ssd": [
            v2.RandomPhotometricDistort(),
            v2.RandomZoomOut(fill=fill),
            v2.RandomIoUCrop(),
            flip,
        ],
        "distort": [v2.RandomPhotometricDistort(), v2.RandomZoomOut(fill), flip],
        "ssdlite": [v2.RandomIoUCrop(), flip],
        "eval": [],
    }[name]
    ends = [v2.ToImage(), v2.ToDtype(torch.float, scale=True)]
    if name != "eval":
        boxes = tv_tensors.BoundingBoxFormat.XYXY
        ends += [v2.ConvertBoundingBoxFormat(boxes), v2.SanitizeBoundingBoxes()]
    return Preset([*ops, *ends, v2.ToPureTensor()])


def segmentation(name, base=48, crop=40):
    """The preset of training or of evaluation."""
    types = {torch.Tensor: torch.float32, tv_tensors.Mask: torch.int64, "others": None}
    ends = [
        v2.PILToTensor(),
        v2.ToDtype(types, scale=True),
        v2.Normalize(MEAN, STD),
        v2.ToPureTensor(),
    ]
    if name == "eval":
        return Preset([v2.Resize((base, base)), *ends])
    moves = [
        v2.RandomResize(base // 2, 2 * base),
        v2.RandomHorizontalFlip(0.5),
        PadAtTheEnd(crop, {tv_tensors.Mask: 255, "others": 0}),
        v2.RandomCrop(crop),
    ]
    return Preset([*moves, *ends])


def write_coco(root, count, shapes):
    """Pictures in COCO's layout, each with one to three objects, and one without any."""
    root.mkdir(exist_ok=True)
    images, annotations = [], []
    for i in range(count):
        height, width = shapes[i % len(shapes)]
        (root / f"{i}.png").write_bytes(encode(draw(height, width, seed=i), "PNG"))
        images.append({"id": i, "file_name": f"{i}.png", "height": height, "width": width})
        rng = np.random.default_rng(i)
        for _ in range(0 if i == 5 else 1 + i % 3):
            w, h = rng.uniform(0.4, 0.9, 2) * (width, height)
            x, y = rng.uniform(0, 1, 2) * (width - w, height - h)
            corners = [x, y, x + w, y, x + w, y + h, x, y + h]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": i,
                    "category_id": 1 + int(rng.integers(3)),
                    "bbox": [x, y, w, h],
                    "area": w * h,
                    "iscrowd": 0,
                    "segmentation": [corners],
                }
            )
    categories = [{"id": i, "name": str(i)} for i in (1, 2, 3)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (root / "instances.json").write_text(json.dumps(content))


def coco(root, transforms, keys=("boxes", "labels", "image_id", "masks")):
    dataset = datasets.CocoDetection(root, root / "instances.json", transforms=transforms)
    return wrap_dataset_for_transforms_v2(dataset, target_keys=keys)


def write_voc(root, count, shapes):
    """Pictures and masks in the layout of VOC's segmentation."""
    base = root / "VOCdevkit" / "VOC2012"
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (base / name).mkdir(parents=True)
    for i in range(count):
        height, width = shapes[i % len(shapes)]
        file = encode(draw(height, width, seed=i), "PNG")
        (base / "JPEGImages" / f"{i}.jpg").write_bytes(file)  # PIL goes by what is in it
        classes = np.random.default_rng(i).integers(0, 21, (-(-height // 8), -(-width // 8)))
        mask = np.kron(classes, np.ones((8, 8))).astype(np.uint8)[:height, :width]
        Image.fromarray(mask).save(base / "SegmentationClass" / f"{i}.png")
    (base / "ImageSets" / "Segmentation" / "train.txt").write_text(
        "\n".join(map(str, range(count)))
    )


def voc(root, transforms):
    dataset = datasets.VOCSegmentation(root, image_set="train", transforms=transforms)
    return wrap_dataset_for_transforms_v2(dataset)


def zipped(samples):
    return tuple(zip(*samples, strict=True))


def loader_of(dataset, **options):
    return DataLoader(dataset, **({"batch_size": 4, "collate_fn": zipped} | options))
