"""Which epoch of a loader is next, and where the latest one stands."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from gpuprefetch.core.source import beginning, changed, epochs_of, in_order, own_state


class Progress:
    """Numbers the epochs of a loader. An iterator that is dropped unused is no epoch."""

    def __init__(self) -> None:
        self.reset(0)

    def reset(self, epoch: int) -> None:
        self.epoch = epoch  # number of the next one
        self._asked = False  # whether set_epoch() gave that number
        self.resumes = self.resumed = False  # whether the next one goes on at place, the latest did
        # Of the latest one, see Source, or a state that was loaded.
        self.place: dict[str, Any] = {"epoch": epoch, "batches": 0}
        self._use = ["used"]  # of the latest iterator

    def follow(self, loader: Any) -> None:
        """Number the next epoch as a sampler does that is ahead, unless set_epoch() did."""
        if not self._asked and not self.resumes:
            self.epoch = max([self.epoch, *(e for e in epochs_of(loader) if e is not None)])

    def begin(self, loader: Any) -> tuple[int, dict[str, Any] | None]:
        """The number of an epoch that begins, and the place it goes on at."""
        self.forget_unused()
        self.follow(loader)
        self._asked = False
        self.resumed, self.resumes = self.resumes, False
        self.epoch += 1
        return self.epoch - 1, self.place if self.resumed else None

    def began(self, place: dict[str, Any], use: list[str]) -> None:
        """Follow an epoch: its place, and whether its iterator is used."""
        self.place, self._use = place, use
        place["epoch"] = self.epoch - 1

    def failed(self) -> None:
        """An epoch could not begin: the next one tries again."""
        self.epoch, self.resumes = self.epoch - 1, self.resumed

    def forget_unused(self) -> None:
        """Take back an epoch whose iterator was dropped unused, as by Lightning's look at one."""
        if self._use[0] != "dropped":
            return
        if self.resumed:
            self.epoch, self.resumes, self._use = self.place["epoch"], True, ["used"]
        else:
            self.reset(self.place["epoch"])  # the next one draws its order anew

    def set_epoch(self, epoch: int) -> None:
        """Number the next epoch; one with another number than ``place`` begins at its start."""
        self.forget_unused()
        self.epoch, self._use = epoch, ["used"]
        if epoch != self.place["epoch"] and "ended" not in self.place:
            self.reset(epoch)
        self._asked = True

    def load(self, state: dict[str, Any]) -> None:
        self.place, self.resumes = dict(state), "random_states" in state

    def save(self, loader: Any, going_on: Any) -> dict[str, Any]:
        """Where the latest epoch stands, or the next begins; workers of ``going_on`` live on."""
        self.forget_unused()
        place = self.place
        self.follow(loader)
        if "ended" in place or "random_states" not in place:
            return self._next(loader, going_on)
        if place["batches"] and not in_order(loader):
            raise ValueError(
                f"the loop has had {place['batches']} batches, but with in_order=False it is not "
                "known which: resuming would leave some out and repeat others. Give the "
                "DataLoader in_order=True, or save no state of it."
            )
        return place

    def _next(self, loader: Any, going_on: Any) -> dict[str, Any]:
        if isinstance(loader, DataLoader):
            loader = changed(loader)  # an iterator that state_dict() makes is not the user's
        place = beginning(loader if going_on is None else going_on) | {"epoch": self.epoch}
        if "ended" in self.place:
            return place | {"loader": self.place["loader"]}
        place["loader"] = own_state(loader)
        if place["loader"] is not None:
            # Another iterator would draw other seeds for its workers.
            self.place, self.resumes = place, True
        return place
