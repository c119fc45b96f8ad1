"""Work on cores that nobody else wants: a thread of idle priority, helped where it gets none."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import Any

# Note [Idle priority]
# A thread of the training process that wakes up, hundreds of times a step, needs a core at once.
# Linux from 6.6 on lets the thread that has one end its slice of up to 3 ms first, whatever its
# nice value. Measured on an H200 with 16 cores, with workers of nice value 10 that decode 60 % of
# the images: the training thread and autograd's stood in line for a core for 5 ms of a step whose
# kernels take 14. Whoever wakes up takes the core of a thread of SCHED_IDLE at once (sched(7)):
# with half of the images decoded so, these two waited for 0.2 to 0.6 ms. But such a thread gets
# next to nothing of cores that others keep busy, it cannot go back to another priority, and while
# it has no core it may have Python's lock. So what is left to it is what can be taken back, item
# by item. Where it does not get its part of a core, the thread that waits for it does the rest,
# and leaves it alone as long as its own core is shared.

# Seconds between two looks at what a thread got, the part of a core that it should, and for how
# many calls the idle thread is left alone if it did not.
PATIENCE, FAIR, PAUSE = 0.1, 0.1, 64

ForEach = Callable[[Callable[[Any], None], Iterable[Any]], None]


def for_each(function: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Call ``function`` with each of the items."""
    for item in items:
        function(item)


class _Work:
    """Items for a thread, which can be taken back from it."""

    def __init__(self, function: Callable[[Any], None], items: Iterable[Any]) -> None:
        self._function, self._items = function, deque(items)
        self._changed, self._running = threading.Condition(), False
        self._error: BaseException | None = None

    def run(self) -> None:
        """Call the function with one item after the other."""
        while True:
            with self._changed:
                self._running = bool(self._items)
                if not self._items:
                    self._changed.notify_all()
                    return
                item = self._items.popleft()
            try:
                self._function(item)
            except BaseException as error:
                self._error = error
                self.take_back()

    def take_back(self) -> list[Any]:
        """The items that are left."""
        with self._changed:
            left = [*self._items]
            self._items.clear()
        return left

    def wait(self, seconds: float) -> bool:
        """Whether all that was not taken back is done, at the latest after so many seconds.

        Raises:
            BaseException: what the function raised.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: not (self._items or self._running), seconds)
        if done and self._error is not None:
            raise self._error
        return done


def _loop(queue: SimpleQueue[_Work | None]) -> None:
    with contextlib.suppress(AttributeError, OSError):  # else at the priority of the process
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while work := queue.get():
        work.run()
        del work


class IdleThread:
    """A thread that runs where no other thread wants the core. See Note [Idle priority].

    Raises:
        AttributeError, OSError: where the time that a thread has had cannot be read.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        weakref.finalize(self, self._queue.put, None)
        self._pause = 1  # the first call shows whether the cores are free
        loop = partial(_loop, self._queue)
        thread = threading.Thread(target=loop, name="gpuprefetch-idle", daemon=True)
        thread.start()
        assert thread.ident is not None
        self._clock = time.pthread_getcpuclockid(thread.ident)
        time.clock_gettime(self._clock)

    def for_each(self, function: Callable[[Any], None], items: Iterable[Any]) -> None:
        """Call ``function`` with each of the items, there or, where it gets no core, here.

        Raises:
            BaseException: what the function raised first; other items may be left.
        """
        if self._pause:
            self._pause -= 1
            began, used = time.perf_counter(), time.thread_time()
            for_each(function, items)
            if time.thread_time() - used < FAIR * (time.perf_counter() - began):
                self._pause = PAUSE
            return
        work = _Work(function, items)
        self._queue.put(work)
        used = time.clock_gettime(self._clock)
        while not work.wait(PATIENCE):
            before, used = used, time.clock_gettime(self._clock)
            if used - before < FAIR * PATIENCE:
                self._pause = PAUSE
                for_each(function, work.take_back())
