"""The hand-off between streams, with and without each of its two halves."""

import os
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from gpuprefetch import DataPrefetcher, _engine, _stream
from gpuprefetch._stream import handoff, lease_stream, mark_reader, return_stream

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
    stream = SimpleNamespace(cuda_stream=5, wait_event=lambda event: asked.append("torch waits"))

    def call(name, *arguments):
        asked.append(name)
        assert arguments == ((7, 5) if "records" in name else (5, known, 0))
        return failed

    driver = SimpleNamespace(
        cuEventRecord=partial(call, "driver records"),
        cuStreamWaitEvent=partial(call, "driver waits"),
    )
    monkeypatch.setattr(_stream, "_driver", lambda: None if failed is None else driver)
    _stream.record(event, stream)
    _stream.queue_wait(stream, event)
    assert asked == expected


@pytest.mark.parametrize(("current", "by"), [(0, "torch"), (1, "the driver")])
def test_a_default_stream_is_that_of_the_current_device_to_the_driver(monkeypatch, current, by):
    asked = []
    device, event = torch.device("cuda", 1), FakeEvent(7, [])
    stream = SimpleNamespace(
        cuda_stream=0, device=device, wait_event=lambda event: asked.append("torch")
    )
    driver = SimpleNamespace(cuStreamWaitEvent=lambda *_: asked.append("the driver"))
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
    library = SimpleNamespace(cuEventRecord=SimpleNamespace(), cuStreamWaitEvent=SimpleNamespace())
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
    monkeypatch.setattr(_stream, "_readers", {})
    stream = SimpleNamespace(device="here", cuda_stream=1, wait_event=bool)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
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
