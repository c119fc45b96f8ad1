"""Try, on this GPU and driver, whether any image is overwritten while a kernel still reads it.

The race of Note [Decoded memory] is provoked by a kernel that sleeps before images are read.
Each check runs in an unsafe order too, to show whether a wrong image would have been noticed.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch.nn import functional as F

from gpuprefetch.core.device import resolve_device
from gpuprefetch.core.report import Bar, Printed, columns, progress, versions
from gpuprefetch.core.streams import handoff, lease_stream, return_stream
from gpuprefetch.images.decode import DECODERS, ImageDecoder
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.prepared import Call
from gpuprefetch.insight.machine import decode_of, driver_version
from gpuprefetch.prefetcher import DataPrefetcher
from gpuprefetch.transforms.head import Resize

SLEEP_CYCLES = 8_000_000  # 4 to 6 ms: the next decode of IMAGES images has ended well before that
UNSAFE_ROUNDS = 20
UNSAFE_CYCLES = 20 * SLEEP_CYCLES  # other programs on the GPU make a decode slow
IMAGES = 8
SIZE = (512, 768)  # more than 1 MiB decoded: apart from the allocator's pool of small blocks
SETS = 3  # so that neither the next round nor the one after it writes what it overwrites
AHEAD = 2  # rounds that the host may be ahead of the GPU


@dataclass(frozen=True, slots=True)
class Check:
    """What came of one order of one backend."""

    backend: str  # a decoder's name, or "handoff" for the hand-off between two streams
    order: str  # "library" as the library does it, "unsafe" without its protection
    rounds: int = 0  # of images made, read late and freed
    reused: int = 0  # rounds whose images lay where those of an earlier round had been
    corrupted: int = 0  # rounds in which a reader saw a wrong image
    error: str = ""  # why the check could not run

    @property
    def verdict(self) -> str:
        if self.error:
            return f"not checked: {self.error}"
        if not self.reused:
            return "proves nothing: no memory was reused"
        if self.order == "library":
            return "CORRUPTED" if self.corrupted else "safe"
        return "caught" if self.corrupted else "clean: its decoder waits for the stream itself"


@dataclass(frozen=True, slots=True, repr=False)
class SelfcheckReport(Printed):
    """What :func:`selfcheck` found; ``print`` it.

    Attributes:
        device: name of the GPU.
        versions: of torch and the decoders.
        checks: of each backend and order.
        missed: pictures of ``checks`` that JPEG engines reported as decoded and did not write; they
            were decoded again.
        driver: version of NVIDIA's driver; None where it was not found.
        decode: what decodes JPEGs for this GPU, with the number of its JPEG engines.
    """

    device: str
    versions: dict[str, str]
    checks: list[Check]
    missed: int = 0
    driver: str | None = None
    decode: str = "not asked"

    @property
    def ok(self) -> bool:
        """Whether the library's order was safe and a wrong image would have been noticed."""
        ran = [check for check in self.checks if not check.error]
        ours = [check for check in ran if check.order == "library"]
        return (
            any(check.backend in DECODERS for check in ours)
            and all(check.reused and not check.corrupted for check in ours)
            and any(check.corrupted for check in ran if check.order == "unsafe")
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the fields of ``metadata`` and ``results`` as the benchmarks have them."""
        utc = datetime.now(UTC).isoformat(timespec="seconds")
        return {
            "benchmark": "selfcheck",
            "metadata": {
                "utc": utc,
                "gpu": self.device,
                "driver": self.driver,
                "decode": self.decode,
                "versions": self.versions,
            },
            "missed": self.missed,
            "results": [asdict(check) | {"verdict": check.verdict} for check in self.checks],
        }

    def __str__(self) -> str:
        rows: list[list[object]] = [
            ["backend", "order", "rounds", "reused", "corrupted", "verdict"]
        ]
        for c in self.checks:
            rows.append([c.backend, c.order, c.rounds, c.reused, c.corrupted, c.verdict])
        if self.ok:
            end = "ok: no image was overwritten, and the test notices when one is"
        elif any(c.corrupted for c in self.checks if c.order == "library"):
            end = "FAILED: images were overwritten. Please report this with the lines above"
        else:
            end = "FAILED: nothing was proved, see the verdicts"
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        machine = f"NVIDIA driver {self.driver or 'not found'}, decode by {self.decode}"
        missed = f"{self.missed} pictures skipped by the decoder and decoded again"
        table = columns(rows, right=(2, 3, 4))
        return "\n".join([f"{self.device}, {versions}", machine, table, missed, end])


def selfcheck(
    device: torch.device | str | int | None = None, rounds: int = 1000
) -> SelfcheckReport:
    """Check decoders and hand-off for overwritten images; a few seconds per 500 rounds.

    A bar on stderr shows how far it is.

    Args:
        device: CUDA device; None is the current one.
        rounds: in the library's order; the unsafe orders have 20, with longer sleeps.

    Returns:
        The report; ``print(report)`` shows a verdict per backend and order, ``report.ok`` sums up.

    Raises:
        ValueError: if there is no such CUDA device, or ``rounds`` is below 20.
    """
    chosen = resolve_device(device)
    if chosen.type != "cuda":
        raise ValueError(
            f"selfcheck needs a CUDA device, got {str(chosen)!r}, and torch sees "
            f"{torch.cuda.device_count()} here. Run it on the machine that trains; on the CPU "
            "there are no streams to check."
        )
    if rounds < UNSAFE_ROUNDS:
        raise ValueError(
            f"rounds must be at least {UNSAFE_ROUNDS} to prove anything, got {rounds}."
        )
    checks = []
    missed = 0
    total = (len(DECODERS) + 1) * (rounds + UNSAFE_ROUNDS)
    with (
        torch.cuda.device(chosen),
        torch.no_grad(),
        warnings.catch_warnings(),
        progress("selfcheck", total) as bar,
    ):
        # That torchvision's decoder is deprecated, or memory not pinned, is no news here.
        warnings.simplefilter("ignore")
        files = _draw_jpegs()
        for name, decoder in DECODERS.items():
            bar.set_description_str(f"selfcheck: {name}")
            try:
                expected = list(_prefetcher(files, decoder(chosen)))
            except Exception as error:  # of an optional package: the other backends are checked
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                checks.append(Check(name, "library", error=reason))
                continue
            for order, count in (("library", rounds), ("unsafe", UNSAFE_ROUNDS)):
                safe = order == "library"
                witness = _Witness(count, bar, SLEEP_CYCLES if safe else UNSAFE_CYCLES)
                late = _Delayed(decoder(chosen), witness, safe=safe)
                batches = [files[number % SETS] for number in range(count)]
                prefetcher = _prefetcher(batches, late)
                for number, seen in enumerate(prefetcher):
                    witness.judge(seen, expected[number % SETS])
                    del seen
                checks.append(witness.check(name, order))
                missed += prefetcher.stats.missed_images
        bar.set_description_str("selfcheck: handoff")
        pictures = [torch.rand(IMAGES, 3, *SIZE, device=chosen) for _ in range(SETS)]
        checks.append(_check_handoff("library", pictures, rounds, bar))
        checks.append(_check_handoff("unsafe", pictures, UNSAFE_ROUNDS, bar))
    return SelfcheckReport(
        torch.cuda.get_device_name(chosen),
        versions(),
        checks,
        missed,
        driver_version(),
        decode_of(chosen),
    )


def _prefetcher(batches: list[list[EncodedImage]], decoder: ImageDecoder) -> DataPrefetcher:
    half = Resize([side // 2 for side in SIZE])
    return DataPrefetcher(
        batches, device=decoder.device, decoder=decoder, cpu_share=0.0, transforms=[half]
    )


def _draw_jpegs() -> list[list[EncodedImage]]:
    """SETS sets of IMAGES files that nowhere show the same."""
    from torchcodec.encoders import JpegEncoder

    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(SETS * IMAGES, 3, SIZE[0] // 32, SIZE[1] // 32, generator=generator)
    pictures = (F.interpolate(coarse, SIZE, mode="bilinear") * 255).to(torch.uint8)
    files = [EncodedImage(JpegEncoder(picture).to_tensor(quality=90)) for picture in pictures]
    return [files[i : i + IMAGES] for i in range(0, len(files), IMAGES)]


class _Witness:
    """Where the images of each round lay, and in which rounds a reader saw wrong ones."""

    def __init__(self, rounds: int, bar: Bar, cycles: int = SLEEP_CYCLES) -> None:
        self._wrong = torch.zeros(rounds, dtype=torch.bool, device="cuda")
        self._rounds = 0
        self._reused = 0
        self._addresses: set[int] = set()
        self._pending: deque[torch.cuda.Event] = deque()
        self._bar = bar
        self._cycles = cycles
        torch.cuda.synchronize()

    def delay(self, images: Sequence[torch.Tensor]) -> None:
        """Have what reads the images of a round wait, and remember where they lie."""
        torch.cuda._sleep(self._cycles)
        addresses = {image.data_ptr() for image in images}
        self._reused += not addresses.isdisjoint(self._addresses)
        self._addresses |= addresses

    def judge(self, seen: torch.Tensor, expected: torch.Tensor) -> None:
        """Queue the comparison on the current stream; at most AHEAD rounds are then under way."""
        self._wrong[self._rounds] = (seen != expected).any()
        self._rounds += 1
        self._pending.append(torch.cuda.current_stream().record_event())
        if len(self._pending) > AHEAD:
            self._pending.popleft().synchronize()
        self._bar.update(1)

    def check(self, backend: str, order: str) -> Check:
        torch.cuda.synchronize()
        return Check(backend, order, self._rounds, self._reused, int(self._wrong.sum()))


class _Delayed(ImageDecoder):
    """A decoder whose pictures are read late. The unsafe one does not wait for readers."""

    def __init__(self, decoder: ImageDecoder, witness: _Witness, *, safe: bool) -> None:
        super().__init__(decoder.device)
        self._decoder = decoder
        self._witness = witness
        self._safe = safe
        self.canaries = safe and decoder.canaries  # they need the host's waits
        self.overlaps = decoder.overlaps

    def wait_for_readers(self) -> None:
        if self._safe:
            self._decoder.wait_for_readers()

    def decode(self, call: Call, buffer: torch.Tensor, out: torch.Tensor) -> None:
        self._decoder.decode(call, buffer, out)
        self._witness.delay([out])


def _check_handoff(order: str, pictures: Sequence[torch.Tensor], rounds: int, bar: Bar) -> Check:
    """Made on a side stream, read on the current one; unsafe is without a word of that."""
    witness = _Witness(rounds, bar)
    seen = torch.empty_like(pictures[0])
    side = lease_stream(seen.device)
    for number in range(rounds):
        with torch.cuda.stream(side):
            batch = [picture.clone() for picture in pictures[number % SETS]]
            ready = side.record_event()
        if order == "library":
            handoff(batch, ready, seen.device)
        else:
            torch.cuda.current_stream().wait_event(ready)
        witness.delay(batch)
        torch.stack(batch, out=seen)
        del batch
        witness.judge(seen, pictures[number % SETS])
    torch.cuda.synchronize()
    return_stream(side)
    return witness.check("handoff", order)
