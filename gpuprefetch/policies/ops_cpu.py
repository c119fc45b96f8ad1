"""Ops on ``uint8`` images on the CPU where NumPy is several times as fast as torchvision's tensors.

NumPy converts between ``uint8`` and ``float32`` with vector instructions, and a grid that is a sum
of a row and a column needs no matrix product. The results are torchvision's within a level.
"""

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.policies.ops import Family, Filter, Op
from gpuprefetch.policies.spatial import Grid, coordinates

_Doubles = npt.NDArray[np.float64]
_Singles = npt.NDArray[np.float32]
_Levels = npt.NDArray[np.uint8]


def apply(op: Op, image: torch.Tensor, args: _Doubles) -> torch.Tensor | None:
    """What an op makes of a ``(3, H, W)`` image; None for one that is as fast in torchvision."""
    if op.family is Family.AFFINE:
        return _moved(op, image, args)
    if op not in _QUICK or min(image.shape) < 3:
        return None
    return torch.from_numpy(_QUICK[op](image.numpy(), float(args[0])))


def _levels(values: _Singles) -> _Levels:
    levels: _Levels = values.clip(0, 255, out=values).astype(np.uint8)
    return levels


def _sharpened(image: _Levels, factor: float) -> _Levels:
    wide = image.astype(np.uint16)
    rows = wide[:, :-2] + wide[:, 1:-1]
    rows += wide[:, 2:]
    box = rows[..., :-2] + rows[..., 1:-1]
    box += rows[..., 2:]
    inner = wide[:, 1:-1, 1:-1]
    box += inner * np.uint16(4)
    blurred = np.rint(box * np.float32(1 / 13)) - inner
    values = torch.from_numpy(inner.astype(np.float32)).add_(
        torch.from_numpy(blurred), alpha=1 - factor
    )
    result = image.copy()
    result[:, 1:-1, 1:-1] = _levels(values.numpy())
    return result


def _hued(image: _Levels, shift: float) -> _Levels:
    red, green, blue = image.astype(np.float32)
    most = np.maximum(np.maximum(red, green), blue)
    least = np.minimum(np.minimum(red, green), blue)
    span = most - least
    hue = np.where(most == green, blue - red + 2 * span, red - green + 4 * span)
    hue = np.where(most == red, green - blue, hue)  # in sixths of the circle from here on
    hue /= np.maximum(span, 1)
    hue += 6 * shift
    hue -= 6 * np.floor(hue * (1 / 6))
    result = np.empty_like(image)
    white = 255.999 / 255  # torchvision's cast from [0, 1]
    span *= white
    least *= white
    for out, middle, sign in zip(result, (3, 2, 4), (1, -1, -1), strict=True):
        ramp = np.abs(hue - middle)
        ramp = ramp - 1 if sign > 0 else 2 - ramp
        out[:] = ramp.clip(0, 1, out=ramp) * span + least
    return result


def _solarized(image: _Levels, threshold: float) -> _Levels:
    return np.where(image >= np.float32(threshold), 255 - image, image)


_QUICK = {Op.HUE: _hued, Op.SHARPNESS: _sharpened, Op.SOLARIZE: _solarized}


def _moved(op: Op, image: torch.Tensor, args: _Doubles) -> torch.Tensor:
    height, width = image.shape[1:]
    (params,) = coordinates(np.array([op], np.int32), args[None], image)
    x = np.arange(width, dtype=np.float32) + np.float32(0.5 - 0.5 * width)
    y = (np.arange(height, dtype=np.float32) + np.float32(0.5 - 0.5 * height))[:, None]
    grid = np.empty((height, width, 2), np.float32)
    for axis, (a, b, c) in enumerate(
        params[: Grid.G].reshape(2, 3)
    ):  # rounded as a matrix product is
        np.add(x * a + y * b, c, out=grid[..., axis])
    fill = torch.from_numpy(params[Grid.FILL :])[:, None, None]
    assert op.filter is not None
    # How much of a pixel is from inside is sampled with the colors. The nearest pixel needs none of
    # it where what is outside is black.
    colored = bool(fill.any() if op.filter is Filter.NEAREST else fill.isfinite().all())
    values = image.float()
    values = torch.cat([values, torch.ones_like(values[:1])]) if colored else values
    sampled = torch.nn.functional.grid_sample(
        values[None],
        torch.from_numpy(grid)[None],
        op.filter.value,
        padding_mode="zeros",
        align_corners=False,
    )[0]
    if colored:
        sampled = (sampled[:3] - fill) * sampled[3:] + fill
    levels = sampled.numpy()
    return torch.from_numpy(np.rint(levels, out=levels).astype(np.uint8))
