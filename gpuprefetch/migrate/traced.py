"""A transform of the user's that gives several views: its pipelines stand aside in every sample.

The code of such a class may do anything, so it runs as it is, for each sample in its worker, with a
stand-in for the picture. Only the pipelines that it holds are others: each notes what it was called
with, and gives a token. What the class returns must be these tokens, untouched::

    def __call__(self, picture):          picture            a stand-in
        weak = self.weak(picture)         a token            weak
        strong = self.strong(picture)     a token            strong
        return (self.norm(weak),          a token            weak, norm    -> the image
                self.norm(strong),        a token            strong, norm  -> ViewPlace(1)
                self.mask())              what it gives      the same

All samples must have the chains of the first one. These become the lists of ``Views``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn

import torch

from gpuprefetch.core.nested import Leaf, Sample, map_leaves, select
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.guard import UndecodedError, is_marked
from gpuprefetch.lists.forms import PICTURES, Form
from gpuprefetch.lists.rgb import Modes
from gpuprefetch.lists.to_tensor import in_torchvision
from gpuprefetch.migrate.faces import Faces, holds_pipeline
from gpuprefetch.migrate.file_tensor import FileTensor, ReadFile
from gpuprefetch.migrate.picture import Picture
from gpuprefetch.migrate.result import (
    LaterView,
    LeftEncoded,
    Result,
    Unusable,
    has_result,
    note_result,
    only_argument,
)
from gpuprefetch.migrate.taken import Takes
from gpuprefetch.migrate.unseen import unseen_in
from gpuprefetch.migrate.ways import IN_WORKERS
from gpuprefetch.policies.known import flatten, title, torchvision_class
from gpuprefetch.policies.registry import LibraryOp
from gpuprefetch.policies.timm import timm_class

Chain = tuple[str, ...]  # the pipelines of a view, by where the transform holds them
_PLAIN = (bool, int, float, str, Enum)  # what an attribute of a pipeline may be read as

_SAME = (
    "accelerate moves a transform of several views that calls the same pipelines in the same order "
    "for every picture. Put a choice between them into a pipeline, v2.RandomChoice([...]), or "
    + IN_WORKERS
)
_ONE_BRANCH = (
    "what {path} gave is used for two views, which on the device would not have its random "
    "parameters in common. Let each view call its own pipeline on the picture, or " + IN_WORKERS
)


# --- A sample ---


class Token(Unusable):
    """What a pipeline gave while the transform is called; another pipeline may take it.

    Args:
        number: of the call.
        is_tensor: whether the pipeline would have given a tensor, and not a picture.
    """

    __slots__ = ("is_tensor", "number")

    def __init__(self, number: int, *, is_tensor: bool) -> None:
        self.number = number
        self.is_tensor = is_tensor

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance() goes by
        from PIL import Image

        return torch.Tensor if self.is_tensor else Image.Image


@dataclass(slots=True)
class _Trace:
    """The calls of one transform's pipelines for one picture."""

    tokens: list[Token] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)  # of each token
    used: set[int] = field(default_factory=set)  # the tokens that were passed on
    file: EncodedImage | None = None

    def call(self, pipeline: Aside, given: object) -> Token:
        before: Chain = ()
        is_tensor = False
        if type(given) is Token:
            before = self._passed_on(given)
            is_tensor = given.is_tensor
        elif type(given) is FileTensor:
            self._read(given.read, pipeline)
            is_tensor = True
        elif type(given) is Picture:
            self._read(given, pipeline)
        else:
            raise UndecodedError(
                f"{pipeline.path} of the transform gets a picture that was changed before. {_SAME}"
            )
        token = Token(len(self.tokens), is_tensor=pipeline.gives_tensors(is_tensor))
        self.tokens.append(token)
        self.chains.append((*before, pipeline.path))
        return token

    def _read(self, picture: Picture | ReadFile, pipeline: Aside) -> None:
        file = picture.left_encoded(pipeline.takes) if not picture.touched else None
        if file is None:
            raise UndecodedError(
                f"{picture.name} is changed, or its pixels are read, before {pipeline.path} of the "
                f"transform gets it: by .{picture.touched}. {_SAME}"
            )
        if self.file is not None and file is not self.file:
            raise UndecodedError("the pipelines of its transform are called with two pictures.")
        self.file = file

    def require_own(self, token: Token) -> None:
        """Refuse a token of an earlier picture, which the transform has kept."""
        if token.number >= len(self.tokens) or token is not self.tokens[token.number]:
            raise UndecodedError("the transform uses what it has made of an earlier picture.")

    def _passed_on(self, token: Token) -> Chain:
        self.require_own(token)
        chain = self.chains[token.number]
        if token.number in self.used:
            raise UndecodedError(_ONE_BRANCH.format(path=chain[-1]))
        self.used.add(token.number)
        return chain


class _Running(threading.local):
    """The trace of the transform that this thread calls."""

    def __init__(self) -> None:
        self.trace: _Trace | None = None

    def __enter__(self) -> _Trace:
        self.trace = trace = _Trace()
        return trace

    def __exit__(self, *error: object) -> None:
        self.trace = None


_running = _Running()


# --- The pipelines ---


class Aside:
    """Stands for a pipeline that runs on the device.

    Args:
        pipeline: the user's.
        path: where the transform holds it, as ``.transforms[0]``.
    """

    def __init__(self, pipeline: LibraryOp, path: str) -> None:
        self.pipeline = pipeline
        self.path = path
        self._ops = [*flatten(pipeline)]
        self.takes = Takes.of(self._ops, begins=None)
        self._is_made = True

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance() goes by
        return type(self.pipeline)

    def __call__(self, *given: object, **named: object) -> object:
        from PIL import Image

        def is_picture(leaf: object) -> bool:
            return is_marked(leaf) or type(leaf) is FileTensor or isinstance(leaf, Image.Image)

        if not select([given, named], is_picture):
            return self.pipeline(*given, **named)  # with something else than a picture
        if _running.trace is None:
            raise UndecodedError(
                f"{self.path} of the transform is called in another thread, or after the transform."
            )
        values = [*given, *named.values()]
        if len(values) != 1:
            raise UndecodedError(
                f"{self.path} of the transform is called with {len(values)} arguments, and not "
                "with one picture."
            )
        return _running.trace.call(self, values[0])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self.pipeline, name)
        values = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(each, _PLAIN) or each is None for each in values):
            raise UndecodedError(
                f"the transform uses .{name} of {self.path}, which it may change or call. {_SAME}"
            )
        return value

    def __setattr__(self, name: str, value: object) -> None:
        if "_is_made" in vars(self):
            raise UndecodedError(
                f"the transform sets .{name} of {self.path} for a picture. {_SAME}"
            )
        super().__setattr__(name, value)

    def gives_tensors(self, given: bool) -> bool:
        """Whether it gives tensors, of tensors or of pictures."""
        form = Form(is_picture=True, is_tensor=given)
        for op in self._ops:
            form = form.after(in_torchvision(op))
        return form.is_tensor


# --- The transform ---


class LeftTraced(LeftEncoded):
    """Stands for a transform whose pipelines run on the device, and calls the rest of it.

    Args:
        op: the user's.
        begins: the form of what the transform gets.
        expected: the chain of each view; None for the first sample, which tells.
    """

    def __init__(
        self, op: LibraryOp, begins: Form, expected: Sequence[Chain] | None = None
    ) -> None:
        super().__init__(Takes(Modes.RGB, begins=begins))
        faces = Faces(Aside)
        self.op = op
        self._begins = begins
        self.expected = expected
        self.seen: list[list[Chain]] = []  # the chains of each sample, while none are expected
        self._face = faces.of(op, "")
        self.pipelines = faces.found  # that stand aside, by where the transform holds them
        self.objects = faces.objects  # whose code runs in every sample

    def __reduce__(self) -> tuple[object, ...]:
        return LeftTraced, (self.op, self._begins, self.expected)

    @staticmethod
    def of_pipeline(pipeline: Sequence[LibraryOp], begins: Form = PICTURES) -> LeftTraced | None:
        """For a transform that no library knows, if it holds pipelines; None for any other."""
        (op, *others) = pipeline or [None]
        known = torchvision_class(op) is not None or timm_class(op) is not None
        known = known or isinstance(op, torch.jit.ScriptModule)  # whose parts nobody sees
        if others or known or holds_pipeline(op) or isinstance(op, LeftEncoded):
            return None
        traced = LeftTraced(op, begins)
        return traced if traced.pipelines else None

    def __call__(self, *given: object, **named: object) -> object:
        picture = self.stand_in_for(only_argument(given, named))
        with _running as trace:
            made = self._face(picture)
        chains, sample = self._placed(trace, made)
        if self.expected is None:
            self.seen.append(chains)
        elif chains != [*self.expected]:
            self._refuse_others(chains)
        if len(chains) > 1 and has_result():
            raise UndecodedError(
                "its transform of several views is called twice for a sample. Let each sample have "
                "one picture of them."
            )
        for result in select(sample, is_marked):
            note_result(result)
        return sample

    def _placed(self, trace: _Trace, made: Sample) -> tuple[list[Chain], Sample]:
        """The chain of each view, and what was made with the image and places for tokens."""
        leaves = select(made, is_marked)
        if any(type(leaf) is not Token for leaf in leaves):
            raise UndecodedError(f"{title(self.op)} returns the picture itself. {_SAME}")
        for token in leaves:
            trace.require_own(token)
        numbers = [*dict.fromkeys(leaf.number for leaf in leaves)]
        if trace.file is None or not numbers:
            raise UndecodedError(
                f"{title(self.op)} returns nothing that a pipeline of it has made of the picture. "
                f"{_SAME}"
            )
        views = {number: view for view, number in enumerate(numbers)}
        lost = sorted({*range(len(trace.chains))} - trace.used - {*numbers})
        if lost:
            path = trace.chains[lost[0]][-1]
            raise UndecodedError(f"{title(self.op)} does not return what {path} gave.")
        if again := trace.used & {*numbers}:
            raise UndecodedError(_ONE_BRANCH.format(path=trace.chains[min(again)][-1]))
        first = Result.of(trace.file)
        placed = set[int]()

        def place(leaf: Leaf) -> Leaf:
            if type(leaf) is not Token:
                return leaf
            view = views[leaf.number]
            if placed or view:
                return LaterView(view)
            placed.add(view)
            return first

        sample = map_leaves(place, made, is_marked)
        return [trace.chains[number] for number in numbers], sample

    def _refuse_others(self, chains: Sequence[Chain]) -> NoReturn:
        assert self.expected is not None
        raise UndecodedError(
            f"{title(self.op)} calls {_named(chains)} here, and {_named(self.expected)} for the "
            f"first sample. {_SAME}"
        )

    def refuse_unseen(self) -> None:
        """Refuse a transform whose code does what its samples do not show."""
        if unseen := unseen_in(self.objects):
            raise UndecodedError(f"{unseen}, which no sample shows. {_SAME}")

    def lists(self) -> list[list[LibraryOp]]:
        """The ops of each view."""
        return [
            [op for path in chain for op in flatten(self.pipelines[path])]
            for chain in self.expected or ()
        ]


def _named(chains: Sequence[Chain]) -> str:
    return ", ".join(map(name_of_chain, chains))


def name_of_chain(chain: Chain) -> str:
    """How a chain is told of: ``weak + normalize``."""
    return " + ".join(path.removeprefix(".") for path in chain)
