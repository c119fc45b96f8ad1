"""What random policies do to a batch, each image with an op of its own: twin and launcher.

A :class:`Program` has slots. In each slot every image has one op of :data:`OPS` and its arguments,
drawn before. The eager twin calls torchvision image by image and defines the results. On a GPU
one launch carries out a slot for all images, whatever op each has; slots next to each other that
move no pixels share one. A launch of statistics stands before it where an image needs them.

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
- ``ROTATE_*``: angle, center x, y (NaN for the middle), fill.
- ``PERSPECTIVE_*``: eight coefficients, fill. ``ELASTIC_*``: row of the program's fields, fill.
- ``MATRIX_*``: the six numbers that PIL's ``transform`` takes, from output to source in pixels
  from the corner, and fill; the border repeats, as in PIL.
- ``BLUR``: sigma x, y, kernel size x, y.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.core.nested import map_leaves
from gpuprefetch.transforms.kernel import HAS_TRITON

ARGS = 12

_Doubles = npt.NDArray[np.float64]
_Codes = npt.NDArray[np.int32]
_ChannelValues = Sequence[float] | torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Op:
    """One kind of op.

    Attributes:
        code: its number in a :class:`Program`.
        kind: ``"point"`` (each pixel by itself), ``"gather"`` (pixels move, and boxes with them)
            or ``"stencil"`` (a pixel and its neighbors).
        statistics: what it needs of the whole image: ``"gray mean"``, ``"min/max"``,
            ``"histogram"`` or None.
    """

    code: int
    kind: str
    statistics: str | None = None


_POINT = (
    "IDENTITY BRIGHTNESS CONTRAST SATURATION HUE POSTERIZE SOLARIZE SOLARIZE_ADD GRAYSCALE INVERT"
    " AUTOCONTRAST EQUALIZE PERMUTE ERASE ERASE_NOISE"
).split()
_GATHER = (
    "HFLIP VFLIP AFFINE_NEAREST AFFINE_BILINEAR ROTATE_NEAREST ROTATE_BILINEAR PERSPECTIVE_NEAREST"
    " PERSPECTIVE_BILINEAR ELASTIC_NEAREST ELASTIC_BILINEAR MATRIX_BILINEAR MATRIX_BICUBIC"
).split()
_STENCIL = "SHARPNESS BLUR".split()
_STATISTICS = {"CONTRAST": "gray mean", "AUTOCONTRAST": "min/max", "EQUALIZE": "histogram"}

OPS = {
    name: Op(code, kind, _STATISTICS.get(name))
    for code, (name, kind) in enumerate(
        (name, kind)
        for names, kind in ((_POINT, "point"), (_GATHER, "gather"), (_STENCIL, "stencil"))
        for name in names
    )
}
_NAMES = list(OPS)


@dataclass(slots=True)
class Program:
    """What is done to each image of a batch.

    Attributes:
        ops: ``(S, N)`` int32, the code of the op in slot s for image n; 0 leaves it as it is.
        args: ``(S, N, ARGS)`` float64, the arguments of the op; the rest is ignored.
        finals: the last slots that come after normalization; these may erase, nothing else, and
            their values are in the units of the result.
        rows: ``(N,)`` int64, the image of the batch that each of the N results starts from; None
            where it is its own.
        fields: ``(M, H, W, 2)`` float32 on the device of the images, the displacements that
            ``ELASTIC`` ops refer to, as `torchvision.transforms.v2.functional.elastic` takes them.
    """

    ops: _Codes
    args: _Doubles
    finals: int = 0
    rows: npt.NDArray[np.int64] | None = None
    fields: torch.Tensor | None = None


def run(
    images: torch.Tensor,
    program: Program,
    *,
    mean: _ChannelValues = None,
    std: _ChannelValues = None,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """Carry out a program, then normalize, cast and lay out.

    On CUDA it runs on the current stream; the host waits for nothing.

    Args:
        images: ``(M, C, H, W)`` uint8, or floating point in [0, 1], with C of 1 or 3; untouched.
        program: of M images, or of as many as it has `rows`.
        mean: C values in [0, 1] units, subtracted at the end.
        std: C values in [0, 1] units, divided by.
        dtype: of the result. Floating point scales ``uint8`` to [0, 1]. None is that of the
            images; with a mean or std, float32 for ``uint8``.
        memory_format: of the result; None is that of the images.

    Returns:
        ``(N, C, H, W)``; `images` themselves where there is nothing to do.

    Raises:
        ValueError: if shapes, dtypes or codes do not fit together.
    """
    from gpuprefetch.transforms import ops_launch

    by = ops_launch.launch if images.is_cuda and HAS_TRITON else reference
    return by(images, program, mean=mean, std=std, dtype=dtype, memory_format=memory_format)


# --- The eager twin ---


def reference(
    images: torch.Tensor,
    program: Program,
    *,
    mean: _ChannelValues = None,
    std: _ChannelValues = None,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """Eager twin of :func:`run`: torchvision's functions, image by image."""
    from torchvision.transforms.v2 import functional as F

    dtype = check(images, program, mean, std, dtype)
    normalized = mean is not None or std is not None
    memory_format = memory_format or memory_format_of(images)
    if not program.ops.any() and program.rows is None and dtype == images.dtype and not normalized:
        return images.contiguous(memory_format=memory_format)
    rows = range(len(images)) if program.rows is None else program.rows.tolist()
    done = [apply_one(images[row], program, n) for n, row in enumerate(rows)]
    if dtype.is_floating_point:
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        done = [F.to_dtype(image, compute, scale=True) for image in done]
        if normalized:
            done = [F.normalize(image, *colors_of(mean, std, images.shape[1])) for image in done]
    done = [apply_one(image.to(dtype), program, n, finals=True) for n, image in enumerate(done)]
    if not done:
        return images.new_empty((0, *images.shape[1:]), dtype=dtype)
    return torch.stack(done).contiguous(memory_format=memory_format)


def apply_one(inputs: Any, program: Program, row: int, *, finals: bool = False) -> Any:
    """Do to one sample what the program says of image `row`.

    Args:
        inputs: an image, ``(C, H, W)`` or PIL, or any structure with one in it. Ops that move
            pixels move masks, boxes and points of `torchvision.tv_tensors` too. A plain tensor is
            an image where it is the first one and there is no other image, as in torchvision.
        program: as for :func:`run`.
        row: of the program.
        finals: run the slots that come after normalization, instead of those before.

    Returns:
        The same structure; what no op touches is the same object.
    """
    before = len(program.ops) - program.finals
    for slot in range(before, len(program.ops)) if finals else range(before):
        code = int(program.ops[slot, row])
        if code:
            name, args = _NAMES[code], program.args[slot, row].tolist()
            family, _, mode = name.partition("_") if name in _GATHER else (name, "", "")
            call = partial(_calls()[family], a=args, mode=mode, program=program)
            inputs = _on_inputs(call, inputs, name in _GATHER)
    return inputs


def _on_inputs(call: Callable[[Any], Any], inputs: Any, moves: bool) -> Any:
    if type(inputs) is torch.Tensor:
        return call(inputs)
    from PIL import Image
    from torchvision import tv_tensors

    images = (tv_tensors.Image, tv_tensors.Video, Image.Image)
    moved = (*images, tv_tensors.Mask, tv_tensors.BoundingBoxes, tv_tensors.KeyPoints)
    kinds = moved if moves else images
    found: list[Any] = []
    map_leaves(found.append, inputs)
    pure = [leaf for leaf in found if type(leaf) is torch.Tensor]
    first = None if any(isinstance(leaf, images) for leaf in found) or not pure else pure[0]
    return map_leaves(
        lambda leaf: call(leaf) if leaf is first or isinstance(leaf, kinds) else leaf, inputs
    )


@cache
def _calls() -> dict[str, Callable[..., Any]]:
    """For each op, without its filter, what it does to an input with arguments."""
    from torchvision.transforms.v2 import functional as F

    def affine(x: Any, a: list[float], mode: str, **_: Any) -> Any:
        return F.affine(
            x, a[0], a[1:3], a[3], a[4:6], _mode(mode), _fill(x, a[8:11]), _center(a[6:8])
        )

    def rotate(x: Any, a: list[float], mode: str, **_: Any) -> Any:
        return F.rotate(x, a[0], _mode(mode), False, _center(a[1:3]), _fill(x, a[3:6]))

    def perspective(x: Any, a: list[float], mode: str, **_: Any) -> Any:
        return F.perspective(x, None, None, _mode(mode), _fill(x, a[8:11]), a[:8])

    def elastic(x: Any, a: list[float], mode: str, program: Program) -> Any:
        assert program.fields is not None
        field = program.fields[int(a[0])][None]
        return F.elastic(x, field, _mode(mode), _fill(x, a[1:4]))

    def erase(x: Any, a: list[float], **_: Any) -> Any:
        channels = F.get_num_channels(x)
        values = torch.tensor(a[4 : 4 + channels])[:, None, None]
        return F.erase(x, *map(int, a[:4]), values)

    def erase_noise(x: Any, a: list[float], **_: Any) -> Any:
        top, left, height, width, seed = map(int, a[:5])
        values = noise(seed, (F.get_num_channels(x), height, width))
        return F.erase(x, top, left, height, width, values.to(getattr(x, "device", "cpu")))

    return {
        "BRIGHTNESS": lambda x, a, **_: F.adjust_brightness(x, a[0]),
        "CONTRAST": lambda x, a, **_: F.adjust_contrast(x, a[0]),
        "SATURATION": lambda x, a, **_: F.adjust_saturation(x, a[0]),
        "HUE": lambda x, a, **_: F.adjust_hue(x, a[0]),
        "SHARPNESS": lambda x, a, **_: F.adjust_sharpness(x, a[0]),
        "POSTERIZE": lambda x, a, **_: F.posterize(x, int(a[0])),
        "SOLARIZE": lambda x, a, **_: x if a[0] > _white(x) else F.solarize(x, a[0]),
        "SOLARIZE_ADD": lambda x, a, **_: _as_tensor(_solarize_add, x, a),
        "GRAYSCALE": lambda x, **_: F.rgb_to_grayscale(x, F.get_num_channels(x)),
        "INVERT": lambda x, **_: F.invert(x),
        "AUTOCONTRAST": lambda x, **_: F.autocontrast(x),
        "EQUALIZE": lambda x, **_: F.equalize(x),
        "PERMUTE": lambda x, a, **_: F.permute_channels(x, [int(c) for c in a[:3]]),
        "HFLIP": lambda x, **_: F.horizontal_flip(x),
        "VFLIP": lambda x, **_: F.vertical_flip(x),
        "BLUR": lambda x, a, **_: F.gaussian_blur(x, [int(a[2]), int(a[3])], a[:2]),
        "ERASE": erase,
        "ERASE_NOISE": erase_noise,
        "AFFINE": affine,
        "ROTATE": rotate,
        "PERSPECTIVE": perspective,
        "ELASTIC": elastic,
        "MATRIX": _matrix,
    }


def _mode(name: str) -> Any:
    from torchvision.transforms.v2 import InterpolationMode

    return InterpolationMode(name.lower())


def _center(values: list[float]) -> list[float] | None:
    return None if values[0] != values[0] else values


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


def _as_tensor(fn: Callable[[torch.Tensor, list[float]], torch.Tensor], x: Any, a: Any) -> Any:
    """Call on a tensor what knows no PIL images."""
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import functional as F

    if not isinstance(x, torch.Tensor):
        return F.to_pil_image(fn(F.pil_to_tensor(x), a))
    result = fn(x.as_subclass(torch.Tensor), a)
    return result if type(x) is torch.Tensor else tv_tensors.wrap(result, like=x)


def _solarize_add(image: torch.Tensor, a: list[float]) -> torch.Tensor:
    brighter = (image + a[0]).clamp_(max=_white(image)).to(image.dtype)
    return torch.where(image < a[1], brighter, image)


def _matrix(x: Any, a: list[float], mode: str, **_: Any) -> Any:
    from torchvision.transforms.v2 import functional as F

    if _is_target(x):
        # Not the fill of the picture: timm, whose op it is, knows no masks.
        return F.perspective(x, None, None, _mode("nearest"), None, [*a[:6], 0.0, 0.0])
    return _as_tensor(partial(_sample_matrix, mode=mode.lower()), x, a)


def _sample_matrix(image: torch.Tensor, a: list[float], mode: str) -> torch.Tensor:
    device, (height, width) = image.device, image.shape[-2:]
    x = torch.arange(width, device=device) + 0.5
    y = (torch.arange(height, device=device) + 0.5)[:, None]
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
    fill = torch.tensor(_fill(image, a[6:9]) or [0.0], device=device)[:, None, None]
    return torch.where(inside, sampled.clamp_(0, _white(image)), fill).to(image.dtype)


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


# --- What comes in ---


def check(
    images: torch.Tensor,
    program: Program,
    mean: _ChannelValues,
    std: _ChannelValues,
    dtype: torch.dtype | None,
) -> torch.dtype:
    """Refuse what does not fit together; return the dtype of the result."""
    ops, count = program.ops, len(images if program.rows is None else program.rows)
    if images.dim() != 4 or not (images.dtype == torch.uint8 or images.is_floating_point()):
        raise ValueError(
            "images must be (N, C, H, W) of uint8 or floating point, got "
            f"{tuple(images.shape)} {images.dtype}"
        )
    if ops.ndim != 2 or ops.shape[1] != count or program.args.shape != (*ops.shape, ARGS):
        raise ValueError(
            f"a program of {count} images must have ops (S, {count}) and args (S, {count}, "
            f"{ARGS}), got {ops.shape} and {program.args.shape}"
        )
    if program.rows is not None and not ((0 <= program.rows) & (program.rows < len(images))).all():
        raise ValueError(f"rows must be of the {len(images)} images, got {program.rows.tolist()}")
    erases = [OPS[name].code for name in ("IDENTITY", "ERASE", "ERASE_NOISE")]
    if program.finals and not np.isin(ops[len(ops) - program.finals :], erases).all():
        raise ValueError("slots after normalization may erase, and do nothing else")
    normalized = mean is not None or std is not None
    if dtype is None:
        return torch.float32 if normalized and images.dtype == torch.uint8 else images.dtype
    if not dtype.is_floating_point and (normalized or dtype != images.dtype):
        raise ValueError(
            f"dtype must be floating point, or that of the images without mean and std, got {dtype}"
        )
    return dtype


def colors_of(mean: _ChannelValues, std: _ChannelValues, channels: int) -> list[list[float]]:
    """The mean and the std of every channel, as numbers."""
    colors = []
    for name, values, default in (("mean", mean, 0.0), ("std", std, 1.0)):
        given = torch.as_tensor(default if values is None else values, dtype=torch.float64)
        numbers: list[float] = given.flatten().tolist()
        if len(numbers) not in (1, channels):
            raise ValueError(f"{name} must have {channels} values, one a channel, got {numbers}")
        colors.append(numbers if len(numbers) > 1 else numbers * channels)
    return colors


def memory_format_of(images: torch.Tensor) -> torch.memory_format:
    """The one of the two that images have."""
    last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format
