"""Where the time goes: counters and profiler ranges cheap enough to be always on."""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict, dataclass, fields

import torch

# Enters in 0.2 us where record_function needs 5 us, with nobody profiling.
from torch._C._profiler import _RecordFunctionFast

from gpuprefetch.core.report import Printed, columns, rate_text

_NVTX = torch.cuda.nvtx if torch.version.cuda else None

# A warning tells of photos that the GPU's decoder refuses where they are more than FEW, and more
# than this part of all.
TOLERATED = 0.01
FEW = 10


class Timed:
    """Add the seconds of what runs inside to ``{name}_seconds``, and name it in profilers.

    It adds nothing without ``counts``, where another clock tells the seconds.
    """

    __slots__ = ("_counts", "_name", "_range", "_started", "_stats", "seconds")

    def __init__(self, stats: Stats, name: str, *, counts: bool = True) -> None:
        self._stats = stats
        self._counts = counts
        self._name = name
        self._range = _RecordFunctionFast("gpuprefetch." + name)
        self._started = 0.0
        self.seconds = 0.0  # of the host, once it has run

    def __enter__(self) -> Timed:
        if _NVTX is not None:
            _NVTX.range_push("gpuprefetch." + self._name)
        self._range.__enter__()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._started
        if self._counts:
            self._stats.add(self._name + "_seconds", self.seconds)
        self._range.__exit__(*error)
        if _NVTX is not None:
            _NVTX.range_pop()


@dataclass(repr=False)
class Stats(Printed):
    """Counters of a :class:`gpuprefetch.DataPrefetcher` since it was made, or since :meth:`reset`.

    All times but ``wait_seconds`` are seconds of the host's clock. Work for the GPU counts until it
    is queued, decoding until nvJPEG gives the images back. A profiler's trace shows the GPU's time:
    each stage is a range ``gpuprefetch.{stage}``, in PyTorch's profiler with
    ``experimental_config=torch.profiler._ExperimentalConfig(profile_all_threads=True)``. Times of
    workers and pin thread are known for encoded images only, with which they travel.

    Attributes:
        batches: batches handed to the loop.
        images: images in these batches, as the loader gave them.
        bad_images: images that were skipped or replaced.
        gpu_images: images left to the GPU's decoder, without files that a worker finds to be bad.
        cpu_images: images decoded by the workers.
        fallback_images: images that the GPU's decoder refused. The prefetch thread decodes them on
            the CPU, one by one. One warning tells of more than 1 %.
        missed_images: images that the GPU's decoder skipped, and that were decoded again.
        encoded_bytes: bytes of the files left to the GPU, and of the pixels decoded by the workers.
        read_seconds: time in the dataset, all workers together. Each batch's first image counts as
            the mean of the others.
        worker_decode_seconds: decoding in the workers, all together.
        collate_seconds: headers, random parameters and packing in the workers, all together.
        pin_seconds: pinning in the DataLoader's pin thread.
        fetch_seconds: the prefetcher waited for the wrapped loader.
        copy_seconds: queueing copies to the device; long if the tensors are not pinned.
        decode_seconds: in the GPU's decoder, and until the GPU has run what was queued before; with
            JPEG engines the fused transforms, too.
        resample_seconds: queueing the fused transforms.
        tail_seconds: queueing the transforms after them.
        handoff_seconds: making a finished batch safe to use, in the loop's thread.
        wait_seconds: the GPU had finished a step, and the loop's next batch was not ready, by the
            GPU's clock; on a CPU the loop waited for it.
        seconds: the loop ran, from asking for an epoch's first batch to the latest or the end.
        share: share of the baseline JPEGs that the workers decode, at present.
        out_of_memory: decodes that ran out of GPU memory and were repeated in smaller parts.

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

    def __post_init__(self) -> None:
        self._told = False  # whether the warning of fell_back() was given; no counter

    def add(self, counter: str, value: float) -> None:
        """Add to a counter; only one thread adds to each, but for copies.

        There is no lock: the garbage collector may run in here, and wait for an epoch's thread.
        """
        setattr(self, counter, getattr(self, counter) + value)

    def fell_back(self, reason: str) -> None:
        """Count a photo that the prefetch thread has decoded on the CPU; warns once of many."""
        self.fallback_images += 1
        if self._told or self.fallback_images <= max(FEW, TOLERATED * self.gpu_images):
            return
        self._told = True
        warnings.warn(
            f"The GPU's decoder did not take {self.fallback_images} of {self.gpu_images} photos so "
            "far, and each was decoded on the CPU, one by one, which is slow. The last reason: "
            f'{reason}. If it goes on, decoder="cpu" decodes in the workers. '
            "stats.fallback_images counts such photos.",
            stacklevel=2,
        )

    def reset(self) -> None:
        """Start counting again."""
        for counter in fields(self):
            if counter.name != "share":
                setattr(self, counter.name, counter.default)

    def as_dict(self) -> dict[str, float]:
        """The counters and what follows from them, for JSON.

        ``wait_share`` and ``busy_share`` of the loop's seconds add up to 1, ``gpu_share`` is of the
        images, and ``bytes_per_second`` of ``encoded_bytes``.
        """
        values: dict[str, float] = asdict(self)
        seconds = self.seconds or 1.0
        wait_share = self.wait_seconds / seconds
        return values | {
            "images_per_second": self.images / seconds,
            "bytes_per_second": self.encoded_bytes / seconds,
            "wait_share": wait_share,
            "busy_share": 1 - wait_share,
            "gpu_share": self.gpu_images / self._decoded,
        }

    @property
    def _decoded(self) -> int:
        """The images that were decoded on either side; at least 1."""
        return self.gpu_images + self.cpu_images or 1

    def __str__(self) -> str:
        rows = [
            (name, f"{value:,.0f}" if value >= 100 or isinstance(value, int) else f"{value:.4f}")
            for name, value in self.as_dict().items()
            if value
        ]
        return columns(rows, right=[1]) if self.batches else "no batches yet"

    def postfix(self) -> dict[str, str]:
        """Three figures for a progress bar: images/s, time spent waiting, images decoded on CPU.

        The last one is "-" where the prefetcher decodes nothing, as of a dataset that does so.
        """
        values = self.as_dict()
        decodes = self.gpu_images or self.cpu_images
        return {
            "images/s": rate_text(values["images_per_second"]),
            "wait": f"{values['wait_share']:.1%}",
            "cpu": f"{self.cpu_images / self._decoded:.0%}" if decodes else "-",
        }
