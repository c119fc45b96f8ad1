"""DataPrefetcher gives the wrapped loader's batches, in order, and leaves nothing behind."""

import copy
import gc
import os
import pickle
import re
import threading
import warnings
import weakref
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice

import fakes
import kornia.augmentation as K
import pytest
import torch
from children import Child
from fakes import leaves, threads, until
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchvision import transforms as v1
from torchvision.transforms import v2

from gpuprefetch import (
    CenterCrop,
    DataPrefetcher,
    EncodedImageFolder,
    RandomResizedCrop,
    Resize,
    Views,
)
from gpuprefetch.core.remarks import told

Pair = namedtuple("Pair", "image target")


class Numbers(Dataset):
    """Sample i in a nested structure."""

    def __init__(self, length=10, kind="tuple", fail_at=None):
        self.length, self.kind, self.fail_at = length, kind, fail_at

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == self.fail_at:
            raise LookupError(f"sample {index} is broken")
        image, target = torch.full((3, 4, 4), float(index)), index
        return {
            "tensor": image,
            "tuple": (image, target),
            "list": [image, [target, image]],
            "dict": {"image": image, "name": str(index), "nested": {"target": target}},
            "namedtuple": Pair(image, target),
        }[self.kind]


class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        yield from (torch.tensor([i]) for i in range(start, 9, step))


loader_of = partial(fakes.loader_of, batch_size=4, num_workers=0)
prefetcher_of = partial(fakes.prefetcher_of, batch_size=4, num_workers=0)


def assert_same(batch, expected):
    assert type(batch) is type(expected)
    for got, want in zip(leaves(batch), leaves(expected), strict=True):
        if isinstance(want, torch.Tensor):
            assert torch.equal(got.cpu(), want)
        else:
            assert got == want


@pytest.mark.parametrize(
    ("dataset", "workers"),
    [
        *((Numbers(kind=kind), 0) for kind in ("tensor", "tuple", "list", "dict", "namedtuple")),
        (Numbers(kind="dict"), 2),
        (Stream(), 0),
        (Stream(), 2),
    ],
)
def test_batches_are_the_loaders(device, dataset, workers):
    loader = loader_of(dataset, device, num_workers=workers)
    expected = list(loader)
    prefetcher = DataPrefetcher(loader, device=device)
    for _ in range(2):  # every iter() is a new epoch
        batches = list(prefetcher)
        assert len(batches) == len(expected)
        assert isinstance(dataset, Stream) or len(batches) == len(prefetcher)
        for batch, want in zip(batches, expected, strict=True):
            assert_same(batch, want)
            found = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
            assert all(t.device.type == device.type for t in found)


def test_shuffled_batches_are_those_of_the_same_seed(device):
    loader = loader_of(Numbers(32), device, shuffle=True)
    torch.manual_seed(3)
    expected = [list(loader), list(loader)]
    torch.manual_seed(3)
    prefetcher = DataPrefetcher(loader, device=device)
    for epoch in expected:
        for batch, want in zip(prefetcher, epoch, strict=True):
            assert_same(tuple(batch), tuple(want))


def test_any_iterable_can_be_wrapped(device):
    batches = [torch.ones(2), {"a": torch.zeros(1)}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a list is not pinned
        assert len(list(DataPrefetcher(batches, device=device))) == 2
        assert list(DataPrefetcher([], device=device)) == []


def test_looks_like_the_loader_and_leaves_it_as_it_was():
    loader = DataLoader(Numbers(10), batch_size=4, drop_last=True)
    before = dict(vars(loader))
    prefetcher = DataPrefetcher(loader, device="cpu")
    assert len(prefetcher) == 2
    assert prefetcher.dataset is loader.dataset
    assert prefetcher.batch_size == 4
    assert prefetcher.sampler is loader.sampler
    with pytest.raises(AttributeError):
        _ = prefetcher.nothing
    with pytest.raises(AttributeError, match=r"to DataPrefetcher\(loader, on_error='skip'\)"):
        prefetcher.on_error = "skip"
    list(prefetcher)
    assert vars(loader) == before


class OnceReadable(list):
    """Of iterators."""

    def __iter__(self):
        return map(iter, super().__iter__())


def test_any_batch_sampler(device):
    batches = OnceReadable([range(4), [2**64, 2**65]])  # which no 64 bits hold
    dataset = {number: number % 7 for batch in batches for number in batch}
    loader = DataLoader(dataset, batch_sampler=batches, pin_memory=device.type == "cuda")
    prefetcher = DataPrefetcher(loader, device=device)
    assert [batch.tolist() for batch in prefetcher] == [b.tolist() for b in loader]


def test_manual_form(device):
    prefetcher = prefetcher_of(Numbers(6), device)
    for _ in range(2):
        seen = []
        images, target = prefetcher.next()
        while images is not None:
            seen += target.tolist()
            images, target = prefetcher.next()
        assert target is None
        assert seen == list(range(6))


@pytest.mark.usefixtures("no_threads_of_others")
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_the_dataset_reaches_the_loop(device, workers):
    prefetcher = prefetcher_of(Numbers(12, fail_at=9), device, num_workers=workers)
    seen = []
    with pytest.raises(LookupError, match="sample 9 is broken") as caught:
        for _, target in prefetcher:
            seen += target.tolist()
    assert seen == list(range(8))  # what came before it is not lost
    assert any("batch 2" in note for note in caught.value.__notes__)
    text = "".join(str(entry) for entry in caught.traceback) + str(caught.value)
    assert "__getitem__" in text  # the original traceback
    until(lambda: not threads())
    prefetcher.dataset.fail_at = None
    assert len(list(prefetcher)) == 3


@pytest.fixture
def no_threads_of_others():
    """What an exception of another test keeps alive is gone: its frames are garbage."""
    gc.collect()


def test_a_transform_that_raises_stop_iteration_does_not_end_the_epoch(device):
    noise = iter(range(1))

    def add_noise(images):
        return images + next(noise)

    iterator = iter(prefetcher_of(Numbers(8), device, transforms=[add_noise]))
    next(iterator)
    with pytest.raises(RuntimeError, match="a transform, or on_error, raised StopIteration"):
        next(iterator)


@pytest.mark.usefixtures("no_threads_of_others")
@pytest.mark.parametrize("workers", [0, 1])
def test_break_leaves_nothing_behind(device, workers):
    before = {child.pid for child in torch.multiprocessing.active_children()}
    gc.collect()
    # Other tests leave workspaces of cuBLAS, for one.
    allocated = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    prefetcher = prefetcher_of(Numbers(64), device, num_workers=workers)
    for _ in range(2):
        for _batch in prefetcher:
            break
        del _batch
        assert [t.tolist() for _, t in islice(prefetcher, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    gc.collect()
    until(lambda: not threads())
    assert {child.pid for child in torch.multiprocessing.active_children()} <= before
    if device.type == "cuda":
        torch.cuda.synchronize()
        del prefetcher
        gc.collect()
        assert torch.cuda.memory_allocated() == allocated


def test_nested_and_simultaneous_iteration(device):
    prefetcher = prefetcher_of(Numbers(8), device, num_workers=1)
    pairs = [(int(a[0]), int(b[0])) for _, a in prefetcher for _, b in prefetcher]
    assert pairs == [(0, 0), (0, 4), (4, 0), (4, 4)]
    both = zip(prefetcher, prefetcher, strict=True)
    assert [(int(a[1][0]), int(b[1][0])) for a, b in both] == [(0, 0), (4, 4)]


class Garbage:
    """In a cycle, and says which process collected it; a CUDA event would abort in a fork."""

    def __init__(self, log):
        self.log, self.cycle = log, self

    def __del__(self):
        with self.log.open("a") as file:
            file.write(f"{os.getpid()}\n")


class Collecting(Numbers):
    def __getitem__(self, index):
        gc.collect()
        return super().__getitem__(index)


def collectors(tmp_path, device):
    log = tmp_path / "log"
    log.touch()
    gc.disable()
    try:
        Garbage(log)
        list(prefetcher_of(Collecting(4), device, num_workers=1))
    finally:
        gc.enable()
    gc.collect()
    return {int(pid) for pid in log.read_text().split()}


def test_workers_do_not_collect_the_garbage_of_their_parent(device, tmp_path):
    assert collectors(tmp_path, device) == {os.getpid()}


@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_user_has_frozen_stays_so(device, workers):
    gc.collect()  # what is garbage already would stay, too
    gc.freeze()
    before = gc.get_freeze_count()
    list(prefetcher_of(Numbers(4), device, num_workers=workers))
    assert gc.get_freeze_count() > before / 2 > 0  # some are freed without the collector


@pytest.mark.forks("only then they have the garbage")
def test_workers_would_collect_the_garbage_of_their_parent(tmp_path, monkeypatch):
    # Guards the test above: a forked worker that is not kept from it does collect it.
    gc.disable()  # the one in collectors() does nothing: the garbage could be gone before the fork
    monkeypatch.setattr(gc, "disable", lambda: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    assert len(collectors(tmp_path, torch.device("cpu"))) == 2


def test_the_manual_form_does_not_begin_anew_behind_an_error(device):
    prefetcher = prefetcher_of(Numbers(12, fail_at=9), device)
    seen = [prefetcher.next()[1].tolist() for _ in range(2)]
    with pytest.raises(LookupError, match="sample 9 is broken"):
        prefetcher.next()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"an error has ended this epoch.*set_epoch\(\)"):
            prefetcher.next()
    prefetcher.set_epoch(1)
    assert [prefetcher.next()[1].tolist() for _ in range(2)] == seen


class Generated(DataPrefetcher):
    """As Lightning's recipe: its epochs are generators."""

    def __iter__(self):
        yield from super().__iter__()


def test_the_manual_form_of_a_subclass_with_an_iterator_of_its_own():
    prefetcher = Generated(DataLoader(Numbers(4, "tensor"), 2), device="cpu")
    expected = [*prefetcher]
    for _ in range(2):
        prefetcher.set_epoch(0)
        assert torch.equal(prefetcher.next(), expected[0])
        prefetcher.set_epoch(1)  # the epoch under way goes on
        assert torch.equal(prefetcher.next(), expected[1])
        assert prefetcher.next() is None


class Nested(IterableDataset):
    """Reads through a prefetcher of its own."""

    def __init__(self):
        self.prefetcher = prefetcher_of(Numbers(6, "tensor"), batch_size=2)

    def __iter__(self):
        for _ in range(3):
            for batch in self.prefetcher:
                yield type(batch).__name__, batch[:, 0, 0, 0].tolist(), threading.active_count()


def test_a_prefetcher_in_a_worker_of_another_loader():
    here, there = (list(DataLoader(Nested(), None, num_workers=n)) for n in (0, 1))
    assert [item[:2] for item in here] == [item[:2] for item in there]
    assert max(item[2] for item in there) == 2  # its own and that of the queue, no more each epoch


class Zipped:
    """Begins two epochs of prefetchers in its `__iter__`."""

    def __init__(self, *loaders):
        self.loaders = loaders

    def __iter__(self):
        return zip(*self.loaders, strict=True)


def test_a_prefetcher_around_a_loader_of_prefetchers():
    parts = [prefetcher_of(Numbers(6, "tensor")) for _ in range(2)]
    batches = list(DataPrefetcher(Zipped(*parts), device="cpu"))
    assert len(batches) == 2 and all(torch.equal(one, other) for one, other in batches)
    assert gc.isenabled()
    with pytest.raises(TypeError, match=r"got a DataPrefetcher.*wrap the DataLoader within it"):
        DataPrefetcher(parts[0], device="cpu")


@pytest.mark.parametrize("shape", [(4, 32, 40, 3), (4, 5, 8, 1), (4, 9, 9, 4), (4, 9, 7, 3)])
def test_images_with_their_channels_last_are_refused(shape):
    images = torch.zeros(shape, dtype=torch.float32 if shape[2] == 7 else torch.uint8)
    words = r"look like \(N, H, W, C\).*torch\.from_numpy\(image\)\.permute\(2, 0, 1\)"
    with pytest.raises(ValueError, match=words):
        list(DataPrefetcher([images], device="cpu", transforms=[Resize(4)]))
    list(DataPrefetcher([images.permute(0, 3, 1, 2)], device="cpu", transforms=[Resize(4)]))
    list(DataPrefetcher([images], device="cpu"))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.int64, torch.uint16])
def test_integers_that_are_no_bytes_are_not_scaled_as_bytes(dtype):
    images = torch.ones(2, 3, 5, 5).to(dtype)
    with pytest.raises(ValueError, match="uint8 or floating point, got torch"):
        list(DataPrefetcher([images], device="cpu", dtype=torch.bfloat16))
    (same,) = DataPrefetcher([images], device="cpu")
    assert same.dtype == dtype


def test_what_is_set_says_where_it_belongs():
    loader = DataLoader(Numbers(4), 2)
    prefetcher = DataPrefetcher(loader, device="cpu")
    assert not hasattr(loader, "stats")
    with pytest.raises(AttributeError, match=r"prefetcher\.wrapped\.collate_fn = ") as told:
        prefetcher.collate_fn = list
    exec(str(told.value).rpartition(": ")[2].replace("...", "list"))
    assert prefetcher.collate_fn.collate_fn is loader.collate_fn is list
    assert [type(batch) for batch in prefetcher] == [list] * 2
    prefetcher.note = "mine"
    assert not hasattr(loader, "note")
    assert prefetcher.note == "mine"


@pytest.mark.parametrize("name", [n for n in vars(DataLoader([0])) if not n.startswith("_")])
def test_no_attribute_of_a_loader_is_set_in_passing(name):
    loader = DataLoader([0])
    prefetcher, value = DataPrefetcher(loader, device="cpu"), getattr(loader, name)
    with pytest.raises(AttributeError, match=rf"^{name} is .*\b{name} ?=") as told:
        setattr(prefetcher, name, value)
    if "fixed in the DataLoader" in str(told.value):
        with pytest.raises(ValueError, match="should not be set"):
            setattr(prefetcher.wrapped, name, value)
    else:
        setattr(prefetcher.wrapped, name, value)


def test_a_prefetcher_is_true_where_its_loader_is():
    assert DataPrefetcher(DataLoader(Numbers(4), 2), device="cpu")
    assert not DataPrefetcher([], device="cpu")
    assert DataPrefetcher(Rewound(), device="cpu")  # without a length


@pytest.mark.parametrize("epoch", ["1", 1.0, None])
def test_an_epoch_is_an_int(epoch):
    with pytest.raises(TypeError, match=rf"set_epoch takes the number .* got {epoch!r}"):
        DataPrefetcher([1, 2], device="cpu").set_epoch(epoch)


def test_a_prefetcher_over_another_loader(photo_folder):
    options = {"transforms": [RandomResizedCrop(8)], "seed": 3, "on_error": "skip"}
    one = prefetcher_of(EncodedImageFolder(photo_folder), batch_size=4, **options)
    first = list(one)
    other = one.over(DataLoader(EncodedImageFolder(photo_folder), batch_size=8))
    assert type(other) is type(one)
    assert other.stats.images == 0
    assert other.wrapped is not one.wrapped
    assert len(other) == 3
    other.set_epoch(0)
    expected = torch.cat([images for images, _ in first])
    assert torch.equal(torch.cat([images for images, _ in other]), expected)
    assert (one.stats.batches, other.stats.batches) == (6, 3)


class Named(DataPrefetcher):
    def __init__(self, loader):
        self.name = "mine"
        super().__init__(loader, device="cpu")

    @property
    def batch_size(self):
        return self._size

    @batch_size.setter
    def batch_size(self, size):
        self._size = size


def test_what_a_subclass_sets_is_its_own():
    prefetcher = Named(DataLoader(Numbers(4), 2))
    prefetcher.batch_size = 7
    assert (prefetcher.name, prefetcher.batch_size, prefetcher._loader.batch_size) == ("mine", 7, 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_copy_made_in_the_middle_of_an_epoch(workers):
    options = {"num_workers": workers, "persistent_workers": bool(workers)}
    prefetcher = prefetcher_of(Numbers(8, "tensor"), **options)
    first = prefetcher.next()
    copied = copy.deepcopy(prefetcher)
    assert torch.equal(copied.next(), first)
    assert not torch.equal(prefetcher.next(), first)


@pytest.mark.usefixtures("no_threads_of_others")
@pytest.mark.parametrize("workers", [0, 1])
def test_dropping_the_prefetcher_ends_the_epoch_of_its_next(device, workers):
    prefetcher = prefetcher_of(Numbers(20, "tensor"), device, num_workers=workers)
    prefetcher.next()
    iterator = weakref.ref(prefetcher._manual.iterator)
    del prefetcher
    gc.collect()
    assert iterator() is None
    assert not threads()


class Kept(Dataset):
    """Whole batches that stay in memory, all ones."""

    def __init__(self, device="cpu"):
        self.images = torch.ones(2, 4, 3, 64, 64, device=device)  # in shared memory

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], index


def normalize_of(library):
    return library.Normalize([0.5] * 3, [0.25] * 3, inplace=True)


IN_PLACE = {
    "v1": [normalize_of(v1)],
    "v2": [normalize_of(v2)],
    "within": [v2.Compose([v2.Identity(), v2.RandomApply([normalize_of(v2)], p=1.0)])],
    "function": [v2.Identity(), lambda images: images.sub_(0.5).div_(0.25)],
    "after a crop": [CenterCrop(64), normalize_of(v2), lambda images: images.mul_(1)],
    "views": Views(*[[normalize_of(v2)]] * 2),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", IN_PLACE)
def test_what_works_in_place_does_not_write_into_the_dataset(name, workers, device):
    dataset = Kept(device if workers == 0 else "cpu")  # on a GPU it is not copied, either
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=device.type == "cuda" and workers > 0,
    )
    prefetcher = DataPrefetcher(loader, device=device, transforms=IN_PLACE[name])
    for _ in range(3):
        for images, _ in prefetcher:
            for view in images if isinstance(images, list) else (images,):
                assert torch.equal(view.cpu(), torch.full((4, 3, 64, 64), 2.0))
    assert dataset.images.eq(1).all()


def test_only_what_is_the_loaders_is_copied(monkeypatch):
    copies, clone = [], torch.Tensor.clone

    def counted(images):
        copies.append(images.shape)
        return clone(images)

    monkeypatch.setattr(torch.Tensor, "clone", counted)
    function = [lambda images: images.mul_(2)]
    for transforms, count in (
        (function, 2),
        ([CenterCrop(64), *function], 0),
        ([CenterCrop(8)], 0),
    ):
        copies.clear()
        loader = DataLoader(Kept(), batch_size=None)
        list(DataPrefetcher(loader, device="cpu", transforms=transforms))
        assert len(copies) == count


@pytest.mark.forks("its dataset is local")
def test_the_default_device_changes_nothing(photo_folder):
    ops = [RandomResizedCrop(16), v2.ColorJitter(0.3), K.RandomGrayscale()]
    ops.append(v2.Normalize([0.5], [0.5]))
    make = partial(DataPrefetcher, device="cpu", seed=0, transforms=ops)
    images = [EncodedImageFolder(photo_folder)[i][0] for i in range(4)]
    want = list(make([images]))
    in_worker = {"num_workers": 1, "worker_init_fn": lambda _: torch.set_default_device("meta")}
    loader = DataLoader(images, batch_size=4, **in_worker)
    with torch.device("meta"):
        (got,), prefetcher = make([images]), make(loader)
    assert torch.equal(got, want[0])
    assert torch.equal(next(iter(prefetcher)), want[0])


def test_a_shallow_copy_has_epochs_of_its_own(photo_folder):
    options = {"num_workers": 1, "persistent_workers": True}
    loader = loader_of(EncodedImageFolder(photo_folder), batch_size=2, **options)
    make = partial(DataPrefetcher, loader, device="cpu", transforms=[RandomResizedCrop(8)], seed=3)
    expected, one = list(make()), make()
    iterator = iter(one)
    batches = [next(iterator)]
    copied = copy.copy(one)
    list(copied)  # its next one
    batches += iterator
    for (images, _), (others, _) in zip(batches, expected, strict=True):
        assert torch.equal(images, others)
    iter(copied)
    assert torch.equal(one.replay(0, epoch=0)[0], expected[0][0][:1])


def test_an_iterator_is_not_copied(device):
    iterator = iter(prefetcher_of(Numbers(8), device))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(NotImplementedError, match=r"cannot be copied.*state_dict\(\)"):
            copied(iterator)
    assert len(list(iterator)) == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_threads_may_share_an_iterator(device, workers):
    options = {"batch_size": 1, "num_workers": workers}
    iterator = iter(prefetcher_of(Numbers(200, "tensor"), device, **options))
    with ThreadPoolExecutor(4) as pool:
        parts = pool.map(lambda _: [int(batch[0, 0, 0, 0]) for batch in iterator], range(4))
    assert sorted(chain.from_iterable(parts)) == [*range(200)]


EXIT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from gpuprefetch import DataPrefetcher
loader = DataLoader(TensorDataset(torch.arange(64)), batch_size=4, num_workers=1)
import logging, warnings; logging.disable(); warnings.simplefilter("ignore")
iterator = iter(DataPrefetcher(loader))
next(iterator)
"""


def test_the_interpreter_exits_with_an_epoch_under_way():
    child = Child(EXIT, forked=not torch.cuda.is_available())
    _, err = child.communicate()
    assert child.returncode == 0, err
    assert err == ""


NORMALIZED = [RandomResizedCrop(8), K.Normalize(0.4, 0.2)]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"loader": Stream()}, TypeError, "with batch_size=None if"),
        ({"loader": DataLoader}, TypeError, "wraps a DataLoader"),
        ({"loader": (i for i in [1])}, TypeError, "generator gives its batches once"),
        ({"loader": zip([1], [2], strict=True)}, TypeError, "gives its batches once"),
        ({"device_prefetch_size": 0}, ValueError, "1 or more"),
        ({"device_prefetch_size": 1.5}, ValueError, r"1 or more, or None, got 1\.5"),
        ({"device": "gpu"}, ValueError, r'"cuda:1".*got \'gpu\''),
        ({"device": "cuda:99"}, ValueError, "not there"),
        ({"device": "meta"}, ValueError, "CUDA or CPU"),
        ({"device": -1}, ValueError, "device must be .* got -1"),
        ({"device": True}, ValueError, "device must be .* got True"),
        ({"decoder": "dali"}, ValueError, 'one of "auto", "cpu"'),
        ({"decoder": "torchvision", "device": "cpu"}, ValueError, "needs a CUDA device"),
        ({"cpu_share": 1.5}, ValueError, r"cpu_share.*0\.0 to 1\.0"),
        ({"on_error": "ignore"}, ValueError, "on_error"),
        ({"max_bad": "3"}, ValueError, "max_bad is a number"),
        ({"max_bad": -1}, ValueError, "max_bad is a number"),
        ({"max_bad": 3}, ValueError, 'max_bad is for on_error="skip"'),
        ({"dtype": "float16"}, ValueError, "dtype must be torch.uint8 or a floating-point one"),
        ({"dtype": torch.float8_e4m3fn}, ValueError, "floating-point one of 16 bits or more"),
        ({"memory_format": torch.preserve_format}, ValueError, "memory_format is .* got"),
        ({"memory_format": "channels_last"}, ValueError, "memory_format is .* got"),
        ({"apply_exif": "no"}, ValueError, "apply_exif must be True or False"),
        ({"seed": "3"}, ValueError, "seed is an int"),
        ({"transforms": [3]}, TypeError, "callables"),
        ({"transforms": NORMALIZED, "dtype": torch.uint8}, ValueError, "Normalize gives others"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, text):
    loader = DataLoader(Numbers())
    with pytest.raises(error, match=text):
        DataPrefetcher(**({"loader": loader} | arguments))


class Rewound:
    """As DALI's iterators: its own iterator, which begins anew."""

    def __iter__(self):
        self.batches = iter(range(3))
        return self

    def __next__(self):
        return next(self.batches)


def test_an_iterator_that_begins_anew_is_a_loader():
    prefetcher = DataPrefetcher(Rewound(), device="cpu")
    assert [list(prefetcher) for _ in range(2)] == [[0, 1, 2]] * 2


@pytest.fixture
def remarks(caplog):
    """The texts that this process has logged, as if it had told nothing so far."""
    before = set(told)
    told.clear()
    yield lambda: [record.getMessage() for record in caplog.records]
    told.update(before)


def test_a_loader_without_workers_is_remarked_on_once(remarks):
    for _ in range(2):
        loader = DataPrefetcher(DataLoader(range(3), num_workers=0), device="cpu")
        assert len(list(loader)) == len(list(loader)) == 3
    (text,) = remarks()
    assert "num_workers=0" in text and re.search(r"DataLoader\(\.\.\., num_workers=[1-8]\)", text)
    list(DataPrefetcher([torch.zeros(1)], device="cpu"))  # which has no workers to ask for
    assert len(remarks()) == 1


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_missing_gpu_is_remarked_on_unless_the_cpu_was_chosen(remarks, monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for _ in range(2):
        list(DataPrefetcher([torch.zeros(1)], device=device))
    texts = remarks()
    assert len(texts) == (device is None)
    assert all('device="cpu"' in text for text in texts)


def test_another_rank_than_the_first_is_quiet(remarks, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    list(DataPrefetcher(DataLoader(range(3)), device="cpu"))
    assert remarks() == []


@pytest.mark.gpu
def test_an_unpinned_loader_works_and_is_told_about_once():
    prefetcher = DataPrefetcher(DataLoader(Numbers(8), batch_size=4))
    with pytest.warns(UserWarning, match="pin_memory=True") as told:
        assert len(list(prefetcher)) == 2
        assert len(list(prefetcher)) == 2
    assert len(told) == 1


@pytest.mark.gpu
def test_the_callers_stream_and_device_are_never_changed():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for images, _ in DataPrefetcher(loader_of(Numbers(8), "cuda")):
            assert torch.cuda.current_stream() == stream
            assert images.device == torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
def test_integer_devices():
    last = torch.cuda.device_count() - 1
    for images, _ in DataPrefetcher(loader_of(Numbers(4), "cuda"), device=last):
        assert images.device == torch.device("cuda", last)
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_batches_kept_by_the_caller_stay_intact():
    # 200 batches held at once while the pipeline goes on: none may be overwritten.
    loader = loader_of(Numbers(800), "cuda", num_workers=2)
    batches = list(DataPrefetcher(loader))
    for number, (images, target) in enumerate(batches):
        assert target.tolist() == list(range(4 * number, 4 * number + 4))
        assert torch.equal(images[:, 0, 0, 0].long(), target)
