"""Large photos go through little memory, and what cannot go through says so with its sizes."""

import threading
import time
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pictures
import pytest
import test_faults
import torch
from fakes import decode_as_on_a_gpu, leaves, numbered
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from gpuprefetch import (
    BadImageError,
    CenterCrop,
    DataPrefetcher,
    EncodedImage,
    Resize,
    Stats,
    Views,
)
from gpuprefetch.core import epoch as _epoch
from gpuprefetch.images import decode as _decode
from gpuprefetch.images import job as _job
from gpuprefetch.images import plan as _budget
from gpuprefetch.images.decode import ImageDecoder, NvjpegDecoder
from gpuprefetch.images.encoded import Call
from gpuprefetch.images.header import decode_cpu
from gpuprefetch.images.plan import parse_bytes, readable
from gpuprefetch.insight import selfcheck as _selfcheck

SIZE = (4, 5)
SMALL = [Resize(SIZE)]
# Of pictures.draw(64, 128), and of a batch of 8 when it is finished: images and targets.
DECODED, FINISHED = 64 * 128 * 3, 8 * (3 * 4 * 5 * 4 + 8)


def photos_of(*shapes):
    return [pictures.encode_jpeg(pictures.draw(*hw, seed=i)) for i, hw in enumerate(shapes)]


@pytest.fixture(scope="module")
def files():
    return photos_of(*[(64, 128)] * 24)


class FakeDecoder(ImageDecoder):
    """Decodes on the CPU as the GPU's decoder would: into memory that has an end."""

    def __init__(self, capacity=10**9):
        self.capacity = capacity
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
                if self.live + image.nbytes > self.capacity:
                    self.refused += 1
                    raise torch.OutOfMemoryError("no memory left in the fake")
                self.live += image.nbytes
                self.peak = max(self.peak, self.live)
            weakref.finalize(image, self._free, image.nbytes)
        return images


def prefetcher_of(files, decoder, transforms=SMALL, batch_size=8, job=None, **options):
    """On the CPU with a decoder of its own, as on a GPU."""
    loader = DataLoader(numbered(files), batch_size=batch_size)
    prefetcher = DataPrefetcher(
        loader, device="cpu", transforms=transforms, cpu_share=0.0, **options
    )
    return decode_as_on_a_gpu(prefetcher, decoder, job=job, launches=False)


def images_of(prefetcher):
    return torch.cat([images for images, _ in prefetcher])


@pytest.mark.parametrize("room", [1, 3, 7, 8])
def test_a_batch_that_does_not_fit_is_decoded_in_parts(files, room):
    expected = images_of(prefetcher_of(files, FakeDecoder()))
    decoder = FakeDecoder()
    # Several take twice their room for a moment; 511 bytes the allocator's rounding may take.
    budget = FINISHED + room * (1 + (room > 1)) * DECODED + 511 * (room < 8)
    got = images_of(prefetcher_of(files, decoder, memory_budget=budget))
    assert torch.equal(got, expected)
    assert DECODED <= decoder.peak == max(decoder.calls) * DECODED <= room * DECODED
    assert len(decoder.calls) == 3 * -(-8 // room)
    assert sum(decoder.calls) == 24


MIB = 1 << 20


@pytest.mark.parametrize(
    ("megabytes", "images", "limit", "calls"),
    [(0.5, 2, None, [2]), (0.4, 256, None, [256]), (0.1, 257, None, [129, 128]),
     (0.5625, 256, None, [256]), (1, 0, None, []), (0.5625, 256, 60 * MIB, [86, 86, 84]),
     # Of photos of 12 megapixels each of the seven engines has one.
     (36, 128, None, [7] * 18 + [2]), (36, 16, None, [6, 6, 4]), (36, 3, None, [3]),
     (36, 16, 80 * MIB, [2] * 8), (72, 16, None, [3] * 5 + [1]), (144, 3, None, [1] * 3),
     (6, 256, None, [42] * 6 + [4]), (600, 3, None, [1] * 3), (36, 3, 20 * MIB, [1] * 3)],
)  # fmt: skip
def test_decode_calls_are_about_equal_and_bounded(megabytes, images, limit, calls):
    sizes = np.full((images, 2), (1, int(megabytes * MIB) // 3))
    spans = np.stack([np.arange(images), np.arange(1, images + 1)], axis=1)
    batch = SimpleNamespace(decoded=np.zeros(images, bool), errors={}, sizes=sizes, spans=spans)
    cut = _budget.sub_batches(batch, limit)
    assert [len(call) for call in cut] == calls
    assert [i for call in cut for i in call] == list(range(images))


def test_a_budget_counts_what_a_decoder_copies(files):
    costs = []
    for decoder in FakeDecoder(), PackedDecoder("cpu"):
        pipeline = prefetcher_of(files, decoder)._pipeline
        (batch,) = DataLoader(numbered(files[:8]), batch_size=8)
        costs.append(pipeline.cost(pipeline.receive(batch, 0, 0.0)[0]))
    copied, once = costs
    assert (copied.decoded, once.decoded) == (2 * 8 * DECODED, 8 * DECODED)
    assert copied.fixed == once.fixed == FINISHED


class Tensors(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.full((1 << 18,), index, dtype=torch.float32)


@pytest.mark.parametrize(
    ("transforms", "budget", "text"),
    [
        (
            SMALL,
            "512KiB",
            r"'9.jpg' of 480 x 640 pixels takes 900 KiB decoded.* memory_budget=512 KiB",
        ),
        ([Resize((64, 64))], "100 KiB", r"a batch takes 384.1 KiB .* memory_budget=100 KiB"),
        (None, "100 KiB", r"a batch takes 192.1 KiB .* a crop or a resize"),
    ],
)
def test_what_does_not_fit_is_named_with_both_sizes(files, transforms, budget, text):
    large = pictures.encode_jpeg(pictures.draw(640, 480))
    decoder, options = FakeDecoder(), {"memory_budget": budget}
    with pytest.raises(ValueError, match=text):
        list(prefetcher_of([*files[:9], large], decoder, transforms, **options))


def test_a_batch_of_tensors_that_does_not_fit():
    tensors = [torch.zeros(1000, 1000)]
    with pytest.raises(ValueError, match=r"a batch takes 3.815 MiB"):
        list(DataPrefetcher(tensors, device="cpu", memory_budget="1MiB"))


@pytest.mark.parametrize(
    ("budget", "size"),
    [
        ("2GiB", 2 << 30),
        ("512 MiB", 512 << 20),
        ("1.5KiB", 1536),
        ("2GB", 2 * 10**9),
        ("512 mb", 512 * 10**6),
        (7, 7),
        ("7B", 7),
        (None, None),
    ],
)
def test_sizes(budget, size):
    assert parse_bytes(budget) == size
    decimal = isinstance(budget, str) and budget.lower().endswith(("gb", "mb"))
    assert size is None or decimal or parse_bytes(readable(size)) == size


@pytest.mark.parametrize("budget", [0, -1, True, 1.5, "2", "GiB", "0MiB", "-1MiB"])
def test_wrong_sizes(budget):
    with pytest.raises(ValueError, match=r'such as "2GiB", .* got'):
        DataPrefetcher([], device="cpu", memory_budget=budget)


def budget_for(finished):
    """What is ready has been resampled, and the next one is decoded beside it."""
    return 16 * DECODED + int(finished * FINISHED)


@pytest.mark.usefixtures("threaded")
@pytest.mark.parametrize(
    ("ready", "depth", "budget", "kept"),
    [
        (3.0, None, None, 2),
        (1.9, None, None, 1),
        (0.1, None, None, 1),
        (0.1, 3, None, 3),
        (99, 2, budget_for(3), 2),
        (99, 2, budget_for(1.5), 1),
        (99, 2, budget_for(0.1), 1),
    ],
)
def test_batches_that_are_kept_ready(files, constants, ready, depth, budget, kept):
    constants(_epoch, READY_BYTES=int(ready * FINISHED))
    options = {"device_prefetch_size": depth, "memory_budget": budget}
    iterator = iter(prefetcher_of(files, decoder := FakeDecoder(), **options))
    deadline = time.monotonic() + 10
    while sum(decoder.calls) < 8 * kept and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)  # for one too many
    iterator.close()
    assert sum(decoder.calls) == 8 * kept


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 2])
def test_batches_at_a_time(depth):
    # One at work, one that the loop has queued after it, and what is ready or in preparation.
    before, used, sums = torch.cuda.memory_allocated(), [], []
    loader = DataLoader(Tensors(), 4, num_workers=1, pin_memory=True)
    for batch in DataPrefetcher(loader, device_prefetch_size=depth):
        torch.cuda._sleep(40_000_000)  # about 20 ms
        sums.append(batch.sum())
        used.append(round((torch.cuda.memory_allocated() - before) / 2**22))
    assert max(used) <= depth + 2
    assert [int(s) for s in sums] == [(16 * i + 6) << 18 for i in range(24)]


def test_out_of_memory_frees_what_is_decoded(files):
    # Halves alone would not do: each would be decoded beside the one before.
    expected = images_of(prefetcher_of(files, FakeDecoder()))
    decoder = FakeDecoder(capacity=2 * DECODED)
    prefetcher = prefetcher_of(files, decoder, batch_size=24)
    assert torch.equal(images_of(prefetcher), expected)
    assert decoder.peak == 2 * DECODED
    assert prefetcher.stats.out_of_memory == decoder.refused > 0


def test_no_room_for_the_result_at_first(files):
    tries = []

    class Full(_job.ImageJob):
        def begin(self, limit):
            tries.append(len(self.images))
            if len(tries) == 2:
                raise torch.OutOfMemoryError("no memory left for the result")
            return super().begin(limit)

    expected = images_of(prefetcher_of(files, FakeDecoder()))
    prefetcher = prefetcher_of(files, FakeDecoder(), job=Full)
    assert torch.equal(images_of(prefetcher), expected)
    assert tries == [8, 8, 8, 8]
    assert prefetcher.stats.out_of_memory == 1


def test_out_of_memory_for_good_is_an_error_with_its_sizes(files):
    decoder = FakeDecoder(capacity=DECODED - 1)
    prefetcher = prefetcher_of(files, decoder)
    text = r"'0.jpg' \(sample 0 of the dataset\): out of memory .* 128 x 64 pixels take 24 KiB"
    with pytest.raises(torch.OutOfMemoryError, match=text):
        list(prefetcher)
    assert decoder.calls == [8, 4, 2, 1, 1]
    decoder.capacity = 8 * DECODED
    assert decoder.live == 0
    assert len(images_of(prefetcher)) == 24  # it goes on


class PackedDecoder(ImageDecoder):
    """Decodes a call into one piece, as nvJPEG does; file by file where that fails."""

    packs, canaries, copies = True, True, 1

    def __init__(self, device):
        super().__init__(device)
        self.calls = []

    def packed(self, data, call, out, *, first=0, at=0):
        lengths, *_ = call.layout.tolist()
        self.calls.append(len(lengths))
        begin = first + call.start
        for file in data[begin : begin + sum(lengths)].split(lengths):
            picture = self([file])[0].permute(1, 2, 0).flatten()
            out[at : at + len(picture)] = picture
            at += len(picture)

    def __call__(self, data):
        if any(file[-1] != 0xD9 for file in data):
            raise RuntimeError("no end of image")
        return [decode_cpu(file).contiguous() for file in data]


def planned_batch(files, decoder, share=0.0, job=_job.ImageJob, batches=1, **options):
    """The GPU's way through a batch, with the kernel in Triton's interpreter: the last of some."""
    images = [[EncodedImage(file, i) for i, file in enumerate(files)]] * batches
    options = {"transforms": [CenterCrop(8)], "cpu_share": share, "device": "cpu"} | options
    prefetcher = DataPrefetcher(images, **options)
    if decoder is not None:
        decode_as_on_a_gpu(prefetcher, decoder, job=job)
    return list(prefetcher)[-1]


def assert_planned(files, decoder, *, levels=1, **options):
    """It gives what the CPU does, which rounds on its way."""
    expected, got = (planned_batch(files, one, **options) for one in (None, decoder))
    for view, want in zip(leaves(got), leaves(expected), strict=True):
        assert (view - want).abs().max() * 255 < levels


class Together(_job.ImageJob):
    def _decode_apart(self, call, **options):
        raise AssertionError("a Python object for each photo")


def noted(calls):
    """A job that notes the parts of a batch, and what is waited for between its decoder's calls."""

    class Noted(_job.ImageJob):
        def begin(self, limit=None):
            parts = super().begin(limit)
            calls.extend(["part"] * len(parts))
            return parts

        def _drain(self):
            calls.append("wait")

    return Noted


@pytest.fixture
def interpreted(large_tiles):
    if torch.cuda.is_available():
        pytest.skip("Triton compiles: the GPU tests do it")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("share", "calls"), [(0.5, [2]), (0.0, [3, 2])])
def test_each_group_of_a_batch_fills_its_rows(small_calls, share, calls):
    # The longest are launched first.
    files = photos_of((18, 16), (17, 17), (20, 16), (16, 16), (16, 24))
    small_calls(UPLOAD_BYTES=2 * 18 * 16 * 3, SUB_BATCH=3)
    decoder = PackedDecoder("cpu")
    assert_planned(files, decoder, share=share, job=Together)
    assert decoder.calls == calls


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("budget", "calls"), [(None, [2]), (4400, [1, 1])])
def test_each_view_has_a_launch_for_a_decode(budget, calls):
    files = photos_of((18, 16), (17, 17), (20, 16))
    views = Views([CenterCrop(8)], [Resize((6, 10)), v2.RandomInvert(0.5)])
    options = {"transforms": views, "seed": 2, "memory_budget": budget}
    decoder = PackedDecoder("cpu")
    # A worker decodes one of three.
    assert_planned(files, decoder, share=0.34, levels=1.01, **options)
    assert decoder.calls == calls


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("streams", "parts"), [(1, 2 + 2), (3, 2 + 1)])
def test_without_engines_a_batch_is_one_call(small_calls, streams, parts):
    # A second call would wait for the first one, and the batches would not run side by side. The
    # first batch tells how many streams the decoder is for.
    files, decoder = photos_of(*[(16, 17)] * 4), PackedDecoder("cpu")
    decoder.canaries = False
    decoder.streams = streams
    small_calls(UPLOAD_BYTES=400)
    job = noted(decoder.calls)
    assert_planned(files, decoder, levels=1.01, share=0.75, job=job, batches=2)
    assert decoder.calls.count("part") == parts


@pytest.mark.usefixtures("interpreted")
def test_what_cannot_be_packed_is_decoded_apart(small_calls):
    files = photos_of(*[(16, 17)] * 4)
    files[1] += b"\0\0"  # the fake's own complaint
    small_calls(SUB_BATCH=2)
    decoder = PackedDecoder("cpu")
    assert_planned(files, decoder)
    assert decoder.calls == [2, 2]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("canaries", [True, False])
def test_what_is_waited_for_before_anything_lies_there(canaries):
    files, decoder = photos_of((16, 16), (16, 16)), PackedDecoder("cpu")
    decoder.canaries = canaries
    planned_batch(files, decoder, share=0.5, job=noted(decoder.calls))
    decodes = [at for at, call in enumerate(decoder.calls) if call == 1]
    assert len(decodes) == 1
    assert all(decoder.calls[at - 1] == "wait" for at in decodes)
    # With canaries the host also waits for what the launch found.
    assert decoder.calls.count("wait") == 1 + canaries


def test_a_stream_has_the_same_place_again(monkeypatch):
    scratch = {}
    place = partial(_decode.place, device=torch.device("cpu"), scratch=scratch)
    first = place(1000)
    assert len(first) == _budget.ROOM_BYTES
    assert place(5) is place(_budget.ROOM_BYTES) is first
    photo = _budget.in_rooms(_budget.WHOLE_BATCH_BYTES + _budget.UPLOAD_BYTES) + 1
    assert len(place(photo)) == photo  # of one image, which is not kept
    assert place(5) is first
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    scratch.clear()  # as where memory is short
    room = _budget.ROOM_BYTES
    assert [len(place(n)) for n in (room, room + 1, 2 * room, 100)] == [room, *3 * [2 * room]]
    assert emptied == [True]  # the smaller place was given back
    assert len(place(1000, scratch=None)) == 1000


class Wordless(ImageDecoder):
    """Fails as TorchCodec does: without a type, and with torch 2.11 without words."""

    def packed(self, *args, **options):
        raise RuntimeError("API call failed")

    def __call__(self, data):
        raise RuntimeError("API call failed")


def test_an_error_without_words_is_of_a_bad_file_where_there_is_room():
    files = photos_of(*[(16, 24)] * 2)
    pipeline = prefetcher_of(files, FakeDecoder())._pipeline
    images = pipeline.receive([*map(EncodedImage, files)], 0, 0.0)[0]
    both, cpu = images.call(np.array([0, 1])), torch.device("cpu")
    out, stats = torch.empty(both.size, dtype=torch.uint8), Stats()
    assert not _decode.decode_packed(Wordless(cpu), images, both, out, 0)
    for image in _decode.decode_part(Wordless(cpu), images, both, cpu, stats):
        assert image.shape == (3, 16, 24)  # a second opinion
    with pytest.raises(RuntimeError, match="not linked with support for xla"):
        # Nothing can be copied to a broken device: no file is bad.
        _decode.decode_part(Wordless(cpu), images, both, torch.device("xla"), stats)
    assert images.errors == {}


@pytest.mark.gpu
def test_an_error_without_words_is_a_shortage_where_there_is_no_room():
    device, files = torch.device("cuda", 0), photos_of(*[(16, 24)] * 2)
    pipeline = prefetcher_of(files, FakeDecoder())._pipeline
    images = pipeline.receive([*map(EncodedImage, files)], 0, 0.0)[0]
    lengths = [len(file) for file in files]
    huge = Call(np.array([0, 1]), 0, np.array([lengths, 2 * [1 << 22], 2 * [1 << 22]]))
    out = torch.empty(1, dtype=torch.uint8, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        _decode.decode_packed(Wordless(device), images, huge, out, 0)
    with pytest.raises(torch.OutOfMemoryError):
        _decode.decode_part(Wordless(device), images, huge, device, Stats())
    assert images.errors == {}


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
def test_what_the_decoder_does_not_take_gets_a_second_opinion(files, error):
    marked = [*files[:3], pictures.insert_segment(files[3], 0xFE, b"a mark"), *files[4:8]]
    expected = images_of(prefetcher_of(files[:8], FakeDecoder()))
    got = images_of(prefetcher_of(marked, Refusing(b"a mark", error)))
    assert torch.equal(got, expected)


def test_photos_that_the_decoder_does_not_take_are_counted_and_told_about(files):
    broken = [files[1][:400] + b"\xff\xd8" * 20 + files[1][440:], *files]
    decoder = Refusing(b"\xff\xd8", RuntimeError("built for the CPU\nat ..."))
    prefetcher = prefetcher_of(broken, decoder, on_error="skip")
    text = r"not take 11 of 15 photos.* reason: built for the CPU. If"
    with pytest.warns(UserWarning, match=text):
        got = images_of(prefetcher)
    assert torch.equal(got, images_of(prefetcher_of(files, FakeDecoder())))
    assert (prefetcher.stats.fallback_images, prefetcher.stats.bad_images) == (24, 1)
    prefetcher.stats.reset()
    images_of(prefetcher)  # it is told once
    assert prefetcher.stats.fallback_images == 24


def test_a_few_photos_that_the_decoder_does_not_take_are_no_news():
    stats = Stats(gpu_images=10_000)
    for _ in range(100):
        stats.fell_back("unsupported")
    with pytest.warns(UserWarning, match="101 of 10000"):
        stats.fell_back("unsupported")


def test_a_bad_file_is_found_in_parts_too(files):
    damaged = files[1][:400] + b"\xff\xd8" * 20 + files[1][440:]
    decoder = Refusing(b"\xff\xd8" * 20, RuntimeError("damaged"))
    some, budget = [files[0], damaged, *files[2:8]], FINISHED + 2 * DECODED
    with pytest.raises(BadImageError, match=r"'1\.jpg'"):
        list(prefetcher_of(some, decoder, memory_budget=budget))
    skipping = prefetcher_of(some, decoder, memory_budget=budget, on_error="skip")
    good = images_of(prefetcher_of(files[:8], FakeDecoder()))
    assert torch.equal(images_of(skipping), torch.cat([good[:1], good[2:]]))


class Late(NvjpegDecoder):
    """Keeps the stream busy after each call, so that the launch reads late what was decoded."""

    def packed(self, *arguments, **options):
        super().packed(*arguments, **options)
        # 40 ms: the next part is decoded well within them, with other tests on the GPU, too.
        torch.cuda._sleep(80_000_000)


def late_epoch(files, job=_job.ImageJob, decoder=NvjpegDecoder, **options):
    loader = DataLoader(numbered(files), batch_size=8, pin_memory=True)
    transforms = [Resize((256, 384))]
    prefetcher = DataPrefetcher(loader, transforms=transforms, cpu_share=0.0, **options)
    return images_of(decode_as_on_a_gpu(prefetcher, decoder(torch.device("cuda", 0)), job=job))


@pytest.mark.gpu
@pytest.mark.parametrize("job", [_job.ImageJob, _selfcheck._CarelessJob])
def test_a_part_waits_for_the_reader_of_the_one_before(job):
    files = photos_of(*[(512, 768)] * 8)
    expected = late_epoch(files)
    # The result takes 9, a photo 1.1: eight parts, four on each of two streams.
    got = late_epoch(files, job, Late, memory_budget="11MiB")
    # Without waiting, parts really are overwritten.
    assert torch.equal(got, expected) == (job is _job.ImageJob)


class Apart(_job.ImageJob):
    def _packs(self, call):
        return False


@pytest.mark.gpu
def test_good_photos_are_decoded_without_a_python_object_each():
    files = photos_of(*[(200 + i, 300) for i in range(24)])
    assert torch.equal(late_epoch(files, Together), late_epoch(files, Apart))


BIG = """
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

BUDGETED = """
# A call has seven photos; the peak does not follow the batch of 17 GiB.
whole, most, _ = epoch(256)
assert most < 8 * 72_000_000 + 5 * whole.nbytes, most
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

SHORT = """
whole, most, repeated = epoch(48)
assert repeated == 0
gc.collect()
torch.cuda.empty_cache()
free, total = torch.cuda.mem_get_info()
reserved = torch.cuda.memory_reserved()
torch.cuda.set_per_process_memory_fraction((reserved + (110 << 20)) / total)  # for one photo
parts, peak, repeated = epoch(48)
levels = (parts - whole).abs().amax((1, 2, 3)) * 255  # up to 3 where the CPU decoded a photo
assert torch.equal(parts, whole), (repeated, levels.tolist())
assert peak < 110 << 20, peak
torch.cuda.empty_cache()
torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (40 << 20)) / total)
try:
    epoch(48)
except torch.OutOfMemoryError as error:
    assert ".jpg" in str(error) and "68.66 MiB" in str(error), error
    print("named")
nothing_left()
"""


@pytest.mark.gpu
@pytest.mark.parametrize(("code", "lines"), [(BUDGETED, 3), (SHORT, 1)])
def test_photos_of_24_megapixels_on_a_gpu(code, lines):
    printed = test_faults.run(BIG + code, torch.device("cuda"), seconds=180).splitlines()
    assert printed[-1] == "named"
    assert len(printed) == lines
