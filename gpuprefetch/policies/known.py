"""Whose a transform is: torchvision's, kornia's, timm's, ours, or somebody's own; and what of."""

import inspect
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from gpuprefetch.policies.registry import SHARED, LibraryOp, row_of
from gpuprefetch.policies.timm import from_timm, is_augment
from gpuprefetch.policies.timm import samples_once as timms_samples_once

Constants = tuple[list[float], list[float]]  # mean and std, a number for each channel


class UnsupportedTransformError(ValueError):
    """An op of a pipeline that cannot move to the device; the message says what to do."""


def flatten(pipeline: LibraryOp) -> Iterator[LibraryOp]:
    """The ops of nested ``Compose``, ``Sequential``, lists and torchvision's presets, in order.

    A derived class that defines its own call is an op, whatever its name: it may do more than call
    its parts.
    """
    from torchvision.transforms import _presets

    kind = type(pipeline)
    if _is_compose(kind) or only_calls_transforms(kind):
        yield from flatten(pipeline.transforms)
    elif kind is _presets.ImageClassification:
        from torchvision.transforms import v2

        yield v2.Resize(pipeline.resize_size, pipeline.interpolation)
        yield v2.CenterCrop(pipeline.crop_size)
        yield v2.PILToTensor()
        yield v2.ToDtype(torch.float32, scale=True)
        yield v2.Normalize(pipeline.mean, pipeline.std)
    elif kind in (list, tuple, torch.nn.ModuleList) or _is_called_as(kind, torch.nn.Sequential):
        for op in pipeline:
            yield from flatten(op)
    else:
        yield pipeline


def _is_compose(kind: type) -> bool:
    from torchvision.transforms import transforms as v1
    from torchvision.transforms import v2

    return _is_called_as(kind, v1.Compose) or _is_called_as(kind, v2.Compose)


def _is_called_as(kind: type, base: type) -> bool:
    """Whether a class is ``base``, or derived from it without defining its own call."""
    names = ("__call__", "forward", "__iter__", "_call_impl")
    same = (getattr(kind, name, None) is getattr(base, name, None) for name in names)
    return issubclass(kind, base) and all(same)


def _call(self, img):  # type: ignore[no-untyped-def]
    return self.transforms(img)


def _call_with_target(self, img, target):  # type: ignore[no-untyped-def]
    return self.transforms(img, target)


def only_calls_transforms(kind: type) -> bool:
    """Whether a class is called as those of torchvision's references, by its compiled code."""
    own = getattr(kind.__call__, "__code__", None)
    known = [function.__code__ for function in (_call, _call_with_target)]
    return own is not None and any(
        (own.co_code, own.co_names) == (code.co_code, code.co_names) for code in known
    )


def name_of(op: object) -> str | None:
    """Name of an op that we know; None for a subclass and whatever else there is."""
    from torchvision import transforms as v1
    from torchvision.transforms import v2

    kind = type(op)
    if is_augment(op):
        return f"timm {kind.__name__}"
    known = kind in (getattr(v1, kind.__name__, None), getattr(v2, kind.__name__, None))
    return kind.__name__ if known else None


def parts_of(transform: LibraryOp) -> list[LibraryOp]:
    """The transforms that a module or a container of torchvision's holds."""
    children = transform.children() if isinstance(transform, torch.nn.Module) else ()
    listed = getattr(transform, "transforms", ())
    return [*children, *(listed if isinstance(listed, (list, tuple)) else ())]


def torchvision_class(op: object) -> type | None:
    """The class of torchvision's transforms that ``op`` is of, or derived from; None otherwise."""
    mro = type(op).__mro__
    kinds = (kind for kind in mro if kind.__module__.startswith("torchvision.transforms."))
    return next(kinds, None)


def samples_once(op: object) -> bool:
    """Whether an op may sample once a call: torchvision's and timm's, and derived classes."""
    if timms_samples_once(op):
        return True
    row = row_of(op)
    return torchvision_class(op) is not None and (row is None or bool(row.traits & SHARED))


def samples_alike(op: object) -> bool:
    """Whether kornia's ``same_on_batch`` has an op sample once for all images of a batch."""
    return bool(getattr(op, "same_on_batch", False))


def in_turn(transform: LibraryOp) -> list[LibraryOp]:
    """The ops that a container of kornia's calls one after the other; else the transform itself."""
    kornia = sys.modules.get("kornia.augmentation")
    kinds = [getattr(kornia, name, None) for name in ("ImageSequential", "AugmentationSequential")]
    if type(transform) not in kinds or transform.random_apply or samples_alike(transform):
        return [transform]
    return [op for part in parts_of(transform) for op in in_turn(part)]


def title(transform: object) -> str:
    """The name of a transform, for messages: a function has its own."""
    name: str = getattr(transform, "__name__", type(transform).__name__)
    return name


def is_on_device(op: object) -> bool:
    """Whether an op is kornia's or our own, which a prefetcher's list holds as it is."""
    return type(op).__module__.startswith(("kornia.", "gpuprefetch."))


def twin(op: LibraryOp) -> LibraryOp:
    """The v2 form of an op of v1 or timm, which holds its arguments under their names."""
    from torchvision import transforms as v1
    from torchvision.transforms import v2

    op = from_timm(op)
    name = type(op).__name__
    if type(op) is not getattr(v1, name, None):
        return op
    form = getattr(v2, name)
    names = inspect.signature(form).parameters
    if not all(hasattr(op, name) for name in names):
        return op  # a Lambda: nothing that could move
    arguments = {name: getattr(op, name) for name in names}
    if form is v2.Normalize:  # v1 takes a number for all channels
        arguments |= {name: np.ravel(arguments[name]).tolist() for name in ("mean", "std")}
    return form(**arguments)


def filter_of(op: LibraryOp) -> str:
    from PIL.Image import Resampling
    from torchvision.transforms import InterpolationMode

    mode = getattr(op, "interpolation", "bilinear")
    return Resampling(mode).name.lower() if isinstance(mode, int) else InterpolationMode(mode).value


def constants(op: LibraryOp) -> Constants | None:
    """Mean and std of a Normalize of torchvision or kornia; None for anything else."""
    if type(op).__name__ != "Normalize" or not (name_of(op) or is_on_device(op)):
        return None
    held = getattr(op, "flags", None) or {"mean": op.mean, "std": op.std}
    return checked(held["mean"], held["std"])


def checked(mean: torch.Tensor | Sequence[float], std: torch.Tensor | Sequence[float]) -> Constants:
    """Mean and std as lists; a std of 0 is an error."""
    lists = [
        np.ravel(torch.as_tensor(values, device="cpu").tolist()).tolist() for values in (mean, std)
    ]
    if 0.0 in lists[1]:
        raise ValueError(f"Normalize divides by std, which must not be 0, got {lists[1]}.")
    return lists[0], lists[1]
