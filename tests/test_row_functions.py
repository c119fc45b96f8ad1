"""Hugging Face's datasets move with the function that ``set_transform`` was given."""

import functools
import gc
import importlib.util
import io
import json
import pickle
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import draw
from PIL import Image
from torch.utils.data import DataLoader, Subset
from torchvision import transforms as v1
from torchvision.transforms import v2

from gpuprefetch import DataPrefetcher, EncodedImage, convert_transforms
from gpuprefetch.migrate.accelerate import accelerate

if importlib.util.find_spec("datasets") is None:
    pytest.skip("datasets is not installed", allow_module_level=True)

COUNT = 7
CPU = {"device": "cpu", "print_plan": False}
EXACT = v1.Compose([v1.Resize(36), v1.CenterCrop(32), v1.ToTensor()])
RANDOM = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])


def encoded(picture, **options):
    file = io.BytesIO()
    Image.fromarray(picture).save(file, **options)
    return {"bytes": file.getvalue(), "path": None}


def table(files=None, count=COUNT):
    if files is None:
        files = [encoded(draw(40 + i, 60, seed=i), format="JPEG", quality=95) for i in range(count)]
    import datasets as hf  # a second, in the one process of pytest -n that runs this file

    rows = {"image": files, "label": [*range(len(files))]}
    return hf.Dataset.from_dict(rows).cast_column("image", hf.Image())


def with_function(pipeline, rows=None, **options):
    """As transformers' ``run_image_classification.py`` has it: the pipeline is around it."""

    def transforms(batch):
        batch["pixel_values"] = [pipeline(image.convert("RGB")) for image in batch["image"]]
        return batch

    rows = table() if rows is None else rows
    rows.set_transform(transforms, **options)
    return rows


def collate(examples):
    images = torch.stack([example["pixel_values"] for example in examples])
    return {"pixel_values": images, "labels": torch.tensor([e["label"] for e in examples])}


def loader_of(dataset, **options):
    return DataLoader(dataset, **{"batch_size": 3, "collate_fn": collate} | options)


def assert_as_plain(dataset, level=2 / 255, **options):
    torch.manual_seed(3)
    want = [*loader_of(dataset, **options)]
    torch.manual_seed(3)
    moved = accelerate(loader_of(dataset, **options), **CPU)
    got = [*moved]
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one["labels"], other["labels"])
        assert one["pixel_values"].dtype == other["pixel_values"].dtype
        assert (one["pixel_values"] - other["pixel_values"]).abs().max() <= level
    return moved


PIPELINE = EXACT


def by_a_global(batch):
    return {
        "pixel_values": [PIPELINE(image.convert("RGB")) for image in batch["image"]],
        "label": batch["label"],
    }


def transformed(image, pipeline=EXACT):
    return pipeline(image.convert("RGB"))


def by_a_helper(batch):
    return {"pixel_values": [*map(transformed, batch["image"])], "label": batch["label"]}


def by_arguments(batch, pipeline, *, key="image"):
    images = [pipeline(image.convert("RGB")) for image in batch[key]]
    return {"pixel_values": images, "label": batch["label"]}


def by_a_default(batch, *, pipeline=EXACT):
    return by_arguments(batch, pipeline)


class Holder:
    def __init__(self):
        self.pipelines = {"val": EXACT}

    def transforms(self, batch):
        return by_arguments(batch, self.pipelines["val"])

    __call__ = transforms


FUNCTIONS = {
    "a global": by_a_global,
    "a helper": by_a_helper,
    "a default": by_a_default,
    "partial": functools.partial(by_arguments, pipeline=EXACT),
    "a method": Holder().transforms,
    "an object": Holder(),
}


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_function_around_whose_pipeline_all_stays(shuffle):
    dataset = with_function(EXACT)
    moved = assert_as_plain(dataset, shuffle=shuffle)
    assert "decode by" not in moved.describe()  # the prefetcher, and not the dataset
    # The user's own dataset is as it was.
    row = dataset[2]
    assert isinstance(row["image"], Image.Image) and torch.is_tensor(row["pixel_values"])
    assert moved.dataset is dataset


@pytest.mark.parametrize("name", FUNCTIONS)
def test_wherever_a_function_finds_its_pipeline(name):
    rows = table()
    rows.set_transform(FUNCTIONS[name])
    moved = assert_as_plain(rows)
    assert moved.decodes_files and "decode by" not in moved.describe()


@pytest.mark.forks("a function within a function is not sent to a worker")
def test_workers_and_subsets():
    dataset = with_function(RANDOM)
    options = {"device": "cpu", "print_plan": False, "seed": 5}
    alone, helped = ([*accelerate(loader_of(dataset, num_workers=n), **options)] for n in (0, 2))
    for one, other in zip(alone, helped, strict=True):
        assert torch.equal(one["pixel_values"], other["pixel_values"])
    part = Subset(with_function(EXACT), [5, 1, 2])
    assert_as_plain(part)


def test_a_view_is_sent_to_other_processes():
    rows = table()
    rows.set_transform(by_a_helper)
    view = accelerate(loader_of(rows), **CPU).wrapped.dataset
    sent = pickle.loads(pickle.dumps(view))
    assert len(sent) == COUNT
    for one, other in zip(sent.__getitems__([4, 1]), view.__getitems__([4, 1]), strict=True):
        assert isinstance(one["pixel_values"], EncodedImage)
        assert one["pixel_values"].data == other["pixel_values"].data
        assert one["label"] == other["label"]


def test_resume_in_the_middle_of_an_epoch():
    def begun():
        torch.manual_seed(1)
        return accelerate(loader_of(with_function(RANDOM), shuffle=True, batch_size=2), **CPU)

    first = begun()
    batches = iter(first)
    next(batches)
    state = json.loads(json.dumps(first.state_dict()))
    rest = [*batches]
    again = begun()
    again.load_state_dict(state)
    for one, other in zip(again, rest, strict=True):
        assert torch.equal(one["pixel_values"], other["pixel_values"])
        assert torch.equal(one["labels"], other["labels"])


def test_pictures_that_the_dataset_turns_or_decodes():
    """EXIF orientations, which ``datasets`` applies, gray pictures and PNG files."""
    turned = Image.Exif()
    turned[274] = 6
    files = [
        encoded(draw(40, 60), format="JPEG", quality=95),
        encoded(draw(40, 60, seed=1), format="JPEG", exif=turned),
        encoded(draw(40, 60, seed=2)[..., 0], format="JPEG", quality=95),
        encoded(draw(40, 60, seed=3), format="PNG"),
    ]
    for order in ((0, 1, 2, 3), (3, 2, 1, 0)):
        assert_as_plain(with_function(EXACT, table([files[i] for i in order])), batch_size=4)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("mode", [None, "RGB"])
def test_a_bad_file_is_decided_by_on_error(num_workers, mode):
    import datasets as hf

    files = [encoded(draw(40, 60, seed=i), format="JPEG", quality=95) for i in range(COUNT)]
    # by_a_global can be pickled, for workers that are not forked
    want = [*loader_of(table(files).with_transform(by_a_global), batch_size=1)]
    whole = files[3]["bytes"]
    for number, broken in enumerate([b"", b"no picture", whole[: len(whole) // 2]], 2):
        files[number] = {"bytes": broken, "path": None}
    rows = table(files).cast_column("image", hf.Image(mode=mode))
    loader = loader_of(rows.with_transform(by_a_global), num_workers=num_workers)
    moved = accelerate(loader, on_error="skip", **CPU)
    batches = [*moved]
    labels = torch.cat([batch["labels"] for batch in batches])
    assert labels.tolist() == [0, 1, 5, 6] and len(moved.bad_images) == 3
    images = torch.cat([batch["pixel_values"] for batch in batches])
    for label, image in zip(labels, images, strict=True):
        assert (image - want[label]["pixel_values"][0]).abs().max() <= 2 / 255


def test_columns_and_rows_beside():
    rows = with_function(EXACT, columns=["image"], output_all_columns=True)
    assert_as_plain(rows)


def test_a_dataset_of_your_own_that_reads_rows():
    class Own(torch.utils.data.Dataset):
        def __init__(self):
            self.rows = table()
            self.transform = EXACT

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, index):
            row = self.rows[index]
            return self.transform(row["image"].convert("RGB")), row["label"]

    dataset = Own()
    moved = accelerate(DataLoader(dataset, 3), **CPU)
    assert "decode by" not in moved.describe()
    want = torch.stack([image for image, _ in map(dataset.__getitem__, range(COUNT))])
    got = torch.cat([images for images, _ in moved])
    assert (got - want).abs().max() <= 2 / 255


def test_keep_unknown_leaves_the_pipeline_in_the_workers():
    pipeline = v1.Compose([v1.Lambda(lambda image: image.rotate(90)), *EXACT.transforms])
    dataset = with_function(pipeline)
    with pytest.raises(ValueError, match="keep_unknown=True"):
        accelerate(loader_of(dataset), **CPU)
    want = [*loader_of(dataset)]
    got = [*accelerate(loader_of(dataset), keep_unknown=True, **CPU)]
    for one, other in zip(got, want, strict=True):
        assert (one["pixel_values"] - other["pixel_values"]).abs().max() <= 2 / 255


def begun_with_a_variable():
    pipeline = EXACT

    def transforms(batch):
        return by_arguments(batch, pipeline)

    def change(to):
        nonlocal pipeline
        pipeline = to

    rows = table()
    rows.set_transform(transforms)
    return accelerate(loader_of(rows), **CPU), rows, change


def test_another_pipeline_is_told():
    moved, _, change = begun_with_a_variable()
    change(RANDOM)
    with pytest.raises(TypeError, match=r"dataset\.pipeline has changed since accelerate"):
        next(iter(moved))


def test_another_function_is_told():
    moved, rows, _ = begun_with_a_variable()
    next(iter(moved))
    rows.set_transform(functools.partial(by_arguments, pipeline=EXACT))
    with pytest.raises(TypeError, match="the function of set_transform has changed since"):
        next(iter(moved))


def test_globals_are_read_at_each_call():
    scope = {"pipeline": EXACT, "scale": 1}
    code = "def f(b):\n return {'pixel_values': [*map(pipeline, b['image'])], 'label': [scale]}"
    exec(code, scope)
    rows = table(count=1)
    rows.set_transform(scope["f"])
    moved = accelerate(loader_of(rows), **CPU)
    assert next(iter(moved))["labels"].tolist() == [1]
    scope["scale"] = 5
    assert next(iter(moved))["labels"].tolist() == [5]


COUNTED = 0


def counting(batch):
    global COUNTED
    COUNTED += 1
    return by_a_global(batch) | {"pixel_values": [PIPELINE(im) for im in batch["image"]]}


def halving(batch):
    return {"pixel_values": [PIPELINE(im) / 2 for im in batch["image"]], "label": batch["label"]}


def sometimes(batch):
    choose = [image if random.random() < 2 else PIPELINE(image) for image in batch["image"]]
    return {"pixel_values": choose, "label": batch["label"]}


def by_two(batch):
    return {"pixel_values": [RANDOM(EXACT(im)) for im in batch["image"]], "label": batch["label"]}


def seeded(batch):
    torch.manual_seed(len(batch["image"]))
    return by_arguments(batch, RANDOM)


class SeededHolder(Holder):
    def __init__(self):
        self.pipelines = {"val": RANDOM}

    def seed(self):
        torch.manual_seed(3)

    def transforms(self, batch):
        self.seed()
        return super().transforms(batch)


REFUSED = {
    "seeds": (seeded, r"seeded calls torch\.manual_seed, which settles"),
    "seeds, with arguments": (functools.partial(seeded), r"calls torch\.manual_seed, which"),
    "seeds in a method": (SeededHolder().transforms, r"seed calls torch\.manual_seed, which"),
    "sets a global": (counting, "sets 'COUNTED', a variable around it"),
    "uses the result": (halving, "what the transform gave is used"),
    "leaves the picture": (sometimes, "gave a picture that its transform did not get"),
    "two": (by_two, r"has several pipelines \(RANDOM, EXACT\)"),
    "none": (lambda batch: batch, "finds no pipeline of torchvision's by a name"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_function_does_is_refused_by_name(name):
    function, text = REFUSED[name]
    rows = table()
    rows.set_transform(function)
    with pytest.raises(TypeError, match=text):
        accelerate(loader_of(rows), **CPU)


USES = {
    "halved": lambda image: image / 2,
    "of another dtype": lambda image: image.half(),
    "NumPy": lambda image: torch.from_numpy(np.asarray(image)),
    "a function of torch": lambda image: torch.flip(image, [-1]),
}


@pytest.mark.parametrize("name", USES)
def test_the_advice_for_rows_whose_result_is_used_works(name):
    function = USES[name]
    rows = table()

    def using(pipeline):
        def transforms(batch):
            images = [pipeline(image.convert("RGB")) for image in batch["image"]]
            return {"pixel_values": [*map(function, images)], "label": batch["label"]}

        return transforms

    rows.set_transform(using(EXACT))
    want = [*loader_of(rows)]
    with pytest.raises(TypeError, match="what the transform gave is used") as raised:
        accelerate(loader_of(rows), **CPU)
    text = str(raised.value)
    assert "ImageFolder" not in text and "cast_column" in text
    advised = re.search(r"pipeline = (v2\.Compose\(.*?\)\]\))", text)[1]
    if name != "NumPy":  # which is none of the device's
        pipeline = eval(advised, {"pipeline": EXACT, "v2": v2, "function": function})
        rows.set_transform(lambda batch: with_label(batch, pipeline))
        for batch, plain in zip(accelerate(loader_of(rows), **CPU), want, strict=True):
            assert (batch["pixel_values"] - plain["pixel_values"]).abs().max() <= 2 / 255


def with_label(batch, pipeline):
    images = [pipeline(image.convert("RGB")) for image in batch["image"]]
    return {"pixel_values": images, "label": batch["label"]}


def test_the_advice_for_rows_without_a_function_works():
    import datasets as hf

    rows = table()
    with pytest.raises(TypeError, match="its rows go through no function") as raised:
        accelerate(loader_of(rows), **CPU)
    text = str(raised.value)
    known = {"pipeline": EXACT, "datasets": hf, "EncodedImage": EncodedImage, "Path": Path}
    first = text[text.index("def transforms") : text.index(", by dataset.set_transform")]
    exec(first, known)
    rows.set_transform(known["transforms"])
    assert_as_plain(rows)
    line = text[text.index("dataset.cast_column") :]
    column, function = line.split(", with ")
    encoded_rows = eval(column, known | {"dataset": table()})
    given = function[: function.index(", and DataPrefetcher")]
    eval(f"dataset.{given}", known | {"dataset": encoded_rows})
    loader = DataLoader(encoded_rows, 3)
    for one, other in zip(
        DataPrefetcher(loader, transforms=convert_transforms(EXACT), device="cpu"),
        loader_of(rows),
        strict=True,
    ):
        assert (one["image"] - other["pixel_values"]).abs().max() <= 2 / 255


def test_the_users_dataset_outlives_the_views_of_it():
    """``datasets`` deletes a table in ``__del__``, which a view shares."""
    dataset = with_function(EXACT)
    part = Subset(dataset, [1, 2])
    for _ in range(2):
        moved = accelerate(loader_of(part), **CPU)
        assert len([*moved]) == 1
        del moved
        gc.collect()
    assert isinstance(dataset[0]["image"], Image.Image)

    class Closing(ImageLike):
        open = True

        def __del__(self):
            vars(self)["open"] = False

    closing = Closing()
    moved = accelerate(DataLoader(closing, 2), **CPU)
    del moved
    gc.collect()
    assert closing.open


class ImageLike(torch.utils.data.Dataset):
    transform = None

    def __init__(self):
        self.transform = EXACT
        self.files = [each["bytes"] for each in (encoded(draw(40, 50), format="JPEG"),) * 2]

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.transform(Image.open(io.BytesIO(self.files[index])).convert("RGB"))
