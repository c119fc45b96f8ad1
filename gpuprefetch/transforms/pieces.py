"""Images of their own sizes in one buffer: where each of them lies, and views of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, Self, overload

import numpy as np
import torch

from gpuprefetch.transforms.reference import Ints

# Images of a buffer begin at multiples of so many values: 64 bytes or more.
ALIGNED_VALUES = 64


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where N images of their own sizes lie in one buffer; all in values.

    A picture of 10 x 8 pixels and one of 5 x 4, in planes one after the other::

        sizes    [[10, 8], [5, 4]]
        offsets  [0, 256]     240 values, and 16 unused ones
        strides  [[80, 8, 1], [20, 4, 1]]
        shape    (316,)
    """

    sizes: Ints  # (N, 2)
    offsets: Ints  # (N,), of the first value of each
    strides: Ints  # (N, 3), between channels, rows and pixels
    shape: tuple[int, ...]  # of the buffer
    memory_format: torch.memory_format = torch.contiguous_format  # of a buffer (N, 3, H, W)
    fill: float | None = None  # what is beside the images, if that matters

    @classmethod
    def in_turn(cls, sizes: Ints, memory_format: torch.memory_format | None) -> Self:
        """Images one after the other, each in this memory format: planes by default."""
        height, width = sizes.T
        area = height * width
        room = -(-3 * area // ALIGNED_VALUES) * ALIGNED_VALUES
        offsets = np.cumsum(room) - room
        total = int(offsets[-1] + 3 * area[-1]) if len(sizes) else 0
        strides = np.ones((len(sizes), 3), np.int64)
        if memory_format is torch.channels_last:
            strides[:, 1] = 3 * width
            strides[:, 2] = 3
        else:
            strides[:, 0] = area
            strides[:, 1] = width
        return cls(sizes, offsets, strides, (total,))

    def empty(self, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """The buffer; not initialized where nothing is beside the images."""
        buffer = torch.empty(
            self.shape, dtype=dtype, device=device, memory_format=self.memory_format
        )
        return buffer if self.fill is None else buffer.fill_(self.fill)

    def pieces(self, buffer: torch.Tensor) -> Pieces:
        """N images ``(3, H_i, W_i)`` in a buffer."""
        return Pieces(buffer, self)


class Pieces(Sequence[torch.Tensor]):
    """N images of their own sizes, and nothing else but a fill, in one buffer.

    Each look at an image makes a view ``(3, H_i, W_i)`` of the buffer. A view needs a microsecond
    of the prefetch thread, and only a list of images needs any: a padded batch is the buffer, and a
    launch takes the places.
    """

    def __init__(self, buffer: torch.Tensor, places: Places) -> None:
        self.buffer = buffer
        self.places = places

    def __len__(self) -> int:
        return len(self.places.sizes)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        height, width = self.places.sizes[index].tolist()
        strides = self.places.strides[index].tolist()
        return self.buffer.as_strided((3, height, width), strides, self._starts[index].item())

    def __iter__(self) -> Iterator[torch.Tensor]:
        # One op an image, and no Python between two of them.
        height, width = self.places.sizes.T.tolist()
        shapes = zip(repeat(3, len(self)), height, width, strict=True)
        strides = zip(*self.places.strides.T.tolist(), strict=True)
        return map(self.buffer.as_strided, shapes, strides, self._starts.tolist())

    @property
    def _starts(self) -> Ints:
        """``(N,)``, the first value of each image in the memory of the buffer."""
        return self.places.offsets + int(self.buffer.storage_offset())


class Located(NamedTuple):
    """Where N images ``(C, H_i, W_i)`` lie."""

    addresses: Ints  # (N,), of the first value of each
    sizes: Ints  # (N, 2), height and width
    strides: Ints  # (N, 3), between channels, rows and pixels, in values


def locate(images: Sequence[torch.Tensor]) -> Located:
    """Where images of any kind lie. Those of one buffer are not looked at one by one."""
    if isinstance(images, Pieces):
        places = images.places
        addresses = images.buffer.data_ptr() + images.buffer.itemsize * places.offsets
        return Located(addresses, places.sizes, places.strides)
    return Located(
        np.array([image.data_ptr() for image in images], np.int64),
        sizes_of(images),
        np.array([image.stride() for image in images], np.int64),
    )


def sizes_of(images: Sequence[torch.Tensor]) -> Ints:
    """``(N, 2)``, height and width of each image."""
    if isinstance(images, Pieces):
        return images.places.sizes
    return np.array([image.shape[-2:] for image in images], np.int64)
