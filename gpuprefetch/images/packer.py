"""In a worker, images become a batch for the device: headers, sampling, decoding, a plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from gpuprefetch.core.nested import objects, select
from gpuprefetch.images.bad import name_of
from gpuprefetch.images.division import Made, Share, divide, of_stored, what_to_make
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.header import WHOLE, ImageHeader, Region, blank, decode_cpu
from gpuprefetch.images.headers import Headers, remark_on_clipped
from gpuprefetch.images.host_memory import memory_for
from gpuprefetch.images.joint import settle
from gpuprefetch.images.plan import lay_out, readable
from gpuprefetch.images.prepared import (
    Identities,
    PackedImages,
    Plan,
    PreparedImages,
    Regions,
    Report,
    Results,
    Stored,
)
from gpuprefetch.images.samples import BatchSamples, Origin, Sample, is_alike, keys_of, own_name
from gpuprefetch.images.slab import Buffer, into_shared_memory
from gpuprefetch.images.targets import Followed, Structure, follow
from gpuprefetch.images.walk import is_image, walk
from gpuprefetch.lists.refused import require_fixed_size
from gpuprefetch.policies.policy import Policy
from gpuprefetch.transforms.head import Head
from gpuprefetch.transforms.launch import Launches, plan_rows, with_places
from gpuprefetch.transforms.random import Keys, head_keys
from gpuprefetch.transforms.reference import Doubles, Ints, check_rows, finished_row, resample_uint8
from gpuprefetch.transforms.sampling import BoxesOf, Sampling, Size, Sizes, each_of, size_at

# Without a fixed size the buffer has room for whole pictures, and a header is believed if it claims
# at most this many decoded bytes for each byte of its file. Photos have 5 to 50. Flat colors have
# up to 1,000: they are decoded before there is a buffer, and copied.
BELIEVED = 64

Flags = npt.NDArray[np.bool_]


class _Memory:
    """What a worker remembers from one batch to the next.

    Attributes:
        packed: when the latest batch was packed.
    """

    def __init__(self) -> None:
        self.packed = time.perf_counter()
        self._named: EncodedImage | None = None  # the latest image that named its sample itself

    def note_packed(self) -> float:
        """Note that a batch has been packed; the time of that."""
        self.packed = time.perf_counter()
        return self.packed

    def swap_named(self, latest: EncodedImage | None) -> EncodedImage | None:
        """Remember the latest image that named its sample itself; the one before it."""
        before = self._named
        self._named = latest
        return before


@dataclass(slots=True)
class Packer:
    """Prepares batches of encoded images for the device.

    :meth:`pack` makes :class:`.prepared.PackedImages`, for which :meth:`plan` and :meth:`finish`
    make the rest of :class:`.prepared.PreparedImages`. A :class:`Packing` calls all three.
    """

    heads: tuple[Head, ...]  # the fused transforms of each view
    on_gpu: bool  # whether baseline JPEGs are left to the GPU
    apply_exif: bool
    origin: Origin  # of random parameters
    share: torch.Tensor  # of Share.in_memory(): which of the baseline JPEGs are decoded here
    # Whether the fused transforms run here, as without a GPU. A worker runs them in one thread. In
    # the loop's process many threads would compete with the workers for the cores.
    finishes: bool = False
    late: bool = False  # whether the collate function runs after the transforms
    moves: bool = False  # whether a transform moves pixels
    # The first transform after the fused ones of each view, if workers sample for it. They also run
    # it on images that they finish. Empty if they do so for no view.
    programs: tuple[Policy | None, ...] = ()
    rank: int = 0  # of this process; 0 unless other ranks may be given the same samples
    is_random: bool = False  # whether any transform has random parameters
    _memory: _Memory = field(init=False, default_factory=_Memory)

    def keys(self, samples: Sequence[Sample]) -> Keys:
        """``(N,)``, which the random parameters of each sample come from."""
        return keys_of(samples, self.origin.seed, self.origin.epoch, self.rank)

    @property
    def sizes(self) -> list[Sizes]:
        """The sizes of each view's results; none where the fused transforms give none."""
        return [head.size for head in self.heads if head.size is not None]

    @property
    def launches(self) -> bool:
        """Whether a kernel resamples decoded pictures, which are ``(H, W, 3)`` then."""
        return self.on_gpu and bool(self.sizes)

    def alike(self, samples: BatchSamples) -> EncodedImage | None:
        """An image that could be of another sample of this batch or the last one; else None."""
        latest = samples.latest()
        before = self._memory.swap_named(latest)
        if samples.alike is not None or before is None or latest is None:
            return samples.alike
        same = own_name(before) == own_name(latest)
        return latest if same and is_alike(before, latest) else None

    def read_seconds(self, images: Sequence[EncodedImage]) -> float:
        """Seconds that reading needed; 0 if the dataset kept images from before the last batch."""
        made = [image._made for image in images]
        if len(made) < 2 or min(made) < self._memory.packed:
            return 0.0
        return (max(made) - min(made)) * len(made) / (len(made) - 1)

    def packed(self) -> float:
        """Note that a batch has been packed; the time of that."""
        return self._memory.note_packed()

    def decode(
        self,
        image: EncodedImage,
        header: ImageHeader,
        divisor: int = 1,
        part: Region = WHOLE,
    ) -> torch.Tensor:
        """Decode an image. A bad file is a ValueError, and too little memory a MemoryError."""
        name = name_of(image.index, image.path)
        size = readable(3 * header.height * header.width)
        pixels = f"{header.width} x {header.height} pixels, {size} decoded"
        with memory_for(f"a picture of {pixels}: {name}"):
            return decode_cpu(
                image.data, header, apply_exif=self.apply_exif, divisor=divisor, part=part
            )

    def decode_first(
        self, images: Sequence[EncodedImage], headers: Headers, files: Ints, ours: Flags
    ) -> None:
        """Decode those of some images whose headers claim more than :data:`BELIEVED`.

        Where sizes follow from those of the pictures, a damaged header must not fill the shared
        memory: that ends the run.
        """
        claims = 3 * headers.sizes.prod(axis=1)
        for i in np.flatnonzero(ours & (claims > BELIEVED * files)).tolist():
            try:
                headers.early[i] = self.decode(images[i], headers.each[i])
            except ValueError as error:
                headers.errors[i] = str(error)

    def pack(
        self,
        images: Sequence[EncodedImage],
        headers: Headers,
        rows: Sequence[Doubles | None],
        who: Identities,
        share: Share,
    ) -> tuple[PackedImages, float]:
        """Decode a share of the images, and pack all; the seconds of decoding, too."""
        files = np.array([len(image.data) for image in images])
        ours = divide(headers, files, share, on_gpu=self.on_gpu, keeps_sizes=not self.sizes)
        if not self.sizes:
            self.decode_first(images, headers, files, ours)
            ours &= headers.whole
        made = what_to_make(headers, ours, rows, self.heads, on_gpu=self.on_gpu)
        lengths = np.where(ours, 3 * made.pixels, files) * headers.whole
        packed = self._allocate(headers, ours, lengths, made, who)
        _copy_files(images, headers, packed)
        started = time.perf_counter()
        self._decode_into(packed, images, headers, made)
        return packed, time.perf_counter() - started

    def _allocate(
        self,
        headers: Headers,
        ours: Flags,
        lengths: Ints,
        made: Made,
        who: Identities,
    ) -> PackedImages:
        """Lay out a buffer for images of these ``lengths`` in bytes; ``ours`` are to be decoded."""
        # The largest pictures lie first. nvJPEG deals files out to the engines in turns, and waits
        # for an engine that is still busy: beside training on an H200 an image needs 102 us in this
        # order, and 110 in any. Decoded ones lie as they come: see plan.uploads().
        order = np.lexsort((np.where(ours, 0, -headers.sizes.prod(axis=1)), ours))
        stops = np.empty_like(lengths)
        stops[order] = np.cumsum(lengths[order])
        size = int(lengths.sum())
        tables = 0
        if self.launches:
            own_sizes = [head.has_own_sizes for head in self.heads]
            tables = sum(Launches.room(len(ours), 3, own_sizes=own) for own in own_sizes)
        orientation = np.where(ours, 1, headers.orientation)  # decoding here turns pictures upright
        rows = [
            None if each is None else of_stored(each, headers, orientation) for each in made.rows
        ]
        channels_last = self.heads[0].memory_format is torch.channels_last
        return PackedImages(
            buffer=Buffer.empty(size + tables),
            regions=Regions(pixels=int(lengths[~ours].sum()), tables=[size]),
            spans=np.stack([stops - lengths, stops], axis=1),
            decoded=ours,
            stored=Stored(
                sizes=headers.sizes,
                transposed=orientation >= 5,
                # As a kernel reads them. Planes would cost a tenth of the picture's decode more.
                interleaved=self.launches or (self.finishes and channels_last),
                views=self.sizes if len(self.heads) > 1 else (),
            ),
            who=who,
            rows=rows,
            errors=headers.errors,
        )

    def _decode_into(
        self, packed: PackedImages, images: Sequence[EncodedImage], headers: Headers, made: Made
    ) -> None:
        """Decode the images that are not left to the device, into their parts of the buffer."""
        parts = packed.parts()
        for i in np.flatnonzero(packed.decoded).tolist():
            rows = [each[i] for each in packed.rows if each is not None]
            part = _read_by(rows[0]) if made.crops[i] else WHOLE
            picture = headers.early.pop(i, None)
            if picture is not None:
                picture = picture[:, *part]
            else:
                try:
                    picture = self.decode(images[i], headers.each[i], int(made.divisors[i]), part)
                except ValueError as error:
                    packed.errors[i] = str(error)
                    packed.decoded[i] = False
                    packed.spans[i] = 0
                    continue
            pictures, fitted = self._fit(picture, rows, i, cropped=bool(made.crops[i]))
            for each, row in zip(packed.rows, fitted, strict=False):
                assert each is not None
                each[i] = row
            if not packed.stored.views:
                packed.stored.sizes[i] = pictures[0].shape[-2:]
            _write(pictures, parts[i], interleaved=packed.stored.interleaved)

    def _fit(
        self, picture: torch.Tensor, rows: Sequence[Doubles], position: int, *, cropped: bool
    ) -> tuple[list[torch.Tensor], list[Doubles]]:
        """What is sent of a decoded picture for each view, and the sampling of that.

        ``cropped`` says whether it is the part of the picture that its only view reads.
        """
        sizes = [size_at(size, position) for size in self.sizes]
        if not sizes:
            return [picture], []
        if cropped:
            (row,) = rows
            moved = row.copy()
            moved[:, [0, 2, 3]] -= row[:, 2:3]  # origin, low and high
            return [picture], [moved]
        finished = [
            resample_uint8(
                picture,
                row,
                size,
                interpolation=head.interpolation,
                antialias=head.antialias,
                fill=head.fill,
            )
            for head, size, row in zip(self.heads, sizes, rows, strict=True)
        ]
        return finished, [finished_row(size) for size in sizes]

    def plan(self, packed: PackedImages) -> tuple[Plan, list[int]]:
        """Plan a batch, and put the launch table of each view into its buffer, after the pixels.

        Returns the plan, and the byte of the buffer after each of these tables.
        """
        if not self.launches:
            return lay_out(packed, self.sizes), []
        words = []
        for view, (head, rows) in enumerate(zip(self.heads, packed.rows, strict=True)):
            assert rows is not None
            planned = plan_rows(
                rows,
                packed.view_sizes(view),
                packed.stored.transposed,
                self.sizes[view],
                head.interpolation,
                head.antialias,
            )
            places = head.places
            words.append(planned if places is None else with_places(planned, places))
        plan = lay_out(packed, self.sizes, words)
        ends = []
        end = packed.regions.pixels_end
        for head, table in zip(self.heads, plan.tables, strict=False):  # none of no parts
            numbers = Launches.numbers(table, head.colors)
            start = end
            end += len(numbers)
            packed.buffer.tensor[start:end] = numbers
            ends.append(end)
        return Plan(plan.parts, [table.without_words() for table in plan.tables]), ends

    def finish(self, packed: PackedImages) -> list[torch.Tensor]:
        """The result of each view, where the fused transforms run here; else an empty list."""
        if not self.finishes or not self.sizes:
            return []
        outs = []
        ready = np.flatnonzero(packed.decoded)
        for view, (head, rows) in enumerate(zip(self.heads, packed.rows, strict=True)):
            assert rows is not None
            out = head.empty(len(packed), "cpu")
            program = self.programs[view] if self.programs else None
            if get_worker_info() is not None and program is None:
                into_shared_memory(out)  # before it is written: torch would copy it to send it
            if len(ready):
                pictures = packed.pictures(ready, packed.pixels, packed.regions.pixels, view)
                head.resample_into(head.results(out), ready, pictures, rows[ready])
            outs.append(out)
        return outs


def _read_by(row: Doubles) -> Region:
    """The part of a picture that a sampling, ``(2, 6)``, reads."""
    (top, bottom), (left, right) = row[:, 2:4].astype(int).tolist()
    return slice(top, bottom), slice(left, right)


def _copy_files(images: Sequence[EncodedImage], headers: Headers, packed: PackedImages) -> None:
    """Copy the files that are left to the device into their parts of the buffer."""
    parts = packed.parts()
    for i in np.flatnonzero(headers.whole & ~packed.decoded).tolist():
        file = images[i].data
        exif = headers.each[i].exif
        parts[i][:] = np.frombuffer(blank(file, exif) if exif else file, dtype=np.uint8)


def _write(
    pictures: Sequence[torch.Tensor], part: npt.NDArray[np.uint8], *, interleaved: bool
) -> None:
    """Write the pictures of an image, one a view, into its part of the buffer."""
    first = 0
    for picture in pictures:
        laid = picture.permute(1, 2, 0) if interleaved else picture
        last = first + laid.numel()
        part[first:last].reshape(laid.shape)[:] = laid.numpy()
        first = last


class Packing:
    """Packs the images of one batch, in one call or in several.

    Args:
        packer: which says how.
        samples: of the batch; None if :meth:`follow` will be given them, or nobody knows them.
        following: whether boxes, masks or points have been moved with the images.
    """

    def __init__(
        self, packer: Packer, samples: BatchSamples | None = None, *, following: bool = False
    ) -> None:
        self._packer = packer
        self._samples = BatchSamples() if samples is None else samples
        self._following = following
        self._share = Share.of(packer.share)  # read once: the balancer may change it meanwhile

    def __call__(self, images: Sequence[EncodedImage]) -> PreparedImages:
        """Prepare the images of a call: read headers, sample, decode a share, pack all, plan."""
        packer = self._packer
        began = time.perf_counter()
        headers = Headers(images, apply_exif=packer.apply_exif)
        if any(head.has_own_sizes for head in packer.heads):
            files = np.array([len(image.data) for image in images])
            packer.decode_first(images, headers, files, headers.whole)
        samples = self._samples.of(images)
        keys = packer.keys(samples)
        samplings = self._samplings(images, samples, keys, headers)
        rows = [each.rows for each in samplings]
        sizes = [each.size for each in samplings if each.size is not None]
        if sizes:
            heads = [head.sized(size) for head, size in zip(packer.heads, sizes, strict=True)]
            packer = replace(packer, heads=tuple(heads))
        calls = [image._calls for image in images]
        who = Identities(
            indices=np.array([image.index for image in images], dtype=np.int64),
            names=np.array([sample.name for sample in samples], dtype=np.int64),
            keys=keys,
            paths=[image.path for image in images],
            samples=self._samples.positions(images),
            calls=calls if any(calls) else (),
        )
        packed, decoding = packer.pack(images, headers, rows, who, self._share)
        plan, ends = packer.plan(packed)
        asks = any(head.asks_for_sizes for head in self._packer.heads)
        made = Results(sizes=sizes if asks else (), out=packer.finish(packed))
        reading = self._packer.read_seconds(images)
        ready = int(packed.decoded.sum())
        report = Report(
            share=self._share,
            counts={
                "cpu_images": ready,
                "gpu_images": len(packed) - ready - len(packed.errors),
                "encoded_bytes": packed.regions.pixels_end,
                "read_seconds": reading,
                "worker_decode_seconds": decoding,
                "collate_seconds": self._packer.packed() - began - decoding,
            },
            remarks=self._remarks(images, headers),
        )
        return PreparedImages.of(packed, ends, plan=plan, made=made, report=report)

    def _remarks(self, images: Sequence[EncodedImage], headers: Headers) -> dict[str, str]:
        """What the user should know: of clipped values, and of random parameters in common."""
        remarks = remark_on_clipped(images, headers)
        if not self._packer.is_random:
            return remarks
        if (alike := self._packer.alike(self._samples)) is not None:
            remarks["alike"] = _ALIKE.format(alike)
        if (twice := self._samples.twice) is not None:
            remarks["twice"] = _TWICE.format(twice)
        return remarks

    def follow(self, given: Structure, names: Sequence[int], repeats: Sequence[int]) -> Structure:
        """Move boxes, masks and points as their image will be moved; the samples with these.

        Args:
            given: what the collate function is to get: a list of samples, or one item.
            names: of the samples or of the item; empty if they are not known.
            repeats: of the same; empty if there are none.
        """
        packer = self._packer
        self._samples = BatchSamples(given, names, repeats)

        def sample_for(images: Sequence[EncodedImage], boxes: Sequence[BoxesOf]) -> Followed:
            headers = Headers(images, apply_exif=packer.apply_exif)
            samples = self._samples.of(images)
            own = _among(head, boxes, images, headers)
            own_keys = head_keys(packer.keys(samples))
            sampling = _sample(own, samples, own_keys, headers, with_cuts=True)
            return Followed(each_of(sampling), headers.sizes, headers.errors, head.mask_fill)

        head, *others = packer.heads
        if head.is_given and not others:
            return self._settled(given, names, repeats)
        found = walk(given) if others else None
        if found is not None and found.images and found.followers:
            raise ValueError(
                "Views gives several pictures of an image, and boxes, masks and points can follow "
                "one. Return plain tensors, as mask.as_subclass(torch.Tensor), or leave them out."
            )
        # Images that come as tensors are not moved here: those say no size. The first image tells.
        encoded = (is_image(leaf) for leaf in objects(given, is_image))
        moves = not others and (head.size is not None or (head.form is not None and any(encoded)))
        followed = follow(given, sample_for) if moves else given
        if followed is not given:
            self._following = True
            self._samples = BatchSamples(followed, names, repeats)
        return followed

    def _settled(self, given: Structure, names: Sequence[int], repeats: Sequence[int]) -> Structure:
        """The samples, for which the transforms of their dataset have been carried out."""
        packer = self._packer
        images = [leaf for leaf in select(given, is_image) if isinstance(leaf, EncodedImage)]
        if not images:
            return given
        headers = Headers(images, apply_exif=packer.apply_exif)
        sizes = [(height, width) for height, width in headers.sizes.tolist()]
        keys = packer.keys(self._samples.of(images))
        settled = settle(given, images, sizes, headers.errors, keys, packer.heads[0])
        self._following = True
        self._samples = BatchSamples(settled, names, repeats)
        return settled  # type: ignore[return-value]

    def _samplings(
        self,
        images: Sequence[EncodedImage],
        samples: Sequence[Sample],
        keys: Keys,
        headers: Headers,
    ) -> list[_Sampled]:
        """The sampling of each view."""
        packer = self._packer
        if len(packer.heads) > 1:
            for head in packer.heads:
                require_fixed_size(head, ())
        if not any(head.gives_results for head in packer.heads):
            return [_Sampled(None, None)]
        if self._following:
            settled = [image._sampling for image in images if image._sampling is not None]
            if len(settled) < len(images):
                raise ValueError(
                    "The collate function made new EncodedImages, but boxes, masks or points have "
                    "been moved with those of the samples. Let it pass these on."
                )
            (head,) = packer.heads
            lengths = np.array([each.size for each in settled], np.int64)
            rows = np.stack([each.row for each in settled])
            sampled = [_sampled(head, rows, lengths, images, headers)]
        else:
            sampled = []
            for view, head in enumerate(packer.heads):
                own = _among(head, [None] * len(images), images, headers)
                sampling = _sample(own, samples, head_keys(keys, view), headers)
                lengths = sampling.length.astype(np.int64)
                sampled.append(_sampled(head, sampling.rows(), lengths, images, headers))
        for each in sampled:
            assert each.rows is not None and each.size is not None
            check_rows(each.rows, headers.sizes, each.size)
        return sampled


class _Sampled(NamedTuple):
    """The sampling of a view: ``(N, 2, 6)`` rows, and its results' sizes; None without results."""

    rows: Doubles | None
    size: Sizes | None


def _sample(
    head: Head,
    samples: Sequence[Sample],
    keys: Keys,
    headers: Headers,
    *,
    with_cuts: bool = False,
) -> Sampling:
    """The sampling of images with these headers, for one view, from the ``(N,)`` keys."""
    sizes = headers.sizes
    leaders = _leaders(samples, headers)
    if head.asks_for_sizes:  # bad images, whose sizes are made up, get that of the others
        bad = ~headers.whole
        common = sizes[headers.whole][:1] if headers.whole.any() else 1
        sizes = sizes.copy()
        sizes[bad] = common
        leaders[bad] = common
    return head.sample(sizes, keys, leaders, with_cuts=with_cuts)


def _among(
    head: Head, boxes: Sequence[BoxesOf], images: Sequence[EncodedImage], headers: Headers
) -> Head:
    """The fused transforms for images with these boxes; bad images get none.

    Raises:
        ValueError: for an image without boxes, if a part is chosen among them.
    """
    if not head.asks_for_boxes:
        return head
    for position in np.flatnonzero(headers.whole).tolist():
        if boxes[position] is None:
            image = images[position]
            raise ValueError(
                "RandomIoUCrop chooses a part among the boxes of a sample, and an image came "
                f"without: {name_of(image.index, image.path)}. Return tv_tensors.BoundingBoxes "
                "beside it, of shape (0, 4) where there are none: "
                'BoundingBoxes(torch.zeros(0, 4), format="XYXY", canvas_size=(height, width)).'
            )
    return head.among([b if fine else None for b, fine in zip(boxes, headers.whole, strict=True)])


def _sampled(
    head: Head, rows: Doubles, lengths: Ints, images: Sequence[EncodedImage], headers: Headers
) -> _Sampled:
    """The sampling of a view whose results have ``lengths`` ``(N, 2)``, in the form it asks for."""
    if head.has_own_sizes:
        bad = ~headers.whole  # results that nobody gets
        lengths[bad] = 1
        rows[bad] = finished_row((1, 1))
        return _Sampled(rows, lengths)
    size = head.size if isinstance(head.size, tuple) else _one_size(lengths, images)
    return _Sampled(rows, size)


def _one_size(sizes: Ints, images: Sequence[EncodedImage]) -> Size:
    """The size that the results of all images have, of ``(N, 2)`` sizes."""
    if (others := np.flatnonzero((sizes != sizes[0]).any(axis=1))).size:
        other = int(others[0])
        shapes = [f"[3, {', '.join(map(str, sizes[i].tolist()))}]" for i in (0, other)]
        names = [name_of(images[i].index, images[i].path) for i in (0, other)]
        # torch's own words, which loops may look for.
        raise RuntimeError(
            f"stack expects each tensor to be equal size, but got {shapes[0]} at entry 0, "
            f"{names[0]}, and {shapes[1]} at entry {other}, {names[1]}. Start the transforms "
            "with what gives images one size: v2.RandomResizedCrop(224) for training, or "
            "v2.Resize(256) and v2.CenterCrop(224) for validation; or take a list of images of "
            'their own sizes: results="list". If a function of your own gives them one, let the '
            "workers run it: accelerate(loader, keep_unknown=True)."
        )
    height, width = sizes[0].tolist()
    return height, width


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
        if position in headers.errors:  # the size is made up
            continue
        height, width = leaders[position].tolist()
        leaders[position] = sample.leading_size((height, width))
    return leaders
