"""How near accelerate comes to torchvision's, timm's and PyTorch's own pipelines, on photos.

python tests/checks/parity.py --data FOLDER --output benchmarks/results/parity.json

Every pipeline is run as it is, on PIL images, and as ``accelerate`` moves it, with the same random
parameters; each has a limit. timm's are left out where it is not installed. Then crops, flips and
colors are compared with torchvision's own draws and with NumPy, and once more with each mistake
that has to be noticed: see ``draws.py``. The exit code tells whether all holds.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.models import ResNet50_Weights
from torchvision.transforms import InterpolationMode, v2

from gpuprefetch import parity

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
BILINEAR = InterpolationMode.BILINEAR
# Levels of 255. PIL rounds after each of its two passes, a quarter of a level on average. Equalize
# and posterize make several levels of one.
GEOMETRIC_LIMIT = 0.5
MEAN_LIMIT = 1.0
WORST_LIMIT = 1.0
WORST_LIMIT_OF_POLICIES = 6.0


class ClassificationPreset:
    """A pipeline of torchvision's references/classification: what it crops with, and the rest."""

    def __init__(self, T: Any, ops: list[Any], backend: str, last: list[Any]) -> None:
        ops.insert(0 if backend == "tensor" else len(ops), T.PILToTensor())
        new = T is v2
        ops += [T.ToDtype(torch.float, scale=True) if new else T.ConvertImageDtype(torch.float)]
        ops += [T.Normalize(MEAN, STD), *last, *([T.ToPureTensor()] if new else [])]
        self.transforms = T.Compose(ops)

    def __call__(self, image: Any) -> Any:
        return self.transforms(image)


def preset_train(T: Any, policy: str | None, backend: str, size: int) -> ClassificationPreset:
    policies: dict[str | None, Callable[[], list[Any]]] = {
        None: list,
        "ra": lambda: [T.RandAugment(magnitude=9, interpolation=BILINEAR)],
        "ta_wide": lambda: [T.TrivialAugmentWide(interpolation=BILINEAR)],
        "augmix": lambda: [T.AugMix(severity=3, interpolation=BILINEAR)],
        "imagenet": lambda: [T.AutoAugment(T.AutoAugmentPolicy.IMAGENET, BILINEAR)],
    }
    ops = [T.RandomResizedCrop(size, interpolation=BILINEAR, antialias=True)]
    ops += [T.RandomHorizontalFlip(0.5), *policies[policy]()]
    return ClassificationPreset(T, ops, backend, [T.RandomErasing(p=0.1)])


def preset_eval(T: Any, backend: str, size: int) -> ClassificationPreset:
    ops = [T.Resize(size * 8 // 7, interpolation=BILINEAR, antialias=True), T.CenterCrop(size)]
    return ClassificationPreset(T, ops, backend, [])


def pipelines(size: int = 224) -> dict[str, Any]:
    """Name -> transform, as the three projects' own code builds them."""
    ending = [v1.ToTensor(), v1.Normalize(MEAN, STD)]
    found = {
        "examples/imagenet train": v1.Compose(
            [v1.RandomResizedCrop(size), v1.RandomHorizontalFlip(), *ending]
        ),
        "examples/imagenet val": v1.Compose(
            [v1.Resize(size * 8 // 7), v1.CenterCrop(size), *ending]
        ),
        "torchvision val, v1": preset_eval(v1, "pil", size),
        "torchvision val, v2, tensor": preset_eval(v2, "tensor", size),
        "torchvision weights": ResNet50_Weights.IMAGENET1K_V2.transforms(
            crop_size=size, resize_size=size * 8 // 7
        ),
    }
    for policy in (None, "ra", "ta_wide", "augmix", "imagenet"):
        for T, backend in ((v1, "pil"), (v2, "pil"), (v1, "tensor"), (v2, "tensor")):
            version = "v1" if T is v1 else "v2"
            name = f"torchvision train{', ' * bool(policy)}{policy or ''}, {version}, {backend}"
            found[name] = preset_train(T, policy, backend, size)
    if importlib.util.find_spec("timm"):
        found |= _timm(size)
    return found


def _timm(size: int) -> dict[str, Any]:
    from timm.data import create_transform

    random = {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.25}
    simclr = {"color_jitter_prob": 0.8, "grayscale_prob": 0.2, "gaussian_blur_prob": 0.5}
    options: dict[str, dict[str, Any]] = {
        "train": {},
        "train, bicubic": {"interpolation": "bicubic", "hflip": 0.5, "vflip": 0.2},
        "train, simclr": simclr,
        "train, rand-m9-mstd0.5-inc1": random | {"interpolation": "bicubic", "re_mode": "pixel"},
        "train, original": {"auto_augment": "original-mstd0.5", "re_prob": 0.25},
        "val, bilinear": {"interpolation": "bilinear"},
        "val, bicubic": {"interpolation": "bicubic"},
    }
    return {
        f"timm {name}": create_transform(size, is_training=name.startswith("train"), **given)
        for name, given in options.items()
    }


def measure(folder: Path, count: int, transform: Any, device: str | None) -> dict[str, Any]:
    """Mean differences in levels of 255."""
    loader = DataLoader(ImageFolder(str(folder), transform))
    report = parity(loader, count, device=device)
    head = [row for row in report.rows if row.where == "fused launch" and row.name != "Normalize"]
    return {
        "images": report.count,
        "mean_levels": report.mean,
        "geometric_mean_levels": head[-1].mean_so_far,
        "worst_image_mean_levels": report.worst[0][1],
        "ops": {row.name: row.mean for row in report.rows[1:]},
    }


def within(name: str, result: dict[str, Any]) -> bool:
    """Whether a pipeline differs by no more than rounding explains."""
    plain = name.startswith("examples") or " val" in name or "weights" in name
    worst = WORST_LIMIT if plain else WORST_LIMIT_OF_POLICIES
    return (
        result["geometric_mean_levels"] <= GEOMETRIC_LIMIT
        and result["mean_levels"] <= MEAN_LIMIT
        and result["worst_image_mean_levels"] <= worst
    )


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """The table of docs/migrate.md. "v2, pil" gives what "v1, pil" gives, and so on."""
    from bench import table

    columns = ("geometric_mean_levels", "mean_levels", "worst_image_mean_levels")
    rows = [
        [name, *(f"{result[column]:.2f}" for column in columns)]
        for name, result in results.items()
        if not name.endswith(("v2, pil", "v1, tensor"))
    ]
    return table.markdown(["pipeline", "crop, resize, flip", "all ops", "worst image"], rows)


def main(words: list[str] | None = None) -> str | int:
    """What to exit with."""
    import bench  # here: the tests take no more than the pipelines
    import draws

    parser = bench.harness.output_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--count", type=int, default=128, help="photos compared")
    parser.add_argument("--crops", type=int, default=3000, help="of each distribution")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--cpu", action="store_true", help="the new pipeline on the CPU too")
    args = parser.parse_args(words)
    document = bench.harness.Document("parity", args, bench.harness.Device(), anew=True)
    folder = bench.photos.photo_folder(args.data, args.count)
    results: dict[str, dict[str, Any]] = {}
    for name, transform in pipelines(args.size).items():
        results[name] = measure(folder, args.count, transform, "cpu" if args.cpu else None)
        results[name]["ok"] = within(name, results[name])
        print(f"{name:45} {results[name]['mean_levels']:.3f}", flush=True)
    print(markdown(results))
    device = "cpu" if args.cpu else "cuda"
    independent = draws.checks(args.crops, device=device, cpu_share=0.0)
    for result in independent:
        print(result, flush=True)
    document.content["results"] = results
    document.content["draws"] = independent
    document.write()
    judged = [{"check": name, "ok": result["ok"]} for name, result in results.items()]
    return bench.verdict([*judged, *independent])


if __name__ == "__main__":
    sys.exit(main())
