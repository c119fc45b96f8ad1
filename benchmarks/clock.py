"""The rate of a loop over batches: windows, waits and CPU time, from inside the child process."""

import contextlib
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# "step": the loop waits for the step before it. "item": it reads the loss of every step.
LOOPS = ["step", "item"]
# Settled: the rates of so many windows of so many seconds, one after the other, are this close.
SETTLED_WINDOWS = 3
SETTLED_SECONDS = 1.0
SETTLED_WITHIN = 0.03


def cpu_seconds() -> float:
    """User and system seconds of this process, its living descendants and those it waited for."""
    parents = {}
    ticks = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            parents[pid] = int(fields[1])
            ticks[pid] = sum(int(field) for field in fields[11:15])  # utime stime cutime cstime
    family = {os.getpid()}
    grown = True
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


def stands_still(rates: list[float]) -> bool:
    """Whether the rates of the latest windows are so close that a loop has settled."""
    latest = rates[-SETTLED_WINDOWS:]
    return len(latest) == SETTLED_WINDOWS and max(latest) <= (1 + SETTLED_WITHIN) * min(latest)


class Loop:
    """Training steps on the batches of an iterator.

    Args:
        iterator: of ``(images, target)``.
        step: called with each batch; returns the loss, or None.
        device: ``"cuda"`` or ``"cpu"``.
        kind: one of ``LOOPS``.
        multiple: of so many steps is a window. Workers that are slower than the loop hand over a
            batch each, one after the other, and then none for a while.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        step: Callable[..., Any],
        device: str,
        kind: str = "step",
        multiple: int = 1,
    ) -> None:
        self._iterator = iterator
        self._step = step
        self._multiple = max(multiple, 1)
        self._events = deque[Any]() if device == "cuda" and kind == "step" else None
        self._reads_loss = kind == "item"
        self.received = 0.0  # when the last batch was there, as time.perf_counter counts

    def take(self) -> tuple[int, float]:
        """One step: its images, and the seconds in ``next``."""
        begin = time.perf_counter()
        batch = next(self._iterator)
        self.received = time.perf_counter()
        loss = self._step(*batch)
        if self._reads_loss and loss is not None:
            loss.item()
        if self._events is not None:  # the host goes on when the step before has ended
            self._events.append(torch.cuda.Event(blocking=True))
            self._events[-1].record()
            if len(self._events) > 1:
                self._events.popleft().synchronize()
        return len(batch[1]), self.received - begin

    def window(self, seconds: float) -> tuple[int, int, float]:
        """Images, steps and seconds in ``next``."""
        images = steps = 0
        waits = 0.0
        deadline = time.perf_counter() + seconds
        while steps == 0 or time.perf_counter() < deadline or steps % self._multiple:
            count, waited = self.take()
            images += count
            steps += 1
            waits += waited
        return images, steps, waits

    def settle(self, least: float, most: float) -> dict[str, Any]:
        """Go on until the rate stands still: for ``least`` to ``most`` seconds."""
        begin = time.perf_counter()
        rates: list[float] = []
        while True:
            start = time.perf_counter()
            images, _, _ = self.window(min(SETTLED_SECONDS, most))
            rates.append(images / (time.perf_counter() - start))
            settled = stands_still(rates)
            took = time.perf_counter() - begin
            if took >= most or (settled and took >= least):
                return {"settled": settled, "settle_seconds": took}


def measure(
    batches: Iterable[Any],
    step: Callable[..., Any],
    *,
    device: str,
    loops: list[str],
    settle: tuple[float, float],
    seconds: float,
    repeats: int,
    multiple: int = 1,
    facts: Callable[[Any], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Rate of ``step(*batch)`` over an endless loader, in one loop after the other.

    Args:
        batches: yields ``(images, target)``; must not end before the time is over. The number of
            images is ``len(target)``.
        step: called with each batch; returns the loss, or None.
        device: ``"cuda"`` or ``"cpu"``.
        loops: of ``LOOPS``.
        settle: seconds before each is measured, at least and at most.
        seconds: measured, in ``repeats`` windows.
        repeats: windows that median and spread are taken over.
        multiple: see :class:`Loop`.
        facts: what is noted of the first batch; None is :func:`batch_facts`.
    """
    iterator = iter(batches)
    first = next(iterator)
    step(*first)  # compiles
    synchronize(device)
    noted = (facts or batch_facts)(first)
    del first
    found = {}
    for kind in loops:
        loop = Loop(iterator, step, device, kind, multiple)
        settled = loop.settle(*settle)
        found[kind] = {**settled, **_measured(loop, device, seconds, repeats)}
    return {"first_batch": noted, "loops": found}


def _measured(loop: Loop, device: str, seconds: float, repeats: int) -> dict[str, Any]:
    synchronize(device)
    marks = Marks(device)
    windows = []
    cpu_before = cpu_seconds()
    begin = time.monotonic()
    marks.add()
    for _ in range(repeats):
        windows.append(loop.window(seconds / repeats))
        marks.add()
    synchronize(device)
    end = time.monotonic()
    cpu = cpu_seconds() - cpu_before
    images, steps, waits = zip(*windows, strict=True)
    durations = marks.seconds()
    return {
        "images_per_second": quartiles([n / s for n, s in zip(images, durations, strict=True)]),
        "images_per_second_overall": sum(images) / (end - begin),
        "wait_ms_per_step": 1000 * sum(waits) / sum(steps),
        "cpu_seconds_per_1000_images": 1000 * cpu / sum(images),
        "images": sum(images),
    }


@dataclass(frozen=True)
class Pass:
    """One pass over a loader, from the end of what was before it.

    ``gap`` is the time to its first batch. ``edge`` is what it costs beyond its steps at the rate
    of its second half, in seconds:

        20 steps in 1.10 s, the last 10 of them in 0.50 s:  edge = 1.10 - 20 * 0.05 = 0.10
    """

    images: int
    steps: int
    seconds: float
    gap: float
    edge: float


def run_pass(batches: Iterable[Any], step: Callable[..., Any], device: str, began: float) -> Pass:
    """All batches of a loader; ``began`` is when the pass before it ended."""
    loop = Loop(iter(batches), step, device)
    images = 0
    first = began
    ends: list[float] = []
    with contextlib.suppress(StopIteration):
        while True:
            count, _ = loop.take()
            images += count
            if not ends:
                first = loop.received
            ends.append(time.perf_counter())
    if not ends:
        raise ValueError("the loader gave no batch; give it more --files than --batch-size")
    seconds = ends[-1] - began
    half = len(ends) // 2
    late = len(ends) - 1 - half
    edge = seconds - len(ends) * (ends[-1] - ends[half]) / late if late else first - began
    return Pass(images, len(ends), seconds, first - began, edge)


def measure_epochs(
    batches: Iterable[Any],
    step: Callable[..., Any],
    *,
    device: str,
    epochs: int,
    began: float,
    validate: Callable[[float], Pass] | None = None,
    first: bool = False,
) -> dict[str, Any]:
    """Rate over whole epochs with their edges, all but the first one, and what an edge costs.

    Args:
        batches: of an epoch, each time they are iterated.
        step: called with each batch.
        device: ``"cuda"`` or ``"cpu"``.
        epochs: to run.
        began: when the process was started, as ``time.time`` counts.
        validate: called after each epoch with the time of its end; it runs a pass of validation.
        first: the first epoch counts too, as from a cold page cache. The step is warm already.
    """
    trained: list[Pass] = []
    validated: list[Pass] = []
    before = time.time() - began  # of importing, and making loader and model
    ended = time.perf_counter()
    start = ended
    cpu_before = cpu_seconds()
    for epoch in range(epochs):
        trained.append(run_pass(batches, step, device, ended))
        ended = time.perf_counter()
        if validate is not None:
            validated.append(validate(ended))
            synchronize(device)  # its result is read
            ended = time.perf_counter()
        if epoch == 0 and not first:  # it warms up, and is left out
            synchronize(device)
            ended = time.perf_counter()
            start = ended
            cpu_before = cpu_seconds()
    synchronize(device)
    seconds = time.perf_counter() - start
    warm = 0 if first else 1
    kept = trained[warm:]
    passes = kept + validated[warm:]
    images = sum(each.images for each in passes)
    found = {
        "images_per_second": quartiles([each.images / each.seconds for each in kept]),
        "images_per_second_overall": images / seconds,
        "cpu_seconds_per_1000_images": 1000 * (cpu_seconds() - cpu_before) / images,
        "between_epochs_ms": 1000 * statistics.median(each.gap for each in kept),
        "edge_ms": 1000 * statistics.median(each.edge for each in kept),
        "epoch_seconds": [round(each.seconds, 4) for each in kept],
        "first_batch_seconds": before + trained[0].gap,
        "images": images,
    }
    if validated:
        kept = validated[warm:]
        found |= {
            "validation_seconds": [round(each.seconds, 4) for each in kept],
            "validation_images": kept[0].images,
            "validation_edge_ms": 1000 * statistics.median(each.edge for each in kept),
        }
    return found


def time_calls(
    run: Callable[[], Any], device: str, *, warmup: int, repeats: int
) -> dict[str, float]:
    """Median and spread of the time of one call, on a cold L2 cache.

    On a GPU the device sleeps while the call is queued, so ``median_ms`` is the time that the
    device needs, as where a loop queues ahead, plus whatever the host is slower than that. Work on
    other streams counts if the current stream waits for it. ``host_ms`` is the time until a call
    returns, on an idle device. Slow calls are repeated for five seconds, and ten times at least.
    """
    flush = torch.empty(256 << 20 if device == "cuda" else 0, dtype=torch.uint8, device=device)
    times: list[float] = []
    for _ in range(warmup + repeats):
        flush.zero_()
        synchronize(device)
        marks = Marks(device)
        if device == "cuda":
            torch.cuda._sleep(5_000_000)
        marks.add()
        run()
        marks.add()
        synchronize(device)
        times += [1e3 * seconds for seconds in marks.seconds()]
        if sum(times) > 5_000 and len(times) >= warmup + 10:
            break
    found = quartiles(times[warmup:])
    host = []
    for _ in range(len(times) - warmup):
        synchronize(device)
        called = time.perf_counter()
        run()
        host.append((time.perf_counter() - called) * 1e3)
        if sum(host) > 2_000 and len(host) >= 10:
            break
    synchronize(device)
    return {
        "median_ms": round(found["median"], 4),
        "iqr_ms": round(found["q3"] - found["q1"], 4),
        "host_ms": round(statistics.median(host), 4),
    }


def time_loop(run: Callable[[], Any], device: str, *, calls: int) -> dict[str, float]:
    """Wall and CPU time of a call in a loop that never waits for the device, but at its end."""
    run()
    synchronize(device)
    cpu = time.process_time()
    begin = time.perf_counter()
    for done in range(1, calls + 1):
        run()
        if time.perf_counter() - begin > 5 and done >= 10:
            break
    synchronize(device)
    seconds = time.perf_counter() - begin
    cpu = time.process_time() - cpu
    return {
        "loop_ms": round(1e3 * seconds / done, 4),
        "loop_cpu_ms": round(1e3 * cpu / done, 4),
    }


def batch_facts(batch: tuple[Any, Any]) -> dict[str, Any]:
    """What the model got: the same on every side, or the comparison says nothing."""
    images, target = batch
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
