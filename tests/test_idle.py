"""What the workers decode yields its core to whoever wants it, and is done all the same."""

import os
import sys
import threading
import time

import pytest
import torch
from pictures import draw, encode_jpeg
from torch.utils.data import DataLoader, default_collate

from gpuprefetch import EncodedImage, _host, _idle, _slab
from gpuprefetch._balance import usable_cores
from gpuprefetch._host import HostStage, Packer
from gpuprefetch._idle import FAIR, PAUSE, IdleThread
from gpuprefetch._transforms import Head

needs_policy = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux has SCHED_IDLE")


def trusted():
    """An idle thread without the first call, which is the caller's and depends on the machine."""
    thread = IdleThread()
    thread._pause = 0
    return thread


@pytest.fixture
def idle(monkeypatch):
    """An idle thread that is trusted to get a core, however busy the machine is."""
    monkeypatch.setattr(_idle, "PATIENCE", 60.0)
    return trusted()


def caller():
    return threading.current_thread() is threading.main_thread()


def test_each_item_is_done_once_and_in_the_idle_thread(idle):
    seen = []
    idle.for_each(lambda item: seen.append((item, caller())), range(100))
    assert sorted(seen) == [(i, False) for i in range(100)]


@needs_policy
def test_only_that_thread_has_idle_priority(idle):
    policies = []
    idle.for_each(lambda item: policies.append(os.sched_getscheduler(0)), [0])
    assert policies == [os.SCHED_IDLE]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_the_first_call_shows_whether_cores_are_free(monkeypatch):
    monkeypatch.setattr(_idle, "PATIENCE", 60.0)
    monkeypatch.setattr(_idle, "FAIR", 0.0)
    seen, thread = [], IdleThread()
    for _ in range(3):
        thread.for_each(lambda item: seen.append(caller()), [0])
    assert seen == [True, False, False]


def work(seconds):
    """Take so much time of a core."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_what_gets_no_core_is_taken_back(monkeypatch):
    monkeypatch.setattr(_idle, "PATIENCE", 0.02)
    thread, seen, stuck = trusted(), [], []

    def run(item):
        if not caller():  # as a thread that waits for a core
            stuck.append(item)
            time.sleep(0.1)
        seen.append(item)

    while not stuck:  # on a busy machine it may get no item at all
        thread._pause = 0
        seen.clear()
        thread.for_each(run, range(50))
        assert sorted(seen) == [*range(50)]
    assert stuck == [0]
    # It is left alone then.
    for _ in range(PAUSE):
        thread.for_each(run, [0])
    assert stuck == [0]


def test_it_is_left_alone_as_long_as_the_caller_shares_its_core(monkeypatch):
    monkeypatch.setattr(_idle, "PATIENCE", 60.0)
    thread, seen = IdleThread(), []
    for _ in range(2 * PAUSE):  # asleep for most of the time, as if others had the core
        thread.for_each(lambda item: (time.sleep(0.002), seen.append(caller())), [0])
    assert all(seen)
    ratios = []
    while len(ratios) < 200 and seen[-1]:
        began, used = time.perf_counter(), time.thread_time()
        thread.for_each(lambda item: (work(0.002), seen.append(caller())), [0])
        ratios.append((time.thread_time() - used) / (time.perf_counter() - began))
    # Some calls later it is asked again, unless others really have the cores.
    assert not seen[-1] or min(ratios) < FAIR


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_errors_reach_the_caller_and_end_the_call(idle, error):
    seen = []

    def fail(item):
        seen.append(item)
        if item == 3:
            raise error("the fourth")

    with pytest.raises(error, match="the fourth"):
        idle.for_each(fail, range(100))
    assert seen == [0, 1, 2, 3]
    idle.for_each(seen.append, [4])  # and not more than the call
    assert seen[-1] == 4


def test_an_error_in_the_item_that_could_not_be_taken_back(monkeypatch):
    monkeypatch.setattr(_idle, "PATIENCE", 0.02)
    thread, seen = trusted(), []

    def fail(item):
        if not caller():
            time.sleep(0.1)
            raise ValueError(f"item {item}")
        seen.append(item)

    with pytest.raises(ValueError, match="item 0"):
        while True:  # on a busy machine it may get no item at all
            thread._pause = 0
            seen.clear()
            thread.for_each(fail, range(5))
    assert seen == [1, 2, 3, 4]


def test_it_ends_once_nobody_has_it(monkeypatch):
    monkeypatch.setattr(_idle, "PATIENCE", 60.0)
    thread = trusted()
    found = []
    thread.for_each(lambda item: found.append(threading.current_thread()), [0])
    del thread
    found[0].join(10)
    assert not found[0].is_alive()


@needs_policy
@pytest.mark.parametrize("on_gpu", [False, True])
def test_workers_decode_with_idle_priority_where_a_gpu_has_to_be_fed(monkeypatch, on_gpu):
    decoded = torch.zeros(2, dtype=torch.int64).share_memory_()  # by policy
    decode = _host.decode_cpu

    def noted(*args, **kwargs):
        decoded[int(os.sched_getscheduler(0) == os.SCHED_IDLE)] += 1
        return decode(*args, **kwargs)

    monkeypatch.setattr(_host, "decode_cpu", noted)
    monkeypatch.setattr(_idle, "PATIENCE", 60.0)
    monkeypatch.setattr(_idle, "FAIR", 0.0)  # however busy the machine is
    epoch, share = torch.zeros(1, dtype=torch.int64), torch.full((1,), 0.5, dtype=torch.float64)
    stage = HostStage(default_collate, Packer(Head(), on_gpu, False, 0, epoch, share))
    photos = [(EncodedImage(encode_jpeg(draw(40, 30, seed=i)), i), i) for i in range(16)]
    loader = DataLoader(photos, 4, num_workers=1, collate_fn=stage, multiprocessing_context="fork")
    batches = [images for images, _ in loader]
    assert sum(int(images.decoded.sum()) for images in batches) == (8 if on_gpu else 16)
    assert decoded.tolist() == ([0, 8] if on_gpu else [16, 0])


def test_workers_where_unix_is_not(monkeypatch):
    """On Windows, as far as it can be told from elsewhere; macOS lacks some of these as well."""
    for module, name in (
        *((os, name) for name in ("nice", "sched_getaffinity", "sched_setscheduler", "confstr")),
        (time, "pthread_getcpuclockid"),
    ):
        monkeypatch.delattr(module, name, raising=False)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("signal 0 is Ctrl-C there"))
    epoch, share = torch.zeros(1, dtype=torch.int64), torch.full((1,), 0.5, dtype=torch.float64)
    stage = HostStage(default_collate, Packer(Head(), True, False, 0, epoch, share))
    photos = [(EncodedImage(encode_jpeg(draw(40, 30, seed=i)), i), i) for i in range(8)]
    loader = DataLoader(photos, 4, num_workers=1, collate_fn=stage)
    for _ in range(2):  # the slabs of the first epoch's worker are unmapped in the second
        assert [int(images.decoded.sum()) for images, _ in loader] == [2, 2]
    assert len({worker for worker, _ in _slab._mapped}) == 1
    assert usable_cores() >= 1
