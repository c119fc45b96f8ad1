"""Encoded bytes to decoded images on the GPU: the backends, and what happens when a file is bad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch._encoded import EncodedImages
from gpuprefetch._format import decode_cpu

# Note [Decoded memory]
# A decoded image lives in a block of the caching allocator's pool of the stream it was decoded on.
# The allocator gives a freed block to the next decode on that stream at once, in stream order. A
# decoder that writes from a stream of its own breaks that order: it overwrites memory that a queued
# kernel still reads.
#   - torchvision's CUDA decoder does so (pytorch/vision#9606): its stream is drained before each
#     decode.
#   - TorchCodec >= 0.17 decodes in the order of the current stream (0.16 did not,
#     meta-pytorch/torchcodec#1634).
# Whatever they promise, a decode thread keeps decoded images until the launch that reads them has
# completed, and decodes nothing meanwhile (ImageJob._wait_for_reader); the other thread does.
# gpuprefetch.selfcheck() tries it on the machine at hand; tests/test_selfcheck.py fails without it.


class ImageDecoder(Protocol):
    """Decodes a batch of baseline JPEGs on the current stream of a CUDA device."""

    def __call__(self, data: list[torch.Tensor]) -> list[torch.Tensor]:
        """Decode.

        Args:
            data: N 1-D uint8 tensors on the CPU.

        Returns:
            N ``(3, H, W)`` uint8 tensors on the device, EXIF orientation not applied.

        Raises:
            RuntimeError: if any of the files cannot be decoded.
        """


class TorchCodecDecoder:
    """TorchCodec's batched nvJPEG decode; EXIF orientations were hidden from it beforehand."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, data: list[torch.Tensor]) -> list[torch.Tensor]:
        from torchcodec.decoders import decode_jpeg

        try:
            return list(decode_jpeg(data, mode="RGB", device=self._device))
        except RuntimeError as error:
            # Its library passes on the allocator's error without its type.
            if "out of memory" in str(error):
                raise torch.OutOfMemoryError(str(error)) from None
            raise


class TorchvisionDecoder:
    """torchvision's batched nvJPEG decode on a drained stream. See Note [Decoded memory]."""

    def __init__(self, device: torch.device) -> None:
        # One spelling of the device for ever: torchvision leaks its decoder when it changes.
        self._device = device

    def __call__(self, data: list[torch.Tensor]) -> list[torch.Tensor]:
        torch.cuda.current_stream(self._device).synchronize()
        return self.decode_undrained(data)

    def decode_undrained(self, data: list[torch.Tensor]) -> list[torch.Tensor]:
        """Decode in the unsafe order; the negative control of ``gpuprefetch.selfcheck``."""
        from torchvision.io import ImageReadMode, decode_jpeg

        return list(decode_jpeg(data, mode=ImageReadMode.RGB, device=self._device))


BACKENDS: dict[str, Callable[[torch.device], ImageDecoder]] = {
    "torchcodec": TorchCodecDecoder,
    "torchvision": TorchvisionDecoder,
}


def decode_part(
    decoder: ImageDecoder,
    images: EncodedImages,
    positions: npt.NDArray[np.int64],
    device: torch.device,
) -> list[torch.Tensor | None]:
    """Decode some images of a batch; what one bad file would fail is decoded one by one.

    Args:
        decoder: the backend.
        images: the batch; a file that cannot be decoded gets an entry in its ``errors``.
        positions: ascending, of all images between the first and the last of them that no worker
            has decoded.
        device: of the decoder.

    Returns:
        ``(3, H, W)`` uint8 images on ``device``, None for those that cannot be decoded.
    """
    spans = images.spans[positions]
    # One call cuts the buffer up: what is left out between two positions takes no bytes in it.
    files = images.data[spans[0, 0] : spans[-1, 1]].split((spans[:, 1] - spans[:, 0]).tolist())
    shapes = _shapes(images, positions)
    try:
        decoded = decoder(list(files))
        if [image.shape for image in decoded] == shapes:
            return decoded  # type: ignore[return-value]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        pass
    return [
        _decode_one(decoder, images, i, shape, device)
        for i, shape in zip(positions.tolist(), shapes, strict=True)
    ]


def _shapes(images: EncodedImages, positions: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """What the headers say. The sampling was drawn for it: another size would be read wrongly."""
    sizes = images.sizes[positions]
    stored = np.where(images.transposed[positions, None], sizes[:, ::-1], sizes)
    return [(3, height, width) for height, width in stored.tolist()]


def _decode_one(
    decoder: ImageDecoder,
    images: EncodedImages,
    position: int,
    shape: tuple[int, int, int],
    device: torch.device,
) -> torch.Tensor | None:
    file = images.span(position)
    try:
        (image,) = decoder([file])
        if image.shape == shape:
            return image
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        pass
    try:
        # The second opinion: a file that only the GPU's decoder dislikes is not a bad file.
        image = decode_cpu(file).contiguous().to(device)
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError) as error:
        images.errors[position] = str(error)
        return None
    if image.shape != shape:
        images.errors[position] = f"decoded to {tuple(image.shape)}, its header says {shape}"
        return None
    return image
