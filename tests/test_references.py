"""The recipes of torchvision's references: they train as before, and go on within an epoch."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("pycocotools")

EXAMPLE = Path(__file__).parents[1] / "examples" / "references"
SMALL = {
    "detection": ["--augmentation", "hflip"],
    "segmentation": [],
}

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # pycocotools
]


@pytest.fixture(scope="module")
def train():
    """The script as a module, for this file only: other folders have a train.py too."""
    path, loaded = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(EXAMPLE))
    yield importlib.import_module("train")
    sys.path[:] = path
    for name in {"train", "presets", "scenes", "draw"} - loaded:
        sys.modules.pop(name, None)


class Small(torch.nn.Module):
    """Called as torchvision's models are, and quick."""

    def __init__(self):
        super().__init__()
        self.scores = torch.nn.Conv2d(3, 21, 3, padding=1)

    def forward(self, images, targets=None):
        if targets is None:
            return {"out": self.scores(images)}
        sums = [self.scores(image).mean() ** 2 for image in images]
        sides = []  # of boxes, which a flip leaves as they are
        for image, target in zip(images, targets, strict=True):
            boxes = target["boxes"].float() / image.shape[-1]
            sides.append((boxes[:, 2:] - boxes[:, :2]).mean())
        return {"images": sum(sums), "boxes": (sum(sides) - sum(sums)) ** 2}


@pytest.mark.parametrize("task", SMALL)
def test_it_trains_as_before_and_goes_on(train, task, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, "build_model", lambda args: Small())
    root = tmp_path / "drawn"
    train.draw(task, root, 10)
    arguments = [task, str(root), *SMALL[task], "--side", "64", "--workers", "0"]
    arguments += ["--batch-size", "3"]

    whole = train.main(arguments)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == whole
    assert whole["steps"] == 3 and all(loss > 0 for loss in whole["losses"])

    checkpoint = ["--checkpoint", str(tmp_path / "checkpoint.pt")]
    stopped = train.main([*arguments, *checkpoint, "--limit-steps", "1"])
    assert stopped["losses"] == whole["losses"][:1]
    resumed = train.main([*arguments, *checkpoint])
    assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-4)

    # The same pictures in the same order, with other random parameters: flips, or other sizes.
    plain = train.main([*arguments, "--plain"])
    rel = 0.1 if task == "detection" else 0.5
    assert plain["losses"] == pytest.approx(whole["losses"], rel=rel)


@pytest.mark.parametrize("task", SMALL)
def test_the_loop_gets_what_it_got(train, task, tmp_path):
    root = tmp_path / "drawn"
    train.draw(task, root, 6)
    arguments = [task, str(root), "--side", "64", "--workers", "0", "--batch-size", "2"]
    loaders = [
        train.build_loader(train.parse_args([*arguments, *way])) for way in ([], ["--plain"])
    ]
    (images, targets), (want, want_targets) = (next(iter(loader)) for loader in loaders)
    assert type(images) is type(want) and type(targets) is type(want_targets)
    assert {image.dtype for image in images} == {torch.float32}
    if task == "detection":
        assert [*targets[0]] == [*want_targets[0]]
        assert all(type(target["boxes"]) is torch.Tensor for target in targets)
    else:
        assert (targets.dtype, targets.shape) == (want_targets.dtype, want_targets.shape)
