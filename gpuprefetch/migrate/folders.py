"""What accelerate and parity can read: the datasets with a transform that a loader reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gpuprefetch.core.errors import text_of
from gpuprefetch.core.nested import select
from gpuprefetch.images.apart import CHOOSE_BEFORE, image_of, is_image
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.folder import EncodedImageFolder
from gpuprefetch.images.guard import UndecodedError, end_reading, is_marked
from gpuprefetch.images.walk import walk
from gpuprefetch.lists.convert import convert_transforms
from gpuprefetch.lists.forms import PICTURES, Form
from gpuprefetch.lists.processor import image_processor
from gpuprefetch.migrate.dataset_view import (
    datasets_in,
    own_transform,
    own_transforms,
    refuse_odd_file,
    transform_at,
    transform_in,
    view_of,
)
from gpuprefetch.migrate.result import LeftEncoded, decodes
from gpuprefetch.migrate.row_functions import function_of, is_of_rows, without_pipeline
from gpuprefetch.migrate.taken import Takes, form_of
from gpuprefetch.migrate.traced import Chain, LeftTraced
from gpuprefetch.migrate.unseen import seeding_in
from gpuprefetch.migrate.untouched import untouched
from gpuprefetch.migrate.ways import AS_IT_IS, KEPT, SEEDED, TWO_WAYS
from gpuprefetch.policies.known import UnsupportedTransformError, flatten, samples_once
from gpuprefetch.policies.per_image import Transform
from gpuprefetch.policies.timm import is_timm
from gpuprefetch.prefetcher import DataPrefetcher
from gpuprefetch.transforms.random import trial_draws

Sample = Any


@dataclass(frozen=True, slots=True)
class Folder:
    """A dataset that has a transform, such as torchvision's ``ImageFolder``."""

    dataset: Any
    attribute: str  # which holds the transform, or the variable of a function of rows

    @property
    def transform(self) -> Any:
        return transform_at(self.dataset, self.attribute)

    @property
    def name(self) -> str:
        return type(self.dataset).__name__


# --- The loader ---


def folders_of(loader: object) -> list[Folder]:
    """The folders that a loader reads, in the order of their samples."""
    if not isinstance(loader, DataLoader):
        raise _no_loader(loader)
    if is_timm(loader.collate_fn, "FastCollateMixup"):
        raise TypeError(
            "timm's FastCollateMixup rounds to uint8, for timm's own prefetcher. Leave that "
            "collate_fn out, and use timm.data.Mixup with the same arguments in the loop."
        )
    if loader.batch_sampler is None and not isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            "accelerate and parity take a DataLoader that makes batches. Give it a batch_size."
        )
    return folders_in(loader.dataset)


def _no_loader(given: object) -> TypeError:
    name = type(given).__name__
    hint = (
        " Build one of a map-style dataset: DataLoader(dataset, batch_size=...). For batches from "
        "elsewhere write DataPrefetcher(batches, transforms=[...])."
    )
    if isinstance(given, DataPrefetcher):
        name = DataPrefetcher.__name__
        hint = " Pass the DataLoader that it was made from."
    elif isinstance(given, Dataset):
        hint = " Build one of it: DataLoader(dataset, batch_size=...)."
    elif is_timm(given, "PrefetchLoader"):
        hint = " Build it with use_prefetcher=False."
    return TypeError(f"accelerate and parity take a DataLoader, got {name}.{hint}")


def folders_in(dataset: object) -> list[Folder]:
    """The datasets with a transform that a dataset's samples come from, in their order."""
    name = type(dataset).__name__
    if any(isinstance(each, EncodedImageFolder) for each in datasets_in(dataset)):
        raise TypeError(
            "An EncodedImageFolder has moved over already: pass its loader to "
            "DataPrefetcher(loader, transforms=[...])."
        )
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"accelerate cannot read {name}, whose samples come in a stream. {_by_hand(dataset)}"
        )
    found = [
        Folder(each, attribute)
        for each in datasets_in(dataset)
        if (attribute := transform_in(each))
    ]
    if not found:
        for each in datasets_in(dataset):
            if is_of_rows(each):
                raise UndecodedError(without_pipeline(each))
        several = [name for each in datasets_in(dataset) for name in own_transforms(each)]
        has = f"has several transforms ({', '.join(several)})"
        if not several:
            has = "has no transform, nor has a dataset within it, so there is nothing to move"
        raise TypeError(
            f"accelerate cannot read {name}: it {has}. It takes the one that a dataset holds as "
            "self.transform. Tensors need none: DataPrefetcher(loader, transforms=[...]). "
            f"{_by_hand(dataset) if _pipelines_of(dataset) else f'{TWO_WAYS} {AS_IT_IS}'}"
        )
    return found


def _by_hand(dataset: object) -> str:
    """What to write for a dataset that accelerate cannot read, whose pipeline may not move."""
    pipelines = _pipelines_of(dataset)
    for path, pipeline in pipelines.items():
        try:
            convert_transforms(pipeline)
        except ValueError as error:
            return f"{AS_IT_IS} To decode on the device, change {path} first: {error}"
    paths = [*pipelines] or ["transform"]
    line = f"convert_transforms({paths[0]})"
    let = "Let"
    if len(paths) > 1:
        line = f"gpuprefetch.Views(*map(convert_transforms, [{', '.join(paths)}]))"
        let = "If it gives several views of a picture, let"
    return (
        f"{let} it give EncodedImage(data, index, path) in place of the picture, apply no "
        f"transform, and write DataPrefetcher(loader, transforms={line}). {AS_IT_IS}"
    )


def _pipelines_of(dataset: object) -> dict[str, object]:
    """The transforms of a dataset or its image processors, each with the expression for it."""
    own: dict[str, object] = getattr(dataset, "__dict__", {})
    processors = [name for name, value in own.items() if image_processor(value) is not None]
    names = own_transforms(dataset) or processors
    if is_of_rows(dataset):
        return {name: transform_at(dataset, name) for name in names}
    return {f"dataset.{name}": getattr(dataset, name) for name in names}


def refuse_second_transforms(dataset: object) -> None:
    """Refuse a dataset that has a transform, around one that has another."""
    for each in datasets_in(dataset):
        if own_transform(each) and not transform_in(each):
            within, *_ = folders_in(each)
            raise UndecodedError(
                f"{type(each).__name__} has a transform, and gets images that are not transformed "
                f"yet, though {within.name} within it has another one. Give all ops to one of "
                "them, v2.Compose([*first.transforms, *second.transforms]), and None to the other."
            )


def refuse_seeding(dataset: object, ops: Iterable[Transform]) -> None:
    """Refuse a dataset that seeds torch for its samples, if any of these ops samples.

    It does so for an image and its mask, say, which on the device would not move alike.
    """
    if not any(map(samples_once, ops)):
        return
    for each in datasets_in(dataset):
        if seeding := seeding_in(function_of(each) if is_of_rows(each) else each):
            raise TypeError(
                f"{seeding}, which settles the random parameters of the transform, or gives those "
                f"of one picture to another. {SEEDED}"
            )


def refuse_under_way(loader: DataLoader[Any]) -> None:
    """Refuse a loader that keeps an iterator, which would read the dataset and not the view."""
    # torch's own iterator is for one epoch. A sampler gives no samples, and may be an iterator.
    known = ("_iterator", "sampler", "batch_sampler")
    for name, value in vars(loader).items():
        if name not in known and isinstance(value, Iterator):
            raise TypeError(
                f"{type(loader).__name__} keeps an iterator over its own dataset (.{name}), which "
                "would go on giving that dataset's samples. Use a DataLoader. Its workers live on "
                "with persistent_workers=True."
            )


# --- The folders ---


def pipeline_of(folders: Sequence[Folder]) -> list[Transform]:
    """The ops of the one transform that all folders have."""
    first, *rest = (folder.transform for folder in folders)
    if any(other is not first for other in rest):
        raise TypeError(
            "The datasets of the loader have different transforms, and a batch on the device is "
            "transformed as one. Give them one object, or build one loader for each of them."
        )
    return list(flatten(first))


def check_loaders(folders: Sequence[Folder]) -> None:
    """Refuse timm's datasets that do not decode to RGB; others show it in each sample."""
    for folder in folders:
        dataset = folder.dataset
        if is_timm(dataset, "ImageDataset"):
            if dataset.load_bytes or dataset.input_img_mode != "RGB":
                raise UnsupportedTransformError(
                    f"{folder.name}(input_img_mode={dataset.input_img_mode!r}) decodes in its own "
                    "way. Leave load_bytes and input_img_mode out to decode as PIL does, on the "
                    "device. Or pass keep_unknown=True: the workers then decode with it, and run "
                    "the transforms up to the crop."
                )


def encoded_view(
    dataset: Any,
    pipeline: Sequence[Transform] | LeftEncoded,
    folders: Sequence[Folder],
    begins: Form = PICTURES,
) -> Any:
    """The view of a dataset whose files stay encoded, as ``pipeline`` runs on the device.

    ``begins`` is the form of what the pipeline gets.
    """
    refuse_second_transforms(dataset)
    check_loaders(folders)
    if isinstance(pipeline, LeftEncoded):
        return view_of(dataset, pipeline)
    return view_of(dataset, LeftEncoded(Takes.of(pipeline, begins)))


def begins_with(dataset: Any) -> Form:
    """The form of what the transform of a dataset gets for the first sample.

    Files stay encoded meanwhile. A dataset without a sample counts as one of PIL images; if its
    first one cannot be read, the form is not known.
    """
    telling = _Telling()
    try:
        if not len(dataset):
            return PICTURES
        # The check of the sample is to see for itself whether the dataset seeds torch.
        seeds = torch.random.fork_rng(devices=[])
        with untouched(datasets_in(dataset)), trial_draws(), seeds:
            view_of(dataset, telling)[0]
    except Exception:  # whoever needs the sample tells of it
        return telling.form or Form()
    finally:
        end_reading()
    return telling.form or PICTURES  # of a dataset that calls no transform


class _Telling(LeftEncoded):
    """Stands for a transform, and tells the form of what it gets first.

    It gives what any other would: a dataset may catch whatever is raised, and try again.
    """

    def __init__(self) -> None:
        super().__init__(Takes.of([], begins=None))
        self.form: Form | None = None

    def __call__(self, *given: object, **named: object) -> object:
        if self.form is None:
            self.form = form_of(next(iter([*given, *named.values()]), None))
        return super().__call__(*given, **named)


def chains_of(dataset: Any, traced: LeftTraced, folders: Sequence[Folder]) -> list[Chain]:
    """Which pipelines a transform of several views calls for the first sample.

    Raises:
        UndecodedError: if the transform does not show it.
    """
    view = encoded_view(dataset, traced, folders)
    traced.refuse_unseen()
    try:
        with untouched([*datasets_in(dataset), *traced.objects]), trial_draws():
            view[0]
    finally:
        end_reading()
    if not traced.seen:
        raise UndecodedError(f"{type(dataset).__name__}.__getitem__(0) calls no transform.")
    return traced.seen[0]


def joint_view(dataset: Any, folders: Sequence[Folder]) -> Any:
    """The view of a dataset whose transform also gets what is beside the picture."""
    refuse_second_transforms(dataset)
    check_loaders(folders)
    return view_of(dataset, LeftEncoded(Takes.of([], begins=None), folders[0].transform))


def takes_several(dataset: Any, *, may_stay: bool) -> bool:
    """Whether the transform of a dataset gets more than a picture, for the first sample.

    ``may_stay`` says whether it may stay in the workers.

    Raises:
        UnsupportedTransformError: if it must move, and gets them by name, or in one dict, list or
            tuple.
    """
    try:
        with untouched(datasets_in(dataset)), trial_draws():
            view_of(dataset, _catch_all)[0]
    except _Caught as caught:
        _close(caught.args)
        return len(caught.args) > 1
    except _CaughtOtherwise as caught:
        how, given = caught.args
        _close(given)
        if may_stay:
            return False
        raise UnsupportedTransformError(
            f"The transform of the dataset is called with {how}. One that gets a picture and "
            "what is beside it moves if it gets them by position, and gives as many values: "
            f"image, mask = self.transform(image, mask). {AS_IT_IS}"
        ) from None
    except OSError:
        raise  # a file that is not there
    except Exception:  # the error that the dataset has met before tells more
        return False
    return False


def _close(given: Iterable[object]) -> None:
    """Close pictures that PIL may not have read yet."""
    for picture in given:
        if callable(close := getattr(picture, "close", None)):
            close()


class _Caught(BaseException):
    """Carries a picture out of a dataset; no dataset catches it."""


class _CaughtOtherwise(BaseException):
    """Carries out of a dataset how its transform is called, in words, and with what."""


def _catch(picture: object, *others: object) -> Any:
    raise _Caught(picture, *others)


def _catch_all(*given: object, **named: object) -> Any:
    if named:
        by_name = f"arguments by name: {', '.join(named)}"
        raise _CaughtOtherwise(by_name, [*given, *named.values()])
    if len(given) == 1 and isinstance(only := given[0], (dict, list, tuple)):
        held = only.values() if isinstance(only, dict) else only
        raise _CaughtOtherwise(f"one {type(only).__name__}", [*held])
    raise _Caught(*given)


def picture_of(dataset: Any) -> Any:
    """What the transform of a dataset, or of those within it, gets for the first sample."""
    for each in datasets_in(dataset):
        if samples := getattr(each, "samples", None):  # torchvision's folders
            refuse_odd_file(samples[0][0])
    try:
        with untouched(datasets_in(dataset)), trial_draws():
            view_of(dataset, _catch)[0]
    except _Caught as caught:
        return caught.args[0]
    raise TypeError(f"{type(dataset).__name__}.__getitem__(0) calls no transform. {AS_IT_IS}")


# --- The first sample of a view ---


@dataclass(frozen=True, slots=True)
class Checked:
    """What the first sample of a view shows.

    Attributes:
        images: how many it has; 1 for an empty dataset.
        decoder: who has decoded them and why, in words; empty for files.
    """

    images: int = 1
    decoder: str = ""


def check_sample(
    view: Any, dataset: Any, *, encoded: bool, needed: bool, objects: Sequence[object] = ()
) -> Checked:
    """Read the first sample of a view, and refuse one that the device cannot take.

    Args:
        view: of the user's dataset.
        dataset: the user's, which a trial is to leave as it is.
        objects: others that it is to leave so.
        encoded: whether the image must be encoded, as all transforms run on the device.
        needed: whether there must be an image, as some transform runs on the device.
    """
    if not len(view):
        return Checked()
    name = type(view).__name__
    with untouched([*datasets_in(dataset), *objects]), decodes as noted, _tried(view):
        sample = view[0]
        uses = [*noted]
        again = view[0]
    image = image_of(sample)
    if needed and (image is None or (encoded and not isinstance(image, EncodedImage))):
        if sample is None:
            raise TypeError(
                f"{name}.__getitem__(0) gave None in place of a sample. {CHOOSE_BEFORE}"
            )
        raise TypeError(f"{name}.__getitem__ gave no image. {TWO_WAYS}")
    if is_marked(image) and image_of(again) is image:
        raise UndecodedError(f"{name}.__getitem__(0) {KEPT}")
    if encoded and walk(sample).has_followers:
        raise TypeError(
            f"{name}.__getitem__ gives boxes, masks or points. Its transform leaves them where "
            "they are, but a prefetcher moves them with their image. Return plain tensors: "
            "mask.as_subclass(torch.Tensor)."
        )
    count = len(select(sample, is_image))
    if not (encoded and uses):
        return Checked(count)
    why = f"it {uses[0]}" if uses[0] else "its pictures are no files"
    return Checked(count, f"the dataset, in the workers ({why})")


@contextlib.contextmanager
def _tried(view: Any) -> Iterator[None]:
    """Read samples of a view on trial in this block."""
    try:
        with trial_draws():
            yield
    except UndecodedError:
        raise  # it says more
    except (AttributeError, TypeError, KeyError) as error:
        why = text_of(error)
        if isinstance(error, KeyError):  # its text is the key alone
            why = f"KeyError: {why}"
        raise TypeError(
            f"{type(view).__name__}.__getitem__(0) failed ({why}): it must read "
            f"through self.transform, and take an int. {TWO_WAYS}"
        ) from error
    finally:
        end_reading()
