"""The fused transforms of a list, which become one launch on images of different sizes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.transforms.launch import Launches, Table, coloring, resample, resample_each
from gpuprefetch.transforms.pieces import Pieces, Places
from gpuprefetch.transforms.random import Keys, fold
from gpuprefetch.transforms.reference import Ints
from gpuprefetch.transforms.results import ResultForm, form_of
from gpuprefetch.transforms.sampling import (
    AmongBoxesOp,
    BoxesOf,
    CenterCropOp,
    Fill,
    FittedResizeOp,
    FlipOp,
    Floats,
    GivenOp,
    HeadOp,
    LetterboxOp,
    RandomSizeOp,
    ResizedCropOp,
    ResizeOp,
    Sampling,
    Size,
    Sizes,
    ZoomOutOp,
)

# What a list of transforms holds: a module, a transform of a library, or a function of the user's.
Transform = Callable[..., Any]


def pair(size: int | Sequence[int], name: str) -> Size:
    """(height, width) of the ``size`` of the transform ``name``; an int is both."""
    both = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(both) != 2 or not all(isinstance(s, (int, np.integer)) and s > 0 for s in both):
        raise ValueError(f"{name}(size=...) takes a positive int or (height, width), got {size!r}.")
    return int(both[0]), int(both[1])


LARGEST_SHARE = 10  # of an image's area, for a crop: who gives more means percent
RESIZE_FILTERS = ("nearest", "nearest-exact", "bilinear", "bicubic")
# A name, torchvision's InterpolationMode, or PIL's Resampling, which is an int.
Interpolation = str | int | Enum
_OF_PIL = {0: "nearest-exact", 2: "bilinear", 3: "bicubic"}


def filter_name(interpolation: Interpolation) -> str:
    """The name of a filter, which torchvision's InterpolationMode and PIL's Resampling have too."""
    name = getattr(interpolation, "value", interpolation)
    name = _OF_PIL.get(name, name) if isinstance(name, int) else name
    if name not in RESIZE_FILTERS:
        raise ValueError(f"interpolation must be one of {RESIZE_FILTERS}, got {interpolation!r}.")
    return str(name)


_RESIZES = (ResizedCropOp, ResizeOp, RandomSizeOp, FittedResizeOp, LetterboxOp, GivenOp)


@dataclass(frozen=True, slots=True)
class Head:
    """The fused part of a list; picklable, so that workers can sample its parameters."""

    ops: tuple[HeadOp, ...] = ()
    size: Sizes | None = None  # None where the list does not fix it
    # What a batch becomes; None where decoded images are handed over as they are. Without a size
    # the images of each batch say it.
    form: ResultForm | None = None
    interpolation: str = "bilinear"
    antialias: bool = True
    mean: list[float] | None = None  # in [0, 1] units
    std: list[float] | None = None
    names: tuple[str, ...] = ()  # of the ops and of a Normalize
    dtype: torch.dtype | None = None  # None for float32, or that of floating-point images
    memory_format: torch.memory_format | None = None
    # Whether transforms run on the results of the launch, before they get their form.
    is_followed: bool = False

    def then(self, op: HeadOp, name: str) -> Self | None:
        """With one more op; None where they do not compose into one resampling.

        ``name`` is the one that the list has for it.
        """
        if self.mean is not None and not isinstance(op, FlipOp):
            return None  # padding and blending come before the normalization they would change
        longer = replace(self, ops=(*self.ops, op), names=(*self.names, name))
        if len({getattr(padding, "fill", None) for padding in longer._padding}) > 1:
            return None  # the launch has one color for all
        if isinstance(op, (AmongBoxesOp, ZoomOutOp)):
            return replace(longer, size=None)
        if not isinstance(op, _RESIZES):
            return replace(longer, size=getattr(op, "size", self.size))
        if self._padding or any(isinstance(done, _RESIZES) for done in self.ops):
            return None  # two resamplings in a row are not one
        size = getattr(op, "size", None)  # an int is that of one side
        return replace(
            longer,
            size=size if isinstance(size, tuple) else None,
            interpolation=op.interpolation.removesuffix("-exact"),  # which differs in the sampling
            antialias=op.antialias,
        )

    def normalized(self, mean: list[float], std: list[float]) -> Self | None:
        """With a Normalize; None after another one."""
        if self.mean is not None:
            return None
        return replace(self, mean=mean, std=std, names=(*self.names, "Normalize"))

    @property
    def asks_for_sizes(self) -> bool:
        """Whether the images of each batch say which sizes the results have."""
        return self.form is not None and (self.size is None or self.has_own_sizes)

    @property
    def gives_results(self) -> bool:
        """Whether a launch makes anything of decoded images, which are handed over otherwise."""
        return self.size is not None or self.form is not None

    @property
    def has_own_sizes(self) -> bool:
        """Whether each result has a size of its own."""
        return self.form is not None and self.form.has_own_sizes

    def listed(self) -> Self:
        """The same, whose results of their own sizes are handed over one by one."""
        return replace(self, form=form_of(own_sizes=True)) if self.has_own_sizes else self

    @property
    def is_given(self) -> bool:
        """Whether each image says itself how it is sampled."""
        return any(isinstance(op, GivenOp) for op in self.ops)

    @property
    def varies_size(self) -> bool:
        """Whether the sizes of results depend on those of the images, or on chance."""
        sizing = (*_RESIZES, AmongBoxesOp, ZoomOutOp)
        return self.size is None and any(isinstance(op, sizing) for op in self.ops)

    @property
    def asks_for_boxes(self) -> bool:
        """Whether a part is chosen among the boxes of each image."""
        return any(isinstance(op, AmongBoxesOp) for op in self.ops)

    def among(self, boxes: Sequence[BoxesOf]) -> Self:
        """For the images of one batch, which have these boxes."""
        ops = [
            replace(op, boxes=tuple(boxes)) if isinstance(op, AmongBoxesOp) else op
            for op in self.ops
        ]
        return replace(self, ops=tuple(ops))

    def sized(self, size: Sizes) -> Self:
        """For the images of one batch, whose results have this size, or these."""
        return replace(self, size=size) if self.asks_for_sizes else self

    @property
    def places(self) -> Places | None:
        """Where the results of a batch lie, if they have sizes of their own."""
        if not self.has_own_sizes:
            return None
        assert isinstance(self.size, np.ndarray)
        if self._writes_form:
            assert self.form is not None
            return self.form.places(self.size, self.memory_format)
        return Places.in_turn(self.size, self.memory_format)

    @property
    def _writes_form(self) -> bool:
        """Whether the launch writes results to where their form wants them."""
        return self.form is not None and self.form.takes_launch and not self.is_followed

    def empty(self, count: int, device: torch.device | str) -> torch.Tensor:
        """Memory for what it makes of ``count`` decoded images, not initialized.

        ``(count, 3, H, W)``, or any for results of their own sizes: see :meth:`results`.
        """
        assert self.size is not None
        places = self.places
        if places is not None:
            return self._empty_at(places, device)
        return torch.empty(
            (count, 3, *self.size),
            dtype=self.dtype or torch.float32,
            device=device,
            memory_format=self.memory_format or torch.contiguous_format,
        )

    def _empty_at(self, places: Places, device: torch.device | str) -> torch.Tensor:
        """Memory for results that lie at these places."""
        dtype = self.dtype or torch.float32
        if self.form is not None and self._writes_form:
            self.form.check(dtype)
        return places.empty(dtype, device)

    def compile(self, *, checked: bool) -> None:
        """Compile what launches a usual batch, for the current device; nothing is launched.

        Usual are pictures ``(H, W, 3)`` that leave no padding. Another batch, and results of their
        own sizes, have another kernel, which their first launch compiles.
        """
        if not isinstance(self.size, tuple) or self.dtype == torch.float64:
            return
        table = Table(words=None, firsts=[0, 1], steps=[3], padded=False)
        out = self.empty(1, "meta")
        launches = Launches(table, out, torch.uint8, self.interpolation, self.fill)
        launches.compile(checked=checked)

    def result_bytes(self, count: int) -> int:
        """Bytes that the results of ``count`` images need on the device until they are ready."""
        memory = self.empty(count, "meta")
        added = 0
        if self.form is not None and isinstance(self.size, np.ndarray) and not self._writes_form:
            added = self.form.added_values(self.size)
        return memory.nbytes + added * memory.element_size()

    def results(self, memory: torch.Tensor) -> torch.Tensor | Pieces:
        """The results of a batch in such memory: itself, or N images ``(3, H_i, W_i)`` in it."""
        places = self.places
        return memory if places is None else places.pieces(memory)

    def empty_results(self, count: int, device: torch.device | str) -> torch.Tensor | Pieces:
        """The results of a batch of ``count`` images in new memory, not initialized."""
        places = self.places
        if places is None:
            return self.empty(count, device)
        return places.pieces(self._empty_at(places, device))

    @property
    def _padding(self) -> list[HeadOp]:
        """The ops that may pad images."""
        return [op for op in self.ops if getattr(op, "pad", False)]

    @property
    def _fill(self) -> Fill | None:
        """What is in the padding; None for black, and 0 in masks."""
        fills = [getattr(op, "fill", None) for op in self._padding]
        return fills[0] if fills else None

    @property
    def fill(self) -> tuple[float, ...] | None:
        """The levels of padding, one for each channel; None for black."""
        return None if self._fill is None else self._fill.image

    @property
    def mask_fill(self) -> float | None:
        """The value of the padding of masks; None where the color is none for them."""
        return 0.0 if self._fill is None else self._fill.mask

    @property
    def colors(self) -> Ints:
        return coloring(3, torch.uint8, self.dtype or torch.float32, self.mean, self.std)

    def sample(
        self,
        sizes: npt.ArrayLike,
        keys: Keys,
        leaders: npt.ArrayLike | None = None,
        *,
        with_cuts: bool = False,
    ) -> Sampling:
        """The sampling of images of ``sizes`` ``(N, 2)`` with ``(N,)`` keys.

        ``leaders`` ``(N, 2)`` are the sizes of the first image of each one's sample, if these have
        several. ``with_cuts`` asks for what crops have left, which boxes need.
        """
        sampling = Sampling.identity(sizes, with_cuts=with_cuts)
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
            fill=self.fill,
            dtype=dtype,
            memory_format=memory_format,
            out=out,
            positions=positions,
        )

    def resample_into(
        self,
        out: torch.Tensor | Sequence[torch.Tensor],
        positions: Ints,
        images: Sequence[torch.Tensor],
        rows: Floats,
    ) -> None:
        """Carry the rows out on images ``(C, H_i, W_i)``, into results ``positions`` of a batch.

        For images 0 and 1 of a batch at rows 5 and 2 of it: ``positions`` is ``[5, 2]``.
        """
        if isinstance(out, torch.Tensor):
            height, width = out.shape[2:]
            self.resample(images, rows, (height, width), out=out, positions=positions)
            return
        resample_each(
            images,
            rows,
            [out[position] for position in positions.tolist()],
            interpolation=self.interpolation,
            antialias=self.antialias,
            mean=self.mean,
            std=self.std,
            fill=self.fill,
        )


class FusedTransform(torch.nn.Module):
    """A transform of this library: one of the fused transforms in a list, a module elsewhere."""

    def __init__(self, op: HeadOp) -> None:
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
        head = Head().then(self.op, type(self).__name__)
        assert head is not None  # one op alone always fits
        keys = fold(int(torch.randint(2**62, ())), np.arange(len(images)))
        return apply_head(head, images, keys)

    def extra_repr(self) -> str:
        names = (name for name in ("size", "interpolation") if hasattr(self.op, name))
        return ", ".join(f"{name}={getattr(self.op, name)!r}" for name in names)


class RandomResizedCrop(FusedTransform):
    """Crop a random part of each image and resize it, antialiased as PIL does.

    The distribution is torchvision's (and kornia's): area uniform in ``scale``, aspect ratio
    log-uniform in ``ratio``, ten tries, then the largest centered crop (Szegedy et al., "Going
    Deeper with Convolutions", CVPR 2015).

    Args:
        size: result, an int for a square or ``(height, width)``, in pixels.
        scale: range of the crop's share of the area; above 1 it fits no image and is sampled again,
            and above 10 it is an error.
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
        interpolation: Interpolation = "bilinear",
    ) -> None:
        for name, value, least in (("scale", scale, 0.0), ("ratio", ratio, math.ulp(0.0))):
            if np.shape(value) != (2,) or not least <= value[0] <= value[1] < math.inf:
                above = "<" if least else "<="
                advice = ""
                if isinstance(value, int) and name == "scale":
                    advice = f" For height and width write RandomResizedCrop(({size}, {value}))."
                raise ValueError(
                    f"{name} must be (low, high) with 0 {above} low <= high, got {value!r}.{advice}"
                )
        if scale[1] > LARGEST_SHARE:
            raise ValueError(
                f"scale is a share of the area, 0 to 1, got {scale!r}. For 8 to 100 percent write "
                "scale=(0.08, 1.0)."
            )
        exact = pair(size, "RandomResizedCrop")
        super().__init__(
            ResizedCropOp(exact, tuple(scale), tuple(ratio), filter_name(interpolation))
        )


class Resize(FusedTransform):
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
        interpolation: Interpolation = "bilinear",
        max_size: int | None = None,
    ) -> None:
        both = None if size is None and max_size else pair(size, "Resize")  # type: ignore[arg-type]
        exact = both if isinstance(size, Sequence) or both is None else both[0]
        if max_size is not None and (isinstance(exact, tuple) or max_size <= (exact or 0)):
            raise ValueError(
                "Resize(max_size=...) takes the longer side at most, above an int size, got "
                f"size={size!r} and max_size={max_size!r}."
            )
        super().__init__(ResizeOp(exact, filter_name(interpolation), max_size=max_size))


class CenterCrop(FusedTransform):
    """Cut the middle out of each image; a smaller image is padded with zeros, as in torchvision.

    Args:
        size: result, an int for a square or ``(height, width)``, in pixels.

    Raises:
        ValueError: for a size that is not one of these.
    """

    def __init__(self, size: int | Sequence[int]) -> None:
        super().__init__(CenterCropOp(pair(size, "CenterCrop"), pad=True))


def apply_head(
    head: Head,
    images: torch.Tensor,
    keys: Keys,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """Run the fused transforms on images ``(N, C, H, W)`` with ``(N,)`` keys.

    A head without a size keeps that of the images. ``dtype`` is float32 by default for
    uint8, else that of the images.
    """
    sampling = head.sample([images.shape[-2:]] * len(images), keys)
    rows = sampling.rows()
    if isinstance(head.size, tuple):
        size = head.size
    else:
        one = sampling if len(images) else head.sample([images.shape[-2:]], fold(0, [0]))
        if (one.length != one.length[0]).any():
            raise ValueError(
                f"{', '.join(head.names)} give each of {len(images)} images a size of its own, "
                "which a batch (N, C, H, W) cannot hold. Let the dataset return EncodedImage, "
                "whose results may be a list, or put v2.CenterCrop(224) after it."
            )
        height, width = one.length[0].astype(int).tolist()
        size = (height, width)
    dtype = dtype or (images.dtype if images.is_floating_point() else torch.float32)
    if not len(images):
        return images.new_empty((0, images.shape[1], *size), dtype=dtype)
    layout = memory_format or torch.contiguous_format
    return head.resample(list(images.unbind()), rows, size, dtype=dtype, memory_format=layout)
