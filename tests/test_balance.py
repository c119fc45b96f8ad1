"""The workers' share of the decoding follows what the cores carry."""

import pytest
import torch

from gpuprefetch import _balance
from gpuprefetch._balance import Balancer


def run(balancer, batches, *, period, cost=0.002, late=0.0):
    for _ in range(batches):
        balancer.handed_over(period)
        decoded = int(256 * float(balancer.share))
        balancer.observe(256, decoded, decoded * cost, late)
    return float(balancer.share)


@pytest.fixture
def balancer(monkeypatch):
    monkeypatch.setattr(_balance, "usable_cores", lambda: 16)
    return Balancer(torch.zeros(1, dtype=torch.float64), 16, fixed=False)


def test_the_workers_get_what_the_cores_can_carry(balancer):
    # 13 cores for 14 ms at 2 ms an image and 55 %: 50 images of 256.
    assert run(balancer, 200, period=0.014) == pytest.approx(50 / 256, rel=0.02)
    # Smaller files come first, so the cost rises with the share.
    assert run(balancer, 200, period=0.014, cost=0.004) == pytest.approx(25 / 256, rel=0.02)


def test_late_workers_decode_less(balancer):
    relaxed = run(balancer, 200, period=0.014)
    assert run(balancer, 50, period=0.014, late=0.01) < 0.2 * relaxed
    assert run(balancer, 50, period=0.014) == pytest.approx(relaxed)


def test_long_steps_leave_time_for_all(balancer):
    assert run(balancer, 200, period=0.2) == 1


def test_a_fixed_share_and_a_small_machine_stay_as_they_are(monkeypatch):
    fixed = Balancer(torch.full((1,), 0.3, dtype=torch.float64), 16, fixed=True)
    assert run(fixed, 50, period=0.014) == pytest.approx(0.3)
    monkeypatch.setattr(_balance, "usable_cores", lambda: 3)
    small = Balancer(torch.zeros(1, dtype=torch.float64), 16, fixed=False)
    assert run(small, 50, period=0.014) == 0


def test_cores_are_shared_between_ranks(monkeypatch):
    alone = _balance.usable_cores()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert _balance.usable_cores() == alone // 2
