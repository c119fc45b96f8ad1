"""A second face of the user's dataset, for the workers: its files stay encoded.

The view shares all state of the dataset. Only what decodes and transforms is another: the
``transform`` leaves pictures encoded, or runs the ops that stay in the workers, and pictures are
:mod:`.read_sample`. A dataset around others has views of these in their places.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MemberDescriptorType, SimpleNamespace
from typing import Any

import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, default_collate
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data._utils.collate import default_collate_fn_map

from gpuprefetch.core.nested import map_leaves
from gpuprefetch.images.folder import EncodedImageFolder, fault_of
from gpuprefetch.images.guard import Encoded, UndecodedError, begin_reading
from gpuprefetch.migrate.faces import stale, with_faces
from gpuprefetch.migrate.picture import Picture, opened, opened_as_rgb, read_file, read_path
from gpuprefetch.migrate.read_sample import read_sample, transformed_already
from gpuprefetch.migrate.result import LeftEncoded
from gpuprefetch.migrate.row_functions import (
    WAYS_OF_ROWS,
    function_of,
    is_of_rows,
    pipelines_in,
    with_transform,
)
from gpuprefetch.migrate.ways import AS_IT_IS, TWO_WAYS
from gpuprefetch.policies.known import flatten, name_of
from gpuprefetch.policies.per_image import Transform
from gpuprefetch.policies.timm import from_timm, is_timm

Dataset = Any  # the user's, of any class

# --- What a dataset is made of ---


def transform_in(dataset: Dataset) -> str:
    """The attribute that holds the transform of a dataset's pictures; empty without one.

    A dataset around one that has a transform has none here: its own comes after the other.
    """
    own = own_transform(dataset)
    return "" if own and any(map(_has_transform, _parts(dataset))) else own


def own_transform(dataset: Dataset) -> str:
    """The attribute that holds a dataset's transform, whatever transforms are within the dataset.

    The attribute is ``transform``, or the only one that holds ops of torchvision's.
    """
    found = own_transforms(dataset)
    return found[0] if len(found) == 1 else ""


def own_transforms(dataset: Dataset) -> list[str]:
    """Where a dataset may hold its transform: in ``transform`` alone, if it has that.

    These are attributes, or the variables of the function that ``set_transform`` was given.
    """
    if is_of_rows(dataset):
        return [*pipelines_in(function_of(dataset))]
    given = getattr(dataset, "transform", None)
    if given is not None and getattr(given, "__self__", None) is not dataset:  # no method
        return ["transform"]
    own: dict[str, object] = getattr(dataset, "__dict__", {})
    names = [name for name in own if not name.startswith("target")]
    found = [name for name in names if _is_pipeline(own[name])]
    if not found:
        found = [name for name in names if _takes_several(own[name], name)]
    return ["transforms"] if "transforms" in found else found


def transform_at(dataset: Dataset, name: str) -> Any:
    """The transform that :func:`own_transforms` has found there; None if a variable has no more."""
    if is_of_rows(dataset):
        return pipelines_in(function_of(dataset)).get(name)
    return getattr(dataset, name)


def _takes_several(value: object, name: str) -> bool:
    """Whether a value may be a transform of a picture and its target, which is anybody's own."""
    from torchvision.datasets.vision import StandardTransform

    is_named = "transform" in name or "augment" in name
    if name.startswith("_") or not (is_named or isinstance(value, FunctionType)):
        return False
    if not callable(value) or isinstance(value, (type, StandardTransform)):
        return False
    try:
        given = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not is_named:  # a function that reads files has options, too
        needed = [p for p in needed if p.default is p.empty]
    return len(needed) > 1 or any(p.kind is p.VAR_POSITIONAL for p in given)


def _has_transform(dataset: Dataset) -> bool:
    return bool(own_transform(dataset)) or any(map(_has_transform, _parts(dataset)))


def _is_pipeline(value: object) -> bool:
    return callable(value) and any(name_of(from_timm(op)) for op in flatten(value))


def within(dataset: Dataset) -> dict[str, list[Dataset]]:
    """The datasets that a dataset holds, by its attributes.

    These are datasets and lists of them; those of a ``StackDataset`` may be in a dictionary, and
    beside other things.
    """
    own: dict[str, object] = getattr(dataset, "__dict__", {})
    found = {}
    for name, value in own.items():
        held: Any = [value] if _is_dataset(value) else value
        if isinstance(held, (list, tuple)) and held and all(map(_is_dataset, held)):
            found[name] = list(held)
        elif name == "datasets" and isinstance(dataset, StackDataset):
            columns = held.values() if type(held) is dict else held
            found[name] = [column for column in columns if _is_dataset(column)]
    return found


def _with_views(held: Any, views: Iterator[Dataset]) -> object:
    """What a dataset holds, with the next view in the place of each dataset."""
    if _is_dataset(held):
        return next(views)
    if type(held) is dict:
        return {key: next(views) if _is_dataset(each) else each for key, each in held.items()}
    return type(held)([next(views) if _is_dataset(each) else each for each in held])


def _is_dataset(value: object) -> bool:
    return isinstance(value, TorchDataset) or is_of_rows(value)


def _parts(dataset: Dataset) -> list[Dataset]:
    return [each for held in within(dataset).values() for each in held]


def datasets_in(dataset: Dataset, around: Sequence[Dataset] = ()) -> Iterator[Dataset]:
    """A dataset, and all datasets that it is made of; ``around`` are those that hold it."""
    if any(dataset is each for each in around):
        raise TypeError(
            f"accelerate cannot take {type(dataset).__name__} apart: it holds itself, as an "
            "attribute or in a dataset that it holds. Leave that attribute out, or keep a "
            f"weakref.ref of it. {AS_IT_IS}"
        )
    yield dataset
    for each in _parts(dataset):
        yield from datasets_in(each, (*around, dataset))


def view_of(dataset: Dataset, transform: Transform) -> Dataset:
    """``dataset`` with its state and another transform; a LeftEncoded leaves files encoded."""
    own = transform_in(dataset)
    encoded = isinstance(transform, LeftEncoded)
    checked = encoded or _marks(transform)
    if not own:
        views = _views_within(dataset, transform)
        return _view(dataset, views, encoded=encoded, checked=checked)
    if is_of_rows(dataset):
        return _view(with_transform(dataset, transform), {}, encoded=encoded, checked=checked)
    instead: dict[str, object] = {own: transform} | _joint(dataset, transform)
    if encoded:
        instead |= _readers(dataset)
    return _view(dataset, instead, encoded=encoded, checked=checked)


def _marks(transform: Transform) -> bool:
    """Whether a transform ends in the mark of :func:`worker_part`."""
    ops = getattr(transform, "transforms", None)
    return isinstance(ops, list) and _keep in ops


def _views_within(dataset: Dataset, transform: Transform) -> dict[str, object]:
    instead: dict[str, object] = {}
    for name, held in within(dataset).items():
        views = iter([view_of(each, transform) for each in held])
        instead[name] = _with_views(getattr(dataset, name), views)
    return instead


def _joint(dataset: Dataset, transform: Transform) -> dict[str, object]:
    """What torchvision's datasets make of ``transform`` and ``target_transform``."""
    from torchvision.datasets.vision import StandardTransform

    joint: object = getattr(dataset, "transforms", None)
    if not isinstance(joint, StandardTransform):
        return {}
    return {"transforms": StandardTransform(transform, joint.target_transform)}


def _readers(dataset: Dataset) -> dict[str, object]:
    """Readers that leave files encoded, where a dataset has torchvision's or timm's."""
    if is_timm(dataset, "ImageDataset"):
        return {"reader": EncodedReader(dataset.reader), "load_bytes": True}
    from PIL import Image
    from torchvision.datasets.folder import accimage_loader, default_loader, pil_loader

    loader = getattr(dataset, "loader", None)
    if loader in (default_loader, pil_loader, accimage_loader):
        return {"loader": read_encoded}
    # Other functions call what is PIL's when a sample is read.
    return {"loader": open_encoded} if loader is Image.open else {}


# --- The view ---


# torch's own views of datasets add nothing to a sample.
_ADD_NOTHING = (Subset.__getitem__, ConcatDataset.__getitem__)


def _view(dataset: Dataset, instead: dict[str, Any], *, encoded: bool, checked: bool) -> Dataset:
    """An object that shares all state of a dataset, but has ``instead`` for some attributes.

    ``encoded`` says that its files stay encoded, and ``checked`` that each sample must show that
    nothing was done to what its transform gave.
    """
    kind = type(dataset)
    ways = WAYS_OF_ROWS if is_of_rows(dataset) else TWO_WAYS
    seen = {name: vars(dataset).get(name) for name in instead}

    def read(name: str, view: Any) -> Any:
        if vars(view).get(name) is not seen[name]:
            raise stale(f"dataset.{name}")
        return instead[name]

    def reduced(view: Any, protocol: Any) -> Any:
        bare = copy.copy(dataset)
        for name in seen:  # what the view has instead; these may not be picklable
            vars(bare).pop(name, None)
        return partial(_view, encoded=encoded, checked=checked), (bare, instead)

    def get(method: Any, view: Any, index: Any) -> Any:
        who = f"{kind.__name__}.{method.__name__}({index!r})"
        if encoded:
            return read_sample(partial(method, view, index), who, index, ways)
        sample = method(view, index)
        if fault := transformed_already(sample):
            raise UndecodedError(f"{who} {fault}")
        return sample

    faces: dict[str, Any] = {name: property(partial(read, name)) for name in instead}
    if checked and getattr(kind, "__getitem__", None) not in _ADD_NOTHING:
        for name in ("__getitem__", "__getitems__"):
            if (method := getattr(kind, name, None)) is not None:
                faces[name] = _method(partial(get, method))
    faces = _slots_of(dataset) | faces
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    own = {**faces, **names, "__reduce_ex__": reduced}
    if encoded and _reads_as_folder(kind, instead):
        own["_reads_like"] = EncodedImageFolder.__getitem__  # see images/steady.py
    return with_faces(dataset, own)


def _reads_as_folder(kind: type[Dataset], instead: dict[str, Any]) -> bool:
    """Whether a view gives what an :class:`EncodedImageFolder` of its samples would give.

    A loader of the user's own may read anything.
    """
    from torchvision.datasets import DatasetFolder

    reads_files = instead.get("loader") in (read_encoded, open_encoded)
    return reads_files and kind.__getitem__ is DatasetFolder.__getitem__


def _method(call: Any) -> Any:
    """A method of a class that ``call`` carries out: a partial is none."""

    def method(view: Any, index: Any) -> Any:
        return call(view, index)

    return method


def _slots_of(dataset: Dataset) -> dict[str, property]:
    """What a dataset holds in slots, for a view that shares only its ``__dict__``."""
    return {
        name: _forwarded(slot, dataset)
        for base in type(dataset).__mro__
        for name, slot in vars(base).items()
        if isinstance(slot, MemberDescriptorType)
    }


def _forwarded(slot: MemberDescriptorType, dataset: Dataset) -> property:
    def read(view: Dataset) -> Any:
        return slot.__get__(dataset)

    def write(view: Dataset, value: object) -> None:
        slot.__set__(dataset, value)

    return property(read, write)


# --- What the view has instead: readers that leave files encoded ---


def read_encoded(path: str | os.PathLike[str]) -> object:
    return opened_as_rgb(read_path(path), path)


def open_encoded(path: str | os.PathLike[str]) -> Picture:
    return opened(read_path(path), path)


def refuse_odd_file(path: str | os.PathLike[str]) -> None:
    """Refuse a FIFO or a device: torchvision's and timm's readers would wait for it for ever."""
    with contextlib.suppress(OSError):  # the reader will say what is wrong; or it has an archive
        if fault := fault_of(os.stat(path)):  # noqa: PTH116
            raise ValueError(f"cannot read {str(path)!r}: {fault}.")


class EncodedReader:
    """A reader of timm's that gives an :class:`EncodedImage` to the ``ImageDataset`` over it."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        path = self.filename(index, absolute=True)
        refuse_odd_file(path)
        file, *rest = self._reader[index]
        with file:
            image = opened_as_rgb(read_file(file, path, index), file)
        return SimpleNamespace(read=lambda: image), *rest

    def __len__(self) -> int:
        return len(self._reader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # before _reader is set, in copies and pickles
            raise AttributeError(name)
        return getattr(self._reader, name)


# --- What the view has instead: transforms ---


def worker_part(ops: Sequence[Transform], *, tensors: bool, marked: bool) -> Transform:
    """The ops that stay in the workers, as one transform.

    Args:
        ops: of the pipeline, for pictures.
        tensors: whether to make tensors of pictures at the end. Others may be for the user's
            collate function.
        marked: whether other transforms are to follow on the device: nothing else may change the
            pixels before these.
    """
    from torchvision.transforms import v2

    steps = list(ops)
    if tensors:
        steps.append(v2.PILToTensor())  # a tensor passes through it
    if marked:
        steps.append(_keep)
    transform: Transform = v2.Compose(steps)
    return transform


@dataclass(slots=True)
class _Kept(Encoded):
    """The pixels of a picture halfway through its transforms: nothing else may change them."""

    pixels: torch.Tensor

    def __post_init__(self) -> None:
        begin_reading()


def _keep(made: object) -> object:
    return map_leaves(lambda leaf: _Kept(leaf) if isinstance(leaf, torch.Tensor) else leaf, made)


def _collate_kept(images: Sequence[_Kept], *, collate_fn_map: object = None) -> object:
    return default_collate([image.pixels for image in images])


default_collate_fn_map[_Kept] = _collate_kept
