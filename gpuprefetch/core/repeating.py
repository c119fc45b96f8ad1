"""Loaders that go on with one iterator so that their workers live on, as timm's and ultralytics'.

Such a loader repeats its sampler without end, and an epoch is as many batches as the sampler has.
Its workers read beyond the end of an epoch. A DataLoader with persistent workers gives each epoch
the same samples, and keeps its workers as well.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from itertools import islice
from typing import Any
from weakref import WeakSet

from torch.utils.data import DataLoader

from gpuprefetch.core.loaders import TorchLoader
from gpuprefetch.core.nested import Batch, Loader
from gpuprefetch.core.samplers import Key, sampler_name

# What the loader's __iter__ does, each line as ast.unparse() writes it.
_ONE_EPOCH = re.compile(
    r"(if self\.(?P<name>\w+) is None:\n"
    r"    self\.(?P=name) = (super\(\)\.__iter__|self\._get_iterator)\(\)\n)?"
    r"for \w+ in range\(len\(self\)\):\n    yield next\(self\.\w+\)"
)
_WHOLE_PASSES = {"self.sampler", "iter(self.sampler)"}
_GET_ITERATOR = DataLoader._get_iterator


class OnePass:
    """The first pass of a sampler that repeats another one: the batches of an epoch.

    Args:
        repeated: gives pass after pass over its ``sampler``, and may do more before each of them.
    """

    def __init__(self, repeated: Any) -> None:
        self._repeated = repeated

    def __iter__(self) -> Iterator[Key]:
        return islice(iter(self._repeated), len(self))

    def __len__(self) -> int:
        return len(self._repeated.sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy in the making has no _repeated
            raise AttributeError(name)
        return getattr(self._repeated, name)


class KeptWorkers(DataLoader[Batch]):
    """Stands for a loader that repeats itself. Its epochs have an end, and its workers live on."""

    def __init__(self, loader: TorchLoader) -> None:
        given = {key: value for key, value in vars(loader).items() if not _is_running(key, value)}
        name = sampler_name(loader)
        own = {name: OnePass(getattr(loader, name)), "_iterator": None}
        # As it was built, with names that DataLoader locks.
        vars(self).update(given | own | {"persistent_workers": loader.num_workers > 0})
        self.restarts = 0
        self._copies: WeakSet[KeptWorkers] = WeakSet()

    def __copy__(self) -> KeptWorkers:
        clone = object.__new__(KeptWorkers)
        vars(clone).update(vars(self))
        self._copies.add(clone)  # whose workers :meth:`close` ends
        return clone

    def reset(self) -> None:
        """Let the next epoch start other workers, which see what has changed in the dataset."""
        self.restarts += 1

    def close(self) -> None:
        """End the workers. A later epoch starts others."""
        self.reset()
        for clone in self._copies:
            if clone._iterator is not None:
                clone._iterator._shutdown_workers()  # type: ignore[attr-defined]
                clone._iterator = None


def with_epochs(loader: Loader) -> Loader:
    """A loader in place of one that repeats itself; any other loader as it is."""
    if not isinstance(loader, DataLoader) or not _gives_whole_epochs(type(loader)):
        return loader
    repeated = getattr(loader, sampler_name(loader))
    if not _gives_whole_passes(type(repeated)) or len(loader) != len(repeated.sampler):
        return loader
    return KeptWorkers(loader)


def _is_running(name: str, value: object) -> bool:
    """Whether an attribute of a loader is its iterator, and no part that a user gave it."""
    return isinstance(value, Iterator) and name not in {"dataset", "sampler", "batch_sampler"}


def restarts(loader: Loader) -> int:
    """How often its workers were asked to start anew."""
    return loader.restarts if isinstance(loader, KeptWorkers) else 0


def _gives_whole_epochs(kind: type) -> bool:
    """Whether a DataLoader's class does no more than take as many batches as its length says."""
    own = [base for base in kind.__mro__ if "__iter__" in vars(base)]
    if own[1:2] != [DataLoader] or kind._get_iterator is not _GET_ITERATOR:  # type: ignore[attr-defined]
        return False
    function = _function(own[0])
    return function is not None and bool(_ONE_EPOCH.fullmatch(_body(function)))


def _gives_whole_passes(kind: type) -> bool:
    """Whether a sampler yields nothing but whole passes over the one that it holds."""
    function = _function(kind)
    if function is None:
        return False
    yields = [node for node in ast.walk(function) if isinstance(node, (ast.Yield, ast.YieldFrom))]
    return bool(yields) and all(
        isinstance(node, ast.YieldFrom) and ast.unparse(node.value) in _WHOLE_PASSES
        for node in yields
    )


def _function(kind: type) -> ast.FunctionDef | None:
    """The ``__iter__`` that a class defines, as it is written; None if that is not known."""
    try:
        written = textwrap.dedent(inspect.getsource(vars(kind)["__iter__"]))
        (function,) = ast.parse(written).body
    except (KeyError, OSError, TypeError, ValueError, SyntaxError):
        return None
    return function if isinstance(function, ast.FunctionDef) else None


def _body(function: ast.FunctionDef) -> str:
    """The statements of a function, without its docstring."""
    statements = function.body
    if ast.get_docstring(function) is not None:
        statements = statements[1:]
    return "\n".join(map(ast.unparse, statements))
