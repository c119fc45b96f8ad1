"""Encoded bytes to decoded images on the GPU: the backends, and what happens when a file is bad."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from math import prod

import numpy as np
import torch

from gpuprefetch.core.stats import Stats
from gpuprefetch.images import nvjpeg
from gpuprefetch.images.bad import name_of
from gpuprefetch.images.encoded import Call, PreparedImages
from gpuprefetch.images.header import decode_cpu, read_header
from gpuprefetch.images.host_memory import memory_for
from gpuprefetch.images.plan import UPLOAD_BYTES, WHOLE_BATCH_BYTES, in_rooms, readable
from gpuprefetch.transforms.launch import CANARY

# Note [Decoded memory]
# A decoded image lies in memory that earlier images lay in: in the scratch of its stream, or in a
# block that the allocator gives to the next decode on that stream. Both keep the stream's order. A
# decoder that does not overwrites memory that a queued kernel still reads.
#   - torchvision's CUDA decoder writes from a stream of its own (pytorch/vision#9606).
#   - nvJPEG's engines write while kernels that were queued before on the same stream still wait
#     (meta-pytorch/torchcodec#1634: 100 calls of 100). An event that the stream waits for does not
#     help; a wait of the host does. TorchCodec 0.17 waits by itself, 0.16 did not. What is queued
#     after the call does come after it.
#   - nvJPEG is not through when the call returns: it still reads the last files, which lie in the
#     batch's buffer. That is kept until the batch is on the device (Lookahead._uploads).
# The host protects us: the prefetch thread decodes nothing until all that is queued on its stream
# has completed, the launches that read earlier images among it (ImageJob._drain).
# gpuprefetch.selfcheck() tries both on the machine at hand, and tests/test_selfcheck.py fails
# without the wait.


# Note [Canaries]
# On RTX 50xx nvJPEG's engines have been seen to skip a picture and report success
# (MrNeRF/LichtFeld-Studio#616, #1924). In scratch memory that picture would be an earlier photo
# under this label. So the first and the last pixel that the launch will read of each picture are
# set to a color beforehand, and the launch flags the pictures that still have it at either. Those
# are decoded once more, one by one, and in the end on the CPU. A photo that has this color there is
# merely decoded twice.
#   - The engines do not keep the stream's order, so the host waits for the canaries before it
#     calls them. They are set after the last reader on the stream: the wait is for both.
#   - The flags lie in pinned memory, and a launch writes none where all is well. The thread
#     waits for all launches of a batch before it counts as done (ImageJob.check).
#   - Pictures with memory of their own lie in what was that color all over.
#   - TorchCodec and torchvision allocate the pictures themselves, uninitialized. A picture skipped
#     there is not noticed.


# Note [One call for a batch]
# The thread that trains shares the GIL and the CUDA driver's lock with the prefetch thread. Three
# Python objects an image (the file, its view, the picture) would take the GIL thousands of times a
# step. So the worker works out all that nvJPEG is given of the files (Call), but for the
# addresses. One ctypes call, which drops the GIL, decodes the batch into one piece of memory, and
# one launch reads it there.


def place(size: int, device: torch.device, scratch: dict[int, torch.Tensor] | None) -> torch.Tensor:
    """1-D uint8 of ``size`` bytes or more on the device, kept in ``scratch`` for each stream."""
    if scratch is None or size > in_rooms(WHOLE_BATCH_BYTES + UPLOAD_BYTES):  # for one image
        return torch.empty([size], dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if stream not in scratch or scratch[stream].numel() < size:
        if scratch.pop(stream, None) is not None:  # nothing will fit its block any more
            torch.cuda.empty_cache()
        scratch[stream] = torch.empty(in_rooms(size), dtype=torch.uint8, device=device)
    return scratch[stream]


class ImageDecoder:
    """Decodes a batch of baseline JPEGs on the current stream of a CUDA device."""

    library = "nvJPEG"  # that decodes
    packs = False  # whether there is a way to packed()
    copies = 2  # how often the images of a call are in memory at its end
    canaries = True  # whether packed() images that were skipped are looked for
    streams = 1  # batches that are best decoded side by side

    def __init__(self, device: torch.device) -> None:
        # One spelling of the device for ever: torchvision leaks its decoder when it changes.
        self._device = device

    def missing(self) -> str:
        """Why it can decode nothing here, "" where it can: it tries."""
        from PIL import Image

        if torch.version.hip:
            return "torch is built for ROCm, and nvJPEG is NVIDIA's"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that torchvision's is deprecated
                file = io.BytesIO()
                Image.new("RGB", (64, 64), "orange").save(file, "JPEG")
                pictures = self([torch.frombuffer(file.getbuffer(), dtype=torch.uint8)])
            torch.cuda.current_stream(self._device).synchronize()  # then they may be let go
            del pictures
        except torch.OutOfMemoryError:
            return ""
        except Exception as error:
            return f"{self.library} fails: {_first_line(error)}"
        return ""

    @property
    def way(self) -> str:
        """What decodes, in words."""
        return self.library

    def packed(
        self, data: torch.Tensor, call: Call, out: torch.Tensor, *, first: int = 0, at: int = 0
    ) -> None:
        """Decode without a Python object per image, or raise. See Note [One call for a batch].

        The files are in ``data``, flat uint8 on the CPU, in the buffer from ``first`` on. The
        images, each ``(H, W, 3)``, get into ``out``, flat uint8 on the device, from ``at`` on.
        Nothing that is queued reads what lies there: see Note [Decoded memory].
        """
        raise NotImplementedError

    def __call__(self, data: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Decode files, 1-D uint8 on the CPU, to ``(3, H, W)`` uint8 on the device, or raise.

        The EXIF orientation is not applied. None stands for one that was skipped.
        """
        raise NotImplementedError


class TorchCodecDecoder(ImageDecoder):
    """TorchCodec's batched nvJPEG decode; EXIF orientations were hidden from it beforehand."""

    library = "TorchCodec's nvJPEG"

    def __call__(self, data: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        from torchcodec.decoders import decode_jpeg

        return list(decode_jpeg(data, mode="RGB", device=self._device))


class NvjpegDecoder(ImageDecoder):
    """The nvJPEG that TorchCodec brings, without TorchCodec between."""

    packs, copies = True, 1

    def missing(self) -> str:
        # Without a trial, which takes memory of the GPU: the loader may have no photos.
        with contextlib.suppress(Exception):  # of a broken TorchCodec: the trial says what
            if not torch.version.hip and nvjpeg.library() is not None:
                return ""
        failed = TorchCodecDecoder(self._device).missing()
        return failed or 'it cannot be called directly: decoder="torchcodec" can'

    @property
    def way(self) -> str:
        if not nvjpeg.has_engines(self._device):
            return (
                "nvJPEG in CUDA kernels, as no JPEG engine can be used: the GPU has none, or the "
                'container lacks the driver\'s capability "video"'
            )
        with nvjpeg.lease(self._device) as decoder:
            engines = decoder.engines()
        return f"nvJPEG's {engines} JPEG engines" if engines else "nvJPEG's JPEG engines"

    @property
    def canaries(self) -> bool:  # type: ignore[override]
        return nvjpeg.has_engines(self._device)  # only they have been seen to skip pictures

    @property
    def streams(self) -> int:  # type: ignore[override]
        return 1 if nvjpeg.has_engines(self._device) else 3

    def packed(
        self, data: torch.Tensor, call: Call, out: torch.Tensor, *, first: int = 0, at: int = 0
    ) -> None:
        files, pictures = data.data_ptr() + first + call.start, out.data_ptr() + at
        order = nvjpeg.place_order(call.order, files, pictures)
        with nvjpeg.lease(self._device) as decoder:
            decoder.decode(order, torch.cuda.current_stream(self._device).cuda_stream)

    def __call__(self, data: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        headers = [read_header(bytes(file.numpy())) for file in data]
        layout = np.array([(len(f), h.height, h.width) for f, h in zip(data, headers, strict=True)])
        canary = torch.tensor([*CANARY.to_bytes(3, "little")], dtype=torch.uint8)
        canary = canary.to(self._device)
        sizes = layout[:, 1:].prod(axis=1)
        flat = canary.repeat(int(sizes.sum()))  # see Note [Canaries]
        order = nvjpeg.place_order(nvjpeg.order_for(layout.T), 0, flat.data_ptr())
        order[: len(data)] = [file.data_ptr() for file in data]
        stream = torch.cuda.current_stream(self._device)
        stream.synchronize()  # the engines do not wait for it. See Note [Decoded memory]
        with nvjpeg.lease(self._device) as decoder:
            decoder.decode(order, stream.cuda_stream)
        parts = zip(flat.split((3 * sizes).tolist()), layout[:, 1:].tolist(), strict=True)
        images = [part.view(*size, 3).permute(2, 0, 1) for part, size in parts]
        corners = torch.stack([image[:, i, i] for image in images for i in (0, -1)])
        skipped = (corners == canary).all(1).view(-1, 2).any(1)
        # The host waits for that, and the files may be gone then.
        return [
            None if gone else image for image, gone in zip(images, skipped.tolist(), strict=True)
        ]


class TorchvisionDecoder(ImageDecoder):
    """torchvision's batched nvJPEG decode on a drained stream. See Note [Decoded memory]."""

    library = "torchvision's nvJPEG"

    def __call__(self, data: list[torch.Tensor]) -> list[torch.Tensor]:
        from torchvision.io import ImageReadMode, decode_jpeg

        torch.cuda.current_stream(self._device).synchronize()
        return list(decode_jpeg(data, mode=ImageReadMode.RGB, device=self._device))


BACKENDS: dict[str, Callable[[torch.device], ImageDecoder]] = {
    "nvjpeg": NvjpegDecoder,
    "torchcodec": TorchCodecDecoder,
    "torchvision": TorchvisionDecoder,
}


def decoded_by(decoder: ImageDecoder | None, device: torch.device) -> str:
    """What decodes the photos of a prefetcher with this decoder on a device, in words."""
    if decoder is not None:
        return decoder.way
    reason = "no CUDA device is used"
    if device.type == "cuda":
        reason = NvjpegDecoder(device).missing() or 'decoder="cpu"'
    return f"the CPU, in the workers: {reason}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def claim(size: int, device: torch.device) -> None:
    """Raise torch's own error where there is no room for ``size`` bytes."""
    if device.type == "cuda":
        torch.empty(size, dtype=torch.uint8, device=device)


@contextlib.contextmanager
def _may_refuse(size: int, device: torch.device) -> Iterator[list[str]]:
    """Where a decoder may refuse its files, but may not lack the memory of so many bytes.

    TorchCodec passes on the allocator's error without its type, and with torch 2.11 without its
    words: it could be a bad file as well. Gives a list that gets the reason.
    """
    reasons: list[str] = []
    try:
        yield reasons
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        claim(size, device)
        reasons.append(_first_line(error))


def decode_packed(
    decoder: ImageDecoder, images: PreparedImages, call: Call, out: torch.Tensor, at: int
) -> bool:
    """Decode images of a batch into one tensor; False if they have to be decoded one by one."""
    with _may_refuse(call.size, out.device):
        decoder.packed(images.buffer.memory, call, out, first=images.buffer.start, at=at)
        return True
    return False


def decode_part(
    decoder: ImageDecoder,
    images: PreparedImages,
    call: Call,
    device: torch.device,
    stats: Stats,
    *,
    together: bool = True,
) -> list[torch.Tensor | None]:
    """Decode some images of a batch, one by one if that fails; None for those with ``errors``."""
    lengths, *sizes = call.layout.tolist()
    shapes = [(3, height, width) for height, width in zip(*sizes, strict=True)]
    decoded: Sequence[torch.Tensor | None] = [None] * len(shapes)
    if together:
        files = images.data[call.start : call.start + sum(lengths)]
        with _may_refuse(call.size, device):
            decoded = decoder(list(files.split(lengths)))
            stats.add("missed_images", sum(image is None for image in decoded))

    def decode_one(position: int, shape: tuple[int, int, int]) -> torch.Tensor | None:
        file = images.span(position)
        with _may_refuse(prod(shape), device) as reasons:
            (image,) = decoder([file])
            if image is not None and image.shape == shape:
                return image
            reasons.append(
                "it was skipped"
                if image is None
                else f"decoded to {tuple(image.shape)}, its header says {shape}"
            )
        try:
            # The second opinion: a file that only the GPU's decoder dislikes is not a bad file.
            name = name_of(int(images.indices[position]), images.paths[position])
            with memory_for(f"a picture of {readable(prod(shape))} decoded: {name}"):
                image = decode_cpu(file)  # which is of the size that the header says
        except ValueError as error:
            images.errors[position] = str(error)
            return None
        stats.fell_back(reasons[0])
        return image.contiguous().to(device)

    return [
        image if image is not None and image.shape == shape else decode_one(i, shape)
        for image, i, shape in zip(decoded, call.positions.tolist(), shapes, strict=True)
    ]
