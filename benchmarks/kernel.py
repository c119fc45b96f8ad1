"""Time the fused crop + resize + flip + normalize of a batch of photos, and the alternatives.

    python benchmarks/kernel.py --photos PHOTOS --output benchmarks/results/kernel.json
    python benchmarks/kernel.py --sweep

All sides get the same boxes and flips and make the same (N, 3, size, size) batch, except kornia,
which takes images of one size only and does not antialias. The floor is a copy that moves as many
bytes as the crops and the result have.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clock
import harness
import numpy as np
import photos
import torch
from PIL import Image
from torch.nn import functional as F

from gpuprefetch.transforms import launch
from gpuprefetch.transforms.reference import resample_reference

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SIZES = [(375, 500), (333, 500), (500, 375), (281, 300), (1200, 1600)]
SIZE_SHARES = [50, 20, 20, 8, 2]
# Constants of the kernel, a group at a time, each from the best of the last.
SWEEP = {
    ("COLS", "NUM_WARPS"): [(32, 1), (64, 1), (64, 2), (128, 2), (128, 4), (256, 4), (256, 8)],
    ("ROWS",): [(2,), (4,), (8,)],
    ("STRIPS",): [(1,), (2,), (4,), (8,)],
    ("MAX_REGISTERS",): [(None,), (64,), (80,), (96,), (128,)],
}

Box = tuple[int, int, int, int, bool]  # top, left, height, width, flip


def draw_images(args: argparse.Namespace, rng: np.random.Generator) -> list[torch.Tensor]:
    """Photos from a folder, or noise in sizes as ImageNet has them: 470 x 400 on average."""
    if args.photos:
        files = photos.found(args.photos)
        files = [files[i % len(files)] for i in range(args.images)]
        arrays = [np.array(Image.open(file).convert("RGB")) for file in files]
        images = [torch.from_numpy(array).permute(2, 0, 1).contiguous() for array in arrays]
    else:
        sizes = rng.choice(SIZES, args.images, p=np.array(SIZE_SHARES) / 100)
        images = [torch.randint(0, 256, (3, h, w), dtype=torch.uint8) for h, w in sizes.tolist()]
    return [image.to(args.device) for image in images]


def draw_boxes(images: list[torch.Tensor], rng: np.random.Generator) -> list[Box]:
    """RandomResizedCrop's box of every image, and whether it is flipped."""
    boxes = []
    for _, height, width in (image.shape for image in images):
        for _ in range(10):
            area = height * width * rng.uniform(0.08, 1)
            ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
            w = round((area * ratio) ** 0.5)
            h = round((area / ratio) ** 0.5)
            if w <= width and h <= height:
                break
        else:
            h = min(height, width)
            w = min(height, width)
        top = rng.integers(height - h + 1)
        left = rng.integers(width - w + 1)
        boxes.append((int(top), int(left), h, w, bool(rng.random() < 0.5)))
    return boxes


def sampling_rows(boxes: list[Box], size: int) -> torch.Tensor:
    """What ``launch.resample`` takes of them: ``(N, 2, 6)`` float64."""
    rows = np.empty((len(boxes), 2, 6))
    for row, (top, left, height, width, flip) in zip(rows, boxes, strict=True):
        for axis, lo, length in ((0, top, height), (1, left, width)):
            step = length / size
            row[axis] = lo + 0.5 * step - 0.5, step, lo, lo + length, 0, size
        if flip:
            row[1, :2] = row[1, 0] + row[1, 1] * (size - 1), -row[1, 1]
    return torch.from_numpy(rows)


def interpolate_loop(images: list[torch.Tensor], boxes: list[Box], args: Any) -> torch.Tensor:
    mean, std = (torch.tensor(v, device=args.device)[:, None, None] for v in (MEAN, STD))
    batch = []
    for image, (top, left, height, width, flip) in zip(images, boxes, strict=True):
        crop = image[None, :, top : top + height, left : left + width].float()
        crop = F.interpolate(crop, (args.size,) * 2, mode=args.interpolation, antialias=True)
        batch.append(crop.flip(3) if flip else crop)
    normalized = (torch.cat(batch) / 255 - mean) / std
    return normalized.to(torch.bfloat16, memory_format=torch.channels_last)


def kornia_sides(images: list[torch.Tensor], args: Any) -> Iterator[tuple[str, Any]]:
    import kornia.augmentation as K

    height, width = np.mean([image.shape[1:] for image in images], axis=0).astype(int)
    batch = torch.rand(len(images), 3, height, width, device=args.device)
    for mode in ("slice", "resample"):
        augment = K.AugmentationSequential(
            K.RandomResizedCrop((args.size, args.size), cropping_mode=mode),
            K.RandomHorizontalFlip(),
            K.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
        )
        name = f"kornia, cropping_mode={mode} (one size, not antialiased)"
        yield name, lambda augment=augment: augment(batch).to(torch.bfloat16)


def check(images: list[torch.Tensor], rows: torch.Tensor, args: Any) -> float:
    """The error of the fused path against the twin on the CPU in float64; too much ends the run."""
    options = {"interpolation": args.interpolation, "mean": MEAN, "std": STD}
    size = (args.size,) * 2
    some = slice(0, 16)
    fused = launch.resample(images[some], rows[some], size, **options)
    cpu = [image.cpu() for image in images[some]]
    exact = resample_reference(cpu, rows[some], size, dtype=torch.float64, **options)
    error = (fused.cpu() - exact).abs().max().item()
    if not error <= 1e-4:
        raise SystemExit(f"wrong by {error}: the launch is not timed")
    return error


def sweep(time: Any) -> Iterator[dict[str, Any]]:
    """Try the kernel's constants."""
    for names, candidates in SWEEP.items():
        timed = []
        for values in candidates:
            for name, value in zip(names, values, strict=True):
                setattr(launch, name, value)
            constants = {name: getattr(launch, name) for group in SWEEP for name in group}
            timed.append((time()["median_ms"], values))
            yield {**constants, "median_ms": timed[-1][0]}
        for name, value in zip(names, min(timed, key=lambda pair: pair[0])[1], strict=True):
            setattr(launch, name, value)


def main(words: list[str] | None = None) -> None:
    parser = harness.output_parser(__doc__)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--photos", type=Path, help="folder of JPEGs; without: noise")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--interpolation", choices=["bilinear", "bicubic"], default="bilinear")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--sweep", action="store_true", help="try block sizes instead")
    parser.add_argument("--tiny", action="store_true", help="try it out: small, on the CPU")
    args = parser.parse_args(words)
    args.device = "cuda"
    args.data = args.photos
    if args.tiny:
        vars(args).update(images=2, size=16, repeats=1, warmup=0, device="cpu")
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    images = draw_images(args, rng)
    boxes = draw_boxes(images, rng)
    rows = sampling_rows(boxes, args.size)
    size = (args.size,) * 2
    coloring = {"interpolation": args.interpolation, "mean": MEAN, "std": STD}
    layout = {"dtype": torch.bfloat16, "memory_format": torch.channels_last}
    moved = sum(3 * h * w for _, _, h, w, _ in boxes) + args.images * 3 * args.size**2 * 2
    half = torch.empty(moved // 2, dtype=torch.uint8, device=args.device)
    target = torch.empty_like(half)
    sides = {
        "memory floor (copy)": lambda: target.copy_(half),
        "fused": lambda: launch.resample(images, rows, size, **coloring, **layout),
        "loop of interpolate(antialias)": lambda: interpolate_loop(images, boxes, args),
        **dict(kornia_sides(images, args)),
    }

    def timed(side: str) -> dict[str, float]:
        repeats = {"warmup": args.warmup, "repeats": args.repeats}
        return clock.time_calls(sides[side], args.device, **repeats)

    document = harness.Document("kernel", args, harness.Device(), anew=True)
    document.content["images"] = {
        "count": args.images,
        "mean_size": np.mean([image.shape[1:] for image in images], axis=0).round().tolist(),
        "megabytes": round(moved / 1e6, 1),
        "max_error_float32": check(images, rows, args),
    }
    for result in sweep(lambda: timed("fused")) if args.sweep else ():
        document.add(result)
    for side in () if args.sweep else sides:
        document.add({"side": side, **timed(side)})


if __name__ == "__main__":
    main()
