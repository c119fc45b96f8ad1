"""What the model saw of a sample: its batch, prepared once more."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from gpuprefetch.core.source import (
    _generators,
    _samplers,
    attribute,
    is_stateful,
    rank,
    sampler_of,
    world_size,
)
from gpuprefetch.core.stats import Stats
from gpuprefetch.core.streams import own_modes
from gpuprefetch.images.apart import Apart
from gpuprefetch.images.bad import BadImage, BadImageError
from gpuprefetch.images.collate import Announced, HostStage, announce, encoded_leaves
from gpuprefetch.images.notes import Noted, Notes
from gpuprefetch.images.prepared import PreparedImages
from gpuprefetch.images.samples import Origin, Repeats
from gpuprefetch.images.stage import Pipeline, Ranks
from gpuprefetch.images.tolerance import Tolerance


def _listed(batch: Any) -> Sequence[Any]:
    """The samples of a batch, in an array if they are integers."""
    if isinstance(batch, (Iterator, str)):  # to be read by the dataset
        return [batch]
    for read in (lambda key: array("q", [operator.index(key)]), partial(array, "q"), list):
        with suppress(TypeError, ValueError, OverflowError):
            return read(batch)
    return [batch]  # whatever the dataset takes


class NotedSampler:
    """What gives a loader its batches, or the keys that its dataset makes them of; notes them."""

    def __init__(self, loader: DataLoader[Any], name: str) -> None:
        self._sampler, self._batches = getattr(loader, name), name == "batch_sampler"
        self._stage: Any = loader.collate_fn
        self._dataset, self._workers = loader.dataset, loader.num_workers
        self.notes = Notes(0)

    def __iter__(self) -> Iterator[Any]:
        return self._noted(self.notes)

    def _noted(self, notes: Notes) -> Iterator[Any]:
        epoch, counted = notes, Repeats(self._dataset)
        for batch in self._sampler:
            if self._batches and isinstance(batch, Iterator):
                batch = list(batch)  # read once, here
            if epoch is not self.notes:  # the iterator of an earlier one goes on
                epoch, counted = self.notes, Repeats(self._dataset)
            keys = _listed(batch)
            names, repeats = counted.add(keys)
            notes.add(keys, names, repeats)
            if self._workers:
                announced = Announced(keys)
                announced.told = batch, self._stage.token, names, repeats
                yield announced
            else:
                yield announce(batch, self._stage.token, names, repeats)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy in the making has no _sampler
            raise AttributeError(name)
        return getattr(self._sampler, name)


def has_keys(loader: Any) -> bool:
    """Whether a sampler says what batches are, and may be wrapped: torchdata's may not."""
    return (
        isinstance(loader, DataLoader)
        and not hasattr(loader, "state_dict")
        and not isinstance(loader.dataset, IterableDataset)
    )


# Where samplers of torch, timm, torchvision and accelerate keep their rank, and how many there are.
_KNOWN_RANKS = (
    ("rank", ("num_replicas", "world_size")),
    ("process_index", ("num_processes",)),
)


def ranks_of(loader: Any) -> tuple[int, int]:
    """The rank of this process and how many there are, for all that is known.

    Without torch.distributed a sampler may know, as torch's ``DistributedSampler`` does.
    """
    if world_size() > 1:
        return rank(), world_size()
    for sampler in _samplers(loader):
        for name, names_of_count in _KNOWN_RANKS:
            number = attribute(sampler, name)
            if type(number) is int:
                counts = (attribute(sampler, name) for name in names_of_count)
                return number, next((count for count in counts if type(count) is int), 1)
    return 0, 1


def rank_of(loader: Any) -> int:
    """The rank of this process if other ranks may be given the same samples, else 0."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return 0
    if shares_out(loader):
        return 0
    ranks = [attribute(sampler, "rank") for sampler in _samplers(loader)]
    return next((found for found in ranks if isinstance(found, int)), rank())


def shares_out(loader: Any) -> bool:
    """Whether no other rank gets the samples of this one, but for padding."""
    samplers = _samplers(loader)
    replaced = any(attribute(sampler, "replacement") for sampler in samplers)
    return any(_shares_out(sampler, replaced=replaced) for sampler in samplers)


def _shares_out(sampler: Any, *, replaced: bool) -> bool:
    """The same of one sampler; ``replaced`` is whether samples are drawn with replacement."""
    kind = type(sampler)
    if (kind.__module__, kind.__name__) == ("accelerate.data_loader", "BatchSamplerShard"):
        return not replaced
    if isinstance(sampler, DistributedSampler):  # as torch or torchdata wrote it
        where: str = kind.__iter__.__module__
        return where.startswith(("torch.utils.data.", "torchdata."))
    return isinstance(sampler, range)


def may_share_state(loader: Any) -> bool:
    """Whether ranks may load the state of another: no order is drawn from what it holds."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset) or not isinstance(
        loader, DataLoader
    ):
        return not is_stateful(loader)
    if shares_out(loader):
        return True
    samplers = _samplers(loader)
    own = any(type(attribute(sampler, "rank")) is int for sampler in samplers)
    if own and not _generators(loader):  # its order is a function of its rank
        return True
    plain = (torch.utils.data.SequentialSampler, torch.utils.data.BatchSampler)
    return all(type(sampler) in plain for sampler in samplers)


def noted(loader: Any) -> NotedSampler | None:
    sampler = getattr(loader, sampler_of(loader), None)
    return sampler if isinstance(sampler, NotedSampler) else None


def _find(notes: Notes, index: Any, epoch: int, repeat: int) -> tuple[Noted, int]:
    """The batch that held a sample for the time after ``repeat`` others, and its place there."""
    had, found = notes.had(), 0
    for batch in had:
        if index not in batch.keys:
            continue
        places = [place for place, key in enumerate(batch.keys) if key == index]
        if repeat < found + len(places):
            return batch, places[repeat - found]
        found += len(places)
    since = f", of those since batch {had[0].number}" if had and had[0].number else ""
    often = f" more than {found} times" if found else ""
    raise LookupError(f"no batch of epoch {epoch}{since} has held sample {index!r}{often} so far.")


def replay(
    loader: Any,
    pipeline: Pipeline,
    notes: Notes,
    index: Any,
    epoch: int,
    *,
    repeat: int,
    fixed: bool,
) -> Any:
    """Prepare the batch that held a sample once more, and take the sample out of it."""
    held, position = _find(notes, index, epoch, repeat)
    number, indices = held.number, list(held.keys)
    if number not in notes.shares and not fixed:
        raise ValueError(
            f"which images of batch {number} the workers decoded is not known: it came before "
            'load_state_dict(). cpu_share="auto" varies; give it a number.'
        )
    share = notes.shares.get(number, float(pipeline.packer.share))
    packer = replace(
        pipeline.packer,
        origin=Origin(notes.seed, epoch),
        share=torch.tensor([share], dtype=torch.float64, device="cpu"),
        rank=rank_of(loader),
    )
    on_error = pipeline.tolerance.on_error
    stats = Stats()
    pipeline = pipeline.for_epoch(
        packer=packer,
        tolerance=Tolerance(on_error if isinstance(on_error, str) else "skip", None, stats),
        decoding=pipeline.decoding.anew(stats=stats),
        stats=stats,
        notes=Notes(),
        ranks=Ranks(notes.rank),
    )
    fetch = getattr(loader.dataset, "__getitems__", None)  # which torch's fetcher prefers
    samples = fetch(indices) if fetch else [loader.dataset[i] for i in indices]
    stage = HostStage(loader.collate_fn, packer)
    announce(None, stage.token, held.names, held.repeats)
    batch = stage(samples)
    if isinstance(batch, Apart):
        raise ValueError("a sample cannot be told apart after a collate_fn that mixes them.")
    images = encoded_leaves(batch)
    row = _row_of(position, len(indices), images)
    pipeline = replace(pipeline, only=row)
    cuda = pipeline.device.type == "cuda"
    with own_modes(pipeline.device), torch.cuda.device(pipeline.device) if cuda else nullcontext():
        result = pipeline.run(batch, number, epoch, pipeline.cost(batch))
        for leaf in images:
            if row in leaf.errors:
                bad = BadImage(index, leaf.who.paths[row], leaf.errors[row])
                raise BadImageError(f"no model has seen it: {bad}")
        if cuda:
            torch.cuda.current_stream().synchronize()  # the decoder has read the batch's bytes
    return result


def _row_of(position: int, count: int, images: Sequence[PreparedImages]) -> int:
    """Where the collate function has put a sample, given its place among ``count``."""
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
