"""Small classes that people put into pipelines, known by what their code does."""

import io
import random
import sys
import types

import numpy as np
import pytest
import torch
from fakes import assert_same_batches
from pictures import draw, encode
from PIL import Image, ImageFilter, ImageOps
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import functional as F
from torchvision.transforms import v2
from torchvision.transforms.functional import to_tensor

from gpuprefetch import DataPrefetcher, EncodedImage, EncodedImageFolder, Views
from gpuprefetch.lists.rgb import makes_rgb
from gpuprefetch.migrate.accelerate import accelerate

COUNT = 5
CPU = {"device": "cpu", "print_plan": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    (root / "a").mkdir()
    for i in range(COUNT):
        (root / f"a/{i}.jpg").write_bytes(encode(draw(40, 48, seed=i), "JPEG", quality=95))
    return root


# --- RGB ----------------------------------------------------------------------------------------


class ToMode:
    def __init__(self, mode="RGB"):
        self.mode = mode

    def __call__(self, x):
        if isinstance(x, (np.ndarray, torch.Tensor)):
            return x
        return x.convert(self.mode)


class ToModeOtherwise(ToMode):
    def __call__(self, x):
        if isinstance(x, (np.ndarray, torch.Tensor)):
            return x
        return x.convert(self.mode).rotate(180)


class OnlyTensors(ToMode):
    def __call__(self, x):
        if isinstance(x, torch.Tensor):
            return x
        return x.convert(self.mode)


class WithMode(ToMode):
    mode = property(lambda self: "L", lambda self, value: None)


class Shadowed(ToMode):
    """Its isinstance is another one."""


exec(
    compile(
        "def call(self, x):\n"
        "    if isinstance(x, (np.ndarray, torch.Tensor)):\n"
        "        return x\n"
        "    return x.convert(self.mode)\n",
        "shadowed",
        "exec",
    ),
    scope := {"isinstance": lambda *given: True, "np": np, "torch": torch},
)
Shadowed.__call__ = scope["call"]


def test_a_class_that_makes_rgb_is_known_by_its_code():
    assert makes_rgb(ToMode())
    others = (ToMode("L"), ToModeOtherwise(), OnlyTensors(), WithMode(), Shadowed(), ToMode)
    assert not any(map(makes_rgb, others))


def loader_of(folder, ops):
    return DataLoader(ImageFolder(folder, v1.Compose(ops)), 2)


CROP = [v1.Resize(32), v1.CenterCrop(24)]


@pytest.mark.parametrize("ops", [[ToMode(), *CROP], [*CROP, ToMode()]], ids=["first", "last"])
def test_rgb_is_left_out(folder, ops):
    loader = loader_of(folder, [*ops, v1.ToTensor()])
    moved = accelerate(loader, **CPU)
    assert "images are RGB" in {step.note for step in moved.plan.steps}
    assert_same_batches(loader, moved, atol=1.1 / 255)


@pytest.mark.parametrize("op", [ToMode("L"), ToModeOtherwise(), Shadowed()])
def test_what_does_more_is_refused_as_before(folder, op):
    with pytest.raises(ValueError, match=f"{type(op).__name__} cannot move"):
        accelerate(loader_of(folder, [op, *CROP, v1.ToTensor()]), **CPU)


# --- ToTensor -----------------------------------------------------------------------------------


class ByFunction(v1.ToTensor):
    """Passes tensors on."""

    def __call__(self, pic) -> torch.Tensor:
        if isinstance(pic, torch.Tensor):
            return pic
        return F.to_tensor(pic)


class ByName(v1.ToTensor):
    def __init__(self):
        super().__init__()

    def __call__(self, pic):
        if isinstance(pic, torch.Tensor):
            return pic
        return to_tensor(pic)


class BySuper(v1.ToTensor):
    def __call__(self, pic):
        if isinstance(pic, torch.Tensor):
            return pic
        return super().__call__(pic)


class Doubled(v1.ToTensor):
    def __call__(self, pic):
        if isinstance(pic, torch.Tensor):
            return pic
        return F.to_tensor(pic) * 2


class OfDerived(Doubled):
    """Its super() is no ToTensor."""

    __call__ = BySuper.__call__


@pytest.mark.parametrize("kind", [ByFunction, ByName, BySuper])
def test_a_class_that_makes_tensors_is_known_by_its_code(folder, kind):
    pipeline = [*CROP, ToMode(), kind(), v1.Normalize([0.5] * 3, [0.25] * 3)]
    loader = loader_of(folder, pipeline)
    assert_same_batches(loader, accelerate(loader, **CPU), atol=4.1 / 255)
    files = DataLoader(EncodedImageFolder(folder), 2)
    listed = DataPrefetcher(files, transforms=v1.Compose(pipeline), device="cpu")
    assert_same_batches(loader, listed, atol=4.1 / 255)


@pytest.mark.parametrize("kind", [Doubled, OfDerived])
def test_a_class_that_makes_other_tensors_is_refused(folder, kind):
    with pytest.raises(ValueError, match=f"{kind.__name__} cannot move"):
        accelerate(loader_of(folder, [*CROP, kind()]), **CPU)


# --- ToPILImage ---------------------------------------------------------------------------------


class Faces(Dataset):
    """Pictures of one size in records, with a pipeline for arrays."""

    def __init__(self, folder, mode=None, encoded=False):
        self.files = sorted((folder / "a").glob("*.jpg"))
        self.encoded = encoded
        self.transform = v1.Compose(
            [v1.ToPILImage(mode), v1.RandomHorizontalFlip(1.0), v1.ToTensor()]
        )

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        data = self.files[index].read_bytes()
        if self.encoded:
            return EncodedImage(data, index), index
        return self.transform(np.asarray(Image.open(io.BytesIO(data)))), index


@pytest.mark.parametrize("mode", [None, "RGB"])
def test_pictures_of_arrays_are_left_out_where_images_are_decoded(folder, mode):
    plain = DataLoader(Faces(folder, mode), 2)
    files = DataLoader(Faces(folder, mode, encoded=True), 2)
    for transforms in (plain.dataset.transform, plain.dataset.transform.transforms):
        moved = DataPrefetcher(files, transforms=transforms, device="cpu")
        assert_same_batches(plain, moved, atol=1.1 / 255)


@pytest.mark.parametrize(
    "ops",
    [
        [v1.ToPILImage("L"), v1.ToTensor()],
        [v1.CenterCrop(9), v1.ToTensor(), v1.ToPILImage(), v1.ToTensor()],
    ],
    ids=["gray", "later"],
)
def test_other_pictures_of_arrays_are_refused(folder, ops):
    files = DataLoader(Faces(folder, encoded=True), 2)
    with pytest.raises(ValueError, match=r"To\w+ is for PIL images"):
        next(iter(DataPrefetcher(files, transforms=ops, device="cpu")))


# --- lightly's, and views -----------------------------------------------------------------------


class View:
    def __init__(self):
        self.transform = v1.Compose([*CROP, v1.ToTensor()])

    def __call__(self, image):
        return self.transform(image)[:, :9]


def test_views_of_objects_are_told_to_take_their_pipelines(folder):
    view = View()
    with pytest.raises(TypeError, match=r"got View: give its pipeline, Views\(view\.tr") as raised:
        Views(view, view)
    (expression,) = [str(raised.value).partition("Views(")[2].partition(",")[0]]
    pipeline = eval(expression, {"view": view})
    files = DataLoader(EncodedImageFolder(folder), COUNT)
    moved = DataPrefetcher(files, transforms=Views(pipeline, pipeline), device="cpu")
    ((views, _),) = moved
    assert [each.shape for each in views] == [(COUNT, 3, 24, 24)] * 2


class Blur:
    """As DINO has it, for PIL images."""

    def __init__(self, p=0.5, radius_min=0.1, radius_max=2.0):
        self.prob = p
        self.radius_min = radius_min
        self.radius_max = radius_max

    def __call__(self, img):
        do_it = random.random() <= self.prob
        if not do_it:
            return img
        return img.filter(
            ImageFilter.GaussianBlur(radius=random.uniform(self.radius_min, self.radius_max))
        )


class Solarize:
    def __init__(self, p):
        self.p = p

    def __call__(self, img):
        if random.random() < self.p:
            return ImageOps.solarize(img)
        return img


class BlurTwice(Blur):
    def __call__(self, img):
        return super().__call__(super().__call__(img))


class SolarizeHigh(Solarize):
    def __call__(self, img):
        if random.random() < self.p:
            return ImageOps.solarize(img, 200)
        return img


class OfClass(Solarize):
    p = property(lambda self: 0.5, lambda self, value: vars(self).update(p=value))


def lightlys(module, name, monkeypatch, **attributes):
    """An op of lightly's class, without lightly."""
    full = f"lightly.transforms.{module}"
    kind = type(name, (), {"__call__": lambda self, x: x, "__module__": full})
    there = types.ModuleType(full)
    setattr(there, name, kind)
    monkeypatch.setitem(sys.modules, full, there)
    op = kind()
    vars(op).update(attributes)
    return op


def difference(loader, moved):
    """The mean difference in levels, of pictures in [0, 1]."""
    pairs = zip(loader, moved, strict=True)
    return max(255 * (want - got).abs().mean().item() for (want, _), (got, _) in pairs)


LARGER = [v1.Resize(110), v1.CenterCrop(96)]


def test_ops_for_pictures_that_are_known_by_their_code(folder):
    for op, most in ((Blur(1.0, 1.5, 1.5), 0.6), (Blur(0.0), 0.1), (Solarize(1.0), 0.1)):
        loader = loader_of(folder, [*LARGER, op, v1.ToTensor()])
        moved = accelerate(loader, **CPU)
        assert moved.plan.steps[2].where == "one program"
        assert type(op).__name__ in moved.describe()
        assert difference(loader, moved) <= most
        pipeline = loader.dataset.transform
        files = DataLoader(EncodedImageFolder(folder), 2)
        listed = DataPrefetcher(files, transforms=pipeline, device="cpu")
        assert difference(loader, listed) <= most
    assert (
        "PIL's blur is of boxes"
        in accelerate(loader_of(folder, [*LARGER, Blur(), v1.ToTensor()]), **CPU).describe()
    )


def test_a_probability_is_kept_and_a_change_of_it_told(folder):
    op = Solarize(0.5)
    loader = loader_of(folder, [*LARGER, op, v1.ToTensor()])
    moved = accelerate(loader, seed=1, **CPU)
    plain = accelerate(loader_of(folder, [*LARGER, v1.ToTensor()]), **CPU)
    same = [
        ((one - other).abs().mean() < 1 / 255).item()
        for _ in range(8)
        for (images, _), (others, _) in zip(plain, moved, strict=True)
        for one, other in zip(images, others, strict=True)
    ]
    assert 10 < sum(same) < 30  # of 40
    op.p = 0.9
    with pytest.raises(TypeError, match="has changed since accelerate"):
        next(iter(moved))


@pytest.mark.parametrize(
    "op", [BlurTwice(), SolarizeHigh(0.5), OfClass(0.5), Blur(0.5, 0.0, 2.0), Blur(0.5, 2.0, 1.0)]
)
def test_other_ops_for_pictures_are_refused(folder, op):
    with pytest.raises(ValueError, match=f"{type(op).__name__} cannot move to the device"):
        accelerate(loader_of(folder, [*LARGER, op, v1.ToTensor()]), **CPU)


def test_before_the_crop_they_are_refused(folder):
    with pytest.raises(ValueError, match="no crop or resize before it"):
        accelerate(loader_of(folder, [Blur(), *LARGER, v1.ToTensor()]), **CPU)


def test_lightlys_ops_are_torchvisions(folder, monkeypatch):
    blur = lightlys("gaussian_blur", "GaussianBlur", monkeypatch, prob=1.0, sigmas=(1.5, 1.5))
    turn = lightlys("rotation", "RandomRotate", monkeypatch, prob=1.0, angle=90)
    solarize = lightlys("solarize", "RandomSolarization", monkeypatch, prob=1.0, threshold=99)
    end = lightlys("torchvision_v2_compatibility", "ToTensor", monkeypatch)
    with_pil = [
        v1.RandomRotation((90, 90)),
        v1.RandomSolarize(99, 1.0),
        Blur(1.0, 1.5, 1.5),
        v1.ToTensor(),
    ]
    plain = loader_of(folder, [*LARGER, *with_pil])
    loader = loader_of(folder, [*LARGER, turn, solarize, blur, end])
    assert difference(plain, accelerate(loader, **CPU)) < 1


def test_a_library_for_one_picture_is_refused_in_a_list():
    kind = type("Other", (), {"__call__": lambda self, x: x})
    kind.__module__ = "lightly.transforms.other"
    files = DataLoader([EncodedImage(b"", i) for i in range(2)], 2)
    with pytest.raises(ValueError, match="lightly's Other is for one PIL image"):
        DataPrefetcher(files, transforms=[v2.CenterCrop(8), kind()], device="cpu")


# --- WebDataset ---------------------------------------------------------------------------------


class Shard(IterableDataset):
    def __init__(self, folder):
        self.files = sorted((folder / "a").glob("*.jpg"))

    def __iter__(self):
        return (EncodedImage(f.read_bytes(), i, str(f)) for i, f in enumerate(self.files))


def test_a_web_loader_is_the_loader_in_it(folder):
    wds = pytest.importorskip("webdataset")
    transforms = v1.Compose([*CROP, v1.ToTensor()])

    def web_loader(workers=0):
        return wds.WebLoader(Shard(folder), batch_size=2, num_workers=workers)

    want = list(DataPrefetcher(DataLoader(Shard(folder), 2), transforms=transforms, device="cpu"))
    options = {"transforms": transforms, "device": "cpu"}
    for workers in (0, 1):
        moved = DataPrefetcher(web_loader(workers), **options)
        assert isinstance(moved.wrapped, DataLoader) and moved.num_workers == workers
        assert all(map(torch.equal, want, moved)) and len([*moved]) == len(want)
    batched = web_loader().unbatched().batched(2)
    with pytest.raises(TypeError, match=r"DataLoader\(dataset, .*with batch_size=None") as raised:
        DataPrefetcher(batched, **options)
    assert "WebLoader" in str(raised.value)
    again = DataPrefetcher(DataLoader(web_loader().with_epoch(2), batch_size=None), **options)
    assert len([*again]) == 2  # the line
    with pytest.raises(TypeError, match="whose samples come in a stream"):
        accelerate(web_loader(), **CPU)
