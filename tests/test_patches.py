"""What vision transformers take: sizes from areas and patch numbers, and packed patches."""

import io
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import OnTheCpu, numbered, prefetcher_of
from pictures import draw, encode, encode_jpeg
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

import gpuprefetch
from gpuprefetch import (
    DataPrefetcher,
    EncodedImage,
    Letterbox,
    PackedPatches,
    PaddedPatches,
    Patches,
    PatchPadding,
    ResizeToSequence,
    SmartResize,
    UnsupportedTransformError,
    Views,
    convert_transforms,
    preprocess,
)
from gpuprefetch.images.header import decode_cpu
from gpuprefetch.transforms.patches import PatchLayout, pack_reference, pack_triton

# Twenty pictures: one pixel, 60:1, and sizes that divide nothing.
SHAPES = [(1, 1), (60, 1), (1, 60), (7, 420), (420, 7), (28, 28), (56, 56), (64, 64)]
SHAPES += [(37 + 11 * i, 151 - 9 * i) for i in range(12)]
FILES = [
    encode(draw(max(h, 8), max(w, 8), seed=seed)[:h, :w], "PNG")
    for seed, (h, w) in enumerate(SHAPES)
]
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
TO_FLOAT = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
LEVEL = 1.01  # of 0 to 255


def picture(file):
    return F.pil_to_tensor(Image.open(io.BytesIO(file)).convert("RGB"))


# --- sizes --------------------------------------------------------------------------------------


# As transformers 5.24 computes them.
SMART = {
    (1, 1): (56, 56),
    (60, 1): (448, 28),
    (7, 420): (28, 448),
    (480, 641): (476, 644),
    (42, 70): (56, 56),
    (3024, 4032): (840, 1148),
    (13, 2600): (28, 812),
}
SEQUENCES = {
    (1, 1): (112, 112),
    (60, 1): (1920, 32),
    (1, 300): (16, 4096),
    (480, 640): (224, 288),
    (333, 500): (208, 304),
}


def test_sizes_are_those_of_processors():
    for shape, size in SMART.items():
        assert SmartResize().size_of(*shape) == size
    for shape, size in SEQUENCES.items():
        assert ResizeToSequence().size_of(*shape) == size
    assert ResizeToSequence(14, 1).size_of(480, 640) == (14, 14)
    assert SmartResize(32, 1, 1024).size_of(480, 640) == (32, 32)
    assert "factor=28, min_pixels=3136" in repr(SmartResize())


def test_sizes_are_those_of_transformers():
    qwen = pytest.importorskip("transformers.models.qwen2_vl.image_processing_qwen2_vl")
    siglip = pytest.importorskip("transformers.models.siglip2.image_processing_siglip2")
    rng = np.random.default_rng(0)
    shapes = [*map(tuple, rng.integers(1, 3000, (500, 2)).tolist()), *SMART, *SEQUENCES]
    for factor, least, most in [(28, 3136, 1003520), (32, 65536, 2**24), (28, 50000, 50000)]:
        resize = SmartResize(factor, least, most)
        for height, width in shapes:
            if max(height, width) <= 200 * min(height, width):
                want = qwen.smart_resize(height, width, factor, least, most)
                assert resize.size_of(height, width) == want
    for patch, most in [(16, 256), (14, 1024), (16, 1)]:
        resize = ResizeToSequence(patch, most)
        for height, width in shapes:
            want = siglip.get_image_size_for_max_num_patches(height, width, patch, most)
            assert resize.size_of(height, width) == want


def test_what_is_no_size_is_refused_with_a_line_that_works():
    wrong = [
        (lambda: SmartResize(0), r"SmartResize\(28, 3136, 1003520\)"),
        (lambda: SmartResize(28, 9000, 4000), "not above the largest one"),
        (lambda: SmartResize(28, 1, 100), r"not below factor \* factor, got 28, 1, 100"),
        (lambda: SmartResize(28.5), "positive ints"),
        (lambda: ResizeToSequence(16, 0), r"SigLIP2 has ResizeToSequence\(16, 256\)"),
        (lambda: SmartResize().size_of(0, 5), r"1 or more, got \(0, 5\)"),
        (lambda: Letterbox((8, 0)), r"Letterbox\(size=...\) takes a positive int"),
        (lambda: Letterbox(8, fill=(1, 2)), r"one level of 0 to 255, or three, got \(1, 2\)"),
        (lambda: Letterbox(8, fill=-1), "got -1"),
    ]
    for make, text in wrong:
        with pytest.raises(ValueError, match=text):
            make()
    SmartResize(28, 3136, 1003520)
    ResizeToSequence(16, 256)


# --- values -------------------------------------------------------------------------------------


SMALL = {
    "smart": SmartResize(14, 14 * 14 * 4, 14 * 14 * 40),
    "bilinear": SmartResize(8, 64, 64 * 40, InterpolationMode.BILINEAR),
    "sequence": ResizeToSequence(8, 30),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_fitted_resize_is_torchvisions_to_that_size(name):
    op = SMALL[name]
    how = InterpolationMode(op.op.interpolation)
    results = preprocess(FILES, [op], device="cpu")
    assert len({result.shape for result in results}) > 8
    for file, shape, got in zip(FILES, SHAPES, results, strict=True):
        assert got.shape[1:] == op.size_of(*shape)
        # A tensor: Pillow 13 filters along y first in some pictures, and clamps in between.
        want = F.resize(picture(file), got.shape[1:], how, antialias=True)
        assert (got * 255 - want).abs().max() <= LEVEL
    (view,) = prefetcher_of(
        numbered(FILES), transforms=[op, v2.RandomHorizontalFlip(), v2.Normalize(MEAN, STD)]
    ).views
    assert len(view.head.names) == 3 and not view.tail


def test_a_plan_names_a_fitted_resize():
    text = gpuprefetch.explain([SmartResize(), v2.Normalize(MEAN, STD)])
    assert "SmartResize, Normalize" in text and "each of its own size" in text


@pytest.mark.parametrize("fill", [114, (9, 200, 77)])
def test_a_letterbox_is_a_resize_and_padding(fill):
    results = preprocess(FILES, [Letterbox((40, 64), fill)], device="cpu")
    assert results.shape == (len(FILES), 3, 40, 64)
    for file, (height, width), got in zip(FILES, SHAPES, results, strict=True):
        scale = min(40 / height, 64 / width)
        size = [max(round(height * scale), 1), max(round(width * scale), 1)]
        top, left = (40 - size[0]) // 2, (64 - size[1]) // 2
        around = [left, top, 64 - size[1] - left, 40 - size[0] - top]
        want = F.pil_to_tensor(F.resize(F.to_pil_image(picture(file)), size))
        want = F.pad(want, around, fill=fill if isinstance(fill, tuple) else [fill] * 3)
        assert (got * 255 - want).abs().max() <= LEVEL


def test_boxes_and_masks_follow_a_letterbox():
    height, width = 30, 60
    target = {
        "boxes": tv_tensors.BoundingBoxes(
            torch.tensor([[6.0, 3.0, 30.0, 12.0]]), format="XYXY", canvas_size=(height, width)
        ),
        "masks": tv_tensors.Mask(torch.ones(1, height, width)),
    }
    file = encode(draw(height, width), "PNG")
    dataset = [(EncodedImage(file, 0), target)]
    ((images, (got,)),) = prefetcher_of(
        dataset,
        batch_size=1,
        transforms=[Letterbox(40, mask_fill=7)],
        collate_fn=lambda samples: tuple(zip(*samples, strict=True)),
    )
    assert images.shape == (1, 3, 40, 40)
    boxes = torch.Tensor(got["boxes"])
    torch.testing.assert_close(boxes, torch.tensor([[4.0, 12.0, 20.0, 18.0]]))
    mask = torch.Tensor(got["masks"])
    assert (mask[:, 10:30] == 1).all() and (mask[:, :10] == 7).all() and (mask[:, 30:] == 7).all()


# --- packed patches -----------------------------------------------------------------------------


def packed_by_hand(image, patch, merge, copies):
    """The rows of an image, patch by patch."""
    rows = []
    _, height, width = image.shape
    square = patch * merge
    for top, left in itertools.product(range(0, height, square), range(0, width, square)):
        for y, x in itertools.product(range(merge), range(merge)):
            one = image[:, top + y * patch :, left + x * patch :][:, :patch, :patch]
            rows.append(torch.stack([one] * copies, 1).flatten())
    return torch.stack(rows)


def padded_by_hand(image, patch, most):
    """The rows of an image with zeros after them, and how many there are."""
    _, height, width = image.shape
    rows = torch.zeros(most, patch * patch * len(image), dtype=image.dtype)
    corners = [*itertools.product(range(0, height, patch), range(0, width, patch))]
    for number, (top, left) in enumerate(corners):
        rows[number] = image[:, top : top + patch, left : left + patch].permute(1, 2, 0).flatten()
    return rows, len(corners)


def assert_packed(batch, images, form):
    assert isinstance(batch, PackedPatches)
    patch, merge, copies = form.patch_size, form.merge_size, form.temporal_patch_size
    want = torch.cat([packed_by_hand(image, patch, merge, copies) for image in images])
    assert batch.pixel_values.dtype == want.dtype and torch.equal(batch.pixel_values, want)
    grid = [[1, image.shape[1] // patch, image.shape[2] // patch] for image in images]
    assert batch.image_grid_thw.dtype == torch.int64 and batch.image_grid_thw.tolist() == grid


def assert_padded(batch, images, form):
    assert isinstance(batch, PaddedPatches)
    most = form.max_num_patches
    assert batch.pixel_values.shape[:2] == batch.pixel_attention_mask.shape == (len(images), most)
    assert batch.pixel_attention_mask.dtype == torch.int32
    for row, image in enumerate(images):
        want, count = padded_by_hand(image, form.patch_size, most)
        assert torch.equal(batch.pixel_values[row], want)
        assert batch.pixel_attention_mask[row].tolist() == [1] * count + [0] * (most - count)
        shape = [side // form.patch_size for side in image.shape[1:]]
        assert batch.spatial_shapes[row].tolist() == shape


FORMS = {
    "packed": (SmartResize(8, 64, 1600), Patches(4, 2, 2), assert_packed),
    "one frame": (SmartResize(15, 64, 2500), Patches(5, 3, 1), assert_packed),
    "padded": (ResizeToSequence(6, 20), PatchPadding(6, 20), assert_padded),
}
TAILS = {
    "none": [],
    "fused": [v2.Normalize(MEAN, STD)],
    "normalized": [*TO_FLOAT, v2.Normalize(MEAN, STD)],
    "a program": [*TO_FLOAT, v2.ColorJitter(0.4)],
}


# Each form and each tail with both layouts.
LISTS = [
    (name, tail, (None, torch.channels_last)[(row + column) % 2])
    for row, name in enumerate(FORMS)
    for column, tail in enumerate(TAILS)
]


@pytest.mark.parametrize(("name", "tail", "memory_format"), LISTS)
def test_patches_are_those_of_the_list(name, tail, memory_format):
    resize, form, check = FORMS[name]
    ops = [resize, v2.RandomHorizontalFlip(), *TAILS[tail]]
    options = {"transforms": ops, "seed": 4, "memory_format": memory_format, "batch_size": 7}
    lists = prefetcher_of(numbered(FILES), **options)
    packed = prefetcher_of(numbered(FILES), results=form, **options)
    for (images, _), (batch, numbers) in zip(lists, packed, strict=True):
        check(batch, images, form)
        assert len(numbers) == len(images)


LAYOUTS = {
    "merged": PatchLayout(3, 2, 2),
    "a power of two": PatchLayout(4, 1, 1),
    "channels last": PatchLayout(5, channels_last=True),
}


DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("a power of two", dtype) for dtype in DTYPES),
        *(("merged", dtype) for dtype in DTYPES[::2]),
        *(("channels last", dtype) for dtype in DTYPES[1::2]),
    ],
)
def test_the_kernel_packs_as_its_twin(name, dtype, kernel_device):
    layout = LAYOUTS[name]
    shapes = [(1, 1), (2, 3), (3, 1)]
    images = []
    for number, (down, across) in enumerate(shapes):
        size = (layout.factor * down, layout.factor * across)
        image = (torch.rand(3, *size) * 255).to(kernel_device, dtype)
        planes = image if number % 2 else image[None].to(memory_format=torch.channels_last)[0]
        images.append(planes)
    sizes = np.array([image.shape[1:] for image in images])
    counts = layout.grids(sizes, "").prod(axis=1)
    starts = np.cumsum(counts) - counts + 2 * np.arange(3)  # with rows in between
    out = torch.zeros(int(counts.sum()) + 4, layout.row_length(3), dtype=dtype)
    got = out.to(kernel_device, copy=True)  # on the CPU as well
    want = out.to(kernel_device, copy=True)
    pack_triton(images, got, starts, layout)
    pack_reference(images, want, starts, layout)
    assert torch.equal(got, want) and bool(want[int(counts[0])].eq(0).all())


@pytest.mark.gpu
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", FORMS)
def test_a_gpu_packs_what_its_list_holds(name, tail):
    resize, form, check = FORMS[name]
    ops = [resize, v2.RandomHorizontalFlip(), *TAILS[tail]]
    options = {"transforms": ops, "seed": 4, "batch_size": 7}
    lists = prefetcher_of(numbered(FILES), "cuda", **options)
    packed = prefetcher_of(numbered(FILES), "cuda", results=form, **options)
    on_cpu = prefetcher_of(numbered(FILES), results=form, **options)
    for (images, _), (batch, _), (twin, _) in zip(lists, packed, on_cpu, strict=True):
        assert all(tensor.is_cuda for tensor in batch)
        check(type(batch)(*(tensor.cpu() for tensor in batch)), [i.cpu() for i in images], form)
        assert torch.equal(batch[1].cpu(), twin[1])
        assert batch[0].shape == twin[0].shape
        if tail != "a program":
            close = (batch[0].cpu().float() - twin[0]).abs() <= 3.1 / 255 / min(STD)
            assert close.float().mean() >= 0.99


# --- in an epoch --------------------------------------------------------------------------------


RESIZE, PACKED, _ = FORMS["packed"]
OPS = [RESIZE, v2.RandomHorizontalFlip(), *TO_FLOAT]


def same(one, other):
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_files_are_left_out_or_replaced(workers):
    files = [FILES[0], b"none", FILES[9], FILES[7][:500], FILES[3]]
    good = [FILES[i] for i in (0, 9, 3)]
    options = {"transforms": [RESIZE, *TO_FLOAT], "seed": 0, "num_workers": workers}
    for form in (PACKED, PatchPadding(4, 400)):
        options["results"] = form
        ((skipped, numbers),) = prefetcher_of(numbered(files), on_error="skip", **options)
        ((alone, _),) = prefetcher_of(numbered(good), **options | {"num_workers": 0})
        assert numbers.tolist() == [0, 2, 4] and same(skipped, alone)
        ((replaced, _),) = prefetcher_of(numbered(files), on_error="replace", **options)
        assert len(replaced[1]) == 5 and torch.equal(replaced[1][::2], alone[1])
        with pytest.raises(gpuprefetch.BadImageError):
            list(prefetcher_of(numbered(files), **options))


@pytest.mark.parametrize("ops", [OPS, [*OPS, v2.ColorJitter(0.3)]])
def test_an_epoch_goes_on_and_is_replayed(ops):
    prefetcher = prefetcher_of(
        numbered(FILES), batch_size=6, shuffle=True, transforms=ops, results=PACKED
    )
    batches = iter(prefetcher)
    first, numbers = next(batches)
    replayed, number = prefetcher.replay(int(numbers[1]))
    before, count = first.image_grid_thw.prod(1)[:2].tolist()
    assert torch.equal(replayed.pixel_values, first.pixel_values[before : before + count])
    assert number.tolist() == numbers[1:2].tolist()
    state = prefetcher.state_dict()
    rest = [batch for batch, _ in batches]
    prefetcher.load_state_dict(state)
    again = [batch for batch, _ in prefetcher]
    assert len(again) == len(rest) == 3 and all(map(same, again, rest))


def test_views_of_patches():
    lists = Views(OPS, [RESIZE, *TO_FLOAT])
    ((views, _),) = prefetcher_of(
        numbered(FILES), batch_size=20, transforms=lists, results=PACKED, seed=5
    )
    ((alone, _),) = prefetcher_of(
        numbered(FILES), batch_size=20, transforms=OPS, results=PACKED, seed=5
    )
    assert same(views[0], alone) and torch.equal(views[0][1], views[1][1])
    assert not torch.equal(views[0][0], views[1][0])


def test_the_budget_counts_the_patches():
    sizes = [RESIZE.size_of(*shape) for shape in SHAPES]
    need = 4 * 3 * sum(height * width for height, width in sizes)
    options = {"transforms": OPS, "batch_size": 20}
    decoded = max(3 * height * width for height, width in SHAPES)
    list(prefetcher_of(numbered(FILES), memory_budget=2 * need, **options))
    with pytest.raises(ValueError, match=r"a batch needs .* on the device until it is handed over"):
        options["results"] = PACKED
        list(prefetcher_of(numbered(FILES), memory_budget=2 * need, **options))
    enough = 3 * need + 20 * decoded + 100_000
    assert len(list(prefetcher_of(numbered(FILES), memory_budget=enough, **options))) == 1


def test_images_that_are_not_whole_patches_are_named():
    """The error's line is followed."""
    form = Patches(4, 2)
    options = {"batch_size": 20, "results": form}
    with pytest.raises(
        ValueError, match=r"multiples of 8, and image 0 .* has 20 x 20 .*Resize\(8\)"
    ):
        list(prefetcher_of(numbered(FILES), transforms=[v2.Resize((20, 20))], **options))
    ((batch, _),) = prefetcher_of(numbered(FILES), transforms=[SmartResize(8)], **options)
    assert batch.pixel_values.shape[1] == 3 * 2 * 4 * 4
    options["results"] = PatchPadding(3, 9)
    with pytest.raises(ValueError, match=r"multiples of 3, .*ResizeToSequence\(3, 9\)"):
        list(prefetcher_of(numbered(FILES), transforms=[v2.Resize((20, 20))], **options))
    options["results"] = PatchPadding(4, 9)
    with pytest.raises(ValueError, match=r"no room for 25 patches.*ResizeToSequence\(4, 9\)"):
        list(prefetcher_of(numbered(FILES), transforms=[v2.Resize((20, 20))], **options))
    ((batch, _),) = prefetcher_of(numbered(FILES), transforms=[ResizeToSequence(4, 9)], **options)
    assert batch.pixel_values.shape == (20, 9, 3 * 4 * 4)
    for make, text in [
        (lambda: Patches(0), r"Patches\(patch_size=...\) takes 1 or more, got 0"),
        (lambda: Patches(temporal_patch_size=1.5), "temporal_patch_size=.*got 1.5"),
        (lambda: PatchPadding(16, -1), r"PatchPadding\(max_num_patches=...\) .* got -1"),
    ]:
        with pytest.raises(ValueError, match=text):
            make()


def test_a_preview_shows_the_images(tmp_path):
    prefetcher = prefetcher_of(numbered(FILES), transforms=OPS, results=PACKED, seed=0)
    sheet = prefetcher.preview(2)
    sheet.save(tmp_path / "sheet.png")
    assert (tmp_path / "sheet.png").stat().st_size > 1000


# --- image processors ---------------------------------------------------------------------------


class Processor:
    """As Hugging Face's: settings, and a call that carries them out with torchvision."""

    do_rescale = True
    image_mean = MEAN

    def __init__(self, rule, form, *, shifted=False, **settings):
        self.rule, self.form, self.shifted = rule, form, shifted
        self.settings = settings | {
            "do_resize": True,
            "resample": 3,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": MEAN,
            "image_std": STD,
        }

    def to_dict(self):
        return dict(self.settings)

    def __call__(self, images, return_tensors):
        size = self.rule.size_of(images.height, images.width)
        image = F.resize(F.pil_to_tensor(images), size, InterpolationMode.BICUBIC, antialias=True)
        image = F.normalize(image / 255, MEAN, STD)
        form = self.form
        if isinstance(form, Patches):
            sides = form.patch_size, form.merge_size, form.temporal_patch_size
            down, across = (side // form.patch_size for side in size)
            grid = [[2 if self.shifted else 1, down, across]]
            return {"pixel_values": packed_by_hand(image, *sides), "image_grid_thw": grid}
        rows, count = padded_by_hand(image, form.patch_size, form.max_num_patches)
        mask = torch.ones(1, len(rows), dtype=torch.int32)
        mask[0, count:] = 0
        shapes = [[side // form.patch_size for side in size]]
        return {
            "pixel_values": rows[None],
            "pixel_attention_mask": mask,
            "spatial_shapes": shapes,
        }


def qwen(**settings):
    bounds = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 40}
    given = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "size": bounds}
    rule = SmartResize(28, 56 * 56, 28 * 28 * 40)
    return Processor(rule, Patches(14, 2, 2), **(given | settings))


def naflex():
    rule = ResizeToSequence(16, 40)
    return Processor(rule, PatchPadding(16, 40), patch_size=16, max_num_patches=40)


PROCESSORS = {
    "qwen": qwen,
    "its older settings": lambda: qwen(size=None, min_pixels=56 * 56, max_pixels=28 * 28 * 40),
    "naflex": naflex,
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_becomes_a_list_with_its_patches(name):
    processor = PROCESSORS[name]()
    ops = convert_transforms(processor)
    assert ops[-1] == processor.form
    batch = preprocess(FILES, processor, device="cpu")
    assert same(batch, preprocess(FILES, ops, device="cpu"))
    ((given, _),) = prefetcher_of(
        numbered(FILES), batch_size=20, transforms=ops[:-1], results=ops[-1]
    )
    assert same(batch, given)
    off = []
    for number, file in enumerate(FILES):
        want = processor(Image.open(io.BytesIO(file)).convert("RGB"), "pt")
        one = preprocess([file], ops, device="cpu")
        assert torch.equal(batch[1][number : number + 1], one[1])
        off.append((one.pixel_values - want["pixel_values"]).abs().max() * 255 * max(STD))
    assert max(off) <= LEVEL
    assert str(processor.form) in gpuprefetch.explain(processor)


def test_a_processor_that_is_not_its_settings_is_refused():
    wrong = [
        (qwen(merge_size=4), r"it makes another image_grid_thw"),
        (qwen(merge_size=None), "its setting patch_size=14 is not known"),
        (qwen(max_num_patches=4), "its setting max_num_patches=4 is not known"),
        (qwen(patch_size=-14), r"Patches\(patch_size=...\) takes 1 or more"),
        (qwen(size={"shortest_edge": 9000, "longest_edge": 100}), "not above the largest"),
        (qwen(shifted=True), "it makes another image_grid_thw"),
    ]
    for processor, text in wrong:
        with pytest.raises(UnsupportedTransformError, match=text):
            convert_transforms(processor)


def test_hugging_faces_processors_are_read():
    transformers = pytest.importorskip("transformers")
    bounds = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 200}
    pil = "transformers.models.{0}.image_processing_pil_{0}"
    processors = [
        transformers.Qwen2VLImageProcessor(size=bounds),
        transformers.Siglip2ImageProcessor(max_num_patches=200),
        pytest.importorskip(pil.format("qwen2_vl")).Qwen2VLImageProcessorPil(size=bounds),
        pytest.importorskip(pil.format("siglip2")).Siglip2ImageProcessorPil(max_num_patches=200),
    ]
    pictures = [Image.open(io.BytesIO(file)).convert("RGB") for file in FILES]
    for processor in processors:
        want = processor(images=pictures, return_tensors="pt")
        got = preprocess(FILES, processor, device="cpu")
        assert [*got._fields] == [*want]
        for name, values in got._asdict().items():
            assert values.dtype == want[name].dtype and values.shape == want[name].shape
            if name != "pixel_values":
                assert torch.equal(values, want[name])
        off = (got.pixel_values - want["pixel_values"]).abs() * 255
        # A row has its values by channel, or by pixel.
        last = "spatial_shapes" in got._fields
        off = off.unflatten(-1, (-1, 3) if last else (3, -1)).movedim(-1 if last else 1, -1)
        off *= torch.tensor(processor.image_std)
        if type(processor).__name__.endswith("Pil"):
            # Pillow rounds, and clamps bicubic values, in another order than torch does.
            assert (off <= LEVEL).float().mean() > 0.999
        else:
            assert off.max() <= LEVEL


def test_a_list_ends_with_patches():
    options = {"transforms": [*OPS, PACKED], "seed": 1}
    ended = prefetcher_of(numbered(FILES), **options)
    told = prefetcher_of(numbered(FILES), transforms=OPS, results=PACKED, seed=1)
    for (one, _), (other, _) in zip(ended, told, strict=True):
        assert isinstance(one, PackedPatches) and same(one, other)
    ((listed, _), *_) = prefetcher_of(numbered(FILES), results="list", **options)
    assert isinstance(listed, list)
    with pytest.raises(
        ValueError, match=r"no transform comes after it.*results=Patches\(patch_size=4"
    ):
        list(prefetcher_of(numbered(FILES), transforms=[RESIZE, PACKED, *TO_FLOAT]))
    images = torch.rand(4, 3, 16, 24)
    for options in (
        {"transforms": [PACKED]},
        {"results": PACKED},
        {"transforms": [PACKED], "results": PACKED},
        {"transforms": [v2.RandomHorizontalFlip(0.0)], "results": PACKED},
    ):
        (batch,) = DataPrefetcher([images], device="cpu", **options)
        assert_packed(batch, images, PACKED)
    with pytest.raises(ValueError, match=r"takes images \(N, C, H, W\).* got \(3, 16, 24\)"):
        PACKED(images[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("patches")
    for number, file in enumerate(FILES[9:13]):
        path = root / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(file)
    return root


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("told", "workers_decode"), [(False, False), (False, True), (True, False)])
def test_accelerate_makes_patches(folder, told, workers_decode, dtype):
    pipeline = v2.Compose([v2.Resize((16, 24)), *TO_FLOAT])
    dataset = ImageFolder(str(folder), pipeline)
    options = {"device": "cpu", "print_plan": False, "keep_unknown": workers_decode}
    options["dtype"] = dtype
    if workers_decode:  # an op that must see the whole picture
        pipeline.transforms.insert(0, v2.ColorJitter(0.0))
    options |= {"results": PACKED} if told else {"transforms": [PACKED]}
    moved = gpuprefetch.accelerate(DataLoader(dataset, 3), **options)
    assert moved.decodes_files is not workers_decode
    for batch, targets in moved:
        images = torch.stack([dataset[i][0] for i in range(4)])
        got = batch.pixel_values
        first = 0 if len(targets) == 3 else 3
        want = torch.cat([packed_by_hand(image, 4, 2, 2) for image in images[first:]])
        want = want[: len(got)]
        assert got.dtype == (dtype or torch.float32)
        assert (got.float() - want).abs().max() <= (1.01 / 255 if dtype is None else 0.01)


def test_accelerate_takes_the_form_of_a_processor(folder):
    processor = qwen()
    loader = DataLoader(ImageFolder(str(folder), v2.RandomHorizontalFlip(0.0)), 4)
    with pytest.raises(ValueError, match="ends in PIL images"):
        gpuprefetch.accelerate(loader, device="cpu", print_plan=False)
    paths = [path for path, _ in loader.dataset.samples]
    want = preprocess(paths, processor, device="cpu")
    views = Views([processor], [*OPS, PACKED])
    ((first, second), _), *_ = prefetcher_of(
        numbered([Path(path).read_bytes() for path in paths]), transforms=views
    )
    assert same(first, want) and second.pixel_values.shape[1] == 3 * 2 * 4 * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles: the GPU's test does it")
@pytest.mark.usefixtures("large_tiles")
def test_a_launch_writes_images_that_are_cut_up():
    files = [encode_jpeg(draw(*shape), quality=95) for shape in [(16, 24), (9, 40)]]
    resize = SmartResize(8, 64, 512)
    ops = [resize, v2.RandomHorizontalFlip(1.0), v2.Normalize(MEAN, STD)]
    ((batch, _),) = prefetcher_of(
        numbered(files), transforms=ops, results=PACKED, decoder=OnTheCpu(), cpu_share=0.0
    )
    head = DataPrefetcher([], transforms=ops, device="cpu").views[0].head
    twins = []
    for file in files:
        image = decode_cpu(torch.frombuffer(bytearray(file), dtype=torch.uint8))
        sampling = head.sample([image.shape[1:]], np.array([0], np.uint64))
        size = resize.size_of(*image.shape[1:])
        twins += head.resample([image], sampling.rows(), size)
    want = torch.cat([packed_by_hand(twin, 4, 2, 2) for twin in twins])
    assert (batch.pixel_values - want).abs().max() <= 1e-4
