"""An epoch with its thread, run on the CPU, where it has one only here; and without."""

import contextlib
import gc
import os
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import pytest
import torch
from fakes import SECONDS, threads, until
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.data import DataLoader, Dataset, Sampler

from gpuprefetch import DataPrefetcher, EncodedImage
from gpuprefetch.core import epoch as _epoch
from gpuprefetch.core import streams as _streams
from gpuprefetch.core.epoch import JOIN_SECONDS
from gpuprefetch.core.forks import garbage_stays_here


@pytest.fixture(autouse=True)
def threads_end():
    yield
    until(lambda: not threads())


def within(seconds, function):
    """What ``function`` returns or raises, in a thread of its own."""
    future = Future()

    def run():
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(seconds)


@pytest.fixture(params=["threaded", "in the loop"])
def either(request):
    if request.param == "threaded":
        request.getfixturevalue("threaded")
    return request.param


@pytest.fixture
def impatient(constants):
    constants(_epoch, JOIN_SECONDS=0.2)


class Batches:
    """A loader of what a generator function gives."""

    def __init__(self, function):
        self.function = function

    def __iter__(self):
        return self.function()


def prefetcher_of(batches, **options):
    return DataPrefetcher(Batches(batches), device="cpu", **options)


class Held:
    """An epoch that has had its first batch; the second one comes when it is released."""

    def __init__(self):
        self.release = threading.Event()
        self.prefetcher = prefetcher_of(self.batches)
        self.iterator = iter(self.prefetcher)
        assert next(self.iterator) == 0

    def batches(self):
        yield 0
        self.release.wait(SECONDS)
        yield 1


def pictures(*values):
    """A generator function of batches of one small picture."""
    return lambda: (torch.full((1, 3, 2, 2), value) for value in values)


class Slow(Dataset):
    def __init__(self, seconds, at=None):
        self.seconds, self.at = seconds, at

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if self.at in (None, index):
            time.sleep(self.seconds)
        return index


def test_batches_come_in_order_epoch_after_epoch(either):
    for depth in (None, 1, 5):
        prefetcher = prefetcher_of(lambda: iter(range(7)), device_prefetch_size=depth)
        assert [*prefetcher] == [*prefetcher] == [*range(7)]
        assert [*prefetcher_of(lambda: iter(()))] == []


@pytest.mark.parametrize("depth", [1, 3])
def test_so_many_batches_are_fetched_ahead(threaded, depth):
    fetched = []

    def batches():
        for number in range(9):
            fetched.append(number)
            yield number

    iterator = iter(prefetcher_of(batches, device_prefetch_size=depth))
    for number in range(3):
        # That many are ready, and one more waits for its room.
        until(lambda count=number + depth + 1: len(fetched) == count)
        time.sleep(0.02)
        assert len(fetched) == number + depth + 1
        assert next(iterator) == number
    iterator.close()


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("transform", OSError),
        *(("loader", kind) for kind in (LookupError, KeyboardInterrupt, SystemExit, MemoryError)),
    ],
)
def test_an_error_comes_after_the_batches_before_it(either, where, error):
    def batches():
        yield from pictures(0, 1)()
        if where == "loader":
            raise error("a bad disk")
        yield from pictures(2, 3)()

    def transform(images):
        if images.max() == 2:
            raise error("a bad disk")
        return images

    iterator = iter(prefetcher_of(batches, transforms=[transform]))
    assert [float(next(iterator).max()) for _ in range(2)] == [0, 1]
    with pytest.raises(error, match="a bad disk"):
        next(iterator)
    with pytest.raises(RuntimeError, match="an error has ended this epoch"):
        next(iterator)


def test_an_error_that_was_fetched_ahead_keeps_no_epoch_alive(either):
    raised = threading.Event()

    def batches():
        yield 0
        raised.set()
        raise LookupError("no sample")

    iterator = iter(prefetcher_of(batches))
    assert next(iterator) == 0
    if either == "threaded":
        assert raised.wait(SECONDS)
        time.sleep(0.02)
    ended = weakref.ref(iterator)
    del iterator
    assert ended() is None


def test_what_was_handed_over_is_not_kept(threaded):
    class Batch:
        pass

    iterator = iter(prefetcher_of(lambda: (Batch() for _ in range(5))))
    for _ in range(3):
        batch = weakref.ref(next(iterator))
        assert batch() is None
    iterator.close()


def test_a_loop_whose_thread_has_made_an_encoded_image_calls_modules_as_ever(threaded):
    """Without the hook that each call would pay for: the thread that reads is another."""
    iterator = iter(prefetcher_of(lambda: iter(range(3))))
    EncodedImage(b"file", 0)
    assert _has_any_global_hook()
    next(iterator)
    assert not _has_any_global_hook()
    iterator.close()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_a_thread_whose_start_fails_leaves_nothing(threaded, monkeypatch, error):
    """Or is interrupted, in the line after it: nobody has the iterator."""
    start = threading.Thread.start

    def failing(thread):
        if isinstance(error, KeyboardInterrupt):
            start(thread)
        raise error

    prefetcher = prefetcher_of(lambda: iter(range(9)))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", failing)
        with pytest.raises(type(error)):
            iter(prefetcher)
    assert not threads()
    assert [*prefetcher] == [*range(9)]
    assert prefetcher.state_dict()["epoch"] == 1  # the one that could not begin is no epoch


def test_whoever_closes_an_epoch_waits_for_its_end(threaded):
    held = Held()
    closing = threading.Thread(target=held.iterator._lookahead.close)
    closing.start()
    time.sleep(0.05)
    assert closing.is_alive() and threads()
    threading.Timer(0.1, held.release.set).start()
    held.iterator._lookahead.close()
    assert not threads()
    closing.join(SECONDS)


def test_the_end_waits_for_a_batch_that_the_loop_prepares():
    begun, done = threading.Event(), []

    def transform(images):
        begun.set()
        time.sleep(0.2)
        done.append(True)
        return images

    iterator = iter(prefetcher_of(pictures(0, 1), transforms=[transform]))

    with ThreadPoolExecutor() as pool:
        loop = pool.submit(next, iterator, None)
        assert begun.wait(SECONDS)
        iterator.close()
        assert done
    assert loop.result() is None  # the epoch has ended


def test_a_loop_that_waits_when_another_thread_ends_the_epoch(threaded):
    held = Held()
    threading.Timer(0.1, held.iterator.close).start()
    threading.Timer(0.2, held.release.set).start()
    with pytest.raises(StopIteration):  # not for ever
        within(SECONDS, lambda: next(held.iterator))


def test_an_end_that_is_interrupted_goes_on(threaded, monkeypatch):
    held = Held()

    def interrupted(timeout=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(threads()[0], "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        held.iterator.close()
    held.release.set()
    until(lambda: not threads())


def test_a_loader_that_hangs_is_abandoned(threaded, impatient):
    held = Held()
    began = time.monotonic()
    held.iterator.close()
    assert time.monotonic() - began < 5
    assert threads()
    held.release.set()


def test_a_broken_context_does_not_keep_an_epoch_from_its_end(threaded, monkeypatch):
    def broken(stream):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(_streams.SideStream, "end", broken)
    iterator = iter(prefetcher_of(lambda: iter(range(4))))
    next(iterator)
    iterator.close()
    assert not threads()
    with pytest.raises(StopIteration):
        next(iterator)


def test_what_copies_still_read_is_kept(either, monkeypatch):
    # A worker fills a slab again once the loop's process drops it.
    events, log = [], []

    class Pinned:
        def __init__(self, number):
            weakref.finalize(self, log.append, number)

        def to(self, device):
            return torch.ones(2)

    class Event:
        done = False

        def query(self):
            return self.done

    def record(stream):
        events.append(Event())
        return events[-1]

    monkeypatch.setattr(_streams.SideStream, "record", record)
    monkeypatch.setattr(_streams.SideStream, "end", lambda stream: log.append("drained"))
    monkeypatch.setattr(_epoch, "handoff", lambda *batch: None)
    iterator = iter(prefetcher_of(lambda: map(Pinned, range(20))))
    for _ in range(4):
        next(iterator)
    assert log == []
    events[0].done = events[2].done = True
    next(iterator)
    until(lambda: log)
    iterator.close()
    assert log[:2] == [0, "drained"]
    assert len(log) > 5


def test_the_collector_may_run_in_a_thread_that_the_epoch_waits_for(threaded):
    dropped, seconds = threading.Event(), []

    def batches():  # as the DataLoader's, which come from its pin thread
        pinned = SimpleQueue()

        def pin():
            pinned.put(0)
            dropped.wait()
            begin = time.monotonic()
            gc.collect()
            seconds.append(time.monotonic() - begin)
            pinned.put(1)
            pinned.put(None)  # the end

        threading.Thread(target=pin).start()
        return iter(pinned.get, None)

    gc.collect()
    gc.disable()
    try:
        iterator = iter(prefetcher_of(batches))
        assert next(iterator) == 0
        ended = weakref.ref(iterator)
        cycle = [iterator]
        cycle.append(cycle)
        del iterator, cycle
        dropped.set()
        until(lambda: not threads())
        assert ended() is None
        assert seconds[0] < JOIN_SECONDS / 2
    finally:
        gc.enable()


def test_the_collector_may_run_while_something_is_counted(threaded):
    held = Held()

    class Drops(float):
        def __radd__(self, other):
            held.release.set()
            del held.iterator  # its thread counts the seconds of a fetch before it ends
            return other

    began = time.monotonic()
    held.prefetcher.stats.add("wait_seconds", Drops())
    assert time.monotonic() - began < JOIN_SECONDS / 2
    assert not threads()


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.07])
def test_persistent_workers_serve_one_epoch_at_a_time(threaded, pause):
    loader = DataLoader(Slow(0.05), num_workers=2, persistent_workers=True)
    prefetcher = DataPrefetcher(loader, device="cpu")
    other = iter(prefetcher)
    next(other)
    time.sleep(pause)  # its thread waits for the next batch then, or for room
    assert within(SECONDS, lambda: torch.cat(list(prefetcher)).tolist()) == [*range(12)]
    with pytest.raises(RuntimeError, match=r"second iter\(\) of the prefetcher has ended"):
        next(other)


class Waits(Sampler):
    """The numbers of :class:`Slow`, after a while."""

    def __iter__(self):
        time.sleep(0.2)
        return iter(range(12))

    def __len__(self):
        return 12


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [None, Waits()], ids=["next", "iter"])
@pytest.mark.forks("a spawned worker starts too late for its times")
def test_persistent_workers_whose_epochs_begin_in_two_threads(either, sampler):
    """The one begins while the other waits for a batch, or begins itself."""
    loader = DataLoader(Slow(0.3, at=0), sampler=sampler, num_workers=2, persistent_workers=True)
    prefetcher, had, begun = DataPrefetcher(loader, device="cpu"), [], threading.Event()

    def beside():
        begun.set()
        with contextlib.suppress(RuntimeError):  # its workers have been taken
            for batch in prefetcher:
                had.extend(batch.tolist())

    other = threading.Thread(target=beside)
    other.start()
    assert begun.wait(SECONDS)
    time.sleep(0.1)
    assert within(SECONDS, lambda: torch.cat([*prefetcher]).tolist()) == [*range(12)]
    other.join(SECONDS)
    assert had == [*range(len(had))]


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.forks("a spawned worker starts too late for its times")
def test_workers_that_an_abandoned_thread_waits_for(threaded, impatient, persistent):
    loader = DataLoader(Slow(1, at=2), num_workers=2, persistent_workers=persistent)
    prefetcher = DataPrefetcher(loader, device="cpu")
    for _ in prefetcher:
        time.sleep(0.1)
        break
    assert within(SECONDS, lambda: torch.cat(list(prefetcher)).tolist()) == [*range(12)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.usefixtures("nothing_frozen")
@pytest.mark.parametrize("collects", [True, False])
def test_who_is_forked_for_an_epoch_begins_with_a_frozen_heap(collects):
    def state_in_a_fork():
        if not (child := os.fork()):
            os._exit(2 * (gc.get_freeze_count() > 0) + gc.isenabled())
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    if not collects:
        gc.disable()
    try:
        before = gc.get_freeze_count()
        with garbage_stays_here():
            assert state_in_a_fork() == 2 + collects
        assert gc.isenabled() == collects and gc.get_freeze_count() == before
        assert state_in_a_fork() == 2 * (before > 0) + collects  # somebody else's
    finally:
        gc.enable()


def keep(batches, right):
    """In a third process: are they still what they were, when the worker has gone on?"""
    received = []
    while (batch := batches.get()) is not None:
        received.append(batch)
        time.sleep(0.005)
    images = [image for batch in received for image in batch]
    right.put(sum(image.data == bytes([image.index]) * 5000 for image in images))


def test_a_batch_that_is_passed_on_to_a_third_process():
    context = torch.multiprocessing.get_context("fork")
    batches, right = context.Queue(), context.Queue()
    process = context.Process(target=keep, args=(batches, right), daemon=True)
    process.start()
    images = [EncodedImage(bytes([i]) * 5000, i) for i in range(96)]
    for batch in DataLoader(images, batch_size=4, num_workers=1):
        batches.put(batch)
    batches.put(None)
    assert right.get(timeout=SECONDS) == 96
    process.join()
