"""From a host batch to a device batch: move tensors, decode, resample, transform."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from gpuprefetch.core.errors import scope
from gpuprefetch.core.nested import map_leaves, objects, share_memory, to_device
from gpuprefetch.core.stage import Empty
from gpuprefetch.core.stats import Stats, Timed
from gpuprefetch.core.streams import lease_stream, return_stream, using
from gpuprefetch.images.apart import Apart
from gpuprefetch.images.bad import BadImage, BadImageError
from gpuprefetch.images.collate import pack_lists
from gpuprefetch.images.decode import ImageDecoder
from gpuprefetch.images.encoded import PreparedImages, is_encoded
from gpuprefetch.images.guard import end_reading
from gpuprefetch.images.job import ImageJob
from gpuprefetch.images.notes import Notes
from gpuprefetch.images.packer import Packer, Packing
from gpuprefetch.images.plan import ImageCost, cost_of
from gpuprefetch.images.rows import is_column, refuse_other_rows, take_rows
from gpuprefetch.images.share import Balancer
from gpuprefetch.images.slab import unmap_dead
from gpuprefetch.images.tail import run_tail
from gpuprefetch.images.targets import PerSample, refuse_unfollowed, unstack
from gpuprefetch.images.view import View
from gpuprefetch.transforms.random import batch_seed, derive, tail_keys, view_seed

Part = Callable[[], None]  # the decode of a few images, a call

# Note [Calls side by side]
# A call of few large photos fills and empties the GPU's engines, and the launch that reads its
# pictures has to complete before the next one is decoded into the same memory: in calls of seven
# photos of 12 megapixels an H100 gave 781 a second of 1,028. So the calls of a batch take turns on
# two streams, each with a decoder and scratch memory of its own, and the engines work on one call
# while the host waits for the launch of another. The second stream begins after the result has been
# allocated, and the batch's own stream waits for it at the end.


_UNEVEN = (
    "on_error has left images out of a batch of one of several ranks. Collectives over tensors of "
    "equal shapes, such as all_gather, fail with such batches, and DistributedDataParallel weighs "
    'ranks, not images. on_error="replace" keeps batches whole.'
)


@dataclass
class Pipeline:
    """What happens to each batch on the device. See :class:`.core.stage.Stage`."""

    device: torch.device
    views: Sequence[View]  # most loops have one
    packer: Packer  # of encoded images that no worker of ours has seen
    decoder: ImageDecoder | None = None  # of the images left to the GPU
    on_error: str | Callable[[BadImage], Any] = "raise"
    max_bad: int | None = None
    bad_images: dict[object, BadImage] = field(default_factory=dict)  # by what tells files apart
    # Makes of a finished Apart and a seed what the loop gets.
    after: Callable[[Any, int], Any] | None = None
    stats: Stats = field(default_factory=Stats)
    balancer: Balancer | None = None
    memory_budget: int | None = None
    streams: int = 1  # batches that are decoded side by side, once the first has been
    without_engines: bool = False  # whether CUDA kernels decode; known after the first batch
    rank: int = 0  # of this process: what is sampled for a batch as a whole depends on it
    ranks: int = 1  # how many there are
    notes: Notes = field(default_factory=Notes)  # of the epoch
    only: int | None = None  # the one row of a batch that is handed over, after all transforms
    rooms: dict[int, torch.Tensor] | None = None  # see decode.place()
    beside: torch.cuda.Stream | None = None  # see Note [Calls side by side]
    remarked: set[str] = field(default_factory=set)  # kinds of remarks that were warned of
    job: Callable[[Pipeline, PreparedImages], ImageJob] = field(
        default_factory=lambda: ImageJob, repr=False
    )

    def cost(self, batch: Any) -> ImageCost:
        return cost_of(batch, self.packer.heads, self.copies)

    @property
    def copies(self) -> int:
        return 1 if self.decoder is None else self.decoder.copies

    @scope
    def scratch(self) -> Iterator[None]:
        if self.memory_budget is None:
            self.rooms = {}
            self.beside = lease_stream(self.device) if self.device.type == "cuda" else None
        try:
            yield
        finally:
            if (stream := self.beside) is not None:
                stream.synchronize()
                return_stream(stream)
            self.rooms = self.beside = None

    def receive(self, batch: Any, number: int, waited: float) -> tuple[Any, int]:
        batch, packed = pack_lists(batch, Packing(self.packer))
        self.notes.see(number, packed)
        stats = self.stats
        for images in packed:
            for name, count in images.counts.items():
                stats.add(name, count)
            self._pass_on(images.remarks)
        if packed and self.balancer is not None:
            decoding = sum(images.counts["worker_decode_seconds"] for images in packed)
            self.balancer.fetched(waited, decoding)
            stats.share = self.balancer.value
        return batch, count_images(batch)

    def _pass_on(self, remarks: dict[str, str]) -> None:
        """Warn of what workers found, once of each kind in the life of the prefetcher."""
        for kind, text in remarks.items():
            if kind not in self.remarked:
                self.remarked.add(kind)
                warnings.warn(text, stacklevel=2)

    def handed_over(self, period: float, waited: float) -> None:
        if self.balancer is not None:
            self.balancer.handed_over(period, waited)

    def run(self, batch: Any, number: int, epoch: int, cost: ImageCost | None) -> Any:
        limit = None if cost is None else cost.limit(self.memory_budget)
        try:
            begun = self._begin(batch, limit)
        except torch.OutOfMemoryError:
            begun = None  # and not again in here, where the exception holds what was allocated
        if begun is None:
            self.make_room()
            begun = self._begin(batch, limit)
        result, jobs, parts = begun
        self._run_parts(parts)
        seed = batch_seed(self.packer.origin.seed, epoch, number + (self.rank << 32))
        if jobs:
            result = self._finish(result, jobs, seed)
        elif len(self.views) > 1 or self.views[0].changes:
            result = self._transform_tensors(result, seed, batch)
        if isinstance(batch, Apart) and not isinstance(result, Empty):
            assert self.after is not None
            with Timed(self.stats, "tail"):
                return self.after(result, derive(seed, -2))
        return result

    def _begin(self, batch: Any, limit: int | None) -> tuple[Any, list[ImageJob], Sequence[Part]]:
        """Queue the copies of a batch; it with its jobs for leaves, these, and their parts."""
        jobs: list[ImageJob] = []

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, PreparedImages):
                return to_device(leaf, self.device)
            jobs.append(self.job(self, leaf))
            return jobs[-1]

        with Timed(self.stats, "copy"):
            moved = map_leaves(move, batch, is_encoded)
        if self.packer.moves and not any(job.images.targets for job in jobs):
            refuse_unfollowed(moved)
        if not jobs:
            return moved, jobs, ()
        for view in self.views:
            view.values.begin()
        with Timed(self.stats, "resample"):
            return moved, jobs, [part for job in jobs for part in job.begin(limit)]

    def _run_parts(self, parts: Sequence[Part]) -> None:
        """Run the parts of a batch, every other one on the second stream where there is one."""
        packs = self.decoder is not None and self.decoder.packs
        beside = self.beside if packs and not self.without_engines and len(parts) > 1 else None
        if beside is None:
            for part in parts:
                part()
            return
        current = torch.cuda.current_stream(self.device)
        beside.wait_stream(current)
        try:
            for number, part in enumerate(parts):
                with using(beside if number % 2 else current):
                    part()
        finally:  # what has begun writes into the result
            current.wait_stream(beside)

    def decodes_on(self, streams: int) -> None:
        """Learn from the first decode how many streams its decoder is for."""
        if streams == 1 or self.without_engines:
            return
        self.without_engines = True
        if self.memory_budget is None:
            self.streams = streams
        if self.balancer is not None:
            self.balancer.start_without_engines()

    def asked(self) -> None:
        """Nothing refuses encoded images that the loop has looked at once it goes on."""
        end_reading()

    def close(self) -> None:
        unmap_dead()

    def make_room(self) -> None:
        """Give back what can be spared of the device's memory."""
        self.stats.out_of_memory += 1
        if self.rooms:
            self.rooms.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _finish(self, batch: Any, jobs: list[ImageJob], seed: int) -> Any:
        for job in jobs:
            job.check()
        rows = self._rows_to_keep(jobs)
        if rows is not None and not len(rows):
            last = _bad_images(jobs)[-1]
            if self.ranks > 1:
                raise BadImageError(
                    f"on_error has left out all {len(jobs[0].images)} images of a batch on rank "
                    f"{self.rank} of {self.ranks}, which would wait for each other from here on, "
                    f'the last: {last}. on_error="replace" keeps batches whole.'
                )
            return Empty(len(jobs[0].images), str(last), BadImageError)
        count, targets = len(jobs[0].images), jobs[0].images.targets
        if rows is not None or self.only is not None:
            refuse_other_rows(batch, jobs[0].images.samples)
        tails = any(view.tail for view in self.views)
        batch = unstack(batch, count) if targets and tails else batch
        if rows is not None:
            batch = self._keep(batch, jobs, rows, count)
        if tails:
            with Timed(self.stats, "tail"):
                batch = self._run_tails(jobs, batch, rows, seed)
        kept = torch.arange(count) if rows is None else rows
        if self.only is not None:
            only = kept.eq(self.only).nonzero()[:1, 0]
            batch, kept = self._keep(batch, jobs, only, len(kept)), only
        return map_leaves(_result, batch, partial(is_column, count=len(kept)))

    def _keep(self, batch: Any, jobs: list[ImageJob], rows: torch.Tensor, count: int) -> Any:
        """Take some rows of a batch, and of what its jobs have made of ``count`` images."""
        take = partial(take_rows, rows=rows, count=count)
        for job in jobs:
            for view, output in zip(self.views, job.outputs, strict=True):
                # A list of images of their own sizes has an entry per sample, several results of a
                # transform have not.
                output.out = map_leaves(take, output.out) if view.tail else take(output.out)
        return map_leaves(take, batch, partial(is_column, count=count))

    def _transform_tensors(self, batch: Any, seed: int, given: Any) -> Any:
        """Transform a batch that came as tensors; ``given`` is what the loader gave."""
        first: Any = None

        def transform(leaf: Any) -> Any:
            nonlocal first
            if not isinstance(leaf, torch.Tensor) or leaf.dim() != 4:
                return leaf
            if first is not None:
                if self.packer.moves and leaf.shape[2:] == first[2:]:
                    raise ValueError(
                        f"transforms move the pixels of {tuple(first)}, the first tensor of a "
                        f"batch, and would leave {tuple(leaf.shape)} beside it as it is. Join the "
                        "two along N or C, or give the other one another number of dimensions."
                    )
                return leaf
            first = leaf.shape
            channels = (1, 3, 4) if leaf.dtype == torch.uint8 else (3,)
            if leaf.shape[-1] in channels and min(leaf.shape[1:3]) > 4:
                raise ValueError(
                    f"transforms are for images (N, C, H, W); {tuple(leaf.shape)} look "
                    "like (N, H, W, C), as NumPy and albumentations have them. Let the dataset "
                    "return torch.from_numpy(image).permute(2, 0, 1), or ToTensorV2 do so."
                )
            images = list[torch.Tensor]()
            views = [view.of_tensors() for view in self.views]
            with Timed(self.stats, "resample"):
                for number, view in enumerate(views):
                    view.values.begin(leaf)
                    made = view.run_head(leaf, view_seed(seed, number))
                    writes = bool(view.tail or images)  # or a view before it does
                    images.append(_own(made, [given, *images]) if writes else made)
            with Timed(self.stats, "tail"):
                seeds = (view_seed(seed, number) for number in range(len(views)))
                outs = [
                    view.run_tail([each], own)[0]
                    for view, each, own in zip(views, images, seeds, strict=True)
                ]
            return _one_or_all(outs)

        result = map_leaves(transform, batch)
        if first is None:
            raise ValueError(
                "transforms, dtype and memory_format are for images, but the loader gave neither "
                "an EncodedImage nor an (N, C, H, W) tensor. Return one of them, or leave these "
                "arguments out."
            )
        return result

    def _run_tails(
        self, jobs: list[ImageJob], batch: Any, rows: torch.Tensor | None, seed: int
    ) -> Any:
        """Run what comes after the fused transforms, on images and on targets beside them.

        Images of one sample are transformed alike. Returns the batch with its moved targets.
        """
        kept = slice(None) if rows is None else rows.numpy()
        targets = jobs[0].images.targets
        together = _share_samples(jobs)
        if targets and not together:
            raise ValueError(
                "The collate function leaves samples apart, and the transforms after the fused "
                "ones need one batch. Use collate_fn=lambda samples: tuple(zip(*samples))."
            )
        groups = [jobs] if together else [[job] for job in jobs]
        for number, group in enumerate(groups):
            own = derive(seed, number) if number else seed
            keys = group[0].images.keys[kept]
            for n, view in enumerate(self.views):
                outs = [job.outputs[n].out for job in group]
                sampled = tail_keys(keys, n)
                if targets:
                    outs, batch = run_tail(
                        view.tail, outs, batch, targets, sampled, own, view.values.reach
                    )
                else:
                    laid = [
                        job.images.laid[n] if rows is None and job.images.laid else None
                        for job in group
                    ]
                    outs = view.run_tail(outs, view_seed(own, n), sampled, laid)
                for job, out in zip(group, outs, strict=True):
                    job.outputs[n].out = out
        return batch

    def _rows_to_keep(self, jobs: list[ImageJob]) -> torch.Tensor | None:
        """Apply ``on_error``: the rows of the batch that become its result, None for all."""
        bad = sorted({i for job in jobs for i in job.images.errors})
        if not bad:
            return None
        for last in _bad_images(jobs):
            self._tolerate(last)
        samples = jobs[0].images.samples
        count = len(samples)
        if any(job.images.samples != samples for job in jobs):
            raise BadImageError(
                f"{last}. on_error cannot leave it out: the collate function leaves samples apart, "
                "or has another number of images for each. Let it keep the images together, one of "
                "each sample, as torch's default one does."
            )
        rows = np.arange(count)
        good = np.setdiff1d(rows, bad)
        if self.on_error != "replace":
            if self.ranks > 1 and len(good):
                self._pass_on({"uneven": _UNEVEN})
            return torch.from_numpy(good)
        if not len(good):
            raise BadImageError(f"all {count} images of a batch are bad, the last: {last}")
        rows[bad] = good[np.searchsorted(good, bad) % len(good)]  # the next good one
        return torch.from_numpy(rows)

    def _tolerate(self, bad: BadImage) -> None:
        if self.on_error == "raise":
            error = BadImageError(str(bad))
            error.add_note('DataPrefetcher(on_error="skip") leaves such files out')
            raise error
        if callable(self.on_error):
            self.on_error(bad)
        # Each epoch comes upon the same files again. One without a name may be any.
        named = bad.index >= 0 or bad.path
        self.bad_images.setdefault((bad.index, bad.path) if named else object(), bad)
        self.stats.bad_images += 1
        if self.max_bad is not None and len(self.bad_images) > self.max_bad:
            raise BadImageError(f"more than max_bad={self.max_bad} bad images, the last: {bad}")


def _share_samples(jobs: Sequence[ImageJob]) -> bool:
    """Whether the images of all jobs are of the same samples, row by row."""
    first = jobs[0].images.keys
    return all(np.array_equal(job.images.keys, first) for job in jobs)


def _bad_images(jobs: Sequence[ImageJob]) -> list[BadImage]:
    return [
        BadImage(int(job.images.indices[i]), job.images.paths[i], reason)
        for job in jobs
        for i, reason in sorted(job.images.errors.items())
    ]


def _own(images: torch.Tensor, given: Any) -> torch.Tensor:
    """Images in memory that a transform may write to: what the loader gave stays as it is."""
    theirs = [leaf for leaf in objects(given) if isinstance(leaf, torch.Tensor)]
    return images.clone() if any(share_memory(images, leaf) for leaf in theirs) else images


def _result(leaf: Any) -> Any:
    """What is handed over of a leaf."""
    if isinstance(leaf, ImageJob):
        return _one_or_all([output.out for output in leaf.outputs])
    return leaf.kind(leaf) if isinstance(leaf, PerSample) else leaf


def _one_or_all(results: Sequence[Any]) -> Any:
    """What a loop gets for its images: of several views a tuple."""
    return tuple(results) if len(results) > 1 else results[0]


def count_images(batch: Any) -> int:
    """The samples of a batch: the length of its first tensor or packed images; 0 without any."""
    for leaf in objects(batch, is_encoded):
        if isinstance(leaf, PreparedImages):
            return len(leaf)
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return leaf.size(0)  # which a nested tensor has, and no length
    return 0
