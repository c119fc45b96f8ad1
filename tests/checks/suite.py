"""Run the test suite, each file in a process of its own, and write what came of it.

    python tests/checks/suite.py                     # on a GPU: benchmarks/results/suite-h100.json
    python tests/checks/suite.py --cpu               # benchmarks/results/suite-cpu.json
    python tests/checks/suite.py --only test_resume  # some files; --go-on keeps the others' results

``--jobs`` files run at a time, and those first that took longest in earlier runs. Tests that are
marked ``alone`` go by times: they run after all others, a file at a time. Where there are several
GPUs the files take turns with the first one, and all are visible to each. A missing GPU is an
error, as in CONTRIBUTING.md. A file whose process ends without a report has failed, and so has one
without a test. The exit code tells whether a test failed. A run that is cut short leaves a summary
that names the files without a result.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench import TESTS, harness, table

COUNTS = ("passed", "failed", "skipped")
NOTHING_COLLECTED = 5  # pytest's exit code
KEPT = 20  # names of failed tests and reasons of skipped ones, of a file

Result = dict[str, Any]


@dataclass
class Report:
    """What one run of pytest on a file says."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)  # of skipped tests
    seconds: float = 0.0

    def merge(self, other: "Report") -> None:
        self.counts.update(other.counts)
        self.failures += other.failures
        self.reasons.update(other.reasons)
        self.seconds += other.seconds

    def as_result(self, file: str) -> Result:
        counts = {name: self.counts[name] for name in COUNTS}
        if not sum(counts.values()):
            counts["failed"] = 1
            self.failures.append("no test was found")
        return {
            "file": file,
            **counts,
            "seconds": round(self.seconds, 1),
            "failures": self.failures[:KEPT],
            "reasons": dict(self.reasons.most_common(KEPT)),
        }


def read(path: Path) -> Report:
    """The report that pytest wrote as JUnit's XML."""
    report = Report()
    for case in ElementTree.parse(path).iter("testcase"):
        outcome = "passed"
        for part in case:
            if part.tag in ("failure", "error"):
                outcome = "failed"
                message = without_paths(part.get("message", ""))[:200]
                report.failures.append(f"{case.get('name')}: {message}")
            elif part.tag == "skipped":
                outcome = "skipped"
                report.reasons[part.get("message", "")[:120]] += 1
        report.counts[outcome] += 1
    return report


def without_paths(message: str) -> str:
    """A message without the temporary folders that it names, which are of one machine."""
    return re.sub(re.escape(tempfile.gettempdir()) + r"[^\s'\"),]*", "PATH", message)


def environment(args: argparse.Namespace, number: int) -> dict[str, str]:
    """Of a test process: its share of the cores, and the GPUs or none.

    Each file of another ``number`` has another GPU as its first one.
    """
    threads = max(harness.cores() // args.jobs, 1)
    variables = {"OMP_NUM_THREADS": str(threads)} | dict(os.environ)
    paths = [str(harness.ROOT), variables.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    variables.pop("GPUPREFETCH_REQUIRE_CUDA", None)
    if args.cpu:
        return variables | {"CUDA_VISIBLE_DEVICES": ""}
    gpus = harness.visible_gpus()
    turn = number % max(len(gpus), 1)
    in_turn = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[turn:] + gpus[:turn])} if gpus else {}
    return variables | in_turn | {"GPUPREFETCH_REQUIRE_CUDA": "1"}


def run(file: Path, marker: str, args: argparse.Namespace, number: int = 0) -> Report:
    """The tests of a file that have a marker, or have not: ``alone`` or ``not alone``."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
        command += ["-m", marker, f"--junitxml={xml}"]
        options: dict[str, Any] = {"capture_output": True, "text": True, "cwd": harness.ROOT}
        try:
            done = subprocess.run(
                command,
                env=environment(args, number),
                timeout=args.timeout,
                check=False,
                **options,
            )
            ending = f"exit code {done.returncode}"
            lines = (done.stdout + done.stderr).strip().splitlines()[-3:]
        except subprocess.TimeoutExpired:
            done = None
            ending = f"no end after {args.timeout:.0f} s"
            lines = []
        report = read(xml) if xml.exists() else Report()
    report.seconds = time.monotonic() - started
    known = (0, NOTHING_COLLECTED)
    if done is None or (done.returncode not in known and not report.counts["failed"]):
        report.counts["failed"] += 1
        report.failures.append(without_paths(" | ".join([ending, *lines]))[:600])
    return report


def has_alone(file: Path) -> bool:
    return "mark.alone" in file.read_text()


def suite(args: argparse.Namespace, document: Any) -> None:
    """The result of every file and their summary, written as they come."""
    files = chosen(args)
    print(f"{len(files)} files, {args.jobs} at a time", flush=True)
    reports: dict[Path, Report] = {}

    def tell(file: Path) -> None:
        result = reports[file].as_result(file.name)
        results = document.content["results"]
        results[:] = [other for other in results if other["file"] != file.name]
        document.content["summary"] = summary([*results, result], files)
        document.keep(result)
        counts = ", ".join(f"{result[name]} {name}" for name in COUNTS)
        print(f"{file.name:28} {counts}, {result['seconds']:.0f} s", flush=True)
        for failure in result["failures"]:
            print(f"    {failure}", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        running = {
            pool.submit(run, file, "not alone", args, number): file
            for number, file in enumerate(files)
        }
        for future in as_completed(running):
            file = running[future]
            reports[file] = future.result()
            if not has_alone(file):
                tell(file)
    for file in filter(has_alone, files):
        reports[file].merge(run(file, "alone", args))
        tell(file)


def took(results: Path = table.RESULTS) -> dict[str, float]:
    """Test file -> the most seconds that it took in a committed run of the suite on a GPU."""
    seconds: dict[str, float] = {}
    for path in results.glob("suite-h*.json"):
        for result in json.loads(path.read_text())["results"]:
            name = result["file"]
            seconds[name] = max(seconds.get(name, 0.0), result["seconds"])
    return seconds


def chosen(args: argparse.Namespace) -> list[Path]:
    """The files to run, the slowest first; before them those that have never ended, by size."""
    seconds = took()

    def rank(file: Path) -> tuple[float, int]:
        return -seconds.get(file.name, float("inf")), -file.stat().st_size

    found = sorted(args.tests.glob("test_*.py"), key=rank)
    files = [file for file in found if not args.only or file.stem in args.only]
    if not files or len(files) < len(args.only):
        raise SystemExit(f"no such test files: {', '.join(args.only) or args.tests}")
    return files


def summary(results: Sequence[Result], files: Sequence[Path]) -> Result:
    """Counts of all results, and which of the files have none yet."""
    found = Counter[str]()
    for result in results:
        found.update({name: result[name] for name in COUNTS})
    there = {result["file"] for result in results}
    missing = sorted(file.name for file in files if file.name not in there)
    return {"files": len(results), **{name: found[name] for name in COUNTS}, "missing": missing}


def name_of(gpu: str | None) -> str:
    """Of the hardware, in a file's name: h100 for NVIDIA H100 80GB HBM3."""
    words = (gpu or "cpu").lower().split()
    return next((word for word in words if any(c.isdigit() for c in word)), words[-1])


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = harness.output_parser(__doc__)
    parser.add_argument("--cpu", action="store_true", help="without a GPU")
    parser.add_argument("--jobs", type=int, default=min(max(harness.cores() // 2, 1), 8))
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds, of one file")
    parser.add_argument("--only", nargs="*", default=[], help="names of files, without .py")
    parser.add_argument("--go-on", action="store_true", help="keep results of other files")
    parser.add_argument("--tests", type=Path, default=TESTS, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """What to exit with."""
    args = parse(words)
    device = harness.Device(used=not args.cpu)
    gpu = device.facts()["gpu"]
    args.output = args.output or table.RESULTS / f"suite-{name_of(gpu)}.json"
    document = harness.Document("suite", args, device, anew=not args.go_on)
    metadata = document.content["metadata"]
    document.content["dirty"] = metadata.get("dirty", str(metadata["commit"]).endswith("-dirty"))
    suite(args, document)
    print(document.content["summary"])
    return int(bool(document.content["summary"]["failed"]))


if __name__ == "__main__":
    sys.exit(main())
