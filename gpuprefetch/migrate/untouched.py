"""A trial of a dataset leaves no trace in what the dataset holds.

``accelerate`` reads the first sample to see what becomes of its pictures. The code of a dataset may
count its calls, keep what it has read, or sample from a generator of its own. Its next sample must
be what it would have been without the trial.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import operator
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.migrate.file_tensor import FileTensor

Restore = Callable[[], object]
Entries = dict[object, object] | list[object] | set[object] | deque[object]

_DEEPEST = 4  # of objects within objects
_MOST_ENTRIES = 64  # of a list that is looked into; a longer one is restored itself
_MOST_OBJECTS = 10_000
_MOST_BYTES = 1 << 26  # of arrays and tensors; larger ones are data, which nobody writes to
# Classes of these may hold what is not theirs, such as a library's memory.
_NOT_LOOKED_INTO = frozenset(("builtins", "datasets", "numpy", "PIL", "torch"))


@contextlib.contextmanager
def untouched(things: Iterable[object]) -> Iterator[None]:
    """Give datasets, and what they are made of, the state back that they have now.

    Restored are attributes, dicts, lists, sets, arrays and generators, also within objects of the
    classes that come from the packages of ``things``, or from torchvision. Other objects, such as
    files, stay as the trial has left them; a file that it has opened is dropped, since forked
    workers would share its position.
    """
    things = [*things]
    packages = {_package_of(thing) for thing in things} - _NOT_LOOKED_INTO
    state = _State(packages | {"torchvision"})
    for thing in things:
        state.hold_attributes(thing, 0)
    try:
        yield
    finally:
        for restore in state.restores:
            restore()
        _close(state.dropped)


def _package_of(thing: object) -> str:
    return type(thing).__module__.partition(".")[0]


class _State:
    """What objects hold, and how to give it back to them.

    Args:
        packages: those whose objects are looked into.
    """

    def __init__(self, packages: set[str]) -> None:
        self.restores: list[Restore] = []
        self.dropped: list[object] = []  # what the trial has put somewhere
        self._packages = packages
        self._known: dict[int, object] = {}  # held here, so that no other object gets an identity
        self._bytes = 0

    def hold_attributes(self, thing: object, depth: int) -> None:
        """Hold what an object has in its attributes, whatever its class."""
        own: object = getattr(thing, "__dict__", None)
        if type(own) is dict and self._is_new(thing):
            self._hold_entries(own, depth, most=len(own))

    def _hold(self, value: object, depth: int) -> None:
        if isinstance(value, (str, bytes, int, float, type(None))):
            return
        if restore := _generator(value):
            self.restores.append(restore)
        elif isinstance(value, (np.ndarray, torch.Tensor)):
            self._hold_numbers(value)
        elif isinstance(value, (dict, list, set, deque)):
            self._hold_entries(value, depth, most=_MOST_ENTRIES)
        elif isinstance(value, tuple) and len(value) <= _MOST_ENTRIES:
            self._hold_all(value, depth)
        elif isinstance(value, FunctionType) or _package_of(value) in self._packages:
            if not isinstance(value, type) and depth < _DEEPEST:
                self.hold_attributes(value, depth + 1)

    def _hold_entries(self, items: Entries, depth: int, *, most: int) -> None:
        if not self._is_new(items):
            return
        before = copy.copy(items)
        self.restores.append(partial(_give_back, items, before, self.dropped))
        if len(before) <= most:
            self._hold_all(before.values() if isinstance(before, dict) else before, depth)

    def _hold_all(self, values: Iterable[object], depth: int) -> None:
        if depth < _DEEPEST:
            for value in values:
                self._hold(value, depth + 1)

    def _hold_numbers(self, numbers: npt.NDArray[np.generic] | torch.Tensor) -> None:
        if isinstance(numbers, FileTensor):
            if numbers.read.waits:
                self.restores.append(numbers.read.wait_again)
                return
            numbers = numbers.read.pixels()
        array = _array_of(numbers)
        if array is None or self._bytes + array.nbytes > _MOST_BYTES or not self._is_new(numbers):
            return
        self._bytes += array.nbytes
        self.restores.append(partial(_write_back, array, array.copy()))

    def _is_new(self, thing: object) -> bool:
        if id(thing) in self._known or len(self._known) == _MOST_OBJECTS:
            return False
        self._known[id(thing)] = thing
        return True


def _array_of(numbers: npt.NDArray[np.generic] | torch.Tensor) -> npt.NDArray[np.generic] | None:
    """The memory of an array or tensor that code may write to; None where there is none."""
    if isinstance(numbers, torch.Tensor):
        plain = numbers.device.type == "cpu" and numbers.layout is torch.strided
        if not plain or numbers.requires_grad or numbers.dtype == torch.bfloat16:
            return None
        try:
            numbers = numbers.detach().as_subclass(torch.Tensor).numpy()
        except (RuntimeError, TypeError):  # NumPy has no such numbers
            return None
    writable = numbers.flags.writeable and not isinstance(numbers, np.memmap)
    return numbers if writable and not numbers.dtype.hasobject else None


def _write_back(array: npt.NDArray[np.generic], before: npt.NDArray[np.generic]) -> None:
    if array.tobytes() != before.tobytes():
        array[...] = before


def _generator(value: object) -> Restore | None:
    """How to give a generator its state back; None for anything else."""
    if isinstance(value, random.Random):
        try:
            state = value.getstate()
        except NotImplementedError:  # SystemRandom has none
            return None
        return partial(value.setstate, state)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        numbers = copy.deepcopy(bits.state)
        return partial(setattr, bits, "state", numbers)
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    return None


def _give_back(items: Entries, before: Entries, dropped: list[object]) -> None:
    """Put back what has changed, and touch nothing else: another thread may read it."""
    if isinstance(items, dict) and isinstance(before, dict):
        for key, value in [*items.items()]:
            if key not in before:
                dropped.append(items.pop(key))
            elif before[key] is not value:
                dropped.append(value)
                items[key] = before[key]
        for key in before.keys() - items.keys():
            items[key] = before[key]
    elif isinstance(items, set) and isinstance(before, set):
        if items != before:
            items.clear()
            items.update(before)
    elif isinstance(items, (list, deque)) and isinstance(before, (list, deque)):
        if len(items) != len(before) or not all(map(operator.is_, items, before)):
            dropped.extend(items)
            items.clear()
            items.extend(before)


def _close(dropped: list[object]) -> None:
    """Close the files among what was dropped, unless something else has them."""
    has_files = any(hasattr(type(each), "close") for each in dropped)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # being collected closes them
        dropped.clear()
        if has_files:
            gc.collect()
