"""Build the stage that a prefetcher's arguments ask for."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from gpuprefetch.core.nested import Loader
from gpuprefetch.core.stats import Stats
from gpuprefetch.images.decode import DECODERS, ImageDecoder
from gpuprefetch.images.decoding import Decoding
from gpuprefetch.images.division import Share
from gpuprefetch.images.folder import EncodedImageFolder
from gpuprefetch.images.options import Options
from gpuprefetch.images.packer import Packer
from gpuprefetch.images.plan import parse_bytes
from gpuprefetch.images.samples import Origin
from gpuprefetch.images.share import Balancer
from gpuprefetch.images.stage import Pipeline
from gpuprefetch.images.tail import moves_pixels
from gpuprefetch.images.tolerance import Tolerance
from gpuprefetch.images.view import View
from gpuprefetch.images.warmup import expects_photos
from gpuprefetch.lists.views import lists_of
from gpuprefetch.lists.walk import Transforms
from gpuprefetch.transforms.kernel import HAS_TRITON


def build_stage(
    loader: Loader, device: torch.device, options: Options, *, late: bool = False
) -> Pipeline:
    """The stage that a DataPrefetcher's arguments ask for.

    ``late`` says that the collate function runs after the transforms.
    """
    options.check()
    transforms = options.transforms
    lists = lists_of(transforms)
    views = [_view(each, loader, options) for each in lists]
    programs = tuple(view.program for view in views)
    decoder = _decoder(options.decoder, device)
    given = options.given_seed
    share = 0.0 if isinstance(options.cpu_share, str) else options.cpu_share
    on_cpu = device.type == "cpu"
    packer = Packer(
        tuple(view.head for view in views),
        on_gpu=decoder is not None,
        apply_exif=options.apply_exif,
        origin=Origin(torch.initial_seed() if given is None else given),
        share=Share.in_memory(share),
        finishes=on_cpu and decoder is None,
        late=late,
        programs=programs if (HAS_TRITON or on_cpu) and any(programs) else (),
        moves=any(moves_pixels(view.movers) for view in views),
        is_random=any(view.samples for view in views),
    )
    fixed = options.cpu_share != "auto" or decoder is None
    stats = Stats()
    return Pipeline(
        views,
        packer,
        Decoding(
            device, decoder, parse_bytes(options.memory_budget), stats, expects_photos(loader)
        ),
        Tolerance(options.on_error, options.max_bad, stats),
        stats,
        balancer=Balancer(packer.share, loader, fixed=fixed),
    )


def rebuilt(stage: Pipeline, loader: Loader) -> Pipeline:
    """The same stage for another loader, with its own counters, bad images and ``cpu_share``."""
    packer = replace(stage.packer, share=stage.packer.share.clone())
    balancer = stage.balancer
    if balancer is not None:
        balancer = Balancer(packer.share, loader, fixed=balancer.chosen)
    stats = Stats()
    return replace(
        stage,
        packer=packer,
        balancer=balancer,
        decoding=stage.decoding.anew(stats=stats, expects_photos=expects_photos(loader)),
        tolerance=replace(stage.tolerance, seen={}, stats=stats),
        stats=stats,
    )


def _view(transforms: Transforms, loader: Loader, options: Options) -> View:
    files_alone = _is_encoded_folder(getattr(loader, "dataset", None))
    dtype = options.dtype
    memory_format = options.memory_format
    view = View.read(transforms, dtype, memory_format, form=options.form, files_alone=files_alone)
    asked = dtype not in (None, torch.uint8) or memory_format is torch.channels_last
    if files_alone and (view.head.names or view.tail or asked):
        view.require_files()
    return view


def _is_encoded_folder(dataset: object) -> bool:
    """Whether a dataset is known to give encoded images, also through Subset and ConcatDataset."""
    if dataset is None or isinstance(dataset, EncodedImageFolder):
        return dataset is not None
    inner = getattr(dataset, "datasets", None) or [getattr(dataset, "dataset", None)]
    return isinstance(inner, Sequence) and all(_is_encoded_folder(d) for d in inner)


def _decoder(asked: str | ImageDecoder, device: torch.device) -> ImageDecoder | None:
    """The decoder of files that are left to the GPU; None if the workers decode all."""
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
