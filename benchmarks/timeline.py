"""Draw what happens during one training step: workers, prefetch threads, and the GPU's streams.

    python benchmarks/timeline.py --data PHOTOS --output benchmarks/results/timeline.json
    python benchmarks/timeline.py --draw benchmarks/results/timeline.json  # no GPU needed

docs/timeline.svg is drawn from the JSON: the bars of each lane, in milliseconds from the start of
the step, colored by batch. They come from a trace of PyTorch's profiler, in which the library names
its stages, and from the workers' own clocks. The profiler slows the launching thread down.
"""

import argparse
import collections
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import loaders
import torch
import train
from torch.utils.data import default_collate, get_worker_info

FIGURE = Path(__file__).parents[1] / "docs" / "timeline.svg"
WARM_STEPS = 10
SPAN = 0.6  # steps that are drawn before and after the step
CLOSE_MS = 0.05  # bars of one batch and stage this close are one
PREFIX, STEP = "gpuprefetch.", "train step"
LOOP, FETCH, TRAINING, BATCH = "training loop", "fetch thread", "GPU: training", "GPU: batch stream"
COLORS = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c755f", "#edc948"]
FAINT = ("fetch", "wait", "read")  # nothing is computed

Lanes = dict[str, list[tuple[float, float, int, str]]]  # start and length in ms, batch, stage


class TimedCollate:
    """The default collate, which notes when a worker read and packed each batch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, samples: list[Any]) -> Any:
        read, worker = time.perf_counter(), get_worker_info()
        began = min(image._made for image, _ in samples)
        batch = default_collate(samples)
        line = [worker.id if worker else 0, began, read, time.perf_counter()]
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return batch


def record(model: str, settings: loaders.Settings, steps: int) -> dict[str, Any]:
    """Train from the start of an epoch under the profiler; returns the bars of a late step."""
    from gpuprefetch import DataPrefetcher, EncodedImageFolder
    from gpuprefetch.images.stage import Pipeline

    step = train.make_step(model, "eager", settings.device)
    batches = iter(loaders.gpuprefetch(settings))
    for _ in range(WARM_STEPS):
        step(*next(batches))
    del batches

    parts, start = [], Pipeline.start  # decode calls of each batch

    def counted(*args: Any) -> Any:
        work = start(*args)
        parts.append(len(work.parts))
        return work

    Pipeline.start = counted  # type: ignore[method-assign, assignment]
    cuda = settings.device == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if cuda else []
    config = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with tempfile.TemporaryDirectory() as folder:
        clocks, trace = Path(folder) / "workers", Path(folder) / "trace.json"
        prefetcher = DataPrefetcher(
            loaders.data_loader(
                EncodedImageFolder(settings.data), settings, collate_fn=TimedCollate(clocks)
            ),
            device=settings.device,
            transforms=loaders.gpuprefetch_transforms(settings),
            dtype=torch.bfloat16,
            memory_format=torch.channels_last,
        )
        with torch.profiler.profile(
            activities=activities, experimental_config=config, acc_events=True
        ) as profiler:
            with torch.profiler.record_function("clock"):
                clock = time.perf_counter()
            batches = iter(prefetcher)
            for _ in range(steps):
                images, target = next(batches)
                with torch.profiler.record_function(STEP):
                    step(images, target)
            if cuda:
                torch.cuda.synchronize()
        profiler.export_chrome_trace(str(trace))
        del batches
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("ph") == "X"]
        workers = [json.loads(line) for line in clocks.read_text().splitlines()]
    Pipeline.start = start  # type: ignore[method-assign]
    zero = next(event["ts"] for event in events if event["name"] == "clock") / 1000
    lanes = worker_lanes(workers, zero - 1000 * clock) | trace_lanes(events, parts)
    return one_step(lanes, steps - 4) | {"stats": prefetcher.stats.as_dict()}


def worker_lanes(lines: list[list[Any]], offset: float) -> Lanes:
    """A lane for each worker; the loader asks them for a batch in turn."""
    lanes: Lanes = collections.defaultdict(list)
    count = len({line[0] for line in lines})
    for worker, began, read, packed in sorted(lines, key=lambda line: line[3]):
        lane = lanes[f"worker {worker + 1}"]
        batch = worker + count * (len(lane) // 2)
        lane.append((1000 * began + offset, 1000 * (read - began), batch, "read"))
        lane.append((1000 * read + offset, 1000 * (packed - read), batch, "collate"))
    return dict(sorted(lanes.items(), key=lambda lane: int(lane[0].split()[1])))


def trace_lanes(events: list[dict[str, Any]], parts: list[int]) -> Lanes:
    """The host's stages by thread, and what the GPU did, by the stage that it was launched in.

    Args:
        events: complete events of a Chrome trace that begins with an epoch.
        parts: decode calls of each batch.
    """
    events = sorted(events, key=lambda event: event["ts"])
    numbers = {"decode": [batch for batch, count in enumerate(parts) for _ in range(count)]}
    seen: dict[str, int] = collections.Counter()
    stages: dict[Any, list[tuple[float, float, int, str]]] = collections.defaultdict(list)
    for event in events:
        name = event["name"].removeprefix(PREFIX)
        on_host = event.get("cat") in ("cpu_op", "user_annotation")
        if not on_host or name == event["name"] != STEP:
            continue
        batch = numbers[name][seen[name]] if name in numbers else seen[name]
        stages[event["tid"]].append((event["ts"], event["ts"] + event["dur"], batch, name))
        seen[name] += 1

    names: dict[Any, str] = {}
    for tid, own in stages.items():
        held = {name for *_, name in own}
        decoders = sum(name.startswith("decode") for name in names.values())
        names[tid] = f"decode thread {decoders + 1}"
        if held & {STEP, "fetch"}:
            names[tid] = LOOP if STEP in held else FETCH
    lanes: Lanes = {names[tid]: [milliseconds(*bar) for bar in own] for tid, own in stages.items()}

    train_steps = [bar for own in stages.values() for bar in own if bar[3] == STEP]
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "args" in event
    }
    for event in events:
        launch = launches.get(event.get("args", {}).get("correlation"))
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset") or launch is None:
            continue
        tid, at = launch["tid"], launch["ts"]
        own = [bar for bar in stages[tid] if bar[0] <= at <= bar[1] and bar[3] != STEP]
        # Backward launches from a thread of its own, while the step's thread waits for it.
        own = own or [bar for bar in train_steps if bar[0] <= at <= bar[1]]
        if own:
            _, _, batch, stage = own[-1]
            lane = {STEP: TRAINING, "decode": f"GPU: {names.get(tid)}"}.get(stage, BATCH)
            begin, end = event["ts"], event["ts"] + event["dur"]
            lanes.setdefault(lane, []).append(milliseconds(begin, end, batch, stage))
    return lanes


def milliseconds(begin: float, end: float, batch: int, stage: str) -> Any:
    return begin / 1000, (end - begin) / 1000, batch, stage


def one_step(lanes: Lanes, number: int) -> dict[str, Any]:
    """The bars around a step, from its start on the GPU, or on the CPU without one."""
    own = lanes.get(TRAINING) or [bar for bar in lanes[LOOP] if bar[3] == STEP]
    begin, end = (min(bar[0] for bar in own if bar[2] == batch) for batch in (number, number + 1))
    length = end - begin
    low, high = begin - SPAN * length, end + SPAN * length
    drawn, busy = {}, {}
    for name, bars in lanes.items():
        joined = join(bars)
        inside = [(max(b[0], low), min(b[0] + b[1], high), *b[2:]) for b in joined]
        drawn[name] = [
            [round(start - begin, 3), round(stop - start, 3), batch, stage]
            for start, stop, batch, stage in inside
            if stop > start
        ]
        spans = [(b[0], b[0] + b[1]) for b in joined if b[3] not in FAINT]
        busy[name] = sum(max(min(b, end) - max(a, begin), 0) for a, b in spans) / length
    waits = [min(b[0] + b[1], end) - max(b[0], begin) for b in lanes[LOOP] if b[3] == "wait"]
    return {
        "step_ms": round(length, 3),
        "wait_ms": round(sum(max(wait, 0) for wait in waits), 3),
        "batch": number,
        "busy_share": {name: round(share, 4) for name, share in busy.items()},
        "lanes": drawn,
    }


def join(bars: Any) -> list[Any]:
    """Bars of a lane in order, those of one batch and stage that touch put together."""
    joined: list[Any] = []
    for start, length, batch, stage in sorted(bars):
        last = joined[-1] if joined else None
        if last and last[2:] == [batch, stage] and start < last[0] + last[1] + CLOSE_MS:
            last[1] = max(last[1], start + length - last[0])
        else:
            joined.append([start, length, batch, stage])
    return joined


def draw(document: dict[str, Any], path: Path) -> None:
    """One row for each lane; lighter where it only waits or reads."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "gpuprefetch", "svg.fonttype": "none", "font.size": 8})
    from matplotlib import pyplot as plt

    result, metadata = document["result"], document["metadata"]
    lanes = {name: bars for name, bars in result["lanes"].items() if bars}
    kinds = ("worker", FETCH, "decode", LOOP, "GPU: decode", BATCH, TRAINING)
    order = [name for kind in kinds for name in lanes if name.startswith(kind)]
    figure, axis = plt.subplots(figsize=(8, 0.22 * len(order) + 0.9))
    for row, name in enumerate(order):
        for start, length, batch, stage in lanes[name]:
            axis.broken_barh(
                [(start, length)],
                (row - 0.4, 0.8),
                color=COLORS[batch % len(COLORS)],
                alpha=0.3 if stage in FAINT else 1.0,
                linewidth=0,
            )
    for edge in (0, result["step_ms"]):
        axis.axvline(edge, color="0.3", linewidth=0.8)
    axis.set_yticks(range(len(order)), order)
    axis.invert_yaxis()
    axis.set_xlabel(
        f"ms; one step of {document['parameters']['model']} between the lines; a color is a batch "
        f"({metadata['gpu'] or metadata['cpu']})"
    )
    axis.spines[["top", "right", "left"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    if "--draw" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--draw", type=Path)
        parser.add_argument("--figure", type=Path, default=FIGURE)
        args = parser.parse_args()
        draw(json.loads(args.draw.read_text()), args.figure)
        return
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--steps", type=int, default=40, help="the fourth from the end is drawn")
    parser.add_argument("--figure", type=Path, default=FIGURE)
    args = harness.parse_arguments(parser)
    settings = loaders.Settings(**harness.settings(args))
    document = harness.Document("timeline", args, harness.Device()).content
    del document["results"]
    document["parameters"].pop("figure")
    document["result"] = record(args.model, settings, args.steps)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in document.items()]
        args.output.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    draw(document, args.figure)
    print({name: value for name, value in document["result"].items() if name != "lanes"})


if __name__ == "__main__":
    main()
