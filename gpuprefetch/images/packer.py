"""In the workers, images become a batch for the device: headers, draws, decoding, a plan."""

from __future__ import annotations

import os
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from gpuprefetch.images.bad import name_of
from gpuprefetch.images.encoded import EncodedImage, PreparedImages
from gpuprefetch.images.header import ImageHeader, blank, decode_cpu, read_header
from gpuprefetch.images.host_memory import memory_for, no_memory
from gpuprefetch.images.plan import lay_out, readable
from gpuprefetch.images.slab import Buffer, share
from gpuprefetch.images.targets import follow, followers, images_of
from gpuprefetch.transforms.head import Head, require_fixed_size
from gpuprefetch.transforms.launch import Launches, plan_rows
from gpuprefetch.transforms.per_image import PerImage
from gpuprefetch.transforms.random import Keys, fold
from gpuprefetch.transforms.reference import Doubles, Ints, check_rows, finished_row, resample_uint8

# Up to this many pixels for each of the result, a decoded image is left to the GPU to resample: to
# copy them takes less of a core than to resample them there.
SHIPPED = 4
# libjpeg can divide the sides of a JPEG by these. Of 12 megapixels it takes 75, 49 and 39 ms then,
# and 98 for the whole. Where KEPT pixels are left for each of the result along both axes, that is
# 0.1 to 0.6 levels away on average. The GPU resamples it: that holds for DIVIDED times the result's
# pixels, which a core would take longer for than it has saved.
DIVISORS, KEPT, DIVIDED = (2, 4, 8), 2, 24
# Without a fixed size: decoded bytes for each byte of a file that a batch has room for before the
# decode. Photos have 5 to 50. Flat colors have up to 1,000: they are decoded first, and copied.
BELIEVED = 64
# Which axes (y, x) of the stored image are mirrored, for EXIF orientations 1 to 4 and 5 to 8; the
# latter change rows and columns before that.
_MIRRORED = np.array([(False, False), (False, True), (True, True), (True, False)] * 2)


# Stands in for a header that could not be read; large, so that no crop refuses it.
_UNREADABLE = ImageHeader("unknown", 2**15, 2**15, 1, False, ())


def _area(rows: Doubles) -> Ints:
    """The pixels of each image that its sampling may read."""
    area: Ints = np.diff(rows[:, :, 2:4].astype(int)).prod(axis=(1, 2))
    return area


class Headers:
    """What the headers of N images say."""

    def __init__(self, images: Sequence[EncodedImage], *, apply_exif: bool) -> None:
        self.each = [_UNREADABLE] * len(images)
        self.errors: dict[int, str] = {}  # position -> why the image cannot be decoded
        # Pictures that were decoded before there was room for them: see Packer.decode_first().
        self.early: dict[int, torch.Tensor] = {}
        for i, image in enumerate(images):
            if image._fault:
                self.errors[i] = image._fault
                continue
            try:
                self.each[i] = read_header(image.data, oriented=apply_exif)
            except ValueError as error:
                self.errors[i] = str(error)
            except MemoryError as error:
                raise no_memory(f"the header of {name_of(image.index, image.path)}") from error
        self.whole = np.array([i not in self.errors for i in range(len(images))])
        # EXIF's; 1 where it is not to be applied. The sizes are those after it.
        self.orientation = np.array([h.orientation if apply_exif else 1 for h in self.each])
        sizes = np.array([(h.height, h.width) for h in self.each], dtype=np.int64)
        self.sizes = np.where(self.orientation[:, None] >= 5, sizes[:, ::-1], sizes)


def _remark_on_clipped(images: Sequence[EncodedImage], headers: Headers) -> dict[str, str]:
    """A remark on the first picture whose values PIL clips to 0 to 255."""
    for image, header in zip(images, headers.each, strict=True):
        if header.clipped:
            name = name_of(image.index, image.path)
            return {
                "clipped": f"There are more than 8 bits a pixel in {name}, of PIL's mode "
                f'{header.clipped}. As in PIL\'s convert("RGB"), values above 255 become 255 and '
                "fractions are cut off: pictures of 16 bits come out white, and those in [0, 1] "
                "black. Decode such files in the dataset, and return a tensor divided by their "
                "largest value: "
                "torch.from_numpy(np.array(Image.open(path), np.float32) / 65535)"
                ".expand(3, -1, -1)."
            }
    return {}


@dataclass(slots=True)
class Packer:
    """Prepares batches of encoded images for the device; what is the same for all of them."""

    heads: tuple[Head, ...]  # the fused transforms of each view
    on_gpu: bool  # whether baseline JPEGs are left to the GPU
    apply_exif: bool
    seed: int
    epoch: torch.Tensor
    share: torch.Tensor  # in shared memory, of the baseline JPEGs that are decoded here
    # Whether the result is made here, as without a device: a worker runs its share of it in one
    # thread, and in the loop's process many threads would wait for cores that the workers have.
    finishes: bool = False
    late: bool = False  # whether the collate function runs after the transforms
    moves: bool = False  # whether a transform moves pixels
    # Of each view what workers draw for, and run on its finished images if there are some here.
    programs: tuple[PerImage | None, ...] = ()
    rank: int = 0  # of this process among those that may be given the same samples, else 0
    _last: float = field(init=False, default_factory=time.perf_counter)

    def read_seconds(self, images: Sequence[EncodedImage]) -> float:
        """What the dataset took; 0 for images that it has kept from before the last batch."""
        made = [image._made for image in images]
        if len(made) < 2 or min(made) < self._last:
            return 0.0
        return (max(made) - min(made)) * len(made) / (len(made) - 1)

    def divide(self, headers: Headers, files: Ints, share: float) -> Any:
        """``(N,)`` bool, which images are decoded here: what the GPU does not take, and a share."""
        # The files of fewest bytes. One costs the GPU about the same whatever its size and a core
        # in proportion to it: 30 % of ImageNet's files make 12 % of the cores' work.
        chosen = np.array([not (header.gpu and self.on_gpu) for header in headers.each])
        for_gpu = np.flatnonzero(~chosen)
        count = int(share * len(for_gpu) + 0.5)
        chosen[for_gpu[np.argsort(files[for_gpu], kind="stable")[:count]]] = True
        if not self.sizes:  # no sampling that could turn the picture
            chosen |= headers.orientation != 1
        return chosen & headers.whole

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """``(height, width)`` of each view's result; none where it has no fixed size."""
        return [head.size for head in self.heads if head.size is not None]

    def shrink(self, headers: Headers, ours: Any, rows: list[Any]) -> Ints:
        """By what the sides of each image are divided as we decode it; ``rows`` are made to fit."""
        divisors, head = np.ones(len(ours), dtype=np.int64), self.heads[0]
        smooth = head.antialias and head.interpolation != "nearest"
        if not (smooth and self.on_gpu and self.sizes and len(rows) == 1):
            return divisors
        most = np.abs(rows[0][:, :, 1]).min(axis=1) / KEPT
        able = ours & np.array([header.gpu for header in headers.each])
        for number in DIVISORS:
            # A picture that is turned after that has its first pixel at the other end.
            fits = (headers.orientation == 1) | (headers.sizes % number == 0).all(axis=1)
            divisors[able & fits & (number <= most)] = number
        if (divisors == 1).all():  # as where the GPU decodes all
            return divisors
        by, divided = divisors[:, None], rows[0].copy()
        divided[..., 0] = (divided[..., 0] + 0.5) / by - 0.5
        divided[..., 1] /= by
        divided[..., 2], divided[..., 3] = divided[..., 2] // by, -(-divided[..., 3] // by)
        divisors[_area(divided) > DIVIDED * prod(self.sizes[0])] = 1
        rows[0] = np.where(divisors[:, None, None] > 1, divided, rows[0])
        return divisors

    def become(self, sizes: Ints, rows: Sequence[Any], divisors: Ints) -> tuple[Any, Any]:
        """Which decoded images become the crop that is sampled, and the pixels of each."""
        if not self.sizes:
            return np.zeros(len(sizes), dtype=bool), sizes.prod(axis=1)
        finished = sum(map(prod, self.sizes))
        area = _area(rows[0])
        few = (area <= SHIPPED * finished) | (divisors > 1)
        crops = (0 < area) & few & self.on_gpu & (len(rows) == 1)
        return crops, np.where(crops, area, finished)

    def decode(self, image: EncodedImage, header: ImageHeader, divisor: int = 1) -> torch.Tensor:
        """Decode an image. A bad file is a ValueError, and too little memory a MemoryError."""
        name, size = name_of(image.index, image.path), 3 * header.height * header.width
        pixels = f"{header.width} x {header.height} pixels, {readable(size)} decoded"
        with memory_for(f"a picture of {pixels}: {name}"):
            return decode_cpu(image.data, header, apply_exif=self.apply_exif, divisor=divisor)

    def decode_first(
        self, images: Sequence[EncodedImage], headers: Headers, files: Ints, ours: Any
    ) -> Any:
        """Decode what claims to be out of proportion to its bytes; which images are still ours.

        Without a fixed size the batch has room for whole pictures, and shared memory that is full
        ends the run. So nothing is believed that a file of that length seldom holds.
        """
        claims = 3 * headers.sizes.prod(axis=1)
        for i in np.flatnonzero(ours & (claims > BELIEVED * files)).tolist():
            try:
                headers.early[i] = self.decode(images[i], headers.each[i])
            except ValueError as error:
                headers.errors[i], headers.whole[i] = str(error), False
        return ours & headers.whole

    def allocate(
        self, images: Sequence[EncodedImage], headers: Headers, rows: list[Any], **known: Any
    ) -> tuple[PreparedImages, Any, Ints]:
        """Lay out a batch of which we decode a share; which images become crops, their divisors."""
        files = np.array([len(image.data) for image in images])
        ours = self.divide(headers, files, known["share"])
        if not self.sizes:
            ours = self.decode_first(images, headers, files, ours)
        divisors = self.shrink(headers, ours, rows)
        crops, pixels = self.become(headers.sizes, rows, divisors)
        lengths = np.where(ours, 3 * pixels, files) * headers.whole
        # Files with the most work lie first: nvJPEG gives the engines files in turns, and waits for
        # one that is not through with the file before. On an H200, beside training, an image takes
        # 102 us so, and 110 in any order. Decoded ones lie as they come: see plan.uploads().
        order = np.lexsort((np.where(ours, 0, -headers.sizes.prod(axis=1)), ours))
        stops = np.empty_like(lengths)
        stops[order] = np.cumsum(lengths[order])
        boundary, size = int(lengths[~ours].sum()), int(lengths.sum())
        orientation = np.where(ours, 1, headers.orientation)  # what is decoded here is turned here
        mirrored = _MIRRORED[orientation - 1]
        for each in rows if self.sizes else ():  # of upright pictures: now of the stored ones
            length = headers.sizes[mirrored]
            origin, step, low, high, first, last = each[mirrored].T
            turned = [length - 1 - origin, -step, length - high, length - low, first, last]
            each[mirrored] = np.stack(turned, axis=1)
        fused = self.on_gpu and bool(self.sizes)
        room = len(rows) * Launches.room(len(images), 3) if fused else 0
        channels_last = self.heads[0].memory_format is torch.channels_last
        spans = np.stack([stops - lengths, stops], axis=1)
        batch = PreparedImages(
            buffer=Buffer.empty(size + room),
            boundary=boundary,
            encoded_bytes=size,
            spans=spans - np.where(ours, boundary, 0)[:, None],
            indices=np.array([image.index for image in images], dtype=np.int64),
            paths=[image.path for image in images],
            decoded=ours,
            sizes=headers.sizes,
            transposed=orientation >= 5,
            # As on the GPU; to turn a picture into planes takes a tenth of its decode.
            interleaved=fused or (self.finishes and channels_last),
            views=self.sizes if len(self.heads) > 1 else (),
            errors=headers.errors,
            rows=rows,
            **known,
        )
        return batch, crops, divisors

    def fill(
        self,
        images: Sequence[EncodedImage],
        headers: Headers,
        crops: Any,
        divisors: Ints,
        batch: PreparedImages,
    ) -> float:
        """Copy the files that are left to the device, and decode the others: seconds of that."""
        parts = batch.parts()
        for i in np.flatnonzero(headers.whole & ~batch.decoded).tolist():
            file, exif = images[i].data, headers.each[i].exif
            parts[i][:] = np.frombuffer(blank(file, exif) if exif else file, dtype=np.uint8)
        started = time.perf_counter()
        for i in np.flatnonzero(batch.decoded).tolist():
            picture = headers.early.pop(i, None)
            if picture is None:
                try:
                    picture = self.decode(images[i], headers.each[i], int(divisors[i]))
                except ValueError as error:
                    batch.errors[i], batch.decoded[i], batch.spans[i] = str(error), False, 0
                    continue
            own = [each[i] for each in batch.rows if each is not None]
            pictures = self._fit(picture, own, bool(crops[i]))
            if not batch.views:
                batch.sizes[i] = pictures[0].shape[-2:]
            first = 0
            for picture in pictures:
                picture = picture.permute(1, 2, 0) if batch.interleaved else picture
                part = parts[i][first : first + picture.numel()]
                part.reshape(picture.shape)[:] = picture.numpy()
                first += picture.numel()
        return time.perf_counter() - started

    def _fit(self, picture: torch.Tensor, rows: list[Any], crop: bool) -> list[torch.Tensor]:
        """What a decoded picture becomes; its samplings ``rows`` are made to fit that."""
        if not self.sizes:
            return [picture]
        if crop:
            (row,) = rows
            (top, left), (bottom, right) = row[:, 2:4].T.astype(int)
            row[:, [0, 2, 3]] -= row[:, 2:3]  # origin, low and high
            return [picture[:, top:bottom, left:right]]
        finished = []
        for head, size, row in zip(self.heads, self.sizes, rows, strict=True):
            way: Any = {"interpolation": head.interpolation, "antialias": head.antialias}
            finished.append(resample_uint8(picture, row, size, **way))
            row[:] = finished_row(size)
        return finished

    def plan(self, batch: PreparedImages) -> None:
        """Plan a batch, and put what its launches read into its buffer, after the pixels."""
        numbers = batch.numbers = [batch.encoded_bytes]
        if not self.on_gpu or not self.sizes:
            batch.calls, _ = lay_out(batch, self.sizes)
            return
        words = [
            plan_rows(
                each,
                batch.view_sizes(view),
                batch.transposed,
                self.sizes[view],
                head.interpolation,
                head.antialias,
            )
            for view, (head, each) in enumerate(zip(self.heads, batch.rows, strict=True))
        ]
        batch.calls, batch.tables = lay_out(batch, self.sizes, words)
        for head, table in zip(self.heads, batch.tables, strict=False):  # none in an empty plan
            given = Launches.numbers(table, head.colors)
            numbers.append(numbers[-1] + len(given))
            batch.buffer.tensor[numbers[-2] : numbers[-1]] = given
            table.words = None

    def finish(self, batch: PreparedImages) -> None:
        """Run the fused transforms here, where they are to."""
        if not self.finishes or not self.sizes:
            return
        ready = np.flatnonzero(batch.decoded)
        for view, (head, each) in enumerate(zip(self.heads, batch.rows, strict=True)):
            out = head.empty(len(batch), "cpu")
            program = self.programs[view] if self.programs else None
            if get_worker_info() is not None and program is None:
                share(out)  # torch would do so as it sends it
            if len(ready):
                pictures = batch.pictures(ready, batch.pixels, view=view)
                resampled: Any = {"dtype": out.dtype, "out": out, "positions": ready.tolist()}
                head.resample(pictures, each[ready], self.sizes[view], **resampled)
            batch.out.append(out)


class Packing:
    """Packs the images of one batch, in one call or in several; its repeats may not be known."""

    def __init__(
        self, packer: Packer, samples: Any = (), repeats: Any = (), *, following: bool = False
    ) -> None:
        self._packer, self._samples, self._repeats = packer, samples, repeats
        self._following = following
        self._share = float(packer.share)  # one for all of it: the balancer may change it meanwhile
        self._packed: Counter[Any] = Counter()  # calls that each sample was packed in

    def __call__(self, images: Sequence[EncodedImage]) -> PreparedImages:
        """Prepare images: read their headers, draw, decode some of them, pack all, plan."""
        packer, began = self._packer, time.perf_counter()
        headers = Headers(images, apply_exif=packer.apply_exif)
        rows = self._draw(images, headers)
        known = {"share": self._share, "samples": self._samples_of(images)}
        batch, crops, divisors = packer.allocate(images, headers, rows, **known)
        decoding = packer.fill(images, headers, crops, divisors, batch)
        packer.plan(batch)
        packer.finish(batch)
        batch.remarks |= _remark_on_clipped(images, headers)
        reading, ready = packer.read_seconds(images), int(batch.decoded.sum())
        packer._last = time.perf_counter()
        batch.counts = {
            "cpu_images": ready,
            "gpu_images": len(batch) - ready - len(batch.errors),
            "encoded_bytes": batch.encoded_bytes,
            "read_seconds": reading,
            "worker_decode_seconds": decoding,
            "collate_seconds": packer._last - began - decoding,
        }
        return batch

    def follow(self, samples: Any) -> tuple[Any, Packing]:
        """Move boxes, masks and points as their image will be; the samples, and what packs them."""
        packer = self._packer

        def draw(images: Sequence[EncodedImage]) -> tuple[Any, Any, dict[int, str]]:
            headers = Headers(images, apply_exif=packer.apply_exif)
            rows = head.draw(headers.sizes, self._keys(images))
            return rows, headers.sizes, headers.errors

        head, *others = packer.heads
        if others and images_of(samples) and followers(samples):
            raise ValueError(
                "Views gives several pictures of an image, and boxes, masks and points can follow "
                "one. Return plain tensors, as mask.as_subclass(torch.Tensor), or leave them out."
            )
        followed = samples if others else follow(samples, head.size, draw)
        if followed is samples:
            return samples, self
        return followed, Packing(packer, as_list(followed), self._repeats, following=True)

    def _draw(self, images: Sequence[EncodedImage], headers: Headers) -> list[Any]:
        """The sampling of each view: None where it has no fixed size."""
        packer = self._packer
        if len(packer.heads) > 1:
            for head in packer.heads:
                require_fixed_size(head, ())
        if not packer.sizes:
            return [None]
        if self._following:
            followed = [image._row for image in images if image._row is not None]
            if len(followed) < len(images):
                raise ValueError(
                    "The collate function made new EncodedImages, but boxes, masks or points have "
                    "been moved with those of the samples. Let it pass these on."
                )
            rows = [np.stack(followed)]
        else:
            keys = self._keys(images)
            rows = [
                head.draw(headers.sizes, fold(keys, -view) if view else keys)
                for view, head in enumerate(packer.heads)
            ]
        for each, size in zip(rows, packer.sizes, strict=True):
            check_rows(each, headers.sizes, size)
        return rows

    def _keys(self, images: Sequence[EncodedImage]) -> Keys:
        """One key per image, a function of (seed, epoch, sample, repeat) in whichever batch it is.

        Images of one sample differ; its repeats, where they are not known, within one batch only.
        """
        repeats, here = self._repeats_of(images), Counter[Any]()
        names, views, same = [], [], []
        for image, repeat in zip(images, repeats, strict=True):
            name = image.index
            if name < 0:
                name = zlib.crc32(os.fsencode(image.path) if image.path else image.data) - 2**33
            sample = name, image.path, repeat  # datasets that were concatenated may number alike
            names.append(name)
            views.append(self._packed[sample])
            same.append(here[sample])
            here[sample] += 1
        self._packed.update(here.keys())
        keys = fold(self._packer.seed, int(self._packer.epoch))
        keys = fold(fold(fold(keys, names), views), same)
        numbers = np.array(repeats, dtype=np.int64)
        # Those from 0 on are the transforms'.
        return fold(np.where(numbers, fold(keys, -numbers), keys), 0)

    @cached_property
    def _owners(self) -> dict[int, int]:
        """The sample of each image, by its identity; -1 where it is of several."""
        owners: dict[int, int] = {}
        for i, sample in enumerate(self._samples):
            for image in map(id, images_of(sample)):
                owners[image] = i if owners.get(image, i) == i else -1
        return owners

    def _samples_of(self, images: Sequence[EncodedImage]) -> list[int]:
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
        apart = self._packer.rank << 32
        return [apart + (self._repeats[i] if i >= 0 else 0) for i in owners]


def as_list(samples: Any) -> Sequence[Any]:
    """What a dataset gave: a list of samples, or one sample."""
    return samples if isinstance(samples, list) else [samples]
