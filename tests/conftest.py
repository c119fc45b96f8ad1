"""Devices the tests run on, and JPEG files drawn for them."""

import contextlib
import functools
import gc
import multiprocessing
import os
import sys
import time
import types
from collections import Counter
from pathlib import Path

import huge_pages
import interpreter
import pytest

FROZEN = pytest.StashKey[int]()  # how many modules the garbage collector need not look through
MANY_MODULES = 50
COLLAPSED = pytest.StashKey[float]()  # this process's CPU time when its memory was collapsed
COLLAPSE_SECONDS = 1.0  # of CPU time between two of them, which cost 30 ms

# Test files that take longest: pytest -n begins with them, so that its processes end together.
LONGEST = "edges frameworks benchmarks differential faults doctor resume file_tensors joint"
LONGEST += " accelerate sources samples prefetcher resample structure policy replay datasets epoch"


def pytest_configure(config):
    if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
        # The processes of pytest -n share the cores. It holds for what they start as well.
        threads = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        os.environ.setdefault("OMP_NUM_THREADS", str(max(threads, 1)))
    # On a GPU runner a missing device must fail the run, not skip its way to green.
    if os.environ.get("GPUPREFETCH_REQUIRE_CUDA") and not has_cuda():
        raise pytest.UsageError("GPUPREFETCH_REQUIRE_CUDA is set but no CUDA device is visible")
    if getattr(config.option, "dist", "no") != "no":
        os.environ.setdefault("GLIBC_TUNABLES", huge_pages.GLIBC_TUNABLES)
        return  # those processes run the tests: this one need not import torch
    if method := os.environ.get("GPUPREFETCH_START_METHOD"):  # of workers: see CONTRIBUTING.md
        multiprocessing.set_start_method(method, force=True)
        # A new worker would import these for seconds.
        multiprocessing.set_forkserver_preload(["torch", "torchvision", "torchcodec.decoders"])
    gc.disable()  # whatever is imported stays, and looking through it takes a quarter of the time
    import torch

    # A worker that misses the end of its loader looks for it this often; on a busy machine some do.
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 1.0
    if not has_cuda():
        # Read by @triton.jit when a kernel module is imported, so it is set before gpuprefetch is.
        os.environ["TRITON_INTERPRET"] = "1"
        with contextlib.suppress(ImportError):  # CPU builds of torch come without Triton
            interpreter.look_once_a_launch()
            interpreter.look_for_overflow_in_debug_alone()
            interpreter.remember_types()
        forget_who_seeds()
        # Of the tests' small pictures more threads would share little and wait for each other.
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def forget_who_seeds():
    """Have ``torch.manual_seed()``, which each worker calls, format no stacks.

    torch keeps three for errors of devices that it starts later. Pytest's stacks are deep, and a
    worker reads all their files for the first one: 2 to 5 ms.
    """
    import torch

    no_stacks = types.SimpleNamespace(format_stack=list)
    for device in (torch.cuda, torch.mtia, torch.xpu):
        device.traceback = no_stacks


def has_cuda():
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Of the whole suite each process runs whole files.

    What their tests share, and what they import, is made in one process and not in each: that saves
    a tenth of the CPU time.
    """
    if config.getoption("dist") != "load" or config.args_source != config.ArgsSource.TESTPATHS:
        return None  # of a few files each process runs some tests
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # they come in their own order
    return LoadFileScheduling(config, log)


def longest_first(items):
    """Sort by file: the longest first, then those with most tests."""
    counts = Counter(item.path.stem for item in items)
    ranks = {f"test_{name}": rank for rank, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: (ranks.get(item.path.stem, len(ranks)), -counts[item.path.stem]))


def pytest_collection_modifyitems(config, items):
    reasons = {} if has_cuda() else {"gpu": "needs a CUDA device"}
    if hasattr(config, "workerinput"):  # one of the processes of pytest -n
        longest_first(items)
        reasons["alone"] = "needs a GPU to itself: run pytest without -n"
    method = multiprocessing.get_start_method()
    for item in items:
        if method != "fork" and (forks := item.get_closest_marker("forks")):
            item.add_marker(pytest.mark.skip(reason=f"workers are forked here: {forks.args[0]}"))
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session):
    # Many tests collect garbage, and would look through all of what has been imported each time.
    gc.freeze()
    gc.enable()
    session.config.stash[FROZEN] = len(sys.modules)
    huge_pages.collapse()
    session.config.stash[COLLAPSED] = time.process_time()
    # Python goes by what is not frozen: it would look through all of that more often than before,
    # and in whatever thread.
    gc.set_threshold(*gc.get_threshold()[:2], 1000)


@pytest.hookimpl(trylast=True)  # after the end of what the test has used
def pytest_runtest_teardown(item):
    # A test may have imported another framework, which stays as well.
    if len(sys.modules) > item.config.stash[FROZEN] + MANY_MODULES:
        gc.collect()
        gc.freeze()
        item.config.stash[FROZEN] = len(sys.modules)
    # A write beside a fork splits a huge page: at the end of a run a fork cost twice as much.
    if time.process_time() > item.config.stash[COLLAPSED] + COLLAPSE_SECONDS:
        huge_pages.collapse()
        item.config.stash[COLLAPSED] = time.process_time()


@pytest.fixture
def nothing_frozen():
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    import torch

    return torch.device(request.param)


@pytest.fixture(scope="module")
def one_thread():
    """For models so small that more threads wait for each other, on a busy machine for long."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def scripts():
    """The benchmarks and checks, importable by name for one file: the examples have a train.py."""
    before = list(sys.path)
    folders = [Path(__file__).parents[1] / "benchmarks", Path(__file__).parent / "checks"]
    sys.path[:0] = map(str, folders)
    yield
    sys.path[:] = before
    for path in (path for folder in folders for path in folder.glob("*.py")):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def kernel_device():
    """Where Triton kernels run here: compiled on CUDA, interpreted on CPU."""
    import torch

    return torch.device("cuda" if has_cuda() else "cpu")


@pytest.fixture
def constants(monkeypatch):
    """Change limits and times of a module for a test: ``constants(plan, SUB_BATCH=2)``."""

    def change(module, **values):
        for name, value in values.items():
            assert name.isupper(), f"{name} is no constant: use a public argument or a fake"
            monkeypatch.setattr(module, name, value)

    return change


@pytest.fixture
def large_tiles(constants):
    """Fewer programs' work: Triton's interpreter takes as long for a tile of any size."""
    from gpuprefetch.transforms import launch

    if not has_cuda():
        constants(launch, ROWS=8)


@pytest.fixture
def small_calls(constants):
    """Decode and copy less at a time: ``small_calls(SUB_BATCH=2)``."""
    from gpuprefetch.images import plan

    return functools.partial(constants, plan)


@pytest.fixture
def as_nvjpeg(monkeypatch):
    """Have the functions of an object called as nvJPEG's; None is a machine that has no nvJPEG."""
    from gpuprefetch.images import nvjpeg, warmup

    def forget():
        nvjpeg._idle.clear()
        nvjpeg._backends.clear()
        warmup._warm.clear()

    def use(library):
        monkeypatch.setattr(nvjpeg, "library", lambda: library)
        forget()

    yield use
    forget()


@pytest.fixture
def library(monkeypatch, as_nvjpeg):
    """A fake nvJPEG, on a CPU that is taken for a GPU with engines."""
    import torch
    from fakes import Library

    fake = Library()
    as_nvjpeg(fake)
    synchronize = functools.partial(fake.log.append, "synchronize")
    fake.current = types.SimpleNamespace(cuda_stream=7, synchronize=synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.current)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return fake


@pytest.fixture
def threaded(monkeypatch):
    """Prepare batches ahead of the loop in a thread, as on a GPU."""
    from gpuprefetch import prefetcher
    from gpuprefetch.core.epoch import Lookahead

    def make(*args, **options):
        return Lookahead(*args, **options | {"threaded": True})

    monkeypatch.setattr(prefetcher, "Lookahead", make)


def draw_photo(height, width, seed):
    """A smooth picture with some texture, (H, W, 3) uint8: what a photo is to a codec."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    light = torch.rand(1, 1, height // 16 + 2, width // 16 + 2, generator=generator)
    color = 0.3 * torch.rand(1, 3, height // 64 + 2, width // 64 + 2, generator=generator)
    light, color = (
        torch.nn.functional.interpolate(x, (height, width), mode="bicubic")[0]
        for x in (light, color)
    )
    noise = torch.randn(1, height, width, generator=generator)  # gray: as cameras do
    image = 0.7 * light + color + 0.03 * noise
    return (image.clamp(0, 1) * 255).to(torch.uint8).permute(1, 2, 0).numpy()


@pytest.fixture(scope="session")
def photo_folder(tmp_path_factory):
    """An ImageFolder of 3 classes and 24 pictures: several kinds of JPEG, a PNG named .JPEG."""
    from PIL import Image

    root = tmp_path_factory.mktemp("photos")
    modes = {5: "L", 9: "CMYK"}
    others = {7: {"progressive": True}, 11: {"format": "PNG", "exif": None}}
    for i in range(24):
        picture = Image.fromarray(draw_photo(60 + 13 * (i % 7), 120 - 9 * (i % 5), seed=i))
        path = root / f"class{i % 3}" / f"{i:02d}.JPEG"
        path.parent.mkdir(exist_ok=True)
        exif = Image.Exif()
        exif[0x0112] = i % 8 + 1
        options = {"format": "JPEG", "quality": 90, "subsampling": i % 3, "exif": exif}
        picture.convert(modes.get(i, "RGB")).save(path, **options | others.get(i, {}))
    return root
