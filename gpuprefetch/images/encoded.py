"""Encoded images on their way from a dataset to the decoder."""

from __future__ import annotations

import copy
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from gpuprefetch.images.fate import Fate
from gpuprefetch.images.guard import Encoded, begin_reading
from gpuprefetch.images.nvjpeg import order_for
from gpuprefetch.images.slab import Buffer
from gpuprefetch.transforms.launch import Launches, Table, by_place
from gpuprefetch.transforms.random import Keys
from gpuprefetch.transforms.reference import Ints

if TYPE_CHECKING:
    from gpuprefetch.policies.ops_launch import Layout


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
    # Its sampling row (2, 6), where that is settled: targets beside it have followed it.
    _row: Any = field(default=None, init=False, repr=False, compare=False)
    _fault: str = field(default="", init=False, repr=False, compare=False)  # why it is no image

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

    def __repr__(self) -> str:
        what = f"{len(self.data):,} bytes, index={self.index}, path={self.path!r}"
        return f"{type(self).__name__}({what})"


class EncodedImages(Encoded):
    """A batch of N encoded images, as the DataLoader's default collate makes it of them."""

    def __init__(self, images: Sequence[EncodedImage]) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, position: int) -> EncodedImage:
        return self._images[position]

    def __repr__(self) -> str:
        size = sum(len(image.data) for image in self._images)
        return f"EncodedImages({len(self)} images, {size:,} bytes)"


def _send(batch: EncodedImages) -> tuple[Any, ...]:
    """How a batch is pickled for another process, where no prefetcher has packed it."""
    files, bare = [np.frombuffer(image.data, dtype=np.uint8) for image in batch._images], []
    try:
        buffer = Buffer.empty(sum(map(len, files)))
    except (RuntimeError, MemoryError):
        # Without shared memory; the parent would wait for what failed in here.
        return EncodedImages, (batch._images,)
    np.concatenate(files, out=buffer.tensor.numpy())
    for image in map(copy.copy, batch._images):
        image.data = b""
        bare.append(image)
    return _receive, (buffer, bare, [*map(len, files)])


def _receive(buffer: Buffer, images: list[EncodedImage], lengths: list[int]) -> EncodedImages:
    for image, file in zip(images, buffer.tensor.split(lengths), strict=True):
        image.data = file.numpy().tobytes()  # the worker fills the buffer again
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


class Copy(NamedTuple):
    """Pixels of a batch that are copied together."""

    positions: Ints  # in the batch, of images that workers decoded
    start: int  # of the first in the batch's pixels, which the others follow
    stop: int


@dataclass(slots=True)
class Call:
    """Files of a batch that are decoded together, and pixels that are copied with them."""

    positions: Ints  # of the N files in the batch, in the order of its buffer
    start: int  # of the first in its buffer, which the others follow without a gap
    # (3, N), of each file its length, and the height and width of the image in it. The sampling was
    # drawn for these, which headers promise: others would be misread.
    layout: Ints
    copy: Copy | None = None  # the pixels; they lie before the decoded images
    size: int = field(init=False)  # bytes of all images that are decoded
    copied: int = field(init=False)  # bytes of the pixels
    order: Ints = field(init=False)  # of nvjpeg.order_for(); made in the worker

    def __post_init__(self) -> None:
        self.size, self.order = int(self.sizes.sum()), order_for(self.layout)
        self.copied = 0 if self.copy is None else self.copy.stop - self.copy.start

    @property
    def sizes(self) -> Any:
        return 3 * self.layout[1] * self.layout[2]


@dataclass(kw_only=True, repr=False)
class PreparedImages(Encoded):
    """N encoded images that a :class:`.packer.Packer` has prepared, in one flat buffer.

    It holds the files' bytes, after them uint8 pixels of every image that a worker has decoded, or
    room for those of one that it could not decode, and last what the launches read.
    """

    buffer: Buffer
    boundary: int  # where the pixels start in the buffer
    encoded_bytes: int  # where they stop
    spans: Ints  # (N, 2), of each image in `pixels` if it was decoded, in `data` otherwise
    indices: Ints  # (N,), of the samples in their dataset
    names: Ints  # (N,), of the samples: see images/samples.py
    keys: Keys  # (N,), what random parameters come from; the images of a sample have the same
    paths: list[str]
    decoded: npt.NDArray[np.bool_]  # (N,), whether a worker has decoded the image
    sizes: Ints  # (N, 2), height and width, decoded or not yet; made up where no header was read
    transposed: npt.NDArray[np.bool_]  # (N,), whether decoded rows and columns change places
    interleaved: bool  # whether decoded pixels lie as decoders write them, (H, W, 3), or as planes
    # Of several views their (height, width): decoded pixels are those of all of them, finished, one
    # after the other. Empty for one.
    views: Sequence[tuple[int, int]]
    errors: dict[int, str]  # position -> why the image cannot be decoded
    # Of each view (N, 2, 6), the sampling of its fused transforms; None where these sample nothing.
    rows: list[Any]
    calls: list[Call] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)  # of each view; none without a fixed size
    # Where in the buffer what the launches of each view read starts, after the pixels; and its end.
    numbers: list[int] = field(default_factory=list)
    # The finished batch of each view, where no device is to make it.
    out: list[torch.Tensor] = field(default_factory=list)
    samples: list[int]  # each image's; -1 where the collate function made a new image
    share: float  # of the baseline JPEGs that the worker was to decode
    counts: dict[str, float] = field(default_factory=dict)  # what to add to the counters of Stats
    targets: Fate | None = None  # of the boxes, masks and points beside them; None without any
    # Random parameters of the first transform after the fused ones, one entry a view. Empty if that
    # transform already ran or does not exist; there are no entries if no worker sampled any.
    laid: list[Sequence[Layout]] = field(default_factory=list)
    # What the user should know of these images, kind -> text: a worker's own warnings end in its
    # stderr. Pipeline.receive() warns once of each kind.
    remarks: dict[str, str] = field(default_factory=dict)

    @property
    def data(self) -> torch.Tensor:
        """``(bytes,)`` uint8 on the CPU, the files' bytes."""
        return self.buffer.tensor[: self.boundary]

    @property
    def pixels(self) -> torch.Tensor:
        """``(bytes,)`` uint8 on the CPU, the decoded pixels."""
        return self.buffer.tensor[self.boundary : self.encoded_bytes]

    def __len__(self) -> int:
        return len(self.indices)

    def span(self, position: int) -> torch.Tensor:
        """``(bytes,)`` uint8, a view of the image's part of the buffer."""
        start, stop = self.spans[position]
        return (self.pixels if self.decoded[position] else self.data)[start:stop]

    def parts(self) -> list[npt.NDArray[np.uint8]]:
        """The parts of all images, as :meth:`span` has them, to be written to."""
        flat, starts = self.buffer.tensor.numpy(), np.where(self.decoded, self.boundary, 0)
        return [flat[start:stop] for start, stop in (self.spans + starts[:, None]).tolist()]

    def call(self, positions: Ints, copy: Copy | None = None) -> Call:
        """To decode some images together: all between the first and the last that no worker did."""
        spans, sizes = self.spans[positions], self.sizes[positions]
        stored = np.where(self.transposed[positions, None], sizes[:, ::-1], sizes)
        layout = np.stack([spans[:, 1] - spans[:, 0], *stored.T])
        return Call(positions, int(spans[0, 0]) if len(spans) else 0, layout, copy)

    def pixels_of(self, copy: Copy) -> torch.Tensor:
        """``(bytes,)`` uint8 on the CPU, the pixels of a copy."""
        pixels = self.buffer.start + self.boundary
        return self.buffer.memory[pixels + copy.start : pixels + copy.stop]

    def view_sizes(self, view: int) -> Ints:
        """``(N, 2)``, height and width of what a view is sampled from."""
        if not self.views:
            return self.sizes
        return np.where(self.decoded[:, None], self.views[view], self.sizes)

    def view_start(self, view: int) -> int:
        """Where its pixels begin within those of a decoded image."""
        return 3 * sum(height * width for height, width in self.views[:view])

    def pictures(
        self, positions: Ints, pixels: torch.Tensor, start: int = 0, view: int = 0
    ) -> list[torch.Tensor]:
        """``(3, H, W)`` images that workers decoded, in ``pixels`` from their byte ``start`` on."""
        sizes = self.view_sizes(view)[positions]
        firsts = self.spans[positions, 0] - start + self.view_start(view)
        ends = (firsts + 3 * sizes.prod(axis=1)).tolist()
        pieces = [pixels[first:last] for first, last in zip(firsts.tolist(), ends, strict=True)]
        pairs = zip(pieces, sizes.tolist(), strict=True)
        if self.interleaved:
            return [piece.view(*size, 3).permute(2, 0, 1) for piece, size in pairs]
        return [piece.view(3, *size) for piece, size in pairs]

    def words(self, view: int) -> Ints:
        """What a view's launches read of each image, ``(N, words)``, in the order of the batch."""
        first, last = self.numbers[view : view + 2]
        return by_place(Launches.words(self.buffer.tensor[first:last], 3), len(self))

    def pin_memory(self, device: Any = None) -> PreparedImages:
        """The batch in pinned memory; the DataLoader's pin thread calls it."""
        # nvJPEG copies each file by itself: from pageable memory that takes 13 us rather than 3.
        started = time.perf_counter()
        self.buffer = self.buffer.pinned()
        self.counts["pin_seconds"] = time.perf_counter() - started
        return self


ENCODED = (EncodedImage, EncodedImages, PreparedImages)


def is_encoded(batch: Any) -> bool:
    """Whether ``batch`` is an encoded image, a batch of them or a list of them."""
    return isinstance(batch, ENCODED) or (
        isinstance(batch, (list, tuple))
        and len(batch) > 0
        and isinstance(batch[0], EncodedImage)  # which most are told apart by
        and all(isinstance(image, EncodedImage) for image in batch)
    )
