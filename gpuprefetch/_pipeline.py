"""From a host batch to a device batch: move tensors, decode, resample, transform.

A batch becomes a few parts that any thread may run, and a finish behind them. Which threads do,
and in which order batches are handed over, is the prefetcher's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch._batch import leaves, map_leaves, to_device
from gpuprefetch._decode import ImageDecoder, decode_part
from gpuprefetch._encoded import EncodedImages
from gpuprefetch._host import Packer, is_encoded, pack_lists
from gpuprefetch._random import SeededDraws, fold
from gpuprefetch._resample import HAS_TRITON, resample, resample_planned
from gpuprefetch._stats import Stage, Stats
from gpuprefetch._targets import (
    PerSample,
    is_per_sample,
    refuse_unfollowed,
    run_tail,
    unmark,
    unstack,
)
from gpuprefetch._transforms import Head, Transform, apply_head, require_fixed_size

# Images and decoded bytes of one decode call. Large calls keep nvJPEG's engines busy, small ones
# bound the memory: a decoded photo takes 3 bytes a pixel until it is resampled.
SUB_BATCH = 64
SUB_BATCH_BYTES = 96 << 20

EMPTY = object()  # stands for a batch of which no image is left


class BadImageError(ValueError):
    """A file that cannot be decoded; the message names its path, its index and the reason."""


@dataclass(frozen=True, slots=True)
class BadImage:
    """A file that could not be decoded.

    Attributes:
        index: of the sample in its dataset.
        path: of the file.
        reason: the decoder's.
    """

    index: int
    path: str
    reason: str

    def __str__(self) -> str:
        path = f"{self.path!r} " if self.path else ""
        return f"cannot decode {path}(sample {self.index} of the dataset): {self.reason}"


@dataclass(slots=True)
class Work:
    """One batch on its way.

    Attributes:
        parts: what any thread may run, each with a stream of its own current.
        finish: runs behind all parts, with the stream of the batch current, and gives the batch.
    """

    parts: list[Callable[[], None]]
    finish: Callable[[], Any]


class Readers:
    """Finished batches whose launch may still read decoded images. See Note [Decoded memory]."""

    def __init__(self) -> None:
        self._queued: deque[tuple[torch.cuda.Event, Work]] = deque()
        self._lock = threading.Lock()

    def add(self, event: torch.cuda.Event, work: Work) -> None:
        """Hold the decoded images of ``work`` until ``event``, recorded behind their reader."""
        self._queued.append((event, work))

    def drop(self, keep: int) -> None:
        """Drop what is through; wait until no more than ``keep`` batches are held."""
        with self._lock:
            while self._queued and (len(self._queued) > keep or self._queued[0][0].query()):
                self._queued[0][0].synchronize()
                self._queued.popleft()


@dataclass
class Pipeline:
    """What happens to each batch on the device.

    Attributes:
        device: where batches go.
        head: the fused transforms.
        tail: transforms that run on the batch behind them.
        packer: prepares encoded images that no worker of ours has seen.
        decoder: backend for the images left to the GPU; None on the CPU.
        dtype: of the images behind the head; None for float32.
        memory_format: likewise; None for contiguous.
        on_error: "raise", "skip", "replace", or a callable that gets each :class:`BadImage`.
        max_bad: how many bad images are tolerated; None for any number.
        bad_images: those that were tolerated.
        stats: counts the time of each step.
    """

    device: torch.device
    head: Head
    tail: Sequence[Transform]
    packer: Packer
    decoder: ImageDecoder | None = None
    dtype: torch.dtype | None = None
    memory_format: torch.memory_format | None = None
    on_error: str | Callable[[BadImage], Any] = "raise"
    max_bad: int | None = None
    bad_images: list[BadImage] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)

    def start(self, batch: Any, number: int, epoch: int) -> Work:
        """Queue the copies of a batch on the current stream and lay out the rest of its work.

        Args:
            batch: as the loader gives it.
            number: of the batch in its epoch; keys the tail's random numbers.
            epoch: likewise.
        """
        seed = int(fold(fold(fold(self.packer.seed, epoch), -1), number)[()] >> np.uint64(1))
        batch = pack_lists(batch, self.packer)
        jobs: list[_ImageJob] = []

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, EncodedImages):
                return to_device(leaf, self.device)
            jobs.append(_ImageJob(self, leaf))
            return jobs[-1]

        moved = map_leaves(move, batch, is_encoded)
        if not any(job.images.targets for job in jobs):
            refuse_unfollowed(moved, [*self.head.ops, *self.tail])
        if jobs:
            parts = [part for job in jobs for part in job.parts()]
            return Work(parts, partial(self._finish, moved, jobs, seed))
        if self.head.names or self.tail or self.dtype or self.memory_format:
            return Work([], partial(self._transform_tensors, moved, seed))
        return Work([], lambda: moved)

    def _finish(self, batch: Any, jobs: list[_ImageJob], seed: int) -> Any:
        with Stage(self.stats, "resample"):
            for job in jobs:
                job.resample()
        rows = self._rows_to_keep(jobs)
        if rows is not None and not len(rows):
            return EMPTY
        count, targets = len(jobs[0].images), jobs[0].images.targets

        def kept(leaf: Any) -> Any:
            if rows is None or isinstance(leaf, _ImageJob):
                return leaf
            return _take_rows(leaf, rows, count)

        batch = unstack(batch, count) if targets and self.tail else batch
        batch = map_leaves(kept, batch, is_per_sample)
        for job in jobs:
            job.out = kept(job.out)
            if not targets:
                job.out = self._run_tail(job.out, seed)
        if targets and self.tail:
            if len(jobs) > 1:
                raise ValueError(
                    "The collate function leaves samples apart, and the transforms behind the head "
                    "need one batch. Use collate_fn=lambda samples: tuple(zip(*samples))."
                )
            with Stage(self.stats, "tail"), SeededDraws(seed):
                job.out, batch = run_tail(self.tail, job.out, batch, targets)
        return map_leaves(
            lambda leaf: leaf.out if isinstance(leaf, _ImageJob) else unmark(leaf),
            batch,
            is_per_sample,
        )

    def _transform_tensors(self, batch: Any, seed: int) -> Any:
        done = False

        def transform(leaf: Any) -> Any:
            nonlocal done
            if done or not isinstance(leaf, torch.Tensor) or leaf.dim() != 4:
                return leaf
            done = True
            with Stage(self.stats, "resample"):
                leaf = self._run_head(leaf, seed)
            return self._run_tail(leaf, seed)

        result = map_leaves(transform, batch)
        if not done:
            raise ValueError(
                "transforms, dtype and memory_format are for images, but the loader gave neither "
                "an EncodedImage nor an (N, C, H, W) tensor. Return one of them, or leave these "
                "arguments out."
            )
        return result

    def _run_head(self, images: torch.Tensor, seed: int) -> torch.Tensor:
        kornia_next = bool(self.tail) and type(self.tail[0]).__module__.startswith("kornia.")
        if self.head.names or (kornia_next and not images.is_floating_point()):
            keys = fold(seed, np.arange(len(images)))
            return apply_head(self.head, images, keys, self.dtype, self.memory_format)
        if self.dtype and not images.is_floating_point():
            images = images.to(self.dtype) / 255
        return images.to(
            dtype=self.dtype or images.dtype,
            memory_format=self.memory_format or torch.preserve_format,
        )

    def _run_tail(self, images: Any, seed: int) -> Any:
        if not self.tail:
            return images
        with Stage(self.stats, "tail"), SeededDraws(seed):
            for transform in self.tail:
                images = transform(images)
        return images

    def _rows_to_keep(self, jobs: list[_ImageJob]) -> torch.Tensor | None:
        """Apply ``on_error``: the rows of the batch that become its result, None for all."""
        bad = sorted({i for job in jobs for i in job.images.errors})
        if not bad:
            return None
        for job in jobs:
            for i, reason in sorted(job.images.errors.items()):
                self._tolerate(BadImage(int(job.images.indices[i]), job.images.paths[i], reason))
        count = len(jobs[0].images)
        if any(len(job.images) != count for job in jobs):
            raise BadImageError(
                "a bad image in a batch with differing numbers of images cannot be skipped"
            )
        good = np.setdiff1d(np.arange(count), bad)
        if self.on_error == "replace":
            if not len(good):
                raise BadImageError(
                    f"all {count} images of a batch are bad, the last: {self.bad_images[-1]}"
                )
            rows = np.arange(count)
            rows[bad] = good[
                np.searchsorted(good, bad) % len(good)
            ]  # the next good one fills the slot
            return torch.from_numpy(rows)
        return torch.from_numpy(good)

    def _tolerate(self, bad: BadImage) -> None:
        if self.on_error == "raise":
            raise BadImageError(str(bad))
        if callable(self.on_error):
            self.on_error(bad)
        self.bad_images.append(bad)
        self.stats.bad_images += 1
        if self.max_bad is not None and len(self.bad_images) > self.max_bad:
            raise BadImageError(f"more than max_bad={self.max_bad} bad images, the last: {bad}")


def _take_rows(leaf: Any, rows: torch.Tensor, count: int) -> Any:
    """Select rows of whatever has one entry per sample."""
    if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == count:
        return leaf[rows.to(leaf.device)]
    if isinstance(leaf, np.ndarray) and leaf.ndim and len(leaf) == count:
        return leaf[rows.numpy()]
    if isinstance(leaf, list) and len(leaf) == count:
        taken = [leaf[i] for i in rows.tolist()]
        return leaf.of(taken) if isinstance(leaf, PerSample) else taken
    return leaf


class _ImageJob:
    """The encoded images of one batch, on their way into one tensor.

    The decoded images live as long as the job, and that is held until the event behind the launch
    that reads them has completed. See Note [Decoded memory].
    """

    def __init__(self, pipeline: Pipeline, images: EncodedImages) -> None:
        self.images = images
        self.out: Any = [None] * len(images)
        self._pipeline = pipeline
        self._decoded: dict[int, torch.Tensor] = {}
        self._written: list[torch.cuda.Event] = []
        head = pipeline.head
        if head.names or pipeline.tail:
            require_fixed_size(head, pipeline.tail)

    def parts(self) -> list[Callable[[], None]]:
        """The decode of each sub-batch."""
        todo = ~self.images.decoded
        todo[list(self.images.errors)] = False
        return [partial(self._decode, chunk) for chunk in self._chunks(np.flatnonzero(todo))]

    def _chunks(self, positions: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """Cut into equal sub-batches of about SUB_BATCH images or SUB_BATCH_BYTES at most."""
        if not len(positions):
            return []
        areas = self.images.sizes[positions].prod(axis=1)
        filled = np.cumsum(np.maximum(1 / SUB_BATCH, 3 * areas / SUB_BATCH_BYTES))
        numbers = np.ceil(filled * (ceil(filled[-1] - 1e-9) / filled[-1]) - 1e-9)
        return np.split(positions, np.flatnonzero(np.diff(numbers)) + 1)

    def _decode(self, positions: npt.NDArray[np.int64]) -> None:
        decoder = self._pipeline.decoder
        assert decoder is not None, "the packer leaves nothing to decode where there is no decoder"
        with Stage(self._pipeline.stats, "decode"):
            decoded = decode_part(decoder, self.images, positions, self._pipeline.device)
        self._decoded.update(
            (i, image)
            for i, image in zip(positions.tolist(), decoded, strict=True)
            if image is not None
        )
        self._written.append(torch.cuda.current_stream(self._pipeline.device).record_event())

    def resample(self) -> None:
        """Bring all decoded images into the result, in one launch on the current stream."""
        images, head, device = self.images, self._pipeline.head, self._pipeline.device
        for event in self._written:
            torch.cuda.current_stream(device).wait_event(event)
        if head.size is None:
            # The pixels themselves are the result, and the buffer is the worker's.
            pixels = images.pixels.to(device, non_blocking=True, copy=True)
            for i, image in self._tensors(pixels).items():
                self.out[i] = image
            return
        # Nothing of this before: a batch that is still decoded needs no room for it.
        self.out = torch.empty(
            (len(images), 3, *head.size),
            dtype=self._pipeline.dtype or torch.float32,
            device=device,
            memory_format=self._pipeline.memory_format or torch.contiguous_format,
        )
        pixels = _upload(images.pixels, device)
        ready = np.flatnonzero(images.decoded)
        positions = [*self._decoded, *ready.tolist()]
        if not positions:
            return
        way = {"interpolation": head.interpolation, "mean": head.mean, "std": head.std}
        if images.plan is not None and HAS_TRITON and self.out.dtype != torch.float64:
            addresses = [image.data_ptr() for image in self._decoded.values()]
            addresses += (pixels.data_ptr() + images.spans[ready, 0]).tolist()
            plan = images.plan[positions]
            resample_planned(plan, addresses, positions, self.out, **way)  # type: ignore[arg-type]
            return
        tensors, turned = self._tensors(pixels), images.transposed
        assert images.rows is not None
        resample(
            [tensors[i].mT if turned[i] else tensors[i] for i in positions],
            images.rows[positions],
            head.size,
            antialias=head.antialias,
            dtype=self.out.dtype,
            out=self.out,
            positions=positions,
            **way,  # type: ignore[arg-type]
        )

    def _tensors(self, pixels: torch.Tensor) -> dict[int, torch.Tensor]:
        """Every image that could be decoded, ``(3, H, W)`` uint8, by its position."""
        tensors = dict(self._decoded)
        for i in np.flatnonzero(self.images.decoded).tolist():
            (start, stop), (height, width) = self.images.spans[i], self.images.sizes[i]
            tensors[i] = pixels[start:stop].view(3, height, width)
        return tensors


def _upload(pixels: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy flat uint8 pixels to the device, into memory that serves the next batch as well."""
    if device.type == "cpu":
        return pixels
    # In powers of two: sizes that differ each time would leave the allocator a block for each.
    room = torch.empty(1 << pixels.numel().bit_length(), dtype=torch.uint8, device=device)
    return room[: pixels.numel()].copy_(pixels, non_blocking=True)


def count_images(batch: Any) -> int:
    """The samples of a batch: the length of its first tensor or packed images; 0 without any."""
    for leaf in leaves(batch, is_encoded):
        if isinstance(leaf, EncodedImages) or (isinstance(leaf, torch.Tensor) and leaf.dim()):
            return len(leaf)
    return 0


def encoded_leaves(batch: Any) -> list[EncodedImages]:
    """The packed encoded images of a batch."""
    return [leaf for leaf in leaves(batch, is_encoded) if isinstance(leaf, EncodedImages)]
