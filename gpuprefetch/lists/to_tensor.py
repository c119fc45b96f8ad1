"""Classes that make tensors as torchvision's ToTensor does, and may give tensors back as they are.

Those derived from ToTensor are known by their code, timm's and lightly's by their class.
"""

from __future__ import annotations

import functools
from types import FunctionType

import torch

from gpuprefetch.lists.code import is_written_as
from gpuprefetch.lists.pil_ops import is_lightly
from gpuprefetch.policies.registry import LibraryOp
from gpuprefetch.policies.timm import from_timm


def in_torchvision(op: LibraryOp) -> LibraryOp:
    """What an op of timm or lightly, or one that is known by its code, stands for; else the op."""
    from torchvision import transforms as v1

    kind = type(op)
    if kind is not v1.ToTensor and isinstance(op, v1.ToTensor):
        if is_written_as(kind.__call__, _ways()) and kind.__mro__[1] is v1.ToTensor:
            return v1.ToTensor()
    if _is_lightlys(op) and torch.get_default_dtype() == torch.float32:
        return v1.ToTensor()
    return from_timm(op)


def fails_on_tensors(op: LibraryOp) -> bool:
    """Whether a conversion takes no tensor: v1's and lightly's; others give it back as it is."""
    from torchvision import transforms as v1

    return type(op) in (v1.ToTensor, v1.PILToTensor) or _is_lightlys(op)


def _is_lightlys(op: LibraryOp) -> bool:
    return is_lightly(op, "torchvision_v2_compatibility", "ToTensor")


@functools.cache
def _ways() -> tuple[FunctionType, ...]:
    """The ways to write such a class's call, with the names that it uses."""
    from torchvision.transforms import functional

    def by_function(self, image):  # type: ignore[no-untyped-def]
        if isinstance(image, torch.Tensor):
            return image
        return F.to_tensor(image)  # type: ignore[name-defined]  # noqa: F821

    def by_name(self, image):  # type: ignore[no-untyped-def]
        if isinstance(image, torch.Tensor):
            return image
        return to_tensor(image)  # type: ignore[name-defined]  # noqa: F821

    class Derived:
        def __call__(self, image):  # type: ignore[no-untyped-def]
            if isinstance(image, torch.Tensor):
                return image
            return super().__call__(image)  # type: ignore[misc]

    known = {"torch": torch, "F": functional, "to_tensor": functional.to_tensor}
    by_super = Derived.__dict__["__call__"]
    return (
        FunctionType(by_function.__code__, known),
        FunctionType(by_name.__code__, known),
        by_super,
    )
