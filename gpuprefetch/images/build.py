"""Check a prefetcher's arguments about pictures, and build the stage that they ask for."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader

from gpuprefetch.connections import shortage
from gpuprefetch.core.nested import tensors
from gpuprefetch.core.source import changed, sampler_of
from gpuprefetch.core.stats import Stats
from gpuprefetch.core.workers import WorkerStart
from gpuprefetch.images.collate import HostStage, encoded_leaves
from gpuprefetch.images.decode import DECODERS, ImageDecoder
from gpuprefetch.images.decoding import Decoding
from gpuprefetch.images.folder import EncodedImageFolder
from gpuprefetch.images.packer import Packer
from gpuprefetch.images.plan import parse_bytes
from gpuprefetch.images.replay import NotedSampler, has_keys
from gpuprefetch.images.samples import Origin
from gpuprefetch.images.share import Balancer
from gpuprefetch.images.stage import Pipeline
from gpuprefetch.images.tail import moves_pixels
from gpuprefetch.images.tolerance import Tolerance
from gpuprefetch.images.view import View
from gpuprefetch.lists.convert import read_list
from gpuprefetch.lists.values import Values
from gpuprefetch.policies.per_image import Cast, on_levels
from gpuprefetch.transforms.head import require_fixed_size
from gpuprefetch.transforms.kernel import HAS_TRITON
from gpuprefetch.transforms.reference import FLOAT_DTYPES
from gpuprefetch.transforms.views import Views


def build_stage(
    loader: Any, device: torch.device, options: dict[str, Any]
) -> tuple[Pipeline, Balancer]:
    """The stage that a DataPrefetcher's arguments ask for, and what steers its workers' share."""
    _check(options)
    transforms, seed, cpu_share = (options[name] for name in ("transforms", "seed", "cpu_share"))
    lists = transforms.lists if isinstance(transforms, Views) else [transforms]
    views = [_view(each, loader, options["dtype"], options["memory_format"]) for each in lists]
    programs = tuple(view.program for view in views)
    backend = _decoder(options["decoder"], device)
    share = torch.full(  # on the CPU, whatever the default device is
        (1,), 0.0 if cpu_share == "auto" else cpu_share, dtype=torch.float64, device="cpu"
    )
    packer = Packer(
        tuple(view.head for view in views),
        on_gpu=backend is not None,
        apply_exif=options["apply_exif"],
        origin=Origin(torch.initial_seed() if seed is None else operator.index(seed)),
        share=share,
        finishes=device.type == "cpu" and backend is None,
        programs=programs if (HAS_TRITON or device.type == "cpu") and any(programs) else (),
        moves=any(moves_pixels([*view.head.ops, *view.tail]) for view in views),
        draws=any(view.samples for view in views),
    )
    stats = Stats()
    stage = Pipeline(
        views,
        packer,
        Decoding(device, backend, parse_bytes(options["memory_budget"]), stats),
        Tolerance(options["on_error"], options["max_bad"], stats),
        stats,
    )
    return stage, Balancer(share, loader, fixed=cpu_share != "auto" or backend is None)


def _view(transforms: Any, loader: Any, dtype: Any, memory_format: Any) -> View:
    head, tail = read_list(transforms)
    if dtype == torch.uint8 and (head.mean or head.std):
        raise ValueError(
            "dtype=torch.uint8 is for values of 0 to 255, and Normalize gives others. Leave one of "
            "them out."
        )
    asked = dtype not in (None, torch.uint8) or memory_format is torch.channels_last
    if (head.names or tail or asked) and _is_encoded_folder(getattr(loader, "dataset", None)):
        require_fixed_size(head, tail)
    tail, levels = on_levels(head, tail, Cast(dtype, memory_format))
    if levels:
        dtype, memory_format = torch.uint8, None
    head = replace(head, dtype=dtype, memory_format=memory_format)
    return View(head, tail, levels, Values(head, tail))


def _check(options: dict[str, Any]) -> None:
    """Refuse what is out of range."""

    def refuse(name: str, accepted: str) -> NoReturn:
        raise ValueError(f"{name} {accepted}, got {options[name]!r}.")

    on_error, max_bad, share = (options[name] for name in ("on_error", "max_bad", "cpu_share"))
    depth = options["device_prefetch_size"]
    if depth is not None and (not isinstance(depth, int) or depth < 1):
        refuse("device_prefetch_size", "is in batches, 1 or more, or None")
    if options["dtype"] not in (None, torch.uint8, *FLOAT_DTYPES):
        refuse("dtype", "must be torch.uint8 or a floating-point one of 16 bits or more")
    if options["memory_format"] not in (None, torch.contiguous_format, torch.channels_last):
        refuse("memory_format", "is torch.contiguous_format or torch.channels_last")
    if not callable(on_error) and on_error not in ("raise", "skip", "replace"):
        refuse("on_error", 'must be "raise", "skip", "replace" or a callable')
    if max_bad is not None and (not isinstance(max_bad, int) or max_bad < 0):
        refuse("max_bad", "is a number of images, or None")
    if max_bad and on_error == "raise":
        refuse(
            "max_bad", 'is for on_error="skip", "replace" or a callable, and on_error is "raise"'
        )
    if options["apply_exif"] not in (True, False):
        refuse("apply_exif", "must be True or False")
    if options["seed"] is not None and not hasattr(options["seed"], "__index__"):
        refuse("seed", "is an int, or None")
    if share != "auto" and not (isinstance(share, (int, float)) and 0 <= share <= 1):
        refuse("cpu_share", 'is a share of the images, 0.0 to 1.0, or "auto"')


def _is_encoded_folder(dataset: Any) -> bool:
    """Whether a dataset surely hands out encoded images, through Subset and ConcatDataset."""
    if dataset is None or isinstance(dataset, EncodedImageFolder):
        return dataset is not None
    inner = getattr(dataset, "datasets", None) or [getattr(dataset, "dataset", None)]
    return isinstance(inner, Sequence) and all(_is_encoded_folder(d) for d in inner)


def _decoder(asked: str | ImageDecoder, device: torch.device) -> ImageDecoder | None:
    """The decoder of what is left to the GPU; None where the workers decode all."""
    if isinstance(asked, ImageDecoder):
        return asked
    if asked == "torchcodec":
        warnings.warn(
            'decoder="torchcodec" is "nvjpeg" now, which calls the nvJPEG that TorchCodec brings. '
            'Write decoder="nvjpeg", or leave it out.',
            FutureWarning,
            stacklevel=4,
        )
        asked = "nvjpeg"
    names = ("auto", "cpu", *DECODERS)
    if asked not in names:
        quoted = ", ".join(f'"{name}"' for name in names)
        raise ValueError(f"decoder must be one of {quoted}, got {asked!r}.")
    if asked == "cpu" or (asked == "auto" and device.type != "cuda"):
        return None
    if device.type != "cuda":
        raise ValueError(f'decoder={asked!r} needs a CUDA device; use "auto" or "cpu" here.')
    name = next(iter(DECODERS)) if asked == "auto" else asked
    decoder = DECODERS[name](device)
    missing = decoder.missing()
    if not missing:
        return decoder
    if asked == "auto":
        return None
    raise ValueError(
        f"decoder={asked!r} can decode nothing on {device}: {missing}. Use "
        '"auto" or "cpu", which decodes in the workers.'
    )


def with_packing(loader: DataLoader[Any], packer: Packer) -> DataLoader[Any]:
    """A copy of a loader whose workers pack encoded images, and whose batches are noted."""
    clone = changed(loader)
    if hasattr(loader, "next_iter_state"):
        loader.next_iter_state = None  # a StatefulDataLoader's: good for one epoch, the clone's
        vars(clone)["_initial_iter_for_state_dict"] = False  # of the iterator that it leaves here
    packer.share.share_memory_()  # not in a deep copy of the prefetcher
    clone.collate_fn = HostStage(loader.collate_fn, packer)
    stateful = hasattr(loader, "next_iter_state")
    clone.worker_init_fn = WorkerStart(loader.worker_init_fn, packer.on_gpu, stateful)
    if has_keys(clone):
        name = sampler_of(clone)
        vars(clone)[name] = NotedSampler(clone, name)  # DataLoader locks the name, not the value
    return clone


class FirstBatch:
    """Says once, at the first batch, what will make a loader slow."""

    def __init__(self, loader: Any, device: torch.device) -> None:
        self.seen = device.type != "cuda"
        self.pins = hasattr(loader, "pin_memory")  # whether it can, as a list of batches cannot

    def __call__(self, batch: Any) -> None:
        if self.seen:
            return
        self.seen = True
        parts = [images.pixels for images in encoded_leaves(batch)]
        if parts and (text := shortage()):
            warnings.warn(text, stacklevel=2)
        host = (part for part in parts or tensors(batch) if part.device.type == "cpu")
        if self.pins and any(part.numel() and not part.is_pinned() for part in host):
            warnings.warn(
                "The wrapped loader does not pin its memory, so copies to the GPU block and "
                "overlap less. Pass pin_memory=True to the DataLoader.",
                stacklevel=2,
            )
