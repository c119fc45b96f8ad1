"""A user's own function for one image, called for each image of a batch.

Whatever the function does to an image, the batch must stay one: every result is one tensor on the
device of its image, and all have one shape and dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NoReturn

import torch

from gpuprefetch.core.errors import add_note
from gpuprefetch.policies.known import title
from gpuprefetch.transforms.random import Keys, SeededDraws, derive

_INSTEAD = (
    "It runs on the device here, image by image. Let it give one tensor on the device of its "
    "image, of one shape and dtype for all images, or leave it in the workers: "
    "accelerate(loader, keep_unknown=True)."
)


class Each(torch.nn.Module):
    """Calls ``op`` on each image ``(C, H, W)`` of a batch, and stacks what it gives.

    Args:
        op: the user's own function of one image.
        kind: of tensor that it gets: torchvision's ``Image`` after ``ToImage``.
    """

    def __init__(self, op: Callable[[torch.Tensor], object], kind: type | None = None) -> None:
        super().__init__()
        self.op = op
        self.kind = torch.Tensor if kind is None else kind
        self.__name__ = title(op)

    def forward(self, images: torch.Tensor, keys: Keys | None = None) -> torch.Tensor:
        """Call the op on each of ``(N, C, H, W)``; with ``keys`` each samples from its own.

        Returns:
            ``(N, ...)`` of the shape and dtype that the op gives, on the device of ``images``.

        Raises:
            TypeError: if the op gives anything but a tensor.
            ValueError: if it gives tensors on another device, or of several shapes or dtypes.
        """
        seeds = [None] * len(images) if keys is None else [derive(key, 0) for key in keys]
        made = [self._one(image, seed) for image, seed in zip(images, seeds, strict=True)]
        forms = sorted({_form(image) for image in made})
        if len(forms) > 1:
            raise self._refusal(ValueError, f"{forms[0]} for one image and {forms[1]} for another")
        return torch.stack(made)

    def _one(self, image: torch.Tensor, seed: int | None) -> torch.Tensor:
        with contextlib.nullcontext() if seed is None else SeededDraws(seed):
            try:
                made = self.op(image.as_subclass(self.kind))
            except Exception as error:
                add_note(error, f"{self.__name__} got an image {_form(image)} on {image.device}.")
                add_note(error, _INSTEAD)
                raise
        if not isinstance(made, torch.Tensor):
            self._refuse_result(made)
        if made.device != image.device:
            raise self._refusal(ValueError, f"a tensor on {made.device} of one on {image.device}")
        return made.as_subclass(torch.Tensor)

    def _refuse_result(self, made: object) -> NoReturn:
        what = type(made).__name__
        if isinstance(made, (tuple, list)):
            what += ". Several views of an image are transforms=gpuprefetch.Views([...], [...])"
        raise self._refusal(TypeError, what)

    def _refusal(self, kind: type[Exception], what: str) -> Exception:
        return kind(f"{self.__name__} gave {what}. {_INSTEAD}")


def _form(image: torch.Tensor) -> str:
    return f"{tuple(image.shape)} of {image.dtype}"
