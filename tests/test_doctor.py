"""doctor is right where the cause is known, because the test has made it."""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image, ImageColor
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import gpuprefetch
from gpuprefetch import DataPrefetcher, EncodedImageFolder, RandomResizedCrop, doctor
from gpuprefetch.__main__ import main
from gpuprefetch.core.report import Lines, progress
from gpuprefetch.images import share
from gpuprefetch.images.decode import NvjpegDecoder
from gpuprefetch.insight import doctor as _doctor
from gpuprefetch.insight.machine import Gpu, described, driver_version

# Sleeps stand for disks and models: they take the same time on a busy machine.
pytestmark = pytest.mark.filterwarnings("ignore:.*worker processes:UserWarning")


class Slow(Dataset):
    """Samples that take their time, to compute or to wait for."""

    def __init__(self, seconds, compute=False):
        self.seconds, self.compute = seconds, compute

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.compute:
            end = time.thread_time() + self.seconds
            while time.thread_time() < end:
                pass
        else:
            time.sleep(self.seconds)
        return torch.zeros(3, 4, 4), index


class Disk(Slow):
    """One that serves a single reader at a time."""

    def __init__(self, seconds, context):
        super().__init__(seconds)
        self.lock = context.Lock()

    def __getitems__(self, indices):
        with self.lock:
            return [self[index] for index in indices]


def sleep(seconds):
    def step(batch):
        assert batch[0].shape == (4, 3, 4, 4)
        time.sleep(seconds)

    return step


def loader_of(dataset, workers=1, **options):
    return DataLoader(dataset, batch_size=4, num_workers=workers, **options)


@pytest.fixture
def busy_machine(constants):
    """Tell runs apart only where the causes made here do: other processes make 10 % any time."""
    constants(_doctor, SMALL=1.5)


@pytest.mark.usefixtures("busy_machine")
def test_slow_disk():
    context = torch.multiprocessing.get_context("fork")
    loader = loader_of(Disk(0.01, context), multiprocessing_context=context)
    # Eight batches wait in the workers' queues: of a few more a busy machine makes twice the rate,
    # and one that stands still for half a second half of it.
    report = doctor(loader, sleep(0.001), device="cpu", seconds=1.2)
    assert report.bound == "reading"
    assert report.found.reading_share > 0.6  # a worker that waits for a core does not read
    assert report.changes == []
    assert [change.setting for change in report.tried] == ["num_workers=4"]
    assert "faster" in str(report)
    assert report.found.images_per_second < 0.2 * report.ceiling


@pytest.mark.usefixtures("busy_machine")
@pytest.mark.forks("a spawned worker starts too late for its times")
def test_too_few_workers():
    report = doctor(loader_of(Slow(0.02)), sleep(0.02), device="cpu", seconds=0.2)
    assert report.bound == "reading"
    assert report.changes[0].setting == "num_workers=4"
    assert report.changes[0].gain > 1.8  # 4 times the workers
    assert "num_workers=4" in str(report)


@pytest.mark.usefixtures("busy_machine")
def test_model_bound():
    # Not pinned: without a GPU there is nothing to pin for, and doctor does not ask for it.
    report = doctor(loader_of(Slow(0.0)), sleep(0.2), device="cpu", seconds=0.2)
    assert report.bound == "model"
    assert report.changes == report.tried == []
    assert report.found.images_per_second == pytest.approx(report.ceiling, rel=0.3)
    assert report.found.wait_ms < 60  # of 200
    assert "bound by the model" in str(report)


def report_that(holds, loader, step, seconds):
    """The first report that holds, or the third: other tests take the cores at times."""
    for _ in range(3):
        report = doctor(loader, step, device="cpu", seconds=seconds, tune=False)
        if holds(report):
            break
    return report


@pytest.mark.parametrize(
    ("wrap", "workers"), [(lambda loader: loader, 0), (partial(DataPrefetcher, device="cpu"), 1)]
)
def test_computing_is_not_reading(wrap, workers):
    loader = wrap(loader_of(Slow(0.01, compute=True), workers))
    report = report_that(
        lambda report: report.bound == "CPU decode", loader, sleep(0.001), seconds=0.3
    )
    assert report.bound == "CPU decode"
    assert report.found.reading_share < 0.5
    assert json.loads(json.dumps(report.as_dict()))["found"]["bound"] == "CPU decode"


def test_the_ceiling_is_of_a_full_batch():
    batches = [[0, 1, 2, 3], *[[4]] * 20]  # the last one of an epoch is a small one
    loader = DataLoader(Slow(0.001), batch_sampler=batches)
    report = doctor(loader, lambda batch: None, device="cpu", seconds=0.2, tune=False)
    assert "batches of 4" in report.where


@pytest.mark.parametrize("slow", [False, True])
def test_a_loop_above_its_ceiling_is_to_be_measured_again(slow):
    latest = []

    def step(batch):
        labels = batch[1].tolist()
        time.sleep(0.05 if slow and labels == latest else 0.01)
        latest[:] = labels

    def told(report):
        return sum("seconds=0.3 or --seconds 0.3" in note for note in report.notes)

    loader = loader_of(Slow(0.0), 0)
    report = report_that(lambda report: told(report) == slow, loader, step, seconds=0.1)
    assert told(report) == slow


@pytest.mark.parametrize("collate", [None, lambda samples: default_collate(samples)[0]])
def test_patches_count_as_the_images_they_are_of(photo_folder, collate):
    patches = [v2.Resize((56, 56)), v2.ToDtype(torch.float32, scale=True), gpuprefetch.Patches()]
    loader = DataLoader(EncodedImageFolder(photo_folder), batch_size=4, collate_fn=collate)
    loader = DataPrefetcher(loader, transforms=patches, device="cpu")
    report = doctor(loader, len, seconds=0.01, tune=False)
    assert "batches of 4," in report.where


@pytest.mark.parametrize(
    ("loader", "step", "options", "error"),
    [
        (Slow(0.0), print, {}, "takes a DataLoader"),
        (loader_of(Slow(0.0)), None, {}, "must be callable"),
        (loader_of(Slow(0.0)), print, {"seconds": 0}, "must be positive"),
        (loader_of([], 0), print, {"seconds": 0.1}, "no batch"),
    ],
)
def test_bad_arguments(loader, step, options, error):
    with pytest.raises((TypeError, ValueError), match=error):
        doctor(loader, step, device="cpu", **options)


def test_command_line(photo_folder, tmp_path, capsys):
    options = "--model squeezenet1_1 --batch-size 4 --workers 1 --size 64 --seconds 0.05 --no-tune"
    arguments = ["doctor", str(photo_folder), *options.split(), "--device", "cpu"]
    assert main([*arguments, "--picture", str(tmp_path / "time.png")]) == 0
    assert (tmp_path / "time.png").stat().st_size > 1000
    text = capsys.readouterr().out
    assert "verdict: bound by" in text and ", 1 worker, " in text
    assert "of an image, in the workers: " in text
    assert "that helps" not in text
    assert main([*arguments, "--loader", "gpuprefetch", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ceiling"] > 0 and "decoded by the CPU" in report["notes"][-1]


def test_the_command_line_says_what_is_wrong_in_a_line(photo_folder, tmp_path, capsys, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "bad.jpg").write_bytes(b"no picture")
    bad = [str(tmp_path), "--device", "cpu", "--workers", "0", "--batch-size", "1"]
    for arguments, text in (
        ([str(photo_folder), "--model", "resnet1"], "such as resnet50, got 'resnet1'"),
        ([str(photo_folder), "--model", "ssd300_vgg16"], "takes a classification model"),
        ([str(photo_folder / "none")], "No such file"),
        (bad, r"a/bad.jpg: cannot identify image file"),
    ):
        assert main(["doctor", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("python -m gpuprefetch: ") and text in line

    for error, code, text in (
        (KeyboardInterrupt(), 130, "interrupted"),
        (torch.OutOfMemoryError("CUDA out of memory."), 2, "CUDA out of memory."),
    ):
        monkeypatch.setattr(gpuprefetch, "selfcheck", Mock(side_effect=error))
        assert main(["selfcheck"]) == code
        assert capsys.readouterr().err == f"python -m gpuprefetch: {text}\n"
    with pytest.raises(SystemExit, match="2"):
        main(["nothing"])
    assert "invalid choice" in capsys.readouterr().err


def test_version_has_what_a_report_needs(capsys):
    assert main(["--version"]) == 0
    versions, cores, *devices = capsys.readouterr().out.splitlines()
    assert versions.startswith(f"gpuprefetch {gpuprefetch.__version__} (torch 2.")
    assert f"{share.usable_cores()} usable cores, NVIDIA driver " in cores
    count = torch.cuda.device_count()
    assert len(devices) == max(count, 1)
    assert all(", decode by " in line for line in devices) or not count


class Driver:
    """NVML, as far as it is called, of a machine with a driver, or where the driver fails."""

    def __init__(self, status=0):
        self.status = status

    def nvmlInit_v2(self):
        return self.status

    def nvmlSystemGetDriverVersion(self, text, length):
        text.value = b"580.95.05"
        return self.status


def test_version_names_each_gpu_and_what_decodes_there():
    gpus = [Gpu("NVIDIA H100", "nvJPEG's 7 JPEG engines"), Gpu("Old", "the workers: no nvJPEG")]
    assert described(16, driver_version(Driver()), gpus).splitlines() == [
        "16 usable cores, NVIDIA driver 580.95.05",
        "cuda:0 NVIDIA H100, decode by nvJPEG's 7 JPEG engines",
        "cuda:1 Old, decode by the workers: no nvJPEG",
    ]
    assert driver_version(Driver(status=9)) is None


def test_without_a_command_it_prints_help(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    for command in ("doctor", "preview", "parity", "check", "selfcheck"):
        assert f"\n    {command}" in printed


def test_on_a_cpu_the_command_takes_what_a_cpu_can_train(photo_folder, capsys, monkeypatch):
    made = []

    def small(name):
        made.append(name)
        return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())

    monkeypatch.setattr(torchvision.models, "get_model", small)
    options = ["--device", "cpu", "--seconds", "0.01", "--no-tune", "--size", "8", "--workers", "0"]
    monkeypatch.setattr(torch.optim, "SGD", Mock())
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", lambda logits, _: Mock())
    assert main(["doctor", str(photo_folder), *options]) == 0
    assert made == ["resnet18"]
    assert "batches of 24" in capsys.readouterr().out  # all there are, fewer than 32


@pytest.mark.usefixtures("busy_machine")
def test_a_loader_over_files_has_a_column_of_accelerate(photo_folder):
    ops = [v2.RandomResizedCrop(16), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    folder = ImageFolder(photo_folder, v2.Compose(ops))

    def step(batch):
        assert batch[0].shape == (4, 3, 16, 16)
        time.sleep(0.002)

    report = doctor(DataLoader(folder, batch_size=4), step, device="cpu", seconds=0.1)
    assert report.moved.images_per_second > 0
    header = next(line for line in str(report).splitlines() if "as it is" in line)
    assert header.split()[-1] == "accelerate"
    names = [change.setting for change in [*report.changes, *report.tried]]
    assert "accelerate(loader)" in names
    assert json.loads(json.dumps(report.as_dict()))["moved"]["step_ms"] == report.moved.step_ms


@pytest.mark.parametrize(
    ("bound", "gain", "makes"),
    [("CPU decode", 1.3, 1), ("CPU decode", 1.05, 0), ("model", 1.3, 0)],
)
def test_a_change_is_to_be_made_if_it_helps_and_a_faster_loader_can(bound, gain, makes):
    tried = [_doctor.Change("accelerate(loader)", 100.0 * gain, gain)]
    assert _doctor.number_to_make(bound, tried) == makes
    assert _doctor.number_to_make(bound, []) == 0


def test_no_loop_is_faster_than_the_step_alone():
    faster = [_doctor.Change("accelerate(loader)", 130.0, 1.3)]
    assert _doctor.is_doubtful(100.0, 98.0, faster)
    assert _doctor.is_doubtful(100.0, 120.0, [])
    assert not _doctor.is_doubtful(140.0, 100.0, faster)


def test_the_picture_has_the_time_of_each_thread(tmp_path):
    found = _doctor.Diagnosis("CPU decode", 400.0, 500.0, 10.0, 6.0, 0.0, 0.25)
    moved = _doctor.Diagnosis("model", 1000.0, 2000.0, 4.0, 0.0, 0.0, 0.0)
    changes = [_doctor.Change("accelerate(loader)", 1000.0, 2.5)]
    report = _doctor.DoctorReport(found, 1000.0, changes, [], moved, [], "4 workers, cpu", 4)
    report.picture(tmp_path / "time.png")
    with Image.open(tmp_path / "time.png") as picture:
        pixels = np.asarray(picture)
    # Of 876 pixels for 10 ms: the loop waits for 6 and computes for 4, the workers need 8 of which
    # they idle for 2; then all 4 are the step, and the workers need 2.
    widths = {}
    for color in ("#ff9500", "#34c759", "#0a84ff", "#d0d0d0"):
        same = (pixels == ImageColor.getrgb(color)).all(2)
        rows = same.sum(1)
        widths[color] = sorted({count for count in rows.tolist() if count > 20})
    assert widths["#ff9500"] == pytest.approx([0.6 * 876], abs=2)
    assert widths["#34c759"] == pytest.approx([0.4 * 876], abs=2)
    assert widths["#0a84ff"] == pytest.approx([0.2 * 876, 0.6 * 876], abs=2)
    assert widths["#d0d0d0"] == pytest.approx([0.2 * 876], abs=2)


def test_slow_loops_have_digits_to_compare():
    found = _doctor.Diagnosis("model", 2.13, 53.2, 12_562.3, 32.7, 0.0, 0.0)
    tried = [_doctor.Change("accelerate(loader)", 1.62, 0.76)]
    text = str(_doctor.DoctorReport(found, 2.25, [], tried, None, [], "2 workers, cpu", 2))
    assert "ceiling of 2.25 images/s" in text
    assert "2.13 " in text and "1.62 " in text and "53.2 " in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("preview --samples 0", "--samples: takes a whole number, 1 or more, got '0'"),
        ("preview --draws 1.5", "--draws: takes a whole number, 1 or more, got '1.5'"),
        ("parity --count -2", "--count: takes a whole number, 1 or more, got '-2'"),
        ("doctor --workers -1", "--workers: takes a whole number, 0 or more, got '-1'"),
        ("doctor --batch-size 0", "--batch-size: takes a whole number, 1 or more"),
        ("doctor --seconds nan", "--seconds: takes a number of seconds above 0, got 'nan'"),
        ("doctor --seconds inf", "--seconds: takes a number of seconds above 0, got 'inf'"),
    ],
)
def test_the_command_line_names_the_option_that_is_wrong(words, message, capsys):
    command, *options = words.split()
    with pytest.raises(SystemExit) as error:
        main([command, "DATA", *options])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("full", [False, True])
def test_an_output_that_cannot_be_written(full, monkeypatch, capsys):
    if full:
        sink = Path("/dev/full").open("w")
    else:
        reading, writing = os.pipe()
        os.close(reading)
        sink = os.fdopen(writing, "w")
    monkeypatch.setattr(sys, "stdout", sink)
    assert main(["--version"]) == (2 if full else 0)
    sink.close()  # as Python does when it ends: no second error
    told = capsys.readouterr().err
    assert told == "" or "the result cannot be printed: [Errno 28]" in told
    assert bool(told) == full


def test_a_loader_that_cannot_move_is_told_why():
    report = doctor(loader_of(Slow(0.0), 0), sleep(0.01), device="cpu", seconds=0.05)
    assert report.moved is None
    assert not any(line.endswith("accelerate") for line in str(report).splitlines())
    assert any(note.startswith("accelerate(loader) could not be") for note in report.notes)


def test_without_a_terminal_there_is_a_line_now_and_then(capsys):
    now = 0.0
    lines = Lines("doctor", 3, clock=lambda: now)
    for now in (4.0, 9.0, 11.0, 12.0, 20.0, 22.0):
        lines.set_description_str(f"doctor: at {now:.0f} s")
        lines.update(now == 9.0)
    printed = capsys.readouterr().err.splitlines()
    assert printed == ["doctor: at 11 s: 1 of 3", "doctor: at 22 s: 1 of 3"]


def test_a_containers_quota_counts(tmp_path, constants):
    quota = tmp_path / "cpu.max"
    constants(share, QUOTA=quota)
    cores = share.usable_cores()
    for text, count in (("150000 100000", 1), ("max 100000", cores)):
        quota.write_text(text)
        assert share.usable_cores() == count


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_for_a_terminal(monkeypatch, capsys, terminal, installed):
    if not installed:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with progress("parity", 4) as bar:
        bar.update(bar.total)
    assert ("4/4" in capsys.readouterr().err) == (terminal and installed)


# Milliseconds of a batch: of the loader alone, of the step alone, of the loop, of them waiting, and
# of a copy; and what share of the workers' time is reading.
@pytest.mark.parametrize(
    ("alone", "ceiling", "loop", "wait", "copy", "reading", "bound"),
    [
        (110, 55, 110, 81, 1, 0.97, "reading"),
        (962, 54, 1026, 994, 3, 0.0, "CPU decode"),
        (13, 55, 56, 0, 1, 0.0, "model"),
        (15, 55, 79, 17, 21, 0.0, "transfer"),  # in next(), but not for its workers
        (70, 55, 79, 17, 1, 0.0, "CPU decode"),
        (15, 55, 79, 2, 1, 0.0, "cores"),  # the step lacks them
    ],
)
def test_what_the_numbers_say(alone, ceiling, loop, wait, copy, reading, bound):
    alone, ceiling, loop = (
        _doctor.Run(1.0, milliseconds / 1e3, waited / 1e3, reading)
        for milliseconds, waited in ((alone, 0), (ceiling, 0), (loop, wait))
    )
    facts = {"copying": copy / 1e3, "workers": 1, "stats": None}
    assert _doctor.bound_of(alone, ceiling, loop, cuda=True, **facts) == bound
    on_cpu = _doctor.bound_of(alone, ceiling, loop, cuda=False, **facts)
    assert on_cpu == ("cores" if bound == "transfer" else bound)


@pytest.mark.alone  # beside others, pinning gained nothing once
@pytest.mark.gpu
def test_unpinned():
    # A copy takes 2 ms from pinned memory and 10 or more from pageable, next to a step of 20 ms.
    batches = [torch.zeros(128, 3, 224, 224)] * 1000  # of 77 MB each
    loader = DataLoader(batches, batch_size=None, num_workers=6)
    report = doctor(loader, lambda images: torch.cuda._sleep(36_000_000), seconds=1.0)
    assert report.bound == "transfer"
    assert report.changes[0].setting == "pin_memory=True"
    assert report.changes[0].gain > 1.1


@pytest.mark.alone
@pytest.mark.gpu
def test_model_bound_on_the_gpu(photo_folder):
    dataset = EncodedImageFolder(photo_folder)
    loader = DataLoader(dataset, batch_size=8, num_workers=2, pin_memory=True)
    prefetcher = DataPrefetcher(loader, transforms=[RandomResizedCrop(64)])
    report = doctor(prefetcher, lambda batch: torch.cuda._sleep(180_000_000), seconds=1.0)
    assert report.bound == "model"
    assert report.found.wait_ms < 50  # of 100


class Engines(NvjpegDecoder):
    words = "7 JPEG engines"


@pytest.mark.parametrize("bound", ["GPU decode", "model"])
@pytest.mark.parametrize("handle", [0, 7])
def test_a_step_on_the_default_stream(photo_folder, monkeypatch, bound, handle):
    found = _doctor.Diagnosis(bound, 100.0, 200.0, 40.0, 1.0, 0.0, 0.5)
    clinic = _doctor._Clinic(sleep(0), torch.device("cuda", 1), 0.1, None)
    devices = []

    def current_stream(device):
        devices.append(device)
        return SimpleNamespace(cuda_stream=handle)

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    folder = loader_of(EncodedImageFolder(photo_folder))
    crop = [RandomResizedCrop((8, 8))]
    loader = DataPrefetcher(
        folder, device="cpu", decoder=Engines(torch.device("cpu")), transforms=crop
    )
    clinic._note(loader, found, 4)
    assert "encoded images are decoded by 7 JPEG engines" in clinic.notes
    assert any("set_stream" in note for note in clinic.notes) == (
        bound == "GPU decode" and not handle
    )
    assert set(devices) <= {clinic.device}
