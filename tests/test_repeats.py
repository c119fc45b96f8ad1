"""Each repeat of a sample in an epoch is another picture, whichever batch or rank it falls on."""

from dataclasses import replace
from itertools import combinations, islice

import kornia.augmentation as K
import pictures
import pytest
import torch
from one_iterator import OneIterator
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
)

from gpuprefetch import DataPrefetcher, EncodedImage, RandomResizedCrop

COUNT, DRAWN = 6, 40


@pytest.fixture(scope="module")
def file():
    return pictures.encode_jpeg(pictures.draw(24, 32))


class Same(Dataset):
    """One picture throughout, so that a sample's draw alone makes it another."""

    def __init__(self, file, count=COUNT):
        self.file, self.count = file, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        return EncodedImage(self.file, index), index


class Together(Same):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Paired(Same):
    """With another file beside it."""

    def __getitem__(self, index):
        image, _ = super().__getitem__(index)
        return image, replace(image, data=self.file + bytes(1)), index


class Followed(Same):
    """With a mask, which the image's sampling is drawn ahead for."""

    def __getitem__(self, index):
        from torchvision import tv_tensors

        mask = tv_tensors.Mask(torch.ones(1, 24, 32, dtype=torch.uint8))
        return EncodedImage(self.file, index), mask, index


def renewed(samples):
    samples = [(replace(image), index) for image, index in samples]
    return default_collate(samples)


def drawn(seed=3, count=DRAWN):
    generator = torch.Generator().manual_seed(seed)
    return WeightedRandomSampler(torch.arange(1.0, COUNT + 1), count, generator=generator)


def prefetcher_of(dataset, *, transforms=None, kind=DataLoader, **options):
    transforms = transforms or [RandomResizedCrop(8)]
    loader = kind(dataset, **{"batch_size": 4} | options)
    return DataPrefetcher(loader, device="cpu", transforms=transforms, seed=5)


def seen_by(prefetcher):
    """Samples and their pictures, in order."""
    return list(unpacked(prefetcher))


def unpacked(batches):
    for image, *_, index in batches:
        yield from zip(torch.as_tensor(index).view(-1).tolist(), image, strict=True)


def assert_same(seen, expected):
    assert [number for number, _ in seen] == [number for number, _ in expected]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(seen, expected, strict=True))


def identical(seen):
    """How many pairs of the same sample have the same picture, and how many there are."""
    pairs = [(a[1], b[1]) for a, b in combinations(seen, 2) if a[0] == b[0]]
    return sum(torch.equal(a, b) for a, b in pairs), len(pairs)


@pytest.fixture(scope="module")
def reference(file):
    return seen_by(prefetcher_of(Same(file), sampler=drawn()))


@pytest.fixture(scope="module")
def plain(file):
    """What each sample has been without repeats, by sample."""
    return dict(seen_by(prefetcher_of(Same(file))))


def test_no_two_repeats_are_the_same_picture(reference, plain):
    same, pairs = identical(reference)
    assert same == 0
    assert pairs > 100
    first = dict(reversed(reference))
    assert all(torch.equal(first[number], plain[number]) for number in first)
    # Guards the tests of this file: the picture is a function of what it is drawn for.
    assert identical([*reference, *reference])[0] == len(reference)


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Same, {"batch_size": 2}),
        (Same, {"batch_size": 7}),
        (Same, {"batch_size": 7, "num_workers": 2}),
        (Together, {}),
        (Paired, {}),
        (Followed, {}),
        (lambda file: list(islice(Same(file), COUNT)), {}),  # the same object each time
        (lambda file: dict(enumerate(Same(file))), {}),
        (Same, {"collate_fn": renewed}),
        (Same, {"batch_size": None}),
        (Same, {"batch_size": None, "num_workers": 1}),
        (Together, {"num_workers": 1, "persistent_workers": True}),
    ],
)
@pytest.mark.forks("its collate functions are local")
def test_however_samples_and_batches_are_made(file, reference, dataset, options):
    if options.get("batch_size", 0) is None:
        options = options | {"collate_fn": lambda sample: default_collate([sample])}
    assert_same(seen_by(prefetcher_of(dataset(file), sampler=drawn(), **options)), reference)


def test_without_an_order_of_the_batches(file, reference):
    options = {"num_workers": 2, "in_order": False}
    seen = seen_by(prefetcher_of(Same(file), sampler=drawn(), **options))
    assert identical(seen)[0] == 0
    by_bytes = [sorted((n, p.numpy().tobytes()) for n, p in each) for each in (seen, reference)]
    assert by_bytes[0] == by_bytes[1]


def test_pairs_of_repeats(file):
    seen = []
    for first, second, index in prefetcher_of(Paired(file), sampler=drawn()):
        assert torch.equal(first, second)
        seen += unpacked([(second, index)])
    assert identical(seen)[0] == 0


NAMES = [f"sample {number}" for number in range(COUNT)]


@pytest.mark.parametrize(
    ("repeat", "options"),
    [
        (lambda data: Subset(data, [*range(COUNT)] * 2), {}),
        (lambda data: ConcatDataset([data, Subset(data, range(COUNT))]), {}),
        (lambda data: dict(zip(NAMES, data, strict=True)), {"sampler": NAMES * 2}),
    ],
)
def test_datasets_and_keys_that_repeat(file, plain, repeat, options):
    seen = seen_by(prefetcher_of(repeat(Same(file)), **options))
    assert [number for number, _ in seen] == [*range(COUNT)] * 2
    if "sampler" not in options:  # else samples are named by their keys
        assert_same(seen[:COUNT], [*plain.items()])
    assert identical(seen) == (0, COUNT)


@pytest.mark.parametrize("key", [lambda number: [number], lambda number: (number, [16, 16])])
def test_keys_without_a_hash_are_not_counted(file, key):
    class Keyed(Same):
        def __getitem__(self, key):
            return super().__getitem__(key[0])

    seen = seen_by(prefetcher_of(Keyed(file), sampler=[*map(key, range(COUNT))]))
    assert [number for number, _ in seen] == [*range(COUNT)]
    # Others in their batch are.
    keys = [(0, "a"), (1, "a"), (0, "a"), key(2)]
    seen = seen_by(prefetcher_of(Keyed(file), sampler=keys, batch_size=2))
    assert identical(seen)[0] == 0


def test_a_sample_of_a_joined_dataset_may_be_counted_from_its_end(file):
    dataset = ConcatDataset([Same(file), Subset(Same(file), range(COUNT))])
    seen = seen_by(prefetcher_of(dataset, sampler=[-1, 2 * COUNT - 1], batch_size=1))
    assert [number for number, _ in seen] == [COUNT - 1] * 2
    assert identical(seen)[0] == 0


def test_each_epoch_counts_anew(file):
    options = {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 1}
    prefetcher = prefetcher_of(Same(file), batch_size=1)
    one_iterator = prefetcher_of(Same(file), batch_size=1, kind=OneIterator, **options)
    for _ in range(3):
        # Its first batch has been read within the epoch before.
        assert_same(seen_by(one_iterator)[1:], seen_by(prefetcher)[1:])


class Repeated(Sampler):
    """Gives the repeats of a sample to ranks in turn, as torchvision's and timm's."""

    def __init__(self, world_size, rank, repeats=3):
        self.world_size, self.rank, self.repeats = world_size, rank, repeats

    def __iter__(self):
        order = [number for number in range(COUNT) for _ in range(self.repeats)]
        return iter(order[self.rank :: self.world_size])


def seen_by_ranks(file, world_size, options_of):
    """What all of them see, the first one's first."""
    options = map(options_of, range(world_size))
    return [one for each in options for one in seen_by(prefetcher_of(Same(file), **each))]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "transforms",
    [None, [K.Resize((8, 8)), K.ColorJitter(0.5, 0.5, 0.5, 0.1)]],
    ids=["fused", "after the fused ones"],
)
def test_repeated_augmentation(file, plain, world_size, transforms):
    def options(rank):
        return {"sampler": Repeated(world_size, rank), "transforms": transforms}

    seen = seen_by_ranks(file, world_size, options)
    assert identical(seen) == (0, 3 * COUNT)
    first = dict(reversed(seen[: 3 * COUNT // world_size]))
    assert transforms or all(torch.equal(first[number], plain[number]) for number in first)


def ranked(batches, rank):
    batches.rank = rank  # as torch.distributed would say
    return {"batch_sampler": batches, "batch_size": 1}


def torchdata(rank):
    module = pytest.importorskip("torchdata.stateful_dataloader.sampler")
    return {"sampler": module.StatefulDistributedSampler(range(COUNT), 2, rank)}


def accelerate(rank, sampler=range(COUNT), size=4):
    module = pytest.importorskip("accelerate.data_loader")
    return ranked(module.BatchSamplerShard(BatchSampler(sampler, size, False), 2, rank), rank)


@pytest.mark.parametrize(
    "options",
    [
        lambda rank: {"sampler": DistributedSampler(range(COUNT), 2, rank, shuffle=False)},
        lambda rank: ranked(BatchSampler(range(rank, COUNT, 2), 4, False), rank),
        torchdata,
        accelerate,
    ],
)
def test_samples_that_ranks_share_out_are_the_same_on_each(file, plain, options):
    union = seen_by_ranks(file, 2, options)
    assert {number for number, _ in union} == set(range(COUNT))
    assert all(torch.equal(picture, plain[number]) for number, picture in union)


def test_ranks_that_share_out_repeats(file):
    union = seen_by_ranks(file, 2, lambda rank: accelerate(rank, drawn(), 2))
    assert len(union) == DRAWN
    assert identical(union)[0] == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_resume_in_the_middle(file, workers):
    def prefetcher(seed):
        return prefetcher_of(Same(file), sampler=drawn(seed), num_workers=workers)

    first, resumed = prefetcher(3), prefetcher(4)
    iterator = iter(first)
    list(islice(iterator, 4))
    resumed.load_state_dict(first.state_dict())
    rest = seen_by(resumed)
    assert len(rest) == DRAWN - 16
    assert_same(rest, seen_by(iterator))


def test_the_state_of_rank_0_does_not_make_others_draw_as_it(file):
    first, other, resumed = (
        prefetcher_of(Same(file), sampler=Repeated(3, rank)) for rank in (0, 1, 1)
    )
    next(iter(first))
    resumed.load_state_dict(first.state_dict())
    assert_same(seen_by(resumed), seen_by(other)[4:])


@pytest.mark.parametrize("sampler", [drawn, lambda: Repeated(3, 2, repeats=9)])
def test_replay(file, sampler):
    prefetcher = prefetcher_of(Same(file), sampler=sampler())
    firsts = [dict(reversed(seen_by(prefetcher))) for _ in range(4)]
    for epoch in (2, 3):
        for number, picture in firsts[epoch].items():
            image, index = prefetcher.replay(number, epoch)
            assert index.tolist() == [number]
            assert torch.equal(image[0], picture)


def test_replay_beside_a_repeat(file):
    # Its parameters are those of the batch's first image, which is a repeat.
    crop = K.RandomResizedCrop((8, 8), same_on_batch=True)
    prefetcher = prefetcher_of(Same(file), batch_size=2, sampler=[0, 1, 0, 2], transforms=[crop])
    (_, first), *_, (_, picture) = seen_by(prefetcher)
    assert torch.equal(prefetcher.replay(2)[0][0], picture)
    assert not torch.equal(first, picture)


def test_a_sampler_without_replacement_may_repeat(file):
    sampler = RandomSampler(range(COUNT), num_samples=4 * COUNT)
    same, pairs = identical(seen_by(prefetcher_of(Same(file), sampler=sampler)))
    assert (same, pairs) == (0, 6 * COUNT)
