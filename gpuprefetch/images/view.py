"""One view of the images of a batch: the fused transforms, and those that run after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gpuprefetch.images.tail import run, run_alike
from gpuprefetch.lists.values import Values
from gpuprefetch.policies.per_image import PerImage
from gpuprefetch.transforms.head import Head, Transform, apply_head, is_kornia
from gpuprefetch.transforms.random import Keys, derive, fold, op_keys
from gpuprefetch.transforms.sampling import RANDOM

if TYPE_CHECKING:
    from gpuprefetch.policies.ops_launch import Layout


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

    @property
    def samples(self) -> bool:
        """Whether it may have random parameters."""
        return bool(self.tail) or any(isinstance(op, RANDOM) for op in self.head.ops)

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

    def run_tail(
        self,
        outs: Sequence[Any],
        seed: int,
        keys: Keys | None = None,
        laid: Sequence[Sequence[Layout] | None] = (),
    ) -> list[Any]:
        """What comes after them, on batches whose images have their samples in common.

        Args:
            outs: what the fused transforms made of each batch.
            seed: of what is sampled for a batch as a whole.
            keys: ``(N,)``, what is sampled for each image comes from; None for tensors.
            laid: for each batch what a worker has sampled for :attr:`program`: an empty list if it
                has run that as well, None if no worker has sampled anything.
        """
        images, first = list(outs), 0
        program = self.program
        if program is not None and any(each is not None for each in laid):
            first = 1
            dtype = self.head.dtype or torch.float32
            levels = torch.tensor([0, 255 if dtype == torch.uint8 else 1], dtype=dtype)
            self.values.reach(program, levels)
            for number, each in enumerate(laid):
                if each is None:
                    own = None if keys is None else op_keys(keys, 0)
                    images[number] = run(program, images[number], own)
                elif each:
                    images[number] = program.carry_out(images[number], each)
        for position, transform in enumerate(self.tail[first:], first):
            for each in images:
                self.values.reach(transform, each)
            own = None if keys is None else op_keys(keys, position)
            images = run_alike(transform, images, own, derive(seed, position))
        return images
