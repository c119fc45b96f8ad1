"""Random transforms on a batch, sampled for each image.

torchvision v2 samples once per call, so a batch would share the result. :class:`PerImage` compiles
transforms to slots, in which each image has its own op, and runs a launch per slot.
What has no such form goes through :class:`Loop`, image by image.
"""

import contextlib
import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import get_worker_info

from gpuprefetch.core.nested import map_leaves
from gpuprefetch.core.ranks import rank
from gpuprefetch.policies.compile import compiled
from gpuprefetch.policies.each import Each
from gpuprefetch.policies.known import (
    UnsupportedTransformError,
    constants,
    flatten,
    name_of,
    samples_once,
    title,
    twin,
)
from gpuprefetch.policies.ops_launch import Layout, lay_out
from gpuprefetch.policies.program import Finish, Program, Share
from gpuprefetch.policies.registry import Is, LibraryOp, has
from gpuprefetch.policies.run import apply_one, run
from gpuprefetch.policies.slots import Mix, Picture, Slots, program_of
from gpuprefetch.transforms.head import Transform as Transform
from gpuprefetch.transforms.random import Keys, SeededDraws, derive, fold, uniform


class ToUint8(torch.nn.Module):
    """[0, 1] to 0..255, rounded as PIL rounds when it resizes; uint8 passes through."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.dtype == torch.uint8:
            return images
        return (images * 255).round_().clamp_(0, 255).to(torch.uint8)


class ToFloat(torch.nn.Module):
    """0..255 to [0, 1] in float32; floating point passes through."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images if images.is_floating_point() else images.float() / 255


@dataclass(frozen=True, slots=True)
class Cast:
    """The dtype and memory format that the loop asked for, at the end of the list."""

    dtype: torch.dtype | None
    memory_format: torch.memory_format | None

    @property
    def leaves_all(self) -> bool:
        return self.dtype is None and self.memory_format is None

    def __call__(self, images: Any) -> Any:
        """The images with values as they are; of several outputs, those in floating point."""

        def cast(leaf: Any) -> Any:
            is_tensor = isinstance(leaf, torch.Tensor)
            if not is_tensor or not (leaf is images or leaf.is_floating_point()):
                return leaf
            if self.dtype == torch.uint8 and leaf.is_floating_point():
                raise ValueError(
                    "dtype=torch.uint8 is for values of 0 to 255, and the pipeline gives floating "
                    "point. Leave its conversion to that out, or dtype."
                )
            memory_format = self.memory_format if leaf.dim() == 4 else None
            return leaf.to(dtype=self.dtype, memory_format=memory_format)

        return map_leaves(cast, images)


_AS_IT_IS = Cast(None, None)
_AUXILIARY = (ToUint8, ToFloat, Cast)  # what lists put between the ops of the user


@dataclass(frozen=True, slots=True)
class Recipe:
    """What transforms one after the other are compiled to."""

    ops: tuple[LibraryOp, ...] = ()
    steps: tuple[Slots | Mix, ...] = ()
    before: Transform | None = None  # of the first op: ToUint8, ToFloat or torchvision's conversion
    scaled: bool = False  # to floating point, that of uint8 in [0, 1] ...
    exactly: bool = False  # ... to float32, floating point as well
    normalize: tuple[list[float], list[float]] | None = None  # mean and std
    finals: tuple[Slots, ...] = ()  # run after that
    cast: Cast = _AS_IT_IS

    def then(self, op: LibraryOp) -> Self | None:
        """The recipe with one more transform; None where it is not for one program."""
        longer = replace(self, ops=(*self.ops, op))
        if isinstance(op, Cast):
            fits = op.dtype is None or (self.scaled and op.dtype.is_floating_point)
            return replace(longer, cast=op) if fits else None
        if isinstance(op, ToUint8):
            return None if self.ops else replace(longer, before=op)
        conversion = _is_of_dtypes(op) and getattr(op, "scale", True)
        if isinstance(op, ToFloat) or (conversion and op.dtype == torch.float32):
            if self.normalize is not None and not self.scaled:
                return None
            before = self.before if self.ops else op
            return replace(longer, before=before, scaled=True, exactly=self.exactly or conversion)
        if (found := constants(op)) is not None:
            always = float(getattr(op, "p", 1.0)) == 1.0
            takes = self.normalize is None and not self.finals and always
            return replace(longer, normalize=found) if takes else None
        if (slots := compiled(op)) is None:
            return None
        converted = self.scaled and self.steps and isinstance(self.before, ToUint8 | None)
        if self.normalize is None and not converted:
            return replace(longer, steps=(*self.steps, slots))
        if isinstance(slots, Mix) or name_of(twin(op)) != "RandomErasing":
            return None
        return replace(longer, finals=(*self.finals, slots))

    def begin(self, images: torch.Tensor) -> torch.Tensor:
        if images.shape[1] == 1 and any(name_of(op) == "Grayscale" for op in self.ops):
            images = images.expand(-1, 3, -1, -1)  # Grayscale(3) gives three channels of one
        return images if self.before is None else self.before(images)

    def finish(self, images: torch.Tensor) -> Finish:
        if self.normalize is not None and not self.scaled:
            refuse_integers(images)
        converts = self.exactly or (self.scaled and not images.is_floating_point())
        floats = torch.float32 if converts else None
        mean, std = self.normalize or (None, None)
        return Finish(mean, std, self.cast.dtype or floats, self.cast.memory_format)


def _is_of_dtypes(op: LibraryOp) -> bool:
    """Whether an op of torchvision's converts between dtypes, and not from PIL images."""
    return name_of(op) is not None and has(op, Is.CONVERTS) and has(op, Is.BATCHES)


def _compiled(transform: LibraryOp) -> Recipe:
    recipe = Recipe()
    for op in flatten(transform):
        longer = recipe if has(op, Is.DOES_NOTHING) else recipe.then(op)
        if longer is None:
            raise UnsupportedTransformError(_why_not(op, recipe))
        recipe = longer
    return recipe


class PerImage(torch.nn.Module):
    """Random transforms of torchvision or timm on a batch, sampled for each image.

    What is sampled has torchvision's (timm's) distribution, and the result its shape, dtype and
    range. The batch is transformed on its own device: on CUDA in a launch or two, whatever is
    sampled, on the CPU by torchvision's functions, some of them written anew for ``uint8``.

    Args:
        transform: RandAugment, TrivialAugmentWide, AutoAugment, AugMix, ColorJitter,
            RandomErasing, RandomAffine or another random transform that keeps the size of images;
            RandomApply, RandomChoice, RandomOrder, ``Compose`` or a list of them; timm's
            RandAugment, AutoAugment and AugMix. A conversion to float32 in [0, 1] may come before
            or after them, then ``Normalize`` and RandomErasing.
        seed: of what is sampled. The default is torch's generator. With a seed each call has the
            next numbers of one sequence, whose place is in the ``state_dict``. The sequence
            also depends on the rank and, in the worker of a loader, on that worker's seed. In a
            prefetcher's list leave it out: what is sampled depends on the prefetcher's seed there.

    Raises:
        UnsupportedTransformError: for a transform that has no such form.

    Example:
        >>> augment = gpuprefetch.PerImage(v2.RandAugment())
        >>> images = augment(images)  # (N, 3, H, W) uint8, on the GPU
    """

    def __init__(self, transform: LibraryOp, *, seed: int | None = None) -> None:
        super().__init__()
        self.op = transform
        self.seed = seed
        self.calls = 0
        self.recipe = _compiled(transform)

    @property
    def __name__(self) -> str:
        ops = (op for op in self.recipe.ops if not isinstance(op, _AUXILIARY))
        return ", ".join(map(title, ops))

    @property
    def slots(self) -> int:
        steps = (*self.recipe.steps, *self.recipe.finals)
        return sum(s.chain.size if isinstance(s, Mix) else s.size for s in steps)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"recipe": None}  # which is compiled anew

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.recipe = _compiled(self.op)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def extra_repr(self) -> str:
        return f"{self.op!r}" + ("" if self.seed is None else f", seed={self.seed}")

    def forward(self, images: torch.Tensor, keys: Keys | None = None) -> torch.Tensor:
        """Transform a batch.

        Args:
            images: ``(N, C, H, W)``, C of 1 or 3, uint8 or in [0, 1] in floating point, on the
                CPU or CUDA; left untouched.
            keys: ``(N,)`` uint64 that each image is sampled from. None, the
                default, makes them from torch's generator or from ``seed``.

        Returns:
            ``(N, C, H, W)`` of the same dtype, or what a conversion or Normalize makes of it.

        Raises:
            TypeError: for anything else.
        """
        if torch.compiler.is_compiling():  # a decorator would load the compiler with this module
            eager = torch.compiler.disable(PerImage._eager)
            return eager(self, images, keys)  # type: ignore[no-any-return]
        return self._eager(images, keys)

    def _eager(self, images: torch.Tensor, keys: Keys | None) -> torch.Tensor:
        _check(images)
        return self.carry_out(images, self.draw(images, keys))

    def key(self) -> Keys | int:
        if self.seed is None:
            return int(torch.randint(2**62, (), device="cpu"))
        worker = get_worker_info()  # in a loader's, where all would sample the same
        seed = self.seed if worker is None else fold(self.seed, worker.seed)
        if (number := rank()) > 0:
            seed = fold(seed, -number)
        self.calls += 1
        return fold(seed, self.calls - 1)

    def draw(self, images: torch.Tensor, keys: Keys | None = None) -> list[Program]:
        if keys is None:
            keys = fold(self.key(), np.arange(len(images)))
        return self.drawn(keys, images)

    def drawn(self, keys: Keys, images: torch.Tensor) -> list[Program]:
        """What is done to images with these ``(N,)`` keys."""
        channels, height, width = images.shape[-3:]
        before = self.recipe.before
        floats = not isinstance(before, ToUint8) if before else images.is_floating_point()
        picture = Picture(height, width, channels, 1.0 if floats else 255.0)
        programs: list[Program] = []
        row: list[Slots] = []
        for number, step in enumerate(self.recipe.steps):
            if not isinstance(step, Mix):
                row.append(step)
                continue
            programs += [program_of(row, fold(keys, -1 - number), picture)] if row else []
            programs.append(step.sample(fold(keys, number), picture))
            row = []
        return [*programs, program_of(row, keys, picture, self.recipe.finals)]

    def carry_out(
        self, images: torch.Tensor, drawn: "Sequence[Program | Layout]", share: Share | None = None
    ) -> torch.Tensor:
        """Carry out what :meth:`draw` has sampled; ``share`` as for :func:`.run.run`."""
        images = self.recipe.begin(images)
        for program in drawn[:-1]:
            images = run(images, program)
        return run(images, drawn[-1], self.recipe.finish(images), share)

    def lay_out(self, images: torch.Tensor, drawn: Sequence[Program]) -> "list[Layout]":
        """The same for the kernels, whatever the device is; the images may be on "meta"."""
        images = self.recipe.begin(images)
        laid = [lay_out(images, program) for program in drawn[:-1]]
        return [*laid, lay_out(images, drawn[-1], self.recipe.finish(images))]

    def carry_out_one(self, sample: Any, drawn: Sequence[Program], row: int) -> Any:
        """Do to an image, boxes, masks or points what they say, without conversions."""
        for program in drawn:
            sample = apply_one(sample, program, row)
        return apply_one(sample, drawn[-1], row, finals=True)


def refuse_integers(images: torch.Tensor) -> None:
    if not images.is_floating_point():
        raise TypeError(
            f"Normalize takes floating point, and {images.dtype} reaches it. Put "
            "v2.ToDtype(torch.float32, scale=True) before it, and leave dtype=torch.uint8 out."
        )


def _check(images: object) -> None:
    if not isinstance(images, torch.Tensor):
        raise TypeError(
            f"PerImage takes a batch of images as a tensor (N, C, H, W), got "
            f"{type(images).__name__}. Call it after the DataLoader, or as "
            "PerImage(...)(image[None])[0] on one image."
        )
    kinds = images.dtype == torch.uint8 or images.is_floating_point()
    if images.dim() != 4 or images.shape[1] not in (1, 3) or not kinds:
        raise TypeError(
            "PerImage takes (N, C, H, W) with 1 or 3 channels, uint8 or floating point in [0, 1], "
            f"got {images.dtype} {tuple(images.shape)}. {_what_to_do_with(images)}"
        )
    if images.requires_grad:
        raise TypeError("PerImage gives no gradient of its images. Call it on images.detach().")


def _what_to_do_with(images: torch.Tensor) -> str:
    """What to write in place of images that are none of PerImage's."""
    if images.dim() != 4:
        return "Add a dimension to one image: image[None]."
    if images.shape[1] in (1, 3):
        return "Convert them: images.to(torch.uint8), or to floating point in [0, 1]."
    if images.shape[-1] in (1, 3):
        return "Bring them to (N, C, H, W): images.permute(0, 3, 1, 2)."
    return (
        "For other channels take kornia's op, as in K.RandomHorizontalFlip(), or call this one for "
        "each image, from a function: lambda images: torch.stack([op(image) for image in images])."
    )


def _why_not(op: LibraryOp, recipe: Recipe) -> str:
    name = type(op).__name__
    after = " after Normalize or a conversion, where only RandomErasing may stand"
    if compiled(op) is not None:
        return f"{name} comes{after}. Put it before that."
    return (
        f"PerImage has no form of {name} for a batch{after if recipe.normalize else ''}. It takes "
        "torchvision's and timm's own random transforms that keep the size of images: see "
        "docs/transforms.md. Call others image by image: torch.stack([op(i) for i in images])."
    )


def grouped(transforms: Iterable[Transform]) -> list[Transform]:
    """The list with each run of transforms that one program carries out in one PerImage."""
    done: list[Transform] = []
    recipe = Recipe()
    for transform in transforms:
        each: tuple[Transform, ...] = (transform,)
        if isinstance(transform, PerImage) and transform.seed is None:
            each = transform.recipe.ops
        for op in each:
            if (longer := recipe.then(op)) is None:
                done += _of_recipe(recipe)
                longer = Recipe().then(op)
            if longer is None:
                done.append(op)
            recipe = longer or Recipe()
    return done + _of_recipe(recipe)


def _of_recipe(recipe: Recipe) -> list[Transform]:
    samples = any(samples_once(op) for op in recipe.ops if compiled(op) is not None)
    return [PerImage(recipe.ops)] if samples else [*recipe.ops]


class Loop(torch.nn.Module):
    """One call per image; shape, dtype and range are what torchvision makes of them."""

    def __init__(self, op: LibraryOp) -> None:
        super().__init__()
        self.op = copy.copy(op)
        self.__name__ = type(op).__name__

    def forward(self, images: torch.Tensor, keys: Keys | None = None) -> torch.Tensor:
        """Call the op on each of ``(N, C, H, W)``; with ``keys`` each samples from its own."""
        seeds = [None] * len(images) if keys is None else [derive(key, 0) for key in keys]
        done = [self._one(image[None], seed) for image, seed in zip(images, seeds, strict=True)]
        if len({image.shape for image in done}) > 1:
            raise ValueError(
                f"{self.__name__} samples for each image, and gave shapes that no batch can hold. "
                "Put it into a v2.Compose with a v2.Resize((height, width)) after it, or for "
                "one sampling a batch into a function: lambda images: op(images)."
            )
        return torch.cat(done)

    def _one(self, image: torch.Tensor, seed: int | None) -> torch.Tensor:
        with contextlib.nullcontext() if seed is None else SeededDraws(seed):
            return self.op(image)  # type: ignore[no-any-return]


class RandomCrops(Loop):
    """torchvision's RandomCrop on a batch: padded at once, and cut out by one launch."""

    def forward(self, images: torch.Tensor, keys: Keys | None = None) -> torch.Tensor:
        """Cut ``(N, C, h, w)`` of any dtype out of ``(N, C, H, W)``, each image at its own place.

        The places are uniform, as torchvision's are, and come from ``keys`` ``(N,)`` or from
        torch's generator.
        """
        if keys is None:
            keys = fold(int(torch.randint(2**62, (), device="cpu")), np.arange(len(images)))
        padding = self.op.make_params([images]) | {"needs_crop": False}
        padded = self.op.transform(images, padding)
        size = np.array(self.op.size)
        places = np.floor(uniform(keys, 2) * (np.array(padded.shape[-2:]) - size + 1))
        top, left = torch.from_numpy(places.astype(np.int64)).to(images.device).T[..., None]
        rows = top + torch.arange(size[0], device=images.device)
        columns = left + torch.arange(size[1], device=images.device)
        image = torch.arange(len(images), device=images.device)[:, None, None, None]
        channel = torch.arange(images.shape[1], device=images.device)[:, None, None]
        # One gather, (N, C, h, w): the result has no view of the padded images.
        cut: torch.Tensor = padded[image, channel, rows[:, None, :, None], columns[:, None, None]]
        return cut


def each_image(op: LibraryOp) -> Loop:
    """What runs an op of torchvision's or timm's for each image of a batch."""
    kind = RandomCrops if name_of(op) == "RandomCrop" else Loop
    return kind(twin(op) if kind is RandomCrops else op)


def takes_keys(transform: object) -> bool:
    """Whether a transform can sample for each image from a key."""
    if type(transform) is PerImage:
        return transform.seed is None
    return isinstance(transform, Loop | Each)
