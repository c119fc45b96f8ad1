"""A batch of encoded images that a worker has prepared: its buffer and its plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.images.bad import name_of
from gpuprefetch.images.division import Share
from gpuprefetch.images.encoded import EncodedImage, EncodedImages
from gpuprefetch.images.fate import Fate
from gpuprefetch.images.guard import Encoded
from gpuprefetch.images.nvjpeg import order_for
from gpuprefetch.images.recorded import Call as LaterCall
from gpuprefetch.images.slab import Buffer
from gpuprefetch.policies.ops_launch import Layout
from gpuprefetch.transforms.head import Head
from gpuprefetch.transforms.launch import Launches, Table, by_place
from gpuprefetch.transforms.launch_table import Words
from gpuprefetch.transforms.random import Keys
from gpuprefetch.transforms.reference import Doubles, Ints
from gpuprefetch.transforms.sampling import Sizes, areas


@dataclass(slots=True)
class Upload:
    """Pictures that workers decoded, copied to the device together."""

    positions: Ints  # (n,) in the batch, in the order of the buffer
    start: int  # their first byte in the buffer
    stop: int  # the byte after their last

    @property
    def size(self) -> int:
        """Bytes of the pictures."""
        return self.stop - self.start


@dataclass(slots=True)
class Call:
    """Files that are decoded together, to pictures ``(H, W, 3)`` that lie one after the other."""

    positions: Ints  # (n,) in the batch, in the order of the buffer
    spans: Ints  # (n, 2), first byte of each file in the buffer, and the byte after its last
    # (n, 2), height and width of each picture as it is stored, by its header. The launch reads
    # these shapes: pictures of others would be misread.
    shapes: Ints
    sizes: Ints = field(init=False)  # (n,), bytes of each picture
    size: int = field(init=False)  # bytes of all pictures
    order: Ints = field(init=False)  # of nvjpeg.order_for(), made in the worker

    def __post_init__(self) -> None:
        self.sizes = 3 * self.shapes.prod(axis=1)
        self.size = int(self.sizes.sum())
        self.order = order_for(self.spans, self.shapes)

    @property
    def offsets(self) -> Ints:
        """``(n,)``, where each picture begins."""
        offsets: Ints = np.cumsum(self.sizes) - self.sizes
        return offsets

    def files(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """1-D uint8 on the CPU, the bytes of each file."""
        return [buffer[start:stop] for start, stop in self.spans.tolist()]

    def pictures(self, decoded: torch.Tensor) -> list[torch.Tensor]:
        """``(3, H, W)`` views of what was decoded, ``(size,)`` uint8."""
        parts = decoded.split(self.sizes.tolist())
        shapes = self.shapes.tolist()
        return [
            part.view(*shape, 3).permute(2, 0, 1) for part, shape in zip(parts, shapes, strict=True)
        ]


@dataclass(slots=True)
class Part:
    """The pictures of one launch a view: those that workers decoded, then those of a decode call.

    They lie in this order in the part's memory on the device. One launch for both saves the
    prefetch thread half a millisecond a batch.
    """

    upload: Upload | None
    call: Call | None

    @property
    def uploaded(self) -> int:
        """Bytes of the pictures that workers decoded."""
        return 0 if self.upload is None else self.upload.size

    @property
    def size(self) -> int:
        """Bytes of all pictures."""
        return self.uploaded + (0 if self.call is None else self.call.size)


@dataclass(slots=True)
class Plan:
    """How a batch gets to the device, part by part; launch k of a view reads part k."""

    parts: Sequence[Part] = ()
    tables: Sequence[Table] = ()  # of each view; none without a fixed size


@dataclass(slots=True)
class Regions:
    """Where the parts of a batch's buffer lie: the files from byte 0 on, pixels, launch tables.

    Two files of 100 and 50 bytes, a picture of 30 and a launch table of 576 for one view::

        Regions(pixels=150, tables=[180, 756])
    """

    pixels: int  # first byte of the pictures that a worker has decoded
    # First byte of the launch table of each view, and the byte after the last one. Tables lie after
    # the pixels as bad files are not in them, which are known once the others have been decoded.
    tables: list[int]

    @property
    def pixels_end(self) -> int:
        return self.tables[0]


@dataclass(slots=True, kw_only=True)
class Stored:
    """The pictures of N images, decoded already or not yet."""

    sizes: Ints  # (N, 2), height and width; made up where no header could be read
    # (N,), whether the stored picture has rows in place of columns
    transposed: npt.NDArray[np.bool_]
    interleaved: bool  # whether decoded pixels lie as decoders write them, (H, W, 3), or as planes
    # The sizes of the results of each view, if there are several. A worker finishes what it
    # decodes for all of them, and the results lie one after the other. Empty for one view.
    views: Sequence[Sizes] = ()


@dataclass(slots=True, kw_only=True)
class Identities:
    """Which samples N images are of."""

    indices: Ints  # (N,), of the samples in their dataset
    names: Ints  # (N,), of the samples: see images/samples.py
    keys: Keys  # (N,), which random parameters come from; images of one sample have the same key
    paths: list[str]
    # The position of each image's sample in the batch; -1 if the collate function made the image.
    samples: list[int]
    # What the device does to each image after the launch; empty if it does nothing to any.
    calls: Sequence[tuple[LaterCall, ...]] = ()

    def name(self, position: int) -> str:
        """How messages name an image."""
        return name_of(int(self.indices[position]), self.paths[position])


@dataclass(slots=True, kw_only=True)
class Report:
    """What a worker reports about a batch."""

    share: Share  # of the baseline JPEGs, which it was to decode
    counts: dict[str, float] = field(default_factory=dict)  # what to add to the counters of Stats
    # What the user should know, kind -> text. The training process warns once of each kind: a
    # worker's own warnings end in its stderr.
    remarks: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Results:
    """What a worker has made of its batch besides the buffer."""

    # The sizes of the results of each view, if the images say them; else empty.
    sizes: Sequence[Sizes] = ()
    # The result of each view, where the fused transforms run in the worker.
    out: list[torch.Tensor] = field(default_factory=list)
    # Random parameters of the first transform after the fused ones, one entry a view. Empty if that
    # transform already ran or does not exist; there are no entries if no worker sampled any.
    layouts: list[Sequence[Layout]] = field(default_factory=list)


@dataclass(kw_only=True, repr=False)
class PackedImages:
    """N encoded images in one flat buffer.

    Three photos of one view; a worker has decoded the second one, to 2 x 5 pixels. Their launch
    table has 576 bytes::

        byte    0         100       150          180            756
        buffer  | file 0  | file 2  | picture 1  | launch table |

        regions  Regions(pixels=150, tables=[180, 756])
        spans    [[0, 100], [150, 180], [100, 150]]
        decoded  [False, True, False]
    """

    buffer: Buffer
    regions: Regions
    spans: Ints  # (N, 2), first byte of each image in the buffer, and the byte after its last
    decoded: npt.NDArray[np.bool_]  # (N,), whether a worker has decoded the image
    stored: Stored
    who: Identities
    rows: list[Doubles | None]  # of each view (N, 2, 6), its sampling; None without a fixed size
    errors: dict[int, str]  # position -> why the image cannot be decoded

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def files(self) -> torch.Tensor:
        """``(bytes,)`` uint8 on the CPU, the files that are left to the device."""
        return self.buffer.tensor[: self.regions.pixels]

    @property
    def pixels(self) -> torch.Tensor:
        """``(bytes,)`` uint8 on the CPU, the pictures that workers have decoded."""
        return self.buffer.tensor[self.regions.pixels : self.regions.pixels_end]

    def span(self, position: int) -> torch.Tensor:
        """``(bytes,)`` uint8, the image's part of the buffer."""
        start, stop = self.spans[position]
        return self.buffer.tensor[start:stop]

    def parts(self) -> list[npt.NDArray[np.uint8]]:
        """The parts of all images in the buffer, to be written to."""
        flat = self.buffer.tensor.numpy()
        return [flat[start:stop] for start, stop in self.spans.tolist()]

    def call(self, positions: Ints) -> Call:
        """The call that decodes some files together."""
        sizes = self.stored.sizes[positions]
        turned = self.stored.transposed[positions, None]
        shapes = np.where(turned, sizes[:, ::-1], sizes)
        return Call(positions, self.spans[positions], shapes)

    def view_sizes(self, view: int) -> Ints:
        """``(N, 2)``, height and width of what a view is sampled from."""
        if not self.stored.views:
            return self.stored.sizes
        return np.where(self.decoded[:, None], self.stored.views[view], self.stored.sizes)

    def view_starts(self, view: int) -> Ints:
        """``(N,)``, the first byte of a view within the pixels that a worker has decoded."""
        starts = np.zeros(len(self), dtype=np.int64)
        for size in self.stored.views[:view]:
            starts += 3 * areas(size, len(self))
        return starts

    def pictures(
        self, positions: Ints, pixels: torch.Tensor, start: int, view: int = 0
    ) -> list[torch.Tensor]:
        """``(3, H, W)`` images that workers decoded, in ``pixels`` from byte ``start`` on."""
        sizes = self.view_sizes(view)[positions]
        firsts = self.spans[positions, 0] - start + self.view_starts(view)[positions]
        ends = firsts + 3 * sizes.prod(axis=1)
        bounds = zip(firsts.tolist(), ends.tolist(), strict=True)
        pieces = [pixels[first:last] for first, last in bounds]
        pairs = zip(pieces, sizes.tolist(), strict=True)
        if self.stored.interleaved:
            return [piece.view(*size, 3).permute(2, 0, 1) for piece, size in pairs]
        return [piece.view(3, *size) for piece, size in pairs]


@dataclass(kw_only=True, repr=False)
class PreparedImages(PackedImages, Encoded):
    """N encoded images that a :class:`.packer.Packer` has prepared for the device."""

    report: Report
    plan: Plan
    made: Results
    targets: Fate | None = None  # of boxes, masks and points beside them; None without any

    @classmethod
    def of(
        cls, packed: PackedImages, ends: Sequence[int], *, plan: Plan, made: Results, report: Report
    ) -> PreparedImages:
        """Packed images with their plan; ``ends`` is where each view's launch table ends."""
        regions = Regions(packed.regions.pixels, [packed.regions.pixels_end, *ends])
        parts = vars(packed) | {"regions": regions}
        return cls(**parts, plan=plan, made=made, report=report)

    def note_targets(self, targets: Fate | None) -> None:
        """Note what the collate function did with the targets beside the images."""
        self.targets = targets

    def sized(self, heads: Sequence[Head]) -> list[Head]:
        """The fused transforms of each view, with the size of the images where that is kept."""
        sizes = self.made.sizes
        if not sizes:
            return list(heads)
        return [head.sized(size) for head, size in zip(heads, sizes, strict=True)]

    def words(self, view: int, *, own_sizes: bool) -> Words:
        """``(N,)``, what a view's launch table has of each image, in the order of the batch.

        ``own_sizes`` says whether the results of the view have sizes of their own.
        """
        first, last = self.regions.tables[view : view + 2]
        table = self.buffer.tensor[first:last]
        return by_place(Launches.words(table, 3, own_sizes=own_sizes), len(self))

    def pin_memory(self, device: object = None) -> PreparedImages:
        """The batch in pinned memory; the DataLoader's pin thread calls it."""
        # nvJPEG copies file by file: 13 us a file from pageable memory, and 3 from pinned memory.
        started = time.perf_counter()
        self.buffer = self.buffer.pinned()
        self.report.counts["pin_seconds"] = time.perf_counter() - started
        return self


ENCODED = (EncodedImage, EncodedImages, PreparedImages)


def is_encoded(batch: object) -> bool:
    """Whether ``batch`` is an encoded image, a batch of them or a list of them."""
    return isinstance(batch, ENCODED) or (
        isinstance(batch, (list, tuple))
        and len(batch) > 0
        and isinstance(batch[0], EncodedImage)  # first: most lists fail here
        and all(isinstance(image, EncodedImage) for image in batch)
    )
