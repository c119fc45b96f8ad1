"""How many of the JPEGs the workers decode: none, unless the loop waits for the GPU's decoder."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import torch

from gpuprefetch.core.nested import Loader
from gpuprefetch.images.plan import TOGETHER

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of Linux's control groups, version 2
# Cores left to the training thread, the prefetch thread and the DataLoader's pin thread.
RESERVED_CORES = 3
# What the GPU decodes without JPEG engines, in cores. With 13 cores to spare beside ResNet-18 on an
# H200, a share of 0 trained 7,000 photos a second, 0.3 trained 9,800, 0.45 9,400 and 0.6 7,700.
CUDA_AS_CORES = 30
# The balancer decides every WINDOW batches. FEW batches are enough to show late workers, and to
# decide where they need LONG seconds, as batches of large photos do.
WINDOW = 32
FEW = TOGETHER  # and a run of so many holds whole bursts, in which batches come that were together
LONG = 1.0
# The loop waits for decode where it waits for more than this part of the time. Workers are late
# where the loader is later than that, beside its lateness without a share: a batch needs a while
# to come from its worker.
WAITED = 0.05
LATE = 0.05
# The share rises by the fraction of time the loop waits, clipped to LEAST and MOST. Where decode is
# the limit, the loop's period is then shorter by about as much. The rise is kept if the period
# falls by at least KEEPS of it.
LEAST = 0.05
MOST = 0.25
KEEPS = 0.25
# The first share is LEAST, which shows what a photo costs. No share may keep more than FILLS of the
# spare cores busy, which also read and pack.
FILLS = 0.7
# FIRST windows pass before the first try: a model warms up. The pause doubles after each try that
# did not help, up to LONGEST windows.
FIRST = 4
LONGEST = 128


def usable_cores() -> int:
    """Cores this process may use, 1 or more, shared fairly with the other ranks on the machine."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every platform
        cores = os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # a container's quota, in microseconds or "max"
        quota, period = QUOTA.read_text().split()
        cores = min(cores, int(quota) // int(period))
    return max(cores // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1), 1)


class _Window:
    """What was measured since the last decision."""

    def __init__(self) -> None:
        self._periods: list[float] = []
        self.late = 0.0  # seconds that the loader was waited for
        self.waited = 0.0  # seconds that the loop waited
        self.decoding = 0.0  # seconds of decode, of all workers

    def add(self, period: float, waited: float) -> None:
        self._periods.append(period)
        self.waited += waited

    def fetched(self, late: float, decoding: float) -> None:
        self.late += late
        self.decoding += decoding

    @property
    def batches(self) -> int:
        return len(self._periods)

    @property
    def seconds(self) -> float:
        return sum(self._periods)

    @property
    def period(self) -> float:
        """Seconds from one batch to the next, in the median of some runs of batches."""
        last = max(len(self._periods) - FEW, 0)
        runs = [self._periods[i : i + FEW] for i in range(0, last + 1, FEW)]
        return median(map(mean, runs))

    @property
    def late_part(self) -> float:
        """The part of the time that the loader was waited for."""
        return self.late / self.seconds

    @property
    def waited_part(self) -> float:
        """The part of the time that the loop waited."""
        return self.waited / self.seconds


class _Pause:
    """The windows until the next try."""

    def __init__(self) -> None:
        self._left = FIRST
        self._length = 1

    def is_over(self) -> bool:
        """Whether a try may come now; counts a window if not."""
        if not self._left:
            return True
        self._left -= 1
        return False

    def shorten(self) -> None:
        """After a try that helped."""
        self._length = 1

    def lengthen(self) -> None:
        """After a try that did not help, or late workers."""
        self._length = min(2 * self._length, LONGEST)
        self._left = self._length


class _Try(NamedTuple):
    """Another share that is to show whether it helps; what was before."""

    share: float
    period: float
    late: float  # a part of the time


class Balancer:
    """Steers the share of baseline JPEGs that is decoded in the workers, unless it is ``fixed``.

    A busy worker can cost the training thread more than it saves the GPU, so the share starts at
    none. It rises while the loop waits for decode, as long as batches then come faster. As soon as
    the workers are late, the latest rise is taken back, or the share is halved. If batches then
    come more slowly, the share is as before: decode was the limit all the same, and workers may be
    as late as that.

    Example, of a loop that waits for a tenth of its time at a share of 0.2::

        share 0.2, period 20.0 ms -> try 0.3 -> period 18.6 ms: kept
        (kept because 18.6 < (1 - KEEPS * 0.1) * 20.0)
        share 0.3, period 18.6 ms, workers late -> try 0.15 -> period 20.9 ms: 0.3 again
        (not kept because 20.9 > (1 + KEEPS * 0.15) * 18.6)
    """

    def __init__(self, share: torch.Tensor, loader: Loader, *, fixed: bool) -> None:
        workers = getattr(loader, "num_workers", 0)
        self.share = share  # of Share.in_memory(), read by the workers
        self.chosen = fixed
        self._spare = min(workers, usable_cores() - RESERVED_CORES)
        self.fixed = fixed or self._spare <= 0  # or there are no cores to spare
        # A new share shows in the batches after those that are under way.
        self._under_way = workers * (getattr(loader, "prefetch_factor", None) or 2) + 4
        self._settling = self._under_way  # batches until the window begins
        self._window = _Window()
        self._tried: _Try | None = None
        self._pause = _Pause()
        # Lateness that does no harm: without a share, or where a fall did not help.
        self._usual = 0.0

    @property
    def value(self) -> float:
        return float(self.share[0])

    def start_without_engines(self, least: int) -> None:
        """CUDA kernels decode: have the idle cores decode from the start, unless the user chose."""
        if not self.chosen:
            self.leave_to_kernels(least)
        if not self.fixed and not self.value:
            self._set(self._spare / (self._spare + CUDA_AS_CORES))

    def leave_to_kernels(self, least: int) -> None:
        """Have the workers take the files that are slow in CUDA kernels: see :class:`Share`."""
        self.share.numpy()[1] = least

    def begin(self) -> None:
        """Leave out the first batches of an epoch, which are always late."""
        self._settling = self._under_way
        self._window = _Window()

    def fetched(self, waited: float, decoding: float = 0.0) -> None:
        """Count a batch: seconds that it was ``waited`` for, and that a worker was ``decoding``."""
        self._window.fetched(waited, decoding)

    def handed_over(self, period: float, waited: float) -> None:
        """See :class:`.core.stage.Stage`."""
        if self.fixed:
            return
        window = self._window
        if self._settling:
            self._settling -= 1
            self._window = _Window()
            return
        window.add(period, waited)
        is_late = window.late_part > self._usual + LATE
        if self.value and not window.batches % FEW and is_late:
            self._take_back()
        elif window.batches >= (WINDOW if window.seconds < LONG else FEW):
            if not self.value:
                self._usual = window.late_part
            self._judge(window.period, window.waited_part)
            self._window = _Window()

    def _take_back(self) -> None:
        """The workers are late: undo the try that may have made them so, or try half the share."""
        window = self._window
        tried = self._tried
        if tried is None:
            self._tried = _Try(self.value, window.period, window.late_part)
            self._set(self.value / 2 if self.value > LEAST else 0.0)
        elif tried.share < self.value:
            self._give_up(tried.share)
        else:  # half of it did not help against that
            self._judge_fall(tried, window.period)

    def _judge_fall(self, tried: _Try, period: float) -> None:
        """Decide whether fewer photos for the workers were better, or decode is the limit."""
        if period > (1 + KEEPS * (tried.share - self.value)) * tried.period:
            self._usual = max(self._usual, tried.late)
            self._give_up(tried.share)
        else:
            self._give_up(self.value)

    def _judge(self, period: float, waited: float) -> None:
        """Decide after a window with this median period; the loop ``waited`` a part of its time."""
        tried = self._tried
        if tried is not None:
            if tried.share > self.value:
                self._judge_fall(tried, period)
                return
            if not tried.share and self.value == LEAST and (higher := self._higher(waited)) > LEAST:
                self._set(higher)  # and judge both at once
                return
            self._tried = None
            if period > (1 - KEEPS * (self.value - tried.share)) * tried.period:
                self._give_up(tried.share)
                return
            self._pause.shorten()
        if not self._pause.is_over():
            return
        if waited > WAITED and (share := self._higher(waited)) >= self.value + LEAST:
            self._tried = _Try(self.value, period, self._window.late_part)
            self._set(share)

    def _higher(self, waited: float) -> float:
        """The share after a rise, where the loop waits for a part of its time."""
        if not self.value:
            return LEAST
        share = min(self.value + min(max(waited, LEAST), MOST), 1.0)
        if self._window.decoding:
            full = self.value * self._spare * self._window.seconds / self._window.decoding
            share = min(share, FILLS * full)
        return share

    def _give_up(self, share: float) -> None:
        self._tried = None
        self._pause.lengthen()
        self._set(share)

    def _set(self, share: float) -> None:
        self.share.numpy()[0] = share  # also of a tensor that was made in inference mode
        self.begin()
