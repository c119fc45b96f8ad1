"""Workers of a folder begin the next epoch ahead of time; nobody can tell but by the time."""

import functools
import gc
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from children import Child
from fakes import until
from pictures import draw as draw_picture
from pictures import encode
from PIL import Image
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from gpuprefetch import DataPrefetcher, EncodedImageFolder, RandomResizedCrop, accelerate
from gpuprefetch.core.forecast import STARTS, Forecast, draws_since
from gpuprefetch.images import loading
from gpuprefetch.images.steady import Steady

COUNT = 12  # pictures


class Own(EncodedImageFolder):
    """The same samples from a class of the user's: nothing is read ahead of time."""

    def __getitem__(self, index):
        return super().__getitem__(index)


class Drawing(EncodedImageFolder):
    """Targets that are drawn in the workers."""

    def __getitem__(self, index):
        image, _ = super().__getitem__(index)
        return image, int(torch.randint(1 << 30, ()))


class Shuffled(Sampler):
    """A sampler of the user's."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(torch.randperm(self.length).tolist())


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """An ImageFolder of 3 classes and 12 pictures."""
    root = tmp_path_factory.mktemp("photos")
    for i in range(COUNT):
        path = root / f"class{i % 3}" / f"{i:02d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode(draw_picture(20 + i, 24, seed=i), "JPEG"))
    return root


@pytest.fixture(autouse=True)
def no_loaders_of_other_tests():
    """Other tests leave loaders behind, which would count as those of a validation."""
    STARTS.shown()


@pytest.fixture(autouse=True)
def no_workers_are_left():
    yield
    gc.collect()
    until(lambda: not multiprocessing.active_children())


def alive():
    """The numbers of the worker processes."""
    return {child.pid for child in multiprocessing.active_children()}


def loader_of(dataset, persistent, **options):
    options = {"batch_size": 2, "shuffle": True, "num_workers": 2} | options
    options = {"pin_memory": torch.cuda.is_available()} | options
    return DataLoader(dataset, persistent_workers=persistent, **options)


def prefetcher_of(dataset, persistent, device=None, **options):
    loader = loader_of(dataset, persistent, **options)
    return DataPrefetcher(loader, device=device, transforms=[RandomResizedCrop(16)])


def validate(prefetcher, epoch):
    for _ in DataLoader(range(3)):
        pass


def validate_now_and_then(prefetcher, epoch):
    if epoch % 2:
        validate(prefetcher, epoch)


def draw(prefetcher, epoch):
    torch.rand(3)


def seed_anew(prefetcher, epoch):
    torch.manual_seed(epoch)


def replace_a_sample(prefetcher, epoch):
    if epoch == 1:
        samples = prefetcher.dataset.samples
        samples[3] = samples[5]


def leave_samples_out(prefetcher, epoch):
    if epoch == 1:
        del prefetcher.dataset.samples[9:]


def number_epochs(prefetcher, epoch):
    prefetcher.set_epoch(2 * epoch)


def smaller_batches(prefetcher, epoch):
    if epoch == 1:
        prefetcher.batch_sampler.batch_size = 2


def save_a_state(prefetcher, epoch):
    prefetcher.state_dict()


def go_back(prefetcher, epoch):
    if epoch == 1:
        iterator = iter(prefetcher)
        next(iterator)
        prefetcher.load_state_dict(prefetcher.state_dict())


def look_at_one(prefetcher, epoch):
    next(iter(prefetcher))


def drop_unused(prefetcher, epoch):
    iter(prefetcher)


def do_nothing(prefetcher, epoch):
    pass


def seen(dataset, persistent, between, epochs=3, **options):
    """What a loop sees: all batches, and the states of torch's generator between epochs."""
    torch.manual_seed(5)
    prefetcher = prefetcher_of(dataset, persistent, **options)
    batches = []
    states = []
    for epoch in range(epochs):
        batches += [(images.clone(), targets) for images, targets in prefetcher]
        states.append(torch.get_rng_state())
        between(prefetcher, epoch)
        states.append(torch.get_rng_state())
    return batches, states


def assert_same(first, second):
    assert len(first[0]) == len(second[0])
    for (images, targets), (others, other_targets) in zip(first[0], second[0], strict=True):
        assert torch.equal(images, others)
        assert torch.equal(targets, other_targets)
    for state, other in zip(first[1], second[1], strict=True):
        assert torch.equal(state, other)


# One worker begins an epoch as several do: two of its four batches.
ONE = {"num_workers": 1, "batch_size": 3}
BOTH = [do_nothing, validate, draw, replace_a_sample, go_back, look_at_one, drop_unused]
ENDING = [validate_now_and_then, seed_anew, leave_samples_out]
PERSISTENT = [number_epochs, smaller_batches, save_a_state]
LOOPS = [(between, True) for between in BOTH + PERSISTENT]
LOOPS += [(between, False) for between in BOTH + ENDING]


@pytest.mark.parametrize(("between", "persistent"), LOOPS)
def test_a_loop_sees_the_same(photos, persistent, between):
    ahead = seen(EncodedImageFolder(photos), persistent, between, **ONE)
    # Without workers, an order is drawn with the first batch that is asked for.
    draws_at_once = persistent or between is drop_unused
    options = ONE | {"num_workers": int(draws_at_once)}
    assert_same(ahead, seen(Own(photos), persistent, between, **options))


@pytest.mark.parametrize("persistent", [True, False])
def test_order_and_generator_are_those_of_a_plain_loader(photos, persistent):
    _, states = seen(EncodedImageFolder(photos), persistent, validate)
    torch.manual_seed(5)
    plain = loader_of(Subset(range(COUNT), range(COUNT)), persistent)
    expected = []
    for epoch in range(3):
        for _ in plain:
            pass
        expected.append(torch.get_rng_state())
        validate(None, epoch)
        expected.append(torch.get_rng_state())
    for state, other in zip(states, expected, strict=True):
        assert torch.equal(state, other)


@pytest.mark.parametrize("persistent", [True, False])
def test_batches_are_read_before_the_epoch_begins(photos, tmp_path, persistent):
    root = shutil.copytree(photos, tmp_path / "photos")
    prefetcher = prefetcher_of(EncodedImageFolder(root), persistent, prefetch_factor=3)
    for _ in prefetcher:
        pass
    until(lambda: prefetcher.stats.batches == 6)
    time.sleep(0.3)  # the workers read 6 batches meanwhile
    shutil.rmtree(root)
    assert len([*prefetcher]) == 6
    with pytest.raises(FileNotFoundError):  # and then they look for the files
        next(iter(prefetcher))


def test_workers_of_a_validation_that_start_once_are_not_expected_again(photos, tmp_path):
    root = shutil.copytree(photos, tmp_path / "photos")
    train = prefetcher_of(EncodedImageFolder(root), True, prefetch_factor=3)
    validation = prefetcher_of(EncodedImageFolder(photos), True, shuffle=False)
    for _ in range(2):
        assert len([*train]) == len([*validation]) == 6
    time.sleep(0.3)  # the workers read 6 batches meanwhile
    shutil.rmtree(root)
    assert len([*train]) == 6


def shuffled_validation(root, persistent):
    return prefetcher_of(EncodedImageFolder(root), persistent)


def validation_in_order(root, persistent):
    return prefetcher_of(EncodedImageFolder(root), persistent, shuffle=False)


def validation_that_has_begun(root, persistent):
    validation = validation_in_order(root, persistent)
    assert len([*validation]) == 6
    return validation


KINDS = [shuffled_validation, validation_in_order, validation_that_has_begun]


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_validation_is_foreseen(photos, tmp_path, kind, persistent):
    root = shutil.copytree(photos, tmp_path / "photos")
    validation = kind(photos, persistent)
    train = prefetcher_of(EncodedImageFolder(root), persistent, prefetch_factor=3)
    assert len([*train]) == len([*validation]) == 6
    time.sleep(0.3)  # the workers read 6 batches meanwhile
    shutil.rmtree(root)
    assert len([*train]) == 6


def test_the_same_photos_in_another_loader_are_no_validation(photos, tmp_path):
    root = shutil.copytree(photos, tmp_path / "photos")
    train = prefetcher_of(EncodedImageFolder(root), True, prefetch_factor=3)
    other = train.over(train.wrapped)
    again = DataPrefetcher(loader_of(train.dataset, True))
    assert len([*train]) == 6
    time.sleep(0.3)  # the workers read 6 batches meanwhile
    shutil.rmtree(root)
    assert len([*train]) == len(other) == len(again)


def test_a_loader_that_an_earlier_loop_did_not_begin_is_no_validation(photos, tmp_path):
    root = shutil.copytree(photos, tmp_path / "photos")
    spare = prefetcher_of(EncodedImageFolder(photos), True)
    first = prefetcher_of(EncodedImageFolder(photos), True)
    for _ in range(2):
        assert len([*first]) == 6
    second = prefetcher_of(EncodedImageFolder(root), True, prefetch_factor=3)
    assert len([*second]) == 6
    time.sleep(0.3)  # the workers read 6 batches meanwhile
    shutil.rmtree(root)
    assert len([*second]) == len(spare)


def test_workers_live_on_where_nothing_can_have_changed(photos):
    prefetcher = prefetcher_of(EncodedImageFolder(photos), persistent=False)
    found = set()
    for _ in range(3):
        for _ in prefetcher:
            found |= alive()
        assert alive() == found
    assert len(found) == 2
    del prefetcher
    gc.collect()
    until(lambda: not alive())
    until(lambda: not [each for each in threading.enumerate() if each.name == "gpuprefetch-idle"])


def test_workers_end_with_the_epoch_where_no_thread_can_watch_them(photos, monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "gpuprefetch-idle":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    prefetcher = prefetcher_of(EncodedImageFolder(photos), persistent=False)
    for _ in range(2):
        assert len([*prefetcher]) == 6
        until(lambda: not alive())


# --- While the loop has the last batches still before it ---

LATE = COUNT // 2 - 2  # the last batch but one, of two samples each


def leave(prefetcher, epoch):
    return epoch == 1


def keep_state(prefetcher, epoch):
    if epoch == 1:
        prefetcher.load_state_dict(prefetcher.state_dict())
        return True
    return False


def number_next(prefetcher, epoch):
    prefetcher.set_epoch(2 * epoch + 2)


DURING = [(leave, True), (keep_state, True), (number_next, True), (draw, True)]
DURING += [(leave, False), (keep_state, False), (validate, False), (replace_a_sample, False)]


def seen_during(dataset, persistent, during, *, pause=0.0, **options):
    """What a loop sees that does something in its last batches, and ends there if that is true.

    Before these it waits for ``pause`` seconds.
    """
    torch.manual_seed(5)
    prefetcher = prefetcher_of(dataset, persistent, **options)
    batches = []
    states = []
    for epoch in range(4):
        for number, (images, targets) in enumerate(prefetcher):
            batches.append((images.clone(), targets))
            if number == 2:
                time.sleep(pause)
            if number == LATE and during(prefetcher, epoch):
                break
        states.append(torch.get_rng_state())
    return batches, states


@pytest.mark.usefixtures("threaded")
@pytest.mark.parametrize(("during", "persistent"), DURING)
def test_a_loop_sees_the_same_of_what_it_does_in_its_last_batches(photos, persistent, during):
    # The workers read what is left in the pause.
    ahead = seen_during(EncodedImageFolder(photos), persistent, during, pause=0.1)
    # Nothing is read ahead of time here, by however many workers.
    assert_same(ahead, seen_during(Own(photos), persistent, during, num_workers=1))


@pytest.mark.usefixtures("threaded")
def test_an_error_of_the_last_batches_comes_in_its_place(photos, tmp_path):
    root = shutil.copytree(photos, tmp_path / "photos")
    options = {"shuffle": False}
    prefetcher = prefetcher_of(EncodedImageFolder(root), True, **options)
    path = Path(prefetcher.dataset.samples[-1][0])
    data = path.read_bytes()
    path.unlink()
    seen = []
    with pytest.raises(FileNotFoundError):
        seen.extend(targets.tolist() for _, targets in prefetcher)
    assert len(seen) == LATE + 1
    path.write_bytes(data)
    assert len([*prefetcher]) == LATE + 2


def noisy(images):
    return images + torch.rand(1, device=images.device)


@pytest.mark.usefixtures("threaded")
@pytest.mark.parametrize("persistent", [True, False])
def test_the_last_batches_keep_the_seed_of_their_epoch(photos, persistent):
    seen = []
    for dataset in (EncodedImageFolder(photos), Own(photos)):
        torch.manual_seed(5)
        loader = loader_of(dataset, persistent, prefetch_factor=3)
        prefetcher = DataPrefetcher(loader, transforms=[RandomResizedCrop(16), noisy])
        batches = []
        for number, (images, targets) in enumerate(prefetcher):
            batches.append((images.clone(), targets))
            if number == 0:
                torch.manual_seed(9)  # for the next epoch, which the workers begin
                time.sleep(0.3)  # once they have read all batches of this one
        seen.append((batches, []))
    assert_same(*seen)


@pytest.mark.usefixtures("threaded")
def test_the_last_batches_come_where_the_next_epoch_has_no_samples(photos):
    options = {"prefetch_factor": 3}
    prefetcher = prefetcher_of(EncodedImageFolder(photos), True, **options)
    samples = [*prefetcher.dataset.samples]
    for number, _ in enumerate(prefetcher):
        if number == 0:
            prefetcher.dataset.samples.clear()
            time.sleep(0.3)  # the workers read what is left meanwhile
    assert number == LATE + 1
    prefetcher.dataset.samples.extend(samples)
    assert len([*prefetcher]) == LATE + 2


# --- What changes in place, and what only looks equal ---


def seen_with(change, make, kind, **options):
    """What a loop sees of a dataset of a class of folders that ``change`` is called with."""
    torch.manual_seed(5)
    dataset = make(kind)
    prefetcher = prefetcher_of(dataset, False, **options)
    batches = []
    for epoch in range(3):
        batches += [(images.clone(), targets) for images, targets in prefetcher]
        change(dataset, epoch)
    return batches, []


def given_targets(dataset, make):
    samples = [(path, make(number)) for number, (path, _) in enumerate(dataset.samples)]
    dataset.samples = samples
    return dataset


def add_to_targets(dataset, epoch):
    for _, target in dataset.samples:
        target += 1


def make_other_arrays(dataset, epoch):
    given_targets(dataset, lambda number: np.array([epoch, number]))


TARGETS = {
    "arrays": (lambda number: np.array([0, number]), add_to_targets),
    "tensors": (lambda number: torch.tensor([0, number]), add_to_targets),
    "other arrays": (int, make_other_arrays),
}


@pytest.mark.parametrize("name", TARGETS)
def test_targets_that_change_in_place_are_seen(photos, name):
    target, change = TARGETS[name]

    def make(kind):
        return given_targets(kind(photos), target)

    ahead = seen_with(change, make, EncodedImageFolder, **ONE)
    assert_same(ahead, seen_with(change, make, Own, **ONE | {"num_workers": 0}))


def test_indices_that_change_in_place_are_seen(photos):
    def make(kind):
        indices = torch.arange(10)
        subset = Subset(kind(photos), list(indices))  # which share the memory of the tensor
        subset.all_indices = indices
        return subset

    def turn(subset, epoch):
        subset.all_indices.copy_(subset.all_indices.flip(0))

    ahead = seen_with(turn, make, EncodedImageFolder, **ONE)
    assert_same(ahead, seen_with(turn, make, Own, **ONE | {"num_workers": 0}))


class Limited(EncodedImageFolder):
    """Says itself how long it is."""

    limit = 4

    def __len__(self):
        return self.limit


class OwnLimited(Limited):
    def __getitem__(self, index):
        return super().__getitem__(index)


def test_a_length_of_the_datasets_own_is_seen(photos):
    def grow(dataset, epoch):
        dataset.limit += 4

    def make(kind):
        return kind(photos)

    assert_same(seen_with(grow, make, Limited), seen_with(grow, make, OwnLimited, num_workers=0))


@pytest.mark.parametrize("sampler", [SequentialSampler, RandomSampler])
def test_a_list_that_a_sampler_is_over_may_grow(photos, sampler):
    def make(kind):
        return kind(photos)

    def seen_of(kind, workers):
        pool = [*range(6)]
        options = {"sampler": sampler(pool), "shuffle": None, "num_workers": workers}
        return seen_with(lambda *_: pool.extend(range(3)), make, kind, **options)

    assert_same(seen_of(EncodedImageFolder, 1), seen_of(Own, 0))


@pytest.mark.parametrize("persistent", [True, False])
def test_a_rank_that_is_known_late_counts(photos, persistent, monkeypatch):
    def tell_rank(prefetcher, epoch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")

    options = {"shuffle": False, "epochs": 2, "batch_size": 3}
    early = seen(EncodedImageFolder(photos), persistent, tell_rank, **options)
    monkeypatch.undo()
    late = seen(Own(photos), False, tell_rank, **options, num_workers=0)
    assert_same((early[0], []), (late[0], []))


# --- What becomes of workers that wait ---


def interrupt(prefetcher, epoch):
    """As Ctrl-C in a terminal, which ends workers without a word."""
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, signal.SIGINT)
        worker.join()


@pytest.fixture
def may_be_interrupted():
    """Ctrl-C is an exception, which a shell's background job ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.forks("another start method of Python's takes the signal")
@pytest.mark.usefixtures("may_be_interrupted")
def test_workers_that_have_died_are_replaced(photos):
    ahead = seen(EncodedImageFolder(photos), False, interrupt)
    assert_same(ahead, seen(Own(photos), False, interrupt, num_workers=0))


def loop_and_tell(prefetcher, told):
    told.put([targets.tolist() for _, targets in prefetcher])


@pytest.mark.forks("that is what this is about")
def test_a_forked_process_leaves_the_workers_to_its_parent(photos):
    told = []

    def fork(prefetcher, epoch):
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=loop_and_tell, args=(prefetcher, queue))
        child.start()
        child.join()
        assert not child.exitcode
        told.append(queue.get())

    # CUDA works in no process that is forked from one that has used it.
    on = {"device": "cpu", "pin_memory": False}
    ahead = seen(EncodedImageFolder(photos), False, fork, **on)
    as_ever = seen(Own(photos), False, lambda *_: None, num_workers=0, **on)
    assert_same(ahead, as_ever)
    assert told[0] == [targets.tolist() for _, targets in ahead[0][6:12]]  # from its start


FORKS_AND_ENDS = """
import os, sys
from torch.utils.data import DataLoader
from gpuprefetch import CenterCrop, DataPrefetcher, EncodedImageFolder

loader = DataLoader(EncodedImageFolder(sys.argv[1]), 2, num_workers=2)
prefetcher = DataPrefetcher(loader, transforms=[CenterCrop(16)], device="cpu")
for epoch in range(3):
    print(sum(len(targets) for _, targets in prefetcher), flush=True)
    if not (child := os.fork()):
        sys.exit()
    os.waitpid(child, 0)
"""


@pytest.mark.forks("that is what this is about")
def test_the_end_of_a_forked_process_leaves_the_workers_alone(photos):
    written, errors = Child(FORKS_AND_ENDS, str(photos)).communicate()
    assert written == f"{COUNT}\n" * 3, errors


def test_a_loop_that_is_left_keeps_no_batches(photos):
    prefetcher = prefetcher_of(EncodedImageFolder(photos), False)
    for _ in range(2):
        iterator = iter(prefetcher)
        next(iterator)
        iterator.close()
        gc.collect()
        left = [each for each in gc.get_objects() if type(each) is _MultiProcessingDataLoaderIter]
        assert not left
        del iterator


def add_one(target):
    return target + 1


def leave_as_it_is(worker):
    pass


def images_of(samples):
    return [image for image, _ in samples]


def targets_of(samples):
    return [target for _, target in samples]


REASONS = {
    "a dataset of the user's": lambda root: prefetcher_of(Own(root), False, **ONE),
    "a function on targets": lambda root: prefetcher_of(
        EncodedImageFolder(root, target_transform=add_one), False, **ONE
    ),
    "a function in the workers": lambda root: prefetcher_of(
        EncodedImageFolder(root), False, **ONE, worker_init_fn=leave_as_it_is
    ),
    "a collate function": lambda root: prefetcher_of(
        EncodedImageFolder(root), False, **ONE, collate_fn=images_of
    ),
    "a sampler": lambda root: prefetcher_of(
        EncodedImageFolder(root), False, **ONE, shuffle=None, sampler=Shuffled(COUNT)
    ),
    "a generator": lambda root: prefetcher_of(
        EncodedImageFolder(root), False, **ONE, generator=torch.Generator()
    ),
}


@pytest.mark.parametrize("reason", REASONS)
def test_workers_end_with_the_epoch_where_something_can_change(photos, reason):
    prefetcher = REASONS[reason](photos)
    for _ in prefetcher:
        assert alive()
    until(lambda: not alive())


def test_workers_end_with_a_loop_that_ends_early(photos):
    prefetcher = prefetcher_of(EncodedImageFolder(photos), persistent=False)
    for _ in prefetcher:
        break
    gc.collect()
    until(lambda: not alive())


def test_workers_that_nobody_needs_end(photos, constants):
    constants(loading, IDLE_SECONDS=0.2)
    prefetcher = prefetcher_of(EncodedImageFolder(photos), persistent=False)
    first = [*prefetcher]
    until(lambda: not alive())
    assert len([*prefetcher]) == len(first)


def test_persistent_workers_are_not_ended(photos, constants):
    constants(loading, IDLE_SECONDS=0.1)
    prefetcher = prefetcher_of(EncodedImageFolder(photos), persistent=True)
    for _ in prefetcher:
        pass
    workers = alive()
    time.sleep(0.4)
    assert alive() == workers


@pytest.mark.parametrize("between", [validate, number_epochs])
def test_workers_live_on_where_another_epoch_is_begun(photos, between):
    prefetcher = prefetcher_of(EncodedImageFolder(photos), persistent=False)
    found = set()
    for epoch in range(3):
        for _ in prefetcher:
            found |= alive()
        between(prefetcher, epoch)
    assert len(found) == 2


def test_workers_read_nothing_ahead_where_epochs_are_never_the_expected_ones(photos, tmp_path):
    root = shutil.copytree(photos, tmp_path / "photos")
    epochs = loading.MOST_MISSES + 2
    prefetcher = prefetcher_of(EncodedImageFolder(root), persistent=False)
    found = set()
    for epoch in range(epochs):
        for _ in prefetcher:
            found |= alive()
        draw(prefetcher, epoch)
    assert len(found) == 2
    shutil.rmtree(root)
    with pytest.raises(FileNotFoundError):
        next(iter(prefetcher))


def test_a_loop_sees_the_same_where_epochs_are_never_the_expected_ones(photos):
    epochs = loading.MOST_MISSES + 3
    ahead = seen(EncodedImageFolder(photos), False, draw, epochs, **ONE)
    as_ever = seen(Own(photos), False, draw, epochs, **ONE | {"num_workers": 0})
    assert_same(ahead, as_ever)


def test_workers_do_not_live_on_where_shared_memory_is_short(photos, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 60, 40))
    prefetcher = prefetcher_of(EncodedImageFolder(photos), persistent=False)
    for _ in prefetcher:
        pass
    until(lambda: not alive())


def test_what_a_dataset_draws_in_its_workers_is_as_without_us(photos):
    def targets(wrap):
        torch.manual_seed(3)
        loader = wrap(loader_of(Drawing(photos), True, collate_fn=targets_of))
        return [list(batch) for _ in range(3) for batch in loader]

    assert targets(DataPrefetcher) == targets(lambda loader: loader)


def test_two_epochs_at_once(photos):
    prefetcher = prefetcher_of(EncodedImageFolder(photos), persistent=False)
    first, second = iter(prefetcher), iter(prefetcher)
    for _ in range(6):
        next(first)
        next(second)
    for iterator in (first, second):
        with pytest.raises(StopIteration):
            next(iterator)
    assert len([*prefetcher]) == 6


@pytest.mark.parametrize("numbered", ["by the loop", "by us", "not at all"])
@pytest.mark.parametrize("persistent", [True, False])
def test_ranks(photos, persistent, numbered):
    def run(dataset, workers):
        sampler = DistributedSampler(dataset, num_replicas=2, rank=1)
        options = {"sampler": sampler, "shuffle": None, "num_workers": workers}
        prefetcher = prefetcher_of(dataset, persistent, **options)
        batches = []
        for epoch in range(4):
            if numbered == "by the loop":
                sampler.set_epoch(epoch)
            if numbered == "by us":
                prefetcher.set_epoch(epoch)
            batches += [(images.clone(), targets) for images, targets in prefetcher]
        return batches, []

    assert_same(run(EncodedImageFolder(photos), 1), run(Own(photos), int(persistent)))


class AtOnce(ImageFolder):
    """Its batches may be anything."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Indexed(ImageFolder):
    def __getitem__(self, index):
        return *super().__getitem__(index), index


def opened(path):
    return Image.open(path)


# A folder that accelerate moves, and whether its epochs are read ahead of time.
MOVED = {
    "as it is": (ImageFolder, True),
    "a loader": (functools.partial(ImageFolder, loader=opened), False),
    "targets": (functools.partial(ImageFolder, target_transform=int), False),
    "samples": (Indexed, False),
    "batches": (AtOnce, False),
}


@pytest.mark.parametrize("name", MOVED)
def test_accelerate_and_views_of_folders(photos, name):
    make, ahead = MOVED[name]
    pipeline = v2.Compose(
        [v2.RGB(), v2.ToImage(), v2.RandomResizedCrop(16), v2.ToDtype(torch.float32, scale=True)]
    )
    folder = make(photos, transform=pipeline)
    dataset = ConcatDataset([Subset(folder, range(5)), Subset(folder, range(7, 12))])
    prefetcher = accelerate(loader_of(dataset, False, **ONE), print_plan=False)
    found = set()
    for _ in range(3):
        for _ in prefetcher:
            found |= alive()
    assert len(found) == (1 if ahead else 3)


def test_replay_of_an_epoch_that_was_begun_ahead(photos):
    dataset = EncodedImageFolder(photos)
    prefetcher = prefetcher_of(dataset, False, shuffle=False)
    for _ in range(3):
        images = torch.cat([images for images, _ in prefetcher])
    for index in (0, 7):
        again, _ = prefetcher.replay(index)
        assert torch.equal(again[0], images[index])


def test_a_state_of_an_epoch_that_was_begun_ahead(photos):
    def run(stop):
        torch.manual_seed(1)
        prefetcher = prefetcher_of(EncodedImageFolder(photos), False)
        batches = []
        for _ in range(3):
            for images, targets in prefetcher:
                batches.append((images.clone(), targets))
                if len(batches) == stop:
                    return batches, prefetcher.state_dict()
        return batches, None

    whole, _ = run(None)
    begun, state = run(9)
    prefetcher = prefetcher_of(EncodedImageFolder(photos), False)
    prefetcher.load_state_dict(state)
    torch.manual_seed(1)
    rest = [(images.clone(), targets) for images, targets in prefetcher]
    assert_same((begun + rest, []), (whole[:12], []))


# --- What a forecast is made of ---


def test_a_forecast_draws_nothing_and_notices_what_is_drawn(photos):
    loader = loader_of(EncodedImageFolder(photos), False)
    before = torch.get_rng_state()
    made = Forecast.of(loader, draws=1, advances=False, starts_workers=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert not made.holds(loader)
    validate(None, 0)  # draws the seed that was expected
    assert draws_since(made.state) == 1
    assert made.holds(loader)
    order = [*made.batches]
    plain = DataLoader(range(COUNT), 2, shuffle=True, num_workers=1)
    assert [batch.tolist() for batch in plain] == order
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    validate(None, 0)
    made.draw()
    assert torch.equal(torch.get_rng_state(), after)
    torch.rand(1)
    assert draws_since(made.state) is None


def test_a_dataset_is_steady_if_it_has_nothing_of_the_users(photos):
    folder = EncodedImageFolder(photos)
    nested = ConcatDataset([folder, Subset(folder, [1, 2])])
    for dataset in (folder, Subset(folder, [3]), nested):
        assert Steady.of(dataset) == Steady.of(dataset)
    for dataset in (Own(photos), Subset(Own(photos), [3]), range(3), [1, 2]):
        assert Steady.of(dataset) is None
    known = Steady.of(nested)
    folder.samples[0] = ("elsewhere.jpg", 0)
    assert Steady.of(nested) != known
    folder.samples[0] = ["elsewhere.jpg", 0]  # which could change unnoticed
    assert Steady.of(nested) is None
