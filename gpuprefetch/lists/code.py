"""What a small function does, by its compiled code: it is never called to find out.

Two functions do the same if they have the same instructions, names and constants, and if the names
stand for the same objects. A local variable counts by its number, not by its name.
"""

from __future__ import annotations

import bisect
import builtins
import dis
import inspect
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType

Code = tuple[tuple[str, object], ...]


def is_written_as(function: object, ways: Iterable[Callable[..., object]]) -> bool:
    """Whether a function does what one of these functions does; neither has a closure."""
    if not isinstance(function, FunctionType):
        return False
    code = _written(function.__code__)
    if code is None:
        return False
    known = [way for way in ways if isinstance(way, FunctionType)]
    return any(code == _written(way.__code__) and _same_names(function, way) for way in known)


def _written(code: CodeType) -> Code | None:
    """What a function of a few arguments does; None for one with others, or with a closure.

    The cell of ``super()`` counts as none.
    """
    others = code.co_kwonlyargcount or set(code.co_freevars) - {"__class__"}
    kinds = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR
    if others or code.co_flags & (kinds | inspect.CO_COROUTINE):
        return None
    kept = [each for each in dis.get_instructions(code) if each.opname not in _STACK]
    offsets = [each.offset for each in kept]
    return (
        ("arguments", code.co_argcount),
        *((each.opname.replace("_METHOD", "_ATTR"), _argument(each, offsets)) for each in kept),
    )


# A module's own imports are called with other arrangements of the stack than other names.
_STACK = {"CACHE", "PRECALL", "PUSH_NULL"}


def _argument(instruction: dis.Instruction, offsets: list[int]) -> object:
    """What an instruction is for; a jump's is the number of the instruction that it goes to."""
    if instruction.opcode in dis.haslocal:
        return instruction.arg
    if instruction.opcode in (*dis.hasjrel, *dis.hasjabs):
        return bisect.bisect_left(offsets, instruction.argval)
    return instruction.argval


def _same_names(function: FunctionType, other: FunctionType) -> bool:
    names = {
        each.argval
        for each in dis.get_instructions(function.__code__)
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    return all(_value_of(name, function) is _value_of(name, other) for name in names)


def _value_of(name: str, function: FunctionType) -> object:
    missing = object()
    value = function.__globals__.get(name, missing)
    return vars(builtins).get(name, missing) if value is missing else value
