"""explain: what becomes of a transform list, in words."""

from typing import NoReturn

import torch

from gpuprefetch.core.errors import text_of
from gpuprefetch.core.report import Text, columns
from gpuprefetch.core.streams import own_modes
from gpuprefetch.images.view import View
from gpuprefetch.lists.walk import Transforms, opened, why_refused
from gpuprefetch.policies.known import title
from gpuprefetch.policies.per_image import Loop, PerImage, RandomCrops
from gpuprefetch.prefetcher import DataPrefetcher
from gpuprefetch.transforms.head import Transform
from gpuprefetch.transforms.random import trial_draws
from gpuprefetch.transforms.views import Views


def explain(transforms_or_prefetcher: Transforms | Views | DataPrefetcher) -> str:
    """Say what of a transform list is fused, what is not and why, and what each step gives.

    Args:
        transforms_or_prefetcher: a list as for ``DataPrefetcher(transforms=...)``, a torchvision
            pipeline, or a prefetcher. What is not fused is tried on a batch of two black images on
            the CPU, to see what it gives.

    Returns:
        A line per step, with where it runs, what it gives, and why it is not fused. For a
        prefetcher the first line says what decodes encoded images: JPEG engines and how many, the
        GPU without them, or the CPU and why.

    Example:
        >>> print(explain([gpuprefetch.RandomResizedCrop(224), K.RandomHorizontalFlip(), blur]))
    """
    given = transforms_or_prefetcher
    if isinstance(given, DataPrefetcher):
        decode = f"by {given.decoding}"
        return Text("\n".join(_explain(view, decode) for view in given.views))
    if isinstance(given, Views):
        return Text("\n".join(map(explain, given.lists)))
    return Text(_explain(_view_of_list(given)))


def _view_of_list(transforms: Transforms) -> View:
    try:
        return View.read(transforms)
    except ValueError:
        given = opened(transforms)
        if not isinstance(given, list) or not any(map(why_refused, given)):
            raise
        return View.read([_Refused(op, why) if (why := why_refused(op)) else op for op in given])


class _Refused:
    """What stands for a transform that a prefetcher's list would not take."""

    def __init__(self, op: Transform, why: str) -> None:
        self.__name__ = title(op)
        self.why = why

    def __call__(self, images: object) -> NoReturn:
        raise ValueError(self.why)


def _explain(view: View, decode: str = "") -> str:
    head = view.head
    sizes = "all of one size" if head.keeps_size else "sizes differ"
    rows = [("decode", f"uint8 (3, H, W), {sizes}", decode)]
    if view.refused is not None:
        rows = [("encoded images", "", f"refused: {view.refused}")]
    images: object = "sizes as they came"  # or why there are none to try a transform on
    if head.size is not None:
        images = head.empty(2, "cpu").zero_()
    if head.names:
        what = "in 0 to 255" if head.dtype == torch.uint8 else "in [0, 1]"
        what = "normalized" if head.mean else what
        rows.append((", ".join(head.names), _form(images), f"one fused launch, {what}"))
    for position, transform in enumerate(view.tail):
        if isinstance(transform, _Refused):
            rows.append((title(transform), "", f"refused: {transform.why}"))
            images = "not tried"
            continue
        images, form = _try(transform, images)
        rows.append((title(transform), form, _how(view, position)))
    return columns(rows)


def _how(view: View, position: int) -> str:
    """How a transform after the fused ones runs, and why it is not one of them."""
    transform = view.tail[position]
    if isinstance(transform, PerImage):
        return f"one program of {transform.slots} slots, a draw for each image"
    if isinstance(transform, RandomCrops):
        return "one launch, a draw for each image"
    if type(transform) is Loop:
        return "image by image, with a call for each: slow"
    if position:
        return f"not fused: after {title(view.tail[0])}"
    step = next((step for step in view.plan.steps if step.module is transform), None)
    return f"not fused: {step.note}" if step is not None and step.note else "on the batch"


def _form(images: object) -> str:
    if not isinstance(images, torch.Tensor):
        return images if isinstance(images, str) else type(images).__name__
    last = images.dim() == 4 and images.is_contiguous(memory_format=torch.channels_last)
    layout = "contiguous" if images.is_contiguous() else "channels_last" if last else "strided"
    shape = ", ".join(("N", *map(str, images.shape[1:])))
    return f"{str(images.dtype).removeprefix('torch.')} ({shape}) {layout}"


def _try(transform: Transform, images: object) -> tuple[object, str]:
    if isinstance(images, str):
        return images, images
    try:
        with own_modes(torch.device("cpu")), trial_draws():
            result = transform(images)
    except Exception as error:  # the user's code: whatever it raises is the answer
        return "not tried", f"fails: {type(error).__name__}: {text_of(error)}"
    return result, _form(result)
