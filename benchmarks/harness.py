"""What every benchmark shares: photos, child processes, timing, memory, CPU time and metadata.

Each measurement runs in a child process of its own, so that no loader inherits another one's CUDA
context, allocator, threads or environment. The parent never touches CUDA: while a child runs it
samples the memory in use on the whole device, and it writes the JSON after every child, so that an
interrupted run keeps what it measured.
"""

import argparse
import collections
import contextlib
import ctypes
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

RESULT = "RESULT "
IMAGE_SUFFIXES = {".jpg", ".jpeg"}
CLASSES = 100
GIB = 1024**3
PACKAGES = "torch torchvision torchcodec kornia triton nvidia-dali-cuda130 timm pillow".split()


def cores() -> int:
    """CPUs this process may run on: follows ``taskset``, unlike ``os.cpu_count``."""
    return len(os.sched_getaffinity(0))


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Arguments that mean the same in every benchmark."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of JPEGs, searched deeply")
    parser.add_argument("--files", type=int, default=13_200, help="repeat the photos to this many")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, default=cores(), help="of each DataLoader")
    parser.add_argument("--dali-threads", type=int, nargs="+", default=[8, 16], help="dali-tuned")
    parser.add_argument("--size", type=int, default=224, help="of the training images, in pixels")
    parser.add_argument("--warmup", type=float, default=3.0, help="seconds, after the first step")
    parser.add_argument("--seconds", type=float, default=6.0, help="measured, over all repeats")
    parser.add_argument("--repeats", type=int, default=5, help="windows in the measured seconds")
    parser.add_argument("--quick", action="store_true", help="a third of the time, one ceiling")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one child")
    parser.add_argument("--commit", help="of this repository, where git cannot tell")
    parser.add_argument("--output", type=Path, help="JSON file")
    return parser


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if args.quick:
        args.warmup, args.seconds, args.repeats = args.warmup / 3, args.seconds / 3, 3
    args.device = "cpu" if args.cpu else "cuda"
    return args


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What every loader is given: the fields of ``loaders.Settings``."""
    return {
        "data": str(photo_folder(args.data, args.files)),
        "batch_size": args.batch_size,
        "workers": args.workers,
        "size": args.size,
        "device": args.device,
    }


# Photos


def photo_folder(source: Path, files: int) -> Path:
    """Repeat the JPEGs under ``source`` into an ImageFolder layout of ``files`` hard links.

    The folder lies in the temporary directory, is named after its content and is reused when it is
    there. Neighbors in a class are different photos, so a reader with a small shuffle buffer (DALI)
    sees the same mix as one that shuffles all.
    """
    photos = sorted(p for p in source.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
    if not photos:
        raise ValueError(f"no JPEGs under {source}; --data takes a folder of .jpg or .jpeg files")
    content = "\n".join(f"{p}:{p.stat().st_size}:{p.stat().st_mtime_ns}" for p in photos)
    digest = hashlib.sha256(f"{files}\n{content}".encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"gpuprefetch-photos-{digest}"
    if folder.is_dir():
        return folder
    building = Path(tempfile.mkdtemp(prefix=folder.name))
    first_copy: dict[Path, Path] = {}
    per_class = -(-files // CLASSES)
    for index in range(files):
        photo = photos[index % len(photos)]
        link = building / f"class_{index // per_class:03d}" / f"{index:06d}_{photo.name}"
        link.parent.mkdir(exist_ok=True)
        _link(first_copy.setdefault(photo, link), photo, link)
    with contextlib.suppress(OSError):  # another run was faster: its folder is the same
        building.rename(folder)
    if building.is_dir():
        shutil.rmtree(building)
    return folder


def _link(copied: Path, photo: Path, link: Path) -> None:
    """Link to the photo, or (another file system) to its first copy, or copy it once more."""
    for target in (photo, copied):
        with contextlib.suppress(OSError):
            os.link(target, link)
            return
    shutil.copyfile(photo, link)


def photo_facts(source: Path, files: int) -> dict[str, Any]:
    """Count, mean bytes and mean size of the photos, for the metadata."""
    from PIL import Image

    photos = [p for p in source.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES]
    sizes = []
    for photo in photos:
        with Image.open(photo) as image:
            sizes.append(image.size)
    return {
        "files": files,
        "distinct": len(photos),
        "mean_bytes": round(statistics.fmean(p.stat().st_size for p in photos)),
        "mean_width": round(statistics.fmean(width for width, _ in sizes)),
        "mean_height": round(statistics.fmean(height for _, height in sizes)),
    }


# The device and the processes, seen from outside


class Device:
    """The first visible GPU through NVML, which needs no CUDA context in this process."""

    def __init__(self) -> None:
        self._nvml = self._handle = None
        with contextlib.suppress(OSError):
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
            handle = ctypes.c_void_p()
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
            if nvml.nvmlInit_v2() != 0:
                return
            if visible.isdigit():
                status = nvml.nvmlDeviceGetHandleByIndex_v2(int(visible), ctypes.byref(handle))
            else:
                status = nvml.nvmlDeviceGetHandleByUUID(visible.encode(), ctypes.byref(handle))
            if status == 0:
                self._nvml, self._handle = nvml, handle

    def used_bytes(self) -> int | None:
        """Memory in use on the device, of all processes; None where NVML cannot tell."""
        memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
        if self._nvml is None:
            return None
        if self._nvml.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory)) != 0:
            return None
        return memory[2]

    def settled_bytes(self) -> int | None:
        """Memory in use once it stands still: the last child's context goes after its exit."""
        used = self.used_bytes()
        for _ in range(20):
            time.sleep(0.1)
            before, used = used, self.used_bytes()
            if used == before:
                break
        return used

    def facts(self) -> dict[str, str | None]:
        name, driver = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
        if self._nvml is not None:
            self._nvml.nvmlDeviceGetName(self._handle, name, 96)
            self._nvml.nvmlSystemGetDriverVersion(driver, 96)
        return {"gpu": name.value.decode() or None, "driver": driver.value.decode() or None}


def cpu_seconds() -> float:
    """User and system seconds of this process, its living descendants and those it waited for."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            parents[pid] = int(fields[1])
            ticks[pid] = sum(int(field) for field in fields[11:15])  # utime stime cutime cstime
    family, grown = {os.getpid()}, True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in family}
        grown = not children <= family
        family |= children
    return sum(ticks[pid] for pid in family) / os.sysconf("SC_CLK_TCK")


# Measuring, in the child


def quartiles(values: list[float]) -> dict[str, Any]:
    """Median and spread of the repeats, and the repeats themselves."""
    if len(values) == 1:
        values = values * 2
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3, "values": values}


class _Marks:
    """Points in time on the device's own clock, so that a window needs no drained queue.

    A synchronize after each window would hand every loader the time to fill its queue unmeasured.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._points: list[Any] = []

    def add(self) -> None:
        import torch

        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._points.append(event)
        else:
            self._points.append(time.perf_counter())

    def seconds(self) -> list[float]:
        pairs = zip(self._points, self._points[1:], strict=False)
        if self._cuda:
            return [start.elapsed_time(end) / 1000 for start, end in pairs]
        return [end - start for start, end in pairs]


def synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def measure(
    batches: Iterable[Any],
    step: Callable[..., Any],
    *,
    device: str,
    warmup: float,
    seconds: float,
    repeats: int,
    warmup_steps: int = 0,
) -> dict[str, Any]:
    """Rate of ``step(*batch)`` over an endless loader.

    Args:
        batches: yields ``(images, target)``; must not end before the time is over.
        step: called with each batch; its results are not synchronized.
        device: ``"cuda"`` or ``"cpu"``.
        warmup: seconds after the first step, which compiles.
        seconds: measured, in ``repeats`` windows.
        repeats: windows that median and spread are taken over.
        warmup_steps: taken at least, to empty what was prefetched during the compilation.
    """
    iterator, throttle = iter(batches), _Throttle(device)
    first = next(iterator)
    step(*first)
    synchronize(device)
    facts = _batch_facts(first)
    del first
    warmup_end, taken = time.perf_counter() + warmup, 0
    while time.perf_counter() < warmup_end or taken < warmup_steps:
        throttle.wait()
        step(*next(iterator))
        taken += 1

    synchronize(device)
    marks, images, steps, waits = _Marks(device), [], [], []
    cpu_before, begin = cpu_seconds(), time.monotonic()
    marks.add()
    for _ in range(repeats):
        window = _window(iterator, step, throttle, seconds / repeats)
        marks.add()
        for column, value in zip((images, steps, waits), window, strict=True):
            column.append(value)
    synchronize(device)
    end, cpu = time.monotonic(), cpu_seconds() - cpu_before
    durations = marks.seconds()
    return {
        "images_per_second": quartiles([n / s for n, s in zip(images, durations, strict=True)]),
        "images_per_second_overall": sum(images) / (end - begin),
        "step_ms": statistics.median([1000 * s / n for s, n in zip(durations, steps, strict=True)]),
        "wait_ms_per_step": statistics.median(
            [1000 * w / n for w, n in zip(waits, steps, strict=True)]
        ),
        "cpu_seconds_per_1000_images": 1000 * cpu / sum(images),
        "images": sum(images),
        "first_batch": facts,
        "measured": [begin, end],
    }


class _Throttle:
    """Keeps the host at most two steps ahead of the device.

    Then a wait in ``next`` is a wait for data, and no loader's batches pile up behind queued steps.
    """

    def __init__(self, device: str) -> None:
        self._cuda, self._steps = device == "cuda", collections.deque[Any]()

    def wait(self) -> None:
        import torch

        if not self._cuda:
            return
        self._steps.append(torch.cuda.Event(blocking=True))
        self._steps[-1].record()
        if len(self._steps) > 2:
            self._steps.popleft().synchronize()


def _window(
    iterator: Iterator[Any], step: Callable[..., Any], throttle: _Throttle, seconds: float
) -> tuple[int, int, float]:
    """Images, steps and seconds in ``next`` of one window."""
    images = steps = 0
    waited, deadline = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        throttle.wait()
        begin = time.perf_counter()
        batch = next(iterator)
        waited += time.perf_counter() - begin
        step(*batch)
        images += len(batch[1])
        steps += 1
        del batch
    return images, steps, waited


def _batch_facts(batch: tuple[Any, Any]) -> dict[str, Any] | None:
    """What the model got: the same on every side, or the comparison says nothing."""
    import torch

    images, target = batch
    if not isinstance(images, torch.Tensor):
        return None  # a stage that makes no batch
    if not images.is_contiguous(memory_format=torch.channels_last):
        raise ValueError(f"images must be channels_last, got {images.stride() = }")
    return {
        "shape": list(images.shape),
        "dtype": str(images.dtype),
        "device": images.device.type,
        "mean": round(images.float().mean().item(), 3),
        "std": round(images.float().std().item(), 3),
        "target": f"{list(target.shape)} {target.dtype} {target.device.type}",
    }


# Child processes, from the parent


def run_child(
    script: str,
    task: dict[str, Any],
    *,
    device: Device,
    environment: dict[str, str] | None = None,
    timeout: float = 240.0,
) -> dict[str, Any]:
    """Run ``script --child TASK`` and return what its measurement returned.

    ``gpu_peak_gib`` is the most memory in use on the whole device while the child lived, beyond
    what was in use before it started; ``gpu_steady_gib`` the same within the measured seconds. A
    child that fails gives ``{"error": the end of its stderr}``.
    """
    variables = {k: v for k, v in os.environ.items() if k != "CUDA_DEVICE_MAX_CONNECTIONS"}
    # One cache for all children: only the first one of a model compiles.
    cache = Path(tempfile.gettempdir()) / "gpuprefetch-inductor"
    variables.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    variables.update(environment or {})
    before, samples, start = device.settled_bytes(), [], time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(
            [sys.executable, script, "--child", json.dumps(task)],
            stdout=out,
            stderr=err,
            env=variables,
            start_new_session=True,
        )
        try:
            while child.poll() is None and time.monotonic() - start < timeout:
                samples.append((time.monotonic(), device.used_bytes()))
                time.sleep(0.05)
            timed_out = child.poll() is None
        finally:  # its DataLoader workers, too, are in its session
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        out.seek(0), err.seek(0)
        results = [line for line in out.read().splitlines() if line.startswith(RESULT)]
        errors = err.read()[-2000:]
    if not results:
        return {"error": f"no result after {timeout} s\n{errors}" if timed_out else errors}
    result = json.loads(results[-1].removeprefix(RESULT))
    if before is not None:
        result.update(_memory(samples, before, result.get("measured")))
    result.pop("measured", None)
    return result


def _memory(
    samples: list[tuple[float, int]], before: int, measured: list[float] | None
) -> dict[str, float]:
    memory = {"gpu_peak_gib": (max(used for _, used in samples) - before) / GIB}
    if measured:
        steady = [used for at, used in samples if measured[0] <= at <= measured[1]]
        memory["gpu_steady_gib"] = (max(steady, default=before) - before) / GIB
    return memory


def child_main(measurement: Callable[..., dict[str, Any]]) -> None:
    """Run a measurement in the child, on the task that the parent gave."""
    result = measurement(**json.loads(sys.argv[2]))
    print(RESULT + json.dumps(result), flush=True)
    sys.stderr.flush()
    # Nothing is left to measure, and tearing down a pipeline may take seconds of GPU time.
    os._exit(0)


# The JSON document


def metadata(args: argparse.Namespace, device: Device) -> dict[str, Any]:
    script, *words = sys.argv
    if args.output:
        at = words.index("--output")
        del words[at : at + 2]
    words = ["PHOTOS" if word == str(args.data) else word for word in words]
    return {
        "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": args.commit or _commit(),
        "command": shlex.join(["python", f"benchmarks/{Path(script).name}", *words]),
        **device.facts(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "affinity": cores(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = subprocess.run([*command, "--abbrev=12"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


class Document:
    """Results as they come, written to ``--output`` after each of them."""

    def __init__(self, benchmark: str, args: argparse.Namespace, device: Device) -> None:
        hidden = {"data", "output", "commit", "cpu"}
        self._path = args.output
        self.content: dict[str, Any] = {
            "benchmark": benchmark,
            "metadata": metadata(args, device),
            "photos": photo_facts(args.data, args.files),
            "parameters": {k: v for k, v in vars(args).items() if k not in hidden},
            "results": [],
        }

    def add(self, result: dict[str, Any]) -> None:
        if "error" in result:  # the whole of it is for the terminal
            print(result["error"], file=sys.stderr)
            result["error"] = (result["error"].strip().splitlines() or ["no output"])[-1]
        self.content["results"].append(result)
        print(_line(result), flush=True)
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.content, indent=1) + "\n")


def _line(result: dict[str, Any]) -> str:
    """One result on one line of the terminal."""
    words = []
    for key, value in result.items():
        if isinstance(value, str):
            words.append(value)
        elif isinstance(value, dict) and "median" in value:
            words.append(f"{value['median']:,.0f} ({value['q1']:,.0f} to {value['q3']:,.0f})")
        elif isinstance(value, float):
            words.append(f"{key} {value:,.3f}")
        elif value and key == "options":
            words.append(", ".join(f"{option}={setting}" for option, setting in value.items()))
    return "  ".join(words)
