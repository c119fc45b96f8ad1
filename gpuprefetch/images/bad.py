"""Files that cannot be decoded."""

from __future__ import annotations

from dataclasses import dataclass


class BadImageError(ValueError):
    """A file that cannot be decoded; the message names its path, its index and the reason."""


def name_of(index: int, path: str, unnamed: str = "an image") -> str:
    """How messages name a file: by its path and its sample's index; ``unnamed`` without both."""
    sample = f"(sample {index} of the dataset)" if index >= 0 else ""
    return " ".join(filter(None, (repr(path) if path else "", sample))) or unnamed


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
        return f"cannot decode {name_of(self.index, self.path)}: {self.reason}"
