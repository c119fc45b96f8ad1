"""Train a torchvision detector on a folder in COCO's layout, its pictures decoded on the GPU.

    python train.py                                         # on a small folder, which it draws
    python train.py DATA --model retinanet_resnet50_fpn_v2  # DATA/annotations/instances_train*.json
    python train.py DATA --loader torchvision               # the same, with PIL in the workers

The last line it prints is a summary of the run in JSON.
"""

import argparse
import contextlib
import json
import os
import time
from collections import OrderedDict, defaultdict
from itertools import pairwise
from pathlib import Path

import kornia.augmentation as K
import torch
import torchvision
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from scenes import drawn_folder
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.ssd import SSD
from torchvision.ops import Conv2dNormActivation
from torchvision.transforms import v2
from tqdm import tqdm

from gpuprefetch import (
    DataPrefetcher,
    EncodedImage,
    RandomResizedCrop,
    Resize,
)

# What stands in for an argument that is left out: torchvision's SSDlite for photos, and for the
# drawn pictures a small SSD that learns them in two minutes on two CPU cores.
PHOTO_DEFAULTS = {
    "model": "ssdlite320_mobilenet_v3_large",
    "epochs": 60,
    "batch_size": 64,
    "image_size": 320,
    "lr": 1e-3,
}
DRAWN_DEFAULTS = {
    "model": "small_ssd",
    "epochs": 20,
    "batch_size": 8,
    "image_size": 128,
    "lr": 5e-3,
}
WEIGHT_DECAY = 1e-2
MIN_AREA = 0.5  # of a crop, in its picture
SEED = 0


def main(argv=None):
    start = time.perf_counter()
    args = parse_args(argv)
    args.data = args.data or drawn_folder()
    summary = train(args)
    summary["seconds"] = round(time.perf_counter() - start, 1)
    print(json.dumps(summary))
    return summary


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("data", nargs="?", type=Path, metavar="DATA", help="folder with annotations/ and pictures")
    add("--model", help="small_ssd, or a detection model of torchvision")
    add("--loader", choices=["gpuprefetch", "torchvision"], default="gpuprefetch")
    add("--epochs", type=positive)
    add("--batch-size", type=positive)
    add("--image-size", type=positive, help="height and width in pixels")
    add("--lr", type=float, help="the largest of the cycle")
    add("--workers", type=int, default=min(8, os.cpu_count()))
    add("--limit-batches", type=positive, help="end each epoch after this many")
    args = parser.parse_args(argv)
    if args.data and not [*args.data.glob("annotations/instances_train*.json")]:
        parser.error(f"{args.data} is no folder with annotations/instances_train*.json")
    parser.set_defaults(**(PHOTO_DEFAULTS if args.data else DRAWN_DEFAULTS))
    args = parser.parse_args(argv)
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return args


def positive(text):
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


# ---- data


class CocoFolder(Dataset):
    """Encoded pictures of a split and their objects.

    A sample is an :class:`EncodedImage` and a dict: ``boxes`` (tv_tensors.BoundingBoxes, in pixels
    of the file), ``labels`` (1 is the first category, 0 the model's background) and ``image_id``.
    ``split`` is the beginning of a name: "train" finds ``annotations/instances_train2017.json`` and
    the pictures in ``train2017/``.
    """

    def __init__(self, root, split):
        found = sorted((root / "annotations").glob(f"instances_{split}*.json"))
        if not found:
            raise FileNotFoundError(f"no {root / 'annotations'}/instances_{split}*.json")
        self.annotations = found[0]
        self.folder = root / self.annotations.stem.removeprefix("instances_")
        content = json.loads(self.annotations.read_text())
        self.images = content["images"]
        self.categories = sorted(category["id"] for category in content["categories"])
        self.objects = defaultdict(list)
        for item in content["annotations"]:
            if not item.get("iscrowd"):
                self.objects[item["image_id"]].append(item)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        info = self.images[index]
        path = self.folder / info["file_name"]
        objects = self.objects[info["id"]]
        boxes = torch.tensor([item["bbox"] for item in objects], dtype=torch.float32).view(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        labels = [1 + self.categories.index(item["category_id"]) for item in objects]
        canvas = (info["height"], info["width"])
        target = {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=canvas),
            "labels": torch.tensor(labels, dtype=torch.int64),
            "image_id": info["id"],
        }
        return EncodedImage(path.read_bytes(), index, str(path)), target


class PilFolder(CocoFolder):
    """The same with a decoded picture, transformed in the worker: how it is done without us."""

    def __init__(self, root, split, transforms):
        super().__init__(root, split)
        self.transforms = v2.Compose(transforms)

    def __getitem__(self, index):
        encoded, target = super().__getitem__(index)
        return self.transforms(Image.open(encoded.path).convert("RGB"), target)


def build_loader(args, split):
    """Return a loader of images, ``(N, 3, size, size)`` in [0, 1], and a tuple of N targets."""
    if args.loader == "torchvision":
        return build_dataloader(PilFolder(args.data, split, pil_transforms(args, split)), args)
    loader = build_dataloader(CocoFolder(args.data, split), args)
    return DataPrefetcher(
        loader, device=args.device, transforms=device_transforms(args, split), seed=SEED
    )


def device_transforms(args, split):
    """List what moves the pictures, and with them their boxes."""
    size = (args.image_size, args.image_size)
    # Boxes that were cut away go, and their labels. Models take plain tensors.
    clean = [v2.SanitizeBoundingBoxes(), v2.ToPureTensor()]
    if split != "train":
        return [Resize(size), *clean]
    affine = v2.RandomAffine(0, translate=(0.1, 0.1), scale=(0.8, 1.2))
    return [
        RandomResizedCrop(size, scale=(MIN_AREA, 1.0)),
        K.RandomHorizontalFlip(p=0.5),
        v2.RandomApply([affine]),
        K.ColorJitter(0.2, 0.2, 0.2, 0.05),
        *clean,
    ]


def pil_transforms(args, split):
    """Say :func:`device_transforms` as torchvision does, for one PIL image and its target."""
    size = (args.image_size, args.image_size)
    ops = [v2.Resize(size)]
    if split == "train":
        affine = v2.RandomAffine(0, translate=(0.1, 0.1), scale=(0.8, 1.2))
        ops = [
            v2.RandomResizedCrop(size, scale=(MIN_AREA, 1.0)),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([affine]),
            v2.ColorJitter(0.2, 0.2, 0.2, 0.05),
        ]
    to_tensor = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    return [*ops, *to_tensor, v2.SanitizeBoundingBoxes(), v2.ToPureTensor()]


def build_dataloader(dataset, args):
    training = dataset.annotations.stem.startswith("instances_train")
    return DataLoader(
        dataset,
        batch_size=args.batch_size,
        shuffle=training,
        drop_last=training,
        collate_fn=zip_samples,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        pin_memory=args.device.type == "cuda",
    )


def zip_samples(samples):
    """Keep targets apart: pictures differ in their number of objects."""
    return tuple(zip(*samples, strict=True))


def move(batch, device):
    """Lay out a batch as models take it; one of gpuprefetch's is on the device already."""
    images, targets = batch
    targets = [
        {key: target[key].to(device, non_blocking=True) for key in ("boxes", "labels")}
        for target in targets
    ]
    return [image.to(device, non_blocking=True) for image in images], targets


# ---- model


class SmallBackbone(nn.Module):
    """Feature maps at strides 8, 16 and 32, 0.6 million weights in all."""

    def __init__(self):
        super().__init__()
        widths = [3, 16, 32, 64, 128, 128]
        stages = []
        for before, after in pairwise(widths):
            down = Conv2dNormActivation(before, after, stride=2)
            stages.append(nn.Sequential(down, Conv2dNormActivation(after, after)))
        self.stages = nn.ModuleList(stages)

    def forward(self, images):
        """Map ``(N, 3, H, W)`` to a dict of the last three maps."""
        maps = []
        for stage in self.stages:
            images = stage(images)
            maps.append(images)
        return OrderedDict(enumerate(maps[-3:]))


def build_model(args, categories):
    """Build a detector of ``categories`` and the background, with random weights."""
    torch.manual_seed(SEED)
    if args.model != "small_ssd":
        # SSDs resize to the one size they have, the others as they are told.
        side = args.image_size
        sizes = {} if args.model.startswith("ssd") else {"min_size": side, "max_size": side}
        return torchvision.models.get_model(
            args.model, weights=None, weights_backbone=None, num_classes=categories + 1, **sizes
        )
    anchors = DefaultBoxGenerator([[2]] * 3, scales=[0.2, 0.35, 0.5, 0.7])
    size = (args.image_size, args.image_size)
    return SSD(SmallBackbone(), anchors, size, categories + 1)


# ---- training


def train(args):
    """Train, and evaluate before and after; returns the summary."""
    train_loader = build_loader(args, "train")
    val_loader = build_loader(args, "val")
    categories = train_loader.dataset.categories
    if val_loader.dataset.categories != categories:
        raise ValueError(
            f"train and val need the same categories, which number labels: {args.data}"
        )
    steps = min(len(train_loader), args.limit_batches or len(train_loader))
    if steps == 0:
        raise ValueError(f"{len(train_loader.dataset)} pictures do not fill a batch.")
    model = build_model(args, len(categories)).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=WEIGHT_DECAY)
    scheduler = OneCycleLR(optimizer, args.lr, total_steps=args.epochs * steps)
    untrained = average_precision(val_loader.dataset, detect(model, val_loader, args))
    seconds = 0.0
    for epoch in range(args.epochs):
        start = time.perf_counter()
        loss = train_epoch(model, train_loader, steps, optimizer, scheduler, args, epoch)
        seconds += time.perf_counter() - start
        print(f"epoch {epoch + 1}: loss {loss:.3f}")
    detections = detect(model, val_loader, args)
    return {
        "model": args.model,
        "loader": args.loader,
        "device": str(args.device),
        "epochs": args.epochs,
        "images_per_second": round(args.epochs * steps * args.batch_size / seconds, 1),
        "map": average_precision(val_loader.dataset, detections),
        "map_untrained": untrained,
        "map_labels_by_chance": average_precision(
            val_loader.dataset, by_chance(detections, categories)
        ),
    }


def train_epoch(model, loader, steps, optimizer, scheduler, args, epoch):
    """Train for an epoch; returns the mean loss of its steps."""
    model.train()
    total = torch.zeros((), device=args.device)
    bar = tqdm(loader, desc=f"epoch {epoch + 1}", total=steps, unit="batch", leave=False)
    for _, batch in zip(range(steps), bar, strict=False):
        images, targets = move(batch, args.device)
        with autocast(args):
            loss = sum(model(images, targets).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.detach()
    return total.item() / steps


def autocast(args):
    """Compute in bfloat16 on a GPU, and as written on a CPU."""
    return torch.autocast(args.device.type, torch.bfloat16, enabled=args.device.type == "cuda")


# ---- evaluation


@torch.no_grad()
def detect(model, loader, args):
    """Detect objects in every picture; returns them as COCO writes them, in pixels of the file."""
    model.eval()
    sizes = {image["id"]: (image["width"], image["height"]) for image in loader.dataset.images}
    categories = loader.dataset.categories
    found = []
    for batch in loader:
        images, _ = move(batch, args.device)
        ids = [target["image_id"] for target in batch[1]]
        with autocast(args):
            results = model(images)
        for image_id, result in zip(ids, results, strict=True):
            scale = torch.tensor(sizes[image_id] * 2) / args.image_size
            boxes = result["boxes"].float().cpu() * scale
            boxes[:, 2:] -= boxes[:, :2]
            rows = boxes.tolist(), result["scores"].tolist(), result["labels"].tolist()
            found += [
                {
                    "image_id": image_id,
                    "bbox": box,
                    "score": score,
                    "category_id": categories[i - 1],
                }
                for box, score, i in zip(*rows, strict=True)
            ]
    return found


def by_chance(detections, categories):
    """Give every detection a category at random: what good boxes alone are worth."""
    drawn = torch.randint(
        len(categories), (len(detections),), generator=torch.Generator().manual_seed(SEED)
    )
    return [
        item | {"category_id": categories[i]}
        for item, i in zip(detections, drawn.tolist(), strict=True)
    ]


def average_precision(dataset, detections):
    """COCO's mAP over IoU 0.50 to 0.95."""
    if not detections:
        return 0.0
    with contextlib.redirect_stdout(None):  # pages of tables
        truth = COCO(dataset.annotations)
        evaluation = COCOeval(truth, truth.loadRes(detections), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return round(float(evaluation.stats[0]), 4)


if __name__ == "__main__":
    main()
