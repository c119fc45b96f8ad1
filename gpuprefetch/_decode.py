"""Encoded bytes to decoded images on the GPU: the backends, and what happens when a file is bad."""

from __future__ import annotations

import contextlib
import importlib
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from math import prod

import torch

from gpuprefetch import _nvjpeg
from gpuprefetch._budget import SUB_BATCH_BYTES, UPLOAD_BYTES, in_rooms
from gpuprefetch._encoded import Call, EncodedImages
from gpuprefetch._format import decode_cpu

# Note [Decoded memory]
# A decoded image lives in a block of the caching allocator's pool of the stream it was decoded on.
# The allocator gives a freed block to the next decode on that stream at once, in stream order. A
# decoder that writes from a stream of its own breaks that order: it overwrites memory that a queued
# kernel still reads.
#   - torchvision's CUDA decoder does so (pytorch/vision#9606).
#   - TorchCodec >= 0.17 decodes in the order of the current stream (0.16 did not,
#     meta-pytorch/torchcodec#1634), and so does nvJPEG itself. Called directly it is not through
#     when it returns: it reads the last files of a call yet, which lie in the batch's buffer, and
#     that is kept until the batch is on the device (Engine._sources).
# Whatever they promise, a decode thread decodes nothing until the launch that reads its images, or
# their packed copy, has completed (ImageJob._wait_for_reader); the other thread does meanwhile.
# gpuprefetch.selfcheck() tries it on the machine at hand; tests/test_selfcheck.py fails without it.


# Note [The training thread's locks]
# The training thread takes and gives up two locks hundreds of times a step, Python's and the CUDA
# driver's, and sleeps whenever another thread has one of them. Measured on an H200 with 16 cores,
# ResNet-18 compiled, batches of 256, 40 % of the images decoded by the workers: the host took 18 ms
# for a step whose kernels take 14. Most of that is Python's: the training thread slept for it 17
# times a step, 0.13 ms each. A thread that runs next to nothing in Python still takes the lock
# each time it comes back from a call that gives it up, as most of torch's do. So
#   - decoding makes no Python object per image. Torch gives up Python's lock, and takes it again,
#     for each tensor that Python drops: three an image, the file, its view and the picture. What
#     is to be resampled is decoded by one call of nvJPEG's, or in TorchScript, without the lock,
#     and comes back as one tensor. All that can be known of a call before is worked out by the
#     worker (Call, Plan): what nvJPEG is given of the files lacks nothing but the addresses.
#   - what a decode thread does in Python it does once in a step, behind megabytes of files, so all
#     of it comes from memory, and costs twice what it costs in a loop of its own: of 0.74 ms by
#     that measure 0.55 were left when permits and events cost no Python any more, and a finished
#     batch asked for no stream (one core, beside faked CUDA, the caches emptied before each part).
#   - it takes the lock three times a call, not nine: to get it, behind the decode and behind the
#     launch. The driver itself records events, asks for them, queues waits and copies
#     pinned memory, called with the lock held (_stream.py). What the workers decoded of a batch is
#     one copy, what they left one call, if it is not too large, and both are one launch: so next()
#     takes the training thread 1.5 ms of such a step, and 1.8 with a launch for each.
#   - one thread decodes. Each image takes a copy, a launch and an event in nvJPEG, and a second
#     thread that contends for the driver slows the training thread by more than it adds: with a
#     call for each batch the step took 16.7 ms with one thread and 18.9 with two, 14.3 without a
#     loader (half of the images decoded by the workers, another machine, medians of three rounds).
#   - a second thread is there for a loop that does little but wait: see Note [Memory for speed].
#     It launches its images while the other is in nvJPEG, and is let in beside it while the loop
#     waits, for the GPU or for its batch, and launches nothing.
#   - a tensor that goes into TorchScript has a second owner there: of one that only Python owns
#     torch takes the lock to let it go (Buffer).
#   - a batch that the loop has done with goes back to the allocator when the GPU has as well, so
#     that the allocator waits for nothing while the training allocates: see Note [Handed over].
#   - a launch on the default stream has the driver's lock to itself, one on any other stream shares
#     it. Stacks of a step of 17 ms, half of the images decoded by the workers: on the default
#     stream the host waited 1.2 ms for it, and the decode thread 1.8; on a stream of the training's
#     own 0.1 ms each. That is the user's to choose: docs/tuning.md.
#   - what a launch reads of a batch lies in the worker's buffer (EncodedImages.numbers), and Triton
#     is asked for each kernel once: the process that trains makes next to nothing of either.
#   - a loop that need not wait for the GPU gets the next batch under way itself, so that it and the
#     thread that fetches do not take the lock from each other in turns. It also fetches the batch
#     behind that, if it is there (Source.ready): 15.3 to 15.6 ms a step where 40 % of the images
#     were decoded by the workers, and 16.9 without; where 15 % were, no difference was seen. Else
#     that thread does, later in the step, if the loop is not back before (_engine.PAUSE). Where the
#     loop might wait in that, or run what is not ours, it waits for that thread (Engine.let_fetch).

_thread = threading.local()  # the memory that a decode thread packs into, call after call


@contextlib.contextmanager
def packing_into() -> Iterator[None]:
    """Have :func:`place` give one place in this thread."""
    _thread.room = []
    try:
        yield
    finally:
        del _thread.room


def free_scratch() -> None:
    """Give back the place of this thread, until one is asked for again."""
    if hasattr(_thread, "room"):
        _thread.room.clear()


def place(size: int, device: torch.device) -> torch.Tensor:
    """1-D uint8 of ``size`` bytes or more on the device, not initialized, to decode into.

    Where the thread keeps a place (:func:`packing_into`) it is that, and good until the next call.
    """
    room: list[torch.Tensor] | None = getattr(_thread, "room", None)
    if room is None or size > in_rooms(SUB_BATCH_BYTES + UPLOAD_BYTES):  # for one image
        return torch.empty([size], dtype=torch.uint8, device=device)
    if not room or room[0].numel() < size:
        outgrown = bool(room)
        room.clear()
        if outgrown:  # there will be none any more that its block fits
            torch.cuda.empty_cache()
        block = torch.empty(in_rooms(size), dtype=torch.uint8, device=device)
        room += block, block[:0]  # see Buffer for the second
    return room[0]  # whole: the thread then makes no Python object of it, which costs the lock


RGB = 3  # ImageReadMode.RGB, in TorchCodec and torchvision alike

_PACKED = """
def packed(
    data: Tensor, start: int, lengths: List[int], heights: List[int], widths: List[int],
    device: Device, place: Tensor, at: int
) -> bool:
    files = data[start : start + sum(lengths)].split_with_sizes(lengths)
    images = {decode}(files, {mode}, device)
    for i in range(len(lengths)):
        image = images[i]
        if image.size(1) != heights[i] or image.size(2) != widths[i]:
            return False
        size = image.numel()
        pixels = place[at : at + size].view([heights[i], widths[i], 3])
        pixels.copy_(image.permute(1, 2, 0))
        at += size
    return True
"""


@cache
def _packed(module: str, operator: str) -> Callable[..., bool] | None:
    importlib.import_module(module)  # registers the operator
    try:
        source = _PACKED.format(decode=f"torch.ops.{operator}", mode=RGB)
        compiled: Callable[..., bool] = torch.jit.CompilationUnit(source).packed
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"gpuprefetch decodes through Python, which slows the training thread: {reason}. "
            f"Another version of {module.partition('.')[0]} may have the operator.",
            stacklevel=2,
        )
        return None
    return compiled


class ImageDecoder:
    """Decodes a batch of baseline JPEGs on the current stream of a CUDA device.

    Args:
        device: a CUDA device.
    """

    # Of torch's registry, and what registers it.
    module, operator = "", ""

    def __init__(self, device: torch.device) -> None:
        # One spelling of the device for ever: torchvision leaks its decoder when it changes.
        self._device = device

    @property
    def packs(self) -> bool:
        """Whether there is a way to :meth:`packed`; warns once where there is none."""
        return _packed(self.module, self.operator) is not None

    @property
    def copies(self) -> bool:
        """Whether images are there twice while they are :meth:`packed`."""
        return True

    def packed(
        self, data: torch.Tensor, call: Call, out: torch.Tensor, *, first: int = 0, at: int = 0
    ) -> bool:
        """Decode without a Python object per image. See Note [The training thread's locks].

        Args:
            data: flat uint8 on the CPU.
            call: the files in it.
            out: flat uint8 on the device, for the images, one behind the other, each ``(H, W, 3)``
                as workers write theirs. Nothing that is queued reads what lies there: see Note
                [Decoded memory].
            first: where in ``data`` the buffer begins that the call is of.
            at: where in ``out`` the images begin.

        Returns:
            False if an image has another size.

        Raises:
            RuntimeError: if any of the files cannot be decoded.
        """
        decode = _packed(self.module, self.operator)
        assert decode is not None, "see packs"
        # No tensor: to let go of one that Python has, too, takes the lock.
        return decode(data, first + call.start, *call.layout.tolist(), self._device, out, at)

    def __call__(self, data: list[torch.Tensor]) -> list[torch.Tensor]:
        """Decode.

        Args:
            data: N 1-D uint8 tensors on the CPU.

        Returns:
            N ``(3, H, W)`` uint8 tensors on the device, EXIF orientation not applied.

        Raises:
            RuntimeError: if any of the files cannot be decoded.
        """
        raise NotImplementedError


class TorchCodecDecoder(ImageDecoder):
    """TorchCodec's batched nvJPEG decode; EXIF orientations were hidden from it beforehand."""

    module, operator = "torchcodec.decoders", "torchcodec_ns.decode_jpegs_cuda"

    def __call__(self, data: list[torch.Tensor]) -> list[torch.Tensor]:
        from torchcodec.decoders import decode_jpeg

        return list(decode_jpeg(data, mode="RGB", device=self._device))


class NvjpegDecoder(TorchCodecDecoder):
    """nvJPEG's JPEG engines without TorchCodec between; TorchCodec where a GPU has none of them."""

    @property
    def packs(self) -> bool:
        return _nvjpeg.available(self._device) or super().packs

    @property
    def copies(self) -> bool:
        return not _nvjpeg.available(self._device)

    def packed(
        self, data: torch.Tensor, call: Call, out: torch.Tensor, *, first: int = 0, at: int = 0
    ) -> bool:
        if not _nvjpeg.available(self._device):
            return super().packed(data, call, out, first=first, at=at)
        files, pictures = data.data_ptr() + first + call.start, out.data_ptr() + at
        order = _nvjpeg.place_order(call.order, files, pictures)
        with _nvjpeg.lease(self._device) as decoder:
            decoder.decode(order, torch.cuda.current_stream(self._device).cuda_stream)
        return True

    def __call__(self, data: list[torch.Tensor]) -> list[torch.Tensor]:
        if not _nvjpeg.available(self._device):
            return super().__call__(data)
        return _nvjpeg.decode(data, self._device)


class TorchvisionDecoder(ImageDecoder):
    """torchvision's batched nvJPEG decode on a drained stream. See Note [Decoded memory]."""

    module, operator = "torchvision.io", "image.decode_jpegs_cuda"

    def __call__(self, data: list[torch.Tensor]) -> list[torch.Tensor]:
        from torchvision.io import ImageReadMode, decode_jpeg

        torch.cuda.current_stream(self._device).synchronize()
        return list(decode_jpeg(data, mode=ImageReadMode.RGB, device=self._device))


BACKENDS: dict[str, Callable[[torch.device], ImageDecoder]] = {
    "nvjpeg": NvjpegDecoder,
    "torchcodec": TorchCodecDecoder,
    "torchvision": TorchvisionDecoder,
}


# What TorchCodec and torchvision say where nvJPEG cannot begin, whatever the file: as when 16
# processes share a GPU, with most of its memory free.
_NOT_STARTED = re.compile(r"Failed to (?:create|initialize) .*")


def claim(size: int, device: torch.device, error: RuntimeError | None = None) -> None:
    """Raise torch's own error where there is no room for ``size`` bytes, or for the decoder.

    TorchCodec passes on the allocator's ``error`` without its type, and with torch 2.11 without its
    words: it could be a bad file as well.
    """
    if (found := _NOT_STARTED.search(str(error))) is not None:
        raise torch.OutOfMemoryError(
            f"nvJPEG on {device}: {found[0]}. Fewer processes on the GPU leave more for each."
        ) from error
    if device.type == "cuda":
        torch.empty(size, dtype=torch.uint8, device=device)


@contextlib.contextmanager
def _may_refuse(size: int, device: torch.device) -> Iterator[None]:
    """Where a decoder may refuse its files, but may not lack the memory of so many bytes."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        claim(size, device, error)


def decode_packed(
    decoder: ImageDecoder, images: EncodedImages, call: Call, out: torch.Tensor, at: int
) -> bool:
    """Decode some images of a batch into one tensor; False if they have to be decoded one by one.

    Arguments are those of :func:`decode_part` and :meth:`ImageDecoder.packed`.
    """
    with _may_refuse(call.size, out.device):
        return decoder.packed(images.buffer.memory, call, out, first=images.buffer.start, at=at)
    return False


def decode_part(
    decoder: ImageDecoder,
    images: EncodedImages,
    call: Call,
    device: torch.device,
    *,
    together: bool = True,
) -> list[torch.Tensor | None]:
    """Decode some images of a batch; what one bad file would fail is decoded one by one.

    Args:
        decoder: the backend.
        images: the batch; a file that cannot be decoded gets an entry in its ``errors``.
        call: which of them.
        device: of the decoder.
        together: whether to try them in one call first.

    Returns:
        ``(3, H, W)`` uint8 images on ``device``, None for those that cannot be decoded.
    """
    lengths, *sizes = call.layout.tolist()
    shapes = [(3, height, width) for height, width in zip(*sizes, strict=True)]
    if together:
        files = images.data[call.start : call.start + sum(lengths)]
        with _may_refuse(call.size, device):
            decoded = decoder(list(files.split(lengths)))
            if [image.shape for image in decoded] == shapes:
                return decoded  # type: ignore[return-value]
    return [
        _decode_one(decoder, images, i, shape, device)
        for i, shape in zip(call.positions.tolist(), shapes, strict=True)
    ]


def _decode_one(
    decoder: ImageDecoder,
    images: EncodedImages,
    position: int,
    shape: tuple[int, int, int],
    device: torch.device,
) -> torch.Tensor | None:
    file = images.span(position)
    with _may_refuse(prod(shape), device):
        (image,) = decoder([file])
        if image.shape == shape:
            return image
    try:
        # The second opinion: a file that only the GPU's decoder dislikes is not a bad file.
        image = decode_cpu(file)
    except (ValueError, RuntimeError) as error:
        images.errors[position] = str(error)
        return None
    if image.shape != shape:
        images.errors[position] = f"decoded to {tuple(image.shape)}, its header says {shape}"
        return None
    return image.contiguous().to(device)
