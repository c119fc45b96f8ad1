"""Workers that are forked here leave this process's garbage alone."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

from gpuprefetch.core.errors import scope

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


def _freeze_in_fork() -> None:
    if (collects := getattr(_forking, "collects", None)) is not None:
        gc.freeze()
        if collects:
            gc.enable()


if hasattr(os, "register_at_fork"):  # not on every platform
    os.register_at_fork(after_in_child=_freeze_in_fork)
