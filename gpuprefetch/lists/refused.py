"""What a list of transforms does not take, each with the line to write instead.

A transform in a list gets the batch ``(N, C, H, W)``. Ops of libraries for one image would read N
as its channels, and containers that choose once a call would choose for the whole batch.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gpuprefetch.lists.forms import fixes_size
from gpuprefetch.policies.known import flatten, is_on_device, name_of, parts_of, samples_once, title
from gpuprefetch.policies.per_image import ToFloat, ToUint8
from gpuprefetch.policies.registry import Is, LibraryOp, has, is_or_extends
from gpuprefetch.policies.timm import from_timm, timm_class, why_not
from gpuprefetch.transforms.head import Head, Transform

_ARRAY = "is for one NumPy array in a worker"
_ONE = "is for one image, and would sample once for all images of a batch"
_PICTURE = "is for one PIL image in a worker"
_SAMPLE = "is for one sample in its library's own form"
_TENSOR = "is for one image (C, H, W), and would take the images of a batch for channels"
_VOLUME = "is for one volume (C, W, H, D), and would take the images of a batch for channels"
# Modules of other libraries, and what their transforms are for.
FOREIGN = {
    "Augmentor": _PICTURE,
    "PIL": _PICTURE,
    "albumentations": _ARRAY,
    "audiomentations": _ARRAY,
    "augly": _PICTURE,
    "batchgenerators": _ARRAY,
    "batchgeneratorsv2": _SAMPLE,
    "cv2": _ARRAY,
    "detectron2.data": _SAMPLE,
    "imagecorruptions": _ARRAY,
    "imgaug": _ARRAY,
    "lightly.transforms": _ONE,
    "mmaction.datasets": _SAMPLE,
    "mmcv.transforms": _SAMPLE,
    "mmdet.datasets": _SAMPLE,
    "mmpose.datasets": _SAMPLE,
    "mmpretrain.datasets": _SAMPLE,
    "mmseg.datasets": _SAMPLE,
    "monai.transforms": _TENSOR,
    "scipy": _ARRAY,
    "skimage": _ARRAY,
    "solt": _ARRAY,
    "torchio": _VOLUME,
    "volumentations": _ARRAY,
}
_INSTEAD = (
    "Or take kornia's or torchvision's op in its place: transforms=[gpuprefetch.RandomResizedCrop("
    "224), K.RandomHorizontalFlip(), v2.ColorJitter(0.4)]."
)
# What calls an op for each image.
_STACKED = "torch.stack([op(image) for image in images]).as_subclass(torch.Tensor)"
_CALLS = {
    _ONE: _STACKED,
    _TENSOR: _STACKED,
    _VOLUME: "torch.stack([op(image[..., None])[..., 0] for image in images])",
}
_PER_IMAGE = "lambda images: torch.cat([op(image[None]) for image in images])"
_PER_BATCH = "lambda images: op(images)"


def refuse_in_list(transform: LibraryOp) -> None:
    """Raise a ValueError for a transform of a list that is not for batches of images alone."""
    for op in _ops(transform):
        _refuse_mixing(op)
        _refuse_foreign(op)
        _refuse_timms(op)
        _refuse_conversion(op)


def _ops(transform: LibraryOp) -> Iterator[LibraryOp]:
    """The ops that a transform is made of, also within torchvision's random containers."""
    for op in flatten(transform):
        yield op
        if has(op, Is.HOLDS):
            yield from _ops(list(op.transforms))


def _refuse_mixing(op: LibraryOp) -> None:
    from torchvision.transforms import v2

    kind = timm_class(op)
    timms = kind is not None and kind.__name__ in ("FastCollateMixup", "Mixup")
    if isinstance(op, (v2.CutMix, v2.MixUp)) or timms:
        raise ValueError(
            f"{'timm' if timms else 'torchvision'}'s {type(op).__name__} mixes the images of a "
            "batch, and transforms do not get the targets. Mix in the training step, or in a "
            "collate_fn with accelerate."
        )
    K: Any = sys.modules.get("kornia.augmentation")  # nobody has any before it is imported
    for part in op.modules() if K and isinstance(op, torch.nn.Module) else ():
        if isinstance(part, K.MixAugmentationBaseV2) and not isinstance(part, K.RandomJigsaw):
            raise ValueError(
                f"kornia's {type(part).__name__} mixes the images of a batch and leaves their "
                "targets as they were. Mix in the training step, or in a collate_fn with "
                "accelerate; where targets do not matter, call it from a function in the list."
            )


def is_foreign(op: LibraryOp) -> bool:
    """Whether an op is of another library's, and never takes one tensor (C, H, W)."""
    return any(what not in (_ONE, _TENSOR) for _, what in _foreign(op))


def _foreign(op: LibraryOp) -> Iterator[tuple[str, str]]:
    """The other library that an op or one of its bases is of, and what that one's ops are for."""
    function = _function_of(op)
    # A function has its own module and name.
    kinds = [function] if hasattr(function, "__name__") else type(function).__mro__
    for kind in kinds:
        module = f"{getattr(kind, '__module__', None)}."
        for name, what in FOREIGN.items():
            if module.startswith(f"{name}."):
                yield module.partition(".")[0], what


def _function_of(op: LibraryOp) -> LibraryOp:
    while isinstance(op, functools.partial):
        op = op.func
    return op


def _refuse_foreign(op: LibraryOp) -> None:
    for library, what in _foreign(op):
        name = title(_function_of(op))
        owner = f"{library}'" if library.endswith("s") else f"{library}'s"
        text = f"{owner} {name} {what}. Call it in the dataset, on the decoded image"
        if (call := _CALLS.get(what)) is not None:
            text += f", or for each image of the batch: lambda images: {call}"
        raise ValueError(f"{text}. {_INSTEAD}")


def _refuse_timms(op: LibraryOp) -> None:
    kind = timm_class(op)
    if kind is None or name_of(op) is not None or is_or_extends(op, Is.BATCHES):
        return
    advice = "Leave it out"
    if kind.__name__ in ("AugMixAugment", "AutoAugment", "RandAugment"):
        name = kind.__name__.replace("AugMixAugment", "AugMix")
        advice = f"Take torchvision's in its place, v2.{name}()"
    raise ValueError(
        f"timm's {type(op).__name__} cannot run in a list: {why_not(op)}. {advice}, or let the "
        "dataset call it on the PIL image."
    )


def _refuse_conversion(op: LibraryOp) -> None:
    from torchvision import transforms as v1

    if type(op) in (v1.ToTensor, v1.PILToTensor) or name_of(op) == "ToPILImage":
        raise ValueError(
            f"{type(op).__name__} is for PIL images, and here images are tensors. Leave it out. "
            "Encoded images may have it right after torchvision's crop: "
            "transforms=[v2.RandomResizedCrop(224), v2.ToTensor()]."
        )


def refuse_once_a_batch(transform: LibraryOp) -> None:
    """Raise a ValueError for kornia's policies and containers that choose ops once a batch."""
    policies: Any = getattr(sys.modules.get("kornia.augmentation.auto"), "PolicyAugmentBase", ())
    if isinstance(transform, policies):
        raise ValueError(
            f"kornia's {type(transform).__name__} chooses its ops once a batch, not for each "
            "image. Take torchvision's, which chooses for each image here: v2.RandAugment(), "
            "v2.TrivialAugmentWide() or v2.AutoAugment(). Or call it from a function, for each "
            f"image: {_PER_IMAGE}; or once a batch: {_PER_BATCH}."
        )
    if not is_container(transform):
        return
    for part in parts_of(transform):
        refuse_once_a_batch(part)
    wanted = getattr(transform, "same_on_batch", False)
    # Each patch of an image has its own ops.
    patches = getattr(transform, "patchwise_apply", False)
    if getattr(transform, "random_apply", False) and not (wanted or patches):
        raise ValueError(
            f"kornia's {type(transform).__name__}(random_apply=...) chooses its ops once a batch, "
            "not for each image. Take torchvision's containers, which choose for each image here "
            "and take kornia's ops: v2.RandomChoice([...]), v2.RandomOrder([...]). Or call it "
            f"from a function, for each image: {_PER_IMAGE}; or once a batch: {_PER_BATCH}."
        )


def refuse_choice_for_batch(transform: LibraryOp) -> None:
    """Raise a ValueError for an op of kornia's that a whole batch gets or none of it.

    Images of their own sizes are transformed one by one.
    """
    for part in parts_of(transform) if is_container(transform) else ():
        refuse_choice_for_batch(part)
    if is_on_device(transform) and 0 < getattr(transform, "p_batch", 1.0) < 1:
        name = title(transform)
        raise ValueError(
            f"{name} with p_batch={transform.p_batch} is for all images of a batch or for none, "
            "and images of their own sizes are transformed one by one. Write it for each image: "
            f"v2.RandomApply([{name}(...)], p={transform.p_batch}), with p_batch=1 or without it."
        )


def is_container(transform: object) -> bool:
    """Whether a module is one of kornia's containers, which hold ops."""
    containers: Any = sys.modules.get("kornia.augmentation.container.base")
    return containers is not None and isinstance(transform, containers.BasicSequentialBase)


def refuse_within_kornia(transform: LibraryOp) -> None:
    """Raise a ValueError for torchvision's random ops within kornia's containers."""
    for part in parts_of(transform) if is_container(transform) else ():
        refuse_within_kornia(part)
        for op in flatten(part):
            if samples_once(from_timm(op)):
                name = type(op).__name__
                container = type(transform).__name__
                raise ValueError(
                    f"{name} within kornia's {container} would sample once a batch. In the list "
                    f"itself it samples for each image: transforms=[{name}(...), {container}(...)]."
                )


def gives_size(transform: LibraryOp) -> bool:
    """Whether a transform, or one that it is made of, is to give images of any sizes one."""
    known = name_of(from_timm(transform)) is not None
    own = fixes_size(transform) if known else is_or_extends(transform, Is.CROPS)
    return own or any(map(gives_size, parts_of(transform)))


def require_fixed_size(head: Head, tail: Sequence[Transform]) -> None:
    """Raise a ValueError for fused transforms that do not give decoded images one size."""
    if head.gives_results:
        return
    names = ", ".join(head.names)
    stop = names or "an empty list"
    hint = (
        "Start the list with a crop for training, or with Resize(256) and CenterCrop(224) for "
        "validation (torchvision's and kornia's work as well, if bilinear and without padding): "
        "transforms=[gpuprefetch.RandomResizedCrop(224), ...]."
    )
    first = next((op for op in tail if not isinstance(op, (ToFloat, ToUint8))), None)
    if first is not None:
        name = title(first)
        stop = f"{name} after {names}" if names else f"{name} comes first and"
        if type(first).__module__.startswith("kornia.augmentation.container"):
            hint = f"The parts of {name} are hidden in it. Write transforms=[*pipeline]."
        elif "Resize" in names and "Resize" in name:
            hint = f"Two resizes are not one. Leave {names} out: transforms=[{name}(224), ...]."
    raise ValueError(
        f"Decoded photos have different sizes, and {stop} does not give them the one that "
        f"transforms, dtype and memory_format need. {hint}"
    )
