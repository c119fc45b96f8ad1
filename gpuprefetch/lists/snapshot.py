"""What a list of transforms was when it was read: its ops and their parameters, as values.

A prefetcher reads a list once. Who edits the list afterwards, or an op in it, would get the
pictures of the list as it was. So the list is compared when an epoch begins.

What an op changes in itself as it runs, as its counters and generators, is no parameter. An op that
runs as it is, such as a function, follows its parameters by itself: only its identity is compared.
Where the whole list is another object, which a property may make anew each time, what it was made
of is compared instead.
"""

from __future__ import annotations

import enum
import random
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.lists.chosen import base_of_chosen
from gpuprefetch.lists.pil_ops import stand_for
from gpuprefetch.lists.rgb import makes_rgb
from gpuprefetch.lists.to_tensor import in_torchvision
from gpuprefetch.policies.known import only_calls_transforms
from gpuprefetch.policies.registry import LIBRARIES

T = TypeVar("T")

_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList)
_PRIVATE = frozenset(("_modules", "_parameters", "_buffers", "_policies", "_param_generator"))
_STATE = frozenset(("calls", "recipe", "training"))
_OF_KORNIA = frozenset(("device", "dtype"))  # of the latest sampling
_VALUES = (type(None), bool, int, float, complex, str, bytes, enum.Enum, type)
_TORCH_VALUES = (torch.dtype, torch.device, torch.memory_format, np.generic)
_STATEFUL = (
    torch.Generator,
    torch.distributions.Distribution,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
)
MOST_ELEMENTS = 1 << 16  # of a tensor that is compared by its values


@dataclass(slots=True, eq=False)
class _Kept:
    """What runs as it is: the same object, or in another list one that is made of the same."""

    held: object
    made_of: Callable[[], object] | None  # None where only the same object will do
    root: object = None  # what was read, and has it

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Kept):
            return NotImplemented
        if self.held is other.held or self.root is other.root:
            return self.held is other.held
        if self.made_of is None or other.made_of is None:
            return False
        return bool(self.made_of() == other.made_of())


@dataclass(slots=True)
class _Made:
    """What an object was made of when the list was read."""

    parts: object

    def __call__(self) -> object:
        return self.parts


class Snapshot:
    """The parameters of all ops in ``read``, but for those of ``running``, which run themselves."""

    def __init__(self, read: object, running: Iterable[object] = ()) -> None:
        self._running = [*running]
        self._before = self._reader(at_once=True).freeze(read)

    def differs(self, now: object) -> bool:
        return bool(self._before != self._reader(at_once=False).freeze(now))

    def _reader(self, *, at_once: bool) -> _Reader:
        return _Reader({id(op) for op in self._running}, at_once)


@dataclass(slots=True)
class _Reader:
    """Makes values that compare equal as long as nothing in what they were made of has changed."""

    running: set[int]
    at_once: bool  # else objects are looked into where they are others than before
    within: list[object] = field(default_factory=list)  # what is being read: it may hold itself

    def freeze(self, value: object) -> object:
        if isinstance(value, _VALUES):
            return repr(value) if isinstance(value, (float, complex)) else value
        if isinstance(value, _TORCH_VALUES):
            return str(value)
        if isinstance(value, _STATEFUL) or any(value is outer for outer in self.within):
            return type(value)
        self.within.append(value)
        try:
            return self._parts(value)
        finally:
            self.within.pop()

    def _parts(self, value: object) -> object:
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return _array(value)
        if isinstance(value, _Same):
            return _Kept(value.held, None, self.within[0])
        if isinstance(value, (list, tuple)):
            return [*map(self.freeze, value)]
        if isinstance(value, dict):
            return [(self.freeze(key), self.freeze(item)) for key, item in value.items()]
        if isinstance(value, (set, frozenset)):
            return sorted(map(repr, value))
        if isinstance(value, partial):
            return [*map(self.freeze, (value.func, value.args, value.keywords))]
        if isinstance(value, types.MethodType):
            return [*map(self.freeze, (value.__func__, value.__self__))]
        if isinstance(value, types.FunctionType):
            return self._kept(value, _function)
        if _is_read(value):
            runs = id(value) in self.running
            return self._kept(value, _parameters) if runs else self._named(_parameters(value))
        return self._kept(value, _own_values)

    def _kept(self, value: T, parts_of: Callable[[T], dict[str, object]]) -> _Kept:
        def made_of() -> object:
            return self._named(parts_of(value))

        return _Kept(value, _Made(made_of()) if self.at_once else made_of, self.within[0])

    def _named(self, parts: dict[str, object]) -> object:
        return [(name, self.freeze(part)) for name, part in parts.items()]


def _library(op: object) -> str:
    return type(op).__module__.partition(".")[0]


def _is_read(op: object) -> bool:
    kind = type(op)
    known = _library(op) in LIBRARIES or kind in _CONTAINERS or only_calls_transforms(kind)
    if known or base_of_chosen(op) is not None or stand_for(op) is not None:
        return True
    return makes_rgb(op) or in_torchvision(op) is not op


class _Same:
    """Something that is compared by its identity alone."""

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held


def _own_values(op: object) -> dict[str, object]:
    """What an object holds, which may be anything: of what holds others only the identity."""
    return {name: _plain(value) for name, value in _parameters(op).items()}


def _plain(value: object) -> object:
    return value if _is_plain(value) else _Same(value)


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, (*_VALUES, *_TORCH_VALUES, *_STATEFUL, types.FunctionType))


def _parameters(op: object) -> dict[str, object]:
    """The attributes of an object that are parameters."""
    state: object = object.__getstate__(op)
    parts = filter(None, state if isinstance(state, tuple) else (state,))  # with slots
    attributes = {name: value for part in parts for name, value in part.items()}
    left_out = _STATE | _OF_KORNIA if _library(op) == "kornia" else _STATE
    return {
        name: value
        for name, value in {"": type(op), **attributes}.items()
        if name in _PRIVATE or not (name.startswith("_") or name in left_out)
    }


def _array(array: torch.Tensor | npt.NDArray[np.generic]) -> object:
    if isinstance(array, torch.Tensor):
        if array.numel() > MOST_ELEMENTS or array.layout is not torch.strided:
            return _Kept(array, None, array)
        levels = array.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return [str(array.dtype), tuple(array.shape), levels.numpy().tobytes()]
    return [str(array.dtype), array.shape, array.tobytes()]


def _function(function: types.FunctionType) -> dict[str, object]:
    """What a function is made of: a property may make it anew, as a lambda, each time."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return {"code": _code(function.__code__), "given": [*map(_plain, cells + given)]}


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # nothing yet
        return False


def _code(code: types.CodeType) -> object:
    constants = [_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return [code.co_code, code.co_names, constants]
