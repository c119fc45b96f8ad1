"""What the code of a transform or of a dataset does that its samples do not show.

A stand-in tells how often pipelines are called, and in which order. It does not tell that a random
generator is set, so that two calls sample alike, and ``type()`` of a stand-in is another class.
The functions that the code loads are looked up, and never called.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType

import numpy as np
import torch

_MOST = 200  # functions that are looked into
_FUNCTIONS = (BuiltinFunctionType, FunctionType, MethodType, type(np.random.seed))
_LIBRARIES = ("builtins", "numpy", "PIL", "random", "torch", "torchvision")

# Looked up when they are asked for: torch.compile puts a wrapper in the place of torch's.
_SETTERS: dict[ModuleType, tuple[str, ...]] = {
    random: ("seed", "setstate"),
    np.random: ("seed", "set_state"),
    torch: ("manual_seed", "set_rng_state"),
    torch.random: ("fork_rng", "manual_seed", "set_rng_state"),
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
            if isinstance(value, _FUNCTIONS) and (name := _setter(value)):
                return f"{function.__qualname__} calls {name}, so that pipelines may sample alike"
            if isinstance(value, FunctionType) and not is_of_library(value):
                waiting.append(value)
    return ""


def seeding_in(thing: object) -> str:
    """Which function sets torch's generator while a sample is made, in words.

    ``thing`` is a dataset, or a function of rows. Looked into are its ``__getitem__`` or its own
    code, and what that calls of its methods and of other functions. Empty if nothing is found.
    """
    while isinstance(thing, partial):
        thing = thing.func
    waiting = [*_named(thing, ("__getitem__", "__getitems__", "__call__"))]
    function = getattr(thing, "__func__", thing)
    if isinstance(function, FunctionType):
        waiting = [function]
        thing = getattr(thing, "__self__", thing)
    looked = set[FunctionType]()
    while waiting and len(looked) < _MOST:
        function = waiting.pop(0)
        if function in looked or is_of_library(function):
            continue
        looked.add(function)
        for value in _loaded_by(function):
            if isinstance(value, _FUNCTIONS) and (name := _setter(value)).startswith("torch."):
                return f"{function.__qualname__} calls {name}"
            if isinstance(value, FunctionType):
                waiting.append(value)
        waiting += _named(thing, _attributes_in(function.__code__))
    return ""


def _named(thing: object, names: Iterable[str]) -> Iterator[FunctionType]:
    """The functions that an object has under some names, as its own or by its class."""
    for name in names:
        value = inspect.getattr_static(thing, name, None)
        function = value.fget if isinstance(value, property) else value
        function = getattr(function, "__func__", function)
        if isinstance(function, FunctionType):
            yield function


def _attributes_in(code: CodeType) -> list[str]:
    """The names of attributes that a code loads, and those in it."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    loaded = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
    own = [each.argval for each in dis.get_instructions(code) if each.opname in loaded]
    return own + [name for each in inner for name in _attributes_in(each)]


def _setter(value: Callable[..., object]) -> str:
    """The name of a function that sets a generator; empty for any other."""
    for module, names in _SETTERS.items():
        for name in names:
            if inspect.unwrap(value) is inspect.unwrap(getattr(module, name)):
                return f"{module.__name__}.{name}"
    return ""


def _is_known(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _LIBRARIES


def is_of_library(function: FunctionType) -> bool:
    """Whether a function is of a library that calls no code of the user's by itself."""
    return _is_known(function.__module__)


def _functions_of(thing: object) -> Iterator[FunctionType]:
    """The functions of an object and of its class that a call may reach."""
    if isinstance(thing, FunctionType):
        yield thing
        return
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
