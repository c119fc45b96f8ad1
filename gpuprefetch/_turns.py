"""Who is in nvJPEG, and how much of the GPU's memory batches on their way may take for speed."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator

import torch

from gpuprefetch._budget import LANES

# Note [Memory for speed]
# What a loop needs to keep its GPU busy depends on its step, so the memory comes level by level.
# Levels 1 and 2 come if there is room for them, the others as long as batches are late:
#   0. one batch, that of the loop: the next is begun when the loop asks for it. What its step takes
#      at its peak is free then. So a batch that fits without us fits with us, but for the decoder.
#   1. two: the next one is prepared as soon as the GPU is through with the batch before, in the
#      memory of that.
#   2. one more, so that the next one is begun as soon as the loop takes this one.
#   3. one more again, unless batches are large: one is ready, and the next in preparation.
#   4. a second decoder, 50 MiB that the process does not get back, with a thread of its own: for
#      a loop that does little but wait (Balancer.starved), as one that validates. Another, also one
#      of the same process, is faster without, see Note [The training thread's locks].
# Measured as there, ResNet-18 eager: 0.971 of the ceiling at level 3, 0.966 at level 2, and 0.930
# at level 1, although the GPU had work left when four of five batches came that the loop had
# waited for. Compiled, 18.2 and 16.9 ms a step at level 1, 16.9 and 16.7 at level 2 (two windows
# each, one process), and nothing was late at either: there the thread that fetches does in the
# middle of the step what the loop does at level 2.

# What the loop itself takes is known behind its second step, which has the optimizer's state. Where
# there is room it goes to level 2 there.
SHOWN = 2
# To a later level, if so many batches were late beyond one in TOLERATED: the first ones of an epoch
# always are. The FIRST ones of all do not count, of which the workers decode nothing yet.
FIRST, LATE, TOLERATED = 64, (10, 10, 40), 5
# A batch may be late where the loop waits longer for it, and not for its loader.
LATE_SECONDS = 0.001
# Where less of the GPU's memory is left, batches on their way get no more of it than they have. The
# first is beside what the next batch takes, which is prepared while the loop has one, the second is
# for all that comes after that.
SPARE_FOR_NEXT, SPARE_BYTES = 256 << 20, 1 << 30


class Turns:
    """Lets one thread at a time into nvJPEG, and several while a loop waits that often has to.

    Attributes:
        level: of what batches on their way may take, see Note [Memory for speed].
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = self._waiting = self._seen = self._late = 0
        self.level = 0

    @property
    def bare(self) -> bool:
        """Whether a batch is begun when the loop asks for it."""
        return self.level < 1

    @property
    def lean(self) -> bool:
        """Whether a batch is begun in the memory of one that was used."""
        return self.level < 2

    @property
    def deep(self) -> bool:
        """Whether two small batches are ready or in preparation."""
        return self.level >= 3

    @property
    def several(self) -> bool:
        """Whether there is a second decoder, for loops that do little but wait."""
        return self.level >= 4

    @property
    def _places(self) -> int:
        return LANES if self._waiting and self.several else 1

    def __enter__(self) -> None:
        with self._changed:
            while self._inside and self._inside >= self._places:
                self._changed.wait()
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def learn(self, *, late: bool) -> bool:
        """Learn from one batch whether it was late; True if that calls for the next level."""
        self._seen += 1
        if self.bare:
            return self._seen > SHOWN
        if self._seen <= FIRST or self.several:
            return False
        self._late = max(self._late + late * TOLERATED - 1, 0)
        if self._late < LATE[self.level - 1] * (TOLERATED - 1):
            return False
        self._late = 0
        return True

    def rise(self, device: torch.device, next_one: int) -> None:
        """To the next level, if enough of the GPU's memory is left at the loop's own peak.

        Args:
            device: a CUDA device.
            next_one: bytes of one more batch on its way.
        """
        free, _ = torch.cuda.mem_get_info(device)
        spare = free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
        if not self.bare:
            self.level += spare >= SPARE_BYTES
        elif spare >= next_one + SPARE_FOR_NEXT:
            self.level = 1 + (spare >= next_one + SPARE_BYTES)

    @contextlib.contextmanager
    def hurried(self) -> Iterator[None]:
        """A loop waits inside of it."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1


turns: defaultdict[torch.device, Turns] = defaultdict(Turns)
