"""A memory budget: what a batch takes on the device, and how much of it at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuprefetch.core.nested import objects, tensors
from gpuprefetch.images.encoded import Call, Copy, EncodedImages, Plan, is_encoded
from gpuprefetch.transforms.head import Head
from gpuprefetch.transforms.launch import arrange

_UNITS = {
    "B": 1,
    **{f"{prefix}iB": 2 ** (10 * power) for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate("KMGT", 1)},
}
BLOCK = 512  # torch's caching allocator rounds up to it
LARGE = 10 << 20  # below it, images share its segments; from there on each gets one of its own

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
    """Bytes of "2GiB" (2**31), "2GB" (2 * 10**9), "512 mb" or an int.

    Raises:
        ValueError: if it is no such size, or not positive.
    """
    if budget is None:
        return None
    if isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        return budget
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    found = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(units)})", str(budget).lower())
    if found and (size := int(float(found[1]) * units[found[2]])):
        return size
    raise ValueError(
        'memory_budget is a size such as "2GiB", "2GB" or "512MiB", a positive number of bytes, or '
        f"None for no limit, got {budget!r}."
    )


def readable(size: int) -> str:
    """A size in words, as in "1.5 GiB"."""
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if size >= _UNITS[unit]), "B")
    return f"{size / _UNITS[unit]:.4g} {unit}"


def positions_to_decode(images: EncodedImages) -> npt.NDArray[np.int64]:
    """The images of a batch that are left to the device, in the order of its buffer."""
    todo = ~images.decoded
    todo[list(images.errors)] = False
    positions = np.flatnonzero(todo)
    return positions[np.argsort(images.spans[positions, 0], kind="stable")]


def decoded_bytes(images: EncodedImages, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What each of some images takes once it is decoded."""
    size: npt.NDArray[np.int64] = 3 * images.sizes[positions].prod(axis=1)
    return -(-size // BLOCK) * BLOCK


def sub_batches(
    images: EncodedImages, limit: int | None = None, room: int | None = None
) -> list[npt.NDArray[np.int64]]:
    """Cut what is left to the device into decode calls of about equal size.

    Each is SUB_BATCH images and SUB_BATCH_BYTES at most, or ``room`` bytes. Either has ``limit``
    bytes at most, or is one image.
    """
    positions = positions_to_decode(images)
    cuts = _cut(decoded_bytes(images, positions), limit, room)
    return np.split(positions, cuts[1:]) if cuts else []


def _cut(sizes: npt.NDArray[np.int64], limit: int | None, room: int | None = None) -> list[int]:
    """Where the calls begin for images of these ``sizes``: see :func:`sub_batches`."""
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
    return cuts


def uploads(images: EncodedImages, limit: int | None = None, room: int | None = None) -> list[Copy]:
    """Cut what the workers decoded into copies of UPLOAD_BYTES, or of ``room`` bytes.

    An image that is larger has one of its own. Where there is a ``limit`` they take no more than
    that either.
    """
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


def _calls(
    images: EncodedImages, limit: int | None, room: int | None = None, *, with_pixels: bool
) -> list[Call]:
    """What :func:`lay_out` plans: each copy with a call, or where memory is short apart."""
    copies = uploads(images, limit, room) if with_pixels else []
    files, none = sub_batches(images, limit, room), np.zeros(0, dtype=np.int64)
    if limit is not None:
        return [*map(images.call, files), *(images.call(none, copy) for copy in copies)]
    pairs = zip_longest(files, copies)
    return [images.call(none if few is None else few, copy) for few, copy in pairs]


def lay_out(
    images: EncodedImages,
    sizes: Sequence[tuple[int, int]] = (),
    words: Sequence[npt.NDArray[np.int64]] = (),
    limit: int | None = None,
    room: int | None = None,
) -> Plan:
    """Plan a batch: in the worker, unless a memory budget asks for less at a time.

    Args:
        images: the batch.
        sizes: ``(H, W)`` of the result of each view; none where it has no fixed size.
        words: of each view, ``(N, words)`` int64 of :func:`.launch.plan_rows`, if there are any.
        limit: bytes of the images of a decode call; None for no limit.
        room: the same, where there is no limit; None is SUB_BATCH_BYTES.
    """
    calls = _calls(images, limit, room, with_pixels=bool(sizes))
    if not words or not calls:
        return Plan(calls)
    groups, offsets = [], []
    for call in calls:
        group, taken = call.positions, call.decoded_sizes
        if (copy := call.copy) is not None:
            group = np.concatenate([copy.positions, group])
            offsets.append(images.spans[copy.positions, 0] - copy.start)
        groups.append(group)
        offsets.append(call.copied + np.cumsum(taken) - taken)
    places, starts, counts = np.concatenate(groups), np.concatenate(offsets), [*map(len, groups)]
    ready = images.decoded[places]
    return Plan(
        calls,
        [
            arrange(each[places], places, starts + ready * images.view_start(view), counts, size)
            for view, (each, size) in enumerate(zip(words, sizes, strict=True))
        ],
    )


def in_rooms(size: int) -> int:
    """The room for ``size`` bytes of images that are decoded together."""
    return -(-size // ROOM_BYTES) * ROOM_BYTES


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes on the device of one batch.

    Attributes:
        fixed: until it is handed over.
        decoded: of its decoded images, as many as there are at a time.
        largest: of the largest one of them.
        name: of the file of that.
        divisible: whether its images are made small one decode call after another.
    """

    fixed: int = 0
    decoded: int = 0
    largest: int = 0
    name: str = ""
    divisible: bool = True

    def limit(self, budget: int | None) -> int | None:
        """Bytes that decoded images may take at a time; None where all of them fit together.

        Raises:
            ValueError: if not even one fits.
        """
        if budget is None or self.fixed + self.decoded <= budget:
            return None
        if not self.divisible:
            raise ValueError(
                f"a batch takes {readable(self.fixed + self.decoded)} on the device, more than "
                f"memory_budget={readable(budget)}. Its images are handed over in the size of "
                "their files: give transforms a crop or a resize, or take smaller batches."
            )
        if self.fixed > budget:
            raise ValueError(
                f"a batch takes {readable(self.fixed)} on the device when it is finished, more "
                f"than memory_budget={readable(budget)}. Take smaller batches, or a larger budget."
            )
        if self.fixed + self.largest > budget:
            raise ValueError(
                f"{self.name} takes {readable(self.largest)} decoded, and with the "
                f"{readable(self.fixed)} of its batch more than memory_budget={readable(budget)}. "
                "Take a larger budget, or smaller batches."
            )
        return budget - self.fixed


def cost_of(batch: Any, heads: Sequence[Head], copies: int = 1) -> Cost:
    """What a batch takes: its tensors, the pixels its workers decoded, and its images.

    Args:
        batch: as the loader gives it, its encoded images packed.
        heads: the fused transforms of each view.
        copies: of the images of a decode call, at the end of it.
    """
    fixed, calls, largest, name, divisible = 0, [0], 0, "", True
    for leaf in objects(batch, is_encoded):
        if not isinstance(leaf, EncodedImages):
            fixed += sum(tensor.nbytes for tensor in tensors(leaf))
            continue
        todo = positions_to_decode(leaf)
        sizes = decoded_bytes(leaf, todo)
        if heads[0].size is None:
            fixed += leaf.pixels.nbytes + int(sizes.sum())
            divisible &= not len(todo)
        else:
            fixed += sum(head.empty(len(leaf), "meta").nbytes for head in heads)
            for call in _calls(leaf, None, with_pixels=True):
                decoded = int(decoded_bytes(leaf, call.positions).sum())
                calls.append(decoded * (copies if len(call.positions) > 1 else 1) + call.copied)
            ready = np.flatnonzero(leaf.decoded)
            todo = np.concatenate([todo, ready])
            sizes = np.concatenate([sizes, np.diff(leaf.spans[ready])[:, 0]])
        if len(sizes) and sizes.max() > largest:
            i = int(todo[sizes.argmax()])
            height, width = leaf.sizes[i].tolist()
            largest, name = int(sizes.max()), leaf.paths[i] or f"sample {leaf.indices[i]}"
            name = f"{name!r} of {width} x {height} pixels"
    return Cost(fixed, max(calls), largest, name, divisible)
