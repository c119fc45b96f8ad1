"""Check a prefetcher's arguments about pictures, and build the stage that they ask for."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from gpuprefetch.connections import tell
from gpuprefetch.core.nested import tensors
from gpuprefetch.core.source import changed
from gpuprefetch.images.bad import BadImage
from gpuprefetch.images.decode import BACKENDS, ImageDecoder
from gpuprefetch.images.folder import EncodedImageFolder
from gpuprefetch.images.packer import Packer
from gpuprefetch.images.plan import parse_bytes
from gpuprefetch.images.replay import note
from gpuprefetch.images.share import Balancer
from gpuprefetch.images.stage import Pipeline
from gpuprefetch.images.tail import moves_pixels
from gpuprefetch.images.view import View
from gpuprefetch.images.worker import HostStage, encoded_leaves
from gpuprefetch.transforms.convert import read_list
from gpuprefetch.transforms.head import Head, Transform, require_fixed_size
from gpuprefetch.transforms.kernel import HAS_TRITON
from gpuprefetch.transforms.per_image import Cast, on_levels
from gpuprefetch.transforms.reference import FLOAT_DTYPES
from gpuprefetch.transforms.values import Values
from gpuprefetch.transforms.views import Views


def build_stage(
    loader: Any,
    device: torch.device,
    *,
    transforms: Sequence[Transform] | None,
    dtype: torch.dtype | None,
    memory_format: torch.memory_format | None,
    decoder: str,
    apply_exif: bool,
    cpu_share: float | str,
    seed: int | None,
    on_error: str | Callable[[BadImage], Any],
    max_bad: int | None,
    memory_budget: str | int | None,
) -> tuple[Pipeline, Balancer]:
    """The stage for batches of ``loader``, and what steers the workers' share of its epochs.

    The arguments are those of :class:`gpuprefetch.DataPrefetcher`.

    Raises:
        TypeError: for a transform that is not callable.
        ValueError: for arguments out of range, and for transforms that cannot work.
    """
    _check_output(dtype, memory_format)
    _check_bad(on_error, max_bad)
    _check_packing(apply_exif, seed)
    lists = transforms.lists if isinstance(transforms, Views) else [transforms]
    views = [_view(each, loader, dtype, memory_format) for each in lists]
    programs = tuple(view.program for view in views)
    backend = _backend(decoder, device)
    share = torch.tensor([_fixed_share(cpu_share)], dtype=torch.float64)
    packer = Packer(
        tuple(view.head for view in views),
        on_gpu=backend is not None,
        apply_exif=apply_exif,
        seed=torch.initial_seed() if seed is None else operator.index(seed),
        epoch=torch.zeros(1, dtype=torch.int64),
        share=share,
        finishes=device.type == "cpu",
        programs=programs if (HAS_TRITON or device.type == "cpu") and any(programs) else (),
        moves=any(moves_pixels([*view.head.ops, *view.tail]) for view in views),
    )
    stage = Pipeline(
        device,
        views,
        packer,
        backend,
        on_error,
        max_bad,
        memory_budget=parse_bytes(memory_budget),
    )
    return stage, Balancer(share, loader, fixed=cpu_share != "auto" or backend is None)


def _view(
    transforms: Sequence[Transform] | None,
    loader: Any,
    dtype: torch.dtype | None,
    memory_format: torch.memory_format | None,
) -> View:
    head, tail = read_list(transforms)
    _check_transforms(loader, head, tail, dtype, memory_format)
    tail, levels = on_levels(head, tail, Cast(dtype, memory_format))
    if levels:
        dtype, memory_format = torch.uint8, None
    head = replace(head, dtype=dtype, memory_format=memory_format)
    return View(head, tail, levels, Values(head.normalize, tail))


def _check_output(dtype: Any, memory_format: Any) -> None:
    if dtype not in (None, torch.uint8, *FLOAT_DTYPES):
        raise ValueError(
            "dtype must be torch.uint8 or a floating-point one of 16 bits or more, as "
            f"torch.bfloat16, got {dtype!r}."
        )
    if memory_format not in (None, torch.contiguous_format, torch.channels_last):
        raise ValueError(
            f"memory_format is torch.contiguous_format or channels_last, got {memory_format!r}."
        )


def _check_bad(on_error: Any, max_bad: Any) -> None:
    if not callable(on_error) and on_error not in ("raise", "skip", "replace"):
        raise ValueError(
            f'on_error must be "raise", "skip", "replace" or a callable, got {on_error!r}.'
        )
    if max_bad is not None and (not isinstance(max_bad, int) or max_bad < 0):
        raise ValueError(f"max_bad is a number of images, or None, got {max_bad!r}.")


def _check_packing(apply_exif: Any, seed: Any) -> None:
    if apply_exif not in (True, False):
        raise ValueError(f"apply_exif must be True or False, got {apply_exif!r}.")
    if seed is not None and not hasattr(seed, "__index__"):
        raise ValueError(f"seed is an int, or None, got {seed!r}.")


def _check_transforms(
    loader: Any,
    head: Head,
    tail: Sequence[Transform],
    dtype: torch.dtype | None,
    memory_format: torch.memory_format | None,
) -> None:
    if dtype == torch.uint8 and (head.mean or head.std):
        raise ValueError(
            "dtype=torch.uint8 is for values of 0 to 255, and Normalize gives others. Leave one of "
            "them out."
        )
    asked = dtype not in (None, torch.uint8) or memory_format is torch.channels_last
    if (head.names or tail or asked) and _is_encoded_folder(getattr(loader, "dataset", None)):
        require_fixed_size(head, tail)


def _is_encoded_folder(dataset: Any) -> bool:
    """Whether a dataset surely hands out encoded images, through Subset and ConcatDataset."""
    if dataset is None or isinstance(dataset, EncodedImageFolder):
        return dataset is not None
    inner = getattr(dataset, "datasets", None) or [getattr(dataset, "dataset", None)]
    return isinstance(inner, Sequence) and all(_is_encoded_folder(d) for d in inner)


def _fixed_share(cpu_share: float | str) -> float:
    if cpu_share == "auto":
        return 0.0
    if isinstance(cpu_share, (int, float)) and 0 <= cpu_share <= 1:
        return float(cpu_share)
    raise ValueError(
        f'cpu_share is a share of the images, 0.0 to 1.0, or "auto", got {cpu_share!r}.'
    )


def _backend(decoder: str, device: torch.device) -> ImageDecoder | None:
    """What decodes on the GPU; None where the workers do."""
    name = decoder
    if decoder == "auto":
        name = "nvjpeg" if device.type == "cuda" else "cpu"
    if name == "cpu":
        return None
    if name not in BACKENDS:
        names = ", ".join(f'"{name}"' for name in ("auto", "cpu", *BACKENDS))
        raise ValueError(f"decoder must be one of {names}, got {decoder!r}.")
    if device.type != "cuda":
        raise ValueError(f'decoder={decoder!r} needs a CUDA device; use "auto" or "cpu" here.')
    backend = BACKENDS[name](device)
    if not (missing := backend.missing()):
        return backend
    if decoder == "auto":
        return None
    raise ValueError(
        f"decoder={decoder!r} can decode nothing on {device}: {missing}. Use "
        '"auto" or "cpu", which decodes in the workers.'
    )


def with_packing(loader: DataLoader[Any], packer: Packer) -> DataLoader[Any]:
    """A copy of a loader whose workers pack encoded images, and whose batches are noted."""
    clone = changed(loader)
    if hasattr(loader, "next_iter_state"):
        loader.next_iter_state = None  # a StatefulDataLoader's: good for one epoch, the clone's
        vars(clone)["_initial_iter_for_state_dict"] = False  # of the iterator that it leaves here
    for shared in (packer.share, packer.late):
        shared.share_memory_()  # not in a deep copy of the prefetcher
    clone.collate_fn = HostStage(loader.collate_fn, packer)
    note(clone)
    return clone


class FirstBatch:
    """Says once, at the first batch, what will make a loader slow."""

    def __init__(self, device: torch.device) -> None:
        self.seen = device.type != "cuda"

    def __call__(self, batch: Any) -> None:
        if self.seen:
            return
        self.seen = True
        parts = [images.pixels for images in encoded_leaves(batch)]
        if parts:
            tell()
        for part in parts or tensors(batch):
            if part.device.type == "cpu" and part.numel() and not part.is_pinned():
                warnings.warn(
                    "The wrapped loader does not pin its memory, so copies to the GPU block and "
                    "overlap less. Pass pin_memory=True to the DataLoader.",
                    stacklevel=2,
                )
                return
