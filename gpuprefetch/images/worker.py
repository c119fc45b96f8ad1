"""What a worker does with encoded images: headers, random parameters, its share of decoding.

It runs inside the DataLoader's own collate, in worker processes, and never touches CUDA.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from gpuprefetch.core.nested import map_leaves, objects
from gpuprefetch.images.apart import comes_of_mixing, set_apart
from gpuprefetch.images.encoded import (
    EncodedImage,
    EncodedImages,
    Layout,
    is_encoded,
    pack,
    packing,
)
from gpuprefetch.images.guard import UndecodedError, end_reading
from gpuprefetch.images.header import ImageHeader, blank, decode_cpu, read_header
from gpuprefetch.images.plan import lay_out
from gpuprefetch.images.slab import by_value
from gpuprefetch.images.targets import (
    FollowedImage,
    fate,
    follow,
    images_of,
    mark,
    refuse_unfollowed,
)
from gpuprefetch.transforms.head import Head
from gpuprefetch.transforms.launch import Coloring, Launches, plan_rows, resample
from gpuprefetch.transforms.random import Keys, fold
from gpuprefetch.transforms.reference import check_rows, finished_row, resample_uint8

# Added to the workers' priority number: the training thread launches kernels, they only decode.
NICENESS = 10
# Up to this many pixels for each of the result, a decoded image is left to the GPU to resample: to
# copy them takes less of a core than to resample them there.
SHIPPED = 4
# Which axes (y, x) of the stored image are mirrored, for EXIF orientations 1 to 4 and 5 to 8; the
# latter change rows and columns before that.
_MIRRORED = np.array([(False, False), (False, True), (True, True), (True, False)] * 2)

# Of the first batches little is decoded by the workers, if it is balanced, later perhaps all: what
# random crops leave of ImageNet's photos takes three times the bytes of their files.
GROWTH = 3

# Stands in for a header that could not be read; large, so that no crop refuses it.
_UNREADABLE = ImageHeader("unknown", 2**15, 2**15, 1, False, ())


# Repeats of the batch that this process is about to read, by the token of its stage.
_expected: dict[bytes, Sequence[int]] = {}


def sample_keys(
    seed: int,
    epoch: int,
    images: Sequence[EncodedImage],
    packed: Counter[Any],
    repeats: Sequence[int] | None = None,
) -> Keys:
    """One key per image, a function of (seed, epoch, sample, repeat) in whichever batch it is.

    Several images of one sample get different parameters. So do the repeats of a sample, as
    samplers with replacement or repeated augmentation give it; where their numbers are not known,
    only within one batch.

    Args:
        seed: of all random parameters.
        epoch: likewise.
        images: that are packed together.
        packed: how often each sample was in what has been packed of the batch so far; counts on.
        repeats: of each image's sample, which repeat this is; None where that is not known.
    """
    here: Counter[Any] = Counter()
    names, views, same = [], [], []
    known = repeats or [0] * len(images)
    for image, repeat in zip(images, known, strict=True):
        name = image.index
        if name < 0:
            name = zlib.crc32(os.fsencode(image.path) if image.path else image.data) - 2**33
        sample = name, image.path, repeat  # datasets that were concatenated may number alike
        names.append(name)
        views.append(packed[sample])
        same.append(here[sample])
        here[sample] += 1
    packed.update(here.keys())
    keys = fold(fold(fold(fold(seed, epoch), names), views), same)
    numbers = np.array(known, dtype=np.int64)
    return np.where(numbers, fold(keys, -numbers), keys)  # those from 0 on are the transforms'


@dataclass(slots=True)
class Packer:
    """Prepare a batch of encoded images for the device.

    Attributes:
        head: the fused transforms whose parameters are drawn here.
        on_gpu: whether baseline JPEGs are left to the GPU.
        apply_exif: whether pictures are turned upright.
        seed: of all random parameters.
        epoch: likewise.
        share: ``(1,)`` float64 in shared memory, of the baseline JPEGs that are decoded here.
        output: dtype and memory format of the result, where it is made here; None leaves that to
            the device. Without one it is made here: a worker runs its share of it in one thread,
            and in the loop's process many threads would wait for cores that the workers have.
        growth: bytes to expect of later batches for each byte of their files; 0 for no more than
            this one takes.
        dtype: of the result on a device.
        late: ``(1,)`` bool in shared memory, whether the collate function runs after the
            transforms. One that mixes images sets it where it first meets encoded ones.
        moves: whether a transform, fused or behind the head, moves pixels.
        rank: of this process among those that may be given the same samples, else 0.
    """

    head: Head
    on_gpu: bool
    apply_exif: bool
    seed: int
    epoch: torch.Tensor
    share: torch.Tensor
    output: tuple[torch.dtype, torch.memory_format] | None = None
    growth: int = 0
    dtype: torch.dtype = torch.float32
    late: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.bool))
    moves: bool = False
    rank: int = 0
    _share: float | None = field(init=False, default=None)
    _packed: Counter[Any] = field(init=False, default_factory=Counter)
    _samples: Sequence[Any] = ()
    _repeats: Sequence[int] = ()
    _owners: dict[int, int] | None = field(init=False, default=None)
    _last: float = field(init=False, default_factory=time.perf_counter)
    _following: bool = False

    def __call__(self, images: Sequence[EncodedImage]) -> EncodedImages:
        begin = time.perf_counter()
        epoch, share = int(self.epoch), self._share
        if share is None:
            self._share = share = float(self.share)
        keys = sample_keys(self.seed, epoch, images, self._packed, self._repeats_of(images))
        headers, orientation, sizes, errors = self._read(images)
        rows = self._draw(images, sizes, keys)
        for_gpu = np.array([header.gpu and self.on_gpu for header in headers])
        files = np.array([len(image.data) for image in images])
        on_cpu = ~for_gpu | self._smallest(files, for_gpu, share)
        if self.head.size is None:  # no sampling that could turn the picture
            on_cpu |= orientation != 1

        fused = self.on_gpu and self.head.size is not None
        # As on the GPU; to turn a picture into planes takes a tenth of its decode.
        interleaved = fused or (self.output is not None and self.output[1] == torch.channels_last)
        whole = np.array([i not in errors for i in range(len(images))])
        ours, decoded = on_cpu & whole, np.zeros(len(images), dtype=bool)
        crops, pixels = self._become(sizes, rows)
        layout = Layout(
            np.where(ours, 3 * pixels, files) * whole,
            ours,
            sizes.prod(axis=1),
            room=self.growth * int(files.sum()),
            behind=Launches.room(len(images), 3) if fused else 0,
        )

        def copy(i: int) -> None:
            file, exif = images[i].data, headers[i].exif
            layout.parts[i][:] = np.frombuffer(blank(file, exif) if exif else file, dtype=np.uint8)

        def decode(i: int) -> None:
            try:
                row = None if rows is None else rows[i]
                picture = self._decode(images[i], headers[i], row, bool(crops[i]))
            except (ValueError, RuntimeError) as error:
                errors[i], layout.spans[i] = str(error), 0
                return
            sizes[i], decoded[i] = picture.shape[-2:], True
            picture = picture.permute(1, 2, 0) if interleaved else picture
            layout.parts[i].reshape(picture.shape)[:] = picture.numpy()

        for i in np.flatnonzero(whole & ~ours).tolist():
            copy(i)
        started = time.perf_counter()
        for i in np.flatnonzero(ours).tolist():
            decode(i)
        seconds = time.perf_counter() - started
        orientation[decoded] = 1  # they have been turned upright
        transposed = orientation >= 5
        if rows is not None:
            _mirror(rows, sizes, _MIRRORED[orientation - 1])

        batch = pack(
            images,
            layout,
            decoded=decoded,
            sizes=sizes,
            transposed=transposed,
            interleaved=interleaved,
            rows=rows,
            errors=errors,
            samples=self._samples_of(images),
            prepared=True,
            epoch=epoch,
            share=share,
            read_seconds=self._read_seconds(images),
            decode_seconds=seconds,
        )
        if fused:
            assert self.head.size is not None
            way = (self.head.size, self.head.interpolation, self.head.antialias)
            words = plan_rows(rows, batch.sizes, transposed, *way)
            batch.plan = lay_out(batch, self.head.size, words)
            mean, std = self.head.mean, self.head.std
            batch.keep_numbers(Coloring(torch.uint8, self.dtype, mean, std))
        if self.output is not None and self.head.size is not None:
            batch.out = finish(batch, self.head, *self.output)
        self._last = time.perf_counter()
        batch.collate_seconds = self._last - begin - seconds
        return batch

    @staticmethod
    def _smallest(files: Any, where: Any, share: float) -> Any:
        """Our share of the images ``where`` the GPU could decode them: those of the fewest bytes.

        To decode one costs the GPU about the same whatever its size (small launches and copies) and
        a core in proportion to its bytes: 30 % of ImageNet's files make 12 % of the cores' work.
        """
        positions = np.flatnonzero(where)
        count = int(share * len(positions) + 0.5)
        chosen = np.zeros(len(files), dtype=bool)
        chosen[positions[np.argsort(files[positions], kind="stable")[:count]]] = True
        return chosen

    def _read_seconds(self, images: Sequence[EncodedImage]) -> float:
        """What the dataset took; 0 for images that it has kept from before the last batch."""
        made = [image._made for image in images]
        if len(made) < 2 or min(made) < self._last:
            return 0.0
        return (max(made) - min(made)) * len(made) / (len(made) - 1)

    def begin(self, samples: Sequence[Any] = (), repeats: Sequence[int] = ()) -> None:
        """Begin a batch of these samples, whose images may be packed in several calls.

        ``repeats`` says how often the epoch has had each of them before; empty is not known.
        """
        self._share = None  # one for all of them, as the balancer may change it meanwhile
        self._packed.clear()
        self._samples, self._repeats, self._owners = samples, repeats, None

    def _samples_of(self, images: Sequence[EncodedImage]) -> list[int]:
        if self._owners is None:  # looked for where there are images, not in every sample
            self._owners = {}
            for i, sample in enumerate(self._samples):
                for image in map(id, images_of(sample)):
                    self._owners[image] = i if self._owners.get(image, i) == i else -1
        return [self._owners.get(id(image), -1) for image in images]

    def _repeats_of(self, images: Sequence[EncodedImage]) -> list[int]:
        """Which repeat of its sample each image is of, apart from those of other ranks."""
        owners, count = [-1] * len(images), len(self._repeats)
        if count == 1:
            owners = [0] * len(images)
        elif count and count == len(self._samples):
            owners = self._samples_of(images)
            if count == len(images):  # new ones of the collate function's keep the order
                owners = [i if owner < 0 else owner for i, owner in enumerate(owners)]
        apart = self.rank << 32
        return [apart + (self._repeats[i] if i >= 0 else 0) for i in owners]

    def follow(self, samples: Any) -> Any:
        """Samples with boxes, masks and points moved as the head is going to move their image."""

        def draw(images: Sequence[EncodedImage]) -> tuple[Any, Any, dict[int, str]]:
            _, _, sizes, errors = self._read(images)
            repeats = self._repeats_of(images)
            keys = sample_keys(self.seed, int(self.epoch), images, Counter(), repeats)
            return self.head.draw(sizes, fold(keys, 0)), sizes, errors

        followed = follow(samples, self.head.size, draw)
        self._following = followed is not samples
        return followed

    def _read(self, images: Sequence[EncodedImage]) -> tuple[Any, Any, Any, dict[int, str]]:
        """Headers, orientations ``(N,)``, sizes ``(N, 2)`` behind these, and errors."""
        headers, errors = [_UNREADABLE] * len(images), {}

        for i, image in enumerate(images):
            try:
                headers[i] = read_header(image.data)
            except ValueError as error:
                errors[i] = str(error)
        orientation = np.array([h.orientation if self.apply_exif else 1 for h in headers])
        sizes = np.array([(h.height, h.width) for h in headers], dtype=np.int64)
        upright = np.where(orientation[:, None] >= 5, sizes[:, ::-1], sizes)
        return headers, orientation, upright, errors

    def _draw(self, images: Sequence[EncodedImage], sizes: Any, keys: Keys) -> Any:
        if self.head.size is None:
            return None
        if self._following:
            followed: list[Any] = [i.row for i in images if isinstance(i, FollowedImage)]
            if len(followed) < len(images):
                raise ValueError(
                    "The collate function made new EncodedImages, but boxes, masks or points have "
                    "been moved with those of the samples. Let it pass these on."
                )
            rows = np.stack(followed)
        else:
            rows = self.head.draw(sizes, fold(keys, 0))
        check_rows(rows, sizes, self.head.size)
        return rows

    def _become(self, sizes: Any, rows: Any) -> tuple[Any, Any]:
        """Which images become the crop that their sampling reads, and pixels of what each does.

        Others become the result of their sampling, or where they have none stay what they are.
        """
        if rows is None or self.head.size is None:
            return np.zeros(len(sizes), dtype=bool), sizes.prod(axis=1)
        finished = prod(self.head.size)
        area = np.diff(rows[:, :, 2:4].astype(int)).prod(axis=(1, 2))
        crops = (0 < area) & (area <= SHIPPED * finished) & self.on_gpu
        return crops, np.where(crops, area, finished)

    def _decode(
        self, image: EncodedImage, header: ImageHeader, row: Any, crop: bool
    ) -> torch.Tensor:
        """Decode an image to what it becomes, and fit its sampling ``row`` to that."""
        picture = decode_cpu(image.data, header, apply_exif=self.apply_exif)
        if row is None or self.head.size is None:
            return picture
        if crop:
            (top, left), (bottom, right) = row[:, 2:4].T.astype(int)
            row[:, [0, 2, 3]] -= row[:, 2:3]  # origin, low and high
            return picture[:, top:bottom, left:right]
        way: Any = {"interpolation": self.head.interpolation, "antialias": self.head.antialias}
        picture = resample_uint8(picture, row, self.head.size, **way)
        row[:] = finished_row(self.head.size)
        return picture


def _end_with(parent: int) -> None:
    """End this process after its parent: torch's worker does not look while it writes to a pipe.

    A batch's message may be larger than a pipe holds, and a worker whose parent was killed would
    wait for a reader for ever.
    """
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def finish(
    images: EncodedImages, head: Head, dtype: torch.dtype, memory_format: torch.memory_format
) -> torch.Tensor:
    """Run the fused head on the CPU for what is decoded of a batch: ``(N, C, H, W)``."""
    assert images.rows is not None and head.size is not None
    ready = np.flatnonzero(images.decoded)
    shape = len(images), 3, *head.size
    out = torch.empty(shape, dtype=dtype, memory_format=memory_format)
    if len(ready):
        resample(
            images.views(ready, images.pixels),
            images.rows[ready],
            head.size,
            interpolation=head.interpolation,
            antialias=head.antialias,
            mean=head.mean,
            std=head.std,
            dtype=dtype,
            out=out,
            positions=ready.tolist(),
        )
    return out


def _mirror(rows: Any, sizes: Any, where: Any) -> None:
    """Rewrite the sampling of upright pictures for the stored ones, mirrored ``where`` it says."""
    length, (origin, step, low, high, first, last) = sizes[where], rows[where].T
    mirrored = [length - 1 - origin, -step, length - high, length - low, first, last]
    rows[where] = np.stack(mirrored, axis=1)


_ENCODED = (
    "Let the dataset return EncodedImage, as EncodedImageFolder does, or move torchvision's "
    "folders over with gpuprefetch.accelerate(loader)."
)
# What to do about what collate functions raise.
_HINTS = {
    r"PIL\.": _ENCODED,
    r"stack expects .* got \[\d+, \d+, \d+\]": f"Images get one size on the device. {_ENCODED}",
    "NoneType": "A sample holds None. In place of a row with a file's bytes return "
    "EncodedImage(bytes, index), and leave out what is None.",
    "EncodedImage": "Leave collate_fn out, or call torch's default_collate in it for the images.",
}


class Announced(list[Any]):
    """A batch of keys on its way to a worker, which unpickles them as what the sampler gave.

    A worker unpickles a batch right before it reads the samples, and only one at a time.
    """

    __slots__ = ("announced",)

    def __init__(self, keys: Any, listed: Sequence[Any], token: bytes, repeats: Any) -> None:
        super().__init__(listed)
        self.announced = keys, token, repeats

    def __reduce__(self) -> Any:
        return _announce, self.announced


def _announce(keys: Any, token: bytes, repeats: Sequence[int]) -> Any:
    _expected[token] = repeats
    return keys


@dataclass(slots=True)
class HostStage:
    """The collate function a prefetcher gives its loader: the user's, with our packing inside.

    Attributes:
        collate_fn: the user's.
        packer: packs encoded images.
        token: tells the stage apart from others, also in its copies in workers.
    """

    collate_fn: Callable[[Any], Any]
    packer: Packer
    token: bytes = field(default_factory=secrets.token_bytes)
    _settled: bool = False
    _home: int = field(default_factory=os.getpid)

    def expect(self, repeats: Sequence[int]) -> None:
        """Say of each sample of the batch to come how often the epoch has had it before."""
        _expected[self.token] = repeats

    def __call__(self, samples: Any) -> Any:
        # A worker of somebody else's may have a prefetcher of its own, without workers.
        in_worker = get_worker_info() is not None and os.getpid() != self._home
        if in_worker and not self._settled:
            self._settle()
        repeats = _expected.pop(self.token, ())
        self._begin(samples, repeats)
        samples = self.packer.follow(samples)
        self._begin(samples, repeats)
        try:
            batch = self._collated(samples, repeats)
        finally:
            self.packer.begin()  # keeps no samples
        return map_leaves(by_value, batch, is_encoded) if in_worker else batch

    def _collated(self, samples: Any, repeats: Sequence[int]) -> Any:
        with packing(self.packer):
            try:
                batch = self._collate(samples, repeats)
                if not images_of(batch):
                    if self.packer.moves:
                        refuse_unfollowed(batch, samples)
                    return batch
                batch, leaves = pack_lists(mark(batch, samples), self.packer)
            except (TypeError, RuntimeError) as error:
                for words, hint in _HINTS.items():
                    if re.search(words, str(error)):
                        error.add_note(hint)
                raise
        targets = fate(batch, samples)
        for images in packed_of(leaves):
            images.targets = targets
        return batch

    def _collate(self, samples: Any, repeats: Sequence[int]) -> Any:
        if not self.packer.late:
            try:
                return self.collate_fn(samples)
            except UndecodedError as error:
                if not (isinstance(samples, list) and comes_of_mixing(error)):
                    raise
            self.packer.late.fill_(True)
            self._begin(samples, repeats)  # what has been packed is packed anew
        return set_apart(samples)

    def _begin(self, samples: Any, repeats: Sequence[int]) -> None:
        self.packer.begin(samples if isinstance(samples, list) else [samples], repeats)

    def _settle(self) -> None:
        """Once in a worker: end with the parent, and let the training thread go first."""
        self._settled = True
        if self.packer.on_gpu:
            with contextlib.suppress(AttributeError):  # not on Windows
                os.nice(NICENESS)
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def encoded_leaves(batch: Any) -> list[EncodedImages]:
    """The packed encoded images of a batch."""
    return packed_of(objects(batch, is_encoded))


def packed_of(leaves: Iterable[Any]) -> list[EncodedImages]:
    """The packed encoded images among the leaves of a batch."""
    return [leaf for leaf in leaves if isinstance(leaf, EncodedImages)]


def pack_lists(batch: Any, packer: Packer) -> tuple[Any, list[Any]]:
    """Pack what a collate function of the user's left as images or lists of them.

    Returns:
        The batch, and its leaves that are no plain values.
    """

    def is_loose(leaf: Any) -> bool:
        return is_encoded(leaf) and not (isinstance(leaf, EncodedImages) and leaf.prepared)

    def pack_leaf(leaf: Any) -> Any:
        if not is_loose(leaf):
            return leaf
        return packer([leaf] if isinstance(leaf, EncodedImage) else list(leaf))

    if get_worker_info() is None:
        end_reading()
    leaves = list(objects(batch, is_encoded))
    if any(map(is_loose, leaves)):
        batch = map_leaves(pack_leaf, batch, is_encoded)
        leaves = list(objects(batch, is_encoded))
    return batch, leaves
