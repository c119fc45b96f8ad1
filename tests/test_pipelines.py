"""Pipelines as people write them: functions of their own, several views, plans that say where."""

import functools
import re
import types
from pathlib import Path

import pytest
import torch
from fakes import assert_same_batches
from pictures import draw
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import gpuprefetch
from gpuprefetch import DataPrefetcher, EncodedImageFolder, accelerate, convert_transforms, explain

CPU = {"device": "cpu", "print_plan": False}
CROPPED = [v1.CenterCrop(24), v1.ToTensor()]
SIZES = [(41, 62), (62, 41), (57, 57), (39, 90), (90, 39), (64, 48), (48, 64), (50, 51)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    for number, (height, width) in enumerate(SIZES):
        path = root / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(draw(height, width, seed=number)).save(path)
    return root


def loader_of(root, ops, **options):
    options = {"batch_size": 4, "pin_memory": torch.cuda.is_available()} | options
    return DataLoader(ImageFolder(root, v1.Compose(ops)), **options)


def files(root):
    pinned = torch.cuda.is_available()
    return DataLoader(EncodedImageFolder(root), batch_size=4, pin_memory=pinned)


# --- a user's own function, after the crop --------------------------------------------------------


class Scaled(torch.nn.Module):
    """It would fail on a batch."""

    def forward(self, image):
        channels, _, _ = image.shape
        return image / torch.arange(1, channels + 1, device=image.device).view(-1, 1, 1)


class Shifted(v2.Transform):
    """A class of the user's own that derives from torchvision's."""

    def transform(self, inpt, params):
        return inpt.roll(1, -1)


class Typed:
    def __call__(self, image):
        assert type(image) is tv_tensors.Image
        return image.float() / 255


class Blurred:
    """As MONAI's op for one channel-first image; the library need not be there."""

    __module__ = "monai.transforms.intensity.array"

    def __call__(self, image):
        channels, _, _ = image.shape
        return image.mean(2, keepdim=True).expand(channels, 24, 24)


def darkened(image, by):
    return image * by


to_range = v1.Lambda(lambda image: image * 2 - 1)
NORMALIZE = v1.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.2))
# What follows the crop, and how each of it runs.
OWN = {
    "a lambda": ([to_range], ["image by image"]),
    "of a batch it would make one number": ([lambda x: x - x.mean()], ["image by image"]),
    "a module": ([Scaled(), NORMALIZE], ["image by image", "torchvision v2 on the batch"]),
    "after Normalize": ([NORMALIZE, to_range], ["fused launch", "image by image"]),
    "one after the other": ([to_range, Scaled()], ["image by image"] * 2),
    "a partial": ([functools.partial(darkened, by=0.5)], ["image by image"]),
    "MONAI's": ([Blurred()], ["image by image"]),
    "torchvision's, derived": ([Shifted()], ["image by image"]),
    "then a flip": (
        [to_range, v1.RandomHorizontalFlip(1.0)],
        ["image by image", "one program"],
    ),
    "another shape": ([lambda x: x[:1].flatten()], ["image by image"]),
    "then levels": (
        [lambda x: (x * 255).byte(), v2.RandomInvert(1.0), v2.ToDtype(torch.float32, scale=True)],
        ["image by image", "one program", "torchvision v2 on the batch"],
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_an_own_function_after_the_crop_runs_image_by_image(folder, device, name):
    ops, where = OWN[name]
    loader = loader_of(folder, [*CROPPED, *ops])
    moved = accelerate(loader, device=device, print_plan=False)
    assert [step.where for step in moved.plan.steps][2:] == where
    on_host = [(images.cpu(), target.cpu()) for images, target in moved]
    assert_same_batches(loader, on_host, atol=1e-6)
    transforms = convert_transforms([*CROPPED, *ops])
    listed = DataPrefetcher(files(folder), transforms=transforms, device=device)
    assert_same_batches(moved, listed, atol=0, rtol=0)
    assert gpuprefetch.parity(loader, 3, device=device).mean < 1e-3


def test_an_own_function_of_images_gets_images(folder):
    loader = loader_of(folder, [v2.CenterCrop(24), v2.ToImage(), Typed()])
    moved = accelerate(loader, **CPU)
    assert_same_batches(loader, moved, atol=1e-6)
    assert type(next(iter(moved))[0]) is torch.Tensor


def test_what_an_own_function_samples_depends_on_the_seed_and_the_sample(folder):
    loader = loader_of(folder, [*CROPPED, lambda image: image * 0 + torch.rand(())])

    def values(**options):
        moved = accelerate(loader, **CPU, **options)
        return torch.cat([images.amax((1, 2, 3)) for images, _ in moved])

    first = values(seed=1)
    assert len(first.unique()) == len(SIZES)
    assert torch.equal(first, values(seed=1))
    assert not torch.equal(first, values(seed=2))
    loader = loader_of(folder, loader.dataset.transform.transforms, batch_size=3)
    assert torch.equal(first, values(seed=1))


def by_size(image):
    return image[:, : 10 + int(image[0, 0, 0] * 10)]


# What an own function gives, the error, and what it says.
GIVES = {
    "nothing": (lambda image: None, TypeError, "gave NoneType.*keep_unknown=True"),
    "an array": (lambda image: image.numpy(), TypeError, "gave ndarray"),
    "two views": (lambda image: (image, image), TypeError, r"gave tuple\. Several views.*Views\("),
    "sizes": (by_size, ValueError, r"by_size gave \(3, \d+, 24\) of .* for one image and \(3, "),
    "another device": (
        lambda image: image.to("meta"),
        ValueError,
        "gave a tensor on meta of one on cpu",
    ),
    "an error": (lambda image: image @ image, RuntimeError, "must match|Expected size"),
}


@pytest.mark.parametrize("name", GIVES)
def test_what_an_own_function_must_not_give(folder, name):
    op, error, text = GIVES[name]
    loader = loader_of(folder, [v1.CenterCrop((20, 24)), v1.ToTensor(), op])
    with pytest.raises(error, match=text) as raised:
        list(accelerate(loader, **CPU))
    notes = "".join(getattr(raised.value, "__notes__", []))
    assert "keep_unknown=True" in str(raised.value) + notes
    if name in ("an array", "two views"):  # the line that every message ends with
        assert len(list(accelerate(loader, keep_unknown=True, **CPU))) == 2


# Before the crop or the conversion it is refused, and the message says where it would run.
TOO_EARLY = [
    [v1.Lambda(lambda image: image), *CROPPED],
    [CROPPED[0], v1.Lambda(lambda image: image), CROPPED[1]],
    [CROPPED[1], v1.Lambda(lambda image: image), CROPPED[0]],
]


@pytest.mark.parametrize("ops", TOO_EARLY)
def test_an_own_function_before_that_is_refused(folder, ops):
    with pytest.raises(ValueError, match=r"Lambda cannot.*put one that takes a tensor \(C, H, W\)"):
        accelerate(loader_of(folder, ops), **CPU)
    own = next(op for op in ops if op not in CROPPED)
    followed = loader_of(folder, [*CROPPED, own])
    assert accelerate(followed, **CPU).plan.steps[2].where == "image by image"


def test_an_own_function_stays_in_the_workers_on_request(folder):
    loader = loader_of(folder, [*CROPPED, to_range])
    kept = accelerate(loader, keep_unknown=True, **CPU)
    assert {step.where for step in kept.plan.steps} == {"worker CPU"}
    assert "nothing moved: the workers decode" in kept.describe()
    assert_same_batches(loader, kept, atol=0)


# --- plans ----------------------------------------------------------------------------------------


def test_a_plan_says_where_each_op_runs(folder, capsys):
    ops = [v2.RGB(), *CROPPED, to_range]
    moved = accelerate(loader_of(folder, ops), device="cpu")
    printed = capsys.readouterr().out
    first, header, rgb, _, _, own, collate = printed.splitlines()
    assert first.endswith("everything on the CPU")
    assert header.split() == ["transform", "runs", "on", "how", "what", "differs"]
    assert rgb.split() == ["RGB", "nothing", "to", "do", "images", "are", "RGB"]
    assert "image by image" in own and "a call for each image" in own
    assert collate == "  collate: worker CPU"
    assert explain(moved).startswith(printed)


def test_explain_of_a_loader_is_what_accelerate_would_print(folder, capsys):
    loader = loader_of(folder, [*CROPPED, to_range])
    before = torch.get_rng_state()
    text = explain(loader)
    assert torch.equal(before, torch.get_rng_state()) and capsys.readouterr().out == ""
    accelerate(loader)
    assert text.startswith(capsys.readouterr().out)
    refused = explain(loader_of(folder, [v1.Lambda(abs), *CROPPED]))
    assert refused.startswith("accelerate(loader) would refuse it: Lambda cannot move")


def test_a_plan_says_what_was_not_moved(folder):
    ops = [v1.Lambda(lambda image: image.rotate(90)), *CROPPED]
    moved = accelerate(loader_of(folder, ops), keep_unknown=True, **CPU)
    _, second, _, own, crop, conversion, _ = moved.describe().splitlines()
    assert second == "  not moved: decode and all up to CenterCrop stay in the workers"
    assert own.split() == ["Lambda", "worker", "CPU", "unchanged"]
    assert crop.split() == ["CenterCrop", "worker", "CPU", "unchanged"]
    assert conversion.split() == ["ToTensor", "CPU", "on", "the", "batch"]


@pytest.mark.gpu
def test_a_plan_names_the_gpu_and_its_decoder(folder):
    loader = loader_of(folder, CROPPED)
    moved = accelerate(loader, device="cuda:0", print_plan=False)
    first, _, crop, *_ = moved.describe().splitlines()
    assert first.startswith("accelerate: cuda:0, decode by nvJPEG")
    assert first.endswith(", a share of it in the workers (cpu_share)")
    assert crop.split() == ["CenterCrop", "cuda:0", "fused", "launch"]
    fixed = accelerate(loader, device="cuda:0", cpu_share=0.0, print_plan=False)
    assert "cpu_share" not in fixed.describe()
    kept = accelerate(loader_of(folder, [*CROPPED, to_range]), keep_unknown=True, print_plan=False)
    assert kept.describe().startswith("accelerate: cuda:0, decode in the workers\n  nothing moved")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_rank_alone_prints(folder, capsys, monkeypatch, rank):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    accelerate(loader_of(folder, CROPPED), device="cpu")
    assert bool(capsys.readouterr().out) == (rank == "0")


FLIP = [v2.RandomHorizontalFlip()]


def test_explain_of_tensors_has_no_decode(folder):
    data = TensorDataset(torch.zeros(4, 3, 8, 8))
    tensors = explain(DataPrefetcher(DataLoader(data), transforms=FLIP, device="cpu"))
    assert "decode" not in tensors and tensors.startswith("RandomHorizontalFlip")
    assert explain(DataPrefetcher(DataLoader(data), device="cpu")) == "images stay as they come"
    listed = DataLoader([(torch.zeros(3, 8, 8), 1)])
    assert "decode" not in explain(DataPrefetcher(listed, transforms=FLIP, device="cpu"))
    assert explain(DataPrefetcher(files(folder), device="cpu")).startswith("decode")
    own = DataPrefetcher(OfTensors(), transforms=[v2.CenterCrop(4), *FLIP], device="cpu")
    assert explain(own).splitlines()[0].endswith(", where images are encoded")
    assert len(list(own)) == 1  # now it is known
    assert explain(own).startswith("CenterCrop")


class OfTensors:
    def __iter__(self):
        yield torch.zeros(2, 3, 8, 8)


# --- several views ------------------------------------------------------------------------------

TO_FLOAT = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
LARGE = v2.Compose([v2.RandomResizedCrop(24), v2.RandomHorizontalFlip(), *TO_FLOAT])
SMALL = v2.Compose([v2.RandomResizedCrop(12), *TO_FLOAT])


class TwoCrops:
    """As SimCLR has it, and does more to them."""

    def __init__(self, transform):
        self.transform = transform

    def __call__(self, picture):
        return [self.transform(picture) + 1, self.transform(picture)]


def of_closure(pipeline):
    return lambda picture: (pipeline(picture) + 1, pipeline(picture))


# A transform of several views that does not show them, and the line of the message.
VIEWS = {
    "two crops": (TwoCrops(LARGE), "[t.transform, t.transform]"),
    "a function": (of_closure(LARGE), "[pipeline, pipeline]"),
    "a lambda": (
        v1.Lambda(lambda picture: [LARGE(picture), SMALL(picture)]),
        "[LARGE, SMALL]",
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_transform_of_several_views_is_refused_with_the_line_to_write(folder, name):
    transform, line = VIEWS[name]
    loader = DataLoader(ImageFolder(folder, transform), 4)
    with pytest.raises(ValueError, match=r"write DataPrefetcher\(DataLoader\(Enc") as raised:
        accelerate(loader, **CPU)
    text = str(raised.value)
    assert line in text
    # The line itself works.
    expression = text[text.index("Views(") : text.index("), where ")]
    known = {"t": transform, "pipeline": LARGE, "LARGE": LARGE, "SMALL": SMALL}
    views = eval(expression, known | vars(gpuprefetch))
    images, _ = next(iter(DataPrefetcher(files(folder), transforms=views, device="cpu")))
    assert images[0].shape[1:] == (3, 24, 24)
    if name == "two crops":  # the line for what gives one picture
        assert "If it gives what t.transform gives, put that in its place" in text
        one = accelerate(DataLoader(ImageFolder(folder, transform.transform), 4), **CPU)
        assert next(iter(one))[0].shape == (4, 3, 24, 24)


def test_a_tuple_of_pipelines_gives_views(folder):
    options = {"device": "cpu", "seed": 3}
    named, tupled, listed = (
        DataPrefetcher(files(folder), transforms=transforms, **options)
        for transforms in (
            gpuprefetch.Views(LARGE, SMALL),
            (LARGE, SMALL),
            (LARGE.transforms, [*SMALL.transforms]),
        )
    )
    for want, *others in zip(named, tupled, listed, strict=True):
        assert type(want[0]) is list  # as a DataLoader gives it
        assert [view.shape[-1] for view in want[0]] == [24, 12]
        for got in others:
            assert all(map(torch.equal, want[0], got[0]))
    assert explain((LARGE, SMALL)) == explain(gpuprefetch.Views(LARGE, SMALL))
    images = gpuprefetch.preprocess(
        [path for path, _ in ImageFolder(folder).samples], (LARGE, SMALL), device="cpu"
    )
    assert [len(view) for view in images] == [len(SIZES)] * 2
    one_list = DataPrefetcher(files(folder), transforms=(*LARGE.transforms,), device="cpu")
    assert next(iter(one_list))[0].shape == (4, 3, 24, 24)
    with pytest.raises(TypeError, match="Views takes the place of the list"):
        accelerate(loader_of(folder, CROPPED), transforms=(LARGE, SMALL), **CPU)


# --- image processors ---------------------------------------------------------------------------


class Processor:
    """As Hugging Face's: settings, and a call that carries them out with torchvision."""

    def __init__(self, **settings):
        given = {
            "do_resize": True,
            "size": {"height": 24, "width": 30},
            "resample": 2,
            "do_center_crop": False,
            "crop_size": None,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.4, 0.5, 0.6],
            "image_std": (0.2, 0.3, 0.25),
            "do_convert_rgb": None,
            "do_pad": None,
            "image_processor_type": "Processor",
        }
        self.settings = given | settings
        self.do_rescale = self.settings["do_rescale"]
        self.image_mean = self.settings["image_mean"]

    def to_dict(self):
        return dict(self.settings)

    def resized(self, image, size):
        how = {0: "nearest", 2: "bilinear", 3: "bicubic"}[self.settings["resample"]]
        return v2.functional.resize(image, size, v2.InterpolationMode(how), antialias=True)

    def cropped(self, image, height, width):
        top, left = (image.shape[1] - height) // 2, (image.shape[2] - width) // 2
        return image[:, top : top + height, left : left + width]

    def __call__(self, images, return_tensors):
        assert return_tensors == "pt"
        given = self.settings
        image = v2.functional.pil_to_tensor(images)
        if given["do_resize"]:
            size = given["size"]
            share = given.get("crop_pct")
            if "height" in size:
                image = self.resized(image, [size["height"], size["width"]])
            elif share and size["shortest_edge"] < 384:
                edge = size["shortest_edge"]
                image = self.cropped(self.resized(image, [int(edge / share)]), edge, edge)
            else:
                image = self.resized(image, [size["shortest_edge"]] * (2 if share else 1))
        if given["do_center_crop"]:
            image = self.cropped(image, given["crop_size"]["height"], given["crop_size"]["width"])
        if given["do_rescale"]:
            image = image.double() * given["rescale_factor"]
        if given["do_normalize"]:
            mean, std = (torch.tensor(given[f"image_{n}"]).view(3, 1, 1) for n in ("mean", "std"))
            image = (image.double() - mean) / std
        return {"pixel_values": [image]}


class Larger(Processor):
    """A class that does more than its settings say."""

    def resized(self, image, size):
        return super().resized(image, [side * 256 // 224 for side in size])


CROPPED_TO = {"size": {"shortest_edge": 33}, "do_center_crop": True}
CROPPED_TO["crop_size"] = {"height": 24, "width": 29}
PROCESSORS = {
    "to a size": {},
    "bicubic": {"resample": 3},
    "center crop": CROPPED_TO,
    "a share of the edge": {"size": {"shortest_edge": 30}, "crop_pct": 0.875},
    "warped": {"size": {"shortest_edge": 384}, "crop_pct": 0.875},
    "a shorter side": CROPPED_TO | {"size": {"shortest_edge": 41}, "resample": 3},
    "no Normalize": {"do_normalize": False},
    "no Normalize, another factor": {"do_normalize": False, "rescale_factor": 1 / 127.5},
    "no rescale": {"do_rescale": False, "image_mean": [110.0, 120, 130], "image_std": [60.0] * 3},
    "another factor": {"rescale_factor": 1 / 127.5},
    "levels": {"do_rescale": False, "do_normalize": False},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_is_read(folder, name):
    processor = Processor(**PROCESSORS[name])
    transforms = convert_transforms(processor)
    paths = [path for path, _ in ImageFolder(folder).samples]
    got = gpuprefetch.preprocess(paths, transforms, device="cpu")
    assert torch.equal(got, gpuprefetch.preprocess(paths, processor, device="cpu"))
    held = convert_transforms(types.SimpleNamespace(image_processor=processor))
    assert [*map(type, held)] == [*map(type, transforms)]
    given = processor.settings
    unit = 255 * given["rescale_factor"] if given["do_rescale"] else 1.0
    levels = 255 / (unit if got.is_floating_point() else 255)
    if given["do_normalize"]:
        levels *= max(given["image_std"])
    for path, image in zip(paths, got, strict=True):
        with Image.open(path) as picture:
            want = processor(images=picture, return_tensors="pt")["pixel_values"][0]
        assert image.dtype == (want.dtype if want.dtype == torch.uint8 else torch.float32)
        assert (image.double() - want).abs().max() * levels <= 1.01


NOT_READ = {
    "a setting": (Processor(do_pad=True), r"its setting do_pad=True is not known here"),
    "sizes": (Processor(size={"longest_edge": 40}), "neither height and width nor shortest_edge"),
    "a filter": (Processor(resample=1), "resample=1: interpolation must be one of"),
    "more than it says": (Larger(), r"it makes \(3, 27, 34\) and not \(3, 24, 30\)"),
    "more, of one shape": (Larger(**CROPPED_TO), r"its pixels are \d+\.\d levels of 255 from"),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_a_processor_that_is_not_its_settings_is_refused(folder, name):
    processor, text = NOT_READ[name]
    with pytest.raises(ValueError, match=text) as raised:
        convert_transforms(processor)
    # The list that the message ends with.
    line = str(raised.value).partition("transforms=")[2].removesuffix(".")
    values = {"v2": v2, "torch": torch, "mean": [0.4] * 3, "std": [0.2] * 3}
    written = DataPrefetcher(files(folder), transforms=eval(line, values), device="cpu")
    assert next(iter(written))[0].shape == (4, 3, 224, 224)


def test_a_function_that_calls_a_processor_is_refused_with_the_line_to_write(folder):
    processor = Processor()
    loader = DataLoader(ImageFolder(folder, lambda x: processor(x, "pt")["pixel_values"][0]), 4)
    line = r"transforms=convert_transforms\(processor\)\), where these are the function's variables"
    with pytest.raises(ValueError, match=line):
        accelerate(loader, **CPU)
    moved = DataPrefetcher(files(folder), transforms=convert_transforms(processor), device="cpu")
    plain = [(images.float(), target) for images, target in loader]
    assert_same_batches(plain, moved, atol=1.01 / 255 / 0.2)


class Described(Dataset):
    """As many write it for a model of Hugging Face's."""

    def __init__(self, paths, processor, augment=None):
        self.paths, self.processor, self.augment = paths, processor, augment

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        picture = Image.open(self.paths[index]).convert("RGB")
        if self.augment:
            picture = self.augment(picture)
        return self.processor(picture, "pt")["pixel_values"][0].float(), index


class Files(Described):
    """The same, as its message advises."""

    def __getitem__(self, index):
        path = self.paths[index]
        return gpuprefetch.EncodedImage(Path(path).read_bytes(), index, path), index


FLIPPED = v2.Compose([v2.RandomHorizontalFlip(1.0)])
PATTERNS = {
    "alone": (None, TypeError, r"transforms=(convert_transforms\(dataset\.processor\))\)\. The"),
    "after a pipeline": (
        FLIPPED,
        ValueError,
        r"transforms=(\[pipeline, \*convert_transforms\(processor\)\])\)\.$",
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_dataset_that_calls_a_processor_is_told_what_to_write(folder, name):
    augment, error, line = PATTERNS[name]
    paths = [path for path, _ in ImageFolder(folder).samples]
    dataset = Described(paths, Processor(), augment)
    loader = DataLoader(dataset, 4)
    with pytest.raises(error, match=line) as raised:
        accelerate(loader, **CPU)
    assert str(raised.value) in explain(loader)
    known = {"dataset": dataset, "processor": dataset.processor, "pipeline": augment}
    transforms = eval(
        re.search(line, str(raised.value))[1], known | {"convert_transforms": convert_transforms}
    )
    files = DataLoader(Files(paths, None), 4)
    moved = DataPrefetcher(files, transforms=transforms, device="cpu")
    assert_same_batches(loader, moved, atol=1.01 / 255 / 0.2)
    if name == "alone":
        assert "DataPrefetcher(loader)" in str(raised.value)
        assert_same_batches(loader, DataPrefetcher(loader, device="cpu"), atol=0)


class WeakAndStrong(Files):
    """As for FixMatch."""

    def __init__(self, paths):
        super().__init__(paths, None)
        self.weak = v2.Compose([v2.CenterCrop(24), *TO_FLOAT])
        self.strong = v2.Compose([v2.CenterCrop(20), v2.RandomInvert(1.0), *TO_FLOAT])


class WeakAndStrongPictures(WeakAndStrong):
    def __getitem__(self, index):
        picture = Image.open(self.paths[index]).convert("RGB")
        return [self.weak(picture), self.strong(picture)], index


def test_a_dataset_with_several_transforms_is_told_of_views(folder):
    paths = [path for path, _ in ImageFolder(folder).samples]
    loader = DataLoader(WeakAndStrongPictures(paths), 4)
    with pytest.raises(TypeError, match=r"it has several transforms \(weak, strong\)") as raised:
        accelerate(loader, **CPU)
    (line,) = re.findall(r"transforms=(gpuprefetch\.Views\(.*?\]\)\))\)", str(raised.value))
    known = {"gpuprefetch": gpuprefetch, "convert_transforms": convert_transforms}
    transforms = eval(line, known | {"dataset": loader.dataset})
    moved = DataPrefetcher(DataLoader(WeakAndStrong(paths), 4), transforms=transforms, device="cpu")
    for (views, target), (want, want_target) in zip(moved, loader, strict=True):
        assert torch.equal(target, want_target)
        for view, images in zip(views, want, strict=True):
            torch.testing.assert_close(view, images, atol=1e-6, rtol=0)


def test_a_processor_in_the_place_of_a_transform_is_told_what_to_write(folder):
    loader = DataLoader(ImageFolder(folder, Processor()), 4)
    line = r"Write DataPrefetcher\(.*transforms=convert_transforms\(t\)\), where t is the Processor"
    with pytest.raises(ValueError, match=line):
        accelerate(loader, **CPU)


class Stream(IterableDataset):
    def __init__(self, paths, transform):
        self.paths, self.transform = paths, transform

    def __iter__(self):
        for number, path in enumerate(self.paths):
            yield self.transform(Image.open(path).convert("RGB")), number


class FileStream(Stream):
    def __iter__(self):
        for number, path in enumerate(self.paths):
            yield gpuprefetch.EncodedImage(Path(path).read_bytes(), number, path), number


def test_a_stream_is_told_what_works_for_its_pipeline(folder):
    paths = [path for path, _ in ImageFolder(folder).samples]
    dataset = Stream(paths, v1.Compose(CROPPED))
    loader = DataLoader(dataset, 4)
    line = r"EncodedImage\(data, index, path\).*transforms=convert_transforms\(dataset\.transform"
    with pytest.raises(TypeError, match=line):
        accelerate(loader, **CPU)
    transforms = convert_transforms(dataset.transform)
    files = DataLoader(FileStream(paths, None), 4)
    moved = DataPrefetcher(files, transforms=transforms, device="cpu")
    assert_same_batches(loader, moved, atol=1e-6)
    refused = DataLoader(Stream(paths, v1.Compose([lambda x: x.rotate(90), *CROPPED])), 4)
    line = (
        r"DataPrefetcher\(loader\) moves .* change dataset\.transform first: function <lambda> can"
    )
    with pytest.raises(TypeError, match=line) as raised:
        accelerate(refused, **CPU)
    assert "convert_transforms" not in str(raised.value)
    assert_same_batches(refused, DataPrefetcher(refused, device="cpu"), atol=0)


def test_hugging_faces_processors_are_read(folder):
    transformers = pytest.importorskip("transformers")
    edge = {"shortest_edge": 24}
    crop = {"height": 24, "width": 24}
    for processor in (
        transformers.ViTImageProcessor(size=crop),
        transformers.ConvNextImageProcessor(size=edge),
        transformers.BitImageProcessor(size={"shortest_edge": 31}, crop_size=crop),
        transformers.SiglipImageProcessor(size=crop),
    ):
        got = gpuprefetch.preprocess(
            [path for path, _ in ImageFolder(folder).samples], processor, device="cpu"
        )
        for image, (path, _) in zip(got, ImageFolder(folder).samples, strict=True):
            with Image.open(path) as picture:
                want = processor(images=picture, return_tensors="pt")["pixel_values"][0]
            levels = 255 * max(processor.image_std)
            assert (image - want).abs().max() * levels <= 1.01


@pytest.mark.parametrize("ops", [[], [v2.RandomInvert(1.0)]])
def test_a_loop_may_write_into_its_batch(folder, ops):
    """Grayscale(3) gives three channels one memory; torch would refuse to write there."""
    transforms = [gpuprefetch.CenterCrop(24), v2.Grayscale(3), *ops]
    loader = DataLoader(EncodedImageFolder(folder), 4)
    (images, _), *_ = DataPrefetcher(loader, device="cpu", transforms=transforms)
    expected = images.clone() + 1
    assert torch.equal(images.add_(1), expected)
