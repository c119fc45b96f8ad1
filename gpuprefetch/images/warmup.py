"""What a process's first batch of photos needs whatever is in it, made before it is there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import torch

from gpuprefetch.core.nested import Loader
from gpuprefetch.images.decode import ImageDecoder
from gpuprefetch.images.steady import first_file
from gpuprefetch.transforms.head import Head
from gpuprefetch.transforms.launch import load_triton, runs_on

# Note [Warm-up]
# The first batch of a process waits for two things that do not depend on it: nvJPEG's first decoder
# needs 0.62 s, and Triton 0.39 s for a hash of its own files (16 cores, an H200). They are made
# side by side: the decoder in the thread that will decode, the hash in a thread that ends with it.
# Both release the GIL for most of that time.
#   - Where the loader surely has photos, as for a folder, this happens while the workers read their
#     first batches. Elsewhere it waits for the first batch that has encoded images.
#   - The epoch has started its workers and taken its stream by then: nothing is forked later than
#     before, and no CUDA context made earlier. A loader that begins no epoch makes nothing.
#   - It happens once for a process and device. The thread of another loader waits until it is over,
#     so that two threads do not compile the same kernel.
#   - An error is dropped. Nothing that failed is kept: the first batch meets the same error, and
#     tells which batch it is.
# tests/test_warmup.py fails where one comes after the other.

JPEGS = (".jpg", ".jpeg")

_warm: set[torch.device] = set()
_warming = threading.Lock()


def expects_photos(loader: Loader) -> bool:
    """Whether a loader is known to give encoded images, and the first one has a JPEG's name."""
    dataset = getattr(loader, "dataset", None)
    return dataset is not None and first_file(dataset).lower().endswith(JPEGS)


def is_warm(device: torch.device) -> bool:
    """Whether :func:`warm_up` has nothing to do there any more."""
    return device in _warm


def warm_up(device: torch.device, decoder: ImageDecoder | None, heads: Sequence[Head]) -> None:
    """Make what the first batch on a device needs, once in a process: see Note [Warm-up].

    Args:
        device: that of the batches. Nothing is made for a CPU without a decoder.
        decoder: of the files that are left to the GPU; None if none are.
        heads: the fused transforms of each view.
    """
    if device.type == "cpu" and decoder is None:
        return
    with _warming:
        if is_warm(device):
            return
        launches = runs_on(device) and any(head.gives_results for head in heads)
        triton = _begin_triton(device) if launches else None
        if decoder is not None:
            with contextlib.suppress(Exception):
                decoder.warm_up()
        if triton is not None:
            triton.join()
            with contextlib.suppress(Exception), _current(device):
                checked = decoder is not None and decoder.canaries
                for head in heads:
                    head.compile(checked=checked)
        _warm.add(device)


def _begin_triton(device: torch.device) -> threading.Thread | None:
    """The thread in which Triton gets ready; None where there can be no more threads."""

    def run() -> None:
        with contextlib.suppress(Exception), _current(device):
            load_triton()

    # No daemon: at exit Python would end it within the compiler, which aborts the process.
    thread = threading.Thread(target=run, name="gpuprefetch-warmup", daemon=False)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
