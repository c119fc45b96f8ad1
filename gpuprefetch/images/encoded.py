"""Encoded images on their way from a dataset to the decoder: one flat buffer a batch."""

from __future__ import annotations

import contextlib
import contextvars
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from gpuprefetch.images.guard import Encoded, begin_reading
from gpuprefetch.images.nvjpeg import order_for
from gpuprefetch.images.slab import Buffer
from gpuprefetch.transforms.launch import Launches, Table, by_place

if TYPE_CHECKING:
    from gpuprefetch.transforms.ops_launch import Layout


@dataclass(slots=True, repr=False)
class EncodedImage(Encoded):
    """The bytes of one image file, as a dataset hands them out in place of a decoded image.

    The DataLoader's default collate packs them into :class:`EncodedImages`; nothing else is needed.

    Args:
        data: the file's bytes; bytes, bytearray, or a memoryview, a 1-D uint8 tensor or array,
            which are copied.
        index: of the sample in its dataset. Random parameters are keyed to it and error messages
            name it; -1 where there is none, then ``path`` or the bytes themselves take its place.
        path: where the bytes come from, for error messages.

    Raises:
        TypeError: if ``data`` is not one of these, or ``index`` no integer.
        ValueError: if ``index`` is beyond int64.
    """

    data: Any
    index: int = -1
    path: str = ""
    _made: float = field(init=False, repr=False, compare=False)  # when: tells how long reading took

    def __post_init__(self) -> None:
        begin_reading()
        self._made = time.perf_counter()
        try:
            struct.pack("q", self.index)
        except struct.error:
            raise (ValueError if isinstance(self.index, int) else TypeError)(
                "EncodedImage(data, index, path) takes the number of the sample in its dataset for "
                f"index, an int64, or -1 where there is none, got {self.index!r}."
            ) from None
        if isinstance(self.data, (torch.Tensor, np.ndarray)):
            array = np.asarray(self.data)
            if array.dtype != np.uint8 or array.ndim != 1:
                raise TypeError(
                    f"EncodedImage takes a file's bytes as 1-D uint8, got {array.dtype} of shape "
                    f"{array.shape}. Decoded pixels do not belong in it: return them as a tensor."
                )
            self.data = array.tobytes()
        elif isinstance(self.data, memoryview):
            self.data = self.data.tobytes()
        elif not isinstance(self.data, (bytes, bytearray)):
            raise TypeError(
                f"EncodedImage takes a file's bytes, got {type(self.data).__name__}. "
                "Read the file first, as in EncodedImage(Path(path).read_bytes(), index, path)."
            )

    def __repr__(self) -> str:
        what = f"{len(self.data):,} bytes, index={self.index}, path={self.path!r}"
        return f"{type(self).__name__}({what})"


@dataclass(slots=True)
class Copy:
    """Pixels of a batch that are copied together.

    Attributes:
        positions: in the batch of the images that workers decoded, one after the other.
        start: of the first in the batch's pixels.
        stop: of the last.
    """

    positions: npt.NDArray[np.int64]
    start: int
    stop: int


@dataclass(slots=True)
class Call:
    """Files of a batch that are decoded together, and pixels that are copied with them.

    Attributes:
        positions: of the N files in the batch, in the order of its buffer.
        start: of the first in its buffer, which the others follow without a gap.
        layout: ``(3, N)`` int64, of each file its length, and the height and width of the image in
            it. The sampling was drawn for these, which headers promise: others would be misread.
        copy: the pixels; they lie before the decoded images. None for none.
        size: bytes of all images that are decoded.
        largest: bytes of the largest one.
        order: for nvJPEG (:func:`gpuprefetch.images.nvjpeg.order_for`); made in the worker.
    """

    positions: npt.NDArray[np.int64]
    start: int
    layout: npt.NDArray[np.int64]
    copy: Copy | None = None
    size: int = field(init=False)
    largest: int = field(init=False)
    order: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        sizes = self.decoded_sizes
        self.size, self.largest = int(sizes.sum()), int(sizes.max(initial=0))
        self.order = order_for(self.layout)

    @property
    def decoded_sizes(self) -> npt.NDArray[np.int64]:
        """``(N,)`` int64, bytes of each image."""
        sizes: npt.NDArray[np.int64] = 3 * self.layout[1] * self.layout[2]
        return sizes

    @property
    def copied(self) -> int:
        """Bytes of the pixels that are copied."""
        return 0 if self.copy is None else self.copy.stop - self.copy.start


@dataclass(slots=True)
class Plan:
    """How the images of a batch get to the device, and onto it.

    Attributes:
        calls: all of them, decode call by decode call.
        tables: of each view, of a launch after each call; none where they cannot be planned.
    """

    calls: list[Call]
    tables: list[Table] = field(default_factory=list)


@dataclass(kw_only=True, repr=False)
class EncodedImages(Encoded):
    """A batch of N encoded images in one flat buffer.

    Attributes:
        buffer: the files' bytes and, after them, uint8 pixels of every image that a worker has
            decoded already, or room for those of one that it could not decode.
        boundary: where the pixels start in the buffer.
        encoded_bytes: where they stop.
        spans: ``(N, 2)`` int64, where each image starts and stops in ``pixels`` if it was decoded,
            in ``data`` otherwise.
        indices: ``(N,)`` int64, of the samples in their dataset.
        paths: of the files.
        decoded: ``(N,)`` bool, whether a worker has decoded the image.
        sizes: ``(N, 2)`` int64, height and width of the image, decoded or not yet; 0 where no
            header was read.
        transposed: ``(N,)`` bool, whether rows and columns of the decoded image change places.
        interleaved: whether the decoded pixels lie as decoders write them, ``(H, W, 3)``, and not
            as planes, ``(3, H, W)``.
        views: of several views their ``(height, width)``: decoded pixels are those of all of them,
            finished, one after the other. Empty for one.
        errors: position in the batch -> why the image cannot be decoded.
        pin_seconds: the DataLoader's pin thread took.
    """

    buffer: Buffer
    boundary: int
    encoded_bytes: int
    spans: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]
    paths: list[str]
    decoded: npt.NDArray[np.bool_]
    sizes: npt.NDArray[np.int64]
    transposed: npt.NDArray[np.bool_]
    interleaved: bool = False
    views: Sequence[tuple[int, int]] = ()
    errors: dict[int, str] = field(default_factory=dict)
    pin_seconds: float = 0.0

    @property
    def data(self) -> torch.Tensor:
        """``(bytes,)`` uint8 on the CPU, the files' bytes."""
        return self.buffer.tensor[: self.boundary]

    @property
    def pixels(self) -> torch.Tensor:
        """``(bytes,)`` uint8 on the CPU, the decoded pixels."""
        return self.buffer.tensor[self.boundary : self.encoded_bytes]

    @property
    def ready(self) -> int:
        """How many of the images a worker has decoded."""
        return int(self.decoded.sum())

    @property
    def is_pinned(self) -> bool:
        """Whether the buffer lies in pinned memory."""
        return self.buffer.is_pinned

    def __len__(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        return f"EncodedImages({len(self)} images, {self.encoded_bytes:,} bytes)"

    def __getitem__(self, position: int) -> EncodedImage:
        """A copy of the encoded image at ``position``, one that no worker has decoded."""
        # A view would change once the batch is dropped: see Buffer.
        file = self.span(position).numpy().tobytes()
        return EncodedImage(file, int(self.indices[position]), self.paths[position])

    def span(self, position: int) -> torch.Tensor:
        """``(bytes,)`` uint8, a view of the image's part of the buffer."""
        start, stop = self.spans[position]
        return (self.pixels if self.decoded[position] else self.data)[start:stop]

    def parts(self) -> list[npt.NDArray[np.uint8]]:
        """The parts of all images, as :meth:`span` has them, to be written to."""
        flat, starts = self.buffer.tensor.numpy(), np.where(self.decoded, self.boundary, 0)
        return [flat[start:stop] for start, stop in (self.spans + starts[:, None]).tolist()]

    def call(self, positions: npt.NDArray[np.int64], copy: Copy | None = None) -> Call:
        """To decode some images together: all between the first and the last that no worker did."""
        spans, sizes = self.spans[positions], self.sizes[positions]
        stored = np.where(self.transposed[positions, None], sizes[:, ::-1], sizes)
        layout = np.stack([spans[:, 1] - spans[:, 0], *stored.T])
        return Call(positions, int(spans[0, 0]) if len(spans) else 0, layout, copy)

    def held_copy(self, copy: Copy) -> tuple[torch.Tensor, int, int]:
        """What holds the pixels of a copy, and where they start and stop in it."""
        pixels = self.buffer.start + self.boundary
        return self.buffer.memory, pixels + copy.start, pixels + copy.stop

    def view_sizes(self, view: int) -> npt.NDArray[np.int64]:
        """``(N, 2)``, height and width of what a view is sampled from."""
        if not self.views:
            return self.sizes
        return np.where(self.decoded[:, None], self.views[view], self.sizes)

    def view_start(self, view: int) -> int:
        """Where its pixels begin within those of a decoded image."""
        return 3 * sum(height * width for height, width in self.views[:view])

    def pictures(
        self, positions: npt.NDArray[np.int64], pixels: torch.Tensor, start: int = 0, view: int = 0
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

    def pin_memory(self, device: Any = None) -> EncodedImages:
        """The batch in pinned memory; the DataLoader's pin thread calls it.

        nvJPEG copies each file to the GPU by itself, and from pageable memory that takes a call of
        13 us rather than 3, in which the training thread cannot launch.
        """
        started = time.perf_counter()
        self.buffer = self.buffer.pinned()
        self.pin_seconds = time.perf_counter() - started
        return self


@dataclass(kw_only=True, repr=False)
class PreparedImages(EncodedImages):
    """Encoded images that a :class:`gpuprefetch.images.worker.Packer` has prepared for the device.

    Attributes:
        rows: of each view, ``(N, 2, 6)`` float64, the sampling of its fused transforms; None where
            these sample nothing.
        plan: of the way to the GPU.
        numbers: where in the buffer, after the pixels, what the launches of each view read starts;
            and where all of it stops.
        out: the finished batch of each view, where no device is to make it; else empty.
        samples: of the batch, each image's; -1 where the collate function made a new image.
        share: of the baseline JPEGs that the worker was to decode.
        read_seconds: the worker spent in the dataset.
        decode_seconds: it spent decoding.
        collate_seconds: it spent on the rest of the batch.
        targets: what became of boxes, masks and points, see :func:`.targets.fate`.
        seed: with which the worker has drawn for the first transform after the fused ones; None if
            it has not.
        laid: what it drew for each view, where that is for the device to carry out.
    """

    rows: list[npt.NDArray[np.float64] | None]
    plan: Plan
    numbers: list[int]
    out: list[torch.Tensor]
    samples: list[int]
    share: float
    read_seconds: float
    decode_seconds: float
    collate_seconds: float
    targets: str = ""
    seed: int | None = None
    laid: list[Sequence[Layout]] = field(default_factory=list)

    def words(self, view: int) -> npt.NDArray[np.int64]:
        """What a view's launches read of each image, ``(N, words)``, in the order of the batch."""
        first, last = self.numbers[view : view + 2]
        return by_place(Launches.words(self.buffer.tensor[first:last], 3), len(self))


def is_encoded(batch: Any) -> bool:
    """Whether ``batch`` is an encoded image, a packed batch of them or a list of them."""
    return isinstance(batch, (EncodedImage, EncodedImages)) or (
        isinstance(batch, (list, tuple))
        and len(batch) > 0
        and isinstance(batch[0], EncodedImage)
        and all(isinstance(image, EncodedImage) for image in batch)
    )


def allocate(
    images: Sequence[EncodedImage],
    lengths: npt.NDArray[np.int64],
    decoded: npt.NDArray[np.bool_],
    *,
    work: npt.NDArray[Any] | int = 0,
    room: int = 0,
    **known: Any,
) -> EncodedImages:
    """Lay out a batch whose :meth:`EncodedImages.parts` are still to be written.

    Args:
        images: of the batch.
        lengths: ``(N,)``, bytes of each part.
        decoded: ``(N,)`` bool, which parts are pixels.
        work: ``(N,)``, of the GPU with each file.
        room: bytes after the pixels.
        known: more attributes of the batch.
    """
    # Files with the most work lie first: nvJPEG gives the engines files in turns, and waits for one
    # that is not through with the file before. On an H200, beside training, an image takes 102 us
    # so, and 110 in any order. Decoded ones lie as they come: see plan.uploads().
    order = np.lexsort((np.where(decoded, 0, -work), decoded))
    stops = np.empty_like(lengths)
    stops[order] = np.cumsum(lengths[order])
    boundary, size = int(lengths[~decoded].sum()), int(lengths.sum())
    unread = np.zeros((len(images), 2), dtype=np.int64)
    return EncodedImages(
        buffer=Buffer.empty(size + room),
        boundary=boundary,
        encoded_bytes=size,
        spans=np.stack([stops - lengths, stops], axis=1) - np.where(decoded, boundary, 0)[:, None],
        indices=np.array([image.index for image in images], dtype=np.int64),
        paths=[image.path for image in images],
        decoded=decoded,
        **{"sizes": unread, "transposed": np.zeros(len(images), dtype=bool)} | known,
    )


def pack(images: Sequence[EncodedImage], **known: Any) -> EncodedImages:
    """Pack images as they are: what the default collate does where no prefetcher has its say."""
    files = [np.frombuffer(image.data, dtype=np.uint8) for image in images]
    lengths = np.array([len(file) for file in files], dtype=np.int64)
    batch = allocate(images, lengths, np.zeros(len(images), dtype=bool), **known)
    for part, file in zip(batch.parts(), files, strict=True):
        part[:] = file
    return batch


Pack = Callable[[Sequence[EncodedImage]], EncodedImages]
_pack: contextvars.ContextVar[Pack] = contextvars.ContextVar("gpuprefetch_pack", default=pack)


@contextlib.contextmanager
def packing_with(fn: Pack) -> Iterator[None]:
    """Make the default collate pack with ``fn``: how a prefetcher reaches the workers."""
    token = _pack.set(fn)
    try:
        yield
    finally:
        _pack.reset(token)


def collate_encoded(images: Sequence[EncodedImage], *, collate_fn_map: Any = None) -> EncodedImages:
    """Entry of the default collate for :class:`EncodedImage`."""
    return _pack.get()(images)


# torch's own extension point: the default collate knows the type wherever this is imported.
default_collate_fn_map[EncodedImage] = collate_encoded
