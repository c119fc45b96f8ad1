"""Damaged pictures: none may crash or hang the process, and none may touch its neighbors.

    python tests/checks/fuzz.py --cases 100000 --output benchmarks/results/fuzz-cpu.json
    python tests/checks/fuzz.py --cases 20000 --device cuda --jobs 6 \\
        --output benchmarks/results/fuzz-gpu.json

Every batch holds damaged files and a good one, and a batch of good ones follows it. The files are
drawn, or mutated photos with ``--data PHOTOS``. What survives the damage is compared: on the CPU
with PIL's pixels, on the GPU with the CPU path's. The good ones are compared with torchvision's ops
on PIL's pixels. Half of the cases are resized, a quarter is cropped, and a quarter gets a policy
while workers decode half of the files. All of it runs in child processes, so that a crash is seen.
Each pipeline runs once more with a mistake in it, which has to be noticed.
"""

import argparse
import json
import math
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench
import numpy as np
import torch
from bench import harness, photos, pictures
from PIL import Image
from torch.utils.data import DataLoader

GROUP = 31  # damaged files in a batch, beside a good one
GOOD = 8  # files in the batch behind it
HUGE = 4_000_000  # pixels
SIZE = 64  # of the resized pictures
# GPU against CPU: at most SHARE of the values are off by more than LEVELS.
LEVELS = 3
SHARE = 0.01
HANGS_SECONDS = 120.0  # without a finished group
START_SECONDS = 60.0  # more of them before the first one
DUMP_SECONDS = 10.0  # for a child that hangs to write where its threads are
DUMP_LINES = 200  # of them
MAX_CRASHES = 8  # of one job, which then ends
MAX_DIFFERING = 20  # cases that are named
# Levels, of the mean over a good picture. A decoder that repeats subsampled colors where libjpeg
# interpolates is off by up to 5.2, and a crop by one pixel by 7 to 14.
OFF = 6.0

Rng = np.random.Generator


@dataclass(frozen=True)
class Pipeline:
    """What a part of the cases goes through."""

    part: float  # of the cases
    cpu_share: float
    mistakes: tuple[str, ...] = ()  # of :mod:`faults`

    def transforms(self, name: str) -> list[Any]:
        """Torch is imported in the children only."""
        from torchvision.transforms import v2

        from gpuprefetch import CenterCrop, Resize

        if name == "crop":
            return [CenterCrop(SIZE)]
        return [Resize((SIZE, SIZE)), *([v2.RandomInvert(1.0)] if name == "policy" else [])]


PIPELINES = {
    "resize": Pipeline(0.5, 0.0),
    "crop": Pipeline(0.25, 0.0, ("CenterCrop off by one pixel",)),
    "policy": Pipeline(0.25, 0.5, ("a policy left out",)),
}


def expected(name: str, file: bytes) -> torch.Tensor:
    """What a pipeline makes of a good file, by torchvision's ops on PIL's pixels, in levels."""
    from torchvision.transforms.v2 import functional as F

    whole = _decode_pil(file).float()
    if name == "crop":
        return F.center_crop(whole, [SIZE, SIZE])
    resized = F.resize(whole, [SIZE, SIZE], antialias=True)
    return 255 - resized if name == "policy" else resized


def draw_files(count: int = 48, seed: int = 0) -> list[bytes]:
    """Encoded pictures of all formats and kinds of JPEG; the first GOOD are plain JPEGs."""
    rng = np.random.default_rng(seed)
    files = []
    for number in range(count):
        height, width = rng.integers(24, 160, 2)
        coarse = rng.integers(0, 256, (height // 12 + 2, width // 12 + 2, 3), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        kind = number % 12 if number >= GOOD else 0
        options: dict[str, Any] = {"quality": int(rng.integers(60, 96)), "subsampling": number % 3}
        if kind == 7:
            picture = picture.convert("L")
        elif kind == 8:
            picture = picture.convert("CMYK")
        elif kind == 9:
            options["progressive"] = True
        elif kind == 10:
            options["restart_marker_blocks"] = 3
        image_format = ("PNG", "WEBP", "GIF")[number // 12 % 3] if kind == 11 else "JPEG"
        options = options if image_format == "JPEG" else {}
        files.append(pictures.encode(picture, image_format, **options))
    return files


def read_files(folder: Path, count: int = 200) -> list[bytes]:
    """The first JPEGs of a folder."""
    found = [path.read_bytes() for path in photos.found(folder)[:count]]
    if len(found) < GOOD:
        raise ValueError(f"{folder} holds {len(found)} JPEGs, at least {GOOD} are needed")
    return found


KINDS = "flip, header, scan, truncate, cut, insert, splice, zero, marker, resize".split(", ")


def mutate(kind: str, data: bytearray, rng: Rng, other: bytes) -> None:
    """Damage a file; ``other`` is one that bytes may come from."""
    scan = max(data.find(b"\xff\xda"), 0) or min(len(data), 64)
    match kind:
        case "flip" | "header" | "scan":
            first, last = {"header": (2, scan), "scan": (scan, len(data))}.get(kind, (0, len(data)))
            for at in rng.integers(first, max(last, first + 1), rng.integers(1, 9)):
                data[min(at, len(data) - 1)] ^= 1 << rng.integers(8)
        case "truncate":
            del data[rng.integers(len(data)) :]
        case "cut":
            at = rng.integers(len(data))
            del data[at : at + rng.integers(1, 200)]
        case "insert":
            at = rng.integers(len(data))
            start = rng.integers(len(other))
            data[at:at] = other[start : start + rng.integers(1, 400)]
        case "splice":
            start = rng.integers(len(other))
            data[rng.integers(len(data)) :] = other[start:]
        case "zero":
            at = rng.integers(len(data))
            length = rng.integers(1, 100)
            data[at : at + length] = bytes(len(data[at : at + length]))
        case "marker":  # another code, or another length
            places = [i for i in range(len(data) - 3) if data[i] == 0xFF and data[i + 1] >= 0xC0]
            at = rng.choice(places) if places else None
            if places and rng.random() < 0.5:
                data[at + 1] = rng.integers(0xC0, 0x100)
            elif places:
                length = rng.integers(0, 1 << rng.integers(1, 17))
                data[at + 2 : at + 4] = struct.pack(">H", length)
        case "resize":  # another height or width in the frame header, rarely a huge one
            at = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"), 0) + 5
            if at + 4 <= len(data):
                sides = list(struct.unpack_from(">HH", data, at))
                limit = 1 << 16 if rng.random() < 0.01 else 2 * max(sides) + 2
                sides[rng.integers(2)] = int(rng.integers(min(limit, 1 << 16)))
                struct.pack_into(">HH", data, at, *sides)


def _tame(data: bytearray, rng: Rng) -> None:
    """Make most pictures small that a mutation made huge: each takes seconds to decode."""
    for at in (data.find(b"\xff\xc0") + 5, data.find(b"\xff\xc2") + 5):
        if 5 <= at <= len(data) - 4:
            height, width = struct.unpack_from(">HH", data, at)
            if height * width > HUGE and rng.random() < 0.95:
                struct.pack_into(">HH", data, at, height % 512, width % 512)


def damaged(files: list[bytes], seed: int, case: int) -> bytes:
    """The file of a case: a function of its arguments alone."""
    rng = np.random.default_rng([seed, case])
    data, other = (bytearray(files[i]) for i in rng.integers(len(files), size=2))
    for kind in rng.choice(len(KINDS), rng.integers(1, 3)):
        mutate(KINDS[kind], data, rng, bytes(other))
        data = data or bytearray(1)
    _tame(data, rng)
    if rng.random() < 0.5 and data[:2] == b"\xff\xd8":
        data += b"\xff\xd9"  # whole as far as a header tells: such a file goes to the GPU
    return bytes(data)


class Cases:
    """A dataset: sample ``case`` is damaged, ``-1 - i`` is the good file ``i``."""

    def __init__(self, files: list[bytes], seed: int, trap: dict[str, str]) -> None:
        self.files = files
        self.seed = seed
        self.trap = trap

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, case: int) -> Any:
        from gpuprefetch import EncodedImage

        if case < 0:
            return EncodedImage(self.files[-1 - case], 1 << 40, f"good {-1 - case}"), case
        if trap := self.trap.get(str(case)):  # the tests' own crash or hang
            signal.raise_signal(signal.SIGSEGV) if trap == "crash" else time.sleep(1000)
        return EncodedImage(damaged(self.files, self.seed, case), case, f"case {case}"), case


def batches(first: int, last: int) -> Iterator[list[int]]:
    """Batches of cases with a good file among them, each followed by one of good files."""
    good = [-1 - i for i in range(GOOD)]
    yield good  # the reference
    for start in range(first, last, GROUP):
        cases = list(range(start, min(start + GROUP, last)))
        place = start % (len(cases) + 1)
        yield [*cases[:place], good[start % GOOD], *cases[place:]]
        yield good


class Attack:
    """The batches of some cases on one device, and what came of them."""

    def __init__(self, task: dict[str, Any], device: str) -> None:
        import faults

        from gpuprefetch import DataPrefetcher

        name = task["pipeline"]
        pipeline = PIPELINES[name]
        folder = task["data"]
        self.files = read_files(Path(folder)) if folder else draw_files()
        dataset = Cases(self.files, task["seed"], task["trap"])
        planned = list(batches(task["first"], task["last"]))
        loader = DataLoader(dataset, batch_sampler=planned, pin_memory=device == "cuda")
        self.prefetcher = DataPrefetcher(
            loader,
            device=device,
            decoder=task["decoder"] if device == "cuda" else "cpu",
            transforms=faults.planted(pipeline.transforms(name), task["mistake"]),
            cpu_share=pipeline.cpu_share,
            on_error="skip",
        )

    def __iter__(self) -> Iterator[dict[int, Any]]:
        """For each batch: case -> picture."""
        for images, cases in self.prefetcher:
            yield dict(zip(cases.tolist(), images, strict=True))


def attack(**task: Any) -> dict[str, Any]:
    """Run the cases of a task in this process; a line of progress for each group."""
    from gpuprefetch.images.header import decode_cpu

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts: Counter[str] = Counter(good_batches=0, good_wrong=0)
    differing: list[int] = []
    wrong: list[int] = []  # the last case of each batch with a wrong good file
    runs = [Attack(task, task["device"])]
    if task["device"] == "cuda":
        runs.append(Attack(task, "cpu"))
    files = runs[0].files
    seed = task["seed"]
    planned = batches(task["first"], task["last"])
    reference: dict[int, Any] = {}
    name = task["pipeline"]
    # Whoever decodes a file, a worker or the device, rounds otherwise.
    rounds = (LEVELS, SHARE) if PIPELINES[name].cpu_share else (0, 0.0)
    print("AT", task["first"], flush=True)
    for cases, found, *others in zip(planned, *runs, strict=True):
        good = [case for case in cases if case < 0]
        if not reference:
            reference = found
            right = all(_is_expected(name, files[-1 - case], found.get(case)) for case in good)
        else:
            right = all(
                _compare(found.get(case), reference[case], *rounds) == "same" for case in good
            )
        right = right and list(found) == [case for case in cases if case in found]  # in order
        counts["good_batches"] += 1
        counts["good_wrong"] += not right
        if not right:
            wrong.append(max(cases))
        for case in (case for case in cases if case >= 0):
            if task["device"] == "cuda":
                outcome = _compare(found.get(case), others[0].get(case), LEVELS, SHARE)
            else:
                ours = None if case not in found else decode_cpu(damaged(files, seed, case))
                outcome = _compare(ours, _decode_pil(damaged(files, seed, case)), 0, 0.0)
            counts[outcome] += 1
            if outcome == "differs":
                differing.append(case)
        if len(cases) != GOOD or good != cases:
            print("AT", max(cases) + 1, flush=True)
        elif counts["good_batches"] > 1 and time.time() > task["until"]:
            break
    named = {"differing": differing[:MAX_DIFFERING], "wrong": wrong[:MAX_DIFFERING]}
    return {"counts": counts, **named}


def _is_expected(name: str, file: bytes, found: Any) -> bool:
    if found is None:
        return False
    off = (found.cpu().float() * 255 - expected(name, file)).abs().mean()
    return float(off) <= OFF


def _compare(ours: Any, theirs: Any, levels: int, share: float) -> str:
    if ours is None or theirs is None:
        both = ours is theirs
        return "both_refuse" if both else "only_ours_refuses" if ours is None else "only_ours_reads"
    if ours.shape != theirs.shape:
        return "differs"
    ours = ours.cpu()
    theirs = theirs.cpu()
    if levels == 0 or torch.equal(ours, theirs):
        return "same" if torch.equal(ours, theirs) else "differs"
    scale = 255 if ours.is_floating_point() else 1
    off = (ours.float() - theirs.float()).abs() * scale > levels
    return "differs" if off.float().mean() > share else "same"


def _decode_pil(data: bytes) -> Any:
    try:
        return torch.from_numpy(pictures.read_with_pil(data).copy()).permute(2, 0, 1)
    except Exception:  # PIL raises nearly everything
        return None


def run_range(task: dict[str, Any]) -> dict[str, Any]:
    """Run the cases in children; behind a crash or a hang the next child goes on."""
    counts: Counter[str] = Counter()
    listed: dict[str, list[Any]] = {"differing": [], "wrong": []}
    crashes: list[dict[str, Any]] = []
    first = task["first"]
    last = task["last"]
    while first < last and len(crashes) < MAX_CRASHES:
        lines, ending, errors = _run_child({**task, "first": first})
        if ending == "0":
            result = json.loads(lines[-1].removeprefix(harness.RESULT))
            counts.update(result["counts"])
            for name, entries in listed.items():
                entries += result[name]
            break
        reached = [int(line.split()[1]) for line in lines if line.startswith("AT ")]
        start = max(reached, default=first)
        crashes.append({"cases": [start, min(start + GROUP, last)], "ending": ending})
        print(f"cases {start} to {start + GROUP}: {ending}\n{errors}", file=sys.stderr)
        first = start + GROUP
    return {"counts": counts, "crashes": crashes, **listed}


def start(task: dict[str, Any], out: Any, err: Any) -> subprocess.Popen[bytes]:
    """A child that writes to these files."""
    command = harness.child_command(__file__, task, "-X", "faulthandler")
    # A dozen processes on one GPU, with the 32 channels that the library asks for, left nvJPEG
    # without resources; for all that is known, it was the channels.
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "4"} | os.environ
    return subprocess.Popen(command, stdout=out, stderr=err, env=environment)


def _run_child(task: dict[str, Any]) -> tuple[list[str], str, str]:
    """A child's lines, how it ended, its last errors."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        return watch(start(task, out, err), out, err, task["patience"])


def watch(
    child: subprocess.Popen[bytes], out: Any, err: Any, patience: float
) -> tuple[list[str], str, str]:
    """Wait for a child that writes lines to ``out``, each within ``patience`` seconds.

    Returns:
        Its lines, how it ended ("0", "signal 11", "exit 1", "hangs"), its last errors. Those
        of a child that hangs end in where its threads are, if it has ``faulthandler`` on.
    """
    size = 0
    moved = time.monotonic()
    while child.poll() is None:
        time.sleep(0.05)
        if (now := Path(f"/proc/self/fd/{out.fileno()}").stat().st_size) != size:
            size = now
            moved = time.monotonic()
        elif time.monotonic() - moved > patience + (0 if size else START_SECONDS):
            child.send_signal(signal.SIGABRT)
            _wait(child, DUMP_SECONDS)
            child.kill()
            child.wait()
            return _lines(out), "hangs", "\n".join(_lines(err)[-DUMP_LINES:])
    code = child.returncode
    ending = f"signal {-code}" if code < 0 else f"exit {code}" if code else "0"
    return _lines(out), ending, "\n".join(_lines(err)[-12:])


def _wait(child: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for a child's end, so long at most."""
    until = time.monotonic() + seconds
    while child.poll() is None and time.monotonic() < until:
        time.sleep(0.05)


def _lines(file: Any) -> list[str]:
    file.seek(0)
    return file.read().splitlines()


def fuzz(args: argparse.Namespace, pipeline: str = "resize", mistake: str = "") -> dict[str, Any]:
    """All cases through a pipeline, ``jobs`` children at a time: what came of them."""
    per_job = -(-args.cases // args.jobs)
    until = time.time() + args.seconds if args.seconds else math.inf
    shared = {name: getattr(args, name) for name in ("seed", "device", "decoder", "patience")}
    shared |= {"data": str(args.data or ""), "until": until, "trap": args.trap}
    shared |= {"pipeline": pipeline, "mistake": mistake}
    tasks = [
        shared | {"first": first, "last": min(first + per_job, args.cases)}
        for first in range(0, args.cases, per_job)
    ]
    started = time.monotonic()
    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(run_range, tasks))
    counts: Counter[str] = sum((result["counts"] for result in results), Counter())
    crashes = [crash for result in results for crash in result["crashes"]]
    judged = sum(count for name, count in counts.items() if not name.startswith("good"))
    return {
        "pipeline": pipeline,
        "device": args.device,
        "ok": not crashes and not counts["good_wrong"],
        "cases": judged + sum(last - first for first, last in (c["cases"] for c in crashes)),
        "counts": {"good_wrong": 0, **counts},
        "crashes": crashes,
        "differing": [case for result in results for case in result["differing"]][:MAX_DIFFERING],
        "wrong": [batch for result in results for batch in result["wrong"]][:MAX_DIFFERING],
        "seconds": round(time.monotonic() - started, 1),
    }


def checks(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The part of the cases of each pipeline, and whether its mistakes are noticed."""
    for number, (name, pipeline) in enumerate(PIPELINES.items()):
        part = {"cases": math.ceil(args.cases * pipeline.part), "seed": args.seed + number}
        if args.seconds:
            part["seconds"] = args.seconds * pipeline.part
        result = {"check": f"fuzz, {name}"}
        result |= fuzz(argparse.Namespace(**vars(args) | part), name)
        few = argparse.Namespace(**vars(args) | part | {"cases": GROUP, "jobs": 1})
        result["mistakes"] = {
            mistake: "missed" if fuzz(few, name, mistake)["ok"] else "noticed"
            for mistake in pipeline.mistakes
        }
        yield result


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = harness.output_parser(__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--decoder", default="auto", help="on the GPU")
    parser.add_argument("--jobs", type=int, default=1, help="children at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="folder of JPEGs; drawn pictures without")
    parser.add_argument("--patience", type=float, default=HANGS_SECONDS, help="for a group")
    parser.add_argument("--seconds", type=float, help="fewer cases rather than longer")
    parser.add_argument("--trap", type=json.loads, default={}, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> None:
    args = parse()
    document = harness.Document("fuzz", args, harness.Device(), anew=True)
    results = []
    for result in checks(args):
        print(json.dumps(result, indent=1))
        document.add(result)
        results.append(result)
    sys.exit(bench.verdict(results))


if __name__ == "__main__":
    harness.child_main(attack)
    main()
