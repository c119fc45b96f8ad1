"""Encoded images travel from the dataset to the batch unchanged, and come out as PIL's pixels."""

import copy
import gc
import io
import multiprocessing
import os
import pickle
import re
import socket
import struct
import time
import traceback
from collections import deque
from functools import partial
from itertools import chain, combinations
from pathlib import Path

import kornia.augmentation as K
import numpy as np
import pictures
import pytest
import torch
from conftest import draw_photo
from fakes import loader_of, numbered, prefetcher_of, until
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngImageFile
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from gpuprefetch import (
    BadImageError,
    CenterCrop,
    DataPrefetcher,
    EncodedImage,
    EncodedImageFolder,
    EncodedImages,
    RandomResizedCrop,
    Resize,
    accelerate,
    preprocess,
)
from gpuprefetch.images import folder, header, slab
from gpuprefetch.images.division import Share
from gpuprefetch.images.folder import read_image
from gpuprefetch.images.header import decode_cpu
from gpuprefetch.images.packer import Packer, Packing
from gpuprefetch.images.samples import Origin
from gpuprefetch.images.share import usable_cores
from gpuprefetch.lists.walk import read_for_tensors
from gpuprefetch.transforms.launch import resample
from gpuprefetch.transforms.reference import resample_uint8

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Share of values that may differ from the CPU decoder's by more than 3 levels: the IDCT and the
# chroma upsampling of the GPU's decoder differ (torchcodec's own test allows the same).
GPU_SHARE, GPU_LEVELS = 0.01, 3


small = partial(prefetcher_of, transforms=[Resize((16, 16))])


def files_of(folder):
    return [image for image, _ in EncodedImageFolder(folder)]


def read(file, exif=False):
    """What PIL and torchvision make of a file."""
    picture = Image.open(file)
    return (ImageOps.exif_transpose(picture) if exif else picture).convert("RGB")


def assert_pixels(got, picture, device):
    """Equal to the CPU decoder's pixels, or within what the GPU's decoder may differ."""
    got, want = got.cpu().float(), F.pil_to_tensor(picture).float()
    assert got.shape == want.shape
    off = (got - want).abs()
    if device.type == "cpu":
        assert off.max() == 0
    else:
        assert (off > GPU_LEVELS).float().mean() <= GPU_SHARE


def test_folder_has_torchvisions_rules(photo_folder):
    ours, theirs = EncodedImageFolder(photo_folder), ImageFolder(photo_folder)
    for name in ("classes", "class_to_idx", "samples", "targets", "extensions"):
        assert getattr(ours, name) == getattr(theirs, name)
    image, target = ours[5]
    assert (image.index, image.path, target) == (5, *theirs.samples[5])
    assert Image.open(io.BytesIO(image.data)).size == theirs[5][0].size
    assert ours[-1][0].index == len(ours) - 1
    assert EncodedImageFolder(photo_folder, target_transform=str)[0][1] == "0"


@pytest.mark.parametrize(
    "data", [bytearray(b"abc"), memoryview(b"a-b-c-")[::2], memoryview(b"abc").cast("B", (3, 1))]
)
def test_default_collate_packs_bytes(data):
    batch, target = default_collate(
        [(EncodedImage(data, 4, "a.jpg"), 1), (EncodedImage(b"defgh", 7), 2)]
    )
    assert isinstance(batch, EncodedImages)
    assert target.tolist() == [1, 2]
    assert [bytes(batch[i].data) for i in range(2)] == [b"abc", b"defgh"]
    assert [(batch[i].index, batch[i].path) for i in range(2)] == [(4, "a.jpg"), (7, "")]


@pytest.mark.parametrize(
    "view", [lambda buffer: buffer, memoryview, partial(np.frombuffer, dtype=np.uint8)]
)
def test_a_buffer_may_be_filled_again(view):
    image = EncodedImage(view(buffer := bytearray(b"abc")))
    buffer[:] = b"xyz"
    assert image.data == b"abc"


@pytest.mark.parametrize("data", [torch.tensor([97, 98, 99]).byte(), np.full(3, 97, "u1")])
def test_encoded_images_are_copied_and_pickled(data):
    image = EncodedImage(data, 4, "a.jpg")
    for again in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        copied = again(image)
        assert type(copied) is type(image)
        assert (copied, copied._made) == (image, image._made)
    assert EncodedImage(data, 4, Path("a.jpg")) == image


def test_an_index_is_an_integer_of_64_bits():
    for index in (-(2**63), np.uint8(3), torch.tensor(4), 2**63 - 1):
        assert EncodedImage(b"", index).index == index


ANY_SIZE = r"(?m)stack expects each tensor to be equal size, but got .* v2\.CenterCrop\(224\)"
JITTER = [K.ColorJitter(0.1)]

# What is done with a folder of photos, the error, and what it says.
REFUSED = {
    **{
        f"data: {data!r}"[:30]: (
            lambda folder, data=data: EncodedImage(data),
            TypeError,
            "file's bytes",
        )
        for data in ("text", 3, torch.zeros(2, 2, dtype=torch.uint8), np.zeros(3))
    },
    **{
        f"index {index}": (
            lambda folder, index=index: EncodedImage(b"", index),
            ValueError,
            f"an int64.* got {index}",
        )
        for index in (-(2**63) - 1, 2**63)
    },
    **{
        f"index {index!r}": (
            lambda folder, index=index: EncodedImage(b"", index),
            TypeError,
            r"number of the sample in its dataset.* got",
        )
        for index in (None, "3", 1.5, [1])
    },
    "a folder without classes": (
        lambda folder: EncodedImageFolder(folder / "class0"),
        FileNotFoundError,
        r"takes root/class/.*without classes write",
    ),
    "no folder": (
        lambda folder: EncodedImageFolder("missing"),
        FileNotFoundError,
        r"'missing'\. EncodedImageFolder takes",
    ),
    "a folder with a transform": (
        lambda folder: EncodedImageFolder(folder, v2.Resize(8)),
        TypeError,
        r"transforms=\[...\]\), or pass the loader",
    ),
    "images of any size": (
        lambda folder: list(prefetcher_of(EncodedImageFolder(folder), transforms=JITTER)),
        RuntimeError,
        ANY_SIZE,
    ),
    "images of any size, of a stream": (  # not known before the first batch
        lambda folder: next(
            iter(prefetcher_of(Shards(EncodedImageFolder(folder)), transforms=JITTER))
        ),
        RuntimeError,
        ANY_SIZE,
    ),
    "a dtype for the pixels": (
        lambda folder: prefetcher_of(EncodedImageFolder(folder), dtype=torch.float16),
        ValueError,
        r"an empty list .* dtype and memory_format need",
    ),
    "an order for the pixels": (
        lambda folder: prefetcher_of(EncodedImageFolder(folder), memory_format=torch.channels_last),
        ValueError,
        r"an empty list .* dtype and memory_format need",
    ),
    "pixels before they are decoded": (
        lambda folder: next(iter(loader_of(EncodedImageFolder(folder))))[0].to("cpu"),
        AttributeError,
        r"'to': its images are not decoded.*DataPrefetcher",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_when_it_is_built_says_why(photo_folder, case):
    build, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        build(photo_folder)


@pytest.mark.parametrize("exif", [False, True])
def test_decoded_pixels_are_pils(photo_folder, device, exif):
    dataset = EncodedImageFolder(photo_folder)
    batches = [*prefetcher_of(dataset, device, apply_exif=exif, cpu_share=0.0)]
    assert torch.cat([target for _, target in batches]).tolist() == dataset.targets
    decoded = [image for images, _ in batches for image in images]
    for image, (path, _) in zip(decoded, dataset.samples, strict=True):
        assert_pixels(image, read(path, exif), device)


@pytest.mark.parametrize(
    ("exif", "share", "layout"),
    [
        (True, 0.0, torch.channels_last),
        (True, 0.5, torch.contiguous_format),
        (False, 0.5, torch.channels_last),
        (False, 1.0, torch.contiguous_format),
    ],
)
def test_validation_pixels_are_torchvisions(photo_folder, device, exif, share, layout):
    dataset = EncodedImageFolder(photo_folder)
    prefetcher = prefetcher_of(
        dataset,
        device,
        transforms=[Resize(56), CenterCrop((48, 52)), K.Normalize(MEAN, STD)],
        memory_format=layout,
        apply_exif=exif,
        cpu_share=share,
    )
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    results = []
    for images, _ in prefetcher:
        assert images.is_contiguous(memory_format=layout)
        results += images.cpu().unbind()
    for got, (path, _) in zip(results, dataset.samples, strict=True):
        picture = read(path, exif)
        want = F.pil_to_tensor(F.center_crop(F.resize(picture, [56]), [48, 52])).float()
        off = ((got * std + mean) * 255 - want).abs()
        # PIL rounds to whole levels after each of its two passes, and we once or never: 1.5 levels
        # at most; the GPU's decoder adds its own 3.
        assert off.mean() <= (0.5 if device.type == "cpu" else 1.0)
        assert off.max() <= 1.5 or device.type == "cuda"


def packed(files, transforms, *, share=0.0, least=0, on_gpu=True, exif=False):
    """A batch as a worker prepares it."""
    head = read_for_tensors(transforms).head
    shared = Share.in_memory(share)
    shared[1] = least
    return Packing(Packer((head,), on_gpu, exif, Origin(7), shared))(files)


def sampled(picture, row, size):
    """What the GPU makes of a picture, in levels."""
    return resample([picture], row[None], size, dtype=torch.float64)[0] * 255


@pytest.mark.parametrize(
    ("exif", "size"), [(True, (32, 34)), (True, (40, 48)), (False, (150, 160))]
)
def test_what_workers_ship_for_the_gpu_reads_the_same(photo_folder, exif, size):
    files = files_of(photo_folder)
    transforms = [RandomResizedCrop(size, scale=(0.2, 1.0)), K.RandomHorizontalFlip()]
    whole, shipped = (packed(files, transforms, share=share, exif=exif) for share in (0.0, 1.0))
    assert shipped.decoded.all()
    assert not whole.decoded.all()
    # Crops of up to four times the result's pixels are left to the GPU to resample.
    assert (shipped.stored.sizes.prod(axis=1) <= 4 * np.prod(size)).all()
    resampled = (shipped.stored.sizes == size).all(axis=1)
    assert resampled.sum() > 8 if size == (32, 34) else not resampled.all()
    for i, file in enumerate(files):
        stored = decode_cpu(file.data, apply_exif=False)
        stored = stored.mT if whole.stored.transposed[i] else stored
        if whole.decoded[i]:  # not for the GPU: shipped both times
            (stored,) = whole.pictures(np.array([i]), whole.pixels, whole.regions.pixels)
        (ready,) = shipped.pictures(np.array([i]), shipped.pixels, shipped.regions.pixels)
        want, got = (
            sampled(stored, whole.rows[0][i], size),
            sampled(ready, shipped.rows[0][i], size),
        )
        # A crop that is shipped is resampled once, in floating point; one that the worker resamples
        # is rounded to whole levels after each of two passes.
        assert (want - got).abs().max() <= (1.5 if resampled[i] else 1e-6)


@pytest.fixture(scope="module")
def large_photos():
    drawn = [pictures.draw(901, 1203, seed=seed) for seed in range(4)]
    return [EncodedImage(pictures.encode_jpeg(picture), i) for i, picture in enumerate(drawn)]


@pytest.mark.parametrize(("area", "divisor"), [(1.0, 8), (0.4, 4), (0.1, 2), (0.02, 1)])
def test_workers_scale_large_photos_as_they_decode_them(large_photos, area, divisor):
    size = (36, 48)
    crop = RandomResizedCrop(size, scale=(area, area), ratio=(4 / 3, 4 / 3))
    transforms = [crop, K.RandomHorizontalFlip(0.5)]
    whole, scaled = (packed(large_photos, transforms, share=share) for share in (0.0, 1.0))
    for i, image in enumerate(large_photos):
        stored, row = decode_cpu(image.data), whole.rows[0][i]
        assert 1 <= np.abs(row[..., 1]).min() / (2 * divisor) < 2
        (ready,) = scaled.pictures(np.array([i]), scaled.pixels, scaled.regions.pixels)
        got = sampled(ready, scaled.rows[0][i], size)
        want, wrong = (
            sampled(stored, row + np.array([beside, 0, 0, 0, 0, 0]), size)
            for beside in (0, divisor / 2)
        )
        # Whole levels are 0.25 away on average. Half a pixel of the scaled picture is more.
        assert (want - got).abs().mean() <= 0.4
        assert (want - got).abs().mean() < (wrong - got).abs().mean()


@pytest.mark.parametrize(
    ("resize", "options", "orientation", "height"),
    [
        (K.Resize((16, 20)), {}, 1, 320),  # without antialiasing
        (Resize((16, 20)), {"on_gpu": False}, 1, 320),
        (Resize((16, 20)), {"exif": True}, 2, 321),
    ],
)
def test_large_photos_that_are_decoded_as_a_whole(resize, options, orientation, height):
    file = pictures.encode_jpeg(pictures.draw(height, 401), orientation=orientation)
    batch, upright = (
        packed([EncodedImage(file, 0)], [resize], share=share, **given)
        for share, given in ((1.0, options), (0.0, {}))
    )
    picture = decode_cpu(file, apply_exif=options.get("exif", False))
    antialias = isinstance(resize, Resize)
    want = resample_uint8(picture, upright.rows[0][0], (16, 20), antialias=antialias)
    (ready,) = batch.pictures(np.array([0]), batch.pixels, batch.regions.pixels)
    assert torch.equal(ready, want)


@pytest.mark.parametrize("least", [0, 2])
def test_workers_take_the_smallest_files_and_the_largest_without_engines(photo_folder, least):
    files = files_of(photo_folder)
    left = ~packed(files, [Resize((16, 16))]).decoded
    taken = packed(files, [Resize((16, 16))], share=0.25, least=least).decoded & left
    weights = np.array([len(file.data) for file in files])
    assert taken.sum() == round(0.25 * left.sum())
    mine, others = weights[taken], weights[left & ~taken]
    assert mine.min() >= others.max() if least else mine.max() <= others.min()


def test_no_large_pictures_are_left_to_cuda_kernels():
    files, pixels = np.arange(100, 200), np.full(100, 4_000_000)
    assert len(Share(0.3, least=7).of_files(files, pixels)) == 100  # few fit into a call
    assert len(Share(0.3, least=7).of_files(files, pixels // 2)) == 30
    assert len(Share(0.3).of_files(files, pixels)) == 30  # engines
    assert len(Share(0.0, least=7).of_files(files, pixels)) == 0  # as the user says


@pytest.mark.parametrize(("share", "left"), [(0.0, 9), (0.2, 7), (0.3, 0)])
def test_no_few_files_are_left_to_cuda_kernels(share, left):
    photos = [pictures.draw(60 + i, 50, seed=i) for i in range(9)]
    files = [EncodedImage(pictures.encode(each, "JPEG"), i) for i, each in enumerate(photos)]
    found = packed(files, [Resize((16, 16))], share=share, least=7)
    assert (~found.decoded).sum() == left
    assert (~packed(files, [Resize((16, 16))], share=share).decoded).sum() == max(left, 6)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("size", [None, (24, 32)])
def test_what_a_worker_cannot_decode_leaves_the_others_their_places(size, on_gpu):
    # The buffer is laid out before: what does not come leaves a hole in it.
    def images(broken):
        for i in range(9):
            picture = pictures.draw(60 + 9 * i, 50, seed=i)
            file = pictures.encode(picture, "PNG" if i in (1, 6) else "JPEG")
            if i in broken:  # its header is whole
                start = file.index(b"IDAT") + 4
                file = file[:start] + bytes(len(file) - start - 16) + file[-16:]
            yield EncodedImage(file, i)

    transforms = [] if size is None else [RandomResizedCrop(size)]
    whole, batch = (
        packed([*images(broken)], transforms, share=0.6, on_gpu=on_gpu) for broken in ((), (1, 6))
    )
    assert whole.decoded.sum() >= 5
    assert batch.errors.keys() == {1, 6}
    assert {*np.flatnonzero(whole.decoded & ~batch.decoded)} == {1, 6}
    for i in range(9):
        assert (batch.span(i).numel() == 0) == (i in (1, 6))
        assert i in (1, 6) or torch.equal(batch.span(i), whole.span(i))


def test_a_deep_copy_reaches_its_persistent_workers(photo_folder):
    options = {"num_workers": 1, "persistent_workers": True, "seed": 3}
    dataset = EncodedImageFolder(photo_folder)
    prefetcher = prefetcher_of(dataset, transforms=[RandomResizedCrop(16)], **options)
    copied = copy.deepcopy(prefetcher)
    for _ in range(2):
        images, same = (torch.cat([i for i, _ in p]) for p in (prefetcher, copied))
        assert torch.equal(images, same)
    copied.set_epoch(0)
    assert not torch.equal(torch.cat([i for i, _ in copied]), same)  # guards the test


def test_a_sample_has_the_same_parameters_in_any_batch(photo_folder):
    images = files_of(photo_folder)
    halves = images[:12], images[12:]  # numbered from 0, as folders of their own would be
    dataset = ConcatDataset(
        [(EncodedImage(image.data, i, image.path), i) for i, image in enumerate(half)]
        for half in halves
    )
    options = {"transforms": [RandomResizedCrop(16)], "seed": 1}

    def images_of(batches):
        return torch.cat([images for images, _ in batches])

    want = images_of(prefetcher_of(dataset, batch_size=1, **options))
    assert torch.equal(images_of(prefetcher_of(dataset, batch_size=24, **options)), want)
    apart = chain.from_iterable(prefetcher_of(dataset, collate_fn=list, **options))
    assert torch.equal(images_of(apart), want)
    foreign = DataPrefetcher([*loader_of(dataset)], device="cpu", **options)
    iterator = iter(foreign)
    first = next(iterator)
    state = foreign.state_dict()
    found = images_of([first, *iterator])
    assert torch.equal(found[:12], want[:12])
    foreign.load_state_dict(state)
    assert torch.equal(images_of(foreign), found[8:])


@pytest.mark.parametrize("path", [Path("a.jpg"), "caf\udce9.jpg", "", None])
def test_a_sample_without_a_number_is_known_by_its_path(photo_folder, path):
    data = EncodedImageFolder(photo_folder)[0][0].data
    files = [EncodedImage(data, path=path)] * 2
    (images,) = prefetcher_of(files, transforms=[RandomResizedCrop(8)])
    assert not torch.equal(images[0], images[1])


def test_tail_draws_repeat_and_leave_the_users_generator_alone(photo_folder, device):
    dataset = EncodedImageFolder(photo_folder)
    transforms = [RandomResizedCrop(16), K.ColorJitter(0.4, 0.4, 0.4, 0.1), K.Normalize(MEAN, STD)]
    runs = []
    for disturb in (0, 7):
        torch.manual_seed(0)
        batches = []
        for images, _ in prefetcher_of(dataset, device, transforms=transforms, seed=9):
            batches.append(images)
            torch.rand(disturb)
        runs.append(torch.cat(batches))
    assert torch.equal(*runs)


def test_encoded_images_anywhere_in_a_sample(photo_folder, device):
    # A pair and a mapping around it, as a user's own dataset would have.
    dataset = [
        {"pair": (image, image), "meta": {"target": target, "name": image.path}}
        for image, target in EncodedImageFolder(photo_folder)
    ]
    for batch in prefetcher_of(dataset, device, transforms=[RandomResizedCrop(16)]):
        one, two = batch["pair"]
        assert one.shape == two.shape == (8, 3, 16, 16)
        assert torch.equal(one, two)
        assert len(batch["meta"]["name"]) == 8
        assert batch["meta"]["target"].device.type == device.type


@pytest.mark.parametrize("collate", [None, list])
def test_a_batch_of_its_own_has_draws_of_its_own_after_the_head(photo_folder, device, collate):
    image, _ = EncodedImageFolder(photo_folder)[0]
    files = [image.data, image.data + bytes(1)]
    dataset = [tuple(EncodedImage(file, i) for file in files) for i in range(2)]
    jitter = [Resize((16, 16)), K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=1.0)]
    (batch,) = prefetcher_of(dataset, device, collate_fn=collate, transforms=jitter)
    pictures = torch.cat([images for pair in batch for images in pair]).reshape(4, 3, 16, 16)
    same = sum(torch.equal(one, other) for one, other in combinations(pictures, 2))
    assert same == (2 if collate is None else 0)  # a list has batches of one sample's images


class Shards(IterableDataset):
    def __init__(self, folder):
        self.folder = folder

    def __iter__(self):
        for path, target in self.folder.samples:
            yield EncodedImage(Path(path).read_bytes()), target


def lists(samples):
    return [image for image, _ in samples], torch.tensor([target for _, target in samples])


def test_iterable_datasets_and_custom_collates(photo_folder, device):
    folder = EncodedImageFolder(photo_folder)
    for dataset, options in [
        (Shards(folder), {"num_workers": 1}),
        (folder, {"collate_fn": lists}),
        (Subset(folder, range(8)), {}),
    ]:
        options["transforms"] = [Resize(20), CenterCrop(16)]
        images, target = next(iter(prefetcher_of(dataset, device, **options)))
        assert images.shape == (8, 3, 16, 16)
        assert target.tolist() == folder.targets[:8]


def discarding(samples):
    default_collate(samples)
    return default_collate(samples)


def copying(samples):
    batch = default_collate(samples)
    assert len(copy.deepcopy(batch)) == len(pickle.loads(pickle.dumps(batch))) == 2
    return batch


@pytest.mark.parametrize("collate", [discarding, copying])
def test_a_collate_function_may_discard_and_copy_a_batch(photo_folder, collate):
    folder = EncodedImageFolder(photo_folder)
    loader = DataLoader(folder, 2, num_workers=1, collate_fn=collate)
    for number, (images, _) in enumerate(loader):
        for i in range(2):
            assert images[i] == folder[2 * number + i][0]
    assert number == 11


@pytest.mark.forks("its collate function is local")
def test_a_collate_function_may_give_a_batch_twice(photo_folder):
    kept = []

    def collate(samples):
        kept.append(default_collate(samples))
        return kept[0]

    folder = EncodedImageFolder(photo_folder)
    loader = DataLoader(folder, 2, num_workers=1, collate_fn=collate)
    for images, _ in loader:
        assert [*images] == [folder[0][0], folder[1][0]]
    first, *rest = (images for images, _ in DataPrefetcher(loader, device="cpu"))
    assert all(torch.equal(a, b) for images in rest for a, b in zip(first, images, strict=True))


def too_little_memory(_):
    resource = pytest.importorskip("resource")
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))


def test_too_little_shared_memory_says_what_to_do():
    files = [EncodedImage(pictures.encode_jpeg(pictures.draw(60, 50)) + bytes(60_000), 0)]
    loader = DataLoader(files, num_workers=1, worker_init_fn=too_little_memory)
    words = r"1 MiB of shared memory .*docker run --shm-size=.*num_workers, prefetch_factor"
    (batch,) = loader  # files take another way
    assert batch[0] == files[0]
    with pytest.raises(RuntimeError, match=words):
        next(iter(DataPrefetcher(loader, device="cpu", transforms=[Resize((200, 200))])))


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("error", [MemoryError(), OSError("broken data stream")])
def test_what_pillow_raises_does_not_tell_a_bad_file_from_a_lack_of_memory(
    monkeypatch, error, room
):
    def load(picture):
        raise error

    def empty(size, whole=torch.empty, **options):
        if not room and size >= 60 * 50 * 17:
            raise RuntimeError("can't allocate memory")
        return whole(size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(PngImageFile, "load", load)
    with pytest.raises(ValueError if room else MemoryError):
        decode_cpu(pictures.encode(pictures.draw(60, 50), "PNG"))


def claiming(height, width, length):
    """A JPEG that is cut off, and whose header claims a size."""
    jpeg = bytearray(pictures.encode_jpeg(pictures.draw(60, 50)))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(jpeg[:length])


def test_a_header_alone_reserves_no_memory():
    sizes = []
    others = {*slab.mapped}
    good = pictures.encode_jpeg(pictures.draw(60, 50))
    flat = pictures.encode(np.zeros((1000, 1000, 3), np.uint8), "PNG")  # 1,000 bytes to a byte
    dataset = numbered([claiming(4000, 4000, 900), good, flat, claiming(4000, 4000, 900)])
    prefetcher = prefetcher_of(dataset, batch_size=4, num_workers=1, on_error="skip")
    for _ in range(2):
        for batch in prefetcher:  # noqa: B007  # the last one is looked at
            ours = (slab.mapped[key] for key in slab.mapped.keys() - others)
            sizes += [each.memory.numel() - slab.HEADER for each in ours]
        images, target = batch
        assert target.tolist() == [1, 2]
        assert torch.equal(images[0], decode_cpu(good))
        assert torch.equal(images[1], torch.zeros(3, 1000, 1000, dtype=torch.uint8))
    room = 3 * (60 * 50 + 1000 * 1000)
    assert max(sizes) == int(room * slab.SLACK)


def test_a_slab_shrinks_after_some_smaller_batches():
    small_one, large = (
        pictures.encode_jpeg(pictures.draw(*size)) for size in [(60, 50), (900, 700)]
    )
    dataset = numbered([large] * 2 + [small_one] * 12 + [large] + [small_one])
    prefetcher = prefetcher_of(dataset, batch_size=1, num_workers=1, persistent_workers=True)
    held, others = [], {*slab.mapped}
    for images, target in prefetcher:
        assert torch.equal(images[0], decode_cpu(dataset[int(target)][0].data))
        ours = slab.mapped.keys() - others
        held.append(sum(slab.mapped[key].memory.numel() for key in ours))
        del images
    assert max(held[:6]) > 2 * 900 * 700
    assert min(held[6:14]) < 900 * 700  # all that large ones had
    del prefetcher
    gc.collect()


def test_slabs_of_a_dropped_loader_go_with_its_workers(photo_folder):
    def workers():
        return {worker for worker, _ in slab.mapped} - others

    others = {worker for worker, _ in slab.mapped}
    kept, dropped = (
        small(EncodedImageFolder(photo_folder), num_workers=1, persistent_workers=True)
        for _ in range(2)
    )
    for prefetcher in (kept, dropped):
        list(prefetcher)
    assert len(workers()) == 2
    del dropped, prefetcher
    gc.collect()
    until(lambda: len(workers()) == 1)
    assert len(list(kept)) == 3  # whose slabs stayed


def odd_files(folder):
    """A FIFO, a link to a device, a socket, and two files of 3 GB that take no room on the disk."""
    os.mkfifo(folder / "fifo.jpg")
    (folder / "device.jpg").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(os.path.relpath(folder / "socket.jpg"))
    for name, begin in (("sparse.jpg", b""), ("photo.jpg", claiming(60, 50, 1500))):
        with (folder / name).open("wb") as file:
            file.write(begin)
            file.truncate(3 << 30)
    return {
        "fifo.jpg": "it is a FIFO",
        "device.jpg": "it is a device",
        "socket.jpg": "it is a socket",
        "sparse.jpg": "neither a JPEG nor",
    }


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs Unix")
@pytest.mark.parametrize("way", ["folder", "accelerate", "preprocess"])
def test_files_that_are_no_images_are_not_read(tmp_path, way):
    (tmp_path / "a").mkdir()
    good = pictures.encode_jpeg(pictures.draw(60, 50))
    (tmp_path / "a" / "0.jpg").write_bytes(good)
    reasons = odd_files(tmp_path / "a")
    if way == "preprocess":
        for name, reason in reasons.items():
            with pytest.raises(BadImageError, match=f"{name}' .*{reason}"):
                preprocess([tmp_path / "a" / name], [Resize((16, 16))], device="cpu")
        return
    if way == "folder":
        dataset, options = EncodedImageFolder(tmp_path), {"transforms": [Resize((16, 16))]}
        prefetcher = prefetcher_of(dataset, on_error="skip", **options)
    else:
        dataset = ImageFolder(tmp_path, v2.Compose([v2.Resize((16, 16)), v2.PILToTensor()]))
        loader = DataLoader(dataset, batch_size=8)
        prefetcher = accelerate(loader, device="cpu", on_error="skip", print_plan=False)
    ((images, _),) = prefetcher
    assert len(images) == 2  # PIL, too, takes the zeros in photo.jpg for the rest of its pixels
    assert len(read_image(tmp_path / "a" / "photo.jpg").data) < 65 << 20
    assert len(prefetcher.bad_images) == len(reasons)
    for bad in prefetcher.bad_images:
        assert bad.reason.startswith(reasons[Path(bad.path).name])


def test_a_large_tiff_is_read_whole(tmp_path, constants):
    constants(folder, LARGE=100)
    constants(header, _BESIDE=0)
    picture = pictures.draw(60, 50)
    for image_format in ("TIFF", "PNG", "JPEG", "BMP", "WEBP", "GIF", "PPM"):
        data = pictures.encode(picture, image_format)
        (tmp_path / "file").write_bytes(data + bytes(10_000_000))
        image = read_image(tmp_path / "file")
        assert torch.equal(decode_cpu(image.data), decode_cpu(data))
        cut = image_format not in ("TIFF", "WEBP")
        assert len(image.data) == (32 * 60 * 50 if cut else len(data) + 10_000_000)


def columns(samples):
    """Columns with an entry per sample, as collate functions make them, in an order of their own.

    But for the last two: as many letters as samples, and another number of entries.
    """
    images, targets = zip(*reversed(samples), strict=True)
    return {
        "image": default_collate(images),
        "target": torch.tensor(targets),
        "words": [[str(target)] * (target % 4) for target in targets],
        "empty": [[] for _ in targets],
        "boxes": [torch.full((target, 4), target) for target in targets],
        "dicts": [{"n": target, "t": torch.tensor([target])} for target in targets],
        "pairs": [torch.tensor(targets), [str(target) for target in targets]],
        "sparse": torch.diag(torch.tensor(targets)).to_sparse(),
        "some": [torch.tensor(target) if target % 3 else None for target in targets],
        "none": [None] * len(targets),
        "text": "a" * len(targets),
        "more": deque(range(len(targets) + 1)),
    }


@pytest.mark.parametrize(("size", "workers", "on_error"), [(2, 0, "skip"), (8, 2, "replace")])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # as torch receives them
def test_what_the_collate_function_makes_follows_a_bad_image(photo_folder, size, workers, on_error):
    options = {"batch_size": size, "collate_fn": columns, "num_workers": workers}
    prefetcher = small(damaged(photo_folder), on_error=on_error, **options)
    for batch in prefetcher:
        targets = batch["target"].tolist()
        assert len(batch["image"]) == len(targets)
        assert batch["words"] == [[str(target)] * (target % 4) for target in targets]
        assert len(batch["empty"]) == len(targets)
        assert [box.shape for box in batch["boxes"]] == [(target, 4) for target in targets]
        assert [entry["n"] for entry in batch["dicts"]] == targets
        assert batch["pairs"][0].tolist() == targets
        assert batch["pairs"][1] == [str(target) for target in targets]
        assert batch["sparse"].layout is torch.sparse_coo
        assert batch["sparse"].to_dense().sum(1).tolist() == targets
        assert batch["some"] == [target if target % 3 else None for target in targets]
        assert batch["none"] == [None] * len(targets)
        assert (batch["text"], batch["more"]) == ("a" * size, deque(range(size + 1)))
    assert {bad.index for bad in prefetcher.bad_images} == {2, 6, 13}


class Moving(dict):
    """As the batches of Hugging Face's tokenizers."""

    def to(self, *_, **__):
        return self


NONE = r"\. Let .*, a list or a dict"
JOINED = (
    "made 6 rows of something beside 3 images"  # as some detectors' collate functions join boxes
)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda targets: torch.diag(targets).to_sparse_csr(), f"a torch.sparse_csr tensor{NONE}"),
        (
            lambda targets: torch.nested.nested_tensor(
                [torch.ones(1 + i) for i in targets.tolist()], layout=torch.jagged
            ),
            f"a nested tensor{NONE}",
        ),
        (lambda targets: pack_sequence([torch.ones(2)] * len(targets)), f"PackedSequence'>{NONE}"),
        (lambda targets: deque(targets.tolist()), f"deque'>{NONE}"),
        (lambda targets: Moving(target=targets), f"Moving'>{NONE}"),
        (lambda targets: targets.repeat_interleave(2), JOINED),
        (lambda targets: targets.repeat_interleave(2).numpy(), JOINED),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(beta state|prototype)")  # CSR, nested tensors
def test_a_bad_image_beside_rows_that_are_not_known(photo_folder, make, words):
    def collate(samples):
        images, targets = default_collate(samples)
        return images, make(targets)

    options = {"batch_size": 3, "collate_fn": collate, "on_error": "skip"}
    with pytest.raises(ValueError, match=words):
        list(small(damaged(photo_folder), **options))


def test_only_a_cast_on_tensors(device):
    dataset = torch.utils.data.TensorDataset(
        torch.full((4, 3, 8, 8), 255, dtype=torch.uint8), torch.arange(4)
    )
    options = {"dtype": torch.float16, "memory_format": torch.channels_last}
    images, target = next(iter(prefetcher_of(dataset, device, **options)))
    assert images.dtype == torch.float16
    assert bool((images == 1).all())
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert target.dtype == torch.int64


@pytest.mark.filterwarnings("ignore:.*does not pin")
@pytest.mark.parametrize("transforms", [None, [torch.nn.Identity()]])
def test_uint8_tensors_stay_what_they_are(device, transforms):
    photos = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    options = {"device": device, "transforms": transforms, "dtype": torch.uint8}
    for batch in (photos, photos / 255):
        (images,) = DataPrefetcher([batch], **options)
        assert torch.equal(images.cpu(), photos)


def test_an_empty_batch_of_tensors(device):
    (images,) = DataPrefetcher(
        [torch.zeros(0, 3, 9, 9, dtype=torch.uint8)],
        device=device,
        transforms=[RandomResizedCrop((4, 5)), K.RandomHorizontalFlip()],
    )
    assert images.shape == (0, 3, 4, 5)
    assert images.dtype == torch.float32


def test_pixels_as_they_are_have_their_own_dtype(photo_folder):
    prefetcher_of(EncodedImageFolder(photo_folder), dtype=torch.uint8)


def test_pixels_as_they_are_have_the_memory_format_that_was_asked_for():
    for memory_format in (torch.contiguous_format, torch.channels_last):
        loader = DataLoader(numbered([pictures.encode_jpeg(pictures.draw(60, 50))]), batch_size=1)
        ((images, _),) = DataPrefetcher(loader, device="cpu", memory_format=memory_format)
        assert images[0][None].is_contiguous(memory_format=memory_format)


def stacked(samples):
    return torch.stack([image for image, _ in samples])


@pytest.mark.parametrize(
    ("dataset", "collate_fn", "hint"),
    [
        (ImageFolder, None, "PIL.Image.Image'>\nLet the dataset return EncodedImage, as"),
        (lambda root: ImageFolder(root, v2.PILToTensor()), None, "one size on the device. Let"),
        (EncodedImageFolder, stacked, "Leave collate_fn out"),
        (lambda root: [{"bytes": b"a file's", "path": None}], None, "In place of a row with"),
    ],
)
def test_what_cannot_be_collated_is_told_the_way(photo_folder, dataset, collate_fn, hint):
    workers = int(dataset is ImageFolder)
    options = {"collate_fn": collate_fn, "num_workers": workers}
    with pytest.raises((TypeError, RuntimeError)) as caught:
        next(iter(small(dataset(photo_folder), **options)))
    words = "".join(traceback.format_exception(caught.value))
    assert hint in words and ("accelerate(loader)" in words or not workers)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="nowhere to look")
def test_workers_leave_no_shared_memory_after(photo_folder):
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")  # by name, and not by descriptor
    try:
        iterator = iter(small(EncodedImageFolder(photo_folder), num_workers=2))
        workers = [worker.pid for worker in torch.multiprocessing.active_children()]
        assert sum(len(target) for _, target in iterator) == 24
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    del iterator
    gc.collect()
    # torch leaves an empty file at times: the loop opens one that the worker has just removed.
    left = [p for pid in workers for p in Path("/dev/shm").glob(f"torch_{pid}_*")]
    assert not [p.name for p in left if p.stat().st_size]


def test_images_that_no_prefetcher_has_decoded_have_no_methods_of_tensors(photo_folder):
    images, _ = next(iter(loader_of(EncodedImageFolder(photo_folder))))
    assert not hasattr(images, "cuda")


SIZES = [(1, 1), (1, 10_000), (10_000, 1), (8, 65_500), (65_500, 8), (17, 3), (61, 83)]
KINDS = ["4:4:4", "4:2:2", "4:2:0", "4:4:0", "4:1:1"]


def extremes():
    """Pictures of all sizes and samplings, each after a plain one."""
    picture, plain = draw_photo(61, 83, 0), pictures.encode_jpeg(draw_photo(60, 90, 9))
    files = [pictures.encode_jpeg(draw_photo(*size, 1)) for size in SIZES]
    files += [pictures.encode_jpeg(picture, subsampling=kind) for kind in KINDS]
    files += [pictures.encode_jpeg(picture, restart_marker_blocks=2)]
    files += [pictures.encode_jpeg(picture, icc_profile=bytes(999), progressive=True)]
    files = [file for extreme in files for file in (plain, extreme)]
    return [EncodedImage(file, i) for i, file in enumerate(files)]


def test_every_size_and_sampling_and_its_neighbor(device):
    dataset = extremes()
    transforms = [Resize((20, 24))]
    images = torch.cat([*prefetcher_of(dataset, device, cpu_share=0.0, transforms=transforms)])
    wholes = chain.from_iterable(prefetcher_of(dataset, device, cpu_share=0.0))
    for i, (image, whole) in enumerate(zip(images.cpu(), wholes, strict=True)):
        picture = read(io.BytesIO(dataset[i].data))
        assert_pixels(whole, picture, device)
        want = F.pil_to_tensor(F.resize(picture, [20, 24])).float()
        # As in test_validation_pixels_are_torchvisions: rounding, and the GPU decoder's levels.
        assert (image * 255 - want).abs().mean() <= (0.5 if device.type == "cpu" else 1.5), i
    assert all(torch.equal(images[0], image) for image in images[::2])


def damaged(folder, broken=None):
    """A dataset of numbered files, of which some are broken."""
    images = files_of(folder)
    if broken is None:
        broken = {2: b"", 6: images[6].data[:600], 13: b"not a picture at all" * 9}
    return [(EncodedImage(broken.get(i, x.data), i, x.path), i) for i, x in enumerate(images)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_file_raises_an_error_that_names_it(photo_folder, device, workers):
    dataset = damaged(photo_folder)
    prefetcher = small(dataset, device, num_workers=workers)
    for _ in range(2):  # the loader can be iterated again
        with pytest.raises(
            BadImageError, match=r"(?s)JPEG' \(sample 2 of the dataset\): .*empty.*on_error"
        ):
            list(prefetcher)
    dataset[:] = damaged(photo_folder, {})
    assert len(list(prefetcher)) == 3


@pytest.mark.parametrize(("on_error", "share"), [("skip", 1.0), ("replace", 0.0)])
def test_bad_files_are_skipped_or_replaced(photo_folder, device, on_error, share):
    options = {"cpu_share": share, "memory_format": torch.channels_last}
    whole = small(damaged(photo_folder, {}), device, **options)
    good = torch.cat([images for images, _ in whole])
    prefetcher = small(damaged(photo_folder), device, on_error=on_error, **options)
    batches = list(prefetcher)
    assert all(images.is_contiguous(memory_format=torch.channels_last) for images, _ in batches)
    targets = torch.cat([target for _, target in batches]).tolist()
    bad = {2, 6, 13}
    if on_error == "skip":
        assert targets == [i for i in range(24) if i not in bad]
    else:
        assert targets == [{2: 3, 6: 7, 13: 14}.get(i, i) for i in range(24)]
    for image, target in zip(torch.cat([images for images, _ in batches]), targets, strict=True):
        assert torch.equal(image, good[target])  # every target has its own picture, no neighbour's
    assert [b.index for b in prefetcher.bad_images] == [2, 6, 13]
    assert all(b.reason and b.path for b in prefetcher.bad_images)
    if device.type == "cpu":
        assert (prefetcher.stats.cpu_images, prefetcher.stats.gpu_images) == (21, 0)


def test_a_rotten_dataset_is_an_error(photo_folder):
    seen, dataset = [], damaged(photo_folder)
    with pytest.raises(BadImageError, match="more than max_bad=2"):
        list(small(dataset, on_error=seen.append, max_bad=2))
    assert [bad.index for bad in seen] == [2, 6, 13]
    hopeless = damaged(photo_folder, dict.fromkeys(range(24), b"x"))
    with pytest.raises(BadImageError, match="all 8 images"):
        list(small(hopeless, on_error="replace"))
    prefetcher = small(dataset, on_error=seen.append, max_bad=3)
    for _ in range(2):  # a file counts once
        assert sum(len(images) for images, _ in prefetcher) == 21
    assert [bad.index for bad in prefetcher.bad_images] == [2, 6, 13]
    assert [bad.index for bad in seen] == [2, 6, 13] * 3
    assert prefetcher.stats.bad_images == 6


# A warning that has a test of its own.
MANY_ARE_BAD = pytest.mark.filterwarnings("ignore:.* images could not be decoded so far")


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_many_bad_files_are_told_of_once(photo_folder, on_error):
    files = damaged(photo_folder, dict.fromkeys(range(0, 24, 2), b"x"))
    prefetcher = small(files, on_error=on_error)
    message = "11 of 24 images could not be decoded so far.*sample 20"
    with pytest.warns(UserWarning, match=message) as told:
        for _ in range(2):
            list(prefetcher)
    assert len(told) == 1
    assert len(prefetcher.bad_images) == 12


def test_nobody_is_told_of_bad_files_who_has_asked_or_set_a_limit(photo_folder):
    files = damaged(photo_folder, dict.fromkeys(range(0, 24, 2), b"x"))
    for options in ({"on_error": lambda bad: None}, {"on_error": "skip", "max_bad": 12}):
        prefetcher = small(files, **options)
        list(prefetcher)
        assert len(prefetcher.bad_images) == 12


def test_a_few_bad_files_of_many_are_not_told_of(photo_folder):
    files = damaged(photo_folder, dict.fromkeys(range(10), b"x"))
    assert sum(len(images) for images, _ in small(files, on_error="skip", batch_size=12)) == 14


@MANY_ARE_BAD
@pytest.mark.parametrize("on_error", ["skip", lambda bad: None])
def test_an_epoch_of_bad_files_is_an_error(photo_folder, on_error):
    prefetcher = small(damaged(photo_folder, dict.fromkeys(range(24), b"x")), on_error=on_error)
    for _ in range(2):  # each epoch says so, also where its files are known to be bad
        with (
            pytest.warns(UserWarning, match=r"left out all 8 images of a batch.*\(sample 7 of"),
            pytest.raises(
                BadImageError, match=r"all 24 images of the epoch.*\(sample 23 of"
            ) as error,
        ):
            list(prefetcher)
    assert len(prefetcher.bad_images) == 24
    assert str(prefetcher.dataset[23][0].path) in str(error.value)
    with pytest.warns(UserWarning, match="left out"), pytest.raises(BadImageError):
        prefetcher.next()
    assert list(small([], on_error=on_error)) == []  # nothing was left out there


@MANY_ARE_BAD
def test_a_batch_of_bad_files_is_skipped_with_a_warning(photo_folder):
    files = damaged(photo_folder, dict.fromkeys(range(8, 24), b"x"))
    prefetcher, resumed = (small(files, on_error="skip") for _ in range(2))
    epoch = iter(prefetcher)
    assert next(epoch)[1].tolist() == list(range(8))
    resumed.load_state_dict(prefetcher.state_dict())
    for rest in (epoch, resumed):  # the epoch was not empty, whoever had its good batches
        with pytest.warns(UserWarning, match=r"all 8 images of a batch.*\(sample 15 of") as told:
            assert list(rest) == []
        (left_out,) = [each for each in told if "left out" in str(each.message)]  # of two batches
        assert left_out.filename == __file__
    assert (prefetcher.stats.images, prefetcher.stats.bad_images) == (8, 16)


def test_bad_files_without_a_name_count_each():
    options = {"batch_size": 2, "on_error": "skip"}
    with pytest.warns(UserWarning), pytest.raises(BadImageError, match="more than max_bad=5"):
        list(small([EncodedImage(b"bad")] * 6, max_bad=5, **options))
    named = [EncodedImage(b"bad", -1, path) for path in "aba"]
    prefetcher = small(named, max_bad=2, **options)
    with pytest.warns(UserWarning), pytest.raises(BadImageError, match="all 3 images of the epoch"):
        list(prefetcher)
    assert [bad.path for bad in prefetcher.bad_images] == ["a", "b"]


def test_the_last_bad_image_is_named_in_any_epoch():
    order = [0, 1]
    prefetcher = small([EncodedImage(b"bad", i) for i in order], sampler=order, on_error="replace")
    for last in (1, 0):
        with pytest.raises(BadImageError, match=rf"all 2 images .* \(sample {last} of"):
            list(prefetcher)
        order.reverse()


@pytest.mark.parametrize(("views", "on_error"), [(1, "skip"), (4, "replace")])
def test_a_bad_image_among_samples_apart_is_an_error(photo_folder, views, on_error):
    files = damaged(photo_folder)
    pairs = [([files[i][0]] * views, i) for i in range(8)]
    prefetcher = small(pairs, batch_size=4, collate_fn=list, on_error=on_error)
    # What belongs to the bad image is not known, and good ones would go with it.
    with pytest.raises(BadImageError, match=r"sample 2 of .*the collate function leaves samples"):
        list(prefetcher)


@pytest.mark.parametrize(
    ("size", "names", "on_error"), [(2, True, "replace"), (4, True, "skip"), (4, False, "replace")]
)
def test_a_bad_image_that_is_there_twice(photo_folder, size, names, on_error):
    def twice(samples):
        images, targets = default_collate([sample for sample in samples for _ in range(2)])
        return images, [targets, targets]

    def images_twice(samples):
        images, targets = twice(samples)
        targets = targets[0][::2]
        return images, [str(target) for target in targets.tolist()] if names else targets

    make = partial(small, damaged(photo_folder), batch_size=size, on_error=on_error)
    with pytest.raises(ValueError, match=f"{2 * size} images of {size} samples beside {size} rows"):
        list(make(collate_fn=images_twice))
    for images, targets in make(collate_fn=twice):
        assert len(images) == len(targets[0]) == len(targets[1])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*deprecated")  # torchvision's decoder, from 0.29 on
@pytest.mark.parametrize("decoder", ["nvjpeg", "torchvision", "cpu"])
def test_backends_agree(photo_folder, decoder):
    options = {"transforms": [Resize((64, 64))], "dtype": torch.float32, "cpu_share": 0.0}
    loader = loader_of(EncodedImageFolder(photo_folder), "cuda")
    got = torch.cat([i for i, _ in DataPrefetcher(loader, decoder=decoder, **options)])
    want = torch.cat([i for i, _ in DataPrefetcher(loader, device="cpu", **options)])
    assert ((got.cpu() - want).abs() * 255 > GPU_LEVELS).float().mean() <= GPU_SHARE


def test_workers_where_unix_is_not(monkeypatch):
    """On Windows, as far as it can be told from elsewhere; macOS lacks some of these as well."""
    for name in ("nice", "sched_getaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    assert usable_cores() >= 1
    files = numbered([pictures.encode_jpeg(pictures.draw(40, 30))] * 8)
    prefetcher = small(files, batch_size=4, num_workers=1)
    for _ in range(2):  # the slabs of the first epoch's worker are unmapped in the second
        assert [len(images) for images, _ in prefetcher] == [4, 4]
    assert len({worker for worker, _ in slab.mapped}) <= 1


class Asked(multiprocessing.get_context("fork").Process):
    """A process; while somebody lists the living ones, a slab of another process comes."""

    listed = False

    @property
    def pid(self):
        if self.listed:
            slab.mapped[(-1, 0)] = None
        return super().pid


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_slab_that_comes_while_dead_ones_are_unmapped_stays():
    # As from another thread, which received from a worker that began since.
    child = Asked(target=time.sleep, args=(100,))
    child.start()
    Asked.listed = True
    slab.unmap_dead()
    Asked.listed = False
    assert (-1, 0) in slab.mapped
    slab.unmap_dead()
    assert (-1, 0) not in slab.mapped
    child.kill()
    child.join()


DEEP = {
    "16 bits": (np.full((16, 16), 40_000, np.uint16), "PNG", 255),
    "32 bits": (np.full((16, 16), 40_000, np.int32), "TIFF", 255),
    "float": (np.full((16, 16), 0.6, np.float32), "TIFF", 0),
}


@pytest.mark.parametrize(("kind", "workers"), [("16 bits", 0), ("32 bits", 0), ("float", 2)])
def test_what_pil_clips_is_pils_with_one_warning(kind, workers, tmp_path):
    pixels, image_format, level = DEEP[kind]
    path = tmp_path / "deep"
    Image.fromarray(pixels).save(path, image_format)
    dataset = [(EncodedImage(path.read_bytes(), i, path), i) for i in range(8)]
    prefetcher = small(dataset, batch_size=2, num_workers=workers)
    with pytest.warns(UserWarning, match=r"more than 8 bits .*deep' \(sample 0 of") as told:
        for images, _ in chain(prefetcher, prefetcher):  # of two epochs, with new workers
            assert (images * 255).unique().tolist() == [level]
    (text,) = [str(warning.message) for warning in told if warning.category is UserWarning]
    # What the warning says to write.
    line = re.search(r"torch\.from_numpy.*\)", text)[0].replace("65535", "60000")
    image = eval(line, {"torch": torch, "np": np, "Image": Image, "path": path})
    tensors = prefetcher_of([image, image], transforms=[CenterCrop(8)])
    assert torch.allclose(next(iter(tensors)), torch.tensor(float(pixels[0, 0]) / 60000))
