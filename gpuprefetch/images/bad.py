"""Files that cannot be decoded, and how messages name them."""

from __future__ import annotations

from dataclasses import dataclass


class BadImageError(ValueError):
    """A file that cannot be decoded; the message names its path, its index and the reason."""


def name_of(index: int, path: str, unnamed: str = "an image") -> str:
    """How messages name a file: by its path and its sample's index; ``unnamed`` without both.

    Example:
        >>> name_of(7, "a.jpg")
        "'a.jpg' (sample 7 of the dataset)"
    """
    words = []
    if path:
        words.append(repr(path))
    if index >= 0:
        words.append(f"(sample {index} of the dataset)")
    return " ".join(words) or unnamed


@dataclass(frozen=True, slots=True)
class BadImage:
    """A file that could not be decoded.

    Attributes:
        index: of the sample in its dataset; negative if it is not known.
        path: of the file; empty if it is not known.
        reason: why it cannot be decoded.
    """

    index: int
    path: str
    reason: str

    def __str__(self) -> str:
        return f"cannot decode {name_of(self.index, self.path)}: {self.reason}"
