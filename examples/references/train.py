"""Train as torchvision's references for detection and segmentation do, with two lines changed.

    python train.py detection                            # on a few pictures that it draws
    python train.py detection COCO --augmentation lsj    # COCO/train, COCO/instances_train.json
    python train.py segmentation VOC                     # VOC/VOCdevkit/VOC2012
    python train.py segmentation VOC --plain             # without gpuprefetch, for comparison

``--checkpoint FILE`` saves model, optimizer and the place in the epoch after every step, and goes
on from there if the file exists. The last line it prints is a summary of the run in JSON.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
import presets
import torch
import torchvision
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import CocoDetection, VOCSegmentation, wrap_dataset_for_transforms_v2

from gpuprefetch import accelerate  # line 1

sys.path.append(str(Path(__file__).parents[1] / "detection"))
CLASSES = {"detection": 91, "segmentation": 21}
MODELS = {"detection": "ssdlite320_mobilenet_v3_large", "segmentation": "lraspp_mobilenet_v3_large"}


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("task", choices=["detection", "segmentation"])
    add("data", nargs="?", type=Path, help="folder; drawn pictures without one")
    add("--augmentation", choices=presets.AUGMENTATIONS, default="ssdlite", help="for detection")
    add("--model", help="of torchvision")
    add("--epochs", type=int, default=1)
    add("--batch-size", type=int, default=4)
    add("--lr", type=float, default=0.01)
    add("--side", type=int, help="of the largest pictures, in place of the references' sizes")
    add("--workers", type=int, default=min(8, os.cpu_count()))
    add("--limit-steps", type=int, help="stop after this many")
    add("--checkpoint", type=Path)
    add("--plain", action="store_true", help="leave the DataLoader as it is")
    args = parser.parse_args(argv)
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return args


# ---- data


def build_loader(args):
    """Return the loader of the references, moved to the device."""
    dataset = coco(args) if args.task == "detection" else voc(args)
    loader = DataLoader(
        dataset,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        collate_fn=zip_samples if args.task == "detection" else None,
    )
    if not args.plain:
        loader = accelerate(loader, device=args.device, seed=0)  # line 2
    return loader


def coco(args):
    """Pictures, boxes and labels, without pictures that have none."""
    sizes = {} if args.side is None else sizes_up_to(args.side)
    preset = presets.detection(args.augmentation, **sizes)
    annotations = args.data / "annotations" / "instances_train.json"
    dataset = CocoDetection(args.data / "train", annotations, transforms=preset)
    known = [i for i, image in enumerate(dataset.ids) if dataset.coco.getAnnIds(image)]
    dataset = wrap_dataset_for_transforms_v2(dataset, target_keys=["boxes", "labels", "image_id"])
    return torch.utils.data.Subset(dataset, known)


def sizes_up_to(side):
    return {"sides": range(side // 2, side, 8), "max_size": side, "side": side}


def voc(args):
    """Pictures and masks of classes; 255 counts for nothing."""
    sizes = {} if args.side is None else {"base_size": args.side, "crop_size": args.side}
    preset = presets.segmentation("train", **sizes)
    dataset = VOCSegmentation(args.data, image_set="train", transforms=preset)
    return wrap_dataset_for_transforms_v2(dataset)


def zip_samples(samples):
    """Keep targets apart: pictures differ in their size, and in their number of objects."""
    return tuple(zip(*samples, strict=True))


def draw(task, folder, count=24):
    """Write a few pictures of drawn shapes in COCO's layout, or in VOC's."""
    import scenes

    if task == "detection":
        scenes.write_folder(folder, count, 1)
        return
    base = folder / "VOCdevkit" / "VOC2012"
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (base / name).mkdir(parents=True)
    for index in range(count):
        picture, shapes = scenes.draw_scene(np.random.default_rng(index))
        mask = np.zeros(picture.shape[:2], np.uint8)
        for category, (x, y, width, height) in shapes:
            mask[y : y + height, x : x + width] = category
        Image.fromarray(picture).save(base / "JPEGImages" / f"{index}.jpg")
        Image.fromarray(mask).save(base / "SegmentationClass" / f"{index}.png")
    names = "\n".join(map(str, range(count)))
    (base / "ImageSets" / "Segmentation" / "train.txt").write_text(names)


# ---- training


def build_model(args):
    """A model of torchvision with random weights."""
    return torchvision.models.get_model(
        args.model or MODELS[args.task],
        weights=None,
        weights_backbone=None,
        num_classes=CLASSES[args.task],
    )


def loss_of(task, model, images, targets, device):
    """The loss of a batch; one of gpuprefetch's is on the device already."""
    if task == "detection":
        images = [image.to(device) for image in images]
        kept = [{key: each[key].to(device) for key in ("boxes", "labels")} for each in targets]
        return sum(model(images, kept).values())
    scores = model(images.to(device))["out"]
    masks = targets.to(device).squeeze(1)
    return torch.nn.functional.cross_entropy(scores, masks, ignore_index=255)


def train(args):
    """Train, from the checkpoint if there is one; returns the summary."""
    torch.manual_seed(0)
    loader = build_loader(args)
    model = build_model(args).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    losses = []
    first = 0
    if args.checkpoint and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=args.device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        first = saved["epoch"]
        losses = saved["losses"]
    for epoch in range(first, args.epochs):
        for images, targets in loader:
            loss = loss_of(args.task, model.train(), images, targets, args.device)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if args.checkpoint:
                save(args, model, optimizer, loader, epoch, losses)
            if len(losses) == args.limit_steps:
                return summary_of(args, losses)
    return summary_of(args, losses)


def save(args, model, optimizer, loader, epoch, losses):
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    place = {"loader": loader.state_dict(), "epoch": epoch, "losses": losses}
    torch.save(states | place, args.checkpoint)


def summary_of(args, losses):
    return {"task": args.task, "plain": args.plain, "steps": len(losses), "losses": losses}


def main(argv=None):
    args = parse_args(argv)
    if args.data is None:
        import tempfile

        args.data = Path(tempfile.mkdtemp()) / "drawn"
        draw(args.task, args.data)
    summary = train(args)
    print(json.dumps(summary))
    return summary


if __name__ == "__main__":
    main()
