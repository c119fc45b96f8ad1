"""How the tools speak: aligned columns for a result, and a bar on stderr until it is there."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any


class Printed:
    """Base of what a notebook shows as it is printed."""

    def __repr__(self) -> str:
        return str(self)


class Text(str):
    """A string that a notebook shows as it is printed."""

    __repr__ = str.__str__


def columns(rows: Iterable[Sequence[Any]], right: Sequence[int] = ()) -> str:
    """A line per row, columns aligned; those named in ``right`` to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = [">" if i in right else "<" for i in range(len(widths))]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return "\n".join(form.format(*row).rstrip() for row in cells)


def versions() -> dict[str, str]:
    """Of what a result may depend on, as far as it is installed."""
    found = {}
    for name in ("torch", "torchvision", "torchcodec", "triton", "kornia"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


class _Line:
    """The part of tqdm's bar that is used here, in one line."""

    def __init__(self, total: int, desc: str) -> None:
        self.total, self._desc, self._done = total, desc, 0
        self._started = time.monotonic()

    def set_description_str(self, desc: str) -> None:
        self._desc = desc
        self.update(0)

    def update(self, count: int = 1) -> None:
        self._done += count
        if not sys.stderr.isatty():
            return
        text = f"{self._desc}: {self._done} of {self.total}"
        if self._done:
            left = (time.monotonic() - self._started) / self._done * (self.total - self._done)
            text += f", {left:.0f} s left"
        sys.stderr.write(f"\r{text:<79}")
        sys.stderr.flush()


@contextlib.contextmanager
def progress(name: str, total: int) -> Iterator[Any]:
    """A bar of tqdm's where it is installed, else a line like it; nothing where stderr is a file.

    Yields:
        What has ``total``, ``update(count)`` and ``set_description_str(text)``.
    """
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        yield _Line(total, name)
        if sys.stderr.isatty():
            sys.stderr.write("\n")
    else:
        with tqdm(total=total, desc=name, disable=None) as bar:
            yield bar
