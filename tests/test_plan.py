"""A batch's buffer and its plan: the examples of docstrings are right."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from gpuprefetch.images.plan import lay_out, split_into_calls
from gpuprefetch.images.prepared import (
    Identities,
    PackedImages,
    Plan,
    PreparedImages,
    Regions,
    Report,
    Results,
    Stored,
)
from gpuprefetch.images.slab import Buffer
from gpuprefetch.transforms.launch import Launches, plan_rows
from gpuprefetch.transforms.reference import finished_row

SIZE = (2, 5)  # of the one view


def packed():
    """The example of PackedImages, whose files decode to 4 x 6 and 2 x 8 pixels."""
    return PackedImages(
        buffer=Buffer(torch.arange(756, dtype=torch.int64).to(torch.uint8)),
        regions=Regions(pixels=150, tables=[180]),
        spans=np.array([[0, 100], [150, 180], [100, 150]]),
        decoded=np.array([False, True, False]),
        stored=Stored(
            sizes=np.array([[4, 6], SIZE, [2, 8]]),
            transposed=np.zeros(3, dtype=bool),
            interleaved=True,
        ),
        who=Identities(
            indices=np.arange(3),
            names=np.arange(3),
            keys=np.arange(3, dtype=np.uint64),
            paths=["", "", ""],
            samples=[0, 1, 2],
        ),
        rows=[np.stack([finished_row(SIZE)] * 3)],
        errors={},
    )


def prepared(images):
    return PreparedImages.of(images, [756], plan=Plan(), made=Results(), report=Report(share=0.0))


def numbers(part):
    """A part of a plan as its docstring shows it."""
    upload = part.upload and (part.upload.positions.tolist(), part.upload.start, part.upload.stop)
    call = part.call and [
        values.tolist() for values in (part.call.positions, part.call.spans, part.call.shapes)
    ]
    return upload, call


def test_the_parts_of_a_buffer():
    images = prepared(packed())
    assert images.regions == Regions(pixels=150, tables=[180, 756])
    assert images.regions.pixels_end == 180
    whole = images.buffer.tensor
    assert torch.equal(images.files, whole[:150])
    assert torch.equal(images.pixels, whole[150:180])
    assert torch.equal(images.span(2), whole[100:150])
    (picture,) = images.pictures(np.array([1]), images.pixels, images.regions.pixels)
    assert torch.equal(picture, whole[150:180].view(2, 5, 3).permute(2, 0, 1))
    assert Launches.room(3, 3) == 756 - 180
    # Where no kernel runs, the pixels come last.
    assert packed().regions.pixels_end == len(whole) - Launches.room(3, 3)


def test_a_copy_goes_with_a_call_in_one_part():
    (part,) = lay_out(packed(), [SIZE]).parts
    call = [[0, 2], [[0, 100], [100, 150]], [[4, 6], [2, 8]]]
    assert numbers(part) == (([1], 150, 180), call)
    # The pictures lie in this order in its memory: the copied one, then those of the call.
    assert part.uploaded == 30
    assert part.call.offsets.tolist() == [0, 72]
    assert part.size == 30 + 72 + 48


def test_a_small_limit_leaves_each_picture_a_part():
    parts = lay_out(packed(), [SIZE], limit=600).parts
    assert [numbers(part) for part in parts] == [
        (([1], 150, 180), None),
        (None, [[0], [[0, 100]], [[4, 6]]]),
        (None, [[2], [[100, 150]], [[2, 8]]]),
    ]


def test_what_a_launch_reads_of_each_picture():
    images = packed()
    words = plan_rows(
        images.rows[0], images.stored.sizes, images.stored.transposed, SIZE, "bilinear", True
    )
    (table,) = lay_out(images, [SIZE], [words]).tables
    assert table.firsts == [0, 3]
    addresses = {int(image["row"]): int(image["address"]) for image in table.words}
    assert addresses == {1: 0, 0: 30, 2: 30 + 72}
    assert len(Launches.numbers(table, np.zeros(6, dtype=np.int64))) == 576
    assert table.without_words().words is None
    assert table.without_words().firsts == table.firsts


def test_a_bad_file_is_in_no_part():
    images = packed()
    images.errors[0] = "broken"
    (part,) = lay_out(images, [SIZE]).parts
    assert part.call.positions.tolist() == [2]


@pytest.mark.parametrize(("sizes", "lengths"), [([100] * 9, [2, 2, 2, 2, 1]), ([300, 10], [1, 1])])
def test_calls_are_about_equal(sizes, lengths):
    calls = split_into_calls(np.array(sizes) << 20)
    assert [part.stop - part.start for part in calls] == lengths


def buffer_of_a_worker(keys):
    buffer = Buffer.empty(1000)
    return buffer.start, buffer.size, buffer.memory.numel()


def test_a_buffer_in_a_slab():
    loader = DataLoader(range(1), num_workers=1, collate_fn=buffer_of_a_worker)
    assert next(iter(loader)) == (64, 1000, 1314)
    assert buffer_of_a_worker([]) == (0, 1000, 1000)
