"""torchvision's random transforms on a batch, each image with a draw of its own.

torchvision v2 draws once per call, so a batch would share one draw. Here every image has its own,
and images that drew the same share one call. A batch of one image draws what torchvision would from
the same seed: that is how parity() compares the two.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

Transform = Callable[[torch.Tensor], torch.Tensor]

# Drawn: whether, and nothing else.
SWITCHES = frozenset(
    "RandomHorizontalFlip RandomVerticalFlip RandomGrayscale RandomInvert RandomPosterize"
    " RandomSolarize RandomAutocontrast RandomEqualize RandomAdjustSharpness".split()
)
# A sequence of named operations with a magnitude each.
POLICIES = frozenset(("AutoAugment", "RandAugment", "TrivialAugmentWide"))
# Nothing is drawn: one call for the batch.
FIXED = frozenset("CenterCrop ConvertImageDtype Grayscale Identity Normalize Pad Resize".split())
# Made for batches, and each image draws for itself.
OWN = frozenset(("TimmAugment",))
# One call per image.
LOOPED = frozenset(
    "AugMix ElasticTransform GaussianNoise RandomAffine RandomChannelPermutation"
    " RandomCrop RandomErasing RandomPerspective RandomPhotometricDistort RandomResizedCrop"
    " RandomRotation".split()
)
KNOWN = SWITCHES | POLICIES | FIXED | LOOPED | OWN | {"ColorJitter", "GaussianBlur"}


def per_image(op: Any) -> Transform:
    """A torchvision v2 transform as a callable on ``(N, C, H, W)`` that draws for each image.

    Args:
        op: of the exact types named in this file; its containers hold converted transforms.
    """
    name = type(op).__name__
    if name in FIXED | OWN:
        return op  # type: ignore[no-any-return]
    if name == "ColorJitter":
        return ColorJitter(op)
    if name == "GaussianBlur":
        return GaussianBlur(op)
    if name in SWITCHES:
        return Switch(op)
    if name in POLICIES:
        return Policy(op)
    return Loop(op)


class _PerImage(torch.nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    @property
    def name(self) -> str:
        return type(self.op).__name__


class Loop(_PerImage):
    """One call per image."""

    def __init__(self, op: Any) -> None:
        super().__init__(copy.copy(op))
        if type(op).__name__ == "AugMix":
            # torchvision draws these on the image's device; from the CPU's generator they are the
            # same everywhere.
            self.op._sample_dirichlet = lambda like: torch._sample_dirichlet(
                torch.full(like.shape, float(op.alpha))
            ).to(like.device, non_blocking=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``(N, C, H, W)`` to ``(N, C, h, w)``, dtype and range as torchvision has them."""
        return torch.stack([self.op(image) for image in images.unbind()])


class Switch(_PerImage):
    """One call for the images whose draw says so."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``(N, C, H, W)`` of the same shape and dtype; ``images`` is left untouched."""
        return _on_rows(images, _drawn(len(images), self.op.p), self._do)

    def _do(self, images: torch.Tensor) -> torch.Tensor:
        return self.op.transform(images, self.op.make_params([images]))  # type: ignore[no-any-return]


class Policy(_PerImage):
    """RandAugment and its kin: one call for the images that drew the same operation."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``(N, C, H, W)`` of the same shape and dtype; ``images`` is left untouched."""
        chains = [self._draw(image) for image in images.unbind()]
        for depth in range(max(map(len, chains))):
            step = [chain[depth] if depth < len(chain) else None for chain in chains]
            for key, rows in _groups(step):
                if key is not None and key[0] != "Identity":
                    images = _on_rows(images, rows, partial(self._do, key))
        return images

    def _draw(self, image: torch.Tensor) -> list[tuple[str, float]]:
        """Let torchvision draw its operations, and write them down instead of doing them."""
        chain: list[tuple[str, float]] = []

        def note(image: Any, name: str, magnitude: float, **_: Any) -> Any:
            chain.append((name, magnitude))
            return image

        recorder = copy.copy(self.op)
        recorder._apply_image_or_video_transform = note
        recorder(image)
        return chain

    def _do(self, key: tuple[str, float], images: torch.Tensor) -> torch.Tensor:
        op, (name, magnitude) = self.op, key
        return op._apply_image_or_video_transform(  # type: ignore[no-any-return]
            images, name, magnitude, interpolation=op.interpolation, fill=op._fill
        )


class Apply(torch.nn.Module):
    """RandomApply: a list of transforms on the images whose draw says so."""

    def __init__(self, transforms: Sequence[Transform], p: float) -> None:
        super().__init__()
        self.transforms, self.p = list(transforms), p

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``(N, C, H, W)`` of the same shape and dtype; ``images`` is left untouched."""
        rows = _drawn(len(images), self.p)
        return _on_rows(images, rows, partial(_chain, self.transforms))


class Choice(torch.nn.Module):
    """RandomChoice: each image goes through one of several lists."""

    def __init__(self, choices: Sequence[Sequence[Transform]], p: Sequence[float]) -> None:
        super().__init__()
        self.choices, self.p = list(choices), list(p)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``(N, C, H, W)`` of the same shape and dtype; ``images`` is left untouched."""
        drawn = torch.multinomial(torch.tensor(self.p), len(images), replacement=True)
        for choice, rows in _groups(drawn.tolist()):
            images = _on_rows(images, rows, partial(_chain, self.choices[choice]))
        return images


class ColorJitter(_PerImage):
    """ColorJitter in sixteen calls a batch: factors and order are each image's own."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``(N, 3, H, W)``, uint8 or [0, 1]; the same shape and dtype, ``images`` untouched."""
        orders, factors = self.draw(len(images))
        for step in range(4):
            for kind, rows in _groups([order[step] for order in orders]):
                factor = factors[kind]
                if factor is not None:
                    some = factor[rows].view(-1, 1, 1, 1).to(images.device, non_blocking=True)
                    images = _on_rows(images, rows, partial(_ADJUSTMENTS[kind], some))
        return images

    def draw(self, count: int) -> tuple[list[list[int]], list[torch.Tensor | None]]:
        """For ``count`` images the order of the four adjustments, and ``(count,)`` factors each."""
        orders = [torch.randperm(4).tolist() for _ in range(count)]
        ranges = (self.op.brightness, self.op.contrast, self.op.saturation, self.op.hue)
        return orders, [None if r is None else torch.empty(count).uniform_(*r) for r in ranges]


def _gray(images: torch.Tensor) -> torch.Tensor:
    from torchvision.transforms.v2 import functional as F

    return F.rgb_to_grayscale(images, num_output_channels=1).float()  # type: ignore[no-any-return]


def _blend(images: torch.Tensor, other: torch.Tensor | float, factor: torch.Tensor) -> torch.Tensor:
    white = 1 if images.is_floating_point() else 255
    # The cast truncates, in PIL and torchvision alike.
    return (images * factor + other * (1 - factor)).clamp(0, white).to(images.dtype)


def _brightness(factor: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    return _blend(images, 0.0, factor)


def _contrast(factor: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    return _blend(images, _gray(images).mean((1, 2, 3), keepdim=True), factor)


def _saturation(factor: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    return _blend(images, _gray(images), factor)


def _hue(factor: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    from kornia.color import hsv_to_rgb, rgb_to_hsv

    integer = not images.is_floating_point()
    hsv = rgb_to_hsv(images / 255 if integer else images)
    hsv[:, :1] = (hsv[:, :1] + 2 * math.pi * factor) % (2 * math.pi)
    rgb = hsv_to_rgb(hsv)
    # As torchvision converts back: 256 bins of equal width.
    result: torch.Tensor = (rgb * (256 - 1e-3)).to(images.dtype) if integer else rgb
    return result


# In the order in which ColorJitter numbers them.
_ADJUSTMENTS = (_brightness, _contrast, _saturation, _hue)


class GaussianBlur(_PerImage):
    """GaussianBlur in two convolutions a batch: every image has its own kernel."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``(N, C, H, W)`` of the same shape and dtype; ``images`` is left untouched."""
        sigma = torch.empty(len(images), 1).uniform_(*self.op.sigma)
        width, height = self.op.kernel_size
        sides = (width // 2, width // 2, height // 2, height // 2)
        padded = torch.nn.functional.pad(images.float(), sides, mode="reflect")
        channels = images.shape[0] * images.shape[1]
        blurred = padded.reshape(1, channels, *padded.shape[2:])
        for size, shape in ((width, (1, width)), (height, (height, 1))):
            kernel = _gaussian(size, sigma).repeat_interleave(images.shape[1], 0)
            kernel = kernel.view(channels, 1, *shape).to(images.device, non_blocking=True)
            blurred = torch.nn.functional.conv2d(blurred, kernel, groups=channels)
        blurred = blurred.view(images.shape)
        return (blurred if images.is_floating_point() else blurred.round_()).to(images.dtype)


def _gaussian(size: int, sigma: torch.Tensor) -> torch.Tensor:
    """``(N, size)`` weights that add up to 1, for ``sigma`` ``(N, 1)``."""
    distance = torch.arange(size) - (size - 1) / 2
    return torch.softmax(-0.5 * (distance / sigma) ** 2, dim=1)


class ToUint8(torch.nn.Module):
    """[0, 1] to 0..255, rounded as PIL rounds when it resizes; uint8 passes through."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``(N, C, H, W)`` uint8."""
        if images.dtype == torch.uint8:
            return images
        return (images * 255).round_().clamp_(0, 255).to(torch.uint8)


class ToFloat(torch.nn.Module):
    """0..255 to [0, 1] in float32; floating point passes through."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``(N, C, H, W)`` floating point."""
        return images if images.is_floating_point() else images.float() / 255


class Cast(torch.nn.Module):
    """The dtype and memory format that the loop asked for, at the end of the list."""

    def __init__(
        self, dtype: torch.dtype | None, memory_format: torch.memory_format | None
    ) -> None:
        super().__init__()
        self.dtype, self.memory_format = dtype, memory_format

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``(N, C, H, W)``, values as they are."""
        return images.to(
            dtype=self.dtype or images.dtype,
            memory_format=self.memory_format or torch.preserve_format,
        )


def _chain(transforms: Iterable[Transform], images: torch.Tensor) -> torch.Tensor:
    for transform in transforms:
        images = transform(images)
    return images


def _drawn(count: int, p: float) -> list[int]:
    """The rows that a chance of ``p`` selects."""
    return (torch.rand(count) < p).nonzero()[:, 0].tolist()


def _groups(keys: Sequence[Any]) -> Iterable[tuple[Any, list[int]]]:
    rows: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        rows.setdefault(key, []).append(i)
    return rows.items()


def _on_rows(images: torch.Tensor, rows: Sequence[int], fn: Transform) -> torch.Tensor:
    if not rows:
        return images
    if len(rows) == len(images):
        return fn(images)
    index = torch.tensor(rows).to(images.device, non_blocking=True)
    return images.index_copy(0, index, fn(images[index]))
