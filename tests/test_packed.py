"""Batches by a budget of patches: sizes from headers, the example's sampler, and its training."""

import os
import sys
from itertools import chain

import numpy as np
import pytest
import torch
from fakes import EXAMPLES, example
from pictures import draw, encode, encode_jpeg, insert_segment
from torch.utils.data import DataLoader

from gpuprefetch import (
    DataPrefetcher,
    EncodedImage,
    EncodedImageFolder,
    Patches,
    SmartResize,
    image_size,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# --- sizes --------------------------------------------------------------------------------------


FILES = {
    "jpeg": encode_jpeg(draw(30, 50)),
    "turned": encode_jpeg(draw(30, 50), orientation=6),
    "metadata": encode_jpeg(draw(30, 50)),
    "progressive": encode_jpeg(draw(30, 50), progressive=True),
    "large": encode(np.random.default_rng(0).integers(0, 256, (300, 301, 3), np.uint8), "PNG"),
    "gif": encode(draw(30, 50), "GIF"),
    "tiff": encode(draw(250, 251), "TIFF"),
    "webp": encode(np.random.default_rng(0).integers(0, 256, (400, 401, 3), np.uint8), "WEBP"),
}
for _ in range(3):
    FILES["metadata"] = insert_segment(FILES["metadata"], 0xE2, bytes(60_000))
SIZES = {"large": (300, 301), "tiff": (250, 251), "webp": (400, 401)}


@pytest.mark.parametrize("name", FILES)
def test_the_size_of_a_file(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(FILES[name])
    want = SIZES.get(name, (30, 50))
    for source in (path, str(path), FILES[name], EncodedImage(FILES[name])):
        assert image_size(source) == want
        turned = want[::-1] if name == "turned" else want
        assert image_size(source, apply_exif=True) == turned


def test_what_has_no_size(tmp_path):
    (tmp_path / "text").write_bytes(b"text" * 50_000)
    with pytest.raises(ValueError, match=f"{tmp_path}/text: "):
        image_size(tmp_path / "text")
    with pytest.raises(ValueError, match=r"a\.jpg: "):
        image_size(EncodedImage(b"text", 0, "a.jpg"))
    with pytest.raises(ValueError, match="it is a folder, and no regular file"):
        image_size(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="it is a FIFO"):
        image_size(tmp_path / "fifo")
    with pytest.raises(FileNotFoundError):
        image_size(tmp_path / "none")
    with pytest.raises(TypeError, match="takes a path, a file's bytes or an EncodedImage, got int"):
        image_size(3)


# --- batches by budget --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def train():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES / "packed")
        yield example("packed/train")
    del sys.modules["budget"]


@pytest.fixture(scope="module")
def budget(train):
    return sys.modules["budget"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    drawing = example("imagenet/draw")
    drawing.SIDES = (40, 130)
    folder = tmp_path_factory.mktemp("packed") / "pictures"
    drawing.write_folder(folder, train_per_class=3, val_per_class=1)
    return folder


COUNTS = np.random.default_rng(0).integers(4, 200, 300).tolist()


def test_a_batch_is_filled_up_to_the_budget(budget):
    sampler = budget.BudgetBatchSampler(COUNTS, 1000)
    batches = list(sampler)
    assert len(batches) == len(sampler) and sorted(chain(*batches)) == list(range(300))
    sums = [sum(COUNTS[sample] for sample in batch) for batch in batches]
    assert max(sums) <= 1000
    assert sum(sums[:-8]) / len(sums[:-8]) > 950
    assert batches == list(sampler)
    sampler.set_epoch(1)
    assert batches != list(sampler)
    ordered = budget.BudgetBatchSampler(COUNTS, 1000, shuffle=False, open_batches=1)
    assert next(iter(ordered))[0] == 0
    with pytest.raises(ValueError, match=r"sample 1 has 9 patches, and a batch takes 8\. Raise"):
        budget.BudgetBatchSampler([3, 9], 8)
    with pytest.raises(ValueError, match="rank is 0 to 1, got 2"):
        budget.BudgetBatchSampler([3, 9], 9, rank=2, num_replicas=2)


def test_ranks_share_the_batches_out(budget):
    options = {"seed": 5, "num_replicas": 3}
    samplers = [budget.BudgetBatchSampler(COUNTS, 700, rank=rank, **options) for rank in range(3)]
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        shares = [list(sampler) for sampler in samplers]
        assert len({len(share) for share in shares} | {len(samplers[0])}) == 1
        samples = list(chain(*chain(*shares)))
        assert len(samples) == len(set(samples)) > 280


PATCH = 8
RESIZE = SmartResize(PATCH, PATCH**2, 64 * PATCH**2)


def loader_of(budget, folder, **options):
    dataset = EncodedImageFolder(folder / "train")
    counts = budget.count_patches([path for path, _ in dataset.samples], RESIZE, PATCH)
    sampler = budget.BudgetBatchSampler(counts, 200, **options)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=1)
    form = Patches(PATCH, merge_size=1, temporal_patch_size=1)
    return DataPrefetcher(loader, device="cpu", transforms=[RESIZE], results=form, seed=0)


def test_headers_tell_how_many_patches_come(budget, folder):
    loader = loader_of(budget, folder)
    sampler = loader.batch_sampler
    batches = list(loader)
    assert len(batches) == len(loader) > 5
    for samples, (packed, labels) in zip(sampler, batches, strict=True):
        counts = packed.image_grid_thw.prod(1).tolist()
        assert counts == [sampler.counts[sample] for sample in samples]
        assert len(packed.pixel_values) == sum(counts) <= 200
        assert labels.tolist() == [loader.dataset.targets[sample] for sample in samples]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_epoch_of_a_rank_goes_on(budget, folder, rank):
    options = {"rank": rank, "num_replicas": 2}
    whole = loader_of(budget, folder, **options)
    whole.set_epoch(3)
    batches = iter(whole)
    next(batches)
    next(batches)
    state = whole.state_dict()
    rest = [packed for packed, _ in batches]
    again = loader_of(budget, folder, **options)
    again.load_state_dict(state)
    resumed = [packed for packed, _ in again]
    assert len(resumed) == len(rest) > 1
    for one, other in zip(resumed, rest, strict=True):
        assert all(map(torch.equal, one, other))


def test_a_file_that_is_no_image_has_the_smallest_count(budget, tmp_path):
    (tmp_path / "a").write_bytes(b"no image")
    assert (
        budget.count_patches([tmp_path / "a", tmp_path / "none"], SmartResize(28), 14) == [16] * 2
    )


# --- the training -------------------------------------------------------------------------------


def test_an_image_is_alone_in_its_batch(train):
    torch.manual_seed(0)
    model = train.PackedTransformer(12, classes=5, dim=48, layers=2)
    grid = torch.tensor([[1, 2, 3], [1, 4, 1], [1, 1, 1]])
    patches = torch.randn(11, 12)
    together = model(patches, grid)
    for row, part in enumerate(patches.split([6, 4, 1])):
        torch.testing.assert_close(model(part, grid[row : row + 1])[0], together[row])
    order = torch.tensor([1, 0, 2, 3, 4, 5, *range(6, 11)])
    assert not torch.allclose(model(patches[order], grid)[0], together[0])


def test_it_trains(train, folder):
    words = ["--patch-size=16", "--budget=128", "--max-patches=16", "--dim=48", "--layers=1"]
    summary = train.main([str(folder), *words, "--epochs=8", "--workers=0", "--lr=0.003"])
    losses = summary["losses"]
    assert len(losses) == 8 and 0 < losses[-1] < losses[0]
    assert 0.5 < summary["share_of_budget"] <= 1
    assert 0 <= summary["top1"] <= 1
