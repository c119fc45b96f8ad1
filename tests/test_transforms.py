"""A transform list means the same fused or not: held to torchvision, PIL and kornia."""

import kornia
import kornia.augmentation as K
import numpy as np
import pytest
import torch
from pictures import draw
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from gpuprefetch import CenterCrop, DataPrefetcher, RandomResizedCrop, Resize
from gpuprefetch.lists.refused import require_fixed_size
from gpuprefetch.lists.walk import read_for_tensors
from gpuprefetch.transforms.head import apply_head
from gpuprefetch.transforms.launch import resample
from gpuprefetch.transforms.random import fold
from gpuprefetch.transforms.sampling import Sampling

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = torch.tensor([0.5] * 3)
FLIPS = [K.RandomHorizontalFlip(0.5), K.RandomVerticalFlip(0.5)]
PHOTOS = [(97, 130), (64, 64), (41, 17), (200, 33)]  # the last two divide nothing


def photos(sizes=PHOTOS):
    return [torch.from_numpy(draw(*hw, seed=i)).permute(2, 0, 1) for i, hw in enumerate(sizes)]


def read_list(transforms):
    plan = read_for_tensors(transforms)
    return plan.head, plan.tail


def run(transforms, images):
    head, tail = read_list(transforms)
    assert not tail
    keys = fold(0, np.arange(len(images)))
    rows = head.draw([image.shape[-2:] for image in images], keys)
    options = {"interpolation": head.interpolation, "antialias": head.antialias}
    result = resample(images, rows, head.size, mean=head.mean, std=head.std, **options)
    return result, rows


def box_and_flip(row):
    """The crop box (top, left, height, width) and the flips that a sampling row stands for."""
    (y_step, x_step), low, high = row[:, 1], row[:, 2].astype(int), row[:, 3].astype(int)
    return (low[0], low[1], high[0] - low[0], high[1] - low[1]), (y_step < 0, x_step < 0)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_random_resized_crop_and_flips_against_torchvision(interpolation):
    images = photos() * 4
    result, rows = run([RandomResizedCrop((24, 31), interpolation=interpolation), *FLIPS], images)
    flips = set()
    for image, row, got in zip(images, rows, result, strict=True):
        box, (vertical, horizontal) = box_and_flip(row)
        mode = v2.InterpolationMode(interpolation)
        want = F.resized_crop(image.float(), *map(int, box), (24, 31), mode, antialias=True) / 255
        want = want.clamp(0, 1)
        want = want.flip(-1) if horizontal else want
        want = want.flip(-2) if vertical else want
        flips.add((bool(vertical), bool(horizontal)))
        # torch normalizes its float weights in another order; 1e-5 is 1/400 of a level. We clamp a
        # bicubic picture between the two passes as PIL does, torch at the end only.
        off = (got - want).abs()
        assert off.max() <= 1e-5 if interpolation == "bilinear" else off.mean() <= 0.5 / 255
    assert len(flips) == 4


def test_a_wrong_flip_is_seen():
    # Negative control of the comparison above.
    images = photos([(64, 64)])
    result, _ = run([Resize((32, 32)), K.RandomHorizontalFlip(1.0)], images)
    unflipped, _ = run([Resize((32, 32))], images)
    assert (result - unflipped).abs().max() > 0.05
    torch.testing.assert_close(result, unflipped.flip(-1), atol=1e-5, rtol=0)


VALIDATION = [Resize(48), CenterCrop(40), K.Normalize(MEAN, STD)]
OF_TORCHVISION = [v2.Resize(48), v2.CenterCrop(40), v2.Normalize(MEAN, STD)]
PAD, OF_KORNIA = CenterCrop((44, 45)), [K.Resize((50, 60)), K.CenterCrop((33, 41))]
OF_KORNIA += [K.Normalize(torch.tensor(MEAN), torch.tensor(STD))]


@pytest.mark.parametrize(
    ("transforms", "theirs", "sizes", "atol"),
    [
        (VALIDATION, OF_TORCHVISION, [(224, 300), (300, 224), (97, 41)], 5e-5),
        ([PAD], [v2.CenterCrop((44, 45))], [(30, 90), (91, 30), (31, 31), (50, 50)], 1e-6),
        (OF_KORNIA, OF_KORNIA, [(97, 130)], 1e-4),
    ],
    ids=["validation", "padding", "kornia"],
)
def test_a_list_in_one_launch_gives_what_its_transforms_give(transforms, theirs, sizes, atol):
    for image in photos(sizes):
        result, rows = run(transforms, [image])
        assert rows.shape == (1, 2, 6)
        want = torch.nn.Sequential(*theirs)(image[None] / 255)
        torch.testing.assert_close(result, want, atol=atol, rtol=0)


@pytest.mark.parametrize(("size", "max_size"), [(37, None), (37, 60), (37, 200), (None, 60)])
def test_resize_keeps_the_longer_side_below_max_size_as_torchvision(size, max_size):
    sizes = [(101, 203), (203, 101), (77, 77), (20, 203), (40, 64)]
    head, _ = read_list([Resize(size, max_size=max_size)])
    lengths = head.ops[0](Sampling.identity(sizes), fold(0, np.zeros(5, int))).length.astype(int)
    for canvas, got in zip(sizes, lengths.tolist(), strict=True):
        want = F.resize(torch.zeros(1, *canvas), size and [size], max_size=max_size).shape[-2:]
        assert tuple(got) == tuple(want)


@pytest.mark.parametrize("mode", [v2.InterpolationMode.NEAREST, v2.InterpolationMode.NEAREST_EXACT])
def test_the_nearest_pixel_is_torchvisions(mode):
    images = photos()
    transforms = [Resize(29, mode), CenterCrop(24), K.RandomHorizontalFlip(1.0)]
    for image, got in zip(images, run(transforms, images)[0], strict=True):
        want = F.center_crop(F.resize(image, [29], mode), [24]).flip(-1)
        assert torch.equal((got * 255).round().to(torch.uint8), want)


@pytest.mark.parametrize("make", [Resize, RandomResizedCrop])
def test_filters_may_be_named_as_torchvision_and_pil_name_them(make):
    for name in ("BICUBIC", "BILINEAR"):
        same = [name.lower(), v2.InterpolationMode[name], Image.Resampling[name]]
        assert len({make(8, interpolation=value).op for value in same}) == 1
    assert make(8, interpolation=Image.Resampling.NEAREST).op.interpolation == "nearest-exact"


def test_crop_then_resize_does_not_blend_what_was_cut():
    image = torch.zeros(3, 40, 40, dtype=torch.uint8)
    image[:, 10:30, 10:30] = 255
    result, _ = run([K.CenterCrop((20, 20)), Resize((7, 7))], [image])
    torch.testing.assert_close(result, torch.ones_like(result), atol=1e-6, rtol=0)


KORNIA = {
    "align_corners": K.RandomResizedCrop((24, 31)),
    "half_pixel": K.RandomResizedCrop((24, 31), align_corners=False),
    "warp": K.RandomResizedCrop((24, 31), cropping_mode="resample"),
}


@pytest.mark.parametrize(("name", "op"), KORNIA.items())
def test_kornia_random_resized_crop_with_its_own_parameters(name, op):
    image = photos([(97, 130)])[0]
    result, rows = run([op], [image] * 6)
    for row, got in zip(rows, result, strict=True):
        (top, left, h, w), _ = box_and_flip(row)
        right, bottom = left + w - 1, top + h - 1
        corners = [[left, top], [right, top], [right, bottom], [left, bottom]]
        params = op.forward_parameters(torch.Size([1, 3, 97, 130]))
        params["src"] = torch.tensor([corners], dtype=params["src"].dtype)
        want = op(image[None].float() / 255, params=params)[0]
        # The warp goes through a float32 homography and grid_sample: 1e-3 is a quarter of a level.
        torch.testing.assert_close(got, want, atol=1e-3 if name == "warp" else 1e-5, rtol=0)


def test_kornia_random_crop_is_a_slice():
    image = photos([(97, 130)])[0]
    result, rows = run([K.RandomCrop((40, 30))], [image] * 5)
    for row, got in zip(rows, result, strict=True):
        top, left = row[:, 0].astype(int)
        want = image[:, top : top + 40, left : left + 30].float() / 255
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    assert len({tuple(row[:, 0]) for row in rows}) > 1


def test_same_on_batch_shares_the_draw():
    _, rows = run([K.RandomResizedCrop((8, 8), same_on_batch=True)], photos([(64, 64)]) * 4)
    assert (rows == rows[:1]).all()


def test_small_images_are_refused_where_kornia_refuses_them():
    with pytest.raises(ValueError, match=r"CenterCrop takes no image smaller .* got 20 x 30"):
        run([K.CenterCrop((24, 24))], [torch.zeros(3, 20, 30, dtype=torch.uint8)])


@pytest.mark.parametrize(
    ("transforms", "fused", "tail"),
    [
        ([RandomResizedCrop(8), K.RandomHorizontalFlip(), K.Normalize(MEAN, STD)], 3, 0),
        ([Resize(9), CenterCrop(8), K.Normalize(MEAN, STD), K.RandomErasing()], 3, 1),
        ([RandomResizedCrop(8), K.ColorJitter(0.1), K.Normalize(MEAN, STD)], 1, 2),
        ([RandomResizedCrop(8), Resize(4)], 1, 1),  # two resamplings are not one
        ([CenterCrop(8), Resize(4)], 1, 1),  # padding must not be blended
        ([RandomResizedCrop(8), K.Normalize(MEAN, STD), CenterCrop(4)], 2, 1),
        ([RandomResizedCrop(8), K.Normalize(MEAN, STD), K.RandomVerticalFlip()], 3, 0),
        ([K.RandomResizedCrop((8, 8), resample="nearest")], 0, 1),
        ([K.RandomResizedCrop((8, 8), p=0.5)], 0, 1),
        ([K.RandomResizedCrop((8, 8), cropping_mode="resample", align_corners=False)], 0, 1),
        ([K.Resize((8, 8), antialias=True)], 0, 1),
        ([K.Resize(8, side="long")], 0, 1),
        ([K.CenterCrop((8, 8), p=0.5)], 0, 1),
        ([K.RandomCrop((8, 8), padding=2)], 0, 1),
        ([K.RandomCrop((8, 8), pad_if_needed=True)], 0, 1),
        ([K.Normalize(MEAN, STD, p=0.5)], 0, 1),
        ([RandomResizedCrop(8), kornia.enhance.Normalize(HALF, HALF)], 1, 1),
        ([torch.nn.Identity()], 0, 1),
        ([], 0, 0),
    ],
)
def test_how_far_the_head_goes(transforms, fused, tail):
    head, rest = read_list(transforms)
    assert (len(head.names), len(rest)) == (fused, tail)


@pytest.mark.parametrize(
    ("transforms", "text"),
    [
        ([K.RandomHorizontalFlip(), torch.nn.Identity()], "Identity after RandomHorizontalFlip"),
        ([K.Normalize(MEAN, STD), RandomResizedCrop(8)], "RandomResizedCrop after Normalize"),
        ([K.ColorJitter(0.1), RandomResizedCrop(8)], "ColorJitter comes first and"),
        ([Resize(8)], "Resize"),
        ([], "an empty list"),
    ],
)
def test_what_stands_in_the_way_of_one_size_is_named(transforms, text):
    text = rf"and {text} does not give them the one .*RandomResizedCrop\(224\)"
    with pytest.raises(ValueError, match=text):
        require_fixed_size(*read_list(transforms))


def test_own_modules_work_alone_and_on_any_layout():
    torch.manual_seed(0)
    images = torch.stack(photos([(40, 50)] * 3))
    for memory_format in (torch.contiguous_format, torch.channels_last):
        cropped = RandomResizedCrop(16)(images.contiguous(memory_format=memory_format))
        assert cropped.shape == (3, 3, 16, 16)
        assert cropped.dtype == torch.float32
    single = CenterCrop(16)(images[0])
    torch.testing.assert_close(single[0], images[0, :, 12:28, 17:33] / 255, atol=1e-6, rtol=0)
    kept = Resize(40)(images.double() / 255)
    assert kept.dtype == torch.float64
    torch.testing.assert_close(kept, images.double() / 255, atol=1e-6, rtol=0)


def test_head_without_a_size_keeps_that_of_the_batch():
    head, _ = read_list([K.RandomHorizontalFlip(1.0), K.Normalize(MEAN, STD)])
    images = torch.stack(photos([(12, 10)] * 2))
    want = F.normalize(images.float().flip(-1) / 255, MEAN, STD)
    torch.testing.assert_close(apply_head(head, images, fold(0, [0, 1])), want, atol=5e-5, rtol=0)


WRONG = {
    "size=...": [
        lambda make=make, size=size: make(size)
        for make in (RandomResizedCrop, Resize, CenterCrop)
        for size in (None, 0, 8.0, (1, 2, 3), "8", {8: 9})
    ],
    "(scale|ratio) must be \\(low, high\\)": [
        lambda name=name, bounds=bounds: RandomResizedCrop(8, **{name: bounds})
        for name in ("scale", "ratio")
        for bounds in (0.5, None, (0.5, 0.1), (0.1, 0.5, 1.0), (0.1, float("inf")))
    ],
    "ratio must be .* 0 < low": [lambda: RandomResizedCrop(8, ratio=(0.0, 1.0))],
    "interpolation": [
        lambda value=value: Resize(8, interpolation=value) for value in ("lanczos", -1)
    ],
    "max_size": [lambda: Resize((8, 9), max_size=12), lambda: Resize(8, max_size=8)],
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_arguments_are_refused(text):
    for make in WRONG[text]:
        with pytest.raises(ValueError, match=text):
            make()


def test_sizes_are_integers_of_any_kind():
    for make in (RandomResizedCrop, Resize, CenterCrop):
        assert make(np.int64(8)).op == make(8).op
        assert make((np.int32(8), 9)).op == make([8, 9]).op
    assert run([RandomResizedCrop(8, scale=(0.5, 1.5))], photos())[0].shape == (4, 3, 8, 8)


@pytest.mark.parametrize("image", [Image.new("RGB", (9, 9)), np.zeros((9, 9, 3), np.uint8)])
def test_what_is_no_tensor_is_sent_to_the_prefetcher(image):
    for op in (RandomResizedCrop(8), Resize(8), CenterCrop(8)):
        text = rf"{type(op).__name__} takes a tensor, got {type(image).__name__}\..*EncodedImage"
        with pytest.raises(TypeError, match=text):
            v2.Compose([op])(image)


def test_a_scale_may_begin_at_zero():
    nothing = RandomResizedCrop(8, scale=(0.0, 0.0))  # fits nowhere: the largest that does
    images = photos([(40, 50)] * 2)
    torch.testing.assert_close(run([nothing], images), run([Resize((8, 8))], images))


def test_a_sequential_stands_for_its_modules():
    ops = [RandomResizedCrop(8), K.RandomHorizontalFlip(), K.ColorJitter(0.1)]
    inner = torch.nn.Sequential(*ops[:2])
    for given in (torch.nn.Sequential(*ops), [inner, ops[2]], torch.nn.Sequential(inner, ops[2])):
        head, tail = read_list(given)
        assert head.names == ("RandomResizedCrop", "RandomHorizontalFlip")
        assert tail == [ops[2]]


@pytest.mark.parametrize(
    "op",
    [
        K.RandomMixUpV2(),
        K.AugmentationSequential(K.RandomHorizontalFlip(), K.RandomMosaic((8, 8))),
        torch.nn.Sequential(K.RandomCutMixV2(use_correct_lambda=True)),
    ],
)
def test_what_mixes_images_behind_the_back_of_their_targets_is_refused(op):
    with pytest.raises(ValueError, match="mixes the images of a batch and leaves their targets"):
        read_list([RandomResizedCrop(8), op])
    assert len(read_list([RandomResizedCrop(8), lambda images: op(images)])[1]) == 1
    assert len(read_list([RandomResizedCrop(8), K.RandomJigsaw()])[1]) == 1  # of one image


def part_of(op, size):
    """The parts, ``(top, left, height, width)``, that 400 images of this size are cut to."""
    rows = read_list([op])[0].draw([size] * 400, fold(3, np.arange(400)))
    return {tuple(map(int, box_and_flip(row)[0])) for row in rows}


@pytest.mark.parametrize(
    ("size", "scale", "ratio"),
    [
        ((5, 5), (0.25, 0.25), (1, 1)),  # 2.5 pixels by 2.5
        ((9, 9), (0.25, 0.25), (1, 1)),
        ((40, 5), (4.0, 4.0), (2, 2)),  # nothing fits: as wide as it is, and 2.5 pixels high
        ((5, 40), (4.0, 4.0), (0.5, 0.5)),
    ],
)
def test_half_a_pixel_of_a_crop_goes_where_torchvisions_goes(size, scale, ratio):
    theirs = v2.RandomResizedCrop(8, scale, ratio).make_params([torch.zeros(3, *size)])
    parts = part_of(RandomResizedCrop(8, scale, ratio), size)
    assert {part[2:] for part in parts} == {(theirs["height"], theirs["width"])}


@pytest.mark.parametrize("room", range(1, 8))
def test_half_a_pixel_of_a_center_crop_goes_where_torchvisions_goes(room):
    images = photos([(20 + room, 30 + room)])
    result, _ = run([CenterCrop((20, 30))], images)
    want = F.center_crop(images[0], [20, 30]) / 255
    torch.testing.assert_close(result[0], want, atol=1e-6, rtol=0)


def test_half_a_pixel_of_a_second_images_part_goes_to_the_even_one():
    # It is half as large as the first one, whose part begins and ends at odd pixels as well.
    op = RandomResizedCrop(8).op
    keys = fold(3, np.arange(400))
    first, second = np.full((400, 2), 101.0), np.full((400, 2), 50.5)
    rows = op(Sampling.identity(first), keys).rows()
    start, end = rows[..., 2] / 2, rows[..., 3] / 2
    assert (start % 2 == 0.5).any() and (end % 2 == 0.5).any()
    moved = op(Sampling.identity(second), keys, like=first).rows()
    assert np.array_equal(moved[..., 2], np.round(start))
    assert np.array_equal(moved[..., 3], np.round(end))


def test_crops_reach_every_edge():
    rows = read_list([K.RandomCrop((4, 6))])[0].draw([(7, 8)] * 400, fold(3, np.arange(400)))
    for axis, room in enumerate((3, 2)):
        assert set(rows[:, axis, 0]) == set(range(room + 1))
    parts = part_of(RandomResizedCrop(8, (0.2, 0.5)), (12, 9))
    assert min(top for top, *_ in parts) == min(left for _, left, *_ in parts) == 0
    assert max(top + height for top, _, height, _ in parts) == 12
    assert max(left + width for _, left, _, width in parts) == 9


def test_aspect_ratios_are_log_uniform():
    ratio = (1 / 8, 8.0)
    op = RandomResizedCrop(8, (0.01, 0.01), ratio)  # which fits at the first try
    rows = read_list([op])[0].draw([(900, 900)] * 4000, fold(3, np.arange(4000)))
    boxes = np.array([box_and_flip(row)[0] for row in rows], dtype=float)
    place = (np.log(boxes[:, 3] / boxes[:, 2]) / np.log(8) + 1) / 2
    histogram = np.bincount((place.clip(0, 0.999) * 4).astype(int), minlength=4)
    assert np.abs(histogram - 1000).max() < 5 * 1000**0.5


@pytest.mark.slow
def test_crop_distribution_is_torchvisions():
    size, n, generator = (90, 120), 5_000, v2.RandomResizedCrop(8)
    torch.manual_seed(0)
    theirs = [generator.make_params([torch.zeros(3, *size)]) for _ in range(n)]
    theirs = np.array([[p["top"], p["left"], p["height"], p["width"]] for p in theirs], dtype=float)
    for op in (RandomResizedCrop(8), K.RandomResizedCrop((8, 8))):
        rows = read_list([op])[0].draw([size] * n, fold(5, np.arange(n)))
        ours = np.array([box_and_flip(row)[0] for row in rows], dtype=float)
        for column in range(4):
            below = [(boxes[:, column, None] <= np.arange(121)).mean(0) for boxes in (ours, theirs)]
            # Kolmogorov-Smirnov, two samples of n: passed by chance once in 1,000.
            assert np.abs(below[0] - below[1]).max() < 1.95 * np.sqrt(2 / n)
        area_ours, area_theirs = (x[:, 2] * x[:, 3] for x in (ours, theirs))
        assert abs(area_ours.mean() / area_theirs.mean() - 1) < 0.04


@pytest.mark.slow
def test_crop_fallback_is_torchvisions_on_a_strip():
    head, _ = read_list([RandomResizedCrop(8)])
    rows = head.draw([(20, 400)] * 50, fold(1, np.arange(50)))
    boxes = {box_and_flip(row)[0] for row in rows if box_and_flip(row)[0][2] == 20}
    assert (0, 186, 20, 27) in boxes  # centered, full height, ratio 4/3


@pytest.mark.parametrize("channels", [1, 3])
def test_a_second_tensor_that_would_not_follow_is_refused(channels):
    images, beside = torch.rand(4, 3, 8, 8), torch.rand(4, channels, 8, 8)
    flip, same = [K.RandomHorizontalFlip()], [torch.abs]
    with pytest.raises(ValueError, match=rf"would leave \(4, {channels}, 8, 8\) beside it"):
        list(DataPrefetcher([(images, beside)], device="cpu", transforms=flip))
    for other, transforms in ((beside[:, 0], flip), (beside[..., 1:], flip), (beside, same)):
        (batch,) = DataPrefetcher([(images, other)], device="cpu", transforms=transforms)
        assert batch[1] is other


def test_the_docstrings_example_of_a_sampling():
    sampling = Sampling.identity([[1, 400]])
    ones = np.ones((1, 2))
    crop = sampling.crop(np.array([[0, 50.0]]), np.array([[1, 100.0]]))
    resized = crop.clip().resize(np.array([[1, 200.0]]))
    assert resized.rows()[0, 1].tolist() == [49.75, 0.5, 50, 150, 0, 200]
    assert resized.flip(ones > 0).rows()[0, 1].tolist() == [149.25, -0.5, 50, 150, 0, 200]
    four, two = Sampling.identity([[4, 4]]), 2 * ones
    for options, centers in (
        ({}, [0.5, 2.5]),
        ({"align_corners": True}, [0, 3]),
        ({"first_pixel": True}, [-0.5, 1.5]),
    ):
        origin, step, *_ = four.resize(two, **options).rows()[0, 0]
        assert [origin, origin + step] == centers
