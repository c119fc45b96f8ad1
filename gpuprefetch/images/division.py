"""Which images of a batch a worker decodes, and to what: the pixels, a crop or the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.images.headers import Headers
from gpuprefetch.transforms.head import Head
from gpuprefetch.transforms.reference import Doubles, Ints
from gpuprefetch.transforms.sampling import areas

Flags = npt.NDArray[np.bool_]

# The mean pixels of pictures of which a call's memory, plan.WHOLE_BATCH_BYTES, holds so many.
LARGE = 3_500_000

# The GPU resamples a decoded image if this has at most so many pixels for each pixel of the result:
# copying them costs less of a core than resampling them.
SHIPPED = 4
# libjpeg can divide the sides of a JPEG by these. Half of a photo of 12 megapixels then costs a
# core 65, 44 and 38 ms, and 88 undivided. A picture is divided if KEPT pixels are left for each
# pixel of the result along both axes: values then differ by 0.1 to 0.6 levels on average. The GPU
# resamples a divided picture of at most DIVIDED times the result's pixels. A core would lose more
# on it than it saved.
DIVISORS = (2, 4, 8)
KEPT = 2
DIVIDED = 24
# Whether the axes (y, x) of the stored image are mirrored, for EXIF orientations 1 to 8. Those from
# 5 on swap rows and columns before that.
_MIRRORED = np.array([(False, False), (False, True), (True, True), (True, False)] * 2)


class Share(NamedTuple):
    """Which of a batch's files, of those that the GPU could decode, are left to the worker."""

    part: float  # 0 to 1
    # Where there are no engines: the fewest others that are left to CUDA kernels. Else 0.
    least: int = 0

    @staticmethod
    def in_memory(part: float) -> torch.Tensor:
        """``(2,)`` float64, to be shared with the workers, of engines at first."""
        return torch.tensor([part, 0], dtype=torch.float64, device="cpu")

    @classmethod
    def of(cls, shared: torch.Tensor) -> Share:
        part, least = shared.tolist()
        return cls(part, int(least))

    def of_files(self, files: Ints, pixels: Ints) -> Ints:
        """The positions of the files to decode, by their bytes and the pixels of their pictures.

        Engines need about as long for each file, and a core in proportion to its size: the smallest
        30 % of ImageNet's files are 12 % of the cores' work. So the worker has the smallest files.
        Kernels decode the files of a call side by side, each with few threads, and a call needs as
        long as its largest file: 144 of 97 KB or less needed 15 ms, and 144 of up to 317 KB 67 (an
        H200). So the worker has the largest files, and all where those that are left would make no
        call for kernels.

        Args:
            files: ``(N,)``.
            pixels: ``(N,)``.
        """
        count = int(self.part * len(files) + 0.5)
        if not self.least:
            return np.argsort(files, kind="stable")[:count]
        order = np.argsort(-files, kind="stable")
        left = order[count:]
        too_few = len(left) < self.least or pixels[left].mean() > LARGE
        return order if count and too_few else order[:count]


def divide(
    headers: Headers, files: Ints, share: Share, *, on_gpu: bool, keeps_sizes: bool
) -> Flags:
    """``(N,)``, which images the worker decodes: what the GPU cannot decode, and a share.

    Args:
        headers: of the images.
        files: ``(N,)``, their bytes.
        share: of the files that the GPU could decode.
        on_gpu: whether there is a decoder on the GPU.
        keeps_sizes: whether there is no sampling, which could turn a picture upright.
    """
    ours = ~(headers.for_gpu & on_gpu)
    for_gpu = np.flatnonzero(~ours)
    pixels = headers.sizes[for_gpu].prod(axis=1)
    ours[for_gpu[share.of_files(files[for_gpu], pixels)]] = True
    if keeps_sizes:
        ours |= headers.orientation != 1
    return ours & headers.whole


@dataclass(slots=True)
class Made:
    """What the worker makes of the images that it decodes, of N in the batch."""

    divisors: Ints  # (N,), libjpeg divides the sides of each by these
    # (N,), which pictures are cropped to the part that their sampling reads, and resampled by the
    # GPU. The worker resamples others, for each view.
    crops: Flags
    pixels: Ints  # (N,), how many are sent of each
    rows: list[Doubles | None]  # of each view (N, 2, 6), its sampling of the divided pictures


def what_to_make(
    headers: Headers,
    ours: Flags,
    rows: Sequence[Doubles | None],
    heads: Sequence[Head],
    *,
    on_gpu: bool,
) -> Made:
    """What becomes of the images that the worker decodes; ``ours`` ``(N,)`` says which."""
    sizes = [head.size for head in heads if head.size is not None]
    none = np.zeros(len(ours), dtype=bool)
    first = rows[0]
    if not sizes or first is None:
        divisors = np.ones(len(ours), dtype=np.int64)
        return Made(divisors, none, headers.sizes.prod(axis=1), list(rows))
    finished = np.sum([areas(size, len(ours)) for size in sizes], axis=0)
    if not on_gpu or len(rows) > 1:
        divisors = np.ones(len(ours), dtype=np.int64)
        return Made(divisors, none, finished, list(rows))
    divisors, shrunk = _shrink(headers, ours, first, heads[0])
    area = _area(shrunk)
    few = (area <= SHIPPED * finished) | (divisors > 1)
    crops = (0 < area) & few
    return Made(divisors, crops, np.where(crops, area, finished), [shrunk])


def _shrink(headers: Headers, ours: Flags, rows: Doubles, head: Head) -> tuple[Ints, Doubles]:
    """The divisor of each image, ``(N,)``, and the sampling of the divided pictures."""
    divisors = np.ones(len(ours), dtype=np.int64)
    if not head.antialias or head.interpolation == "nearest":
        return divisors, rows
    most = np.abs(rows[:, :, 1]).min(axis=1) / KEPT
    able = ours & headers.for_gpu
    able[list(headers.early)] = False  # which are decoded as a whole
    for number in DIVISORS:
        # A picture that is turned afterwards has its first pixel at the other end.
        fits = (headers.orientation == 1) | (headers.sizes % number == 0).all(axis=1)
        divisors[able & fits & (number <= most)] = number
    if (divisors == 1).all():  # mostly: the GPU decodes all
        return divisors, rows
    by = divisors[:, None]
    divided = rows.copy()
    divided[..., 0] = (divided[..., 0] + 0.5) / by - 0.5
    divided[..., 1] /= by
    divided[..., 2] //= by
    divided[..., 3] = -(-divided[..., 3] // by)
    assert head.size is not None
    divisors[_area(divided) > DIVIDED * areas(head.size, len(rows))] = 1
    return divisors, np.where(divisors[:, None, None] > 1, divided, rows)


def _area(rows: Doubles) -> Ints:
    """The pixels of each image that its sampling may read."""
    area: Ints = np.diff(rows[:, :, 2:4].astype(int)).prod(axis=(1, 2))
    return area


def of_stored(rows: Doubles, headers: Headers, orientation: Ints) -> Doubles:
    """The sampling ``(N, 2, 6)`` of stored pictures, from that of the pictures turned upright.

    ``orientation`` ``(N,)`` is EXIF's, of each stored picture.
    """
    mirrored = _MIRRORED[orientation - 1]
    length = headers.sizes[mirrored]
    origin, step, low, high, first, last = rows[mirrored].T
    turned = [length - 1 - origin, -step, length - high, length - low, first, last]
    stored = rows.copy()
    stored[mirrored] = np.stack(turned, axis=1)
    return stored
