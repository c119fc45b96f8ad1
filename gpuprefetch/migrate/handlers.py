"""Whether an error would be caught: by the code of a dataset that calls a library's function."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType


def may_be_caught(outermost: CodeType) -> bool:
    """Whether an error that is raised here may be caught before it reaches a function.

    That is so in a ``try`` and in a ``with``, whatever is done with the error there. This package
    itself hands errors on.

    Args:
        outermost: the code of that function, which calls this one through others. Its frame would
            hold itself if it were given.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (code := frame.f_code) is not outermost:
        if code.co_exceptiontable and _catches(frame, code):
            return True
        frame = frame.f_back
    return False


def _catches(frame: FrameType, code: CodeType) -> bool:
    """Whether a function may catch what is raised where it is now."""
    at = frame.f_lasti
    spans = _spans(code)
    for _ in spans:  # from a handler to the one around it
        for span in spans:
            if span.start <= at < span.stop:
                break
        else:
            return False
        if span.has_handler:
            return not str(frame.f_globals.get("__name__")).startswith("gpuprefetch.")
        at = span.again
    return False


@dataclass(frozen=True, slots=True)
class _Span:
    """Instructions of a function whose errors go to another place of it.

    Attributes:
        start: of the first, in bytes.
        stop: after the last.
        again: where that place raises the error again, if it does.
        has_handler: whether code of the user's is there, and not only what follows such code.
    """

    start: int
    stop: int
    again: int
    has_handler: bool


@lru_cache(maxsize=1024)
def _spans(code: CodeType) -> tuple[_Span, ...]:
    """What Python goes by, which is a table of the innermost ones.

    Its entries are start, length, target and depth, in variable lengths of six bits a byte, as
    CPython's InternalDocs/exception_handling.md has it.
    """
    numbers = _numbers(iter(code.co_exceptiontable))
    entries = []
    for start in numbers:
        length = next(numbers)
        target = next(numbers)
        next(numbers)  # depth of the stack
        entries.append((2 * start, 2 * (start + length), 2 * target))
    instructions = [*dis.get_instructions(code)]
    places = {each.offset: i for i, each in enumerate(instructions)}
    spans = []
    for start, stop, target in entries:
        there = instructions[places[target] :]
        again = next((each.offset for each in there if each.opname == "RERAISE"), -1)
        spans.append(_Span(start, stop, again, there[0].opname == "PUSH_EXC_INFO"))
    return tuple(spans)


def _numbers(table: Iterator[int]) -> Iterator[int]:
    for byte in table:
        number = byte & 63
        while byte & 64:
            byte = next(table)
            number = number << 6 | byte & 63
        yield number
