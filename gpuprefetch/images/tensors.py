"""Run transforms on images that come as tensors (N, C, H, W), and not as encoded files."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpuprefetch.core.nested import Batch, Leaf, map_leaves, objects, share_memory
from gpuprefetch.core.stats import Stats, Timed
from gpuprefetch.images.finish import one_or_all
from gpuprefetch.images.view import View
from gpuprefetch.transforms.random import view_seed


def transform_tensors(
    batch: Batch,
    given: Batch,
    views: Sequence[View],
    seed: int,
    stats: Stats,
    *,
    moves: bool,
) -> Batch:
    """Transform the first tensor of four dimensions.

    Args:
        batch: on the device.
        given: the batch as the loader gave it; it stays as it is.
        views: what becomes of the images.
        seed: of what is sampled for the batch.
        stats: which count the time.
        moves: whether a transform moves pixels. A second tensor of images would not move along.

    Returns:
        The batch with the result in place of that tensor; a tuple of results for several views.

    Raises:
        ValueError: if there is no such tensor, it does not look like images, or there is a second
            one that would not move along.
    """
    first: torch.Size | None = None

    def transform(leaf: Leaf) -> Batch:
        nonlocal first
        if not isinstance(leaf, torch.Tensor) or leaf.dim() != 4:
            return leaf
        if first is None:
            first = leaf.shape
            _refuse_channels_last(leaf)
            return _run(leaf, given, views, seed, stats)
        if moves and leaf.shape[2:] == first[2:]:
            raise ValueError(
                f"transforms move the pixels of {tuple(first)}, the first tensor of a batch, and "
                f"would leave {tuple(leaf.shape)} beside it as it is. Join the two along N or C, "
                "or give the other one another number of dimensions."
            )
        return leaf

    result: Batch = map_leaves(transform, batch)
    if first is None:
        raise ValueError(
            "transforms, dtype and memory_format are for images, but the loader gave neither an "
            "EncodedImage nor an (N, C, H, W) tensor. Return one of them, or leave these arguments "
            "out."
        )
    return result


def _refuse_channels_last(images: torch.Tensor) -> None:
    channels = (1, 3, 4) if images.dtype == torch.uint8 else (3,)
    if images.shape[-1] in channels and min(images.shape[1:3]) > 4:
        raise ValueError(
            f"transforms are for images (N, C, H, W); {tuple(images.shape)} look like (N, H, W, "
            "C), as NumPy and albumentations have them. Let the dataset return "
            "torch.from_numpy(image).permute(2, 0, 1), or ToTensorV2 do so."
        )


def _run(
    images: torch.Tensor, given: Batch, views: Sequence[View], seed: int, stats: Stats
) -> Batch:
    """Run all views on images ``(N, C, H, W)`` of what the loader has ``given``."""
    views = [view.of_tensors() for view in views]
    fused: list[torch.Tensor] = []
    with Timed(stats, "resample"):
        for number, view in enumerate(views):
            view.values.begin(images)
            made = view.run_head(images, view_seed(seed, number))
            writes = bool(view.tail or fused)  # this view, or one before it
            fused.append(_own(made, [given, *fused]) if writes else made)
    outs: list[object] = []
    with Timed(stats, "tail"):
        for number, (view, made) in enumerate(zip(views, fused, strict=True)):
            outs += view.run_tail([made], view_seed(seed, number))
    return one_or_all(outs)


def _own(images: torch.Tensor, given: Batch) -> torch.Tensor:
    """Images that a transform may write to: a copy if they share memory with what is given."""
    theirs = [leaf for leaf in objects(given) if isinstance(leaf, torch.Tensor)]
    return images.clone() if any(share_memory(images, leaf) for leaf in theirs) else images
