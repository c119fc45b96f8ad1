"""Walk a nested batch: every structure a collate function may return, none of them changed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Loader: TypeAlias = Any  # a DataLoader, or what is iterated in its place
Sample: TypeAlias = Any  # what a dataset gives
Batch: TypeAlias = Any  # what a loader gives: any structure of any leaves
Leaf: TypeAlias = Any  # a part of it that is no structure

IsLeaf: TypeAlias = Callable[[Leaf], bool] | None

# Samples may hold thousands of plain values, such as the polygons of COCO's annotations. The type
# tells such a value, and a list of nothing else is told at one go.
_VALUES = {int, float, complex, bool, str, bytes, type(None)}


def children_of(batch: Batch, is_leaf: IsLeaf) -> Sequence[Batch] | None:
    """The parts of a structure; None for a leaf."""
    kind = type(batch)
    if kind in _VALUES or kind is torch.Tensor or (is_leaf is not None and is_leaf(batch)):
        return None
    if kind not in (list, tuple, dict) and moves_itself(batch):
        return None  # also when it is a namedtuple (PackedSequence)
    if isinstance(batch, (list, tuple)):
        return batch
    if isinstance(batch, Mapping):
        return list(batch.values())
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, name) for name in _fields(batch)]
    return None


def _fields(record: DataclassInstance) -> list[str]:
    return [field.name for field in dataclasses.fields(record) if hasattr(record, field.name)]


def map_leaves(fn: Callable[[Leaf], Leaf], batch: Batch, is_leaf: IsLeaf = None) -> Batch:
    """Rebuild ``batch`` with ``fn`` applied to every leaf, but for numbers, str, bytes and None.

    ``batch`` is made of tuples, lists, namedtuples, mappings and dataclasses in any nesting, and
    stays as it was. ``is_leaf`` says which structures count as leaves.

    Example::

        map_leaves(len, {"a": ["x", b"yz"], "b": ((1, 2), [3])}, is_leaf=lambda e: e == [3])
            -> {"a": ["x", b"yz"], "b": ((1, 2), 1)}
    """
    children = children_of(batch, is_leaf)
    if children is None:
        return batch if type(batch) in _VALUES else fn(batch)
    values = children
    if not _VALUES.issuperset(map(type, children)):
        values = [map_leaves(fn, child, is_leaf) for child in children]
    if isinstance(batch, Mapping):
        return _rebuild_mapping(batch, dict(zip(batch, values, strict=True)))
    if isinstance(batch, tuple):
        return batch._make(values) if hasattr(batch, "_make") else type(batch)(values)
    clone = copy.copy(batch)  # keeps a subclass and its attributes
    if isinstance(batch, list):
        clone[:] = values
        return clone
    for name, value in zip(_fields(batch), values, strict=True):
        object.__setattr__(clone, name, value)  # also of frozen and slotted dataclasses
    return clone


def copied(batch: Batch) -> Batch:
    """The same structure with tensors and arrays of its own: either may be changed in place."""

    def copy_leaf(leaf: Leaf) -> Leaf:
        if isinstance(leaf, torch.Tensor):
            return leaf.clone()
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return map_leaves(copy_leaf, batch)


def _rebuild_mapping(batch: Mapping[Any, Batch], items: dict[Any, Batch]) -> Batch:
    if type(batch) is dict:
        return items
    # What is no dict would share its items with a copy that it does not make itself.
    copies = isinstance(batch, dict) or hasattr(type(batch), "__copy__")
    try:
        if not (copies and isinstance(batch, MutableMapping)):
            return type(batch)(items)  # type: ignore[call-arg]
        clone = copy.copy(batch)  # keeps what the constructor does not take: defaultdict's factory
        for key, value in items.items():  # an update() would add to the counts of a Counter
            clone[key] = value
        return clone
    except TypeError:  # torch's own collate function makes a dict of it, too
        return items


def objects(batch: Batch, is_leaf: IsLeaf = None) -> Iterator[Leaf]:
    """Yield the leaves of ``batch`` in order, but for plain values."""
    children = children_of(batch, is_leaf)
    if children is None:
        if type(batch) not in _VALUES:
            yield batch
    elif not _VALUES.issuperset(map(type, children)):
        for child in children:
            # A generator for each of a list of tensors would cost more than all else.
            if type(child) is torch.Tensor:
                yield child
            else:
                yield from objects(child, is_leaf)


def select(batch: Batch, wanted: Callable[[Leaf], bool]) -> list[Leaf]:
    """The leaves of a structure that are ``wanted``, which are not looked into: no plain values."""
    return [leaf for leaf in objects(batch, wanted) if wanted(leaf)]


def moves_itself(leaf: object) -> bool:
    try:
        return callable(getattr(leaf, "to", None)) and not isinstance(leaf, type)
    except Exception:  # as the KeyError of a dict with attributes
        return False


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy every tensor, and every object with a ``to`` method, to ``device`` without blocking."""

    def move(leaf: Leaf) -> Leaf:
        if not moves_itself(leaf):
            return leaf
        try:
            moved = leaf.to(device, non_blocking=True)
        except TypeError:  # a user's own .to(device) need not know non_blocking
            moved = leaf.to(device)
        return leaf if moved is None else moved  # it may move what it holds

    return map_leaves(move, batch)


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether writing into one tensor may change the other."""
    try:
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a sparse tensor has no storage
        return one is other


def tensors(batch: Batch) -> Iterator[torch.Tensor]:
    """Yield every strided tensor of ``batch``, also inside objects that have a ``to`` method.

    Other objects stay on the host. A tensor on a device in one of them comes from a transform.
    """
    for leaf in objects(batch):
        if isinstance(leaf, torch.Tensor):
            yield from _strided(leaf)
            continue
        state: object = object.__getstate__(leaf)
        parts = filter(None, state if isinstance(state, tuple) else (state,))  # with slots
        values = [value for part in parts for value in part.values()]
        if moves_itself(leaf):
            values += _parts(leaf)
            yield from tensors([value for value in values if value is not leaf])
            continue
        for value in values:  # no deeper: it may hold anything
            for held in (value, *_parts(value)):
                if isinstance(held, torch.Tensor) and held.device.type != "cpu":
                    yield from _strided(held)


def one_a_storage(batch: Batch) -> list[torch.Tensor]:
    """Tensors whose memory is that of all :func:`tensors` of a batch.

    A list of images is hundreds of views of one buffer, which gives one tensor here. All tensors of
    a subclass are among them, since a subclass may have memory elsewhere. Beside a plain tensor
    without a storage, as a sparse one, all others are among them, too.
    """
    plain: list[torch.Tensor] = []
    others: list[Leaf] = []
    _gather(batch, plain, others)
    held = [*tensors(others)]
    plain += [part for part in held if type(part) is torch.Tensor]
    with contextlib.suppress(RuntimeError):
        plain = _by_storage(plain)
    return [*tensors(plain), *(part for part in held if type(part) is not torch.Tensor)]


def _gather(batch: Batch, plain: list[torch.Tensor], others: list[Leaf]) -> None:
    """Sort the leaves of a batch by whether they are plain tensors, a list of these at one go."""
    children = children_of(batch, None)
    if children is None:
        if type(batch) not in _VALUES:
            (plain if type(batch) is torch.Tensor else others).append(batch)
    elif {torch.Tensor}.issuperset(map(type, children)):
        plain += children
    elif not _VALUES.issuperset(map(type, children)):
        for child in children:
            _gather(child, plain, others)


def _by_storage(plain: list[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor of each storage. No Python runs between two tensors, which are many."""
    storages = map(torch.Tensor.untyped_storage, plain)
    return [*dict(zip(storages, plain, strict=True)).values()]


def _parts(value: object) -> list[object]:
    """What a dict, a list or a tuple holds, if it is one."""
    if isinstance(value, dict):
        return [*value.values()]
    return [*value] if isinstance(value, (list, tuple)) else []


def _strided(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    # record_stream knows strided storage only; a sparse tensor is made of strided parts.
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.is_nested and tensor.layout is torch.strided:
        yield tensor.values()
    else:
        yield tensor
