"""Whatever fails, the loop gets the right exception within seconds and the process ends by itself.

Every fault runs in a child process, in a session of its own: what the child leaves behind is seen.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import types
from functools import partial
from pathlib import Path

import pytest
import torch
from children import Child
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from gpuprefetch import DataPrefetcher

SECONDS = 60  # for a child, on a busy machine
PRELUDE = '''
import gc, io, itertools, os, signal, sys, threading, time, warnings
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from gpuprefetch import DataPrefetcher, EncodedImage, Resize

warnings.simplefilter("ignore")
torch.set_num_threads(1)
DEVICE = sys.argv[1]
picture = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
file = io.BytesIO()
Image.fromarray(picture).save(file, "JPEG")
JPEG = file.getvalue()


class Files(Dataset):
    """Sample i is a JPEG and i; ``fault(i)`` runs first."""

    def __init__(self, length=16, fault=lambda index: None):
        self.length, self.fault = length, fault

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.fault(index)
        return EncodedImage(JPEG, index, f"{index}.jpg"), index


def fail_at(number, error):
    def fault(index):
        if index == number:
            raise error
    return fault


def prefetcher_of(dataset, workers=2, transforms=(), **options):
    loader = DataLoader(
        dataset, batch_size=4, num_workers=workers, pin_memory=DEVICE != "cpu", **options
    )
    return DataPrefetcher(loader, device=DEVICE, transforms=[Resize((16, 16)), *transforms])


def nothing_left():
    """No thread of ours, no worker, no child that was not waited for."""
    gc.collect()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        threads = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        children = torch.multiprocessing.active_children()
        if not threads and not children:
            break
        time.sleep(0.02)
    assert not threads, threads
    assert not children, children
    try:
        pid, _ = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return
    raise AssertionError(f"child process {pid} was left")


def expect(name, error, text, seen, iterate, seconds=8):
    """``iterate(seen)`` ends in ``error`` after the batches ``seen``, and leaves nothing.

    Left to the garbage collector, two workers alone would take 10 seconds.
    """
    got, started = [], time.monotonic()
    try:
        iterate(got)
    except error as caught:
        assert text in str(caught), caught
    else:
        raise AssertionError(f"{name}: no {error}, but {got}")
    assert got == seen, got
    nothing_left()
    assert time.monotonic() - started < seconds, time.monotonic() - started
    print("ok", name, flush=True)


def loop(prefetcher):
    def iterate(got):
        for images, target in prefetcher:
            assert images.device.type == torch.device(DEVICE).type
            got.append(int(target[0]))
    return iterate
'''


def left_behind(session):
    """Processes that are still in the session of a child that has exited."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[3]) == session and fields[0] != "Z":  # whose parent died, init reaps
            found.append(int(stat.parent.name))
    return found


def child_of(code, device, **options):
    return Child(PRELUDE + code, device.type, forked=device.type == "cpu", **options)


def ended(child, seconds=SECONDS):
    """What the child wrote; it must end by itself and take its workers along."""
    try:
        out, err = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGABRT)
        out, err = child.communicate()
        raise AssertionError(f"it hangs after {out!r}\n{err}") from None
    deadline = time.monotonic() + 10  # workers notice that their parent is gone
    while left_behind(child.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    remaining = left_behind(child.pid)
    for pid in remaining:
        os.kill(pid, signal.SIGKILL)
    assert not remaining, f"processes {remaining} outlived it\n{err}"
    return out, err


def run(code, device, returncode=0, seconds=SECONDS, **options):
    """What a child printed that ended as it should."""
    child = child_of(code, device, **options)
    out, err = ended(child, seconds)
    assert child.returncode == returncode, err
    return out


EXCEPTIONS = """
loop(prefetcher_of(Files(8), 2))([])  # a GPU's context and decoders are not what is timed
for workers in (0, 1):
    files = Files(fault=fail_at(9, LookupError("no sample 9")))
    expect("dataset", LookupError, "no sample 9", [0, 4], loop(prefetcher_of(files, workers)))

    def collate(samples):
        if samples[0][1] == 8:
            raise TypeError("no batch 2")
        return default_collate(samples)

    prefetcher = prefetcher_of(Files(), workers, collate_fn=collate)
    expect("collate", TypeError, "no batch 2", [0, 4], loop(prefetcher))

    class Broken(IterableDataset):
        def __iter__(self):
            raise OSError("no disk")

    expect("start", OSError, "no disk", [], loop(prefetcher_of(Broken(), workers)))

    def leave(index):
        if index == 1:
            # torch raises wherever the main thread is. Where it starts a queue's thread, that is
            # never told to end: Queue._start_thread() arranges for it behind the start.
            time.sleep(0.3)
            raise SystemExit("enough")

    files = Files(fault=leave)
    error = SystemExit if workers == 0 else RuntimeError
    text = "enough" if workers == 0 else "exited unexpectedly"
    expect("exit in a dataset", error, text, [], loop(prefetcher_of(files, workers)))

calls = itertools.count()

def broken(images):
    if next(calls) == 2:
        raise ArithmeticError("no transform 2")
    return images

expect("transform", ArithmeticError, "no transform 2", [0, 4],
       loop(prefetcher_of(Files(), transforms=[broken])))

def in_the_loop(got):
    for _, target in prefetcher_of(Files()):
        got.append(int(target[0]))
        raise KeyError("the loop's own")

expect("loop", KeyError, "the loop's own", [0], in_the_loop)

# The decoder itself: ours is a bug or a broken installation, and no bad image.
from gpuprefetch.images import decode as _decode
from torchcodec import decoders

def no_decoder(*args, **options):
    raise ImportError("no decoder")

decoders.decode_jpeg = no_decoder
for decoder in _decode.DECODERS.values():
    decoder.decode = no_decoder
expect("decode", ImportError, "no decoder", [], loop(prefetcher_of(Files())))
print("end")
"""


def test_exceptions(device):
    lines = run(EXCEPTIONS, device).splitlines()
    assert lines[-1] == "end"
    assert len(lines) == 12


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    code: str


class StrictError(Exception):
    def __setattr__(self, name, value):
        raise AttributeError(name)


class NotelessError(TypeError):
    def add_note(self, note):
        raise NotImplementedError

    def __str__(self):
        return "NoSuchKey"


class OwnTextError(Exception):
    def __init__(self, code, lock=None):
        super().__init__("its class has one text")
        self.lock = threading.Lock()


class MessageError(Exception):
    message = property(lambda self: self.args[0])


def of_a_function():
    class LocalError(Exception):
        pass

    return LocalError("NoSuchKey")


def of_the_worker():
    """Of a module that only the worker has."""
    module = sys.modules.setdefault("only_there", types.ModuleType("only_there"))
    module.ThereError = type("ThereError", (Exception,), {"__module__": "only_there"})
    return module.ThereError("NoSuchKey")


class Failing(Dataset):
    """Numbers; ``make`` gives what is raised for sample 5."""

    def __init__(self, make=None):
        self.make = make

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5 and self.make is not None:
            raise self.make()
        return torch.full((3, 2, 2), float(index))


class At:
    """A collate function, or a transform, that fails at the third batch of two."""

    def __init__(self, make):
        self.make = make

    def __call__(self, samples):
        if float(samples[0].flatten()[0]) == 4:
            raise self.make()
        return default_collate(samples) if isinstance(samples, list) else samples


class Order:
    def __init__(self, make):
        self.make = make

    def __iter__(self):
        yield from range(4)
        raise self.make()


def ends_in(make, where, workers, kind):
    """What the loop gets in place of the third batch."""
    loader = DataLoader(
        Failing(make if where == "dataset" else None),
        batch_size=2,
        sampler=Order(make) if where == "sampler" else None,
        collate_fn=At(make) if where == "collate_fn" else None,
        num_workers=workers,
        timeout=20 if workers else 0,
    )
    transforms, seen = [At(make)] if where == "transform" else [], []
    with pytest.raises(kind) as caught:
        for batch in DataPrefetcher(loader, device="cpu", transforms=transforms):
            seen.append(int(batch[0, 0, 0, 0]))
    assert seen in ([0, 2], [])  # with workers a sampler is read ahead
    return caught.value


@pytest.mark.parametrize("where", ["dataset", "collate_fn", "sampler", "transform"])
@pytest.mark.parametrize("kind", [FrozenError, StrictError, NotelessError])
def test_an_exception_that_takes_no_note_arrives(kind, where):
    for workers in (0, 1):
        assert "NoSuchKey" in str(ends_in(partial(kind, "NoSuchKey"), where, workers, kind))


@pytest.mark.parametrize(
    ("where", "who"),
    [
        ("dataset", "the dataset"),
        ("collate_fn", "the collate_fn"),
        ("transform", "a transform"),
        ("sampler", "generator"),
    ],
)
def test_stop_iteration_ends_no_epoch_early(where, who):
    for workers in (0, 1):
        text = str(ends_in(StopIteration, where, workers, RuntimeError))
        assert f"{who}" in text and "raised StopIteration" in text


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(8.0).view(-1, 1))


def test_stop_iteration_of_a_collate_function_is_no_end_of_a_stream():
    for workers in (0, 1):
        options = {"num_workers": workers, "timeout": 20 if workers else 0}
        loader = DataLoader(Stream(), 2, collate_fn=At(StopIteration), **options)
        with pytest.raises(RuntimeError, match="collate_fn raised StopIteration"):
            list(DataPrefetcher(loader, device="cpu"))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (of_a_function, RuntimeError),
        (of_the_worker, RuntimeError),
        (partial(OwnTextError, "NoSuchKey"), OwnTextError),
        (partial(MessageError, "NoSuchKey"), RuntimeError),
        (partial(ExceptionGroup, "NoSuchKey", [OSError()]), RuntimeError),
    ],
)
def test_an_exception_that_cannot_be_sent_is_told_by_its_text(make, kind):
    for where in ("dataset", "collate_fn"):
        error = ends_in(make, where, 1, kind)
        text = "".join([str(error), *error.__notes__])
        assert "NoSuchKey" in text or "one text" in text
        assert "Traceback (most recent call last)" in text


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_a_batch_that_cannot_be_sent_is_an_error(capfd):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    for kind in (DataLoader, stateful):
        loader = kind(Failing(), batch_size=4, num_workers=1, timeout=20, collate_fn=Unsendable())
        iterator = iter(DataPrefetcher(loader, device="cpu"))
        assert len(next(iterator)) == 2
        with pytest.raises(RuntimeError, match="worker process sent a batch") as caught:
            next(iterator)
        assert "pickle" in str(caught.value)


class Cut:
    """A loader's iterator, the connection to whose worker breaks."""

    def __init__(self, code):
        self.process = torch.multiprocessing.get_context("fork").Process(target=eval, args=(code,))
        self.process.start()
        self._workers = [self.process]

    def __iter__(self):
        return self

    def __next__(self):
        raise ConnectionResetError(104, "reset by peer")


def test_a_worker_that_ends_while_its_batch_is_fetched_is_named():
    with pytest.raises(RuntimeError, match=r"worker \(pid\(s\) .* exited unexpectedly"):
        next(iter(DataPrefetcher(Cut("0"), device="cpu")))
    alive = Cut("__import__('time').sleep(60)")
    try:
        with pytest.raises(ConnectionResetError):
            next(iter(DataPrefetcher(alive, device="cpu")))
    finally:
        alive.process.kill()


class Unsendable:
    def __call__(self, samples):
        return [default_collate(samples), (lambda: 0) if samples[0].any() else 0]


ENDINGS = """
def first(prefetcher):
    for _, target in prefetcher:
        return int(target[0])

slow = Files(fault=lambda index: time.sleep(0.005))
for workers in (0, 1):
    prefetcher = prefetcher_of(slow, workers)
    assert first(prefetcher) == 0
    nothing_left()
    assert [int(t[0]) for _, t in itertools.islice(prefetcher, 2)] == [0, 4]
    nothing_left()
    other = prefetcher_of(Files(8), workers)
    pairs = [(int(a[0]), int(b[0])) for (_, a), (_, b) in zip(prefetcher, other)]
    assert pairs == [(0, 0), (4, 4)]
    nothing_left()
    assert [int(t[0]) for _, t in prefetcher] == [0, 4, 8, 12]
    nothing_left()
    iterator = iter(prefetcher)
    next(iterator)
    del iterator
    nothing_left()

# Two at once, in threads. From Python 3.12 on filelock, which torch's compiler imports, refuses a
# fork beside another thread's, so that their workers start one after the other.
seen = {"a": [], "b": []}
starting = threading.Lock()
def consume(name, prefetcher):
    for _ in range(2):
        with starting:
            batches = iter(prefetcher)
        seen[name] += [int(t[0]) for _, t in batches]
threads = [threading.Thread(target=consume, args=(n, prefetcher_of(Files(), 1))) for n in "ab"]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert seen["a"] == seen["b"] == [0, 4, 8, 12] * 2, seen
nothing_left()

# An iterator in a reference cycle, as an exception's traceback makes them.
iterator = iter(prefetcher_of(Files(), 1))
next(iterator)
cycle = [iterator]
cycle.append(cycle)
del iterator, cycle
nothing_left()
print("end")
"""

# Workers that are forked from an import would wait for ever for a lock of a thread that they lack.
IMPORTING = """
import importlib.abc, importlib.util, torchcodec.decoders

begun = threading.Event()
decoders = sys.modules.pop("torchcodec.decoders")
del torchcodec.decoders  # as in a new process

class Slow(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name == "torchcodec.decoders":
            return importlib.util.spec_from_loader(name, self)

    def exec_module(self, module):
        begun.set()
        time.sleep(0.5)
        module.decode_jpeg = decoders.decode_jpeg

sys.meta_path.insert(0, Slow())
found = []

def decode():
    files = Files(4, fault=lambda index: time.sleep(0.1))  # has not begun to decode at the fork
    found.append([int(target[0]) for _, target in prefetcher_of(files, workers=0)])

thread = threading.Thread(target=decode)
thread.start()
begun.wait()
print([int(target[0]) for _, target in prefetcher_of(Files())])
thread.join()
print(*found)
"""

# All that workers use is imported before they are forked.
IMPORTED = """
import json, pathlib, tempfile
from torchvision import datasets, tv_tensors
from torchvision.transforms import v2
import gpuprefetch
from gpuprefetch import RandomResizedCrop, Views, accelerate

forked, out = [], pathlib.Path(tempfile.mkdtemp()) / "modules"
os.register_at_fork(after_in_child=lambda: forked.extend(sys.modules))

def tell(index):
    if forked:
        out.write_text(json.dumps(sorted({*sys.modules} - {*forked})))

def encoded(kind, **options):
    file = io.BytesIO()
    Image.fromarray(picture).save(file, kind, **options)
    return file.getvalue()

class Boxed(Files):
    def __getitem__(self, index):
        image, _ = super().__getitem__(index)
        options = {"format": "XYXY", "canvas_size": (40, 50)}
        return image, tv_tensors.BoundingBoxes([[1.0, 2.0, 30.0, 20.0]], **options)

class Folder(datasets.ImageFolder):
    def __getitem__(self, index):
        tell(index)
        return super().__getitem__(index)

root = pathlib.Path(tempfile.mkdtemp())
for number in range(8):
    (root / "a").mkdir(exist_ok=True)
    (root / "a" / f"{number}.jpg").write_bytes(JPEG)
crop = RandomResizedCrop(16)
lists = {
    "policy": [crop, v2.RandAugment(), v2.ColorJitter(0.1), v2.GaussianBlur(3)],
    "views": Views([crop], [crop, v2.TrivialAugmentWide()]),
}
pipelines = {
    "v2": [v2.RandomResizedCrop(16), v2.RandAugment(), v2.PILToTensor()],
    "kept": [v2.RandomResizedCrop(16), lambda image: image.copy(), v2.PILToTensor()],
}
options = {"batch_size": 2, "num_workers": 1}
made = {}
for name, transforms in lists.items():
    loader = DataLoader(Files(8, tell), **options)
    made[name] = DataPrefetcher(loader, transforms=transforms, device="cpu")
for kind in ("PNG", "TIFF"):
    loader = DataLoader([(EncodedImage(encoded(kind), i), i) for i in range(8)], **options)
    made[kind] = DataPrefetcher(loader, transforms=[crop], device="cpu")
loader = DataLoader(Boxed(8, tell), collate_fn=lambda samples: [*zip(*samples)], **options)
made["boxes"] = DataPrefetcher(loader, transforms=[crop], device="cpu")
for name, ops in pipelines.items():
    loader = DataLoader(Folder(root, v2.Compose(ops)), **options)
    made[name] = accelerate(loader, keep_unknown=True, print_plan=False, device="cpu")
ours = "gpuprefetch torchvision torchcodec PIL numpy kornia".split()
for name in sys.argv[2:] or made:
    out.write_text("[]")
    assert len(list(made[name])) == 4
    late = [module for module in json.loads(out.read_text()) if module.split(".")[0] in ours]
    assert not late, (name, late)
print("end")
"""

# A worker whose parent is a fork server, which lives as long as its children: a real one would
# import torch for seconds.
FORK_SERVER = """
from multiprocessing import process
from gpuprefetch.core.workers import WorkerStart

main, (sentinel, held) = os.getpid(), os.pipe()
if os.fork() == 0:  # the server
    os.close(held)
    if os.fork() == 0:  # a worker, as multiprocessing tells it who its main process is
        process._parent_process = process._ParentProcess("main", main, sentinel)
        WorkerStart(None, nice=False, stateful=False)(0)
        print("worker", flush=True)
        time.sleep(1000)
    os.wait()
    os._exit(0)
time.sleep(0.5)
os.kill(main, signal.SIGKILL)
"""

ORPHANS = """
loader = DataLoader(Files(1 << 16), batch_size=1024, num_workers=2, pin_memory=DEVICE != "cpu")
for images, target in DataPrefetcher(loader, device=DEVICE, transforms=[Resize((4, 4))]):
    print(len(target), flush=True)
    time.sleep(1.5)  # the workers have filled their queues, each message larger than a pipe
    os.kill(os.getpid(), signal.SIGKILL)
"""

KILLED = """
def kill(index):
    if index == 9:
        os.kill(os.getpid(), signal.SIGKILL)

try:
    for images, target in prefetcher_of(Files(fault=kill)):
        time.sleep(0.5)  # the news arrives while the loop is busy
except RuntimeError as error:
    assert "DataLoader worker" in str(error), error
    print("ok")
nothing_left()
"""

# The worker will not come back: it is given up and killed, as the DataLoader does.
STUCK = """
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5  # the loader would wait 5 s for a worker

def stuck(index):
    if index == 9:
        time.sleep(1000)

for _, target in prefetcher_of(Files(fault=stuck)):
    break
print("left")
"""


@pytest.mark.parametrize(
    ("code", "returncode", "printed"),
    [
        pytest.param(ENDINGS, 0, ["end"], id="ways to stop"),
        pytest.param(IMPORTING, 0, ["[0, 4, 8, 12]", "[0]"], id="importing"),
        pytest.param(ORPHANS, -signal.SIGKILL, ["1024"], id="parent is killed"),
        pytest.param(FORK_SERVER, -signal.SIGKILL, ["worker"], id="fork server's parent is killed"),
        pytest.param(IMPORTED, 0, ["end"], id="imported"),
        pytest.param(KILLED, 0, ["ok"], id="worker is killed"),
        pytest.param(STUCK, 0, ["left"], id="worker hangs"),
    ],
)
def test_endings(device, code, returncode, printed):
    assert run(code, device, returncode).splitlines() == printed


INTERRUPTED = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
# torch._dynamo imports it at exit, and code that Python runs then makes it forget the interrupt.
sys.modules["tabulate"] = None

def slow(index):
    time.sleep({sample})

for images, target in prefetcher_of(Files(10_000, slow), {workers}):
    print("batch", flush=True)
    time.sleep({step})
"""


@pytest.mark.parametrize(
    ("sample", "step", "workers", "group"),
    [(0, 30, 2, True), (0, 30, 2, False), (0.2, 0, 2, True), (0.15, 0, 0, False)],
)
def test_ctrl_c(device, sample, step, workers, group):
    child = child_of(INTERRUPTED.format(sample=sample, step=step, workers=workers), device)
    assert child.first_line() == "batch"
    time.sleep(0.2)
    started = time.monotonic()
    # A terminal sends it to the workers as well, a supervisor to the process alone.
    (os.killpg if group else os.kill)(child.pid, signal.SIGINT)
    _, err = ended(child)
    assert time.monotonic() - started < 15
    assert child.returncode in (-signal.SIGINT, 128 + signal.SIGINT), err
    assert "KeyboardInterrupt" in err, err


GLOBALS = """
import locale, random, sys
from PIL import ImageFile
from torch.utils.data._utils.collate import default_collate_fn_map
from torchvision import tv_tensors
from torchvision.transforms import v2
from gpuprefetch import EncodedImageFolder, RandomResizedCrop, accelerate, preprocess
from torchvision.datasets import ImageFolder

warnings.resetwarnings()
warnings.simplefilter("error", Image.DecompressionBombWarning)  # as Pillow's documentation has it
hooks = torch.nn.modules.module

def state():
    return {
        "filters": list(warnings.filters),
        "environment": dict(os.environ),
        "hooks": [dict(v) for n, v in vars(hooks).items() if n.startswith("_global_") and v],
        "random": (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()),
        "torch": (
            torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_default_dtype(),
            torch.get_default_device(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled("cpu"),
            torch.multiprocessing.get_sharing_strategy(),
            torch.multiprocessing.get_start_method(allow_none=True),
        ),
        "signals": {n: signal.getsignal(n) for n in signal.valid_signals()},
        "python": (
            sys.path[:], sys.excepthook, threading.excepthook, sys.getswitchinterval(),
            sys.getrecursionlimit(), gc.isenabled(), gc.get_threshold(),
            locale.setlocale(locale.LC_ALL), os.getcwd(), os.nice(0),
        ),
        "threads": threading.active_count(),
        "PIL": (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES),
        "collate": set(default_collate_fn_map) - {tv_tensors.Mask, tv_tensors.KeyPoints},
    }

class Masked(Files):
    def __getitem__(self, index):
        mask = tv_tensors.Mask(torch.zeros(40, 50, dtype=torch.uint8))
        return super().__getitem__(index)[0], mask

os.makedirs("folder/a")
for name in ("0.jpg", "1.jpg"):
    with open(f"folder/a/{name}", "wb") as opened:
        opened.write(JPEG)
pipeline = v2.Compose([v2.Resize((16, 16)), v2.PILToTensor()])
bad = [(EncodedImage(b"bad" if i == 1 else JPEG, i), i) for i in range(4)]
loops = {
    "tensors": lambda new: new([(torch.zeros(3, 40, 50), 0)] * 4),
    "files": lambda new: new(Files()),
    "masks": lambda new: new(Masked()),
    "a bad file": lambda new: new(bad),
}
for workers, name in enumerate(loops):
    workers = min(workers, 1)
    states = []
    for kind in ("plain", "plain", "ours"):
        def new(dataset):
            loader = DataLoader(dataset, batch_size=8, num_workers=workers)
            if kind == "plain":
                return loader
            transforms = [RandomResizedCrop(16), *[v2.RandomGrayscale()] * (name != "masks")]
            return DataPrefetcher(loader, device=DEVICE, transforms=transforms, on_error="skip")
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        for batch in loops[name](new):
            pass
        del batch
        nothing_left()
        states.append(state())
    _, plain, ours = states
    plain["hooks"] = []  # of encoded images that only a plain loader reads, one is left
    changed = [key for key in plain if plain[key] != ours[key]]
    assert not changed, (name, workers, [(plain[key], ours[key]) for key in changed])
before = state()
preprocess(["folder/a/0.jpg"], [Resize((16, 16))], device=DEVICE)
loader = DataLoader(ImageFolder("folder", pipeline))
moved = accelerate(loader, device=DEVICE, print_plan=False)
moved.set_epoch(1)
after = state()
changed = [key for key in before if before[key] != after[key]]
assert changed in ([], ["random"]), changed
print("unchanged")
"""


def test_nothing_global_changes(tmp_path):
    """But for what docs/correctness.md lists; a plain DataLoader's epoch is what it is held to."""
    child = Child(PRELUDE + GLOBALS, "cpu", folder=tmp_path, whole=False)
    out, err = ended(child)
    assert out == "unchanged\n", err


# What the decoders raise where a process has too little memory, of which they say nothing clear.
LITTLE_MEMORY = """
from PIL import Image, ImageFile
from torchcodec import decoders

whole = torch.empty

def small(size, **options):  # in a process that has no room for a picture
    if isinstance(size, int) and size >= 3 * 400 * 500:
        raise RuntimeError("it does not fit")
    return whole(size, **options)

def lacking(error):
    def decode(*args, **options):
        raise error
    return decode

def encoded(form):
    buffer = io.BytesIO()
    Image.new("RGB", (500, 400), (90, 120, 30)).save(buffer, form)
    return buffer.getvalue()

pictures = [encoded("JPEG"), encoded("PNG")]
files = [(EncodedImage(picture, i, f"{i}.jpg"), i) for i, picture in enumerate(pictures)]
words = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"
cases = [
    ("allocator", decoders, "decode_jpeg", RuntimeError(words), True, 0),
    ("libjpeg", decoders, "decode_jpeg", RuntimeError("Insufficient memory (case 4)"), True, 0),
    ("no words", decoders, "decode_jpeg", RuntimeError("it failed"), False, 0),
    ("Pillow", ImageFile.ImageFile, "load", MemoryError(), False, 1),
    ("Pillow's words", ImageFile.ImageFile, "load", OSError("broken data stream"), False, 1),
]
for name, owner, attribute, error, room, bad in cases:
    decode = getattr(owner, attribute)
    setattr(owner, attribute, lacking(error))
    torch.empty = whole if room else small
    for on_error in ("skip", "replace"):
        prefetcher = DataPrefetcher(
            DataLoader(files, batch_size=2, num_workers=1),
            device="cpu",
            transforms=[Resize((16, 16))],
            on_error=on_error,
        )
        text = f"decoded: '{bad}.jpg' (sample {bad} of the dataset). No file is bad"
        expect(f"{name} {on_error}", MemoryError, text, [], loop(prefetcher))
        assert not prefetcher.bad_images
    setattr(owner, attribute, decode)
    torch.empty = whole
setattr(decoders, "decode_jpeg", lacking(RuntimeError("it failed")))
prefetcher = DataPrefetcher(
    DataLoader(files, batch_size=2), device="cpu", transforms=[Resize((16, 16))], on_error="skip"
)
assert [target.tolist() for _, target in prefetcher] == [[1]]  # with room it is a bad file
"""


def test_a_lack_of_memory_is_no_bad_file():
    lines = run(LITTLE_MEMORY, torch.device("cpu"), whole=False).splitlines()
    assert len(lines) == 10
    assert all(line.startswith("ok ") for line in lines)


OUT_OF_MEMORY = """
buffer = io.BytesIO()
Image.fromarray(np.zeros((6000, 8000, 3), dtype=np.uint8)).save(buffer, "JPEG")
SMALL, JPEG = JPEG, buffer.getvalue()
prefetcher = DataPrefetcher(
    DataLoader(Files(16), batch_size=16, num_workers=1, pin_memory=True), cpu_share=0.0
)
next(iter(prefetcher_of(Files(), transforms=[])))  # the decoder's own memory
gc.collect()
torch.cuda.empty_cache()
room = torch.cuda.memory_reserved() + (1 << 30)  # of this process: others may be on the GPU
torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
expect("out of memory", torch.OutOfMemoryError, "out of memory", [], loop(prefetcher), seconds=30)
torch.cuda.empty_cache()
JPEG = SMALL
assert len(list(prefetcher_of(Files()))) == 4  # and it goes on
nothing_left()
"""


@pytest.mark.gpu
def test_out_of_gpu_memory():
    assert run(OUT_OF_MEMORY, torch.device("cuda")) == "ok out of memory\n"
