"""Run what comes after the fused transforms, on batches of images and on the targets beside them.

:func:`run` and :func:`run_alike` run one transform on images. :func:`run_tail` runs a list of
transforms on images and on the boxes, masks and points of their samples. How a transform takes
these is its :class:`Runner`: torchvision's v2 ops take them sample by sample, programs of
:class:`PerImage` move them as they move the image, and other callables do not get them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from gpuprefetch.core.errors import add_note
from gpuprefetch.core.nested import children_of, map_leaves, objects, select
from gpuprefetch.images.fate import Fate
from gpuprefetch.images.walk import PerSample, is_follower, is_per_sample, walk
from gpuprefetch.policies.known import (
    in_turn,
    name_of,
    parts_of,
    samples_alike,
    title,
    torchvision_class,
)
from gpuprefetch.policies.per_image import Loop, PerImage, Transform, takes_keys
from gpuprefetch.policies.registry import Is, is_or_extends
from gpuprefetch.transforms.random import Keys, SeededDraws, derive, op_keys

# --- One transform on images ---

_locks: weakref.WeakKeyDictionary[Transform, threading.RLock] = weakref.WeakKeyDictionary()

if hasattr(os, "register_at_fork"):  # not on every platform
    # A thread that held a lock does not exist in the new process.
    os.register_at_fork(after_in_child=lambda: _locks.clear())


def alone(transform: Transform) -> contextlib.AbstractContextManager[object]:
    """Keep other threads from running the same transform: kornia's keep what they have sampled."""
    try:
        return _locks.setdefault(transform, threading.RLock())
    except TypeError:  # no weak reference to it, or no hash
        return contextlib.nullcontext()


def run(transform: Transform, images: Any, keys: Keys | None = None) -> Any:
    """Run a transform on images. One that can sample for each image does so from its key."""
    name = title(transform)
    try:
        with alone(transform):
            keyed = keys is not None and takes_keys(transform) and _count(images) == len(keys)
            result = transform(images, keys) if keyed else transform(images)
    except Exception as error:
        add_note(error, f"raised by the transform {name}, which got {_form(images)}")
        raise
    _check_result(name, images, result)
    return _writable(result)


def _writable(result: object) -> object:
    """A result in which each value has its own place; a loop may write into its batch.

    ``v2.Grayscale(3)`` gives three channels the same one. A collate function that stacks images
    copies them.
    """
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        return result
    sides = zip(result.shape, result.stride(), strict=True)
    shares = any(step == 0 and length > 1 for length, step in sides)
    return result.contiguous() if shares else result


def run_alike(
    transform: Transform, batches: Sequence[Any], keys: Keys | None, seed: int
) -> list[Any]:
    """Run a transform on batches of the same samples, with the same random parameters for each.

    The transform samples from ``keys`` if it can, and from ``seed`` otherwise.
    """
    before = transform.get_extra_state() if isinstance(transform, PerImage) else None
    results = []
    for images in batches:
        if isinstance(transform, PerImage) and before is not None:
            transform.set_extra_state(before)  # one with a seed counts its calls
        if isinstance(images, list):
            results.append(_run_each(transform, images, keys, seed))
            continue
        with SeededDraws(seed):
            results.append(run(transform, images, keys))
    return results


def _run_each(
    transform: Transform, images: Sequence[torch.Tensor], keys: Keys | None, seed: int
) -> list[torch.Tensor]:
    """Run a transform on images of their own sizes, each as a batch of one.

    They have the same random parameters where a whole batch has.
    """
    made = [*images]
    draws = SeededDraws(seed)
    for op in in_turn(transform):
        alike = samples_alike(op)
        for number, image in enumerate(made):
            own = None if keys is None else keys[number : number + 1]
            repeats = alike and number < len(made) - 1
            with draws.copied() if repeats else draws:
                result = run(op, image[None], own)
            made[number] = _only(title(op), result)
    return made


def _only(name: str, result: object) -> torch.Tensor:
    """The image of a batch of one, as a transform returned it."""
    if not isinstance(result, torch.Tensor) or result.dim() != 4 or len(result) != 1:
        raise ValueError(
            f"the transform {name} returned {_form(result)} for one image. Images have sizes of "
            "their own here, and each is transformed alone, as (1, C, H, W). Let it return that, "
            "or give images one size before it, as v2.CenterCrop(224) does."
        )
    return result[0]


def _count(images: object) -> int:
    return len(images) if isinstance(images, torch.Tensor) and images.dim() else -1


def _form(images: object) -> str:
    if type(images) is torch.Tensor:
        return f"{images.dtype} {tuple(images.shape)}"
    return f"a {type(images).__name__}"


def _check_result(name: str, images: object, result: object) -> None:
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
    given = len(images)
    made = len(result) if result.dim() else 0
    if made < given or (given and made % given):
        raise ValueError(
            f"the transform {name} returned {made} images of {given}, and the targets beside them "
            "stay as they are. Let it return one of each, or the same number of each."
        )


# --- What moves pixels ---


def _movers(transform: Transform, traits: Is = Is.MOVES) -> Iterator[str]:
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


# --- Transforms on images and targets ---

# The target of one sample: what its columns hold for it, by the name or number of the column.
Target = dict[object, Any]


# N images (C, H, W): (N, C, H, W), or a list where each has its own size.
Images = torch.Tensor | list[torch.Tensor]


class Moved(NamedTuple):
    """Batches of N images of the same samples, and the N targets beside them."""

    batches: Sequence[Images]
    targets: list[Target]


class Runner(Protocol):
    """Runs one transform on images and targets; ``keys`` ``(N,)`` are those of the samples."""

    def __call__(
        self, batches: Sequence[torch.Tensor], targets: list[Target], keys: Keys
    ) -> Moved: ...


def run_tail(
    tail: Sequence[Transform],
    batches: Sequence[Images],
    batch: Any,
    fate: Fate,
    keys: Keys,
    seed: int,
    look: Callable[[Transform, Images], None],
) -> tuple[Sequence[Images], Any]:
    """Run transforms on images, and on the boxes, masks and points beside them.

    Args:
        tail: the transforms.
        batches: of N images each, which have the samples and their ``keys`` in common.
        batch: what the loop gets, with a :class:`PerSample` for each list of N entries.
        fate: whether these lists hold all boxes, masks and points.
        keys: ``(N,)``, what is sampled for each image comes from.
        seed: of what is sampled for the batch as a whole.
        look: is called with each transform and the images before it.

    Returns:
        The transformed batches of images, and the batch with moved targets.
    """
    columns = _columns_of(batch)
    moved = Moved(list(batches), _targets_in(columns))
    for position, transform in enumerate(tail):
        own_keys = op_keys(keys, position)
        for images in moved.batches:
            look(transform, images)
        runner = _runner(transform)
        if runner is None:
            alike = run_alike(transform, moved.batches, own_keys, derive(seed, position))
            moved = moved._replace(batches=alike)
        elif fate is Fate.KEPT:
            with alone(transform):
                moved = _move(runner, moved, own_keys)
        else:
            raise ValueError(
                f"{type(transform).__name__} moves boxes, masks and points, but the collate_fn "
                "lost some: they are plain tensors, missing, or in no list with one entry per "
                "sample. Use collate_fn=lambda samples: tuple(zip(*samples)) and a batch_size, or "
                "move them in the dataset."
            )
    return moved.batches, _with_targets(batch, columns, moved.targets)


def _move(runner: Runner, given: Moved, keys: Keys) -> Moved:
    """Run a transform on images and targets. With sizes of their own each sample is a batch."""
    stacks = [images for images in given.batches if isinstance(images, torch.Tensor)]
    if len(stacks) == len(given.batches):
        return runner(stacks, given.targets, keys)
    batches: list[list[torch.Tensor]] = [[] for _ in given.batches]
    targets = []
    for i, (target, images) in enumerate(
        zip(given.targets, zip(*given.batches, strict=True), strict=True)
    ):
        moved = runner([image[None] for image in images], [target], keys[i : i + 1])
        for done, made in zip(batches, moved.batches, strict=True):
            done.append(made[0])
        targets += moved.targets
    return Moved(batches, targets)


def _columns_of(batch: object) -> dict[object, PerSample]:
    """The columns of a batch by name: the key in a batch that is a dict, otherwise a number.

    torchvision's transforms look for labels by name.
    """
    keys = {id(part): key for key, part in batch.items()} if isinstance(batch, dict) else {}
    columns = enumerate(select(batch, is_per_sample))
    return {keys.get(id(column), number): column for number, column in columns}


def _targets_in(columns: dict[object, PerSample]) -> list[Target]:
    """The target of each sample.

    Example:
        ``{"boxes": [b0, b1], "names": ["cat", "dog"]}`` has the targets
        ``{"boxes": b0, "names": "cat"}`` and ``{"boxes": b1, "names": "dog"}``.
    """
    samples = zip(*columns.values(), strict=True)
    return [dict(zip(columns, parts, strict=True)) for parts in samples]


def _with_targets(batch: Any, columns: dict[object, PerSample], targets: list[Target]) -> Any:
    """The batch with what has become of the targets in its columns."""
    moved = {
        id(column): column.with_entries(target[name] for target in targets)
        for name, column in columns.items()
    }
    return map_leaves(lambda leaf: moved.get(id(leaf), leaf), batch, is_per_sample)


def _runner(transform: Transform) -> Runner | None:
    """How a transform takes images and targets; None if it gets the images alone."""
    known = isinstance(transform, (PerImage, Loop)) and not _holds_own(transform)
    if known and not moves_pixels([transform]):
        return None
    if isinstance(transform, PerImage):
        return partial(_run_program, transform)
    op = transform.op if isinstance(transform, Loop) else transform
    v2 = sys.modules.get("torchvision.transforms.v2")
    if v2 is not None and isinstance(op, v2.Transform):
        return _EachSample(op).run
    mover = next(_movers(transform, Is.MOVES | Is.ERASES), None)
    if mover is not None:
        raise _moves_images_alone(transform, mover)
    return None


def _holds_own(transform: Transform) -> bool:
    """Whether a transform is or holds one of a user's class that derives from torchvision's."""
    own = torchvision_class(transform) is not None and name_of(transform) is None
    return own or any(map(_holds_own, _held(transform)))


def _moves_images_alone(transform: Transform, mover: str) -> ValueError:
    kind = type(transform)
    what = "moves images" if mover == kind.__name__ else f"holds {mover}, which moves images"
    return ValueError(
        f"{kind.__module__}.{kind.__name__} {what} alone, but the targets hold boxes, masks or "
        "points. Replace it by torchvision's v2 op in the list itself, such as "
        "v2.RandomAffine(10), which moves both."
    )


def _run_program(
    program: PerImage, batches: Sequence[torch.Tensor], targets: list[Target], keys: Keys
) -> Moved:
    """Run a program, sampled once for each sample, on its images and its target."""
    sampled = program.draw(batches[0], None if program.seed is not None else keys)

    def move(row: int, leaf: object) -> object:
        return program.carry_out_one(leaf, sampled, row) if is_follower(leaf) else leaf

    moved = [map_leaves(partial(move, row), target) for row, target in enumerate(targets)]
    return Moved([program.carry_out(images, sampled) for images in batches], moved)


# torchvision's transforms look into these, and into namedtuples.
_SEEN = (dict, list, tuple, OrderedDict, defaultdict)


def _is_unseen(node: object) -> bool:
    """Whether torchvision's transforms do not look into a structure."""
    seen = type(node) in _SEEN or hasattr(node, "_fields")
    return not seen and children_of(node, None) is not None


@dataclass(frozen=True, slots=True)
class _EachSample:
    """Calls a transform of torchvision's v2 sample by sample, with the images and their target."""

    transform: Transform

    @property
    def name(self) -> str:
        return type(self.transform).__name__

    def run(self, batches: Sequence[torch.Tensor], targets: list[Target], keys: Keys) -> Moved:
        self._refuse_unseen(targets)
        images_of_samples = zip(*batches, strict=True)
        results = list(map(self._run_one, images_of_samples, targets, keys))
        stacked = self._stack([images for images, _ in results])
        return Moved(stacked, [target for _, target in results])

    def _refuse_unseen(self, targets: list[Target]) -> None:
        for unseen in select(targets, _is_unseen):
            if walk(unseen).has_followers:
                raise ValueError(
                    f"torchvision's {self.name} moves boxes, masks and points in dicts, lists "
                    f"and tuples, but the targets have some in a {type(unseen).__name__}. Return "
                    "a dict."
                )

    def _run_one(
        self, images: Sequence[torch.Tensor], target: Target, key: int
    ) -> tuple[list[torch.Tensor], Target]:
        from torchvision.tv_tensors import Image

        pictures = [Image(image) for image in images]
        with SeededDraws(derive(key, 0)):
            if not all(isinstance(name, str) for name in target):
                moved = self.transform(*pictures, *target.values())
                values = moved[len(pictures) :]
                return list(moved[: len(pictures)]), dict(zip(target, values, strict=True))
            # torchvision looks for labels by their name: no target has such a one as the images.
            names = [f"\0{number}" for number in range(len(pictures))]
            moved = self.transform(target | dict(zip(names, pictures, strict=True)))
            return [moved.pop(name) for name in names], moved

    def _stack(self, results: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """Batches of images, from the images of each sample."""
        shapes = {tuple(image.shape) for images in results for image in images}
        if len(shapes) > 1:
            raise ValueError(
                f"{self.name} gave images of {len(shapes)} shapes, as {shapes.pop()}. "
                "Put it into a v2.Compose with a v2.Resize((height, width)) after it."
            )
        return [
            torch.stack([image.as_subclass(torch.Tensor) for image in images])
            for images in zip(*results, strict=True)
        ]
