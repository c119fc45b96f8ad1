"""Hand batches from a side stream to the caller's stream without copying or synchronizing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import torch

from gpuprefetch._batch import tensors

# Steps that the loop may be ahead of the GPU. Without a bound the host queues many, and each of
# them keeps its batch in memory; one is enough to keep the GPU busy.
RUN_AHEAD = 1

# Note [Stream handoff]
# A batch is produced on a side stream and read on whatever stream is current at its hand-over.
#   1. The current stream waits for the event recorded behind the batch's last kernel or copy, if
#      that has not come yet. The host does not wait.
#   2. Every tensor is record_stream()-ed on the current stream: the caching allocator knows just
#      the stream a block was allocated on. Without the mark it gives the block to the next copy as
#      soon as the caller drops the batch, while the queued training step still reads it. But as
#      long as a marked block waits for the stream, the allocator asks for its event whenever
#      anybody allocates, some hundred times a step. So the loop's batches are marked later, if at
#      all: see Note [Handed over].
#   3. A batch that is dropped before it was handed over has no such mark, so the side streams are
#      synchronized before its memory goes back (Engine.close).
#   4. Tensors that the loader itself has put on the device are queued on the stream that is current
#      where it runs: the side stream waits for that (Engine._wait_for_loader).
# tests/test_stream.py fails when 1, 2 or 4 is left out.


_NOT_READY = 600  # CUDA_ERROR_NOT_READY


@cache
def _driver() -> Any:
    """CUDA's driver, called with Python's lock held: see Note [The training thread's locks].

    None where it is not to be had, and where torch's sanitizer, which sees only what goes through
    torch, looks for races.
    """
    sanitizer = getattr(sys.modules.get("torch.cuda._sanitizer"), "cuda_sanitizer", None)
    if getattr(sanitizer, "enabled", False):
        return None
    try:
        driver = ctypes.PyDLL("libcuda.so.1")
    except OSError:  # not on every platform
        return None
    driver.cuEventRecord.argtypes = ctypes.c_void_p, ctypes.c_void_p
    driver.cuEventQuery.argtypes = (ctypes.c_void_p,)
    driver.cuStreamWaitEvent.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint
    copied = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    driver.cuMemcpyHtoDAsync_v2.argtypes = copied
    return driver


def current_handle(device: torch.device) -> int:
    """The handle of the current stream of a CUDA device, without torch's object of it."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # not in a torch without CUDA
    if raw is None or device.index is None:
        return torch.cuda.current_stream(device).cuda_stream
    handle: int = raw(device.index)
    return handle


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """As torch's, which runs a dozen Python functions for it, and makes an object each time."""
    if device.index is None:
        return torch.cuda.current_stream(device)
    return _stream_of(device, current_handle(device))


@lru_cache
def _stream_of(device: torch.device, handle: int) -> torch.cuda.Stream:
    """The current stream of a device, which has this ``handle``; one with it later is the same."""
    return torch.cuda.current_stream(device)


def record(event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
    """Record ``event`` on ``stream``; torch makes it where it records it first."""
    driver = _driver() if event.cuda_event else None
    if driver is None or driver.cuEventRecord(event.cuda_event, stream.cuda_stream):
        event.record(stream)


def has_come(event: torch.cuda.Event) -> bool:
    """Whether what was queued before ``event``, if it was recorded, has completed."""
    driver = _driver() if event.cuda_event else None
    status = None if driver is None else driver.cuEventQuery(event.cuda_event)
    # Torch has a word for other states, and raises it.
    return not status if status in (0, _NOT_READY) else event.query()


def upload(
    data: torch.Tensor, first: int, last: int, place: torch.Tensor, at: int, *, pinned: bool
) -> None:
    """Queue the copy of some bytes on the current stream.

    Args:
        data: flat uint8 on the CPU, which has to be there until the copy has completed.
        first: of the bytes in it.
        last: behind them.
        place: flat uint8 on the device.
        at: where they are to lie in it.
        pinned: whether they lie in pinned memory.
    """
    if (driver := _driver() if pinned and place.is_cuda else None) is not None:
        where, stream = place.data_ptr() + at, current_handle(place.device)
        if not driver.cuMemcpyHtoDAsync_v2(where, data.data_ptr() + first, last - first, stream):
            return
    place[at : at + last - first].copy_(data[first:last], non_blocking=True)


def queue_wait(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
    """Have ``stream`` wait for ``event``, which was recorded, unless it has come."""
    if has_come(event):
        return
    # A default stream has no handle of its own: to the driver 0 is that of the current device.
    own = stream.cuda_stream or torch.cuda.current_device() == stream.device.index
    driver = _driver() if own else None
    if driver is None or driver.cuStreamWaitEvent(stream.cuda_stream, event.cuda_event, 0):
        stream.wait_event(event)


# Note [Handed over]
# A batch's memory is kept as well while the loop has it, until the GPU is through with it. An event
# tells when: it is recorded on the loop's stream as the last tensor of the batch dies, which is
# where the allocator would record its own. At the loop's next step the memory goes back, unmarked.
# That is for what dies as the batches of most loops do: its storage has no other owner in that
# moment, and the stream that it was handed over on is current. Of a batch that the loop keeps, or a
# view of it, the memory is marked at the next step, and the allocator sees to it from there on. How
# many owners are counted of what has none depends on the versions of Python and torch, so it is
# tried once. Measured as in Note [The training thread's locks], but compared in one process: the
# training thread and autograd's take 12.7 ms of CPU time for a step, and 13.6 with marks.


class Handover:
    """A batch that the loop has: see Note [Handed over].

    Args:
        parts: its tensors.
        stream: it was handed over on.
        event: to be recorded on it, behind the last use of the batch.
    """

    def __init__(
        self, parts: Sequence[torch.Tensor], stream: torch.cuda.Stream, event: torch.cuda.Event
    ) -> None:
        self.event, self._stream, self._pid = event, stream, os.getpid()
        self._storages = [part.untyped_storage() for part in parts]
        self._alive = {*range(len(parts))}
        self._recorded = False
        died = partial(_died, weakref.ref(self))  # which does not keep it alive
        self._watched = [weakref.ref(part, partial(died, i)) for i, part in enumerate(parts)]

    def owners(self, i: int) -> tuple[int, int]:
        """How many Python counts for the storage of a part, and how many torch does."""
        storage = self._storages[i]
        return sys.getrefcount(storage), torch._C._storage_Use_Count(storage._cdata)

    def part_died(self, i: int) -> None:
        """Python lets go of a tensor, in whatever thread."""
        if os.getpid() != self._pid or self.owners(i) != _without_others()[0]:
            return
        self._alive.discard(i)
        if not self._alive and _is_current(self._stream):
            record(self.event, self._stream)
            self._recorded = True

    @property
    def died(self) -> bool:
        """Whether :attr:`event` says when the GPU is through with it."""
        dead = _without_others()[1]  # the garbage collector may have brought one back to life
        return self._recorded and all(self.owners(i) == dead for i in range(len(self._storages)))

    def end(self, *, marked: bool) -> None:
        """Let go of the memory, ``marked`` where the GPU may not be through with it."""
        self._watched.clear()
        while self._storages:
            if marked:
                storage = self._storages[-1]
                whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
                whole.set_(storage).record_stream(self._stream)
            self._storages.pop()

    def __del__(self) -> None:
        if getattr(self, "_storages", None) and os.getpid() == self._pid:
            try:
                self.end(marked=True)
            except Exception:  # as in the middle of a compilation, which refuses true tensors
                with contextlib.suppress(RuntimeError):  # of a broken context
                    self._stream.synchronize()


def _died(handover: weakref.ref[Handover], i: int, _: object) -> None:
    if (alive := handover()) is not None:
        alive.part_died(i)


def _is_current(stream: torch.cuda.Stream) -> bool:
    """Whether ``stream`` is this thread's, and takes work rather than captures it."""
    return (
        torch.cuda.current_device() == stream.device.index
        and current_handle(stream.device) == stream.cuda_stream
        and not torch.cuda.is_current_stream_capturing()
    )


@cache
def _without_others() -> list[tuple[int, int]]:
    """Of a storage without other owners: as its tensor dies, and then; empty if that is not seen.

    That is where one that somebody else holds looks the same.
    """
    seen: list[tuple[int, int]] = []

    class Trial(Handover):
        def part_died(self, i: int) -> None:
            seen.append(self.owners(i))

    if not hasattr(torch._C, "_storage_Use_Count"):  # in another version of torch
        return []
    for held_by in (lambda tensor: None, torch.Tensor.detach, torch.Tensor.untyped_storage):
        tensor = torch.empty(1, device="cpu")
        held = held_by(tensor)
        trial = Trial([tensor], None, None)  # type: ignore[arg-type]
        del tensor
        seen.append(trial.owners(0))
        del held
        trial.end(marked=False)
    return seen[:2] if len(seen) == 6 and len({*seen[::2]}) == 3 else []


class Handovers:
    """The batches that the loop of an epoch has, or had a moment ago."""

    def __init__(self) -> None:
        self._given: deque[Handover] = deque()
        self._events: list[torch.cuda.Event] = []  # to be used again

    def add(self, parts: Sequence[torch.Tensor], stream: torch.cuda.Stream) -> None:
        event = self._events.pop() if self._events else torch.cuda.Event()
        self._given.append(Handover(parts, stream, event))

    def settle(self, *, all_of_them: bool = False) -> None:
        """Let go of what the GPU is through with, and of what the loop keeps for longer, marked.

        Args:
            all_of_them: also of the latest, which the loop has yet.
        """
        while self._given:
            # Out of the queue first: the end may come meanwhile, in another thread.
            handover = self._given.popleft()
            died = handover.died
            if died and has_come(handover.event):
                handover.end(marked=False)
                self._events.append(handover.event)
            elif all_of_them or (self._given and not died):
                handover.end(marked=True)
            else:
                self._given.appendleft(handover)
                return


def handoff(
    batch: Any,
    ready: torch.cuda.Event,
    device: torch.device,
    handovers: Handovers | None = None,
) -> None:
    """Make ``batch`` safe to use on the current stream of ``device``. See Note [Stream handoff].

    Args:
        batch: nested batch whose tensors were produced on a side stream.
        ready: recorded on that side stream behind the last work of the batch.
        device: the CUDA device of the batch.
        handovers: settled before each batch, and at the end; None to mark the batch at once.
    """
    stream = current_stream(device)
    queue_wait(stream, ready)
    kept = []
    for part in tensors(batch):
        # Of other types it is not known what they are made of.
        if handovers is not None and type(part) is torch.Tensor and _without_others():
            kept += [part] if part.is_cuda else []
        elif part.is_cuda:
            part.record_stream(stream)
    if handovers is not None and kept:
        handovers.add(kept, stream)


def on_default_stream(device: torch.device) -> bool:
    """Whether the current stream of a CUDA device is its default stream."""
    return not torch.cuda.current_stream(device).cuda_stream  # its handle is 0


@contextlib.contextmanager
def using(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make ``stream`` and its device current, and leave no context on the device that was.

    On its way out ``torch.cuda.stream`` sets the device before, and CUDA then makes a context there
    if there is none: on the first GPU, from a thread of a process that works on another one.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def own_modes(
    device: torch.device, stream: torch.cuda.Stream | None = None
) -> contextlib.AbstractContextManager[None]:
    """Without gradients, without the caller's autocast and inference mode, and on ``stream``.

    Batches are prepared in threads of ours or in the caller's, and are the same in either.
    """
    left: list[contextlib.AbstractContextManager[Any]] = [
        torch.autocast(kind, enabled=False)
        for kind in {device.type, "cpu"}
        if torch.is_autocast_enabled(kind)
    ]
    if torch.is_inference_mode_enabled():  # the loop may train with a later batch
        left.append(torch.inference_mode(False))
    if stream is None:
        return _all_of([*left, torch.no_grad()]) if left else torch.no_grad()
    if not left and torch.cuda.current_device() == device.index:
        return _Switched(stream)
    return _all_of([*left, torch.no_grad(), using(stream)])


class _Switched:  # a context manager without a generator: it is entered for each batch
    """Without gradients and on ``stream``, whose device is current, at less cost.

    The stream is put back: a loader that works on the device works on that.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._no_grad = stream, torch.no_grad()

    def __enter__(self) -> None:
        self._no_grad.__enter__()
        self._before = current_stream(self._stream.device)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: Any) -> None:
        torch.cuda.set_stream(self._before)
        self._no_grad.__exit__(*error)


@contextlib.contextmanager
def _all_of(contexts: Iterable[contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        for context in contexts:
            held.enter_context(context)
        yield


def throttle(steps: deque[torch.cuda.Event], device: torch.device) -> bool:
    """Wait until the current stream of ``device`` is at most RUN_AHEAD steps behind the host.

    Args:
        steps: kept by the caller from one step to the next.
        device: on a CPU there is nothing to wait for.

    Returns:
        Whether it had to wait: the host is faster than the GPU.
    """
    if device.type != "cuda":
        return False
    # The first is that of a step that has been waited for: it serves once more.
    event = steps.popleft() if len(steps) > RUN_AHEAD else torch.cuda.Event(blocking=True)
    record(event, current_stream(device))
    steps.append(event)
    if len(steps) <= RUN_AHEAD or has_come(steps[0]):
        return False
    steps[0].synchronize()
    return True


# How far each of our streams has come, the last time that was asked for: behind the last reader of
# a decode stream, and the last reservation of a batch's. Not for each thread, in a threading.local:
# a forked worker drops those of all threads but its own, and a fork that calls CUDA, as to destroy
# an event, aborts.
_marks: dict[tuple[torch.device, int], torch.cuda.Event] = {}


def mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Record a stream's own event. Who waits for it may wait for what is queued later, too."""
    key = stream.device, stream.cuda_stream
    if (event := _marks.get(key)) is None:
        event = _marks[key] = torch.cuda.Event(blocking=True)
    record(event, stream)
    return event


def mark_reader(follower: torch.cuda.Stream) -> None:
    """Note that what is queued on the current stream reads decoded images; ``follower`` waits."""
    queue_wait(follower, mark(current_stream(follower.device)))


def wait_for_reader(device: torch.device) -> None:
    """Wait until the reader noted last on the current stream has completed, without spinning."""
    done = _marks.get((device, current_handle(device)))
    if done is not None and not has_come(done):
        done.synchronize()


_idle: dict[tuple[torch.device, str], list[torch.cuda.Stream]] = defaultdict(list)
_lock = threading.RLock()  # the garbage collector may end an epoch within it


def lease_stream(device: torch.device, role: str) -> torch.cuda.Stream:
    """Take a side stream of ``device`` that nobody else uses, a new one only where none is idle.

    The allocator keeps a pool of blocks per stream for the life of the process, so a new stream per
    epoch would strand the memory of the last one, and one with another ``role`` would grow it.
    """
    with _lock:
        if _idle[device, role]:
            return _idle[device, role].pop()
    return _new_stream(device)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream from the driver: the first of torch's brings 127 others and takes 70 MiB."""
    handle, non_blocking = ctypes.c_void_p(), 1
    try:
        with torch.cuda.device(device):
            failed = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), non_blocking)
    except OSError:  # not on every platform
        failed = 1
    return torch.cuda.Stream(device) if failed else torch.cuda.ExternalStream(handle.value, device)


def return_stream(stream: torch.cuda.Stream, role: str) -> None:
    """Give a leased stream back. Its work must have completed."""
    with _lock:
        _idle[torch.device(stream.device), role].append(stream)
