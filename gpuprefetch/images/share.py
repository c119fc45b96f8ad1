"""How many of the JPEGs the workers decode: none, unless the loop waits for the GPU's decoder."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from statistics import median
from typing import Any

import torch

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of Linux's control groups, version 2
# Cores left to the training thread, the prefetch thread and the DataLoader's pin thread.
RESERVED_CORES = 3
# Batches between two decisions, and the fewest that show late workers. As few are enough for a
# decision where they take LONG seconds, as batches of large photos do.
WINDOW, FEW, LONG = 32, 8, 1.0
# The loop waits for decode, or workers are late, where that takes more than this part of the time;
# of lateness, more than without a share, as a batch takes a while to come from its worker.
WAITED, LATE = 0.05, 0.05
# A rise adds as much to the share as the loop waits of its time, within these bounds. Where decode
# is the limit the loop's period is then shorter by about as much. A quarter of that keeps the rise.
# LEAST comes first and is no rise yet: it shows what a photo costs. No share may take more than
# FILLS of the spare cores, which also read and pack.
LEAST, MOST, KEEPS, FILLS = 0.05, 0.25, 0.25, 0.7
# Windows before the first try, in which a model warms up. The pause doubles after each try that
# did not help, up to LONGEST.
FIRST, LONGEST = 4, 128


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


class Balancer:
    """Steers the share of baseline JPEGs that is decoded in the workers, unless it is ``fixed``.

    A busy worker can cost the training thread more than it saves the GPU, so the share starts at
    none. It rises while the loop waits for decode, as long as batches then come faster. As soon as
    the workers are late, the latest rise is taken back, or the share is halved.
    """

    def __init__(self, share: torch.Tensor, loader: Any, *, fixed: bool) -> None:
        workers = getattr(loader, "num_workers", 0)
        self.share = share  # (1,) float64 in shared memory, read by the workers
        self.chosen = fixed
        self._spare = min(workers, usable_cores() - RESERVED_CORES)
        self.fixed = fixed or self._spare <= 0  # or there are no cores to spare
        # A new share shows when the batches that were under way are through.
        self._under_way = workers * (getattr(loader, "prefetch_factor", None) or 2) + 4
        self._tried: tuple[float, float] | None = None  # share and period before the latest rise
        self._pause, self._patience = FIRST, 1
        self._usual = 0.0  # lateness without a share, a part of the time
        self.begin()

    @property
    def value(self) -> float:
        return float(self.share[0])

    def start_without_engines(self) -> None:
        """Have the idle cores decode from the start: CUDA kernels decode as much as five cores."""
        if not self.fixed and not self.value:
            self._set(self._spare / (self._spare + 5))

    def begin(self) -> None:
        """Leave out the first batches of an epoch, which are always late."""
        self._settling = self._under_way
        self._clear()

    def _clear(self) -> None:
        self._periods: list[float] = []
        self._late = self._waited = self._decoding = 0.0

    def fetched(self, waited: float, decoding: float = 0.0) -> None:
        """A batch was ``waited`` for, and a worker was ``decoding`` for it, in seconds."""
        self._late += waited
        self._decoding += decoding

    def handed_over(self, period: float, waited: float) -> None:
        """See :class:`.core.stage.Stage`."""
        if self.fixed:
            return
        if self._settling:
            self._settling -= 1
            self._clear()
            return
        self._periods.append(period)
        self._waited += waited
        seconds = sum(self._periods)
        if self.value and len(self._periods) >= FEW and self._late > (self._usual + LATE) * seconds:
            self._give_up(self._tried[0] if self._tried else self.value / 2)
        elif len(self._periods) >= (WINDOW if seconds < LONG else FEW):
            if not self.value:
                self._usual = self._late / seconds
            self._judge(median(self._periods), self._waited / seconds)
            self._clear()

    def _judge(self, period: float, waited: float) -> None:
        """Decide after a window with this median period; the loop ``waited`` a part of its time."""
        if self._tried is not None:
            share, before = self._tried
            if not share and self.value == LEAST and (higher := self._higher(waited)) > LEAST:
                self._set(higher)  # and judge both at once
                return
            self._tried = None
            if period > (1 - KEEPS * (self.value - share)) * before:
                self._give_up(share)
                return
            self._patience = 1
        if self._pause:
            self._pause -= 1
        elif waited > WAITED and (share := self._higher(waited)) >= self.value + LEAST:
            self._tried = self.value, period
            self._set(share)

    def _higher(self, waited: float) -> float:
        """The share after a rise, where the loop waits for a part of its time."""
        if not self.value:
            return LEAST
        share = min(self.value + min(max(waited, LEAST), MOST), 1.0)
        if self._decoding:
            full = self.value * self._spare * sum(self._periods) / self._decoding
            share = min(share, FILLS * full)
        return share

    def _give_up(self, share: float) -> None:
        self._tried = None
        self._patience = self._pause = min(2 * self._patience, LONGEST)
        self._set(share)

    def _set(self, share: float) -> None:
        self.share.numpy()[:] = share  # also of a tensor that was made in inference mode
        self.begin()
