"""The hand-off between streams, with and without each of its two halves."""

import gc
import os
import random
import sys
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpuprefetch import DataPrefetcher, _engine, _stream
from gpuprefetch._stream import (
    Handover,
    Handovers,
    handoff,
    lease_stream,
    mark_reader,
    return_stream,
)

SHAPE = (64, 3, 224, 224)
SLEEP_CYCLES = 20_000_000  # about 10 ms: the reader and the writer surely overlap in it


def corrupted(wait: bool, record: bool, rounds: int = 10) -> int:
    """Produce on a side stream, read behind a sleep on the current one, free, produce again."""
    side = torch.cuda.Stream()
    wrong = 0
    for number in range(rounds):
        value = float(number + 1)
        with torch.cuda.stream(side):
            if not wait:
                torch.cuda._sleep(SLEEP_CYCLES)
            batch = torch.full(SHAPE, value, device="cuda")
            ready = side.record_event()
        address = batch.data_ptr()
        if wait and record:
            handoff(batch, ready, torch.device("cuda", torch.cuda.current_device()))
        elif wait:
            torch.cuda.current_stream().wait_event(ready)
        elif record:
            batch.record_stream(torch.cuda.current_stream())
        if wait:
            torch.cuda._sleep(SLEEP_CYCLES)
        seen = batch.clone()
        del batch
        with torch.cuda.stream(side):
            again = torch.full(SHAPE, -1.0, device="cuda")
        if not record:
            assert again.data_ptr() == address, (
                "the block was not reused: the control proves nothing"
            )
        torch.cuda.synchronize()
        wrong += not bool((seen == value).all())
        del again
    return wrong


@pytest.mark.gpu
def test_the_handle_of_the_current_stream():
    device, side = torch.device("cuda", 0), torch.cuda.Stream()
    assert _stream.current_handle(device) == 0
    with torch.cuda.stream(side):
        assert _stream.current_handle(device) == side.cuda_stream
        assert _stream.current_handle(torch.device("cuda")) == side.cuda_stream


@pytest.mark.gpu
def test_the_current_stream_is_torchs():
    count = torch.cuda.device_count()
    for stream in [torch.cuda.Stream(device=i) for i in range(count)] * 2:
        with torch.cuda.stream(stream):
            for device in [*(torch.device("cuda", i) for i in range(count)), torch.device("cuda")]:
                assert _stream.current_stream(device) == torch.cuda.current_stream(device)


@pytest.mark.gpu
def test_handoff():
    assert corrupted(wait=True, record=True) == 0


class FakeEvent:
    """Notes what torch is asked for."""

    def __init__(self, known, asked):
        self.cuda_event, self._asked = known, asked

    def query(self):
        return False

    def record(self, stream):
        self._asked.append("torch records")


@pytest.mark.parametrize(
    ("known", "failed", "expected"),
    [
        (7, 0, ["driver records", "driver waits"]),
        (7, 400, ["driver records", "torch records", "driver waits", "torch waits"]),
        (0, 0, ["torch records", "driver waits"]),  # torch makes an event when it records it
        (7, None, ["torch records", "torch waits"]),
    ],
)
def test_what_the_driver_does_not_do_torch_does(monkeypatch, known, failed, expected):
    asked = []
    event = FakeEvent(known, asked)
    asked_of = []

    def query(event):
        asked_of.append(event)
        return 600 if failed == 0 else failed

    stream = SimpleNamespace(cuda_stream=5, wait_event=lambda event: asked.append("torch waits"))

    def call(name, *arguments):
        asked.append(name)
        assert arguments == ((7, 5) if "records" in name else (5, known, 0))
        return failed

    driver = SimpleNamespace(
        cuEventRecord=partial(call, "driver records"),
        cuEventQuery=query,
        cuStreamWaitEvent=partial(call, "driver waits"),
    )
    monkeypatch.setattr(_stream, "_driver", lambda: None if failed is None else driver)
    _stream.record(event, stream)
    _stream.queue_wait(stream, event)
    assert asked == expected
    assert asked_of == ([] if failed is None or not known else [known])


@pytest.mark.parametrize(("status", "come"), [(0, True), (600, False), (700, False), (None, False)])
def test_whether_an_event_has_come(monkeypatch, status, come):
    driver = SimpleNamespace(cuEventQuery=lambda event: status)
    monkeypatch.setattr(_stream, "_driver", lambda: None if status is None else driver)
    event = FakeEvent(7, [])
    assert _stream.has_come(event) == come
    torch_knows = SimpleNamespace(cuda_event=0, query=lambda: True)
    assert _stream.has_come(torch_knows)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("failed", [0, 1])
def test_bytes_are_copied_by_the_driver_where_they_are_pinned(monkeypatch, pinned, failed):
    data, asked = torch.arange(20, dtype=torch.uint8), []

    class OnGPU(torch.Tensor):
        is_cuda = True

    place = torch.zeros(20, dtype=torch.uint8).as_subclass(OnGPU)

    def copy(*arguments):
        asked.append(arguments)
        return failed

    monkeypatch.setattr(_stream, "_driver", lambda: SimpleNamespace(cuMemcpyHtoDAsync_v2=copy))
    monkeypatch.setattr(_stream, "current_handle", lambda device: 5)
    _stream.upload(data, 3, 9, place, 4, pinned=pinned)
    assert asked == [(place.data_ptr() + 4, data.data_ptr() + 3, 6, 5)] * pinned
    by_torch = not pinned or failed
    expected = [0, 0, 0, 0, 3, 4, 5, 6, 7, 8] if by_torch else 10 * [0]
    assert place[:10].tolist() == expected


@pytest.mark.parametrize(("current", "by"), [(0, "torch"), (1, "the driver")])
def test_a_default_stream_is_that_of_the_current_device_to_the_driver(monkeypatch, current, by):
    asked = []
    device, event = torch.device("cuda", 1), FakeEvent(7, [])
    stream = SimpleNamespace(
        cuda_stream=0, device=device, wait_event=lambda event: asked.append("torch")
    )
    driver = SimpleNamespace(
        cuEventQuery=lambda _: 600, cuStreamWaitEvent=lambda *_: asked.append("the driver")
    )
    monkeypatch.setattr(_stream, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    _stream.queue_wait(stream, event)
    assert asked == [by]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpus_default_stream_waits_for_the_batch():
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda:0")  # its context
    device = torch.device("cuda", 1)
    side = torch.cuda.Stream(device)
    source = torch.zeros(1 << 20, device=device)
    seen = torch.empty_like(source)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        source.fill_(1)
        ready = side.record_event()
    _stream.queue_wait(torch.cuda.current_stream(device), ready)
    seen.copy_(source)
    torch.cuda.synchronize(device)
    assert bool(seen.eq(1).all())


@pytest.mark.parametrize("enabled", [False, True])
def test_where_the_sanitizer_looks_torch_does_all(monkeypatch, enabled):
    name = "torch.cuda._sanitizer"
    sanitizer = SimpleNamespace(cuda_sanitizer=SimpleNamespace(enabled=enabled))
    monkeypatch.setitem(sys.modules, name, sanitizer)
    names = "cuEventRecord", "cuEventQuery", "cuStreamWaitEvent", "cuMemcpyHtoDAsync_v2"
    library = SimpleNamespace(**{name: SimpleNamespace() for name in names})
    monkeypatch.setattr(_stream.ctypes, "PyDLL", lambda name: library)
    _stream._driver.cache_clear()
    try:
        assert _stream._driver() is (None if enabled else library)
    finally:
        _stream._driver.cache_clear()


@pytest.mark.gpu
def test_events_of_the_driver_are_those_of_torch():
    assert _stream._driver() is not None
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    torch.cuda.synchronize()
    source, seen = torch.zeros(1 << 20, device="cuda"), torch.empty(1 << 20, device="cuda")
    for waits in (False, True):  # without it the copy is early
        torch.cuda.synchronize()
        source.zero_()
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        source.fill_(1)
        _stream.record(event, torch.cuda.current_stream())
        assert not event.query()
        if waits:
            _stream.queue_wait(side, event)
        with torch.cuda.stream(side):
            seen.copy_(source)
        event.synchronize()
        assert event.query()
        torch.cuda.synchronize()
        assert bool(seen.eq(1).all()) == waits


@pytest.mark.gpu
@pytest.mark.parametrize(("wait", "record"), [(True, False), (False, True)])
def test_handoff_negative_control(wait, record):
    # Guards the test itself: with either half of the hand-off left out the batch really is wrong.
    assert corrupted(wait, record) > 0


class OnDevice:
    """A loader of batches on the GPU, written behind a sleep on the current stream."""

    def __iter__(self):
        for value in range(6):
            batch = torch.zeros(SHAPE, device="cuda")
            torch.cuda._sleep(SLEEP_CYCLES)
            yield batch.fill_(value)


@pytest.mark.gpu
@pytest.mark.parametrize("wait", [True, False])
def test_batches_that_are_on_the_gpu_already(monkeypatch, wait):
    if not wait:  # guards the test: the transform then reads what was not written yet
        monkeypatch.setattr(_engine.Engine, "_wait_for_loader", lambda engine, batch: None)
    prefetcher = DataPrefetcher(OnDevice(), transforms=[torch.Tensor.double])
    right = [bool((batch == value).all()) for value, batch in enumerate(prefetcher)]
    assert len(right) == 6
    assert all(right) == wait


@pytest.mark.gpu
def test_streams_are_reused_and_never_shared():
    device = torch.device("cuda", torch.cuda.current_device())
    first, second = lease_stream(device, "a"), lease_stream(device, "a")
    assert first != second
    return_stream(first, "a")
    assert lease_stream(device, "b") != first
    assert lease_stream(device, "a") == first
    return_stream(first, "a")
    return_stream(second, "a")


@pytest.mark.gpu
def test_handoff_leaves_the_current_stream_alone():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        batch = torch.ones(8, device="cuda")
        handoff({"a": batch}, stream.record_event(), batch.device)
        assert torch.cuda.current_stream() == stream


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("keep", ["ours", "thread-local"])
def test_a_fork_destroys_no_event_of_another_thread(monkeypatch, keep):
    # CUDA may not be called in a fork, and a worker forked by another loader's epoch is one.
    destroyed, owner = [], os.getpid()

    class Event:
        cuda_event = 0

        def __init__(self, **options):
            pass

        def record(self, stream):
            pass

        def query(self):
            return True

        synchronize = destroyed.clear

        def __del__(self):
            if os.getpid() != owner:
                destroyed.append(True)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(_stream, "_marks", {})
    stream = SimpleNamespace(device="here", cuda_stream=1, wait_event=bool)
    monkeypatch.setattr(_stream, "current_stream", lambda device: stream)
    local, ready, over = threading.local(), threading.Event(), threading.Event()

    def lane():
        if keep == "ours":
            mark_reader(stream)
        else:  # guards the test: such an event is destroyed
            local.event = Event()
        ready.set()
        over.wait()

    thread = threading.Thread(target=lane)
    thread.start()
    ready.wait()
    if not (child := os.fork()):
        os._exit(len(destroyed))
    over.set()
    thread.join()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (keep == "thread-local")


class Ready:
    """An event that has come, or not."""

    def __init__(self, *, come=True):
        self.come, self.recorded, self.cuda_event = come, 0, 0

    def record(self, stream):
        assert stream is STREAM
        self.recorded += 1

    def query(self):
        return self.come


STREAM = SimpleNamespace(device=torch.device("cuda", 0), cuda_stream=1)
OTHER = SimpleNamespace(device=torch.device("cuda", 0), cuda_stream=2)


@pytest.fixture
def current(monkeypatch):
    """What this thread works on, with CUDA or without; and the marked bytes."""
    now = SimpleNamespace(stream=STREAM, device=0, capturing=False, marked=[])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now.device)
    monkeypatch.setattr(_stream, "current_stream", lambda device: now.stream)
    monkeypatch.setattr(_stream, "current_handle", lambda device: now.stream.cuda_stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.capturing)
    monkeypatch.setattr(torch.cuda, "Event", Ready)

    def mark(tensor, stream):
        assert stream is STREAM
        now.marked.append(tensor.untyped_storage().nbytes())

    monkeypatch.setattr(torch.Tensor, "record_stream", mark)
    return now


def of_a_graph(tensor, weight=None):
    weight = torch.ones(8, requires_grad=True)
    return (weight * tensor).sum()


class Node:
    """Leads to itself."""

    def __init__(self, tensor):
        self.tensor, self.node = tensor, self


KEEPERS = {
    "tensor": lambda tensor: [tensor],
    "view": lambda tensor: tensor[:4],
    "alias": torch.Tensor.detach,
    "storage": torch.Tensor.untyped_storage,
    "graph": of_a_graph,
    "graph of a view": lambda tensor: of_a_graph(tensor.view(8)),
    "array": torch.Tensor.numpy,
    "capsule": torch.utils.dlpack.to_dlpack,
    "cycle": Node,
    "another view in a graph": lambda tensor: (of_a_graph(tensor), tensor[:4]),
}


@pytest.mark.parametrize("keeper", [None, *KEEPERS])
def test_a_batch_is_over_when_nobody_has_it_any_more(current, keeper):
    tensor, event = torch.empty(8), Ready()
    handover = Handover([tensor], STREAM, event)
    kept = keeper and KEEPERS[keeper](tensor)
    del tensor
    if keeper is not None:
        assert (event.recorded, handover.died) == (0, False)
    if isinstance(kept, tuple):  # the graph has the tensor itself
        kept = kept[1]
        assert (event.recorded, handover.died) == (0, False)
    del kept
    gc.collect()
    assert event.recorded == handover.died
    if keeper not in ("array", "capsule"):  # in which versions of torch differ
        # Where the tensor itself died before the last view of it, that was not seen.
        assert handover.died == (keeper in (None, "tensor", "graph", "cycle"))
    del handover
    assert current.marked == [32]  # nobody has asked for the event


def test_a_batch_of_several_is_over_with_the_last(current):
    first, second, event = torch.empty(8), torch.empty(4), Ready()
    handover = Handover([first, second], STREAM, event)
    del second
    assert not handover.died
    del first
    assert (event.recorded, handover.died) == (1, True)
    handover.end(marked=False)
    del handover
    assert not current.marked


@pytest.mark.parametrize("other", [{"stream": OTHER}, {"device": 1}, {"capturing": True}])
def test_a_batch_that_dies_elsewhere_is_marked(current, other):
    handovers, tensor = Handovers(), torch.empty(8)
    handovers.add([tensor], STREAM)
    vars(current).update(other)
    del tensor
    vars(current).update(stream=STREAM, device=0, capturing=False)
    latest = torch.empty(4)
    handovers.add([latest], STREAM)
    handovers.settle()
    assert current.marked == [32]


def test_a_batch_that_comes_back_to_life_is_marked(current):
    saved = []

    class Saved(Node):
        def __del__(self):
            saved.append(self.tensor)

    handovers, tensor = Handovers(), torch.empty(8)
    handovers.add([tensor], STREAM)
    Saved(tensor)
    del tensor
    gc.collect()
    assert saved
    handovers.settle(all_of_them=True)
    assert current.marked == [32]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_lets_batches_alone(current):
    event, tensors = Ready(), [torch.empty(8), torch.empty(8)]
    handovers = [Handover([tensor], STREAM, event) for tensor in tensors]
    if not (child := os.fork()):
        tensors.pop()  # dies
        handovers.clear()
        os._exit(event.recorded + len(current.marked))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (len(handovers), event.recorded) == (2, 0)


def test_batches_are_let_go_in_order(current):
    handovers, sizes = Handovers(), []

    def nbytes():
        return [storage.nbytes() for given in handovers._given for storage in given._storages]

    for size in range(1, 5):  # as a loop does: the batch before dies behind the next
        handovers.settle()
        sizes.append(nbytes())
        latest = torch.empty(size)
        handovers.add([latest], STREAM)
    assert sizes == [[], [4], [8], [12]]
    assert nbytes() == [12, 16]  # the third has died
    handovers._given[0].event.come = False  # the GPU is not through with it
    handovers.settle()
    assert nbytes() == [12, 16]
    handovers._given[0].event.come = True
    handovers.settle()
    assert nbytes() == [16]
    assert not current.marked
    handovers.settle(all_of_them=True)
    assert (nbytes(), current.marked) == ([], [16])
    del latest


def test_events_of_batches_serve_again(current):
    handovers, seen = Handovers(), set()
    for _ in range(8):
        handovers.settle()
        latest = torch.empty(1)
        handovers.add([latest], STREAM)
        seen.add(handovers._given[-1].event)
    del latest
    assert len(seen) == 2


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_what_the_loop_keeps_is_marked(current, kept):
    handovers, held = Handovers(), []
    for size in range(1, 5):
        handovers.settle()
        held = [*held, torch.empty(size)][-kept - 1 :]
        handovers.add([held[-1]], STREAM)
    assert current.marked == ([] if kept == 0 else [4, 8])
    assert len(handovers._given) == 2


def test_only_plain_tensors_are_followed(current, monkeypatch):
    class Kind(torch.Tensor):
        pass

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(_stream, "queue_wait", lambda stream, event: None)
    handovers, kind, plain = Handovers(), torch.empty(2).as_subclass(Kind), torch.empty(3)
    handoff([kind, plain], None, STREAM.device, handovers)
    assert current.marked == [8]
    assert [len(given._storages) for given in handovers._given] == [1]
    monkeypatch.setattr(_stream, "_without_others", list)
    handoff([plain], None, STREAM.device, handovers)
    assert current.marked == [8, 12]
    handoff([plain], None, STREAM.device)
    assert current.marked == [8, 12, 12]


def test_where_owners_are_not_counted_all_is_marked(monkeypatch):
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    _stream._without_others.cache_clear()
    try:
        assert not _stream._without_others()
    finally:
        _stream._without_others.cache_clear()
    monkeypatch.undo()
    assert len(_stream._without_others()) == 2


class Timeline:
    """A stream that does its work when told to; counts memory that goes back too early."""

    device, cuda_stream = torch.device("cuda", 0), 1

    def __init__(self):
        self.queue, self.done, self.pending, self.marked = [], 0, {}, set()
        self.too_early = self.unmarked = 0

    def launch(self, tensor):
        """Queue a reader of what ``tensor`` lies in."""
        self.queue.append(address(tensor))
        self.pending[address(tensor)] = len(self.queue)

    def batch(self, size):
        """A tensor, and no more: whether somebody has its memory is seen by that of an array."""
        array = np.empty(size, np.float32)
        place = array.ctypes.data
        weakref.finalize(array, self.freed, place)
        return torch.from_numpy(array)

    def freed(self, place):
        busy, marked = self.pending.pop(place, 0) > self.done, place in self.marked
        self.too_early += busy and not marked
        self.unmarked += not marked
        self.marked.discard(place)

    def mark(self, tensor):
        self.marked.add(address(tensor))


def address(tensor):
    return tensor.untyped_storage().data_ptr()


class Point:
    """An event of a timeline."""

    cuda_event = 0

    def record(self, stream):
        self.stream, self.at = stream, len(stream.queue)

    def query(self):
        return self.at <= self.stream.done


def loop(timeline, dice, handovers, steps=60):
    """A loop that keeps, now and then, its batch or what is made of it, and uses that later."""
    kept, weight = [], torch.ones(8, requires_grad=True)
    for _ in range(steps):
        timeline.done = dice.randint(timeline.done, len(timeline.queue))
        handovers.settle()
        latest = timeline.batch(8)  # the one before dies here, as the variable of a loop does
        handovers.add([latest], timeline)
        for tensor in [latest, *(view for view, _ in kept)]:
            for _ in range(dice.randint(0, 2)):
                timeline.launch(tensor)
        view = dice.choice([None, None, latest, latest[:4], latest.detach(), latest.view(2, 4)])
        graph = dice.choice([None, None, (weight * latest).sum()])
        if view is not None:
            kept.append((view, graph))
        while len(kept) > 3 or (kept and dice.random() < 0.4):
            kept.pop(dice.randrange(len(kept)))
        if dice.random() < 0.2:  # before the step is through
            del latest
        del view, graph, tensor


@pytest.mark.parametrize("safe", [True, "event", "owners"])
def test_no_memory_goes_back_while_it_is_read(monkeypatch, safe):
    monkeypatch.setattr(torch.cuda, "Event", Point)
    monkeypatch.setattr(_stream, "_is_current", lambda stream: True)
    if safe == "event":  # guards the test: without waiting for the GPU
        monkeypatch.setattr(Point, "query", lambda event: True)
    elif safe == "owners":  # likewise: without counting who has it
        alone = _stream._without_others()[0]
        monkeypatch.setattr(Handover, "owners", lambda handover, i: alone)
        monkeypatch.setattr(Handover, "died", property(lambda handover: handover._recorded))
    too_early = unmarked = 0
    for seed in range(40):
        timeline, handovers = Timeline(), Handovers()
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *args: args[1].mark(args[0]))
        loop(timeline, random.Random(seed), handovers)
        handovers.settle(all_of_them=True)
        too_early += timeline.too_early
        unmarked += timeline.unmarked
    assert (too_early > 0) == (safe is not True)
    assert unmarked > 0


def read_late(drop, *, rounds=10):
    """As a loop does: batches read behind a sleep, ``drop`` gets each of them."""
    device = torch.device("cuda", torch.cuda.current_device())
    side, handovers, kept, results = torch.cuda.Stream(), Handovers(), None, []
    for number in range(rounds):
        handovers.settle()
        with torch.cuda.stream(side):
            batch = torch.full(SHAPE, float(number + 1), device="cuda")
            ready = side.record_event()
        handoff(batch, ready, device, handovers)
        side.synchronize()  # the batch is there, so what overwrites it is one behind it
        torch.cuda._sleep(SLEEP_CYCLES)
        if kept is not None:
            results.append((number, kept.clone()))
        results.append((number + 1, batch.clone()))
        kept = drop(batch)
        del batch
    handovers.settle(all_of_them=True)
    torch.cuda.synchronize()
    return sum(not bool((seen == value).all()) for value, seen in results)


DROPS = {"batch": lambda batch: None, "view": lambda batch: batch[:32]}


@pytest.mark.gpu
@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("safe", [True, False])
def test_memory_goes_back_behind_the_last_reader(monkeypatch, drop, safe):
    if not safe:  # guards the test: let go at once, and whoever else has it
        monkeypatch.setattr(Handover, "died", True)
        event = SimpleNamespace(query=lambda: True, record=lambda stream: None, cuda_event=0)
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    assert (read_late(DROPS[drop]) > 0) != safe


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [False, True])
def test_the_allocator_waits_for_no_batch_of_a_usual_loop(monkeypatch, keep):
    marked, kept = [], []
    mark = torch.Tensor.record_stream
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda *args: (marked.append(args), mark(*args))[1]
    )
    loader = [torch.full((4, 3, 8, 8), float(value)).pin_memory() for value in range(8)]
    for batch in DataPrefetcher(loader, device="cuda", device_prefetch_size=2):
        kept.append(batch[:2] if keep else None)
    del batch
    # The last one is the loop's when the epoch ends.
    assert len(marked) == (8 if keep else 1)
