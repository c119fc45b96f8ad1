"""The collate function of a worker: the user's, with the packing of encoded images inside."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch.utils.data import get_worker_info

from gpuprefetch.core.errors import add_note, text_of, unexpected_end
from gpuprefetch.core.nested import Batch, Leaf, Sample, map_leaves, objects
from gpuprefetch.core.samplers import Key
from gpuprefetch.core.streams import own_modes
from gpuprefetch.images.apart import set_apart
from gpuprefetch.images.columns import Owners, fate, mark
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.guard import begin_reading, end_reading
from gpuprefetch.images.host_memory import memory_for
from gpuprefetch.images.packer import Packer, Packing
from gpuprefetch.images.prepared import PreparedImages, is_encoded
from gpuprefetch.images.slab import by_value, into_shared_memory
from gpuprefetch.images.targets import followed, refuse_unfollowed
from gpuprefetch.images.walk import walk
from gpuprefetch.transforms.random import op_keys, tail_keys

Keys = TypeVar("Keys")

# Names and repeats of the samples that this process is about to read, by the token of its stage.
_expected: dict[bytes, tuple[Sequence[int], Sequence[int]]] = {}

_ENCODED = (
    "Let the dataset return EncodedImage, as EncodedImageFolder does, or move torchvision's "
    "folders over with gpuprefetch.accelerate(loader)."
)
# What to do about the errors of collate functions, by words in their texts.
_HINTS = {
    r"PIL\.": _ENCODED,
    r"stack expects .* got \[\d+, \d+, \d+\] at entry \d+ and": (
        f"Images get one size on the device. {_ENCODED}"
    ),
    "NoneType": "A sample holds None. In place of a row with a file's bytes return "
    "EncodedImage(bytes, index), and leave out what is None.",
    "EncodedImage": "Leave collate_fn out, or call torch's default_collate in it for the images.",
}


class Announced(list[Key]):
    """A batch of keys on its way to a worker, which unpickles it right before it reads them.

    Args:
        keys: of the samples.
        told: the arguments of :func:`announce`, which the worker calls.
    """

    __slots__ = ("told",)

    def __init__(self, keys: Iterable[Key], *told: object) -> None:
        super().__init__(keys)
        self.told = told

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return announce, self.told


def announce(keys: Keys, token: bytes, names: Sequence[int], repeats: Sequence[int]) -> Keys:
    """Say which samples come next, and how often the epoch has had each before; the keys."""
    _expected[token] = names, repeats
    begin_reading()  # the dataset may have kept its encoded images
    return keys


@dataclass(slots=True)
class HostStage:
    """The collate function that a prefetcher gives its loader: it calls the user's, and packs.

    Boxes, masks and points follow their images before that. The first transform after the fused
    ones samples, or runs, at the end.
    """

    collate_fn: Callable[[list[Sample]], Batch]
    packer: Packer
    token: bytes = field(default_factory=secrets.token_bytes)  # the same in its copies in workers
    _home: int = field(default_factory=os.getpid)

    def __call__(self, given: Sample) -> Batch:
        """Collate and pack what the loader has read: a list of samples, or one item."""
        begin_reading()
        # A prefetcher without workers may itself live in a worker of another loader.
        in_worker = get_worker_info() is not None and os.getpid() != self._home
        names, repeats = _expected.pop(self.token, ((), ()))
        packing = Packing(self.packer)
        samples = packing.follow(given, names, repeats)
        followed.set(samples is not given)
        try:
            batch = set_apart(samples) if self.packer.late else self.collate_fn(samples)
            batch = self._pack(batch, samples, packing)
        except StopIteration as error:  # an iterable dataset's end, to torch
            raise unexpected_end(error, "the collate_fn") from error
        except (TypeError, RuntimeError) as error:
            Owners.of(samples)  # its own error says more, where the samples differ
            for words, hint in _HINTS.items():
                if re.search(words, text_of(error)):
                    add_note(error, hint)
            raise
        finally:
            followed.set(False)
        return map_leaves(by_value, batch, is_encoded) if in_worker else batch

    def _pack(self, batch: Batch, samples: Sample, packing: Packing) -> Batch:
        """Pack the images in a batch, and note what became of the targets beside them."""
        if not walk(batch).images:
            if self.packer.moves:
                refuse_unfollowed(batch, samples)
            return batch
        owners = Owners.of(samples)
        batch, packed = pack_lists(mark(batch, owners), packing)
        targets = fate(batch, owners)
        for images in packed:
            images.note_targets(targets)
        # Where rows are left out or replaced, or targets move as well, the loop's process does it.
        if not targets and not any(images.errors for images in packed):
            for images in packed:
                with memory_for(f"the transforms of a batch of {len(images)} images"):
                    self._augment(images)
        return batch

    def _augment(self, images: PreparedImages) -> None:
        """Sample for each view's program here; run it on images that are finished."""
        packer = self.packer
        began = time.perf_counter()
        if not packer.programs:
            return
        heads = images.sized(packer.heads)
        for view, (program, head) in enumerate(zip(packer.programs, heads, strict=True)):
            images.made.layouts.append([])
            if program is None:
                continue
            keys = op_keys(tail_keys(images.who.keys, view), 0)
            with own_modes(torch.device("cpu")):
                if packer.finishes:
                    out = images.made.out[view]
                    sampled = program.drawn(keys, out)
                    images.made.out[view] = program.carry_out(out, sampled, into_shared_memory)
                else:
                    form = head.empty(len(images), "meta")  # a program is for one size
                    images.made.layouts[view] = program.lay_out(form, program.drawn(keys, form))
        images.report.counts["collate_seconds"] += time.perf_counter() - began


def encoded_leaves(batch: Batch) -> list[PreparedImages]:
    return [leaf for leaf in objects(batch, is_encoded) if isinstance(leaf, PreparedImages)]


def pack_lists(batch: Batch, packing: Packing) -> tuple[Batch, list[PreparedImages]]:
    """Pack what a collate function left as images or lists of them.

    Returns the batch, and all packed images in it, also those that came packed.
    """

    def pack_leaf(leaf: Leaf) -> Leaf:
        if isinstance(leaf, PreparedImages) or not is_encoded(leaf):
            return leaf
        images = [leaf] if isinstance(leaf, EncodedImage) else list(leaf)
        with memory_for(f"a batch of {len(images)} images"):
            return packing(images)

    if get_worker_info() is None:
        end_reading()
    batch = map_leaves(pack_leaf, batch, is_encoded)
    return batch, encoded_leaves(batch)
