"""A torchvision pipeline, v1 or v2, as a transform list that does the same on the device.

torchvision's own objects carry every parameter. What composes into one resampling becomes a part of
the fused launch. Random ops become programs, with one draw per image; others stay torchvision's. Up
to its conversion to floating point a pipeline works on uint8, and so does its converted list.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from gpuprefetch.core.report import Printed, columns
from gpuprefetch.lists.refused import is_container, refuse_in_list, refuse_once_a_batch
from gpuprefetch.policies.compile import COMPILERS, FILTERS, compiled
from gpuprefetch.policies.known import (
    CONTAINERS,
    UnsupportedTransformError,
    filter_of,
    flatten,
    is_on_device,
    name_of,
    parts_of,
    torchvision_class,
    twin,
)
from gpuprefetch.policies.per_image import Cast, Loop, PerImage, ToFloat, ToUint8, grouped
from gpuprefetch.policies.timm import from_timm, samples_once, samples_sizes, why_not
from gpuprefetch.transforms.head import (
    RESIZE_FILTERS,
    CenterCrop,
    Head,
    RandomResizedCrop,
    Resize,
    Transform,
    _FusedTransform,
    _pair,
    read_transforms,
)
from gpuprefetch.transforms.sampling import RandomCropOp

CONVERSIONS = frozenset(
    "ToTensor PILToTensor ToImage ToPureTensor ToDtype ConvertImageDtype".split()
)
_CROPS = frozenset("RandomResizedCrop Resize CenterCrop RandomCrop".split())
# They give sizes that they draw, or take what no pipeline has on the device: an image at a time.
_ALONE = frozenset(
    "JPEG RandomIoUCrop RandomResize RandomShortestSize RandomZoomOut ScaleJitter".split()
)
_LOOPED = frozenset("ElasticTransform GaussianNoise RandomCrop RandomResizedCrop".split())
# They take a batch as they are: nothing is drawn.
_AS_THEY_ARE = frozenset(
    "CenterCrop ConvertImageDtype Grayscale Identity Normalize Pad RGB Resize ToDtype".split()
)
# The same in a list, where images are tensors; and what is the user's own function.
_SAMPLE_NOTHING = _AS_THEY_ARE | frozenset(
    "ClampBoundingBoxes ClampKeyPoints ConvertBoundingBoxFormat FiveCrop Lambda"
    " LinearTransformation ObjectDetection OpticalFlow PILToTensor SanitizeBoundingBoxes"
    " SanitizeKeyPoints SemanticSegmentation SetClampingMode TenCrop ToImage ToPureTensor ToTensor"
    " UniformTemporalSubsample VideoClassification".split()
)
_DRAWN = (COMPILERS.keys() | _LOOPED | _ALONE) - _AS_THEY_ARE
_KNOWN = COMPILERS.keys() | _LOOPED | _AS_THEY_ARE

# What differs in the fused launch, given the same parameters.
_UNROUNDED = "not rounded to uint8 on a GPU"
_CLIPPED = "clipped to [0, 1], torchvision's floats are not"
_TIES = "where two pixels are equally near it may be the other"


@dataclass(frozen=True, slots=True)
class Step:
    """What became of one op."""

    source: Any  # a v1 op's twin from v2
    module: Transform | None  # what stands for it in the list, if anything needs to
    where: str
    note: str = ""  # what differs

    @property
    def name(self) -> str:
        return type(self.source).__name__


@dataclass(frozen=True, slots=True, repr=False)
class Plan(Printed):
    """A converted pipeline: its ops in their order, and the transform list."""

    steps: list[Step]
    transforms: list[Transform]

    def __str__(self) -> str:
        return columns((f"  {step.name}", step.where, step.note) for step in self.steps)


def title(transform: Any) -> str:
    return getattr(transform, "__name__", type(transform).__name__)


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


def convert(pipeline: Any, *, batched: torch.Tensor | None = None, pictures: bool = False) -> Plan:
    """As :func:`convert_transforms`, with what became of each op.

    ``batched`` is one of the images, if they come as ``(N, C, H, W)`` and not as encoded files.
    ``pictures`` says that the pipeline gets PIL images for sure, and not perhaps tensors; its batch
    is made of them.
    """
    converter = _Converter(pictures=pictures)
    if batched is not None:
        converter.is_tensor, converter.sized = not pictures, True
        converter.kind, converter.dtype = type(batched), batched.dtype
        converter.holds_float = converter.is_float
    for op in flatten(pipeline):
        converter.take(op)
    return converter.finish()


def read_list(transforms: Any) -> tuple[Head, list[Transform]]:
    """:func:`read_transforms`, with a draw for each image where torchvision's would share one."""
    given = opened(transforms)
    if isinstance(given, list):
        for op in given:
            refuse_in_list(op)
    head, tail = read_transforms(given)
    return head, grouped(map(_in_list, tail))


def _is_alone(op: Any) -> bool:
    return name_of(op) in _ALONE or getattr(op, "expand", False) or samples_sizes(op)


def _may_be_alone(op: Any) -> bool:
    """Whether an op may sample a size: also one of a class derived from torchvision's or timm's."""
    return _is_alone(op) or (name_of(from_timm(op)) is None and _samples_once(op))


def opened(transforms: Any) -> Any:
    """The transforms of a list, without the Compose around some; anything else as it is."""
    given = [transforms] if callable(transforms) else transforms
    if not isinstance(given, (list, tuple)):
        return given
    return [op for each in given for op in _opened(each)]


def _opened(transform: Any) -> list[Any]:
    """The ops of a Compose. From one that samples sizes on they stay together up to its end.

    A later op makes one size of them again. A list is none, and refused: of several views it would
    make one.
    """
    from torchvision.transforms import v2

    if isinstance(transform, (list, tuple)):
        return [transform]
    ops = [*flatten(transform)]
    for number, op in enumerate(ops):
        sized = any(name_of(from_timm(later)) in _CROPS for later in ops[number + 1 :])
        if _is_alone(op) or (sized and _may_be_alone(op)):
            return [*ops[:number], v2.Compose(ops[number:])] if number else [transform]
    return ops


def _in_list(transform: Transform) -> Transform:
    """What runs in a list for a transform: itself if it samples nothing, or for each image."""
    if _is_alone(transform) or len([*flatten(transform)]) > 1:
        return Loop(transform)
    op = from_timm(transform)
    if name_of(op) in _DRAWN:
        op = twin(op)
        return op if compiled(op) is not None else Loop(op)
    if _samples_once(op):
        return Loop(op)
    refuse_once_a_batch(transform)
    _refuse_within_kornia(transform)
    return transform


def _samples_once(op: Any) -> bool:
    """Whether an op may sample once a call: torchvision's and timm's, and derived classes."""
    if name_of(op) in _DRAWN or samples_once(op):
        return True
    kind = torchvision_class(op)
    return kind is not None and (kind is not type(op) or kind.__name__ not in _SAMPLE_NOTHING)


def _refuse_within_kornia(transform: Any) -> None:
    for part in parts_of(transform) if is_container(transform) else ():
        _refuse_within_kornia(part)
        for op in flatten(part):
            if _samples_once(from_timm(op)):
                name, container = type(op).__name__, type(transform).__name__
                raise ValueError(
                    f"{name} within kornia's {container} would sample once a batch. In the list "
                    f"itself it samples for each image: transforms=[{name}(...), {container}(...)]."
                )


def why_refused(transform: Any) -> str:
    """Why a list does not take one of its transforms; empty where it does."""
    try:
        refuse_in_list(transform)
        _in_list(transform)
    except ValueError as error:
        return str(error)
    return ""


def fixes_size(op: Any) -> bool:
    """Whether images have one size after this op, whatever they had before."""
    op = from_timm(op)
    name, size = name_of(op), getattr(op, "size", None)
    return name in _CROPS and isinstance(size, Sequence) and len(size) == 2


class RandomCrop(_FusedTransform):
    """torchvision's RandomCrop with black padding."""

    def __init__(self, op: Any) -> None:
        left, right, top, bottom = op.padding or (0, 0, 0, 0)
        size, before, after = _pair(op.size, "RandomCrop"), (top, left), (bottom, right)
        super().__init__(RandomCropOp(size, False, before, after, bool(op.pad_if_needed)))


@dataclass
class _Converter:
    """Walks through a pipeline; what it says of images holds after the last op taken."""

    pictures: bool = False  # not tensors come in
    is_tensor: bool = False  # in the pipeline: from PIL images to tensors ...
    kind: Any = None  # ... torch.Tensor or torchvision's Image; None where that is not known ...
    dtype: torch.dtype = torch.uint8  # ... and from uint8 to another dtype
    holds_float: bool = True  # in our list: the launch gives [0, 1], later ops may want uint8
    cast: torch.dtype | None = None  # of the launch's floats, before what comes after it
    sized: bool = False
    steps: list[Step] = field(default_factory=list)
    transforms: list[Transform] = field(default_factory=list)

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point

    def take(self, op: Any) -> None:
        op = from_timm(op)
        name = name_of(op)
        if is_on_device(op):
            raise UnsupportedTransformError(
                f"{type(op).__name__} is not torchvision's, and runs on the device as it is. Leave "
                "it out, and pass accelerate(loader, transforms=[it]), or DataPrefetcher(loader, "
                "transforms=[*convert_transforms(pipeline), it])."
            )
        if name is None:
            _refuse(op, why_not(op))
        if name in CONVERSIONS:
            return self._take_conversion(op)
        if name == "Identity" or (name == "RGB" and not self.sized):  # files are decoded to RGB
            return self._add(op, None, "nothing to do")
        op = twin(op)
        module, note = self._for_launch(op)
        if module is None or not self._fuses(module):
            return self._take_on_batch(op)
        self.sized |= fixes_size(op)
        self.holds_float = True  # the launch gives that, whatever it is given
        return self._add(op, module, "fused launch", note)

    def finish(self) -> Plan:
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
        return Plan(self.steps, self.transforms)

    def _add(self, source: Any, module: Transform | None, where: str, note: str = "") -> None:
        self.transforms += [] if module is None else [module]
        self.steps.append(Step(source, module, where, note))

    def _hold(self, floating: bool) -> None:
        """Bring the images of our list to the kind that the pipeline has at this point."""
        if self.holds_float != floating:
            self.transforms.append(ToFloat() if floating else ToUint8())
            self.holds_float = floating
        if self.cast is not None and floating:
            self.transforms.append(Cast(self.cast, None))
        self.cast = None

    def _take_conversion(self, op: Any) -> None:
        from torchvision import tv_tensors
        from torchvision.transforms import v2

        name, scale = name_of(op), getattr(op, "scale", True)
        makes_tensors = name in ("ToTensor", "PILToTensor", "ToImage")
        if self.pictures and not (self.is_tensor or makes_tensors):
            self._add(op, None, "nothing to do", "it lets PIL images pass")
            return
        self.is_tensor = True
        if makes_tensors or name == "ToPureTensor":
            self.kind = tv_tensors.Image if name == "ToImage" else torch.Tensor
        # torchvision reads the default dtype at each call, and it is read here once.
        dtype = torch.get_default_dtype() if name == "ToTensor" else image_dtype(op, self.kind)
        if dtype is None or dtype == self.dtype:
            self._add(op, None, "nothing to do")
        elif name == "ToTensor" and not self.sized:
            self._add(op, None, "fused launch", "its result is in [0, 1]")
            self.cast = dtype if dtype != torch.float32 else None
        elif (self.dtype, dtype, scale) != (torch.uint8, torch.float32, True):
            self._take_on_batch(v2.ToDtype(dtype, scale=scale), source=op)
            self.holds_float = dtype.is_floating_point
        elif self.holds_float:
            self._add(op, None, "fused launch", "its result is in [0, 1]")
        else:
            self._add(op, ToFloat(), "on the batch")
            self.holds_float = True
        self.dtype = dtype or self.dtype

    def _for_launch(self, op: Any) -> tuple[Transform | None, str]:
        """What may stand for an op in the launch, None where nothing can; and what differs."""
        import kornia.augmentation as K

        name, how = type(op).__name__, filter_of(op)
        if name in ("RandomHorizontalFlip", "RandomVerticalFlip"):
            return getattr(K, name)(p=op.p), ""
        if name == "Normalize" and self.is_float and self.sized:
            return K.Normalize(mean=_numbers(op.mean), std=_numbers(op.std)), ""
        if name == "CenterCrop":
            return CenterCrop(op.size), ""
        if name == "RandomCrop":
            black = op.padding_mode == "constant" and op.fill in (0, None)
            return RandomCrop(op) if black else None, ""
        if name not in _CROPS or how not in RESIZE_FILTERS:
            return None, ""
        note = "" if self.is_float else _UNROUNDED
        if "nearest" in how and self.is_tensor:
            note = ""
        elif "nearest" in how:
            note, how = _TIES, "nearest-exact"  # PIL's takes the pixel at the center
        elif self.is_tensor and not op.antialias:
            return None, ""
        elif how == "bicubic" and self.is_float:
            note = _CLIPPED
        if name == "RandomResizedCrop":
            return RandomResizedCrop(op.size, op.scale, op.ratio, how), note
        size = op.size[0] if op.size and len(op.size) == 1 else op.size
        return Resize(size, how, op.max_size), note

    def _fuses(self, module: Transform) -> bool:
        return not read_transforms([*self.transforms, module])[1]

    def _take_on_batch(self, op: Any, source: Any = None) -> None:
        name, note = type(op).__name__, ""
        _check_on_batch(op)
        if not self.sized and name not in _CROPS:
            reason = "it comes before the crop or resize that gives images one size"
            _refuse(op, reason, "Put it after the crop")
        if not self.sized and self._for_launch(op)[0] is not None:
            reason = "images are resized, padded or normalized already, and two are not one"
            _refuse(op, reason, "Leave out what does so before it")
        if not self.sized:
            takes = "the nearest pixel, or bilinear or bicubic filters with antialias"
            _refuse(op, f"the fused launch takes {takes}, and padding that is black")
        self._hold(self.is_float)
        if not self.is_tensor and hasattr(op, "antialias"):
            op = copy.copy(op)
            op.antialias = True  # PIL always does
            if filter_of(op) == "nearest":
                from torchvision.transforms import InterpolationMode

                op.interpolation = InterpolationMode.NEAREST_EXACT  # to the center, as PIL's is
                note = _TIES
        module, where = op, "torchvision v2 on the batch"
        if compiled(op) is not None:
            # Else the fused launch would give uint8, which this does not see.
            module, where = PerImage([ToFloat(), op] if self.is_float else op), "one program"
        elif name in _DRAWN:
            module, where = Loop(op), f"{where}, image by image"
        return self._add(source or op, module, where, note)


def _numbers(values: Sequence[float]) -> torch.Tensor:
    """A tensor whose dtype is not the default one, which may be too narrow."""
    return torch.tensor(values, dtype=torch.float32)


def _check_on_batch(op: Any) -> None:
    name = name_of(op)
    if name not in _KNOWN:
        _refuse(op, "it is not among the ops that can run on a batch")
    if getattr(op, "expand", False):
        _refuse(op, "expand=True gives images of different sizes")
    accepted = RESIZE_FILTERS if name in _CROPS else FILTERS
    if hasattr(op, "interpolation") and filter_of(op) not in accepted:
        _refuse(op, f"interpolation={filter_of(op)!r} is for PIL images only")
    for inner in flatten(op.transforms) if name in CONTAINERS else ():
        inner = twin(inner)
        _check_on_batch(inner)
        sizes = type(inner).__name__ in _CROPS | {"Pad"}
        if sizes or getattr(inner, "num_output_channels", 3) != 3:
            _refuse(inner, "by chance it would give images of different shapes")


def _refuse(op: Any, reason: str, advice: str = "Replace it") -> NoReturn:
    raise UnsupportedTransformError(
        f"{type(op).__name__} cannot move to the device: {reason}. {advice}, or let the workers "
        "decode, and run all up to it and the crop: accelerate(loader, keep_unknown=True)."
    )


def image_dtype(op: Any, kind: Any) -> torch.dtype | None:
    """What a conversion makes of images of ``kind``, None where it leaves their dtype."""
    from torchvision import tv_tensors

    dtype = getattr(op, "dtype", None)
    if isinstance(dtype, dict):
        keys: Sequence[Any] = (kind,) if kind else (tv_tensors.Image, torch.Tensor)
        dtype = next((dtype[key] for key in (*keys, "others") if key in dtype), None)
    return dtype
