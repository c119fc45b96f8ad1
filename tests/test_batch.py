"""Every structure a collate function may return is walked, rebuilt and left as it was."""

import dataclasses
import pickle
import sys
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping, MutableMapping
from multiprocessing.reduction import ForkingPickler
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from children import Child
from fakes import leaves
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from gpuprefetch import DataPrefetcher
from gpuprefetch.core.nested import map_leaves, objects, one_a_storage, tensors, to_device
from gpuprefetch.images import slab as _slab

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    name: str = "a"
    derived: int = dataclasses.field(init=False, default=3)


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSample:
    image: torch.Tensor
    parts: tuple


@dataclasses.dataclass
class Lazy:
    image: torch.Tensor
    cache: object = dataclasses.field(init=False, repr=False)


class Pair(namedtuple("Pair", "x y")):
    def __new__(cls, x):
        return super().__new__(cls, x, x)


class DotDict(dict):
    __getattr__ = dict.get  # so that it has any attribute, None


class ItemDict(dict):
    __getattr__ = dict.__getitem__  # a KeyError, where an attribute is looked for


class Items(Mapping):
    """Keeps its items in a dict of its own, which a shallow copy shares."""

    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class Store(Items, MutableMapping):
    def __setitem__(self, key, value):
        self._items[key] = value

    def __delitem__(self, key):
        del self._items[key]


class TwoArguments(Items):
    def __init__(self, images, target):
        super().__init__({"images": images, "target": target})


class Movable:
    def __init__(self, tensor):
        self.tensor, self.moved = tensor, False

    def to(self, device):  # knows no non_blocking
        moved = Movable(self.tensor.to(device))
        moved.moved = True
        return moved


class TaggedList(list):
    tag = None


def nested_batches():
    t = torch.arange(6.0)
    tagged = TaggedList([t, 1])
    tagged.tag = "kept"
    return {
        "tensor": t,
        "tuple": (t, 1, "name", None),
        "list": [t, [t, (t,)]],
        "dict": {"a": t, "b": {"c": t}},
        "ordered": OrderedDict(a=t, b=2),
        "defaultdict": defaultdict(list, {"a": t}),
        "userdict": UserDict(a=t),
        "counter": Counter(a=2, b=300),
        "proxy": MappingProxyType({"a": t}),
        "namedtuple": Point(t, [t]),
        "dataclass": Sample(t),
        "frozen": FrozenSample(t, (t, "x")),
        "field without a value": Lazy(t),
        "namedtuple of one argument": Pair(t),
        "any attribute": DotDict(a=t),
        "attributes": ItemDict(a=t),
        "plain values": ([1, 2.0, "a"], (True, None), {"a": b"b"}, [[3], [t]]),
        "store": Store({"a": t}),
        "tagged": tagged,
        "bytes": (b"raw", t, np.arange(3), 1.5),
        "empty": ([], {}, ()),
    }


@pytest.mark.parametrize("name", list(nested_batches()))
def test_rebuilds_every_structure(name):
    batch = nested_batches()[name]
    doubled = map_leaves(lambda x: x * 2 if isinstance(x, torch.Tensor) else x, batch)
    assert type(doubled) is type(batch) or name == "proxy"
    before, after = list(leaves(batch)), list(leaves(doubled))
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        if isinstance(old, torch.Tensor):
            assert torch.equal(new, old * 2)
            assert torch.equal(old, torch.arange(6.0))  # the input is left untouched
        else:
            assert new is old


def test_plain_values_are_no_objects():
    batch = nested_batches()["plain values"]
    seen = []
    same = map_leaves(lambda leaf: seen.append(leaf) or leaf, batch)
    assert len(seen) == 1
    assert same[:3] == batch[:3]
    assert all(a is not b for a, b in zip(same, batch, strict=True) if isinstance(b, (list, dict)))
    assert [*objects(batch)] == seen
    assert [*leaves(batch)][:6] == [1, 2.0, "a", True, None, b"b"]


def test_lists_of_plain_values_are_not_looked_through():
    # As of torchvision's CocoDetection: thousands of numbers in lists beside a picture.
    polygon = {"bbox": [1.0] * 4, "segmentation": [[float(i) for i in range(120)]]}
    samples = [(torch.zeros(3, 4, 4), [dict(polygon) for _ in range(8)]) for _ in range(64)]
    loader = DataLoader(samples, 64, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))
    calls = 0

    def count(frame, event, arg):  # but for imports, which compile patterns
        nonlocal calls
        calls += event == "call" and "gpuprefetch" in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        ((images, targets),) = DataPrefetcher(loader, device="cpu")
    finally:
        sys.setprofile(None)
    assert len(images) == len(targets) == 64
    assert calls < 64 * 8 * 124 / 2  # numbers: to look at each of them once would take more


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_is_a_batch():
    def collate(samples):
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])

    (batch,) = DataPrefetcher(DataLoader([0, 1], 2, collate_fn=collate), device="cpu")
    assert [part.tolist() for part in batch.unbind()] == [[1, 1], [1, 1, 1]]


def test_keeps_what_a_constructor_does_not_take():
    batches = nested_batches()
    assert map_leaves(lambda x: x, batches["defaultdict"]).default_factory is list
    assert map_leaves(lambda x: x, batches["tagged"]).tag == "kept"
    assert map_leaves(lambda x: x, batches["dataclass"]).derived == 3


def test_objects_with_to_move_themselves():
    moved = to_device((Movable(torch.ones(2)), Movable), torch.device("cpu"))
    assert moved[0].moved and moved[1] is Movable
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    assert isinstance(to_device(packed, torch.device("cpu")), type(packed))


def test_copies_do_not_block_the_host():
    class Asked(Movable):
        def to(self, device, non_blocking=False):
            self.moved = (device, non_blocking)
            return self

    (batch,) = DataPrefetcher([{"a": [Asked(torch.ones(2))]}], device="cpu")
    assert batch["a"][0].moved == (torch.device("cpu"), True)


def test_objects_whose_to_returns_nothing_are_kept():
    class Mover(Movable):
        def to(self, device):
            self.moved = True

    (batch,) = DataPrefetcher([(Mover(torch.ones(2)), 1)], device="cpu")
    assert batch[0].moved


def test_a_mapping_that_cannot_be_made_anew_becomes_a_dict():
    (batch,) = DataPrefetcher([TwoArguments(torch.ones(2), "a")], device="cpu")
    assert batch == {"images": batch["images"], "target": "a"}
    assert batch["images"].tolist() == [1, 1]


def test_a_mapping_whose_to_is_no_method_is_moved():
    for to in ({}, {"to": torch.ones(2)}):
        moved = to_device(DotDict(a=torch.ones(2), **to), torch.device("meta"))
        assert {value.device.type for value in moved.values()} == {"meta"}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_reaches_into_objects_and_sparse_tensors():
    inside = torch.ones(2)
    sparse, nested = torch.eye(3).to_sparse(), torch.nested.nested_tensor([inside, torch.ones(3)])
    found = list(tensors([Movable(inside), sparse, nested, 1]))
    assert any(t is inside for t in found)
    assert len(found) == 4
    # Others, and what is nested, record_stream() does not take.
    assert all(t.layout is torch.strided and not t.is_nested for t in found)


class SlotsAlone:
    __slots__ = ("tensor",)


def test_tensors_reaches_what_a_transform_put_into_an_object():
    # A hand-over that overlooks them lets the next batch write where the step still reads.
    host, one, two = torch.ones(2), torch.ones(2, device="meta"), torch.ones(3, device="meta")
    views = SimpleNamespace(first=one, others=[two], boxes={0: one}, target=host, name="a")
    slotted = SlotsAlone()
    slotted.tensor = two
    found = list(tensors({"views": views, "kind": SimpleNamespace, "slotted": slotted}))
    assert [id(tensor) for tensor in found] == [*map(id, (one, two, one, two))]


class Subclass(torch.Tensor):
    """Its memory may be elsewhere."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_memory_is_marked_once_a_storage():
    # What a hand-over overlooks is given to the next batch while the step still reads it.
    buffer, other, held = torch.zeros(12), torch.zeros(2), torch.zeros(3)
    views = [*buffer[2:].split([4, 3, 3])]
    wrapped = [view.as_subclass(Subclass) for view in views]
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    batch = {
        "views": views,
        "beside": (other, "a", views[:1], buffer),
        "wrapped": wrapped,
        "within an object": Movable([held, held[1:], wrapped[0]]),
        "nested": nested,
        "nothing": [],
    }
    found = one_a_storage(batch)
    assert all(part.layout is torch.strided and not part.is_nested for part in found)
    wanted = {part.untyped_storage().data_ptr() for part in (buffer, other, held, nested.values())}
    plain = [part for part in found if type(part) is torch.Tensor]
    assert len(plain) == len(wanted)
    assert {part.untyped_storage().data_ptr() for part in plain} == wanted
    assert [part for part in found if any(part is one for one in wrapped)] == [
        *wrapped,
        wrapped[0],
    ]
    sparse = torch.eye(3).to_sparse()
    more = one_a_storage([batch, sparse])  # a sparse tensor has no storage, and its parts have
    addresses = {part.untyped_storage().data_ptr() for part in more}
    assert addresses >= wanted
    assert {part.data_ptr() for part in tensors(sparse)} <= addresses


def test_a_list_of_views_is_looked_through_at_one_go():
    def calls_for(count):
        batch = [list(torch.zeros(count, 3).unbind()), torch.zeros(count)]
        calls = 0

        def note(frame, event, arg):
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            assert len(one_a_storage(batch)) == 2
        finally:
            sys.setprofile(None)
        return calls

    assert calls_for(8) == calls_for(256)


class Slotted(Movable):
    __slots__ = ("__hidden", "again")

    def __init__(self, tensor):
        super().__init__(tensor)
        self.__hidden, self.again = tensor, self


class MovableDict(dict, Movable):
    __init__ = dict.__init__


class MovableList(list, Movable):
    __init__ = list.__init__


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (Slotted, 2),
        (lambda tensor: MovableDict(a=[tensor]), 1),
        (lambda tensor: MovableList([tensor]), 1),
        (lambda tensor: pack_sequence([tensor, tensor]), 2),
    ],
)
def test_tensors_reaches_into_every_kind_of_object(make, count):
    assert len(list(tensors(make(torch.ones(2))))) == count


LEAVES = {
    "target": torch.arange(256),
    "number": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
    "mask": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "half": torch.rand(3, dtype=torch.bfloat16),
    "turned": torch.arange(6).view(2, 3).T,
    "parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "large": torch.rand(_slab.SMALL // 4 + 1),
    "words": ["a", None, 1],
}


def test_small_tensors_are_sent_by_value():
    sent = {name: _slab.by_value(leaf) for name, leaf in LEAVES.items()}
    small = {name for name, leaf in sent.items() if leaf is not LEAVES[name]}
    assert small == {"target", "number", "empty", "mask", "complex"}
    for name in small:
        got, want = pickle.loads(ForkingPickler.dumps(sent[name])), LEAVES[name].clone()
        assert type(got) is torch.Tensor
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert torch.equal(got, want)
        assert not got.is_shared()
        got.zero_()  # it may be written to, and is a copy
        assert torch.equal(LEAVES[name], want)


@pytest.mark.forks("its collate function is local")
def test_workers_send_what_the_collate_function_gave():
    expected = {n: leaf for n, leaf in LEAVES.items() if n != "conjugate"}  # torch loses the bit
    loader = DataLoader([expected], batch_size=1, num_workers=1, collate_fn=lambda batch: batch[0])
    (batch,) = DataPrefetcher(loader, device="cpu")
    assert batch.keys() == expected.keys()
    for name, want in expected.items():
        if name == "words":
            assert batch[name] == want
        else:
            assert torch.equal(batch[name], want)
            assert batch[name].dtype == want.dtype
            assert batch[name].stride() == want.stride()


KEPT_TO_THE_END = """
from torch.utils.data import DataLoader
from gpuprefetch.images import slab as _slab

def collate(samples):
    return _slab.Buffer.empty(3)

kept = list(DataLoader([1] * 4, batch_size=2, num_workers=1, collate_fn=collate))
assert kept[0].memory.is_shared()
print(len(kept))
vars(_slab)["kept"] = kept
del kept
"""


def test_batches_of_a_worker_that_are_kept_to_the_exit():
    # Whatever refers to them: a module may end before they do, and its names are None then.
    assert Child(KEPT_TO_THE_END).communicate() == ["2\n", ""]
