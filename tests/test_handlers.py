"""A dataset that catches PIL's errors gets them, and decides itself what to give for a bad file."""

import contextlib
import functools
import gc
import io
import itertools
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import assert_same_batches
from pictures import draw, encode, files_of, write_folder
from PIL import Image, UnidentifiedImageError
from PIL.Image import open as imopen
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.datasets import ImageFolder
from torchvision.io import decode_image
from torchvision.transforms import v2

from gpuprefetch import BadImageError, accelerate
from gpuprefetch.images.header import read_header
from gpuprefetch.migrate.folders import encoded_view
from gpuprefetch.migrate.handlers import may_be_caught

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:The image decoding and encoding capabilities:DeprecationWarning"
    ),
    # PIL leaves a file open that it cannot decode.
    pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]
COUNT = 4
CPU = {"device": "cpu", "print_plan": False}
LEVEL = 1.01 / 255
OPS = [v2.Resize(36), v2.CenterCrop(32), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
PIPELINE = v2.Compose(OPS)
COLORS = draw(50, 60)
JPEG = encode(COLORS, "JPEG")
EXIF = Image.Exif()
EXIF[0x010F] = "Maker"
BAD = {
    "empty": b"",
    "text": b"no picture at all",
    "header alone": JPEG[:300],
    "truncated": JPEG[:900],
    "without its end": JPEG[:-2],
    "truncated, progressive": encode(COLORS, "JPEG", progressive=True)[:700],
    "truncated PNG": encode(COLORS, "PNG")[:900],
    "truncated GIF": encode(COLORS, "GIF")[:500],
    "its profile is cut": JPEG[:2] + b"\xff\xe2\x00\x0eICC_PROFILE\0" + JPEG[2:],
    "its JFIF is cut": JPEG[:2] + b"\xff\xe0\x00\x07JFIF\0" + JPEG[20:],
}
GOOD = {
    "progressive": encode(COLORS, "JPEG", progressive=True),
    "with EXIF": encode(COLORS, "JPEG", exif=EXIF),
    "gray": encode(draw(50, 60, 1), "JPEG"),
    "PNG": encode(COLORS, "PNG"),
    "BMP": encode(COLORS, "BMP"),
    "an end in the middle": JPEG[:900] + b"\xff\xd9",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pictures = [draw(48 + 2 * i, 64, seed=i) for i in range(COUNT)]
    return write_folder(tmp_path_factory.mktemp("folder"), pictures, "jpg", quality=95)


@pytest.fixture(scope="module")
def paths(folder):
    return files_of(folder)


def among(paths, data, folder):
    """A file of these bytes, or a folder, between others."""
    path = folder / "odd.jpg"
    if data is None:
        path.mkdir()
    else:
        path.write_bytes(data)
    return [paths[0], str(path), *paths[1:]]


class Own(Dataset):
    def __init__(self, paths, transform=PIPELINE):
        self.paths = paths
        self.transform = transform

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return self.transform(self.read(index)), index

    def read(self, index):
        return Image.open(self.paths[index]).convert("RGB")

    def next(self, index):
        return self[(index + 1) % len(self)]


# --- how datasets catch ---------------------------------------------------------------------------


class Next(Own):
    def __getitem__(self, index):
        try:
            image = Image.open(self.paths[index]).convert("RGB")
        except OSError:
            return self.next(index)
        return self.transform(image), index


class AroundAll(Own):
    def __getitem__(self, index):
        try:
            return self.transform(self.read(index)), index
        except Exception:
            return self.next(index)


class Retrying(Own):
    def __getitem__(self, index):
        again = 0
        while True:
            try:
                return self.transform(self.read((index + again) % len(self))), again
            except:  # noqa: E722
                again += 1


class Loaded(Own):
    def __getitem__(self, index):
        try:
            image = Image.open(self.paths[index])
            image.load()
        except OSError:
            return self.next(index)
        return self.transform(image.convert("RGB")), index


class Copied(Own):
    def read(self, index):
        try:
            return Image.open(self.paths[index]).copy().convert("RGB")
        except OSError:
            return Image.new("RGB", (40, 40), (9, 8, 7))


class OfTheTransform(Own):
    def __getitem__(self, index):
        try:
            image = Image.open(self.paths[index])
            if image.mode != "RGB":
                image = image.convert("RGB")
            return self.transform(image), index
        except OSError:
            return self.next(index)


class Verified(Own):
    def __getitem__(self, index):
        try:
            Image.open(self.paths[index]).verify()
            image = self.read(index)
        except Exception:
            return self.next(index)
        return self.transform(image), index


class Suppressed(Own):
    def read(self, index):
        image = Image.new("RGB", (40, 40), (9, 8, 7))
        with contextlib.suppress(OSError):
            with open(self.paths[index], "rb") as file:  # noqa: PTH123
                image = Image.open(file).convert("RGB")
        return image


class InAStack(Own):
    def read(self, index):
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(OSError))
            file = stack.enter_context(Path(self.paths[index]).open("rb"))
            return Image.open(file).convert("RGB")
        return Image.new("RGB", (40, 40), (9, 8, 7))


class OwnManager(Own):
    @contextlib.contextmanager
    def careful(self):
        try:
            yield
        except OSError:
            pass

    def read(self, index):
        with self.careful():
            return super().read(index)
        return Image.new("RGB", (40, 40), (9, 8, 7))


class Nested(Own):
    def read(self, index):
        def inner():
            return (lambda: Image.open(self.paths[index]))().convert("RGB")

        try:
            return inner()
        except (OSError, SyntaxError):
            return Image.new("RGB", (40, 40), (9, 8, 7))


def careful(get):
    @functools.wraps(get)
    def get_next(self, index):
        try:
            return get(self, index)
        except OSError:
            return get_next(self, (index + 1) % len(self))

    return get_next


class Decorated(Own):
    __getitem__ = careful(Own.__getitem__)


class Generating(Own):
    def images(self, index):
        for at in itertools.count(index):
            with contextlib.suppress(OSError):
                yield super().read(at % len(self))

    def read(self, index):
        return next(self.images(index))


class OfAGenerator(Own):
    def images(self, index):
        yield super().read(index)

    def read(self, index):
        try:
            return next(self.images(index))
        except OSError:
            return super().read((index + 1) % len(self))


class ReturningFinally(Own):
    def read(self, index):
        image = Image.new("RGB", (40, 40), (9, 8, 7))
        try:
            image = super().read(index)
        finally:
            return image  # noqa: B012


class OfFiles(Own):
    def __getitem__(self, index):
        file = open(self.paths[index], "rb")  # noqa: PTH123
        try:
            image = Image.open(file)
            image.load()
        except OSError:
            return self.next(index)
        finally:
            file.close()
        return self.transform(image.convert("RGB")), index


class OfBytes(Own):
    def __getitem__(self, index):
        data = Path(self.paths[index]).read_bytes()
        try:
            with io.BytesIO(data) as file, Image.open(file) as image:
                image = image.convert("RGB")
        except OSError:
            return self.next(index)
        return self.transform(image), index


class ByAnotherName(Own):
    def __getitem__(self, index):
        try:
            image = imopen(self.paths[index]).convert("RGB")
        except OSError:
            return self.next(index)
        return self.transform(image), index


class Telling(Own):
    """Says how long the error's message is, which is PIL's."""

    def __getitem__(self, index):
        error = ""
        try:
            image = self.read(index)
        except OSError as raised:
            image = super().read(0)
            error = f"{type(raised).__name__}: {raised}"
        return self.transform(image), len(error)


class Masked(Own):
    """A bad file beside the image."""

    def __getitem__(self, index):
        try:
            mask = np.array(Image.open(self.paths[index]).convert("L").resize((4, 4)))
        except OSError:
            mask = np.zeros((4, 4), np.uint8)
        return self.transform(super().read(0)), mask


class Around(Dataset):
    """Around a dataset that catches nothing."""

    def __init__(self, paths):
        self.dataset = Own(paths)

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        try:
            return self.dataset[index]
        except OSError:
            return self.dataset[0]


CATCHING = [
    *(Next, AroundAll, Retrying, Loaded, Copied, OfTheTransform, Verified, Suppressed, InAStack),
    *(OwnManager, Nested, Decorated, Generating, OfAGenerator, ReturningFinally, OfFiles, OfBytes),
    *(ByAnotherName, Telling, Masked, Around),
]


def held(dataset, workers=0, **options):
    """What accelerate makes of a loader gives the loader's samples, and leaves none out."""
    loader = DataLoader(dataset, 3, num_workers=workers, persistent_workers=workers > 0)
    moved = accelerate(loader, **CPU, **options)
    for _ in range(1 + (workers > 0)):
        assert_same_batches(loader, moved, atol=LEVEL, rtol=0)
    assert not moved.bad_images
    return moved


@pytest.mark.parametrize("kind", CATCHING)
@pytest.mark.parametrize("name", [*BAD, *GOOD, "a folder"])
def test_a_dataset_that_catches_an_error_decides_itself(paths, tmp_path, kind, name):
    if name == "a folder" and kind in (OfFiles, OfBytes):
        return  # which open files outside of the block
    held(kind(among(paths, (BAD | GOOD).get(name), tmp_path)))


@pytest.mark.parametrize("name", ["text", "truncated", "PNG"])
@pytest.mark.parametrize("kind", [Next, Decorated, Around])
def test_it_does_so_in_workers(paths, tmp_path, kind, name):
    files = among(paths, (BAD | GOOD)[name], tmp_path)
    held(kind(files), workers=1, on_error="skip")


@pytest.mark.parametrize("name", [*BAD, *GOOD])
def test_a_folder_within_a_dataset_that_catches(folder, paths, tmp_path, name):
    class Careful(ImageFolder):
        def __getitem__(self, index):
            try:
                return super().__getitem__(index)
            except Exception:
                return super().__getitem__((index + 1) % len(self))

    (tmp_path / "a").mkdir()
    among(paths, (BAD | GOOD)[name], tmp_path / "a")
    (tmp_path / "a" / "z.jpg").write_bytes(Path(paths[0]).read_bytes())
    held(Careful(tmp_path, PIPELINE))
    if name != "gray":
        held(Careful(tmp_path, PIPELINE, loader=Image.open))


class OnlyOpened(Own):
    def read(self, index):
        try:
            image = Image.open(self.paths[index])
        except UnidentifiedImageError:
            image = Image.new("RGB", (40, 40), (9, 8, 7))
        return image.convert("RGB")


class OnlyConverted(Own):
    def read(self, index):
        image = Image.open(self.paths[index])
        try:
            return image.convert("RGB")
        except OSError:
            return Image.new("RGB", (40, 40), (9, 8, 7))


@pytest.mark.parametrize("name", [*BAD, *GOOD])
@pytest.mark.parametrize("kind", [OnlyOpened, OnlyConverted])
def test_a_handler_gets_the_errors_of_its_own_call_alone(paths, tmp_path, kind, name):
    if "cut" in name and kind is OnlyConverted:
        return  # PIL alone cannot open it: there is a picture in it
    dataset = kind(among(paths, (BAD | GOOD)[name], tmp_path))
    try:
        list(DataLoader(dataset, 3))
    except OSError:
        with pytest.raises(BadImageError, match=r"odd\.jpg"):
            list(accelerate(DataLoader(dataset, 3), **CPU))
    else:
        held(dataset)


# --- handlers that hand the error on --------------------------------------------------------------


class Raising(Own):
    def __getitem__(self, index):
        try:
            return super().__getitem__(index)
        except Exception:
            self.seen.append(index)
            raise


class AtLast(Raising):
    def __getitem__(self, index):
        try:
            return Own.__getitem__(self, index)
        finally:
            self.seen.append(index)


class AnError(Exception):
    pass


class RaisingAnother(Raising):
    def __getitem__(self, index):
        try:
            return Own.__getitem__(self, index)
        except OSError as error:
            raise AnError(index) from error


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("kind", [Raising, AtLast, Own])
def test_an_error_that_the_dataset_hands_on_is_for_on_error(paths, tmp_path, kind, name):
    if "cut" in name:
        return  # there is a picture in it
    dataset = kind(among(paths, BAD[name], tmp_path))
    dataset.seen = []
    with pytest.raises(BadImageError, match=r"odd\.jpg"):
        list(accelerate(DataLoader(dataset, 2), **CPU))
    skipping = accelerate(DataLoader(dataset, COUNT + 1), **CPU, on_error="skip")
    ((_, labels),) = skipping
    assert labels.tolist() == [0, 2, 3, 4]
    assert [Path(bad.path).name for bad in skipping.bad_images] == ["odd.jpg"]


class LeavingOut(Own):
    def __getitem__(self, index):
        try:
            return super().__getitem__(index)
        except OSError:
            return None


class LeavingOutInItems(LeavingOut):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class NothingInAPair(Own):
    def __getitem__(self, index):
        try:
            return super().__getitem__(index)
        except OSError:
            return None, index


def present(samples):
    return default_collate([each for each in samples if each is not None and each[0] is not None])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [LeavingOut, LeavingOutInItems, NothingInAPair])
def test_a_sample_without_an_image_for_a_bad_file_is_for_on_error(paths, tmp_path, kind, workers):
    """The collate function leaves it out, and gets no None here, where each sample has an image."""
    (tmp_path / "first.jpg").write_bytes(BAD["text"])
    files = [str(tmp_path / "first.jpg"), *among(paths, BAD["truncated"], tmp_path)]
    loader = DataLoader(kind(files), 3, collate_fn=present, num_workers=workers)
    skipping = accelerate(loader, **CPU, on_error="skip")
    assert_same_batches(loader, skipping, atol=LEVEL, rtol=0)
    assert [Path(bad.path).name for bad in skipping.bad_images] == ["first.jpg", "odd.jpg"]
    with pytest.raises(BadImageError, match=r"first\.jpg"):
        list(accelerate(loader, **CPU))


def test_a_dataset_around_one_that_gives_none_goes_on(paths, tmp_path):
    class Next(Around):
        def __init__(self, paths):
            self.dataset = LeavingOut(paths)

        def __getitem__(self, index):
            return self.dataset[index] or self[index + 1]

    held(Next(among(paths, BAD["truncated"], tmp_path)))


@pytest.mark.parametrize("name", ["text", "truncated", "truncated PNG"])
def test_an_error_of_the_datasets_own_is_that(paths, tmp_path, name):
    dataset = RaisingAnother(among(paths, BAD[name], tmp_path))
    for on_error in ("raise", "skip"):
        with pytest.raises(AnError):
            list(accelerate(DataLoader(dataset, 2), **CPU, on_error=on_error))


def test_an_error_that_no_handler_was_for_is_not_caught_later(paths, tmp_path):
    """Image.open() would have raised it, before the block."""

    class Late(Own):
        def __getitem__(self, index):
            image = Image.open(self.paths[index])
            try:
                image.verify()
            except Exception:
                return self.next(index)
            return super().__getitem__(index)

    class Sized(Own):
        def __getitem__(self, index):
            return *super().__getitem__(0), Image.open(self.paths[index]).size

    class Resized(Own):
        def __getitem__(self, index):
            image = self.read(index)
            try:
                image = image.resize((50, 50))
            except OSError:
                return self.next(index)
            return self.transform(image), index

    for kind, name in ((Late, "text"), (Sized, "text"), (Resized, "text"), (Resized, "truncated")):
        loader = DataLoader(kind(among(paths, BAD[name], tmp_path)), 2)
        for each in (loader, accelerate(loader, **CPU)):
            with pytest.raises(OSError):
                list(each)


def test_pils_settings_are_obeyed(paths, tmp_path, monkeypatch):
    files = among(paths, BAD["truncated"], tmp_path)
    monkeypatch.setattr("PIL.ImageFile.LOAD_TRUNCATED_IMAGES", True)
    held(Next(files))
    monkeypatch.setattr("PIL.ImageFile.LOAD_TRUNCATED_IMAGES", False)
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 3300)  # two of the pictures have more
    for side in (60, 90):  # and twice as many are an error
        files = among(paths, encode(draw(side, side), "JPEG"), tmp_path)
        for action in ("ignore", "error"):
            with warnings.catch_warnings():
                warnings.simplefilter(action, Image.DecompressionBombWarning)
                held(AroundAll(files))


# --- what is decoded where ------------------------------------------------------------------------


class ByTorchvision(Own):
    def read(self, index):
        try:
            return decode_image(self.paths[index], mode="RGB")
        except RuntimeError:
            return torch.full((3, 40, 40), 9, dtype=torch.uint8)


@pytest.mark.parametrize("name", [*BAD, *GOOD])
def test_torchvisions_errors_reach_a_handler_as_well(paths, tmp_path, name):
    held(ByTorchvision(among(paths, (BAD | GOOD)[name], tmp_path)))


def left_encoded(dataset):
    view = encoded_view(dataset, [v2.ToImage(), *OPS], [])
    return [view[i][0].data.startswith(b"\xff\xd8") for i in range(len(dataset))]


def test_a_jpeg_that_is_surely_whole_stays_encoded(paths, tmp_path):
    for kind in (Next, Loaded, OfTheTransform, ByTorchvision):
        files = among(paths, GOOD["with EXIF"], tmp_path)
        assert all(left_encoded(kind(files)))
        (tmp_path / "odd.jpg").write_bytes(GOOD["progressive"])
        assert left_encoded(kind(files)) == [True, False, True, True, True]
    assert all(left_encoded(Own(files)))
    moved = accelerate(DataLoader(Next(files[1:2])), **CPU)
    assert "which may be damaged, where it may catch the error" in moved.describe()


class InAFile(Own):
    def read(self, index):
        with open(self.paths[index], "rb") as file, Image.open(file) as image:  # noqa: PTH123
            return image.convert("RGB")


class InAPath(Own):
    def read(self, index):
        path = Path(self.paths[index])
        with path.open("rb") as file:
            return Image.open(file).convert("RGB")


@pytest.mark.parametrize("kind", [InAFile, InAPath])
@pytest.mark.parametrize("name", ["truncated", "text", "truncated PNG", "progressive", "PNG"])
def test_a_with_that_closes_a_file_hands_errors_on(paths, tmp_path, kind, name):
    dataset = kind(among(paths, (BAD | GOOD)[name], tmp_path))
    if name in GOOD:
        assert left_encoded(dataset) == [True, False, True, True, True]
        held(dataset)
        return
    skipping = accelerate(DataLoader(dataset, COUNT + 1), **CPU, on_error="skip")
    ((_, labels),) = skipping
    assert labels.tolist() == [0, 2, 3, 4]


@pytest.mark.parametrize("seed", range(3))
def test_no_library_refuses_a_damaged_jpeg_for_the_gpu(seed):
    """So a handler would get no error of one."""
    rng = np.random.default_rng(seed)
    whole = 0
    for _ in range(400):
        data = bytearray(encode(draw(48, 64, seed=seed), "JPEG", quality=90))
        places = rng.integers(2, len(data), rng.integers(1, 6))
        data[places[0]] = rng.integers(256)
        for place in places[1:]:
            data[max(place, 650)] = rng.integers(256)
        try:
            header = read_header(bytes(data), oriented=False)
        except ValueError:
            continue
        if header.is_sound:
            whole += 1
            with Image.open(io.BytesIO(data)) as image:
                image.load()
            decode_image(torch.frombuffer(data, dtype=torch.uint8))
    assert whole > 50


class Holding(Own):
    """Has something in a variable."""

    def __init__(self, *given):
        super().__init__(*given)
        self.held = []

    def __getitem__(self, index):
        local = np.array(index)
        self.held.append(weakref.ref(local))
        return self.transform(self.read(index)), local.item()


class HoldingAndCatching(Holding):
    def read(self, index):
        try:
            return super().read(index)
        except OSError as error:
            return Image.new("RGB", (40, 40), (len(str(error)), 8, 7))


class HoldingAndGivingNone(Holding):
    def __getitem__(self, index):
        try:
            return super().__getitem__(index)
        except OSError:
            return None


class HoldingAndRaising(Holding):
    def __getitem__(self, index):
        try:
            return super().__getitem__(index)
        except OSError as error:
            raise AnError from error


class HoldingATensor(Holding):
    def read(self, index):
        return decode_image(self.paths[index], "RGB")


class HoldingATensorAndCatching(HoldingATensor):
    def read(self, index):
        try:
            return super().read(index)
        except RuntimeError:
            return torch.zeros(3, 40, 40, dtype=torch.uint8)


HOLDING = [Holding, HoldingAndCatching, HoldingAndGivingNone, HoldingAndRaising]


@pytest.mark.parametrize("name", ["text", "truncated", "truncated PNG", "progressive"])
@pytest.mark.parametrize("kind", [*HOLDING, HoldingATensor, HoldingATensorAndCatching])
def test_what_a_dataset_has_in_variables_is_freed_at_once(paths, tmp_path, kind, name):
    dataset = kind(among(paths, (BAD | GOOD)[name], tmp_path))
    view = encoded_view(dataset, [v2.ToImage(), *OPS], [])
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(AnError):
            view[1]
        assert dataset.held
        assert all(each() is None for each in dataset.held)
    finally:
        gc.enable()


# --- what may be caught ---------------------------------------------------------------------------


def ask():
    return may_be_caught(asked.__code__)


def asked(function, path):
    return function(Path(path))


def nowhere(path):
    return ask()


def after_a_block(path):
    with contextlib.suppress(KeyError):
        str(path)
    return ask()


def in_a_handler(path):
    try:
        raise KeyError
    except KeyError:
        return ask()


def in_a_generator(path):
    def asks():
        yield ask()

    return next(asks())


def in_a_comprehension(path):
    return [ask() for _ in "ab"] == [True, True]


def in_a_file(path):
    with open(path) as _:  # noqa: PTH123
        return ask()


def in_a_generator_in_a_file(path):
    def asks():
        with path.open() as _:
            yield ask()

    return next(asks())


def in_a_comprehension_in_a_block(path):
    try:
        return [ask() for _ in "ab"] == [True, True]
    except KeyError:
        return None


def in_a_handler_in_a_block(path):
    try:
        try:
            raise KeyError
        except KeyError:
            return ask()
    finally:
        str(path)


def in_a_block_in_a_file(path):
    with path.open() as _:
        try:
            return ask()
        except KeyError:
            return None


def in_a_manager(path):
    with contextlib.suppress(KeyError):
        return ask()


def in_a_caller(path):
    try:
        return nowhere(path)
    except KeyError:
        return None


HANDS_ON = [nowhere, after_a_block, in_a_handler, in_a_generator, in_a_comprehension]
MAY_CATCH = [in_a_file, in_a_generator_in_a_file, in_a_comprehension_in_a_block]
MAY_CATCH += [in_a_handler_in_a_block, in_a_block_in_a_file, in_a_manager, in_a_caller]


@pytest.mark.parametrize("function", HANDS_ON + MAY_CATCH)
def test_which_block_may_catch(paths, function):
    assert asked(function, paths[0]) == (function in MAY_CATCH)
