"""The self-supervised example: the sizes of views, the losses, and that both methods train."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from fakes import EXAMPLES, example
from torch.nn import functional as F

SIZES = {"image_size": 32, "local_size": 16, "prototypes": 64, "momentum": 0.9, "model": "tiny"}
SIZES |= {"min_area": 0.4, "strength": 0.5, "temperature": 0.2}
ARGS = SimpleNamespace(**SIZES)
TINY = [f"--{key.replace('_', '-')}={value}" for key, value in SIZES.items()]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def train():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES / "ssl")
        yield example("ssl/train")
    del sys.modules["methods"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    draw = example("imagenet/draw")
    draw.SIDES = (60, 90)
    folder = tmp_path_factory.mktemp("ssl") / "pictures"
    draw.write_folder(folder, train_per_class=2, val_per_class=1)
    return folder


@pytest.mark.parametrize(("method", "local"), [("simclr", 0), ("dino", 8)])
def test_a_batch_has_the_views_of_its_method(train, folder, method, local):
    args = SimpleNamespace(**SIZES, data=folder, batch_size=4, workers=0)
    loader = train.build_loader(args, "train", train.METHODS[method].transforms(args), shuffle=True)
    views, labels = next(iter(loader))
    assert [view.shape for view in views] == [(4, 3, 32, 32)] * 2 + [(4, 3, 16, 16)] * local
    assert len(labels) == 4
    assert not torch.equal(views[0], views[1])
    assert all(view.isfinite().all() and view.std() > 0.1 for view in views)


@pytest.mark.parametrize(("method", "epochs"), [("simclr", 10), ("dino", 3)])
def test_it_trains(train, folder, method, epochs, tmp_path):
    checkpoint = tmp_path / "backbone.pt"
    words = [*TINY, f"--epochs={epochs}", "--batch-size=20", "--workers=0"]
    words += ["--method", method, f"--checkpoint={checkpoint}"]
    summary = train.main([str(folder), *words])
    losses = summary["losses"]
    assert 0 < sum(losses[-2:]) / 2 < losses[0]
    assert 0 <= summary["neighbors_top1"] <= 1
    assert not any("fc" in name for name in torch.load(checkpoint, weights_only=True))


def test_other_classes_in_val_are_refused(train, tmp_path):
    for split in ("train/a", "train/b", "val/b"):
        (tmp_path / split).mkdir(parents=True)
        (tmp_path / split / "0.jpg").touch()
    with pytest.raises(ValueError, match="train and val need the same folders"):
        train.main([str(tmp_path)])
    (tmp_path / "val" / "b").rename(tmp_path / "val" / "a")
    (tmp_path / "train" / "b" / "0.jpg").rename(tmp_path / "train" / "a" / "1.jpg")
    (tmp_path / "train" / "b").rmdir()
    with pytest.raises(ValueError, match="2 pictures do not fill a batch"):
        train.main([str(tmp_path), *TINY])


def test_nt_xent_is_the_mean_over_all_pairs(train):
    first, second = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    both = F.normalize(torch.cat([first, second]), dim=1)
    total = 0.0
    for i in range(6):
        near = [math.exp(both[i] @ both[k] / 0.1) for k in range(6) if k != i]
        total -= math.log(math.exp(both[i] @ both[(i + 3) % 6] / 0.1) / sum(near))
    loss = sys.modules["methods"].nt_xent(first, second, 0.1)
    assert loss.item() == pytest.approx(total / 6, rel=1e-5)


def test_dino_compares_every_crop_but_with_itself_and_moves_center_and_teacher(train):
    torch.manual_seed(0)
    dino = train.METHODS["dino"](ARGS)
    student, teacher = torch.randn(3, 2, 64), torch.randn(2, 2, 64)
    pairs = [(t, s) for t in range(2) for s in range(3) if t != s]
    want = [
        F.cross_entropy(student[s] / 0.1, (teacher[t] / 0.04).softmax(-1)).item() for t, s in pairs
    ]
    assert dino.loss(student, teacher).item() == pytest.approx(sum(want) / 4, rel=1e-5)
    torch.testing.assert_close(dino.center, 0.1 * teacher.mean((0, 1)))
    ours, theirs = dino.teacher[1].layers[0].weight, dino.student[1].layers[0].weight
    theirs.data += 1.0
    before = ours.clone()
    dino.after_step(0.0)
    torch.testing.assert_close(ours, before + 0.1)
    dino.after_step(1.0)
    torch.testing.assert_close(ours, before + 0.1)
