"""The GPU's decoders: baseline JPEGs in host memory to pictures in device memory."""

from __future__ import annotations

import contextlib
import io
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch

from gpuprefetch.core.streams import drain
from gpuprefetch.images import nvjpeg
from gpuprefetch.images.prepared import Call

# Note [Decoded memory]
# A decoded image lies in memory that earlier images lay in: in the scratch of its stream, or in a
# block that the allocator gives to the next decode on that stream. Both keep the stream's order. A
# decoder that does not overwrites memory that a queued kernel still reads.
#   - torchvision's CUDA decoder writes from another stream (pytorch/vision#9606).
#   - nvJPEG's engines write while kernels that were queued before on the same stream still wait
#     (meta-pytorch/torchcodec#1634: 100 calls of 100). An event that the stream waits for does not
#     help; a wait of the host does. What is queued after the call does come after it.
#   - nvJPEG has not finished when the call returns: it still reads the last files, which lie in the
#     batch's buffer. The buffer is kept until the batch is on the device (Lookahead._uploads).
# So the prefetch thread waits on the host before each decode until its stream has completed what
# was queued there, with the launches that read earlier images (ImageDecoder.wait_for_readers).
# gpuprefetch.selfcheck() tries both on the machine at hand, and tests/test_selfcheck.py fails
# without the wait.


# Note [Canaries]
# On RTX 50xx nvJPEG's engines have been seen to skip a picture and report success
# (MrNeRF/LichtFeld-Studio#1924). In scratch memory that picture would be an earlier photo
# under this label. So the first and the last pixel that the launch will read of each picture are
# set to a color beforehand, and the launch flags the pictures that still have it at either. Those
# are decoded once more, one by one, and in the end on the CPU. A photo that has this color there is
# merely decoded twice.
#   - The engines do not keep the stream's order, so the host waits for the canaries before it
#     calls them. They are set after the last reader on the stream: the wait is for both.
#   - The flags lie in pinned memory, and a launch writes none where all is well. The prefetch
#     thread waits for all launches of a batch before the batch counts as done (ImageJob.check).
#   - Pictures that no launch of the plan reads lie in memory that was this color all over.
#   - A decoder that copies pictures to their place, as torchvision's, writes over the canaries
#     whatever it has got: a picture that it skipped is not noticed.


# Note [One call for a batch]
# The thread that trains shares the GIL and the CUDA driver's lock with the prefetch thread. Three
# Python objects an image (the file, its view, the picture) would need the GIL thousands of times a
# step. So the worker makes all that nvJPEG is given (Call.order), except for the addresses. One
# ctypes call, which drops the GIL, decodes all files of a Call into one piece of memory, and one
# launch reads them there.


# The arguments of ImageDecoder.decode().
Order: TypeAlias = tuple[Call, torch.Tensor, torch.Tensor]


class ImageDecoder(ABC):
    """Decodes the files of a :class:`.prepared.Call` on the current stream of a CUDA device.

    A decoder of another library needs :meth:`decode`, and a row in :data:`DECODERS`.

    Attributes:
        name: what decodes, in words.
        copies: how often the pictures of a call are in memory when it ends.
        streams: calls that are best decoded side by side, each on its own stream.
        canaries: whether pictures that were skipped are looked for: see Note [Canaries].
        overlaps: whether the calls of a batch may take turns on two streams.
        joins: whether one call for the files of several batches is faster than one for each.
    """

    name = "nvJPEG"
    copies = 1
    streams = 1
    canaries = True
    overlaps = False
    joins = False

    def __init__(self, device: torch.device) -> None:
        # Always the same spelling of the device: torchvision leaks its decoder when that changes.
        self.device = device

    @property
    def words(self) -> str:
        """What decodes, for :func:`gpuprefetch.explain`."""
        return self.name

    def warm_up(self) -> None:
        """Make what the first call needs whatever its files are. By default that is nothing."""
        return

    def missing(self) -> str:
        """Why nothing can be decoded here; empty if a small picture can, which is tried."""
        if torch.version.hip:
            return "torch is built for ROCm, and nvJPEG is NVIDIA's"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that torchvision's decoder is deprecated
                call, buffer = _trial()
                out = torch.empty(call.size, dtype=torch.uint8, device=self.device)
                self.wait_for_readers()  # kernels of the user's may read what lay there
                self.decode(call, buffer, out)
            torch.cuda.current_stream(self.device).synchronize()  # then the file may be let go
        except torch.OutOfMemoryError:
            return ""
        except Exception as error:
            return f"{self.name} fails: {first_line(error)}"
        return ""

    def wait_for_readers(self) -> None:
        """Wait until nothing on this stream reads what is decoded into: Note [Decoded memory]."""
        if self.device.type == "cuda":
            drain(self.device)

    @abstractmethod
    def decode(self, call: Call, buffer: torch.Tensor, out: torch.Tensor) -> None:
        """Decode files to pictures that lie one after the other. EXIF orientations are not applied.

        Args:
            call: the files and the shapes of their pictures.
            buffer: ``(bytes,)`` uint8 on the CPU, which has the files. It is read until the stream
                has completed the decode.
            out: ``(call.size,)`` uint8 on the device. No queued work reads it.

        Raises:
            RuntimeError: if the decoder refuses one of the files.
            torch.OutOfMemoryError: if there is too little memory.
        """

    def decode_together(self, orders: Sequence[Order]) -> None:
        """Decode the files of several calls, as :meth:`decode` does with each."""
        for order in orders:
            self.decode(*order)


class NvjpegDecoder(ImageDecoder):
    """The nvJPEG that TorchCodec brings, called directly: see Note [One call for a batch]."""

    overlaps = True
    # Engines fill and run empty in each call, and a call of CUDA kernels needs as long as its
    # largest file.
    joins = True

    def warm_up(self) -> None:
        nvjpeg.backend_of(self.device)

    def missing(self) -> str:
        # Nothing is tried, which would need memory of the GPU: the loader may have no photos.
        if torch.version.hip:
            return "torch is built for ROCm, and nvJPEG is NVIDIA's"
        try:
            found = nvjpeg.library() is not None
        except Exception as error:  # of a broken TorchCodec
            return f"TorchCodec, which brings nvJPEG, fails: {first_line(error)}"
        return "" if found else "the installed TorchCodec brings no nvJPEG, as a build for the CPU"

    @property
    def words(self) -> str:
        if not nvjpeg.has_engines(self.device):
            return (
                "nvJPEG in CUDA kernels, as no JPEG engine can be used: the GPU has none, or the "
                'container lacks the driver\'s capability "video"'
            )
        with nvjpeg.lease(self.device) as decoder:
            engines = decoder.engines()
        return f"nvJPEG's {engines} JPEG engines" if engines else "nvJPEG's JPEG engines"

    @property
    def canaries(self) -> bool:  # type: ignore[override]
        return nvjpeg.has_engines(self.device)  # only they have been seen to skip pictures

    @property
    def streams(self) -> int:  # type: ignore[override]
        return 1 if nvjpeg.has_engines(self.device) else 3

    def decode(self, call: Call, buffer: torch.Tensor, out: torch.Tensor) -> None:
        self.decode_together([(call, buffer, out)])

    def decode_together(self, orders: Sequence[Order]) -> None:
        order = nvjpeg.joined(
            [
                nvjpeg.with_addresses(call.order, buffer.data_ptr(), out.data_ptr())
                for call, buffer, out in orders
            ]
        )
        with nvjpeg.lease(self.device) as decoder:
            decoder.decode(order, torch.cuda.current_stream(self.device).cuda_stream)


class TorchvisionDecoder(ImageDecoder):
    """``torchvision.io.decode_jpeg`` on CUDA, whose pictures are copied to where they are read."""

    name = "torchvision's nvJPEG"
    copies = 2
    canaries = False  # a skipped picture is not noticed: what was never written is copied as well

    def decode(self, call: Call, buffer: torch.Tensor, out: torch.Tensor) -> None:
        from torchvision.io import ImageReadMode, decode_jpeg

        decoded = decode_jpeg(call.files(buffer), mode=ImageReadMode.RGB, device=self.device)
        for picture, target in zip(decoded, call.pictures(out), strict=True):
            if picture.shape != target.shape:
                raise RuntimeError(
                    f"decoded to {tuple(picture.shape)}, its header says {tuple(target.shape)}"
                )
            target.copy_(picture)


# The decoders by their names in DataPrefetcher(decoder=...); "auto" is the first one.
DECODERS: dict[str, type[ImageDecoder]] = {
    "nvjpeg": NvjpegDecoder,
    "torchvision": TorchvisionDecoder,
}


def decoded_by(decoder: ImageDecoder | None, device: torch.device) -> str:
    """What decodes the photos of a prefetcher with this decoder on a device, in words."""
    if decoder is not None:
        return decoder.words
    reason = "no CUDA device is used"
    if device.type == "cuda":
        reason = NvjpegDecoder(device).missing() or 'decoder="cpu"'
    return f"the CPU, in the workers: {reason}"


def _trial() -> tuple[Call, torch.Tensor]:
    """A call of one small file, and its buffer."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (64, 64), "orange").save(file, "JPEG")
    buffer = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    return Call(np.array([0]), np.array([(0, len(buffer))]), np.array([(64, 64)])), buffer


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


class RefusedError(Exception):
    """A decoder refuses one of its files; the message is the first line of its reason."""


@contextlib.contextmanager
def refusals(size: int, device: torch.device) -> Iterator[None]:
    """Make a :class:`RefusedError` of a decoder's error, unless ``size`` bytes cannot be allocated.

    A decoder's error does not tell a lack of memory from a bad file: the allocator's own type is
    lost.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        claim(size, device)
        raise RefusedError(first_line(error)) from error


def claim(size: int, device: torch.device) -> None:
    """Raise torch.OutOfMemoryError if ``size`` bytes cannot be allocated."""
    if device.type == "cuda":
        torch.empty(size, dtype=torch.uint8, device=device)
