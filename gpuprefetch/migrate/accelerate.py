"""accelerate: a built DataLoader over image files, moved to the device in one call.

The loader stays as it was built: sampler, workers, generator and all. Its dataset is copied with
another ``loader`` function, one that reads a file's bytes and leaves them encoded, and its
transforms go to the prefetcher.
"""

import contextlib
import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import MemberDescriptorType, SimpleNamespace
from typing import Any

import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from gpuprefetch.core.errors import text_of
from gpuprefetch.core.loaders import changed
from gpuprefetch.core.nested import map_leaves, select
from gpuprefetch.images.apart import image_of, is_image
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.folder import EncodedImageFolder, fault_of, read_image, read_open
from gpuprefetch.images.guard import (
    Encoded,
    UndecodedError,
    begin_reading,
    end_reading,
    is_marked,
)
from gpuprefetch.images.targets import followers
from gpuprefetch.lists.convert import Plan, Step, convert, fixes_size, title
from gpuprefetch.lists.snapshot import Snapshot
from gpuprefetch.policies.known import UnsupportedTransformError, flatten
from gpuprefetch.policies.per_image import Cast
from gpuprefetch.policies.timm import is_timm
from gpuprefetch.prefetcher import DataPrefetcher
from gpuprefetch.transforms.head import read_transforms
from gpuprefetch.transforms.random import trial_draws


def accelerate(
    loader: DataLoader[Any],
    *,
    keep_unknown: bool = False,
    print_plan: bool = True,
    **prefetcher_options: Any,
) -> DataPrefetcher:
    """Move a loader over torchvision's image folders to the device: decode, augmentation and all.

    Args:
        loader: over an ``ImageFolder``, ``DatasetFolder`` or ``ImageNet``, a subclass that reads
            through its ``loader`` and ``transform``, timm's ``ImageDataset``, or a ``Subset`` or
            ``ConcatDataset`` of them, with a v1, v2 or timm transform pipeline. It is left alone.
        keep_unknown: whether ops that cannot move, and all ops before them and up to the crop, stay
            in the workers. The workers then decode every file themselves.
        print_plan: whether to print where each op runs now, and what differs.
        prefetcher_options: of :class:`DataPrefetcher`; its ``transforms`` come last.

    Returns:
        A prefetcher that gives the loader's batches, in its order and with its samples and
        targets, the images transformed on the device with draws of their own. Its ``dataset`` is
        the loader's own, whose samples are decoded. A ``collate_fn`` of the user's (MixUp, CutMix)
        runs on the device, on the transformed images, unless all transforms stay in the workers.

    Raises:
        TypeError: for a loader or dataset that is none of these.
        UnsupportedTransformError: for an op that cannot move, with what to do.

    Example:
        >>> loader = gpuprefetch.accelerate(loader)
        >>> for images, target in loader: ...  # the loop is unchanged
    """
    folders = folders_of(loader)
    pipeline = pipeline_of(folders)
    try:
        plan, keep = convert(pipeline, pictures=True), 0
        check_loaders(folders)
    except UnsupportedTransformError:
        if not keep_unknown:
            raise
        plan, keep = _split(pipeline, folders[0])
    _refuse_under_way(loader)
    asked = ("transforms", "dtype", "memory_format")
    changes = bool(plan.transforms) or any(prefetcher_options.get(name) for name in asked)
    tensors = changes or keep < len(pipeline)  # else PIL images may be for the collate function
    part = _worker_part(pipeline[:keep], tensors=tensors, marked=changes) if keep else None
    view = view_of(loader.dataset, part)
    needed = not keep or bool(plan.transforms)
    count = check_sample(view, folders, encoded=not keep, needed=needed)
    if keep and changes and count > 1:
        raise TypeError(
            f"A sample holds {count} tensors of three dimensions, and with keep_unknown=True it is "
            "not known which of them is the image. Replace what cannot move, or return one."
        )
    apart = not keep or (changes and count == 1)
    prefetcher = _Accelerated(
        loader,
        plan,
        prefetcher_options,
        view=view,
        kept=pipeline[:keep],
        late=apart and loader.collate_fn is not default_collate,
    )
    if print_plan:
        print(prefetcher.describe(decodes_on_workers=keep > 0))
    return prefetcher


# What says how a dataset decodes its files, in place of which they come encoded.
_DECODING = ("loader", "load_bytes", "input_img_mode")


class _Accelerated(DataPrefetcher):
    """A prefetcher that knows its plan, and its loader's own dataset."""

    def __init__(
        self,
        loader: DataLoader[Any],
        plan: Plan,
        options: dict[str, Any],
        *,
        view: Any,
        kept: list[Any],
        late: bool,
    ) -> None:
        self.plan = plan
        self._dataset = loader.dataset
        self._late = late
        self._added = options.pop("transforms", None)
        own = self._added or ()
        self._own = [*own] if isinstance(own, Sequence) else [own]
        transforms = [*plan.transforms, *self._own]
        if not transforms or read_transforms(transforms)[1]:
            # Between the launch and the ops after it values must not be rounded to bfloat16.
            cast = Cast(options.pop("dtype", None), options.pop("memory_format", None))
            transforms += [cast] if cast.dtype or cast.memory_format else []
        super().__init__(changed(loader, dataset=view), transforms=transforms, **options)
        running = [*kept, *self._running_ops()]
        self._collates_as_torch = loader.collate_fn is default_collate
        self._folders = _bottom(self._dataset)
        # What stays in the workers reads files by the dataset's own loader, whatever that is.
        names = ["transform"] if kept else ["transform", *_DECODING]
        self._sources = {
            name: [Snapshot(read, running) for read in self._read_now(name)] for name in names
        }
        self._added_read = Snapshot(self._added, running)

    def _read_now(self, name: str) -> list[Any]:
        return [getattr(folder, name, None) for folder in self._folders]

    def _refuse_changed(self) -> None:
        if self._added_read.differs(self._added):
            raise stale("transforms")
        if (self.collate_fn is default_collate) != self._collates_as_torch:
            raise stale("collate_fn")  # which says whether it gets the transformed images
        folders = _bottom(self._dataset)
        if [*map(id, folders)] != [*map(id, self._folders)]:
            raise stale("dataset")
        for name, before in self._sources.items():
            if any(map(Snapshot.differs, before, self._read_now(name))):
                raise stale(f"dataset.{name}")
        super()._refuse_changed()

    @property
    def dataset(self) -> Any:
        """The loader's own, which gives decoded samples; the workers read a view of it."""
        return self._dataset

    def describe(self, *, decodes_on_workers: bool) -> str:
        on_gpu = self.decodes_on_gpu and not decodes_on_workers
        decode = "GPU, a share of it worker CPU (cpu_share)" if on_gpu else "worker CPU"
        collate = "worker CPU"
        if self._late:
            collate = f"{title(self.collate_fn)}, on the transformed images on {self.device}"
        own = ", ".join(map(title, self._own))
        after = f"\n  after them: {own}" if own else ""
        return f"accelerate: decode: {decode}\n{self.plan}{after}\n  collate: {collate}"


@dataclass(slots=True)
class _Kept(Encoded):
    """The pixels of a picture halfway through its transforms: nothing else may change them."""

    pixels: torch.Tensor

    def __post_init__(self) -> None:
        begin_reading()


def _keep(made: Any) -> Any:
    return map_leaves(lambda leaf: _Kept(leaf) if isinstance(leaf, torch.Tensor) else leaf, made)


def _collate_kept(images: list[_Kept], *, collate_fn_map: Any = None) -> Any:
    return default_collate([image.pixels for image in images])


default_collate_fn_map[_Kept] = _collate_kept


def read_encoded(path: Any) -> EncodedImage:
    return read_image(path)


def _refuse_odd_file(path: Any) -> None:
    """Refuse what others would open, and wait for ever."""
    with contextlib.suppress(OSError):  # they will tell; or it is in an archive
        if fault := fault_of(os.stat(path)):  # noqa: PTH116
            raise ValueError(f"cannot read {str(path)!r}: {fault}.")


def _left_encoded(image: Any) -> Any:
    """Stands for a transform that runs on the device; a module would refuse what is not decoded.

    Each call of the transform samples anew, so the images of a sample are sampled for one by one.
    """
    if not isinstance(image, EncodedImage):
        return image
    image = copy.copy(image)
    image._apart = True
    return image


def _worker_part(ops: list[Any], *, tensors: bool, marked: bool) -> Any:
    """The ops that stay in the workers, after a decode; gives uint8 or float tensors."""
    from torchvision.transforms import v2

    last = [v2.PILToTensor()] if tensors else []  # which lets tensors pass
    return v2.Compose([*ops, *last, *([_keep] if marked else [])])


class EncodedReader:
    """A reader of timm's whose files are :class:`EncodedImage` when ``ImageDataset`` reads them."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        path = self.filename(index, absolute=True)
        _refuse_odd_file(path)
        file, *rest = self._reader[index]
        with file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            image = EncodedImage(read_open(file, size), index, path)
        return SimpleNamespace(read=lambda: image), *rest

    def __len__(self) -> int:
        return len(self._reader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # before _reader is set, in copies and pickles
            raise AttributeError(name)
        return getattr(self._reader, name)


def folders_of(loader: Any) -> list[Any]:
    if not isinstance(loader, DataLoader):
        hint = " Build it with use_prefetcher=False." if is_timm(loader, "PrefetchLoader") else ""
        if isinstance(loader, DataPrefetcher):
            hint = " Pass the DataLoader that it was made from."
        elif isinstance(loader, Dataset):
            hint = " Build one of it: DataLoader(dataset, batch_size=...)."
        got = type(loader).__name__.replace(_Accelerated.__name__, DataPrefetcher.__name__)
        raise TypeError(f"accelerate and parity take a DataLoader, got {got}.{hint}")
    if is_timm(loader.collate_fn, "FastCollateMixup"):
        raise TypeError(
            "timm's FastCollateMixup rounds to uint8, for timm's own prefetcher. Leave that "
            "collate_fn out, and use timm.data.Mixup with the same arguments in the loop."
        )
    if loader.batch_sampler is None:
        raise TypeError(
            "accelerate and parity take a DataLoader that makes batches. Give it a batch_size."
        )
    return _bottom(loader.dataset)


def _bottom(dataset: Any) -> list[Any]:
    from torchvision.datasets import DatasetFolder

    if isinstance(dataset, Subset):
        return _bottom(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return [folder for part in dataset.datasets for folder in _bottom(part)]
    if isinstance(dataset, DatasetFolder) or is_timm(dataset, "ImageDataset"):
        return [dataset]
    if isinstance(dataset, EncodedImageFolder):
        raise TypeError(
            "An EncodedImageFolder has moved over already: pass its loader to "
            "DataPrefetcher(loader, transforms=[...])."
        )
    raise TypeError(
        "accelerate knows torchvision's ImageFolder, DatasetFolder and ImageNet, timm's "
        "ImageDataset, and Subset and ConcatDataset of them, got "
        f"{type(dataset).__name__}. For another dataset return EncodedImage(data, index, path) "
        "from it and pass DataPrefetcher(loader, transforms=convert_transforms(pipeline))."
    )


def view_of(dataset: Any, transform: Any) -> Any:
    """``dataset`` with another transform, and its state; None leaves its files encoded."""
    if isinstance(dataset, ConcatDataset):
        return _view(dataset, {"datasets": [view_of(part, transform) for part in dataset.datasets]})
    if isinstance(dataset, Subset):
        return _view(dataset, {"dataset": view_of(dataset.dataset, transform)})
    # A dataset may call it without asking whether it is there.
    instead: dict[str, Any] = {"transform": transform or _left_encoded}
    if transform is None and is_timm(dataset, "ImageDataset"):
        instead |= {"reader": EncodedReader(dataset.reader), "load_bytes": True}
    elif transform is None:
        instead["loader"] = read_encoded
    return _view(dataset, instead)


def stale(what: str) -> TypeError:
    return TypeError(f"{what} has changed since accelerate(). Call it again.")


def _view(dataset: Any, instead: dict[str, Any]) -> Any:
    """A second face of a dataset, which shares all of its state but has ``instead`` for some."""
    kind, seen = type(dataset), {name: vars(dataset).get(name) for name in instead}
    part = instead.get("transform")

    def read(name: str, view: Any) -> Any:
        if vars(view).get(name) is not seen[name]:
            raise stale(f"dataset.{name}")
        return instead[name]

    def reduced(view: Any, protocol: Any) -> Any:
        bare = copy.copy(dataset)
        for name in seen:  # which may be what cannot be pickled
            vars(bare).pop(name, None)
        return _view, (bare, instead)

    def get(view: Any, index: Any) -> Any:
        sample = kind.__getitem__(view, index)
        if isinstance(image_of(sample), torch.Tensor):
            raise UndecodedError(
                f"{kind.__name__}.__getitem__({index}) gave an image that is transformed already, "
                "such as a kept one. Let it keep no images."
            )
        return sample

    faces: dict[str, Any] = {name: property(partial(read, name)) for name in instead}
    if {"loader", "reader"} & instead.keys() or _keep in getattr(part, "transforms", ()):
        faces["__getitem__"] = get
    faces = _slots_of(dataset) | faces
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    own = {**faces, **names, "__reduce_ex__": reduced}
    # Neither the metaclass of the user's class nor its __init_subclass__ hears of this class.
    view: Any = object.__new__(type.__new__(type(kind), kind.__name__, (_Unheard, kind), own))
    object.__setattr__(view, "__dict__", vars(dataset))
    return view


class _Unheard:
    """Stands before a user's class among the bases of another: its hooks do not run."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        pass


def _slots_of(dataset: Any) -> dict[str, Any]:
    """What a dataset holds in slots, for a view that shares only its ``__dict__``."""
    return {
        name: _forwarded(slot, dataset)
        for base in type(dataset).__mro__
        for name, slot in vars(base).items()
        if isinstance(slot, MemberDescriptorType)
    }


def _forwarded(slot: MemberDescriptorType, dataset: Any) -> property:
    def read(view: Any) -> Any:
        return slot.__get__(dataset)

    def write(view: Any, value: Any) -> None:
        slot.__set__(dataset, value)

    return property(read, write)


def _refuse_under_way(loader: DataLoader[Any]) -> None:
    # A sampler gives no samples, and may be its own iterator.
    apart = ("_iterator", "sampler", "batch_sampler")
    under_way = [n for n, v in vars(loader).items() if n not in apart and isinstance(v, Iterator)]
    if under_way:
        raise TypeError(
            f"{type(loader).__name__} keeps an iterator over its own dataset (.{under_way[0]}), "
            "which would go on giving that dataset's samples. Use a DataLoader, with "
            "persistent_workers=True if the workers are to live on."
        )


def pipeline_of(folders: list[Any]) -> list[Any]:
    first, *rest = (folder.transform for folder in folders)
    if any(other is not first for other in rest):
        raise TypeError(
            "The datasets of the loader have different transforms, and a batch on the device is "
            "transformed as one. Give them one object, or build one loader for each of them."
        )
    if first is None:
        raise TypeError(
            f"The loader's {type(folders[0]).__name__} has no transform: there is nothing to move. "
            "What a dataset around it applies is not seen: give it to the folder."
        )
    return [*flatten(first)]


def check_loaders(folders: list[Any]) -> None:
    from torchvision.datasets.folder import accimage_loader, default_loader, pil_loader

    for folder in folders:
        if is_timm(folder, "ImageDataset"):
            own = folder.load_bytes or folder.input_img_mode != "RGB"
            name, arguments = repr(folder.input_img_mode), "load_bytes and input_img_mode"
        else:
            name, arguments = getattr(folder.loader, "__name__", repr(folder.loader)), "loader"
            # torchvision's: RGB, as PIL decodes it, EXIF orientation left alone.
            own = folder.loader not in (default_loader, pil_loader, accimage_loader)
        if own:
            raise UnsupportedTransformError(
                f"{type(folder).__name__}(loader={name}) decodes in a way of its own. Leave "
                f"{arguments} out to decode as PIL does, on the device, or pass keep_unknown=True "
                "to keep it, and the transforms up to the crop, in the workers."
            )


def picture_of(folder: Any) -> Any:
    """What the folder's transform gets of its first file."""
    if hasattr(folder, "samples"):
        _refuse_odd_file(folder.samples[0][0])
        return folder.loader(folder.samples[0][0])
    folder = copy.copy(folder)  # timm's, whose files may be in an archive
    folder.transform = None
    return folder[0][0]


def _split(pipeline: list[Any], folder: Any) -> tuple[Plan, int]:
    """The shortest start of a pipeline that must stay in the workers, and the plan of the rest."""
    from torchvision.transforms import v2

    sample = picture_of(folder)
    keep = next((i + 1 for i, op in enumerate(pipeline) if fixes_size(op)), len(pipeline))
    while True:
        with trial_draws():
            given = v2.Compose(pipeline[:keep])(sample)
        made = v2.PILToTensor()(given)
        kept = [Step(op, None, "worker CPU", "unchanged") for op in pipeline[:keep]]
        if keep == len(pipeline):  # whatever it gives
            return Plan(kept, []), keep
        if is_image(made) and (made.dtype == torch.uint8 or made.is_floating_point()):
            with contextlib.suppress(UnsupportedTransformError):
                plan = convert(pipeline[keep:], batched=made, pictures=given is not made)
                return Plan([*kept, *plan.steps], plan.transforms), keep
        keep += 1


def _is_kept(image: Any, again: Any) -> bool:
    """Whether two samples hold the same file as it was read once."""
    if isinstance(image, EncodedImage) and isinstance(again, EncodedImage):
        return image.data is again.data
    return again is image


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """A state with lists and dicts of its own."""
    return {n: copy.copy(v) if isinstance(v, (dict, list)) else v for n, v in state.items()}


def check_sample(dataset: Any, folders: list[Any], *, encoded: bool, needed: bool) -> int:
    """How many images the first sample of a view has, of ``folders``; 1 of an empty one.

    One is ``needed`` where the device has something to do, and an ``encoded`` one for all of it.
    """
    if not len(dataset):
        return 1
    hint = (
        "it must read through self.loader(path) and self.transform(sample), as ImageFolder does, "
        "and take an int. Return EncodedImage(data, index, path) from it instead, and wrap its "
        "loader in DataPrefetcher(loader, transforms=convert_transforms(pipeline))."
    )
    held = [(vars(folder), _copied(vars(folder))) for folder in folders]
    try:
        with trial_draws():
            sample, again = dataset[0], dataset[0]
    except UndecodedError:
        raise  # which says more
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"{type(dataset).__name__}.__getitem__(0) failed ({text_of(error)}): {hint}"
        ) from error
    finally:
        end_reading()
    image = image_of(sample)
    if needed and (image is None or (encoded and not isinstance(image, EncodedImage))):
        raise TypeError(f"{type(dataset).__name__}.__getitem__ gave no encoded file: {hint}")
    if is_marked(image) and _is_kept(image, image_of(again)):
        for state, before in held:  # the dataset gives it back
            state.clear()
            state.update(before)
        raise TypeError(
            f"{type(dataset).__name__} keeps the images that it reads. Here these are not decoded "
            "or transformed, and its own samples would not be either. Let it keep no images."
        )
    if encoded and followers(sample):
        raise TypeError(
            f"{type(dataset).__name__}.__getitem__ gives boxes, masks or points. Its transform "
            "leaves them where they are, but a prefetcher moves them with their image. Return "
            "plain tensors: mask.as_subclass(torch.Tensor)."
        )
    return len(select(sample, is_image))
