"""A transform of several views moves as it is, if each sample shows what becomes of its views."""

import copy
import functools
import pickle
import random
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from pictures import draw, encode, write_folder
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset, default_collate
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from gpuprefetch import (
    BadImageError,
    DataPrefetcher,
    EncodedImage,
    EncodedImageFolder,
    Views,
    convert_transforms,
)
from gpuprefetch.migrate.accelerate import accelerate
from gpuprefetch.migrate.explain import explain
from gpuprefetch.migrate.parity import parity

COUNT = 7
CPU = {"device": "cpu", "print_plan": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pictures = [draw(48 + 2 * i, 64, seed=i) for i in range(COUNT)]
    return write_folder(tmp_path_factory.mktemp("folder"), pictures, "jpg", quality=95)


# Two pipelines that sample nothing, so that pictures can be compared with those of the workers.
LARGE = v1.Compose([v1.Resize(40), v1.CenterCrop(32), v1.ToTensor()])
SMALL = v1.Compose([v1.CenterCrop(16), v1.RandomHorizontalFlip(1.0), v1.ToTensor()])
TO_FLOAT = v1.Compose([v1.ToTensor(), v1.Normalize([0.5] * 3, [0.25] * 3)])
CROPS = v2.Compose([v2.RandomResizedCrop(20), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


class TwoCrops:
    """As SimCLR has it."""

    def __init__(self, transform):
        self.transform = transform

    def __call__(self, picture):
        return [self.transform(picture), self.transform(picture)]


class ManyCrops:
    """As DINO has it."""

    def __init__(self):
        self.first = LARGE
        self.second = v1.Compose([*LARGE.transforms, v1.RandomErasing(0.0)])
        self.local = SMALL
        self.count = 3

    def __call__(self, picture):
        crops = [self.first(picture), self.second(picture)]
        for _ in range(self.count):
            crops.append(self.local(picture))
        return crops


class WeakAndStrong:
    """As FixMatch has it: what is common comes last."""

    def __init__(self):
        self.weak = v1.Compose([v1.CenterCrop(32)])
        self.strong = v1.Compose([v1.CenterCrop(32), v1.RandomInvert(1.0)])
        self.normalize = TO_FLOAT

    def __call__(self, picture):
        weak = self.weak(picture)
        strong = self.strong(picture)
        return self.normalize(weak), self.normalize(strong)


class ImageAndMask:
    """As SimMIM has it: the mask is its own, and samples from NumPy."""

    def __init__(self):
        self.pipeline = LARGE

    def __call__(self, picture):
        return self.pipeline(picture), (np.random.permutation(16) < 6).reshape(4, 4).astype(int)


class OneView(torch.nn.Module):
    def __init__(self, pipeline):
        super().__init__()
        self.pipeline = pipeline

    def forward(self, picture):
        made: torch.Tensor = self.pipeline(picture)
        return made


class ListOfViews(torch.nn.Module):
    """Views that are modules of their own, as in a library for contrastive learning."""

    def __init__(self, *views):
        super().__init__()
        self.views = torch.nn.ModuleList(views)

    def forward(self, picture):
        return [view(picture) for view in self.views]


class Named:
    """A dict; single ops; the second view comes first, and stands in two places."""

    resize = v1.Resize((24, 24))  # of the class

    def __init__(self):
        self.ops = {"end": v1.ToTensor(), "middle": (v1.CenterCrop(16),)}
        self.calls = 0

    def __call__(self, picture):
        self.calls += 1
        second = self.ops["end"](self.ops["middle"][0](picture))
        first = self.ops["end"](self.resize(picture))
        size = torch.tensor(picture.size)
        return {"teacher": [first], "student": [second, first], "size": size, "name": "x"}


class Pair(NamedTuple):
    weak: object
    strong: object


class AsPair:
    def __init__(self):
        self.views = [LARGE, SMALL]

    def __call__(self, picture):
        if isinstance(picture, Image.Image):
            picture = picture.convert("RGB")
        made = [view(picture) for view in self.views]
        assert all(isinstance(each, torch.Tensor) for each in made)
        return Pair(*made)


def leaves(batch):
    if isinstance(batch, dict):
        batch = [*batch.values()]
    if isinstance(batch, (list, tuple)):
        return [leaf for part in batch for leaf in leaves(part)]
    return [batch]


def form(batch):
    """A batch with the dtype and shape of each tensor in its place."""
    if isinstance(batch, dict):
        return {key: form(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch), [form(each) for each in batch]
    return (batch.dtype, batch.shape) if isinstance(batch, torch.Tensor) else batch


VIEWS = {
    "two crops": TwoCrops(LARGE),
    "many crops": ManyCrops(),
    "weak and strong": WeakAndStrong(),
    "image and mask": ImageAndMask(),
    "modules": ListOfViews(OneView(LARGE), OneView(SMALL)),
    "one view of a module": ListOfViews(OneView(SMALL)),
    "a dict": Named(),
    "a named tuple": AsPair(),
    "in a Compose": v1.Compose([TwoCrops(SMALL)]),
    "a function": lambda picture: (LARGE(picture), SMALL(picture)),
}


def same(loader, moved):
    for want, got in zip(loader, moved, strict=True):
        assert form(got) == form(want)
        for one, other in zip(leaves(want), leaves(got), strict=True):
            if isinstance(one, torch.Tensor) and one.dim() > 3:
                assert (one - other).abs().max() <= 8.1 / 255  # a level, after Normalize
            elif isinstance(one, torch.Tensor) and one.dim() == 1:
                assert torch.equal(one, other)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_views_move_as_their_transform_gives_them(folder, name, own):
    """Their order, their containers, and what else the transform gives."""
    options = {"collate_fn": lambda samples: default_collate(samples)} if own else {}
    loader = DataLoader(ImageFolder(folder, VIEWS[name]), 3, **options)
    moved = accelerate(loader, **CPU)
    assert moved.decodes_files
    steps = [step for plan in moved.plans for step in plan.steps]
    assert "worker CPU" not in {step.where for step in steps}
    same(loader, moved)
    same(loader, moved)  # and in the next epoch


def test_no_two_places_share_memory(folder):
    (batch, _), *_ = accelerate(DataLoader(ImageFolder(folder, Named()), 3), **CPU)
    (teacher,), (_, student) = batch["teacher"], batch["student"]
    assert torch.equal(teacher, student)
    teacher.zero_()
    assert student.abs().sum() > 0


def test_views_are_those_of_the_class_written_down(folder):
    """With one seed: the random parameters are the same, in workers and on another dtype."""
    loader = DataLoader(ImageFolder(folder, TwoCrops(CROPS)), 3)
    moved = accelerate(loader, seed=5, **CPU)
    lists = Views(*map(convert_transforms, [CROPS, CROPS]))
    files = DataLoader(EncodedImageFolder(folder), 3)
    written = DataPrefetcher(files, transforms=lists, seed=5, device="cpu")
    for (want, _), (got, _) in zip(written, moved, strict=True):
        assert all(map(torch.equal, want, got))
        assert not torch.equal(*got)
    want = next(iter(accelerate(loader, seed=5, **CPU)))[0]
    for options, change in (
        ({"dtype": torch.bfloat16}, torch.Tensor.bfloat16),
        ({"transforms": [torch.neg]}, torch.neg),
        ({"transforms": [torch.neg], "dtype": torch.float16}, lambda x: -x.half()),
    ):
        got = next(iter(accelerate(loader, seed=5, **options, **CPU)))[0]
        assert all(map(torch.equal, got, map(change, want)))


def test_workers_call_the_transform_and_resume(folder):
    loader = DataLoader(ImageFolder(folder, ManyCrops()), 2, num_workers=1)
    moved = accelerate(loader, seed=1, **CPU)
    batches = iter(moved)
    next(batches)
    state = moved.state_dict()
    rest = [*batches]
    again = accelerate(DataLoader(loader.dataset, 2), seed=1, **CPU)
    again.load_state_dict(state)
    for (want, labels), (got, others) in zip(rest, again, strict=True):
        assert all(map(torch.equal, want, got)) and torch.equal(labels, others)
    one, label = moved.replay(3)
    assert torch.equal(one[4][0], rest[0][0][4][1]) and label.shape == (1,)


def test_a_bad_file_takes_its_row_out_of_every_view(folder, tmp_path):
    (tmp_path / "a").mkdir()
    for number, path in enumerate(sorted(folder.glob("*/*.jpg"))[:4]):
        data = path.read_bytes()
        (tmp_path / f"a/{number}.jpg").write_bytes(data[:40] if number == 1 else data)
    # This transform asks for the size of the picture.
    loader = DataLoader(ImageFolder(tmp_path, Named()), 4)
    ((_, labels),) = accelerate(loader, on_error="skip", **CPU)
    assert len(labels) == 3
    with pytest.raises(BadImageError, match=r"1\.jpg"):
        [*accelerate(loader, **CPU)]
    for transform in (WeakAndStrong(), AsPair()):
        loader = DataLoader(ImageFolder(tmp_path, transform), 4)
        ((views, labels),) = accelerate(loader, on_error="skip", **CPU)
        assert [len(view) for view in views] == [3, 3] and len(labels) == 3


def test_the_plan_has_a_table_for_each_view(folder):
    loader = DataLoader(ImageFolder(folder, ManyCrops()), 3)
    moved = accelerate(loader, **CPU)
    text = moved.describe()
    assert re.findall("view .*", text) == ["view 1: first", "view 2: second", "view 3, 4, 5: local"]
    assert text.count("fused launch") == 9
    assert moved.plan is moved.plans[0] and len(moved.plans) == 5
    assert accelerate(loader, print_plan=False).describe() in explain(loader)
    chained = accelerate(DataLoader(ImageFolder(folder, WeakAndStrong()), 3), **CPU)
    assert "view 2: strong + normalize" in chained.describe()


def test_parity_is_of_one_pipeline(folder):
    transform = TwoCrops(LARGE)
    with pytest.raises(TypeError, match=r"TwoCrops holds transform\.transform\. Give") as raised:
        parity(DataLoader(ImageFolder(folder, transform), 3), 2, device="cpu")
    line = str(raised.value).rpartition(": ")[2].removesuffix(".")
    given = {"DataLoader": DataLoader, "ImageFolder": ImageFolder}
    given["parity"] = functools.partial(parity, device="cpu")  # a GPU's decoder differs by more
    assert eval(line, given | {"root": folder, "transform": transform}).mean < 1


def test_a_trial_leaves_no_trace(folder):
    transform = Named()
    moved = accelerate(DataLoader(ImageFolder(folder, transform), 3), **CPU)
    assert transform.calls == 0 and transform.ops["end"].__class__ is v1.ToTensor
    list(moved)
    assert transform.calls == COUNT  # its own code runs, once for each sample
    assert [type(each) for each in transform(Image.new("RGB", (9, 9)))["teacher"]] == [torch.Tensor]
    assert moved.dataset[0][0]["teacher"][0].shape == (3, 24, 24)


def test_a_change_of_a_pipeline_is_an_error(folder):
    transform = TwoCrops(v1.Compose([v1.CenterCrop(16), v1.ToTensor()]))
    moved = accelerate(DataLoader(ImageFolder(folder, transform), 3), **CPU)
    transform.transform.transforms[0].size = (8, 8)
    with pytest.raises(TypeError, match=r"dataset\.transform has changed since accelerate"):
        list(moved)
    other = TwoCrops(SMALL)
    moved = accelerate(DataLoader(ImageFolder(folder, other), 3), **CPU)
    other.transform = LARGE
    with pytest.raises(TypeError, match="has changed since accelerate"):
        list(moved)
    counted = ManyCrops()  # what is no pipeline may change: each sample shows it
    moved = accelerate(DataLoader(ImageFolder(folder, counted), 3), **CPU)
    counted.count = 4
    with pytest.raises(TypeError, match="calls first, second, local, local, local, local here"):
        list(moved)


# --- what a sample does not show ----------------------------------------------------------------


class Calls:
    """Calls its pipelines as ``how`` does."""

    def __init__(self, how):
        self.how = how
        self.large = LARGE
        self.small = SMALL
        self.crop = v1.CenterCrop(24)
        self.end = v1.ToTensor()
        self.normalize = v1.Normalize([0.5] * 3, [0.25] * 3)
        self.kept = []

    def __call__(self, picture):
        return self.how(self, picture)


def shared_crop(t, picture):
    crop = t.crop(picture)
    return t.end(crop), t.end(crop)


def crop_as_well(t, picture):
    crop = t.crop(picture)
    return crop, t.end(crop)


def changed_before(t, picture):
    return t.large(picture.rotate(90)), t.small(picture)


def changed_between(t, picture):
    made = t.large(picture)
    picture.paste((0, 0, 0), (0, 0, 9, 9))
    return made, t.small(picture)


def kept_from_before(t, picture):
    t.kept.append(t.large(picture))
    return t.kept[0], t.small(picture)


def passed_on_from_before(t, picture):
    t.kept.append(t.crop(picture))
    return t.end(t.kept[0]), t.small(picture)


def reseeded(t, picture):
    torch.manual_seed(3)
    made = t.large(picture)
    torch.manual_seed(3)
    return made, t.small(picture)


def set_back(t, picture):
    state = random.getstate()
    made = t.large(picture)
    random.setstate(state)
    return made, t.small(picture)


def seed_all(number):
    np.random.seed(number)


def by_a_function(t, picture):
    seed_all(7)
    return t.large(picture), t.small(picture)


def resized(t, picture):
    t.crop.size = (20, 20)
    return t.end(t.crop(picture)), t.small(picture)


def resized_within(t, picture):
    t.large.transforms[1].size = (20, 20)
    return t.large(picture), t.small(picture)


def by_class(t, picture):
    ops = [t.large, t.small] if type(t.large) is v1.Compose else [t.small, t.large]
    return [op(picture) for op in ops]


def test_a_function_that_samples_its_views_alike_is_refused(folder):
    def alike(picture):
        seed_all(7)
        return LARGE(picture), SMALL(picture)

    with pytest.raises(ValueError, match=r"seed_all calls numpy\.random\.seed"):
        accelerate(DataLoader(ImageFolder(folder, alike), 3), **CPU)


REFUSED = {
    "a seed": (reseeded, r"reseeded calls torch\.manual_seed, so that pipelines may sample alike"),
    "a state": (set_back, r"set_back calls random\.setstate"),
    "a seed in a function": (by_a_function, r"seed_all calls numpy\.random\.seed"),
    "sets an attribute": (resized, r"the transform sets \.size of \.crop"),
    "sets one within": (resized_within, r"uses \.transforms of \.large, which it may change"),
    "a class": (by_class, r"by_class calls type\(\), where isinstance\(\) would do"),
    "a crop in common": (shared_crop, r"what \.crop gave is used for two views"),
    "a crop as well": (crop_as_well, r"what \.crop gave is used for two views"),
    "values of a view": (lambda t, x: (t.large(x), t.small(x) * 2), r"by __mul__"),
    "two views in one": (lambda t, x: torch.stack([t.large(x), t.large(x)]), r"function of torch"),
    "a method of a view": (lambda t, x: (t.large(x), t.small(x).mean()), r"by \.mean"),
    "changed before": (changed_before, r"gets a picture that was changed before"),
    "changed between": (changed_between, r"before \.small of the transform gets it: by \.paste"),
    "dropped": (lambda t, x: (t.large(x), t.small(x))[0], r"does not return what \.small gave"),
    "the picture too": (lambda t, x: (t.large(x), x), "returns the picture itself"),
    "nothing": (lambda t, x: torch.zeros(3, 8, 8), "returns nothing that a pipeline"),
    "another argument": (lambda t, x: t.large(x, 3), "called with 2 arguments"),
    "an error of its own": (lambda t, x: t.missing, "has no attribute 'missing'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_sample_shows_is_refused_with_the_line_to_write(folder, name):
    how, why = REFUSED[name]
    transform = Calls(how)
    loader = DataLoader(ImageFolder(folder, transform), 3)
    with pytest.raises(ValueError, match=why) as raised:
        accelerate(loader, **CPU)
    text = str(raised.value)
    assert "It cannot move as it is: " in text and "Two ways work" not in text
    # The line works.
    expression = text[text.index("Views(") : text.index("), where ")]
    names = {"Views": Views, "convert_transforms": convert_transforms, "t": transform}
    line = "Views(*map(convert_transforms, [t.large, t.small, t.crop, t.end, t.normalize]))"
    assert expression in (line, line.replace(", t.crop, t.end, t.normalize", ""))
    views = eval("Views(*map(convert_transforms, [t.large, t.small]))", names)
    files = DataLoader(EncodedImageFolder(folder), 3)
    assert len(next(iter(DataPrefetcher(files, transforms=views, device="cpu")))[0]) == 2


def test_a_seed_is_known_where_torch_compile_has_wrapped_it(folder, monkeypatch):
    wrapped = functools.wraps(torch.manual_seed)(lambda seed: None)
    monkeypatch.setattr(torch, "manual_seed", wrapped)
    loader = DataLoader(ImageFolder(folder, Calls(reseeded)), 3)
    with pytest.raises(ValueError, match=r"reseeded calls torch\.manual_seed"):
        accelerate(loader, **CPU)


CALLS = {
    "isinstance": lambda t, x: (
        (t.large(x), t.small(x)) if isinstance(t.large, v1.Compose) else (t.small(x), t.large(x))
    ),
    "an attribute": lambda t, x: (t.large(x), t.crop.size[0], t.small(x)),
    "a tensor passed on": lambda t, x: (t.normalize(t.large(x)), t.small(x)),
    "an argument by name": lambda t, x: (t.large(img=x), t.small(x)),
    "nested": lambda t, x: [[t.large(x), t.small(x)], {"more": [t.small(x)] * 2}],
    "a copy": lambda t, x: (t.large(x.copy()), t.small(x)),
    "other values": lambda t, x: [t.large(x), 1.5, "x", t.small(x), np.ones((2, 3))],
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_transform_may_do_beside_calling_its_pipelines(folder, name):
    loader = DataLoader(ImageFolder(folder, Calls(CALLS[name])), 3)
    same(loader, accelerate(loader, **CPU))


class SeedsEach(ImageFolder):
    """Two pictures that a seed transforms alike."""

    def __getitem__(self, index):
        made = []
        for _ in range(2):
            torch.manual_seed(index)
            made.append(super().__getitem__(index)[0])
        return made


def test_a_dataset_that_samples_two_pictures_alike_is_refused_with_what_does(folder):
    crop = v1.Compose([v1.RandomCrop(20), v1.ToTensor()])
    loader = DataLoader(SeedsEach(folder, crop), 3)
    assert all(torch.equal(*pair) for pair in loader)
    with pytest.raises(TypeError, match="torch's seed is set between the images") as raised:
        accelerate(loader, **CPU)
    text = str(raised.value)
    assert "transforms=convert_transforms(transform))" in text
    pictures = [Path(path) for path, _ in loader.dataset.samples]
    pairs = DataLoader(
        [
            (EncodedImage(path.read_bytes(), i), EncodedImage(encode(Image.open(path), "PNG"), i))
            for i, path in enumerate(pictures)
        ],
        3,
    )
    listed = DataPrefetcher(pairs, transforms=convert_transforms(crop), device="cpu")
    as_it_is = DataPrefetcher(loader, device="cpu")
    assert "as it is: DataPrefetcher(loader)" in text
    for prefetcher in (listed, as_it_is):
        assert all((one - other).abs().max() < 3 / 255 for one, other in prefetcher)


def of_number(numbers):
    """Another chain for these samples; ``kept`` counts them."""

    def how(t, picture):
        t.kept.append(0)
        two = [t.large(picture), t.small(picture)]
        return two[::-1] if len(t.kept) in numbers else two

    return how


def test_a_sample_that_calls_others_is_named(folder):
    moved = accelerate(DataLoader(ImageFolder(folder, Calls(of_number([5]))), 3), **CPU)
    why = "calls small, large here, and large, small for the first sample"
    with pytest.raises(TypeError, match=rf"ImageFolder\.__getitem__\(4\): Calls {why}") as raised:
        list(moved)
    text = str(raised.value)
    assert text.endswith("accelerate(loader, keep_unknown=True).")
    transform = Calls(of_number([5]))
    loader = DataLoader(ImageFolder(folder, transform), 3)  # the advice
    with pytest.raises(RuntimeError, match="equal size"):
        list(loader)  # though such views make no batch
    kept = accelerate(DataLoader(ImageFolder(folder, transform), 1), keep_unknown=True, **CPU)
    assert len([*kept]) == COUNT


@pytest.mark.parametrize("how", [kept_from_before, passed_on_from_before])
def test_a_view_of_an_earlier_picture_is_refused(folder, how):
    with pytest.raises(TypeError, match="uses what it has made of an earlier picture"):
        accelerate(DataLoader(ImageFolder(folder, Calls(how)), 3), **CPU)


class Compose:
    """Named as torchvision's, and by chance it leaves its ops out."""

    def __init__(self, transforms, p):
        self.transforms = transforms
        self.p = p

    def __call__(self, image):
        for transform in self.transforms if random.random() < self.p else ():
            image = transform(image)
        return image


def test_a_class_that_chooses_is_refused_where_it_chooses_otherwise(folder):
    ops = [v1.Resize((16, 24)), v1.ToTensor()]
    loader = DataLoader(ImageFolder(folder, Compose(ops, 1.0)), 2)
    same(loader, accelerate(loader, **CPU))
    random.seed(0)
    moved = accelerate(DataLoader(ImageFolder(folder, Compose(ops, 0.9)), 2), **CPU)
    random.seed(9)
    with pytest.raises(TypeError, match="Compose returns the picture itself"):
        for _ in range(20):
            list(moved)


class Uses(ImageFolder):
    def __init__(self, root, transform, use):
        super().__init__(root, transform)
        self.use = use

    def __getitem__(self, index):
        views, label = super().__getitem__(index)
        return self.use(views), label


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (lambda views: views[:1], "leaves out a view"),
        (lambda views: views[1:], "leaves out a view"),
        (lambda views: [views[0], views[1] + 1], "by __add__"),
        (lambda views: [views[0], v2.RandomHorizontalFlip(1.0)(views[1])], "encoded image"),
        (lambda views: [views[0], views[1].clone()], r"by \.clone"),
        (lambda views: [*views, views[0]], "gives a view in two places"),
    ],
)
def test_a_dataset_leaves_its_views_as_they_are(folder, use, why):
    with pytest.raises(ValueError, match=why):
        accelerate(DataLoader(Uses(folder, TwoCrops(LARGE), use), 3), **CPU)


def test_a_dataset_may_put_its_views_elsewhere(folder):
    dataset = Uses(folder, ListOfViews(OneView(LARGE), OneView(SMALL)), lambda views: views[::-1])
    for loader in (DataLoader(dataset, 3), DataLoader(Subset(dataset, [3, 1, 2]), 2)):
        same(loader, accelerate(loader, **CPU))


class Arrays(Dataset):
    """Pictures of arrays, as CIFAR's; the transform gets real ones, or such that were changed."""

    def __init__(self, transform, mode="RGB"):
        self.data = [draw(40, 48, seed=i) for i in range(COUNT)]
        self.transform = transform
        self.mode = mode

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        picture = Image.fromarray(self.data[index]).convert(self.mode)
        return self.transform(picture.rotate(180)), index


@pytest.mark.parametrize("name", ["two crops", "weak and strong", "image and mask", "a dict"])
def test_views_of_pictures_that_are_no_files(name):
    loader = DataLoader(Arrays(VIEWS[name]), 3)
    moved = accelerate(loader, **CPU)
    assert "the dataset, in the workers" in moved.describe()
    same(loader, moved)


def test_pictures_of_views_are_rgb():
    with pytest.raises(ValueError, match="is 'L' and not RGB, and reaches the transform so"):
        accelerate(DataLoader(Arrays(TwoCrops(LARGE), "L"), 3), **CPU)


class Twice(ImageFolder):
    def __getitem__(self, index):
        return super().__getitem__(index)[0], super().__getitem__(0)[0]


def test_a_sample_has_one_picture_of_views(folder):
    with pytest.raises(ValueError, match="several views is called twice for a sample"):
        accelerate(DataLoader(Twice(folder, TwoCrops(LARGE)), 3), **CPU)
    same(loader := DataLoader(Twice(folder, OneView(LARGE)), 3), accelerate(loader, **CPU))


def test_an_op_in_a_view_that_cannot_move_is_named(folder):
    own = v1.Compose([v1.CenterCrop(24), lambda picture: picture.rotate(9), v1.ToTensor()])
    loader = DataLoader(ImageFolder(folder, ListOfViews(OneView(LARGE), OneView(own))), 3)
    with pytest.raises(ValueError, match="function <lambda> cannot move to the device"):
        accelerate(loader, **CPU)
    assert len([*accelerate(loader, keep_unknown=True, **CPU)]) == 3


def test_an_empty_folder_is_told_of_views(folder):
    loader = DataLoader(Subset(ImageFolder(folder, TwoCrops(LARGE)), []), 3)
    with pytest.raises(ValueError, match="If it gives several views"):
        accelerate(loader, **CPU)


def test_a_copy_of_what_moved_is_another(folder):
    moved = accelerate(DataLoader(ImageFolder(folder, TwoCrops(CROPS)), 3), seed=2, **CPU)
    for other in (copy.deepcopy(moved), pickle.loads(pickle.dumps(moved))):
        moved.set_epoch(0)
        other.set_epoch(0)
        for (want, _), (got, _) in zip(moved, other, strict=True):
            assert all(map(torch.equal, want, got))
