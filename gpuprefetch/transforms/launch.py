"""One launch for a batch of images of different sizes: its table, its grid, and its constants."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.transforms import kernel
from gpuprefetch.transforms.reference import (
    SUPPORT,
    TIE,
    Doubles,
    Ints,
    Numbers,
    check,
    check_rows,
    resample_reference,
)

# A program makes STRIPS strips of ROWS x COLS output pixels. A strip sums its source rows, filtered
# along x, into all of its output rows: taller strips filter fewer rows twice but weigh more of them
# in vain; more strips amortize the set-up but leave longer programs to wait for at the end.
# `benchmarks/kernel.py --sweep` on an H200, 256 photos: 0.14 ms with these, 0.18 with 4 x 32 x 4,
# 0.21 with 8 x 32 x 2, 0.16 with 2 x 128 x 8 in 4 warps.
ROWS = 2
COLS = 32
STRIPS = 8
NUM_WARPS = 1
MAX_REGISTERS: int | None = None

# The color of a picture that no decoder has written yet, red in the lowest byte. See Note
# [Canaries] in images/decode.py.
CANARY = 0x05FC03

# Words that the kernel reads for each image: see _plan.
FIELDS = 22


def resample(
    images: Sequence[torch.Tensor],
    sampling: torch.Tensor | Doubles,
    size: tuple[int, int],
    **options: Any,
) -> torch.Tensor:
    """Resample images of different sizes into one batch.

    Output pixel ``j`` of an axis is centered on the source coordinate ``origin + step * j``, where
    source pixel ``k`` has its center at ``k``; a negative ``step`` flips. It is a weighted mean of
    the source pixels in the box ``lo <= k < hi``, and 0 unless ``first <= j < last``. Cropping
    ``y0 <= y < y0 + h`` and resizing to H rows, for instance, is ``step = h / H``,
    ``origin = y0 + step / 2 - 0.5``, ``lo = y0``, ``hi = y0 + h``, ``first = 0``, ``last = H``.

    On a CUDA device this is one launch on the current stream; ``images`` live until it has run.

    Args:
        images: N ``(C, H_i, W_i)`` of one dtype and device; only uint8 is scaled to [0, 1].
        sampling: ``(N, 2, 6)`` float64 on the CPU: (origin, step, lo, hi, first, last) of y and x.
        size: ``(H, W)`` of the result.
        **options: ``interpolation`` is ``"nearest"`` (the pixel at the center, without antialias),
            ``"bilinear"``, or ``"bicubic"`` as in PIL: a = -0.5, and ``uint8`` sources are clamped
            to their range along x, then along y (Pillow 13: along y first where an image is tall).
            ``antialias`` widens the filter to ``|step|`` where an image shrinks, as PIL does.
            ``mean`` and ``std``: ``C`` values in [0, 1] units; padding is 0 before them.
            ``dtype`` and ``memory_format`` of the result; ``torch.uint8`` means 0 to 255, rounded.
            ``out``, of the result's shape, dtype and device, is written to and returned.
            ``positions``: the rows of a larger ``out`` that images go to.

    Returns:
        ``(N, C, H, W)``, on the device of ``images``.

    Raises:
        ValueError: for images of other dtypes, rows that read outside of an image, and another
            number of means or stds than of channels.
    """
    wide = options.get("dtype") == torch.float64  # the kernel computes in float32
    fused = kernel.HAS_TRITON and len(images) > 0 and images[0].is_cuda and not wide
    return (_launch if fused else resample_reference)(images, sampling, size, **options)


def _launch(
    images: Sequence[torch.Tensor],
    sampling: torch.Tensor | Doubles,
    size: tuple[int, int],
    **options: Any,
) -> torch.Tensor:
    """Run the kernel, on CUDA tensors or, in Triton's interpreter, on CPU tensors."""
    geometry, rows, out, places, interpolation, antialias, mean, std = check(
        images, sampling, size, **options
    )
    words = _plan(geometry[:, 1:4], rows, interpolation, antialias)
    start = int(geometry[:, 0].min()) & ~15  # Triton compiles another kernel for an odd one
    table = arrange(words, places, geometry[:, 0] - start, [len(words)], size)
    colors = coloring(out.size(1), images[0].dtype, out.dtype, mean, std)
    numbers = Launches.numbers(table, colors)
    numbers = (numbers.pin_memory() if out.is_cuda else numbers).to(out.device, non_blocking=True)
    with torch.cuda.device_of(out):
        launches = Launches(table, out, images[0].dtype, interpolation)
        launches.launch(0, start, numbers.data_ptr())
    return out


def plan_rows(
    sampling: Doubles,
    sizes: Ints,
    transposed: npt.NDArray[np.bool_],
    size: tuple[int, int],
    interpolation: str,
    antialias: bool,
) -> Ints:
    """``(N, FIELDS)``: ahead of time, in a worker, what the kernel reads of images ``(H, W, 3)``.

    ``sizes`` ``(N, 2)`` are their heights and widths; ``transposed`` ``(N,)`` says whether an image
    will lie in memory with its axes changed.
    """
    check_rows(sampling, sizes, size)
    height, width = sizes.T
    down, right = np.where(transposed, 1, width), np.where(transposed, height, 1)
    strides = np.stack([np.ones_like(down), 3 * down, 3 * right], axis=1)
    return _plan(strides, sampling, interpolation, antialias)


@dataclass(slots=True)
class Table:
    """All that the kernel reads of the images of some launches but their addresses."""

    words: Ints | None  # (N, FIELDS), one launch after the other; None once their numbers are kept
    firsts: list[int]  # where the images of each launch begin, and where the last ones end
    steps: list[int]  # of each launch, the stride along x that its images share; 0 for none
    padded: bool  # whether any image leaves a part of the result to padding


def by_place(words: Ints, count: int) -> Ints:
    """The words of each of ``count`` rows of the result, zeros where there is no image."""
    placed = np.zeros((count, FIELDS), np.int64)
    placed[words[:, 4]] = words
    return placed


def arrange(
    words: Ints, places: Ints, offsets: Ints, counts: Sequence[int], size: tuple[int, int]
) -> Table:
    """Lay out launches of ``counts`` images each; in a worker, it spares the process that trains.

    ``places`` are the rows of the result that images go to, ``offsets`` their bytes from where
    those of their launch will lie.
    """
    # The longest programs of a launch start first.
    order = np.lexsort((-words[:, 5], np.repeat(np.arange(len(counts)), counts)))
    words = words[order]
    words[:, 0], words[:, 4] = offsets[order], places[order]
    firsts = np.cumsum([0, *counts]).tolist()
    steps = []
    for right in np.split(words[:, 3], firsts[1:-1]):
        # The kernel is made for planes, and for RGB pixels: that saves address arithmetic.
        known = right[0] in (1, 3) and (right == right[0]).all()
        steps.append(int(right[0]) if known else 0)
    ends = words[:, 14:22].reshape(-1, 2, 4)[..., 2:]  # (first, last) of both axes
    padded = bool((ends[..., 0] > 0).any() or (ends[..., 1] < size).any())
    return Table(words, firsts, steps, padded)


def coloring(
    channels: int, source: torch.dtype, dtype: torch.dtype, mean: Numbers, std: Numbers
) -> Ints:
    """``(2 * channels,)``, float64 bit by bit: what values are multiplied by, and what is added."""
    scale = np.broadcast_to(1 / np.array(std or 1.0), channels).copy()
    shift = -scale * np.array(mean or 0.0)
    white, source_white = (255 if d == torch.uint8 else 1 for d in (dtype, source))
    scale *= white / source_white
    return np.concatenate([scale, shift]).view(np.int64)


class Launches:
    """The launches that resample images of dtype ``source`` to rows of ``out`` on the GPU."""

    @staticmethod
    def numbers(table: Table, colors: Ints) -> torch.Tensor:
        """1-D uint8 on the CPU, all that the kernel reads but the addresses of the images."""
        assert table.words is not None
        words = np.concatenate([colors, table.words.reshape(-1)])
        return torch.from_numpy(words.view(np.uint8))

    @staticmethod
    def words(numbers: torch.Tensor, channels: int) -> Ints:
        """The table's words in such numbers."""
        return numbers.numpy().view(np.int64)[2 * channels :].reshape(-1, FIELDS)

    @staticmethod
    def room(count: int, channels: int) -> int:
        return 8 * (2 * channels + count * FIELDS)

    def __init__(
        self, table: Table, out: torch.Tensor, source: torch.dtype, interpolation: str
    ) -> None:
        self._firsts, self._steps, self._out = table.firsts, table.steps, out
        channels, height, width = out.shape[1:]
        self._sizes = *out.stride(), height, width
        # Programs for a picture.
        self._tiles = -(-width // COLS), -(-height // (ROWS * STRIPS)), -(-channels // 3)
        kind = getattr(kernel.tl, str(source).removeprefix("torch."))
        bicubic = interpolation == "bicubic"
        filters = bicubic, 0.5 + TIE if interpolation == "nearest" else 0.0
        values = bicubic and source == torch.uint8, table.padded, out.dtype == torch.uint8
        self._constants = channels, kind, *filters, *values, FIELDS, ROWS, COLS, STRIPS

    def set_canaries(self, number: int, address: int, numbers: int) -> None:
        """Color the corners of what :meth:`launch` will read of each image, ``(H, W, 3)`` uint8."""
        first, last = self._firsts[number : number + 2]
        kernel.canary_kernel[(last - first,)](address, numbers, first, CANARY, FIELDS, num_warps=1)

    def launch(self, number: int, address: int, numbers: int, survived: int = 0) -> None:
        """Resample the images of a launch on the current stream and the current device.

        ``numbers`` is the address of what :meth:`numbers` gave. ``survived``, unless it is 0, is
        that of a byte for each row of the result: an image that still has a canary sets it to 1.
        """
        first, last = self._firsts[number : number + 2]
        across, down, groups = self._tiles
        layers, step = (last - first) * groups, self._steps[number]
        checks = -(-(last - first) // (across * down)) if survived else 0
        grid = across, down, layers + checks
        given = address, numbers, first, self._out, *self._sizes, survived, layers
        constants = step, CANARY if survived else 0, *self._constants
        kernel.resample_kernel[grid](
            *given, *constants, num_warps=NUM_WARPS, maxnreg=MAX_REGISTERS, enable_fp_fusion=True
        )


def _plan(strides: Ints, rows: Doubles, interpolation: str, antialias: bool) -> Ints:
    """All that the kernel reads of each image, (N, FIELDS), but its address and its place."""
    words = np.zeros((len(rows), FIELDS), np.int64)
    empty, box = rows[..., 4] == rows[..., 5], rows[..., 2:4]  # as in _taps
    origin, step = np.where(empty, box[..., 0], rows[..., 0]), np.where(empty, 0, rows[..., 1])
    widens = antialias and interpolation != "nearest"
    stretch = np.maximum(np.abs(step), 1) if widens else np.ones_like(step)
    # Pixels that are only moved take part alone, so a finished picture costs one read each.
    moved = (np.abs(step) == 1) & (origin == np.floor(origin))
    radius = np.where(moved, 0.5, SUPPORT[interpolation] * stretch)
    # An open interval of this length; taps beyond it, by rounding, have next to no weight.
    taps = np.minimum(np.ceil(2 * radius - 1e-6), box[..., 1] - box[..., 0])
    words[:, 1:4] = strides
    words[:, 5] = taps[:, 1]
    filters = np.stack([origin, step, radius, 1 / stretch], axis=2)
    words[:, 6:14] = filters.reshape(-1, 8).view(np.int64)
    words[:, 14:22] = rows[..., 2:].reshape(-1, 8)
    return words
