"""Read a list of transforms, or a pipeline of torchvision's, once and op by op.

The walk knows the :class:`.forms.Form` of the images that reach each op. A crop, a resize, a flip
or a Normalize joins the fused launch where that can take it, and what is left runs after it.

torchvision's ops give what torchvision gives: uint8, for decoded images, until a conversion. The
launch may give [0, 1] in the meantime, and ``holds_float`` says which of the two our images are.
From the first other op on, each transform runs as it is written.

    pipeline = [v2.RandomResizedCrop(224), v2.RandAugment(), v2.ToImage(), v2.ToDtype(...)]
    fused launch   RandomResizedCrop, and ToUint8, which it does for the program's sake
    one program    RandAugment, ToFloat (which is ToDtype's)
    nothing to do  ToImage
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import NoReturn

import numpy as np
import torch

from gpuprefetch.core.report import Printed, columns
from gpuprefetch.lists.chosen import base_of_chosen
from gpuprefetch.lists.forms import Form, Values
from gpuprefetch.lists.fused import (
    NEAREST_TIES,
    ChosenCrop,
    as_float32,
    extended,
    in_kornia,
    in_launch,
    is_kornia,
)
from gpuprefetch.lists.pil_ops import (
    RINGS,
    Stand,
    differs_from_pil,
    rings_on_tensors,
    stand_for,
)
from gpuprefetch.lists.processor import image_processor, list_of_processor
from gpuprefetch.lists.refused import (
    gives_size,
    is_foreign,
    refuse_in_list,
    refuse_once_a_batch,
    refuse_within_kornia,
)
from gpuprefetch.lists.rgb import makes_picture, makes_rgb
from gpuprefetch.lists.to_tensor import fails_on_tensors, in_torchvision
from gpuprefetch.lists.views import Views, lines_for
from gpuprefetch.policies.compile import COMPILERS, FILTERS, compiled
from gpuprefetch.policies.each import Each
from gpuprefetch.policies.known import (
    UnsupportedTransformError,
    checked,
    constants,
    filter_of,
    flatten,
    is_on_device,
    name_of,
    samples_once,
    title,
    twin,
)
from gpuprefetch.policies.per_image import (
    Cast,
    Loop,
    PerImage,
    ToFloat,
    ToUint8,
    each_image,
    grouped,
)
from gpuprefetch.policies.registry import Is, LibraryOp, has, rows_of
from gpuprefetch.policies.timm import from_timm, samples_sizes, timm_class, why_not
from gpuprefetch.transforms.head import RESIZE_FILTERS, FusedTransform, Head, Transform
from gpuprefetch.transforms.results import PatchForm
from gpuprefetch.transforms.sampling import HeadOp

# What a prefetcher takes: a list, one transform, or nothing.
Transforms = Transform | Sequence[Transform] | None

FUSED = "fused launch"
NOTHING = "nothing to do"
WORKERS = "worker CPU"
IN_DATASET = (
    "call it in the dataset, on the decoded image, with all ops before it and up to the crop"
)
_IN_WORKERS = (
    "let the workers decode and run everything up to it, and up to the crop: accelerate(loader, "
    "keep_unknown=True)"
)
_UNKNOWN = Form()
_IN_LAUNCH = "its result is in [0, 1]"
_IS_SO = "the launch gives tensors in [0, 1]"
_OWN = (
    "one that takes a tensor (C, H, W) after the crop and the conversion to tensors, where it runs "
    "on the device, image by image"
)
_OWN_COSTS = "a call for each image, not one a batch"


@dataclass(frozen=True, slots=True)
class Step:
    """What became of one op."""

    source: LibraryOp  # a v1 op's twin from v2
    module: Transform | None  # what stands for it in the list, if anything needs to
    where: str
    note: str = ""  # what differs, or why it is not fused

    @property
    def name(self) -> str:
        return title(self.source)

    def row(self, device: str) -> tuple[str, str, str, str]:
        """The step in a table: its name, what it runs on, how, and what differs."""
        if self.where == WORKERS:
            return self.name, WORKERS, self.note, ""
        return self.name, "" if self.where == NOTHING else device, self.where, self.note


@dataclass(frozen=True, slots=True, repr=False)
class Plan(Printed):
    """What becomes of a list or a pipeline: its ops in their order, and what carries them out."""

    steps: list[Step]
    head: Head = field(default_factory=Head)
    written: list[Transform] = field(default_factory=list)  # all of them, fused ones first
    tail: list[Transform] = field(default_factory=list)  # after the fused ones, as they run
    is_pipeline: bool = False  # whether torchvision's ops come first, with torchvision's meaning
    results: PatchForm | None = None  # that a list of decoded images ends with

    @property
    def transforms(self) -> list[Transform]:
        """A list for ``DataPrefetcher(transforms=...)`` that does the same."""
        fused = len(self.head.names)
        theirs = Is.FLIPS | Is.NORMALIZES
        return [
            in_kornia(op) if number < fused and name_of(op) and has(op, theirs) else op
            for number, op in enumerate(self.written)
        ]

    def then(self, transform: Transform) -> Plan:
        """With one more transform at its end, which is none of the user's."""
        return replace(
            self,
            written=[*self.written, transform],
            tail=grouped([*self.tail, transform]),
        )

    def table(self, device: str) -> str:
        """A line for each op, where those that moved run on ``device``."""
        header = ("transform", "runs on", "how", "what differs")
        rows = [header, *(step.row(device) for step in self.steps)]
        return columns((f"  {name}", *rest) for name, *rest in rows)

    def __str__(self) -> str:
        return self.table("device")


def convert(
    pipeline: LibraryOp,
    *,
    begins: Form = _UNKNOWN,
    batched: bool = False,
    takes_own: bool = True,
    instead: str = _IN_WORKERS,
) -> Plan:
    """What becomes of a pipeline of torchvision's, all of which must move to the device.

    Args:
        pipeline: an op, or several.
        begins: the form of the images that the pipeline gets. By default they are decoded, and
            nobody knows if they are PIL images or tensors.
        batched: whether images come as ``(N, C, H, W)`` and not as encoded files.
        takes_own: whether a user's own function may run on the device, image by image, where images
            are tensors of one size.
        instead: what an error says of an op that cannot move.
    """
    ops = [*flatten(pipeline)]
    form = replace(begins, is_sized=begins.is_sized or not any(map(gives_size, ops)))
    walk = _Walk(
        form,
        is_pipeline=True,
        is_rgb=not batched,
        holds_float=not batched or form.is_float,
        instead=instead,
        takes_own=takes_own,
    )
    for op in ops:
        walk.take_theirs(op)
    return walk.finish_pipeline()


def read_for_tensors(transforms: Transforms) -> Plan:
    """What becomes of a list where images come as ``(N, C, H, W)``: each op runs as written."""
    walk = _Walk(Form(is_tensor=True), is_pipeline=False, is_rgb=False)
    for op in _checked(transforms):
        walk.take(op)
    return walk.finish()


def read_for_files(transforms: Transforms) -> Plan:
    """What becomes of a list where images are decoded.

    They have different sizes, unless nothing in the list gives them one.

    Raises:
        UnsupportedTransformError: for an op of torchvision's that stands where it cannot run.
    """
    ops = _checked(transforms)
    ops, results = without_form(ops)
    for op in ops:
        if isinstance(op, PatchForm):
            raise ValueError(
                f"{op} makes patches of images, and no transform comes after it. Put it last in "
                "the list, or leave it out and write DataPrefetcher(loader, transforms=[...], "
                f"results={op})."
            )
    walk = _Walk(Form(is_sized=not any(map(gives_size, ops))), is_pipeline=True)
    for op in ops:
        walk.take(op)
    return replace(walk.finish(), results=results)


def without_form(ops: Sequence[Transform]) -> tuple[list[Transform], PatchForm | None]:
    """The transforms of a list, and the form of the result that it ends with."""
    given = list(ops)
    if given and image_processor(given[-1]) is not None:
        given[-1:] = list_of_processor(given[-1])
    if not given or not isinstance(given[-1], PatchForm):
        return given, None
    return given[:-1], given[-1]


def _checked(transforms: Transforms) -> list[Transform]:
    """The transforms of a list, without the Compose around some."""
    given = opened(transforms)
    if isinstance(given, str) or not isinstance(given, Sequence | None):
        raise TypeError(
            f"transforms takes a list of modules and callables, got {type(given).__name__}. "
            "Write transforms=[RandomResizedCrop(224), v2.RandomHorizontalFlip()]."
        )
    ops = [*(given or ())]
    if any(isinstance(op, Views) for op in ops):
        raise TypeError(
            "Views takes the place of the list. Repeat in each of its lists what all views have in "
            "common: transforms=Views([crop, normalize], [crop, normalize])."
        )
    for op in ops:
        if not callable(op) or isinstance(op, type):
            raise TypeError(
                f"transforms takes a list of modules and callables, got {op!r} in it. "
                "Pass an instance, as in K.RandomHorizontalFlip(), and several lists as Views."
            )
    return ops


def opened(transforms: Transforms) -> object:
    """The transforms of a list, without the Compose around some; anything else as it is."""
    given = [transforms] if callable(transforms) else transforms
    if not isinstance(given, (list, tuple)):
        return given
    return [op for each in given for op in _opened(each)]


def _opened(transform: LibraryOp) -> list[LibraryOp]:
    """The ops of a Compose. From one that samples sizes on they stay together up to its end.

    A later op makes one size of them again. A list is none, and refused: of several views it would
    make one.
    """
    from torchvision.transforms import v2

    if isinstance(transform, (list, tuple)):
        return [transform]
    if (processor := image_processor(transform)) is not None:
        return list_of_processor(processor)
    ops = [*flatten(transform)]
    for number, op in enumerate(ops):
        sized = any(_is_theirs(later, Is.CROPS) for later in ops[number + 1 :])
        if _is_alone(op) or (sized and _may_be_alone(op)):
            return [*ops[:number], v2.Compose(ops[number:])] if number else [transform]
    return ops


def _is_theirs(op: LibraryOp, traits: Is) -> bool:
    """Whether an op is torchvision's, or timm's that stands for one, and has these traits."""
    op = from_timm(op)
    return name_of(op) is not None and has(op, traits)


def _is_alone(op: LibraryOp) -> bool:
    """Whether an op is for one image, and the rest of its Compose with it."""
    expands = bool(getattr(op, "expand", False))
    return expands or has(op, Is.ALONE) or samples_sizes(op)


def _may_be_alone(op: LibraryOp) -> bool:
    """Whether an op may sample a size: also one of a class derived from torchvision's or timm's."""
    return _is_alone(op) or (name_of(from_timm(op)) is None and samples_once(op))


def _in_list(transform: Transform) -> Transform:
    """What runs in a list for a transform: itself if it samples nothing, or for each image."""
    if _is_alone(transform) or len([*flatten(transform)]) > 1:
        return each_image(transform)
    op = from_timm(transform)
    if name_of(op) is not None and has(op, Is.ONCE):
        op = twin(op)
        return op if compiled(op) is not None else each_image(op)
    if samples_once(op):
        return each_image(op)
    refuse_once_a_batch(transform)
    refuse_within_kornia(transform)
    return transform


def why_refused(op: LibraryOp) -> str:
    """Why a list does not take one of its transforms; empty where it does."""
    try:
        refuse_in_list(op)
        _in_list(op)
    except ValueError as error:
        return str(error)
    return ""


class _Walk:
    """Goes through a list; ``form`` is that of the images after the last op taken."""

    def __init__(
        self,
        form: Form,
        *,
        is_pipeline: bool,
        is_rgb: bool = True,
        holds_float: bool = True,
        instead: str = IN_DATASET,
        takes_own: bool = False,
    ) -> None:
        self.form = form
        self.instead = instead  # what may be done with an op that cannot run here
        self.takes_own = takes_own  # an op of nobody's but the user's, after the crop
        self.is_pipeline = is_pipeline  # only torchvision's ops so far, on decoded images
        self.began_as_pipeline = False
        self.decodes_to_rgb = is_rgb
        self.holds_float = holds_float  # our images: the launch gives [0, 1]
        self.cast: torch.dtype | None = None  # of the launch's floats, before what comes after it
        self.head = Head()
        self.steps: list[Step] = []
        self.written: list[Transform] = []
        self.tail: list[Transform] = []

    def take(self, transform: Transform) -> None:
        """Take one op of a list."""
        parts = [*flatten(transform)]
        whole = len(parts) == 1 and parts[0] is transform
        if not whole and self._fuses_all_sizes(parts):
            for part in parts:
                self.take(part)
            return
        if self.is_pipeline and self._stays_pipeline(transform):
            self.began_as_pipeline = True
            self.take_theirs(transform)
            return
        if self.is_pipeline:
            self._leave_pipeline(transform)
        self._take_as_written(transform)

    def _fuses_all_sizes(self, parts: Sequence[LibraryOp]) -> bool:
        """Whether the launch takes all of these ops that give images their sizes.

        A Compose that makes images of one size of several sizes is otherwise left as it is.
        """
        if not self.is_pipeline or self.tail:
            return False
        head: Head | None = self.head
        for op in map(from_timm, parts):
            if self._is_rgb_for(op) or has(op, Is.CONVERTS | Is.DOES_NOTHING | Is.NORMALIZES):
                continue
            known = name_of(op) is not None
            head = self._longer(head, twin(op)) if head is not None and known else None
            if head is None and has(op, Is.CROPS | Is.ALONE):
                return False
        return True

    def _longer(self, head: Head, op: LibraryOp) -> Head | None:
        """The fused transforms with one more crop, resize or flip; None where that does not fit."""
        stands, _ = self._in_launch(op)
        fused = stands.op if isinstance(stands, FusedTransform) else stands
        return None if fused is None else head.then(fused, title(op))

    def finish(self) -> Plan:
        if self.is_pipeline and self.began_as_pipeline:
            self._hold(self.form.is_float)
            if not self.written:  # the launch makes a batch of the images, of that kind
                self._run(ToFloat() if self.form.is_float else ToUint8())
        return Plan(self.steps, self.head, self.written, grouped(self.tail), self.began_as_pipeline)

    def finish_pipeline(self) -> Plan:
        if not self.form.is_tensor:
            raise UnsupportedTransformError(
                "The pipeline ends in PIL images, which no batch can hold. Add v2.ToImage() and "
                "v2.ToDtype(torch.float32, scale=True), or ToTensor(), to it. If it is for "
                "tensors, such as decode_image() gives, let it begin with v2.ToImage(): "
                "v2.Compose([v2.ToImage(), pipeline]). If an image processor gets the pictures, "
                "let the dataset give EncodedImage, and write DataPrefetcher(loader, "
                "transforms=[pipeline, *convert_transforms(processor)])."
            )
        self.began_as_pipeline = True
        return self.finish()

    # --- Each op as it is written ---

    def _take_as_written(self, transform: Transform) -> None:
        refuse_in_list(transform)
        longer = None if self.tail else extended(self.head, transform)
        if longer is not None:
            self.head = longer
            self._add(transform, transform, FUSED)
        elif self._is_done(transform):
            self._add(transform, None, NOTHING, _IS_SO)
        else:
            why = self._why_not_fused(transform)
            runs = _in_list(transform)
            if _may_ask_for_kind(transform):
                for skipped in self._skipped():
                    self._run(skipped)
            self.tail.append(runs)
            self._add(transform, runs, "on the batch", why)
        self.form = self.form.after(transform)

    def _is_done(self, op: LibraryOp) -> bool:
        """Whether an op converts decoded images after the launch to what they are already."""
        if self.tail or not (self.decodes_to_rgb and self.head.names and self.form.is_float):
            return False
        op = from_timm(op)
        if name_of(op) is None or not has(op, Is.CONVERTS):
            return False
        after = self.form.after(op)
        return (after.dtype, after.values) == (self.form.dtype, self.form.values)

    def _skipped(self) -> list[Transform]:
        """The conversions that :meth:`_is_done` found, and that were not run.

        They run before a function, which may ask for the class or the dtype of its images.
        """
        ran = {id(op) for op in self.written}
        return [s.source for s in self.steps if s.note == _IS_SO and id(s.source) not in ran]

    def _why_not_fused(self, transform: Transform) -> str:
        if self.tail:
            return f"after {title(self.tail[0])}"
        name = title(transform)
        if extended(Head(), transform) is not None:
            if self.head.mean is not None:
                return "it comes after Normalize, where the launch takes flips only"
            return "the images are resized or padded already, and two resamplings are not one"
        if _is_theirs(transform, Is.CROPS):
            return "torchvision's crops and resizes are fused where its ops come first"
        if not is_kornia(transform):
            return "the launch takes crops, resizes, flips and Normalize"
        if name in ("RandomCrop", "CenterCrop", "RandomResizedCrop", "Resize", "Normalize"):
            return "the launch takes it with p=1, bilinear, and without padding"
        return "it is no crop, resize, flip or Normalize"

    def _stays_pipeline(self, op: LibraryOp) -> bool:
        if self._is_rgb_for(op) or self._begins_with(op):
            return True
        op = in_torchvision(op)
        if name_of(op) is None:
            if self._stand_of(op) is not None:
                return self.form.is_sized
            return base_of_chosen(op) is not None and not self.form.is_sized
        if has(op, Is.CONVERTS) or _why_not_on_batch(twin(op)) is None:
            return True
        if not self.tail and self._longer(self.head, op) is not None:
            return True
        # Before the crop there is no other way, and what is said of it helps.
        return not self.form.is_sized and (name_of(op) in _AUGMENTS or has(op, Is.BATCHES))

    def _leave_pipeline(self, transform: Transform) -> None:
        """From here on ops run as they are written; kornia's and ours are for [0, 1]."""
        self.is_pipeline = False
        if not self.began_as_pipeline:
            return
        for_floats = is_kornia(transform) or isinstance(transform, FusedTransform)
        levels = self.form.dtype == torch.uint8
        self._hold(self.form.is_float or (for_floats and levels))
        if for_floats and levels:
            self.form = self.form.after(ToFloat())

    # --- torchvision's, with torchvision's meaning ---

    def _is_rgb_for(self, op: LibraryOp) -> bool:
        """Whether an op makes RGB of images that are RGB: the launch leaves them so."""
        return self.decodes_to_rgb and not self.tail and makes_rgb(op)

    def _begins_with(self, op: LibraryOp) -> bool:
        """Whether an op makes pictures of decoded images, before anything else is done to them."""
        return self.decodes_to_rgb and not (self.head.names or self.tail) and makes_picture(op)

    def _stand_of(self, op: LibraryOp) -> Stand | None:
        """What stands for an op of another library's, of images as they are here."""
        stand = stand_for(op)
        return stand if stand and (stand.takes_tensors or not self.form.is_tensor) else None

    def take_theirs(self, op: LibraryOp) -> None:
        """Take an op of a pipeline for PIL images or uint8 tensors."""
        if self._is_rgb_for(op):
            self._add(op, None, NOTHING, "images are RGB")
            return
        if self._begins_with(op):
            self._add(op, None, NOTHING, "images are decoded as pictures")
            self.form = replace(self.form, is_picture=True)
            return
        given = op
        op = in_torchvision(op)
        if is_on_device(op):
            raise UnsupportedTransformError(
                f"{type(op).__name__} is not torchvision's, and runs on the device as it is. Leave "
                "it out, and pass accelerate(loader, transforms=[it]), or DataPrefetcher(loader, "
                "transforms=[*convert_transforms(pipeline), it])."
            )
        if self._take_chosen(op):
            return
        if (stand := self._stand_of(op)) is not None:
            self._take_on_batch(stand.op, source=op, differs=stand.note)
            return
        if name_of(op) in (None, "Lambda"):
            self._take_own(op)
            return
        if has(op, Is.CONVERTS):
            if self.form.is_tensor and fails_on_tensors(given):
                self._refuse_on_tensors(given)
            self._take_conversion(op)
            return
        op = twin(op)
        if has(op, Is.DOES_NOTHING):
            self._add(op, None, NOTHING)
        elif not self._fuse(op, given):
            self._take_on_batch(op)
        self.form = self.form.after(op)

    def _take_chosen(self, op: LibraryOp) -> bool:
        """Whether an op is a crop that chooses by its own get_params, which the launch takes."""
        base = base_of_chosen(op)
        if base is None or self.tail:
            return False
        base = twin(base)
        stands, note = self._in_launch(base)
        if not isinstance(stands, FusedTransform):
            return False
        crop = ChosenCrop(op, stands.op)
        name = title(op)
        note = ", ".join(filter(None, [note, f"{name}.get_params chooses, in the workers"]))
        joins = self._join(base, crop, self.head.then(crop.op, name), note)
        if joins:
            self.form = self.form.after(base)
        return joins

    def _take_own(self, op: LibraryOp) -> None:
        """Take an op that no library knows: for each image, where images are tensors."""
        foreign = timm_class(op) is not None or is_foreign(op)
        if foreign or not self.takes_own or not (self.form.is_tensor and self.form.is_sized):
            lambdas = name_of(op) == "Lambda"
            why = "it is not among the ops that can run on a batch" if lambdas else why_not(op)
            advice = "Replace it"
            if self.takes_own and not foreign:
                advice = f"{advice}; put {_OWN}"
            advice = lines_for(op.lambd if lambdas else op) or advice
            self._refuse(op, why, advice)
        self._hold(self.form.is_float)
        each = Each(op, self.form.kind)
        self._add_after(op, each, "image by image", _OWN_COSTS)
        self.form = self.form.after(each)

    def _fuse(self, op: LibraryOp, given: LibraryOp) -> bool:
        """Whether the launch takes an op, which it does then; ``given`` is what was written."""
        if self.tail:
            return False
        if has(op, Is.NORMALIZES):
            mean_and_std = checked(as_float32(op.mean), as_float32(op.std))
            ready = self.form.is_float and self.form.is_sized
            return ready and self._join(op, op, self.head.normalized(*mean_and_std))
        stands, note = self._in_launch(op)
        if stands is None:
            return False
        if self.form.is_tensor and not self.form.is_float and rings_on_tensors(given):
            note = f"{note}, {RINGS}"
        if isinstance(stands, FusedTransform):
            longer = self.head.then(stands.op, type(op).__name__)
            return self._join(op, stands, longer, note)
        return self._join(op, op, self.head.then(stands, type(op).__name__), note)

    def _join(self, op: LibraryOp, written: Transform, longer: Head | None, note: str = "") -> bool:
        """Let an op join the fused ones, if they are ``longer`` with it."""
        if longer is None:
            return False
        self.head = longer
        self.holds_float = True  # the launch gives that, whatever it is given
        self._add(op, written, FUSED, note)
        return True

    def _in_launch(self, op: LibraryOp) -> tuple[FusedTransform | HeadOp | None, str]:
        return in_launch(op, is_tensor=self.form.is_tensor, is_float=self.form.is_float)

    def _take_conversion(self, op: LibraryOp) -> None:
        if self.form.lets_pass(op):
            what = "tensors" if self.form.is_tensor else "PIL images"
            self._add(op, None, NOTHING, f"it lets {what} pass")
            return
        form = self.form
        after = form.after(op)
        # An op on the batch comes after what makes tensors of PIL images.
        self.form = replace(after, dtype=form.dtype, values=form.values)
        scale = getattr(op, "scale", True)
        if form.values is Values.UNKNOWN and has(twin(op), Is.BATCHES):
            self._take_on_batch(twin(op), source=op)  # the dtype is not known either
            self.holds_float = after.is_float
        elif after.dtype == form.dtype or form.values is Values.UNKNOWN:
            self._add(op, None, NOTHING)
        elif type(op).__name__ == "ToTensor" and not form.is_sized:
            self._add(op, None, FUSED, _IN_LAUNCH)
            self.cast = after.dtype if after.dtype != torch.float32 else None
        elif (form.dtype, after.dtype, scale) != (torch.uint8, torch.float32, True):
            from torchvision.transforms import v2

            self._take_on_batch(v2.ToDtype(after.dtype, scale=scale), source=op)
            self.holds_float = after.is_float
        elif self.holds_float:
            self._add(op, None, FUSED, _IN_LAUNCH)
        else:
            self._add_after(op, ToFloat(), "on the batch")
            self.holds_float = True
        self.form = after

    def _take_on_batch(self, op: LibraryOp, source: LibraryOp = None, differs: str = "") -> None:
        if has(op, Is.ALONE) and not self.form.is_sized:
            reason = "it gives images of different sizes, which no batch can hold"
            self._refuse(op, reason, "Take v2.RandomResizedCrop(224) in its place")
        if why := _why_not_on_batch(op):
            self._refuse(*why)
        if not self.form.is_sized:
            self._refuse_before_crop(op)
        if has(op, Is.LEVELS) and self.form.is_float:
            self._refuse(op, "it takes uint8, and images are floating point", "Put it before that")
        self._hold(self.form.is_float)
        note = differs or ("" if self.form.is_tensor else differs_from_pil(op))
        if not self.form.is_tensor and hasattr(op, "antialias"):
            op = copy.copy(op)
            op.antialias = True  # PIL always does
            if filter_of(op) == "nearest":
                from torchvision.transforms import InterpolationMode

                op.interpolation = InterpolationMode.NEAREST_EXACT  # to the center, as PIL's is
                note = NEAREST_TIES
        module: Transform = op
        where = "torchvision v2 on the batch"
        if compiled(op) is not None:
            # Else the fused launch would give uint8, which this does not see.
            floats = self.form.is_float and self.form.values is not Values.UNKNOWN
            module = PerImage([ToFloat(), op] if floats else op)
            where = "one program"
        elif has(op, Is.ONCE):
            module = each_image(op)
            where = f"{where}, image by image" if type(module) is Loop else "one launch"
        self._add_after(source or op, module, where, note)

    def _refuse(self, op: LibraryOp, reason: str, advice: str = "Replace it") -> NoReturn:
        name = f"function {title(op)}" if isinstance(op, FunctionType) else type(op).__name__
        raise UnsupportedTransformError(
            f"{name} cannot move to the device: {reason}. {advice}, or {self.instead}."
        )

    def _refuse_on_tensors(self, op: LibraryOp) -> NoReturn:
        """Refuse a conversion of PIL images that raises an error for tensors."""
        instead = "Leave it out: decode_image() gives what it would"
        if "PIL" not in type(op).__name__:
            instead = "Write v2.ToDtype(torch.float32, scale=True) in its place"
        raise UnsupportedTransformError(
            f"{type(op).__name__} takes PIL images and arrays, and gets tensors here. {instead}."
        )

    def _refuse_before_crop(self, op: LibraryOp) -> NoReturn:
        if not has(op, Is.CROPS):
            reason = "no crop or resize before it gives images one size"
            crops = "v2.RandomResizedCrop(224), or v2.Resize(256) and v2.CenterCrop(224)"
            self._refuse(op, reason, f"Put it after the crop, or add one before it ({crops})")
        if self._in_launch(op)[0] is not None:
            reason = "images are resized, padded or normalized already, and two are not one"
            self._refuse(op, reason, "Leave out what does so before it")
        takes = "the nearest pixel, or bilinear or bicubic filters with antialias"
        if self.form.is_tensor and not getattr(op, "antialias", True):
            reason = f"the fused launch takes {takes}, and tensors are resized without"
            self._refuse(op, reason, "Write antialias=True, which gives other pixels")
        self._refuse(op, f"the fused launch takes {takes}, and padding that is of one color")

    def _hold(self, floating: bool) -> None:
        """Bring our images to the kind that the pipeline has at this point."""
        if self.holds_float != floating:
            self._run(ToFloat() if floating else ToUint8())
            self.holds_float = floating
        if self.cast is not None and floating:
            self._run(Cast(self.cast, None))
        self.cast = None

    def _add(self, source: LibraryOp, module: Transform | None, where: str, note: str = "") -> None:
        self.written += [] if module is None else [module]
        self.steps.append(Step(source, module, where, note))

    def _add_after(self, source: LibraryOp, module: Transform, where: str, note: str = "") -> None:
        self.tail.append(module)
        self._add(source, module, where, note)

    def _run(self, transform: Transform) -> None:
        self.tail.append(transform)
        self.written.append(transform)


_AUGMENTS = frozenset(row.key for row in rows_of("timm") if row.key in COMPILERS)


def _why_not_on_batch(op: LibraryOp) -> tuple[LibraryOp, str] | None:
    """Which op cannot run on a batch and why: this one, or one of those that it holds."""
    if name_of(op) not in _AUGMENTS and not (name_of(op) and has(op, Is.BATCHES)):
        return op, "it is not among the ops that can run on a batch"
    if getattr(op, "expand", False):
        return op, "expand=True gives images of different sizes"
    accepted = RESIZE_FILTERS if has(op, Is.CROPS) else FILTERS
    if hasattr(op, "interpolation") and filter_of(op) not in accepted:
        return op, f"interpolation={filter_of(op)!r} is none of {', '.join(accepted)}"
    for inner in map(twin, flatten(op.transforms)) if has(op, Is.HOLDS) else ():
        if why := _why_not_on_batch(inner):
            return why
        sizes = has(inner, Is.CROPS) or type(inner).__name__ == "Pad"
        if sizes or getattr(inner, "num_output_channels", 3) != 3:
            return inner, "by chance it would give images of different shapes"
    return None


def _may_ask_for_kind(op: LibraryOp) -> bool:
    """Whether an op may do something else to torchvision's ``Image`` than to a plain tensor."""
    if is_on_device(op):
        return False
    for part in map(from_timm, flatten(op)):
        if name_of(part) is None or has(part, Is.CONVERTS):
            return True
        if has(part, Is.HOLDS) and any(map(_may_ask_for_kind, part.transforms)):
            return True
    return False


def levels_for_program(head: Head, tail: Sequence[Transform], cast: Cast) -> list[Transform] | None:
    """Make the first program read the launch's uint8 output, and do the cast that was the launch's.

    ``cast`` is the form that the loop asks for. Returns the tail with that program; None where the
    launch is to make the cast.
    """
    first = tail[0] if tail else None
    if not isinstance(first, PerImage) or not head.names or head.mean or cast.dtype == torch.uint8:
        return None
    recipe = first.recipe
    given = isinstance(recipe.before, ToUint8)
    steps = [op for op in recipe.ops if compiled(op) is not None][: len(recipe.steps)]
    same = recipe.before is None and all(map(_is_same_on_levels, steps))
    same = same and not all(has(op, Is.FLIPS) for op in recipe.ops)
    if first.seed is not None or not recipe.steps or not (given or same):
        return None
    ops = list(recipe.ops)
    if not (given or recipe.scaled):
        ops.insert(next((i for i, op in enumerate(ops) if constants(op)), len(ops)), ToFloat())
    if recipe.cast.leaves_all:
        floats = recipe.scaled or not given
        ops.append(cast if floats else Cast(None, cast.memory_format))
    return [PerImage(ops), *tail[1:]]


def _is_same_on_levels(op: LibraryOp) -> bool:
    """Whether an op does to 0..255 what it does to [0, 1]: all but those that are given a value."""
    if hasattr(op, "transforms"):
        return all(map(_is_same_on_levels, flatten(op.transforms)))
    return not (np.any(getattr(op, "fill", None)) or has(from_timm(op), Is.VALUED))
