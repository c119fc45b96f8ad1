"""Forms of a result: a tensor of images of one size, or images of their own sizes.

Nothing else knows how the images of a form lie in memory. A launch is told where each one lies, and
what comes after it gets the images of :class:`Pieces`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch

from gpuprefetch.transforms.reference import Ints
from gpuprefetch.transforms.sampling import areas

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
        return cls(sizes, offsets, np.stack(strides, axis=1), (total,))

    def empty(self, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """The buffer; not initialized where nothing is beside the images."""
        buffer = torch.empty(
            self.shape, dtype=dtype, device=device, memory_format=self.memory_format
        )
        return buffer if self.fill is None else buffer.fill_(self.fill)

    def pieces(self, buffer: torch.Tensor) -> Pieces:
        """N views ``(3, H_i, W_i)`` of a buffer."""
        start = buffer.storage_offset()
        where = zip(self.sizes.tolist(), self.strides.tolist(), self.offsets.tolist(), strict=True)
        views = [
            buffer.as_strided((3, *size), strides, start + offset)
            for size, strides, offset in where
        ]
        return Pieces(views, buffer)


class Pieces(list[torch.Tensor]):
    """Images of their own sizes, and the buffer that holds them, and nothing else but a fill."""

    def __init__(
        self, images: Iterable[torch.Tensor] = (), buffer: torch.Tensor | None = None
    ) -> None:
        super().__init__(images)
        self.buffer = buffer  # None once some were taken out


class PaddedImages(NamedTuple):
    """Images of their own sizes in one tensor.

    Attributes:
        images: ``(N, 3, H, W)`` on the device, each image at the top left and the fill beside it.
        sizes: ``(N, 2)`` int64 on the CPU, height and width of each.
    """

    images: torch.Tensor
    sizes: torch.Tensor


class ResultForm:
    """What the loop gets for the N images of a batch."""

    has_own_sizes: ClassVar[bool] = True

    def places(self, sizes: Ints, memory_format: torch.memory_format | None) -> Places:
        """Where images of ``sizes`` ``(N, 2)`` lie."""
        return Places.in_turn(sizes, memory_format)

    def joined(self, images: Sequence[torch.Tensor]) -> object:
        """What the loop gets for images that have gone through all transforms."""
        return list(images)


@dataclass(frozen=True)
class Listed(ResultForm):
    """N tensors ``(3, H_i, W_i)``, views of one buffer."""


@dataclass(frozen=True)
class Stacked(ResultForm):
    """``(N, 3, H, W)``, where all images have one size."""

    has_own_sizes = False


@dataclass(frozen=True)
class Padding(ResultForm):
    """Images of their own sizes in one tensor, for ``DataPrefetcher(results=Padding(...))``.

    A batch is :class:`PaddedImages`: as high and as wide as its largest image, rounded up.

    Args:
        multiple: of what the height and the width of the tensor are multiples, 1 or more.
        fill: the value beside the images, after all transforms.

    Raises:
        ValueError: if ``multiple`` is no such number.
    """

    multiple: int = 32
    fill: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.multiple, int) or self.multiple < 1:
            raise ValueError(f"Padding(multiple=...) takes 1 or more, got {self.multiple!r}.")

    def places(self, sizes: Ints, memory_format: torch.memory_format | None) -> Places:
        height, width = self._size(sizes)
        area = height * width
        channels_last = memory_format is torch.channels_last
        strides = (1, 3 * width, 3) if channels_last else (area, width, 1)
        return Places(
            sizes,
            3 * area * np.arange(len(sizes)),
            np.broadcast_to(np.array(strides), (len(sizes), 3)),
            (len(sizes), 3, height, width),
            torch.channels_last if channels_last else torch.contiguous_format,
            self.fill,
        )

    def joined(self, images: Sequence[torch.Tensor]) -> PaddedImages:
        sizes = np.array([image.shape[-2:] for image in images], np.int64)
        buffer = images.buffer if isinstance(images, Pieces) else None
        if buffer is None:  # a transform has made others of them
            shape = (len(images), len(images[0]), *self._size(sizes))
            largest = max(images, key=torch.Tensor.numel)[None]
            last = largest.is_contiguous(memory_format=torch.channels_last)
            both = last and largest.is_contiguous()  # as a picture of one pixel
            layout = torch.channels_last if last and not both else torch.contiguous_format
            buffer = torch.empty(
                shape, dtype=largest.dtype, device=largest.device, memory_format=layout
            ).fill_(self.fill)
            for place, image in zip(buffer, images, strict=True):
                place[:, : image.shape[1], : image.shape[2]] = image
        return PaddedImages(buffer, torch.from_numpy(sizes))

    def _size(self, sizes: Ints) -> tuple[int, int]:
        """The size of the tensor for images of these sizes."""
        height, width = (-(-sizes.max(axis=0) // self.multiple) * self.multiple).tolist()
        return height, width


# By the name that ``results`` has for them.
FORMS: dict[str, ResultForm] = {"stack": Stacked(), "list": Listed(), "padded": Padding()}


def form_of(*, own_sizes: bool) -> ResultForm:
    """The form where nobody asks for one; ``own_sizes`` says whether sizes may differ."""
    return Listed() if own_sizes else Stacked()
