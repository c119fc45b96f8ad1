"""convert_transforms: a torchvision pipeline, v1 or v2, as a list that does the same.

A prefetcher takes the pipeline itself as well. The list is for who wants to print it, to save it or
to add to it: its crops, resizes, flips and Normalize are modules of this library and of kornia.
"""

from __future__ import annotations

from typing import Any

from gpuprefetch.lists.walk import IN_DATASET, convert
from gpuprefetch.transforms.head import Transform


def convert_transforms(pipeline: Any) -> list[Transform]:
    """Convert a torchvision pipeline to a list for ``DataPrefetcher(transforms=...)``.

    Args:
        pipeline: a v1 or v2 transform, a ``Compose`` or a list of them, for PIL images or uint8
            tensors.

    Returns:
        A list that gives what the pipeline gives, for decoded images of different sizes. They are
        floating point where it ends in that, else uint8. Random ops sample for each image.

    Raises:
        UnsupportedTransformError: for an op that cannot move; the message names it.
    """
    return convert(pipeline, instead=IN_DATASET).transforms
