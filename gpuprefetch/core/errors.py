"""Exceptions of the user's code arrive as they were raised, whatever class they have."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import ParamSpec

P = ParamSpec("P")


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, if it takes one: a frozen dataclass does not."""
    with suppress(Exception):
        error.add_note(note)


def text_of(error: BaseException) -> str:
    """The message of an exception, whose ``__str__`` may fail as well."""
    try:
        return str(error)
    except Exception:
        return f"a {type(error).__name__} without a message"


class _Scope(AbstractContextManager[None]):
    def __init__(self, steps: Iterator[None]) -> None:
        self._steps = steps

    def __enter__(self) -> None:
        next(self._steps)

    def __exit__(self, *raised: object) -> None:
        next(self._steps, None)


def scope(steps: Callable[P, Iterator[None]]) -> Callable[P, AbstractContextManager[None]]:
    """A context manager of a generator that goes on after its ``yield`` whatever was raised there.

    The generator does not see the exception. ``contextlib.contextmanager`` throws the exception
    into the generator and then sets its ``__traceback__``. For a frozen dataclass that fails, and
    the error of the failure would replace the exception.
    """

    @functools.wraps(steps)
    def entered(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[None]:
        return _Scope(steps(*args, **kwargs))

    return entered


def unexpected_end(error: StopIteration, who: str) -> RuntimeError:
    """The error for a StopIteration that is not the end of an iterator."""
    return RuntimeError(
        f"{who} raised StopIteration, which would have ended the epoch early. Give next() a "
        "default, or raise another exception." + (f"\n{error}" if error.args else "")
    )


def is_end(error: StopIteration) -> bool:
    """Whether a DataLoader's iterator has come to its end, and not a map-style dataset failed.

    A StopIteration from a worker has a message, where the loader's own has none. One from a dataset
    in this process has passed through the function that reads a batch.
    """
    if error.args and text_of(error).startswith("Caught StopIteration "):
        return False
    frames = traceback.walk_tb(error.__traceback__)
    return all(frame.f_code.co_qualname != "_MapDatasetFetcher.fetch" for frame, _ in frames)
