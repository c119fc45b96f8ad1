"""doctor: what a training loop is bound by, and which setting helps, both measured.

It measures the loader alone, the step on one resident batch, and both together. The verdict follows
from these numbers alone. Settings that may help are then measured too.
"""

from __future__ import annotations

import time
import timeit
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from gpuprefetch.core.device import resolve_device
from gpuprefetch.core.nested import Batch, Loader, tensors, to_device
from gpuprefetch.core.report import Bar as Progress
from gpuprefetch.core.report import Printed, columns, progress, rate_text
from gpuprefetch.core.streams import Steps
from gpuprefetch.images.counting import count_images
from gpuprefetch.images.share import usable_cores
from gpuprefetch.insight.bars import Bar, Part, draw_bars
from gpuprefetch.insight.costs import costs
from gpuprefetch.insight.probe import Workers, endless, probe
from gpuprefetch.migrate.accelerate import accelerate
from gpuprefetch.policies.known import UnsupportedTransformError
from gpuprefetch.prefetcher import DataPrefetcher

# Below this gain two runs are called equal: what a few seconds on a shared machine can tell apart.
SMALL = 1.1
# Bad files that are named.
NAMED = 3

Step = Callable[[Batch], object]

# What a loop may be bound by: the verdict, and what would help where no setting does.
BOUNDS = {
    "reading": (
        "bound by reading: the workers wait for files.",
        "a faster or local disk, smaller files, or tar shards read in sequence may help.",
    ),
    "CPU decode": (
        "bound by CPU decode: the loop waits for workers that compute, or for cores.",
        "more workers or cores, smaller files, or fewer transforms in them may help.",
    ),
    "cores": (
        "bound by cores: the model and the workers share {cores} cores, and the step is slower "
        "beside them than alone.",
        "more cores, or decoding on a GPU may help.",
    ),
    "transfer": (
        "bound by transfer: the loop waits for copies to the device.",
        "less to copy may help: uint8 in place of float, or encoded images.",
    ),
    "GPU decode": (
        "bound by GPU decode: decoding and transforms on the device are late.",
        "smaller files, fewer transforms on the device, or more CPU cores may help.",
    ),
    "model": ("bound by the model: a faster loader gains nothing.", ""),
}
_DEFAULT_STREAM = (
    "the step runs on CUDA's default stream, where its launches wait for the prefetch thread's. "
    "It may be faster on its own stream: call torch.cuda.set_stream(torch.cuda.Stream()) before "
    "the model is made."
)


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that was tried; ``gain`` is its images/s over those of the loop as it came."""

    setting: str
    images_per_second: float
    gain: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was measured of one loader and one step."""

    bound: str  # "reading", "CPU decode", "cores", "transfer", "GPU decode" or "model"
    images_per_second: float  # of the loop
    loader_images_per_second: float  # of the loader, without a step
    step_ms: float  # from one batch of the loop to the next
    wait_ms: float  # the part of it in next(loader); of a prefetcher, in which the GPU waits
    copy_ms: float  # of a batch to the device; 0 for a prefetcher, which copies ahead of time
    # The part of the workers' time, without a step, that they wait for files, or for work if the
    # device is late.
    reading_share: float


@dataclass(frozen=True, slots=True, repr=False)
class DoctorReport(Printed):
    """What :func:`doctor` found; ``print`` it.

    Attributes:
        found: the diagnosis of the loader as it came.
        ceiling: images/s of the step on one resident batch.
        changes: the setting that helps most, if one does. Call doctor again after the change.
        tried: the other settings, best first.
        moved: the diagnosis of ``accelerate(loader)`` with the same step; None if ``loader`` is a
            prefetcher, if that was not to be tried, or could not be.
        notes: what decodes, what the transforms cost, bad files, and what could not be tried.
        where: loader, device and cores.
        cores: that this process may use.
    """

    found: Diagnosis
    ceiling: float
    changes: list[Change]
    tried: list[Change]
    moved: Diagnosis | None
    notes: list[str]
    where: str
    cores: int

    @property
    def bound(self) -> str:
        """What the loop is bound by, ``found.bound``."""
        return self.found.bound

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        found = self.found
        sides = [found] if self.moved is None else [found, self.moved]

        def row(name: str, unit: str, form: Callable[[Diagnosis], str]) -> list[str]:
            return [name, *map(form, sides), unit]

        rows = [] if self.moved is None else [["", "as it is", "accelerate", ""]]
        rows += [
            row("the loop", "images/s", _rate),
            row(
                "its share",
                f"of the ceiling of {rate_text(self.ceiling)} images/s, the step on one resident "
                "batch",
                lambda side: f"{side.images_per_second / self.ceiling:.0%}",
            ),
            row(
                "the loader",
                "images/s, without a step",
                lambda side: rate_text(side.loader_images_per_second),
            ),
            row("a step", "ms", lambda side: f"{side.step_ms:,.1f}"),
            row("waiting", "ms of it for the loader", lambda side: f"{side.wait_ms:,.1f}"),
            row("a copy", "ms to the device", lambda side: f"{side.copy_ms:,.1f}"),
            row(
                "idle",
                "of the workers' time, without a step",
                lambda side: f"{side.reading_share:.0%}",
            ),
        ]
        empty = [""] * (len(sides) - 1)
        for word, changes in (("change", self.changes), ("tried", self.tried)):
            for each in changes:
                name = f"{word} {each.setting}"
                rows.append([name, _rate(each), *empty, f"images/s, {each.gain:.2f} x"])
        end = []
        if not self.changes and found.bound != "model":
            tried = "no change that was tried helps" if self.tried else "no change was tried"
            end = [f"{tried}; {BOUNDS[found.bound][1]}"]
        verdict = BOUNDS[found.bound][0].format(cores=self.cores)
        lines = [f"gpuprefetch doctor: {self.where}", f"verdict: {verdict}"]
        lines += [
            columns(rows, right=range(1, len(sides) + 1)),
            *end,
            *(f"note: {note}" for note in self.notes),
        ]
        return "\n".join(lines)

    def picture(self, path: str | Path) -> None:
        """Save where the time of a batch goes, in the loop's thread and in the workers."""
        sides = {"as it is": self.found}
        if self.moved is not None:
            sides["accelerate"] = self.moved
        bars = [bar for name, side in sides.items() for bar in self._bars(name, side)]
        verdict = BOUNDS[self.bound][0].format(cores=self.cores)
        draw_bars([self.where, verdict], bars).save(path)

    def _bars(self, name: str, side: Diagnosis) -> Iterator[Bar]:
        images = side.images_per_second * side.step_ms / 1000  # of a batch
        alone = 1000 * images / self.ceiling
        computing = side.step_ms - side.wait_ms
        slower = max(computing - alone, 0.0)
        parts = [
            Part("waiting for the loader", side.wait_ms, "#ff9500"),
            Part("the step", computing - slower, "#34c759"),
            Part("the step, slower than alone", slower, "#a0a0a0"),
        ]
        yield Bar(f"the loop, {name}", parts)
        loading = 1000 * images / side.loader_images_per_second
        idle = side.reading_share * loading
        parts = [Part("busy", loading - idle, "#0a84ff"), Part("idle", idle, "#d0d0d0")]
        yield Bar(f"the workers without a step, {name}", parts)


def _rate(measured: Diagnosis | Change) -> str:
    return rate_text(measured.images_per_second)


def doctor(
    loader: Loader,
    step: Step,
    *,
    device: torch.device | str | int | None = None,
    seconds: float = 3.0,
    tune: bool = True,
) -> DoctorReport:
    """Say what a training loop is bound by, and which setting to change.

    A ``DataLoader`` over image files is also measured as ``accelerate`` moves it, in a second
    column. All of it needs 6 to 10 times ``seconds``, longer where a few steps take longer than
    ``seconds``, and starts the loader's workers as often.
    Progress goes to stderr: a bar, or a line every ten seconds where there is no terminal.
    Meanwhile the model is trained, and samplers advance.

    Args:
        loader: a ``DataLoader`` or a :class:`DataPrefetcher`; left as it is.
        step: one training step; it is called with a batch whose tensors are on the device.
        device: as for :class:`DataPrefetcher`; a prefetcher's own by default.
        seconds: length of each measurement.
        tune: whether to try other settings, and ``accelerate``.

    Returns:
        The report: ``print`` it, or read ``bound`` and ``changes``.

    Raises:
        TypeError: if ``loader`` or ``step`` is something else.
        ValueError: if the loader has no batch, or ``seconds`` is not positive.

    Example:
        >>> def step(batch):
        ...     images, target = batch
        ...     loss_fn(model(images), target).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> print(gpuprefetch.doctor(loader, step))
    """
    inner = loader.wrapped if isinstance(loader, DataPrefetcher) else loader
    if not isinstance(inner, DataLoader):
        raise TypeError(
            "doctor takes a DataLoader, or a DataPrefetcher around one, got "
            f"{type(inner).__name__}. Build one: doctor(DataLoader(dataset, batch_size=...), step)."
        )
    if not callable(step):
        raise TypeError(
            f"step must be callable with a batch, got {type(step).__name__}. Write the body of "
            "your loop as a function: def step(batch): ..."
        )
    if not seconds > 0:
        raise ValueError(f"seconds must be positive, got {seconds!r}.")
    if device is None and isinstance(loader, DataPrefetcher):
        device = loader.device
    with warnings.catch_warnings(), progress("doctor", 3) as bar:
        # About a loader that is not pinned, or more workers than cores.
        warnings.simplefilter("ignore", UserWarning)
        return _Clinic(step, resolve_device(device), seconds, bar).examine(loader, tune)


@dataclass(frozen=True, slots=True)
class Run:
    """What a measurement found."""

    rate: float  # images a second
    seconds: float  # of a step
    wait: float = 0.0  # the part of these that it waited for its batch
    reading: float = 0.0  # the share of the workers' time that they did not compute
    batch: Batch = None  # a full one


@dataclass(slots=True)
class _Taken:
    """The batches of one measurement, added up."""

    steps: int = 0
    seconds: float = 0.0
    images: int = 0
    wait: float = 0.0  # seconds in next(loader)
    batch: Batch = None  # one with the most images
    most: int = 0  # images in it

    def add(self, batch: Batch, waited: float) -> None:
        """Count a batch, for which the loop ``waited`` some seconds."""
        count = count_images(batch)
        self.steps += 1
        self.wait += waited
        self.images += count or 1
        if count >= self.most:  # an epoch's last batch may be a small one
            self.batch = batch
            self.most = count

    def end(self, seconds: float) -> None:
        """Note how long the measurement was."""
        self.seconds = seconds


def bound_of(
    alone: Run,
    ceiling: Run,
    loop: Run,
    *,
    copying: float,
    workers: int,
    cuda: bool,
    stats: dict[str, float] | None,
) -> str:
    """What a loop is bound by: the loader alone, the step on a resident batch, and both together.

    ``copying`` is seconds of a batch to the device, and ``stats`` are a prefetcher's, alone.
    """
    lost = loop.seconds - ceiling.seconds
    if loop.seconds < SMALL * ceiling.seconds:
        return "model"
    late = "reading" if alone.reading > 0.5 else "CPU decode"
    otherwise = "cores"
    if stats is not None:
        on_device = "GPU decode" if stats["gpu_images"] or not cuda else "transfer"
        late = on_device if stats["fetch_seconds"] < 0.5 * stats["seconds"] else late
        otherwise = on_device if cuda else "cores"
    elif cuda and copying > 0.3 * lost:
        otherwise = "transfer"
    # The loop does not wait for workers that are twice as fast. The time goes into its work on the
    # batches they sent: taking them in, and unmapping their memory.
    keeps_up = workers > 0 and alone.seconds < 0.5 * loop.seconds
    return late if loop.wait > 0.5 * lost and not keeps_up else otherwise


def is_doubtful(ceiling: float, loop: float, tried: Sequence[Change]) -> bool:
    """Whether a loop had more images/s than the step alone, which nothing can have."""
    return max([loop, *(change.images_per_second for change in tried)]) > SMALL * ceiling


def number_to_make(bound: str, tried: Sequence[Change]) -> int:
    """How many of the changes, the best first, are to be made: the first, if it helps, or none."""
    return int(bound != "model" and bool(tried) and tried[0].gain >= SMALL)


@dataclass
class _Clinic:
    step: Step
    device: torch.device
    seconds: float
    bar: Progress
    notes: list[str] = field(default_factory=list)

    def examine(self, loader: Loader, tune: bool) -> DoctorReport:
        probed = probe(loader)
        alone = self.run("the loader", probed, None)
        ceiling = self.run("the step", [to_device(alone.batch, self.device)], self.step)
        loop = self.run("the loop", probe(loader), self.step)
        found = self._diagnose(probed, alone, ceiling, loop)
        kind = "DataLoader"
        if isinstance(loader, DataPrefetcher):
            kind = "DataPrefetcher"
            bad = sorted({image.path or f"sample {image.index}" for image in probed.bad_images})
            if bad:
                self.notes.append(f"{len(bad)} bad files, such as {', '.join(bad[:NAMED])}")
        count = count_images(alone.batch)
        moved = self._move(loader, ceiling) if tune else None
        tried = self._try(loader, found) if tune else []
        if moved is not None:
            gain = moved.images_per_second / found.images_per_second
            tried.append(Change("accelerate(loader)", moved.images_per_second, gain))
            tried.sort(key=lambda change: -change.gain)
        if is_doubtful(ceiling.rate, loop.rate, tried):
            self.notes.append(
                "the step was slower alone than with a loader, so that other work came between: "
                f"measure for longer, with seconds={3 * self.seconds:g} or --seconds "
                f"{3 * self.seconds:g}"
            )
        self._note(loader, found, count)
        workers = loader.num_workers
        cores = usable_cores()
        where = f"{kind}, batches of {count}, {workers} worker{'s' * (workers != 1)}, "
        where += f"{self.device}, {cores} core{'s' * (cores != 1)}"
        helps = number_to_make(found.bound, tried)
        return DoctorReport(
            found, ceiling.rate, tried[:helps], tried[helps:], moved, self.notes, where, cores
        )

    def _diagnose(self, probed: Loader, alone: Run, ceiling: Run, loop: Run) -> Diagnosis:
        """What was measured of a loader: ``probed`` is the copy that ran alone."""
        stats = probed.stats.as_dict() if isinstance(probed, DataPrefetcher) else None
        copying = self._copy_seconds(alone.batch)
        bound = bound_of(
            alone,
            ceiling,
            loop,
            copying=copying,
            workers=probed.num_workers,
            cuda=self.device.type == "cuda",
            stats=stats,
        )
        return Diagnosis(
            bound,
            images_per_second=loop.rate,
            loader_images_per_second=alone.rate,
            step_ms=1000 * loop.seconds,
            wait_ms=1000 * loop.wait,
            copy_ms=1000 * copying,
            reading_share=alone.reading,
        )

    def _move(self, loader: Loader, ceiling: Run) -> Diagnosis | None:
        """The diagnosis of a plain loader that ``accelerate`` has moved."""
        if isinstance(loader, DataPrefetcher):
            return None
        try:
            plain = probe(loader, pin_memory=self.device.type == "cuda")
            moved = accelerate(plain, print_plan=False, device=self.device)
            self.bar.total += 2
            probed = probe(moved)
            alone = self.run("accelerate, the loader", probed, None)
            loop = self.run("accelerate, the loop", probe(moved), self.step)
        except (TypeError, UnsupportedTransformError, torch.OutOfMemoryError) as error:
            self.notes.append(f"accelerate(loader) could not be tried: {error}")
            return None
        return self._diagnose(probed, alone, ceiling, loop)

    def run(self, what: str, batches: Iterable[Batch], step: Step | None) -> Run:
        """Take batches for some seconds, after a warm-up that every worker has its part in."""
        self.bar.set_description_str(f"doctor: {what}")
        # They deliver in turns and in bursts: a window is a number of rounds.
        workers = getattr(batches, "num_workers", 0) or 1
        long = 3 * self.seconds
        loading = Workers()
        iterator = endless(batches)
        next(iterator)
        self._take(iterator, step, lambda n, t: n >= 2 + workers or (n > 0 and t > self.seconds))
        if isinstance(batches, DataPrefetcher):
            batches.stats.reset()
        busy = loading.busy_seconds()
        taken = self._take(
            iterator,
            step,
            lambda n, t: n >= 3 and t >= self.seconds and (n % workers == 0 or t >= long),
        )
        busy = loading.busy_seconds() - busy
        wait = taken.wait
        if isinstance(batches, DataPrefetcher):  # whose next() returns before the GPU has the batch
            wait = batches.stats.wait_seconds
        iterator.close()
        self.bar.update(1)
        return Run(
            rate=taken.images / taken.seconds,
            seconds=taken.seconds / taken.steps,
            wait=wait / taken.steps,
            reading=max(1 - busy / (workers * taken.seconds), 0.0) if busy else 0.0,
            batch=taken.batch,
        )

    def _take(
        self, batches: Iterator[Batch], step: Step | None, enough: Callable[[int, float], bool]
    ) -> _Taken:
        """Take batches until there is ``enough``, by steps and seconds."""
        taken = _Taken()
        steps = Steps(self.device)
        started = time.perf_counter()
        while not enough(taken.steps, time.perf_counter() - started):
            steps.throttle()
            self.bar.update(0)  # it may be time for a line
            asked = time.perf_counter()
            latest = next(batches)
            taken.add(latest, time.perf_counter() - asked)
            if step is not None:
                step(to_device(latest, self.device))
        self._synchronize()
        taken.end(time.perf_counter() - started)
        return taken

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _copy_seconds(self, batch: Batch) -> float:
        """Seconds of the quickest of three copies; 0 where the batch is on the device already."""
        if all(tensor.device == self.device for tensor in tensors(batch)):
            return 0.0

        def copy_once() -> None:
            to_device(batch, self.device)
            self._synchronize()

        return min(timeit.repeat(copy_once, number=1, repeat=3))

    def _try(self, loader: Loader, found: Diagnosis) -> list[Change]:
        """The settings that may help, the best first."""
        tried = []
        candidates = [*_candidates(loader, found, self.device)]
        self.bar.total += len(candidates)
        for setting, make in candidates:
            try:
                rate = self.run(setting, probe(make()), self.step).rate
            except (TypeError, UnsupportedTransformError, torch.OutOfMemoryError) as error:
                self.notes.append(f"{setting} could not be tried: {error}")
            else:
                tried.append(Change(setting, rate, rate / found.images_per_second))
        return sorted(tried, key=lambda change: -change.gain)

    def _note(self, loader: Loader, found: Diagnosis, count: int) -> None:
        if slow := costs(loader, self.device, count):
            self.notes.append(slow)
        if isinstance(loader, DataPrefetcher):
            self.notes.append(f"encoded images are decoded by {loader.decoding}")
            # Not to be tried: it takes effect where the model is made. The default stream is 0.
            decodes = loader.decodes_on_gpu and found.bound == "GPU decode"
            if decodes and not torch.cuda.current_stream(self.device).cuda_stream:
                self.notes.append(_DEFAULT_STREAM)


def _candidates(
    loader: Loader, found: Diagnosis, device: torch.device
) -> Iterator[tuple[str, Callable[[], Loader]]]:
    """Settings that may help against what the loop is bound by, each with how to make it."""
    bound = found.bound
    workers = loader.num_workers
    cores = usable_cores()
    plain = not isinstance(loader, DataPrefetcher)

    def setting(name: str, value: object) -> tuple[str, Callable[[], Loader]]:
        return f"{name}={value}", partial(probe, loader, **{name: value})

    if bound == "reading":
        yield setting("num_workers", 4 * max(workers, 1))
    if bound in ("CPU decode", "GPU decode") and workers < cores:
        yield setting("num_workers", cores)
    if bound == "cores" and workers > 1:
        yield setting("num_workers", max(min(workers, cores) // 2, 1))
    if bound in ("transfer", "GPU decode") and not loader.pin_memory:
        yield setting("pin_memory", True)
    elif bound == "transfer" and plain:
        yield "DataPrefetcher(loader)", partial(DataPrefetcher, loader, device=device)
