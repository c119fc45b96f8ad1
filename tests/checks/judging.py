"""Run a configuration beside the plain DataLoader, and judge what the loop got."""

import contextlib
import dataclasses
import functools
import itertools
import os
import pickle
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import configurations
import numpy as np
import torch
from configurations import FORMS, POLICIES, THIN, Config
from crops import ROUNDING, Picture, centered, decoded, levels, read_crop, read_window, resampled
from torch.utils.data import DataLoader

# On a GPU at most SHARE of the values are off by more than LEVELS.
LEVELS = 3
SHARE = 0.01
ALIKE = 0.8  # share of pairs with the same draw that is no coincidence; of at least PAIRS
PAIRS = 4
CHUNK = 5  # samples of a batch where pictures are made alone

# Rules about draws that can be left out, one by one.
RULES = {
    "pairs": "all images of a sample share one draw",
    "policies": "what a policy draws depends on the sample, not on its batch",
    "ranks": "tensors and whole batches draw apart on every rank",
    "names": "the sampler's index names an image that has neither index nor path",
    "late": "seed=None is read when an epoch begins",
    "restarted": "a sampler's epoch numbers the epoch",
}
PENDING: frozenset[str] = frozenset()

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


_modules = itertools.count()


@contextlib.contextmanager
def loaded(config: Config) -> Iterator[Any]:
    """The configuration's Python as a module, which new interpreters can import too."""
    name = f"differential_{os.getpid()}_{next(_modules)}"
    text = configurations.source(config)
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
        self.config = config
        self.module = module
        self._times = 0

    def begin(self, rank: int, *, plain: bool, workers: int | None = None) -> Any:
        """The loader of a rank, built and seeded as the configuration says."""
        config = self.config
        seed = self.config.draws_seed
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
        config = self.config
        ranks = range(self.config.world)
        if config.together == "processes":
            return _in_processes(config.world, functools.partial(self.alone, plain=False)), []
        if config.together == "threads":
            loaders = [self.begin(rank, plain=False) for rank in ranks]
            return _in_threads(functools.partial(self.story, plain=False), loaders), loaders
        found = []
        loaders = []
        for rank in ranks:
            loaders.append(self.begin(rank, plain=False))
            found.append(self.story(loaders[-1], rank, plain=False))
        return found, loaders

    def each_alone(self, numbers: Iterable[int], epoch: int, seed: int) -> dict[int, Any]:
        """Every sample in another batch, in the order of the dataset, without workers."""
        config = self.config
        names = vars(self.module)
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


def expected(
    config: Config, epochs: list[list[Any]], known: set[Any] | None = None
) -> list[tuple[list[Expected], str]]:
    """What is left of the plain loader's epochs, and the name of the error that each ends with.

    ``known`` gets the bad files that come up.
    """
    known = set() if known is None else known
    found = []
    for epoch in epochs:
        batches = list[Expected]()
        error = ""
        left_out = False
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
            # Where the loader knows of other ranks, these would wait for a batch that is left out.
            ranks = config.world > 1 and (
                config.sampler == "distributed" or config.together == "processes"
            )
            nothing = (config.on_error == "replace" or ranks) and not rows
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


class Judge:
    """Judges what a configuration's story gave; ``findings`` has what is wrong."""

    def __init__(self, config: Config, runs: Runs, pending: frozenset[str]) -> None:
        self.config = config
        self.runs = runs
        self.pending = pending
        self.findings: list[Finding] = []
        self.counts: Counter[str] = Counter()
        file = runs.module.file
        numbers = range(config.count)
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
        config = self.config
        name = f"epoch {at} of rank {rank}"
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
        rows = list[Row]()
        times = Counter[int]()
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
        config = self.config
        size = values.shape[1:]
        match config.reads:
            case "whole":
                right = picture.transpose(2, 0, 1)
                same = view.dtype == torch.uint8 and right.shape == values.shape
                return float(np.abs(right - values).max()) if same else np.inf, None
            case "resize":
                right = resampled(picture, (0, 0, *picture.shape[:2]), size)
                return float(np.abs(right - values).max()), None
            case "center":
                return float(np.abs(centered(config, picture) - values).max()), None
            case "window":
                return read_window(values, picture)
        return read_crop(values, picture)

    def _near(self, view: Picture, picture: Any, box: Any) -> bool:
        """On a GPU: whether nearly all values are within a few levels."""
        config = self.config
        values = levels(self.config, view)
        if config.reads == "whole":
            right = picture.transpose(2, 0, 1)
        elif config.reads == "center":
            right = centered(config, picture)
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
        batches = defaultdict(list)
        places = defaultdict(list)
        samples = defaultdict(list)
        ranks = defaultdict(list)
        for row in shown:
            batches[row.rank, row.epoch, row.batch].append(row)
            places[row.rank, row.epoch, row.place].append(row)
            samples[row.number].append(row)
            ranks[row.epoch, row.batch, row.place].append(row)
        neighbors = (pair for each in batches.values() for pair in itertools.pairwise(each))
        self.differ("shared", "neighbors in a batch share their draw", neighbors)
        named = config.names != "none" or not config.encoded
        # Nothing tells samples of one picture apart in a stream, and a warning says so.
        nameless = not named and config.alike and config.data == "stream"
        if not nameless and self._in_force("" if named else "names"):
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
        # A stream has no sampler: its samples are compared by what they say of themselves.
        nameless = config.names != "index" and config.data == "stream"
        unreadable = config.data == "stream" and config.raises >= 0
        if config.counts_batches or nameless or unreadable or not self._in_force(*self._rules()):
            return
        first = [row for row in rows if not row.repeat and not row.replaced]
        for epoch in sorted({row.epoch for row in first}):
            mine = [row for row in first if row.epoch == epoch]
            if not config.in_order:  # the first to come may be a later one of the sampler's
                again = {row.number for row in rows if row.epoch == epoch and row.repeat}
                mine = [row for row in mine if row.number not in again]
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
        config = self.config
        resumed = self.config.story == "resume"
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

    def lists_bad_files(self, plain: list[list[list[Any]]], loaders: list[Any]) -> None:
        """``bad_images`` has each of them once, by the index that it came with."""
        config = self.config
        listed = config.on_error in ("skip", "replace", "callable") and config.max_bad is None
        if not (config.bad and listed and config.names == "index" and config.story != "resume"):
            return
        for rank, loader in enumerate(loaders):
            known: set[int] = set()
            expected(config, plain[rank], known)
            if sorted(bad.index for bad in loader.bad_images) != sorted(known):
                self.add("bad", f"{loader.bad_images} for the samples {known}", rank=rank)

    def replays(self, rows: list[Row], loaders: list[Any], epochs: int) -> None:
        """What ``replay`` gives of the last epoch with a batch is what the loop saw.

        Unless the dataset has lost a sample since: it cannot give that batch again.
        """
        config = self.config
        known = config.in_order and config.data != "stream" and config.batch is not None
        told = config.story in ("epochs", "numbered") and config.encoded and known
        if not told or not rows or not loaders:
            return
        if config.between == "a sample less" and rows[-1].epoch < epochs - 1:
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
    left = list(batches)
    found = []
    for batch in came:
        numbers = _labels(config, batch)
        place = next((at for at, other in enumerate(left) if other.numbers == numbers), None)
        if place is None:
            return batches
        found.append(left.pop(place))
    return found + left


def _difference(got: list[int], want: list[int]) -> str:
    extra = Counter(got) - Counter(want)
    missing = Counter(want) - Counter(got)
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
    for module in (utilities, utilities.worker):
        module.MP_STATUS_CHECK_INTERVAL = 1.0


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
                judge.lists_bad_files(plain, loaders)
                judge.replays(rows, loaders, len(plain[0]))
        except Wrong as wrong:
            judge.findings.append(wrong.finding)
        except Exception as error:
            last = traceback.format_exc().strip().splitlines()
            words = f"{type(error).__name__}: {error}"
            judge.findings.append(Finding("error", words, right="\n".join(last[-12:])))
        if counts is not None:
            counts.update(judge.counts)
        return judge.findings


def other_workers(config: Config) -> int:
    """Of a second run: the same where they decide what an epoch that ends early has drawn."""
    early = config.story == "early" or configurations.may_fail(config)
    return config.workers if early else config.other_workers
