"""What the code of a transform does that its samples do not show.

A stand-in tells how often pipelines are called, and in which order. It does not tell that a random
generator is set, so that two calls sample alike, and ``type()`` of a stand-in is another class.
The functions that the code loads are looked up, and never called.
"""

from __future__ import annotations

import builtins
import dis
import random
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType

import numpy as np
import torch

_MOST = 200  # functions that are looked into
_LIBRARIES = ("builtins", "numpy", "PIL", "random", "torch", "torchvision")

_SETS = {
    random.seed: "random.seed",
    random.setstate: "random.setstate",
    np.random.seed: "numpy.random.seed",
    np.random.set_state: "numpy.random.set_state",
    torch.manual_seed: "torch.manual_seed",
    torch.set_rng_state: "torch.set_rng_state",
    torch.random.fork_rng: "torch.random.fork_rng",
}


def unseen_in(things: Iterable[object]) -> str:
    """What the methods of these objects do unseen, in words; empty if nothing is found.

    Setters are looked for in the functions that the methods call, too.
    """
    own = [function for thing in things for function in _functions_of(thing)]
    for function in own:
        if any(value is type for value in _loaded_by(function)):
            return f"{function.__qualname__} calls type(), where isinstance() would do"
    looked = set[FunctionType]()
    waiting = [*own]
    while waiting and len(looked) < _MOST:
        function = waiting.pop(0)
        if function in looked:
            continue
        looked.add(function)
        for value in _loaded_by(function):
            if callable(value) and (name := _setter(value)):
                return f"{function.__qualname__} calls {name}, so that pipelines may sample alike"
            if isinstance(value, FunctionType) and not _is_known(value.__module__):
                waiting.append(value)
    return ""


def _setter(value: object) -> str:
    try:
        return _SETS.get(value, "")  # type: ignore[call-overload,no-any-return]
    except TypeError:  # no hash
        return ""


def _is_known(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _LIBRARIES


def _functions_of(thing: object) -> Iterator[FunctionType]:
    """The functions of an object and of its class that a call may reach."""
    held = [*vars(thing).items()]
    for kind in type(thing).__mro__:
        held += [] if _is_known(kind.__module__) else vars(kind).items()
    for name, value in held:
        function = value.fget if isinstance(value, property) else value
        function = getattr(function, "__func__", function)
        is_reached = not name.startswith("__") or name == "__call__"
        if is_reached and isinstance(function, FunctionType):
            yield function


def _loaded_by(function: FunctionType) -> Iterator[object]:
    """The objects that a function's global names, and names within modules, stand for."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            continue
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, type(code))]
        value: object = None
        for each in dis.get_instructions(code):
            if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                own = function.__globals__
                value = own.get(each.argval, vars(builtins).get(each.argval))
            elif each.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, ModuleType):
                value = getattr(value, each.argval, None)
            elif each.opname not in ("CACHE", "PUSH_NULL"):
                value = None
            if value is not None and not isinstance(value, ModuleType):
                yield value
