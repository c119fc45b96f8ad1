"""A picture is a function of seed, epoch and sample: bit for bit, however it gets here."""

from functools import cache

import kornia.augmentation as K
import pytest
import torch
from fakes import prefetcher_of
from test_encoded import GPU_LEVELS, GPU_SHARE
from test_replay import Numbered
from torch.utils.data import DistributedSampler

from gpuprefetch import RandomResizedCrop


def pictures_of(folder, device, epoch=3, **options):
    """Of an epoch, by sample, and how often it drew each of them."""
    transforms = [RandomResizedCrop(24), K.RandomHorizontalFlip(), K.Normalize(0.4, 0.2)]
    defaults = {"shuffle": "sampler" not in options, "num_workers": 1, "cpu_share": 0.0, "seed": 11}
    options = defaults | options
    prefetcher = prefetcher_of(Numbered(folder), device, transforms=transforms, **options)
    prefetcher.set_epoch(epoch)
    found, count = {}, 0
    for batch in prefetcher:
        count += len(batch["target"])
        found |= dict(zip(batch["target"].tolist(), batch["image"].cpu(), strict=True))
    return found, count


@cache
def reference(folder, device):
    found, _ = pictures_of(folder, device, shuffle=False)
    assert len(found) == 24
    return found


def assert_equal(found, expected):
    for number, picture in found.items():
        assert torch.equal(picture, expected[number]), number


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 1, "num_workers": 0},
        {"batch_size": 24},
        {"batch_size": 5, "drop_last": True},
        {"num_workers": 2, "prefetch_factor": 4},
        {"device_prefetch_size": 1},
        {"device_prefetch_size": 5},
        {"memory_budget": "192KiB"},  # one batch at a time, on a GPU in parts
    ],
    ids=str,
)
def test_however_it_is_loaded(photo_folder, device, options):
    found, count = pictures_of(photo_folder, device, **options)
    assert len(found) == count == (20 if "drop_last" in options else 24)
    assert_equal(found, reference(photo_folder, device))


@pytest.mark.parametrize("threads", [1, 3])
def test_with_any_number_of_threads(photo_folder, device, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found, _ = pictures_of(photo_folder, device, num_workers=0)
    finally:
        torch.set_num_threads(before)
    assert_equal(found, reference(photo_folder, device))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_on_any_rank(photo_folder, device, world_size):
    expected, union, drawn = reference(photo_folder, device), {}, 0
    for rank in range(world_size):
        sampler = DistributedSampler(range(24), world_size, rank)
        found, count = pictures_of(photo_folder, device, sampler=sampler, num_workers=0)
        assert_equal(found, expected)
        union |= found
        drawn += count
    assert len(union) == 24
    assert drawn == -(-24 // world_size) * world_size  # the sampler pads to equal lengths


@pytest.mark.parametrize("options", [{"cpu_share": 0.5}, {"cpu_share": 1.0}, {"decoder": "cpu"}])
def test_whatever_the_workers_decode(photo_folder, device, options):
    expected = reference(photo_folder, device)
    found, _ = pictures_of(photo_folder, device, **options)
    if device.type == "cpu":
        assert_equal(found, expected)
        return
    # The decoders' rounding, and that of a worker's picture to whole levels, over std = 0.2.
    off = torch.stack([(found[i] - expected[i]).abs() for i in expected]) * 255 * 0.2
    assert (off > GPU_LEVELS + 0.5).float().mean() <= GPU_SHARE


@pytest.mark.parametrize("options", [{"epoch": 4}, {"seed": 12}], ids=str)
def test_another_epoch_or_seed_is_another_picture(photo_folder, device, options):
    # Guards the tests above.
    expected = reference(photo_folder, device)
    found, _ = pictures_of(photo_folder, device, **options)
    assert not any(torch.equal(found[number], expected[number]) for number in expected)
