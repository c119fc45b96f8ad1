"""The training example: it trains, resumes, counts right, runs in several processes, and draws."""

import importlib
import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from children import ranks, script
from PIL import Image
from small_model import get_model
from torchvision.datasets import ImageFolder

EXAMPLE = Path(__file__).parents[1] / "examples" / "imagenet"
TINY = ["--image-size", "32", "--batch-size", "4", "--workers", "0"]

SMALL = "import small_model, torchvision; torchvision.models.get_model = small_model.get_model"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def train():
    """The script as a module, for this file only: the benchmarks have a train.py too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        patch.setattr(torchvision.models, "get_model", get_model)
        yield importlib.import_module("train")
    for name in ("train", "draw"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def draw(train):
    return importlib.import_module("draw")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, draw):
    """20 training pictures, and 19 for validation, which no batch size or world size divides."""
    folder = tmp_path_factory.mktemp("example") / "pictures"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw, "SIDES", (60, 120))
        draw.write_folder(folder, train_per_class=2, val_per_class=2)
    next(folder.rglob("val/*/*.JPEG")).unlink()
    return folder


@pytest.fixture
def run(train, folder, tmp_path, monkeypatch, capfd):
    """Run the script in this process; returns its summary and the checkpoint it left."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, data=folder):
        train.main([*map(str, [data] if data else []), *TINY, "--limit-batches", "3", *arguments])
        summary = json.loads(capfd.readouterr().out.splitlines()[-1])
        return summary, torch.load("checkpoint.pt", weights_only=True)

    return run


@pytest.fixture
def interrupted(train, run, monkeypatch):
    """Run the script until it has saved once; returns that checkpoint."""

    def interrupted(*arguments, save=train.Learner.save):
        def save_and_fail(*args):
            save(*args)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(train.Learner, "save", save_and_fail)
            run(*arguments)
        return torch.load("checkpoint.pt", weights_only=True)

    return interrupted


@pytest.mark.parametrize("loader", ["gpuprefetch", "torchvision"])
def test_resumed_run_ends_with_the_same_weights(run, interrupted, loader):
    arguments = ["--loader", loader, "--epochs", "2", "--limit-batches", "2"]
    summary, checkpoint = run(*arguments)
    assert checkpoint["epoch"] == 2
    assert summary["loader"] == loader
    assert summary["images_per_second"] > 0
    assert 0 <= summary["data_wait_share"] <= 1

    assert interrupted(*arguments)["epoch"] == 1
    _, resumed = run(*arguments, "--resume")
    assert resumed["epoch"] == 2
    torch.testing.assert_close(resumed["model"], checkpoint["model"], rtol=0, atol=0)
    with pytest.raises(ValueError, match="Raise --epochs"):
        run(*arguments, "--resume")


def test_resumed_in_the_middle_of_an_epoch(train, run, interrupted, device, monkeypatch):
    monkeypatch.setattr(train, "local_device", lambda: device)
    if device.type == "cuda":
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    # Without workers all pictures are the GPU's, which the CPU's decoder would not equal.
    workers = "1" if device.type == "cpu" else "0"
    arguments = f"--epochs 2 --workers {workers} --checkpoint-steps 1 --limit-batches 2".split()
    _, whole = run(*arguments)
    (midway,) = interrupted(*arguments)["midway"]
    assert midway["loader"]["batches"] == 1
    checkpoint = Path("checkpoint.pt").read_bytes()
    _, resumed = run(*arguments, "--resume")
    for part in ("model", "optimizer", "scheduler"):
        torch.testing.assert_close(resumed[part], whole[part], rtol=0, atol=0)

    # Guards the test: what the checkpoint says of random numbers and batches does matter.
    forgotten = [(train.DataPrefetcher, "load_state_dict"), (train, "set_random_states")]
    for owner, name in forgotten:
        Path("checkpoint.pt").write_bytes(checkpoint)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *_: None)
            _, other = run(*arguments, "--resume")
        with pytest.raises(AssertionError):
            torch.testing.assert_close(other["model"], whole["model"], rtol=0, atol=0)

    Path("checkpoint.pt").write_bytes(checkpoint)
    with pytest.raises(ValueError, match="by 1 processes with --loader gpuprefetch"):
        run("--epochs", "2", "--loader", "torchvision", "--resume")


def test_resumed_with_other_steps_it_has_the_learning_rate_of_its_place(
    run, train, interrupted, monkeypatch
):
    """As after another number of processes, which has another rate and number of steps."""
    finished = ["--epochs", "2", "--batch-size", "2", "--limit-batches", "2"]
    _, whole = run(*finished)
    assert interrupted("--epochs", "2", "--limit-batches", "3")["epoch"] == 1
    step, seen = train.Learner.step, []

    def rates(learner, *batch):
        seen.append(learner.optimizer.param_groups[0]["lr"])
        return step(learner, *batch)

    monkeypatch.setattr(train.Learner, "step", rates)
    _, resumed = run(*finished, "--resume")
    assert resumed["scheduler"]["last_epoch"] == whole["scheduler"]["last_epoch"] == 4
    base = train.LEARNING_RATE / 256 * 2
    assert seen == pytest.approx([base * train.lr_factor(step, 4) for step in (2, 3)])


def test_weights_get_a_new_last_layer_for_other_classes(train, run, monkeypatch):
    asked = []

    def trained(name, *, weights=None):
        asked.append(weights)
        return get_model(name, num_classes=1000)

    monkeypatch.setattr(torchvision.models, "get_model", trained)
    arguments = ["--weights", "DEFAULT", "--lr", "0.01"]
    summary, checkpoint = run("--epochs", "1", *arguments)
    assert (summary["weights"], summary["lr"]) == ("DEFAULT", 0.01)
    assert checkpoint["model"]["6.weight"].shape == (10, 32)
    assert checkpoint["optimizer"]["param_groups"][0]["initial_lr"] == 0.01 / 256 * 4
    run("--epochs", "2", *arguments, "--resume")
    assert asked == ["DEFAULT", None]  # a checkpoint has all weights


def test_a_model_without_a_last_linear_layer_takes_no_weights(train, run, monkeypatch):
    monkeypatch.setattr(torchvision.models, "get_model", lambda *_, **__: torch.nn.Conv2d(3, 9, 1))
    with pytest.raises(ValueError, match="resnet18 has no linear layer at its end to replace"):
        run("--epochs", "1", "--weights", "DEFAULT")


def test_a_shorter_epoch_than_the_interrupted_one_is_an_error(run, interrupted):
    arguments = ["--epochs", "1", "--checkpoint-steps", "2"]
    interrupted(*arguments)
    with pytest.raises(ValueError, match=r"after step 2 of an epoch. Raise --limit-batches"):
        run(*arguments, "--limit-batches", "2", "--resume")


@pytest.mark.parametrize("change", ["classes", "no checkpoint"])
def test_a_checkpoint_of_another_model_is_an_error(run, folder, tmp_path, change):
    _, checkpoint = run("--epochs", "1")
    data = folder
    if change == "classes":
        data = shutil.copytree(folder, tmp_path / "other")
        for split in ("train", "val"):
            shutil.rmtree(data / split / "plain_cross")
    else:
        torch.save(checkpoint["model"], "checkpoint.pt")
    with pytest.raises(ValueError, match=r"^checkpoint.pt is none of .*\.$") as error:
        run("--epochs", "2", "--resume", data=data)
    assert error.value.__suppress_context__  # torch's list of all weights


def test_train_and_val_with_other_classes_are_an_error(run, folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    shutil.rmtree(other / "val" / "plain_cross")
    with pytest.raises(ValueError, match=r"the same folders.* has plain_cross"):
        run("--epochs", "1", data=other)


@pytest.mark.parametrize("loader", ["gpuprefetch", "torchvision"])
def test_the_reference_recipe_is_one_command(train, run, loader):
    recipe = "--auto-augment ta_wide --random-erasing 0.5 --mixup 0.2 --cutmix 1 --color-jitter 0.2"
    summary, _ = run("--epochs", "1", "--loader", loader, *recipe.split())
    assert summary["auto_augment"] == "ta_wide" and summary["mixup"] == 0.2
    args = train.parse_args(recipe.split())
    names = [type(op).__name__ for op in train.pil_transforms(args, "train").transforms]
    here = [type(op).__name__ for op in train.device_transforms(args, "train")]
    policies = ["ColorJitter", "TrivialAugmentWide", "Normalize", "RandomErasing"]
    assert [name for name in names if name in policies] == policies == here[2:]


def test_without_data_it_trains_on_a_folder_that_is_drawn_once(draw, run, tmp_path, monkeypatch):
    monkeypatch.setattr(draw.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(draw, "TRAIN_PER_CLASS", 1)
    monkeypatch.setattr(draw, "VAL_PER_CLASS", 1)
    summary, _ = run("--epochs", "1", "--summary", "summary.json", data=None)
    assert json.loads(Path("summary.json").read_text()) == summary
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.JPEG")}
    assert len(times) == 20
    assert draw.drawn_folder() == next(iter(times)).parents[2]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.JPEG")} == times


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="the folder is the user's own here")
@pytest.mark.parametrize("link", [False, True])
def test_a_folder_that_somebody_else_has_made_is_refused(draw, tmp_path, monkeypatch, link):
    monkeypatch.setattr(draw.tempfile, "tempdir", str(tmp_path))
    uid = os.getuid()
    for user in (uid, uid + 1):
        monkeypatch.setattr(os, "getuid", lambda user=user: user)
        folder = draw.own_folder("drawn")
        folder.symlink_to(tmp_path / "none") if link else folder.mkdir()  # by this process's user
        if user == uid:
            assert draw.own_folder("drawn") == folder
            continue
        with pytest.raises(PermissionError, match=r"somebody else's\. Set TMPDIR"):
            draw.own_folder("drawn")


def test_two_processes_count_every_validation_image_once(train, folder, tmp_path):
    # No --limit-batches: one rank has 10 validation images, the other 9.
    words = [folder, *TINY, "--epochs", "1", "--checkpoint-steps", "1"]
    path = f"{EXAMPLE}{os.pathsep}{Path(__file__).parent}"
    options = {"folder": tmp_path, "modules": ["kornia.augmentation"], "PYTHONPATH": path}
    options["whole"] = False
    children = ranks(2, script(EXAMPLE / "train.py", SMALL), *map(str, words), **options)
    (out, err), (nothing, other) = (child.communicate(200) for child in children)
    assert [child.returncode for child in children] == [0, 0], err + other
    assert out.count("epoch 1:") == 1
    assert nothing == ""  # rank 0 alone writes
    summary = json.loads(out.splitlines()[-1])
    assert summary["world_size"] == 2
    assert str(folder.parent) not in summary["command"]
    expected = accuracy(train, folder, tmp_path / "checkpoint.pt")
    assert (summary["top1"], summary["top5"]) == expected


def accuracy(train, folder, checkpoint):
    """Top-1 and top-5, one image at a time."""
    args = train.parse_args([str(folder), *TINY])
    images = ImageFolder(folder / "val", train.pil_transforms(args, "val"))
    model = get_model("small")
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    with torch.no_grad():
        ranked = [model.eval()(image[None])[0].argsort(descending=True) for image, _ in images]
    places = [r.tolist().index(target) for r, target in zip(ranked, images.targets, strict=True)]
    return sum(p < 1 for p in places) / len(places), sum(p < 5 for p in places) / len(places)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("{folder}/train", "no folder with train/CLASS/* and val/CLASS/*"),
        ("{folder} --epochs 0", "--epochs: 0 is not positive"),
        ("{folder} --batch-size -4", "--batch-size: -4 is not positive"),
        ("{folder} --limit-batches 0", "--limit-batches: 0 is not positive"),
        ("{folder} --checkpoint-steps 0", "--checkpoint-steps: 0 is not positive"),
        ("{folder} --workers -1", "--workers: -1 is negative"),
        ("{folder} --color-jitter nan", "--color-jitter: nan is not 0 or above"),
        ("{folder} --random-erasing 5", "--random-erasing: 5 is above 1"),
        ("{folder} --checkpoint .", ". is a folder. Name a file to write"),
        ("{folder} --mixup -0.2", "--mixup: -0.2 is not 0 or above"),
        ("{folder} --model resnet", "--model: resnet is none of torchvision's: alexnet, "),
        ("{folder} --weights V3", "--weights: resnet18 has IMAGENET1K_V1, DEFAULT, got V3"),
        ("{folder} --lr -1", "--lr: -1 is not 0 or above"),
        ("{folder} --checkpoint none/last.pt", "none is no folder to write last.pt to"),
        ("{folder} --summary none/run.json", "none is no folder to write run.json to"),
        ("{folder} --resume --checkpoint none.pt", "there is no checkpoint none.pt"),
    ],
)
def test_wrong_arguments_are_found_before_the_training(train, folder, capsys, arguments, text):
    with pytest.raises(SystemExit):
        train.parse_args([word.format(folder=folder) for word in arguments.split()])
    assert text in capsys.readouterr().err


def test_too_few_pictures_for_a_batch(run):
    with pytest.raises(ValueError, match="Lower --batch-size"):
        run("--epochs", "1", "--batch-size", "32")


def test_learning_rate_rises_and_falls(train):
    factors = [train.lr_factor(step, 200) for step in range(200)]
    top = factors.index(max(factors))
    assert factors[top] == 1
    assert 0 < factors[0] < 0.2
    assert 0 < factors[-1] < 1e-3
    assert factors == sorted(factors[:top]) + sorted(factors[top:], reverse=True)


def test_clock_tells_waits_from_work(train):
    args = train.parse_args(["--batch-size", "8", "--workers", "0"])
    args.device = torch.device("cpu")
    clock = train.StepClock(args)
    clock.marks = [0.0, 0.5, 1.0, 1.1, 2.0]  # end, batch there, end, batch there, end
    assert clock.read() == "8 images/s, 30% waiting for data"
    clock.marks += [2.4, 3.0]
    assert clock.read() == "8 images/s, 40% waiting for data"
    assert clock.summary()["data_wait_share"] == pytest.approx(0.25)  # without the first of three


def test_command_is_reported_without_folders(train):
    assert train.without_folder("/data/imagenet") == "imagenet"
    assert train.without_folder("--summary=/data/run.json") == "--summary=run.json"
    assert train.without_folder("--epochs") == "--epochs"


def test_drawn_layout_and_kinds_of_files(draw, tmp_path):
    draw.write_folder(tmp_path / "drawn", train_per_class=14, val_per_class=3)
    for split, count in [("train", 14), ("val", 3)]:
        folders = sorted((tmp_path / "drawn" / split).iterdir())
        assert [folder.name for folder in folders] == draw.CLASSES
        assert all(len(list(folder.glob("*.JPEG"))) == count for folder in folders)
    kinds, sizes = Counter(), set()
    for path in (tmp_path / "drawn").rglob("*.JPEG"):
        with Image.open(path) as image:
            progressive = " progressive" * bool(image.info.get("progressive"))
            kinds[f"{image.format} {image.mode}{progressive}"] += 1
            sizes.add(image.size)
    assert set(kinds) == {"JPEG RGB", "JPEG RGB progressive", "JPEG L", "JPEG CMYK", "PNG RGB"}
    assert len(sizes) > 150
    assert min(map(min, sizes)) >= 60
    assert max(map(max, sizes)) <= 320


def test_every_picture_is_its_own_and_always_the_same(draw):
    first, again, other = (draw.draw("plain", "ring", np.random.default_rng(s)) for s in (1, 1, 2))
    assert np.array_equal(first, again)
    assert first.shape != other.shape
    assert first.dtype == np.uint8


def test_interrupted_drawing_leaves_no_folder(draw, tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(draw, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        draw.write_folder(tmp_path / "drawn", 1, 1)
    assert not (tmp_path / "drawn").exists()


def test_second_of_two_processes_keeps_the_first_ones_folder(draw, tmp_path):
    draw.write_folder(tmp_path / "drawn", 1, 1)
    draw.write_folder(tmp_path / "drawn", 2, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["drawn"]
    assert len(list(tmp_path.rglob("*.JPEG"))) == 20
