"""What a picture's random parameters are a function of, and which images have them in common."""

import copy
import json
import warnings
from array import array

import kornia.augmentation as K
import numpy as np
import pictures
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
)
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import gpuprefetch
from gpuprefetch import (
    BadImageError,
    DataPrefetcher,
    EncodedImage,
    PerImage,
    RandomResizedCrop,
    Resize,
    Views,
)
from gpuprefetch.images.samples import Repeats

COUNT = 12


@pytest.fixture(scope="module")
def file():
    return pictures.encode_jpeg(pictures.draw(48, 64))


@pytest.fixture(scope="module")
def ramp():
    """Red and green say where in a picture a pixel is, whatever its size."""

    def draw(height, width):
        y, x = np.mgrid[:height, :width]
        places = [(x + 0.5) / width, (y + 0.5) / height, np.zeros_like(x)]
        return pictures.encode(np.rint(255 * np.stack(places, -1)).astype(np.uint8), "PNG")

    return draw


class Of(Dataset):
    """Samples that a function makes of their numbers."""

    def __init__(self, sample, count=COUNT):
        self.sample, self.count = sample, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.sample(index)


def load(dataset, transforms, *, seed=0, prefetcher=None, **options):
    if options.get("num_workers"):  # other workers could not import what is local to a test
        options["multiprocessing_context"] = "fork"
    loader = DataLoader(dataset, **{"batch_size": 4} | options)
    options = {"transforms": transforms, "device": "cpu", "seed": seed} | (prefetcher or {})
    return DataPrefetcher(loader, **options)


def distinct(images):
    return len({image.numpy().tobytes() for image in images})


def images_of(batches):
    return torch.cat([batch[0] if isinstance(batch, (list, tuple)) else batch for batch in batches])


CROP = [RandomResizedCrop(24), K.RandomHorizontalFlip()]
LATER = {
    "fused": [],
    "policy": [v2.RandAugment()],
    "one by one": [v2.ElasticTransform()],
    "kornia": [K.ColorJitter(0.5, 0.5, 0.5, 0.2, p=1.0)],
    "policies after kornia's": [K.ColorJitter(0.5, 0.5, 0.5, 0.2, p=1.0), v2.RandAugment()],
    "callable": [lambda images: images + torch.rand(len(images), 1, 1, 1)],
    "a seed of its own": [PerImage(v2.ColorJitter(0.5), seed=3)],
}


# --- images of one sample ---


IN_WORKERS = ("fused", "policy", "policies after kornia's")  # the others run in the loop's process


@pytest.mark.parametrize(
    ("later", "workers"), [*((name, 0) for name in LATER), *((name, 1) for name in IN_WORKERS)]
)
def test_images_of_a_sample_move_together(file, later, workers):
    other = file + bytes(1)  # another file with the same picture

    def sample(index):
        return {"A": EncodedImage(file, index, "a"), "more": [EncodedImage(other, -1, "b")], "n": 1}

    # Without files left to a GPU: bytes after the end of an image are for the CPU's decoder.
    for batch in load(Of(sample), [*CROP, *LATER[later]], num_workers=workers):
        assert torch.equal(batch["A"], batch["more"][0])
        assert distinct(batch["A"]) == 4


@pytest.mark.parametrize(
    "sizes", [((40, 60), (80, 120)), ((90, 60), (45, 30)), ((50, 50), (40, 90))]
)
def test_images_of_other_sizes_show_the_same_part(ramp, sizes):
    first, second = (ramp(*size) for size in sizes)
    dataset = Of(lambda index: (EncodedImage(first, index), EncodedImage(second, index)))
    for one, two in load(dataset, CROP):
        # Borders of a crop are rounded to pixels, of which the smaller side has 30.
        assert (one - two).abs().max() < 1.5 / 30
        assert distinct(one) == 4


@pytest.mark.parametrize(
    ("crop", "message"),
    [
        ([v2.RandomCrop(16)], r"same \(16, 16\) pixels .* of 40 x 60 and 80 x 120 pixels"),
        ([Resize(32), K.RandomCrop((16, 16))], None),
        ([Resize((32, 32)), K.RandomCrop((16, 16))], None),
    ],
)
def test_pixels_of_one_size_are_not_cut_out_of_images_of_others(ramp, crop, message):
    first, second = ramp(40, 60), ramp(80, 120)
    dataset = Of(lambda index: (EncodedImage(first, index), EncodedImage(second, index)))
    crop = gpuprefetch.convert_transforms([v2.PILToTensor(), *crop]) if message else crop
    prefetcher = load(dataset, crop)
    if message:
        with pytest.raises(ValueError, match=message):
            next(iter(prefetcher))
        return
    for one, two in prefetcher:
        assert (one - two).abs().max() < 0.06  # 1.5 of 32 pixels


def test_a_bad_image_gives_no_other_its_made_up_size(file):
    def sample(index):
        data = b"\xff\xd8bad" if index == 1 else file
        return EncodedImage(data, index, "a"), EncodedImage(file + bytes(1), index, "b"), index

    crop = [v2.RandomCrop(16)]
    prefetcher = load(Of(sample), crop, prefetcher={"on_error": "skip"})
    found = [index for *_, indices in prefetcher for index in indices.tolist()]
    assert found == [0, *range(2, COUNT)]


@pytest.mark.parametrize(("on_error", "kept"), [("skip", [0, 2, 3]), ("replace", [0, 2, 2, 3])])
@pytest.mark.parametrize("later", ["policy", "kornia"])
def test_a_pair_with_a_bad_image_leaves_the_others_together(file, on_error, kept, later):
    def sample(index):
        other = b"no picture" if index == 1 else file + bytes(1)
        return EncodedImage(file, index, "a"), EncodedImage(other, index, "b"), index

    options = {"prefetcher": {"on_error": on_error}, "num_workers": 1, "batch_size": 4}
    transforms = [*CROP, *LATER[later]]
    ((one, two, numbers),) = load(Of(sample, 4), transforms, **options)
    assert numbers.tolist() == kept
    assert torch.equal(one, two)
    if later == "policy":  # a function of the sample, whatever is beside it
        whole = images_of(load(Of(lambda index: EncodedImage(file, index), 4), transforms))
        assert torch.equal(one, whole[kept])


def test_targets_follow_all_images_of_their_sample(ramp):
    def sample(index):
        mask = torch.zeros(1, 40, 60, dtype=torch.uint8)
        mask[:, 10:30, 15:45] = 1
        pair = {
            "A": EncodedImage(ramp(40, 60), index),
            "B": EncodedImage(ramp(40, 60) + b"", index),
        }
        return pair | {"mask": tv_tensors.Mask(mask)}

    def collate(samples):
        return {name: [sample[name] for sample in samples] for name in samples[0]}

    ops = [RandomResizedCrop(24), v2.RandomHorizontalFlip(), v2.RandomAffine(20)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A sample holds one file twice")
        batches = list(load(Of(sample), ops, collate_fn=collate, num_workers=1))
    for batch in batches:
        assert torch.equal(batch["A"], batch["B"])
        assert distinct(batch["A"]) == 4
        for image, mask in zip(batch["A"], batch["mask"], strict=True):
            inside = ((image[:2] > 0.25) & (image[:2] < 0.75)).all(0)
            assert ((mask[0] == 1) == inside).float().mean() > 0.85  # but for the border


def test_a_file_twice_in_a_sample_is_told_about(file):
    dataset = Of(lambda index: (EncodedImage(file, index), EncodedImage(file, index)))
    with pytest.warns(UserWarning, match=r"holds one file twice, .*gpuprefetch\.Views"):
        list(load(dataset, CROP))
    list(load(dataset, [Resize((8, 8))]))  # nothing is sampled
    views = Views(CROP, CROP)
    ((one, two),) = load(Of(lambda index: EncodedImage(file, index)), views, batch_size=COUNT)
    assert distinct([*one, *two]) == 2 * COUNT


class Twice(ImageFolder):
    """Reads a file once and calls the transform for each view, as for contrastive learning."""

    def __getitem__(self, index):
        path, target = self.samples[index]
        image = self.loader(path)
        return self.transform(image), self.transform(image), target


def test_each_call_of_a_transform_that_has_moved_samples_anew(photo_folder):
    ops = [v2.RandomResizedCrop(24), v2.PILToTensor(), v2.RandAugment()]
    dataset = Twice(photo_folder, v2.Compose(ops))
    loader = DataLoader(dataset, batch_size=6, num_workers=1)
    prefetcher = gpuprefetch.accelerate(loader, device="cpu", print_plan=False)
    for one, two, _ in prefetcher:
        assert distinct([*one, *two]) == 12


# --- what tells samples apart ---


@pytest.mark.parametrize(
    ("image", "workers", "later"),
    [
        ({}, 0, "fused"),
        ({}, 2, "policy"),
        ({"index": 0}, 2, "fused"),
        ({"index": 0}, 0, "policy"),
        ({"index": 7, "path": "same"}, 0, "fused"),
        ({"index": 7, "path": "same"}, 1, "policy"),
    ],
)
def test_the_samplers_own_index_tells_samples_apart(file, image, workers, later):
    dataset = ConcatDataset([Of(lambda index: EncodedImage(file, **image), 6) for _ in range(2)])
    options = {"num_workers": workers, "batch_size": 4}
    transforms = [RandomResizedCrop(24), *LATER[later]]
    found = images_of(load(dataset, transforms, **options))
    assert distinct(found) == COUNT
    assert torch.equal(images_of(load(dataset, transforms, **options | {"batch_size": 1})), found)


def test_a_sample_is_named_by_its_dataset_however_that_is_cut_and_joined(file):
    first, second = (Of(lambda index: EncodedImage(file), 6) for _ in range(2))
    whole = images_of(load(first, CROP))
    halves = ConcatDataset([Subset(first, [4, 5]), Subset(first, [0, 1, 2, 3])])
    assert torch.equal(images_of(load(halves, CROP)), whole[[4, 5, 0, 1, 2, 3]])
    joined = images_of(load(ConcatDataset([halves, second]), CROP))
    assert torch.equal(joined[:6], whole[[4, 5, 0, 1, 2, 3]])
    assert distinct(joined) == 12


def test_batches_that_the_dataset_makes(file):
    class Chunks(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            numbers = index if isinstance(index, list) else range(4 * index, 4 * index + 4)
            return {
                "A": [EncodedImage(file, 0) for _ in numbers],
                "B": [EncodedImage(file + bytes(1), 0) for _ in numbers],
                "n": torch.tensor([*numbers]),
            }

    for sampler in (None, [[0, 5, 3], [2, 4, 1]]):
        loader = load(Chunks(), CROP, batch_size=None, sampler=sampler, collate_fn=lambda x: x)
        batches = list(loader)
        assert all(torch.equal(batch["A"], batch["B"]) for batch in batches)
        found = torch.cat([batch["A"] for batch in batches])
        assert distinct(found) == len(found)


def test_keys_may_be_anything_that_can_be_written_down(file):
    keys = [("a", 1), ("a", 2), "a", b"a", 2.5, (np.int64(3), None)]
    dataset = dict.fromkeys(keys, EncodedImage(file))
    found = [images_of(load(dataset, CROP, sampler=keys, batch_size=size)) for size in (1, 6)]
    assert distinct(found[0]) == len(keys)
    assert torch.equal(*found)


class Stream(IterableDataset):
    def __init__(self, images):
        self.images = images

    def __iter__(self):
        return iter(self.images)


def test_what_nothing_tells_apart_is_told_about_once(file):
    other = file + bytes(1)
    alike = {
        "no number": [EncodedImage(file)] * 2,
        "one number": [EncodedImage(file, 0), EncodedImage(other, 0)],
    }
    for images in alike.values():
        for size, workers in ((2, 0), (1, 1)):
            prefetcher = load(Stream(images), CROP, batch_size=size, num_workers=workers)
            with pytest.warns(UserWarning, match="Nothing tells some samples apart") as told:
                for _ in range(2):
                    list(prefetcher)
            assert sum(warning.category is UserWarning for warning in told) == 1
    list(load(Stream([EncodedImage(file, 0), EncodedImage(other, 1)] * 2), CROP))
    list(load(Stream([EncodedImage(file), EncodedImage(other)]), CROP))  # their bytes tell
    list(load(Stream(alike["no number"]), [Resize((8, 8))]))


def test_the_names_that_keys_give():
    data, more = list(range(100)), list(range(9))
    for dataset, keys, names, repeats in (
        (data, [7, -1, 7], [7, 99, 7], [0, 0, 1]),
        (Subset(data, [5, 8]), [0, 1], [5, 8], ()),
        (ConcatDataset([data, more]), [7, 100, 101], [7, 2**40, 2**40 + 1], ()),
        (ConcatDataset([data, data]), [7, 107], [7, 7], [0, 1]),
        (data, [7, object()], (), ()),
    ):
        assert [*map(tuple, Repeats(dataset).add(keys))] == [tuple(names), tuple(repeats)]
    (name,), _ = Repeats(data).add(["n0144/7.jpg"])
    assert name < 0
    counted = Repeats(Subset(data, [5, 8]))  # the counts go on from call to call
    assert [tuple(counted.add(keys)[1]) for keys in ([0, 1], [1, 0, 1])] == [(), (1, 1, 2)]


def test_counting_takes_memory_for_what_is_read_alone(file):
    class Virtual(Dataset):
        def __len__(self):
            return 10**12

        def __getitem__(self, index):
            return torch.tensor(index % 7)

    counted = Repeats(Virtual())
    numbers = torch.randint(10**12, (500,)).tolist()
    names, repeats = counted.add([*numbers, numbers[3], -1, 10**12 - 1])
    assert list(names) == [*numbers, numbers[3], 10**12 - 1, 10**12 - 1]
    assert list(repeats) == [*[0] * 500, 1, 0, 1]
    (counts,) = counted._counts.values()
    held = sum(page.itemsize * len(page) for page in counts._pages.values())
    assert held <= 502 * 4096
    sampler = RandomSampler(Virtual(), replacement=True, num_samples=100)
    assert len(list(load(Virtual(), None, sampler=sampler, batch_size=50))) == 2


# --- ranks ---


def on_rank(number, dataset, transforms, world_size=2, **options):
    """An epoch of one of several ranks that have their seed in common."""
    sampler = DistributedSampler(dataset, world_size, number, seed=0)
    return list(load(dataset, transforms, sampler=sampler, **options))


@pytest.mark.parametrize("later", ["fused", "policy", "one by one", "kornia", "callable"])
def test_ranks_sample_apart(file, later):
    dataset = Of(lambda index: (EncodedImage(file, index), index))
    transforms = [RandomResizedCrop(24), *LATER[later]]
    ranks = [on_rank(number, dataset, transforms) for number in range(2)]
    assert distinct(torch.cat([images_of(batches) for batches in ranks])) == COUNT
    if later in ("kornia", "callable"):
        return  # they sample for a batch
    alone = {
        int(n): image
        for images, numbers in load(dataset, transforms, batch_size=5)
        for image, n in zip(images, numbers, strict=True)
    }
    for images, numbers in (batch for batches in ranks for batch in batches):
        assert all(torch.equal(alone[int(n)], im) for im, n in zip(images, numbers, strict=True))


@pytest.mark.parametrize("later", ["fused", "policy", "one by one", "kornia"])
def test_ranks_sample_apart_for_tensors(later):
    picture = torch.from_numpy(pictures.draw(60, 60)).permute(2, 0, 1)
    dataset = Of(lambda index: (picture, index))
    transforms = [K.RandomCrop((50, 50)), *LATER[later]]
    ranks = [images_of(on_rank(number, dataset, transforms)) for number in range(2)]
    assert distinct(torch.cat(ranks)) > COUNT / 2  # of 121 crops some may be the same
    assert not any(map(torch.equal, *ranks))


def test_mixing_in_a_late_collate_function_is_each_ranks_own(photo_folder):
    weights = []

    def mixed(samples):
        images, labels = default_collate(samples)
        weights.append(float(torch.rand(())))
        return images, labels

    ops = [v2.RandomResizedCrop(24), v2.PILToTensor()]
    for number in range(2):
        dataset = ImageFolder(photo_folder, v2.Compose(ops))
        sampler = DistributedSampler(dataset, 2, number)
        loader = DataLoader(dataset, 6, sampler=sampler, collate_fn=mixed)
        options = {"device": "cpu", "print_plan": False, "seed": 0}
        list(gpuprefetch.accelerate(loader, **options))
    assert len(weights) == len({*weights}) == 4


def test_a_policy_with_a_seed_of_its_own_is_each_ranks_own(monkeypatch):
    images = torch.from_numpy(pictures.draw(30, 30)).permute(2, 0, 1)[None]
    results = []
    for number in range(3):
        monkeypatch.setenv("RANK", str(number))
        monkeypatch.setenv("WORLD_SIZE", "3")
        results.append(PerImage(v2.ColorJitter(0.5, 0.5), seed=1)(images))
    assert distinct(results) == 3
    monkeypatch.delenv("WORLD_SIZE")
    assert torch.equal(PerImage(v2.ColorJitter(0.5, 0.5), seed=1)(images), results[0])


def weighted(number, **options):
    generator = torch.Generator().manual_seed(number)
    sampler = WeightedRandomSampler(torch.ones(COUNT), COUNT, generator=generator)
    sampler.rank, sampler.num_replicas = number, 2  # as torch.distributed would say
    return load(Of(lambda index: index), None, sampler=sampler, **options)


def test_the_state_of_another_rank_is_refused_where_ranks_would_sample_alike(file):
    state = json.loads(json.dumps(weighted(0).state_dict()))
    own = weighted(0)
    own.load_state_dict(state)
    with pytest.raises(ValueError, match=r"of rank 0, and this is rank 1.*state \| .\"rank\": 1"):
        weighted(1).load_state_dict(state)
    meant = weighted(1)
    meant.load_state_dict(state | {"rank": 1})
    assert [b.tolist() for b in meant] == [b.tolist() for b in own]
    with pytest.raises(ValueError, match="with seed=0, and this one has seed=1"):
        weighted(1, seed=1).load_state_dict(state | {"rank": 1})
    dataset = Of(lambda index: (EncodedImage(file, index), index))
    shared = [
        load(dataset, CROP, sampler=DistributedSampler(dataset, 2, number)) for number in range(2)
    ]
    shared[1].load_state_dict(shared[0].state_dict())


class Shard(IterableDataset):
    """Every ``count``-th sample, from ``first`` on."""

    def __init__(self, file, first, count):
        self.file, self.first, self.count = file, first, count

    def __iter__(self):
        for number in range(self.first, 24, self.count):
            yield EncodedImage(self.file, number), number


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_begins_otherwise_is_not_resumed(file, workers):
    def make(first, count):
        return load(Shard(file, first, count), CROP, batch_size=2, num_workers=workers)

    prefetcher = make(0, 2)
    iterator = iter(prefetcher)
    had = [next(iterator)[1].tolist() for _ in range(2)]
    state = json.loads(json.dumps(prefetcher.state_dict()))
    rest = [numbers.tolist() for _, numbers in iterator]
    for first, count in ((0, 3), (1, 2)):
        other = make(first, count)
        other.load_state_dict(state)
        with pytest.raises(ValueError, match="does not begin with the batches"):
            iter(other)
    same = make(0, 2)
    same.load_state_dict(state)
    assert [numbers.tolist() for _, numbers in same] == rest
    assert had + rest == [numbers.tolist() for _, numbers in prefetcher]


def test_a_state_of_another_number_of_ranks_is_for_the_beginning_of_an_epoch(file):
    dataset = Of(lambda index: (EncodedImage(file, index), index))

    def prefetcher(number, world_size):
        sampler = DistributedSampler(dataset, world_size, number)
        return load(dataset, CROP, sampler=sampler, batch_size=1)

    first = prefetcher(0, 2)
    prefetcher(1, 3).load_state_dict(first.state_dict())
    next(iter(first))
    with pytest.raises(ValueError, match=r"middle of an epoch on 2 ranks.*set_epoch\(1\)"):
        prefetcher(1, 3).load_state_dict(first.state_dict())


def test_over_ranks_a_batch_of_bad_files_is_an_error(file):
    def sample(index):
        return EncodedImage(b"\xff\xd8bad" if index in (1, 3) else file, index), index

    def prefetcher(size, world_size):
        dataset = Of(sample)
        sampler = DistributedSampler(dataset, world_size, world_size - 1, shuffle=False)
        options = {"on_error": "skip"}
        return load(dataset, CROP, sampler=sampler, batch_size=size, prefetcher=options)

    for size in (2, 4):
        assert sum(len(numbers) for _, numbers in prefetcher(size, 1)) == COUNT - 2
    with pytest.warns(UserWarning, match=r"one of several ranks.*replace"):
        assert [len(numbers) for _, numbers in prefetcher(4, 2)] == [2, 2]
    with pytest.raises(BadImageError, match=r"on rank 1 of 2.*on_error=.replace"):
        list(prefetcher(2, 2))


# --- seeds and epochs ---


@pytest.mark.parametrize("workers", [0, 1])
def test_a_seed_is_read_as_an_epoch_begins(file, workers):
    dataset = Of(lambda index: EncodedImage(file, index))
    torch.manual_seed(4)
    late = load(dataset, CROP, seed=None, num_workers=workers, persistent_workers=workers > 0)
    for epoch, seed in enumerate((5, 6)):
        torch.manual_seed(seed)
        found = images_of(late)
        assert late.seed == seed
        given = load(dataset, CROP, seed=seed)
        given.set_epoch(epoch)
        assert torch.equal(images_of(given), found)


def test_the_seed_of_an_epoch_is_in_its_state(file):
    dataset = Of(lambda index: EncodedImage(file, index))
    torch.manual_seed(1)
    prefetcher = load(dataset, CROP, seed=None)
    iterator = iter(prefetcher)
    next(iterator)
    torch.manual_seed(2)  # for the next epoch
    state = prefetcher.state_dict()
    assert state["seed"] == 1
    rest = images_of(iterator)
    following = images_of(prefetcher)
    for late in (3, 2):
        torch.manual_seed(late)
        resumed = load(dataset, CROP, seed=None)
        resumed.load_state_dict(state)
        assert torch.equal(images_of(resumed), rest)
        torch.manual_seed(2)
        # A script that seeds anew has that seed; one that does not goes on with the state's.
        assert torch.equal(images_of(resumed), following) == (late == 3)


def test_an_epoch_has_the_number_of_a_sampler_that_is_ahead(file):
    dataset = Of(lambda index: (EncodedImage(file, index), index))

    def run(epochs, calls=True):
        sampler = DistributedSampler(dataset, 1, 0)
        prefetcher = load(dataset, CROP, sampler=sampler)
        for epoch in epochs:
            if calls:
                sampler.set_epoch(epoch)
            batches = list(prefetcher)
            order = torch.cat([numbers for _, numbers in batches]).argsort()
            yield images_of(batches)[order]

    whole = list(run(range(4)))
    assert distinct(torch.cat(whole)) == 4 * COUNT
    for images, resumed in zip(whole[2:], run([2, 3]), strict=True):
        assert torch.equal(images, resumed)
    # It never repeats a number: neither without set_epoch, nor where epochs have two passes each.
    assert distinct(torch.cat(list(run(range(3), calls=False)))) == 3 * COUNT
    assert distinct(torch.cat(list(run([0, 0, 1, 1])))) == 4 * COUNT
    prefetcher = load(dataset, CROP, sampler=DistributedSampler(dataset, 1, 0))
    prefetcher.sampler.set_epoch(7)
    prefetcher.set_epoch(1)  # counts
    prefetcher.sampler.set_epoch(0)
    images = images_of(prefetcher)
    prefetcher.sampler.set_epoch(0)
    prefetcher.set_epoch(1)
    prefetcher.sampler.set_epoch(0)
    assert torch.equal(images_of(prefetcher), images)


def test_which_repeat_is_replayed(file):
    dataset = Of(lambda index: (EncodedImage(file, index), index))
    prefetcher = load(dataset, CROP, sampler=[3, 5, 3, 7, 3, 1, 2, 4])
    seen = [im for ims, ns in prefetcher for im, n in zip(ims, ns, strict=True) if n == 3]
    for repeat, image in enumerate(seen):
        assert torch.equal(prefetcher.replay(3, repeat=repeat)[0][0], image)
    with pytest.raises(LookupError, match="sample 3 more than 3 times so far"):
        prefetcher.replay(3, repeat=3)
    with pytest.raises(ValueError, match=r"from 0, got -1: replay\(3, repeat=0\)"):
        prefetcher.replay(3, repeat=-1)


@pytest.mark.parametrize("workers", [0, 1])
def test_inference_mode_around_building_and_loading(file, workers):
    dataset = Of(lambda index: EncodedImage(file, index))

    def make():
        return load(dataset, CROP, num_workers=workers, persistent_workers=workers > 0)

    expected = images_of(make())
    with torch.inference_mode():
        built = make()
    assert torch.equal(images_of(built), expected)
    state = built.state_dict()
    with torch.inference_mode():
        built.load_state_dict(state | {"epoch": 0})
        copied = copy.copy(built)
    for prefetcher in (built, copied):
        assert torch.equal(images_of(prefetcher), expected)


@pytest.mark.parametrize("large", [0, 1 << 26])
def test_batches_without_repeats_are_counted_at_once_and_others_one_by_one(large):
    counted = Repeats(range(large + 2000))
    keys = [array("q", numbers) for numbers in ([3, 1], [1999, 2], [2, 5, 5], [5, 1999, 7])]
    given = [counted.add(array("q", (key + large for key in batch))) for batch in keys]
    assert [[*names] for names, _ in given] == [[key + large for key in batch] for batch in keys]
    assert [[*repeats] for _, repeats in given] == [[], [], [1, 0, 1], [2, 1, 0]]
    assert [*counted.add(array("q", [-1]))[0]] == [large + 1999]
