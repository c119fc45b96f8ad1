"""The seam: what an epoch asks of whoever knows what is in a batch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gpuprefetch.core.stats import Stats


@dataclass(frozen=True)
class Cost:
    """Bytes on the device of one batch."""

    fixed: int = 0  # until it is handed over
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

    def asked(self) -> None:
        """Called in the loop's thread when it asks for a batch."""

    def receive(self, batch: Any, number: int, waited: float) -> tuple[Any, int]:
        """What :meth:`run` gets of a batch that was ``waited`` for, and its count of images."""

    def cost(self, batch: Any) -> Cost:
        """What a batch from :meth:`receive` takes; asked for where it counts."""

    def run(self, batch: Any, number: int, epoch: int, cost: Any) -> Any:
        """Prepare a batch for the loop on the current stream; no cost if nobody asked for it."""

    def handed_over(self, period: float, waited: float) -> None:
        """A batch goes to the loop ``period`` seconds after the last; of those it ``waited``."""

    def close(self) -> None:
        """Called when an epoch has ended."""
