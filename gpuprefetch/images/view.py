"""One view of the images of a batch: the fused transforms, and those that run after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gpuprefetch.images.tail import run
from gpuprefetch.transforms.head import Head, Transform, apply_head, is_kornia
from gpuprefetch.transforms.per_image import PerImage
from gpuprefetch.transforms.random import SeededDraws, fold
from gpuprefetch.transforms.values import Values

if TYPE_CHECKING:
    from gpuprefetch.transforms.ops_launch import Layout


@dataclass
class View:
    """What becomes of the images; most loops have one view of them."""

    head: Head
    tail: Sequence[Transform]
    levels: bool  # whether head.dtype is uint8 for the first program's sake: of decoded images only
    values: Values

    @property
    def changes(self) -> bool:
        return bool(self.head.names or self.tail or self.head.dtype or self.head.memory_format)

    def run_head(self, images: torch.Tensor, seed: int) -> torch.Tensor:
        """The fused transforms, on a batch ``(N, C, H, W)`` that came as a tensor."""
        head, tail = self.head, self.tail
        kornia_next = bool(tail) and is_kornia(tail[0])
        to_floats = kornia_next and not images.is_floating_point()
        if head.names or to_floats or head.dtype == torch.uint8:
            keys = fold(seed, np.arange(len(images)))
            dtype = None if self.levels and images.is_floating_point() else head.dtype
            return apply_head(head, images, keys, dtype, head.memory_format)
        if head.dtype and not images.is_floating_point():
            if images.dtype != torch.uint8:
                raise ValueError(
                    f"dtype is for images of uint8 or floating point, got {images.dtype} of "
                    f"{tuple(images.shape)}. Let the dataset return image.float() / its maximum."
                )
            images = images.to(head.dtype) / 255
        return images.to(
            dtype=head.dtype or images.dtype,
            memory_format=head.memory_format or torch.preserve_format,
        )

    @property
    def program(self) -> PerImage | None:
        """The first transform after them, where a worker may run it, as it gets known values."""
        first = self.tail[0] if self.tail else None
        known = self.head.size is not None and not (self.head.mean or self.head.std)
        return first if known and type(first) is PerImage and first.seed is None else None

    def run_tail(self, images: Any, seed: int, laid: Sequence[Layout] | None = None) -> Any:
        """What comes after them. A worker may have ``laid`` out :attr:`program`, or have run it."""
        tail, draws = self.tail, SeededDraws(seed)
        if laid is not None and (program := self.program) is not None:
            dtype, tail = self.head.dtype or torch.float32, tail[1:]
            levels = torch.tensor([0, 255 if dtype == torch.uint8 else 1], dtype=dtype)
            self.values.reach(program, levels)
            images = program.carry_out(images, laid) if laid else images
            if not tail:
                return images
            with draws:
                program.key()  # what comes after it draws the same
        with draws:
            for transform in tail:
                self.values.reach(transform, images)
                images = run(transform, images)
        return images
