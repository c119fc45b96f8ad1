"""Checks can fail: their limits, and that each notices the faults planted in it.

Those of soak.py, fuzz.py, distributed.py and parity.py are beside their own tests.
"""

import importlib
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Subset

pytestmark = pytest.mark.usefixtures("scripts", "one_thread")


class Script:
    """A check, imported where a test uses it: the examples have a train.py too."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        return getattr(importlib.import_module(self._name), name)


accuracy, bench, faults, parity = map(Script, "accuracy bench faults parity".split())
independent, draws, suite = map(Script, "independent draws suite".split())
correctness = Script("correctness")


def test_a_pipeline_beyond_its_limits_fails():
    found = {"geometric_mean_levels": 0.3, "mean_levels": 0.4, "worst_image_mean_levels": 0.9}
    for name in ("examples/imagenet val", "torchvision train, ra, v1, pil"):
        assert parity.within(name, found)
        for column in found:
            assert not parity.within(name, found | {column: 7.0})
    assert not parity.within("timm val, bicubic", found | {"worst_image_mean_levels": 2.0})
    assert parity.within("timm train", found | {"worst_image_mean_levels": 2.0})


def test_a_verdict_is_of_results_and_of_mistakes():
    good = {"check": "a", "ok": True, "mistakes": {"x": "noticed"}}
    assert bench.verdict([good, {"check": "b", "ok": True}]) == 0
    for bad in ({"ok": False}, {"mistakes": {"x": "noticed", "y": "missed"}}):
        assert bench.verdict([good, good | {"check": "b"} | bad]) == "failed: b"


def test_a_mistake_that_changes_nothing_is_refused():
    with pytest.raises(ValueError, match="changes none"):
        faults.planted([torch.nn.Identity()], faults.CROP)
    result = faults.judged("a", lambda mistake: {"ok": not mistake}, ["x"], processes=2)
    assert result == {"check": "a", "ok": True, "processes": 2, "mistakes": {"x": "noticed"}}
    blind = faults.judged("a", lambda mistake: {"ok": True}, ["x"])
    assert blind["mistakes"] == {"x": "missed"}


def test_a_place_is_read_back():
    from torchvision.transforms.v2 import functional as F

    ramp = torch.zeros(3, 30, 44)
    ramp[0] = 20 + 215 * torch.arange(44) / 43
    ramp[1] = 20 + 215 * torch.arange(30)[:, None] / 29
    for top, left, height, width in ((3, 5, 20, 30), (0, 0, 30, 44), (9, 14, 21, 30)):
        made = F.resized_crop(ramp, top, left, height, width, [24, 20], antialias=True)
        for flipped, mirrored in ((0, 0), (0, 1), (1, 1)):
            turned = F.horizontal_flip(made) if mirrored else made
            turned = F.vertical_flip(turned) if flipped else turned
            found = independent.place(turned.numpy(), 30, 44)
            want = (top, left, height, width, flipped, mirrored)
            assert tuple(map(round, found.values())) == want


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_colors_find_their_faults(device, share):
    options = {"device": device.type, "cpu_share": share}
    for name in draws.COLORS:
        assert draws.colors(name, "", **options)["ok"]
        for mistake in (faults.SWAPPED, faults.STD, faults.CENTER):
            assert not draws.colors(name, mistake, **options)["ok"]


def test_accuracy(tmp_path):
    output = tmp_path / "accuracy.json"
    assert accuracy.main(["--tiny", "--output", str(output)]) == 0
    (result,) = json.loads(output.read_text())["results"]
    assert result["ok"] and min(result["gpuprefetch"]["each"]) > 0.9
    assert set(result["mistakes"].values()) == {"noticed"}
    assert (result["policy"], result["images"], result["validation"]) == ("none", 48, 40)
    assert all(seconds > 0 for path in accuracy.PATHS for seconds in result[path]["seconds"])


def test_accuracy_is_judged_by_an_interval():
    theirs = [0.70, 0.72, 0.71, 0.69]
    judge = partial(accuracy.judge, theirs=theirs, margin=0.05)
    assert judge([0.705, 0.715, 0.71, 0.70])["ok"]
    for points in (-0.1, 0.1):
        assert not judge([value + points for value in theirs])["ok"]
    # As good on average, but nobody can tell.
    wide = judge([0.60, 0.82, 0.61, 0.79])
    assert abs(wide["difference"]) < 1e-9 and not wide["ok"]
    with pytest.raises(ValueError, match="at least 3 seeds, got 2"):
        accuracy.judge([0.7, 0.7], [0.7, 0.7], 0.05)


@pytest.fixture
def trainings(monkeypatch):
    """Trainings that only say that they took ten seconds: what was trained, in order."""
    found = SimpleNamespace(paths=[], seconds=0.0)

    def trained(case, path, seed):
        found.paths.append((case.policy, seed, path))
        found.seconds += 10.0
        return path

    def share(model, case, path, mistake=""):
        return 0.5 if mistake else 0.7 + 0.01 * (len(found.paths) % 3)

    monkeypatch.setattr("accuracy.trained", trained)
    monkeypatch.setattr("accuracy.accuracy", share)
    monkeypatch.setattr("accuracy.time.monotonic", lambda: found.seconds)
    return found


def test_accuracy_of_several_policies_stops_in_time_and_goes_on(trainings, tmp_path):
    output = tmp_path / "accuracy.json"
    words = ["--tiny", "--policies", "none", "ta", "--output", str(output)]
    # A seed of a policy is two trainings, 20 s: after three of them a fourth would end too late.
    stopped = accuracy.main([*words, "--stop-after", "79"])
    assert stopped.startswith("not finished: accuracy (none), accuracy (ta); ")
    rows = json.loads(output.read_text())["results"]
    assert [(row["policy"], row["seeds"], row["ok"]) for row in rows] == [
        ("none", 2, False),
        ("ta", 1, False),
    ]
    assert accuracy.main(words) == 0
    rows = json.loads(output.read_text())["results"]
    assert [(row["policy"], row["seeds"], row["ok"]) for row in rows] == [
        ("none", 3, True),
        ("ta", 3, True),
    ]
    policies = [(policy, seed) for seed in range(3) for policy in ("none", "ta")]
    expected = [
        (policy, seed, path)
        for policy, seed in policies
        for path in (accuracy.PATHS if seed % 2 == 0 else accuracy.PATHS[::-1])
    ]
    assert trainings.paths == expected  # each once, and each path as often first


@pytest.mark.parametrize("split", [False, True])
def test_photos_for_accuracy_are_an_image_folder(tmp_path, split):
    for root in [tmp_path / name for name in ("train", "val")] if split else [tmp_path]:
        accuracy.draw_set(root, 24, 0, tiny=True)
    given = accuracy.photos(tmp_path)
    assert given.classes == 3
    train, val = (given.of(name, None) for name in ("train", "val"))
    assert (len(train), len(val)) == ((24, 24) if split else (21, 3))
    if not split:
        assert isinstance(train, Subset)
        assert not {*train.indices} & {*val.indices}


def test_mistakes_for_accuracy_are_those_that_its_pictures_show(tmp_path):
    for name in ("train", "val"):
        accuracy.draw_set(tmp_path / name, 6, 0, tiny=True)
    images = torch.arange(24.0).view(1, 3, 2, 4)
    target = torch.tensor([2])

    def batch_with(mistake):
        ((wrong, labels),) = accuracy.faulty([(images, target)], mistake, classes=3)
        return wrong, labels.item()

    same, label = batch_with(accuracy.LABELS)
    assert label == 0 and torch.equal(same, images)
    upside_down, label = batch_with(accuracy.UPSIDE_DOWN)
    assert label == 2 and torch.equal(upside_down, images.flip(-2))
    other_colors, label = batch_with(faults.SWAPPED_COLORS)
    assert label == 2 and torch.equal(other_colors, images.flip(-3))
    drawn, given = (
        accuracy.Case(accuracy.photos(tmp_path), "none", accuracy.parse(["--tiny", *words]))
        for words in ([], ["--data", str(tmp_path)])
    )
    assert faults.SWAPPED_COLORS in accuracy.begun(drawn)["mistaken"]
    assert accuracy.UPSIDE_DOWN in accuracy.begun(given)["mistaken"]


def test_photos_of_test_are_for_validation_where_they_have_the_classes(tmp_path):
    for name in ("train", "val", "test"):
        accuracy.draw_set(tmp_path / name, 24, 0, tiny=True)
    given = accuracy.photos(tmp_path)
    assert len(given.of("train", None)) == 24
    assert len(given.of("val", None)) == 48
    args = accuracy.parse(["--tiny"])
    case = accuracy.Case(given, "none", args)
    sides = [accuracy.loader_of(case, path, "val", 0) for path in accuracy.PATHS]
    for theirs, ours in zip(*sides, strict=True):
        assert torch.equal(theirs[1], ours[1])
        assert (theirs[0] - ours[0]).abs().max() < 0.1  # of values from -2 to 2.6: rounding
    (tmp_path / "test" / "9").mkdir()
    assert len(accuracy.photos(tmp_path).of("val", None)) == 24


def test_a_folder_that_is_none_of_classes_is_refused(tmp_path):
    outer = tmp_path / "photos"
    with pytest.raises(ValueError, match=r"class folders \[\]. --data takes a folder of two"):
        accuracy.photos(outer)
    for name in ("train", "val"):
        accuracy.draw_set(outer / "clothes" / name, 6, 0, tiny=True)
    with pytest.raises(ValueError, match="class folders") as caught:
        accuracy.photos(outer)
    advice = str(caught.value).partition("Give --data ")[2].partition(",")[0]
    assert accuracy.photos(Path(advice)).classes == 3
    (outer / "clothes" / "val" / "other").mkdir()
    with pytest.raises(ValueError, match="Only one of them has other"):
        accuracy.photos(Path(advice))


SOME = {
    "good": "def test_a(): pass\ndef test_b(): pass\n",
    "alone": "import pytest\n@pytest.mark.alone\ndef test_a(): pass\ndef test_b(): pass\n",
    "skips": "import pytest\n@pytest.mark.skip(reason='no GPU')\ndef test_a(): pass\n",
}
BAD = {
    "fails": "def test_a(tmp_path): assert tmp_path == 2\ndef test_b(): pass\n",
    "dies": "import os\ndef test_a(): os._exit(3)\n",
    "no_test": "x = 1\n",
    "broken": "import nothing_of_that_name\n",
}


def suite_of(folder, files, *words):
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    output = folder / "suite.json"
    words = ["--cpu", "--tests", folder, "--output", output, "--jobs", 2, *words]
    code = suite.main([str(word) for word in words])
    content = json.loads(output.read_text())
    results = {result["file"]: result for result in content["results"]}
    counts = {
        name: tuple(results[f"test_{name}.py"][count] for count in suite.COUNTS) for name in files
    }
    return code, content, counts, results


@pytest.fixture
def few_plugins(monkeypatch):
    """The processes of a suite import pytest's plugins, of which these tests need none."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("few_plugins")
def test_the_suites_result_is_a_file(tmp_path):
    code, content, counts, results = suite_of(tmp_path, SOME)
    assert code == 0
    assert counts == {"good": (2, 0, 0), "alone": (2, 0, 0), "skips": (0, 0, 1)}
    counted = {"files": 3, "passed": 4, "failed": 0, "skipped": 1}
    assert content["summary"] == counted | {"missing": []}
    assert results["test_skips.py"]["reasons"] == {"no GPU": 1}
    assert content["dirty"] in (True, False)
    assert {"commit", "gpu", "cpu", "versions"} <= content["metadata"].keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("few_plugins")
def test_whatever_is_wrong_with_a_test_file_fails_the_suite(tmp_path):
    code, _, counts, results = suite_of(tmp_path, BAD)
    assert code == 1
    assert {name: found[1] for name, found in counts.items()} == dict.fromkeys(BAD, 1)
    assert counts["fails"] == (1, 1, 0)
    assert "exit code 3" in results["test_dies.py"]["failures"][0]
    (failure,) = results["test_fails.py"]["failures"]
    assert failure.startswith("test_a: AssertionError: assert PosixPath('PATH') == 2")
    # The results of the others are kept.
    hangs = {"hangs": "import time\ndef test_a(): time.sleep(100)\n"}
    words = "--go-on --only test_hangs --timeout 2".split()
    code, content, counts, results = suite_of(tmp_path, hangs, *words)
    assert (code, counts) == (1, {"hangs": (0, 1, 0)})
    assert "no end after 2 s" in results["test_hangs.py"]["failures"][0]
    counted = {"files": 5, "passed": 1, "failed": 5, "skipped": 0}
    assert content["summary"] == counted | {"missing": []}
    with pytest.raises(SystemExit, match="no such test files"):
        suite_of(tmp_path, {}, "--only", "test_else")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("few_plugins")
def test_a_suite_that_is_cut_short_names_what_is_missing(tmp_path, monkeypatch):
    run = suite.run

    def cut_short(file, marker, *rest):
        if marker == "alone":
            raise KeyboardInterrupt
        return run(file, marker, *rest)

    monkeypatch.setattr("suite.run", cut_short)
    with pytest.raises(KeyboardInterrupt):
        suite_of(tmp_path, SOME)
    content = json.loads((tmp_path / "suite.json").read_text())
    assert content["summary"]["missing"] == ["test_alone.py"]
    name, counts = correctness.suite_row(content)
    assert name.endswith("2 files, without test_alone.py")
    assert counts == "2 passed, 0 failed, 1 skipped"


@pytest.mark.filterwarnings("ignore")
def test_the_files_of_a_suite_take_turns_with_the_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    args = suite.parse([])
    orders = [suite.environment(args, number)["CUDA_VISIBLE_DEVICES"] for number in range(4)]
    assert orders == ["4,6,7", "6,7,4", "7,4,6", "4,6,7"]
    assert suite.environment(suite.parse(["--cpu"]), 1)["CUDA_VISIBLE_DEVICES"] == ""


def test_the_suite_begins_with_what_took_longest(tmp_path, monkeypatch):
    for name, size in (("quick", 9), ("slow", 1), ("new", 5), ("newer", 7)):
        (tmp_path / f"test_{name}.py").write_text("#" * size)
    for run, slow in (("a", 20.0), ("b", 3.0)):  # the longest of its runs counts
        results = [{"file": "test_slow.py", "seconds": slow}]
        results += [{"file": "test_quick.py", "seconds": 5.0}]
        (tmp_path / f"suite-h1-{run}.json").write_text(json.dumps({"results": results}))
    took = suite.took(tmp_path)
    assert took == {"test_slow.py": 20.0, "test_quick.py": 5.0}
    monkeypatch.setattr("suite.took", lambda: took)
    files = suite.chosen(suite.parse(["--tests", str(tmp_path)]))
    assert [file.stem for file in files] == ["test_newer", "test_new", "test_slow", "test_quick"]


def test_a_suites_file_is_named_by_the_gpu():
    for gpu, name in {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA A100-SXM4-40GB": "a100-sxm4-40gb",
    }.items():
        assert suite.name_of(gpu) == name
    assert suite.name_of(None) == "cpu"
