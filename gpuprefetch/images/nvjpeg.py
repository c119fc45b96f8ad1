"""nvJPEG's batched decode on a GPU's JPEG engines, in one call into one piece of memory.

Without engines its CUDA kernels decode. A call then needs 56 to 61 ms for 64 to 256 of ImageNet's
photos (an H100), but calls run side by side: 4,150, 7,130, 9,980 and 12,600 photos a second on one
to four streams. TorchCodec calls the same library, but parses each file three times: beside a
compiled ResNet-18 on an H200 a photo costs 92 us there, and 61 here.

NVIDIA documents the functions:
https://docs.nvidia.com/cuda/nvjpeg.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

# Backends, an output format and a status, of nvJPEG's enumerations.
_GPU_HYBRID = 2
_HARDWARE = 3
_RGBI = 5
_ALLOCATOR_FAILURE = 5
_STATUS = (
    "success, not initialized, invalid parameter, bad JPEG, JPEG not supported, allocator failure, "
    "execution failed, no JPEG engines on this GPU, internal error, implementation not supported, "
    "incomplete bitstream"
).split(", ")
# Without engines nvJPEG decodes a call of so many files with CUDA kernels, and one of fewer files
# with a single core: 36 of ImageNet's photos needed 142 ms, and 56 of them 63 (an H200).
LEAST_FOR_KERNELS = 51
_PLANES = 4  # of an nvjpegImage_t, which has their addresses and the bytes of a row of each
_WORDS = 2 + 2 * _PLANES  # of 8 bytes that nvJPEG is given for each file

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int
_ARGUMENTS = {
    "nvjpegCreateEx": [_INT, _POINTER, _POINTER, ctypes.c_uint, _POINTER],
    "nvjpegDestroy": [_POINTER],
    "nvjpegJpegStateCreate": [_POINTER, _POINTER],
    "nvjpegJpegStateDestroy": [_POINTER],
    "nvjpegDecodeBatchedInitialize": [_POINTER, _POINTER, _INT, _INT, _INT],
    "nvjpegDecodeBatched": [*6 * [_POINTER]],
}


@cache
def library() -> ctypes.CDLL | None:
    """The nvJPEG that TorchCodec brings; None where it does not. Imports TorchCodec."""
    importlib.import_module("torchcodec.decoders")
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        paths = [line.split(maxsplit=5)[-1] for line in lines if "/libnvjpeg" in line]
        found = ctypes.CDLL(paths[0])
        for name, arguments in _ARGUMENTS.items():
            getattr(found, name).argtypes = arguments
    except (OSError, IndexError, AttributeError):  # another platform, or a build for the CPU
        return None
    return found


def _function(name: str) -> Callable[..., int]:
    """A function of the library, which is there: a decoder is only made where it is."""
    return getattr(library(), name)  # type: ignore[no-any-return]


class Decoder:
    """A decoder of nvJPEG's with its memory; for one thread at a time, on the current device.

    Args:
        backend: of nvJPEG's enumeration.
        device: the current one.
    """

    def __init__(self, backend: int, device: torch.device) -> None:
        self._handle = ctypes.c_void_p()
        self._state = ctypes.c_void_p()
        self._fills = backend == _GPU_HYBRID
        self._filled = torch.empty(0)  # the pictures of the files that fill up a call
        self._device = device
        self.stream: int | None = None  # the handle of the one stream that it is used on
        _call("nvjpegCreateEx", backend, None, None, 0, ctypes.byref(self._handle))
        try:
            _call("nvjpegJpegStateCreate", self._handle, ctypes.byref(self._state))
        except RuntimeError:
            _function("nvjpegDestroy")(self._handle)
            raise

    def close(self) -> None:
        """Free its memory; no call of it may be under way."""
        _function("nvjpegJpegStateDestroy")(self._state)
        _function("nvjpegDestroy")(self._handle)

    def engines(self) -> int:
        """JPEG engines of the GPU; 0 where the library does not tell."""
        engines = ctypes.c_uint()
        cores = ctypes.c_uint()
        ask = getattr(library(), "nvjpegGetHardwareDecoderInfo", None)  # not in all versions
        if ask is None or ask(self._handle, ctypes.byref(engines), ctypes.byref(cores)):
            return 0
        return engines.value

    def decode(self, order: npt.NDArray[np.int64], stream: int) -> None:
        """Queue the decode of some baseline JPEGs; the files are read until it has completed.

        ``order`` is of :func:`with_addresses`. Pictures are as large as their files say. ``stream``
        is the same in all calls: see Note [A stream's decoder].
        """
        order = self._for_kernels(order)
        count = len(order) // _WORDS
        files = order.ctypes.data
        lengths = files + 8 * count
        images = lengths + 8 * count
        self.stream = stream
        both = self._handle, self._state
        _call("nvjpegDecodeBatchedInitialize", *both, count, 1, _RGBI)
        _call("nvjpegDecodeBatched", *both, files, lengths, images, stream)

    def _for_kernels(self, order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The order, with so many tiny files after it that CUDA kernels decode the call.

        A core gives other pixels than the kernels, and how many files are in a call depends on how
        many batches were there.
        """
        lacking = LEAST_FOR_KERNELS - len(order) // _WORDS
        if not self._fills or lacking <= 0:
            return order
        file = _filler()
        if not self._filled.numel():
            shape = (LEAST_FOR_KERNELS, *_FILLER, 3)
            self._filled = torch.empty(shape, dtype=torch.uint8, device=self._device)
        spans = np.tile([0, len(file)], (lacking, 1))
        fillers = order_for(spans, np.tile(_FILLER, (lacking, 1)))
        addressed = with_addresses(fillers, file.ctypes.data, self._filled.data_ptr())
        return joined([order, addressed])


_FILLER = (8, 8)


@cache
def _filler() -> npt.NDArray[np.uint8]:
    """The smallest JPEG, 8 x 8 and gray in three colors. It is kept: nvJPEG reads it later."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", _FILLER, "gray").save(file, "JPEG", subsampling="4:2:0")
    return np.frombuffer(file.getvalue(), dtype=np.uint8)


def order_for(spans: npt.NDArray[np.int64], shapes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What nvJPEG is given to decode files to pictures that lie one after the other.

    Two files in bytes 0 to 90 and 100 to 250 of a buffer, with pictures of 2 x 4 and 3 x 5 pixels::

        [0, 100,  90, 150,  0, 0, 0, 0, 12, 0, 0, 0,  24, 0, 0, 0, 15, 0, 0, 0]

    First come the offsets of both files, then their lengths, then an nvjpegImage_t for each
    picture: the offset of its only plane, ``(H, W, 3)``, and the bytes of a row of that.
    :func:`with_addresses` makes addresses of the offsets.

    Args:
        spans: ``(N, 2)``, first byte of each file in its buffer, and the one after its last.
        shapes: ``(N, 2)``, height and width of each picture.
    """
    heights, widths = shapes.T
    sizes = 3 * heights * widths
    images = np.zeros((len(spans), 2, _PLANES), dtype=np.int64)
    images[:, 0, 0] = np.cumsum(sizes) - sizes
    images[:, 1, 0] = 3 * widths
    return np.concatenate([spans[:, 0], spans[:, 1] - spans[:, 0], images.reshape(-1)])


def with_addresses(
    order: npt.NDArray[np.int64], buffer: int, pictures: int
) -> npt.NDArray[np.int64]:
    """An order with addresses in place of offsets.

    Args:
        order: of :func:`order_for`; it stays as it is.
        buffer: the address of the files' buffer, on the CPU.
        pictures: the address of the first picture, on the device.
    """
    addressed = order.copy()
    count = len(order) // _WORDS
    addressed[:count] += buffer
    addressed[2 * count :: 2 * _PLANES] += pictures
    return addressed


def joined(orders: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """One order for the files of several, in turn, which have addresses already."""
    if len(orders) == 1:
        return orders[0]
    bounds = [[0, n, 2 * n, _WORDS * n] for n in (len(order) // _WORDS for order in orders)]
    return np.concatenate(
        [
            order[bound[part] : bound[part + 1]]
            for part in range(3)
            for order, bound in zip(orders, bounds, strict=True)
        ]
    )


def _call(name: str, *arguments: object) -> None:
    """Call a function of the library; a status that is no success is an error."""
    status = _function(name)(*arguments)
    if not status:
        return
    words = f"{name}: {_STATUS[status] if status < len(_STATUS) else f'status {status}'}"
    if status == _ALLOCATOR_FAILURE:
        raise torch.OutOfMemoryError(f"CUDA out of memory. {words}")
    raise RuntimeError(words)


# Note [A stream's decoder]
# A call returns before nvJPEG has finished it, and a decoder has memory for its latest call alone.
# Two threads, each with its own stream, took two decoders in turns, whichever was idle. A call then
# never returned, in three of three processes within five epochs on an H200. So a decoder is used on
# one stream only, and there are few of those.

# A decoder needs 50 MiB, and the first one 80 MiB more for nvJPEG's kernels. Making one is slow, so
# idle ones are kept.
_idle: defaultdict[torch.device, list[Decoder]] = defaultdict(list)
_choosing = threading.Lock()

_backends: dict[torch.device, int] = {}
_trying = threading.Lock()  # the first decoder of a device is made once


def backend_of(device: torch.device) -> int:
    """The backend for a CUDA device, tried once: the engines, or CUDA kernels if it has none.

    The decoder that it was tried with is kept. A failure is not remembered: the next call tries
    again.
    """
    if device not in _backends:
        with _trying:
            if device not in _backends:
                _backends[device] = _try_backends(device)
    return _backends[device]


def _try_backends(device: torch.device) -> int:
    for backend in (_HARDWARE, _GPU_HYBRID):
        try:
            with torch.cuda.device(device):
                _idle[device].append(Decoder(backend, device))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            failed = error
        else:
            return backend
    raise RuntimeError(f'{failed}. With decoder="cpu" the workers decode.')


def has_engines(device: torch.device) -> bool:
    return backend_of(device) == _HARDWARE


@contextlib.contextmanager
def lease(device: torch.device) -> Iterator[Decoder]:
    """A decoder for the current stream of a device; one that has failed is not used again."""
    backend = backend_of(device)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        with _choosing:
            known = (d for d in _idle[device] if d.stream in (None, stream.cuda_stream))
            if (decoder := next(known, None)) is not None:
                _idle[device].remove(decoder)
        decoder = decoder or Decoder(backend, device)
        try:
            yield decoder
        except BaseException:
            stream.synchronize()
            decoder.close()
            raise
        _idle[device].append(decoder)
