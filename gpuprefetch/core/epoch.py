"""One epoch: a thread prepares its batches ahead of the loop, in order, and hands them over."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gpuprefetch.core.errors import add_note, unexpected_end
from gpuprefetch.core.source import Source
from gpuprefetch.core.stage import Cost, Empty, Stage
from gpuprefetch.core.stats import Timed
from gpuprefetch.core.streams import SideStream, handoff, throttle

# The default depth, and the bytes that so many batches may take together. The step of a large batch
# is long enough to prepare the next one.
READY, READY_BYTES = 2, 512 << 20
# A thread whose loader hangs is abandoned after this time when the loop is left.
JOIN_SECONDS = 10.0


@dataclass(slots=True, eq=False)
class Slot:
    """A batch between the loader and the loop."""

    number: int  # of the batch in its epoch
    batch: Any = None  # what the loader gave
    images: int = 0
    state: Any = None  # of the loader, after the batch
    cost: Cost | None = None  # bytes on the device, where they count
    ended: bool = False  # the loader has given its last batch
    fetched: float = 0.0  # when the batch came from the loader
    result: Any = None
    error: BaseException | None = None  # raised in the loop in place of a result
    event: torch.cuda.Event | None = None  # recorded after the result
    waited: float = 0.0  # seconds that the loop waited for the result, once the batch had come


class Lookahead:
    """Prepares the batches of one epoch, up to ``depth`` of them ahead of the loop.

    Its thread fetches a batch, waits for room, runs the stage on the side stream, and records an
    event. Only that thread adds slots, and only the loop takes them. Without a thread the loop does
    the same when it asks for a batch. A ``depth`` of None goes by the size of the first batch.
    """

    def __init__(
        self,
        stage: Stage,
        source: Source,
        *,
        epoch: int,
        depth: int | None,
        threaded: bool,
        check: Callable[[Any], None],
    ) -> None:
        self.stage, self.device, self.place = stage, stage.device, source.place
        self._source, self._epoch, self._depth, self._check = source, epoch, depth, check
        self._number = int(source.place["batches"])
        # "unused", "used", or "dropped" before it was used; shared with the prefetcher.
        self.use = ["unused"]
        # Batches take turns on as many as the stage prepares side by side.
        self._streams = defaultdict(partial(SideStream, self.device), {0: SideStream(self.device)})
        self._changed = threading.Condition()  # guards the slots and _stopping
        self._slots: deque[Slot] = deque()
        self._stopping = False
        # What the host gave for batches that were handed over. The GPU may still read it.
        self._uploads: deque[tuple[torch.cuda.Event, Any]] = deque()
        # Held while a batch is prepared in the loop, and by the clean-up.
        self._busy = threading.RLock()
        self._pid, self._user = os.getpid(), threading.get_ident()
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._serve, name="gpuprefetch", daemon=True)

    def start(self) -> None:
        """Start the thread, once whoever closes the epoch knows of it."""
        if self._thread is not None:
            self._thread.start()

    def _serve(self) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a new thread is on the first GPU
            with self.stage.scratch():
                while not self._stopping and self._step():
                    pass
        except BaseException as error:  # the loop might wait for ever
            self._add(Slot(self._number, error=error))
        with self._changed:
            self._changed.wait_for(lambda: self._stopping)
        self._clean_up()

    def _step(self) -> bool:
        """Fetch and prepare one batch; whether another one may follow."""
        slot = Slot(self._number)
        self._number += 1
        try:
            self._fetch(slot)
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._has_room(slot))
            if not self._stopping:
                self._prepare(slot)
        except BaseException as error:
            # Nobody looks into the end of an epoch, and its frames hold the loader's iterator.
            slot.error = error.with_traceback(None) if slot.ended else error
        self._add(slot)
        return slot.error is None

    def _add(self, slot: Slot) -> None:
        with self._changed:
            self._slots.append(slot)
            self._changed.notify_all()

    def _has_room(self, slot: Slot) -> bool:
        """Whether a batch need not wait: a single one may take the whole memory budget."""
        if self._depth is None:
            fitting = READY if slot.cost is None else READY_BYTES // max(slot.cost.fixed, 1)
            self._depth = max(min(READY, fitting), 1)
        depth = max(self._depth, self.stage.streams)
        budget = self.stage.memory_budget
        if self._slots and budget is not None and slot.cost is not None:
            used = sum(other.cost.fixed for other in self._slots if other.cost is not None)
            if used + slot.cost.fixed + slot.cost.decoded > budget:
                return False
        return len(self._slots) < depth

    def _fetch(self, slot: Slot) -> None:
        with Timed(self.stage.stats, "fetch") as fetch:
            try:
                batch, slot.state = next(self._source)
            except StopIteration:
                slot.ended = True
                raise
        slot.batch, slot.images = self.stage.receive(batch, slot.number, fetch.seconds)
        chooses = self._thread is not None and self._depth is None
        if chooses or self.stage.memory_budget is not None:
            slot.cost = self.stage.cost(slot.batch)
        self._check(slot.batch)
        self._streams[slot.number % self.stage.streams].wait_for_loader(slot.batch)
        slot.fetched = time.perf_counter()

    def _prepare(self, slot: Slot) -> None:
        while self._uploads and self._uploads[0][0].query():
            self._uploads.popleft()
        with (stream := self._streams[slot.number % self.stage.streams]).current():
            slot.result = self.stage.run(slot.batch, slot.number, self._epoch, slot.cost)
        slot.event = stream.record()

    def take(self) -> Slot | None:
        """The next batch, as soon as its work has been queued; None if the epoch was closed."""
        self._user, asked = threading.get_ident(), time.perf_counter()
        self.stage.asked()
        if self._thread is None:
            with self._busy:
                if not self._stopping:
                    self._step()
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._slots)
            if self._stopping:
                return None
            slot = self._slots.popleft()
            self._changed.notify_all()
        if slot.fetched < asked:  # else the loader was late
            slot.waited = time.perf_counter() - asked
        if slot.event is not None:
            self._uploads.append((slot.event, slot.batch))
        return slot

    def close(self) -> bool:
        """End the epoch; whether its thread has ended, which one whose loader hangs does later."""
        if os.getpid() != self._pid:
            return True  # a forked worker collects garbage of ours: nothing of it is its own
        self._stop()
        if self._thread is None or self._thread.ident is None:  # which could not start
            return self._clean_up()
        with contextlib.suppress(RuntimeError):  # it starts at this moment
            self._thread.join(JOIN_SECONDS)
        return not self._thread.is_alive()

    def drop(self) -> None:
        """Close it from where the garbage collector runs, which may be any thread."""
        self.use[0] = "dropped" if self.use[0] == "unused" else self.use[0]
        safe = threading.get_ident() in (self._user, threading.main_thread().ident)
        if safe or self._thread is None:
            self.close()
        elif os.getpid() == self._pid:  # its thread may wait for this one
            self._stop()

    def _stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _clean_up(self) -> bool:
        """Give the stream back, and drop every batch that was not handed over."""
        if not self._busy.acquire(timeout=JOIN_SECONDS):
            return False  # a loop without a thread hangs
        try:
            with contextlib.suppress(RuntimeError):  # of a broken context: the next call tells
                for stream in self._streams.values():
                    stream.end()  # see Note [Stream handoff], 3
            for slot in self._slots:
                slot.error = None  # breaks the cycle with the frame of _step
            self._slots.clear()
            self._uploads.clear()
            self._source.close()
            self.stage.close()
        finally:
            self._busy.release()
        return True


class Epoch(Iterator[Any]):
    """Iterator over one epoch; ``close`` ends it."""

    def __init__(self, lookahead: Lookahead) -> None:
        self._lookahead, self._stats = lookahead, lookahead.stage.stats
        self._steps: deque[torch.cuda.Event] = deque()
        self._last: float | None = None
        self._failed = False
        # Whether the loop has had a batch, also before a resume; what was left out without one.
        self._given = lookahead.place["batches"] > 0
        self._empty: Empty | None = None
        self._left_out = 0
        # Called when the iterator is dropped, and at interpreter exit. A transform that leads to
        # this iterator keeps it alive: its thread holds the transform.
        self.close = weakref.finalize(self, lookahead.drop)
        self._alone = threading.RLock()  # several threads may share the iterator

    def __next__(self) -> Any:
        with self._alone:
            if self._failed:
                raise RuntimeError(
                    "an error has ended this epoch, and its later batches are gone. Begin a new "
                    "one with iter(), or with set_epoch() for the prefetcher's own next(), or "
                    "leave out what cannot be read in the dataset."
                )
            try:
                while isinstance(batch := self._take(), Empty):
                    self._leave_out(batch)
            except BaseException as error:
                self._failed = not isinstance(error, StopIteration)
                self.close()
                raise
            self._given = True
            self._stats.batches += 1
            return batch

    def __reduce__(self) -> Any:
        raise NotImplementedError(
            "an iterator over an epoch cannot be copied or pickled: take the prefetcher, whose "
            "state_dict() says where it stands"
        )

    def _take(self) -> Any:
        """The next batch: counted, and safe to use on the current stream."""
        lookahead = self._lookahead
        if not self.close.alive:
            raise StopIteration
        lookahead.use[0] = "used"
        slot = self._wait()
        if slot is None and self.close.alive:
            raise RuntimeError(
                "a second iter() of the prefetcher has ended this epoch, and its later batches are "
                "gone: persistent workers serve one epoch at a time. For two at once iterate "
                "copy.copy(prefetcher) as well, which has workers of its own, or leave "
                "persistent_workers out."
            )
        if slot is None:
            raise StopIteration
        if slot.error is not None:
            raise self._end(slot)
        if slot.event is not None:
            with Timed(self._stats, "handoff"):
                handoff(slot.result, slot.event, lookahead.device)
        if not isinstance(slot.result, Empty):
            self._stats.images += slot.images
        lookahead.place.update(batches=slot.number + 1, loader=slot.state)
        return slot.result

    def _wait(self) -> Slot | None:
        """Wait for the next slot; count the seconds since the last one."""
        started, device = time.perf_counter(), self._lookahead.device
        ahead = throttle(self._steps, device)
        with Timed(self._stats, "wait"):
            slot = self._lookahead.take()
        now = time.perf_counter()
        self._stats.seconds += now - (started if self._last is None else self._last)
        if self._last is not None and slot is not None and slot.error is None:
            busy = ahead and slot.waited and not torch.cuda.current_stream(device).query()
            waited = 0.0 if busy else slot.waited  # the GPU has work left
            self._lookahead.stage.handed_over(now - self._last, waited)
        self._last = now
        return slot

    def _leave_out(self, batch: Empty) -> None:
        if self._empty is None:
            warnings.warn(
                f"on_error has left out all {batch.images} images of a batch, which the loop "
                f"does not get, the last: {batch.last}",
                stacklevel=3,
            )
        self._empty = batch
        self._left_out += batch.images

    def _end(self, slot: Slot) -> BaseException:
        """What ends the epoch: its end or an error, which the slot no longer holds."""
        error, slot.error = slot.error, None
        assert error is not None
        if not isinstance(error, StopIteration):
            add_note(error, f"raised by the prefetcher while it prepared batch {slot.number}")
            return error
        if not slot.ended:
            raise unexpected_end(error, "a transform, or on_error,") from error
        self._lookahead.place.update(ended=True, loader=error.value)
        if self._empty is None or self._given:
            return StopIteration()
        return self._empty.error(
            f"on_error has left out all {self._left_out} images of the epoch, the last: "
            f"{self._empty.last}"
        )
