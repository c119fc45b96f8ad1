"""What a list in ``transforms`` means: torchvision's draws for each image, and likely mistakes."""

import dataclasses
import importlib
import inspect
import io
import re
from functools import partial

import kornia
import kornia.augmentation as K
import pictures
import pytest
import torch
from kornia.augmentation import auto
from PIL import Image, ImageOps
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuprefetch
from gpuprefetch import DataPrefetcher, EncodedImage
from gpuprefetch.policies.compile import COMPILERS
from gpuprefetch.policies.per_image import ToFloat, ToUint8
from gpuprefetch.policies.registry import ROWS, Is, is_or_extends, row_of

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SEVERAL = 64
FEW = 10  # where each is like another list's


def noise(count=SEVERAL, dtype=torch.uint8):
    images = torch.randint(0, 256, (count, 3, 6, 8), generator=torch.Generator().manual_seed(0))
    return images.to(dtype)


def run(transforms, images=None, **options):
    """The batch that a prefetcher with these transforms makes of ``images``."""
    loader = [noise(4) if images is None else images]
    return next(
        iter(DataPrefetcher(loader, transforms=transforms, device="cpu", seed=0, **options))
    )


def of_files(transforms, count=SEVERAL):
    files = [pictures.encode(pictures.draw(6, 8, seed=seed), "PNG") for seed in range(count)]
    loader = DataLoader([*map(EncodedImage, files, range(count))], batch_size=count)
    return next(iter(DataPrefetcher(loader, transforms=transforms, device="cpu", seed=0)))


FLIPS = {
    "v1": v1.RandomHorizontalFlip(),
    "v2": v2.RandomHorizontalFlip(),
    "Compose": v2.Compose([v2.Identity(), v1.Compose([v2.RandomHorizontalFlip()])]),
    "Compose with a function": v2.Compose([v2.RandomHorizontalFlip(), lambda images: images]),
    "Sequential": torch.nn.Sequential(torch.nn.Sequential(v2.RandomHorizontalFlip())),
    "RandomApply": v2.RandomApply([v2.RandomHorizontalFlip(1.0)]),
    "RandomApply, v1": v1.RandomApply([v1.RandomHorizontalFlip(1.0)]),
    "RandomApply of a function": v2.RandomApply([lambda images: images.flip(-1)]),
    "RandomChoice": v2.RandomChoice([v2.RandomHorizontalFlip(1.0), v2.Identity()]),
    "RandomOrder": v2.RandomOrder([v2.RandomHorizontalFlip(), v2.Identity()]),
    "one shape of several ops": v2.RandomApply([v2.RandomHorizontalFlip(1.0), v2.Resize((6, 8))]),
    "drawn sizes": v2.Compose(
        [v2.RandomResize(9, 20), v2.RandomHorizontalFlip(), v2.Resize((6, 8))]
    ),
}


@pytest.mark.parametrize("name", [*FLIPS, "decoded"])
def test_torchvisions_ops_draw_for_each_image(name):
    images = of_files([CROP]) if name == "decoded" else noise()
    if name == "drawn sizes":  # which leave no pixel as it was, so with slopes to tell flips by
        images = (torch.arange(8.0) * 30).expand(SEVERAL, 3, 6, 8).to(torch.uint8)
    made = of_files([CROP, FLIPS["v2"]]) if name == "decoded" else run([FLIPS[name]], images)
    flipped = 0
    for image, got in zip(images.double(), made.double(), strict=True):
        nearest = (torch.stack([image, image.flip(-1)]) - got).abs().amax((1, 2, 3))
        assert nearest.min() <= (20 if name == "drawn sizes" else 0)
        flipped += int(nearest.argmin())
    assert 16 <= flipped <= 48  # 4 standard deviations of 64 draws


def test_a_random_order_is_each_images_own():
    images = torch.full((SEVERAL, 3, 2, 2), 100, dtype=torch.uint8)
    ops = [v2.RandomInvert(1.0), v2.RandomSolarize(128, 1.0)]
    orders = {int(v2.Compose(order)(images[0])[0, 0, 0]) for order in (ops, ops[::-1])}
    for T in (v1, v2):
        assert set(run([T.RandomOrder(ops)], images)[:, 0, 0, 0].tolist()) == orders == {100, 155}


@pytest.mark.parametrize(
    "op", [v2.Normalize(MEAN, STD), v2.Pad(2), v2.CenterCrop(4), v2.Grayscale(3)]
)
def test_what_draws_nothing_stays_as_it_is(op):
    images = noise(4, torch.float32) / 255
    assert torch.equal(run([op], images), op(images))
    (view,) = DataPrefetcher([images], transforms=[op], device="cpu")._pipeline.views
    assert view.of_tensors().tail == [op]


def test_timms_policies_are_for_uint8():
    timm = pytest.importorskip("timm.data")
    op = timm.rand_augment_transform("rand-m9", {})
    assert run([op], noise()).dtype == torch.uint8
    with pytest.raises(TypeError, match=r"timm's policies take uint8 images"):
        run([op], noise() / 255)
    erasing = timm.random_erasing.RandomErasing(0.5, device="cpu")
    erased = run([erasing], torch.ones(SEVERAL, 3, 16, 16)).amin((1, 2, 3)) == 0
    assert 16 <= erased.sum() <= 48


def test_a_prefetcher_shows_its_settings():
    flip = K.RandomHorizontalFlip()
    loader = DataPrefetcher(
        [noise(4)], transforms=[CROP, flip], device="cpu", cpu_share=0.0, seed=3
    )
    settings = "device='cpu', transforms=['Resize', 'RandomHorizontalFlip'], cpu_share=0.0, seed=3)"
    assert repr(loader).endswith(settings)
    assert loader.transforms == [CROP, flip] and loader.seed == 3
    assert repr(loader.stats) == "no batches yet"
    list(loader)
    assert re.search(r"^images +4$", str(loader.stats), re.MULTILINE)


def test_drawn_sizes_that_no_batch_can_hold_are_refused():
    with pytest.raises(ValueError, match=r"RandomResize samples for each .* lambda images: op"):
        run([v2.RandomResize(9, 40)], noise())


# --- values -------------------------------------------------------------------------------------

CROP = gpuprefetch.Resize((6, 8))
MEAN_255, STD_255 = [m * 255 for m in MEAN], [s * 255 for s in STD]


@pytest.mark.parametrize(
    "normalize",
    [
        K.Normalize(torch.tensor(MEAN_255), torch.tensor(STD_255)),
        v2.Normalize(MEAN_255, STD_255),
        v1.Normalize(MEAN_255, STD_255),
        v2.Compose([v2.RandomHorizontalFlip(), v2.Normalize(MEAN_255, STD_255)]),
        v2.Normalize([0.0], [255.0]),
    ],
    ids=["kornia", "v2", "v1", "Compose", "scale"],
)
def test_a_normalize_for_levels_is_refused_for_images_in_0_to_1(normalize):
    text = "is for values of 0 to 255, and images are in .*Divide both by 255"
    with pytest.raises(ValueError, match=text):
        of_files([CROP, normalize])
    with pytest.raises(ValueError, match=text):
        run([CROP, normalize])
    with pytest.warns(UserWarning, match=text):  # whose own scale is not known
        run([CROP, normalize], torch.rand(4, 3, 6, 8))
    run([CROP, normalize], noise(4, torch.float32))  # for which it is meant


TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
ONE = K.Normalize(torch.tensor(MEAN), torch.tensor(STD))
TWO = v2.Normalize(MEAN, STD)
BACK = v2.Normalize([-m / s for m, s in zip(MEAN, STD, strict=True)], [1 / s for s in STD])


def test_two_normalizes_are_refused_unless_something_undoes_one():
    for twice in ([CROP, ONE, TWO], [CROP, TWO, v2.RandomHorizontalFlip(), v1.Normalize(0.5, 0.5)]):
        with pytest.raises(ValueError, match="normalize twice"):
            DataPrefetcher([1], transforms=twice, device="cpu")
    back = [CROP, ONE, BACK]
    torch.testing.assert_close(run(back), noise(4) / 255, atol=1e-5, rtol=0)
    for once in ([*back, TWO], [CROP, ONE, lambda images: BACK(images), TWO]):
        torch.testing.assert_close(run(once), run([CROP, ONE]), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("transforms", "images", "text"),
    [
        ([CROP, ONE], noise(4, torch.float32), "values in .*gets 0 to 255"),
        ([TWO], noise(4, torch.float32), "values in .*gets 0 to 255"),
        ([v2.ToDtype(torch.float32), TWO], noise(4), "values in .*gets 0 to 255"),
        ([v2.ToDtype(torch.float32)], noise(4), "scale=True"),
        ([CROP, v2.ToDtype(torch.uint8)], noise(4), "scale=True"),
        ([v2.ColorJitter(0.4)], noise(4, torch.float32), r"ColorJitter is for .*gets 0 to 255"),
        # Dark pictures in 0 to 255, a hundredth of their light.
        ([v2.ColorJitter(0.4)], noise(4, torch.float32) / 100, r"ColorJitter is for .* to 2\.5"),
        ([TWO], noise(4, torch.float32) / 100, r"values in .*gets 0 to 2\.5"),
        ([K.RandomGamma()], noise(4, torch.float32), r"RandomGamma is for values in \[0, 1\]"),
        ([CROP, ONE, K.ColorJitter(0.4)], noise(4), r"ColorJitter is for .*gets -2"),
        ([CROP, v2.Pad(1, fill=128)], noise(4), r"Pad is given 128, a value of 0 to 255"),
        ([CROP, v2.RandomApply([v2.RandomAffine(9, fill=[124, 116, 104])])], noise(4), "given 124"),
        (
            [v2.RandAugment(fill=128), TO_FLOAT, v2.RandomErasing(1.0, value=255)],
            noise(4),
            "given 255",
        ),
    ],
)
def test_values_that_are_likely_wrong_are_told_once(transforms, images, text):
    loader = DataPrefetcher([images, images], transforms=transforms, device="cpu")
    with pytest.warns(UserWarning, match=text) as told:
        list(loader)
    assert len(told) == 1
    list(loader)


def test_values_of_the_right_range_are_not_told():
    for transforms in ([CROP, K.ColorJitter(0.4), ONE], [v2.ToDtype(torch.float32, True), TWO]):
        run(transforms)
    run([v2.ToDtype(torch.float32), v2.Normalize(MEAN_255, STD_255)])
    run([CROP, v2.ToDtype(torch.uint8, scale=True), v2.ColorJitter(0.4)])


def test_normalize_of_integers_or_by_zero_is_refused():
    for normalize in (TWO, K.Normalize(torch.tensor(MEAN), torch.tensor(STD), p=0.5)):
        with pytest.raises(TypeError, match=r"takes floating point, and torch\.uint8"):
            run([CROP, v2.Identity(), normalize], dtype=torch.uint8)
    with pytest.raises(ValueError, match="must not be 0"):
        DataPrefetcher([1], transforms=[CROP, v2.Normalize(MEAN, (0.2, 0.0, 0.2))], device="cpu")


@pytest.mark.parametrize("normalize", [K.Normalize, v2.Normalize], ids=["kornia", "v2"])
@pytest.mark.parametrize("count", [2, 4])
def test_a_normalize_of_other_channels_is_refused(normalize, count):
    values = torch.full((count,), 0.5)
    with pytest.raises((ValueError, RuntimeError), match=r"3 values|size of tensor"):
        run([CROP, normalize(values, values)])


@pytest.mark.parametrize(
    ("transform", "error", "text"),
    [
        (lambda images: images.numpy(), TypeError, r"numpy.ndarray.*torch.from_numpy\(result\)"),
        (lambda images: [*map(v2.ToPILImage(), images)], TypeError, "PIL.Image.Image"),
        (lambda images: None, TypeError, "returned None"),
        (lambda images: images[:3], ValueError, "3 images of 4"),
        (lambda images: images.to("meta"), ValueError, r"images on meta.*Leave out .*\.cpu\(\)"),
    ],
    ids=["numpy", "pil", "none", "fewer", "device"],
)
def test_a_function_returns_images_on_the_device(transform, error, text):
    with pytest.raises(error, match=text):
        run([transform])
    assert run([lambda images: torch.cat([images, images])]).shape[0] == 8  # views


# --- once a batch, or for one image -------------------------------------------------------------


def different(*transforms, dtype=torch.float32, count=SEVERAL):
    """How many results a list gives of equal images."""
    image = torch.rand(3, 24, 24, generator=torch.Generator().manual_seed(0))
    images = (image * 255).to(dtype) if dtype == torch.uint8 else image
    made = run([*transforms], images.expand(count, 3, 24, 24))
    return len({each.numpy().tobytes() for each in made})


def always():
    return [
        K.RandomHorizontalFlip(p=1.0),
        K.RandomInvert(p=1.0),
        K.RandomSolarize((0.5, 0.5), (0.0, 0.0), p=1.0),
    ]


ONCE = {
    "RandAugment": lambda: auto.RandAugment(2, 9),
    "TrivialAugment": auto.TrivialAugment,
    "AutoAugment": auto.AutoAugment,
    "AugmentationSequential": lambda: K.AugmentationSequential(*always(), random_apply=1),
    "ImageSequential": lambda: K.ImageSequential(*always(), random_apply=True),
    "PatchSequential": lambda: K.PatchSequential(
        *always(), grid_size=(2, 2), patchwise_apply=False, random_apply=1
    ),
}


@pytest.mark.parametrize("name", ONCE)
def test_kornias_choices_for_a_whole_batch_are_refused(name):
    op = ONCE[name]()
    text = rf"kornia's {name}.* chooses its ops once a batch.*v2\.Rand.*lambda images: op\(images\)"
    inside = (v2.Compose([v2.Identity(), op]), torch.nn.Sequential(op), K.ImageSequential(op))
    for given in (op, *inside):
        with pytest.raises(ValueError, match=text):
            DataPrefetcher([noise(4)], transforms=[given], device="cpu")
    assert re.search(
        rf"^{name} +refused: kornia's .* once a batch", gpuprefetch.explain([op]), re.MULTILINE
    )
    # The ways that the message names.
    one_by_one = different(
        lambda images: torch.cat([op(image[None]) for image in images]), count=FEW
    )
    assert one_by_one > 1
    assert different(v2.RandomApply([op], p=0.5), count=FEW) > 1
    assert len(run([lambda images: op(images)], torch.rand(4, 3, 8, 8))) == 4


def test_kornias_other_containers_stay_as_they_are():
    assert different(v2.RandomChoice(always())) == 3
    assert different(K.AugmentationSequential(K.RandomAffine(30.0, p=1.0))) == SEVERAL
    assert different(K.ImageSequential(*always(), random_apply=1, same_on_batch=True)) == 1
    patches = K.PatchSequential(
        *always(), grid_size=(2, 2), patchwise_apply=True, random_apply=True
    )
    assert different(patches) > 32
    assert different(K.ImageSequential(v2.Normalize([0.5], [0.5]))) == 1
    for op in (v2.ColorJitter(0.4), v2.RandomApply([v2.ColorJitter(0.4)]), Jitter(0.4)):
        with pytest.raises(ValueError, match=r"within kornia's ImageSequential would sample once"):
            run([K.ImageSequential(K.ImageSequential(op))])


class Jitter(v2.ColorJitter):
    """A user's."""


class OwnResize(v2.RandomResize):
    """A user's."""


class OldJitter(v1.ColorJitter):
    """A user's."""


class Dim(v2.Transform):
    """A user's own."""

    def make_params(self, flat_inputs):
        return {"factor": float(torch.rand(()))}

    def transform(self, inpt, params):
        return inpt * params["factor"]


class Own(torch.nn.Sequential):
    """A user's, who has only named its parts."""

    def __init__(self):
        super().__init__(v2.ColorJitter(0.4))


@pytest.mark.parametrize("op", [Jitter(0.4), OldJitter(0.4), Dim(), v2.RandomApply([Dim()], p=1.0)])
def test_classes_derived_from_torchvisions_sample_for_each_image(op):
    assert different(op) == SEVERAL
    assert "image by image" in gpuprefetch.explain([CROP, K.RandomGamma(), op])


def test_a_derived_container_is_opened_if_it_is_called_as_its_base():
    class Twice(Own):
        def forward(self, images):
            return super().forward(images)

    assert different(Own()) == SEVERAL
    assert different(Twice()) == 1  # runs as it is written


def test_a_derived_class_that_samples_sizes_stands_before_a_resize():
    assert different(v2.Compose([OwnResize(8, 30), v2.Resize((12, 12))])) > 8
    resized = [CROP, OwnResize(8, 30), v2.Resize((6, 6))]  # the crop is fused, in a Compose as well
    assert of_files(v2.Compose(resized)).shape == (SEVERAL, 3, 6, 6)


def test_timms_ops_sample_for_each_image_or_are_refused():
    timm = pytest.importorskip("timm.data.transforms")
    naflex = pytest.importorskip("timm.data.naflex_transforms")
    policies = pytest.importorskip("timm.data.auto_augment")
    mixing = pytest.importorskip("timm.data.mixup")
    erasing = pytest.importorskip("timm.data.random_erasing")

    class OwnCrop(timm.RandomCropOrPad):
        pass

    for op in (
        timm.RandomCropOrPad(12),
        OwnCrop(12),
        timm.RandomPad((40, 40)),
        timm.RandomResizedCropAndInterpolation(12, interpolation="random"),
        naflex.RandomCropToSequence(4, 9),
        naflex.RandomResizedCropToSequence(4, 9),
        erasing.RandomErasing(1.0, max_count=2, device="cpu"),
    ):
        assert different(op) > 16, op
    for op in (timm.CenterCropOrPad(12), timm.TrimBorder(2), naflex.ResizeToSequence(4, 9)):
        assert different(op) == 1, op
    crops = [timm.ResizeKeepRatio(24, random_scale_prob=1.0), v2.Resize((12, 12))]
    assert different(v2.Compose(crops)) > 2  # of a few sizes
    for op, text in (
        (policies.auto_augment_transform("3a", {}), r"draws GaussianBlurRand.*v2\.AutoAugment\(\)"),
        (
            policies.augment_and_mix_transform("augmix-m5-a0.5", {}),
            r"alpha is 0\.5.*v2\.AugMix\(\)",
        ),
        (policies.rand_augment_transform("rand-m9", {"interpolation": 1}), "PIL's filter 1"),
        (policies.AugmentOp("Rotate"), "AugmentOp cannot run in a list"),
        (timm.ToNumpy(), "ToNumpy cannot run in a list"),
        (mixing.Mixup(), "timm's Mixup mixes the images"),
    ):
        for given in (op, v2.Compose([v2.Identity(), op])):
            with pytest.raises(ValueError, match=text):
                list(DataPrefetcher([noise(4)], transforms=[given], device="cpu"))


def of_module(module):
    """An op that flips rows of one (C, H, W), of a class that says it is from ``module``."""
    return type("RandFlip", (), {"__module__": module, "__call__": lambda self, x: x.flip(1)})()


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (of_module("monai.transforms.spatial.array"), r"monai's RandFlip is for one image"),
        (of_module("torchio.transforms.augmentation"), r"torchio's RandFlip is for one volume"),
        (of_module("imgaug.augmenters.flip"), r"imgaug's RandFlip is for one NumPy array"),
        (of_module("mmcv.transforms.processing"), r"mmcv's RandFlip is for one sample"),
        (ImageOps.autocontrast, r"PIL's autocontrast is for one PIL image"),
        (partial(ImageOps.posterize, bits=4), r"PIL's posterize is for one PIL image"),
    ],
)
def test_ops_of_other_libraries_for_one_image_are_refused_by_name(op, text):
    derived = type("Own", (type(op),), {})() if text.startswith("monai") else op
    for given in (
        op,
        derived,
        v2.Compose([v2.Identity(), v1.Compose([op])]),
        v2.RandomApply([op]),
        v2.RandomChoice([v2.Identity(), v2.RandomOrder([op])]),
    ):
        with pytest.raises(ValueError, match=text if given is not derived else "for one"):
            DataPrefetcher([noise(4)], transforms=[CROP, given], device="cpu")


def test_the_way_that_is_named_for_ops_for_one_image_works():
    op, images = of_module("monai.transforms.spatial.array"), noise(4)
    with pytest.raises(ValueError) as caught:
        run([op])
    (call,) = re.findall(r"(lambda images: .*?)\. Or", str(caught.value))
    made = run([eval(call, {"torch": torch, "op": op})], images)
    assert torch.equal(made, images.flip(2))
    networks = of_module("monai.networks.layers.simplelayers")  # for batches
    assert torch.equal(run([networks], images), images.flip(1))


# --- torchvision's pipelines as they are --------------------------------------------------------

PIL_TO_FLOATS = [v2.ToImage(), TO_FLOAT]
KORNIAS = K.Normalize(torch.tensor(MEAN), torch.tensor(STD))
# A pipeline for encoded images, and the same in this library's and kornia's transforms.
SAME_LISTS = {
    "levels": (
        [v2.RandomResizedCrop(16), v2.ToImage()],
        [gpuprefetch.RandomResizedCrop(16), ToUint8()],
    ),
    "training": (
        [v2.RandomResizedCrop(16), v2.RandomHorizontalFlip(), TO_FLOAT, TWO],
        [gpuprefetch.RandomResizedCrop(16), K.RandomHorizontalFlip(), KORNIAS],
    ),
    "v1": (
        [v1.RandomResizedCrop(16), v1.RandomVerticalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)],
        [gpuprefetch.RandomResizedCrop(16), K.RandomVerticalFlip(), KORNIAS],
    ),
    "validation": (
        [v2.Resize(20), v2.CenterCrop(16), v2.PILToTensor(), TO_FLOAT, TWO],
        [gpuprefetch.Resize(20), gpuprefetch.CenterCrop(16), KORNIAS],
    ),
    "flip first": (
        [v2.RandomHorizontalFlip(), v2.Resize((9, 12)), *PIL_TO_FLOATS],
        [K.RandomHorizontalFlip(), gpuprefetch.Resize((9, 12))],
    ),
    "conversion first": (
        [*PIL_TO_FLOATS, v2.CenterCrop(16), v2.RandomHorizontalFlip(), TWO],
        [gpuprefetch.CenterCrop(16), K.RandomHorizontalFlip(), KORNIAS],
    ),
    "policy": (
        [v2.Resize((16, 16)), v2.RandAugment(), *PIL_TO_FLOATS, TWO, v2.RandomErasing(0.5)],
        [
            gpuprefetch.Resize((16, 16)),
            ToUint8(),
            v2.RandAugment(),
            ToFloat(),
            TWO,
            v2.RandomErasing(0.5),
        ],
    ),
    "then kornia's": (
        [v2.RandomResizedCrop(16), K.RandomHorizontalFlip(), K.RandomGamma(), KORNIAS],
        [gpuprefetch.RandomResizedCrop(16), K.RandomHorizontalFlip(), K.RandomGamma(), KORNIAS],
    ),
    "then ours": (
        [v2.RandomHorizontalFlip(), gpuprefetch.RandomResizedCrop(16), TWO],
        [K.RandomHorizontalFlip(), gpuprefetch.RandomResizedCrop(16), TWO],
    ),
}


@pytest.mark.parametrize("name", SAME_LISTS)
def test_a_pipeline_of_torchvisions_is_a_list(name):
    pipeline, listed = SAME_LISTS[name]
    want = of_files(listed, FEW)
    for given in (pipeline, v2.Compose(pipeline), [v1.Compose(pipeline)], tuple(pipeline)):
        got = of_files(given, FEW)
        assert got.dtype == want.dtype and torch.equal(got, want)
    if "then" not in name:
        assert torch.equal(of_files(gpuprefetch.convert_transforms(pipeline), FEW), want)


EXACT = {
    "levels": [v2.Resize((5, 7)), v2.CenterCrop(4)],
    "the sizes of PIL images": [v2.Resize(20), v2.CenterCrop(16), v2.PILToTensor()],
    "floats": [v2.CenterCrop(6), v1.ToTensor()],
    "floats of levels": [v2.CenterCrop(6), v2.ToImage(), v2.ToDtype(torch.float32)],
    "normalized": [v2.Resize((6, 6)), v2.ToImage(), TO_FLOAT, TWO],
    "half": [v2.CenterCrop(6), v2.ToImage(), v2.ToDtype(torch.half, scale=True)],
    "flipped": [v2.RandomVerticalFlip(1.0), v2.CenterCrop((4, 5)), v2.RandomHorizontalFlip(1.0)],
    "colors": [v2.CenterCrop(6), v2.ColorJitter((2, 2)), *PIL_TO_FLOATS, v2.RandomInvert(1.0)],
    "resized twice": [v2.CenterCrop((6, 8)), v2.Resize(3), v2.Pad(2, fill=9), v2.Grayscale(3)],
    "an own function": [v2.CenterCrop(6), lambda images: images // 2, TO_FLOAT],
    "a Lambda": [v2.CenterCrop(6), v2.Lambda(lambda images: 255 - images), v2.ToImage()],
    "of one size": [v2.CenterCrop(6), v2.Compose([v2.RandomResize(9, 10), v2.Resize((3, 3))])],
}


@pytest.mark.filterwarnings("ignore:ToDtype leaves values as they are")
@pytest.mark.parametrize("name", EXACT)
def test_a_pipeline_gives_what_torchvision_gives(name):
    ops = EXACT[name]
    images = [
        torch.from_numpy(pictures.draw(6, 8, seed=seed)).permute(2, 0, 1) for seed in range(4)
    ]
    want = torch.stack([v2.Compose(pil_first(ops))(image) for image in images])
    got = of_files(ops, 4)
    assert got.dtype == want.dtype and got.shape == want.shape
    levels = 1.01 * (1 if want.max() > 20 else 1 / 255 / min(STD))  # one of rounding
    if name == "of one size":
        levels = 40  # its sizes are sampled
    torch.testing.assert_close(got, want, rtol=0, atol=levels)


def pil_first(ops):
    """The ops for a tensor, of which v1.ToTensor takes none."""
    to_tensor = v2.Compose(PIL_TO_FLOATS)
    return [to_tensor if isinstance(op, v1.ToTensor) else op for op in ops]


def test_weights_bring_their_pipeline():
    from torchvision.models import ResNet18_Weights

    pipeline = ResNet18_Weights.DEFAULT.transforms(crop_size=16, resize_size=18)
    files = [pictures.encode(pictures.draw(40, 60, seed=seed), "PNG") for seed in range(3)]
    got = gpuprefetch.preprocess(files, pipeline, device="cpu")
    want = torch.stack([pipeline(Image.open(io.BytesIO(file))) for file in files])
    torch.testing.assert_close(got, want, rtol=0, atol=1.01 / 255 / min(STD))


def test_each_op_gives_what_its_library_gives():
    crop, seen = v2.CenterCrop(4), []
    look = [lambda images: seen.append(images.dtype) or images]
    assert of_files([crop]).dtype == torch.uint8
    assert of_files([gpuprefetch.CenterCrop(4)]).dtype == torch.float32
    for ops in ([crop, *look], [crop, TO_FLOAT, *look], [crop, K.RandomInvert(), *look]):
        of_files(ops)
    assert seen == [torch.uint8, torch.float32, torch.float32]
    floats = of_files([crop, K.RandomHorizontalFlip()])
    assert floats.dtype == torch.float32 and floats.max() <= 1


@pytest.mark.parametrize("ops", [[v2.CenterCrop(4)], [v2.CenterCrop(4), v2.RandomInvert(1.0)]])
def test_a_dtype_keeps_the_values_of_a_pipeline(ops):
    loader = DataLoader([EncodedImage(pictures.encode(pictures.draw(6, 8), "PNG"))], batch_size=1)
    form = {"dtype": torch.float16, "memory_format": torch.channels_last, "device": "cpu"}
    (got,) = DataPrefetcher(loader, transforms=ops, **form)
    (want,) = DataPrefetcher(loader, transforms=ops, device="cpu")
    assert want.dtype == torch.uint8 and torch.equal(got, want.half())
    assert got.is_contiguous(memory_format=torch.channels_last)


def test_tensors_get_each_op_as_it_is_written():
    ops = [v2.CenterCrop(4), v2.ToDtype(torch.float32, scale=True)]
    assert torch.equal(run(ops), v2.Compose(ops)(noise(4)))
    for_files = [v2.CenterCrop(4), v1.ToTensor()]
    assert of_files(for_files).dtype == torch.float32
    with pytest.raises(ValueError, match=r"ToTensor is for PIL images.*Leave it out"):
        run(for_files)


def test_a_pipeline_that_was_edited_is_an_error(photo_folder):
    crop = v2.CenterCrop(4)
    loader = DataLoader(gpuprefetch.EncodedImageFolder(photo_folder), batch_size=4)
    prefetcher = DataPrefetcher(loader, transforms=[crop, v2.ToImage()], device="cpu")
    next(iter(prefetcher))
    crop.size = (5, 5)
    with pytest.raises(TypeError, match="has changed since DataPrefetcher was built"):
        iter(prefetcher)


def test_views_of_pipelines():
    first = [v2.RandomResizedCrop(16), *PIL_TO_FLOATS]
    second = [v2.CenterCrop(4)]
    large, small = of_files(gpuprefetch.Views(first, second))
    assert torch.equal(large, of_files(first)) and torch.equal(small, of_files(second))


def test_boxes_follow_a_pipeline():
    def of_boxes(transforms):
        box = tv_tensors.BoundingBoxes([[1, 1, 5, 4]], format="XYXY", canvas_size=(6, 8))
        file = pictures.encode(pictures.draw(6, 8), "PNG")
        samples = [(EncodedImage(file, index), {"boxes": box}) for index in range(8)]
        loader = DataLoader(samples, 8, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))
        ((images, targets),) = DataPrefetcher(loader, transforms=transforms, device="cpu", seed=0)
        return images, torch.stack([target["boxes"] for target in targets])

    got, boxes = of_boxes([v2.RandomResizedCrop(6), v2.RandomHorizontalFlip(), *PIL_TO_FLOATS])
    want, other = of_boxes([gpuprefetch.RandomResizedCrop(6), K.RandomHorizontalFlip()])
    assert torch.equal(got, want) and torch.equal(boxes, other)
    assert len(boxes.unique(dim=0)) > 2


def test_explain_reads_a_pipeline_as_a_prefetcher_does():
    pipeline = SAME_LISTS["policy"][0]
    text = gpuprefetch.explain(pipeline)
    assert re.search(
        r"^Resize +uint8 \(N, 3, 16, 16\).* one fused launch, in 0 to 255$", text, re.M
    )
    assert re.search(r"RandAugment, .*Normalize, RandomErasing .*one program", text)
    prefetcher = DataPrefetcher([1], transforms=pipeline, device="cpu")
    assert gpuprefetch.explain(prefetcher).splitlines()[1:] == text.splitlines()[1:]
    (view,) = prefetcher._pipeline.views
    assert [(step.name, step.where) for step in view.plan.steps] == [
        ("Resize", "fused launch"),
        ("RandAugment", "one program"),
        ("ToImage", "nothing to do"),
        ("ToDtype", "on the batch"),
        ("Normalize", "torchvision v2 on the batch"),
        ("RandomErasing", "one program"),
    ]
    refused = gpuprefetch.explain([v2.ColorJitter(0.4), v2.RandomResizedCrop(9)])
    assert "refused: ColorJitter cannot move to the device: no crop or resize before it" in refused
    assert "one size" in gpuprefetch.explain([v2.ColorJitter(0.4)]).splitlines()[0]


CONVERSIONS_AFTER_OURS = {
    "Normalize": ([], [TWO]),
    "a flip": ([v2.RandomHorizontalFlip()], [v2.RandomVerticalFlip(), TWO]),
    "kornia's": ([K.RandomHorizontalFlip()], [KORNIAS]),
    "a policy": ([], [v2.RandAugment(), TWO]),
    "kornia's color": ([], [K.RandomGamma((0.5, 2.0))]),
}


@pytest.mark.parametrize("name", CONVERSIONS_AFTER_OURS)
@pytest.mark.parametrize("own_sizes", [False, True])
def test_conversions_after_our_ops_have_nothing_to_do(name, own_sizes):
    before, after = CONVERSIONS_AFTER_OURS[name]
    first = gpuprefetch.Resize(9 if own_sizes else (9, 12))
    transforms = [first, *before, *PIL_TO_FLOATS, *after]
    got = of_files(transforms, FEW)
    want = of_files([first, *before, *after], FEW)
    for one, other in zip(got, want, strict=True):
        assert type(one) is torch.Tensor and torch.equal(one, other)
    (view,) = DataPrefetcher([1], transforms=transforms, device="cpu")._pipeline.views
    wheres = [step.where for step in view.plan.steps]
    assert wheres.count("nothing to do") == 2
    if name in ("Normalize", "a flip", "kornia's"):
        assert not view.tail and "on the batch" not in wheres


def test_a_function_after_conversions_gets_what_they_make():
    seen = []

    def look(images):
        seen.append((type(images), images.dtype))
        return images

    first = gpuprefetch.Resize((9, 12))
    loader = DataLoader([EncodedImage(pictures.encode(pictures.draw(6, 8), "PNG"), 0)] * 2, 2)
    kinds = []
    for transforms in ([look], [v2.Identity(), look], [v2.RandomApply([look], p=1.0)]):
        listed = [first, *PIL_TO_FLOATS, *transforms]
        prefetcher = DataPrefetcher(loader, transforms=listed, device="cpu", dtype=torch.half)
        next(iter(prefetcher))
        kinds.append(seen.pop())
    image = tv_tensors.Image
    plain = torch.Tensor  # a container calls its ops for each image
    assert kinds == [(image, torch.float32), (image, torch.float32), (plain, torch.float32)]
    halves = [first, v2.ToImage(), v2.ToDtype({tv_tensors.Image: torch.half, "others": None})]
    assert of_files(halves).dtype == torch.half


def test_timms_policies_come_before_a_conversion():
    timm = pytest.importorskip("timm.data")
    policy = timm.rand_augment_transform("rand-m9", {})
    assert of_files([v2.CenterCrop(6), policy, v2.ToImage()]).dtype == torch.uint8
    with pytest.raises(ValueError, match=r"RandAugment .* it takes uint8.* Put it before that"):
        of_files([v2.CenterCrop(6), v2.ToImage(), TO_FLOAT, policy])


# --- the registry -------------------------------------------------------------------------------

# Nothing is known of these: they are refused, or run as functions of the user's do.
UNKNOWN_OF_TORCHVISION = {
    "AutoAugmentPolicy": "an enum",
    "Compose": "stands for its ops",
    "CutMix": "refused by its class",
    "InterpolationMode": "an enum",
    "MixUp": "refused by its class",
    "ToPILImage": "refused by its name",
    "Transform": "the base of all",
}
UNKNOWN_OF_KORNIA = re.compile(
    r"3D|^(AugmentationBase|RigidAffine|IntensityAugmentation|ManyTo)|Sequential$"
)


# Where the classes of a library are from: what is read by this alone would fail in silence.
HOME = {
    "torchvision": "torchvision.transforms.",
    "kornia": "kornia.augmentation.",
    "timm": "timm.data.",
    "gpuprefetch": "gpuprefetch.",
}


def classes_of(module):
    return {name for name, value in vars(module).items() if inspect.isclass(value)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.library}.{row.name}")
def test_a_row_names_a_class_that_is_there(row):
    pytest.importorskip(row.library)
    found = [getattr(importlib.import_module(name), row.name, None) for name in row.modules]
    kinds = {kind for kind in found if inspect.isclass(kind)}
    assert kinds, f"{row.library} has no {row.name} in {row.modules} any more: see registry.py"
    for kind in kinds:
        assert kind.__module__.startswith(HOME[row.library])
        derived = type(row.name, (kind,), {"__module__": __name__})
        assert row_of(object.__new__(kind)) is row
        assert row_of(object.__new__(derived)) is None
        assert is_or_extends(object.__new__(derived), row.traits) == bool(row.traits)


def test_a_renamed_class_is_seen():
    # Guards the test above.
    gone = dataclasses.replace(ROWS[0], name="Gone")
    with pytest.raises(AssertionError, match="has no Gone in"):
        test_a_row_names_a_class_that_is_there(gone)


def test_every_public_transform_has_a_row():
    rows = {(row.library, row.name) for row in ROWS}
    known = {name for library, name in rows if library == "torchvision"}
    assert not known & UNKNOWN_OF_TORCHVISION.keys()
    assert classes_of(v2) <= known | UNKNOWN_OF_TORCHVISION.keys()
    assert classes_of(v1) <= known | UNKNOWN_OF_TORCHVISION.keys()
    public = {name for name in K.__all__ if inspect.isclass(getattr(K, name))}
    of_images = {name for name in public if not UNKNOWN_OF_KORNIA.search(name)}
    assert of_images <= {name for library, name in rows if library == "kornia"}


def test_the_compiler_names_ops_that_have_a_row():
    assert COMPILERS.keys() <= {row.key for row in ROWS}
    assert is_or_extends(kornia.geometry.transform.Hflip(), Is.MOVES)
