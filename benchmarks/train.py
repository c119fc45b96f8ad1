"""Images per second of real training, next to the same step on a resident batch and to DALI.

    python benchmarks/train.py --data PHOTOS --sweep dali --output sweep-h100.json
    python benchmarks/train.py --data PHOTOS --output a.json --models resnet18
    python benchmarks/train.py --data PHOTOS --output a.json --models none --photos large
    python benchmarks/train.py --data PHOTOS --output a.json --engine none --cores 8
    python benchmarks/train.py --data PHOTOS --output a.json --epochs 6 --files 13000
    python benchmarks/train.py --data PHOTOS --output a.json --cold --files 3000
    python benchmarks/train.py --data PHOTOS --package before=../checkout

A cell is a model, a mode and all options. It is measured by the rules of protocol.py: in rounds,
each the other way round than the one before, until its rates are settled. The file is continued: a
column of a round that is in it is not run again. ``--models none`` is the loader alone.

The step is bf16 autocast, channels_last, cross entropy, SGD. The loop waits for the step before it,
or reads the loss of every step (``--loop item``). A column may carry options of its factory in
loaders.py: ``gpuprefetch:cpu_share=0.0``. ``--package`` adds a column of another checkout.
"""

import argparse
import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import clock
import harness
import loaders
import photos
import protocol
import stamp
import sweep
from protocol import OURS, TWIN

COLUMNS = ["synthetic", OURS, "gpuprefetch:cpu_share=0.0", "dali"]
COLUMNS += ["torchvision:backend=references", "torchvision:backend=tensor,normalize=gpu"]
# Added by --peers all: each is reported as skipped, with the reason, where it is not installed.
PEERS = ["timm", "kornia", "spdl", "ffcv"]
# Of torch.compile. CUDA graphs leave the host next to nothing to launch, and loaders to slow.
MODES = {"eager": None, "compile": "default", "graphs": "reduce-overhead"}
STREAMS = ["own", "default"]
# Batches of large photos are slow, and the workers' share is decided by batches.
SETTLE = {"sample": (5.0, 15.0), "large": (25.0, 40.0)}
# What a sweep runs on, unless --models is given.
SWEPT = [("none", "eager"), ("resnet18", "compile")]
WITHOUT_POLICY = ("synthetic", "ready")

FROM_LOADER = "making the loader"  # where the clock of a first epoch starts

Cell = dict[str, Any]


@dataclass(frozen=True)
class Training:
    """A model's step on ``(images, target)``, and its forward pass for validation.

    Both return the loss, still on the device.
    """

    step: Callable[..., Any]
    evaluate: Callable[..., Any]
    model: Any = None

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model is in its mode for validation inside of it."""
        if self.model is not None:
            self.model.eval()
        yield
        if self.model is not None:
            self.model.train()


def make_training(
    model_name: str, mode: str, device: str, wrap: Callable[[Any], Any] | None = None
) -> Training:
    """A model of torchvision, or "none": steps that do nothing.

    Args:
        model_name: of torchvision, or "none".
        mode: a key of ``MODES``.
        device: ``"cuda"`` or ``"cpu"``.
        wrap: gives what is called of the model, such as a DistributedDataParallel.
    """
    import torch
    from torchvision.models import get_model

    if model_name == "none":
        return Training(lambda images, target: None, lambda images, target: None)
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

    def evaluate(images: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            return criterion(forward(images), target)

    return Training(step, evaluate, model)


def make_step(
    model_name: str, mode: str, device: str, wrap: Callable[[Any], Any] | None = None
) -> Callable[..., Any]:
    """The training step of :func:`make_training`."""
    return make_training(model_name, mode, device, wrap).step


def stream_of(name: str, device: str) -> contextlib.AbstractContextManager[Any]:
    """Makes one of ``STREAMS`` current; the model is to be made in it, too."""
    import torch

    if device == "cpu":
        return contextlib.nullcontext()
    own = name == "own"
    return torch.cuda.stream(torch.cuda.Stream() if own else torch.cuda.default_stream())


def measure(
    cell: Cell,
    column: str,
    package: str,
    settings: dict[str, Any],
    timing: dict[str, Any],
    began: float,
    validation: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One column of a cell, in this process; ``validation`` has a column and settings, too."""
    shared = loaders.Settings(**settings)
    if column.startswith(OURS):
        import gpuprefetch

        if not Path(gpuprefetch.__file__).is_relative_to(package):
            raise RuntimeError(f"gpuprefetch was imported from {gpuprefetch.__file__}")
        if cell["engine"] == "none":
            loaders.refuse_engines()
    batches = loaders.Late(column, shared)
    try:
        if not cell["cold"]:
            batches.make()
        with stream_of(cell["stream"], shared.device):
            training = make_training(cell["model"], cell["mode"], shared.device)
            if cell["epochs"]:
                result = _epochs(cell, batches, training, shared, validation, began)
            else:
                result = clock.measure(batches, training.step, device=shared.device, **timing)
    except loaders.Missing as reason:
        return {"skipped": str(reason)}
    batches = batches.make()
    if cell["cold"]:
        result["clock_from"] = FROM_LOADER
    if hasattr(batches, "options"):
        result["options"] = batches.options
    if column.startswith(OURS):
        result["nvjpeg"] = loaders.nvjpeg_version()
    if hasattr(batches, "stats"):
        result["stats"] = batches.stats.as_dict()
    return result


def _epochs(
    cell: Cell,
    batches: loaders.Late,
    training: Training,
    settings: loaders.Settings,
    validation: dict[str, Any] | None,
    began: float,
) -> dict[str, Any]:
    validate = None
    if validation is not None:
        shared = loaders.Settings(**validation["settings"])
        held_out = loaders.build(validation["column"], shared)

        def validate(ended: float) -> clock.Pass:
            with training.evaluating():
                return clock.run_pass(held_out, training.evaluate, settings.device, ended)

    if cell["cold"]:  # what is not of the loader is done before the clock starts
        loaders.import_modules(batches.spec)
        training.step(*next(iter(loaders.synthetic(settings))))
        clock.synchronize(settings.device)
    found = clock.measure_epochs(
        batches,
        training.step,
        device=settings.device,
        epochs=cell["epochs"],
        began=began,
        validate=validate,
        first=cell["cold"],
    )
    return {"loops": {"step": found}}


def cells(args: argparse.Namespace) -> list[Cell]:
    """What is measured, without the loops, which share a process."""
    shared = {
        "batch_size": args.batch_size,
        "photos": args.photos,
        "files": args.files,
        "policy": args.policy,
        "engine": args.engine,
        "epochs": args.epochs,
        "validate": args.validate,
        "persistent": args.persistent,
        "cold": args.cold,
        "cores": harness.cores(),
        "workers": args.workers,
        "stream": args.stream,
    }
    return [{"model": model, "mode": mode, **shared} for model, mode in _models(args)]


def _models(args: argparse.Namespace) -> list[tuple[str, str]]:
    if args.sweep and args.models is None:
        return SWEPT
    models = args.models or ["resnet18", "resnet50"]
    return [(m, mode) for m in models for mode in (["eager"] if m == "none" else args.modes)]


@dataclass(frozen=True)
class Column:
    """One process of a round: its label, its loader with options, and the checkout it runs."""

    name: str
    loader: str
    package: Path = harness.ROOT


def columns(args: argparse.Namespace, cell: Cell) -> list[Column]:
    """The columns of a round, in its order."""
    chosen = args.columns or COLUMNS
    chosen = [*chosen, *(PEERS if args.peers == "all" else [])]
    if OURS not in chosen:
        chosen = [OURS, *chosen]
    if cell["model"] == "none":
        chosen = [column for column in chosen if column != "synthetic"]
    # The twin last: the longest way from its pair, so that drift within a round is in the noise.
    found = [Column(column, protocol.loader_of(column)) for column in [*chosen, TWIN]]
    for word in args.package:
        name, _, path = word.partition("=")
        found.append(Column(f"{name}: {OURS}", OURS, Path(path).resolve()))
    return found


def loader_of(column: str, cell: Cell, control: sweep.Fastest | None = None) -> str:
    """The loader of a column, with what the cell and the sweep add to its options."""
    name, options = loaders.parse(column)
    added: dict[str, Any] = {}
    if name == "dali" and cell["engine"] == "none":
        added["hw_decoder_load"] = 0.0
    if name == "dali" and control is not None and "threads" not in options:
        added |= loaders.parse(control.column)[1]
        if options.get("dynamic") or options.get("capture"):
            added.pop("prefetch_queue_depth", None)  # of a pipeline
    if cell["policy"] and name not in WITHOUT_POLICY:
        added["policy"] = cell["policy"]
    return sweep.spec(name, {**added, **options})


class Cells:
    """Runs columns of cells in separate processes, and keeps the results in a document."""

    def __init__(self, args: argparse.Namespace, document: harness.Document) -> None:
        self._args = args
        self._document = document
        self._device = harness.Device()
        self._limit = harness.TimeLimit(args.stop_after)

    def run(self, cell: Cell) -> bool:
        """Rounds of a cell until it is settled; False where the time is over before."""
        args = self._args
        order = columns(args, cell)
        for number in range(args.most_rounds):
            if number >= args.rounds and self.settled(cell, [c.name for c in order]):
                break
            for place, column in enumerate(order if number % 2 == 0 else order[::-1]):
                if not self.run_column(cell, column, number, place):
                    return False
        return True

    def sweep(self, cell: Cell) -> bool:
        """Every setting of DALI once, then the fastest until they are settled."""
        args = self._args
        grid = [Column(column, column) for column in sweep.grid(cell["engine"], cell["cores"])]
        for place, column in enumerate(grid):
            if not self.run_column(cell, column, 0, place):
                return False
        first = {name: rates for name, rates in self.rates(cell)["step"].items() if 0 in rates}
        last = sweep.finalists({name: [rates[0]] for name, rates in first.items()})
        for number in range(1, args.most_rounds):
            if number >= args.rounds and self.settled(cell, last):
                break
            order = [column for column in grid if column.name in last]
            for place, column in enumerate(order if number % 2 == 0 else order[::-1]):
                if not self.run_column(cell, column, number, place):
                    return False
        return True

    def run_column(self, cell: Cell, column: Column, number: int, place: int) -> bool:
        """One process, unless the file has its result; False where the time is over."""
        loops = _loops(self._args, cell)
        there = [r for r in self._of(cell) if r["column"] == column.name]
        done = {r["loop"] for r in there if r["round"] == number and "error" not in r}
        failed = sum("error" in r for r in there) >= 2
        if set(loops) <= done or failed or any("skipped" in r for r in there):
            return True
        if self._limit.is_over():
            return False
        started = time.monotonic()
        what = {"column": column.name, "round": number, "place": place, **cell}
        result = self._measured(cell, column)
        took = time.monotonic() - started
        self._limit.note(took)
        for loop, found in result.pop("loops", {loop: {} for loop in loops}).items():
            record = {**what, "loop": loop, **found, **result, "took_seconds": round(took, 1)}
            self._document.add(record)
        return True

    def _measured(self, cell: Cell, column: Column) -> dict[str, Any]:
        args = self._args
        gpu = self._document.content["metadata"]["gpu"]
        name, options = loaders.parse(column.loader)
        is_control = name == "dali" and "threads" not in options
        control = sweep.fastest(args.sweeps, gpu, cell) if is_control else None
        settings = harness.settings(args)
        settings["persistent"] = cell["persistent"]
        if cell["epochs"]:
            settings["images"] = args.files
        loader = loader_of(column.loader, cell, control)
        task: dict[str, Any] = {
            "cell": cell,
            "column": loader,
            "package": str(column.package),
            "settings": settings,
            "timing": _timing(args, cell),
        }
        if cell["validate"]:
            data = photos.photo_folder(args.data, cell["validate"])
            passes = {**settings, "data": str(data), "images": cell["validate"], "train": False}
            plain = loader_of(column.loader, {**cell, "policy": ""}, control)
            task["validation"] = {"column": plain, "settings": passes}
        noted: dict[str, Any] = {}
        if cell["cold"]:
            noted["page_cache"] = photos.drop_page_cache(Path(settings["data"]))
        if is_control:
            noted["control"] = control.as_dict() if control else None
        if column.package != harness.ROOT:
            noted["checkout"] = stamp.checkout(column.package).as_dict()
        task["began"] = time.time()
        result = harness.run_child(
            __file__,
            task,
            device=self._device,
            environment=loaders.ENVIRONMENT.get(loaders.parse(loader)[0]),
            package=column.package,
            timeout=args.timeout,
        )
        return {**noted, **result}

    def settled(self, cell: Cell, names: list[str]) -> bool:
        """Whether the rates of these columns are settled, in every loop; failures aside."""
        rounds = self.rates(cell)
        return bool(rounds) and all(
            protocol.is_settled(
                [list(found.values()) for name, found in by_column.items() if name in names],
                within=self._args.within,
                least=self._args.rounds,
            )
            for by_column in rounds.values()
        )

    def rates(self, cell: Cell) -> dict[str, dict[str, dict[int, float]]]:
        """Loop -> column -> round -> images a second."""
        found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        for r in self._of(cell):
            if "images_per_second" in r:
                found[r["loop"]][r["column"]][r["round"]] = protocol.rate_of(r)
        return found

    def _of(self, cell: Cell) -> list[dict[str, Any]]:
        return [r for r in self._document.content["results"] if {**r, **cell} == r]


def _loops(args: argparse.Namespace, cell: Cell) -> list[str]:
    only_step = cell["model"] == "none" or cell["epochs"]
    return ["step"] if only_step else list(args.loop)


def _timing(args: argparse.Namespace, cell: Cell) -> dict[str, Any]:
    return {
        "loops": _loops(args, cell),
        "settle": args.settle,
        "seconds": args.seconds,
        "repeats": args.repeats,
        # Windows of 2 s would not show the bursts of large photos if each held whole ones.
        "multiple": 1 if args.photos == "large" else args.workers,
    }


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", help="of torchvision, or none")
    parser.add_argument("--modes", nargs="+", default=["eager", "compile"], choices=list(MODES))
    parser.add_argument("--columns", nargs="+", help="loaders, with options")
    parser.add_argument(
        "--peers", default="some", choices=["some", "all"], help="all: more columns"
    )
    parser.add_argument("--package", nargs="+", default=[], metavar="NAME=PATH")
    parser.add_argument("--rounds", type=int, default=protocol.LEAST_ROUNDS, help="at least")
    parser.add_argument("--most-rounds", type=int, default=protocol.MOST_ROUNDS)
    parser.add_argument("--within", type=float, default=protocol.WITHIN, help="settled: so close")
    parser.add_argument("--stop-after", type=float, help="seconds, for a time that is limited")
    parser.add_argument("--sweep", choices=["dali"], help="try the settings of a peer")
    parser.add_argument("--sweeps", type=Path, default=harness.RESULTS, help="folder of sweeps")
    parser.add_argument("--loop", nargs="+", default=["step"], choices=clock.LOOPS)
    parser.add_argument("--photos", default="sample", help="sample, large, or a name of --data's")
    parser.add_argument("--policy", default="", choices=["", "ra", "ta", "aa"], help="random ops")
    parser.add_argument("--engine", default="auto", choices=["auto", "none"], help="JPEG engines")
    parser.add_argument("--epochs", type=int, default=0, help="whole epochs of --files photos")
    parser.add_argument("--validate", type=int, default=0, help="photos, after each epoch")
    parser.add_argument("--no-persistent-workers", dest="persistent", action="store_false")
    parser.add_argument("--cold", action="store_true", help="the first epoch, from the disk")
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
    args.settle = args.settle or SETTLE.get(args.photos, SETTLE["sample"])
    args.most_rounds = max(args.rounds, args.most_rounds)
    if args.cold:
        args.epochs = 1
    elif args.epochs == 1:
        parser.error("--epochs 1 leaves nothing: the first epoch warms up; --cold measures it")
    if args.validate and not args.epochs:
        parser.error("--validate comes after an epoch; give --epochs, too")
    for column in args.columns or []:
        loaders.parse(protocol.loader_of(column))  # a wrong name costs nothing yet
    if args.photos == "large":
        size = (400, 300) if args.tiny else photos.LARGE
        args.data = photos.large(args.data, size=size)
    return args


def main() -> None:
    args = parse()
    document = harness.Document("sweep" if args.sweep else "train", args, harness.Device())
    document.note_photos(args.photos, photos.photo_facts(args.data, args.files))
    runner = Cells(args, document)
    for cell in cells(args):
        finished = runner.sweep(cell) if args.sweep else runner.run(cell)
        if not finished:
            break


if __name__ == "__main__":
    harness.child_main(measure)
    main()
