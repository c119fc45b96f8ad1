"""Hand batches from a side stream to the caller's stream without copying or synchronizing."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from gpuprefetch.core.errors import scope
from gpuprefetch.core.nested import Batch, one_a_storage, tensors

# Steps that the loop may be ahead of the GPU. Each keeps its batch in memory, and one is enough to
# keep the GPU busy.
RUN_AHEAD = 1

# Note [Stream handoff]
# A batch is produced on a side stream and read on whatever stream is current at its hand-over.
#   1. The current stream waits for the event recorded after the batch's last kernel or copy. The
#      host does not wait.
#   2. The memory of every tensor is record_stream()-ed on the current stream. The allocator knows
#      the stream a block was allocated on. Without the mark it gives the block to the next batch as
#      soon as the caller drops this one, while the queued training step still reads it.
#   3. A batch that is dropped before it was handed over has no such mark, so the side stream is
#      synchronized before its memory goes back (Lookahead._clean_up).
#   4. Tensors that the loader itself has put on the device are queued on the stream that is current
#      where it runs. The side stream waits for that (SideStream.wait_for_loader).
# tests/test_stream.py fails when 1, 2 or 4 is left out.


def handoff(batch: Batch, ready: torch.cuda.Event, device: torch.device) -> None:
    """Make ``batch`` safe to use on the current stream of ``device``. See Note [Stream handoff]."""
    stream = torch.cuda.current_stream(device)
    stream.wait_event(ready)
    for part in one_a_storage(batch):
        if part.is_cuda:
            part.record_stream(stream)


class Waited(NamedTuple):
    """How long a loop's stream, or on a CPU the loop, had to wait for batches, in seconds."""

    seconds: float
    for_loader: float  # the part of it for batches that the loader was late with


class Steps:
    """The latest steps of a loop, each from one hand-over to the next; on a CPU none.

    A batch is handed over as soon as its work is queued, so the host hardly waits where decode is
    slower than the step: the GPU does. It has nothing to do from the end of a step to the moment
    when the next batch is ready. Events tell both times, once they have passed::

        loop's stream   | step 1 |.............| step 2 |.............| step 3
        side stream     |   decode of batch 2  |   decode of batch 3  |
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # After a step, recorded at the next hand-over: those the loop has not waited for.
        self._ends: deque[torch.cuda.Event] = deque()
        # The end of the step before a batch, the event after the batch's work, and whether the
        # loader was late with it.
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event, bool]] = deque()

    def throttle(self) -> None:
        """Wait until the host is at most RUN_AHEAD steps ahead of the GPU."""
        if self._device.type != "cuda":
            return
        end = _event()
        end.record(torch.cuda.current_stream(self._device))
        self._ends.append(end)
        if len(self._ends) > RUN_AHEAD:
            self._ends.popleft().synchronize()

    def wait_for(self, ready: torch.cuda.Event, *, late: bool) -> None:
        """Note what the next step waits for, and whether the loader was late with that batch."""
        if self._ends:
            self._waits.append((self._ends[-1], ready, late))

    def waited(self) -> Waited:
        """How long the GPU waited before the steps that have begun since the last call.

        The latest one or two have not begun yet, and count in a later call.
        """
        seconds = 0.0
        for_loader = 0.0
        while self._waits:
            end, ready, late = self._waits[0]
            if not (end.query() and ready.query()):
                break
            self._waits.popleft()
            gap = max(end.elapsed_time(ready), 0.0) / 1e3
            seconds += gap
            for_loader += gap if late else 0.0
        return Waited(seconds, for_loader)


def _event() -> torch.cuda.Event:
    """An event that has a time, and for which the host sleeps."""
    return torch.cuda.Event(enable_timing=True, blocking=True)


@scope
def using(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make ``stream`` and its device current."""
    # On its way out torch.cuda.stream alone sets the device before, where CUDA makes a context.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


@scope
def own_modes(device: torch.device) -> Iterator[None]:
    """Run without the caller's gradients, autocast, inference mode and default device."""
    with contextlib.ExitStack() as modes:
        if torch.get_default_device().type != "cpu":  # it is of one thread, and we may be in it
            modes.enter_context(torch.device("cpu"))
        for kind in {device.type, "cpu"}:
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        if torch.is_inference_mode_enabled():  # the loop may train with a later batch
            modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.no_grad())
        yield


# Without a lock: the garbage collector may run in here and wait for the thread of an epoch, which
# gives its stream back.
_idle: dict[torch.device, list[torch.cuda.Stream]] = {}
_made: dict[torch.device, list[torch.cuda.Stream]] = {}
POOL = 32  # streams of a device that torch hands out in turns, whoever uses them


def lease_stream(device: torch.device) -> torch.cuda.Stream:
    """Take a stream that no epoch uses. New ones would strand the allocator's blocks of the old."""
    try:
        return _idle[device].pop()
    except (KeyError, IndexError):
        made = _made.setdefault(device, [])
        for _ in range(POOL):
            if (stream := torch.cuda.Stream(device)) not in made:
                break
        made.append(stream)
        return stream


def return_stream(stream: torch.cuda.Stream) -> None:
    """Give a leased stream back. Its work must have completed."""
    _idle.setdefault(torch.device(stream.device), []).append(stream)


class SideStream:
    """The stream that the batches of one epoch are prepared on; on a CPU none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = lease_stream(device) if device.type == "cuda" else None

    @scope
    def current(self) -> Iterator[None]:
        with own_modes(self._device):
            with contextlib.nullcontext() if self._stream is None else using(self._stream):
                yield

    def record(self) -> torch.cuda.Event | None:
        """An event after all that has been queued so far."""
        if self._stream is None:
            return None
        event = _event()
        event.record(self._stream)
        return event

    def wait_for_loader(self, batch: Batch) -> None:
        """Wait for what the loader itself has queued on the current stream."""
        if self._stream is not None and any(tensor.is_cuda for tensor in tensors(batch)):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def end(self) -> None:
        """Wait for what is queued; another epoch may use the stream then."""
        stream = self._stream
        self._stream = None
        if stream is not None:
            stream.synchronize()
            return_stream(stream)


class SideStreams:
    """The streams of one epoch, which groups of batches take in turns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = [SideStream(device)]
        self._turns = 0

    @property
    def at_hand(self) -> SideStream:
        """That of the group at hand, whose batches are all prepared on it."""
        return self._streams[self._turns % len(self._streams)]

    def turn(self, count: int) -> None:
        """Go on to the next group; ``count`` are used from here on, if that is more than before."""
        while len(self._streams) < count:
            self._streams.append(SideStream(self._device))
        self._turns += 1

    def end(self) -> None:
        """Wait for what is queued on any; other epochs may use them then."""
        for stream in self._streams:
            stream.end()


def drain(device: torch.device) -> None:
    """Let the host sleep until all that is queued on the current stream has completed."""
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    event.synchronize()
