"""Images of their own sizes in one buffer: their views, and how few ops make all of them."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpuprefetch import Padding
from gpuprefetch.transforms.patches import PatchLayout, pack_reference, pack_triton
from gpuprefetch.transforms.pieces import Places, locate
from gpuprefetch.transforms.results import FORMS

SIZES = [(4, 8), (8, 4), (1, 1), (4, 4), (12, 60)]  # one pixel, and one size that is long


class Ops(TorchDispatchMode):
    """Counts the ops of tensors."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def pieces_of(sizes, form="list", memory_format=None):
    places = FORMS[form].places(np.array(sizes), memory_format)
    buffer = places.empty(torch.float32, "cpu")
    return places.pieces(buffer)


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("memory_format", [None, torch.channels_last])
def test_a_view_has_its_part_of_the_buffer(memory_format, start):
    places = Places.in_turn(np.array(SIZES), memory_format)
    buffer = torch.arange(start + places.shape[0] + 3)[start:]
    pieces = places.pieces(buffer)
    images = list(pieces)
    offset = 0
    for number, (image, (height, width)) in enumerate(zip(images, SIZES, strict=True)):
        assert offset % 64 == 0
        flat = buffer[offset : offset + 3 * height * width]
        if memory_format is torch.channels_last:
            want = flat.view(height, width, 3).permute(2, 0, 1)
        else:
            want = flat.view(3, height, width)
        for view in (image, pieces[number], pieces[number - len(SIZES)]):
            assert torch.equal(view, want)
            assert (view.shape, view.stride()) == (want.shape, want.stride())
            assert view.dtype == buffer.dtype
            assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        offset += -(-3 * height * width // 64) * 64
    assert len(pieces) == len(SIZES)
    for part in (slice(None), slice(1, 3), slice(None, None, -2)):
        chosen = zip(pieces[part], images[part], strict=True)
        assert all(torch.equal(one, other) for one, other in chosen)
    with pytest.raises(IndexError):
        pieces[len(SIZES)]


@pytest.mark.parametrize("memory_format", [None, torch.channels_last])
@pytest.mark.parametrize("form", ["list", "padded"])
def test_pieces_are_located_as_their_views_are(form, memory_format):
    pieces = pieces_of(SIZES, form, memory_format)
    for got, want in zip(locate(pieces), locate(list(pieces)), strict=True):
        assert np.array_equal(got, want)


def test_no_pieces_at_all():
    pieces = pieces_of(np.zeros((0, 2), np.int64))
    assert len(pieces) == 0 and list(pieces) == []


def test_a_list_needs_one_op_an_image():
    pieces = pieces_of(SIZES)
    with Ops() as ops:
        images = FORMS["list"].joined(pieces)
    assert type(images) is list
    assert ops.names == ["aten.as_strided.default"] * len(SIZES)


def test_a_padded_batch_is_the_buffer():
    pieces = pieces_of(SIZES, "padded")
    with Ops() as ops:
        padded = Padding().joined(pieces)
    assert padded.images is pieces.buffer
    assert padded.sizes.tolist() == [[*size] for size in SIZES]
    assert not any("as_strided" in name for name in ops.names)


@pytest.mark.parametrize("merge_size", [1, 2])
def test_the_kernel_of_patches_asks_for_no_view(kernel_device, merge_size):
    layout = PatchLayout(2, merge_size)
    places = Places.in_turn(np.array([(4, 8), (8, 4), (4, 4)]), torch.channels_last)
    pieces = places.pieces(torch.rand(places.shape, device=kernel_device))
    want = torch.zeros(20, layout.row_length(3), device=kernel_device)
    got = torch.zeros_like(want)
    starts = np.array([0, 8, 16])
    with Ops() as ops:
        pack_reference(pieces, want, starts, layout)
    assert ops.names.count("aten.as_strided.default") == len(pieces)  # guards the test itself
    with Ops() as ops:
        pack_triton(pieces, got, starts, layout)
    assert ops.names.count("aten.as_strided.default") == 1  # which tells the channels
    assert torch.equal(got, want)
