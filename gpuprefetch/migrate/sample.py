"""The sample that a thread reads: what its dataset has opened, and what its transform has given."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterator

import torch

from gpuprefetch.images.guard import Encoded


class CurrentSample(threading.local):
    """The sample that this thread reads."""

    def __init__(self) -> None:
        self.opened: list[object] = []  # what stands for files; its ``use`` says what for
        self.results: list[Encoded] | None = None  # of the transform; None while no sample is read
        self.index = -1  # in its dataset; -1 where that is no integer
        self._seed = 0  # torch's, when the sample was begun

    @contextlib.contextmanager
    def begun(self, key: object) -> Iterator[list[Encoded]]:
        """Read the sample of a key in this block."""
        self.results = results = list[Encoded]()
        self._seed = torch.initial_seed()
        with contextlib.suppress(TypeError):
            self.index = operator.index(key)  # type: ignore[arg-type]
        try:
            yield results
        finally:
            self.opened = []
            self.results = None
            self.index = -1

    def open(self, stand_in: object) -> None:
        """Note what stands for a file."""
        if self.results is not None:
            self.opened.append(stand_in)

    def latest_use(self) -> str:
        """What was done with the pixels of the latest file that was used."""
        uses = (getattr(each, "use", "") for each in reversed(self.opened))
        return next(filter(None, uses), "")

    @property
    def is_seeded_anew(self) -> bool:
        """Whether the dataset has set torch's seed since the sample was begun."""
        return torch.initial_seed() != self._seed


current = CurrentSample()
