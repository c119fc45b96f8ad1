"""Try, on this GPU and driver, whether any image is overwritten while a kernel still reads it.

It is the race of Note [Decoded memory], provoked: images are read behind a kernel that sleeps,
their memory is freed meanwhile, and the next images are made. Every check also runs in an unsafe
order, which shows whether a wrong image would have been noticed. Beside that: whether nvJPEG's
engines keep the order of their stream here, and whether they skip pictures. See Note [Canaries].
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from gpuprefetch.core.streams import handoff, lease_stream, return_stream, using
from gpuprefetch.images import nvjpeg
from gpuprefetch.images.decode import BACKENDS, ImageDecoder
from gpuprefetch.images.encoded import Call, EncodedImage
from gpuprefetch.images.job import ImageJob
from gpuprefetch.images.plan import Cost
from gpuprefetch.images.stage import Pipeline, Work
from gpuprefetch.prefetcher import DataPrefetcher, _resolve_device
from gpuprefetch.transforms.head import Resize

SLEEP_CYCLES = 8_000_000  # 4 to 6 ms: the next decode of IMAGES images is through well within them
UNSAFE_ROUNDS = 20
CONTROL_SLEEPS = (10, 40, 160)  # of those cycles, until an overwritten image was caught
IMAGES = 8
SIZE = (512, 768)  # more than 1 MiB decoded: apart from the allocator's pool of small blocks
SETS = 3  # so that neither the next round nor the one after it writes what it overwrites
AHEAD = 2  # rounds that the host may be ahead of the GPU


@dataclass(frozen=True, slots=True)
class Check:
    """What came of one order of one backend.

    Attributes:
        backend: a decoder's name, or "handoff" for the hand-off between two streams.
        order: "library" as the library does it, "unsafe" without its protection.
        rounds: of images made, read late and freed.
        reused: rounds whose images lay where those of an earlier round had been.
        corrupted: rounds in which a reader saw a wrong image.
        error: why the check could not run.
    """

    backend: str
    order: str
    rounds: int = 0
    reused: int = 0
    corrupted: int = 0
    error: str = ""

    @property
    def verdict(self) -> str:
        """In words."""
        if self.error:
            return f"not checked: {self.error}"
        if not self.reused:
            return "proves nothing: no memory was reused"
        if self.order == "library":
            return "CORRUPTED" if self.corrupted else "safe"
        return "caught" if self.corrupted else "clean: this backend keeps the stream's order"


@dataclass(frozen=True, slots=True)
class SelfcheckReport:
    """What :func:`selfcheck` found.

    Attributes:
        device: name of the GPU.
        versions: of torch, CUDA, and the decoders.
        checks: of each backend and order.
        overtaking: calls of nvJPEG, of 20, that wrote before what their stream had queued was
            through, from which the host's wait protects; None where no JPEG engine is used.
        missed: pictures of ``checks`` that the engines reported as decoded and did not write; they
            were decoded again.
    """

    device: str
    versions: dict[str, str]
    checks: list[Check]
    overtaking: int | None = None
    missed: int = 0

    @property
    def ok(self) -> bool:
        """Whether the library's order was safe and a wrong image would have been noticed."""
        ran = [check for check in self.checks if not check.error]
        ours = [check for check in ran if check.order == "library"]
        return (
            any(check.backend in BACKENDS for check in ours)
            and all(check.reused and not check.corrupted for check in ours)
            and any(check.corrupted for check in ran if check.order == "unsafe")
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the fields of ``metadata`` and ``results`` as the benchmarks have them."""
        return {
            "benchmark": "selfcheck",
            "metadata": {
                "utc": datetime.now(UTC).isoformat(timespec="seconds"),
                "gpu": self.device,
                "versions": self.versions,
            },
            "engines": {"overtaking": self.overtaking, "missed": self.missed},
            "results": [asdict(check) | {"verdict": check.verdict} for check in self.checks],
        }

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [
            f"{self.device}, {versions}",
            f"{'backend':<12} {'order':<8} {'rounds':>6} {'reused':>6} {'corrupted':>9}  verdict",
        ]
        lines += [
            f"{c.backend:<12} {c.order:<8} {c.rounds:>6} {c.reused:>6} {c.corrupted:>9}  "
            + c.verdict
            for c in self.checks
        ]
        if self.overtaking is None:
            lines.append("JPEG engines: none are used, so neither order nor skips were looked for")
        else:
            lines.append(
                f"JPEG engines: {self.overtaking} of {UNSAFE_ROUNDS} calls overtook their stream, "
                f"for which the host waits; {self.missed} pictures skipped and decoded again"
            )
        if self.ok:
            lines.append("ok: no image was overwritten, and the test notices when one is")
        elif any(c.corrupted for c in self.checks if c.order == "library"):
            lines.append("FAILED: images were overwritten. Please report this with the lines above")
        else:
            lines.append("FAILED: nothing was proved, see the verdicts")
        return "\n".join(lines)


def selfcheck(
    device: torch.device | str | int | None = None, rounds: int = 1000
) -> SelfcheckReport:
    """Check decoders and hand-off for overwritten images; a few seconds per 500 rounds.

    Args:
        device: CUDA device; None is the current one.
        rounds: in the library's order; the unsafe orders take 20, with longer sleeps,
            and again with still longer ones where nothing was caught.

    Returns:
        The report; ``print(report)`` shows a verdict per backend and order, ``report.ok`` sums up.

    Raises:
        ValueError: if there is no such CUDA device, or ``rounds`` is below 20.
    """
    chosen = _cuda_device(device)
    if rounds < UNSAFE_ROUNDS:
        raise ValueError(
            f"rounds must be at least {UNSAFE_ROUNDS} to prove anything, got {rounds}."
        )
    checks, missed = [], 0
    with torch.cuda.device(chosen), torch.no_grad(), warnings.catch_warnings():
        # That torchvision's decoder is deprecated, or memory not pinned, is no news here.
        warnings.simplefilter("ignore")
        files = _draw_jpegs()
        for name in BACKENDS:
            try:
                course = _Course(name, chosen, files)
            except Exception as error:  # of an optional package: the other backend is checked
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                checks.append(Check(name, "library", error=reason))
                continue
            checks += [course.check("library", rounds), course.control()]
            missed += course.missed
        pictures = [torch.rand(IMAGES, 3, *SIZE, device=chosen) for _ in range(SETS)]
        checks.append(_check_handoff("library", pictures, rounds))
        checks.append(_check_handoff("unsafe", pictures, UNSAFE_ROUNDS))
        overtaking = _overtaking(files[0], chosen)
    name = torch.cuda.get_device_name(chosen)
    return SelfcheckReport(name, _versions(), checks, overtaking, missed)


def _overtaking(images: Sequence[EncodedImage], device: torch.device) -> int | None:
    """Calls of nvJPEG, of UNSAFE_ROUNDS, that decoded before what was queued on their stream."""
    if torch.version.hip or not nvjpeg.has_engines(device):
        return None
    files = [torch.frombuffer(image.data, dtype=torch.uint8) for image in images]
    data, count = torch.cat(files).pin_memory(), 0
    out = torch.empty((len(files), 3 * SIZE[0] * SIZE[1]), dtype=torch.uint8, device=device)
    order = nvjpeg.order_for(np.array([(len(file), *SIZE) for file in files]).T)
    order = nvjpeg.place_order(order, data.data_ptr(), out.data_ptr())
    stream = lease_stream(device)
    for _ in range(UNSAFE_ROUNDS):
        torch.cuda.synchronize(device)
        with using(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            out.zero_()  # which lies over what was decoded before it
            with nvjpeg.lease(device) as decoder:
                decoder.decode(order, stream.cuda_stream)
        torch.cuda.synchronize(device)
        count += not bool(out.any(dim=1).all())
    return_stream(stream)
    return count


def _cuda_device(device: torch.device | str | int | None) -> torch.device:
    if not torch.cuda.is_available():
        raise ValueError(
            "selfcheck needs a CUDA device, and torch sees none here. Run it on the machine that "
            "trains; on the CPU there are no streams to check."
        )
    chosen = _resolve_device(device)
    if chosen.type != "cuda":
        raise ValueError(f"selfcheck needs a CUDA device, got {str(chosen)!r}.")
    return chosen


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"torch": torch.__version__, "CUDA": str(torch.version.cuda)}
    for name in BACKENDS:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


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

    def __init__(self, rounds: int) -> None:
        self._wrong = torch.zeros(rounds, dtype=torch.bool, device="cuda")
        self._rounds = self._reused = 0
        self._addresses: set[int] = set()
        self._pending: deque[torch.cuda.Event] = deque()
        torch.cuda.synchronize()

    def note_addresses(self, images: Sequence[torch.Tensor]) -> None:
        """Remember where the images of a round lie."""
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

    def check(self, backend: str, order: str) -> Check:
        """What came of it."""
        torch.cuda.synchronize()
        return Check(backend, order, self._rounds, self._reused, int(self._wrong.sum()))


@dataclass
class _LatePipeline(Pipeline):
    """The prefetcher's own, but for a sleep before the launch that reads the decoded images."""

    sleep: int = 0

    def start(self, batch: Any, number: int, epoch: int, cost: Cost | None) -> Work:
        torch.cuda._sleep(self.sleep)  # on the batches' stream
        return super().start(batch, number, epoch, cost)


class _CarelessJob(ImageJob):
    """Lets the decoded images go while the launch that reads them is still queued."""

    def _wait_for_reader(self) -> None:
        pass


class _Course:
    """Batches of JPEGs through a prefetcher that reads them late."""

    def __init__(self, backend: str, device: torch.device, files: list[list[EncodedImage]]) -> None:
        self._backend, self._device, self._files = backend, device, files
        self._expected, self.missed = [], 0
        for batch in files:
            (undisturbed,) = self._prefetcher([batch])
            self._expected.append(undisturbed)
        torch.cuda.synchronize()

    def _prefetcher(self, batches: Sequence[list[EncodedImage]]) -> DataPrefetcher:
        small = [SIZE[0] // 2, SIZE[1] // 2]
        return DataPrefetcher(
            batches,
            device=self._device,
            decoder=self._backend,
            transforms=[Resize(small)],
            cpu_share=0.0,
        )

    def control(self) -> Check:
        """The unsafe order; with longer sleeps where other programs make a decode slow, too."""
        for factor in CONTROL_SLEEPS:
            caught = self.check("unsafe", UNSAFE_ROUNDS, factor)
            if caught.corrupted:
                break
        return caught

    def check(self, order: str, rounds: int, factor: int = 1) -> Check:
        """Run ``rounds`` batches in the library's order, or without its protection."""
        witness = _Witness(rounds)
        prefetcher = self._prefetcher([self._files[number % SETS] for number in range(rounds)])
        parts = {f.name: getattr(prefetcher._pipeline, f.name) for f in fields(Pipeline)}
        careful = order == "library"
        parts["decoder"] = _Noted(parts["decoder"], witness, canaries=careful)
        parts["job"] = ImageJob if careful else _CarelessJob
        prefetcher._pipeline = _LatePipeline(**parts, sleep=factor * SLEEP_CYCLES)
        for number, seen in enumerate(prefetcher):
            witness.judge(seen, self._expected[number % SETS])
            del seen
        self.missed += prefetcher.stats.missed_images
        return witness.check(self._backend, order)


class _Noted(ImageDecoder):
    """A decoder that notes where its images lie.

    Without the host's waits canaries would be set when a picture is there already.
    """

    def __init__(self, decoder: ImageDecoder, witness: _Witness, *, canaries: bool) -> None:
        self._decoder, self._witness, self._canaries = decoder, witness, canaries

    @property
    def canaries(self) -> bool:
        return self._canaries

    @property
    def packs(self) -> bool:
        return self._decoder.packs

    def packed(self, data: torch.Tensor, call: Call, out: torch.Tensor, **options: Any) -> None:
        self._witness.note_addresses([out])
        self._decoder.packed(data, call, out, **options)

    def __call__(self, data: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        images = self._decoder(data)
        self._witness.note_addresses([image for image in images if image is not None])
        return images


def _check_handoff(order: str, pictures: Sequence[torch.Tensor], rounds: int) -> Check:
    """Made on a side stream, read on the current one; unsafe is without a word of that."""
    witness = _Witness(rounds)
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
        witness.note_addresses(batch)
        torch.cuda._sleep(SLEEP_CYCLES)
        torch.stack(batch, out=seen)
        del batch
        witness.judge(seen, pictures[number % SETS])
    torch.cuda.synchronize()
    return_stream(side)
    return witness.check("handoff", order)
