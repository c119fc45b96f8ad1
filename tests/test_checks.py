"""Checks can fail: their limits, and that each notices the faults planted in it.

Those of soak.py, fuzz.py, distributed.py and parity.py are beside their own tests.
"""

import importlib
import json
from functools import partial

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
independent, draws = map(Script, "independent draws".split())


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
