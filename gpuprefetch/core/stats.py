"""Where the time goes: counters and profiler ranges cheap enough to be always on."""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch

# Enters in 0.2 us where record_function takes 5 us, with nobody profiling.
from torch._C._profiler import _RecordFunctionFast

_NVTX: Any = torch.cuda.nvtx if torch.version.cuda else None

# More photos than this part that the GPU's decoder refuses, and more than a few, are told about.
TOLERATED, FEW = 0.01, 10


class Timed:
    """Count the host's seconds of what runs inside, and name it in Nsight and PyTorch's profiler.

    PyTorch's profiler shows the threads it was not started on with
    ``experimental_config=torch.profiler._ExperimentalConfig(profile_all_threads=True)``.

    Args:
        stats: whose ``{name}_seconds`` it adds to.
        name: of the stage; the range is called ``gpuprefetch.{name}``.

    Attributes:
        seconds: that it took, once it is left.
    """

    __slots__ = ("_counter", "_name", "_range", "_started", "_stats", "seconds")

    def __init__(self, stats: Stats, name: str) -> None:
        self._stats, self._counter = stats, name + "_seconds"
        self._name = "gpuprefetch." + name
        self._range = _RecordFunctionFast(self._name)

    def __enter__(self) -> Timed:
        if _NVTX is not None:
            _NVTX.range_push(self._name)
        self._range.__enter__()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        self.seconds = time.perf_counter() - self._started
        self._stats.add(self._counter, self.seconds)
        self._range.__exit__(*error)
        if _NVTX is not None:
            _NVTX.range_pop()


@dataclass
class Stats:
    """Counters of a :class:`gpuprefetch.DataPrefetcher` since it was made, or since :meth:`reset`.

    All times are seconds of the host's clock; a stage that queues work for the GPU is counted until
    the work is queued, decoding until nvJPEG gives the images back. What the GPU does in between is
    in a profiler's trace, where each stage is a range ``gpuprefetch.{stage}``. What workers and the
    pin thread do is known for encoded images only: it travels with them.

    Attributes:
        batches: handed to the loop.
        images: in them, as the loader gave them.
        bad_images: skipped or replaced.
        gpu_images: left to the GPU's decoder.
        cpu_images: decoded by the workers.
        fallback_images: of the GPU's, those that its decoder did not take and the prefetch thread
            has decoded on the CPU, one by one. One warning tells of more than 1 %.
        missed_images: of the GPU's, those that its decoder reported as decoded and did not write;
            they are decoded again.
        encoded_bytes: of the files left to the GPU and the pixels decoded by the workers.
        read_seconds: the dataset took, all workers together: reading, and what else it does. The
            time of a batch's first image is not known; it is taken to be the mean of the others.
        worker_decode_seconds: decoding in the workers, all of them together.
        collate_seconds: headers, random parameters and packing in the workers, all together.
        pin_seconds: of the DataLoader's pin thread.
        fetch_seconds: the prefetcher waited for the wrapped loader.
        copy_seconds: queueing the copies of tensors to the device; long where they are not pinned.
        decode_seconds: in the GPU's decoder, and until the GPU has run the fused head for what it
            decoded.
        resample_seconds: queueing the fused head; and that wait, for photos that are handed over in
            sizes of their own, and where a call is repeated file by file.
        tail_seconds: queueing the transforms behind it.
        handoff_seconds: of the loop's thread, making a finished batch safe to use.
        wait_seconds: the loop waited for a batch that was not ready.
        seconds: of the loop, from asking for an epoch's first batch to the latest or the end.
        share: of the baseline JPEGs that the workers decode, at present.
        out_of_memory: times that a decode ran out of GPU memory and was repeated in smaller parts.

    Example:
        >>> for images, target in (bar := tqdm(prefetcher)):
        ...     bar.set_postfix(prefetcher.stats.postfix(), refresh=False)
        >>> json.dumps(prefetcher.stats.as_dict())
    """

    batches: int = 0
    images: int = 0
    bad_images: int = 0
    gpu_images: int = 0
    cpu_images: int = 0
    fallback_images: int = 0
    missed_images: int = 0
    encoded_bytes: int = 0
    read_seconds: float = 0.0
    worker_decode_seconds: float = 0.0
    collate_seconds: float = 0.0
    pin_seconds: float = 0.0
    fetch_seconds: float = 0.0
    copy_seconds: float = 0.0
    decode_seconds: float = 0.0
    resample_seconds: float = 0.0
    tail_seconds: float = 0.0
    handoff_seconds: float = 0.0
    wait_seconds: float = 0.0
    seconds: float = 0.0
    share: float = 0.0
    out_of_memory: int = 0

    _told = False  # no counter

    def add(self, counter: str, value: float) -> None:
        """Add to a counter, of which each is one thread's but for ``replay`` and copies.

        There is no lock: the garbage collector may run in here, and wait for an epoch's thread.
        """
        setattr(self, counter, getattr(self, counter) + value)

    def fell_back(self, reason: str) -> None:
        """Count a photo that the prefetch thread has decoded on the CPU; warns once of many."""
        self.fallback_images += 1
        count, known = self.fallback_images, self._told
        self._told = known or count > max(FEW, TOLERATED * self.gpu_images)
        if self._told and not known:
            warnings.warn(
                f"The GPU's decoder did not take {count} of {self.gpu_images} photos so far, and "
                "each was decoded on the CPU, one by one, which is slow. The last reason: "
                f'{reason}. If it goes on, decoder="cpu" decodes in the workers. '
                "stats.fallback_images counts such photos.",
                stacklevel=2,
            )

    def reset(self) -> None:
        """Start counting again."""
        self.__init__(share=self.share)  # type: ignore[misc]

    def as_dict(self) -> dict[str, float]:
        """The counters and what follows from them, for JSON.

        ``wait_share`` and ``busy_share`` of the loop's seconds add up to 1, ``gpu_share`` is of the
        images, and ``bytes_per_second`` of ``encoded_bytes``.
        """
        values: dict[str, float] = asdict(self)
        seconds, decoded = self.seconds or 1.0, self.gpu_images + self.cpu_images or 1
        wait_share = self.wait_seconds / seconds
        return values | {
            "images_per_second": self.images / seconds,
            "bytes_per_second": self.encoded_bytes / seconds,
            "wait_share": wait_share,
            "busy_share": 1 - wait_share,
            "gpu_share": self.gpu_images / decoded,
        }

    def postfix(self) -> dict[str, str]:
        """Three figures for a progress bar: images/s, time spent waiting, images decoded on CPU."""
        values = self.as_dict()
        decoded_on_cpu = self.cpu_images / (self.cpu_images + self.gpu_images or 1)
        return {
            "images/s": f"{values['images_per_second']:,.0f}",
            "wait": f"{values['wait_share']:.1%}",
            "cpu": f"{decoded_on_cpu:.0%}",
        }
