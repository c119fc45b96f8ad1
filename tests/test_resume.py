"""A resumed epoch gives the batches that the uninterrupted one would have given, each once."""

import copy
import gc
import io
import json
import random
import sys
import threading
import time
from dataclasses import fields
from itertools import chain, count, cycle, islice

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from fakes import until
from one_iterator import OneIterator, OneIteratorAtOnce
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    get_worker_info,
    random_split,
)

from gpuprefetch import DataPrefetcher, EncodedImageFolder, RandomResizedCrop
from gpuprefetch.core.loaders import own_state
from gpuprefetch.core.resume import Place, Reached
from gpuprefetch.core.state import FIELDS, checked
from gpuprefetch.images import notes as _notes

# torchdata 0.11 calls a function that torch 2.15 warns of.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:The wrapped loader does not pin:UserWarning"),
]


PERSISTENT = {"num_workers": 1, "persistent_workers": True}


class Counting(IterableDataset):
    def __iter__(self):
        yield from range(20)


def counting(**options):
    return DataLoader(Counting(), batch_size=4, **options)


class Resumable(IterableDataset):
    """Hands its state out live, and takes one as its own."""

    def __init__(self):
        self.state = {"next": 0}

    def __iter__(self):
        first = 100 * get_worker_info().id if get_worker_info() else 0
        while self.state["next"] < 22:
            self.state["next"] += 1
            yield first + self.state["next"]
        self.state["next"] = 0

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def numbers(kind=DataLoader, **options):
    data = TensorDataset(torch.arange(40))
    if "sampler" in options:
        options["sampler"] = options["sampler"](data)
    return kind(data, batch_size=4, **options)


class Read(Dataset):
    """Forty samples that a function reads."""

    def __init__(self, read):
        self.read = read

    def __len__(self):
        return 40

    def __getitem__(self, key):
        return self.read(key)


class Given(Sampler):
    """What a function makes, anew for each epoch."""

    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return iter(self.make())

    def __len__(self):
        return 40


def rows(sampler, **options):
    """A batch read at a time, in the form that torch's documentation gives for that."""
    sampler = BatchSampler(sampler(range(40)), 4, False)
    return DataLoader(Read(torch.tensor), batch_size=None, sampler=sampler, **options)


def stateful(dataset=None, **options):
    kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    return kind(dataset, **{"batch_size": 4} | options) if dataset else numbers(kind, **options)


LOADERS = {
    "shuffled": lambda: numbers(shuffle=True),
    "workers": lambda: numbers(shuffle=True, num_workers=2),
    "generator": lambda: numbers(shuffle=True, generator=torch.Generator().manual_seed(3)),
    "batches of a sampler": lambda: rows(RandomSampler),
    "batches of a sampler, generator": lambda: rows(
        lambda data: RandomSampler(data, generator=torch.Generator().manual_seed(3)), num_workers=1
    ),
    "iterable": lambda: counting(),
    "persistent": lambda: numbers(shuffle=True, **PERSISTENT),
    "iter of its own": lambda: numbers(OneIterator, shuffle=True),
    "stateful": lambda: stateful(shuffle=True),
    "stateful workers": lambda: stateful(shuffle=True, num_workers=1),
    "stateful persistent": lambda: stateful(sampler=RandomSampler, **PERSISTENT),
    "stateful seldom": lambda: stateful(shuffle=True, num_workers=1, snapshot_every_n_steps=5),
    "stateful sampler": lambda: stateful(sampler=RandomSampler),
    "stateful dataset": lambda: stateful(Resumable()),
    "stateful dataset in workers": lambda: stateful(Resumable(), num_workers=2),
}


def values(batch):
    return (batch[0] if isinstance(batch, list) else batch).tolist()


def listed(batches):
    return [values(batch) for batch in batches]


def cpu(loader):
    return DataPrefetcher(loader, device="cpu", device_prefetch_size=3)


def twice(make):
    return cpu(make()), cpu(make())


def parted(loader, batches):
    """So many batches of an epoch, the state after them, and the rest."""
    iterator = iter(loader)
    had, state = listed(islice(iterator, batches)), loader.state_dict()
    return had, state, listed(iterator)


def assert_goes_on(first, resumed, batches=1):
    """After so many batches of the one, the other gives the rest of its epoch."""
    _, state, rest = parted(first, batches)
    resumed.load_state_dict(state)
    assert listed(resumed) == rest


def distributed(make=numbers):
    return make(sampler=lambda data: DistributedSampler(data, 2, 0))


@pytest.fixture(params=[False, True], ids=["", "ahead"])
def ahead(request, device):
    """Fetch ahead of the loop, as on a GPU."""
    if not request.param and device.type == "cuda":
        pytest.skip("a GPU does so anyway")
    if request.param and device.type == "cpu":
        request.getfixturevalue("threaded")
    return request.param


IN_THE_LOOP = ("shuffled", "iterable", "stateful", "stateful dataset", "stateful seldom")


@pytest.mark.parametrize(
    ("name", "ahead"),
    [*((name, True) for name in LOADERS), *((name, False) for name in IN_THE_LOOP)],
    indirect=["ahead"],
)
def test_the_rest_of_the_epoch_is_the_same(name, device, ahead):
    torch.manual_seed(5)
    prefetcher = DataPrefetcher(LOADERS[name](), device_prefetch_size=3, device=device)
    list(prefetcher)
    _, state, rest = parted(prefetcher, 3)
    torch.manual_seed(99)
    resumed = DataPrefetcher(LOADERS[name](), device_prefetch_size=3, device=device)
    before = torch.get_rng_state()
    resumed.load_state_dict(state)
    assert listed(resumed) == rest
    assert torch.equal(torch.get_rng_state(), before)  # the caller's generator is left alone


@pytest.mark.parametrize("device", [torch.device("cpu")])
@pytest.mark.parametrize("ahead", [True], indirect=True)
def test_the_loaders_own_state_would_lose_batches(device, ahead):
    # Guards the test above: batches are in flight when the state is taken.
    prefetcher = cpu(stateful(shuffle=True))
    iterator = iter(prefetcher)
    next(iterator)
    while len(iterator._lookahead._ready.slots) < 3:
        time.sleep(0.01)
    state = prefetcher.state_dict() | {"loader": own_state(iterator._lookahead._source._loader)}
    rest = listed(iterator)
    prefetcher.load_state_dict(state)
    assert listed(prefetcher) in (rest[3:], rest[4:])


def test_a_resumed_epoch_is_resumed_again_and_the_next_ones_are_the_same():
    def prefetcher():
        generator = torch.Generator().manual_seed(3)
        return cpu(numbers(shuffle=True, generator=generator, **PERSISTENT))

    whole = prefetcher()
    whole = [listed(whole) for _ in range(4)]
    interrupted, seen = prefetcher(), []
    for stop in (3, 5, 18, 40):  # in epochs 0, 0, 1 and at the end
        while len(seen) < stop:
            seen += map(values, islice(interrupted, stop - len(seen)))
        state = interrupted.state_dict()
        interrupted = prefetcher()
        interrupted.load_state_dict(state)
        assert interrupted.state_dict() == state
    assert seen == list(chain.from_iterable(whole))
    assert list(interrupted) == []


class Failing(Read):
    def __init__(self, good):
        self.good = good

    def read(self, index):
        if index >= self.good:
            raise OSError(f"sample {index}")
        return index


def test_a_resumed_epoch_that_fails_shuts_its_workers_down(constants):
    gc.collect()  # workers of earlier tests, whose end would count below
    constants(torch.utils.data._utils, MP_STATUS_CHECK_INTERVAL=5.0)  # torch's own

    def prefetcher(good):
        return cpu(DataLoader(Failing(good), batch_size=4, num_workers=1))

    first = prefetcher(40)
    next(iter(first))
    for good in (0, 8):  # at once, and in the loop
        resumed = prefetcher(good)
        resumed.load_state_dict(first.state_dict())
        with pytest.raises(OSError, match="sample"):
            list(resumed)
        started = time.perf_counter()
        gc.collect()
        assert time.perf_counter() - started < 4  # it takes 5 s for a worker that nobody told


def test_a_state_of_something_else_is_refused():
    prefetcher = cpu(numbers())
    with pytest.raises(ValueError, match=r"must come from DataPrefetcher\.state_dict"):
        prefetcher.load_state_dict({"model": 1})
    list(prefetcher)
    state = prefetcher.state_dict()
    generator = numbers(shuffle=True, generator=torch.Generator())
    for other in DataLoader(prefetcher.dataset, batch_size=5), generator:
        with pytest.raises(ValueError, match="state is of a loader with batch_size=4, 0 gen"):
            cpu(other).load_state_dict(state)


class Named(torch.nn.Module):
    """With a state like a model's: many tensors of many values."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))


@pytest.mark.parametrize("make", [numbers, lambda: stateful()])
def test_a_checkpoint_around_a_state_is_named(make):
    prefetcher = cpu(make())
    next(iter(prefetcher))
    state = prefetcher.state_dict()
    model = Named().state_dict()
    for other, text in (
        ({"model": model, "loader": state}, r"keys model, loader: pass checkpoint\['loader'\]\."),
        ({"epoch": 3, "seed": 1, "x": {"y": [0, state]}}, r"pass checkpoint\['x'\]\['y'\]\[1\]\."),
        (model, r"keys layers\.0\.weight, .* and 11 more\. Save it as checkpoint\['loader'\]"),
        ("a" * 1000, "got 'aaaa"),
        (None, "got None"),
    ):
        with pytest.raises(ValueError, match=text) as caught:
            prefetcher.load_state_dict(other)
        assert len(str(caught.value)) < 400
    prefetcher.load_state_dict(state)
    assert len(list(prefetcher)) == len(prefetcher) - 1


@pytest.mark.parametrize(
    ("name", "wrong", "accepted"),
    [
        ("epoch", "3", "the number of an epoch"),
        ("batches", -1, "a number of batches, 0 or more"),
        ("batches", 1.0, "a number of batches"),
        ("seed", None, "an int"),
        ("random_states", [], "a list of generators' states"),
        ("random_states", ["00ff"], "a list of generators' states"),
        ("random_states", [7], "a list of generators' states"),
        ("random_states", [torch.get_rng_state(), "00ff"], "a list of generators' states"),
        ("continued", "no", "True or False"),
        ("epochs", [1.5], "a list of ints and None"),
        ("samples", "40", "an int, or None"),
        ("kind", 4, "a str"),
        ("drawn", [0], "a rank, and checksums or None"),
    ],
)
def test_a_state_is_checked_as_it_is_loaded(name, wrong, accepted):
    prefetcher = cpu(numbers(shuffle=True))
    next(iter(prefetcher))
    state, others = prefetcher.state_dict(), prefetcher.state_dict()
    with pytest.raises(ValueError, match=f"'{name}' in the state is {accepted}"):
        prefetcher.load_state_dict(state | {name: wrong})
    if name in ("batches", "random_states", "continued"):
        del others[name]
        with pytest.raises(ValueError, match=f"the state has no '{name}', {accepted}"):
            prefetcher.load_state_dict(others)
    prefetcher.load_state_dict(json.loads(json.dumps(state)))
    assert len(list(prefetcher)) == 9


class MakesAnother(RandomSampler):
    """Each access makes a sampler of its kind, and others fail."""

    @property
    def sampler(self):
        return MakesAnother(self.data_source, generator=self.generator)

    @property
    def epoch(self):
        raise RuntimeError("not yet")

    rank = batch_sampler = epoch


class Linked(Sampler):
    """Each keeps the next one, which it makes when it is asked for it."""

    def __init__(self):
        self.within = None

    def __iter__(self):
        return iter(range(40))

    @property
    def sampler(self):
        self.within = self.within or Linked()
        return self.within


def test_samplers_that_make_samplers_have_an_end():
    generator = torch.Generator()
    endless = MakesAnother(range(40), generator=generator)
    circle = BatchSampler(endless, 4, drop_last=False)
    circle.batch_sampler = circle
    first, resumed = twice(lambda: DataLoader(range(40), batch_sampler=circle))
    order = listed(first)
    next(iter(first))
    resumed.load_state_dict(first.state_dict())
    rest = listed(resumed)
    assert len(order) == 10 and len(rest) == 9
    assert len(list(cpu(DataLoader(range(40), 4, sampler=Linked())))) == 10


def test_without_an_order_there_is_no_state():
    prefetcher = cpu(numbers(num_workers=2, in_order=False))
    prefetcher.load_state_dict(prefetcher.state_dict())  # nothing is lost yet
    next(iterator := iter(prefetcher))
    with pytest.raises(ValueError, match="had 1 batches, but with in_order=False"):
        prefetcher.state_dict()
    iterator.close()
    list(prefetcher)
    prefetcher.load_state_dict(prefetcher.state_dict())  # after the end it does not matter
    assert len(list(prefetcher)) == 10
    alone = cpu(numbers(num_workers=1, in_order=False))
    next(iter(alone))
    assert alone.state_dict()["batches"] == 1  # one worker keeps the order


def test_an_iterator_that_is_dropped_unused_is_no_epoch():
    prefetcher = cpu(numbers())
    next(iterator := iter(prefetcher))
    iter(prefetcher)  # dropped at once
    assert len(list(prefetcher)) == 10
    assert prefetcher.state_dict()["epoch"] == 2
    first, second = iter(prefetcher), iter(prefetcher)
    assert prefetcher.state_dict()["epoch"] == 3
    next(second), next(first), next(iterator)
    prefetcher.load_state_dict(prefetcher.state_dict())
    iter(prefetcher)
    assert [len(list(prefetcher)) for _ in range(2)] == [9, 10]  # the saved place is still there


def test_a_place_and_its_state_say_the_same():
    first, second = twice(lambda: numbers(shuffle=True))
    next(iter(first))
    state = first.state_dict()
    assert state.keys() == FIELDS.keys() - {"ended"}
    place = Place.of_state(checked(json.loads(json.dumps(state))))
    assert (place.epoch, place.batches, place.samples) == (0, 1, 40)
    saved = json.loads(json.dumps(state))
    assert all(saved[name] == value for name, value in place.as_state().items())
    named = {field.name for kind in (Place, Reached) for field in fields(kind)}
    assert named - FIELDS.keys() == {"reached", "use"}  # one is saved by its parts, one is not
    second.load_state_dict(state)
    assert second.state_dict() == state


def test_what_becomes_of_an_epoch_is_not_told_to_a_copy():
    prefetcher = cpu(numbers(shuffle=True))
    iterator = iter(prefetcher)
    copied = copy.copy(prefetcher)
    del iterator  # unused: this epoch is no epoch of the prefetcher
    assert (prefetcher.state_dict()["epoch"], copied.state_dict()["epoch"]) == (0, 0)
    next(iter(prefetcher))
    assert (prefetcher.state_dict()["batches"], copied.state_dict()["batches"]) == (1, 0)


def test_over_another_loader_the_epoch_begins_at_its_start():
    prefetcher = cpu(numbers())
    next(iter(prefetcher))
    other = prefetcher.over(numbers())
    prefetcher.load_state_dict(prefetcher.state_dict())
    for begun in (other, prefetcher.over(numbers())):
        assert begun.state_dict()["batches"] == 0
        assert len(list(begun)) == 10
    iter(prefetcher)  # dropped at once
    other = prefetcher.over(numbers())
    assert other.state_dict()["epoch"] == 0
    assert len(list(other)) == 10
    assert len(list(prefetcher)) == 9  # which still goes on at the saved place


def test_a_state_after_an_iterator_that_was_dropped_unused():
    first, second = twice(lambda: numbers(shuffle=True))
    for epoch in range(2):
        iter(first)  # dropped at once, with the order that it has drawn
        state = first.state_dict()
        assert (state["epoch"], state["batches"]) == (epoch, 0)
        second.load_state_dict(state)
        expected = listed(first)
        assert listed(second) == expected


@pytest.mark.parametrize("place", ["before its loader", "in its loader"])
def test_an_epoch_that_is_interrupted_as_it_begins_is_begun_again(place):
    class Interrupted(RandomSampler):
        @property
        def rank(self):
            interrupt("before its loader")

        def __iter__(self):
            interrupt("in its loader")
            return super().__iter__()

    def interrupt(here):
        if here in places:
            places.remove(here)
            raise KeyboardInterrupt

    places = []
    prefetcher = DataPrefetcher(numbers(sampler=Interrupted), device="cpu")
    iterator = iter(prefetcher)
    next(iterator)
    prefetcher.load_state_dict(prefetcher.state_dict())
    places.append(place)
    with pytest.raises(KeyboardInterrupt):
        iter(prefetcher)
    state, rest = prefetcher.state_dict(), listed(iterator)
    assert listed(prefetcher) == rest
    prefetcher.load_state_dict(state)
    assert listed(prefetcher) == rest


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loop_goes_on_beside_a_state_that_is_loaded(photo_folder, persistent):
    def make(seed):
        options = {"num_workers": 1, "persistent_workers": persistent}
        photos = Subset(EncodedImageFolder(photo_folder), range(12))
        loader = DataLoader(photos, batch_size=4, **options)
        transforms = [
            RandomResizedCrop(8),
            lambda images: images + torch.rand(len(images), 1, 1, 1),
        ]
        return DataPrefetcher(loader, device="cpu", transforms=transforms, seed=seed)

    other = make(seed=2)
    other.set_epoch(5)
    state = other.state_dict()
    torch.manual_seed(1)
    expected, prefetcher = listed(make(seed=1)), make(seed=None)
    iterator = iter(prefetcher)
    got = [values(next(iterator))]
    prefetcher.load_state_dict(state)
    assert listed(prefetcher) == listed(other)
    assert got + listed(iterator) == expected


def test_the_state_of_a_copy_is_its_own():
    prefetcher = cpu(numbers())
    iterator = iter(prefetcher)
    next(iterator)
    copied = copy.copy(prefetcher)
    next(iterator)
    assert copied.state_dict()["batches"] == 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_the_state_of_a_copy_tells_the_order_too(copied):
    random.seed(1)
    first = shuffled()
    next(iter(first))
    state = copied(first).state_dict()
    assert state == first.state_dict()
    resumed = shuffled()
    resumed.load_state_dict(state)
    with pytest.raises(ValueError, match="does not begin with the batches that it gave"):
        iter(resumed)


def test_a_thread_may_save_a_state_at_any_moment():
    quiet, busy = twice(lambda: DataLoader(range(400), batch_size=1))
    told = {quiet.state_dict()["batches"]: quiet.state_dict()["drawn"] for _ in quiet}
    states = []
    ended = threading.Event()

    def save():
        while not ended.is_set():
            states.append(busy.state_dict())

    saving = threading.Thread(target=save)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        saving.start()
        for number, _ in enumerate(busy):
            if number % 8 == 0:  # on a busy machine the thread gets no turn for long
                count = len(states)
                until(lambda count=count: len(states) > count)
    finally:
        ended.set()
        saving.join()
        sys.setswitchinterval(interval)
    taken = [state for state in states if state["batches"]]
    assert len(taken) > 40
    assert all(state["drawn"] == told[state["batches"]] for state in taken)


@pytest.mark.parametrize(("epoch", "left"), [(0, 4), (1, 10)])
def test_set_epoch_behind_an_unused_iterator_leaves_what_was_to_be_resumed(epoch, left):
    prefetcher = cpu(numbers())
    for _ in islice(prefetcher, 6):
        state = prefetcher.state_dict()
    prefetcher.load_state_dict(state)
    for _ in range(2):
        iter(prefetcher)  # dropped at once
        prefetcher.set_epoch(epoch)
    assert [len(list(prefetcher)) for _ in range(2)] == [left, 10]


@pytest.mark.parametrize("whose", ["ours", "its own"])
@pytest.mark.parametrize("make", [numbers, rows])
def test_a_distributed_sampler_gets_its_epoch_back(make, whose):
    first, resumed = twice(lambda: distributed(make))
    there, here = (getattr(p.sampler, "sampler", p.sampler) for p in (first, resumed))
    if whose == "ours":
        first.set_epoch(7)
    else:
        list(first)
        there.set_epoch(7)  # as in loops without a prefetcher
    assert_goes_on(first, resumed)
    assert here.epoch == 7


@pytest.mark.parametrize("kind", ["plain", "stateful"])
def test_augmented_pictures_are_the_same(kind, photo_folder, device):
    def prefetcher(**options):
        ours = {"batch_size": 4, "num_workers": 1, "pin_memory": device.type == "cuda"}
        make = stateful if kind == "stateful" else DataLoader
        photos = Subset(EncodedImageFolder(photo_folder), range(12))
        loader = make(photos, shuffle=True, **ours)
        options |= {"transforms": [RandomResizedCrop(16), K.ColorJitter(0.4, 0.4)]}
        return DataPrefetcher(loader, device=device, cpu_share=0.0, **options)

    torch.manual_seed(2)
    assert_goes_on(prefetcher(seed=11), prefetcher())


def test_a_prefetcher_with_persistent_workers_goes_back():
    prefetcher = cpu(numbers(**PERSISTENT))
    had, state, rest = parted(prefetcher, 4)
    for _ in range(2):
        prefetcher.load_state_dict(state)
        assert listed(prefetcher) == rest
    assert listed(prefetcher) == had + rest


@pytest.mark.parametrize(
    ("make", "before", "after"),
    [
        (numbers, PERSISTENT, {}),
        (numbers, PERSISTENT, {"num_workers": 1}),
        (numbers, {}, PERSISTENT),
        (counting, {"num_workers": 1}, {}),  # a single worker reads all of it
    ],
)
def test_with_other_workers(make, before, after):
    order = {"shuffle": True} if make is numbers else {}
    first, resumed = (cpu(make(**options, **order)) for options in (before, after))
    list(first)
    assert_goes_on(first, resumed, 2)


@pytest.mark.parametrize(
    ("make", "there", "here"),
    [(counting, "to 2 workers", ["to 1"] * 2), (stateful, "with 2 workers", ["0", "1"])],
)
def test_another_number_of_workers_is_refused(make, there, here):
    first = cpu(make(num_workers=2))
    next(iter(first))
    for workers, words in enumerate(here):
        other = cpu(make(num_workers=workers))
        with pytest.raises(ValueError, match=rf"{there}, .* this one has .*\b{words} workers"):
            other.load_state_dict(first.state_dict())


@pytest.mark.forks("its collate function is local")
def test_workers_that_start_where_others_live_on_draw_of_their_own():
    dataset = Read(lambda _: torch.rand(()))
    first = cpu(DataLoader(dataset, 4, **PERSISTENT))
    list(first)
    drawn = []
    for batches in (1, 2, 2):  # of three epochs
        list(islice(first, batches))
        resumed = cpu(DataLoader(dataset, 4, num_workers=1))
        resumed.load_state_dict(first.state_dict())
        drawn.append(tuple(values(next(iter(resumed)))))
    assert len(set(drawn)) == 3


def shuffled(make=numbers, **options):
    """From Python's generator."""
    return cpu(make(sampler=lambda _: Given(lambda: random.sample(range(40), 40)), **options))


@pytest.mark.parametrize(("make", "workers"), [(numbers, 0), (numbers, 1), (rows, 0)])
def test_an_order_that_is_not_drawn_again_is_refused(workers, ahead, make):
    random.seed(1)
    _, state, rest = parted(shuffled(make, num_workers=workers), 3)
    resumed = shuffled(make, num_workers=workers)
    resumed.load_state_dict(state)
    for _ in range(2):  # and not an epoch that follows
        with pytest.raises(ValueError, match="does not begin with the batches that it gave"):
            iter(resumed)
        assert resumed.state_dict() == state
    random.seed(1)
    more, state, _ = parted(resumed, 2)
    random.seed(1)
    again = shuffled(make)
    again.load_state_dict(state)
    assert more + listed(again) == rest
    again.load_state_dict(state)
    with pytest.raises(ValueError, match="does not begin"):
        list(again)


def test_a_state_that_is_loaded_is_not_mixed_up_with_an_epoch_before():
    random.seed(1)
    first, second = shuffled(), shuffled()
    next(iter(first))
    state = first.state_dict()
    list(second)
    second.load_state_dict(state)
    assert second.state_dict() == state
    random.seed(1)
    assert len(list(second)) == 9


class Skipping:
    """As accelerate's SkipBatchSampler and BatchSamplerShard."""

    def __init__(self, batch_sampler):
        self.batch_sampler = batch_sampler

    def __iter__(self):
        return iter(self.batch_sampler)

    def __len__(self):
        return len(self.batch_sampler)


class Seedable(RandomSampler):
    """As accelerate's: makes its generator when it is needed, and seeds it each epoch."""

    def __iter__(self):
        self.generator = self.generator or torch.Generator()
        self.generator.manual_seed(7)
        return super().__iter__()


class OtherName(Sampler):
    """Keeps its generator under a name of its own."""

    def __init__(self):
        self.draws = torch.Generator().manual_seed(6)

    def __iter__(self):
        return iter(torch.randperm(40, generator=self.draws).tolist())

    def __len__(self):
        return 40


@pytest.mark.parametrize("stop", [0, 3])
def test_a_generator_of_any_name_goes_back(stop):
    first, resumed = twice(lambda: DataLoader(range(40), 4, sampler=OtherName()))
    list(first)
    state = first.state_dict()
    rest = listed(first)
    if stop:
        _, state, rest = parted(first, stop)
    following = listed(first)
    resumed.load_state_dict(saved(state))
    assert [listed(resumed), listed(resumed)] == [rest, following]


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("kind", ["within", "seedable"])
def test_generators_of_samplers_within_batch_samplers(kind, same):
    def prefetcher():
        made = torch.Generator().manual_seed(2) if kind == "within" else None
        sampler = (Seedable if kind == "seedable" else RandomSampler)(range(40), generator=made)
        batches = Skipping(BatchSampler(sampler, 4, False))
        return cpu(DataLoader(range(40), batch_sampler=batches))

    had, state, rest = parted(first := prefetcher(), 3)
    resumed = first if same else prefetcher()
    resumed.load_state_dict(state)
    assert listed(resumed) == rest
    assert sorted(chain.from_iterable(had + rest)) == [*range(40)]


def test_a_loader_whose_state_was_taken_before_its_first_epoch():
    loader = stateful(num_workers=0)
    loader.state_dict()
    assert len(list(cpu(loader))) == 10


@pytest.mark.parametrize(
    ("options", "before", "ours"),
    [
        ({}, 0, False),
        ({"num_workers": 1}, 11, False),  # and the end
        (PERSISTENT, 11, False),
        ({"shuffle": True}, 2, True),
    ],
)
def test_a_state_of_the_loader_itself(options, before, ours):
    _, state, rest = parted(stateful(**options), 3)
    loader = stateful(**options)
    if not before:
        loader.load_state_dict(state)
    prefetcher = cpu(loader)
    if before:
        list(islice(prefetcher, before))
        (prefetcher if ours else loader).load_state_dict(state)
    assert listed(prefetcher) == rest
    assert len(list(prefetcher)) == 10


def test_of_an_epoch_without_end_the_latest_samples_are_noted(constants):
    def prefetcher():
        return cpu(numbers(sampler=lambda _: Given(lambda: cycle(range(40)))))

    list(islice(whole := prefetcher(), 301))
    constants(_notes, MOST=30)
    first, resumed = prefetcher(), prefetcher()
    for _ in islice(first, 301):
        (notes,) = first._notes
        assert len(notes.batches) <= 30
    state = first.state_dict()
    assert state["drawn"] == whole.state_dict()["drawn"]
    resumed.load_state_dict(state)
    assert values(next(iter(resumed))) == [(4 * 301 + k) % 40 for k in range(4)]
    (notes,) = resumed._notes
    assert len(notes.batches) <= 30  # of those left out as well


@pytest.mark.parametrize("kind", [int, torch.tensor, np.array, np.int64, str, lambda i: iter([i])])
def test_a_sampler_of_samples_may_give_anything(kind):
    dataset = Read(lambda key: next(key) if hasattr(key, "__next__") else int(key))
    sampler = Given(lambda: map(kind, range(40)))
    first, resumed = twice(lambda: DataLoader(dataset, None, sampler=sampler))
    list(islice(first, 3))
    resumed.load_state_dict(first.state_dict())
    assert [int(sample) for sample in resumed] == [*range(3, 40)]


def test_samples_that_are_no_integers_are_not_compared():
    names = [f"name {i}" for i in range(40)]
    first, resumed = twice(lambda: DataLoader({n: n for n in names}, 4, sampler=names))
    list(islice(first, 2))
    resumed.load_state_dict(first.state_dict())
    assert list(chain.from_iterable(resumed)) == names[8:]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("epochs", [0, 1])
def test_an_order_that_is_not_known_is_refused(shuffle, epochs):
    # The iterator is older than our sampler, which notes the order.
    first, resumed = twice(lambda: numbers(OneIteratorAtOnce, shuffle=shuffle))
    for _ in range(epochs):
        list(first)
    next(iter(first))
    resumed.load_state_dict(first.state_dict())
    text = r"does not begin with the batches that it gave.*not from an iterator of an earlier"
    with pytest.raises(ValueError, match=f"{text} epoch"):
        iter(resumed)


def test_a_state_of_an_older_version():
    for loader in LOADERS["shuffled"], LOADERS["iterable"], LOADERS["stateful"]:
        first, resumed = twice(loader)
        _, state, rest = parted(first, 1)
        del state["drawn"], state["epochs"]
        states = map(bytearray.fromhex, state["random_states"])
        state["random_states"] = [torch.frombuffer(s, dtype=torch.uint8) for s in states]
        state["kind"] = state["kind"].removeprefix("samples shared out to 1 workers, ")
        resumed.load_state_dict(state)
        assert listed(resumed) == rest


@pytest.mark.parametrize("make", [lambda: DataLoader, lambda: type(stateful())])
@pytest.mark.parametrize("count", [9, 44])
def test_the_middle_of_an_epoch_of_another_length_is_refused(make, count):
    first, other = (cpu(make()(range(length), batch_size=4)) for length in (40, count))
    other.load_state_dict(first.state_dict())  # a whole epoch needs nothing
    assert len(list(other)) == len(other)
    next(iter(first))
    other.load_state_dict(state := first.state_dict())
    with pytest.raises(ValueError, match=f"epoch of 40 samples; the dataset has {count}.*h.1"):
        iter(other)
    other.set_epoch(1)
    assert len(list(other)) == len(other)
    del state["samples"]  # of an older version
    other.load_state_dict(state)
    assert values(next(iter(other))) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("how", "batches"), [("dropped unused", 0), ("dropped unused", 1), ("failed", 1)]
)
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, PERSISTENT])
def test_a_resumed_epoch_is_begun_a_second_time(options, how, batches):
    dataset = Failing(40)
    interrupted, resumed = twice(lambda: DataLoader(dataset, 4, shuffle=True, **options))
    _, state, rest = parted(interrupted, batches)
    resumed.load_state_dict(state)
    if how == "failed":
        dataset.good = 0
        with pytest.raises(OSError, match="sample"):
            iter(resumed)
        dataset.good = 40
    else:
        iter(resumed)
    assert listed(resumed) == rest
    assert resumed.state_dict()["epoch"] == 1


def test_numbers_of_numpy_can_be_saved():
    prefetcher = DataPrefetcher(numbers(), device="cpu", seed=np.int64(3))
    prefetcher.set_epoch(np.int64(2))
    next(iter(prefetcher))
    torch.save(prefetcher.state_dict(), file := io.BytesIO())
    file.seek(0)
    state = torch.load(file)  # which takes none of numpy's
    assert (state["seed"], state["epoch"]) == (3, 2)


def saved(state):
    """As a file of JSON gives it back, where the loader's own state has no tensors."""
    try:
        return json.loads(json.dumps(state))
    except TypeError:
        return state


# torchdata draws the order of torch's samplers once more to find their place, also at the end.
ELSEWHERE = ("stateful sampler", "stateful persistent")
ENDING = ("shuffled", "generator", "iterable", "persistent", "iter of its own", "empty")
ENDING += ("stateful", "stateful seldom", "stateful dataset", *ELSEWHERE)
BEFORE = ("shuffled", "generator", "stateful seldom", "stateful dataset")


@pytest.mark.parametrize(
    ("name", "ended"), [*((name, 1) for name in ENDING), *((name, 0) for name in BEFORE)]
)
def test_a_state_between_epochs_begins_the_next_one(name, ended):
    torch.manual_seed(5)
    make = LOADERS.get(name, lambda: DataLoader([], batch_size=4))
    first = cpu(make())
    for _ in range(ended):
        list(first)
    state = saved(first.state_dict())
    assert first.state_dict() == state
    assert (state["epoch"], state["batches"]) == (ended, 0)
    expected, following = listed(first), listed(first)
    torch.manual_seed(99)
    resumed = cpu(make())
    before = torch.get_rng_state()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    got = listed(resumed)
    if name in ELSEWHERE:
        got, expected = (sorted(chain.from_iterable(e)) for e in (got, expected))
    assert got == expected
    assert torch.equal(torch.get_rng_state(), before)
    assert len(list(resumed)) == len(following)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_that_was_saved_at_its_end_begins_the_next_epoch(workers):
    samplers = pytest.importorskip("torchdata.stateful_dataloader.sampler")

    def make():
        sampler = samplers.StatefulDistributedSampler(range(40), 2, 1)
        return stateful(sampler=lambda _: sampler, num_workers=workers)

    first, resumed = twice(make)
    list(first)
    state = copy.deepcopy(first.state_dict())
    first.set_epoch(1)
    expected = [listed(first), listed(first)]
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert [listed(resumed), listed(resumed)] == expected
    assert len(expected[0]) == 5


def test_where_the_caller_restores_torchs_generator_no_order_comes_twice():
    first, resumed = twice(lambda: numbers(shuffle=True))
    list(first)
    state, generator = first.state_dict(), torch.get_rng_state()
    expected = [listed(first) for _ in range(3)]
    torch.set_rng_state(generator)
    resumed.load_state_dict(state)
    assert [listed(resumed) for _ in range(3)] == expected
    assert expected[0] != expected[1]


def test_the_manual_form_goes_back_too():
    prefetcher = cpu(numbers())
    first = values(prefetcher.next())
    middle = prefetcher.state_dict()
    second = values(prefetcher.next())
    prefetcher.load_state_dict(middle)
    assert values(prefetcher.next()) == second
    while prefetcher.next()[0] is not None:
        pass
    end = prefetcher.state_dict()
    assert (end["epoch"], end["batches"]) == (1, 0)
    prefetcher.next()
    prefetcher.load_state_dict(end)
    assert values(prefetcher.next()) == first


@pytest.mark.parametrize("set_before_saving", [False, True])
def test_the_next_epoch_has_the_next_number(set_before_saving):
    first, resumed = twice(distributed)
    first.set_epoch(7)
    list(first)
    if set_before_saving:
        first.set_epoch(8)
    state = first.state_dict()
    assert state["epoch"] == 8
    first.set_epoch(8)
    resumed.load_state_dict(state)
    resumed.set_epoch(8)
    assert listed(resumed) == listed(first)
    resumed.load_state_dict(state)
    resumed.set_epoch(7)  # begins that one anew
    assert len(list(resumed)) == 5
    assert resumed.state_dict()["epoch"] == 8


class Restoring(Read):
    """Draws in this process, and restores torch's generator."""

    def __init__(self):
        super().__init__(lambda _: torch.rand(()))

    def state_dict(self):
        return {"generator": torch.get_rng_state()}

    def load_state_dict(self, state):
        torch.set_rng_state(state["generator"])


class RestoringStream(IterableDataset, Restoring):
    had = 0

    def __iter__(self):
        while self.had < 40:
            self.had += 1
            yield self[0]
        self.had = 0

    def state_dict(self):
        return super().state_dict() | {"had": self.had}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.had = state["had"]


@pytest.mark.parametrize("stop", [0, 3])
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Restoring, {}),
        (Restoring, {"shuffle": True}),
        (Restoring, {"sampler": RandomSampler(range(40))}),
        (RestoringStream, {}),
    ],
)
def test_a_dataset_restores_torchs_generator_itself(dataset, options, stop):
    first, resumed = twice(lambda: stateful(dataset(), **options))
    _, state, rest = parted(first, stop)
    following = listed(first)
    torch.manual_seed(99)
    resumed.load_state_dict(state)
    assert [listed(resumed), listed(resumed)] == [rest, following]


def test_a_second_epoch_of_persistent_workers_tells_the_first():
    prefetcher = cpu(numbers(**PERSISTENT))
    next(iter(prefetcher))  # as to look at a batch before the loop
    seen = []
    with pytest.raises(RuntimeError, match=r"a second iter\(\) .* copy\.copy\(prefetcher\)"):
        for batch in prefetcher:
            seen.append(batch)
            next(iter(prefetcher))
    assert len(seen) == 1
    with pytest.raises(RuntimeError, match=r"a second iter\(\)"):
        list(zip(prefetcher, prefetcher, strict=True))
    finished = iter(prefetcher)
    assert len(list(finished)) == 10
    assert len(list(zip(prefetcher, copy.copy(prefetcher), strict=True))) == 10
    assert next(finished, None) is None  # it had all its batches
    for _ in prefetcher:  # broken off
        break
    assert len(list(prefetcher)) == 10
    manual = prefetcher.next()
    assert len(list(prefetcher)) == 10
    for _ in range(2):
        with pytest.raises(RuntimeError):
            prefetcher.next()
    prefetcher.set_epoch(0)
    assert values(prefetcher.next()) == values(manual)


@pytest.mark.forks("its dataset is local")
def test_persistent_workers_know_that_the_length_was_asked_for():
    class Longer(Counting):
        def __len__(self):
            return 2

    prefetcher = cpu(DataLoader(Longer(), batch_size=1, **PERSISTENT))
    assert len(list(prefetcher)) == 20  # nobody had asked
    assert len(prefetcher) == 2
    with pytest.warns(UserWarning, match="reported to be 2"):
        assert len(list(prefetcher)) == 20


class Shuffles(IterableDataset):
    """Draws its order and its values in the process that iterates it."""

    def __iter__(self):
        for number in torch.randperm(40):
            yield number + torch.rand(())


@pytest.mark.parametrize("shuffle", [True, False, None])
def test_what_a_dataset_draws_in_this_process_goes_on(shuffle):
    def make():
        return DataLoader(dataset, 4, shuffle=shuffle)

    dataset = Shuffles() if shuffle is None else Read(lambda _: torch.rand(()))
    for stop in (1, 3):
        torch.manual_seed(5)
        first, resumed = twice(make)
        iterator = iter(first)
        list(islice(iterator, stop))
        state, generator = first.state_dict(), torch.get_rng_state()
        expected = [listed(iterator), listed(first)]
        torch.manual_seed(99)
        resumed.load_state_dict(state)
        torch.set_rng_state(generator)  # as docs/loop.md has it
        assert [listed(resumed), listed(resumed)] == expected


@pytest.mark.parametrize("workers", [0, 1, None])
def test_a_stream_that_has_become_shorter_is_refused(workers):
    def make(count):
        if workers is None:
            return [torch.arange(4)] * count
        return DataLoader(FirstOf(4 * count), batch_size=4, num_workers=workers)

    first, resumed = cpu(make(5)), cpu(make(3))
    list(islice(first, 4))
    resumed.load_state_dict(first.state_dict())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"does not begin with the batches.*set_epoch\(1\)"):
            iter(resumed)
    resumed.set_epoch(1)
    assert len(list(resumed)) == 3


def test_the_stream_of_another_rank_may_be_shorter(monkeypatch):
    first, resumed = (cpu(DataLoader(FirstOf(4 * count), 4)) for count in (5, 3))
    list(islice(first, 4))
    state = first.state_dict() | {"world_size": 2}
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    resumed.load_state_dict(state)  # as Lightning has rank 0's loaded by all
    assert [len(list(resumed)) for _ in range(2)] == [0, 3]


class FirstOf(Counting):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return islice(super().__iter__(), self.count)


def test_another_split_of_the_same_length_is_refused():
    def prefetcher(seed):
        parts = random_split(range(60), [40, 20], torch.Generator().manual_seed(seed))
        return cpu(DataLoader(parts[0], 4, shuffle=True))

    _, state, rest = parted(prefetcher(0), 3)
    again = prefetcher(0)
    again.load_state_dict(saved(state))
    assert listed(again) == rest
    other = prefetcher(1)
    other.load_state_dict(saved(state))
    with pytest.raises(ValueError, match=r"stand for other samples.*random_split\(dataset"):
        iter(other)
    state["drawn"] = state["drawn"][:2]  # of an older version, which saved the keys alone
    other.load_state_dict(state)
    assert len(list(other)) == 7


def test_a_state_may_say_that_its_epoch_has_not_ended():
    _, state, rest = parted(cpu(numbers()), 3)
    resumed = cpu(numbers())
    resumed.load_state_dict(state | {"ended": False})  # of an older version
    assert resumed.state_dict()["batches"] == 3
    assert listed(resumed) == rest


def test_the_seed_is_that_of_the_epoch_to_resume():
    torch.manual_seed(1)
    _, state, _ = parted(cpu(numbers()), 3)
    resumed = cpu(numbers())
    resumed.load_state_dict(state)
    torch.manual_seed(9)
    assert resumed.seed == 1
    list(resumed)
    assert resumed.seed == 9


def test_the_epochs_after_a_resumed_one_have_the_seed_of_the_state(photo_folder):
    """Until the script seeds torch. An order that nothing draws leaves torch's generator alone."""
    photos = EncodedImageFolder(photo_folder)

    def prefetcher():
        loader = DataLoader(photos, 4, shuffle=False)
        return DataPrefetcher(loader, transforms=[RandomResizedCrop(8)], device="cpu")

    def pictures(loader):
        return torch.cat([images for images, _ in loader])

    torch.manual_seed(1)
    first = prefetcher()
    iterator = iter(first)
    next(iterator)
    state = first.state_dict()
    list(iterator)
    after = pictures(first)
    torch.manual_seed(2)  # another process
    resumed = prefetcher()
    resumed.load_state_dict(state)
    list(resumed)
    assert torch.equal(pictures(resumed), after)


def interrupted_at(line, iterator):
    """Raise KeyboardInterrupt at a line of what ``next()`` calls; whether it has so many lines."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        ours = frame.f_globals.get("__name__") in (
            "gpuprefetch.core.epoch",
            "gpuprefetch.core.resume",
        )
        if ours and event == "line" and frame.f_code.co_name != "__next__":
            count += 1
            if count == line:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        next(iterator)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_a_batch_that_an_interrupt_keeps_from_the_loop_comes_again():
    for line in count(1):
        prefetcher = cpu(numbers())
        iterator = iter(prefetcher)
        next(iterator)
        if not interrupted_at(line, iterator):
            break
        state = prefetcher.state_dict()
        assert state["batches"] == 1, line
    assert line > 20
    resumed = cpu(numbers())
    resumed.load_state_dict(state)
    assert listed(resumed)[0] == [4, 5, 6, 7]
