"""The sample that a thread reads: what its dataset has opened, and what its transform has given."""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections.abc import Iterator
from types import CodeType

import torch

from gpuprefetch.images.guard import Encoded
from gpuprefetch.migrate.handlers import may_be_caught


class CurrentSample(threading.local):
    """The sample that this thread reads."""

    def __init__(self) -> None:
        self.opened: list[object] = []  # what stands for files; its ``use`` says what for
        self.results: list[Encoded] | None = None  # of the transform; None while no sample is read
        self.index = -1  # in its dataset; -1 where that is no integer
        self.since = 0.0  # when it was begun
        self.raised: Exception | None = None  # of a library, for a bad file, to the dataset
        self._caller: CodeType | None = None  # of the function that called the dataset
        self._keeps_back = False
        self._seed = 0  # torch's, when the sample was begun

    @contextlib.contextmanager
    def begun(self, key: object, caller: CodeType, *, keeps_back: bool) -> Iterator[list[Encoded]]:
        """Read the sample of a key in this block.

        Args:
            key: of the sample.
            caller: the code of the function that calls the dataset.
            keeps_back: whether a library's error for a bad file is kept from the dataset, even if
                that might catch it.
        """
        self.raised = None
        self._caller = caller
        self._keeps_back = keeps_back
        self.results = results = list[Encoded]()
        self._seed = torch.initial_seed()
        self.since = time.perf_counter()
        with contextlib.suppress(TypeError):
            self.index = operator.index(key)  # type: ignore[arg-type]
        try:
            yield results
        finally:
            self.opened = []
            self.results = None
            self.index = -1
            self._caller = None

    def forget_error(self) -> None:
        """Do not hold what the dataset got: its traceback holds the dataset's variables."""
        self.raised = None

    def open(self, stand_in: object) -> None:
        """Note what stands for a file."""
        if self.results is not None:
            self.opened.append(stand_in)

    @property
    def may_catch(self) -> bool:
        """Whether the dataset may catch what is raised now, and is to get it."""
        return not self._keeps_back and self._caller is not None and may_be_caught(self._caller)

    def gets(self, error: Exception) -> bool:
        """Whether the dataset is to get a library's error for a bad file; that is noted then."""
        is_to_get = self.may_catch
        if is_to_get:
            self.raised = error
        return is_to_get

    def latest_use(self) -> str:
        """What was done with the pixels of the latest file that was used."""
        uses = (getattr(each, "use", "") for each in reversed(self.opened))
        return next(filter(None, uses), "")

    @property
    def is_seeded_anew(self) -> bool:
        """Whether the dataset has set torch's seed since the sample was begun."""
        return torch.initial_seed() != self._seed


current = CurrentSample()
