"""Encoded images on their way from a dataset to the decoder: one flat buffer a batch."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map


@dataclass(slots=True)
class EncodedImage:
    """The bytes of one image file, as a dataset hands them out in place of a decoded image.

    The DataLoader's default collate packs them into :class:`EncodedImages`; nothing else is needed.

    Args:
        data: the file's bytes; bytes, bytearray, memoryview, or a 1-D uint8 tensor or array.
        index: of the sample in its dataset. Random parameters are keyed to it and error messages
            name it; -1 where there is none, then ``path`` or the bytes themselves take its place.
        path: where the bytes come from, for error messages.

    Raises:
        TypeError: if ``data`` is not one of these.
    """

    data: Any
    index: int = -1
    path: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.data, (torch.Tensor, np.ndarray)):
            array = np.asarray(self.data)
            if array.dtype != np.uint8 or array.ndim != 1:
                raise TypeError(
                    f"EncodedImage takes a file's bytes as 1-D uint8, got {array.dtype} of shape "
                    f"{array.shape}. Decoded pixels do not belong in it: return them as a tensor."
                )
            self.data = memoryview(np.ascontiguousarray(array))
        elif not isinstance(self.data, (bytes, bytearray, memoryview)):
            raise TypeError(
                f"EncodedImage takes a file's bytes, got {type(self.data).__name__}. "
                "Read the file first, as in EncodedImage(Path(path).read_bytes(), index, path)."
            )


@dataclass(slots=True)
class EncodedImages:
    """A batch of N encoded images in one flat buffer.

    Attributes:
        data: ``(bytes,)`` uint8 on the CPU: the files' bytes and, for images that a worker has
            decoded already, their pixels, ``(3, H, W)`` each.
        spans: ``(N, 2)`` int64, where each image starts and stops in ``data``.
        pixels: where the decoded part of ``data`` starts.
        indices: ``(N,)`` int64, of the samples in their dataset.
        paths: of the files.
        decoded: ``(N,)`` bool, whether the image's span holds pixels.
        sizes: ``(N, 2)`` int64, height and width of the pixels, decoded or not yet.
        transposed: ``(N,)`` bool, whether rows and columns of the decoded image change places.
        rows: ``(N, 2, 6)`` float64, the sampling of the fused head; None where it was not drawn.
        errors: position in the batch -> why the image cannot be decoded.
        prepared: whether headers were read, see :class:`gpuprefetch._host.Packer`.
        epoch: whose random parameters ``rows`` holds.
        decode_seconds: spent decoding in the worker.
    """

    data: torch.Tensor
    spans: npt.NDArray[np.int64]
    pixels: int
    indices: npt.NDArray[np.int64]
    paths: list[str]
    decoded: npt.NDArray[np.bool_]
    sizes: npt.NDArray[np.int64]
    transposed: npt.NDArray[np.bool_]
    rows: npt.NDArray[np.float64] | None = None
    errors: dict[int, str] = field(default_factory=dict)
    prepared: bool = False
    epoch: int = 0
    decode_seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, position: int) -> EncodedImage:
        """The image at ``position``; its data is a view of the flat buffer."""
        return EncodedImage(self.span(position), int(self.indices[position]), self.paths[position])

    def span(self, position: int) -> torch.Tensor:
        """``(bytes,)`` uint8, a view of the image's part of ``data``."""
        start, stop = self.spans[position]
        return self.data[start:stop]

    def pin_memory(self, device: Any = None) -> EncodedImages:
        """A copy in pinned memory; the DataLoader's pin thread calls it."""
        return replace(self, data=self.data.pin_memory())


def flat_buffer(size: int) -> torch.Tensor:
    """``(size,)`` uint8, not initialized; in a worker shared memory, which is sent as it is."""
    if get_worker_info() is None:
        return torch.empty(size, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(size, device="cpu")
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))


def join(
    parts: Sequence[Any], pixels: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, Any, int]:
    """Lay out files and decoded pixels in one buffer.

    Args:
        parts: N buffers of encoded bytes.
        pixels: N decoded images, or None where the encoded bytes are to travel.

    Returns:
        The buffer, the spans ``(N, 2)`` and where the pixels start (16-byte aligned).
    """
    size = np.array(
        [len(p) if d is None else d.numel() for p, d in zip(parts, pixels, strict=True)],
        dtype=np.int64,
    )
    decoded = np.array([d is not None for d in pixels], dtype=bool)
    encoded_bytes = int(size[~decoded].sum())
    boundary = -(-encoded_bytes // 16) * 16
    stop = np.where(decoded, boundary + np.cumsum(size * decoded), np.cumsum(size * ~decoded))
    data = flat_buffer(max(boundary + int(size[decoded].sum()), 1))
    view = data.numpy()
    for part, image, start, end in zip(parts, pixels, stop - size, stop, strict=True):
        if image is None:
            view[start:end] = np.frombuffer(part, dtype=np.uint8)
        else:
            data[start:end].view(image.shape).copy_(image)
    return data, np.stack([stop - size, stop], axis=1), boundary


def pack(images: Sequence[EncodedImage]) -> EncodedImages:
    """Pack images as they are: what the default collate does where no prefetcher has its say."""
    data, spans, boundary = join([image.data for image in images], [None] * len(images))
    none = np.zeros(len(images), dtype=bool)
    return EncodedImages(
        data,
        spans,
        boundary,
        indices=np.array([image.index for image in images], dtype=np.int64),
        paths=[image.path for image in images],
        decoded=none,
        sizes=np.zeros((len(images), 2), dtype=np.int64),
        transposed=none.copy(),
    )


Pack = Callable[[Sequence[EncodedImage]], EncodedImages]
_pack: contextvars.ContextVar[Pack] = contextvars.ContextVar("gpuprefetch_pack", default=pack)


@contextlib.contextmanager
def packing(fn: Pack) -> Iterator[None]:
    """Make the default collate pack with ``fn``: how a prefetcher reaches the workers."""
    token = _pack.set(fn)
    try:
        yield
    finally:
        _pack.reset(token)


def collate_encoded(images: Sequence[EncodedImage], *, collate_fn_map: Any = None) -> EncodedImages:
    """Entry of the default collate for :class:`EncodedImage`."""
    return _pack.get()(images)


# torch's own extension point: the default collate then knows the type in every worker that imports
# us.
default_collate_fn_map[EncodedImage] = collate_encoded


class EncodedImageFolder(Dataset[tuple[EncodedImage, Any]]):
    """torchvision's ``ImageFolder`` with encoded bytes for samples: ``root/class/.../file.jpg``.

    Args:
        root: the folder whose sub-folders are the classes.
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
    """

    def __init__(
        self,
        root: str | Path,
        *,
        target_transform: Callable[[Any], Any] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
    ) -> None:
        from torchvision.datasets import ImageFolder

        folder = ImageFolder(str(root), is_valid_file=is_valid_file, allow_empty=allow_empty)
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
        image = EncodedImage(Path(path).read_bytes(), int(position), path)
        return image, target if self.target_transform is None else self.target_transform(target)

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        return (
            f"EncodedImageFolder({self.root!r}, {len(self)} samples, {len(self.classes)} classes)"
        )
