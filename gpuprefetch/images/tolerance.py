"""What a prefetcher does about files that cannot be decoded: on_error and max_bad."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from gpuprefetch.core.stats import FEW, TOLERATED, Stats
from gpuprefetch.images.bad import BadImage, BadImageError
from gpuprefetch.images.prepared import PreparedImages


@dataclass(slots=True)
class Tolerance:
    """Which bad files are left out or replaced, and those that were."""

    on_error: str | Callable[[BadImage], object]
    max_bad: int | None
    stats: Stats
    # The bad files of all epochs, by index and path.
    seen: dict[object, BadImage] = field(default_factory=dict)
    # Of all epochs, where the stats may begin anew, and lag behind what has been prepared.
    _images: int = 0
    _bad: int = 0
    _told: bool = False  # whether the warning of many bad ones was given

    def kept_rows(self, images: Sequence[PreparedImages]) -> torch.Tensor | None:
        """The rows of a batch that become its result, ``(M,)`` int64; None for all of them.

        Raises:
            BadImageError: if a bad file is not tolerated, or cannot be left out or replaced.
        """
        bad = sorted({position for each in images for position in each.errors})
        self._images += sum(len(each.who.samples) for each in images)
        if not bad:
            return None
        for last in bad_images(images):  # messages name the last one
            self._tolerate(last)
        samples = images[0].who.samples
        if any(each.who.samples != samples for each in images):
            raise BadImageError(
                f"{last}. on_error cannot leave it out: the collate function leaves samples apart, "
                "or has another number of images for each. Let it keep the images together, one of "
                "each sample, as torch's default one does."
            )
        rows = np.arange(len(samples))
        good = np.setdiff1d(rows, bad)
        if self.on_error != "replace":
            return torch.from_numpy(good)
        if not len(good):
            raise BadImageError(f"all {len(samples)} images of a batch are bad, the last: {last}")
        rows[bad] = good[np.searchsorted(good, bad) % len(good)]  # the next good one
        return torch.from_numpy(rows)

    def _tolerate(self, bad: BadImage) -> None:
        if self.on_error == "raise":
            error = BadImageError(str(bad))
            error.add_note('DataPrefetcher(on_error="skip") leaves such files out')
            raise error
        if callable(self.on_error):
            self.on_error(bad)
        # Each epoch finds the same files again. A file without a name may be any, and counts anew.
        named = bad.index >= 0 or bad.path
        self.seen.setdefault((bad.index, bad.path) if named else object(), bad)
        self.stats.bad_images += 1
        self._bad += 1
        if self.max_bad is not None and len(self.seen) > self.max_bad:
            raise BadImageError(f"more than max_bad={self.max_bad} bad images, the last: {bad}")
        self._tell_of_many(bad)

    def _tell_of_many(self, bad: BadImage) -> None:
        """Warn once where far more images are bad than a few damaged files."""
        asked = callable(self.on_error) or self.max_bad is not None
        if self._told or asked or self._bad <= max(FEW, TOLERATED * self._images):
            return
        self._told = True
        warnings.warn(
            f"{self._bad} of {self._images} images could not be decoded so far, and on_error="
            f"{self.on_error!r} has no limit. The last: {bad}. bad_images has all of them; "
            "max_bad=100 ends with an error after as many.",
            stacklevel=2,
        )


def bad_images(images: Sequence[PreparedImages]) -> list[BadImage]:
    """The files of a batch that cannot be decoded."""
    return [
        BadImage(int(each.who.indices[position]), each.who.paths[position], reason)
        for each in images
        for position, reason in sorted(each.errors.items())
    ]
