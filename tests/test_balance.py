"""The workers' share of the decoding follows what the loop waits for, and what the cores carry."""

import pytest
import torch

from gpuprefetch import _balance
from gpuprefetch._balance import Balancer


def run(balancer, batches, *, period, wait, cost=0.002, late=0.0):
    for _ in range(batches):
        balancer.handed_over(period, wait)
        decoded = int(256 * float(balancer.share))
        balancer.observe(256, decoded, decoded * cost, late)
    return float(balancer.share)


@pytest.fixture
def balancer(monkeypatch):
    monkeypatch.setattr(_balance, "usable_cores", lambda: 16)
    return Balancer(torch.zeros(1, dtype=torch.float64), 16, fixed=False)


def test_a_loop_that_waits_gets_what_the_cores_can_carry(balancer):
    # 13 cores for 14 ms at 2 ms an image and 80 %: 72.8 images of 256.
    assert run(balancer, 200, period=0.014, wait=0.005) == pytest.approx(72.8 / 256, rel=0.02)


def test_a_loop_that_does_not_wait_gets_nothing(balancer):
    assert run(balancer, 200, period=0.014, wait=0.0) == 0
    run(balancer, 200, period=0.014, wait=0.005)
    assert run(balancer, 200, period=0.014, wait=0.0) == 0


def test_late_workers_decode_less(balancer):
    relaxed = run(balancer, 200, period=0.014, wait=0.005)
    assert run(balancer, 50, period=0.014, wait=0.005, late=0.01) < 0.2 * relaxed


def test_long_steps_leave_time_for_all(balancer):
    assert run(balancer, 200, period=0.2, wait=0.01) == 1


def test_a_fixed_share_and_a_small_machine_stay_as_they_are(monkeypatch):
    fixed = Balancer(torch.full((1,), 0.3, dtype=torch.float64), 16, fixed=True)
    assert run(fixed, 50, period=0.014, wait=0.01) == pytest.approx(0.3)
    monkeypatch.setattr(_balance, "usable_cores", lambda: 3)
    small = Balancer(torch.zeros(1, dtype=torch.float64), 16, fixed=False)
    assert run(small, 50, period=0.014, wait=0.01) == 0


def test_cores_are_shared_between_ranks(monkeypatch):
    alone = _balance.usable_cores()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert _balance.usable_cores() == alone // 2
