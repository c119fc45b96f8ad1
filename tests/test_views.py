"""Several views of one decode: each is what its list alone gives, with parameters of its own."""

import pickle

import pictures
import pytest
import torch
from fakes import numbered
from kornia import augmentation as K
from torch.utils.data import DataLoader
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuprefetch
from gpuprefetch import (
    BadImageError,
    DataPrefetcher,
    RandomResizedCrop,
    Resize,
    Views,
)

SEED = 5
CROP = [RandomResizedCrop(12), K.RandomHorizontalFlip(), K.Normalize(torch.zeros(3), torch.ones(3))]
SMALL = [RandomResizedCrop((8, 10), scale=(0.05, 0.4)), v2.RandomInvert(0.5)]
FIXED = [Resize((18, 14))]  # not so small that workers would decode photos to a half
TWO = Views(CROP, SMALL)


@pytest.fixture(scope="module")
def files():
    made = [pictures.encode_jpeg(pictures.draw(40 + 3 * i, 60 - i, seed=i)) for i in range(13)]
    made[4] = pictures.encode(pictures.draw(33, 44), "PNG")
    return made


def loader_of(files, device="cpu", workers=0, transforms=TWO, **options):
    loader = DataLoader(
        numbered(files),
        batch_size=5,
        num_workers=workers,
        pin_memory=torch.device(device).type == "cuda",
    )
    return DataPrefetcher(loader, device=device, transforms=transforms, seed=SEED, **options)


def images_of(prefetcher):
    """Of each view all images of an epoch."""
    batches = [images for images, _ in prefetcher]
    batches = [images if isinstance(images, list) else (images,) for images in batches]
    return [torch.cat(view) for view in zip(*batches, strict=True)]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_view_is_its_list_alone_and_the_others_have_draws_of_their_own(
    device, files, workers
):
    lists = CROP, SMALL, CROP
    first, second, third = images_of(loader_of(files, device, workers, transforms=Views(*lists)))
    (alone,) = images_of(loader_of(files, device, workers, transforms=CROP))
    photos = [i for i in range(13) if i != 4]
    assert torch.equal(first[photos], alone[photos])
    # For several views a worker makes the PNG small, in whole levels; for one it ships the crop.
    torch.testing.assert_close(
        first[4], alone[4], atol=0 if device.type == "cpu" else 1 / 255, rtol=0
    )
    assert second.shape == (13, 3, 8, 10)
    assert third.shape == first.shape
    assert not torch.equal(third, first)
    again = images_of(loader_of(files, device, workers, transforms=Views(*lists)))
    assert all(map(torch.equal, again, (first, second, third)))


def test_no_two_views_have_the_same_draws(device, files):
    # Workers sample crops. After them an op samples for each image, and another for a batch.
    crops = images_of(loader_of(files, device, transforms=Views(*[CROP] * 4)))
    inverted = [Resize((6, 6)), v2.RandomInvert(0.5)]
    noise = [Resize((6, 6)), lambda images: torch.rand_like(images)]
    inversions = images_of(loader_of(files, device, transforms=Views(*[inverted] * 4)))
    noises = images_of(loader_of(files, device, transforms=Views(*[noise] * 4)))
    images = torch.rand(6, 3, 30, 40, device=device)
    (tensors,) = DataPrefetcher([images], transforms=Views(*[CROP] * 4), device=device, seed=SEED)
    for views in (crops, inversions, noises, tensors):
        for i, one in enumerate(views):
            assert not any(torch.equal(one, other) for other in views[:i])


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_views_without_draws_are_their_lists(device, files, share):
    lists = FIXED, [Resize((20, 30)), K.Normalize(torch.full((3,), 0.4), torch.full((3,), 0.2))]
    options = {"cpu_share": share, "dtype": torch.float64}
    got = images_of(loader_of(files, device, transforms=Views(*lists), **options))
    for each, view in zip(lists, got, strict=True):
        (alone,) = images_of(loader_of(files, device, transforms=each, **options))
        # A worker rounds to whole levels after each of two passes, the device not at all.
        assert (view - alone).abs().max() <= 1.5 / 255 / 0.2


def test_a_decode_a_dtype_and_a_layout_are_for_all_views(device, files):
    options = {"dtype": torch.float16, "memory_format": torch.channels_last}
    prefetcher = loader_of(files, device, transforms=Views(CROP, SMALL, FIXED), **options)
    for view in images_of(prefetcher):
        assert view.dtype == torch.float16
        assert view.is_contiguous(memory_format=torch.channels_last)
    counted = prefetcher.stats.as_dict()
    assert counted["images"] == counted["cpu_images"] + counted["gpu_images"] == len(files)


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_a_bad_file_is_left_out_of_all_views(device, files, on_error):
    spoiled = [*files]
    spoiled[3] = b"no picture"
    good = images_of(loader_of(files, device))
    got = images_of(loader_of(spoiled, device, on_error=on_error))
    rows = [*range(3), *([4] if on_error == "replace" else []), *range(4, 13)]
    assert torch.equal(got[0], good[0][rows])
    assert len(got[1]) == len(rows)
    with pytest.raises(BadImageError, match=r"sample 3"):
        list(loader_of(spoiled, device))


def test_views_are_replayed_and_resumed(device, files):
    prefetcher, resumed = (loader_of(files, device) for _ in "ab")
    whole = images_of(prefetcher)
    images, _ = prefetcher.replay(7)
    assert all(map(torch.equal, images, [view[7:8] for view in whole]))
    prefetcher = loader_of(files, device)
    next(iter(prefetcher))
    resumed.load_state_dict(pickle.loads(pickle.dumps(prefetcher.state_dict())))
    assert all(map(torch.equal, images_of(resumed), [view[5:] for view in whole]))


def test_a_memory_budget_counts_all_views(device, files):
    want = images_of(loader_of(files, device))
    largest = 3 * 40 * 60 * 8
    budget = 5 * 3 * (12 * 12 + 8 * 10) * 4 + largest
    got = images_of(loader_of(files, device, memory_budget=budget))
    assert all(map(torch.equal, got, want))
    with pytest.raises(ValueError, match="memory_budget"):
        list(loader_of(files, device, memory_budget=8000))


def test_a_batch_of_tensors_has_views_too(device):
    images = torch.from_numpy(pictures.draw(30, 40)).permute(2, 0, 1).repeat(4, 1, 1, 1)
    images = images.to(device)
    (got,) = DataPrefetcher([images], transforms=Views(FIXED, CROP), device=device, seed=SEED)
    (alone,) = DataPrefetcher([images], transforms=FIXED, device=device, seed=SEED)
    assert torch.equal(got[0], alone)
    assert got[1].shape == (4, 3, 12, 12)
    assert not torch.equal(got[1][0], got[1][1])  # an image each


def test_preprocess_gives_a_batch_a_view(device, files):
    first, second = gpuprefetch.preprocess(files[:3], Views(FIXED, CROP), device=device)
    assert torch.equal(first, gpuprefetch.preprocess(files[:3], FIXED, device=device))
    assert second.shape == (3, 3, 12, 12)


def test_explain_has_the_steps_of_each_view():
    text = gpuprefetch.explain(Views(FIXED, CROP))
    assert text.count("one fused launch") == 2


def beside_masks(files):
    mask = tv_tensors.Mask(torch.zeros(40, 60))
    loader = DataLoader([(image, mask) for image, _ in numbered(files)], batch_size=2)
    return list(DataPrefetcher(loader, transforms=Views(CROP, CROP), device="cpu"))


# What is done with some files and a folder of them, the error, and what it says.
REFUSED = {
    "one list": (lambda files, folder: Views(CROP), ValueError, "two lists"),
    "an op for a list": (
        lambda files, folder: Views(CROP, CROP[0]),
        TypeError,
        "a list of transforms for each view",
    ),
    "views of views": (
        lambda files, folder: Views(CROP, [Views(CROP, CROP)]),
        TypeError,
        "a list of transforms",
    ),
    "views in a list": (
        lambda files, folder: DataPrefetcher([], transforms=[Views(CROP, CROP), v2.RandomInvert()]),
        TypeError,
        "the place of the list",
    ),
    "a view of any size": (
        lambda files, folder: list(loader_of(files, transforms=Views(CROP, [v2.RandomInvert()]))),
        RuntimeError,
        "equal size",
    ),
    "targets that move": (
        lambda files, folder: beside_masks(files),
        ValueError,
        "several pictures of an image",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_views_that_cannot_be_made_are_refused(files, photo_folder, case):
    build, kind, text = REFUSED[case]
    with pytest.raises(kind, match=text):
        build(files, photo_folder)
