"""The loader that is iterated, a copy of the user's: its workers pack, its batches are noted."""

from __future__ import annotations

import operator
import shutil
import threading
import time
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeGuard

from torch.utils.data import DataLoader, default_collate

from gpuprefetch.core.epoch import Lookahead
from gpuprefetch.core.forecast import STARTS, Facts, Forecast, facts_of, is_known, same
from gpuprefetch.core.forks import stay_here
from gpuprefetch.core.loaders import TorchLoader, changed, is_stream
from gpuprefetch.core.nested import Batch, Loader
from gpuprefetch.core.ranks import ranks_of, sampling_rank
from gpuprefetch.core.repeating import restarts
from gpuprefetch.core.samplers import Key, sampler_name
from gpuprefetch.core.workers import WorkerStart, disown, gone, shut_down
from gpuprefetch.images.collate import Announced, HostStage, announce
from gpuprefetch.images.notes import Notes
from gpuprefetch.images.packer import Packer
from gpuprefetch.images.samples import Origin, Repeats
from gpuprefetch.images.steady import Steady

# Note [The next epoch]
# At an epoch's edge the loop waits for the first batch of the next one: 60 to 90 ms with persistent
# workers on 16 cores, as all of them read a whole batch at the same time, and 0.8 s with others,
# which end and start anew. So once the workers have read the last batch, they begin the next epoch,
# while the loop still trains on the latest batches of this one. Nobody may notice but by the time:
#   - The order is drawn from copies of torch's generator and of the sampler (Forecast). When the
#     epoch begins, it counts only if the same would be drawn then. Seeds that a loop draws between
#     two epochs, as for a validation, are counted once and expected after that, but for those of
#     persistent workers that start. Before, they are those of another loader, if there is one.
#   - Seed and number of the epoch, the sampler, the loader and the list of samples are compared
#     with what they were. If any has changed, the batches are dropped, and it begins as ever.
#     If it is only the order, or the number, workers that live on begin once more with that one.
#   - Workers that have died while they waited are replaced, as if they had ended with the epoch.
#   - A forked process leaves them to its parent: two cannot read from one pipe.
#   - Only a folder of images without code of the user's is read ahead (Steady). Other datasets
#     might draw random numbers in the workers, or read what the loop changes between two epochs.
#   - Nothing goes to the device before the epoch begins.
# Workers that are not persistent live on for this. Others would be started with the same samples,
# and these have nothing that an epoch could have changed. They live on as well where the order is
# never the expected one, as with a loop that draws random numbers, and read nothing ahead of time.

# Workers that live on although they are not persistent end after this time without an epoch.
IDLE_SECONDS = 30.0
# So many epochs in a row that were not the expected one, and no other is read ahead of time.
MOST_MISSES = 3


def has_keys(loader: Loader) -> TypeGuard[TorchLoader]:
    """Whether a loader's sampler gives keys, and may be wrapped: that of torchdata's may not."""
    return (
        isinstance(loader, DataLoader)
        and not hasattr(loader, "state_dict")
        and not is_stream(loader)
    )


def _listed(batch: Key | Sequence[Key]) -> Sequence[Key]:
    """The keys of a batch, in an array if they are integers."""
    if isinstance(batch, (Iterator, str)):  # a key, for the dataset to read
        return [batch]
    for read in (lambda key: array("q", [operator.index(key)]), partial(array, "q"), list):
        with suppress(TypeError, ValueError, OverflowError):
            return read(batch)
    return [batch]  # any other key


class NotedSampler:
    """Wraps the sampler of a loader, and notes what it gives: batches of keys, or keys.

    With each batch the names and repeats of its samples go to the process that reads it.
    """

    def __init__(self, loader: TorchLoader, name: str, collate: HostStage) -> None:
        self._sampler = getattr(loader, name)
        self._gives_batches = name == "batch_sampler"
        self._token = collate.token
        self._dataset = loader.dataset
        self._in_workers = loader.num_workers > 0
        self._notes = Notes()
        self._order: Iterable[Key | Sequence[Key]] = self._sampler

    def note_into(self, notes: Notes, order: Iterable[Sequence[Key]] | None = None) -> None:
        """Write the notes of the epoch that is iterated next, in another ``order`` if given."""
        self._notes = notes
        self._order = self._sampler if order is None else order

    def __iter__(self) -> Iterator[Key | Sequence[Key]]:
        return self._noted(self._notes, self._order)

    def _noted(
        self, notes: Notes, order: Iterable[Key | Sequence[Key]]
    ) -> Iterator[Key | Sequence[Key]]:
        epoch = notes
        counted = Repeats(self._dataset)
        for batch in order:
            if self._gives_batches and isinstance(batch, Iterator):
                batch = list(batch)  # read once, here
            if epoch is not self._notes:  # the iterator of an earlier epoch goes on
                epoch = self._notes
                counted = Repeats(self._dataset)
            keys = _listed(batch)
            names, repeats = counted.add(keys)
            notes.add(keys, names, repeats)
            if self._in_workers:
                yield Announced(keys, batch, self._token, names, repeats)
            else:
                yield announce(batch, self._token, names, repeats)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy in the making has no _sampler
            raise AttributeError(name)
        return getattr(self._sampler, name)


def noting_sampler(loader: Loader) -> NotedSampler | None:
    """The sampler that notes the batches of a loader from :func:`with_packing`, if it has one."""
    sampler = getattr(loader, sampler_name(loader), None)
    return sampler if isinstance(sampler, NotedSampler) else None


def with_packing(loader: TorchLoader, packer: Packer) -> TorchLoader:
    """A copy of a loader. Its workers pack encoded images, and its batches are noted."""
    clone = changed(loader)
    if hasattr(loader, "next_iter_state"):
        loader.next_iter_state = None  # a StatefulDataLoader's: it is for one epoch, the clone's
        vars(clone)["_initial_iter_for_state_dict"] = (
            False  # about an iterator that stays with the user's
        )
    packer.share.share_memory_()  # again: a deep copy of the prefetcher is not in shared memory
    collate = HostStage(loader.collate_fn, packer)
    clone.collate_fn = collate
    stateful = hasattr(loader, "next_iter_state")
    clone.worker_init_fn = WorkerStart(loader.worker_init_fn, packer.on_gpu, stateful)
    if has_keys(clone):
        name = sampler_name(clone)
        # DataLoader locks the name, not the value.
        vars(clone)[name] = NotedSampler(clone, name, collate)
    return clone


@dataclass(frozen=True, slots=True)
class Ahead:
    """The next epoch, whose first batches the workers read before it begins.

    Nothing of it is on the device, and nothing was drawn for it that anybody could miss. It counts
    only if the epoch that begins turns out to be this very one.
    """

    number: int
    forecast: Forecast  # its order
    batches: Iterator[Batch]
    notes: Notes  # with the seed of its random parameters

    def begin(self) -> Iterator[Batch]:
        """Draw what the epoch draws as it begins; its batches."""
        self.forecast.draw()
        return self.batches


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Begun:
    """An epoch that has begun.

    Attributes:
        loader: the copy of the user's that is iterated.
        packer: of its workers.
        kept: whether the workers may serve another one, though the user lets them end with it.
        dataset: what the workers read, if that counts; None if it is not known.
        options: the attributes of the user's loader at that moment.
        ahead: the batches that were read ahead for it, if they are those of this epoch.
    """

    loader: Loader
    packer: Packer
    kept: bool = False
    dataset: Steady | None = None
    options: Facts = field(default_factory=dict)
    ahead: Ahead | None = None

    def is_as_it_was(self, loader: TorchLoader) -> bool:
        """Whether options, samples and rank are the same: torch.distributed may begin later."""
        return (
            self.dataset is not None
            and self.dataset == Steady.as_it_is(loader.dataset)
            and same(self.options, _options(loader))
            and self.packer.rank == sampling_rank(loader)
        )


@dataclass(frozen=True, slots=True)
class Waiting:
    """Workers that wait for the next epoch.

    Attributes:
        begun: the loader that they are of, and what has to be the same for them to serve again.
        ahead: the epoch whose first batches they have read; None if they have read nothing.
    """

    begun: Begun
    ahead: Ahead | None

    def serve(self, loader: TorchLoader) -> bool:
        """Whether they may serve an epoch of the user's loader as it is now."""
        return self.begun.is_as_it_was(loader) and not (self.begun.kept and self._have_died())

    def _have_died(self) -> bool:
        """Whether one of them is gone, as after Ctrl-C, which all of a terminal's processes get."""
        return bool(gone(self.begun.loader._iterator, patience=0.0))

    def expects(self, loader: TorchLoader, seed: int, epoch: int) -> bool:
        """Whether the epoch that begins now is the one that they have read ahead for."""
        ahead = self.ahead
        if ahead is None or not ahead.forecast.holds(loader):
            return False
        notes = ahead.notes
        return (ahead.number, notes.seed, notes.rank) == (epoch, seed, ranks_of(loader).rank)

    def end(self) -> None:
        """End them, unless the user's loader keeps them."""
        if self.begun.kept and isinstance(self.begun.loader, DataLoader):
            shut_down(self.begun.loader._iterator, self.begun.loader)


class LivingWorkers:
    """The workers that live on after an epoch, for the next one.

    Persistent workers serve one epoch after the other: an :class:`Origin` in shared memory tells
    them the seed and the epoch. At the end of an epoch they begin the next one ahead of time, where
    its samples and their order are known: see Note [The next epoch]. Other workers live on where
    their samples are known, and for :data:`IDLE_SECONDS` at most.
    """

    def __init__(self, loader: Loader) -> None:
        STARTS.made(loader)
        self._loader: TorchLoader | None = None
        self._packer: Packer | None = None  # of its workers
        self._epoch: weakref.ref[Lookahead] | None = None  # the latest
        # What has begun latest. Not kept, as its loader holds batches that were read for it.
        self._latest: weakref.ref[Begun] | None = None
        self._lock = threading.Lock()  # guards the next three
        self._waiting: Waiting | None = None
        self._idle_from = 0.0  # when workers that live on have begun to wait for an epoch
        self._is_watched = False  # whether a thread ends them if they wait in vain
        self._misses = 0  # epochs in a row that were not the one that was begun
        # Seeds that were drawn between the latest two epochs; None before the second.
        self._draws: int | None = None
        stay_here(self)

    def leave_to_parent(self) -> object:
        """Forget, in a forked process, the workers of its parent; what must not be collected."""
        latest = None if self._latest is None else self._latest()
        waiting = None if self._waiting is None else self._waiting.begun
        left = [self._loader, *(begun.loader for begun in (latest, waiting) if begun is not None)]
        for loader in left:
            disown(getattr(loader, "_iterator", None))
        self._lock = threading.Lock()  # a thread of the parent may have held it
        self._loader = None
        self._latest = None
        self._waiting = None
        self._is_watched = False
        return left

    @property
    def loader(self) -> TorchLoader | None:
        """The copy, whose iterator goes on from epoch to epoch."""
        return self._loader

    def drop(self) -> None:
        """Let the next epoch start other workers."""
        self._loader = None
        self._epoch = None
        self._drop_waiting()

    def begin(
        self, loader: TorchLoader, packer: Packer, seed: int, epoch: int, *, anew: bool
    ) -> Begun:
        """What to iterate, and the packer of its workers; ``anew`` starts other workers."""
        if loader.persistent_workers:
            running = None if self._epoch is None else self._epoch()
            if running is not None and not running.close():  # its thread waits for the same workers
                self._loader = None
                anew = True
        taken = None if anew else self._take_waiting(loader, seed, epoch)
        if taken is None:
            self._drop_waiting()
            begun = self._begin(loader, packer, seed, epoch, anew=anew)
        else:
            begun = replace(taken.begun, ahead=taken.ahead)
        self._latest = weakref.ref(begun)
        return begun

    def _begin(
        self, loader: TorchLoader, packer: Packer, seed: int, epoch: int, *, anew: bool
    ) -> Begun:
        if loader.persistent_workers:
            living = None if anew else self._packer
            if (
                self._loader is None
                or living is None
                or living.rank != packer.rank
                or restarts(self._loader) != restarts(loader)
            ):
                living = _shared(packer, seed, epoch)
                self._packer = living
                self._loader = with_packing(loader, living)
                STARTS.begins(loader)
            living.origin.set(seed, epoch)
            return Begun(self._loader, replace(packer, origin=living.origin))
        dataset = None if anew else kept_for(loader, packer)
        if dataset is None:
            return Begun(with_packing(loader, packer), packer)
        packer = _shared(packer, seed, epoch)
        clone = with_packing(loader, packer)
        vars(clone)["persistent_workers"] = True  # DataLoader locks the name, not the value
        return Begun(clone, packer, True, dataset, _options(loader))

    def serve(self, epoch: Lookahead) -> None:
        """Remember an epoch whose thread waits for these workers."""
        self._epoch = weakref.ref(epoch)

    def begin_next(self, loader: TorchLoader, begun: Begun, notes: Notes, epoch: int) -> None:
        """Let workers wait for an epoch, and begin it if it is known: see Note [The next epoch].

        Args:
            loader: the user's.
            begun: the epoch whose last batch has been read.
            notes: of the epoch to begin, with the seed of its random parameters.
            epoch: its number.
        """
        clone = begun.loader
        living = isinstance(clone, DataLoader) and clone._iterator is not None
        reads = self._misses < MOST_MISSES
        kept = begun.kept
        if noting_sampler(clone) is None or not living or not (reads or kept):
            return
        if kept and not (begun.is_as_it_was(loader) and _has_room()):
            return
        dataset = begun.dataset
        if not kept and dataset != Steady.as_it_is(loader.dataset):
            dataset = Steady.of(loader.dataset) if reads_alone(loader, begun.packer) else None
        if dataset is None:
            return
        advances = getattr(loader.sampler, "epoch", None) == epoch - 1
        draws = STARTS.expected(loader) if self._draws is None else self._draws
        forecast = Forecast.of(loader, draws=draws, advances=advances, starts_workers=kept)
        if forecast is None:
            return
        now = Begun(clone, begun.packer, kept, dataset, _options(loader))
        ahead = None
        if reads:
            ahead = _read(now, forecast, notes, epoch)
            if ahead is None:
                return
        self._drop_waiting()
        with self._lock:
            if kept and not self._is_watched:
                try:
                    self._watch()
                except RuntimeError:  # there can be no more threads: the workers end with the epoch
                    return
                self._is_watched = True
            self._waiting = Waiting(now, ahead)
            self._idle_from = time.monotonic()

    def _watch(self) -> None:
        """Have a thread that ends workers which wait for an epoch in vain."""
        dropped = threading.Event()
        weakref.finalize(self, dropped.set).atexit = False
        threading.Thread(
            target=_end_idle,
            args=[weakref.ref(self), dropped],
            name="gpuprefetch-idle",
            daemon=True,
        ).start()

    def _take_waiting(self, loader: TorchLoader, seed: int, epoch: int) -> Waiting | None:
        """The workers that wait, if they serve the epoch that begins; its batches are ahead."""
        with self._lock:
            waiting = self._waiting
            if waiting is None:
                return None
            if waiting.ahead is not None:
                if self._draws is None:
                    STARTS.shown()
                self._draws = waiting.ahead.forecast.draws_again()
            begun = waiting.begun
            own = not loader.persistent_workers or begun.loader is self._loader
            serves = own and waiting.serve(loader)
            expected = serves and waiting.expects(loader, seed, epoch)
            self._misses = 0 if expected else self._misses + 1
            if not expected and not (serves and begun.kept):
                return None
            self._waiting = None
            # An earlier epoch that is closed meanwhile asks live_on(), and leaves them alone.
            self._latest = weakref.ref(begun)
        if expected:
            return waiting
        forecast = Forecast.of(loader, draws=0, advances=False, starts_workers=True)
        notes = Notes(seed, ranks_of(loader).rank)
        ahead = None if forecast is None else _read(begun, forecast, notes, epoch)
        if ahead is None:
            waiting.end()
            return None
        return replace(waiting, ahead=ahead)

    def live_on(self, begun: Begun) -> bool:
        """Whether the workers of an epoch that ends serve another one."""
        if not begun.kept:
            return True  # as the user's loader says
        waiting = self._waiting
        latest = None if self._latest is None else self._latest()
        others = [None if waiting is None else waiting.begun, latest]
        return any(
            other is not None and other is not begun and other.loader is begun.loader
            for other in others
        )

    def end_idle(self) -> float | None:
        """End workers that live on, and have waited for an epoch for long.

        Returns:
            Seconds until they will have; None if none wait, and nobody need ask again.
        """
        with self._lock:
            waiting = self._waiting
            left = 0.0
            if waiting is not None and waiting.begun.kept:
                left = self._idle_from + IDLE_SECONDS - time.monotonic()
                if left > 0:
                    return left
                self._waiting = None
            self._is_watched = False
        if waiting is not None:
            waiting.end()
        return None

    def _drop_waiting(self) -> None:
        """Drop what was read ahead of time; workers that live on end."""
        with self._lock:
            dropped = self._waiting
            self._waiting = None
        if dropped is not None:
            dropped.end()


def _read(begun: Begun, forecast: Forecast, notes: Notes, epoch: int) -> Ahead | None:
    """Let living workers begin an epoch of this order; None if they have died."""
    sampler = noting_sampler(begun.loader)
    assert sampler is not None, "only such workers wait"
    begun.packer.origin.set(notes.seed, epoch)
    sampler.note_into(notes, forecast.batches)
    try:
        batches = iter(begun.loader)
    except Exception:  # the epoch itself will tell
        return None
    return Ahead(epoch, forecast, batches, notes)


def _end_idle(workers: weakref.ref[LivingWorkers], dropped: threading.Event) -> None:
    """Wait until workers that live on have been idle for long, or serve an epoch, or are gone."""
    left: float | None = IDLE_SECONDS
    while left is not None and not dropped.wait(left):
        living = workers()
        left = None if living is None else living.end_idle()
        del living  # not kept while this waits


def _shared(packer: Packer, seed: int, epoch: int) -> Packer:
    """A packer whose workers are told in shared memory which epoch they are to serve."""
    origin = Origin(seed, epoch)
    origin.share()
    return replace(packer, origin=origin)


def _options(loader: TorchLoader) -> Facts:
    return facts_of(loader, without=frozenset({"_iterator"}))


def reads_alone(loader: TorchLoader, packer: Packer) -> bool:
    """Whether nothing of the user's runs in the workers but the dataset."""
    plain = type(loader).__iter__ is DataLoader.__iter__
    made = type(loader)._get_iterator is DataLoader._get_iterator
    return plain and made and (packer.late or loader.collate_fn is default_collate)


def may_live_on(loader: TorchLoader, packer: Packer) -> bool:
    """Whether workers that the user lets end with the epoch could serve another unnoticed."""
    started = loader.num_workers > 0 and loader.worker_init_fn is None
    return started and has_keys(loader) and is_known(loader) and reads_alone(loader, packer)


def kept_for(loader: TorchLoader, packer: Packer) -> Steady | None:
    """The samples for which workers that are not persistent live on; None where they do not."""
    return Steady.of(loader.dataset) if may_live_on(loader, packer) else None


def starts_workers_anew(loader: Loader, packer: Packer) -> bool:
    """Whether each epoch starts workers of its own, and ``persistent_workers=True`` would not."""
    if not isinstance(loader, DataLoader) or loader.persistent_workers or not loader.num_workers:
        return False
    return kept_for(loader, packer) is None


def _has_room() -> bool:
    """Whether half of the shared memory is free: workers that live on keep theirs."""
    with suppress(OSError):  # not on every platform
        total, _, free = shutil.disk_usage("/dev/shm")
        return 2 * free > total
    return True
