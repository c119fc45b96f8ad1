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
from gpuprefetch.lists.pil_ops import stand_for
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

    def __call__(self, given):
        if isinstance(given, torch.Tensor):
            return given
        return F.to_tensor(given)


class ByName(v1.ToTensor):
    def __init__(self):
        super().__init__()

    def __call__(self, given):
        if isinstance(given, torch.Tensor):
            return given
        return to_tensor(given)


class BySuper(v1.ToTensor):
    def __call__(self, given):
        if isinstance(given, torch.Tensor):
            return given
        return super().__call__(given)


class Doubled(v1.ToTensor):
    def __call__(self, given):
        if isinstance(given, torch.Tensor):
            return given
        return F.to_tensor(given) * 2


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
    """Called as DINO's, which PIL blurs by chance."""

    def __init__(self, chance, least=0.1, most=2.0):
        self.radius_min, self.radius_max = least, most
        self.prob = chance

    def __call__(self, picture):
        happens = random.random() <= self.prob
        if not happens:
            return picture
        return picture.filter(
            ImageFilter.GaussianBlur(radius=random.uniform(self.radius_min, self.radius_max))
        )


class Solarize:
    """Called as DINO's: PIL inverts the upper half of the levels, by chance."""

    def __init__(self, chance):
        self.p = chance

    def __call__(self, picture):
        if random.random() < self.p:
            return ImageOps.solarize(picture)
        return picture


class BlurTwice(Blur):
    def __call__(self, picture):
        return super().__call__(super().__call__(picture))


class SolarizeHigh(Solarize):
    def __call__(self, picture):
        if random.random() < self.p:
            return ImageOps.solarize(picture, 200)
        return picture


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
    for op, most in ((Blur(1.0, 1.5, 1.5), 1), (Blur(0.0), 0.1), (Solarize(1.0), 0.1)):
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
        in accelerate(loader_of(folder, [*LARGER, Blur(0.5), v1.ToTensor()]), **CPU).describe()
    )


# Of square pictures of a side: levels of 255 that the blurs may differ by on average. Their kernels
# have one variance, so most of it is at hard edges, and at the border, of which a small picture has
# more. Noise, whose neighbors have nothing in common, is the worst case, where a box of less than
# three pixels stands for a narrow Gaussian.
BLURS = [("drawn", 32, 2.2), ("drawn", 96, 1), ("drawn", 224, 0.8), ("noise", 96, 11)]


@pytest.mark.parametrize(("kind", "side", "most"), BLURS)
def test_the_two_blurs_differ_by_as_much(kind, side, most):
    """What docs/migrate.md says of it; half the bound would be too little."""
    random_levels = np.random.default_rng(1).integers(0, 256, (1, side, side, 3), dtype=np.uint8)
    pictures = [draw(side, side, seed=seed) for seed in range(4)]
    worst = 0.0
    for deviation in (0.1, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0):
        ours = stand_for(Blur(1.0, deviation, deviation)).op
        for picture in random_levels if kind == "noise" else pictures:
            theirs = Blur(1.0, deviation, deviation)(Image.fromarray(picture))
            blurred = ours(torch.from_numpy(picture).permute(2, 0, 1)).permute(1, 2, 0).numpy()
            worst = max(worst, np.abs(blurred.astype(int) - np.asarray(theirs)).mean())
    assert most / 2 < worst <= most


def test_a_change_of_a_mode_is_told(folder):
    op = ToMode()
    moved = accelerate(loader_of(folder, [op, *LARGER, v1.ToTensor()]), **CPU)
    list(moved)
    op.mode = "L"
    with pytest.raises(TypeError, match="has changed since accelerate"):
        next(iter(moved))
    op.mode = "RGB"
    list(moved)


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
    "op",
    [BlurTwice(0.5), SolarizeHigh(0.5), OfClass(0.5), Blur(0.5, 0.0, 2.0), Blur(0.5, 2.0, 1.0)],
)
def test_other_ops_for_pictures_are_refused(folder, op):
    with pytest.raises(ValueError, match=f"{type(op).__name__} cannot move to the device"):
        accelerate(loader_of(folder, [*LARGER, op, v1.ToTensor()]), **CPU)


def test_before_the_crop_they_are_refused(folder):
    with pytest.raises(ValueError, match="no crop or resize before it"):
        accelerate(loader_of(folder, [Blur(0.5), *LARGER, v1.ToTensor()]), **CPU)


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


@pytest.mark.parametrize("where", ["before ToTensor", "after ToTensor"])
@pytest.mark.parametrize("name", ["RandomRotate", "RandomRotateDegrees"])
def test_lightlys_rotations_are_of_each_image_in_any_place(folder, monkeypatch, name, where):
    turn = v1.RandomApply([v1.RandomRotation((90, 90))], p=0.5)
    own = {"prob": 0.5, "angle": 90} if name == "RandomRotate" else {"transform": turn}
    op = lightlys("rotation", name, monkeypatch, **own)
    ops = [op, v1.ToTensor()] if where == "before ToTensor" else [v1.ToTensor(), op]
    plain = loader_of(folder, [*CROP, v1.ToTensor()])
    files = DataLoader(EncodedImageFolder(folder), 2)
    listed = [v1.Resize(32), v1.CenterCrop(24), *ops]
    for moved in (
        accelerate(loader_of(folder, [*CROP, *ops]), seed=1, **CPU),
        DataPrefetcher(files, transforms=listed, seed=1, device="cpu"),
    ):
        turned = []
        for _ in range(4):
            for (images, _), (others, _) in zip(plain, moved, strict=True):
                for one, other in zip(images, others, strict=True):
                    ways = [one, one.rot90(1, (1, 2))]
                    near = [(other - way).abs().mean() < 1 / 255 for way in ways]
                    assert sum(near) == 1
                    turned.append(near.index(True))
        assert 4 <= sum(turned) <= 16  # of 20
        pairs = [*zip(turned[::5], turned[1::5], strict=True)]  # of one batch
        assert len(turned) == 20 and any(first != second for first, second in pairs)


def test_lightlys_other_ops_are_for_one_image(folder):
    """A list refuses them with a line, and accelerate calls them for each image."""

    class Other:
        def __call__(self, image):
            return image * torch.rand(())

    Other.__module__ = "lightly.transforms.other"
    op = Other()
    files = DataLoader(EncodedImageFolder(folder), 2)
    with pytest.raises(ValueError, match="lightly's Other is for one image, and would") as raised:
        DataPrefetcher(files, transforms=[v2.CenterCrop(8), op], device="cpu")
    text = str(raised.value)
    line = text[text.index("lambda images") : text.index(". Or take")]
    called = eval(line, {"op": op, "torch": torch})
    crop = [v2.CenterCrop(8), v2.ToDtype(torch.float32, scale=True)]
    by_line = DataPrefetcher(files, transforms=[*crop, called], device="cpu")
    moved = accelerate(loader_of(folder, [v1.CenterCrop(8), v1.ToTensor(), op]), **CPU)
    plain = loader_of(folder, [v1.CenterCrop(8), v1.ToTensor()])
    for prefetcher in (by_line, moved):
        (images, _), (whole, _) = next(iter(prefetcher)), next(iter(plain))
        shares = (images / whole.clamp(1 / 255)).flatten(1).median(dim=1).values
        assert shares[0] != shares[1] and (images - whole * shares[:, None, None, None]).max() < 0.1


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
