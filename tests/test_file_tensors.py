"""Datasets that read with torchvision.io, as PyTorch's tutorials do, move as they are."""

import contextlib
import copy
import multiprocessing
import pickle
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import assert_same_batches
from pictures import draw, encode, files_of, write_folder
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate
from torchcodec import decoders
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.io import decode_image, decode_jpeg, decode_png, read_file, read_image
from torchvision.models import ResNet18_Weights
from torchvision.transforms import InterpolationMode, v2

import gpuprefetch
from gpuprefetch import (
    BadImageError,
    DataPrefetcher,
    UnsupportedTransformError,
    accelerate,
    convert_transforms,
    explain,
    parity,
)
from gpuprefetch.images.guard import UndecodedError
from gpuprefetch.migrate.folders import encoded_view
from gpuprefetch.migrate.handlers import may_be_caught
from gpuprefetch.migrate.row_functions import is_of_rows

pytestmark = pytest.mark.filterwarnings(
    "ignore:The image decoding and encoding capabilities:DeprecationWarning"
)
COUNT = 8
CPU = {"device": "cpu", "print_plan": False}
LEVEL = 1.01 / 255
SCALED = v2.ToDtype(torch.float32, scale=True)
NORMALIZE = v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CROPPED = [v2.Resize(36), v2.CenterCrop(32)]
PIPELINE = v2.Compose([*CROPPED, SCALED])
OPERATORS = ("read_file", "decode_image", "decode_jpeg", "decode_png", "decode_webp")
TORCHCODECS = ("_source_to_tensor", "_detect_image_format", "_decode_jpeg", "_decode_png")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pictures = [draw(48 + 2 * i, 64, seed=i) for i in range(COUNT)]
    return write_folder(tmp_path_factory.mktemp("folder"), pictures, "jpg", quality=95)


@pytest.fixture(scope="module")
def paths(folder):
    return files_of(folder)


def opened(path):
    with Image.open(path) as picture:
        return picture.convert("RGB")


class Own(Dataset):
    """As PyTorch's tutorial "Writing custom datasets" has it."""

    def __init__(self, paths, transform=PIPELINE, read=decode_image):
        self.paths = paths
        self.transform = transform
        self.read = read

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        image = self.read(self.paths[index])
        label = index
        if self.transform:
            image = self.transform(image)
        return image, label


def held(loader, **options):
    """What accelerate makes of a loader, held to what the loader gives: to a level of 255."""
    moved = accelerate(loader, **CPU, **options)
    assert_same_batches(loader, moved, atol=LEVEL, rtol=0)
    for (old, *_), (new, *_) in zip(loader, moved, strict=True):
        assert old.dtype == new.dtype
        assert type(new) is torch.Tensor
    return moved


def left_encoded(dataset):
    """Whether each sample of a dataset leaves its file encoded."""
    view = encoded_view(dataset, [v2.ToImage(), *dataset.transform.transforms], [])
    return [view[i][0].data.startswith(b"\xff\xd8") for i in range(len(dataset))]


# --- readers and pipelines ------------------------------------------------------------------------


def of_bytes(path):
    return decode_image(torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8))


BUFFER = torch.empty(1 << 16, dtype=torch.uint8)


def of_a_reused_buffer(path):
    data = np.fromfile(path, np.uint8)
    BUFFER[: len(data)] = torch.from_numpy(data)
    image = decode_image(BUFFER[: len(data)])
    BUFFER.zero_()
    return image


def by_its_header(path):
    image = decode_image(path)
    height, width = image.shape[-2:]
    assert isinstance(image, torch.Tensor) and torch.is_tensor(image)
    assert (image.dtype, image.device.type, image.ndim) == (torch.uint8, "cpu", 3)
    assert len(image) == image.size(0) == image.dim() == 3
    assert image.numel() == image.nbytes == 3 * height * width
    assert v2.functional.get_size(image) == [height, width]
    assert not image.is_floating_point() and not image.requires_grad
    return image


ENCODED = {
    "decode_image": decode_image,
    "a Path": lambda path: decode_image(Path(path)),
    "read_image": read_image,
    "RGB": partial(decode_image, mode="RGB"),
    "decode_jpeg": lambda path: decode_jpeg(read_file(path)),
    "EXIF is to be applied": partial(decode_image, apply_exif_orientation=True),
    "bytes": of_bytes,
    "a reused buffer": of_a_reused_buffer,
    "header": by_its_header,
    "as_tensor": lambda path: torch.as_tensor(decode_image(path)),
    "TorchCodec": decoders.decode_image,
    "TorchCodec, unchanged": partial(decoders.decode_image, mode="UNCHANGED"),
    "TorchCodec, a Path": lambda path: decoders.decode_image(Path(path)),
    "TorchCodec's decode_jpeg": lambda path: decoders.decode_jpeg(Path(path).read_bytes()),
    "TorchCodec, a list": lambda path: decoders.decode_jpeg([path, path], output_dtype="auto")[1],
}


@pytest.mark.parametrize("name", ENCODED)
def test_files_that_libraries_read_are_decoded_by_the_prefetcher(paths, name):
    dataset = Own(paths, read=ENCODED[name])
    moved = held(DataLoader(dataset, 3))
    assert "by the dataset" not in moved.describe()
    assert all(left_encoded(dataset))


def in_place(image):
    image //= 2
    return image


def set_to_zero(image):
    image[:, :9] = 0
    return image


def by_numpy(image):
    array = image.numpy()
    array[:] = array // 2
    return image


def by_a_view(image):
    image[0].zero_()
    return image


def by_out(image):
    torch.bitwise_and(image, 0xF0, out=image)
    return image


def by_data(image):
    image.data = image.data // 2
    return image


def resized(image):
    image.resize_(3, 40, 40)
    assert image.shape == (3, 40, 40)
    return image


def swapped(image):
    torch.utils.swap_tensors(image, torch.zeros(3, 40, 40, dtype=torch.uint8))
    return image


def in_a_thread(image):
    made = []
    thread = threading.Thread(target=lambda: made.append(image.flip(-1)))
    thread.start()
    thread.join()
    return made[0]


CHANGES = {
    "cropped": lambda image: image[:, 3:43, 2:60],
    "flipped": lambda image: image.flip(0),
    "in place": in_place,
    "set": set_to_zero,
    "by NumPy": by_numpy,
    "by a view": by_a_view,
    "by out=": by_out,
    "by .data": by_data,
    "resize_": resized,
    "swapped": swapped,
    "in a list": lambda image: torch._foreach_add([image], 1)[0],
    "a function of torchvision's": lambda image: v2.functional.crop(image, 2, 2, 40, 40),
    "a module": v2.RandomHorizontalFlip(1.0),
    "contiguous": lambda image: image.contiguous(),
    "deep copy": copy.deepcopy,
    "pickle": lambda image: pickle.loads(pickle.dumps(image)),
    "array": lambda image: torch.from_numpy(np.asarray(image).copy()),
    "an array's memory": lambda image: np.asarray(image).fill(9) or image,
    "new": lambda image: torch.stack([image, image])[0],
    "in a thread": in_a_thread,
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_image_that_is_changed_before_its_transform_is_handed_on_as_it_is(paths, name):
    dataset = Own(paths, read=lambda path: CHANGES[name](decode_image(path)))
    moved = held(DataLoader(dataset, 3))
    assert "by the dataset, in the workers" in moved.describe()
    assert not any(left_encoded(dataset))


def test_tensors_that_others_decode_are_handed_on(paths):
    dataset = Own(paths, read=lambda path: torch.from_numpy(as_array(path)).movedim(2, 0))
    moved = held(DataLoader(dataset, 3))
    assert "decode by the dataset, in the workers (it" in moved.describe()


@pytest.mark.filterwarnings("ignore:scale was set to True but no dtype:UserWarning")
@pytest.mark.parametrize("wrap", [tv_tensors.Image, lambda x: x.as_subclass(tv_tensors.Image)])
def test_images_of_torchvisions_kind_move(paths, wrap):
    typed = {tv_tensors.Image: torch.float32, "others": None}
    pipeline = v2.Compose([*CROPPED, v2.ToDtype(typed, scale=True)])
    loader = DataLoader(Own(paths, pipeline, lambda path: wrap(decode_image(path))), 3)
    assert held(loader).plan.steps[2].where == "fused launch"
    plain = DataLoader(Own(paths, pipeline), 3)
    assert next(iter(held(plain)))[0].dtype == torch.uint8  # the op leaves others alone


NEAREST = InterpolationMode.NEAREST
EXACT = InterpolationMode.NEAREST_EXACT
BICUBIC = InterpolationMode.BICUBIC
BILINEAR = InterpolationMode.BILINEAR
MOVED = {
    "tutorial": [*CROPPED, SCALED, NORMALIZE],
    "v1": [
        v1.Resize(36, antialias=True),
        v1.CenterCrop(32),
        v1.ConvertImageDtype(torch.float32),
        v1.Normalize((0.5,) * 3, (0.5,) * 3),
    ],
    "uint8": CROPPED,
    "floats of 0 to 255": [*CROPPED, v2.ToDtype(torch.float32)],
    "floats first": [SCALED, *CROPPED, NORMALIZE],
    "half": [*CROPPED, v2.ToDtype(torch.float16, scale=True)],
    "double": [*CROPPED, v2.ToDtype(torch.float64, scale=True)],
    "integers": [*CROPPED, v2.ToDtype(torch.int16, scale=True)],
    "ToImage": [v2.ToImage(), *CROPPED, SCALED],
    "ToPureTensor": [*CROPPED, v2.ToImage(), v2.ToPureTensor(), SCALED],
    "PILToTensor": [v2.PILToTensor(), *CROPPED, SCALED],
    "RGB": [v2.RGB(), *CROPPED, SCALED],
    "nearest": [v2.Resize((33, 41), NEAREST), SCALED],
    "nearest, larger": [v2.Resize((90, 101), NEAREST)],
    "nearest, v1": [v1.Resize((33, 41), NEAREST)],
    "nearest, exactly": [v2.Resize((32, 40), EXACT)],
    "bicubic": [v2.Resize((33, 41), BICUBIC), SCALED],
    "bicubic, of floats": [SCALED, v2.Resize((33, 41), BICUBIC)],
    "longest side": [v2.Resize(36, max_size=40), v2.CenterCrop(32)],
    "padded": [v2.CenterCrop(90), SCALED],
    "posterized": [*CROPPED, v2.RandomPosterize(3, p=1.0), SCALED],
    "solarized": [*CROPPED, v2.RandomSolarize(100, p=1.0)],
    "autocontrast": [*CROPPED, v2.RandomAutocontrast(p=1.0), SCALED],
    "equalized": [*CROPPED, v2.RandomEqualize(p=1.0)],
    "inverted": [*CROPPED, SCALED, v2.RandomInvert(p=1.0)],
    "gray": [*CROPPED, v2.Grayscale(3), SCALED],
    "one gray": [*CROPPED, v2.Grayscale(1), SCALED],
    "turned": [*CROPPED, v2.RandomRotation((30, 30), fill=(10, 200, 30)), SCALED],
    "turned, bilinear": [*CROPPED, v2.RandomRotation((30, 30), BILINEAR, fill=100), SCALED],
    "sheared": [*CROPPED, v2.RandomAffine((20, 20), shear=(10, 10, 5, 5)), SCALED],
    "sharper": [*CROPPED, v2.RandomAdjustSharpness(2.5, p=1.0), SCALED],
    "blurred": [*CROPPED, v2.GaussianBlur(5, (1.2, 1.2)), SCALED],
    "brighter": [*CROPPED, v2.ColorJitter(brightness=(1.3, 1.3)), SCALED],
    "more contrast": [*CROPPED, v2.ColorJitter(contrast=(1.3, 1.3)), SCALED],
    "saturated": [*CROPPED, v2.ColorJitter(saturation=(1.7, 1.7)), SCALED],
    "hue": [*CROPPED, v2.ColorJitter(hue=(0.2, 0.2)), SCALED],
    "pad": [*CROPPED, v2.Pad((1, 2, 3, 4), padding_mode="reflect"), SCALED],
    "own function": [*CROPPED, SCALED, lambda image: image * 2],
}


@pytest.mark.filterwarnings("ignore:ToDtype leaves values as they are:UserWarning")
@pytest.mark.parametrize("name", MOVED)
def test_pipelines_of_tensors_give_what_the_plain_loader_gives(paths, name):
    loader = DataLoader(Own(paths, v2.Compose(MOVED[name])), 4)
    moved = accelerate(loader, **CPU)
    assert "worker CPU" not in {step.where for step in moved.plan.steps}
    for (old, labels), (new, others) in zip(loader, moved, strict=True):
        assert (old.dtype, old.shape) == (new.dtype, new.shape)
        if any("clipped to [0, 1]" in step.note for step in moved.plan.steps):
            old = old.clamp(0, 1)
            new = new.clamp(0, 1)
        stds = [min(op.std) for op in MOVED[name] if hasattr(op, "std")]
        levels = 1 if old.max() > 3 else 255 * min([1, *stds])
        distance = (old.double() - new.double()).abs() * levels
        assert distance.max() <= (3 if name == "bicubic, of floats" else 1.01)
        assert distance.mean() <= 0.5
        assert torch.equal(labels, others)


@pytest.mark.parametrize("read", [decode_image, lambda path: decode_image(path)[:, 1:]])
def test_each_device_gives_what_the_plain_loader_gives(tmp_path, device, read):
    # nvJPEG enlarges subsampled chroma otherwise than libjpeg does: by 3 levels in the mean here.
    pictures = [draw(48 + 2 * i, 64, seed=i) for i in range(COUNT)]
    paths = files_of(write_folder(tmp_path, pictures, "jpg", quality=95, subsampling=0))
    for ops in ([*CROPPED, SCALED], CROPPED, [v2.Resize((32, 128), NEAREST), SCALED]):
        own = Own(paths, v2.Compose(ops), read)
        loader = DataLoader(own, 4, pin_memory=device.type == "cuda")
        moved = accelerate(loader, device=device, print_plan=False)
        for (old, _), (new, _) in zip(loader, moved, strict=True):
            assert old.dtype == new.dtype
            distance = (old.double() - new.double().cpu()).abs()
            # nvJPEG rounds otherwise than libjpeg: by a level or two.
            assert distance.mean() * (255 if new.is_floating_point() else 1) < 1


WHOLE = {
    "one op": v2.CenterCrop(32),
    "Sequential": torch.nn.Sequential(v1.CenterCrop(32), v1.ConvertImageDtype(torch.float32)),
    "v1 Compose": v1.Compose([v1.CenterCrop(32), v1.ConvertImageDtype(torch.float32)]),
    "weights": ResNet18_Weights.DEFAULT.transforms(crop_size=32, resize_size=36),
}


@pytest.mark.parametrize("name", WHOLE)
def test_pipelines_may_be_held_in_other_ways(paths, name):
    loader = DataLoader(Own(paths, WHOLE[name]), 4)
    assert_same_batches(loader, accelerate(loader, **CPU), atol=LEVEL / 0.22, rtol=0)


def test_nearest_pixels_are_those_of_tensors(paths):
    """torchvision takes other ones of PIL images. No two are equally near in these sizes."""
    pipeline = v2.Compose([v2.Resize((32, 128), NEAREST), v2.ToImage(), SCALED])
    tensors = DataLoader(Own(paths, pipeline), 4)
    pictures = DataLoader(Own(paths, pipeline, opened), 4)
    assert_same_batches(tensors, accelerate(tensors, **CPU), atol=1e-6)
    assert_same_batches(pictures, accelerate(pictures, **CPU), atol=1e-6)
    assert not torch.equal(next(iter(tensors))[0], next(iter(pictures))[0])


RANDOM = {
    "train": [v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), SCALED, NORMALIZE],
    "nearest": [v2.RandomResizedCrop(32, interpolation=NEAREST), SCALED],
    "colors": [v2.RandomResizedCrop(32), v2.ColorJitter(0.4, 0.4, 0.4), SCALED],
    "crop": [v2.RandomCrop(32, padding=4), SCALED],
    "turned": [v2.RandomResizedCrop(32), v2.RandomRotation(30), SCALED],
    "floats": [SCALED, v2.RandomResizedCrop(32), v2.ColorJitter(0.4), NORMALIZE],
    "v1": [v1.RandomResizedCrop(32, antialias=True), v1.ConvertImageDtype(torch.float32)],
}


@pytest.mark.parametrize("read", [decode_image, lambda path: tv_tensors.Image(read_image(path))])
@pytest.mark.parametrize("name", RANDOM)
def test_parity_compares_with_the_pipeline_on_tensors(paths, name, read):
    report = parity(DataLoader(Own(paths, v2.Compose(RANDOM[name]), read), 4), COUNT, device="cpu")
    assert report.rows[0].max == 0  # of decode
    assert report.mean <= 0.5
    if name in ("nearest", "crop"):
        assert report.mean < 1e-4


def test_random_ops_sample_for_each_image_from_seed_and_sample(paths):
    pipeline = v2.Compose([v2.RandomResizedCrop(24), v2.RandomInvert(0.5), SCALED])
    same = Own(paths[:1] * 64, pipeline)

    def batches(batch_size, seed):
        moved = accelerate(DataLoader(same, batch_size), **CPU, seed=seed)
        return torch.cat([images for images, _ in moved])

    first = batches(8, 1)
    assert len(first.mean((1, 2, 3)).unique()) > 55
    assert torch.equal(first, batches(5, 1))
    assert not torch.equal(first, batches(8, 2))


# --- plans ----------------------------------------------------------------------------------------


def test_the_plan_says_who_decodes_and_why(paths, tmp_path):
    png = tmp_path / "a.png"
    png.write_bytes(encode(draw(50, 60), "PNG"))
    moved = accelerate(DataLoader(Own([str(png), *paths])), **CPU)
    first, *_ = moved.describe().splitlines()
    assert first.startswith("accelerate: decode by the dataset, in the workers (it reads the image")
    assert "a.png', which is no RGB JPEG" in first
    assert "by the dataset" not in explain(DataLoader(Own(paths)))
    cropped = Own(paths, read=lambda path: decode_image(path)[:, 1:])
    assert "(it uses .__getitem__ of the image '" in explain(DataLoader(cropped))


def test_the_plan_says_what_v1_does_otherwise(paths):
    def notes(op):
        loader = DataLoader(Own(paths, v2.Compose([op, SCALED])))
        return accelerate(loader, **CPU).plan.steps[0].note

    assert "v1 clips bicubic tensors once" in notes(v1.Resize((33, 41), BICUBIC))
    assert "clips" not in notes(v2.Resize((33, 41), BICUBIC)) + notes(v1.Resize((33, 41)))
    pictures = DataLoader(
        Own(paths, v1.Compose([v1.Resize((33, 41), BICUBIC), v1.ToTensor()]), opened)
    )
    assert "clips" not in accelerate(pictures, **CPU).plan.steps[0].note


@pytest.mark.parametrize("open_it", [v1.ToPILImage(), v2.ToPILImage("RGB")])
def test_a_picture_that_is_made_first_may_be_a_file(paths, open_it):
    resize = v1.Resize((32, 128), NEAREST)  # PIL's: see above
    pipeline = v1.Compose([open_it, resize, v1.CenterCrop(32), v1.ToTensor()])
    loader = DataLoader(Own(paths, pipeline), 4)
    moved = accelerate(loader, **CPU)
    assert_same_batches(loader, moved, atol=1e-6)
    assert moved.plan.steps[0].where == "nothing to do"
    assert "by the dataset" not in moved.describe()
    assert parity(loader, COUNT, device="cpu").mean < 1e-4
    changed = DataLoader(Own(paths, pipeline, lambda path: decode_image(path).flip(-1)), 4)
    assert_same_batches(changed, accelerate(changed, **CPU), atol=1e-6)


# --- what a dataset may be ------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("load", [decode_image, partial(decode_image, mode="RGB")])
def test_a_folder_may_have_it_as_its_loader(folder, load, workers):
    dataset = ImageFolder(str(folder), PIPELINE, loader=load)
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    moved = held(DataLoader(dataset, 3, **options))
    assert "by the dataset" not in moved.describe()
    held(DataLoader(ConcatDataset([dataset, Subset(dataset, [3, 1])]), 3))


class InDicts(Own):
    """Gives the image that was read beside what its transform made of it."""

    def __getitem__(self, index):
        image = self.read(self.paths[0])
        return {"raw": image, "image": self.transform(image), "index": index, "again": [image]}


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_beside_the_result_is_its_pixels(paths, workers):
    loader = DataLoader(InDicts(paths), 3, num_workers=workers)
    moved = accelerate(loader, **CPU)
    assert "by the dataset" not in moved.describe()
    for old, new in zip(loader, moved, strict=True):
        assert torch.equal(old["raw"], new["raw"]) and torch.equal(old["again"][0], new["again"][0])
        assert torch.equal(old["index"], new["index"])
        torch.testing.assert_close(old["image"], new["image"], atol=LEVEL, rtol=0)


class Masked(Own):
    def __getitem__(self, index):
        image = self.read(self.paths[index])
        rows = torch.arange(image.shape[1])[:, None] // 9
        mask = tv_tensors.Mask(rows.expand(1, *image.shape[1:]).to(torch.uint8))
        return self.transform(image, mask)


@pytest.mark.parametrize("read", [decode_image, lambda path: tv_tensors.Image(read_image(path))])
def test_a_mask_follows_its_image(paths, read):
    pipeline = v2.Compose([v2.RandomHorizontalFlip(1.0), v2.Resize((32, 32)), SCALED])
    loader = DataLoader(Masked(paths, pipeline, read), 3)
    moved = accelerate(loader, **CPU)
    for (old, olds), (new, news) in zip(loader, moved, strict=True):
        torch.testing.assert_close(old.as_subclass(torch.Tensor), new, atol=LEVEL, rtol=0)
        assert torch.equal(olds, news)


class WithPlainMask(Masked):
    """The mask is a tensor that torchvision has read, too, in a dict."""

    def __getitem__(self, index):
        beside = {"mask": decode_image(self.paths[index]), "index": index}
        return self.transform(self.read(self.paths[index]), beside)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_tensor_beside_the_image_reaches_its_transform_as_pixels(paths, workers):
    pipeline = v2.Compose([v2.CenterCrop(48), SCALED])
    loader = DataLoader(WithPlainMask(paths[:1] * 4, pipeline), 2, num_workers=workers)
    moved = accelerate(loader, **CPU)
    for (old, olds), (new, news) in zip(loader, moved, strict=True):
        torch.testing.assert_close(old, new, atol=LEVEL, rtol=0)
        assert torch.equal(olds["mask"], news["mask"]) and torch.equal(olds["index"], news["index"])


class TwoViews:
    def __init__(self, weak, strong):
        self.weak = weak
        self.strong = strong

    def __call__(self, image):
        return self.weak(image), self.strong(image)


@pytest.mark.parametrize("change", [lambda image: image, lambda image: image.flip(-1)])
def test_several_views_of_a_tensor_move(paths, change):
    views = TwoViews(PIPELINE, v2.Compose([v2.Resize((24, 24)), SCALED]))
    loader = DataLoader(Own(paths, views, lambda path: change(decode_image(path))), 3)
    moved = accelerate(loader, **CPU)
    for (old, _), (new, _) in zip(loader, moved, strict=True):
        for one, other in zip(old, new, strict=True):
            torch.testing.assert_close(one, other, atol=LEVEL, rtol=0)


class FloatsWithin(TwoViews):
    def __call__(self, image):
        return self.weak(image.float() / 255), self.strong(image)


def test_a_view_of_changed_pixels_is_told_of(paths):
    loader = DataLoader(Own(paths, FloatsWithin(v2.Compose(CROPPED), PIPELINE)), 3)
    with pytest.raises(UndecodedError, match=r"before \.strong of the .* gets it: by \.float\."):
        accelerate(loader, **CPU)


def test_rows_of_paths_move(paths):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"path": paths, "label": [*range(COUNT)]})
    pipeline = PIPELINE

    def transforms(rows):
        return {"x": [pipeline(decode_image(path)) for path in rows["path"]], "y": rows["label"]}

    rows.set_transform(transforms)
    assert is_of_rows(rows)
    loader = DataLoader(rows, 3)
    moved = accelerate(loader, **CPU)
    for old, new in zip(loader, moved, strict=True):
        torch.testing.assert_close(old["x"], new["x"], atol=LEVEL, rtol=0)


def doubled(samples):
    images, labels = default_collate(samples)
    return images * 2, labels


def test_a_collate_function_and_lists_of_results(paths):
    loader = DataLoader(Own(paths), 3, collate_fn=doubled)
    assert_same_batches(loader, accelerate(loader, **CPU), atol=2 * LEVEL, rtol=0)
    shorter = DataLoader(Own(paths, v2.Compose([v2.Resize(40), SCALED])), 3)
    images, _ = next(iter(accelerate(shorter, **CPU, results="list")))
    assert [image.shape[1] for image in images] == [40] * 3


def test_what_cannot_move_stays_in_the_workers_on_request(paths):
    turned = v2.Lambda(lambda image: image.rot90(1, (1, 2)))
    for ops in ([turned, PIPELINE], [v2.Resize((32, 32), antialias=False), SCALED]):
        loader = DataLoader(Own(paths, v2.Compose(ops)), 3)
        with pytest.raises(UnsupportedTransformError, match=r"accelerate\(loader, keep_unknown=T"):
            accelerate(loader, **CPU)
        kept = accelerate(loader, **CPU, keep_unknown=True)
        assert_same_batches(loader, kept, atol=1e-6)


# --- files of other kinds -------------------------------------------------------------------------

GRAY = draw(50, 60, 1)
COLORS = draw(50, 60)
ALPHA = np.dstack([COLORS, (np.arange(3000).reshape(50, 60) % 256).astype(np.uint8)])
TURNED = Image.Exif()
TURNED[0x0112] = 6
KINDS = {
    "gray JPEG": encode(GRAY, "JPEG"),
    "CMYK": encode(Image.fromarray(COLORS).convert("CMYK"), "JPEG"),
    "progressive": encode(COLORS, "JPEG", progressive=True),
    "turned": encode(COLORS, "JPEG", exif=TURNED),
    "PNG": encode(COLORS, "PNG"),
    "gray PNG": encode(GRAY, "PNG"),
    "alpha": encode(ALPHA, "PNG"),
    "gray alpha": encode(Image.fromarray(ALPHA).convert("LA"), "PNG"),
    "palette": encode(Image.fromarray(COLORS).convert("P"), "PNG"),
    "two levels": encode(Image.fromarray(COLORS).convert("1"), "PNG"),
    "GIF": encode(COLORS, "GIF"),
    "WebP": encode(COLORS, "WEBP"),
    "WebP alpha": encode(ALPHA, "WEBP", lossless=True),
}


def among(paths, data, folder, name="odd"):
    """A file of these bytes between two others."""
    path = folder / name
    path.write_bytes(data)
    return [paths[0], str(path), paths[1]]


@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_files_of_all_kinds_are_what_torchvision_makes_of_them_in_rgb(paths, tmp_path, name, turn):
    read = partial(decode_image, mode="RGB", apply_exif_orientation=turn)
    dataset = Own(among(paths, KINDS[name], tmp_path), read=read)
    held(DataLoader(dataset, 3))
    by_us = name == "progressive" or (name == "turned" and not turn)
    assert left_encoded(dataset) == [True, by_us, True]


@pytest.mark.parametrize("name", KINDS)
def test_files_of_all_kinds_are_what_torchcodec_makes_of_them(paths, tmp_path, name):
    dataset = Own(among(paths, KINDS[name], tmp_path), read=decoders.decode_image)
    held(DataLoader(dataset, 3))
    assert left_encoded(dataset) == [True, name == "progressive", True]


def exif_of(orientation=None, note=b"", big=False):
    """A JPEG of a camera, whose EXIF has an orientation or none, and perhaps a note."""
    exif = Image.Exif()
    exif.endian = ">" if big else "<"
    exif[0x010F] = "Maker" + note.decode("latin1")
    if orientation is not None:
        exif[0x0112] = orientation
    return encode(COLORS, "JPEG", exif=exif.tobytes())


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize(
    ("orientation", "note", "by_us"),
    [
        (None, b"", True),
        (1, b"", True),
        (6, b"", False),
        (3, b"", False),
        (1, b"\x12\x01", False),  # which may be a tag, for all that anybody knows
        (None, b"\x12\x01", False),
        (0, b"", False),
    ],
)
def test_photos_with_exif_stay_encoded_where_nothing_can_turn_them(
    paths, tmp_path, orientation, note, by_us, big
):
    data = exif_of(orientation, note[::-1] if big else note, big)
    dataset = Own(among(paths, data, tmp_path), read=decoders.decode_image)
    held(DataLoader(dataset, 3))
    assert left_encoded(dataset) == [True, by_us, True]


def test_the_prefetchers_jpegs_are_torchvisions():
    for sampling in (0, 1, 2):
        for quality in (30, 95):
            data = encode(COLORS, "JPEG", subsampling=sampling, quality=quality)
            theirs = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            assert torch.equal(theirs, gpuprefetch.images.header.decode_cpu(data))


# What reaches the transform as it is, and what is said of it.
REFUSED = {
    "gray JPEG": r"as torch\.uint8 \(1, 50, 60\), .*mode=\"RGB\".*three equal ones.*v2\.RGB\(\)",
    "gray PNG": r"as torch\.uint8 \(1, 50, 60\), and images have three channels",
    "palette": r"as torch\.uint8 \(1, 50, 60\), and images have three channels",
    "CMYK": r"as torch\.uint8 \(4, 50, 60\), and images have three channels\. Read it in RGB",
    "alpha": r"as torch\.uint8 \(4, 50, 60\), and images have three channels\. Read it in RGB",
    "gray alpha": r"as torch\.uint8 \(2, 50, 60\), and images have three channels",
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_channels_than_three_are_refused(paths, tmp_path, name):
    files = among(paths, KINDS[name], tmp_path)
    with pytest.raises(UndecodedError, match=rf"^Own\.__getitem__\(1\): .*{REFUSED[name]}"):
        list(accelerate(DataLoader(Own(files)), **CPU))
    held(DataLoader(Own(files, read=partial(decode_image, mode="RGB")), 3))  # the line to write


@pytest.mark.parametrize("name", ["gray JPEG", "gray PNG", "palette", "two levels"])
def test_one_channel_becomes_three_where_the_pipeline_makes_them(paths, tmp_path, name):
    files = among(paths, KINDS[name], tmp_path)
    for ops in (
        [v2.RGB(), PIPELINE],
        [*CROPPED, v2.RGB(), SCALED],
        [*CROPPED, v2.Grayscale(3), SCALED],
    ):
        held(DataLoader(Own(files, v2.Compose(ops)), 3))
    expanded = lambda path: decode_image(path).expand(3, -1, -1)  # noqa: E731
    held(DataLoader(Own(files[1:2], read=expanded)))


def test_one_channel_may_be_given_as_tensors(tmp_path):
    """The other line of the message, for files of one size."""
    (tmp_path / "gray.png").write_bytes(KINDS["gray PNG"])
    files = [str(tmp_path / "gray.png")] * 4
    loader = DataLoader(Own(files), 2)
    with pytest.raises(UndecodedError, match=r"transform=v2\.Identity\(\), and write DataPref"):
        accelerate(loader, **CPU)
    tensors = DataLoader(Own(files, v2.Identity()), 2)
    moved = DataPrefetcher(tensors, transforms=convert_transforms(PIPELINE), device="cpu")
    assert_same_batches(loader, moved, atol=LEVEL, rtol=0)


def test_16_bits_are_refused_with_a_line_that_works(paths, tmp_path):
    deep = Image.fromarray((np.arange(3000).reshape(50, 60) * 20).astype(np.uint16))
    files = among(paths, encode(deep, "PNG"), tmp_path)
    read = partial(decode_image, mode="RGB")
    with pytest.raises(UndecodedError, match=r"torch\.uint16 .*v2\.functional\.to_dtype\(image, "):
        list(accelerate(DataLoader(Own(files, read=read)), **CPU))

    def converted(path):
        return v2.functional.to_dtype(read(path), torch.uint8, scale=True)

    held(DataLoader(Own(files, read=converted), 3))


def test_several_pictures_of_a_file_are_refused(paths, tmp_path):
    frames = [Image.fromarray(draw(50, 60, seed=i)) for i in range(3)]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    with pytest.raises(UndecodedError, match=r"gets a torch\.Tensor of torch\.uint8 \(3, 3, 50, 6"):
        list(accelerate(DataLoader(Own(among(paths, data, tmp_path))), **CPU))


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "convert", [lambda x: x.float() / 255, lambda x: x / 255, lambda x: x.half()]
)
def test_floats_before_the_transform_are_refused_with_a_line_that_works(paths, convert):
    pipeline = v2.Compose([*CROPPED, NORMALIZE])
    loader = DataLoader(Own(paths, pipeline, lambda path: convert(decode_image(path))), 3)
    with pytest.raises(UndecodedError, match=r"as torch\.float\d\d \(3, 48, 64\)") as refused:
        accelerate(loader, **CPU)
    line = "v2.Compose([v2.ToDtype(torch.float32, scale=True), transform])"
    assert line in str(refused.value)
    written = eval(line, {"v2": v2, "torch": torch, "transform": pipeline})
    moved = accelerate(DataLoader(Own(paths, written), 3), **CPU)
    if convert(torch.ones(1)) > 0.5:
        return  # the loader of half precision has values of 0 to 255
    assert_same_batches(loader, moved, atol=5 / 255, rtol=0)


def test_tensors_that_lie_otherwise_are_refused(paths):
    def channels_last(path):
        return decode_image(path).permute(1, 2, 0)

    with pytest.raises(UndecodedError, match=r"\(48, 64, 3\), .*image\.permute\(2, 0, 1\)"):
        accelerate(DataLoader(Own(paths, read=channels_last)), **CPU)
    held(DataLoader(Own(paths, read=lambda path: channels_last(path).permute(2, 0, 1)), 3))
    elsewhere = Own(paths, read=lambda path: decode_image(path).to("meta"))
    with pytest.raises(UndecodedError, match=r"\(3, 48, 64\) on meta\. It takes .* on the CPU"):
        accelerate(DataLoader(elsewhere), **CPU)


def test_what_the_transform_gave_is_touched_by_nobody(paths):
    class Darker(Own):
        def __getitem__(self, index):
            return super().__getitem__(index)[0] / 2

    with pytest.raises(UndecodedError, match=r"what the transform gave is used .*__truediv__"):
        accelerate(DataLoader(Darker(paths)), **CPU)


ON_TENSORS = {
    "ToTensor": (v1.ToTensor(), r"^ToTensor takes PIL images .*Write v2\.ToDtype\(torch\.float32"),
    "PILToTensor": (v1.PILToTensor(), "^PILToTensor takes PIL images .*Leave it out"),
    "antialias": (v2.Resize((30, 30), antialias=False), r"Write antialias=True, which gives other"),
    "LANCZOS": (v2.Resize((30, 30), InterpolationMode.LANCZOS), r"'lanczos' is none of nearest, "),
    "ToPILImage": (v2.Compose([*CROPPED, v2.ToPILImage()]), "^ToPILImage cannot move"),
    "JPEG": (v2.Compose([*CROPPED, v2.JPEG(50)]), "^JPEG cannot move"),
}


@pytest.mark.parametrize("name", ON_TENSORS)
def test_ops_that_cannot_move_are_named(paths, name):
    op, text = ON_TENSORS[name]
    for move in (partial(accelerate, **CPU), parity):
        with pytest.raises(UnsupportedTransformError, match=text):
            move(DataLoader(Own(paths, v2.Compose([op, SCALED]))))
    instead = {"ToTensor": SCALED, "antialias": v2.Resize((30, 30), antialias=True)}
    if name in instead:
        held(DataLoader(Own(paths, v2.Compose([instead[name], v2.CenterCrop(28), SCALED])), 3))


def test_normalize_of_levels_is_an_error_as_in_torchvision(paths):
    loader = DataLoader(Own(paths, v2.Compose([*CROPPED, NORMALIZE])), 3)
    for each in (loader, accelerate(loader, **CPU)):
        with pytest.raises(TypeError, match=r"float"):
            list(each)


def test_sizes_that_differ_are_named(paths):
    for transform in (v2.Compose([SCALED]), lambda image: v2.functional.resize(image, [9, 9])):
        with pytest.raises(RuntimeError, match=r"equal size, .*keep_unknown=True"):
            list(accelerate(DataLoader(Own(paths, transform), 3), **CPU))


def by_turns(path, read=decode_image, instead=opened):
    return (read if int(Path(path).stem) % 2 else instead)(path)


def test_pictures_and_tensors_are_not_mixed(paths):
    pipeline = v2.Compose([*CROPPED, v2.ToImage(), SCALED])
    with pytest.raises(UndecodedError, match=r"\(1\): .*a torch\.Tensor, .*first .* a PIL image"):
        list(accelerate(DataLoader(Own(paths, pipeline, by_turns)), **CPU))
    others = partial(by_turns, read=opened, instead=decode_image)
    with pytest.raises(UndecodedError, match=r"\(1\): .*a PIL image .*first .* a torch\.Tensor"):
        list(accelerate(DataLoader(Own(paths, pipeline, others)), **CPU))
    typed = partial(by_turns, instead=lambda path: tv_tensors.Image(decode_image(path)))
    with pytest.raises(UndecodedError, match=r"a torch\.Tensor, .*first .* a torchvision\.Image"):
        list(accelerate(DataLoader(Own(paths, read=typed)), **CPU))
    written = v2.Compose([v2.ToImage(), PIPELINE])  # the line of the message
    for read in (by_turns, others, typed, partial(by_turns, instead=as_array)):
        held(DataLoader(Own(paths, written, read), 3))


def as_array(path):
    return np.array(opened(path))


def test_a_dataset_that_gives_images_without_its_transform_is_refused(paths):
    class Bare(Own):
        def __getitem__(self, index):
            return self.read(self.paths[0]), index

    with pytest.raises(UndecodedError, match="gave an image that is transformed already"):
        accelerate(DataLoader(Bare(paths)), **CPU)


# --- bad files ------------------------------------------------------------------------------------

BAD = {
    "empty": b"",
    "text": b"no picture at all",
    "zeros": bytes(5000),
    "truncated": encode(COLORS, "JPEG")[:900],
    "header alone": encode(COLORS, "JPEG")[:300],
    "truncated PNG": encode(COLORS, "PNG")[:900],
    "BMP": encode(COLORS, "BMP"),  # which torchvision does not read
}


@pytest.mark.parametrize(
    ("read", "workers"), [(decode_image, 0), (decode_image, 1), (decoders.decode_image, 0)]
)
@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_errors_or_left_out(paths, tmp_path, name, read, workers):
    files = among(paths, BAD[name], tmp_path, "bad.jpg")
    loader = DataLoader(Own(files, read=read), 3, num_workers=workers)
    with pytest.raises(BadImageError, match=r"bad\.jpg"):
        list(accelerate(loader, **CPU))
    skipping = accelerate(loader, **CPU, on_error="skip")
    ((images, labels),) = skipping
    assert labels.tolist() == [0, 2] and len(images) == 2
    assert [Path(bad.path).name for bad in skipping.bad_images] == ["bad.jpg"]
    replacing = accelerate(loader, **CPU, on_error="replace")
    assert len(next(iter(replacing))[0]) == 3


def test_a_folder_in_the_place_of_a_file_is_bad(paths, tmp_path):
    for read in (decode_image, decoders.decode_image):
        loader = DataLoader(Own([paths[0], str(tmp_path)], read=read))
        with pytest.raises(BadImageError, match="it is a folder"):
            list(accelerate(loader, **CPU))


def test_a_file_that_is_not_there_is_torchvisions_error(paths):
    for files in (["nowhere.jpg", *paths], [*paths, "nowhere.jpg"]):
        with pytest.raises(RuntimeError, match=r"No such file or directory: 'nowhere\.jpg'"):
            list(accelerate(DataLoader(Own(files)), **CPU))
        with pytest.raises(FileNotFoundError, match=r"nowhere\.jpg"):
            list(accelerate(DataLoader(Own(files, read=decoders.decode_image)), **CPU))


def test_a_buffer_that_holds_no_image_and_then_one_is_read_again(paths):
    """What was said of the same tensor before is not said of it now."""

    def read(path):
        data = torch.zeros(len(Path(path).read_bytes()), dtype=torch.uint8)
        with contextlib.suppress(ValueError, RuntimeError):
            decoders.decode_image(data)
        data.copy_(torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8))
        return decoders.decode_image(data)

    held(DataLoader(Own(paths, read=read), 3))


def test_a_bad_file_that_the_dataset_changes_is_torchvisions_error(paths, tmp_path):
    files = among(paths, BAD["truncated"], tmp_path)
    loader = DataLoader(Own(files, read=lambda path: decode_image(path).flip(-1)))
    with pytest.raises(RuntimeError, match="incomplete or truncated"):
        list(accelerate(loader, **CPU))


def test_a_decoder_for_other_files_refuses_a_jpeg(paths):
    loader = DataLoader(Own(paths, read=lambda path: decode_png(read_file(path))))
    with pytest.raises(BadImageError, match="Content is not png"):
        list(accelerate(loader, **CPU))


def test_truncated_files_are_bad_whatever_pillow_is_told(paths, tmp_path, monkeypatch):
    monkeypatch.setattr("PIL.ImageFile.LOAD_TRUNCATED_IMAGES", True)
    files = among(paths, encode(COLORS, "JPEG")[:-200], tmp_path)
    with pytest.raises(BadImageError, match=r"torchvision\.io cannot decode it: Image is incomp"):
        list(accelerate(DataLoader(Own(files)), **CPU))
    with pytest.raises(BadImageError, match=r"TorchCodec cannot decode it: "):
        list(accelerate(DataLoader(Own(files, read=decoders.decode_image)), **CPU))


def test_wrong_arguments_are_torchvisions_errors(paths):
    for data in (torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(9)):
        loader = DataLoader(Own(paths, read=lambda path, data=data: decode_image(data)))
        with pytest.raises(RuntimeError, match=r"Expected a"):
            accelerate(loader, **CPU)


# --- images that a dataset keeps ------------------------------------------------------------------


class Keeping(Own):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.kept = {}

    def __getitem__(self, index):
        if index not in self.kept:
            self.kept[index] = self.read(self.paths[index])
        return self.transform(self.kept[index]), index


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("before", [False, True])
def test_a_dataset_may_keep_its_images(paths, workers, before):
    plain = list(DataLoader(Own(paths), 3))
    dataset = Keeping(paths)
    if before:
        list(DataLoader(dataset, 3))
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    moved = accelerate(DataLoader(dataset, 3, **options), **CPU)
    for _ in range(2):
        assert_same_batches(plain, moved, atol=LEVEL, rtol=0)
    assert_same_batches(plain, DataLoader(dataset, 3), atol=0)
    assert_same_batches(plain, accelerate(DataLoader(dataset, 3), **CPU), atol=LEVEL, rtol=0)


def test_an_image_that_is_kept_is_its_pixels(paths):
    kept = []

    def read(path):
        kept.append(decode_image(path))
        return kept[-1]

    list(accelerate(DataLoader(Own(paths, read=read), 3), **CPU))
    image = kept[-1]
    real = decode_image(paths[-1])
    assert torch.equal(image, real) and torch.equal(torch.stack([image, image])[1], real)
    assert torch.equal(default_collate([image])[0], real)
    assert np.array_equal(np.asarray(image), real.numpy())
    assert repr(image) == repr(real) and image.tolist() == real.tolist()
    for copied in (copy.copy(image), copy.deepcopy(image), pickle.loads(pickle.dumps(image))):
        assert type(copied) is torch.Tensor and torch.equal(copied, real)
    assert torch.equal(v2.Resize(20)(image), v2.Resize(20)(real))
    assert tv_tensors.Image(image).sum() == real.sum()
    image[:] = 0
    assert image.max() == 0 and torch.equal(PIPELINE(image), torch.zeros(3, 32, 32))


def send_sum(queue, image):
    queue.put(int(image.sum()))


@pytest.mark.forks("another process gets the image that this one keeps")
def test_an_image_that_is_kept_goes_to_other_processes(paths):
    kept = []
    read = lambda path: kept.append(decode_image(path)) or kept[-1]  # noqa: E731
    list(accelerate(DataLoader(Own(paths[:1], read=read)), **CPU))
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=send_sum, args=(queue, kept[0]))
    process.start()
    assert queue.get() == int(decode_image(paths[0]).sum())
    process.join()


class Once(Keeping):
    """Darkens an image that it keeps, the first time."""

    def __getitem__(self, index):
        if index not in self.kept:
            self.kept[index] = self.read(self.paths[index])
            self.kept[index] //= 2
        return self.transform(self.kept[index]), index


def test_a_trial_leaves_no_trace_in_kept_images(paths):
    plain = list(DataLoader(Once(paths), 3))
    dataset = Once(paths)
    explain(DataLoader(dataset, 3))
    assert not dataset.kept
    assert_same_batches(plain, accelerate(DataLoader(dataset, 3), **CPU), atol=LEVEL, rtol=0)

    class EachTime(Keeping):
        def __getitem__(self, index):
            self.kept[index] //= 2
            return self.transform(self.kept[index]), index

    darker = EachTime(paths)
    list(accelerate(DataLoader(filled := Keeping(paths), 3), **CPU))
    darker.kept = filled.kept
    accelerate(DataLoader(darker, 3), **CPU)
    assert torch.equal(darker.kept[0] + 0, decode_image(paths[0]))


# --- torch.ops.image ------------------------------------------------------------------------------


def operators():
    in_torchcodec = [getattr(decoders._image_decoders, name) for name in TORCHCODECS]
    return [getattr(torch.ops.image, name) for name in OPERATORS] + in_torchcodec


def test_the_operators_are_as_before_whatever_happens(paths):
    before = operators()
    seen = []

    def failing(path):
        seen.append(torch.ops.image.decode_image is before[1])
        if path == paths[3]:
            raise KeyError("no")
        return decode_image(path)

    with pytest.raises(KeyError, match="no"):
        list(accelerate(DataLoader(Own(paths, read=failing), 3), **CPU))
    assert operators() == before and not any(seen)
    assert torch.ops.image.decode_image.default is before[1].default
    with pytest.raises(KeyboardInterrupt):
        accelerate(DataLoader(Own(paths, read=interrupted)), **CPU)
    assert operators() == before
    assert type(decode_image(paths[0])) is torch.Tensor


def interrupted(path):
    raise KeyboardInterrupt


def test_other_threads_read_pixels(paths):
    kinds = []
    stop = threading.Event()

    def reads():
        while not stop.is_set():
            kinds.append(type(decode_image(paths[0])))
            kinds.append(type(decode_png(read_file(png))))
            kinds.append(type(decoders.decode_image(paths[0])))

    png = str(Path(paths[0]).parents[2] / "thread.png")
    Path(png).write_bytes(KINDS["PNG"])
    threads = [threading.Thread(target=reads) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            list(accelerate(DataLoader(Own(paths), 2), **CPU))
            list(accelerate(DataLoader(Own(paths, read=decoders.decode_image), 2), **CPU))
        held_in_two_threads(paths)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert {*kinds} == {torch.Tensor}
    assert not any(type(each).__module__.startswith("gpuprefetch") for each in operators())


def held_in_two_threads(paths):
    """Two loaders are read by two threads at once."""
    plain = list(DataLoader(Own(paths), 2))
    loaders = [accelerate(DataLoader(Own(paths), 2), **CPU) for _ in range(2)]
    made = {}
    threads = [
        threading.Thread(target=lambda n=n, each=each: made.update({n: list(each)}))
        for n, each in enumerate(loaders)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for batches in made.values():
        assert_same_batches(plain, batches, atol=LEVEL, rtol=0)
    assert len(made) == 2


def test_what_another_thread_has_read_is_handed_on(paths):
    def elsewhere(path):
        made = []
        thread = threading.Thread(target=lambda: made.append(decode_image(path)))
        thread.start()
        thread.join()
        return made[0]

    held(DataLoader(Own(paths, read=elsewhere), 3))


def test_an_epoch_resumes(paths):
    pipeline = v2.Compose([v2.RandomResizedCrop(24), v2.RandomHorizontalFlip(), SCALED])

    def loader():
        return accelerate(DataLoader(Own(paths, pipeline), 2), **CPU, seed=3)

    first = loader()
    batches = iter(first)
    next(batches)
    state = first.state_dict()
    rest = list(batches)
    again = loader()
    again.load_state_dict(state)
    assert_same_batches(rest, list(again), atol=0)


def test_both_kinds_of_stand_ins_in_a_sample(paths):
    """A mask that PIL reads beside an image that torchvision reads."""

    class Both(Own):
        def __getitem__(self, index):
            image = self.read(self.paths[index])
            with Image.open(self.paths[index]) as mask:
                levels = torch.from_numpy(np.array(mask.convert("L").resize((9, 9))))
            return self.transform(image), levels

    held(DataLoader(Both(paths), 3))


class Asking(Own):
    """Its collate function reads images, too, and says whether these are tensors."""

    def __getitem__(self, index):
        return *super().__getitem__(index), index

    def ask(self, batch):
        images = [decode_image(self.paths[0]), decoders.decode_image(self.paths[0])]
        are_tensors = all(type(image) is torch.Tensor for image in images)
        return default_collate(batch), are_tensors


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_worker_reads_between_samples_is_the_librarys(paths, workers):
    dataset = Asking(paths)
    loader = DataLoader(dataset, 3, num_workers=workers, collate_fn=dataset.ask)
    for (images, _, numbers), are_tensors in accelerate(loader, **CPU):
        assert are_tensors
        want = torch.stack([dataset[i][0] for i in numbers])
        torch.testing.assert_close(images, want, atol=LEVEL, rtol=0)


# --- datasets that catch errors -------------------------------------------------------------------


def by_trial(path):
    """PNG, else JPEG."""
    data = read_file(path)
    try:
        return decode_png(data)
    except RuntimeError:
        return decode_jpeg(data)


def or_by_pil(path):
    try:
        return decode_image(path)
    except RuntimeError:
        with Image.open(path) as picture:
            return v2.functional.pil_to_tensor(picture.convert("RGB"))


class Retrying(Own):
    """Goes on with the next sample whatever is wrong with one."""

    def __getitem__(self, index):
        while True:
            try:
                return self.transform(self.read(self.paths[index])), index
            except:  # noqa: E722
                index = (index + 1) % len(self.paths)


class RetryingSome(Retrying):
    def __getitem__(self, index):
        while True:
            try:
                return self.transform(self.read(self.paths[index])), index
            except Exception:
                index = (index + 1) % len(self.paths)


class Checking(Own):
    """Says beside an image whether another file is one."""

    def __init__(self, paths, other, read):
        super().__init__(paths, read=read)
        self.other = other

    def __getitem__(self, index):
        image, _ = super().__getitem__(index)
        try:
            self.read(self.other if index % 2 else self.paths[index])
        except (RuntimeError, ValueError):
            return image, False
        return image, True


@pytest.mark.parametrize("read", [decode_image, opened])
@pytest.mark.parametrize("kind", [Retrying, RetryingSome])
def test_a_dataset_that_tries_again_whatever_is_raised_moves(paths, kind, read):
    pipeline = v2.Compose([v2.ToImage(), PIPELINE])
    held(DataLoader(kind(paths, pipeline, read), 3))


def test_a_dataset_that_never_ends_trying_is_refused(paths):
    dataset = RetryingSome(paths, read=lambda path: decode_image(path) / 255)
    with pytest.raises(
        UndecodedError, match=r"RetryingSome\.__getitem__\(0\): .* images are uint8"
    ):
        accelerate(DataLoader(dataset, 3), **CPU)


@pytest.mark.parametrize("read", [decode_image, decoders.decode_image])
@pytest.mark.parametrize("name", BAD)
def test_a_dataset_that_checks_files_sees_which_are_bad(paths, tmp_path, name, read):
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(BAD[name])
    dataset = Checking(paths, str(bad), read)
    loader = DataLoader(dataset, 4)
    assert [valid for _, valid in dataset] == [True, False] * (COUNT // 2)
    for on_error in ("raise", "skip"):
        moved = accelerate(loader, **CPU, on_error=on_error)
        assert_same_batches(loader, moved, atol=LEVEL, rtol=0)
        assert not moved.bad_images


@pytest.mark.parametrize("read", [by_trial, or_by_pil])
def test_a_dataset_that_reads_bad_files_in_another_way_moves(paths, tmp_path, read):
    for name in ("PNG", "two levels"):
        (tmp_path / f"{name}.png").write_bytes(encode(COLORS, "PNG"))
    (tmp_path / "a.bmp").write_bytes(BAD["BMP"])
    files = [paths[0], str(tmp_path / "PNG.png"), paths[1]]
    files += [str(tmp_path / "a.bmp")] * (read is or_by_pil)
    for on_error in ("raise", "skip"):
        moved = held(DataLoader(Own(files, read=read), 2), on_error=on_error)
        assert not moved.bad_images


def test_a_mask_that_is_broken_may_be_replaced(paths, tmp_path):
    class Masks(Own):
        def __getitem__(self, index):
            try:
                mask = tv_tensors.Mask(decode_image(self.masks[index]))
            except RuntimeError:
                mask = tv_tensors.Mask(torch.zeros(1, 5, 5, dtype=torch.uint8))
            return super().__getitem__(index)[0], mask[:, :5, :5].as_subclass(torch.Tensor)

    dataset = Masks(paths[:3])
    dataset.masks = among(paths, BAD["truncated"], tmp_path)
    for name, data in {"m.png": KINDS["gray PNG"], "n.png": BAD["truncated PNG"]}.items():
        (tmp_path / name).write_bytes(data)
    dataset.masks = [str(tmp_path / name) for name in ("m.png", "n.png", "m.png")]
    held(DataLoader(dataset, 3))


def test_a_handler_sees_no_error_of_a_trial(paths):
    seen = []

    class Noting(Own):
        def __getitem__(self, index):
            try:
                return super().__getitem__(index)
            except:
                seen.append(index)
                raise

    for read in (decode_image, opened):
        pipeline = v2.Compose([v2.ToImage(), PIPELINE])
        held(DataLoader(Noting(paths, pipeline, read), 3))
    assert not seen


# --- joint transforms of pure tensors -------------------------------------------------------------

TYPED = {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}


class Jointly(Own):
    """Its transform gets a mask, too."""

    def __init__(self, paths, transforms, mask=tv_tensors.Mask, image=decode_image):
        super().__init__(paths)
        self.transform = None
        self.transforms = transforms
        self.mask = mask
        self.image = image

    def __getitem__(self, index):
        image = self.image(self.paths[index])
        mask = self.mask(torch.full((1, *image.shape[-2:]), index, dtype=torch.uint8))
        return self.transforms(image, mask)


@pytest.mark.parametrize(
    ("pipeline", "mask", "why"),
    [
        (v2.Compose([*CROPPED, v2.ToDtype(TYPED, scale=True)]), tv_tensors.Mask, "uint8"),
        (PIPELINE, tv_tensors.Image, "uint8"),
        (
            v2.Compose(
                [
                    *CROPPED,
                    v2.ToDtype(
                        {torch.Tensor: torch.float32, tv_tensors.Mask: torch.int64}, scale=True
                    ),
                ]
            ),
            tv_tensors.Mask,
            "KeyError",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Got `dtype` values for `torch.Tensor`:UserWarning")
@pytest.mark.filterwarnings("ignore:scale was set to True but no dtype:UserWarning")
def test_what_v2_does_to_pure_tensors_alone_is_refused(paths, pipeline, mask, why):
    loader = DataLoader(Jointly(paths, pipeline, mask), 3, num_workers=1)
    with pytest.raises(UnsupportedTransformError, match=why):
        accelerate(loader, **CPU)


@pytest.mark.filterwarnings("ignore:scale was set to True but no dtype:UserWarning")
def test_the_advice_for_pure_tensors_works(paths):
    pipeline = v2.Compose([*CROPPED, v2.ToDtype(TYPED, scale=True)])
    with pytest.raises(UnsupportedTransformError, match=r"tv_tensors\.Image\(image\)"):
        accelerate(DataLoader(Jointly(paths, pipeline), 3, num_workers=1), **CPU)
    typed = Jointly(paths, pipeline, image=lambda path: tv_tensors.Image(decode_image(path)))
    loader = DataLoader(typed, 3, num_workers=1)
    moved = accelerate(loader, **CPU)
    for (old, old_mask), (new, new_mask) in zip(loader, moved, strict=True):
        torch.testing.assert_close(new, old.as_subclass(torch.Tensor), atol=LEVEL, rtol=0)
        assert torch.equal(old_mask, new_mask)


class OfDetection(Jointly):
    """As in torchvision's tutorial for detection."""

    def __getitem__(self, index):
        image = self.image(self.paths[index])
        size = tuple(image.shape[-2:])
        target = {
            "boxes": tv_tensors.BoundingBoxes([[1, 2, 20, 30]], format="XYXY", canvas_size=size),
            "masks": tv_tensors.Mask(torch.full((1, *size), index, dtype=torch.uint8)),
            "labels": torch.tensor([index]),
        }
        return self.transforms(image, target)


def image_of(path, wrap=tv_tensors.Image):
    return wrap(read_image(path, mode="RGB"))


WRAPS = {
    "Image": image_of,
    "wrap": partial(image_of, wrap=partial(tv_tensors.wrap, like=tv_tensors.Image([[[0]]]))),
}


@pytest.mark.parametrize("name", WRAPS)
def test_images_of_torchvisions_kind_are_decoded_in_workers_and_the_advice_is_not(paths, name):
    typed = {tv_tensors.Image: torch.float32, "others": None}
    after = [v2.ToDtype(typed, scale=True), v2.ToPureTensor()]
    flipped = v2.Compose([v2.RandomHorizontalFlip(1.0), v2.Resize((40, 40)), *after])
    cropped = v2.Compose([*CROPPED, *after])
    for kind, pipeline, options in (
        (OfDetection, flipped, {"image": WRAPS[name]}),
        (Own, cropped, {"read": WRAPS[name]}),
    ):
        wrapped = DataLoader(kind(paths, pipeline, **options), 3, num_workers=1)
        written = v2.Compose([v2.ToImage(), pipeline])
        options = dict.fromkeys(options, partial(read_image, mode="RGB"))
        plain = DataLoader(kind(paths, written, **options), 3, num_workers=1)
        for loader in (wrapped, plain):
            moved = accelerate(loader, **CPU)
            assert ("decode by the dataset" in moved.describe()) == (loader is wrapped)
            for old, new in zip(wrapped, moved, strict=True):
                torch.testing.assert_close([*new], [*old], atol=LEVEL, rtol=0)


# --- what else tensors bring ----------------------------------------------------------------------


def test_a_folder_may_read_tensors_within_a_dataset(folder):
    class Parts(Dataset):
        def __init__(self, part):
            self.part = part
            self.transform = PIPELINE

        def __len__(self):
            return len(self.part)

        def __getitem__(self, index):
            image, label = self.part[index]
            return self.transform(image), label

    held(DataLoader(Parts(Subset(ImageFolder(folder, loader=decode_image), [4, 1, 2])), 2))


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_pipeline_runs_as_it_is(paths):
    ops = torch.nn.Sequential(
        v1.Resize((32, 40), antialias=True), v1.ConvertImageDtype(torch.float32)
    )
    scripted = torch.jit.script(ops)
    loader = DataLoader(Own(paths, scripted), 3)
    with pytest.raises(Exception, match=r"one size|different sizes"):
        list(accelerate(loader, **CPU))
    assert "RecursiveScriptModule" in str(explain(loader))


def test_the_two_ways_of_a_refusal_fit_tensors(folder, paths):
    halved = Own(paths, read=lambda path: decode_image(path) / 2)
    with pytest.raises(UndecodedError, match=r"v2\.Compose\(\[v2\.ToImage\(\), transform\]\)"):
        accelerate(DataLoader(halved, 3), **CPU)
    again = v2.Compose([v2.ToImage(), PIPELINE])
    held(DataLoader(Subset(ImageFolder(folder, again, loader=decode_image), [1, 2]), 2))


class Reusing(Jointly):
    """Uses one mask, one array and one dictionary for all samples."""

    copies = False

    def __getitem__(self, index):
        image = self.image(self.paths[index])
        self.seen["mask"][:] = index
        self.seen["array"][:] = index
        self.seen["id"] = index
        return self.transforms(image, copy.deepcopy(self.seen) if self.copies else self.seen)


@pytest.mark.parametrize("only", ["mask", "array", "id"])
def test_what_is_changed_beside_an_image_after_the_call_is_refused(paths, only):
    class One(Reusing):
        def __getitem__(self, index):
            kept = {**self.seen}
            made = super().__getitem__(index)
            if only == "id":
                self.seen["id"] = -1
            else:
                self.seen = {**kept, only: kept[only].clone() if only == "mask" else kept[only] + 0}
                self.seen[only][:] = 9
                kept[only][:] = 8
            return made

    dataset = with_things_beside(One, paths)
    with pytest.raises(ValueError, match=r"was changed after .*copy\.deepcopy\(target\)"):
        list(accelerate(DataLoader(dataset, 5, num_workers=1), **CPU))


def with_things_beside(kind, paths, read=decode_image):
    dataset = kind(paths[:1] * 5, v2.Compose([v2.ToImage(), PIPELINE]), image=read)
    mask = tv_tensors.Mask(torch.zeros(1, 48, 64, dtype=torch.uint8))
    dataset.seen = {"mask": mask, "array": np.zeros(2), "id": 0}
    return dataset


@pytest.mark.parametrize("read", [decode_image, opened])
def test_what_is_used_again_beside_images_is_refused_and_the_advice_works(paths, read):
    dataset = with_things_beside(Reusing, paths, read)
    loader = DataLoader(dataset, 5, num_workers=1)
    with pytest.raises(ValueError, match=r"was changed after .*copy\.deepcopy\(target\)"):
        list(accelerate(loader, **CPU))
    dataset.copies = True
    ((_, old),) = loader
    ((_, new),) = accelerate(loader, **CPU)
    assert old["mask"].amax((1, 2, 3)).tolist() == [0, 1, 2, 3, 4]
    torch.testing.assert_close(new, old, rtol=0, atol=0)


def test_a_transform_may_change_what_the_dataset_gives_itself(paths):
    class Changing:
        def __call__(self, image, target):
            target["boxes"].mul_(2)
            target["ids"] = target["ids"] + 1
            return PIPELINE(image), target

    class Targets(Own):
        def __getitem__(self, index):
            target = {"boxes": torch.full((2, 4), float(index)), "ids": torch.tensor([index])}
            image, _ = self.transforms(decode_image(self.paths[index]), target)
            return image, target

    dataset = Targets(paths)
    dataset.transform = None
    dataset.transforms = Changing()
    loader = DataLoader(dataset, 3, num_workers=1)
    for old, new in zip(loader, accelerate(loader, **CPU), strict=True):
        torch.testing.assert_close(new, old, atol=LEVEL, rtol=0)


# --- errors that a dataset does not catch ---------------------------------------------------------


class Sizes(Own):
    """Reads a second file for its size alone, and counts."""

    others = ()
    count = 0

    def __getitem__(self, index):
        self.count += 1
        image, _ = super().__getitem__(index)
        other = self.read(self.others[index])
        return image, other.shape[1], self.count


@pytest.mark.parametrize("name", ["text", "truncated", "truncated PNG", "empty"])
def test_a_bad_file_whose_pixels_nobody_gets_is_the_librarys_error(paths, tmp_path, name):
    dataset = Sizes(paths[:3])
    dataset.others = among(paths, BAD[name], tmp_path)
    for on_error in ("raise", "skip"):
        with pytest.raises(RuntimeError) as raised:
            list(accelerate(DataLoader(dataset, 3), **CPU, on_error=on_error))
        assert not isinstance(raised.value, BadImageError)
    with pytest.raises(RuntimeError):
        list(DataLoader(dataset, 3))


@pytest.mark.parametrize("name", ["text", "truncated PNG", "empty"])
def test_a_sample_whose_dataset_catches_an_error_is_read_once(paths, tmp_path, name):
    class Counting(Own):
        count = 0

        def __getitem__(self, index):
            self.count += 1
            try:
                image = decode_image(self.paths[index])
            except RuntimeError:
                image = torch.zeros(3, 40, 40, dtype=torch.uint8)
            return self.transform(image), self.count

    files = among(paths, BAD[name], tmp_path) + paths
    old = list(DataLoader(Counting(files), 4))
    new = list(accelerate(DataLoader(Counting(files), 4), **CPU))
    assert_same_batches(old, new, atol=LEVEL, rtol=0)
    assert torch.cat([counts for _, counts in new]).tolist() == [*range(1, len(files) + 1)]


@pytest.mark.parametrize("where", ["try", "with", "finally", "nothing", "called"])
def test_what_may_be_caught(where):
    def ask():
        return may_be_caught(outermost)

    def within():
        if where == "with":
            with contextlib.suppress(KeyError):
                return ask()
        if where == "try":
            try:
                return ask()
            except KeyError:
                return None
        if where == "finally":
            try:
                return ask()
            finally:
                str(where)
        return ask()

    def around():
        try:
            return inner()
        except KeyError:
            return None

    def inner():
        return ask()

    outermost = sys._getframe().f_code
    assert (around() if where == "called" else within()) == (where != "nothing")
