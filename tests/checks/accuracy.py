"""Train and validate from scratch through torchvision and through gpuprefetch: are they as good?

    python tests/checks/accuracy.py --output accuracy.json        # a ResNet-18 on a GPU, minutes
    python tests/checks/accuracy.py --data FOLDER --policies none ta    # on photos
    python tests/checks/accuracy.py --tiny                        # try it out, on the CPU

FOLDER has ``train`` and ``val``, or classes, of whose files every tenth is for validation. A
``test`` with the same classes is for validation too: nothing is chosen by it. Without FOLDER shapes
are drawn: eight classes, of which no flip and no rotation makes another. Both paths have the same
seeds, files and epochs, and their own random crops, flips and policies.

Each seed gives a difference in accuracy; the interval of their mean (95 %, Student's t) must lie
within ``--margin`` on both sides. So a difference fails, and so does an interval that is too wide
to tell. More seeds make it narrower, more validation pictures too. Two networks that are equally
good give other answers to about a quarter of 700 photos, which makes two points for one seed: then
five seeds can tell 5 points, and eight can tell 3. Each network that came through gpuprefetch is
validated once more with each mistake, which has to be noticed in the same way.

A seed's seconds are those of a whole run: workers start, all epochs, and the validation after the
last one. Every second seed begins with the other path. The file is written after each seed, and the
same command goes on with it; with ``--stop-after`` no seed begins that may end later.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
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
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

import gpuprefetch

CLASSES = 8
SIZES = {"images": 8000, "epochs": 15, "seeds": 8, "workers": 8, "batch": 128, "side": 64}
TINY = {"images": 48, "epochs": 6, "seeds": 3, "workers": 0, "batch": 8, "side": 16}
LEAST = 40  # pictures for validation
MARGIN = 0.05  # of accuracy
OURS = "gpuprefetch"
PATHS = ("torchvision", OURS)
POLICIES = {"none": None, "ta": T.TrivialAugmentWide, "ra": T.RandAugment}
LEAST_SEEDS = 3  # of an interval
# Student's t: 97.5 % of its distribution lie below, for degrees of freedom from 1 on.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
LABELS = "a tenth of the labels are another class's"
UPSIDE_DOWN = "the pictures are upside down"
# The drawn classes stay what they are upside down, and clothes in other colors.
MISTAKES = {"drawn": (LABELS, faults.SWAPPED_COLORS), "photos": (LABELS, UPSIDE_DOWN)}

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
    """For --tiny: a class is red, green or blue, which a small network learns in seconds."""
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
    held_out: tuple[str, ...] = ("val",)  # the folders for validation, where folders tell

    def of(self, split: str, transform: Any) -> Any:
        if self.every is None:
            names = self.held_out if split == "val" else (split,)
            parts = [ImageFolder(str(self.folder / name), transform) for name in names]
            return ConcatDataset(parts) if len(parts) > 1 else parts[0]
        whole = ImageFolder(str(self.folder), transform)
        indices = [i for i in range(len(whole)) if (i % self.every == 0) == (split == "val")]
        return Subset(whole, indices)


def photos(folder: Path) -> Photos:
    """Find out how a folder says what is for training; one that has no two classes is refused."""
    split = (folder / "train").is_dir() and (folder / "val").is_dir()
    classes = class_folders(folder / "train" if split else folder)
    if len(classes) < 2:
        within = [name for name in classes if (folder / name / "train").is_dir()]
        advice = f" Give --data {folder / within[0]}, which has train." if within else ""
        raise ValueError(
            f"{folder} has the class folders {classes}. --data takes a folder of two classes or "
            f"more, as train/CLASS/* and val/CLASS/*, or as CLASS/*.{advice}"
        )
    if not split:
        return Photos(folder, len(classes), every=10)
    if strangers := set(classes) ^ set(class_folders(folder / "val")):
        raise ValueError(
            f"{folder}: train and val need the same class folders. Only one of them has "
            f"{', '.join(sorted(strangers))}."
        )
    alike = class_folders(folder / "test") == classes
    return Photos(folder, len(classes), held_out=("val", "test") if alike else ("val",))


def class_folders(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


@dataclass(frozen=True)
class Case:
    """Photos, and how both paths train with them."""

    photos: Photos
    policy: str
    args: argparse.Namespace

    @property
    def pictures(self) -> str:
        return "photos" if self.args.data else "drawn"

    def facts(self) -> Result:
        """What makes a result another one."""
        sizes = {name: getattr(self.args, name) for name in ("epochs", "batch", "side")}
        counts = {
            "images": len(self.photos.of("train", None)),
            "validation": len(self.photos.of("val", None)),
            "classes": self.photos.classes,
        }
        return {"policy": self.policy, "pictures": self.pictures, **counts, **sizes}


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


def loader_of(case: Case, path: str, split: str, seed: int, mistake: str = "") -> Any:
    """Batches of a path for training or validation."""
    args = case.args
    side = args.side
    training = split == "train"
    if training:
        policy = POLICIES[case.policy]
        ops = [T.RandomResizedCrop(side, (0.5, 1.0)), T.RandomHorizontalFlip()]
        ops += [policy()] if policy else []
    else:
        ops = [T.Resize(side * 8 // 7), T.CenterCrop(side)]
    transform = T.Compose([*ops, T.ToTensor(), T.Normalize(MEAN, STD)])
    loader = DataLoader(
        case.photos.of(split, transform),
        args.batch,
        shuffle=training,
        drop_last=training,
        num_workers=args.workers,
        persistent_workers=args.workers > 0 and training,
        pin_memory=args.device == "cuda",
    )
    if path == "torchvision":
        return loader
    options = {"memory_format": torch.channels_last, "print_plan": False}
    ours = gpuprefetch.accelerate(loader, device=args.device, seed=seed, **options)
    return faulty(ours, mistake, case.photos.classes) if mistake else ours


def moved(batch: Any, args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch on the device; one that is there already comes back as it is."""
    images, target = batch
    images = images.to(args.device, memory_format=torch.channels_last, non_blocking=True)
    return images, target.to(args.device, non_blocking=True)


def faulty(batches: Any, mistake: str, classes: int) -> Iterator[Any]:
    """Batches with a mistake in them."""
    seen = 0
    for images, target in batches:
        if mistake == faults.SWAPPED_COLORS:
            images = images.flip(1)
        elif mistake == UPSIDE_DOWN:
            images = images.flip(2)
        else:
            wrong = (seen + torch.arange(len(target), device=target.device)) % 10 == 0
            target = torch.where(wrong, (target + 1) % classes, target)
        seen += len(target)
        yield images, target


def autocast(args: argparse.Namespace) -> torch.autocast:
    return torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda")


def trained(case: Case, path: str, seed: int) -> nn.Module:
    """A network that was trained through one path."""
    args = case.args
    torch.manual_seed(seed)
    model = network(args, case.photos.classes)
    model.to(args.device, memory_format=torch.channels_last)
    loader = loader_of(case, path, "train", seed)
    rate = 0.1
    optimizer = torch.optim.SGD(model.parameters(), rate, 0.9, weight_decay=1e-4, nesterov=True)
    steps = args.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for _ in range(args.epochs):
        for batch in loader:
            images, target = moved(batch, args)
            with autocast(args):
                loss = nn.functional.cross_entropy(model(images), target)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, case: Case, path: str, mistake: str = "") -> float:
    """The share of the validation set that a network gets right, which comes through one path."""
    right = []
    for batch in loader_of(case, path, "val", 0, mistake):
        images, target = moved(batch, case.args)
        with autocast(case.args):
            found = model(images).argmax(1)
        right.append((found == target).cpu())
    return torch.cat(right).float().mean().item()


def judge(ours: list[float], theirs: list[float], margin: float) -> Result:
    """Whether the mean difference of seeds is known to be less than ``margin``, at 95 %.

    Of differences 0.01, -0.01 and 0.00 the mean is 0, and the interval reaches 4.303 * 0.01 /
    sqrt(3) = 0.025 to both sides.
    """
    if len(ours) < LEAST_SEEDS:
        raise ValueError(f"an interval needs at least {LEAST_SEEDS} seeds, got {len(ours)}.")
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


def begun(case: Case) -> Result:
    """A result without seeds."""
    paths: Result = {path: {"each": [], "seconds": []} for path in PATHS}
    mistaken: Result = {mistake: [] for mistake in MISTAKES[case.pictures]}
    row = {"check": f"accuracy ({case.policy})", **case.facts(), "workers": case.args.workers}
    return row | paths | {"mistaken": mistaken}


def seeds_of(row: Result) -> int:
    return len(row[OURS]["each"])


def compare(case: Case, row: Result) -> None:
    """One more seed: both paths, and the network of ours with each mistake."""
    seed = seeds_of(row)
    found: dict[str, tuple[float, float]] = {}
    mistaken: dict[str, float] = {}
    for path in PATHS if seed % 2 == 0 else PATHS[::-1]:
        start = time.perf_counter()
        model = trained(case, path, seed)
        right = accuracy(model, case, path)
        found[path] = right, time.perf_counter() - start
        words = f"{case.policy:4}  seed {seed}  {path:12} {right:.4f}  {found[path][1]:.1f} s"
        print(words, flush=True)
        if path == OURS:
            made = MISTAKES[case.pictures]
            mistaken = {mistake: accuracy(model, case, path, mistake) for mistake in made}
    for path, (right, seconds) in found.items():  # all of a seed or nothing
        row[path]["each"].append(right)
        row[path]["seconds"].append(seconds)
    for mistake, right in mistaken.items():
        row["mistaken"][mistake].append(right)


def summarize(row: Result, args: argparse.Namespace) -> None:
    """Write into a result what its seeds say together."""
    for path in PATHS:
        row[path]["mean"] = statistics.fmean(row[path]["each"])
    row["seeds"] = seeds_of(row)
    row["ok"] = False
    if seeds_of(row) < LEAST_SEEDS:
        return
    ours = row[OURS]["each"]
    row.update(judge(ours, row["torchvision"]["each"], args.margin))
    row["mistakes"] = {
        mistake: "missed" if judge(each, ours, args.margin)["ok"] else "noticed"
        for mistake, each in row["mistaken"].items()
    }


def run(cases: list[Case], document: harness.Document, args: argparse.Namespace) -> list[Result]:
    """All seeds of all cases, or as many as there is time for: results, some maybe not complete."""
    known = document.content["results"]
    rows = []
    for case in cases:
        facts = case.facts().items()
        rows += [next((row for row in known if facts <= row.items()), None) or begun(case)]
    limit = harness.TimeLimit(args.stop_after)
    for seed in range(args.seeds):
        for case, row in zip(cases, rows, strict=True):
            if seed < seeds_of(row):
                continue
            if limit.is_over():
                return rows
            begin = time.monotonic()
            compare(case, row)
            limit.note(time.monotonic() - begin)
            summarize(row, args)
            document.keep(row)
    return rows


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = harness.output_parser(__doc__)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--data", type=Path, help="folder of photos; drawn shapes without")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, help="one result for each")
    parser.add_argument("--margin", type=float, default=MARGIN, help="of accuracy, 0 to 1")
    parser.add_argument("--stop-after", type=float, help="begin no seed that may end later, in s")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    parser.add_argument("--tiny", action="store_true", help="try it out: small, on the CPU")
    args = parser.parse_args(words)
    args.device = "cpu" if args.tiny or args.cpu else "cuda"
    vars(args).update(TINY if args.tiny else {})
    # In --tiny the color is the class, which a policy might change.
    args.policies = args.policies or (["none"] if args.tiny else ["ta"])
    if args.seeds < LEAST_SEEDS:
        parser.error(f"--seeds must be at least {LEAST_SEEDS}: the interval needs them")
    return args


def main(words: list[str] | None = None) -> str | int:
    """What to exit with."""
    args = parse(words)
    document = harness.Document("accuracy", args, harness.Device())
    with tempfile.TemporaryDirectory() as name:
        if args.data is None:
            draw_set(Path(name, "train"), args.images, 0, tiny=args.tiny)
            count = max(args.images // 8, LEAST)
            draw_set(Path(name, "val"), count, args.images, tiny=args.tiny)
        given = photos(args.data or Path(name))
        rows = run([Case(given, policy, args) for policy in args.policies], document, args)
    for row in rows:
        print({key: row.get(key) for key in ("check", "ok", "difference", "interval", "mistakes")})
    if left := [row["check"] for row in rows if seeds_of(row) < args.seeds]:
        return f"not finished: {', '.join(left)}; only a file that --output names is gone on with"
    return bench.verdict(rows)


if __name__ == "__main__":
    sys.exit(main())
