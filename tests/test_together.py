"""Batches that the loader has already are decoded in one call; each is as if it were alone."""

import gc
import io
import time
import weakref

import numpy as np
import pytest
import torch
from conftest import draw_photo
from PIL import Image
from torchvision.transforms import v2

from gpuprefetch import BadImageError, DataPrefetcher, EncodedImage, RandomResizedCrop
from gpuprefetch.images import stage
from gpuprefetch.images.decode import ImageDecoder, NvjpegDecoder
from gpuprefetch.images.header import decode_cpu
from gpuprefetch.transforms import launch

BATCHES = 7  # of one small image each: Triton's interpreter is slow, and slower for more pixels


@pytest.fixture(autouse=True)
def as_on_a_gpu(request, large_tiles, constants):
    """Batches are prepared ahead of the loop, and four of them are one call."""
    if request.node.get_closest_marker("gpu"):
        return
    if torch.cuda.is_available():
        pytest.skip("Triton compiles: the GPU's tests do it")
    request.getfixturevalue("threaded")
    constants(stage, SUB_BATCH=4)
    constants(launch, ROWS=16)


class Joining(ImageDecoder):
    """Decodes on the CPU, and notes how many batches each call has.

    Args:
        joins: whether it is given several batches at a time.
        fault: called with each file; what it raises is raised.
        skips: the bytes of a file that calls of several batches leave out without a word.
        streams: calls that are best decoded side by side.
    """

    canaries = True

    def __init__(self, *, joins=True, fault=lambda file: None, skips=b"", streams=1):
        super().__init__(torch.device("cpu"))
        self.joins = joins
        self.fault = fault
        self.skips = skips
        self.streams = streams
        self.calls = []

    def decode(self, call, buffer, out):
        self.decode_together([(call, buffer, out)])

    def decode_together(self, orders):
        self.calls.append(len(orders))
        for call, buffer, out in orders:
            for file, picture in zip(call.files(buffer), call.pictures(out), strict=True):
                data = bytes(file.numpy())
                self.fault(data)
                if len(orders) == 1 or data != self.skips:
                    picture.copy_(decode_cpu(file))


def refuse(data):
    """A fault: the decoder refuses this file."""

    def check(file):
        if file == data:
            raise RuntimeError("this file is not for this decoder")

    return check


@pytest.fixture(scope="module")
def files():
    """16 JPEGs of different sizes, none too small for a GPU to decode."""
    made = []
    for i in range(16):
        file = io.BytesIO()
        Image.fromarray(draw_photo(16 + i % 4, 16 + i // 4, seed=i)).save(file, "JPEG")
        made.append(file.getvalue())
    return made


def batches_of(files, batch=1, count=BATCHES, **instead):
    """A loader whose batches are all there; ``instead`` has other bytes for some images."""
    others = {int(name[1:]): data for name, data in instead.items()}
    return [
        (
            [
                EncodedImage(others.get(i, files[i % len(files)]), i)
                for i in range(number * batch, (number + 1) * batch)
            ],
            torch.arange(number * batch, (number + 1) * batch),
        )
        for number in range(count)
    ]


class Workers(list):
    """Batches that are there, of a loader that says it has workers: an epoch gets its thread."""

    num_workers = 1


def prefetcher_of(loader, decoder, **options):
    options = {"transforms": [RandomResizedCrop(16)], "seed": 3, "cpu_share": 0.0} | options
    return DataPrefetcher(loader, device="cpu", decoder=decoder, **options)


def run(loader, decoder, **options):
    """All batches, and the prefetcher."""
    prefetcher = prefetcher_of(loader, decoder, **options)
    return [(images.clone(), targets) for images, targets in prefetcher], prefetcher


def assert_same(first, second):
    assert len(first) == len(second)
    for (images, targets), (others, other_targets) in zip(first, second, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(targets, other_targets)


# --- What is compared: each batch decoded by a call of its own ---

_ALONE = []


def alone(files):
    """The batches of a loader with the fused transforms, made once."""
    if not _ALONE:
        _ALONE.extend(run(batches_of(files), Joining(joins=False))[0])
    return _ALONE


def assert_close(first, second):
    """Pictures that are resampled apart, by the twin here, have a crop of uint8: half a level."""
    for (images, _), (others, _) in zip(first, second, strict=True):
        torch.testing.assert_close(images, others, atol=0.51 / 255, rtol=0)


LISTS = {
    "fused": [RandomResizedCrop(16)],
    "policy": [RandomResizedCrop(16), v2.RandomHorizontalFlip(), v2.RandAugment()],
}


@pytest.mark.parametrize("transforms", LISTS)
def test_results_order_and_draws_are_those_of_single_batches(files, transforms):
    together = Joining()
    loader = batches_of(files)
    one = alone(files)
    if transforms != "fused":
        one, _ = run(loader, Joining(joins=False), transforms=LISTS[transforms])
    several, _ = run(loader, together, transforms=LISTS[transforms])
    assert_same(several, one)
    assert together.calls == [1, 2, 4]


@pytest.mark.parametrize("streams", [1, 3])
def test_calls_grow_from_one_batch_to_what_one_call_holds(files, streams):
    decoder = Joining(streams=streams)
    several, _ = run(batches_of(files, count=8), decoder)
    assert decoder.calls == [1, 2, 4, 1]
    assert_same(several[:BATCHES], alone(files))


def test_no_more_than_eight_batches_are_one_call(files, constants):
    constants(stage, SUB_BATCH=100)
    decoder = Joining()
    run(batches_of(files, count=15), decoder)
    assert decoder.calls == [1, 2, 4, 8]


def test_a_large_batch_is_a_call_of_its_own(files):
    decoder = Joining()
    run(batches_of(files, batch=3, count=2), decoder)
    assert decoder.calls == [1, 1]


@pytest.mark.parametrize(("depth", "calls"), [(2, [1] * 4), (3, [1] * 4), (4, [1, 2, 1])])
def test_no_more_are_ready_than_the_user_says(files, depth, calls):
    decoder = Joining()
    run(batches_of(files, count=4), decoder, device_prefetch_size=depth)
    assert decoder.calls == calls


def test_a_memory_budget_is_for_one_batch_at_a_time(files):
    decoder = Joining()
    run(batches_of(files, count=4), decoder, memory_budget="1MB")
    assert set(decoder.calls) == {1}


def test_a_file_that_the_decoder_refuses(files):
    several, prefetcher = run(batches_of(files), Joining(fault=refuse(files[5])))
    assert_close(several, alone(files))
    assert prefetcher.stats.fallback_images == 1


def test_too_little_memory_for_all_of_them(files):
    def full(file):
        if decoder.calls[-1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    decoder = Joining(fault=full)
    several, _ = run(batches_of(files), decoder)
    assert_same(several, alone(files))
    assert decoder.calls == [1, 2, 1, 1, 4, 1, 1, 1, 1]


def test_an_error_is_that_of_its_batch(files):
    loader = batches_of(files, i4=b"no picture")  # with which 3, 5 and 6 are decoded
    prefetcher = prefetcher_of(loader, Joining())
    seen = []
    with pytest.raises(BadImageError, match="4") as caught:
        for images, _ in prefetcher:
            seen.append(images)
    assert len(seen) == 4
    assert "while it prepared batch 4" in "\n".join(caught.value.__notes__)


def test_an_error_of_a_transform_is_that_of_its_batch(files):
    def check(images):
        numbers.append(len(numbers))
        if len(numbers) == 5:
            raise ValueError("the fifth batch")
        return images

    numbers = []
    prefetcher = prefetcher_of(
        batches_of(files), Joining(), transforms=[RandomResizedCrop(16), check]
    )
    seen = []
    with pytest.raises(ValueError, match="the fifth batch"):
        for images, _ in prefetcher:
            seen.append(images)
    assert len(seen) == 4


def test_an_epoch_that_has_failed_keeps_no_batch_of_its_last_call(files):
    class Noting(Joining):
        def decode_together(self, orders):
            super().decode_together(orders)
            seen.extend(weakref.ref(call.order) for call, _, _ in orders)

    def check(images):
        if len(seen) == 7:  # the last call has four batches, and this is the first of them
            raise ValueError("the fourth batch")
        return images

    seen = []
    batches = iter(
        prefetcher_of(batches_of(files), Noting(), transforms=[RandomResizedCrop(16), check])
    )
    with pytest.raises(ValueError, match="the fourth batch"):
        while True:
            next(batches)
    gc.collect()
    assert all(order() is None for order in seen)


def test_bad_files_are_left_out_of_their_batch(files):
    loader = batches_of(files, batch=2, count=3, i4=b"no picture")
    several, prefetcher = run(loader, Joining(), on_error="skip")
    assert torch.cat([targets for _, targets in several]).tolist() == [0, 1, 2, 3, 5]
    assert [len(images) for images, _ in several] == [2, 2, 1]
    assert len(prefetcher.bad_images) == 1


def test_a_picture_that_is_skipped_is_decoded_once_more(files):
    several, prefetcher = run(batches_of(files), Joining(skips=files[5]))
    assert_close(several, alone(files))
    assert prefetcher.stats.missed_images == 1


def test_batches_of_other_things_are_prepared_alone(files):
    loader = batches_of(files)
    loader[4] = (torch.zeros(1, 3, 16, 16), torch.zeros(1))
    several, _ = run(loader, Joining())
    assert_same(several[:4] + several[5:], alone(files)[:4] + alone(files)[5:])


def test_tensors_are_not_made_ready_in_advance(files):
    """Nothing is gained by more of them, and they need memory."""
    asked = []

    class Numbers:
        def __iter__(self):
            for number in range(12):
                asked.append(number)
                yield torch.full((1, 3, 16, 16), float(number))

    iterator = iter(prefetcher_of(Numbers(), Joining(), transforms=[]))
    next(iterator)
    time.sleep(0.2)
    assert len(asked) <= 4  # the loop's, two that are ready, and one that waits for room
    iterator.close()


def test_a_loop_that_ends_early(files):
    decoder = Joining()
    prefetcher = prefetcher_of(batches_of(files, count=4), decoder)
    for number, _ in enumerate(prefetcher):
        if number == 1:
            break
    assert len([*prefetcher]) == 4


class Noted(NvjpegDecoder):
    """Notes how many batches each call of nvJPEG has."""

    def __init__(self):
        super().__init__(torch.device("cuda", 0))
        self.calls = []

    def decode_together(self, orders):
        self.calls.append(len(orders))
        super().decode_together(orders)


@pytest.mark.gpu
@pytest.mark.parametrize("transforms", LISTS)
def test_a_gpu_decodes_batches_together(files, transforms):
    def run_on_gpu(**options):
        decoder = Noted()
        loader = Workers(batches_of(files, batch=32, count=12))
        options = {"transforms": LISTS[transforms], "seed": 3, "cpu_share": 0.0} | options
        prefetcher = DataPrefetcher(loader, decoder=decoder, **options)
        found = [(images.cpu(), targets.cpu()) for images, targets in prefetcher]
        assert not prefetcher.stats.fallback_images
        return found, decoder

    together, several = run_on_gpu()
    alone, one = run_on_gpu(device_prefetch_size=2)
    assert_same(together, alone)
    assert set(one.calls) == {1}
    assert sum(several.calls) == 12 and (max(several.calls) > 1) == several.joins


def test_orders_are_joined_by_their_parts():
    from gpuprefetch.images.nvjpeg import joined, order_for

    first = order_for(np.array([(0, 90), (100, 250)]), np.array([(2, 4), (3, 5)]))
    second = order_for(np.array([(7, 70)]), np.array([(6, 8)]))
    spans = np.array([(0, 90), (100, 250), (7, 70)])
    both = order_for(spans, np.array([(2, 4), (3, 5), (6, 8)]))
    both[6 + 2 * 8] = 0  # the third picture begins where that of its own order does
    assert joined([first, second]).tolist() == both.tolist()
    assert joined([first]) is first
