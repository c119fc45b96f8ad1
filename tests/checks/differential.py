"""Random configurations of DataPrefetcher against the plain DataLoader, by content.

    python tests/checks/differential.py --cases 2000 --jobs 2 \\
        --output benchmarks/results/differential-cpu.json
    python tests/checks/differential.py --cases 300 --device cuda
    python tests/checks/differential.py --only 17        # one seed, with its script

A configuration (``configurations.py``) is a function of its seed. Its pictures tell which sample
they are of and where they were cut from it, so what a loop gets is judged without a look inside:
every sample in the plain loader's order with its own label, right pixels, random parameters that
differ where they should (samples, batches, epochs, repeats, seeds) and agree where they should
(other workers, another batch, ranks, a resume, a replay).

All of it runs in child processes, so that a crash or a hang is seen. A failure is made simpler as
far as it stays the same, and ends in a script of at most 20 lines.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import configurations
import fuzz
import numpy as np
import torch
from bench import harness, pictures
from configurations import FORMS, POLICIES, THIN, Config
from torch.utils.data import DataLoader

LEVELS, SHARE = 3, 0.01  # on a GPU at most SHARE of the values are off by more than LEVELS
ROUNDING = 2.0  # levels, of a resampling on the CPU against eager PyTorch's
ALIKE = 0.8  # share of pairs with the same draw that is no coincidence; of at least PAIRS
PAIRS = 4
CHUNK = 5  # samples of a batch where pictures are made alone
PATIENCE = 120.0  # seconds for one configuration
MAX_FAILURES = 20  # of one job, which then ends

# Rules that are not in force yet: what breaks them is not reported.
RULES = {
    "pairs": "all images of a sample share one draw",
    "policies": "what a policy draws depends on the sample, not on its batch",
    "ranks": "tensors and whole batches draw apart on every rank",
    "names": "the sampler's index names an image that has neither index nor path",
    "late": "seed=None is read when an epoch begins",
    "restarted": "a sampler's epoch numbers the epoch",
}
PENDING = frozenset(RULES)

Picture = torch.Tensor
Box = tuple[float, ...]


@dataclass(frozen=True)
class Finding:
    """What is wrong, and where."""

    kind: str
    words: str
    rank: int = 0
    epoch: int = 0  # place in the story
    row: int = 0  # place in the epoch
    number: int = -1  # of the sample
    other: tuple[int, int, int] = (0, 0, 0)  # rank, epoch and row of what it is compared with
    right: Any = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.words}"


class Wrong(Exception):
    """Ends the judgment of an epoch: nothing after it can be trusted."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


@dataclass
class Row:
    """A sample as the loop got it."""

    number: int  # of the sample
    rank: int
    epoch: int  # place in the story
    at: int  # place in the epoch
    batch: int
    place: int  # in the batch
    repeat: int  # of the sample in the epoch
    replaced: bool  # whether it stands for a bad one
    images: list[list[Picture]]  # for each image of the sample, its views
    boxes: list[Box | None] = dataclasses.field(default_factory=list)  # of its first image's views


@dataclass(frozen=True)
class Expected:
    """A batch of the plain loader, and which of its rows are left."""

    batch: Any
    numbers: list[int]
    rows: list[int]
    replaced: list[bool]


# ---------------------------------------------------------------------------- what comes


_modules = itertools.count()


@contextlib.contextmanager
def loaded(config: Config) -> Iterator[Any]:
    """The configuration's Python as a module, which new interpreters can import too."""
    name, text = f"differential_{os.getpid()}_{next(_modules)}", configurations.source(config)
    with tempfile.TemporaryDirectory() as folder:
        module = types.ModuleType(name)
        if config.context != "fork":
            module.__file__ = str(Path(folder, f"{name}.py"))
            Path(module.__file__).write_text(text)
            sys.path.insert(0, folder)
        sys.modules[name] = module
        try:
            exec(compile(text, name, "exec"), vars(module))
            yield module
        finally:
            del sys.modules[name]
            if config.context != "fork":
                sys.path.remove(folder)


class Runs:
    """Runs the story of a configuration."""

    def __init__(self, config: Config, module: Any) -> None:
        self.config, self.module = config, module
        self._times = 0

    def begin(self, rank: int, *, plain: bool, workers: int | None = None) -> Any:
        """The loader of a rank, built and seeded as the configuration says."""
        config, seed = self.config, self.config.draws_seed
        self._times += 1
        late = config.seeding == "late"
        torch.manual_seed(seed + 7 * self._times if late else seed)
        loader = self.module.make(plain, rank, config.workers if workers is None else workers)
        if late:
            torch.manual_seed(seed)
        return loader

    def story(self, loader: Any, rank: int, *, plain: bool) -> list[list[Any]]:
        return list(self.module.story(loader, plain, rank))

    def alone(self, rank: int, **how: Any) -> list[list[Any]]:
        whole = how.pop("whole", False)
        loader = self.begin(rank, **how)
        return self.story(loader, rank, plain=how["plain"] or whole)

    def ranks(self) -> tuple[list[list[list[Any]]], list[Any]]:
        """The epochs of each rank, and the prefetchers that they came from, where they are here."""
        config, ranks = self.config, range(self.config.world)
        if config.together == "processes":
            return _in_processes(config.world, functools.partial(self.alone, plain=False)), []
        if config.together == "threads":
            loaders = [self.begin(rank, plain=False) for rank in ranks]
            return _in_threads(functools.partial(self.story, plain=False), loaders), loaders
        found, loaders = [], []
        for rank in ranks:
            loaders.append(self.begin(rank, plain=False))
            found.append(self.story(loaders[-1], rank, plain=False))
        return found, loaders

    def each_alone(self, numbers: Iterable[int], epoch: int, seed: int) -> dict[int, Any]:
        """Every sample in another batch, in the order of the dataset, without workers."""
        config, names = self.config, vars(self.module)
        data = eval(configurations.base(config, "False"), names)
        if config.data == "stream":
            data = list(data)
        some = sorted(set(numbers))
        batches = [some[at : at + CHUNK] for at in range(0, len(some), CHUNK)]
        collate = {"collate_fn": names["collate"]} if "collate" in names else {}
        loader = self.module.ours(DataLoader(data, batch_sampler=batches, **collate), seed)
        loader.set_epoch(epoch)
        found = {}
        for batch, chosen in zip(loader, batches, strict=True):
            found |= dict(zip(chosen, _pictures(config, batch), strict=True))
        return found


def _in_threads(run: Callable[[Any, int], Any], loaders: list[Any]) -> list[Any]:
    """What ``run`` gives for each loader and its rank, all at once."""
    found: list[Any] = [RuntimeError("the thread has not ended")] * len(loaders)

    def serve(rank: int) -> None:
        try:
            found[rank] = run(loaders[rank], rank)
        except BaseException as error:
            found[rank] = error

    # Not those of a pool: a worker that is forked in one of them may fail as it ends, with the
    # plain DataLoader as well.
    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(len(loaders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


def _in_processes(count: int, run: Callable[[int], Any]) -> list[Any]:
    """What ``run`` gives on each of some ranks that find each other through gloo."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(count):
            if (child := os.fork()) == 0:
                _be_rank(rank, count, Path(folder), run)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        results = [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(count)]
    for result in results:
        if isinstance(result, str):
            raise RuntimeError(result)
    return results


def _be_rank(rank: int, count: int, folder: Path, run: Callable[[int], Any]) -> None:
    try:
        store = f"file://{folder}/store"
        torch.distributed.init_process_group("gloo", store, rank=rank, world_size=count)
        result = run(rank)
        torch.distributed.barrier()
    except BaseException:
        result = traceback.format_exc()
    # By value: torch's own way would send memory of this process, which ends here.
    Path(folder, str(rank)).write_bytes(pickle.dumps(result))
    os._exit(0)


# ---------------------------------------------------------------------------- what should come


def _is_image(leaf: Any) -> bool:
    """Whether the plain loader has sample numbers there."""
    return isinstance(leaf, float) or (
        isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64
    )


def _children(value: Any) -> list[Any] | None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        return [value[key] for key in sorted(value)]
    return list(value) if isinstance(value, (list, tuple)) else None


def _numbers(batch: Any) -> list[int]:
    """The samples of a plain batch."""
    if _is_image(batch):
        return [int(number) for number in np.atleast_1d(np.asarray(batch))]
    for child in _children(batch) or ():
        if (found := _numbers(child)) or _is_image(child):
            return found
    return []


def expected(config: Config, epochs: list[list[Any]]) -> list[tuple[list[Expected], str]]:
    """What is left of the plain loader's epochs, and the name of the error that each ends with."""
    known: set[Any] = set()  # bad files so far
    found = []
    for epoch in epochs:
        batches, error, left_out = list[Expected](), "", False
        for batch in epoch:
            if isinstance(batch, Exception):
                error = type(batch).__name__
                break
            numbers = _numbers(batch)
            bad = [at for at, number in enumerate(numbers) if number in config.bad]
            for _ in range(config.images if config.names == "none" else 1):
                known |= {object() if config.names == "none" else numbers[at] for at in bad}
            rows = [at for at in range(len(numbers)) if at not in bad]
            too_many = config.max_bad is not None and len(known) > config.max_bad
            nothing = config.on_error == "replace" and not rows
            if bad and (config.on_error == "raise" or too_many or nothing):
                error = "BadImageError"
                break
            replaced = [False] * len(rows)
            if bad and config.on_error == "replace":
                replaced = [at in bad for at in range(len(numbers))]
                rows = [
                    next((g for g in rows if g > at), rows[0]) if at in bad else at
                    for at in range(len(numbers))
                ]
            left_out |= not rows
            if rows:
                batches.append(Expected(batch, [numbers[at] for at in rows], rows, replaced))
        if left_out and not batches and not error:
            error = "BadImageError"
        found.append((batches, error))
    return found


def _follow(got: Any, want: Any, rows: list[int], count: int, images: list[Any]) -> str:
    """Compare a batch with the plain one, and collect its images: what differs, or nothing."""
    if _is_image(want):
        images.append(got)
        return ""
    if isinstance(want, torch.Tensor):
        if not isinstance(got, torch.Tensor) or got.dtype != want.dtype:
            return "structure"
        want = want[rows] if want.dim() and count else want
        return "" if torch.equal(got.cpu(), want) else "label"
    if (children := _children(want)) is None:
        return "" if got == want else "label"
    if type(got) is not type(want):
        return "structure"
    plain = all(child is None or isinstance(child, (str, int)) for child in children)
    if isinstance(want, list) and plain and len(children) == count:
        return "" if got == [want[at] for at in rows] else "label"
    found = _children(got) or []
    if len(found) != len(children) or (isinstance(want, dict) and want.keys() != got.keys()):
        return "structure"
    pairs = zip(found, children, strict=True)
    return next(filter(None, (_follow(*pair, rows, count, images) for pair in pairs)), "")


def _views(config: Config, leaf: Any) -> list[list[Picture]]:
    """For each row of an image leaf its views, on the CPU."""
    views = leaf if config.transforms == "views" else (leaf,)
    return [[picture.cpu() for picture in row] for row in zip(*views, strict=True)]


def _pictures(config: Config, batch: Any) -> list[list[list[Picture]]]:
    """For each row its images, and for each of them its views."""
    leaves = eval(FORMS[config.form].images, {"b": batch})
    return [list(row) for row in zip(*(_views(config, leaf) for leaf in leaves), strict=True)]


# ---------------------------------------------------------------------------- reading a picture


def levels(config: Config, picture: Picture) -> np.ndarray[Any, Any]:
    """``(3, H, W)`` in 0 to 255, whatever the list made of it."""
    values = picture.double().numpy()
    if not picture.is_floating_point():
        return values
    return (values * 0.25 + 0.5 if config.transforms == "normalize" else values) * 255


@functools.lru_cache(4096)
def decoded(data: bytes) -> np.ndarray[Any, Any]:
    return pictures.read_with_pil(data).astype(np.float64)


@functools.cache
def weights(source: int, target: int) -> np.ndarray[Any, Any]:
    """``(target, source)``: what eager PyTorch makes of each pixel as it resizes one axis."""
    each = torch.eye(source, dtype=torch.float64)[None, None]
    size = (target, source)
    made = torch.nn.functional.interpolate(each, size=size, mode="bilinear", antialias=True)
    return made[0, 0].numpy()


@functools.lru_cache(128)
def _spans(ramp: tuple[float, ...], target: int) -> tuple[Any, Any]:
    """Every part ``(start, length)`` of an axis, and what a resize makes of its ramp."""
    values, starts, made = np.array(ramp), [], []
    for length in range(1, len(ramp) + 1):
        windows = np.lib.stride_tricks.sliding_window_view(values, length)
        starts += [(start, length) for start in range(len(windows))]
        made.append(windows @ weights(length, target).T)
    return np.array(starts), np.concatenate(made, dtype=np.float32)


def resampled(picture: Any, box: Any, size: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Eager PyTorch's crop and resize, ``(3, h, w)``; ``box`` is (top, left, height, width)."""
    top, left, height, width = box
    part = picture[top : top + height, left : left + width]
    rows, columns = weights(height, size[0]), weights(width, size[1])
    return np.einsum("yh,hwc,xw->cyx", rows, part, columns)


def read_crop(values: Any, picture: Any) -> tuple[float, tuple[int, ...]]:
    """The crop that a result was made of: how far eager PyTorch's is off, and where it lies.

    Returns:
        The largest difference in levels; top, left, height, width, and 1 where it is mirrored.
    """
    size = values.shape[1:]
    y_spans, y_made = _spans(tuple(picture[..., 1].mean(1)), size[0])
    x_spans, x_made = _spans(tuple(picture[..., 0].mean(0)), size[1])
    y_best = np.abs(y_made - values[1].mean(1)).max(1).argsort(kind="stable")[:3]
    best = (np.inf, (0, 0, 0, 0, 0))
    for mirrored in (0, 1):
        upright = values[..., ::-1] if mirrored else values
        x_best = np.abs(x_made - upright[0].mean(0)).max(1).argsort(kind="stable")[:3]
        for y, x in itertools.product(y_best, x_best):
            (top, height), (left, width) = y_spans[y].tolist(), x_spans[x].tolist()
            box = (top, left, height, width)
            off = np.abs(resampled(picture, box, size) - upright).max()
            best = min(best, (float(off), (*box, mirrored)))
            if off <= ROUNDING:
                return best
    return best


def read_window(values: Any, picture: Any) -> tuple[float, tuple[int, ...]]:
    """The same of a crop that is not resized."""
    height, width = values.shape[1:]
    best = (np.inf, (0, 0, 0, 0, 0))
    for mirrored in (0, 1):
        upright = values[..., ::-1] if mirrored else values
        top = int(np.abs(picture[:, 0, 1] - upright[1, 0, 0]).argmin())
        left = int(np.abs(picture[0, :, 0] - upright[0, 0, 0]).argmin())
        part = picture[top : top + height, left : left + width].transpose(2, 0, 1)
        off = np.abs(part - upright).max() if part.shape == upright.shape else np.inf
        best = min(best, (float(off), (top, left, height, width, mirrored)))
    return best


def _center(config: Config, picture: Any) -> np.ndarray[Any, Any]:
    from torchvision.transforms.v2 import functional

    whole = torch.from_numpy(picture).permute(2, 0, 1).to(torch.uint8)
    resized = functional.resize(whole, [config.size + 4], antialias=True)
    return functional.center_crop(resized, [config.size]).double().numpy()


# ---------------------------------------------------------------------------- judging


class Judge:
    """Judges what a configuration's story gave; ``findings`` has what is wrong."""

    def __init__(self, config: Config, runs: Runs, pending: frozenset[str]) -> None:
        self.config, self.runs, self.pending = config, runs, pending
        self.findings: list[Finding] = []
        self.counts: Counter[str] = Counter()
        file, numbers = runs.module.file, range(config.count)
        self.files = {number: file(number) for number in numbers}
        self.larger = dict(self.files)  # of the second image
        if config.form == "two sizes":
            self.larger = {number: file(number, configurations.LARGER) for number in numbers}

    def add(self, kind: str, words: str, row: Row | None = None, **where: Any) -> None:
        if row is not None:
            where = {"rank": row.rank, "epoch": row.epoch, "row": row.at, "number": row.number}
            where |= {"other": where.pop("other", (0, 0, 0))}
        self.findings.append(Finding(kind, words, **where))

    # What came, and in which order.

    def rows(self, rank: int, epochs: list[list[Any]], plain: list[list[Any]]) -> list[Row]:
        """Every sample that came, if what came is what should."""
        rows: list[Row] = []
        wanted = expected(self.config, plain)
        if len(wanted) != len(epochs):
            raise Wrong(Finding("epochs", f"{len(epochs)} for {len(wanted)}", rank=rank))
        for at, (epoch, (batches, error)) in enumerate(zip(epochs, wanted, strict=True)):
            rows += self._epoch(rank, at, epoch, batches, error)
        return rows

    def _epoch(
        self, rank: int, at: int, epoch: list[Any], batches: list[Expected], error: str
    ) -> list[Row]:
        config, name = self.config, f"epoch {at} of rank {rank}"
        failed = epoch[-1] if epoch and isinstance(epoch[-1], Exception) else None
        came = epoch[: -1 if failed else None]
        ended = type(failed).__name__ if failed else ""
        if not config.in_order:
            batches = _matched(config, came, batches)
        numbers = [_labels(config, batch) for batch in came]
        images = [_pictures(config, batch) for batch in came]
        if config.named:
            numbers = [[self._number(row) for row in batch] for batch in images]
        got, want = (
            list(itertools.chain(*each)) for each in (numbers, (b.numbers for b in batches))
        )
        where: dict[str, Any] = {"rank": rank, "epoch": at}
        if got != want:
            raise Wrong(
                Finding(_difference(got, want), f"{name}: {got} for {want}", **where, right=want)
            )
        if ended != error:
            words = f"{name} ends with {ended or 'no error'} for {error or 'none'}"
            raise Wrong(Finding("ending", f"{words}: {failed}", **where, right=error))
        if [len(batch) for batch in numbers] != [len(b.numbers) for b in batches]:
            raise Wrong(Finding("structure", f"{name} has other batches", **where))
        rows, times = list[Row](), Counter[int]()
        for number, (batch, wanted) in enumerate(zip(came, batches, strict=True)):
            # Without a batch size a sample comes as it is: nothing in it has rows.
            count = 0 if config.batch is None else len(_numbers(wanted.batch))
            if kind := _follow(batch, wanted.batch, wanted.rows, count, []):
                raise Wrong(Finding(kind, f"{name}, batch {number}: {batch}", **where))
            for place, sample in enumerate(wanted.numbers):
                replaced = wanted.replaced[place]
                row = Row(
                    sample,
                    rank,
                    at,
                    len(rows),
                    number,
                    place,
                    times[sample],
                    replaced,
                    images[number][place],
                )
                times[sample] += not replaced
                rows.append(row)
        self.counts["samples"] += len(rows)
        return rows

    def _number(self, images: list[list[Picture]]) -> int:
        """The sample that a picture says it is of."""
        return round(float(levels(self.config, images[0][0])[2].mean()) / 10)

    # Pixels.

    def look(self, row: Row) -> None:
        """Compare pictures with what eager PyTorch makes of PIL's, and read where they lie."""
        for files, views in zip((self.files, self.larger), row.images, strict=False):
            picture = decoded(files[row.number])
            boxes = [self._look(row, view, picture) for view in views]
            if row.boxes and self.config.reads == "crop" and self._in_force("pairs"):
                told = [pair for pair in zip(row.boxes, boxes, strict=True) if None not in pair]
                apart = not all(_close(self.config, *pair) for pair in told)
                if apart and not any(finding.kind == "pair" for finding in self.findings):
                    self.add("pair", f"the images of sample {row.number} are cut apart", row)
            row.boxes = row.boxes or boxes

    def _look(self, row: Row, view: Picture, picture: Any) -> Box | None:
        off, box = self._read(levels(self.config, view), view, picture)
        self.counts["pictures"] += 1
        limit = 0.0 if self.config.reads == "whole" else ROUNDING
        on_cpu = self.config.device == "cpu"
        if (off > limit) if on_cpu else not self._near(view, picture, box):
            words = f"sample {row.number} is {off:.1f} levels from any crop of its file"
            self.add("pixels", words, row)
        height, width = picture.shape[:2]
        return _relative(box, height, width) if box and min(height, width) >= THIN else None

    def _read(self, values: Any, view: Picture, picture: Any) -> tuple[float, Any]:
        """How many levels a picture is off, and the crop that it is."""
        config, size = self.config, values.shape[1:]
        match config.reads:
            case "whole":
                right = picture.transpose(2, 0, 1)
                same = view.dtype == torch.uint8 and right.shape == values.shape
                return float(np.abs(right - values).max()) if same else np.inf, None
            case "resize":
                right = resampled(picture, (0, 0, *picture.shape[:2]), size)
                return float(np.abs(right - values).max()), None
            case "center":
                return float(np.abs(_center(config, picture) - values).max()), None
            case "window":
                return read_window(values, picture)
        return read_crop(values, picture)

    def _near(self, view: Picture, picture: Any, box: Any) -> bool:
        """On a GPU: whether nearly all values are within a few levels."""
        config, values = self.config, levels(self.config, view)
        if config.reads == "whole":
            right = picture.transpose(2, 0, 1)
        elif config.reads == "center":
            right = _center(config, picture)
        else:
            box = box or (0, 0, *picture.shape[:2], 0)
            right = resampled(picture, box[:4], values.shape[1:])
            right = right[..., ::-1] if box[4] else right
        return right.shape == values.shape and (np.abs(right - values) > LEVELS).mean() <= SHARE

    # Draws.

    def same(self, one: Picture, other: Picture) -> bool:
        self.counts["draws"] += 1
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if self.config.device == "cpu":
            return torch.equal(one, other)
        scale = 255 if one.is_floating_point() else 1
        off = (one.float() - other.float()).abs() * scale > LEVELS
        return bool(off.float().mean() <= SHARE)

    def same_rows(self, one: list[list[Picture]], other: list[list[Picture]]) -> bool:
        pairs = zip(itertools.chain(*one), itertools.chain(*other), strict=True)
        return all(self.same(*pair) for pair in pairs)

    def alike(self, one: Row, other: Row) -> bool | None:
        """Whether two samples have the same draw; None where it cannot be told."""
        if self.config.reads in ("crop", "window"):
            first, second = (row.boxes[0] if row.boxes else None for row in (one, other))
            return None if first is None or second is None else _close(self.config, first, second)
        if self.config.reads or not (self.config.alike or one.number == other.number):
            return None
        if self.config.sizes == "one pixel wide" and not self.config.alike:
            return None
        return torch.equal(one.images[0][0], other.images[0][0])

    def differ(self, kind: str, words: str, pairs: Iterable[tuple[Row, Row]]) -> None:
        """Report rows of which too many have the draw of another one."""
        told = [(pair, alike) for pair in pairs if (alike := self.alike(*pair)) is not None]
        found = [pair for pair, alike in told if alike]
        self.counts["pairs"] += len(told)
        if len(told) >= PAIRS and len(found) >= ALIKE * len(told):
            one, other = found[0]
            finding = Finding(
                kind,
                f"{len(found)} of {len(told)} {words}",
                one.rank,
                one.epoch,
                one.at,
                one.number,
                (other.rank, other.epoch, other.at),
            )
            self.findings.append(finding)

    def draws_differ(self, rows: list[Row]) -> None:
        """Between samples, batches, epochs, repeats, views and ranks."""
        config = self.config
        shown = [row for row in rows if not row.replaced]
        batches, places = defaultdict(list), defaultdict(list)
        samples, ranks = defaultdict(list), defaultdict(list)
        for row in shown:
            batches[row.rank, row.epoch, row.batch].append(row)
            places[row.rank, row.epoch, row.place].append(row)
            samples[row.number].append(row)
            ranks[row.epoch, row.batch, row.place].append(row)
        neighbors = (pair for each in batches.values() for pair in itertools.pairwise(each))
        self.differ("shared", "neighbors in a batch share their draw", neighbors)
        if self._in_force("names" if config.names == "none" and config.encoded else ""):
            following = (
                pair
                for each in places.values()
                for pair in itertools.pairwise(each)
                if pair[0].number != pair[1].number
            )
            self.differ("between", "draws are the batch before's in the same row", following)
        again = [pair for each in samples.values() for pair in itertools.combinations(each, 2)]
        epochs = [
            p
            for p in again
            if p[0].rank == p[1].rank and self._number_of(p[0]) != self._number_of(p[1])
        ]
        self.differ("stale", "draws of an epoch are those of another", epochs)
        if self._in_force("names" if config.names == "none" else ""):
            twice = (p for p in again if (p[0].rank, p[0].epoch) == (p[1].rank, p[1].epoch))
            self.differ("repeat", "repeats of a sample are one picture", twice)
        if config.transforms == "views":
            found = [_close(config, *row.boxes[:2]) for row in shown if row.boxes and row.boxes[0]]
            if len(found) >= PAIRS and sum(found) >= ALIKE * len(found):
                self.add("views", "views of a sample are one", shown[0])
        if not config.encoded and config.sampler == "distributed" and self._in_force("ranks"):
            pairs = (pair for each in ranks.values() for pair in itertools.combinations(each, 2))
            self.differ("ranks", "draws are another rank's", pairs)

    def _number_of(self, row: Row) -> int:
        return self.config.numbers[row.epoch]

    def _in_force(self, *rules: str) -> bool:
        return not self.pending & set(rules)

    def _rules(self) -> list[str]:
        """What has to hold for the picture of a sample to be the same wherever it is made."""
        config = self.config
        rules = ["policies"] * (config.transforms in POLICIES)
        rules += ["names"] * (config.names == "none") + ["late"] * (config.seeding == "late")
        return rules + ["restarted"] * (config.story == "restarted")

    def draws_agree(self, rows: list[Row]) -> None:
        """With each sample alone in another batch, for the epoch and the seed."""
        config = self.config
        nameless = config.names == "none" and config.data == "stream"
        unreadable = config.data == "stream" and config.raises >= 0
        if config.counts_batches or nameless or unreadable or not self._in_force(*self._rules()):
            return
        first = [row for row in rows if not row.repeat and not row.replaced]
        for epoch in sorted({row.epoch for row in first}):
            mine = [row for row in first if row.epoch == epoch]
            number = config.numbers[epoch]
            alone = self.runs.each_alone((row.number for row in mine), number, config.draws_seed)
            wrong = [row for row in mine if not self.same_rows(row.images, alone[row.number])]
            if wrong:
                words = f"{len(wrong)} of {len(mine)} samples of epoch {number} are other pictures"
                self.add("alone", f"{words} in another batch, sample {wrong[0].number}", wrong[0])
                return
        if first and config.reads in ("crop", "") and config.seed % 4 == 0:
            self._other_seed([row for row in first if row.epoch == first[0].epoch])

    def _other_seed(self, rows: list[Row]) -> None:
        number = self._number_of(rows[0])
        other = self.runs.each_alone(
            (row.number for row in rows), number, self.config.draws_seed + 1
        )
        wide = [row for row in rows if min(decoded(self.files[row.number]).shape[:2]) >= THIN]
        equal = sum(torch.equal(row.images[0][0], other[row.number][0][0]) for row in wide)
        if len(wide) >= PAIRS and equal >= ALIKE * len(wide):
            self.add("seed", f"{equal} of {len(wide)} pictures are those of another seed", rows[0])

    def pairs_agree(self, rows: list[Row]) -> None:
        """All images of a sample share its draw; of one file they are one picture."""
        config = self.config
        if config.form != "two images" or config.counts_batches or not self._in_force("pairs"):
            return
        for row in rows:
            if not all(itertools.starmap(self.same, zip(*row.images, strict=True))):
                self.add("pair", f"the images of sample {row.number} have different draws", row)
                return

    def repeats_itself(self, rows: list[Row]) -> None:
        """A second run, with other workers, without an interruption."""
        config, resumed = self.config, self.config.story == "resume"
        apart = config.together == "processes" and config.counts_batches
        late = config.seeding == "late"
        if not config.in_order or apart or not self._in_force(*["late"] * late):
            return
        for rank in range(config.world):
            how = {"workers": other_workers(config), "whole": resumed}
            epochs = self.runs.alone(rank, plain=False, **how)
            batches = (b for epoch in epochs for b in epoch if not isinstance(b, Exception))
            again = [row for batch in batches for row in _pictures(config, batch)]
            mine = [row for row in rows if row.rank == rank]
            if len(again) != len(mine):
                self.add("again", f"{len(again)} samples for {len(mine)}", rank=rank)
                return
            for row, images in zip(mine, again, strict=True):
                if not self.same_rows(row.images, images):
                    words = "an uninterrupted run's" if resumed else "a second run's"
                    self.add("resume" if resumed else "again", f"a picture is not {words}", row)
                    return

    def replays(self, rows: list[Row], loaders: list[Any]) -> None:
        """What ``replay`` gives of the last epoch is what the loop saw."""
        config = self.config
        known = config.in_order and config.data != "stream" and config.batch is not None
        told = config.story in ("epochs", "numbered") and config.encoded and known
        if not told or not rows or not loaders:
            return
        last = [row for row in rows if row.rank == 0 and row.epoch == rows[-1].epoch]
        times = Counter(row.number for row in last)
        for row in [row for row in last if times[row.number] == 1 and not row.replaced][:2]:
            index = row.number
            if config.data == "subset":
                index = configurations.subset(config).index(index)
            batch = loaders[0].replay(index, self._number_of(row))
            (images,) = _pictures(config, batch)
            if _labels(config, batch) != [row.number] or not self.same_rows(row.images, images):
                self.add("replay", f"of sample {row.number} is not what the loop saw", row)
                return


def _labels(config: Config, batch: Any) -> list[int]:
    """The samples of a batch, by their labels."""
    label = eval(FORMS[config.form].label, {"b": batch})
    return np.atleast_1d(label.cpu() if isinstance(label, torch.Tensor) else label).tolist()


def _matched(config: Config, came: list[Any], batches: list[Expected]) -> list[Expected]:
    """The plain batches in the order in which they came; as they are if others came."""
    left, found = list(batches), []
    for batch in came:
        numbers = _labels(config, batch)
        place = next((at for at, other in enumerate(left) if other.numbers == numbers), None)
        if place is None:
            return batches
        found.append(left.pop(place))
    return found + left


def _difference(got: list[int], want: list[int]) -> str:
    extra, missing = Counter(got) - Counter(want), Counter(want) - Counter(got)
    if not extra and not missing:
        return "order"
    if not extra:
        return "lost"
    return "twice" if set(extra) <= set(want) else "wrong"


def _relative(box: Any, height: int, width: int) -> Box:
    """Its four edges as shares, whether it is mirrored, and a pixel and a half as shares."""
    top, left, high, wide, mirrored = box
    edges = (top / height, left / width, (top + high) / height, (left + wide) / width)
    return (*edges, mirrored, 1.5 / height, 1.5 / width)


def _close(config: Config, one: Box | None, other: Box | None) -> bool:
    if one is None or other is None:
        return False
    if config.reads == "window":
        return one == other
    near = [max(a, b) for a, b in zip(one[5:], other[5:], strict=True)] * 2
    edges = zip(one[:4], other[:4], near, strict=True)
    return one[4] == other[4] and all(abs(a - b) <= limit for a, b, limit in edges)


def impatient() -> None:
    """Let workers that miss the end of their loader, as some do on a busy machine, look sooner."""
    utilities = torch.utils.data._utils
    utilities.MP_STATUS_CHECK_INTERVAL = utilities.worker.MP_STATUS_CHECK_INTERVAL = 1.0


def check(
    config: Config, pending: frozenset[str] = PENDING, counts: Counter[str] | None = None
) -> list[Finding]:
    """Run a configuration and the plain loader: what is wrong."""
    with warnings.catch_warnings(), loaded(config) as module:
        warnings.simplefilter("ignore")
        runs = Runs(config, module)
        judge = Judge(config, runs, pending)
        try:
            plain = [runs.alone(rank, plain=True) for rank in range(config.world)]
            ours, loaders = runs.ranks()
            rows = [
                row
                for rank in range(config.world)
                for row in judge.rows(rank, ours[rank], plain[rank])
            ]
            if config.reads:
                for row in rows:
                    judge.look(row)
            if not judge.findings:
                judge.draws_differ(rows)
                judge.pairs_agree(rows)
                judge.draws_agree(rows)
                judge.repeats_itself(rows)
                judge.replays(rows, loaders)
        except Wrong as wrong:
            judge.findings.append(wrong.finding)
        except Exception as error:
            last = traceback.format_exc().strip().splitlines()
            words = f"{type(error).__name__}: {error}"
            judge.findings.append(Finding("error", words, right="\n".join(last[-12:])))
        if counts is not None:
            counts.update(judge.counts)
        return judge.findings


# ---------------------------------------------------------------------------- a script


def script(config: Config, finding: Finding) -> str:
    """At most ``configurations.LINES`` lines that show the finding, with public names alone."""
    return configurations.script(config, Ending(config, finding).lines())


class Ending:
    """The last lines of a script: the story once more, and what is to be seen there."""

    def __init__(self, config: Config, finding: Finding) -> None:
        self.config, self.finding, self.form = config, finding, FORMS[config.form]
        first = f"{self.form.images}[0]" + "[0]" * (config.transforms == "views")
        self.rows = self._reader("rows", first)
        self.epoch = f"rows(epochs[{finding.epoch}])"
        self.row = f"{self.epoch}[{finding.row}][1]"

    def lines(self) -> list[str]:
        finding = self.finding
        shown = {
            "error": self.as_it_is,
            "epochs": self.as_it_is,
            "structure": self.as_it_is,
            "ending": self.ending,
            "label": self.labels,
            "pixels": self.pixels,
            "pair": self.pair,
            "alone": self.alone,
            "seed": self.other_seed,
            "again": self.again,
            "resume": self.again,
            "replay": self.replay,
        }
        if finding.kind in ("lost", "twice", "order", "wrong"):
            shown[finding.kind] = self.order
        run = f"{self._begin('loader', finding.rank)}; epochs = [*story(loader, {finding.rank})]"
        return [run, *shown.get(finding.kind, self.differing)()]

    def _reader(self, name: str, images: str) -> str:
        pairs = f"zip(np.atleast_1d({self.form.label}), {images})"
        kept = "b in e if not isinstance(b, Exception)"
        return f"{name} = lambda e: [(int(y), x.cpu()) for {kept} for y, x in {pairs}]"

    def _begin(self, name: str, rank: int, workers: int | None = None) -> str:
        """Build a loader; where the seed is set late, another one each time before that."""
        config = self.config
        make = [f"rank={rank}"] * bool(rank)
        make += [] if workers is None else [f"workers={workers}"]
        late = config.seeding == "late"
        before = config.draws_seed + (7 * len(name) if late else 0)
        after = f"; torch.manual_seed({config.draws_seed})" if late else ""
        return f"torch.manual_seed({before}); {name} = make({', '.join(make)}){after}"

    def as_it_is(self) -> list[str]:
        return [f"raise SystemExit(epochs)  # {self.finding.words[:60]!r}"]

    def ending(self) -> list[str]:
        last = f"epochs[{self.finding.epoch}][-1:]"
        ended = f"[type(b).__name__ for b in {last} if isinstance(b, Exception)]"
        return _wanted(ended, [self.finding.right] if self.finding.right else [])

    def order(self) -> list[str]:
        number = _read_back(self.config) if self.config.named else "y"
        return [self.rows, *_wanted(f"[{number} for y, x in {self.epoch}]", self.finding.right)]

    def labels(self) -> list[str]:
        if not self.config.named:
            return self.as_it_is()
        both = f"[(y, {_read_back(self.config)}) for y, x in {self.epoch}]"
        return [self.rows, f"got = {both}; print(got); assert all(y == i for y, i in got), epochs"]

    def pixels(self) -> list[str]:
        picture = f"Image.open(io.BytesIO(file({self.finding.number}))).convert('RGB')"
        return [self.rows, f"raise SystemExit(({self.row}, np.array({picture})))"]

    def pair(self) -> list[str]:
        views = "[0]" * (self.config.transforms == "views")
        pairs = f'zip(b["A"]{views}, b["B"]{views})'
        equal = "torch.equal(x, y)"
        if self.config.form == "two sizes":
            equal = "float((1.0 * x[:2] - y[:2]).abs().mean() / x[:2].max()) < 0.04"
        same = f"[{equal} for b in epochs[{self.finding.epoch}] for x, y in {pairs}]"
        return [f"got = {same}; print(got); assert all(got)"]

    def _apart(self, seed: int) -> str:
        """The first of each sample in a batch of its own."""
        config = self.config
        data = configurations.base(config)
        data = f"list({data})" if config.data == "stream" else data
        collate = ", collate_fn=collate" * bool(self.form.collate)
        number = config.numbers[self.finding.epoch]
        loader = f"ours(DataLoader({data}, batch_sampler=[[i] for i in got]{collate}), {seed})"
        first = f"got = dict(reversed({self.epoch}))"
        return f"{first}; one = {loader}; one.set_epoch({number}); right = dict(rows(one))"

    def alone(self) -> list[str]:
        same = "{i: torch.equal(right[i], got[i]) for i in got}"
        apart = self._apart(self.config.draws_seed)
        return [self.rows, apart, f"same = {same}; print(same); assert all(same.values())"]

    def other_seed(self) -> list[str]:
        same = "[torch.equal(right[i], got[i]) for i in got]"
        apart = self._apart(self.config.draws_seed + 1)
        return [self.rows, apart, f"same = {same}; print(same); assert not all(same)"]

    def again(self) -> list[str]:
        config, rank, epoch = self.config, self.finding.rank, self.finding.epoch
        workers = other_workers(config)
        story = f"[*story(another, {rank})]"
        if self.finding.kind == "resume":
            story = "[list(another) for _ in epochs]"
        second = f"{self._begin('another', rank, workers)}; others = {story}"
        pairs = f"zip({self.epoch}, rows(others[{epoch}]), strict=True)"
        same = f"[y == z and torch.equal(x, w) for (y, x), (z, w) in {pairs}]"
        return [self.rows, second, f"got = {same}; print(got); assert all(got)"]

    def replay(self) -> list[str]:
        index, number = self.finding.number, self.config.numbers[self.finding.epoch]
        if self.config.data == "subset":
            index = configurations.subset(self.config).index(index)
        again = f"rows([loader.replay({index}, {number})])[0][1]"
        return [self.rows, f"assert torch.equal({again}, {self.row})"]

    def differing(self) -> list[str]:
        """Two pictures that are cut at the same place, which red and green tell."""
        finding, lines, name = self.finding, [self.rows], "epochs"
        rank, epoch, row = finding.other
        if rank != finding.rank:
            other = f"others = [*story(another, {rank})]"
            lines.append(f"{self._begin('another', rank)}; {other}")
            name = "others"
        second = f"rows({name}[{epoch}])[{row}][1]"
        if finding.kind == "views":
            lines.append(self._reader("seconds", f"{self.form.images}[0][1]"))
            second = f"seconds(epochs[{finding.epoch}])[{finding.row}][1]"
        apart = "(1.0 * a - 1.0 * b).abs().mean() > 0.02 * (1.0 * a).abs().max()"
        return [*lines, f"a, b = {self.row}[:2], {second}[:2]; print(a, b); assert {apart}"]


def _wanted(got: str, right: Any) -> list[str]:
    return [f"got, right = {got}, {right}", "print(got, right, sep='\\n'); assert got == right"]


def _read_back(config: Config) -> str:
    """An expression for the sample that the picture ``x`` is of."""
    value = "x[2].double().mean().item()"
    if config.transforms == "normalize":
        value = f"({value} * 0.25 + 0.5)"
    whole = config.transforms == "none" or config.dtype == "uint8"
    return f"round({value} / 10)" if whole else f"round({value} * 25.5)"


def other_workers(config: Config) -> int:
    """Of a second run: the same where they decide what an epoch that ends early has drawn."""
    early = config.story == "early" or configurations.may_fail(config)
    return config.workers if early else config.other_workers


# What a configuration is made simpler by, as long as it fails in the same way.
SIMPLER: tuple[dict[str, Any], ...] = (
    {"together": "alone"},
    {"workers": 0, "persistent": False, "context": "fork"},
    {"other_workers": 0},
    {"bad": ()},
    {"raises": -1},
    {"slow": False},
    {"in_order": True},
    {"form": "two images"},
    {"form": "pair"},
    {"decoder": "auto"},
    {"data": "samples"},
    {"sampler": "sequential", "world": 1},
    {"files": "png"},
    {"names": "index"},
    {"dtype": "float32", "channels_last": False},
    {"depth": None},
    {"budget": None},
    {"drop_last": False},
    {"seeding": "given"},
    {"sizes": "equal"},
    {"transforms": "crop"},
    {"story": "epochs", "epochs": ()},
)


def simpler(
    config: Config, finding: Finding, pending: frozenset[str], seconds: float = 30.0
) -> tuple[Config, Finding]:
    """The configuration with as little in it as the finding needs."""
    until = time.monotonic() + seconds
    for changes in SIMPLER:
        candidate = replace(config, **changes)
        if candidate == config or time.monotonic() > until:
            continue
        try:
            found = check(candidate, pending)
        except Exception:  # what does not go together
            continue
        same = next((other for other in found if other.kind == finding.kind), None)
        if same is not None and (finding.kind != "error" or same.words == finding.words):
            config, finding = candidate, same
    return config, finding


# ---------------------------------------------------------------------------- the command


def run_cases(**task: Any) -> dict[str, Any]:
    """In a child: the configurations of a range of seeds; a line for each as it begins."""
    torch.set_num_threads(1)
    impatient()
    pending, counts = frozenset(task["pending"]), Counter[str]()
    kinds, failures = Counter[str](), list[Any]()
    for seed in range(task["first"], task["last"]):
        print("AT", seed, flush=True)
        if str(seed) in task["trap"]:  # the tests' own
            signal.raise_signal(signal.SIGSEGV) if task["trap"][
                str(seed)
            ] == "crash" else time.sleep(1000)
        config = configurations.draw(seed, task["device"])
        for name, value in configurations.counted(config).items():
            kinds[f"{name}: {value}"] += 1
        counts["cases"] += 1
        if findings := check(config, pending, counts):
            least, finding = simpler(config, findings[0], pending)
            failures.append(failure(seed, findings, script(least, finding)))
            print(failures[-1]["what"], failures[-1]["script"], sep="\n", file=sys.stderr)
        if len(failures) >= MAX_FAILURES or time.time() > task["until"]:
            break
    return {"counts": counts, "kinds": kinds, "failures": failures}


def failure(seed: int, findings: list[Finding], text: str) -> dict[str, Any]:
    last = findings[0].right if findings[0].kind == "error" else ""
    what = [str(finding)[:600] for finding in findings]
    return {"seed": seed, "what": what, "traceback": last, "script": text}


def run_range(task: dict[str, Any]) -> dict[str, Any]:
    """Run a range of seeds in children; after a crash or a hang the next child goes on."""
    counts, kinds, failures = Counter[str](), Counter[str](), list[Any]()
    first = task["first"]
    while first < task["last"] and len(failures) < MAX_FAILURES:
        last = min(first + task["each"], task["last"])
        lines, ending, errors = _run_child({**task, "first": first, "last": last})
        if ending == "0":
            result = json.loads(lines[-1].removeprefix(harness.RESULT))
            counts.update(result["counts"])
            kinds.update(result["kinds"])
            failures += result["failures"]
            first = last
            if time.time() > task["until"]:
                break
            continue
        reached = [int(line.split()[1]) for line in lines if line.startswith("AT ")]
        seed = max(reached, default=first)
        config = configurations.draw(seed, task["device"])
        text = script(config, Finding("error", ending))
        failures.append({"seed": seed, "what": [ending], "traceback": errors, "script": text})
        print(f"seed {seed}: {ending}\n{errors}\n{text}", file=sys.stderr)
        # What came before it in this child is run again: its counts went with it.
        if seed > first:
            before = run_range({**task, "last": seed, "each": seed - first})
            counts.update(before["counts"])
            kinds.update(before["kinds"])
            failures += before["failures"]
        counts["cases"] += 1
        first = seed + 1
    return {"counts": counts, "kinds": kinds, "failures": failures}


def start(task: dict[str, Any], out: Any, err: Any) -> subprocess.Popen[bytes]:
    """A child that writes to these files, in a session of its own."""
    command = [sys.executable, __file__, "--child", json.dumps(task)]
    return subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)


def _run_child(task: dict[str, Any]) -> tuple[list[str], str, str]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = start(task, out, err)
        try:
            return fuzz.watch(child, out, err, task["patience"])
        finally:  # its workers, too, are in its session
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def differential(args: argparse.Namespace) -> dict[str, Any]:
    """All cases, ``jobs`` children at a time: what came of them."""
    first = args.seed * args.cases if args.only is None else args.only
    last = first + (args.cases if args.only is None else 1)
    per_job = -(-(last - first) // args.jobs)
    until = time.time() + args.seconds if args.seconds else time.time() + 1e9
    shared = {"device": args.device, "pending": sorted(args.without), "until": until}
    shared |= {"patience": args.patience, "trap": args.trap, "each": args.each}
    tasks = [
        shared | {"first": at, "last": min(at + per_job, last)}
        for at in range(first, last, per_job)
    ]
    started = time.monotonic()
    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(run_range, tasks))
    counts: Counter[str] = sum((Counter(result["counts"]) for result in results), Counter())
    kinds: Counter[str] = sum((Counter(result["kinds"]) for result in results), Counter())
    failures = [failure for result in results for failure in result["failures"]]
    return {
        "device": args.device,
        "cases": counts.pop("cases", 0),
        "wrong": len(failures),
        "without": sorted(args.without),
        "counts": dict(counts),
        "kinds": dict(sorted(kinds.items())),
        "failures": failures,
        "seconds": round(time.monotonic() - started, 1),
    }


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = harness.output_parser(__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first case, times --cases")
    parser.add_argument("--only", type=int, help="the configuration of this seed alone")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="children at a time")
    parser.add_argument("--each", type=int, default=50, help="configurations of a child")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds for one of them")
    parser.add_argument("--seconds", type=float, help="fewer cases rather than longer")
    parser.add_argument(
        "--without",
        nargs="*",
        choices=sorted(RULES),
        default=sorted(PENDING),
        help="rules that are not in force: " + "; ".join(f"{k}: {v}" for k, v in RULES.items()),
    )
    parser.add_argument("--trap", type=json.loads, default={}, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> None:
    args = parse()
    document = harness.Document("differential", args, harness.Device(), anew=True)
    result = differential(args)
    print(json.dumps({key: value for key, value in result.items() if key != "failures"}, indent=1))
    for failed in result["failures"]:
        print(f"seed {failed['seed']}:", *failed["what"], failed["script"], sep="\n")
    document.keep(result)
    sys.exit(1 if result["failures"] else 0)


if __name__ == "__main__":
    harness.child_main(run_cases)
    main()
