"""selfcheck: is this machine's decoding safe? doctor: what is training bound by?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def _selfcheck(args: argparse.Namespace) -> Any:
    from gpuprefetch.insight.selfcheck import selfcheck

    return selfcheck(args.device, args.rounds)


def _doctor(args: argparse.Namespace) -> Any:
    import torch
    from torch.utils.data import DataLoader, Dataset
    from torchvision.datasets import ImageFolder
    from torchvision.models import get_model, list_models
    from torchvision.transforms import v2

    import gpuprefetch
    from gpuprefetch.prefetcher import _resolve_device

    if args.model not in list_models():
        raise ValueError(
            f"--model takes a model of torchvision, such as resnet50, got {args.model!r}. "
            "torchvision.models.list_models() has their names."
        )
    device = _resolve_device(args.device)
    root = args.data / "train" if (args.data / "train").is_dir() else args.data
    ops = [v2.RandomResizedCrop(args.size), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    ops += [v2.ToDtype(torch.float32, scale=True)]
    ops += [v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    dataset: Dataset[Any] = ImageFolder(root, v2.Compose(ops))
    options = {"num_workers": args.workers, "pin_memory": device.type == "cuda"}
    loader: Any = DataLoader(dataset, args.batch_size, shuffle=True, **options)
    if args.loader == "gpuprefetch":
        loader = gpuprefetch.accelerate(loader, print_plan=False, device=device)
    torch.backends.cudnn.benchmark = True  # the shapes never change
    model = get_model(args.model).to(device, memory_format=torch.channels_last)
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0 if all is well, 1 if not, 2 if it was asked wrongly."""
    parser = argparse.ArgumentParser(prog="python -m gpuprefetch", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    check = commands.add_parser(
        "selfcheck", help="try whether any image is overwritten while a kernel still reads it"
    )
    check.add_argument("--rounds", type=int, default=1000, help="default: %(default)s")
    check.set_defaults(run=_selfcheck)
    visit = commands.add_parser(
        "doctor", help="say what training on a folder is bound by, and which settings to change"
    )
    visit.add_argument("data", type=Path, metavar="DATA", help="class folders, or train/ with them")
    visit.add_argument("--model", default="resnet50", help="of torchvision; default: %(default)s")
    visit.add_argument("--loader", choices=["torchvision", "gpuprefetch"], default="torchvision")
    visit.add_argument("--batch-size", type=int, default=256, help="default: %(default)s")
    visit.add_argument("--size", type=int, default=224, help="of the images; default: %(default)s")
    visit.add_argument("--workers", type=int, default=8, help="default: %(default)s")
    visit.add_argument("--seconds", type=float, default=3.0, help="of a run; default: %(default)s")
    visit.add_argument("--no-tune", action="store_true", help="try no other settings")
    visit.set_defaults(run=_doctor)
    for command in (check, visit):
        command.add_argument("--device", help="such as cuda:1; the current one by default")
        command.add_argument("--output", type=Path, help="JSON file to write the report to")
    args = parser.parse_args(arguments)
    if args.output and not args.output.parent.is_dir():  # or it is found behind all the work
        parser.error(f"there is no folder {args.output.parent} for --output")
    if args.output and args.output.is_dir():
        parser.error(f"--output {args.output} is a folder: name a file in it")
    try:
        report = args.run(args)
        print(report)
        if args.output:
            args.output.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0 if getattr(report, "ok", True) else 1


if __name__ == "__main__":
    sys.exit(main())
