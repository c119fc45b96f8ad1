"""Kept rows: what is taken out of a batch where images are left out, replaced or replayed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from gpuprefetch.core.nested import moves_itself, objects
from gpuprefetch.images.job import ImageJob
from gpuprefetch.images.targets import PerSample, is_per_sample


def take_rows(leaf: Any, rows: torch.Tensor, count: int) -> Any:
    """Select rows of whatever has one entry per sample."""
    kind: Any = type(leaf)
    if isinstance(leaf, torch.Tensor):
        if not leaf.dim():
            return leaf
        if leaf.size(0) != count:  # of a transform: refuse_other_rows() has seen the others
            raise ValueError(
                f"replay takes a row out of the batch, and a transform made {leaf.size(0)} rows of "
                f"{count} images. Call it in the loop."
            )
        if leaf.layout is torch.sparse_coo:
            return leaf.index_select(0, rows.to(leaf.device))
        if leaf.layout is torch.strided and not leaf.is_nested:
            kept = leaf[rows.to(leaf.device)]  # indexing keeps the memory format, and no tv_tensor
            tv = sys.modules.get("torchvision.tv_tensors")
            return kept if tv is None else tv.wrap(kept, like=leaf)
        kind = f"a {'nested' if leaf.is_nested else leaf.layout} tensor"
    elif isinstance(leaf, np.ndarray):
        return leaf[rows.numpy()] if leaf.ndim and len(leaf) == count else leaf
    elif not moves_itself(leaf):
        text = isinstance(leaf, (str, bytes, bytearray))
        if text or not isinstance(leaf, Sequence) or len(leaf) != count:
            return leaf
        if isinstance(leaf, (list, tuple)):
            taken = [leaf[i] for i in rows.tolist()]
            return leaf.of(taken) if isinstance(leaf, PerSample) else type(leaf)(taken)
    raise ValueError(
        f"on_error and replay take rows out of dense and COO tensors, arrays and lists, and {kind} "
        "is none. Let the collate function give what it holds, in a list or a dict."
    )


def refuse_other_rows(batch: Any, samples: Sequence[int]) -> None:
    """Refuse a batch with other rows than one of each image, which cannot be told apart."""
    known = [sample for sample in samples if sample >= 0]
    rows, count = len(samples), len(set(known))

    def is_rest(node: Any) -> bool:
        return is_column(node, count=count) and not all(_has_rows(e, rows) for e in node)

    if count < len(known) and any(_has_rows(leaf, count) for leaf in objects(batch, is_rest)):
        raise ValueError(
            "on_error and replay take rows out of the batch, and the collate function has made "
            f"{rows} images of {count} samples beside {count} rows of the rest. Let it "
            "repeat these too, or give each view of the samples as a tensor of its own."
        )
    for leaf in objects(batch, partial(is_column, count=rows)):
        if not isinstance(leaf, (torch.Tensor, np.ndarray)) or not leaf.ndim:
            continue
        if (found := leaf.size(0) if isinstance(leaf, torch.Tensor) else len(leaf)) != rows:
            raise ValueError(
                "on_error and replay take rows out of the batch, and the collate function has made "
                f"{found} rows of something for {rows} images. Let it give a list with an entry "
                "per sample, joined in the loop, and leave out what is the same for all."
            )


def is_column(batch: Any, *, count: int) -> bool:
    """Whether a list has an entry per sample, as names and captions, and no columns for entries."""
    if is_per_sample(batch):
        return True
    if type(batch) not in (list, tuple) or len(batch) != count:
        return False
    if any(isinstance(leaf, ImageJob) for leaf in objects(batch)):
        return False
    there = [entry for entry in batch if entry is not None]  # a sample may have no mask
    tensors = [isinstance(entry, (torch.Tensor, np.ndarray)) for entry in there]
    alike = all(tensors) or not any(tensors)
    return alike and not all(_has_rows(entry, count) for entry in batch)


def _has_rows(entry: Any, count: int) -> bool:
    """Whether whatever is in ``entry`` has ``count`` rows, as after the default collate."""
    if isinstance(entry, (torch.Tensor, np.ndarray)):
        return entry.ndim > 0 and len(entry) == count
    if isinstance(entry, Mapping):
        entry = list(entry.values())
    elif not isinstance(entry, (list, tuple)):
        return False
    elif len(entry) == count:
        return True
    return len(entry) > 0 and all(_has_rows(part, count) for part in entry)
