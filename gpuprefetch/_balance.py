"""How many of the JPEGs the workers decode: what idle cores can carry."""

from __future__ import annotations

import os
from collections import deque
from statistics import median

import torch

# Cores left to the training thread, the prefetch threads and the DataLoader's pin thread.
RESERVED_CORES = 3
# Of the cores' time that decoding may fill: reading and packing take a part of the rest, and cores
# that are all busy slow down the training thread. On 16 cores 0.5 to 0.6 was best.
UTILIZATION = 0.55
# How fast the share comes back, and goes where the workers are late.
RISE, LATE = 0.05, 0.1


def usable_cores() -> int:
    """Cores this process may use, shared fairly with the other ranks on the machine."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every platform
        cores = os.cpu_count() or 1
    return cores // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


class Balancer:
    """Steers the share of baseline JPEGs that is decoded in the workers.

    What the GPU decodes takes time from the model, so the workers get all they can decode without
    anybody waiting: ``cores * period / seconds_per_image`` of a batch, ``period`` being the time
    the loop takes for a batch.

    Args:
        share: ``(1,)`` float64 in shared memory, read by the workers.
        workers: of the wrapped loader.
        fixed: whether the share stays as it is.
    """

    def __init__(self, share: torch.Tensor, workers: int, *, fixed: bool) -> None:
        self.share = share
        self._cores = max(min(workers, usable_cores() - RESERVED_CORES), 0)
        self.fixed = fixed or self._cores == 0
        self._periods: deque[float] = deque(maxlen=16)
        self._costs: deque[float] = deque([0.003], maxlen=16)
        self._trust = 0.0

    def observe(self, images: int, decoded: int, decode_seconds: float, waited: float) -> None:
        """Learn from one batch as it comes from the loader.

        Args:
            images: in the batch.
            decoded: of them in the worker.
            decode_seconds: it took the worker.
            waited: seconds for which the loader let us wait for the batch.
        """
        if decoded:
            self._costs.append(decode_seconds / decoded)
        if self.fixed or len(self._periods) < 4:
            return
        period = median(self._periods)
        change = -LATE if waited > 0.2 * period else RISE
        self._trust = min(max(self._trust + change, 0.0), 1.0)
        room = UTILIZATION * self._cores * period / (median(self._costs) * images)
        self.share.fill_(min(self._trust * room, 1.0))

    def handed_over(self, period: float) -> None:
        """Learn from one batch as it goes to the loop.

        Args:
            period: seconds since the batch before.
        """
        self._periods.append(period)
