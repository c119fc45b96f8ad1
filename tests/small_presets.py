"""torchvision's reference presets for small pictures, and datasets for them."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from pictures import draw, encode
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision.datasets import wrap_dataset_for_transforms_v2
from torchvision.transforms import v2


def load_example(folder, name):
    """A module of an example, which is no package."""
    path = Path(__file__).parents[1] / "examples" / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{folder}_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its classes are pickled by name
    spec.loader.exec_module(module)
    return module


references = load_example("references", "presets")
STD = references.STD
SIDES = (40, 47, 54, 61)


def detection(name):
    """A preset of torchvision's references for small pictures, or one without RandomIoUCrop."""
    if name == "distort":
        ops = [v2.RandomPhotometricDistort(), v2.RandomZoomOut(), v2.RandomHorizontalFlip()]
        return references.Preset([*ops, *references.detection("hflip").transforms.transforms])
    return references.detection(name, sides=SIDES, max_size=101, side=64)


def segmentation(name):
    return references.segmentation(name, base_size=48, crop_size=40)


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
    pytest.importorskip("pycocotools")
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
