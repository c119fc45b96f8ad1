"""Whether an error would be caught: by the code of a dataset that calls a library's function."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType

Span = tuple[int, int]  # of instructions, in bytes


def may_be_caught(outermost: CodeType) -> bool:
    """Whether an error that is raised here may be caught before it reaches a function.

    That is so in a ``try`` and in a ``with``, whatever is done with the error there. This package
    itself hands errors on.

    Args:
        outermost: the code of that function, which calls this one through others. Its frame would
            hold itself if it were given.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        ours = str(frame.f_globals.get("__name__")).startswith("gpuprefetch.")
        spans = () if ours else _handled(frame.f_code)
        if any(start <= frame.f_lasti < stop for start, stop in spans):
            return True
        frame = frame.f_back
    return False


@lru_cache(maxsize=1024)
def _handled(code: CodeType) -> tuple[Span, ...]:
    """The parts of a function that have a handler, by the table that Python goes by.

    Its entries are start, length, target and depth, in variable lengths of six bits a byte, as
    CPython's InternalDocs/exception_handling.md has it.
    """
    numbers = _numbers(iter(code.co_exceptiontable))
    spans = []
    for start in numbers:
        length = next(numbers)
        next(numbers)  # the handler
        next(numbers)  # depth of the stack
        spans.append((2 * start, 2 * (start + length)))
    return tuple(spans)


def _numbers(table: Iterator[int]) -> Iterator[int]:
    for byte in table:
        number = byte & 63
        while byte & 64:
            byte = next(table)
            number = number << 6 | byte & 63
        yield number
