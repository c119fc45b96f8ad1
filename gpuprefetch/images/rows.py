"""Kept rows: the samples of a batch that are left after on_error or replay took others out.

Example:
    A batch of four images has a bad file at position 1. With ``on_error="skip"`` its kept rows are
    ``[0, 2, 3]``, with ``on_error="replace"`` ``[0, 2, 2, 3]``. :func:`take_rows` takes them out of
    everything in the batch that has one entry per sample: the images, a tensor of labels, a list
    of captions.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from gpuprefetch.core.nested import copied, moves_itself, objects
from gpuprefetch.images.places import ViewPlace
from gpuprefetch.images.walk import PerSample, is_per_sample


class PendingImages:
    """Stands for images in a batch while they are decoded: :class:`.job.ImageJob`."""


def take_rows(leaf: Any, rows: torch.Tensor, count: int) -> Any:
    """Take ``rows`` out of whatever has one entry for each of ``count`` samples.

    No two rows of the result share memory, also where a row comes twice. A leaf that says nothing
    of single samples, such as a scalar or a string, stays as it is.
    """
    if isinstance(leaf, torch.Tensor):
        return _rows_of_tensor(leaf, rows, count)
    if isinstance(leaf, np.ndarray):
        return leaf[rows.numpy()] if leaf.ndim and len(leaf) == count else leaf
    if moves_itself(leaf):
        raise _no_rows(str(type(leaf)))
    is_text = isinstance(leaf, (str, bytes, bytearray))
    if is_text or not isinstance(leaf, Sequence) or len(leaf) != count:
        return leaf
    if not isinstance(leaf, (list, tuple)):
        raise _no_rows(str(type(leaf)))
    entries = _apart([leaf[row] for row in rows.tolist()])
    return leaf.with_entries(entries) if isinstance(leaf, PerSample) else type(leaf)(entries)


def _apart(entries: Sequence[object]) -> list[object]:
    """Entries of which no two share memory: a loop may change one in place, and not the other."""
    met = set[int]()
    apart = []
    for entry in entries:
        apart.append(copied(entry) if id(entry) in met else entry)
        met.add(id(entry))
    return apart


def _rows_of_tensor(tensor: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    if not tensor.dim():
        return tensor
    if tensor.size(0) != count:  # a transform made it: refuse_other_rows() checks the rest
        raise ValueError(
            f"A transform made {tensor.size(0)} rows of {count} images, and replay needs the row "
            "of one image. Call the transform in the loop."
        )
    if tensor.layout is torch.sparse_coo:
        return tensor.index_select(0, rows.to(tensor.device))
    if tensor.is_nested:
        raise _no_rows("a nested tensor")
    if tensor.layout is not torch.strided:
        raise _no_rows(f"a {tensor.layout} tensor")
    kept = tensor[rows.to(tensor.device)]  # indexing keeps the memory format, but no tv_tensor
    tv = sys.modules.get("torchvision.tv_tensors")
    if tv is None:
        return kept
    wrapped: torch.Tensor = tv.wrap(kept, like=tensor)
    return wrapped


def _no_rows(what: str) -> ValueError:
    return ValueError(
        f"on_error and replay cannot take rows out of {what}. Let the collate function return its "
        "values as a dense tensor, an array, a list or a dict."
    )


def refuse_other_rows(batch: object, samples: Sequence[int]) -> None:
    """Refuse a batch that has other rows than one for each image.

    Args:
        batch: with jobs in place of its images.
        samples: the sample of each image; -1 for an image that the collate function made anew.
    """
    known = [sample for sample in samples if sample >= 0]
    different = len(set(known))
    if different < len(known):  # several images of one sample, as views that the dataset made
        _refuse_rows_of_samples(batch, len(samples), different)
    for leaf in objects(batch, partial(is_column, count=len(samples))):
        if not isinstance(leaf, (torch.Tensor, np.ndarray)) or not leaf.ndim:
            continue
        found = leaf.size(0) if isinstance(leaf, torch.Tensor) else len(leaf)
        if found != len(samples):
            raise ValueError(
                f"The collate function made {found} rows of something beside {len(samples)} "
                "images, and on_error and replay take the same rows out of both. Let it return a "
                "list with one entry per sample, and leave out what is the same for all."
            )


def _refuse_rows_of_samples(batch: object, images: int, samples: int) -> None:
    """Refuse a batch that has a row for each image here, and a row for each sample there."""

    def is_rest(node: Any) -> bool:
        return is_column(node, count=samples) and not all(_has_rows(e, images) for e in node)

    if any(_has_rows(leaf, samples) for leaf in objects(batch, is_rest)):
        raise ValueError(
            f"The collate function made {images} images of {samples} samples beside {samples} "
            "rows of the rest, and on_error and replay take the same rows out of both. Let it "
            "repeat the rest for each image, or return each view of the samples as its own tensor."
        )


def is_column(node: Any, *, count: int) -> bool:
    """Whether a list has one entry for each of ``count`` samples, such as names and captions.

    Example:
        For three samples ``["cat", "dog", "cat"]`` is a column. ``[xs, ys, zs]``, three tensors
        of three rows, is not: each of them has one row per sample itself.
    """
    if is_per_sample(node):
        return True
    if type(node) not in (list, tuple) or len(node) != count:
        return False
    if any(isinstance(leaf, (PendingImages, ViewPlace)) for leaf in objects(node)):
        return False
    there = [entry for entry in node if entry is not None]  # a sample may have no mask
    tensors = [isinstance(entry, (torch.Tensor, np.ndarray)) for entry in there]
    alike = all(tensors) or not any(tensors)
    return alike and not all(_has_rows(entry, count) for entry in node)


def _has_rows(entry: object, count: int) -> bool:
    """Whether whatever is in ``entry`` has ``count`` rows, as after the default collate."""
    if isinstance(entry, (torch.Tensor, np.ndarray)):
        return entry.ndim > 0 and len(entry) == count
    if isinstance(entry, Mapping):
        parts: Sequence[object] = list(entry.values())
    elif isinstance(entry, (list, tuple)):
        if len(entry) == count:
            return True
        parts = entry
    else:
        return False
    return len(parts) > 0 and all(_has_rows(part, count) for part in parts)
