"""What benchmarks and checks share: arguments, child processes, device memory, the JSON document.

Each measurement runs in a separate child process, so that no loader inherits another one's CUDA
context, allocator, threads or environment. The parent never touches CUDA: while a child runs it
samples the memory in use on the whole device. The JSON is written after every result, and a later
command on the same machine and version goes on with it.
"""

import argparse
import contextlib
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import photos
import protocol
from facts import Device, States, machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RESULT = "RESULT "
GIB = 1024**3
# Of --tiny: everything runs, and no number means anything.
TINY = {"cpu": True, "files": 24, "batch_size": 4, "workers": 1, "size": 32}


def cores() -> int:
    """CPUs this process may run on: follows ``taskset``, unlike ``os.cpu_count``."""
    return len(os.sched_getaffinity(0))


def visible_gpus() -> list[str]:
    """What ``CUDA_VISIBLE_DEVICES`` may name, one by one; empty without a GPU."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [gpu for gpu in given.split(",") if gpu]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def output_parser(description: str | None) -> argparse.ArgumentParser:
    """Arguments of whatever writes a :class:`Document`."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    parser.add_argument("--output", type=Path, help="JSON file; a measurement goes on with it")
    return parser


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Arguments that mean the same in every benchmark of loaders."""
    parser = output_parser(description)
    parser.add_argument("--data", type=Path, help="folder of JPEGs, searched deeply")
    parser.add_argument("--files", type=int, default=13_200, help="repeat the photos to this many")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, help="of each DataLoader; default: one for a core")
    parser.add_argument("--size", type=int, default=224, help="of the training images, in pixels")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one child")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU")
    parser.add_argument("--tiny", action="store_true", help="try it out: small, on the CPU")
    return parser


TIMED_TINY = {"rounds": 1, "settle": (0.0, 0.0), "seconds": 0.1, "repeats": 2}


def timed_parser(description: str | None) -> argparse.ArgumentParser:
    """The same, and the arguments of a benchmark that runs each loader alone, in rounds."""
    parser = argument_parser(description)
    parser.add_argument("--rounds", type=int, default=2, help="each the other way round")
    parser.add_argument("--settle", type=float, nargs=2, default=(5.0, 15.0), help="least, most")
    parser.add_argument("--seconds", type=float, default=5.0, help="measured, over all repeats")
    parser.add_argument("--repeats", type=int, default=5, help="windows in these seconds")
    return parser


def timing(args: argparse.Namespace) -> dict[str, Any]:
    """What ``clock.measure`` is given of them."""
    names = ("settle", "seconds", "repeats")
    return {name: getattr(args, name) for name in names} | {"multiple": args.workers}


def in_rounds(columns: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """The columns of each round with its number; every second round is reversed."""
    for number in range(rounds):
        for column in columns if number % 2 == 0 else columns[::-1]:
            yield number, column


def parse_arguments(
    parser: argparse.ArgumentParser, words: list[str] | None = None, **tiny: Any
) -> argparse.Namespace:
    """Parse; ``--tiny`` sets the arguments in ``tiny``, and those of ``TINY``."""
    args = parser.parse_args(words)
    if args.tiny:
        vars(args).update(TINY | tiny)
        args.data = args.data or photos.drawn()
    if args.data is None:
        parser.error("--data takes a folder of JPEGs; --tiny draws some")
    args.workers = cores() if args.workers is None else args.workers
    args.device = "cpu" if args.cpu else "cuda"
    return args


def settings(args: argparse.Namespace, files: int | None = None) -> dict[str, Any]:
    """What every loader is given: the fields of ``loaders.Settings``; ``files`` or ``--files``."""
    return {
        "data": str(photos.photo_folder(args.data, args.files if files is None else files)),
        "batch_size": args.batch_size,
        "workers": args.workers,
        "size": args.size,
        "device": args.device,
    }


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM, as ``timeout`` sends it, is an exception inside of it, as Ctrl-C is.

    Else a child would live on, with its memory of the GPU, beside what is measured next.
    """
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@ended_by_sigterm()
def run_child(
    script: str,
    task: dict[str, Any],
    *,
    device: Device,
    environment: dict[str, str] | None = None,
    package: str | Path = ROOT,
    timeout: float = 240.0,
) -> dict[str, Any]:
    """Run ``script --child TASK`` and return what its measurement returned.

    ``gpu_peak_gib`` is the most memory in use on the whole device while the child lived, beyond
    what was in use before it started, and ``gpu_state`` has clocks, power and throttle reasons. A
    child that fails gives ``{"error": the end of its stderr}``. ``package`` is the checkout that it
    imports gpuprefetch from.
    """
    variables = {k: v for k, v in os.environ.items() if k != "CUDA_DEVICE_MAX_CONNECTIONS"}
    # One cache for all children: only the first one of a model compiles.
    cache = Path(tempfile.gettempdir()) / "gpuprefetch-inductor"
    variables.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    path = [str(package), variables.get("PYTHONPATH", "")]
    variables |= {"PYTHONPATH": os.pathsep.join(filter(None, path)), **(environment or {})}
    before = device.used_bytes()
    states = States(device)
    peak = 0
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(
            child_command(script, task),
            stdout=out,
            stderr=err,
            env=variables,
            start_new_session=True,
        )
        try:
            while child.poll() is None and time.monotonic() - start < timeout:
                peak = max(peak, device.used_bytes() or 0)
                states.sample()
                time.sleep(0.05)
            timed_out = child.poll() is None
        finally:  # its DataLoader workers, too, are in its session
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            device.wait_until_freed(before or 0)  # what it had is not the next one's
        out.seek(0)
        err.seek(0)
        results = [line for line in out.read().splitlines() if line.startswith(RESULT)]
        errors = err.read()[-2000:]
    if not results:
        return {"error": f"no result after {timeout} s\n{errors}" if timed_out else errors}
    result = json.loads(results[-1].removeprefix(RESULT))
    if before is None:
        return result
    return {**result, "gpu_peak_gib": (peak - before) / GIB, "gpu_state": states.summary()}


def child_command(script: str, task: dict[str, Any], *options: str) -> list[str]:
    """What starts a script as a child with a task, with these options of Python's."""
    return [sys.executable, *options, script, "--child", json.dumps(task)]


def child_main(measurement: Callable[..., dict[str, Any]]) -> None:
    """In the child, run a measurement on the task that the parent gave, and end."""
    if sys.argv[1:2] != ["--child"]:
        return
    result = measurement(**json.loads(sys.argv[2]))
    print(RESULT + json.dumps(result), flush=True)
    sys.stderr.flush()
    # Nothing is left to measure, and tearing down a pipeline may take seconds of GPU time.
    os._exit(0)


def command(args: argparse.Namespace) -> str:
    """The command line, without paths of the machine."""
    script, *words = sys.argv
    if args.output and "--output" in words:
        at = words.index("--output")
        del words[at : at + 2]
    launcher = ["python"]
    if "WORLD_SIZE" in os.environ:
        launcher = ["torchrun", "--standalone", f"--nproc-per-node={os.environ['WORLD_SIZE']}"]
    # args.data may be another folder by now, of large photos.
    for option, shown in (("--data", "PHOTOS"), ("--sweeps", "PATH")):
        if option in words:
            words[words.index(option) + 1] = shown
    hidden = dict[str, str]()
    hidden |= {word: f"{word.partition('=')[0]}=PATH" for word in getattr(args, "package", [])}
    path = Path(script).resolve()
    script = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    return shlex.join([*launcher, script, *(hidden.get(word, word) for word in words)])


class Document:
    """Results as they come, written to ``--output`` after each of them.

    Args:
        benchmark: its name.
        args: has ``output``; a file that is there is continued.
        device: of this machine.
        anew: replace the file instead.
    """

    def __init__(
        self, benchmark: str, args: argparse.Namespace, device: Device, *, anew: bool = False
    ) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        metadata = {"utc": now, "commands": [command(args)], **machine(device)}
        self._path = args.output
        self.content = {
            "benchmark": benchmark,
            "protocol": protocol.VERSION,
            "metadata": metadata,
            "results": [],
        }
        if not anew and self._path and self._path.exists():
            self._continue(json.loads(self._path.read_text()))

    def _continue(self, earlier: dict[str, Any]) -> None:
        then = earlier.get("metadata", {})
        now = self.content["metadata"]
        same = {**earlier, **then, "utc": 0, "commands": 0}
        differing = {
            key: (same.get(key), value)
            for key, value in {**self.content, **now, "utc": 0, "commands": 0}.items()
            if key not in ("metadata", "results") and same.get(key) != value
        }
        if differing:
            raise SystemExit(
                f"{self._path} is of another machine or version, where {differing} (there, here) "
                "differ: give --output another file"
            )
        then["commands"] += [c for c in now["commands"] if c not in then["commands"]]
        self.content = earlier

    def note_photos(self, name: str, facts: dict[str, Any]) -> None:
        """Keep what ``photos.photo_facts`` says; a name means the same photos in all of a file."""
        there = self.content.setdefault("photos", {}).setdefault(name, facts)
        if there["sha256"] != facts["sha256"]:
            raise SystemExit(f"--photos {name} are others than those of {self._path}")
        self.write()

    def is_done(self, what: dict[str, Any], number: int) -> bool:
        """Whether a column of a round need not be run: measured, skipped, or failed twice.

        Args:
            what: the keys by which its results are known, without the round.
            number: of the round.
        """
        there = [r for r in self.content["results"] if {**r, **what} == r]
        measured = any(r["round"] == number and "error" not in r for r in there)
        failed = sum("error" in r for r in there) >= 2
        return measured or failed or any("skipped" in r for r in there)

    def add(self, result: dict[str, Any]) -> None:
        if "error" in result:  # the whole of it is for the terminal
            print(result["error"], file=sys.stderr)
            result["error"] = (result["error"].strip().splitlines() or ["no output"])[-1]
        self.keep(result)
        print(_line(result), flush=True)

    def keep(self, result: dict[str, Any]) -> None:
        """Write a result that may not be complete yet; once more, as it has become."""
        if not any(result is kept for kept in self.content["results"]):
            self.content["results"].append(result)
        self.write()

    def write(self) -> None:
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.content, indent=1) + "\n")


class TimeLimit:
    """Ends a script before a process that may last as long as the longest so far ends too late.

    Args:
        seconds: from now on; None is no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._begin = time.monotonic()
        self._longest = 0.0

    def note(self, took: float) -> None:
        """A process took so many seconds."""
        self._longest = max(self._longest, took)

    def is_over(self) -> bool:
        """Whether no further process may be started; that is printed."""
        spent = time.monotonic() - self._begin
        over = self._seconds is not None and spent + self._longest > self._seconds
        if over:
            print(f"stopped after {spent:.0f} s: give the same command again to go on")
        return over


def measure_rounds(
    script: str,
    document: Document,
    rounds: Iterable[tuple[int, dict[str, Any], dict[str, Any]]],
    *,
    device: Device,
    args: argparse.Namespace,
) -> None:
    """Run what a file does not have yet, each in a process of its own, until the time is over.

    Args:
        script: whose ``measure`` runs, called with the task.
        document: gets the results.
        rounds: the number of a round, the keys by which a column's results are known, and the task.
        device: where it runs.
        args: has ``stop_after``, the seconds for all of it, and ``timeout``, those for one process.
    """
    limit = TimeLimit(args.stop_after)
    for number, what, task in rounds:
        if document.is_done(what, number):
            continue
        if limit.is_over():
            break
        started = time.monotonic()
        found = run_child(script, task, device=device, timeout=args.timeout)
        limit.note(time.monotonic() - started)
        document.add({**what, "round": number} | found)


def _line(result: dict[str, Any]) -> str:
    """One result on one line of the terminal."""
    words = []
    for key, value in result.items():
        if isinstance(value, str):
            words.append(value)
        elif isinstance(value, dict) and "median" in value:
            median = value["median"]
            worst = min(value["values"])
            words.append(f"{median:,.{0 if median >= 100 else 2}f} (least {worst:,.0f})")
        elif isinstance(value, float):
            words.append(f"{key} {value:,.3f}")
    return "  ".join(words)
