"""Decode every picture of a folder once, and name those that are bad."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from gpuprefetch.core.device import resolve_device
from gpuprefetch.core.report import Printed, columns, progress
from gpuprefetch.images.bad import BadImage, BadImageError
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.folder import read_image
from gpuprefetch.prefetcher import DataPrefetcher
from gpuprefetch.transforms.head import Resize

SIDE = 32  # pixels: what becomes of the pictures does not matter
NAMED = 5  # endings of files that were left out


class _Pictures(Dataset[EncodedImage]):
    """The pictures of some paths, not decoded. One that cannot be opened is a bad one."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> EncodedImage:
        path = self.paths[index]
        try:
            return read_image(path, index)
        except OSError as error:
            image = EncodedImage(b"", index, path)
            image._condemn(f"it cannot be opened: {error.strerror}")
            return image


@dataclass(frozen=True, slots=True, repr=False)
class FilesReport(Printed):
    """Which pictures of a folder cannot be decoded.

    Attributes:
        folder: where they were looked for, with all folders in it.
        pictures: how many there are, by their endings.
        others: ending -> number of the files that were not read, as they have no picture's ending.
        bad: the pictures that cannot be decoded, by path.
        decoder: what decoded: ``"cuda:0"`` or ``"cpu"``.
    """

    folder: str
    pictures: int
    others: dict[str, int]
    bad: list[BadImage]
    decoder: str

    @property
    def ok(self) -> bool:
        """Whether all can be decoded."""
        return not self.bad

    def as_dict(self) -> dict[str, Any]:
        """Everything in it, for JSON."""
        return asdict(self) | {"ok": self.ok}

    def __str__(self) -> str:
        lines = [f"{self.folder}: all of {self.pictures:,} pictures can be decoded"]
        if self.bad:
            lines = [f"{self.folder}: {len(self.bad):,} of {self.pictures:,} pictures are bad"]
            lines += [columns((bad.path, bad.reason) for bad in self.bad)]
            lines += ['accelerate(loader, on_error="skip") trains without them.']
            lines[-1] += " A file that cannot be opened stays an error."
        if self.others:
            most = sorted(self.others.items(), key=lambda item: (-item[1], item[0]))[:NAMED]
            named = ", ".join(f"{count:,} {ending or 'without one'}" for ending, count in most)
            more = ", ..." * (len(self.others) > NAMED)
            lines.append(f"Not read, by their endings: {named}{more}")
        return "\n".join(lines)


def check_files(
    folder: Path,
    device: str | torch.device | None = None,
    *,
    batch_size: int = 64,
    workers: int = 0,
) -> FilesReport:
    """Decode every picture below a folder, as a loader would, and keep none.

    Args:
        folder: with pictures in it, or in folders below it. ``ImageFolder``'s endings tell them.
        device: that decodes, as of a prefetcher; None is the current GPU, else the CPU.
        batch_size: files at a time.
        workers: processes that read.

    Raises:
        FileNotFoundError: where there is no such folder.
        ValueError: where there is no picture in it.
    """
    chosen = resolve_device(device)
    pictures, others = _found(folder)
    if not pictures:
        raise ValueError(f"no pictures in {folder}, nor in the folders below it.")
    loader = DataLoader(
        _Pictures(pictures), batch_size, num_workers=workers, pin_memory=chosen.type == "cuda"
    )
    with warnings.catch_warnings(), progress("check", len(pictures)) as bar:
        warnings.simplefilter("ignore")  # that files are bad is what the report says
        small = Resize((SIDE, SIDE))
        prefetcher = DataPrefetcher(loader, transforms=[small], device=chosen, on_error="skip")
        try:
            for images in prefetcher:
                bar.update(len(images))
        except BadImageError:  # an epoch without one good picture ends so
            pass
        bar.update(len(prefetcher.bad_images))
    bad = sorted(prefetcher.bad_images, key=lambda image: image.path)
    return FilesReport(str(folder), len(pictures), others, bad, str(chosen))


def _found(folder: Path) -> tuple[list[str], dict[str, int]]:
    """The pictures below a folder, sorted, and the endings of its other files."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}.")
    pictures: list[str] = []
    others = Counter[str]()
    visited: set[Path] = set()
    for place, below, names in os.walk(folder, followlinks=True):
        real = Path(place).resolve()
        if real in visited:  # a link to a folder that is read already, or to one above
            below.clear()
            continue
        visited.add(real)
        for name in names:
            file = Path(place, name)
            if file.suffix.lower() in IMG_EXTENSIONS:
                pictures.append(str(file))
            else:
                others[file.suffix.lower()] += 1
    return sorted(pictures), dict(others)
