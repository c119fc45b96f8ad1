"""The workers' share of the decoding follows what the cores carry and what the loop gains by it."""

import random
from types import SimpleNamespace

import pytest
import torch

from gpuprefetch import _balance
from gpuprefetch._balance import LEVELS, UTILIZATION, Balancer

LOADER = SimpleNamespace(num_workers=16, prefetch_factor=2)
CORES = 16 - _balance.RESERVED_CORES


class Loop:
    """A training loop whose step takes ``period(share)`` seconds, under a balancer.

    What the workers decode of a batch was decided when they began it, QUEUED batches before.
    """

    QUEUED = 32

    def __init__(self, monkeypatch, period, *, cost=0.0014, work=1.75, noise=0.0, seed=0):
        monkeypatch.setattr(_balance, "usable_cores", lambda: 16)
        self.balancer = Balancer(torch.zeros(1, dtype=torch.float64), LOADER, fixed=False)
        self.period, self.cost, self.work, self.noise = period, cost, work, noise
        self.rng, self.queue, self.shares, self.seconds = random.Random(seed), [], [], []

    def run(self, batches, late=0.0):
        """Mean share and mean period of the second half."""
        self.shares, self.seconds = [], []
        for _ in range(batches):
            share = float(self.balancer.share)
            self.queue = [*self.queue, share][-self.QUEUED :]
            self.shares.append(share)
            seconds = self.period(self.queue[0]) * self.rng.uniform(1, 1 + 2 * self.noise)
            self.seconds.append(seconds)
            self.balancer.handed_over(seconds)
            decoded = int(256 * self.queue[0])
            busy = 256 * self.cost * (decoded / 256) ** self.work
            waited = late(self.queue[0]) if callable(late) else late
            self.balancer.observe(256, decoded, busy, waited)
        half = batches // 2
        return sum(self.shares[half:]) / (batches - half), sum(self.seconds[half:]) / half


def most(period, cost, work=1.75):
    return (UTILIZATION * CORES * period / (cost * 256)) ** (1 / work)


def test_workers_that_slow_nobody_down_get_what_the_cores_can_carry(monkeypatch):
    # What the GPU decodes takes 1.2 ms of a step of 14.
    loop = Loop(monkeypatch, lambda share: 0.0152 - 0.0012 * share)
    loop.run(3000)
    share, _ = loop.run(3000)
    assert share == pytest.approx(most(0.0146, 0.0014), rel=0.05)
    assert loop.run(1000)[1] < 0.0149


@pytest.mark.parametrize("work", [1.0, 1.75, 2.5])
@pytest.mark.parametrize("cost", [0.0005, 0.0014, 0.0040])
def test_the_share_settles_however_files_differ(monkeypatch, work, cost):
    # Those with the least to do are decoded first, and a batch tells of the share of QUEUED before.
    monkeypatch.setattr(_balance, "WINDOW", 10**9)  # no tries
    loop = Loop(monkeypatch, lambda share: 0.0152, cost=cost, work=work)
    loop.run(400)
    loop.run(200)
    expected = min(most(0.0152, cost, work), 1.0)
    assert min(loop.shares) > 0.9 * max(loop.shares)
    assert 0.4 * expected < loop.shares[-1] < 1.6 * expected


def test_busy_cores_that_slow_the_training_down_are_given_back(monkeypatch):
    loop = Loop(monkeypatch, lambda share: 0.0152 + 0.008 * share)
    start, _ = loop.run(120)
    assert start > 0.1
    share, seconds = loop.run(4000)
    assert share < 0.02
    assert seconds < 0.0154


def test_the_best_share_may_lie_between(monkeypatch):
    # More and more of the cores' work is paid by the training thread.
    def period(share):
        return 0.0152 - 0.0030 * share + 0.0060 * share**2

    best = min(period(level / LEVELS * most(0.015, 0.0014)) for level in range(LEVELS + 1))
    loop = Loop(monkeypatch, period)
    assert loop.run(4000)[1] < 1.003 * best


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("carried", [0.30, 0.36, 0.46])
def test_it_is_found_between_steep_sides(monkeypatch, carried, noise):
    # Either the decode takes longer than the step, or the training thread waits for a core.
    def period(share):
        return max(0.0149 * (1 - share) / (1 - carried), 0.0149 + 0.03 * max(0, share - carried))

    loop = Loop(monkeypatch, period, cost=0.00195, noise=noise)
    loop.run(3000)
    # Tries cost a part of that, and so does the smallest step.
    assert loop.run(6000)[1] < 1.06 * (1 + noise) * 0.0149


@pytest.mark.parametrize("slope", [-0.0030, 0.0030])
@pytest.mark.parametrize("seed", range(4))
def test_noise_hides_it_for_some_time_only(monkeypatch, slope, seed):
    # Each step takes up to 20 % longer, at random: of windows, 1 % remains.
    loop = Loop(monkeypatch, lambda share: 0.0160 + slope * share, noise=0.1, seed=seed)
    share, _ = loop.run(12000)
    highest = most(0.0165, 0.0014)
    assert share > 0.75 * highest if slope < 0 else share < 0.25 * highest


def test_it_notices_that_the_machine_has_changed(monkeypatch):
    loop = Loop(monkeypatch, lambda share: 0.0160 - 0.0030 * share)
    assert loop.run(3000)[0] > 0.35
    loop.period = lambda share: 0.0160 + 0.0030 * share
    assert loop.run(12000)[0] < 0.1


def test_a_pause_changes_nothing(monkeypatch):
    loop = Loop(monkeypatch, lambda share: 0.0152 - 0.0012 * share)
    before, _ = loop.run(3000)
    pauses = iter(range(10**6))
    steady = loop.period
    loop.period = lambda share: 5.0 if next(pauses) % 300 == 0 else steady(share)
    assert loop.run(3000)[0] == pytest.approx(before, rel=0.1)


def test_trying_costs_little(monkeypatch):
    # Where nothing is gained, tries become rare.
    loop = Loop(monkeypatch, lambda share: 0.0152)
    loop.run(20000)
    steps = [b != a for a, b in zip(loop.shares[10000:], loop.shares[10001:], strict=False)]
    assert sum(steps) < 30


def test_late_workers_decode_less(monkeypatch):
    loop = Loop(monkeypatch, lambda share: 0.0152)
    relaxed, _ = loop.run(200)
    loop.run(160, late=0.01)
    assert loop.shares[-1] < 0.2 * relaxed
    assert loop.run(800)[0] > 0.4 * relaxed


def test_a_try_that_the_cores_do_not_carry_costs_the_share_nothing(monkeypatch):
    loop = Loop(monkeypatch, lambda share: 0.0152 - 0.0012 * share)
    balancer = loop.balancer
    balancer._level = balancer._best = LEVELS - _balance.STEP  # as where less was better before
    balancer._direction = 1
    loop.run(72)
    begin = loop.shares[-1]
    loop.run(600, late=lambda share: 0.01 if share > 1.2 * begin else 0)
    assert max(loop.shares) > 1.3 * begin  # it was tried
    assert sum(share < 0.9 * begin for share in loop.shares[300:]) < 70  # but for tries with less


def test_cores_that_carry_less_than_they_were_taken_to(monkeypatch):
    loop = Loop(monkeypatch, lambda share: 0.0152 - 0.0012 * share)
    highest = most(0.0148, 0.0014)
    loop.run(3000, late=lambda share: 0.01 if share > 0.8 * highest else 0)
    assert max(loop.shares[:100]) > 0.95 * highest  # asked at first
    # Two thirds of it then, but for tries: each ends soon, and costs the share nothing.
    assert min(loop.shares[100:400]) > 0.6 * highest
    late = sum(share > 0.8 * highest for share in loop.shares[200:])
    assert late < 0.1 * len(loop.shares)


def test_late_batches_now_and_then_change_nothing(monkeypatch):
    loop, other = (Loop(monkeypatch, lambda share: 0.0152) for _ in range(2))
    for _ in range(20):
        loop.run(2, late=0.005)
        other.run(2)
        assert loop.run(100) == other.run(100)


def test_the_first_batches_of_an_epoch_may_be_late(monkeypatch):
    loop, other = (Loop(monkeypatch, lambda share: 0.0152) for _ in range(2))
    assert loop.run(200) == other.run(200)
    for _ in range(20):
        loop.balancer.begin()
        loop.run(16, late=0.01)
        other.run(16)
        assert loop.run(100) == other.run(100)


class Workers:
    """Workers that share the time of some cores, and a loop that takes batches in order.

    The loop is slowed down by what the GPU decodes.
    """

    BATCH, COST, REST = 256, 0.0015, 0.00013  # seconds an image
    TICK = 0.0005

    def __init__(self, monkeypatch, cores, seed=0):
        monkeypatch.setattr(_balance, "usable_cores", lambda: 16)
        self.balancer = Balancer(torch.zeros(1, dtype=torch.float64), LOADER, fixed=False)
        self.cores, self.rng = cores, random.Random(seed)

    @staticmethod
    def period(share):
        return 0.017 - 0.004 * share + 0.005 * share**2

    def best(self):
        """Batches a second at the share that suits best."""
        seconds = [
            max(self.period(share), self.BATCH * (share * self.COST + self.REST) / self.cores)
            for share in (i / 100 for i in range(101))
        ]
        return 1 / min(seconds)

    def run(self, seconds, begin):
        """Batches a second from ``begin`` on."""
        rng, balancer = self.rng, self.balancer
        balancer.begin()
        # Of each worker its batches: [number, seconds left or None, share]
        queues = [[[i, None, 0.0], [i + 16, None, 0.0]] for i in range(16)]
        ready, slots, taken, given, waited, last, free, now = {}, [], 0, 0, 0.0, 0.0, 0.0, 0.0
        while now < seconds:
            busy = [queue for queue in queues if queue]
            for queue in busy:
                batch = queue[0]
                if batch[1] is None:
                    batch[2] = float(balancer.share)
                    batch[1] = self.BATCH * (batch[2] * self.COST + self.REST)
                    batch[1] *= rng.uniform(0.8, 1.2)
                batch[1] -= self.TICK * min(1, self.cores / len(busy))
                if batch[1] <= 0:
                    ready[batch[0]] = queue.pop(0)[2]
            if len(slots) < 2 and taken in ready:
                slots.append(ready.pop(taken))
                queues[taken % 16].append([taken + 32, None, 0.0])
                decoded = int(self.BATCH * slots[-1])
                balancer.observe(self.BATCH, decoded, decoded * self.COST, waited)
                taken, waited = taken + 1, 0.0
            elif len(slots) < 2:
                waited += self.TICK
            if slots and now >= free:
                balancer.handed_over(now - last)
                last, free = now, now + self.period(slots.pop(0)) * rng.uniform(1, 1.05)
                given += now >= begin
            now += self.TICK
        return given / (seconds - begin)


@pytest.mark.parametrize("cores", [4, 6, 8, 13])
def test_cores_that_carry_less_than_was_asked_of_them(monkeypatch, cores):
    # Others use the rest of the machine. A share that swings costs a fifth of the batches here.
    workers = Workers(monkeypatch, cores)
    assert workers.run(25, begin=5) > 0.9 * workers.best()


def test_long_steps_leave_time_for_all(monkeypatch):
    assert Loop(monkeypatch, lambda share: 0.8 - 0.01 * share).run(2000)[0] == 1


def test_a_fixed_share_and_a_small_machine_stay_as_they_are(monkeypatch):
    loop = Loop(monkeypatch, lambda share: 0.014)
    loop.balancer = Balancer(torch.full((1,), 0.3, dtype=torch.float64), LOADER, fixed=True)
    assert loop.run(500)[0] == pytest.approx(0.3)
    monkeypatch.setattr(_balance, "usable_cores", lambda: 3)
    loop.balancer = Balancer(torch.zeros(1, dtype=torch.float64), LOADER, fixed=False)
    assert loop.run(500)[0] == 0


def test_cores_are_shared_between_ranks(monkeypatch):
    alone = _balance.usable_cores()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert _balance.usable_cores() == alone // 2


def test_a_loop_that_does_little_but_wait(monkeypatch):
    loop = Loop(monkeypatch, lambda share: 0.0152)
    balancer = loop.balancer
    loop.run(400)
    assert not balancer.trying and not balancer.starved
    for _ in range(_balance.OFTEN):
        assert not balancer.starved
        balancer.loop_waited(0.0052)
    assert balancer.starved
    for _ in range(3 * _balance.OFTEN):  # it is soon forgotten
        balancer.loop_waited(0.0052)
    for _ in range(_balance.OFTEN + 1):
        assert balancer.starved
        balancer.loop_waited(0.0050)
    assert not balancer.starved
    balancer._level = balancer._best - 1  # what comes in a try does not tell
    for _ in range(_balance.OFTEN):
        balancer.loop_waited(0.0152)
    assert not balancer.starved


def test_the_pace_is_that_of_the_loops_shorter_steps():
    balancer = Balancer(torch.zeros(1, dtype=torch.float64), LOADER, fixed=True)
    for _ in range(_balance.FEW - 1):
        balancer.handed_over(0.1)
    assert balancer.pace == 0.0  # it is not known yet
    balancer.handed_over(0.1)
    assert balancer.pace == 0.1
    balancer.handed_over(30.0)  # a validation
    assert balancer.pace == 0.1
    for i in range(16):  # gradients are accumulated
        balancer.handed_over((0.1, 0.01)[i % 2])
    assert balancer.pace == 0.01
