"""A folder of classes whose images are handed out as they are in their files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from gpuprefetch.images.encoded import EncodedImage


def read_file(path: str | os.PathLike[str]) -> bytes:
    """What a file holds. For a photo, Path.read_bytes takes half as long again."""
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        return file.read()


class EncodedImageFolder(Dataset[tuple[EncodedImage, Any]]):
    """torchvision's ``ImageFolder`` with encoded bytes for samples: ``root/class/.../file.jpg``.

    Args:
        root: the folder whose sub-folders are the classes.
        transform: None; transforms are the prefetcher's.
        target_transform: called with each target.
        is_valid_file: says of a path whether it is a sample; by default the extension does.
        allow_empty: whether a class folder may be empty.

    Attributes:
        classes: sorted class names.
        class_to_idx: class name -> index.
        samples: (path, class index) of every sample.
        targets: class index of every sample.

    Raises:
        FileNotFoundError: if ``root`` has no class folders, or a class has no sample.
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
                "EncodedImageFolder gives images that are not decoded. Give transforms to "
                "DataPrefetcher(loader, transforms=[...]), or move an ImageFolder with its "
                "transform over with gpuprefetch.accelerate(loader)."
            )
        try:
            folder = ImageFolder(str(root), is_valid_file=is_valid_file, allow_empty=allow_empty)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{str(error).rstrip('.')}. EncodedImageFolder takes root/class/.../file.jpg. For "
                "a folder without classes write a Dataset of EncodedImage(path.read_bytes(), "
                "index, path)."
            ) from error
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
        image = EncodedImage(read_file(path), int(position), path)
        return image, target if self.target_transform is None else self.target_transform(target)

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        return (
            f"EncodedImageFolder({self.root!r}, {len(self)} samples, {len(self.classes)} classes)"
        )
