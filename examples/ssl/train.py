"""Self-supervised training on several views of each image, decoded once: SimCLR and DINO.

    python train.py                    # SimCLR, two views, on a small folder that it draws first
    python train.py --method dino      # a student and a teacher, on 2 + 8 crops
    python train.py DATA --model resnet50 --batch-size 256

DATA holds train/CLASS/* and val/CLASS/*. The classes only judge the features, after the training:
by a vote of each validation image's nearest neighbors among the training images. The last line
that it prints is a summary in JSON.
"""

import argparse
import json
import sys
import time
from itertools import islice
from pathlib import Path

import torch
from methods import MEAN, METHODS, STD
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from gpuprefetch import CenterCrop, DataPrefetcher, EncodedImageFolder, Resize

# What stands in for an argument that is left out. The drawn pictures are small and simple, and tell
# their classes by shapes that small crops do not show.
PHOTO_DEFAULTS = {"model": "resnet50", "epochs": 100, "batch_size": 256, "lr": 1e-3}
PHOTO_DEFAULTS |= {"image_size": 224, "local_size": 96, "min_area": 0.08, "strength": 1.0}
PHOTO_DEFAULTS |= {"temperature": 0.1, "prototypes": 65536, "momentum": 0.996}
DRAWN_DEFAULTS = {"model": "tiny", "epochs": 15, "batch_size": 40, "lr": 2e-3}
DRAWN_DEFAULTS |= {"image_size": 48, "local_size": 24, "min_area": 0.4, "strength": 0.5}
DRAWN_DEFAULTS |= {"temperature": 0.2, "prototypes": 64, "momentum": 0.95}


def build_loader(args, split, transforms, *, shuffle=False):
    loader = DataLoader(
        EncodedImageFolder(args.data / split),
        args.batch_size,
        shuffle=shuffle,
        drop_last=shuffle,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        pin_memory=torch.cuda.is_available(),
    )
    layout = {"memory_format": torch.channels_last}
    if torch.cuda.is_available():
        layout["dtype"] = torch.bfloat16  # what autocast makes of them in the first layer
    return DataPrefetcher(loader, transforms=transforms, seed=0, **layout)


def autocast(device):
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def train(args):
    """Train; returns the method and a summary."""
    torch.manual_seed(0)
    loader = build_loader(args, "train", METHODS[args.method].transforms(args), shuffle=True)
    method = METHODS[args.method](args).to(loader.device, memory_format=torch.channels_last)
    trained = [p for p in method.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.04}]
    groups += [{"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    steps = min(len(loader), args.limit_batches or len(loader))
    if steps == 0:
        raise ValueError(f"{len(loader.dataset)} pictures do not fill a batch.")
    total = args.epochs * steps
    done = 0
    losses = []
    warmup = 0.2 if total == 10 else 0.1  # with one step of warm-up OneCycleLR divides by zero
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total, pct_start=warmup)
    begin = time.perf_counter()
    for epoch in range(args.epochs):
        mean = torch.zeros((), device=loader.device)
        for views, _ in islice(loader, steps):
            with autocast(loader.device):
                outputs = method(views)
            loss = method.loss(*outputs)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 3.0)
            optimizer.step()
            schedule.step()
            done += 1
            method.after_step(done / total)
            mean += loss.detach() / steps
        losses.append(mean.item())
        print(f"epoch {epoch + 1}: loss {losses[-1]:.3f}")
    rate = done * args.batch_size / (time.perf_counter() - begin)
    return method, {"method": args.method, "images_per_second": round(rate, 1), "losses": losses}


@torch.no_grad()
def features_of(args, split, backbone):
    """Normalized features ``(N, D)`` of a split, and labels ``(N,)``."""
    size = args.image_size
    whole = [Resize(round(size * 256 / 224)), CenterCrop(size), v2.Normalize(MEAN, STD)]
    found = []
    for images, labels in build_loader(args, split, whole):
        with autocast(images.device):
            found.append((F.normalize(backbone.eval()(images).float(), dim=1), labels))
    return tuple(map(torch.cat, zip(*found, strict=True)))


def neighbors_top1(args, backbone, count=20, temperature=0.07):
    """Share of validation images whose nearest training images vote for their class."""
    bank, labels = features_of(args, "train", backbone)
    features, target = features_of(args, "val", backbone)
    near, index = (features @ bank.T).topk(min(count, len(bank)))
    votes = F.one_hot(labels[index]) * (near / temperature).exp()[..., None]
    return (votes.sum(1).argmax(1) == target).float().mean().item()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("data", nargs="?", type=Path, metavar="DATA", help="folder with train/ and val/")
    add("--method", choices=METHODS, default="simclr")
    add("--model", help="a ResNet of torchvision's, or tiny")
    for name in ("epochs", "batch-size", "image-size", "local-size", "prototypes"):
        add(f"--{name}", type=int)
    add("--min-area", type=float, help="least share of an image in a crop")
    add("--strength", type=float, help="of the color jitter")
    add("--temperature", type=float, help="of SimCLR")
    add("--momentum", type=float, help="of DINO's teacher, at the start")
    add("--lr", type=float)
    add("--workers", type=int, default=2)
    add("--limit-batches", type=int, help="end each epoch after this many")
    add("--checkpoint", type=Path, help="file to write the backbone's weights to")
    parser.set_defaults(**(PHOTO_DEFAULTS if parser.parse_args(argv).data else DRAWN_DEFAULTS))
    args = parser.parse_args(argv)
    if args.data is None:
        sys.path.append(str(Path(__file__).resolve().parents[1] / "imagenet"))
        from draw import drawn_folder

        args.data = drawn_folder()
    train_classes, val_classes = (
        EncodedImageFolder(args.data / s).classes for s in ("train", "val")
    )
    if train_classes != val_classes:  # before the training, which does without
        raise ValueError(f"train and val need the same folders, which number classes: {args.data}")
    method, summary = train(args)
    if args.checkpoint:
        torch.save(method.backbone.state_dict(), args.checkpoint)
    summary["neighbors_top1"] = neighbors_top1(args, method.backbone)
    print(json.dumps(summary))
    return summary


if __name__ == "__main__":
    main()
