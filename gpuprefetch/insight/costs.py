"""What each transform of a loader costs, timed one by one: where a slow policy shows."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from gpuprefetch.core.nested import Batch, Loader
from gpuprefetch.core.streams import own_modes
from gpuprefetch.migrate.folders import folders_of, picture_of, pipeline_of
from gpuprefetch.policies.known import title
from gpuprefetch.prefetcher import DataPrefetcher
from gpuprefetch.transforms.head import Transform
from gpuprefetch.transforms.random import trial_draws

TRIES = 3  # the quickest counts, as the first one may compile
SHOWN = 3  # transforms that are named


def costs(loader: Loader, device: torch.device, count: int) -> str:
    """The slowest transforms, run on noise or a folder's first file, in words; empty for none."""
    try:
        if not isinstance(loader, DataPrefetcher):
            folders = folders_of(loader)
            found = _timed(pipeline_of(folders), picture_of(loader.dataset), torch.device("cpu"))
            where = "of an image, in the workers"
        else:
            found = []
            where = "of a batch, after the fused launch"
            for view in loader.views:
                if view.tail and isinstance(view.head.size, tuple):
                    shape = (count, 3, *view.head.size)
                    images = torch.rand(shape, dtype=torch.float32, device=device)
                    images = (images * 255).to(torch.uint8) if view.levels else images
                    found += _timed(view.tail, images, device)
    except Exception:  # the user's code, and loaders of whatever: then there is nothing to tell
        return ""
    slowest = sorted(found, reverse=True)[:SHOWN]
    return f"{where}: {', '.join(f'{name} {ms:.2f} ms' for ms, name in slowest)}" if found else ""


def _timed(
    ops: Sequence[Transform], images: Batch, device: torch.device
) -> list[tuple[float, str]]:
    found = []
    for op in ops:
        seconds = []
        for _ in range(TRIES):
            with own_modes(device), trial_draws():
                started = time.perf_counter()
                made = op(images)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                seconds.append(time.perf_counter() - started)
        images = made
        found.append((1000 * min(seconds), title(op)))
    return found
