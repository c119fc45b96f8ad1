"""Encoded bytes to decoded images on the GPU: the backends, and what happens when a file is bad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
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
# Whatever the backend promises, a lane drops its decoded images only after the event behind their
# last reader has completed (Lane.keep). gpuprefetch.selfcheck() tries it on the machine at hand;
# tests/test_selfcheck.py fails when drain and keep are left out.


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

        return list(decode_jpeg(data, mode="RGB", device=self._device))


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
    decoder: ImageDecoder, images: EncodedImages, positions: Sequence[int], device: torch.device
) -> tuple[list[int], list[torch.Tensor]]:
    """Decode some images of a batch; what one bad file would fail is decoded one by one.

    Args:
        decoder: the backend.
        images: the batch; a file that cannot be decoded gets an entry in its ``errors``.
        positions: of the images in the batch that are to be decoded.
        device: of the decoder.

    Returns:
        The positions that were decoded, and their ``(3, H, W)`` uint8 images on ``device``.
    """
    spans = images.spans[positions].tolist()
    try:
        whole = decoder([images.data[start:stop] for start, stop in spans])
        decoded: list[torch.Tensor | None] = list(_checked(whole, images, positions))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        decoded = [_decode_one(decoder, images, i, device) for i in positions]
    good = [(i, image) for i, image in zip(positions, decoded, strict=True) if image is not None]
    return [i for i, _ in good], [image for _, image in good]


def _checked(
    decoded: list[torch.Tensor], images: EncodedImages, positions: Sequence[int]
) -> list[torch.Tensor]:
    # The sampling was drawn for the header's size: another one would be read out of bounds.
    transposed = images.transposed[positions, None]
    sizes = np.where(transposed, images.sizes[positions, ::-1], images.sizes[positions])
    for image, (height, width) in zip(decoded, sizes.tolist(), strict=True):
        if image.shape != (3, height, width):
            raise RuntimeError(
                f"decoded to {tuple(image.shape)}, not the header's {height} x {width}"
            )
    return decoded


def _decode_one(
    decoder: ImageDecoder, images: EncodedImages, position: int, device: torch.device
) -> torch.Tensor | None:
    try:
        return _checked(decoder([images.span(position)]), images, [position])[0]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        pass
    try:
        # The second opinion: a file that only the GPU's decoder dislikes is not a bad file.
        image = decode_cpu(images.span(position)).contiguous().to(device)
        return _checked([image], images, [position])[0]
    except (ValueError, RuntimeError) as error:
        images.errors[position] = str(error)
        return None
