"""What a pipeline takes from its dataset where all of it runs on the device: a file, or pixels.

A dataset may decode in its own way, or change a picture before the transform gets it. The pixels
that its transform gets are then handed on as they are, and only the transforms move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpuprefetch.images.guard import UndecodedError
from gpuprefetch.lists.rgb import Modes, modes_for
from gpuprefetch.policies.known import name_of
from gpuprefetch.policies.per_image import Transform

_MAKE_TENSORS = ("ToTensor", "ToImage")  # of arrays (H, W, 3) too
BY_HAND = "DataPrefetcher(loader, transforms=convert_transforms(transform))."
_OTHERWISE = (
    'Write picture.convert("RGB") before the transform, or let it begin with v2.RGB(): '
    "v2.Compose([v2.RGB(), transform])."
)
_ONE_CHANNEL = (
    "It would become an image of one channel, and decoded images have three. For three equal "
    "ones let the transform begin with v2.RGB(): v2.Compose([v2.RGB(), transform]). For one "
    f"let the dataset give tensors, transform=v2.PILToTensor(), and write {BY_HAND}"
)

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Takes:
    """What a pipeline takes.

    Attributes:
        modes: of pictures.
        opener: torchvision's ``ToPILImage``, if the pipeline begins with it. The workers run it.
        arrays: whether the pipeline begins with what makes a tensor of an array ``(H, W, 3)``.
    """

    modes: Modes
    opener: Transform | None = None
    arrays: bool = False

    @staticmethod
    def of(pipeline: Sequence[Transform]) -> Takes:
        first, rest = opened(pipeline)
        arrays = first is None and bool(rest) and name_of(rest[0]) in _MAKE_TENSORS
        return Takes(modes_for(rest), first, arrays)

    def refuse_mode(self, mode: str, name: str) -> None:
        """Refuse a picture of a mode of which the pipeline makes no three channels."""
        if not self.modes.take(mode):
            raise UndecodedError(
                f"{name} is {mode!r} and not RGB, and reaches the transform so. "
                f"{_ONE_CHANNEL if mode == 'L' else _OTHERWISE}"
            )

    def pixels_of(self, given: object, name: str) -> Pixels | None:
        """The pixels ``(H, W, 3)`` that the device makes the result of; None for no picture."""
        from PIL import Image

        picture = given if self.opener is None else self.opener(given)
        if isinstance(picture, Image.Image):
            self.refuse_mode(picture.mode, name)
            return np.asarray(picture if picture.mode == "RGB" else picture.convert("RGB"))
        if not (self.arrays and isinstance(picture, np.ndarray) and picture.dtype == np.uint8):
            return None
        return picture if picture.ndim == 3 and picture.shape[2] == 3 else None


def opened(pipeline: Sequence[Transform]) -> tuple[Transform | None, Sequence[Transform]]:
    """The ``ToPILImage`` that a pipeline begins with, and the ops after it."""
    if pipeline and name_of(pipeline[0]) == "ToPILImage":
        return pipeline[0], pipeline[1:]
    return None, pipeline
