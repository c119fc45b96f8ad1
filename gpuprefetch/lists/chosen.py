"""Crops of the user's that are torchvision's, but for ``get_params``, which chooses the part.

The class may do anything in that method, so the method runs in the worker, for each image, with a
stand-in that has a size and no pixels. All else must be torchvision's own::

    class Crop(transforms.RandomResizedCrop):
        @staticmethod
        def get_params(img, scale, ratio):      # called with the stand-in and the crop's ranges
            return i, j, h, w                   # checked, and cut out by the fused launch
"""

from __future__ import annotations

import operator
from typing import NoReturn

from gpuprefetch.core.errors import add_note
from gpuprefetch.policies.known import title
from gpuprefetch.policies.registry import LibraryOp
from gpuprefetch.transforms.random import SeededDraws, owns_generators, seeded_everywhere
from gpuprefetch.transforms.sampling import Box

# What a class may have of its own under a name that torchvision's class has, too.
_OWN = {"__annotate__", "__annotate_func__", "__init__", "__repr__", "extra_repr", "get_params"}
# What torchvision's methods read of an object.
_READ = {
    "RandomResizedCrop": {"size", "interpolation", "antialias", "scale", "ratio"},
    "RandomCrop": {"size", "padding", "pad_if_needed", "fill", "padding_mode"},
}
_SAME = (
    "Take torchvision's own crop, or let the workers decode and run everything up to it: "
    "accelerate(loader, keep_unknown=True)."
)


def base_of_chosen(op: LibraryOp) -> LibraryOp | None:
    """The crop of torchvision with the state of one that has its own ``get_params``; else None."""
    from torchvision import transforms as v1

    for base in (v1.RandomResizedCrop, v1.RandomCrop):
        kind = type(op)
        if kind is base or not isinstance(op, base):
            continue
        kinds = kind.__mro__[: kind.__mro__.index(base)]
        read = _READ[base.__name__]
        own = {name for each in kinds for name in vars(each) if _changes(base, each, name)}
        hooked = op._forward_hooks or op._forward_pre_hooks
        changed = own - _OWN or {"forward", "get_params"} & {*vars(op)} or hooked
        if "get_params" not in own or changed or not read <= {*vars(op)}:
            return None
        plain = base.__new__(base)
        vars(plain).update(vars(op))
        return plain
    return None


def _changes(base: type, kind: type, name: str) -> bool:
    """Whether what a derived class has under a name may change what ``base`` does."""
    if name in _READ[base.__name__]:
        return True
    values = name.startswith("__") and not callable(vars(kind)[name])  # as __doc__
    return hasattr(base, name) and not values


class PictureSize:
    """A picture of which nothing but the size is known.

    Args:
        height: in pixels.
        width: in pixels.
        op: which chooses a part of it, for messages.
    """

    def __init__(self, height: int, width: int, op: LibraryOp) -> None:
        self.size = (width, height)
        self.width = width
        self.height = height
        self.mode = "RGB"
        self._op = op

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance() goes by
        from PIL import Image

        return Image.Image

    def getbands(self) -> tuple[str, ...]:
        return "R", "G", "B"

    def __array__(self, *args: object, **named: object) -> NoReturn:
        self._refuse("its pixels")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse(f".{name}")

    def _refuse(self, what: str) -> NoReturn:
        raise AttributeError(
            f"{title(self._op)}.get_params reads {what} of a picture, which is not "
            f"decoded yet. It may read the size. {_SAME}"
        )


class Chooser:
    """Calls the ``get_params`` of a crop for a picture of a size.

    Args:
        op: the user's crop.
        names: of its attributes that the method gets.
    """

    def __init__(self, op: LibraryOp, names: tuple[str, ...]) -> None:
        self._op = op
        self._names = names

    def __call__(self, seed: int, height: int, width: int) -> Box:
        """Top, left, height and width of the part, all within the picture.

        What the method samples depends on ``seed``. In a worker process that is so for torch, NumPy
        and Python's ``random``. Elsewhere a seed for NumPy and Python would also be one for other
        threads, so the method may sample from torch alone: called twice, it must choose one part.

        Raises:
            ValueError: if the method gives anything else, or chooses another part without a worker.
        """
        if owns_generators():
            with seeded_everywhere(seed):
                return self._part(height, width)
        with SeededDraws(seed):
            part = self._part(height, width)
        with SeededDraws(seed):
            again = self._part(height, width)
        if part != again:
            raise ValueError(
                f"{title(self._op)}.get_params chose {part} of a picture of {height} x {width}, "
                f"and then {again} with the same random numbers of torch. It takes numbers from "
                "NumPy or Python's random, which are your loop's here, or counts its calls. Sample "
                "from torch, torch.randint(low, high, ()).item(), or read with workers, "
                "DataLoader(..., num_workers=1). preview() and replay() have none."
            )
        return part

    def _part(self, height: int, width: int) -> Box:
        picture = PictureSize(height, width, self._op)
        given = [getattr(self._op, name) for name in self._names]
        try:
            made = self._op.get_params(picture, *given)
        except Exception as error:
            add_note(error, f"raised by {title(self._op)}.get_params, for {height} x {width}")
            raise
        try:
            top, left, h, w = map(operator.index, made)
        except (TypeError, ValueError):
            self._refuse(made, height, width)
        if min(top, left) < 0 or min(h, w) < 1 or top + h > height or left + w > width:
            self._refuse(made, height, width)
        return top, left, h, w

    def _refuse(self, made: object, height: int, width: int) -> NoReturn:
        raise ValueError(
            f"{title(self._op)}.get_params gives (top, left, height, width) in whole pixels within "
            f"a picture, here of {height} x {width}, and gave {made!r}. {_SAME}"
        )
