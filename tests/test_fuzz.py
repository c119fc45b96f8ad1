"""A slice of the fuzz test, and that it would notice a crash, a hang and a wrong neighbor."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from children import Watched

CHECKS = str(Path(__file__).parent / "checks")


@pytest.fixture
def fuzz(scripts):
    return importlib.import_module("fuzz")


def attack(fuzz, first, last, until=float("inf"), pipeline="resize", mistake=""):
    task = {"seed": 0, "device": "cpu", "decoder": "auto", "data": "", "trap": {}}
    task |= {"pipeline": pipeline, "mistake": mistake}
    return fuzz.attack(**task, first=first, last=last, until=until)


def run(fuzz, *words):
    return fuzz.fuzz(fuzz.parse([str(word) for word in words]))


def start(task, out, err):
    code = "import fuzz, json, sys; fuzz.attack(**json.loads(sys.argv[1]))"
    return Watched(out, err, code, json.dumps(task), PYTHONPATH=CHECKS)


def test_a_slice(device, fuzz):
    if device.type == "cuda":
        cases = 500
        result = run(fuzz, "--cases", cases, "--device", "cuda", "--patience", 60)
        assert result["crashes"] == []
    else:  # here, as a child's start takes longer: a crash ends this process, which is seen
        cases = 155
        result = attack(fuzz, first=31, last=31 + cases)
    counts = result["counts"]
    assert counts["good_wrong"] == 0
    assert counts["good_batches"] == 1 + 2 * -(-cases // 31)
    differing = counts.get("differs", 0)
    # Damaged, but not beyond recognition.
    assert min(counts["both_refuse"], counts["same"] + differing) > cases / 4
    if device.type == "cpu":
        assert differing == 0


@pytest.mark.parametrize("pipeline", ["crop", "policy"])
def test_other_pipelines_and_their_mistakes(device, fuzz, pipeline):
    def counted(mistake=""):
        if device.type == "cpu":
            last = 31 if mistake else 62  # a mistake shows in the good files
            return attack(fuzz, first=31, last=last, pipeline=pipeline, mistake=mistake)["counts"]
        words = "--cases 31 --device cuda --patience 60".split()
        return fuzz.fuzz(fuzz.parse(words), pipeline, mistake)["counts"]

    assert counted()["good_wrong"] == 0
    for mistake in fuzz.PIPELINES[pipeline].mistakes:
        assert counted(mistake)["good_wrong"] > 0


def test_crashes_and_hangs_are_noticed(monkeypatch, fuzz):
    # Guards the test above: each at the first case of its group, so that little comes before it.
    monkeypatch.setattr(fuzz, "start", start)
    trap = json.dumps({"0": "crash", "31": "hang"})
    result = run(fuzz, "--cases", 62, "--seed", 3, "--trap", trap, "--patience", 2)
    assert result["crashes"] == [
        {"cases": [0, 31], "ending": "signal 11"},
        {"cases": [31, 62], "ending": "hangs"},
    ]


def test_fewer_cases_rather_than_longer(fuzz):
    counts = attack(fuzz, first=31, last=124, until=0.0)["counts"]
    assert sum(count for name, count in counts.items() if not name.startswith("good")) == 31


def test_wrong_neighbors_are_noticed(monkeypatch, fuzz):
    # Guards the first test.
    whole = fuzz.Attack.__iter__

    def spoiled(self):
        for number, found in enumerate(whole(self)):
            good = max(found, key=lambda case: -case)
            yield found if number != 3 else found | {good: found[good] + torch.tensor(1 / 255)}

    monkeypatch.setattr(fuzz.Attack, "__iter__", spoiled)
    assert attack(fuzz, first=40, last=100)["counts"]["good_wrong"] == 1


def test_cases_are_a_function_of_their_number(fuzz):
    files = fuzz.draw_files()
    assert files == fuzz.draw_files()
    damaged = [fuzz.damaged(files, 0, case) for case in range(200)]
    assert damaged == [fuzz.damaged(files, 0, case) for case in range(200)]
    assert len(set(damaged)) > 195
    assert len(set(damaged) & set(files)) < 5
