"""What a worker does with encoded images: headers, random parameters, its share of decoding.

It runs inside the DataLoader's own collate, in worker processes, and never touches CUDA.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from gpuprefetch._batch import leaves, map_leaves
from gpuprefetch._encoded import EncodedImage, EncodedImages, join, packing
from gpuprefetch._format import ImageHeader, decode_cpu, read_header
from gpuprefetch._random import Keys, fold
from gpuprefetch._resample import plan_rows, resample_uint8
from gpuprefetch._targets import FollowedImage, fate, follow, mark
from gpuprefetch._transforms import Head, Sampling

# Added to the workers' priority number: the training thread launches kernels, they only decode.
NICENESS = 10
# Up to this many pixels for each of the result, a decoded image is left to the GPU to resample: to
# copy them takes less of a core than to resample them there.
SHIPPED = 4
_TRANSPOSED = frozenset((5, 6, 7, 8))
# EXIF orientation -> which axes (y, x) of the (transposed, for 5 to 8) stored image are mirrored.
_MIRRORED = {
    1: (False, False), 2: (False, True), 3: (True, True), 4: (True, False),
    5: (False, False), 6: (False, True), 7: (True, True), 8: (True, False),
}  # fmt: skip


# Stands in for a header that could not be read; large, so that no crop refuses it.
_UNREADABLE = ImageHeader("unknown", 2**15, 2**15, 1, False, ())


def sample_keys(seed: int, epoch: int, images: Sequence[EncodedImage], view: int) -> Keys:
    """One key per image, a function of (seed, epoch, sample) wherever and in whichever batch it is.

    ``view`` tells several images of one sample apart; a sample that a batch holds twice, as
    samplers with replacement or repeated augmentation draw it, gets different parameters each time.
    """
    seen: dict[int, int] = {}
    names, repeats = [], []
    for image in images:
        name = image.index
        if name < 0:
            name = zlib.crc32(image.path.encode() if image.path else image.data) - 2**33
        repeats.append(seen.get(name, 0))
        seen[name] = repeats[-1] + 1
        names.append(name)
    keys = fold(fold(fold(seed, epoch), names), view)
    return fold(keys, repeats) if any(repeats) else fold(keys, 0)


@dataclass(slots=True)
class Packer:
    """Prepare a batch of encoded images for the device.

    Attributes:
        head: the fused transforms whose parameters are drawn here.
        on_gpu: whether baseline JPEGs are left to the GPU.
        apply_exif: whether pictures are turned upright.
        seed: of all random parameters.
        epoch: likewise.
        share: ``(1,)`` float64 in shared memory, of the baseline JPEGs that are decoded here.
    """

    head: Head
    on_gpu: bool
    apply_exif: bool
    seed: int
    epoch: torch.Tensor
    share: torch.Tensor
    _views: int = 0
    _last: float = field(init=False, default_factory=time.perf_counter)
    _following: bool = False

    def __call__(self, images: Sequence[EncodedImage]) -> EncodedImages:
        begin = time.perf_counter()
        batch_view, self._views = self._views, self._views + 1
        epoch = int(self.epoch)
        keys = sample_keys(self.seed, epoch, images, batch_view)
        headers, errors = self._read_headers(images)
        orientation, transposed, sizes = self._upright(headers)
        rows = self._draw(images, sizes, keys)
        on_cpu = ~np.array([header.gpu and self.on_gpu for header in headers])
        share = float(self.share)
        on_cpu |= self._cheapest(images, ~on_cpu, share)
        if self.head.size is None and self.apply_exif:  # no sampling that could turn the picture
            on_cpu |= np.array([header.orientation != 1 for header in headers])

        files: list[Any] = [b""] * len(images)
        pixels: list[Any] = [b""] * len(images)
        decoded = np.zeros(len(images), dtype=bool)
        started = time.perf_counter()
        for i, (image, header) in enumerate(zip(images, headers, strict=True)):
            if i in errors:
                continue
            if not on_cpu[i]:
                files[i] = _without(image.data, header.exif)
                continue
            try:
                picture, row = self._decode(image, None if rows is None else rows[i])
            except (ValueError, RuntimeError) as error:
                errors[i] = str(error)
                continue
            # It has been turned upright already.
            decoded[i], transposed[i], orientation[i] = True, False, 1
            pixels[i], sizes[i] = picture.contiguous().numpy().reshape(-1), picture.shape[-2:]
            if rows is not None:
                rows[i] = row
        seconds = time.perf_counter() - started
        plan = None
        if rows is not None:
            rows = _mirror(rows, sizes, np.array([_MIRRORED[o] for o in orientation]))
            if self.on_gpu and self.head.size is not None:
                way = (self.head.size, self.head.interpolation, self.head.antialias)
                plan = plan_rows(rows, sizes, transposed, *way)

        buffer, (spans, pixel_spans), boundary = join(files, pixels)
        read_seconds, self._last = self._read_seconds(images), time.perf_counter()
        return EncodedImages(
            buffer,
            boundary,
            np.where(decoded[:, None], pixel_spans, spans),
            indices=np.array([image.index for image in images], dtype=np.int64),
            paths=[image.path for image in images],
            decoded=decoded,
            sizes=sizes,
            transposed=transposed,
            rows=rows,
            plan=plan,
            errors=errors,
            prepared=True,
            epoch=epoch,
            share=share,
            read_seconds=read_seconds,
            decode_seconds=seconds,
            collate_seconds=self._last - begin - seconds,
        )

    @staticmethod
    def _cheapest(images: Sequence[EncodedImage], where: Any, share: float) -> Any:
        """Our share of the images ``where`` the GPU could decode them: the smallest files.

        To decode one costs the GPU about the same whatever its size (small launches and copies) and
        a core in proportion to its bytes: 30 % of ImageNet's files make 12 % of the cores' work.
        """
        positions = np.flatnonzero(where)
        weights = [len(images[i].data) for i in positions.tolist()]
        count = int(share * len(positions) + 0.5)
        chosen = np.zeros(len(images), dtype=bool)
        chosen[positions[np.argsort(weights, kind="stable")[:count]]] = True
        return chosen

    def _read_seconds(self, images: Sequence[EncodedImage]) -> float:
        """What the dataset took; 0 for images that it has kept from before the last batch."""
        made = [image._made for image in images]
        if len(made) < 2 or min(made) < self._last:
            return 0.0
        return (max(made) - min(made)) * len(made) / (len(made) - 1)

    def follow(self, samples: Any) -> Any:
        """Samples with boxes, masks and points moved as the head is going to move their image."""

        def draw(images: Sequence[EncodedImage]) -> tuple[Any, Any, dict[int, str]]:
            headers, errors = self._read_headers(images)
            sizes = self._upright(headers)[2]
            keys = sample_keys(self.seed, int(self.epoch), images, 0)
            return self.head.draw(sizes, fold(keys, 0)), sizes, errors

        followed = follow(samples, self.head.size, draw)
        self._following = followed is not samples
        return followed

    def _upright(self, headers: Sequence[ImageHeader]) -> tuple[list[int], Any, Any]:
        """Orientation, whether it swaps rows and columns, and the size ``(N, 2)`` behind that."""
        orientation = [header.orientation if self.apply_exif else 1 for header in headers]
        transposed = np.array([o in _TRANSPOSED for o in orientation], dtype=bool)
        sizes = np.array([(header.height, header.width) for header in headers], dtype=np.int64)
        return orientation, transposed, np.where(transposed[:, None], sizes[:, ::-1], sizes)

    def _draw(self, images: Sequence[EncodedImage], sizes: Any, keys: Keys) -> Any:
        if self.head.size is None:
            return None
        if not self._following:
            return self.head.draw(sizes, fold(keys, 0))
        followed: list[Any] = [i.row for i in images if isinstance(i, FollowedImage)]
        if len(followed) < len(images):
            raise ValueError(
                "The collate function made new EncodedImages, but boxes, masks or points have been "
                "moved with those of the samples. Let it pass these on."
            )
        return np.stack(followed)

    @staticmethod
    def _read_headers(images: Sequence[EncodedImage]) -> tuple[list[ImageHeader], dict[int, str]]:
        headers, errors = [], {}
        for i, image in enumerate(images):
            try:
                headers.append(read_header(image.data))
            except ValueError as error:
                errors[i] = str(error)
                headers.append(_UNREADABLE)
        return headers, errors

    def _decode(self, image: EncodedImage, row: Any) -> tuple[torch.Tensor, Any]:
        """Decode an image to the part of it that its sampling reads, and the sampling of that."""
        picture = decode_cpu(image.data, apply_exif=self.apply_exif)
        if row is None or self.head.size is None:
            return picture, row
        (top, left), (bottom, right) = row[:, 2:4].T.astype(int)
        if self.on_gpu and 0 < (bottom - top) * (right - left) <= SHIPPED * prod(self.head.size):
            origin, step, low, high, first, last = row.T
            row = np.stack([origin - low, step, low - low, high - low, first, last], axis=1)
            return picture[:, top:bottom, left:right], row
        picture = resample_uint8(
            picture,
            row,
            self.head.size,
            interpolation=self.head.interpolation,
            antialias=self.head.antialias,
        )
        return picture, Sampling.identity([self.head.size]).rows()[0]


def _without(data: Any, spans: Sequence[tuple[int, int]]) -> Any:
    """Overwrite ``spans`` of a file with zeros, in a copy."""
    if not spans:
        return data
    changed = bytearray(data)
    for start, stop in spans:
        changed[start:stop] = bytes(stop - start)
    return changed


def _mirror(rows: Any, sizes: Any, where: Any) -> Any:
    """Sampling of an upright picture, rewritten for the stored one, mirrored ``where`` it says."""
    origin, step, low, high, first, last = np.moveaxis(rows, -1, 0)
    return np.stack(
        [
            np.where(where, sizes - 1 - origin, origin),
            np.where(where, -step, step),
            np.where(where, sizes - high, low),
            np.where(where, sizes - low, high),
            first,
            last,
        ],
        axis=-1,
    )


_settled = False


def _settle(nice: bool) -> None:
    """Once in a worker: end with the parent, and let the training thread go first."""
    global _settled
    if _settled or get_worker_info() is None:
        return
    _settled = True
    if nice:
        os.nice(NICENESS)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process after its parent: torch's worker does not look while it writes to a pipe.

    A batch's message may be larger than a pipe holds, and a worker whose parent was killed would
    wait for a reader for ever.
    """
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


@dataclass(slots=True)
class HostStage:
    """The collate function a prefetcher gives its loader: the user's, with our packing inside."""

    collate_fn: Callable[[Any], Any]
    packer: Packer

    def __call__(self, samples: Any) -> Any:
        self.packer._views = 0
        _settle(nice=self.packer.on_gpu)
        samples = self.packer.follow(samples)
        with packing(self.packer):
            batch = pack_lists(mark(self.collate_fn(samples), samples), self.packer)
        for images in leaves(batch, is_encoded):
            if isinstance(images, EncodedImages):
                images.targets = fate(batch, samples)
        return batch


def is_encoded(batch: Any) -> bool:
    """Whether ``batch`` is an encoded image, a packed batch of them or a list of them."""
    return isinstance(batch, (EncodedImage, EncodedImages)) or (
        isinstance(batch, (list, tuple))
        and len(batch) > 0
        and all(isinstance(image, EncodedImage) for image in batch)
    )


def pack_lists(batch: Any, packer: Packer) -> Any:
    """Pack what a collate function of the user's left as images or lists of them."""

    def pack_leaf(leaf: Any) -> Any:
        if not is_encoded(leaf) or (isinstance(leaf, EncodedImages) and leaf.prepared):
            return leaf
        return packer(
            [leaf] if isinstance(leaf, EncodedImage) else [leaf[i] for i in range(len(leaf))]
        )

    return map_leaves(pack_leaf, batch, is_encoded)
