"""Encoded images, as datasets hand them out and the default collate function joins them."""

from __future__ import annotations

import copy
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from gpuprefetch.images.guard import Encoded, begin_reading
from gpuprefetch.images.header import ImageHeader, read_if_jpeg
from gpuprefetch.images.recorded import Call, Joint
from gpuprefetch.images.slab import Buffer
from gpuprefetch.transforms.sampling import OneSampling


@dataclass(slots=True, repr=False)
class EncodedImage(Encoded):
    """The bytes of one image file, as a dataset hands them out in place of a decoded image.

    The DataLoader's default collate makes :class:`EncodedImages` of them; nothing else is needed.

    Args:
        data: the file's bytes, or a bytearray, a memoryview, a 1-D uint8 tensor or array, which are
            copied.
        index: of the sample in its dataset, for error messages; -1 where there is none. Random
            parameters come from the key that the sampler gave for the sample. Where there is none,
            as in an iterable dataset, they come from ``index``, else from ``path``, else from the
            bytes.
        path: where the bytes come from, for error messages.

    Raises:
        TypeError: if ``data`` is not one of these, or ``index`` no integer.
        ValueError: if ``index`` is beyond int64.
    """

    data: Any
    index: int = -1
    path: str = ""
    _made: float = field(init=False, repr=False, compare=False)  # when: tells how long reading took
    # Whether its random parameters are not those of other images of its sample.
    _apart: bool = field(default=False, init=False, repr=False, compare=False)
    # Its sampling, where that is settled: targets beside it have followed it.
    _sampling: OneSampling | None = field(default=None, init=False, repr=False, compare=False)
    # What its sample's own transform is still to do, and what the device is to do after the launch.
    _joint: Joint | None = field(default=None, init=False, repr=False, compare=False)
    _calls: tuple[Call, ...] = field(default=(), init=False, repr=False, compare=False)
    _fault: str = field(default="", init=False, repr=False, compare=False)  # why it is no image
    # What read_if_jpeg() says of it; False before that was asked.
    _header: ImageHeader | Literal[False] | None = field(
        default=False, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        begin_reading()
        self._made = time.perf_counter()
        if isinstance(self.path, os.PathLike):
            self.path = os.fspath(self.path)
        try:
            struct.pack("q", self.index)
        except struct.error:
            raise (ValueError if isinstance(self.index, int) else TypeError)(
                "EncodedImage(data, index, path) takes an int64 as index, the number of the sample "
                f"in its dataset, or -1 if it has none, got {self.index!r}."
            ) from None
        if isinstance(self.data, (torch.Tensor, np.ndarray)):
            array = np.asarray(self.data)
            if array.dtype != np.uint8 or array.ndim != 1:
                raise TypeError(
                    f"EncodedImage takes a file's bytes as 1-D uint8, got {array.dtype} of shape "
                    f"{array.shape}. Decoded pixels do not belong in it: return them as a tensor."
                )
            self.data = array.tobytes()
        elif isinstance(self.data, (bytearray, memoryview)):
            self.data = bytes(self.data)
        elif not isinstance(self.data, bytes):
            raise TypeError(
                f"EncodedImage takes a file's bytes, got {type(self.data).__name__}. "
                "Read the file first, as in EncodedImage(Path(path).read_bytes(), index, path)."
            )

    def _hold(self, data: bytes) -> None:
        """Have other bytes, as on the way to another process."""
        self.data = data
        self._header = False

    def _read_if_jpeg(self) -> ImageHeader | None:
        """Its header if it is a JPEG, which is read once for all who ask; None of any other."""
        if self._header is False:
            self._header = read_if_jpeg(self.data)
        return self._header

    def _know(self, other: EncodedImage) -> None:
        """Know what is known of another image of the same bytes."""
        self._fault = other._fault
        self._header = other._header

    def _settle(self, sampling: OneSampling, calls: tuple[Call, ...] = ()) -> None:
        """Fix its sampling: targets beside it have followed it."""
        self._sampling = sampling
        self._calls = calls
        self._joint = None

    def _put_off(self, joint: Joint) -> None:
        """Note the transform that its dataset has called."""
        self._joint = joint

    def _set_apart(self) -> None:
        """Give it other random parameters than other images of its sample have."""
        self._apart = True

    def _condemn(self, fault: str) -> None:
        """Say why it is no image."""
        self._fault = fault

    def __repr__(self) -> str:
        what = f"{len(self.data):,} bytes, index={self.index}, path={self.path!r}"
        return f"{type(self).__name__}({what})"


class EncodedImages(Encoded):
    """A batch of N encoded images, as the DataLoader's default collate makes it of them.

    Args:
        images: the N images, in the order of the batch.
    """

    def __init__(self, images: Sequence[EncodedImage]) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, position: int) -> EncodedImage:
        return self._images[position]

    def __repr__(self) -> str:
        size = sum(len(image.data) for image in self._images)
        return f"EncodedImages({len(self)} images, {size:,} bytes)"


def _send(batch: EncodedImages) -> tuple[Callable[..., EncodedImages], tuple[object, ...]]:
    """How a batch is pickled for another process, where no prefetcher has packed it."""
    files = [np.frombuffer(image.data, dtype=np.uint8) for image in batch._images]
    try:
        buffer = Buffer.empty(sum(map(len, files)))
    except (RuntimeError, MemoryError):
        # Without shared memory; the parent would wait for what failed in here.
        return EncodedImages, (batch._images,)
    np.concatenate(files, out=buffer.tensor.numpy())
    bare = [copy.copy(image) for image in batch._images]
    for image in bare:
        image._hold(b"")
    return _receive, (buffer, bare, [*map(len, files)])


def _receive(buffer: Buffer, images: list[EncodedImage], lengths: list[int]) -> EncodedImages:
    for image, file in zip(images, buffer.tensor.split(lengths), strict=True):
        image._hold(file.numpy().tobytes())  # the worker fills the buffer again
    return EncodedImages(images)


def _collate(images: Sequence[EncodedImage], *, collate_fn_map: Any = None) -> EncodedImages:
    for image in images:
        if not isinstance(image, EncodedImage):
            raise TypeError(
                "The dataset gave an EncodedImage in one sample, and "
                f"{type(image).__name__} in its place in another one of the batch. Return "
                "EncodedImage(data, index, path) in all."
            )
    return EncodedImages(images)


ForkingPickler.register(EncodedImages, _send)
# torch's own extension point: the default collate knows the type wherever this is imported.
default_collate_fn_map[EncodedImage] = _collate
