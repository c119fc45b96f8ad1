"""torchvision's random transforms on a batch, each image with a draw of its own.

torchvision v2 draws once per call, so a batch would share one draw. Here every image has its own,
and images that drew the same share one call. A batch of one image draws what torchvision would from
the same seed: that is how parity() compares the two.

They take ``(N, C, H, W)``, uint8 or in [0, 1], leave it untouched, and give the same shape and
dtype where they do not say otherwise.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from gpuprefetch.core.nested import map_leaves

Transform = Callable[[torch.Tensor], torch.Tensor]


class PerImage(torch.nn.Module):
    """What stands for ``op``, under its name."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op, self.__name__ = op, type(self if op is None else op).__name__


class Loop(PerImage):
    """One call per image; shape, dtype and range are what torchvision makes of them."""

    def __init__(self, op: Any) -> None:
        super().__init__(copy.copy(op))
        if type(op).__name__ == "AugMix":
            # torchvision draws these on the image's device; from the CPU's generator they are the
            # same everywhere.
            self.op._sample_dirichlet = lambda like: torch._sample_dirichlet(
                torch.full(like.shape, float(op.alpha))
            ).to(like.device, non_blocking=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        done = [self.op(image) for image in images.unbind()]
        if len({image.shape for image in done}) > 1:
            raise ValueError(
                f"{self.__name__} draws for each image, and gave shapes that no batch can hold. "
                "Put it into a v2.Compose with a v2.Resize((height, width)) behind it, or for one "
                "draw a batch into a function: lambda images: op(images)."
            )
        return torch.stack(done)


class Steps(Loop):
    """A Compose of torchvision: its transforms, one behind the other, in their form for a batch."""

    def __init__(self, op: Any, steps: Sequence[Transform]) -> None:
        super().__init__(op)
        self.steps = steps

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            images = step(images)
        return images


class Switch(PerImage):
    """One call for the images whose draw says so."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return _on_rows(images, _drawn(len(images), self.op.p), self._do)

    def _do(self, images: torch.Tensor) -> torch.Tensor:
        return self.op.transform(images, self.op.make_params([images]))  # type: ignore[no-any-return]


class Policy(PerImage):
    """RandAugment and its kin: one call for the images that drew the same operation."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return run_chains(images, [self._draw(image) for image in images.unbind()], self._do)

    def _draw(self, image: torch.Tensor) -> Chain:
        """Let torchvision draw its operations, and write them down instead of doing them."""
        chain: list[tuple[Hashable, None]] = []

        def note(image: Any, name: str, magnitude: float, **_: Any) -> Any:
            if name != "Identity":
                chain.append(((name, magnitude), None))
            return image

        recorder = copy.copy(self.op)
        recorder._apply_image_or_video_transform = note
        recorder(image)
        return chain

    def _do(self, kind: tuple[str, float], _: Any, images: torch.Tensor) -> torch.Tensor:
        op, (name, magnitude) = self.op, kind
        return op._apply_image_or_video_transform(  # type: ignore[no-any-return]
            images, name, magnitude, interpolation=op.interpolation, fill=op._fill
        )


class Apply(PerImage):
    """RandomApply: a list of transforms on the images whose draw says so."""

    def __init__(self, transforms: Sequence[torch.nn.Module], p: float, op: Any = None) -> None:
        super().__init__(op)
        self.transforms, self.p = torch.nn.Sequential(*transforms), p

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return _on_rows(images, _drawn(len(images), self.p), self.transforms)


class Choice(PerImage):
    """RandomChoice and RandomOrder: each image goes through one of several lists, or through all.

    ``p`` are the chances of the lists; None for all of them, in an order that is drawn.
    """

    def __init__(
        self,
        choices: Sequence[Sequence[torch.nn.Module]],
        p: Sequence[float] | None,
        op: Any = None,
    ) -> None:
        super().__init__(op)
        self.choices = torch.nn.ModuleList(torch.nn.Sequential(*choice) for choice in choices)
        self.p = p

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.p is None:
            drawn = torch.stack([torch.randperm(len(self.choices)) for _ in images])
        else:
            chances = torch.tensor(list(self.p))
            drawn = torch.multinomial(chances, len(images), replacement=True)[:, None]
        chains = [[(choice, None) for choice in row] for row in drawn.tolist()]
        return run_chains(images, chains, lambda choice, _, some: self.choices[choice](some))


class ColorJitter(PerImage):
    """ColorJitter in sixteen calls a batch: factors and order are each image's own."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        orders, factors = self.draw(len(images))
        chains = [
            [(kind, some[i]) for kind in order if (some := factors[kind]) is not None]
            for i, order in enumerate(orders)
        ]
        return run_chains(images, chains, _adjust)

    def draw(self, count: int) -> tuple[list[list[int]], list[list[float] | None]]:
        """For ``count`` images the order of the four adjustments, and ``count`` factors of each."""
        orders = [torch.randperm(4).tolist() for _ in range(count)]
        ranges = (self.op.brightness, self.op.contrast, self.op.saturation, self.op.hue)
        factors = [r and torch.empty(count).uniform_(*r).tolist() for r in ranges]
        return orders, factors


def _adjust(kind: int, factors: list[float], images: torch.Tensor) -> torch.Tensor:
    if images.shape[1] == 1 and _ADJUSTMENTS[kind] in (_saturation, _hue):
        return images  # gray has neither
    return _ADJUSTMENTS[kind](images, _column(factors, images))


def _column(values: list[float], images: torch.Tensor) -> torch.Tensor:
    """``(N, 1, 1, 1)``, a value for each image."""
    return torch.tensor(values).view(-1, 1, 1, 1).to(images.device, non_blocking=True)


def _gray(images: torch.Tensor) -> torch.Tensor:
    from torchvision.transforms.v2 import functional as F

    return F.rgb_to_grayscale(images, num_output_channels=1).float()  # type: ignore[no-any-return]


def _blend(images: torch.Tensor, other: torch.Tensor | float, factor: torch.Tensor) -> torch.Tensor:
    white = 1 if images.is_floating_point() else 255
    # The cast truncates, in PIL and torchvision alike.
    return (images * factor + other * (1 - factor)).clamp(0, white).to(images.dtype)


def _brightness(images: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return _blend(images, 0.0, factor)


def _contrast(images: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return _blend(images, _gray(images).mean((1, 2, 3), keepdim=True), factor)


def _saturation(images: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return _blend(images, _gray(images), factor)


def _hue(images: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    from kornia.enhance import adjust_hue

    integer = not images.is_floating_point()
    rgb: torch.Tensor = adjust_hue(images / 255 if integer else images, 2 * math.pi * factor)
    # As torchvision converts back: 256 bins of equal width.
    return (rgb * (256 - 1e-3)).to(images.dtype) if integer else rgb


# In the order in which ColorJitter numbers them.
_ADJUSTMENTS = (_brightness, _contrast, _saturation, _hue)


class GaussianBlur(PerImage):
    """GaussianBlur in two convolutions a batch: every image has its own kernel."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        from kornia.filters import gaussian_blur2d

        sigma = torch.empty(len(images), 1).uniform_(*self.op.sigma).expand(-1, 2)
        blurred: torch.Tensor = gaussian_blur2d(images, tuple(self.op.kernel_size[::-1]), sigma)
        return (blurred if images.is_floating_point() else blurred.round_()).to(images.dtype)


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


@dataclass(frozen=True, slots=True)
class Cast:
    """The dtype and memory format that the loop asked for, at the end of the list.

    Of several outputs they are for those in floating point. The format is for four dimensions.
    """

    dtype: torch.dtype | None
    memory_format: torch.memory_format | None

    def __call__(self, images: Any) -> Any:
        """The images, of one output or several, with values as they are."""

        def cast(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if leaf is not images and not leaf.is_floating_point():
                return leaf
            memory_format = self.memory_format if leaf.dim() == 4 else None
            return leaf.to(dtype=self.dtype, memory_format=memory_format)

        return map_leaves(cast, images)


_WRAPPERS: dict[str, type[PerImage]] = {
    "ColorJitter": ColorJitter,
    "GaussianBlur": GaussianBlur,
    **dict.fromkeys(("AutoAugment", "RandAugment", "TrivialAugmentWide"), Policy),
    # Drawn: whether, and nothing else.
    **dict.fromkeys(
        "RandomHorizontalFlip RandomVerticalFlip RandomGrayscale RandomInvert RandomPosterize"
        " RandomSolarize RandomAutocontrast RandomEqualize RandomAdjustSharpness".split(),
        Switch,
    ),
    **dict.fromkeys(
        "AugMix ElasticTransform GaussianNoise RandomAffine RandomChannelPermutation RandomCrop"
        " RandomErasing RandomPerspective RandomPhotometricDistort RandomResizedCrop"
        " RandomRotation".split(),
        Loop,
    ),
}
# They give sizes that they draw, or take what no pipeline has on the device: an image at a time.
ALONE = frozenset(
    "JPEG RandomIoUCrop RandomResize RandomShortestSize RandomZoomOut ScaleJitter".split()
)
OF_OTHERS = frozenset("RandomApply RandomChoice RandomOrder".split())
DRAWN = _WRAPPERS.keys() | ALONE | OF_OTHERS
# They take a batch as they are: nothing is drawn, or for each image.
_AS_THEY_ARE = (
    "CenterCrop ConvertImageDtype Grayscale Identity Normalize Pad RGB Resize TimmAugment ToDtype"
)
KNOWN = _WRAPPERS.keys() | _AS_THEY_ARE.split()


def per_image(op: Any) -> torch.nn.Module:
    """A torchvision v2 transform as a callable on ``(N, C, H, W)`` that draws for each image.

    Args:
        op: of one of the exact types named above.
    """
    wrapper = _WRAPPERS.get(type(op).__name__, Loop if type(op).__name__ in DRAWN else None)
    return op if wrapper is None else wrapper(op)


def _drawn(count: int, p: float) -> list[int]:
    """The rows that a chance of ``p`` selects."""
    return (torch.rand(count) < p).nonzero()[:, 0].tolist()


Chain = Sequence[tuple[Hashable, Any]]  # what is done to one image: kinds and their arguments


def run_chains(
    images: torch.Tensor, chains: Sequence[Chain], run: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Do to each image what its chain says, with a call for all that have the same kind at a step.

    Args:
        images: ``(N, C, H, W)``, left untouched.
        chains: N of them.
        run: gets a kind, the arguments of the M images of that kind, and them.
    """
    for steps in zip_longest(*chains):
        groups: dict[Hashable, dict[int, Any]] = {}
        for row, step in enumerate(steps):
            if step is not None:
                groups.setdefault(step[0], {})[row] = step[1]
        for kind, some in groups.items():
            images = _on_rows(images, list(some), partial(run, kind, list(some.values())))
    return images


def _on_rows(images: torch.Tensor, rows: Sequence[int], fn: Transform) -> torch.Tensor:
    if not rows:
        return images
    if len(rows) == len(images):
        return fn(images)
    index = torch.tensor(rows).to(images.device, non_blocking=True)
    return images.index_copy(0, index, fn(images[index]))
