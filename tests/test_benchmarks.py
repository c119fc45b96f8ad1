"""The benchmark scripts run, at tiny size and on the CPU; what pages say of results is fresh."""

import importlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import children
import numpy as np
import pytest
import torch
from fakes import until
from PIL import Image

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"

VERSIONS = {"torch": "2.11.0", "torchcodec": "0.17.0"}

pytestmark = pytest.mark.usefixtures("scripts")


class Script:
    """A benchmark or a check, imported where a test uses it: the examples have a train.py too."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        return getattr(importlib.import_module(self._name), name)


clock, harness, loaders, photos, train = map(Script, "clock harness loaders photos train".split())
kernel, memory, policy, scaling, sizes, views = map(
    Script, "kernel memory policy scaling sizes views".split()
)
correctness, parity, table = map(Script, ("correctness", "parity", "table"))
facts, protocol, stamp, sweep = map(Script, ("facts", "protocol", "stamp", "sweep"))
cells, quotes = map(Script, ("cells", "quotes"))
detector, processors = map(Script, ("detector", "processors"))


@pytest.fixture
def settings():
    folder = photos.photo_folder(photos.drawn(), 24)
    return loaders.Settings(str(folder), batch_size=4, workers=0, size=32, device="cpu")


def document(path):
    return json.loads(path.read_text())


@pytest.fixture
def train_main(monkeypatch, tmp_path):
    """Runs train.py with some words; returns its results."""

    def main(*words):
        output = tmp_path / "train.json"
        words = ["--tiny", "--models", "none", "--output", str(output), *words]
        monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "train.py"), *words])
        train.main()
        return document(output)

    return main


@pytest.fixture
def in_this_process(monkeypatch):
    """Measure here: a child would import torch for seconds."""

    def run_child(script, task, **options):
        return importlib.import_module(Path(script).stem).measure(**task)

    monkeypatch.setattr("harness.run_child", run_child)


def test_train(train_main, in_this_process):
    found = train_main("--columns", "gpuprefetch", "--rounds", "1", "--most-rounds", "1")
    assert found["protocol"] == protocol.VERSION
    metadata = found["metadata"]
    assert metadata["versions"]["torch"] and metadata["kernel"] and metadata["commit"]
    known = [metadata[name] is not None for name in ("gpu", "gpu_uuid_hash", "power_limit_w")]
    assert set(known) == {facts.Device().facts()["gpu"] is not None}
    assert found["photos"]["sample"]["distinct"] == 6
    ours, twin = found["results"]
    assert twin["column"] == protocol.TWIN
    assert (ours["column"], ours["round"], ours["loop"]) == ("gpuprefetch", 0, "step")
    assert ours["images_per_second"]["median"] > 0
    assert ours["first_batch"]["shape"] == [4, 3, 32, 32]
    assert ours["first_batch"]["dtype"] == "torch.bfloat16"


def test_a_child_says_what_it_measured_or_why_it_failed(tmp_path):
    def run(code, **options):
        script = tmp_path / "script.py"
        script.write_text(code)
        return harness.run_child(str(script), {"a": 1}, device=harness.Device(), **options)

    code = "import harness; harness.child_main(lambda **task: task)"
    assert run(code, package=BENCHMARKS)["a"] == 1
    assert run("raise ValueError('so')")["error"].endswith("ValueError: so\n")
    code = "import time; time.sleep(100)"
    assert "no result after 0.1 s" in run(code, timeout=0.1)["error"]


class SlowToFree:
    """A GPU whose memory is free a while after the process that had it has ended."""

    def __init__(self, used):
        self.used = used  # what its driver says, in turn

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        return 0

    nvmlDeviceGetHandleByUUID = nvmlDeviceGetHandleByIndex_v2

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj[2] = self.used.pop(0)
        return 0


@pytest.mark.parametrize(("seconds", "read"), [(10.0, 4), (0.0, 1)])
def test_memory_of_a_child_is_free_before_the_next_one_begins(monkeypatch, seconds, read):
    monkeypatch.setattr("facts.FREED_SECONDS", seconds)
    used = [9, 9, 9, 3, 2]
    gpu = SlowToFree([*used])
    facts.Device(gpu).wait_until_freed(3)
    assert len(used) - len(gpu.used) == read


@pytest.fixture
def ran(monkeypatch):
    """What is run in place of children, as (loader, package); ``rates`` has a list for each."""
    found = SimpleNamespace(tasks=[], rates={}, results={})

    def run_child(script, task, *, environment, package, **options):
        loader = task["column"]
        assert environment == loaders.ENVIRONMENT.get(loaders.parse(loader)[0])
        found.tasks.append((loader, str(package)))
        if loader in found.results:
            return dict(found.results[loader])
        if len(found.tasks) == found.rates.get("fails"):
            return {"error": "so"}
        rates = found.rates.get(loader, [100.0])
        rate = rates[min(sum(name == loader for name, _ in found.tasks), len(rates)) - 1]
        return {"loops": {"step": {"images_per_second": {"median": rate, "values": [rate]}}}}

    monkeypatch.setattr("harness.run_child", run_child)
    return found


def test_columns_take_turns_and_a_file_is_continued(train_main, ran, monkeypatch, tmp_path):
    ran.rates["fails"] = 5
    words = ["--columns", "gpuprefetch", "dali", "--most-rounds", "2"]
    twin = protocol.TWIN
    found = train_main(*words)
    turns = ["gpuprefetch", "dali", twin, twin, "dali", "gpuprefetch"]
    assert [r["column"] for r in found["results"]] == turns
    assert [name for name, _ in ran.tasks] == [protocol.loader_of(name) for name in turns]
    assert [r["place"] for r in found["results"]] == [0, 1, 2, 0, 1, 2]
    found = train_main(*words, "--package", f"old={tmp_path}")
    old = ("gpuprefetch", str(tmp_path))
    assert ran.tasks[6:] == [old, old, ("dali", str(ROOT))]  # what is new, and the one that failed
    rest = [(r["column"], r["round"]) for r in found["results"][6:]]
    assert rest == [("old: gpuprefetch", 0), ("old: gpuprefetch", 1), ("dali", 1)]
    assert found["results"][6]["checkout"] == {"commit": None, "changed": [], "dirty": False}
    first, second = found["metadata"]["commands"]
    assert first.startswith("python benchmarks/train.py --tiny")
    assert second.endswith("--package old=PATH")
    monkeypatch.setattr("harness.machine", lambda device: {"gpu": "another"})
    with pytest.raises(SystemExit, match="is of another machine or version"):
        train_main()


def test_rounds_go_on_until_the_cell_is_settled(train_main, ran):
    ran.rates["dali"] = [100.0, 110.0, 105.0, 105.0, 105.0]
    found = train_main("--columns", "dali", "timm")["results"]
    assert {r["round"] for r in found} == {0, 1, 2, 3, 4, 5}  # unsettled: 110 of six
    ran.tasks.clear()
    ran.rates["dali"] = [100.0, 101.0]
    found = train_main("--columns", "dali", "--workers", "2", "--batch-size", "2", "--policy", "ra")
    assert len(ran.tasks) == 2 * 3
    assert ran.tasks[1][0] == "dali:policy=ra"


def test_a_name_of_photos_stands_for_the_same_photos(train_main, ran, tmp_path):
    for name in ("a.jpg", "b.jpg"):
        shutil.copyfile(photos.found(photos.drawn())[0], tmp_path / name)
    words = ["--data", str(tmp_path), "--photos", "mine", "--columns", "dali"]
    found = train_main(*words)
    assert found["photos"]["mine"]["distinct"] == 2
    assert found["results"][0]["photos"] == "mine"
    assert "--data PHOTOS" in found["metadata"]["commands"][0]
    (tmp_path / "b.jpg").unlink()
    with pytest.raises(SystemExit, match="--photos mine are others than those of"):
        train_main(*words)


def test_what_is_not_installed_is_skipped_once_with_the_reason(train_main, ran):
    ran.results["spdl"] = {"skipped": "SPDL: none"}
    found = train_main("--columns", "spdl")["results"]
    assert [name for name, _ in ran.tasks].count("spdl") == 1
    assert [r["skipped"] for r in found if r["column"] == "spdl"] == ["SPDL: none"]


def test_it_stops_where_the_next_process_would_not_end_in_time(train_main, ran):
    train_main("--stop-after", "1e-9")
    assert ran.tasks == []
    words = ["--columns", "dali"]
    found = train_main(*words)
    assert len(found["results"]) == 6
    assert len(found["metadata"]["commands"]) == 2


def test_a_sweep_finds_the_setting_that_later_runs_use(train_main, ran, monkeypatch, tmp_path):
    monkeypatch.setattr("harness.cores", lambda: 8)
    fast = "dali:threads=4,prefetch_queue_depth=4,hw_decoder_load=0.65"
    ran.rates[fast] = [120.0]
    # The fastest of the first round is not the fastest of two.
    ran.rates["dali:threads=8,prefetch_queue_depth=2,hw_decoder_load=0.9"] = [130.0, 90.0]
    found = train_main("--sweep", "dali")
    assert found["benchmark"] == "sweep"
    first = [r["column"] for r in found["results"] if r["round"] == 0]
    assert len(first) == 8  # 2 numbers of threads: 16 are more than there are cores
    second = [r["column"] for r in found["results"] if r["round"] == 1]
    assert len(second) == sweep.FINALISTS and fast in second
    (tmp_path / "sweep-cpu.json").write_text(json.dumps(found))
    (tmp_path / "train.json").unlink()
    ran.tasks.clear()
    found = train_main("--columns", "dali", "--sweeps", str(tmp_path))
    assert found["metadata"]["commands"][0].endswith("--sweeps PATH")
    (control, *_) = [r["control"] for r in found["results"] if r["column"] == "dali"]
    assert (control["column"], control["file"]) == (fast, "sweep-cpu.json")
    assert control["exact"] and control["settings_tried"] == 8
    assert fast in [name for name, _ in ran.tasks]
    cell = found["results"][0] | {"model": "resnet50"}
    gpu = found["metadata"]["gpu"]
    assert not sweep.fastest(tmp_path, gpu, cell).exact
    assert sweep.fastest(tmp_path, gpu, cell | {"cores": 2}) is None  # all had more threads
    assert sweep.fastest(tmp_path, "another GPU", cell) is None
    begun = json.loads((tmp_path / "sweep-cpu.json").read_text())
    begun["results"] = [r for r in begun["results"] if r["round"] == 0]
    (tmp_path / "sweep-cpu.json").write_text(json.dumps(begun))
    assert sweep.fastest(tmp_path, gpu, cell) is None  # no setting has run twice
    grid = sweep.grid("none", 2)
    assert len(grid) == 6 and all("threads=2" in column for column in grid)


def test_a_column_of_a_model(settings):
    timing = {"loops": ["item"], "settle": (0, 0), "seconds": 0.02, "repeats": 1}
    cell = {"model": "squeezenet1_1", "mode": "eager", "epochs": 0, "engine": "auto"}
    cell |= {"stream": "own", "cold": False}
    shared = vars(settings) | {"workers": 1}
    result = train.measure(cell, "gpuprefetch", str(ROOT), shared, timing, time.time())
    assert result["first_batch"]["shape"] == [4, 3, 32, 32]
    assert result["loops"]["item"]["images_per_second"]["median"] > 0
    with pytest.raises(RuntimeError, match="gpuprefetch was imported from"):
        train.measure(cell, "gpuprefetch", "/elsewhere", shared, timing, time.time())
    cell, shared = cell | {"epochs": 3, "model": "none"}, shared | {"images": 12}
    result = train.measure(cell, "gpuprefetch", str(ROOT), shared, timing, time.time())
    found = result["loops"]["step"]
    assert found["images"] == 2 * 12  # the first epoch is left out
    assert found["between_epochs_ms"] > 0 and found["first_batch_seconds"] > 0
    assert len(found["epoch_seconds"]) == 2
    validation = {"column": "torchvision", "settings": shared | {"images": 6, "train": False}}
    cell |= {"model": "squeezenet1_1", "epochs": 2}
    result = train.measure(cell, "gpuprefetch", str(ROOT), shared, timing, time.time(), validation)
    found = result["loops"]["step"]
    assert found["images"] == 12 + 6 and found["validation_images"] == 6
    assert found["validation_seconds"][0] > 0
    cell |= {"model": "none", "epochs": 1, "cold": True}
    result = train.measure(cell, "gpuprefetch", str(ROOT), shared, timing, time.time())
    assert result["loops"]["step"]["images"] == 12  # the first epoch is the one that is measured
    assert train.measure(cell, "ffcv", str(ROOT), shared, timing, time.time())["skipped"]


def test_the_clock_of_a_first_epoch_starts_before_the_loader_is_made(settings, monkeypatch):
    """As a loader may read ahead from then on, and another starts its workers when iterated."""

    def late(given):
        time.sleep(0.3)
        return loaders.synthetic(given)

    monkeypatch.setitem(loaders.LOADERS, "late", late)
    cell = {"model": "none", "mode": "eager", "engine": "auto", "stream": "own"}
    for cold, epochs in ((True, 1), (False, 2)):
        cell |= {"cold": cold, "epochs": epochs}
        shared = vars(settings) | {"images": 12}
        result = train.measure(cell, "late", str(ROOT), shared, {}, time.time())
        (seconds,) = result["loops"]["step"]["epoch_seconds"]
        assert (seconds > 0.3) == cold
        assert result.get("clock_from") == (train.FROM_LOADER if cold else None)
    (named,) = train.cells(train.parse(["--tiny", "--cold", "--models", "none"]))
    named |= {"column": "late", "loop": "step"}
    files = f"first epoch of {named['files']:,} photos from the disk"
    title = cells.title(named | {"clock_from": train.FROM_LOADER}, named["cores"])
    assert title.endswith(files)
    assert cells.title(named, named["cores"]).endswith(f"{files}, loader made before")


def test_cells_and_columns(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: taken.append(cores))
    train.parse(["--tiny", "--cores", "1"])
    assert [len(cores) for cores in taken] == [1]
    words = "--tiny --models none resnet18 --modes eager graphs --engine none --photos large"
    args = train.parse([*words.split(), "--package", f"old={tmp_path}"])
    cells = train.cells(args)
    found = [(c["model"], c["mode"]) for c in cells]
    assert found == [("none", "eager"), ("resnet18", "eager"), ("resnet18", "graphs")]
    names = [[column.name for column in train.columns(args, cell)] for cell in cells]
    assert names[0] == [*train.COLUMNS[1:], protocol.TWIN, "old: gpuprefetch"]
    assert names[1] == ["synthetic", *names[0]]
    assert train.loader_of("dali", cells[0]) == "dali:hw_decoder_load=0.0"
    assert train.loader_of("dali:threads=4", cells[0]) == "dali:hw_decoder_load=0.0,threads=4"
    tuned = "dali:threads=16,prefetch_queue_depth=4"
    found = sweep.Fastest(tuned, "sweep-a.json", 1.0, "resnet18", "eager", 16, 12, True)
    assert train.loader_of("dali", cells[1], found).endswith("threads=16,prefetch_queue_depth=4")
    calls = train.loader_of("dali:dynamic=True", cells[1], found)  # has no pipeline's queue
    assert calls == "dali:hw_decoder_load=0.0,threads=16,dynamic=True"
    with pytest.raises(ValueError, match="unknown loader"):
        train.parse(["--tiny", "--columns", "dolly"])
    with pytest.raises(SystemExit):
        train.parse([])  # without photos
    for words in ("--epochs 1", "--validate 9"):
        with pytest.raises(SystemExit):
            train.parse(["--tiny", *words.split()])
    assert train.parse(["--tiny", "--cold"]).epochs == 1


TERMINATED = """
import os, sys, time
from pathlib import Path
import harness

if sys.argv[1] == "--child":
    Path(sys.argv[0]).with_suffix(".pid").write_text(str(os.getpid()))
    time.sleep(100)
run_child = harness.run_child if sys.argv[1] == "with" else harness.run_child.__wrapped__
run_child(__file__, {}, device=harness.Device())
"""


@pytest.mark.parametrize("handled", ["with", "without"])
def test_a_script_that_is_terminated_leaves_no_child(handled, tmp_path):
    script, noted = tmp_path / "script.py", tmp_path / "script.pid"
    script.write_text(TERMINATED)
    path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(script), handled]
    parent = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path})
    deadline = time.monotonic() + 30
    while not (noted.exists() and noted.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    child = int(noted.read_text())
    parent.terminate()
    parent.wait(30)
    if handled == "with":
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    else:
        os.kill(child, signal.SIGKILL)  # guards the test: the child is there without it


def test_scaling(tmp_path):
    output = tmp_path / "scaling-x1.json"
    scaling.main(["--tiny", "--models", "none", "--output", str(output)])
    results = document(output)["results"]
    assert [r["column"] for r in results] == ["synthetic", "gpuprefetch"]
    one = results[1]["images_per_second"]["median"]
    two = results[1] | {"processes": 2, "images_per_second": {"median": 1.5 * one}}
    found = table.scaling_table([*results, two])
    assert f"| {one:,.0f} (1.000) | {1.5 * one:,.0f} (0.750) |" in found
    again = two | {"round": 1, "images_per_second": {"median": 1.7 * one}}
    found = table.scaling_table([*results, two, again])
    both = f"{1.5 * one:,.0f} to {1.7 * one:,.0f}"
    assert f"| {one:,.0f} (1.000) | {1.6 * one:,.0f} (0.800), {both} |" in found
    scaling.main(["--tiny", "--models", "none", "--output", str(output)])
    assert document(output)["results"] == results  # all was done


def test_scaling_of_whole_epochs(tmp_path):
    output = tmp_path / "scaling.json"
    scaling.main(["--tiny", "--models", "none", "--epochs", "3", "--output", str(output)])
    resident, ours = document(output)["results"]
    assert ours["model"] == resident["model"]
    assert ours["model"].endswith("epochs of 24 photos a GPU")
    for result in (resident, ours):
        assert result["images"] == 2 * 24  # the first epoch is left out
        assert result["epochs"] == 3
        assert len(result["epoch_seconds"]) == 2
        assert {"edge_ms", "host_gib", "shared_gib"} <= result.keys()
    assert ours["stats"]["images"] == 3 * 24


def test_an_epoch_of_ranks_is_each_ones_share(settings, monkeypatch):
    numbers = range(24)
    monkeypatch.setattr("ranks.WORLD", 3)
    shares = []
    for rank in range(3):
        monkeypatch.setattr("ranks.RANK", rank)
        shares.append(list(loaders.sampler_of(numbers, replace(settings, images=8))))
    assert sorted(itertools.chain.from_iterable(shares)) == list(numbers)
    assert len(list(loaders.sampler_of(numbers, replace(settings, images=24)))) == 24  # not a share


def test_views(tmp_path, in_this_process):
    output = tmp_path / "views.json"
    views.main(["--tiny", "--output", str(output)])
    one, ten = document(output)["results"]
    assert one["views"] == [[4, 3, 32, 32]]
    assert ten["views"] == [[4, 3, 32, 32]] * 2 + [[4, 3, 13, 13]] * 8
    rates = [r["images_per_second"]["median"] for r in (one, ten)]
    assert f"{rates[1]:,.0f} ({rates[1] / rates[0]:.3f}) |" in table.views_table([one, ten])


def test_sizes(tmp_path, in_this_process):
    output = tmp_path / "sizes.json"
    columns = ["one size", "list", "padded", "torchvision", "detection", "patches"]
    sizes.main(["--tiny", "--output", str(output), "--columns", *columns])
    results = document(output)["results"]
    found = {r["column"]: r for r in results}
    assert list(found) == columns
    assert found["one size"]["pixels"] == 32 * 32
    assert 25 * 25 < found["list"]["pixels"] < 2 * 29 * 29
    assert found["list"]["resize"] == "RandomShortestSize([25, 27, 29])"
    assert found["torchvision"]["batch_size"] == 1 and found["list"]["batch_size"] == 4
    assert found["patches"]["pixels"] >= 56 * 56  # the least that SmartResize makes
    assert found["patches"]["first_batch"]["shape"][1] == 3 * 2 * 14 * 14
    assert {r["first_batch"]["dtype"] for r in results} == {"torch.float32"}
    one, listed = (found[name]["images_per_second"]["median"] for name in columns[:2])
    rows = table.sizes_table([{**r, "file": "a.json"} for r in results])
    assert f"| {listed:,.0f} (n = 1, no spread) | {listed / one:.2f} (n = 1, no spread) of " in rows


def test_sizes_goes_on_with_its_file(tmp_path, ran_sizes, capsys):
    words = ["--tiny", "--output", str(tmp_path / "sizes.json"), "--columns"]
    sizes.main([*words, "list", "--stop-after", "1e-9"])
    assert ran_sizes == [] and "give the same command again" in capsys.readouterr().out
    sizes.main([*words, "list", "padded"])
    sizes.main([*words, "one size", "list", "transformers: GPU"])
    sizes.main([*words, "transformers: GPU", "detection step: resident"])
    names = ["list", "padded", "one size", "transformers: GPU", "detection step: resident"]
    assert [task["column"] for task in ran_sizes] == names
    assert [task["settings"]["batch_size"] for task in ran_sizes] == [4, 4, 4, 1, 1]
    assert [task["model"] for task in ran_sizes] == ["none"] * 4 + [detector.MODELS[0]]
    results = [{**r, "file": "a.json"} for r in document(tmp_path / "sizes.json")["results"]]
    assert "Failed or skipped:\n\n- transformers: GPU, a.json: no such" in table.sizes_table(
        results
    )


@pytest.fixture
def ran_sizes(monkeypatch):
    """The tasks of what is run in place of children."""
    tasks = []

    def run_child(script, task, **options):
        tasks.append(task)
        if task["column"].startswith("transformers"):
            return {"skipped": "no such"}
        speed = {"median": 2.0, "values": [2.0]}
        found = {"images_per_second": speed, "cpu_seconds_per_1000_images": 1.0}
        return {**found, "pixels": 9, "resize": "Resize", "beside": ["one size"]}

    monkeypatch.setattr("harness.run_child", run_child)
    return tasks


def test_peers_of_patches_are_skipped_with_the_reason(settings, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for column in sizes.PROCESSORS:
        found = sizes.measure(column, "none", vars(settings), {})
        assert found["skipped"].startswith("transformers: ")


DECODES_WITH_TORCHVISION = pytest.mark.filterwarnings(
    "ignore:The image decoding and encoding capabilities of TorchVision:DeprecationWarning"
)


@pytest.fixture
def as_transformers(monkeypatch):
    """A package in transformers' place, whose processor makes one gray patch of each picture."""

    class Processor:
        def __init__(self, size, **options):
            assert size == {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}

        def __call__(self, images, return_tensors):
            assert all(image.dtype == torch.uint8 and image.ndim == 3 for image in images)
            values = torch.stack([image.float().mean().expand(1176) for image in images])
            grids = torch.ones(len(images), 3, dtype=torch.int64)
            return {"pixel_values": values, "image_grid_thw": grids}

    name = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
    parts = name.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), SimpleNamespace())
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(Qwen2VLImageProcessor=Processor))


@DECODES_WITH_TORCHVISION
@pytest.mark.parametrize("place", ["in_workers", "on_device"])
def test_a_processor_as_a_loader(place, settings, as_transformers):
    batches = getattr(processors, place)(settings)
    images, target = next(iter(batches))
    assert images.pixel_values.shape == (4, 1176) and target.shape == (4,)
    assert sizes.pixels_of(images) == 4 * 14 * 14
    assert batches.options["runs on"] == ("workers" if place == "in_workers" else "cpu")


@DECODES_WITH_TORCHVISION
def test_transformers_patches_are_ours(settings):
    pytest.importorskip("transformers")
    ordered = replace(settings, train=False, images=24)
    theirs = list(processors.in_workers(ordered))
    on_device = list(processors.on_device(ordered))
    ours = list(sizes.COLUMNS["patches"].build(ordered))
    for (want, target), (same, _), (got, labels) in zip(theirs, on_device, ours, strict=True):
        assert torch.equal(want.pixel_values, same.pixel_values)
        assert torch.equal(want.image_grid_thw, got.image_grid_thw)
        assert torch.equal(target, labels)
        assert want.pixel_values.dtype == got.pixel_values.dtype
        off = (want.pixel_values - got.pixel_values).abs().max()
        assert off <= 1.01 / 255 / min(loaders.STD)


def test_boxes_follow_their_photos(settings):
    """Both loaders give the same boxes where nothing is sampled but the flip, and no other."""
    ordered = replace(settings, train=False, images=24)
    arguments = (ordered, [32], 64)
    flipped = []
    for (images, targets), (moved, found) in zip(
        detector.torchvision(*arguments), detector.gpuprefetch(*arguments), strict=True
    ):
        for image, target, other, there in zip(images, targets, moved, found, strict=True):
            assert image.shape == other.shape and image.dtype == other.dtype
            assert torch.equal(target["labels"], there["labels"])
            mirrored = target["boxes"].clone()
            mirrored[:, [0, 2]] = image.shape[2] - target["boxes"][:, [2, 0]]
            same = [torch.allclose(b, there["boxes"]) for b in (target["boxes"], mirrored)]
            assert sum(same) == 1
            flipped.append(same[1])
            expected = image.flip(2) if same[1] else image
            assert (expected - other).abs().max() <= 1.01 / 255
    assert 0 < sum(flipped) < len(flipped)


def test_a_detector_trains_on_each_of_its_columns(settings):
    few = replace(settings, batch_size=1)
    model = "retinanet_resnet50_fpn"  # the fastest on a CPU
    step = detector.Step(model, "cpu")
    for build in (detector.resident, detector.torchvision, detector.gpuprefetch):
        images, targets = next(iter(build(few, [32], 64)))
        loss = step(images, targets)
        assert loss.isfinite() and loss > 0
    step.check()
    broken = [{**target, "boxes": target["boxes"] * torch.nan} for target in targets]
    step([image * torch.nan for image in images], [broken[0] | {"boxes": targets[0]["boxes"]}])
    with pytest.raises(RuntimeError, match="the detector's loss is nan"):
        step.check()


class QuickStep:
    """A step in a detector's place, which takes what detectors take."""

    checked = 0

    def __init__(self, model_name, device):
        assert (model_name, device) == ("fasterrcnn_resnet50_fpn", "cpu")

    def __call__(self, images, targets):
        (image,) = images
        (target,) = targets
        assert image.shape[0] == 3 and target["boxes"].shape[1] == 4
        return image.mean()

    def check(self):
        QuickStep.checked += 1


def test_a_detector_beside_its_ceiling(tmp_path, in_this_process, monkeypatch):
    monkeypatch.setattr("detector.RESIDENT", 2)
    monkeypatch.setattr("detector.Step", QuickStep)
    words = ["--tiny", "--output", str(tmp_path / "a.json")]
    words += ["--detection-model", "fasterrcnn_resnet50_fpn"]
    columns = [sizes.CEILING, "detection step: gpuprefetch", sizes.REFERENCE]
    sizes.main([*words, "--columns", *columns])
    results = [{**r, "file": "a.json"} for r in document(tmp_path / "a.json")["results"]]
    assert [r["column"] for r in results] == columns and QuickStep.checked == 3
    rates = [r["images_per_second"]["median"] for r in results]
    rows = table.sizes_table(results)
    of_ceiling = f"{rates[1] / rates[0]:.2f} (n = 1, no spread) of {columns[0]}"
    assert f"| {of_ceiling}, {rates[1] / rates[2]:.2f} (n = 1, no spread) of {columns[2]} |" in rows
    assert f"| {columns[1]}, `fasterrcnn_resnet50_fpn`: `RandomShortestSize([68, ..., 114]" in rows


def test_resident_batches_come_again(settings, monkeypatch):
    monkeypatch.setattr("detector.RESIDENT", 2)
    batches = iter(detector.resident(settings, [32], 64))
    first, second, again = (next(batches)[0] for _ in range(3))
    assert again is first and second is not first


def test_numbers_of_sizes_are_quoted():
    def result(column, rate, number, **more):
        speed = {"median": rate, "values": [rate]}
        row = {"column": column, "round": number, "batch_size": 4, "images_per_second": speed}
        return {**row, "cpu_seconds_per_1000_images": 0.5, "pixels": 9, **more}

    steps = [result("detection step: ours", 40.0, 0, model="retinanet")]
    alone = [result("list", 90.0, 0), result("list", 96.0, 1)]
    alone += [result("one size", 100.0, 0), result("one size", 100.0, 1)]
    documents = [machine("sizes-a.json", [*alone, *steps], "sizes")]
    text = """0.90 to 0.96<!-- = sizes-* | none | list / one size | times --> times as fast,
    93<!-- = sizes-a | none | list | images/s --> images/s,
    40<!-- = sizes-a | retinanet | detection step: ours | images/s --> images/s, and
    0.5<!-- = sizes-a | none | list | CPU seconds --> s"""
    assert quotes.problems(text, documents) == []
    for right, wrong in (("0.90", "0.91"), ("93<", "94<"), ("retina", "patina"), ("CPU", "GPU")):
        assert len(quotes.problems(text.replace(right, wrong), documents)) == 1


def test_a_row_of_a_file_is_quoted_by_what_it_has():
    rows = [{"kind": kind, "persistent": p, "edge_ms": ms} for kind, p, ms in ROWS]
    found = {"file": "edge-a.json", "benchmark": "edge", "results": rows}
    text = "costs {}<!-- = edge-a | kind=ahead, persistent=True | edge_ms | value --> ms"
    assert quotes.problems(text.format("11"), [found]) == []
    (wrong,) = quotes.problems(text.format("12"), [found])
    assert "the files have 11" in wrong
    (none,) = quotes.problems(text.replace("ahead", "else").format("11"), [found])
    assert "no result has these columns" in none


ROWS = [("ahead", True, 10.88), ("as ever", True, 71.2), ("ahead", False, 29.6)]


@pytest.fixture
def in_forked_children(monkeypatch):
    """Run the script as a child that has torch already: it changes the package for good."""

    def run_child(path, task, **options):
        options = {"forked": not torch.cuda.is_available(), "PYTHONPATH": str(BENCHMARKS)}
        options["whole"] = False
        child = children.Child(children.script(path), "--child", json.dumps(task), **options)
        out, err = child.communicate()
        assert harness.RESULT in out, err
        return json.loads(out.partition(harness.RESULT)[2])

    monkeypatch.setattr("harness.run_child", run_child)


def test_edge(tmp_path, monkeypatch, in_forked_children):
    edge = importlib.import_module("edge")
    monkeypatch.setattr(edge, "COLUMNS", edge.COLUMNS[-1:])  # each is a process
    output = tmp_path / "a.json"
    edge.main(["--tiny", "--output", str(output)])
    results = document(output)["results"]
    assert [(r["kind"], r["persistent"]) for r in results] == edge.COLUMNS
    for result in results:
        assert len(result["edges_ms"]) == 2 and result["images_per_second"] > 0
        assert {what for what, *_ in result["events"]} == edge.COLORS.keys()


def test_decode(tmp_path, in_this_process):
    decode = importlib.import_module("decode")
    decode.main(["--tiny", "--output", str(tmp_path / "a.json")])
    results = document(tmp_path / "a.json")["results"]
    assert [(r["quality"], r["shortest"]) for r in results] == decode.KINDS
    assert all(r["images_per_second"] > 0 and r["engine"] == "cpu" for r in results)
    assert all(r["engines"] is None for r in results)  # of a GPU
    sizes = {r["quality"]: r["bytes_per_photo"] for r in results if r["shortest"] is None}
    assert sizes[75] < sizes[85] < sizes[95]


# In place of a benchmark: it says which GPU and cores it has, and what it was told.
SCRIPT = """
import json, os, sys, time
words = sys.argv[1:]
gpu, cores = os.environ["CUDA_VISIBLE_DEVICES"], sorted(os.sched_getaffinity(0))
output = words[words.index("--output") + 1]
print("process", os.getpid(), flush=True)
with open(output, "a") as file:
    print(json.dumps([gpu, cores, words]), file=file)
if "--epochs" in words and "--validate" in words:
    time.sleep(600)
"""


@pytest.fixture
def run_all(monkeypatch, tmp_path):
    """Runs run_all.py where every script is ``SCRIPT``; returns what came of each file."""
    script = importlib.import_module("run_all")
    (tmp_path / "benchmarks").mkdir()
    for name in {item.script for item in script.ITEMS}:
        (tmp_path / "benchmarks" / f"{name}.py").write_text(SCRIPT)
    monkeypatch.setattr("harness.ROOT", tmp_path)
    monkeypatch.setattr(script, "MODULES", dict.fromkeys(script.MODULES, "json"))

    def main(*words, gpus="3,5"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        output = tmp_path / "results"
        folders = ["--data", str(tmp_path / "photos"), "--output", str(output)]
        script.main([*folders, "--cores-per-gpu", "1", *words])
        lines = {path.name: path.read_text().splitlines() for path in output.glob("*-gpu*.json")}
        return {name: [json.loads(line) for line in found] for name, found in lines.items()}

    return main


def test_each_gpu_runs_every_second_cell_on_cores_of_its_own(run_all, tmp_path, capsys):
    found = run_all("--only", "batch 64", "no engines", "decode", "policy", "--quick")
    assert sorted(found) == [
        "decode-data-gpu0.json",
        "policy-data-gpu1.json",
        "train-data-gpu0.json",
        "train-data-gpu1.json",
    ]
    ((gpu, cores, words),) = found["train-data-gpu0.json"]
    (other_gpu, other_cores, other_words), *_ = found["train-data-gpu1.json"]
    assert (gpu, other_gpu) == ("3", "5")
    assert len(cores) == len(other_cores) == 1 and cores != other_cores
    assert "--batch-size 64" in " ".join(words) and "--settle 2 4" in " ".join(words)
    assert "dali:threads=1,prefetch_queue_depth=2,hybrid_huffman_threshold=100000" in other_words
    assert "--settle" not in found["decode-data-gpu0.json"][0][2]
    assert "--data" not in found["policy-data-gpu1.json"][0][2]  # it draws pictures
    assert os.sched_getaffinity(0) >= {*cores, *other_cores}  # this thread has all, as before
    printed = capsys.readouterr().out
    assert printed.count("exit status 0") == 4
    assert "batch-size 64" in (tmp_path / "results" / "gpu0.log").read_text()


def test_what_fails_is_named_at_the_end(run_all, tmp_path, capsys):
    (tmp_path / "benchmarks" / "decode.py").write_text("raise SystemExit('no such photos')")
    with pytest.raises(SystemExit, match="failed: decode;"):
        run_all("--only", "decode", "views", gpus="0")
    assert "no such photos" in (tmp_path / "results" / "gpu0.log").read_text()
    assert re.search(r"views: \d+ s, exit status 0", capsys.readouterr().out)


def test_what_would_end_too_late_is_not_begun(run_all, capsys):
    found = run_all("--only", "batch 64", "decode", "--stop-after", "100", gpus="0")
    ((_, _, words),) = found["train-data-gpu0.json"]
    assert words[-2:] in (["--stop-after", "100"], ["--stop-after", "99"])
    assert list(found) == ["train-data-gpu0.json"]
    assert "decode: not begun" in capsys.readouterr().out


def test_cells_of_a_split_need_one(run_all, tmp_path):
    split = tmp_path / "split"
    assert run_all("--only", "epochs", "recipe") == {}
    (tmp_path / "results" / "sweep-a.json").write_text("")
    found = run_all("--only", "epochs", "recipe", "--split", str(split), "--without", "dali")
    for name in ("train-split-gpu0.json", "recipe-split-gpu1.json"):
        ((_, _, words),) = found[name]
        assert words[words.index("--data") + 1] == str(split)
        assert "dali" not in words
        assert ("--sweeps" in words) == name.startswith("train")


def test_a_missing_peer_is_told_before_anything_runs(run_all, monkeypatch, capsys):
    monkeypatch.setitem(importlib.import_module("run_all").MODULES, "dali", "no_such_module")
    with pytest.raises(SystemExit, match=r"dali: .*no_such_module(.|\n)*--without dali"):
        run_all("--only", "batch 64")
    assert list(run_all("--only", "batch 64", "--without", "dali")) == ["train-data-gpu0.json"]
    with pytest.raises(SystemExit, match="got batch 65"):
        run_all("--only", "batch 65")
    importlib.import_module("run_all").main(["--list"])
    assert "min  batch 64" in capsys.readouterr().out


def test_what_runs_ends_with_it(run_all, tmp_path):
    def interrupt():
        until((tmp_path / "results" / "train-split-gpu0.json").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SystemExit):
        run_all("--only", "epochs, validation", "--split", str(tmp_path), gpus="0")
    thread.join()
    written = (tmp_path / "results" / "gpu0.log").read_text()
    number = int(re.search(r"process (\d+)", written)[1])
    until(lambda: not Path(f"/proc/{number}").exists())  # it would sleep for 600 s


def test_all_cells_are_what_their_scripts_take():
    items = importlib.import_module("run_all").ITEMS
    for item in items:
        words = [*item.words.split(), "--data", str(BENCHMARKS)]
        if item.script == "train" and "large" not in words:
            cores = os.sched_getaffinity(0)
            try:
                assert train.cells(train.parse(words))
            finally:
                os.sched_setaffinity(0, cores)
        for column in item.columns:
            loaders.parse(column.format(cores=16))
    assert len({item.name for item in items}) == len(items)


# In place of the example, which trains: it says what it was told.
EXAMPLE = """
import json, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
loader, epochs = words["--loader"], int(words["--epochs"])
if epochs == 13:
    sys.exit("no such number of epochs")
summary = dict.fromkeys({names}, 0.5) | {{"epochs": epochs, "auto_augment": None}}
open(words["--summary"], "w").write(json.dumps(summary | {{"model": loader}}))
"""


@pytest.fixture
def recipe(monkeypatch, tmp_path, in_this_process):
    """recipe.py with an example that trains in no time."""
    script = importlib.import_module("recipe")
    example = tmp_path / "example.py"
    example.write_text(EXAMPLE.format(names=(*script.ARGUMENTS, *script.FIGURES)))
    monkeypatch.setattr("recipe.EXAMPLE", example)
    return script


def test_a_whole_training_is_timed_with_each_loader(recipe, tmp_path):
    output = tmp_path / "recipe.json"
    words = ["--tiny", "--output", str(output)]
    recipe.main(words)
    recipe.main(words)  # all of it is done
    first, second = document(output)["results"]
    assert (first["column"], second["column"]) == recipe.LOADERS
    assert (first["model"], second["model"]) == recipe.LOADERS  # what the example was told
    assert first["seconds"] > 0 and first["epochs"] == 1
    found = table.recipe_table([first, second])
    assert f"1 epochs: **gpuprefetch** | {second['seconds']:,.0f} (n = 1, no spread) |" in found


def test_whole_trainings_stop_in_time_and_go_on(recipe, tmp_path, monkeypatch):
    output = tmp_path / "recipe.json"
    seconds = itertools.count(step=30)
    monkeypatch.setattr("harness.time.monotonic", lambda: next(seconds))
    words = ["--tiny", "--output", str(output)]
    recipe.main([*words, "--stop-after", "100"])
    assert [r["column"] for r in document(output)["results"]] == ["torchvision"]
    recipe.main(words)
    assert [r["column"] for r in document(output)["results"]] == list(recipe.LOADERS)


def test_a_whole_training_that_fails_says_why(recipe):
    with pytest.raises(RuntimeError, match="ended with 1:\nno such number of epochs"):
        recipe.measure(["--epochs", "13", "--loader", "torchvision"], cpu=True)
    with pytest.raises(SystemExit):
        recipe.main([])  # no folder


def test_whole_trainings_are_quoted():
    seconds = {("torchvision", 0): 150.0, ("gpuprefetch", 0): 60.0}
    seconds |= {("gpuprefetch", 1): 50.0, ("torchvision", 1): 160.0}
    shared = {"epochs": 90, "auto_augment": None, "top1": 0.755}
    runs = [
        {"column": column, "round": number, "seconds": time, **shared}
        for (column, number), time in seconds.items()
    ]
    found = machine("a.json", [*runs, {"column": "gpuprefetch", "error": "late"}], "recipe")
    text = """55<!-- = a | 90 epochs | gpuprefetch | seconds --> s,
    2.6<!-- = a | 90 epochs | torchvision | minutes --> min,
    2.5 to 3.2<!-- = a | 90 epochs | gpuprefetch / torchvision | times --> times,
    75.5<!-- = a | 90 epochs | gpuprefetch | % right --> %"""
    assert quotes.problems(text, [found]) == []
    wrong = text.replace("55<", "56<").replace("2.6<", "2.7<").replace("3.2<", "3.3<")
    assert len(quotes.problems(wrong, [found])) == 3
    assert len(quotes.problems(text.replace("90 epochs", "30 epochs"), [found])) == 4


def test_the_table_of_decoders_has_a_row_for_each_gpu():
    def decoded(engine, rate, engines=None, kind=(None, None)):
        row = {"engine": engine, "images_per_second": rate, "bytes_per_photo": 99_900.0}
        count = {} if engines is None else {"engines": engines}  # earlier files have none
        return row | count | {"quality": kind[0], "shortest": kind[1]}

    small = (85, 256)
    with_engines = [decoded("auto", 25_000.0, 7), decoded("none", 3_800.0, 0)]
    with_engines += [decoded("auto", 26_000.0, 7), decoded("auto", 28_000.0, 7, small)]
    without = [decoded("auto", 3_000.0, 0), decoded("none", 3_100.0, 0)]
    files = [machine("b.json", with_engines, "decode"), machine("a.json", without, "decode")]
    files += [machine("c.json", [decoded("auto", 24_000.0)], "decode")]
    files += [machine("d.json", [decoded("cpu", 100.0)], "decode")]
    for document, gpu in zip(files, ("H9", "RTX 9", "H8", None), strict=True):
        document["metadata"] |= {"gpu": gpu, "driver": "580.1"}
    lines = table.decode_table(files).splitlines()[2:]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    names = [row[0].partition(",")[0] for row in found]
    assert names == ["H8", "H9", "H9", "RTX 9"]
    uncounted, photos_as_they_are, small_photos, no_engines = found
    assert uncounted[1:3] == ["yes", "as they are, 100 KB"]
    assert photos_as_they_are[1] == "7"
    rates = ["25,500 (25,000 to 26,000; n = 2)", "3,800 (n = 1, no spread)"]
    assert photos_as_they_are[3:5] == rates
    assert small_photos[3:5] == ["28,000 (n = 1, no spread)", "-"]
    assert no_engines[1] == "none"
    assert no_engines[3:5] == ["-", "3,050 (3,000 to 3,100; n = 2)"]
    assert no_engines[5] == "[a.json](../benchmarks/results/a.json)"
    assert table.decode_table(files[3:]) == ""


@pytest.mark.parametrize("script", ["kernel", "policy"])
def test_milliseconds(script, tmp_path):
    words = ["--tiny", "--output", str(tmp_path / "a.json")]
    if script == "kernel":
        kernel.main(words)
        results = document(tmp_path / "a.json")["results"]
        assert {r["side"] for r in results} > {"fused", "memory floor (copy)"}
        assert all(r["median_ms"] > 0 for r in results)
        return
    policy.main([*words, "--policies", "ColorJitter", "AugMix"])
    results = {(r["side"], r["policy"]): r for r in document(tmp_path / "a.json")["results"]}
    for side in ("gpuprefetch", "torchvision", "kornia", "kornia each"):
        for key in ("gpu_ms", "host_ms", "loop_ms"):  # the same of every side
            assert results[side, "ColorJitter"][key] > 0 < results[side, "none"][key]
        assert "loop_cpu_ms" in results[side, "none"]
    assert results["kornia", "AugMix"]["missing"] == "kornia has no AugMix"
    written = table.policy_table(list(results.values()))
    assert "not there" in written and "once for the whole batch" not in written
    sides = ("torchvision", "kornia")
    policies = [{"policy": "RandAugment", "side": s, "median_ms": 1, "host_ms": 2} for s in sides]
    written = table.policy_table(policies)
    assert "| RandAugment | 1.00 (2.00) | 1.00 (2.00) \\* |" in written
    assert "DALI's first number is wall clock" in written  # as it was in protocol 1
    policies = [{**p, "gpu_ms": 1, "loop_ms": 3} for p in policies]
    written = table.policy_table(policies)
    assert "| 1.00 / 2.00 / 3.00 | 1.00 / 2.00 / 3.00 \\* |" in written
    assert "wall clock" not in written
    assert "kornia chooses the ops of its policies once for the whole batch" in written


def test_photos(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = photos.photo_folder(photos.drawn(), 250)
    files = sorted(folder.glob("*/*"))
    assert len(files) == 250
    assert len(list(folder.iterdir())) == 84  # 3 files in each class
    assert files[0].stat().st_ino == files[6].stat().st_ino
    assert photos.photo_folder(photos.drawn(), 250) == folder
    found = photos.photo_facts(folder, 250)
    assert found["mean_width"] == 60
    assert found["megapixels"]["most"] == pytest.approx(60 * 45 / 1e6, abs=1e-4)
    assert found["progressive_share"] == 0
    assert found["sha256"] == photos.photo_facts(folder, 250)["sha256"]
    with Image.open(files[0]) as image:
        image.load()
    files[0].unlink()
    image.save(files[0], progressive=True)
    changed = photos.photo_facts(folder, 250)
    assert changed["progressive_share"] == 1 / 250
    assert changed["sha256"] != found["sha256"]
    files[0].unlink()
    os.link(files[6], files[0])
    with pytest.raises(ValueError, match="no JPEGs"):
        photos.photo_folder(tmp_path / "nothing", 1)
    large = photos.large(photos.drawn(), count=3, size=(800, 600))
    for path in photos.found(large):
        with Image.open(path) as image:
            assert image.size == (800, 600)
        assert 0.5 < path.stat().st_size / (3e6 * 0.04) < 2  # as 3 MB of 12 megapixels
    assert photos.large(photos.drawn(), count=3, size=(800, 600)) == large


def test_the_page_cache_is_dropped_and_what_is_left_is_said(tmp_path):
    photo = tmp_path / "a.jpg"
    photo.write_bytes(bytes(1 << 20))
    (tmp_path / "b.jpg").hardlink_to(photo)
    assert photos.cached_share([photo]) == 1.0
    found = photos.drop_page_cache(tmp_path)
    assert (found["files"], found["bytes"], found["cached_share_before"]) == (1, 1 << 20, 1.0)
    assert found["cached_share_after"] == pytest.approx(photos.cached_share([photo]), abs=1e-3)


NVML_VALUES = {
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetPowerUsage": 650_000,
    "nvmlDeviceGetTemperature": 60,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetClockInfo": 1755,
    "nvmlSystemGetCudaDriverVersion_v2": 13000,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4 | 0x1,
}
NVML_TEXTS = {
    "nvmlDeviceGetUUID": b"GPU-1",
    "nvmlDeviceGetName": b"H100",
    "nvmlSystemGetDriverVersion": b"580",
}


class FakeNvml:
    """NVML of an H100 whose clocks are below their maximum for its power cap.

    It is the first of four GPUs, of which the third is at work as well.
    """

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 4
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = 100 + index
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle, used):
        used._obj[0] = 55 if handle.value in (100, 102) else 0
        return 0

    def __getattr__(self, name):
        def call(*arguments):
            if name in NVML_VALUES:
                arguments[-1]._obj.value = NVML_VALUES[name]
            if name in NVML_TEXTS:
                arguments[-2].value = NVML_TEXTS[name]
            return 0

        return call


def test_what_a_file_says_of_its_gpu():
    device = facts.Device(FakeNvml())
    found = device.facts()
    assert (found["gpu"], found["driver"], found["driver_cuda"]) == ("H100", "580", "13.0")
    assert len(found["gpu_uuid_hash"]) == 12 and "GPU-1" not in str(found)
    assert found["power_limit_w"] == 700 and found["most_clocks_mhz"]["sm"] == 1980
    states = facts.States(device)
    states.sample()
    states.sample()  # within the same second
    found = states.summary()
    assert found["sm_mhz"] == [1755, 1755] and found["power_w"] == [650, 650]
    assert found["throttle"] == ["power cap"] and found["samples"] == 1
    assert found["others_busy"] == 1
    assert facts.States(facts.Device()).summary() == {}


def test_a_copy_without_git_knows_its_commit_and_what_was_changed(tmp_path):
    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    (tmp_path / "gpuprefetch").mkdir()
    (tmp_path / "benchmarks").mkdir()
    module = tmp_path / "gpuprefetch" / "a.py"
    module.write_text("a = 1\n")
    assert stamp.checkout(tmp_path).commit is None
    git("init")
    git("add", ".")
    git("commit", "-m", "a")
    stamp.write(tmp_path)
    of_git = stamp.checkout(tmp_path)
    assert of_git.commit and not of_git.dirty
    shutil.rmtree(tmp_path / ".git")
    assert stamp.checkout(tmp_path) == of_git
    git("init")  # a copy may come with the git of another commit
    git("commit", "--allow-empty", "-m", "b")
    assert stamp.checkout(tmp_path) == of_git
    shutil.rmtree(tmp_path / ".git")
    module.write_text("a = 2\n")
    (tmp_path / "gpuprefetch" / "b.py").write_text("")
    assert stamp.checkout(tmp_path).changed == ["gpuprefetch/a.py", "gpuprefetch/b.py"]


LOADERS = ["synthetic", "ready", "gpuprefetch", "gpuprefetch:policy=ra,erasing=0.5", "timm"]
LOADERS += ["torchvision:policy=ta", "torchvision:backend=tensor", "dali", "dali:policy=ra"]
LOADERS += ["torchvision:backend=references", "torchvision:backend=tensor,normalize=gpu"]
LOADERS += ["dali:dynamic=True", "dali:capture=True"]
LOADERS += ["kornia", "kornia:policy=ra", "timm:policy=ra", "spdl", "ffcv"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torchvision's own decoder
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("loader", LOADERS)
def test_loaders_agree_on_the_batch(settings, loader, train):
    workers = 1 if loader == "spdl" else 0
    shared = replace(settings, train=train, images=8, workers=workers)
    random.seed(0)  # timm's policies draw from it, and four small pictures have any mean
    np.random.seed(0)
    torch.manual_seed(0)
    try:
        batches = loaders.build(loader, shared)
    except loaders.Missing as reason:
        pytest.skip(str(reason))
    facts = clock.batch_facts(next(iter(batches)))
    del batches
    assert facts["shape"] == [4, 3, 32, 32]
    assert facts["dtype"] == "torch.bfloat16"
    assert facts["target"] == "[4] torch.int64 cpu"
    assert abs(facts["mean"]) < 0.8
    assert 0.3 < facts["std"] < 2


@pytest.mark.parametrize("limit", [1, 7, 777])
@pytest.mark.parametrize("guess", [1, 790])
def test_largest_batch(limit, guess):
    found = memory.largest(lambda batch_size: batch_size <= limit, guess, 0.01)
    assert limit - max(1, 0.01 * limit) <= found <= limit


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate", True),
        ("RuntimeError: CUDA runtime API error cudaErrorMemoryAllocation (2)", True),
        ("RuntimeError: Can't allocate 4096 bytes on device 0.", True),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_search_tells_memory_from_other_errors(error, expected):
    def child(task):
        return {"fits": True} if task["settings"]["batch_size"] <= 100 else {"error": error}

    found, kept = {"what": "largest", "model": "m", "column": "dali", "cap_gib": 16.0}, []
    task = {"column": "dali", "settings": {}}
    memory.search(child, task, 110, 0.01, found, lambda f: kept.append({**f}))
    assert found["batch_size"] == (100 if expected else 0)
    assert ("error" in found) is not expected
    assert found["finished"] is expected
    assert len(kept) == len(found["probed"])
    assert not any(before["finished"] for before in kept)  # where the time may be over
    assert ("| 100 |" in table.memory_table([found])) is expected
    cut_off = found | {"batch_size": 9, "finished": False}
    assert "| at least 9 |" in table.memory_table([cut_off])


def test_memory_without_a_gpu(settings):
    shared = {key: value for key, value in vars(settings).items() if key != "images"}
    assert memory.probe("squeezenet1_1", "gpuprefetch", shared, 16.0, 2) == {"fits": True}
    assert memory.idle("torchvision", shared | {"train": False, "images": 8})["held_gib"] == 0.0


def rates_of_windows(workers):
    """The rates of three windows of a loop whose batches come eight at a time."""
    batch = torch.zeros(1, 3, 2, 2).contiguous(memory_format=torch.channels_last), torch.ones(1)

    def batches():  # as of eight workers: eight of them, and then nothing
        begin = time.perf_counter()
        for number in itertools.count():
            at = begin + 0.2 * (number // 8) + 0.0125 * (number % 8)
            time.sleep(max(at - time.perf_counter(), 0.0))
            yield batch

    loop = clock.Loop(batches(), lambda *batch: None, "cpu", multiple=workers)
    settled = loop.settle(0.4, 0.5)
    assert 0.4 <= settled["settle_seconds"] < 2
    marks, counts = [time.perf_counter()], []
    for _ in range(3):
        counts.append(loop.window(0.25)[0])
        marks.append(time.perf_counter())
    seconds = [b - a for a, b in itertools.pairwise(marks)]
    return [count / taken for count, taken in zip(counts, seconds, strict=True)]


@pytest.mark.parametrize("workers", [0, 8])
def test_windows_hold_whole_bursts(workers):
    def steady():
        return all(rate == pytest.approx(40, rel=0.1) for rate in rates_of_windows(workers))

    # A busy machine may disturb one loop.
    assert any(steady() for _ in range(3)) == (workers == 8)


def test_cpu_seconds_count_children():
    before = clock.cpu_seconds()
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", burn], stdin=pipe, stdout=pipe) as child:
        child.stdout.readline()
        assert clock.cpu_seconds() - before >= 0.28  # while it is alive
        child.communicate(b"\n")
    assert clock.cpu_seconds() - before >= 0.28  # and afterwards


def result(column, rate, **more):
    speed = {"median": rate, "values": [0.9 * rate, rate]}
    cell = {"model": "resnet18", "mode": "eager", "batch_size": 256, "photos": "sample"}
    cell |= {"engine": "auto", "epochs": 0, "cores": 16, "stream": "own", "loop": "step"}
    measured = {"images_per_second": speed, "cpu_seconds_per_1000_images": 1.0}
    return {**cell, "column": column, **measured, "gpu_peak_gib": 5.0} | more


def machine(file, results, benchmark="train"):
    metadata = {"utc": file, "gpu": "GPU", "affinity": 16, "cpu": "CPU", "commit": "abc"}
    metadata |= {"commands": [f"python {benchmark}.py"], "versions": VERSIONS}
    return {"benchmark": benchmark, "file": file, "metadata": metadata, "results": results}


@pytest.fixture
def documents():
    first = [result("synthetic", 990.0), result("gpuprefetch", 970.0), result("dali", 950.0)]
    first += [result("synthetic", 1010.0), result("dali", 0.0, error="none")]
    first += [result("old: gpuprefetch", 10.0), result("gpuprefetch", 444.0, engine="none")]
    second = [result("synthetic", 1000.0), result("dali", 803.0), result("gpuprefetch", 761.0)]
    second += [result("torchvision", 380.5), result("gpuprefetch:policy=ra", 800.0, model="none")]
    second += [result("dali:policy=ra,threads=4", 100.0, model="none")]
    second += [result("dali:policy=ra", 400.0, model="none"), result("dali", 9.0, model="other")]
    return [machine("a.json", first), machine("b.json", second)]


def test_tables(documents):
    block = table.costs_table(table.train_cells(documents))
    # A round has no ratio where one of the two failed.
    ceiling = "0.87 (0.76 to 0.98; n = 2 in 2 files)"
    dali = "0.98 (0.95 to 1.02; n = 2 in 2 files)"
    assert "| 866 (761 to 970; n = 2) |" in block
    assert f"| {ceiling} | {dali} | 2.00 (n = 1, no spread) | not measured |" in block
    assert "| abc |" in block
    assert "no model" not in block  # where not every loader ran
    assert "old" not in block
    text = f"before\n{table.START}\nold\n{table.END}\nafter\n"
    written = table.replace_block(text, block, Path("README.md"))
    assert "old" not in written
    assert written.startswith("before\n") and written.endswith("\nafter\n")
    assert table.replace_block(written, block, Path("README.md")) == written
    assert table.replace_block(text, table.all_results([]), Path("README.md")) == text
    with pytest.raises(ValueError, match="must contain"):
        table.replace_block("no markers", block, Path("README.md"))
    policy = {"policy": "RandAugment", "side": "dali", "median_ms": 1.5, "host_ms": 0.2}
    everything = table.all_results([*documents, machine("p.json", [policy], "policy")])
    assert block in everything and "Protocol 1" in everything
    row = "| no model, batch 256, RandAugment | 800 (n = 1, no spread) |  |  | 2.00 (n = 1"
    assert row in everything
    assert "| other eager, batch 256 |" not in everything  # which has nothing of ours
    assert "no JPEG engines | 444 (n = 1, no spread) |" in everything
    assert "| [b](results/b.json) | 761 (n = 1, no spread) | 0.761 | 0.90 | 1.00 |" in everything
    assert "- resnet18 eager, batch 256: DALI on a.json: none" in everything
    assert "| RandAugment | 1.50 (0.20) |" in everything


def test_plot(documents, tmp_path):
    pytest.importorskip("matplotlib")
    table.draw(table.train_cells(documents), tmp_path / "results.svg")
    drawn = (tmp_path / "results.svg").read_text()
    shown = ("resnet18 eager, batch 256", "GPU, 16 cores", "no loading", "380", "803", "761")
    for words in (*shown, "CPU s per 1,000 images"):
        assert words in drawn
    assert "960" not in drawn  # of the machine without torchvision


def test_the_plot_has_cells_without_a_dataloader(second, tmp_path):
    pytest.importorskip("matplotlib")
    table.draw(table.train_cells([second]), tmp_path / "results.svg")
    drawn = (tmp_path / "results.svg").read_text()
    for words in ("not run", "GPU, 16 cores, n = 2, noise 1.0 %", "900", "936"):
        assert words in drawn


def rounds(column, *rates, **more):
    """Results of a column by protocol 2, in rounds that are turned around."""
    places = {"synthetic": 0, "gpuprefetch": 1, "dali": 2, "gpuprefetch (again)": 3}
    at = places.get(column, 0)
    new = {"files": 13200, "policy": "", "validate": 0, "persistent": True, "cold": False}
    return [
        result(column, rate, round=number, place=3 - at if number % 2 else at) | new | more
        for number, rate in enumerate(rates)
    ]


@pytest.fixture
def second():
    """A document of protocol 2 that keeps its rules: DALI is 4 % faster, the noise is 1 %."""
    results = rounds("synthetic", 1000.0, 1000.0) + rounds("gpuprefetch", 900.0, 900.0)
    results += rounds("dali", 936.0, 936.0) + rounds("gpuprefetch (again)", 891.0, 900.0)
    document = machine("train-new.json", results)
    document["metadata"] |= {"dirty": False, "changed": []}
    return document | {"protocol": 2}


def test_a_difference_within_the_noise_is_equal(second):
    (cell,) = cells.train_cells([second])
    assert cell.noise == pytest.approx(900 / 891 - 1)
    assert str(cell.compared("gpuprefetch", "dali")) == "0.96 (0.96 to 0.96; n = 2)"
    for r in second["results"]:
        if r["column"] == "dali":
            r["images_per_second"] = {"median": 905.0, "values": [905.0]}
    (cell,) = cells.train_cells([second])
    assert str(cell.compared("gpuprefetch", "dali")) == "equal (0.99 to 0.99; n = 2)"
    assert "| 1.0 % | settled |  | abc |" in table.summary_table([cell])
    assert "Protocol 2" in table.all_results([second])
    second["results"] += rounds("timm", 100.0, 200.0)
    assert "| **unsettled** |  | abc |" in table.summary_table(cells.train_cells([second]))
    pairs = {
        "a": {n: 1 + r for n, r in enumerate((0.01, 0.02, 0.09))},
        "b": dict.fromkeys(range(3), 1),
    }
    assert protocol.noise([pairs], [("a", "b")]) == pytest.approx(0.04)
    assert protocol.difference(0.5) == protocol.difference(2.0) == 1.0
    assert str(protocol.Compared([1.002, 1.004], 0.002)) == "1.003 (1.002 to 1.004; n = 2)"


@pytest.mark.parametrize("marked", [False, True])
def test_a_clock_that_starts_when_the_loader_is_there_compares_no_columns(second, marked):
    for r in second["results"]:
        r |= {"epochs": 1, "cold": True, "policy": "ra"}
        r |= {"clock_from": train.FROM_LOADER} if marked else {}
    (cell,) = cells.train_cells([second])
    assert cell.is_comparable == bool(table.beside_dali(cell)) == marked
    text = f"DALI was 4<!-- = train-new | {cell.title} | dali / gpuprefetch | % faster --> % faster"
    found = quotes.problems(text, [second])
    assert found == [] if marked else "before the clock started" in found[0]


def test_files_of_one_gpu_are_one_machine(second):
    other = {**second, "file": "train-other.json"}
    for document, gpu in ((second, "a"), (other, "a")):
        document["metadata"] = {**document["metadata"], "gpu_uuid_hash": gpu}
    (cell,) = cells.train_cells([second, other])
    assert cell.compared("gpuprefetch", "dali").count == "n = 4"
    other["metadata"]["gpu_uuid_hash"] = "b"
    (cell,) = cells.train_cells([second, other])
    assert cell.compared("gpuprefetch", "dali").count == "n = 4 on 2 machines"


def test_protocol_1_has_a_noise_where_two_columns_were_one_configuration():
    stats = {"share": 0.0, "cpu_images": 0}
    control = result(cells.CONTROL, 100.0)
    (cell,) = cells.train_cells(
        [machine("a", [result("gpuprefetch", 105.0, stats=stats), control])]
    )
    assert cell.noise == pytest.approx(0.05)
    stats["share"] = 0.1
    (cell,) = cells.train_cells(
        [machine("a", [result("gpuprefetch", 105.0, stats=stats), control])]
    )
    assert cell.noise is None


def drop(column):
    return lambda document: document["results"].__setitem__(
        slice(None), [r for r in document["results"] if r["column"] != column]
    )


def reorder(document):
    for r in document["results"]:
        r["place"] = 1 if r["column"] == "synthetic" else 0


BROKEN = {
    "no pair of the same column": drop("gpuprefetch (again)"),
    "its commit is not known": lambda document: document["metadata"].update(commit=None),
    "its code was not the commit's: a.py": lambda document: document["metadata"].update(
        dirty=True, changed=["a.py"]
    ),
    "fewer than 2 rounds of ['dali']": lambda document: document["results"].pop(5),
    "photos of a cold run were still in the page cache: 100%": lambda document: document["results"][
        0
    ].update(page_cache={"cached_share_after": 1.0}),
    "the second round is not the first one reversed": reorder,
}


def test_a_cell_whose_time_was_over_is_cut_short(second):
    del second["results"][5]
    assert cells.broken_rules(second) != []
    second["metadata"]["commands"] = ["python train.py --stop-after 60"]
    assert cells.broken_rules(second) == []
    (cell,) = cells.train_cells([second])
    assert "| **cut short** |  | abc |" in table.summary_table([cell])
    second["results"] = [r for r in second["results"] if "again" not in r["column"]]
    assert cells.broken_rules(second) != []  # without a noise


@pytest.fixture
def cut(second):
    """The document whose time was over in the first round, before its twin ran."""
    second["results"] = [
        r for r in second["results"] if r["round"] == 0 and "again" not in r["column"]
    ]
    second["metadata"]["commands"] = ["python train.py --stop-after 60"]
    return second


def test_a_cell_that_was_cut_short_in_its_first_round_compares_nothing(cut, tmp_path):
    assert cells.broken_rules(cut) == []
    (cell,) = cells.train_cells([cut])
    assert not cell.is_comparable and table.beside_dali(cell) == []
    row = table.summary_table([cell])
    assert "| not measured | **cut short** |" in row and "| 900 (n = 1, no spread) |" in row
    for quantity in ("% faster", "times", "equal"):
        (found,) = quotes.problems("DALI was 4" + QUOTE.format(quantity), [cut])
        assert "cut short in its first round" in found
    alone = QUOTE.format("images/s").replace("dali / ", "")
    assert quotes.problems(f"900{alone} images/s", [cut]) == []
    cut["metadata"]["commands"] = ["python train.py"]  # which was ended from outside
    assert cells.broken_rules(cut) == []
    cut["results"] += [{**r, "batch_size": 8} for r in cut["results"]]  # but went on with another
    broken = cells.broken_rules(cut)
    assert len(broken) == 2  # no pair, and too few rounds
    assert all("batch 8" not in rule for rule in broken)


def test_dali_is_compared_at_the_fastest_setting_that_ran(second):
    (cell,) = cells.train_cells([second])
    assert cell.dali == "dali"
    second["results"] += rounds("dali:threads=16", 950.0, 950.0, place=4)
    (cell,) = cells.train_cells([second])
    assert cell.dali == "dali:threads=16"
    assert "0.95 (0.95 to 0.95; n = 2)" in table.summary_table([cell])
    second["results"] = [r for r in second["results"] if r["column"] != "dali"]
    (cell,) = cells.train_cells([second])
    assert "0.95 (0.95 to 0.95; n = 2)" in table.summary_table([cell])
    (cell,) = cells.train_cells([second | {"protocol": 1}])
    assert cell.dali == "dali"  # as it was published


def test_other_photos_are_another_cell(second):
    photos = {"files": 13200, "distinct": 3781, "mean_width": 4, "mean_height": 3}
    small = {"sample": photos | {"mean_bytes": 28040, "sha256": "a"}}
    large = {"sample": photos | {"mean_bytes": 99903, "sha256": "b"}}
    documents = [
        second | {"photos": small},
        second | {"photos": large, "file": "train-more.json"},
        second | {"photos": small, "file": "train-third.json"},
    ]
    found = {cell.photos: len(cell.machines) for cell in cells.train_cells(documents)}
    assert found == {"3,781 of 28 KB": 2, "3,781 of 100 KB": 1}
    (problem,) = quotes.problems("DALI was 4" + QUOTE.format("% faster"), documents)
    assert "measured on 3,781 of" in problem and "name the files of one" in problem
    one = QUOTE.format("% faster").replace("train-*", "train-more")
    assert quotes.problems("DALI was 4" + one, documents) == []
    words = table.caption(documents, "")
    assert "28 KB on average, repeated to 13,200 files: train-new, train-third" in words
    assert "100 KB on average, repeated to 13,200 files: train-more" in words


def test_rates_are_shown_of_rounds_that_both_ran(second):
    second["results"] += rounds("dali", 936.0, 936.0, 5000.0)[2:]
    (cell,) = cells.train_cells([second])
    (machine,) = cell.machines
    assert machine.paired("dali", "gpuprefetch") == [936.0, 936.0]
    assert machine.paired("dali", "kornia") == [936.0, 936.0, 5000.0]


def test_seconds_of_epochs_are_quoted(second):
    for r in second["results"]:
        r["epoch_seconds"] = [2.0 + r["round"] / 5, 1.0, 1.1, 1.2]
    ours = QUOTE.replace("dali / ", "")
    text = "2.0 to 2.2" + ours.format("s of the second epoch") + " s, later ones "
    text += "1.1" + ours.format("s of a later epoch") + " s"
    assert quotes.problems(text, [second]) == []
    assert len(quotes.problems(text.replace("1.1", "1.2").replace("2.2", "2.3"), [second])) == 2


@pytest.mark.parametrize("rule", BROKEN)
def test_a_file_that_departs_from_its_protocol_is_named(second, rule):
    assert cells.broken_rules(second) == []
    BROKEN[rule](second)
    assert any(rule in found for found in cells.broken_rules(second))
    assert cells.broken_rules(second | {"protocol": 1}) == []


QUOTE = "<!-- = train-* | resnet18 eager, batch 256 | dali / gpuprefetch | {} -->"
TEXTS = {
    "## How fast\n\nDALI was 4" + QUOTE.format("% faster") + " % faster.": "",
    "## How fast\n\nDALI was 5" + QUOTE.format("% faster") + " % faster.": "the files have 4",
    "DALI was 1.04 to 1.04" + QUOTE.format("times") + " times as fast.": "",
    "DALI was 1.00 to 1.04" + QUOTE.format("times") + " times as fast.": "have 1.04 to 1.04",
    "DALI is as fast" + QUOTE.format("equal") + ".": "not within a measured noise",
    "DALI was 4 % faster.": "no comment that says where it is from",
    "## How fast\n\nDALI was 4 times that.": "no comment that says where it is from",
    "It was 4 times that.": "",
    "DALI was 4 % faster. <!-- not from results: their page says so -->": "",
    "`4 % faster`\n\n```text\n4 % faster\n```": "",
    "900" + QUOTE.format("images/s").replace("dali / ", "") + " images/s": "",
    "a noise of 1.0" + QUOTE.format("% noise") + " %": "",
    "DALI was 4" + QUOTE.format("% better") + " %": "no such quantity",
    "DALI was 4" + QUOTE.format("% faster").replace("18", "19") + " %": "no such cell",
    "DALI was 4" + QUOTE.format("% faster").replace("train", "trane") + " %": "no such file",
    "words" + QUOTE.format("% faster"): "no number stands before",
}


@pytest.mark.parametrize("text", TEXTS)
def test_numbers_in_a_text_follow_from_files(second, text):
    found = quotes.problems(text, [second])
    assert (TEXTS[text] in "; ".join(found)) if TEXTS[text] else (found == [])


def test_a_number_within_the_noise_must_not_be_quoted(second):
    for r in second["results"]:
        if r["column"] == "dali":
            r["images_per_second"] = {"median": 905.0, "values": [905.0]}
    (found,) = quotes.problems("DALI was 1" + QUOTE.format("% faster") + " % faster", [second])
    assert "within the noise" in found
    assert quotes.problems("DALI is as fast" + QUOTE.format("equal"), [second]) == []


def test_the_check_fails_for_a_wrong_number_on_a_page(tmp_path, monkeypatch):
    page = tmp_path / "README.md"
    readme = (ROOT / "README.md").read_text()
    number = re.search(r"was (\d+)<!-- =", readme)[1]
    page.write_text(readme.replace(f"was {number}<!-- =", f"was {number}1<!-- ="))
    monkeypatch.setattr("table.PAGES", [page])
    with pytest.raises(SystemExit, match=rf"README.md: {number}1 \(.*: the files have {number}"):
        table.main(["--check"])


def test_quotes_of_other_benchmarks():
    policy = {"policy": "RandAugment", "side": "dali", "host_ms": 22.88}
    stats = {"read_seconds": 0.5, "collate_seconds": 1.0, "pin_seconds": 0.1, "batches": 100}
    shared = {"model": "m", "column": "dali", "stats": stats}
    speeds = ((1, 100.0), (4, 390.0))
    scaling = [{**shared, "processes": n, "images_per_second": {"median": s}} for n, s in speeds]
    documents = [machine("p.json", [policy], "policy"), machine("s.json", scaling, "scaling")]
    text = """22.9<!-- = p | RandAugment | dali | host_ms --> ms
    3.90<!-- = s | m | dali / 4 | times one --> times one, 2.5<!-- = s | m | dali / 4 | % lost -->
    5<!-- = s | m | dali / 4 | ms to read a batch --> ms"""
    assert quotes.problems(text, documents) == []
    assert len(quotes.problems(text.replace("22.9", "23.1").replace("2.5", "2.6"), documents)) == 2


ACCURACY = {
    "policy": "ta",
    "pictures": "photos",
    "images": 3068,
    "validation": 713,
    "epochs": 30,
    "seeds": 3,
    "ok": True,
    "difference": 0.0066,
    "interval": [-0.0058, 0.019],
    "margin": 0.05,
    "mistakes": {"R and B swapped": "noticed"},
    "gpuprefetch": {"mean": 0.7466, "each": [0.741, 0.757, 0.742], "seconds": [20.0, 22.0, 21.0]},
    "torchvision": {"mean": 0.74, "each": [0.736, 0.744, 0.74], "seconds": [40.0, 46.2, 42.0]},
}
RIGHT = {
    "gpuprefetch": "74.7<!-- = a | policy=ta | gpuprefetch | % right --> %",
    "torchvision": "73.6 to 74.4<!-- = a | policy=ta | torchvision | % right, each seed --> %",
    "difference": "as good<!-- = a | policy=ta | gpuprefetch / torchvision | equal -->",
    "points": "0.7<!-- = a | policy=ta | gpuprefetch / torchvision | points more --> points",
    "interval": "1.9<!-- = a | policy=ta | gpuprefetch / torchvision | points at most --> points",
    "seconds": "21<!-- = a | policy=ta | gpuprefetch | seconds --> s",
    "times": "2.0<!-- = a | policy=ta | gpuprefetch / torchvision | times --> times",
}


@pytest.mark.parametrize("what", RIGHT)
def test_accuracies_are_quoted(what):
    text = RIGHT[what]
    found = machine("a.json", [ACCURACY], "accuracy")
    assert quotes.problems(text, [found]) == []
    unknown = machine("a.json", [ACCURACY | {"ok": False}], "accuracy")
    if what == "difference":
        (wrong,) = quotes.problems(text, [unknown])
        assert "not within a measured noise" in wrong
        return
    assert quotes.problems(text.replace("1", "2").replace("7", "8").replace("2.0", "2.1"), [found])
    (none,) = quotes.problems(text.replace("policy=ta", "policy=ra"), [found])
    assert "no result has these columns" in none


def test_committed_tables_are_fresh():
    table.main(["--check"])
    correctness.main(["--check"])
    results = document(BENCHMARKS / "results" / "parity-cpu.json")["results"]
    assert parity.markdown(results) in (ROOT / "docs" / "migrate.md").read_text()


@pytest.mark.slow
def test_parity(tmp_path, monkeypatch, capsys):
    some = dict(list(parity.pipelines(32).items())[:3])
    monkeypatch.setattr("parity.pipelines", lambda size: some)
    output = tmp_path / "parity.json"
    words = f"--data {photos.drawn()} --count 6 --size 32 --cpu --crops 300 --output {output}"
    assert parity.main(words.split()) == 0
    results = document(output)["results"]
    assert all(r["images"] == 6 and 0 < r["mean_levels"] < 1 for r in results.values())
    assert "| examples/imagenet train |" in capsys.readouterr().out
    checks = document(output)["draws"]
    assert all(check["ok"] for check in checks)
    noticed = [word for check in checks for word in check["mistakes"].values()]
    assert noticed == ["noticed"] * 12


def test_the_rows_of_what_was_checked():
    check = {"backend": "torchvision", "order": "unsafe", "rounds": 80, "corrupted": 79}
    broken = {"backend": "torchcodec", "order": "library", "verdict": "not checked: no CUDA"}
    integrity = {"what": "integrity", "batches": 20000, "tensors": 30000, "wrong_tensors": 1}
    memory = {"what": "memory", "epochs": 50, "warm_epochs": 10, "spread": {"threads": 0.0}}
    ranks = {"check": "images", "processes": 2, "ok": True, "different": 0, "compared": 76}
    counts = {"good_wrong": 0, "good_batches": 60, "same": 7, "differs": 2}
    fuzz = {"device": "cuda", "cases": 900, "crashes": [1], "counts": counts}
    counts = {"samples": 5100, "pictures": 3000, "draws": 6000, "pairs": 40}
    random = {"device": "cpu", "cases": 2000, "wrong": 3, "without": ["late"], "counts": counts}
    checks = [check | {"error": "", "verdict": "caught"}, broken | {"error": "x"}]
    found = {"train": [], "soak": [integrity, memory], "fuzz": [fuzz], "selfcheck": checks}
    found["differential"] = [random]
    found["suite"] = [{"file": "test_a.py", "failed": 2}]
    found["distributed"] = [ranks | {"mistakes": {"another epoch": "noticed"}}]
    found["accuracy"] = [ACCURACY, ACCURACY | {"ok": False, "policy": "none"}, {"seeds": 2}]
    documents = [machine("a.json", rows, name) for name, rows in found.items()]
    counts = {"files": 60, "passed": 3100, "failed": 2, "skipped": 7}
    suite = next(each for each in documents if each["benchmark"] == "suite")
    suite["summary"] = counts
    block = correctness.block(documents)
    for text in (
        "| self-check, torchvision, unsafe order | 79 of 80 batches corrupted (caught) |",
        "| not checked: no CUDA |",
        "| 1 mismatches | GPU; torch 2.11.0, TorchCodec 0.17.0 |",
        "spread over 40 epochs after 10 | threads 0.00% |",
        "| exact; 0 of 76 pictures different; another epoch: noticed |",
        "1 crashes or hangs; 0 of 60 good batches wrong",
        "read by both 9, of them with other pixels 2",
        "| random configurations, CPU path, 2,000 of them | 3 wrong; samples 5,100, pictures ",
        "compared with PIL and eager PyTorch 3,000, with another run's 6,000, pairs of draws 40; ",
        "not checked: late |",
        "| ResNet-18 from scratch, 3,068 photos, TrivialAugmentWide, 30 epochs, 713 for ",
        "validation, 3 seeds | as good; gpuprefetch 74.7%, torchvision 74.0%; difference 0.7 ",
        "points (-0.6 to 1.9; allowed: 5); R and B swapped: noticed |",
        " crop and flip, 30 epochs, 713 for validation, 3 seeds | NOT KNOWN TO BE AS GOOD; ",
        "| test suite, GPU, 60 files | 3,100 passed, 2 failed, 7 skipped |",
        "| test suite, test_a.py | [2 FAILED](#the-test-suite) |",
    ):
        assert text in block
    assert correctness.block([machine("a.json", [])]) == ""


def test_a_result_says_which_nvjpeg_decoded(as_nvjpeg):
    def version(part, number):
        number._obj.value = (13, 3, 2)[part]
        return 0

    as_nvjpeg(SimpleNamespace(nvjpegGetProperty=version))
    assert loaders.nvjpeg_version() == "13.3.2"
    as_nvjpeg(SimpleNamespace(nvjpegGetProperty=lambda part, number: 1))
    assert loaders.nvjpeg_version() is None


def test_engines_are_refused_as_by_a_gpu_that_has_none(as_nvjpeg):
    library = SimpleNamespace(nvjpegCreateEx=lambda backend, *arguments: 0)
    as_nvjpeg(library)
    loaders.refuse_engines()
    assert [library.nvjpegCreateEx(backend) for backend in (2, 3)] == [0, 7]
