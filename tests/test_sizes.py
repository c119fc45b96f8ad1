"""Results of their own sizes: each image against torchvision's op, and as one of a batch."""

import io
import itertools
import re
import zlib

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from fakes import OnTheCpu, numbered, prefetcher_of
from pictures import draw, encode, encode_jpeg
from PIL import Image, ImageOps
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

import gpuprefetch
from gpuprefetch import DataPrefetcher, EncodedImage, PaddedImages, Padding, Views, preprocess
from gpuprefetch.images.header import decode_cpu
from gpuprefetch.transforms.random import uniform
from gpuprefetch.transforms.sampling import (
    JitteredScale,
    Sampling,
    ShorterSide,
    ShortestSize,
    ZoomOutOp,
)

# A square, one pixel, 60:1, and sizes that divide nothing.
SHAPES = [(40, 60), (33, 100), (1, 1), (60, 1), (1, 60), (7, 420), (37, 53), (64, 64)]
FILES = [
    encode(draw(max(h, 8), max(w, 8), seed=seed)[:h, :w], "PNG")
    for seed, (h, w) in enumerate(SHAPES)
]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LEVEL = 1.1 / 255 / min(STD)  # of 255, after Normalize
TO_FLOAT = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
NORMALIZED = [*TO_FLOAT, v2.Normalize(MEAN, STD)]
LEVEL = 1.01  # of 0 to 255


def picture(file):
    return F.pil_to_tensor(Image.open(io.BytesIO(file)).convert("RGB"))


def zipped(samples):
    return tuple(zip(*samples, strict=True))


# --- sizes --------------------------------------------------------------------------------------


RULES = {
    "RandomResize": (v2.RandomResize(20, 31), ShorterSide(20, 31)),
    "RandomShortestSize": (
        v2.RandomShortestSize([480, 512, 800], 1333),
        ShortestSize((480, 512, 800), 1333),
    ),
    "RandomShortestSize without a limit": (
        v2.RandomShortestSize(17),
        ShortestSize((17,), None),
    ),
    "ScaleJitter": (
        v2.ScaleJitter((1024, 768), (0.1, 2.0)),
        JitteredScale((1024, 768), (0.1, 2.0)),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_sizes_are_torchvisions_for_the_same_draws(name, monkeypatch):
    op, rule = RULES[name]
    shapes = [*SHAPES, (427, 640), (640, 427), (333, 500), (3024, 4032)]
    for shape, u in itertools.product(shapes, np.linspace(0, 1 - 1e-9, 50)):
        monkeypatch.setattr(torch, "rand", lambda *_, u=u: torch.tensor([u]).float())
        monkeypatch.setattr(
            torch, "randint", lambda *low, u=u: torch.tensor(_integer(*low[:-1], u=u))
        )
        size = op.make_params([torch.empty(3, *shape)])["size"]
        if len(size) == 1:
            size = F._geometry._compute_resized_output_size(shape, size)
        assert rule(np.array([shape], float), np.array([[u]])).tolist() == [[*size]]


@pytest.mark.parametrize(("chance", "times"), [(0.0, 1), (1.0, 2)])
def test_a_lists_zoom_out_has_its_chance(chance, times):
    batch = [EncodedImage(encode_jpeg(draw(16, 24, seed=seed))) for seed in range(4)]
    ops = [v2.RandomZoomOut(p=chance, side_range=(2.0, 2.0))]
    (images,) = DataPrefetcher([batch], device="cpu", transforms=ops)
    assert [image.shape for image in images] == 4 * [(3, times * 16, times * 24)]


@pytest.mark.parametrize("shape", SHAPES)
def test_zooms_are_torchvisions_for_the_same_draws(shape, monkeypatch):
    op = v2.RandomZoomOut(side_range=(1.0, 4.0), p=0.5)
    ours = ZoomOutOp((1.0, 4.0), 0.5)
    keys = np.arange(40, dtype=np.uint64)
    sampling = ours(Sampling.identity([shape] * 40), keys)
    for draws, size, origin in zip(uniform(keys, 4), sampling.length, sampling.origin, strict=True):
        given = iter(([draws[0]], draws[1:3]))
        monkeypatch.setattr(
            torch, "rand", lambda *_, given=given: torch.tensor(next(given)).float()
        )
        left, top, right, bottom = op.make_params([torch.empty(3, *shape)])["padding"]
        if draws[3] >= 0.5:  # it is not performed
            left = top = right = bottom = 0
        assert size.tolist() == [shape[0] + top + bottom, shape[1] + left + right]
        assert origin.tolist() == [-top, -left]


def _integer(first, last=None, *, u):
    low, high = (0, first) if last is None else (first, last)
    return low + int(u * (high - low))


# --- values -------------------------------------------------------------------------------------


RESIZES = {
    "the shorter side": v2.Resize(24),
    "both": v2.Resize(24, max_size=50),
    "the longer side": v2.Resize(None, max_size=50),
    "bicubic": v2.Resize(24, InterpolationMode.BICUBIC, max_size=50),
    "RandomShortestSize": v2.RandomShortestSize([20, 24, 28, 32], 70),
    "RandomResize": v2.RandomResize(20, 31),
    "ScaleJitter": v2.ScaleJitter((64, 64), (0.5, 2.0)),
    "own": gpuprefetch.Resize(24, max_size=50),
}


def resized(file, got, op):
    """What torchvision makes of a file in the size of a result."""
    how = getattr(op, "interpolation", InterpolationMode.BILINEAR)
    image = Image.open(io.BytesIO(file)).convert("RGB")
    return F.pil_to_tensor(F.resize(image, got.shape[1:], how)).float()


@pytest.mark.parametrize("name", RESIZES)
def test_each_result_is_what_torchvision_gives(name):
    op = RESIZES[name]
    results = preprocess(FILES, [op], device="cpu")
    assert isinstance(results, list) and len({result.shape for result in results}) > 3
    off = []
    for file, got in zip(FILES, results, strict=True):
        levels = got.float() if got.dtype == torch.uint8 else got * 255
        assert (got.dtype == torch.uint8) == (name != "own")
        off.append((levels - resized(file, got, op)).abs().flatten())
    # PIL rounds after each of its two passes, and we once: of some 20,000 values one may be two
    # levels off, in one of 60 seeds.
    assert torch.cat(off).max() <= 2 + LEVEL - 1
    assert (torch.cat(off) > LEVEL).sum() <= 1
    if type(op) is v2.Resize:
        for shape, got in zip(SHAPES, results, strict=True):
            size = F._geometry._compute_resized_output_size(shape, op.size, op.max_size)
            # torchvision refuses a side that would have no pixel.
            assert got.shape[1:] == tuple(max(side, 1) for side in size)


@pytest.mark.parametrize("given", ["a list", "a Compose", "within"])
@pytest.mark.parametrize("name", ["both", "RandomShortestSize", "ScaleJitter"])
def test_flips_and_normalize_join_the_launch(name, given):
    op, flip = RESIZES[name], v2.RandomHorizontalFlip()
    ops = [op, flip, *NORMALIZED]
    lists = {
        "a list": ops,
        "a Compose": v2.Compose(ops),
        "within": [v2.Compose([op, flip]), *NORMALIZED],
    }
    torch.manual_seed(3)
    prefetcher = DataPrefetcher(
        [[EncodedImage(file, i) for i, file in enumerate(FILES)]],
        transforms=lists[given],
        device="cpu",
    )
    (view,) = prefetcher.views
    assert len(view.head.names) == 3 and not view.tail
    (results,) = prefetcher
    flipped = 0
    for file, got in zip(FILES, results, strict=True):
        want = resized(file, got, op) / 255
        levels = got * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
        as_it_is, mirrored = ((levels - each).abs().max() for each in (want, want.flip(2)))
        assert min(as_it_is, mirrored) <= LEVEL / 255
        flipped += bool(mirrored < as_it_is)
    assert flipped


def test_a_crop_gives_one_size_again():
    """The segmentation preset of torchvision: one launch, and one tensor."""
    ops = [
        v2.RandomResize(20, 41),
        v2.RandomHorizontalFlip(),
        v2.RandomCrop(24, pad_if_needed=True),
        *NORMALIZED,
    ]
    for given in (ops, v2.Compose(ops)):
        prefetcher = prefetcher_of(numbered(FILES), transforms=given)
        ((images, _),) = prefetcher
        assert images.shape == (len(FILES), 3, 24, 24)
        (view,) = prefetcher.views
        assert len(view.head.names) == 4 and not view.tail


def test_a_batch_of_tensors_has_one_size():
    images = torch.zeros(3, 3, 20, 30, dtype=torch.uint8)
    shortest = v2.RandomShortestSize([8, 9, 10, 11])
    prefetcher = DataPrefetcher(
        [[EncodedImage(FILES[0], 0)]], transforms=[shortest, *NORMALIZED], device="cpu"
    )
    (fused,) = prefetcher.views[0].plan.transforms[:1]
    with pytest.raises(ValueError, match=r"put v2\.CenterCrop\(224\) after it"):
        fused(images.repeat(4, 1, 1, 1))


# --- the form of a result -----------------------------------------------------------------------


FIXED = [v2.Resize((24, 30)), v2.RandomHorizontalFlip()]
TAILS = {
    "none": [],
    "levels": [v2.ColorJitter(0.4), v2.RandomInvert(0.5)],
    "floats": [*TO_FLOAT, v2.RandomErasing(1.0), v2.Normalize(MEAN, STD)],
    "half": [v2.TrivialAugmentWide(), v2.ToImage(), v2.ToDtype(torch.half, scale=True)],
}


@pytest.mark.parametrize("name", TAILS)
@pytest.mark.parametrize("memory_format", [None, torch.channels_last])
def test_a_list_holds_what_a_stack_holds(name, memory_format):
    options = {"transforms": [*FIXED, *TAILS[name]], "memory_format": memory_format, "seed": 1}
    stacks = prefetcher_of(numbered(FILES), results="stack", **options)
    lists = prefetcher_of(numbered(FILES), results="list", **options)
    for (want, _), (got, _) in zip(stacks, lists, strict=True):
        assert isinstance(got, list)
        # ToUint8 rounds half to even, the launch away from zero.
        for one, other in zip(want, got, strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape
            tolerance = 1 if one.dtype == torch.uint8 else 1.01 / 255 / min(STD)
            assert (one.float() - other.float()).abs().max() <= tolerance
            if memory_format is torch.channels_last and name == "none":
                assert other.permute(1, 2, 0).is_contiguous()


@pytest.mark.parametrize("workers", [0, 1])
def test_results_are_views_of_one_buffer(workers):
    options = {"transforms": [v2.Resize(24), *NORMALIZED], "num_workers": workers}
    for images, numbers in prefetcher_of(numbered(FILES), batch_size=3, **options):
        assert len(images) == len(numbers)
        assert len({image.untyped_storage().data_ptr() for image in images}) == 1
        assert all(image.is_contiguous() for image in images)
        values = sum(image.numel() for image in images)
        assert images[0].untyped_storage().nbytes() < 4 * (values + 64 * len(images))


PADDED_TAILS = {
    "none": [],
    "a program": [v2.ColorJitter(0.4)],
    "normalized": NORMALIZED,
}


@pytest.mark.parametrize("memory_format", [None, torch.channels_last])
@pytest.mark.parametrize("name", PADDED_TAILS)
def test_a_padded_batch_holds_the_list(name, memory_format):
    ops = [v2.Resize(20, max_size=50), v2.RandomHorizontalFlip(), *PADDED_TAILS[name]]
    options = {"transforms": ops, "seed": 4, "memory_format": memory_format, "batch_size": 3}
    for results, multiple, fill in [("padded", 32, 0), (Padding(7, fill=9.0), 7, 9)]:
        lists = prefetcher_of(numbered(FILES), **options)
        padded = prefetcher_of(numbered(FILES), results=results, **options)
        for (images, _), (batch, _) in zip(lists, padded, strict=True):
            assert isinstance(batch, PaddedImages) and batch.images.dtype == images[0].dtype
            assert batch.sizes.tolist() == [[*image.shape[1:]] for image in images]
            largest = batch.sizes.max(0).values
            want = [-(-side // multiple) * multiple for side in largest.tolist()]
            assert [*batch.images.shape] == [len(images), 3, *want]
            for place, image in zip(batch.images, images, strict=True):
                height, width = image.shape[1:]
                assert torch.equal(place[:, :height, :width], image)
                assert bool((place[:, height:] == fill).all())
                assert bool((place[:, :, width:] == fill).all())
            if memory_format:
                assert batch.images.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("results", [Padding(8, fill=-3.5), Padding(8, fill=0.25)])
def test_the_fill_comes_after_ops_on_levels(results):
    """RandomInvert runs on uint8, which cannot hold the fill."""
    ops = [v2.Resize(12), v2.RandomInvert(1.0), *NORMALIZED]
    options = {"transforms": ops, "memory_format": torch.channels_last, "batch_size": 3}
    lists = prefetcher_of(numbered(FILES[:3]), **options)
    ((images, _),) = lists
    ((batch, _),) = prefetcher_of(numbered(FILES[:3]), results=results, **options)
    assert bool((batch.images[2, :, 12:] == results.fill).all())
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    for place, image in zip(batch.images, images, strict=True):
        assert torch.equal(place[:, : image.shape[1], : image.shape[2]], image)


FILLS = {
    "levels": (0.5, [v2.Resize(12)], {}, r"whole number of 0 to 255, Padding\(32, fill=127\)"),
    "no level": (-1, None, {"num_workers": 1}, "whole number of 0 to 255"),
    "after a function": (300, [v2.Resize(12), lambda images: images], {}, "whole number"),
    "half": (1e9, [gpuprefetch.Resize(12)], {"dtype": torch.half}, "one of at most 65504"),
}


@pytest.mark.parametrize("name", FILLS)
def test_a_fill_that_images_cannot_hold_is_refused(name):
    fill, ops, options, advice = FILLS[name]
    made = prefetcher_of(numbered(FILES[:2]), transforms=ops, results=Padding(fill=fill), **options)
    with pytest.raises(ValueError, match=advice):
        next(iter(made))
    if name == "levels":
        floats = [*ops, v2.ToDtype(torch.float32, scale=True)]
        ((batch, _),) = prefetcher_of(
            numbered(FILES[:2]), transforms=floats, results=Padding(fill=fill)
        )
        assert bool((batch.images[:, :, -1, -1] == fill).all())


def test_a_fill_is_one_number():
    with pytest.raises(ValueError, match=r"one number for all channels, got \(1, 2, 3\)"):
        Padding(fill=(1, 2, 3))


@pytest.mark.parametrize("memory_format", [None, torch.channels_last])
@pytest.mark.parametrize("erases", [False, True])
def test_a_padded_batch_keeps_its_memory_format(memory_format, erases):
    """Also where it is copied: after other ops, and with a bad file in it."""
    tail = [v2.RandomErasing(1.0)] if erases else []
    files = [FILES[0], FILES[1]] if erases else [FILES[0], b"none", FILES[1]]
    ((batch, _),) = prefetcher_of(
        numbered(files),
        transforms=[v2.Resize(12), *TO_FLOAT, *tail],
        results="padded",
        memory_format=memory_format,
        on_error="skip",
    )
    assert batch.images.is_contiguous(memory_format=memory_format or torch.contiguous_format)


SAME_ON_BATCH = {
    "ColorJitter": K.ColorJitter(0.8, 0.8, p=0.6, same_on_batch=True),
    "RandomPosterize": K.RandomPosterize((2.0, 7.0), p=0.6, same_on_batch=True),
    "a container": K.ImageSequential(K.RandomBrightness((0.3, 1.7), p=1.0), same_on_batch=True),
    "a part": K.ImageSequential(
        K.RandomBrightness((0.3, 1.7), p=0.6, same_on_batch=True),
        K.AugmentationSequential(K.RandomPosterize((2.0, 7.0), p=0.6, same_on_batch=True)),
    ),
}


@pytest.mark.parametrize("name", SAME_ON_BATCH)
def test_what_is_sampled_for_a_batch_is_so_for_a_list(name):
    ops = [gpuprefetch.Resize((9, 8)), SAME_ON_BATCH[name]]
    for seed in range(3):
        options = {"transforms": ops, "seed": seed}
        ((stack, _),) = prefetcher_of(numbered([FILES[0]] * 4), **options)
        ((images, _),) = prefetcher_of(numbered([FILES[0]] * 4), results="list", **options)
        assert all(torch.equal(image, images[0]) for image in images)
        assert torch.equal(stack[0], images[0])


@pytest.mark.parametrize("results", ["stack", "list"])
def test_parts_of_a_container_sample_for_a_batch_or_for_each_image(results):
    brightness = K.RandomBrightness((0.3, 1.7), p=1.0, same_on_batch=True)
    both = K.ImageSequential(brightness, K.RandomHorizontalFlip(p=0.5))
    options = {"transforms": [gpuprefetch.Resize((9, 8)), both], "results": results}
    means = set()
    for seed in range(3):
        ((images, _),) = prefetcher_of(numbered([FILES[0]] * 8), seed=seed, **options)
        turned = [image if torch.equal(image, images[0]) else image.flip(2) for image in images]
        assert all(torch.equal(image, images[0]) for image in turned)
        assert not all(torch.equal(image, images[0]) for image in images)
        means.add(images[0].mean().item())
    assert len(means) == 3


def test_a_choice_for_a_whole_batch_is_refused_for_a_list():
    flip = K.RandomHorizontalFlip(p=1.0, p_batch=0.5)
    ops = [gpuprefetch.Resize(9), v2.ColorJitter(0.4), flip]
    with pytest.raises(
        ValueError, match=r"v2\.RandomApply\(\[RandomHorizontalFlip\(\.\.\.\)\], p=0.5"
    ):
        next(iter(prefetcher_of(numbered(FILES[:2]), transforms=ops)))
    pictures = [(torch.rand(3, 12, 18), i) for i in range(4)]  # of one size
    ((images, _),) = prefetcher_of(pictures, transforms=ops)
    assert images.shape == (4, 3, 9, 13)
    ops[-1] = v2.RandomApply([K.RandomHorizontalFlip(p=1.0)], p=0.5)
    ((images, _),) = prefetcher_of(numbered(FILES[:2]), transforms=ops)
    assert [image.shape[1] for image in images] == [9, 9]


def test_a_padded_batch_in_an_epoch():
    files = [FILES[0], b"none", FILES[1], FILES[6]]
    options = {"transforms": [v2.Resize(20), *TO_FLOAT], "seed": 4}
    for workers in (0, 1):
        prefetcher = prefetcher_of(
            numbered(files), results="padded", on_error="skip", num_workers=workers, **options
        )
        ((batch, numbers),) = prefetcher
        (images,) = prefetcher_of(numbered(files), on_error="skip", **options)
        assert numbers.tolist() == [0, 2, 3] and len(batch.images) == len(batch.sizes) == 3
        for place, size, image in zip(batch.images, batch.sizes, images[0], strict=True):
            height, width = size.tolist()
            assert torch.equal(place[:, :height, :width], image)
    replayed, _ = prefetcher.replay(2)
    assert torch.equal(replayed.images[0, :, :20, : replayed.sizes[0, 1]], images[0][1])
    with pytest.raises(ValueError, match=r"Padding\(multiple=...\) takes 1 or more, got 0"):
        Padding(0)


def test_what_was_asked_for_counts():
    alike = [encode(draw(30, 40, seed=seed), "PNG") for seed in range(3)]
    resize = [v2.Resize(20)]
    flip = [v2.RandomHorizontalFlip()]
    assert isinstance(preprocess(alike, resize, device="cpu"), list)
    assert preprocess(alike, flip, device="cpu").shape == (3, 3, 30, 40)
    ((stacked, _),) = prefetcher_of(numbered(alike), transforms=resize, results="stack")
    assert stacked.shape == (3, 3, 20, 26)
    ((listed, _),) = prefetcher_of(numbered(FILES), transforms=flip, results="list")
    assert [tuple(image.shape[1:]) for image in listed] == SHAPES
    with pytest.raises(RuntimeError, match=r'equal size.*results="list"'):
        list(prefetcher_of(numbered(FILES), transforms=resize, results="stack"))
    with pytest.raises(
        ValueError, match=r"results is one of \"stack\", \"list\", \"padded\".* got 'batch'"
    ):
        prefetcher_of([], results="batch")


def test_a_form_is_for_decoded_images_alone_too():
    for workers in (0, 1):
        options = {"num_workers": workers, "batch_size": len(FILES)}
        ((listed, _),) = prefetcher_of(numbered(FILES), results="list", **options)
        ((padded, _),) = prefetcher_of(numbered(FILES), results="padded", **options)
        for file, image, place in zip(FILES, listed, padded.images, strict=True):
            assert image.dtype == place.dtype == torch.uint8
            assert torch.equal(image, picture(file))
            assert torch.equal(place[:, : image.shape[1], : image.shape[2]], image)
        ((halves, _),) = prefetcher_of(numbered(FILES), results="list", dtype=torch.half, **options)
        assert torch.equal(halves[0], (listed[0].float() / 255).half())
    with pytest.raises(RuntimeError, match="equal size"):
        list(prefetcher_of(numbered(FILES), results="stack"))


@pytest.mark.parametrize("flip", [False, True])
def test_images_that_come_as_tensors_have_the_form(flip):
    tensors = torch.rand(4, 3, 5, 6)
    want = tensors.flip(-1) if flip else tensors
    transforms = [v2.RandomHorizontalFlip(1.0)] if flip else None

    def batch(results):
        (made,) = DataPrefetcher([tensors], transforms=transforms, results=results, device="cpu")
        return made

    assert torch.equal(batch("stack"), want)
    listed = batch("list")
    assert isinstance(listed, list) and torch.equal(torch.stack(listed), want)
    images, sizes = batch(gpuprefetch.Padding(8, 0.5))
    assert images.shape == (4, 3, 8, 8) and sizes.tolist() == [[5, 6]] * 4
    assert torch.equal(images[:, :, :5, :6], want) and (images[:, :, 5:] == 0.5).all()
    with pytest.raises(ValueError, match="for images"):
        list(DataPrefetcher([[tensors[0]]], results="padded", device="cpu"))


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("decoder", ["cpu", None])
def test_pictures_are_turned_before_they_get_a_size(decoder):
    if decoder is None and torch.cuda.is_available():
        pytest.skip("Triton compiles there")
    files = [encode_jpeg(draw(16, 40, seed=n), orientation=n, quality=95) for n in (1, 3, 6, 8)]
    ops = [v2.Resize(12), v2.RandomHorizontalFlip(1.0), *TO_FLOAT]
    ((images, _),) = prefetcher_of(
        numbered(files),
        transforms=ops,
        apply_exif=True,
        cpu_share=0.0,
        decoder=decoder or OnTheCpu(),
    )
    for file, got in zip(files, images, strict=True):
        turned = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))
        want = F.pil_to_tensor(F.resize(turned, [12])).flip(2) / 255
        assert got.shape == want.shape
        assert (got - want).abs().max() <= 1.1 / 255


def twice(images):
    return torch.cat([images, images])


def gray(images):
    return images.float().mean(1)


@pytest.mark.parametrize("function", [twice, gray])
def test_a_function_that_gives_no_batch_of_one_is_told_how_it_is_called(function):
    with pytest.raises(ValueError, match=r"returned .* each is transformed alone"):
        preprocess(FILES, [v2.Resize(24), function], device="cpu")


def test_a_function_gets_each_image_alone():
    seen = []
    preprocess(FILES, [v2.Resize(24), lambda x: seen.append(x.shape[0]) or x], device="cpu")
    assert seen == [1] * len(FILES)


def test_each_image_samples_its_own_policy():
    one = [FILES[0]] * 6
    results = preprocess(
        [EncodedImage(file, i) for i, file in enumerate(one)],
        [v2.Resize(24), v2.ColorJitter(0.9)],
        device="cpu",
    )
    assert len({tuple(image.flatten().tolist()) for image in results}) == 6


# --- in an epoch --------------------------------------------------------------------------------


DETECTION = [v2.RandomShortestSize([20, 24, 28], 60), v2.RandomHorizontalFlip(), *TO_FLOAT]


class Stream(torch.utils.data.IterableDataset):
    """These samples, without the keys of a sampler."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


def equal(some, others):
    return len(some) == len(others) and all(map(torch.equal, some, others))


def test_bad_files_are_left_out_or_replaced():
    files = [FILES[0], b"none", FILES[1], FILES[7][:500], FILES[3]]
    options = {"transforms": DETECTION, "seed": 0}
    for ops in (DETECTION, [*DETECTION, v2.ColorJitter(0.3)]):
        options["transforms"] = ops
        (skipped,) = prefetcher_of(numbered(files), on_error="skip", **options)
        assert skipped[1].tolist() == [0, 2, 4] and len(skipped[0]) == 3
        (replaced,) = prefetcher_of(numbered(files), on_error="replace", **options)
        assert len(replaced[0]) == 5 and equal(replaced[0][::2], skipped[0])
        good = [image for i, image in enumerate(numbered(files)) if i in (0, 2, 4)]
        ((alone, _),) = prefetcher_of(Stream(good), **options)
        assert equal(alone, skipped[0])
        with pytest.raises(gpuprefetch.BadImageError):
            list(prefetcher_of(numbered(files), **options))
    with pytest.warns(UserWarning, match="left out all 2 images"):
        with pytest.raises(gpuprefetch.BadImageError):
            list(prefetcher_of(numbered([b"a", b"b"]), on_error="skip", **options))


@pytest.mark.parametrize("transforms", [DETECTION, None])
def test_a_replacement_shares_no_memory_with_what_it_stands_for(transforms):
    """A loop may change any image, array or target of a batch in place."""
    files = [FILES[0], b"none", FILES[7][:500], FILES[3]]
    samples = [
        (image, {"area": torch.tensor([float(number)]), "sizes": np.array([number]), "tags": ["a"]})
        for image, number in numbered(files)
    ]
    options = {"on_error": "replace", "collate_fn": zipped, "transforms": transforms}
    ((images, targets),) = prefetcher_of(samples, **options)
    assert equal(images[1:3], [images[3]] * 2)
    assert [target["area"].item() for target in targets] == [0, 3, 3, 3]
    kept = [image.clone() for image in images]
    for image, target in zip(images, targets, strict=True):
        image += 1
        target["area"] += 1
        target["sizes"] += 1
        target["tags"].append("b")
    assert equal(images, [image + 1 for image in kept])
    assert [target["area"].item() for target in targets] == [1, 4, 4, 4]
    assert [target["sizes"].item() for target in targets] == [1, 4, 4, 4]
    assert [target["tags"] for target in targets] == [["a", "b"]] * 4


def test_a_damaged_header_costs_no_memory():
    """A picture of 40,000 x 40,000 pixels would need 19 GB in a list of floats."""
    png = FILES[0]
    size = png.index(b"IHDR") + 4
    chunk = b"IHDR" + (40000).to_bytes(4, "big") * 2 + png[size + 8 : size + 13]
    lies = png[: size - 4] + chunk + zlib.crc32(chunk).to_bytes(4, "big") + png[size + 17 :]
    files = [FILES[1], lies, FILES[6]]
    for workers in (0, 1):
        options = {"num_workers": workers, "on_error": "skip", "results": "list"}
        ((images, numbers),) = prefetcher_of(numbered(files), transforms=[*TO_FLOAT], **options)
        assert numbers.tolist() == [0, 2]
        assert equal(images, [picture(files[i]) / 255 for i in (0, 2)])


@pytest.mark.parametrize("ops", [DETECTION, [*DETECTION, v2.ColorJitter(0.3)]])
def test_an_epoch_goes_on_and_is_replayed(ops):
    prefetcher = prefetcher_of(numbered(FILES), batch_size=3, shuffle=True, transforms=ops)
    batches = iter(prefetcher)
    first, numbers = next(batches)
    replayed, number = prefetcher.replay(int(numbers[1]))
    assert equal(replayed, first[1:2]) and number.tolist() == numbers[1:2].tolist()
    state = prefetcher.state_dict()
    rest = [image for images, _ in batches for image in images]
    prefetcher.load_state_dict(state)
    assert equal([image for images, _ in prefetcher for image in images], rest)


def test_views_of_their_own_sizes():
    lists = Views(DETECTION, [v2.CenterCrop(8)], [v2.Resize(16)])
    for workers in (0, 1):
        ((views, _),) = prefetcher_of(
            numbered(FILES), transforms=lists, num_workers=workers, seed=5
        )
        assert isinstance(views[0], list) and views[1].shape == (len(FILES), 3, 8, 8)
        alone = prefetcher_of(numbered(FILES), transforms=DETECTION, seed=5)
        assert equal(views[0], next(iter(alone))[0])
        for file, got in zip(FILES, views[2], strict=True):
            assert (got.float() - resized(file, got, v2.Resize(16))).abs().max() <= LEVEL


def test_the_budget_counts_the_buffer():
    sizes = [v2.Resize(24)(picture(file)).shape for file in FILES]
    need = sum(3 * height * width for _, height, width in sizes)
    options = {"transforms": [v2.Resize(24), *TO_FLOAT]}
    with pytest.raises(ValueError, match=r"a batch needs .* on the device until it is handed over"):
        list(prefetcher_of(numbered(FILES), memory_budget=3 * need, **options))
    assert len(list(prefetcher_of(numbered(FILES), memory_budget=6 * need, **options))) == 1


# --- pipelines that are moved -------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("own_sizes")
    for number, file in enumerate(FILES):
        path = root / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(file)
    return root


MOVED = {
    "resize": [v2.Resize(20), *NORMALIZED],
    "v1": v1.Compose([v1.Resize(20), v1.ToTensor(), v1.Normalize(MEAN, STD)]),
    "their own": [v2.RandomHorizontalFlip(1.0), *TO_FLOAT],
    "levels": [v2.Resize(20), v2.PILToTensor()],
}


@pytest.mark.parametrize("keep_unknown", [False, True])
@pytest.mark.parametrize("name", MOVED)
def test_a_collate_function_gets_images_of_their_own_sizes(folder, name, keep_unknown):
    ops = MOVED[name]
    pipeline = v2.Compose(ops) if isinstance(ops, list) else ops
    loader = DataLoader(ImageFolder(str(folder), pipeline), 3, collate_fn=zipped)
    moved = gpuprefetch.accelerate(
        loader, device="cpu", print_plan=False, keep_unknown=keep_unknown
    )
    assert moved.decodes_files
    for (want, numbers), (got, targets) in zip(loader, moved, strict=True):
        assert targets == numbers and len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape
            level = 1.01 if one.dtype == torch.uint8 else 1.01 / 255 / min(STD)
            assert (one.float() - other.float()).abs().max() <= level


def test_torchs_collate_function_stacks(folder):
    pipeline = v2.Compose(MOVED["resize"])
    loader = DataLoader(ImageFolder(str(folder), pipeline), 3)
    with pytest.raises(RuntimeError, match="equal size"):
        list(loader)
    with pytest.raises(RuntimeError, match=r'equal size.*results="list"'):
        list(gpuprefetch.accelerate(loader, device="cpu", print_plan=False))
    options = {"device": "cpu", "print_plan": False}
    (images, _), *_ = gpuprefetch.accelerate(loader, results="list", **options)
    assert isinstance(images, list)
    (padded, _), *_ = gpuprefetch.accelerate(loader, results="padded", **options)
    assert padded.sizes.tolist() == [[*image.shape[1:]] for image in images]


class Near:
    """A class that gives two pictures of one, each in a place of its own."""

    def __init__(self):
        self.small = v2.Compose([v2.Resize(20), *TO_FLOAT])
        self.large = v2.Compose([v2.Resize(30), *TO_FLOAT])

    def __call__(self, picture):
        return {"small": self.small(picture), "large": self.large(picture)}


def test_each_view_in_its_place_has_the_form(folder):
    loader = DataLoader(ImageFolder(str(folder), Near()), 3)
    options = {"device": "cpu", "print_plan": False}
    (lists, _), *_ = gpuprefetch.accelerate(loader, results="list", **options)
    (padded, _), *_ = gpuprefetch.accelerate(loader, results="padded", **options)
    for name, side in (("small", 20), ("large", 30)):
        images = lists[name]
        assert type(images) is list and isinstance(padded[name], PaddedImages)
        assert padded[name].sizes.tolist() == [[*image.shape[1:]] for image in images]
        assert {min(image.shape[1:]) for image in images} == {side}
        for place, image in zip(padded[name].images, images, strict=True):
            assert torch.equal(place[:, : image.shape[1], : image.shape[2]], image)


def test_parity_follows_what_was_sampled(folder):
    fill = {Image.Image: 9, tv_tensors.Image: 9, "others": 9}
    pipelines = [
        [v2.RandomShortestSize([20, 24], 600), v2.RandomHorizontalFlip()],
        [v2.RandomResize(20, 31), v2.RandomCrop(24, pad_if_needed=True, fill=fill)],
        [v2.RandomCrop(30, padding=2, pad_if_needed=True, fill=(1, 2, 3))],
        [v2.RandomZoomOut(fill=(1, 2, 3), p=0.8), v2.RandomHorizontalFlip()],
    ]
    for ops in pipelines:
        pipeline = v2.Compose([*ops, *TO_FLOAT])
        loader = DataLoader(ImageFolder(str(folder), pipeline), 3, collate_fn=zipped)
        report = gpuprefetch.parity(loader, 8, device="cpu")
        assert max(worst for _, _, worst in report.worst) <= LEVEL


def test_a_plan_names_the_ops(folder):
    ops = [v2.RandomShortestSize([20, 24], 60), v2.RandomHorizontalFlip(), *NORMALIZED]
    loader = DataLoader(ImageFolder(str(folder), v2.Compose(ops)), 3, collate_fn=zipped)
    moved = gpuprefetch.accelerate(loader, device="cpu", print_plan=False)
    assert [(step.name, step.where) for step in moved.plan.steps] == [
        ("RandomShortestSize", "fused launch"),
        ("RandomHorizontalFlip", "fused launch"),
        ("ToImage", "nothing to do"),
        ("ToDtype", "fused launch"),
        ("Normalize", "fused launch"),
    ]
    text = gpuprefetch.explain(ops)
    assert "RandomShortestSize, RandomHorizontalFlip, Normalize" in text
    assert "each of its own size" in text


# --- on the way of a GPU ------------------------------------------------------------------------


JPEGS = [
    encode_jpeg(draw(*shape, seed=seed), quality=95)
    for seed, shape in enumerate([(16, 24), (9, 40), (17, 8)])
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles: the GPU's test does it")
@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("how", ["one launch", "apart", "in parts", "with workers", "in views"])
def test_a_launch_writes_results_of_their_own_sizes(how):
    ops = [v2.Resize(12), v2.RandomHorizontalFlip(1.0), *NORMALIZED]
    transforms = Views(ops, [v2.CenterCrop(8)]) if how == "in views" else ops
    decoder = OnTheCpu(refused=how == "apart")
    options = {"transforms": transforms, "cpu_share": 0.4 if "with" in how else 0.0}
    if how == "in parts":
        options["memory_budget"] = 3 * 12 * 4 * (18 + 53 + 25) + 2000
    ((got, _),) = prefetcher_of(numbered(JPEGS), decoder=decoder, **options)
    if how == "in views":
        got, crops = got
        assert crops.shape == (3, 3, 8, 8)
    head = DataPrefetcher([], transforms=ops, device="cpu").views[0].head
    rounds = how in ("with workers", "in views")  # a worker finishes some
    for file, one in zip(JPEGS, got, strict=True):
        picture = decode_cpu(torch.frombuffer(bytearray(file), dtype=torch.uint8))
        sampling = head.sample([picture.shape[1:]], np.array([0], np.uint64))
        (size,) = sampling.length.astype(int).tolist()
        (twin,) = head.resample([picture], sampling.rows(), tuple(size))
        assert one.shape == twin.shape
        assert (one - twin).abs().max() <= (LEVEL if rounds else 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [None, "2MB"])
@pytest.mark.parametrize("decoder", ["cpu", "auto"])
def test_a_gpu_makes_the_same_of_pictures_of_their_own_sizes(decoder, budget):
    files = [encode_jpeg(draw(60 + 9 * i, 200 - 7 * i, seed=i)) for i in range(16)]
    ops = [v2.RandomShortestSize([90, 100], 200), v2.RandomHorizontalFlip(), *NORMALIZED]
    options = {"transforms": ops, "seed": 0, "memory_budget": budget, "decoder": decoder}
    made = prefetcher_of(numbered(files), "cuda", **options)
    pictures = files
    if decoder == "auto":  # what the GPU's decoder makes of the files, as files without loss
        decoded = prefetcher_of(numbered(files), "cuda", batch_size=16)
        ((images, _),) = decoded
        pictures = [encode(image.permute(1, 2, 0).cpu().numpy(), "PNG") for image in images]
    want = prefetcher_of(numbered(pictures), transforms=ops, seed=0)
    for (got, _), (images, _) in zip(made, want, strict=True):
        for one, other in zip(got, images, strict=True):
            assert one.is_cuda and one.shape == other.shape
            # Workers resize pictures without loss themselves, and round to uint8.
            assert (one.cpu() - other).abs().max() <= (1e-5 if decoder == "cpu" else LEVEL)


# --- boxes, masks and points --------------------------------------------------------------------


class Annotated(torch.utils.data.Dataset):
    """Pictures with boxes, a mask and points."""

    def __len__(self):
        return len(SHAPES)

    def __getitem__(self, index):
        height, width = SHAPES[index]
        generator = torch.Generator().manual_seed(index)
        corners = torch.rand(3, 2, 2, generator=generator).sort(1).values
        corners *= torch.tensor([width, height])
        options = {"canvas_size": (height, width)}
        return EncodedImage(FILES[index], index), {
            "boxes": tv_tensors.BoundingBoxes(corners.reshape(3, 4), format="XYXY", **options),
            "points": tv_tensors.KeyPoints(corners[:, 0].clone(), **options),
            "masks": tv_tensors.Mask(torch.rand(1, height, width, generator=generator) * 255),
            "labels": torch.arange(3),
        }


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["both", "RandomShortestSize", "RandomResize", "ScaleJitter"])
def test_targets_follow_images_of_their_own_sizes(name, workers):
    dataset = Annotated()
    loader = DataLoader(dataset, 4, collate_fn=zipped, num_workers=workers)
    seen = 0
    for images, targets in DataPrefetcher(loader, transforms=[RESIZES[name]], device="cpu"):
        for image, got in zip(images, targets, strict=True):
            want = dataset[seen][1]
            seen += 1
            size = [*image.shape[1:]]
            for key in ("boxes", "points"):
                moved = F.resize(want[key], size)
                assert got[key].canvas_size == moved.canvas_size == tuple(size)
                torch.testing.assert_close(
                    torch.Tensor(got[key]), torch.Tensor(moved), atol=1e-4, rtol=1e-6
                )
            # The pixel at the center of an output pixel; torchvision's own masks take another.
            mask = torch.Tensor(want["masks"])
            for dim, (length, old) in enumerate(zip(size, SHAPES[seen - 1], strict=True), 1):
                mask = mask.index_select(dim, (2 * torch.arange(length) + 1) * old // (2 * length))
            assert torch.equal(torch.Tensor(got["masks"]), mask)
            assert torch.equal(got["labels"], want["labels"])
    assert seen == len(dataset)


COLORS = {
    "one": (127, 127, (127, 127, 127)),
    "by kind": ({tv_tensors.Image: (124, 116, 104), tv_tensors.Mask: 255}, 255, (124, 116, 104)),
    "others": ({tv_tensors.Mask: 255, "others": 0}, 255, (0, 0, 0)),
}


@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("name", COLORS)
def test_a_crop_pads_with_a_color(name, floats):
    """Large-scale jitter: the picture that its points tell, and the color around it."""
    fill, of_masks, color = COLORS[name]
    loader = DataLoader(Annotated(), 8, collate_fn=zipped)
    crop = v2.RandomCrop((50, 47), pad_if_needed=True, fill=fill)
    ops = [v2.ScaleJitter((48, 48), (0.5, 1.5)), crop, v2.RandomHorizontalFlip(), *TO_FLOAT]
    ((images, targets),) = DataPrefetcher(
        loader, transforms=ops if floats else ops[:3], device="cpu", seed=1
    )
    assert images.shape == (8, 3, 50, 47)
    levels = images.float() * (255 if floats else 1)
    padded = 0
    for image, target in zip(levels, targets, strict=True):
        mask = target["masks"]
        assert mask.shape == (1, 50, 47)
        around = (image.round() == torch.tensor(color)[:, None, None]).all(0)
        if of_masks != 0:
            outside = mask[0] == of_masks
            assert bool(around[outside].all())
            padded += bool(outside.any())
    assert padded > 3 or not of_masks


SAMPLED = {
    "multiscale": [v2.RandomShortestSize([24, 28, 32], 60), v2.RandomHorizontalFlip()],
    "lsj": [
        v2.ScaleJitter((40, 40), (0.1, 2.0)),
        v2.RandomCrop(40, pad_if_needed=True, fill={tv_tensors.Mask: 255, "others": 0}),
        v2.RandomHorizontalFlip(),
    ],
    "zoomed out": [v2.RandomZoomOut((7, 8, 9), p=0.7), v2.RandomHorizontalFlip()],
    "segmentation": [
        v2.RandomResize(20, 80),
        v2.RandomHorizontalFlip(),
        v2.RandomCrop(40, pad_if_needed=True, fill={tv_tensors.Mask: 255, "others": 0}),
    ],
}


@pytest.mark.parametrize("name", SAMPLED)
def test_targets_of_80_samples_are_those_of_torchvision(name):
    """The points of two corners tell what was sampled, and torchvision's functions do the same."""
    samples = [Framed(40, 66)[i % 10] for i in range(80)]
    for _, target in samples:
        height, width = target["boxes"].canvas_size
        corners = torch.tensor([[0.0, 0.0], [width, height]])
        target["corners"] = tv_tensors.KeyPoints(corners, canvas_size=(height, width))
    loader = DataLoader(samples, 20, collate_fn=zipped)
    moved = DataPrefetcher(loader, transforms=SAMPLED[name], device="cpu", seed=8)
    given = iter(samples)
    seen = set()
    for images, targets in moved:
        for image, got in zip(images, targets, strict=True):
            target = next(given)[1]
            (left, top), (right, bottom) = got["corners"].tolist()
            flipped = right < left
            height, width = image.shape[1:]
            if flipped:
                left, right = width - left, width - right
            size = [round(bottom - top), round(right - left)]
            want = F.resize(target["boxes"], size)
            want = F.crop(want, round(-top), round(-left), height, width)
            want = F.horizontal_flip(want) if flipped else want
            assert got["boxes"].canvas_size == want.canvas_size == (height, width)
            torch.testing.assert_close(
                torch.Tensor(got["boxes"]), torch.Tensor(want), atol=2e-4, rtol=0
            )
            seen.add((*size, flipped, round(left), round(top)))
    assert len(seen) > 20


def test_masks_have_no_color_of_pictures():
    loader = DataLoader(Annotated(), 8, collate_fn=zipped)
    crop = v2.RandomCrop(90, pad_if_needed=True, fill=(124, 116, 104))
    with pytest.raises(ValueError, match=r"Write fill=\{tv_tensors\.Image: .*Mask: 0\}\."):
        list(DataPrefetcher(loader, transforms=[crop], device="cpu"))
    advised = {tv_tensors.Image: (124, 116, 104), tv_tensors.Mask: 0}
    crop = v2.RandomCrop(90, pad_if_needed=True, fill=advised)
    assert len(list(DataPrefetcher(loader, transforms=[crop], device="cpu"))) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_padding_is_torchvisions(workers):
    """A crop that leaves nothing to chance."""
    files = [encode_jpeg(draw(20, 30, seed=seed)) for seed in range(2)]
    crop = v2.RandomCrop((20, 30), padding=0, fill=(9, 200, 77))
    center = v2.Compose([v2.Pad(3, fill=(9, 200, 77))])
    loader = DataLoader(numbered(files), 2, num_workers=workers)
    ((same, _),) = DataPrefetcher(loader, transforms=[crop], device="cpu")
    ((wide, _),) = DataPrefetcher(
        loader,
        transforms=[v2.RandomCrop((26, 36), padding=3, fill=(9, 200, 77))],
        device="cpu",
    )
    for file, one, other in zip(files, same, wide, strict=True):
        want = picture(file)
        assert torch.equal(one, want)
        assert torch.equal(other, center(want))


SSD = [
    v2.RandomPhotometricDistort(),
    v2.RandomZoomOut(fill={tv_tensors.Image: (123.0, 117.0, 104.0), "others": 0}),
    v2.RandomIoUCrop(),
    v2.RandomHorizontalFlip(),
    *TO_FLOAT,
    v2.SanitizeBoundingBoxes(),
]
PRESETS = {
    "hflip": [v2.RandomHorizontalFlip(), *TO_FLOAT],
    "multiscale": [
        v2.RandomShortestSize([24, 28, 32], 60),
        v2.RandomHorizontalFlip(),
        *TO_FLOAT,
        v2.SanitizeBoundingBoxes(),
    ],
    "ssd": SSD,
    "ssdlite": SSD[2:],
    "zoomed out of a part": [v2.RandomIoUCrop(), v2.RandomZoomOut(p=1.0), *SSD[3:]],
    "resized after a zoom": [SSD[1], v2.RandomShortestSize([24, 30], 70), *SSD[3:]],
}


@pytest.mark.parametrize("name", PRESETS)
def test_detection_presets_move(name):
    """Each sample is what its ops give alone, and its boxes are where its picture shows them."""
    samples = [Framed(40, 90)[i] for i in range(8)]
    results = []
    for size in (8, 3):
        loader = DataLoader(samples, size, collate_fn=zipped)
        prefetcher = DataPrefetcher(
            loader, transforms=PRESETS[name], results="list", device="cpu", seed=2
        )
        pairs = [pair for batch in prefetcher for pair in zip(*batch, strict=True)]
        results.append(pairs)
        shapes = set()
        for image, target in pairs:
            shapes.add(image.shape)
            assert image.dtype == torch.float32 and image.dim() == 3
            boxes = target["boxes"]
            assert boxes.canvas_size == image.shape[1:]
            assert len(boxes) == len(target["labels"])
            for left, top, right, bottom in boxes.round().int().tolist():
                if min(right - left, bottom - top) > 4:  # inside the frame is white, around it not
                    inner = image[:, top + 2 : bottom - 2, left + 2 : right - 2]
                    assert inner.mean() > 0.6 or "ssd" in name
        assert len(shapes) > 3
    for (image, target), (other, same) in zip(*results, strict=True):
        assert torch.equal(image, other) and torch.equal(target["boxes"], same["boxes"])


class Framed:
    """Black pictures with a white box, each of another size."""

    def __init__(self, height, width):
        self.size = height, width

    def __getitem__(self, index):
        height, width = self.size[0] + 7 * index, max(self.size[1] - 5 * index, 40)
        pixels = np.zeros((height, width, 3), np.uint8)
        box = [8 + index, 6, width - 20, height - 9]
        pixels[box[1] : box[3], box[0] : box[2]] = 255
        corners = torch.tensor([box], dtype=torch.float32)
        boxes = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=(height, width))
        target = {"boxes": boxes, "labels": torch.tensor([index])}
        return EncodedImage(encode(pixels, "PNG"), index), target


# --- A part among the boxes ---------------------------------------------------------------------


class Crowded:
    """Pictures with several boxes in one of three formats, a mask and points."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        height, width = rng.integers(40, 70, 2).tolist()
        starts = rng.integers(0, 30, (4, 2))
        ends = np.minimum(starts + rng.integers(3, 45, (4, 2)), (width, height))
        corners = np.concatenate([starts, ends], axis=1)
        formats = ("XYXY", "XYWH", "CXCYWH")
        boxes = F.convert_bounding_box_format(
            torch.from_numpy(corners).float(),
            XYXY,
            tv_tensors.BoundingBoxFormat(formats[index % 3]),
        )
        canvas = (height, width)
        target = {
            "boxes": tv_tensors.BoundingBoxes(boxes, format=formats[index % 3], canvas_size=canvas),
            "mask": tv_tensors.Mask(torch.from_numpy(rng.integers(0, 9, (1, height, width)))),
            "points": tv_tensors.KeyPoints(torch.from_numpy(starts).float(), canvas_size=canvas),
            "labels": torch.arange(4) + 10 * index,
        }
        return EncodedImage(encode(draw(height, width, seed=index), "PNG"), index), target


XYXY = tv_tensors.BoundingBoxFormat.XYXY
AMONG = {
    "alone": ([v2.RandomIoUCrop()], []),
    "ssdlite": ([v2.RandomIoUCrop(), v2.RandomHorizontalFlip(1.0)], [F.horizontal_flip]),
    "flipped before": ([v2.RandomVerticalFlip(1.0), v2.RandomIoUCrop()], []),
    "twice": ([v2.RandomIoUCrop(), v2.RandomIoUCrop(0.5)], []),
}


@pytest.mark.parametrize("name", AMONG)
def test_a_part_among_boxes_is_torchvisions(name, monkeypatch):
    """With what torchvision chose, its own functions give the same picture and targets."""
    ops, after = AMONG[name]
    chosen = []
    choose = v2.RandomIoUCrop.make_params

    def noted(op, inputs):
        chosen.append(choose(op, inputs))
        return chosen[-1]

    monkeypatch.setattr(v2.RandomIoUCrop, "make_params", noted)
    dataset = Crowded(24)
    loader = DataLoader(dataset, len(dataset), collate_fn=zipped)
    prefetcher = DataPrefetcher(loader, transforms=ops, device="cpu", seed=3)
    ((images, targets),) = prefetcher
    crops = [op for op in ops if isinstance(op, v2.RandomIoUCrop)]
    assert len(chosen) == len(crops) * len(dataset)
    params = [chosen[n :: len(dataset)] for n in range(len(dataset))]
    parts = 0
    degenerate = 0
    for index, (image, got) in enumerate(zip(images, targets, strict=True)):
        encoded, want = dataset[index]
        values = [tv_tensors.Image(picture(encoded.data)), want["boxes"], want["mask"]]
        if name == "flipped before":
            values = [F.vertical_flip(value) for value in values]
        for crop, own in zip(crops, params[index], strict=True):
            values = [crop.transform(value, own) for value in values]
        for function in after:
            values = [function(value) for value in values]
        assert torch.equal(image, values[0])
        assert got["boxes"].format == want["boxes"].format
        assert got["boxes"].canvas_size == tuple(image.shape[1:]) == values[1].canvas_size
        assert torch.equal(got["boxes"], values[1])
        assert torch.equal(got["mask"], values[2])
        assert torch.equal(got["labels"], want["labels"])
        parts += any(params[index])
        areas = F.convert_bounding_box_format(values[1], new_format=XYXY)
        degenerate += int((areas[:, 2:] == areas[:, :2]).all(1).sum())
    assert 8 < parts < 24 and degenerate > 6


@pytest.mark.parametrize("workers", [0, 1])
def test_a_part_among_boxes_is_known_before_the_decode(workers):
    ops = [v2.RandomIoUCrop(), v2.RandomHorizontalFlip(), *TO_FLOAT, v2.SanitizeBoundingBoxes()]
    results = []
    for size, given in ((10, ops), (4, v2.Compose(ops))):
        loader = DataLoader(Crowded(10), size, collate_fn=zipped, num_workers=workers)
        prefetcher = DataPrefetcher(loader, transforms=given, device="cpu", seed=4)
        (view,) = prefetcher._pipeline.views
        fused = [step.name for step in view.plan.steps if step.where == "fused launch"]
        assert fused == ["RandomIoUCrop", "RandomHorizontalFlip", "ToDtype"]
        results.append([pair for batch in prefetcher for pair in zip(*batch, strict=True)])
    for (image, target), (other, same) in zip(*results, strict=True):
        assert torch.equal(image, other) and torch.equal(target["boxes"], same["boxes"])
        boxes = F.convert_bounding_box_format(target["boxes"], new_format=XYXY)
        assert len(boxes) == len(target["labels"]) <= 4
        assert (boxes[:, 2:] > boxes[:, :2]).all()
    assert len({image.shape for image, _ in results[0]}) > 5


def test_a_part_among_boxes_is_resized():
    loader = DataLoader(Crowded(8), 8, collate_fn=zipped)
    ops = [v2.RandomIoUCrop(), v2.Resize((20, 24)), *TO_FLOAT]
    ((images, targets),) = DataPrefetcher(loader, transforms=ops, device="cpu")
    assert images.shape == (8, 3, 20, 24)
    assert all(target["boxes"].canvas_size == (20, 24) for target in targets)


def test_a_part_among_boxes_needs_some():
    files = [encode(draw(40, 50), "PNG")] * 2
    ops = [v2.RandomIoUCrop(), *TO_FLOAT]
    with pytest.raises(ValueError, match=r"without: .*sample 0 .*\)\. Return") as caught:
        next(iter(DataPrefetcher(DataLoader(numbered(files), 2), transforms=ops, device="cpu")))
    (line,) = re.findall(r"none: (BoundingBoxes\(.*\))\.", str(caught.value))
    names = {"torch": torch, "BoundingBoxes": tv_tensors.BoundingBoxes, "height": 40, "width": 50}
    samples = [(EncodedImage(file, n), eval(line, names)) for n, file in enumerate(files)]
    loader = DataLoader(samples, 2, collate_fn=zipped)
    ((images, boxes),) = DataPrefetcher(loader, transforms=ops, device="cpu")
    assert [image.shape for image in images] == [(3, 40, 50)] * 2
    assert all(each.shape == (0, 4) for each in boxes)
    mixed = DataLoader([samples[0], (samples[1][0], torch.zeros(2))], 2, collate_fn=zipped)
    with pytest.raises(ValueError, match=r"came without: .*sample 1"):
        list(DataPrefetcher(mixed, transforms=ops, device="cpu"))


def test_a_bad_file_has_no_part_among_boxes():
    samples = [Crowded(3)[n] for n in range(3)]
    samples[1] = (EncodedImage(b"no picture", 1), samples[1][1])
    loader = DataLoader(samples, 3, collate_fn=zipped)
    ops = [v2.RandomIoUCrop(), *TO_FLOAT]
    skipping = DataPrefetcher(loader, transforms=ops, device="cpu", on_error="skip", seed=1)
    ((images, targets),) = skipping
    assert len(images) == len(targets) == 2
    assert [int(target["labels"][0]) for target in targets] == [0, 20]
    samples[1] = Crowded(3)[1]
    ((same, _),) = DataPrefetcher(loader, transforms=ops, device="cpu", seed=1)
    assert torch.equal(images[0], same[0]) and torch.equal(images[1], same[2])
    assert DataPrefetcher(loader, transforms=ops, device="cpu").preview(2).info["titles"]


CUT = {
    "zoomed out": (
        [v2.CenterCrop((24, 31)), v2.RandomZoomOut(p=1.0, side_range=(2.0, 2.0))],
        ([10, 20, 35, 50], [24, 31]),
    ),
    "flipped, and in a letterbox": (
        [K.CenterCrop((24, 32)), K.RandomHorizontalFlip(1.0), gpuprefetch.Letterbox(64)],
        ([-3, 20, 35, 50], [24, 32]),
    ),
}


@pytest.mark.parametrize("name", CUT)
def test_a_box_ends_where_its_crop_ends_if_padding_follows(name):
    ops, (box, crop) = CUT[name]
    height, width = 40, 70
    corners = torch.tensor([box, [0, 0, width, height]], dtype=torch.float32)
    boxes = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=(height, width))
    free = tv_tensors.BoundingBoxes(
        corners, format="XYXY", canvas_size=(height, width), clamping_mode=None
    )
    points = tv_tensors.KeyPoints(corners.view(-1, 2, 2), canvas_size=(height, width))
    pixels = np.full((height, width, 3), 255, np.uint8)
    samples = [(EncodedImage(encode(pixels, "PNG"), 0), boxes, free, points)]
    loader = DataLoader(samples, 1, collate_fn=zipped)
    ((images, (got,), (other,), (moved,)),) = DataPrefetcher(
        loader, transforms=ops, device="cpu", results="list"
    )
    white = (images[0] >= 0.99 * images[0].max()).all(0).nonzero()
    top, left = white.amin(0).tolist()
    bottom, right = (white.amax(0) + 1).tolist()
    assert (bottom - top, right - left) != images[0].shape[1:]  # there is padding
    assert got[1].tolist() == [left, top, right, bottom]
    cut = F.center_crop(boxes, crop)
    scale = (right - left) / crop[1]
    want = torch.Tensor(cut[0]) * scale
    if "flipped" in name:
        want[[0, 2]] = right - left - want[[2, 0]]
    torch.testing.assert_close(torch.Tensor(got[0]), want + torch.tensor([left, top] * 2))
    sides = torch.tensor([width, height]) * scale
    torch.testing.assert_close(torch.Tensor(other[1])[2:] - torch.Tensor(other[1])[:2], sides)
    spread = torch.Tensor(moved[1]).amax(0) - torch.Tensor(moved[1]).amin(0)
    torch.testing.assert_close(spread, sides)  # points outside of the picture stay there
