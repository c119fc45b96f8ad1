"""Ops for PIL images that stand for torchvision's: DINO's by their code, lightly's by their class.

PIL's GaussianBlur is three box blurs and extends the border, and torchvision's is a Gaussian that
mirrors it. Both have one variance, so they differ where neighboring pixels do: see
``test_the_two_blurs_differ_by_as_much`` in tests/test_small_moves.py for by how much.

And what torchvision's own ops do otherwise to PIL images than to tensors.
"""

from __future__ import annotations

import random
import sys
from typing import NamedTuple

import torch
from PIL import ImageFilter, ImageOps

from gpuprefetch.lists.code import is_written_as
from gpuprefetch.policies.known import filter_of, name_of, parts_of
from gpuprefetch.policies.registry import LibraryOp

_BLUR = "PIL's blur is of boxes, which differs most in fine detail"
_GRAY = "gray levels are cut off, and PIL's are rounded"
_HUE = "hues are finer than PIL's, which has 256"
RINGS = "v1 clips bicubic tensors once, and differs by a few levels at sharp edges"
_REACH = 3  # of the kernel, in standard deviations


class Stand(NamedTuple):
    """What stands for an op for PIL images."""

    op: LibraryOp  # torchvision's
    note: str = ""  # what differs
    takes_tensors: bool = False  # whether the op does the same to tensors as to pictures


def stand_for(op: LibraryOp) -> Stand | None:
    """What stands for an op that is known; None for any other."""
    kind = type(op)
    own = getattr(op, "__dict__", {})
    if not callable(op) or isinstance(op, (type, torch.nn.Module)):
        return None
    reads = getattr(kind, "__getattribute__", None)
    if reads is not object.__getattribute__ or any(hasattr(kind, name) for name in own):
        return None
    if is_written_as(kind.__call__, [_blurred]) and own.keys() == _BLURS:
        return _blur((own["radius_min"], own["radius_max"]), own["prob"])
    if is_written_as(kind.__call__, [_solarized]) and own.keys() == {"p"}:
        return _solarize(128, own["p"])
    if is_lightly(op, "gaussian_blur", "GaussianBlur") and own.keys() == {"prob", "sigmas"}:
        return _blur(tuple(own["sigmas"]), own["prob"])
    if is_lightly(op, "solarize", "RandomSolarization") and own.keys() == {"prob", "threshold"}:
        return _solarize(own["threshold"], own["prob"])
    if is_lightly(op, "rotation", "RandomRotate") and own.keys() == {"prob", "angle"}:
        from torchvision.transforms import v2

        turn = v2.RandomRotation((own["angle"], own["angle"]))
        return Stand(v2.RandomApply([turn], p=own["prob"]), takes_tensors=True)
    if is_lightly(op, "rotation", "RandomRotateDegrees") and own.keys() == {"transform"}:
        return Stand(own["transform"], takes_tensors=True)
    return None


def differs_from_pil(op: LibraryOp) -> str:
    """What differs where torchvision's op for tensors stands for its op for pictures."""
    name = name_of(op)
    if name in ("Grayscale", "RandomGrayscale"):
        return _GRAY
    if name in ("ColorJitter", "RandomPhotometricDistort") and op.hue is not None:
        return _HUE
    return next(filter(None, map(differs_from_pil, parts_of(op))), "")


def rings_on_tensors(op: LibraryOp) -> bool:
    """Whether an op resizes uint8 tensors as floats, by the bicubic filter: v1's ops do.

    v2's and PIL's clip to 0 to 255 between rows and columns.
    """
    from torchvision import transforms as v1

    kinds = (v1.Resize, v1.RandomResizedCrop)
    return type(op) in kinds and filter_of(op) == "bicubic"


def is_lightly(op: LibraryOp, module: str, name: str) -> bool:
    """Whether an op is of lightly's class ``name``; lightly need not be there."""
    there = sys.modules.get(f"lightly.transforms.{module}")
    return there is not None and type(op) is getattr(there, name, None)


def _blur(sigma: tuple[float, ...], p: float) -> Stand | None:
    from torchvision.transforms import v2

    low, high = sigma
    if not 0 < low <= high:
        return None
    size = 2 * int(_REACH * high + 1) + 1
    return Stand(v2.RandomApply([v2.GaussianBlur(size, (low, high))], p=p), _BLUR)


def _solarize(threshold: float, p: float) -> Stand:
    from torchvision.transforms import v2

    return Stand(v2.RandomSolarize(threshold, p))


_BLURS = {"prob", "radius_min", "radius_max"}


# How the calls of these classes are written.


def _blurred(self: LibraryOp, picture: LibraryOp) -> LibraryOp:
    chosen = random.random() <= self.prob
    if not chosen:
        return picture
    return picture.filter(
        ImageFilter.GaussianBlur(radius=random.uniform(self.radius_min, self.radius_max))
    )


def _solarized(self: LibraryOp, picture: LibraryOp) -> LibraryOp:
    if random.random() < self.p:
        return ImageOps.solarize(picture)
    return picture
