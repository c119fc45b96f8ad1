"""Show what the model saw of a sample: prepare its batch once more, and take its row."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gpuprefetch.core.loaders import TorchLoader, in_order
from gpuprefetch.core.nested import Batch, Loader
from gpuprefetch.core.ranks import Ranks, sampling_rank
from gpuprefetch.core.samplers import Key
from gpuprefetch.images.apart import Apart
from gpuprefetch.images.bad import BadImage, BadImageError
from gpuprefetch.images.collate import encoded_leaves
from gpuprefetch.images.division import Share
from gpuprefetch.images.loading import has_keys
from gpuprefetch.images.notes import Noted, Notes
from gpuprefetch.images.once import apart_from_epochs, carry_out, collated, read_samples
from gpuprefetch.images.packer import Packer
from gpuprefetch.images.prepared import PreparedImages
from gpuprefetch.images.samples import Origin, Repeats
from gpuprefetch.images.stage import Pipeline


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A sample in one of the batches of its epoch; an epoch may have it several times."""

    index: Key
    batch: Noted
    position: int  # in the batch


def refuse_unknown(loader: Loader) -> None:
    """Refuse a loader whose batches cannot be read once more."""
    if not (has_keys(loader) and in_order(loader) and loader.batch_sampler is not None):
        raise ValueError(
            "replay needs torch's DataLoader, making batches of a map-style dataset in order: of "
            "others it is not known how to read a sample's batch again."
        )


def find(notes: Notes, index: Key, repeat: int) -> Occurrence:
    """The batch that held a sample after it had come ``repeat`` times, and the position there."""
    had = notes.had()
    if operator.index(repeat) < 0:
        raise ValueError(
            f"repeat counts the times that the epoch has had the sample, from 0, got {repeat!r}: "
            f"replay({index!r}, repeat=0) is the first."
        )
    found = 0
    for batch in had:
        if index not in batch.keys:
            continue
        positions = [position for position, key in enumerate(batch.keys) if key == index]
        if repeat < found + len(positions):
            return Occurrence(index, batch, positions[repeat - found])
        found += len(positions)
    since = f", of those since batch {had[0].number}" if had and had[0].number else ""
    often = f" more than {found} times" if found else ""
    raise LookupError(
        f"no batch of epoch {notes.place.epoch}{since} has held sample {index!r}{often} so far."
    )


def replay(loader: TorchLoader, pipeline: Pipeline, notes: Notes, index: Key, repeat: int) -> Batch:
    """Prepare the batch that held a sample once more, and take the sample out of it."""
    sample = find(notes, index, repeat)
    packer = _packer_of(loader, pipeline, notes, sample.batch.number)
    batch = _read(loader, packer, sample.batch)
    images = encoded_leaves(batch)
    row = _row_of(sample.position, len(sample.batch.keys), images)
    on_error = pipeline.tolerance.on_error
    stage = apart_from_epochs(
        pipeline.with_own_state(),
        packer,
        on_error if isinstance(on_error, str) else "skip",
        ranks=Ranks(notes.rank),
        only=row,
    )
    result = carry_out(stage, batch, sample.batch.number, notes.place.epoch)
    for leaf in images:
        if row in leaf.errors:
            bad = BadImage(index, leaf.who.paths[row], leaf.errors[row])
            raise BadImageError(f"no model has seen it: {bad}")
    return result


def _packer_of(loader: TorchLoader, pipeline: Pipeline, notes: Notes, number: int) -> Packer:
    """The packer as the workers had it for a batch."""
    fixed = pipeline.balancer is None or pipeline.balancer.fixed
    if number not in notes.shares and not fixed:
        raise ValueError(
            f"which images of batch {number} the workers decoded is not known: it came before "
            'load_state_dict(). cpu_share="auto" varies; give it a number.'
        )
    pipeline.decide_share()
    share = notes.shares.get(number, Share.of(pipeline.packer.share))
    return replace(
        pipeline.packer,
        origin=Origin(notes.seed, notes.place.epoch),
        share=torch.tensor(share, dtype=torch.float64, device="cpu"),
        rank=sampling_rank(loader),
    )


def _read(loader: TorchLoader, packer: Packer, held: Noted) -> Batch:
    """Read the samples of a batch here, and collate them."""
    names, _ = Repeats(loader.dataset).add(held.keys)
    if list(names) != list(held.names):
        raise ValueError(
            f"the dataset has other samples under the keys of batch {held.number} than it had when "
            "the model saw them, as a Subset does whose indices are set anew. Show what it has "
            "now: prefetcher.preview(samples=[index])."
        )
    batch = collated(loader, packer, read_samples(loader.dataset, held.keys), held)
    if isinstance(batch, Apart):
        raise ValueError(
            "a sample cannot be told apart after a collate_fn that runs after the transforms and "
            "may mix them. prefetcher.preview(samples=[index]) shows it."
        )
    return batch


def _row_of(position: int, count: int, images: Sequence[PreparedImages]) -> int:
    """The row in which the collate function has put a sample, by its position among ``count``."""
    if not images:
        raise ValueError("replay is for encoded images, and the dataset gave none.")
    samples = images[0].who.samples
    if any(leaf.who.samples != samples for leaf in images):
        raise ValueError(
            "replay takes a row out of the batch, and the collate function leaves samples apart, "
            "or has another number of images for each. Use one that keeps the images together."
        )
    if position in samples:
        return samples.index(position)
    if len(samples) == count and samples[position] < 0:
        return position
    raise ValueError("the collate function has left the sample out of its batch.")
