"""The fine-tuning example: it trains, resumes in the middle of an epoch, and shows what it does."""

import re
from pathlib import Path

import pytest
import torch
import torchvision
from fakes import EXAMPLES, example
from PIL import Image
from torch import nn
from torchvision.transforms import InterpolationMode
from torchvision.transforms._presets import ImageClassification

from gpuprefetch import EncodedImageFolder

SMALL = ImageClassification(crop_size=32, resize_size=36, interpolation=InterpolationMode.BILINEAR)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def finetune():
    return example("finetune")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """30 pictures of 10 classes: 24 to train on."""
    draw = example("imagenet/draw")
    draw.SIDES = (40, 70)
    folder = tmp_path_factory.mktemp("finetune") / "pictures"
    draw.write_folder(folder, train_per_class=3, val_per_class=1)
    return folder / "train"


class Weights:
    """What torchvision's enum of weights is asked for."""

    class DEFAULT:
        @staticmethod
        def transforms():
            return SMALL


@pytest.fixture
def run(finetune, folder, tmp_path, monkeypatch, capsys):
    """Run the script on a small model and small crops; returns what it printed and its checkpoint.

    ``asked`` collects the names of models and weights.
    """
    asked = []

    def get_model(name, *, weights):
        asked.append((name, weights))
        features = [nn.Conv2d(3, 8, 5, stride=4, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
        features += [nn.AdaptiveAvgPool2d(2), nn.Flatten()]
        return nn.Sequential(nn.Sequential(*features), nn.Sequential(nn.Linear(32, 1000)))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torchvision.models, "get_model", get_model)
    monkeypatch.setattr(torchvision.models, "get_model_weights", lambda name: Weights)

    def run(*arguments, data=folder):
        arguments = ["--epochs", "2", "--batch-size", "6", "--workers", "0", *arguments]
        finetune.main([str(data), *arguments])
        return capsys.readouterr().out, torch.load("finetune.pt", weights_only=True)

    run.asked = asked
    return run


def test_it_trains_from_weights_and_shows_what_the_model_sees(run, folder):
    printed, state = run("--lr", "0.01", "--epochs", "4")
    assert run.asked == [("resnet50", "DEFAULT")]
    assert [line.split(":")[0] for line in printed.splitlines()] == [f"epoch {n}" for n in "1234"]
    assert "of 6 photos are right" in printed
    assert state["classes"] == EncodedImageFolder(folder).classes
    assert state["model"]["1.0.weight"].shape == (10, 32)
    assert state["lr"]["last_epoch"] == 4 * 4
    with Image.open("preview.png") as sheet:
        assert sheet.width > sheet.height


def test_weights_and_model_are_chosen_by_name(run):
    run("--epochs", "1", "--weights", "none", "--model", "vit_b_16")
    run("--epochs", "1", "--weights", "IMAGENET1K_V1")
    assert run.asked == [("vit_b_16", None), ("resnet50", "IMAGENET1K_V1")]


def test_resumed_in_the_middle_of_an_epoch_it_ends_with_the_same_weights(
    run, finetune, monkeypatch
):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    three = ("--epochs", "3")  # the order of the third one is drawn after the resume
    _, whole = run(*three)
    save = finetune.save
    left = 2  # of the second save, at step 6, two steps into the second epoch

    def save_and_fail(*args):
        nonlocal left
        save(*args)
        left -= 1
        if not left:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(finetune, "save", save_and_fail)
        run("--save-every", "6", *three)
    interrupted = torch.load("finetune.pt", weights_only=True)
    assert (interrupted["epoch"], interrupted["loader"]["batches"]) == (1, 2)
    printed, resumed = run("--resume", *three)
    first, says, *rest = [line.split(":")[0] for line in printed.splitlines()]
    assert (first, says) == ("epoch 1", "goes on after step 6 of 12")
    assert rest == ["epoch 2", "epoch 3"]
    assert run.asked[-1] == ("resnet50", None)  # no weights are read that the checkpoint replaces
    torch.testing.assert_close(resumed["model"], whole["model"], rtol=0, atol=0)

    # Guards the test: the loader's place matters.
    torch.save(interrupted, "finetune.pt")
    with monkeypatch.context() as patch:
        patch.setattr(finetune.DataPrefetcher, "load_state_dict", lambda *_: None)
        _, other = run("--resume", *three)
    assert not torch.equal(other["model"]["1.0.weight"], whole["model"]["1.0.weight"])

    # So does torch's random state, which the order of the third epoch is drawn from.
    torch.save(interrupted | {"random": torch.get_rng_state()}, "finetune.pt")
    _, other = run("--resume", *three)
    assert not torch.equal(other["model"]["1.0.weight"], whole["model"]["1.0.weight"])


def test_a_checkpoint_or_a_last_layer_that_is_missing_is_named(run, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        run("--resume")
    assert "--resume: there is no finetune.pt in this folder" in capsys.readouterr().err
    convolutional = nn.Sequential(nn.Conv2d(3, 8, 5), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    monkeypatch.setattr(torchvision.models, "get_model", lambda *_, **options: convolutional)
    with pytest.raises(SystemExit, match="squeezenet1_0 has no linear layer"):
        run("--model", "squeezenet1_0")


def test_photos_that_cannot_be_decoded_are_named(run, folder, tmp_path):
    copied = tmp_path / "photos"
    for path in folder.rglob("*.JPEG"):
        target = copied / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    (broken, *_) = sorted(copied.rglob("*_0001.JPEG"))
    broken.write_bytes(b"no picture")
    printed, _ = run("--epochs", "1", data=copied)
    assert f"left out: cannot decode '{broken}'" in printed


def test_the_model_is_used_as_the_page_says(run, folder, monkeypatch, capsys):
    run("--epochs", "1")
    page = (EXAMPLES.parent / "docs" / "finetune.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    photo = next(folder.rglob("*.JPEG"))
    Path("photo.jpg").write_bytes(photo.read_bytes())
    small = torchvision.models.get_model("resnet50", weights=None)
    small[1][0] = nn.Linear(32, 10)
    monkeypatch.setattr(torchvision.models, "resnet50", lambda *, num_classes: small)
    monkeypatch.setattr(torchvision.models, "ResNet50_Weights", Weights)
    exec(source, {})
    lines = [line.split(": ") for line in capsys.readouterr().out.splitlines()]
    names, shares = zip(*lines, strict=True)
    assert set(names) < set(EncodedImageFolder(folder).classes)
    assert len(names) == 3
    assert [*shares] == sorted(shares, key=lambda share: -int(share[:-1]))


def test_it_is_short():
    lines = (EXAMPLES / "finetune.py").read_text().splitlines()
    assert sum(map(bool, lines)) < 100
