"""DataPrefetcher: batches of a DataLoader on the device, in order and ahead of time."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch.utils.data import DataLoader, Dataset

from gpuprefetch.core.device import resolve_device
from gpuprefetch.core.epoch import Epoch, Lookahead, OneByOne
from gpuprefetch.core.forks import garbage_stays_here
from gpuprefetch.core.loaders import is_stateful, kind, loader_within
from gpuprefetch.core.nested import Batch, Loader
from gpuprefetch.core.ranks import INTO_PREPARED, ranks_of, sampling_rank
from gpuprefetch.core.resume import Beginning, Place, Progress, Source
from gpuprefetch.core.samplers import Key
from gpuprefetch.core.state import State, checked, is_foreign, is_state
from gpuprefetch.core.stats import Stats
from gpuprefetch.images.advice import Advice
from gpuprefetch.images.apart import collate_apart
from gpuprefetch.images.bad import BadImage
from gpuprefetch.images.build import build_stage, rebuilt
from gpuprefetch.images.decode import ImageDecoder, decoded_by
from gpuprefetch.images.handed import Finisher, HandedOut, registered, to_iterate
from gpuprefetch.images.imports import load_worker_modules
from gpuprefetch.images.loading import Begun, LivingWorkers, noting_sampler, starts_workers_anew
from gpuprefetch.images.notes import Notebook, Notes
from gpuprefetch.images.options import DecoderName, OnError, Options, Results
from gpuprefetch.images.packer import Packer
from gpuprefetch.images.preview import Moment, Wanted, preview
from gpuprefetch.images.replay import refuse_unknown, replay
from gpuprefetch.images.samples import Origin
from gpuprefetch.images.stage import Pipeline
from gpuprefetch.images.view import View
from gpuprefetch.lists.snapshot import Snapshot
from gpuprefetch.lists.views import Views
from gpuprefetch.policies.known import title
from gpuprefetch.transforms.head import Transform

if TYPE_CHECKING:
    from PIL.Image import Image

# What an argument of the constructor is called; later it is fixed.
_ARGUMENTS = {"device", *(option.name for option in fields(Options))}
# What a DataLoader lets nobody set after it was built.
_LOCKED = {
    "batch_sampler",
    "batch_size",
    "dataset",
    "drop_last",
    "persistent_workers",
    "sampler",
}


def _refuse_no_loader(given: object) -> None:
    loader = loader_within(given)
    if isinstance(loader, (Dataset, str, bytes, type)) or not hasattr(loader, "__iter__"):
        raise TypeError(
            f"DataPrefetcher wraps a DataLoader, got {type(loader).__name__}. Put it into "
            "one: DataPrefetcher(DataLoader(dataset, batch_size=...)), with batch_size=None if it "
            "gives batches already, as WebDataset's WebLoader with .batched() or .with_epoch()."
        )
    # A class of another module may begin anew in an __iter__ that returns itself.
    once = ("builtins", "itertools", "torch.utils.data.dataloader")
    if hasattr(loader, "__next__") and type(loader).__module__ in once:
        raise TypeError(
            f"A {type(loader).__name__} gives its batches once. Pass what can be iterated anew for "
            "each epoch, such as the DataLoader itself."
        )
    if isinstance(loader, DataLoader) and hasattr(type(loader), "__next__"):
        raise TypeError(
            f"{type(loader).__name__} is its own iterator (it has a __next__), as loaders are that "
            "copy batches to the GPU by themselves. Use a plain DataLoader: the prefetcher copies."
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


def _begin_next(prefetcher: weakref.ref[DataPrefetcher], begun: Begun, number: int) -> None:
    """Let workers begin the next epoch. The thread that calls this must not keep a prefetcher."""
    alive = prefetcher()
    if alive is not None:
        alive._begin_next(begun, number)


# Attributes that people look for, and what to write.
_MOVES = " Its batches are on its device already: give it device=..., and leave this call out."
_ADVICE = {
    "to": _MOVES,
    "cuda": _MOVES,
    "reset": " Each `for batch in prefetcher` begins an epoch: leave reset() out.",
}


class _NoIteratorError(TypeError, AttributeError):
    """``next(prefetcher)``: a prefetcher has no ``__next__``, as a ``DataLoader`` has none."""


class _NoNext:
    """Stands for ``__next__``, which ``next(prefetcher)`` asks for."""

    def __get__(self, prefetcher: object, kind: type | None = None) -> NoReturn:
        raise _NoIteratorError(
            "a DataPrefetcher is no iterator, as a DataLoader is none: write prefetcher.next(), or "
            "batches = iter(prefetcher) once and next(batches) for each batch."
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
        transforms: a pipeline of torchvision's, as it is; or a list of torchvision's transforms,
            kornia's, this library's own, and callables on an ``(N, C, H, W)`` batch; or
            :class:`Views`, or a tuple of pipelines. All but these callables sample for each image.
            The first ones (crop or resize, flips, ``Normalize``) are fused into one launch, and the
            others run after it. Values are in [0, 1] before ``Normalize``; after torchvision's crop
            of encoded images they are uint8 until a conversion, as torchvision has it.
        dtype: that of the images after the fused transforms; float32 by default.
        memory_format: that of the same images; contiguous by default.
        device_prefetch_size: batches that are ready or in preparation. None is two, more of batches
            that one call decodes together (8 of 64 images), and fewer where they would need more
            than 512 MiB. Without workers, and on a CPU, a batch is prepared when the loop asks for
            it.
        decoder: "nvjpeg" on the GPU, called directly, or by "torchvision", whose ``decode_jpeg`` is
            used; "cpu" in the workers; "auto" is "nvjpeg" where that works, else "cpu".
        apply_exif: whether pictures are turned upright. False agrees with PIL and ``ImageFolder``.
        cpu_share: share of the JPEGs that the workers decode, 0.0 to 1.0, the smallest first.
            "auto" begins with none, and rises while the loop waits for the GPU's decoder.
        seed: the seed of random parameters; None is ``torch.initial_seed()`` as an epoch begins.
            Parameters of encoded images depend on seed, epoch, sample and repeat of the sample, and
            are the same for all images of a sample. They also depend on the rank, unless the
            sampler is known to give each rank different samples. Parameters of tensors, and what
            kornia's later ops and callables sample for a batch, depend on seed, epoch, rank and
            number of the batch.
        on_error: what happens to a file that cannot be decoded: "raise" :class:`BadImageError`,
            "skip" the sample, or "replace" it by another one of its batch, target included. A
            callable gets the :class:`BadImage`, and the sample is skipped.
        max_bad: number of bad files that are tolerated, each counted once; None is any number. One
            more raises :class:`BadImageError`.
        memory_budget: device memory for batches on their way to the loop: "2GiB", "2GB", or bytes.
            Decoded images count, and the tensors of a batch until its hand-over; the decoder's own
            memory and what later transforms allocate do not. Batches that need more are decoded in
            smaller parts, and fewer are kept ready.
        results: what the images of a batch become: "stack" is one tensor ``(N, 3, H, W)``,
            and an error where sizes differ; "list" is N tensors ``(3, H, W)``, each of its own
            size, views of one buffer; "padded", or :class:`Padding`, is :class:`PaddedImages`, one
            tensor with the sizes beside it; :class:`Patches` and :class:`PatchPadding` are patches
            of vision transformers. None is what an image processor in ``transforms`` gives, else
            "list" if the transforms give each image a size
            of its own, as ``v2.Resize(800, max_size=1333)`` does, else "stack".

    Raises:
        TypeError: if ``loader`` is a dataset, iterated once or what accelerate prepared, or a
            transform is not callable.
        ValueError: for other arguments out of range, and for transforms that cannot work.

    Example:
        >>> loader = DataPrefetcher(DataLoader(dataset, num_workers=8, pin_memory=True))
        >>> for images, target in loader: ...
    """

    _late = False  # whether the collate function runs after the transforms: see accelerate()
    __next__ = _NoNext()

    def __init__(
        self,
        loader: DataLoader[Any] | Iterable[Batch],
        *,
        device: torch.device | str | int | None = None,
        transforms: Sequence[Transform] | Views | Transform | None = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
        device_prefetch_size: int | None = None,
        decoder: DecoderName | ImageDecoder = "auto",
        apply_exif: bool = False,
        cpu_share: float | Literal["auto"] = "auto",
        seed: int | None = None,
        on_error: OnError = "raise",
        max_bad: int | None = None,
        memory_budget: str | int | None = None,
        results: Results | None = None,
    ) -> None:
        _refuse_no_loader(loader)
        loader = to_iterate(loader)
        self._loader: Loader = loader
        self._options = Options(
            transforms=transforms,
            dtype=dtype,
            memory_format=memory_format,
            device_prefetch_size=device_prefetch_size,
            decoder=decoder,
            apply_exif=apply_exif,
            cpu_share=cpu_share,
            seed=seed,
            on_error=on_error,
            max_bad=max_bad,
            memory_budget=memory_budget,
            results=results,
        )
        self._pipeline = build_stage(loader, resolve_device(device), self._options, late=self._late)
        self._read = Snapshot(transforms, self._running_ops())
        self._advice = Advice(loader, self.device, chosen=device is not None)
        self._progress = Progress(kind(loader))  # before a sampler makes its generator
        self._notes = Notebook()
        self._workers = LivingWorkers(loader)
        self._manual = OneByOne()
        self._beginning = threading.RLock()  # one thread at a time begins an epoch

    @property
    def wrapped(self) -> Loader:
        """The loader that was given, to set its attributes: ``prefetcher.wrapped.timeout = 60``.

        A loader that repeats itself, or was made of another prefetcher's parts, has another one in
        its place.
        """
        return self._loader

    @property
    def collate_fn(self) -> HandedOut:
        """The loader's, for another loader.

        Batches that would be encoded without this prefetcher, or lack its transforms, are finished
        by their ``to(device)``, with a warning. Anything else that is done with them raises.
        """
        finisher = self._finisher()
        token = b"" if finisher is None else registered(finisher)
        return HandedOut(
            self._loader.collate_fn, self._left_to_us(), self._next_epoch, token, finisher
        )

    def _next_epoch(self) -> int:
        self._progress.follow(self._loader)
        return self._progress.epoch

    def _finisher(self) -> Finisher | None:
        """What finishes the batches of another loader over :attr:`dataset`."""

        def begin(given: Loader, epoch: int) -> Iterator[Batch]:
            other = self.over(given)
            other.set_epoch(epoch)
            return iter(other)

        try:
            return Finisher(begin, self.device, len(self))
        except TypeError:  # a stream without a length: nothing tells when an epoch is over
            return None

    def _left_to_us(self) -> str:
        """What another loader over :attr:`dataset` would lack beside the decode, in words."""
        views = self._pipeline.views
        return "its transforms" if len(views) > 1 or views[0].changes else ""

    @property
    def device(self) -> torch.device:
        """Where the batches arrive."""
        return self._pipeline.device

    @property
    def stats(self) -> Stats:
        """Counters, see :class:`Stats`."""
        return self._pipeline.stats

    @property
    def transforms(self) -> Sequence[Transform] | Views | Transform:
        """As they were given; an empty list for none."""
        return [] if self._options.transforms is None else self._options.transforms

    @property
    def seed(self) -> int:
        """The seed of the random parameters of an epoch that begins now."""
        given = self._options.given_seed
        return self._progress.seed if given is None else given

    @property
    def bad_images(self) -> list[BadImage]:
        """The images that were skipped or replaced, over all epochs, each file once."""
        return list(self._pipeline.tolerance.seen.values())

    @property
    def views(self) -> Sequence[View]:
        """How the transforms were read, for each view of an image: for tools that explain them."""
        return self._pipeline.views

    @property
    def decodes_on_gpu(self) -> bool:
        """Whether encoded images are left to the GPU, but for a share."""
        return self._pipeline.decoding.decoder is not None

    @property
    def decoding(self) -> str:
        """What decodes encoded images, in words: for tools that explain it."""
        return decoded_by(self._pipeline.decoding.decoder, self.device)

    @property
    def starts_workers_anew(self) -> bool:
        """Whether each epoch starts its own workers, which ``persistent_workers`` would keep."""
        return starts_workers_anew(self._loader, self._pipeline.packer)

    def over(self, loader: DataLoader[Any] | Iterable[Batch]) -> DataPrefetcher:
        """The same prefetcher over another loader, such as one that a framework made of this one.

        The next epoch is the same, from its start. Counters, bad images and the share of the
        workers are apart.

        Raises:
            TypeError: for what the constructor takes as no loader.

        Example:
            >>> rest = accelerate.skip_first_batches(prepared, 3)
            >>> rest.base_dataloader = prepared.base_dataloader.over(rest.base_dataloader)
        """
        _refuse_no_loader(loader)
        loader = self._read_by_us(loader)
        clone: DataPrefetcher = object.__new__(type(self))
        clone.__setstate__(
            self.__getstate__()
            | {
                "_loader": loader,
                "_pipeline": rebuilt(self._pipeline, loader),
                "_progress": self._progress.anew(),
            }
        )
        return clone

    def _read_by_us(self, loader: Loader) -> Loader:
        """What this prefetcher iterates of a loader that was made of its parts."""
        return to_iterate(loader)

    def __iter__(self) -> Iterator[Batch]:
        self._advice.of_setting()
        self._advice.of_ranks(self, self._loader)
        return self._begin()

    def _running_ops(self) -> list[Transform]:
        """The transforms that run as they were given, and not as they were read."""
        return [op for view in self._pipeline.views for op in view.running]

    def _refuse_changed(self) -> None:
        """Compare the list of transforms, which has been read, with what it was."""
        if self._read.differs(self._options.transforms):
            raise TypeError(
                "transforms, or one of its ops, has changed since DataPrefetcher was built, which "
                "has read it. Build it anew: DataPrefetcher(loader, transforms=...)."
            )

    def _begin(self) -> Epoch:
        with self._beginning:
            self._refuse_changed()
            number, beginning = self._progress.begin(self._loader)
            try:
                lookahead = self._look_ahead(number, beginning)
            except BaseException:
                self._progress.failed()
                raise
            iterator = Epoch(lookahead)
            self._progress.began(lookahead.place)
            self._workers.serve(lookahead)
            try:
                lookahead.start()
            except BaseException:
                iterator.close()  # unused: the next one begins the same epoch
                raise
            return iterator

    def _look_ahead(self, number: int, beginning: Beginning) -> Lookahead:
        """What prepares the batches of an epoch; its thread has not started."""
        resumed = self._progress.place if beginning is Beginning.AT_PLACE else None
        seed = self.seed if resumed is None or resumed.seed is None else resumed.seed
        self._pipeline.decide_share()
        begun = self._packing(seed, number, anew=resumed is not None)
        loader = begun.loader
        if resumed is None:
            place = Place.beginning(self._loader if begun.kept else loader, number, seed)
        else:
            place = resumed.again(number, seed)
        notes = self._notes_of(begun, place, seed)
        load_worker_modules(begun.packer)
        stage = self._stage_of(begun.packer, notes)
        with garbage_stays_here():
            source = Source(
                loader,
                place,
                beginning,
                notes.skip,
                begun=None if begun.ahead is None else begun.ahead.begin(),
                live_on=partial(self._workers.live_on, begun),
                at_end=partial(_begin_next, weakref.ref(self), begun, number + 1),
            )
        try:
            if resumed is not None:
                notes.refuse_another_order()
            self._notes.add(notes)
            if stage.balancer is not None:
                stage.balancer.begin()
            return Lookahead(
                stage,
                source,
                depth=self._options.device_prefetch_size,
                # Without workers the dataset runs in this process, and draws its random numbers in
                # the caller's thread as without us. On the CPU there is nothing to run ahead of.
                threaded=self.device.type == "cuda" and getattr(loader, "num_workers", 0) > 0,
                check=self._advice.of_first_batch,
            )
        except BaseException:
            source.close()
            raise

    def _notes_of(self, begun: Begun, place: Place, seed: int) -> Notes:
        """The notes of an epoch that begins, which the sampler writes from here on."""
        if begun.ahead is not None:
            return begun.ahead.notes.begin(place)
        sampler = noting_sampler(begun.loader)
        rank = ranks_of(self._loader).rank
        notes = Notes(seed, rank, by_sampler=sampler is not None, place=place)
        if sampler is not None:
            sampler.note_into(notes)
        return notes

    def _begin_next(self, begun: Begun, number: int) -> None:
        """Let the workers begin epoch ``number``, if nobody can tell."""
        if isinstance(self._loader, DataLoader):
            rank = ranks_of(self._loader).rank
            self._workers.begin_next(self._loader, begun, Notes(self.seed, rank), number)

    def _packing(self, seed: int, epoch: int, *, anew: bool) -> Begun:
        """The loader with our packing in its collate; the user's own object is left as it is.

        ``anew`` says that the epoch is resumed, which changes the generator of its workers.
        """
        loader = self._loader
        packer = self._packer_of(seed, epoch)
        if not isinstance(loader, DataLoader):
            return Begun(loader, packer)
        loaded = getattr(loader, "next_iter_state", None) is not None  # torchdata's
        return self._workers.begin(loader, packer, seed, epoch, anew=anew or loaded)

    def _packer_of(self, seed: int, epoch: int) -> Packer:
        rank = sampling_rank(self._loader)
        return replace(self._pipeline.packer, origin=Origin(seed, epoch), rank=rank)

    def _stage_of(self, packer: Packer, notes: Notes) -> Pipeline:
        """The stage of one epoch."""
        after = None
        if isinstance(self._loader, DataLoader):
            after = partial(collate_apart, self._loader.collate_fn, self.device)
        return self._pipeline.for_epoch(
            packer=packer, notes=notes, ranks=ranks_of(self._loader), after=after
        )

    def next(self) -> Batch:
        """The next batch, in the manner of Apex's ``data_prefetcher``.

        Returns:
            The batch. At the end of an epoch a tuple of as many None as the batch has elements, or
            one None for a batch that is no tuple or list. The call after that starts a new epoch.

        Raises:
            RuntimeError: after an error, which has ended the epoch, until :meth:`set_epoch`.
        """
        return self._manual.next(self)

    def state_dict(self) -> State:
        """Where the latest epoch stands: what the loop has had, not what is on its way to it.

        Before the first epoch, and once the loop has come to an epoch's end, the state is the
        beginning of the next epoch, with the order that is drawn now. A state taken in the loop
        after the last batch resumes with nothing left. States can be written as JSON, unless the
        loader's own state cannot. Only torchdata's ``StatefulDataLoader`` saves a state of the
        dataset; random numbers that another dataset draws in its workers are not repeated.

        Raises:
            ValueError: after a batch of a loader with ``in_order=False``, before the epoch's end.
        """
        place = self._taken(self._progress.save(self._loader, self._workers.loader))
        ranks = ranks_of(self._loader)
        state: State = {"seed": self.seed, "kind": self._progress.kind}
        state |= place.as_state()
        state["rank"] = ranks.rank
        state["world_size"] = ranks.count
        return state

    def _taken(self, place: Place) -> Place:
        """An epoch's place as it is now, with what was drawn up to there."""
        notes = self._notes.of_place(place)
        return place.taken(None if notes is None else notes.drawn)

    def load_state_dict(self, state: State) -> None:
        """Let the next ``iter()`` go on where :meth:`state_dict` was taken.

        The batches are those of the uninterrupted epoch, also with other workers or another
        ``device_prefetch_size``. The batch size must be the same, and for an iterable dataset
        that saves no state, and a ``StatefulDataLoader``, the number of workers. The order
        is drawn once more. If it is not the saved one, that ``iter()`` raises ``ValueError``.
        Torch's default generator goes on as it was, unless it is in the saved state already or the
        dataset saves its state in this process. A ``StatefulDataLoader``'s own state begins
        an epoch there.

        Raises:
            ValueError: if ``state`` does not come from :meth:`state_dict`, or from that of another
                kind of loader.
        """
        if is_stateful(self._loader) and not is_state(state) and not is_foreign(state):
            self._loader.load_state_dict(state)  # the loader's own
            self._progress.reset(self._progress.epoch)
            self._manual.forget()
            return
        state = checked(state)
        self._progress.refuse(self._loader, state, self._options.given_seed)
        self._manual.forget()
        self._workers.drop()  # they may have another seed
        self._progress.load(self._loader, state)

    def replay(self, index: int, epoch: int | None = None, *, repeat: int = 0) -> Batch:
        """What the model saw of a sample, bit for bit: its batch is prepared once more.

        The batches of the two latest epochs are known. Batches of a resumed epoch from before its
        :meth:`load_state_dict` are known only if ``cpu_share`` is fixed. Random values of dataset
        and collate function are not repeated, nor those that a transform samples without torch, or
        within a function of torch, as in a dropout.

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
        refuse_unknown(self._loader)
        notes = self._notes.had(epoch, self._progress.place)
        return replay(self._loader, self._pipeline, notes, index, repeat)

    def preview(
        self,
        count: int = 16,
        *,
        draws: int = 1,
        samples: Sequence[Key] | None = None,
        side: int = 160,
    ) -> Image:
        """Show what the transforms make of some samples: originals beside what the loop would get.

        Normalization is undone, and boxes, masks and points are drawn. Titles name what was
        sampled: crops, flips and policies of encoded images. Other transforms run without a word.
        The first draw has the random parameters of the next epoch, if the sampler gives a sample
        once; further draws have those of the epochs after it. What a transform or the collate
        function samples for a whole batch is sampled for the samples shown here.

        No epoch begins, and no counter, seed or generator of torch, NumPy or Python moves. The
        dataset is read in this process.

        Args:
            count: samples, spread evenly over the dataset.
            draws: results for each sample.
            samples: their keys in the dataset, in place of ``count`` of them.
            side: of a picture on the sheet, in pixels.

        Returns:
            A PIL image, RGB, which a notebook shows and ``.save("preview.png")`` writes. A file
            that cannot be decoded has its place, with the reason. ``info["titles"]`` has the titles
            of each sample.

        Raises:
            BadImageError: if none of the samples can be decoded.
            ValueError: for a loader without a map-style dataset, an empty dataset, arguments out of
                range, and for transforms whose results are no images.

        Example:
            >>> loader.preview()  # in a notebook
            >>> loader.preview(4, draws=7).save("preview.png")
        """
        self._refuse_changed()
        moment = Moment(
            self.seed,
            self._progress.next_epoch(self._loader),
            sampling_rank(self._loader),
            ranks_of(self._loader),
        )
        return preview(self._loader, self._pipeline, moment, Wanted(count, draws, samples, side))

    def set_epoch(self, epoch: int) -> None:
        """Number the next epoch: for the samplers of the loader, and for the random parameters.

        After an error :meth:`next` begins it.
        """
        if not hasattr(epoch, "__index__"):
            raise TypeError(f"set_epoch takes the number of an epoch, an int, got {epoch!r}.")
        epoch = operator.index(epoch)  # an int, which torch.load takes back, also of numpy's
        self._progress.set_epoch(self._loader, epoch)
        self._manual.forget_ended()

    @property
    def _is_accelerate_prepared(self) -> NoReturn:
        """What ``accelerator.prepare_data_loader`` asks for first."""
        raise TypeError(f"prepare_data_loader() drops decode and transforms: {INTO_PREPARED}.")

    def __len__(self) -> int:
        # Torch warns of an iterable dataset that turns out longer than its loader was told here.
        living = self._workers.loader
        return len(self._loader if living is None else living)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also keeps copy and pickle from recursing before _loader is set
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(self._loader, name)
        except AttributeError as error:
            advice = _ADVICE.get(name, "")
            raise AttributeError(
                f"{error}, and the DataPrefetcher around it has none.{advice}"
            ) from error

    def __setattr__(self, name: str, value: object) -> None:
        if name in _ARGUMENTS and "_options" in vars(self):
            raise AttributeError(
                f"{name} is fixed: give it to DataPrefetcher(loader, {name}={value!r})."
            )
        if not name.startswith("_") and self._is_read_from_loader(name):
            if isinstance(self._loader, DataLoader) and name in _LOCKED:
                raise AttributeError(
                    f"{name} is fixed in the DataLoader. Build one with DataLoader(..., "
                    f"{name}=...), and wrap that."
                )
            raise AttributeError(
                f"{name} is the loader's. Set it there: prefetcher.wrapped.{name} = ..."
            )
        object.__setattr__(self, name, value)

    def _is_read_from_loader(self, name: str) -> bool:
        """Whether the loader has an attribute, and no subclass of ours one that can be set."""
        kept = getattr(type(self), name, property())
        own = name in vars(self) or not isinstance(kept, property) or kept.fset is not None
        return not own and "_loader" in vars(self) and hasattr(self._loader, name)

    def __bool__(self) -> bool:
        return bool(self._loader)

    def __getstate__(self) -> dict[str, Any]:
        # A copy begins a new epoch, with its own workers.
        progress = self._progress.copied(self._taken(self._progress.place))
        state = vars(self) | {"_progress": progress, "_notes": self._notes.copied()}
        for name in ("_workers", "_manual", "_beginning"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _manual=OneByOne(), _beginning=threading.RLock())
        self._workers = LivingWorkers(self._loader)

    def __repr__(self) -> str:
        words = [f"device={str(self.device)!r}"]
        for name, value in self._options.given():
            if name == "transforms" and isinstance(value, (list, tuple)):
                value = [*map(title, value)]
            if value != []:
                words.append(f"{name}={value!r}")
        return f"DataPrefetcher({self._loader!r}, {', '.join(words)})"
