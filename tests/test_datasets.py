"""Datasets of any class move as they are, or name the first sample that does not show how."""

import contextlib
import copy
import functools
import io
import pickle
import random
import re
import shutil
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import OnTheCpu, Split, assert_same_batches
from pictures import draw, encode_jpeg, files_of, write_folder
from PIL import Image, ImageOps
from PIL.Image import open as open_by_another_name
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)
from torchvision import datasets as tv
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader
from torchvision.datasets.vision import StandardTransform
from torchvision.transforms import v2

import gpuprefetch
from gpuprefetch import (
    BadImageError,
    DataPrefetcher,
    EncodedImage,
    EncodedImageFolder,
    Views,
    convert_transforms,
)
from gpuprefetch.images import folder as reading
from gpuprefetch.images.guard import UndecodedError
from gpuprefetch.migrate.accelerate import accelerate
from gpuprefetch.migrate.explain import explain
from gpuprefetch.migrate.folders import encoded_view
from gpuprefetch.migrate.parity import parity

COUNT = 8
CPU = {"device": "cpu", "print_plan": False}
NO_CUDA = "device='cpu'" if torch.cuda.is_available() else "no CUDA device found"
OPS = [v1.Resize(36), v1.CenterCrop(32), v1.ToTensor()]
PIPELINE = v1.Compose(OPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pictures = [draw(48 + 2 * i, 64, seed=i) for i in range(COUNT)]
    return write_folder(tmp_path_factory.mktemp("folder"), pictures, "jpg", quality=95)


@pytest.fixture(scope="module")
def paths(folder):
    return files_of(folder)


def moved(dataset, pipeline=None, **options):
    """Hold a moved loader to the loader as it was: order, targets, and pixels to 2 levels."""
    loader = DataLoader(dataset, batch_size=3, **options)
    prefetcher = accelerate(loader, **CPU)
    assert "worker CPU" not in {step.where for step in prefetcher.plan.steps}
    for (old, *olds), (new, *news) in zip(loader, prefetcher, strict=True):
        assert old.dtype == new.dtype
        assert (old - new).abs().max() <= 2 / 255
        assert repr(olds) == repr(news)
    return prefetcher


# --- torchvision's ------------------------------------------------------------------------------


def as_built(kind, transform=PIPELINE, **attributes):
    """A dataset of torchvision's as its constructor leaves it, without the download."""
    dataset = kind.__new__(kind)
    joint = StandardTransform(transform, None)
    common = {"transform": transform, "target_transform": None, "transforms": joint}
    dataset.__dict__.update(common | attributes)
    return dataset


LABELS = [i % 3 for i in range(COUNT)]
READ_BY_LOADER = {"loader": default_loader}
FILES_AND_LABELS = READ_BY_LOADER | {"_labels": LABELS}
TORCHVISION = {
    "Food101": lambda paths: FILES_AND_LABELS | {"_image_files": paths},
    "Flowers102": lambda paths: FILES_AND_LABELS | {"_image_files": paths},
    "DTD": lambda paths: FILES_AND_LABELS | {"_image_files": paths},
    "SUN397": lambda paths: FILES_AND_LABELS | {"_image_files": paths},
    "FGVCAircraft": lambda paths: FILES_AND_LABELS | {"_image_files": paths},
    "CLEVRClassification": lambda paths: FILES_AND_LABELS | {"_image_files": paths},
    "StanfordCars": lambda paths: READ_BY_LOADER | {"_samples": samples(paths)},
    "Imagenette": lambda paths: READ_BY_LOADER | {"_samples": samples(paths)},
    "RenderedSST2": lambda paths: READ_BY_LOADER | {"_samples": samples(paths)},
    "Places365": lambda paths: READ_BY_LOADER | {"imgs": samples(paths)},
    "SBU": lambda paths: READ_BY_LOADER | {"root": "/", "photos": paths, "captions": paths},
    "INaturalist": lambda paths: {
        "loader": None,
        "root": "/",
        "all_categories": [""],
        "index": [(0, path) for path in paths],
        "target_type": ["full"],
    },
    "LFWPeople": lambda paths: {"_loader": default_loader, "data": paths, "targets": LABELS},
    # These open files themselves.
    "GTSRB": lambda paths: {"_samples": samples(paths)},
    "OxfordIIITPet": lambda paths: {
        "_images": paths,
        "_labels": LABELS,
        "_target_types": ["category"],
    },
    "CelebA": lambda paths: {
        "root": "/",
        "base_folder": "",
        "filename": [f"../{path}" for path in paths],
        "target_type": ["identity"],
        "identity": torch.arange(COUNT).view(-1, 1),
        "attr": paths,
    },
    "WIDERFace": lambda paths: {
        "split": "train",
        "img_info": [{"img_path": path, "annotations": {"blur": 3}} for path in paths],
    },
}


def samples(paths):
    return list(zip(paths, LABELS, strict=True))


@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvisions_datasets_move(paths, name, tmp_path, monkeypatch):
    if name == "CelebA":  # it joins its root with a folder of a fixed name
        (tmp_path / "img_align_celeba").mkdir()
        attributes = TORCHVISION[name](paths) | {"root": str(tmp_path)}
        attributes["filename"] = paths
    else:
        attributes = TORCHVISION[name](paths)
    prefetcher = moved(as_built(getattr(tv, name), **attributes))
    assert prefetcher.stats.cpu_images == COUNT  # from files


# --- datasets of one's own ----------------------------------------------------------------------


class Own(Dataset):
    """Reads a file by ``read``, and gives its number beside it."""

    def __init__(self, paths, read, transform=PIPELINE):
        self.paths, self.read, self.transform = paths, read, transform

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return self.transform(self.read(self.paths[index])), index


class AtOnce(Own):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def within_a_with(path):
    with Image.open(path) as picture:
        return picture.convert("RGB")


def of_an_open_file(path):
    with Path(path).open("rb") as file:
        return Image.open(file).convert("RGB")


def unless_it_is_rgb(path):
    picture = Image.open(Path(path))
    if picture.mode != "RGB":
        picture = picture.convert("RGB")
    assert isinstance(picture, Image.Image) and picture.size == (picture.width, picture.height)
    return picture


READS = {
    "Image.open": lambda path: Image.open(path).convert("RGB"),
    "a path": lambda path: Image.open(Path(path)).convert(mode="RGB"),
    "with": within_a_with,
    "a file": of_an_open_file,
    "bytes": lambda path: Image.open(io.BytesIO(Path(path).read_bytes())).convert("RGB"),
    "if it is not RGB": unless_it_is_rgb,
    "as it is": Image.open,
    "torchvision's": default_loader,
    "copied": lambda path: Image.open(path).convert("RGB").copy(),
}


@pytest.mark.parametrize("name", READS)
def test_files_that_a_dataset_opens_itself_move(paths, name):
    read = (lambda path: Image.open(path)) if name == "as it is" else READS[name]
    prefetcher = moved(Own(paths, read))
    assert prefetcher.stats.cpu_images == COUNT
    assert Image.open is open_by_another_name  # as it was


class Counted(io.BytesIO):
    """A file that tells how much of it was read."""

    count = 0

    def read(self, size=-1):
        data = super().read(size)
        Counted.count += len(data)
        return data


def test_a_large_file_is_looked_into_and_read_once(paths, tmp_path, constants):
    constants(reading, LARGE=100)
    large = []
    for i, path in enumerate(paths):
        large.append(str(tmp_path / f"{i}.png"))
        Image.open(path).save(large[-1])
    for read in (READS["Image.open"], READS["a file"], default_loader):
        moved(Own(large, read))
    dataset = Own(large, lambda path: Image.open(Counted(Path(path).read_bytes())).convert("RGB"))
    prefetcher = accelerate(DataLoader(dataset, 3), **CPU)
    Counted.count = 0
    list(prefetcher)
    size = sum(Path(path).stat().st_size for path in large)
    assert size < Counted.count < 1.5 * size


def test_a_pipeline_that_makes_rgb_takes_pictures_of_any_mode(paths, tmp_path):
    gray = tmp_path / "gray.png"
    Image.fromarray(draw(50, 60, 1)).save(gray)
    ops = [v1.Lambda(lambda picture: picture.convert("RGB")), *OPS]
    moved(Own([*paths, str(gray)], lambda path: Image.open(path), v1.Compose(ops)))


def test_a_mask_beside_the_picture_is_read_as_before(paths):
    class Masked(Own):
        def __getitem__(self, index):
            image, _ = super().__getitem__(index)
            mask = Image.open(self.paths[index]).resize((8, 8)).convert("L")
            size = np.array(Image.open(self.paths[index])).shape
            return image, torch.from_numpy(np.array(mask)), size

    moved(Masked(paths, READS["Image.open"]))


@pytest.mark.parametrize("method", ["__getitem__", "__getitems__"])
def test_workers_and_what_is_pickled_read_the_same(paths, method):
    kind = Own if method == "__getitem__" else AtOnce
    moved(kind(paths, of_an_open_file), num_workers=1)
    prefetcher = accelerate(DataLoader(Own(paths, of_an_open_file), 4), **CPU)
    again = pickle.loads(pickle.dumps(prefetcher))
    for want, got in zip(prefetcher, again, strict=True):
        assert torch.equal(want[0], got[0])


def test_another_thread_opens_pictures_as_before(paths):
    opened = []

    def read(path):
        thread = threading.Thread(target=lambda: opened.append(Image.open(path)))
        thread.start()
        thread.join()
        return Image.open(path).convert("RGB")

    accelerate(DataLoader(Own(paths, read), 4), **CPU)
    for picture in opened:
        assert type(picture).__module__.startswith("PIL.")
        picture.close()


# --- what is done to one picture only -----------------------------------------------------------


def inverted(picture):
    return ImageOps.invert(picture)


def pasted(picture):
    picture.paste(0, (0, 0, 9, 9))
    return picture


def shrunk(picture):
    picture.thumbnail((20, 20))
    return picture


def as_array(picture):
    return Image.fromarray(255 - np.asarray(picture))


def if_a_picture(picture):
    return inverted(picture) if isinstance(picture, Image.Image) else picture


def if_it_works(picture):
    try:
        return inverted(picture)
    except Exception:
        return picture


def by_a_module(picture):
    with contextlib.suppress(Exception):
        picture = v2.RandomInvert(1.0)(picture)
    return picture


def drawn_on(picture):
    picture.load()[3, 4] = (1, 2, 3)
    return picture


BEFORE = {
    "inverted": inverted,
    "pasted": pasted,
    "shrunk": shrunk,
    "array": as_array,
    "if": if_a_picture,
    "try": if_it_works,
    "module": by_a_module,
    "drawn on": drawn_on,
    "gray": lambda picture: picture.convert("L").convert("RGB"),
    "transposed": lambda picture: picture.transpose(Image.Transpose.ROTATE_90),
    "another": lambda picture: Image.new("RGB", picture.size),
    "opened otherwise": lambda picture: open_by_another_name(io.BytesIO(PNG)),
    "a function of v2": lambda picture: v2.functional.horizontal_flip(picture),
    "a function of v2 that asks": lambda picture: flipped_if_it_has_channels(picture),
    "a function of v1": lambda picture: v1.functional.resize(picture, [50, 60]),
    "upright in place": lambda picture: turned_in_place(picture),
    "by its attributes": lambda picture: given_others_pixels(picture),
}


def flipped_if_it_has_channels(picture):
    _, height, width = v2.functional.get_dimensions(picture)
    assert [height, width] == v2.functional.get_size(picture)
    channels = v2.functional.get_num_channels(picture)
    return v2.functional.vertical_flip(picture) if channels == 3 else picture


def turned_in_place(picture):
    picture.getexif()[274] = 6
    ImageOps.exif_transpose(picture, in_place=True)
    return picture


def given_others_pixels(picture):
    picture.im = Image.new("RGB", picture.size, (1, 2, 3)).im
    return picture


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("orientation", [None, 1, 6])
def test_a_file_that_is_upright_already_is_left_encoded(tmp_path, orientation, in_place):
    exif = Image.Exif()
    if orientation is not None:
        exif[274] = orientation
    write_folder(tmp_path, [draw(40, 60, seed=i) for i in range(3)], "jpg", exif=exif)

    class Upright(ImageFolder):
        def __getitem__(self, index):
            path, target = self.samples[index]
            picture = Image.open(path)
            picture.load()
            assert picture.getexif().get(274) == orientation
            upright = ImageOps.exif_transpose(picture, in_place=in_place)
            return self.transform((upright or picture).convert("RGB")), target

    dataset = Upright(tmp_path, PIPELINE)
    moved = accelerate(DataLoader(dataset, 3), **CPU)
    # By which attribute depends on Pillow's release.
    by_dataset = "decode by the dataset, in the workers (it uses ." in moved.describe()
    assert by_dataset is (orientation == 6)
    ((images, _),) = moved
    want = torch.stack([image for image, _ in dataset])
    assert (images - want).abs().max() <= 2 / 255


@pytest.mark.parametrize("read", ["load", "copy", "convert"])
def test_what_needs_a_loaded_picture_gets_one(tmp_path, read):
    write_folder(tmp_path, [draw(160, 240, seed=i) for i in range(3)], "jpg")

    class Drafted(ImageFolder):
        def __getitem__(self, index):
            picture = Image.open(self.samples[index][0])
            getattr(picture, read)(*["RGB"] * (read == "convert"))
            picture.draft("RGB", (20, 20))  # of a loaded picture it does nothing
            return self.transform(picture.convert("RGB")), picture.im.size

    dataset = Drafted(tmp_path, PIPELINE)
    ((images, (width, height)),) = accelerate(DataLoader(dataset, 3), **CPU)
    assert set(zip(width.tolist(), height.tolist(), strict=True)) == {(240, 160)}
    want = torch.stack([image for image, _ in dataset])
    assert (images - want).abs().max() <= 2 / 255


def test_an_opened_file_is_of_its_formats_class(tmp_path):
    for ending, seed in (("jpg", 0), ("png", 1)):
        (tmp_path / ending).mkdir()
        write_folder(tmp_path / ending, [draw(40, 60, seed=seed)], ending)

    class Formats(ImageFolder):
        def __getitem__(self, index):
            picture = Image.open(self.samples[index][0])
            is_png = isinstance(picture, PngImageFile)
            assert isinstance(picture, Image.Image) and isinstance(picture, JpegImageFile) != is_png
            assert not isinstance(picture.convert("RGB"), JpegImageFile)
            return self.transform(inverted(picture) if is_png else picture), is_png

    files = [ImageFolder(tmp_path / name).samples[0] for name in ("jpg", "png")]
    dataset = Formats(tmp_path / "jpg", PIPELINE)
    dataset.samples = files
    ((images, is_png),) = accelerate(DataLoader(dataset, 2), **CPU)
    assert is_png.tolist() == [False, True]
    want = torch.stack([image for image, _ in dataset])
    assert (images - want).abs().max() <= 2 / 255


def test_a_picture_beside_what_its_transform_gave_stays_in_the_workers(folder):
    class Both(ImageFolder):
        def __getitem__(self, index):
            picture = self.loader(self.samples[index][0])
            return {"picture": picture, "image": self.transform(picture)}

    def collate(samples):
        return torch.stack([sample["image"] for sample in samples])

    def uses(samples):
        return [sample["picture"].size for sample in samples]

    loader = DataLoader(Both(folder, PIPELINE), 4, collate_fn=collate)
    assert next(iter(accelerate(loader, **CPU))).shape == (4, 3, 32, 32)
    loader = DataLoader(Both(folder, PIPELINE), 4, collate_fn=uses)
    with pytest.raises(UndecodedError, match=r"itself is used after its sample was made, by .size"):
        next(iter(accelerate(loader, **CPU)))


NO_PICTURE = {
    "a tensor": lambda picture: torch.zeros(3, 40, 40),
    "transformed": lambda picture: PIPELINE(picture),
    "an array of one channel": lambda picture: np.asarray(picture)[..., :1],
    "gray": lambda picture: picture.convert("L"),
    "with a palette": lambda picture: picture.convert("P"),
}


def png():
    file = io.BytesIO()
    Image.fromarray(draw(40, 50)).save(file, "PNG")
    return file.getvalue()


PNG = png()


def halved_if_it_is_a_tensor(image):
    return image.half() if isinstance(image, torch.Tensor) else image


def brighter_if_it_works(image):
    try:
        return image * 2
    except Exception:
        return image


def flipped_if_it_works(image):
    try:
        return torch.flip(image, [-1])
    except Exception:
        return image


AFTER = {
    "method": lambda image: image.flip(-1),
    "operator": lambda image: -image,
    "comparison": lambda image: image * 2 if image == 0 else image,
    "try": brighter_if_it_works,
    "torch": flipped_if_it_works,
    "isinstance": halved_if_it_is_a_tensor,
    "hasattr": lambda image: image.half() if hasattr(image, "half") else image,
    "in place": lambda image: image.__imul__(2),
    "indexed": lambda image: image[:, ::2, ::2],
    "module": by_a_module,
    "tensor": lambda image: torch.zeros(3, 32, 32),
    "lost": lambda image: 0,
}

CHANGED = 5  # the sample


def changing(folder, change, reads):
    """A folder that changes the pixels of one picture before the transform gets it."""

    class Changing(ImageFolder):
        def __getitem__(self, index):
            path, target = self.samples[index]
            read = self.loader if reads == "self.loader" else READS["Image.open"]
            picture = read(path)
            if index == CHANGED:
                picture = change(picture)
            return self.transform(picture), target

    return Changing(str(folder), PIPELINE)


@pytest.mark.parametrize("reads", ["self.loader", "Image.open"])
@pytest.mark.parametrize("name", BEFORE)
def test_a_picture_that_is_changed_before_its_transform_is_handed_on_as_it_is(folder, name, reads):
    dataset = changing(folder, BEFORE[name], reads)
    prefetcher = moved(dataset)
    assert prefetcher.describe().startswith(f"accelerate: {NO_CUDA}")  # as the first picture says
    view = encoded_view(dataset, OPS, [])
    assert [view[i][0].data.startswith(b"P6") for i in range(COUNT)] == [
        i == CHANGED for i in range(COUNT)
    ]


@pytest.mark.parametrize("reads", ["self.loader", "Image.open"])
@pytest.mark.parametrize("name", NO_PICTURE)
def test_what_is_no_picture_for_the_device_is_named(folder, name, reads):
    loader = accelerate(DataLoader(changing(folder, NO_PICTURE[name], reads), 4), **CPU)
    text = rf"^Changing\.__getitem__\({CHANGED}\): .* gets a |is '[LP]' and not RGB"
    with pytest.raises(TypeError, match=text):
        list(loader)


@pytest.mark.parametrize("name", AFTER)
def test_what_its_transform_gave_is_touched_by_nobody(folder, name):
    class Changing(ImageFolder):
        def __getitem__(self, index):
            image, target = super().__getitem__(index)
            return (AFTER[name](image) if index == CHANGED else image), target

    loader = accelerate(DataLoader(Changing(str(folder), PIPELINE), 4), **CPU)
    with pytest.raises(TypeError, match=rf"^Changing\.__getitem__\({CHANGED}\).*Two ways work"):
        list(loader)


def given_twice(dataset, picture):
    return dataset.transform(dataset.transform(picture))


def given_with_a_target(dataset, picture):
    return dataset.transform(picture, 3)


def not_given(dataset, picture):
    return picture


TRANSFORMED = {
    "twice": given_twice,
    "with a target": given_with_a_target,
    "not at all": not_given,
    "gray": lambda dataset, picture: dataset.transform(Image.open(dataset.gray)),
    "another sample in its place": lambda dataset, picture: instead(dataset, picture),
}


def instead(dataset, picture):
    try:
        return dataset.transform(torch.zeros(3, 40, 40))
    except Exception:
        return dataset[0][0]


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_transform_gets_each_picture_once(paths, name, tmp_path):
    class Changing(Own):
        gray = tmp_path / "gray.png"

        def __getitem__(self, index):
            picture = self.read(self.paths[index])
            if index == CHANGED:
                return TRANSFORMED[name](self, picture), index
            return self.transform(picture), index

    Image.fromarray(draw(50, 60, 1)).save(Changing.gray)
    loader = accelerate(DataLoader(Changing(paths, READS["Image.open"]), 4), **CPU)
    with pytest.raises(TypeError, match=rf"^Changing\.__getitem__\({CHANGED}\).*(ways|RGB|takes)"):
        list(loader)


def test_a_sample_that_cannot_be_read_is_the_users_error(paths):
    loader = DataLoader(Own([*paths[:7], "nowhere.jpg"], READS["Image.open"]), 4)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jpg"):
        list(accelerate(loader, **CPU))


def drawn_on(picture):
    picture.paste((255, 0, 0), (0, 0, *picture.size))
    return picture


def pasted_on_a_background(picture):
    return Image.composite(
        Image.new("RGB", picture.size), picture, Image.new("L", picture.size, 90)
    )


COPIES = {
    "copy": lambda picture: drawn_on(picture.copy()),
    "composite": pasted_on_a_background,
    "copy.copy": lambda picture: drawn_on(copy.copy(picture)),
    "deepcopy": lambda picture: drawn_on(copy.deepcopy(picture)),
}


@pytest.mark.parametrize("name", COPIES)
def test_what_is_done_to_a_copy_is_not_done_to_the_picture(tmp_path, name):
    class Two(Own):
        def __getitem__(self, index):
            picture = Image.open(self.paths[index]).convert("RGB")
            other = COPIES[name](picture)
            return self.transform(picture), self.transform(other)

    path = tmp_path / "a.png"
    Image.fromarray(draw(40, 50, seed=1)).save(path)
    loader = DataLoader(Two([path], None), 1)
    ((picture, other),) = loader
    for image, want in zip(*accelerate(loader, **CPU), (picture, other), strict=True):
        assert (image - want).abs().max() <= 2 / 255


def test_pictures_are_compared_by_their_pixels(paths):
    class Comparing(Own):
        def __getitem__(self, index):
            picture = Image.open(self.paths[index]).convert("RGB")
            other = Image.open(self.paths[0]).convert("RGB")
            same = [picture == other, picture != other, picture == None, picture in [other]]  # noqa: E711
            return self.transform(picture), same

    moved(Comparing(paths, None))


class InFiles(Own):
    """Keeps in files what it reads, or what its transform makes of that."""

    def __init__(self, paths, folder, keeps):
        super().__init__(paths, None)
        self.folder, self.keeps = folder, keeps

    def kept(self, index, name, make):
        path = self.folder / f"{index}.{name}"
        if name != self.keeps:
            return make()
        if not path.exists():
            made = make()
            path.write_bytes(pickle.dumps(made))
            return made
        return pickle.loads(path.read_bytes())

    def __getitem__(self, index):
        opened = self.kept(index, "opened", lambda: Image.open(self.paths[index]))
        picture = self.kept(index, "picture", lambda: opened.convert("RGB"))
        return self.kept(index, "image", lambda: self.transform(picture)), index


@pytest.mark.parametrize("keeps", ["opened", "picture"])
def test_pictures_in_files_are_real(paths, tmp_path, keeps):
    prefetcher = accelerate(DataLoader(InFiles(paths, tmp_path, keeps), 3), **CPU)
    plain = DataLoader(Own(paths, READS["Image.open"]), 3)
    for _ in range(2):
        assert_same_batches(plain, prefetcher, atol=2 / 255)
    files = [*tmp_path.iterdir()]
    assert len(files) == COUNT
    for path in files:
        assert b"gpuprefetch" not in path.read_bytes()
        assert np.array(pickle.loads(path.read_bytes())).shape[2] == 3


def test_an_image_that_is_not_made_yet_is_in_no_file(paths, tmp_path):
    dataset = InFiles(paths, tmp_path, "image")
    with pytest.raises(TypeError, match=r"InFiles\.__getitem__\(0\): .* by copy or pickle"):
        accelerate(DataLoader(dataset, 3), **CPU)
    assert not [*tmp_path.iterdir()]
    assert_same_batches(DataLoader(dataset, 3), DataLoader(Own(paths, READS["Image.open"]), 3))


class Unchanged(Own):
    """Its transform is not called."""

    def __getitem__(self, index):
        return self.read(self.paths[index]), index


NO_IMAGES = {
    "a number": (len, r"__getitem__ gave no image\. Two ways work"),
    "a picture": (within_a_with, r"\(0\) gave a picture that its transform did not get\. Two ways"),
    "a tensor": (lambda path: torch.zeros(3, 32, 32), r"\(0\) gave an image that is transformed"),
}


@pytest.mark.parametrize("name", NO_IMAGES)
def test_a_dataset_that_calls_no_transform_is_refused(paths, name):
    read, text = NO_IMAGES[name]
    with pytest.raises((TypeError, UndecodedError), match=f"Unchanged.*{text}"):
        accelerate(DataLoader(Unchanged(paths, read), 4), **CPU)


# --- wrappers -----------------------------------------------------------------------------------


class DS(Dataset):
    """A dataset with a transform around one without, as many write it."""

    def __init__(self, subset, transform):
        self.subset, self.transform = subset, transform

    def __len__(self):
        return len(self.subset)

    def __getitem__(self, index):
        image, target = self.subset[index]
        if self.transform:
            image = self.transform(image)
        return image, target


class Named(DS):
    """Its transform has another name."""

    def __init__(self, subset, transform):
        self.subset, self.tf, self.target_transform = subset, transform, v2.Identity()

    def __getitem__(self, index):
        image, target = self.subset[index]
        return self.tf(image), self.target_transform(target)


class WithIndex(Dataset):
    def __init__(self, dataset):
        self.data = dataset

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return *self.data[index], index


def splits(folder):
    generator = torch.Generator().manual_seed(3)
    return random_split(ImageFolder(str(folder)), [5, 3], generator)


WRAPPED = {
    "a subset": lambda folder: DS(Subset(ImageFolder(str(folder)), [3, 1, 6]), PIPELINE),
    "a split": lambda folder: DS(splits(folder)[0], PIPELINE),
    "a list": lambda folder: DS(splits(folder)[0], v1.Compose([v1.Compose(OPS[:1]), *OPS[1:]])),
    "another name": lambda folder: Named(splits(folder)[1], PIPELINE),
    "an index": lambda folder: WithIndex(ImageFolder(str(folder), PIPELINE)),
    "an index around a split": lambda folder: WithIndex(DS(splits(folder)[1], PIPELINE)),
    "derived": lambda folder: Split(ImageFolder(str(folder)), [2, 5], PIPELINE),
    "joined": lambda folder: ConcatDataset([DS(each, PIPELINE) for each in splits(folder)]),
    "a subset around": lambda folder: Subset(DS(ImageFolder(str(folder)), PIPELINE), [4, 2]),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_move_by_their_own_transform(folder, name):
    dataset = WRAPPED[name](folder)
    prefetcher = moved(dataset)
    assert prefetcher.dataset is dataset
    assert prefetcher.stats.cpu_images == len(dataset)
    assert parity(DataLoader(dataset), 2, device="cpu").mean < 1


class OfSplits(DS):
    """Has a transform of its own, and a dictionary of other datasets, which it reads not."""

    def __init__(self, dataset, transform):
        super().__init__(dataset, transform)
        self.splits = {"train": ImageFolder(dataset.root, v1.Resize(9)), "name": "photos"}


class Counting(Dataset):
    """Counts its samples in a dictionary that also has the dataset."""

    def __init__(self, dataset):
        self.of = dataset
        self.state = {"of": dataset, "count": 0}

    def __len__(self):
        return len(self.of)

    def __getitem__(self, index):
        self.state["count"] += 1
        return *self.of[index], self.state["count"]


def test_a_dictionary_that_has_a_dataset_stays_the_datasets_own(folder):
    loader = DataLoader(Counting(ImageFolder(str(folder), PIPELINE)), 3)
    numbers = torch.cat([batch[2] for batch in accelerate(loader, **CPU)])
    assert numbers.tolist() == [*range(1, COUNT + 1)]
    assert loader.dataset.state["count"] == COUNT


COLUMNS = {
    "labels": lambda of: StackDataset(of, list(range(COUNT))),
    "tensors": lambda of: StackDataset(torch.arange(COUNT), of),
    "a dictionary": lambda of: StackDataset(photo=of, number=list(range(COUNT))),
    "two columns": lambda of: StackDataset(one=of, other=Subset(of, range(COUNT)[::-1])),
    "within": lambda of: Subset(StackDataset(photo=of, number=torch.arange(COUNT)), [5, 1]),
    "its own": lambda of: OfSplits(ImageFolder(of.root), PIPELINE),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_datasets_beside_other_things_move(folder, name):
    loader = DataLoader(COLUMNS[name](ImageFolder(str(folder), PIPELINE)), 3)
    prefetcher = accelerate(loader, **CPU)
    assert "by the dataset" not in prefetcher.describe()
    torch.testing.assert_close([*prefetcher], [*loader], atol=2 / 255, rtol=0)
    assert prefetcher.stats.cpu_images >= len(loader.dataset)


def test_random_parameters_follow_the_sample_of_a_wrapper(folder):
    pipeline = v1.Compose([v1.RandomResizedCrop(16), v1.ToTensor()])
    dataset = DS(Subset(ImageFolder(str(folder)), [0] * 4), pipeline)
    (images, _), *_ = accelerate(DataLoader(dataset, 4), seed=1, **CPU)
    (again, _), *_ = accelerate(DataLoader(dataset, 4), seed=1, **CPU)
    assert torch.equal(images, again)
    assert len({tuple(image.flatten().tolist()) for image in images}) == 4


def test_a_wrapper_that_changes_its_images_names_two_ways_and_both_work(folder, paths):
    class Inverting(DS):
        def __getitem__(self, index):
            image, target = self.subset[index]
            return 1 - self.transform(image), target

    dataset = Inverting(Subset(ImageFolder(str(folder)), [1, 2]), PIPELINE)
    with pytest.raises(TypeError, match=r"Inverting\.__getitem__\(0\).*Subset\(ImageFolder\(root"):
        accelerate(DataLoader(dataset, 2), **CPU)
    moved(Subset(ImageFolder(str(folder), PIPELINE), [1, 2]))

    class Encoded(Dataset):
        def __len__(self):
            return len(paths)

        def __getitem__(self, index):
            return EncodedImage(Path(paths[index]).read_bytes(), index, paths[index]), index

    by_hand = DataPrefetcher(
        DataLoader(Encoded(), 3), transforms=convert_transforms(PIPELINE), device="cpu"
    )
    plain = DataLoader(Own(paths, READS["Image.open"]), 3)
    assert_same_batches(plain, by_hand, atol=2 / 255, rtol=0)


def test_two_transforms_are_to_be_one(folder):
    inner = ImageFolder(str(folder), v1.Resize(40))
    with pytest.raises(TypeError, match=r"DS has a transform.*v2\.Compose\(\[\*first"):
        accelerate(DataLoader(DS(inner, PIPELINE)), **CPU)
    first, second = v1.Compose(OPS[:1]), v1.Compose(OPS[1:])
    both = v2.Compose([*first.transforms, *second.transforms])
    moved(DS(ImageFolder(str(folder), None), both))


def test_a_wrapper_that_changes_its_pictures_decodes_them_in_the_workers(folder):
    class Inverting(DS):
        def __getitem__(self, index):
            image, target = self.subset[index]
            return self.transform(ImageOps.invert(image)), target

    prefetcher = moved(Inverting(ImageFolder(str(folder)), PIPELINE))
    plan = prefetcher.describe().splitlines()[0]
    assert re.match(r"accelerate: decode by the dataset, in the workers \(it uses \.\w+ of", plan)


def test_a_wrapper_whose_transform_ends_in_an_own_function(folder):
    pipeline = v1.Compose([*OPS, v1.Lambda(lambda image: image / 2)])
    dataset = WithIndex(DS(splits(folder)[0], pipeline))
    prefetcher = moved(dataset)
    assert prefetcher.plan.steps[-1].where == "image by image"
    assert explain(DataLoader(dataset, 3)).startswith(accelerate(DataLoader(dataset, 3)).describe())
    assert parity(DataLoader(dataset), 2, device="cpu").mean < 1
    noise = v1.Compose([*OPS, lambda image: image * 0 + torch.rand(())])
    loaders = [DataLoader(DS(splits(folder)[0], noise), size) for size in (2, 5)]
    drawn = [
        torch.cat([images.amax((1, 2, 3)) for images, _ in accelerate(loader, seed=1, **CPU)])
        for loader in loaders
    ]
    assert torch.equal(*drawn) and len(drawn[0].unique()) == 5


# --- pictures that a dataset keeps --------------------------------------------------------------


class Keeping(Own):
    """Opens each file once."""

    def __init__(self, paths, read):
        super().__init__(paths, read)
        self.kept = {}

    def __getitem__(self, index):
        if index not in self.kept:
            self.kept[index] = self.read(self.paths[index])
        return self.transform(self.kept[index]), index


BY_V2_ALONE = v2.Compose(
    [v2.Resize(36), v2.CenterCrop(32), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
)


@pytest.mark.parametrize("pipeline", [PIPELINE, BY_V2_ALONE], ids=["v1", "v2"])
def test_pictures_that_a_dataset_keeps_become_real(paths, pipeline):
    """The dataset's own samples must be right from then on."""
    read = functools.cache(READS["Image.open"])
    plain = list(DataLoader(Own(paths, READS["Image.open"], pipeline), 3))
    list(
        accelerate(
            DataLoader(Own(paths[:1], lambda path: opened_again(path, read), pipeline)), **CPU
        )
    )
    kept = read(paths[0])
    real = READS["Image.open"](paths[0])
    assert type(kept) is type(real) and kept.tobytes() == real.tobytes()
    assert_same_batches(plain, DataLoader(Own(paths, read, pipeline), 3), atol=0)
    copies = [kept.copy(), copy.copy(kept), copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))]
    assert all(picture.tobytes() == real.tobytes() for picture in copies)


def opened_again(path, read):
    """Read a picture that is kept, and give another one of the same file."""
    read(path)
    return Image.open(path).convert("RGB")


def test_pictures_of_all_kinds_become_real(paths, tmp_path):
    gray = tmp_path / "gray.png"
    Image.fromarray(draw(50, 60, 1)).save(gray)
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(Path(paths[0]).read_bytes()[:900])
    kept = []

    def read(path):
        for file in (gray, broken, path):
            kept.append(Image.open(file))
            kept.append(Image.open(file).convert("RGB"))
        kept[-1].paste(0, (0, 0, 9, 9))
        kept[-2].mode  # noqa: B018
        return Image.open(path).convert("RGB")

    list(accelerate(DataLoader(Own(paths[:1], read)), **CPU))
    modes = [picture.mode for picture in kept[-6:]]
    assert modes == ["L", "RGB", "RGB", "RGB", "RGB", "RGB"]
    with Image.open(gray) as picture:
        assert kept[-6].tobytes() == picture.tobytes()
        assert kept[-5].tobytes() == picture.convert("RGB").tobytes()
    with pytest.raises(OSError, match="truncated"):
        kept[-4].load()
    changed = READS["Image.open"](paths[0])
    assert kept[-2].tobytes() == changed.tobytes()
    changed.paste(0, (0, 0, 9, 9))
    assert kept[-1].tobytes() == changed.tobytes()


HELPED = pytest.param(1, marks=pytest.mark.forks("a lambda is not sent to a worker"))


@pytest.mark.parametrize("workers", [0, HELPED])
@pytest.mark.parametrize("before", [False, True])
def test_a_dataset_may_keep_its_pictures(paths, workers, before):
    """They are files the first time, and pixels from then on."""
    plain = list(DataLoader(Own(paths, READS["Image.open"]), 3))
    dataset = Keeping(paths, READS["Image.open"])
    if before:
        list(DataLoader(dataset, 3))
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    prefetcher = accelerate(DataLoader(dataset, 3, **options), **CPU)
    assert ("by the dataset" in prefetcher.describe()) is before
    for _ in range(2):
        assert_same_batches(plain, prefetcher, atol=2 / 255)
    assert_same_batches(plain, DataLoader(dataset, 3), atol=0)


def test_a_trial_leaves_no_trace(paths):
    class Counting(Keeping):
        def __init__(self, *args):
            super().__init__(*args)
            self.shapes = [None] * COUNT
            self.same = self.shapes

        def __getitem__(self, index):
            self.file = Path(self.paths[index])
            self.shapes[index] = 3
            return super().__getitem__(index)

    dataset = Counting(paths, READS["Image.open"])
    before = dict(vars(dataset))
    explain(DataLoader(dataset, 3))
    assert vars(dataset) == before and dataset.shapes == [None] * COUNT
    assert dataset.same is dataset.shapes and dataset.kept is before["kept"]


class Seen:
    """What a dataset has read, in an object of its own."""

    def __init__(self):
        self.count = 0
        self.archive = None

    def note(self):
        self.count += 1
        self.archive = self.archive or io.BytesIO()


class Sampling(Own):
    """A dataset with generators of its own, that counts in many ways."""

    def __init__(self, *args):
        super().__init__(*args)
        self.generators = [random.Random(1), np.random.default_rng(2), np.random.RandomState(3)]
        self.generator = torch.Generator().manual_seed(4)
        self.calls = np.zeros(COUNT, int)
        self.touched = torch.zeros(COUNT)
        self.indices = set()
        self.latest = deque(maxlen=3)
        self.log = {"train": {"read": 0}}
        self.seen = Seen()

    def __getitem__(self, index):
        image, _ = super().__getitem__(index)
        self.calls[index] += 1
        self.touched[index] += 1
        self.indices.add(index)
        self.latest.append(index)
        self.log["train"]["read"] += 1
        self.seen.note()
        counts = [self.calls.sum(), self.touched.sum(), len(self.indices), len(self.latest)]
        counts += [self.log["train"]["read"], self.seen.count]
        sampled = [generator.uniform(0, 1) for generator in self.generators]
        sampled.append(float(torch.rand(1, generator=self.generator)))
        return image, torch.tensor([*map(float, counts + sampled)])


def test_a_trial_samples_nothing_from_generators_of_the_dataset(paths):
    dataset = Sampling(paths, READS["Image.open"])
    prefetcher = accelerate(DataLoader(dataset, 3), **CPU)
    assert dataset.seen.archive is None  # workers that are forked would share its position
    plain = DataLoader(Sampling(paths, READS["Image.open"]), 3)
    for _ in range(2):
        assert_same_batches(plain, prefetcher, atol=2 / 255)


def test_a_trial_of_what_cannot_move_leaves_no_trace(paths):
    class Asked(Sampling):
        def __getitem__(self, index):
            self.seen.note()
            picture = self.read(self.paths[index])
            return self.transform(picture=picture), index

    dataset = Asked(paths, READS["Image.open"])
    with pytest.raises(ValueError, match="is called with arguments by name"):
        accelerate(DataLoader(dataset, 3), **CPU)
    assert dataset.seen.count == 0 and dataset.seen.archive is None


# --- datasets that seed torch -------------------------------------------------------------------

MIRRORED = v1.Compose([v1.CenterCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])


def seed_everything(seed):
    random.seed(seed)
    torch.manual_seed(seed)


class Masked(Own):
    """Gives a picture, and its first channel as the mask; a seed moves them alike."""

    def __init__(self, paths, read=None, transform=MIRRORED):
        super().__init__(paths, read, transform)
        self.mask_transform = transform

    def masked(self, index):
        picture = Image.open(self.paths[index]).convert("RGB")
        return picture, Image.fromarray(np.asarray(picture)[..., 0])

    def __getitem__(self, index):
        picture, mask = self.masked(index)
        seed_everything(index)
        image = self.transform(picture)
        seed_everything(index)
        return image, self.mask_transform(mask)


class MaskFirst(Masked):
    def __getitem__(self, index):
        picture, mask = self.masked(index)
        self.seed(index)
        mask = self.mask_transform(mask)
        self.seed(index)
        return self.transform(picture), mask

    @staticmethod
    def seed(index):
        torch.random.manual_seed(index)


class Rewound(Masked):
    def __getitem__(self, index):
        picture, mask = self.masked(index)
        state = torch.get_rng_state()
        image = self.transform(picture)
        torch.set_rng_state(state)
        return image, self.mask_transform(mask)


class Forked(Masked):
    def __getitem__(self, index):
        picture, mask = self.masked(index)
        with torch.random.fork_rng(devices=[]):  # with several GPUs torch warns of all of them
            image = self.transform(picture)
        return image, self.mask_transform(mask)


class InProperty(Masked):
    @property
    def first(self):
        torch.manual_seed(3)
        return self.mask_transform

    def __getitem__(self, index):
        picture, mask = self.masked(index)
        return self.first(mask), (torch.manual_seed(3), self.transform(picture))[1]


class WithMask(Masked):
    """What the error says to write."""

    def __getitem__(self, index):
        image = EncodedImage(Path(self.paths[index]).read_bytes(), index, self.paths[index])
        return image, tv_tensors.Mask(np.array(self.masked(index)[1])[None])


@pytest.mark.parametrize("kind", [Masked, MaskFirst, Rewound, Forked, InProperty])
def test_a_dataset_that_seeds_torch_is_refused_with_what_does(tmp_path, kind):
    paths = [str(tmp_path / f"{i}.png") for i in range(COUNT)]
    for i, path in enumerate(paths):
        Image.fromarray(draw(40, 48, seed=i)).save(path)
    loader = DataLoader(kind(paths), 3)
    with pytest.raises(TypeError, match=r"calls torch\.[a-z_.]+, which settles") as raised:
        accelerate(loader, **CPU)
    text = str(raised.value)
    assert "transforms=convert_transforms(transform))" in text and "tv_tensors.Mask" in text
    listed = DataPrefetcher(
        DataLoader(WithMask(paths), 3), transforms=convert_transforms(MIRRORED), device="cpu"
    )
    for images, masks in listed:
        assert (images[:, :1] - masks / 255).abs().max() < 0.01
    assert "as it is: DataPrefetcher(loader)" in text
    for images, masks in DataPrefetcher(loader, device="cpu"):
        if kind is InProperty:
            images, masks = masks, images
        assert torch.equal(images[:, :1], masks)


def test_a_seed_where_nothing_is_sampled_changes_nothing(paths):
    loader = DataLoader(Masked(paths, transform=v1.Compose([v1.CenterCrop(32), v1.ToTensor()])), 3)
    for (image, mask), (want, target) in zip(accelerate(loader, **CPU), loader, strict=True):
        assert (image - want).abs().max() <= 2 / 255 and torch.equal(mask, target)


def test_a_seed_between_epochs_is_the_users(paths):
    class Epochs(Own):
        def set_epoch(self, epoch):
            torch.manual_seed(epoch)

    loader = DataLoader(Epochs(paths, READS["Image.open"], MIRRORED), 3)
    assert len(list(accelerate(loader, **CPU))) == 3


class SeededByIndex(Own):
    def __getitem__(self, index):
        seed_everything(index)
        return super().__getitem__(index)


def test_a_part_that_samples_does_not_move_out_of_a_dataset_that_seeds(paths):
    crop, flip, to_tensor = MIRRORED.transforms
    own = v1.Compose([crop, ImageOps.mirror, flip, to_tensor])
    loader = DataLoader(SeededByIndex(paths, READS["Image.open"], own), 3)
    with pytest.raises(TypeError, match=r"seed_everything calls torch\.manual_seed"):
        accelerate(loader, keep_unknown=True, **CPU)
    first = v1.Compose([flip, crop, ImageOps.mirror, to_tensor])
    loader = DataLoader(SeededByIndex(paths, READS["Image.open"], first), 3)
    assert_same_batches(loader, accelerate(loader, keep_unknown=True, **CPU), atol=1e-6)


# --- pictures of one size -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    pictures = [draw(24, 32, seed=i) for i in range(COUNT)]
    return write_folder(tmp_path_factory.mktemp("tiles"), pictures, "png")


NORMALIZED = [v1.ToTensor(), v1.Normalize((0.5, 0.4, 0.3), (0.5, 0.25, 0.125))]
FLIPS = [v1.RandomHorizontalFlip(1.0), v1.RandomVerticalFlip(1.0)]
DOUBLE = v2.ColorJitter((2, 2))
BY_V2 = "torchvision v2 on the batch"
# A pipeline, and where its ops run.
WITHOUT_A_CROP = {
    "flips": ([*FLIPS, *NORMALIZED], ["fused launch"] * 4),
    "floats": ([v1.ToTensor()], ["fused launch"]),
    "levels": ([v2.PILToTensor()], ["nothing to do"]),
    "nothing": ([v2.RGB(), v2.ToImage()], ["nothing to do"] * 2),
    "normalized": (NORMALIZED, ["fused launch"] * 2),
    "half": ([v2.ToImage(), v2.ToDtype(torch.half, scale=True)], ["nothing to do", BY_V2]),
    "a policy": ([DOUBLE, *NORMALIZED], ["one program", "on the batch", BY_V2]),
    "a policy of floats": ([v1.ToTensor(), DOUBLE], ["fused launch", "one program"]),
    "the shorter side": ([v1.Resize(16), *NORMALIZED], ["fused launch"] * 3),
    "a border": ([v2.Pad(2), v2.ToImage()], [BY_V2, "nothing to do"]),
    "an own function": (
        [v1.RandomHorizontalFlip(1.0), v1.ToTensor(), v1.Lambda(lambda image: image * 2 - 1)],
        ["fused launch", "fused launch", "image by image"],
    ),
    "an own function alone": (
        [v1.ToTensor(), lambda image: image - image.mean()],
        ["fused launch", "image by image"],
    ),
    "an own function of levels": (
        [v2.ToImage(), lambda image: 255 - image, v2.ToDtype(torch.float32, scale=True)],
        ["nothing to do", "image by image", BY_V2],
    ),
    "an own function that cuts": (
        [v1.ToTensor(), lambda image: image[:, 2:18, 3:23]],
        ["fused launch", "image by image"],
    ),
}


@pytest.mark.parametrize("name", WITHOUT_A_CROP)
def test_pictures_of_one_size_need_no_crop(tiles, name):
    ops, where = WITHOUT_A_CROP[name]
    loader = DataLoader(ImageFolder(str(tiles), v2.Compose(ops)), 3)
    prefetcher = accelerate(loader, **CPU)
    assert [step.where for step in prefetcher.plan.steps] == where
    level = 1.1 / 255 / 0.125 if name == "the shorter side" else 1e-5
    for (want, target), (got, moved_target) in zip(loader, prefetcher, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert (got.float() - want.float()).abs().max() <= level
        assert torch.equal(target, moved_target)
    assert parity(loader, 3, device="cpu").mean < 0.3
    plan = prefetcher.describe()
    assert explain(prefetcher).startswith(plan)
    assert "uint8 (3, H, W), all of one size" in explain(prefetcher).removeprefix(plan)


def test_an_own_function_that_makes_one_size_stays_in_the_workers(folder):
    def resized(image):
        return torch.nn.functional.interpolate(image[None], (8, 9))[0]

    loader = DataLoader(ImageFolder(str(folder), v1.Compose([v1.ToTensor(), resized])), 4)
    line = r"a function of your own gives them one, .* it: accelerate\(loader, keep_unknown=True\)"
    with pytest.raises(RuntimeError, match=line):
        list(accelerate(loader, **CPU))
    assert_same_batches(loader, accelerate(loader, keep_unknown=True, **CPU), atol=0)


class Same(ImageFolder):
    """The first sample, over and over."""

    def __getitem__(self, index):
        return super().__getitem__(0)


def test_each_image_of_one_size_has_its_own_flip_and_policy(tiles):
    ops = v2.Compose([v2.RandomHorizontalFlip(), v2.ColorJitter(0.4), v2.ToImage()])
    loader = DataLoader(Same(str(tiles), ops), COUNT, num_workers=1)
    (images, _), *_ = accelerate(loader, seed=1, **CPU)
    assert len({tuple(image.flatten().tolist()) for image in images}) == COUNT


def test_batches_may_have_different_sizes(tiles, tmp_path):
    paths = [str(tiles / f"a/{i}.png") for i in (0, 2)]
    for i in range(2):
        paths.append(str(tmp_path / f"{i}.png"))
        Image.fromarray(draw(9 + 7, 12, seed=i)).save(paths[-1])
    loader = DataLoader(Own(paths, READS["Image.open"], v1.Compose(NORMALIZED)), 2)
    shapes = [images.shape[2:] for images, _ in accelerate(loader, **CPU)]
    assert shapes == [(24, 32), (16, 12)]


@pytest.mark.parametrize("workers", [0, 1])
def test_pictures_of_different_sizes_are_named_as_by_the_default_collate(folder, tiles, workers):
    """The message begins with that of torch."""
    ops = v1.Compose(NORMALIZED)
    loader = DataLoader(ImageFolder(str(folder), ops), 4, num_workers=workers)
    with pytest.raises(RuntimeError) as plain:
        list(loader)
    (begin,) = re.findall(r"stack expects .* got \[3, \d+, \d+\] at entry 0", str(plain.value))
    with pytest.raises(RuntimeError) as error:
        list(accelerate(loader, **CPU))
    assert begin in str(error.value)
    assert re.search(r"a/0\.jpg', and \[3, 52, 64\] at entry 1, .*a/2\.jpg'", str(error.value))
    assert "Let the dataset return EncodedImage" not in str(error.value)
    advised = v1.Compose([v2.RandomResizedCrop(8), *NORMALIZED])
    list(accelerate(DataLoader(ImageFolder(str(folder), advised), 4), **CPU))


@pytest.mark.parametrize("bad", [[1], [0, 1, 2, 3]])
def test_a_bad_picture_has_the_size_of_the_others(tiles, bad):
    files = [(tiles / "ab"[i % 2] / f"{i}.png").read_bytes() for i in range(4)]
    samples = [EncodedImage(b"none" if i in bad else data, i) for i, data in enumerate(files)]
    loader = DataLoader(samples * 2, 4)
    prefetcher = DataPrefetcher(
        loader, transforms=[v2.RandomHorizontalFlip()], device="cpu", on_error="skip"
    )
    if len(bad) == 4:
        left_out = pytest.warns(UserWarning, match="left out all 4 images")
        with left_out, pytest.raises(BadImageError):
            list(prefetcher)
    else:
        assert [tuple(images.shape) for images in prefetcher] == [(3, 3, 24, 32)] * 2


def test_views_of_one_size(tiles):
    files = DataLoader(EncodedImageFolder(tiles), 4)
    views = Views([v2.RandomHorizontalFlip(1.0)], [v2.RandomVerticalFlip(1.0), v1.ToTensor()])
    for (one, two), _ in DataPrefetcher(files, transforms=views, device="cpu"):
        assert one.shape == two.shape == (4, 3, 24, 32)
        assert torch.equal(one.flip(-1), (two.flip(-2) * 255).round().byte())


def test_an_epoch_of_one_size_goes_on_and_is_replayed(tiles):
    files = DataLoader(EncodedImageFolder(tiles), 3, shuffle=True)
    ops = [v2.RandomHorizontalFlip(), v2.ColorJitter(0.4)]
    prefetcher = DataPrefetcher(files, transforms=ops, device="cpu", seed=1)
    batches = iter(prefetcher)
    next(batches)
    state = prefetcher.state_dict()
    rest = [images for images, _ in batches]
    prefetcher.load_state_dict(state)
    again = list(prefetcher)
    assert all(map(torch.equal, rest, [images for images, _ in again]))
    images = [image for images, _ in again for image in images]
    replayed = [prefetcher.replay(index)[0][0] for index in range(COUNT)]
    assert all(any(torch.equal(image, each) for each in replayed) for image in images)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles: the GPU's test does it")
@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_launch_has_the_size_of_its_batch(share):
    files = [encode_jpeg(draw(16, 24 - 8 * (i > 1), seed=i)) for i in range(4)]
    loader = DataLoader([EncodedImage(file, i) for i, file in enumerate(files)], 2)
    ops = [v2.RandomHorizontalFlip(1.0), v2.RandomInvert(1.0), v2.ToDtype(torch.float32, True)]
    options = {"transforms": ops, "device": "cpu", "cpu_share": share}
    made = list(DataPrefetcher(loader, decoder=OnTheCpu(), **options))
    assert [tuple(images.shape) for images in made] == [(2, 3, 16, 24), (2, 3, 16, 16)]
    for got, want in zip(made, DataPrefetcher(loader, decoder="cpu", **options), strict=True):
        assert (got - want).abs().max() <= 1.1 / 255


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [None, "640KiB"])
def test_a_gpu_makes_of_pictures_of_one_size_what_a_crop_of_that_size_makes(budget):
    widths = [128, 96]
    files = [encode_jpeg(draw(96, widths[i > 15], seed=i)) for i in range(32)]
    photos = [EncodedImage(file, i) for i, file in enumerate(files)]
    # A flip samples by its place in the list, which a crop before it would change.
    ops = [v2.RandomHorizontalFlip(1.0), v2.ColorJitter(0.4), *NORMALIZED]
    options = {"seed": 1, "memory_budget": budget}
    made = DataPrefetcher(DataLoader(photos, 16), transforms=v2.Compose(ops), **options)
    for number, (images, width) in enumerate(zip(made, widths, strict=True)):
        some = DataLoader(Subset(photos, range(16 * number, 16 * number + 16)), 16)
        crop = v2.CenterCrop((96, width))  # of the whole picture
        (want,) = DataPrefetcher(some, transforms=v2.Compose([crop, *ops]), **options)
        assert torch.equal(images, want)


def test_boxes_follow_images_that_keep_their_size(tiles):
    boxes = tv_tensors.BoundingBoxes([[1, 2, 3, 4]], format="XYXY", canvas_size=(24, 32))
    sample = EncodedImage((tiles / "a/0.png").read_bytes(), 0), {"boxes": boxes}
    flip = v2.RandomHorizontalFlip(1.0)
    loader = DataLoader([sample], 1, collate_fn=lambda samples: tuple(zip(*samples, strict=True)))
    for ops in ([flip], [v2.Resize((24, 32)), flip]):
        ((images, (target,)),) = DataPrefetcher(loader, transforms=ops, device="cpu")
        assert images.shape == (1, 3, 24, 32)
        assert target["boxes"].tolist() == [[29, 2, 31, 4]]


# --- images that are no files -------------------------------------------------------------------


CIFAR = [
    v2.RandomCrop(32, padding=4),
    v2.RandomHorizontalFlip(),
    v2.ToImage(),
    v2.ToDtype(torch.float32, scale=True),
    v2.Normalize([0.5] * 3, [0.5] * 3),
]


def cifar(pipeline):
    arrays = np.stack([draw(32, 32, seed=i) for i in range(COUNT)])
    return as_built(tv.CIFAR10, pipeline, data=arrays, targets=LABELS)


def test_what_is_no_picture_is_told_what_to_write(paths):
    both = Named(ImageFolder(str(Path(paths[0]).parents[1])), PIPELINE)
    both.validation = PIPELINE
    with pytest.raises(TypeError, match=r"Named: it has several transforms \(tf, validation\)"):
        accelerate(DataLoader(both), **CPU)
    with pytest.raises(TypeError, match=r"Own\.__getitem__\(0\).*gets a .*DataPrefetcher\("):
        accelerate(DataLoader(Own(paths, np.fromfile)), **CPU)
    tensors = TensorDataset(torch.zeros(4, 3, 9, 9), torch.zeros(4))
    with pytest.raises(TypeError, match=r"TensorDataset.*DataPrefetcher\(loader, transforms="):
        accelerate(DataLoader(tensors), **CPU)


def test_what_of_arrays_is_kept_in_the_workers():
    own = v1.Lambda(lambda picture: picture.rotate(90))
    loader = DataLoader(cifar(v2.Compose([own, v2.CenterCrop(24), *CIFAR[2:]])), 3)
    prefetcher = accelerate(loader, keep_unknown=True, **CPU)
    where = [step.where for step in prefetcher.plan.steps]
    assert where[:2] == ["worker CPU"] * 2 and "worker CPU" not in where[2:]
    assert_same_batches(loader, prefetcher, atol=1e-6)


def test_what_a_dataset_of_tensors_is_told_works():
    pipeline = v2.Compose([v2.RandomHorizontalFlip(1.0), *CIFAR[2:]])
    plain = DataLoader(cifar(pipeline), 3)
    tensors = DataLoader(cifar(v2.PILToTensor()), 3)
    for transforms in (convert_transforms(pipeline), [*pipeline.transforms[:1], *CIFAR[3:]]):
        prefetcher = DataPrefetcher(tensors, transforms=transforms, device="cpu")
        assert_same_batches(plain, prefetcher, atol=1e-6)


# --- RandomCrop of a batch of tensors -----------------------------------------------------------

CROPS = {
    "padded": v2.RandomCrop(8, padding=2),
    "v1": v1.RandomCrop(8, padding=2),
    "not padded": v2.RandomCrop((5, 6)),
    "reflected": v2.RandomCrop(9, padding=(1, 2, 3, 4), padding_mode="reflect"),
    "filled": v2.RandomCrop((12, 8), pad_if_needed=True, fill=(7, 8, 9)),
}


class Calls(TorchDispatchMode):
    """Counts torch's operations."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def cut(images, op, **options):
    (made,) = DataPrefetcher([images], transforms=[op], device="cpu", seed=5, **options)
    return made


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int16])
@pytest.mark.parametrize("name", CROPS)
def test_random_crop_of_tensors_is_torchvisions_at_a_place_of_each_image(name, dtype):
    op = CROPS[name]
    images = torch.randint(0, 255, (24, 3, 10, 10)).to(dtype)
    made = cut(images, op)
    assert made.dtype == dtype and made.shape == (24, 3, *v2.RandomCrop(op.size).size)
    assert torch.equal(made, cut(images, op)) and not torch.equal(made, cut(images.flip(0), op))
    height, width = made.shape[2:]
    large = v2.RandomCrop(8, padding=2) if name == "v1" else op
    padded = large.transform(images, large.make_params([images]) | {"needs_crop": False})
    places = set()
    for image, whole in zip(made, padded, strict=True):
        found = [
            (top, left)
            for top in range(whole.shape[1] - height + 1)
            for left in range(whole.shape[2] - width + 1)
            if torch.equal(image, whole[:, top : top + height, left : left + width])
        ]
        assert found
        places.add(found[0])
    assert len(places) > 3


def test_random_crop_of_tensors_is_uniform():
    count = 6000
    column = torch.arange(12).expand(count, 1, 12, 12)
    lefts = cut(column, v2.RandomCrop(8))[:, 0, 0, 0].bincount(minlength=5)
    assert (lefts - count / 5).abs().max() < 5 * (count / 5) ** 0.5


def test_random_crop_of_tensors_is_one_launch_for_any_number_of_images():
    counts = []
    for count in (8, 64):
        images = torch.zeros(count, 3, 32, 32, dtype=torch.uint8)
        with Calls() as calls:
            cut(images, v2.RandomCrop(32, padding=4))
        counts.append(calls.count)
    assert counts[0] == counts[1] > 0
    explained = explain(DataPrefetcher([images], transforms=[gpuprefetch.CenterCrop(40), *CIFAR]))
    assert re.search("RandomCrop +.*one launch, a draw for each image", explained)


def test_random_crop_is_too_large_by_torchvisions_own_error():
    with pytest.raises(ValueError, match=r"Required crop size \(12, 12\) is larger than"):
        cut(torch.zeros(2, 3, 10, 10), v2.RandomCrop(12))


# --- a folder of splits -------------------------------------------------------------------------


def test_splits_are_no_classes(tiles, tmp_path):
    for split in ("train", "Val"):
        shutil.copytree(tiles, tmp_path / split)
    with pytest.raises(ValueError, match="has the splits Val, train") as error:
        EncodedImageFolder(tmp_path)
    (line,) = re.findall(r"EncodedImageFolder\(.*?\)", str(error.value))
    assert eval(line).classes == ["a", "b"]
    assert line.endswith("train')")
    shutil.copytree(tiles, tmp_path / "car")  # a class beside them: they may be some, too
    assert EncodedImageFolder(tmp_path).classes == ["Val", "car", "train"]
    (tmp_path / "flat").mkdir()
    for name in ("train", "val"):
        shutil.copytree(tiles / "a", tmp_path / "flat" / name)
    assert EncodedImageFolder(tmp_path / "flat").classes == ["train", "val"]


class InThreads(Own):
    """Reads its pictures in a thread pool, and transforms them there or not."""

    def __init__(self, paths, *, transforms_there):
        super().__init__(paths, READS["Image.open"])
        self.transforms_there = transforms_there

    def read_one(self, path):
        picture = Image.open(path).convert("RGB")
        return self.transform(picture) if self.transforms_there else picture

    def __getitem__(self, index):
        with ThreadPoolExecutor(2) as pool:
            found = [*pool.map(self.read_one, [self.paths[index], self.paths[0]])]
        return *(found if self.transforms_there else map(self.transform, found)), index


def test_a_transform_that_is_called_in_a_thread_is_refused_and_the_advice_works(paths):
    loader = DataLoader(InThreads(paths, transforms_there=True), 3)
    with pytest.raises(
        TypeError, match=r"calls its transform in a thread that .* read the picture only"
    ):
        accelerate(loader, **CPU)
    moved(InThreads(paths, transforms_there=False))


class InAPool(Own):
    """Reads a batch in a thread pool."""

    def __getitems__(self, indices):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(self.__getitem__, indices))


class WithoutIt(InAPool):
    __getitems__ = None


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_are_read_in_threads_are_refused_and_the_advice_works(paths, workers):
    loader = DataLoader(InAPool(paths, READS["Image.open"]), 3, num_workers=workers)
    text = (
        r"InAPool\.__getitems__\(\[0, 1, 2\]\) gave what __getitem__ has made in threads .*"
        r"\[self\[index\] for index in indices\]"
    )
    with pytest.raises(UndecodedError, match=text):
        list(accelerate(loader, **CPU))
    for kind in (AtOnce, WithoutIt):
        prefetcher = moved(kind(paths, READS["Image.open"]), num_workers=workers)
        assert "by the dataset" not in prefetcher.describe()
