"""Which transforms the fused launch takes, and as what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np
import torch

from gpuprefetch.lists.chosen import Chooser
from gpuprefetch.policies.known import constants, filter_of, name_of, title
from gpuprefetch.policies.registry import Is, LibraryOp, has
from gpuprefetch.transforms.head import (
    RESIZE_FILTERS,
    CenterCrop,
    FusedTransform,
    Head,
    RandomResizedCrop,
    Resize,
    pair,
)
from gpuprefetch.transforms.random import draws_of_sample
from gpuprefetch.transforms.sampling import (
    AmongBoxesOp,
    CenterCropOp,
    ChosenAmongBoxes,
    ChosenPartOp,
    ChosenPlaceOp,
    Fill,
    FlipOp,
    GivenOp,
    HeadOp,
    JitteredScale,
    RandomCropOp,
    RandomSizeOp,
    ResizedCropOp,
    ResizeOp,
    ShorterSide,
    ShortestSize,
    SizeRule,
    ZoomOutOp,
)

# What differs in the fused launch, given the same parameters.
_UNROUNDED = "not rounded to uint8 on a GPU"
_CLIPPED = "clipped to [0, 1], torchvision's floats are not"
_AMONG_BOXES = "the workers choose the part, among the boxes"
NEAREST_TIES = "where two pixels are equally near it may be the other"


class RandomCrop(FusedTransform):
    """torchvision's RandomCrop with padding of one color."""

    def __init__(self, op: LibraryOp, fill: Fill | None = None) -> None:
        left, right, top, bottom = op.padding or (0, 0, 0, 0)
        super().__init__(
            RandomCropOp(
                pair(op.size, "RandomCrop"),
                before=(top, left),
                after=(bottom, right),
                pad_if_needed=bool(op.pad_if_needed),
                fill=fill,
            )
        )


class RandomZoomOut(FusedTransform):
    """torchvision's RandomZoomOut."""

    def __init__(self, op: LibraryOp, fill: Fill | None) -> None:
        low, high = map(float, op.side_range)
        super().__init__(ZoomOutOp((low, high), float(op.p), fill))


def _fill_of(op: LibraryOp, *, is_float: bool) -> Fill | None:
    """The padding of an op, None for black; images are in [0, 1] where they are floating point.

    Raises:
        KeyError: if it does not say what it is for images.
    """
    from torchvision import tv_tensors

    given = op.fill
    masks = given
    if isinstance(given, dict):
        kinds = (tv_tensors.Image, torch.Tensor, "others")
        masks = next((given[kind] for kind in (tv_tensors.Mask, "others") if kind in given), 0)
        given = given[next((kind for kind in kinds if kind in given), "others")]
    values = [*given] if isinstance(given, Sequence) else [given or 0]
    levels = tuple(float(value) * (255 if is_float else 1) for value in values)
    levels = levels * 3 if len(levels) == 1 else levels
    mask = None if isinstance(masks, Sequence) and len(masks) > 1 else float(np.max(masks or 0))
    return None if not (any(levels) or mask) else Fill(levels, mask)


class AmongBoxes:
    """Lets torchvision's RandomIoUCrop choose a part of a picture among the boxes in it."""

    def __init__(self, op: LibraryOp) -> None:
        self._op = op

    def __call__(self, seed: int, boxes: object) -> ChosenAmongBoxes | None:
        """The part for boxes whose canvas is the picture; None for all of it."""
        with draws_of_sample(seed):
            chosen = self._op.make_params([boxes])
        if not chosen:
            return None
        top, left, height, width = (chosen[name] for name in ("top", "left", "height", "width"))
        return ChosenAmongBoxes((top, left, height, width), chosen["is_within_crop_area"].numpy())


class RandomIoUCrop(FusedTransform):
    """torchvision's RandomIoUCrop."""

    def __init__(self, op: LibraryOp) -> None:
        super().__init__(AmongBoxesOp(AmongBoxes(op)))


class RandomSize(FusedTransform):
    """torchvision's RandomResize, RandomShortestSize and ScaleJitter."""

    def __init__(self, op: LibraryOp, interpolation: str) -> None:
        super().__init__(RandomSizeOp(_SIZE_RULES[type(op).__name__](op), interpolation))
        self.__name__ = type(op).__name__


class Given(FusedTransform):
    """A dataset's own transform of pictures and what is beside them: see images/joint.py."""

    def __init__(self, op: GivenOp) -> None:
        super().__init__(op)
        self.carries_on = op.dtype is None  # whether calls of it follow the launch
        self.__name__ = "the dataset's transforms"


# What stands for torchvision's resizes that sample a size.
_SIZE_RULES: dict[str, Callable[[LibraryOp], SizeRule]] = {
    "RandomResize": lambda op: ShorterSide(op.min_size, op.max_size),
    "RandomShortestSize": lambda op: ShortestSize(tuple(op.min_size), op.max_size),
    "ScaleJitter": lambda op: JitteredScale(tuple(op.target_size), tuple(op.scale_range)),
}


class ChosenCrop(FusedTransform):
    """A crop whose part the user's own ``get_params`` chooses: see :mod:`.chosen`.

    Args:
        op: the user's.
        like: what torchvision's crop with the same arguments is here.
    """

    def __init__(self, op: LibraryOp, like: HeadOp) -> None:
        values = {field.name: getattr(like, field.name) for field in fields(like)}  # type: ignore[arg-type]
        if isinstance(like, ResizedCropOp):
            super().__init__(ChosenPartOp(**values, choose=Chooser(op, ("scale", "ratio"))))
        else:
            super().__init__(ChosenPlaceOp(**values, choose=Chooser(op, ("size",))))


def extended(head: Head, transform: LibraryOp) -> Head | None:
    """The fused transforms and one more of a list; None where the launch does not take it.

    torchvision's own stand for themselves only after a crop or a resize, which scales to [0, 1].
    """
    name = title(transform)
    theirs = name_of(transform) is not None and bool(head.names)
    kornias = type(transform).__module__.startswith("kornia.augmentation.")
    if name == "Normalize" and (theirs or kornias):
        found = constants(transform)
        assert found is not None, "both libraries' Normalize have them"
        always = float(getattr(transform, "p", 1.0)) == 1.0
        return head.normalized(*found) if always else None
    if theirs and has(transform, Is.FLIPS):
        return head.then(_flip(transform), name)
    op = transform.op if _is_ours(transform) else _kornia_op(transform)
    return None if op is None else head.then(op, name)


def in_launch(
    op: LibraryOp, *, is_tensor: bool, is_float: bool
) -> tuple[FusedTransform | HeadOp | None, str]:
    """What stands for torchvision's crop, resize or flip in a pipeline; and what differs."""
    how = filter_of(op)
    if has(op, Is.FLIPS):
        return _flip(op), ""
    name = type(op).__name__
    if name == "CenterCrop":
        return CenterCrop(op.size), ""
    if name in ("RandomCrop", "RandomZoomOut"):
        if getattr(op, "padding_mode", "constant") != "constant":
            return None, ""
        try:
            fill = _fill_of(op, is_float=is_float)
        except KeyError:  # torchvision has no color for images, either
            return None, ""
        return RandomCrop(op, fill) if name == "RandomCrop" else RandomZoomOut(op, fill), ""
    if name == "RandomIoUCrop":
        return RandomIoUCrop(op), _AMONG_BOXES
    sampled = name in _SIZE_RULES and name_of(op) is not None
    if not (sampled or has(op, Is.CROPS)) or how not in RESIZE_FILTERS:
        return None, ""
    note = "" if is_float else _UNROUNDED
    if "nearest" in how:
        note = NEAREST_TIES
        how = how if is_tensor else "nearest-exact"  # PIL's takes the pixel at the center
    elif is_tensor and not op.antialias:
        return None, ""
    elif how == "bicubic" and is_float:
        note = _CLIPPED
    if sampled:
        return RandomSize(op, how), note
    if name == "RandomResizedCrop":
        return RandomResizedCrop(op.size, op.scale, op.ratio, how), note
    size = op.size[0] if op.size and len(op.size) == 1 else op.size
    return Resize(size, how, op.max_size), note


def in_kornia(op: LibraryOp) -> torch.nn.Module:
    """Kornia's module for torchvision's flip or Normalize, which a list fuses in any place."""
    import kornia.augmentation as K

    module: torch.nn.Module
    if has(op, Is.NORMALIZES):
        module = K.Normalize(mean=as_float32(op.mean), std=as_float32(op.std))
    else:
        module = getattr(K, type(op).__name__)(p=op.p)
    return module


def as_float32(values: Sequence[float]) -> torch.Tensor:
    """A tensor whose dtype is not the default one, which may be too narrow."""
    return torch.tensor(values, dtype=torch.float32)


def is_kornia(transform: object) -> bool:
    """Whether a transform is of kornia's, or of a class derived from one."""
    return any(kind.__module__.startswith("kornia.") for kind in type(transform).__mro__)


def _flip(op: LibraryOp) -> FlipOp:
    axis = int(type(op).__name__ == "RandomHorizontalFlip")
    return FlipOp(axis, float(op.p), p_batch=1.0, same_on_batch=False)


def _is_ours(transform: object) -> bool:
    """Whether a transform is this library's own; a subclass that does something else is not."""
    kind = type(transform)
    return (
        isinstance(transform, FusedTransform)
        and getattr(kind, "forward", None) is FusedTransform.forward
    )


def _kornia_op(transform: LibraryOp) -> HeadOp | None:
    """The fused form of a kornia module; None where it has none, and for anything else."""
    if not type(transform).__module__.startswith("kornia."):
        return None
    import kornia.augmentation as K

    kind = type(transform)
    flags = getattr(transform, "flags", {})
    size = flags.get("size", 0)  # all of them have one
    if kind in (K.RandomHorizontalFlip, K.RandomVerticalFlip):
        axis = int(kind is K.RandomHorizontalFlip)
        return FlipOp(axis, float(transform.p), float(transform.p_batch), transform.same_on_batch)
    if getattr(transform, "p_batch", 1.0) != 1.0:
        return None  # a crop that is sometimes skipped has no fixed size
    if kind is K.CenterCrop:
        return CenterCropOp(pair(size, "CenterCrop"), pad=False)
    if kind is K.RandomCrop and flags["padding"] is None and not flags["pad_if_needed"]:
        return RandomCropOp(pair(size, "RandomCrop"), transform.same_on_batch)
    if getattr(flags.get("resample"), "name", "") != "BILINEAR":
        return None
    align = bool(flags.get("align_corners"))
    if kind is K.RandomResizedCrop and (align or flags["cropping_mode"] == "slice"):
        sampled = transform._param_generator
        return ResizedCropOp(
            pair(size, "RandomResizedCrop"),
            tuple(map(float, sampled.scale)),
            tuple(map(float, sampled.ratio)),
            antialias=False,
            align_corners=align,
            centered_fallback=False,
            same_on_batch=transform.same_on_batch,
        )
    short = isinstance(size, int)
    if kind is K.Resize and not flags["antialias"] and (not short or flags["side"] == "short"):
        exact = size if short else pair(size, "Resize")
        return ResizeOp(exact, antialias=False, align_corners=align)
    return None
