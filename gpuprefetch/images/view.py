"""One view of the images of a batch: the fused transforms, and those that run after them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from gpuprefetch.core.nested import Batch
from gpuprefetch.images.tail import run, run_alike
from gpuprefetch.lists.forms import varies_size
from gpuprefetch.lists.fused import is_kornia
from gpuprefetch.lists.refused import (
    gives_size,
    refuse_choice_for_batch,
    require_fixed_size,
)
from gpuprefetch.lists.values import ValueCheck
from gpuprefetch.lists.walk import (
    Plan,
    Transforms,
    levels_for_program,
    read_for_files,
    read_for_tensors,
)
from gpuprefetch.policies.per_image import Cast, PerImage, ToUint8
from gpuprefetch.policies.registry import SHARED, Is, has
from gpuprefetch.transforms.head import Head, Transform, apply_head
from gpuprefetch.transforms.random import Keys, derive, fold, op_keys
from gpuprefetch.transforms.results import PatchForm, ResultForm, form_of
from gpuprefetch.transforms.sampling import GivenOp

if TYPE_CHECKING:
    from gpuprefetch.policies.ops_launch import Layout


@dataclass(frozen=True)
class View:
    """What becomes of the images; most loops have one view of them.

    A list is read twice if it begins with torchvision's ops. For decoded images it means what
    torchvision would make of pictures. For images that come as tensors each op runs as it is
    written. One of the two may be an error, which is raised when such images come::

        [v2.CenterCrop(9)]                     both: decoded images in one launch, tensors by the op
        [v2.CenterCrop(9), v1.ToTensor()]      decoded images
        [op, v2.CenterCrop(9)]                 tensors: decoded images have no size before it
    """

    plan: Plan
    head: Head
    tail: Sequence[Transform]
    # Whether decoded images stay uint8 in the fused transforms as the first program reads that.
    levels: bool
    values: ValueCheck
    tensors: View | ValueError | None = None  # for images that come as tensors, if not this one
    refused: ValueError | None = None  # raised for decoded images

    @staticmethod
    def read(
        transforms: Transforms,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
        *,
        form: ResultForm | None = None,
        files_alone: bool = False,
    ) -> View:
        """The view of a list. One that is for neither decoded images nor tensors is an error.

        ``form`` is what decoded images become, None for what the list says; ``files_alone`` says
        that no images come as tensors.
        """
        try:
            view = _view_of(read_for_files(transforms), dtype, memory_format, form)
            if view.head.has_own_sizes:  # tensors have one size
                for transform in view.tail:
                    refuse_choice_for_batch(transform)
        except ValueError as error:
            if files_alone:
                raise
            written = _view_of(_plan_of_tensors(transforms, form), dtype, memory_format)
            return replace(written, refused=error)
        if files_alone or not (view.plan.is_pipeline or form or view.plan.results):
            return view
        try:
            written = _view_of(_plan_of_tensors(transforms, form), dtype, memory_format)
        except ValueError as error:
            return replace(view, tensors=error)
        return replace(view, tensors=written)

    def of_tensors(self) -> View:
        """The view of images that come as tensors."""
        if isinstance(self.tensors, ValueError):
            raise copy.copy(self.tensors)  # whose traceback would grow from batch to batch
        return self.tensors or self

    def with_own_state(self, memo: dict[int, object] | None = None) -> View:
        """The same with copies of the transforms, whose state no other thread changes.

        kornia's keep what they have sampled, and those with a seed count their calls. A transform
        that cannot be copied is shared. ``memo`` is that of :func:`copy.deepcopy`.
        """
        memo = {} if memo is None else memo
        tensors = self.tensors
        if isinstance(tensors, View):
            tensors = tensors.with_own_state(memo)
        tail = [_copied(op, memo) for op in self.tail]
        return replace(self, tail=tail, values=ValueCheck(self.head, tail), tensors=tensors)

    def require_files(self) -> None:
        """Raise a ValueError if decoded images do not get one size."""
        if self.refused is not None:
            raise copy.copy(self.refused)
        require_fixed_size(self.head, self.tail)

    @property
    def changes(self) -> bool:
        """Whether images that come as tensors are changed at all."""
        view = self.tensors if isinstance(self.tensors, View) else self
        return bool(view.head.names or view.tail or view.head.dtype or view.head.memory_format)

    @property
    def running(self) -> list[Transform]:
        """The transforms that are called as the user gave them, and not compiled."""
        own = [op for op in self.tail if not isinstance(op, PerImage)]
        if not isinstance(self.tensors, View):
            return own
        as_tensors = {id(op) for op in self.tensors.running}
        return [op for op in own if id(op) in as_tensors]

    @property
    def movers(self) -> list[object]:
        """The transforms that may move pixels, of decoded images or of tensors."""
        own: list[object] = [*self.head.ops, *self.tail]
        return own + self.tensors.movers if isinstance(self.tensors, View) else own

    @property
    def samples(self) -> bool:
        """Whether any transform may have random parameters."""
        return bool(self.tail) or any(has(op, SHARED | Is.EACH) for op in self.head.ops)

    def run_head(self, images: torch.Tensor, seed: int) -> torch.Tensor:
        """The fused transforms, on a batch ``(N, C, H, W)`` that came as a tensor."""
        head = self.head
        kornia_next = bool(self.tail) and is_kornia(self.tail[0])
        to_floats = kornia_next and not images.is_floating_point()
        if head.names or to_floats or head.dtype == torch.uint8:
            keys = fold(seed, np.arange(len(images)))
            dtype = None if self.levels and images.is_floating_point() else head.dtype
            return apply_head(head, images, keys, dtype, head.memory_format)
        if head.dtype and not images.is_floating_point():
            if images.dtype != torch.uint8:
                raise ValueError(
                    f"dtype is for images of uint8 or floating point, got {images.dtype} of "
                    f"{tuple(images.shape)}. Let the dataset return image.float() / its maximum."
                )
            images = images.to(head.dtype) / 255
        return images.to(
            dtype=head.dtype or images.dtype,
            memory_format=head.memory_format or torch.preserve_format,
        )

    @property
    def program(self) -> PerImage | None:
        """The first transform after the fused ones, if a worker may sample for it and run it.

        The values that it gets must be known: it comes after no Normalize.
        """
        first = self.tail[0] if self.tail else None
        sized = self.head.gives_results and not self.head.has_own_sizes
        known = sized and not (self.head.mean or self.head.std)
        return first if known and type(first) is PerImage and first.seed is None else None

    def run_tail(
        self,
        outs: Sequence[Batch],
        seed: int,
        keys: Keys | None = None,
        laid: Sequence[Sequence[Layout] | None] = (),
    ) -> list[Batch]:
        """Run the transforms after the fused ones on batches of the same samples.

        Args:
            outs: what the fused transforms made of each batch.
            seed: of what is sampled for a batch as a whole.
            keys: ``(N,)``, which what is sampled for each image comes from; None for tensors.
            laid: for each batch what a worker has sampled for :attr:`program`. An entry is empty if
                the worker has also run it, and None if no worker has sampled anything.

        Returns:
            What the transforms made of each batch.
        """
        images = list(outs)
        first = 0
        program = self.program
        if program is not None and any(each is not None for each in laid):
            first = 1
            dtype = self.head.dtype or torch.float32
            levels = torch.tensor([0, 255 if dtype == torch.uint8 else 1], dtype=dtype)
            self.values.reach(program, levels)
            for number, each in enumerate(laid):
                if each is None:
                    own = None if keys is None else op_keys(keys, 0)
                    images[number] = run(program, images[number], own)
                elif each:
                    images[number] = program.carry_out(images[number], each)
        for position, transform in enumerate(self.tail[first:], first):
            for each in images:
                self.values.reach(transform, each)
            own = None if keys is None else op_keys(keys, position)
            images = run_alike(transform, images, own, derive(seed, position))
        return images


def _copied(op: Transform, memo: dict[int, object]) -> Transform:
    """A copy of a transform; itself where it holds what cannot be copied, such as a lock."""
    try:
        copied: Transform = copy.deepcopy(op, memo)
    except Exception:  # whatever a user's class raises
        return op
    return copied


def _plan_of_tensors(transforms: Transforms, form: ResultForm | None) -> Plan:
    """What becomes of images that come as tensors, which have one size, in a form."""
    plan = read_for_tensors(transforms)
    ends = plan.tail and isinstance(plan.tail[-1], PatchForm)
    return plan if ends or form is None or not form.has_own_sizes else plan.then(form)


def _view_of(
    plan: Plan,
    dtype: torch.dtype | None,
    memory_format: torch.memory_format | None,
    form: ResultForm | None = None,
) -> View:
    """The view of a list that was read; the loop asks for a dtype, a memory format and a form."""
    if dtype == torch.uint8 and plan.head.mean:
        raise ValueError(
            "dtype=torch.uint8 is for values of 0 to 255, and Normalize gives others. Leave one of "
            "them out."
        )
    form = form or plan.results
    cast = Cast(dtype, memory_format)
    if plan.is_pipeline and plan.tail and not cast.leaves_all:
        # A pipeline keeps its values up to its end, so that they are not rounded before.
        plan = plan.then(cast)
        cast = Cast(None, None)
    tail = levels_for_program(plan.head, plan.tail, cast)
    head = replace(plan.head, dtype=cast.dtype, memory_format=cast.memory_format)
    # A list without a crop is for images of one size. A crop that the launch does not take, and
    # that comes after it, is for others.
    changes = bool(plan.head.names or plan.tail)
    asked = changes or form is not None
    if plan.head.size is not None or (asked and not any(map(gives_size, plan.tail))):
        own = head.varies_size or (head.size is None and any(map(varies_size, plan.tail)))
        head = replace(head, form=form or form_of(own_sizes=own))
    if head.form is not None and not changes:  # decoded images are levels
        head = replace(head, dtype=head.dtype or torch.uint8)
    if head.has_own_sizes and isinstance(next(iter(plan.tail), None), ToUint8):
        # The launch rounds all images at once, and an op after it would do so one by one.
        rest = plan.tail[1:]
        head = replace(head, dtype=torch.uint8, memory_format=None)
        if rest and isinstance(rest[0], Cast) and rest[0].dtype in (None, torch.uint8):
            head = replace(head, memory_format=rest[0].memory_format)
            rest = rest[1:]
        return _view(plan, head, rest)
    if tail is None:
        return _view(plan, head, plan.tail)
    head = replace(head, dtype=torch.uint8, memory_format=None)
    return _view(plan, head, tail, levels=True)


def _view(plan: Plan, head: Head, tail: Sequence[Transform], *, levels: bool = False) -> View:
    """The view with these transforms, whose results may have sizes of their own."""
    if head.has_own_sizes:
        carried_on = any(isinstance(op, GivenOp) and op.dtype is None for op in head.ops)
        head = replace(head, is_followed=bool(tail) or carried_on)
    return View(plan, head, tail, levels, ValueCheck(head, tail))
