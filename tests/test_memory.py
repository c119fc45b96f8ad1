"""Large photos go through little memory, and what cannot go through says so with its sizes."""

import collections
import contextlib
import gc
import pickle
import queue
import struct
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pictures
import pytest
import test_faults
import torch
from torch.utils.data import DataLoader, Dataset

from gpuprefetch import (
    BadImageError,
    DataPrefetcher,
    EncodedImage,
    RandomResizedCrop,
    Resize,
    _balance,
    _budget,
    _decode,
    _engine,
    _pipeline,
    _resample,
    _selfcheck,
    _turns,
)
from gpuprefetch._budget import Cost, parse_bytes, readable
from gpuprefetch._decode import ImageDecoder, NvjpegDecoder
from gpuprefetch._encoded import Call, EncodedImages, pack
from gpuprefetch._format import decode_cpu, read_header
from gpuprefetch._host import Packer
from gpuprefetch._resample import Launches
from gpuprefetch._resume import Source
from gpuprefetch._transforms import read_transforms

KIB = 1024
SIZE = (4, 5)
SMALL = [Resize(SIZE)]
# Of pictures.draw(64, 128), and of a batch of 8 when it is finished: images and targets.
DECODED, FINISHED = 64 * 128 * 3, 8 * (3 * 4 * 5 * 4 + 8)


class Photos(Dataset):
    """Sample i is a JPEG; the targets are their numbers."""

    def __init__(self, files):
        self.files = files

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return EncodedImage(self.files[index], index, f"{index}.jpg"), index


@pytest.fixture(scope="module")
def files():
    return [pictures.encode_jpeg(pictures.draw(64, 128, seed=i)) for i in range(24)]


class FakeDecoder:
    """Decodes on the CPU as the GPU's decoder would: into memory that has an end."""

    def __init__(self, capacity=10**9, largest_call=10**9, seconds=0):
        self.capacity, self.largest_call, self.seconds = capacity, largest_call, seconds
        self.live = self.peak = self.refused = 0
        self.calls = []
        self._lock = threading.RLock()  # a finalizer may run within

    def _free(self, size):
        with self._lock:
            self.live -= size

    def __call__(self, data):
        self.calls.append(len(data))
        images = [decode_cpu(file).contiguous() for file in data]
        for image in images:
            with self._lock:
                if self.live + image.nbytes > self.capacity or len(data) > self.largest_call:
                    self.refused += 1
                    raise torch.OutOfMemoryError("no memory left in the fake")
                self.live += image.nbytes
                self.peak = max(self.peak, self.live)
            weakref.finalize(image, self._free, image.nbytes)
        time.sleep(self.seconds)
        return images


@pytest.fixture
def launches(monkeypatch):
    """Sizes of the launches; by the eager twin, which the interpreter need not slow down."""
    sizes, resample = [], _pipeline.resample

    def counted(images, *args, **options):
        sizes.append(len(images))
        return resample(images, *args, **options)

    monkeypatch.setattr(_pipeline, "HAS_TRITON", False)
    monkeypatch.setattr(_pipeline, "resample", counted)
    return sizes


def prefetcher_of(files, decoder, transforms=SMALL, batch_size=8, **options):
    """On the CPU with a decoder of its own, as on a GPU."""
    loader = DataLoader(Photos(files), batch_size=batch_size)
    prefetcher = DataPrefetcher(
        loader, device="cpu", transforms=transforms, cpu_share=0.0, **options
    )
    prefetcher._pipeline.decoder = decoder
    prefetcher._pipeline.packer.on_gpu = True
    return prefetcher


def images_of(prefetcher):
    return torch.cat([images for images, _ in prefetcher])


def test_a_batch_that_fits_is_one_launch(files, launches):
    decoder = FakeDecoder()
    budget = FINISHED + 2 * 8 * DECODED
    images_of(prefetcher_of(files, decoder, memory_budget=budget))
    assert launches == [8, 8, 8]
    assert decoder.peak == 8 * DECODED


@pytest.mark.parametrize("room", [1, 3, 7])
def test_a_batch_that_does_not_fit_is_decoded_in_parts(files, launches, room):
    expected = images_of(prefetcher_of(files, FakeDecoder()))
    launches.clear()
    decoder = FakeDecoder()
    # Several take twice their room for a moment; 511 bytes the allocator's rounding may take.
    budget = FINISHED + room * (1 + (room > 1)) * DECODED + 511
    got = images_of(prefetcher_of(files, decoder, memory_budget=budget))
    assert torch.equal(got, expected)
    assert DECODED <= decoder.peak == max(launches) * DECODED <= room * DECODED
    assert len(launches) == 3 * -(-8 // room)
    assert sum(launches) == 24


@pytest.mark.parametrize(
    ("images", "most", "calls"),
    [(2, 1000, [2]), (64, 1000, [64]), (65, 1000, [33, 32]), (140, 1000, [47, 47, 46]),
     (5, 1.4, [1] * 5), (7, 3, [3, 3, 1]), (8, 7, [4, 4]), (3, 0.5, [1] * 3), (0, 1, [])],
)  # fmt: skip
def test_decode_calls_are_about_equal_and_bounded(monkeypatch, images, most, calls):
    monkeypatch.setattr(_budget, "SUB_BATCH", 64)
    monkeypatch.setattr(_budget, "SUB_BATCH_BYTES", int(most * 512))
    sizes = np.full((images, 2), (8, 16))  # 384 bytes decoded, in a block of 512
    spans = np.stack([np.arange(images), np.arange(1, images + 1)], axis=1)
    batch = SimpleNamespace(decoded=np.zeros(images, bool), errors={}, sizes=sizes, spans=spans)
    cut = _budget.sub_batches(batch)
    assert [len(call) for call in cut] == calls
    assert [i for call in cut for i in call] == list(range(images))


def test_what_the_launches_read_lies_behind_the_pixels(files):
    head, _ = read_transforms(SMALL)
    share, epoch = torch.tensor([0.5]), torch.zeros(1, dtype=torch.int64)
    packed = []
    with mock.patch.object(EncodedImages, "keep_numbers", lambda batch, coloring: None):
        packed.append(Packer(head, True, False, 0, epoch, share)([*map(EncodedImage, files)]))
    packed.append(Packer(head, True, False, 0, epoch, share)([*map(EncodedImage, files)]))
    apart, kept = packed
    assert apart.decoded.sum() == len(files) // 2
    assert kept.plan.table.words is None
    first, last = kept.numbers
    assert kept.spans[kept.decoded].max() + kept.boundary == first
    assert last == len(kept.buffer.tensor)
    assert np.array_equal(kept.words(), apart.words())
    held, start, stop = kept.held_numbers()
    # Where the buffer cannot be pinned, a copy of its end is.
    copied = replace(kept, pinned=kept.buffer.tensor[kept.boundary :].clone())
    assert torch.equal(copied.pixels, kept.pixels)
    assert copied.boundary + len(copied.pixels) == kept.encoded_bytes == first
    other, *place = copied.held_numbers()
    assert other is copied.pinned
    assert torch.equal(other[slice(*place)], held[start:stop])
    assert np.array_equal(copied.words(), apart.words())
    assert np.array_equal(pickle.loads(pickle.dumps(kept)).words(), apart.words())


def late_engine(monkeypatch, files, idle=(True,), free=(_turns.SPARE_BYTES,), **options):
    """An engine whose loop learns of late batches, on a GPU that is idle and has free memory."""
    monkeypatch.setattr(_engine, "turns", collections.defaultdict(_turns.Turns))
    stream = SimpleNamespace(query=lambda: idle[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0] - 5, 10**12))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 12)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    engine = engine_of(prefetcher_of(files, FakeDecoder(), **options), depth=None)
    engine._fetch_ahead = True
    return engine, _engine.turns[engine.device]


@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_batches_that_are_often_late_get_more_memory(files, monkeypatch, budget):
    idle = [True]
    engine, turn = late_engine(monkeypatch, files, idle, memory_budget=budget)

    def wait(seconds, batches, *, ahead=False):
        for _ in range(batches):
            engine._learn_wait(seconds, ahead=ahead)
        return turn.level, engine.lean, engine._depth, turn.several

    _, second, third = _turns.LATE
    idle[0] = False
    engine.balancer._periods.append(0.3)
    assert wait(1.0, _turns.SHOWN) == (0, True, 0, False)
    assert wait(1.0, _turns.FIRST - _turns.SHOWN) == (2, False, 1, False)
    assert wait(0.0005, 100) == (2, False, 1, False)
    assert wait(1.0, 100, ahead=True) == (2, False, 1, False)  # and will be again
    assert wait(0.0, 100) == (2, False, 1, False)
    idle[0] = True
    assert wait(1.0, second, ahead=True) == (3, False, 2, False)
    idle[0] = False
    assert wait(1.0, 100, ahead=True) == (3, False, 2, False)  # the GPU has enough to do
    assert wait(0.0005, 100) == (3, False, 2, False)
    assert wait(0.11, 1000) == (3, False, 2, False)  # as before
    idle[0] = True
    assert wait(0.09, 1000) == (3, False, 2, False)  # it does more than to wait
    often = _balance.OFTEN
    assert wait(0.11, often + third - 2) == (3, False, 2, False)
    assert wait(0.11, 1) == (4, False, 2, True)
    assert wait(1.0, 1000) == (4, False, 2, True)


def test_no_more_memory_where_little_is_free(files, monkeypatch):
    free = [_turns.SPARE_BYTES - 1]
    engine, turn = late_engine(monkeypatch, files, free=free)
    for _ in range(_turns.FIRST + 10 * sum(_turns.LATE)):
        engine._learn_wait(1.0, ahead=False)
    assert turn.level == 1
    free[0] += 1
    for level, late in enumerate(_turns.LATE[:2], 1):
        assert turn.level == level
        for _ in range(late):
            engine._learn_wait(1.0, ahead=False)
    assert turn.level == 3


def test_no_batch_ahead_where_the_next_one_does_not_fit(files, monkeypatch):
    needed = 12345 + 678 + _turns.SPARE_FOR_NEXT
    free = [needed - 1]
    engine, turn = late_engine(monkeypatch, files, free=free)
    engine._usual = _budget.Cost(fixed=12345, decoded=678)
    for _ in range(_turns.SHOWN + 10):
        engine._learn_wait(0.0, ahead=True)
    assert (turn.level, engine._depth) == (0, 0)
    engine._wanted = True
    assert engine._depth == 1
    free[0] += 1
    engine._learn_wait(0.0, ahead=True)
    engine._wanted = False
    assert (turn.level, engine._depth) == (1, 1)


def test_what_is_late_in_a_try_does_not_count(files, monkeypatch):
    engine, turn = late_engine(monkeypatch, files)
    balancer = engine.balancer
    balancer.fixed, balancer._settling = False, 0
    for level, settling in [(balancer._best - 1, 0), (balancer._best, 1)]:
        balancer._level, balancer._settling = level, settling
        for _ in range(_turns.FIRST + 10 * sum(_turns.LATE)):
            engine._learn_wait(1.0, ahead=False)
        assert turn.level == 2
    balancer._settling = 0
    for _ in range(_turns.LATE[1]):
        engine._learn_wait(1.0, ahead=False)
    assert turn.level == 3


def test_a_size_that_was_asked_for_stays(files, monkeypatch):
    engine, turn = late_engine(monkeypatch, files)
    engine._asked = 3
    for turn.level in range(5):
        assert (engine._depth, engine.lean) == (3, False)
    engine._asked, turn.level = None, 0
    engine._fetch_ahead = False  # what it has not begun, the loop would wait for
    assert engine._depth == 2


def test_the_loop_may_wait_for_its_loader(files, monkeypatch):
    engine, _ = late_engine(monkeypatch, files)
    engine._on_cuda, waits = True, []
    monkeypatch.setattr(engine, "_learn_wait", lambda seconds, *, ahead: waits.append(seconds))

    def give(slot, fetched):
        time.sleep(0.2)
        slot.fetched = fetched or time.perf_counter()
        slot.done.set()
        with engine._changed:
            engine._slots.append(slot)
            engine._changed.notify_all()

    for fetched in (time.perf_counter(), None):
        thread = threading.Thread(target=give, args=(_engine.Slot(0), fetched))
        thread.start()
        engine.take()
        thread.join()
    assert 0.15 < waits[0] < 5
    assert waits[1] == 0


class Used:
    """An event behind what the loop does with a batch."""

    def __init__(self):
        self.done, self.waited = threading.Event(), False

    def query(self):
        return self.done.is_set()

    def synchronize(self):
        self.waited = True
        assert self.done.wait(10)


def test_a_batch_is_begun_when_the_one_before_has_been_used(files, monkeypatch):
    engine, _ = late_engine(monkeypatch, files)
    monkeypatch.setattr(_engine, "REST_SECONDS", 5.0)
    used, batch = Used(), torch.zeros(3)
    engine._used = used, weakref.ref(batch)
    thread = threading.Thread(target=engine._wait_for_used)
    thread.start()
    with engine._changed:  # the loop need not wait for that
        assert engine._changed.wait_for(lambda: engine._resting, 10)
    thread.join(0.1)
    assert thread.is_alive()
    assert used.waited
    used.done.set()
    thread.join(0.1)
    assert thread.is_alive()  # the loop still has it
    del batch
    thread.join(10)
    assert not thread.is_alive()
    kept = torch.zeros(3)
    engine._used = used, weakref.ref(kept)
    monkeypatch.setattr(_engine, "REST_SECONDS", 0.1)
    engine._wait_for_used()  # not for ever: the loop may keep its batches


class Tensors(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.full((1 << 18,), index, dtype=torch.float32)


def tensors_at_level(monkeypatch, level):
    """Batches of 4 MiB, at this level for good."""
    made = collections.defaultdict(_turns.Turns)
    monkeypatch.setattr(_engine, "turns", made)
    monkeypatch.setattr(_turns, "FIRST", 10**6)
    monkeypatch.setattr(_turns, "SHOWN", 10**6)
    prefetcher = DataPrefetcher(DataLoader(Tensors(), 4, num_workers=1, pin_memory=True))
    made[prefetcher.device].level = level
    return prefetcher


@pytest.mark.gpu
@pytest.mark.parametrize(("level", "blocks"), [(1, 2), (2, 3), (3, 4)])
def test_batches_at_a_time(monkeypatch, level, blocks):
    # One at work, one that the loop has queued behind it, and what is on its way.
    addresses, sums = [], []
    for batch in tensors_at_level(monkeypatch, level):
        addresses.append(batch.data_ptr())
        torch.cuda._sleep(40_000_000)  # about 20 ms
        sums.append(batch.sum())
    # With more than two, one may be begun before the loop has let go of the one that it had.
    assert len(set(addresses[4:])) in ([blocks] if level == 1 else [blocks, blocks + 1])
    assert [int(s) for s in sums] == [(16 * i + 6) << 18 for i in range(24)]


@pytest.mark.gpu
@pytest.mark.parametrize(("level", "held"), [(0, 1), (1, 2)])
def test_batches_held_while_the_loop_takes_a_step(monkeypatch, level, held):
    before, used, sums = torch.cuda.memory_allocated(), [], []
    for batch in tensors_at_level(monkeypatch, level):
        sums.append(int(batch.sum()))
        time.sleep(0.03)  # for a thread that has the next one
        used.append(round((torch.cuda.memory_allocated() - before) / 2**22))
    assert used[4:-4] == [held] * 16
    assert sums == [(16 * i + 6) << 18 for i in range(24)]


def test_one_thread_decodes_until_there_is_a_second_decoder(files, monkeypatch):
    engine, turn = late_engine(monkeypatch, files)
    monkeypatch.setattr(_engine, "lease_stream", lambda device, role: role)
    monkeypatch.setattr(engine, "_spawn", lambda *args: None)
    engine.balancer._periods.append(0.3)
    for turn.level in range(5):
        engine._start_lanes()
        assert len(engine._lanes) == len(engine._rooms) == 1  # it does not wait
    for turn.level in (3, 4):
        for _ in range(_balance.OFTEN):
            engine.balancer.loop_waited(0.11)
        engine._start_lanes()
        assert len(engine._lanes) == len(engine._rooms) == (2 if turn.level == 4 else 1)
        for _ in range(2 * _balance.OFTEN):
            engine.balancer.loop_waited(0.09)
        assert not engine.balancer.starved
    engine._ended = True  # its lanes are no streams


def test_a_photo_that_does_not_fit_is_named_with_both_sizes(files, launches):
    large = pictures.encode_jpeg(pictures.draw(640, 480))
    prefetcher = prefetcher_of([*files[:9], large], FakeDecoder(), memory_budget="512KiB")
    text = r"'9.jpg' of 480 x 640 pixels takes 900 KiB decoded.* memory_budget=512 KiB"
    with pytest.raises(ValueError, match=text):
        list(prefetcher)


def test_a_batch_that_does_not_fit_when_it_is_finished(files):
    prefetcher = prefetcher_of(files, FakeDecoder(), [Resize((64, 64))], memory_budget="100 KiB")
    with pytest.raises(ValueError, match=r"a batch takes 384.1 KiB .* memory_budget=100 KiB"):
        list(prefetcher)
    prefetcher = prefetcher_of(files, FakeDecoder(), None, memory_budget="100 KiB")
    with pytest.raises(ValueError, match=r"a batch takes 192.1 KiB .* a crop or a resize"):
        list(prefetcher)
    tensors = [torch.zeros(1000, 1000)]
    with pytest.raises(ValueError, match=r"a batch takes 3.815 MiB"):
        list(DataPrefetcher(tensors, device="cpu", memory_budget="1MiB"))


@pytest.mark.parametrize(
    ("budget", "size"),
    [("2GiB", 2 << 30), ("512 MiB", 512 << 20), ("1.5KiB", 1536), (7, 7), ("7B", 7), (None, None)],
)
def test_sizes(budget, size):
    assert parse_bytes(budget) == size
    assert size is None or parse_bytes(readable(size)) == size


@pytest.mark.parametrize("budget", [0, -1, True, 1.5, "2", "2GB", "GiB", "0MiB", "-1MiB"])
def test_wrong_sizes(budget):
    with pytest.raises(ValueError, match=r'such as "2GiB" .* got'):
        DataPrefetcher([], device="cpu", memory_budget=budget)


@pytest.mark.parametrize(
    ("depth", "ready", "kept"), [(None, 3.0, 2), (None, 1.9, 1), (None, 0.1, 1), (3, 0.1, 3)]
)
def test_fewer_large_batches_are_kept_ready(files, monkeypatch, depth, ready, kept):
    monkeypatch.setattr(_engine, "READY_BYTES", int(ready * FINISHED))
    prefetcher = prefetcher_of(files, FakeDecoder(), device_prefetch_size=depth)
    engine = engine_of(prefetcher, prefetcher._loader, depth=prefetcher._depth)
    assert engine.take().error is None
    # Those that it has begun before the loop waited, less the one that it took.
    assert len(engine._slots) == kept - 1
    engine.close()


def engine_of(prefetcher, source=(), depth=1):
    """What runs an epoch, without its threads."""
    return _engine.Engine(
        prefetcher._pipeline,
        Source(source),
        depth=depth,
        epoch=0,
        fetch_ahead=False,
        balancer=prefetcher._balancer,
        check=lambda batch: None,
        shares={},
    )


def started(budget, depth, costs):
    """The engine, after as many batches as it starts before one has been handed over."""
    prefetcher = DataPrefetcher([], device="cpu", memory_budget=budget)
    engine = engine_of(prefetcher, depth=depth)
    for number, cost in enumerate(costs):
        slot = _engine.Slot(number)
        slot.cost = cost
        if not engine._has_room(slot):
            break
        slot.work = _pipeline.Work([], lambda: None, decoded_bytes=cost.decoded)
        engine._slots.append(slot)
    return engine


@pytest.mark.parametrize(("budget", "batches"), [(None, 3), (120, 3), (119, 2), (79, 1), (39, 1)])
def test_batches_in_flight_adapt(budget, batches):
    cost = Cost(fixed=10, decoded=30)
    engine = started(budget, 3, [cost] * 4)
    assert len(engine._slots) == batches
    if budget == 79:
        waiting = _engine.Slot(1)
        waiting.cost = Cost(fixed=10, decoded=59)
        assert not engine._has_room(waiting)
        engine._slots[0].work = None  # it is finished, and its images are resampled
        assert engine._has_room(waiting)


def test_out_of_memory_in_a_large_call_makes_it_smaller(files, launches):
    expected = images_of(prefetcher_of(files, FakeDecoder()))
    launches.clear()
    decoder = FakeDecoder(largest_call=3)
    prefetcher = prefetcher_of(files[:8], decoder)
    assert torch.equal(images_of(prefetcher), expected[:8])
    assert decoder.calls == [8, 4, 2, 2, 4, 2, 2]
    assert prefetcher.stats.out_of_memory == 3


def test_out_of_memory_frees_what_is_decoded(files, launches):
    # Halves alone would not do: each would be decoded beside the one before.
    expected = images_of(prefetcher_of(files, FakeDecoder()))
    decoder = FakeDecoder(capacity=2 * DECODED)
    prefetcher = prefetcher_of(files, decoder, batch_size=24)
    assert torch.equal(images_of(prefetcher), expected)
    assert decoder.peak == 2 * DECODED
    assert prefetcher.stats.out_of_memory == decoder.refused > 0


def test_no_room_for_the_result_at_first(files, launches, monkeypatch):
    expected = images_of(prefetcher_of(files, FakeDecoder()))
    begin, tries = _pipeline.ImageJob.begin, []

    def full(job, limit):
        tries.append(len(job.images))
        if len(tries) == 2:
            raise torch.OutOfMemoryError("no memory left for the result")
        return begin(job, limit)

    monkeypatch.setattr(_pipeline.ImageJob, "begin", full)
    prefetcher = prefetcher_of(files, FakeDecoder())
    assert torch.equal(images_of(prefetcher), expected)
    assert tries == [8, 8, 8, 8]
    assert prefetcher.stats.out_of_memory == 1


def test_out_of_memory_for_good_is_an_error_with_its_sizes(files, launches):
    decoder = FakeDecoder(capacity=DECODED - 1)
    prefetcher = prefetcher_of(files, decoder)
    text = r"'0.jpg' \(sample 0 of the dataset\): out of memory .* 128 x 64 pixels take 24 KiB"
    with pytest.raises(torch.OutOfMemoryError, match=text):
        list(prefetcher)
    assert decoder.calls == [8, 4, 2, 1, 1]
    decoder.capacity = 8 * DECODED
    assert decoder.live == 0
    assert len(images_of(prefetcher)) == 24  # it goes on


asked: list[int] = []  # files of each call of the operator


@torch.library.custom_op("gpuprefetch_tests::decode_jpegs", mutates_args=())
def decode_jpegs(files: list[torch.Tensor], mode: int, device: torch.device) -> list[torch.Tensor]:
    """On the CPU, in the place of the operators that decode on a GPU."""
    asked.append(len(files))
    if any(file[-1] != 0xD9 for file in files):
        raise RuntimeError("no end of image")
    return [decode_cpu(file).contiguous() for file in files]


class OperatorDecoder(ImageDecoder):
    """Decodes in TorchScript, as the GPU's decoders do; file by file where that fails."""

    module, operator = "torch", "gpuprefetch_tests.decode_jpegs"

    def __call__(self, data):
        return decode_jpegs(data, 3, self._device)


def planned_batch(monkeypatch, files, decoder, share=0.0, *, cuts=False, **options):
    """The GPU's way through a batch, with the kernel in Triton's interpreter."""
    monkeypatch.setattr(_resample, "ROWS", 16)  # at a time: it takes as long for 2
    images = [[EncodedImage(file, i) for i, file in enumerate(files)]]
    options = {"transforms": [Resize((12, 16))], "cpu_share": share, "device": "cpu"} | options
    prefetcher = DataPrefetcher(images, **options)
    prefetcher._pipeline.packer.cuts.fill_(cuts)
    if decoder is not None:
        prefetcher._pipeline.decoder = decoder
        prefetcher._pipeline.packer.on_gpu, prefetcher._pipeline.packer.output = True, None
    return next(iter(prefetcher))


interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton compiles: the GPU tests do it"
)


@pytest.fixture
def launched(monkeypatch):
    """How the images of a batch were launched: in groups laid out before, or apart."""
    launch, resample = Launches.launch, _pipeline.resample
    sizes = SimpleNamespace(laid_out=[], apart=[])

    def laid_out(self, number, address, numbers):
        sizes.laid_out.append(self._firsts[number + 1] - self._firsts[number])
        launch(self, number, address, numbers)

    def apart(images, *args, **options):
        sizes.apart.append(len(images))
        resample(images, *args, **options)

    monkeypatch.setattr(Launches, "launch", laid_out)
    monkeypatch.setattr(_pipeline, "resample", apart)
    return sizes


@interpreted
@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize(("share", "most"), [(0.0, 3), (0.0, 7), (0.5, 3), (1.0, 7)])
def test_each_group_of_a_batch_fills_its_rows(monkeypatch, launched, share, most):
    # The longest are launched first.
    shapes = [(24, 32), (23, 31), (40, 20), (17, 19), (24, 31), (64, 48), (9, 9)]
    files = [pictures.encode_jpeg(pictures.draw(*hw, seed=i)) for i, hw in enumerate(shapes)]
    expected = planned_batch(monkeypatch, files, None)
    monkeypatch.setattr(_budget, "UPLOAD_BYTES", 2 * 24 * 32 * 3)
    monkeypatch.setattr(_budget, "SUB_BATCH", most)
    got = planned_batch(monkeypatch, files, OperatorDecoder("cpu"), share)
    assert sum(launched.laid_out) == 7
    assert len(launched.laid_out) == 1 + (share > 0 or most == 3)
    assert launched.apart == []
    # The CPU path rounds to whole levels on its way.
    assert (got - expected).abs().max() * 255 < 1


@interpreted
@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("refused", [False, True])
def test_files_cut_below_their_crop_give_the_same(monkeypatch, refused):
    shapes = [(480, 32), (430, 31), (340, 20), (270, 19), (440, 31), (64, 48), (90, 90)]
    kinds = ["4:4:4", "4:2:0", "4:2:2"]
    files = [
        pictures.encode_jpeg(pictures.draw(*hw, seed=i), subsampling=kinds[i % 3])
        for i, hw in enumerate(shapes)
    ]
    rows = []

    class Decoder(OperatorDecoder):
        def __call__(self, data):
            if refused:
                raise RuntimeError("a GPU without engines")
            return super().__call__(data)

        def packed(self, data, call, out, **options):
            rows.extend(call.layout[1].tolist())
            return not refused and super().packed(data, call, out, **options)

    def batch(cuts):
        options = {"transforms": [RandomResizedCrop((12, 16), scale=(0.1, 0.4))], "cuts": cuts}
        return planned_batch(monkeypatch, files, Decoder("cpu"), **options)

    whole, cut = batch(cuts=False), batch(cuts=True)
    assert sum(rows[7:]) < 0.9 * sum(rows[:7]) == 0.9 * sum(height for height, _ in shapes)
    assert torch.equal(whole, cut)


class Flawed(ImageDecoder):
    """Gives other rows of files that were cut, or none."""

    def __init__(self, flaw):
        self.flaw, self.calls = flaw, 0

    def __call__(self, data):
        self.calls += 1
        if self.calls == 2 and self.flaw == "refuses":
            raise RuntimeError("bytes are left")
        images = [decode_cpu(file).clone() for file in data]
        if self.calls == 2 and self.flaw == "another pixel":
            images[-1][1, 60, 127] += 1
        return images


@pytest.mark.parametrize("flaw", [None, "refuses", "another pixel"])
def test_whether_a_decoder_takes_cut_files_is_tried_once(monkeypatch, flaw):
    monkeypatch.setattr(_decode, "_tried", {})
    decoder, cpu = Flawed(flaw), torch.device("cpu")
    assert [_decode.gives_rows(decoder, cpu) for _ in range(3)] == 3 * [flaw is None]
    assert decoder.calls == 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("backend", ["nvjpeg", "torchcodec", "torchvision"])
def test_the_gpus_decoder_gives_the_rows_of_cut_files(monkeypatch, backend):
    monkeypatch.setattr(_decode, "_tried", {})  # with a warning made an error it was refused
    device = torch.device("cuda")
    decoder = _decode.BACKENDS[backend](device)
    assert _decode.gives_rows(decoder, device)
    rng = np.random.default_rng(0)
    files, cut, needed = [], [], []
    for i in range(120):
        picture = pictures.draw(*rng.integers(16, 700, 2), seed=i)
        kind, quality = ("4:4:4", "4:2:2", "4:2:0")[i % 3], int(rng.integers(20, 98))
        files.append(pictures.encode_jpeg(picture, subsampling=kind, quality=quality))
        needed.append(int(rng.integers(1, len(picture) + 1)))
        header = read_header(files[-1])
        cut.append(bytearray(files[-1]))
        struct.pack_into(">H", cut[-1], header.height_at, header.rows_above(needed[-1]))
    whole, cut = (
        decoder([torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in some])
        for some in (files, cut)
    )
    assert sum(image.size(1) for image in cut) < 0.8 * sum(image.size(1) for image in whole)
    for a, b, rows in zip(whole, cut, needed, strict=True):
        assert torch.equal(a[:, :rows], b[:, :rows])


@pytest.mark.gpu
def test_cut_files_change_no_pixel(monkeypatch):
    files = [pictures.encode_jpeg(pictures.draw(300 + i, 200, seed=i)) for i in range(64)]
    loader = DataLoader(Photos(files), batch_size=8, pin_memory=True)
    decoded, packed = [], NvjpegDecoder.packed

    def watched(self, data, call, *args, **options):
        decoded.append(call.size)
        return packed(self, data, call, *args, **options)

    def epoch(cuts):
        with monkeypatch.context() as patch:
            patch.setattr(NvjpegDecoder, "packed", watched)
            if not cuts:
                patch.setattr(_pipeline, "gives_rows", lambda *_: False)
            options = {"transforms": [RandomResizedCrop((32, 48))], "cpu_share": 0.0, "seed": 3}
            prefetcher = DataPrefetcher(loader, **options)
            prefetcher._pipeline.packer.cuts.fill_(cuts)
            images = images_of(prefetcher)
            assert prefetcher._pipeline.packer.cuts.item() is cuts
        size = sum(decoded)
        decoded.clear()
        return images, size

    cut, less = epoch(cuts=True)
    whole, size = epoch(cuts=False)
    assert less < 0.95 * size
    assert torch.equal(cut, whole)


class Shrinking(OperatorDecoder):
    """Another shape than the headers say."""

    def packed(self, data, call, out, **options):
        layout = call.layout.copy()
        layout[1:, 0] = 1
        return super().packed(data, replace(call, layout=layout), out, **options)


class Unknown(OperatorDecoder):
    operator = "gpuprefetch_tests.no_such_operator"


@interpreted
@pytest.mark.parametrize("decoder", [OperatorDecoder, Shrinking, Unknown])
def test_what_cannot_be_packed_is_decoded_apart(monkeypatch, launched, decoder):
    files = [pictures.encode_jpeg(pictures.draw(24, 32, seed=i)) for i in range(4)]
    expected = planned_batch(monkeypatch, files, None)
    if decoder is OperatorDecoder:
        files[1] += b"\0\0"  # the operator's own complaint
    monkeypatch.setattr(_budget, "SUB_BATCH", 2)
    told = pytest.warns(UserWarning, match="decodes through Python.* version of torch ")
    with told if decoder is Unknown else contextlib.nullcontext():
        got = planned_batch(monkeypatch, files, decoder("cpu"))
    assert launched.apart == ([2] if decoder is OperatorDecoder else [2, 2])
    assert launched.laid_out == ([2] if decoder is OperatorDecoder else [])
    assert (got - expected).abs().max() * 255 < 1


@interpreted
@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_a_single_photo_is_there_once(monkeypatch, launched, count, copies):
    class Decoder(OperatorDecoder):
        pass

    Decoder.copies = copies
    files = [pictures.encode_jpeg(pictures.draw(24, 32, seed=i)) for i in range(count)]
    expected = planned_batch(monkeypatch, files, None)
    got = planned_batch(monkeypatch, files, Decoder("cpu"))
    alone = count == 1 and copies
    assert (launched.apart, launched.laid_out) == (([1], []) if alone else ([], [count]))
    assert (got - expected).abs().max() * 255 < 1


def test_rooms_are_as_large_as_calls():
    rng = np.random.default_rng(0)
    sizes = rng.gamma(2.0, 300e3, 20000).astype(int)  # photos of 0.6 MB, and some of several MB
    room = _budget.SUB_BATCH_BYTES
    cuts = _budget._cut(sizes, room)
    calls = np.add.reduceat(sizes, cuts)
    assert room * 0.75 < calls.max() <= room
    assert {_budget.in_rooms(int(size)) for size in calls} <= {room - _budget.ROOM_BYTES, room}
    sizes[rng.random(len(sizes)) < 0.1] = 6 << 20
    assert np.add.reduceat(sizes, _budget._cut(sizes, room)).max() <= room
    sizes[:] = 9 << 20
    assert _budget._cut(sizes, room)[1] == 13
    sizes[:] = room + 1
    assert np.array_equal(_budget._cut(sizes, room), np.arange(len(sizes)))
    assert _budget.in_rooms(room + 1) == room + _budget.ROOM_BYTES


def test_a_call_is_decoded_into_one_piece():
    asked.clear()
    decoder = OperatorDecoder("cpu")
    shapes = [(24, 32), (8, 9), (40, 20), (17, 19)]
    files = [pictures.encode_jpeg(pictures.draw(*hw, seed=i)) for i, hw in enumerate(shapes)]
    data = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
    layout = np.array([(len(d), *hw) for d, hw in zip(data, shapes, strict=True)]).T
    flat = torch.cat([torch.zeros(5, dtype=torch.uint8), *data])
    expected = torch.cat([decode_cpu(d).permute(1, 2, 0).flatten() for d in data])
    got = torch.full((3 + len(expected) + 4,), 77, dtype=torch.uint8)
    assert decoder.packed(flat, Call(np.arange(4), 5, layout), got, at=3)
    assert torch.equal(got[3:-4], expected)
    assert set(got[:3].tolist() + got[-4:].tolist()) == {77}
    assert asked == [4]
    layout[1:, 3] = layout[:0:-1, 3]  # not what its header says
    assert not decoder.packed(flat, Call(np.arange(4), 5, layout), got, at=3)


@interpreted
def test_what_a_queued_launch_reads_is_waited_for_before_anything_lies_there(monkeypatch):
    done = []

    def noted(owner, name):
        function = getattr(owner, name)

        def call(*args, **options):
            done.append(name)
            return function(*args, **options)

        monkeypatch.setattr(owner, name, call)

    noted(_pipeline.ImageJob, "_wait_for_reader")
    noted(_pipeline, "upload")
    noted(OperatorDecoder, "packed")
    noted(_pipeline.ImageJob, "_launch")
    files = [pictures.encode_jpeg(pictures.draw(24, 32, seed=i)) for i in range(4)]
    planned_batch(monkeypatch, files, OperatorDecoder("cpu"), share=0.5)
    # What the launch reads, and what the workers decoded.
    assert done == ["_wait_for_reader", "upload", "upload", "packed", "_launch"]


def test_a_thread_has_the_same_place_again(monkeypatch):
    cpu, room = torch.device("cpu"), []
    place = partial(_decode.place, device=cpu)
    with _decode.packing_into(room):
        first = place(1000)
        assert len(first) == _budget.ROOM_BYTES
        assert place(5) is place(_budget.ROOM_BYTES) is room[0] is first
        photo = _budget.in_rooms(_budget.SUB_BATCH_BYTES + _budget.UPLOAD_BYTES) + 1
        assert len(place(photo)) == photo  # of one image, which is not kept
        assert room[0] is first
        room.clear()  # as where memory is short
        assert place(1000) is room[0]
        emptied = []
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(room)))
        monkeypatch.setattr(_budget, "ROOM_BYTES", 2000)
        room.clear()
        assert [len(place(size)) for size in (2000, 3000, 4000, 100)] == [2000, 4000, 4000, 4000]
        assert emptied == [0]  # the smaller place was given back
    assert room == []
    assert len(place(1000)) == 1000


def test_one_thread_at_a_time_decodes_unless_a_loop_waits_that_often_has_to():
    turns, inside, most = _turns.Turns(), [], []
    may_end = threading.Event()
    turns.level = 3
    for _ in range(_turns.FIRST):
        turns.learn(late=True)
    (*_, enough) = _turns.LATE
    often = [True] * (enough - 1) + [False] * _turns.TOLERATED
    for late in often + [False] * (_turns.TOLERATED - 1) * enough:
        assert not turns.learn(late=late)

    def decode():
        with turns:
            inside.append(1)
            most.append(len(inside))
            may_end.wait(10)
            inside.pop()

    threads = [threading.Thread(target=decode) for _ in range(2)]
    for thread in threads:
        thread.start()
    with turns.hurried():
        time.sleep(0.1)
    assert most == [1]
    for late in [True] * enough + [False] * 9:  # for good
        turns.level += turns.learn(late=late)
    time.sleep(0.1)
    assert most == [1]
    with turns.hurried():
        deadline = time.monotonic() + 10
        while len(most) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert most == [1, 2]
    may_end.set()
    for thread in threads:
        thread.join()
    with turns:  # nobody is left inside, and nobody waits
        pass
    assert (turns._inside, turns._waiting) == (0, 0)


def test_never_more_than_two_threads_decode():
    turns, inside, most, lock = _turns.Turns(), [0], [0], threading.Lock()
    turns.level = 4

    def decode():
        for _ in range(20):
            with turns:
                with lock:
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                time.sleep(0.001)
                with lock:
                    inside[0] -= 1

    threads = [threading.Thread(target=decode) for _ in range(4)]  # of two prefetchers
    for thread in threads:
        thread.start()
    with turns.hurried():
        for thread in threads:
            thread.join()
    assert most == [_budget.LANES]


class Lane:
    """An engine with nothing but a lane, whose loop takes a step of so many seconds."""

    def __init__(self, pace):
        self.ran = queue.SimpleQueue()
        self.engine = object.__new__(_engine.Engine)
        vars(self.engine).update(
            device=torch.device("meta"),
            balancer=SimpleNamespace(pace=pace),
            _on_cuda=True,
            _stopping=False,
            _asked=1,
            _changed=threading.Condition(),
            _gate=_engine.Gate(),
            _spent=collections.deque(),
            _given=queue.SimpleQueue(),
            _parts=collections.deque(),
            _pipeline=SimpleNamespace(memory_budget=1, try_cuts=lambda: None),
            _slots=[],
            _run_part=lambda slot, part: self.ran.put(time.perf_counter()),
        )
        reference = lambda: self.engine  # noqa: E731
        self._thread = threading.Thread(target=_engine._lane_loop, args=(reference, None, []))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self.engine._stopping = True
        self.engine._gate.open()
        self.engine._given.put(None)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def give(self):
        self.engine._parts.append((None, None))
        self.engine._given.put(None)

    def seconds(self):
        """From the begin of the loop's step to that of the decode that comes with it."""
        self.engine._gate.open()
        self.engine._hold_back()
        began = time.perf_counter()
        self.give()
        return self.ran.get(timeout=10) - began


@pytest.fixture
def lanes_without_cuda(monkeypatch):
    monkeypatch.setattr(_engine, "using", lambda stream: contextlib.nullcontext())


def test_a_decode_begins_in_the_latter_part_of_the_step(lanes_without_cuda):
    with Lane(pace=1.0) as lane:
        assert lane.seconds() > 0.49  # half of the step, but for the clock
        lane.engine._spent.append(0.7)  # and so the next one takes until the end of the step
        assert 0.24 < lane.seconds() < 0.49
        lane.engine._spent.append(1.0)  # of several, the longest counts
        assert lane.seconds() < 0.24


def test_a_decode_that_is_late_or_of_an_unknown_loop_begins_at_once(lanes_without_cuda):
    with Lane(pace=0.0) as lane:
        assert lane.seconds() < 0.2
        lane.engine.balancer.pace = 30.0
        lane.engine._slots.append(_engine.Slot(0))
        assert lane.seconds() < 5
        lane.engine._slots[0].done.set()
        lane.engine._hold_back()
        lane.give()
        with pytest.raises(queue.Empty):
            lane.ran.get(timeout=0.2)
        with lane.engine.waiting():  # the loop is back
            lane.ran.get(timeout=10)


def test_a_lane_that_waits_holds_no_epoch(lanes_without_cuda):
    engine = object.__new__(_engine.Engine)
    gate, given = _engine.Gate(), queue.SimpleQueue()
    gate.close(60)
    vars(engine).update(
        _gate=gate,
        _given=given,
        _parts=collections.deque([(None, engine)]),  # as what leads to it
        _pipeline=SimpleNamespace(memory_budget=1, try_cuts=lambda: None),
    )
    lane = threading.Thread(target=_engine._lane_loop, args=(weakref.ref(engine), None, []))
    lane.start()
    given.put(None)
    deadline = time.monotonic() + 10
    while not given.empty() and time.monotonic() < deadline:  # it is at the gate
        time.sleep(0.01)
    dropped = weakref.ref(engine)
    del engine
    gc.collect()
    assert dropped() is None
    gate.open()
    lane.join(10)
    assert not lane.is_alive()


@pytest.mark.gpu
@pytest.mark.alone  # where the GPU is slow to decode, no batch is ready early
@pytest.mark.parametrize("gate", ["ours", "none"])
def test_no_decode_begins_with_the_step(files, monkeypatch, gate):
    if gate == "none":  # guards the test
        monkeypatch.setattr(_engine.Engine, "_hold_back", lambda engine: None)
    loader = DataLoader(Photos(files * 12), 8, num_workers=2, pin_memory=True)
    prefetcher = DataPrefetcher(loader, transforms=SMALL, cpu_share=0.0, device_prefetch_size=2)
    decoder = prefetcher._pipeline.decoder
    packed, launching, begun = decoder.packed, threading.Event(), []

    def noted(*args, **options):
        begun.append(launching.is_set())
        return packed(*args, **options)

    decoder.packed = noted
    for _ in prefetcher:
        launching.set()
        torch.cuda._sleep(100_000_000)  # about 50 ms
        time.sleep(0.02)
        launching.clear()
    assert len(begun) == 12 * len(files) // 8
    # The first ones are begun before it is known what a step takes.
    assert sum(begun[8:]) < 4 if gate == "ours" else sum(begun[8:]) > len(begun[8:]) // 2


def test_an_error_without_words_may_be_a_shortage(monkeypatch):
    # TorchCodec's has no type, and with torch 2.11 no words; for a bad file the CPU would decode.
    claimed = []

    def full(size, device, error):
        claimed.append((size, str(error)))
        raise torch.OutOfMemoryError("no room")

    class Wordless(ImageDecoder):
        def packed(self, *args, **options):
            raise RuntimeError("API call failed")

        def __call__(self, data):
            raise RuntimeError("API call failed")

    images = pack(
        [EncodedImage(pictures.encode_jpeg(pictures.draw(8, 16, seed=i))) for i in range(2)],
        sizes=np.array([(8, 16)] * 2),
        transposed=np.zeros(2, bool),
    )
    both, cpu = images.call(np.array([0, 1])), torch.device("cpu")
    out = torch.empty(both.size, dtype=torch.uint8)
    assert not _decode.decode_packed(Wordless(cpu), images, both, out, 0)
    for image in _decode.decode_part(Wordless(cpu), images, both, cpu):
        assert image.shape == (3, 8, 16)  # a second opinion
    monkeypatch.setattr(_decode, "claim", full)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        _decode.decode_packed(Wordless(cpu), images, both, out, 0)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        _decode.decode_part(Wordless(cpu), images, both, cpu)
    assert claimed == [(2 * 3 * 8 * 16, "API call failed")] * 2
    assert images.errors == {}


NOT_STARTED = "CUDAJpegDecoder, DecodeJpegCuda.cpp:224, Failed to create nvjpeg state: 5"


class NotStarted(FakeDecoder):
    """A decoder that the GPU has no resources for, the first few times."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def __call__(self, data):
        if len(self.calls) < self.times:
            self.calls.append(len(data))
            raise RuntimeError(NOT_STARTED)
        return super().__call__(data)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("times", [1, 3])
def test_a_decoder_that_cannot_start_is_a_shortage(files, times):
    # And no reason to decode good files on the CPU, whose pixels are others.
    decoder = NotStarted(times)
    prefetcher = prefetcher_of(files, decoder)
    expected = prefetcher_of(files, FakeDecoder())
    for (images, _), (others, _) in zip(prefetcher, expected, strict=True):
        assert torch.equal(images, others)
    assert prefetcher.stats.out_of_memory == times
    assert sum(decoder.calls[times:]) == len(files)  # all of them by it


@pytest.mark.usefixtures("launches")
def test_a_decoder_that_never_starts(files):
    prefetcher = prefetcher_of(files, NotStarted(10**9), on_error="skip")
    with pytest.raises(torch.OutOfMemoryError, match=r"0\.jpg") as raised:
        list(prefetcher)
    assert "Failed to create nvjpeg state: 5. Fewer processes" in str(raised.value.__cause__)
    assert prefetcher.bad_images == []


def test_a_broken_device_makes_no_file_bad(monkeypatch):
    class Picture:
        shape = (3, 8, 16)

        def __getitem__(self, part):
            return self

        def contiguous(self):
            return self

        def to(self, device):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    images = pack(
        [EncodedImage(pictures.encode_jpeg(pictures.draw(8, 16)))],
        sizes=np.array([(8, 16)]),
        transposed=np.zeros(1, bool),
    )
    monkeypatch.setattr(_decode, "decode_cpu", lambda file: Picture())
    with pytest.raises(RuntimeError, match="illegal memory access"):
        _decode.decode_part(
            raising(RuntimeError("API call failed")),
            images,
            images.call(np.array([0])),
            torch.device("cpu"),
        )
    assert images.errors == {}


def raising(error):
    def function(*args):
        raise error

    return function


class Refusing(FakeDecoder):
    """Does not take what is marked, or gives another picture for it."""

    def __init__(self, mark, error=None):
        super().__init__()
        self.mark, self.error = mark, error

    def __call__(self, data):
        marked = [self.mark in bytes(file.numpy()) for file in data]
        if any(marked) and self.error is not None:
            raise self.error
        images = super().__call__(data)
        return [image[:, 1:] if bad else image for image, bad in zip(images, marked, strict=True)]


@pytest.mark.parametrize("error", [RuntimeError("unsupported"), None])
def test_what_the_decoder_does_not_take_gets_a_second_opinion(files, launches, error):
    marked = [*files[:3], pictures.insert_segment(files[3], 0xFE, b"a mark"), *files[4:8]]
    expected = images_of(prefetcher_of(files[:8], FakeDecoder()))
    got = images_of(prefetcher_of(marked, Refusing(b"a mark", error)))
    assert torch.equal(got, expected)


def test_a_bad_file_is_found_in_parts_too(files, launches):
    damaged = files[1][:400] + b"\xff\xd8" * 20 + files[1][440:]
    decoder = Refusing(b"\xff\xd8" * 20, RuntimeError("damaged"))
    budget = FINISHED + 2 * DECODED
    prefetcher = prefetcher_of([files[0], damaged, *files[2:8]], decoder, memory_budget=budget)
    with pytest.raises(BadImageError, match=r"'1\.jpg'"):
        list(prefetcher)
    prefetcher._pipeline.on_error = "skip"
    good = images_of(prefetcher_of(files[:8], FakeDecoder()))
    assert torch.equal(images_of(prefetcher), torch.cat([good[:1], good[2:]]))


@pytest.mark.parametrize(
    ("transforms", "bad", "done"),
    [([], False, True), ([lambda images: images], False, False), ([], True, False)],
)
def test_whether_work_is_left_behind_the_decode(files, launches, transforms, bad, done):
    some = [b"no picture" if bad else files[0], *files[1:8]]
    given = {"transforms": [*SMALL, *transforms], "on_error": "skip"}
    prefetcher = prefetcher_of(some, FakeDecoder(), **given)
    engine = engine_of(prefetcher, prefetcher._loader)
    work = engine._begin(engine._fetch())
    for part in work.parts:
        part(lambda: None)
    assert work.is_done() is done


def run_with_two_lanes(files, decoder, permits):
    prefetcher = prefetcher_of(files, decoder, batch_size=24)
    engine = engine_of(prefetcher, prefetcher._loader)
    engine._permits = queue.SimpleQueue()
    for _ in range(permits):
        engine._permits.put(None)
    slot = engine._fetch()
    slot.work = engine._begin(slot)
    engine._slots.append(slot)
    parts, slot.remaining = list(slot.work.parts), len(slot.work.parts)
    assert len(parts) == 24

    def lane():
        while parts:
            engine._run_part(slot, parts.pop())

    lanes = [threading.Thread(target=lane) for _ in range(_budget.LANES)]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    return slot


def test_two_lanes_that_are_short_of_memory_take_turns(files, launches, monkeypatch):
    expected = images_of(prefetcher_of(files, FakeDecoder()))
    monkeypatch.setattr(_budget, "SUB_BATCH", 1)
    for _ in range(10):
        decoder = FakeDecoder(DECODED, seconds=0.002)
        slot = run_with_two_lanes(files, decoder, _budget.LANES)
        assert slot.error is None
        assert torch.equal(slot.result[0], expected)
        assert decoder.peak == DECODED
        assert decoder.refused


def test_two_lanes_would_take_each_others_memory(files, launches, monkeypatch):
    # Guards the test above: with permits for everybody at any time nobody is alone.
    monkeypatch.setattr(_budget, "SUB_BATCH", 1)
    decoders = (FakeDecoder(DECODED, seconds=0.002) for _ in range(10))
    errors = [run_with_two_lanes(files, decoder, 10**4).error for decoder in decoders]
    assert any(isinstance(error, torch.OutOfMemoryError) for error in errors)


def late_epoch(files, job=_pipeline.ImageJob, **options):
    loader = DataLoader(Photos(files), batch_size=8, pin_memory=True)
    transforms = [Resize((256, 384))]
    prefetcher = DataPrefetcher(loader, transforms=transforms, cpu_share=0.0, **options)
    prefetcher._pipeline.job = job
    return images_of(prefetcher)


@pytest.mark.gpu
@pytest.mark.parametrize("job", [_pipeline.ImageJob, _selfcheck._CarelessJob])
def test_a_part_waits_for_the_reader_of_the_one_before(monkeypatch, job):
    files = [pictures.encode_jpeg(pictures.draw(512, 768, seed=seed)) for seed in range(8)]
    expected = late_epoch(files)
    launch = _pipeline.ImageJob._launch

    def late(self, what):
        # 40 ms: the next part is decoded well within them, with other tests on the GPU, too.
        torch.cuda._sleep(80_000_000)
        launch(self, what)

    monkeypatch.setattr(_pipeline.ImageJob, "_launch", late)
    got = late_epoch(files, job, memory_budget="14MiB")  # the result takes 9, a photo 1.1
    # Without waiting, parts really are overwritten.
    assert torch.equal(got, expected) == (job is _pipeline.ImageJob)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_two_decoders_give_the_same_images(files, monkeypatch, workers):
    loader = DataLoader(Photos(files * 16), batch_size=32, pin_memory=True, num_workers=workers)

    def epoch():
        made = collections.defaultdict(_turns.Turns)
        monkeypatch.setattr(_pipeline, "turns", made)
        monkeypatch.setattr(_engine, "turns", made)
        prefetcher = DataPrefetcher(loader, transforms=[Resize((64, 96))], cpu_share=0.0)
        images = images_of(prefetcher)
        (turn,) = made.values()
        return images, turn.several

    monkeypatch.setattr(_budget, "SUB_BATCH_BYTES", 8 * DECODED)
    monkeypatch.setattr(_turns, "FIRST", 10**6)
    images, hurried = epoch()
    assert not hurried
    monkeypatch.setattr(_turns, "LATE", (0, 0, 0))
    monkeypatch.setattr(_balance, "OFTEN", 0)
    monkeypatch.setattr(_turns, "FIRST", 0)
    monkeypatch.setattr(_turns, "SHOWN", 0)
    in_a_hurry, hurried = epoch()
    assert hurried
    assert torch.equal(in_a_hurry, images)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("backend", ["nvjpeg", "torchcodec", "torchvision"])
def test_good_photos_are_decoded_without_a_python_object_each(monkeypatch, backend):
    files = [pictures.encode_jpeg(pictures.draw(200 + i, 300, seed=i)) for i in range(24)]
    loader = DataLoader(Photos(files), batch_size=8, pin_memory=True)

    def epoch():
        options = {"transforms": [Resize((64, 96))], "cpu_share": 0.0, "decoder": backend}
        return images_of(DataPrefetcher(loader, **options))

    with monkeypatch.context() as patch:
        patch.setattr(_pipeline.ImageJob, "_decode_packed", lambda *_: False)
        apart = epoch()
    monkeypatch.setattr(_pipeline.ImageJob, "_decode_apart", None)
    assert torch.equal(epoch(), apart)


BIG = """
from gpuprefetch import Resize
rng = np.random.default_rng(0)
buffer = io.BytesIO()
small = Image.fromarray(rng.integers(0, 256, (40, 60, 3), dtype=np.uint8))
small.resize((6000, 4000)).save(buffer, "JPEG")
JPEG = buffer.getvalue()  # 24 megapixels, 68.7 MiB decoded

def epoch(count, **options):
    loader = DataLoader(Files(count), batch_size=256, num_workers=2, pin_memory=True)
    prefetcher = DataPrefetcher(loader, transforms=[Resize((64, 64))], cpu_share=0.0, **options)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    images = torch.cat([images for images, _ in prefetcher])
    peak = torch.cuda.max_memory_allocated() - before
    assert prefetcher.stats.gpu_images == count
    return images, peak, prefetcher.stats.out_of_memory
"""

BUDGETED = (
    BIG
    + """
# Two decode threads have a photo each; the peak does not follow the batch of 17 GiB.
whole, most, _ = epoch(256)
assert most < 2 * 72_000_000 + 5 * whole.nbytes, most
for budget in (2 << 30, 100 << 20):
    parts, peak, _ = epoch(256, memory_budget=budget)
    assert torch.equal(parts, whole)
    # Not counted is what the loop has had: the batch, and all of them put together. A launch's
    # tables are 200 bytes an image.
    assert 72_000_000 < peak < min(budget, most) + 2 * whole.nbytes + (1 << 20), peak
    print(budget >> 20, peak >> 20, most >> 20)
try:
    epoch(256, memory_budget="64MiB")
except ValueError as error:
    assert "0.jpg" in str(error) and "68.66 MiB" in str(error) and "64 MiB" in str(error), error
    print("named")
nothing_left()
"""
)

SHORT = (
    BIG
    + """
from gpuprefetch._turns import turns
from gpuprefetch import _balance
turns[torch.device("cuda", 0)].level, _balance.OFTEN = 4, 0  # two threads decode
whole, most, repeated = epoch(48)
assert repeated == 0
gc.collect()
torch.cuda.empty_cache()
free, total = torch.cuda.mem_get_info()
reserved = torch.cuda.memory_reserved()
torch.cuda.set_per_process_memory_fraction((reserved + (110 << 20)) / total)  # for one photo
for _ in range(5):  # whether both threads want memory at once is chance
    parts, peak, repeated = epoch(48)
    levels = (parts - whole).abs().amax((1, 2, 3)) * 255  # up to 3 where the CPU decoded a photo
    assert torch.equal(parts, whole), (repeated, levels.tolist())
    assert peak < 110 << 20 < most, (peak, most)
    if repeated > 0:
        break
assert repeated > 0
print("repeated", repeated)
torch.cuda.empty_cache()
torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (40 << 20)) / total)
try:
    epoch(48)
except torch.OutOfMemoryError as error:
    assert ".jpg" in str(error) and "68.66 MiB" in str(error), error
    print("named")
nothing_left()
"""
)


@pytest.mark.gpu
@pytest.mark.parametrize(("code", "lines"), [(BUDGETED, 3), (SHORT, 2)])
def test_photos_of_24_megapixels_on_a_gpu(code, lines):
    child = test_faults.child_of(code, torch.device("cuda"))
    out, err = test_faults.ended(child, seconds=180)
    assert child.returncode == 0, err
    assert out.splitlines()[-1] == "named"
    assert len(out.splitlines()) == lines
