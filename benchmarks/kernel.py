"""Time the fused crop + resize + flip + normalize of a batch of photos, and the alternatives.

    python benchmarks/kernel.py --photos imagenet/val --output kernel.json
    python benchmarks/kernel.py --sweep

All sides get the same boxes and flips and make the same (N, 3, size, size) batch, except kornia,
which takes images of one size only and does not antialias. The floor is a copy that moves as many
bytes as the crops and the result have.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from gpuprefetch.transforms import launch as _resample
from gpuprefetch.transforms.kernel import HAS_TRITON
from gpuprefetch.transforms.reference import resample_reference

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SWEEP = {
    ("COLS", "NUM_WARPS"): [(32, 1), (64, 1), (64, 2), (128, 2), (128, 4), (256, 4), (256, 8)],
    ("ROWS",): [(2,), (4,), (8,)],
    ("STRIPS",): [(1,), (2,), (4,), (8,)],
    ("MAX_REGISTERS",): [(None,), (64,), (80,), (96,), (128,)],
}


def draw_images(args, generator):
    """Photos from a folder, or noise in sizes as ImageNet has them: 470 x 400 on average."""
    if args.photos:
        from PIL import Image

        files = sorted(p for p in args.photos.rglob("*") if p.suffix.lower() in {".jpg", ".jpeg"})
        files = [files[i % len(files)] for i in range(args.images)]
        arrays = [np.array(Image.open(file).convert("RGB")) for file in files]
        images = [torch.from_numpy(array).permute(2, 0, 1).contiguous() for array in arrays]
    else:
        sizes = generator.choice(
            [(375, 500), (333, 500), (500, 375), (281, 300), (1200, 1600)],
            args.images,
            p=[0.5, 0.2, 0.2, 0.08, 0.02],
        )
        images = [torch.randint(0, 256, (3, h, w), dtype=torch.uint8) for h, w in sizes.tolist()]
    return [image.to(args.device) for image in images]


def draw_boxes(images, generator):
    """RandomResizedCrop's (top, left, height, width, flip) of every image."""
    boxes = []
    for _, height, width in (image.shape for image in images):
        for _ in range(10):
            area = height * width * generator.uniform(0.08, 1)
            ratio = np.exp(generator.uniform(np.log(3 / 4), np.log(4 / 3)))
            w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
            if w <= width and h <= height:
                break
        else:
            h, w = min(height, width), min(height, width)
        top, left = generator.integers(height - h + 1), generator.integers(width - w + 1)
        boxes.append((int(top), int(left), h, w, bool(generator.random() < 0.5)))
    return boxes


def sampling_rows(boxes, size):
    rows = np.empty((len(boxes), 2, 6))
    for row, (top, left, height, width, flip) in zip(rows, boxes, strict=True):
        for axis, lo, length in ((0, top, height), (1, left, width)):
            step = length / size
            row[axis] = lo + 0.5 * step - 0.5, step, lo, lo + length, 0, size
        if flip:
            row[1, :2] = row[1, 0] + row[1, 1] * (size - 1), -row[1, 1]
    return torch.from_numpy(rows)


def interpolate_loop(images, boxes, args):
    mean, std = (torch.tensor(v, device=args.device)[:, None, None] for v in (MEAN, STD))

    def run():
        batch = []
        for image, (top, left, height, width, flip) in zip(images, boxes, strict=True):
            crop = image[None, :, top : top + height, left : left + width].float()
            crop = F.interpolate(crop, (args.size,) * 2, mode=args.interpolation, antialias=True)
            batch.append(crop.flip(3) if flip else crop)
        batch = (torch.cat(batch) / 255 - mean) / std
        return batch.to(args.dtype, memory_format=torch.channels_last)

    return run


def kornia_sides(images, args):
    import kornia.augmentation as K

    height, width = np.mean([image.shape[1:] for image in images], axis=0).astype(int)
    batch = torch.rand(len(images), 3, height, width, device=args.device)
    for mode in ("slice", "resample"):
        augment = K.AugmentationSequential(
            K.RandomResizedCrop((args.size, args.size), cropping_mode=mode),
            K.RandomHorizontalFlip(),
            K.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
        )
        yield (
            f"kornia, cropping_mode={mode} (one size, not antialiased)",
            lambda augment=augment: augment(batch).to(
                args.dtype, memory_format=torch.channels_last
            ),
        )


def with_canaries(images, rows, args):
    """The launch of RGB images that lie one after the other, without canaries and with them.

    As in a prefetcher, but the table is on the device already.
    """
    flat = torch.cat([image.permute(1, 2, 0).flatten() for image in images])
    sizes = np.array([image.shape[1:] for image in images])
    ends, size = np.cumsum(3 * sizes.prod(axis=1)), (args.size,) * 2
    plain, count = np.zeros(len(images), dtype=bool), len(images)
    words = _resample.plan_rows(rows.numpy(), sizes, plain, size, args.interpolation, True)
    offsets = ends - 3 * sizes.prod(axis=1)
    table = _resample.arrange(words, np.arange(count), offsets, [count], size)
    out = torch.empty((count, 3, *size), dtype=args.dtype, device=args.device)
    out = out.contiguous(memory_format=torch.channels_last)
    launches = _resample.Launches(table, out, torch.uint8, args.interpolation)
    numbers = launches.numbers(table, 3, _resample.Coloring(torch.uint8, args.dtype, MEAN, STD))
    numbers = numbers.to(args.device)
    survived = torch.zeros(count, dtype=torch.uint8, pin_memory=args.device == "cuda")
    given = 0, flat.data_ptr(), numbers.data_ptr()
    looking = survived.data_ptr()

    def launch(address=0):  # which holds what the addresses are of
        assert len(flat) and len(numbers) and len(survived)
        launches.launch(*given, survived=address)

    return {
        "launch": launch,
        "launch that looks for canaries": lambda: launch(looking),
        "setting canaries": lambda: launches.set_canaries(*given),
    }


def measure(run, args):
    """Median and spread of the time of one run, on a cold L2 cache.

    On a GPU the device sleeps while the run is queued, so `median_ms` is the time that the device
    needs, as in a prefetcher that queues ahead, plus whatever the host is slower than that;
    `host_ms` is the time until the call returns.
    """
    cuda = args.device == "cuda"
    flush = torch.empty(256 << 20 if cuda else 0, dtype=torch.uint8, device=args.device)
    times, host = [], []
    for _ in range(args.warmup + args.repeats):
        flush.zero_()
        if cuda:
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(5_000_000)
            start.record()
        called = time.perf_counter()
        run()
        host.append((time.perf_counter() - called) * 1e3)
        if cuda:
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
    times, host = (values[args.warmup :] for values in (times or host, host))
    low, median, high = np.percentile(times, [25, 50, 75])
    milliseconds = {"median_ms": median, "iqr_ms": high - low, "host_ms": np.median(host)}
    return {name: round(float(value), 4) for name, value in milliseconds.items()}


def check(images, rows, args):
    """The error of the fused path against the twin on the CPU in float64; too much ends the run."""
    options = {"interpolation": args.interpolation, "mean": MEAN, "std": STD}
    some = slice(0, 16)
    fused = _resample.resample(images[some], rows[some], (args.size,) * 2, **options)
    cpu = [image.cpu() for image in images[some]]
    exact = resample_reference(cpu, rows[some], (args.size,) * 2, dtype=torch.float64, **options)
    error = (fused.cpu() - exact).abs().max().item()
    if not error <= 1e-4:
        raise SystemExit(f"wrong by {error}: the launch is not timed")
    return error


def sweep(run, args):
    """Try the kernel's constants, a group at a time, each from the best of the last."""
    results = []
    for names, candidates in SWEEP.items():
        timed = []
        for values in candidates:
            for name, value in zip(names, values, strict=True):
                setattr(_resample, name, value)
            constants = {name: getattr(_resample, name) for group in SWEEP for name in group}
            timed.append((measure(run, args)["median_ms"], values))
            results.append({**constants, "median_ms": timed[-1][0]})
            print(results[-1], flush=True)
        for name, value in zip(names, min(timed, key=lambda pair: pair[0])[1], strict=True):
            setattr(_resample, name, value)
    return sorted(results, key=lambda result: result["median_ms"])


def metadata():
    versions = {"python": platform.python_version()}
    for package in ("torch", "triton", "kornia", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip(),
        "versions": versions,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu_count": os.cpu_count(),
    }


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument(
        "--photos", type=Path, help="folder of JPEGs; default: noise in usual sizes"
    )
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--interpolation", choices=["bilinear", "bicubic"], default="bilinear")
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--fused-only", action="store_true", help="leave the alternatives out")
    parser.add_argument("--sweep", action="store_true", help="try block sizes instead")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args(arguments)


def main(arguments=None):
    args = parse(arguments)
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    images = draw_images(args, generator)
    boxes = draw_boxes(images, generator)
    rows = sampling_rows(boxes, args.size)
    bytes_read = sum(3 * height * width for _, _, height, width, _ in boxes)
    bytes_written = args.images * 3 * args.size**2 * args.dtype.itemsize
    half = torch.empty((bytes_read + bytes_written) // 2, dtype=torch.uint8, device=args.device)
    target = torch.empty_like(half)
    options = {
        "interpolation": args.interpolation,
        "mean": MEAN,
        "std": STD,
        "dtype": args.dtype,
        "memory_format": torch.channels_last,
    }

    def fused():
        return _resample.resample(images, rows, (args.size,) * 2, **options)

    report = {
        **metadata(),
        "arguments": {n: str(v) for n, v in vars(args).items() if n not in ("photos", "output")},
        "mean_photo": np.mean([image.shape[1:] for image in images], axis=0).round().tolist(),
        "megabytes": round((bytes_read + bytes_written) / 1e6, 1),
        "max_error_float32": check(images, rows, args),
    }
    if args.sweep:
        report["sweep"] = sweep(fused, args)
    else:
        sides = {"memory floor (copy)": lambda: target.copy_(half), "fused": fused}
        if HAS_TRITON and args.device == "cuda":
            sides |= with_canaries(images, rows, args)
        if not args.fused_only:
            sides["loop of interpolate(antialias)"] = interpolate_loop(images, boxes, args)
            sides |= dict(kornia_sides(images, args))
        report["results"] = {name: measure(run, args) for name, run in sides.items()}
        for name, result in report["results"].items():
            print(f"{name:60} {result}")
    if args.output:
        args.output.write_text(json.dumps(report, indent=2) + "\n")
    return report


if __name__ == "__main__":
    main()
