"""Forms of a result: a tensor of images of one size, or images of their own sizes in one buffer.

Nothing else knows how the images of a form lie in memory. A launch is told where each one lies, and
what comes after it gets the images of :meth:`Places.images`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Self

import numpy as np
import torch

from gpuprefetch.transforms.reference import Ints
from gpuprefetch.transforms.sampling import areas

# Images of a buffer begin at multiples of so many values: 64 bytes or more.
ALIGNED_VALUES = 64


class ResultForm(Enum):
    """What the loop gets for the N images of a batch."""

    STACK = "stack"  # (N, 3, H, W), where all images have one size
    LIST = "list"  # N tensors (3, H_i, W_i), views of one buffer

    @property
    def has_own_sizes(self) -> bool:
        """Whether each image may have a size of its own."""
        return self is not ResultForm.STACK


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where N images of their own sizes lie in one flat buffer; all in values.

    A picture of 10 x 8 pixels and one of 5 x 4, in planes::

        sizes    [[10, 8], [5, 4]]
        offsets  [0, 256]     240 values, and 16 unused ones
        strides  [[80, 8, 1], [20, 4, 1]]
        total    316
    """

    sizes: Ints  # (N, 2)
    offsets: Ints  # (N,), of the first value of each
    strides: Ints  # (N, 3), between channels, rows and pixels
    total: int

    @classmethod
    def of(cls, sizes: Ints, memory_format: torch.memory_format | None = None) -> Self:
        """Images one after the other, each in this memory format: planes by default."""
        values = 3 * areas(sizes, len(sizes))
        room = -(-values // ALIGNED_VALUES) * ALIGNED_VALUES
        offsets = np.cumsum(room) - room
        total = int(offsets[-1] + values[-1]) if len(sizes) else 0
        width = sizes[:, 1]
        one = np.ones_like(width)
        if memory_format is torch.channels_last:
            strides = [one, 3 * width, 3 * one]
        else:
            strides = [areas(sizes, len(sizes)), width, one]
        return cls(sizes, offsets, np.stack(strides, axis=1), total)

    def images(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """N views ``(3, H_i, W_i)`` of a buffer ``(total,)``."""
        start = buffer.storage_offset()
        where = zip(self.sizes.tolist(), self.strides.tolist(), self.offsets.tolist(), strict=True)
        return [
            buffer.as_strided((3, *size), strides, start + offset)
            for size, strides, offset in where
        ]
