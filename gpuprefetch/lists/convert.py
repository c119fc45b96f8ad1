"""convert_transforms: a pipeline of torchvision's or an image processor, as a list.

A prefetcher takes the pipeline itself as well. The list is for who wants to print it, to save it or
to add to it: its crops, resizes, flips and Normalize are modules of this library and of kornia.
"""

from __future__ import annotations

from typing import Any

from gpuprefetch.lists.processor import image_processor, list_of_processor
from gpuprefetch.lists.walk import IN_DATASET, convert
from gpuprefetch.transforms.head import Transform


def convert_transforms(pipeline: Any) -> list[Transform]:
    """Convert a pipeline to a list for ``DataPrefetcher(transforms=...)``.

    Args:
        pipeline: a v1 or v2 transform of torchvision's, a ``Compose`` or a list of them, for PIL
            images or uint8 tensors; or an ``AutoImageProcessor`` of Hugging Face's, whose pixels
            are compared with the list's on drawn pictures.

    Returns:
        A list that gives what the pipeline gives, for decoded images of different sizes. They are
        floating point where it ends in that, else uint8. Random ops sample for each image. For a
        processor that makes patches, as Qwen2-VL's, it ends with :class:`Patches` or
        :class:`PatchPadding`.

    Raises:
        UnsupportedTransformError: for an op that cannot move, and for a processor with a setting
            that is not known, or that does more than its settings say; the message names it.
    """
    processor = image_processor(pipeline)
    if processor is not None:
        return list_of_processor(processor)
    return convert(pipeline, instead=IN_DATASET).transforms
