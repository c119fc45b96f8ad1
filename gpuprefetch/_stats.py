"""Where the time goes: counters cheap enough to be always on."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field


@dataclass
class Stats:
    """Counters of a :class:`gpuprefetch.DataPrefetcher` since it was made, or since :meth:`reset`.

    Attributes:
        batches: handed to the loop.
        wait_seconds: the loop waited for a batch that was not ready.
        fetch_seconds: the prefetcher waited for the wrapped loader.
        gpu_images: decoded on the GPU.
        cpu_images: decoded by the workers.
        encoded_bytes: of the files left to the GPU and the pixels decoded by the workers.
        worker_decode_seconds: spent decoding in the workers, all of them together.
        share: of the baseline JPEGs that the workers decode, at present.
        out_of_memory: times that a decode ran out of GPU memory and was repeated in smaller parts.
    """

    batches: int = 0
    wait_seconds: float = 0.0
    fetch_seconds: float = 0.0
    gpu_images: int = 0
    cpu_images: int = 0
    encoded_bytes: int = 0
    worker_decode_seconds: float = 0.0
    share: float = 0.0
    out_of_memory: int = 0
    started: float = field(default_factory=time.perf_counter)

    def reset(self) -> None:
        """Start counting again."""
        share = self.share
        self.__init__()  # type: ignore[misc]
        self.share = share

    def as_dict(self) -> dict[str, float]:
        """The counters, ``seconds`` and ``wait_share`` of them: for JSON or a tqdm postfix."""
        values: dict[str, float] = asdict(self)
        seconds = time.perf_counter() - values.pop("started")
        wait_share = self.wait_seconds / seconds if seconds > 0 else 0.0
        return values | {"seconds": seconds, "wait_share": wait_share}
