"""parity: a torchvision pipeline and its converted list, side by side on the user's own files."""

import contextlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from gpuprefetch.core.report import Printed, columns, progress
from gpuprefetch.images.apart import image_of
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.header import read_header
from gpuprefetch.lists.forms import PICTURES, Form
from gpuprefetch.lists.walk import FUSED, Plan, convert
from gpuprefetch.migrate.file_tensor import decoded_by_torchvision
from gpuprefetch.migrate.folders import (
    begins_with,
    check_sample,
    encoded_view,
    folders_of,
    pipeline_of,
    takes_several,
)
from gpuprefetch.migrate.taken import opened
from gpuprefetch.migrate.traced import LeftTraced
from gpuprefetch.policies.known import title
from gpuprefetch.policies.per_image import Cast, PerImage
from gpuprefetch.policies.registry import Is, LibraryOp, has
from gpuprefetch.prefetcher import DataPrefetcher
from gpuprefetch.transforms.head import Head, Transform
from gpuprefetch.transforms.random import SeededDraws, fold
from gpuprefetch.transforms.sampling import Sampling

KEPT = 4  # images, for the picture of a report
ENHANCED = 8  # times the difference, in that picture
LABEL = 14  # pixels, the height of its labels
GROUP = 16  # images that are decoded together ...
GROUP_PIXELS = 1 << 24  # ... of this many pixels at most, if there are several
SLICE = 1 << 20  # values that are compared at a time: their levels stay in a core's cache


@dataclass(frozen=True, slots=True)
class ParityRow:
    """Differences of one op, in levels of 255: mean over all pixels, and the largest."""

    name: str  # of the op
    where: str  # it runs now
    mean: float  # of the op alone, on what torchvision made of the image so far
    max: float
    mean_so_far: float  # of all ops up to this one
    max_so_far: float


class _Pair(NamedTuple):
    """The results of one image, in levels, with the mean and the largest difference."""

    mean: float
    path: str
    max: float
    old: torch.Tensor
    new: torch.Tensor


@dataclass(frozen=True, slots=True, repr=False)
class ParityReport(Printed):
    """What :func:`parity` found; print it for a table.

    Attributes:
        count: images compared.
        rows: per op.
    """

    count: int
    rows: list[ParityRow]
    _worst: list[_Pair]

    @property
    def mean(self) -> float:
        """Mean difference of the results, in levels of 255."""
        return self.rows[-1].mean_so_far

    @property
    def worst(self) -> list[tuple[str, float, float]]:
        """(path, mean, max) of the images that differ most, in levels of 255."""
        return [(pair.path, pair.mean, pair.max) for pair in self._worst]

    def as_dict(self) -> dict[str, object]:
        """Everything but the pictures, for JSON."""
        return {"count": self.count, "rows": [*map(asdict, self.rows)], "worst": self.worst}

    def __str__(self) -> str:
        rows: list[list[str]] = [["", "alone: mean", "max", "so far: mean", "max", ""]]
        for row in self.rows:
            numbers = (row.mean, row.max, row.mean_so_far, row.max_so_far)
            rows.append([row.name, *(f"{number:.3f}" for number in numbers), row.where])
        lines = [f"{self.count} images, differences in levels of 255", columns(rows, (1, 2, 3, 4))]
        for path, mean, most in self.worst:
            lines.append(f"worst: {path}: mean {mean:.3f}, max {most:.1f}")
        return "\n".join(lines)

    def picture(self, path: str | Path) -> None:
        """Save the worst images: torchvision's, ours, and the enhanced difference on gray."""
        from PIL import Image, ImageDraw

        pairs = [(p, (p.old, p.new, 127.5 + ENHANCED * (p.new - p.old))) for p in self._worst]
        height, width = self._worst[0].old.shape[1:]
        sheet = Image.new("RGB", (3 * width, LABEL + len(pairs) * (LABEL + height)), "white")
        draw = ImageDraw.Draw(sheet)
        for column, name in enumerate(("torchvision", "gpuprefetch", f"{ENHANCED} x difference")):
            draw.text((column * width + 2, 1), name, "black")
        for row, (pair, tiles) in enumerate(pairs):
            top = LABEL + row * (LABEL + height)
            label = f"{Path(pair.path).name}: mean {pair.mean:.2f}, max {pair.max:.0f} levels"
            draw.text((2, top + 1), label, "black")
            pixels = torch.cat(tiles, 2).clamp(0, 255).byte().expand(3, -1, -1)
            sheet.paste(Image.fromarray(pixels.permute(1, 2, 0).numpy()), (0, top + LABEL))
        sheet.save(path)


def parity(
    loader: DataLoader[Any], n: int = 256, *, device: torch.device | str | None = None
) -> ParityReport:
    """Run a loader's pipeline as it is and as ``accelerate`` moves it, with the same parameters.

    The fused transforms run as in the launch, also where workers would carry them out, who round
    to uint8 as torchvision does. A bar on stderr shows how far it is.

    Args:
        loader: what ``accelerate`` would take; a collate function is left out.
        n: images to compare, spread evenly over the dataset.
        device: as for :class:`DataPrefetcher`.

    Returns:
        Differences per op and the worst images. v1 ops are run as their v2 twins on PIL images.

    Raises:
        ValueError: if ``n`` is less than 1, or the dataset is empty.
        TypeError: for a loader that ``accelerate`` does not take.
        UnsupportedTransformError: for an op that cannot move.
        BadImageError: for a file that cannot be decoded.
    """
    if n < 1:
        raise ValueError(f"n is a number of images, at least 1, got {n!r}.")
    folders = folders_of(loader)
    if takes_several(loader.dataset, may_stay=True):
        raise TypeError(
            "parity compares what becomes of pictures alone, and this transform also gets what is "
            "beside them. accelerate(loader) has compared its first sample with the picture "
            "itself; gpuprefetch.explain(loader) says where each op runs."
        )
    pipeline = pipeline_of(folders)
    opener, ops = opened(pipeline)
    begins = begins_with(loader.dataset)
    form = begins if opener is None else PICTURES
    if (traced := LeftTraced.of_pipeline(pipeline)) is not None:
        paths = [f"transform{path}" for path in traced.pipelines]
        raise TypeError(
            f"parity compares one pipeline, and {title(traced.op)} holds {', '.join(paths)}. Give "
            f"it each in its turn: parity(DataLoader(ImageFolder(root, {paths[0]}), 64))."
        )
    plan = convert(ops, begins=form)
    view = encoded_view(loader.dataset, pipeline, folders, begins)
    check_sample(view, loader.dataset, encoded=True, needed=True)
    if not len(view):
        raise ValueError("parity compares images of a dataset, and it has none.")
    indices = np.linspace(0, len(view) - 1, min(n, len(view))).round().astype(int)
    found: list[list[tuple[float, ...]]] = []
    worst: list[_Pair] = []
    with progress("parity", len(indices)) as bar:
        for images in _groups(image_of(view[int(index)]) for index in indices):
            # On the device by the prefetcher's own way, so that its decoder is compared as well.
            (batch,) = DataPrefetcher([images], device=device, cpu_share=0.0)
            for image, decoded in zip(images, batch, strict=True):
                differences = list[tuple[float, ...]]()
                # The seed is not of the path: the same parameters wherever the files are.
                seed = 1000 * (len(found) + 1)
                for old, alone, new in _walk(plan, _given(image, form), decoded, seed):
                    so_far = _difference(old, new)
                    own = so_far if alone is new else _difference(old, alone)
                    differences.append(own + so_far)
                found.append(differences)
                mean, most = _difference(old, new)
                worst.append(_Pair(mean, image.path, most, old.levels(), new.levels()))
                worst = sorted(worst, key=lambda pair: pair[:2], reverse=True)[:KEPT]
                bar.update(1)
    means = np.mean(found, axis=0)
    means[:, [1, 3]] = np.max(found, axis=0)[:, [1, 3]]
    names = [("decode", ""), *((step.name, step.where) for step in plan.steps)]
    rows = [ParityRow(*name, *row) for name, row in zip(names, means.tolist(), strict=True)]
    return ParityReport(len(found), rows, worst)


def _groups(images: Iterable[EncodedImage]) -> Iterator[list[EncodedImage]]:
    """Images that are decoded together: a few, and of photos of many megapixels one or two."""
    group: list[EncodedImage] = []
    pixels = 0
    for image in images:
        own = 0
        with contextlib.suppress(ValueError):  # a bad file, which the decoder names
            header = read_header(image.data)
            own = header.height * header.width
        if group and (len(group) == GROUP or pixels + own > GROUP_PIXELS):
            yield group
            group = []
            pixels = 0
        group.append(image)
        pixels += own
    yield group


# An image, as torchvision's ops take and give it.
_Image = Any


def _given(image: EncodedImage, begins: Form) -> _Image:
    """What the dataset gives to its transform in the place of an encoded image."""
    from PIL import Image

    if not begins.is_tensor:
        return Image.open(io.BytesIO(image.data)).convert("RGB")
    assert begins.kind is not None, "tensors have a kind"
    return decoded_by_torchvision(image).as_subclass(begins.kind)


@dataclass(frozen=True, slots=True)
class _State:
    """One side of the comparison: an image, and how its values turn into levels of 255.

    An image in [0, 1] that was normalized has the levels ``value * 255 * std + 255 * mean``.
    """

    image: _Image
    slope: torch.Tensor | float | None = None  # None for that of the dtype: 255 or 1
    shift: torch.Tensor | float = 0.0

    @property
    def is_unscaled(self) -> bool:
        """Whether the dtype alone says which levels the values are."""
        return self.slope is None

    def levels(self) -> torch.Tensor:
        return self.levels_of(_tensor(self.image).cpu())

    def levels_of(self, values: torch.Tensor) -> torch.Tensor:
        """The levels of some rows of the image."""
        slope = self.slope
        if slope is None:
            slope = 255.0 if values.is_floating_point() else 1.0
        # PIL's pixels lie as (H, W, C): mixed with (C, H, W), each op would jump through memory.
        floats = values.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        return floats.mul_(slope).add_(self.shift)

    def then(self, op: LibraryOp, image: _Image) -> "_State":
        """This side after torchvision's ``op``, or ours in its place, which made ``image``."""
        name = type(op).__name__
        if name == "Normalize":
            mean, std = (
                torch.tensor(list(values), dtype=torch.float32).view(-1, 1, 1)
                for values in (op.mean, op.std)
            )
            slope = 255.0 if self.slope is None else self.slope
            return _State(image, slope * std, slope * mean + self.shift)
        dtypes = {getattr(each, "dtype", None) for each in (self.image, image)}
        if has(op, Is.CONVERTS) and len(dtypes) > 1:
            return _State(image, 1.0 if getattr(op, "scale", True) is False else None)
        return _State(image, self.slope, self.shift)


def _tensor(image: _Image) -> torch.Tensor:
    from torchvision.transforms.v2 import functional as F

    tensor: torch.Tensor = image if isinstance(image, torch.Tensor) else F.pil_to_tensor(image)
    return tensor


def _difference(old: _State, new: _State) -> tuple[float, float]:
    """The mean and the largest difference, in levels; a few rows of a large photo at a time."""
    if old is new:
        return 0.0, 0.0
    one = torch.atleast_2d(_tensor(old.image).cpu())
    other = torch.atleast_2d(_tensor(new.image).cpu())
    comparable = old.is_unscaled and new.is_unscaled and one.dtype == other.dtype
    if comparable and torch.equal(one, other):
        return 0.0, 0.0
    rows = max(SLICE // max(one[..., :1, :].numel(), 1), 1)
    total = 0.0
    most = 0.0
    for some, others in zip(one.split(rows, -2), other.split(rows, -2), strict=True):
        distance = old.levels_of(some).sub_(new.levels_of(others)).abs_()
        total += float(distance.sum(dtype=torch.float64))
        most = max(most, float(distance.max()))
    return total / one.numel(), most


def _walk(
    plan: Plan, picture: _Image, decoded: torch.Tensor, seed: int
) -> Iterator[tuple[_State, _State, _State]]:
    """Take one file through a plan: of the decoders and then of each op three sides.

    These are torchvision's, our op on the image that torchvision's op was given, and ours.
    """
    head = plan.head
    tail = plan.written[len(head.names) :]
    draws = ((op, fold(fold(seed, [0]), position)) for position, op in enumerate(head.ops))
    sampling = Sampling.identity([decoded.shape[-2:]])
    launch = plain = replace(head, mean=None, std=None)  # until the step that normalizes

    def resampled(launch: Head, image: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        height, width = sampling.length[0].astype(int).tolist()
        return launch.resample([image], sampling.rows(), (height, width))[0]

    def drawn(fn: Transform, image: _Image, seed: int) -> _Image:
        with SeededDraws(seed):
            return fn(image)

    old = _State(picture)
    new = _State(decoded)
    yield old, new, new
    for number, step in enumerate(plan.steps, seed):
        op = step.source
        module = step.module
        before = _tensor(old.image).to(decoded.device)
        if module is None:
            alone = old
            old = old.then(op, op(old.image))
            if step.where == FUSED:  # a conversion, which the launch does
                new = _State(resampled(launch, decoded, sampling))
        elif step.where == FUSED and step.name != "Normalize":
            ours, keys = next(draws)
            own = ours(Sampling.identity([before.shape[-2:]]), keys)
            sampling = ours(sampling, keys)
            alone = old.then(op, resampled(plain, before, own))
            new = new.then(op, resampled(launch, decoded, sampling))
            old = old.then(op, _with_parameters(op, old.image, own))
        else:
            if step.where == FUSED:
                launch = head
            else:
                # Our list may have a change of dtype before it that the pipeline has not.
                while (first := tail.pop(0)) is not module:
                    made = first(new.image[None])[0]
                    new = new.then(first, made) if isinstance(first, Cast) else _State(made)
            if isinstance(module, PerImage):  # sampled once, for both sides
                parts = module.drawn(fold(number, [0]), before)
                alone = old.then(op, module.carry_out(before[None], parts)[0])
                new = new.then(op, module.carry_out(new.image[None], parts)[0])
                old = old.then(op, module.carry_out_one(old.image, parts, 0))
            else:
                alone = old.then(op, drawn(module, before[None], number)[0])
                new = new.then(op, drawn(module, new.image[None], number)[0])
                old = old.then(op, drawn(op, old.image, number))
        yield old, alone, new


def _with_parameters(op: LibraryOp, image: _Image, own: Sampling) -> _Image:
    from torchvision.transforms.v2 import functional as F

    name = type(op).__name__
    parameters: dict[str, object] = {}
    height, width = own.length[0].astype(int).tolist()
    if name == "RandomCrop":
        top, left = own.origin[0].astype(int).tolist()
        old_height, old_width = F.get_size(image)
        after = [max(left + width - old_width, 0), max(top + height - old_height, 0)]
        padding = [max(-left, 0), max(-top, 0), *after]
        parameters = {"needs_pad": any(padding), "padding": padding, "needs_crop": True}
        parameters |= {"top": top + padding[1], "left": left + padding[0]}
        return op.transform(image, parameters | {"height": height, "width": width})
    if name == "RandomZoomOut":
        top, left = (-own.origin[0]).astype(int).tolist()
        old_height, old_width = F.get_size(image)
        after = [width - left - old_width, height - top - old_height]
        padding = [left, top, *after]
        return op.transform(image, {"padding": padding}) if any(padding) else image
    if name in ("RandomResize", "RandomShortestSize", "ScaleJitter"):
        return op.transform(image, {"size": [height, width]})
    if "Flip" in name and not (own.step < 0).any():
        return image
    if name == "RandomResizedCrop":
        top, left = own.low[0].astype(int)
        bottom, right = own.high[0].astype(int)
        parameters = {"top": top, "left": left, "height": bottom - top, "width": right - left}
    return op.transform(image, parameters)
