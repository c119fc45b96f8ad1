"""Train from scratch with TrivialAugmentWide through torchvision and through gpuprefetch.

    python tests/checks/accuracy.py --output accuracy.json   # a ResNet-18 on a GPU, minutes
    python tests/checks/accuracy.py --tiny                   # try it out, on the CPU

Shapes on a drawn background are told apart: eight classes, of which no flip and no rotation makes
another. Both paths have the same seeds, files and epochs. Their mean accuracies must lie within the
spread of the seeds.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import mean

import numpy as np
import torch
import torchvision
from bench import harness, pictures
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

import gpuprefetch

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
CLASSES = 8
SIZES = {"images": 8000, "epochs": 15, "seeds": 3, "workers": 8, "batch": 128}
TINY = {"images": 64, "epochs": 1, "seeds": 2, "workers": 1, "batch": 16}


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


def draw_set(folder: Path, count: int, first: int) -> None:
    for i in range(count):
        path = folder / str(i % CLASSES) / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pictures.encode(picture(i % CLASSES, first + i), "JPEG", quality=95))


def accuracy(path: str, seed: int, folder: Path, args: argparse.Namespace) -> float:
    """The share of the validation set that a network trained through one path gets right."""
    torch.manual_seed(seed)
    ending = [T.ToTensor(), T.Normalize(MEAN, STD)]
    ops = [T.RandomResizedCrop(64, (0.5, 1.0)), T.RandomHorizontalFlip(), T.TrivialAugmentWide()]
    options = {"batch_size": args.batch, "num_workers": args.workers}
    train = ImageFolder(str(folder / "train"), T.Compose(ops + ending))
    val = ImageFolder(str(folder / "val"), T.Compose([T.Resize(64), *ending]))
    loader = DataLoader(train, shuffle=True, drop_last=True, persistent_workers=True, **options)
    if path == "gpuprefetch":
        loader = gpuprefetch.accelerate(loader, device=args.device, seed=seed)
    model = torchvision.models.resnet18(num_classes=CLASSES).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-4, nesterov=True)
    steps = args.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    for _ in range(args.epochs):
        for images, target in loader:
            output = model(images.to(args.device))
            torch.nn.functional.cross_entropy(output, target.to(args.device)).backward()
            optimizer.step(), schedule.step(), optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        right = [(model(x.to(args.device)).argmax(1).cpu() == y) for x, y in DataLoader(val, 250)]
    return torch.cat(right).float().mean().item()


def main(words: list[str] | None = None) -> None:
    parser = harness.output_parser(__doc__)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    parser.add_argument("--tiny", action="store_true", help="try it out: small, on the CPU")
    args = parser.parse_args(words)
    args.device = "cpu" if args.tiny or args.cpu else "cuda"
    vars(args).update(TINY if args.tiny else {})
    found: dict[str, list[float]] = {"torchvision": [], "gpuprefetch": []}
    with tempfile.TemporaryDirectory() as name:
        draw_set(Path(name, "train"), args.images, 0)
        draw_set(Path(name, "val"), args.images // 8, args.images)
        for seed in range(args.seeds):
            for path in found:
                found[path].append(accuracy(path, seed, Path(name), args))
                print(f"seed {seed}  {path:12} {found[path][-1]:.4f}", flush=True)
    apart = abs(mean(found["torchvision"]) - mean(found["gpuprefetch"]))
    spread = max(max(each) - min(each) for each in found.values())
    result = {path: {"mean": mean(each), "each": each} for path, each in found.items()}
    result |= {"apart": apart, "spread": spread, "within": apart <= spread}
    result |= {name: getattr(args, name) for name in SIZES}
    harness.Document("accuracy", args, harness.Device(), anew=True).add(result)


if __name__ == "__main__":
    main()
