"""Boxes, masks and points follow their image: through the head's sampling, and through the tail.

torchvision's tv_tensors say of a target what it is. Workers move them before the loader's own
collate function sees the samples, so that it may do with the result what it likes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from gpuprefetch.core.nested import children_of, leaves, map_leaves, moves_itself, objects, select
from gpuprefetch.images.encoded import EncodedImage, EncodedImages
from gpuprefetch.transforms.head import apply_head, is_fused
from gpuprefetch.transforms.per_image import Loop, PerImage

# Note [Coordinates]
# Pixel k reaches from k to k + 1, for boxes and points alike, as in COCO and torchvision's models.
# Its center is at k + 0.5 then, but at k in sampling rows and in kornia. torchvision's transforms
# agree, but mirror points to W - 1 - x: a pixel off what they do with boxes, and with the image.

Size = tuple[int, int]


@dataclass(slots=True)
class FollowedImage(EncodedImage):
    """An image whose sampling row ``(2, 6)`` is settled: the targets beside it have followed it."""

    row: Any = None


class PerSample(list[Any]):
    """A list within a batch that has one entry per sample; ``kind`` makes of it what it was."""

    def __init__(self, entries: Iterable[Any], kind: Callable[[Any], Any] = list) -> None:
        super().__init__(entries)
        self.kind = kind

    def of(self, entries: Iterable[Any]) -> PerSample:
        """The same with the entries of other samples."""
        return PerSample(entries, self.kind)


def is_per_sample(node: Any) -> bool:
    """For ``map_leaves``."""
    return isinstance(node, PerSample)


def unmark(leaf: Any) -> Any:
    """What a :class:`PerSample` was; anything else as it is."""
    return leaf.kind(leaf) if isinstance(leaf, PerSample) else leaf


def _is_image(leaf: Any) -> bool:
    return isinstance(leaf, (EncodedImage, EncodedImages))


def followers(batch: Any) -> list[Any]:
    """The boxes, masks and points in a batch or a part of it."""
    tv = sys.modules.get("torchvision.tv_tensors")  # nobody has any before it is imported
    if tv is None:
        return []
    kinds = (tv.BoundingBoxes, tv.KeyPoints, tv.Mask)
    return [leaf for leaf in objects(batch, _is_image) if isinstance(leaf, kinds)]


def wrap_like(values: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Some rows of ``leaf``, a tv_tensor again if that is one."""
    tv = sys.modules.get("torchvision.tv_tensors")
    if tv is None or not isinstance(leaf, tv.TVTensor):
        return values
    return tv.wrap(values, like=leaf)  # type: ignore[no-any-return]


def images_of(sample: Any) -> list[Any]:
    """The encoded images in a sample."""
    return select(sample, _is_image)


# --- In the workers ---


def follow(samples: Any, size: Size | None, draw: Callable[[list[EncodedImage]], Any]) -> Any:
    """Move boxes, masks and points as the head is going to sample their image.

    Args:
        samples: what the dataset gave: a list of samples, or one sample.
        size: ``(height, width)`` of the head's result, None where it samples nothing.
        draw: gives sampling rows ``(N, 2, 6)``, sizes ``(N, 2)`` and errors of N images.

    Returns:
        New samples with a :class:`FollowedImage` each; the same object where nothing has to move.

    Raises:
        ValueError: if a sample has not exactly one image, or a target is not for its size.
    """
    if size is None or not followers(samples):
        return samples
    each = samples if isinstance(samples, list) else [samples]
    # Others, as the None of a sample that its dataset could not read, are the collate function's.
    numbers = [i for i, sample in enumerate(each) if images_of(sample) or followers(sample)]
    images = [images_of(each[i]) for i in numbers]
    if not any(images):
        return samples
    if odd := {len(found) for found in images} - {1}:
        raise ValueError(
            "Boxes, masks and points follow the one EncodedImage of their sample, but a sample has "
            f"{odd.pop()}. Return one image a sample, or plain tensors instead of tv_tensors."
        )
    rows, sizes, errors = draw([image for (image,) in images])
    tv = sys.modules["torchvision.tv_tensors"]
    for kind in (tv.Mask, tv.KeyPoints):
        default_collate_fn_map.setdefault(kind, _stack)

    def move(i: int, leaf: Any) -> Any:
        if _is_image(leaf):
            image = FollowedImage(leaf.data, leaf.index, leaf.path, rows[i])
            image._made = leaf._made
            return image
        if not followers(leaf):
            return leaf
        (height, width), canvas = sizes[i], tuple(getattr(leaf, "canvas_size", leaf.shape[-2:]))
        if canvas != (height, width) and i not in errors:
            image = images[i][0]
            raise ValueError(
                f"{type(leaf).__name__} is for a picture of {canvas[0]} x {canvas[1]} (height x "
                f"width), but {image.path or image.index!r} has {height} x {width}. Pictures are "
                "turned by their EXIF orientation where apply_exif says so, and else are not."
            )
        return _sampled(leaf, rows[i], size)

    moved = list(each)
    for i, number in enumerate(numbers):
        moved[number] = map_leaves(partial(move, i), each[number], _is_image)
    return moved if each is samples else moved[0]


# torch's unsigned types of more than 8 bits know few operations: the same bits, signed, know all.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _signed(leaf: Any) -> torch.Tensor:
    """A mask as a plain tensor of a dtype that can be moved; ``view`` gives it its own again."""
    mask: torch.Tensor = leaf.as_subclass(torch.Tensor)
    return mask.view(_SIGNED.get(mask.dtype, mask.dtype))


def _sampled(leaf: Any, row: Any, size: Size) -> Any:
    from torchvision import tv_tensors

    if not isinstance(leaf, tv_tensors.Mask):
        origin, step, low = row[::-1, :3].T
        # A single pixel, from corner to corner, has no step: it becomes the whole picture.
        step = np.where(step == 0, 1 / np.array(size[::-1]), step)
        origin = np.where(row[::-1, 1] == 0, low + step / 2 - 0.5, origin)
        origin, step = torch.from_numpy(np.stack([origin, step])).to(leaf.device)
        return _at(leaf, (_points(leaf) - 0.5 - origin) / step + 0.5, size)  # Note [Coordinates]
    mask = _signed(leaf)
    for dim, (origin, step, low, high, first, last) in zip((-2, -1), row, strict=True):
        index = np.arange(size[dim])
        pixel = np.floor(origin + step * index + 0.5).clip(low, high - 1)  # the nearest one
        # The second bound is for a file that could not be read, whose size is made up.
        pixel = pixel.clip(0, mask.shape[dim] - 1).astype(np.int64)
        mask = mask.index_select(dim, torch.from_numpy(pixel).to(leaf.device))
        padding = torch.from_numpy((index < first) | (index >= last)).to(leaf.device)
        mask.masked_fill_(padding[:, None] if dim == -2 else padding, 0)
    return tv_tensors.Mask(mask.view(leaf.dtype))


def _points(leaf: Any) -> torch.Tensor:
    """``(P, 2)`` float64, x and y of all points, or of the four corners of all boxes."""
    from torchvision.transforms.v2 import functional as F

    values = leaf.as_subclass(torch.Tensor).double()
    if hasattr(leaf, "format"):
        if values.shape[-1] != 4:
            raise ValueError(
                f"Boxes of format {leaf.format.value} do not follow their image: a crop that is "
                "stretched leaves no rectangles of them. Give corners, as KeyPoints (N, 4, 2)."
            )
        values = F.convert_bounding_box_format(values, leaf.format, type(leaf.format).XYXY)
        values = values[:, [0, 1, 2, 1, 2, 3, 0, 3]]
    return torch.Tensor(values.reshape(-1, 2))


def _at(leaf: Any, points: torch.Tensor, canvas: Size) -> Any:
    """``leaf`` with its points elsewhere; a box becomes the upright one around its corners."""
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import functional as F

    if hasattr(leaf, "format"):
        corners, xyxy = points.reshape(-1, 4, 2), type(leaf.format).XYXY
        points = torch.cat([corners.amin(1), corners.amax(1)], dim=1)
        points = F.clamp_bounding_boxes(points, xyxy, canvas, leaf.clamping_mode)
        points = F.convert_bounding_box_format(points, xyxy, leaf.format)
    points = points if leaf.is_floating_point() else points.round()
    moved = points.reshape(leaf.shape).to(leaf.dtype)
    return tv_tensors.wrap(moved, like=leaf, canvas_size=canvas)


def _stack(batch: Any, *, collate_fn_map: Any = None) -> Any:
    """Entry of the default collate: masks and points of equal shapes stay what they are."""
    from torchvision import tv_tensors

    return tv_tensors.wrap(collate_tensor_fn(batch), like=batch[0])


def mark(batch: Any, samples: Any) -> Any:
    """Make a :class:`PerSample` of every list that has an entry per sample, in a batch of images.

    Those are the lists of what the samples held, and the lists beside a list of their images.
    """
    if not isinstance(samples, list):
        return batch
    samples = [sample for sample in samples if images_of(sample)]
    beside_images = set[int]()

    def is_list(node: Any) -> bool:
        plain = isinstance(node, (list, tuple)) and not hasattr(node, "_fields")
        return plain and len(node) == len(samples) > 0

    @cache
    def held() -> list[set[int]]:
        def parts(node: Any) -> Iterator[int]:
            yield id(node)
            for child in children_of(node, _is_image) or ():
                yield from parts(child)

        return [set(parts(sample)) for sample in samples]

    def is_column(node: Any) -> bool:
        """Whether the default collate made it: of the strings at one place in all samples."""
        made = is_list(node) and all(isinstance(entry, (str, bytes)) for entry in node)
        return made and not any(id(node) in parts for parts in held()) and is_entries(node)

    def is_entries(node: Any) -> bool:
        if _is_image(node):
            return True
        children = list(node.values()) if isinstance(node, Mapping) else node
        if isinstance(children, (list, tuple)) and any(
            is_list(child) and all(map(_is_image, child)) for child in children
        ):
            beside_images.update(map(id, children))
        if not is_list(node) or images_of(node):
            return False
        if id(node) in beside_images:
            return True
        if all(select(entry, is_column) for entry in node):
            return False  # as many columns as there are samples
        found = [set(map(id, leaves(entry))) for entry in node]
        return any(found) and all(not f or f & h for f, h in zip(found, held(), strict=True))

    def per_sample(leaf: Any) -> Any:
        if not isinstance(leaf, (list, tuple)) or moves_itself(leaf):
            return leaf
        return PerSample(leaf, list if isinstance(leaf, list) else tuple)

    return map_leaves(per_sample, batch, is_entries)


def fate(batch: Any, samples: Any) -> str:
    """What the collate function made of the tv_tensors: "kept", "lost", or "" without any."""
    if not (before := followers(samples)):
        return ""
    count = sum(bool(images_of(s)) for s in samples) if isinstance(samples, list) else 0
    batch = unstack(batch, count)
    after = followers(select(batch, is_per_sample))
    return "kept" if len(after) == len(before) else "lost"


# --- Behind the head ---


def unstack(batch: Any, count: int) -> Any:
    """Make a :class:`PerSample` of every stack of ``count`` masks or points."""

    def split(leaf: Any) -> Any:
        boxes = hasattr(leaf, "format")
        if is_per_sample(leaf) or boxes or not followers(leaf) or len(leaf) != count:
            return leaf
        from torchvision import tv_tensors

        return PerSample((tv_tensors.wrap(e, like=leaf) for e in torch.unbind(leaf)), _stack)

    return map_leaves(split, batch, is_per_sample)


_MOVERS = tuple(
    "gpuprefetch.transforms.convert. gpuprefetch.transforms.head."
    " kornia.augmentation._2d.geometric. kornia.augmentation._2d.mix. kornia.geometry."
    " torchvision.transforms.autoaugment."
    " torchvision.transforms.v2._auto_augment. torchvision.transforms.v2._geometry."
    " torchvision.transforms._presets.ImageClassification timm.data.auto_augment.".split()
)


def _movers(transform: Any) -> Iterator[str]:
    """The names of what moves pixels: a transform, or those that it is made of."""
    for kind in type(transform).__mro__:
        if kind.__module__ == "torchvision.transforms.transforms":
            from torchvision.transforms import v2

            kind = getattr(v2, kind.__name__, kind)  # v1 is one file; those of v2 tell what moves
        if f"{kind.__module__}.{kind.__name__}".startswith(_MOVERS):
            yield type(transform).__name__
    held = transform.children() if isinstance(transform, torch.nn.Module) else ()
    if isinstance(transform, PerImage):
        held = iter(transform.recipe.ops)
    elif isinstance(transform, Loop):
        held = iter([transform.op])
    listed = getattr(transform, "transforms", ())
    for each in (*held, *(listed if isinstance(listed, (list, tuple)) else ())):
        yield from _movers(each)


def moves_pixels(transforms: Iterable[Any]) -> bool:
    """Whether one of the transforms is known to move pixels."""
    return any(any(_movers(transform)) for transform in transforms)


def refuse_unfollowed(batch: Any, samples: Any = ()) -> None:
    """Refuse to move the images of a batch away from boxes, masks and points beside them.

    Args:
        batch: of images that came as tensors.
        samples: that it was collated of: torch's own collate makes plain tensors of theirs.

    Raises:
        ValueError: if the batch holds some.
    """
    if followers(batch) or (isinstance(samples, list) and _holds_stacked(batch, samples)):
        raise ValueError(
            "Boxes, masks and points follow the EncodedImage of their sample, where a DataLoader's "
            "dataset returns both; these came otherwise. Return them so, or transform there."
        )


Samples = list[list[Any]]  # of each sample the parts of its target


def _holds_stacked(batch: Any, samples: Sequence[Any]) -> bool:
    """Whether a plain tensor of the batch has, for each sample, a box, mask or point of its."""
    if not samples or not all(found := [followers(sample) for sample in samples]):
        return False
    plain = (leaf for leaf in objects(batch) if type(leaf) is torch.Tensor and leaf.dim())
    return any(
        len(leaf) == len(samples)
        and all(
            any(torch.equal(row, one.as_subclass(torch.Tensor)) for one in some)
            for row, some in zip(leaf, found, strict=True)
        )
        for leaf in plain
    )


def run_tail(
    tail: Sequence[Any], images: Any, batch: Any, fate: str, look: Callable[[Any, Any], None]
) -> tuple[Any, Any]:
    """Run transforms on ``(N, C, H, W)`` images and their batch with boxes, masks or points.

    This library's transforms and kornia's augmentations run on the whole of it, torchvision's v2
    transforms sample by sample, and move the targets too, also those of an ``nn.Sequential``. Any
    other callable gets the images alone. ``fate`` is what :func:`fate` said of the batch, in which
    everything with an entry per sample is a :class:`PerSample`. ``look`` gets each transform and
    its images beforehand.

    Raises:
        ValueError: for a transform that would move the images alone.
    """
    columns = select(batch, is_per_sample)
    samples: Samples = [list(parts) for parts in zip(*columns, strict=True)]
    names = _names(batch, columns)
    for transform in tail:
        look(transform, images)
        runner = _runner(transform, names)
        if runner is None:
            images = run(transform, images)
        elif fate == "kept":
            with alone(transform):
                images, samples = runner(images, samples)
        else:
            raise ValueError(
                f"{type(transform).__name__} moves boxes, masks and points, but the collate_fn has "
                "made plain tensors of some, or dropped them, or batch_size=None left nothing to "
                "collate. Use one that keeps them, such as collate_fn=lambda samples: "
                "tuple(zip(*samples)), or leave it to the dataset."
            )
    renewed = zip(columns, zip(*samples, strict=True), strict=True)
    moved = {id(old): old.of(new) for old, new in renewed}
    return images, map_leaves(lambda leaf: moved.get(id(leaf), leaf), batch, is_per_sample)


_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def _forked() -> None:
    global _locks, _making
    _locks, _making = weakref.WeakKeyDictionary(), threading.Lock()  # whoever had one is not here


if hasattr(os, "register_at_fork"):  # not on every platform
    os.register_at_fork(after_in_child=_forked)


def alone(transform: Any) -> contextlib.AbstractContextManager[Any]:
    """Keep other threads from running the same transform.

    kornia's keep what they have drawn, for the boxes of the images or for a second call.
    Prefetchers may share a list, and ``replay`` runs one beside the epoch that it is asked in.
    """
    try:
        with _making:
            return _locks.setdefault(transform, threading.RLock())
    except TypeError:  # it cannot be referred to, and is no module
        return contextlib.nullcontext()


def run(transform: Any, images: Any) -> Any:
    """What a transform makes of a batch of images alone."""
    name = getattr(transform, "__name__", type(transform).__name__)
    try:
        with alone(transform):
            result = transform(images)
    except Exception as error:
        kind = type(images).__name__
        form = f"{images.dtype} {tuple(images.shape)}" if kind == "Tensor" else f"a {kind}"
        error.add_note(f"raised by the transform {name}, which got {form}")
        raise
    _check_result(name, images, result)
    return result


def _check_result(name: str, images: Any, result: Any) -> None:
    if result is None:
        raise TypeError(f"the transform {name} returned None. Let it return the images.")
    made = leaves(result)
    foreign = [leaf for leaf in made if type(leaf).__module__.startswith(("numpy", "PIL."))]
    if foreign and not any(isinstance(leaf, torch.Tensor) for leaf in made):
        raise TypeError(
            f"the transform {name} returned {type(foreign[0]).__module__}."
            f"{type(foreign[0]).__name__}, and the loop gets tensors on the device. Let it return "
            "torch.from_numpy(result).to(images.device), as (N, C, H, W), or run it in the dataset."
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


def _names(batch: Any, columns: Sequence[Any]) -> list[Any]:
    """The keys of the columns in a batch that is a dict of them; none of any other."""
    if not isinstance(batch, dict):
        return []
    names = {id(value): name for name, value in batch.items()}
    return [names[id(column)] for column in columns if id(column) in names]


def _runner(transform: Any, names: Sequence[Any]) -> Callable[[Any, Samples], Any] | None:
    """How a transform takes images and targets; None where it gets the images alone.

    ``names`` are those of the parts of a target, where samples are dicts.
    """
    if isinstance(transform, PerImage):
        return partial(_run_program, transform) if moves_pixels([transform]) else None
    if isinstance(transform, Loop):
        transform = transform.op
    v2 = sys.modules.get("torchvision.transforms.v2")
    if v2 is not None and isinstance(transform, v2.Transform):
        return partial(_run_each, transform, names)
    if is_fused(transform):
        return partial(_run_fused, transform)
    module, name = type(transform).__module__, type(transform).__name__
    if module.startswith("kornia.augmentation."):
        colors = ".intensity." in module and name != "RandomErasing"  # which erases masks as well
        return None if colors else partial(_run_by_data_keys, transform)
    if mover := next(_movers(transform), None):
        moved = "moves images" if mover == name else f"holds {mover}, which moves images"
        raise ValueError(
            f"{module}.{name} {moved} alone, but the targets hold boxes, masks or points. Put ops "
            "of gpuprefetch, kornia.augmentation or torchvision.transforms.v2 into the list itself."
        )
    return None


def _run_fused(transform: Any, images: torch.Tensor, samples: Samples) -> Any:
    head, keys = transform.draw(len(images))
    rows = head.draw([images.shape[-2:]] * len(images), keys)
    images = apply_head(head, images, keys)
    size = (images.shape[-2], images.shape[-1])

    def moved(row: Any, leaf: Any) -> Any:
        return _sampled(leaf, row, size) if followers(leaf) else leaf

    each = zip(rows, samples, strict=True)
    return images, [map_leaves(partial(moved, row), parts) for row, parts in each]


def _run_program(transform: PerImage, images: torch.Tensor, samples: Samples) -> Any:
    drawn = transform.draw(images)

    def moved(row: int, leaf: Any) -> Any:
        return transform.carry_out_one(leaf, drawn, row) if followers(leaf) else leaf

    each = [map_leaves(partial(moved, row), parts) for row, parts in enumerate(samples)]
    return transform.carry_out(images, drawn), each


def _run_each(transform: Any, names: Sequence[Any], images: torch.Tensor, samples: Samples) -> Any:
    from torchvision.tv_tensors import Image

    # No name of another part, nor one that a transform may look for labels in.
    own = "_" * (1 + max((len(str(name)) for name in names), default=0))

    def run_one(image: torch.Tensor, parts: list[Any]) -> Any:
        if len(names) < len(parts):
            return transform(Image(image), *parts)
        # Some look for labels by their name.
        sample = transform(dict(zip(names, parts, strict=True)) | {own: Image(image)})
        return [sample[name] for name in (own, *names)]

    done = [run_one(image, parts) for image, parts in zip(images, samples, strict=True)]
    shapes = {tuple(image.shape) for image, *_ in done}
    if len(shapes) > 1:
        raise ValueError(
            f"{type(transform).__name__} gave images of {len(shapes)} shapes, as {shapes.pop()}. "
            "Put it into a v2.Compose with a v2.Resize((height, width)) behind it."
        )
    together = torch.stack([image.as_subclass(torch.Tensor) for image, *_ in done])
    return together, [parts for _, *parts in done]


def _run_by_data_keys(transform: Any, images: torch.Tensor, samples: Samples) -> Any:
    import kornia.augmentation as K
    from torchvision.tv_tensors import Mask

    targets = [followers(parts) for parts in samples]
    points = [[_points(leaf) for leaf in some if not isinstance(leaf, Mask)] for some in targets]
    masks = [
        [_signed(leaf).reshape(-1, *leaf.shape[-2:]) for leaf in some if isinstance(leaf, Mask)]
        for some in targets
    ]
    rigid = K.RigidAffineAugmentationBase2D
    for op in transform.modules():
        name = type(op).__name__
        if isinstance(op, K.MixAugmentationBaseV2):
            raise ValueError(
                f"kornia's {name} takes no boxes, masks or points along. Mix in the training step."
            )
        if any(points) and isinstance(op, K.AugmentationBase2D) and not isinstance(op, rigid):
            raise ValueError(f"kornia's {name} leaves boxes and points where they were.")
    if any(points) and images.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"kornia moves boxes and points in the dtype of the images, and {images.dtype} is too "
            "coarse for that. Leave dtype out of DataPrefetcher and cast behind it."
        )
    # kornia takes no empty masks, so a blank one ends each list, and a point that nobody reads.
    blank = images.new_zeros(1, *images.shape[-2:], dtype=torch.uint8)
    origin = images.new_zeros(1, 2, dtype=torch.float64)
    padded = pad_sequence([torch.cat([*some, origin]) for some in points], batch_first=True)
    if not isinstance(transform, K.AugmentationSequential):
        transform = K.AugmentationSequential(transform)
    images, padded, layers = transform(
        images,
        padded - 0.5,  # see Note [Coordinates]
        [torch.cat([*some, blank]) for some in masks],
        data_keys=["input", "keypoints", "mask"],
    )
    canvas = (images.shape[-2], images.shape[-1])

    def put_back(i: int, parts: list[Any]) -> Any:
        lengths = [*map(len, points[i])]
        some_points = iter(padded[i].split([*lengths, padded.shape[1] - sum(lengths)]))
        some_masks = iter(layers[i].reshape(-1, *canvas).split([*map(len, masks[i]), 1]))

        def moved(leaf: Any) -> Any:
            if not followers(leaf):
                return leaf
            if not isinstance(leaf, Mask):
                return _at(leaf, next(some_points) + 0.5, canvas)
            mask = next(some_masks).reshape(*leaf.shape[:-2], *canvas)
            return Mask(mask.to(_SIGNED.get(leaf.dtype, leaf.dtype)).view(leaf.dtype))

        return map_leaves(moved, parts)

    return images, [put_back(i, parts) for i, parts in enumerate(samples)]
