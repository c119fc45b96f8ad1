"""Read a list of transforms: which become one launch on ragged images, and what runs after it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.policies.known import constants, name_of
from gpuprefetch.transforms.launch import coloring, resample
from gpuprefetch.transforms.random import Keys, fold
from gpuprefetch.transforms.reference import Ints
from gpuprefetch.transforms.sampling import (
    CenterCropOp,
    FlipOp,
    Floats,
    HeadOp,
    RandomCropOp,
    ResizedCropOp,
    ResizeOp,
    Sampling,
    Size,
)
from gpuprefetch.transforms.views import Views


def _pair(size: int | Sequence[int], name: str) -> Size:
    pair = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(pair) != 2 or not all(isinstance(s, (int, np.integer)) and s > 0 for s in pair):
        raise ValueError(f"{name}(size=...) takes a positive int or (height, width), got {size!r}.")
    return int(pair[0]), int(pair[1])


RESIZE_FILTERS = ("nearest", "nearest-exact", "bilinear", "bicubic")
_OF_PIL = {0: "nearest-exact", 2: "bilinear", 3: "bicubic"}


def _filter(interpolation: Any) -> str:
    """The name of a filter, which torchvision's InterpolationMode and PIL's Resampling have too."""
    name = getattr(interpolation, "value", interpolation)
    name = _OF_PIL.get(name, name) if isinstance(name, int) else name
    if name not in RESIZE_FILTERS:
        raise ValueError(f"interpolation must be one of {RESIZE_FILTERS}, got {interpolation!r}.")
    return str(name)


@dataclass(frozen=True, slots=True)
class Head:
    """The fused part of a list; picklable, so that workers can draw its parameters."""

    ops: tuple[HeadOp, ...] = ()
    size: Size | None = None  # None where the list does not fix it
    interpolation: str = "bilinear"
    antialias: bool = True
    mean: list[float] | None = None  # in [0, 1] units
    std: list[float] | None = None
    names: tuple[str, ...] = ()  # of the ops and of a Normalize
    dtype: torch.dtype | None = None  # None for float32, or that of floating-point images
    memory_format: torch.memory_format | None = None

    def empty(self, count: int, device: torch.device | str) -> torch.Tensor:
        """``(count, 3, H, W)``, not initialized, for what it makes of decoded images."""
        assert self.size is not None
        return torch.empty(
            (count, 3, *self.size),
            dtype=self.dtype or torch.float32,
            device=device,
            memory_format=self.memory_format or torch.contiguous_format,
        )

    @property
    def colors(self) -> Ints:
        return coloring(3, torch.uint8, self.dtype or torch.float32, self.mean, self.std)

    def sample(
        self, sizes: npt.ArrayLike, keys: Keys, leaders: npt.ArrayLike | None = None
    ) -> Sampling:
        """The sampling of images of ``sizes`` ``(N, 2)`` with ``(N,)`` keys.

        ``leaders`` ``(N, 2)`` are the sizes of the first image of each one's sample, if these have
        several.
        """
        sampling = Sampling.identity(sizes)
        if leaders is None or np.array_equal(sizes, leaders):
            for position, op in enumerate(self.ops):
                sampling = op(sampling, fold(keys, position))
            return sampling
        leading = Sampling.identity(leaders)
        for position, op in enumerate(self.ops):
            own = fold(keys, position)
            sampling = op(sampling, own, like=leading.length)
            leading = op(leading, own)
        return sampling

    def draw(
        self, sizes: npt.ArrayLike, keys: Keys, leaders: npt.ArrayLike | None = None
    ) -> Floats:
        return self.sample(sizes, keys, leaders).rows()

    def resample(
        self,
        images: Sequence[torch.Tensor],
        rows: Floats,
        size: Size,
        *,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
        out: torch.Tensor | None = None,
        positions: Ints | None = None,
    ) -> torch.Tensor:
        """Carry the rows out on images ``(C, H_i, W_i)``: a new tensor, or rows of ``out``."""
        return resample(
            images,
            rows,
            size,
            interpolation=self.interpolation,
            antialias=self.antialias,
            mean=self.mean,
            std=self.std,
            dtype=dtype,
            memory_format=memory_format,
            out=out,
            positions=positions,
        )

    def resample_into(
        self, out: torch.Tensor, positions: Ints, images: Sequence[torch.Tensor], rows: Floats
    ) -> None:
        """Carry the rows out on images ``(C, H_i, W_i)``, into the rows ``positions`` of ``out``.

        For images 0 and 1 of a batch at rows 5 and 2 of it: ``positions`` is ``[5, 2]``.
        """
        height, width = out.shape[2:]
        self.resample(images, rows, (height, width), out=out, positions=positions)


class _FusedTransform(torch.nn.Module):
    """A transform of this library: one of the fused transforms in a list, a module elsewhere."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Transform a batch of equal-size images.

        Args:
            images: ``(N, C, H, W)`` or ``(C, H, W)``, uint8 or floating point; left untouched.

        Returns:
            ``(N, C, h, w)``: floating point as it came, uint8 as float32 in [0, 1].
        """
        if not isinstance(images, torch.Tensor):
            raise TypeError(
                f"{type(self).__name__} takes a tensor, got {type(images).__name__}. Give it to "
                "DataPrefetcher(transforms=[...]), and let the dataset return EncodedImage."
            )
        images = images if images.dim() == 4 else images[None]
        head = _extended(Head(), self, self.op)
        assert head is not None  # one op alone always fits
        keys = fold(int(torch.randint(2**62, ())), np.arange(len(images)))
        return apply_head(head, images, keys)

    def extra_repr(self) -> str:
        names = (name for name in ("size", "interpolation") if hasattr(self.op, name))
        return ", ".join(f"{name}={getattr(self.op, name)!r}" for name in names)


class RandomResizedCrop(_FusedTransform):
    """Crop a random part of each image and resize it, antialiased as PIL does.

    The distribution is torchvision's (and kornia's): area uniform in ``scale``, aspect ratio
    log-uniform in ``ratio``, ten tries, then the largest centered crop (Szegedy et al., "Going
    Deeper with Convolutions", CVPR 2015).

    Args:
        size: result, an int for a square or ``(height, width)``, in pixels.
        scale: range of the crop's share of the area; a draw above 1 fits no image and is repeated.
        ratio: range of width / height.
        interpolation: ``"bilinear"``, ``"bicubic"``, ``"nearest"`` (torch's) or ``"nearest-exact"``
            (PIL's NEAREST), or torchvision's ``InterpolationMode``.

    Raises:
        ValueError: for a size, range or interpolation that is not one of these.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        interpolation: Any = "bilinear",
    ) -> None:
        for name, value, least in (("scale", scale, 0.0), ("ratio", ratio, math.ulp(0.0))):
            if np.shape(value) != (2,) or not least <= value[0] <= value[1] < math.inf:
                above = "<" if least else "<="
                raise ValueError(
                    f"{name} must be (low, high) with 0 {above} low <= high, got {value!r}."
                )
        pair = _pair(size, "RandomResizedCrop")
        super().__init__(ResizedCropOp(pair, tuple(scale), tuple(ratio), _filter(interpolation)))


class Resize(_FusedTransform):
    """Resize each image, antialiased as PIL does.

    Args:
        size: an int is the shorter side, the longer one follows (truncated, as in torchvision);
            ``(height, width)`` is the exact result. In pixels.
        interpolation: ``"bilinear"``, ``"bicubic"``, ``"nearest"`` (torch's) or ``"nearest-exact"``
            (PIL's NEAREST), or torchvision's ``InterpolationMode``.
        max_size: the longer side at most, in pixels, for an int ``size``; with ``size=None`` the
            longer side.

    Raises:
        ValueError: for a size or interpolation that is not one of these.
    """

    def __init__(
        self,
        size: int | Sequence[int] | None,
        interpolation: Any = "bilinear",
        max_size: int | None = None,
    ) -> None:
        pair = None if size is None and max_size else _pair(size, "Resize")  # type: ignore[arg-type]
        exact = pair if isinstance(size, Sequence) or pair is None else pair[0]
        if max_size is not None and (isinstance(exact, tuple) or max_size <= (exact or 0)):
            raise ValueError(
                "Resize(max_size=...) takes the longer side at most, above an int size, got "
                f"size={size!r} and max_size={max_size!r}."
            )
        super().__init__(ResizeOp(exact, _filter(interpolation), max_size=max_size))


class CenterCrop(_FusedTransform):
    """Cut the middle out of each image; a smaller image is padded with zeros, as in torchvision.

    Args:
        size: result, an int for a square or ``(height, width)``, in pixels.

    Raises:
        ValueError: for a size that is not one of these.
    """

    def __init__(self, size: int | Sequence[int]) -> None:
        super().__init__(CenterCropOp(_pair(size, "CenterCrop"), pad=True))


def _is_fused(transform: Any) -> bool:
    """Whether a transform is this library's own; a subclass that does something else is not."""
    kind = type(transform)
    return isinstance(transform, _FusedTransform) and kind.forward is _FusedTransform.forward


def is_kornia(transform: Any) -> bool:
    """Whether a transform is of kornia's, or of a class derived from one."""
    return any(kind.__module__.startswith("kornia.") for kind in type(transform).__mro__)


def _kornia_op(transform: Any) -> HeadOp | None:
    """The fused form of a kornia module; None where it has none, and for anything else."""
    if not type(transform).__module__.startswith("kornia."):
        return None
    import kornia.augmentation as K

    kind, flags = type(transform), getattr(transform, "flags", {})
    size: Any = flags.get("size")
    if kind in (K.RandomHorizontalFlip, K.RandomVerticalFlip):
        axis = int(kind is K.RandomHorizontalFlip)
        return FlipOp(axis, float(transform.p), float(transform.p_batch), transform.same_on_batch)
    if getattr(transform, "p_batch", 1.0) != 1.0:
        return None  # a crop that is sometimes skipped has no fixed size
    if kind is K.CenterCrop:
        return CenterCropOp(_pair(size, "CenterCrop"), pad=False)
    if kind is K.RandomCrop and flags["padding"] is None and not flags["pad_if_needed"]:
        return RandomCropOp(_pair(size, "RandomCrop"), transform.same_on_batch)
    if getattr(flags.get("resample"), "name", "") != "BILINEAR":
        return None
    align = bool(flags.get("align_corners"))
    if kind is K.RandomResizedCrop and (align or flags["cropping_mode"] == "slice"):
        drawn = transform._param_generator
        return ResizedCropOp(
            _pair(size, "RandomResizedCrop"),
            tuple(map(float, drawn.scale)),
            tuple(map(float, drawn.ratio)),
            antialias=False,
            align_corners=align,
            centered_fallback=False,
            same_on_batch=transform.same_on_batch,
        )
    short = isinstance(size, int)
    if kind is K.Resize and not flags["antialias"] and (not short or flags["side"] == "short"):
        size = size if short else _pair(size, "Resize")
        return ResizeOp(size, antialias=False, align_corners=align)
    return None


_RESIZES = (ResizedCropOp, ResizeOp)


def _extended(head: Head, transform: Any, op: Any = None) -> Head | None:
    """The fused transforms and one more; None where they do not compose into one resampling."""
    names = (*head.names, type(transform).__name__)
    theirs = name_of(transform) if head.names else None  # torchvision's keep uint8, and a head not
    kornias = type(transform).__module__.startswith("kornia.augmentation.")
    if theirs == "Normalize" or (kornias and names[-1] == "Normalize"):
        if head.mean is not None or float(getattr(transform, "p", 1.0)) != 1.0:
            return None
        found = constants(transform)
        assert found is not None, "both libraries' Normalize have them"
        return replace(head, mean=found[0], std=found[1], names=names)
    if theirs in ("RandomHorizontalFlip", "RandomVerticalFlip"):
        op = FlipOp(int(theirs == "RandomHorizontalFlip"), float(transform.p), 1.0, False)
    op = op or (transform.op if _is_fused(transform) else _kornia_op(transform))
    if op is None or (head.mean is not None and not isinstance(op, FlipOp)):
        return None  # padding and blending come before the normalization they would change
    longer = replace(head, ops=(*head.ops, op), names=names)
    if not isinstance(op, _RESIZES):
        return replace(longer, size=getattr(op, "size", head.size))
    if any(isinstance(done, _RESIZES) or getattr(done, "pad", False) for done in head.ops):
        return None  # two resamplings in a row are not one
    size = op.size if isinstance(op.size, tuple) else None
    interpolation = op.interpolation.removesuffix("-exact")  # what differs is the sampling
    return replace(longer, size=size, interpolation=interpolation, antialias=op.antialias)


Transform = Callable[..., Any]


def read_transforms(transforms: Sequence[Transform] | None) -> tuple[Head, list[Transform]]:
    """Split a list into the transforms that are fused into one launch, and those after it."""
    if not isinstance(transforms, Sequence | None):
        raise TypeError(
            f"transforms takes a list of modules and callables, got {type(transforms).__name__}."
        )
    tail = [*(transforms or ())]
    if any(isinstance(transform, Views) for transform in tail):
        raise TypeError(
            "Views takes the place of the list. Repeat in each of its lists what all views have in "
            "common: transforms=Views([crop, normalize], [crop, normalize])."
        )
    for transform in tail:
        if not callable(transform) or isinstance(transform, type):
            raise TypeError(
                f"transforms takes a list of modules and callables, got {transform!r} in it. "
                "Pass an instance, as in K.RandomHorizontalFlip(), and several lists as Views."
            )
    head = Head()
    while tail and (longer := _extended(head, tail[0])) is not None:
        head, tail = longer, tail[1:]
    return head, tail


def require_fixed_size(head: Head, tail: Sequence[Transform]) -> None:
    if head.size is not None:
        return
    names = ", ".join(head.names)
    stop = names or "an empty list"
    hint = (
        "Start the list with a crop for training, or with Resize(256) and CenterCrop(224) for "
        "validation (kornia's work as well, if bilinear, p=1 and without padding): "
        "transforms=[gpuprefetch.RandomResizedCrop(224), ...]."
    )
    if tail:
        first = getattr(tail[0], "__name__", type(tail[0]).__name__)
        stop = f"{first} after {names}" if names else f"{first} comes first and"
        if type(getattr(tail[0], "op", tail[0])).__module__.startswith("torchvision."):
            hint = "Write transforms=gpuprefetch.convert_transforms(pipeline)."
        elif type(tail[0]).__module__.startswith("kornia.augmentation.container"):
            hint = f"The parts of {first} are hidden in it. Write transforms=[*pipeline]."
        elif "Resize" in names and "Resize" in first:
            hint = f"Two resizes are not one. Leave {names} out: transforms=[{first}(224), ...]."
    raise ValueError(
        f"Decoded photos have different sizes, and {stop} does not give them the one that "
        f"transforms, dtype and memory_format need. {hint}"
    )


def apply_head(
    head: Head,
    images: torch.Tensor,
    keys: Keys,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """Run the fused transforms on images ``(N, C, H, W)`` with ``(N,)`` keys.

    A head without a size of its own keeps that of the images. ``dtype`` is float32 by default for
    uint8, else that of the images.
    """
    rows = head.draw([images.shape[-2:]] * len(images), keys)
    size = head.size
    if size is None:
        one = head.sample([images.shape[-2:]], fold(0, [0]))
        size = tuple(one.length[0].astype(int).tolist())
    dtype = dtype or (images.dtype if images.is_floating_point() else torch.float32)
    if not len(images):
        return images.new_empty((0, images.shape[1], *size), dtype=dtype)
    layout = memory_format or torch.contiguous_format
    return head.resample(list(images.unbind()), rows, size, dtype=dtype, memory_format=layout)
