"""The seam: what an epoch asks of whoever knows what is in a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gpuprefetch.core.nested import Batch
from gpuprefetch.core.stats import Stats


@dataclass(frozen=True)
class Cost:
    """Bytes on the device of one batch."""

    fixed: int = 0  # of what is there until the hand-over
    decoded: int = 0  # of its decoded images, as many as there are at a time


@dataclass(frozen=True, slots=True)
class Empty:
    """Stands for a batch of which nothing is left."""

    images: int  # that it had
    last: str  # what was left out last, in words
    error: type[Exception]  # raised where all batches of an epoch are empty


class Stage(Protocol):
    """Prepares batches."""

    stats: Stats

    @property
    def device(self) -> torch.device:
        """The device that batches go to."""

    @property
    def memory_budget(self) -> int | None:
        """Bytes for all batches that are ready or in preparation."""

    @property
    def streams(self) -> int:
        """Batches that are prepared side by side; the number may grow within an epoch."""

    def scratch(self) -> contextlib.AbstractContextManager[None]:
        """What a thread that prepares batches keeps meanwhile."""

    def warm_up(self) -> None:
        """Make what a first batch needs whatever is in it, if such batches are sure to come.

        Called in the thread of an epoch before it fetches, while the workers make their batches.
        It raises nothing: what fails here fails again with the first batch.
        """

    def asked(self) -> None:
        """Called in the loop's thread when it asks for a batch."""

    def receive(self, batch: Batch, number: int, waited: float) -> tuple[Batch, int]:
        """What :meth:`run` gets of a batch, and its count of images.

        ``waited`` is the time that the loader needed for the batch, in seconds.
        """

    def cost(self, batch: Batch) -> Cost:
        """What a batch from :meth:`receive` needs on the device; asked for where it counts."""

    def gathers(self, batch: Batch) -> int:
        """How many batches like this one are best prepared together; 1 or more."""

    def begin_together(self, batches: Sequence[tuple[int, Batch]]) -> None:
        """Begin some batches, with their numbers, on the current stream; :meth:`run` follows each.

        It raises nothing: a batch that cannot be begun here is begun by :meth:`run`.
        """

    def run(self, batch: Batch, number: int, epoch: int, cost: Any) -> Batch:
        """Prepare a batch for the loop on the current stream.

        ``cost`` is that of :meth:`cost`, or None where nobody asked for it.
        """

    def handed_over(self, period: float, waited: float) -> None:
        """Report a hand-over to the loop.

        ``period`` is the time since the previous hand-over, and ``waited`` how much of it the loop
        spent waiting for this batch, in seconds.
        """

    def close(self) -> None:
        """Called when an epoch has ended."""
