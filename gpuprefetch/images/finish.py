"""From decoded images to what the loop gets: kept rows, and the transforms after the fused ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.core.nested import Batch, Leaf, map_leaves, select
from gpuprefetch.core.stats import Stats, Timed
from gpuprefetch.images.columns import unstack
from gpuprefetch.images.job import ImageJob
from gpuprefetch.images.joint import carry_on
from gpuprefetch.images.places import is_place, place_views
from gpuprefetch.images.rows import is_column, refuse_other_rows, take_rows
from gpuprefetch.images.tail import run_tail
from gpuprefetch.images.view import View
from gpuprefetch.images.walk import PerSample
from gpuprefetch.policies.ops_launch import Layout
from gpuprefetch.transforms.random import derive, tail_keys, view_seed


def finish(
    batch: Batch,
    jobs: Sequence[ImageJob],
    views: Sequence[View],
    seed: int,
    stats: Stats,
    *,
    rows: torch.Tensor | None,
    only: int | None,
) -> Batch:
    """Make the loop's batch.

    Args:
        batch: as the collate function made it, with a job in place of encoded images.
        jobs: these jobs, whose images are decoded and resampled.
        views: what becomes of the images.
        seed: of what is sampled for the batch as a whole.
        stats: which count the time.
        rows: the kept rows, ``(M,)``; None for all.
        only: the one row of the batch that is handed over, after all transforms; None for all.
    """
    images = jobs[0].images
    count = len(images)
    tails = any(view.tail for view in views) or any(job.images.who.calls for job in jobs)
    if rows is not None or only is not None:
        refuse_other_rows(batch, images.who.samples)
    if images.targets and tails:
        batch = unstack(batch, count)
    if rows is not None:
        batch = _keep(batch, jobs, views, rows, count)
    if tails:
        with Timed(stats, "tail"):
            batch = _run_tails(batch, jobs, views, rows, seed)
    kept = torch.arange(count) if rows is None else rows
    if only is not None:
        row = kept.eq(only).nonzero()[:1, 0]
        batch = _keep(batch, jobs, views, row, len(kept))
        kept = row
    if select(batch, is_place):
        (job,) = jobs  # a sample with places has one image
        batch = place_views(batch, job, job.finished)
    return map_leaves(_result, batch, partial(is_column, count=len(kept)))


def _keep(
    batch: Batch,
    jobs: Sequence[ImageJob],
    views: Sequence[View],
    rows: torch.Tensor,
    count: int,
) -> Batch:
    """Take some rows out of a batch of ``count`` images, and out of the results of its jobs."""
    take = partial(take_rows, rows=rows, count=count)
    for job in jobs:
        for n, view in enumerate(views):
            # A list of images of their own sizes has an entry per sample, several results of a
            # transform have not.
            several = view.tail and not view.head.has_own_sizes
            take_all = partial(map_leaves, take) if several else take
            job.replace_result(n, take_all(job.result(n)))
    return map_leaves(take, batch, partial(is_column, count=count))


def _run_tails(
    batch: Batch,
    jobs: Sequence[ImageJob],
    views: Sequence[View],
    rows: torch.Tensor | None,
    seed: int,
) -> Batch:
    """Run the transforms after the fused ones on images, and on targets beside them.

    Images of one sample are transformed alike. Returns the batch with the moved targets.
    """
    targets = jobs[0].images.targets
    together = _share_samples(jobs)
    if targets and not together:
        raise ValueError(
            "The collate function leaves samples apart, and the transforms after the fused ones "
            "need one batch. Use collate_fn=lambda samples: tuple(zip(*samples))."
        )
    groups = [jobs] if together else [[job] for job in jobs]
    kept = slice(None) if rows is None else rows.numpy()
    for job in jobs:
        _carry_on(job, kept)
    for number, group in enumerate(groups):
        own = derive(seed, number) if number else seed
        keys = group[0].images.who.keys[kept]
        for n, view in enumerate(views):
            outs: Sequence[Batch] = [job.result(n) for job in group]
            sampled = tail_keys(keys, n)
            if targets:
                outs, batch = run_tail(
                    view.tail, outs, batch, targets, sampled, own, view.values.reach
                )
            else:
                layouts = [_layouts(job, n) if rows is None else None for job in group]
                outs = view.run_tail(outs, view_seed(own, n), sampled, layouts)
            for job, out in zip(group, outs, strict=True):
                job.replace_result(n, out)
    return batch


def _carry_on(job: ImageJob, kept: slice | npt.NDArray[np.int64]) -> None:
    """Do to its images what the transform of their dataset did, and the launch did not."""
    who = job.images.who
    if who.calls:
        images = job.result(0)  # there is one view
        assert isinstance(images, list)
        places = np.arange(len(who.calls))[kept]
        calls = [who.calls[place] for place in places.tolist()]
        job.replace_result(0, carry_on(images, calls, who.keys[kept]))


def _layouts(job: ImageJob, view: int) -> Sequence[Layout] | None:
    """What a worker has sampled for the first transform after the fused ones; None if nothing."""
    layouts = job.images.made.layouts
    return layouts[view] if layouts else None


def _share_samples(jobs: Sequence[ImageJob]) -> bool:
    """Whether the images of all jobs are of the same samples, row by row."""
    first = jobs[0].images.who.keys
    return all(np.array_equal(job.images.who.keys, first) for job in jobs)


def _result(leaf: Leaf) -> Batch:
    """What the loop gets for a leaf."""
    if isinstance(leaf, ImageJob):
        return one_or_all(leaf.finished)
    return leaf.restored() if isinstance(leaf, PerSample) else leaf


def one_or_all(results: Sequence[object]) -> Batch:
    """What the loop gets for its images: the result of one view, or a list of several."""
    return list(results) if len(results) > 1 else results[0]
