"""The workers' share of the decoding, in loops that are simulated batch by batch."""

import contextlib
import itertools
import os
import random
import threading
import time

import pytest
import torch
from fakes import SECONDS

from gpuprefetch import DataPrefetcher, Stats
from gpuprefetch.core.epoch import Epoch, Lookahead
from gpuprefetch.core.resume import Place, Source
from gpuprefetch.images.decoding import Decoding
from gpuprefetch.images.division import Share
from gpuprefetch.images.plan import parse_bytes
from gpuprefetch.images.share import FEW, LEAST, MOST, WINDOW, Balancer, usable_cores

# A try is two steps of 20 + WINDOW batches, and 20,000 have room for eight, as pauses double.
TRIES = 0.07


class Loader:
    num_workers, prefetch_factor = 8, 2


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16), raising=False)


def balancer_of(share=0.0, **options):
    return Balancer(Share.in_memory(share), Loader(), **{"fixed": False} | options)


def at(share, *values):
    return [value(share) if callable(value) else value for value in values]


def run(balancer, batches, period, waited, late=0.0, decoding=0.0):
    """Batches of a loop, which take seconds or a function of the share. Returns the shares."""
    shares = []
    for _ in range(batches):
        share = balancer.value
        balancer.fetched(*at(share, late, decoding))
        balancer.handed_over(*at(share, period, waited))
        shares.append(balancer.value)
    return shares


def test_no_share_where_the_loop_does_not_wait_for_decode():
    assert set(run(balancer_of(), 2000, 0.02, 0.0005)) == {0.0}


def test_the_share_rises_while_that_makes_batches_come_faster():
    # The GPU decodes what is left of a batch in 30 ms; the rest of the loop takes 20.
    shares = run(
        balancer_of(),
        3000,
        lambda share: max(0.02, 0.03 * (1 - share)),
        lambda share: max(0.0, 0.03 * (1 - share) - 0.02),
    )
    assert 0.2 < shares[-1] < 0.7


def test_a_share_rises_by_a_quarter_at_most():
    # A loop that does nothing but wait: what decode gains, the loop gains.
    balancer = balancer_of()
    shares = run(balancer, 3000, lambda share: 0.03 * (1 - 0.9 * share), lambda share: 0.02)
    rises = {round(b - a, 6) for a, b in itertools.pairwise(shares) if b > a}
    assert max(rises) == MOST and min(rises) == LEAST
    assert shares[-1] > 2 * MOST


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_loop_keeps_a_rise_that_helps(seed):
    # An H100's engines with a loop that only waits: 13.3 ms at no share, 10.5 at 0.3, windows of 32
    # batches that differ by 1.5 %. In steps of 0.05 the gain of one is within the noise. A batch
    # takes 0.7 ms to come from its worker, whatever the share.
    noise = random.Random(seed)
    period = lambda share: (0.0133 - 0.0095 * min(share, 0.3)) * noise.gauss(1, 0.08)  # noqa: E731
    decoding = lambda share: 256 * share * (0.0005 + 0.002 * share)  # noqa: E731
    shares = run(balancer_of(), 1500, period, 0.01, 0.0007, decoding)
    assert min(shares[300:]) >= 0.3


def test_a_rise_that_does_not_help_is_taken_back_and_seldom_tried_again():
    shares = run(balancer_of(), 20_000, 0.02, 0.01)
    assert shares[-1] == 0.0 or shares[-WINDOW * 4] == 0.0
    assert 0 < sum(map(bool, shares)) < TRIES * len(shares)


def test_late_workers_decode_less_at_once():
    balancer = balancer_of(0.8)
    under_way = Loader.num_workers * Loader.prefetch_factor + 4
    shares = run(balancer, under_way + FEW, 0.02, 0, 0.01)
    assert shares[-2:] == [0.8, 0.4]


@pytest.mark.parametrize("seed", range(3))
def test_a_share_that_helps_stays_though_its_workers_are_late(seed):
    # CUDA kernels beside ResNet-18 on an H100: 39 ms a batch at no share, 30 at 0.15 and at 0.3.
    # The loader is waited for 8 % of the time, as the calls take what is there.
    noise = random.Random(seed)
    period = lambda share: (0.039 - 0.06 * min(share, 0.15)) * noise.gauss(1, 0.03)  # noqa: E731
    shares = run(balancer_of(0.3), 5000, period, 0.001, lambda share: 0.08 * period(share))
    assert min(shares) >= 0.07 and min(shares[2000:]) >= 0.15
    assert len(set(shares)) > 1  # less was tried


def test_late_workers_decode_less_until_they_are_not_what_limits():
    # Eight cores need 100 ms for all, and the loop 20.
    period = lambda share: max(0.02, 0.1 * share)  # noqa: E731
    shares = run(balancer_of(0.8), 2000, period, 0.0, lambda share: period(share) - 0.02)
    assert shares[-1] == pytest.approx(0.2)


@pytest.mark.parametrize("burst", [2, 4, 8])
def test_batches_that_come_in_bursts(burst):
    """The share rises while that helps: a burst is as long whatever its batches are."""

    def run_bursts(helps):
        balancer = balancer_of()
        for batch in range(1500):
            whole = 0.0133 - 0.0095 * min(balancer.value, 0.3) * helps
            first = batch % burst == 0
            balancer.fetched(0.0007, 0.0)
            balancer.handed_over(whole * burst if first else 1e-5, 0.01 * burst if first else 0.0)
        return balancer.value

    assert run_bursts(helps=True) > 0.2
    assert run_bursts(helps=False) <= 0.05


class Waits:
    """A stage of numbers that notes what it is told; ``run`` ends after the loop has asked."""

    memory_budget = None
    streams = 1

    def __init__(self, *, slow):
        self.slow = slow
        self.stats = Stats()
        self.device = torch.device("cpu")
        self.asks = threading.Semaphore(0)
        self.runs = threading.Semaphore(0)
        self.waited = []

    def scratch(self):
        return contextlib.nullcontext()

    def warm_up(self):
        pass

    def asked(self):
        self.asks.release()

    def receive(self, batch, number, waited):
        return batch, 1

    def gathers(self, batch):
        return 1

    def run(self, batch, number, epoch, cost):
        self.runs.release()
        if self.slow:
            assert self.asks.acquire(timeout=SECONDS)
            time.sleep(0.002)
        return batch

    def handed_over(self, period, waited):
        self.waited.append(waited)

    def close(self):
        pass


def loop(stage, batches):
    """What an epoch of a stage with a thread gives; ``stage.runs`` tells when the loop may ask."""
    source = Source(batches, Place(0))
    lookahead = Lookahead(stage, source, depth=1, threaded=True, check=lambda batch: None)
    epoch = Epoch(lookahead)
    lookahead.start()
    for number in range(4):
        if stage.slow:
            assert stage.runs.acquire(timeout=SECONDS)
        assert next(epoch) == number
    epoch.close()
    return stage.waited


def test_to_wait_for_the_loader_is_not_to_wait_for_decode():
    def batches():
        for number in range(4):
            assert late.asks.acquire(timeout=SECONDS)  # the loader is later than the loop
            yield number

    late = Waits(slow=False)
    assert loop(late, batches()) == [0.0] * 3
    assert min(loop(Waits(slow=True), range(4))) > 0.002


def test_workers_are_not_asked_for_more_than_their_cores_give():
    # 128 large photos: 0.128 s of the GPU, or 10.24 s of a core. Eight of them have 0.09 of it.
    gpu, cores = lambda share: 0.128 * (1 - share), lambda share: 10.24 * share
    period = lambda share: max(gpu(share), cores(share) / 8)  # noqa: E731
    late = lambda share: period(share) - gpu(share)  # noqa: E731
    shares = run(balancer_of(), 1000, period, period, late, cores)
    assert shares[0] == 0 and shares[120] > 0.06  # 15 s after the start
    assert max(shares) < 0.09 and shares[-1] > 0.06
    shares = run(balancer_of(), 1000, period, period, late)  # with no word of what they took
    assert max(shares) > 0.2


def test_the_first_batches_of_an_epoch_may_be_late():
    balancer = balancer_of(0.5)
    for _ in range(50):
        balancer.begin()
        run(balancer, 20, 0.5, 0.4, 0.4)
    assert balancer.value == 0.5


def test_a_fixed_share_and_a_small_machine_stay_as_they_are(monkeypatch):
    assert set(run(balancer_of(0.3, fixed=True), 500, 0.05, 0.04)) == {0.3}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    balancer = balancer_of()
    assert set(run(balancer, 500, 0.05, 0.04)) == {0.0}
    assert balancer.fixed and not balancer.chosen


def test_cores_are_shared_between_ranks(monkeypatch):
    assert usable_cores() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert usable_cores() == 8


@pytest.mark.parametrize("memory_budget", [None, "2GiB"])
def test_without_engines_idle_cores_decode_from_the_start_and_may_stop(memory_budget):
    balancer = balancer_of()
    decoding = Decoding(torch.device("cpu"), None, parse_bytes(memory_budget), Stats())
    stage = DataPrefetcher([], device="cpu")._pipeline.for_epoch(balancer=balancer)
    assert not decoding.learn(1)  # by engines
    assert decoding.learn(3)
    stage.learned()
    assert balancer.value == pytest.approx(8 / 38)  # eight workers beside what decodes as thirty
    assert Share.of(balancer.share).least == 51  # this decoder takes a batch at a time
    assert decoding.streams == (3 if memory_budget is None else 1)
    balancer.share[0] = 0.0  # as where the workers were late
    assert not decoding.learn(3)
    assert balancer.value == 0
