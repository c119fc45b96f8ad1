"""Every cell of the tables that a machine can add, on each of its GPUs.

    python benchmarks/run_all.py --data PHOTOS --split SPLIT --output RESULTS
    python benchmarks/run_all.py --data PHOTOS --output RESULTS --only epochs "batch 64" --quick
    python benchmarks/run_all.py --list

PHOTOS are a folder of JPEGs; SPLIT has ``train/CLASS/*`` and ``val/CLASS/*``, whose photos whole
epochs take, and a whole training. A lane is a GPU with its part of the cores. The cells take turns
with the lanes, first those of loops that people have. RESULTS gets a file for each script, set of
photos and lane, such as ``train-split-gpu0.json``, and what the scripts print, ``gpu0.log``. Sweeps
of DALI that lie there choose its setting.

The same command goes on where it was cut short. A peer that cannot be imported would leave gaps in
all rows: that is told before anything runs.
"""

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import harness
import loaders
from protocol import OURS

# What must be importable for the columns of a peer.
MODULES = {
    "dali": "nvidia.dali.plugin.pytorch",
    "kornia": "kornia",
    "timm": "timm",
    "transformers": "transformers",
}
# The scripts that end in time by themselves, and go on with their file.
STOPS = ("train", "sizes", "recipe")
# Of train.py with --quick: noise is larger, and a cell needs half as long.
QUICK = "--settle 2 4 --seconds 3 --most-rounds 2"
# The settings of DALI that are its best where the sweep's are of another kind.
WITHOUT_ENGINES = "dali:threads={cores},prefetch_queue_depth=2,hybrid_huffman_threshold=100000"

CONTROLS = ("synthetic", OURS, f"{OURS}:cpu_share=0.0", "dali")
ON_TENSORS = "torchvision:backend=tensor,normalize=gpu"


@dataclass(frozen=True)
class Item:
    """One command.

    Attributes:
        name: of the cell, for ``--only``.
        script: in this folder.
        words: its arguments.
        minutes: about as long on an H100 with 16 cores, for two rounds.
        columns: of train.py; empty for the other scripts.
        on_split: whether it takes the photos of ``--split``.
        peers: keys of ``MODULES`` that it needs, beside those of its columns.
    """

    name: str
    script: str
    words: str
    minutes: float
    columns: tuple[str, ...] = ()
    on_split: bool = False
    peers: tuple[str, ...] = ()

    def needs(self, without: list[str]) -> set[str]:
        """The keys of ``MODULES`` for what runs."""
        columns = {loaders.parse(column)[0] for column in self.columns}
        return ({*self.peers} | columns & MODULES.keys()) - {*without}


def _epochs(name: str, words: str, minutes: float, *more: str) -> Item:
    columns = (*CONTROLS, *more)
    return Item(name, "train", f"--models resnet18 {words}", minutes, columns, on_split=True)


def _endless(name: str, words: str, minutes: float, columns: tuple[str, ...] = CONTROLS) -> Item:
    return Item(name, "train", words, minutes, columns)


EPOCHS = "--epochs 5 --files 13000"
EAGER = "--models resnet18 --modes eager"
ITEMS = (
    _epochs("epochs", f"--modes eager {EPOCHS}", 6, ON_TENSORS),
    _epochs("epochs, validation", f"--modes eager {EPOCHS} --validate 2000", 6),
    _epochs(
        "epochs, validation, new workers",
        f"--modes eager {EPOCHS} --validate 2000 --no-persistent-workers",
        7,
    ),
    _epochs("epochs, compiled", f"--modes compile {EPOCHS}", 8),
    _epochs("epochs, batch 64", "--modes eager --epochs 30 --files 3000 --batch-size 64", 8),
    _endless("batch 64", f"{EAGER} --batch-size 64", 6),
    _endless("batch 32", f"{EAGER} --batch-size 32", 6),
    _endless("resnet18", EAGER, 7, (*CONTROLS, ON_TENSORS)),
    _endless("resnet18, compiled", "--models resnet18 --modes compile", 8),
    _endless("resnet50", "--models resnet50 --modes eager", 6),
    _endless("shufflenet", "--models shufflenet_v2_x0_5 --modes eager", 6),
    _endless("no model", "--models none", 5),
    _endless("4 cores", f"{EAGER} --cores 4", 6, (*CONTROLS[:3], "dali:threads=4")),
    _endless("no engines", f"{EAGER} --engine none", 7, (*CONTROLS[:3], WITHOUT_ENGINES)),
    _endless("RandAugment", "--models none --policy ra", 5),
    _endless("12 megapixels", "--models none --photos large --batch-size 128", 10),
    Item("decode", "decode", "", 2),
    Item("sizes", "sizes", "", 12, peers=("transformers",)),
    Item("edge", "edge", "", 3),
    Item("views", "views", "", 3),
    Item("policy", "policy", "", 7, peers=("dali", "kornia")),
    Item("recipe", "recipe", "--epochs 30", 6, on_split=True),
)


@dataclass(frozen=True)
class Lane:
    """A GPU and the cores that its scripts keep to."""

    number: int
    gpu: str  # of CUDA_VISIBLE_DEVICES
    cores: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"gpu{self.number}"


def lanes(cores_per_lane: int | None = None) -> list[Lane]:
    """One lane for each visible GPU, with equal parts of the cores."""
    gpus = harness.visible_gpus()
    if not gpus:
        raise SystemExit("no GPU is visible: each script tries itself out with --tiny, on the CPU")
    cores = sorted(os.sched_getaffinity(0))
    each = cores_per_lane or max(len(cores) // len(gpus), 1)
    if each * len(gpus) > len(cores):
        raise SystemExit(f"{len(gpus)} GPUs with {each} cores each need more than {len(cores)}")
    return [Lane(n, gpu, tuple(cores[n * each :][:each])) for n, gpu in enumerate(gpus)]


def arguments(item: Item, lane: Lane, args: argparse.Namespace, left: float) -> list[str]:
    """The command line of an item in a lane, where so many seconds are left."""
    script = harness.ROOT / "benchmarks" / f"{item.script}.py"
    kind = "split" if item.on_split else "data"
    words = [sys.executable, str(script), *item.words.split()]
    if item.script != "policy":  # which draws its pictures
        words += ["--data", str(args.split if item.on_split else args.data)]
    words += ["--output", str(args.output / f"{item.script}-{kind}-{lane.name}.json")]
    columns = [c for c in item.columns if loaders.parse(c)[0] not in args.without]
    if columns:
        words += ["--columns", *(c.format(cores=len(lane.cores)) for c in columns)]
    if item.script == "train":
        words += QUICK.split() if args.quick else []
        if any(args.output.glob("sweep-*.json")):
            words += ["--sweeps", str(args.output)]
    if item.script in STOPS and left < float("inf"):
        words += ["--stop-after", f"{left:.0f}"]
    return words


def missing(modules: set[str]) -> dict[str, str]:
    """Why peers cannot be imported, by their names: each is tried in a process of its own."""
    why = {}
    for name in sorted(modules):
        tried = subprocess.run(
            [sys.executable, "-c", f"import {MODULES[name]}"], capture_output=True, text=True
        )
        if tried.returncode:
            why[name] = (tried.stderr.strip().splitlines() or ["no reason"])[-1]
    return why


class Runner:
    """Runs the items of lanes, each lane in a thread, and ends what runs when it is left."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._end = time.monotonic() + (args.stop_after or float("inf"))
        self._over = threading.Event()

    def run(self, items: list[Item], own: list[Lane]) -> list[str]:
        """All items, in turn on the lanes; the names of those that failed.

        An item is on the same lane whenever the same items are given.
        """
        with ThreadPoolExecutor(len(own)) as pool, self._ending():
            parts = [items[lane.number :: len(own)] for lane in own]
            return [name for failed in pool.map(self._run_lane, own, parts) for name in failed]

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            with harness.ended_by_sigterm():
                yield
        finally:
            self._over.set()

    def _run_lane(self, lane: Lane, items: list[Item]) -> list[str]:
        os.sched_setaffinity(0, lane.cores)  # of this thread, and of what it starts
        failed = []
        for item in items:
            left = self._end - time.monotonic()
            enough = left > (30 if item.script in STOPS else 60 * item.minutes)
            if self._over.is_set() or not enough:
                print(f"{lane.name}  {item.name}: not begun, {max(left, 0):.0f} s are left")
                continue
            started = time.monotonic()
            status = self._run_item(item, lane, left)
            took = time.monotonic() - started
            print(f"{lane.name}  {item.name}: {took:.0f} s, exit status {status}", flush=True)
            if status:
                failed.append(item.name)
        return failed

    def _run_item(self, item: Item, lane: Lane, left: float) -> int:
        words = arguments(item, lane, self._args, left)
        with (self._args.output / f"{lane.name}.log").open("ab") as log:
            log.write(f"\n$ {shlex.join(words)}\n".encode())
            log.flush()
            variables = os.environ | {"CUDA_VISIBLE_DEVICES": lane.gpu}
            running = subprocess.Popen(words, stdout=log, stderr=log, env=variables)
            while running.poll() is None:
                if self._over.wait(0.2):
                    running.terminate()
                    running.wait()
        return running.returncode


def chosen(args: argparse.Namespace) -> list[Item]:
    """The items that ``--only`` names, and that the photos allow."""
    known = {item.name for item in ITEMS}
    if unknown := [name for name in args.only or () if name not in known]:
        raise SystemExit(f"--only takes names of --list, got {', '.join(unknown)}")
    found = [item for item in ITEMS if args.only is None or item.name in args.only]
    return [item for item in found if args.split is not None or not item.on_split]


def main(words: list[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--data", type=Path, help="folder of JPEGs, searched deeply")
    parser.add_argument("--split", type=Path, help="folder with train/CLASS/* and val/CLASS/*")
    parser.add_argument("--output", type=Path, help="folder of the results")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of --list")
    parser.add_argument("--without", nargs="+", default=[], choices=sorted(MODULES), metavar="PEER")
    parser.add_argument("--quick", action="store_true", help="train.py with shorter windows")
    parser.add_argument("--cores-per-gpu", type=int, help="default: equal parts")
    parser.add_argument("--stop-after", type=float, help="seconds, for a time that is limited")
    parser.add_argument("--list", action="store_true", help="the names, and about how long")
    args = parser.parse_args(words)
    items = chosen(args)
    if args.list:
        for item in ITEMS:
            print(f"{item.minutes:4.0f} min  {item.name}")
        return
    if args.data is None or args.output is None:
        parser.error("--data takes a folder of JPEGs, and --output one for the results")
    if why := missing(set().union(*(item.needs(args.without) for item in items))):
        lines = [f"{name}: {reason}" for name, reason in why.items()]
        raise SystemExit("\n".join([*lines, f"Install them, or give --without {' '.join(why)}"]))
    args.output.mkdir(parents=True, exist_ok=True)
    if failed := Runner(args).run(items, lanes(args.cores_per_gpu)):
        raise SystemExit(f"failed: {', '.join(failed)}; {args.output} has what they printed, *.log")


if __name__ == "__main__":
    main()
