"""From a host batch to a device batch: move tensors, decode, resample, transform."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from gpuprefetch.core.nested import Batch, Leaf, map_leaves, to_device
from gpuprefetch.core.ranks import Ranks
from gpuprefetch.core.stage import Empty
from gpuprefetch.core.stats import Stats, Timed
from gpuprefetch.images.apart import Apart
from gpuprefetch.images.bad import BadImageError
from gpuprefetch.images.collate import encoded_leaves, pack_lists
from gpuprefetch.images.counting import count_images
from gpuprefetch.images.decoding import Decoding
from gpuprefetch.images.division import Share
from gpuprefetch.images.finish import finish
from gpuprefetch.images.guard import end_reading
from gpuprefetch.images.job import ImageJob
from gpuprefetch.images.notes import Notes
from gpuprefetch.images.nvjpeg import LEAST_FOR_KERNELS
from gpuprefetch.images.packer import Packer, Packing
from gpuprefetch.images.plan import SUB_BATCH, SUB_BATCH_BYTES, TOGETHER, ImageCost, cost_of
from gpuprefetch.images.prepared import PreparedImages, is_encoded
from gpuprefetch.images.share import Balancer
from gpuprefetch.images.slab import unmap_dead
from gpuprefetch.images.targets import refuse_unfollowed
from gpuprefetch.images.tensors import transform_tensors
from gpuprefetch.images.tolerance import Tolerance, bad_images
from gpuprefetch.images.view import View
from gpuprefetch.images.warmup import is_warm, warm_up
from gpuprefetch.transforms.random import batch_seed, derive

_UNEVEN = (
    "on_error has left images out of a batch of one of several ranks. Collectives over tensors of "
    "equal shapes, such as all_gather, fail with such batches, and DistributedDataParallel weighs "
    'ranks, not images. on_error="replace" keeps batches whole.'
)


@dataclass(slots=True)
class Remarks:
    """What workers found and the user should know. Each kind is told once."""

    told: set[str] = field(default_factory=set)

    def pass_on(self, remarks: dict[str, str]) -> None:
        """Warn of what was not told yet: kind -> text."""
        for kind, text in remarks.items():
            if kind not in self.told:
                self.told.add(kind)
                warnings.warn(text, stacklevel=2)


@dataclass
class Pipeline:
    """What happens to each batch on the device. See :class:`.core.stage.Stage`.

    A prefetcher has one. Each epoch has a copy from :meth:`for_epoch` with another decoding and
    other notes; the rest is shared.
    """

    views: Sequence[View]  # most loops have one
    packer: Packer  # of encoded images that no worker has packed
    decoding: Decoding
    tolerance: Tolerance
    stats: Stats
    remarks: Remarks = field(default_factory=Remarks)
    balancer: Balancer | None = None
    # A collate function that runs after the transforms: a finished Apart and a seed -> a batch.
    after: Callable[[Apart, int], object] | None = None
    ranks: Ranks = field(default_factory=Ranks)  # what is sampled for a whole batch depends on them
    notes: Notes = field(default_factory=Notes)  # of the epoch
    only: int | None = None  # the one row of a batch that is handed over, after all transforms
    # By number of the batch: what one call has decoded with others.
    _decoded: dict[int, tuple[Batch, list[ImageJob]]] = field(default_factory=dict)

    def for_epoch(self, **changes: object) -> Pipeline:
        """A copy for one epoch, whose thread has streams and scratch for itself."""
        fresh = {"decoding": self.decoding.anew(), "_decoded": {}} | changes
        return replace(self, **fresh)  # type: ignore[arg-type]

    def with_own_state(self) -> Pipeline:
        """A copy whose transforms nobody else calls, as the thread of an epoch may do meanwhile."""
        return replace(self, views=[view.with_own_state() for view in self.views])

    @property
    def device(self) -> torch.device:
        return self.decoding.device

    @property
    def memory_budget(self) -> int | None:
        return self.decoding.memory_budget

    @property
    def streams(self) -> int:
        return self.decoding.streams

    def scratch(self) -> contextlib.AbstractContextManager[None]:
        return self.decoding.scratch()

    def warm_up(self) -> None:
        if self.decoding.expects_photos:
            self._warm_up(photos=Share.of(self.packer.share).part < 1)

    def _warm_up(self, *, photos: bool) -> None:
        """``photos`` says whether files are left to the decoder."""
        decoder = self.decoding.decoder if photos else None
        warm_up(self.device, decoder, [view.head for view in self.views])

    def cost(self, batch: Batch) -> ImageCost:
        heads = [view.head for view in self.views]
        return cost_of(batch, heads, self.decoding.copies)

    def receive(self, batch: Batch, number: int, waited: float) -> tuple[Batch, int]:
        batch, packed = pack_lists(batch, Packing(self.packer))
        self.notes.see(number, packed)
        if packed and not is_warm(self.device):
            self._warm_up(photos=any(part.call for each in packed for part in each.plan.parts))
        for images in packed:
            for name, count in images.report.counts.items():
                self.stats.add(name, count)
            self.remarks.pass_on(images.report.remarks)
        if packed and self.balancer is not None:
            decoding = sum(images.report.counts["worker_decode_seconds"] for images in packed)
            self.balancer.fetched(waited, decoding)
            self.stats.share = self.balancer.value
        return batch, count_images(batch, packed)

    def handed_over(self, period: float, waited: float) -> None:
        if self.balancer is not None:
            self.balancer.handed_over(period, waited)

    def gathers(self, batch: Batch) -> int:
        packed = encoded_leaves(batch) if self.decoding.joins else []
        calls = [part.call for images in packed for part in images.plan.parts if part.call]
        if not calls:
            return 1
        images = sum(len(call.positions) for call in calls)
        size = sum(call.size for call in calls)
        return max(min(SUB_BATCH // images, SUB_BATCH_BYTES // max(size, 1), TOGETHER), 1)

    def begin_together(self, batches: Sequence[tuple[int, Batch]]) -> None:
        try:
            begun = {number: self._begin(batch, None)[:2] for number, batch in batches}
            jobs = [job for _, own in begun.values() for job in own]
            sizes = [job.scratch for job in jobs]
            if all(sizes) and 0 < sum(sizes) <= SUB_BATCH_BYTES:
                ImageJob.decode_together(jobs, self.decoding)
                self._decoded.update(begun)
        except Exception:  # run() meets the same, and tells which batch it is of
            self._decoded.clear()

    def run(self, batch: Batch, number: int, epoch: int, cost: ImageCost | None) -> Batch:
        decoded = self._decoded.pop(number, None)
        result, jobs = self._decode(batch, cost) if decoded is None else decoded
        seed = batch_seed(self.packer.origin.seed, epoch, number + (self.ranks.rank << 32))
        if jobs:
            result = self._finish(result, jobs, seed)
        elif len(self.views) > 1 or self.views[0].changes:
            moves = self.packer.moves
            result = transform_tensors(result, batch, self.views, seed, self.stats, moves=moves)
        if isinstance(result, Apart):
            assert self.after is not None
            with Timed(self.stats, "tail"):
                return self.after(result, derive(seed, -2))
        return result

    def _decode(self, batch: Batch, cost: ImageCost | None) -> tuple[Batch, list[ImageJob]]:
        """Queue the copies and decode calls of a batch; it, with a job for each leaf of images."""
        limit = None if cost is None else cost.limit(self.memory_budget)
        try:
            begun = self._begin(batch, limit)
        except torch.OutOfMemoryError:
            begun = None  # the second try comes when the exception no longer holds memory
        if begun is None:
            self.decoding.make_room()
            begun = self._begin(batch, limit)
        result, jobs, parts = begun
        self.decoding.run(parts)
        return result, jobs

    def _begin(
        self, batch: Batch, limit: int | None
    ) -> tuple[Batch, list[ImageJob], Sequence[Callable[[], None]]]:
        """Queue the copies of a batch; the batch with a job for each leaf of encoded images."""
        jobs: list[ImageJob] = []
        heads = [view.head for view in self.views]

        def move(leaf: Leaf) -> Batch:
            if not isinstance(leaf, PreparedImages):
                return to_device(leaf, self.device)
            for view in self.views:
                if view.head.names or view.tail or view.refused:
                    view.require_files()
            jobs.append(ImageJob(leaf, leaf.sized(heads), self.decoding, self.learned))
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

    def decide_share(self) -> None:
        """Before workers start: a share that is given means the same files from the first batch."""
        balancer = self.balancer
        decoder = self.decoding.decoder
        if balancer is None or decoder is None or not balancer.chosen or not 0 < balancer.value < 1:
            return
        if decoder.streams > 1:
            balancer.leave_to_kernels(self._least)

    @property
    def _least(self) -> int:
        """The fewest files of a batch that make a call for CUDA kernels, with those of others."""
        return -(-LEAST_FOR_KERNELS // (TOGETHER if self.decoding.joins else 1))

    def learned(self) -> None:
        """Let idle cores decode as well: the GPU has no engines, and CUDA kernels decode."""
        if self.balancer is not None:
            self.balancer.start_without_engines(self._least)

    def _finish(self, batch: Batch, jobs: list[ImageJob], seed: int) -> Batch:
        for job in jobs:
            job.check()
        images = [job.images for job in jobs]
        rows = self.tolerance.kept_rows(images)
        wanted = rows if rows is None or self.only is None else rows[rows == self.only]
        if wanted is not None and not len(wanted):
            return self._empty(images)
        if rows is not None and len(rows) < len(images[0]) and self.ranks.count > 1:
            self.remarks.pass_on({"uneven": _UNEVEN})
        return finish(batch, jobs, self.views, seed, self.stats, rows=rows, only=self.only)

    def _empty(self, images: Sequence[PreparedImages]) -> Empty:
        """What stands for a batch whose images were all left out."""
        count = len(images[0])
        last = bad_images(images)[-1]
        if self.ranks.count > 1:
            raise BadImageError(
                f"on_error has left out all {count} images of a batch on rank {self.ranks.rank} of "
                f"{self.ranks.count}, which would wait for each other from here on, the last: "
                f'{last}. on_error="replace" keeps batches whole.'
            )
        return Empty(count, str(last), BadImageError)

    def asked(self) -> None:
        """The loop goes on: its modules are no longer checked for encoded images."""
        end_reading()

    def close(self) -> None:
        self._decoded.clear()  # of a call whose epoch has ended before all of its batches
        unmap_dead()
