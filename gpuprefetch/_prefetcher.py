"""DataPrefetcher: batches of a DataLoader on the device, in order and ahead of time."""

from __future__ import annotations

import _thread
import contextlib
import copy
import gc
import operator
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from gpuprefetch._balance import Balancer
from gpuprefetch._batch import leaves, tensors
from gpuprefetch._budget import LANES, READY, READY_BYTES, Cost, parse_bytes
from gpuprefetch._connections import tell
from gpuprefetch._decode import BACKENDS, packing_into, turns
from gpuprefetch._encoded import EncodedImageFolder, is_encoded
from gpuprefetch._format import load_decoders
from gpuprefetch._host import GROWTH, HostStage, Packer, encoded_leaves, pack_lists
from gpuprefetch._pipeline import (
    EMPTY,
    BadImage,
    Part,
    Pipeline,
    Work,
    count_images,
)
from gpuprefetch._replay import KEPT, NotedSampler, Notes, has_indices, note, replay, stands_alone
from gpuprefetch._resample import FLOAT_DTYPES
from gpuprefetch._resume import Source, in_order, kind, owners
from gpuprefetch._slab import unmap_dead
from gpuprefetch._stats import Stage
from gpuprefetch._stream import (
    handoff,
    lease_stream,
    may_switch,
    own_modes,
    return_stream,
    switched,
    throttle,
    using,
)
from gpuprefetch._transforms import Transform, read_transforms, require_fixed_size

# For a loader that hangs, when the loop is left: its thread is then abandoned, not waited for.
JOIN_SECONDS = 10.0
# A loop that is slower than the GPU waits for so long at most while the next batch is got under
# way, if the loader has one ready. See Note [The training thread's locks].
REST_SECONDS = 0.002
# A loop that got the next batch under way itself has Python's lock for this part of its step, if it
# is not back before: to fetch takes that for a millisecond, and the backward pass can do without.
PAUSE = 0.4
# A batch may be late where the loop waits longer for it, and not for its loader.
LATE_SECONDS = 0.001
# Where less of the GPU's memory is left, batches on their way get no more of it than they have. The
# first is beside what the next batch takes, which is prepared while the loop has one, the second is
# for all that comes after that.
SPARE_FOR_NEXT, SPARE_BYTES = 256 << 20, 1 << 30


class _Slot:
    """A batch between the loader and the loop."""

    __slots__ = """
        cost done encoded error event fetched images number remaining result source state work
    """.split()

    def __init__(self, number: int) -> None:
        self.number = number
        self.images = 0
        self.encoded = False  # whether they are
        self.source: Any = None
        self.state: Any = None
        self.fetched = 0.0
        self.cost = Cost()
        self.work: Work | None = None
        self.remaining = 0
        self.result: Any = None
        self.error: BaseException | None = None
        self.event: torch.cuda.Event | None = None
        self.done = threading.Event()


class _Engine:
    """The threads of one epoch. They hold it and never the iterator, so dropping that ends them."""

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
        self._slots: deque[_Slot] = deque()
        self._held: _Slot | None = None  # fetched; it does not fit beside what is under way
        # Taken from there by the loop, which gets it under way itself.
        self._taken: _Slot | None = None
        # What the host gave for batches that were handed over: the GPU may read it yet.
        self._sources: deque[tuple[torch.cuda.Event, Any]] = deque()
        # Its readers wake one at a time, and it is no Python code: the lock of that is scarce.
        self._parts: SimpleQueue[tuple[_Slot, Part] | None] = SimpleQueue()
        # To decode takes one of the permits; where memory is short, one lane takes all of them.
        self._permits, self._alone = threading.Semaphore(LANES), threading.Lock()
        # Closed while the loop launches a step, if it can spare the next batch until it is back.
        self._gate = threading.Event()
        self._gate.set()
        self._finishing = threading.Lock()
        self._suspended: list[Iterator[Any]] = []
        # Whether the thread that fetches has done all that it can, or is to leave the loop alone;
        # whether it found a batch ready the last time.
        self._resting, self._prompt = False, False
        # The largest tensor that the loop has, and of what it had before, behind what used that.
        self._handed: weakref.ref[torch.Tensor] | None = None
        self._used: tuple[torch.cuda.Event | None, weakref.ref[torch.Tensor] | None] = (None, None)
        self._exhausted = self._stopping = False
        self._pid, self.user = os.getpid(), threading.get_ident()
        self.period = 0.0  # of the loop's latest step
        self._fetched: int = source.place["batches"]
        self._fetch_ahead = fetch_ahead
        self._threads: list[threading.Thread] = []
        self._ours: set[int] = set()  # their identifiers
        self._lanes: list[torch.cuda.Stream] = []
        self._rooms: list[list[torch.Tensor]] = []  # of the lanes, where no budget counts them
        self._on_cuda = pipeline.device.type == "cuda"
        self._stream = lease_stream(pipeline.device, "batch") if self._on_cuda else None
        if fetch_ahead:
            self._spawn("fetch", self._fetch_loop)

    def _spawn(self, name: str, target: Callable[..., None], *args: Any) -> None:
        name, args = f"gpuprefetch-{name}", (target, *args)
        thread = threading.Thread(target=self.run, name=name, args=args, daemon=True)
        self._threads.append(thread)  # the first is that which fetches; it may start others at once
        try:
            thread.start()
        except RuntimeError:  # not everywhere are there as many threads as one asks for
            self._threads.remove(thread)
            raise

    def run(self, target: Callable[..., None], *args: Any) -> None:
        """What a new thread of ours does."""
        self._ours.add(threading.get_ident())
        try:
            if self._on_cuda:
                # It is on the first GPU, and might make a context there.
                torch.cuda.set_device(self.device)
            target(*args)
        except BaseException as error:
            self._fail(error)
        finally:
            self._ours.discard(threading.get_ident())  # another thread may get it

    def _fail(self, error: BaseException) -> None:
        """Let the loop know that one of the threads has ended: it might wait for it."""
        with self._changed:
            self._exhausted = True
            self._slots.append(_Slot(self._fetched))
            for slot in self._slots:
                if not slot.done.is_set():
                    slot.error = error
                    slot.done.set()
            self._changed.notify_all()

    def _batch_stream(self) -> contextlib.AbstractContextManager[None]:
        if self._stream is not None and may_switch(self.device):
            return switched(self._stream)
        return self._batch_stream_of_caller()

    @contextlib.contextmanager
    def _batch_stream_of_caller(self) -> Iterator[None]:
        stream = using(self._stream) if self._stream else contextlib.nullcontext()
        with own_modes(self.device), stream:
            yield

    def _fetch_loop(self) -> None:
        while not self._exhausted:
            slot = self._fetch()
            with self._changed:
                self._held = slot
                self._changed.wait_for(partial(self._may_start, slot))
                taken, self._held = self._held is not slot, None
            if taken and not self._stopping:
                del slot  # the loop's, with its result
                with self._changed:
                    self._changed.wait_for(lambda: not self._resting, PAUSE * self.period)
                continue
            if not self._stopping and slot.error is None and self._lean:
                self._wait_for_used()
            if self._stopping:
                if not taken:
                    slot.error = None  # breaks the cycle with the frame of _fetch
                self._source.close()
                return
            with self._batch_stream():
                self._start(slot)
            del slot

    def _fetch(self) -> _Slot:
        """Take a batch from the loader."""
        slot = _Slot(self._fetched)
        self._fetched += 1
        try:
            with Stage(self.stats, "fetch") as fetch:
                batch, slot.state = next(self._source)
            self._prompt = fetch.seconds < REST_SECONDS / 2
            self._pipeline.packer.begin()
            slot.source = pack_lists(batch, self._pipeline.packer)
            if self._pipeline.memory_budget is not None or not self._usual.fixed:
                slot.cost = self._pipeline.cost(slot.source)
                self._usual = self._usual if self._usual.fixed else slot.cost
            self._learn(slot, fetch.seconds)
            self._check(slot.source)
            self._wait_for_loader(slot.source)
            slot.fetched = time.perf_counter()
        except BaseException as error:
            self._exhausted = True
            self._interrupt(error)
            # Nobody looks into the end of an epoch, and its frames hold the loader's iterator.
            slot.error = error.with_traceback(None) if isinstance(error, StopIteration) else error
        return slot

    def _wait_for_loader(self, batch: Any) -> None:
        """What the loader has put on the device itself may be queued on the current stream."""
        others = (leaf for leaf in leaves(batch, is_encoded) if not is_encoded(leaf))
        if self._stream is not None and any(t.is_cuda for leaf in others for t in tensors(leaf)):
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def _interrupt(self, error: BaseException) -> None:
        """Ctrl-C is not for a later batch: the loop may never take that."""
        if isinstance(error, KeyboardInterrupt) and threading.get_ident() not in self._ours:
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
    def _lean(self) -> bool:
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

    def _has_room(self, slot: _Slot) -> bool:
        """Whether a batch need not wait: a single one may take the whole memory budget."""
        budget = self._pipeline.memory_budget
        if self._stopping or budget is None or len(self._slots) >= self._depth:
            return self._stopping or len(self._slots) < self._depth
        works = [other.work for other in self._slots]
        used = sum(other.cost.fixed for other in self._slots)
        used += sum(work.decoded_bytes for work in works if work is not None)
        return not self._slots or used + slot.cost.fixed + slot.cost.decoded <= budget

    def _may_start(self, slot: _Slot) -> bool:
        """Whether there is room for a batch, or the loop has taken it; if not, it need not wait."""
        if self._stopping or self._held is not slot:
            return True
        if self._taken is None and self._has_room(slot):
            return True
        self._rest()
        return False

    def _rest(self) -> None:
        """Let a loop go on that waits for the thread that fetches; with ``_changed`` held."""
        self._resting = True
        self._changed.notify_all()

    def _make_room(self, held: contextlib.ExitStack) -> None:
        """Wait for the other lanes, and keep them from decoding as long as ``held`` is."""
        self.stats.out_of_memory += 1
        held.close()  # a permit, or all of them: nobody waits for permits while he holds one
        held.enter_context(self._alone)
        for _ in range(LANES):
            held.enter_context(self._permits)
        for room in self._rooms:
            room.clear()
        if self._on_cuda:
            torch.cuda.empty_cache()

    def _start(self, slot: _Slot) -> None:
        """Get the work of a batch under way, with its stream current."""
        parts: list[Part] = []
        try:
            while self._sources and self._sources[0][0].query():
                self._sources.popleft()
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
            self._slots.append(slot)
            self._changed.notify_all()
        for part in parts:
            if self._on_cuda:
                self._parts.put((slot, part))
            else:
                self._run_part(slot, part)
        if not parts:
            self._finish_ready()

    def _begin_with_room(self, slot: _Slot) -> Work:
        try:
            return self._begin(slot)
        except torch.OutOfMemoryError:
            pass  # and not again in here, where the exception holds what was allocated
        with contextlib.ExitStack() as held:
            self._make_room(held)
            return self._begin(slot)

    def _begin(self, slot: _Slot) -> Work:
        return self._pipeline.start(slot.source, slot.number, self._epoch)

    def _start_lanes(self) -> None:
        while len(self._lanes) < (LANES if turns[self.device].several else 1):
            self._lanes.append(lease_stream(self.device, "lane"))
            self._rooms.append([])
            self._spawn("decode", self._lane_loop, self._lanes[-1], self._rooms[-1])

    def _learn(self, slot: _Slot, waited: float) -> None:
        slot.images = count_images(slot.source)
        packed = encoded_leaves(slot.source)
        slot.encoded = bool(packed)
        counts = [(len(images), int(images.decoded.sum())) for images in packed]
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

    def _lane_loop(self, stream: torch.cuda.Stream, room: list[torch.Tensor]) -> None:
        packing = packing_into(room) if self._pipeline.memory_budget is None else None
        with torch.no_grad(), using(stream), packing or contextlib.nullcontext():
            while not self._stopping:
                item = self._parts.get()
                self._gate.wait()
                if item is not None and not self._stopping:
                    self._run_part(*item)
                del item

    def _run_part(self, slot: _Slot, part: Part) -> None:
        try:
            if slot.error is None:
                with contextlib.ExitStack() as held:
                    held.enter_context(self._permits)
                    part(partial(self._make_room, held))
        except BaseException as error:
            slot.error = error
        with self._changed:
            slot.remaining -= 1
            last = slot.remaining == 0
        if last:
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

    def _finish(self, slot: _Slot) -> None:
        try:
            if slot.error is None and slot.work is not None:
                with self._batch_stream():
                    slot.result = slot.work.finish()
                    if self._stream is not None:
                        slot.event = torch.cuda.Event(blocking=True)
                        slot.event.record(self._stream)
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
        self._gate.set()
        return turns[self.device].hurried()

    def spare(self) -> None:
        """Let the decode wait until the loop is back, if the batch that it takes then is ready."""
        with self._changed:
            if self._slots and self._slots[0].done.is_set() and not self._stopping:
                self._gate.clear()

    def let_fetch(self) -> None:
        """Get the next batch under way, or let that be done, while the loop launches nothing."""
        if self._taken is not None:
            with self._batch_stream():
                self._apart(self._start, self._taken)
            with self._changed:
                self._taken = None
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

    def take(self, used: torch.cuda.Event | None = None, *, ahead: bool = False) -> _Slot:
        """The next batch in order, as soon as its work has been queued.

        Args:
            used: behind what the loop has queued.
            ahead: whether the loop had to wait for the GPU.
        """
        self.user = threading.get_ident()
        while not self._fetch_ahead and len(self._slots) < self._depth:
            if self._held is None and self._exhausted:
                break
            slot, self._held = self._held or self._apart(self._fetch), None
            if not self._has_room(slot):
                self._held = slot
                break
            with self._batch_stream():
                self._apart(self._start, slot)
        began = time.perf_counter()
        with self._changed:
            self._wanted = True
            if not self._slots:
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._slots)
            self._wanted = False
            slot = self._slots[0]
        slot.done.wait()
        if self._on_cuda:
            waited = time.perf_counter() - began
            # For its decode, or else for the loader.
            self._learn_wait(waited if slot.fetched < began else 0.0, ahead=ahead)
        if slot.event is not None:
            self._sources.append((slot.event, slot.source))
        largest = None
        if self._lean:
            on_device = (tensor for tensor in tensors(slot.result) if tensor.is_cuda)
            largest = max(on_device, key=lambda tensor: tensor.nbytes, default=None)
        with self._changed:
            self._used = used, self._handed
            self._handed = None if largest is None else weakref.ref(largest)
            self._slots.popleft()
            self._resting = not ahead and self._at_hand()
            if self._resting:
                self._taken, self._held = self._held, None
            else:
                self._changed.notify_all()
        return slot

    def _at_hand(self) -> bool:
        """Whether there is a batch that the loop can get under way in no time."""
        slot = self._held
        if slot is None or not self._fetch_ahead or not slot.encoded or self._lean:
            return False
        return not (self._pipeline.tail or self._pipeline.after) and self._has_room(slot)

    def _learn_wait(self, seconds: float, *, ahead: bool) -> None:
        """Give batches on their way more memory: where there is room, and then where they are late.

        The loop waited for one, and the GPU has nothing to do now; or, which does not call for a
        second decoder, soon, for a loop that was not ahead of it before will not be now.
        """
        turn = turns[self.device]
        late = seconds > LATE_SECONDS and (
            not (ahead or turn.deep) or torch.cuda.current_stream(self.device).query()
        )
        if turn.learn(late=late and not self.balancer.trying) and self._memory_to_spare():
            turn.level += 1
        if turn.several and self._pipeline.memory_budget is None:
            self._pipeline.packer.large_calls.numpy()[0] = True

    def _memory_to_spare(self) -> bool:
        """Whether enough is left of the GPU's memory at the loop's own peak."""
        free, _ = torch.cuda.mem_get_info(self.device)
        kept = torch.cuda.memory_reserved(self.device)
        next_one = self._usual.fixed + self._usual.decoded + SPARE_FOR_NEXT
        least = next_one if turns[self.device].bare else SPARE_BYTES
        return free + kept - torch.cuda.max_memory_allocated(self.device) >= least

    def close(self) -> None:
        """End the threads, give the streams back and drop every batch that was not handed over."""
        if os.getpid() != self._pid:
            return  # a forked worker collects garbage of ours: threads and streams are not its own
        with self._changed:
            if self._stopping:
                return
            self._stopping, self._resting = True, False
            self._changed.notify_all()
        self._gate.set()
        for _ in range(LANES):  # also for one that is just about to start
            self._parts.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_SECONDS)
        alive = [thread for thread in self._threads if thread.is_alive()]
        streams = [(self._stream, "batch"), *((stream, "lane") for stream in self._lanes)]
        with contextlib.suppress(RuntimeError):  # of a broken context: the next call tells the user
            for stream, role in streams:
                if stream is not None:
                    stream.synchronize()  # see Note [Stream handoff], 3
                    if not alive:
                        return_stream(stream, role)
        while not self._parts.empty():
            self._parts.get()
        self._slots.clear()
        self._sources.clear()
        self._suspended.clear()  # a cycle, which leaves the loader's workers to the collector
        self._held = None
        self._source.close(abandoned=self._fetch_ahead and self._threads[0] in alive)
        unmap_dead()


class _Epoch:
    """Iterator over one epoch."""

    def __init__(self, engine: _Engine) -> None:
        self._engine, self._stats = engine, engine.stats
        # Shared with the prefetcher, which must not keep the iterator alive.
        self.use = ["unused"]
        self._steps: deque[torch.cuda.Event] = deque()
        self._last: float | None = None
        # Runs also at garbage collection and at interpreter exit.
        self.close = weakref.finalize(self, _end, engine, self.use)

    def end(self) -> None:
        """Close the epoch, and be through with it, in whatever thread."""
        if self.close.detach():
            self._engine.close()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while (batch := self._next()) is EMPTY:
            pass
        return batch

    def _next(self) -> Any:
        if not self.close.alive:
            raise StopIteration
        self.use[0] = "used"
        try:
            started = time.perf_counter()
            with self._engine.waiting():
                ahead = throttle(self._steps, self._engine.device)
                with Stage(self._stats, "wait"):
                    used = self._steps[-1] if self._steps else None
                    slot = self._engine.take(used, ahead=ahead)
                if not ahead:
                    self._engine.let_fetch()
            if ahead:
                self._engine.spare()
            now = time.perf_counter()
            self._stats.seconds += now - (started if self._last is None else self._last)
        except BaseException:
            self.close()
            raise
        if slot.error is not None:
            self.close()
            error = slot.error
            if isinstance(error, StopIteration) and slot.source is not None:
                # Not the loader's: a transform's, and no end of the epoch.
                error = RuntimeError("a transform raised StopIteration")
                error.__cause__ = slot.error
            slot.error = slot.source = None
            if not isinstance(error, StopIteration):
                error.add_note(f"raised by the prefetcher while it prepared batch {slot.number}")
            try:
                raise error
            finally:
                del error  # breaks the cycle between the exception and this frame
        self._stats.batches += slot.result is not EMPTY
        self._stats.images += slot.images
        self._engine.place.update(batches=slot.number + 1, loader=slot.state)
        if self._last is not None:
            self._engine.period = now - self._last
            self._engine.balancer.handed_over(self._engine.period)
        self._last = now
        if slot.event is not None:
            with Stage(self._stats, "handoff"):
                handoff(slot.result, slot.event, self._engine.device)
        return slot.result


_running: weakref.WeakValueDictionary[int, _Epoch] = weakref.WeakValueDictionary()  # by loader


def _end(engine: _Engine, use: list[str]) -> None:
    use[0] = "dropped" if use[0] == "unused" else use[0]
    if threading.get_ident() in (engine.user, threading.main_thread().ident):
        engine.close()
    else:
        # The garbage collector runs in any thread, also in one that the end has to wait for. Not a
        # threading.Thread: to start that takes a lock, which its owner may be collecting with.
        _thread.start_new_thread(engine.run, (engine.close,))


def _resolve_device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f'device must be "cuda", "cuda:1", an index, a torch.device or "cpu", got {device!r}.'
        ) from error
    if resolved.type == "cpu":
        return resolved
    if resolved.type != "cuda":
        raise ValueError(f"device must be CUDA or CPU, got {str(resolved)!r}.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if resolved.index is None and count:
        return torch.device("cuda", torch.cuda.current_device())
    if not count or not 0 <= (resolved.index or 0) < count:
        raise ValueError(
            f"device {str(resolved)!r} is not there: torch sees {count} CUDA devices. "
            "Leave device out to use CUDA where there is one and the CPU elsewhere."
        )
    return resolved


class DataPrefetcher:
    """Wrap a DataLoader: its batches arrive on the device, decoded and transformed ahead of time.

    The batches are the wrapped loader's, in its order. Tensors in any nesting of tuples, lists,
    mappings, namedtuples and dataclasses move to the device, as do objects with a ``to`` method;
    other leaves pass through. Every ``iter()`` is a new epoch. Attributes that are not found here
    (``dataset``, ``sampler``, ``batch_size``, ...) are the loader's. The caller's current device
    and stream are never changed.

    Args:
        loader: a ``DataLoader``, or any iterable of batches that can be iterated again.
        device: CUDA device, its index, or "cpu"; None is CUDA where there is one, else the CPU,
            which gives the same results without streams.
        transforms: list of kornia augmentation modules, this library's own, and callables on an
            ``(N, C, H, W)`` batch. The head of the list (crop or resize, flips, ``Normalize``) runs
            as one launch, also on decoded images of different sizes, and gives values in [0, 1]
            before ``Normalize``; what follows runs on its result.
        dtype: of the images after that head; float32 by default.
        memory_format: of the images after that head; contiguous by default.
        device_prefetch_size: batches kept ready or in preparation on the device; None for one, in
            the memory of the batch that the loop has used up where that is early enough, for two
            where the GPU would wait else and they take no more than 512 MiB, and for none where the
            loop leaves no room for the next one.
        decoder: "torchcodec" or "torchvision" (both nvJPEG on the GPU), "cpu" (TorchCodec in the
            workers), or "auto": torchcodec on CUDA, else cpu.
        apply_exif: whether pictures are turned upright; False agrees with PIL and ``ImageFolder``.
        cpu_share: share of the JPEGs, the smallest files first, that the workers decode, 0.0 to
            1.0, or "auto" for what idle cores can carry, balanced while running.
        seed: of the random parameters of the transforms; None takes ``torch.initial_seed()``. They
            are a function of (seed, epoch, sample), whatever the batch size and number of workers.
        on_error: for a file that cannot be decoded: "raise" :class:`BadImageError`, "skip" the
            sample, "replace" it by another one of the batch, target included, or a callable that
            gets the :class:`BadImage`, after which it is skipped.
        max_bad: how many bad files are tolerated before :class:`BadImageError` is raised anyway.
            One that several epochs come upon, by index and path, counts once.
        memory_budget: of the device, for batches that are on their way to the loop: "2GiB",
            "512MiB", or bytes; None for no limit. It counts decoded images, and the tensors of a
            batch (with the images behind the fused head) until the batch is handed over; fewer
            batches are kept ready, and decoded in smaller parts, where they would pass it. It does
            not count the decoder's own memory, what the transforms behind the head allocate, nor
            what torch's allocator keeps for later.

    Attributes:
        stats: counters, see :class:`Stats`.

    Raises:
        TypeError: if ``loader`` is a dataset, iterated once or what accelerate prepared, or a
            transform is not callable.
        ValueError: for other arguments out of range, and for transforms that cannot work.

    Example:
        >>> loader = DataPrefetcher(DataLoader(dataset, num_workers=8, pin_memory=True))
        >>> for images, target in loader: ...
    """

    def __init__(
        self,
        loader: DataLoader[Any] | Iterable[Any],
        *,
        device: torch.device | str | int | None = None,
        transforms: Sequence[Transform] | None = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
        device_prefetch_size: int | None = None,
        decoder: str = "auto",
        apply_exif: bool = False,
        cpu_share: float | str = "auto",
        seed: int | None = None,
        on_error: str | Callable[[BadImage], Any] = "raise",
        max_bad: int | None = None,
        memory_budget: str | int | None = None,
    ) -> None:
        if isinstance(loader, (Dataset, str, bytes, type)) or not hasattr(loader, "__iter__"):
            raise TypeError(
                f"DataPrefetcher wraps a DataLoader, got {type(loader).__name__}. "
                "Build one first: DataPrefetcher(DataLoader(dataset, batch_size=...)), with "
                "batch_size=None for what gives batches already, as WebDataset's WebLoader."
            )
        # Of other modules a class may begin anew in an __iter__ that returns itself.
        once = ("builtins", "itertools", "torch.utils.data.dataloader")
        if hasattr(loader, "__next__") and type(loader).__module__ in once:
            raise TypeError(
                f"A {type(loader).__name__} gives its batches once. Pass what can be iterated anew "
                "for each epoch, such as the DataLoader itself."
            )
        if hasattr(loader, "base_dataloader"):  # its end would come before ours, ahead of the loop
            raise TypeError(
                "what accelerator.prepare() returns counts the batches of the loop: put the "
                "prefetcher into it, prepared.base_dataloader = "
                "DataPrefetcher(prepared.base_dataloader, device=accelerator.device)."
            )
        size = device_prefetch_size
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ValueError(f"device_prefetch_size is in batches, at least 1, got {size!r}.")
        if not callable(on_error) and on_error not in ("raise", "skip", "replace"):
            raise ValueError(
                f'on_error must be "raise", "skip", "replace" or a callable, got {on_error!r}.'
            )
        if max_bad is not None and (not isinstance(max_bad, int) or max_bad < 0):
            raise ValueError(f"max_bad is a number of images, or None, got {max_bad!r}.")
        if dtype not in (None, torch.uint8, *FLOAT_DTYPES):
            raise ValueError(
                "dtype must be torch.uint8 or a floating-point one of 16 bits or more, as "
                f"torch.bfloat16, got {dtype!r}."
            )
        if memory_format not in (None, torch.contiguous_format, torch.channels_last):
            raise ValueError(
                f"memory_format is torch.contiguous_format or channels_last, got {memory_format!r}."
            )
        if apply_exif not in (True, False):
            raise ValueError(f"apply_exif must be True or False, got {apply_exif!r}.")
        if seed is not None and not hasattr(seed, "__index__"):
            raise ValueError(f"seed is an int, or None, got {seed!r}.")
        self._loader = loader
        self.device = _resolve_device(device)
        head, tail = read_transforms(transforms)
        asked = dtype not in (None, torch.uint8) or memory_format is torch.channels_last
        if (head.names or tail or asked) and _is_encoded_folder(getattr(loader, "dataset", None)):
            require_fixed_size(head, tail)
        backend = self._backend(decoder)
        share = torch.zeros(1, dtype=torch.float64)
        share.fill_(_fixed_share(cpu_share))
        packer = Packer(
            head,
            on_gpu=backend is not None,
            apply_exif=apply_exif,
            seed=torch.initial_seed() if seed is None else operator.index(seed),
            epoch=torch.zeros(1, dtype=torch.int64),
            share=share,
            output=(dtype or torch.float32, memory_format or torch.contiguous_format)
            if self.device.type == "cpu"
            else None,
            growth=GROWTH if backend is not None and cpu_share == "auto" else 0,
            dtype=dtype or torch.float32,
        )
        self._pipeline = Pipeline(
            self.device,
            head,
            tail,
            packer,
            backend,
            dtype,
            memory_format,
            on_error,
            max_bad,
            memory_budget=parse_bytes(memory_budget),
        )
        self.stats = self._pipeline.stats
        self._balancer = Balancer(share, loader, fixed=cpu_share != "auto" or backend is None)
        self._depth = device_prefetch_size
        self._epoch = 0
        self._persistent: DataLoader[Any] | None = None
        self._checked = False
        self._manual: _Epoch | None = None
        self._manual_length = 2
        self._place: dict[str, Any] = {"epoch": 0, "batches": 0}
        self._resume = self._resumed = False
        self._notes: dict[int, Notes] = {}
        self._use = ["used"]

    def _backend(self, decoder: str) -> Any:
        if decoder == "auto":
            decoder = "torchcodec" if self.device.type == "cuda" else "cpu"
        if decoder == "cpu":
            return None
        if decoder not in BACKENDS:
            names = ", ".join(f'"{name}"' for name in ("auto", "cpu", *BACKENDS))
            raise ValueError(f"decoder must be one of {names}, got {decoder!r}.")
        if self.device.type != "cuda":
            raise ValueError(f'decoder={decoder!r} needs a CUDA device; use "auto" or "cpu" here.')
        return BACKENDS[decoder](self.device)

    @property
    def bad_images(self) -> list[BadImage]:
        """The images that were skipped or replaced, over all epochs, each file once."""
        return list(self._pipeline.bad_images.values())

    def __iter__(self) -> Iterator[Any]:
        if self._use[0] == "dropped":
            # Unused, as by Lightning, which makes one iterator to see whether it can: no epoch.
            self._epoch, self._resume = self._place["epoch"], self._resumed
        epoch, self._epoch = self._epoch, self._epoch + 1
        resumed = self._place if self._resume else None
        self._resumed, self._resume = self._resume, False
        loader, pipeline = self._prepared_loader(epoch)
        notes = self._noted(loader, epoch)
        load_decoders()
        try:
            source = self._source(loader, resumed, notes)
        except BaseException:
            self._epoch, self._resume = epoch, resumed is not None  # to be tried once more
            raise
        self._place = source.place
        self._place["epoch"] = epoch
        self._balancer.begin()
        engine = _Engine(
            pipeline,
            source,
            depth=self._depth if self.device.type == "cuda" else 1,
            epoch=epoch,
            # Without workers the dataset runs in this process: on the caller's thread it keeps the
            # order of random numbers it would have without us. On the CPU there is nothing to run
            # ahead of.
            fetch_ahead=self.device.type == "cuda" and getattr(loader, "num_workers", 0) > 0,
            balancer=self._balancer,
            check=self._check_first,
            shares=notes.shares,
        )
        iterator = _Epoch(engine)
        self._use, _running[id(loader)] = iterator.use, iterator
        return iterator

    def _source(self, loader: Any, resumed: dict[str, Any] | None, notes: Notes) -> Source:
        with _garbage_kept_from_forks():
            source = Source(loader, resumed)
        notes.place = source.place
        if isinstance(getattr(loader, "batch_sampler", None), NotedSampler):
            try:
                notes.refuse_another_order()
            except ValueError:
                source.close()
                raise
        return source

    def _prepared_loader(self, epoch: int) -> tuple[Iterable[Any], Pipeline]:
        """The loader with our packing in its collate; the user's own object is left as it is."""
        if not isinstance(self._loader, DataLoader):
            return self._loader, self._with_epoch(epoch)
        if self._loader.persistent_workers:
            if (running := _running.get(id(self._persistent))) is not None:
                running.end()  # its thread may be waiting for the same workers
            # These workers live on: the epoch reaches them through shared memory.
            self._pipeline.packer.epoch.share_memory_().fill_(epoch)  # not in a deep copy of us
            if self._persistent is None:
                self._persistent = _with_collate(self._loader, self._pipeline.packer)
            return self._persistent, self._pipeline
        pipeline = self._with_epoch(epoch)
        return _with_collate(self._loader, pipeline.packer), pipeline

    def _noted(self, loader: Any, epoch: int) -> Notes:
        """Notes of a new epoch, which its sampler will write; those of an older one are dropped."""
        self._notes.pop(epoch, None)
        notes = self._notes[epoch] = Notes(self._pipeline.packer.seed)
        sampler = getattr(loader, "batch_sampler", None)
        if isinstance(sampler, NotedSampler):
            sampler.batches = notes.batches
        if len(self._notes) > KEPT:
            del self._notes[next(iter(self._notes))]
        return notes

    def _with_epoch(self, epoch: int) -> Pipeline:
        packer = replace(self._pipeline.packer, epoch=torch.tensor([epoch]))
        return replace(self._pipeline, packer=packer)

    def _check_first(self, batch: Any) -> None:
        """Say once, at the first batch, what will make the loader slow."""
        if self._checked or self.device.type != "cuda":
            return
        self._checked = True
        parts = [images.pixels for images in encoded_leaves(batch)]
        if parts:
            tell()
        parts = parts or list(tensors(batch))
        if any(
            part.device.type == "cpu" and part.numel() and not part.is_pinned() for part in parts
        ):
            warnings.warn(
                "The wrapped loader does not pin its memory, so copies to the GPU block and overlap"
                " less. Pass pin_memory=True to the DataLoader.",
                stacklevel=2,
            )

    def next(self) -> Any:
        """The next batch, in the manner of Apex's ``data_prefetcher``.

        Returns:
            The batch; at the end of an epoch a tuple of as many None as the batch has elements (one
            None for a batch that is no tuple or list). The call after that starts a new epoch.
        """
        if self._manual is None:
            self._manual = iter(self)  # type: ignore[assignment]
        try:
            batch = next(self._manual)  # type: ignore[arg-type]
        except StopIteration:
            self._manual = None
            return (None,) * self._manual_length if self._manual_length else None
        except BaseException:
            self._manual = None
            raise
        self._manual_length = len(batch) if isinstance(batch, (tuple, list)) else 0
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the latest epoch stands: what the loop has had, not what is under way to it.

        A state taken behind the last batch of an epoch resumes with nothing left of it. Of the
        dataset only torchdata's ``StatefulDataLoader`` saves anything: random numbers that another
        one draws in its workers are not repeated.

        Raises:
            ValueError: behind a batch of a loader with ``in_order=False``.
        """
        if self._place["batches"] and not in_order(self._loader):
            raise ValueError(
                f"the loop has had {self._place['batches']} batches, but with in_order=False it is "
                "not known which: to resume would leave some out and repeat others. Give the "
                "DataLoader in_order=True, or save no state of it."
            )
        state = self._place | {"seed": self._pipeline.packer.seed, "kind": kind(self._loader)}
        notes = self._notes.get(self._place["epoch"])
        if notes is not None and notes.place is self._place:  # else loaded, with its own
            state["drawn"] = notes.drawn()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter()`` go on where :meth:`state_dict` was taken.

        The batches are those of the uninterrupted epoch, also with other workers or another
        ``device_prefetch_size``, but not with another batch size, nor, of an iterable dataset
        without a state of its own, with another number of workers. An order of integers that the
        sampler does not draw again is a ``ValueError`` of that ``iter()``.

        Raises:
            ValueError: if ``state`` does not come from :meth:`state_dict`, or from that of another
                kind of loader.
        """
        if not isinstance(state, dict) or not {"epoch", "batches", "seed"} <= state.keys():
            raise ValueError(f"state must come from DataPrefetcher.state_dict(), got {state!r}.")
        # A state of an older version does not know of shared samples, which are named first.
        if not kind(self._loader).endswith(state.get("kind", "")):
            raise ValueError(
                f"state is of a loader with {state['kind']}; this one has {kind(self._loader)}. "
                "Build it as it was."
            )
        self._manual = None
        self._pipeline.packer.seed = state["seed"]
        self._persistent = None  # its workers may have another seed
        self.set_epoch(state["epoch"])
        for owner, epoch in zip(owners(self._loader), state.get("epochs", ()), strict=False):
            if epoch is not None:  # a sampler's, which need not be ours
                owner.set_epoch(epoch)
        self._place, self._resume = dict(state), "random_states" in state

    def replay(self, index: int, epoch: int | None = None) -> Any:
        """What the model saw of a sample, bit for bit: its batch is prepared once more.

        The head's parameters are a function of (seed, epoch, sample), those of the transforms
        behind it of (seed, epoch, number of the batch), so the whole batch is read, decoded by the
        same decoders and transformed. Its samples are known for the two latest epochs of this
        prefetcher, one that :meth:`load_state_dict` went on with included (its batches before that
        only if ``cpu_share`` is fixed). Of any other epoch a sample is replayed alone, where no
        transform depends on the rest of the batch and ``cpu_share`` is 0 or 1. Not repeated is what
        dataset and collate function draw themselves, and what a transform draws from elsewhere than
        torch, or in a dropout.

        Args:
            index: of the sample in ``dataset``, as the sampler gives it. If the epoch drew it
                several times, the first of them is meant.
            epoch: as for :meth:`set_epoch`; None is the latest that the loop has had a batch of.

        Returns:
            A batch of one, in the form of the loader's batches and on the device.

        Raises:
            BadImageError: if the file cannot be decoded.
            LookupError: if no batch of the epoch has held the sample so far.
            ValueError: if it cannot be known what the model saw.
        """
        if not has_indices(self._loader):
            raise ValueError(
                "replay needs torch's DataLoader, making batches of a map-style dataset in order: "
                "of others it is not known how to read a sample's batch again."
            )
        if epoch is None:
            places = [*(notes.place for notes in self._notes.values()), self._place]
            used = [place["epoch"] for place in places if place["batches"]]
            if not used:
                raise LookupError("no batch of any epoch has been handed over so far.")
            epoch = used[-1]
        notes, fixed = self._notes.get(epoch), self._balancer.fixed
        if notes is None:
            if not stands_alone(self._pipeline, fixed=fixed):
                raise ValueError(
                    f"what the model saw in epoch {epoch} depends on the rest of the batch, and "
                    f"only the batches of epochs {list(self._notes)} are known. Load a "
                    "state_dict() of that epoch and take a batch, or keep what you need."
                )
            notes = Notes(self._pipeline.packer.seed, [[index]], place={"batches": 1})
        return replay(self._loader, self._pipeline, notes, index, epoch, fixed=fixed)

    def set_epoch(self, epoch: int) -> None:
        """Number the next epoch: for the samplers of the loader, and for the random parameters."""
        epoch = operator.index(epoch)  # an int, which torch.load takes back, also of numpy's
        self._epoch, self._use = epoch, ["used"]
        if epoch != self._place["epoch"]:
            self._place, self._resume = {"epoch": epoch, "batches": 0}, False
        for owner in owners(self._loader):
            owner.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also keeps copy and pickle from recursing before _loader is set
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)

    def __repr__(self) -> str:
        return f"DataPrefetcher({self._loader!r}, device={str(self.device)!r})"


_frozen, _freezing = 0, threading.Lock()  # by how many threads


@contextlib.contextmanager
def _garbage_kept_from_forks() -> Iterator[None]:
    """Fork workers in it: they will not collect what this process left to its garbage collector.

    An exception that left an epoch is in a cycle with frames that hold pinned memory and CUDA
    events. A forked worker that collects them calls CUDA, which a fork must not, and aborts. What
    the user has frozen is collected again behind this: the two cannot be told apart.
    """
    global _frozen
    with _freezing:
        _frozen += 1
        gc.freeze()
    try:
        yield
    finally:
        with _freezing:
            _frozen -= 1
            if not _frozen:
                gc.unfreeze()


def _with_collate(loader: DataLoader[Any], packer: Packer) -> DataLoader[Any]:
    clone = copy.copy(loader)
    clone._iterator = None
    if hasattr(loader, "next_iter_state"):
        loader.next_iter_state = None  # a StatefulDataLoader's: good for one epoch, the clone's
    for shared in (packer.share, packer.large_calls):
        shared.share_memory_()  # not in a deep copy of the prefetcher
    clone.collate_fn = HostStage(loader.collate_fn, packer)
    if has_indices(clone):
        note(clone)
    return clone


def _fixed_share(cpu_share: float | str) -> float:
    if cpu_share == "auto":
        return 0.0
    if isinstance(cpu_share, (int, float)) and 0 <= cpu_share <= 1:
        return float(cpu_share)
    raise ValueError(
        f'cpu_share is a share of the images, 0.0 to 1.0, or "auto", got {cpu_share!r}.'
    )


def _is_encoded_folder(dataset: Any) -> bool:
    """Whether a dataset surely hands out encoded images, through Subset and ConcatDataset."""
    if dataset is None or isinstance(dataset, EncodedImageFolder):
        return dataset is not None
    inner = getattr(dataset, "datasets", None) or [getattr(dataset, "dataset", None)]
    return isinstance(inner, Sequence) and all(_is_encoded_folder(d) for d in inner)
