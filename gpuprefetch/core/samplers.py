"""The samplers of a loader: those within them, their generators, and who numbers epochs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, TypeAlias

import torch

from gpuprefetch.core.nested import Loader

Sampler: TypeAlias = object  # a user's: it may have any attribute, and none
Key: TypeAlias = Any  # what a sampler gives for a sample; mostly its index

# Samplers of a loader that are looked at. One that makes another whenever it is asked has no end.
MOST_SAMPLERS = 32


def sampler_name(loader: Loader) -> str:
    """The attribute of a loader that says which samples come next."""
    return "sampler" if getattr(loader, "batch_sampler", None) is None else "batch_sampler"


def attribute(owner: object, name: str) -> object:
    """An attribute of a user's sampler; None where it has none, or a property of it fails."""
    try:
        return getattr(owner, name, None)
    except Exception:
        return None


def number(owner: object, name: str) -> int | None:
    """An attribute that is an int, and no bool."""
    value = attribute(owner, name)
    return value if type(value) is int else None


def samplers_of(loader: Loader) -> list[Sampler]:
    """The samplers of a loader and those within them.

    Of ``DataLoader(dataset, batch_size=4, shuffle=True)`` a ``RandomSampler``, and the
    ``BatchSampler`` around it.
    """
    found = [loader]
    for outer in found:  # which grows
        for name in ("sampler", "batch_sampler"):
            inner = attribute(outer, name)
            if inner is None or any(inner is other for other in found):
                continue
            # A property may make a sampler when it is asked for one: the first of a class will do.
            made = attribute(outer, name) is not inner
            if made and any(type(inner) is type(other) for other in found):
                continue
            if len(found) <= MOST_SAMPLERS:
                found.append(inner)
    return found[1:]


def generators_of(loader: Loader) -> list[torch.Generator]:
    """The generators that the samplers have, each once: those named ``generator``, then others."""
    others = (getattr(sampler, "__dict__", {}).values() for sampler in samplers_of(loader))
    return _each_once([*_named_generators(loader), *chain.from_iterable(others)])


def named_generators_of(loader: Loader) -> int:
    """How many different ones the samplers have by the name ``generator``."""
    return len(_each_once(_named_generators(loader)))


def _named_generators(loader: Loader) -> list[object]:
    return [attribute(sampler, "generator") for sampler in samplers_of(loader)]


def _each_once(found: Iterable[object]) -> list[torch.Generator]:
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def random_states(loader: Loader) -> list[str]:
    """The states that an order is drawn from: torch's, then the generators', in hexadecimal."""
    states = [torch.get_rng_state(), *(g.get_state() for g in generators_of(loader))]
    return [state.numpy().tobytes().hex() for state in states]


def numbered_by_epoch(loader: Loader) -> list[object]:
    """The loader and its parts that have a ``set_epoch``, each once."""
    found = (loader, *samplers_of(loader), getattr(loader, "dataset", None))
    each = {id(part): part for part in found}.values()
    return [part for part in each if callable(attribute(part, "set_epoch"))]


def set_epoch(part: object, epoch: int) -> None:
    """Tell one of :func:`numbered_by_epoch` the number of the epoch to come."""
    part.set_epoch(epoch)  # type: ignore[attr-defined]


def epochs_of(loader: Loader) -> list[int | None]:
    """The number of the epoch that each of these parts is in; None where it says none."""
    return [number(part, "epoch") for part in numbered_by_epoch(loader)]
