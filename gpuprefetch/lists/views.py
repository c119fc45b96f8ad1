"""Several views of one decode: how they are given, and where a user's class holds them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from types import FunctionType, ModuleType

import torch

from gpuprefetch.lists.processor import image_processor
from gpuprefetch.policies.known import flatten, name_of, title
from gpuprefetch.policies.registry import LibraryOp

_MOST = 64  # entries of a list that are looked at: others may hold a dataset
_DEEPEST = 3  # of attributes: a class of views, a view in it, and the pipeline of that
ENCODED = "EncodedImage(Path(path).read_bytes(), index, path)"


class Views:
    """Several views of each image, as contrastive and self-distilling training needs them.

    An image is read, copied and decoded once. Give ``Views`` in place of a list of transforms::

        crop = [RandomResizedCrop(224), K.RandomHorizontalFlip(), jitter, normalize]
        loader = DataPrefetcher(loader, transforms=Views(crop, crop))
        for (first, second), labels in loader: ...

    Random parameters are sampled for each view. The first view has those of its list alone. The
    loop gets a list with an ``(N, C, H, W)`` batch for each view, as a ``DataLoader`` gives it. A
    tuple of pipelines stands for ``Views`` of them: ``transforms=(crop, crop)``.

    Args:
        lists: two or more, each as for ``DataPrefetcher(transforms=...)``, with a crop or a resize:
            lists of transforms, or ``Compose`` and other containers.

    Raises:
        TypeError: for what is no list.
        ValueError: for a single one.
    """

    def __init__(self, *lists: Sequence[Callable[..., object]] | Callable[..., object]) -> None:
        for each in lists:
            if not is_pipeline(each) or any(isinstance(op, Views) for op in flatten(each)):
                raise TypeError(
                    f"Views takes a list of transforms for each view, got {type(each).__name__}: "
                    f"{_lists_in(each)}"
                )
        if len(lists) < 2:
            raise ValueError(
                f"Views takes two lists of transforms or more, got {len(lists)}. For one view give "
                "transforms=[...] itself."
            )
        self.lists = lists

    def __repr__(self) -> str:
        return f"Views({', '.join(map(repr, self.lists))})"


def _lists_in(view: LibraryOp) -> str:
    """What to write for a view that is no list, which may hold one."""
    held = [*dict(_held(view, "view", 0))]
    if held:
        return f"give its pipeline, Views({held[0]}, ...) where view is that object."
    return "Views([RandomResizedCrop(224), ...], [RandomResizedCrop(96), ...])."


def is_pipeline(given: LibraryOp) -> bool:
    """Whether something is a list of transforms, or a container that stands for its parts."""
    if isinstance(given, (list, tuple)):
        return True
    return callable(given) and [*map(id, flatten(given))] != [id(given)]


def lists_of(transforms: LibraryOp) -> list[LibraryOp]:
    """The list of each view: several for ``Views`` and for a tuple of pipelines."""
    if isinstance(transforms, tuple) and len(transforms) > 1 and all(map(is_pipeline, transforms)):
        transforms = Views(*transforms)
    return [*transforms.lists] if isinstance(transforms, Views) else [transforms]


def lines_for(op: LibraryOp) -> str:
    """What to write for a user's transform that holds pipelines; empty if it holds none."""
    held = dict(_held(op, "t", 0))
    if image_processor(op) is not None:
        held = {"t": op}
    if not held:
        return ""
    paths = [*held]
    where = "these are the function's variables"
    if not isinstance(op, FunctionType):
        where = f"t is the {title(op)}"
    where = f"{where} and a dataset of your own gives {ENCODED} in place of that folder's"
    files = "DataPrefetcher(DataLoader(EncodedImageFolder(root), ...), transforms="
    processors = [path for path, value in held.items() if image_processor(value) is not None]
    if processors:
        write = (
            "Write"
            if held[processors[0]] is op
            else f"If it gives what {processors[0]} gives, write"
        )
        return f"{write} {files}convert_transforms({processors[0]})), where {where}"
    called = paths if len(paths) > 1 else paths * 2
    views = f"Views(*map(convert_transforms, [{', '.join(called)}]))"
    return (
        f"If it gives several views of a picture, write {files}{views}), where {where}, with each "
        "pipeline as often as it is called; a mask beside the picture is made in the dataset or "
        f"the loop. If it gives what {paths[0]} gives, put that in its place"
    )


def _held(op: LibraryOp, path: str, depth: int) -> Iterator[tuple[str, LibraryOp]]:
    """The pipelines and processors that an object or a function holds, by their expressions."""
    if depth == _DEEPEST:
        return
    for name, value in _variables(op, path):
        several = isinstance(value, (list, tuple, torch.nn.ModuleList))
        if _is_read(value):
            yield name, value
        elif several:
            for number, each in enumerate(islice(value, _MOST)):
                place = f"{name}[{number}]"
                if _is_read(each):
                    yield place, each
                elif name_of(each) is None and hasattr(each, "__dict__"):
                    yield from _held(each, place, depth + 1)
        elif not isinstance(value, (type, FunctionType, ModuleType)) and hasattr(value, "__dict__"):
            yield from _held(value, name, depth + 1)


def _variables(op: LibraryOp, path: str) -> Iterator[tuple[str, LibraryOp]]:
    if isinstance(op, FunctionType):
        code = op.__code__
        for name, cell in zip(code.co_freevars, op.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # nothing is in it yet
                yield name, cell.cell_contents
        yield from ((n, op.__globals__[n]) for n in code.co_names if n in op.__globals__)
        return
    modules = op.named_children() if isinstance(op, torch.nn.Module) else ()
    for name, value in [*getattr(op, "__dict__", {}).items(), *modules]:
        if not name.startswith("_"):
            yield f"{path}.{name}", value


def _is_read(value: LibraryOp) -> bool:
    """Whether a value is an image processor, or a pipeline with an op of torchvision's."""
    if image_processor(value) is not None:
        return True
    if not callable(value) and not isinstance(value, (list, tuple)):
        return False
    if not is_pipeline(value):
        return False
    ops = [*flatten(value)]
    nested = isinstance(value, (list, tuple)) and any(map(is_pipeline, value))
    return not nested and all(map(callable, ops)) and any(name_of(op) is not None for op in ops)
