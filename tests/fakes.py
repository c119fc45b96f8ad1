"""What stands in for a GPU on a machine without one, put in at one place; and helpers."""

import importlib.util
import threading
import time
from inspect import signature
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Subset

from gpuprefetch import DataPrefetcher, EncodedImage
from gpuprefetch.core.nested import children_of
from gpuprefetch.images.decode import ImageDecoder, RefusedError
from gpuprefetch.images.header import decode_cpu

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name):
    """Import a script of the examples by its path, as ``imagenet/draw``."""
    path = EXAMPLES / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class OnTheCpu(ImageDecoder):
    """Decodes on the CPU what is left to a GPU: launches run in Triton's interpreter.

    ``refused`` says whether it refuses calls of several pictures.
    """

    canaries = False

    def __init__(self, *, refused=False):
        super().__init__(torch.device("cpu"))
        self.refused = refused

    def decode(self, call, buffer, out):
        if len(call.positions) > 1 and self.refused:
            raise RefusedError("too many")
        for file, place in zip(call.files(buffer), call.pictures(out), strict=True):
            place.copy_(decode_cpu(file))


def leaves(batch, is_leaf=None):
    """Yield the leaves of a batch in order, plain values too."""
    children = children_of(batch, is_leaf)
    if children is None:
        yield batch
        return
    for child in children:
        yield from leaves(child, is_leaf)


def numbered(files):
    """A dataset of encoded files, whose targets are their numbers."""
    return [(EncodedImage(file, i, f"{i}.jpg"), i) for i, file in enumerate(files)]


def assert_same_batches(loader, moved, **tolerance):
    """The loader and what was made of it give the same pairs, of images within a tolerance."""
    for (want, target), (got, got_target) in zip(loader, moved, strict=True):
        want = want.as_subclass(torch.Tensor)
        torch.testing.assert_close(got, want, **{"atol": 1e-5, "rtol": 0} | tolerance)
        assert torch.equal(target, got_target)


class Split(Subset):
    """Another transform on a split, as many write it."""

    def __init__(self, dataset, indices, transform):
        super().__init__(dataset, indices)
        self.transform = transform

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return self.transform(image), target

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def loader_of(dataset, device="cpu", kind=DataLoader, **options):
    """A loader of batches of 8, with workers and pinned memory where they go to a GPU."""
    gpu = torch.device(device).type == "cuda"
    return kind(dataset, **{"batch_size": 8, "pin_memory": gpu, "num_workers": 2 * gpu} | options)


def prefetcher_of(dataset, device="cpu", kind=DataLoader, **options):
    """Around the loader of these options that are a loader's; the others are its own."""
    names = signature(DataLoader).parameters.keys() & options.keys()
    loader = loader_of(dataset, device, kind, **{name: options.pop(name) for name in names})
    return DataPrefetcher(loader, device=device, **options)


SECONDS = 20  # for what takes milliseconds; a hang takes for ever


def threads():
    """The package's threads that run."""
    return [thread for thread in threading.enumerate() if thread.name == "gpuprefetch"]


def until(condition):
    """Wait for another thread to bring it about."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
