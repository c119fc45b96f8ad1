"""A dataset's own transform of a picture and its target: moved as it is, with the same draws."""

import os
import random
from functools import partial

import numpy as np
import pytest
import small_presets as presets
import torch
from fakes import leaves
from pictures import draw, encode_jpeg
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import tv_tensors
from torchvision.transforms import functional as v1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

import gpuprefetch
from gpuprefetch import accelerate
from gpuprefetch.transforms.random import SeededDraws

SHAPES = [(60, 90), (75, 50), (33, 100), (120, 80), (64, 64)]
COUNT = 20
# Of each preset. 200 were compared with GPUPREFETCH_SAMPLES=200, which needs a minute.
SAMPLES = int(os.environ.get("GPUPREFETCH_SAMPLES", 16))
FEW = SAMPLES // 6  # RandomIoUCrop tries a thousand parts for some
LEVEL = 1.01 / 255

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # pycocotools
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("presets")
    presets.write_coco(root / "coco", COUNT, SHAPES)
    presets.write_voc(root / "voc", COUNT, SHAPES)
    return root


class Noted:
    """A transform that says in its target what it has drawn from, so that it can be repeated."""

    def __init__(self, transform):
        self.transform = transform

    def __call__(self, image, target):
        seed = int(torch.randint(2**31, ()))
        with SeededDraws(seed):
            image, target = self.transform(image, target)
        return image, {"seed": seed, "target": target}


def coco(root, transform, **options):
    dataset = presets.coco(root / "coco", transform, **options)
    return Subset(dataset, [i for i in range(COUNT) if i != 5])  # which has no objects


def moved(loader, **options):
    return accelerate(loader, **{"device": "cpu", "print_plan": False} | options)


def assert_equal(got, want):
    """The same values of the same types."""
    got, want = [*leaves(got)], [*leaves(want)]
    assert [*map(type, got)] == [*map(type, want)]
    for one, other in zip(got, want, strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other)
        else:
            assert one == other


def compare(dataset, transform, plain, tolerance, samples):
    """Move a loader over a dataset; each sample against ``plain`` with the same random numbers."""
    prefetcher = moved(presets.loader_of(dataset(Noted(transform)), shuffle=True), seed=0)
    raw = {sample[1]["image_id"]: sample for sample in map(dataset(None).__getitem__, range(19))}
    seen = 0
    while seen < samples:
        for images, targets in prefetcher:
            for image, noted in zip(images, targets, strict=True):
                picture, target = raw[noted["target"]["image_id"]]
                with SeededDraws(noted["seed"]):
                    want, want_target = transform(plain(picture), target)
                assert_equal(noted["target"], want_target)
                assert image.shape == want.shape and image.dtype == want.dtype
                assert_close(image, want, tolerance)
                seen += 1
                if seen == samples:
                    return


def assert_close(image, want, tolerance):
    """Within a tolerance. PIL rounds twice in a resize: a pixel of a million is two levels off."""
    difference = (image - want).abs()
    assert difference.max() <= 2 * tolerance
    assert (difference > tolerance).float().mean() < 1e-3


DETECTION = {"hflip": 1e-6, "lsj": LEVEL, "multiscale": LEVEL, "ssd": 1e-6, "ssdlite": 1e-6}


@pytest.mark.parametrize("name", DETECTION)
def test_the_detection_presets_move(root, name):
    samples = FEW if name.startswith("ssd") and SAMPLES < 200 else SAMPLES
    transform = presets.detection(name)
    # Colors of PIL images are not those of tensors, in torchvision itself.
    plain = v2.ToImage() if name == "ssd" else lambda picture: picture
    compare(partial(coco, root), transform, plain, DETECTION[name], samples)


def test_the_preset_of_evaluation_gives_the_same(root):
    loader = presets.loader_of(coco(root, presets.detection("eval")))
    for (images, targets), (want, want_targets) in zip(moved(loader), loader, strict=True):
        assert_equal(targets, want_targets)
        for one, other in zip(images, want, strict=True):
            assert (one - other).abs().max() <= 1e-6


def seeded(transform, image, target):
    """The same for targets that torch's collate function is to stack."""
    image, noted = Noted(transform)(image, target)
    return image, (noted["target"], noted["seed"])


@pytest.mark.parametrize("name", ["train", "eval"])
def test_the_segmentation_presets_move(root, name):
    transform = presets.segmentation(name)
    dataset = presets.voc(root / "voc", partial(seeded, transform))
    raw = presets.voc(root / "voc", None)
    prefetcher = moved(DataLoader(dataset, 4), seed=0)
    seen = 0
    while seen < (SAMPLES if name == "train" else COUNT):
        for images, (masks, seeds) in prefetcher:
            assert masks.dtype == torch.int64 and images.dtype == torch.float32
            for image, mask, seed in zip(images, masks, seeds.tolist(), strict=True):
                with SeededDraws(seed):
                    want, want_mask = transform(*raw[seen % COUNT])
                assert torch.equal(mask, want_mask)
                assert_close(image, want, LEVEL / min(presets.STD))
                seen += 1


def test_a_plan_says_what_is_fused(root):
    def steps(name):
        plan = moved(presets.loader_of(coco(root, presets.detection(name)))).plan
        return {step.name: step.where for step in plan.steps}

    fused = steps("lsj")
    moves = ("ScaleJitter", "FixedSizeCrop", "RandomHorizontalFlip", "ToDtype")
    assert {fused[name] for name in moves} == {"fused launch"}
    assert fused["SanitizeBoundingBoxes"] == "worker CPU"
    apart = steps("ssd")
    moves = ("RandomPhotometricDistort", "RandomIoUCrop", "RandomHorizontalFlip", "ToDtype")
    assert {apart[name] for name in moves} == {"image by image, as it was sampled"}


# --- other datasets -----------------------------------------------------------------------------


class Scenes(Dataset):
    """Pictures and masks, as many write it: the transform gets both."""

    def __init__(self, root, transform, read=None):
        self.root = root / "voc" / "VOCdevkit" / "VOC2012"
        self.joint = transform
        self.read = read or (lambda path: Image.open(path).convert("RGB"))

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        image = self.read(self.root / "JPEGImages" / f"{index}.jpg")
        mask = Image.open(self.root / "SegmentationClass" / f"{index}.png")
        return self.joint(image, mask)


def by_hand(image, mask):
    """A function of torchvision's first functional module, with Python's random numbers."""
    size = random.randint(24, 90)
    image = v1.resize(image, size)
    mask = v1.resize(mask, size, interpolation=v1.InterpolationMode.NEAREST)
    if random.random() < 0.5:
        image, mask = v1.hflip(image), v1.hflip(mask)
    width, height = image.size
    if min(image.size) < 40:
        padding = (0, 0, max(40 - width, 0), max(40 - height, 0))
        image, mask = v1.pad(image, padding), v1.pad(mask, padding, fill=255)
    part = v2.RandomCrop.get_params(image, (40, 40))
    image, mask = v1.crop(image, *part), v1.crop(mask, *part)
    image = v1.normalize(v1.to_tensor(image), presets.references.MEAN, presets.STD)
    return image, torch.as_tensor(np.array(mask), dtype=torch.int64)


def seeded_by_hand(image, mask):
    seed = int(torch.randint(2**31, ()))
    random.seed(seed)
    with SeededDraws(seed):
        image, mask = by_hand(image, mask)
    return image, (mask, seed)


@pytest.mark.filterwarnings("ignore:The transform of the dataset samples from:UserWarning")
def test_a_function_of_a_picture_and_its_mask_moves(root):
    loader = DataLoader(Scenes(root, seeded_by_hand), 4)
    before = random.getstate()
    prefetcher = moved(loader, seed=1)
    assert random.getstate() == before
    raw = Scenes(root, lambda image, mask: (image, mask))
    seen = 0
    for images, (masks, seeds) in prefetcher:
        for image, mask, seed in zip(images, masks, seeds.tolist(), strict=True):
            random.seed(seed)
            with SeededDraws(seed):
                want, want_mask = by_hand(*raw[seen])
            assert torch.equal(mask, want_mask)
            assert (image - want).abs().max() <= LEVEL / min(presets.STD)
            seen += 1
    assert seen == COUNT


def assert_goes_on(prefetcher):
    """From a state after the first batch an epoch has the batches that it would have had."""
    batches = iter(prefetcher)
    next(batches)
    state = prefetcher.state_dict()
    rest = [*batches]
    prefetcher.load_state_dict(state)
    assert_equal([*prefetcher], rest)


def test_pythons_numbers_are_those_of_the_sample_in_a_worker(root):
    loader = DataLoader(Scenes(root, by_hand), 4, shuffle=True, num_workers=1)
    prefetcher = moved(loader, seed=1)
    assert_goes_on(prefetcher)


def test_pictures_that_were_read_as_tensors_move(root):
    """As in torchvision's tutorial: the dataset reads a tensor, and wraps it."""

    def transform(image, mask):
        assert isinstance(image, tv_tensors.Image)
        image, mask = v2.RandomHorizontalFlip(1.0)(image, tv_tensors.Mask(mask))
        return F.to_dtype(image, torch.float32, scale=True), mask

    def read(path):
        with Image.open(path) as image:
            return tv_tensors.Image(image)

    loader = presets.loader_of(Scenes(root, transform, read))
    prefetcher = moved(loader)
    assert prefetcher.decoding.startswith("the dataset, in the workers")
    for (images, masks), (want, want_masks) in zip(prefetcher, loader, strict=True):
        assert_equal(masks, want_masks)
        for one, other in zip(images, want, strict=True):
            assert (one - other).abs().max() <= 1e-6


def opposite(op):
    """A transform with a flip by PIL's own method before an op."""

    def transform(image, mask):
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        mask = mask.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return op(image), torch.as_tensor(np.array(mask))

    return transform


END = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
OPS = {
    "nothing": END,
    "levels": v2.PILToTensor(),
    "a resize": v2.Compose([v2.Resize((40, 50)), END]),
    "the nearest pixel": v2.Compose([v2.Resize((64, 64), v2.InterpolationMode.NEAREST), END]),
    "bicubic, and a part": v2.Compose(
        [v2.Resize(60, v2.InterpolationMode.BICUBIC), v2.CenterCrop((50, 77)), END]
    ),
    "a part that is resized": v2.Compose([v2.RandomResizedCrop(32, antialias=True), END]),
    "padding, then a resize": v2.Compose([v2.Pad((3, 5), fill=9), v2.Resize((30, 40)), END]),
    "two resizes": v2.Compose([v2.Resize(30), v2.Resize((40, 50)), END]),
    "colors after a resize": v2.Compose([v2.Resize((30, 40)), v2.ColorJitter(0.5), END]),
    "a rotation": v2.Compose([v2.RandomRotation(20), END]),
    "half precision": v2.Compose([END, v2.ToDtype(torch.half)]),
    "of PIL": v2.Lambda(lambda image: END(image.resize((50, 40)).crop((4, 3, 44, 35)))),
}


@pytest.mark.parametrize("name", OPS)
def test_what_is_done_to_a_picture_is_done_to_it(root, name):
    transform = opposite(OPS[name])
    loader = DataLoader(Subset(Scenes(root, transform), [0, 3]), 1)
    for seed in range(2):
        torch.manual_seed(seed)
        prefetcher = moved(loader)
        for (images, masks), (want, want_masks) in zip(prefetcher, loader, strict=True):
            assert torch.equal(masks, want_masks)
            assert images.dtype == want.dtype and images.shape == want.shape
            if name not in ("a part that is resized", "colors after a resize", "a rotation"):
                level = 1.01 if images.dtype == torch.uint8 else 2.1 / 255
                assert (images.float() - want.float()).abs().max() <= level


def by_position(image, mask):
    image = v1.rotate(v1.resize(img=image, size=[40, 50]), 180)
    image = v1.erase(v1.to_tensor(image), 2, 3, 5, 6, torch.zeros(1))
    return F.permute_channels(image, [2, 0, 1]), torch.as_tensor(np.array(mask))


FILLS = {tv_tensors.Image: (200, 2, 3), Image.Image: 90, torch.Tensor: 30, "others": 0}
SCALE = v2.ToDtype(torch.float32, scale=True)
MOVED = {
    "a fill for PIL images": v2.Compose([v2.Pad(5, fill=FILLS), END]),
    "a fill for Images": v2.Compose([v2.ToImage(), v2.Pad(5, fill=FILLS), SCALE]),
    "a fill for tensors": v2.Compose([v2.PILToTensor(), v2.Pad(5, fill=FILLS), SCALE]),
    "a fill in the corners": v2.Compose([v2.ToImage(), v2.RandomRotation((30, 30), fill=FILLS)]),
    "Normalize alone": v2.Compose([END, v2.Normalize([0.5], [1.0])]),
    "Normalize, then a flip": v2.Compose(
        [END, v2.Normalize([0.5] * 3, [1.0] * 3), v2.RandomHorizontalFlip(0.0)]
    ),
    "a fill for floats": v2.Compose([END, v2.Pad((0, 3, 4, 0), fill=0.5)]),
    "weak noise": v2.Compose([END, v2.GaussianNoise(sigma=1e-5)]),
}


@pytest.mark.parametrize("name", [*MOVED, "arguments by position and by name"])
def test_it_is_what_the_plain_loader_gives(root, name):
    def transform(image, mask):
        return MOVED[name](image), torch.as_tensor(np.array(mask))

    dataset = Scenes(root, transform if name in MOVED else by_position)
    loader = DataLoader(Subset(dataset, [0, 3]), 1)
    for (images, masks), (want, want_masks) in zip(moved(loader), loader, strict=True):
        assert torch.equal(masks, want_masks)
        level = 1.01 if want.dtype == torch.uint8 else 1.01 / 255
        assert (images.double() - want.double()).abs().max() <= level


def test_a_constant_that_no_trial_had_is_refused(root):
    def transform(image, mask):
        mean = 0.4 if image.width > image.height else 0.6  # the first picture is wide
        return F.normalize(END(image.resize((40, 40))), [mean] * 3, [0.5] * 3), torch.zeros(1)

    prefetcher = moved(DataLoader(Scenes(root, transform), 1))
    batches = iter(prefetcher)
    next(batches)
    with pytest.raises(ValueError, match=r"1\.jpg' what it did to no sample on trial"):
        next(batches)


def test_floats_that_are_not_scaled_move(root):
    pipeline = v2.Compose([v2.Resize((40, 50)), v2.ToImage(), v2.ToDtype(torch.float32)])

    def transform(image, mask):
        return pipeline(image), torch.as_tensor(np.array(mask))

    loader = DataLoader(Subset(Scenes(root, transform), [0, 3]), 1)
    for (images, _), (want, _) in zip(moved(loader), loader, strict=True):
        assert images.dtype == want.dtype == torch.float32
        assert want.max() > 100
        assert (images - want).abs().max() <= 1.01


class Named:
    def __init__(self, name):
        self.name = name
        self.weights = torch.tensor([float("nan"), 1.0])


def test_targets_may_be_anything(root):
    def transform(image, mask):
        return END(image), [Named("a"), float("nan"), np.array([np.nan, 1]), "b", None, {3}]

    loader = DataLoader(Scenes(root, transform), 4, collate_fn=presets.zipped)
    for _, targets in moved(loader):
        for named, *values in targets:
            assert named.name == "a" and values[2:] == ["b", None, {3}]


# --- in an epoch --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "workers"), [("lsj", 1), ("distort", 0)])
def test_an_epoch_goes_on_from_a_state(root, name, workers):
    dataset = Subset(coco(root, presets.detection(name)), range(8))
    loader = presets.loader_of(dataset, shuffle=True, num_workers=workers)
    prefetcher = moved(loader, seed=3)
    assert_goes_on(prefetcher)


def test_the_draws_are_those_of_seed_epoch_and_sample(root):
    dataset = coco(root, presets.detection("multiscale"))

    def epoch(prefetcher):
        samples = [pair for batch in prefetcher for pair in zip(*batch, strict=True)]
        return {target["image_id"]: (image, target) for image, target in samples}

    one = moved(presets.loader_of(dataset, batch_size=3), seed=3)
    other = moved(presets.loader_of(dataset, batch_size=5, num_workers=1, shuffle=True), seed=3)
    first, second = epoch(one), epoch(one)
    for number, sample in epoch(other).items():
        assert_equal(first[number], sample)
    assert any(first[n][0].shape != second[n][0].shape for n in first)


@pytest.mark.parametrize("name", ["lsj", "distort"])
def test_bad_files_take_their_targets_along(root, tmp_path, name):
    presets.write_coco(tmp_path / "coco", 4, SHAPES)
    file = tmp_path / "coco" / "2.png"
    for data in (b"none", file.read_bytes()[:300])[: 2 if name == "lsj" else 1]:
        loader = presets.loader_of(presets.coco(tmp_path / "coco", presets.detection(name)))
        good = moved(Subset_of(loader, [0, 1, 3]), seed=2)
        file.write_bytes(data)
        with pytest.raises(gpuprefetch.BadImageError, match=r"2\.png"):
            list(moved(loader))
        ((images, targets),) = moved(loader, on_error="skip", seed=2)
        assert [target["image_id"] for target in targets] == [0, 1, 3]
        ((want, want_targets),) = good
        for i in range(2):  # their numbers in the datasets are the same
            assert_equal([images[i], targets[i]], [want[i], want_targets[i]])
        (replaced,) = moved(loader, on_error="replace", seed=2)
        assert len(replaced[0]) == len(replaced[1]) == 4


def Subset_of(loader, indices):
    return presets.loader_of(Subset(loader.dataset, indices))


class Sized(Dataset):
    """Reads the size of a picture, and perhaps its mode, before it calls its transform."""

    def __init__(self, paths, transforms):
        self.paths = paths
        self.transforms = transforms

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        image = Image.open(self.paths[index])
        if image.mode != "RGB":
            image = image.convert("RGB")
        width, height = image.size
        boxes = torch.tensor([[0.0, 0.0, width / 2, height]])
        boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(height, width))
        return self.transforms(image, {"boxes": boxes, "index": index})


@pytest.mark.parametrize("data", [b"", b"none", encode_jpeg(draw(40, 60))[:200]])
def test_a_bad_file_has_a_size_before_its_transform(tmp_path, data):
    paths = [tmp_path / f"{i}.jpg" for i in range(4)]
    for path in paths:
        path.write_bytes(encode_jpeg(draw(40, 60)))
    paths[2].write_bytes(data)
    transform = v2.Compose([v2.RandomHorizontalFlip(), END])
    loader = presets.loader_of(Sized(paths, transform))
    ((images, targets),) = moved(loader, on_error="skip")
    assert len(images) == 3 and [target["index"] for target in targets] == [0, 1, 3]
    with pytest.raises(gpuprefetch.BadImageError, match=r"2\.jpg"):
        list(moved(loader))


def test_one_result_of_all_images_takes_their_column(tmp_path):
    paths = [tmp_path / f"{i}.jpg" for i in range(3)]
    for i, path in enumerate(paths):
        path.write_bytes(encode_jpeg(draw(40 + i, 60, seed=i)))

    def batch(collate, results, *ops):
        dataset = Sized(paths, v2.Compose([*ops, END]))
        loader = DataLoader(dataset, 3, collate_fn=collate)
        return next(iter(moved(loader, results=results)))

    def columns(samples):
        return {"images": [image for image, _ in samples], "targets": [t for _, t in samples]}

    listed, targets = batch(presets.zipped, None)
    for made in (batch(presets.zipped, "padded"), tuple(batch(columns, "padded").values())):
        (images, sizes), others = made
        assert images.shape == (3, 3, 64, 64) and sizes.tolist() == [[40, 60], [41, 60], [42, 60]]
        for place, image, one, other in zip(images, listed, targets, others, strict=True):
            assert torch.equal(place[:, : image.shape[1], :60], image)
            assert torch.equal(one["boxes"], other["boxes"])
    (patches, grid), _ = batch(presets.zipped, gpuprefetch.Patches(14), v2.Resize((28, 56)))
    assert grid.tolist() == [[1, 2, 4]] * 3 and len(patches) == 24
    wrong = {
        "calls stack": lambda samples: torch.stack([image for image, _ in samples]),
        r"uses \.shape": lambda samples: [image.shape for image, _ in samples],
        "another order": lambda samples: presets.zipped(samples[::-1]),
        "apart from the others": lambda samples: dict(enumerate(image for image, _ in samples)),
        "leaves the images out": lambda samples: [target for _, target in samples],
    }
    for what, collate in wrong.items():
        with pytest.raises(ValueError, match=what):
            batch(collate, "padded")


# --- what does not move -------------------------------------------------------------------------


def looks(image, mask):
    return END(image) * float(np.array(image).mean() > 100), torch.as_tensor(np.array(mask))


def sums(image, mask):
    image = END(image)
    return image - image.mean(), torch.as_tensor(np.array(mask))


def loses(image, mask):
    return END(image)


def stays(image, mask):
    return image, torch.as_tensor(np.array(mask))


def enhanced(image, mask):
    from PIL import ImageEnhance

    return END(ImageEnhance.Color(image).enhance(0.5)), torch.as_tensor(np.array(mask))


def told_apart(image, mask):
    """What it does depends on the kind of its picture."""
    flip = type(image) is Image.Image
    image = v1.hflip(image) if flip else image
    return END(image), torch.as_tensor(np.array(mask)) + flip


def filtered(image, mask):
    return END(v1.resize(image, [20, 20], v1.InterpolationMode.BOX)), torch.as_tensor(
        np.array(mask)
    )


def scaled(image, mask):
    return END(image) * 2 - 1, torch.as_tensor(np.array(mask))


def one_channel(image, mask):
    return v1.rgb_to_grayscale(v1.to_tensor(image)), torch.as_tensor(np.array(mask))


def turned(image, mask):
    return END(image.rotate(20)), torch.as_tensor(np.array(mask))


own = random.Random(0)


def from_its_own(image, mask):
    return END(image), torch.as_tensor(np.array(mask)) + own.randrange(100)


REFUSED = {
    filtered: "F.resize with the filter 'box', which is for PIL images, needs the pixels",
    scaled: "mul needs the pixels",
    one_channel: "makes one channel of three, unless num_output_channels=3",
    turned: r"what reads \.info needs the pixels",
    from_its_own: "it samples from a generator of its own",
    looks: "NumPy needs the pixels",
    sums: "mean needs the pixels",
    loses: "it gives a .* for 2 values",
    stays: r"it gives a PIL image.*add v2\.ToImage\(\)",
    enhanced: "needs the pixels",
    told_apart: "something else beside the picture",
}


@pytest.mark.parametrize("transform", REFUSED)
def test_what_needs_pixels_is_refused(root, transform):
    loader = DataLoader(Scenes(root, transform), 1)
    with pytest.raises(gpuprefetch.UnsupportedTransformError, match=REFUSED[transform]) as caught:
        moved(loader)
    assert "DataPrefetcher(loader) moves the batches" in str(caught.value)
    if transform not in (loses, stays):  # the advice works
        assert len([*gpuprefetch.DataPrefetcher(loader, device="cpu")]) == COUNT


def drawn_by_python(image, mask):
    return END(v1.hflip(image) if random.random() < 0.5 else image), np.array(mask)


def drawn_by_numpy(image, mask):
    return END(v1.hflip(image) if np.random.rand() < 0.5 else image), np.array(mask)


@pytest.mark.parametrize(
    ("transform", "whose"), [(drawn_by_python, "Python's random"), (drawn_by_numpy, "NumPy")]
)
def test_numbers_of_the_loop_are_told_of(root, transform, whose):
    dataset = Scenes(root, transform)
    with pytest.warns(UserWarning, match=rf"samples from {whose}.*num_workers=1"):
        moved(DataLoader(dataset, 4))
    moved(DataLoader(dataset, 4, num_workers=1))  # the advice: no warning


class Called(Scenes):
    """Calls its transform in another way than by position."""

    def __init__(self, root, transform, call):
        super().__init__(root, None)
        self.transform = transform
        self.call = [call]

    def __getitem__(self, index):
        self.joint = lambda image, mask: self.call[0](self.transform, image, mask)
        return super().__getitem__(index)


def test_another_way_to_call_a_transform_is_told_of(root):
    def dictionary(given):
        return {"image": END(given["image"]), "mask": torch.as_tensor(np.array(given["mask"]))}

    def pair(given):
        return tuple(dictionary({"image": given[0], "mask": given[1]}).values())

    def keywords(image, mask):
        return pair((image, mask))

    ways = {
        "one dict": (dictionary, lambda call, image, mask: call({"image": image, "mask": mask})),
        "one tuple": (pair, lambda call, image, mask: call((image, mask))),
        "by name: image, mask": (keywords, lambda call, image, mask: call(image=image, mask=mask)),
    }
    for what, (transform, call) in ways.items():
        loader = DataLoader(Called(root, transform, call), 1)
        with pytest.raises(gpuprefetch.UnsupportedTransformError, match=what) as caught:
            moved(loader)
        assert "image, mask = self.transform(image, mask)" in str(caught.value)
    loader = DataLoader(Called(root, keywords, lambda call, image, mask: call(image, mask)), 1)
    assert len([*moved(loader)]) == COUNT


def rare(image, mask):
    if v1.get_image_size(image) == [50, 75]:  # another than the first one
        image = v1.adjust_brightness(image, 0.5)
    return END(image), torch.as_tensor(np.array(mask))


def test_what_no_trial_has_shown_is_an_error_of_its_sample(root):
    prefetcher = moved(DataLoader(Scenes(root, rare), 1, collate_fn=presets.zipped))
    with pytest.raises(ValueError, match=r"1\.jpg' what it did to no sample on trial"):
        list(prefetcher)


class Counted(Scenes):
    def __getitem__(self, index):
        image, mask = super().__getitem__(index)
        return image, mask.sum()


def test_what_the_transform_promised_is_not_there_yet(root):
    transform = opposite(END)
    with pytest.raises(TypeError, match=r"is used in __getitem__, by \.sum, .*Put that into"):
        moved(DataLoader(Counted(root, transform), 1))
    for use in (lambda mask: mask == 3, lambda mask: mask + 1, str, np.array, bool, hash):

        class Using(Scenes):
            def __getitem__(self, index, use=use):
                image, mask = super().__getitem__(index)
                return image, use(mask)

        with pytest.raises(TypeError, match="what the transform gave beside the image is used"):
            moved(DataLoader(Using(root, transform), 1))
    fixed = Scenes(root, lambda image, mask: (END(image), torch.as_tensor(np.array(mask)).sum()))
    assert len([*moved(DataLoader(fixed, 1, collate_fn=presets.zipped))]) == COUNT


def test_a_preview_shows_it_and_parity_says_why_not(root):
    loader = DataLoader(presets.voc(root / "voc", presets.segmentation("train")), 4)
    assert moved(loader).preview(2) is not None
    with pytest.raises(TypeError, match=r"explain\(loader\) says where each op runs"):
        gpuprefetch.parity(loader, 4, device="cpu")
    assert "PadIfSmaller" in gpuprefetch.explain(loader)


def test_boxes_for_the_picture_as_exif_turns_it_are_refused(tmp_path):
    presets.write_coco(tmp_path / "coco", 2, [(40, 60)])
    data = encode_jpeg(draw(40, 60, seed=1), orientation=6, quality=95)
    (tmp_path / "coco" / "0.png").write_bytes(data)
    loader = presets.loader_of(presets.coco(tmp_path / "coco", presets.detection("hflip")))
    with pytest.raises(ValueError, match=r"has 60 x 40.*leave apply_exif=True out"):
        list(moved(loader, apply_exif=True))
    assert len([*moved(loader)]) == 1


@pytest.mark.filterwarnings("ignore:The transform of the dataset samples from:UserWarning")
def test_functions_of_torchvision_are_as_before(root):
    before = v1.hflip, v1.pad, F.to_image, v2.ToDtype.transform
    list(moved(DataLoader(Scenes(root, by_hand), 4)))
    assert (v1.hflip, v1.pad, F.to_image, v2.ToDtype.transform) == before


@pytest.mark.gpu
def test_a_gpu_makes_the_same(root):
    for name in ("multiscale", "ssd"):
        loader = presets.loader_of(coco(root, presets.detection(name)), num_workers=2)
        for (got, targets), (want, want_targets) in zip(
            moved(loader, device="cuda", seed=0), moved(loader, seed=0), strict=True
        ):
            for one, other in zip(targets, want_targets, strict=True):
                for key in ("boxes", "labels", "masks"):
                    assert one[key].is_cuda and torch.equal(one[key].cpu(), other[key])
            for one, other in zip(got, want, strict=True):
                assert one.is_cuda and one.shape == other.shape
                assert ((one.cpu() - other).abs() <= 3.1 / 255).float().mean() >= 0.98
