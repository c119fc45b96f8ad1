"""The threads of an epoch: run on the CPU ahead of the loop, as elsewhere only on a GPU."""

import collections
import contextlib
import gc
import os
import signal
import threading
import time
import weakref
from queue import SimpleQueue
from types import SimpleNamespace

import pictures
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from gpuprefetch import (
    DataPrefetcher,
    EncodedImage,
    RandomResizedCrop,
    _engine,
    _epoch,
    _prefetcher,
    _stats,
    _stream,
)
from gpuprefetch._balance import Balancer
from gpuprefetch._budget import Cost
from gpuprefetch._engine import JOIN_SECONDS, Engine, Flag
from gpuprefetch._pipeline import Pipeline, Work
from gpuprefetch._prefetcher import _garbage_kept_from_forks
from gpuprefetch._resume import Source
from gpuprefetch._stream import lease_stream, return_stream
from gpuprefetch._turns import Turns

SECONDS = 20  # for what takes milliseconds; a hang takes for ever


@pytest.fixture(autouse=True)
def threads_end():
    yield
    deadline = time.monotonic() + SECONDS
    while threads := [t.name for t in threading.enumerate() if t.name.startswith("gpuprefetch")]:
        assert time.monotonic() < deadline, threads
        time.sleep(0.01)


def until(condition):
    """Wait for another thread to bring it about."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def within(seconds, function):
    """What ``function`` returns or raises, in a thread of its own."""
    found = []

    def run():
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it hangs"
    return found[0]


def running(monkeypatch, **changes):
    """Let the epochs that begin now run with other options of the engine."""
    init = Engine.__init__
    monkeypatch.setattr(
        Engine, "__init__", lambda self, *args, **options: init(self, *args, **options | changes)
    )


@pytest.fixture
def ahead(monkeypatch):
    """Batches are fetched in a thread, two of them ahead."""
    running(monkeypatch, fetch_ahead=True, depth=2)


@pytest.fixture(params=[2, None], ids=["ahead", "when asked"])
def fetched(monkeypatch, request):
    """Batches are fetched in a thread, and begun ahead of the loop or when it asks for them."""
    monkeypatch.setattr(_engine, "turns", collections.defaultdict(Turns))
    running(monkeypatch, fetch_ahead=True, depth=request.param)


@pytest.fixture
def beside(monkeypatch):
    """Batches are fetched in the loop's thread, two of them ahead, as without workers."""
    running(monkeypatch, fetch_ahead=False, depth=3)


class Slow(Dataset):
    def __init__(self, seconds, at=None):
        self.seconds, self.at = seconds, at

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if self.at in (None, index):
            time.sleep(self.seconds)
        return index


class Broken:
    """An event or a stream of a context that has seen a device-side assert."""

    def fail(self, *args):
        raise RuntimeError("CUDA error: device-side assert triggered")

    query = synchronize = __enter__ = fail
    cuda_event = 0

    def __exit__(self, *error):
        pass


class Batches:
    """A loader of what a generator function gives."""

    def __init__(self, function):
        self.function = function

    def __iter__(self):
        return self.function()


def prefetcher_of(batches, **options):
    return DataPrefetcher(Batches(batches), device="cpu", **options)


def test_a_flag_lets_all_through_who_wait_for_it():
    flag, through = Flag(), []
    threads = [threading.Thread(target=lambda: through.append(flag.wait())) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert not flag.is_set() and not through
    for _ in range(2):  # by whoever is first
        flag.set()
    for thread in threads:
        thread.join(SECONDS)
    flag.wait()
    assert flag.is_set() and len(through) == 8


def test_an_error_on_the_gpu_reaches_a_loop_that_waits(fetched):
    failed = threading.Event()

    def batches():
        yield 0
        failed.wait()
        yield 1

    iterator = iter(prefetcher_of(batches))
    assert next(iterator) == 0
    iterator._engine._sources.append((Broken(), None))  # a batch that was handed over
    threading.Timer(0.3, failed.set).start()
    assert "device-side assert" in str(within(SECONDS, lambda: next(iterator)))


@pytest.mark.parametrize("seconds", [0.0, SECONDS])
def test_a_loop_slower_than_the_gpu_lets_the_next_batch_be_fetched(ahead, monkeypatch, seconds):
    monkeypatch.setattr(_engine, "REST_SECONDS", seconds)
    fetched = []

    def batches():
        for i in range(9):
            fetched.append(i)
            yield i

    begin = Engine._start

    def late(engine, slot):
        time.sleep(0.01)
        begin(engine, slot)

    monkeypatch.setattr(Engine, "_start", late)
    # Two are kept ready, and the one behind them waits for its room. The end is no batch.
    rested = [len(fetched) == min(i + 4, 9) for i in prefetcher_of(batches)]
    assert all(rested) == bool(seconds), rested


def test_a_loop_does_not_wait_for_a_loader_that_is_not_ready(fetched, monkeypatch):
    monkeypatch.setattr(_engine, "REST_SECONDS", 0.5)

    def batches():
        for i in range(4):
            time.sleep(0.4)
            yield i

    waited = []
    monkeypatch.setattr(Engine, "let_fetch", timed(Engine.let_fetch, waited))
    assert list(prefetcher_of(batches)) == [0, 1, 2, 3]
    assert max(waited) < 0.1


def photos():
    file = pictures.encode_jpeg(pictures.draw(8, 16))
    for i in range(6):
        yield [EncodedImage(file, i)], i


def started(monkeypatch):
    """The numbers of the batches that were got under way, and by which thread."""
    begun, begin = [], Engine._start

    def start(engine, slot):
        begun.append((slot.number, threading.get_ident()))
        begin(engine, slot)

    monkeypatch.setattr(Engine, "_start", start)
    return begun


def at_ease(iterator):
    """Batches of a loop whose loader has the one behind them ready each time."""
    engine = iterator._engine
    while True:
        until(lambda: engine._held is not None or engine._exhausted or engine._stopping)
        try:
            yield next(iterator)
        except StopIteration:
            return


@pytest.mark.parametrize("fetched", [None], indirect=True)
def test_a_batch_is_begun_when_the_loop_asks_for_it_until_there_is_room(fetched, monkeypatch):
    begun = started(monkeypatch)
    iterator = iter(prefetcher_of(photos, transforms=[RandomResizedCrop((4, 4))]))
    batches = at_ease(iterator)
    for number in range(3):
        time.sleep(0.05)
        assert len(begun) == number
        assert next(batches)[1] == number
    _engine.turns[iterator._engine.device].level = 1
    assert next(batches)[1] == 3
    for number in (4, 5):  # the next one is under way, or will be, whatever the loop does
        until(lambda count=number + 1: len(begun) >= count)
        assert next(batches)[1] == number
    assert list(batches) == []
    assert [number for number, _ in begun] == [*range(7)]


@pytest.mark.parametrize("why", [None, "ahead of the GPU", "a tail", "lean"])
def test_a_loop_slower_than_the_gpu_gets_the_next_batch_under_way(ahead, monkeypatch, why):
    if why == "ahead of the GPU":
        monkeypatch.setattr(_epoch, "throttle", lambda *args: True)
    if why == "lean":
        monkeypatch.setattr(Engine, "lean", True)
        monkeypatch.setattr(Engine, "_wait_for_used", lambda engine: None)
    tail = [lambda images: images] if why == "a tail" else []
    begun = started(monkeypatch)
    iterator = iter(prefetcher_of(photos, transforms=[RandomResizedCrop((4, 4)), *tail]))
    assert [number for _, number in at_ease(iterator)] == [*range(6)]
    numbers, threads = zip(*begun, strict=True)
    assert numbers == (*range(7),)  # the last is the end
    # For the first two there was room.
    by_loop = [thread == threading.get_ident() for thread in threads]
    assert by_loop == [False] * 2 + [why is None] * 4 + [False]


@pytest.mark.parametrize("why", [None, "not ready", "a slow sampler"])
def test_a_loop_slower_than_the_gpu_fetches_what_is_there(ahead, monkeypatch, why):
    monkeypatch.setattr(Source, "ready", why != "not ready")
    if why == "a slow sampler":
        monkeypatch.setattr(_engine, "REST_SECONDS", 0.0)
    begun, fetched, fetch = started(monkeypatch), [], Engine._fetch

    def noted(engine):
        slot = fetch(engine)
        fetched.append((slot.number, threading.get_ident()))
        return slot

    monkeypatch.setattr(Engine, "_fetch", noted)
    iterator = iter(prefetcher_of(photos, transforms=[RandomResizedCrop((4, 4))]))
    assert [number for _, number in at_ease(iterator)] == [*range(6)]
    for numbers in (begun, fetched):
        assert [number for number, _ in numbers] == [*range(7)]  # the last is the end
    # For two there was room before, and a third was held.
    by_loop = [thread == threading.get_ident() for _, thread in fetched]
    assert by_loop == [False] * 3 + [why is None] * 4


def test_an_error_of_what_the_loop_fetched_comes_behind_the_batches_before(ahead, monkeypatch):
    monkeypatch.setattr(Source, "ready", True)

    def batches():
        yield from list(photos())[:4]
        raise OSError("a bad disk")

    seen = []
    with pytest.raises(OSError, match="a bad disk"):
        for _, number in at_ease(
            iter(prefetcher_of(batches, transforms=[RandomResizedCrop((4, 4))]))
        ):
            seen.append(number)
    assert seen == [*range(4)]


@pytest.mark.parametrize("pause", [0.5, 1e6])
def test_a_loop_that_begins_batches_itself_launches_before_the_next_is_fetched(
    ahead, monkeypatch, pause
):
    given, begun = [], started(monkeypatch)

    def batches():
        for batch in photos():
            given.append((batch[1], time.perf_counter()))
            yield batch

    iterator = iter(prefetcher_of(batches, transforms=[RandomResizedCrop((4, 4))]))
    engine = iterator._engine
    monkeypatch.setattr(_engine, "PAUSE", 0.0)
    for _ in zip(range(2), at_ease(iterator), strict=False):
        pass
    until(lambda: engine._held is not None)
    monkeypatch.setattr(_engine, "PAUSE", pause)
    monkeypatch.setattr(Balancer, "period", 0.2)
    before = time.perf_counter()
    assert next(iterator)[1] == 2
    assert begun[-1] == (4, threading.get_ident())
    if pause == 0.5:  # the step goes on
        until(lambda: given[-1][0] == 5)
        assert given[-1][1] - before >= 0.5 * 0.2
    # A loop that comes back early waits for nothing but its batch.
    assert within(SECONDS, lambda: [number for _, number in iterator]) == [3, 4, 5]


def test_what_the_loop_got_under_way_is_not_kept(ahead, monkeypatch):
    asked = threading.Event()

    def batches():
        given = photos()
        yield from (next(given) for _ in range(4))
        asked.wait(SECONDS)
        yield from given

    begun = started(monkeypatch)
    iterator = iter(prefetcher_of(batches, transforms=[RandomResizedCrop((4, 4))]))
    for _ in zip(range(2), at_ease(iterator), strict=False):
        pass
    next(iterator)
    images, number = next(iterator)  # while the thread that fetches waits for the loader
    assert (number, threading.get_ident()) in begun
    dropped = weakref.ref(images)
    del images
    until(lambda: dropped() is None)  # before the thread that fetches has its next batch
    asked.set()
    assert [number for _, number in iterator] == [4, 5]


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_a_batch_that_the_loop_cannot_get_under_way(ahead, monkeypatch, error):
    start = Pipeline.start

    def broken(pipeline, batch, number, *place):
        if number == 3:
            raise error("no batch")
        return start(pipeline, batch, number, *place)

    monkeypatch.setattr(Pipeline, "start", broken)
    iterator, seen = iter(prefetcher_of(photos, transforms=[RandomResizedCrop((4, 4))])), []
    with pytest.raises(error):
        seen.extend(number for _, number in at_ease(iterator))
    # It was begun when the first was taken. An error waits for its turn, Ctrl-C does not.
    assert seen == ([0, 1, 2] if error is LookupError else [0])
    engine, ended = iterator._engine, weakref.ref(iterator)
    assert not any(thread.is_alive() for thread in engine._threads)
    del iterator
    gc.collect()
    assert ended() is None


def timed(function, seconds):
    def call(*args):
        began = time.perf_counter()
        function(*args)
        seconds.append(time.perf_counter() - began)

    return call


def test_a_thread_that_dies_ends_the_epoch(fetched, monkeypatch):
    monkeypatch.setattr(Engine, "_batch_stream", lambda engine: Broken())
    iterator = iter(prefetcher_of(lambda: iter(range(4))))
    assert "device-side assert" in str(within(SECONDS, lambda: next(iterator)))
    assert not any(thread.is_alive() for thread in iterator._engine._threads)


def test_a_thread_that_cannot_start_ends_the_epoch(monkeypatch):
    stream = SimpleNamespace(synchronize=bool)
    returned = []
    monkeypatch.setattr(_engine, "lease_stream", lambda device, role: stream)
    monkeypatch.setattr(_engine, "return_stream", lambda *lease: returned.append(lease))
    start = threading.Thread.start

    def refused(thread):
        if thread.name == "gpuprefetch-decode":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    prefetcher = prefetcher_of(lambda: iter([0]))
    work = Work([lambda make_room: None], lambda: 0)
    monkeypatch.setattr(prefetcher._pipeline, "start", lambda *batch: work)
    monkeypatch.setattr(prefetcher, "_with_epoch", lambda epoch: prefetcher._pipeline)
    iterator = iter(prefetcher)
    iterator._engine._on_cuda = True
    assert "can't start" in str(within(SECONDS, lambda: next(iterator)))
    assert returned == [(stream, "lane")]


def test_a_thread_that_fetches_and_cannot_start_leaves_nothing(ahead, monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    ends, closed = [], threading.Event()
    monkeypatch.setattr(Engine, "end_apart", lambda engine: ends.append(engine))
    monkeypatch.setattr(threading.Thread, "start", refused)
    monkeypatch.setattr(
        _prefetcher.Source, "close", lambda source, *, abandoned: closed.set() or abandoned
    )
    with pytest.raises(RuntimeError, match="can't start new thread"):
        iter(prefetcher_of(lambda: iter([0])))
    gc.collect()
    assert closed.is_set()
    assert not ends


def test_an_end_that_fails_every_time_is_tried_twice(fetched, monkeypatch):
    tried = []

    def broken(source, *, abandoned):
        tried.append(threading.get_ident())
        raise LookupError("no end")

    iterator = iter(prefetcher_of(lambda: iter([0])))
    monkeypatch.setattr(_prefetcher.Source, "close", broken)
    with pytest.raises(LookupError, match="no end"):
        iterator.close()
    until(lambda: len(tried) == 2)
    time.sleep(0.1)
    assert len(set(tried)) == len(tried) == 2


def test_another_thread_ends_an_epoch_whose_loop_gets_a_batch_under_way(ahead, monkeypatch):
    iterator = iter(prefetcher_of(photos, transforms=[RandomResizedCrop((4, 4))]))
    engine, modes = iterator._engine, Engine._batch_stream
    loop, ended = threading.current_thread(), []

    def end_first(engine):
        if threading.current_thread() is loop and engine._taken is not None and not ended:
            ended.append(threading.Thread(target=engine.close))
            ended[0].start()
            ended[0].join()
        return modes(engine)

    monkeypatch.setattr(Engine, "_batch_stream", end_first)
    seen = []
    with pytest.raises(RuntimeError, match=r"a second iter\(\)"):  # as that closes its engine
        seen.extend(number for _, number in at_ease(iterator))
    assert ended and len(seen) < 6
    assert not engine._slots


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.03, 0.07])
def test_persistent_workers_serve_one_epoch_at_a_time(fetched, pause):
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
@pytest.mark.parametrize("engine", ["beside", "ahead"])
@pytest.mark.parametrize("sampler", [None, Waits()], ids=["next", "iter"])
def test_persistent_workers_whose_epochs_begin_in_two_threads(request, engine, sampler):
    """The one begins while the other waits for a batch, or begins itself."""
    request.getfixturevalue(engine)
    slow = Slow(0.3, at=0)
    loader = DataLoader(slow, sampler=sampler, num_workers=2, persistent_workers=True)
    prefetcher = DataPrefetcher(loader, device="cpu")

    def numbers():
        return torch.tensor([*prefetcher]).tolist()

    def race(begun):
        had = []

        def beside():
            with contextlib.suppress(RuntimeError):  # its workers have been taken
                for batch in prefetcher:
                    had.extend(batch.tolist())

        other = threading.Thread(target=beside)
        other.start()
        until(lambda: prefetcher._epoch > begun)
        time.sleep(0.05)
        assert within(SECONDS, numbers) == [*range(12)]
        other.join(SECONDS)
        assert had == [*range(len(had))]

    race(0)  # which starts the workers
    race(2)


@pytest.mark.slow
def test_persistent_workers_that_the_loop_of_another_thread_waits_for(beside, monkeypatch):
    monkeypatch.setattr(_engine, "JOIN_SECONDS", 0.2)
    loader = DataLoader(Slow(1.5, at=2), num_workers=2, persistent_workers=True)
    prefetcher = DataPrefetcher(loader, device="cpu")

    def beside():
        with pytest.raises(RuntimeError, match=r"a second iter\(\)"):
            list(prefetcher)

    other = threading.Thread(target=within, args=(SECONDS, beside))
    other.start()
    time.sleep(0.2)
    assert within(SECONDS, lambda: torch.cat(list(prefetcher)).tolist()) == [*range(12)]
    other.join(SECONDS)
    assert not other.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [True, False])
def test_workers_that_an_abandoned_thread_waits_for(ahead, monkeypatch, persistent):
    monkeypatch.setattr(_engine, "JOIN_SECONDS", 0.2)
    loader = DataLoader(Slow(1.5, at=2), num_workers=2, persistent_workers=persistent)
    prefetcher = DataPrefetcher(loader, device="cpu")
    for _ in prefetcher:
        time.sleep(0.2)
        break
    assert within(SECONDS, lambda: torch.cat(list(prefetcher)).tolist()) == [*range(12)]


def interrupt_once(monkeypatch, thread):
    """Ctrl-C while that thread is waited for."""
    interrupts, join = [KeyboardInterrupt()], thread.join

    def interrupted(timeout=None):
        if interrupts:
            raise interrupts.pop()
        join(timeout)

    monkeypatch.setattr(thread, "join", interrupted)


@pytest.mark.slow
def test_persistent_workers_behind_an_end_that_was_interrupted(fetched, monkeypatch):
    loader = DataLoader(Slow(0.3), num_workers=2, persistent_workers=True)
    prefetcher = DataPrefetcher(loader, device="cpu")
    iterator = iter(prefetcher)
    next(iterator)
    interrupt_once(monkeypatch, iterator._engine._threads[0])
    with pytest.raises(KeyboardInterrupt):
        iterator.close()
    del iterator
    assert within(SECONDS, lambda: torch.cat(list(prefetcher)).tolist()) == [*range(12)]


@pytest.mark.parametrize("how", ["interrupted", "in another thread"])
def test_whoever_closes_an_epoch_that_is_being_closed_waits(fetched, monkeypatch, how):
    release = threading.Event()

    def batches():
        yield 0
        release.wait(SECONDS)
        yield 1

    iterator = iter(prefetcher_of(batches))
    engine = iterator._engine
    next(iterator)
    if how == "interrupted":
        interrupt_once(monkeypatch, engine._threads[0])
        with pytest.raises(KeyboardInterrupt):
            iterator.close()
    else:
        threading.Thread(target=engine.close).start()
        until(lambda: engine._stopping)
    assert engine._threads[0].is_alive()
    threading.Timer(0.1, release.set).start()
    engine.close()
    assert not engine._threads[0].is_alive()
    assert engine._ended


def test_an_error_that_was_fetched_ahead_keeps_no_epoch_alive(beside):
    def batches():
        yield 0
        yield 1
        raise LookupError("no sample")

    iterator = iter(prefetcher_of(batches))
    assert next(iterator) == 0
    assert iterator._engine._slots[-1].error is not None
    ended = weakref.ref(iterator)
    del iterator
    gc.collect()
    assert ended() is None


class Trainer:
    """Has the iterator of its loop, and what the epoch calls."""

    def __init__(self, path, how, workers):
        mine = {"collate_fn": self.call} if path == "collate_fn" else {}
        loader = DataLoader(EncodedFiles(), 4, num_workers=workers, **mine)
        options = {"transforms": [RandomResizedCrop((4, 4)), self.call]}
        options = {"transforms": options, "on_error": {"on_error": self.call}}.get(path, {})
        self.loader = DataPrefetcher(loader, device="cpu", **options)
        if path == "loader":
            loader.trainer = self
        if how == "next":
            self.loader.next()
            self.epoch = self.loader._manual
        else:
            self.epoch = iter(self.loader)
            next(self.epoch)

    def call(self, found):
        return torch.utils.data.default_collate(found) if isinstance(found, list) else found


class EncodedFiles(Dataset):
    def __init__(self):
        self.data = pictures.encode_jpeg(pictures.draw(8, 8))

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return EncodedImage(self.data, index)


@pytest.mark.parametrize("engine", ["ahead", "beside"])
@pytest.mark.parametrize("path", ["collate_fn", "transforms", "on_error", "loader"])
@pytest.mark.parametrize(("how", "workers"), [("next", 0), ("iter", 0), ("iter", 1)])
def test_an_object_with_its_own_iterator_may_be_dropped(
    request, monkeypatch, engine, path, how, workers
):
    # For so long torch waits for a worker.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
    request.getfixturevalue(engine)
    trainer = Trainer(path, how, workers)
    if engine == "ahead":
        until(lambda: trainer.epoch._engine._held is not None)  # its thread waits for room
    processes = getattr(trainer.epoch._engine._source._iterator, "_workers", [])
    ended, threads = weakref.ref(trainer), trainer.epoch._engine._threads
    trainer = None
    gc.collect()
    assert ended() is None
    until(lambda: not any(thread.is_alive() for thread in threads))
    until(lambda: not any(process.is_alive() for process in processes))
    assert len(processes) == workers


def test_ctrl_c_is_not_kept_for_a_later_batch(beside):
    def batches():
        yield 0
        yield 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(iter(prefetcher_of(batches)))


@pytest.fixture
def collected_by_hand():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_the_collector_may_run_in_a_thread_that_the_epoch_waits_for(fetched, collected_by_hand):
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

    iterator = iter(prefetcher_of(batches))
    assert next(iterator) == 0
    fetch = iterator._engine._threads[0]
    ended = weakref.ref(iterator)
    cycle = [iterator]
    cycle.append(cycle)
    del iterator, cycle
    dropped.set()
    fetch.join(2 * JOIN_SECONDS)
    assert not fetch.is_alive()
    assert ended() is None
    assert seconds[0] < JOIN_SECONDS / 2


def test_the_collector_may_run_while_streams_are_leased():
    stream = SimpleNamespace(device="cpu")

    def collected():
        with _stream._lock:  # what an epoch does that ends here
            return_stream(stream, "collected")
        return lease_stream(torch.device("cpu"), "collected")

    assert within(SECONDS, collected) is stream


def test_a_finished_batch_makes_room_for_the_next(ahead, monkeypatch):
    started, both, run_part = [], threading.Event(), Engine._run_part

    def start(batch, number, epoch, cost):
        started.append(number)
        if number:
            both.set()
        return Work([lambda make_room: None], lambda: number, decoded_bytes=cost.decoded)

    def run_elsewhere(*arguments):  # as on a GPU
        threading.Timer(0.3, run_part, arguments).start()

    monkeypatch.setattr(Engine, "_run_part", run_elsewhere)
    prefetcher = prefetcher_of(lambda: iter(range(4)), memory_budget=100)
    pipeline = prefetcher._pipeline
    monkeypatch.setattr(pipeline, "start", start)
    monkeypatch.setattr(pipeline, "cost", lambda batch: Cost(fixed=10, decoded=70))
    monkeypatch.setattr(prefetcher, "_with_epoch", lambda epoch: pipeline)
    iterator = iter(prefetcher)
    assert both.wait(SECONDS), started
    assert list(iterator) == [0, 1, 2, 3]


@pytest.mark.parametrize("begun", [False, True])
def test_an_epoch_that_another_thread_ends(fetched, monkeypatch, begun):
    asked, release = threading.Event(), threading.Event()

    def batches():
        yield from range(2)
        asked.wait(SECONDS)
        if not begun:
            release.wait(SECONDS)
        yield 2

    iterator = iter(prefetcher_of(batches))
    engine = iterator._engine
    assert [next(iterator) for _ in range(2)] == [0, 1]
    asked.set()
    if begun:
        monkeypatch.setattr(Engine, "_finish_ready", lambda engine: None)  # as if it still decoded

    def end():
        until(lambda: engine._slots if begun else engine._wanted)
        time.sleep(0.1)  # the loop waits, too
        threading.Timer(0.1, release.set).start()
        iterator.close()

    threading.Thread(target=end).start()
    with pytest.raises(StopIteration):  # not for ever
        raise within(SECONDS, lambda: next(iterator))


@pytest.mark.parametrize("stop", [SystemExit, KeyboardInterrupt])
def test_an_exit_is_not_kept_for_a_later_batch(beside, stop):
    def batches():
        yield from range(2)
        raise stop

    with pytest.raises(stop):
        next(iter(prefetcher_of(batches)))


def test_a_loop_that_is_left_in_the_pause_fetches_no_more(ahead, monkeypatch):
    monkeypatch.setattr(Balancer, "period", 10 * SECONDS)
    left, asked = threading.Event(), []

    def batches():
        for batch in photos():
            if left.is_set():
                asked.append(batch)
            yield batch

    iterator = iter(prefetcher_of(batches, transforms=[RandomResizedCrop((4, 4))]))
    engine = iterator._engine
    until(lambda: engine._held is not None)
    next(iterator)  # which begins what was held, and the thread that fetches pauses
    time.sleep(0.1)
    assert engine._resting
    left.set()
    threading.Thread(target=engine.close).start()
    until(lambda: not engine._threads[0].is_alive())
    assert asked == []


def test_ctrl_c_while_an_epoch_begins_leaves_no_thread(ahead, monkeypatch):
    spawn = Engine._spawn

    def interrupted(engine, *arguments):
        spawn(engine, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "_spawn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        iter(prefetcher_of(lambda: iter(range(4))))
    gc.collect()  # threads_end looks for them


def test_a_broken_context_does_not_keep_an_epoch_from_its_end(fetched):
    iterator = iter(prefetcher_of(lambda: iter(range(4))))
    next(iterator)
    engine = iterator._engine
    engine._stream = Broken()
    iterator.close()
    assert not engine._slots
    assert not any(thread.is_alive() for thread in engine._threads)
    with pytest.raises(StopIteration):
        next(engine._source)


def test_a_loader_that_hangs_holds_no_lock(fetched, monkeypatch):
    monkeypatch.setattr(_engine, "JOIN_SECONDS", 0.3)
    iterator = iter(prefetcher_of(lambda: iter(range(9))))
    next(iterator)
    engine, over = iterator._engine, threading.Event()
    close = engine._source.close

    def hanging(**options):
        if threading.current_thread() in engine._threads:
            over.wait(SECONDS)
        close(**options)

    engine._source.close = hanging
    iterator.close()
    assert engine._threads[0].is_alive()
    assert engine._changed.acquire(timeout=1)
    engine._changed.release()
    over.set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.usefixtures("nothing_frozen")
def test_two_threads_may_fork_at_a_time():
    begun, read, write = threading.Barrier(2), *os.pipe()

    def fork(kept):
        begun.wait(SECONDS)
        with _garbage_kept_from_forks() if kept else contextlib.nullcontext():
            child = None
            while child is None:
                with contextlib.suppress(RuntimeError):  # filelock refuses one while another forks
                    child = os.fork()
            if not child:
                os.write(write, bytes([kept, gc.get_freeze_count() > 0, gc.isenabled()]))
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    assert gc.isenabled()
    before = gc.get_freeze_count()
    for other in (True, False):
        thread = threading.Thread(target=fork, args=(other,))
        thread.start()
        within(SECONDS, lambda: fork(True))
        thread.join(SECONDS)
        told = os.read(read, 6)
        frozen = {bytes([True, True, True]), bytes([other, other or before > 0, True])}
        assert {told[:3], told[3:]} == frozen
    assert gc.isenabled()
    assert gc.get_freeze_count() == before


def test_ctrl_c_behind_a_fork_stops_neither_the_collector_nor_the_next_fork():
    def forks(*interrupted):
        with _garbage_kept_from_forks():
            for cut in interrupted:
                _prefetcher._before_fork()
                if not cut:
                    _prefetcher._behind_fork()

    assert gc.isenabled()
    for interrupted in ([True], [True, False], [True, True], [False]):
        forks(*interrupted)
        assert gc.isenabled()
        assert within(SECONDS, lambda: (forks(False), "done")) == (None, "done")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_while_another_thread_is_about_to_fork():
    about, done = threading.Event(), threading.Event()

    def fork():
        with _garbage_kept_from_forks():
            _prefetcher._before_fork()
            about.set()
            done.wait(SECONDS)
            _prefetcher._behind_fork()

    thread = threading.Thread(target=fork)
    thread.start()
    about.wait(SECONDS)
    assert not gc.isenabled()
    if not (child := os.fork()):
        os._exit(not (gc.isenabled() and _prefetcher._forking.acquire(timeout=5)))
    done.set()
    thread.join(SECONDS)
    assert os.waitpid(child, 0)[1] == 0
    assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_while_a_thread_counts():
    with _stats._lock:
        child = os.fork()
        if not child:
            signal.alarm(5)  # ends the child if it hangs
            with _stats.Stage(_stats.Stats(), "wait"):
                pass
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


class Numbered(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return EncodedImage(bytes([index]) * 5000, index)


def keep(batches, right):
    """In a third process: are they still what they were, when the worker has gone on?"""
    received = []
    while (batch := batches.get()) is not None:
        received.append(batch)
        time.sleep(0.02)
    spans = [(batch.span(i), batch.indices[i]) for batch in received for i in range(len(batch))]
    right.put(sum(bool((span == index).all()) for span, index in spans))


def test_a_batch_that_is_passed_on_to_a_third_process():
    context = torch.multiprocessing.get_context("fork")
    batches, right = context.Queue(), context.Queue()
    process = context.Process(target=keep, args=(batches, right), daemon=True)
    process.start()
    for batch in DataLoader(Numbered(), batch_size=4, num_workers=1):
        batches.put(batch)
    batches.put(None)
    assert right.get(timeout=SECONDS) == 96
    process.join()
