"""One epoch: a thread prepares its batches ahead of the loop, in order, and hands them over."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch

from gpuprefetch.core.errors import add_note, unexpected_end
from gpuprefetch.core.loaders import LoaderState
from gpuprefetch.core.nested import Batch
from gpuprefetch.core.resume import Place, Source
from gpuprefetch.core.stage import Cost, Empty, Stage
from gpuprefetch.core.stats import Timed
from gpuprefetch.core.streams import SideStreams, Steps, Waited, handoff

# The default depth is READY batches, or READY times as many as are prepared together, and fewer
# where they would need more than READY_BYTES. The step of a large batch is long enough to prepare
# the next one.
READY = 2
READY_BYTES = 512 << 20
# A thread whose loader hangs is abandoned after this time when the loop is left.
JOIN_SECONDS = 10.0


@dataclass(slots=True, eq=False)
class Fetched:
    """A batch that the loader gave, as the stage has received it. Nobody changes it."""

    number: int  # of the batch in its epoch
    batch: Batch
    images: int
    state: LoaderState  # of the loader, after the batch
    cost: Cost | None  # bytes on the device, where they count
    gathers: int  # how many batches like this one are best prepared together
    at: float  # when the batch came from the loader


@dataclass(slots=True, eq=False)
class Prepared:
    """A batch that is ready for the loop. Nobody changes it."""

    fetched: Fetched
    result: Batch
    event: torch.cuda.Event | None  # recorded after the result


@dataclass(slots=True, eq=False)
class Failed:
    """Stands for the batch that ends the epoch: with an error, or with the loader's end."""

    number: int  # of the batch in its epoch
    error: BaseException | None  # raised in the loop
    at_end: bool = False  # whether the loader has given its last batch
    fetched: object = None  # what the loader gave, which the GPU may still read

    def take_error(self) -> BaseException:
        """The error, which this no longer holds: the frames of the error hold this object."""
        error = self.error
        assert error is not None, "an epoch fails once"
        self.error = None
        return error


Slot = Prepared | Failed


class Ready:
    """The slots between the thread, which adds them in order, and the loop, which takes them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the rest
        self._slots: deque[Slot] = deque()
        self._stopping = False

    @property
    def stopping(self) -> bool:
        """Whether the epoch is being closed."""
        return self._stopping

    @property
    def slots(self) -> deque[Slot]:
        """Batches that are ready, the oldest first."""
        return self._slots

    def add(self, slot: Slot) -> None:
        with self._changed:
            self._slots.append(slot)
            self._changed.notify_all()

    def take(self) -> Slot | None:
        """Wait for the oldest slot; None if the epoch is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._slots)
            if self._stopping:
                return None
            slot = self._slots.popleft()
            self._changed.notify_all()
            return slot

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition on the slots; False if the epoch is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or condition())
            return not self._stopping

    def stop(self) -> None:
        """Wake up whoever waits."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def clear(self) -> None:
        for slot in self._slots:
            if isinstance(slot, Failed):
                slot.take_error()
        self._slots.clear()


class Uploads:
    """What the loader gave for batches that were handed over, while the GPU may still read it."""

    def __init__(self) -> None:
        self._kept: deque[tuple[torch.cuda.Event, Batch]] = deque()

    def keep(self, slot: Prepared) -> None:
        if slot.event is not None:
            self._kept.append((slot.event, slot.fetched.batch))

    def drop_read(self) -> None:
        """Drop what the GPU has read."""
        while self._kept and self._kept[0][0].query():
            self._kept.popleft()

    def clear(self) -> None:
        self._kept.clear()


@dataclass(slots=True)
class Pace:
    """How many batches may be ready, and how many are prepared together.

    They are one in the beginning, so that the loop has its first batch soon, then twice as many
    whenever as many were there, up to half of those that may be ready.
    """

    ready: int | None  # None before the first batch, by whose size it goes then
    together: int = 1

    def choose(self, cost: Cost | None, gathers: int) -> int:
        """How many may be ready, by what one costs and how many are best prepared together."""
        if self.ready is None:
            fitting = READY if cost is None else READY_BYTES // max(cost.fixed, 1)
            self.ready = max(min(READY * gathers, fitting), 1)
        return self.ready

    def prepared(self, count: int, gathers: int) -> None:
        """So many batches were prepared together."""
        self.together = max(min(2 * count, gathers, (self.ready or 1) // 2), 1)


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
        depth: int | None,
        threaded: bool,
        check: Callable[[Batch], None],
    ) -> None:
        self.stage = stage
        self._source = source
        self._pace = Pace(depth)
        self._check = check
        self._number = source.place.batches  # of the next batch
        self._streams = SideStreams(stage.device)
        self._ready = Ready()
        self._uploads = Uploads()
        # Held while a batch is prepared in the loop, and by the clean-up.
        self._busy = threading.RLock()
        self._pid = os.getpid()
        self._user = threading.get_ident()
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._serve, name="gpuprefetch", daemon=True)

    @property
    def place(self) -> Place:
        """Where the epoch stands."""
        return self._source.place

    @property
    def device(self) -> torch.device:
        return self.stage.device

    def start(self) -> None:
        """Start the thread, once whoever closes the epoch knows of it."""
        if self._thread is not None:
            self._thread.start()

    def _serve(self) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a new thread is on the first GPU
            with self.stage.scratch():
                self.stage.warm_up()
                while not self._ready.stopping and self._step():
                    pass
        except BaseException as error:  # the loop might wait for ever
            self._ready.add(Failed(self._number, error))
        self._ready.wait_until(lambda: False)
        self._clean_up()

    def _step(self) -> bool:
        """Fetch and prepare a batch, and more with it if they are there; whether any may follow."""
        slot: Slot
        self._streams.turn(self.stage.streams)
        fetched = self._fetch()
        if isinstance(fetched, Failed):
            slot = fetched
            self._ready.add(slot)
        elif self._ready.wait_until(partial(self._has_room, fetched)):
            slot = self._prepare_with_others(fetched)
        else:  # the epoch is closed: the batch is dropped after the stream has ended
            slot = Prepared(fetched, None, None)
            self._ready.add(slot)
        if isinstance(slot, Failed) and slot.at_end:
            self._source.ended()
        return isinstance(slot, Prepared)

    def _prepare_with_others(self, first: Fetched) -> Slot:
        """Prepare a batch, and those with it that the loader has already; the last slot."""
        group: list[Fetched | Failed] = [first]
        while len(group) < self._pace.together and self._source.at_hand():
            group.append(self._fetch())
            if isinstance(group[-1], Failed):
                break
        if self._thread is not None:  # else the loop waits for all of them
            self._pace.prepared(len(group), first.gathers)
        self._uploads.drop_read()
        batches = [(each.number, each.batch) for each in group if isinstance(each, Fetched)]
        if len(batches) > 1:
            with self._streams.at_hand.current():
                self.stage.begin_together(batches)
        slot: Slot
        for each in group:
            slot = each if isinstance(each, Failed) else self._prepare(each, group)
            self._ready.add(slot)
            if isinstance(slot, Failed):
                break
        return slot

    def _fetch(self) -> Fetched | Failed:
        """The next batch, as the stage prepares it; or what ends the epoch."""
        number = self._number
        self._number += 1
        try:
            return self._receive(number)
        except BaseException as error:
            return Failed(number, error)

    def _receive(self, number: int) -> Fetched | Failed:
        try:
            with Timed(self.stage.stats, "fetch") as fetch:
                given, state = next(self._source)
        except StopIteration as end:
            # The frames of an epoch's end hold the loader's iterator, and nobody needs them.
            return Failed(number, end.with_traceback(None), at_end=True)
        batch, images = self.stage.receive(given, number, fetch.seconds)
        chooses_depth = self._thread is not None and self._pace.ready is None
        counts = chooses_depth or self.stage.memory_budget is not None
        cost = self.stage.cost(batch) if counts else None
        self._check(batch)
        self._streams.at_hand.wait_for_loader(batch)
        gathers = self.stage.gathers(batch)
        return Fetched(number, batch, images, state, cost, gathers, time.perf_counter())

    def _has_room(self, batch: Fetched) -> bool:
        """Whether a batch need not wait: a single one may need the whole memory budget."""
        cost = batch.cost
        most = self._pace.choose(cost, batch.gathers)
        ready = self._ready.slots
        budget = self.stage.memory_budget
        if ready and budget is not None and cost is not None:
            costs = [slot.fetched.cost for slot in ready if isinstance(slot, Prepared)]
            used = sum(other.fixed for other in costs if other is not None)
            if used + cost.fixed + cost.decoded > budget:
                return False
        together = self._pace.together
        return len(ready) + together <= max(most, self.stage.streams * together)

    def _prepare(self, fetched: Fetched, group: object) -> Slot:
        """Prepare a batch; the GPU may read all of its ``group`` if that fails."""
        stream = self._streams.at_hand
        number = fetched.number
        try:
            with stream.current():
                result = self.stage.run(fetched.batch, number, self.place.epoch, fetched.cost)
            return Prepared(fetched, result, stream.record())
        except BaseException as error:
            return Failed(number, error, fetched=group)

    def take(self) -> tuple[Slot | None, bool]:
        """The next batch, as soon as its work has been queued; None if the epoch was closed.

        Beside it comes whether the loop waited for the loader.
        """
        self.place.asked()
        self._user = threading.get_ident()
        asked = time.perf_counter()
        self.stage.asked()
        if self._thread is None:
            with self._busy:
                if not self._ready.stopping:
                    self._step()
        slot = self._ready.take()
        if not isinstance(slot, Prepared):
            return slot, False
        self._uploads.keep(slot)
        return slot, slot.fetched.at >= asked

    def handed_over(self, batch: Fetched) -> None:
        """The loop has the batch: a state that is saved now goes on after it."""
        self.place.handed_over(batch.number, batch.state)

    def ended(self, state: LoaderState) -> None:
        """The loop has come to the end of the epoch; ``state`` is the loader's own."""
        self.place.end(state)

    def close(self) -> bool:
        """End the epoch; False if its thread has not ended yet, because the loader hangs."""
        if os.getpid() != self._pid:
            return True  # a forked worker collects what is not its own
        self._ready.stop()
        if self._thread is None or self._thread.ident is None:  # which could not start
            return self._clean_up()
        with contextlib.suppress(RuntimeError):  # it starts at this moment
            self._thread.join(JOIN_SECONDS)
        return not self._thread.is_alive()

    def drop(self) -> None:
        """Close it from where the garbage collector runs, which may be any thread."""
        self.place.dropped()
        safe = threading.get_ident() in (self._user, threading.main_thread().ident)
        if safe or self._thread is None:
            self.close()
        elif os.getpid() == self._pid:  # its thread may wait for this one
            self._ready.stop()

    def _clean_up(self) -> bool:
        """Give the stream back, and drop every batch that was not handed over."""
        if not self._busy.acquire(timeout=JOIN_SECONDS):
            return False  # a loop without a thread hangs
        try:
            with contextlib.suppress(RuntimeError):  # of a broken context: the next call tells
                self._streams.end()  # see Note [Stream handoff], 3
            self._ready.clear()
            self._uploads.clear()
            self._source.close()
            self.stage.close()
        finally:
            self._busy.release()
        return True


class Epoch(Iterator[Batch]):
    """Iterator over one epoch; ``close`` ends it."""

    def __init__(self, lookahead: Lookahead) -> None:
        self._lookahead = lookahead
        self._stats = lookahead.stage.stats
        self._steps = Steps(lookahead.device)
        self._last: float | None = None  # time of the previous hand-over
        self._failed = False
        self._given = lookahead.place.batches > 0  # whether the loop has had a batch of the epoch
        self._empty: Empty | None = None  # the latest batch that on_error has left nothing of
        self._left_out = 0  # images of such batches
        # Called when the iterator is dropped, and at interpreter exit. A transform that leads to
        # this iterator keeps it alive: its thread holds the transform.
        self.close = weakref.finalize(self, lookahead.drop)
        self._alone = threading.RLock()  # several threads may share the iterator

    def __next__(self) -> Batch:
        with self._alone:
            if self._failed:
                raise RuntimeError(
                    "an error has ended this epoch, and its later batches are gone. Begin a new "
                    "one with iter(), or with set_epoch() for the prefetcher's own next(), or "
                    "leave out what cannot be read in the dataset."
                )
            try:
                while isinstance((slot := self._take()).result, Empty):
                    self._lookahead.handed_over(slot.fetched)
                    self._leave_out(slot.result)
                self._given = True
                self._stats.batches += 1
                # Last: where Ctrl-C comes before, the loop has not got this batch.
                self._lookahead.handed_over(slot.fetched)
                return slot.result
            except BaseException as error:
                self._failed = not isinstance(error, StopIteration)
                self.close()
                raise

    def __reduce__(self) -> NoReturn:
        raise NotImplementedError(
            "an iterator over an epoch cannot be copied or pickled: take the prefetcher, whose "
            "state_dict() says where it stands"
        )

    def _take(self) -> Prepared:
        """The next batch: its images are counted, and it is safe to use on the current stream."""
        lookahead = self._lookahead
        if not self.close.alive:
            raise StopIteration
        slot = self._wait()
        if slot is None and self.close.alive:
            raise RuntimeError(
                "a second iter() of the prefetcher has ended this epoch, and its later batches are "
                "gone: persistent workers serve one epoch at a time. For two at once iterate "
                "copy.copy(prefetcher) as well, which has its own workers, or leave "
                "persistent_workers out."
            )
        if slot is None:
            raise StopIteration
        if isinstance(slot, Failed):
            raise self._end(slot)
        if slot.event is not None:
            with Timed(self._stats, "handoff"):
                handoff(slot.result, slot.event, lookahead.device)
        if not isinstance(slot.result, Empty):
            self._stats.images += slot.fetched.images
        return slot

    def _wait(self) -> Slot | None:
        """Wait for the next slot; count the seconds since the last one."""
        started = time.perf_counter()
        on_gpu = self._lookahead.device.type == "cuda"
        self._steps.throttle()
        with Timed(self._stats, "wait", counts=not on_gpu) as wait:
            slot, late = self._lookahead.take()
        now = time.perf_counter()
        self._stats.seconds += now - (started if self._last is None else self._last)
        waited = Waited(wait.seconds, wait.seconds if late else 0.0)
        if on_gpu:
            if isinstance(slot, Prepared) and slot.event is not None:
                self._steps.wait_for(slot.event, late=late)
            waited = self._steps.waited()
            self._stats.add("wait_seconds", waited.seconds)
        if self._last is not None and isinstance(slot, Prepared):
            decoding = waited.seconds - waited.for_loader
            self._lookahead.stage.handed_over(now - self._last, decoding)
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

    def _end(self, slot: Failed) -> BaseException:
        """What ends the epoch: its end or an error, which the slot no longer holds."""
        error = slot.take_error()
        if not isinstance(error, StopIteration):
            add_note(error, f"raised by the prefetcher while it prepared batch {slot.number}")
            return error
        if not slot.at_end:
            raise unexpected_end(error, "a transform, or on_error,") from error
        self._lookahead.ended(error.value)
        if self._empty is None or self._given:
            return StopIteration()
        return self._empty.error(
            f"on_error has left out all {self._left_out} images of the epoch, the last: "
            f"{self._empty.last}"
        )


class OneByOne:
    """The batches of epoch after epoch, one call each, in the manner of Apex's prefetcher.

    Example, of a loader with two batches of two elements::

        next, next, next -> (images, target), (images, target), (None, None)
    """

    def __init__(self) -> None:
        self._iterator: Iterator[Batch] | None = None
        self._length = 2  # elements of a batch; 0 where it is no tuple or list

    def next(self, batches: Iterable[Batch]) -> Batch:
        """The next batch; at the end of an epoch None, or a tuple of as many."""
        if self._iterator is None:
            self._iterator = iter(batches)
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._iterator = None
            return (None,) * self._length if self._length else None
        self._length = len(batch) if isinstance(batch, (tuple, list)) else 0
        return batch

    @property
    def iterator(self) -> Iterator[Batch] | None:
        """The iterator over the current epoch."""
        return self._iterator

    def forget(self) -> None:
        """Let the next call begin an epoch."""
        self._iterator = None

    def forget_ended(self) -> None:
        """Do so if the epoch was closed, as by an error."""
        if isinstance(self._iterator, Epoch) and not self._iterator.close.alive:
            self._iterator = None
