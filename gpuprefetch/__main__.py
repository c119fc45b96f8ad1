"""Find what limits training, see what transforms do, and check that decoding is safe here."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

import gpuprefetch
from gpuprefetch.core.device import resolve_device
from gpuprefetch.core.report import refuse_unwritable, versions
from gpuprefetch.images.share import usable_cores
from gpuprefetch.insight.files import check_files
from gpuprefetch.insight.machine import machine
from gpuprefetch.insight.named import NamedFiles


class Report(Protocol):
    """What a command gives: ``print`` shows it, and ``ok``, if it has that, tells the exit code."""

    def as_dict(self) -> dict[str, object]:
        """Everything in it, for JSON."""


POLICIES = ("TrivialAugmentWide", "RandAugment", "AutoAugment", "AugMix")


def _loader(args: argparse.Namespace, policy: str | None = None, **options: Any) -> DataLoader[Any]:
    """A folder with the training transforms of ImageNet."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    ops = [v2.RandomResizedCrop(args.size), v2.RandomHorizontalFlip()]
    ops += [getattr(v2, policy)()] if policy else []
    ops += [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    ops += [v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    train = args.DATA / "train"
    # A folder of photos with that name is a class, as of cars, buses and trains.
    is_split = train.is_dir() and any(entry.is_dir() for entry in train.iterdir())
    root = train if is_split else args.DATA
    try:
        folder = ImageFolder(root, v2.Compose(ops))
    except FileNotFoundError as error:
        if not root.is_dir():
            raise
        raise ValueError(
            f"no photos in class folders in {root}: DATA is a folder of these, DATA/CLASS/*.jpg, "
            "or holds them in DATA/train."
        ) from error
    return DataLoader(NamedFiles(folder), shuffle=True, **options)


def _workers(args: argparse.Namespace) -> int:
    return usable_cores() if args.workers is None else args.workers


@dataclass(frozen=True, slots=True)
class Saved:
    """A preview that was written."""

    file: str
    width: int
    height: int
    titles: list[list[str]]  # of each sample

    def as_dict(self) -> dict[str, object]:
        """Everything but the picture, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        samples = len(self.titles)
        return f"{self.file}: {samples} samples, {self.width} x {self.height} pixels"


def _preview(args: argparse.Namespace) -> Report:
    refuse_unwritable(args.output)
    plain = _loader(args, args.policy)
    loader = gpuprefetch.accelerate(plain, print_plan=False, device=args.device)
    sheet = loader.preview(args.samples, draws=args.draws)
    sheet.save(args.output)
    return Saved(str(args.output), *sheet.size, sheet.info["titles"])


def _parity(args: argparse.Namespace) -> Report:
    if args.picture:
        refuse_unwritable(args.picture)
    report = gpuprefetch.parity(_loader(args), args.count, device=args.device)
    if args.picture:
        report.picture(args.picture)
    return report


def _check(args: argparse.Namespace) -> Report:
    return check_files(args.FOLDER, args.device, workers=_workers(args))


def _selfcheck(args: argparse.Namespace) -> Report:
    return gpuprefetch.selfcheck(args.device, args.rounds)


def _doctor(args: argparse.Namespace) -> Report:
    from torchvision import models

    if args.picture:
        refuse_unwritable(args.picture)
    device = resolve_device(args.device)
    on_gpu = device.type == "cuda"
    name = args.model or ("resnet50" if on_gpu else "resnet18")
    if name not in models.list_models(models):  # without detection and the like
        raise ValueError(
            "--model takes a classification model of torchvision, such as resnet50, got "
            f"{name!r}. torchvision.models.list_models(torchvision.models) has their names."
        )
    plain = _loader(
        args,
        num_workers=_workers(args),
        batch_size=args.batch_size or (256 if on_gpu else 32),
        pin_memory=on_gpu,
    )
    loader: DataLoader[Any] | gpuprefetch.DataPrefetcher = plain
    if args.loader == "gpuprefetch":
        loader = gpuprefetch.accelerate(plain, print_plan=False, device=device)
    torch.backends.cudnn.benchmark = True  # the shapes never change
    model = models.get_model(name).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        images, target = batch
        images = images.to(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            output = model(images)
            logits = getattr(output, "logits", output)
            loss = torch.nn.functional.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    report = gpuprefetch.doctor(
        loader, step, device=device, seconds=args.seconds, tune=not args.no_tune
    )
    if args.picture:
        report.picture(args.picture)
    return report


def _at_least(least: int) -> Callable[[str], int]:
    """A reader of whole numbers from ``least`` on."""

    def read(text: str) -> int:
        if text.isdecimal() and int(text) >= least:
            return int(text)
        raise argparse.ArgumentTypeError(f"takes a whole number, {least} or more, got {text!r}")

    return read


def _seconds(text: str) -> float:
    """Read a time that a measurement can take."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"takes a number of seconds above 0, got {text!r}")


@dataclass(frozen=True, slots=True)
class Option:
    """An argument of a command, as argparse takes it."""

    help: str
    type: Callable[[str], object] = str
    default: object = None
    choices: Sequence[str] | None = None
    is_flag: bool = False

    def add_to(self, command: argparse.ArgumentParser, name: str) -> None:
        """Let a command take the option under this name."""
        if self.is_flag:
            command.add_argument(name, help=self.help, action="store_true")
            return
        told = "" if self.default is None else " (default: %(default)s)"
        command.add_argument(
            name,
            help=self.help + told,
            type=self.type,
            default=self.default,
            choices=self.choices,
        )


@dataclass(frozen=True, slots=True)
class Command:
    """A command: what it runs, what it is for, and the names of its options."""

    run: Callable[[argparse.Namespace], Report]
    help: str
    options: Sequence[str]


OPTIONS = {
    "DATA": Option("folder of class folders, or of train/ with class folders", Path),
    "FOLDER": Option("any folder with pictures in it, or in the folders below it", Path),
    "--model": Option("torchvision model (default: resnet50; without a GPU resnet18)"),
    "--loader": Option(
        "loader to examine", default="torchvision", choices=["torchvision", "gpuprefetch"]
    ),
    "--batch-size": Option("images per batch (default: 256; without a GPU 32)", _at_least(1)),
    "--size": Option("image size in pixels", _at_least(1), 224),
    "--workers": Option("worker processes (default: the usable cores)", _at_least(0)),
    "--seconds": Option("length of each measurement", _seconds, 3.0),
    "--no-tune": Option("do not try other settings", is_flag=True),
    "--count": Option("images to compare", _at_least(1), 256),
    "--picture": Option("save a picture of the result to this file", Path),
    "--samples": Option("samples to show, spread over the folder", _at_least(1), 16),
    "--draws": Option("results for each sample", _at_least(1), 1),
    "--policy": Option("policy of torchvision's to show", choices=POLICIES),
    "--output": Option("picture to write", Path, Path("preview.png")),
    "--rounds": Option("batches per check", _at_least(1), 1000),
    "--device": Option("device, such as cuda:1 (default: the current GPU, else the CPU)"),
    "--json": Option("print the report as JSON", is_flag=True),
}
FOLDER = ["DATA", "--size"]
COMMANDS = {
    "doctor": Command(
        _doctor,
        "find what limits training on a folder, and which setting to change",
        [
            *FOLDER,
            "--model",
            "--loader",
            "--batch-size",
            "--workers",
            "--seconds",
            "--no-tune",
            "--picture",
        ],
    ),
    "preview": Command(
        _preview,
        "write a picture of samples, each original beside what the transforms make of it",
        [*FOLDER, "--samples", "--draws", "--policy", "--output"],
    ),
    "parity": Command(
        _parity,
        "compare the pixels of a folder with torchvision's, op by op",
        [*FOLDER, "--count", "--picture"],
    ),
    "check": Command(
        _check,
        "decode every picture of a folder, with all folders in it, and name the bad ones",
        ["FOLDER", "--workers"],
    ),
    "selfcheck": Command(
        _selfcheck,
        "check that no image is overwritten while a kernel still reads it",
        ["--rounds"],
    ),
}


def _version() -> str:
    """Versions, and what a report of an error should say of this machine."""
    found = ", ".join(f"{name} {number}" for name, number in versions().items())
    return f"gpuprefetch {gpuprefetch.__version__} ({found})\n{machine()}"


def _show(text: object) -> None:
    """Print the result, of which a reader such as ``head`` may want less."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        # A name may have what the output cannot show, as bytes that are no text.
        print(str(text).encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        # Python flushes once more when it ends, and would fail once more.
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise OSError(f"the result cannot be printed: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0 if all is well, 1 if not, 2 after wrong arguments, a bad file, too little GPU memory or an
        output that cannot be written, 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="python -m gpuprefetch", description=__doc__)
    parser.add_argument("--version", action="store_true", help="show versions, GPU and decoder")
    commands = parser.add_subparsers(metavar="command")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.help, description=command.help)
        for option in [*command.options, "--device", "--json"]:
            OPTIONS[option].add_to(subparser, option)
        subparser.set_defaults(run=command.run)
    args = parser.parse_args(arguments)
    if "run" not in args and not args.version:
        parser.print_help()
        return 0
    try:
        if args.version:
            _show(_version())
            return 0
        report = args.run(args)
        _show(json.dumps(report.as_dict(), indent=1) if args.json else report)
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        # An error of a worker begins with its traceback.
        *_, last = (str(error).strip() or repr(error)).splitlines()
        print(f"{parser.prog}: {last}", file=sys.stderr)
        return 2
    return 0 if getattr(report, "ok", True) else 1


if __name__ == "__main__":
    sys.exit(main())
