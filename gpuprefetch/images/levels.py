"""From the values that the loop gets back to a picture: normalization is undone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import ConcatDataset, Subset

from gpuprefetch.images.view import View
from gpuprefetch.policies.known import Constants, constants, flatten
from gpuprefetch.policies.per_image import PerImage

if TYPE_CHECKING:
    from PIL.Image import Image

# How far values may lie outside of [0, 1] before they are no levels of a picture: a bicubic filter
# and a color op overshoot.
SLACK = 0.5


def normalizations(view: View) -> list[Constants]:
    """Mean and std of each Normalize that a view applies, in their order."""
    found = []
    if view.head.mean is not None and view.head.std is not None:
        found.append((view.head.mean, view.head.std))
    for op in view.tail:
        own = op.recipe.normalize if isinstance(op, PerImage) else constants(op)
        if own is not None:
            found.append(own)
    return found


def normalizations_of_dataset(dataset: Any) -> list[Constants]:
    """The same of what a dataset's own ``transform`` applies to its images."""
    while isinstance(dataset, (Subset, ConcatDataset)):
        dataset = dataset.dataset if isinstance(dataset, Subset) else dataset.datasets[0]
    ops = flatten(getattr(dataset, "transform", None))
    return [own for op in ops if op is not None and (own := constants(op)) is not None]


def picture_of(image: torch.Tensor, undo: Sequence[Constants]) -> tuple[Image, str]:
    """An image ``(C, H, W)``, C of 1 or 3, as a picture, and a remark where its levels are guessed.

    ``undo`` are the normalizations, in the order in which they were applied.
    """
    from PIL import Image

    remark = ""
    values = image.detach().cpu()
    if values.dtype != torch.uint8:
        values = values.double()
        for mean, std in reversed(undo):
            values = values * torch.tensor(std, dtype=torch.float64).view(-1, 1, 1)
            values = values + torch.tensor(mean, dtype=torch.float64).view(-1, 1, 1)
        values, remark = _in_unit(values)
        values = (255 * values).round_().clamp_(0, 255).to(torch.uint8)
    values = values.expand(3, -1, -1).permute(1, 2, 0).contiguous()
    return Image.fromarray(values.numpy()), remark


def _in_unit(values: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Values in about 0 to 1, and a remark if it is a guess how they came to be others."""
    values = values.nan_to_num(0.0)
    low = values.min().item()
    high = values.max().item()
    if low >= -SLACK and high <= 1 + SLACK:
        return values, ""
    if low >= 0 and high <= 255:
        return values / 255, ""
    return (values - low) / (high - low), f"values {low:.1f} to {high:.1f}, stretched"
