"""Where the pixels of a result come from, and the crops, resizes and flips that move it.

Every fused op moves a map: output index -> source coordinate, per image and axis. A list of
them composes into one map, and one resampling launch carries it out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.transforms.random import Keys, derive, fold, uniform

Size = tuple[int, int]
Box = tuple[int, int, int, int]  # top, left, height, width
Floats = npt.NDArray[np.float64]
# (height, width) of all images of a batch, or (N, 2) of each.
Sizes = Size | npt.NDArray[np.int64]


def areas(sizes: Sizes, count: int) -> npt.NDArray[np.int64]:
    """``(count,)``, the pixels of each image."""
    return np.broadcast_to(np.prod(np.asarray(sizes, np.int64), axis=-1), count)


def size_at(sizes: Sizes, position: int) -> Size:
    """(height, width) of one image."""
    height, width = sizes[position].tolist() if isinstance(sizes, np.ndarray) else sizes
    return height, width


class LeftOut(NamedTuple):
    """Boxes that a crop among boxes has left out: all that remains of one is the crop's corner."""

    boxes: npt.NDArray[np.bool_]  # (P,), which of an image's boxes
    corner: Floats  # (2,), y and x in the image, whose pixel k reaches from k to k + 1


@dataclass(slots=True)
class Sampling:
    """Where each output pixel of N images comes from; every array is ``(N, 2)``, y then x.

    Output index ``j`` has its center at source coordinate ``origin + step * j`` (pixel ``k`` has
    its center at ``k``). Source pixels outside ``[low, high)`` do not exist for it; output pixels
    outside ``[first, last)`` are padding. ``length`` is the current size.

    A width of 400, of which 100 pixels from 50 are resized to 200 and mirrored::

                          origin  step   low  high  first  last  length
        identity            0      1       0   400     0    400    400
        crop(50, 100)      50      1       0   400     0    100    100
        clip()             50      1      50   150     0    100    100
        resize(200)        49.75   0.5    50   150     0    200    200
        flip()            149.25  -0.5    50   150     0    200    200
    """

    origin: Floats
    step: Floats
    low: Floats
    high: Floats
    first: Floats
    last: Floats
    length: Floats
    left_out: tuple[LeftOut | None, ...] = ()  # one an image; empty without a crop among boxes
    # (N, 2, 2), between which coordinates of the image crops have left something: boxes end there,
    # also if padding follows. Infinite where nothing is cut off; None where nobody asks.
    cuts: Floats | None = None

    @staticmethod
    def identity(sizes: npt.ArrayLike, *, with_cuts: bool = False) -> "Sampling":
        """The map that leaves images of ``sizes`` ``(N, 2)`` as they are."""
        length = np.asarray(sizes, dtype=np.float64).reshape(-1, 2)
        zero = np.zeros_like(length)
        cuts = np.stack([zero - np.inf, zero + np.inf], axis=-1) if with_cuts else None
        return Sampling(zero, zero + 1, zero, length, zero, length, length, cuts=cuts)

    def crop(self, start: Floats, size: Floats) -> Self:
        """Keep ``size`` pixels from ``start``; what lies outside of the image is padding."""
        return replace(
            self,
            origin=self.origin + self.step * start,
            first=np.clip(self.first - start, 0, size),
            last=np.clip(self.last - start, 0, size),
            length=size,
            cuts=self._cut(start, start + size),
        )

    def _cut(self, start: Floats, stop: Floats) -> Floats | None:
        if self.cuts is None:
            return None
        far = np.where(self.step < 0, -np.inf, np.inf)
        first = np.where(start > 0, self.border(start), -far)
        last = np.where(stop < self.length, self.border(stop), far)
        low, high = np.moveaxis(self.cuts, -1, 0)
        low = np.maximum(low, np.minimum(first, last))
        return np.stack([low, np.minimum(high, np.maximum(first, last))], axis=-1)

    def border(self, index: Floats) -> Floats:
        """Where in the image output pixels ``index`` begin; its pixel k reaches from k to k + 1."""
        border: Floats = self.origin + self.step * (index - 0.5) + 0.5
        return border

    def clip(self) -> Self:
        """Forget what a crop left out: as in PIL, a later resize does not blend it in."""
        a = self.origin + self.step * self.first
        b = self.origin + self.step * (self.last - 1)
        low = np.maximum(self.low, np.minimum(a, b))
        return replace(self, low=low, high=np.minimum(self.high, np.maximum(a, b) + 1))

    def resize(
        self, size: Floats, *, align_corners: bool = False, first_pixel: bool = False
    ) -> Self:
        """Stretch the image to ``size``.

        A row of 4 pixels, resized to 2, has its new centers at

        - 0.5 and 2.5 by default, on the half-pixel grid: each in the middle of two pixels;
        - 0 and 3 with ``align_corners``: in those of the outermost pixels;
        - -0.5 and 1.5 with ``first_pixel``: at the border before a pixel, where torch's "nearest"
          takes the first of the pixels that become one.
        """
        shift: Floats | float
        if align_corners:
            scale = (self.length - 1) / np.maximum(size - 1, 1)
            shift = 0.0
        else:
            scale = self.length / size
            shift = -0.5 if first_pixel else 0.5 * scale - 0.5
        return replace(
            self,
            origin=self.origin + self.step * shift,
            step=self.step * scale,
            first=np.zeros_like(size),
            last=size,
            length=size,
        )

    def flip(self, where: npt.NDArray[np.bool_]) -> Self:
        """Mirror the axes that ``where`` ``(N, 2)`` selects."""
        return replace(
            self,
            origin=np.where(where, self.origin + self.step * (self.length - 1), self.origin),
            step=np.where(where, -self.step, self.step),
            first=np.where(where, self.length - self.last, self.first),
            last=np.where(where, self.length - self.first, self.last),
        )

    def rows(self) -> Floats:
        """``(N, 2, 6)``, as :func:`.launch.resample` takes them."""
        return np.stack([self.origin, self.step, self.low, self.high, self.first, self.last], -1)


class OneSampling(NamedTuple):
    """How one image is sampled: its row, ``(2, 6)``, and the (height, width) of its result."""

    row: Floats
    size: Size
    left_out: LeftOut | None = None
    cuts: Floats | None = None  # (2, 2)


def each_of(sampling: Sampling) -> list[OneSampling]:
    """The sampling of each image."""
    sizes = [(height, width) for height, width in sampling.length.astype(np.int64).tolist()]
    left_out = sampling.left_out or [None] * len(sizes)
    cuts = [None] * len(sizes) if sampling.cuts is None else sampling.cuts
    return [*map(OneSampling, sampling.rows(), sizes, left_out, cuts)]


class HeadOp(Protocol):
    """One of the fused crops, resizes and flips; picklable, as the workers sample its parameters.

    Images of one sample have the same key. A random part of them is chosen for the first one, whose
    size ``like`` ``(N, 2)`` is at this point of the list: None where all images have their own.
    """

    def __call__(self, sampling: Sampling, keys: Keys, like: Floats | None = None) -> Sampling:
        """Compose the op, with parameters sampled from the ``(N,)`` keys, onto a sampling."""


def _sampled(keys: Keys, count: int, same_on_batch: bool) -> Floats:
    """``(N, count)`` in [0, 1): of each key, or of the first one for all."""
    return uniform(np.broadcast_to(keys[:1], keys.shape) if same_on_batch else keys, count)


@dataclass(frozen=True, slots=True)
class ResizedCropOp:
    """A random part, brought to ``size``: Inception-style (Szegedy et al., 2015)."""

    size: Size
    scale: tuple[float, ...]  # low, high
    ratio: tuple[float, ...]
    interpolation: str = "bilinear"
    antialias: bool = True
    align_corners: bool = False
    centered_fallback: bool = True
    same_on_batch: bool = False

    def __call__(self, sampling: Sampling, keys: Keys, like: Floats | None = None) -> Sampling:
        start, box = self._part(sampling.length if like is None else like, keys)
        if like is not None:  # the same part of a picture of another size
            scale = sampling.length / like
            low = np.minimum(np.rint(start * scale), sampling.length - 1)
            high = np.maximum(np.rint((start + box) * scale), low + 1)
            start = low
            box = high - low
        cropped = sampling.crop(start, box).clip()
        size = np.full_like(sampling.length, self.size)
        return cropped.resize(
            size, align_corners=self.align_corners, first_pixel=self.interpolation == "nearest"
        )

    def _part(self, length: Floats, keys: Keys) -> tuple[Floats, Floats]:
        """First pixel and size of the part of pictures of this size, ``(N, 2)`` each."""
        u = _sampled(keys, 22, self.same_on_batch)  # ten areas, ten aspect ratios, the place
        height, width = np.split(length, 2, axis=1)
        area = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * u[:, :10])
        low, high = map(math.log, self.ratio)
        aspect = np.exp(low + (high - low) * u[:, 10:20])
        w = np.rint(np.sqrt(area * aspect))
        h = np.rint(np.sqrt(area / aspect))
        fits = np.asarray((w > 0) & (w <= width) & (h > 0) & (h <= height))
        row = np.arange(len(w))
        choice = fits.argmax(axis=1)
        found = np.asarray(fits.any(axis=1))
        box = np.stack([h[row, choice], w[row, choice]], axis=1)
        largest_h = np.clip(np.rint(width / min(self.ratio)), 1, height)
        largest_w = np.clip(np.rint(height * max(self.ratio)), 1, width)
        box = np.where(found[:, None], box, np.concatenate([largest_h, largest_w], axis=1))
        start = np.floor(u[:, 20:] * (length - box + 1))
        if self.centered_fallback:
            start = np.where(found[:, None], start, np.floor((length - box) / 2))
        return start, box


# Chooses a part: of a seed, and of the height and width of a picture.
Choose = Callable[[int, int, int], Box]


def _whole(seed: int, height: int, width: int) -> Box:
    return 0, 0, height, width


def _chosen(choose: Choose, length: Floats, keys: Keys) -> tuple[Floats, Floats]:
    """First pixel and size of what ``choose`` takes of pictures of this size, ``(N, 2)`` each."""
    boxes = np.zeros((len(keys), 4))
    for row, (key, size) in enumerate(zip(keys, length.astype(int).tolist(), strict=True)):
        boxes[row] = choose(derive(key, 0), *size)
    return boxes[:, :2], boxes[:, 2:]


@dataclass(frozen=True, slots=True)
class ChosenPartOp(ResizedCropOp):
    """A part that the user's own code chooses, brought to ``size``."""

    choose: Choose = _whole

    def _part(self, length: Floats, keys: Keys) -> tuple[Floats, Floats]:
        return _chosen(self.choose, length, keys)


def _scaled(length: Floats, one: Floats, to: float | Floats) -> Floats:
    """Sizes with the side ``one`` of ``length`` brought to ``to``, and the other after it."""
    # Truncated, not rounded, as torchvision and kornia do.
    return np.where(length == one, np.float64(to), np.floor(to * length / one))


@dataclass(frozen=True, slots=True)
class ResizeOp:
    """The whole image, brought to ``size``."""

    size: int | Size | None  # an int is the shorter side
    interpolation: str = "bilinear"
    antialias: bool = True
    align_corners: bool = False
    max_size: int | None = None  # of the longer side; it is that where there is no size

    def __call__(self, sampling: Sampling, keys: Keys, like: Floats | None = None) -> Sampling:
        size = sampling.length
        if isinstance(self.size, tuple):
            size = np.full_like(size, self.size)
        elif self.size is not None:
            size = _scaled(size, size.min(axis=1, keepdims=True), self.size)
        if self.max_size is not None:
            long = size.max(axis=1, keepdims=True)
            limited = np.maximum(_scaled(size, long, self.max_size), 1)
            size = np.where((long > self.max_size) | (self.size is None), limited, size)
        return sampling.clip().resize(
            size, align_corners=self.align_corners, first_pixel=self.interpolation == "nearest"
        )


class SizeRule(Protocol):
    """How the size of a result comes from the size of the image, and from a number."""

    def __call__(self, length: Floats, u: Floats) -> Floats:
        """``(N, 2)`` sizes of images of ``length`` ``(N, 2)``; ``u`` ``(N, 1)`` is in [0, 1)."""


@dataclass(frozen=True, slots=True)
class ShorterSide:
    """The shorter side is one of the integers from ``low`` up to ``high``, which is not taken."""

    low: int
    high: int

    def __call__(self, length: Floats, u: Floats) -> Floats:
        to = self.low + np.floor(u * (self.high - self.low))
        return _scaled(length, length.min(axis=1, keepdims=True), to)


@dataclass(frozen=True, slots=True)
class ShortestSize:
    """The shorter side is one of ``sizes``, or less where the longer one would exceed a limit."""

    sizes: tuple[int, ...]
    max_size: int | None

    def __call__(self, length: Floats, u: Floats) -> Floats:
        to = np.array(self.sizes, np.float64)[np.floor(u * len(self.sizes)).astype(np.int64)]
        ratio = to / length.min(axis=1, keepdims=True)
        if self.max_size is not None:
            ratio = np.minimum(ratio, self.max_size / length.max(axis=1, keepdims=True))
        size: Floats = np.floor(length * ratio)
        return size


@dataclass(frozen=True, slots=True)
class JitteredScale:
    """The image fits into ``size``, and is scaled by a number of a range then.

    torchvision compares the height with the width of ``size``, which this does, too. It computes in
    float32, and so it is here: sizes are truncated, and would differ by a pixel.
    """

    size: Size
    scale: tuple[float, float]  # low, high

    def __call__(self, length: Floats, u: Floats) -> Floats:
        low, high = self.scale
        scale = np.float32(low) + u.astype(np.float32) * np.float32(high - low)
        fits = (np.array(self.size[::-1]) / length).min(axis=1, keepdims=True)
        sizes: Floats = np.floor(length.astype(np.float32) * (fits.astype(np.float32) * scale))
        return sizes.astype(np.float64)


@dataclass(frozen=True, slots=True)
class RandomSizeOp:
    """The whole image, brought to a size that is sampled for it."""

    rule: SizeRule
    interpolation: str = "bilinear"
    antialias: bool = True

    def __call__(self, sampling: Sampling, keys: Keys, like: Floats | None = None) -> Sampling:
        # A side of a long picture would have no pixel.
        size = np.maximum(self.rule(sampling.length, uniform(keys, 1)), 1)
        return sampling.clip().resize(size, first_pixel=self.interpolation == "nearest")


class FittedSize(Protocol):
    """How the size of a result comes from the size of the image alone."""

    def __call__(self, length: Floats) -> Floats:
        """``(N, 2)`` sizes of images of ``length`` ``(N, 2)``."""


@dataclass(frozen=True, slots=True)
class SmartSize:
    """Multiples of ``factor`` near the sides, with a number of pixels within two bounds.

    These are the sizes of Qwen2-VL's image processor, in the order of its float64 operations.
    """

    factor: int
    min_pixels: int
    max_pixels: int

    def __call__(self, length: Floats) -> Floats:
        area = length.prod(axis=1, keepdims=True)
        near = np.rint(length / self.factor) * self.factor
        pixels = near.prod(axis=1, keepdims=True)
        shrink = np.sqrt(area / self.max_pixels)
        smaller = np.floor(length / shrink / self.factor) * self.factor
        grow = np.sqrt(self.min_pixels / area)
        larger = np.ceil(length * grow / self.factor) * self.factor
        size = np.where(pixels < self.min_pixels, larger, near)
        return np.where(pixels > self.max_pixels, np.maximum(smaller, self.factor), size)


# Bounds of the scales that are searched, and how close the search comes: SigLIP2's.
_SCALES = (1e-6, 100.0)
_SCALE_STEP = 1e-5


@dataclass(frozen=True, slots=True)
class SequenceSize:
    """The largest multiples of ``patch_size`` that make at most a number of patches.

    The scale of an image is searched for by bisection, as SigLIP2's image processor does. A picture
    of any shape has one patch at least along each side.
    """

    patch_size: int
    max_num_patches: int

    def __call__(self, length: Floats) -> Floats:
        low, high = (np.full((len(length), 1), bound) for bound in _SCALES)
        while (high - low).max(initial=0) >= _SCALE_STEP:
            scale = (low + high) / 2
            patches = self._patches(length, scale).prod(axis=1, keepdims=True)
            fits = patches <= self.max_num_patches
            low = np.where(fits, scale, low)
            high = np.where(fits, high, scale)
        return self._patches(length, low) * self.patch_size

    def _patches(self, length: Floats, scale: Floats) -> Floats:
        patches: Floats = np.maximum(np.ceil(length * scale / self.patch_size), 1)
        return patches


@dataclass(frozen=True, slots=True)
class FittedResizeOp:
    """The whole image, brought to a size that follows from its own."""

    rule: FittedSize
    interpolation: str = "bilinear"
    antialias: bool = True

    def __call__(self, sampling: Sampling, keys: Keys, like: Floats | None = None) -> Sampling:
        size = self.rule(sampling.length)
        return sampling.clip().resize(size, first_pixel=self.interpolation == "nearest")


@dataclass(frozen=True, slots=True)
class CenterCropOp:
    """The middle of the image."""

    size: Size
    pad: bool  # torchvision pads a smaller image, kornia refuses it
    floors: bool = False  # Hugging Face's processors round the offset down

    def __call__(self, sampling: Sampling, keys: Keys, like: Floats | None = None) -> Sampling:
        size = np.full_like(sampling.length, self.size)
        room = sampling.length - size
        if not self.pad:
            _refuse_small(sampling, room, self.size, "CenterCrop")
            return sampling.crop(np.floor(room / 2), size)
        # torchvision rounds the offset half to even. All put the odd pixel of padding after.
        offset = np.floor(room / 2) if self.floors else np.rint(room / 2)
        return sampling.crop(np.where(room >= 0, offset, -np.floor(-room / 2)), size)


class Fill(NamedTuple):
    """What is in the padding."""

    image: tuple[float, ...]  # a level of each channel, 0 to 255
    mask: float | None  # None for a color, which no mask has


@dataclass(frozen=True, slots=True)
class LetterboxOp:
    """The whole image in the middle of ``size``, as large as it fits, with padding beside it."""

    size: Size
    fill: Fill
    interpolation: str = "bilinear"
    antialias: bool = True
    pad: bool = True

    def __call__(self, sampling: Sampling, keys: Keys, like: Floats | None = None) -> Sampling:
        length = sampling.length
        canvas = np.full_like(length, self.size)
        scale = (canvas / length).min(axis=1, keepdims=True)
        # Rounded half to even, and an odd pixel of padding goes after: as YOLO's letterbox has it.
        fitted = np.maximum(np.rint(length * scale), 1)
        resized = sampling.clip().resize(fitted, first_pixel=self.interpolation == "nearest")
        return resized.crop(-np.floor((canvas - fitted) / 2), canvas)


@dataclass(frozen=True, slots=True)
class RandomCropOp:
    """A random place of ``size`` pixels, at the scale of the image."""

    size: Size
    same_on_batch: bool = False
    before: Size = (0, 0)  # padding above, left
    after: Size = (0, 0)
    pad_if_needed: bool = False
    fill: Fill | None = None  # None for black, and 0 in masks

    def __call__(self, sampling: Sampling, keys: Keys, like: Floats | None = None) -> Sampling:
        size, before = (np.full_like(sampling.length, pair) for pair in (self.size, self.before))
        room = sampling.length + before + self.after - size
        if self.pad_if_needed:
            before += np.maximum(-room, 0)  # on both sides, as torchvision does
            room = np.abs(room)
        _refuse_small(sampling, room, self.size, "RandomCrop")
        if like is not None:
            _refuse_unlike(sampling, like, self.size)
        return sampling.crop(self._start(room, size, keys) - before, size)

    def _start(self, room: Floats, size: Floats, keys: Keys) -> Floats:
        """The first pixel of each image's part: ``room`` is what the part leaves of the image."""
        u = _sampled(keys, 2, self.same_on_batch)
        return np.floor(u * (room + 1))

    @property
    def pad(self) -> bool:
        return self.pad_if_needed or any(self.before + self.after)


@dataclass(frozen=True, slots=True)
class ZoomOutOp:
    """The image somewhere on a larger canvas, with probability ``p``."""

    side: tuple[float, float]  # low, high: of the canvas, in sides of the image
    p: float
    fill: Fill | None = None  # None for black, and 0 in masks
    pad: bool = True

    def __call__(self, sampling: Sampling, keys: Keys, like: Floats | None = None) -> Sampling:
        # In float32, as torchvision computes: sizes and places are truncated.
        u = uniform(keys, 4).astype(np.float32)
        low, high = self.side
        length = sampling.length
        ratio = np.float32(low) + u[:, :1] * np.float32(high - low)
        size = np.floor(length.astype(np.float32) * ratio).astype(np.float64)
        size = np.where(u[:, 3:] < self.p, size, length)
        room = (size - length).astype(np.float32)
        before = np.floor(room * u[:, 2:0:-1]).astype(np.float64)  # the left first
        return sampling.crop(-before, size)


class ChosenAmongBoxes(NamedTuple):
    """A part of a picture, and which of its boxes are within."""

    part: Box
    within: npt.NDArray[np.bool_]  # (P,)


# Chooses a part of a picture: of a seed, and of the boxes in it. None for the whole picture.
ChooseAmongBoxes = Callable[[int, object], ChosenAmongBoxes | None]
# The boxes of an image where it has been sampled this way; None for an image that nobody gets.
BoxesOf = Callable[[OneSampling], object] | None


@dataclass(frozen=True, slots=True)
class AmongBoxesOp:
    """A part of the image that is chosen among its boxes, at the scale of the image."""

    choose: ChooseAmongBoxes
    boxes: tuple[BoxesOf, ...] | None = None  # of the images of one batch; None before there is one

    def __call__(self, sampling: Sampling, keys: Keys, like: Floats | None = None) -> Sampling:
        if self.boxes is None:
            raise ValueError(
                "RandomIoUCrop chooses a part among boxes, and these images come without. Let the "
                "dataset return EncodedImage and tv_tensors.BoundingBoxes beside it."
            )
        if like is not None and (sampling.length != like).any():
            raise ValueError(
                "RandomIoUCrop cuts one part out of all images of a sample, and a sample has "
                "images of several sizes here. Put Resize((height, width)) before it."
            )
        start = np.zeros_like(sampling.length)
        size = sampling.length.copy()
        left_out = list(sampling.left_out or [None] * len(size))
        for n, (one, boxes) in enumerate(zip(each_of(sampling), self.boxes, strict=True)):
            chosen = None if boxes is None else self.choose(derive(keys[n], 0), boxes(one))
            if chosen is not None:
                start[n] = chosen.part[:2]
                size[n] = chosen.part[2:]
                left_out[n] = LeftOut(~chosen.within, sampling.border(start)[n])
        return replace(sampling.crop(start, size), left_out=tuple(left_out))


@dataclass(frozen=True, slots=True)
class ChosenPlaceOp(RandomCropOp):
    """A place of ``size`` pixels that the user's own code chooses."""

    choose: Choose = _whole  # of a padded picture

    def _start(self, room: Floats, size: Floats, keys: Keys) -> Floats:
        start, box = _chosen(self.choose, room + size, keys)
        if (box != size).any():
            other = box[(box != size).any(axis=1)][0].astype(int)
            raise ValueError(
                f"get_params of a RandomCrop{self.size} gave a part of {other[0]} x {other[1]} "
                "pixels. Let it give one of that size, or derive it from RandomResizedCrop."
            )
        return start


@dataclass(frozen=True, slots=True)
class PartOp:
    """A given part of the image, which may reach beyond it: a crop, or padding."""

    top: int
    left: int
    height: int
    width: int
    fill: Fill | None = None  # of what lies beyond; None for black, and 0 in masks
    pad: bool = False  # whether anything does

    def __call__(self, sampling: Sampling, keys: Keys, like: Floats | None = None) -> Sampling:
        start = np.full_like(sampling.length, (self.top, self.left))
        return sampling.crop(start, np.full_like(sampling.length, (self.height, self.width)))


@dataclass(frozen=True, slots=True)
class GivenOp:
    """What each image says itself: a worker has run the dataset's own transform for it.

    ``dtype`` is that of the results, None where other calls come after the launch.
    """

    interpolation: str = "bilinear"
    antialias: bool = True
    fill: Fill | None = None
    pad: bool = True
    dtype: torch.dtype | None = None

    def __call__(self, sampling: Sampling, keys: Keys, like: Floats | None = None) -> Sampling:
        raise ValueError(
            "The transform of the dataset runs on samples of the dataset, and these images are of "
            "none. Give their loader to accelerate(loader)."
        )


def _refuse_small(sampling: Sampling, room: Floats, size: Size, name: str) -> None:
    small = (room < 0).any(axis=1)
    if small.any():
        h, w = sampling.length[small][0].astype(int)
        raise ValueError(
            f"{name} takes no image smaller than its size {size}, got {h} x {w}. Put a Resize "
            "before it, or use gpuprefetch.CenterCrop or torchvision's "
            "RandomCrop(pad_if_needed=True), which pad."
        )


def _refuse_unlike(sampling: Sampling, like: Floats, size: Size) -> None:
    unlike = (sampling.length != like).any(axis=1)
    if unlike.any():
        first = like[unlike][0].astype(int)
        second = sampling.length[unlike][0].astype(int)
        raise ValueError(
            f"RandomCrop cuts the same {size} pixels out of all images of a sample, and a sample "
            f"has images of {first[0]} x {first[1]} and {second[0]} x {second[1]} pixels here. Put "
            "Resize((height, width)) before it, or use RandomResizedCrop, which takes the same "
            "part of each."
        )


@dataclass(frozen=True, slots=True)
class FlipOp:
    """A mirror image of one axis, with probability ``p``."""

    axis: int  # 0: vertical, 1: horizontal
    p: float
    p_batch: float
    same_on_batch: bool

    def __call__(self, sampling: Sampling, keys: Keys, like: Floats | None = None) -> Sampling:
        each = _sampled(keys, 1, self.same_on_batch) < self.p
        whole = _sampled(fold(keys, 1), 1, True) < self.p_batch
        return sampling.flip(each & whole & (np.arange(2) == self.axis))
