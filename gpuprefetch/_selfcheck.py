"""Try, on this GPU and driver, whether any image is overwritten while a kernel still reads it.

It is the race of Note [Decoded memory], provoked: images are read behind a kernel that sleeps,
their memory is freed meanwhile, and the next images are made. Every check also runs in an unsafe
order, which shows whether a wrong image would have been noticed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch.nn import functional as F

from gpuprefetch._decode import BACKENDS
from gpuprefetch._encoded import EncodedImage, EncodedImages
from gpuprefetch._pipeline import Pipeline, Readers
from gpuprefetch._prefetcher import DataPrefetcher
from gpuprefetch._stream import handoff, lease_stream, return_stream
from gpuprefetch._transforms import Resize

SLEEP_CYCLES = 8_000_000  # 4 to 6 ms: the next decode of IMAGES images is through well within them
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
    """

    device: str
    versions: dict[str, str]
    checks: list[Check]

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
        rounds: in the library's order; the unsafe orders take a tenth, at least 20.

    Returns:
        The report; ``print(report)`` shows a verdict per backend and order, ``report.ok`` sums up.

    Raises:
        ValueError: if there is no such CUDA device, or ``rounds`` is below 20.
    """
    chosen = _cuda_device(device)
    if rounds < 20:
        raise ValueError(f"rounds must be at least 20 to prove anything, got {rounds}.")
    few = max(rounds // 10, 20)
    checks = []
    with torch.cuda.device(chosen), torch.no_grad(), _quiet():
        files = _draw_jpegs()
        for name in BACKENDS:
            try:
                course = _Course(name, chosen, files)
            except Exception as error:  # of an optional package: the other backend is checked
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                checks.append(Check(name, "library", error=reason))
                continue
            checks += [course.check("library", rounds), course.check("unsafe", few)]
        pictures = [torch.rand(IMAGES, 3, *SIZE, device=chosen) for _ in range(SETS)]
        checks.append(_check_handoff("library", pictures, rounds))
        checks.append(_check_handoff("unsafe", pictures, few))
    return SelfcheckReport(torch.cuda.get_device_name(chosen), _versions(), checks)


def _cuda_device(device: torch.device | str | int | None) -> torch.device:
    if not torch.cuda.is_available():
        raise ValueError(
            "selfcheck needs a CUDA device, and torch sees none here. Run it on the machine that "
            "trains; on the CPU there are no streams to check."
        )
    if device is None:
        device = torch.cuda.current_device()
    chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    if chosen.type != "cuda" or chosen.index >= torch.cuda.device_count():
        raise ValueError(
            f"device must be one of torch's {torch.cuda.device_count()} CUDA devices, got "
            f"{str(chosen)!r}."
        )
    return chosen


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # torchvision's decoder is deprecated; that it is checked here is no reason to tell.
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


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
        self.wrong = torch.zeros(rounds, dtype=torch.bool, device="cuda")
        self.rounds = self.reused = 0
        self._addresses: set[int] = set()
        self._pending: deque[torch.cuda.Event] = deque()
        torch.cuda.synchronize()  # it was made on another stream than it is used on

    def note_addresses(self, images: Sequence[torch.Tensor]) -> None:
        """Remember where the images of this round lie."""
        addresses = {image.data_ptr() for image in images}
        self.reused += not addresses.isdisjoint(self._addresses)
        self._addresses |= addresses

    def judge(self, seen: torch.Tensor, expected: torch.Tensor) -> None:
        """Queue the comparison on the current stream; at most AHEAD rounds are then under way."""
        self.wrong[self.rounds] = (seen != expected).any()
        self.rounds += 1
        self._pending.append(torch.cuda.current_stream().record_event())
        if len(self._pending) > AHEAD:
            self._pending.popleft().synchronize()

    def check(self, backend: str, order: str) -> Check:
        """What came of it."""
        torch.cuda.synchronize()
        return Check(backend, order, self.rounds, self.reused, int(self.wrong.sum()))


@contextlib.contextmanager
def _side_stream(role: str) -> Iterator[torch.cuda.Stream]:
    stream = lease_stream(torch.device("cuda", torch.cuda.current_device()), role)
    try:
        yield stream
    finally:
        stream.synchronize()
        return_stream(stream, role)


class _Course:
    """Batches of JPEGs through a prefetcher's own pipeline, which resamples them late.

    The sleep comes between decode and resampling: these read the decoded images behind it.
    """

    def __init__(self, backend: str, device: torch.device, files: list[list[EncodedImage]]) -> None:
        small = [SIZE[0] // 2, SIZE[1] // 2]
        prefetcher = DataPrefetcher(
            [], device=device, decoder=backend, transforms=[Resize(small)], cpu_share=0.0
        )
        self._backend = backend
        self._pipeline = prefetcher._pipeline
        self._batches = [self._pipeline.packer(images) for images in files]
        self._expected = []
        with _side_stream("lane") as stream:
            for batch in self._batches:
                torch.cuda.synchronize()
                self._expected.append(self._run(self._pipeline, batch, stream, Readers()))
                torch.cuda.synchronize()

    def _run(
        self,
        pipeline: Pipeline,
        batch: EncodedImages,
        lane: torch.cuda.Stream,
        readers: Readers | None,
    ) -> torch.Tensor:
        """As the threads of an epoch do it: the batch's stream is the current one."""
        if readers is not None:
            readers.drop(1)
        work = pipeline.start(batch, number=0, epoch=0)
        with torch.cuda.stream(lane):
            for part in work.parts:
                part()
        torch.cuda._sleep(SLEEP_CYCLES)
        result: torch.Tensor = work.finish()
        if readers is not None:
            readers.add(torch.cuda.current_stream().record_event(), work)
        return result

    def check(self, order: str, rounds: int) -> Check:
        """Run ``rounds`` batches in the library's order, or without its protection."""
        witness = _Witness(rounds)
        decode: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = self._pipeline.decoder
        assert decode is not None
        if order == "unsafe":
            decode = getattr(decode, "decode_undrained", decode)

        def decode_and_note(data: list[torch.Tensor]) -> list[torch.Tensor]:
            images = decode(data)
            witness.note_addresses(images)
            return images

        pipeline = replace(self._pipeline, decoder=decode_and_note)
        readers = Readers() if order == "library" else None
        with _side_stream("batch") as stream, _side_stream("lane") as lane_stream:
            with torch.cuda.stream(stream):
                for number in range(rounds):
                    batch = self._batches[number % SETS]
                    seen = self._run(pipeline, batch, lane_stream, readers)
                    witness.judge(seen, self._expected[number % SETS])
                    del seen
            if readers is not None:
                readers.drop(0)
        return witness.check(self._backend, order)


def _check_handoff(order: str, pictures: Sequence[torch.Tensor], rounds: int) -> Check:
    """Made on a side stream, read on the current one; unsafe is without ``record_stream``."""
    witness = _Witness(rounds)
    seen = torch.empty_like(pictures[0])
    with _side_stream("batch") as side:
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
    return witness.check("handoff", order)
