"""Boxes, masks and points follow their image, whatever moves it and whoever decodes it."""

import io
import threading
import time
from dataclasses import dataclass

import kornia.augmentation as K
import numpy as np
import pictures
import pytest
import torch
from kornia.geometry import Hflip
from PIL import Image
from torch.nn.functional import max_pool2d
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms._presets import ImageClassification
from torchvision.transforms.v2 import functional as F

from gpuprefetch import (
    CenterCrop,
    DataPrefetcher,
    EncodedImage,
    RandomResizedCrop,
    Resize,
    convert_transforms,
)
from gpuprefetch.images.collate import HostStage
from gpuprefetch.images.columns import Owners, fate, mark
from gpuprefetch.images.division import Share
from gpuprefetch.images.fate import Fate
from gpuprefetch.images.packer import Packer
from gpuprefetch.images.samples import Origin
from gpuprefetch.images.tail import run
from gpuprefetch.images.targets import Axis
from gpuprefetch.images.walk import PerSample, walk
from gpuprefetch.lists.fused import RandomCrop
from gpuprefetch.lists.walk import read_for_tensors
from gpuprefetch.policies.per_image import PerImage
from gpuprefetch.transforms.sampling import Sampling

SEED = 3
# torchvision computes in float32, at coordinates below 200, through up to four ops.
POINT_TOLERANCE = 1e-3
# The picture's square after JPEG, antialiasing and warps, measured at half of its brightness: pixel
# centers lie half a pixel off its edge at most, and interpolation blurs the corners.
SQUARE_TOLERANCE = 1.0


def zipped(samples):
    return tuple(zip(*samples, strict=True))


def sanitized(samples):
    return zipped(map(v2.SanitizeBoundingBoxes(), samples))


class Squares(Dataset):
    """A white square on black, and a target that says where; every third has no object at all.

    The square of a picture turned by EXIF is where a viewer sees it if ``upright``.
    """

    def __init__(self, count=6, upright=False, empty=True):
        self.count, self.upright, self.empty = count, upright, empty

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        height, width = 96 + 5 * (index % 7), 130 - 7 * (index % 5)
        x, y = 20 + 4 * (index % 6), 24 + 2 * (index % 9)
        box = [x, y, x + 40, y + 30]
        picture = np.zeros((height, width, 3), np.uint8)
        picture[box[1] : box[3], box[0] : box[2]] = 255
        mask = torch.from_numpy(picture[None, ..., 0] > 0)
        orientation = index % 8 + 1 if self.upright else None
        if self.upright:
            picture = stored(picture, orientation)
        objects = slice(0, 0 if self.empty and index % 3 == 2 else 1)
        size = {"canvas_size": (height, width)}
        corners = [[x, y], [x + 40, y + 30]]
        target = {
            "boxes": tv_tensors.BoundingBoxes(
                torch.tensor([box]).float()[objects], format="XYXY", **size
            ),
            "masks": tv_tensors.Mask(mask[objects]),
            "points": tv_tensors.KeyPoints(torch.tensor([corners]).float()[objects], **size),
            "labels": torch.tensor([index])[objects],
        }
        data = pictures.encode_jpeg(picture, quality=95, orientation=orientation)
        return EncodedImage(data, index, f"{index}.jpg"), target


class With(Squares):
    """Squares whose samples ``change`` gets."""

    def __init__(self, change, count=2):
        super().__init__(count, empty=False)
        self.change = change

    def __getitem__(self, index):
        return self.change(*super().__getitem__(index))


def with_mask(mask):
    """One picture beside this mask."""
    return With(lambda image, _: (image, {"masks": tv_tensors.Mask(mask)}), 1)


def stored(picture, orientation):
    """What a camera stores for a viewer to see ``picture`` at this EXIF orientation."""
    rows = slice(None, None, -1 if orientation in (3, 4, 7, 8) else 1)
    columns = slice(None, None, -1 if orientation in (2, 3, 6, 7) else 1)
    mirrored = picture[rows, columns]
    return np.ascontiguousarray(mirrored.swapaxes(0, 1) if orientation > 4 else mirrored)


def prefetcher(dataset, transforms, device="cpu", collate_fn=zipped, **options):
    loader = DataLoader(
        dataset,
        batch_size=options.pop("batch_size", 4),
        collate_fn=collate_fn,
        num_workers=options.pop("workers", 0),
        pin_memory=torch.device(device).type == "cuda",
    )
    return DataPrefetcher(loader, device=device, transforms=transforms, seed=SEED, **options)


def samples_of(*arguments, **options):
    """Image and target of every sample, on the CPU."""
    pairs = []
    for images, targets in prefetcher(*arguments, **options):
        assert len(images) == len(targets)
        pairs += zip(images.cpu(), targets, strict=True)
    return [
        (image, {key: value.to("cpu") for key, value in target.items()}) for image, target in pairs
    ]


# ---- the head, against torchvision


HEADS = {
    "resize": ([Resize((48, 70))], v2.Resize((48, 70))),
    "resize and crop": (
        [Resize(64), CenterCrop(56)],
        v2.Compose([v2.Resize(64), v2.CenterCrop(56)]),
    ),
    "crop": ([CenterCrop((60, 50))], v2.CenterCrop((60, 50))),
    "padding": ([CenterCrop(140)], v2.CenterCrop(140)),
    "random": ([RandomResizedCrop((50, 60), scale=(0.3, 1.0))], None),
    "flipped": ([RandomResizedCrop((50, 60), scale=(0.3, 1.0)), K.RandomHorizontalFlip()], None),
}


def framed(image, target):
    """With two corners of the picture, which tell the crop that was sampled."""
    height, width = target["points"].canvas_size
    corners = torch.tensor([[0.0, 0], [width, height]])
    return image, target | {"corners": tv_tensors.wrap(corners, like=target["points"])}


def as_torchvision(corners, whole):
    """The crop that moved the corners of a ``whole`` picture so, as torchvision carries it out."""
    height, width = corners.canvas_size
    (left, top), (right, bottom) = torch.Tensor(corners).tolist()
    if flipped := right < left:
        left, right = width - left, width - right
    y, x = whole[0] / (bottom - top), whole[1] / (right - left)
    box = [round(value) for value in (-top * y, -left * x, height * y, width * x)]

    def apply(value):
        value = F.resized_crop(value, *box, [height, width], antialias=True)
        return F.horizontal_flip(value) if flipped else value

    return apply, flipped


@pytest.mark.parametrize("name", HEADS)
def test_head_agrees_with_torchvision(name):
    transforms, reference = HEADS[name]
    dataset, flips = With(framed, 5), 0
    for index, (image, target) in enumerate(samples_of(dataset, transforms)):
        encoded, expected = dataset[index]
        picture = Image.open(io.BytesIO(encoded.data)).convert("RGB")
        apply, flipped = reference, False
        if reference is None:
            apply, flipped = as_torchvision(target["corners"], picture.size[::-1])
            flips += flipped
        # Within a level of PIL, and another for the rounding between resize and crop.
        assert (image * 255 - F.pil_to_tensor(apply(picture))).abs().max() <= 2
        # torchvision pads pictures at the end by the odd pixel, and boxes at the start.
        tolerance = 1 if name == "padding" else POINT_TOLERANCE
        for key in ("boxes", "points"):
            want = apply(expected[key])
            if key == "points" and flipped:
                want[..., 0] += 1  # torchvision mirrors points to W - 1 - x, boxes to W - x
            assert target[key].canvas_size == want.canvas_size == image.shape[1:]
            torch.testing.assert_close(
                torch.Tensor(target[key]), torch.Tensor(want), atol=tolerance, rtol=0
            )
        assert torch.equal(target["labels"], expected["labels"])
        check_mask(target["masks"], expected["masks"], apply)
    assert name != "flipped" or 0 < flips < len(dataset)


def check_mask(mask, source, apply):
    """torchvision's masks take the pixel at the top left of an output pixel, ours at its center."""
    assert mask.dtype == torch.bool
    want = apply(source)
    assert mask.shape == want.shape
    edges = max_pool2d(want.float(), 3, 1, 1) != -max_pool2d(-want.float(), 3, 1, 1)
    assert (torch.Tensor(mask) == torch.Tensor(want))[~edges].all()


# In the last two each output pixel is centered between two pixels of the mask: the second counts.
@pytest.mark.parametrize("size", [(64, 48), (96, 130), (128, 150), (48, 65), (24, 13)])
def test_masks_are_nearest(size):
    mask = torch.randint(0, 9, (96, 130), generator=torch.Generator().manual_seed(0))

    ((_, target),) = samples_of(with_mask(mask), [Resize(size)])
    exact = F.resize(mask[None], size, InterpolationMode.NEAREST_EXACT)[0]
    assert target["masks"].dtype == torch.int64
    assert torch.equal(torch.Tensor(target["masks"]).long(), exact)


@pytest.mark.parametrize(
    ("box_format", "dtype"), [("XYWH", torch.float32), ("CXCYWH", torch.int64)]
)
def test_boxes_keep_their_format(box_format, dtype):
    def formatted(image, target):
        boxes = v2.ConvertBoundingBoxFormat(box_format)(target["boxes"])
        return image, {"boxes": tv_tensors.wrap(boxes.to(dtype), like=boxes)}

    transforms = [Resize((37, 61))]
    for (_, got), (_, want) in zip(
        samples_of(With(formatted, 4), transforms),
        samples_of(Squares(4, empty=False), transforms),
        strict=True,
    ):
        assert got["boxes"].format.name == box_format
        assert got["boxes"].dtype == dtype
        xyxy = v2.ConvertBoundingBoxFormat("XYXY")(
            tv_tensors.wrap(got["boxes"].double(), like=got["boxes"])
        )
        # Whole numbers are rounded, and a corner is the sum of two of them.
        tolerance = POINT_TOLERANCE if dtype.is_floating_point else 1
        assert ((torch.Tensor(xyxy) - torch.Tensor(want["boxes"])).abs() <= tolerance).all()


# ---- everything together, against the picture itself


def check_square(image, target, tolerance=SQUARE_TOLERANCE):
    """The square is in the picture where the target says; returns whether there is one."""
    white = image.float().mean(0) > 0.5
    for value in (target["boxes"], target["points"]):
        assert value.canvas_size == tuple(white.shape)
    assert target["masks"].shape[1:] == white.shape
    if not len(target["boxes"]):
        return False
    ys, xs = white.nonzero().unbind(1)
    seen = torch.stack([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])
    assert (target["boxes"][0] - seen).abs().max() <= tolerance
    mask = torch.Tensor(target["masks"][0]).bool()
    edge = 2 * (seen[2] - seen[0] + seen[3] - seen[1])
    assert (mask ^ white).sum() <= tolerance * edge
    return True


TAILS = {
    "fused transforms alone": [],
    "torchvision": [
        v2.RandomAffine(0, translate=(0.1, 0.1), scale=(0.7, 1.0)),
        v2.Resize((80, 60)),
    ],
    "torchvision flips": [v2.Compose([v2.RandomVerticalFlip(), v2.RandomHorizontalFlip()])],
    "torchvision in containers": [
        v1.RandomHorizontalFlip(),
        v2.RandomApply([v2.RandomVerticalFlip(1.0)]),
        v2.RandomOrder([v2.RandomHorizontalFlip(), v2.Resize((80, 60))]),
        v2.Compose([v2.RandomChoice([v2.RandomHorizontalFlip(1.0), v2.Identity()])]),
    ],
    "converted": [PerImage(v2.RandomAffine(0, translate=(0.1, 0.1)))],
    "callable": [lambda images: images / 2 + 0.3],
    "sequential": [
        torch.nn.Sequential(
            K.RandomGrayscale(),
            torch.nn.Sequential(v2.RandomVerticalFlip(p=0.5), v2.Resize((80, 60))),
            K.AugmentationSequential(K.ColorJitter(0.1, 0.1, 0.1, 0.1)),
        )
    ],
    "colors in containers": [
        PerImage(v2.RandomApply([v2.ColorJitter(0.1)])),
        v1.RandomApply([v1.ColorJitter(0.1)]),
    ],
}


FUSED = [
    [CenterCrop(140)],
    [K.CenterCrop((84, 90)), K.RandomVerticalFlip()],
    [K.RandomResizedCrop((90, 100), scale=(0.9, 1.0))],
    [K.RandomCrop((84, 90)), K.RandomHorizontalFlip(), K.Resize((60, 80), align_corners=False)],
]
CROP = [RandomResizedCrop((96, 100), scale=(0.9, 1.0)), K.RandomHorizontalFlip()]


@pytest.mark.parametrize(
    "transforms",
    [*FUSED, *([*CROP, *tail] for tail in TAILS.values())],
    ids=[*map(str, range(len(FUSED))), *TAILS],
)
def test_targets_lie_on_the_picture(transforms):
    found = [check_square(*sample) for sample in samples_of(Squares(4), transforms)]
    assert found == [True, True, False, True]


@pytest.mark.parametrize(
    ("dtype", "tail"),
    [
        (torch.uint16, []),
        (torch.uint32, []),
        (torch.uint64, []),
        (torch.bool, [K.RandomGrayscale(), v2.RandomHorizontalFlip(p=1.0)]),
    ],
)
def test_masks_of_any_dtype(dtype, tail):
    kind = np.dtype(str(dtype).removeprefix("torch."))
    largest = np.iinfo(kind).max if kind.itemsize > 1 else True  # beyond the signed type
    picture = np.zeros((96, 130), kind)
    picture.flat[::7] = largest
    mask = torch.from_numpy(picture)

    ((_, target),) = samples_of(with_mask(mask), [CenterCrop((98, 132)), *tail])
    assert target["masks"].dtype == dtype
    expected = np.pad(picture, 1)
    expected = expected[:, ::-1] if tail else expected
    assert np.array_equal(torch.Tensor(target["masks"]).numpy(), expected)


def test_boxes_and_points_of_a_picture_one_pixel_high():
    """kornia spreads the pixel over the picture, where aligned corners leave a step of 0."""
    picture = np.full((1, 30, 3), 255, np.uint8)

    size = {"canvas_size": (1, 30)}
    target = {
        "boxes": tv_tensors.BoundingBoxes([[0.0, 0, 30, 1]], format="XYXY", **size),
        "points": tv_tensors.KeyPoints([[15.0, 0.5]], **size),
    }
    line = [(EncodedImage(pictures.encode_jpeg(picture), 0), target)]
    ((_, target),) = samples_of(line, [K.Resize((8, 12))])
    x1, y1, x2, y2 = target["boxes"][0].tolist()
    assert (y1, y2) == (0, 8)
    assert 0 <= x1 < x2 <= 12
    assert target["points"][0].tolist() == [6, 4]


def test_a_crop_of_padding_alone_has_nothing_in_it():
    black = 0
    for image, target in samples_of(
        Squares(8, empty=False), [CenterCrop(400), K.RandomCrop((9, 9))]
    ):
        if not image.any():
            black += 1
            x1, y1, x2, y2 = target["boxes"][0].tolist()
            assert (x2 - x1) * (y2 - y1) == 0
            assert not target["masks"].any()
    assert black > 4


@pytest.mark.parametrize("angle", [90.0, 180.0])
def test_points_turn_with_the_picture(angle):
    """A quarter turn moves corners to corners, so that the point itself can be checked."""
    plain = samples_of(Squares(4, empty=False), [Resize((96, 96))])
    turned = samples_of(
        Squares(4, empty=False), [Resize((96, 96)), v2.RandomRotation((angle, angle))]
    )
    for (_, before), (image, after) in zip(plain, turned, strict=True):
        check_square(image, after)
        x, y = (torch.Tensor(before["points"])[0] - 48).unbind(1)
        want = {90.0: (y, -x), 180.0: (-x, -y)}[angle]
        want = torch.stack(want, 1) + 48
        # kornia computes its matrix in float32.
        torch.testing.assert_close(torch.Tensor(after["points"])[0], want, atol=1e-2, rtol=0)


def test_pictures_turned_by_exif():
    transforms = [RandomResizedCrop((90, 90), scale=(0.9, 1.0)), K.RandomHorizontalFlip()]
    options = {"apply_exif": True, "batch_size": 8}
    found = [check_square(*s) for s in samples_of(Squares(8, upright=True), transforms, **options)]
    assert sum(found) == 6
    with pytest.raises(ValueError, match=r"'4.jpg' has 102 x 116.*EXIF"):
        samples_of(Squares(8, upright=True), transforms)


@pytest.mark.parametrize("exif", [False, True])
def test_targets_are_the_same_whoever_decodes(exif):
    """A worker that decodes an image crops it too; its targets must not know."""
    head = read_for_tensors([RandomResizedCrop(40), K.RandomHorizontalFlip()]).head
    dataset = Squares(8, upright=exif)
    results = []
    for on_gpu, share in [(True, 0.0), (True, 0.5), (True, 1.0), (False, 0.0)]:
        packer = Packer((head,), on_gpu, exif, Origin(SEED), Share.in_memory(share))
        images, targets = HostStage(zipped, packer)([dataset[i] for i in range(8)])
        assert images.decoded.sum() == 8 if share == 1 or not on_gpu else images.decoded.sum() < 8
        results.append(targets)
    for targets in results[1:]:
        for got, want in zip(targets, results[0], strict=True):
            assert all(torch.equal(got[key], want[key]) for key in want)


def test_an_axis_names_the_columns_of_a_sampling():
    size = np.array([[100.0, 60.0]])
    sampling = Sampling.identity(size).crop(size / 5, size / 2).clip()
    sampling = sampling.resize(size / 4).crop(-size / 10, size)
    (rows,) = sampling.rows()
    for dim, row in enumerate(rows):
        axis = Axis(*row)
        assert len({*axis}) == len(axis)  # columns in another order would be seen
        for name in Axis._fields:
            assert getattr(axis, name) == getattr(sampling, name)[0, dim]


# ---- the walk


def boxes_of(count):
    return tv_tensors.BoundingBoxes(torch.ones(count, 4), format="XYXY", canvas_size=(8, 8))


def test_one_walk_finds_all_of_a_sample():
    image, boxes, mask = EncodedImage(b"", 0), boxes_of(1), tv_tensors.Mask(torch.ones(1, 2, 2))
    label, polygons = torch.tensor(3), [[1.0, 2.0], [3.0]]
    sample = {"image": image, "target": (boxes, [mask], label), "name": "cat", "polygons": polygons}
    found = walk(sample)
    assert found.images == [image]
    assert [*map(id, found.followers)] == [id(boxes), id(mask)]
    assert found.columns == found.in_columns == []
    parts = [sample, image, sample["target"], boxes, sample["target"][1], mask, label]
    assert found.parts == {*map(id, [*parts, polygons, *polygons])}
    assert not walk("cat").has_followers and not walk(None).parts

    column = PerSample([boxes, {"mask": mask}])
    found = walk([image, column, label])
    assert found.columns == [column] and not found.followers
    assert [*map(id, found.in_columns)] == [id(boxes), id(mask)]
    assert found.has_followers


def boxed_samples(count=3):
    names = ("cat", "dog", "cow")
    return [(EncodedImage(b"", i), boxes_of(i + 1), names[i]) for i in range(count)]


@pytest.mark.parametrize(
    ("collate", "expected"),
    [
        (zipped, Fate.KEPT),
        (lambda samples: {"i": [s[0] for s in samples], "b": [s[1] for s in samples]}, Fate.KEPT),
        (lambda samples: ([s[0] for s in samples], [[s[1] for s in samples]]), Fate.KEPT),
        (lambda samples: ([s[0] for s in samples], [s[1] for s in samples[1:]]), Fate.LOST),
        (lambda samples: (samples[0][0], [s[1] for s in samples[::-1]]), Fate.LOST),
        (lambda samples: ([s[0] for s in samples], torch.cat([s[1] for s in samples])), Fate.LOST),
        (lambda samples: [s[0] for s in samples], Fate.LOST),
        (lambda samples: samples, Fate.LOST),
    ],
)
def test_the_fate_of_boxes(collate, expected):
    samples = boxed_samples()
    owners = Owners.of(samples)
    assert fate(mark(collate(samples), owners), owners) is expected


def test_the_fate_of_targets_without_any_and_of_an_item():
    plain = [(sample[0], sample[2]) for sample in boxed_samples()]
    assert fate(mark(zipped(plain), Owners.of(plain)), Owners.of(plain)) is None
    item = tuple(boxed_samples(1)[0])  # with batch_size=None
    assert mark(item, Owners.of(item)) is item
    assert fate(item, Owners.of(item)) is Fate.LOST


def test_a_marked_list_becomes_what_it_was():
    samples = boxed_samples(2)
    _, boxes, names = mark(zipped(samples), Owners.of(samples))
    assert names == ["cat", "dog"] and boxes.restored() == (samples[0][1], samples[1][1])
    assert names.with_entries(["cat"]).restored() == ("cat",)


# ---- collate functions


def test_workers_agree_with_the_main_process():
    transforms = [RandomResizedCrop(40), K.RandomHorizontalFlip(), v2.RandomAffine(20)]
    here, there = (samples_of(Squares(), transforms, workers=workers) for workers in (0, 1))
    for (image, target), (same, other) in zip(here, there, strict=True):
        assert torch.equal(image, same)
        assert all(torch.equal(target[key], other[key]) for key in target)


@pytest.mark.parametrize("tail", [[], [v2.Identity(), v2.RandomHorizontalFlip(p=1.0)]])
def test_boxes_cut_away_are_removed_with_their_labels(tail):
    def without_points(image, target):  # v2.SanitizeBoundingBoxes would leave them
        return image, {key: target[key] for key in ("boxes", "masks", "labels")}

    dataset, crop = With(without_points, 12), [RandomResizedCrop(40, scale=(0.02, 0.05)), *tail]
    gone = 0
    for (_, whole), (_, clean) in zip(
        samples_of(dataset, crop), samples_of(dataset, crop, collate_fn=sanitized), strict=True
    ):
        x1, y1, x2, y2 = torch.Tensor(whole["boxes"])[0].tolist()
        visible = min(x2 - x1, y2 - y1) >= 1
        gone += not visible
        assert [len(clean[key]) for key in ("boxes", "masks", "labels")] == [visible] * 3
        assert torch.equal(clean["masks"], whole["masks"][: int(visible)])
    assert 0 < gone < 12


def columns(samples):
    return {name: [sample[name] for sample in samples] for name in samples[0]}


@pytest.mark.parametrize("labels", ["labels", "gt_Labels"])
def test_sanitizing_samples_that_are_dicts(labels):
    def with_an_empty_box(image, target):
        boxes = target["boxes"]
        boxes = tv_tensors.wrap(torch.cat([boxes, boxes[:, [0, 1, 0, 1]], boxes]), like=boxes)
        numbers = torch.tensor([image.index, -1, image.index])
        return {labels: numbers, "picture": image, "name": str(image.index), "boxes": boxes}

    dataset = With(with_an_empty_box, 4)
    whole, cut = (
        list(prefetcher(dataset, tail, collate_fn=columns))
        for tail in ([Resize((64, 64))], [Resize((64, 64)), v2.SanitizeBoundingBoxes()])
    )
    for before, after in zip(whole, cut, strict=True):
        assert before.keys() == after.keys()
        assert torch.equal(before["picture"], after["picture"])
        assert before["name"] == after["name"]
        for i, name in enumerate(after["name"]):
            assert after[labels][i].tolist() == [int(name)] * 2
            assert torch.equal(after["boxes"][i], before["boxes"][i][[0, 2]])


@pytest.mark.parametrize("tail", [[], [v2.RandomRotation(20)]])
def test_default_collate_stacks_masks(tail):
    def segmentation(image, target):
        return image, tv_tensors.Mask(target["masks"][0].long()), str(image.index)

    dataset = With(segmentation, 4)
    loader = prefetcher(dataset, [Resize((40, 60)), *tail], collate_fn=None)
    ((images, masks, names),) = loader
    assert isinstance(masks, tv_tensors.Mask)
    assert masks.shape == (4, 40, 60)
    assert masks.dtype == torch.int64
    assert names == ("0", "1", "2", "3")
    assert type(default_collate([masks, masks])) is torch.Tensor  # other loaders are left alone
    assert ((images.mean(1) > 0.5) ^ masks.bool()).float().mean() < 0.02


def test_masks_of_other_loaders_are_plain_after_an_error():
    def misfit(image, target):
        return image, tv_tensors.Mask(torch.zeros(int(image.index) + 1, 2, 3))

    with pytest.raises(ValueError, match="is for a picture of"):
        list(prefetcher(With(misfit, 4), [Resize((40, 60))], collate_fn=None))
    masks = [tv_tensors.Mask(torch.zeros(2, 3))] * 2
    assert type(default_collate(masks)) is torch.Tensor


def test_default_collate_loses_boxes():
    dataset = Squares(4, empty=False)
    ((_, target),) = prefetcher(dataset, [Resize((40, 60))], collate_fn=None)
    assert target["boxes"].shape == (4, 1, 4)  # moved, and stacked to a plain tensor
    for i, (_, want) in enumerate(samples_of(dataset, [Resize((40, 60))])):
        assert torch.equal(target["boxes"][i], torch.Tensor(want["boxes"]))
    with pytest.raises(ValueError, match=r"PerImage moves boxes.*tuple.zip"):
        list(prefetcher(dataset, [Resize((40, 60)), v2.RandomAffine(9)], collate_fn=None))


FIELDS = ("boxes", "masks", "points")


def by_fields(samples):
    images, targets = zipped(samples)
    return default_collate(images), [[t[key] for t in targets] for key in FIELDS]


@pytest.mark.parametrize("count", [2, 3])
def test_as_many_lists_as_samples_beside_packed_images(count):
    """None of them is a sample's, also where there are as many of them."""
    transforms, data = [Resize((40, 60)), v2.RandomAffine(20)], Squares(count, empty=False)
    ((images, fields),) = prefetcher(data, transforms, collate_fn=by_fields)
    want_images, want = zip(*samples_of(data, transforms), strict=True)
    assert torch.equal(images, torch.stack(want_images))
    for got, key in zip(fields, FIELDS, strict=True):
        assert len(got) == count
        assert all(torch.equal(a, b[key]) for a, b in zip(got, want, strict=True))


def damaged(image, target):
    data = image.data[:100] if image.index in (1, 2) else image.data
    return EncodedImage(data, image.index, image.path), target | {"name": str(image.index)}


@pytest.mark.parametrize(
    ("on_error", "names", "tail"),
    [
        ("skip", ["0", "3"], [v2.RandomHorizontalFlip(p=1.0)]),
        ("replace", ["0", "3", "3", "3"], []),
    ],
)
def test_bad_images_take_their_targets_along(tail, on_error, names):
    loader = prefetcher(With(damaged, 4), [Resize((96, 96)), *tail], on_error=on_error)
    ((images, targets),) = loader
    assert [target["name"] for target in targets] == names
    assert all(check_square(*sample) for sample in zip(images, targets, strict=True))


def test_stacked_masks_of_a_batch_with_a_bad_image_are_masks():
    data = [With(damaged, 4)[index] for index in range(4)]
    data = [(image, tv_tensors.Mask(target["masks"][0])) for image, target in data]
    ((images, masks),) = prefetcher(data, [Resize((40, 60))], collate_fn=None, on_error="skip")
    assert isinstance(masks, tv_tensors.Mask)
    assert len(images) == len(masks) == 2


def test_samples_that_the_collate_function_leaves_out():
    """Many datasets give None for a file that they cannot open."""
    ((images, targets),) = prefetcher(
        [None, *(With(damaged, 5)[index] for index in range(1, 5))],
        [Resize((96, 96)), K.RandomHorizontalFlip(p=1.0)],
        collate_fn=lambda samples: zipped([sample for sample in samples if sample]),
        batch_size=5,
        on_error="skip",
    )
    assert [target["name"] for target in targets] == ["3", "4"]
    assert all(check_square(*sample) for sample in zip(images, targets, strict=True))


NAMES = {
    "names of few classes": lambda i: [("cat", "dog")[(i + k) % 2] for k in range(2)],
    "the same": lambda i: ["cat", "dog"],
    "dicts": lambda i: [{"name": f"{i}a", "parts": [f"{i}b"]}, {"name": f"{i}c", "parts": ["x"]}],
    "lists": lambda i: [[f"{i}a", f"{i}b"], [f"{i}c", f"{i}d"]],
}


def beside_packed(samples):
    images, names = zipped(samples)
    return default_collate(images), list(names)


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("collate", [default_collate, zipped, beside_packed])
def test_as_many_strings_as_samples(names, collate):
    data = [(With(damaged, 4)[index][0], NAMES[names](index)) for index in range(4)]
    options = {"collate_fn": collate, "batch_size": 2, "on_error": "skip"}
    batches = prefetcher(data, [Resize((9, 9))], **options)
    for (_, got), good in zip(batches, (0, 3), strict=True):
        ((_, want),) = [collate([(torch.zeros(1), NAMES[names](good))])]
        assert list(got) == list(want)


def test_a_sequence_that_moves_itself_stays_what_it_is(count=2):
    def packed(samples):
        images, targets = zipped(samples)
        words = pack_sequence([target["labels"] for target in targets])
        return default_collate(images), {"words": words, "names": [str(i) for i in range(count)]}

    data = Squares(count, empty=False)
    ((_, got),) = prefetcher(data, [Resize((9, 9))], collate_fn=packed, batch_size=count)
    assert isinstance(got["words"], PackedSequence)
    assert got["words"].data.tolist() == list(range(count))
    assert got["names"] == [str(i) for i in range(count)]


# ---- what cannot work


def rotated(image, target):
    size = target["boxes"].canvas_size
    boxes = tv_tensors.BoundingBoxes([[50.0, 50, 20, 10, 30]], format="CXCYWHR", canvas_size=size)
    return image, {"boxes": boxes}


def without_boxes(image, target):
    """A list without boxes, of which torchvision makes a row without numbers."""
    boxes = tv_tensors.BoundingBoxes([], format="XYXY", canvas_size=target["boxes"].canvas_size)
    return image, {"boxes": boxes}


def renewed(samples):
    return zipped([(EncodedImage(image.data, image.index), target) for image, target in samples])


@dataclass
class Record:
    boxes: tv_tensors.BoundingBoxes


class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ops = torch.nn.ModuleList([K.RandomGrayscale(), K.RandomRotation(9)])

    def forward(self, images):
        for op in self.ops:
            images = op(images)
        return images


class Mirror(v2.Transform):
    """Of a user's own."""

    def transform(self, inpt, params):
        return F.horizontal_flip(inpt)


@pytest.mark.parametrize("op", [Mirror(), v2.RandomApply([Mirror()], p=1.0)], ids=["it", "within"])
def test_targets_follow_a_transform_of_a_users_own(op):
    plain = samples_of(Squares(3, empty=False), [Resize((40, 50))])
    moved = samples_of(Squares(3, empty=False), [Resize((40, 50)), op])
    for (image, target), (mirrored, other) in zip(plain, moved, strict=True):
        assert torch.equal(mirrored, image.flip(-1))
        assert torch.equal(other["masks"], target["masks"].flip(-1))
        assert torch.equal(other["boxes"], F.horizontal_flip(target["boxes"]))


class OwnFlip(K.RandomHorizontalFlip):
    """In a module of the user's."""


GEOMETRIC = [
    K.RandomAffine(9),
    K.RandomJigsaw(),
    K.AugmentationSequential(K.RandomGrayscale(), K.RandomHorizontalFlip()),
    K.ImageSequential(K.RandomAffine(10)),
    OwnFlip(),
    Own(),
    Hflip(),
    torch.nn.Sequential(K.RandomGrayscale(), K.RandomVerticalFlip()),
    v1.RandomHorizontalFlip(),
    v1.RandomApply([v1.ColorJitter(0.1), v1.RandomAffine(9)]),
    v1.Compose([v1.RandomRotation(9)]),
    v1.TrivialAugmentWide(),
    v2.RandomRotation(9),
    v2.Compose([v2.RandomGrayscale(), v2.RandomHorizontalFlip()]),
    PerImage(v2.RandomAffine(9)),
    PerImage(v2.RandAugment()),
    PerImage(v2.RandomChoice([v2.RandomGrayscale(), v2.RandomRotation(9)])),
    Resize(9),
    RandomCrop(v2.RandomCrop(5, padding=(1, 1, 1, 1))),
    ImageClassification(crop_size=5, resize_size=6),
]
COLORS = [
    K.RandomGrayscale(),
    torch.nn.Sequential(K.RandomGrayscale()),
    v1.ColorJitter(0.1),
    v1.Lambda(lambda images: images / 2),
    v1.RandomApply([v1.ColorJitter(0.1)]),
    v2.Compose([v2.RandomGrayscale()]),
    PerImage(v2.ColorJitter(0.1)),
    PerImage(v2.RandomChoice([v2.RandomGrayscale(), v2.Identity()])),
    lambda images: images / 2,
]

REFUSED_TAILS = {
    "kornia.augmentation.*RandomAffine moves images alone": [K.RandomGamma(), K.RandomAffine(9)],
    "RandomHorizontalFlip moves images alone": [K.RandomGamma(), K.RandomHorizontalFlip()],
    "AugmentationSequential holds RandomRotation": [K.AugmentationSequential(K.RandomRotation(9))],
    "ImageSequential holds": [K.ImageSequential(K.RandomAffine(10))],
    "RandomErasing moves images alone": [K.RandomErasing()],
    "Sequential holds RandomErasing": [K.AugmentationSequential(K.RandomErasing())],
    "RandomElasticTransform moves images alone": [K.RandomElasticTransform()],
    "RandomJigsaw moves images alone": [K.RandomJigsaw()],
    "CenterCrop moves images alone": [torch.nn.Identity(), CenterCrop(9)],
    "Hflip moves images alone": [Hflip()],
    "Pad moves images alone": [v1.Pad(1), v1.Resize(9)],
    "Own holds RandomRotation, which moves images alone": [Own()],
    "OwnFlip moves images alone": [OwnFlip()],
    "Loop holds RandomRotation, which": [
        v1.Compose([v1.RandomRotation(9, expand=True), v1.Resize(9)])
    ],
    "images of 2 shapes": [v2.RandomIoUCrop()],
}


REFUSED = {message: (Squares(2), tail, {}) for message, tail in REFUSED_TAILS.items()} | {
    "a sample has none": (With(lambda i, t: t), [], {}),
    "CXCYWHR do not follow": (With(rotated), [], {}),
    "Mask is for": (With(lambda i, t: (i, tv_tensors.Mask(t["masks"][:, 1:]))), [], {}),
    r"but '1\.jpg' has 101 x 123": (
        With(lambda i, t: (i, tv_tensors.Mask(t["masks"][:, i.index :]))),
        [],
        {},
    ),
    r"Mask is for a picture of 0 \(height": (With(lambda i, _: (i, tv_tensors.Mask([]))), [], {}),
    r"shape \(1, 0\) hold none.*reshape\(-1, 4\)": (With(without_boxes), [], {}),
    "made new EncodedImages": (Squares(2), [], {"collate_fn": renewed}),
    "a sample has none.* in a tuple or a dict": (
        With(lambda i, t: [i, t["masks"]]),
        [],
        {"collate_fn": None, "batch_size": None},
    ),
    "leaves samples apart": (Squares(2), [v2.RandomAffine(9)], {"collate_fn": list}),
    "some in a Record. Return a dict": (
        With(lambda i, t: (i, Record(t["boxes"]))),
        [v2.SanitizeBoundingBoxes()],
        {},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    dataset, tail, options = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        list(prefetcher(dataset, [Resize((40, 40)), *tail], **options))


class Keeping(torch.nn.Module):
    """Keeps what it has drawn until a later line, as kornia's modules do."""

    def forward(self, images):
        self.drawn = images
        time.sleep(0.05)
        return self.drawn


@pytest.mark.parametrize("guarded", [True, False])
def test_a_transform_runs_for_one_thread_at_a_time(guarded):
    keeping, got = Keeping(), {}

    def call(number):
        # Unguarded it guards the test: one of them gets what another has sampled.
        got[number] = run(keeping, number) if guarded else keeping(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (got == {number: number for number in range(3)}) == guarded
    assert run([1].__contains__, 1)  # what cannot be referred to weakly, either


def test_a_transform_that_fails_is_named():
    def to_picture(images):
        return v1.functional.to_pil_image(images)  # which takes no batch

    with pytest.raises(ValueError, match="2/3 dim") as caught:
        list(prefetcher(Squares(2, empty=False), [Resize((40, 30)), to_picture]))
    note = "raised by the transform to_picture, which got torch.float32 (2, 3, 40, 30)"
    assert note in caught.value.__notes__


def of_tensors(transform):
    boxes = tv_tensors.BoundingBoxes([[1, 2, 3, 4]], format="XYXY", canvas_size=(8, 8))
    return DataPrefetcher(
        [(torch.rand(2, 3, 8, 8), [boxes])], device="cpu", transforms=[transform], seed=SEED
    )


@pytest.mark.parametrize("transform", GEOMETRIC, ids=lambda transform: type(transform).__name__)
def test_targets_of_images_that_came_as_tensors(transform):
    with pytest.raises(ValueError, match="these came otherwise"):
        list(of_tensors(transform))


def of_a_tensor(kind):
    image = torch.rand(3, 8, 8)
    if kind == "mask":
        return image, tv_tensors.Mask(image[0] > 0.5)
    if kind == "boxes":  # as many in each sample: the default collate stacks them
        return {
            "image": tv_tensors.Image(image),
            "boxes": tv_tensors.BoundingBoxes([[1, 2, 3, 4]], format="XYXY", canvas_size=(8, 8)),
        }
    return image, tv_tensors.KeyPoints([[1, 2]], canvas_size=(8, 8))


def images_alone(samples):
    return default_collate([s["image"] if isinstance(s, dict) else s[0] for s in samples])


@pytest.mark.parametrize(
    ("kind", "collate_fn"),
    [("mask", None), ("boxes", None), ("points", list), ("boxes", images_alone)],
)
def test_targets_beside_images_that_the_dataset_decoded(kind, collate_fn):
    loader = DataLoader([of_a_tensor(kind)] * 2, 2, collate_fn=collate_fn)
    for transforms in ([Resize(4)], [K.RandomHorizontalFlip(p=1.0)], [v2.RandomRotation(9)]):
        with pytest.raises(ValueError, match=r"these came otherwise.*plain tensors"):
            next(iter(DataPrefetcher(loader, device="cpu", transforms=transforms)))
    # What moves no pixels may have them beside it.
    (batch,) = DataPrefetcher(
        loader, device="cpu", transforms=[] if collate_fn is list else [K.RandomGamma()]
    )
    assert len(batch) == 2


@pytest.mark.parametrize("transform", COLORS, ids=lambda transform: type(transform).__name__)
def test_colors_leave_targets_where_they_are(transform):
    ((_, (boxes,)),) = of_tensors(transform)
    assert boxes.tolist() == [[1, 2, 3, 4]]


def test_targets_follow_timms_policies():
    augment = pytest.importorskip("timm.data.auto_augment")
    policy = augment.rand_augment_transform(
        "rand-m9-p1.0", {"translate_pct": 0.05, "img_mean": (9, 9, 9)}
    )
    policy.ops = [op for op in policy.ops if op.name.startswith(("Translate", "Color"))]
    tail = convert_transforms([v2.CenterCrop(150), policy, v2.PILToTensor()])[1:]
    for image, target in samples_of(Squares(8, empty=False), [Resize((150, 150)), *tail]):
        check_square(image / 255, target)


# ---- on the GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tail",
    [
        [],
        [v2.RandomHorizontalFlip()],
        TAILS["torchvision"],
        TAILS["sequential"],
    ],
)
def test_targets_on_the_gpu(tail):
    transforms = [RandomResizedCrop((96, 100), scale=(0.9, 1.0)), K.RandomHorizontalFlip(), *tail]
    for share in (0.0, 1.0):
        options = {"workers": 2, "cpu_share": share}
        loader = prefetcher(Squares(24), transforms, "cuda", **options)
        for images, targets in loader:
            assert images.is_cuda
            assert all(value.is_cuda for target in targets for value in target.values())
        results = samples_of(Squares(24), transforms, "cuda", **options)
        found = [check_square(*sample) for sample in results]
        assert found == [index % 3 != 2 for index in range(24)]
        if not tail:  # moved in the workers, by the same numbers
            for (_, target), (_, want) in zip(
                results, samples_of(Squares(24), transforms), strict=True
            ):
                assert all(torch.equal(target[key], want[key]) for key in want)
