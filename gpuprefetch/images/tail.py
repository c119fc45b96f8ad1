"""Transforms after the fused ones, on a batch of images and on the targets beside them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from gpuprefetch.core.errors import add_note
from gpuprefetch.core.nested import children_of, map_leaves, objects, select
from gpuprefetch.images.targets import followers, is_per_sample
from gpuprefetch.policies.known import name_of, parts_of, torchvision_class
from gpuprefetch.policies.per_image import Loop, PerImage, takes_keys
from gpuprefetch.policies.registry import Is, is_or_extends
from gpuprefetch.transforms.random import Keys, SeededDraws, derive, op_keys

Samples = list[dict[Any, Any]]  # of each sample the parts of its target
# Batches of images, targets and (N,) keys of the samples: the moved images and targets.
Runner = Callable[[list[Any], Samples, Keys], tuple[list[Any], Samples]]

_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()

if hasattr(os, "register_at_fork"):  # not on every platform
    os.register_at_fork(after_in_child=lambda: _locks.clear())  # whoever held one is not here


def alone(transform: Any) -> contextlib.AbstractContextManager[Any]:
    """Keep other threads from running the same transform: kornia's keep what they have sampled."""
    try:
        return _locks.setdefault(transform, threading.RLock())
    except TypeError:  # no weak reference to it, or no hash
        return contextlib.nullcontext()


def run(transform: Any, images: Any, keys: Keys | None = None) -> Any:
    """Run a transform on images; with ``keys``, if it can sample for each image from its own."""
    name = getattr(transform, "__name__", type(transform).__name__)
    try:
        with alone(transform):
            keyed = keys is not None and takes_keys(transform) and _count(images) == len(keys)
            result = transform(images, keys) if keyed else transform(images)
    except Exception as error:
        kind = type(images).__name__
        form = f"{images.dtype} {tuple(images.shape)}" if kind == "Tensor" else f"a {kind}"
        add_note(error, f"raised by the transform {name}, which got {form}")
        raise
    _check_result(name, images, result)
    return result


def run_alike(transform: Any, outs: Sequence[Any], keys: Keys | None, seed: int) -> list[Any]:
    """Run a transform on batches whose images have their samples in common, with the same draws.

    It samples from ``keys`` where it can, and from ``seed`` otherwise.
    """
    calls = getattr(transform, "calls", 0)  # of a PerImage with a seed of its own
    done = []
    for images in outs:
        if isinstance(transform, PerImage):
            transform.calls = calls
        with SeededDraws(seed):
            done.append(run(transform, images, keys))
    return done


def _count(images: Any) -> int:
    return len(images) if isinstance(images, torch.Tensor) and images.dim() else -1


def _check_result(name: str, images: Any, result: Any) -> None:
    if result is None:
        raise TypeError(f"the transform {name} returned None. Let it return the images.")
    for kind in map(type, objects(result)):
        if kind.__module__.startswith(("numpy", "PIL.")):
            raise TypeError(
                f"the transform {name} returned {kind.__module__}.{kind.__name__}, and the loop "
                "gets tensors on the device. Let it return torch.from_numpy(result)."
                "to(images.device), as (N, C, H, W), or run it in the dataset."
            )
    if not isinstance(images, torch.Tensor) or not isinstance(result, torch.Tensor):
        return
    if result.device != images.device:
        raise ValueError(
            f"the transform {name} returned images on {result.device}, and the loop gets them on "
            f"{images.device}. Leave out what moves them, as .cpu() or .to(device)."
        )
    count, left = len(images), len(result) if result.dim() else 0
    if left < count or (count and left % count):
        raise ValueError(
            f"the transform {name} returned {left} images of {count}, and the targets beside them "
            "stay as they are. Let it return one of each, or the same number of each."
        )


def _movers(transform: Any, traits: Is = Is.MOVES) -> Iterator[str]:
    """The names of what has one of these traits: a transform, or those that it is made of."""
    if is_or_extends(transform, traits):
        yield type(transform).__name__
    for each in _held(transform):
        yield from _movers(each, traits)


def _held(transform: Any) -> list[Any]:
    """The transforms that one is made of."""
    if isinstance(transform, PerImage):
        return [*transform.recipe.ops]
    if isinstance(transform, Loop):
        return [transform.op]
    return parts_of(transform)


def moves_pixels(transforms: Iterable[Any]) -> bool:
    return any(any(_movers(transform)) for transform in transforms)


def run_tail(
    tail: Sequence[Any],
    outs: Sequence[Any],
    batch: Any,
    fate: str,
    keys: Keys,
    seed: int,
    look: Callable[[Any, Any], None],
) -> tuple[list[Any], Any]:
    """Run transforms on images and on the :class:`PerSample` lists of boxes, masks and points.

    ``outs`` are batches of N images each, which have the samples and their ``keys`` in common. What
    cannot sample from these does so from ``seed``.
    """
    names = {id(part): name for name, part in batch.items()} if isinstance(batch, dict) else {}
    found = enumerate(select(batch, is_per_sample))
    columns = {names.get(id(column), number): column for number, column in found}
    samples: Samples = [
        dict(zip(columns, parts, strict=True)) for parts in zip(*columns.values(), strict=True)
    ]
    outs = list(outs)
    for position, transform in enumerate(tail):
        own = op_keys(keys, position)
        for images in outs:
            look(transform, images)
        runner = _runner(transform)
        if runner is None:
            outs = run_alike(transform, outs, own, derive(seed, position))
        elif fate == "kept":
            with alone(transform):
                outs, samples = runner(outs, samples, own)
        else:
            raise ValueError(
                f"{type(transform).__name__} moves boxes, masks and points, but the collate_fn has "
                "made plain tensors of some, dropped them, or put them into lists that do not tell "
                "whose they are, or batch_size=None left nothing to collate. Use one that keeps "
                "them, such as collate_fn=lambda samples: tuple(zip(*samples)), or leave it to the "
                "dataset."
            )
    moved = {id(old): old.of(s[name] for s in samples) for name, old in columns.items()}
    return outs, map_leaves(lambda leaf: moved.get(id(leaf), leaf), batch, is_per_sample)


def _holds_own(transform: Any) -> bool:
    """Whether a transform is or holds one of a user's class that derives from torchvision's."""
    own = torchvision_class(transform) is not None and name_of(transform) is None
    return own or any(map(_holds_own, _held(transform)))


def _runner(transform: Any) -> Runner | None:
    """How a transform takes images and targets; None where it gets the images alone."""
    known = isinstance(transform, (PerImage, Loop)) and not _holds_own(transform)
    if known and not moves_pixels([transform]):
        return None
    if isinstance(transform, PerImage):
        return partial(_run_program, transform)
    op = transform.op if isinstance(transform, Loop) else transform
    v2 = sys.modules.get("torchvision.transforms.v2")
    if v2 is not None and isinstance(op, v2.Transform):
        return partial(_run_each, op)
    if mover := next(_movers(transform, Is.MOVES | Is.ERASES), None):
        module, name = type(transform).__module__, type(transform).__name__
        moved = "moves images" if mover == name else f"holds {mover}, which moves images"
        raise ValueError(
            f"{module}.{name} {moved} alone, but the targets hold boxes, masks or points. After "
            "the fused transforms these follow torchvision's v2 ops in the list itself, as "
            "v2.RandomAffine(10), which samples for each image."
        )
    return None


def _run_program(
    transform: PerImage, outs: list[torch.Tensor], samples: Samples, keys: Keys
) -> Any:
    drawn = transform.draw(outs[0], None if transform.seed is not None else keys)

    def move(row: int, leaf: Any) -> Any:
        return transform.carry_out_one(leaf, drawn, row) if followers(leaf) else leaf

    moved = [map_leaves(partial(move, row), parts) for row, parts in enumerate(samples)]
    return [transform.carry_out(images, drawn) for images in outs], moved


_IMAGE = "\0{}"  # an image's name in a sample for torchvision, which looks for labels by theirs
_SEEN = (dict, list, tuple, OrderedDict, defaultdict)


def _is_unseen(node: Any) -> bool:
    """Whether torchvision's transforms do not look into a structure."""
    plain = type(node) in _SEEN or hasattr(node, "_fields")
    return not plain and children_of(node, None) is not None


def _run_each(
    transform: Any, outs: list[torch.Tensor], samples: Samples, keys: Keys
) -> tuple[list[torch.Tensor], Samples]:
    from torchvision.tv_tensors import Image

    name = type(transform).__name__
    for unseen in select(samples, _is_unseen):
        if followers(unseen):
            raise ValueError(
                f"torchvision's {name} moves boxes, masks and points in dicts, lists and tuples, "
                f"but the targets have some in a {type(unseen).__name__}. Return a dict."
            )
    named = [_IMAGE.format(number) for number in range(len(outs))]

    def run_one(
        images: Sequence[torch.Tensor], parts: dict[Any, Any], key: Any
    ) -> tuple[list[Any], dict[Any, Any]]:
        pictures = [Image(image) for image in images]
        with SeededDraws(derive(key, 0)):
            if all(isinstance(name, str) for name in parts):
                moved = transform(parts | dict(zip(named, pictures, strict=True)))
                return [moved.pop(name) for name in named], moved
            moved = transform(*pictures, *parts.values())
            results, values = moved[: len(pictures)], moved[len(pictures) :]
            return list(results), dict(zip(parts, values, strict=True))

    results, moved = zip(*map(run_one, zip(*outs, strict=True), samples, keys), strict=True)
    shapes = {tuple(image.shape) for images in results for image in images}
    if len(shapes) > 1:
        raise ValueError(
            f"{name} gave images of {len(shapes)} shapes, as {shapes.pop()}. "
            "Put it into a v2.Compose with a v2.Resize((height, width)) after it."
        )
    stacked = [
        torch.stack([image.as_subclass(torch.Tensor) for image in images])
        for images in zip(*results, strict=True)
    ]
    return stacked, [*moved]
