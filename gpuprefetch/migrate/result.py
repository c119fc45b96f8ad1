"""What stands for a dataset's transform, which runs on the device, and for what it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import numpy as np
import torch

from gpuprefetch.core.nested import Leaf, Sample, map_leaves, select
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.guard import Encoded, Messages, UndecodedError, is_marked
from gpuprefetch.images.joint import Promised, state_of
from gpuprefetch.images.places import ViewPlace
from gpuprefetch.images.ppm import to_ppm
from gpuprefetch.images.recorded import Joint
from gpuprefetch.migrate.file_tensor import FileTensor
from gpuprefetch.migrate.picture import Picture
from gpuprefetch.migrate.sample import current
from gpuprefetch.migrate.taken import Takes, form_of
from gpuprefetch.migrate.ways import NO_PICTURE, SEEDED


class Unusable(Encoded):
    """What a transform would have given: nothing can be done to it but to pass it on."""

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance() goes by
        return torch.Tensor

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_use(f".{name}")

    def __array__(self, *args: object, **named: object) -> NoReturn:
        _refuse_use("NumPy")

    @classmethod
    def __torch_function__(cls, *call: object, **named: object) -> NoReturn:
        _refuse_use("a function of torch")

    def __eq__(self, other: object) -> bool:
        if other is not None:  # which a tensor may be compared with, too
            _refuse_use("==")
        return False

    __hash__ = object.__hash__

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # A file of it would be read in the place of an image.
        _refuse_use("copy or pickle")


def _refuse_use(name: str) -> NoReturn:
    raise UndecodedError(
        f"what the transform gave is used in __getitem__, by {name}, and it is not transformed "
        "yet. Put that into the transform, or do it to the batch in the loop."
    )


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Unusable, *others: object) -> NoReturn:
        _refuse_use(name)

    return refuse


_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
_OTHERS = "lt le gt ge neg pos abs invert len iter getitem setitem bool float int".split()
for _name in [f"{kind}{op}" for op in _ARITHMETIC for kind in ("", "r", "i")] + _OTHERS:
    setattr(Unusable, f"__{_name}__", _refusing(f"__{_name}__"))


class Result(Unusable, EncodedImage):
    """What a transform gave for a picture, until the sample has left its dataset."""

    __slots__ = ()

    @staticmethod
    def of(file: EncodedImage) -> Result:
        result = Result(file.data, file.index, file.path)
        result._know(file)
        # Each call of a transform samples anew, so the images of a sample are sampled one by one.
        result._set_apart()
        return result


class LaterView(Unusable, ViewPlace):
    """A view that a transform gave beside its :class:`Result`, until the sample has left."""

    __slots__ = ()


def note_result(result: Result | LaterView) -> None:
    """Note what a transform gave: the sample has to hold it."""
    if current.results is None:
        return
    current.results.append(result)
    if len(current.results) > 1 and current.is_seeded_anew:
        raise UndecodedError(
            "torch's seed is set between the images of a sample, so that they are sampled alike. "
            f"{SEEDED}"
        )


def has_result() -> bool:
    """Whether a transform has given something for this sample."""
    return bool(current.results)


# What each picture whose pixels are handed on shows of why: what was done with its file, or "".
decodes = Messages()


class LeftEncoded:
    """Stands for a transform that runs on the device.

    Args:
        takes: what the transform takes.
        transform: itself, if it also takes what is beside the picture: the workers run it then.
    """

    def __init__(self, takes: Takes, transform: Callable[..., object] | None = None) -> None:
        self.takes = takes
        self.transform = transform

    def __call__(self, *given: object, **named: object) -> object:
        if self.transform is not None and len(given) > 1 and not named:
            return self._put_off(self.transform, given)
        result = Result.of(self._image_of(only_argument(given, named)))
        note_result(result)
        return result

    def _put_off(
        self, transform: Callable[..., object], given: tuple[object, ...]
    ) -> tuple[object, ...]:
        """What stands for the results of a transform of a picture and what is beside it."""
        first = given[0]
        others = tuple(map_stand_ins(real_tensor, [*given[1:]], (FileTensor,)))
        kind = form_of(first).kind
        result = Result.of(self._image_of(first))
        is_pure = kind is torch.Tensor
        result._put_off(Joint(transform, others, kind is not None, is_pure, state_of(others)))
        note_result(result)
        return result, *(Promised(result, number) for number in range(len(others)))

    def _image_of(self, given: object) -> EncodedImage:
        """The file of a picture that nothing has touched, and else one of its pixels."""
        if type(given) in (Result, LaterView):
            raise UndecodedError("the transform is called with what it has given already.")
        if isinstance(given, Encoded) and type(given) is not Picture:
            raise UndecodedError(
                "the transform is called with an EncodedImage. Pass transforms to DataPrefetcher."
            )
        if isinstance(given, FileTensor):
            return self._file_of(given)
        if type(given) is not Picture:
            name = "an image" if isinstance(given, torch.Tensor) else "a picture"
            return self._decoded(given, name, current.latest_use())
        if given.reaches("transform").touched or self.takes.opener is not None:
            return self._decoded(given.as_read(), given.name, given.use, given.path)
        return given.left_encoded(self.takes)

    def _file_of(self, given: FileTensor) -> EncodedImage:
        """The file of a tensor that nothing has touched, and else one of its pixels."""
        read = given.read
        if (file := read.left_encoded(self.takes)) is not None:
            return file
        return self._decoded(read.pixels(), read.name, read.use, read.path)

    def stand_in_for(self, given: object) -> Picture | FileTensor:
        """What stands for a file that nothing has touched: of the pixels of what is given."""
        if type(given) is Picture and not given.reaches("transform").touched:
            return given
        if type(given) is FileTensor and given.read.left_encoded(self.takes) is not None:
            return given
        file = self._image_of(given)
        if isinstance(given, torch.Tensor):
            return FileTensor.of_file(file)
        return Picture(file, is_rgb=True)

    def _decoded(self, given: object, name: str, use: str, path: str = "") -> EncodedImage:
        """A file of the pixels of what the transform gets."""
        pixels = self.takes.pixels_of(given, name)
        if pixels is None:
            raise UndecodedError(f"the transform gets a {_described(given)}. {NO_PICTURE}")
        decodes.add(use)
        return EncodedImage(to_ppm(pixels), current.index, path)


def only_argument(given: Sequence[object], named: Mapping[str, object]) -> object:
    """What a transform is called with, and nothing else."""
    if len(given) != 1 or named:
        raise UndecodedError(
            f"the transform is called with {len(given) + len(named)} arguments, and not with "
            "one picture."
        )
    return given[0]


def _described(given: object) -> str:
    """What the transform gets, in words, where that is no picture."""
    kind = type(given)
    name = f"{kind.__module__}.{kind.__name__}".removeprefix("builtins.")
    if not isinstance(given, (np.ndarray, torch.Tensor)):
        return name
    place = ""
    if isinstance(given, torch.Tensor) and given.device.type != "cpu":
        place = f" on {given.device}"
    return f"{name} of {given.dtype} {tuple(given.shape)}{place}"


def map_stand_ins(fn: Callable[[Leaf], Leaf], sample: Sample, kinds: tuple[type, ...]) -> Sample:
    """A sample with ``fn`` applied to its leaves; the same one if it has none of these kinds."""
    if not any(type(leaf) in kinds for leaf in select(sample, _is_not_real)):
        return sample
    return map_leaves(fn, sample, _is_not_real)


def _is_not_real(leaf: Leaf) -> bool:
    return is_marked(leaf) or type(leaf) is FileTensor


def real_tensor(leaf: Leaf) -> Leaf:
    """The pixels of a tensor that has none yet, and anything else as it is."""
    return leaf.read.pixels() if type(leaf) is FileTensor else leaf
