"""The rate of a loop over batches: windows, waits and CPU time, from inside the child process."""

import collections
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch


def cpu_seconds() -> float:
    """User and system seconds of this process, its living descendants and those it waited for."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            parents[pid] = int(fields[1])
            ticks[pid] = sum(int(field) for field in fields[11:15])  # utime stime cutime cstime
    family, grown = {os.getpid()}, True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in family}
        grown = not children <= family
        family |= children
    return sum(ticks[pid] for pid in family) / os.sysconf("SC_CLK_TCK")


def quartiles(values: list[float]) -> dict[str, Any]:
    """Median and spread of the repeats, and the repeats themselves."""
    if len(values) == 1:
        values = values * 2
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3, "values": values}


class Marks:
    """Points in time on the device's own clock, so that a window needs no drained queue.

    A synchronize after each window would hand every loader the time to fill its queue unmeasured.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._points: list[Any] = []

    def add(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._points.append(event)
        else:
            self._points.append(time.perf_counter())

    def seconds(self) -> list[float]:
        pairs = zip(self._points, self._points[1:], strict=False)
        if self._cuda:
            return [start.elapsed_time(end) / 1000 for start, end in pairs]
        return [end - start for start, end in pairs]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def time_steps(
    batches: Iterable[Any], step: Callable[..., Any], *, device: str, windows: Iterable[int]
) -> list[float]:
    """Seconds of windows of so many steps each; the first one is the warm-up and left out."""
    iterator, throttle, marks = iter(batches), Throttle(device), Marks(device)
    for steps in windows:
        for _ in range(steps):
            throttle.wait()
            step(*next(iterator))
        marks.add()
    synchronize(device)
    return marks.seconds()


def measure(
    batches: Iterable[Any],
    step: Callable[..., Any],
    *,
    device: str,
    warmup: float,
    seconds: float,
    repeats: int,
    warmup_steps: int = 0,
    workers: int = 0,
) -> dict[str, Any]:
    """Rate of ``step(*batch)`` over an endless loader.

    Args:
        batches: yields ``(images, target)``; must not end before the time is over.
        step: called with each batch; its results are not synchronized.
        device: ``"cuda"`` or ``"cpu"``.
        warmup: seconds after the first step, which compiles.
        seconds: measured, in ``repeats`` windows.
        repeats: windows that median and spread are taken over.
        warmup_steps: taken at least, to empty what was prefetched during the compilation.
        workers: of the loader. A window has a multiple of so many steps: workers that are slower
            than the loop hand over a batch each, one behind the other, and then none for a while.
    """
    iterator, throttle = iter(batches), Throttle(device)
    first = next(iterator)
    step(*first)
    synchronize(device)
    facts = _batch_facts(first)
    del first
    warmup_end, taken = time.perf_counter() + warmup, 0
    while time.perf_counter() < warmup_end or taken < warmup_steps:
        throttle.wait()
        step(*next(iterator))
        taken += 1

    synchronize(device)
    marks, images, steps, waits = Marks(device), [], [], []
    cpu_before, begin = cpu_seconds(), time.monotonic()
    marks.add()
    for _ in range(repeats):
        window = _window(iterator, step, throttle, seconds / repeats, max(workers, 1))
        marks.add()
        for column, value in zip((images, steps, waits), window, strict=True):
            column.append(value)
    synchronize(device)
    end, cpu = time.monotonic(), cpu_seconds() - cpu_before
    durations = marks.seconds()
    return {
        "images_per_second": quartiles([n / s for n, s in zip(images, durations, strict=True)]),
        "images_per_second_overall": sum(images) / (end - begin),
        "step_ms": statistics.median([1000 * s / n for s, n in zip(durations, steps, strict=True)]),
        "wait_ms_per_step": statistics.median(
            [1000 * w / n for w, n in zip(waits, steps, strict=True)]
        ),
        "cpu_seconds_per_1000_images": 1000 * cpu / sum(images),
        "images": sum(images),
        "first_batch": facts,
        "measured": [begin, end],
    }


class Throttle:
    """Keeps the host at most two steps ahead of the device.

    Then a wait in ``next`` is a wait for data, and no loader's batches pile up behind queued steps.
    """

    def __init__(self, device: str) -> None:
        self._cuda, self._steps = device == "cuda", collections.deque[Any]()

    def wait(self) -> None:
        if not self._cuda:
            return
        self._steps.append(torch.cuda.Event(blocking=True))
        self._steps[-1].record()
        if len(self._steps) > 2:
            self._steps.popleft().synchronize()


def _window(
    iterator: Iterator[Any],
    step: Callable[..., Any],
    throttle: Throttle,
    seconds: float,
    multiple: int,
) -> tuple[int, int, float]:
    """Images, steps, a ``multiple`` of so many, and seconds in ``next`` of one window."""
    images = steps = 0
    waited, deadline = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < deadline or steps % multiple:
        throttle.wait()
        begin = time.perf_counter()
        batch = next(iterator)
        waited += time.perf_counter() - begin
        step(*batch)
        images += len(batch[1])
        steps += 1
        del batch
    return images, steps, waited


def _batch_facts(batch: tuple[Any, Any]) -> dict[str, Any] | None:
    """What the model got: the same on every side, or the comparison says nothing."""
    images, target = batch
    if not isinstance(images, torch.Tensor):
        return None  # a stage that makes no batch
    if not images.is_contiguous(memory_format=torch.channels_last):
        raise ValueError(f"images must be channels_last, got {images.stride() = }")
    values = images.cpu().float()  # on the GPU it would leave its mark in the peak memory
    return {
        "shape": list(images.shape),
        "dtype": str(images.dtype),
        "device": images.device.type,
        "mean": round(values.mean().item(), 3),
        "std": round(values.std().item(), 3),
        "target": f"{list(target.shape)} {target.dtype} {target.device.type}",
    }
