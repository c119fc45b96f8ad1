"""What stands in for a GPU on a machine without one, put in at one place; and helpers."""

import ctypes
import importlib.util
import itertools
import threading
import time
from inspect import signature
from pathlib import Path

import numpy as np
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


def bytes_at(address, size):
    return bytes((ctypes.c_uint8 * size).from_address(address))


def numbers_at(address, count):
    return np.frombuffer(bytes_at(address, 8 * count), dtype=np.int64)


class Library:
    """nvJPEG's functions, which decode on the CPU to the addresses that they get."""

    def __init__(self):
        self.status = {}
        self.made = itertools.count(1)
        self.asked = 0
        self.log = []
        self.skips = False  # all pictures
        self.engines = True

    def __getattr__(self, name):
        if not name.startswith("nvjpeg"):
            raise AttributeError(name)

        def call(*arguments):
            self.log.append(name)
            if status := self.status.get(name, 0):
                return status
            return getattr(self, name.removeprefix("nvjpeg"), lambda *_: 0)(*arguments)

        return call

    def CreateEx(self, backend, allocator, pinned, flags, handle):
        assert backend in (2, 3)
        assert (allocator, pinned, flags) == (None, None, 0)
        if backend == 3 and not self.engines:
            return 7
        handle._obj.value = next(self.made)
        return 0

    def GetHardwareDecoderInfo(self, handle, engines, cores):
        engines._obj.value = 7
        cores._obj.value = 1
        return 0

    def DecodeBatchedInitialize(self, handle, state, count, threads, output):
        assert (threads, output) == (1, 5)
        self.asked = count
        return 0

    def DecodeBatched(self, handle, state, files, lengths, images, stream):
        count = self.asked
        if self.skips:
            return 0
        images = numbers_at(images, 8 * count).reshape(count, 2, 4)
        places = zip(numbers_at(files, count), numbers_at(lengths, count), strict=True)
        for (file, length), (planes, pitches) in zip(places, images, strict=True):
            picture = decode_cpu(bytes_at(int(file), int(length)))
            width = picture.size(2)
            assert (pitches.tolist(), planes[1:].tolist()) == ([3 * width, 0, 0, 0], 3 * [0])
            pixels = picture.permute(1, 2, 0).numpy()
            ctypes.memmove(int(planes[0]), pixels.tobytes(), pixels.nbytes)
        return 0


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
