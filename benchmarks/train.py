"""Images per second of real training, next to the same step on a resident batch and to DALI.

    python benchmarks/train.py --data PHOTOS --output a.json --models resnet18 --rounds 2
    python benchmarks/train.py --data PHOTOS --output a.json --models none --photos large
    python benchmarks/train.py --data PHOTOS --output a.json --engine none --cores 8
    python benchmarks/train.py --data PHOTOS --epochs 30 --files 3000 --batch-size 64
    python benchmarks/train.py --data PHOTOS --package before=../checkout --rounds 4

A cell is a model, a mode and all options. Its columns run in separate processes, one after the
other and then the other way round (``--rounds 2``), so that a machine that drifts favors none. The
file is continued: a cell that is in it is run again only with more rounds. ``--models none`` is the
loader alone.

The step is bf16 autocast, channels_last, cross entropy, SGD. The loop waits for the step before it,
or reads the loss of every step (``--loop item``). A column may carry options of its factory in
loaders.py: ``gpuprefetch:cpu_share=0.0``. ``--package`` adds a column of another checkout.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clock
import harness
import loaders
import photos

COLUMNS = ["synthetic", "gpuprefetch", "gpuprefetch:cpu_share=0.0", "dali"]
# Of torch.compile. CUDA graphs leave the host next to nothing to launch, and loaders to slow.
MODES = {"eager": None, "compile": "default", "graphs": "reduce-overhead"}
STREAMS = ["own", "default"]
# Batches of large photos are slow, and the workers' share is decided by batches.
SETTLE = {"sample": (5.0, 15.0), "large": (25.0, 40.0)}


def make_step(
    model_name: str, mode: str, device: str, wrap: Callable[[Any], Any] | None = None
) -> Callable[..., Any]:
    """A training step on ``(images, target)`` that returns the loss, still on the device.

    Args:
        model_name: of torchvision, or "none" for a step that does nothing.
        mode: a key of ``MODES``.
        device: ``"cuda"`` or ``"cpu"``.
        wrap: gives what is called of the model, such as a DistributedDataParallel.
    """
    import torch
    from torchvision.models import get_model

    if model_name == "none":
        return lambda images, target: None
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True  # the shapes never change
    model = get_model(model_name, weights=None).to(device, memory_format=torch.channels_last)
    forward = model if wrap is None else wrap(model)
    if mode != "eager":
        forward = torch.compile(forward, dynamic=False, mode=MODES[mode])
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)

    def step(images: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss = criterion(forward(images), target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss

    return step


def stream_of(name: str, device: str) -> contextlib.AbstractContextManager[Any]:
    """Makes one of ``STREAMS`` current; the model is to be made in it, too."""
    import torch

    if device == "cpu":
        return contextlib.nullcontext()
    own = name == "own"
    return torch.cuda.stream(torch.cuda.Stream() if own else torch.cuda.default_stream())


def measure(
    cell: dict[str, Any],
    column: str,
    package: str,
    settings: dict[str, Any],
    timing: dict[str, Any],
    began: float,
) -> dict[str, Any]:
    """One column of a cell, in this process."""
    shared = loaders.Settings(**settings)
    if column.startswith("gpuprefetch"):
        import gpuprefetch

        if not Path(gpuprefetch.__file__).is_relative_to(package):
            raise RuntimeError(f"gpuprefetch was imported from {gpuprefetch.__file__}")
        if cell["engine"] == "none":
            loaders.refuse_engines()
    batches = loaders.build(column, shared)  # first: it may prepare the environment
    with stream_of(cell["stream"], shared.device):
        step = make_step(cell["model"], cell["mode"], shared.device)
        if cell["epochs"]:
            found = clock.measure_epochs(
                batches, step, device=shared.device, epochs=cell["epochs"], began=began
            )
            result: dict[str, Any] = {"loops": {"step": found}}
        else:
            result = clock.measure(batches, step, device=shared.device, **timing)
    if hasattr(batches, "stats"):
        result["stats"] = batches.stats.as_dict()
    return result


def cells(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What is measured, without the loops, which share a process."""
    shared = {
        "batch_size": args.batch_size,
        "photos": args.photos,
        "engine": args.engine,
        "epochs": args.epochs,
        "cores": harness.cores(),
        "workers": args.workers,
        "stream": args.stream,
    }
    return [
        {"model": model, "mode": mode, **shared}
        for model in args.models
        for mode in (["eager"] if model == "none" else args.modes)
    ]


def columns(args: argparse.Namespace, cell: dict[str, Any]) -> list[tuple[str, str, Path]]:
    """(name, loader with its options, checkout) of each process of a round."""
    chosen = args.columns or COLUMNS + ["torchvision"] * bool(cell["epochs"])
    found = [(column, column, harness.ROOT) for column in chosen]
    if cell["model"] == "none":
        found = [column for column in found if column[1] != "synthetic"]
    for word in args.package:
        name, _, path = word.partition("=")
        found.append((f"{name}: gpuprefetch", "gpuprefetch", Path(path).resolve()))
    return found


def loader_of(column: str, cell: dict[str, Any]) -> str:
    """The loader of a column, with what the cell adds to its options."""
    if cell["engine"] == "none" and column.startswith("dali"):
        return f"{column}{',' if ':' in column else ':'}hw_decoder_load=0.0"
    return column


def run(args: argparse.Namespace, cell: dict[str, Any], document: harness.Document) -> None:
    """All columns of a cell, round after round; rounds that the file has are not run again."""
    loops = ["step"] if cell["model"] == "none" or cell["epochs"] else args.loop
    done = {
        (r["column"], r["round"], r["loop"])
        for r in document.content["results"]
        if "error" not in r and {**r, **cell} == r
    }
    settings = harness.settings(args)
    if args.epochs:
        settings["images"] = args.files
    timing = {
        "loops": loops,
        "settle": args.settle,
        "seconds": args.seconds,
        "repeats": args.repeats,
        # Windows of 2 s would not show the bursts of large photos if each held whole ones.
        "multiple": 1 if args.photos == "large" else args.workers,
    }
    device = harness.Device()
    for number in range(args.rounds):
        order = columns(args, cell)
        for name, column, package in order if number % 2 == 0 else order[::-1]:
            if {(name, number, loop) for loop in loops} <= done:
                continue
            loader = loader_of(column, cell)
            task = {"cell": cell, "column": loader, "package": str(package)}
            task |= {"settings": settings, "timing": timing, "began": time.time()}
            result = harness.run_child(
                __file__,
                task,
                device=device,
                environment=loaders.ENVIRONMENT.get(loaders.parse(loader)[0]),
                package=package,
                timeout=args.timeout,
            )
            what = {"column": name, "round": number, **cell}
            for loop, found in result.pop("loops", {loop: {} for loop in loops}).items():
                document.add({**what, "loop": loop, **found, **result})


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet18", "resnet50"])
    parser.add_argument("--modes", nargs="+", default=["eager", "compile"], choices=list(MODES))
    parser.add_argument("--columns", nargs="+", help="loaders, with options")
    parser.add_argument("--package", nargs="+", default=[], metavar="NAME=PATH")
    parser.add_argument("--rounds", type=int, default=2, help="each the other way round")
    parser.add_argument("--loop", nargs="+", default=["step"], choices=clock.LOOPS)
    parser.add_argument("--photos", default="sample", choices=["sample", "large"])
    parser.add_argument("--engine", default="auto", choices=["auto", "none"], help="JPEG engines")
    parser.add_argument("--epochs", type=int, default=0, help="whole epochs of --files photos")
    parser.add_argument("--cores", type=int, help="use as many of the CPU's cores")
    parser.add_argument("--stream", default="own", choices=STREAMS, help="of the training")
    parser.add_argument("--settle", type=float, nargs=2, help="seconds, least and most")
    parser.add_argument("--seconds", type=float, default=5.0, help="measured, over all repeats")
    parser.add_argument("--repeats", type=int, default=5, help="windows in these seconds")
    args = parser.parse_args(words)
    if args.cores:  # before the workers are counted; children inherit it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    tiny = {"settle": (0.0, 0.0), "seconds": 0.1, "repeats": 2}
    args = harness.parse_arguments(parser, words, **tiny)
    args.settle = args.settle or SETTLE[args.photos]
    for column in args.columns or []:
        loaders.parse(column)  # a wrong name costs nothing yet
    if args.photos == "large":
        size = (400, 300) if args.tiny else photos.LARGE
        args.data = photos.large(args.data, size=size)
    return args


def main() -> None:
    args = parse()
    document = harness.Document("train", args, harness.Device())
    facts = document.content.setdefault("photos", {})
    facts.setdefault(args.photos, photos.photo_facts(args.data, args.files))
    for cell in cells(args):
        run(args, cell, document)


if __name__ == "__main__":
    harness.child_main(measure)
    main()
