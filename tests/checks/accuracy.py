"""Train and validate from scratch through torchvision and through gpuprefetch: are they as good?

    python tests/checks/accuracy.py --output accuracy.json        # a ResNet-18 on a GPU, minutes
    python tests/checks/accuracy.py --data FOLDER          # on photos: an ImageFolder
    python tests/checks/accuracy.py --tiny                        # try it out, on the CPU

FOLDER has ``train`` and ``val``, or classes, of whose files every tenth is for validation. Without
it shapes are drawn: eight classes, of which no flip and no rotation makes another. Both paths have
the same seeds, files and epochs, and their own random crops, flips and policies. Each seed gives a
difference in accuracy; the interval of their mean (95 %, Student's t) must lie within ``--margin``
on both sides. So a difference fails, and so does an interval that is too wide to tell: more seeds,
epochs or validation pictures make it narrower. Then the last network of each seed is validated once
more with each mistake, which has to be noticed in the same way.
"""

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench
import faults
import numpy as np
import torch
import torchvision
from bench import harness, pictures
from independent import MEAN, STD
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

import gpuprefetch

CLASSES = 8
SIZES = {"images": 8000, "epochs": 15, "seeds": 8, "workers": 8, "batch": 128, "side": 64}
TINY = {"images": 48, "epochs": 6, "seeds": 3, "workers": 0, "batch": 8, "side": 16}
LEAST = 40  # pictures for validation
MARGIN = 0.05  # of accuracy
PATHS = ("torchvision", "gpuprefetch")
# Student's t: 97.5 % of its distribution lie below, for degrees of freedom from 1 on.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
LABELS = "a tenth of the labels are another class's"
MISTAKES = (LABELS, faults.SWAPPED_COLORS)

Result = dict[str, Any]


def picture(label: int, seed: int, side: int = 96) -> np.ndarray:
    """One or two shapes of a random color: a disc, a ring, a square or a cross."""
    rng = np.random.default_rng(seed)
    image = pictures.draw(side, side, seed=seed)
    for _ in range(1 + label // 4):
        center = rng.uniform(side / 4, 3 * side / 4, 2)
        radius = rng.uniform(side / 9, side / 5)
        y, x = (np.mgrid[:side, :side] - center[:, None, None]) / radius
        far = np.hypot(x, y)
        long = np.maximum(abs(x), abs(y))
        short = np.minimum(abs(x), abs(y))
        inside = [far < 1, (far < 1) & (far > 0.6), long < 0.9, (long < 1) & (short < 0.3)]
        image[inside[label % 4]] = rng.integers(0, 256, 3)
    return image


def plain_picture(label: int, seed: int, side: int = 24) -> np.ndarray:
    """Of --tiny: a class is red, green or blue, which a small network learns in seconds."""
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 90, (side, side, 3), dtype=np.uint8)
    image[..., label % 3] += np.uint8(120)
    return image


def draw_set(folder: Path, count: int, first: int, *, tiny: bool) -> None:
    draw = plain_picture if tiny else picture
    classes = 3 if tiny else CLASSES
    for i in range(count):
        path = folder / str(i % classes) / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pictures.encode(draw(i % classes, first + i), "JPEG", quality=95))


@dataclass(frozen=True)
class Photos:
    """What is trained with and validated on."""

    folder: Path
    classes: int
    every: int | None = None  # the numbers of the files for validation; None where folders tell

    def of(self, split: str, transform: Any) -> Any:
        if self.every is None:
            return ImageFolder(str(self.folder / split), transform)
        whole = ImageFolder(str(self.folder), transform)
        indices = [i for i in range(len(whole)) if (i % self.every == 0) == (split == "val")]
        return Subset(whole, indices)


def photos(folder: Path) -> Photos:
    split = (folder / "train").is_dir() and (folder / "val").is_dir()
    classes = ImageFolder(str(folder / "train" if split else folder)).classes
    return Photos(folder, len(classes), None if split else 10)


def network(args: argparse.Namespace, classes: int) -> nn.Module:
    if not args.tiny:
        return torchvision.models.resnet18(num_classes=classes)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, classes),
    )


def loader_of(
    path: str, split: str, seed: int, given: Photos, args: argparse.Namespace, mistake: str = ""
) -> Any:
    """Batches of a path for training or validation."""
    ending = [T.ToTensor(), T.Normalize(MEAN, STD)]
    side = args.side
    # In --tiny the color is the class, which a policy might change.
    policies = [] if args.tiny else [T.TrivialAugmentWide()]
    train = [T.RandomResizedCrop(side, (0.5, 1.0)), T.RandomHorizontalFlip(), *policies]
    val = [T.Resize(side * 8 // 7), T.CenterCrop(side)]
    training = split == "train"
    dataset = given.of(split, T.Compose([*(train if training else val), *ending]))
    options = {"shuffle": training, "drop_last": training, "num_workers": args.workers}
    loader = DataLoader(
        dataset, args.batch, persistent_workers=args.workers > 0 and training, **options
    )
    if path == "torchvision":
        return loader
    moved = gpuprefetch.accelerate(loader, device=args.device, seed=seed, print_plan=False)
    return faulty(moved, mistake, given.classes) if mistake else moved


def faulty(batches: Any, mistake: str, classes: int) -> Iterator[Any]:
    """Batches with a mistake in them."""
    seen = 0
    for images, target in batches:
        if mistake == faults.SWAPPED_COLORS:
            images = images.flip(1)
        else:
            wrong = (seen + torch.arange(len(target), device=target.device)) % 10 == 0
            target = torch.where(wrong, (target + 1) % classes, target)
        seen += len(target)
        yield images, target


def trained(path: str, seed: int, given: Photos, args: argparse.Namespace) -> nn.Module:
    """A network that was trained through one path."""
    torch.manual_seed(seed)
    model = network(args, given.classes).to(args.device)
    loader = loader_of(path, "train", seed, given, args)
    rate = 0.1
    optimizer = torch.optim.SGD(model.parameters(), rate, 0.9, weight_decay=1e-4, nesterov=True)
    steps = args.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for _ in range(args.epochs):
        for images, target in loader:
            output = model(images.to(args.device))
            nn.functional.cross_entropy(output, target.to(args.device)).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def accuracy(
    model: nn.Module, path: str, given: Photos, args: argparse.Namespace, mistake: str = ""
) -> float:
    """The share of the validation set that a network gets right, which comes through one path."""
    right = []
    for images, target in loader_of(path, "val", 0, given, args, mistake):
        found = model(images.to(args.device)).argmax(1)
        right.append((found == target.to(args.device)).cpu())
    return torch.cat(right).float().mean().item()


def judge(ours: list[float], theirs: list[float], margin: float) -> Result:
    """Whether the mean difference of seeds is known to be less than ``margin``, at 95 %.

    Of differences 0.01, -0.01 and 0.00 the mean is 0, and the interval reaches 4.303 * 0.01 /
    sqrt(3) = 0.025 to both sides.
    """
    if len(ours) < 3:
        raise ValueError(f"an interval needs at least 3 seeds, got {len(ours)}.")
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(differences)
    student = STUDENT[min(len(differences) - 1, len(STUDENT)) - 1]
    reach = student * statistics.stdev(differences) / math.sqrt(len(differences))
    return {
        "ok": max(abs(mean - reach), abs(mean + reach)) <= margin,
        "difference": mean,
        "interval": [mean - reach, mean + reach],
        "margin": margin,
    }


def compare(given: Photos, args: argparse.Namespace) -> Result:
    """Both paths with all seeds, and ours once more with each mistake."""
    found: dict[str, list[float]] = {path: [] for path in PATHS}
    mistaken: dict[str, list[float]] = {mistake: [] for mistake in MISTAKES}
    for seed in range(args.seeds):
        for path in PATHS:
            model = trained(path, seed, given, args)
            found[path].append(accuracy(model, path, given, args))
            print(f"seed {seed}  {path:12} {found[path][-1]:.4f}", flush=True)
        for mistake, each in mistaken.items():  # with the network that came through us
            each.append(accuracy(model, path, given, args, mistake))
    ours = found["gpuprefetch"]
    result = {path: {"mean": statistics.fmean(each), "each": each} for path, each in found.items()}
    result |= {"check": "accuracy", **judge(ours, found["torchvision"], args.margin)}
    result["mistakes"] = {
        mistake: "missed" if judge(each, ours, args.margin)["ok"] else "noticed"
        for mistake, each in mistaken.items()
    }
    return result | {name: getattr(args, name) for name in SIZES}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = harness.output_parser(__doc__)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--data", type=Path, help="folder of photos; drawn shapes without")
    parser.add_argument("--margin", type=float, default=MARGIN, help="of accuracy, 0 to 1")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    parser.add_argument("--tiny", action="store_true", help="try it out: small, on the CPU")
    args = parser.parse_args(words)
    args.device = "cpu" if args.tiny or args.cpu else "cuda"
    vars(args).update(TINY if args.tiny else {})
    if args.seeds < 3:
        parser.error("--seeds must be at least 3: the interval needs them")
    return args


def main(words: list[str] | None = None) -> str | int:
    """What to exit with."""
    args = parse(words)
    with tempfile.TemporaryDirectory() as name:
        if args.data is None:
            draw_set(Path(name, "train"), args.images, 0, tiny=args.tiny)
            count = max(args.images // 8, LEAST)
            draw_set(Path(name, "val"), count, args.images, tiny=args.tiny)
        result = compare(photos(args.data or Path(name)), args)
    harness.Document("accuracy", args, harness.Device(), anew=True).add(result)
    print({key: result[key] for key in ("ok", "difference", "interval", "mistakes")})
    return bench.verdict([result])


if __name__ == "__main__":
    sys.exit(main())
