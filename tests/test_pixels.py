"""Datasets whose pictures are no files: all transforms move, and the decode stays theirs."""

import io
import pickle
import re

import numpy as np
import pytest
import torch
from fakes import assert_same_batches
from pictures import draw, encode, encode_jpeg
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset
from torchvision import datasets as tv
from torchvision import transforms as v1
from torchvision.datasets.vision import StandardTransform
from torchvision.transforms import v2

from gpuprefetch import BadImageError, DataPrefetcher, convert_transforms
from gpuprefetch.images.header import decode_cpu, read_header
from gpuprefetch.images.ppm import read_ppm, to_ppm
from gpuprefetch.migrate.accelerate import accelerate
from gpuprefetch.migrate.explain import explain
from gpuprefetch.migrate.folders import encoded_view
from gpuprefetch.migrate.parity import parity

COUNT = 8
LABELS = [i % 3 for i in range(COUNT)]
CPU = {"device": "cpu", "print_plan": False}
NORMALIZE = v1.Normalize((0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
LEVEL = 1.01 / 255 / 0.24  # of a normalized image
VAL = v1.Compose([v1.ToTensor(), NORMALIZE])
TRAIN = v1.Compose([v1.RandomCrop(32, padding=4), v1.RandomHorizontalFlip(), *VAL.transforms])


def as_built(kind, transform, **attributes):
    """A dataset of torchvision's as its constructor leaves it, without the download."""
    dataset = kind.__new__(kind)
    joint = StandardTransform(transform, None)
    common = {"transform": transform, "target_transform": None, "transforms": joint}
    dataset.__dict__.update(common | attributes)
    return dataset


def colors(size=32):
    return np.stack([draw(size, size, seed=i) for i in range(COUNT)])


def cifar(transform=VAL):
    return as_built(tv.CIFAR10, transform, data=colors(), targets=LABELS)


def fashion(transform):
    grays = np.stack([draw(28, 28, 1, seed=i) for i in range(COUNT)])
    targets = torch.tensor(LABELS)
    return as_built(tv.FashionMNIST, transform, data=torch.from_numpy(grays), targets=targets)


class Made(Dataset):
    """Gives its transform what ``make`` makes of a number."""

    def __init__(self, make, transform, count=COUNT):
        self.make = make
        self.transform = transform
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.transform(self.make(index)), index


def held(dataset, atol=LEVEL, **options):
    """Hold a moved loader to the plain one."""
    loader = DataLoader(dataset, 3, **options)
    prefetcher = accelerate(loader, **CPU)
    assert_same_batches(loader, prefetcher, atol=atol)
    return prefetcher


# --- torchvision's ------------------------------------------------------------------------------

planes = colors().transpose(0, 3, 1, 2)
OF_ARRAYS = {
    "CIFAR10": cifar,
    "CIFAR100": lambda ops: as_built(tv.CIFAR100, ops, data=colors(), targets=LABELS),
    "SVHN": lambda ops: as_built(tv.SVHN, ops, data=planes, labels=np.array(LABELS)),
    "STL10": lambda ops: as_built(tv.STL10, ops, data=planes, labels=np.array(LABELS)),
}


@pytest.mark.parametrize("name", OF_ARRAYS)
def test_torchvisions_datasets_of_arrays_move(name):
    prefetcher = held(OF_ARRAYS[name](VAL))
    first, *_ = prefetcher.describe().splitlines()
    assert re.fullmatch(
        r"accelerate: decode by the dataset, in the workers \(its pictures are no files\); "
        "then on the CPU",
        first,
    )
    assert {step.where for step in prefetcher.plan.steps} == {"fused launch"}
    assert prefetcher.stats.cpu_images == COUNT


def test_pictures_come_from_workers_and_through_views():
    dataset = cifar()
    held(ConcatDataset([Subset(dataset, [3, 1, 5]), dataset]), num_workers=1)
    view = pickle.loads(pickle.dumps(encoded_view(cifar(), VAL.transforms, [])))
    assert view[5][0].data == to_ppm(colors()[5]) and view[5][0].index == 5


def test_what_is_random_depends_on_the_sample():
    def epoch(size):
        prefetcher = accelerate(DataLoader(cifar(TRAIN), size), seed=3, **CPU)
        return torch.cat([images for images, _ in prefetcher])

    assert torch.equal(epoch(3), epoch(8))
    assert len({tuple(image.flatten().tolist()) for image in epoch(8)}) == COUNT


def test_random_crops_of_pictures_are_uniform():
    """Red and green say which row and column a pixel is from; blue is 0 in the padding."""
    row, column = np.mgrid[:32, :32].astype(np.uint8)
    picture = Image.fromarray(np.dstack([row, column, np.full_like(row, 255)]))
    ops = [v1.RandomCrop(32, padding=4), v1.RandomHorizontalFlip(), v1.PILToTensor()]
    dataset = Made(lambda index: picture, v1.Compose(ops), 81 * 20)
    prefetcher = accelerate(DataLoader(dataset, 81 * 20), seed=1, **CPU)
    assert [step.where for step in prefetcher.plan.steps][:2] == ["fused launch"] * 2
    ((images, _),) = prefetcher
    padded = v1.functional.pad(v1.functional.pil_to_tensor(picture), [4] * 4)
    counts = np.zeros((9, 9), dtype=int)
    mirrored = 0
    for image in images:
        flipped = bool(image[1, 16, 16] > image[1, 16, 17])
        mirrored += flipped
        image = image.flip(-1) if flipped else image
        top, left = (image[:2, 16, 16].int() - 12).tolist()  # 16 less the padding of 4
        assert torch.equal(image, padded[:, top : top + 32, left : left + 32])
        counts[top, left] += 1
    assert ((counts - 20) ** 2 / 20).sum() < 125  # chi-square of 80: p = 0.001
    assert abs(mirrored - 810) < 3.3 * 20.1  # the same p


def test_an_epoch_goes_on_and_is_replayed():
    make = DataLoader(cifar(TRAIN), 3, shuffle=True, generator=torch.Generator().manual_seed(5))
    prefetcher = accelerate(make, seed=2, **CPU)
    batches = iter(prefetcher)
    next(batches)
    state = prefetcher.state_dict()
    images, target = next(batches)
    again = prefetcher.replay(prefetcher.dataset.targets.index(int(target[0])))
    assert len(again[0]) == 1
    make = DataLoader(cifar(TRAIN), 3, shuffle=True, generator=torch.Generator().manual_seed(5))
    other = accelerate(make, seed=2, **CPU)
    other.load_state_dict(state)
    assert torch.equal(next(iter(other))[0], images)


def test_reports_of_pictures():
    loader = DataLoader(cifar(TRAIN), 3)
    prefetcher = accelerate(loader, print_plan=False)
    report = str(explain(loader))
    assert report.startswith(prefetcher.describe())
    assert re.search(r"decode .* by the dataset, in the workers \(its pictures", report)
    assert prefetcher.decoding == "the dataset, in the workers (its pictures are no files)"
    assert parity(loader, 4, device="cpu").mean < 0.01


# --- modes --------------------------------------------------------------------------------------


def test_gray_pictures_are_told_two_ways_and_both_work():
    transform = v1.Compose([v1.ToTensor(), v1.Normalize((0.5,), (0.5,))])
    with pytest.raises(TypeError, match=r"FashionMNIST\.__getitem__\(0\).*'L' and not") as error:
        accelerate(DataLoader(fashion(transform), 3), **CPU)
    known = {"v2": v2, "transform": transform, "convert_transforms": convert_transforms}
    (begins, tensors, list_of) = re.search(
        r"(v2\.Compose\(.*?\]\))\..*transform=(v2\.PILToTensor\(\)), and write "
        r"DataPrefetcher\(loader, transforms=(.*)\)\.$",
        str(error.value),
    ).groups()
    held(fashion(eval(begins, known)), atol=1e-6)
    loader = DataLoader(fashion(eval(tensors, known)), 3)
    moved = DataPrefetcher(loader, transforms=eval(list_of, known), device="cpu")
    assert_same_batches(DataLoader(fashion(transform), 3), moved)
    assert next(iter(moved))[0].shape == (3, 1, 28, 28)


def as_rgb(picture):
    return picture.convert("RGB")


OF_GRAY = {
    "a function": [v1.Lambda(as_rgb), v1.Resize((40, 40)), v1.ToTensor()],
    "RGB after a resize": [v1.Resize(40), v2.RGB(), v1.ToTensor()],
    "Grayscale": [v1.Resize((40, 40)), v1.Grayscale(3), v1.ToTensor()],
}


@pytest.mark.parametrize("name", OF_GRAY)
def test_gray_pictures_move_where_the_pipeline_makes_three_channels(name):
    assert next(iter(held(fashion(v1.Compose(OF_GRAY[name])))))[0].shape[1] == 3


def test_a_channel_that_is_repeated_later_is_refused():
    repeated = [v1.Resize(40), v1.ToTensor(), v1.Lambda(lambda image: image.repeat(3, 1, 1))]
    with pytest.raises(TypeError, match="is 'L' and not RGB"):
        accelerate(DataLoader(fashion(v1.Compose(repeated)), 3), **CPU)


def of_mode(mode):
    def make(index):
        if mode == "I;16":
            return Image.fromarray(draw(32, 32, 1, seed=index).astype(np.uint16))
        if mode == "RGBA":
            return Image.fromarray(draw(32, 32, 4, seed=index))
        return Image.fromarray(draw(32, 32, seed=index)).convert(mode)

    return make


@pytest.mark.parametrize("mode", ["L", "P", "1", "RGBA", "CMYK", "LA", "I", "F", "I;16", "YCbCr"])
def test_pictures_of_all_modes_are_converted_as_the_pipeline_does(mode):
    make = of_mode(mode)
    for first in (v1.Lambda(as_rgb), v2.RGB()):
        held(Made(make, v1.Compose([first, v1.ToTensor()])), atol=0)
    with pytest.raises(TypeError, match=rf"picture is '{mode}' and not RGB"):
        accelerate(DataLoader(Made(make, v1.Compose([v1.RandomCrop(24), v1.ToTensor()]))), **CPU)


# --- arrays and tensors -------------------------------------------------------------------------

ARRAYS = {
    "array": lambda index: draw(32, 32, seed=index),
    "read backwards": lambda index: draw(32, 32, seed=index)[:, ::-1].copy(),
    "laid out otherwise": lambda index: np.asfortranarray(draw(32, 32, seed=index)),
    "tensor": lambda index: torch.from_numpy(draw(32, 32, seed=index)).permute(2, 0, 1),
    "floats": lambda index: torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(index)),
}


@pytest.mark.parametrize("kind", [v1, v2], ids=["v1", "v2"])
@pytest.mark.parametrize("name", ARRAYS)
def test_to_pil_image_takes_what_it_takes(name, kind):
    ops = [kind.ToPILImage(), v1.CenterCrop(24), v1.ToTensor(), NORMALIZE]
    prefetcher = held(Made(ARRAYS[name], v1.Compose(ops)))
    wheres = [step.where for step in prefetcher.plan.steps]
    assert wheres == ["worker CPU", *["fused launch"] * 3]
    assert parity(DataLoader(Made(ARRAYS[name], v1.Compose(ops))), 2, device="cpu").mean < 0.01


def test_to_pil_image_takes_no_pictures_as_before(tmp_path):
    path = tmp_path / "0.jpg"
    path.write_bytes(encode_jpeg(draw(40, 40)))
    ops = v1.Compose([v1.ToPILImage(), v1.ToTensor()])

    def of_a_file(index):
        with Image.open(path) as picture:
            return picture.convert("RGB")

    for make in (of_a_file, lambda index: Image.new("RGB", (9, 9))):
        with pytest.raises(TypeError, match="pic should be Tensor or ndarray"):
            Made(make, ops)[0]
        with pytest.raises(TypeError, match="pic should be Tensor or ndarray"):
            accelerate(DataLoader(Made(make, ops)), **CPU)


TO_TENSORS = {
    "ToTensor": [v1.ToTensor(), v1.CenterCrop(24), NORMALIZE],
    "ToImage": [v2.ToImage(), v2.CenterCrop(24), v2.ToDtype(torch.float32, scale=True), NORMALIZE],
}


@pytest.mark.parametrize("name", TO_TENSORS)
def test_arrays_for_a_conversion_to_tensors(name):
    transform = v1.Compose(TO_TENSORS[name])
    for array in ("array", "laid out otherwise"):
        held(Made(ARRAYS[array], transform))
    others = {
        r"numpy\.ndarray of uint8 \(32, 32\)": lambda index: draw(32, 32, 1),
        r"numpy\.ndarray of float32 \(32, 32, 3\)": lambda index: draw(32, 32).astype(np.float32),
        r"numpy\.ndarray of uint8 \(32, 32, 4\)": lambda index: draw(32, 32, 4),
    }
    for text, make in others.items():
        with pytest.raises(TypeError, match=f"the transform gets a {text}"):
            accelerate(DataLoader(Made(make, transform)), **CPU)


# --- beside files -------------------------------------------------------------------------------


class Mixed(Dataset):
    """Every other picture is a file."""

    def __init__(self, files, transform):
        self.files = files
        self.transform = transform

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        file = self.files[index]
        picture = Image.open(io.BytesIO(file) if isinstance(file, bytes) else file)
        if index % 2:
            picture = Image.fromarray(255 - np.asarray(picture.convert("RGB")))
        return self.transform(picture), index


def test_a_dataset_may_give_files_and_pixels():
    files = [encode(draw(40 + i, 50, seed=i), "PNG") for i in range(COUNT)]
    ops = [v2.RGB(), v1.CenterCrop(36), v1.ToTensor()]
    dataset = Mixed(files, v1.Compose(ops))
    prefetcher = held(dataset)
    assert "by the dataset" not in prefetcher.describe()  # as the first one says
    view = encoded_view(dataset, ops, [])
    assert [view[i][0].data == files[i] for i in range(4)] == [True, False, True, False]
    assert prefetcher.stats.cpu_images == COUNT
    files[2] = files[2][:200]
    with pytest.raises(BadImageError):
        list(accelerate(DataLoader(Mixed(files, v1.Compose(ops)), 4), **CPU))
    loader = DataLoader(Mixed(files, v1.Compose(ops)), 4)
    kept = [target for _, target in accelerate(loader, on_error="skip", **CPU)]
    assert torch.cat(kept).tolist() == [0, 1, 3, 4, 5, 6, 7]
    files[3] = files[3][:200]  # which the dataset decodes itself
    with pytest.raises(OSError, match="truncated"):
        list(accelerate(loader, on_error="skip", **CPU))


def test_pictures_of_different_sizes_are_named():
    dataset = Made(lambda index: Image.new("RGB", (32, 32 + index // 5)), VAL)
    with pytest.raises(RuntimeError, match=r"\[3, 32, 32\].*sample 3 of.*\[3, 33, 32\].*sample 5"):
        list(accelerate(DataLoader(dataset, 3), **CPU))


@pytest.mark.gpu
def test_a_gpu_makes_of_pictures_what_the_cpu_makes():
    want = list(DataLoader(cifar(), 4))
    prefetcher = accelerate(DataLoader(cifar(), 4, pin_memory=True), print_plan=False)
    for (images, target), (got, labels) in zip(want, prefetcher, strict=True):
        torch.testing.assert_close(got.cpu(), images, atol=1e-5, rtol=0)
        assert torch.equal(labels.cpu(), target)
    loader = DataLoader(cifar(TRAIN), 8, pin_memory=True)
    here, there = (
        next(iter(accelerate(loader, seed=1, device=device, print_plan=False)))[0].cpu()
        for device in ("cpu", "cuda")
    )
    torch.testing.assert_close(there, here, atol=1e-5, rtol=0)


# --- the file of a picture ----------------------------------------------------------------------


def test_the_file_of_a_picture_is_what_pillow_reads():
    pixels = draw(50, 70)[::10, ::10]
    file = to_ppm(pixels)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(file))), pixels)
    assert read_header(file) == read_header(file.replace(b"P6\n", b"P6 \n"))
    for other in (file, file.replace(b"P6\n", b"P6\n# a comment\n"), file + b"more"):
        assert np.array_equal(decode_cpu(other).permute(1, 2, 0).numpy(), pixels)
    assert read_ppm(file) is not None and read_ppm(file + b"more") is None
    with pytest.raises(ValueError, match="truncated"):
        decode_cpu(file[:-1])


def test_pils_limit_of_pixels_holds_for_it(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    with pytest.raises(ValueError, match="outside the limits"):
        read_header(to_ppm(np.zeros((6, 7, 3), np.uint8)))
    with pytest.warns(Image.DecompressionBombWarning, match="30 pixels"):
        read_header(to_ppm(np.zeros((5, 6, 3), np.uint8)))
