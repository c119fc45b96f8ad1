"""How many of the JPEGs the workers decode: what idle cores carry without slowing the training."""

from __future__ import annotations

import os
from collections import deque
from statistics import fmean, median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Cores left to the training thread, the prefetch threads and the DataLoader's pin thread.
RESERVED_CORES = 3
# Of the other cores' time that decoding may fill at the highest level: reading and packing take a
# part of the rest.
UTILIZATION = 0.82
# A share s of the images, those with the least to do first, takes the workers a time in proportion
# to s**WORK: 30 % of ImageNet's files make 12 % of the work. A batch tells of the share that it was
# given, some thirty batches before. Were its images taken for average ones, a small share would ask
# for a large one and that for a small one, for ever. Where all files are alike, this takes some
# steps.
WORK = 1.75
GUESS = 0.003  # seconds to decode an image, as long as none was
# Workers are late where the prefetcher waits for them for LATE of the time. Over as many batches as
# are under way, which is also how long less work for them takes to show: so the share is cut once
# in that time at most, and comes back slowly. TCP's window does the same for the same reason. Else
# it would swing between none and too much where the cores do not carry what is asked of them. If it
# was a try that asked for more than before, that ends, and nothing is cut; nor where it is all that
# the cores were taken to carry: a part of it is asked then.
LATE, CUT = 0.05, 0.5
LEAST, MOST = 0.1, 1.0  # what counts of one wait, in periods: not a jitter, nor all of a long pause
# A batch at the start; later, in the time that a cut takes to show.
RISE, RISE_AGAIN = 0.05, 0.05
FEW = 4  # periods; fewer say nothing
# The share, all of that at first, is tried at 0 to LEVELS parts of it, for WINDOW batches each. It
# changes for a GAIN over the window before, WINS times in a row: the windows of a busy machine
# differ by some percent. A try that begins with a LOSS is ended early. The first ones are STEP
# levels away, later ones half of that where neither more nor less was better, and twice where one
# was: a compass search (Kolda, Lewis and Torczon, SIAM Review 45, 2003).
LEVELS, STEP, WINDOW, GAIN, LOSS, WINS = 12, 4, 32, 0.005, 0.03, 2
# A loop does little but wait if it waits for longer than LITTLE of its time for OFTEN batches more
# than not.
LITTLE, OFTEN = 1 / 3, 8
# Windows before the first try, between two of them behind one that was better, and at most: doubled
# where neither more nor less was better in the smallest steps. A try with less makes batches late
# where the GPU's decoder does not keep up with the rest.
FIRST, SHORTEST, LONGEST = 16, 2, 64


def usable_cores() -> int:
    """Cores this process may use, shared fairly with the other ranks on the machine."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every platform
        cores = os.cpu_count() or 1
    return cores // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


class Balancer:
    """Steers the share of baseline JPEGs that is decoded in the workers.

    What the GPU decodes takes time from the model, so workers with nothing else to do had better
    decode: as much of a batch as takes ``cores * period`` seconds, ``period`` being the time the
    loop takes for a batch. But busy cores can slow the training thread down, by more than the GPU
    gains where they share their clock, their caches or their physical cores with it. So the loop's
    own speed decides: a little more or less is tried from time to time, and kept where batches
    come faster (hill climbing, as in tf.data's autotuning).

    Args:
        share: ``(1,)`` float64 in shared memory, read by the workers.
        loader: the wrapped loader.
        fixed: whether the share stays as it is.
    """

    def __init__(self, share: torch.Tensor, loader: Any, *, fixed: bool) -> None:
        workers = getattr(loader, "num_workers", 0)
        self.share = share
        # To make an array of a tensor, and to drop it, takes Python's lock once more.
        self._share: npt.NDArray[np.float64] = share.numpy()
        self._cores = max(min(workers, usable_cores() - RESERVED_CORES), 0)
        self.fixed = fixed or self._cores == 0
        self._periods: deque[float] = deque(maxlen=16)
        # Shares that would have taken a second an image of the batch, by the batches seen.
        self._carried: deque[float] = deque([(1 / GUESS) ** (1 / WORK)], maxlen=16)
        self._trust, self._rise = 0.0, RISE
        # A new share shows when the batches that were under way are through.
        self._under_way = workers * (getattr(loader, "prefetch_factor", None) or 2) + 4
        self._settling = self._under_way
        self._waits: deque[float] = deque(maxlen=self._under_way)
        self._unseen = 0  # batches until the latest change shows
        self._window: list[float] = []
        self._level = self._best = LEVELS
        self._best_period = 0.0
        self._too_much = False  # what is tried: the workers are late
        self._direction, self._step, self._patience = -1, STEP, FIRST
        self._waited = self._failed = self._wins = self._long_waits = 0

    @property
    def value(self) -> float:
        """The share."""
        return float(self._share[0])

    @property
    def period(self) -> float:
        """Seconds between the two latest batches that went to the loop; 0 before."""
        return self._periods[-1] if self._periods else 0.0

    @property
    def pace(self) -> float:
        """A period that a quarter of the latest ones are below; 0 while there are few."""
        count = len(self._periods)
        return sorted(self._periods)[count // 4] if count >= FEW else 0.0

    @property
    def trying(self) -> bool:
        """Whether what comes now need not be what comes in the long run."""
        return not self.fixed and (self._level != self._best or self._settling > 0)

    @property
    def starved(self) -> bool:
        """Whether the loop does little but wait for the decode."""
        return self._long_waits >= OFTEN

    def loop_waited(self, seconds: float) -> None:
        """Learn from one batch for how long the loop waited for its decode."""
        if not self.trying:
            change = 1 if seconds > LITTLE * self.period else -1
            self._long_waits = min(max(self._long_waits + change, 0), 2 * OFTEN)

    def begin(self) -> None:
        """Judge the workers anew, by batches that are not under way yet, as in a new epoch."""
        self._share = self.share.numpy()  # in shared memory by now
        self._forget_waits()

    def _forget_waits(self) -> None:
        self._waits.clear()
        self._unseen = self._under_way

    def observe(self, images: int, decoded: int, decode_seconds: float, waited: float) -> None:
        """Learn from one batch as it comes from the loader.

        Args:
            images: in the batch.
            decoded: of them in the worker.
            decode_seconds: it took the worker.
            waited: seconds for which the loader let us wait for the batch.
        """
        if decoded and decode_seconds:
            self._carried.append(decoded / images * (images / decode_seconds) ** (1 / WORK))
        if self.fixed or len(self._periods) < FEW:
            return
        period = median(self._periods)
        self._unseen -= 1
        if self._unseen < 0:
            self._waits.append(min(max(waited / period, LEAST), MOST) - LEAST)
        if sum(self._waits) <= LATE * self._under_way:
            self._trust = min(self._trust + self._rise, 1.0)
        else:
            if self._level > self._best or self._best == LEVELS:
                self._too_much = True
            else:
                self._trust *= CUT
                self._rise = RISE_AGAIN / self._under_way
            self._forget_waits()
        seconds = UTILIZATION * self._cores * period / images
        room = median(self._carried) * seconds ** (1 / WORK)
        # Not with fill_(), which gives up Python's lock: the training thread would have it.
        self._share[0] = min(self._trust * room * self._level / LEVELS, 1.0)

    def handed_over(self, period: float) -> None:
        """Learn from one batch as it goes to the loop.

        Args:
            period: seconds since the batch before.
        """
        self._periods.append(period)
        if self._too_much:
            self._too_much = False
            self._window.clear()
            if self._level == self._best == LEVELS:
                self._best, self._direction, self._patience = LEVELS - self._step, -1, FIRST
                self._step = max(self._step // 2, 1)
            self._fail()
        if self._settling:
            self._settling -= 1
            return
        self._window.append(period)
        tried = len(self._window)
        hopeless = self._level != self._best and (
            tried == WINDOW // 4 and median(self._window) > (1 + LOSS) * self._best_period
        )
        if tried == WINDOW or hopeless:
            tenth = tried // 10  # a pause, as for a validation, is no slower loader
            self._judge(fmean(sorted(self._window)[tenth : tried - tenth]))
            self._window.clear()

    def _judge(self, period: float) -> None:
        """Choose the next level, at the end of a window with this ``period``."""
        if self._level == self._best:
            self._best_period = period
            self._waited += 1
            if self._wins or self._waited >= self._patience:
                if self._best == (0, LEVELS)[self._direction > 0]:
                    self._direction = -self._direction
                level = self._best + self._direction * self._step
                self._go_to(min(max(level, 0), LEVELS))
            return
        if period < (1 - GAIN) * self._best_period:
            self._wins += 1
            if self._wins < WINS:
                self._go_to(self._best)
                return
            self._best, self._patience, self._failed = self._level, SHORTEST, 0
            self._step = min(2 * self._step, STEP)
            self._waited = self._wins = 0
        else:
            self._fail()

    def _fail(self) -> None:
        """Go back from a try that was no better."""
        self._direction, self._failed = -self._direction, self._failed + 1
        if self._failed % 2 == 0 or self._best in (0, LEVELS):
            if self._step > 1:
                self._step //= 2
            else:
                self._patience = min(2 * self._patience, LONGEST)
        self._waited = self._wins = 0
        self._go_to(self._best)

    def _go_to(self, level: int) -> None:
        self._level, self._settling = level, self._under_way
