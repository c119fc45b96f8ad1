"""What a pipeline takes from its dataset where all of it runs on the device: a file, or pixels.

A dataset may decode in its own way, or change a picture before the transform gets it. The pixels
that its transform gets are then handed on as they are, and only the transforms move.

A pipeline may do other things to PIL images than to tensors, so all samples must have the form that
the first one has, unless the pipeline begins with what makes one of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.images.guard import UndecodedError
from gpuprefetch.lists.forms import PICTURES, Form, tensors
from gpuprefetch.lists.rgb import Modes, makes_picture, modes_for
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
_ONE_OF_TENSORS = _ONE_CHANNEL.replace("v2.PILToTensor()", "v2.Identity()")
_IN_RGB = 'Read it in RGB: decode_image(path, mode="RGB").'
_CHANNELS_LAST = "Bring it to (C, H, W): image.permute(2, 0, 1)."
_FROM_FLOATS = (
    "Give it uint8 as decode_image() does, without that conversion, and let it begin with the "
    "conversion: v2.Compose([v2.ToDtype(torch.float32, scale=True), transform])."
)
_FROM_OTHERS = (
    "Convert it before: v2.functional.to_dtype(image, torch.uint8, scale=True), or "
    "image.to(torch.uint8) for values of 0 to 255."
)

Pixels = npt.NDArray[np.uint8]


def form_of(given: object) -> Form:
    """The form of what a transform is given."""
    from torchvision import tv_tensors

    if not isinstance(given, torch.Tensor):
        return PICTURES
    return tensors(tv_tensors.Image if isinstance(given, tv_tensors.Image) else torch.Tensor)


@dataclass(frozen=True, slots=True)
class Takes:
    """What a pipeline takes.

    Attributes:
        modes: of pictures.
        opener: torchvision's ``ToPILImage``, if the pipeline begins with it. The workers run it.
        arrays: whether the pipeline begins with what makes a tensor of an array ``(H, W, 3)``.
        begins: the form that all images have; None where it makes no difference.
    """

    modes: Modes
    opener: Transform | None = None
    arrays: bool = False
    begins: Form | None = PICTURES

    @staticmethod
    def of(pipeline: Sequence[Transform], begins: Form | None = PICTURES) -> Takes:
        first, rest = opened(pipeline)
        name = name_of(rest[0]) if first is None and rest else None
        if first is not None or name == "ToImage" or begins == Form():  # which nobody knows
            begins = None
        return Takes(modes_for(rest), first, name in _MAKE_TENSORS, begins)

    def refuse_mode(self, mode: str, name: str) -> None:
        """Refuse a picture of a mode of which the pipeline makes no three channels."""
        if not self.modes.take(mode):
            raise UndecodedError(
                f"{name} is {mode!r} and not RGB, and reaches the transform so. "
                f"{_ONE_CHANNEL if mode == 'L' else _OTHERWISE}"
            )

    def refuse_form(self, form: Form, name: str) -> None:
        """Refuse an image of another form than that of the first sample."""
        if self.begins is None or form == self.begins:
            return
        raise UndecodedError(
            f"the transform gets a {_described(form)}, for {name}, and for the first sample it "
            f"gets a {_described(self.begins)}. It may do other things to the one than to the "
            "other. Give it one of them always, or let it begin with v2.ToImage(), which makes "
            "tensors of both: v2.Compose([v2.ToImage(), transform])."
        )

    @property
    def leaves_tensors_encoded(self) -> bool:
        """Whether the file of a tensor may stand for it: nothing in the workers needs pixels."""
        return self.opener is None or makes_picture(self.opener)

    def pixels_of(self, given: object, name: str) -> Pixels | None:
        """The pixels ``(H, W, 3)`` that the device makes the result of; None for no picture."""
        from PIL import Image

        picture = given if self.opener is None else self.opener(given)
        if isinstance(picture, Image.Image):
            self.refuse_form(PICTURES, name)
            self.refuse_mode(picture.mode, name)
            return np.asarray(picture if picture.mode == "RGB" else picture.convert("RGB"))
        if isinstance(picture, torch.Tensor):
            self.refuse_form(form_of(picture), name)
            return self._pixels_of_tensor(picture, name)
        if not (self.arrays and isinstance(picture, np.ndarray) and picture.dtype == np.uint8):
            return None
        self.refuse_form(PICTURES, name)
        return picture if picture.ndim == 3 and picture.shape[2] == 3 else None

    def _pixels_of_tensor(self, given: torch.Tensor, name: str) -> Pixels | None:
        image = given.as_subclass(torch.Tensor)
        if image.dim() != 3 or image.device.type != "cpu":
            return None
        what = f"{name} reaches the transform as {image.dtype} {tuple(image.shape)}"
        if image.dtype != torch.uint8:
            floats = image.is_floating_point()
            raise UndecodedError(
                f"{what}, and images are uint8. {_FROM_FLOATS if floats else _FROM_OTHERS}"
            )
        if len(image) == 1 and self.modes.take("L"):
            image = image.expand(3, -1, -1)
        if len(image) != 3:
            advice = f"{_IN_RGB} {_ONE_OF_TENSORS}" if len(image) == 1 else _IN_RGB
            if image.shape[-1] == 3:
                advice = _CHANNELS_LAST
            raise UndecodedError(f"{what}, and images have three channels. {advice}")
        return image.permute(1, 2, 0).numpy()


def _described(form: Form) -> str:
    if form.kind is None:
        return "PIL image or an array"
    return f"{form.kind.__module__.partition('.')[0]}.{form.kind.__name__}"


def opened(pipeline: Sequence[Transform]) -> tuple[Transform | None, Sequence[Transform]]:
    """The ``ToPILImage`` that a pipeline begins with, and the ops after it."""
    if pipeline and name_of(pipeline[0]) == "ToPILImage":
        return pipeline[0], pipeline[1:]
    return None, pipeline
