"""The iterator over one epoch: hands batches to the loop, and ends with it."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from gpuprefetch._engine import Engine
from gpuprefetch._pipeline import EMPTY
from gpuprefetch._stats import Stage
from gpuprefetch._stream import handoff, throttle


class Epoch:
    """Iterator over one epoch."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._stats = engine, engine.stats
        # Shared with the prefetcher, which must not keep the iterator alive.
        self.use = ["unused"]
        self._steps: deque[torch.cuda.Event] = deque()
        self._last: float | None = None
        self._failed = False
        # Runs also at garbage collection and at interpreter exit. See Note [Threads hold no epoch].
        self.close = weakref.finalize(self, _end, weakref.ref(engine), self.use)
        self._alone = threading.RLock()  # several threads may share the iterator
        engine.start()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._alone:
            while (batch := self._next()) is EMPTY:
                pass
            return batch

    def __reduce__(self) -> Any:
        raise NotImplementedError(
            "an iterator over an epoch cannot be copied or pickled: take the prefetcher, whose "
            "state_dict() says where it stands"
        )

    def _next(self) -> Any:
        if not self.close.alive:
            if self._failed:
                raise RuntimeError(
                    "an error has ended this epoch, and its later batches are gone. Begin a new "
                    "one with iter(), or with set_epoch() for the prefetcher's own next(), or "
                    "leave out what cannot be read in the dataset."
                )
            raise StopIteration
        self.use[0] = "used"
        try:
            started = time.perf_counter()
            with self._engine.waiting():
                ahead = throttle(self._steps, self._engine.device)
                self._engine.handovers.settle()  # the next batch takes the memory
                with Stage(self._stats, "wait"):
                    used = self._steps[-1] if self._steps else None
                    slot = self._engine.take(used, ahead=ahead)
                if not ahead:
                    self._engine.let_fetch()
            now = time.perf_counter()
            self._stats.seconds += now - (started if self._last is None else self._last)
        except BaseException as stopped:
            ended = isinstance(stopped, StopIteration)
            taken = ended and self.close.alive  # by a later epoch, which did not end this one
            self._failed = taken or not ended
            self.close()
            if taken:
                raise RuntimeError(
                    "a second iter() of the prefetcher has ended this epoch, and its later batches "
                    "are gone: persistent workers serve one epoch at a time. For two at once "
                    "iterate copy.copy(prefetcher) as well, which has workers of its own, or leave "
                    "persistent_workers out."
                ) from None
            raise
        if slot.error is not None:
            self.close()
            error = slot.error
            if isinstance(error, StopIteration) and slot.source is not None:
                # Not the loader's, and no end of the epoch.
                error = RuntimeError("a transform, or on_error, raised StopIteration")
                error.__cause__ = slot.error
            slot.error = slot.source = None
            self._failed = not isinstance(error, StopIteration)
            if isinstance(error, StopIteration):
                self._engine.place.update(ended=True, loader=error.value)
                error = StopIteration()
            else:
                error.add_note(f"raised by the prefetcher while it prepared batch {slot.number}")
            try:
                raise error
            finally:
                del error  # breaks the cycle between the exception and this frame
        self._stats.batches += slot.result is not EMPTY
        self._stats.images += slot.images
        self._engine.place.update(batches=slot.number + 1, loader=slot.state)
        if self._last is not None:
            self._engine.balancer.handed_over(now - self._last)
        self._last = now
        if slot.event is not None:
            with Stage(self._stats, "handoff"):
                # Where memory is short, a batch goes back as soon as the loop drops it.
                handovers = None if self._engine.lean else self._engine.handovers
                handoff(slot.result, slot.event, self._engine.device, handovers)
        return slot.result


def _end(reference: weakref.ref[Engine], use: list[str]) -> None:
    use[0] = "dropped" if use[0] == "unused" else use[0]
    if (engine := reference()) is not None:  # else it was dropped as well, and ends itself
        engine.end()
