"""Which sample of an epoch an image is of, and what its random parameters come from.

All images of one sample share their random parameters, as in torchvision's v2 transforms: a pair of
pictures, or a picture and a mask stored as one, move together. The name of a sample is an integer.
The key that a sampler gave for the sample makes it, or else what the image says of itself.

Names travel from :class:`Repeats`, in the process that iterates the sampler, to
:class:`BatchSamples`, in the process that packs the batch. :func:`keys_of` makes the keys of random
parameters of them.
"""

from __future__ import annotations

import operator
import os
import zlib
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.walk import walk
from gpuprefetch.transforms.random import Keys, fold
from gpuprefetch.transforms.sampling import Size

Dataset = Any  # whatever a sampler's keys are for

# --- Names and repeats: in the process that iterates the sampler ---

_VIEWS = (Subset.__getitem__, ConcatDataset.__getitem__)
# The names in a second and later dataset that a ConcatDataset joins begin at multiples of this.
_DATASET = 1 << 40
# Names made of a checksum are negative: an integer key gives no such name.
_CHECKSUMS = -(1 << 33)
_PLAIN = (int, float, bool, str, bytes, type(None), np.generic)


def _origin(dataset: Dataset, key: Any) -> tuple[Dataset, Any]:
    """The dataset that a sample is of, and its key there, through torch's views of datasets."""
    # accelerate's views of these have classes derived from them, with the same __getitem__.
    while (get := getattr(type(dataset), "__getitem__", None)) in _VIEWS:
        if get is Subset.__getitem__:
            key = operator.index(dataset.indices[key])
            dataset = dataset.dataset
            continue
        key += len(dataset) if key < 0 else 0
        part = bisect_right(dataset.cumulative_sizes, key)
        key -= dataset.cumulative_sizes[part - 1] if part else 0
        dataset = dataset.datasets[part]
    return dataset, key


def _origins(dataset: Dataset) -> Iterator[Dataset]:
    """The datasets that a dataset's samples are of, through the same views, in their order."""
    get = getattr(type(dataset), "__getitem__", None)
    if get is Subset.__getitem__:
        yield from _origins(dataset.dataset)
    elif get is ConcatDataset.__getitem__:
        for part in dataset.datasets:
            yield from _origins(part)
    else:
        yield dataset


def _owner(dataset: Dataset) -> int:
    """The identity of a dataset's state, which accelerate's views of the dataset share."""
    return id(getattr(dataset, "__dict__", dataset))


def _checksum(data: bytes) -> int:
    return zlib.crc32(data) + _CHECKSUMS


def _is_plain(key: object) -> bool:
    if isinstance(key, (tuple, list)):
        return all(map(_is_plain, key))
    return isinstance(key, _PLAIN)


class _Counts:
    """Counts integers. Only the pages of those that came need memory, 4 bytes an integer."""

    PAGE_BITS = 10

    def __init__(self) -> None:
        self._pages: dict[int, array[int]] = {}

    def add(self, key: int) -> int:
        """Count ``key`` once more, and return how often it had come before."""
        number = key >> self.PAGE_BITS
        place = key & ((1 << self.PAGE_BITS) - 1)
        page = self._pages.get(number)
        if page is None:
            page = self._pages[number] = array("I", bytes(4 << self.PAGE_BITS))
        before = page[place]
        page[place] = before + 1
        return before


class Repeats:
    """Names the samples of an epoch by the keys of a sampler, and counts how often each came.

    The name of a sample is its place in the dataset that it is of, whatever views of the dataset
    the sampler's keys are for:

    =========================  =====================================
    key                        name
    =========================  =====================================
    ``7``                      7
    ``-1``, of 100 samples     99
    ``7`` of a ``Subset``      its entry 7, in the dataset within
    the first one in the       0 + 2**40: datasets that a
    second dataset joined      ``ConcatDataset`` joins number alike
    ``"n0144/7.jpg"``          a checksum, which is negative
    an object                  none
    =========================  =====================================

    Example:
        >>> counted = Repeats(Subset(dataset, [5, 8]))
        >>> counted.add([0, 1])  # the names, and no repeats
        (array('q', [5, 8]), ())
        >>> counted.add([1, 0, 1])
        (array('q', [8, 5, 8]), array('q', [1, 1, 2]))
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._counts: dict[int, _Counts] = {}  # by owner
        self._lengths: dict[int, int] = {}  # by owner; 0 if the dataset has none
        self._others: Counter[Hashable] = Counter()  # by owner and key, which is no integer
        # By owner: a ConcatDataset may join one dataset in several parts.
        owners = dict.fromkeys(map(_owner, _origins(dataset)))
        self._numbers = {owner: number for number, owner in enumerate(owners)}

    def add(self, keys: Iterable[object]) -> tuple[Sequence[int], Sequence[int]]:
        """The name of each sample, and how often the epoch has had the sample before.

        Names are empty if a key has none, repeats are empty if all are 0.
        """
        names = array("q")
        repeats = array("q")
        known = True
        for key in keys:
            name, repeat = self._add(key)
            known = known and name is not None
            names.append(0 if name is None else name)
            repeats.append(repeat)
        return names if known else (), repeats if any(repeats) else ()

    def _add(self, key: Any) -> tuple[int | None, int]:
        dataset = self._dataset
        try:
            dataset, key = _origin(dataset, key)
            owner = _owner(dataset)
            place = self._place(dataset, owner, operator.index(key))
        except (IndexError, TypeError):
            return self._add_other(dataset, key)
        counts = self._counts.setdefault(owner, _Counts())
        name = place + self._numbers.get(owner, 0) * _DATASET
        return name if abs(name) < 1 << 62 else None, counts.add(place)

    def _place(self, dataset: Dataset, owner: int, key: int) -> int:
        """The key, counted from the dataset's beginning."""
        if key >= 0:
            return key
        if owner not in self._lengths:
            self._lengths[owner] = 0
            with suppress(Exception):  # whatever its __len__ raises
                self._lengths[owner] = len(dataset)
        return key + self._lengths[owner]

    def _add_other(self, dataset: Dataset, key: object) -> tuple[int | None, int]:
        name = _checksum(repr(key).encode()) if _is_plain(key) else None
        place = (_owner(dataset), key)
        try:
            before = self._others[place]
        except TypeError:  # a key without a hash is not counted
            return name, 0
        self._others[place] = before + 1
        return name, before


# --- Samples of a batch: in the process that packs it ---


@dataclass(slots=True)
class Sample:
    """What the random parameters of a sample come from, besides seed and epoch.

    Example:
        The sampler gives key 7, and the epoch has had sample 7 twice: ``name=7, repeat=2``. With
        ``batch_size=None`` key 7 gives a whole batch: its third sample has ``name=7, part=2``. An
        iterable dataset gives the same bytes three times, without a number: the last sample has
        the checksum of these as its name, and ``same=2``.
    """

    first: EncodedImage  # the first image of the sample that was packed
    name: int
    # Which sample of an item that holds several. Below 0: which image of a sample whose images are
    # sampled one by one.
    part: int = 0
    same: int = 0  # how many samples before it in its batch have the same name and repeat
    repeat: int = 0  # how often the epoch has had the sample before
    size: Size | None = None  # (height, width) of its first image with a good header

    def leading_size(self, size: Size) -> Size:
        """The size that all images of the sample sample for: that of the first one.

        ``size`` is that of the image that asks. Images with a bad header must not ask.
        """
        if self.size is None:
            self.size = size
        return self.size


def own_name(image: EncodedImage) -> int:
    """The name that an image gives its sample: its index, or a checksum of its path or bytes."""
    if image.index >= 0:
        return image.index
    return _checksum(os.fsencode(image.path) if image.path else image.data)


class BatchSamples:
    """The samples of one batch, whose images may be packed in several calls.

    Args:
        given: what the collate function got: a list of samples, or one item that the dataset made;
            None if that is not known.
        names: of the samples or of the item; empty if they are not known.
        repeats: of the same; empty if there are none.

    Attributes:
        alike: an image that nothing tells from the image of another sample; None without any.
        twice: an image that its sample holds twice; None without any.
    """

    def __init__(
        self, given: object = None, names: Sequence[int] = (), repeats: Sequence[int] = ()
    ) -> None:
        self.alike: EncodedImage | None = None
        self.twice: EncodedImage | None = None
        self._listed = isinstance(given, list)
        self._is_item = given is not None and not self._listed
        self._given: list[Any] = []
        if isinstance(given, list):
            self._given = given
        elif given is not None:
            self._given = [given]
        self._names = names
        self._repeats = repeats
        self._known: dict[Hashable, Sample] = {}
        self._same: Counter[Hashable] = Counter()
        self._first: dict[int, EncodedImage] = {}  # by the name that the image gave itself

    @cached_property
    def _owners(self) -> dict[int, tuple[int, int]]:
        """By an image's identity: the position of its sample, and which image of it this is.

        The position is -1 for an image of several samples.
        """
        owners: dict[int, tuple[int, int]] = {}
        for position, sample in enumerate(self._given):
            for place, image in enumerate(walk(sample).images):
                known, first = owners.get(id(image), (position, place))
                owners[id(image)] = (position if known == position else -1), first
        return owners

    def positions(self, images: Sequence[EncodedImage]) -> list[int]:
        """The position of each image's sample; -1 for an image that the collate function made."""
        return [self._owners.get(id(image), (-1, 0))[0] for image in images]

    def of(self, images: Sequence[EncodedImage]) -> list[Sample]:
        """The sample of each image of a call."""
        found = []
        for identity, image in zip(self._identities(images), images, strict=True):
            sample = self._known.get(identity)
            if sample is None:
                sample = self._meet(identity, image, len(images))
            elif not image._apart and sample.first is not image:
                self.twice = image if sample.first.data == image.data else self.twice
            place = self._owners.get(id(image), (-1, 0))[1] if image._apart else 0
            found.append(
                sample if place == 0 else replace(sample, part=sample.part - place, size=None)
            )
        return found

    def _identities(self, images: Sequence[EncodedImage]) -> list[Hashable]:
        """What images of one sample have in common: its position, or else what they say."""
        if self._is_item:  # its lists have an entry for each sample
            return list(range(len(images)))
        positions: Sequence[int] = range(len(images))
        if self._listed:
            positions = self.positions(images)
            if len(self._given) == len(images):  # a collate function's new ones keep the order
                positions = [i if p < 0 else p for i, p in enumerate(positions)]
        identities: list[Hashable] = []
        here = Counter[Hashable]()
        for position, image in zip(positions, images, strict=True):
            if position >= 0 and (self._listed or image.index < 0):
                identities.append(position)
                continue
            name = (own_name(image), image.path if self._listed else "")
            identities.append((*name, here[name]))
            here[name] += 1
        return identities

    def _meet(self, identity: Hashable, image: EncodedImage, images: int) -> Sample:
        """Make the sample of an image that is the first one of it, in a call of ``images``."""
        position = identity if isinstance(identity, int) else None
        count = len(self._given) if self._listed else images
        repeat = self._repeat(position, count)
        if position is not None and len(self._names) == count:
            sample = Sample(image, self._names[position], repeat=repeat)
        elif position is not None and len(self._names) == 1:
            sample = Sample(image, self._names[0], part=position, repeat=repeat)
        else:
            sample = self._named_by_itself(image, repeat)
        self._known[identity] = sample
        return sample

    def _repeat(self, position: int | None, count: int) -> int:
        if len(self._repeats) == 1:
            return self._repeats[0]
        if position is not None and len(self._repeats) == count:
            return self._repeats[position]
        return 0

    def _named_by_itself(self, image: EncodedImage, repeat: int) -> Sample:
        name = own_name(image)
        if name not in self._first:
            self._first[name] = image
        elif is_alike(self._first[name], image):
            self.alike = image
        place = (name, image.path, repeat)  # datasets that were concatenated may number alike
        self._same[place] += 1
        return Sample(image, name, same=self._same[place] - 1, repeat=repeat)

    def latest(self) -> EncodedImage | None:
        """The last image that had to name its sample itself."""
        return next(reversed(self._first.values()), None)


def is_alike(first: EncodedImage, second: EncodedImage) -> bool:
    """Whether two images with one name may be of different samples."""
    if first.index >= 0:
        return bool(first.data != second.data)  # else the sample came again
    return not first.path


def keys_of(samples: Sequence[Sample], seed: int, epoch: int, rank: int) -> Keys:
    """``(N,)``, one key a sample: a function of seed, epoch, sample and repeat in any batch.

    ``rank`` is 0 unless other ranks may be given the same samples.
    """
    parts = [(sample.name, sample.part, sample.same, sample.repeat) for sample in samples]
    name, part, same, repeat = np.array(parts, dtype=np.int64).reshape(-1, 4).T
    keys = fold(fold(fold(fold(seed, epoch), name), part), same)
    numbers = repeat + (rank << 32)
    return np.asarray(np.where(numbers, fold(keys, -numbers), keys))


class Origin:
    """Seed and epoch that random parameters come from.

    Persistent workers read them in shared memory. They are written through NumPy: a tensor that was
    made in inference mode cannot be written to outside of it.
    """

    def __init__(self, seed: int, epoch: int = 0) -> None:
        self._numbers = torch.empty(2, dtype=torch.int64, device="cpu")
        self.set(seed, epoch)

    def share(self) -> None:
        """Let workers that begin from now on see what is set later."""
        self._numbers.share_memory_()

    def set(self, seed: int, epoch: int) -> None:
        self._numbers.numpy()[:] = np.array([seed & (2**64 - 1), epoch & (2**64 - 1)], np.uint64)

    @property
    def seed(self) -> int:
        """In 0 to 2**64 - 1, as ``torch.initial_seed()`` gives it."""
        return int(self._numbers.numpy()[0]) & (2**64 - 1)

    @property
    def epoch(self) -> int:
        return int(self._numbers.numpy()[1])
