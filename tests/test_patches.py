"""What vision transformers take: sizes from areas and patch numbers, and packed patches."""

import io

import numpy as np
import pytest
import torch
from fakes import numbered, prefetcher_of
from pictures import draw, encode
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

import gpuprefetch
from gpuprefetch import Letterbox, ResizeToSequence, SmartResize, preprocess

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
    dataset = [(gpuprefetch.EncodedImage(file, 0), target)]
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
