"""What happens between two epochs, in each process: where the loop waits, and for whom.

    python benchmarks/edge.py --data PHOTOS --output benchmarks/results/edge-h100.json
    python benchmarks/edge.py --draw benchmarks/results/edge-h100.json docs/edge.svg

ResNet-18 trains on whole epochs of --files photos. "ahead" is a folder, whose next epoch the
workers begin ahead of time. "as ever" is the same folder in a class of its own, where they do not.
Each with persistent workers and with others. The edge in the file is the median one of its column.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import loaders
import torch
import train
from torch.utils.data import DataLoader

COLUMNS = [(kind, persistent) for persistent in (True, False) for kind in ("ahead", "as ever")]
BEFORE = 0.06  # seconds of the last steps that are kept
AFTER = 0.7
COLORS = {
    "begin the epoch": "#c26d3f",
    "wait for a batch": "#d9a441",
    "fetch": "#8aa39b",
    "decode and launch": "#2a6f4e",
    "read": "#9db4c0",
    "pack": "#4f6d7a",
}
Event = tuple[str, int, float, float]  # what, the number of the process, begin and end


class Log:
    """Notes events in a file for each process; workers are forked and go on with it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def note(self, what: str, begin: float, end: float) -> None:
        with Path(self._folder, str(os.getpid())).open("a") as file:
            file.write(json.dumps([what, os.getpid(), begin, end]) + "\n")

    def around(self, owner: Any, name: str, what: str) -> None:
        """Note each call of a method from here on."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def noted(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                self.note(what, begin, time.perf_counter())

        setattr(owner, name, noted)

    def events(self) -> list[Event]:
        lines = [
            line for path in Path(self._folder).iterdir() for line in path.read_text().splitlines()
        ]
        return sorted((tuple(json.loads(line)) for line in lines), key=lambda event: event[2])


def instrument(log: Log) -> None:
    """Note what the workers and the prefetch thread do."""
    from gpuprefetch import DataPrefetcher
    from gpuprefetch.core.epoch import Lookahead
    from gpuprefetch.images import collate

    log.around(DataPrefetcher, "__iter__", "begin the epoch")
    log.around(Lookahead, "_fetch", "fetch")
    log.around(Lookahead, "_prepare", "decode and launch")
    told = [0.0]
    call = collate.HostStage.__call__

    def begin_reading() -> None:  # of a batch, right before it is read
        told[0] = time.perf_counter()

    def packed(stage: Any, given: Any) -> Any:
        begin = time.perf_counter()
        log.note("read", told[0], begin)
        try:
            return call(stage, given)
        finally:
            log.note("pack", begin, time.perf_counter())

    announce = collate.announce

    def announced(*args: Any) -> Any:
        begin_reading()
        return announce(*args)

    collate.announce = functools.wraps(announce)(announced)
    collate.HostStage.__call__ = packed


def measure(
    kind: str, persistent: bool, settings: dict[str, Any], mode: str, epochs: int
) -> dict[str, Any]:
    """One column, in this process."""
    from torchvision.transforms import v2

    from gpuprefetch import DataPrefetcher, EncodedImageFolder, RandomResizedCrop

    class Own(EncodedImageFolder):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)

    shared = loaders.Settings(**settings)
    log = Log(tempfile.mkdtemp())
    instrument(log)
    dataset = (Own if kind == "as ever" else EncodedImageFolder)(shared.data)
    loader = DataPrefetcher(
        DataLoader(
            dataset,
            shared.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=shared.workers,
            persistent_workers=persistent and shared.workers > 0,
            pin_memory=shared.device == "cuda",
        ),
        device=shared.device,
        transforms=[
            RandomResizedCrop(shared.size),
            v2.RandomHorizontalFlip(),
            v2.Normalize(loaders.MEAN, loaders.STD),
        ],
        memory_format=torch.channels_last,
    )
    times = []
    with train.stream_of("own", shared.device):
        step = train.make_step(
            "none" if shared.device == "cpu" else "resnet18", mode, shared.device
        )
        for _ in range(epochs):
            times.append(_epoch(loader, step, log))
        if shared.device == "cuda":
            torch.cuda.synchronize()
    return _edges(times, log.events(), shared.batch_size)


def _epoch(loader: Any, step: Callable[..., Any], log: Log) -> list[float]:
    """Train an epoch; when the loop got each batch."""
    times = []
    iterator = iter(loader)
    while True:
        begin = time.perf_counter()
        batch = next(iterator, None)
        log.note("wait for a batch", begin, time.perf_counter())
        if batch is None:
            return times
        times.append(time.perf_counter())
        step(*batch)


def _edges(times: list[list[float]], events: list[Event], batch_size: int) -> dict[str, Any]:
    """Milliseconds of each edge, the first left out, and the events of the median one."""
    edges = []
    rates = []
    for before, epoch in itertools.pairwise(times[1:]):
        second = epoch[len(epoch) // 2 :]
        each = (second[-1] - second[0]) / max(len(second) - 1, 1)
        edges.append(epoch[-1] - before[-1] - len(epoch) * each)
        rates.append(len(epoch) * batch_size / (epoch[-1] - before[-1]))
    median = sorted(range(len(edges)), key=lambda i: edges[i])[len(edges) // 2]
    begins = [event[2] for event in events if event[0] == "begin the epoch"]
    zero = begins[median + 2]
    main = next(event[1] for event in events if event[0] == "begin the epoch")
    numbers: dict[int, int] = {main: 0}
    kept = []
    for what, process, begin, end in events:
        if end < zero - BEFORE or begin > zero + AFTER:
            continue
        number = numbers.setdefault(process, len(numbers))
        kept.append([what, number, round(1e3 * (begin - zero), 2), round(1e3 * (end - zero), 2)])
    return {
        "images_per_second": statistics.median(rates),
        "edge_ms": statistics.median(edges) * 1e3,
        "edges_ms": [round(1e3 * edge, 1) for edge in edges],
        "events": kept,
    }


def draw(source: Path, target: Path) -> None:
    """The edges of a file as a picture: what each process does, in time."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "gpuprefetch", "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    results = json.loads(source.read_text())["results"]
    figure, axes = plt.subplots(
        len(results), 1, figsize=(8, 2.1 * len(results)), layout="constrained"
    )
    for axis, result in zip(axes, results, strict=True):
        workers = sorted({e[1] for e in result["events"] if e[0] in ("read", "pack")})
        lanes = {number: 2 + place for place, number in enumerate(workers)}
        bars: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for what, number, begin, end in result["events"]:
            lane = lanes.get(number, 1 if what in ("fetch", "decode and launch") else 0)
            bars.setdefault((what, lane), []).append((begin, max(end - begin, 0.3)))
        for (what, lane), each in bars.items():
            axis.broken_barh(each, (lane - 0.4, 0.8), color=COLORS[what])
        kind = "persistent workers" if result["persistent"] else "other workers"
        edge = f"{result['edge_ms']:.0f} ms an edge"
        axis.set_title(f"{result['kind']}, {kind}: {edge}", loc="left", fontsize=9)
        axis.set_yticks([0, 1, 2 + len(workers) / 2], ["loop", "prefetch thread", "workers"])
        axis.set_ylim(2 + len(workers), -1)
        axis.axvline(0, color="black", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlim(-1e3 * BEFORE, 1e3 * AFTER if not result["persistent"] else 200)
    axes[-1].set_xlabel("milliseconds after the loop has begun the epoch")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, COLORS, loc="outside upper center", ncols=6, frameon=False, fontsize=8)
    figure.savefig(target, metadata={"Date": None, "Creator": None})


def main(words: list[str] | None = None) -> None:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--mode", choices=["eager", "compile"], default="eager")
    parser.add_argument("--epochs", type=int, default=7, help="the first two are left out")
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("JSON", "SVG"))
    words = sys.argv[1:] if words is None else words
    if "--draw" in words:
        draw(*parser.parse_args(words).draw)
        return
    tiny = {"epochs": 4, "files": 8, "batch_size": 2}
    args: argparse.Namespace = harness.parse_arguments(parser, words, **tiny)
    device = harness.Device()
    document = harness.Document("edge", args, device, anew=True)
    settings = harness.settings(args)
    for kind, persistent in COLUMNS:
        task = {"kind": kind, "persistent": persistent, "settings": settings}
        task |= {"mode": args.mode, "epochs": args.epochs}
        found = harness.run_child(__file__, task, device=device, timeout=args.timeout)
        same = {"kind": kind, "persistent": persistent, "mode": args.mode}
        document.add(same | {"batch_size": args.batch_size, "files": args.files} | found)


if __name__ == "__main__":
    harness.child_main(measure)
    main()
