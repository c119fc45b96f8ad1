"""The function that a dataset of Hugging Face's has for its rows: ``dataset.set_transform``.

It makes samples of rows, whose pictures are open, and calls a pipeline that it finds around it::

    def transforms(rows):
        rows["pixel_values"] = [pipeline(picture.convert("RGB")) for picture in rows["image"]]
        return rows

    dataset.set_transform(transforms)

All of it runs as it is, but for that pipeline.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

from gpuprefetch.migrate.faces import Faces
from gpuprefetch.policies.known import title
from gpuprefetch.policies.per_image import Transform
from gpuprefetch.policies.registry import LibraryOp

Dataset = Any  # the user's, of any class

_FUNCTION = (
    'def transforms(rows): return {**rows, "pixel_values": [pipeline(p.convert("RGB")) for p in '
    'rows["image"]]}, by dataset.set_transform(transforms)'
)
_ENCODED = (
    'dataset.cast_column("image", datasets.Image(decode=False)), with set_transform(lambda rows: '
    '{**rows, "image": [EncodedImage(f["bytes"] or Path(f["path"]).read_bytes()) for f in '
    'rows["image"]]}), and DataPrefetcher(loader, transforms=convert_transforms(pipeline)), where '
    "the pipeline may also be an image processor."
)
# What to write in place of a function that uses what its pipeline gives.
WAYS_OF_ROWS = (
    "Two ways work. Let the pipeline do it: pipeline = v2.Compose([pipeline, v2.Lambda(function)]),"
    f" with a function of one image (C, H, W). Or leave the files encoded: {_ENCODED}"
)


def is_of_rows(thing: object) -> bool:
    """Whether something is a dataset of rows, of Hugging Face's ``datasets``."""
    library = sys.modules.get("datasets")
    kind = getattr(library, "Dataset", None)
    return isinstance(kind, type) and isinstance(thing, kind)


def function_of(dataset: Dataset) -> LibraryOp:
    """What ``set_transform`` was given; None where a dataset has no such function."""
    if not is_of_rows(dataset) or dataset.format["type"] != "custom":
        return None
    return dataset.format["format_kwargs"].get("transform")


def pipelines_in(function: LibraryOp) -> dict[str, LibraryOp]:
    """The pipelines that a function finds, by the expressions for them."""
    faces = Faces(lambda pipeline, path: object())
    faces.of(function, "")
    return {path.removeprefix("."): pipeline for path, pipeline in faces.found.items()}


def without_pipeline(dataset: Dataset) -> str:
    """Why a dataset of rows cannot move, and what to write."""
    function = function_of(dataset)
    found = [*pipelines_in(function)]
    if found:
        why = f"the function of set_transform has several pipelines ({', '.join(found)})"
    elif function is None:
        why = "its rows go through no function"
    else:
        why = f"{title(function)} finds no pipeline of torchvision's by a name"
    return (
        f"accelerate cannot read this {type(dataset).__name__} of rows: {why}. Give it a function "
        f"that calls one pipeline: {_FUNCTION}. Or leave the files encoded: {_ENCODED}"
    )


class RowFunction:
    """A function of rows that finds another transform in the place of its pipelines."""

    def __init__(self, function: LibraryOp, transform: Transform) -> None:
        self._given = (function, transform)
        self._face = Faces(lambda pipeline, path: transform).of(function, "")

    def __reduce__(self) -> tuple[object, ...]:
        return RowFunction, self._given

    def __call__(self, rows: object) -> object:
        return self._face(rows)


def with_transform(dataset: Dataset, transform: Transform) -> Dataset:
    """A copy of a dataset whose function finds ``transform``; it shares the rows."""
    changed = copy.copy(dataset)
    read = dataset.format
    changed.set_transform(
        RowFunction(function_of(dataset), transform),
        columns=read["columns"],
        output_all_columns=read["output_all_columns"],
    )
    return changed
