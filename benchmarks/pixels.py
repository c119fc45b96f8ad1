"""How near the pixels are: GPU decode to CPU decode, the fused launch to torchvision on PIL.

python benchmarks/pixels.py --photos FOLDER --output benchmarks/results/pixels.json
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from harness import Device, metadata
from PIL import Image
from torchcodec.decoders import decode_jpeg
from torchvision.transforms.v2 import functional as F

from gpuprefetch import CenterCrop, RandomResizedCrop, Resize
from gpuprefetch.transforms.head import read_transforms
from gpuprefetch.transforms.launch import resample
from gpuprefetch.transforms.random import fold
from gpuprefetch.transforms.reference import resample_reference

SIZE = (224, 224)


def levels(off: torch.Tensor) -> dict[str, float]:
    """Mean and maximum of a difference of values in [0, 1], in levels of 1/255."""
    return {"mean_levels": off.mean().item() * 255, "max_levels": off.max().item() * 255}


def decoders(files: list[bytes]) -> dict[str, float]:
    """GPU decode against TorchCodec on the CPU."""
    within = total = 0
    for gpu, file in zip(decode_jpeg(files, device="cuda"), files, strict=True):
        off = (gpu.cpu().int() - decode_jpeg(file).int()).abs()
        within, total = within + int((off <= 3).sum()), total + off.numel()
    return {"within_3_levels": within / total}


def pil_crops(paths: list[Path], rows: np.ndarray) -> torch.Tensor:
    """The same crop of the same photo by torchvision v2 on a PIL image."""
    pictures = []
    for path, row in zip(paths, rows, strict=True):
        (top, left), (bottom, right) = row[:, 2].astype(int), row[:, 3].astype(int)
        with Image.open(path) as picture:
            crop = (top, left, bottom - top, right - left)
            cropped = F.resized_crop(picture.convert("RGB"), *map(int, crop), list(SIZE))
        flipped = F.horizontal_flip(cropped) if row[1, 1] < 0 else cropped
        pictures.append(F.pil_to_tensor(flipped))
    return torch.stack(pictures) / 255


def pil_validation(paths: list[Path]) -> torch.Tensor:
    pictures = []
    for path in paths:
        with Image.open(path) as picture:
            resized = F.resize(picture.convert("RGB"), [256])
        pictures.append(F.pil_to_tensor(F.center_crop(resized, list(SIZE))))
    return torch.stack(pictures) / 255


def compare(paths: list[Path], files: list[bytes], device: torch.device) -> dict[str, object]:
    """The fused launch on the CPU's pixels and on the GPU's, against PIL and the eager twin."""
    import kornia.augmentation as K

    report: dict[str, object] = {}
    on_cpu = [decode_jpeg(file).to(device) for file in files]
    on_gpu = decode_jpeg(files, device="cuda") if device.type == "cuda" else None
    for name, transforms in {
        "train": [RandomResizedCrop(SIZE), K.RandomHorizontalFlip()],
        "validation": [Resize(256), CenterCrop(SIZE)],
    }.items():
        head, _ = read_transforms(transforms)
        rows = head.draw([image.shape[1:] for image in on_cpu], fold(0, np.arange(len(files))))
        want = pil_crops(paths, rows) if name == "train" else pil_validation(paths)
        fused = resample(on_cpu, rows, SIZE)
        twin = resample_reference(on_cpu, rows, SIZE)
        report[name] = {
            "same_decoded_pixels": levels((fused.cpu() - want).abs()),
            "against_eager_twin_max": (fused - twin).abs().max().item(),
        }
        if on_gpu is not None:
            decoded = resample(on_gpu, rows, SIZE)
            report[name]["gpu_decode"] = levels((decoded.cpu() - want).abs())  # type: ignore[index]
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", dest="data", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="where there is no git")
    args = parser.parse_args()
    paths = sorted(p for p in args.data.iterdir() if p.suffix.lower() in (".jpeg", ".jpg"))
    files = [path.read_bytes() for path in paths]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = {
        "metadata": metadata(args, Device()),
        "photos": len(files),
        **({"decode": decoders(files)} if device.type == "cuda" else {}),
        **compare(paths, files, device),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
