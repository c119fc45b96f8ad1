"""doctor: what a training loop is bound by, and which setting helps, both measured.

It measures the loader alone, the step on one resident batch, and both together. The verdict follows
from these numbers alone. Settings that may help are then measured too.
"""

from __future__ import annotations

import time
import timeit
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from gpuprefetch.core.device import resolve_device
from gpuprefetch.core.nested import tensors, to_device
from gpuprefetch.core.report import Printed, columns, progress
from gpuprefetch.core.streams import throttle
from gpuprefetch.images.decode import decoded_by
from gpuprefetch.images.share import usable_cores
from gpuprefetch.images.stage import count_images
from gpuprefetch.insight.costs import costs
from gpuprefetch.insight.probe import Workers, endless, probe
from gpuprefetch.migrate.accelerate import accelerate
from gpuprefetch.policies.known import UnsupportedTransformError
from gpuprefetch.prefetcher import DataPrefetcher

# Below this gain two runs are called equal: what a few seconds on a shared machine can tell apart.
SMALL = 1.1
# Bad files that are named.
NAMED = 3

Step = Callable[[Any], Any]

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
        "more cores, fewer workers, or decoding on a GPU may help.",
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
    wait_ms: float  # the part of it spent in next(loader)
    copy_ms: float  # of a batch to the device; 0 for a prefetcher, which copies ahead of time
    # Of the workers' time without a step, the part not spent computing: waiting for files, or for
    # work if the device is late.
    reading_share: float


@dataclass(frozen=True, slots=True, repr=False)
class DoctorReport(Printed):
    """What :func:`doctor` found; ``print`` it.

    Attributes:
        found: the diagnosis of the loader as it came.
        ceiling: images/s of the step on one resident batch.
        changes: the setting that helps most, if one does. Call doctor again after the change.
        tried: the other settings, best first.
        notes: what decodes, what the transforms cost, bad files, and what could not be tried.
        where: loader, device and cores.
        cores: that this process may use.
    """

    found: Diagnosis
    ceiling: float
    changes: list[Change]
    tried: list[Change]
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
        found, waits = self.found, f"{self.found.wait_ms:,.1f} of them waiting for the loader"
        share = found.images_per_second / self.ceiling
        rows = [
            ("the loop", _rate(found), f"images/s, {share:.0%} of the ceiling"),
            ("the ceiling", f"{self.ceiling:,.0f}", "images/s, the step on one resident batch"),
            ("the loader", f"{found.loader_images_per_second:,.0f}", "images/s, without a step"),
            ("a step", f"{found.step_ms:,.1f}", f"ms, {waits}"),
            ("a copy", f"{found.copy_ms:,.1f}", "ms to the device"),
            ("idle", f"{found.reading_share:.0%}", "of the workers' time, without a step"),
            *((f"change {c.setting}", _rate(c), f"images/s, {c.gain:.2f} x") for c in self.changes),
            *((f"tried {c.setting}", _rate(c), f"images/s, {c.gain:.2f} x") for c in self.tried),
        ]
        end = []
        if not self.changes and found.bound != "model":
            tried = "no change that was tried helps" if self.tried else "no change was tried"
            end = [f"{tried}; {BOUNDS[found.bound][1]}"]
        verdict = BOUNDS[found.bound][0].format(cores=self.cores)
        lines = [f"gpuprefetch doctor: {self.where}", f"verdict: {verdict}"]
        lines += [columns(rows, right=[1]), *end, *(f"note: {note}" for note in self.notes)]
        return "\n".join(lines)


def _rate(measured: Diagnosis | Change) -> str:
    return f"{measured.images_per_second:,.0f}"


def doctor(
    loader: Any, step: Step, *, device: Any = None, seconds: float = 3.0, tune: bool = True
) -> DoctorReport:
    """Say what a training loop is bound by, and which setting to change.

    This takes 4 to 8 times ``seconds``, and starts the loader's workers as often. Progress goes to
    stderr. Meanwhile the model is trained, and samplers advance.

    Args:
        loader: a ``DataLoader`` or a :class:`DataPrefetcher`; left as it is.
        step: one training step; it is called with a batch whose tensors are on the device.
        device: as for :class:`DataPrefetcher`; a prefetcher's own by default.
        seconds: length of each measurement.
        tune: whether to try other settings.

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
    inner = loader._loader if isinstance(loader, DataPrefetcher) else loader
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
    """A measurement; ``reading`` is the share of the workers' time that they did not compute."""

    rate: float  # images a second
    seconds: float  # of a step
    wait: float = 0.0  # of these, in next(loader)
    reading: float = 0.0
    batch: Any = None  # a full one


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
    late, otherwise = "reading" if alone.reading > 0.5 else "CPU decode", "cores"
    if stats is not None:
        on_device = "GPU decode" if stats["gpu_images"] or not cuda else "transfer"
        late = on_device if stats["fetch_seconds"] < 0.5 * stats["seconds"] else late
        otherwise = on_device if cuda else "cores"
    elif cuda and copying > 0.3 * lost:
        otherwise = "transfer"
    # Workers that are twice as fast as the loop are not what it waits for, but its own work on the
    # batches they sent: taking them in, and unmapping their memory.
    keeps_up = workers > 0 and alone.seconds < 0.5 * loop.seconds
    return late if loop.wait > 0.5 * lost and not keeps_up else otherwise


@dataclass
class _Clinic:
    step: Step
    device: torch.device
    seconds: float
    bar: Any
    notes: list[str] = field(default_factory=list)

    def examine(self, loader: Any, tune: bool) -> DoctorReport:
        probed, kind, stats = probe(loader), "DataLoader", None
        alone = self.run("the loader", probed, None)
        ceiling = self.run("the step", [to_device(alone.batch, self.device)], self.step)
        loop = self.run("the loop", probe(loader), self.step)
        copying, cuda = self._copy_seconds(alone.batch), self.device.type == "cuda"
        if isinstance(loader, DataPrefetcher):
            kind, stats = "DataPrefetcher", probed.stats.as_dict()
            bad = sorted({image.path or f"sample {image.index}" for image in probed.bad_images})
            if bad:
                self.notes.append(f"{len(bad)} bad files, such as {', '.join(bad[:NAMED])}")
        count, workers, cores = count_images(alone.batch), loader.num_workers, usable_cores()
        bound = bound_of(
            alone, ceiling, loop, copying=copying, workers=workers, cuda=cuda, stats=stats
        )
        step, wait, copy = 1000 * loop.seconds, 1000 * loop.wait, 1000 * copying
        found = Diagnosis(bound, loop.rate, alone.rate, step, wait, copy, alone.reading)
        tried = self._try(loader, found) if tune else []
        self._note(loader, found, count)
        where = f"{kind}, batches of {count}, {workers} worker{'s' * (workers != 1)}, "
        where += f"{self.device}, {cores} core{'s' * (cores != 1)}"
        helps = int(bool(tried) and tried[0].gain >= SMALL)
        return DoctorReport(
            found, ceiling.rate, tried[:helps], tried[helps:], self.notes, where, cores
        )

    def run(self, what: str, batches: Any, step: Step | None) -> Run:
        """Take batches for some seconds, after a warm-up that every worker has its part in."""
        self.bar.set_description_str(f"doctor: {what}")
        # They deliver in turns and in bursts: a window is a number of rounds.
        workers, long = getattr(batches, "num_workers", 0) or 1, 3 * self.seconds
        loading, iterator = Workers(), endless(batches)
        next(iterator)
        self._take(iterator, step, lambda n, t: n >= 2 + workers or (n > 0 and t > self.seconds))
        if isinstance(batches, DataPrefetcher):
            batches.stats.reset()
        busy = loading.busy_seconds()
        steps, seconds, images, wait, batch = self._take(
            iterator,
            step,
            lambda n, t: n >= 3 and t >= self.seconds and (n % workers == 0 or t >= long),
        )
        busy = loading.busy_seconds() - busy
        iterator.close()
        self.bar.update(1)
        reading = max(1 - busy / (workers * seconds), 0.0) if busy else 0.0
        return Run(images / seconds, seconds / steps, wait / steps, reading, batch)

    def _take(
        self, batches: Iterator[Any], step: Step | None, enough: Callable[[int, float], bool]
    ) -> tuple[int, float, int, float, Any]:
        """Steps, seconds, images and seconds of waiting until there is enough; a full batch."""
        steps, images, most, wait, batch = 0, 0, 0, 0.0, None
        queued, started = deque[torch.cuda.Event](), time.perf_counter()
        while not enough(steps, time.perf_counter() - started):
            throttle(queued, self.device)
            asked = time.perf_counter()
            latest = next(batches)
            wait += time.perf_counter() - asked
            count = count_images(latest)
            images += count or 1
            if step is not None:
                step(to_device(latest, self.device))
            if count >= most:  # an epoch's last batch may be a small one
                batch, most = latest, count
            steps += 1
        self._synchronize()
        return steps, time.perf_counter() - started, images, wait, batch

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _copy_seconds(self, batch: Any) -> float:
        """The quickest of three copies; 0 where the batch is on the device already."""
        if all(tensor.device == self.device for tensor in tensors(batch)):
            return 0.0

        def copy_once() -> None:
            to_device(batch, self.device)
            self._synchronize()

        return min(timeit.repeat(copy_once, number=1, repeat=3))

    def _try(self, loader: Any, found: Diagnosis) -> list[Change]:
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

    def _note(self, loader: Any, found: Diagnosis, count: int) -> None:
        if slow := costs(loader, self.device, count):
            self.notes.append(slow)
        if isinstance(loader, DataPrefetcher):
            decoder = loader._pipeline.decoding.decoder
            self.notes.append(f"encoded images are decoded by {decoded_by(decoder, loader.device)}")
            # Not to be tried: it takes effect where the model is made. The default stream is 0.
            decodes = decoder and found.bound == "GPU decode"
            if decodes and not torch.cuda.current_stream(self.device).cuda_stream:
                self.notes.append(_DEFAULT_STREAM)


def _candidates(
    loader: Any, found: Diagnosis, device: torch.device
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Settings that may help against what the loop is bound by, each with how to make it."""
    bound, workers, cores = found.bound, loader.num_workers, usable_cores()
    plain = not isinstance(loader, DataPrefetcher)

    def setting(name: str, value: Any) -> tuple[str, Callable[[], Any]]:
        return f"{name}={value}", partial(probe, loader, **{name: value})

    if bound == "reading":
        yield setting("num_workers", 4 * max(workers, 1))
    if bound in ("CPU decode", "GPU decode") and workers < cores:
        yield setting("num_workers", cores)
    if bound == "cores" and workers > 1:
        yield setting("num_workers", max(min(workers, cores) // 2, 1))
    if bound in ("CPU decode", "cores") and plain and device.type == "cuda":
        moved = probe(loader, pin_memory=True)
        yield "accelerate(loader)", partial(accelerate, moved, print_plan=False, device=device)
    if bound in ("transfer", "GPU decode") and not loader.pin_memory:
        yield setting("pin_memory", True)
    elif bound == "transfer" and plain:
        yield "DataPrefetcher(loader)", partial(DataPrefetcher, loader, device=device)
