"""Forms of a result: a tensor of images of one size, or images of their own sizes.

Nothing else knows how the images of a form lie in memory. A launch is told where each one lies, and
what comes after it gets the images of :class:`.pieces.Pieces`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from gpuprefetch.transforms.patches import PatchLayout, pack
from gpuprefetch.transforms.pieces import Pieces, Places, sizes_of
from gpuprefetch.transforms.reference import Ints
from gpuprefetch.transforms.sampling import areas


class PaddedImages(NamedTuple):
    """Images of their own sizes in one tensor.

    Attributes:
        images: ``(N, 3, H, W)`` on the device, each image at the top left and the fill beside it.
        sizes: ``(N, 2)`` int64 on the CPU, height and width of each.
    """

    images: torch.Tensor
    sizes: torch.Tensor


class PackedPatches(NamedTuple):
    """Patches of images of their own sizes, as Qwen2-VL and its kin take them.

    Attributes:
        pixel_values: ``(P, C * temporal_patch_size * patch_size ** 2)`` on the device, the patches
            of all images: those of the first one, then those of the second one, ...
        image_grid_thw: ``(N, 3)`` int64 on the device: 1, and the patches along y and x.
    """

    pixel_values: torch.Tensor
    image_grid_thw: torch.Tensor


class PaddedPatches(NamedTuple):
    """Patches of images of their own sizes, each image padded to as many, as SigLIP2 takes them.

    Attributes:
        pixel_values: ``(N, max_num_patches, patch_size ** 2 * C)`` on the device, zeros after the
            patches of each image.
        pixel_attention_mask: ``(N, max_num_patches)`` int32 on the device, 1 for a patch.
        spatial_shapes: ``(N, 2)`` int64 on the device, the patches along y and x.
    """

    pixel_values: torch.Tensor
    pixel_attention_mask: torch.Tensor
    spatial_shapes: torch.Tensor


class ResultForm:
    """What the loop gets for the N images of a batch."""

    has_own_sizes: ClassVar[bool] = True
    # Whether a launch may write images to where :meth:`joined` wants them.
    takes_launch: ClassVar[bool] = False

    def __call__(self, images: torch.Tensor) -> object:
        """What the loop gets for images ``(N, C, H, W)`` of one size."""
        if not isinstance(images, torch.Tensor) or images.dim() != 4 or not len(images):
            got = tuple(images.shape) if isinstance(images, torch.Tensor) else type(images).__name__
            raise ValueError(f"{self} takes images (N, C, H, W), one at least, got {got}.")
        return self.joined(images.unbind())

    def places(self, sizes: Ints, memory_format: torch.memory_format | None) -> Places:
        """Where images of ``sizes`` ``(N, 2)`` lie."""
        return Places.in_turn(sizes, memory_format)

    def joined(self, images: Sequence[torch.Tensor]) -> object:
        """What the loop gets for images that have gone through all transforms."""
        return list(images)

    def added_values(self, sizes: Ints) -> int:
        """Values that :meth:`joined` needs beside images of ``sizes`` ``(N, 2)`` in turn."""
        return 0

    def check(self, dtype: torch.dtype) -> None:
        """Raise a ValueError if it is not for images of this dtype."""


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
        fill: the value beside the images, after all transforms; for uint8 images a whole number
            of 0 to 255.

    Raises:
        ValueError: if ``multiple`` is no such number, or ``fill`` is none; with the images, if
            these cannot hold ``fill``.
    """

    multiple: int = 32
    fill: float = 0.0
    takes_launch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.multiple, int) or self.multiple < 1:
            raise ValueError(f"Padding(multiple=...) takes 1 or more, got {self.multiple!r}.")
        if not isinstance(self.fill, (int, float)):
            raise ValueError(
                f"Padding(fill=...) takes one number for all channels, got {self.fill!r}."
            )

    def check(self, dtype: torch.dtype) -> None:
        if dtype.is_floating_point:
            if not math.isfinite(self.fill) or abs(self.fill) <= torch.finfo(dtype).max:
                return
            instead = f"one of at most {torch.finfo(dtype).max:g}"
        else:
            most = torch.iinfo(dtype).max
            if self.fill in range(most + 1):
                return
            instead = f"a whole number of 0 to {most}, Padding({self.multiple}, fill={most // 2})"
        raise ValueError(
            f"Padding(fill={self.fill}) is no value of {dtype} images. Take {instead}, or give "
            "images another dtype: DataPrefetcher(dtype=torch.float32), or v2.ToDtype("
            "torch.float32, scale=True) at the end of torchvision's ops."
        )

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
        sizes = sizes_of(images)
        # A transform may have made others of them.
        buffer = images.buffer if isinstance(images, Pieces) else self._padded(images, sizes)
        return PaddedImages(buffer, torch.from_numpy(sizes))

    def _padded(self, images: Sequence[torch.Tensor], sizes: Ints) -> torch.Tensor:
        """Copies of images of these sizes in one tensor."""
        shape = (len(images), len(images[0]), *self._size(sizes))
        largest = max(images, key=torch.Tensor.numel)
        self.check(largest.dtype)
        # An image may be a part of a larger tensor: its strides tell, and not their sum.
        last = 0 < largest.stride(0) < largest.stride(2)
        layout = torch.channels_last if last else torch.contiguous_format
        buffer = torch.empty(
            shape, dtype=largest.dtype, device=largest.device, memory_format=layout
        ).fill_(self.fill)
        for place, image in zip(buffer, images, strict=True):
            place[:, : image.shape[1], : image.shape[2]] = image
        return buffer

    def added_values(self, sizes: Ints) -> int:
        height, width = self._size(sizes)
        return 3 * height * width * len(sizes)

    def _size(self, sizes: Ints) -> tuple[int, int]:
        """The size of the tensor for images of these sizes."""
        height, width = (-(-sizes.max(axis=0) // self.multiple) * self.multiple).tolist()
        return height, width


class PatchForm(ResultForm):
    """Images are cut into patches; as a transform the last one of a list."""

    def __post_init__(self) -> None:
        assert is_dataclass(self)
        for argument in fields(self):
            value = getattr(self, argument.name)
            if not isinstance(value, int) or value < 1:
                name = type(self).__name__
                raise ValueError(f"{name}({argument.name}=...) takes 1 or more, got {value!r}.")


@dataclass(frozen=True)
class Patches(PatchForm):
    """Patches of images of their own sizes, for ``DataPrefetcher(results=Patches(...))``.

    A list of transforms may end with it instead, as that of an image processor does.
    A batch is :class:`PackedPatches`: the numbers of Qwen2-VL's image processor, in its order. The
    sides of images must be multiples of ``patch_size * merge_size``: see :class:`SmartResize`.

    Args:
        patch_size: side of a patch, in pixels.
        merge_size: patches are ordered by squares of that many times as many.
        temporal_patch_size: how often each channel of a patch is repeated, as frames of a video.

    Raises:
        ValueError: if one of them is no positive int.
    """

    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2

    def joined(self, images: Sequence[torch.Tensor]) -> PackedPatches:
        grids = self._layout.grids(sizes_of(images), f"SmartResize({self._layout.factor})")
        counts = grids.prod(axis=1)
        first = images[0]
        shape = (int(counts.sum()), self._layout.row_length(len(first)))
        patches = first.new_empty(shape)
        pack(images, patches, np.cumsum(counts) - counts, self._layout)
        frames = np.ones((len(images), 1), np.int64)
        grid = _on_device(np.concatenate([frames, grids], axis=1), patches)
        return PackedPatches(patches, grid)

    def added_values(self, sizes: Ints) -> int:
        return int(3 * areas(sizes, len(sizes)).sum()) * self.temporal_patch_size

    @property
    def _layout(self) -> PatchLayout:
        return PatchLayout(self.patch_size, self.merge_size, self.temporal_patch_size)


@dataclass(frozen=True)
class PatchPadding(PatchForm):
    """Patches, padded to one number an image, for ``DataPrefetcher(results=PatchPadding(...))``.

    A list of transforms may end with it instead, as that of an image processor does.
    A batch is :class:`PaddedPatches`: the numbers of SigLIP2's image processor, in its order.
    The sides of images must be multiples of ``patch_size``, with ``max_num_patches`` patches at
    most: see :class:`ResizeToSequence`.

    Args:
        patch_size: side of a patch, in pixels.
        max_num_patches: rows that each image has in the result.

    Raises:
        ValueError: if one of them is no positive int.
    """

    patch_size: int = 16
    max_num_patches: int = 256

    def joined(self, images: Sequence[torch.Tensor]) -> PaddedPatches:
        resize = f"ResizeToSequence({self.patch_size}, {self.max_num_patches})"
        grids = self._layout.grids(sizes_of(images), resize)
        counts = grids.prod(axis=1)
        if (most := int(counts.max())) > self.max_num_patches:
            raise ValueError(
                f"{self} has no room for {most} patches, those of image {counts.argmax()} of the "
                f"batch. Resize to fewer in the transforms: transforms=[gpuprefetch.{resize}, ...]."
            )
        rows = self.max_num_patches
        first = images[0]
        length = self._layout.row_length(len(first))
        patches = first.new_zeros((len(images), rows, length))
        starts = rows * np.arange(len(images))
        pack(images, patches.view(-1, length), starts, self._layout)
        shapes = _on_device(grids, patches)
        places = torch.arange(rows, device=patches.device)
        mask = (places < shapes.prod(dim=1, keepdim=True)).int()
        return PaddedPatches(patches, mask, shapes)

    def added_values(self, sizes: Ints) -> int:
        return len(sizes) * self.max_num_patches * self._layout.row_length(3)

    @property
    def _layout(self) -> PatchLayout:
        return PatchLayout(self.patch_size, channels_last=True)


def _on_device(numbers: Ints, like: torch.Tensor) -> torch.Tensor:
    """Numbers on the device of a tensor, without waiting for it."""
    tensor = torch.from_numpy(numbers)
    tensor = tensor.pin_memory() if like.is_cuda else tensor
    return tensor.to(like.device, non_blocking=True)


# By the name that ``results`` has for them.
FORMS: dict[str, ResultForm] = {"stack": Stacked(), "list": Listed(), "padded": Padding()}


def form_of(*, own_sizes: bool) -> ResultForm:
    """The form where nobody asks for one; ``own_sizes`` says whether sizes may differ."""
    return Listed() if own_sizes else Stacked()
