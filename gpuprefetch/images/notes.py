"""What is known of the batches of an epoch: for replay, and to notice another order on resume."""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpuprefetch.core.nested import Batch, objects
from gpuprefetch.core.resume import Place, another_order
from gpuprefetch.core.samplers import Key
from gpuprefetch.images.division import Share
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.prepared import PreparedImages, is_encoded
from gpuprefetch.images.samples import own_name

# The latest KEPT epochs have notes, of MOST batches each: 300 MB at 256 samples a batch where an
# epoch has no end, and 10 MB of an epoch of ImageNet.
KEPT = 2
MOST = 1 << 17


class Noted(NamedTuple):
    """What is known of a batch."""

    number: int  # in its epoch
    keys: Sequence[Key]  # of its samples, as the sampler gave them; empty where there is none
    names: Sequence[int]  # of its samples
    repeats: Sequence[int]  # how often the epoch has had each before; empty where it has had none
    checksum: int | None  # of all keys up to here, or of the names; None where they have no names
    named: int | None  # of all names up to here; None where they have none


@dataclass(slots=True)
class Notes:
    """Notes of one epoch."""

    seed: int = 0
    rank: int = 0  # of this process
    by_sampler: bool = True  # whether the sampler notes the batches; else receive() does
    place: Place = field(default_factory=lambda: Place(0))  # of the epoch
    shares: dict[int, Share] = field(default_factory=dict)  # of the workers, by number of the batch
    # The latest that the sampler gave. The last ones are ahead of the loop.
    batches: deque[Noted] = field(default_factory=lambda: deque(maxlen=MOST))
    given: int = 0  # how many there were

    def begin(self, place: Place) -> Notes:
        """These notes, of an epoch that begins at this place after some batches were noted."""
        self.place = place
        return self

    def add(
        self, keys: Sequence[Key], names: Sequence[int] = (), repeats: Sequence[int] = ()
    ) -> None:
        """Note the next batch."""
        checksums = self._checksums()
        told = names if isinstance(names, array) else array("q", names)
        seen = keys if isinstance(keys, array) else told
        checksum = _checksum(seen, checksums[0])
        # Both are one and the same where the keys are the names.
        alike = seen is told and checksums[0] == checksums[1]
        named = checksum if alike else _checksum(told, checksums[1])
        self.batches.append(Noted(self.given, keys, names, repeats, checksum, named))
        self.shares.pop(self.given - MOST, None)
        self.given += 1

    def see(self, number: int, packed: Iterable[PreparedImages]) -> None:
        """Note a batch whose images have been packed."""
        names = list[int]()
        for images in packed:
            self.shares[number] = images.report.share
            names += images.who.names.tolist()
        if not self.by_sampler:
            self.given = number  # not one after the other if the loader itself went on from a state
            self.add((), names)

    def skip(self, batch: Batch) -> None:
        """Note a batch that the loader gave again and that a resumed epoch leaves out."""
        if self.by_sampler:
            return
        names = list[int]()
        for leaf in objects(batch, is_encoded):
            if isinstance(leaf, PreparedImages):
                names += leaf.who.names.tolist()
            elif is_encoded(leaf):
                images = [leaf] if isinstance(leaf, EncodedImage) else leaf
                names += [own_name(image) for image in images]
        self.add((), names)

    def had(self) -> list[Noted]:
        """The batches that the loop has had."""
        return self._first(self.place.batches)

    def _first(self, batches: int) -> list[Noted]:
        copied = list(self.batches)  # in one step, as another thread may be adding
        return [noted for noted in copied if noted.number < batches]

    def _checksums(self) -> tuple[int | None, int | None]:
        """Those of the batches that were noted so far; None where they are not known."""
        if not self.given:
            return 0, 0
        latest = self.batches[-1] if self.batches else None
        if latest is None or latest.number != self.given - 1:
            return None, None
        return latest.checksum, latest.named

    def drawn(self, batches: int) -> tuple[int, int | None, int | None]:
        """The rank, and checksums of the keys and names of so many batches; None where unknown."""
        if not batches:
            return self.rank, 0, 0
        had = self._first(batches)
        if not had or had[-1].number != batches - 1:
            return self.rank, None, None
        return self.rank, had[-1].checksum, had[-1].named

    def refuse_another_order(self) -> None:
        """Compare the batches that a resumed epoch has left out with the loop's of before."""
        if self.place.drawn is None:
            return
        there, *before = self.place.drawn  # a state of an older version has no names
        here, *now = self.drawn(self.place.batches)
        if there != here:  # Lightning has the state of rank 0 loaded by all
            return
        short = self.given < self.place.batches
        if short and not self.by_sampler:
            return  # the loader itself went on from its state
        differ = [
            saved is not None and saved != new for saved, new in zip(before, now, strict=False)
        ]
        if short or any(differ):
            split = any(differ) and not differ[0]
            raise another_order(self.place, _SAME_SPLIT if split else "")


_SAME_SPLIT = (
    " Its keys are the same, and stand for other samples: split the dataset as before, as with "
    "random_split(dataset, lengths, generator=torch.Generator().manual_seed(0))."
)


def _checksum(numbers: array[int], before: int | None) -> int | None:
    """The checksum of all numbers up to these; None if there are none, or were none before."""
    if not len(numbers) or before is None:
        return None
    return zlib.crc32(numbers.tobytes(), before)


class Notebook:
    """The notes of the latest epochs of a prefetcher, by number of the epoch."""

    def __init__(self, notes: Iterable[Notes] = ()) -> None:
        self._notes = {each.place.epoch: each for each in notes}

    def __iter__(self) -> Iterator[Notes]:
        """The notes of each epoch, the latest last."""
        return iter([*self._notes.values()])

    def copied(self) -> Notebook:
        """Another one with the same notes, which gets others from here on."""
        return Notebook(self)

    def add(self, notes: Notes) -> None:
        """Keep the notes of an epoch that begins; those of an older one are dropped."""
        epoch = notes.place.epoch
        self._notes.pop(epoch, None)
        self._notes[epoch] = notes
        if len(self._notes) > KEPT:
            del self._notes[next(iter(self._notes))]

    def of_place(self, place: Place) -> Notes | None:
        """The notes of the epoch that stands at this very place: a loaded one has none."""
        notes = self._notes.get(place.epoch)
        return notes if notes is not None and notes.place is place else None

    def had(self, epoch: int | None, latest: Place) -> Notes:
        """The notes of an epoch for replay; None is the latest that the loop has had a batch of."""
        if epoch is None:
            places = [*(notes.place for notes in self), latest]
            if not (used := [place.epoch for place in places if place.batches]):
                raise LookupError("no batch of any epoch has been handed over so far.")
            epoch = used[-1]
        if epoch not in self._notes:
            raise ValueError(
                f"the batches of epoch {epoch} are not known, only those of epochs "
                f"{list(self._notes)}. Load a state_dict() of that epoch and take a batch, or keep "
                "what you need."
            )
        return self._notes[epoch]
