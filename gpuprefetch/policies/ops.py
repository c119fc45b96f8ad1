"""The ops that a random policy is made of, with their codes and arguments.

A pointwise op is all here: its code (:class:`Op`), its eager twin, which defines the result
(:func:`twins`), and what the kernels do to a pixel (:func:`point`). A spatial op makes a pixel of
other pixels: its twin is in spatial.py, and what the kernels do is in ops_kernel.py.

Arguments of an op are in torchvision's units (a value of ``uint8`` images is 0 to 255, of others 0
to 1), in this order; ``fill`` is three values, or NaN for torchvision's ``fill=None``:

- ``BRIGHTNESS``, ``CONTRAST``, ``SATURATION``, ``HUE``, ``SHARPNESS``: factor.
- ``POSTERIZE``: bits. ``SOLARIZE``: threshold, above the range for none.
- ``SOLARIZE_ADD``: what is added, and the threshold below which it is.
- ``GRAYSCALE``, ``INVERT``, ``AUTOCONTRAST``, ``EQUALIZE``, ``HFLIP``, ``VFLIP``: none.
- ``PERMUTE``: for each of three channels the one that it is taken from.
- ``ERASE``, ``ERASE_NOISE``: :class:`Erase`.
- the others: :class:`.spatial.Affine`, :class:`.spatial.Perspective`, :class:`.spatial.Matrix`,
  :class:`.spatial.Blur`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Callable, Sequence
from enum import Enum, IntEnum, auto
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.transforms.kernel import tl, triton


class Filter(Enum):
    """How pixels are made from those around a point; the values are torch's names."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"


class Family(Enum):
    """The ops that sample between pixels, whatever their filter."""

    AFFINE = auto()
    PERSPECTIVE = auto()
    MATRIX = auto()


class Op(IntEnum):
    """The code of each op in a program. Pointwise ops come first: the kernels rely on it."""

    # Pointwise: a pixel is made of itself, its place, and statistics of the image.
    IDENTITY = 0
    BRIGHTNESS = auto()
    CONTRAST = auto()
    SATURATION = auto()
    HUE = auto()
    POSTERIZE = auto()
    SOLARIZE = auto()
    SOLARIZE_ADD = auto()
    GRAYSCALE = auto()
    INVERT = auto()
    AUTOCONTRAST = auto()
    EQUALIZE = auto()
    PERMUTE = auto()
    ERASE = auto()
    ERASE_NOISE = auto()
    # Spatial: it is made of other pixels.
    HFLIP = auto()
    VFLIP = auto()
    AFFINE_NEAREST = auto()
    AFFINE_BILINEAR = auto()
    PERSPECTIVE_NEAREST = auto()
    PERSPECTIVE_BILINEAR = auto()
    MATRIX_BILINEAR = auto()
    MATRIX_BICUBIC = auto()
    SHARPNESS = auto()
    BLUR = auto()

    @property
    def is_spatial(self) -> bool:
        """Whether a pixel is made of other pixels."""
        return self.moves or self in _STENCILS

    @property
    def moves(self) -> bool:
        """Whether pixels move, and boxes, masks and points with them."""
        return self in _FLIPS or self in _SAMPLED

    @property
    def family(self) -> Family | None:
        """The kind of an op that samples between pixels; None for others."""
        return _SAMPLED[self][0] if self in _SAMPLED else None

    @property
    def filter(self) -> Filter | None:
        """The filter of an op that samples between pixels; None for others."""
        return _SAMPLED[self][1] if self in _SAMPLED else None

    @property
    def needs_statistics(self) -> bool:
        """Whether its result depends on all pixels of the image."""
        return self in _STATISTICAL

    @property
    def needs_colors(self) -> bool:
        """Whether it leaves a gray image as it is."""
        return self in _CHROMATIC

    @staticmethod
    def sampling(family: Family, filter: Filter) -> "Op":
        """The op of a family with a filter."""
        return next(op for op, given in _SAMPLED.items() if given == (family, filter))


_STENCILS = frozenset((Op.SHARPNESS, Op.BLUR))
_FLIPS = frozenset((Op.HFLIP, Op.VFLIP))
_SAMPLED = {
    Op.AFFINE_NEAREST: (Family.AFFINE, Filter.NEAREST),
    Op.AFFINE_BILINEAR: (Family.AFFINE, Filter.BILINEAR),
    Op.PERSPECTIVE_NEAREST: (Family.PERSPECTIVE, Filter.NEAREST),
    Op.PERSPECTIVE_BILINEAR: (Family.PERSPECTIVE, Filter.BILINEAR),
    Op.MATRIX_BILINEAR: (Family.MATRIX, Filter.BILINEAR),
    Op.MATRIX_BICUBIC: (Family.MATRIX, Filter.BICUBIC),
}
_STATISTICAL = frozenset((Op.CONTRAST, Op.AUTOCONTRAST, Op.EQUALIZE))
_CHROMATIC = frozenset((Op.SATURATION, Op.HUE, Op.GRAYSCALE, Op.PERMUTE))


def flags(test: Callable[[Op], bool]) -> npt.NDArray[np.bool_]:
    """What a test says of each op, to be indexed with an array of codes."""
    return np.array([test(op) for op in Op])


# --- Arguments ---

ARGS = 11  # as many as the op with the most has


class Erase(IntEnum):
    """Arguments of ``ERASE`` and ``ERASE_NOISE``, in pixels."""

    TOP = 0
    LEFT = 1
    HEIGHT = 2
    WIDTH = 3
    VALUES = 4  # three of ERASE
    SEED = 4  # of ERASE_NOISE: of normal noise, below 2**24


# --- The eager twins of pointwise ops ---

Sample = Any  # (C, H, W), a PIL image, or a mask, boxes or points of torchvision.tv_tensors
Twin = Callable[[Sample, list[float]], Sample]


@cache
def twins() -> dict[Op, Twin]:
    """What each pointwise op does to a sample, with its arguments."""
    from torchvision.transforms.v2 import functional as F

    return {
        Op.IDENTITY: lambda x, a: x,
        Op.BRIGHTNESS: lambda x, a: F.adjust_brightness(x, a[0]),
        Op.CONTRAST: lambda x, a: F.adjust_contrast(x, a[0]),
        Op.SATURATION: lambda x, a: F.adjust_saturation(x, a[0]),
        Op.HUE: lambda x, a: F.adjust_hue(x, a[0]),
        Op.POSTERIZE: lambda x, a: F.posterize(x, int(a[0])),
        Op.SOLARIZE: lambda x, a: x if a[0] > white_of(x) else F.solarize(x, a[0]),
        Op.SOLARIZE_ADD: lambda x, a: as_tensor(partial(_solarize_add, a=a), x),
        Op.GRAYSCALE: lambda x, a: F.rgb_to_grayscale(x, F.get_num_channels(x)),
        Op.INVERT: lambda x, a: F.invert(x),
        Op.AUTOCONTRAST: lambda x, a: F.autocontrast(x),
        Op.EQUALIZE: lambda x, a: F.equalize(x),
        Op.PERMUTE: _permute,
        Op.ERASE: _erase,
        Op.ERASE_NOISE: _erase_noise,
    }


def is_target(x: Sample) -> bool:
    """Whether a sample is a mask, boxes or points."""
    from torchvision import tv_tensors

    return isinstance(x, (tv_tensors.Mask, tv_tensors.BoundingBoxes, tv_tensors.KeyPoints))


def as_tensor(fn: Callable[[torch.Tensor], torch.Tensor], x: Sample) -> Sample:
    """Call a function of tensors, on PIL images as well."""
    from torchvision.transforms.v2 import functional as F

    return fn(x) if isinstance(x, torch.Tensor) else F.to_pil_image(fn(F.pil_to_tensor(x)))


def white_of(x: Sample) -> float:
    return 1.0 if isinstance(x, torch.Tensor) and x.is_floating_point() else 255.0


def _solarize_add(image: torch.Tensor, a: list[float]) -> torch.Tensor:
    added, threshold = a[:2]
    brighter = (image + added).clamp_(max=white_of(image)).to(image.dtype)
    return torch.where(image < threshold, brighter, image)


def _permute(x: Sample, a: list[float]) -> Sample:
    from torchvision.transforms.v2 import functional as F

    gray = F.get_num_channels(x) == 1
    return x if gray else F.permute_channels(x, [int(channel) for channel in a[:3]])


def _erase(x: Sample, a: list[float]) -> Sample:
    from torchvision.transforms.v2 import functional as F

    top, left, height, width = map(int, a[: Erase.VALUES])
    given = a[Erase.VALUES : Erase.VALUES + F.get_num_channels(x)]
    values = torch.tensor(given, dtype=torch.float32)[:, None, None]
    return F.erase(x, top, left, height, width, values)


def _erase_noise(x: Sample, a: list[float]) -> Sample:
    from torchvision.transforms.v2 import functional as F

    top, left, height, width, seed = map(int, a[: Erase.SEED + 1])
    values = noise(seed, (F.get_num_channels(x), height, width))
    return F.erase(x, top, left, height, width, values.to(getattr(x, "device", "cpu")))


def noise(seed: int, shape: Sequence[int]) -> torch.Tensor:
    """Standard normal float32 on the CPU from a seed: what ``tl.randn`` makes of it (Philox)."""
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    count = int(np.prod(shape))
    a = np.arange(count, dtype=np.uint64)
    b, c, d = np.zeros((3, count), np.uint64)
    keys = np.array([seed, 0], np.uint64)
    for _ in range(10):
        left = np.uint64(0xD2511F53) * a
        right = np.uint64(0xCD9E8D57) * c
        a = (right >> half) ^ b ^ keys[0]
        b = right & low
        c = (left >> half) ^ d ^ keys[1]
        d = left & low
        keys = (keys + np.array([0x9E3779B9, 0xBB67AE85], np.uint64)) & low
    bits = np.stack([a, b]).astype(np.uint32).view(np.int32)
    u, v = np.where(bits < 0, ~bits, bits).astype(np.float32) * np.float32(4.6566127342e-10)
    radius = np.sqrt(np.float32(-2) * np.log(np.maximum(u, np.float32(1e-7))))
    return torch.from_numpy(radius * np.cos(np.float32(2 * np.pi) * v)).view(*shape)


# --- The kernels' side of pointwise ops ---

# What the kernels read of an op: 32-bit words.
WORDS = np.dtype([("code", np.int32), ("args", np.float32, ARGS)])
FIELDS = WORDS.itemsize // 4
BINS = 256  # floats of the statistics of a channel: EQUALIZE's table, or up to two numbers
STATISTICS = 1  # the argument that says which statistics an op reads; set when it is laid out

if triton is not None:
    from gpuprefetch.transforms.kernel import clamp

    IDENTITY = tl.constexpr(Op.IDENTITY.value)
    BRIGHTNESS = tl.constexpr(Op.BRIGHTNESS.value)
    CONTRAST = tl.constexpr(Op.CONTRAST.value)
    SATURATION = tl.constexpr(Op.SATURATION.value)
    HUE = tl.constexpr(Op.HUE.value)
    POSTERIZE = tl.constexpr(Op.POSTERIZE.value)
    SOLARIZE = tl.constexpr(Op.SOLARIZE.value)
    SOLARIZE_ADD = tl.constexpr(Op.SOLARIZE_ADD.value)
    GRAYSCALE = tl.constexpr(Op.GRAYSCALE.value)
    INVERT = tl.constexpr(Op.INVERT.value)
    AUTOCONTRAST = tl.constexpr(Op.AUTOCONTRAST.value)
    EQUALIZE = tl.constexpr(Op.EQUALIZE.value)
    PERMUTE = tl.constexpr(Op.PERMUTE.value)
    ERASE = tl.constexpr(Op.ERASE.value)
    ERASE_NOISE = tl.constexpr(Op.ERASE_NOISE.value)
    FIRST_SPATIAL = tl.constexpr(min(op.value for op in Op if op.is_spatial))
    _ARGS = tl.constexpr(WORDS["code"].itemsize // 4)  # where they begin
    _STATISTICS = tl.constexpr(STATISTICS)
    _BINS = tl.constexpr(BINS)
    _TOP = tl.constexpr(Erase.TOP.value)
    _LEFT = tl.constexpr(Erase.LEFT.value)
    _HEIGHT = tl.constexpr(Erase.HEIGHT.value)
    _WIDTH = tl.constexpr(Erase.WIDTH.value)
    _VALUES = tl.constexpr(Erase.VALUES.value)

    @triton.jit
    def arg(op_ptr, i):
        """An argument of the op."""
        return float_at(op_ptr + _ARGS + i)

    @triton.jit
    def float_at(word_ptr):
        return tl.load(word_ptr).to(tl.float32, bitcast=True)

    @triton.jit
    def nearest(value):
        """Round to the nearest, of two to the even one: from 2**23 on float32 has no fractions."""
        return (value + 12582912.0) - 12582912.0

    @triton.jit
    def rounded(colors, UINT8: tl.constexpr):
        return [nearest(color) for color in colors] if UINT8 else colors

    @triton.jit
    def levels(colors, UINT8: tl.constexpr):
        """In range; torchvision's cast to uint8 truncates."""
        colors = [clamp(color, 0.0, 255.0 if UINT8 else 1.0) for color in colors]
        return [tl.floor(color) for color in colors] if UINT8 else colors

    @triton.jit
    def gray_of(colors, UINT8: tl.constexpr):
        gray = colors[0] * 0.2989 + colors[1] * 0.587 + colors[2] * 0.114
        return tl.floor(gray) if UINT8 else gray

    @triton.jit
    def bin_of(value, UINT8: tl.constexpr):
        if not UINT8:
            value = clamp(value * 255.999, 0.0, 255.0)
        return value.to(tl.int32)

    @triton.jit
    def point(op_ptr, statistics_ptr, colors, y, x, UINT8: tl.constexpr):
        code = tl.load(op_ptr)
        white = 255.0 if UINT8 else 1.0
        # Read in any case: no branch waits for them.
        a0 = arg(op_ptr, 0)
        a1 = arg(op_ptr, 1)
        a2 = arg(op_ptr, 2)
        if (code == CONTRAST) | (code == AUTOCONTRAST) | (code == EQUALIZE):
            tl.static_assert(_STATISTICS == 1)
            statistics_ptr += a1.to(tl.int32) * 3 * _BINS
        if (code == IDENTITY) | (code >= FIRST_SPATIAL):  # done where it was read
            pass
        elif (code == BRIGHTNESS) | (code == CONTRAST) | (code == SATURATION):
            other = tl.zeros_like(colors[0])
            if code == CONTRAST:
                other += tl.load(statistics_ptr)
            elif code == SATURATION:
                other = gray_of(colors, UINT8)
            other *= 1.0 - a0
            colors = levels([color * a0 + other for color in colors], UINT8)
        elif code == HUE:
            colors = _hue(colors, a0, UINT8)
        elif code == POSTERIZE:
            colors = [_posterize(color, a0, UINT8) for color in colors]
        elif code == SOLARIZE:
            colors = [tl.where(color >= a0, white - color, color) for color in colors]
        elif code == SOLARIZE_ADD:
            brighter = levels([color + a0 for color in colors], UINT8)
            colors = [tl.where(colors[c] < a1, brighter[c], colors[c]) for c in (0, 1, 2)]
        elif code == GRAYSCALE:
            gray = gray_of(colors, UINT8)
            colors = gray, gray, gray
        elif code == INVERT:
            colors = [white - color for color in colors]
        elif code == AUTOCONTRAST:
            colors = [_stretch(colors[c], statistics_ptr + c * _BINS) for c in (0, 1, 2)]
            colors = levels(colors, UINT8)
        elif code == EQUALIZE:
            bins = [bin_of(color, UINT8) for color in colors]
            colors = [tl.load(statistics_ptr + c * _BINS + bins[c]) for c in (0, 1, 2)]
        elif code == PERMUTE:
            colors = pick(colors, a0), pick(colors, a1), pick(colors, a2)
        else:
            colors = erase(code, op_ptr, colors, y, x, UINT8)
        return colors

    @triton.jit
    def _posterize(value, levels, UINT8: tl.constexpr):
        if UINT8:  # a mask
            return (value.to(tl.int32) & levels.to(tl.int32)).to(tl.float32)
        return clamp(tl.floor(value * levels), 0.0, levels - 1) * (1.0 / levels)

    @triton.jit
    def _stretch(value, statistics_ptr):
        least = tl.load(statistics_ptr)
        scale = tl.load(statistics_ptr + 1)
        return tl.div_rn(value - least, scale + tl.zeros_like(value))

    @triton.jit
    def pick(colors, channel):
        return tl.where(channel == 0, colors[0], tl.where(channel == 1, colors[1], colors[2]))

    @triton.jit
    def _hue(colors, shift, UINT8: tl.constexpr):
        r, g, b = [color * (1.0 / 255) for color in colors] if UINT8 else colors
        most = tl.maximum(tl.maximum(r, g), b)
        least = tl.minimum(tl.minimum(r, g), b)
        gray = most == least
        saturation = (most - least) / tl.where(gray, 1.0, most)
        divisor = tl.where(gray, 1.0, most - least)
        rc = (most - r) / divisor
        gc = (most - g) / divisor
        bc = (most - b) / divisor
        hue = tl.where(most == g, 2.0 + rc - bc, 4.0 + gc - rc)
        hue = tl.where(most == r, bc - gc, hue) * (1.0 / 6) + 1.0
        hue = hue - tl.floor(hue) + shift
        hue = 6.0 * (hue - tl.floor(hue))
        sector = tl.floor(hue)
        part = hue - sector
        sector = tl.where(sector == 6.0, 0.0, sector)
        q = clamp((1.0 - saturation * part) * most, 0.0, 1.0)
        t = clamp((1.0 - saturation + saturation * part) * most, 0.0, 1.0)
        p = clamp((1.0 - saturation) * most, 0.0, 1.0)
        r = tl.where((sector == 0.0) | (sector == 5.0), most, p)
        r = tl.where(sector == 1.0, q, tl.where(sector == 4.0, t, r))
        g = tl.where((sector == 1.0) | (sector == 2.0), most, p)
        g = tl.where(sector == 3.0, q, tl.where(sector == 0.0, t, g))
        b = tl.where((sector == 3.0) | (sector == 4.0), most, p)
        b = tl.where(sector == 5.0, q, tl.where(sector == 2.0, t, b))
        colors = r, g, b
        return [tl.floor(color * 255.999) for color in colors] if UINT8 else colors

    @triton.jit
    def erase(code, op_ptr, colors, y, x, UINT8: tl.constexpr):
        top = arg(op_ptr, _TOP).to(tl.int32)
        left = arg(op_ptr, _LEFT).to(tl.int32)
        height = arg(op_ptr, _HEIGHT).to(tl.int32)
        width = arg(op_ptr, _WIDTH).to(tl.int32)
        values = [arg(op_ptr, _VALUES + c) for c in (0, 1, 2)]
        inside = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)
        if code == ERASE:
            colors = [tl.where(inside, values[c], colors[c]) for c in (0, 1, 2)]
        elif code == ERASE_NOISE:
            at = (y - top) * width + x - left
            size = height * width
            seed = values[0].to(tl.int32)
            noise = [_noise(seed, at + c * size, UINT8) for c in (0, 1, 2)]
            colors = [tl.where(inside, noise[c], colors[c]) for c in (0, 1, 2)]
        return colors

    @triton.jit
    def _noise(seed, offset, UINT8: tl.constexpr):
        value = tl.randn(seed, offset)
        if UINT8:  # torch's cast: towards zero, then around
            value = (value.to(tl.int32) & 255).to(tl.float32)
        return value
