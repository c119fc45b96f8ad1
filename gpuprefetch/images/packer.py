"""In the workers, images become a batch for the device: headers, draws, decoding, a plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from gpuprefetch.images.samples import (
    BatchSamples,
    Origin,
    Sample,
    is_alike,
    keys_of,
    own_name,
)
from gpuprefetch.images.slab import Buffer, share
from gpuprefetch.images.targets import follow, followers, images_of
from gpuprefetch.lists.refused import require_fixed_size
from gpuprefetch.policies.per_image import PerImage
from gpuprefetch.transforms.head import Head
from gpuprefetch.transforms.launch import Launches, plan_rows
from gpuprefetch.transforms.random import Keys, head_keys
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
    origin: Origin  # of random parameters
    share: torch.Tensor  # in shared memory, of the baseline JPEGs that are decoded here
    # Whether the result is made here, as without a device: a worker runs its share of it in one
    # thread, and in the loop's process many threads would wait for cores that the workers have.
    finishes: bool = False
    late: bool = False  # whether the collate function runs after the transforms
    moves: bool = False  # whether a transform moves pixels
    # Of each view what workers draw for, and run on its finished images if there are some here.
    programs: tuple[PerImage | None, ...] = ()
    rank: int = 0  # of this process among those that may be given the same samples, else 0
    draws: bool = False  # whether any transform has random parameters
    _last: float = field(init=False, default_factory=time.perf_counter)
    _before: EncodedImage | None = field(init=False, default=None)  # the last that named itself

    def keys(self, samples: Sequence[Sample]) -> Keys:
        """``(N,)``, what the random parameters of each sample come from."""
        return keys_of(samples, self.origin.seed, self.origin.epoch, self.rank)

    def alike(self, samples: BatchSamples) -> EncodedImage | None:
        """An image that nothing tells from that of another sample, in the batch or before it."""
        before, latest = self._before, samples.latest()
        self._before = latest
        if samples.alike is not None or before is None or latest is None:
            return samples.alike
        same = own_name(before) == own_name(latest)
        return latest if same and is_alike(before, latest) else None

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
    """Packs the images of one batch, in one call or in several."""

    def __init__(
        self, packer: Packer, samples: BatchSamples | None = None, *, following: bool = False
    ) -> None:
        self._packer = packer
        self._samples = BatchSamples() if samples is None else samples
        self._following = following
        self._share = float(packer.share)  # one for all of it: the balancer may change it meanwhile

    def __call__(self, images: Sequence[EncodedImage]) -> PreparedImages:
        """Prepare images: read their headers, draw, decode some of them, pack all, plan."""
        packer, began = self._packer, time.perf_counter()
        headers = Headers(images, apply_exif=packer.apply_exif)
        samples = self._samples.of(images)
        keys = packer.keys(samples)
        rows = self._draw(images, samples, keys, headers)
        known = {
            "share": self._share,
            "samples": self._samples.positions(images),
            "names": np.array([sample.name for sample in samples], dtype=np.int64),
            "keys": keys,
        }
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
        if packer.draws:
            batch.remarks |= self._remarks()
        return batch

    def _remarks(self) -> dict[str, str]:
        """What the user should know of random parameters that images share."""
        remarks = {}
        if (alike := self._packer.alike(self._samples)) is not None:
            remarks["alike"] = _ALIKE.format(alike)
        if (twice := self._samples.twice) is not None:
            remarks["twice"] = _TWICE.format(twice)
        return remarks

    def follow(self, given: Any, names: Sequence[int], repeats: Sequence[int]) -> Any:
        """Move boxes, masks and points as their image will be; the samples, which are to be packed.

        ``given`` is what the collate function is to get, with names and repeats of its samples.
        """
        packer = self._packer
        self._samples = BatchSamples(given, names, repeats)

        def draw(images: Sequence[EncodedImage]) -> tuple[Any, Any, dict[int, str]]:
            headers = Headers(images, apply_exif=packer.apply_exif)
            samples = self._samples.of(images)
            leaders = _leaders(samples, headers)
            rows = head.draw(headers.sizes, head_keys(packer.keys(samples)), leaders)
            return rows, headers.sizes, headers.errors

        head, *others = packer.heads
        if others and images_of(given) and followers(given):
            raise ValueError(
                "Views gives several pictures of an image, and boxes, masks and points can follow "
                "one. Return plain tensors, as mask.as_subclass(torch.Tensor), or leave them out."
            )
        followed = given if others else follow(given, head.size, draw)
        if followed is not given:
            self._following = True
            self._samples = BatchSamples(followed, names, repeats)
        return followed

    def _draw(
        self,
        images: Sequence[EncodedImage],
        samples: Sequence[Sample],
        keys: Keys,
        headers: Headers,
    ) -> list[Any]:
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
            leaders = _leaders(samples, headers)
            rows = [
                head.draw(headers.sizes, head_keys(keys, view), leaders)
                for view, head in enumerate(packer.heads)
            ]
        for each, size in zip(rows, packer.sizes, strict=True):
            check_rows(each, headers.sizes, size)
        return rows


_ALIKE = (
    "Nothing tells some samples apart, such as that of {!r}: they have the same random parameters "
    "in every batch. Let the dataset return EncodedImage(data, index, path) with the number of the "
    "sample as index."
)


_TWICE = (
    "A sample holds one file twice, {!r}, and its pictures are equal: all images of a sample have "
    "the same random parameters. For views that are sampled apart let it hold the file once, and "
    "give DataPrefetcher(transforms=gpuprefetch.Views([...], [...]))."
)


def _leaders(samples: Sequence[Sample], headers: Headers) -> Ints:
    """``(N, 2)``, for each image the size of the first one of its sample."""
    leaders = headers.sizes.copy()
    for position, sample in enumerate(samples):
        if position in headers.errors:  # its size is made up
            continue
        if sample.size is None:
            height, width = leaders[position].tolist()
            sample.size = height, width
        leaders[position] = sample.size
    return leaders
