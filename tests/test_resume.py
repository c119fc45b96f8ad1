"""A resumed epoch gives the batches that the uninterrupted one would have given, each once."""

import kornia.augmentation as K
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from gpuprefetch import DataPrefetcher, EncodedImageFolder, RandomResizedCrop


class Counting(IterableDataset):
    def __iter__(self):
        yield from range(20)


def numbers(**options):
    return DataLoader(TensorDataset(torch.arange(40)), batch_size=4, **options)


LOADERS = {
    "shuffled": lambda: numbers(shuffle=True),
    "workers": lambda: numbers(shuffle=True, num_workers=2),
    "generator": lambda: numbers(shuffle=True, generator=torch.Generator().manual_seed(3)),
    "iterable": lambda: DataLoader(Counting(), batch_size=4),
    "persistent": lambda: numbers(shuffle=True, num_workers=1, persistent_workers=True),
}


def values(batch):
    return (batch[0] if isinstance(batch, list) else batch).tolist()


@pytest.mark.parametrize("name", list(LOADERS))
def test_the_rest_of_the_epoch_is_the_same(name, device):
    torch.manual_seed(5)
    options = {"device": device}
    prefetcher = DataPrefetcher(LOADERS[name](), **options)
    if device.type == "cuda":
        prefetcher._checked = True  # these loaders are not pinned
    list(prefetcher)
    whole, state = [], None
    for number, batch in enumerate(prefetcher):
        whole.append(values(batch))
        if number == 2:
            state = prefetcher.state_dict()
    torch.manual_seed(99)
    before = torch.get_rng_state()
    resumed = DataPrefetcher(LOADERS[name](), device_prefetch_size=3, **options)
    resumed._checked = True
    resumed.load_state_dict(state)
    rest = [values(batch) for batch in resumed]
    assert rest == whole[3:]
    assert torch.equal(torch.get_rng_state(), before)  # the caller's generator is left alone


def test_the_next_epoch_is_a_whole_one():
    prefetcher = DataPrefetcher(numbers(), device="cpu")
    iterator = iter(prefetcher)
    next(iterator)
    state = prefetcher.state_dict()
    resumed = DataPrefetcher(numbers(), device="cpu")
    resumed.load_state_dict(state)
    assert len(list(resumed)) == 9
    assert len(list(resumed)) == 10
    assert resumed.state_dict()["epoch"] == 1


def test_a_state_before_the_first_epoch_and_a_wrong_one():
    prefetcher = DataPrefetcher(numbers(), device="cpu")
    state = prefetcher.state_dict()
    prefetcher.load_state_dict(state)
    assert len(list(prefetcher)) == 10
    with pytest.raises(ValueError, match=r"must come from DataPrefetcher\.state_dict"):
        prefetcher.load_state_dict({"model": 1})


def test_a_distributed_sampler_gets_its_epoch_back():
    def loader():
        data = TensorDataset(torch.arange(40))
        return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 2, 0))

    prefetcher = DataPrefetcher(loader(), device="cpu")
    prefetcher.set_epoch(7)
    iterator = iter(prefetcher)
    next(iterator)
    state = prefetcher.state_dict()
    rest = [values(batch) for batch in iterator]
    resumed = DataPrefetcher(loader(), device="cpu")
    resumed.load_state_dict(state)
    assert [values(batch) for batch in resumed] == rest


def test_augmented_pictures_are_the_same(photo_folder, device):
    def prefetcher(**options):
        loader = DataLoader(
            EncodedImageFolder(photo_folder),
            batch_size=6,
            shuffle=True,
            num_workers=1,
            pin_memory=device.type == "cuda",
        )
        transforms = [RandomResizedCrop(16), K.ColorJitter(0.4, 0.4)]
        return DataPrefetcher(
            loader, device=device, transforms=transforms, cpu_share=0.0, **options
        )

    torch.manual_seed(2)
    first = prefetcher(seed=11)
    whole, state = [], None
    for images, _ in first:
        whole.append(images)
        state = state or first.state_dict()
    resumed = prefetcher()
    resumed.load_state_dict(state)
    rest = [images for images, _ in resumed]
    assert len(rest) == 3
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[1:], strict=True))


def test_a_prefetcher_with_persistent_workers_goes_back():
    prefetcher = DataPrefetcher(numbers(num_workers=1, persistent_workers=True), device="cpu")
    iterator = iter(prefetcher)
    whole = [values(next(iterator)) for _ in range(4)]
    state = prefetcher.state_dict()
    whole += [values(batch) for batch in iterator]
    for _ in range(2):
        prefetcher.load_state_dict(state)
        assert [values(batch) for batch in prefetcher] == whole[4:]
    assert [values(batch) for batch in prefetcher] == whole
