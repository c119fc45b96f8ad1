"""Files that cannot be decoded."""

from __future__ import annotations

from dataclasses import dataclass


class BadImageError(ValueError):
    """A file that cannot be decoded; the message names its path, its index and the reason."""


@dataclass(frozen=True, slots=True)
class BadImage:
    """A file that could not be decoded.

    Attributes:
        index: of the sample in its dataset; negative where it is not known.
        path: of the file.
        reason: the decoder's.
    """

    index: int
    path: str
    reason: str

    def __str__(self) -> str:
        named = f"(sample {self.index} of the dataset)" if self.index >= 0 else ""
        words = ("cannot decode", repr(self.path) if self.path else "", named)
        return f"{' '.join(filter(None, words))}: {self.reason}"
