"""Decode every picture of a folder once, and name those that are bad."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from gpuprefetch.core.device import resolve_device
from gpuprefetch.core.remarks import unremarked
from gpuprefetch.core.report import Printed, columns, progress, shown
from gpuprefetch.images.bad import BadImage, BadImageError
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.folder import read_image, without_bytes
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
            return without_bytes(path, index, f"it cannot be opened: {error.strerror}")


@dataclass(frozen=True, slots=True, repr=False)
class FilesReport(Printed):
    """Which pictures of a folder cannot be decoded.

    Attributes:
        folder: where they were looked for, with all folders in it.
        pictures: how many files have a picture's ending.
        others: ending -> number of the files that were not read, as they have no picture's ending.
        unlisted: folder -> why it does not say what is in it.
        bad: the pictures that cannot be decoded, by path.
        device: that decoded: ``"cuda:0"`` or ``"cpu"``.
    """

    folder: str
    pictures: int
    others: dict[str, int]
    unlisted: dict[str, str]
    bad: list[BadImage]
    device: str

    @property
    def ok(self) -> bool:
        """Whether all can be decoded, and no folder keeps what is in it to itself."""
        return not (self.bad or self.unlisted)

    def as_dict(self) -> dict[str, object]:
        """Everything in it, for JSON."""
        return asdict(self) | {"ok": self.ok}

    def __str__(self) -> str:
        folder = shown(self.folder)
        lines = [f"{folder}: all of {self.pictures:,} pictures can be decoded"]
        if self.bad:
            lines = [f"{folder}: {len(self.bad):,} of {self.pictures:,} pictures are bad"]
            lines += [columns((shown(bad.path), bad.reason) for bad in self.bad)]
            lines += ['accelerate(loader, on_error="skip") trains without them.']
            lines[-1] += " A file that cannot be opened stays an error."
        if self.unlisted:
            lines.append("What is in these folders is not known, as they cannot be listed:")
            lines.append(columns((shown(path), why) for path, why in self.unlisted.items()))
        if self.others:
            most = sorted(self.others.items(), key=lambda item: (-item[1], item[0]))[:NAMED]
            endings = [f"{count:,} {shown(ending) or 'without one'}" for ending, count in most]
            more = ", ..." * (len(self.others) > NAMED)
            lines.append(f"Not read, by their endings: {', '.join(endings)}{more}")
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
        OSError: where the folder cannot be listed.
    """
    chosen = resolve_device(device)
    pictures, others, unlisted = _found(folder)
    if not pictures:
        also = f" {len(unlisted)} of these cannot be listed." if unlisted else ""
        raise ValueError(f"no pictures in {folder}, nor in the folders below it.{also}")
    loader = DataLoader(
        _Pictures(pictures), batch_size, num_workers=workers, pin_memory=chosen.type == "cuda"
    )
    with warnings.catch_warnings(), unremarked(), progress("check", len(pictures)) as bar:
        warnings.simplefilter("ignore")  # that files are bad is what the report says
        small = Resize((SIDE, SIDE))
        prefetcher = DataPrefetcher(loader, transforms=[small], device=chosen, on_error="skip")
        good = 0
        told = 0
        try:
            for images in prefetcher:
                good += len(images)
                done = good + len(prefetcher.bad_images)
                bar.update(done - told)
                told = done
        except BadImageError:  # an epoch without one good picture ends so
            pass
        bar.update(len(pictures) - told)
    bad = sorted(prefetcher.bad_images, key=lambda image: image.path)
    return FilesReport(str(folder), len(pictures), others, unlisted, bad, str(chosen))


def _found(folder: Path) -> tuple[list[str], dict[str, int], dict[str, str]]:
    """The pictures below a folder, sorted, the endings of its other files, and what has no list."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    if not folder.is_dir():
        is_file = ": it is a file" if folder.exists() else ""
        raise FileNotFoundError(f"there is no folder {folder}{is_file}.")
    os.scandir(folder).close()  # whose error it is
    pictures: list[str] = []
    others = Counter[str]()
    unlisted: dict[str, str] = {}
    visited: set[Path] = set()

    def note(error: OSError) -> None:
        unlisted[str(error.filename)] = str(error.strerror)

    for place, below, names in os.walk(folder, onerror=note, followlinks=True):
        real = Path(place).resolve()
        if real in visited:  # a link to a folder that is read already, or to one above
            below.clear()
            continue
        visited.add(real)
        for name in names:
            if name.lower().endswith(IMG_EXTENSIONS):
                pictures.append(str(Path(place, name)))
            else:
                others[Path(name).suffix.lower()] += 1
    return sorted(pictures), dict(others), dict(sorted(unlisted.items()))
