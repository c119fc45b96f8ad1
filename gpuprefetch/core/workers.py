"""A loader's worker process ends with the main process, and tells whatever fails in it."""

from __future__ import annotations

import contextlib
import operator
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partialmethod
from multiprocessing import parent_process, process
from multiprocessing.connection import wait
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from gpuprefetch.core.errors import add_note, text_of

# Added to the workers' priority number: the training thread launches kernels, they only decode.
NICENESS = 10


@dataclass(slots=True)
class WorkerStart:
    """The ``worker_init_fn`` that a prefetcher gives its loader; runs first in a worker."""

    init_fn: Callable[[int], object] | None  # the user's
    nice: bool  # whether the training thread goes first
    stateful: bool  # whether the loader is torchdata's, whose workers send their state as well

    def __call__(self, worker: int) -> None:
        if self.nice:
            with contextlib.suppress(AttributeError):  # not on Windows
                os.nice(NICENESS)
        threading.Thread(target=_end_with_main, daemon=True).start()
        ForkingPickler.register(ExceptionWrapper, _reduced)
        # Read by the thread that pickles what a queue is given.
        hook = partialmethod(_tell, stateful=self.stateful)
        Queue._on_queue_feeder_error = hook  # type: ignore[attr-defined]
        if self.init_fn is not None:
            self.init_fn(worker)


def _end_with_main() -> None:
    """End this process after the main one, for which it would wait for ever to empty a pipe."""
    main = parent_process()
    parent = os.getppid()
    if main is None or main.pid == parent:
        while os.getppid() == parent:
            time.sleep(1.0)
    else:  # the parent is a fork server, which lives as long as its children
        wait([main.sentinel])
    os._exit(1)


def gone(iterator: object, patience: float = 1.0) -> list[int]:
    """The workers of a loader's iterator that have ended, or do so within ``patience`` seconds."""
    workers = {worker.sentinel: worker.pid for worker in getattr(iterator, "_workers", ())}
    return [workers[sentinel] for sentinel in wait([*workers], patience)] if workers else []


def at_hand(iterator: object) -> bool:
    """Whether the next batch of a loader's iterator is there already, and need not be waited for.

    False where that is not known: only torch's own iterator with pinned memory can be asked, and
    that over a list.
    """
    if isinstance(iterator, type(iter([]))):
        return operator.length_hint(iterator) > 0
    expected = getattr(iterator, "_rcvd_idx", None)
    came = getattr(iterator, "_task_info", {}).get(expected, ())
    if len(came) == 2:  # the worker, and what it has made
        return True
    arrived = getattr(iterator, "_data_queue", None)
    if expected is None or not isinstance(arrived, queue.Queue):
        return False
    with arrived.mutex:
        return any(isinstance(item, tuple) and item[0] == expected for item in arrived.queue)


def shut_down(iterator: object, loader: object) -> None:
    """End the workers of a loader's iterator, if it has any.

    Not left to the garbage collector: an exception from a worker is in a cycle with the iterator.
    Collected with its queues, that waits 5 s for each worker in vain. A loader whose workers live
    on keeps its iterator, which holds batches that nobody has taken.
    """
    getattr(iterator, "_shutdown_workers", lambda: None)()
    if isinstance(loader, DataLoader) and loader._iterator is iterator:
        vars(loader)["_iterator"] = None


def disown(iterator: object) -> None:
    """Let this forked process collect an iterator, and end, without ending its parent's workers."""
    if not isinstance(iterator, _MultiProcessingDataLoaderIter):
        return
    vars(iterator)["_shutdown"] = True
    for worker in iterator._workers:
        process._children.discard(worker)  # type: ignore[attr-defined]


class WorkerError(ExceptionWrapper):
    """An exception from a worker that keeps its text, whatever its class makes of it."""

    def reraise(self) -> None:
        try:
            super().reraise()  # type: ignore[no-untyped-call,unused-ignore]
        except Exception as error:
            text = f"Caught {self.exc_type.__name__} {self.where}.\nOriginal {self.exc_msg}"
            if not isinstance(error, (self.exc_type, RuntimeError)):  # of its constructor
                raise RuntimeError(text) from None
            if self.exc_msg not in text_of(error):  # the class writes its own message
                add_note(error, text)
            raise


def _reduced(
    error: ExceptionWrapper,
) -> tuple[Callable[..., WorkerError], tuple[bytes | None, str, str]]:
    """Pickle an exception on its way to the main process, whatever class it has."""
    try:
        kind: bytes | None = pickle.dumps(error.exc_type)
    except Exception:  # a class within a function, for one
        kind = None
    return _restored, (kind, error.exc_msg, error.where)


def _restored(kind: bytes | None, message: str, where: str) -> WorkerError:
    error: WorkerError = object.__new__(WorkerError)
    error.exc_msg = message
    error.where = where
    error.exc_type = RuntimeError
    if kind is not None:
        with contextlib.suppress(Exception):  # a class that only the worker can import
            error.exc_type = pickle.loads(kind)
    return error


def _tell(queue: Queue[object], error: Exception, unsent: object, *, stateful: bool) -> None:
    """Send an error in place of a batch that could not be sent: the loop would wait for ever."""
    if not isinstance(unsent, tuple) or len(unsent) != 2:
        return  # not a worker's answer
    number, batch = unsent
    told = _restored(
        None,
        f"{type(error).__name__}: {text_of(error)}\nA batch is pickled, and its tensors are moved "
        "to shared memory: leave out what cannot be.",
        "while a DataLoader worker process sent a batch",
    )
    queue.put((number, (told, batch[1], None) if stateful else told))
