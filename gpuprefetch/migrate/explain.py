"""explain: what becomes of a transform list, or of a loader's pipeline, in words."""

from typing import Any, NoReturn

import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from gpuprefetch.core.errors import text_of
from gpuprefetch.core.report import Text, columns
from gpuprefetch.core.streams import own_modes
from gpuprefetch.images.apart import image_of
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.folder import EncodedImageFolder
from gpuprefetch.images.view import View
from gpuprefetch.lists.views import Views, lists_of
from gpuprefetch.lists.walk import Transforms, opened, why_refused
from gpuprefetch.migrate.accelerate import Accelerated, accelerate
from gpuprefetch.policies.each import Each
from gpuprefetch.policies.known import title
from gpuprefetch.policies.per_image import Loop, PerImage, RandomCrops
from gpuprefetch.prefetcher import DataPrefetcher
from gpuprefetch.transforms.head import Transform
from gpuprefetch.transforms.random import trial_draws

_ANEW = "workers start anew in each epoch: DataLoader(persistent_workers=True) keeps them"


def explain(
    transforms_or_loader: Transforms | Views | DataPrefetcher | DataLoader[Any],
) -> str:
    """Say what of a transform list is fused, what is not and why, and what each step gives.

    Args:
        transforms_or_loader: a list as for ``DataPrefetcher(transforms=...)``, a torchvision
            pipeline, a prefetcher, or a ``DataLoader`` that ``accelerate`` would take, which is
            left as it is. What is not fused is tried on a batch of two black images on the CPU, to
            see what it gives.

    Returns:
        A line per step, with where it runs, what it gives, and why it is not fused. For a
        prefetcher the first line says what decodes encoded images: JPEG engines and how many, the
        GPU without them, or the CPU and why. The last one says if each epoch starts its workers
        anew. For what ``accelerate`` gave, or a ``DataLoader``, the plan that ``accelerate`` prints
        comes first, or why it would refuse that loader.

    Raises:
        TypeError: for a dataset, or what is no transform, with what to write.

    Example:
        >>> print(explain([gpuprefetch.RandomResizedCrop(224), K.RandomHorizontalFlip(), blur]))
        >>> print(explain(loader))  # what accelerate(loader) would do
    """
    given = transforms_or_loader
    if isinstance(given, DataLoader):
        return _dry_run(given)
    if isinstance(given, DataPrefetcher):
        plan = [given.describe(), ""] if isinstance(given, Accelerated) else []
        return Text("\n".join([*plan, *_of_prefetcher(given)]))
    if isinstance(given, Dataset):
        raise TypeError(
            f"explain takes transforms or a loader, got the dataset {type(given).__name__}. Write "
            "explain(DataLoader(dataset, batch_size=...)), or explain(dataset.transform)."
        )
    lists = lists_of(given)
    if len(lists) > 1:
        return Text("\n".join(map(explain, lists)))
    return Text(_explain(_view_of_list(lists[0])))


def _dry_run(loader: DataLoader[Any]) -> str:
    try:
        moved = accelerate(loader, print_plan=False)
    except (TypeError, ValueError) as error:
        return Text(f"accelerate(loader) would refuse it: {error}")
    return explain(moved)


def _of_prefetcher(prefetcher: DataPrefetcher) -> list[str]:
    epochs = [_ANEW] if prefetcher.starts_workers_anew else []
    encoded = _gives_encoded(prefetcher)
    if encoded is False:
        return [_of_tensors(view) for view in prefetcher.views] + epochs
    decode = f"by {prefetcher.decoding}"
    if encoded is None:
        decode += ", where images are encoded"
    return [_explain(view, decode) for view in prefetcher.views] + epochs


def _of_tensors(view: View) -> str:
    try:
        return _explain(view.of_tensors(), of_files=False)
    except ValueError as error:
        return f"images that come as tensors  refused: {error}"


def _gives_encoded(prefetcher: DataPrefetcher) -> bool | None:
    """Whether a loader gives encoded images; None where that is not known before its batches."""
    if isinstance(prefetcher, Accelerated):
        return prefetcher.decodes_files
    stats = prefetcher.stats
    if stats.batches:
        return bool(stats.gpu_images + stats.cpu_images)
    return _holds_encoded(getattr(prefetcher.wrapped, "dataset", None))


def _holds_encoded(dataset: object) -> bool | None:
    """Whether a dataset gives encoded images, as far as that is known without a call of it."""
    if isinstance(dataset, EncodedImageFolder):
        return True
    if isinstance(dataset, Subset):
        return _holds_encoded(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return _holds_encoded(dataset.datasets[0])
    if isinstance(dataset, (list, tuple)) and len(dataset):
        return isinstance(image_of(dataset[0]), EncodedImage)
    theirs = type(dataset).__module__.startswith("torchvision.datasets.")
    return False if theirs or isinstance(dataset, TensorDataset) else None


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


def _explain(view: View, decode: str = "", *, of_files: bool = True) -> str:
    head = view.head
    one_size = head.asks_for_sizes and not head.has_own_sizes
    sizes = "all of one size" if one_size else "sizes differ"
    rows = [("decode", f"uint8 (3, H, W), {sizes}", decode)] if of_files else []
    if of_files and view.refused is not None:
        rows = [("encoded images", "", f"refused: {view.refused}")]
    images: object = "sizes as they came"  # or why there are none to try a transform on
    if head.has_own_sizes:
        images = "N of (3, H, W), each of its own size"
    elif head.size is not None:
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
    if head.has_own_sizes and head != head.listed():
        rows.append(("results", "", f"{head.form}"))
    return columns(rows) if rows else "images stay as they come"


def _how(view: View, position: int) -> str:
    """How a transform after the fused ones runs, and why it is not one of them."""
    transform = view.tail[position]
    if isinstance(transform, PerImage):
        slots = "1 slot" if transform.slots == 1 else f"{transform.slots} slots"
        return f"one program of {slots}, a draw for each image"
    if isinstance(transform, RandomCrops):
        return "one launch, a draw for each image"
    if type(transform) in (Loop, Each):
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
