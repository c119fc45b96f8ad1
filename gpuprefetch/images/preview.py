"""Show what the transforms make of some samples: each original beside what the loop would get."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from gpuprefetch.core.loaders import TorchLoader, is_stream, length_of_dataset
from gpuprefetch.core.nested import Batch, Loader, Sample, objects, select
from gpuprefetch.core.ranks import Ranks
from gpuprefetch.core.samplers import Key
from gpuprefetch.images.apart import Apart, collate_apart, image_of
from gpuprefetch.images.bad import BadImageError
from gpuprefetch.images.collate import encoded_leaves
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.header import decode_cpu
from gpuprefetch.images.levels import normalizations, normalizations_of_dataset, picture_of
from gpuprefetch.images.once import Named, apart_from_epochs, carry_out, collated, read_samples
from gpuprefetch.images.packer import Packer
from gpuprefetch.images.places import is_place
from gpuprefetch.images.prepared import PreparedImages
from gpuprefetch.images.rows import is_column
from gpuprefetch.images.samples import Origin, Repeats
from gpuprefetch.images.sheet import Tile, contact_sheet
from gpuprefetch.images.stage import Pipeline
from gpuprefetch.images.view import View
from gpuprefetch.images.walk import Follower, is_follower, walk
from gpuprefetch.policies.known import Constants
from gpuprefetch.policies.per_image import PerImage, takes_keys
from gpuprefetch.policies.words import words_of
from gpuprefetch.transforms.head import Head
from gpuprefetch.transforms.random import head_keys, op_keys, tail_keys, trial_draws
from gpuprefetch.transforms.sampling import RandomCropOp, ResizedCropOp, Sampling, Size, size_at

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_CLASSES = 256  # in a mask; a depth map has more values
MOST = 1024  # samples of one sheet: their results are in memory together


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a preview shows: see :meth:`gpuprefetch.DataPrefetcher.preview`."""

    count: int
    draws: int
    samples: Sequence[Key] | None
    side: int

    def check(self) -> None:
        """Refuse what is out of range."""
        for name, unit in (("count", "samples"), ("draws", "draws"), ("side", "pixels")):
            value = getattr(self, name)
            if not hasattr(value, "__index__") or operator.index(value) < 1:
                raise ValueError(f"{name} is a number of {unit}, 1 or more, got {value!r}.")
        known = hasattr(self.samples, "__len__") and not isinstance(self.samples, str)
        if self.samples is not None and not (known and len(self.samples)):
            raise ValueError(
                "samples are keys of the dataset, as its sampler gives them, got "
                f"{self.samples!r}: preview(samples=[0, 7])."
            )
        if max(self.count, 0 if self.samples is None else len(self.samples)) > MOST:
            raise ValueError(f"a preview shows {MOST} samples at most, got more. Show fewer.")


@dataclass(frozen=True, slots=True)
class Moment:
    """The epoch whose random parameters are shown, and the process that has it."""

    seed: int
    epoch: int
    sampling_rank: int
    ranks: Ranks


def preview(loader: Loader, pipeline: Pipeline, moment: Moment, wanted: Wanted) -> Image:
    """A contact sheet of samples, each original beside its draws of this and the next epochs."""
    wanted.check()
    loader = _map_style(loader)
    keys = _keys(loader, wanted)
    gpus = [pipeline.device] if pipeline.device.type == "cuda" else []
    # The images are shown, and not what holds them.
    pipeline = pipeline.with_own_state()
    views = [replace(view, head=view.head.listed()) for view in pipeline.views]
    pipeline = replace(pipeline, views=views)
    with torch.random.fork_rng(gpus), trial_draws():
        samples = _read_named(loader.dataset, keys, spread=wanted.samples is None)
        names, repeats = Repeats(loader.dataset).add(keys)
        apply_exif = pipeline.packer.apply_exif
        pairs = zip(samples, keys, strict=True)
        groups = [
            _original(sample, key, loader.dataset, apply_exif, wanted.side) for sample, key in pairs
        ]
        sizes = [group[0].size if group else None for group in groups]
        bare = [number for number, group in enumerate(groups) if not group]
        for epoch in range(moment.epoch, moment.epoch + wanted.draws):
            packer = replace(
                pipeline.packer,
                heads=tuple(view.head for view in views),
                origin=Origin(moment.seed, epoch),
                share=pipeline.packer.share.clone(),
                rank=moment.sampling_rank,
            )
            # Read anew, as a dataset may sample as well.
            again = samples if epoch == moment.epoch else read_samples(loader.dataset, keys)
            read = _Read(again, sizes, Named(names, repeats))
            draws = _draws(loader, pipeline, packer, read, moment.ranks)
            for group, own in zip(groups, draws, strict=True):
                group += own
    for number in bare:  # no original that would say which sample it is
        first = groups[number][0]
        groups[number][0] = first.titled(f"{keys[number]}: {first.title}")
    return contact_sheet(groups, wanted.side)


def _read_named(dataset: Any, keys: Sequence[Key], *, spread: bool) -> list[Sample]:
    """Read samples; a dataset without one of them, whose error may not tell, is named beside it.

    ``spread`` says that the keys were chosen here, as those of a list.
    """
    try:
        return read_samples(dataset, keys)
    except Exception as error:
        size = f" of length {len(dataset)}" if hasattr(dataset, "__len__") else ""
        advice = " Name others, as its sampler does: preview(samples=[key])." if spread else ""
        asked = f"preview asked {type(dataset).__name__}{size} for the samples {keys}."
        error.add_note(asked + advice)
        raise


def _map_style(loader: Loader) -> TorchLoader:
    """The loader, if its dataset gives single samples by their keys."""
    if isinstance(loader, DataLoader) and not is_stream(loader):
        if loader.batch_sampler is not None:
            return loader
        raise ValueError(
            "preview reads single samples, and the DataLoader has batch_size=None, so that its "
            "dataset gives whole batches. Show them yourself: next(iter(loader))."
        )
    raise ValueError(
        "preview needs a DataLoader over a map-style dataset, whose samples can be read without "
        f"an epoch, got {_kind(loader)}. Show some samples of it: DataPrefetcher(DataLoader("
        "[*itertools.islice(dataset, 16)], batch_size=16), transforms=...).preview()."
    )


def _kind(loader: Loader) -> str:
    dataset = getattr(loader, "dataset", None)
    inner = "" if dataset is None else f" over {type(dataset).__name__}"
    return f"{type(loader).__name__}{inner}"


def _keys(loader: TorchLoader, wanted: Wanted) -> list[Key]:
    """The samples to read: those asked for, or some spread evenly over the dataset."""
    if isinstance(wanted.samples, (np.ndarray, torch.Tensor)):  # as a split has them
        return cast("list[Key]", wanted.samples.tolist())
    if wanted.samples is not None:
        return list(wanted.samples)
    length = length_of_dataset(loader)
    if length is None:
        raise ValueError(
            f"{type(loader.dataset).__name__} has no length to choose samples from. Name some, as "
            "its sampler does: preview(samples=[0, 7])."
        )
    if not length:
        raise ValueError("preview shows samples of the dataset, and it has none.")
    count = min(wanted.count, length)
    return [int(key) for key in np.linspace(0, length - 1, count).round()]


# --- Originals ---


def _original(sample: Sample, key: Key, dataset: Any, apply_exif: bool, side: int) -> list[Tile]:
    """The picture that a sample holds, with what stands beside it; none if it holds no picture."""
    image = image_of(sample)
    beside = [_on_host(follower, follower) for follower in walk(sample).followers]
    if isinstance(image, EncodedImage):
        title = f"{key}: {Path(image.path).name}" if image.path else f"{key}"
        try:
            picture, _ = picture_of(_decoded(image, apply_exif), ())
        except ValueError as error:
            return [Tile(None, f"{title} cannot be decoded: {error}")]
        size = (picture.height, picture.width)
        picture.thumbnail((2 * side, 2 * side))  # photos of many megapixels would add up
        return [Tile(picture, f"{title}, {size[1]} x {size[0]}", beside, size)]
    if not _is_image(image):
        return []
    picture, _ = picture_of(image, normalizations_of_dataset(dataset))
    size = (picture.height, picture.width)
    return [Tile(picture, f"{key}: as the dataset gives it", beside, size)]


def _decoded(image: EncodedImage, apply_exif: bool) -> torch.Tensor:
    if image._fault:
        raise ValueError(image._fault)
    return decode_cpu(image.data, apply_exif=apply_exif)


# --- What the loop would get ---


@dataclass(frozen=True, slots=True)
class _Read:
    """The samples that are shown."""

    samples: list[Sample]
    sizes: Sequence[Size | None]  # of the original of each, where it has one
    named: Named


@dataclass(frozen=True, slots=True)
class _Draws:
    """A batch that the stage has made, and what is needed to tell its rows apart."""

    result: Batch
    encoded: Sequence[PreparedImages]
    views: Sequence[View]
    rows: dict[int, int]  # the row of each sample in the result; none of a bad one
    count: int  # rows of the result
    undo: Sequence[Sequence[Constants]]  # for each view
    sizes: Sequence[Size | None]  # of the original of each sample, where it has one

    def group(self, sample: int) -> list[Tile]:
        """The tiles of a sample: one for each view of each of its images."""
        pictures = _pictures(self.result, self.count)
        if not pictures:
            raise _no_pictures(self.result)
        shown = len(self.views) * max(len(self.encoded), 1)
        if sample not in self.rows:
            return [Tile(None, "left out")] * min(shown, len(pictures))
        row = self.rows[sample]
        beside = _beside(self.result, row, self.count)
        tiles = []
        for number, images in enumerate(pictures[:shown]):
            view = number % len(self.views)
            picture, remark = picture_of(images[row], self.undo[view])
            words = self._words(view, sample) if number < len(self.views) else []
            title = ", ".join([*words, remark] if remark else words)
            masks = _stacked_masks(self.result, row, self.count, images[row].shape[-2:])
            title = title or f"{picture.width} x {picture.height}"
            tiles.append(Tile(picture, title, [*masks, *beside]))
        return tiles

    def _words(self, view: int, sample: int) -> list[str]:
        """What was sampled for a sample, as far as that is known."""
        size = self.sizes[sample]
        if size is None or not self.encoded or sample not in (order := _order(self.encoded[0])):
            return []
        images = self.encoded[0]
        position = order.index(sample)
        keys = images.who.keys[position : position + 1]
        head = images.sized([each.head for each in self.views])[view]
        if head.is_given or head.asks_for_boxes:
            return []  # sampled with what is beside the image
        sampling = head.sample([size], head_keys(keys, view))
        words = _words_of_sampling(sampling, size, head)
        if head.size is None:
            return words
        made = (1, 3, *size_at(head.size, position))
        form = torch.empty(made, dtype=head.dtype or torch.float32, device="meta")
        for number, op in enumerate(self.views[view].tail):
            if not isinstance(op, PerImage) or not takes_keys(op):
                continue
            own = op_keys(tail_keys(keys, view), number)
            words += words_of(op.drawn(own, form), 0)
        return words


def _draws(
    loader: TorchLoader,
    pipeline: Pipeline,
    packer: Packer,
    read: _Read,
    ranks: Ranks,
) -> list[list[Tile]]:
    """The tiles of each sample, as one epoch samples for it."""
    apart: list[Apart] = []

    def after(batch: Apart, seed: int) -> Batch:
        apart.append(batch)
        return collate_apart(loader.collate_fn, pipeline.device, batch, seed)

    stage = apart_from_epochs(pipeline, packer, "skip", ranks=replace(ranks, count=1), after=after)
    batch = collated(loader, packer, read.samples, read.named)
    encoded = encoded_leaves(batch)
    views = pipeline.views
    undo = [normalizations(view) for view in views]
    if not encoded:
        views = [view.of_tensors() for view in views]
        before = normalizations_of_dataset(loader.dataset)
        undo = [[*before, *normalizations(view)] for view in views]
    result = carry_out(stage, batch, 0, packer.origin.epoch)
    order = _order(encoded[0]) if encoded else range(len(read.samples))
    bad = {position for leaf in encoded for position in leaf.errors}
    good = [sample for position, sample in enumerate(order) if position not in bad]
    if bad and not good:
        first = min(encoded[0].errors)
        reason = encoded[0].errors[first]
        raise BadImageError(f"no sample can be shown, as {encoded[0].who.name(first)}: {reason}")
    found, count = {place: place for place in range(len(good))}, len(good)
    if apart:
        found, count = _rows(_images_of(apart[0]), result)
    elif not encoded:
        found, count = _rows([*map(image_of, read.samples)], batch)
    rows = {good[place]: row for place, row in found.items()}
    made = _Draws(result, encoded, views, rows, count, undo, read.sizes)
    return [made.group(sample) for sample in range(len(read.samples))]


def _order(images: PreparedImages) -> list[int]:
    """The sample of each image; a collate function that makes images anew keeps the order."""
    return [n if sample < 0 else sample for n, sample in enumerate(images.who.samples)]


def _images_of(apart: Apart) -> list[object]:
    """What a collate function that runs after the transforms has got of each sample's image."""
    images = apart.images
    if len(apart.samples) and select(apart.samples[0], is_place):
        images = images[0]  # of the first view
    return list(images) if isinstance(images, (torch.Tensor, list)) else [None] * len(apart.samples)


def _rows(images: Sequence[object], batch: Batch) -> tuple[dict[int, int], int]:
    """The row of each image in a batch whose collate function may sort them, or leave some out.

    Also how many rows there are. An image that the function has changed is known by its place.
    """
    known: dict[bytes, list[int]] = {}
    for place, image in enumerate(images):
        if isinstance(image, torch.Tensor):
            known.setdefault(_digest(image), []).append(place)
    for leaf in objects(batch, _lists_images):
        if not (_lists_images(leaf) or (isinstance(leaf, torch.Tensor) and leaf.dim() == 4)):
            continue
        same = [known.get(_digest(image), []) for image in leaf]
        found: dict[int, int] = {}
        for row, places in enumerate(same):  # equal images stay in their places
            left = [place for place in places if place not in found]
            if left:
                found[row if row in left else left[0]] = row
        if found:
            changed = [row for row, places in enumerate(same) if not places and row < len(images)]
            return {row: row for row in changed} | found, len(leaf)
    return {place: place for place in range(len(images))}, len(images)


def _digest(image: torch.Tensor) -> bytes:
    values = image.detach().cpu().contiguous().flatten().view(torch.uint8)
    form = f"{image.dtype} {tuple(image.shape)}"
    return hashlib.blake2b(form.encode() + values.numpy().tobytes()).digest()


def _lists_images(node: Batch) -> bool:
    if type(node) not in (list, tuple) or not node:
        return False
    return all(_is_image(leaf) and leaf.dim() == 3 for leaf in node)


def _words_of_sampling(sampling: Sampling, size: Size, head: Head) -> list[str]:
    """The crop and the flips that were sampled for one image of ``size`` (height, width)."""
    step = sampling.step[0]
    box = (sampling.length[0] * np.abs(step)).round().astype(int)
    crops = any(isinstance(op, (RandomCropOp, ResizedCropOp)) for op in head.ops)
    words = []
    if crops and (box < np.array(size)).any():
        height, width = box.tolist()
        words.append(f"crop {width} x {height}")
    if step[1] < 0:
        words.append("flip")
    if step[0] < 0:
        words.append("vertical flip")
    return words


def _is_image(leaf: object) -> bool:
    shown = isinstance(leaf, torch.Tensor) and not is_follower(leaf) and leaf.dim() >= 3
    return shown and leaf.shape[-3] in (1, 3)  # type: ignore[attr-defined]


def _pictures(result: Batch, count: int) -> list[Sequence[torch.Tensor]]:
    """What in a batch holds ``count`` images: tensors ``(N, C, H, W)``, and lists of images."""

    def is_list(node: Any) -> bool:
        return _lists_images(node) and len(node) == count

    found: list[Sequence[torch.Tensor]] = []
    for leaf in objects(result, is_list):
        if is_list(leaf) or (_is_image(leaf) and leaf.dim() == 4 and len(leaf) == count):
            found.append(leaf)
    return found


def _no_pictures(result: Batch) -> ValueError:
    forms = [
        f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
        for leaf in objects(result)
        if isinstance(leaf, torch.Tensor)
    ]
    made = ", ".join(forms[:3]) or type(result).__name__
    return ValueError(
        "preview shows images of one or three channels, one a sample, and the batch has none: "
        f"{made}. Leave out what makes something else of them: "
        "DataPrefetcher(loader, transforms=[...]).preview()."
    )


def _beside(result: Batch, row: int, count: int) -> list[Follower]:
    """Boxes, masks and points of one row of a batch."""
    found: list[Follower] = []
    for leaf in objects(result, partial(is_column, count=count)):
        if is_column(leaf, count=count):
            found += [_on_host(each, each) for each in select(leaf[row], is_follower)]
        elif is_follower(leaf) and leaf.dim() and len(leaf) == count:
            found.append(_on_host(leaf[row], leaf))
    return found


def _stacked_masks(result: Batch, row: int, count: int, size: Sequence[int]) -> list[Follower]:
    """Masks of one row that torch's default collate has stacked, and so made plain tensors."""
    from torchvision import tv_tensors

    kinds = (torch.bool, torch.uint8, torch.int32, torch.int64)
    found: list[Follower] = []
    for leaf in objects(result):
        if type(leaf) is torch.Tensor and leaf.dtype in kinds and leaf.shape == (count, *size):
            mask = leaf[row].cpu()
            if len(mask.unique()) <= MOST_CLASSES:
                found.append(tv_tensors.Mask(mask))
    return found


def _on_host(values: torch.Tensor, like: Follower) -> Follower:
    """Boxes, masks or points on the CPU: torch's own functions lose their type."""
    from torchvision import tv_tensors

    follower: Follower = tv_tensors.wrap(values.cpu(), like=like)
    return follower
