"""DataPrefetcher: batches of a DataLoader on the device, in order and ahead of time."""

from __future__ import annotations

import copy
import operator
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from gpuprefetch.core.device import resolve_device
from gpuprefetch.core.epoch import Epoch, Lookahead
from gpuprefetch.core.forks import garbage_stays_here
from gpuprefetch.core.progress import Progress
from gpuprefetch.core.ranks import INTO_PREPARED, same_on_ranks
from gpuprefetch.core.source import Source, in_order, is_stateful, kind, owners
from gpuprefetch.core.state import checked, is_foreign, is_state
from gpuprefetch.images.apart import collate_apart
from gpuprefetch.images.bad import BadImage
from gpuprefetch.images.build import FirstBatch, build_stage, with_packing
from gpuprefetch.images.decode import ImageDecoder
from gpuprefetch.images.imports import load_worker_modules
from gpuprefetch.images.notes import KEPT, Notes
from gpuprefetch.images.replay import (
    has_keys,
    may_share_state,
    noted,
    rank_of,
    ranks_of,
    replay,
)
from gpuprefetch.images.samples import Origin
from gpuprefetch.images.stage import Pipeline, Ranks
from gpuprefetch.lists.convert import title
from gpuprefetch.lists.snapshot import Snapshot
from gpuprefetch.policies.per_image import PerImage
from gpuprefetch.transforms.head import Transform

_running: weakref.WeakValueDictionary[int, Lookahead] = weakref.WeakValueDictionary()  # by loader


def _refuse_no_loader(loader: Any) -> None:
    if isinstance(loader, (Dataset, str, bytes, type)) or not hasattr(loader, "__iter__"):
        raise TypeError(
            f"DataPrefetcher wraps a DataLoader, got {type(loader).__name__}. Put it into "
            "one: DataPrefetcher(DataLoader(dataset, batch_size=...)), with batch_size=None if it "
            "gives batches already, as WebDataset's WebLoader does."
        )
    # Of other modules a class may begin anew in an __iter__ that returns itself.
    once = ("builtins", "itertools", "torch.utils.data.dataloader")
    if hasattr(loader, "__next__") and type(loader).__module__ in once:
        raise TypeError(
            f"A {type(loader).__name__} gives its batches once. Pass what can be iterated anew for "
            "each epoch, such as the DataLoader itself."
        )
    if hasattr(loader, "base_dataloader"):  # its end would come before ours, ahead of the loop
        raise TypeError(
            "a loader that accelerate has prepared counts the loop's batches and is not wrapped: "
            f"{INTO_PREPARED}."
        )
    if isinstance(loader, DataPrefetcher):
        raise TypeError(
            "DataPrefetcher wraps a DataLoader, got a DataPrefetcher, whose batches are on the "
            "device already. Give that one all arguments, or wrap the DataLoader within it."
        )


class DataPrefetcher:
    """Wrap a DataLoader: its batches arrive on the device, decoded and transformed ahead of time.

    The batches are the wrapped loader's, in its order. Tensors in any nesting of tuples, lists,
    mappings, namedtuples and dataclasses move to the device, as do objects with a ``to`` method.
    Other leaves pass through. Every ``iter()`` is a new epoch. Attributes that are not found here
    (``dataset``, ``sampler``, ``batch_size``, ...) are the loader's. The caller's current device
    and stream are never changed.

    Args:
        loader: a ``DataLoader``, or any iterable of batches that can be iterated again.
        device: CUDA device, its index, or "cpu". None is CUDA where there is one, else the CPU,
            which gives the same results without streams.
        transforms: list of kornia's augmentations, torchvision's, this library's own, and callables
            on an ``(N, C, H, W)`` batch; or :class:`Views`. All but these callables sample for each
            image. The first ones (crop or resize, flips, ``Normalize``) are fused into one launch,
            which gives values in [0, 1] before ``Normalize``. The others run after it.
        dtype: of the images after the fused transforms; float32 by default.
        memory_format: of these images; contiguous by default.
        device_prefetch_size: batches that are ready or in preparation. None is two, or one where
            two would need more than 512 MiB. Without workers, and on a CPU, a batch is prepared
            when the loop asks for it.
        decoder: "nvjpeg" on the GPU, called directly, or by "torchvision", whose ``decode_jpeg`` is
            used; "cpu" in the workers; "auto" is "nvjpeg" where that works, else "cpu".
        apply_exif: whether pictures are turned upright. False agrees with PIL and ``ImageFolder``.
        cpu_share: share of the JPEGs that the workers decode, 0.0 to 1.0, the smallest first.
            "auto" is none, and more while the loop waits for the GPU's decoder.
        seed: of the random parameters; None is ``torch.initial_seed()`` as an epoch begins. Those
            of encoded images depend on seed, epoch, sample and repeat of the sample, and on the
            rank unless ranks surely share samples out. All images of a sample have the same. Those
            of tensors, and what kornia's later ops and callables sample for a batch, depend on
            seed, epoch, rank and number of the batch.
        on_error: for a file that cannot be decoded: "raise" :class:`BadImageError`, "skip" the
            sample, or "replace" it by another one of its batch, target included. A callable gets
            the :class:`BadImage`, and the sample is skipped.
        max_bad: bad files that are tolerated, each counted once; None is any number. One more
            raises :class:`BadImageError`.
        memory_budget: device memory for batches on their way to the loop: "2GiB", "2GB", or bytes.
            Decoded images count, and the tensors of a batch until its hand-over; the decoder's own
            memory and what later transforms allocate do not. Batches that need more are decoded in
            smaller parts, and fewer are kept ready.

    Attributes:
        stats: counters, see :class:`Stats`.

    Raises:
        TypeError: if ``loader`` is a dataset, iterated once or what accelerate prepared, or a
            transform is not callable.
        ValueError: for other arguments out of range, and for transforms that cannot work.

    Example:
        >>> loader = DataPrefetcher(DataLoader(dataset, num_workers=8, pin_memory=True))
        >>> for images, target in loader: ...
    """

    def __init__(
        self,
        loader: DataLoader[Any] | Iterable[Any],
        *,
        device: torch.device | str | int | None = None,
        transforms: Sequence[Transform] | None = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
        device_prefetch_size: int | None = None,
        decoder: str | ImageDecoder = "auto",
        apply_exif: bool = False,
        cpu_share: float | str = "auto",
        seed: int | None = None,
        on_error: str | Callable[[BadImage], Any] = "raise",
        max_bad: int | None = None,
        memory_budget: str | int | None = None,
    ) -> None:
        asked, own = locals().copy(), ("self", "loader", "device")
        self._options = {name: value for name, value in asked.items() if name not in own}
        _refuse_no_loader(loader)
        self.device = resolve_device(device)
        self._pipeline, balancer = build_stage(loader, self.device, self._options)
        self.stats, self._balancer = self._pipeline.stats, balancer
        self._read = Snapshot(transforms, self._running_ops())
        self._depth, self._first_batch = device_prefetch_size, FirstBatch(loader, self.device)
        self._progress = Progress()
        self._loaded_seed: tuple[int, int] | None = None  # a state's, and torch's at that time
        self._beginning = threading.RLock()  # one thread at a time begins an epoch
        self._persistent: DataLoader[Any] | None = None  # the copy whose workers live on
        self._notes: dict[int, Notes] = {}  # by epoch
        self._manual: Epoch | None = None  # the iterator of next(), and the length of its batches
        self._manual_length = 2
        self._told_of_ranks = False
        self._sent: Pipeline | None = None  # what a copy was made with last
        self._kind = kind(loader)  # before a sampler makes its generator
        self._loader: Any = loader  # from here on its attributes are set there

    @property
    def transforms(self) -> Any:
        """As they were given; an empty list for none."""
        return [] if self._options["transforms"] is None else self._options["transforms"]

    @property
    def seed(self) -> int:
        """Of the random parameters, of an epoch that begins now."""
        if self._options["seed"] is not None:
            return operator.index(self._options["seed"]) % 2**64
        if self._loaded_seed is not None:
            loaded, before = self._loaded_seed
            if torch.initial_seed() == before:  # else the script has seeded torch since
                return loaded
        return torch.initial_seed()

    @property
    def bad_images(self) -> list[BadImage]:
        """The images that were skipped or replaced, over all epochs, each file once."""
        return list(self._pipeline.tolerance.seen.values())

    def __iter__(self) -> Iterator[Any]:
        if not self._told_of_ranks and (words := same_on_ranks(self, self._loader)):
            self._told_of_ranks = True
            warnings.warn(words, stacklevel=2)
        with self._beginning:
            self._refuse_changed()
            return self._begin()

    def _running_ops(self) -> list[Any]:
        """The transforms that run as they were given, and not as they were read."""
        tails = [op for view in self._pipeline.views for op in view.tail]
        return [op for op in tails if not isinstance(op, PerImage)]

    def _refuse_changed(self) -> None:
        """Compare the list of transforms, which has been read, with what it was."""
        if self._read.differs(self._options["transforms"]):
            raise TypeError(
                "transforms, or one of its ops, has changed since DataPrefetcher was built, which "
                "has read it. Build it anew: DataPrefetcher(loader, transforms=...)."
            )

    def _begin(self) -> Epoch:
        progress = self._progress
        epoch, resumed = progress.begin(self._loader)
        source = None
        try:
            seed = self.seed if resumed is None else resumed.get("seed", self.seed)
            loader, stage = self._prepared(seed, epoch)
            notes = self._note(loader, seed, epoch)
            load_worker_modules(stage.packer)
            with garbage_stays_here():
                source = Source(loader, resumed, notes.skip)
            source.place["seed"] = seed
            notes.place = source.place
            if resumed is not None:
                notes.refuse_another_order()
            self._balancer.begin()
            lookahead = Lookahead(
                stage.for_epoch(balancer=self._balancer, notes=notes),
                source,
                epoch=epoch,
                depth=self._depth,
                # Without workers the dataset runs in this process, and draws its random numbers in
                # the caller's thread as without us. On the CPU there is nothing to run ahead of.
                threaded=self.device.type == "cuda" and getattr(loader, "num_workers", 0) > 0,
                check=self._first_batch,
            )
        except BaseException:
            if source is not None:
                source.close()
            progress.failed()
            raise
        iterator = Epoch(lookahead)
        progress.began(source.place, lookahead.use)
        _running[id(loader)] = lookahead
        try:
            lookahead.start()
        except BaseException:
            iterator.close()  # unused: the next one begins the same epoch
            raise
        return iterator

    def _prepared(self, seed: int, epoch: int) -> tuple[Iterable[Any], Pipeline]:
        """The loader with our packing in its collate; the user's own object is left as it is."""
        pipeline, loader = self._pipeline, self._loader
        pipeline.packer.rank = rank_of(loader)
        pipeline.ranks = Ranks(*ranks_of(loader))
        if not isinstance(loader, DataLoader):
            return loader, self._at(seed, epoch)
        pipeline.after = partial(collate_apart, loader.collate_fn, self.device)
        if not loader.persistent_workers:
            pipeline = self._at(seed, epoch)
            return with_packing(loader, pipeline.packer), pipeline
        running = _running.get(id(self._persistent))
        if running is not None and not running.close():  # its thread waits for the same workers
            self._persistent = None
        # These workers live on: seed and epoch reach them through shared memory.
        pipeline.packer.origin.share()  # not in a deep copy of us
        pipeline.packer.origin.set(seed, epoch)
        loaded = getattr(loader, "next_iter_state", None) is not None  # torchdata's
        # A resumed epoch has changed the generator of its workers.
        if self._persistent is None or loaded or self._progress.resumed:
            self._persistent = with_packing(loader, pipeline.packer)
        return self._persistent, pipeline

    def _note(self, loader: Any, seed: int, epoch: int) -> Notes:
        """Notes of a new epoch, which its sampler will write; those of an older one are dropped."""
        self._notes.pop(epoch, None)
        sampler = noted(loader)
        notes = Notes(seed, self._pipeline.ranks.rank, by_sampler=sampler is not None)
        self._notes[epoch] = notes
        if sampler is not None:
            sampler.notes = notes
        if len(self._notes) > KEPT:
            del self._notes[next(iter(self._notes))]
        return notes

    def _at(self, seed: int, epoch: int) -> Pipeline:
        packer = replace(self._pipeline.packer, origin=Origin(seed, epoch))
        return replace(self._pipeline, packer=packer)

    def next(self) -> Any:
        """The next batch, in the manner of Apex's ``data_prefetcher``.

        Returns:
            The batch. At the end of an epoch a tuple of as many None as the batch has elements, or
            one None for a batch that is no tuple or list. The call after that starts a new epoch.

        Raises:
            RuntimeError: after an error, which has ended the epoch, until :meth:`set_epoch`.
        """
        if self._manual is None:
            self._manual = iter(self)  # type: ignore[assignment]
        try:
            batch = next(self._manual)  # type: ignore[arg-type]
        except StopIteration:
            self._manual = None
            return (None,) * self._manual_length if self._manual_length else None
        self._manual_length = len(batch) if isinstance(batch, (tuple, list)) else 0
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the latest epoch stands: what the loop has had, not what is on its way to it.

        Before the first epoch, and once the loop has come to an epoch's end, the state is the
        beginning of the next epoch, with the order that is drawn now. A state taken in the loop
        after the last batch resumes with nothing left. It can be written as JSON, unless the
        loader's own state cannot. Only torchdata's ``StatefulDataLoader`` saves a state of the
        dataset; random numbers that another dataset draws in its workers are not repeated.

        Raises:
            ValueError: after a batch of a loader with ``in_order=False``, before the epoch's end.
        """
        place = self._progress.save(self._loader, self._persistent)
        rank, world_size = ranks_of(self._loader)
        state = {"seed": self.seed, "kind": self._kind} | place
        state |= {"rank": rank, "world_size": world_size}
        notes = self._notes.get(place["epoch"])
        if notes is not None and notes.place is place:  # else loaded, with its own
            state["drawn"] = notes.drawn()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter()`` go on where :meth:`state_dict` was taken.

        The batches are those of the uninterrupted epoch, also with other workers or another
        ``device_prefetch_size``. The batch size must be the same, and for an iterable dataset
        without a state of its own, and a ``StatefulDataLoader``, the number of workers. The order
        is drawn once more. If it is not the saved one, that ``iter()`` raises ``ValueError``.
        Torch's default generator goes on as it was, unless it is in the saved state already or the
        dataset has a state of its own in this process. A ``StatefulDataLoader``'s own state begins
        an epoch there.

        Raises:
            ValueError: if ``state`` does not come from :meth:`state_dict`, or from that of another
                kind of loader.
        """
        if is_stateful(self._loader) and not is_state(state) and not is_foreign(state):
            self._loader.load_state_dict(state)  # the loader's own
            self._progress.reset(self._progress.epoch)
            self._manual = None
            return
        state = checked(state)
        # A state of an older version does not know of shared samples, which are named first.
        if not self._kind.endswith(state.get("kind", "")):
            raise ValueError(
                f"state is of a loader with {state['kind']}; this one has {self._kind}. "
                "Build it as it was."
            )
        self._refuse_other_draws(state)
        self._manual = None
        self._loaded_seed = state["seed"], torch.initial_seed()
        self._pipeline = self._at(state["seed"], state["epoch"])  # not of an epoch that runs
        self._persistent = None  # its workers may have another seed
        self.set_epoch(state["epoch"])
        for owner, epoch in zip(owners(self._loader), state.get("epochs", ()), strict=False):
            if epoch is not None:  # a sampler's, which need not be ours
                owner.set_epoch(epoch)
        self._progress.load(state)

    def _refuse_other_draws(self, state: dict[str, Any]) -> None:
        """Refuse a state of another rank or with another seed where ranks would sample alike."""
        given, rank = self._options["seed"], state.get("rank", state.get("drawn", [None])[0])
        if given is not None and self.seed != state["seed"] % 2**64:
            raise ValueError(
                f"state is of a prefetcher with seed={state['seed']}, and this one has "
                f"seed={given}: it may be the state of another rank. Load this rank's own, give "
                "that seed, or leave seed out."
            )
        here, count = ranks_of(self._loader)
        if state["batches"] and state.get("world_size", count) != count:
            raise ValueError(
                f"state is of the middle of an epoch on {state['world_size']} ranks, and there are "
                f"{count}: others would get samples twice or never. Resume on as many, or begin an "
                f"epoch: set_epoch({state['epoch'] + 1})."
            )
        if rank in (None, here) or may_share_state(self._loader):
            return
        raise ValueError(
            f"state is of rank {rank}, and this is rank {here}: both would sample the same from "
            "then on. Save and load a state for each rank. Where all ranks are to read the same: "
            f'load_state_dict(state | {{"rank": {here}}}).'
        )

    def replay(self, index: int, epoch: int | None = None, *, repeat: int = 0) -> Any:
        """What the model saw of a sample, bit for bit: its batch is prepared once more.

        The batches of the two latest epochs are known, those of a resumed epoch before its
        :meth:`load_state_dict` only if ``cpu_share`` is fixed. What dataset and collate function
        draw is not repeated, nor what a transform draws from elsewhere than torch, or within a
        function of torch, as in a dropout.

        Args:
            index: of the sample in ``dataset``, as the sampler gives it.
            epoch: as for :meth:`set_epoch`; None is the latest that the loop has had a batch of.
            repeat: which time is meant if the epoch had the sample several times: 0 is the first.

        Returns:
            A batch of one, in the form of the loader's batches and on the device.

        Raises:
            BadImageError: if the file cannot be decoded.
            LookupError: if no batch of the epoch has held the sample so far.
            ValueError: if it cannot be known what the model saw.
        """
        loader = self._loader
        if not (has_keys(loader) and in_order(loader) and loader.batch_sampler is not None):
            raise ValueError(
                "replay needs torch's DataLoader, making batches of a map-style dataset in order: "
                "of others it is not known how to read a sample's batch again."
            )
        if epoch is None:
            places = [*(notes.place for notes in self._notes.values()), self._progress.place]
            if not (used := [place["epoch"] for place in places if place["batches"]]):
                raise LookupError("no batch of any epoch has been handed over so far.")
            epoch = used[-1]
        if epoch not in self._notes:
            raise ValueError(
                f"the batches of epoch {epoch} are not known, only those of epochs "
                f"{list(self._notes)}. Load a state_dict() of that epoch and take a batch, or keep "
                "what you need."
            )
        notes, fixed = self._notes[epoch], self._balancer.fixed
        return replay(loader, self._pipeline, notes, index, epoch, repeat=repeat, fixed=fixed)

    def set_epoch(self, epoch: int) -> None:
        """Number the next epoch: for the samplers of the loader, and for the random parameters.

        After an error :meth:`next` begins it.
        """
        epoch = operator.index(epoch)  # an int, which torch.load takes back, also of numpy's
        self._progress.set_epoch(epoch)
        if self._manual is not None and not self._manual.close.alive:
            self._manual = None
        for owner in owners(self._loader):
            owner.set_epoch(epoch)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """What ``accelerator.prepare_data_loader`` asks for first."""
        raise TypeError(f"prepare_data_loader() drops decode and transforms: {INTO_PREPARED}.")

    def __len__(self) -> int:
        # Torch warns of an iterable dataset that turns out longer than its loader was told here.
        return len(self._loader if self._persistent is None else self._persistent)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also keeps copy and pickle from recursing before _loader is set
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self)
        if name in own.get("_options", ()):
            raise AttributeError(
                f"{name} is fixed: give it to DataPrefetcher(loader, {name}={value!r})."
            )
        ours = name.startswith("_") or name in own or hasattr(type(self), name)
        if not ours and hasattr(own.get("_loader"), name):
            setattr(self._loader, name, value)  # read from there; it says what may be changed
        else:
            object.__setattr__(self, name, value)

    def __bool__(self) -> bool:
        return bool(self._loader)

    def __getstate__(self) -> dict[str, Any]:
        # A copy begins a new epoch, with workers of its own.
        progress = copy.copy(self._progress)
        progress.place = dict(progress.place)
        state = vars(self) | {"_progress": progress, "_notes": dict(self._notes)}
        state |= {"_pipeline": self._at(self.seed, progress.epoch), "_manual": None}
        state["_persistent"] = state["_sent"] = None
        del state["_beginning"]
        # A new process gets its tensors as open files, which are closed with the tensors.
        self._sent = state["_pipeline"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _beginning=threading.RLock())

    def __repr__(self) -> str:
        given = dict(self._options)
        if isinstance(self.transforms, (list, tuple)):
            given["transforms"] = [*map(title, self.transforms)] or None
        words = [f"device={str(self.device)!r}"]
        for name, value in given.items():
            if value not in (None, "auto", "raise") and value is not False:
                words.append(f"{name}={value!r}")
        return f"DataPrefetcher({self._loader!r}, {', '.join(words)})"
