"""Functions of other libraries that are ours for the threads that read a sample of a view.

A dataset may have bound a library's functions by any name. So what these look up themselves when
they are called is replaced: ``PIL.Image.open``, and the operators of ``torch.ops.image``, which
``torchvision.io`` calls. All other threads get the library's own, and so do all when nobody reads.

The libraries get theirs back when nobody reads any more, but for the workers of a DataLoader: doing
so for each sample would cost them a fifth of the time that they read.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeVar

from torch.utils.data import get_worker_info

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Replaced(Generic[P, T]):
    """A function of a library's.

    Args:
        owner: gives the module, or what else has the function.
        name: of the function.
        ours: is called in its place by a thread that reads a sample.
    """

    owner: Callable[[], object]
    name: str
    ours: Callable[P, T]
    _original: Callable[P, T] | None = None  # while it is replaced

    def original(self, *given: P.args, **named: P.kwargs) -> T:
        """Call the library's own."""
        function: Callable[P, T] = self._original or getattr(self.owner(), self.name)
        with reading.set_aside():  # an operator looks itself up by its name, for torch's modes
            return function(*given, **named)

    def __call__(self, *given: P.args, **named: P.kwargs) -> T:
        function = self.ours if reading.is_for_this_thread else self.original
        return function(*given, **named)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # pickle and copy ask
            raise AttributeError(name)
        return getattr(self._original or getattr(self.owner(), self.name), name)

    def replace(self) -> bool:
        """Put this one in the place of the library's; False if the library has none."""
        owner = self.owner()
        if self._original is None and hasattr(owner, self.name):
            self._original = getattr(owner, self.name)
            setattr(owner, self.name, self)
        return self._original is not None

    def restore(self) -> None:
        owner = self.owner()
        if self._original is not None and getattr(owner, self.name) is self:
            setattr(owner, self.name, self._original)
            self._original = None


class Reading:
    """While a thread is in this scope, it gets our functions in the places of the libraries'."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: set[int] = set()
        self._within: set[int] = set()  # readers that are in code of this package
        self._replaced: list[Replaced[..., object]] = []
        self._left: list[Replaced[..., object]] = []  # of these, what is not in its place

    def replaces(
        self, owner: Callable[[], object], name: str, ours: Callable[P, T]
    ) -> Replaced[P, T]:
        """Replace a function from the next scope on."""
        replaced = Replaced(owner, name, ours)
        self._replaced.append(replaced)  # type: ignore[arg-type]  # "..." stands for any P
        self._left.append(replaced)  # type: ignore[arg-type]
        return replaced

    def __enter__(self) -> None:
        with self._lock:
            self._readers.add(threading.get_ident())
            if self._left:
                self._left = [each for each in self._left if not each.replace()]

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._readers.discard(threading.get_ident())
            if not self._readers and get_worker_info() is None:
                for each in self._replaced:
                    each.restore()
                self._left = [*self._replaced]

    @property
    def is_for_this_thread(self) -> bool:
        thread = threading.get_ident()
        return thread in self._readers and thread not in self._within

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Give this thread the libraries' own: code of this package calls them, too."""
        thread = threading.get_ident()
        is_first = thread not in self._within
        self._within.add(thread)
        try:
            yield
        finally:
            if is_first:
                self._within.discard(thread)

    def forked(self) -> None:
        """Forget the threads that do not exist in a new process, which may have held the lock."""
        self._lock = threading.Lock()
        self._readers = {threading.get_ident()} & self._readers
        self._within = {threading.get_ident()} & self._within


reading = Reading()
if hasattr(os, "register_at_fork"):  # not on every platform
    os.register_at_fork(after_in_child=reading.forked)
