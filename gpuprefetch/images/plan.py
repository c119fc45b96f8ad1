"""How a batch gets to the device: its decode calls and copies, and the memory that they need."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import numpy as np

from gpuprefetch.core.nested import Batch, objects, tensors
from gpuprefetch.core.stage import Cost
from gpuprefetch.images.prepared import PackedImages, Part, Plan, PreparedImages, Upload, is_encoded
from gpuprefetch.transforms.head import Head
from gpuprefetch.transforms.launch import arrange
from gpuprefetch.transforms.launch_table import Words
from gpuprefetch.transforms.reference import Ints
from gpuprefetch.transforms.sampling import Sizes

BLOCK = 512  # torch's caching allocator rounds up to it

# The most images and decoded bytes of one decode call: 256 of ImageNet's photos are one call. The
# engines fill and run empty in each call, which costs a millisecond. A call holds seven photos of
# 12 megapixels, one for each engine of an H100. Such calls decode 965 photos a second there; calls
# of three photos, two calls at a time, decode 425.
SUB_BATCH = 256
SUB_BATCH_BYTES = 256 << 20
# The most batches that one call decodes, of 32 images or fewer.
TOGETHER = 8
# The same bytes where the GPU has no engines: a call then needs as long whatever its size.
WHOLE_BATCH_BYTES = 512 << 20
# The most bytes that workers decoded in one copy, usually all of a batch. It goes with a call.
UPLOAD_BYTES = 32 << 20
# Scratch memory is allocated in multiples of this: the allocator keeps a block of each size.
SCRATCH_BYTES = 40 << 20


def parse_bytes(budget: str | int | None) -> int | None:
    """Bytes of "2GiB" (2**31), "2GB" (2 * 10**9), "512 mb" or an int."""
    if budget is None:
        return None
    if isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        return budget
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(|[kmgt]i?)b", str(budget).lower())
    if found:
        unit = 1024 if found[2].endswith("i") else 1000
        if size := int(float(found[1]) * unit ** " kmgt".index(found[2][:1] or " ")):
            return size
    raise ValueError(
        'memory_budget is a size such as "2GiB", "2GB" or "512MiB", a positive number of bytes, or '
        f"None for no limit, got {budget!r}."
    )


def readable(size: int) -> str:
    """A size in words, as in "1.5 GiB"."""
    power = sum(size >= 1024**power for power in (1, 2, 3))
    return f"{size / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def positions_to_decode(images: PackedImages) -> Ints:
    """The images of a batch that are left to the device, in the order of its buffer."""
    todo = ~images.decoded
    todo[list(images.errors)] = False
    positions = np.flatnonzero(todo)
    return positions[np.argsort(images.spans[positions, 0], kind="stable")]


def decoded_bytes(images: PackedImages, positions: Ints | slice) -> Ints:
    """``(n,)``, the bytes of each decoded picture, as torch's allocator rounds them up."""
    size: Ints = 3 * images.stored.sizes[positions].prod(axis=1)
    return -(-size // BLOCK) * BLOCK


def split_into_calls(
    sizes: Ints, limit: int | None = None, whole: int | None = None
) -> list[slice]:
    """Divide pictures of these bytes, in their order, into about equal decode calls.

    Nine photos of 100 MiB each, with calls of at most 256 MiB, make calls of 2, 2, 2, 2 and 1: the
    engines are then about as long busy with each.

    Args:
        sizes: ``(n,)``, the decoded bytes of each picture.
        limit: bytes of a call at most; a larger picture has a call for itself.
        whole: likewise, in place of SUB_BATCH_BYTES, for a decoder whose calls need as long
            whatever their size; its calls are filled.
    """
    most = whole or SUB_BATCH_BYTES
    most = most if limit is None else min(limit, most)
    loads = sizes / most  # parts of a call
    if not whole and loads.sum() < len(sizes) / SUB_BATCH:
        loads = np.full(len(sizes), 1 / SUB_BATCH)
    target = loads.sum() / max(np.ceil(loads.sum() - 1e-9), 1) - 1e-9
    used = 0
    load = 0.0
    starts: list[int] = []
    for i, (size, more) in enumerate(zip(sizes.tolist(), loads.tolist(), strict=True)):
        if not i or used + size > most or load >= target:
            used = 0
            load = 0.0
            starts.append(i)
        used += size
        load += more
    return [slice(first, last) for first, last in pairwise([*starts, len(sizes)])]


def uploads(
    images: PackedImages, limit: int | None = None, whole: int | None = None
) -> list[Upload]:
    """Divide what the workers decoded into copies of UPLOAD_BYTES or ``whole``, or of one image."""
    positions = np.flatnonzero(images.decoded)
    most = whole or UPLOAD_BYTES
    most = most if limit is None else min(limit, most)
    spans = images.spans[positions]
    begin = 0
    starts: list[int] = []
    for i, (first, last) in enumerate(spans.tolist()):
        if not i or last - begin > most:
            begin = first
            starts.append(i)
    return [
        Upload(positions[i:j], int(spans[i, 0]), int(spans[j - 1, 1]))
        for i, j in pairwise([*starts, len(positions)])
    ]


def lay_out(
    images: PackedImages,
    sizes: Sequence[Sizes] = (),
    words: Sequence[Words] = (),
    limit: int | None = None,
    whole: int | None = None,
) -> Plan:
    """Plan a batch: copies of what workers decoded, each with a decode call if there are both.

    Args:
        images: whose files and pixels lie in their buffer.
        sizes: of the results of each view; none where the fused transforms give none.
        words: of each view, of :func:`.launch.plan_rows`; none where no kernel resamples.
        limit: bytes of a part at most; a larger picture has a part for itself.
        whole: likewise, for a decoder whose calls need as long whatever their size.

    Example, of the batch in :class:`.prepared.PackedImages`, whose files decode to 4 x 6 and 2 x 8
    pixels::

        one part    Upload(positions=[1], start=150, stop=180)
                    Call(positions=[0, 2], spans=[[0, 100], [100, 150]], shapes=[[4, 6], [2, 8]])

        limit=600   a part for the upload, and one for each of the files
    """
    positions = positions_to_decode(images)
    slices = split_into_calls(decoded_bytes(images, positions), limit, whole)
    calls = [images.call(positions[part]) for part in slices]
    copies = uploads(images, limit, whole) if sizes else []
    if limit is None:  # a copy goes with a call
        parts = [Part(upload, call) for upload, call in zip_longest(copies, calls)]
    else:
        parts = [*(Part(copy, None) for copy in copies), *(Part(None, call) for call in calls)]
    if not words or not parts:
        return Plan(parts)
    located = [_located(images, part) for part in parts]
    places = np.concatenate([positions for positions, _ in located])
    starts = np.concatenate([offsets for _, offsets in located])
    counts = [len(positions) for positions, _ in located]
    ready = images.decoded[places]
    tables = []
    for view, (each, size) in enumerate(zip(words, sizes, strict=True)):
        offsets = starts + ready * images.view_starts(view)[places]
        tables.append(arrange(each[places], places, offsets, counts, size))
    return Plan(parts, tables)


def _located(images: PackedImages, part: Part) -> tuple[Ints, Ints]:
    """``(n,)`` each, the pictures of a part, and where they begin in its memory on the device."""
    none = np.zeros(0, dtype=np.int64)
    ready = none
    ready_offsets = none
    if part.upload is not None:
        ready = part.upload.positions
        ready_offsets = images.spans[ready, 0] - part.upload.start
    todo = none
    todo_offsets = none
    if part.call is not None:
        todo = part.call.positions
        todo_offsets = part.uploaded + part.call.offsets
    return np.concatenate([ready, todo]), np.concatenate([ready_offsets, todo_offsets])


def scratch_size(size: int) -> int:
    """The scratch memory for ``size`` bytes of a part, as it is allocated."""
    return -(-size // SCRATCH_BYTES) * SCRATCH_BYTES


@dataclass(frozen=True)
class ImageCost(Cost):
    """Bytes on the device of one batch of images."""

    largest: int = 0  # bytes of the largest decoded image
    name: str = ""  # what messages call that image

    def __add__(self, other: ImageCost) -> ImageCost:
        """The cost of both in one batch, whose parts are decoded one after the other."""
        largest = other if other.largest > self.largest else self
        return ImageCost(
            fixed=self.fixed + other.fixed,
            decoded=max(self.decoded, other.decoded),
            largest=largest.largest,
            name=largest.name,
        )

    def limit(self, budget: int | None) -> int | None:
        """Bytes that decoded images may need at a time; None if all of them fit together."""
        if budget is None or self.fixed + self.decoded <= budget:
            return None
        if self.fixed + self.largest > budget:
            image = f", and {self.name} needs {readable(self.largest)} decoded" if self.name else ""
            raise ValueError(
                f"a batch needs {readable(self.fixed)} on the device until it is handed over"
                f"{image}: more than memory_budget={readable(budget)}. Take smaller batches or a "
                "larger budget. Without a crop or a resize in transforms, images are handed over "
                "in the size of their files."
            )
        return budget - self.fixed


def cost_of(batch: Batch, heads: Sequence[Head], copies: int = 1) -> ImageCost:
    """What a batch needs on the device.

    A decode call has ``copies`` of its pictures in memory when it ends.
    """
    total = ImageCost()
    for leaf in objects(batch, is_encoded):
        if isinstance(leaf, PreparedImages):
            total += _cost_of_images(leaf, leaf.sized(heads), copies)
        else:
            total += ImageCost(fixed=sum(tensor.nbytes for tensor in tensors(leaf)))
    return total


def _cost_of_images(images: PreparedImages, heads: Sequence[Head], copies: int) -> ImageCost:
    if heads[0].size is None:
        left = positions_to_decode(images)
        return ImageCost(images.pixels.nbytes + int(decoded_bytes(images, left).sum()))
    decoded = 0
    for part in images.plan.parts:
        size = 0
        if part.call is not None:
            size = int(decoded_bytes(images, part.call.positions).sum())
            size *= copies if len(part.call.positions) > 1 else 1
        decoded = max(decoded, size + part.uploaded)
    fixed = sum(head.empty(len(images), "meta").nbytes for head in heads)
    spans = np.diff(images.spans)[:, 0]
    each = np.where(images.decoded, spans, decoded_bytes(images, slice(None)))
    each[list(images.errors)] = 0
    if not each.max(initial=0):
        return ImageCost(fixed, decoded)
    largest = int(each.argmax())
    height, width = images.stored.sizes[largest].tolist()
    path = images.who.paths[largest]
    index = images.who.indices[largest]
    name = f"{path or f'sample {index}'!r} of {width} x {height} pixels"
    return ImageCost(fixed, decoded, int(each[largest]), name)
