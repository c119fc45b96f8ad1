"""Read image files without decoding them: one file, or a folder of classes."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from torch.utils.data import Dataset

from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.header import bytes_worth_reading
from gpuprefetch.images.host_memory import no_memory
from gpuprefetch.images.plan import readable

# A file of more bytes is checked for an image header before it is read.
LARGE = 64 << 20
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_image(path: str | os.PathLike[str], index: int = -1) -> EncodedImage:
    """Read a file as an encoded image.

    A file that cannot be an image by its kind is not opened, and becomes a bad image: opening a
    FIFO would wait for its writer, and a device may have no end.
    """
    status = os.stat(path)  # noqa: PTH116  # pathlib needs half as long again for a photo
    if fault := fault_of(status):
        return without_bytes(os.fspath(path), index, fault)
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            return EncodedImage(read_open(file, status.st_size), index, os.fspath(path))
    except MemoryError as error:
        raise no_memory(f"the {readable(status.st_size)} of {os.fspath(path)!r}") from error


def without_bytes(path: str, index: int, fault: str) -> EncodedImage:
    """A bad image: a file that is not read, and why."""
    image = EncodedImage(b"", index, path)
    image._condemn(fault)
    return image


def fault_of(status: os.stat_result) -> str:
    """Why a file cannot be an image, by its kind; empty if it may be one."""
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFREG:
        return ""
    return f"it is {_KINDS.get(kind, 'of an unknown kind')}, and no regular file"


def read_open(file: BinaryIO, size: int) -> bytes:
    """Read an open file of ``size`` bytes, as far as an image can reach."""
    if size <= LARGE:
        return file.read()
    worth = bytes_worth_reading(file, size)
    file.seek(0)
    return file.read() if worth == size else file.read(worth)


_SPLITS = frozenset("train training val valid validation test testing dev eval".split())


def _refuse_splits(root: str, samples: list[tuple[str, int]], classes: list[str]) -> None:
    """Refuse folders that have the names of splits, and whose files are in folders of classes."""
    if not _SPLITS.issuperset(map(str.lower, classes)):
        return
    deep = all(Path(path).relative_to(root).parts[1:-1] for path, _ in samples)
    if deep:
        split = next((name for name in classes if name.lower().startswith("train")), classes[0])
        one = str(Path(root) / split)
        raise ValueError(
            f"{root!r} has the splits {', '.join(classes)}, which would become the classes. Take "
            f"one of them: EncodedImageFolder({one!r}). If they are classes, put their "
            "files into them without another folder in between."
        )


class EncodedImageFolder(Dataset[tuple[EncodedImage, Any]]):
    """torchvision's ``ImageFolder`` with encoded bytes in its samples: ``root/class/.../file.jpg``.

    Args:
        root: the folder whose sub-folders are the classes.
        transform: must be None; pass transforms to the prefetcher.
        target_transform: called with each target.
        is_valid_file: called with each path, returns whether it is a sample. By default the
            extension tells.
        allow_empty: whether a class folder may be empty.

    Attributes:
        classes: sorted class names.
        class_to_idx: class name -> index.
        samples: (path, class index) of every sample.
        targets: class index of every sample.

    Raises:
        FileNotFoundError: if ``root`` has no class folders, or a class has no sample.
        ValueError: if ``root`` has the splits of a dataset, such as ``train/`` and ``val/``, in
            place of its classes.
        TypeError: for a ``transform``.
    """

    def __init__(
        self,
        root: str | Path,
        transform: None = None,
        *,
        target_transform: Callable[[Any], Any] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
    ) -> None:
        from torchvision.datasets import ImageFolder

        if transform is not None:
            raise TypeError(
                "EncodedImageFolder gives images that are not decoded, so it takes no transform. "
                "Pass transforms to DataPrefetcher(loader, transforms=[...]), or pass the loader "
                "of an ImageFolder with its transform to gpuprefetch.accelerate(loader)."
            )
        try:
            folder = ImageFolder(str(root), is_valid_file=is_valid_file, allow_empty=allow_empty)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{str(error).rstrip('.')}. EncodedImageFolder takes root/class/.../file.jpg. For "
                "a folder without classes write a Dataset that returns "
                "EncodedImage(path.read_bytes(), index, path)."
            ) from error
        _refuse_splits(folder.root, folder.samples, folder.classes)
        self.root = folder.root
        self.classes: list[str] = folder.classes
        self.class_to_idx: dict[str, int] = folder.class_to_idx
        self.samples: list[tuple[str, int]] = folder.samples
        self.imgs = self.samples
        self.targets: list[int] = folder.targets
        self.extensions = folder.extensions
        self.target_transform = target_transform

    def __getitem__(self, index: int) -> tuple[EncodedImage, Any]:
        path, target = self.samples[index]
        position = index if index >= 0 else len(self) + index
        image = read_image(path, int(position))
        if self.target_transform is None:
            return image, target
        return image, self.target_transform(target)

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        return (
            f"EncodedImageFolder({self.root!r}, {len(self)} samples, {len(self.classes)} classes)"
        )
