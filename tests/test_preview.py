"""preview: it shows what the loop will get, says what was sampled, and leaves nothing changed."""

import itertools
import json
import random
import shutil
import threading
from pathlib import Path

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import gpuprefetch
from gpuprefetch import (
    BadImageError,
    DataPrefetcher,
    EncodedImage,
    EncodedImageFolder,
    PerImage,
    RandomResizedCrop,
    Resize,
    Views,
    accelerate,
)
from gpuprefetch.__main__ import main
from gpuprefetch.images.sheet import GAP, GROUP_GAP

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
SIDE = 48


def tile(sheet, place, side=SIDE):
    """The picture at a place of the first group, (H, W, 3) uint8: 0 is the original."""
    left = GAP + place * (side + GAP)
    return np.asarray(sheet)[GAP : GAP + side, left : left + side]


def levels(image, mean=MEAN, std=STD):
    """What the loop got, (3, H, W), as the picture that it shows."""
    mean, std = (torch.tensor(values).double().view(-1, 1, 1) for values in (mean, std))
    values = (image.cpu().double() * std + mean) * 255
    return values.round().clamp(0, 255).byte().permute(1, 2, 0).numpy()


def folder_loader(folder, transforms, device="cpu", dataset=None, **options):
    options = {"pin_memory": torch.device(device).type == "cuda"} | options
    loader = DataLoader(dataset or EncodedImageFolder(folder), batch_size=4, **options)
    return DataPrefetcher(loader, transforms=transforms, device=device, seed=5)


def of_sample(loader, sample):
    """What an epoch hands over of a sample whose loader does not shuffle."""
    batches = [images for images, _ in loader]
    return torch.cat(batches)[sample]


NORMALIZE = K.Normalize(torch.tensor(MEAN), torch.tensor(STD))
TORCHVISION = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
LISTS = {
    "fused": [RandomResizedCrop(SIDE), K.RandomHorizontalFlip(), NORMALIZE],
    "policy": [v2.RandomResizedCrop(SIDE), v2.TrivialAugmentWide(), *TORCHVISION],
    "erasing": [v2.RandomResizedCrop(SIDE), *TORCHVISION, v2.RandomErasing(1.0)],
}


@pytest.mark.parametrize("name", LISTS)
def test_draws_are_those_of_the_next_epochs(photo_folder, device, name):
    loader = folder_loader(photo_folder, LISTS[name], device)
    for _ in range(2):
        sheet = loader.preview(samples=[3], draws=2, side=SIDE)
        for epoch, place in enumerate((1, 2)):
            following = loader.over(loader.wrapped)
            following.set_epoch(epoch + loader.state_dict()["epoch"])
            assert np.array_equal(tile(sheet, place), levels(of_sample(following, 3)))
        assert not np.array_equal(tile(sheet, 1), tile(sheet, 2))
        list(loader)  # the next epoch has other parameters, and its preview shows these


def test_originals_stand_beside_with_their_names(photo_folder):
    loader = folder_loader(photo_folder, LISTS["policy"])
    path = loader.dataset.samples[3][0]
    with Image.open(path) as file:
        picture = file.convert("RGB")
    side = max(picture.size)
    sheet = loader.preview(samples=[3], side=side)
    top, left = (side - picture.height) // 2, (side - picture.width) // 2
    shown = tile(sheet, 0, side)[top : top + picture.height, left : left + picture.width]
    assert np.array_equal(shown, np.asarray(picture))
    ((original, drawn),) = sheet.info["titles"]
    name = path.rsplit("/", 1)[-1]
    assert original == f"3: {name}, {picture.width} x {picture.height}"
    assert drawn.startswith("crop ")


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (v2.RandomHorizontalFlip(1.0), "flip"),
        (v2.RandomVerticalFlip(1.0), "vertical flip"),
        (v2.ColorJitter(brightness=(1.3, 1.3)), "brightness 1.30"),
        (v2.RandomRotation((20, 20)), "rotate 20"),
        (v2.RandomAffine(0, translate=(0.0, 0.0), scale=(1.5, 1.5)), "scale 1.50"),
        (v2.RandomPosterize(3, p=1.0), "posterize 3 bits"),
        (v2.RandomErasing(1.0, scale=(0.25, 0.25), ratio=(1.0, 1.0)), "erase 24 x 24"),
        (v2.GaussianBlur(3, (2.0, 2.0)), "blur 2.0"),
    ],
)
def test_titles_say_what_was_sampled(photo_folder, op, words):
    loader = folder_loader(photo_folder, [v2.Resize((SIDE, SIDE)), op, v2.ToImage()])
    assert loader.preview(2).info["titles"][0][1] == words


def test_a_crop_is_told_in_pixels_of_the_original(photo_folder):
    for op, words in [
        (v2.RandomResizedCrop(16, scale=(0.25, 0.25), ratio=(1.0, 1.0)), "crop {half} x {half}"),
        (v2.RandomCrop((20, 30)), "crop 30 x 20"),
        (v2.CenterCrop((20, 30)), "30 x 20"),
        (v2.Resize((16, 16)), "16 x 16"),
    ]:
        loader = folder_loader(photo_folder, [op])
        with Image.open(loader.dataset.samples[3][0]) as file:
            half = round((file.width * file.height) ** 0.5 / 2)
        ((_, title),) = loader.preview(samples=[3]).info["titles"]
        assert title == words.format(half=half)


@pytest.mark.parametrize("results", ["list", "padded"])
def test_ops_on_images_of_their_own_sizes_are_told(photo_folder, results):
    loader = DataLoader(EncodedImageFolder(photo_folder), batch_size=4)
    ops = [Resize(SIDE), v2.RandomAffine((30, 30), translate=(0.5, 0.5))]
    own = DataPrefetcher(loader, transforms=ops, device="cpu", seed=5, results=results)
    (images, _), *_ = DataPrefetcher(loader, transforms=ops, device="cpu", seed=5)
    for sample, image in enumerate(images[:2]):
        # What is sampled depends on the size of each image.
        same = [Resize((*image.shape[1:],)), ops[1]]
        one_size = DataPrefetcher(loader, transforms=same, device="cpu", seed=5)
        (told,), (want,) = (
            each.preview(samples=[sample]).info["titles"] for each in (own, one_size)
        )
        assert told == want and "move" in told[1]


def test_a_mix_is_told_with_its_chains(photo_folder):
    loader = folder_loader(photo_folder, [v2.Resize((SIDE, SIDE)), v2.AugMix()])
    ((_, title),) = loader.preview(1).info["titles"]
    assert title.startswith("mix of ")
    assert title.count(" / ") == 2


def test_nothing_is_changed(photo_folder, device):
    own = PerImage(v2.RandAugment(), seed=3)
    transforms = [RandomResizedCrop(SIDE), own, v2.RandomApply([v2.GaussianNoise()])]
    loaders = [folder_loader(photo_folder, transforms, device, num_workers=1) for _ in range(2)]
    seen = []
    for loader in loaders:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        own.calls = 0
        batches = iter(loader)
        next(batches)
        if loader is loaders[0]:
            before = loader.state_dict(), loader.stats.as_dict()["batches"]
            loader.preview(3, draws=2)
            after = loader.state_dict(), loader.stats.as_dict()["batches"]
            assert str(before) == str(after)
            assert loader.bad_images == []
        rest = [images for images, _ in itertools.chain(batches, loader)]
        seen.append((rest, torch.rand(1), random.random(), np.random.rand(), own.calls))
    for one, other in zip(seen[0][0], seen[1][0], strict=True):
        assert torch.equal(one, other)
    assert seen[0][1:] == seen[1][1:]


class Advancing(EncodedImageFolder):
    """Its reading goes along with an epoch's thread that runs an op meanwhile."""

    def __init__(self, folder, op):
        super().__init__(folder)
        self.op = op

    def __getitem__(self, index):
        self.op.calls += 1
        return super().__getitem__(index)


def test_what_an_epochs_thread_samples_meanwhile_counts(photo_folder):
    own = PerImage(v2.RandAugment(), seed=3)
    dataset = Advancing(photo_folder, own)
    loader = folder_loader(photo_folder, [RandomResizedCrop(SIDE), own], dataset=dataset)
    loader.preview(3)
    assert own.calls == 3


def test_a_transform_that_cannot_be_copied_is_shared(photo_folder):
    class Locked:
        def __init__(self):
            self.lock = threading.Lock()

        def __call__(self, images):
            with self.lock:
                return images.flip(3)

    lists = ([Resize((SIDE, SIDE))], [Resize((SIDE, SIDE)), Locked()])
    sheets = [folder_loader(photo_folder, each).preview(samples=[1], side=SIDE) for each in lists]
    plain, flipped = (tile(sheet, 1) for sheet in sheets)
    assert np.array_equal(flipped, plain[:, ::-1])


class Scenes(Dataset):
    """A file with a box around its left half, a mask of its upper half, and a point."""

    def __init__(self, folder):
        self.folder = EncodedImageFolder(folder)

    def __len__(self):
        return len(self.folder)

    def __getitem__(self, index):
        image, _ = self.folder[index]
        with Image.open(image.path) as file:
            width, height = file.size
        canvas = (height, width)
        box = torch.tensor([[0.0, 0.0, width / 2, height]])
        boxes = tv_tensors.BoundingBoxes(box, format="XYXY", canvas_size=canvas)
        mask = torch.zeros(canvas, dtype=torch.uint8)
        mask[: height // 2] = 1
        points = tv_tensors.KeyPoints(torch.tensor([[width / 4, height / 4]]), canvas_size=canvas)
        return image, {"boxes": boxes, "mask": tv_tensors.Mask(mask), "points": points}


def collate(samples):
    return tuple(zip(*samples, strict=True))


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_boxes_masks_and_points_are_drawn_where_they_moved(photo_folder, device, flip):
    transforms = [Resize((64, 64)), K.RandomHorizontalFlip(p=flip)]
    dataset = Scenes(photo_folder)
    pairs = {"bare": EncodedImageFolder(photo_folder), "with": dataset}
    sheets = {}
    for name, each in pairs.items():
        loader = DataLoader(each, batch_size=4, collate_fn=collate)
        prefetcher = DataPrefetcher(loader, transforms=transforms, device=device)
        sheets[name] = tile(prefetcher.preview(samples=[2, 5], side=64), 1, 64).astype(int)
    changed = np.abs(sheets["with"] - sheets["bare"]).max(axis=2) > 0
    assert changed[1:30, 1:63].mean() > 0.95  # shaded: the mask's half
    left = changed[34:62, :30].any(axis=1).mean()  # the box's outline, on its side alone
    right = changed[34:62, 34:].any(axis=1).mean()
    assert (left, right) == ((1.0, 0.0) if flip == 0 else (0.0, 1.0))
    x = 16 if flip == 0 else 48
    others = sheets["with"][17, x - 8 : x - 3].mean(axis=0)
    assert np.abs(sheets["with"][16, x] - others).max() > 10  # the point


class Segmented(Dataset):
    """Pictures and masks of their lower half, as the transform of both makes them."""

    def __init__(self, folder, transforms, value):
        self.folder, self.transforms, self.value = ImageFolder(folder), transforms, value

    def __len__(self):
        return len(self.folder)

    def __getitem__(self, index):
        image = Image.open(self.folder.samples[index][0]).convert("RGB")
        mask = torch.zeros(image.height, image.width, dtype=torch.uint8)
        mask[image.height // 2 :] = self.value
        return self.transforms(image, tv_tensors.Mask(mask))


def test_masks_that_are_stacked_to_a_plain_tensor_are_drawn(photo_folder, device):
    pipeline = v2.Compose([v2.Resize((64, 64)), v2.ToImage(), v2.ToDtype(torch.float32)])
    tiles = []
    for value in (0, 3):
        dataset = Segmented(photo_folder, pipeline, value)
        plain = DataLoader(dataset, batch_size=4, pin_memory=torch.device(device).type == "cuda")
        loader = accelerate(plain, print_plan=False, device=device)
        assert type(next(iter(loader))[1]) is torch.Tensor
        tiles.append(tile(loader.preview(samples=[2], side=64), 1, 64).astype(int))
    changed = np.abs(tiles[1] - tiles[0]).max(axis=2) > 0
    assert not changed[:31].any()
    assert changed[33:].mean() > 0.95


def test_keys_that_a_dataset_does_not_take_are_named(device):
    class Pairs(TensorDataset):
        def __getitem__(self, key):
            index, _ = key
            return self.tensors[0][index]

    loader = DataPrefetcher(DataLoader(Pairs(torch.zeros(4, 3, 8, 8))), device=device)
    with pytest.raises(TypeError) as caught:
        loader.preview(2)
    (note,) = caught.value.__notes__
    assert "Pairs of length 4 for the samples [0, 3]. Name others" in note
    loader.preview(samples=[(0, "a")])


def test_views_are_side_by_side(photo_folder, device):
    crops = Views([RandomResizedCrop(SIDE), NORMALIZE], [RandomResizedCrop(24)])
    loader = folder_loader(photo_folder, crops, device)
    sheet = loader.preview(samples=[1], side=SIDE)
    assert [len(titles) for titles in sheet.info["titles"]] == [3]
    first = torch.cat([views[0] for views, _ in loader])[1]
    assert np.array_equal(tile(sheet, 1), levels(first))


def test_a_collate_function_that_mixes_is_run(photo_folder, device):
    pipeline = v2.Compose([v2.Resize((SIDE, SIDE)), *TORCHVISION])

    def halves(samples):
        images = torch.stack([image for image, _ in samples])
        return (images + images.flip(0)) / 2, torch.tensor([label for _, label in samples])

    folder = ImageFolder(photo_folder, pipeline)
    plain = DataLoader(folder, batch_size=4, collate_fn=halves)
    loader = accelerate(plain, print_plan=False, device=device)
    both = [tile(loader.preview(samples=pair, side=SIDE), 1) for pair in ([1, 6], [6, 1])]
    assert np.array_equal(*both)
    assert not np.array_equal(both[0], tile(loader.preview(samples=[1], side=SIDE), 1))


def backwards(samples):
    """The samples in another order, without their first one."""
    return default_collate(samples[:0:-1])


def as_list(samples):
    return [image for image, _ in samples[:0:-1]]


@pytest.mark.parametrize("collate", [backwards, as_list])
@pytest.mark.parametrize("kind", ["moved", "tensors"])
def test_a_photo_is_beside_its_own_draw_after_any_collate_function(
    photo_folder, device, kind, collate
):
    pipeline = v2.Compose([v2.Resize((SIDE, SIDE)), *TORCHVISION])
    folder = ImageFolder(photo_folder, pipeline)
    if kind == "moved":
        plain = DataLoader(folder, batch_size=4, collate_fn=collate)
        loader = accelerate(plain, print_plan=False, device=device)
    else:
        plain = DataLoader(folder, batch_size=4, collate_fn=collate)
        loader = DataPrefetcher(plain, device=device)
    sheet = loader.preview(samples=[0, 3, 10], side=SIDE)
    assert sheet.info["titles"][0][1] == "left out"
    for number, sample in enumerate((3, 10), 1):
        left = GAP + number * (2 * SIDE + GAP + GROUP_GAP) + SIDE + GAP
        want = levels(folder[sample][0]).astype(int)
        assert np.abs(np.asarray(sheet)[GAP : GAP + SIDE, left : left + SIDE] - want).mean() < 1


def test_tensors_of_a_dataset_are_shown_as_they_are_normalized_there(device):
    pictures = torch.rand(6, 3, SIDE, SIDE)

    class Normalized(TensorDataset):
        transform = v2.Compose([v2.Normalize(MEAN, STD)])

        def __getitem__(self, index):
            return self.transform(self.tensors[0][index]), index

    loader = DataPrefetcher(
        DataLoader(Normalized(pictures), batch_size=3),
        transforms=[K.RandomHorizontalFlip(p=1.0)],
        device=device,
    )
    sheet = loader.preview(samples=[2], side=SIDE)
    want = levels(pictures[2], (0, 0, 0), (1, 1, 1)).astype(int)
    assert np.abs(tile(sheet, 0) - want).max() <= 1
    assert np.abs(tile(sheet, 1) - want[:, ::-1]).max() <= 1


def test_values_that_no_normalization_explains_are_stretched_and_told(device):
    pictures = torch.randn(4, 1, 8, 8) * 10
    loader = DataPrefetcher(DataLoader(TensorDataset(pictures), batch_size=2), device=device)
    ((_, title),) = loader.preview(1).info["titles"]
    assert title.endswith("stretched")


def test_what_a_dataset_samples_itself_is_shown_and_named(photo_folder):
    """Transforms that stay in the workers: each draw has other parameters."""
    pipeline = v2.Compose([v2.Lambda(lambda image: image), v2.RandomCrop(SIDE), *TORCHVISION])
    plain = DataLoader(ImageFolder(photo_folder, pipeline), batch_size=4)
    loader = accelerate(plain, keep_unknown=True, print_plan=False, device="cpu")
    sheets = [loader.preview(samples=[3], draws=2, side=SIDE) for _ in range(2)]
    assert np.array_equal(*sheets)
    assert not np.array_equal(tile(sheets[0], 1), tile(sheets[0], 2))
    ((original, *_),) = sheets[0].info["titles"]
    assert original.startswith("3: ")


class Table(Dataset):
    """Rows of bytes, of which the collate function makes images."""

    def __init__(self, folder):
        self.paths = [path for path, _ in EncodedImageFolder(folder).samples]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return {"bytes": Path(self.paths[index]).read_bytes(), "row": index}


def images_of_rows(rows):
    images = [EncodedImage(row["bytes"], row["row"]) for row in rows]
    return {"images": images, "rows": torch.tensor([row["row"] for row in rows])}


def test_images_that_the_collate_function_makes_are_named(photo_folder, device):
    options = {"dataset": Table(photo_folder), "collate_fn": images_of_rows}
    loader = folder_loader(photo_folder, LISTS["fused"], device, **options)
    sheet = loader.preview(samples=[1, 3], side=SIDE)
    assert [len(titles) for titles in sheet.info["titles"]] == [1, 1]
    assert [titles[0].split(":")[0] for titles in sheet.info["titles"]] == ["1", "3"]
    first = torch.cat([batch["images"] for batch in loader])[1]
    assert np.array_equal(tile(sheet, 0), levels(first))


class Broken(EncodedImageFolder):
    broken = ()

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        data = b"no picture" if index in self.broken else image.data
        return EncodedImage(data, index, image.path), label


def test_bad_files_have_their_place(photo_folder, device):
    dataset = Broken(photo_folder)
    dataset.broken = (2,)
    loader = folder_loader(photo_folder, LISTS["fused"], device, dataset)
    titles = loader.preview(samples=[1, 2, 3]).info["titles"]
    assert "2: " in titles[1][0]
    assert "cannot be decoded" in titles[1][0]
    assert titles[1][1] == "left out"
    assert titles[2][1].startswith("crop")
    with pytest.raises(BadImageError, match=r"no sample can be shown, as .*sample 2 of the"):
        loader.preview(samples=[2])


class Stream(IterableDataset):
    def __iter__(self):
        return ((torch.rand(3, 8, 8), n) for n in range(30))


def test_a_stream_is_refused_with_a_line_that_works():
    dataset = Stream()
    loader = DataPrefetcher(DataLoader(dataset, batch_size=4), device="cpu")
    with pytest.raises(ValueError, match="over a map-style dataset") as error:
        loader.preview()
    line = str(error.value).split("Show some samples of it: ")[1].removesuffix(".")
    names = {"DataPrefetcher": DataPrefetcher, "DataLoader": DataLoader, "itertools": itertools}
    line = line.replace("transforms=...", "transforms=[]")
    assert len(eval(line, names | {"dataset": dataset}).info["titles"]) == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count is a number of samples, 1 or more, got 0"),
        ({"draws": 1.5}, "draws is a number of draws, 1 or more, got 1.5"),
        ({"side": "big"}, "side is a number of pixels"),
        ({"samples": []}, r"preview\(samples=\[0, 7\]\)"),
        ({"samples": "ab"}, "samples are keys"),
        ({"samples": 3}, r"got 3: preview\(samples=\[0, 7\]\)"),
        ({"count": 5000}, "shows 1024 samples at most"),
    ],
)
def test_wrong_arguments(photo_folder, arguments, message):
    with pytest.raises(ValueError, match=message):
        folder_loader(photo_folder, LISTS["fused"]).preview(**arguments)


@pytest.mark.parametrize("make", [np.array, torch.tensor, tuple])
def test_samples_of_a_split_are_shown_as_a_list_of_them(photo_folder, make):
    loader = folder_loader(photo_folder, LISTS["fused"])
    want = loader.preview(samples=[2, 0], side=SIDE)
    got = loader.preview(samples=make([2, 0]), side=SIDE)
    assert got.info["titles"] == want.info["titles"]
    assert got.tobytes() == want.tobytes()


def test_a_sample_that_the_dataset_does_not_have_is_named(photo_folder):
    loader = folder_loader(photo_folder, LISTS["fused"])
    with pytest.raises(IndexError) as error:
        loader.preview(samples=[0, 999])
    (note,) = error.value.__notes__
    assert note.endswith(f"of length {len(loader.dataset)} for the samples [0, 999].")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataLoader([], batch_size=2), "and it has none"),
        (lambda: DataLoader(TensorDataset(torch.rand(4, 3, 8, 8)), batch_size=None), "whole bat"),
        (lambda: DataLoader(TensorDataset(torch.rand(4, 7)), batch_size=2), r"float32 \(4, 7\)"),
        (lambda: [torch.rand(2, 3, 8, 8)], "got list"),
    ],
)
def test_loaders_without_pictures(make, message):
    with pytest.raises(ValueError, match=message):
        DataPrefetcher(make(), device="cpu").preview()


# --- The command ---


def test_command_writes_the_picture(photo_folder, tmp_path, capsys):
    written = tmp_path / "sheet.png"
    words = ["preview", str(photo_folder), "--size", "32", "--device", "cpu", "--json"]
    words += ["--samples", "3", "--draws", "2", "--policy", "TrivialAugmentWide"]
    assert main([*words, "--output", str(written)]) == 0
    report = json.loads(capsys.readouterr().out)
    with Image.open(written) as sheet:
        assert sheet.size == (report["width"], report["height"])
    assert [len(titles) for titles in report["titles"]] == [3, 3, 3]


@pytest.mark.parametrize(
    "command", [["preview", "--output"], ["parity", "--picture"], ["doctor", "--picture"]]
)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing/a.png", "missing is no folder to write a.png to"),
        ("there", "there is a folder. Name a file in it"),
        ("a.words", "a.png"),
    ],
)
def test_file_that_cannot_be_written_is_noticed_before_the_work(
    tmp_path, capsys, monkeypatch, command, name, message
):
    (tmp_path / "there").mkdir()
    monkeypatch.setattr(gpuprefetch, "accelerate", None)  # nothing is begun
    monkeypatch.setattr(gpuprefetch, "parity", None)
    first, option = command
    assert main([first, str(tmp_path / "no_data"), option, str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_command_takes_a_class_called_train_for_a_class(photo_folder, tmp_path, capsys):
    photo = next(photo_folder.rglob("*.JPEG"))
    for name in ("car", "train"):
        (tmp_path / name).mkdir()
        shutil.copy(photo, tmp_path / name / "a.jpg")
    words = ["preview", str(tmp_path), "--size", "32", "--device", "cpu", "--json"]
    assert main([*words, "--output", str(tmp_path / "a.png")]) == 0
    assert len(json.loads(capsys.readouterr().out)["titles"]) == 2


def test_command_names_an_empty_folder(tmp_path, capsys):
    output = ["--output", str(tmp_path / "a.png")]
    assert main(["preview", str(tmp_path), *output]) == 2
    assert f"no photos in class folders in {tmp_path}" in capsys.readouterr().err
    (tmp_path / "flat.jpg").write_bytes(b"")
    assert main(["preview", str(tmp_path), *output]) == 2
    assert "DATA/CLASS/*.jpg" in capsys.readouterr().err
