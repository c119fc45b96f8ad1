"""Resizes to a size that follows from the image's own: for patches of vision transformers, YOLO."""

from collections.abc import Sequence

import numpy as np

from gpuprefetch.transforms.head import FusedTransform, Interpolation, filter_name, pair
from gpuprefetch.transforms.sampling import (
    Fill,
    FittedResizeOp,
    FittedSize,
    LetterboxOp,
    SequenceSize,
    Size,
    SmartSize,
)


class FittedResize(FusedTransform):
    """A resize whose sizes can be asked for."""

    def __init__(self, rule: FittedSize, interpolation: Interpolation) -> None:
        super().__init__(FittedResizeOp(rule, filter_name(interpolation)))
        self.rule = rule

    def size_of(self, height: int, width: int) -> Size:
        """The size that an image gets, as for counting its patches before it is decoded.

        Args:
            height: of the image, in pixels.
            width: of the same.

        Returns:
            Height and width of the result, in pixels.

        Raises:
            ValueError: for an image without pixels.
        """
        if min(height, width) < 1:
            raise ValueError(f"size_of takes a height and a width, 1 or more, got {height, width}.")
        ((high, wide),) = self.rule(np.array([[height, width]], np.float64)).astype(int).tolist()
        return high, wide

    def extra_repr(self) -> str:
        return repr(self.rule).partition("(")[2].removesuffix(")")


class SmartResize(FittedResize):
    """Resize each image to multiples of a factor, with a number of pixels within two bounds.

    The sizes are those of Qwen2-VL's image processor: each side is rounded to a multiple, and both
    are scaled alike where the area is out of bounds. The aspect ratio is kept as well as multiples
    allow. An image of more than 200:1, which that processor refuses, follows the same rule.
    Antialiased as PIL does.

    Args:
        factor: of what both sides are multiples: patch size times merge size, in pixels.
        min_pixels: the smallest area, in pixels.
        max_pixels: the largest area, in pixels; a side has ``factor`` pixels at least.
        interpolation: as for :class:`Resize`; processors have ``"bicubic"``.

    Raises:
        ValueError: for bounds that no size is in, or an interpolation that is none.

    Example:
        ``SmartResize(28).size_of(480, 641)`` is (476, 644): 34 x 46 patches of 14 pixels.
    """

    def __init__(
        self,
        factor: int = 28,
        min_pixels: int = 56 * 56,
        max_pixels: int = 28 * 28 * 1280,
        interpolation: Interpolation = "bicubic",
    ) -> None:
        given = (factor, min_pixels, max_pixels)
        whole = all(isinstance(number, int) and number > 0 for number in given)
        if not whole or not (min_pixels <= max_pixels >= factor * factor):
            raise ValueError(
                "SmartResize(factor, min_pixels, max_pixels) takes positive ints, the least area "
                "not above the largest one, and that not below factor * factor, got "
                f"{', '.join(map(repr, given))}. Qwen2-VL has SmartResize(28, 3136, 1003520)."
            )
        super().__init__(SmartSize(factor, min_pixels, max_pixels), interpolation)


class ResizeToSequence(FittedResize):
    """Resize each image to as many square patches as a sequence has room for, and no more.

    The sizes are those of SigLIP2's NaFlex image processor: multiples of the patch size, at the
    aspect ratio of the image as well as these allow. Antialiased as PIL does.

    Args:
        patch_size: side of a patch, in pixels.
        max_num_patches: patches at most; each side has one at least.
        interpolation: as for :class:`Resize`; the processor has ``"bilinear"``.

    Raises:
        ValueError: for numbers that are no such ones, or an interpolation that is none.

    Example:
        ``ResizeToSequence(16, 256).size_of(480, 640)`` is (224, 288): 14 x 18 patches.
    """

    def __init__(
        self,
        patch_size: int = 16,
        max_num_patches: int = 256,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        given = (patch_size, max_num_patches)
        if not all(isinstance(number, int) and number > 0 for number in given):
            raise ValueError(
                "ResizeToSequence(patch_size, max_num_patches) takes positive ints, got "
                f"{patch_size!r} and {max_num_patches!r}. SigLIP2 has ResizeToSequence(16, 256)."
            )
        super().__init__(SequenceSize(patch_size, max_num_patches), interpolation)


class Letterbox(FusedTransform):
    """Resize each image to fit into a size, and center it there with a color beside it, as YOLO.

    Antialiased as PIL does. An odd pixel of padding goes below or to the right.

    Args:
        size: result, an int for a square or ``(height, width)``, in pixels.
        fill: level of the padding, 0 to 255, or one for each channel.
        interpolation: as for :class:`Resize`.
        mask_fill: value of the padding of masks.

    Raises:
        ValueError: for a size, fill or interpolation that is not one of these.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        fill: float | Sequence[float] = 114,
        interpolation: Interpolation = "bilinear",
        mask_fill: float = 0.0,
    ) -> None:
        levels = np.ravel(np.asarray(fill, np.float64)).tolist()
        if len(levels) not in (1, 3) or not all(0 <= level <= 255 for level in levels):
            raise ValueError(
                f"Letterbox(fill=...) takes one level of 0 to 255, or three, got {fill!r}."
            )
        color = tuple(levels * (3 // len(levels)))
        exact = pair(size, "Letterbox")
        how = filter_name(interpolation)
        super().__init__(LetterboxOp(exact, Fill(color, float(mask_fill)), how))
