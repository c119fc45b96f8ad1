"""Walk a nested batch: every structure a collate function may return, none of them changed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch


def _is_structure(batch: Any) -> bool:
    if isinstance(batch, (str, bytes)) or hasattr(batch, "to"):
        return (
            False  # an object with .to moves itself, also when it is a namedtuple (PackedSequence)
        )
    return isinstance(batch, (Mapping, list, tuple)) or (
        dataclasses.is_dataclass(batch) and not isinstance(batch, type)
    )


def map_leaves(
    fn: Callable[[Any], Any], batch: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Rebuild ``batch`` with ``fn`` applied to every leaf.

    Args:
        fn: called with each leaf: tensors, and everything that is not a structure.
        batch: tuples, lists, namedtuples, mappings and dataclasses in any nesting.
        is_leaf: says of a structure that it is a leaf all the same.

    Returns:
        A new structure of the same types; ``batch`` and its containers are left untouched.
    """
    if not _is_structure(batch) or (is_leaf is not None and is_leaf(batch)):
        return fn(batch)
    if isinstance(batch, Mapping):
        items = {key: map_leaves(fn, value, is_leaf) for key, value in batch.items()}
        return _rebuild_mapping(batch, items)
    if isinstance(batch, tuple):
        values = [map_leaves(fn, value, is_leaf) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if isinstance(batch, list):
        clone = copy.copy(batch)  # keeps a subclass and its attributes
        clone[:] = [map_leaves(fn, value, is_leaf) for value in batch]
        return clone
    clone = copy.copy(batch)
    for field in dataclasses.fields(batch):
        # object.__setattr__ also reaches frozen and slotted dataclasses.
        value = map_leaves(fn, getattr(batch, field.name), is_leaf)
        object.__setattr__(clone, field.name, value)
    return clone


def _rebuild_mapping(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(batch) is dict:
        return items
    try:
        if isinstance(
            batch, MutableMapping
        ):  # keeps what the constructor does not take, as defaultdict's factory
            clone = copy.copy(batch)
            clone.update(items)
            return clone
        return type(batch)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def leaves(batch: Any, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """Yield the leaves of ``batch`` in the order in which :func:`map_leaves` visits them."""
    if not _is_structure(batch) or (is_leaf is not None and is_leaf(batch)):
        yield batch
        return
    if isinstance(batch, Mapping):
        children: Sequence[Any] = list(batch.values())
    elif isinstance(batch, (list, tuple)):
        children = batch
    else:
        children = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    for child in children:
        yield from leaves(child, is_leaf)


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy every tensor, and every object with a ``to`` method, to ``device`` without blocking.

    Other leaves (str, int, None, numpy arrays) pass through as they are.
    """
    return map_leaves(lambda leaf: _leaf_to(leaf, device), batch)


def _leaf_to(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.to(device, non_blocking=True)
    if isinstance(leaf, type) or not callable(getattr(leaf, "to", None)):
        return leaf
    try:
        return leaf.to(device, non_blocking=True)
    except TypeError:  # a user's own .to(device) need not know non_blocking
        return leaf.to(device)


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Yield every strided tensor of ``batch``, also inside objects that have a ``to`` method."""
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            yield from _components(leaf)
        elif callable(getattr(leaf, "to", None)) and not isinstance(leaf, type):
            yield from tensors(_attributes(leaf))


def _attributes(leaf: Any) -> list[Any]:
    slots = [getattr(cls, "__slots__", ()) for cls in type(leaf).__mro__]
    names = [name for s in slots for name in ((s,) if isinstance(s, str) else s)]
    values = [getattr(leaf, name) for name in names if hasattr(leaf, name)]
    values += list(vars(leaf).values()) if hasattr(leaf, "__dict__") else []
    values += list(leaf) if isinstance(leaf, tuple) else []
    return [value for value in values if value is not leaf]


def _components(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    # record_stream knows strided storage only; a sparse tensor is made of strided parts.
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor
