"""Whether an error would be caught: by the code of a dataset that calls a library's function."""

from __future__ import annotations

import dis
import inspect
import io
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, ModuleType

Name = tuple[str, ...]  # such as ("Image", "open")

# What these give to a ``with`` hands on all errors in its block.
_HAND_ON: set[object] = {open, io.BytesIO, Path.open, zipfile.ZipFile, zipfile.ZipFile.open}


def hands_on(function: Callable[..., object]) -> None:
    """Note a function that gives to a ``with`` what hands on all errors in its block."""
    _HAND_ON.add(function)


def may_be_caught(outermost: CodeType) -> bool:
    """Whether an error that is raised here may be caught before it reaches a function.

    That is so in a ``try`` and in a ``with``, whatever is done with the error there, but for those
    that are known to hand it on, as ``with open(path)``. This package itself hands errors on.

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
        if span.has_handler and not (span.manager and _is_handed_on(span.manager, frame)):
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
        manager: the name of the function whose result a ``with`` enters; empty if it is not known,
            and for a ``try``.
    """

    start: int
    stop: int
    again: int
    has_handler: bool
    manager: Name


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
        manager: Name = ()
        if there[1].opname == "WITH_EXCEPT_START":
            first = min(begin for begin, _, same in entries if same == target)
            manager = _manager(instructions[: places[first]])
        has_handler = there[0].opname == "PUSH_EXC_INFO"
        spans.append(_Span(start, stop, again, has_handler, manager))
    return tuple(spans)


def _numbers(table: Iterator[int]) -> Iterator[int]:
    for byte in table:
        number = byte & 63
        while byte & 64:
            byte = next(table)
            number = number << 6 | byte & 63
        yield number


def _manager(before: Sequence[dis.Instruction]) -> Name:
    """The name of the function that a ``with`` calls, by the instructions before its block.

    The ``with`` enters the result of its last call. What stands where that call begins are the
    parts of the function's name, and nothing else if it is a name.
    """
    entered = [i for i, each in enumerate(before) if each.opname in ("BEFORE_WITH", "COPY")]
    call = before[entered[-1] - 1] if entered and entered[-1] else None
    if call is None or not call.opname.startswith("CALL"):
        return ()
    name: list[str] = []
    for each in reversed(before[: entered[-1] - 1]):
        is_of_call = each.opname in ("PRECALL", "KW_NAMES", "PUSH_NULL", "LOAD_CONST")
        if is_of_call or _begin(each) != _begin(call):
            continue
        if not each.opname.startswith("LOAD_") or not isinstance(each.argval, str):
            return ()
        name.insert(0, each.argval)
        if each.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            return tuple(name)
    return ()


def _begin(instruction: dis.Instruction) -> tuple[int | None, int | None]:
    """Where the source of an instruction begins: line and column."""
    at = instruction.positions
    return (at.lineno, at.col_offset) if at is not None else (None, None)


def _is_handed_on(manager: Name, frame: FrameType) -> bool:
    """Whether a ``with`` enters what hands errors on. Nothing of the user's is called for it."""
    value = _variable(manager[0], frame)
    for name in manager[1:]:
        if isinstance(value, ModuleType):
            value = vars(value).get(name)
        else:
            value = inspect.getattr_static(value, name, None)
    try:
        return value in _HAND_ON
    except TypeError:  # it has no hash
        return False


def _variable(name: str, frame: FrameType) -> object:
    code = frame.f_code
    if name in code.co_varnames or name in code.co_cellvars or name in code.co_freevars:
        return frame.f_locals.get(name)
    return frame.f_globals.get(name, frame.f_builtins.get(name))
