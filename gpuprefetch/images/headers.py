"""What the headers of a batch's files say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.images.bad import name_of
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.header import ImageHeader, read_header
from gpuprefetch.images.host_memory import no_memory
from gpuprefetch.transforms.reference import Ints

# Stands for a header that could not be read. The picture is large, so that no crop refuses it.
_UNREADABLE = ImageHeader("unknown", 2**15, 2**15, 1, False, ())


class Headers:
    """What the headers of N images say.

    Attributes:
        each: the headers; those of bad images are made up.
        errors: position -> why the image cannot be decoded.
        early: pictures that were decoded before the buffer was laid out, by position: see
            :meth:`.Packer.decode_first`.
        orientation: ``(N,)``, EXIF's; 1 where it is not to be applied.
        sizes: ``(N, 2)``, height and width of each picture once it is turned upright.
    """

    def __init__(self, images: Sequence[EncodedImage], *, apply_exif: bool) -> None:
        self.each = [_UNREADABLE] * len(images)
        self.errors: dict[int, str] = {}
        self.early: dict[int, torch.Tensor] = {}
        for i, image in enumerate(images):
            if image._fault:
                self.errors[i] = image._fault
                continue
            try:
                known = None if apply_exif else image._header
                self.each[i] = known or read_header(image.data, oriented=apply_exif)
            except ValueError as error:
                self.errors[i] = str(error)
            except MemoryError as error:
                raise no_memory(f"the header of {name_of(image.index, image.path)}") from error
        self.orientation = np.array([h.orientation if apply_exif else 1 for h in self.each])
        stored = np.array([(h.height, h.width) for h in self.each], dtype=np.int64)
        self.sizes: Ints = np.where(self.orientation[:, None] >= 5, stored[:, ::-1], stored)

    @property
    def whole(self) -> npt.NDArray[np.bool_]:
        """``(N,)``, which images are not known to be bad."""
        whole = np.ones(len(self.each), dtype=bool)
        whole[list(self.errors)] = False
        return whole

    @property
    def for_gpu(self) -> npt.NDArray[np.bool_]:
        """``(N,)``, which images nvJPEG decodes to the same pictures as libjpeg."""
        return np.array([header.gpu for header in self.each], dtype=bool)


def remark_on_clipped(images: Sequence[EncodedImage], headers: Headers) -> dict[str, str]:
    """A remark on the first picture whose values PIL clips to 0 to 255."""
    for image, header in zip(images, headers.each, strict=True):
        if header.clipped:
            name = name_of(image.index, image.path)
            return {
                "clipped": f"There are more than 8 bits a pixel in {name}, of PIL's mode "
                f'{header.clipped}. As in PIL\'s convert("RGB"), values above 255 become 255 and '
                "fractions are cut off: pictures of 16 bits come out white, and those in [0, 1] "
                "black. Decode such files in the dataset, and return a tensor divided by their "
                "largest value: "
                "torch.from_numpy(np.array(Image.open(path), np.float32) / 65535)"
                ".expand(3, -1, -1)."
            }
    return {}
