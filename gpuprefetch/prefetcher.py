"""DataPrefetcher: batches of a DataLoader on the device, in order and ahead of time."""

from __future__ import annotations

import contextlib
import gc
import operator
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from gpuprefetch.connections import tell
from gpuprefetch.core.epoch import Epoch, Lookahead
from gpuprefetch.core.nested import tensors
from gpuprefetch.core.ranks import INTO_PREPARED, same_on_ranks
from gpuprefetch.core.source import (
    Source,
    beginning,
    changed,
    in_order,
    is_stateful,
    kind,
    own_state,
    owners,
)
from gpuprefetch.images.apart import collate_apart
from gpuprefetch.images.bad import BadImage
from gpuprefetch.images.decode import BACKENDS
from gpuprefetch.images.encoded import EncodedImageFolder
from gpuprefetch.images.header import load_decoders
from gpuprefetch.images.plan import parse_bytes
from gpuprefetch.images.replay import (
    KEPT,
    Notes,
    has_indices,
    note,
    noted,
    rank_of,
    replay,
    stands_alone,
)
from gpuprefetch.images.share import Balancer
from gpuprefetch.images.stage import Pipeline
from gpuprefetch.images.targets import moves_pixels
from gpuprefetch.images.worker import GROWTH, HostStage, Packer, encoded_leaves
from gpuprefetch.transforms.convert import read_list
from gpuprefetch.transforms.head import Transform, require_fixed_size
from gpuprefetch.transforms.reference import FLOAT_DTYPES
from gpuprefetch.transforms.values import Values

_running: weakref.WeakValueDictionary[int, Lookahead] = weakref.WeakValueDictionary()  # by loader


def _resolve_device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f'device must be "cuda", "cuda:1", an index, a torch.device or "cpu", got {device!r}.'
        ) from error
    if resolved.type == "cpu":
        return resolved
    if resolved.type != "cuda":
        raise ValueError(f"device must be CUDA or CPU, got {str(resolved)!r}.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if resolved.index is None and count:
        return torch.device("cuda", torch.cuda.current_device())
    if not count or not 0 <= (resolved.index or 0) < count:
        raise ValueError(
            f"device {str(resolved)!r} is not there: torch sees {count} CUDA devices. "
            "Leave device out to use CUDA where there is one and the CPU elsewhere."
        )
    return resolved


class DataPrefetcher:
    """Wrap a DataLoader: its batches arrive on the device, decoded and transformed ahead of time.

    The batches are the wrapped loader's, in its order. Tensors in any nesting of tuples, lists,
    mappings, namedtuples and dataclasses move to the device, as do objects with a ``to`` method;
    other leaves pass through. Every ``iter()`` is a new epoch. Attributes that are not found here
    (``dataset``, ``sampler``, ``batch_size``, ...) are the loader's. The caller's current device
    and stream are never changed.

    Args:
        loader: a ``DataLoader``, or any iterable of batches that can be iterated again.
        device: CUDA device, its index, or "cpu"; None is CUDA where there is one, else the CPU,
            which gives the same results without streams.
        transforms: list of kornia augmentation modules, torchvision's, this library's own, and
            callables on an ``(N, C, H, W)`` batch; all but these callables draw for each image. The
            head of the list (crop or resize, flips, ``Normalize``) runs as one launch, also on
            decoded images of different sizes, and gives values in [0, 1] before ``Normalize``; what
            follows runs on its result.
        dtype: of the images after that head; float32 by default.
        memory_format: of the images after that head; contiguous by default.
        device_prefetch_size: batches kept ready or in preparation on the device; None for two, or
            one where two would take more than 512 MiB. Without workers, and on a CPU, a batch is
            prepared when the loop asks for it.
        decoder: "nvjpeg" on the GPU, called directly or by way of "torchcodec" or "torchvision";
            "cpu" (TorchCodec in the workers), or "auto": nvjpeg on CUDA where there is nvJPEG, else
            cpu; :func:`explain` says which.
        apply_exif: whether pictures are turned upright; False agrees with PIL and ``ImageFolder``.
        cpu_share: share of the JPEGs that the workers decode, those with the least to decode first,
            0.0 to 1.0, or "auto": none, and more while the loop waits for the GPU's decoder.
        seed: of the random parameters of the transforms; None takes ``torch.initial_seed()``. Those
            of encoded images are a function of (seed, epoch, sample, which repeat of it in the
            epoch), whatever the batch size and number of workers, those of tensors of (seed,
            epoch, number of the batch, row). The rank counts as well, unless the sampler is known
            to share samples out among ranks.
        on_error: for a file that cannot be decoded: "raise" :class:`BadImageError`, "skip" the
            sample, "replace" it by another one of the batch, target included, or a callable that
            gets the :class:`BadImage`, after which it is skipped.
        max_bad: how many bad files are tolerated before :class:`BadImageError` is raised anyway.
            One that several epochs come upon, by index and path, counts once.
        memory_budget: of the device, for batches that are on their way to the loop: "2GiB",
            "2GB", or bytes; None for no limit. It counts decoded images, and the tensors of a
            batch (with the images behind the fused head) until the batch is handed over; fewer
            batches are kept ready, and decoded in smaller parts, where they would pass it. It does
            not count the decoder's own memory, what the transforms behind the head allocate, nor
            what torch's allocator keeps for later.

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
        decoder: str = "auto",
        apply_exif: bool = False,
        cpu_share: float | str = "auto",
        seed: int | None = None,
        on_error: str | Callable[[BadImage], Any] = "raise",
        max_bad: int | None = None,
        memory_budget: str | int | None = None,
    ) -> None:
        if isinstance(loader, (Dataset, str, bytes, type)) or not hasattr(loader, "__iter__"):
            raise TypeError(
                f"DataPrefetcher wraps a DataLoader, got {type(loader).__name__}, which belongs "
                "into one: DataPrefetcher(DataLoader(dataset, batch_size=...)). For what gives "
                "batches already, as WebDataset's WebLoader does, that takes batch_size=None."
            )
        # Of other modules a class may begin anew in an __iter__ that returns itself.
        once = ("builtins", "itertools", "torch.utils.data.dataloader")
        if hasattr(loader, "__next__") and type(loader).__module__ in once:
            raise TypeError(
                f"A {type(loader).__name__} gives its batches once. Pass what can be iterated anew "
                "for each epoch, such as the DataLoader itself."
            )
        if hasattr(loader, "base_dataloader"):  # its end would come before ours, ahead of the loop
            raise TypeError(
                "what accelerate has prepared counts the batches of the loop and is not wrapped: "
                f"{INTO_PREPARED}."
            )
        size = device_prefetch_size
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ValueError(
                f"device_prefetch_size is in batches, 1 or more, or None, got {size!r}."
            )
        if not callable(on_error) and on_error not in ("raise", "skip", "replace"):
            raise ValueError(
                f'on_error must be "raise", "skip", "replace" or a callable, got {on_error!r}.'
            )
        if max_bad is not None and (not isinstance(max_bad, int) or max_bad < 0):
            raise ValueError(f"max_bad is a number of images, or None, got {max_bad!r}.")
        if dtype not in (None, torch.uint8, *FLOAT_DTYPES):
            raise ValueError(
                "dtype must be torch.uint8 or a floating-point one of 16 bits or more, as "
                f"torch.bfloat16, got {dtype!r}."
            )
        if memory_format not in (None, torch.contiguous_format, torch.channels_last):
            raise ValueError(
                f"memory_format is torch.contiguous_format or channels_last, got {memory_format!r}."
            )
        if apply_exif not in (True, False):
            raise ValueError(f"apply_exif must be True or False, got {apply_exif!r}.")
        if seed is not None and not hasattr(seed, "__index__"):
            raise ValueError(f"seed is an int, or None, got {seed!r}.")
        self.device = _resolve_device(device)
        head, tail = read_list(transforms)
        if dtype == torch.uint8 and (head.mean or head.std):
            raise ValueError(
                "dtype=torch.uint8 is for values of 0 to 255, and Normalize gives others. Leave "
                "one of them out."
            )
        asked = dtype not in (None, torch.uint8) or memory_format is torch.channels_last
        if (head.names or tail or asked) and _is_encoded_folder(getattr(loader, "dataset", None)):
            require_fixed_size(head, tail)
        backend = self._backend(decoder)
        share = torch.zeros(1, dtype=torch.float64)
        share.fill_(_fixed_share(cpu_share))
        packer = Packer(
            head,
            on_gpu=backend is not None,
            apply_exif=apply_exif,
            seed=torch.initial_seed() if seed is None else operator.index(seed),
            epoch=torch.zeros(1, dtype=torch.int64),
            share=share,
            output=(dtype or torch.float32, memory_format or torch.contiguous_format)
            if self.device.type == "cpu"
            else None,
            growth=GROWTH if backend is not None and cpu_share == "auto" else 0,
            dtype=dtype or torch.float32,
            moves=moves_pixels([*head.ops, *tail]),
        )
        self._pipeline = Pipeline(
            self.device,
            head,
            tail,
            packer,
            backend,
            dtype,
            memory_format,
            on_error,
            max_bad,
            memory_budget=parse_bytes(memory_budget),
            values=Values(head.normalize, tail),
        )
        self.stats = self._pipeline.stats
        self._balancer = Balancer(share, loader, fixed=cpu_share != "auto" or backend is None)
        self._depth = device_prefetch_size
        self._epoch = 0
        self._persistent: DataLoader[Any] | None = None
        self._first_batch = _FirstBatch(self.device)
        self._told_of_ranks = False
        self._manual: Epoch | None = None
        self._manual_length = 2
        self._place: dict[str, Any] = {"epoch": 0, "batches": 0}
        self._resume = self._resumed = False
        self._notes: dict[int, Notes] = {}
        self._use = ["used"]
        self._beginning = threading.RLock()  # one thread at a time begins an epoch
        self._kind = kind(loader)  # before a sampler makes its generator
        self._loader = loader  # from here on its attributes are set there

    def _backend(self, decoder: str) -> Any:
        auto = decoder == "auto"
        if auto:
            decoder = "nvjpeg" if self.device.type == "cuda" else "cpu"
        if decoder == "cpu":
            return None
        if decoder not in BACKENDS:
            names = ", ".join(f'"{name}"' for name in ("auto", "cpu", *BACKENDS))
            raise ValueError(f"decoder must be one of {names}, got {decoder!r}.")
        if self.device.type != "cuda":
            raise ValueError(f'decoder={decoder!r} needs a CUDA device; use "auto" or "cpu" here.')
        backend = BACKENDS[decoder](self.device)
        if not (missing := backend.missing()):
            return backend
        if auto:
            return None
        raise ValueError(
            f"decoder={decoder!r} can decode nothing on {self.device}: {missing}. Use "
            '"auto" or "cpu", which decodes in the workers.'
        )

    @property
    def bad_images(self) -> list[BadImage]:
        """The images that were skipped or replaced, over all epochs, each file once."""
        return list(self._pipeline.bad_images.values())

    def __iter__(self) -> Iterator[Any]:
        if not self._told_of_ranks and (words := same_on_ranks(self, self._loader)):
            self._told_of_ranks = True
            warnings.warn(words, stacklevel=2)
        with self._beginning:
            return self._begin()

    def _begin(self) -> Epoch:
        self._forget_unused()
        epoch, self._epoch = self._epoch, self._epoch + 1
        resumed = self._place if self._resume else None
        self._resumed, self._resume = self._resume, False
        loader, pipeline = self._prepared_loader(epoch)
        notes = self._noted(loader, epoch)
        load_decoders()
        try:
            source = self._source(loader, resumed, notes)
        except BaseException:
            self._epoch, self._resume = epoch, resumed is not None  # to be tried once more
            raise
        self._place = source.place
        self._place["epoch"] = epoch
        self._balancer.begin()
        lookahead = Lookahead(
            replace(pipeline, balancer=self._balancer, shares=notes.shares),
            source,
            epoch=epoch,
            depth=self._depth,
            # Without workers the dataset runs in this process. On the caller's thread it keeps the
            # order of random numbers it would have without us. On the CPU there is nothing to run
            # ahead of.
            threaded=self.device.type == "cuda" and getattr(loader, "num_workers", 0) > 0,
            check=self._first_batch,
        )
        iterator = Epoch(lookahead)
        self._use, _running[id(loader)] = iterator.use, lookahead
        try:
            lookahead.start()
        except BaseException:
            iterator.close()  # unused: the next one begins the same epoch
            raise
        return iterator

    def _forget_unused(self) -> None:
        """No epoch is one whose iterator was dropped unused, as by Lightning's look at a loader."""
        if self._use[0] == "dropped":
            self._use = ["used"]
            self._epoch, self._resume = self._place["epoch"], self._resumed
            if not self._resumed:  # the next one draws its order anew
                self._place = {"epoch": self._epoch, "batches": 0}

    def _source(self, loader: Any, resumed: dict[str, Any] | None, notes: Notes) -> Source:
        notes.place = resumed or notes.place  # what is left out is noted as well
        with _garbage_kept_from_forks():
            source = Source(loader, resumed)
        notes.place = source.place
        if noted(loader) is not None:
            try:
                notes.refuse_another_order()
            except ValueError:
                source.close()
                raise
        return source

    def _prepared_loader(self, epoch: int) -> tuple[Iterable[Any], Pipeline]:
        """The loader with our packing in its collate; the user's own object is left as it is."""
        self._pipeline.packer.rank = rank_of(self._loader)
        if not isinstance(self._loader, DataLoader):
            return self._loader, self._with_epoch(epoch)
        self._pipeline.after = partial(collate_apart, self._loader.collate_fn, self.device)
        if self._loader.persistent_workers:
            if (running := _running.get(id(self._persistent))) is not None:
                running.close()  # its thread may be waiting for the same workers
            # These workers live on: the epoch reaches them through shared memory.
            self._pipeline.packer.epoch.share_memory_().fill_(epoch)  # not in a deep copy of us
            loaded = getattr(self._loader, "next_iter_state", None) is not None  # torchdata's
            # A resumed epoch has changed the generator of its workers.
            if self._persistent is None or loaded or self._resumed:
                self._persistent = _with_collate(self._loader, self._pipeline.packer)
            return self._persistent, self._pipeline
        pipeline = self._with_epoch(epoch)
        return _with_collate(self._loader, pipeline.packer), pipeline

    def _noted(self, loader: Any, epoch: int) -> Notes:
        """Notes of a new epoch, which its sampler will write; those of an older one are dropped."""
        self._notes.pop(epoch, None)
        notes = self._notes[epoch] = Notes(self._pipeline.packer.seed)
        if (sampler := noted(loader)) is not None:
            sampler.notes = notes
        if len(self._notes) > KEPT:
            del self._notes[next(iter(self._notes))]
        return notes

    def _with_epoch(self, epoch: int) -> Pipeline:
        packer = replace(self._pipeline.packer, epoch=torch.tensor([epoch]))
        return replace(self._pipeline, packer=packer)

    def next(self) -> Any:
        """The next batch, in the manner of Apex's ``data_prefetcher``.

        Returns:
            The batch; at the end of an epoch a tuple of as many None as the batch has elements (one
            None for a batch that is no tuple or list). The call after that starts a new epoch.

        Raises:
            RuntimeError: behind an error, which has ended the epoch, until :meth:`set_epoch`.
        """
        if self._manual is None:
            self._manual = iter(self)  # type: ignore[assignment]
        try:
            batch = next(self._manual)  # type: ignore[arg-type]
        except StopIteration:
            self._manual = None
            return (None,) * self._manual_length if self._manual_length else None
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C: whoever goes on begins anew
                self._manual = None
            raise
        self._manual_length = len(batch) if isinstance(batch, (tuple, list)) else 0
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the latest epoch stands: what the loop has had, not what is under way to it.

        Once the loop has come to the end of the epoch, and before the first one, it is the
        beginning of the next epoch, with the order that is drawn now. A state taken in the loop
        after the last batch resumes with nothing left of the epoch. It can be written as JSON,
        unless the loader's own state cannot. Of the dataset only torchdata's
        ``StatefulDataLoader`` saves anything, which starts its workers for a state before the first
        epoch: random numbers that another dataset draws in its workers are not repeated.

        Raises:
            ValueError: after a batch of a loader with ``in_order=False``, before the epoch's end.
        """
        self._forget_unused()
        place = self._place
        if "ended" in place or "random_states" not in place:
            place = self._next_place()
        elif place["batches"] and not in_order(self._loader):
            raise ValueError(
                f"the loop has had {place['batches']} batches, but with in_order=False it is "
                "not known which: to resume would leave some out and repeat others. Give the "
                "DataLoader in_order=True, or save no state of it."
            )
        packer = self._pipeline.packer
        state = place | {"seed": packer.seed, "kind": self._kind, "late": bool(packer.late)}
        notes = self._notes.get(place["epoch"])
        if notes is not None and notes.place is place:  # else loaded, with its own
            state["drawn"] = notes.drawn()
        return state

    def _next_place(self) -> dict[str, Any]:
        """Where the next epoch begins."""
        loader: Any = self._loader
        if isinstance(loader, DataLoader):
            loader = changed(loader)  # an iterator that state_dict() makes is not the user's
        going_on = loader if self._persistent is None else self._persistent
        place = beginning(going_on) | {"epoch": self._epoch}
        if "ended" in self._place:
            return place | {"loader": self._place["loader"]}
        place["loader"] = own_state(loader)
        if place["loader"] is not None:
            # Another iterator would draw other seeds for its workers.
            self._place, self._resume = place, True
        return place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter()`` go on where :meth:`state_dict` was taken.

        The batches are those of the uninterrupted epoch, also with other workers or another
        ``device_prefetch_size``, but not with another batch size, nor, of an iterable dataset
        without a state of its own, with another number of workers. An order of integers that the
        sampler does not draw again is a ``ValueError`` of that ``iter()``. The order is drawn from
        the saved random state, and torch's default generator goes on as it was, unless it is in
        that state or a dataset restores it itself. A state of a stateful loader that was taken
        without the prefetcher begins an epoch there.

        Raises:
            ValueError: if ``state`` does not come from :meth:`state_dict`, or from that of another
                kind of loader.
        """
        if not isinstance(state, dict) or not {"epoch", "batches", "seed"} <= state.keys():
            if isinstance(state, dict) and is_stateful(self._loader):  # the loader's own
                self._loader.load_state_dict(state)  # type: ignore[attr-defined]
                self._place, self._resume = {"epoch": self._epoch, "batches": 0}, False
                self._manual, self._use = None, ["used"]
                return
            raise ValueError(f"state must come from DataPrefetcher.state_dict(), got {state!r}.")
        # A state of an older version does not know of shared samples, which are named first.
        if not self._kind.endswith(state.get("kind", "")):
            raise ValueError(
                f"state is of a loader with {state['kind']}; this one has {self._kind}. "
                "Build it as it was."
            )
        self._manual = None
        packer = self._pipeline.packer
        packer.seed = state["seed"]
        packer.late.fill_(state.get("late", packer.late))
        self._persistent = None  # its workers may have another seed
        self.set_epoch(state["epoch"])
        for owner, epoch in zip(owners(self._loader), state.get("epochs", ()), strict=False):
            if epoch is not None:  # a sampler's, which need not be ours
                owner.set_epoch(epoch)
        self._place, self._resume = dict(state), "random_states" in state

    def replay(self, index: int, epoch: int | None = None) -> Any:
        """What the model saw of a sample, bit for bit: its batch is prepared once more.

        The head's parameters are a function of (seed, epoch, sample, repeat), those of transforms
        behind it of (seed, epoch, number of the batch), so the whole batch is read, decoded by the
        same decoders and transformed. Its samples are known for the two latest epochs of this
        prefetcher, one that :meth:`load_state_dict` went on with included (its batches before that
        only if ``cpu_share`` is fixed). Of any other epoch a sample is replayed alone, where no
        transform depends on the rest of the batch and ``cpu_share`` is 0 or 1. Not repeated is what
        dataset and collate function draw themselves, and what a transform draws from elsewhere than
        torch, or within a function of torch, as in a dropout.

        Args:
            index: of the sample in ``dataset``, as the sampler gives it. If the epoch drew it
                several times, the first of them is meant.
            epoch: as for :meth:`set_epoch`; None is the latest that the loop has had a batch of.

        Returns:
            A batch of one, in the form of the loader's batches and on the device.

        Raises:
            BadImageError: if the file cannot be decoded.
            LookupError: if no batch of the epoch has held the sample so far.
            ValueError: if it cannot be known what the model saw.
        """
        if not has_indices(self._loader):
            raise ValueError(
                "replay needs torch's DataLoader, making batches of a map-style dataset in order: "
                "of others it is not known how to read a sample's batch again."
            )
        if epoch is None:
            places = [*(notes.place for notes in self._notes.values()), self._place]
            used = [place["epoch"] for place in places if place["batches"]]
            if not used:
                raise LookupError("no batch of any epoch has been handed over so far.")
            epoch = used[-1]
        notes, fixed = self._notes.get(epoch), self._balancer.fixed
        if notes is None:
            if not stands_alone(self._pipeline, fixed=fixed):
                raise ValueError(
                    f"what the model saw in epoch {epoch} depends on the rest of the batch, and "
                    f"only the batches of epochs {list(self._notes)} are known. Load a "
                    "state_dict() of that epoch and take a batch, or keep what you need."
                )
            notes = Notes(self._pipeline.packer.seed, place={"batches": 1})
            notes.add([index])
        return replay(self._loader, self._pipeline, notes, index, epoch, fixed=fixed)

    def set_epoch(self, epoch: int) -> None:
        """Number the next epoch: for the samplers of the loader, and for the random parameters.

        Behind an error :meth:`next` begins it.
        """
        epoch = operator.index(epoch)  # an int, which torch.load takes back, also of numpy's
        self._forget_unused()
        self._epoch, self._use = epoch, ["used"]
        if self._manual is not None and not self._manual.close.alive:
            self._manual = None
        if epoch != self._place["epoch"] and "ended" not in self._place:
            self._place, self._resume = {"epoch": epoch, "batches": 0}, False
        for owner in owners(self._loader):
            owner.set_epoch(epoch)

    def __len__(self) -> int:
        # Torch warns of an iterable dataset that turns out longer than its loader was told here.
        return len(self._loader if self._persistent is None else self._persistent)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also keeps copy and pickle from recursing before _loader is set
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self)
        if name.startswith("_") or name in own or hasattr(type(self), name):
            object.__setattr__(self, name, value)
        elif hasattr(own.get("_loader"), name):  # read from there; it says what may be changed
            setattr(self._loader, name, value)
        else:
            object.__setattr__(self, name, value)

    def __bool__(self) -> bool:
        return bool(self._loader)

    def __getstate__(self) -> dict[str, Any]:
        # A copy begins a new epoch, with workers of its own.
        pipeline = self._with_epoch(self._epoch)
        own = {"_pipeline": pipeline, "_notes": dict(self._notes), "_place": dict(self._place)}
        state = vars(self) | own | {"_manual": None, "_persistent": None}
        del state["_beginning"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _beginning=threading.RLock())

    def __repr__(self) -> str:
        return f"DataPrefetcher({self._loader!r}, device={str(self.device)!r})"


class _FirstBatch:
    """Says once, at the first batch, what will make the loader slow.

    An epoch calls it, which must not hold the prefetcher: that holds the epoch of its ``next()``.
    """

    def __init__(self, device: torch.device) -> None:
        self.seen = device.type != "cuda"

    def __call__(self, batch: Any) -> None:
        if self.seen:
            return
        self.seen = True
        parts = [images.pixels for images in encoded_leaves(batch)]
        if parts:
            tell()
        parts = parts or list(tensors(batch))
        if any(
            part.device.type == "cpu" and part.numel() and not part.is_pinned() for part in parts
        ):
            warnings.warn(
                "The wrapped loader does not pin its memory, so copies to the GPU block and overlap"
                " less. Pass pin_memory=True to the DataLoader.",
                stacklevel=2,
            )


_forking = threading.local()  # whether this thread forks workers of ours


@contextlib.contextmanager
def _garbage_kept_from_forks() -> Iterator[None]:
    """Fork workers in it: they will not collect what this process left to its garbage collector.

    An exception that left an epoch is in a cycle with frames that hold pinned memory and CUDA
    events. A forked worker that collects them calls CUDA, which a fork must not, and aborts. So it
    begins with gc.freeze(), and nothing is collected before that.
    """
    enabled = gc.isenabled()
    gc.disable()
    _forking.collects = enabled
    try:
        yield
    finally:
        del _forking.collects
        if enabled:
            gc.enable()


def _freeze_in_fork() -> None:
    if (collects := getattr(_forking, "collects", None)) is not None:
        gc.freeze()
        if collects:
            gc.enable()


if hasattr(os, "register_at_fork"):  # not on every platform
    os.register_at_fork(after_in_child=_freeze_in_fork)


def _with_collate(loader: DataLoader[Any], packer: Packer) -> DataLoader[Any]:
    clone = changed(loader)
    if hasattr(loader, "next_iter_state"):
        loader.next_iter_state = None  # a StatefulDataLoader's: good for one epoch, the clone's
        vars(clone)["_initial_iter_for_state_dict"] = False  # of the iterator that it leaves here
    for shared in (packer.share, packer.late):
        shared.share_memory_()  # not in a deep copy of the prefetcher
    clone.collate_fn = HostStage(loader.collate_fn, packer)
    note(clone)
    return clone


def _fixed_share(cpu_share: float | str) -> float:
    if cpu_share == "auto":
        return 0.0
    if isinstance(cpu_share, (int, float)) and 0 <= cpu_share <= 1:
        return float(cpu_share)
    raise ValueError(
        f'cpu_share is a share of the images, 0.0 to 1.0, or "auto", got {cpu_share!r}.'
    )


def _is_encoded_folder(dataset: Any) -> bool:
    """Whether a dataset surely hands out encoded images, through Subset and ConcatDataset."""
    if dataset is None or isinstance(dataset, EncodedImageFolder):
        return dataset is not None
    inner = getattr(dataset, "datasets", None) or [getattr(dataset, "dataset", None)]
    return isinstance(inner, Sequence) and all(_is_encoded_folder(d) for d in inner)
