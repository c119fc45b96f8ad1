"""The hand-off between streams, with and without each of its two halves."""

import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from gpuprefetch import DataPrefetcher
from gpuprefetch.core import streams as _stream
from gpuprefetch.core.streams import Steps, drain, handoff, lease_stream, return_stream

SHAPE = (64, 3, 224, 224)
SLEEP_CYCLES = 20_000_000  # about 10 ms: the reader and the writer surely overlap in it


def corrupted(wait: bool, record: bool, rounds: int = 10, put=lambda batch: batch) -> int:
    """Produce on a side stream, read behind a sleep on the current one, free, produce again.

    ``put`` makes of the tensor what is handed over.
    """
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
            handoff(put(batch), ready, torch.device("cuda", torch.cuda.current_device()))
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
@pytest.mark.parametrize(
    "put",
    [lambda batch: batch, lambda batch: SimpleNamespace(a=[batch]), lambda batch: [*batch[1:]]],
    ids=["a tensor", "within an object", "views of one block"],
)
def test_handoff(put):
    assert corrupted(wait=True, record=True, put=put) == 0


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
    handoff(source, ready, device)
    seen.copy_(source)
    torch.cuda.synchronize(device)
    assert bool(seen.eq(1).all())


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
        monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda stream, other: None)
    prefetcher = DataPrefetcher(OnDevice(), transforms=[torch.Tensor.double])
    right = [bool((batch == value).all()) for value, batch in enumerate(prefetcher)]
    assert len(right) == 6
    assert all(right) == wait


@pytest.mark.gpu
@pytest.mark.parametrize(("prepare", "step"), [(4, 1), (1, 4)])
def test_the_gpu_waits_where_batches_are_slower_than_the_step(prepare, step):
    """The host does not see it: a batch is handed over as soon as its work is queued."""
    side, loop = torch.cuda.Stream(), torch.cuda.current_stream()
    steps = Steps(torch.device("cuda", torch.cuda.current_device()))
    waited, started = 0.0, time.perf_counter()
    for number in range(20):
        steps.throttle()
        with torch.cuda.stream(side):
            torch.cuda._sleep(prepare * SLEEP_CYCLES // 2)
            ready = torch.cuda.Event(enable_timing=True)
            ready.record()
        loop.wait_event(ready)
        steps.wait_for(ready, late=number % 2 == 0)
        found = steps.waited()
        assert 0 <= found.for_loader <= found.seconds
        waited += found.seconds
        torch.cuda._sleep(step * SLEEP_CYCLES // 2)
    loop.synchronize()
    part = waited / (time.perf_counter() - started)
    # The first batch is waited for in any case, and the last two are not told any more.
    assert part == pytest.approx(max(prepare - step, 0) / max(prepare, step), abs=0.15)


def test_what_a_step_has_waited_is_told_once_it_has_begun(monkeypatch):
    class Event:
        def __init__(self, at=None, **options):
            self.at, self.done = at, True

        def record(self, stream):
            self.at = ends.pop(0)

        def synchronize(self):
            pass

        def query(self):
            return self.done

        def elapsed_time(self, other):
            return other.at - self.at

    ends = [0, 10, 20, 30]  # of steps, in ms
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    steps = Steps(torch.device("cuda"))
    batches = [(Event(4), True), (Event(9), False), (Event(26), False), (Event(33), True)]
    batches[2][0].done = False
    told = []  # nothing after a batch that has not come
    for ready, late in batches:
        steps.throttle()
        steps.wait_for(ready, late=late)
        told.append(steps.waited())
    assert told == [(0.004, 0.004), (0, 0), (0, 0), (0, 0)]
    batches[2][0].done = True
    assert steps.waited() == pytest.approx((0.009, 0.003))
    assert steps.waited() == (0, 0)


@pytest.mark.gpu
def test_streams_are_reused_and_never_shared():
    device = torch.device("cuda", torch.cuda.current_device())
    first, second = lease_stream(device), lease_stream(device)
    assert first != second
    return_stream(first)
    assert lease_stream(device) == first
    return_stream(first)
    return_stream(second)


def test_a_stream_that_torch_hands_out_again_is_not_shared(monkeypatch):
    # Two epochs on one stream would take the same decoder, and a decode may be under way in it.
    device, given = torch.device("cuda", 99), iter([1, 1, 2, *[1, 2] * 20])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(given))
    assert [lease_stream(device) for _ in range(2)] == [1, 2]
    assert lease_stream(device) in (1, 2)  # there is no other
    del _stream._made[device]


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
    local, ready, over = threading.local(), threading.Event(), threading.Event()

    class Event:
        def __init__(self, **options):
            pass

        def record(self, stream):
            pass

        def synchronize(self):
            ready.set()
            over.wait()

        def __del__(self):
            if os.getpid() != owner:
                destroyed.append(True)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)

    def decode():
        if keep == "thread-local":  # guards the test: such an event is destroyed
            local.event = Event()
        drain(torch.device("cuda"))

    thread = threading.Thread(target=decode)
    thread.start()
    ready.wait()
    if not (child := os.fork()):
        os._exit(len(destroyed))
    over.set()
    thread.join()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (keep == "thread-local")
