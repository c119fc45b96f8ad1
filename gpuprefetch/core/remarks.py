"""Remarks on a set-up that works and is slow: each is logged once in a process, by rank 0.

They are no warnings: a program that makes errors of these, as a test suite does, runs on a CPU and
without workers on purpose. ``logging.getLogger("gpuprefetch").setLevel("ERROR")`` silences them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from gpuprefetch.core.ranks import rank

told: set[str] = set()
_quiet: list[None] = []  # one for each block without remarks
_logger = logging.getLogger("gpuprefetch")


def remark(text: str) -> None:
    """Log a remark, if this process has not done so."""
    if text not in told and not _quiet:
        told.add(text)
        if rank() == 0:
            _logger.warning(text)


@contextlib.contextmanager
def unremarked() -> Iterator[None]:
    """Log none in this block, whose loader is not the user's."""
    _quiet.append(None)
    try:
        yield
    finally:
        _quiet.pop()
