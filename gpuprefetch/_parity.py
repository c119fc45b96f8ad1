"""parity: a torchvision pipeline and its converted list, side by side on the user's own files."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from gpuprefetch._accelerate import (
    check_loaders,
    folders_of,
    image_of,
    open_picture,
    pipeline_of,
    view_of,
)
from gpuprefetch._convert import CONVERSIONS, Plan, Step, convert
from gpuprefetch._encoded import EncodedImage
from gpuprefetch._per_image import Transform
from gpuprefetch._prefetcher import DataPrefetcher
from gpuprefetch._random import Keys, SeededDraws, fold
from gpuprefetch._resample import resample
from gpuprefetch._transforms import Head, Sampling, read_transforms

# Images that a report keeps for its picture.
KEPT = 4


@dataclass(slots=True)
class ParityRow:
    """Differences of one op, in levels of 255: mean over all pixels, and the largest.

    Attributes:
        name: of the op.
        where: it runs now.
        mean: of the op alone, on what torchvision made of the image so far.
        max: likewise.
        mean_so_far: of all ops up to this one.
        max_so_far: likewise.
    """

    name: str
    where: str
    mean: float = 0.0
    max: float = 0.0
    mean_so_far: float = 0.0
    max_so_far: float = 0.0


@dataclass(order=True, slots=True)
class _Pair:
    mean: float
    path: str
    max: float = field(compare=False)
    old: torch.Tensor = field(compare=False)
    new: torch.Tensor = field(compare=False)


@dataclass(slots=True)
class ParityReport:
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
        return [(pair.path, pair.mean, pair.max) for pair in sorted(self._worst, reverse=True)]

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        lines = [
            f"{self.count} images, differences in levels of 255",
            f"{'':<{width}}  {'op alone':>15}  {'so far':>15}",
            f"{'':<{width}}  {'mean':>7} {'max':>7}  {'mean':>7} {'max':>7}",
        ]
        for row in self.rows:
            alone = f"{row.mean:7.3f} {row.max:7.1f}"
            so_far = f"{row.mean_so_far:7.3f} {row.max_so_far:7.1f}"
            lines.append(f"{row.name:<{width}}  {alone}  {so_far}  {row.where}".rstrip())
        lines += [
            f"worst: {path}: mean {mean:.3f}, max {most:.1f}" for path, mean, most in self.worst
        ]
        return "\n".join(lines)

    def picture(self, path: str | Path) -> None:
        """Save the worst images: torchvision's, ours, and eight times the difference on gray."""
        from torchvision.utils import save_image

        pairs = sorted(self._worst, reverse=True)
        tiles = [t for p in pairs for t in (p.old, p.new, 127.5 + 8 * (p.new - p.old))]
        save_image([tile.clamp(0, 255) / 255 for tile in tiles], path, nrow=3)


def parity(
    loader: DataLoader[Any], n: int = 256, *, device: torch.device | str | None = None
) -> ParityReport:
    """Run a loader's pipeline as it is and as ``accelerate`` moves it, with the same parameters.

    Args:
        loader: what ``accelerate`` would take; a collate function is left out.
        n: images to compare, spread evenly over the dataset.
        device: as for :class:`DataPrefetcher`.

    Returns:
        Differences per op and the worst images. v1 ops are run as their v2 twins on PIL images, and
        ops that the conversion moved behind the crop are compared in their new place.

    Raises:
        TypeError: for a loader that ``accelerate`` does not take.
        UnsupportedTransformError: for an op that cannot move.
    """
    folders = folders_of(loader)
    plan = convert(pipeline_of(folders))
    check_loaders(folders)
    view = view_of(loader.dataset, None)
    files = _Files(view, np.linspace(0, len(view) - 1, min(n, len(view))).round().astype(int))
    comparison = _Comparison(plan)
    for start in range(0, len(files), 16):
        part = [files[i] for i in range(start, min(start + 16, len(files)))]
        for image, decoded in zip(part, _decode(part, device), strict=True):
            comparison.add(image.path, open_picture(folders[0], image.path), decoded)
    return comparison.report()


class _Files(Dataset[EncodedImage]):
    def __init__(self, view: Any, indices: Any) -> None:
        self._view, self._indices = view, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, position: int) -> EncodedImage:
        sample = self._view[int(self._indices[position])]
        image: EncodedImage = image_of(sample)
        return image


def _decode(images: list[EncodedImage], device: Any) -> Iterator[torch.Tensor]:
    # On the device by the prefetcher's own way, so that its decoder is compared as well.
    prefetcher = DataPrefetcher([images], device=device, cpu_share=0.0)
    for decoded in prefetcher:
        yield from decoded


@dataclass(slots=True)
class _State:
    """One side of the comparison: an image, and how its values turn into levels of 255."""

    image: Any
    slope: Any = None
    shift: Any = 0.0

    def levels(self) -> torch.Tensor:
        """``(C, H, W)`` float32 on the CPU."""
        values = _tensor(self.image).cpu()
        slope = self.slope
        if slope is None:
            slope = 255.0 if values.is_floating_point() else 1.0
        levels: torch.Tensor = values.float() * slope + self.shift
        return levels

    def normalized(self, op: Any, image: Any) -> _State:
        mean, std = (torch.tensor(list(v)).view(-1, 1, 1) for v in (op.mean, op.std))
        slope = 255.0 if self.slope is None else self.slope
        return _State(image, slope * std, slope * mean + self.shift)


def _tensor(image: Any) -> torch.Tensor:
    from torchvision.transforms.v2 import functional as F

    tensor: torch.Tensor = image if isinstance(image, torch.Tensor) else F.pil_to_tensor(image)
    return tensor


class _Comparison:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._head, _ = read_transforms(plan.transforms)
        self._rows = [ParityRow("decode", "")]
        self._rows += [ParityRow(step.name, step.where) for step in plan.steps]
        self._count = 0
        self._worst: list[_Pair] = []

    def report(self) -> ParityReport:
        return ParityReport(self._count, self._rows, self._worst)

    def add(self, path: str, picture: Any, decoded: torch.Tensor) -> None:
        """Take one file: as the dataset's loader reads it, and as the prefetcher decoded it."""
        self._count += 1
        old, new = _State(picture), _State(decoded)
        self._note(self._rows[0], old, new, new)
        seed = 1000 * self._count  # not of the path: the same draws wherever the files are
        walk = _Walk(self._head, self._plan.transforms, decoded, fold(seed, [0]))
        for number, (step, row) in enumerate(zip(self._plan.steps, self._rows[1:], strict=True)):
            old, alone, new = walk.step(step, seed + number, old, new)
            self._note(row, old, alone, new)
        mean, top = _difference(old, new)
        pair = _Pair(mean, path, top, old.levels(), new.levels())
        heapq.heappush(self._worst, pair)
        if len(self._worst) > KEPT:
            heapq.heappop(self._worst)

    def _note(self, row: ParityRow, old: _State, alone: _State, new: _State) -> None:
        share = 1 / self._count
        mean, top = _difference(old, alone)
        row.mean += (mean - row.mean) * share
        row.max = max(row.max, top)
        mean, top = _difference(old, new)
        row.mean_so_far += (mean - row.mean_so_far) * share
        row.max_so_far = max(row.max_so_far, top)


def _difference(old: _State, new: _State) -> tuple[float, float]:
    distance = (old.levels() - new.levels()).abs()
    return float(distance.mean()), float(distance.max())


class _Walk:
    """Takes one image through a plan, op by op, on both sides."""

    def __init__(
        self, head: Head, transforms: list[Transform], decoded: torch.Tensor, keys: Keys
    ) -> None:
        self._head, self._decoded, self._keys = head, decoded, keys
        self._position = 0
        self._sampling = Sampling.identity([decoded.shape[-2:]])
        self._tail = list(transforms[len(head.names) :])

    def step(
        self, step: Step, seed: int, old: _State, new: _State
    ) -> tuple[_State, _State, _State]:
        """The old side behind an op, our op on the old side's image, and our side."""
        if step.module is None:
            return _converted(step.source, old, step.source(old.image)), old, new
        if step.where == "fused launch" and step.name != "Normalize":
            return self._fused(step, old)
        if step.where != "fused launch":
            new = self._catch_up(step, new)
        return self._on_batch(step, seed, old, new)

    def _catch_up(self, step: Step, new: _State) -> _State:
        """Run what our list has before this op and the pipeline has not: a change of dtype."""
        while self._tail[0] is not step.module:
            new = _State(self._tail.pop(0)(new.image[None])[0])
        del self._tail[0]
        return new

    def _fused(self, step: Step, old: _State) -> tuple[_State, _State, _State]:
        op, keys = self._head.ops[self._position], fold(self._keys, self._position)
        self._position += 1
        self._sampling = op(self._sampling, keys)
        before = _tensor(old.image).to(self._decoded.device)
        alone = op(Sampling.identity([before.shape[-2:]]), keys)
        image = old.image
        if "Flip" not in step.name or (alone.step < 0).any():
            image = step.source.transform(image, _parameters(step.name, alone, before.shape[-2:]))
        return (
            _State(image),
            _State(self._resample(before, alone)),
            _State(self._resample(self._decoded, self._sampling)),
        )

    def _resample(self, image: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        height, width = sampling.length[0].astype(int).tolist()
        return resample(
            [image],
            sampling.rows(),
            (height, width),
            interpolation=self._head.interpolation,
            antialias=self._head.antialias,
        )[0]

    def _on_batch(
        self, step: Step, seed: int, old: _State, new: _State
    ) -> tuple[_State, _State, _State]:
        before = _tensor(old.image).to(self._decoded.device)
        with SeededDraws(seed):
            image = step.source(old.image)
        results = [image]
        for given in (before, new.image):
            with SeededDraws(seed):
                results.append(step.module(given[None])[0])  # type: ignore[misc]
        if step.name == "Normalize":
            first, second, third = (old.normalized(step.source, result) for result in results)
            return first, second, third
        if step.name in CONVERSIONS:
            states = zip((old, old, new), results, strict=True)
            first, second, third = (_converted(step.source, *pair) for pair in states)
            return first, second, third
        return (
            _State(results[0], old.slope, old.shift),
            _State(results[1], old.slope, old.shift),
            _State(results[2], new.slope, new.shift),
        )


def _converted(op: Any, before: _State, image: Any) -> _State:
    if isinstance(before.image, torch.Tensor) and before.image.dtype == image.dtype:
        return _State(image, before.slope, before.shift)
    return _State(image, 1.0 if getattr(op, "scale", True) is False else None)


def _parameters(name: str, sampling: Sampling, size: Any) -> dict[str, Any]:
    """What a torchvision v2 crop takes, read from where our sampling of a whole image begins."""
    if name == "RandomResizedCrop":
        (top, left), (bottom, right) = sampling.low[0].astype(int), sampling.high[0].astype(int)
        return {"top": top, "left": left, "height": bottom - top, "width": right - left}
    if name != "RandomCrop":
        return {}
    start, length = sampling.origin[0].astype(int), sampling.length[0].astype(int)
    before = np.maximum(-start, 0)
    behind = np.maximum(start + length - np.asarray(size), 0)
    top, left = (start + before).tolist()
    return {
        "needs_crop": True,
        "top": top,
        "left": left,
        "height": int(length[0]),
        "width": int(length[1]),
        "needs_pad": bool(before.any() or behind.any()),
        "padding": [int(before[1]), int(before[0]), int(behind[1]), int(behind[0])],
    }
