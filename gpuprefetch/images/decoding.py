"""How an epoch decodes: by which decoder, on how many streams, and into which memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from gpuprefetch.core.errors import scope
from gpuprefetch.core.stats import Stats
from gpuprefetch.core.streams import lease_stream, return_stream, using
from gpuprefetch.images.decode import ImageDecoder
from gpuprefetch.images.plan import UPLOAD_BYTES, WHOLE_BATCH_BYTES, scratch_size

# Note [Calls side by side]
# In a call of few large photos the GPU's engines fill and run empty, and the launch that reads its
# pictures has to complete before the next call is decoded into the same memory: in calls of seven
# photos of 12 megapixels an H100 gave 781 a second of 1,028. So the calls of a batch take turns on
# two streams, each with another decoder and other scratch, and the engines work on one call while
# the host waits for the launch of another. The second stream begins after the result has been
# allocated, and the batch's own stream waits for it at the end.


@dataclass(slots=True)
class Decoding:
    """The decoder of one epoch, its streams and its scratch memory."""

    device: torch.device
    decoder: ImageDecoder | None  # of the files that are left to the GPU
    memory_budget: int | None  # bytes for all batches that are ready or in preparation
    stats: Stats
    expects_photos: bool = False  # whether the loader surely has JPEGs, before any was read
    # Batches that are prepared side by side; more than one after a first decode by CUDA kernels.
    streams: int = field(default=1, init=False)
    # Whether CUDA kernels decode, as the GPU has no engines; known after the first batch.
    by_kernels: bool = field(default=False, init=False)
    # Scratch by the handle of its stream, while a thread prepares batches without a budget.
    _scratch: dict[int, torch.Tensor] | None = field(default=None, init=False)
    _beside: torch.cuda.Stream | None = field(default=None, init=False)  # the second stream

    def anew(self, **changes: object) -> Decoding:
        """The same for another epoch."""
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def joins(self) -> bool:
        """Whether one call may decode several batches; it needs memory for all of them."""
        return self.memory_budget is None and self.decoder is not None and self.decoder.joins

    @property
    def copies(self) -> int:
        """How often the pictures of a decode call are in memory when it ends."""
        return 1 if self.decoder is None else self.decoder.copies

    @scope
    def scratch(self) -> Iterator[None]:
        """Keep scratch and a second stream meanwhile, if there is no memory budget."""
        if self.memory_budget is None:
            self._scratch = {}
            self._beside = lease_stream(self.device) if self.device.type == "cuda" else None
        try:
            yield
        finally:
            beside = self._beside
            if beside is not None:
                beside.synchronize()
                return_stream(beside)
            self._scratch = None
            self._beside = None

    def memory(self, size: int) -> torch.Tensor:
        """1-D uint8 on the device, ``size`` bytes or more: the scratch of the current stream.

        A single image that is larger than any call gets other memory, which is not kept.
        """
        scratch = self._scratch
        if scratch is None or size > scratch_size(WHOLE_BATCH_BYTES + UPLOAD_BYTES):
            return torch.empty([size], dtype=torch.uint8, device=self.device)
        on_gpu = self.device.type == "cuda"
        stream = torch.cuda.current_stream(self.device).cuda_stream if on_gpu else 0
        if stream not in scratch or scratch[stream].numel() < size:
            if scratch.pop(stream, None) is not None:  # nothing will fit its block any more
                torch.cuda.empty_cache()
            scratch[stream] = torch.empty(scratch_size(size), dtype=torch.uint8, device=self.device)
        return scratch[stream]

    def run(self, parts: Sequence[Callable[[], None]]) -> None:
        """Run the parts of a batch, on two streams if there are several: Note [Calls side by side].

        The work that the current stream gets after this comes after all of them.
        """
        beside = self._beside
        overlaps = self.decoder is not None and self.decoder.overlaps and not self.by_kernels
        if beside is None or not overlaps or len(parts) < 2:
            for part in parts:
                part()
            return
        current = torch.cuda.current_stream(self.device)
        beside.wait_stream(current)
        try:
            for number, part in enumerate(parts):
                with using(beside if number % 2 else current):
                    part()
        finally:  # what has begun writes into the result
            current.wait_stream(beside)

    def learn(self, streams: int) -> bool:
        """Learn from the first decode how many streams decode best; whether that was news.

        Several streams are for CUDA kernels, which decode where the GPU has no engines.
        """
        if streams == 1 or self.by_kernels:
            return False
        self.by_kernels = True
        if self.memory_budget is None:
            self.streams = streams
        return True

    def make_room(self) -> None:
        """Free all memory of the device that can be spared."""
        self.stats.out_of_memory += 1
        if self._scratch:
            self._scratch.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
