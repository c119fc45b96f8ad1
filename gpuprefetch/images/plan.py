"""A memory budget: what a batch takes on the device, and how much of it at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from gpuprefetch.core.nested import objects, tensors
from gpuprefetch.core.stage import Cost
from gpuprefetch.images.encoded import Call, Copy, PreparedImages, is_encoded
from gpuprefetch.transforms.head import Head
from gpuprefetch.transforms.launch import Table, arrange
from gpuprefetch.transforms.launch_table import Words
from gpuprefetch.transforms.reference import Ints

BLOCK = 512  # torch's caching allocator rounds up to it

# Images and decoded bytes of one decode call: 256 of ImageNet's photos are one. Each call fills and
# empties the engines, which takes a millisecond. Of photos of 12 megapixels it holds seven, one for
# each engine of an H100: calls of three, two at a time, decode 425 a second there and these 965.
SUB_BATCH, SUB_BATCH_BYTES = 256, 256 << 20
# Decoded bytes of a call where the GPU has no engines: it takes as long whatever its size.
WHOLE_BATCH_BYTES = 512 << 20
# Of what the workers decoded, in one copy that goes with a call: usually all of a batch.
UPLOAD_BYTES = 32 << 20
# Memory that is taken again and again is asked for in few sizes, for the allocator keeps a block of
# each: multiples of this.
ROOM_BYTES = 40 << 20


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


def positions_to_decode(images: PreparedImages) -> Ints:
    """The images of a batch that are left to the device, in the order of its buffer."""
    todo = ~images.decoded
    todo[list(images.errors)] = False
    positions = np.flatnonzero(todo)
    return positions[np.argsort(images.spans[positions, 0], kind="stable")]


def decoded_bytes(images: PreparedImages, positions: Any) -> Ints:
    size: Ints = 3 * images.sizes[positions].prod(axis=1)
    return -(-size // BLOCK) * BLOCK


def sub_batches(
    images: PreparedImages, limit: int | None = None, room: int | None = None
) -> list[Ints]:
    """Cut what is left to the device into about equal calls, of at most ``limit`` bytes each."""
    positions = positions_to_decode(images)
    sizes = decoded_bytes(images, positions)
    most = room or SUB_BATCH_BYTES
    most = most if limit is None else min(limit, most)
    loads = sizes / most
    if not room and loads.sum() < len(sizes) / SUB_BATCH:
        loads = np.full(len(sizes), 1 / SUB_BATCH)
    target = loads.sum() / max(np.ceil(loads.sum() - 1e-9), 1) - 1e-9
    used, load, cuts = 0, 0.0, list[int]()
    for i, (size, more) in enumerate(zip(sizes.tolist(), loads.tolist(), strict=True)):
        if not i or used + size > most or load >= target:
            used, load = 0, 0.0
            cuts.append(i)
        used, load = used + size, load + more
    return np.split(positions, cuts[1:]) if cuts else []


def uploads(
    images: PreparedImages, limit: int | None = None, room: int | None = None
) -> list[Copy]:
    """Cut what the workers decoded into copies of UPLOAD_BYTES or ``room``, or of one image."""
    begin, cuts, positions = 0, [], np.flatnonzero(images.decoded)
    most = room or UPLOAD_BYTES
    most = most if limit is None else min(limit, most)
    spans = images.spans[positions]
    for i, (first, last) in enumerate(spans.tolist()):
        if not i or last - begin > most:
            begin = first
            cuts.append(i)
    return [
        Copy(positions[i:j], int(spans[i, 0]), int(spans[j - 1, 1]))
        for i, j in pairwise([*cuts, len(positions)])
    ]


def lay_out(
    images: PreparedImages,
    sizes: Sequence[tuple[int, int]] = (),
    words: Sequence[Words] = (),
    limit: int | None = None,
    room: int | None = None,
) -> tuple[list[Call], list[Table]]:
    """Plan a batch whose views have these result ``sizes`` and ``words`` of :func:`.plan_rows`."""
    copies = uploads(images, limit, room) if sizes else []
    files, none = sub_batches(images, limit, room), np.zeros(0, dtype=np.int64)
    if limit is None:  # a copy goes with a call
        pairs = zip_longest(files, copies)
        calls = [images.call(none if few is None else few, copy) for few, copy in pairs]
    else:
        calls = [*map(images.call, files), *(images.call(none, copy) for copy in copies)]
    if not words or not calls:
        return calls, []
    groups, offsets = [], []
    for call in calls:
        group, taken = call.positions, call.sizes
        if (copy := call.copy) is not None:
            group = np.concatenate([copy.positions, group])
            offsets.append(images.spans[copy.positions, 0] - copy.start)
        groups.append(group)
        offsets.append(call.copied + np.cumsum(taken) - taken)
    places, starts, counts = np.concatenate(groups), np.concatenate(offsets), [*map(len, groups)]
    ready = images.decoded[places]
    return calls, [
        arrange(each[places], places, starts + ready * images.view_start(view), counts, size)
        for view, (each, size) in enumerate(zip(words, sizes, strict=True))
    ]


def in_rooms(size: int) -> int:
    """The room for ``size`` bytes of images that are decoded together."""
    return -(-size // ROOM_BYTES) * ROOM_BYTES


@dataclass(frozen=True)
class ImageCost(Cost):
    """Bytes on the device of one batch of images."""

    largest: int = 0  # decoded image
    name: str = ""  # of its file

    def limit(self, budget: int | None) -> int | None:
        """Bytes that decoded images may take at a time; None where all of them fit together."""
        if budget is None or self.fixed + self.decoded <= budget:
            return None
        if self.fixed + self.largest > budget:
            image = f", and {self.name} takes {readable(self.largest)} decoded" if self.name else ""
            raise ValueError(
                f"a batch takes {readable(self.fixed)} on the device until it is handed over"
                f"{image}: more than memory_budget={readable(budget)}. Take smaller batches or a "
                "larger budget. Without a crop or a resize in transforms, images are handed over "
                "in the size of their files."
            )
        return budget - self.fixed


def cost_of(batch: Any, heads: Sequence[Head], copies: int = 1) -> ImageCost:
    """What a batch takes; ``copies`` are of the images of a decode call, at its end."""
    fixed, decoded, largest, name = 0, 0, 0, ""
    for leaf in objects(batch, is_encoded):
        if not isinstance(leaf, PreparedImages):
            fixed += sum(tensor.nbytes for tensor in tensors(leaf))
            continue
        if heads[0].size is None:
            left = positions_to_decode(leaf)
            fixed += leaf.pixels.nbytes + int(decoded_bytes(leaf, left).sum())
            continue
        fixed += sum(head.empty(len(leaf), "meta").nbytes for head in heads)
        for call in leaf.calls:
            size = int(decoded_bytes(leaf, call.positions).sum())
            size *= copies if len(call.positions) > 1 else 1
            decoded = max(decoded, size + call.copied)
        each = np.where(leaf.decoded, np.diff(leaf.spans)[:, 0], decoded_bytes(leaf, slice(None)))
        each[list(leaf.errors)] = 0
        if each.max(initial=0) > largest:
            i = int(each.argmax())
            height, width = leaf.sizes[i].tolist()
            largest, name = int(each[i]), leaf.paths[i] or f"sample {leaf.indices[i]}"
            name = f"{name!r} of {width} x {height} pixels"
    return ImageCost(fixed, decoded, largest, name)
