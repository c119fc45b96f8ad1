"""How many of the JPEGs the workers decode: as many as their cores carry beside the training."""

from __future__ import annotations

import os
from collections import deque
from statistics import median

import torch

# Cores left to the training thread, the prefetch threads and the DataLoader's pin thread.
RESERVED_CORES = 3
# Of the workers' time that decoding may fill; reading and packing take the rest.
UTILIZATION = 0.8
FIRST_SHARE = 0.1


def usable_cores() -> int:
    """Cores this process may use, shared fairly with the other ranks on the machine."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every platform
        cores = os.cpu_count() or 1
    return cores // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


class Balancer:
    """Steers the share of baseline JPEGs that is decoded in the workers.

    The workers can decode ``cores * period / seconds_per_image`` images per batch without anybody
    waiting, ``period`` being the time the loop takes for a batch. That is the target; when the
    loader falls behind all the same (slow disk, busy cores), it shrinks until the loader keeps up.

    Args:
        share: ``(1,)`` float64 in shared memory, read by the workers.
        workers: of the wrapped loader.
        fixed: whether the share stays as it is.
    """

    def __init__(self, share: torch.Tensor, workers: int, *, fixed: bool) -> None:
        self.share = share
        self._cores = max(min(workers, usable_cores() - RESERVED_CORES), 0)
        self._fixed = fixed or self._cores == 0
        self._periods: deque[float] = deque(maxlen=16)
        self._costs: deque[float] = deque(maxlen=16)
        self._ease = 1.0
        if not self._fixed:
            share.fill_(FIRST_SHARE)

    def observe(self, images: int, decoded: int, decode_seconds: float, waited: float) -> None:
        """Learn from one batch as it comes from the loader.

        Args:
            images: in the batch.
            decoded: of them in the worker.
            decode_seconds: it took the worker.
            waited: seconds for which the loader let us wait for the batch.
        """
        if self._fixed:
            return
        if decoded:
            self._costs.append(decode_seconds / decoded)
        if not (self._costs and len(self._periods) >= 4):
            return
        period = median(self._periods)
        late = waited > 0.1 * period
        self._ease = max(self._ease * 0.97, 0.02) if late else min(self._ease * 1.01, 1.0)
        target = UTILIZATION * self._cores * period / (median(self._costs) * images)
        self.share.fill_(min(target * self._ease, 1.0))

    def period(self, seconds: float) -> None:
        """Learn how long the loop took for a batch."""
        self._periods.append(seconds)
