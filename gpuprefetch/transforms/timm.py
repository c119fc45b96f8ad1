"""timm's transforms and datasets, as torchvision's or as what runs on a batch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from gpuprefetch.transforms.per_image import (
    _blend,
    _brightness,
    _column,
    _contrast,
    _saturation,
    run_chains,
)

_GEOMETRIC = frozenset(
    "Rotate ShearX ShearY TranslateX TranslateY TranslateXRel TranslateYRel".split()
)
_REACH = {"Rotate": 30.0, "ShearX": 0.3, "ShearY": 0.3}
_FACTORS = frozenset(("Brightness", "Color", "Contrast", "Sharpness"))


def is_timm(thing: Any, name: str) -> bool:
    """Whether ``thing`` is of timm's class ``name``; timm need not be there."""
    kind = type(thing)
    is_theirs = kind.__module__.startswith("timm.data.") and kind.__name__ == name
    return is_theirs and getattr(sys.modules.get(kind.__module__), name, None) is kind


def from_timm(op: Any) -> Any:
    """What one of timm's transforms stands for; the op itself where there is nothing."""
    name = type(op).__name__
    if not is_timm(op, name):
        return op
    from torchvision import transforms as v1
    from torchvision.transforms import v2

    if name == "MaybeToTensor":
        return v1.ToTensor()
    if name in ("MaybePILToTensor", "ToNumpy"):
        return v2.PILToTensor()
    if name == "RandomResizedCropAndInterpolation" and not isinstance(op.interpolation, tuple):
        return v2.RandomResizedCrop(op.size, op.scale, op.ratio, op.interpolation)
    if name == "RandomErasing" and op.max_count == 1 and not op.rand_color:
        low, high = (math.exp(value) for value in op.log_aspect_ratio)
        value = "random" if op.per_pixel else 0.0
        return v2.RandomErasing(op.probability, (op.min_area, op.max_area), (low, high), value)
    if name in ("RandAugment", "AutoAugment"):
        augment = TimmAugment(op)
        return op if augment.unknown else augment
    return op


def why_not(op: Any) -> str:
    """Why a transform is neither torchvision's nor stands for one of torchvision's."""
    if is_timm(op, "RandomErasing"):
        return (
            "timm's moves with one box alone, black or noise (re_count=1, re_mode const or pixel)"
        )
    if is_timm(op, "RandAugment") or is_timm(op, "AutoAugment"):
        unknown = ", ".join(sorted(TimmAugment(op).unknown))
        return f"it draws {unknown}, of which there is no form for a batch"
    if hasattr(op, "transforms"):
        return (
            "it is a class of your own, which may do more than call its `transforms`. If it does "
            "not, give these in place of it"
        )
    return "it is not one of torchvision's own, nor among those of timm's that are known"


class TimmAugment(torch.nn.Module):
    """timm's RandAugment or AutoAugment with torch's random numbers, drawn for each image.

    Called with a PIL image it runs timm's own functions, with a batch their twins below: from the
    same seed on both sides, :func:`gpuprefetch.parity` compares the two.
    """

    def __init__(self, op: Any) -> None:
        super().__init__()
        random = hasattr(op, "ops")
        self.policies = [[each] for each in op.ops] if random else op.policy
        self.layers = op.num_layers if random else 1
        weights = getattr(op, "choice_weights", None)
        self.weights = None if weights is None else torch.as_tensor(weights)
        self.kinds = {_kind(each) for policy in self.policies for each in policy}
        self.unknown = self.kinds - _ops().keys() - {"affine"}

    def extra_repr(self) -> str:
        return f"{self.policies}, layers={self.layers}"

    def draw(self, count: int) -> list[list[tuple[Any, float, str]]]:
        """For each of ``count`` images what is done to it: timm's op, its argument, the filter."""
        if self.weights is None:
            chosen = torch.randint(len(self.policies), (count, self.layers))
        else:
            chosen = torch.multinomial(self.weights.expand(count, -1), self.layers)
        longest = max(map(len, self.policies))
        shape = (count, self.layers, longest)
        numbers, noise = torch.rand(*shape, 4).tolist(), torch.randn(shape).tolist()
        return [
            [
                (op, _argument(op, spread, sign, noise[i][layer][j]), _filter(op, mode))
                for layer, policy in enumerate(row)
                for j, op in enumerate(self.policies[policy])
                for chance, spread, sign, mode in [numbers[i][layer][j]]
                if chance < op.prob
            ]
            for i, row in enumerate(chosen.tolist())
        ]

    def forward(self, images: Any) -> Any:
        """A PIL image, or ``(N, 3, H, W)`` uint8 of the same shape; it is left untouched."""
        if not isinstance(images, torch.Tensor):
            for op, argument, mode in self.draw(1)[0]:
                arguments = () if op.level_fn is None else (argument,)
                resample = {"bilinear": 2, "bicubic": 3}[mode]
                images = op.aug_fn(images, *arguments, **op.kwargs | {"resample": resample})
            return images
        chains = [
            [((_kind(op), mode), (op, argument)) for op, argument, mode in chain]
            for chain in self.draw(len(images))
        ]
        return run_chains(images, chains, _do)


def _kind(op: Any) -> str:
    if op.name in _GEOMETRIC:
        return "affine"
    return str(op.name).removesuffix("Increasing").removesuffix("Original")


def _filter(op: Any, chance: float) -> str:
    modes = op.kwargs["resample"]
    mode = modes[int(chance * len(modes))] if isinstance(modes, (tuple, list)) else modes
    # The op's own functions take PIL's numbers; only two filters are offered.
    return "bicubic" if op.name in _GEOMETRIC and int(mode) == 3 else "bilinear"


def _argument(op: Any, spread: float, sign: float, noise: float) -> Any:
    """As AugmentOp has it, but for where the random numbers come from."""
    magnitude = op.magnitude
    if op.magnitude_std == float("inf"):
        magnitude = spread * magnitude
    elif op.magnitude_std > 0:
        magnitude += op.magnitude_std * noise
    magnitude = max(0.0, min(magnitude, op.magnitude_max or 10.0))
    signed = math.copysign(magnitude / 10, sign - 0.5)
    if op.name in _REACH:
        return signed * _REACH[op.name]
    if op.name in _GEOMETRIC:
        share = op.hparams.get("translate_pct", 0.45)
        return signed * (share if op.name.endswith("Rel") else op.hparams["translate_const"])
    if op.name.endswith("Increasing") and _kind(op) in _FACTORS:
        return max(0.1, 1 + 0.9 * signed)
    return op.level_fn(magnitude, op.hparams)[0] if op.level_fn else 0.0


def _do(
    kind: tuple[str, str], steps: list[tuple[Any, float]], images: torch.Tensor
) -> torch.Tensor:
    name, mode = kind
    if name == "affine":
        fill = torch.tensor([op.kwargs["fillcolor"] for op, _ in steps])
        matrices = [_matrix(op.name, argument, images.shape[-2:]) for op, argument in steps]
        return _affine(images, torch.tensor(matrices), mode, fill)
    return _ops()[name](images, _column([argument for _, argument in steps], images))


@cache
def _ops() -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """What each kind of op does to ``(N, 3, H, W)`` images with ``(N, 1, 1, 1)`` arguments."""
    from torchvision.transforms.v2 import functional as F

    def solarize_add(images: torch.Tensor, add: torch.Tensor) -> torch.Tensor:
        brighter = (images + add).clamp_(max=255).to(images.dtype)
        return torch.where(images < 128, brighter, images)

    return {
        "AutoContrast": lambda images, _: F.autocontrast(images),
        "Brightness": _brightness,
        "Color": _saturation,
        "Contrast": _contrast,
        "Desaturate": lambda images, factor: _saturation(images, (1 - factor).clamp(0, 1)),
        "Equalize": lambda images, _: F.equalize(images),
        "Invert": lambda images, _: F.invert(images),
        "Posterize": lambda images, bits: images & (256 - 2 ** (8 - bits)).to(torch.uint8),
        "Sharpness": lambda images, factor: _blend(images, F.adjust_sharpness(images, 0), factor),
        "Solarize": lambda images, level: torch.where(images >= level, 255 - images, images),
        "SolarizeAdd": solarize_add,
    }


def _matrix(name: str, value: float, size: Any) -> list[list[float]]:
    """Output to input coordinates, in pixels from the corner: what PIL's ``transform`` takes."""
    height, width = size
    if name == "Rotate":
        cos, sin = math.cos(math.radians(value)), math.sin(math.radians(value))
        x, y = width / 2, height / 2
        return [[cos, -sin, x - cos * x + sin * y], [sin, cos, y - sin * x - cos * y]]
    shift = value * (width if "X" in name else height) if name.endswith("Rel") else value
    along = [value, 0.0] if name.startswith("Shear") else [0.0, shift]
    if "X" in name:
        return [[1.0, *along], [0.0, 1.0, 0.0]]
    return [[1.0, 0.0, 0.0], [along[0], 1.0, along[1]]]


def _affine(
    images: torch.Tensor, matrices: torch.Tensor, mode: str, fill: torch.Tensor
) -> torch.Tensor:
    """Sample each image through its ``(2, 3)`` matrix; ``fill`` ``(N, 3)`` where there is none."""
    device, (height, width) = images.device, images.shape[-2:]
    x = torch.arange(width, device=device) + 0.5
    y = (torch.arange(height, device=device) + 0.5)[:, None]
    # No matrix product: in TF32, which training often turns on, it is off by a tenth of a pixel.
    m = matrices.to(device, non_blocking=True).view(-1, 2, 3, 1, 1)
    source = (m[:, :, 0] * x + m[:, :, 1] * y + m[:, :, 2]).permute(0, 2, 3, 1)
    size = torch.tensor([width, height]).to(device, non_blocking=True)
    inside = ((source >= 0) & (source < size)).all(-1)[:, None]
    sampled = torch.nn.functional.grid_sample(
        images.float(), 2 * source / size - 1, mode, "border", align_corners=False
    )
    filling = fill.to(device, non_blocking=True).view(-1, 3, 1, 1)
    return torch.where(inside, sampled.round_().clamp_(0, 255), filling).to(images.dtype)
