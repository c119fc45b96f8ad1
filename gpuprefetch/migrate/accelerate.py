"""accelerate: a built DataLoader over images, moved to the device in one call.

The loader stays as it was built: sampler, workers, generator and all. Its workers read a view of
its dataset that leaves files encoded, and other pictures as they are, and its transforms go to the
prefetcher.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch.utils.data import DataLoader, default_collate

from gpuprefetch.core.errors import text_of
from gpuprefetch.core.loaders import changed
from gpuprefetch.core.nested import Loader
from gpuprefetch.core.ranks import rank
from gpuprefetch.images.apart import image_of, is_image
from gpuprefetch.images.guard import UndecodedError
from gpuprefetch.images.handed import to_iterate
from gpuprefetch.images.options import Keywords, Options
from gpuprefetch.lists.forms import PICTURES, Form, fixes_size
from gpuprefetch.lists.fused import Given
from gpuprefetch.lists.snapshot import Snapshot
from gpuprefetch.lists.views import Views, lists_of
from gpuprefetch.lists.walk import (
    NOTHING,
    WORKERS,
    Plan,
    Step,
    convert,
    read_for_tensors,
    without_form,
)
from gpuprefetch.migrate.dataset_view import datasets_in, view_of, worker_part
from gpuprefetch.migrate.faces import stale
from gpuprefetch.migrate.folders import (
    Checked,
    Folder,
    begins_with,
    chains_of,
    check_sample,
    encoded_view,
    folders_in,
    folders_of,
    joint_view,
    picture_of,
    pipeline_of,
    refuse_seeding,
    refuse_under_way,
    takes_several,
)
from gpuprefetch.migrate.joint import joint_plan
from gpuprefetch.migrate.row_functions import WAYS_OF_ROWS, function_of
from gpuprefetch.migrate.taken import opened
from gpuprefetch.migrate.traced import Chain, LeftTraced, name_of_chain
from gpuprefetch.migrate.untouched import untouched
from gpuprefetch.migrate.ways import TWO_WAYS
from gpuprefetch.policies.known import UnsupportedTransformError, flatten, title
from gpuprefetch.policies.per_image import Cast, Transform
from gpuprefetch.prefetcher import DataPrefetcher
from gpuprefetch.transforms.random import trial_draws
from gpuprefetch.transforms.results import form_of


def accelerate(
    loader: DataLoader[Any],
    *,
    keep_unknown: bool = False,
    print_plan: bool = True,
    **prefetcher_options: Unpack[Keywords],
) -> DataPrefetcher:
    """Move a loader over images to the device: the decode of files, augmentation and all.

    Args:
        loader: over a dataset of any class that gives pictures to its ``transform``, a v1, v2 or
            timm pipeline, and returns what that gives: torchvision's and timm's datasets, your own,
            and datasets around these, such as ``Subset``, ``ConcatDataset`` and classes with a
            transform for a split. Files that ``self.loader`` or ``PIL.Image.open`` opens, and that
            reach the transform as they are, are decoded by the prefetcher, and so are RGB JPEGs
            that ``torchvision.io.decode_image`` reads. Other pictures are decoded by the dataset,
            in the workers: PIL images, uint8 tensors ``(3, H, W)``, uint8 arrays ``(H, W, 3)`` for
            a pipeline that begins with ``ToTensor`` or ``ToImage``, and whatever a ``ToPILImage``
            at its beginning takes. The pipeline must make three channels of each. All samples must
            have PIL images, or all tensors, unless it begins with ``ToImage``. The loader is left
            alone. A transform that gets the picture and its target, as those of torchvision's
            references do, runs in the workers without the pixels, and must be made of torchvision's
            functions; boxes, masks and labels are what it makes of them.
        keep_unknown: whether ops that no library knows, and others that cannot move, stay in the
            workers, with all ops before them and up to the crop. The workers then decode every file
            themselves. By default such an op runs on the device, image by image, where it gets
            tensors of one size, and is an error elsewhere.
        print_plan: whether to print where each op runs now, and what differs. Of several ranks the
            first one prints.
        prefetcher_options: of :class:`DataPrefetcher`; its ``transforms`` come last.

    Returns:
        A prefetcher that gives the loader's batches, in its order and with its samples and
        targets. The images are transformed on the device, with other random parameters. Its
        ``dataset`` is the loader's, whose samples are decoded. A user's ``collate_fn`` (MixUp,
        CutMix) runs on the device, on the transformed images, which may have sizes of their own,
        unless all transforms stay in the workers.

    Raises:
        TypeError: for a loader or dataset that is none of these. A sample whose image is changed
            after its transform, or whose transform gets no such picture, raises it here if it is
            the first one, and else when it is read; the message names the sample. So does a dataset
            whose ``__getitem__`` seeds torch, or sets its state, if a transform that moves samples.
        UnsupportedTransformError: for an op that cannot move, with what to do.

    Example:
        >>> loader = gpuprefetch.accelerate(loader)
        >>> for images, target in loader: ...  # the loop is unchanged
    """
    loader = to_iterate(loader)
    folders = folders_of(loader)
    pipeline = pipeline_of(folders)
    refuse_under_way(loader)
    adds = _asks_for_transforms(prefetcher_options)
    view, split, checked = _split_of(
        loader, folders, pipeline, keep_unknown=keep_unknown, adds=adds
    )
    device_transforms = split.moves or adds
    count = checked.images
    if not split.decodes_on_device and device_transforms and count > 1:
        raise TypeError(
            f"A sample holds {count} tensors of three dimensions, and with keep_unknown=True it is "
            "not known which of them is the image. Replace what cannot move, or return one."
        )
    knows_image = split.decodes_on_device or (device_transforms and count == 1)
    prefetcher = Accelerated(
        loader,
        split,
        prefetcher_options,
        view=view,
        late=knows_image and (split.carries_on or loader.collate_fn is not default_collate),
    )
    if print_plan and rank() == 0:
        print(prefetcher.describe())
    return prefetcher


def _asks_for_transforms(options: Keywords) -> bool:
    asked = (options.get("transforms"), options.get("dtype"), options.get("memory_format"))
    return any(asked)


def _plan_of(pipeline: list[Transform], begins: Form, *, takes_own: bool) -> Plan:
    """The plan of a pipeline that moves as a whole; the workers run a ``ToPILImage`` before it."""
    first, rest = opened(pipeline)
    if first is None:
        return convert(rest, begins=begins, takes_own=takes_own)
    plan = convert(rest, begins=PICTURES, takes_own=takes_own)
    return replace(plan, steps=[*_kept_steps([first]), *plan.steps])


def _of_files(plan: Plan) -> Plan:
    """A plan whose ``ToPILImage`` gets files, which stand for the pictures that it would make."""
    if not plan.steps or plan.steps[0].where != WORKERS:
        return plan
    first, *rest = plan.steps
    made = replace(first, where=NOTHING, note="images are decoded as pictures")
    return replace(plan, steps=[made, *rest])


def _traced_of(
    dataset: Any, pipeline: list[Transform], folders: Sequence[Folder], begins: Form
) -> LeftTraced | None:
    """What stands for a transform of several views; None for any other.

    It expects in all samples what the transform does for the first one.
    """
    traced = LeftTraced.of_pipeline(pipeline, begins)
    if traced is None or not len(dataset):
        return None
    try:
        return LeftTraced(traced.op, begins, chains_of(dataset, traced, folders))
    except Exception as error:  # the user's code: whatever it raises tells why it cannot move
        try:
            convert(traced.op, begins=begins)
        except UnsupportedTransformError as refused:
            why = text_of(error)
            for ways in (TWO_WAYS, WAYS_OF_ROWS):
                why = why.replace(ways, "").strip()
            raise UnsupportedTransformError(f"{refused} It cannot move as it is: {why}") from error
        raise


# --- Where the pipeline is split ---


@dataclass(frozen=True, slots=True)
class _Split:
    """Where a pipeline is split: the workers run ``kept``, the device all ops after them.

    Example:
        With ``keep_unknown=True``, ``[Resize(256), Lambda(f), CenterCrop(224), ToTensor()]`` keeps
        the first three ops, and the plan's transforms are those of ``ToTensor()``. Without a
        ``Lambda`` nothing is kept, and the device decodes.
    """

    kept: list[Transform]
    plans: list[Plan]  # of all ops of each view; their transforms are for the device
    is_whole: bool  # whether the workers run the whole pipeline
    traced: LeftTraced | None = None  # what calls the pipelines of several views
    decoder: str = ""  # who decodes in place of the prefetcher, in words; empty for files

    @property
    def moves(self) -> bool:
        """Whether any transform runs on the device."""
        return any(plan.transforms for plan in self.plans)

    @property
    def decodes_on_device(self) -> bool:
        return not self.kept

    def tables(self, device: str) -> list[str]:
        """A table for each view, and one for views with the same pipelines."""
        chains = self.traced.expected if self.traced else None
        if not chains:
            return [plan.table(device) for plan in self.plans]
        tables: dict[Chain, str] = {}
        numbers: dict[Chain, list[str]] = {}
        for number, (chain, plan) in enumerate(zip(chains, self.plans, strict=True), 1):
            tables[chain] = plan.table(device)
            numbers.setdefault(chain, []).append(str(number))
        return [
            f"  view {', '.join(numbers[chain])}: {name_of_chain(chain)}\n{table}"
            for chain, table in tables.items()
        ]

    @property
    def carries_on(self) -> bool:
        """Whether calls of the dataset's own transform follow the launch, image by image."""
        first = next(iter(self.plans[0].transforms), None)
        return isinstance(first, Given) and first.carries_on

    def worker_transform(self, *, marked: bool) -> Transform:
        """What the workers run, if they do not leave files encoded."""
        # A pipeline that ends in pictures has them for the user's collate function.
        return worker_part(self.kept, tensors=marked or not self.is_whole, marked=marked)


def _split_of(
    loader: DataLoader[Any],
    folders: Sequence[Folder],
    pipeline: list[Transform],
    *,
    keep_unknown: bool,
    adds: bool,
) -> tuple[Any, _Split, Checked]:
    """The view of a loader's dataset, the split of its pipeline, and what the first sample shows.

    ``adds`` says whether the user's options transform images, beside the pipeline.
    """
    dataset = loader.dataset
    begins = begins_with(dataset)
    try:
        traced = None if keep_unknown else _traced_of(dataset, pipeline, folders, begins)
        lists = traced.lists() if traced else [pipeline]
        view = encoded_view(dataset, traced or pipeline, folders, begins)
        plans = [_plan_of(ops, begins, takes_own=not keep_unknown) for ops in lists]
        split = _Split([], plans, is_whole=False, traced=traced)
        objects = traced.objects if traced else ()
        checked = check_sample(view, dataset, encoded=True, needed=True, objects=objects)
        refuse_seeding(dataset, [op for ops in lists for op in ops])
        if not checked.decoder:
            split = replace(split, plans=[*map(_of_files, plans)])
        return view, replace(split, decoder=checked.decoder), checked
    except (UnsupportedTransformError, UndecodedError, TypeError) as error:
        moves = isinstance(error, (UnsupportedTransformError, UndecodedError))
        if not takes_several(dataset, may_stay=keep_unknown):
            if not (keep_unknown and moves):
                raise
            split = _split_late(pipeline, picture_of(dataset))
            refuse_seeding(dataset, pipeline[len(split.kept) :])
            view = view_of(dataset, split.worker_transform(marked=split.moves or adds))
            return view, split, check_sample(view, dataset, encoded=False, needed=split.moves)
    view = joint_view(dataset, folders)
    return view, *_joint_split(view, dataset, pipeline, has_workers=loader.num_workers > 0)


def _joint_split(
    view: Any, dataset: Any, pipeline: list[Transform], *, has_workers: bool
) -> tuple[_Split, Checked]:
    """For a transform that also gets what is beside the picture, which the workers run."""
    if not len(view):
        raise TypeError(
            f"{type(dataset).__name__} has no sample, which would show what its transform does."
        )
    checked = check_sample(view, dataset, encoded=True, needed=True)
    with untouched([*datasets_in(dataset), *pipeline]):
        with trial_draws():
            image = image_of(view[0])
        plan = joint_plan(image, pipeline, has_workers=has_workers)
    return _Split([], [plan], is_whole=False, decoder=checked.decoder), checked


def _split_late(pipeline: list[Transform], picture: Any) -> _Split:
    """Keep the shortest start of a pipeline that must stay in the workers."""
    from torchvision.transforms import v2

    shortest = next((i + 1 for i, op in enumerate(pipeline) if fixes_size(op)), len(pipeline))
    for count in range(shortest, len(pipeline)):
        with untouched(pipeline), trial_draws():
            given = v2.Compose(pipeline[:count])(picture)
        image = v2.PILToTensor()(given)
        if is_image(image) and (image.dtype == torch.uint8 or image.is_floating_point()):
            with contextlib.suppress(UnsupportedTransformError):
                begins = Form(
                    dtype=image.dtype,
                    is_sized=True,
                    is_tensor=given is image,
                    kind=type(image),
                    is_picture=given is not image,
                )
                rest = convert(pipeline[count:], begins=begins, batched=True, takes_own=False)
                steps = [*_kept_steps(pipeline[:count]), *rest.steps]
                return _Split(pipeline[:count], [replace(rest, steps=steps)], is_whole=False)
    with untouched(pipeline), trial_draws():
        v2.PILToTensor()(v2.Compose(pipeline)(picture))  # raises here, and not in a worker
    return _Split(pipeline, [Plan(_kept_steps(pipeline))], is_whole=True)


def _kept_steps(ops: Sequence[Transform]) -> list[Step]:
    return [Step(op, None, WORKERS, "unchanged") for op in ops]


# --- The prefetcher ---


class Accelerated(DataPrefetcher):
    """A prefetcher that knows its plan, and its loader's own dataset."""

    def __init__(
        self,
        loader: DataLoader[Any],
        split: _Split,
        options: Keywords,
        *,
        view: Any,
        late: bool,
    ) -> None:
        added = options.get("transforms")
        adds = _asks_for_transforms(options)
        read = [without_form([*plan.transforms, *_listed(added)]) for plan in split.plans]
        lists = [transforms for transforms, _ in read]
        form = next((form for _, form in read if form is not None), None)
        if form is not None and options.get("results") is None:
            options = {**options, "results": form}
        if any(not each or read_for_tensors(each).tail for each in lists):
            options = _with_cast(options, lists)
        options = {**options, "transforms": Views(*lists) if len(lists) > 1 else lists[0]}
        # torch's collate function stacks images, a user's gets them one by one.
        varies = split.decodes_on_device and any(plan.head.size is None for plan in split.plans)
        if options.get("results") is None and varies:
            options["results"] = form_of(own_sizes=late)
        self._late = late
        super().__init__(changed(loader, dataset=view), **options)
        running = [*split.kept, *self._running_ops()]
        self._moved = _Moved(loader, split, added, running, adds=adds)

    @property
    def plan(self) -> Plan:
        """Where each op of the pipeline runs now; of several views, those of the first."""
        return self.plans[0]

    @property
    def plans(self) -> list[Plan]:
        """Where each op runs now, for each view that the transform gives."""
        return self._moved.split.plans

    @property
    def decodes_files(self) -> bool:
        """Whether the workers leave files encoded for the prefetcher."""
        return self._moved.split.decodes_on_device

    @property
    def dataset(self) -> Any:
        """The loader's own, which gives decoded samples; the workers read a view of it."""
        return self._moved.dataset

    def _left_to_us(self) -> str:
        # The ops of the pipeline are not missing there: the dataset that others get has them.
        return "the transforms that accelerate() was given" if self._moved.adds else ""

    def _finisher(self) -> None:
        # Others get decoded samples, on which the ops of the pipeline have run.
        return None

    def _read_by_us(self, loader: Loader) -> Loader:
        loader = super()._read_by_us(loader)
        ours = self.wrapped.dataset
        dataset = getattr(loader, "dataset", None)
        if dataset is self._moved.dataset:
            return changed(loader, dataset=ours)
        if dataset is not ours:
            raise TypeError(
                "over() of what accelerate() made takes a loader over the same dataset. For "
                "another one call accelerate(loader)."
            )
        return loader

    def _refuse_changed(self) -> None:
        self._moved.refuse_changed(self.wrapped.collate_fn)
        super()._refuse_changed()

    def describe(self) -> str:
        """Where decode, each op and the collate function run."""
        split = self._moved.split
        device = "CPU" if self.device.type == "cpu" else str(self.device)
        lines = [f"accelerate: {self._device_and_decoder()}"]
        if split.is_whole:
            lines.append("  nothing moved: the workers decode and run all transforms, as before")
        elif split.kept:
            last = title(split.kept[-1])
            lines.append(f"  not moved: decode and all up to {last} stay in the workers")
        lines += split.tables(device)
        if added := _listed(self._moved.added):
            lines.append(f"  after them: {', '.join(map(title, added))}")
        collate = WORKERS
        if self._late:
            function = title(self.wrapped.collate_fn)
            collate = f"{function}, on the transformed images on {self.device}"
        lines.append(f"  collate: {collate}")
        return "\n".join(lines)

    @property
    def decoding(self) -> str:
        """What decodes the images, in words."""
        return self._moved.split.decoder or super().decoding

    def _device_and_decoder(self) -> str:
        if decoder := self._moved.split.decoder:
            where = "the CPU" if self.device.type == "cpu" else str(self.device)
            return f"decode by {decoder}; then on {where}"
        if self.device.type == "cpu":
            why = "device='cpu'" if torch.cuda.is_available() else "no CUDA device found"
            return f"{why}: everything on the CPU"
        if not self.decodes_files:
            return f"{self.device}, decode in the workers"
        share = ""
        if self.decodes_on_gpu and self._options.cpu_share != 0:
            share = ", a share of it in the workers (cpu_share)"
        return f"{self.device}, decode by {self.decoding}{share}"


def _listed(transforms: Any) -> list[Transform]:
    """What was given as ``transforms``, which may be one callable, as a list."""
    lists = lists_of(transforms)
    if len(lists) > 1:
        transforms = Views(*lists)  # an error in a list: each view begins with the decoded image
    if isinstance(transforms, Sequence):
        return list(transforms)
    return [transforms] if transforms else []


def _with_cast(options: Keywords, lists: Sequence[list[Transform]]) -> Keywords:
    """Options without ``dtype`` and ``memory_format``: each of the lists ends in that cast.

    Values must not be rounded to bfloat16 between the fused launch and the ops after it.
    """
    options = options.copy()
    cast = Cast(options.pop("dtype", None), options.pop("memory_format", None))
    Options(dtype=cast.dtype, memory_format=cast.memory_format).check()
    if cast.dtype or cast.memory_format:
        for each in lists:
            each.append(cast)
    return options


# How a dataset decodes its files. The view of it has other values.
_DECODING = ("loader", "load_bytes", "input_img_mode")


class _Moved:
    """What accelerate() read of a loader. A later change of that is an error.

    Args:
        loader: the user's.
        split: of its pipeline.
        added: the user's ``transforms`` for the prefetcher.
        running: ops that run as they were given, and may change.
        adds: whether the user's options change images, beside the pipeline.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        split: _Split,
        added: Any,
        running: list[Transform],
        *,
        adds: bool,
    ) -> None:
        self.split = split
        self.adds = adds
        self.dataset = loader.dataset
        self.added = added
        self._collates_as_torch = loader.collate_fn is default_collate
        self._folders = folders_in(loader.dataset)
        self._functions = [function_of(folder.dataset) for folder in self._folders]
        # Workers that decode read files with the folder's own loader, whatever that is.
        names = ("transform", *_DECODING) if split.decodes_on_device else ("transform",)
        self._read = {
            name: [Snapshot(value, running) for value in self._values(name)] for name in names
        }
        self._added_read = Snapshot(added, running)

    def _values(self, name: str) -> list[object]:
        if name == "transform":
            return [_parts_of(folder.transform) for folder in self._folders]
        return [getattr(folder.dataset, name, None) for folder in self._folders]

    def refuse_changed(self, collate_fn: object) -> None:
        if self._added_read.differs(self.added):
            raise stale("transforms")
        # torch's collate function runs in the workers, a user's on the transformed images.
        if (collate_fn is default_collate) != self._collates_as_torch:
            raise stale("collate_fn")
        folders = folders_in(self.dataset)
        if [id(each.dataset) for each in folders] != [id(each.dataset) for each in self._folders]:
            raise stale("dataset")
        now = [function_of(folder.dataset) for folder in self._folders]
        if any(a is not b for a, b in zip(now, self._functions, strict=True)):
            raise stale("the function of set_transform")
        for name, read in self._read.items():
            if any(map(Snapshot.differs, read, self._values(name))):
                attribute = self._folders[0].attribute if name == "transform" else name
                raise stale(f"dataset.{attribute}")


def _parts_of(transform: Transform) -> object:
    """A transform, with the pipelines that it holds if it gives several views: they are read."""
    traced = LeftTraced.of_pipeline([*flatten(transform)])
    return [transform, *traced.pipelines.values()] if traced else transform
