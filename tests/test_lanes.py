"""An epoch with all its threads as on a GPU, at random, on the CPU: streams and events are fake."""

import collections
import contextlib
import gc
import itertools
import random
import threading
import time
import weakref
from types import SimpleNamespace

import pictures
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from gpuprefetch import (
    DataPrefetcher,
    EncodedImage,
    Resize,
    _balance,
    _engine,
    _epoch,
    _pipeline,
    _resume,
    _turns,
)
from gpuprefetch._engine import Engine
from gpuprefetch._format import decode_cpu
from gpuprefetch._stream import own_modes

SECONDS = 20  # for what takes milliseconds; a hang takes for ever
COUNT = 24
# So large that workers ship what they decode as it is: with any share it is resampled here.
TRANSFORMS = [Resize((12, 12))]


class Event:
    """Of work that takes a moment."""

    cuda_event = 0

    def __init__(self, **options):
        self._done = 0.0

    def record(self, stream=None):
        self._done = time.perf_counter() + random.random() * 0.003

    def query(self):
        return time.perf_counter() >= self._done

    def synchronize(self):
        time.sleep(max(0.0, self._done - time.perf_counter()))


class Stream:
    device, cuda_stream = torch.device("cpu"), 0

    def query(self):
        return random.random() < 0.5

    def synchronize(self):
        pass


class Decoder:
    """Decodes on the CPU; now and then it runs out of memory."""

    packs = False

    def __init__(self, shortage):
        self._shortage = shortage

    def __call__(self, files):
        time.sleep(random.random() * 0.002)
        if random.random() < self._shortage:
            raise torch.OutOfMemoryError("no memory left in the fake")
        return [decode_cpu(file) for file in files]


class Files(Dataset):
    def __init__(self, files, bad, seconds):
        self._files, self._bad, self._seconds = files, bad, seconds

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        if index == self._bad:
            raise OSError("a bad disk")
        time.sleep(random.random() * self._seconds)
        return EncodedImage(self._files[index], index), index


class Trainer:
    """Has its loader, the iterator over it, and a transform of its own."""

    def __init__(self, fails):
        self.calls, self.fails = 0, fails
        self.loader = self.batches = None

    def transform(self, images):
        self.calls += 1
        if self.calls == self.fails:
            raise KeyError("a bad transform")
        return images


@pytest.fixture(scope="module")
def files():
    return [pictures.encode_jpeg(pictures.draw(16 + i % 5, 17 + i % 3, seed=i)) for i in range(24)]


@pytest.fixture(scope="module")
def expected(files):
    return torch.cat([images for images, _ in loader_of(files, random.Random(0), plain=True)])


@pytest.fixture
def leased(monkeypatch):
    """A device that takes its time; the streams that are in use."""
    streams, init = collections.Counter(), Engine.__init__

    def lease(device, role):
        streams[role] += 1
        return Stream()

    def give_back(stream, role):
        streams[role] -= 1

    def ahead(engine, *args, **options):
        depth = random.choice([None, None, 1, 3])  # batches on their way
        init(engine, *args, **options | {"fetch_ahead": True, "depth": depth})
        engine._on_cuda, engine._stream = True, lease(engine.device, "batch")

    def throttle(steps, device):
        steps.append(Event())
        steps[-1].record()
        if len(steps) > 1:
            steps.popleft()
        return random.random() < 0.5

    monkeypatch.setattr(Engine, "__init__", ahead)
    monkeypatch.setattr(_engine, "lease_stream", lease)
    monkeypatch.setattr(_engine, "return_stream", give_back)
    monkeypatch.setattr(_engine, "own_modes", lambda device, stream=None: own_modes(device))
    monkeypatch.setattr(_engine, "using", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(_epoch, "throttle", throttle)
    monkeypatch.setattr(_epoch, "handoff", lambda *args: None)
    monkeypatch.setattr(_pipeline, "HAS_TRITON", False)
    monkeypatch.setattr(_resume.Source, "ready", property(lambda source: random.random() < 0.7))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 36, 1 << 37))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    return streams


def loader_of(files, dice, trainer=None, *, plain=False):
    bad = -1 if plain else dice.choice([-1, -1, -1, dice.randrange(COUNT)])
    options = {"cpu_share": 0.0}
    if not plain:
        options = {
            "cpu_share": dice.choice([0.0, 0.5]),
            "memory_budget": dice.choice([None, None, "8KiB", "16KiB", "64KiB"]),
        }
    dataset, size = Files(files, bad, dice.choice([0, 0, 0.003])), dice.choice([1, 2, 3, 5, 8])
    tail = [trainer.transform] if trainer and dice.random() < 0.6 else []
    shortage = 0 if plain else dice.choice([0, 0, 0.05, 0.2])
    return wrapped(dataset, size, tail, shortage, **options)


def wrapped(dataset, batch_size, tail=(), shortage=0, **options):
    loader, transforms = DataLoader(dataset, batch_size), [*TRANSFORMS, *tail]
    loader = DataPrefetcher(loader, device="cpu", transforms=transforms, **options)
    loader._pipeline.decoder = Decoder(shortage)
    loader._pipeline.packer.on_gpu, loader._pipeline.packer.output = True, None
    return loader


def train(trainer, dice, expected, how):
    """Part of an epoch, or all of it. Batches that come are right, and in order."""
    stop = dice.randrange(1, COUNT)
    batches, rows = iter(trainer.loader), 0
    if how == "own iterator":
        trainer.batches = batches
    try:
        for images, index in batches:
            assert index.tolist() == list(range(rows, rows + len(index)))
            assert torch.equal(images, expected[rows : rows + len(index)])
            rows += len(index)
            time.sleep(dice.choice([0, 0.004]) * dice.random())
            if how != "whole" and rows >= stop:
                break
        else:
            assert rows == COUNT
    except ValueError as error:
        assert "memory_budget" in str(error)
    except (OSError, KeyError, torch.OutOfMemoryError):
        pass
    if how == "another":
        another = iter(trainer.loader)
        with contextlib.suppress(OSError, KeyError, ValueError, torch.OutOfMemoryError):
            next(another)
    elif how == "closed":
        batches.close()


def left_over(leased):
    threads = [thread.name for thread in threading.enumerate()]
    return [name for name in threads if name.startswith("gpuprefetch")] + [*(+leased)]


def ends(leased, seconds):
    deadline = time.monotonic() + seconds
    while left_over(leased):
        gc.collect()
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


HOW = ["whole", "left", "own iterator", "another", "closed", "thread"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("level", range(5))
def test_batches_come_in_order_and_threads_end(files, expected, leased, monkeypatch, level, how):
    for seed in range(6):
        turns = collections.defaultdict(_turns.Turns)
        turns[torch.device("cpu")].level = level
        monkeypatch.setattr(_engine, "turns", turns)
        monkeypatch.setattr(_pipeline, "turns", turns)
        monkeypatch.setattr(_balance, "OFTEN", seed % 2)  # at level 4 two lanes, in half of them
        dice = random.Random(f"{level} {how} {seed}")
        trainer = Trainer(fails=dice.choice([None, None, dice.randrange(1, 9)]))
        trainer.loader = loader_of(files, dice, trainer)
        if how == "thread":
            errors = []

            def loop(*args, errors=errors):
                try:
                    train(*args)
                except BaseException as error:
                    errors.append(error)

            thread = threading.Thread(target=loop, args=(trainer, dice, expected, how), daemon=True)
            thread.start()
            thread.join(SECONDS)
            assert not thread.is_alive(), "it hangs"
            assert not errors, errors
        else:
            train(trainer, dice, expected, how)
        del trainer
        assert ends(leased, SECONDS), left_over(leased)


def test_an_error_that_waits_for_its_turn_holds_no_epoch(files, leased, monkeypatch):
    monkeypatch.setattr(Engine, "_depth", 1)
    trainer = Trainer(fails=None)
    trainer.loader = wrapped(Files(files, bad=4, seconds=0), 2, [trainer.transform], cpu_share=0.0)
    trainer.batches = iter(trainer.loader)
    next(trainer.batches)
    engine = weakref.ref(trainer.batches._engine)
    deadline = time.monotonic() + SECONDS
    while engine()._held is None or engine()._held.error is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    del trainer
    assert ends(leased, SECONDS), left_over(leased)


class Hasty(list):
    """Events that serve again at once."""

    def __init__(self, events):
        self.append = events.append


@pytest.mark.parametrize("hasty", [False, True])
def test_an_event_serves_again_once_the_loop_waits_for_its_batch(files, leased, monkeypatch, hasty):
    made, recorded, early = [], itertools.count(), 0

    class Known(Event):
        def __init__(self, **options):
            super().__init__(**options)
            made.append(self)

        def query(self):
            return True

    def record(event, stream):
        event.batch = next(recorded)

    monkeypatch.setattr(torch.cuda, "Event", Known)
    monkeypatch.setattr(_engine, "record", record)
    for seed in range(20):
        handed, recorded = itertools.count(), itertools.count()
        loader = loader_of(files, random.Random(seed), plain=True)

        def handoff(batch, event, *args, handed=handed):
            nonlocal early
            time.sleep(0.001)
            early += event.batch != next(handed)  # it is another batch's by now

        monkeypatch.setattr(_epoch, "handoff", handoff)
        made.clear()
        batches = iter(loader)
        if hasty:
            batches._engine._through = Hasty(batches._engine._events)
        count = sum(1 for _ in batches)
        # Throttling makes one for each batch here, and before the next one is asked for.
        assert hasty or count < 6 or len(made) < 2 * count
        del batches, loader
        assert ends(leased, SECONDS), left_over(leased)
    # The second guards the test: events that serve again too soon are noticed.
    assert (early > 0) is hasty


def test_threads_that_held_the_epoch_would_not_end(files, expected, leased, monkeypatch):
    strong = SimpleNamespace(ref=lambda engine: lambda: engine)
    monkeypatch.setattr(_engine, "weakref", strong)
    engines = []
    for seed in range(4):
        trainer = Trainer(fails=None)
        trainer.loader = loader_of(files, random.Random(seed), trainer, plain=True)
        train(trainer, random.Random(seed), expected, "own iterator")
        engines.append(trainer.batches._engine)
        del trainer
    held = not ends(leased, 0.2)
    for engine in engines:
        engine.close()
    assert held
    assert ends(leased, SECONDS), left_over(leased)
