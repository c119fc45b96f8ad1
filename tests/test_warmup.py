"""What a process's first batch needs is made side by side, ahead of it, and once."""

import contextlib
import ctypes
import importlib
import multiprocessing
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from fakes import threads, until
from pictures import draw, encode, encode_jpeg
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from gpuprefetch import (
    CenterCrop,
    DataPrefetcher,
    EncodedImage,
    EncodedImageFolder,
    RandomResizedCrop,
    Resize,
    accelerate,
)
from gpuprefetch.images.decode import NvjpegDecoder
from gpuprefetch.images.nvjpeg import library as real_library
from gpuprefetch.images.warmup import expects_photos, warm_up
from gpuprefetch.transforms.head import Head
from gpuprefetch.transforms.launch import load_triton

CPU = torch.device("cpu")
SECONDS = 0.3  # that each of the two needs here
HEAD = Head().then(RandomResizedCrop(8).op, "RandomResizedCrop")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton compiles: it is for a GPU's memory"
)


class Spans:
    """When each of some steps began and ended, and in which thread."""

    def __init__(self):
        self.all = {}

    @contextlib.contextmanager
    def note(self, name):
        began = time.perf_counter()
        yield
        self.all.setdefault(name, []).append((began, time.perf_counter(), threading.get_ident()))

    def seconds_together(self, one, other):
        """How long the first of one and the first of the other went on at a time."""
        (began, ended, _), (other_began, other_ended, _) = self.all[one][0], self.all[other][0]
        return min(ended, other_ended) - max(began, other_began)


@pytest.fixture
def spans():
    return Spans()


@pytest.fixture
def slow_nvjpeg(library, spans, request):
    """nvJPEG's first decoder needs a while, in C. ``ctypes.PyDLL`` would hold the GIL meanwhile."""
    kind = getattr(request, "param", ctypes.CDLL)
    create = library.CreateEx

    def slow(*arguments):
        with spans.note("nvjpeg"):
            kind(None).usleep(int(SECONDS * 1e6))
        return create(*arguments)

    library.CreateEx = slow
    return library


@pytest.fixture
def noted_triton(monkeypatch, spans, request):
    """Triton's first kernel; by a parameter it needs steps that each need the GIL."""
    from triton.runtime.jit import KernelInterface

    def compile(kernel, *arguments, grid, **options):
        name = "again" if "triton" in spans.all else "triton"
        steps = getattr(request, "param", 0) if name == "triton" else 0
        with spans.note(name):
            for _ in range(steps):
                time.sleep(SECONDS / steps)

    monkeypatch.setattr(KernelInterface, "warmup", compile)


slow_triton = pytest.mark.parametrize("noted_triton", [100], indirect=True, ids=["slow"])


@slow_triton
@pytest.mark.usefixtures("noted_triton")
def test_both_are_made_side_by_side(slow_nvjpeg, spans):
    began = time.perf_counter()
    warm_up(CPU, NvjpegDecoder(CPU), [HEAD])
    took = time.perf_counter() - began
    assert spans.seconds_together("nvjpeg", "triton") > SECONDS / 2
    assert took >= SECONDS  # both were waited for
    assert spans.all["nvjpeg"][0][2] == threading.get_ident()
    assert slow_nvjpeg.log.count("nvjpegCreateEx") == 1


@slow_triton
@pytest.mark.usefixtures("slow_nvjpeg", "noted_triton")
def test_one_after_the_other_needs_the_sum():
    # Guards the test above.
    began = time.perf_counter()
    NvjpegDecoder(CPU).warm_up()
    load_triton()
    assert time.perf_counter() - began >= 2 * SECONDS


@pytest.mark.parametrize("slow_nvjpeg", [ctypes.PyDLL], indirect=True)
@slow_triton
@pytest.mark.usefixtures("slow_nvjpeg", "noted_triton")
def test_a_call_that_holds_the_gil_needs_the_sum():
    # Guards the test after it: nvJPEG is called as a ctypes.CDLL, which releases the GIL.
    began = time.perf_counter()
    warm_up(CPU, NvjpegDecoder(CPU), [HEAD])
    assert time.perf_counter() - began > 1.8 * SECONDS


def test_nvjpeg_is_loaded_as_a_library_whose_calls_release_the_gil(monkeypatch):
    importlib.import_module("torchcodec.decoders")
    load = Mock()
    maps = "7f00-7f01 r-xp 0 0:0 0 /lib/libnvjpeg.so.13\n"
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=[maps]))
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert real_library.__wrapped__() is load.return_value
    load.assert_called_once_with("/lib/libnvjpeg.so.13")


class Files(Dataset):
    """Encoded images of a class that nobody knows."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return len(self.folder)

    def __getitem__(self, index):
        return self.folder[index]


@pytest.fixture
def folder(tmp_path):
    """Four photos, in a folder of the test's own."""
    (tmp_path / "a").mkdir()
    for number in range(4):
        photo = encode_jpeg(draw(16 + number, 16, seed=number))
        (tmp_path / "a" / f"{number}.JPG").write_bytes(photo)
    return EncodedImageFolder(tmp_path)


def folder_of_pngs(root):
    (root / "a").mkdir()
    for number in range(4):
        (root / "a" / f"{number}.png").write_bytes(encode(draw(16, 16, seed=number), "PNG"))
    return root


def on_gpu(dataset, **options):
    """A prefetcher that has a decoder, as on a GPU; its launches run in Triton's interpreter."""
    loading = {"batch_size": 2, "num_workers": 1}
    names = [*loading, "worker_init_fn", "collate_fn"]
    loading |= {name: options.pop(name) for name in names if name in options}
    options = {"transforms": [RandomResizedCrop(8)], "cpu_share": 0.0} | options
    loader = DataLoader(dataset, **loading)
    return DataPrefetcher(loader, device="cpu", decoder=NvjpegDecoder(CPU), **options)


@pytest.mark.forks("the worker waits for an event of this process")
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.usefixtures("large_tiles", "threaded")
def test_a_folder_is_prepared_for_while_its_workers_begin(library, folder, known):
    made = multiprocessing.Event()
    seen = multiprocessing.Value("b", False)
    create = library.CreateEx

    def note(*arguments):
        made.set()
        return create(*arguments)

    def begin(worker):
        seen.value = made.wait(20 if known else SECONDS)

    library.CreateEx = note
    dataset = folder if known else Files(folder)
    assert len(list(on_gpu(dataset, worker_init_fn=begin))) == 2
    assert made.is_set()
    assert bool(seen.value) is known  # of another dataset nothing is known before its first batch
    assert not threads()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.usefixtures("large_tiles", "threaded", "noted_triton")
def test_training_and_validation_prepare_once(library, folder, spans, workers):
    options = {"batch_size": 4, "num_workers": workers}
    training = on_gpu(folder, **options)
    validation = on_gpu(folder, transforms=[CenterCrop(8)], **options)
    for loader in (training, validation):
        assert [len(images) for images, _ in loader] == [4]
    assert library.log.count("nvjpegCreateEx") == 1
    assert {name: len(found) for name, found in spans.all.items()} == {"triton": 1, "again": 1}


@slow_triton
@pytest.mark.usefixtures("slow_nvjpeg", "noted_triton")
def test_threads_that_begin_at_once_prepare_once(spans, library):
    ended = []

    def run():
        warm_up(CPU, NvjpegDecoder(CPU), [HEAD])
        ended.append(time.perf_counter())

    begun = [threading.Thread(target=run) for _ in range(3)]
    for thread in begun:
        thread.start()
    for thread in begun:
        thread.join()
    assert library.log.count("nvjpegCreateEx") == 1
    assert len(spans.all["triton"]) == 1
    assert min(ended) > max(spans.all["nvjpeg"][0][1], spans.all["triton"][0][1])


@pytest.mark.usefixtures("noted_triton", "threaded", "large_tiles")
@pytest.mark.parametrize("what", ["tensors", "pngs", "share", "decoder"])
def test_who_needs_no_nvjpeg_pays_nothing(library, spans, folder, tmp_path_factory, what):
    if what == "tensors":
        made = on_gpu([torch.rand(3, 9, 9) for _ in range(4)])
    elif what == "pngs":
        made = on_gpu(EncodedImageFolder(folder_of_pngs(tmp_path_factory.mktemp("pngs"))))
    elif what == "share":
        made = on_gpu(folder, cpu_share=1.0)
    else:
        made = DataPrefetcher(DataLoader(folder, 2), device="cpu", transforms=[CenterCrop(8)])
    assert len(list(made)) >= 2
    assert library.log == []
    assert spans.all == {}  # and nothing is launched on a CPU


@pytest.mark.usefixtures("threaded", "large_tiles")
@pytest.mark.parametrize("known", [True, False])
def test_an_error_is_that_of_the_first_batch(library, folder, known):
    prefetcher = on_gpu(folder if known else Files(folder))
    library.status = {"nvjpegCreateEx": 7}
    with pytest.raises(RuntimeError, match=r'CreateEx: no JPEG engines .*"cpu" the') as caught:
        list(prefetcher)
    assert any("prepared batch 0" in note for note in caught.value.__notes__)
    library.status = {}
    assert len(list(prefetcher)) == 2  # nothing that failed was kept


@pytest.mark.usefixtures("threaded", "large_tiles", "library")
def test_triton_that_fails_ahead_of_time_fails_where_it_launches(folder, monkeypatch):
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run
    broken = []

    def fail(kernel, *arguments, grid, warmup, **options):
        if broken:
            raise RuntimeError("no compiler" if warmup else "no compiler at the launch")
        return run(kernel, *arguments, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(InterpretedFunction, "run", fail)
    broken.append(True)
    with pytest.raises(RuntimeError, match="no compiler at the launch"):
        list(on_gpu(folder))


@slow_triton
@pytest.mark.usefixtures("threaded", "slow_nvjpeg", "noted_triton")
def test_a_loop_that_ends_before_its_first_batch_leaves_no_thread(folder):
    batches = iter(on_gpu(folder))
    until(lambda: any(thread.name == "gpuprefetch-warmup" for thread in threading.enumerate()))
    batches.close()
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"gpuprefetch", "gpuprefetch-warmup"}


class NoWorkers(DataLoader):
    def __iter__(self):
        raise ValueError("no workers today")


@pytest.mark.usefixtures("threaded")
def test_an_epoch_that_cannot_begin_makes_nothing(library, folder):
    loader = NoWorkers(folder, batch_size=2, num_workers=1)
    prefetcher = DataPrefetcher(loader, device="cpu", decoder=NvjpegDecoder(CPU))
    with pytest.raises(ValueError, match="no workers today"):
        iter(prefetcher)
    assert library.log == []
    assert not threads()


def recorded(monkeypatch):
    """The calls of the kernel that resamples: whether it was a warm-up, arguments, options."""
    from triton.runtime.interpreter import InterpretedFunction

    calls = []
    run = InterpretedFunction.run

    def record(kernel, *arguments, grid, warmup, **options):
        if kernel.__name__ == "resample_kernel":
            calls.append((warmup, arguments, options))
        return run(kernel, *arguments, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(InterpretedFunction, "run", record)
    return calls


def specialized(arguments):
    """By what Triton tells kernels apart: classes, alignment, 0 and 1, and the width of numbers."""
    address, table, _, out, *numbers, survived, _ = arguments
    aligned = [value % 16 for value in (address, table, survived)]
    return aligned, (out.dtype, out.data_ptr() % 16), numbers, bool(survived)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.float16, "memory_format": torch.channels_last},
        {"transforms": [Resize(12), CenterCrop(8), v2.Normalize(3 * [0.5], 3 * [0.2])]},
        {"engines": False},
    ],
)
@pytest.mark.usefixtures("large_tiles")
def test_the_kernel_that_is_compiled_is_the_one_that_is_launched(
    library, folder, monkeypatch, options
):
    library.engines = options.pop("engines", True)
    calls = recorded(monkeypatch)
    list(on_gpu(folder, num_workers=0, **options))
    (ahead, arguments, constants), *launches = calls
    assert ahead
    assert len(launches) == 2
    for warmup, launched, options in launches:
        assert not warmup
        assert options == constants
        assert specialized(launched) == specialized(arguments)


@pytest.mark.usefixtures("large_tiles")
def test_without_another_thread_triton_waits_for_its_launch(library, folder, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert len(list(on_gpu(folder, num_workers=0))) == 2
    assert library.log.count("nvjpegCreateEx") == 1


def test_which_loaders_surely_have_photos(folder, tmp_path_factory):
    pngs = EncodedImageFolder(folder_of_pngs(tmp_path_factory.mktemp("pngs")))
    images = ImageFolder(folder.root, v2.Compose([v2.RandomResizedCrop(8), v2.ToImage()]))
    expects = {
        "folder": folder,
        "subset": Subset(folder, [1, 2]),
        "both": ConcatDataset([pngs, folder]),
        "pngs": pngs,
        "files": Files(folder),
        "tensors": [torch.zeros(1)],
        "images": [(EncodedImage(b""), 0)],
    }
    found = {name for name, data in expects.items() if expects_photos(DataLoader(data))}
    assert found == {"folder", "subset"}
    assert expects_photos(accelerate(DataLoader(images), device="cpu").wrapped)
    assert not expects_photos([[EncodedImage(b"")]])
