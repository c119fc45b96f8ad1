"""The kernel against its twin, the twin against PIL and torch, and the path of a worker."""

import functools
import importlib.util
import itertools
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

from gpuprefetch.transforms import kernel as kernels
from gpuprefetch.transforms import launch as _resample
from gpuprefetch.transforms import launch_table
from gpuprefetch.transforms.launch import resample
from gpuprefetch.transforms.pieces import Places
from gpuprefetch.transforms.reference import check_each, resample_reference, resample_uint8

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZES = [(4, 16), (5, 19)]  # the second divides nothing


def picture(height, width, channels=3, seed=0):
    """Noise on slopes, with a black and a white block: values of all kinds, and hard edges."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randint(0, 60, (channels, height, width), generator=generator)
    image += torch.arange(width) * 150 // width + torch.arange(height)[:, None] * 45 // height
    image[:, height // 4 : height // 2, width // 4 : width // 2] = 0
    image[:, height // 2 : height * 3 // 4, width // 2 : width * 3 // 4] = 255
    return image.to(torch.uint8)


def axis(lo, length, size, flip=False, whole=None, start=0):
    """Resize ``length`` pixels from ``lo`` on to ``whole``, and take ``size`` from ``start`` on."""
    step = length / (whole or size)
    origin = lo + (start + 0.5) * step - 0.5
    if flip:
        origin, step = origin + step * (size - 1), -step
    return origin, step, lo, lo + length, 0, size


def aligned(lo, length, size):
    return lo, (length - 1) / (size - 1), lo, lo + length, 0, size


def padded(length, size):
    """All of a too short axis as it is, in the middle."""
    first = (size - length) // 2
    return -first, 1, 0, length, first, first + length


def everything(size):
    """One image and its two rows for every kind of row."""
    height, width = size
    return [
        (picture(9, 37), axis(2, 6, height), axis(7, 27, width)),
        (picture(9, 37), axis(2, 6, height, flip=True), axis(7, 27, width, flip=True)),
        (picture(7, 14), axis(3, 3, height), axis(2, 8, width, flip=True)),  # enlarged
        (picture(8, 44), axis(0, 8, height), axis(0, 44, width)),  # more than 4 taps
        (picture(3, 11), padded(3, height), padded(11, width)),
        (picture(12, 40), axis(0, 12, height, False, 9, 3), axis(0, 40, width, False, 25, 3)),
        (picture(8, 25), aligned(1, 6, height), aligned(2, 21, width)),
        (picture(*size), axis(0, height, height), axis(0, width, width)),  # a finished picture
        (picture(*size), axis(0, height, height), axis(0, width, width, flip=True)),
        (picture(1, 1), axis(0, 1, height), axis(0, 1, width)),
        (picture(1, 9), aligned(0, 1, height), axis(4, 5, width)),
        (picture(9, 1), axis(0, 9, height), axis(0, 1, width)),
    ]


def batch(cases, device="cpu"):
    images, *rows = zip(*cases, strict=True)
    return [image.to(device) for image in images], np.array(rows, dtype=np.float64).swapaxes(0, 1)


def launch(images, sampling, size, **options):
    """The kernel, compiled for images on CUDA and interpreted for others."""
    return _resample.resample_triton(images, sampling, size, **options).cpu()


def assert_as_good_as_eager(result, images, sampling, size, **options):
    """Within 2 x the twin's own error against float64, + 1e-6; and within 1e-4 of the twin."""
    images = [image.cpu() for image in images]
    eager = resample_reference(images, sampling, size, **options).double()
    exact = resample_reference(images, sampling, size, **options | {"dtype": torch.float64})
    assert not result.isnan().any()
    assert (result - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-6
    if options.get("dtype", torch.float32) == torch.float32:
        assert (result - eager).abs().max() <= 1e-4


# --- The kernel ---


FORMS = list(itertools.product(SIZES, ["bilinear", "bicubic"], [True, False]))
if not torch.cuda.is_available():
    FORMS = [FORMS[i] for i in (0, 3, 5, 6)]  # each pair: the interpreter takes seconds for one


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize(("size", "interpolation", "antialias"), FORMS)
def test_kernel_matches_twin(kernel_device, size, interpolation, antialias):
    cases = everything(size)
    if kernel_device.type == "cpu":  # half of them in the first size, the others in the second
        cases = cases[SIZES.index(size) :: 2]
    images, sampling = batch(cases, kernel_device)
    options = {"interpolation": interpolation, "antialias": antialias, "mean": MEAN, "std": STD}
    result = launch(images, sampling, size, **options)
    assert_as_good_as_eager(result, images, sampling, size, **options)


@pytest.mark.usefixtures("large_tiles")
def test_the_kernel_and_the_launcher_follow_one_table(kernel_device, monkeypatch):
    images, sampling = batch(everything(SIZES[0])[:3], kernel_device)
    expected = launch(images, sampling, SIZES[0], mean=MEAN)
    fields = launch_table.IMAGE.descr[::-1]  # another order, which both sides read from here
    more = launch_table.OWN_IMAGE.descr[len(fields) :]
    monkeypatch.setattr(launch_table, "IMAGE", np.dtype(fields))
    monkeypatch.setattr(launch_table, "OWN_IMAGE", np.dtype([*fields, *more[::-1]]))
    monkeypatch.setattr(_resample, "IMAGE", launch_table.IMAGE)
    monkeypatch.setattr(_resample, "OWN_IMAGE", launch_table.OWN_IMAGE)
    assert launch_table.offset("address") > kernels._ADDRESS.value  # guards the test itself
    spec = importlib.util.spec_from_file_location("kernel_of_another_order", kernels.__file__)
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    monkeypatch.setattr(_resample, "kernel", other)
    assert torch.equal(launch(images, sampling, SIZES[0], mean=MEAN), expected)
    into_own_sizes(images, sampling, [SIZES[0]] * 3, expected, mean=MEAN)


def into_own_sizes(images, sampling, sizes, want, memory_format=None, fill=-9.0, **coloring):
    """Launch images into results of their own sizes in one buffer, and compare each."""
    places = Places.in_turn(np.array(sizes), memory_format)
    buffer = torch.full((places.shape[0] + 1,), fill, device=images[0].device)
    outs = places.pieces(buffer)
    request = check_each(images, sampling, outs, np.arange(len(outs)), **coloring)
    _resample.launch_apart(images, request)
    for got, one in zip(outs, want, strict=True):
        assert torch.equal(got.cpu(), one.cpu())
    unused = torch.ones(len(buffer), dtype=bool)
    for out in places.pieces(unused):
        out.zero_()
    assert bool((buffer.cpu()[unused] == fill).all())


OWN_SIZES = [(1, 1), (3, 40), (18, 35)]  # the last one has two programs down and across


@pytest.fixture(scope="module")
def launched_alone():
    """Images on a device, their rows, and what a launch for each of them gives."""

    @functools.cache
    def launched(device):
        images = []
        rows = []
        want = []
        for number, size in enumerate(OWN_SIZES):
            height, width = 5 + 3 * number, 20 - 6 * number
            image = picture(height, width, seed=number).to(device)
            row = axis(0, height, size[0]), axis(0, width, size[1], flip=number % 2 > 0)
            images.append(image)
            rows.append(row)
            want.append(launch([image], np.array([row]), size, mean=MEAN, std=STD)[0])
        return images, np.array(rows), want

    return launched


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_results_of_their_own_sizes_are_those_of_one_size(
    launched_alone, kernel_device, memory_format
):
    """Each is bit by bit what a launch for it alone gives, and nothing is written beside it."""
    images, rows, want = launched_alone(kernel_device)
    into_own_sizes(images, rows, OWN_SIZES, want, memory_format, mean=MEAN, std=STD)


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_padding_has_a_color(kernel_device, dtype):
    colors = {} if dtype == torch.uint8 else {"mean": MEAN, "std": STD}
    size = SIZES[1]
    cases = [(picture(3, 11), padded(3, size[0]), padded(11, size[1]))]
    images, sampling = batch(cases, kernel_device)
    options = {"fill": (123.0, 117.0, 104.0), "dtype": dtype, **colors}
    result = launch(images, sampling, size, **options)
    twin = resample_reference([image.cpu() for image in images], sampling, size, **options)
    assert (result.double() - twin.double()).abs().max() <= 1e-5
    levels = torch.tensor([123.0, 117, 104])
    if colors:
        levels = (levels / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    torch.testing.assert_close(result[0, :, 0, 0].float(), levels)
    assert torch.equal(result[0, :, -1, -1], result[0, :, 0, 0])


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("sides", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)])
def test_padding_at_one_side(kernel_device, sides):
    """A launch that leaves nothing to padding does not look for it."""
    image = picture(6, 9)
    rows = [
        (-before, 1, 0, length, before, before + length)
        for length, before in zip((6, 9), sides[::2], strict=True)
    ]
    size = (6 + sides[0] + sides[1], 9 + sides[2] + sides[3])
    images, sampling = batch([(image, *rows)], kernel_device)
    (result,) = launch(images, sampling, size, fill=(9.0, 200.0, 77.0), dtype=torch.uint8)
    want = torch.tensor([9, 200, 77], dtype=torch.uint8).view(3, 1, 1).repeat(1, *size)
    want[:, sides[0] : sides[0] + 6, sides[2] : sides[2] + 9] = image
    assert torch.equal(result, want)


def test_the_twin_of_results_of_their_own_sizes():
    sizes = [(4, 16), (1, 1), (33, 2)]
    images = [picture(8, 9, seed=seed) for seed in range(3)]
    rows = np.array([(axis(0, 8, h), axis(0, 9, w)) for h, w in sizes])
    outs = Places.in_turn(np.array(sizes), None).pieces(torch.empty(1000))
    _resample.resample_each(images, rows, outs, mean=MEAN)
    for image, row, size, out in zip(images, rows, sizes, outs, strict=True):
        assert torch.equal(out, resample_reference([image], row[None], size, mean=MEAN)[0])


@pytest.mark.usefixtures("large_tiles")
def test_the_nearest_pixel(kernel_device):
    size = SIZES[1]
    images, sampling = batch(everything(size)[:8], kernel_device)
    options = {"interpolation": "nearest", "dtype": torch.uint8}
    result = launch(images, sampling, size, **options)
    for image, rows, got in zip(images, sampling, result, strict=True):
        want = image.cpu()
        for dim, (origin, step, lo, hi, first, last) in zip((1, 2), rows, strict=True):
            index = np.arange(size[dim - 1])
            pixel = np.floor(origin + step * index.clip(first, last - 1) + 0.5 + 1e-9)
            want = want.index_select(dim, torch.from_numpy(pixel.clip(lo, hi - 1)).long())
            outside = torch.from_numpy((index < first) | (index >= last))
            want = want.masked_fill(outside[:, None] if dim == 1 else outside, 0)
        assert torch.equal(got, want)
        assert torch.equal(resample_uint8(image.cpu(), rows, size, interpolation="nearest"), want)


def test_kernel_comparison_can_fail(kernel_device):
    images, sampling = batch(everything((4, 16))[:1], kernel_device)
    result = launch(images, sampling, (4, 16))
    assert_as_good_as_eager(result, images, sampling, (4, 16))
    for wrong in (axis(7, 27, 16, flip=True), axis(8, 27, 16)):
        sampling[0, 1] = wrong
        with pytest.raises(AssertionError):
            assert_as_good_as_eager(result, images, sampling, (4, 16))


def test_kernel_tiles(kernel_device):
    """Several programs and strips an image, the last ones only partly filled."""
    size = _resample.ROWS * _resample.STRIPS + 1, _resample.COLS + 1
    cases = [(picture(5, 8), axis(1, 3, size[0]), axis(2, 5, size[1], flip=True))]
    images, sampling = batch(cases, kernel_device)
    result = launch(images, sampling, size)
    assert_as_good_as_eager(result, images, sampling, size)


@pytest.mark.parametrize(
    ("dtype", "memory_format"),
    [
        (torch.float16, torch.channels_last),
        # The interpreter truncates float32 to bfloat16, so only a GPU run says anything here.
        pytest.param(torch.bfloat16, torch.contiguous_format, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.usefixtures("large_tiles")
def test_kernel_output_forms(kernel_device, dtype, memory_format):
    images, sampling = batch(everything((5, 19))[:2], kernel_device)
    options = {"dtype": dtype, "memory_format": memory_format, "mean": MEAN, "std": STD}
    for run in (_resample.resample_triton, resample_reference):
        result = run(images, sampling, (5, 19), **options)
        assert result.dtype == dtype and result.is_contiguous(memory_format=memory_format)
        out = result.new_full((4, 3, 5, 19), -1).to(memory_format=memory_format)
        assert run(images, sampling, (5, 19), out=out, positions=[3, 0], **options) is out
        assert torch.equal(out[[3, 0]], result) and bool((out[1:3] == -1).all())
        assert_as_good_as_eager(result.cpu(), images, sampling, (5, 19), **options)


def colored(image, dtype, mean=(0, 0, 0), std=(1, 1, 1)):
    """A picture in the form of the result, by the formula."""
    if dtype == torch.uint8:
        return image
    compute = torch.promote_types(dtype, torch.float32)
    return TF.normalize(image.to(compute) / 255, mean, std).to(dtype)


@pytest.mark.parametrize("colors", [{}, {"mean": MEAN, "std": STD}, {"std": STD}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_pictures_of_their_final_size_in_either_layout(dtype, colors):
    colors = {} if dtype == torch.uint8 else colors
    size, places = (5, 7), [0, 1, 3]
    pictures = [picture(*size, seed=seed) for seed in places]
    rows = np.array([[(0, 1, 0, length, 0, length) for length in size]] * 3, float)
    layouts = torch.contiguous_format, torch.channels_last
    for of_workers, layout in itertools.product(("planar", "pixels"), layouts):
        given = [strided(image, of_workers) for image in pictures]
        out = torch.full((4, 3, *size), 7, dtype=dtype).to(memory_format=layout)
        resample_reference(given, rows, size, dtype=dtype, out=out, positions=places, **colors)
        for image, place in zip(pictures, places, strict=True):
            assert torch.equal(out[place], colored(image, dtype, **colors))
        assert bool((out[2] == 7).all())


@pytest.mark.usefixtures("large_tiles")
def test_kernel_rounds_to_uint8(kernel_device):
    images, sampling = batch(everything((5, 19))[1:3], kernel_device)
    options = {"interpolation": "bicubic", "dtype": torch.uint8}
    result = launch(images, sampling, (5, 19), **options)
    difference = result.int() - resample_reference(
        [image.cpu() for image in images], sampling, (5, 19), **options
    )
    # A level apart where float32 rounds to the other side of one half.
    assert difference.abs().max() <= 1
    assert (difference != 0).float().mean() < 0.01


@pytest.mark.parametrize("channels", [1, 4])  # a group of three repeats one
def test_kernel_channels(kernel_device, channels):
    cases = [(picture(9, 20, channels), axis(1, 8, 4), axis(3, 17, 9))]
    images, sampling = batch(cases, kernel_device)
    options = {"mean": [0.1 * c for c in range(channels)], "std": [0.5] * channels}
    result = launch(images, sampling, (4, 9), **options)
    assert_as_good_as_eager(result, images, sampling, (4, 9), **options)


def strided(image, layout):
    if layout == "planar":
        return image.contiguous()
    if layout == "pixels":
        return image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    if layout == "slice of a flat buffer":
        flat = torch.zeros(image.numel() + 7, dtype=image.dtype, device=image.device)
        flat[7:] = image.flatten()
        return flat[7:].view(image.shape)
    every_other = image.new_zeros(*image.shape, 2)
    every_other[..., 1] = image
    return every_other[..., 1]


LAYOUTS = ["planar", "pixels", "slice of a flat buffer", "every other element"]


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("layouts", [["pixels"] * 2, LAYOUTS])
def test_kernel_source_strides(kernel_device, layouts):
    images, sampling = batch(everything((5, 19))[: len(layouts)], kernel_device)
    images = [image / 255 if layouts is LAYOUTS else image for image in images]
    changed = [strided(image, layout) for image, layout in zip(images, layouts, strict=True)]
    result = launch(changed, sampling, (5, 19))
    assert_as_good_as_eager(result, images, sampling, (5, 19))


@pytest.mark.parametrize(
    ("path", "antialias"), [(_resample.resample_triton, True), (resample_reference, False)]
)
def test_nothing_outside_of_the_box_is_read(kernel_device, path, antialias):
    image = torch.full((3, 20, 30), torch.nan, device=kernel_device)
    image[:, 4:13, 6:25] = 0.5
    rows = np.array([[axis(4, 9, 4), axis(6, 19, 7, flip=True)]])
    result = path([image], rows, (4, 7), antialias=antialias)
    assert (result - 0.5).abs().max() < 1e-6


def test_large_coordinates(kernel_device):
    """A checkerboard punishes every error of the coordinate with 255 levels per pixel."""
    image = (torch.arange(8192) % 2 * 255).to(torch.uint8).expand(1, 2, 8192)
    cases = [
        (image, axis(0, 2, 2), axis(8170, 21, 19)),
        (image, axis(0, 2, 2), axis(0, 8192, 19, True, 8001, 7980)),
    ]
    images, sampling = batch(cases, kernel_device)
    given, options = (images, sampling, (2, 19)), {"interpolation": "bicubic"}
    result = launch(*given, **options)
    assert_as_good_as_eager(result, *given, **options)
    sampling[:, 1, 0] = sampling[:, 1, 0].astype(np.float32)  # what float32 would have done
    with pytest.raises(AssertionError):
        assert_as_good_as_eager(result, *given, **options)


@pytest.mark.gpu
def test_resample_launches_on_the_current_stream():
    images, sampling = batch(everything(SIZES[1]), "cuda")
    expected = resample_reference(images, sampling, SIZES[1], mean=MEAN, std=STD)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = [torch.zeros_like(image).copy_(image) for image in images]
        result = resample(late, torch.from_numpy(sampling), SIZES[1], mean=MEAN, std=STD)
    stream.synchronize()
    assert (result - expected).abs().max() <= 1e-4


# --- The twin ---


def assert_as_on_pil(expected, image, rows, interpolation):
    """Both CPU paths against the picture that torchvision v2 makes of a PIL image."""
    expected = torch.from_numpy(np.array(expected)).permute(2, 0, 1)
    options = {"size": expected.shape[1:], "interpolation": interpolation}
    twin = resample_reference([image], rows[None], **options)[0] * 255 - expected
    worker = resample_uint8(image, rows, **options).float() - expected
    # PIL rounds after each axis, hence a quarter of a level on average.
    assert twin.abs().mean() <= 0.5
    assert worker.abs().mean() <= 0.5
    # Pillow 13 filters along y first where that is less work, as in a tall image. What bicubic
    # overshoots at edges is cut off after the first axis, so there the order shows.
    swapped = interpolation == "bicubic" and rows[0, 3] - rows[0, 2] > rows[1, 3] - rows[1, 2]
    assert twin.abs().max() <= (20 if swapped else 3)
    assert worker.abs().max() <= (20 if swapped else 1)


BOXES = [(10, 20, 300, 310, False), (3, 41, 181, 333, True), (60, 90, 120, 97, False)]


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("top", "left", "height", "width", "flip"), BOXES)
def test_random_resized_crop_as_on_pil(interpolation, top, left, height, width, flip):
    image = picture(375, 500)
    pil = Image.fromarray(image.permute(1, 2, 0).numpy())
    mode = InterpolationMode(interpolation)
    expected = TF.resized_crop(pil, top, left, height, width, [224, 224], mode, antialias=True)
    expected = TF.horizontal_flip(expected) if flip else expected
    rows = np.array([axis(top, height, 224), axis(left, width, 224, flip)])
    assert_as_on_pil(expected, image, rows, interpolation)
    rows[1] = axis(left, width, 224, not flip)
    with pytest.raises(AssertionError):
        assert_as_on_pil(expected, image, rows, interpolation)


@pytest.mark.parametrize(
    ("interpolation", "place"),
    [("bilinear", axis), ("bicubic", axis), ("bilinear", aligned)],
)
@pytest.mark.parametrize("size", [(16, 16), (7, 45)])
def test_twin_is_interpolate(interpolation, place, size):
    image, antialias = picture(37, 30).double() / 255, place is axis
    rows = np.array([[place(3, 31, size[0]), place(5, 25, size[1])]])
    corners = {"antialias": True} if antialias else {"align_corners": True}
    expected = F.interpolate(image[None, :, 3:34, 5:30], size, mode=interpolation, **corners)
    options = {"interpolation": interpolation, "antialias": antialias, "dtype": torch.float64}
    result = resample_reference([image], rows, size, **options)
    torch.testing.assert_close(result, expected)


def test_the_callers_images_are_left_alone():
    rows = np.array([[axis(0, 12, 12), axis(0, 17, 17)]])
    images = [picture(12, 17) / 255]
    expected = TF.normalize(images[0], MEAN, STD)
    result = resample(images, rows, (12, 17), mean=MEAN, std=torch.tensor(STD))
    torch.testing.assert_close(result[0], expected)
    assert torch.equal(images[0], picture(12, 17) / 255)


def beside(length, size, start):
    """A crop of ``size`` pixels from ``start`` on that holds nothing of the axis."""
    first = size if start < 0 else 0
    return start, 1, 0, length, first, first


OUTSIDE = {
    "above": (beside(4, 8, -8), padded(6, 8)),
    "below": (beside(4, 8, 4), padded(6, 8)),
    "left": (padded(4, 8), beside(6, 8, -40)),
    "right": (padded(4, 8), beside(6, 8, 40)),
    "both": (beside(4, 8, 9), beside(6, 8, -9)),
    "mirrored": (padded(4, 8), (47, -1, 0, 6, 8, 8)),
}


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_crop_of_padding_alone_is_black(kernel_device, interpolation):
    images, rows = [picture(4, 6)] * len(OUTSIDE), np.array([*OUTSIDE.values()], np.float64)
    black, ways = torch.zeros(len(OUTSIDE), 3, 8, 8), {"interpolation": interpolation}
    for image, own in zip(images, rows, strict=True):
        assert not resample_uint8(image, own, (8, 8), **ways).any()
    for colors in ({}, {"mean": MEAN, "std": STD}):
        expected = TF.normalize(black, **colors) if colors else black
        twin = resample_reference(images, rows, (8, 8), **ways, **colors)
        torch.testing.assert_close(twin, expected)
    if interpolation == "bicubic" or kernel_device.type == "cuda":
        on_device = [image.to(kernel_device) for image in images]
        torch.testing.assert_close(launch(on_device, rows, (8, 8), **ways, **colors), expected)
    no, at = np.zeros(len(rows), bool), np.arange(len(rows))
    plan = _resample.plan_rows(rows, np.array([[4, 6]] * 6), no, (8, 8), interpolation, True)
    for i in at:  # what makes the kernel look at the ends
        assert _resample.arrange(plan[i : i + 1], at[:1], at[:1], [1], (8, 8)).padded


# --- One image in a worker ---


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_resample_uint8_matches_twin(interpolation, antialias, size):
    for image, *rows in everything(size):
        options = {"interpolation": interpolation, "antialias": antialias}
        exact = resample_reference([image], [rows], size, **options, dtype=torch.float64)[0]
        for layout in ("planar", "pixels"):
            result = resample_uint8(strided(image, layout), np.array(rows), size, **options)
            assert result.dtype == torch.uint8
            assert (result - exact * 255).abs().max() <= 1.2  # two roundings


@pytest.mark.parametrize("times", [2, 3, 5])
def test_resample_uint8_enlarges_on_the_half_pixel_grid(times):
    """As kornia without align_corners: for odd factors pixels lie on those of an aligned grid."""
    image, size = picture(6, 10), (6 * times, 10 * times)
    rows = np.array([axis(0, 6, size[0]), axis(0, 10, size[1], flip=True)])
    expected = F.interpolate(image[None].double(), size, mode="bilinear")[0].flip(-1)
    result = resample_uint8(image, rows, size, antialias=False)
    assert (result - expected).abs().max() <= 0.5001


def test_resample_uint8_keeps_pixels_together():
    # As a decoder gives them, and the GPU takes them: to turn planes into them takes its time.
    image = strided(picture(40, 60), "pixels")[:, 3:33, 10:55]
    for flip in (False, True):
        result = resample_uint8(image, np.array([axis(0, 30, 8), axis(0, 45, 9, flip)]), (8, 9))
        assert result.permute(1, 2, 0).is_contiguous()


def test_resample_uint8_owns_its_memory():
    image = picture(8, 8)
    result = resample_uint8(image, np.array([axis(0, 8, 8), axis(0, 8, 8)]), (8, 8))
    assert torch.equal(result, image)
    image.zero_()
    assert result.any()


# --- What is refused ---


def rows_with(**changes):
    names = ["origin", "step", "lo", "hi", "first", "last"]
    row = dict(zip(names, axis(0, 8, 8), strict=True)) | changes
    return np.array([[axis(0, 8, 8), tuple(row.values())]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": [picture(8, 8)[0]]}, "images must be (C, H, W)"),
        ({"images": [picture(8, 8).int()]}, "uint8 or floating point, got 3-D torch.int32"),
        ({"sampling": rows_with(hi=9)}, "a source of 8 and a result of 8 pixels"),
        ({"sampling": rows_with(lo=8)}, "sampling[0, 1]"),
        ({"sampling": rows_with(lo=0.5)}, "sampling[0, 1]"),
        ({"sampling": rows_with(last=9)}, "sampling[0, 1]"),
        ({"sampling": rows_with(origin=2.0)}, "sampling[0, 1]"),
        ({"sampling": rows_with(step=np.nan)}, "sampling[0, 1]"),
        ({"mean": [0.5, 0.5]}, "mean must have 3 values"),
    ],
)
@pytest.mark.parametrize("path", [_resample.resample_triton, resample])
def test_errors(path, changes, message):
    arguments = {"images": [picture(8, 8)], "sampling": rows_with()} | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        path(**arguments, size=(8, 8))


def laid_out(size, interpolation="bilinear", device="cpu", top=0):
    """Three images in one piece, with a launch for each, and how they are sampled one by one.

    Rows above ``top`` are not read.
    """
    # The second one with its axes changed.
    images = [picture(h, w, seed=h).to(device) for h, w in [(7, 11), (11, 5), (5, 9)]]
    views = [images[0], images[1].mT, images[2]]
    transposed = np.array([False, True, False])
    sizes = np.array([view.shape[1:] for view in views])
    rows = np.array([(axis(top, h - top, size[0]), axis(0, w, size[1])) for h, w in sizes])
    plan = _resample.plan_rows(rows, sizes, transposed, size, interpolation, True)
    flat = torch.cat([image.permute(1, 2, 0).flatten() for image in images])
    places = np.array([2, 0, 3])
    offsets = np.cumsum([0, images[0].numel(), images[1].numel()])
    table = _resample.arrange(plan, places, offsets, [1, 1, 1], size)
    assert table.steps == [3, 0, 3]  # each with the kernel for its own
    assert np.array_equal(_resample.by_place(table.words, 4)[places]["strides"], plan["strides"])
    return flat, table, views, rows


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize(
    "interpolation", ["bilinear", pytest.param("bicubic", marks=pytest.mark.gpu)]
)
def test_a_plan_gives_what_the_images_give(interpolation, kernel_device):
    flat, table, views, rows = laid_out((6, 7), interpolation, kernel_device)
    options = {"interpolation": interpolation, "mean": MEAN, "std": STD}
    want = _resample.resample_triton(views, rows, (6, 7), **options)
    colors = _resample.coloring(3, torch.uint8, torch.float32, MEAN, STD)
    layouts = torch.contiguous_format, torch.channels_last
    # Other kernels for what is not aligned, and for other strides: none is taken for another.
    forms = list(itertools.product([0, 1, 0], layouts))
    if kernel_device.type == "cpu":  # where nothing is compiled
        forms = forms[3:4]
    for shift, layout in forms:
        out = torch.full((4, 3, 6, 7), -9.0, device=kernel_device).to(memory_format=layout)
        launches = _resample.Launches(table, out, torch.uint8, interpolation)
        shifted = torch.cat([flat[:shift], flat])
        numbers = launches.numbers(table, colors).to(kernel_device)
        for number in (1, 2, 0):
            launches.launch(number, shifted.data_ptr() + shift, numbers.data_ptr())
        assert torch.equal(out[[2, 0, 3]], want)
        assert bool((out[1] == -9).all())


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("own_sizes", [False, True])
def test_a_launch_tells_the_images_that_still_have_a_canary(kernel_device, own_sizes):
    flat, table, views, _ = laid_out((6, 7), device=kernel_device, top=2)
    out = torch.zeros((4, 3, 6, 7), device=kernel_device)
    if own_sizes:
        places = Places.in_turn(np.array([[6, 7]] * 4), None)
        out = places.pieces(torch.zeros(places.shape, device=kernel_device))
        words = _resample.with_places(_resample.by_place(table.words, 4), places)
        at = table.words["row"]
        table = _resample.arrange(words[at], at, words["address"][at], [1, 1, 1], (6, 7))
    launches = _resample.Launches(table, out, torch.uint8, "bilinear")
    colors = _resample.coloring(3, torch.uint8, torch.float32, None, None)
    numbers = launches.numbers(table, colors).to(kernel_device)
    corners = flat.cpu().clone()
    starts = np.cumsum([0, *(view.numel() for view in views)]).tolist()
    color = torch.tensor([_resample.CANARY >> shift & 255 for shift in (0, 8, 16)])
    for start, view, turned in zip(starts, views, (False, True, False), strict=False):
        stored = corners[start : start + view.numel()]
        stored = stored.view(*(view.mT if turned else view).shape[1:], 3)
        seen = stored.transpose(0, 1) if turned else stored
        seen[2, 0] = seen[-1, -1] = color
    given = flat.data_ptr(), numbers.data_ptr()
    pinned = kernel_device.type == "cuda"

    def survived():
        flags = torch.zeros(4, dtype=torch.uint8, pin_memory=pinned)
        for number in range(3):
            launches.launch(number, *given, survived=flags.data_ptr())
        if pinned:
            torch.cuda.synchronize()
        return flags.tolist()

    before = flat.clone()
    assert survived() == [0, 0, 0, 0]
    for number in range(3):
        launches.set_canaries(number, *given)
    assert torch.equal(flat.cpu(), corners)
    assert survived() == [1, 0, 1, 1]  # rows of the result
    half = starts[1] // 2
    flat[:half] = before[:half]  # one was written in part, another as a whole
    flat[starts[1] : starts[2]] = before[starts[1] : starts[2]]
    assert survived() == [0, 0, 1, 1]
