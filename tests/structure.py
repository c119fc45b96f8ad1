"""Measure the structure of the package and of its tests: imports, fields, writes, ``Any``.

At the root of a checkout, ``python tests/structure.py`` prints each rule's number, its bar and the
places. ``python tests/structure.py fields any images/`` prints two rules for the files whose path
has ``images/`` in it. ``tests/test_structure.py`` holds the bars.
"""

import ast
import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "gpuprefetch"

# Each may import what stands before it, and itself.
FLOORS = (
    "core",
    "transforms",
    "policies",
    "lists",
    "images",
    "prefetcher",
    "preprocess",
    "migrate",
    "insight",
)
BELOW_ALL = {"connections", "installed"}  # import nothing of the package
ABOVE_ALL = {"", "__main__"}  # the package itself, and its command line

MOST_FIELDS = 12
CONSTRUCTORS = {"__init__", "__new__", "__post_init__", "__setstate__", "__set_name__"}

# Classes that may have more fields.
MANY_FIELDS = {
    "Stats": "public counters",
    "Keywords": "the arguments of DataPrefetcher, which a test holds to its signature",
}
# Attributes of objects that are not of the package's classes. What an import of another package
# names, such as ``torch.backends``, needs no line here.
WRITES = {
    "_forking.collects": "Python's threading.local()",
    "clone._iterator": "a copy of the user's DataLoader",
    "clone.collate_fn": "a copy of the user's DataLoader",
    "clone.worker_init_fn": "a copy of the user's DataLoader",
    "error.exc_msg": "torch's ExceptionWrapper, whose constructor reads the current exception",
    "error.exc_type": "torch's ExceptionWrapper, whose constructor reads the current exception",
    "error.where": "torch's ExceptionWrapper, whose constructor reads the current exception",
    "getattr(found, name).argtypes": "a ctypes function",
    "loader.generator": "the user's DataLoader",
    "loader.next_iter_state": "the user's StatefulDataLoader",
    "op.antialias": "a copy of the user's torchvision transform",
    "op.interpolation": "a copy of the user's torchvision transform",
    "self.bar.total": "tqdm's bar",
    "real.filename": "a picture that PIL has opened",
    "rest.generator": "the user's DataLoader or its copy",
    "unlock.atexit": "Python's weakref.finalize()",
    "unmap.atexit": "Python's weakref.finalize()",
}
COUNTERS = {"stats", "_stats"}  # names of a Stats, whose counters are public


@dataclass(frozen=True, order=True)
class Place:
    """A line that breaks a rule, and what to do about it."""

    file: str
    line: int
    text: str

    def __str__(self):
        return f"{self.file}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Source:
    """A parsed file."""

    file: str  # as shown
    name: str  # as imported
    is_package: bool
    tree: ast.Module

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All that is in the file, from the top."""
        return walk(self.tree)

    @functools.cached_property
    def classes(self) -> list["Fields"]:
        return [_fields(self, node) for node in self.nodes if isinstance(node, ast.ClassDef)]


def children(node: ast.AST) -> list[ast.AST]:
    """The parts of a node. It keeps them, as each rule looks through the same trees."""
    kept = vars(node)
    if "children" not in kept:
        kept["children"] = [*ast.iter_child_nodes(node)]
    return kept["children"]


def walk(tree: ast.AST) -> list[ast.AST]:
    """As :func:`ast.walk`."""
    found = [tree]
    for node in found:
        found += children(node)
    return found


def parse(texts: dict[str, str]) -> list[Source]:
    """Parse texts by file name: ``{"gpuprefetch/core/state.py": "import torch"}``."""
    sources = []
    for file, text in sorted(texts.items()):
        parts = Path(file).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        sources.append(Source(file, name, is_package, ast.parse(text)))
    return sources


@functools.cache  # a rule each reads them, and changes none
def read(root: Path, folder: str) -> list[Source]:
    files = (root / folder).rglob("*.py")
    return parse({file.relative_to(root).as_posix(): file.read_text() for file in files})


# ---------------------------------------------------------------------------------------- imports


@dataclass(frozen=True)
class Import:
    """One module imports another of the package: ``how`` is "", "in a function" or "for types"."""

    source: Source
    line: int
    target: str
    how: str


def imports(sources: list[Source]) -> list[Import]:
    """Return every import of a module of the package, whatever it is nested in."""
    known = {source.name for source in sources}
    found = []
    for source in sources:
        for node, how in _import_nodes(source.tree, ""):
            for target in sorted(_targets(source, node, known)):
                found.append(Import(source, node.lineno, target, how))
    return found


def _import_nodes(tree: ast.AST, how: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    for node in children(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, how
        elif isinstance(node, ast.If) and _name_of(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                yield from _import_nodes(ast.Module([child], []), "for types")
            for child in node.orelse:
                yield from _import_nodes(ast.Module([child], []), how)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _import_nodes(node, how or "in a function")
        elif not isinstance(node, ast.expr):
            yield from _import_nodes(node, how)


def _targets(source: Source, node: ast.Import | ast.ImportFrom, known: set[str]) -> set[str]:
    if isinstance(node, ast.Import):
        targets = {alias.name for alias in node.names}
    else:
        base = node.module or ""
        if node.level:
            parts = source.name.split(".")
            above = node.level - 1 if source.is_package else node.level
            kept = parts[: len(parts) - above]
            base = ".".join([*kept, *filter(None, [node.module])])
        names = {f"{base}.{alias.name}" for alias in node.names}
        targets = {name if name in known else base for name in names}
    return {target for target in targets if target.split(".")[0] == PACKAGE}


def floor_of(module: str) -> int:
    part = [*module.split("."), ""][1]
    if part in BELOW_ALL:
        return -1
    if part in ABOVE_ALL:
        return len(FLOORS)
    return FLOORS.index(part) if part in FLOORS else len(FLOORS) + 1


def upward_imports(sources: list[Source]) -> list[Place]:
    """Find imports of a floor above, also in functions and for types."""
    places = []
    for source in sources:
        if floor_of(source.name) > len(FLOORS):
            places.append(Place(source.file, 1, "has no floor: name it in tests/structure.py"))
    for found in imports(sources):
        if floor_of(found.source.name) < floor_of(found.target):
            how = f" ({found.how})" if found.how else ""
            text = f"imports {found.target}{how}, a floor above: move the shared part down"
            places.append(Place(found.source.file, found.line, text))
    return places


def circles(sources: list[Source], types: bool = True) -> list[Place]:
    """Find modules that import each other in a circle: one place for each import in it."""
    edges: dict[str, set[str]] = {source.name: set() for source in sources}
    every = [found for found in imports(sources) if types or found.how != "for types"]
    for found in every:
        edges[found.source.name].add(found.target)
    reached = {name: _reachable(edges, name) for name in edges}
    places = []
    for found in every:
        start = found.source.name
        if start in reached.get(found.target, ()):
            how = f" ({found.how})" if found.how else ""
            text = f"imports {found.target}{how}, which imports {start}: move what both need"
            places.append(Place(found.source.file, found.line, text))
    return places


def _reachable(edges: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for target in edges.get(waiting.pop(), ()):
            if target not in reached:
                reached.add(target)
                waiting.append(target)
    return reached


# ----------------------------------------------------------------------------------------- fields


@dataclass(frozen=True)
class Fields:
    """Attributes of a class: ``declared`` in its body or constructor, ``later`` in a method."""

    source: Source
    node: ast.ClassDef
    declared: frozenset[str]
    later: dict[str, int]  # the first line


def classes(sources: list[Source]) -> list[Fields]:
    return [fields for source in sources for fields in source.classes]


def _fields(source: Source, node: ast.ClassDef) -> Fields:
    holds_values = "NamedTuple" in {_name_of(base).split(".")[-1] for base in node.bases} or any(
        _name_of(decorator).split(".")[-1] == "dataclass" for decorator in node.decorator_list
    )
    declared: set[str] = set()
    named: set[str] = set()  # on the class itself, so they are no fields of an instance
    later: dict[str, int] = {}
    for child in node.body:
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            if "ClassVar" in _name_of(child.annotation):
                continue
            if holds_values or child.value is None:
                declared.add(child.target.id)
            else:
                named.add(child.target.id)
        elif isinstance(child, ast.Assign):
            named |= {target.id for target in child.targets if isinstance(target, ast.Name)}
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            for name, line in _set_on(_owner(child), child):
                if child.name in CONSTRUCTORS:
                    declared.add(name)
                else:
                    later.setdefault(name, line)
    properties = {
        child.name
        for child in node.body
        if isinstance(child, ast.FunctionDef)
        and any(_name_of(decorator).endswith(".setter") for decorator in child.decorator_list)
    }
    later = {name: line for name, line in later.items() if name not in declared | properties}
    return Fields(source, node, frozenset(declared - properties), later)


def _owner(method: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return what a method calls its object, "" for a static method."""
    decorators = {_name_of(decorator) for decorator in method.decorator_list}
    arguments = [*method.args.posonlyargs, *method.args.args]
    return arguments[0].arg if arguments and "staticmethod" not in decorators else ""


def _set_on(owner: str, method: ast.AST) -> Iterator[tuple[str, int]]:
    for node in walk(method):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if _name_of(node.value) == owner:
                yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and _name_of(node.func) == "object.__setattr__":
            target, name = node.args[:2]
            if _name_of(target) == owner and isinstance(name, ast.Constant):
                yield str(name.value), node.lineno


def _with_bases(fields: Fields, by_name: dict[str, Fields], seen: frozenset[str]) -> frozenset[str]:
    """Fields of a class and of what it inherits from, as far as the package has it."""
    declared = fields.declared
    for base in fields.node.bases:
        name = _name_of(base).split(".")[-1]
        if name in by_name and name not in seen:
            declared |= _with_bases(by_name[name], by_name, seen | {name})
    return declared


def fields_of(fields: Fields, by_name: dict[str, Fields]) -> frozenset[str]:
    """All fields of a class: those of its bases, of its constructor and of its methods."""
    return _with_bases(fields, by_name, frozenset({fields.node.name})) | {*fields.later}


def many_fields(sources: list[Source]) -> list[Place]:
    """Find classes with more fields than one can keep in mind; inherited fields count."""
    places = []
    found = classes(sources)
    by_name = {fields.node.name: fields for fields in found}
    for fields in found:
        name = fields.node.name
        own = fields_of(fields, by_name)
        if len(own) > MOST_FIELDS and name not in MANY_FIELDS:
            text = f"{name} has {len(own)} fields: group them ({', '.join(sorted(own))})"
            places.append(Place(fields.source.file, fields.node.lineno, text))
    return places


def late_fields(sources: list[Source]) -> list[Place]:
    """Find fields that a method adds to its object after the constructor."""
    places = []
    found = classes(sources)
    by_name = {fields.node.name: fields for fields in found}
    for fields in found:
        name = fields.node.name
        declared = _with_bases(fields, by_name, frozenset({name}))
        for field, line in fields.later.items():
            if field not in declared:
                text = f"{name}.{field} is not set in the constructor: set it there"
                places.append(Place(fields.source.file, line, text))
    return places


def far_writes(sources: list[Source]) -> list[Place]:
    """Find attributes that are set on an object of another file's class."""
    return [place for place, is_near in _writes(sources) if not is_near]


def near_writes(sources: list[Source]) -> list[Place]:
    """Find attributes that are set on another object of a class in the same file."""
    return [place for place, is_near in _writes(sources) if is_near]


def _writes(sources: list[Source]) -> Iterator[tuple[Place, bool]]:
    for source in sources:
        outside = _names_outside(source)
        near = {name for fields in classes([source]) for name in fields.declared}
        for node, owner in stores(source.tree, ""):
            target = ast.unparse(node)
            parts = _name_of(node.value).split(".")
            is_free = parts[0] in outside or parts[-1] in COUNTERS or target in WRITES
            if parts != [owner] and not is_free:
                text = f"sets {target} on another object: pass it to the constructor"
                yield Place(source.file, node.lineno, text), node.attr in near


def _names_outside(source: Source) -> set[str]:
    """Names of a file that stand for modules, classes and objects of other packages."""
    outside = set()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            names = {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            outside |= names - {PACKAGE}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            if (node.module or "").split(".")[0] != PACKAGE:
                outside |= {alias.asname or alias.name for alias in node.names}
    return outside


def stores(tree: ast.AST, owner: str) -> Iterator[tuple[ast.Attribute, str]]:
    """Attributes that are set, each with the name of the object whose method sets it."""
    for node in children(tree):
        inner = owner
        if isinstance(tree, ast.ClassDef) and isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef
        ):
            inner = _owner(node)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node, owner
        yield from stores(node, inner)


# ------------------------------------------------------------------------- assignments and types


def parallel_assignments(sources: list[Source]) -> list[Place]:
    """Find ``a, b = x, y``. A swap is no such thing, nor is the unpacking of one value."""
    places = []
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.Assign) and any(_parallel(t, node) for t in node.targets):
                text = f"{ast.unparse(node)}: assign one thing a line"
                places.append(Place(source.file, node.lineno, text))
    return places


def _parallel(target: ast.expr, node: ast.Assign) -> bool:
    sequence = ast.Tuple | ast.List
    if not isinstance(target, sequence) or not isinstance(node.value, sequence):
        return False
    left, right = [[ast.unparse(e) for e in side.elts] for side in (target, node.value)]
    return len(left) == len(right) and sorted(left) != sorted(right)


def any_types(sources: list[Source]) -> list[Place]:
    """Find each ``Any``, also in annotations that are strings."""
    places = []
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.Name | ast.Attribute) and _is_any(node):
                places.append(Place(source.file, node.lineno, "Any: name the type"))
        for annotation in _annotations(source):
            for node in walk(annotation):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    for part in walk(_expression(node.value)):
                        if _is_any(part):
                            text = "Any: name the type"
                            places.append(Place(source.file, node.lineno, text))
    return places


def any_dicts(sources: list[Source]) -> list[Place]:
    """Find ``options: Any = {...}``."""
    places = []
    for source in sources:
        for node in source.nodes:
            if not isinstance(node, ast.AnnAssign) or not _is_any(node.annotation):
                continue
            called = isinstance(node.value, ast.Call) and _name_of(node.value.func) == "dict"
            if called or isinstance(node.value, ast.Dict | ast.DictComp):
                text = f"{ast.unparse(node.target)}: Any = {{...}}: pass keyword arguments"
                places.append(Place(source.file, node.lineno, text))
    return places


def _annotations(source: Source) -> Iterator[ast.expr]:
    for node in source.nodes:
        for part in ("annotation", "returns"):
            if isinstance(annotation := getattr(node, part, None), ast.expr):
                yield annotation
        if isinstance(node, ast.Call) and _name_of(node.func).split(".")[-1] == "cast":
            yield from node.args[:1]


def _expression(text: str) -> ast.AST:
    try:
        return ast.parse(text, mode="eval")
    except SyntaxError:
        return ast.Module([], [])


def _is_any(node: ast.AST) -> bool:
    return _name_of(node) in ("Any", "typing.Any")


def _name_of(node: ast.AST) -> str:
    """Return a dotted name, or the name of what is subscripted or called; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        value = _name_of(node.value)
        return f"{value}.{node.attr}" if value else ""
    if isinstance(node, ast.Subscript):
        return _name_of(node.value)
    if isinstance(node, ast.Call):
        return _name_of(node.func)
    return ""


# -------------------------------------------------------------------------------------- docstrings


def docstrings(sources: list[Source]) -> list[Place]:
    """Find public names whose docstring lacks their arguments, result or errors."""
    by_name = {source.name: source for source in sources}
    public = {
        alias.name: by_name[node.module]
        for node in by_name[PACKAGE].tree.body
        if isinstance(node, ast.ImportFrom) and node.module in by_name
        for alias in node.names
        if not (alias.asname or alias.name).startswith("_")
    }
    places = []
    for name, source in public.items():
        for node in source.tree.body:
            definition = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
            if definition and (lacking := _lacking(node)):
                text = f"{name}'s docstring lacks {', '.join(lacking)}"
                places.append(Place(source.file, node.lineno, text))
    return places


def _lacking(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    documentation = ast.get_docstring(node)
    if documentation is None:
        return ["everything"]
    function: ast.AST = node
    if isinstance(node, ast.ClassDef):
        methods = {child.name: child for child in node.body if isinstance(child, ast.FunctionDef)}
        function = methods.get("__init__") or ast.Module([], [])
    needed = {}
    if isinstance(function, ast.FunctionDef):
        arguments = function.args
        count = len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])
        needed["Args:"] = count > isinstance(node, ast.ClassDef)
        returns = ast.unparse(function.returns) if function.returns else "None"
        needed["Returns:"] = returns not in ("None", "NoReturn", "Never")
    needed["Raises:"] = any(isinstance(child, ast.Raise) and child.exc for child in walk(function))
    return [part for part, is_needed in needed.items() if is_needed and part not in documentation]


# ------------------------------------------------------------------------------------------- tests


def private_writes(sources: list[Source]) -> list[Place]:
    """Find what tests replace inside the package, or under a private name of any library.

    Public are the names of ``gpuprefetch`` itself. All modules and classes below it are private.
    A limit or a time in capitals may be changed: ``constants`` in ``conftest.py`` does it.
    """
    places = []
    for source in sources:
        if source.file == "tests/test_structure.py":  # whose texts are planted
            continue
        for tree, line in _code_of(source.tree):
            for node, text in _private_writes(tree):
                text = f"{text}: use a public argument or a fake at a seam"
                places.append(Place(source.file, line + node.lineno, text))
    return places


def _code_of(tree: ast.Module) -> Iterator[tuple[ast.Module, int]]:
    """Yield a file's code and that in its texts, each with the line before its first one."""
    yield tree, 0
    for node in walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            with contextlib.suppress(SyntaxError):  # another text
                yield ast.parse(node.value), node.lineno - 1


def _private_writes(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    inside = _names_inside(tree)
    for node in walk(tree):
        if isinstance(node, ast.Call) and _name_of(node.func).split(".")[-1] == "setattr":
            if _replaces_inside(node, inside):
                yield node, ast.unparse(node)[:90]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if _is_inside(node.value, node.attr, inside) and _name_of(node.value) != "self":
                yield node, f"sets {ast.unparse(node)}"


def _names_inside(tree: ast.AST) -> set[str]:
    """Names of a test file that stand for modules and objects inside the package."""
    inside = set()
    for node in walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            for alias in node.names:
                if node.module != PACKAGE or alias.name.islower():
                    inside.add(alias.asname or alias.name)
        elif isinstance(node, ast.Import):
            inside |= {a.asname for a in node.names if a.asname and a.name.startswith(PACKAGE)}
        elif isinstance(node, ast.Assign) and _reads_private(node.value):
            inside |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return inside


def _reads_private(value: ast.expr) -> bool:
    """Whether a value is a private attribute of a loader, such as ``prefetcher._pipeline``."""
    parts = _name_of(value).split(".")
    return isinstance(value, ast.Attribute) and any(_is_private(part) for part in parts[1:])


def _replaces_inside(node: ast.Call, inside: set[str]) -> bool:
    if not node.args:
        return False
    target, *rest = node.args
    if isinstance(target, ast.Constant) and isinstance(target.value, str):
        parts = target.value.split(".")
        return parts[0] == PACKAGE or any(_is_private(part) for part in parts)
    name = rest[0].value if rest and isinstance(rest[0], ast.Constant) else ""
    return _is_inside(target, str(name), inside)


def _is_inside(target: ast.expr, name: str, inside: set[str]) -> bool:
    parts = _name_of(target).split(".")
    if name.isupper() and not name.startswith("_"):
        return False
    return parts[0] in inside or any(_is_private(part) for part in [*parts[1:], name])


def _is_private(name: str) -> bool:
    # What ctypes.byref() refers to is named nowhere else.
    return name.startswith("_") and not name.endswith("__") and name != "_obj"


# ------------------------------------------------------------------------------------------- rules


@dataclass(frozen=True)
class Rule:
    """What is counted in which folder, and the most of it that may be there."""

    find: Callable[[list[Source]], list[Place]]
    most: int
    folder: str = PACKAGE


RULES = {
    "upward": Rule(upward_imports, 0),
    "circles": Rule(circles, 0),
    "fields": Rule(many_fields, 0),
    "late": Rule(late_fields, 0),
    "far-writes": Rule(far_writes, 0),
    "near-writes": Rule(near_writes, 0),
    "parallel": Rule(parallel_assignments, 40),
    "any": Rule(any_types, 300),
    "dicts": Rule(any_dicts, 0),
    "docstrings": Rule(docstrings, 0),
    "private": Rule(private_writes, 10, "tests"),
    "parallel-benchmarks": Rule(parallel_assignments, 0, "benchmarks"),
    "parallel-examples": Rule(parallel_assignments, 0, "examples"),
    "parallel-checks": Rule(parallel_assignments, 0, "tests/checks"),
}


def main(words: list[str]) -> None:
    rules = [word for word in words if word in RULES] or [*RULES]
    parts = [word for word in words if word not in RULES]
    for name in rules:
        rule = RULES[name]
        places = sorted(rule.find(read(Path(), rule.folder)))
        places = [p for p in places if not parts or any(part in p.file for part in parts)]
        print(f"{name}: {len(places)} (at most {rule.most})")
        if len(places) <= 60 or parts or len(rules) == 1:
            for place in places:
                print(f"  {place}")
        else:
            for file, count in Counter(place.file for place in places).most_common():
                print(f"  {count:4} {file}")


if __name__ == "__main__":
    main(sys.argv[1:])
