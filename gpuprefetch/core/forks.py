"""A process that is forked here leaves alone what is this one's: its garbage, and its workers."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from typing import Protocol
from weakref import WeakSet

from gpuprefetch.core.errors import scope


class Owner(Protocol):
    """Owns what only one process may use, such as the pipes of its workers."""

    def leave_to_parent(self) -> object:
        """Forget, in a forked process, what is its parent's; what must not be collected there."""


_owners = WeakSet[Owner]()
_of_the_parent: list[object] = []  # an iterator that is collected ends its workers

_forking = threading.local()  # whether this thread forks workers of a prefetcher


@scope
def garbage_stays_here() -> Iterator[None]:
    """Workers forked in this scope do not collect the garbage of this process.

    Garbage may hold pinned memory and CUDA events. A forked worker that collects them calls CUDA,
    and aborts. So a worker begins with gc.freeze(), and nothing is collected before that.
    """
    if hasattr(_forking, "collects"):  # the loader begins an epoch of a prefetcher in its __iter__
        yield
        return
    _forking.collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if _forking.__dict__.pop("collects"):
            gc.enable()


def stay_here(owner: Owner) -> None:
    """Let processes that are forked from now on leave to this one what an owner has."""
    _owners.add(owner)


def _in_fork() -> None:
    _of_the_parent.extend(owner.leave_to_parent() for owner in [*_owners])
    if (collects := getattr(_forking, "collects", None)) is not None:
        gc.freeze()
        if collects:
            gc.enable()


if hasattr(os, "register_at_fork"):  # not on every platform
    os.register_at_fork(after_in_child=_in_fork)
