"""Crop, resize, flip, normalize, cast and lay out images of different sizes: the eager twin.

The twin defines the result. The tests hold the Triton kernel to it, and it runs where there is no
GPU or no Triton. The checks of what is read and written are here for both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from gpuprefetch.transforms.sampling import Sizes

Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Numbers = list[float] | None
ChannelValues = Sequence[float] | torch.Tensor | None

# Radius of each filter in source pixels, before antialiasing widens it. The nearest pixel has half
# of one to each side.
SUPPORT = {"nearest": 0.5, "bilinear": 1.0, "bicubic": 2.0}
# Where the center lies between two pixels, "nearest" takes the second one, as PIL and torch do.
# Such a tie is an exact fraction, and this is more than rounding in float64 takes away from it.
TIE = 1e-6
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Coloring(TypedDict, total=False):
    """How images are sampled, and the values of the result."""

    # "nearest" (the pixel at the center, without antialias), "bilinear" (the default), or "bicubic"
    # as in PIL: a = -0.5, and uint8 sources are clamped to their range along x, then along y
    # (Pillow 13: along y first where an image is tall).
    interpolation: str
    # Widens the filter to |step| where an image shrinks, as PIL does: the default.
    antialias: bool
    # C values in [0, 1] units; padding has its values before them.
    mean: ChannelValues
    std: ChannelValues
    # C values of the padding, in the units of the source; 0 by default.
    fill: ChannelValues


class Options(Coloring, total=False):
    """The same, and what :func:`.launch.resample` makes."""

    # The form of the result, float32 by default; uint8 means 0 to 255, rounded.
    dtype: torch.dtype
    memory_format: torch.memory_format
    # A tensor that is written to and returned instead; its form counts.
    out: torch.Tensor | None
    # The rows of ``out`` that images go to, by default the first ones.
    positions: Sequence[int] | Ints | None


@dataclass(frozen=True, slots=True)
class Request:
    """A call of :func:`.launch.resample` for N images, checked."""

    addresses: Ints  # (N,)
    strides: Ints  # (N, 3), between channels, rows and pixels
    rows: Doubles  # (N, 2, 6)
    out: torch.Tensor | Sequence[torch.Tensor]  # (M, C, H, W), or M results (C, H_i, W_i)
    positions: Ints  # (N,), the rows of out that images go to
    interpolation: str
    antialias: bool
    mean: Numbers
    std: Numbers
    fill: Numbers


def resample_reference(
    images: Sequence[torch.Tensor],
    sampling: torch.Tensor | Doubles,
    size: tuple[int, int],
    **options: Unpack[Options],
) -> torch.Tensor:
    """Eager twin of :func:`.launch.resample`; in float64 where the result is, else in float32."""
    request, out = check(images, sampling, size, **options)
    carry_out(images, request)
    return out


def carry_out(images: Sequence[torch.Tensor], request: Request) -> None:
    """Write the results of images: what defines them."""
    first = request.out[0]
    compute = torch.float64 if first.dtype == torch.float64 else torch.float32
    mean, std = (
        None if c is None else torch.tensor(c, dtype=compute, device=first.device)[:, None, None]
        for c in (request.mean, request.std)
    )
    levels = 255 if images[0].dtype == torch.uint8 else 1
    clamp = request.interpolation == "bicubic" and levels == 255
    for n, (image, position) in enumerate(zip(images, request.positions.tolist(), strict=True)):
        out = request.out[position]
        height, width = out.shape[1:]
        # In planes: loops over the channels of a pixel need three times as long.
        if (request.rows[n] == finished_row((height, width))).all():
            box = image[:, :height, :width]
            values = box.to(compute, memory_format=torch.contiguous_format, copy=True)
        else:
            values = _resampled(image, request, n, compute, clamp)
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


class _Taps(NamedTuple):
    """The source pixels of one axis of a result."""

    pixels: Ints  # (size, K)
    weights: Doubles  # (size, K)
    inside: npt.NDArray[np.bool_]  # (size,), what is not padding


def _resampled(
    image: torch.Tensor, request: Request, n: int, compute: torch.dtype, clamp: bool
) -> torch.Tensor:
    """Image ``n`` filtered along x, then along y, with zeros where the result is padding."""
    row_y, row_x = request.rows[n].tolist()
    height, width = request.out[int(request.positions[n])].shape[1:]
    y = _taps(row_y, height, request.interpolation, request.antialias)
    x = _taps(row_x, width, request.interpolation, request.antialias)
    top = y.pixels.min()
    left = x.pixels.min()
    box = image[:, top : y.pixels.max() + 1, left : x.pixels.max() + 1].to(compute)
    values = _filter_rows(box.transpose(1, 2), x.pixels - left, x.weights)
    if clamp:
        values.clamp_(0, 255)
    values = _filter_rows(values.transpose(1, 2), y.pixels - top, y.weights)
    if not (y.inside.all() and x.inside.all()):
        padding = torch.from_numpy(~(y.inside[:, None] & x.inside))
        padding = padding.to(image.device)
        if request.fill is None:
            values.masked_fill_(padding, 0)
        else:
            for channel, value in zip(values, request.fill, strict=True):
                channel.masked_fill_(padding, value)
    return values


def _taps(row: list[float], size: int, interpolation: str, antialias: bool) -> _Taps:
    origin, step, lo, hi, first, last = row
    if first == last:  # all is padding, whose centers may be anywhere
        origin = lo
        step = 0.0
    nearest = interpolation == "nearest"
    scale = max(abs(step), 1.0) if antialias and not nearest else 1.0
    radius = SUPPORT[interpolation] * scale
    index = np.arange(size)
    center = origin + step * index.clip(first, last - 1)[:, None]
    if nearest:
        center = np.floor(center + (0.5 + TIE)).clip(lo, hi - 1)
    taps = np.floor(center - radius) + 1 + np.arange(math.ceil(2 * radius))
    distance = np.abs(taps - center) / scale
    if interpolation == "bicubic":
        near = (1 - 1.5 * distance) * distance + 1
        far = 0.5 * np.maximum(2 - distance, 0) ** 2
        weights = np.where(distance < 1, near, far) * (1 - distance)
    else:
        weights = np.maximum(1 - distance, 0)
    weights *= (taps >= lo) & (taps < hi)
    weights /= weights.sum(1, keepdims=True)
    used = weights.any(0)
    taps = taps[:, used].clip(lo, hi - 1).astype(np.int64)
    return _Taps(taps, weights[:, used], (index >= first) & (index < last))


def _filter_rows(values: torch.Tensor, taps: Ints, weights: Doubles) -> torch.Tensor:
    values = values.contiguous()  # whole rows are picked
    columns = torch.tensor(taps.T, device=values.device)
    factors = torch.tensor(weights.T, dtype=values.dtype, device=values.device)[:, :, None]
    result = values.index_select(1, columns[0]).mul_(factors[0])
    for column, factor in zip(columns[1:], factors[1:], strict=True):
        result.addcmul_(values.index_select(1, column), factor)
    return result


class _Window(NamedTuple):
    """A part of a resized axis."""

    length: int  # of the whole axis, resized
    start: int
    flipped: bool


def resample_uint8(
    image: torch.Tensor,
    rows: Doubles,
    size: tuple[int, int],
    *,
    interpolation: str = "bilinear",
    antialias: bool = True,
    fill: Sequence[float] | None = None,
) -> torch.Tensor:
    """Resample one ``(C, H, W)`` uint8 image on the CPU to its finished picture, in a worker.

    A resize that `torch.nn.functional.interpolate` knows goes through its integer kernels: several
    times faster than the eager twin, within a level of PIL, and fastest where a pixel's channels
    are adjacent. Anything else is the twin, rounded. ``rows`` ``(2, 6)`` are not checked. The
    result shares no memory with ``image``, and has any strides.
    """
    vertical, horizontal = (_window(row, antialias) for row in rows.tolist())
    # Without antialias torch's bicubic is not PIL's (a = -0.75).
    exact = interpolation == "nearest" or (interpolation == "bicubic" and not antialias)
    if vertical is None or horizontal is None or exact:
        return resample_reference(
            [image],
            rows[None],
            size,
            interpolation=interpolation,
            antialias=antialias,
            fill=fill,
            dtype=torch.uint8,
        )[0]
    resized = _resized(image, rows, (vertical.length, horizontal.length), interpolation, antialias)
    return _placed(resized, rows, vertical, horizontal, size, fill)


def _resized(
    image: torch.Tensor, rows: Doubles, size: tuple[int, int], interpolation: str, antialias: bool
) -> torch.Tensor:
    """The whole box of an image in a size, by torch."""
    (top, bottom), (left, right) = rows[:, 2:4].astype(int).tolist()
    box = image[:, top:bottom, left:right]
    if box.shape[1:] == size:
        return box.clone()
    # A batch that torch knows as channels_last: its pixels are read and written as they are.
    batch = box.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
    return F.interpolate(
        batch, size, mode=interpolation, align_corners=not antialias, antialias=antialias
    )[0]


def _placed(
    resized: torch.Tensor,
    rows: Doubles,
    vertical: _Window,
    horizontal: _Window,
    size: tuple[int, int],
    fill: Sequence[float] | None,
) -> torch.Tensor:
    """The part of a resized box that the rows want, flipped, with padding around it."""
    (y0, y1), (x0, x1) = rows[:, 4:].astype(int).tolist()
    y = vertical.start
    x = horizontal.start
    picture = resized[:, y : y + y1 - y0, x : x + x1 - x0]
    if flipped := [dim for dim, window in ((1, vertical), (2, horizontal)) if window.flipped]:
        picture = picture.flip(flipped)
    if picture.shape[1:] != size and fill is None:
        picture = F.pad(picture, (x0, size[1] - x1, y0, size[0] - y1))
    elif picture.shape[1:] != size:
        levels = [math.floor(value + 0.5) for value in fill or ()]
        color = torch.tensor(levels, dtype=torch.uint8)[:, None, None]
        whole = color.expand(-1, *size).contiguous()
        whole[:, y0:y1, x0:x1] = picture
        picture = whole
    return picture


def _window(row: list[float], antialias: bool) -> _Window | None:
    """Read a row as part of a resize of its box; None where it is no such part.

    Antialiased resizes align the borders of the outermost pixels, others (kornia's) their centers.
    """
    origin, step, lo, hi, first, last = row
    if step == 0 or first == last:
        return None
    border = 0.5 if antialias else 0.0
    pitch = abs(step)
    length = (hi - lo - 1 + 2 * border) / pitch + 1 - 2 * border
    start = min((origin + step * j + border - lo) / pitch - border for j in (first, last - 1))
    if max(abs(length - round(length)), abs(start - round(start))) > 1e-6 * length:
        return None
    if not 0 <= round(start) <= round(length) - (last - first):
        return None  # kornia's half-pixel grid reaches beyond the outermost centers
    return _Window(round(length), round(start), step < 0)


@lru_cache
def finished_row(size: tuple[int, int]) -> Doubles:
    """The row, ``(2, 6)``, of an image that has its final size."""
    return np.array([(0, 1, 0, length, 0, length) for length in size], dtype=np.float64)


# --- Checks, for the kernel, too ---


def check(
    images: Sequence[torch.Tensor],
    sampling: torch.Tensor | Doubles,
    size: tuple[int, int],
    *,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
    out: torch.Tensor | None = None,
    positions: Sequence[int] | Ints | None = None,
    **coloring: Unpack[Coloring],
) -> tuple[Request, torch.Tensor]:
    """Check the arguments of :func:`.launch.resample`, and make its result if there is none."""
    channels = len(images[0])
    if out is None:
        out = torch.empty(
            (len(images), channels, *size),
            dtype=dtype,
            device=images[0].device,
            memory_format=memory_format,
        )
    assert out.shape[1:] == (channels, *size)
    places = np.arange(len(images)) if positions is None else np.asarray(positions, np.int64)
    return check_each(images, sampling, out, places, **coloring), out


def check_each(
    images: Sequence[torch.Tensor],
    sampling: torch.Tensor | Doubles,
    out: torch.Tensor | Sequence[torch.Tensor],
    places: Ints,
    *,
    interpolation: str = "bilinear",
    antialias: bool = True,
    mean: ChannelValues = None,
    std: ChannelValues = None,
    fill: ChannelValues = None,
) -> Request:
    """Check images that are to be resampled into the results ``places`` ``(N,)`` of ``out``."""
    ((kind, ndim, channels, device),) = {(t.dtype, t.dim(), len(t), t.device) for t in images}
    if ndim != 3 or kind not in (torch.uint8, *FLOAT_DTYPES):
        raise ValueError(
            f"images must be (C, H, W) of uint8 or floating point, got {ndim}-D {kind}"
        )
    addresses = np.array([image.data_ptr() for image in images], np.int64)
    strides = np.array([image.stride() for image in images], np.int64)
    rows = np.asarray(sampling, np.float64)
    assert rows.shape == (len(images), 2, 6)
    assert interpolation in SUPPORT
    assert len(places) == len(images)
    assert 0 <= places.min() <= places.max() < len(out)
    results = [out[place] for place in places.tolist()]
    ((made, on),) = {(result.dtype, result.device) for result in results}
    assert on == device
    assert all(len(result) == channels for result in results)
    sizes = np.array([result.shape[1:] for result in results], np.int64)
    check_rows(rows, np.array([image.shape[1:] for image in images], np.int64), sizes)
    means = per_channel("mean", mean, channels)
    stds = per_channel("std", std, channels)
    assert made in FLOAT_DTYPES or (made == torch.uint8 and means is stds is None)
    fills = per_channel("fill", fill, channels)
    return Request(
        addresses, strides, rows, out, places, interpolation, antialias, means, stds, fills
    )


def check_rows(rows: Doubles, sizes: Ints, size: Sizes) -> None:
    """Refuse sampling that would read outside of images of `sizes`, for results of `size`."""
    results = np.broadcast_to(size, (len(rows), 2))
    origin, step, lo, hi, first, last = np.moveaxis(rows, 2, 0)
    low, high = np.sort([origin + step * first, origin + step * (last - 1)], axis=0)
    # A resize has its outermost centers up to half a pixel outside of the box; further out there
    # may be no pixel to weigh. Where first == last all is padding, wherever the centers are.
    fits = (first == last) | ((low >= lo - 0.501) & (high <= hi - 0.499))
    fits &= (0 <= lo) & (lo < hi) & (hi <= sizes)
    fits &= (0 <= first) & (first <= last) & (last <= results)
    fits &= (rows[..., 2:] == np.floor(rows[..., 2:])).all(-1)
    if not fits.all():
        i, axis = np.argwhere(~fits)[0]
        raise ValueError(
            f"sampling[{i}, {axis}] = {rows[i, axis].tolist()} does not fit a source of "
            f"{sizes[i, axis]} and a result of {results[i, axis]} pixels"
        )


def per_channel(name: str, values: ChannelValues, channels: int) -> Numbers:
    if values is None:
        return None
    numbers: list[float] = torch.as_tensor(values, dtype=torch.float64).flatten().tolist()
    if len(numbers) not in (1, channels):
        raise ValueError(f"{name} must have {channels} values, one a channel, got {numbers}")
    return numbers if len(numbers) > 1 else numbers * channels
