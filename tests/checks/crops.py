"""Read a picture of ``configurations.py`` back: its values, and where it was cut from its file."""

import functools
import itertools
from typing import Any

import numpy as np
import torch
from bench import pictures
from configurations import Config

ROUNDING = 2.0  # levels, of a resampling on the CPU against eager PyTorch's

Picture = torch.Tensor
Pixels = np.ndarray[Any, Any]


def levels(config: Config, picture: Picture) -> Pixels:
    """``(3, H, W)`` in 0 to 255, whatever the list made of it."""
    values = picture.double().numpy()
    if not picture.is_floating_point():
        return values
    return (values * 0.25 + 0.5 if config.transforms == "normalize" else values) * 255


@functools.lru_cache(4096)
def decoded(data: bytes) -> Pixels:
    return pictures.read_with_pil(data).astype(np.float64)


@functools.cache
def weights(source: int, target: int) -> Pixels:
    """``(target, source)``: what eager PyTorch makes of each pixel as it resizes one axis."""
    each = torch.eye(source, dtype=torch.float64)[None, None]
    size = (target, source)
    made = torch.nn.functional.interpolate(each, size=size, mode="bilinear", antialias=True)
    return made[0, 0].numpy()


@functools.lru_cache(128)
def _spans(ramp: tuple[float, ...], target: int) -> tuple[Any, Any]:
    """Every part ``(start, length)`` of an axis, and what a resize makes of its ramp."""
    values = np.array(ramp)
    starts = []
    made = []
    for length in range(1, len(ramp) + 1):
        windows = np.lib.stride_tricks.sliding_window_view(values, length)
        starts += [(start, length) for start in range(len(windows))]
        made.append(windows @ weights(length, target).T)
    return np.array(starts), np.concatenate(made, dtype=np.float32)


def resampled(picture: Any, box: Any, size: tuple[int, int]) -> Pixels:
    """Eager PyTorch's crop and resize, ``(3, h, w)``; ``box`` is (top, left, height, width)."""
    top, left, height, width = box
    part = picture[top : top + height, left : left + width]
    rows = weights(height, size[0])
    columns = weights(width, size[1])
    return rows @ part.transpose(2, 0, 1) @ columns.T


def read_crop(values: Any, picture: Any) -> tuple[float, tuple[int, ...]]:
    """The crop that a result was made of: how far eager PyTorch's is off, and where it lies.

    Returns:
        The largest difference in levels; top, left, height, width, and 1 where it is mirrored.
    """
    size = values.shape[1:]
    y_spans, y_made = _spans(tuple(picture[..., 1].mean(1)), size[0])
    x_spans, x_made = _spans(tuple(picture[..., 0].mean(0)), size[1])
    y_best = np.abs(y_made - values[1].mean(1)).max(1).argsort(kind="stable")[:3]
    best = (np.inf, (0, 0, 0, 0, 0))
    for mirrored in (0, 1):
        upright = values[..., ::-1] if mirrored else values
        x_best = np.abs(x_made - upright[0].mean(0)).max(1).argsort(kind="stable")[:3]
        for y, x in itertools.product(y_best, x_best):
            top, height = y_spans[y].tolist()
            left, width = x_spans[x].tolist()
            box = (top, left, height, width)
            off = np.abs(resampled(picture, box, size) - upright).max()
            best = min(best, (float(off), (*box, mirrored)))
            if off <= ROUNDING:
                return best
    return best


def read_window(values: Any, picture: Any) -> tuple[float, tuple[int, ...]]:
    """The same of a crop that is not resized."""
    height, width = values.shape[1:]
    best = (np.inf, (0, 0, 0, 0, 0))
    for mirrored in (0, 1):
        upright = values[..., ::-1] if mirrored else values
        top = int(np.abs(picture[:, 0, 1] - upright[1, 0, 0]).argmin())
        left = int(np.abs(picture[0, :, 0] - upright[0, 0, 0]).argmin())
        part = picture[top : top + height, left : left + width].transpose(2, 0, 1)
        off = np.abs(part - upright).max() if part.shape == upright.shape else np.inf
        best = min(best, (float(off), (top, left, height, width, mirrored)))
    return best


def centered(config: Config, picture: Any) -> Pixels:
    from torchvision.transforms.v2 import functional

    whole = torch.from_numpy(picture).permute(2, 0, 1).to(torch.uint8)
    resized = functional.resize(whole, [config.size + 4], antialias=True)
    return functional.center_crop(resized, [config.size]).double().numpy()
