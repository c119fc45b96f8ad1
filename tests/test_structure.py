"""The structure of the package and of its tests: floors, circles, fields, writes, types.

``python tests/structure.py`` prints the numbers and the places.
"""

import ast
import re
from pathlib import Path
from textwrap import dedent

import pytest
import structure
from structure import RULES, parse, read

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def no_trees_are_left():
    """A million nodes, which later tests would look through each time they collect garbage."""
    yield
    read.cache_clear()


@pytest.mark.parametrize("name", RULES)
def test_no_more_than_its_bar(name):
    rule = RULES[name]
    places = sorted(rule.find(read(ROOT, rule.folder)))
    text = "\n".join(map(str, places))
    assert len(places) <= rule.most, f"{len(places)} places, at most {rule.most}:\n{text}"


def test_names_on_the_lists_of_exceptions_are_still_needed():
    sources = read(ROOT, "gpuprefetch")
    written = {
        ast.unparse(node) for source in sources for node, _ in structure.stores(source.tree, "")
    }
    assert {*structure.WRITES} <= written
    by_name = {fields.node.name: fields for fields in structure.classes(sources)}
    for name in structure.MANY_FIELDS:
        assert len(structure.fields_of(by_name[name], by_name)) > structure.MOST_FIELDS, name
    assert {*structure.FLOORS} <= {".".join(s.name.split(".")[1:2]) for s in sources}


CORE = "gpuprefetch/core/a.py"
OTHER = "gpuprefetch/core/b.py"
IMAGES = "gpuprefetch/images/c.py"
EMPTY = {CORE: "", OTHER: "", IMAGES: "", "gpuprefetch/core/__init__.py": ""}

FIELDS = "\n".join(f"    field{i}: int" for i in range(13))
ASSIGNED = "\n".join(f"        self.field{i} = {i}" for i in range(13))

# A rule, files, and the line of the first file where it fires; None where it must not.
PLANTED = {
    "an import upwards": ("upward", {CORE: "import torch\nimport gpuprefetch.images.c"}, 2),
    "a name from above": ("upward", {CORE: "from gpuprefetch.images import c"}, 1),
    "a relative import upwards": ("upward", {CORE: "from ..images.c import name"}, 1),
    "upwards in a function": (
        "upward",
        {CORE: "def f():\n    from gpuprefetch.images import c"},
        2,
    ),
    "upwards for types": (
        "upward",
        {CORE: "if TYPE_CHECKING:\n    from gpuprefetch.images.c import C"},
        2,
    ),
    "the package from within": ("upward", {CORE: "from gpuprefetch import DataPrefetcher"}, 1),
    "an import downwards": ("upward", {IMAGES: "from gpuprefetch.core.a import name"}, None),
    "no floor": ("upward", {"gpuprefetch/new/d.py": ""}, 1),
    "a circle": (
        "circles",
        {
            CORE: "from gpuprefetch.core.b import name",
            OTHER: "def f():\n    from gpuprefetch.core import a",
        },
        1,
    ),
    "a circle of three": (
        "circles",
        {
            CORE: "import gpuprefetch.core.b",
            OTHER: "from ..images import c",
            IMAGES: "if typing.TYPE_CHECKING:\n    from gpuprefetch.core.a import A",
        },
        1,
    ),
    "no circle": (
        "circles",
        {CORE: "from gpuprefetch.core.b import name", IMAGES: "from . import c, d"},
        None,
    ),
    "a module imports its folder's neighbor": (
        "circles",
        {CORE: "from gpuprefetch.core import b", OTHER: "import torch"},
        None,
    ),
    "13 of a dataclass": ("fields", {CORE: f"@dataclass(slots=True)\nclass A:\n{FIELDS}"}, 2),
    "13 of a tuple": ("fields", {CORE: f"class A(NamedTuple):\n{FIELDS}"}, 1),
    "13 in the constructor": (
        "fields",
        {CORE: f"class A:\n    def __init__(self):\n{ASSIGNED}"},
        1,
    ),
    "13 in a method": ("fields", {CORE: f"class A:\n    def run(this):\n{ASSIGNED}"}, None),
    "13 with inherited ones": (
        "fields",
        {
            CORE: "class A(B):\n    def __init__(self):\n        self.one, self.two = 1, 2",
            OTHER: "@dataclass\nclass B:\n" + FIELDS.replace("    field0: int\n", "", 1),
        },
        1,
    ),
    "12 fields": (
        "fields",
        {CORE: "@dataclass\nclass A:\n" + FIELDS.replace("    field0: int\n", "", 1)},
        None,
    ),
    "13 of which one is the class's": (
        "fields",
        {
            CORE: "@dataclass\nclass A:\n"
            + FIELDS.replace("field0: int", "field0: ClassVar[int]", 1)
        },
        None,
    ),
    "13 public counters": ("fields", {CORE: f"@dataclass\nclass Stats:\n{FIELDS}"}, None),
    "a field of a method": (
        "late",
        {
            CORE: "class A:\n    def __init__(self):\n        self.x = 1\n"
            "    def f(self):\n        self.y = 1"
        },
        5,
    ),
    "a field of two targets": (
        "late",
        {CORE: "class A:\n    def f(self):\n        with open('a') as self.x: pass"},
        3,
    ),
    "a field of a frozen class": (
        "late",
        {CORE: "class A:\n    def f(self):\n        object.__setattr__(self, 'x', 1)"},
        3,
    ),
    "a field of the constructor, set again": (
        "late",
        {
            CORE: "class A:\n    def __init__(self):\n        self.x = 1\n"
            "    def f(self):\n        self.x += 1"
        },
        None,
    ),
    "a declared field": (
        "late",
        {CORE: "class A:\n    x: int\n    def f(self):\n        self.x = 1"},
        None,
    ),
    "a field of a base": (
        "late",
        {
            CORE: "class A(b.B):\n    def f(self):\n        self.x = 1",
            OTHER: "class B:\n    x: int",
        },
        None,
    ),
    "a property": (
        "late",
        {
            CORE: "class A:\n    @x.setter\n    def x(self, x): pass\n"
            "    def f(self):\n        self.x = 1"
        },
        None,
    ),
    "another's attribute": ("far-writes", {CORE: "def f(stage):\n    stage.job = 1"}, 2),
    "another's, in a method": (
        "far-writes",
        {CORE: "class A:\n    def f(self, stage):\n        self.x, stage.job = 1, 2"},
        3,
    ),
    "what a field holds": (
        "far-writes",
        {CORE: "class A:\n    def f(self):\n        self.stage.job += 1"},
        3,
    ),
    "another's, of a class in the same file": (
        "near-writes",
        {CORE: "class Slot:\n    job: int\ndef f(slot):\n    slot.job = 1"},
        4,
    ),
    "another's, far from its class": (
        "near-writes",
        {CORE: "def f(slot):\n    slot.job = 1", OTHER: "class Slot:\n    job: int"},
        None,
    ),
    "the object's own": (
        "far-writes",
        {CORE: "class A:\n    def f(this):\n        this.x = 1"},
        None,
    ),
    "the object's own, in a function of a method": (
        "far-writes",
        {CORE: "class A:\n    def f(self):\n        def g():\n            self.x = 1"},
        None,
    ),
    "torch's": (
        "far-writes",
        {CORE: "from torch import backends\ndef f():\n    backends.cudnn.benchmark = True"},
        None,
    ),
    "a public counter": (
        "far-writes",
        {CORE: "class A:\n    def f(self):\n        self.stats.images += 1"},
        None,
    ),
    "an item": ("far-writes", {CORE: "def f(x):\n    x.y[0] = 1"}, None),
    "two things in a line": ("parallel", {CORE: "x = 1\na, b = x, 2"}, 2),
    "two things as lists": ("parallel", {CORE: "[a, self.b] = (x, y)"}, 1),
    "two things in a chain": ("parallel", {CORE: "c = a, b = x, y"}, 1),
    "a swap": ("parallel", {CORE: "a, b = b, a\nx[0], x[1], y = y, x[0], x[1]"}, None),
    "one thing taken apart": ("parallel", {CORE: "h, w = image.shape\na, *b = x, y, z"}, None),
    "Any": ("any", {CORE: "from typing import Any\nx: list[Any] = []"}, 2),
    "typing's Any": ("any", {CORE: "import typing\ndef f(x: typing.Any): ..."}, 2),
    "Any in a text": ("any", {CORE: "def f(x) -> 'dict[str, Any]': ..."}, 1),
    "Any in a cast": ("any", {CORE: "x = cast('list[Any]', y)"}, 1),
    "no Any": ("any", {CORE: "from typing import Any\nx: int = Company.Any\n'Any'"}, None),
    "a dict of anything": ("dicts", {CORE: "way: Any = {'a': 1}"}, 1),
    "a dict of anything, called": ("dicts", {CORE: "way: Any = dict(a=1)"}, 1),
    "a typed dict": ("dicts", {CORE: "way: dict[str, int] = {'a': 1}\nx: Any = f()"}, None),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_rule_fires_on_what_it_is_for(case):
    rule, texts, line = PLANTED[case]
    first = next(iter(texts))
    places = RULES[rule].find(parse(EMPTY | texts))
    found = [place.line for place in places if place.file == first]
    assert found == ([] if line is None else [line])


PUBLIC = "gpuprefetch/__init__.py"
FUNCTION = '''
def act(x: int) -> int:
    """Act.

    Args:
        x: a number.

    Returns:
        Another one.

    Raises:
        ValueError: never.
    """
    raise ValueError("no")
'''
CLASS = '''
class Act:
    """Acts.

    Args:
        x: a number.
    """

    def __init__(self, x: int) -> None:
        self.x = x
'''


@pytest.mark.parametrize(
    ("text", "gone", "lacking"),
    [
        (FUNCTION, "", ""),
        (FUNCTION, "    Args:", "Args:"),
        (FUNCTION, "    Returns:", "Returns:"),
        (FUNCTION, "    Raises:", "Raises:"),
        (CLASS, "", ""),
        (CLASS, "    Args:", "Args:"),
        ("class Act:\n    x: int", "", "everything"),
    ],
)
def test_a_public_docstring_says_what_it_needs_returns_and_raises(text, gone, lacking):
    name = "act" if "def act" in text else "Act"
    public = f"from gpuprefetch.core.a import {name}"
    places = structure.docstrings(parse(EMPTY | {PUBLIC: public, CORE: text.replace(gone, "")}))
    wanted = [f"{name}'s docstring lacks {lacking}"] if lacking else []
    assert [place.text for place in places] == wanted
    # What is not public may do without.
    assert not structure.docstrings(parse(EMPTY | {PUBLIC: "", CORE: text.replace(gone, "")}))


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("from gpuprefetch.core import epoch as _e\npatch.setattr(_e, 'handoff', f)", [2]),
        ("from gpuprefetch.core import epoch as _e\npatch.setattr(_e, 'JOIN_SECONDS', 1)", []),
        ("from gpuprefetch.core.epoch import Epoch\npatch.setattr(Epoch, '__next__', f)", [2]),
        ("import gpuprefetch.core.epoch as e\ne.handoff = f\ne.JOIN_SECONDS = 1", [2]),
        ("patch.setattr('gpuprefetch.core.epoch.handoff', f)", [1]),
        ("prefetcher._pipeline.job = job\nprefetcher.loader._count += 1", [1, 2]),
        ("stage = prefetcher._pipeline\nstage.job = job", [2]),
        ("setattr(prefetcher, '_at', f)", [1]),
        ('x = 1\nCHILD = """\nfrom gpuprefetch.core import epoch\nepoch.run = 1\n"""', [4]),
        ("from gpuprefetch import DataPrefetcher\npatch.setattr(DataPrefetcher, 'replay', f)", []),
        ("patch.setattr(torch.cuda, 'Event', Event)\npatch.setattr('tempfile.tempdir', x)", []),
        ("class Fake:\n    def __init__(self):\n        self._x = 1", []),
    ],
)
def test_what_tests_replace_inside_the_package_is_counted(text, lines):
    places = structure.private_writes(parse({"tests/test_a.py": dedent(text)}))
    assert [place.line for place in places] == lines


# --- The drawing of a batch's way in docs/tuning.md ---

# Who calls what it was given: there an import goes from the one that gives to the one that calls.
GIVEN = {
    ("core/epoch.py", "images/stage.py"): ("images/stage.py", "core/stage.py"),  # the protocol
    ("images/decoding.py", "images/job.py"): ("images/job.py", "images/decoding.py"),
}


def calls_drawn(text):
    """Caller and called of each line: the nearest one above that stands further to the left."""
    pairs = []
    above = []  # indent and file of the callers of the next line
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if line and not indent:
            above = []
        found = re.match(r"\w+/\w+\.py", line.lstrip())
        if found is None:
            continue
        above = [(further, file) for further, file in above if further < indent]
        pairs += [(above[-1][1], found[0])] if above else []
        above.append((indent, found[0]))
    return pairs


def test_the_drawing_of_a_batchs_way_follows_the_imports():
    page = (ROOT / "docs/tuning.md").read_text()
    (drawing,) = re.findall(r"## A batch's way\n.*?```text\n(.*?)```", page, flags=re.DOTALL)
    sources = read(ROOT, "gpuprefetch")
    names = {source.file.removeprefix("gpuprefetch/"): source.name for source in sources}
    edges = {}
    for found in structure.imports(sources):
        edges.setdefault(found.source.name, set()).add(found.target)
    calls = calls_drawn(drawing)
    assert len(calls) > 20
    assert GIVEN.keys() < set(calls)
    for call in calls:
        importer, imported = GIVEN.get(call, call)
        assert names[imported] in structure._reachable(edges, names[importer]), call


def test_a_drawing_is_read_by_its_indents():
    text = "WORKER\n  a/b.py  x\n    c/d.py\n    e/f.py\n      a/b.py\nLOOP\n  g/h.py\n  | text\n"
    assert calls_drawn(text) == [("a/b.py", "c/d.py"), ("a/b.py", "e/f.py"), ("e/f.py", "a/b.py")]
