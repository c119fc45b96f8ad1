"""The benchmark scripts run, at tiny size and on the CPU."""

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
TINY = "--cpu --files 24 --batch-size 4 --size 32 --workers 1".split()
TIMING = {"warmup": 0.0, "seconds": 0.02, "repeats": 2}


pytestmark = pytest.mark.usefixtures("scripts")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number in range(6):
        pixels = rng.integers(0, 256, (40 + number, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.JPEG")
    return folder


@pytest.fixture
def settings(photos, tmp_path, monkeypatch):
    import loaders
    from photos import photo_folder

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = photo_folder(photos, 24)
    return loaders.Settings(str(folder), batch_size=4, workers=0, size=32, device="cpu")


@pytest.mark.slow
def test_train(photos, tmp_path, monkeypatch, capsys):
    import train

    output = tmp_path / "train.json"
    timing = "--warmup 0 --seconds 0.1 --repeats 2 --models squeezenet1_1 --modes eager --quick"
    loaders = "--loaders gpuprefetch torchvision:no=1"
    args = ["--data", str(photos), "--output", str(output), *TINY, *timing.split()]
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "train.py"), *args, *loaders.split()])
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)  # for the children
    train.main()
    assert "of the ceiling" in capsys.readouterr().out
    document = json.loads(output.read_text())
    assert document["metadata"]["versions"]["torch"]
    assert str(photos) not in output.read_text()
    *results, failed = document["results"]
    assert "unexpected keyword argument" in failed["error"]
    assert [r["loader"] for r in results] == ["synthetic", "gpuprefetch"]
    for result in results:
        assert result["images_per_second"]["median"] > 0
        assert result["first_batch"]["shape"] == [4, 3, 32, 32]
        assert result["first_batch"]["dtype"] == "torch.bfloat16"


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


def test_scaling(photos, tmp_path, monkeypatch):
    import scaling
    import table

    output = tmp_path / "scaling-x1.json"
    steps = "--warmup-steps 1 --steps 2 --repeats 2 --models squeezenet1_1"
    args = ["--data", str(photos), "--output", str(output), *TINY, *steps.split()]
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "scaling.py"), *args])
    scaling.main()
    (document,) = table.read(tmp_path)
    synthetic, ours = document["results"]
    assert (synthetic["loader"], ours["loader"]) == ("synthetic", "gpuprefetch")
    assert ours["images_per_second"]["median"] > 0
    assert len(ours["images_per_second"]["values"]) == 2
    one = ours["images_per_second"]["median"]
    two = {**ours, "processes": 2, "images_per_second": {"median": 1.5 * one}}
    text = table.scaling_table([document, {**document, "results": [two]}])
    assert f"| {one:,.0f} (1.000) | {1.5 * one:,.0f} (0.750) |" in text


@pytest.mark.slow
def test_parity(photos, tmp_path, monkeypatch, capsys):
    import parity

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    some = dict(list(parity.pipelines(32).items())[:3])
    monkeypatch.setattr(parity, "pipelines", lambda size: some)
    output = tmp_path / "parity.json"
    args = f"parity.py --photos {photos} --count 6 --size 32 --cpu --output {output}".split()
    monkeypatch.setattr(sys, "argv", args)
    parity.main()
    document = json.loads(output.read_text())
    assert str(photos) not in output.read_text()
    assert all(r["images"] == 6 and 0 < r["mean_levels"] < 1 for r in document["results"].values())
    assert "| examples/imagenet train |" in capsys.readouterr().out


def test_the_parity_table_is_fresh():
    import parity

    document = json.loads((BENCHMARKS / "results" / "parity-cpu.json").read_text())
    assert parity.markdown(document["results"]) in (ROOT / "docs" / "migrate.md").read_text()


def test_photo_folder_is_reused(photos, tmp_path, monkeypatch):
    from photos import photo_folder

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = photo_folder(photos, 250)
    files = sorted(folder.glob("*/*"))
    assert len(files) == 250
    assert len(list(folder.iterdir())) == 84  # 3 files in each class
    assert files[0].stat().st_ino == files[6].stat().st_ino
    assert photo_folder(photos, 250) == folder
    with pytest.raises(ValueError, match="no JPEGs"):
        photo_folder(tmp_path / "nothing", 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torchvision's own decoder
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    "loader",
    [
        "synthetic",
        "ready",
        "gpuprefetch",
        "torchvision",
        "torchvision:backend=tensor",
        "timm",
        "dali",
    ],
)
def test_loaders_agree_on_the_batch(settings, loader, train):
    from dataclasses import replace

    import clock
    import loaders

    pytest.importorskip({"timm": "timm", "dali": "nvidia.dali"}.get(loader, "torch"))
    name, options = loaders.parse(loader)
    batches = loaders.LOADERS[name](replace(settings, train=train, images=8), **options)
    facts = clock._batch_facts(next(iter(batches)))
    del batches
    assert facts["shape"] == [4, 3, 32, 32]
    assert facts["dtype"] == "torch.bfloat16"
    assert facts["target"] == "[4] torch.int64 cpu"
    assert abs(facts["mean"]) < 0.5
    assert 0.3 < facts["std"] < 1.5


@pytest.mark.parametrize(
    ("stage", "options"), [("fetch", {}), ("decode on CPU", {"workers": 0}), ("resample", {})]
)
def test_stages(settings, stage, options):
    import loader

    result = loader.measure(stage.split()[0], stage, options, vars(settings), TIMING)
    assert result["images"] > 0


def test_loader_options():
    import loaders

    assert loaders.parse("gpuprefetch:cpu_share=0.5,decoder=cpu") == (
        "gpuprefetch",
        {"cpu_share": 0.5, "decoder": "cpu"},
    )
    assert loaders.variants("dali-tuned", [8, 16]) == [{"threads": 8}, {"threads": 16}]
    assert loaders.variants("dali-tuned:threads=4", [8, 16]) == [{"threads": 4}]
    with pytest.raises(ValueError, match="unknown loader"):
        loaders.parse("dolly")


@pytest.mark.parametrize("limit", [1, 7, 777])
@pytest.mark.parametrize("guess", [1, 790])
def test_largest_batch(limit, guess):
    import memory

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
    import memory

    def child(task):
        return {"fits": True} if task["settings"]["batch_size"] <= 100 else {"error": error}

    found, kept = {"what": "largest"}, []
    memory.search(
        child, {"loader": "dali", "settings": {}}, 110, 0.01, found, lambda f: kept.append({**f})
    )
    assert (found["what"], found["batch_size"]) == ("largest", 100 if expected else 0)
    assert ("error" in found) is not expected
    assert found["finished"] is expected
    assert len(kept) == len(found["probed"])
    assert not any(before["finished"] for before in kept)  # where the time may be over
    assert memory_cell(found) == ("100" if expected else "")
    assert memory_cell(found | {"batch_size": 9, "finished": False}) == "at least 9"


def memory_cell(found):
    import table

    document = {"results": [{"model": "m", "loader": "dali", "cap_gib": 16.0, **found}]}
    return table.memory_tables([document])[0].splitlines()[-1].split("|")[-2].strip()


def test_a_result_is_written_as_it_becomes(photos, tmp_path, monkeypatch):
    import harness

    args = SimpleNamespace(data=photos, files=6, output=tmp_path / "a.json", commit="")
    monkeypatch.setattr(sys, "argv", ["memory.py", "--output", str(args.output)])
    document, result = harness.Document("memory", args, harness.Device()), {"what": "largest"}
    for number in range(3):
        result["number"] = number
        document.keep(result)
        assert json.loads(args.output.read_text())["results"] == [result]
    document.add(result)
    assert json.loads(args.output.read_text())["results"] == [result]


def test_probe_trains(settings):
    import memory

    shared = {key: value for key, value in vars(settings).items() if key != "images"}
    assert memory.probe("squeezenet1_1", "gpuprefetch", {}, shared, 16.0, 2) == {"fits": True}


def test_idle_loader(settings):
    import memory

    result = memory.idle("torchvision", {}, vars(settings) | {"train": False, "images": 8})
    assert result["held_gib"] == 0.0  # no device


def test_memory_stage_by_stage(settings):
    import memory
    import table

    shared = {key: value for key, value in vars(settings).items() if key != "images"}
    found = memory.stages("squeezenet1_1", "gpuprefetch", {}, shared, 2)
    assert list(found["stages"])[-1] == "training"
    assert all(used["device_gib"] == 0.0 for used in found["stages"].values())  # no device
    result = {"what": "stages", "model": "a", "loader": "gpuprefetch", **found}
    assert "| a: **gpuprefetch** | 0.00 (0.00) |" in table.memory_tables([{"results": [result]}])[0]


@pytest.mark.parametrize("workers", [0, 8])
def test_windows_hold_whole_bursts(workers):
    import clock
    import torch

    batch = torch.zeros(1, 3, 2, 2).contiguous(memory_format=torch.channels_last), torch.ones(1)

    def batches():  # as of eight workers: eight of them, and then nothing
        begin = time.perf_counter()
        for number in itertools.count():
            at = begin + 0.2 * (number // 8) + 0.0125 * (number % 8)
            time.sleep(max(at - time.perf_counter(), 0.0))
            yield batch

    timing = {"warmup": 0.0, "warmup_steps": 8, "seconds": 0.75, "repeats": 3, "workers": workers}
    result = clock.measure(batches(), lambda *batch: None, device="cpu", **timing)
    rates = result["images_per_second"]["values"]
    assert all(rate == pytest.approx(40, rel=0.1) for rate in rates) == (workers == 8)


def test_cpu_seconds_count_children():
    import clock

    before = clock.cpu_seconds()
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", burn], stdin=pipe, stdout=pipe) as child:
        child.stdout.readline()
        assert clock.cpu_seconds() - before >= 0.28  # while it is alive
        child.communicate(b"\n")
    assert clock.cpu_seconds() - before >= 0.28  # and afterwards


def fake_result(loader, rate, **more):
    return {
        "model": "resnet18",
        "mode": "eager",
        "loader": loader,
        "options": {},
        "images_per_second": {"median": rate, "q1": rate, "q3": rate, "values": [rate]},
        "wait_ms_per_step": 0.1,
        "gpu_peak_gib": 5.0,
        "cpu_seconds_per_1000_images": 1.0,
    } | more


@pytest.fixture
def documents(tmp_path):
    import table

    metadata = {"utc": "2026-01-01T00:00:00+00:00", "gpu": "GPU", "affinity": 16, "cpu": "CPU"}
    metadata |= {"command": "python benchmarks/train.py", "versions": {"torch": "2.11.0"}}
    photos = {"files": 10, "distinct": 5, "mean_width": 4, "mean_height": 3, "mean_bytes": 1000}
    results = [
        fake_result("synthetic", 990.0),
        fake_result("gpuprefetch", 970.0),
        fake_result("dali-tuned", 900.0, options={"threads": 8}),
        fake_result("dali-tuned", 950.0, options={"threads": 16}),
        {"model": "resnet18", "mode": "eager", "loader": "timm", "error": "no timm"},
        fake_result("synthetic", 1010.0),
    ]
    document = {"benchmark": "train", "metadata": metadata, "photos": photos, "results": results}
    document["parameters"] = {"batch_size": 256}
    (tmp_path / "train.json").write_text(json.dumps(document))
    return table.read(tmp_path)


def test_tables(documents):
    import table

    block = table.front_page(documents)
    assert "| **gpuprefetch** | 970 (0.970) |" in block
    assert "| DALI, tuned | 950 (0.950) |" in block  # the better of its variants
    assert "| resident batch: the ceiling | 1,000 |" in block
    assert "threads=16" in table.all_results(documents, [])
    text = f"before\n{table.START}\nold\n{table.END}\nafter\n"
    written = table.replace_block(text, block, Path("README.md"))
    assert "old" not in written
    assert written.startswith("before\n") and written.endswith("\nafter\n")
    assert table.replace_block(written, block, Path("README.md")) == written
    with pytest.raises(ValueError, match="must contain"):
        table.replace_block("no markers", block, Path("README.md"))


def test_the_front_page_shows_most_models_of_most_cores(documents):
    import table

    (first,) = documents
    first["results"].append(fake_result("gpuprefetch", 880.0, model="resnet50"))
    few = [fake_result("gpuprefetch", 555.0, model="shufflenet_v2_x0_5")]
    many = [fake_result("gpuprefetch", 666.0, model=model) for model in ("a", "b", "c")]
    larger = first | {"parameters": {"batch_size": 512}, "results": few}
    smaller = first | {"metadata": first["metadata"] | {"affinity": 4}, "results": many}
    for others in ([larger, smaller], [smaller, larger]):
        block = table.front_page([first, *others])
        assert "970" in block
        assert "555" not in block
        assert "666" not in block
        assert "555" in table.all_results([first, *others], [])
    assert table.front_page([]) == ""


def test_every_training_run_is_shown(documents):
    import table

    (first,) = documents
    first["metadata"]["commit"] = "abc"
    for i, used in {1: 1.5, 3: 2.25, 5: 1.0}.items():
        first["results"][i]["gpu_peak_gib"] = used
    lost = [fake_result("synthetic", 100.0), fake_result("gpuprefetch", 70.0)]
    early = {"utc": "2025-01-01T00:00:00+00:00", "commit": "old"}
    run = first | {"file": "runs/old.json", "metadata": first["metadata"] | early, "results": lost}
    text = table.all_results(documents, [run])
    one = "| [old](results/runs/old.json) | resnet18 eager | 0.700 |  |  | 0.00 |  |"
    other = "| [abc](results/train.json) | resnet18 eager | 0.970 | 0.950 | 1.021 | 0.50 | 1.25 |"
    assert f"{one}\n{other}" in text
    assert "[old]" not in table.all_results(documents, [])


def test_plot(documents, tmp_path):
    pytest.importorskip("matplotlib")
    import table

    table.draw(documents, tmp_path / "docs" / "results.svg")
    assert "gpuprefetch" in (tmp_path / "docs" / "results.svg").read_text()


def test_committed_tables_are_fresh(monkeypatch):
    import table

    monkeypatch.setattr(sys, "argv", ["table.py", "--check"])
    table.main()


def test_doctor_of_the_benchmarks(settings):
    import doctor

    result = doctor.measure("model-bound", "squeezenet1_1", vars(settings), 0.1)
    assert result["expected"] == "model"
    found, changes = result["report"]["found"], result["report"]["changes"]
    assert found["images_per_second"] > 0
    # Steps of this size are too short to be sure of the verdict.
    assert result["right"] == (found["bound"] == "model" and not changes)


def test_timeline(photos, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    import timeline

    output, figure = tmp_path / "timeline.json", tmp_path / "timeline.svg"
    options = f"--model squeezenet1_1 --steps 8 --output {output} --figure {figure}"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    arguments = ["timeline.py", "--data", str(photos), *TINY, *options.split()]
    monkeypatch.setattr(sys, "argv", arguments)
    timeline.main()
    result = json.loads(output.read_text())["result"]
    assert result["batch"] == 4
    assert set(result["lanes"]) == {"worker 1", "training loop"}
    assert {bar[3] for bar in result["lanes"]["training loop"]} >= {"wait", "fetch", "train step"}
    assert 0 < result["wait_ms"] < result["step_ms"]
    figure.unlink()
    monkeypatch.setattr(sys, "argv", ["", "--draw", str(output), "--figure", str(figure)])
    timeline.main()
    assert "worker 1" in figure.read_text()


def test_timeline_of_a_gpu():
    import timeline

    def event(cat, name, ts, dur, tid, correlation=None):
        args = {} if correlation is None else {"correlation": correlation}
        return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}

    events = []
    for batch in range(3):
        at = 1000 * batch
        events += [
            event("cpu_op", "gpuprefetch.fetch", at - 90, 80, 2),
            event("cpu_op", "gpuprefetch.copy", at, 50, 2),
            event("cuda_runtime", "cudaMemcpyAsync", at + 10, 5, 2, at + 1),
            event("gpu_memcpy", "Memcpy HtoD", at + 20, 20, 7, at + 1),
            # Two decode calls for each batch, on two threads.
            event("cpu_op", "gpuprefetch.decode", at + 100, 200, 3),
            event("cpu_op", "gpuprefetch.decode", at + 110, 200, 4),
            event("cuda_runtime", "cudaLaunchKernel", at + 150, 5, 4, at + 2),
            event("kernel", "color", at + 200, 30, 9, at + 2),
            event("cpu_op", "gpuprefetch.wait", at + 300, 100, 1),
            event("user_annotation", "train step", at + 400, 400, 1),
            event("cuda_runtime", "cudaLaunchKernel", at + 410, 5, 1, at + 3),
            event("kernel", "forward", at + 500, 100, 5, at + 3),
            event("cuda_driver", "cuLaunchKernel", at + 600, 5, 6, at + 4),  # backward's thread
            event("kernel", "backward", at + 620, 300, 5, at + 4),
            event("gpu_user_annotation", "train step", at + 500, 400, 5),
        ]
    lanes = timeline.trace_lanes(events, [2, 2, 2])
    assert [bar[2] for bar in lanes["decode thread 2"]] == [0, 1, 2]
    assert lanes["GPU: decode thread 2"][1] == pytest.approx((1.2, 0.03, 1, "decode"))
    assert lanes["GPU: batch stream"][2] == pytest.approx((2.02, 0.02, 2, "copy"))
    assert [bar[2] for bar in lanes["GPU: training"]] == [0, 0, 1, 1, 2, 2]
    result = timeline.one_step(lanes, 1)
    assert (result["step_ms"], result["wait_ms"]) == (1.0, 0.1)
    # 0.5 to 0.6 and 0.62 to 0.92: a gap below what can be drawn is closed.
    assert result["busy_share"]["GPU: training"] == pytest.approx(0.42)
    assert result["lanes"]["GPU: training"][1] == [0.0, 0.42, 1, "train step"]
