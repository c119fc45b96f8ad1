"""From a host batch to a device batch: move tensors, decode, resample, transform.

It is the stage of an epoch whose batches hold images. A batch becomes a few parts, each a decode
and a launch, and a finish after them, all on one stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.core.nested import map_leaves, moves_itself, objects, to_device
from gpuprefetch.core.stage import Empty
from gpuprefetch.core.stats import Stats, Timed
from gpuprefetch.core.streams import mark_reader, wait_for_reader
from gpuprefetch.images.apart import Apart
from gpuprefetch.images.decode import (
    ImageDecoder,
    claim,
    decode_packed,
    decode_part,
    free_scratch,
    packing_into,
    place,
)
from gpuprefetch.images.encoded import Call, Copy, EncodedImages, is_encoded
from gpuprefetch.images.guard import end_reading
from gpuprefetch.images.plan import (
    LARGE,
    Cost,
    cost_of,
    decoded_bytes,
    in_rooms,
    lay_out,
    readable,
)
from gpuprefetch.images.share import Balancer
from gpuprefetch.images.slab import unmap_dead
from gpuprefetch.images.targets import (
    PerSample,
    is_per_sample,
    refuse_unfollowed,
    run,
    run_tail,
    unmark,
    unstack,
    wrap_like,
)
from gpuprefetch.images.worker import Packer, pack_lists, packed_of
from gpuprefetch.transforms.head import Head, Transform, apply_head, is_kornia, require_fixed_size
from gpuprefetch.transforms.launch import HAS_TRITON, Coloring, Launches, Table, resample
from gpuprefetch.transforms.random import Keys, SeededDraws, fold
from gpuprefetch.transforms.values import Values

ALIGNED = 16  # bytes: Triton compiles another kernel for an odd address


class BadImageError(ValueError):
    """A file that cannot be decoded; the message names its path, its index and the reason."""


@dataclass(frozen=True, slots=True)
class BadImage:
    """A file that could not be decoded.

    Attributes:
        index: of the sample in its dataset; negative where it is not known.
        path: of the file.
        reason: the decoder's.
    """

    index: int
    path: str
    reason: str

    def __str__(self) -> str:
        named = f"(sample {self.index} of the dataset)" if self.index >= 0 else ""
        words = ("cannot decode", repr(self.path) if self.path else "", named)
        return f"{' '.join(filter(None, words))}: {self.reason}"


@dataclass(slots=True)
class Work:
    """One batch on its way.

    Attributes:
        parts: the decode of its images, a call each.
        finish: runs after all parts and gives the batch.
    """

    parts: list[Callable[[], None]]
    finish: Callable[[], Any]


@dataclass
class Pipeline:
    """What happens to each batch on the device.

    Attributes:
        device: where batches go.
        head: the fused transforms.
        tail: transforms that run on the batch behind them.
        packer: prepares encoded images that no worker of ours has seen.
        decoder: backend for the images left to the GPU; None on the CPU.
        dtype: of the images behind the head; None for float32.
        memory_format: likewise; None for contiguous.
        on_error: "raise", "skip", "replace", or a callable that gets each :class:`BadImage`.
        max_bad: how many bad files are tolerated; None for any number.
        bad_images: those that were tolerated, by what tells files apart.
        after: gets each finished :class:`Apart` batch and a seed, and gives what the loop sees.
        stats: counts the time of each step.
        balancer: steers how many of the images the workers decode.
        shares: of the images that the workers decoded, by the number of the batch.
        memory_budget: bytes for batches on their way, see :func:`gpuprefetch.images.plan.cost_of`.
        only: the one row of a batch that is handed over, behind all transforms; None for all.
        values: looks at what reaches the transforms.
        job: makes the work of each leaf of encoded images.
    """

    device: torch.device
    head: Head
    tail: Sequence[Transform]
    packer: Packer
    decoder: ImageDecoder | None = None
    dtype: torch.dtype | None = None
    memory_format: torch.memory_format | None = None
    on_error: str | Callable[[BadImage], Any] = "raise"
    max_bad: int | None = None
    bad_images: dict[object, BadImage] = field(default_factory=dict)
    after: Callable[[Any, int], Any] | None = None
    stats: Stats = field(default_factory=Stats)
    balancer: Balancer | None = None
    shares: dict[int, float] = field(default_factory=dict)
    memory_budget: int | None = None
    only: int | None = None
    values: Values = field(default_factory=Values)
    job: Callable[[Pipeline, EncodedImages], ImageJob] = field(
        default_factory=lambda: ImageJob, repr=False
    )

    def cost(self, batch: Any) -> Cost:
        """What a batch takes on the device."""
        return cost_of(batch, self.head.size, self.dtype)

    def scratch(self) -> contextlib.AbstractContextManager[None]:
        """What a thread that prepares batches keeps meanwhile: memory to decode into."""
        return packing_into() if self.memory_budget is None else contextlib.nullcontext()

    def receive(self, batch: Any, number: int, waited: float) -> tuple[Any, int, Cost]:
        """Pack the encoded images of a batch, and count it.

        Args:
            batch: as the loader gives it.
            number: of the batch in its epoch.
            waited: seconds for which the loader let us wait.

        Returns:
            The batch, the number of its images, and its cost.
        """
        self.packer.begin()
        batch, leaves = pack_lists(batch, self.packer)
        packed = packed_of(leaves)
        for images in packed:
            self.shares[number] = images.share
            self._count(images)
        if packed and self.balancer is not None:
            self.balancer.fetched(waited)
            self.stats.share = self.balancer.value
        return batch, count_images(leaves), self.cost(batch)

    def handed_over(self, period: float, waited: float) -> None:
        """Learn from a batch as it goes to the loop.

        Args:
            period: seconds since the one before.
            waited: seconds of them for which the loop had nothing to do until it was prepared.
        """
        if self.balancer is not None:
            self.balancer.handed_over(period, waited)

    def run(self, batch: Any, number: int, epoch: int, cost: Cost) -> Any:
        """Prepare a batch on the current stream; arguments as for :meth:`start`.

        Returns:
            The batch for the loop, or :class:`Empty`.
        """
        try:
            work = self.start(batch, number, epoch, cost)
        except torch.OutOfMemoryError:
            work = None  # and not again in here, where the exception holds what was allocated
        if work is None:
            self.make_room()
            work = self.start(batch, number, epoch, cost)
        for part in work.parts:
            part()
        return work.finish()

    def _count(self, images: EncodedImages) -> None:
        """Count what the workers did for a batch."""
        stats = self.stats
        stats.cpu_images += images.ready
        stats.gpu_images += len(images) - images.ready
        stats.encoded_bytes += images.encoded_bytes
        stats.read_seconds += images.read_seconds
        stats.worker_decode_seconds += images.decode_seconds
        stats.collate_seconds += images.collate_seconds
        stats.pin_seconds += images.pin_seconds

    def asked(self) -> None:
        """Nothing refuses encoded images that the loop has looked at once it goes on."""
        end_reading()

    def close(self) -> None:
        """Unmap what workers that are gone have shared."""
        unmap_dead()

    def make_room(self) -> None:
        """Give back what can be spared of the device's memory."""
        self.stats.out_of_memory += 1
        free_scratch()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def start(self, batch: Any, number: int, epoch: int, cost: Cost) -> Work:
        """Queue the copies of a batch on the current stream and lay out the rest of its work.

        Args:
            batch: as the loader gives it, its encoded images packed.
            number: of the batch in its epoch; keys the tail's random numbers.
            epoch: likewise.
            cost: of the batch, which counts where there is a ``memory_budget``.

        Raises:
            ValueError: if the batch, or one image of it, does not fit into ``memory_budget``.
        """
        apart = number + (self.packer.rank << 32)
        seed = partial(_derive, _epoch_keys(self.packer.seed, epoch), apart)
        jobs: list[ImageJob] = []
        limit = cost.limit(self.memory_budget)

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, EncodedImages):
                return to_device(leaf, self.device)
            jobs.append(self.job(self, leaf))
            return jobs[-1]

        with Timed(self.stats, "copy"):
            moved = map_leaves(move, batch, is_encoded)
        finish: Callable[[], Any] = lambda: moved  # noqa: E731
        if self.packer.moves and not any(job.images.targets for job in jobs):
            refuse_unfollowed(moved)
        if jobs:
            self.values.begin()
            with Timed(self.stats, "resample"):
                parts = [part for job in jobs for part in job.begin(limit)]
            finish = partial(self._finish, moved, jobs, seed)
            if isinstance(batch, Apart):
                finish = partial(self._run_after, finish, seed)
            return Work(parts, finish)
        if self.head.names or self.tail or self.dtype or self.memory_format:
            finish = partial(self._transform_tensors, moved, seed)
        apart = isinstance(batch, Apart)
        return Work([], partial(self._run_after, finish, seed) if apart else finish)

    def _run_after(self, finish: Callable[[], Any], seed: Callable[[], int]) -> Any:
        assert self.after is not None
        if isinstance(batch := finish(), Empty):
            return batch
        with Timed(self.stats, "tail"):
            return self.after(batch, _derive(seed(), -2))

    def _finish(self, batch: Any, jobs: list[ImageJob], seed: Callable[[], int]) -> Any:
        rows = self._rows_to_keep(jobs)
        if rows is not None and not len(rows):
            return Empty(len(jobs[0].images), str(_bad_images(jobs)[-1]), BadImageError)
        count, targets = len(jobs[0].images), jobs[0].images.targets
        if rows is not None or self.only is not None:
            _refuse_fewer_rows(batch, jobs[0].images.samples)

        batch = unstack(batch, count) if targets and self.tail else batch
        if rows is not None:

            def keep(leaf: Any) -> Any:
                return leaf if isinstance(leaf, ImageJob) else _take_rows(leaf, rows, count)

            batch = map_leaves(keep, batch, partial(_is_column, count=count))
            for job in jobs:
                job.out = _take_rows(job.out, rows, count)
        if self.tail and not targets:  # each view of a sample gets draws of its own
            for number, job in enumerate(jobs):
                job.out = self._run_tail(job.out, _derive(seed(), number) if number else seed())
        elif self.tail:
            if len(jobs) > 1:
                raise ValueError(
                    "The collate function leaves samples apart, and the transforms behind the head "
                    "need one batch. Use collate_fn=lambda samples: tuple(zip(*samples))."
                )
            job = jobs[0]
            with Timed(self.stats, "tail"), SeededDraws(seed()):
                job.out, batch = run_tail(self.tail, job.out, batch, targets, self.values.reach)
        only, left = None, count if rows is None else len(rows)
        if self.only is not None:
            kept = torch.arange(count) if rows is None else rows
            only = kept.eq(self.only).nonzero()[:1, 0]
        column = partial(_is_column, count=left)
        return map_leaves(partial(self._result, only=only, count=left), batch, column)

    def _result(self, leaf: Any, *, only: torch.Tensor | None, count: int) -> Any:
        """What is handed over of a leaf; of one row alone where ``only`` says which."""
        result = leaf.out if isinstance(leaf, ImageJob) else leaf
        if only is not None:
            take = partial(_take_rows, rows=only, count=count)
            # A list of images of their own sizes has an entry per sample, several outputs have not.
            several = isinstance(leaf, ImageJob) and self.tail
            result = map_leaves(take, result) if several else take(result)
        return unmark(result)

    def _transform_tensors(self, batch: Any, draw_seed: Callable[[], int]) -> Any:
        done, seed = False, draw_seed()

        def transform(leaf: Any) -> Any:
            nonlocal done
            if done or not isinstance(leaf, torch.Tensor) or leaf.dim() != 4:
                return leaf
            done = True
            if leaf.dtype == torch.uint8 and leaf.shape[-1] in (1, 3, 4) and leaf.size(1) > 4:
                raise ValueError(
                    f"transforms are for images (N, C, H, W); uint8 of {tuple(leaf.shape)} look "
                    "like (N, H, W, C), as NumPy and albumentations have them. Let the dataset "
                    "return torch.from_numpy(image).permute(2, 0, 1), or ToTensorV2 do so."
                )
            self.values.begin(leaf)
            with Timed(self.stats, "resample"):
                leaf = self._run_head(leaf, seed)
            return self._run_tail(leaf, seed)

        result = map_leaves(transform, batch)
        if not done:
            raise ValueError(
                "transforms, dtype and memory_format are for images, but the loader gave neither "
                "an EncodedImage nor an (N, C, H, W) tensor. Return one of them, or leave these "
                "arguments out."
            )
        return result

    def _run_head(self, images: torch.Tensor, seed: int) -> torch.Tensor:
        kornia_next = bool(self.tail) and is_kornia(self.tail[0])
        to_floats = kornia_next and not images.is_floating_point()
        if self.head.names or to_floats or self.dtype == torch.uint8:
            keys = fold(seed, np.arange(len(images)))
            return apply_head(self.head, images, keys, self.dtype, self.memory_format)
        if self.dtype and not images.is_floating_point():
            images = images.to(self.dtype) / 255
        return images.to(
            dtype=self.dtype or images.dtype,
            memory_format=self.memory_format or torch.preserve_format,
        )

    def _run_tail(self, images: Any, seed: int) -> Any:
        if not self.tail:
            return images
        with Timed(self.stats, "tail"), SeededDraws(seed):
            for transform in self.tail:
                self.values.reach(transform, images)
                images = run(transform, images)
        return images

    def _rows_to_keep(self, jobs: list[ImageJob]) -> torch.Tensor | None:
        """Apply ``on_error``: the rows of the batch that become its result, None for all."""
        bad = sorted({i for job in jobs for i in job.images.errors})
        if not bad:
            return None
        for last in _bad_images(jobs):
            self._tolerate(last)
        first = jobs[0].images
        count = len(first)
        if any(
            len(job.images) != len(first) or job.images.samples != first.samples for job in jobs
        ):
            raise BadImageError(
                f"{last}. on_error cannot leave it out: the collate function "
                "leaves samples apart, or has another number of images for each: let it keep the "
                "images together, one of each sample, as torch's default one does."
            )
        good = np.setdiff1d(np.arange(count), bad)
        if self.on_error == "replace":
            if not len(good):
                raise BadImageError(f"all {count} images of a batch are bad, the last: {last}")
            rows = np.arange(count)
            rows[bad] = good[
                np.searchsorted(good, bad) % len(good)
            ]  # the next good one fills the slot
            return torch.from_numpy(rows)
        return torch.from_numpy(good)

    def _tolerate(self, bad: BadImage) -> None:
        if self.on_error == "raise":
            raise BadImageError(str(bad))
        if callable(self.on_error):
            self.on_error(bad)
        # Each epoch comes upon the same files again. One without a name may be any.
        named = bad.index >= 0 or bad.path
        self.bad_images.setdefault((bad.index, bad.path) if named else object(), bad)
        self.stats.bad_images += 1
        if self.max_bad is not None and len(self.bad_images) > self.max_bad:
            raise BadImageError(f"more than max_bad={self.max_bad} bad images, the last: {bad}")


def _bad_images(jobs: Sequence[ImageJob]) -> list[BadImage]:
    return [
        BadImage(int(job.images.indices[i]), job.images.paths[i], reason)
        for job in jobs
        for i, reason in sorted(job.images.errors.items())
    ]


@lru_cache
def _epoch_keys(seed: int, epoch: int) -> Keys:
    return fold(fold(seed, epoch), -1)


def _derive(keys: Keys | int, data: int) -> int:
    """A seed for torch's generators."""
    return int(fold(keys, data)[()] >> np.uint64(1))


def _take_rows(leaf: Any, rows: torch.Tensor, count: int) -> Any:
    """Select rows of whatever has one entry per sample."""
    kind: Any = type(leaf)
    if isinstance(leaf, torch.Tensor):
        if not leaf.dim() or leaf.size(0) != count:
            return leaf
        if leaf.layout is torch.sparse_coo:
            return leaf.index_select(0, rows.to(leaf.device))
        if leaf.layout is torch.strided and not leaf.is_nested:
            return wrap_like(leaf[rows.to(leaf.device)], leaf)  # indexing keeps the memory format
        kind = f"a {'nested' if leaf.is_nested else leaf.layout} tensor"
    elif isinstance(leaf, np.ndarray):
        return leaf[rows.numpy()] if leaf.ndim and len(leaf) == count else leaf
    elif not moves_itself(leaf):
        text = isinstance(leaf, (str, bytes, bytearray))
        if text or not isinstance(leaf, Sequence) or len(leaf) != count:
            return leaf
        if isinstance(leaf, (list, tuple)):
            taken = [leaf[i] for i in rows.tolist()]
            return leaf.of(taken) if isinstance(leaf, PerSample) else type(leaf)(taken)
    raise ValueError(
        f"on_error and replay take rows out of dense and COO tensors, arrays and lists, and {kind} "
        "is none. Let the collate function give what it holds, in a list or a dict."
    )


def _refuse_fewer_rows(batch: Any, samples: Sequence[int]) -> None:
    """Refuse a batch with several images of a sample in one tensor, and one row of the rest."""
    known = [sample for sample in samples if sample >= 0]
    if (count := len(set(known))) == len(known):
        return

    def is_column(node: Any) -> bool:
        return _is_column(node, count=count) and not all(_has_rows(e, len(samples)) for e in node)

    if any(_has_rows(leaf, count) for leaf in objects(batch, is_column)):
        raise ValueError(
            "on_error and replay take rows out of the batch, and the collate function has made "
            f"{len(samples)} images of {count} samples beside {count} rows of the rest. Let it "
            "repeat these too, or give each view of the samples as a tensor of its own."
        )


def _is_column(batch: Any, *, count: int) -> bool:
    """Whether a list has an entry per sample, and is no list of columns that have.

    Such are the names that the default collate leaves, and captions, boxes or dicts that differ in
    number from sample to sample.
    """
    if is_per_sample(batch):
        return True
    if type(batch) not in (list, tuple) or len(batch) != count:
        return False
    if any(isinstance(leaf, ImageJob) for leaf in objects(batch)):
        return False
    tensors = [isinstance(entry, (torch.Tensor, np.ndarray)) for entry in batch]
    return any(tensors) == all(tensors) and not all(_has_rows(entry, count) for entry in batch)


def _has_rows(entry: Any, count: int) -> bool:
    """Whether whatever is in ``entry`` has ``count`` rows, as after the default collate."""
    if isinstance(entry, (torch.Tensor, np.ndarray)):
        return entry.ndim > 0 and len(entry) == count
    if isinstance(entry, Mapping):
        entry = list(entry.values())
    elif not isinstance(entry, (list, tuple)):
        return False
    elif len(entry) == count:
        return True
    return len(entry) > 0 and all(_has_rows(part, count) for part in entry)


class ImageJob:
    """The encoded images of one batch, on their way into one tensor.

    Decoded images, or their packed copy, are let go behind the launch that reads them, and what
    they lay in is not decoded into before that launch has completed. See Note [Decoded memory].
    """

    def __init__(self, pipeline: Pipeline, images: EncodedImages) -> None:
        self.images = images
        self.out: Any = [None] * len(images)
        self._pipeline = pipeline
        self._launches: Launches | None = None
        # What the launches read, from where on and up to where.
        self._numbers: tuple[torch.Tensor, int, int] | None = None
        if pipeline.head.names or pipeline.tail:
            require_fixed_size(pipeline.head, pipeline.tail)

    def begin(self, limit: int | None = None) -> list[Callable[[], None]]:
        """On the stream of the batch: reserve the result.

        Returns:
            The decode of each sub-batch, with pixels that workers decoded; none takes more than
            ``limit`` bytes.
        """
        pipeline, images = self._pipeline, self.images
        device, head = pipeline.device, pipeline.head
        size, plan = head.size, images.plan
        if plan is None or limit is not None:
            words = images.words() if plan and plan.table else None
            plan = lay_out(images, size, words, limit)
        if size is None:
            # The pixels themselves are the result, and the buffer is the worker's.
            ready = np.flatnonzero(images.decoded)
            pixels = images.pixels.to(device, non_blocking=True, copy=True)
            for i, image in zip(ready.tolist(), images.views(ready, pixels), strict=True):
                self.out[i] = image
            return [partial(self._decode, call=call) for call in plan.calls]
        if images.out is not None:  # on the CPU, with what the workers decoded
            self.out = images.out
            left = [call for call in plan.calls if len(call.positions)]
            return [partial(self._decode, call=replace(call, copy=None)) for call in left]
        dtype = pipeline.dtype or torch.float32
        layout = pipeline.memory_format or torch.contiguous_format
        shape = len(images), 3, *size
        self.out = torch.empty(shape, dtype=dtype, device=device, memory_format=layout)
        table = plan.table if HAS_TRITON and dtype != torch.float64 else None
        return [
            partial(self._decode, call=call, launch=None if table is None else (table, number))
            for number, call in enumerate(plan.calls)
        ]

    def _decode(
        self, *, call: Call, launch: tuple[Table, int] | None = None, again: bool = False
    ) -> None:
        """Decode and resample a sub-batch; out of memory, make room and take smaller ones.

        Args:
            call: its images.
            launch: of all of them, if it was planned: its table, and its number in that.
            again: whether it is one image, or one copy, that has had a try.
        """
        try:
            self._claim(call)
            if launch is None or not self._packs(call):
                self._decode_apart(call)
            elif not self._decode_packed(call, *launch):
                self._decode_apart(call, together=False)
        except torch.OutOfMemoryError as error:
            if again:
                if not len(call.positions):
                    raise
                raise self._too_large(int(call.positions[0])) from error
        else:
            return
        self._pipeline.make_room()
        pieces = [] if call.copy is None else [self.images.call(call.positions[:0], call.copy)]
        halves = np.array_split(call.positions, 2)
        pieces += [self.images.call(half) for half in halves if len(half)]
        for piece in pieces:
            self._decode(call=piece, again=len(pieces) == 1)

    def _claim(self, call: Call) -> None:
        """Ask for the memory of large images beforehand.

        A decoder that runs out of memory is destroyed; making another takes half a second.
        """
        if call.largest < LARGE:
            return
        sizes = call.decoded_sizes
        large = int(sizes[sizes >= LARGE].sum())
        claim(in_rooms(large) if len(sizes) > 1 else large, self._pipeline.device)

    def _packs(self, call: Call) -> bool:
        """Whether to decode into one piece."""
        decoder = self._pipeline.decoder
        return not len(call.positions) or (decoder is not None and decoder.packs)

    def _decode_packed(self, call: Call, table: Table, number: int) -> bool:
        """Whether it was done in one piece: see Note [One call for a batch]."""
        pipeline, images = self._pipeline, self.images
        numbers, first, last = self._read_by(table)
        pixels = -(-(last - first) // ALIGNED) * ALIGNED
        decodes = len(call.positions) > 0
        with Timed(pipeline.stats, "decode" if decodes else "resample"):
            flat = place(pixels + call.copied + call.size, pipeline.device)
            address = flat.data_ptr()
            self._wait_for_reader()
            # Nobody but torch keeps what is not in the batch until it is on the device.
            flat[: last - first].copy_(numbers[first:last], non_blocking=True)
            assert self._launches is not None
            launch = partial(self._launches.launch, number, address + pixels, address)
            survived = None
            if decodes and pipeline.decoder is not None and pipeline.decoder.canaries:
                # See Note [Canaries].
                pinned = pipeline.device.type == "cuda"
                survived = torch.zeros(
                    len(images), dtype=torch.uint8, device="cpu", pin_memory=pinned
                )
                launch = partial(launch, survived=survived.data_ptr())
                self._launches.set_canaries(number, address + pixels, address)
                self._mark_reader()
                self._wait_for_reader()
            if call.copy is not None:
                held, start, stop = images.held_copy(call.copy)
                copied = flat[pixels : pixels + call.copied]
                copied.copy_(held[start:stop], non_blocking=True)
            if decodes:
                assert pipeline.decoder is not None
                at = pixels + call.copied
                if not decode_packed(pipeline.decoder, images, call, flat, at):
                    return False
        with Timed(pipeline.stats, "resample"):
            launch()
            self._mark_reader()
        if survived is not None:
            with Timed(pipeline.stats, "decode"):
                self._wait_for_reader()
            missed = call.positions[survived.numpy()[call.positions] > 0]
            if len(missed):
                pipeline.stats.add("missed_images", len(missed))
                self._decode_apart(images.call(missed), together=False)
        return True

    def _read_by(self, table: Table) -> tuple[torch.Tensor, int, int]:
        """What holds the numbers that the launches of a table read, see ``_numbers``."""
        if self._numbers is None:
            head = self._pipeline.head
            self._launches = Launches(table, self.out, torch.uint8, head.interpolation)
            if table.words is None:
                self._numbers = self.images.held_numbers()
            else:
                coloring = Coloring(torch.uint8, self.out.dtype, head.mean, head.std)
                numbers = Launches.numbers(table, 3, coloring)
                numbers = numbers.pin_memory() if self.images.is_pinned else numbers
                self._numbers = numbers, 0, len(numbers)
        return self._numbers

    def _decode_apart(self, call: Call, *, together: bool = True) -> None:
        pipeline = self._pipeline
        if call.copy is not None:
            self._copy_apart(call.copy)
        if not len(call.positions):
            return
        assert pipeline.decoder is not None, "without one, the packer leaves nothing to decode"
        with Timed(pipeline.stats, "resample"):
            self._wait_for_reader()
        with Timed(pipeline.stats, "decode"):
            images = decode_part(
                pipeline.decoder,
                self.images,
                call,
                pipeline.device,
                pipeline.stats,
                together=together,
            )
            pairs = zip(call.positions.tolist(), images, strict=True)
            decoded = {i: image for i, image in pairs if image is not None}
        with Timed(pipeline.stats, "resample"):
            if pipeline.head.size is None:
                for i, image in decoded.items():
                    self.out[i] = image
            elif decoded:
                self._resample(np.array([*decoded]), [*decoded.values()])
            self._mark_reader()

    def _copy_apart(self, copy: Copy) -> None:
        held, first, last = self.images.held_copy(copy)
        pixels = held[first:last].to(self.out.device, non_blocking=True)
        views = self.images.views(copy.positions, pixels, copy.start)
        with Timed(self._pipeline.stats, "resample"):
            self._resample(copy.positions, views)
            self._mark_reader()

    def _mark_reader(self) -> None:
        """Have the next decode wait for what was launched."""
        if self._pipeline.device.type == "cuda":
            mark_reader(self._pipeline.device)

    def _wait_for_reader(self) -> None:
        """Until no kernel on this stream reads decoded images any more."""
        if self._pipeline.device.type == "cuda":
            wait_for_reader(self._pipeline.device)

    def _too_large(self, position: int) -> torch.OutOfMemoryError:
        device, (height, width) = self._pipeline.device, self.images.sizes[position].tolist()
        size = readable(int(decoded_bytes(self.images, np.array([position]))[0]))
        reason = f"out of memory on {device}, also alone; its {width} x {height} pixels take {size}"
        if device.type == "cuda":
            free, total = map(readable, torch.cuda.mem_get_info(device))
            used = readable(torch.cuda.memory_allocated(device))
            reason += f", {free} of {total} are free, and torch has {used} in use"
        bad = BadImage(int(self.images.indices[position]), self.images.paths[position], reason)
        return torch.OutOfMemoryError(f"{bad}. Take smaller batches, or leave it to the workers.")

    def _resample(self, positions: npt.NDArray[np.int64], images: Sequence[torch.Tensor]) -> None:
        """Queue the fused head of some decoded images on the current stream."""
        batch, head = self.images, self._pipeline.head
        assert batch.rows is not None
        turned = batch.transposed[positions].tolist()
        resample(
            [image.mT if turn else image for image, turn in zip(images, turned, strict=True)],
            batch.rows[positions],
            head.size,  # type: ignore[arg-type]
            antialias=head.antialias,
            dtype=self.out.dtype,
            out=self.out,
            positions=positions.tolist(),
            interpolation=head.interpolation,
            mean=head.mean,
            std=head.std,
        )


def count_images(batch: Any) -> int:
    """The samples of a batch: the length of its first tensor or packed images; 0 without any."""
    for leaf in objects(batch, is_encoded):
        if isinstance(leaf, EncodedImages):
            return len(leaf)
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return leaf.size(0)  # which a nested tensor has, and no length
    return 0
