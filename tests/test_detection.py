"""The detection example: it learns, its pictures and boxes are torchvision's, and it draws."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("pycocotools")

EXAMPLE = Path(__file__).parents[1] / "examples" / "detection"
TINY = ["--image-size", "64", "--batch-size", "4", "--workers", "0"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def train():
    """The script as a module, for this file only: other folders have a train.py too."""
    path, loaded = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(EXAMPLE))
    yield importlib.import_module("train")
    sys.path[:] = path
    for name in {"train", "scenes", "draw"} - loaded:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def scenes(train):
    return importlib.import_module("scenes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, scenes):
    folder = tmp_path_factory.mktemp("detection") / "scenes"
    scenes.write_folder(folder, 18, 6)
    return folder


def loader_of(train, folder, split, *arguments):
    args = train.parse_args([str(folder), *TINY, *arguments])
    return train.build_loader(args, split)


def test_other_categories_in_val_are_refused(train, scenes, tmp_path):
    scenes.write_folder(folder := tmp_path / "scenes", 4, 1)
    path = folder / "annotations" / "instances_val.json"
    content = json.loads(path.read_text())
    content["categories"].pop(0)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="train and val need the same categories"):
        train.main([str(folder), *TINY])


@pytest.mark.parametrize(
    ("model", "loader"),
    [
        ("small_ssd", "gpuprefetch"),
        ("small_ssd", "torchvision"),
        ("fasterrcnn_mobilenet_v3_large_320_fpn", "gpuprefetch"),
    ],
)
def test_it_runs(train, folder, model, loader, capfd):
    arguments = ["--model", model, "--loader", loader, "--epochs", "1", "--limit-batches", "1"]
    summary = train.main([str(folder), *TINY, *arguments])
    assert json.loads(capfd.readouterr().out.splitlines()[-1]) == summary
    assert summary["images_per_second"] > 0
    for name in ("map", "map_untrained", "map_labels_by_chance"):
        assert 0 <= summary[name] < 0.2


def other(targets):
    """Each picture gets the boxes of the next one."""
    return [*targets[1:], targets[0]]


@pytest.mark.parametrize("mistake", [False, True])
def test_it_learns_where_things_are(train, scenes, tmp_path, monkeypatch, mistake):
    """Four pictures, each a large shape, by heart: training sees crops of them, and never them.

    A detector that has learned has less loss with the boxes of the picture than with those of the
    others, whatever the seed. One that was trained with the boxes of the next picture has not.
    """
    for name, value in {"SIDES": (64, 112), "RADII": (0.2, 0.35), "MAX_SHAPES": 1}.items():
        monkeypatch.setattr(scenes, name, value)
    root = tmp_path / "scenes"
    scenes.write_folder(root, 4, 0)
    shutil.copytree(root / "train", root / "val", dirs_exist_ok=True)
    annotations = root / "annotations"
    shutil.copy(annotations / "instances_train.json", annotations / "instances_val.json")
    arguments = ["--model", "small_ssd", "--lr", "8e-3", "--epochs", "24"]
    args = train.parse_args([str(root), *TINY, *arguments])
    models = []
    build, move = train.build_model, train.move

    def built(*arguments):
        models.append(build(*arguments))
        return models[-1]

    def mistaken(batch, device):
        images, targets = move(batch, device)
        numbers = [target["image_id"] for target in batch[1]]
        order = sorted(numbers)
        following = dict(zip(order, other(order), strict=True))
        of = dict(zip(numbers, targets, strict=True))
        return images, [of[following[number]] for number in numbers]

    monkeypatch.setattr(train, "build_model", built)
    monkeypatch.setattr(train, "move", mistaken if mistake else move)
    train.train(args)
    model = models[0].train()  # as it is asked for losses
    ((images, targets),) = (move(batch, args.device) for batch in train.build_loader(args, "val"))
    losses = []
    for _ in targets:
        with torch.no_grad():
            losses.append(float(sum(model(images, targets).values())))
        targets = other(targets)
    if mistake:
        assert losses[0] > min(losses[1:])  # for seeds 0 to 14
    else:
        assert losses[0] < 0.95 * np.mean(losses[1:])  # 0.48 to 0.90 for seeds 0 to 12


def test_both_loaders_give_the_same_boxes(train, folder):
    ours, theirs = (
        loader_of(train, folder, "val", "--loader", name) for name in ("gpuprefetch", "torchvision")
    )
    seen = 0
    for (images, targets), (pictures, expected) in zip(ours, theirs, strict=True):
        images = images.cpu()
        # A level of rounding in PIL's resize.
        assert (images - torch.stack(pictures)).abs().max() < 1.5 / 255
        for target, want in zip(targets, expected, strict=True):
            assert target["image_id"] == want["image_id"]
            assert type(target["boxes"]) is torch.Tensor
            assert torch.equal(target["labels"].cpu(), want["labels"])
            assert (target["boxes"].cpu() - want["boxes"]).abs().max() < 1e-3
            seen += len(target["labels"])
    assert seen == sum(map(len, ours.dataset.objects.values())) > 6


def test_training_boxes_lie_in_the_crop(train, folder):
    for images, targets in loader_of(train, folder, "train"):
        assert images.shape[1:] == (3, 64, 64)
        for target in targets:
            boxes = target["boxes"]
            assert len(boxes) == len(target["labels"])
            assert (boxes >= 0).all()
            assert (boxes <= 64).all()
            assert (boxes[:, 2:] - boxes[:, :2] >= 1).all()


def test_average_precision(train, folder):
    dataset = train.CocoFolder(folder, "val")
    truth = [
        {key: item[key] for key in ("image_id", "bbox", "category_id")} | {"score": 1.0}
        for objects in dataset.objects.values()
        for item in objects
    ]
    assert train.average_precision(dataset, truth) == 1
    # A fifth of its width to the side, a box has an IoU of 2 / 3: right at 4 thresholds of 10.
    moved = [
        item | {"bbox": [item["bbox"][0] + 0.2 * item["bbox"][2], *item["bbox"][1:]]}
        for item in truth
    ]
    assert train.average_precision(dataset, moved) == pytest.approx(0.4)
    assert train.average_precision(dataset, train.by_chance(truth, dataset.categories)) < 0.5
    assert train.average_precision(dataset, []) == 0


def test_drawn_boxes_are_tight(scenes):
    for seed in range(5):
        picture, shapes = scenes.draw_scene(np.random.default_rng(seed))
        assert shapes
        for category, (x, y, width, height) in shapes:
            assert 1 <= category <= len(scenes.SHAPES)
            assert min(x, y) >= 0
            assert x + width <= picture.shape[1]
            assert y + height <= picture.shape[0]
            part = picture[y : y + height, x : x + width].astype(float).mean(-1)
            around = picture[max(y - 3, 0) : y + height + 3, max(x - 3, 0) : x + width + 3]
            background = np.median([around[0].mean(), around[-1].mean()])
            differs = abs(part - background) > 30
            assert all(
                side.any() for side in (differs[:2], differs[-2:], differs[:, :2], differs[:, -2:])
            )


def test_drawn_once(scenes, tmp_path, monkeypatch):
    monkeypatch.setattr(scenes.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scenes, "TRAIN", 3)
    monkeypatch.setattr(scenes, "VAL", 2)
    folder = scenes.drawn_folder()
    files = sorted(folder.rglob("*.jpg"))
    assert len(files) == 5
    times = [file.stat().st_mtime_ns for file in files]
    assert scenes.drawn_folder() == folder
    assert [file.stat().st_mtime_ns for file in files] == times
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("{folder}/train", "is no folder with annotations/instances_train*.json"),
        ("{folder} --epochs 0", "--epochs: 0 is not positive"),
        ("{folder} --batch-size 0", "--batch-size: 0 is not positive"),
        ("{folder} --image-size 0", "--image-size: 0 is not positive"),
        ("{folder} --limit-batches 0", "--limit-batches: 0 is not positive"),
    ],
)
def test_wrong_arguments_are_found_before_the_training(train, folder, capsys, arguments, text):
    with pytest.raises(SystemExit):
        train.main([word.format(folder=folder) for word in arguments.split()])
    assert text in capsys.readouterr().err
