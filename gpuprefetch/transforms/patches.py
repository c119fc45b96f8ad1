"""Cut images of their own sizes into square patches, one row of a tensor each: one launch a batch.

Vision transformers that take pictures of any size read such rows. Four patches side by side may be
merged by the model later, so they come one after the other. With ``merge_size=2`` an image of 4 x 8
patches has its rows in this order::

     0  1 |  4  5 |  8  9 | 12 13
     2  3 |  6  7 | 10 11 | 14 15
    ------+-------+-------+------
    16 17 | 20 21 | 24 25 | 28 29
    18 19 | 22 23 | 26 27 | 30 31

The launch that resamples images does not write this order itself. Ops after the fused ones, kept
rows and replaced images need images, so that a second way to the same result would be needed. What
the copy costs is little: it reads a value once and writes it ``copies`` times.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpuprefetch.transforms.kernel import HAS_TRITON, image_of, tl, triton
from gpuprefetch.transforms.pieces import locate
from gpuprefetch.transforms.reference import Ints

# The words of an image in the table: where its first value is, its strides between channels, rows
# and pixels in values, its patches across, its first program, and its first row of the result.
WORDS = 7
# Values are copied as integers of their size.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class PatchLayout:
    """How an image ``(C, H, W)`` becomes rows, one for each patch."""

    patch_size: int
    merge_size: int = 1  # patches are merged in squares of that side
    copies: int = 1  # of each channel of a patch, as frames of a still video
    # Values of a pixel are adjacent in a row, which is (patch, patch, C) then, and else
    # (C, copies, patch, patch).
    channels_last: bool = False

    @property
    def factor(self) -> int:
        """What the sides of images are multiples of."""
        return self.patch_size * self.merge_size

    def row_length(self, channels: int) -> int:
        """Values of a row."""
        return channels * self.copies * self.patch_size**2

    def grids(self, sizes: Ints, instead: str) -> Ints:
        """``(N, 2)`` patches along y and x of images of ``sizes`` ``(N, 2)``, which must fit.

        ``instead`` is a resize that makes them fit.
        """
        wrong = np.flatnonzero((sizes % self.factor).any(axis=1))
        if wrong.size:
            height, width = sizes[wrong[0]].tolist()
            raise ValueError(
                f"Patches of {self.patch_size} pixels, merged by {self.merge_size}, take images "
                f"whose sides are multiples of {self.factor}, and image {wrong[0]} of the batch "
                f"has {height} x {width} pixels. Resize to multiples in the transforms: "
                f"transforms=[gpuprefetch.{instead}, ...]."
            )
        return sizes // self.patch_size


def pack(
    images: Sequence[torch.Tensor], out: torch.Tensor, starts: Ints, layout: PatchLayout
) -> None:
    """Write the patches of images into rows of ``out``; on a CUDA device in one launch.

    Args:
        images: N ``(C, H_i, W_i)`` of one dtype and device, with any strides; sides fit the layout.
        out: ``(R, C * copies * patch * patch)`` of the same dtype and device, contiguous.
        starts: ``(N,)``, the first row of each image.
        layout: of the rows.
    """
    if out.is_cuda and HAS_TRITON and out.element_size() in _INTEGERS:
        pack_triton(images, out, starts, layout)
    else:
        pack_reference(images, out, starts, layout)


def pack_reference(
    images: Sequence[torch.Tensor], out: torch.Tensor, starts: Ints, layout: PatchLayout
) -> None:
    """Eager twin of :func:`pack_triton`: it defines the order."""
    patch = layout.patch_size
    merge = layout.merge_size
    for image, start in zip(images, starts.tolist(), strict=True):
        channels, height, width = image.shape
        down = height // layout.factor
        across = width // layout.factor
        cut = image.reshape(channels, down, merge, patch, across, merge, patch)
        if layout.channels_last:
            rows = cut.permute(1, 4, 2, 5, 3, 6, 0)
        else:
            rows = cut.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
            rows = rows.expand(-1, -1, -1, -1, -1, layout.copies, -1, -1)
        count = down * across * merge**2
        out[start : start + count].view(rows.shape).copy_(rows)


def pack_triton(
    images: Sequence[torch.Tensor], out: torch.Tensor, starts: Ints, layout: PatchLayout
) -> None:
    """Run the kernel, on CUDA tensors or, in Triton's interpreter, on CPU tensors."""
    if not len(images):
        return
    located = locate(images)
    grids = located.sizes // layout.patch_size
    counts = grids.prod(axis=1)
    table = np.empty((len(images), WORDS), np.int64)
    table[:, 0] = located.addresses
    table[:, 1:4] = located.strides
    table[:, 4] = grids[:, 1]
    table[:, 5] = np.cumsum(counts) - counts
    table[:, 6] = starts
    words = torch.from_numpy(table)
    words = words.pin_memory() if out.is_cuda else words
    integers = _INTEGERS[out.element_size()]
    with torch.cuda.device_of(out):
        _pack_kernel[(int(counts.sum()),)](
            words.to(out.device, non_blocking=True),
            out.view(integers),
            len(images),
            VALUE=getattr(tl, str(integers).removeprefix("torch.")),
            CHANNELS=len(images[0]),
            PATCH=layout.patch_size,
            SIDE=triton.next_power_of_2(layout.patch_size),
            MERGE=layout.merge_size,
            COPIES=layout.copies,
            CHANNELS_LAST=layout.channels_last,
        )


if triton is not None:
    _WORDS = tl.constexpr(WORDS)

    @triton.jit(do_not_specialize=["images"])
    def _pack_kernel(
        table, out_ptr, images,
        VALUE: tl.constexpr, CHANNELS: tl.constexpr, PATCH: tl.constexpr, SIDE: tl.constexpr,
        MERGE: tl.constexpr, COPIES: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    ):  # fmt: skip
        """One program copies one patch."""
        table += image_of(table + 5, tl.program_id(0), images, _WORDS) * _WORDS
        source_ptr = tl.load(table).to(tl.pointer_type(VALUE))
        stride_c = tl.load(table + 1)
        across = tl.load(table + 4)
        number = tl.program_id(0) - tl.load(table + 5)
        square = number // (MERGE * MERGE)
        corner = number % (MERGE * MERGE)
        y = square // (across // MERGE) * MERGE + corner // MERGE
        x = square % (across // MERGE) * MERGE + corner % MERGE
        rows = tl.arange(0, SIDE)[:, None]
        cols = tl.arange(0, SIDE)[None, :]
        mask = (rows < PATCH) & (cols < PATCH)
        source_ptr += (y * PATCH + rows) * tl.load(table + 2)
        source_ptr += (x * PATCH + cols) * tl.load(table + 3)
        out_ptr += (tl.load(table + 6) + number) * (CHANNELS * COPIES * PATCH * PATCH)
        for c in tl.static_range(CHANNELS):
            values = tl.load(source_ptr + c * stride_c, mask)
            if CHANNELS_LAST:
                tl.store(out_ptr + (rows * PATCH + cols) * CHANNELS + c, values, mask)
            else:
                for copy in tl.static_range(COPIES):
                    plane = (c * COPIES + copy) * PATCH
                    tl.store(out_ptr + (plane + rows) * PATCH + cols, values, mask)
