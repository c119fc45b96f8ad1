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
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from gpuprefetch._decode import BACKENDS, ImageDecoder
from gpuprefetch._pipeline import Lane
from gpuprefetch._stream import handoff, lease_stream, return_stream

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
        jpegs = _draw_jpegs()
        for name in BACKENDS:
            try:
                decoder = BACKENDS[name](chosen)
                expected = _decode_undisturbed(decoder, jpegs)
            except Exception as error:  # of an optional package: the other backend is checked
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                checks.append(Check(name, "library", error=reason))
                continue
            checks.append(_check_decoder(name, decoder, jpegs, expected, rounds))
            checks.append(_check_decoder_unsafe(name, decoder, jpegs, expected, few))
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


def _draw_jpegs() -> list[list[torch.Tensor]]:
    """SETS sets of IMAGES files that nowhere show the same, ``(bytes,)`` uint8 on the CPU."""
    from torchcodec.encoders import JpegEncoder

    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(SETS * IMAGES, 3, SIZE[0] // 32, SIZE[1] // 32, generator=generator)
    pictures = (F.interpolate(coarse, SIZE, mode="bilinear") * 255).to(torch.uint8)
    files = [JpegEncoder(picture).to_tensor(quality=90) for picture in pictures]
    return [files[i : i + IMAGES] for i in range(0, len(files), IMAGES)]


def _decode_undisturbed(
    decoder: ImageDecoder, jpegs: Sequence[list[torch.Tensor]]
) -> list[torch.Tensor]:
    """What each set decodes to while nothing else runs, ``(IMAGES, 3, H, W)`` each."""
    expected = []
    for files in jpegs:
        torch.cuda.synchronize()
        images = decoder(files)
        torch.cuda.synchronize()
        expected.append(torch.stack(images))
        torch.cuda.synchronize()
    return expected


class _Witness:
    """Reads the images of each round late, and remembers where they lay and what was wrong.

    It allocates nothing of an image's size: their blocks are left to the next round's images.
    """

    def __init__(self, expected: Sequence[torch.Tensor], rounds: int) -> None:
        self._expected = expected
        self._seen = torch.empty_like(expected[0])
        self._differs = torch.empty(self._seen.shape, dtype=torch.bool, device=self._seen.device)
        self._wrong = torch.zeros(rounds, dtype=torch.bool, device=self._seen.device)
        self._addresses: set[int] = set()
        self._pending: deque[torch.cuda.Event] = deque()
        self._reused = self._rounds = 0
        torch.cuda.synchronize()  # it was made on another stream than it is used on

    def read(self, images: Sequence[torch.Tensor]) -> None:
        """Queue a sleep and behind it the comparison, on the current stream."""
        torch.cuda._sleep(SLEEP_CYCLES)
        torch.stack(list(images), out=self._seen)
        torch.ne(self._seen, self._expected[self._rounds % SETS], out=self._differs)
        self._wrong[self._rounds] = self._differs.any()
        addresses = {image.data_ptr() for image in images}
        self._reused += not addresses.isdisjoint(self._addresses)
        self._addresses |= addresses
        self._rounds += 1

    def throttle(self) -> None:
        """Wait until the host is at most AHEAD rounds ahead of the current stream."""
        self._pending.append(torch.cuda.current_stream().record_event())
        if len(self._pending) > AHEAD:
            self._pending.popleft().synchronize()

    def check(self, backend: str, order: str) -> Check:
        """What it saw."""
        torch.cuda.synchronize()
        corrupted = int(self._wrong.sum())
        return Check(backend, order, self._rounds, self._reused, corrupted)


@contextlib.contextmanager
def _side_stream() -> Iterator[torch.cuda.Stream]:
    stream = lease_stream(torch.device("cuda", torch.cuda.current_device()))
    try:
        yield stream
    finally:
        stream.synchronize()
        return_stream(stream)


def _check_decoder(
    name: str,
    decoder: ImageDecoder,
    jpegs: Sequence[list[torch.Tensor]],
    expected: Sequence[torch.Tensor],
    rounds: int,
) -> Check:
    """As a decode thread does it: see ``_ImageJob._write``."""
    witness = _Witness(expected, rounds)
    with _side_stream() as stream, torch.cuda.stream(stream):
        lane = Lane(stream)
        for number in range(rounds):
            images = decoder(jpegs[number % SETS])
            witness.read(images)
            lane.keep(images)
            del images
        lane.release()
    return witness.check(name, "library")


def _check_decoder_unsafe(
    name: str,
    decoder: ImageDecoder,
    jpegs: Sequence[list[torch.Tensor]],
    expected: Sequence[torch.Tensor],
    rounds: int,
) -> Check:
    """Images are dropped while their reader is still queued, and no stream is drained."""
    decode: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    decode = getattr(decoder, "decode_undrained", decoder)
    witness = _Witness(expected, rounds)
    with _side_stream() as stream, torch.cuda.stream(stream):
        for number in range(rounds):
            images = decode(jpegs[number % SETS])
            witness.read(images)
            del images
            witness.throttle()
    return witness.check(name, "unsafe")


def _check_handoff(order: str, pictures: Sequence[torch.Tensor], rounds: int) -> Check:
    """Made on a side stream, read on the current one; unsafe is without ``record_stream``."""
    device, current = pictures[0].device, torch.cuda.current_stream()
    witness = _Witness(pictures, rounds)
    with _side_stream() as side:
        for number in range(rounds):
            with torch.cuda.stream(side):
                batch = [picture.clone() for picture in pictures[number % SETS]]
                ready = side.record_event()
            if order == "library":
                handoff(batch, ready, device)
            else:
                current.wait_event(ready)
            witness.read(batch)
            del batch
            witness.throttle()
        torch.cuda.synchronize()
    return witness.check("handoff", order)
