"""The user's objects and functions, with stand-ins in the places of the pipelines that they hold.

The code is the user's own. What it finds under some names is another thing::

    class Pair:
        def __call__(self, picture):
            return self.weak(picture)        weak: an attribute

    def transforms(rows):
        rows["x"] = pipeline(rows["image"])  pipeline: a variable around the function, or a global
        return rows

A face shares all state with what it stands for. The user's own stays as it is.
"""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from gpuprefetch.images.guard import STANDS_ASIDE, UndecodedError
from gpuprefetch.lists.views import is_pipeline
from gpuprefetch.migrate.unseen import is_of_library
from gpuprefetch.policies.known import name_of, torchvision_class
from gpuprefetch.policies.registry import LibraryOp
from gpuprefetch.policies.timm import from_timm, timm_class

_DEEPEST = 4  # of objects within objects
_MOST = 64  # entries of a list that are looked at


def holds_pipeline(value: LibraryOp) -> bool:
    """Whether a value is a pipeline itself, and no list of them or function that calls them."""
    if isinstance(value, (list, tuple, torch.nn.ModuleList, type, FunctionType)):
        return False
    return callable(value) and (name_of(from_timm(value)) is not None or is_pipeline(value))


@dataclass(slots=True)
class Faces:
    """Makes faces of what holds pipelines.

    Args:
        stand_in: makes what stands for a pipeline, of it and where it was found, such as
            ``.transforms[0]``.
    """

    stand_in: Callable[[LibraryOp, str], object]
    found: dict[str, LibraryOp] = field(default_factory=dict)  # the pipelines, by where they are
    objects: list[object] = field(default_factory=list)  # whose code finds stand-ins
    _known: dict[int, object] = field(default_factory=dict)  # each object has one face

    def of(self, value: LibraryOp, path: str, depth: int = 0) -> LibraryOp:
        """What stands for a value: itself where no pipeline is in it."""
        if id(value) not in self._known:
            self._known[id(value)] = value  # while it is looked at: it may hold itself
            self._known[id(value)] = self._made(value, path, depth)
        return self._known[id(value)]

    def _made(self, value: LibraryOp, path: str, depth: int) -> LibraryOp:
        if holds_pipeline(value):
            self.found[path] = value
            return self.stand_in(value, path)
        if isinstance(value, (list, tuple, torch.nn.ModuleList)) and len(value) <= _MOST:
            items = [self.of(each, f"{path}[{n}]", depth) for n, each in enumerate(value)]
            same = all(a is b for a, b in zip(items, value, strict=True))
            if same or type(value) not in (list, tuple, torch.nn.ModuleList):
                return value
            return tuple(items) if isinstance(value, tuple) else items
        if type(value) is dict and len(value) <= _MOST:
            named = {key: self.of(each, f"{path}[{key!r}]", depth) for key, each in value.items()}
            return value if all(named[key] is value[key] for key in value) else named
        if depth == _DEEPEST:
            return value
        if isinstance(value, FunctionType):
            return self._of_function(value, path, depth)
        if isinstance(value, MethodType):
            owner = self.of(value.__self__, path, depth + 1)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if type(value) is partial:
            return self._of_partial(value, path, depth)
        plain = isinstance(value, (type, ModuleType, torch.Tensor))
        known = torchvision_class(value) is not None or timm_class(value) is not None
        if plain or known or not hasattr(value, "__dict__"):
            return value
        return self._of_object(value, path, depth)

    def _of_partial(self, value: partial[Any], path: str, depth: int) -> object:
        parts = [value.func, list(value.args), dict(value.keywords)]
        function, given, named = (self.of(part, path, depth + 1) for part in parts)
        if all(a is b for a, b in zip((function, given, named), parts, strict=True)):
            return value
        return partial(function, *given, **named)

    def _of_function(self, function: FunctionType, path: str, depth: int) -> object:
        if is_of_library(function):
            return function
        held = _held_by(function, _globals_of(function))
        others: dict[Place, tuple[object, object]] = {}
        for place, value in held.items():
            face = self.of(value, f"{path}.{place[1]}", depth + 1)
            if face is not value:
                others[place] = (value, face)
        if not others:
            return function
        self.objects.append(function)
        return FunctionFace(function, others)

    def _of_object(self, thing: LibraryOp, path: str, depth: int) -> LibraryOp:
        held = _attributes(thing)
        faces = {name: self.of(value, f"{path}.{name}", depth + 1) for name, value in held.items()}
        others = {name: face for name, face in faces.items() if face is not held[name]}
        if not others:
            return thing
        self.objects.append(thing)
        properties = {
            name: property(partial(_read, thing, name, held[name], face))
            for name, face in others.items()
        }
        return with_faces(thing, properties | {STANDS_ASIDE: True})


# --- Objects ---


def with_faces(thing: Any, faces: Mapping[str, object]) -> Any:
    """An object that shares all state of ``thing``, of a class derived from its class.

    ``faces`` are the attributes of that class, such as properties.
    """
    kind = type(thing)
    # Neither the metaclass of the user's class nor its __init_subclass__ hears of this class.
    face = type.__new__(type(kind), kind.__name__, (_Unheard, kind), dict(faces))
    view: Any = object.__new__(face)
    object.__setattr__(view, "__dict__", vars(thing))
    return view


class _Unheard:
    """Stands before a user's class among the bases of another: its hooks do not run."""

    __slots__ = ()

    def __init_subclass__(cls, **options: object) -> None:
        pass

    def __del__(self) -> None:
        pass  # the user's would close or delete what the object itself still has


def stale(what: str) -> TypeError:
    return TypeError(
        f"{what} has changed since accelerate(). Call it again. If that was meant for another "
        "loader of the same dataset, as after random_split, which copies none, give each loader a "
        "dataset of its own."
    )


def _read(thing: object, name: str, seen: object, face: object, view: object) -> object:
    own = vars(thing)
    modules: dict[str, object] = own.get("_modules", {})
    now = modules.get(name) if name in modules else own.get(name, getattr(type(thing), name, None))
    if now is not seen:
        raise stale(f"transform.{name}")
    return face


def _attributes(thing: LibraryOp) -> dict[str, Any]:
    """The attributes of an object and of its class that may hold pipelines."""
    found: dict[str, Any] = {}
    for kind in reversed(type(thing).__mro__):
        if kind not in (object, torch.nn.Module):
            found |= {n: v for n, v in vars(kind).items() if not n.startswith("__")}
    # Methods are not looked into: they find what they use in the object.
    found = {n: value for n, value in found.items() if not isinstance(value, FunctionType)}
    found |= vars(thing)
    if isinstance(thing, torch.nn.Module):
        found.pop("_modules", None)
        found |= thing._modules
    return found


# --- Functions ---

Place = tuple[str, str]  # where a function finds a value: "global", "around" or "default"; the name


class FunctionFace:
    """A function of the user's that finds other values in some places.

    Args:
        function: the user's.
        others: what the function has there, and what it finds.
    """

    def __init__(
        self, function: FunctionType, others: Mapping[Place, tuple[object, object]]
    ) -> None:
        self._function = function
        self._globals = _globals_of(function)
        self._seen = {place: seen for place, (seen, _) in others.items()}
        self._faces = {place: face for place, (_, face) in others.items()}
        stored = _stored_by(function.__code__)
        self._sets = [n for n in stored if n in function.__globals__ or ("around", n) in others]

    def __call__(self, *given: object, **named: object) -> object:
        own = self._function
        if self._sets:
            raise UndecodedError(
                f"{own.__qualname__} sets {self._sets[0]!r}, a variable around it. Let it keep "
                "what it counts in an object, such as a list."
            )
        held = _held_by(own, self._globals)
        for place, seen in self._seen.items():
            if held.get(place) is not seen:
                raise stale(f"{place[1]} of {own.__qualname__}")
        found = held | self._faces
        # Other globals are what they are at the moment of the call.
        others = {name: face for (kind, name), face in self._faces.items() if kind == "global"}
        cells = zip(own.__code__.co_freevars, own.__closure__ or (), strict=True)
        closure = tuple(
            CellType(self._faces[place]) if (place := ("around", name)) in self._faces else cell
            for name, cell in cells
        )
        defaults = tuple(found["default", name] for name in _with_defaults(own))
        scope = own.__globals__ | others
        function = FunctionType(own.__code__, scope, own.__name__, defaults, closure)
        by_name = {name: found["default", name] for name in own.__kwdefaults__ or {}}
        return function(*given, **(by_name | named))


def _held_by(function: FunctionType, global_names: Sequence[str]) -> dict[Place, Any]:
    """What a function finds by name around it, and what its arguments are by default."""
    held: dict[Place, Any] = {}
    for name in global_names:
        if name in function.__globals__:
            held["global", name] = function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing is in it yet
            held["around", name] = cell.cell_contents
    for name, value in zip(_with_defaults(function), function.__defaults__ or (), strict=True):
        held["default", name] = value
    for name, value in (function.__kwdefaults__ or {}).items():
        held["default", name] = value
    return held


def _with_defaults(function: FunctionType) -> Sequence[str]:
    """The names of the arguments by position that have defaults."""
    code = function.__code__
    count = len(function.__defaults__ or ())
    return code.co_varnames[code.co_argcount - count : code.co_argcount]


def _globals_of(function: FunctionType) -> list[str]:
    """The global names that a function loads, which exist."""
    loaded = _names_in(function.__code__, "LOAD_GLOBAL", "LOAD_NAME")
    return [name for name in loaded if name in function.__globals__]


def _stored_by(code: CodeType) -> list[str]:
    """The global names, and those of variables around a function, that its code sets."""
    around = _names_in(code, "STORE_DEREF", "DELETE_DEREF")
    inner = {name for part in _codes(code) for name in part.co_cellvars}
    names = [name for name in around if name not in inner]
    return names + _names_in(code, "STORE_GLOBAL", "DELETE_GLOBAL")


def _names_in(code: CodeType, *kinds: str) -> list[str]:
    """The names in instructions of these kinds, each once."""
    names = [
        each.argval
        for part in _codes(code)
        for each in dis.get_instructions(part)
        if each.opname in kinds
    ]
    return [*dict.fromkeys(names)]


def _codes(code: CodeType) -> list[CodeType]:
    """A code, and those of the functions and comprehensions in it."""
    codes = [code]
    for each in codes:
        codes += [part for part in each.co_consts if isinstance(part, CodeType)]
    return codes
