"""What a random policy does to a batch: a program, and what its last launch makes of the result.

A :class:`Program` has slots. In each slot every image has one :class:`.ops.Op` and its arguments,
sampled before. The eager twin carries it out image by image and defines the result. On a GPU one
launch carries out a slot for all images, whatever op each has; slots next to each other share one
if they hold pointwise ops alone. A launch of statistics comes before it where an image needs them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.transforms.reference import ChannelValues, per_channel

Share = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class Program:
    """What is done to each image of a batch: N images and S slots.

    Two images and two slots; the first image is inverted, the second one is brightened and turned::

        ops   [[INVERT,     IDENTITY],          args  [[(),     ()],
               [BRIGHTNESS, AFFINE_BILINEAR]]          [(1.3,), (20, 0, 0, 1, 0, 0, nan, nan, ...)]]
    """

    ops: npt.NDArray[np.int32]  # (N, S) codes; Op.IDENTITY leaves an image as it is
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
        """The dtype and the memory format of the result."""
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
