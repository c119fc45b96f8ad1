"""nvJPEG's batched decode on a GPU's JPEG engines, in one call into one piece of memory.

Without engines its CUDA kernels decode. A call then takes 56 to 61 ms for 64 to 256 of ImageNet's
photos (an H100), since the kernels follow each file bit by bit, but calls on several streams run
side by side: 4,150, 7,130, 9,980 and 12,600 photos a second on one to four streams.

It is the library that TorchCodec decodes with, called without TorchCodec between. That parses each
file three times and gives each picture memory of its own, which is copied into one piece and has to
be there twice: beside a compiled ResNet-18 on an H200 it took 92 us for a photo, and this takes 61,
with the same pixels (one process, calls of 128 photos, medians of three rounds; 77 and 48 on an
idle GPU). What it costs the training goes by the number of photos, not by their sizes. NVIDIA
documents the functions: https://docs.nvidia.com/cuda/nvjpeg.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.transforms.launch import CANARY

# Of its enumerations.
_GPU_HYBRID, _HARDWARE = 2, 3
_RGB, _RGBI, _ALLOCATOR_FAILURE = 3, 5, 5
_STATUS = {
    1: "not initialized",
    2: "invalid parameter",
    3: "bad JPEG",
    4: "JPEG not supported",
    5: "allocator failure",
    6: "execution failed",
    7: "no JPEG engines on this GPU",
    8: "internal error",
    9: "implementation not supported",
    10: "incomplete bitstream",
}
_PLANES = 4  # of nvjpegImage_t: their addresses, and the bytes of a row of each
_WORDS = 2 + 2 * _PLANES  # of 8 bytes, that are given of each file

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_ARGUMENTS = {
    "nvjpegCreateEx": [_INT, _POINTER, _POINTER, ctypes.c_uint, _POINTER],
    "nvjpegDestroy": [_POINTER],
    "nvjpegJpegStateCreate": [_POINTER, _POINTER],
    "nvjpegJpegStateDestroy": [_POINTER],
    "nvjpegGetImageInfo": [_POINTER, _POINTER, ctypes.c_size_t, *4 * [_POINTER]],
    "nvjpegDecodeBatchedInitialize": [_POINTER, _POINTER, _INT, _INT, _INT],
    "nvjpegDecodeBatched": [*6 * [_POINTER]],
}


@cache
def _library() -> Any:
    """The nvJPEG that TorchCodec brings; None where it does not."""
    importlib.import_module("torchcodec.decoders")
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        paths = [line.split(maxsplit=5)[-1] for line in lines if "/libnvjpeg" in line]
        library = ctypes.CDLL(paths[0])
        for name, arguments in _ARGUMENTS.items():
            getattr(library, name).argtypes = arguments
    except (OSError, IndexError, AttributeError):  # another platform, or a build for the CPU
        return None
    return library


def installed() -> bool:
    """Whether TorchCodec brings nvJPEG; imports TorchCodec."""
    return _library() is not None


class SkippedError(RuntimeError):
    """nvJPEG reported success and left pictures out.

    Attributes:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        super().__init__(f"nvJPEG skipped {count} pictures and reported success")
        self.count = count


class Decoder:
    """A decoder of nvJPEG's with its memory; for one thread at a time, on the current device.

    Args:
        backend: of nvJPEG's enumeration.

    Raises:
        torch.OutOfMemoryError: if there is no room for it.
        RuntimeError: if it cannot be made.
    """

    def __init__(self, backend: int) -> None:
        self._handle, self._state = ctypes.c_void_p(), ctypes.c_void_p()
        self.stream: int | None = None  # handle of the one that it is used on
        where = ctypes.byref(self._handle)
        _check("nvjpegCreateEx", _library().nvjpegCreateEx(backend, None, None, 0, where))
        try:
            self._call("nvjpegJpegStateCreate", ctypes.byref(self._state))
        except RuntimeError:
            _library().nvjpegDestroy(self._handle)
            raise

    def _call(self, name: str, *arguments: Any) -> None:
        _check(name, getattr(_library(), name)(self._handle, *arguments))

    def close(self) -> None:
        """Give its memory back; nothing that it was asked for may be under way."""
        _library().nvjpegJpegStateDestroy(self._state)
        _library().nvjpegDestroy(self._handle)

    def engines(self) -> tuple[int, int]:
        """JPEG engines of the GPU, and cores of each; zeros where the library does not tell."""
        engines, cores = ctypes.c_uint(), ctypes.c_uint()
        ask = getattr(_library(), "nvjpegGetHardwareDecoderInfo", None)  # not in all versions
        if ask is None or ask(self._handle, ctypes.byref(engines), ctypes.byref(cores)):
            return 0, 0
        return engines.value, cores.value

    def size(self, file: torch.Tensor) -> tuple[int, int]:
        """Height and width of the picture in a file, ``(bytes,)`` uint8 on the CPU."""
        found = np.zeros((4, _PLANES), dtype=np.int32)  # components, sampling, widths, heights
        places = [row.ctypes.data for row in found]
        self._call("nvjpegGetImageInfo", file.data_ptr(), file.numel(), *places)
        return int(found[3, 0]), int(found[2, 0])

    def decode(self, order: npt.NDArray[np.int64], stream: int, *, planes: bool = False) -> None:
        """Queue the decode of some baseline JPEGs; the files are read until it has completed.

        Args:
            order: ``(10 * N,)`` int64: the addresses of N files on the CPU, their lengths, and an
                nvjpegImage_t for each picture on the device, as :func:`place_order` gives them. It
                writes as much as the files say: these had better be right.
            stream: handle of the stream.
            planes: whether pictures are ``(3, H, W)``, and not ``(H, W, 3)``.

        Raises:
            torch.OutOfMemoryError: if there is no room for what it needs besides.
            RuntimeError: if any of the files cannot be decoded.
        """
        count, files = len(order) // _WORDS, order.ctypes.data
        lengths, images = files + 8 * count, files + 16 * count
        kind = _RGB if planes else _RGBI
        assert self.stream in (None, stream)  # see Note [A decoder has one stream]
        self.stream = stream
        self._call("nvjpegDecodeBatchedInitialize", self._state, count, 1, kind)
        self._call("nvjpegDecodeBatched", self._state, files, lengths, images, stream)


def order_for(layout: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What nvJPEG is given to decode files that lie one behind the other, and so do the pictures.

    Args:
        layout: ``(3, N)`` int64, of each file its length, and the height and width of the picture
            in it.

    Returns:
        ``(10 * N,)`` int64, for :func:`place_order`: where each file begins, its length, and an
        nvjpegImage_t whose only plane is the interleaved picture ``(H, W, 3)``.
    """
    lengths, heights, widths = layout
    sizes = 3 * heights * widths
    images = np.zeros((len(lengths), 2, _PLANES), dtype=np.int64)
    images[:, 0, 0], images[:, 1, 0] = np.cumsum(sizes) - sizes, 3 * widths
    return np.concatenate([np.cumsum(lengths) - lengths, lengths, images.reshape(-1)])


def place_order(order: npt.NDArray[np.int64], files: int, out: int) -> npt.NDArray[np.int64]:
    """The same with addresses: of the first file, on the CPU, and of the first picture."""
    placed, count = order.copy(), len(order) // _WORDS
    placed[:count] += files
    placed[2 * count :: 2 * _PLANES] += out
    return placed


def _check(name: str, status: int) -> None:
    if not status:
        return
    words = f"{name}: {_STATUS.get(status, f'status {status}')}"
    if status == _ALLOCATOR_FAILURE:
        raise torch.OutOfMemoryError(f"CUDA out of memory. {words}")
    raise RuntimeError(words)


# A decoder takes 50 MiB, the first one 80 more for nvJPEG's kernels, and a while to make: idle ones
# are kept, as TorchCodec keeps its own.
_idle: defaultdict[torch.device, list[Decoder]] = defaultdict(list)
_choosing = threading.Lock()

# Note [A decoder has one stream]
# nvJPEG's decoder has memory of its own for what it was asked last, and a call returns before that
# is through. Two threads, each with a stream, that took the same two decoders as they came, came to
# a call that never returned: one thread of the host at full load, nothing left for the GPU to do,
# and the decoder just come from the other stream, where its last call was under way. So a decoder
# stays on the stream that it was first used on. Epochs of 20 calls of 32 photos on an H200, the two
# ways at once on one machine: three processes of three were stuck within five epochs where decoders
# changed streams, and none of three within 84 where they did not.


@cache
def backend_of(device: torch.device) -> int | None:
    """What nvJPEG decodes with on a CUDA device: its engines where it has some. Tried once."""
    if _library() is None:
        return None
    with torch.cuda.device(device):
        for backend in (_HARDWARE, _GPU_HYBRID):
            try:
                _idle[device].append(Decoder(backend))
            except torch.OutOfMemoryError:
                raise  # and is tried again
            except RuntimeError:
                continue
            return backend
    return None


def available(device: torch.device) -> bool:
    """Whether nvJPEG can be called directly on a CUDA device."""
    return backend_of(device) is not None


def has_engines(device: torch.device) -> bool:
    """Whether a CUDA device has JPEG engines that nvJPEG can use."""
    return backend_of(device) == _HARDWARE


def _take_idle(device: torch.device) -> Decoder | None:
    """A decoder of the current stream, or one that was not used yet, if there is any."""
    stream = torch.cuda.current_stream(device).cuda_stream
    with _choosing:
        decoder = next((d for d in _idle[device] if d.stream in (stream, None)), None)
        if decoder is not None:
            _idle[device].remove(decoder)
    return decoder


@contextlib.contextmanager
def lease(device: torch.device) -> Iterator[Decoder]:
    """A decoder of a device, which is current meanwhile; one that has failed is not used again."""
    with torch.cuda.device(device):
        decoder = _take_idle(device)
        if decoder is None:
            backend = backend_of(device)
            assert backend is not None  # callers ask whether it is available
            decoder = Decoder(backend)
        try:
            yield decoder
        except BaseException:
            torch.cuda.current_stream(device).synchronize()
            decoder.close()
            raise
        _idle[device].append(decoder)


def decode(files: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Decode files in one call, each into memory of its own, and wait for the current stream.

    Args:
        files: N 1-D uint8 tensors on the CPU.
        device: a CUDA device, see :func:`available`.

    Returns:
        N ``(3, H, W)`` uint8 tensors on the device, EXIF orientation not applied.

    Raises:
        torch.OutOfMemoryError: if there is no room.
        SkippedError: if pictures were left out. See Note [Canaries].
        RuntimeError: if any of the files cannot be decoded.
    """
    stream = torch.cuda.current_stream(device)
    color = torch.tensor([*CANARY.to_bytes(3, "little")], dtype=torch.uint8)
    canary = color.to(device, non_blocking=True)
    with lease(device) as decoder:
        sizes = [decoder.size(file) for file in files]
        images = [canary[:, None, None].repeat(1, *size) for size in sizes]
        stream.synchronize()  # the engines do not wait for it. See Note [Decoded memory]
        planes = np.zeros((len(files), 2, _PLANES), dtype=np.int64)
        planes[:, 0, :3] = [[plane.data_ptr() for plane in image] for image in images]
        planes[:, 1, :3] = [[width] for _, width in sizes]
        given = [f.data_ptr() for f in files], [len(f) for f in files], planes.reshape(-1)
        decoder.decode(np.concatenate(given), stream.cuda_stream, planes=True)
        corners = torch.stack([image[:, i, i] for image in images for i in (0, -1)])
        survived = (corners == canary).all(1).view(-1, 2).any(1).to("cpu", non_blocking=True)
        stream.synchronize()  # as the files may be gone then
        decoder.stream = None
    if skipped := int(survived.sum()):
        raise SkippedError(skipped)
    return images
