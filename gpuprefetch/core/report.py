"""How the tools speak: aligned columns for a result, and a bar on stderr until it is there."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol


class Printed:
    """Base of what a notebook shows as it is printed."""

    def __repr__(self) -> str:
        return str(self)


class Text(str):
    """A string that a notebook shows as it is printed."""

    __repr__ = str.__str__


def columns(rows: Iterable[Sequence[object]], right: Sequence[int] = ()) -> str:
    """A line per row, columns aligned: to the right if ``right`` has their number."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = [">" if i in right else "<" for i in range(len(widths))]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return "\n".join(form.format(*row).rstrip() for row in cells)


def shown(name: str) -> str:
    """A file's name as it is, or as Python writes it where it would break a line or a terminal."""
    return name if name.isprintable() else repr(name)


def rate_text(per_second: float) -> str:
    """A rate with three digits at least: on a CPU a large model trains on few images a second."""
    return f"{per_second:.3g}" if per_second < 100 else f"{per_second:,.0f}"


def refuse_unwritable(picture: Path) -> None:
    """Refuse a file that a picture cannot be written to, before the work that makes the picture."""
    from PIL import Image

    if picture.is_dir():
        raise ValueError(f"{picture} is a folder. Name a file in it: {picture / 'preview.png'}")
    if picture.suffix.lower() not in Image.registered_extensions():
        raise ValueError(
            f"{picture}: the ending of a picture's name says its format: write "
            f"{picture.with_suffix('.png')}"
        )
    if not picture.parent.is_dir():
        raise ValueError(f"{picture.parent} is no folder to write {picture.name} to.")
    if not os.access(picture if picture.exists() else picture.parent, os.W_OK):
        raise ValueError(f"{picture} cannot be written: the permissions do not allow it.")


def versions() -> dict[str, str]:
    """The versions of what a result may depend on, as far as it is installed."""
    found = {}
    for name in ("torch", "torchvision", "torchcodec", "triton", "kornia"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


class Bar(Protocol):
    """How far a tool is: a bar of tqdm's, or nothing to see."""

    total: int

    def update(self, count: int = 1) -> object: ...

    def set_description_str(self, text: str) -> object: ...


class Lines:
    """A line on stderr where some seconds have passed since the last one: for logs."""

    EVERY = 10.0  # seconds

    def __init__(self, name: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self._text = name
        self._done = 0
        self._clock = clock
        self._told = clock()

    def update(self, count: int = 1) -> None:
        self._done += count
        now = self._clock()
        if now - self._told >= self.EVERY:
            self._told = now
            print(f"{self._text}: {self._done} of {self.total}", file=sys.stderr, flush=True)

    def set_description_str(self, text: str) -> None:
        self._text = text
        self.update(0)


@contextlib.contextmanager
def progress(name: str, total: int) -> Iterator[Bar]:
    """A bar on a terminal where tqdm is installed, and lines elsewhere."""
    tqdm = None
    if sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore,no-redef]
    if tqdm is None:
        yield Lines(name, total)
        return
    with tqdm(total=total, desc=name) as bar:
        yield bar
