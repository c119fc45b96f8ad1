"""doctor: what holds a training loop up, and which settings help, both measured."""

from __future__ import annotations

import contextlib
import copy
import time
import timeit
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from gpuprefetch import connections
from gpuprefetch.core.nested import tensors, to_device
from gpuprefetch.core.source import changed, sampler_of
from gpuprefetch.core.stats import Stats
from gpuprefetch.core.streams import on_default_stream, throttle
from gpuprefetch.images.decode import decoded_by
from gpuprefetch.images.share import Balancer, usable_cores
from gpuprefetch.images.stage import count_images
from gpuprefetch.migrate.accelerate import accelerate
from gpuprefetch.prefetcher import DataPrefetcher, _resolve_device
from gpuprefetch.transforms.known import UnsupportedTransformError

# Below this gain two runs are called equal: what a few seconds on a shared machine can tell apart.
SMALL = 1.1

Step = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of settings that was tried.

    Attributes:
        setting: what was changed, on top of the changes before it.
        images_per_second: with it.
        gain: ratio to the rate before it.
    """

    setting: str
    images_per_second: float
    gain: float

    def __str__(self) -> str:
        return f"{self.setting}: {self.images_per_second:,.0f} images/s, {self.gain:.2f} x"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """How one loader and one step go together.

    Attributes:
        bound: "reading", "CPU decode", "transfer", "GPU decode" or "model".
        images_per_second: of the loop.
        loader_images_per_second: of the loader, with no step behind it.
        step_ms: of the loop, from one batch to the next.
        wait_ms: of them, in ``next(loader)``.
        copy_ms: of a batch to the device, alone; 0 for a prefetcher, which copies ahead of time.
        busy_share: of the workers' time, spent in the dataset and in collate, the loader alone.
        reading_share: of that, not spent computing: waiting for files.
    """

    bound: str
    images_per_second: float
    loader_images_per_second: float
    step_ms: float
    wait_ms: float
    copy_ms: float
    busy_share: float
    reading_share: float


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What :func:`doctor` found; ``print`` it.

    Attributes:
        found: the diagnosis of the loader as it came.
        ceiling: images/s of the step on one resident batch.
        changes: that helped, one on top of the other.
        tried: without a gain.
        after: the diagnosis with all changes; None without any.
        notes: what decodes encoded images, and what could not be tried.
        where: loader, device and cores.
        workers: of the loader as it came.
    """

    found: Diagnosis
    ceiling: float
    changes: list[Change]
    tried: list[Change]
    after: Diagnosis | None
    notes: list[str]
    where: str
    workers: int

    @property
    def bound(self) -> str:
        """Of the loop as it came: "reading", "CPU decode", "transfer", "GPU decode" or "model"."""
        return self.found.bound

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        found, rate = self.found, self.found.images_per_second
        loading = "its workers are" if self.workers else "the loop itself, for want of workers, is"
        lines = [
            f"gpuprefetch doctor: {self.where}",
            f"verdict: {_VERDICTS[found.bound]}",
            f"  the loop     {rate:9,.0f} images/s, {rate / self.ceiling:.0%} of the ceiling",
            f"  the ceiling  {self.ceiling:9,.0f} images/s, the step on one resident batch",
            f"  the loader   {found.loader_images_per_second:9,.0f} images/s, with no step",
            f"  a step takes {found.step_ms:,.1f} ms, {found.wait_ms:,.1f} of them waiting for the "
            f"loader; a copy to the device {found.copy_ms:,.1f} ms",
            f"  {loading} {found.busy_share:.0%} busy, {found.reading_share:.0%} of that "
            "waiting for files",
        ]
        lines += [f"change {change}" for change in self.changes]
        if self.after:
            share = self.after.images_per_second / self.ceiling
            lines.append(f"then {share:.0%} of the ceiling: {_VERDICTS[self.after.bound]}")
        elif found.bound != "model":
            tried = "nothing was tried that" if self.tried else "it was not tried what"
            tried += " helps; "
            lines.append(tried + _ADVICE[found.bound])
        lines += [f"tried {change}" for change in self.tried]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


_VERDICTS = {
    "reading": "bound by reading: the workers wait for files.",
    "CPU decode": "bound by CPU decode: the loop waits for workers that compute, or for cores.",
    "transfer": "bound by transfer: the copies to the device hold the loop up.",
    "GPU decode": "bound by GPU decode: decoding and transforms on the device are late.",
    "model": "bound by the model: a faster loader gains nothing.",
}
_ADVICE = {
    "reading": "a faster or local disk, smaller files, or tar shards read in sequence would.",
    "CPU decode": "more workers or cores, smaller files, or fewer transforms in them would.",
    "transfer": "smaller batches to copy would: uint8 in place of float, or encoded images.",
    "GPU decode": "smaller files, fewer transforms on the device, or more CPU cores would.",
}

_DEFAULT_STREAM = (
    "the step runs on CUDA's default stream, whose launches wait for those of the prefetch thread. "
    "It may be faster on a stream of its own: torch.cuda.set_stream(torch.cuda.Stream()) before "
    "the model is made."
)


def doctor(
    loader: Any, step: Step, *, device: Any = None, seconds: float = 3.0, tune: bool = True
) -> DoctorReport:
    """Say what a training loop is bound by, and which one or two settings to change.

    The step is run on one resident batch (the ceiling) and behind the loader, the loader is run
    without it, and then with other settings. That takes 4 to 10 times ``seconds``, and starts the
    loader's workers as often. The model is trained meanwhile, and samplers are drawn from.

    Args:
        loader: a ``DataLoader`` or a :class:`DataPrefetcher`; left as it is.
        step: called with each batch, its tensors on the device: one training step.
        device: as for :class:`DataPrefetcher`; a prefetcher's own by default.
        seconds: of each measurement.
        tune: whether other settings are tried.

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
            f"doctor takes a DataLoader or a DataPrefetcher around one, got {type(inner).__name__}."
        )
    if not callable(step):
        raise TypeError(f"step must be callable with a batch, got {type(step).__name__}.")
    if not seconds > 0:
        raise ValueError(f"seconds must be positive, got {seconds!r}.")
    if device is None and isinstance(loader, DataPrefetcher):
        device = loader.device
    clinic = _Clinic(step, _resolve_device(device), seconds)
    with warnings.catch_warnings():  # about a loader that is not pinned, or more workers than cores
        warnings.simplefilter("ignore", UserWarning)
        return clinic.examine(loader, tune)


@dataclass(frozen=True, slots=True)
class _Run:
    rate: float  # images a second
    steps: int
    seconds: float  # of a step
    wait: float  # of a step
    batch: Any


@dataclass
class _Clinic:
    step: Step
    device: torch.device
    seconds: float
    ceiling: _Run | None = None
    encoded: bool = False  # whether the batches have encoded images
    tried: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def examine(self, loader: Any, tune: bool) -> DoctorReport:
        found = now = self._diagnose(loader)
        assert self.ceiling is not None
        kind = "DataPrefetcher" if isinstance(loader, DataPrefetcher) else "DataLoader"
        workers = loader.num_workers
        where = (
            f"{kind}, batches of {count_images(self.ceiling.batch)}, {workers} "
            f"worker{'s' * (workers != 1)}, {self.device}, {usable_cores()} cores"
        )
        changes: list[Change] = []
        while tune and len(changes) < 2 and now.bound != "model":
            better = self._best_change(loader, now)
            if better is None:
                break
            change, loader = better
            changes.append(change)
            now = self._diagnose(loader)
        decodes = isinstance(loader, DataPrefetcher) and loader._pipeline.decoder is not None
        if self.encoded and isinstance(loader, DataPrefetcher):
            by = decoded_by(loader._pipeline.decoder, loader.device)
            self.notes.append(f"encoded images are decoded by {by}")
        # Neither can be tried: they take effect when CUDA starts, and where the model is made.
        if decodes and (reason := connections.shortage()):
            self.notes.append(reason)
        if decodes and found.bound == "GPU decode" and on_default_stream(self.device):
            self.notes.append(_DEFAULT_STREAM)
        tried = sorted(self.tried, key=lambda change: -change.gain)
        after = now if changes else None
        return DoctorReport(
            found, self.ceiling.rate, changes, tried, after, self.notes, where, workers
        )

    def _diagnose(self, loader: Any) -> Diagnosis:
        workers = max(loader.num_workers, 1)
        times = torch.zeros((workers, 2), dtype=torch.float64).share_memory_()
        probed = _with(loader, times)
        alone = self._run(probed, None, times)
        in_dataset, not_waiting = times.sum(0).tolist()
        reading = max(in_dataset - not_waiting, 0.0) / (in_dataset or 1.0)
        if self.ceiling is None:
            self.ceiling = self._run([to_device(alone.batch, self.device)], self.step)
        loop = self._run(_with(loader), self.step)
        copying = self._copy_seconds(alone.batch)

        lost = loop.seconds - self.ceiling.seconds
        late = "reading" if reading > 0.5 else "CPU decode"
        if isinstance(loader, DataPrefetcher):
            self.encoded = probed.stats.gpu_images + probed.stats.cpu_images > 0
            on_device = "GPU decode" if probed.stats.gpu_images else "transfer"
            if probed.stats.fetch_seconds < 0.5 * probed.stats.seconds:
                late = on_device if self.device.type == "cuda" else "GPU decode"
        else:
            on_device = "transfer" if copying > 0.3 * lost else "CPU decode"
        # Workers that are twice as fast as the loop are not what it waits for, but its own work on
        # the batches they sent: taking them in, and unmapping their memory.
        keeps_up = alone.seconds < 0.5 * loop.seconds
        if loop.seconds < SMALL * self.ceiling.seconds:
            bound = "model"
        elif loop.wait > 0.5 * lost and not keeps_up:
            bound = late
        else:  # the batches come in time, and the step is slower behind them than without
            bound = on_device if self.device.type == "cuda" else "CPU decode"
        return Diagnosis(
            bound,
            loop.rate,
            alone.rate,
            1000 * loop.seconds,
            1000 * loop.wait,
            1000 * copying,
            min(in_dataset / (workers * alone.seconds * alone.steps), 1.0),
            reading,
        )

    def _run(
        self, batches: Iterable[Any], step: Step | None, times: torch.Tensor | None = None
    ) -> _Run:
        """Take batches for some seconds, behind a warm-up that every worker has its part in."""
        # They deliver in turns and in bursts: a window is a number of rounds.
        workers = getattr(batches, "num_workers", 0) or 1
        images, steps, wait = 0, -3 - workers, 0.0
        iterator, queued = _endless(batches), deque[torch.cuda.Event]()
        started, first = time.perf_counter(), 0.0
        while (
            steps < 3
            or (elapsed := time.perf_counter() - started) < self.seconds
            or (steps % workers and elapsed < 3 * self.seconds)
        ):
            throttle(queued, self.device)
            asked = time.perf_counter()
            batch = next(iterator)
            wait += time.perf_counter() - asked
            first = first or time.perf_counter()
            images += count_images(batch) or 1
            if step is not None:
                step(to_device(batch, self.device))
            steps += 1
            if steps <= 0 and (not steps or time.perf_counter() > first + self.seconds):
                self._synchronize()
                started, images, steps, wait = time.perf_counter(), 0, 0, 0.0
                if times is not None:
                    times.zero_()
                if isinstance(batches, DataPrefetcher):
                    batches.stats.reset()
        self._synchronize()
        seconds = time.perf_counter() - started
        iterator.close()
        return _Run(images / seconds, steps, seconds / steps, wait / steps, batch)

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

    def _best_change(self, loader: Any, now: Diagnosis) -> tuple[Change, Any] | None:
        made: list[tuple[Change, Any]] = []
        for setting, make in self._candidates(loader, now):
            try:
                changed = make()
                rate = self._run(_with(changed), self.step).rate
            except (TypeError, UnsupportedTransformError, torch.OutOfMemoryError) as error:
                self.notes.append(f"{setting} could not be tried: {error}")
                continue
            made.append((Change(setting, rate, rate / now.images_per_second), changed))
        made.sort(key=lambda one: one[0].gain)
        best = made.pop() if made and made[-1][0].gain >= SMALL else None
        self.tried += [change for change, _ in made]
        return best

    def _candidates(self, loader: Any, now: Diagnosis) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Settings that may help against what the loop is bound by, each with how to make it."""
        workers, cores, device = loader.num_workers, usable_cores(), self.device
        plain = not isinstance(loader, DataPrefetcher)
        gpu_decodes = not plain and loader._pipeline.decoder is not None

        def setting(name: str, value: Any) -> tuple[str, Callable[[], Any]]:
            return f"{name}={value}", partial(_with, loader, **{name: value})

        if now.bound in ("reading", "CPU decode"):
            more = 4 * max(workers, 1) if now.bound == "reading" else cores
            if more > workers:
                yield setting("num_workers", more)
            if workers and now.loader_images_per_second > SMALL * now.images_per_second:
                yield setting("prefetch_factor", 2 * (loader.prefetch_factor or 2))
        if now.bound == "CPU decode" and plain and device.type == "cuda":
            pinned = _with(loader, pin_memory=True)
            yield "accelerate(loader)", partial(accelerate, pinned, print_plan=False, device=device)
        if now.bound in ("transfer", "GPU decode") and not loader.pin_memory:
            yield setting("pin_memory", True)
        elif now.bound == "transfer" and plain:
            yield "DataPrefetcher(loader)", partial(DataPrefetcher, loader, device=device)
        if now.bound == "GPU decode" and workers < cores:
            yield setting("num_workers", cores)
        if gpu_decodes and now.bound in ("CPU decode", "GPU decode"):
            for share in (0.0,) if now.bound == "CPU decode" else (0.0, 0.25, 0.5):
                yield setting("cpu_share", share)


def _with(
    loader: Any, times: torch.Tensor | None = None, *, cpu_share: float | None = None, **values: Any
) -> Any:
    """A copy of a loader whose epochs do not end, with other settings.

    ``times`` is ``(workers, 2)`` float64 in shared memory; it gets the seconds that each worker was
    in the dataset and in collate, and of them those it computed or waited for a core.
    """
    if isinstance(loader, DataPrefetcher):
        clone = copy.copy(loader)
        clone._loader = _with(loader._loader, times, **values)
        clone._resume = False
        share, before = loader._pipeline.packer.share.clone().share_memory_(), loader._balancer
        if cpu_share is not None:
            share.fill_(cpu_share)
        fixed = cpu_share is not None or before.chosen
        clone._balancer = Balancer(share, clone, fixed=fixed)
        packer = replace(loader._pipeline.packer, share=share)
        clone._pipeline = replace(loader._pipeline, packer=packer, bad_images={}, stats=Stats())
        clone.stats = clone._pipeline.stats
        return clone
    values["persistent_workers"] = False
    if values.get("num_workers") and loader.prefetch_factor is None:
        values["prefetch_factor"] = 2
    if not isinstance(loader.dataset, IterableDataset):
        name = sampler_of(loader)
        values[name] = _Again(getattr(loader, name))
    if times is not None:
        values["collate_fn"] = _Timed(loader.collate_fn, times)
        values["dataset"] = _Timed(loader.dataset, times)
    return changed(loader, **values)


def _endless(batches: Iterable[Any]) -> Generator[Any]:
    empty = False
    while not empty:
        empty = True
        for batch in batches:
            empty = False
            yield batch
    raise ValueError("the loader has no batch to measure: its dataset or sampler is empty.")


class _Again:
    """A sampler from the start again wherever it ends, so that no epoch's start is measured."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        return _endless(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


class _Timed:
    """A dataset, or a collate function, and where it spends its time. See :func:`_with`."""

    def __init__(self, inner: Any, times: torch.Tensor) -> None:
        self._inner, self._times = inner, times
        self._queued = _queued_seconds()

    def _call(self, fn: Callable[..., Any], *args: Any) -> Any:
        worker = get_worker_info()
        # In this process the other threads are not the dataset's.
        clock = time.thread_time if worker is None else time.process_time
        started, computed = time.perf_counter(), clock()
        try:
            return fn(*args)
        finally:
            spent = (time.perf_counter() - started, clock() - computed)
            self._times[0 if worker is None else worker.id] += torch.tensor(spent)

    def __call__(self, samples: Any) -> Any:
        batch, worker = self._call(self._inner, samples), get_worker_info()
        before, self._queued = self._queued, _queued_seconds()
        self._times[0 if worker is None else worker.id, 1] += max(self._queued - before, 0.0)
        return batch

    def __getitem__(self, index: Any) -> Any:
        return self._call(self._inner.__getitem__, index)

    def __iter__(self) -> Iterator[Any]:
        iterator, end = self._call(iter, self._inner), object()
        while (sample := self._call(next, iterator, end)) is not end:
            yield sample

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name in ("_inner", "_times"):  # while it is unpickled
            raise AttributeError(name)
        value = getattr(self._inner, name)
        return partial(self._call, value) if name == "__getitems__" else value


def _queued_seconds() -> float:
    """For how long this thread was ready to run without a core; 0 where the system is silent."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0
