"""The arguments of a prefetcher about its batches, as they were given."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NoReturn, TypeAlias, TypedDict

import torch

from gpuprefetch.images.bad import BadImage
from gpuprefetch.images.decode import ImageDecoder
from gpuprefetch.lists.views import Views
from gpuprefetch.transforms.head import Transform
from gpuprefetch.transforms.reference import FLOAT_DTYPES
from gpuprefetch.transforms.results import FORMS, ResultForm

DecoderName: TypeAlias = Literal["auto", "nvjpeg", "torchvision", "cpu"]
Results: TypeAlias = Literal["list", "padded", "stack"] | ResultForm
OnError: TypeAlias = Literal["raise", "skip", "replace"] | Callable[[BadImage], object]


class Keywords(TypedDict, total=False):
    """The keyword arguments of a DataPrefetcher, for functions that pass them on.

    Type checkers and editors know the names and the values by it.
    """

    device: torch.device | str | int | None
    transforms: Sequence[Transform] | Views | Transform | None
    dtype: torch.dtype | None
    memory_format: torch.memory_format | None
    device_prefetch_size: int | None
    decoder: DecoderName | ImageDecoder
    apply_exif: bool
    cpu_share: float | Literal["auto"]
    seed: int | None
    on_error: OnError
    max_bad: int | None
    memory_budget: str | int | None
    results: Results | None


@dataclass(frozen=True)
class Options:
    """See :class:`gpuprefetch.DataPrefetcher`, whose arguments have the same names and order."""

    transforms: Sequence[Transform] | Views | Transform | None = None
    dtype: torch.dtype | None = None
    memory_format: torch.memory_format | None = None
    device_prefetch_size: int | None = None
    decoder: DecoderName | ImageDecoder = "auto"
    apply_exif: bool = False
    cpu_share: float | Literal["auto"] = "auto"
    seed: int | None = None
    on_error: OnError = "raise"
    max_bad: int | None = None
    memory_budget: str | int | None = None
    results: Results | None = None

    def given(self) -> Iterator[tuple[str, object]]:
        """Name and value of what is not the default."""
        for option in fields(self):
            value = getattr(self, option.name)
            if value not in (None, "auto", "raise") and value is not False:
                yield option.name, value

    @property
    def given_seed(self) -> int | None:
        """The seed in 0 to 2**64 - 1; None where the epoch's beginning says it."""
        return None if self.seed is None else operator.index(self.seed) % 2**64

    @property
    def form(self) -> ResultForm | None:
        """What a batch of images becomes; None where the transforms say it."""
        return FORMS[self.results] if isinstance(self.results, str) else self.results

    def check(self) -> None:
        """Refuse what is out of range."""
        depth = self.device_prefetch_size
        if depth is not None and (not isinstance(depth, int) or depth < 1):
            self._refuse("device_prefetch_size", "is in batches, 1 or more, or None")
        if self.dtype not in (None, torch.uint8, *FLOAT_DTYPES):
            self._refuse("dtype", "must be torch.uint8 or a floating-point one of 16 bits or more")
        if self.memory_format not in (None, torch.contiguous_format, torch.channels_last):
            self._refuse("memory_format", "is torch.contiguous_format or torch.channels_last")
        if not callable(self.on_error) and self.on_error not in ("raise", "skip", "replace"):
            self._refuse("on_error", 'must be "raise", "skip", "replace" or a callable')
        if self.max_bad is not None and (not isinstance(self.max_bad, int) or self.max_bad < 0):
            self._refuse("max_bad", "is a number of images, or None")
        if self.max_bad and self.on_error == "raise":
            self._refuse(
                "max_bad",
                'is for on_error="skip", "replace" or a callable, and on_error is "raise"',
            )
        if self.apply_exif not in (True, False):
            self._refuse("apply_exif", "must be True or False")
        if self.seed is not None and not hasattr(self.seed, "__index__"):
            self._refuse("seed", "is an int, or None")
        if not isinstance(self.results, ResultForm) and self.results not in (None, *FORMS):
            names = ", ".join(f'"{name}"' for name in FORMS)
            self._refuse("results", f"is one of {names}, a Padding, or None")
        share = self.cpu_share
        if share != "auto" and not (isinstance(share, (int, float)) and 0 <= share <= 1):
            self._refuse("cpu_share", 'is a share of the images, 0.0 to 1.0, or "auto"')

    def _refuse(self, name: str, accepted: str) -> NoReturn:
        raise ValueError(f"{name} {accepted}, got {getattr(self, name)!r}.")
