"""Find what limits training, how far pixels move, and whether decoding is safe on this GPU."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import gpuprefetch
from gpuprefetch.core.device import resolve_device
from gpuprefetch.core.report import versions
from gpuprefetch.images.share import usable_cores
from gpuprefetch.insight.named import NamedFiles


def _loader(args: argparse.Namespace, **options: Any) -> DataLoader[Any]:
    """A folder with the training transforms of ImageNet."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    ops = [v2.RandomResizedCrop(args.size), v2.RandomHorizontalFlip()]
    ops += [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    ops += [v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    root = args.DATA / "train" if (args.DATA / "train").is_dir() else args.DATA
    return DataLoader(NamedFiles(ImageFolder(root, v2.Compose(ops))), shuffle=True, **options)


def _parity(args: argparse.Namespace) -> Any:
    report = gpuprefetch.parity(_loader(args), args.count, device=args.device)
    if args.picture:
        report.picture(args.picture)
    return report


def _doctor(args: argparse.Namespace) -> Any:
    from torchvision import models

    if args.model not in models.list_models(models):  # without detection and the like
        raise ValueError(
            "--model takes a classification model of torchvision, such as resnet50, got "
            f"{args.model!r}. torchvision.models.list_models(torchvision.models) has their names."
        )
    device = resolve_device(args.device)
    workers = usable_cores() if args.workers is None else args.workers
    options = {"batch_size": args.batch_size, "pin_memory": device.type == "cuda"}
    loader: Any = _loader(args, num_workers=workers, **options)
    if args.loader == "gpuprefetch":
        loader = gpuprefetch.accelerate(loader, print_plan=False, device=device)
    torch.backends.cudnn.benchmark = True  # the shapes never change
    model = models.get_model(args.model).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(batch: Any) -> None:
        images, target = batch
        images = images.to(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            output = model(images)
            logits = getattr(output, "logits", output)
            loss = torch.nn.functional.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    seconds, tune = args.seconds, not args.no_tune
    return gpuprefetch.doctor(loader, step, device=device, seconds=seconds, tune=tune)


# Of each option its type or what it may be, its default, and its help.
OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "DATA": (Path, None, "folder of class folders, or of train/ with class folders"),
    "--model": (str, "resnet50", "torchvision model"),
    "--loader": (["torchvision", "gpuprefetch"], "torchvision", "loader to examine"),
    "--batch-size": (int, 256, "images per batch"),
    "--size": (int, 224, "image size in pixels"),
    "--workers": (int, None, "worker processes (default: the usable cores)"),
    "--seconds": (float, 3.0, "length of each measurement"),
    "--no-tune": (bool, None, "do not try other settings"),
    "--count": (int, 256, "images to compare"),
    "--picture": (Path, None, "save the images that differ most to this file"),
    "--rounds": (int, 1000, "batches per check"),
    "--device": (str, None, "device, such as cuda:1 (default: the current GPU, else the CPU)"),
    "--json": (bool, None, "print the report as JSON"),
}
FOLDER = ["DATA", "--size"]
COMMANDS = {
    "doctor": (
        _doctor,
        "find what limits training on a folder, and which setting to change",
        [*FOLDER, "--model", "--loader", "--batch-size", "--workers", "--seconds", "--no-tune"],
    ),
    "parity": (
        _parity,
        "compare the pixels of a folder with torchvision's, op by op",
        [*FOLDER, "--count", "--picture"],
    ),
    "selfcheck": (
        lambda args: gpuprefetch.selfcheck(args.device, args.rounds),
        "check that no image is overwritten while a kernel still reads it",
        ["--rounds"],
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0 if all is well, 1 if not, 2 after wrong arguments, a bad file or too little GPU memory,
        130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="python -m gpuprefetch", description=__doc__)
    found = ", ".join(f"{name} {number}" for name, number in versions().items())
    version = f"gpuprefetch {gpuprefetch.__version__} ({found})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, (run, words, options) in COMMANDS.items():
        command = commands.add_parser(name, help=words, description=words)
        for option in [*options, "--device", "--json"]:
            kind, default, text = OPTIONS[option]
            how = "choices" if isinstance(kind, list) else "type"
            taken = {"action": "store_true"} if kind is bool else {how: kind, "default": default}
            text += " (default: %(default)s)" if default is not None else ""
            command.add_argument(option, help=text, **taken)
        command.set_defaults(run=run)
    args = parser.parse_args(arguments)
    try:
        report = args.run(args)
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        *_, last = (str(error).strip() or repr(error)).splitlines()  # after a worker's traceback
        print(f"{parser.prog}: {last}", file=sys.stderr)
        return 2
    print(json.dumps(report.as_dict(), indent=1) if args.json else report)
    return 0 if getattr(report, "ok", True) else 1


if __name__ == "__main__":
    sys.exit(main())
