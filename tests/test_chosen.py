"""Crops that are torchvision's but for get_params, which runs in the worker on a size alone."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import assert_same_batches
from pictures import draw, encode
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import functional as F

from gpuprefetch import DataPrefetcher, EncodedImage, EncodedImageFolder
from gpuprefetch.migrate.accelerate import accelerate
from gpuprefetch.migrate.parity import parity
from gpuprefetch.transforms.random import seeded_everywhere

COUNT = 6
CPU = {"device": "cpu", "print_plan": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    (root / "a").mkdir()
    for i in range(COUNT):
        Image.fromarray(draw(48 + 2 * i, 64, seed=i)).save(root / f"a/{i}.jpg", quality=95)
    return root


class Corner(v1.RandomResizedCrop):
    """Nothing in it is random: its pictures can be compared."""

    @staticmethod
    def get_params(img, scale, ratio):
        width, height = img.size
        return 2, 3, height // 2, width // 2 + int(4 * scale[0])


class Random(v1.RandomResizedCrop):
    """One try, as some models of self-supervised learning have it."""

    @staticmethod
    def get_params(img, scale, ratio):
        _, height, width = F.get_dimensions(img)
        share = torch.empty(1).uniform_(*scale).item() ** 0.5
        h, w = max(int(height * share), 1), max(int(width * share), 1)
        top = torch.randint(0, height - h + 1, ()).item()
        return top, torch.randint(0, width - w + 1, ()).item(), h, w


class RandomElsewhere(v1.RandomResizedCrop):
    """What it samples is of Python and NumPy."""

    @staticmethod
    def get_params(img, scale, ratio):
        return random.randint(0, 20), int(np.random.randint(0, 20)), 20, 20


class Lower(v1.RandomCrop):
    def get_params(self, img, output_size):
        assert output_size == self.size and img.mode == "RGB"
        return img.height - self.size[0], 1, *self.size


END = [v1.RandomHorizontalFlip(0.0), v1.ToTensor()]
CROPS = {
    "a part": [Corner(24), *END],
    "of another scale and filter": [Corner(24, scale=(0.5, 1.0), interpolation=3), *END],
    "a part and a flip": [Corner((20, 24)), v1.RandomHorizontalFlip(1.0), v1.ToTensor()],
    "a place": [Lower(24), *END],
    "a place of a resized picture": [v1.Resize(40), Lower((30, 24)), *END],
    "a place with padding": [Lower(24, padding=(5, 0, 2, 6)), *END],
    "a place of a smaller picture": [Lower((70, 30), pad_if_needed=True), *END],
    "after an op that does nothing": [v1.Lambda(lambda x: x.convert("RGB")), Corner(24), *END],
}


@pytest.mark.parametrize("name", CROPS)
def test_a_part_is_what_get_params_says(folder, name):
    pipeline = v1.Compose(CROPS[name])
    loader = DataLoader(ImageFolder(folder, pipeline), 4)
    moved = accelerate(loader, **CPU)
    assert "in the workers" in moved.describe()
    assert_same_batches(loader, moved, atol=2.1 / 255)
    files = DataLoader(EncodedImageFolder(folder), 4)
    for transforms in (pipeline, pipeline.transforms):  # in a list as well
        listed = DataPrefetcher(files, transforms=transforms, device="cpu")
        assert_same_batches(moved, listed, atol=0)
    assert parity(loader, 2, device="cpu").mean < 1


def test_random_parts_are_of_the_sample(folder):
    """In any batch and worker, and after a resume; the generators of the loop are left alone."""
    dataset = ImageFolder(folder, v1.Compose([Random(24), v1.ToTensor()]))
    torch.manual_seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()
    moved = accelerate(DataLoader(dataset, 2), seed=4, **CPU)
    first = [images for images, _ in moved]
    second = [images for images, _ in moved]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    large = DataLoader(dataset, COUNT, num_workers=1)
    ((images, _),) = accelerate(large, seed=4, **CPU)
    assert torch.equal(torch.cat(first), images)
    assert not any(map(torch.equal, first, second))
    state = accelerate(DataLoader(dataset, 2), seed=4, **CPU)
    batches = iter(state)
    next(batches)
    again = accelerate(DataLoader(dataset, 2), seed=4, **CPU)
    again.load_state_dict(state.state_dict())
    assert all(map(torch.equal, first[1:], [images for images, _ in again]))


def parts_in_workers(folder, batch, workers=1):
    dataset = ImageFolder(folder, v1.Compose([RandomElsewhere(24), v1.ToTensor()]))
    loader = DataLoader(dataset, batch, num_workers=workers)
    return torch.cat([images for images, _ in accelerate(loader, seed=4, **CPU)])


def test_workers_sample_of_python_and_numpy_by_the_sample(folder):
    """Workers own these generators; in the loop's process nothing is taken from them."""
    random.seed(3)
    first = parts_in_workers(folder, 2)
    random.seed(8)
    assert torch.equal(first, parts_in_workers(folder, COUNT))


def test_without_workers_such_a_crop_is_refused(folder):
    with pytest.raises(
        ValueError, match=r"RandomElsewhere\.get_params chose .*, and then"
    ) as raised:
        parts_in_workers(folder, 2, workers=0)
    # Both lines work: workers, as above, and torch's numbers.
    assert "DataLoader(..., num_workers=1)" in str(raised.value)
    advised = eval("torch.randint(low, high, ()).item()", {"torch": torch, "low": 0, "high": 3})
    assert "torch.randint(low, high, ()).item()" in str(raised.value) and advised in range(3)
    moved = accelerate(
        DataLoader(ImageFolder(folder, v1.Compose([RandomElsewhere(24), v1.ToTensor()])), 2), **CPU
    )
    with pytest.raises(ValueError, match=r"preview\(\) and replay\(\) have none"):
        moved.preview()


class Interrupted(v1.RandomResizedCrop):
    """While it chooses, the training thread samples."""

    before = None  # a barrier of both threads
    after = None

    def get_params(self, img, scale, ratio):
        self.before.wait(9)
        self.after.wait(9)
        return torch.randint(0, 20, ()).item(), 3, 20, 20


def sampled_meanwhile(choose):
    """What the training thread samples while another one chooses twice."""
    Interrupted.before = threading.Barrier(2)
    Interrupted.after = threading.Barrier(2)
    random.seed(7)
    np.random.seed(7)
    sampled = []
    with ThreadPoolExecutor(1) as other:
        chosen = other.submit(choose)
        for _ in range(2):
            Interrupted.before.wait(9)
            sampled.append((random.random(), np.random.random()))
            Interrupted.after.wait(9)
        chosen.result(9)
    return [*sampled, (random.random(), np.random.random())]


def test_the_training_thread_samples_as_without_us(folder):
    """Whatever it samples while a crop chooses in its process, and after."""
    dataset = ImageFolder(folder, v1.Compose([Interrupted(24), v1.ToTensor()]))

    def load():
        # Each picture is chosen for twice.
        files = DataLoader(Subset(EncodedImageFolder(folder), [0]), 1)
        next(iter(DataPrefetcher(files, transforms=dataset.transform, device="cpu")))

    def seeded():
        for seed in range(2):
            with seeded_everywhere(seed):
                Interrupted(24).get_params(None, (), ())

    def never():
        for _ in range(2):
            Interrupted.before.wait(9)
            Interrupted.after.wait(9)

    want = sampled_meanwhile(never)
    assert sampled_meanwhile(seeded) != want  # the negative control: seeds are of all threads
    assert sampled_meanwhile(load) == want


def test_random_parts_are_spread_over_the_picture(folder):
    """Each sample has a part of its own."""
    seen = set()

    class Noted(Random):
        @staticmethod
        def get_params(img, scale, ratio):
            box = Random.get_params(img, scale, ratio)
            seen.add(box)
            return box

    pipeline = v1.Compose([Noted(24), v1.ToTensor()])
    loader = DataLoader(ImageFolder(folder, pipeline), 3)
    moved = accelerate(loader, **CPU)
    seen.clear()
    for _ in range(3):
        assert len([*moved]) == 2
    assert len(seen) > 2 * COUNT


class Two(Dataset):
    """A picture beside itself at half the size."""

    def __init__(self, folder):
        self.samples = ImageFolder(folder).samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, _ = self.samples[index]
        with Image.open(path) as picture:
            half = picture.resize((picture.width // 2, picture.height // 2))
        return EncodedImage(Path(path).read_bytes(), index), EncodedImage(
            encode(half, "PNG"), index
        )


def test_pictures_of_one_sample_have_the_same_part(folder):
    pipeline = v1.Compose([Random(24), v1.ToTensor()])
    moved = DataPrefetcher(DataLoader(Two(folder), 3), transforms=pipeline, device="cpu")
    for whole, half in moved:
        assert (whole - half).abs().mean() < 0.06


class Forward(Corner):
    def forward(self, img):
        return super().forward(img)


class Called(Corner):
    def __call__(self, img):
        return super().__call__(img)


class Property(Corner):
    scale = property(lambda self: (0.5, 0.6), lambda self, value: None)


def hooked(op):
    op.register_forward_hook(lambda *given: None)
    return op


def with_own_forward(op):
    op.forward = lambda img: img
    return op


OTHERS = {
    "forward": Forward(24),
    "call": Called(24),
    "a property": Property(24),
    "a hook": hooked(Corner(24)),
    "a forward of the object": with_own_forward(Corner(24)),
    "lanczos": Corner(24, interpolation=v1.InterpolationMode.LANCZOS),
    "padding that is not black": Lower(24, padding=2, fill=9),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_class_that_does_more_is_refused(folder, name):
    op = OTHERS[name]
    loader = DataLoader(ImageFolder(folder, v1.Compose([op, v1.ToTensor()])), 2)
    with pytest.raises(ValueError, match=f"{type(op).__name__} cannot move to the device"):
        accelerate(loader, **CPU)


def of_parameters(get_params, base=v1.RandomResizedCrop):
    return type("Own", (base,), {"get_params": staticmethod(get_params)})(24)


BAD = {
    "out of the picture": (lambda *given: (0, 0, 999, 3), r"whole pixels within a picture"),
    "above it": (lambda *given: (-1, 0, 9, 3), r"gave \(-1, 0, 9, 3\)"),
    "empty": (lambda *given: (0, 0, 0, 3), r"gave \(0, 0, 0, 3\)"),
    "not whole": (lambda *given: (0, 0.5, 9, 3), r"gave \(0, 0\.5, 9, 3\)"),
    "three": (lambda *given: (0, 9, 3), r"gave \(0, 9, 3\)"),
    "none": (lambda *given: None, r"gave None"),
    "pixels": (lambda img, *given: img.getpixel((0, 0)), r"reads \.getpixel of a picture"),
    "an array": (lambda img, *given: np.asarray(img).mean() * [1], "reads its pixels of a"),
    "an error": (lambda *given: 1 / 0, "division by zero"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_get_params_gives_is_checked(folder, name):
    get_params, why = BAD[name]
    pipeline = v1.Compose([of_parameters(get_params), v1.ToTensor()])
    moved = accelerate(DataLoader(ImageFolder(folder, pipeline), 2), **CPU)
    with pytest.raises((AttributeError, ValueError, ArithmeticError), match=why) as raised:
        next(iter(moved))
    if "keep_unknown" in str(raised.value):  # the advice
        pipeline = v1.Compose([Corner(24), v1.ToTensor()])
        loader = DataLoader(ImageFolder(folder, pipeline), 2)
        assert_same_batches(loader, accelerate(loader, keep_unknown=True, **CPU), atol=2.1 / 255)


def test_a_place_has_the_size_of_its_crop(folder):
    op = of_parameters(lambda *given: (0, 0, 9, 7), v1.RandomCrop)
    moved = accelerate(DataLoader(ImageFolder(folder, v1.Compose([op, v1.ToTensor()])), 2), **CPU)
    with pytest.raises(ValueError, match=r"RandomCrop\(24, 24\) gave a part of 9 x 7 pixels"):
        next(iter(moved))


def test_a_crop_that_was_changed_is_an_error(folder):
    op = Corner(24)
    pipeline = v1.Compose([op, v1.ToTensor()])
    moved = accelerate(DataLoader(ImageFolder(folder, pipeline), 2), **CPU)
    listed = DataPrefetcher(
        DataLoader(EncodedImageFolder(folder), 2), transforms=pipeline, device="cpu"
    )
    op.size = (12, 12)
    for prefetcher in (moved, listed):
        with pytest.raises(TypeError, match="has changed since"):
            next(iter(prefetcher))
