"""Loaders of frameworks: made of a prefetcher's parts, endless, or copying by themselves."""

import os
import pickle
from operator import itemgetter
from pathlib import Path

import pytest
import torch
from fakes import numbered, prefetcher_of
from one_iterator import OneIterator, Partly, Repeating, RepeatingAtOnce, RepeatingLater, Skipping
from pictures import draw, encode
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import gpuprefetch
from gpuprefetch import DataPrefetcher, RandomResizedCrop, accelerate
from gpuprefetch.images.guard import UndecodedError

COUNT = 12
CROP = [RandomResizedCrop(8)]
ENDLESS = [Repeating, RepeatingAtOnce, RepeatingLater]
PIPELINE = v2.Compose([v2.RandomResizedCrop(8), v2.PILToTensor()])


@pytest.fixture(scope="module")
def files():
    return [encode(draw(16, 20 + i, seed=i), "JPEG") for i in range(COUNT)]


@pytest.fixture(scope="module")
def folder(files, tmp_path_factory):
    root = tmp_path_factory.mktemp("loaders")
    for i, file in enumerate(files):
        path = root / f"class{i % 2}" / f"{i:02d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(file)
    return root


def kept_apart(samples):
    return {"images": [image for image, _ in samples], "target": [n for _, n in samples]}


def rebuilt(prefetcher, done=0, **options):
    """Another DataLoader of the parts, as frameworks make one that leaves out what is done."""
    options = {"num_workers": prefetcher.num_workers, "collate_fn": prefetcher.collate_fn} | options
    left = list(prefetcher.batch_sampler)[done:]
    return DataLoader(prefetcher.dataset, batch_sampler=left, **options)


def images_of(batch):
    return batch["images"] if isinstance(batch, dict) else batch[0]


# --- a loader that was made of a prefetcher's parts -----------------------------------------------


@pytest.mark.parametrize(
    ("transforms", "collate", "workers"),
    [
        (CROP, None, 0),
        (CROP, kept_apart, 0),
        (CROP, None, 1),
        (None, None, 0),
        (None, kept_apart, 1),
    ],
)
def test_a_loader_made_of_the_parts_gives_nothing_half_done(files, collate, transforms, workers):
    options = {"collate_fn": collate, "num_workers": workers, "batch_size": 4, "seed": 1}
    prefetcher, fresh = (
        prefetcher_of(numbered(files), transforms=transforms, **options) for _ in range(2)
    )
    whole = list(prefetcher)
    rest = rebuilt(fresh, done=1)
    with pytest.warns(
        UserWarning, match=r"parts, .* not ahead.*prefetcher\.over\(loader\)"
    ) as told:
        finished = [batch.to("cpu") for batch in rest]
    assert sum("prefetcher.over(loader)" in str(warning.message) for warning in told) == 1
    # What the warning says.
    over = fresh.over(rest)
    again = DataPrefetcher(rest, transforms=transforms, device="cpu", seed=1)
    for other in (finished, over, again):
        for got, want in zip(other, whole[1:], strict=True):
            assert all(map(torch.equal, images_of(got), images_of(want)))


USES = [
    lambda batch: batch.mean(),
    lambda batch: batch[0],
    lambda batch: len(batch),
    lambda batch: list(batch),
    lambda batch: dict(**batch),
    lambda batch: torch.stack(batch),
]


@pytest.mark.parametrize("use", USES)
def test_a_batch_that_is_not_finished_is_no_batch(files, use):
    (batch,) = rebuilt(prefetcher_of(numbered(files), transforms=CROP, batch_size=COUNT))
    with pytest.raises(TypeError, match=r"not decoded and transformed before batch\.to|Unfinished"):
        use(batch)


@pytest.mark.filterwarnings("ignore:A DataLoader was made of")
def test_tensors_that_would_lack_transforms_are_no_batches_either():
    data = TensorDataset(torch.zeros(4, 3, 5, 5))
    moved = prefetcher_of(data, transforms=[lambda images: images + 1], batch_size=2)
    with pytest.raises(TypeError, match="not decoded and transformed before"):
        next(iter(rebuilt(moved)))[0]
    assert torch.equal(next(iter(rebuilt(moved))).to("cpu")[0], torch.ones(2, 3, 5, 5))
    cast = prefetcher_of(data, dtype=torch.float64, batch_size=2)
    assert next(iter(rebuilt(cast))).to("cpu")[0].dtype == torch.float64
    plain = prefetcher_of(data, batch_size=2)
    assert torch.equal(next(iter(rebuilt(plain)))[0], torch.zeros(2, 3, 5, 5))


@pytest.mark.filterwarnings("ignore:A DataLoader was made of")
def test_each_epoch_of_such_a_loader_has_its_own_random_parameters(files):
    options = {"transforms": CROP, "batch_size": 4, "seed": 1}
    prefetcher, fresh = (prefetcher_of(numbered(files), **options) for _ in range(2))
    rest = rebuilt(fresh)
    for _ in range(2):
        for got, want in zip([batch.to("cpu") for batch in rest], prefetcher, strict=True):
            assert torch.equal(got[0], want[0])


@pytest.mark.filterwarnings("ignore:A DataLoader was made of", "ignore:on_error has left out")
def test_a_batch_of_bad_files_alone_is_an_error_there(files):
    data = numbered([b"no picture"] * 4 + files[:4])
    prefetcher = prefetcher_of(data, transforms=CROP, batch_size=4, on_error="skip")
    bad, good = rebuilt(prefetcher)
    with pytest.raises(RuntimeError, match=r"left out all images .*on_error=\"replace\""):
        bad.to("cpu")
    with pytest.raises(RuntimeError):
        good.to("cpu")  # the error has ended the epoch
    over = prefetcher.over(rebuilt(prefetcher))
    assert [target.tolist() for _, target in over] == [[4, 5, 6, 7]]


def test_a_stream_without_a_length_is_refused_elsewhere(files):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from numbered(files)

    prefetcher = prefetcher_of(Stream(), transforms=CROP)
    rest = DataLoader(prefetcher.dataset, batch_size=4, collate_fn=prefetcher.collate_fn)
    with pytest.raises(UndecodedError, match=r"lack its transforms.*\.over\(loader\)"):
        next(iter(rest))
    assert next(iter(prefetcher.over(rest)))[0].shape == (4, 3, 8, 8)


def test_what_is_handed_out_has_what_the_collate_function_has():
    collate = pickle.loads(pickle.dumps(prefetcher_of([1, 2], collate_fn=itemgetter(0)).collate_fn))
    assert collate([3, 4]) == 3
    collate = DataPrefetcher(DataLoader([1], collate_fn=Collator()), device="cpu").collate_fn
    assert collate.tokenizer == "words"
    with pytest.raises(AttributeError, match="DataPrefetcher around it has none"):
        _ = DataPrefetcher([1, 2], device="cpu").collate_fn


class Collator:
    tokenizer = "words"

    def __call__(self, samples):
        return samples


def test_the_parts_of_a_moved_loader_are_those_of_the_plain_one(folder):
    loader = DataLoader(ImageFolder(folder, PIPELINE), batch_size=4)
    options = {"device": "cpu", "print_plan": False, "seed": 2}
    moved = accelerate(loader, **options)
    whole = list(moved)
    rest = rebuilt(moved, done=1)
    assert [y.tolist() for _, y in rest] == [y.tolist() for _, y in whole[1:]]
    assert next(iter(rest))[0].shape == (4, 3, 8, 8)
    over = moved.over(rest)
    over.set_epoch(0)
    assert all(torch.equal(got, want) for (got, _), (want, _) in zip(over, whole[1:], strict=True))
    added = accelerate(loader, transforms=[lambda images: images // 2], **options)
    with pytest.raises(UndecodedError, match=r"lack the transforms that accelerate\(\) was given"):
        next(iter(rebuilt(added)))
    assert next(iter(added.over(rebuilt(added))))[0].shape == (4, 3, 8, 8)
    again = accelerate(rebuilt(added), **options)
    assert torch.equal(next(iter(again))[0], whole[0][0])
    other = DataLoader(ImageFolder(folder, PIPELINE), batch_size=4)
    with pytest.raises(TypeError, match=r"over the same dataset.* accelerate\(loader\)"):
        moved.over(other)


# --- a loader that repeats itself -----------------------------------------------------------------


class Told(Dataset):
    """Samples that say which process has read them, and what the dataset was told."""

    word = 0

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return index, os.getpid(), self.word


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_loader_that_repeats_itself_keeps_its_workers(kind):
    data = Told()
    prefetcher = prefetcher_of(data, kind=kind, batch_size=5, num_workers=2, shuffle=True)
    assert len(prefetcher) == 3
    orders = []
    workers = []
    for epoch in range(3):
        if epoch == 2:
            data.word = 7
            prefetcher.reset()  # as ultralytics does where it changes the dataset
        keys, pids, words = map(torch.cat, zip(*prefetcher, strict=True))
        orders.append(keys.tolist())
        workers.append(set(pids.tolist()))
        assert set(words.tolist()) == {data.word}
    assert all(sorted(order) == [*range(COUNT)] for order in orders)
    assert orders[0] != orders[1]
    assert workers[0] == workers[1]
    assert not workers[1] & workers[2]
    prefetcher.close()  # as ultralytics does at the end
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers[2])
    assert len(list(prefetcher)) == 3


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_loader_that_repeats_itself_gets_epochs(files, kind):
    data = numbered(files)

    def loader(kind, **options):
        sampler = DistributedSampler(data, num_replicas=1, rank=0)
        return prefetcher_of(data, kind=kind, sampler=sampler, transforms=CROP, seed=0, **options)

    def seen(prefetcher):
        return [(x.sum().item(), y.tolist()) for x, y in prefetcher]

    ours, plain = loader(kind, batch_size=4), loader(DataLoader, batch_size=4)
    for epoch in range(2):
        for each in (ours, plain):
            each.sampler.set_epoch(epoch)
        assert seen(ours) == seen(plain)
    first = loader(kind, batch_size=4)
    next(iter(first))
    resumed = loader(kind, batch_size=4)
    resumed.load_state_dict(first.state_dict())
    assert seen(resumed) == seen(loader(DataLoader, batch_size=4))[1:]


@pytest.mark.parametrize("kind", ENDLESS)
def test_accelerate_moves_a_loader_that_repeats_itself(folder, kind):
    loader = kind(ImageFolder(folder, PIPELINE), batch_size=4, num_workers=1)
    moved = accelerate(loader, device="cpu", print_plan=False)
    for _ in range(2):
        assert [n for _, y in moved for n in y.tolist()] == [0] * 6 + [1] * 6


def test_a_loader_that_does_more_than_repeat_is_left_as_it_is():
    counting = prefetcher_of(range(COUNT), kind=OneIterator, batch_size=4)
    assert type(counting.wrapped) is OneIterator
    for kind in (Skipping, Partly):
        assert type(prefetcher_of(range(COUNT), kind=kind, batch_size=2).wrapped) is kind
    skipping = prefetcher_of(range(COUNT), kind=Skipping, batch_size=2)
    for _ in range(2):
        assert [batch.tolist() for batch in skipping] == [[0, 1], [4, 5], [8, 9]]


def test_what_a_repeating_sampler_does_before_a_pass_is_done_before_an_epoch():
    loader = Repeating(range(COUNT), batch_size=4)
    prefetcher = DataPrefetcher(loader, device="cpu")
    for epoch in range(3):
        assert len(list(prefetcher)) == 3
        assert loader.batch_sampler.passes == epoch + 1


class Copying(DataLoader):
    """As insightface's ``DataLoaderX``: it copies batches to the GPU, one ahead."""

    def __iter__(self):
        self.batches = super().__iter__()
        return self

    def __next__(self):
        return next(self.batches)


def test_a_loader_that_copies_by_itself_is_refused(files):
    data = numbered(files)
    with pytest.raises(TypeError, match=r"Copying is its own .*Use a plain DataLoader: the pref"):
        prefetcher_of(data, kind=Copying, transforms=CROP)
    assert next(iter(prefetcher_of(data, transforms=CROP)))[0].shape == (8, 3, 8, 8)
    assert gpuprefetch.DataPrefetcher([1, 2], device="cpu")
