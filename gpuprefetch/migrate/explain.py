"""explain: what becomes of a transform list, in words."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gpuprefetch.core.errors import text_of
from gpuprefetch.core.report import Text, columns
from gpuprefetch.core.streams import own_modes
from gpuprefetch.lists.convert import convert_transforms, opened, read_list, title, why_refused
from gpuprefetch.policies.known import flatten, is_on_device, name_of
from gpuprefetch.policies.per_image import Cast, Loop, PerImage, on_levels
from gpuprefetch.prefetcher import DataPrefetcher
from gpuprefetch.transforms.head import Head, Transform, read_transforms
from gpuprefetch.transforms.random import trial_draws
from gpuprefetch.transforms.views import Views


def explain(transforms_or_prefetcher: Any) -> str:
    """Say what of a transform list is fused, what is not and why, and what each step gives.

    Args:
        transforms_or_prefetcher: a list as for ``DataPrefetcher(transforms=...)``, a prefetcher, or
            a torchvision pipeline, which is converted first. What is not fused is tried on a batch
            of two black images on the CPU, to see what it gives.

    Returns:
        A line per step, with where it runs, what it gives, and why it is not fused. Of a prefetcher
        the first line says what decodes encoded images: JPEG engines and how many, the GPU without
        them, or the CPU and why.

    Example:
        >>> print(explain([gpuprefetch.RandomResizedCrop(224), K.RandomHorizontalFlip(), blur]))
    """
    given = transforms_or_prefetcher
    if isinstance(given, DataPrefetcher):
        decode = f"by {given.decoding}"
        return Text("\n".join(_explain(v.head, v.tail, decode) for v in given.views))
    if isinstance(given, Views):
        return Text("\n".join(map(explain, given.lists)))
    ops = list(flatten(given))
    # torchvision's may stand in a prefetcher's list, too.
    if not any(map(is_on_device, ops)) and any(name_of(op) is not None for op in ops):
        given = convert_transforms(given)
    given = opened(given)
    if isinstance(given, list):
        given = [_Refused(op, why) if (why := why_refused(op)) else op for op in given]
    return Text(_explain(*read_list(given)))


class _Refused:
    """What stands for a transform that a prefetcher's list would not take."""

    def __init__(self, op: Any, why: str) -> None:
        self.__name__ = title(op)
        self.why = why

    def __call__(self, images: Any) -> Any:
        raise ValueError(self.why)


def _explain(head: Head, tail: Sequence[Transform], decode: str = "") -> str:
    rows = [("decode", "uint8 (3, H, W), sizes differ", decode)]
    tail, levels = on_levels(head, tail, Cast(head.dtype, head.memory_format))
    head = replace(head, dtype=torch.uint8, memory_format=None) if levels else head
    images: Any = "sizes as they came"  # or why there are none to try a transform on
    if head.size is not None:
        images = head.empty(2, "cpu").zero_()
    if head.names:
        what = "in 0 to 255" if head.dtype == torch.uint8 else "in [0, 1]"
        what = "normalized" if head.mean else what
        rows.append((", ".join(head.names), _form(images), f"one fused launch, {what}"))
    for position, transform in enumerate(tail):
        reason = _why(transform, head) if not position else f"after {title(tail[0])}"
        how = f"not fused: {reason}"
        if isinstance(transform, PerImage):
            how = f"one program of {transform.slots} slots, a draw for each image"
        elif type(transform) is Loop:
            how = "image by image, with a call for each: slow"
        if isinstance(transform, _Refused):
            rows.append((title(transform), "", f"refused: {transform.why}"))
            images = "not tried"
            continue
        images, form = _try(transform, images)
        rows.append((title(transform), form, how))
    return columns(rows)


def _form(images: Any) -> str:
    if not isinstance(images, torch.Tensor):
        return images if isinstance(images, str) else type(images).__name__
    last = images.dim() == 4 and images.is_contiguous(memory_format=torch.channels_last)
    layout = "contiguous" if images.is_contiguous() else "channels_last" if last else "strided"
    shape = ", ".join(("N", *map(str, images.shape[1:])))
    return f"{str(images.dtype).removeprefix('torch.')} ({shape}) {layout}"


def _try(transform: Transform, images: Any) -> tuple[Any, str]:
    if isinstance(images, str):
        return images, images
    try:
        with own_modes(torch.device("cpu")), trial_draws():
            result = transform(images)
    except Exception as error:  # the user's code: whatever it raises is the answer
        return "not tried", f"fails: {type(error).__name__}: {text_of(error)}"
    return result, _form(result)


def _why(transform: Any, head: Head) -> str:
    module, name = type(transform).__module__, title(transform)
    if read_transforms([transform])[0].names:
        if head.mean is not None:
            return "it comes after Normalize, where the launch takes flips only"
        return "the images are resized or padded already, and two resamplings are not one"
    if not module.startswith("kornia."):
        return "the launch takes kornia's and gpuprefetch's crops, resizes, flips and Normalize"
    if name in ("RandomCrop", "CenterCrop", "RandomResizedCrop", "Resize", "Normalize"):
        return "the launch takes it with p=1, bilinear, and without padding"
    return "it is no crop, resize, flip or Normalize"
