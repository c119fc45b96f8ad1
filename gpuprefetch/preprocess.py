"""The transforms of a loader on a few files: for serving, notebooks and scripts that predict."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TypeAlias

import torch

from gpuprefetch.core.nested import Batch
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.folder import read_image
from gpuprefetch.lists.views import Views
from gpuprefetch.prefetcher import DataPrefetcher
from gpuprefetch.transforms.head import Transform

# A path, or the bytes of a file.
File: TypeAlias = str | PathLike[str] | bytes | bytearray | memoryview | torch.Tensor | EncodedImage


def preprocess(
    files: Sequence[File],
    transforms: Sequence[Transform] | Views = (),
    *,
    device: torch.device | str | None = None,
    apply_exif: bool = False,
) -> Batch:
    """Decode and transform some image files as :class:`DataPrefetcher` does, in one batch.

    Random transforms sample the same in each call, until torch is seeded anew.

    Args:
        files: N of them: bytes, paths, or :class:`EncodedImage`.
        transforms: as for :class:`DataPrefetcher`.
        device: as for :class:`DataPrefetcher`.
        apply_exif: as for :class:`DataPrefetcher`.

    Returns:
        ``(N, 3, H, W)`` on the device, as the transforms make it: what a loader gives for these
        files. Without transforms a list of N ``(3, H, W)`` uint8 tensors; a list too where the
        transforms give each image a size of its own.

    Raises:
        TypeError: for a single file in place of several, or for what is no file.
        ValueError: without any file.
        BadImageError: for a file that cannot be decoded.
    """
    if isinstance(files, (str, bytes, bytearray, PathLike, EncodedImage)):
        raise TypeError(
            f"preprocess takes a list of files, got one {type(files).__name__}: "
            "preprocess([file], transforms)."
        )
    images = []
    for index, file in enumerate(files):
        if isinstance(file, (str, PathLike)):
            file = read_image(file, index)
        images.append(file if isinstance(file, EncodedImage) else EncodedImage(file, index))
    if not images:
        raise ValueError("preprocess takes at least one file, got none.")
    loader = DataPrefetcher([images], transforms=transforms, device=device, apply_exif=apply_exif)
    (batch,) = loader
    return batch
