"""What the model saw of a sample: its batch, prepared once more."""

from __future__ import annotations

import operator
import zlib
from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, IterableDataset, Subset

from gpuprefetch.core.source import _samplers, attribute, in_order, rank, sampler_of
from gpuprefetch.core.stats import Stats
from gpuprefetch.core.streams import own_modes
from gpuprefetch.images.apart import Apart
from gpuprefetch.images.bad import BadImage, BadImageError
from gpuprefetch.images.encoded import PreparedImages
from gpuprefetch.images.stage import Pipeline
from gpuprefetch.images.worker import Announced, HostStage, announce, encoded_leaves

# Epochs whose batches are noted, and how many batches of each: 300 MB at 256 samples a batch, where
# an epoch has no end, and 10 MB of an epoch of ImageNet.
KEPT, MOST = 2, 1 << 17


class Noted(NamedTuple):
    """What is known of a batch."""

    number: int  # in its epoch
    keys: Sequence[Any]  # of its samples
    repeats: Sequence[int]  # how often the epoch has had each before; empty where it has had none
    checksum: int | None  # of all samples up to here; None where not all are integers


@dataclass(slots=True)
class Notes:
    """Of one epoch."""

    seed: int
    place: dict[str, Any] = field(default_factory=lambda: {"batches": 0})  # of its Source
    shares: dict[int, float] = field(default_factory=dict)  # of the workers, by number of the batch
    # The latest that the sampler gave. The last ones are ahead of the loop.
    batches: deque[Noted] = field(default_factory=lambda: deque(maxlen=MOST))
    given: int = 0  # how many there were

    def add(self, keys: Sequence[Any], repeats: Sequence[int] = ()) -> None:
        before = self.batches[-1].checksum if self.batches else 0
        known = isinstance(keys, array) and before is not None
        checksum = zlib.crc32(keys, before) if known else None  # type: ignore[arg-type]
        self.batches.append(Noted(self.given, keys, repeats, checksum))
        self.shares.pop(self.given - MOST, None)
        self.given += 1

    def had(self) -> list[Noted]:
        copied = list(self.batches)  # in one step, as another thread may be adding
        return [noted for noted in copied if noted.number < self.place["batches"]]

    def drawn(self) -> tuple[int, int | None]:
        """The rank and a checksum of what the loop has had: None where that is not known."""
        if not self.place["batches"]:
            return rank(), 0
        had = self.had()
        known = had and had[-1].number == self.place["batches"] - 1
        return rank(), had[-1].checksum if known else None

    def refuse_another_order(self) -> None:
        """Compare what a resumed epoch has left out with what was drawn before."""
        if "drawn" not in self.place:
            return
        there, before = self.place["drawn"]
        here, now = self.drawn()
        # Lightning has the state of rank 0 loaded by all.
        if there == here and (now != before or self.given < self.place["batches"]):
            raise ValueError(
                "the loader does not begin with the batches that it gave before the interruption. "
                "Build it as it was. The order must come from torch's default generator or the "
                "sampler's own `generator`, and not from an iterator of an earlier epoch."
            )


def _listed(batch: Any) -> Sequence[Any]:
    """The samples of a batch, in an array if they are integers."""
    if isinstance(batch, (Iterator, str)):  # to be read by the dataset
        return [batch]
    for read in (lambda key: array("q", [operator.index(key)]), partial(array, "q"), list):
        with suppress(TypeError, ValueError, OverflowError):
            return read(batch)
    return [batch]  # whatever the dataset takes


_VIEWS = (Subset.__getitem__, ConcatDataset.__getitem__)


def _origin(dataset: Any, key: Any) -> tuple[Any, Any]:
    """The dataset that a sample is of, and its key there, through torch's views of datasets."""
    # accelerate's views of them are of classes derived from them.
    while (get := getattr(type(dataset), "__getitem__", None)) in _VIEWS:
        if get is Subset.__getitem__:
            dataset, key = dataset.dataset, operator.index(dataset.indices[key])
        else:
            key += len(dataset) if key < 0 else 0
            number = bisect_right(dataset.cumulative_sizes, key)
            key -= dataset.cumulative_sizes[number - 1] if number else 0
            dataset = dataset.datasets[number]
    return dataset, key


def _owner(dataset: Any) -> int:
    """The identity of a dataset's state, which accelerate's views of it share."""
    return id(getattr(dataset, "__dict__", dataset))


class Repeats:
    """Counts the samples of an epoch: 4 bytes for each that a dataset has."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._counts: dict[int, Any] = {}  # by the identity of a dataset
        self._others: Counter[Any] = Counter()  # what is not in its range

    def add(self, keys: Iterable[Any]) -> Sequence[int]:
        repeats = array("q", map(self._add, keys))
        return repeats if any(repeats) else ()

    def _add(self, key: Any) -> int:
        dataset = self._dataset
        try:
            dataset, key = _origin(dataset, key)
            owner = _owner(dataset)
            if owner not in self._counts:
                self._counts[owner] = _zeros(dataset)
            counts, place = self._counts[owner], key
            before = int(counts[key])
        except (IndexError, TypeError):
            counts, place = self._others, (_owner(dataset), key)
            try:
                before = counts[place]
            except TypeError:  # a key that has no hash is not counted
                return 0
        counts[place] = before + 1
        return before


def _zeros(dataset: Any) -> memoryview:
    """A count for each sample, in memory that is not there before it is written to."""
    try:
        return np.zeros(len(dataset), dtype=np.uint32).data
    except Exception:  # it has no length, or says one that no memory holds
        return memoryview(bytearray())


class NotedSampler:
    """What gives a loader its batches, or the keys that its dataset makes them of; notes them."""

    def __init__(self, loader: DataLoader[Any], name: str) -> None:
        self._sampler, self._batches = getattr(loader, name), name == "batch_sampler"
        self._stage: Any = loader.collate_fn
        self._dataset, self._workers = loader.dataset, loader.num_workers
        # One that has an order of its own may give other batches, or leave some out.
        self._numbered = in_order(loader) and type(loader).__iter__ is DataLoader.__iter__
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
            repeats = counted.add(keys)
            notes.add(keys, repeats)
            if self._workers:
                number = notes.given - 1 if self._numbered else None
                announced = Announced(keys)
                announced.told = batch, self._stage.token, repeats, number
                yield announced
            else:
                yield announce(batch, self._stage.token, repeats)

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


def rank_of(loader: Any) -> int:
    """The rank of this process if other ranks may be given the same samples, else 0."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return 0
    samplers = list(_samplers(loader))
    replaced = any(attribute(sampler, "replacement") for sampler in samplers)
    if any(_shares_out(sampler, replaced=replaced) for sampler in samplers):
        return 0
    ranks = [attribute(sampler, "rank") for sampler in samplers]
    return next((found for found in ranks if isinstance(found, int)), rank())


def _shares_out(sampler: Any, *, replaced: bool) -> bool:
    """Whether no other rank gets the samples of this one, but for padding."""
    kind = type(sampler)
    if (kind.__module__, kind.__name__) == ("accelerate.data_loader", "BatchSamplerShard"):
        return not replaced
    if isinstance(sampler, DistributedSampler):  # as torch or torchdata wrote it
        where: str = kind.__iter__.__module__
        return where.startswith(("torch.utils.data.", "torchdata."))
    return isinstance(sampler, range)


def noted(loader: Any) -> NotedSampler | None:
    sampler = getattr(loader, sampler_of(loader), None)
    return sampler if isinstance(sampler, NotedSampler) else None


def replay(
    loader: Any, pipeline: Pipeline, notes: Notes, index: Any, epoch: int, *, fixed: bool
) -> Any:
    """Prepare the batch that held a sample once more, and take the sample out of it."""
    had = notes.had()
    held = next((batch for batch in had if index in batch.keys), None)
    if held is None:
        since = f", of those since batch {had[0].number}" if had and had[0].number else ""
        raise LookupError(f"no batch of epoch {epoch}{since} has held sample {index!r} so far.")
    number, indices = held.number, list(held.keys)
    if number not in notes.shares and not fixed:
        raise ValueError(
            f"which images of batch {number} the workers decoded is not known: it came before "
            'load_state_dict(). cpu_share="auto" varies; give it a number.'
        )
    share = notes.shares.get(number, float(pipeline.packer.share))
    packer = replace(
        pipeline.packer,
        seed=notes.seed,
        epoch=torch.tensor([epoch], device="cpu"),
        share=torch.tensor([share], dtype=torch.float64, device="cpu"),
        rank=rank_of(loader),
    )
    on_error = pipeline.on_error if isinstance(pipeline.on_error, str) else "skip"
    pipeline = replace(
        pipeline, packer=packer, on_error=on_error, bad_images={}, max_bad=None, stats=Stats()
    )
    fetch = getattr(loader.dataset, "__getitems__", None)  # which torch's fetcher prefers
    samples = fetch(indices) if fetch else [loader.dataset[i] for i in indices]
    stage = HostStage(loader.collate_fn, packer)
    announce(None, stage.token, held.repeats)
    batch = stage(samples)
    if isinstance(batch, Apart):
        raise ValueError("a sample cannot be told apart after a collate_fn that mixes them.")
    images = encoded_leaves(batch)
    pipeline.only = row = _row_of(indices.index(index), len(indices), images)
    cuda = pipeline.device.type == "cuda"
    with own_modes(pipeline.device), torch.cuda.device(pipeline.device) if cuda else nullcontext():
        result = pipeline.run(batch, number, epoch, pipeline.cost(batch))
        for leaf in images:
            if row in leaf.errors:
                bad = BadImage(index, leaf.paths[row], leaf.errors[row])
                raise BadImageError(f"no model has seen it: {bad}")
        if cuda:
            torch.cuda.current_stream().synchronize()  # the decoder has read the batch's bytes
    return result


def _row_of(position: int, count: int, images: Sequence[PreparedImages]) -> int:
    """Where the collate function has put a sample, given its place among ``count``."""
    if not images:
        raise ValueError("replay is for encoded images, and the dataset gave none.")
    samples = images[0].samples
    if any(leaf.samples != samples for leaf in images):
        raise ValueError(
            "replay takes a row out of the batch, and the collate function leaves samples apart, "
            "or has another number of images for each. Use one that keeps the images together."
        )
    if position in samples:
        return samples.index(position)
    if len(samples) == count and samples[position] < 0:
        return position
    raise ValueError("the collate function has left the sample out of its batch.")
