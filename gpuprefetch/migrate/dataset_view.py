"""A second face of the user's dataset, for the workers: its files stay encoded.

The view shares all state of the dataset. Only the attributes that decode and transform have other
values: the ``loader`` of an ``ImageFolder`` gives an :class:`EncodedImage`, and its ``transform``
leaves the image as it is, or runs the ops that stay in the workers.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import MemberDescriptorType, SimpleNamespace
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from gpuprefetch.core.nested import map_leaves
from gpuprefetch.images.apart import image_of
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.folder import EncodedImageFolder, fault_of, read_image, read_open
from gpuprefetch.images.guard import Encoded, UndecodedError, begin_reading
from gpuprefetch.policies.per_image import Transform
from gpuprefetch.policies.timm import is_timm

Dataset = Any  # torchvision's folders, timm's ImageDataset, and torch's views of them


def view_of(dataset: Dataset, transform: Transform | None) -> Dataset:
    """``dataset`` with its state and another transform; None leaves its files encoded."""
    if isinstance(dataset, ConcatDataset):
        return _view(dataset, {"datasets": [view_of(part, transform) for part in dataset.datasets]})
    if isinstance(dataset, Subset):
        return _view(dataset, {"dataset": view_of(dataset.dataset, transform)})
    # A dataset may call its transform without asking whether there is one.
    instead: dict[str, object] = {"transform": transform or _left_encoded}
    if transform is None and is_timm(dataset, "ImageDataset"):
        instead |= {"reader": EncodedReader(dataset.reader), "load_bytes": True}
    elif transform is None:
        instead["loader"] = read_encoded
    return _view(dataset, instead)


def stale(what: str) -> TypeError:
    return TypeError(f"{what} has changed since accelerate(). Call it again.")


# --- The view ---


def _view(dataset: Dataset, instead: dict[str, Any]) -> Dataset:
    """An object that shares all state of a dataset, but has ``instead`` for some attributes."""
    from torchvision.datasets import DatasetFolder

    kind = type(dataset)
    seen = {name: vars(dataset).get(name) for name in instead}
    part = instead.get("transform")

    def read(name: str, view: Any) -> Any:
        if vars(view).get(name) is not seen[name]:
            raise stale(f"dataset.{name}")
        return instead[name]

    def reduced(view: Any, protocol: Any) -> Any:
        bare = copy.copy(dataset)
        for name in seen:  # what the view has instead; these may not be picklable
            vars(bare).pop(name, None)
        return _view, (bare, instead)

    def get(view: Any, index: Any) -> Any:
        sample = kind.__getitem__(view, index)
        if isinstance(image_of(sample), torch.Tensor):
            raise UndecodedError(
                f"{kind.__name__}.__getitem__({index}) gave an image that is transformed already, "
                "such as a kept one. Let it keep no images."
            )
        return sample

    faces: dict[str, Any] = {name: property(partial(read, name)) for name in instead}
    if {"loader", "reader"} & instead.keys() or _keep in getattr(part, "transforms", ()):
        faces["__getitem__"] = get
    faces = _slots_of(dataset) | faces
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    own = {**faces, **names, "__reduce_ex__": reduced}
    if part is _left_encoded and kind.__getitem__ is DatasetFolder.__getitem__:
        own["_reads_like"] = EncodedImageFolder.__getitem__  # see images/steady.py
    # Neither the metaclass of the user's class nor its __init_subclass__ hears of this class.
    view: Any = object.__new__(type.__new__(type(kind), kind.__name__, (_Unheard, kind), own))
    object.__setattr__(view, "__dict__", vars(dataset))
    return view


class _Unheard:
    """Stands before a user's class among the bases of another: its hooks do not run."""

    __slots__ = ()

    def __init_subclass__(cls, **options: object) -> None:
        pass


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


def read_encoded(path: str | os.PathLike[str]) -> EncodedImage:
    return read_image(path)


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
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            image = EncodedImage(read_open(file, size), index, path)
        return SimpleNamespace(read=lambda: image), *rest

    def __len__(self) -> int:
        return len(self._reader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # before _reader is set, in copies and pickles
            raise AttributeError(name)
        return getattr(self._reader, name)


# --- What the view has instead: transforms ---


def _left_encoded(image: object) -> object:
    """Stands for a transform that runs on the device; a module would refuse an encoded image.

    Each call of the transform samples anew, so the images of a sample are sampled one by one.
    """
    if not isinstance(image, EncodedImage):
        return image
    image = copy.copy(image)
    image._set_apart()
    return image


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
