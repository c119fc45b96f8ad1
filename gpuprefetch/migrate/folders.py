"""What accelerate and parity can read: the folders that a loader reads, and their transforms."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from gpuprefetch.core.errors import text_of
from gpuprefetch.core.nested import select
from gpuprefetch.images.apart import image_of, is_image
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.folder import EncodedImageFolder
from gpuprefetch.images.guard import UndecodedError, end_reading, is_marked
from gpuprefetch.images.walk import walk
from gpuprefetch.migrate.dataset_view import refuse_odd_file
from gpuprefetch.policies.known import UnsupportedTransformError, flatten
from gpuprefetch.policies.per_image import Transform
from gpuprefetch.policies.timm import is_timm
from gpuprefetch.prefetcher import DataPrefetcher
from gpuprefetch.transforms.random import trial_draws

Folder = Any  # torchvision's DatasetFolder and its subclasses, or timm's ImageDataset
Sample = Any

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
    if loader.batch_sampler is None:
        raise TypeError(
            "accelerate and parity take a DataLoader that makes batches. Give it a batch_size."
        )
    return folders_in(loader.dataset)


def _no_loader(given: object) -> TypeError:
    name = type(given).__name__
    hint = ""
    if isinstance(given, DataPrefetcher):
        name = DataPrefetcher.__name__
        hint = " Pass the DataLoader that it was made from."
    elif isinstance(given, Dataset):
        hint = " Build one of it: DataLoader(dataset, batch_size=...)."
    elif is_timm(given, "PrefetchLoader"):
        hint = " Build it with use_prefetcher=False."
    return TypeError(f"accelerate and parity take a DataLoader, got {name}.{hint}")


def folders_in(dataset: object) -> list[Folder]:
    """The folders that a dataset's samples come from, through ``Subset`` and ``ConcatDataset``."""
    from torchvision.datasets import DatasetFolder

    if isinstance(dataset, Subset):
        return folders_in(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return [folder for part in dataset.datasets for folder in folders_in(part)]
    if isinstance(dataset, DatasetFolder) or is_timm(dataset, "ImageDataset"):
        return [dataset]
    if isinstance(dataset, EncodedImageFolder):
        raise TypeError(
            "An EncodedImageFolder has moved over already: pass its loader to "
            "DataPrefetcher(loader, transforms=[...])."
        )
    raise TypeError(
        f"accelerate cannot read {type(dataset).__name__}, only torchvision's ImageFolder, "
        "DatasetFolder and ImageNet, timm's ImageDataset, and Subset or ConcatDataset of them. Let "
        "it return EncodedImage(data, index, path), and use DataPrefetcher(loader, "
        "transforms=convert_transforms(pipeline))."
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
    if first is None:
        raise TypeError(
            f"The loader's {type(folders[0]).__name__} has no transform: there is nothing to move. "
            "What a dataset around it applies is not seen: give it to the folder."
        )
    return list(flatten(first))


def check_loaders(folders: Sequence[Folder]) -> None:
    """Refuse folders that do not decode as PIL does: RGB, EXIF orientation left alone."""
    for folder in folders:
        if is_timm(folder, "ImageDataset"):
            if folder.load_bytes or folder.input_img_mode != "RGB":
                mode = repr(folder.input_img_mode)
                raise _decodes_otherwise(folder, mode, "load_bytes and input_img_mode")
        elif not _is_of_torchvision(folder.loader):
            name = getattr(folder.loader, "__name__", repr(folder.loader))
            raise _decodes_otherwise(folder, name, "loader")


def _is_of_torchvision(loader: object) -> bool:
    from torchvision.datasets.folder import accimage_loader, default_loader, pil_loader

    return loader in (default_loader, pil_loader, accimage_loader)


def _decodes_otherwise(folder: Folder, loader: str, arguments: str) -> UnsupportedTransformError:
    return UnsupportedTransformError(
        f"{type(folder).__name__}(loader={loader}) decodes in its own way. Leave {arguments} "
        "out to decode as PIL does, on the device. Or pass keep_unknown=True: the workers then "
        "decode with it, and run the transforms up to the crop."
    )


def picture_of(folder: Folder) -> Any:
    """What the folder's transform gets for the first file."""
    if hasattr(folder, "samples"):
        path = folder.samples[0][0]
        refuse_odd_file(path)
        return folder.loader(path)
    folder = copy.copy(folder)  # timm's, whose files may be in an archive
    folder.transform = None
    return folder[0][0]


# --- The first sample of a view ---


class _State(NamedTuple):
    """The attributes of a folder, and a copy of them: a trial must leave no trace."""

    attributes: dict[str, Any]  # its __dict__
    before: dict[str, Any]

    @staticmethod
    def of(folder: Folder) -> _State:
        attributes: dict[str, Any] = folder.__dict__
        copied = {
            name: copy.copy(value) if isinstance(value, (dict, list)) else value
            for name, value in attributes.items()
        }
        return _State(attributes, copied)

    def restore(self) -> None:
        self.attributes.clear()
        self.attributes.update(self.before)


def check_sample(view: Any, folders: Sequence[Folder], *, encoded: bool, needed: bool) -> int:
    """Read the first sample of a view, and refuse one that the device cannot take.

    Args:
        view: of the user's dataset.
        folders: of the dataset, which a trial is to leave as they are.
        encoded: whether the image must be encoded, as all transforms run on the device.
        needed: whether there must be an image, as some transform runs on the device.

    Returns:
        How many images the sample has; 1 for an empty dataset.
    """
    if not len(view):
        return 1
    states = [_State.of(folder) for folder in folders]
    sample, again = _read_twice(view)
    image = image_of(sample)
    name = type(view).__name__
    if needed and (image is None or (encoded and not isinstance(image, EncodedImage))):
        raise TypeError(f"{name}.__getitem__ gave no encoded file: {_READS_OTHERWISE}")
    if is_marked(image) and _is_kept(image, image_of(again)):
        for state in states:  # the dataset has kept an encoded image, and would give it back
            state.restore()
        raise TypeError(
            f"{name} keeps the images that it reads. Here these are not decoded or transformed, "
            "and its own samples would not be either. Let it keep no images."
        )
    if encoded and walk(sample).has_followers:
        raise TypeError(
            f"{name}.__getitem__ gives boxes, masks or points. Its transform leaves them where "
            "they are, but a prefetcher moves them with their image. Return plain tensors: "
            "mask.as_subclass(torch.Tensor)."
        )
    return len(select(sample, is_image))


_READS_OTHERWISE = (
    "it must read through self.loader(path) and self.transform(image), and take an int. If it "
    "cannot, let it return EncodedImage(data, index, path), and use DataPrefetcher(loader, "
    "transforms=convert_transforms(pipeline))."
)


def _read_twice(view: Any) -> tuple[Sample, Sample]:
    """The first sample, and the same one once more."""
    try:
        with trial_draws():
            return view[0], view[0]
    except UndecodedError:
        raise  # it says more
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"{type(view).__name__}.__getitem__(0) failed ({text_of(error)}): {_READS_OTHERWISE}"
        ) from error
    finally:
        end_reading()


def _is_kept(image: object, again: object) -> bool:
    """Whether two samples hold the same file as it was read once."""
    if isinstance(image, EncodedImage) and isinstance(again, EncodedImage):
        return image.data is again.data
    return again is image
