"""Plausible mistakes: each gets a message that ends with what to do."""

import kornia.augmentation as K
import pytest
import torch
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import gpuprefetch
from gpuprefetch import DataPrefetcher, EncodedImageFolder, RandomResizedCrop, Resize

PIPELINE = v2.Compose([v2.RandomResizedCrop(16), v2.ToImage(), v2.ToDtype(torch.float32, True)])
CONVERT = r"transforms=gpuprefetch\.convert_transforms\(pipeline\)\.$"


class HorizontalFlip:
    """As albumentations' op; the library need not be there."""

    __module__ = "albumentations.augmentations.geometric.flip"

    def __call__(self, *, image):
        return {"image": image[:, ::-1]}


def folder(root):
    return EncodedImageFolder(root)


def files(root):
    return DataLoader(folder(root), batch_size=4)


def accelerated(root, ops):
    loader = DataLoader(ImageFolder(root, ops), batch_size=4)
    return gpuprefetch.accelerate(loader, device="cpu", print_plan=False)


# What is given as transforms for a loader of files, and the end of the message.
TRANSFORMS = {
    "a Compose": (PIPELINE, CONVERT),
    "v1's Compose": (v1.Compose([v1.RandomResizedCrop(16), v1.ToTensor()]), CONVERT),
    "torchvision's crop": ([v2.RandomResizedCrop(16)], CONVERT),
    "a Sequential of torchvision's": (torch.nn.Sequential(v2.RandomResizedCrop(16)), CONVERT),
    "a kornia container": (
        K.AugmentationSequential(K.RandomResizedCrop((16, 16)), K.RandomHorizontalFlip()),
        r"AugmentationSequential are hidden in it\. Write transforms=\[\*pipeline\]\.$",
    ),
    "two resizes": (
        [Resize(20), RandomResizedCrop(16)],
        r"Leave Resize out: transforms=\[RandomResizedCrop\(224\), \.\.\.\]\.$",
    ),
    "no crop": (
        [K.RandomHorizontalFlip()],
        r"transforms=\[gpuprefetch\.RandomResizedCrop\(224\), \.\.\.\]\.$",
    ),
    "ToTensor": ([RandomResizedCrop(16), v1.ToTensor()], r"Leave it out\..*" + CONVERT),
    "ToPILImage": ([RandomResizedCrop(16), v2.ToPILImage()], r"is for PIL images.*Leave it out"),
    "albumentations": (
        [RandomResizedCrop(16), HorizontalFlip()],
        r"albumentations' HorizontalFlip.*in its place: transforms=\[.*\]\.$",
    ),
    "CutMix": ([RandomResizedCrop(16), v2.CutMix(num_classes=3)], r"Mix in the training step"),
    "a threshold of levels": (
        [RandomResizedCrop(16), v2.RandomSolarize(128)],
        r"0 to 255, and images are in \[0, 1\] here\. .*: threshold=128 / 255\.",
    ),
    "a class": ([RandomResizedCrop], r"Pass an instance, as in K\.RandomHorizontalFlip\(\)"),
    "lists for views": (
        [[RandomResizedCrop(16)], [RandomResizedCrop(8)]],
        r"several lists as Views\.$",
    ),
}


@pytest.mark.parametrize("mistake", TRANSFORMS)
def test_in_transforms(photo_folder, mistake):
    transforms, message = TRANSFORMS[mistake]
    with pytest.raises((ValueError, TypeError), match=message):
        next(iter(DataPrefetcher(files(photo_folder), transforms=transforms, device="cpu")))


def test_a_compose_of_what_belongs_in_a_list_is_one(photo_folder):
    ops = [RandomResizedCrop(16), v2.RandomHorizontalFlip(), lambda images: images]
    given = (ops, v2.Compose(ops), [v2.Compose(ops[:2]), ops[2]], torch.nn.Sequential(*ops[:2]))
    first, *others = (
        next(iter(DataPrefetcher(files(photo_folder), transforms=each, device="cpu", seed=0)))[0]
        for each in given
    )
    assert all(torch.equal(first, other) for other in others)


OTHERS = {
    "a dataset": (
        lambda root: DataPrefetcher(folder(root)),
        r"DataPrefetcher\(DataLoader\(dataset, batch_size=\.\.\.\)\)",
    ),
    "a path": (lambda root: DataPrefetcher(str(root)), r"DataPrefetcher\(DataLoader\(dataset"),
    "an iterator": (lambda root: DataPrefetcher(iter(files(root))), r"the DataLoader itself\.$"),
    "a device": (lambda root: DataPrefetcher(files(root), device="gpu"), r'"cuda:1".*got \'gpu\''),
    "a decoder": (
        lambda root: DataPrefetcher(files(root), decoder="dali"),
        r'one of "auto", "cpu"',
    ),
    "a share in percent": (lambda root: DataPrefetcher(files(root), cpu_share=50), r"0\.0 to 1\.0"),
    "NHWC": (
        lambda root: list(
            DataPrefetcher([torch.zeros(4, 9, 8, 3).byte()], device="cpu", transforms=[Resize(4)])
        ),
        r"torch\.from_numpy\(image\)\.permute\(2, 0, 1\)",
    ),
    "a tensor among files": (
        lambda root: list(DataPrefetcher(DataLoader([folder(root)[0][0], torch.ones(3)], 2))),
        r"gave an EncodedImage in one sample, and Tensor in its place.*index, path\) in all\.",
    ),
    "no prefetcher": (lambda root: folder(root)[0][0].mean(), r"gpuprefetch\.accelerate\(loader\)"),
    "accelerate of a dataset": (
        lambda root: gpuprefetch.accelerate(ImageFolder(root)),
        r"Build one of it: DataLoader\(dataset, batch_size=\.\.\.\)\.$",
    ),
    "accelerate twice": (
        lambda root: gpuprefetch.accelerate(accelerated(root, PIPELINE)),
        r"got DataPrefetcher\. Pass the DataLoader that it was made from\.$",
    ),
    "no transform": (lambda root: accelerated(root, None), r"give it to the folder\.$"),
    "a color op first": (
        lambda root: accelerated(root, v2.Compose([v2.ColorJitter(0.4), PIPELINE])),
        r"ColorJitter.*Put it after the crop.*accelerate\(loader, keep_unknown=True\)\.$",
    ),
    "resized twice": (
        lambda root: accelerated(root, v2.Compose([v2.Resize(20), PIPELINE])),
        r"RandomResizedCrop cannot move.*Leave out what does so before it",
    ),
    "no tensors": (
        lambda root: accelerated(root, v2.RandomResizedCrop(16)),
        r"Add v2\.ToImage\(\) and v2\.ToDtype\(torch\.float32, scale=True\)",
    ),
    "albumentations, moved": (
        lambda root: accelerated(root, v2.Compose([HorizontalFlip(), PIPELINE])),
        r"it is albumentations', which takes NumPy arrays\. Replace it",
    ),
    "kornia's, moved": (
        lambda root: accelerated(root, v2.Compose([PIPELINE, K.ColorJitter(0.1)])),
        r"transforms=\[\*convert_transforms\(pipeline\), it\]\)\.$",
    ),
    "doctor without a loader": (
        lambda root: gpuprefetch.doctor(folder(root), print),
        r"doctor\(DataLoader\(dataset, batch_size=\.\.\.\), step\)\.$",
    ),
}


@pytest.mark.parametrize("mistake", OTHERS)
def test_elsewhere(photo_folder, mistake):
    make, message = OTHERS[mistake]
    with pytest.raises((ValueError, TypeError, AttributeError), match=message):
        make(photo_folder)
