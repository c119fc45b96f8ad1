"""What a list in ``transforms`` means: torchvision's draws for each image, and likely mistakes."""

import re
from functools import partial

import kornia.augmentation as K
import pictures
import pytest
import torch
from kornia.augmentation import auto
from PIL import ImageOps
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.transforms import v2

import gpuprefetch
from gpuprefetch import DataPrefetcher, EncodedImage

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SEVERAL = 64


def noise(count=SEVERAL, dtype=torch.uint8):
    images = torch.randint(0, 256, (count, 3, 6, 8), generator=torch.Generator().manual_seed(0))
    return images.to(dtype)


def run(transforms, images=None, **options):
    """The batch that a prefetcher with these transforms makes of ``images``."""
    loader = [noise(4) if images is None else images]
    return next(
        iter(DataPrefetcher(loader, transforms=transforms, device="cpu", seed=0, **options))
    )


def of_files(transforms):
    files = [pictures.encode(pictures.draw(6, 8, seed=seed), "PNG") for seed in range(SEVERAL)]
    loader = DataLoader([*map(EncodedImage, files, range(SEVERAL))], batch_size=SEVERAL)
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
    with pytest.raises(ValueError, match=r"RandomResize draws for each .* lambda images: op"):
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


def different(*transforms, dtype=torch.float32):
    """How many results a list gives of 64 equal images."""
    image = torch.rand(3, 24, 24, generator=torch.Generator().manual_seed(0))
    images = (image * 255).to(dtype) if dtype == torch.uint8 else image
    made = run([*transforms], images.expand(SEVERAL, 3, 24, 24))
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
    assert different(lambda images: torch.cat([op(image[None]) for image in images])) > 1
    assert different(v2.RandomApply([op], p=0.5)) > 1
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
    """Of a user's."""


class OwnResize(v2.RandomResize):
    """Of a user's."""


class OldJitter(v1.ColorJitter):
    """Of a user's."""


class Dim(v2.Transform):
    """Of a user's own."""

    def make_params(self, flat_inputs):
        return {"factor": float(torch.rand(()))}

    def transform(self, inpt, params):
        return inpt * params["factor"]


class Own(torch.nn.Sequential):
    """Of a user's, who has only named its parts."""

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
                DataPrefetcher([noise(4)], transforms=[given], device="cpu")


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
