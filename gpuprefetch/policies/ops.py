"""What random policies do to a batch, each image with an op of its own: programs and their twin.

A :class:`Program` has slots. In each slot every image has one op of :data:`OPS` and its arguments,
drawn before. The eager twin calls torchvision image by image and defines the results. On a GPU one
launch carries out a slot for all images, whatever op each has; slots next to each other that move
no pixels share one. A launch of statistics stands before it where an image needs them.

Arguments, in this order, in torchvision's units (a value of ``uint8`` images is 0 to 255, of
others 0 to 1); ``fill`` is three values, or NaN for torchvision's ``fill=None``:

- ``BRIGHTNESS``, ``CONTRAST``, ``SATURATION``, ``HUE``, ``SHARPNESS``: factor.
- ``POSTERIZE``: bits. ``SOLARIZE``: threshold, above the range for none.
- ``SOLARIZE_ADD``: what is added, and the threshold below which it is.
- ``GRAYSCALE``, ``INVERT``, ``AUTOCONTRAST``, ``EQUALIZE``, ``HFLIP``, ``VFLIP``: none.
- ``PERMUTE``: for each of three channels the one that it is taken from.
- ``ERASE``: top, left, height, width, three values.
- ``ERASE_NOISE``: top, left, height, width, and the seed of normal noise, below 2**24.
- ``AFFINE_*``: angle, translate x, y, scale, shear x, y, center x, y (NaN for the middle), fill.
- ``PERSPECTIVE_*``: eight coefficients, fill.
- ``MATRIX_*``: the six numbers that PIL's ``transform`` takes, from output to source in pixels
  from the corner, and fill; the border repeats, as in PIL.
- ``BLUR``: sigma x, y, kernel size x, y.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.transforms.kernel import HAS_TRITON
from gpuprefetch.transforms.reference import ChannelValues, per_channel

if TYPE_CHECKING:
    from gpuprefetch.policies.ops_launch import Layout

ARGS = 12

Share = Callable[[torch.Tensor], torch.Tensor]

# Each pixel by itself; pixels that move, and boxes with them; a pixel and its neighbors.
POINT = (
    "IDENTITY BRIGHTNESS CONTRAST SATURATION HUE POSTERIZE SOLARIZE SOLARIZE_ADD GRAYSCALE INVERT"
    " AUTOCONTRAST EQUALIZE PERMUTE ERASE ERASE_NOISE"
).split()
GATHER = (
    "HFLIP VFLIP AFFINE_NEAREST AFFINE_BILINEAR PERSPECTIVE_NEAREST PERSPECTIVE_BILINEAR"
    " MATRIX_BILINEAR MATRIX_BICUBIC"
).split()
STENCIL = ["SHARPNESS", "BLUR"]
NAMES = (*POINT, *GATHER, *STENCIL)
# The code of each op in a program.
OPS = {name: code for code, name in enumerate(NAMES)}


@dataclass(slots=True)
class Program:
    """What is done to each image of a batch: N images and S slots."""

    ops: npt.NDArray[np.int32]  # (N, S) codes; 0 leaves an image as it is
    args: npt.NDArray[np.float64]  # (N, S, ARGS)
    # The last slots that come after normalization. These may erase, nothing else, and their values
    # are in the units of the result.
    finals: int = 0
    # (1 + width, M): each of M images becomes a weighted mean of itself and of `width` results that
    # start from it; N is width * M, the first ones of all images first. None for no such mixing.
    weights: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """What the last launch does to the result."""

    mean: ChannelValues = None  # in [0, 1] units
    std: ChannelValues = None
    # Floating point scales uint8 to [0, 1]. None is that of the images, or with a mean or std
    # float32 for uint8.
    dtype: torch.dtype | None = None
    memory_format: torch.memory_format | None = None  # None is that of the images

    @property
    def normalizes(self) -> bool:
        return self.mean is not None or self.std is not None

    def form(self, images: torch.Tensor) -> tuple[torch.dtype, torch.memory_format]:
        floats = self.normalizes and images.dtype == torch.uint8
        last = images.is_contiguous(memory_format=torch.channels_last)
        last = last and not images.is_contiguous()
        own = torch.channels_last if last else torch.contiguous_format
        dtype = self.dtype or (torch.float32 if floats else images.dtype)
        return dtype, self.memory_format or own

    def colors(self, images: torch.Tensor) -> npt.NDArray[np.float64]:
        """``(2, C)``, what each channel is multiplied by, and what is added."""
        channels = images.shape[1]
        mean = np.array(per_channel("mean", self.mean, channels) or [0.0] * channels)
        std = np.array(per_channel("std", self.std, channels) or [1.0] * channels)
        white = 255.0 if images.dtype == torch.uint8 else 1.0
        return np.stack([1 / (white * std), -mean / std])


AS_IT_IS = Finish()


def run(
    images: torch.Tensor,
    program: "Program | Layout",
    finish: Finish = AS_IT_IS,
    share: Share | None = None,
) -> torch.Tensor:
    """Carry out a program, then normalize, cast and lay out, on the current stream.

    ``images`` are ``(M, C, H, W)`` uint8, or floating point in [0, 1], with C of 1 or 3; they are
    left untouched, and given back where there is nothing to do. A ``program`` that a worker drew is
    laid out for them. ``share`` gets the tensor for the result before it is written, on the CPU.
    """
    from gpuprefetch.policies import ops_launch

    if program.weights is not None:
        return _mixed(images, program, program.weights)
    if isinstance(program, ops_launch.Layout) or (images.is_cuda and HAS_TRITON):
        return ops_launch.launch(images, program, finish)
    return reference(images, program, finish, share)


def _mixed(images: torch.Tensor, program: "Program | Layout", weights: Any) -> torch.Tensor:
    on_device = torch.from_numpy(weights).to(images.device, non_blocking=True)
    own, *others = on_device[..., None, None, None]
    total: torch.Tensor = images * own
    chains = run(torch.cat([images] * len(others)), replace(program, weights=None))
    for weight, chain in zip(others, chains.view(len(others), *images.shape), strict=True):
        total.addcmul_(chain, weight)
    return total.to(images.dtype)


def _mixed_one(sample: Any, program: Program) -> Any:
    """For a program of one image."""
    if _is_target(sample):
        raise ValueError(
            "AugMix mixes what it moves to different places, and boxes, masks or points cannot "
            "follow. Leave it out where there are some."
        )
    return _as_tensor(lambda image, _: run(image[None], program)[0], sample, None)


# --- The eager twin ---


def reference(
    images: torch.Tensor,
    program: Program,
    finish: Finish = AS_IT_IS,
    share: Share | None = None,
) -> torch.Tensor:
    """Eager twin of :func:`run`: torchvision's functions or ours of ops_cpu.py, image by image."""
    dtype, memory_format = finish.form(images)
    finishes = finish.normalizes or dtype != images.dtype
    if not finishes and not program.ops.any():
        return images.contiguous(memory_format=memory_format)
    out = torch.empty(images.shape, dtype=dtype, device=images.device, memory_format=memory_format)
    if share is not None:
        share(out)
    wide = torch.promote_types(dtype, torch.float32)
    scale, shift = torch.as_tensor(finish.colors(images)).to(images.device, wide)[..., None, None]
    quick = images.device.type == "cpu" and images.dtype == torch.uint8 and images.shape[1] == 3
    for n, given in enumerate(images):
        image = apply_one(given, program, n, quick=quick)
        if finishes:
            image = (image.to(wide) * scale).add_(shift)
        out[n] = apply_one(image.to(dtype), program, n, finals=True) if program.finals else image
    return out


def apply_one(
    sample: Any, program: Program, row: int, *, finals: bool = False, quick: bool = False
) -> Any:
    """Do to one sample what the program says of image `row`.

    It is an image, ``(C, H, W)`` or PIL, or a mask, boxes or points of `torchvision.tv_tensors`,
    which only ops that move pixels change. ``finals`` runs the slots after normalization instead of
    those before. ``quick`` is for ``(3, H, W)`` uint8 on the CPU. What no op touches is the same
    object.
    """
    from gpuprefetch.policies import ops_cpu

    if program.weights is not None:
        return _mixed_one(sample, program)
    before, target = program.ops.shape[1] - program.finals, _is_target(sample)
    slots = slice(before, None) if finals else slice(before)
    for code, args in zip(program.ops[row, slots].tolist(), program.args[row, slots], strict=True):
        name = NAMES[code]
        if name == "IDENTITY" or (target and name not in GATHER):
            continue
        done = ops_cpu.apply(name, sample, args) if quick else None
        if done is None:
            family, _, mode = name.partition("_") if name in GATHER else (name, "", "")
            done = _calls()[family](sample, args.tolist(), mode)
        sample = done
    return sample


# Filters by PIL's numbers, which torchvision takes.
_OF_PIL = {"NEAREST": 0, "BILINEAR": 2}


@cache
def _calls() -> dict[str, Callable[[Any, list[float], str], Any]]:
    """For each op, without its filter, what it does to a sample with arguments."""
    from torchvision.transforms.v2 import functional as F

    def affine(x: Any, a: list[float], mode: str) -> Any:
        fill, center = _fill(x, a[8:11]), None if a[6] != a[6] else a[6:8]
        return F.affine(x, a[0], a[1:3], a[3], a[4:6], _OF_PIL[mode], fill, center)

    def erase(x: Any, a: list[float], mode: str) -> Any:
        given = a[4 : 4 + F.get_num_channels(x)]
        values = torch.tensor(given, dtype=torch.float32)[:, None, None]
        return F.erase(x, *map(int, a[:4]), values)

    def erase_noise(x: Any, a: list[float], mode: str) -> Any:
        top, left, height, width, seed = map(int, a[:5])
        values = noise(seed, (F.get_num_channels(x), height, width))
        return F.erase(x, top, left, height, width, values.to(getattr(x, "device", "cpu")))

    def permute(x: Any, a: list[float], mode: str) -> Any:
        gray = F.get_num_channels(x) == 1
        return x if gray else F.permute_channels(x, [int(channel) for channel in a[:3]])

    def perspective(x: Any, a: list[float], mode: str) -> Any:
        return F.perspective(x, None, None, _OF_PIL[mode], _fill(x, a[8:11]), a[:8])

    return {
        "BRIGHTNESS": lambda x, a, m: F.adjust_brightness(x, a[0]),
        "CONTRAST": lambda x, a, m: F.adjust_contrast(x, a[0]),
        "SATURATION": lambda x, a, m: F.adjust_saturation(x, a[0]),
        "HUE": lambda x, a, m: F.adjust_hue(x, a[0]),
        "SHARPNESS": lambda x, a, m: F.adjust_sharpness(x, a[0]),
        "POSTERIZE": lambda x, a, m: F.posterize(x, int(a[0])),
        "SOLARIZE": lambda x, a, m: x if a[0] > _white(x) else F.solarize(x, a[0]),
        "SOLARIZE_ADD": lambda x, a, m: _as_tensor(_solarize_add, x, a),
        "GRAYSCALE": lambda x, a, m: F.rgb_to_grayscale(x, F.get_num_channels(x)),
        "INVERT": lambda x, a, m: F.invert(x),
        "AUTOCONTRAST": lambda x, a, m: F.autocontrast(x),
        "EQUALIZE": lambda x, a, m: F.equalize(x),
        "PERMUTE": permute,
        "HFLIP": lambda x, a, m: F.horizontal_flip(x),
        "VFLIP": lambda x, a, m: F.vertical_flip(x),
        "BLUR": lambda x, a, m: F.gaussian_blur(x, [int(a[2]), int(a[3])], a[:2]),
        "ERASE": erase,
        "ERASE_NOISE": erase_noise,
        "AFFINE": affine,
        "PERSPECTIVE": perspective,
        "MATRIX": _matrix,
    }


def _fill(x: Any, values: list[float]) -> list[float] | None:
    """Of masks the first value: they have one channel."""
    from torchvision.transforms.v2 import functional as F

    if values[0] != values[0]:
        return None
    return values[:1] if _is_target(x) or F.get_num_channels(x) == 1 else values


def _is_target(x: Any) -> bool:
    from torchvision import tv_tensors

    return isinstance(x, (tv_tensors.Mask, tv_tensors.BoundingBoxes, tv_tensors.KeyPoints))


def _white(x: Any) -> float:
    return 1.0 if isinstance(x, torch.Tensor) and x.is_floating_point() else 255.0


def _as_tensor(fn: Callable[[torch.Tensor, Any], torch.Tensor], x: Any, a: Any) -> Any:
    """Call on a tensor what knows no PIL images."""
    from torchvision.transforms.v2 import functional as F

    return fn(x, a) if isinstance(x, torch.Tensor) else F.to_pil_image(fn(F.pil_to_tensor(x), a))


def _solarize_add(image: torch.Tensor, a: list[float]) -> torch.Tensor:
    brighter = (image + a[0]).clamp_(max=_white(image)).to(image.dtype)
    return torch.where(image < a[1], brighter, image)


def _matrix(x: Any, a: list[float], mode: str) -> Any:
    from torchvision.transforms.v2 import functional as F

    if _is_target(x):
        # Not the fill of the picture: timm, whose op it is, knows no masks.
        return F.perspective(x, None, None, _OF_PIL["NEAREST"], None, [*a[:6], 0.0, 0.0])
    return _as_tensor(partial(_sample_matrix, mode=mode.lower()), x, a)


def _sample_matrix(image: torch.Tensor, a: list[float], mode: str) -> torch.Tensor:
    device, (height, width) = image.device, image.shape[-2:]
    x = torch.arange(width, dtype=torch.float32, device=device) + 0.5
    y = (torch.arange(height, dtype=torch.float32, device=device) + 0.5)[:, None]
    # No matrix product: in TF32, which training often turns on, it is off by a tenth of a pixel.
    source = torch.stack([x * a[0] + y * a[1] + a[2], x * a[3] + y * a[4] + a[5]], dim=-1)
    size = torch.tensor([width, height], device=device)
    inside = ((source >= 0) & (source < size)).all(-1)
    values = image if image.is_floating_point() else image.float()
    grid = (2 * source / size - 1).to(values.dtype)
    sampled = torch.nn.functional.grid_sample(
        values[None], grid[None], mode, "border", align_corners=False
    )[0]
    sampled = sampled if image.is_floating_point() else sampled.round_()
    fill = torch.tensor(_fill(image, a[6:9]) or [0.0], dtype=torch.float32, device=device)
    result = torch.where(inside, sampled.clamp_(0, _white(image)), fill[:, None, None])
    return result.to(image.dtype)


def noise(seed: int, shape: Sequence[int]) -> torch.Tensor:
    """Standard normal float32 on the CPU from a seed: what ``tl.randn`` makes of it (Philox)."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    count = int(np.prod(shape))
    a = np.arange(count, dtype=np.uint64)
    b, c, d = np.zeros((3, count), np.uint64)
    keys = np.array([seed, 0], np.uint64)
    for _ in range(10):
        left, right = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b, c, d = (
            (right >> half) ^ b ^ keys[0],
            right & low,
            (left >> half) ^ d ^ keys[1],
            left & low,
        )
        keys = (keys + np.array([0x9E3779B9, 0xBB67AE85], np.uint64)) & low
    bits = np.stack([a, b]).astype(np.uint32).view(np.int32)
    u, v = np.where(bits < 0, ~bits, bits).astype(np.float32) * np.float32(4.6566127342e-10)
    radius = np.sqrt(np.float32(-2) * np.log(np.maximum(u, np.float32(1e-7))))
    return torch.from_numpy(radius * np.cos(np.float32(2 * np.pi) * v)).view(*shape)
