"""Plausible mistakes: each gets a message that ends with what to do."""

import kornia.augmentation as K
import pytest
import torch
from torch.utils.data import DataLoader
from torchcodec.encoders import PngEncoder
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import gpuprefetch
from gpuprefetch import (
    DataPrefetcher,
    EncodedImage,
    EncodedImageFolder,
    RandomResizedCrop,
    Resize,
)

CROP = RandomResizedCrop(16)
PIPELINE = v2.Compose([v2.RandomResizedCrop(16), v2.ToImage(), v2.ToDtype(torch.float32, True)])


class HorizontalFlip:
    """As albumentations' op; the library need not be there."""

    __module__ = "albumentations.augmentations.geometric.flip"

    def __call__(self, *, image):
        return {"image": image[:, ::-1]}


def files(root):
    return DataLoader(EncodedImageFolder(root), batch_size=4)


# What is given as transforms for a loader of files, and the end of the message.
TRANSFORMS = [
    ([v2.RandomHorizontalFlip()], r"equal size.*\.JPEG'.* v2\.Resize\(256\) and v2\.CenterCrop"),
    (
        [v2.ColorJitter(0.4), PIPELINE],
        r"ColorJitter.*Put it after the crop, or add one .* or call it in the da",
    ),
    ([v2.Resize(20), PIPELINE], r"RandomResizedCrop.*already.*Leave out what does so before it"),
    ([v2.Lambda(abs), PIPELINE], r"Lambda comes first .*transforms=\[gpuprefetch\.Random.*\]\.$"),
    ([v2.CenterCrop(16), v2.Normalize([0.5], [0.5])], r"Put v2\.ToDtype\(.*\) before it"),
    (
        K.AugmentationSequential(K.RandomResizedCrop((16, 16)), K.RandomHorizontalFlip()),
        r"AugmentationSequential are hidden in it\. Write transforms=\[\*pipeline\]\.$",
    ),
    ([Resize(20), CROP], r"Leave Resize out: transforms=\[RandomResizedCrop\(224\), \.\.\.\]\.$"),
    ([CROP, v1.ToTensor()], r"Leave it out\..*transforms=\[v2\.RandomResizedCrop\(224\), .*\]\.$"),
    ([CROP, v2.ToPILImage()], r"is for PIL images.*Leave it out"),
    (
        [CROP, HorizontalFlip()],
        r"albumentations' HorizontalFlip.*in its place: transforms=\[.*\]\.$",
    ),
    ([CROP, v2.CutMix(num_classes=3)], r"Mix in the training step"),
    (
        [CROP, v2.RandomSolarize(128)],
        r"0 to 255, and images are in \[0, 1\] here\. .*: threshold=128 / 255\.",
    ),
    ([RandomResizedCrop], r"Pass an instance, as in K\.RandomHorizontalFlip\(\)"),
    ([[CROP], [RandomResizedCrop(8)]], r"several lists as Views\.$"),
]


@pytest.mark.parametrize(("transforms", "message"), TRANSFORMS)
def test_in_transforms(photo_folder, transforms, message):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        next(iter(DataPrefetcher(files(photo_folder), transforms=transforms, device="cpu")))


def test_a_compose_of_what_belongs_in_a_list_is_one(photo_folder):
    ops = [CROP, v2.RandomHorizontalFlip(), lambda images: images]
    given = (ops, v2.Compose(ops), [v2.Compose(ops[:2]), ops[2]], torch.nn.Sequential(*ops[:2]))
    first, *others = (
        next(iter(DataPrefetcher(files(photo_folder), transforms=each, device="cpu", seed=0)))[0]
        for each in given
    )
    assert all(torch.equal(first, other) for other in others)


# What a folder gets whose loader is moved, and the end of the message.
MOVED = [
    (None, r"has no transform.*ImageFolder\(root, transform\)"),
    (
        v2.Compose([v2.ColorJitter(0.4), PIPELINE]),
        r"ColorJitter.*Put it after the crop.*accelerate\(loader, keep_unknown=True\)\.$",
    ),
    (
        v2.Compose([v2.Resize(20), PIPELINE]),
        r"RandomResizedCrop cannot move.*Leave out what does so before it",
    ),
    (
        v2.RandomResizedCrop(16),
        r"Add v2\.ToImage\(\) and v2\.ToDtype\(torch\.float32, scale=True\)",
    ),
    (
        v2.Compose([HorizontalFlip(), PIPELINE]),
        r"it is albumentations', which takes NumPy arrays\. Replace it",
    ),
    (
        v2.Compose([PIPELINE, K.ColorJitter(0.1)]),
        r"transforms=\[\*convert_transforms\(pipeline\), it\]\)\.$",
    ),
]


def accelerated(root, ops):
    loader = DataLoader(ImageFolder(root, ops), batch_size=4)
    return gpuprefetch.accelerate(loader, device="cpu", print_plan=False)


@pytest.mark.parametrize(("ops", "message"), MOVED)
def test_in_what_is_moved(photo_folder, ops, message):
    with pytest.raises((ValueError, TypeError), match=message):
        accelerated(photo_folder, ops)


DATASET = r"DataLoader\(dataset, batch_size=\.\.\.\)"


MIXED = r"Sample 1 .* has an EncodedImage where sample 0 has a tensor \(3, 9, 8\).*PngEncoder"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: DataPrefetcher(EncodedImageFolder(root)), rf"DataPrefetcher\({DATASET}\)"),
        (lambda root: DataPrefetcher(str(root)), r"DataPrefetcher\(DataLoader\(dataset"),
        (lambda root: DataPrefetcher(iter(files(root))), r"the DataLoader itself\.$"),
        (
            lambda root: list(DataPrefetcher(DataLoader([first(root), torch.ones(3)], 2))),
            r"Sample 0 .* an EncodedImage where sample 1 has a tensor \(3,\).* in all samples",
        ),
        (
            lambda root: list(
                DataPrefetcher(DataLoader([torch.ones(3, 9, 8), first(root)], 2), device="cpu")
            ),
            MIXED,
        ),
        (
            lambda root: list(
                DataPrefetcher(
                    DataLoader([(torch.ones(3, 9, 8), 0), (first(root), 1)], 2, collate_fn=list),
                    device="cpu",
                    transforms=[CROP],
                )
            ),
            MIXED,
        ),
        (
            lambda root: list(DataPrefetcher([torch.ones(4, 5)], device="cpu", transforms=[CROP])),
            "neither an EncodedImage nor",
        ),
        (lambda root: first(root).mean(), r"gpuprefetch\.accelerate\(loader\)"),
        (lambda root: gpuprefetch.accelerate(ImageFolder(root)), rf"Build one of it: {DATASET}\.$"),
        (
            lambda root: gpuprefetch.accelerate(accelerated(root, PIPELINE)),
            r"got DataPrefetcher\. Pass the DataLoader that it was made from\.$",
        ),
        (
            lambda root: gpuprefetch.doctor(EncodedImageFolder(root), print),
            rf"doctor\({DATASET}, step\)\.$",
        ),
        (
            lambda root: next(DataPrefetcher(files(root), device="cpu")),
            r"write prefetcher\.next\(\), or batches = iter\(prefetcher\) once",
        ),
        (lambda root: v1.ToTensor()(first(root)), r"not decoded .* yet\. Pass transforms to Data"),
        (lambda root: v1.PILToTensor()(first(root)), r"not decoded .* yet\. Pass transforms to"),
        (lambda root: v1.functional.resize(first(root), 8), r"not decoded .* yet\. Pass transf"),
        (lambda root: RandomResizedCrop(16, (8, 100)), r"write scale=\(0\.08, 1\.0\)\.$"),
        (
            lambda root: accelerated(
                root, v2.Compose([v2.RandomResizedCrop(16, (8, 100)), PIPELINE])
            ),
            r"write scale=\(0\.08, 1\.0\)\.$",
        ),
        (lambda root: RandomResizedCrop(224, 192), r"write RandomResizedCrop\(\(224, 192\)\)\.$"),
        (
            lambda root: DataPrefetcher(files(root), device="mps"),
            r"Use device='cpu', .* in the loop: images\.to\('mps'\)\.$",
        ),
    ],
)
def test_elsewhere(photo_folder, make, message):
    with pytest.raises((ValueError, TypeError, AttributeError), match=message):
        make(photo_folder)


def first(root):
    return EncodedImageFolder(root)[0][0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("to", r"give it device=\.\.\., and leave this call out\.$"),
        ("cuda", r"give it device=\.\.\., and leave this call out\.$"),
        ("reset", r"leave reset\(\) out\.$"),
        ("bach_size", r"'DataLoader' object has no attribute.* around it has none\.$"),
    ],
)
def test_attributes_that_are_not_there(photo_folder, name, message):
    with pytest.raises(AttributeError, match=message):
        getattr(DataPrefetcher(files(photo_folder), device="cpu", transforms=[CROP]), name)


# What cannot move comes first. The message says what to write, and not to ask another function of
# this library that sends back here.
FIRST = {
    "another size for each": v2.RandomShortestSize((20, 24)),
    "a function": lambda picture: picture.rotate(90),
    "a color": v2.ColorJitter(0.4),
}


@pytest.mark.parametrize("name", FIRST)
def test_convert_transforms_does_not_lead_in_a_circle(photo_folder, name):
    ops = [FIRST[name], PIPELINE]
    with pytest.raises(ValueError, match=r"call it in the dataset, on the decoded image") as error:
        gpuprefetch.convert_transforms(v2.Compose(ops))
    assert "accelerate" not in str(error.value)
    # What the message ends with.
    decoded = ImageFolder(photo_folder, v2.Compose([v2.CenterCrop(30), *ops]))
    images, _ = next(iter(DataPrefetcher(DataLoader(decoded, 4), device="cpu")))
    assert images.shape == (4, 3, 16, 16)


def test_the_advice_for_what_comes_before_the_crop_works(photo_folder):
    color = v2.ColorJitter(0.4)
    with pytest.raises(ValueError, match=r"add one before it \(v2\.RandomResizedCrop\(224\), or"):
        accelerated(photo_folder, v2.Compose([color, PIPELINE]))
    for crops in ([v2.RandomResizedCrop(16)], [v2.Resize(20), v2.CenterCrop(16)]):
        moved = accelerated(photo_folder, v2.Compose([*crops, color, *PIPELINE.transforms[1:]]))
        assert next(iter(moved))[0].shape[1:] == (3, 16, 16)


def test_the_advice_for_a_tensor_in_place_of_an_image_works(photo_folder):
    pixels = torch.arange(3 * 9 * 8, dtype=torch.uint8).view(3, 9, 8)
    samples = [(EncodedImage(PngEncoder(pixels).to_tensor(), 0), 0), (first(photo_folder), 1)]
    loader = DataLoader(samples, 2, collate_fn=list)
    ((image, _), _) = next(iter(DataPrefetcher(loader, device="cpu", dtype=torch.uint8)))
    assert torch.equal(image[0], pixels)


def test_a_sample_without_an_image_may_have_tensors(photo_folder):
    samples = [
        {"depth": torch.ones(1, 9, 8), "image": None},
        {"depth": 2, "image": first(photo_folder)},
    ]
    loader = DataLoader(samples, 2, collate_fn=list)
    one, other = next(iter(DataPrefetcher(loader, device="cpu", transforms=[CROP])))
    assert one["image"] is None
    assert torch.equal(one["depth"], torch.ones(1, 9, 8))
    assert other["image"].shape[-2:] == (16, 16)


@pytest.mark.parametrize("other", [{}, {"image": None}])
def test_samples_are_compared_by_the_names_of_what_they_hold(photo_folder, other):
    ids = torch.arange(3)
    samples = [{"image": first(photo_folder), "ids": ids}, {"ids": ids, **other}]
    loader = DataLoader(samples, 2, collate_fn=list)
    one, another = next(iter(DataPrefetcher(loader, device="cpu", transforms=[CROP])))
    assert one["image"].shape[-2:] == (16, 16)
    assert torch.equal(another["ids"], ids)
