"""Crop, resize, flip, normalize, cast and lay out images of different sizes, in one pass over them.

The eager twin in this file defines the result. The Triton kernel is held to it by the tests, and
where there is no GPU or no Triton the twin is what runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

HAS_TRITON = triton is not None

_Doubles = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]
_ChannelValues = Sequence[float] | torch.Tensor | None

# Radius of each filter in source pixels, before antialiasing widens it. The nearest pixel has half
# of one to each side.
_SUPPORT = {"nearest": 0.5, "bilinear": 1.0, "bicubic": 2.0}
# Where the center lies between two pixels, "nearest" takes the second one, as PIL and torch do.
# Such a tie is an exact fraction, and this is more than rounding in float64 takes away from it.
_TIE = 1e-6
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

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
# [Canaries] in _decode.py.
CANARY = 0x05FC03

# Finished pictures that the eager twin takes together: few calls, in what a core's cache holds.
GROUP = 4

# Words that the kernel reads for each image: see _plan.
_FIELDS = 22


def resample(
    images: Sequence[torch.Tensor],
    sampling: torch.Tensor | _Doubles,
    size: tuple[int, int],
    *,
    interpolation: str = "bilinear",
    antialias: bool = True,
    mean: _ChannelValues = None,
    std: _ChannelValues = None,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
    out: torch.Tensor | None = None,
    positions: Sequence[int] | None = None,
) -> torch.Tensor:
    """Resample images of different sizes into one batch.

    Output pixel ``j`` of an axis is centered on the source coordinate ``origin + step * j``, where
    source pixel ``k`` has its center at ``k``; a negative ``step`` flips. It is a weighted mean of
    the source pixels in the box ``lo <= k < hi``, and 0 unless ``first <= j < last``. Cropping
    ``y0 <= y < y0 + h`` and resizing to H rows, for instance, is ``step = h / H``,
    ``origin = y0 + step / 2 - 0.5``, ``lo = y0``, ``hi = y0 + h``, ``first = 0``, ``last = H``.

    On a CUDA device this is one kernel launch on the current stream, and the caller keeps `images`
    alive until it has run.

    Args:
        images: N tensors ``(C, H_i, W_i)`` of one dtype on one device, with any strides. ``uint8``
            is scaled to [0, 1], floating point is taken as it is.
        sampling: ``(N, 2, 6)`` float64 on the CPU: ``(origin, step, lo, hi, first, last)`` for the
            y and the x axis of every image.
        size: ``(H, W)`` of the result.
        interpolation: ``"nearest"`` (the pixel at the center, without antialias), ``"bilinear"``,
            or ``"bicubic"`` as in PIL: a = -0.5, and ``uint8`` sources
            are clamped to their range along x and then along y. Pillow 13 takes tall ones along y
            first, which shows where bicubic overshoots at edges.
        antialias: Whether to widen the filter to ``|step|`` where an image shrinks, as PIL does.
        mean: ``C`` values in [0, 1] units, best on the CPU. Padding is 0 before the subtraction.
        std: ``C`` values in [0, 1] units.
        dtype: Of the result; ``torch.uint8`` means 0 to 255, rounded, and takes no mean or std.
        memory_format: Of the result.
        out: Written to and returned if given; it must have the result's shape, dtype and device,
            and its own strides count, not `memory_format`.
        positions: The rows of a larger `out` that the N images go to; the others stay as they are.

    Returns:
        ``(N, C, H, W)`` in `dtype` and `memory_format`, on the device of `images`.

    Raises:
        ValueError: if shapes, dtypes, devices or sampling rows do not fit together.
    """
    # The kernel computes in float32.
    fused = triton is not None and len(images) > 0 and images[0].is_cuda and dtype != torch.float64
    return (_launch if fused else resample_reference)(
        images,
        sampling,
        size,
        interpolation=interpolation,
        antialias=antialias,
        mean=mean,
        std=std,
        dtype=dtype,
        memory_format=memory_format,
        out=out,
        positions=positions,
    )


def resample_uint8(
    image: torch.Tensor,
    rows: _Doubles,
    size: tuple[int, int],
    *,
    interpolation: str = "bilinear",
    antialias: bool = True,
) -> torch.Tensor:
    """Resample one image on the CPU to its finished picture, for a worker process.

    A resize that `torch.nn.functional.interpolate` knows goes through its integer kernels: several
    times faster than the eager twin, within a level of PIL. Anything else is the twin, rounded.

    Args:
        image: ``(C, H, W)`` uint8 on the CPU, with any strides; fastest where the channels of a
            pixel lie next to each other.
        rows: ``(2, 6)`` float64, one row of :func:`resample`'s ``sampling``. It is the caller's to
            check them, with :func:`check_rows` for a whole batch.
        size: ``(H, W)`` of the result.
        interpolation: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``.
        antialias: Whether to widen the filter where the image shrinks.

    Returns:
        ``(C, H, W)`` uint8, sharing no memory with `image`, with any strides.

    Raises:
        ValueError: if the image is not as described.
    """
    if image.dtype != torch.uint8 or image.device.type != "cpu":
        raise ValueError(f"image must be uint8 on the CPU, got {image.dtype} on {image.device}")
    windows = [_window(row, antialias) for row in rows.tolist()]
    # Without antialias torch's bicubic is not PIL's (a = -0.75).
    exact = interpolation == "nearest" or (interpolation == "bicubic" and not antialias)
    if None in windows or exact:
        return resample_reference(
            [image],
            rows[None],
            size,
            interpolation=interpolation,
            antialias=antialias,
            dtype=torch.uint8,
        )[0]
    (height, y, y_flip), (width, x, x_flip) = windows  # type: ignore[misc]
    (top, bottom, y0, y1), (left, right, x0, x1) = rows[:, 2:].astype(int).tolist()
    box = image[:, top:bottom, left:right]
    if box.shape[1:] == (height, width):
        box = box.clone()
    else:
        # A batch that torch knows as channels_last: its pixels are read and written as they are.
        batch = box.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
        box = F.interpolate(
            batch,
            (height, width),
            mode=interpolation,
            align_corners=not antialias,
            antialias=antialias,
        )[0]
    picture = box[:, y : y + y1 - y0, x : x + x1 - x0]
    if y_flip or x_flip:
        picture = picture.flip([dim for dim, flip in ((1, y_flip), (2, x_flip)) if flip])
    if picture.shape[1:] != size:
        picture = F.pad(picture, (x0, size[1] - x1, y0, size[0] - y1))
    return picture


def _window(row: list[float], antialias: bool) -> tuple[int, int, bool] | None:
    """Read a row as part of a resize of its box: (size of the whole, start, flipped), or None.

    Antialiased resizes align the borders of the outermost pixels, others (kornia's) their centers.
    """
    origin, step, lo, hi, first, last = row
    if step == 0 or first == last:
        return None
    border, pitch = (0.5 if antialias else 0.0), abs(step)
    length = (hi - lo - 1 + 2 * border) / pitch + 1 - 2 * border
    start = min((origin + step * j + border - lo) / pitch - border for j in (first, last - 1))
    if max(abs(length - round(length)), abs(start - round(start))) > 1e-6 * length:
        return None
    if not 0 <= round(start) <= round(length) - (last - first):
        return None  # kornia's half-pixel grid reaches beyond the outermost centers
    return round(length), round(start), step < 0


@lru_cache
def finished_row(size: tuple[int, int]) -> _Doubles:
    """The row, ``(2, 6)``, of an image that has its final size."""
    return np.array([(0, 1, 0, length, 0, length) for length in size], dtype=np.float64)


# --- The eager twin ---


def resample_reference(
    images: Sequence[torch.Tensor],
    sampling: torch.Tensor | _Doubles,
    size: tuple[int, int],
    *,
    interpolation: str = "bilinear",
    antialias: bool = True,
    mean: _ChannelValues = None,
    std: _ChannelValues = None,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
    out: torch.Tensor | None = None,
    positions: Sequence[int] | None = None,
) -> torch.Tensor:
    """Eager twin of :func:`resample`; computes in float64 where `dtype` is, else in float32."""
    _, rows = _check(images, sampling, size, interpolation)
    out, places = _output(images, size, dtype, memory_format, out, positions)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    colors = [
        None
        if values is None
        else torch.tensor(values, dtype=compute, device=out.device)[:, None, None]
        for values in (_colors("mean", mean, out), _colors("std", std, out))
    ]
    levels = 255 if images[0].dtype == torch.uint8 else 1
    clamp = interpolation == "bicubic" and levels == 255

    finished = (rows == finished_row(tuple(size))).all((1, 2))
    for group in _groups(finished, places):
        pictures = [images[i][:, : size[0], : size[1]] for i in group]
        part, colors_here = out[places[group[0]] : places[group[0]] + len(group)], colors
        lines = part.permute(0, 2, 3, 1)
        if lines.is_contiguous():
            # As lines of W * C values: loops over C of them take three times as long.
            pictures, part = [p.permute(1, 2, 0).flatten(1) for p in pictures], lines.flatten(2)
            colors_here = [c if c is None else c.flatten().repeat(size[1]) for c in colors]
        _finish(torch.stack(pictures).to(compute), part, levels, clamp, *colors_here)
    for i in np.flatnonzero(~finished).tolist():
        image, picture = images[i], out[int(places[i])]
        y_row, x_row = rows[i].tolist()
        y_taps, y_weights, y_inside = _taps(y_row, size[0], interpolation, antialias)
        x_taps, x_weights, x_inside = _taps(x_row, size[1], interpolation, antialias)
        top, left = y_taps.min(), x_taps.min()
        box = image[:, top : y_taps.max() + 1, left : x_taps.max() + 1].to(compute)
        values = _filter_rows(box.transpose(1, 2), x_taps - left, x_weights)
        if clamp:
            values.clamp_(0, 255)
        values = _filter_rows(values.transpose(1, 2), y_taps - top, y_weights)
        if not (y_inside.all() and x_inside.all()):
            padding = torch.from_numpy(~(y_inside[:, None] & x_inside))
            values.masked_fill_(padding.to(out.device), 0)
        _finish(values, picture, levels, clamp, *colors)
    return out


def _groups(chosen: npt.NDArray[np.bool_], places: _Ints) -> list[list[int]]:
    """The chosen images, up to GROUP together where they go to neighboring rows."""
    groups: list[list[int]] = []
    for i in np.flatnonzero(chosen).tolist():
        if groups and len(groups[-1]) < GROUP and places[i] == places[groups[-1][-1]] + 1:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _taps(
    row: list[float], size: int, interpolation: str, antialias: bool
) -> tuple[_Ints, _Doubles, npt.NDArray[np.bool_]]:
    """One axis: the source pixels (size, K), their weights (size, K), and what is not padding."""
    origin, step, lo, hi, first, last = row
    if first == last:  # all is padding, whose centers may be anywhere
        origin, step = lo, 0.0
    nearest = interpolation == "nearest"
    scale = max(abs(step), 1.0) if antialias and not nearest else 1.0
    radius = _SUPPORT[interpolation] * scale
    index = np.arange(size)
    center = origin + step * index.clip(first, last - 1)[:, None]
    if nearest:
        center = np.floor(center + (0.5 + _TIE)).clip(lo, hi - 1)
    taps = np.floor(center - radius) + 1 + np.arange(math.ceil(2 * radius))
    distance = np.abs(taps - center) / scale
    if interpolation == "bicubic":
        near, far = (1 - 1.5 * distance) * distance + 1, 0.5 * np.maximum(2 - distance, 0) ** 2
        weights = np.where(distance < 1, near, far) * (1 - distance)
    else:
        weights = np.maximum(1 - distance, 0)
    weights *= (taps >= lo) & (taps < hi)
    weights /= weights.sum(1, keepdims=True)
    used = weights.any(0)
    taps = taps[:, used].clip(lo, hi - 1).astype(np.int64)
    return taps, weights[:, used], (index >= first) & (index < last)


def _filter_rows(values: torch.Tensor, taps: _Ints, weights: _Doubles) -> torch.Tensor:
    """Filter (C, H, W) along H, one tap of every output row at a time."""
    values = values.contiguous()  # whole rows are picked
    columns = torch.tensor(taps.T, device=values.device)
    factors = torch.tensor(weights.T, dtype=values.dtype, device=values.device)[:, :, None]
    result = values.index_select(1, columns[0]).mul_(factors[0])
    for column, factor in zip(columns[1:], factors[1:], strict=True):
        result.addcmul_(values.index_select(1, column), factor)
    return result


def _finish(
    values: torch.Tensor,
    out: torch.Tensor,
    levels: int,
    clamp: bool,
    mean: torch.Tensor | None,
    std: torch.Tensor | None,
) -> None:
    """Bring values of 0 to `levels`, in the shape of `out`, into its form; overwrites them.

    `mean` and `std` are of that shape, or broadcast to it.
    """
    if clamp:
        values.clamp_(0, 255)
    if out.dtype == torch.uint8:
        values.mul_(255 // levels).add_(0.5).floor_().clamp_(0, 255)
    elif levels == 255:
        values.div_(255)
    if mean is not None:
        values.sub_(mean)
    if std is not None:
        values.div_(std)
    out.copy_(values)


# --- Checks, for every path ---


def _check(
    images: Sequence[torch.Tensor],
    sampling: torch.Tensor | _Doubles,
    size: tuple[int, int],
    interpolation: str,
) -> tuple[_Ints, _Doubles]:
    """Check what is read; return (address, strides, shape) of the images, (N, 7), and the rows."""
    if interpolation not in _SUPPORT:
        raise ValueError(f"interpolation must be one of {list(_SUPPORT)}, got {interpolation!r}")
    kinds = {(image.dim(), image.dtype, image.device) for image in images}
    if len(kinds) != 1:
        raise ValueError(
            "images must be at least one tensor, and agree in dtype and device, "
            f"got {len(images)} with (ndim, dtype, device) in {sorted(map(str, kinds))}"
        )
    ((ndim, dtype, _),) = kinds
    if ndim != 3 or (dtype != torch.uint8 and dtype not in FLOAT_DTYPES):
        raise ValueError(
            f"images must be (C, H, W) tensors of uint8 or floating point, got {ndim}-D {dtype}"
        )
    geometry = np.array([(t.data_ptr(), *t.stride(), *t.shape) for t in images], np.int64)
    channels = np.unique(geometry[:, 4]).tolist()
    if len(channels) != 1:
        raise ValueError(f"images must agree in channels, got {channels}")
    if isinstance(sampling, torch.Tensor) and sampling.is_cuda:
        raise ValueError("sampling must be on the CPU: it is checked and packed there")
    rows = np.asarray(sampling, np.float64)
    if rows.shape != (len(images), 2, 6):
        raise ValueError(f"sampling must be ({len(images)}, 2, 6), got {rows.shape}")
    check_rows(rows, geometry[:, 5:], size)
    return geometry, rows


def check_rows(rows: _Doubles, sizes: _Ints, size: tuple[int, int]) -> None:
    """Refuse sampling that would read outside of images of `sizes`."""
    origin, step, lo, hi, first, last = np.moveaxis(rows, 2, 0)
    low, high = np.sort([origin + step * first, origin + step * (last - 1)], axis=0)
    # A resize has its outermost centers up to half a pixel outside of the box; further out there
    # may be no pixel to weigh. Where first == last all is padding, wherever the centers are.
    fits = (first == last) | ((low >= lo - 0.501) & (high <= hi - 0.499))
    fits &= (0 <= lo) & (lo < hi) & (hi <= sizes)
    fits &= (0 <= first) & (first <= last) & (last <= size)
    fits &= (rows[..., 2:] == np.floor(rows[..., 2:])).all(-1)
    if not fits.all():
        i, axis = np.argwhere(~fits)[0]
        raise ValueError(
            f"sampling[{i}, {axis}] = {rows[i, axis].tolist()} does not fit a source of "
            f"{sizes[i, axis]} and a result of {size[axis]} pixels: of (origin, step, lo, "
            "hi, first, last) lo and what follows must be whole numbers, and origin + step * j "
            "within half a pixel of the box lo <= k < hi for first <= j < last"
        )


def _output(
    images: Sequence[torch.Tensor],
    size: tuple[int, int],
    dtype: torch.dtype,
    memory_format: torch.memory_format,
    out: torch.Tensor | None,
    positions: Sequence[int] | None,
) -> tuple[torch.Tensor, _Ints]:
    """Make the output, or check the one that was given; return the rows the images go to, too."""
    places = np.arange(len(images)) if positions is None else np.asarray(positions, np.int64)
    shape, device = (len(images), len(images[0]), *size), images[0].device
    if dtype != torch.uint8 and dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype must be uint8 or floating point, got {dtype}")
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=device, memory_format=memory_format)
    elif positions is not None:
        shape = (len(out), *shape[1:])
    if (out.shape, out.dtype, out.device) != (shape, dtype, device):
        raise ValueError(
            f"out must be {shape} {dtype} on {device}, "
            f"got {tuple(out.shape)} {out.dtype} on {out.device}"
        )
    if places.shape != (len(images),) or not ((places >= 0) & (places < len(out))).all():
        raise ValueError(
            f"positions must be {len(images)} rows of the {len(out)} of out, got {places.tolist()}"
        )
    return out, places


def _colors(name: str, values: _ChannelValues, out: torch.Tensor) -> list[float] | None:
    """The mean or std of every channel, as numbers."""
    if values is None:
        return None
    if out.dtype == torch.uint8:
        raise ValueError(f"{name} needs a floating-point dtype, got {out.dtype}: leave one out")
    numbers: list[float] = torch.as_tensor(values, dtype=torch.float64).flatten().tolist()
    if len(numbers) not in (1, out.shape[1]):
        raise ValueError(f"{name} must have {out.shape[1]} values, one a channel, got {numbers}")
    return numbers if len(numbers) > 1 else numbers * out.shape[1]


# --- The launcher ---


def _launch(
    images: Sequence[torch.Tensor],
    sampling: torch.Tensor | _Doubles,
    size: tuple[int, int],
    *,
    interpolation: str = "bilinear",
    antialias: bool = True,
    mean: _ChannelValues = None,
    std: _ChannelValues = None,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
    out: torch.Tensor | None = None,
    positions: Sequence[int] | None = None,
) -> torch.Tensor:
    """Run the kernel, on CUDA tensors or, in Triton's interpreter, on CPU tensors."""
    geometry, rows = _check(images, sampling, size, interpolation)
    out, places = _output(images, size, dtype, memory_format, out, positions)
    mean, std = _colors("mean", mean, out), _colors("std", std, out)
    words = _plan(geometry[:, 1:4], rows, interpolation, antialias)
    start = int(geometry[:, 0].min()) & ~15  # Triton compiles another kernel for an odd one
    table = arrange(words, np.array(places), geometry[:, 0] - start, [len(words)], size)
    coloring = Coloring(images[0].dtype, out.dtype, mean, std)
    numbers = Launches.numbers(table, out.size(1), coloring)
    numbers = (numbers.pin_memory() if out.is_cuda else numbers).to(out.device, non_blocking=True)
    with torch.cuda.device_of(out):
        launches = Launches(table, out, images[0].dtype, interpolation)
        launches.launch(0, start, numbers.data_ptr())
    return out


def plan_rows(
    sampling: _Doubles,
    sizes: _Ints,
    transposed: npt.NDArray[np.bool_],
    size: tuple[int, int],
    interpolation: str,
    antialias: bool,
) -> _Ints:
    """Lay out ahead of time, in a worker, what the kernel reads of images ``(H, W, 3)``.

    Args:
        sampling: ``(N, 2, 6)`` float64, as for :func:`resample`.
        sizes: ``(N, 2)`` int64, height and width of the images to be.
        transposed: ``(N,)`` bool, whether an image will lie in memory with its axes changed.
        size: ``(H, W)`` of the result.
        interpolation: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``.
        antialias: Whether to widen the filter where the image shrinks.

    Returns:
        ``(N, words)`` int64 for :func:`arrange`.
    """
    check_rows(sampling, sizes, size)
    height, width = sizes.T
    down, right = np.where(transposed, 1, width), np.where(transposed, height, 1)
    strides = np.stack([np.ones_like(down), 3 * down, 3 * right], axis=1)
    return _plan(strides, sampling, interpolation, antialias)


@dataclass(slots=True)
class Table:
    """All that the kernel reads of the images of some launches but their addresses.

    Attributes:
        words: ``(N, words)`` int64, one launch behind the other; None where their
            :meth:`Launches.numbers` are kept.
        firsts: where the images of each launch begin, and where the last ones end.
        steps: of each launch, the stride along x that its images have in common; 0 for none.
        padded: whether any image leaves a part of the result to padding.
    """

    words: _Ints | None
    firsts: list[int]
    steps: list[int]
    padded: bool


def by_place(words: _Ints, count: int) -> _Ints:
    """The words of each of ``count`` rows of the result, zeros where there is no image."""
    placed = np.zeros((count, _FIELDS), np.int64)
    placed[words[:, 4]] = words
    return placed


def arrange(
    words: _Ints, places: _Ints, offsets: _Ints, counts: Sequence[int], size: tuple[int, int]
) -> Table:
    """Lay out launches; also in a worker, which spares the process that trains.

    Args:
        words: of N images, one launch behind the other, as :func:`plan_rows` gives them.
        places: ``(N,)`` int64, the rows of the result that they go to.
        offsets: ``(N,)`` int64, bytes of the images from where those of their launch will lie.
        counts: of the images of each launch.
        size: ``(H, W)`` of the result.
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
    return Table(words, firsts, steps, _padded(words, size))


@dataclass(frozen=True, slots=True)
class Coloring:
    """From the values of images to those of the result.

    Attributes:
        source: dtype of the images.
        dtype: of the result.
        mean: a value per channel, in [0, 1] units; None for 0.
        std: likewise; None for 1.
    """

    source: torch.dtype
    dtype: torch.dtype
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None

    @property
    def levels(self) -> int:
        """The value of the images that is 1."""
        return 255 if self.source == torch.uint8 else 1

    def words(self, channels: int) -> _Ints:
        """``(2 * channels,)``, float64 bit by bit: what values are multiplied by, what added."""
        scale = np.broadcast_to(1 / np.array(self.std or 1.0), channels).copy()
        shift = -scale * np.array(self.mean or 0.0)
        scale *= (255 if self.dtype == torch.uint8 else 1) / self.levels
        return np.concatenate([scale, shift]).view(np.int64)


@lru_cache
def _made_for(
    shape: Sequence[int],
    source: torch.dtype,
    dtype: torch.dtype,
    interpolation: str,
    padded: bool,
    rows: int,
    cols: int,
    strips: int,
) -> tuple[tuple[int, int, int], tuple[Any, ...]]:
    """Programs for a picture of a ``shape``, and the kernel's constants in their order."""
    channels, height, width = shape
    tiles = -(-width // cols), -(-height // (rows * strips)), -(-channels // 3)
    bicubic = interpolation == "bicubic"
    kind = getattr(tl, str(source).removeprefix("torch."))
    clamp, rounds = bicubic and source == torch.uint8, dtype == torch.uint8
    tie = 0.5 + _TIE if interpolation == "nearest" else 0.0
    filters = bicubic, tie, clamp
    return tiles, (channels, kind, *filters, padded, rounds, _FIELDS, rows, cols, strips)


class Launches:
    """The samplings of a batch on the GPU, and the launches that carry them out.

    One copy brings all that the kernel reads but the addresses of the images.

    Args:
        table: of the images.
        out: ``(M, C, H, W)`` on the GPU.
        source: dtype of the images.
        interpolation: as in the plan.
    """

    @staticmethod
    def numbers(table: Table, channels: int, coloring: Coloring) -> torch.Tensor:
        """1-D uint8 on the CPU, all that the kernel reads."""
        assert table.words is not None
        words = np.concatenate([coloring.words(channels), table.words.reshape(-1)])
        return torch.from_numpy(words.view(np.uint8))

    @staticmethod
    def words(numbers: torch.Tensor, channels: int) -> _Ints:
        """The table's words in such numbers."""
        return numbers.numpy().view(np.int64)[2 * channels :].reshape(-1, _FIELDS)

    @staticmethod
    def room(count: int, channels: int) -> int:
        """The bytes of :meth:`numbers` for ``count`` images."""
        return 8 * (2 * channels + count * _FIELDS)

    def __init__(
        self, table: Table, out: torch.Tensor, source: torch.dtype, interpolation: str
    ) -> None:
        self._firsts, self._steps, self._out = table.firsts, table.steps, out
        how = out.shape[1:], source, out.dtype, interpolation, table.padded
        self._tiles, self._constants = _made_for(*how, ROWS, COLS, STRIPS)
        self._sizes = *out.stride(), *out.shape[2:]

    def set_canaries(self, number: int, address: int, numbers: int) -> None:
        """Color the corners of what :meth:`launch` will read of each image, ``(H, W, 3)`` uint8."""
        first, last = self._firsts[number : number + 2]
        _canary_kernel[(last - first,)](address, numbers, first, CANARY, _FIELDS, num_warps=1)

    def launch(self, number: int, address: int, numbers: int, survived: int = 0) -> None:
        """Resample the images of a launch on the current stream.

        The device of the batch must be the current one: Triton launches there.

        Args:
            number: of the launch.
            address: of its images.
            numbers: the address of what :meth:`numbers` gave.
            survived: the address of a byte for each row of the result, in pinned memory, say. That
                of an image which still has a canary is set to 1, others stay. 0 for none.
        """
        first, last = self._firsts[number : number + 2]
        across, down, groups = self._tiles
        layers, step = (last - first) * groups, self._steps[number]
        checks = -(-(last - first) // (across * down)) if survived else 0
        grid = across, down, layers + checks
        _resample_kernel[grid](
            address,
            numbers,
            first,
            self._out,
            *self._sizes,
            survived,
            layers,
            step,
            CANARY if survived else 0,
            *self._constants,
            num_warps=NUM_WARPS,
            maxnreg=MAX_REGISTERS,
            enable_fp_fusion=True,
        )


def _padded(words: _Ints, size: tuple[int, int]) -> bool:
    """Whether any image leaves a part of the output to padding: the (first, last) of its axes."""
    ends = words[:, 14:22].reshape(-1, 2, 4)[..., 2:]
    return bool((ends[..., 0] > 0).any() or (ends[..., 1] < size).any())


def _plan(strides: _Ints, rows: _Doubles, interpolation: str, antialias: bool) -> _Ints:
    """All that the kernel reads of each image, (N, _FIELDS), but its address and its place."""
    words = np.zeros((len(rows), _FIELDS), np.int64)
    empty, box = rows[..., 4] == rows[..., 5], rows[..., 2:4]  # as in _taps
    origin, step = np.where(empty, box[..., 0], rows[..., 0]), np.where(empty, 0, rows[..., 1])
    widens = antialias and interpolation != "nearest"
    stretch = np.maximum(np.abs(step), 1) if widens else np.ones_like(step)
    # Pixels that are only moved take part alone, so a finished picture costs one read each.
    moved = (np.abs(step) == 1) & (origin == np.floor(origin))
    radius = np.where(moved, 0.5, _SUPPORT[interpolation] * stretch)
    # An open interval of this length; taps beyond it, by rounding, have next to no weight.
    taps = np.minimum(np.ceil(2 * radius - 1e-6), box[..., 1] - box[..., 0])
    words[:, 1:4] = strides
    words[:, 5] = taps[:, 1]
    filters = np.stack([origin, step, radius, 1 / stretch], axis=2)
    words[:, 6:14] = filters.reshape(-1, 8).view(np.int64)
    words[:, 14:22] = rows[..., 2:].reshape(-1, 8)
    return words


# --- The kernel ---

if triton is not None:

    @triton.jit(do_not_specialize=["from_image", "layers"])  # type: ignore[untyped-decorator]
    def _resample_kernel(  # type: ignore[no-untyped-def]
        address,
        numbers,
        from_image,
        out_ptr,
        stride_n,
        stride_c,
        stride_y,
        stride_x,
        height,
        width,
        survived,
        layers,
        STRIDE_X: tl.constexpr,
        CANARY: tl.constexpr,  # 0: there are none
        CHANNELS: tl.constexpr,
        SOURCE: tl.constexpr,
        BICUBIC: tl.constexpr,
        TIE: tl.constexpr,  # 0: no pixel is taken alone
        CLAMP: tl.constexpr,
        PADDED: tl.constexpr,
        ROUND: tl.constexpr,
        FIELDS: tl.constexpr,
        ROWS: tl.constexpr,
        COLS: tl.constexpr,
        STRIPS: tl.constexpr,
    ):
        ints_ptr = numbers.to(tl.pointer_type(tl.int64))
        floats_ptr = numbers.to(tl.pointer_type(tl.float64))
        # Three channels share their weights. Where the channels do not divide by three, the last
        # group repeats one, and writes the same values twice.
        GROUPS: tl.constexpr = (CHANNELS + 2) // 3
        if CANARY > 0:
            # Programs of their own: within the others this would take registers from each of them.
            beyond = tl.program_id(2) - layers
            if beyond >= 0:
                image = beyond * tl.num_programs(1) + tl.program_id(1)
                image = image * tl.num_programs(0) + tl.program_id(0)
                if image < layers // GROUPS:
                    ints_ptr += 2 * CHANNELS + (from_image + image) * FIELDS
                    _find_canary(address, ints_ptr, survived, CANARY)
                return
        c0 = tl.program_id(2) % GROUPS * 3
        c1 = tl.minimum(c0 + 1, CHANNELS - 1)
        c2 = tl.minimum(c0 + 2, CHANNELS - 1)
        scale0 = tl.load(floats_ptr + c0).to(tl.float32)
        scale1 = tl.load(floats_ptr + c1).to(tl.float32)
        scale2 = tl.load(floats_ptr + c2).to(tl.float32)
        shift0 = tl.load(floats_ptr + CHANNELS + c0).to(tl.float32)
        shift1 = tl.load(floats_ptr + CHANNELS + c1).to(tl.float32)
        shift2 = tl.load(floats_ptr + CHANNELS + c2).to(tl.float32)

        row = 2 * CHANNELS + (from_image + tl.program_id(2) // GROUPS) * FIELDS
        ints_ptr += row
        floats_ptr += row
        source_ptr = (address + tl.load(ints_ptr)).to(tl.pointer_type(SOURCE))
        source_stride_c = tl.load(ints_ptr + 1)
        source_stride_y = tl.load(ints_ptr + 2)
        source_stride_x = tl.load(ints_ptr + 3)
        if STRIDE_X > 0:
            source_stride_x = STRIDE_X
        place = tl.load(ints_ptr + 4)
        out_ptr += place * stride_n
        taps_x = tl.load(ints_ptr + 5).to(tl.int32)

        # Coordinates stay float64 until they are relative to a tap: float32 alone would be off by
        # 5e-4 pixels in a photo of 8192. The taps of a column are moved as one window into the box,
        # where all that have weight are: no load needs a mask, and no tap a check.
        origin, step, radius, squeeze = _load4(floats_ptr + 10, tl.float64)
        lo, hi, first, last = _load4(ints_ptr + 18, tl.int32)
        left = tl.program_id(0) * COLS
        cols = left + tl.arange(0, COLS)[None, :]
        center = origin + step * _clamp(cols, first, last - 1)
        if TIE > 0:
            center = _clamp(tl.floor(center + TIE), lo, hi - 1)
        tap = _clamp(tl.floor(center - radius).to(tl.int32) + 1, lo, hi - taps_x)
        tap_x = ((tap - center) * squeeze).to(tl.float32)
        squeeze_x = squeeze.to(tl.float32)
        weight_x = tl.zeros_like(tap_x)
        t = 0
        while t < taps_x:  # the interpreter of Triton 3.6 knows no range() over a tensor
            weight_x += _weight(tap_x + t * squeeze_x, BICUBIC)
            t += 1
        inside_x = (cols >= first) & (cols < last)
        # 64-bit, once a column: an image may be of any size.
        source_ptr += tap.to(tl.int64) * source_stride_x

        origin, step, radius, squeeze = _load4(floats_ptr + 6, tl.float64)
        lo, hi, first, last = _load4(ints_ptr + 14, tl.int32)
        flat = tl.arange(0, ROWS * COLS)
        start = tl.program_id(1) * ROWS * STRIPS
        bottom = tl.minimum(start + ROWS * STRIPS, height)
        while start < bottom:
            rows = start + tl.arange(0, ROWS)[:, None]
            # The source rows under the strip, from its ends.
            near = _clamp(start, first, last - 1)
            far = _clamp(start + ROWS - 1, first, last - 1)
            low = origin + step * tl.where(step > 0, near, far) - radius
            high = origin + step * tl.where(step > 0, far, near) + radius
            begin = tl.maximum(tl.floor(low).to(tl.int32) + 1, lo)
            end = tl.minimum(tl.ceil(high).to(tl.int32), hi)
            tap_y = ((begin - (origin + step * near)) * squeeze).to(tl.float32)
            tap_y -= (_clamp(rows, first, last - 1) - near) * (step * squeeze).to(tl.float32)
            if TIE > 0:
                center_y = origin + step * _clamp(rows, first, last - 1)
                center_y = _clamp(tl.floor(center_y + TIE), lo, hi - 1)
                begin = tl.min(center_y).to(tl.int32)
                end = tl.max(center_y).to(tl.int32) + 1
                tap_y = (begin - center_y).to(tl.float32)

            red = tl.zeros([ROWS, COLS], tl.float32)
            green = tl.zeros([ROWS, COLS], tl.float32)
            blue = tl.zeros([ROWS, COLS], tl.float32)
            weight_y = tl.zeros([ROWS, COLS], tl.float32)
            row_ptr = source_ptr + begin.to(tl.int64) * source_stride_y
            # With the number of taps known, their weights along x stay in registers.
            for TAPS in tl.static_range(5):
                if taps_x == TAPS or (TAPS == 0 and taps_x > 4):
                    red, green, blue, weight_y = _sum_rows(
                        row_ptr + c0 * source_stride_c,
                        row_ptr + c1 * source_stride_c,
                        row_ptr + c2 * source_stride_c,
                        source_stride_y,
                        source_stride_x,
                        end - begin,
                        tap_y,
                        squeeze.to(tl.float32),
                        taps_x,
                        tap_x,
                        squeeze_x,
                        red,
                        green,
                        blue,
                        weight_y,
                        255.0 * weight_x,
                        BICUBIC,
                        CLAMP,
                        TAPS,
                    )

            norm = 1.0 / (weight_y * weight_x)
            inside = (rows >= first) & (rows < last) & inside_x
            red = _finish_color(red * norm, inside, scale0, shift0, CLAMP, PADDED, ROUND)
            green = _finish_color(green * norm, inside, scale1, shift1, CLAMP, PADDED, ROUND)
            blue = _finish_color(blue * norm, inside, scale2, shift2, CLAMP, PADDED, ROUND)
            # Stored as a vector: of a tile Triton 3.6 would give the lanes of a warp to rows.
            y, x = start + flat // COLS, left + flat % COLS
            pixel_ptr = out_ptr + (y * stride_y + x * stride_x)
            mask = (y < height) & (x < width)
            dtype = out_ptr.dtype.element_ty
            tl.store(pixel_ptr + c0 * stride_c, tl.reshape(red, [ROWS * COLS]).to(dtype), mask)
            tl.store(pixel_ptr + c1 * stride_c, tl.reshape(green, [ROWS * COLS]).to(dtype), mask)
            tl.store(pixel_ptr + c2 * stride_c, tl.reshape(blue, [ROWS * COLS]).to(dtype), mask)
            start += ROWS

    @triton.jit(do_not_specialize=["from_image"])  # type: ignore[untyped-decorator]
    def _canary_kernel(  # type: ignore[no-untyped-def]
        address, numbers, from_image, CANARY: tl.constexpr, FIELDS: tl.constexpr
    ):
        row = 2 * 3 + (from_image + tl.program_id(0)) * FIELDS
        ints_ptr = numbers.to(tl.pointer_type(tl.int64)) + row
        corners, colors, mask = _corners(address, ints_ptr, CANARY)
        tl.store(corners, colors, mask)

    @triton.jit  # type: ignore[untyped-decorator]
    def _find_canary(address, ints_ptr, survived, CANARY: tl.constexpr):  # type: ignore[no-untyped-def]
        corners, colors, mask = _corners(address, ints_ptr, CANARY)
        other = tl.where(tl.load(corners, mask) == colors, 0, 1)
        differs = tl.min(tl.max(tl.where(mask, other, 0), axis=1), axis=0)
        place = tl.load(ints_ptr + 4)
        tl.store((survived + place).to(tl.pointer_type(tl.uint8)), 1, differs == 0)

    @triton.jit  # type: ignore[untyped-decorator]
    def _corners(address, ints_ptr, CANARY: tl.constexpr):  # type: ignore[no-untyped-def]
        """Of the first and the last pixel of a box: (2, 4) pointers, colors, and a mask."""
        last, channel = tl.arange(0, 2)[:, None], tl.arange(0, 4)[None, :]
        y, x = tl.load(ints_ptr + 14 + last) - last, tl.load(ints_ptr + 18 + last) - last
        offset = y * tl.load(ints_ptr + 2) + x * tl.load(ints_ptr + 3)
        offset += channel * tl.load(ints_ptr + 1) + tl.load(ints_ptr)
        colors = ((CANARY >> (8 * channel)) & 255).to(tl.uint8)
        corners = (address + offset).to(tl.pointer_type(tl.uint8))
        return corners, tl.broadcast_to(colors, [2, 4]), tl.broadcast_to(channel < 3, [2, 4])

    @triton.jit  # type: ignore[untyped-decorator]
    def _sum_rows(  # type: ignore[no-untyped-def]
        red_ptr,
        green_ptr,
        blue_ptr,
        stride_y,
        stride_x,
        n_rows,
        tap_y,
        squeeze_y,
        taps_x,
        tap_x,
        squeeze_x,
        red,
        green,
        blue,
        weight_y,
        limit_x,
        BICUBIC: tl.constexpr,
        CLAMP: tl.constexpr,
        TAPS: tl.constexpr,  # 0: taps_x of them
    ):
        row = 0
        while row < n_rows:
            weight = _weight(tap_y + row * squeeze_y, BICUBIC)
            weight_y += weight
            r = tl.zeros_like(tap_x)
            g = tl.zeros_like(tap_x)
            b = tl.zeros_like(tap_x)
            if TAPS == 0:
                t = 0
                while t < taps_x:
                    w = _weight(tap_x + t * squeeze_x, BICUBIC)
                    r += w * tl.load(red_ptr + t * stride_x).to(tl.float32)
                    g += w * tl.load(green_ptr + t * stride_x).to(tl.float32)
                    b += w * tl.load(blue_ptr + t * stride_x).to(tl.float32)
                    t += 1
            else:
                for t in tl.static_range(TAPS):
                    w = _weight(tap_x + t * squeeze_x, BICUBIC)
                    r += w * tl.load(red_ptr + t * stride_x).to(tl.float32)
                    g += w * tl.load(green_ptr + t * stride_x).to(tl.float32)
                    b += w * tl.load(blue_ptr + t * stride_x).to(tl.float32)
            if CLAMP:
                r = _clamp(r, 0.0, limit_x)
                g = _clamp(g, 0.0, limit_x)
                b = _clamp(b, 0.0, limit_x)
            red += weight * r
            green += weight * g
            blue += weight * b
            red_ptr += stride_y
            green_ptr += stride_y
            blue_ptr += stride_y
            row += 1
        return red, green, blue, weight_y

    @triton.jit  # type: ignore[untyped-decorator]
    def _finish_color(  # type: ignore[no-untyped-def]
        value,
        inside,
        scale,
        shift,
        CLAMP: tl.constexpr,
        PADDED: tl.constexpr,
        ROUND: tl.constexpr,
    ):
        if CLAMP:
            value = _clamp(value, 0.0, 255.0)
        if PADDED:
            value = tl.where(inside, value, 0.0)
        value = value * scale + shift
        if ROUND:
            value = tl.floor(_clamp(value, 0.0, 255.0) + 0.5)
        return value

    @triton.jit  # type: ignore[untyped-decorator]
    def _weight(distance, BICUBIC: tl.constexpr):  # type: ignore[no-untyped-def]
        distance = tl.abs(distance)
        if BICUBIC:
            # Factored, so that float32 loses nothing near the zeros.
            near = (1.0 - 1.5 * distance) * distance + 1.0
            far = tl.maximum(2.0 - distance, 0.0)
            return tl.where(distance < 1.0, near, 0.5 * far * far) * (1.0 - distance)
        return tl.maximum(1.0 - distance, 0.0)

    @triton.jit
    def _clamp(value, low, high):  # type: ignore[no-untyped-def]
        return tl.minimum(tl.maximum(value, low), high)

    @triton.jit  # type: ignore[untyped-decorator]
    def _load4(ptr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
        return (
            tl.load(ptr).to(DTYPE),
            tl.load(ptr + 1).to(DTYPE),
            tl.load(ptr + 2).to(DTYPE),
            tl.load(ptr + 3).to(DTYPE),
        )
