"""Random policies per image: drawn as torchvision and timm draw, repeatable, and on any loader."""

import copy
import pickle
import random
import re

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from pictures import draw, encode
from PIL import ImageOps
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DataLoader, TensorDataset
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.ops import masks_to_boxes
from torchvision.transforms import InterpolationMode, v2

import gpuprefetch
from gpuprefetch import DataPrefetcher, PerImage, UnsupportedTransformError
from gpuprefetch.policies.compile import compiled
from gpuprefetch.policies.ops import ARGS, Op
from gpuprefetch.policies.policy import Policy
from gpuprefetch.policies.slots import Picture
from gpuprefetch.transforms.random import SeededDraws

BILINEAR, BICUBIC = InterpolationMode.BILINEAR, InterpolationMode.BICUBIC
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIDE = 12
pytestmark = pytest.mark.usefixtures("one_thread")
HIGH = 9
PICTURE = torch.from_numpy(draw(HIGH, SIDE, seed=3)).permute(2, 0, 1)


def same(count, image=PICTURE):
    return image.expand(count, -1, -1, -1).contiguous()


def different(images):
    return len({image.numpy().tobytes() for image in images})


def timms(config, transforms=None, **hparams):
    augment = pytest.importorskip("timm.data.auto_augment")
    kinds = {"rand": augment.rand_augment_transform, "augmix": augment.augment_and_mix_transform}
    make = kinds.get(config.split("-")[0], augment.auto_augment_transform)
    hparams |= {"translate_const": 5, "img_mean": (9, 90, 200)}
    op = make(config, hparams)
    if transforms:  # of one magnitude two of them could be exchanged
        each = [(name, 1.0, 8 + number % 5) for number, name in enumerate(transforms)]
        op.ops = [augment.AugmentOp(*arguments, hparams) for arguments in each]
    policies = getattr(op, "policy", None) or [op.ops]
    for each in (each for policy in policies for each in policy if "Posterize" in each.name):
        each.aug_fn = posterize
    return op


def posterize(image, bits, **_):
    """As timm's; Pillow refuses the 0 bits that it has now and then."""
    return ImageOps.posterize(image, bits) if bits else image.point(lambda level: 0)


INVERT, SOLARIZE = v2.RandomInvert(1.0), v2.RandomSolarize(99, 1.0)
MAYBE_INVERT = v2.RandomInvert(0.5)
SWITCHES = [v2.RandomEqualize(0.3), v2.RandomPosterize(2, 0.3), v2.RandomAutocontrast(0.3)]
SWITCHES += [v2.RandomGrayscale(0.3), v2.RandomAdjustSharpness(3, 0.3)]
POLICIES = {
    "RandAugment": lambda: v2.RandAugment(),
    "RandAugment, fill": lambda: v2.RandAugment(3, 15, interpolation=BILINEAR, fill=[1, 99, 200]),
    "TrivialAugmentWide": lambda: v2.TrivialAugmentWide(),
    "AugMix": lambda: v2.AugMix(),
    "AugMix, few": lambda: v2.AugMix(7, 2, 2, all_ops=False),
    "AugMix, between": lambda: v2.Compose([MAYBE_INVERT, v2.AugMix(5, 3, 1), MAYBE_INVERT]),
    "ColorJitter": lambda: v2.ColorJitter(0.4, 0.4, 0.4, 0.2),
    "RandomPhotometricDistort": lambda: v2.RandomPhotometricDistort(),
    "GaussianBlur": lambda: v2.GaussianBlur((3, 5), (0.1, 3.0)),
    "RandomChannelPermutation": lambda: v2.RandomChannelPermutation(),
    "RandomRotation": lambda: v1.RandomRotation((-20, 70), fill=50),
    "RandomAffine": lambda: v2.RandomAffine(30, (0.3, 0.1), (0.7, 1.3), (-9, 20, -5, 5), BILINEAR),
    "RandomPerspective": lambda: v2.RandomPerspective(0.6, 0.7),
    "RandomErasing": lambda: v2.RandomErasing(0.7, value=[9, 99, 199]),
    "RandomErasing, noise": lambda: v2.RandomErasing(0.7, (0.1, 0.6), value="random"),
    "RandomApply": lambda: v2.RandomApply([v1.ColorJitter(0.5), v2.RandomVerticalFlip()], 0.6),
    "RandomChoice": lambda: v2.RandomChoice([INVERT, v2.RandAugment(), v2.Identity()], [3, 2, 1]),
    "RandomOrder": lambda: v2.RandomOrder([INVERT, SOLARIZE, v2.RandomHorizontalFlip()]),
    "switches": lambda: v2.Compose(SWITCHES),
    "timm rand": lambda: timms("rand-m9-mstd0.5-inc1"),
    "timm rand, uniform": lambda: timms("rand-m14-n3-mstd101-mmax20"),
    "timm rand, weights": lambda: timms("rand-tweights", interpolation=BILINEAR_OF_PIL),
    "timm originalr": lambda: timms("originalr-mstd1"),
    "timm augmix": lambda: timms("augmix-m5-w2"),
    "timm augmix, one chain": lambda: timms("augmix-w1-d1-mstd0", ["Invert", "Sharpness"]),
    "timm augmix, any depth": lambda: timms("augmix-w1-mstd0", ["Brightness"]),
}
BILINEAR_OF_PIL, BICUBIC_OF_PIL = 2, 3
COLORS_OF_TIMM = ("Color", "Contrast", "Brightness", "Sharpness", "Posterize", "Solarize")
OPS_OF_TIMM = "AutoContrast Equalize Invert Rotate ShearX ShearY TranslateXRel TranslateYRel"
OPS_OF_TIMM = [*OPS_OF_TIMM.split(), "SolarizeAdd", "Desaturate", "PosterizeOriginal"]
OPS_OF_TIMM += [name + kind for name in COLORS_OF_TIMM for kind in ("", "Increasing")]
# They make few pictures of one, each of which is to be as frequent as the original makes it.
FEW = {
    "ColorJitter, any order": lambda: v2.ColorJitter((2.5, 2.5), (0.3, 0.3), (0, 0), (0.2, 0.2)),
    "RandomPhotometricDistort, always": lambda: v2.RandomPhotometricDistort(
        (0.6, 0.6), (3, 3), (2, 2), (0.2, 0.2), p=1
    ),
    "places": lambda: v2.RandomChoice(
        [
            v2.RandomErasing(1, (0.3, 0.3), (2, 2), value=7),
            v2.RandomErasing(1, (1, 1), (HIGH / SIDE, HIGH / SIDE)),  # none is smaller than that
            v2.RandomAffine((20, 20), None, (0.8, 0.8), (15, 15, -5, -5), BILINEAR, 99, (2, 3)),
        ]
    ),
    "AutoAugment": lambda: v2.AutoAugment(),
    "AutoAugment, CIFAR10": lambda: v1.AutoAugment(v1.AutoAugmentPolicy.CIFAR10),
    "RandAugment, one": lambda: v2.RandAugment(1),
    "TrivialAugmentWide, 5": lambda: v2.TrivialAugmentWide(5, BILINEAR, [1, 99, 200]),
    "timm ops": lambda: timms("rand-n1-mmax20", OPS_OF_TIMM, interpolation=BICUBIC_OF_PIL),
    "timm v0": lambda: timms("v0", interpolation=BILINEAR_OF_PIL),
    "timm weights": lambda: timms("rand-n1-m8-tweights", interpolation=BILINEAR_OF_PIL),
}
# Of some the distribution of another op, which must be seen.
OTHERS = {
    "RandAugment": lambda: v2.RandAugment(2, 20),
    "RandomApply": lambda: v2.RandomApply([v2.ColorJitter(0.5), v2.RandomVerticalFlip()], 0.3),
    "RandomRotation": lambda: v2.RandomRotation((-20, 40), fill=50),
    "RandomOrder": lambda: v2.Compose([INVERT, SOLARIZE, v2.RandomHorizontalFlip()]),
    "AugMix, few": lambda: v2.AugMix(3, 2, 2, all_ops=False),
    "timm augmix, one chain": lambda: timms("augmix-w2-d1-mstd0", ["Invert", "Sharpness"]),
    "timm augmix, any depth": lambda: timms("augmix-w1-d3-mstd0", ["Brightness"]),
    "RandAugment, one": lambda: v2.RandAugment(1, 10),
    "TrivialAugmentWide, 5": lambda: v2.TrivialAugmentWide(5, BILINEAR, [1, 99, 100]),
    "timm ops": lambda: timms("rand-n1", OPS_OF_TIMM, interpolation=BICUBIC_OF_PIL),
}
COUNT = 400
# The Kolmogorov-Smirnov distance of two samples of 400 is above it with a chance of 1 in 50,000.
FARTHEST = 0.17


def statistics(images):
    """``(4, N)``: mean, deviation, distance from the picture, and where on x it is bright."""
    images, picture = images.double(), PICTURE.double()
    columns = images.mean((1, 2)) + 1
    center = (columns * torch.arange(SIDE)).sum(1) / columns.sum(1)
    mean, deviation = images.mean((1, 2, 3)), images.std((1, 2, 3))
    return torch.stack([mean, deviation, (images - picture).abs().mean((1, 2, 3)), center])


def distances(ours, theirs):
    """Of each statistic that of Kolmogorov and Smirnov; values within 0.6 levels are one."""
    found = []
    for a, b in zip(statistics(ours), statistics(theirs), strict=True):
        step = 0.6 if len(found) < 3 else 0.05
        a, b = (a / step).round(), (b / step).round()
        grid = torch.cat([a, b]).unique()
        below = [torch.searchsorted(x.sort().values, grid, right=True) / len(x) for x in (a, b)]
        found.append(float((below[0] - below[1]).abs().max()))
    return found


def surprise(ours, theirs, *, within=3):
    """How far two counts of each picture are from one chance, in standard deviations.

    Of the one that is farthest, or of all by chi-squared. Pictures that differ by less levels than
    ``within``, on the average, count as one.
    """
    every = torch.cat([ours, theirs]).flatten(1).double()
    pictures, numbers = every.unique(dim=0, return_inverse=True)
    alike = torch.cdist(pictures, pictures, p=1) < within * every.shape[1]
    kinds = alike.int().argmax(1)[numbers].unique(return_inverse=True)[1]
    a, b = (torch.bincount(half, minlength=int(kinds.max()) + 1) for half in kinds.chunk(2))
    squares = (a - b) ** 2 / (a + b)
    return max(float((squares - 1).sum() / (2 * len(a)) ** 0.5), float(squares.max() ** 0.5))


def theirs(op, count=COUNT, image=PICTURE):
    """Draws of torchvision's or timm's own, one image at a time."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    if type(op).__module__.startswith("timm."):
        picture = v2.functional.to_pil_image(image)
        try:
            made = [op(picture) for _ in range(count)]
        except ValueError as error:
            if "broadcast" in str(error):
                pytest.skip("AugMix of this version of timm is for square pictures")
            raise
        return torch.stack([v2.functional.pil_to_tensor(each) for each in made])
    return torch.stack([op(image) for _ in range(count)])


@pytest.mark.parametrize("name", POLICIES)
def test_its_distribution_is_the_original_ones(name):
    op = POLICIES[name]()
    ours, expected = PerImage(op, seed=0)(same(COUNT)), theirs(op)
    assert ours.dtype == torch.uint8 and ours.shape == expected.shape
    assert max(distances(ours, expected)) < FARTHEST, name
    if name in OTHERS:  # guards the test itself
        other = PerImage(OTHERS[name](), seed=0)(same(COUNT))
        assert max(distances(other, expected)) > FARTHEST


@pytest.mark.parametrize("name", FEW)
def test_its_pictures_are_as_frequent_as_the_original_ones(name):
    few = 400 if name.startswith(("ColorJitter", "RandomPhotometric")) else 600  # which are slow
    op, images = FEW[name](), same(few)
    expected = theirs(op, few)
    assert surprise(PerImage(op, seed=0)(images), expected) < 5
    if name in OTHERS:  # guards the test itself
        assert surprise(PerImage(OTHERS[name](), seed=0)(images), expected) > 5


def test_augmix_weighs_as_timm_does():
    op = timms("augmix-w2-d1-mstd0", ["Invert", "Posterize"])
    black, count = torch.zeros(3, 1, 1, dtype=torch.uint8), 1500
    expected = theirs(op, count, black).float()
    found = PerImage(op, seed=0)(same(count, black)).float()
    assert (found.sort(0).values - expected.sort(0).values).abs().mean() < 5
    op = timms("augmix-w1-d1-mstd0", ["Invert"])
    assert PerImage([op, op], seed=0)(same(99, black)).max() > 140  # 127 where both draw alike


def test_timm_draws_a_filter():
    def of(**kind):
        return PerImage(timms("rand-n1", ["Rotate", "ShearX"], **kind), seed=0)(same(COUNT))

    bilinear, bicubic = (of(interpolation=kind) for kind in (BILINEAR_OF_PIL, BICUBIC_OF_PIL))
    half = torch.cat([bilinear, bicubic])[::2]
    assert surprise(of(), half, within=1) < 5
    assert surprise(bilinear, half, within=1) > 5


@pytest.mark.gpu
@pytest.mark.parametrize("name", POLICIES | FEW)
def test_the_gpu_gives_what_the_cpu_gives(name):
    images = torch.from_numpy(np.stack([draw(50, 41, seed=i) for i in range(32)]))
    images = images.permute(0, 3, 1, 2).contiguous()
    make = (POLICIES | FEW)[name]
    want = PerImage(make(), seed=0)(images).float()
    got = PerImage(make(), seed=0)(images.cuda()).cpu().float()
    # A level apart in one slot, two pixels equally near, or what equalize makes of that.
    assert ((got - want).abs() > 2).float().mean() < 0.02


STRONG = [v2.RandAugment(3), v2.ColorJitter(0.4, 0.4, 0.4, 0.1), v2.AugMix()]
STRONG += [v2.RandomAffine(45, (0.2, 0.2), (0.5, 1.5)), v2.RandomErasing(1.0, value="random")]


@pytest.mark.parametrize("op", STRONG, ids=lambda op: type(op).__name__)
def test_every_image_draws_for_itself(op):
    images = same(16)
    torch.manual_seed(0)
    assert different(PerImage(op)(images)) >= 14
    assert torch.equal(images, same(16))
    # guards the test itself: torchvision draws once for a batch
    assert different(op(images)) < 14 or type(op) is v2.AugMix


def test_erased_boxes_have_log_uniform_aspect_ratios():
    op = v2.RandomErasing(1.0, (0.02, 0.02), (1 / 6, 6.0), value=1.0)  # which fits at the first try
    made = PerImage(op, seed=4)(torch.zeros(1200, 1, 90, 90))
    height, width = (made.amax((1, axis)).sum(1) for axis in (3, 2))
    place = ((height / width).log() / np.log(6) + 1) / 2
    histogram = (place.clamp(0, 0.999) * 4).int().bincount(minlength=4)
    assert (histogram - 300).abs().max() < 5 * 300**0.5


def test_draws_come_from_torchs_generator_or_from_a_seed():
    images, op = same(8), v2.TrivialAugmentWide()
    free = PerImage(op)
    torch.manual_seed(5)
    first, second = free(images), free(images)
    torch.manual_seed(5)
    assert torch.equal(free(images), first) and not torch.equal(first, second)
    with SeededDraws(7):
        keyed = free(images)
    torch.manual_seed(0)
    with SeededDraws(7):
        assert torch.equal(free(images), keyed)

    seeded = PerImage(op, seed=3)
    state = torch.get_rng_state()
    one, two = seeded(images), seeded(images)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(PerImage(op, seed=3)(images), one) and not torch.equal(one, two)
    assert torch.equal(PerImage(op, seed=3)(images[:5]), one[:5])
    resumed = PerImage(op, seed=3)
    resumed.load_state_dict({"_extra_state": {"calls": 1}})
    assert torch.equal(resumed(images), two)
    assert seeded.state_dict() == {"_extra_state": {"calls": 2}}
    for copied in (copy.deepcopy(resumed), pickle.loads(pickle.dumps(resumed))):
        assert torch.equal(copied(images), seeded(images))
        seeded.calls = 2


@pytest.mark.forks("its collate function is local")
def test_a_seed_gives_the_workers_of_a_loader_draws_of_their_own():
    augment = PerImage(v2.RandomRotation(180), seed=3)
    loader = DataLoader(same(8), num_workers=2, collate_fn=lambda images: augment(images[0][None]))
    # Half of 16 where both workers draw alike, and in each epoch.
    assert different(batch for _ in range(2) for batch in loader) > 12


def test_a_pickled_one_draws_the_same():
    for make in (POLICIES | FEW).values():
        augment = PerImage(make(), seed=1)
        copied = pickle.loads(pickle.dumps(augment))
        assert torch.equal(copied(same(3)), augment(same(3)))


def test_floats_normalize_and_erasing_in_one_program():
    ops = [v2.RandomHorizontalFlip(1.0), v2.ToDtype(torch.float32, scale=True)]
    ops += [v2.Normalize(MEAN, STD), v2.RandomErasing(1.0, value=0.25)]
    result = PerImage(v2.Compose(ops), seed=0)(same(4))
    want = v2.functional.normalize(PICTURE.flip(-1) / 255, MEAN, STD)
    erased = result == 0.25
    assert result.dtype == torch.float32 and erased.any((1, 2, 3)).all()
    torch.testing.assert_close(torch.where(erased, want, result), want.expand(4, -1, -1, -1))
    floats = PerImage(v2.RandomSolarize(0.5, 1.0))(same(2) / 255)
    torch.testing.assert_close(floats[0], v2.functional.solarize(PICTURE / 255, 0.5))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_a_conversion_to_float32_is_torchvisions(dtype):
    images, convert = v2.functional.to_dtype(same(2), dtype, True), v2.ToDtype(torch.float32, True)
    for ops in ([convert, INVERT], [INVERT, convert], [INVERT, convert, v2.Normalize(MEAN, STD)]):
        want = v2.Compose(ops)(images)
        torch.testing.assert_close(PerImage(ops)(images), want, atol=2e-3, rtol=0)


def test_ops_after_a_conversion_are_those_on_floats():
    convert, images = v2.ToDtype(torch.float32, True), same(8)
    ops = [v2.ColorJitter(0.5, 0.5, 0.5, 0.2), v2.RandomRotation(30), v2.Normalize(MEAN, STD)]
    want = PerImage(ops, seed=3)(convert(images))
    assert torch.equal(PerImage([convert, *ops], seed=3)(images), want)


@pytest.mark.parametrize("channels", [1, 3])
def test_an_empty_batch_and_gray_images(channels):
    augment = PerImage([v2.RandAugment(), v2.ColorJitter(0.1, 0.1, 0.5, 0.3), v2.AugMix()])
    for count in (0, 3):
        images = same(count)[:, :channels]
        assert augment(images).shape == images.shape
    gray = same(3)[:, :1]
    assert torch.equal(PerImage(v2.ColorJitter(0, 0, 0.5, 0.3))(gray), gray)
    widened = PerImage([v2.RandomInvert(1.0), v2.Grayscale(3)])(gray)
    assert widened.shape == (3, 3, HIGH, SIDE)
    torch.testing.assert_close(widened, 255 - gray.expand(-1, 3, -1, -1), atol=1, rtol=0)


def test_slots_take_the_numbers_of_the_docstring():
    made = compiled(v2.RandomApply([v2.ColorJitter(0.5, 0.5), v2.RandomInvert()], 0.3))
    assert (made.size, made.numbers) == (3, 8)
    numbers = np.array([[0.2, 0.9, 0.1, 0.0, 0.5, 0.0, 0.0, 0.4], [0.3, *[0.0] * 7]]).T
    codes, args = np.zeros((2, 3), np.int32), np.zeros((2, 3, ARGS))
    made.sample(numbers, Picture(HIGH, SIDE), codes, args)
    # Contrast comes first, as its number is lower; the second image goes through none.
    assert codes.tolist() == [[Op.CONTRAST, Op.BRIGHTNESS, Op.INVERT], [Op.IDENTITY] * 3]
    assert args[0, :2, 0].tolist() == [0.5, 1.0]


def policy_of(transform) -> Policy:
    return PerImage(transform)


def test_a_policy_gives_on_the_device_and_one_by_one_what_it_sampled():
    policy, images = policy_of(v2.RandomHorizontalFlip(0.5)), same(8)
    programs = policy.drawn(np.arange(8, dtype=np.uint64), images.to("meta"))
    result = policy.carry_out(images, programs)
    assert different(result) == 2
    for row, image in enumerate(result):
        assert torch.equal(policy.carry_out_one(images[row], programs, row), image)
    assert [layout.n_slots for layout in policy.lay_out(images.to("meta"), programs)] == [1]


# --- on any loader ---


def test_after_a_plain_loader_and_in_a_compiled_step():
    loader = DataLoader([PICTURE / 255] * 8, batch_size=4)
    augment = PerImage([v2.RandomRotation(90, fill=0.5), v2.Normalize(MEAN, STD)], seed=0)
    model = torch.nn.Conv2d(3, 1, 3)

    def step(images):
        return model(augment(images)).mean()

    once = torch.compile(step, backend="eager")
    losses = [once(images).item() for images in loader]
    augment.calls = 0
    assert losses == pytest.approx([step(images).item() for images in loader])
    assert losses[0] != losses[1]


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_run_of_policies_and_normalize_in_a_list_is_one_program(dtype):
    ops = [v2.RandomHorizontalFlip(), v2.RandAugment(), K.Normalize(MEAN, STD)]
    ops.append(v2.RandomErasing(0.5))
    form = {"dtype": dtype, "memory_format": torch.channels_last}
    loader, again = (batches(0, ops, **form) for _ in range(2))
    alike = (loader, again, copy.deepcopy(loader))
    images, *others = (torch.cat([images for images, _ in every(one)]) for one in alike)
    assert images.dtype == (dtype or torch.float32) and images.shape[1:] == (3, 16, 16)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(images, other) and other.dtype == images.dtype for other in others)
    text = gpuprefetch.explain(loader)
    assert "RandAugment, Normalize, RandomErasing" in text and "one program of 3 slots" in text
    single = gpuprefetch.explain([gpuprefetch.Resize((16, 16)), v2.RandomInvert()])
    assert "one program of 1 slot, " in single
    slow = [gpuprefetch.Resize((16, 16)), v2.GaussianNoise()]
    assert "image by image" in gpuprefetch.explain(slow)


def test_a_list_that_ends_in_uint8_keeps_its_layout():
    ops = gpuprefetch.convert_transforms([v2.CenterCrop(16), v2.RandAugment(), v2.PILToTensor()])
    form, loader = {"memory_format": torch.channels_last}, DataLoader(pictures(6), 3)
    (images, _), *_ = DataPrefetcher(loader, transforms=ops, device="cpu", **form)
    assert images.dtype == torch.uint8
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_the_fused_launch_gives_levels_only_where_an_op_does_the_same_on_them():
    head = gpuprefetch.Resize((9, 10))

    def run(*ops):
        return next(iter(DataPrefetcher([same(3)], transforms=[head, *ops], device="cpu")))

    plain = run()
    assert (plain * 255 - (plain * 255).round()).abs().max() > 0.1
    torch.testing.assert_close(run(v2.RandomInvert(1.0)), 1 - plain, atol=0.502 / 255, rtol=0)
    want = v2.functional.solarize(plain, 0.5)
    torch.testing.assert_close(run(v2.RandomSolarize(0.5, 1.0)), want)
    torch.testing.assert_close(run(v2.RandomHorizontalFlip(1.0)), plain.flip(-1))
    tensors = DataPrefetcher([plain], transforms=[head, v2.RandomInvert(1.0)], device="cpu")
    torch.testing.assert_close(next(iter(tensors)), 1 - plain)


def boxed():
    """A white square on black with its box and mask, beside a label."""
    picture = np.zeros((40, 40, 3), dtype=np.uint8)
    picture[8:20, 10:26] = 255
    box = tv_tensors.BoundingBoxes([[10, 8, 26, 20]], format="XYXY", canvas_size=(40, 40))
    mask = tv_tensors.Mask(torch.from_numpy(picture[:, :, 0] // 255))
    for number in range(6):
        image = gpuprefetch.EncodedImage(encode(picture, "PNG"), number)
        yield image, {"boxes": box, "mask": mask, "label": torch.tensor(number)}


def in_lists(samples):
    """A loader of all samples in one batch, a tuple of images and one of targets."""
    return DataLoader([*samples], 9, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))


@pytest.mark.parametrize(
    "op",
    [
        v2.TrivialAugmentWide(),
        v2.RandomApply([v2.RandomHorizontalFlip(1.0), v2.RandomErasing(1.0, (0.02, 0.03))], 0.5),
        v2.Compose([v2.RandomVerticalFlip(), v2.RandomPerspective(0.3, 1.0)]),
    ],
    ids=["policy", "apply", "compose"],
)
def test_boxes_and_masks_follow(op):
    ops = [gpuprefetch.Resize((40, 40)), op]
    loader = DataPrefetcher(in_lists(boxed()), transforms=ops, device="cpu", seed=6)
    ((images, targets),) = loader
    moved = 0
    for number, (image, target) in enumerate(zip(images, targets, strict=True)):
        mask, box = target["mask"], target["boxes"][0]
        assert target["label"] == number
        around = masks_to_boxes(mask[None])[0] + torch.tensor([0, 0, 1, 1])
        assert (box - around).abs().max() <= 2.5
        moved += box.tolist() != [10, 8, 26, 20]
        bright = (image.mean(0) > 0.5).float()
        alike = [(bright != other).float().mean() for other in (mask, 1 - mask)]  # inverted by some
        assert min(alike) < 0.08
    assert moved


def test_augmix_and_masks_is_refused():
    mask = tv_tensors.Mask(torch.zeros(24, 30))
    loader = in_lists((image, {"mask": mask}) for image, _ in pictures(2))
    transforms = [gpuprefetch.Resize((24, 30)), v2.AugMix()]
    with pytest.raises(ValueError, match=r"AugMix mixes .* cannot follow"):
        next(iter(DataPrefetcher(loader, transforms=transforms, device="cpu")))


@pytest.mark.parametrize("before", [[], [v2.RandomInvert(0.5)]])
def test_a_seed_of_its_own_holds_in_a_list(before):
    augment = PerImage(v2.RandAugment(), seed=3)
    loader = DataPrefetcher(
        [same(3)] * 2, transforms=[gpuprefetch.Resize((HIGH, SIDE)), *before, augment], device="cpu"
    )
    assert len(list(loader)) == augment.calls == 2


# --- what it does not take ---


FLOATS = [v2.RandAugment(), v2.ToDtype(torch.float32, scale=True)]


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (v2.RandomResizedCrop(9), "no form of RandomResizedCrop .* image by image"),
        (v2.RandomAffine(9, interpolation=BICUBIC), "no form of RandomAffine"),
        (v2.RandomRotation(9, expand=True), "no form of RandomRotation"),
        (v2.AugMix(alpha=0.4), "no form of AugMix"),
        (v2.RandomApply([v2.GaussianNoise()]), "no form of RandomApply"),
        (v2.RandomApply([v2.AugMix()]), "no form of RandomApply"),
        (type("Mine", (v2.RandAugment,), {})(), "no form of Mine"),
        (lambda images: images, "no form of function"),
        ([v2.Normalize(MEAN, STD), v2.RandAugment()], "RandAugment comes after Normalize"),
        ([v2.Normalize(MEAN, STD), v2.ToDtype(torch.float32, scale=True)], "ToDtype .* after Norm"),
        ([v2.RandAugment(), v2.ToDtype(torch.float32)], "no form of ToDtype"),
        ([v2.RandAugment(), v2.ToDtype(torch.float16, scale=True)], "no form of ToDtype"),
        ([v2.Normalize(MEAN, STD)] * 2, "no form of Normalize .* after Normalize"),
        ([*FLOATS, v2.RandomErasing(), v2.Normalize(MEAN, STD)], "no form of Normalize"),
    ],
)
def test_a_transform_without_such_a_form_is_refused(op, text):
    with pytest.raises(UnsupportedTransformError, match=text):
        PerImage(op)


@pytest.mark.parametrize("make", [lambda: v2.RandAugment(0), lambda: timms("rand-n0")])
def test_a_policy_of_no_ops_leaves_images_as_they_are(make):
    assert torch.equal(PerImage(make(), seed=0)(same(8)), same(8))


@pytest.mark.parametrize("config", ["rand-m9", "v0", "augmix"])
def test_timms_nearest_pixel_is_not_taken_for_bilinear(config):
    op = timms(config, interpolation=0)
    with pytest.raises(UnsupportedTransformError, match=f"no form of {type(op).__name__}"):
        PerImage(op)
    with pytest.raises(UnsupportedTransformError, match="draws PIL's filter 0"):
        gpuprefetch.convert_transforms([v2.RandomResizedCrop(9), op, v2.PILToTensor()])


@pytest.mark.parametrize(
    ("images", "text"),
    [
        ([PICTURE], "tensor .* got list"),
        (PICTURE, r"got torch.uint8 \(3, 9, 12\). Add a dimension"),
        (same(2).permute(0, 2, 3, 1), r"1 or 3 channels.*permute\(0, 3, 1, 2\)"),
        (same(2)[:, :, None], r"got torch.uint8 \(2, 3, 1, 9, 12\)"),
        (same(2).int(), r"uint8 or floating point.*images\.to\(torch\.uint8\)"),
        (same(2).repeat(1, 2, 1, 1), r"For other channels .*K\.RandomHorizontalFlip\(\)"),
        ((same(2) / 255).requires_grad_(), "no gradient"),
    ],
)
def test_images_that_it_does_not_take(images, text):
    with pytest.raises(TypeError, match=text):
        PerImage(v2.RandAugment())(images)


def test_the_advice_for_other_channels_works():
    pixels = torch.rand(4, 5, 8, 8)
    batches = DataLoader(TensorDataset(pixels), batch_size=4)
    with pytest.raises(TypeError, match="For other channels") as raised:
        next(iter(DataPrefetcher(batches, device="cpu", transforms=[v2.RandomVerticalFlip(1.0)])))
    function = re.search(r"(lambda images: .*)\.$", str(raised.value))[1]
    names = {"op": v2.RandomVerticalFlip(1.0), "torch": torch}
    for flip in (K.RandomVerticalFlip(p=1.0), eval(function, names)):
        ((got,),) = DataPrefetcher(batches, device="cpu", transforms=[flip])
        assert torch.equal(got, pixels.flip(-2))


def test_images_that_an_op_does_not_take():
    with pytest.raises(TypeError, match="Normalize takes floating point, and "):
        PerImage([v2.RandomInvert(), v2.Normalize(MEAN, STD)])(same(2))
    with pytest.raises(ValueError, match="images of 3 channels, and these have 1"):
        PerImage(v2.RandomErasing(1.0, value=[0.0, 1.0, 2.0]))(same(2)[:, :1])


def pictures(count):
    return [
        (gpuprefetch.EncodedImage(encode(draw(24, 30, seed=i), "PNG"), i), i) for i in range(count)
    ]


# --- in the workers of a list, which also run it on the CPU ---

POLICY = [v2.TrivialAugmentWide(), K.Normalize(MEAN, STD), v2.RandomErasing(0.5)]
MORE = [v2.AugMix(), *POLICY[:2], v2.ColorJitter(0.4), torch.rand_like]


class Foreign:
    """The batches of a loader, as they are before a prefetcher packs their images."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


def batches(workers, ops, *, kind=DataLoader, dataset=None, device="cpu", foreign=False, **options):
    pin = torch.device(device).type == "cuda"
    dataset = dataset or pictures(10)
    loader = kind(dataset, 4, shuffle=True, num_workers=workers, pin_memory=pin and not foreign)
    loader = Foreign(loader) if foreign else loader
    ops = [gpuprefetch.Resize((16, 16)), *ops]
    return DataPrefetcher(loader, transforms=ops, device=device, seed=3, **options)


@pytest.fixture
def ran_here():
    """The programs that this process has run for a batch, and no worker."""
    found = []

    def note(module, _):
        if isinstance(module, PerImage):
            found.append(module.__name__)

    with register_module_forward_pre_hook(note):
        yield found


def every(prefetcher):
    torch.manual_seed(0)
    return [[images, labels] for images, labels in prefetcher]


def assert_equal_batches(ours, theirs):
    for (images, labels), (others, same_labels) in zip(ours, theirs, strict=True):
        assert torch.equal(images, others) and torch.equal(labels, same_labels)
        assert images.stride() == others.stride()


@pytest.mark.filterwarnings("ignore:ColorJitter is for values")
def test_workers_draw_what_the_loops_process_draws(ran_here, device):
    form = {"dtype": torch.float16, "memory_format": torch.channels_last, "device": device}
    alone, ahead = batches(0, MORE, **form), batches(2, MORE, **form)
    foreign = batches(0, MORE, foreign=True, **form)
    for _ in range(2):
        ran_here.clear()
        ours = every(ahead)
        assert ran_here == ["ColorJitter"] * 3
        assert_equal_batches(ours, theirs := every(alone))
        assert_equal_batches(ours, every(foreign))
        assert len(ran_here) == 12
    label = int(theirs[1][1][2])
    for prefetcher in (alone, ahead):
        assert torch.equal(prefetcher.replay(label)[0], theirs[1][0][2:3])


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_and_epochs_have_draws_of_their_own(workers):
    prefetcher = batches(workers, [v2.ColorJitter(0.5)], dataset=pictures(1) * 8)
    assert different(image for _ in range(2) for images, _ in prefetcher for image in images) == 16


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_a_batch_with_a_bad_file_is_left_to_the_loops_process(on_error, ran_here, device):
    dataset = [*pictures(9), (gpuprefetch.EncodedImage(b"no picture", 9), 9)]
    options = {"dataset": dataset, "on_error": on_error, "device": device}
    alone, ahead = (batches(workers, POLICY, **options) for workers in (0, 2))
    ours = every(ahead)
    assert len(ran_here) == 1
    assert_equal_batches(ours, every(alone))


def test_a_resumed_epoch_goes_on_with_the_same_draws(ran_here):
    whole = every(batches(0, POLICY))
    torch.manual_seed(0)
    first = batches(2, POLICY)
    got = [list(next(iterator := iter(first)))]
    state = first.state_dict()
    iterator.close()
    rest = batches(2, POLICY)
    rest.load_state_dict(state)
    ran_here.clear()
    got += [list(batch) for batch in rest]
    assert not ran_here
    assert_equal_batches(got, whole)


class Backwards(DataLoader):
    """A loader with an order of its own."""

    def __iter__(self):
        return reversed(list(super().__iter__()))


def test_workers_draw_whatever_the_order_of_their_batches_is(ran_here):
    ahead, alone = (batches(workers, [v2.RandAugment()], kind=Backwards) for workers in (2, 0))
    assert_equal_batches(every(ahead), every(alone))
    assert not ran_here


def test_views_have_programs_in_workers(ran_here):
    def run(workers):
        lists = [[gpuprefetch.Resize((16, 16)), op] for op in (v2.RandAugment(), v2.AugMix())]
        lists.append([gpuprefetch.Resize((9, 9))])
        loader = DataLoader(pictures(6), 2, num_workers=workers)
        loader = loader if workers else [*loader]
        views = gpuprefetch.Views(*lists)
        return [images for images, _ in DataPrefetcher(loader, transforms=views, device="cpu")]

    torch.manual_seed(0)
    ahead = run(2)
    assert not ran_here
    torch.manual_seed(0)
    for ours, theirs in zip(ahead, run(0), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert ran_here == ["RandAugment", "AugMix"] * 3


def test_errors_of_a_program_in_a_worker_are_raised():
    ops = [v2.RandAugment(), v2.GaussianBlur(63)]
    with pytest.raises((ValueError, RuntimeError), match="Padding size"):
        every(batches(1, ops))


def test_images_in_floats_stay_as_they_are(device):
    images = torch.rand(12, 3, 9, 8, device=device)
    before = images.clone()
    ops = [v2.RandomGrayscale(p=0.5), v2.Normalize(MEAN, STD)]
    result = PerImage(ops, seed=0)(images)
    assert torch.equal(images, before)
    gray = v2.functional.normalize(v2.functional.rgb_to_grayscale(images, 3), MEAN, STD)
    plain = v2.functional.normalize(images, MEAN, STD)
    is_gray, is_plain = ((result - x).abs().amax((1, 2, 3)) < 1e-5 for x in (gray, plain))
    assert (is_gray ^ is_plain).all()
    assert is_gray.any() and is_plain.any()
