"""The threads of an epoch, which fetch, decode and finish batches in order, ahead of the loop."""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from gpuprefetch._apart import Apart
from gpuprefetch._balance import Balancer
from gpuprefetch._batch import tensors
from gpuprefetch._budget import LANES, NO_COST, READY, READY_BYTES, Cost
from gpuprefetch._decode import packing_into
from gpuprefetch._encoded import is_encoded
from gpuprefetch._host import pack_lists, packed_of
from gpuprefetch._pipeline import Part, Pipeline, Work, count_images
from gpuprefetch._resume import Source
from gpuprefetch._slab import unmap_dead
from gpuprefetch._stats import Stage
from gpuprefetch._stream import (
    Handovers,
    has_come,
    lease_stream,
    own_modes,
    record,
    return_stream,
    using,
)
from gpuprefetch._turns import LATE_SECONDS, turns

# For a loader that hangs, when the loop is left: its thread is then abandoned, not waited for.
JOIN_SECONDS = 10.0
# A loop that is slower than the GPU waits for so long at most while the next batch is got under
# way, if the loader has one ready. See Note [The training thread's locks].
REST_SECONDS = 0.002
# A loop that got the next batch under way itself has Python's lock for this part of its step, if it
# is not back before: to fetch takes that for a millisecond, and the backward pass can do without.
PAUSE = 0.4
# A decode begins by this part of the loop's step, and earlier where it is to end by that one. See
# Note [When to decode].
BEGIN_BY, END_BY = 0.5, 0.95
RECENT = 8  # batches whose longest decode tells how long the next one takes


class Flag:
    """As threading.Event, for one use and with little Python code: there is one for each batch."""

    __slots__ = ("_is_set", "_passes")

    def __init__(self) -> None:
        self._is_set, self._passes = False, SimpleQueue[None]()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._passes.put(None)

    def wait(self) -> None:
        if not self._is_set:
            self._passes.get()
            self._passes.put(None)  # for whoever else waits


class Gate:
    """Keeps back whoever waits at it, until a time at most."""

    def __init__(self) -> None:
        self._open, self._until = threading.Event(), 0.0

    def open(self) -> None:
        if not self._open.is_set():
            self._open.set()

    def close(self, seconds: float) -> None:
        self._until = time.perf_counter() + seconds
        self._open.clear()

    def wait(self) -> None:
        self._open.wait(self._until - time.perf_counter())


@dataclass(slots=True, eq=False)
class Slot:
    """A batch between the loader and the loop.

    Attributes:
        number: of the batch in its epoch.
        images: that it has.
        encoded: whether they are.
        source: what the loader gave.
        state: the loader's, behind it.
        fetched: when it came from there, by :func:`time.perf_counter`.
        begun: when the first of its parts was, likewise; 0 before.
        cost: on the device, where that counts.
        work: under way.
        remaining: parts of the work that are not done.
        result: what the loop gets.
        error: instead of a result.
        event: recorded behind the result.
        done: set when there is a result or an error.
    """

    number: int
    images: int = 0
    encoded: bool = False
    source: Any = None
    state: Any = None
    fetched: float = 0.0
    begun: float = 0.0
    cost: Cost = NO_COST
    work: Work | None = None
    remaining: int = 0
    result: Any = None
    error: BaseException | None = None
    event: torch.cuda.Event | None = None
    done: Flag = field(default_factory=Flag)


class Engine:
    """The threads of one epoch, which do not keep it alive: see Note [Threads hold no epoch]."""

    def __init__(
        self,
        pipeline: Pipeline,
        source: Source,
        *,
        depth: int | None,
        epoch: int,
        fetch_ahead: bool,
        balancer: Balancer,
        check: Callable[[Any], None],
        shares: dict[int, float],
    ) -> None:
        self._pipeline, self._source, self._check = pipeline, source, check
        self._epoch, self._shares = epoch, shares
        # How many batches are ready or in preparation, as the user says; else the first one's cost
        # decides, and whether the loop has asked for one.
        self._asked, self._usual, self._wanted = depth, Cost(), False
        self.device, self.place = pipeline.device, source.place
        self.stats, self.balancer = pipeline.stats, balancer
        self._changed = threading.Condition()
        self._slots: deque[Slot] = deque()
        self._held: Slot | None = None  # fetched; it does not fit beside what is under way
        # Taken from there by the loop, which gets it under way itself.
        self._taken: Slot | None = None
        self.handovers = Handovers()
        # What the host gave for batches that were handed over: the GPU may read it yet.
        self._sources: deque[tuple[torch.cuda.Event, Any]] = deque()
        # To make an event, and to drop it, gives up Python's lock. These serve again: those of
        # batches that may not be handed over yet, and others.
        self._through, self._events = list[torch.cuda.Event](), list[torch.cuda.Event]()
        # For each part a None in the queue, whose readers wake one at a time; it is no Python code,
        # for the lock of that is scarce.
        self._parts: deque[tuple[Slot, Part]] = deque()
        self._given: SimpleQueue[None] = SimpleQueue()
        # To decode takes one of the permits; where memory is short, one lane takes all of them.
        self._permits: SimpleQueue[None] = SimpleQueue()
        for _ in range(LANES):
            self._permits.put(None)
        self._alone = threading.Lock()
        # Closed in the first part of the loop's step. See Note [When to decode].
        self._gate = Gate()
        self._spent: deque[float] = deque(maxlen=RECENT)  # seconds of each decode
        self._finishing = threading.Lock()
        # Whoever reads the loader has it, a thread of ours or the loop's. The end waits for it, as
        # persistent workers serve the next epoch then.
        self._reading = threading.RLock()
        self._ending, self._ended = threading.RLock(), False
        self._suspended: list[Iterator[Any]] = []
        # Whether the thread that fetches has done all that it can, or is to leave the loop alone;
        # whether it found a batch ready the last time.
        self._resting, self._prompt = False, False
        # The largest tensor that the loop has, and of what it had before, behind what used that.
        self._handed: weakref.ref[torch.Tensor] | None = None
        self._used: tuple[torch.cuda.Event | None, weakref.ref[torch.Tensor] | None] = (None, None)
        self._exhausted = self._stopping = False
        self.pid, self.user = os.getpid(), threading.get_ident()
        self._fetched: int = source.place["batches"]
        self._fetch_ahead = fetch_ahead
        self._threads: list[threading.Thread] = []
        self._ours: set[int] = set()  # their identifiers
        self._lanes: list[torch.cuda.Stream] = []
        self._rooms: list[list[torch.Tensor]] = []  # of the lanes, where no budget counts them
        self._on_cuda = pipeline.device.type == "cuda"
        self._stream = lease_stream(pipeline.device, "batch") if self._on_cuda else None

    def start(self) -> None:
        """Fetch ahead of the loop, where that is to be. Whoever calls it sees to the end."""
        if self._fetch_ahead:
            self._spawn("fetch", _fetch_loop)

    def _spawn(self, name: str, target: Callable[..., None], *args: Any) -> None:
        name, args = f"gpuprefetch-{name}", (weakref.ref(self), target, *args)
        thread = threading.Thread(target=_serve, name=name, args=args, daemon=True)
        self._threads.append(thread)  # before it starts: the end waits for it
        try:
            thread.start()
        except RuntimeError:  # not everywhere are there as many threads as one asks for
            self._threads.remove(thread)
            raise

    def _fail(self, error: BaseException) -> None:
        """Let the loop know that one of the threads has ended: it might wait for it."""
        with self._changed:
            self._exhausted = True
            self._slots.append(Slot(self._fetched))
            for slot in self._slots:
                if not slot.done.is_set():
                    slot.error = error
                    slot.done.set()
            self._changed.notify_all()

    def _batch_stream(self) -> contextlib.AbstractContextManager[None]:
        return own_modes(self.device, self._stream)

    def _fetch(self) -> Slot:
        """Take a batch from the loader, by whom ``_reading`` is held."""
        slot = Slot(self._fetched)
        self._fetched += 1
        try:
            with Stage(self.stats, "fetch") as fetch:
                batch, slot.state = next(self._source)
            self._prompt = fetch.seconds < REST_SECONDS / 2
            self._pipeline.packer.begin()
            slot.source, leaves = pack_lists(batch, self._pipeline.packer)
            first = not self._usual.fixed
            if first or self._pipeline.memory_budget is not None:
                slot.cost = self._pipeline.cost(slot.source)
            if first:
                self._usual = slot.cost
            self._learn(slot, leaves, fetch.seconds)
            self._check(slot.source)
            self._wait_for_loader(leaves)
            slot.fetched = time.perf_counter()
        except BaseException as error:
            self._exhausted = True
            self._interrupt(error)
            # Nobody looks into the end of an epoch, and its frames hold the loader's iterator.
            slot.error = error.with_traceback(None) if isinstance(error, StopIteration) else error
        return slot

    def _wait_for_loader(self, leaves: list[Any]) -> None:
        """What the loader has put on the device itself may be queued on the current stream."""
        others = (leaf for leaf in leaves if not is_encoded(leaf))
        if self._stream is not None and any(t.is_cuda for leaf in others for t in tensors(leaf)):
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def _interrupt(self, error: BaseException) -> None:
        """Ctrl-C, or an exit, is not for a later batch: the loop may never take that."""
        if not isinstance(error, Exception) and threading.get_ident() not in self._ours:
            raise error

    @property
    def _depth(self) -> int:
        if self._asked is not None:
            return self._asked
        turn = turns[self.device]
        if turn.bare and self._fetch_ahead:
            return int(self._wanted)
        # A thread that does not run ahead would wait for what it has just begun.
        deep = turn.deep or not self._fetch_ahead
        return max(min(READY, READY_BYTES // max(self._usual.fixed, 1)), 1) if deep else 1

    @property
    def lean(self) -> bool:
        """Whether to begin a batch in the memory of one that was used."""
        return self._asked is None and turns[self.device].lean

    def _wait_for_used(self) -> None:
        """Until the batch that the loop has given up is no longer used: its memory is the next's.

        The loop need not wait for that. It may keep its batches, so they are not waited for long.
        """
        with self._changed:
            self._rest()
            event, tensor = self._used
        if event is not None and not event.query():
            event.synchronize()
        deadline = time.perf_counter() + REST_SECONDS
        while tensor is not None and tensor() is not None and time.perf_counter() < deadline:
            time.sleep(REST_SECONDS / 10)

    def _has_room(self, slot: Slot) -> bool:
        """Whether a batch need not wait: a single one may take the whole memory budget."""
        budget = self._pipeline.memory_budget
        if self._stopping or budget is None or len(self._slots) >= self._depth:
            return self._stopping or len(self._slots) < self._depth
        works = [other.work for other in self._slots]
        used = sum(other.cost.fixed for other in self._slots)
        used += sum(work.decoded_bytes for work in works if work is not None)
        return not self._slots or used + slot.cost.fixed + slot.cost.decoded <= budget

    def _may_start(self, number: int) -> bool:
        """Whether there is room for a batch, or the loop has taken it; if not, it need not wait."""
        slot = self._held_as(number)
        if self._stopping or slot is None:
            return True
        if self._taken is None and self._has_room(slot):
            return True
        self._rest()
        return False

    def _hold(self) -> int:
        """The number of the batch to begin next: what the loop has fetched, or a new one."""
        with self._reading:
            slot = self._held  # which the loop may take meanwhile
            if slot is None:
                self._held = slot = self._fetch()
            return slot.number

    def _held_as(self, number: int) -> Slot | None:
        """The batch that is held, if it is the one of that ``number`` yet."""
        slot = self._held
        return slot if slot is not None and slot.number == number else None

    def _hold_at_once(self) -> bool:
        """Fetch the batch to begin next in the loop, if there is one; whether that was done."""
        if not self._reading.acquire(blocking=False):
            return False
        try:
            # Not behind one that took long: the sampler, too, runs in it.
            if self._held or self._exhausted or not (self._prompt and self._source.ready):
                return False
            with own_modes(self.device):
                self._held = self._apart(self._fetch)
            return True
        finally:
            self._reading.release()

    def _rest(self) -> None:
        """Let a loop go on that waits for the thread that fetches; with ``_changed`` held."""
        self._resting = True
        self._changed.notify_all()

    def _make_room(self, held: list[None]) -> None:
        """Wait for the other lanes, and have all permits ``held``, which keeps them waiting."""
        self.stats.out_of_memory += 1
        self._give_back(held)  # nobody waits for permits while he holds one
        with self._alone:
            while len(held) < LANES:
                held.append(self._permits.get())
        for room in self._rooms:
            room.clear()
        if self._on_cuda:
            torch.cuda.empty_cache()

    def _give_back(self, held: list[None]) -> None:
        while held:
            self._permits.put(held.pop())

    def _start(self, slot: Slot) -> None:
        """Get the work of a batch under way, with its stream current."""
        parts: list[Part] = []
        try:
            while self._sources and has_come(self._sources[0][0]):
                self._through.append(self._sources.popleft()[0])
            if slot.error is None:
                slot.work = self._begin_with_room(slot)
                parts = slot.work.parts
                slot.remaining = len(parts)
                if parts and self._on_cuda:
                    self._start_lanes()
        except BaseException as error:
            self._exhausted = True
            self._interrupt(error)
            slot.error = error
            parts, slot.remaining = [], 0
        with self._changed:
            if self._stopping:  # another thread has ended the epoch, and cleared them
                return
            self._slots.append(slot)
            if self._taken is not slot:  # else the loop tells the thread that fetches, once
                self._changed.notify_all()
        for part in parts:
            if self._on_cuda:
                self._parts.append((slot, part))
                self._given.put(None)
            else:
                self._run_part(slot, part)
        if not parts:
            self._finish_ready()

    def _begin_with_room(self, slot: Slot) -> Work:
        try:
            return self._begin(slot)
        except torch.OutOfMemoryError:
            pass  # and not again in here, where the exception holds what was allocated
        held: list[None] = []
        try:
            self._make_room(held)
            return self._begin(slot)
        finally:
            self._give_back(held)

    def _begin(self, slot: Slot) -> Work:
        return self._pipeline.start(slot.source, slot.number, self._epoch, slot.cost)

    def _start_lanes(self) -> None:
        several = turns[self.device].several and self.balancer.starved
        while len(self._lanes) < (LANES if several else 1):
            self._lanes.append(lease_stream(self.device, "lane"))
            self._rooms.append([])
            self._spawn("decode", _lane_loop, self._lanes[-1], self._rooms[-1])

    def _learn(self, slot: Slot, leaves: list[Any], waited: float) -> None:
        packed = packed_of(leaves)
        slot.images, slot.encoded = count_images(leaves), bool(packed)
        counts = [(len(images), images.ready) for images in packed]
        if packed:
            everything, on_cpu = map(sum, zip(*counts, strict=True))
            seconds = sum(images.decode_seconds for images in packed)
            self.balancer.observe(everything, on_cpu, seconds, waited)
        for images, (count, decoded) in zip(packed, counts, strict=True):
            self._shares[slot.number] = images.share
            self.stats.cpu_images += decoded
            self.stats.gpu_images += count - decoded
            self.stats.encoded_bytes += images.encoded_bytes
            self.stats.read_seconds += images.read_seconds
            self.stats.worker_decode_seconds += images.decode_seconds
            self.stats.collate_seconds += images.collate_seconds
            self.stats.pin_seconds += images.pin_seconds
            self.stats.share = self.balancer.value

    def _run_part(self, slot: Slot, part: Part) -> None:
        slot.begun = slot.begun or time.perf_counter()
        try:
            if slot.error is None:
                held = [self._permits.get()]
                try:
                    part(partial(self._make_room, held))
                finally:
                    self._give_back(held)
        except BaseException as error:
            slot.error = error
        with self._changed:
            slot.remaining -= 1
            last = slot.remaining == 0
        if last:
            self._spent.append(time.perf_counter() - slot.begun)
            self._finish_ready()

    def _finish_ready(self) -> None:
        """Finish what is decoded, one batch after the other: transforms may keep a state."""
        with self._finishing:
            while True:
                with self._changed:
                    slot = next((slot for slot in self._slots if not slot.done.is_set()), None)
                if slot is None or slot.remaining:
                    return
                self._finish(slot)

    def _finish(self, slot: Slot) -> None:
        try:
            if slot.error is None and slot.work is not None:
                done = slot.work.is_done()
                with contextlib.nullcontext() if done else self._batch_stream():
                    slot.result = slot.work.finish()
                if self._stream is not None:
                    events = self._events
                    slot.event = events.pop() if events else torch.cuda.Event(blocking=True)
                    record(slot.event, self._stream)
        except BaseException as error:
            self._interrupt(error)
            slot.error = error
        with self._changed:
            slot.work = None
            if self._pipeline.memory_budget is not None:  # which has room again
                self._changed.notify_all()
        slot.done.set()

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """The loop launches nothing inside of it: see Note [The training thread's locks]."""
        if not self._on_cuda:
            return contextlib.nullcontext()
        self._gate.open()
        turn = turns[self.device]
        return turn.hurried() if turn.several else contextlib.nullcontext()

    def _hold_back(self) -> None:
        """Let the next decode wait for its time in the step that begins; ``_changed`` is held."""
        if not self._on_cuda or self.lean:  # no lane, or one that waits for memory
            return
        if any(not slot.done.is_set() for slot in self._slots):
            return
        pace = self.balancer.pace
        seconds = min(BEGIN_BY * pace, END_BY * pace - max(self._spent, default=0.0))
        if seconds > 0:
            self._gate.close(seconds)

    def let_fetch(self) -> None:
        """Get the next batch under way, or let that be done, while the loop launches nothing."""
        if (slot := self._taken) is not None:  # another thread may end the epoch meanwhile
            with self._batch_stream():
                self._apart(self._start, slot)
            self._taken = None
            fetched = self._hold_at_once()
            with self._changed:
                # Else there is nothing to do for the thread that fetches until the loop is back.
                if not fetched or (self._held is not None and self._has_room(self._held)):
                    self._changed.notify_all()
            return
        with self._changed:
            if self._prompt and self._fetch_ahead and not self._exhausted:
                self._changed.wait_for(lambda: self._resting or self._exhausted, REST_SECONDS)

    def _apart(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call it from a generator: as long as that is suspended, its frame has none below.

        An error that is kept for a later batch would keep the frames of the loop, and they the
        iterator, but dropping that must end the epoch.
        """
        generator = (function(*args) for _ in range(1))
        result = next(generator)
        if self._exhausted:
            self._suspended.append(generator)
        return result

    def _fetch_and_start(self) -> None:
        """Without a thread that fetches: begin as many batches as may be under way."""
        while not self._stopping and len(self._slots) < self._depth:
            if self._exhausted and self._held is None:
                return
            with self._reading:
                self._held = slot = self._held or self._apart(self._fetch)
            if not self._has_room(slot):
                return
            self._held = None
            with self._batch_stream():
                self._apart(self._start, slot)

    def take(self, used: torch.cuda.Event | None = None, *, ahead: bool = False) -> Slot:
        """The next batch in order, as soon as its work has been queued.

        Args:
            used: behind what the loop has queued.
            ahead: whether the loop had to wait for the GPU.

        Raises:
            StopIteration: if the epoch was closed, in another thread.
        """
        self.user = threading.get_ident()
        if not self._fetch_ahead:
            self._fetch_and_start()
        began = time.perf_counter()
        with self._changed:
            self._wanted = True
            if not self._slots:
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._slots or self._stopping)
            self._wanted = False
            slot = None if self._stopping else self._slots[0]
        if slot is None:
            raise StopIteration  # another thread has begun a new epoch with the same workers
        slot.done.wait()
        if self._on_cuda:
            waited = time.perf_counter() - began
            # For its decode, or else for the loader.
            self._learn_wait(waited if slot.fetched < began else 0.0, ahead=ahead)
        # The loop has queued its wait for what was handed over before.
        while self._through:
            self._events.append(self._through.pop())
        if slot.event is not None:
            self._sources.append((slot.event, slot.source))
        largest = None
        if self.lean:
            on_device = (tensor for tensor in tensors(slot.result) if tensor.is_cuda)
            largest = max(on_device, key=lambda tensor: tensor.nbytes, default=None)
        with self._changed:
            if self._stopping:
                raise StopIteration
            self._used = used, self._handed
            self._handed = None if largest is None else weakref.ref(largest)
            self._slots.popleft()
            self._hold_back()
            self._resting = not ahead and self._at_hand()
            if self._resting:
                self._taken, self._held = self._held, None
            else:
                self._changed.notify_all()
        return slot

    def _at_hand(self) -> bool:
        """Whether there is a batch that the loop can get under way in no time."""
        slot = self._held
        if slot is None or not self._fetch_ahead or not slot.encoded or self.lean:
            return False
        late = isinstance(slot.source, Apart)
        return not (self._pipeline.tail or late) and self._has_room(slot)

    def _learn_wait(self, seconds: float, *, ahead: bool) -> None:
        """Give batches on their way more memory: where there is room, and then where they are late.

        The loop waited for one, and the GPU has nothing to do now; or, which does not call for a
        second decoder, soon, for a loop that was not ahead of it before will not be now.
        """
        turn = turns[self.device]
        self.balancer.loop_waited(seconds)
        late = seconds > LATE_SECONDS and (self.balancer.starved or not turn.deep)
        if late and (ahead or turn.deep):
            late = torch.cuda.current_stream(self.device).query()
        next_one = self._usual.fixed + self._usual.decoded
        if turn.learn(late=late and not self.balancer.trying):
            turn.rise(self.device, next_one)

    def close(self) -> None:
        """End the threads, give the streams back and drop every batch that was not handed over.

        Whoever else calls it waits as well. If it is interrupted it goes on in a thread.
        """
        if os.getpid() != self.pid:
            return  # a forked worker collects garbage of ours: threads and streams are not its own
        try:
            with self._changed:
                self._stopping, self._resting = True, False
                self._changed.notify_all()
            self._end()
        except BaseException:
            if threading.get_ident() not in self._ours:  # what failed there would fail for ever
                with contextlib.suppress(RuntimeError):  # the interpreter ends, and all threads
                    self.end_apart()
            raise

    def end(self) -> None:
        """Close it from where the garbage collector runs."""
        here = threading.get_ident()
        forked = os.getpid() != self.pid  # a child, which has nothing to end
        if forked or here in (self.user, threading.main_thread().ident):
            self.close()
        else:  # which the end may have to wait for
            self.end_apart()

    def __del__(self) -> None:
        # Of what was dropped together with an iterator that it led to. Not where __init__ failed.
        if not getattr(self, "_ended", True):
            self.end()

    def end_apart(self) -> None:
        """Let another thread close it.

        Not a threading.Thread: to start that takes a lock, which its owner may be collecting with.
        """
        _thread.start_new_thread(_serve, (lambda: self, lambda reference: self.close()))

    def _end(self) -> None:
        with self._ending:
            if self._ended:
                return
            self._gate.open()
            for _ in range(LANES):  # also for one that is just about to start
                self._given.put(None)
            for thread in self._threads:
                # One that is being started in this moment sees that it is to end.
                if thread is not threading.current_thread() and thread.is_alive():
                    thread.join(JOIN_SECONDS)
            alive = [thread for thread in self._threads if thread.is_alive()]
            streams = [(self._stream, "batch"), *((stream, "lane") for stream in self._lanes)]
            again = not alive  # whether the streams may serve again
            try:
                for stream, _ in streams:
                    if stream is not None:
                        stream.synchronize()  # see Note [Stream handoff], 3
                self.handovers.settle(all_of_them=True)
            except RuntimeError:  # of a broken context: the next call tells the user
                again = False
            self._parts.clear()
            for slot in list(self._slots):
                slot.done.set()  # for a loop in another thread
            self._slots.clear()
            self._sources.clear()
            self._suspended.clear()  # a cycle, which leaves the loader's workers to the collector
            self._held = self._taken = None
            idle = self._reading.acquire(timeout=0 if alive else JOIN_SECONDS)
            try:
                self._source.close(abandoned=not idle)
            finally:
                if idle:
                    self._reading.release()
            unmap_dead()
            # The garbage collector may have ended it meanwhile, in this thread.
            again, self._ended = again and not self._ended, True
            for stream, role in streams:
                if stream is not None and again:
                    return_stream(stream, role)


# Note [When to decode]
# What nvJPEG takes of the model's time depends on what the GPU does meanwhile. 128 photos beside a
# compiled ResNet-18 whose step takes 14.2 ms on an H200 made it 14.8 to 14.9 where the decode began
# with the step, or up to a quarter of it later, and 14.6 where it began behind two fifths (one
# process, two rounds; the host was ahead and waited for the GPU). The same step as one CUDA graph
# lost 0.2 ms, and that is what the model's kernels took longer; the rest is lost between them. So a
# batch that is not late is decoded in the latter part of the loop's step, and early enough to be
# ready when the loop comes back; if it comes earlier, from then on. Behind the loader, workers
# decoding 45 % of the photos, the step took 15.1 ms so, and 15.3 where each decode began with it
# (one process, medians of eight rounds); where the host held the GPU back, both took 15.4.

# Note [Threads hold no epoch]
# A transform, or a collate function, may lead to the iterator of the loop, as where all of them are
# attributes of one object. Dropping that is to end the epoch. So neither the iterator's finalizer
# nor a thread that waits, for room or for something to decode, holds the engine; nor a batch, whose
# error may have the engine in its frames.
Reference = Callable[[], Engine | None]


def _serve(reference: Reference, target: Callable[..., None], *args: Any) -> None:
    """What a thread of an engine does."""
    if (engine := reference()) is None:
        return
    ours = engine._ours
    ours.add(threading.get_ident())
    try:
        if engine._on_cuda:
            # It is on the first GPU, and might make a context there.
            torch.cuda.set_device(engine.device)
        del engine
        target(reference, *args)
    except BaseException as error:
        if (engine := reference()) is not None:
            engine._fail(error)
    finally:
        ours.discard(threading.get_ident())  # another thread may get it


def _fetch_loop(reference: Reference) -> None:
    while (engine := reference()) is not None and not engine._stopping:
        if engine._exhausted and engine._held is None:
            return
        number, changed = engine._hold(), engine._changed
        with changed:
            while not engine._may_start(number):
                del engine
                changed.wait()
                if (engine := reference()) is None:
                    return
            if (slot := engine._held_as(number)) is not None:
                engine._held = None
        if slot is None:  # it is the loop's, or nobody's at the end
            with changed:
                changed.wait_for(lambda: not engine._resting, PAUSE * engine.balancer.period)
            continue
        if not engine._stopping and slot.error is None and engine.lean:
            engine._wait_for_used()
        if engine._stopping:
            slot.error = None  # breaks the cycle with the frame of _fetch
            engine._source.close()
            return
        with engine._batch_stream():
            engine._start(slot)
        del slot


def _lane_loop(reference: Reference, stream: torch.cuda.Stream, room: list[torch.Tensor]) -> None:
    if (engine := reference()) is None:
        return
    given, gate = engine._given, engine._gate
    pipeline = engine._pipeline
    packing = packing_into(room) if pipeline.memory_budget is None else None
    del engine
    with torch.no_grad(), using(stream), packing or contextlib.nullcontext():
        pipeline.try_cuts()
        del pipeline
        while True:
            given.get()
            gate.wait()
            if (engine := reference()) is None or engine._stopping:
                return
            engine._run_part(*engine._parts.popleft())
            del engine
