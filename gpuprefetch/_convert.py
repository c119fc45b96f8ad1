"""A torchvision pipeline, v1 or v2, as a transform list that does the same on the device.

torchvision's own objects carry every parameter. What composes into one resampling becomes a part of
the fused launch; every other op stays torchvision's, on the batch, with one draw per image. Up to
its conversion to floating point a pipeline works on uint8, and so does its converted list.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpuprefetch._per_image import KNOWN, Apply, Choice, Loop, ToFloat, ToUint8, per_image
from gpuprefetch._timm import TimmAugment, from_timm
from gpuprefetch._transforms import (
    CenterCrop,
    RandomResizedCrop,
    Resize,
    Transform,
    _FusedTransform,
    _RandomCrop,
    read_transforms,
)

_V1 = ("torchvision.transforms.transforms", "torchvision.transforms.autoaugment")
CONVERSIONS = frozenset(
    "ToTensor PILToTensor ToImage ToPureTensor ToDtype ConvertImageDtype".split()
)
_NESTED = frozenset("Compose Sequential ModuleList".split())
# Of torchvision's references/classification: they hold a Compose.
_PRESETS = frozenset(("ClassificationPresetTrain", "ClassificationPresetEval"))
_FUSED = frozenset(
    "RandomResizedCrop Resize CenterCrop RandomCrop RandomHorizontalFlip RandomVerticalFlip".split()
)
_SIZES = frozenset("RandomResizedCrop Resize CenterCrop RandomCrop Pad".split())
# Linear in each pixel: before a bilinear resize or behind it is the same up to rounding.
_LINEAR = frozenset("Normalize Grayscale RandomGrayscale RandomInvert".split())
# Where tensors know fewer filters than PIL: what torchvision takes for a tensor.
_GRID_FILTERS = ("nearest", "bilinear")
_RESIZE_FILTERS = ("nearest", "nearest-exact", "bilinear", "bicubic")

# What differs from PIL with the same parameters, measured by parity() on photos of ImageNet at 224:
# mean over all pixels, in levels of 255. Ops that are not here gave the same pixels.
_DIFFERS = {
    "RandomResizedCrop": "0.3 levels: not rounded to uint8 on the way",
    "Resize": "0.3 levels: not rounded to uint8 on the way",
    "ColorJitter": "0.3 levels, 0.4 with hue: PIL's hue has 8 bits",
    "RandomRotation": "0.01 levels, bilinear 0.5: rounding of coordinates",
    "RandomAffine": "0.01 levels, bilinear 0.5: rounding of coordinates",
    "RandomPerspective": "0.3 levels: rounding of coordinates",
    "RandAugment": "0.1 levels: rounding of coordinates",
    "TrivialAugmentWide": "0.1 levels: rounding of coordinates",
    "TimmAugment": "0.2 levels: bicubic filter, rounding of coordinates",
    "RandomAutocontrast": "0.7 levels: truncated, PIL rounds",
    "Grayscale": "0.5 levels: truncated, PIL rounds",
    "RandomGrayscale": "0.5 levels: truncated, PIL rounds",
}


class UnsupportedTransformError(ValueError):
    """An op of a pipeline that cannot move to the device; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Step:
    """What became of one op.

    Attributes:
        source: the op; a v1 op's twin from v2.
        module: what stands for it in the list, None where nothing needs to.
        where: it runs.
        note: what differs.
    """

    source: Any
    module: Transform | None
    where: str
    note: str = ""

    @property
    def name(self) -> str:
        return type(self.source).__name__


@dataclass(frozen=True, slots=True)
class Plan:
    """A converted pipeline: its ops in their order, and the transform list."""

    steps: list[Step]
    transforms: list[Transform]

    def __str__(self) -> str:
        rows = [(step.name, step.where, step.note) for step in self.steps]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        lines = (f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows)
        return "\n".join(lines)


def convert_transforms(pipeline: Any) -> list[Transform]:
    """Convert a torchvision pipeline to a list for ``DataPrefetcher(transforms=...)``.

    Args:
        pipeline: a v1 or v2 transform, a ``Compose`` or a list of them, for PIL images or uint8
            tensors.

    Returns:
        A list that gives what the pipeline gives, for decoded images of different sizes. They are
        floating point where it ends in that, else uint8. Random ops draw once per image.

    Raises:
        UnsupportedTransformError: for an op that cannot move; the message names it.
    """
    return convert(pipeline).transforms


def convert(pipeline: Any, *, batched: torch.dtype | None = None) -> Plan:
    """As :func:`convert_transforms`, with what became of each op.

    Args:
        pipeline: likewise.
        batched: dtype of images that come as ``(N, C, H, W)`` tensors instead of encoded files.
    """
    converter = _Converter()
    if batched is not None:
        converter.is_tensor = converter.sized = True
        converter.is_float = converter.holds_float = batched.is_floating_point
    for op in flatten(pipeline):
        converter.take(op)
    return converter.finish()


def flatten(pipeline: Any) -> Iterator[Any]:
    """The ops of nested ``Compose``, ``Sequential``, lists and torchvision's presets, in order."""
    name = type(pipeline).__name__
    if name in _PRESETS:
        yield from flatten(pipeline.transforms)
    elif name == "ImageClassification" and type(pipeline).__module__.startswith("torchvision."):
        yield from _preprocessing(pipeline)
    elif name in _NESTED or isinstance(pipeline, (list, tuple)):
        for op in getattr(pipeline, "transforms", pipeline):
            yield from flatten(op)
    else:
        yield pipeline


def _preprocessing(preset: Any) -> list[Any]:
    """What ``weights.transforms()`` does, op by op."""
    from torchvision.transforms import v2

    return [
        v2.Resize(preset.resize_size, preset.interpolation),
        v2.CenterCrop(preset.crop_size),
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(preset.mean, preset.std),
    ]


def name_of(op: Any) -> str | None:
    """Name of an op that we know; None for a subclass and whatever else there is."""
    module = type(op).__module__
    known = module in _V1 or module.startswith(f"{_V2}.") or type(op) is TimmAugment
    return type(op).__name__ if known else None


_V2 = "torchvision.transforms.v2"


def twin(op: Any) -> Any:
    """The v2 form of a v1 op, which holds its arguments under their names; else the op."""
    from torchvision.transforms import v2

    if type(op).__module__ not in _V1:
        return op
    form = getattr(v2, type(op).__name__)
    names = inspect.signature(form).parameters
    if not all(hasattr(op, name) for name in names):
        return op  # a Lambda: nothing that could move
    return form(**{name: getattr(op, name) for name in names})


def fixes_size(op: Any) -> bool:
    """Whether images have one size behind this op, whatever they had before."""
    op = from_timm(op)
    sized = name_of(op) in ("RandomResizedCrop", "CenterCrop", "RandomCrop")
    return sized or (name_of(op) == "Resize" and len(_as_list(op.size)) == 2)


def _as_list(size: Any) -> list[int]:
    return [size] if isinstance(size, int) else list(size or [])


def _filter_of(op: Any) -> str:
    from torchvision.transforms import InterpolationMode

    mode = getattr(op, "interpolation", "bilinear")
    if isinstance(mode, int):
        # PIL's numbers
        return {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}.get(mode, str(mode))
    return str(InterpolationMode(mode).value)


class RandomCrop(_FusedTransform):
    """torchvision's RandomCrop with black padding."""

    interpolation = ""  # nothing is interpolated

    def __init__(self, op: Any) -> None:
        super().__init__()
        left, right, top, bottom = op.padding or (0, 0, 0, 0)
        self.size = (int(op.size[0]), int(op.size[1]))
        before, after = (top, left), (bottom, right)
        self.op = _RandomCrop(self.size, False, before, after, bool(op.pad_if_needed))


@dataclass
class _Converter:
    """Walks through a pipeline; what it says of images holds behind the last op taken."""

    is_tensor: bool = False  # in the pipeline: from PIL images to tensors ...
    is_float: bool = False  # ... and from uint8 to floating point
    holds_float: bool = True  # in our list: the launch gives [0, 1], later ops may want uint8
    sized: bool = False
    open: bool = True  # whether the launch can take more
    resized: bool = False  # by the launch, or padded
    steps: list[Step] = field(default_factory=list)
    transforms: list[Transform] = field(default_factory=list)
    delayed: list[Any] = field(default_factory=list)

    def take(self, op: Any) -> None:
        op = from_timm(op)
        name = name_of(op)
        if name is None and isinstance(getattr(op, "interpolation", None), tuple):
            self._refuse(op, 'one launch has one filter, interpolation="random" needs two')
        if name is None:
            self._refuse(
                op, "it is not one of torchvision's own, nor among those of timm's that are known"
            )
        if name in CONVERSIONS:
            return self._take_conversion(op)
        if name in ("RGB", "Identity"):  # files are decoded to RGB
            return self.steps.append(Step(op, None, "nothing to do"))
        op = twin(op)
        if name in _FUSED and self.open and self._fuses(op):
            return self._fuse(op)
        self._flush()
        if not self.sized and name in _LINEAR and self._delays(op):
            self.delayed.append(op)
            return None
        return self._take_on_batch(op)

    def finish(self) -> Plan:
        self._flush(last=True)
        if not self.is_tensor:
            raise UnsupportedTransformError(
                "The pipeline ends in PIL images, which no batch can hold. Add v2.ToImage() and "
                "v2.ToDtype(torch.float32, scale=True), or ToTensor(), to it."
            )
        if not self.sized:
            raise UnsupportedTransformError(
                "The pipeline gives images of different sizes, which no batch can hold. Add a "
                "RandomResizedCrop, or a Resize and a CenterCrop, to it."
            )
        self._hold(self.is_float)
        head, _ = read_transforms(self.transforms)
        fused = {id(module) for module in self.transforms[: len(head.names)]}
        steps = [
            Step(s.source, s.module, "fused launch", s.note) if id(s.module) in fused else s
            for s in self.steps
        ]
        return Plan(steps, self.transforms)

    def _add(self, source: Any, module: Transform, where: str, note: str = "") -> None:
        self.transforms.append(module)
        self.steps.append(Step(source, module, where, note))

    def _hold(self, floating: bool) -> None:
        """Bring the images of our list to the kind that the pipeline has at this point."""
        if self.holds_float != floating:
            self.transforms.append(ToFloat() if floating else ToUint8())
            self.holds_float, self.open = floating, False

    def _take_conversion(self, op: Any) -> None:
        if self.sized:
            self._flush()
        name = name_of(op)
        self.is_tensor = True
        dtype: torch.dtype | None = torch.float32
        scale = True
        if name in ("ToDtype", "ConvertImageDtype"):
            dtype, scale = _image_dtype(op), getattr(op, "scale", True)
        elif name != "ToTensor":
            dtype = None
        if dtype is None or dtype == (torch.float32 if self.is_float else torch.uint8):
            self.steps.append(Step(op, None, "nothing to do"))
        elif dtype == torch.float32 and scale:
            self.is_float = True
            if self.holds_float:
                self.steps.append(Step(op, None, "fused launch", "its result is in [0, 1]"))
            else:
                self._hold(True)
                self.steps.append(Step(op, self.transforms[-1], "on the batch"))
        else:
            self._take_on_batch(_batch_dtype(dtype, scale), source=op)
            self.is_float = self.holds_float = dtype.is_floating_point

    def _fuses(self, op: Any) -> bool:
        name = type(op).__name__
        if name in ("RandomHorizontalFlip", "RandomVerticalFlip"):
            return True
        # A crop behind Normalize would pad with other values, two resamplings are not one.
        if any(s.name == "Normalize" and s.module is not None for s in self.steps):
            return False
        if name in ("RandomResizedCrop", "Resize"):
            return not self.resized and self._resizes_alike(op)
        return name == "CenterCrop" or (op.padding_mode == "constant" and op.fill in (0, None))

    def _resizes_alike(self, op: Any) -> bool:
        if _filter_of(op) not in ("bilinear", "bicubic") or getattr(op, "max_size", None):
            return False
        return bool(op.size) and (not self.is_tensor or op.antialias is not False)

    def _fuse(self, op: Any) -> None:
        import kornia.augmentation as K

        name = type(op).__name__
        flips = {"RandomHorizontalFlip": K.RandomHorizontalFlip}
        flips["RandomVerticalFlip"] = K.RandomVerticalFlip
        if name in flips:
            module = flips[name](p=op.p)
        else:
            self._check_delayed(op)
            module = self._crop_or_resize(op)
            self.sized |= fixes_size(op)
        self._add(op, module, "on the batch", _DIFFERS.get(name, ""))
        self.holds_float = True  # the launch gives that, whatever it is given

    def _crop_or_resize(self, op: Any) -> Transform:
        name, size = type(op).__name__, _as_list(op.size)
        self.resized |= name != "RandomCrop" or bool(op.padding or op.pad_if_needed)
        if name == "CenterCrop":
            return CenterCrop(size)
        if name == "RandomCrop":
            return RandomCrop(op)
        if name == "Resize":
            return Resize(size[0] if len(size) == 1 else size, interpolation=_filter_of(op))
        scale, ratio = tuple(op.scale), tuple(op.ratio)
        return RandomResizedCrop(size, scale, ratio, interpolation=_filter_of(op))

    def _delays(self, op: Any) -> bool:
        return getattr(op, "num_output_channels", 3) == 3

    def _check_delayed(self, op: Any) -> None:
        pads = type(op).__name__ in ("CenterCrop", "RandomCrop")
        for delayed in self.delayed:
            # Black stays black in gray only; bicubic results are clipped.
            if (pads and "Grayscale" not in type(delayed).__name__) or _filter_of(op) == "bicubic":
                self._refuse(delayed, f"it comes before {type(op).__name__}")

    def _flush(self, *, last: bool = False) -> None:
        if not (self.sized or last):
            return
        delayed, self.delayed = self.delayed, []
        for op in delayed:
            self._take_on_batch(op, note="moved behind the crop: the same up to rounding")

    def _take_on_batch(self, op: Any, source: Any = None, note: str = "") -> None:
        name = type(op).__name__
        self._check_on_batch(op)
        if not self.sized:
            self._refuse(op, self._why_not_fused(op))
        if name == "Normalize" and self.open and self.is_float:
            import kornia.augmentation as K

            mean, std = torch.tensor(op.mean), torch.tensor(op.std)
            return self._add(op, K.Normalize(mean=mean, std=std), "on the batch", note)
        self._hold(self.is_float)
        self.open = False
        if not self.is_tensor and hasattr(op, "antialias"):
            op = copy.copy(op)
            op.antialias = True  # PIL always does
        module = self._on_batch(op)
        where = "on the batch" if name in ("TimmAugment",) else "torchvision v2 on the batch"
        if isinstance(module, Loop):
            where += ", image by image"
        return self._add(source or op, module, where, note or _DIFFERS.get(name, ""))

    def _on_batch(self, op: Any) -> torch.nn.Module:
        name = type(op).__name__
        if name == "RandomApply":
            return Apply(self._inner(op.transforms), op.p)
        if name == "RandomChoice":
            return Choice([self._inner(choice) for choice in op.transforms], op.p)
        return per_image(op)

    def _why_not_fused(self, op: Any) -> str:
        if type(op).__name__ not in _FUSED:
            return "it comes before the crop or resize that gives images one size"
        if self.resized or not self.open:
            return "it resizes, or crops, images that are resized, padded or normalized already"
        return (
            "the fused launch takes bilinear or bicubic filters with antialias, no max_size, and "
            "padding that is black"
        )

    def _inner(self, transforms: Any) -> list[Any]:
        ops = [twin(op) for op in flatten(transforms)]
        for op in ops:
            self._check_on_batch(op)
            if type(op).__name__ in _SIZES or getattr(op, "num_output_channels", 3) != 3:
                self._refuse(op, "by chance it would give images of different shapes")
        return [self._on_batch(op) for op in ops]

    def _check_on_batch(self, op: Any) -> None:
        name = name_of(op)
        if name is None or (name in CONVERSIONS and name not in ("ToDtype", "ConvertImageDtype")):
            self._refuse(op, "it cannot stand here")
        if name not in KNOWN | {"RandomApply", "RandomChoice"}:
            self._refuse(op, "it is not among the ops that can run on a batch")
        if getattr(op, "expand", False):
            self._refuse(op, "expand=True gives images of different sizes")
        if hasattr(op, "interpolation"):
            resizes = name in ("Resize", "RandomResizedCrop")
            accepted = _RESIZE_FILTERS if resizes else _GRID_FILTERS
            if _filter_of(op) not in accepted:
                self._refuse(op, f"interpolation={_filter_of(op)!r} is for PIL images only")

    def _refuse(self, op: Any, reason: str) -> None:
        raise UnsupportedTransformError(
            f"{type(op).__name__} cannot move to the device: {reason}. Put it behind the crop, "
            "replace it, or keep it and all before it in the workers, after a decode on the CPU, "
            "with accelerate(loader, keep_unknown=True)."
        )


def _image_dtype(op: Any) -> torch.dtype | None:
    from torchvision import tv_tensors

    dtype = op.dtype
    if isinstance(dtype, dict):
        keys: Sequence[Any] = (tv_tensors.Image, torch.Tensor, "others")
        dtype = next((dtype[key] for key in keys if key in dtype), None)
    return dtype  # type: ignore[no-any-return]


def _batch_dtype(dtype: torch.dtype, scale: bool) -> Any:
    from torchvision.transforms import v2

    return v2.ToDtype(dtype, scale=scale)
