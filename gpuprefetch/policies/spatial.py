"""Ops that make a pixel of other pixels: arguments, eager twins, and where their samples lie.

ops_kernel.py has what the kernels do.
"""

from enum import IntEnum
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.policies.ops import (
    ARGS,
    Family,
    Filter,
    Op,
    Sample,
    Twin,
    as_tensor,
    flags,
    is_target,
    white_of,
)

_Doubles = npt.NDArray[np.float64]
_Singles = npt.NDArray[np.float32]
_Ints = npt.NDArray[np.int32]

# --- Arguments ---


class Affine(IntEnum):
    """Arguments of ``AFFINE_*``, in degrees and pixels."""

    ANGLE = 0
    TRANSLATE_X = 1
    TRANSLATE_Y = 2
    SCALE = 3
    SHEAR_X = 4
    SHEAR_Y = 5
    CENTER_X = 6  # NaN for the middle
    CENTER_Y = 7
    FILL = 8


class Perspective(IntEnum):
    """Arguments of ``PERSPECTIVE_*``."""

    COEFFICIENTS = 0  # eight, as torchvision has them
    FILL = 8


class Matrix(IntEnum):
    """Arguments of ``MATRIX_*``: ``(a x + b y + c, d x + e y + f)`` is the source of ``(x, y)``.

    The six numbers are those of PIL's ``transform``, in pixels from the corner. As in PIL, the
    border repeats.
    """

    A = 0
    B = 1
    C = 2
    D = 3
    E = 4
    F = 5
    FILL = 6


class Blur(IntEnum):
    """Arguments of ``BLUR``; for each sigma the kernels read an exponent, 1 / (2 sigma**2)."""

    SIGMA_X = 0
    SIGMA_Y = 1
    TAPS_X = 2  # the size of the kernel
    TAPS_Y = 3
    PLANE = 4  # in which the image is blurred along x; set when it is laid out


# --- The eager twins ---


@cache
def twins() -> dict[Op, Twin]:
    """What each of these ops does to a sample, with its arguments."""
    from torchvision.transforms.v2 import functional as F

    twins: dict[Op, Twin] = {
        Op.HFLIP: lambda x, a: F.horizontal_flip(x),
        Op.VFLIP: lambda x, a: F.vertical_flip(x),
        Op.SHARPNESS: lambda x, a: F.adjust_sharpness(x, a[0]),
        Op.BLUR: _blur,
    }
    sampled = {
        Family.AFFINE: _affine,
        Family.PERSPECTIVE: _perspective,
        Family.MATRIX: _matrix,
    }
    for op in Op:
        if op.family is not None and op.filter is not None:
            twins[op] = partial(sampled[op.family], filter=op.filter)
    return twins


def _fill_for(x: Sample, values: list[float]) -> list[float] | None:
    """The fill for a sample: masks and gray images have one value."""
    from torchvision.transforms.v2 import functional as F

    if values[0] != values[0]:
        return None
    return values[:1] if is_target(x) or F.get_num_channels(x) == 1 else values


def _blur(x: Sample, a: list[float]) -> Sample:
    from torchvision.transforms.v2 import functional as F

    sigma = a[Blur.SIGMA_X : Blur.SIGMA_Y + 1]
    return F.gaussian_blur(x, [int(a[Blur.TAPS_X]), int(a[Blur.TAPS_Y])], sigma)


def _affine(x: Sample, a: list[float], filter: Filter) -> Sample:
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as F

    center = a[Affine.CENTER_X : Affine.CENTER_Y + 1]
    return F.affine(
        x,
        angle=a[Affine.ANGLE],
        translate=a[Affine.TRANSLATE_X : Affine.TRANSLATE_Y + 1],
        scale=a[Affine.SCALE],
        shear=a[Affine.SHEAR_X : Affine.SHEAR_Y + 1],
        interpolation=InterpolationMode(filter.value),
        fill=_fill_for(x, a[Affine.FILL :]),
        center=None if center[0] != center[0] else center,
    )


def _perspective(x: Sample, a: list[float], filter: Filter) -> Sample:
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as F

    return F.perspective(
        x,
        startpoints=None,
        endpoints=None,
        interpolation=InterpolationMode(filter.value),
        fill=_fill_for(x, a[Perspective.FILL :]),
        coefficients=a[: Perspective.FILL],
    )


def _matrix(x: Sample, a: list[float], filter: Filter) -> Sample:
    if is_target(x):
        # Without the picture's fill: timm, whose op it is, knows no masks.
        return _perspective(x, [*a[: Matrix.FILL], 0.0, 0.0, *[np.nan] * 3], Filter.NEAREST)
    return as_tensor(partial(_sample_matrix, numbers=a, filter=filter), x)


def _sample_matrix(image: torch.Tensor, numbers: list[float], filter: Filter) -> torch.Tensor:
    a, b, c, d, e, f = numbers[: Matrix.FILL]
    device = image.device
    height, width = image.shape[-2:]
    x = torch.arange(width, dtype=torch.float32, device=device) + 0.5
    y = (torch.arange(height, dtype=torch.float32, device=device) + 0.5)[:, None]
    # No matrix product: in TF32, which training often turns on, it is off by a tenth of a pixel.
    source = torch.stack([x * a + y * b + c, x * d + y * e + f], dim=-1)
    size = torch.tensor([width, height], device=device)
    inside = ((source >= 0) & (source < size)).all(-1)
    values = image if image.is_floating_point() else image.float()
    grid = (2 * source / size - 1).to(values.dtype)
    sampled = torch.nn.functional.grid_sample(
        values[None], grid[None], filter.value, "border", align_corners=False
    )[0]
    sampled = sampled if image.is_floating_point() else sampled.round_()
    filled = _fill_for(image, numbers[Matrix.FILL : Matrix.FILL + 3]) or [0.0]
    fill = torch.tensor(filled, dtype=torch.float32, device=device)
    result = torch.where(inside, sampled.clamp_(0, white_of(image)), fill[:, None, None])
    return result.to(image.dtype)


# --- Where the samples lie ---


class Grid(IntEnum):
    """What the kernels read of an op that samples: output to source on torch's grid, -1 to 1.

    ``((a x + b y + c) / s, (d x + e y + f) / s)`` is the source of pixel ``(x, y)``, with
    ``s = g x + h y + 1``. An affine map counts pixels from the middle, and its ``s`` is 1. The
    others count from the corner, on a grid from 0 to 2: the kernels subtract 1.

    A flip of an image 8 pixels wide, as an affine map, has ``a`` = -1 / 4: the middle of the first
    pixel is at -3.5, and its source at 0.875 is the middle of the last one.
    """

    A = 0
    B = 1
    C = 2
    D = 3
    E = 4
    F = 5
    G = 6
    H = 7
    FILL = 8  # three values, NaN for none


_IS_AFFINE = flags(lambda op: op.family is Family.AFFINE)
_IS_PERSPECTIVE = flags(lambda op: op.family is Family.PERSPECTIVE)
_IS_MATRIX = flags(lambda op: op.family is Family.MATRIX)
_IS_NEAREST = flags(lambda op: op.filter is Filter.NEAREST)


def coordinates(codes: _Ints, args: _Doubles, images: torch.Tensor) -> _Singles:
    """``(K, ARGS)`` for K ops that sample: their :class:`Grid`.

    Args:
        codes: ``(K,)``.
        args: ``(K, ARGS)``.
        images: of whose height, width and dtype the samples are.
    """
    height, width = images.shape[-2:]
    affine = _IS_AFFINE[codes]
    perspective = _IS_PERSPECTIVE[codes]
    matrix = _IS_MATRIX[codes]
    params = np.zeros((len(args), ARGS), np.float32)
    columns = args.T
    matrices = columns[: Grid.G]
    fill = columns[Affine.FILL :]
    if affine.all():
        matrices = _affine_matrices(columns, height, width)
    else:
        matrices = matrices.copy()
        matrices[:, affine] = _affine_matrices(columns[:, affine], height, width)
        params[perspective, Grid.G : Grid.FILL] = args[perspective, Grid.G : Grid.FILL]
        given = columns[Matrix.FILL : Matrix.FILL + 3]
        given = np.trunc(given) % 256 if images.dtype == torch.uint8 else given
        fill = np.where(matrix, given, fill)
    # In float32 from here on, as torchvision has it.
    halves = np.array([0.5 * width, 0.5 * height], np.float32).repeat(3)
    params[:, : Grid.G] = matrices.T.astype(np.float32) / halves
    # Without a fill, the nearest pixel is black outside, and a border that repeats has no outside.
    black = np.isnan(fill[0]) & (_IS_NEAREST[codes] | matrix)
    params[:, Grid.FILL :] = np.where(black, 0, fill).T
    return params


def _affine_matrices(args: _Doubles, height: int, width: int) -> _Doubles:
    """``(6, K)`` of ``(ARGS, K)``: output to source, from the middle, as torchvision has it."""
    angle = np.radians(args[Affine.ANGLE])
    shear_x = np.radians(args[Affine.SHEAR_X])
    shear_y = np.radians(args[Affine.SHEAR_Y])
    scale = args[Affine.SCALE]
    center = args[[Affine.CENTER_X, Affine.CENTER_Y]] - ((0.5 * width,), (0.5 * height,))
    center[np.isnan(center)] = 0
    moved = center + args[[Affine.TRANSLATE_X, Affine.TRANSLATE_Y]]
    turned = angle - shear_y
    cos_y = np.cos(shear_y)
    tan_x = np.tan(shear_x)
    # The map from source to output is (a b; c d); its inverse, as its determinant is 1:
    a = np.cos(turned) / cos_y
    c = np.sin(turned) / cos_y
    b = -(a * tan_x + np.sin(angle))
    d = np.cos(angle) - c * tan_x
    inverse = np.stack([d, -b, -c, a]) / scale
    x = center[0] - (inverse[0] * moved[0] + inverse[1] * moved[1])
    y = center[1] - (inverse[2] * moved[0] + inverse[3] * moved[1])
    return np.stack([inverse[0], inverse[1], x, inverse[2], inverse[3], y])
