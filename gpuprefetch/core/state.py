"""What a prefetcher's state holds: checked as a whole before anything changes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import torch

State: TypeAlias = dict[str, Any]  # by the names in FIELDS


def decoded(state: str | torch.Tensor) -> torch.Tensor:
    """The state of a generator, which is saved as hexadecimal digits."""
    if isinstance(state, torch.Tensor):  # of an older version; torch.load may have moved it
        return state.cpu()
    return torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)


def _is_int(value: object) -> bool:
    return not isinstance(value, (bool, float, str)) and hasattr(value, "__index__")


def _is_listed(value: object, is_item: Callable[[Any], bool]) -> bool:
    return isinstance(value, (list, tuple)) and all(map(is_item, value))


def _is_generator(value: Any) -> bool:
    try:
        return bool(decoded(value).dtype == torch.uint8)
    except (TypeError, ValueError, AttributeError):
        return False


def _is_random(value: Any) -> bool:
    if not _is_listed(value, _is_generator) or not value:
        return False
    own, *others = map(decoded, value)
    return _is_of_cpu(own) and all(_is_of_cpu(it) or it.numel() == _OF_GPU for it in others)


_OF_GPU = 16  # bytes of the state of a generator on a GPU


def _is_of_cpu(state: torch.Tensor) -> bool:
    try:
        torch.Generator("cpu").set_state(state)
    except RuntimeError:  # it is too short, for one
        return False
    return True


def _or_none(value: object) -> bool:
    return value is None or _is_int(value)


@dataclass(frozen=True, slots=True)
class Field:
    """One entry of a state. Older versions have saved less than today's."""

    accepts: Callable[[Any], bool]
    words: str  # what it accepts
    required: bool = False


FIELDS = {
    "epoch": Field(_is_int, "the number of an epoch", required=True),
    "batches": Field(
        lambda value: _is_int(value) and operator.index(value) >= 0,
        "a number of batches, 0 or more",
        required=True,
    ),
    "seed": Field(_is_int, "an int", required=True),
    "random_states": Field(
        _is_random, "a list of generators' states, torch's own first, in hexadecimal", required=True
    ),
    "continued": Field(lambda value: isinstance(value, bool), "True or False", required=True),
    "loader": Field(lambda value: True, "the loader's own state, or None", required=True),
    "ended": Field(lambda value: isinstance(value, bool), "True or False"),
    "epochs": Field(lambda value: _is_listed(value, _or_none), "a list of ints and None"),
    "samples": Field(_or_none, "an int, or None"),
    "kind": Field(lambda value: isinstance(value, str), "a str"),
    "rank": Field(_is_int, "the number of a rank"),
    "world_size": Field(_is_int, "the number of ranks"),
    "drawn": Field(
        lambda value: _is_listed(value, _or_none) and len(value) in (2, 3) and value[0] is not None,
        "a rank, and checksums or None",
    ),
}
# A state has at least one of these; nothing else in a checkpoint has any.
_MARKS = {"batches", "random_states"}
_REQUIRED = {name for name, field in FIELDS.items() if field.required}
# A state is looked for so deep in a checkpoint, and in so many entries of each list.
_DEPTH = 6
_ENTRIES = 64


def is_state(state: object) -> bool:
    """Whether it is a state of a prefetcher, whole or not."""
    return isinstance(state, dict) and (state.keys() >= _REQUIRED or bool(state.keys() & _MARKS))


def is_foreign(state: object) -> bool:
    """Whether it is a checkpoint around a state, or a model's state, and not a loader's own."""
    if not isinstance(state, dict) or _place_of_state(state) is not None:
        return True
    return bool(state) and all(isinstance(value, torch.Tensor) for value in state.values())


def checked(state: object) -> State:
    """A state that a prefetcher can go on from; ValueError says what is wrong with another one."""
    asked = "state must come from DataPrefetcher.state_dict(), got"
    if not isinstance(state, dict):
        raise ValueError(f"{asked} {_described(state)}.")
    if not state.keys() >= _REQUIRED:
        place = _place_of_state(state)
        if place is not None:
            raise ValueError(f"{asked} {_described(state)}: pass checkpoint{place}.")
        if not is_state(state):
            raise ValueError(
                f"{asked} {_described(state)}. Save it as checkpoint['loader'] = "
                "loader.state_dict(), and pass checkpoint['loader']."
            )
    for name, field in FIELDS.items():
        if name not in state and field.required:
            raise ValueError(f"the state has no {name!r}, {field.words}: {_AS_SAVED}")
        if name in state and not field.accepts(state[name]):
            got = _described(state[name])
            raise ValueError(f"{name!r} in the state is {field.words}, got {got}: {_AS_SAVED}")
    numbers = {name: operator.index(state[name]) for name in ("epoch", "batches", "seed")}
    return state | numbers


_AS_SAVED = "load what DataPrefetcher.state_dict() gave, with all of its keys."


def _described(value: object) -> str:
    """A value in a few words, whatever its size."""
    if isinstance(value, Mapping):
        names = [_short(str(key)) for key in islice(value, 5)]
        rest = f" and {len(value) - 5} more" if len(value) > 5 else ""
        return f"a dict with the keys {', '.join(names)}{rest}" if names else "an empty dict"
    if value is None or isinstance(value, (bool, int, float, str)):
        return _short(repr(value))
    if isinstance(value, Sequence):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _place_of_state(checkpoint: object, depth: int = _DEPTH) -> str | None:
    """Where a checkpoint has a state, as ``['loader']``; None if nowhere."""
    for key, value in _entries(checkpoint):
        if isinstance(value, dict) and value.keys() >= _REQUIRED:
            return f"[{key!r}]"
        if depth and (inner := _place_of_state(value, depth - 1)) is not None:
            return f"[{key!r}]{inner}"
    return None


def _entries(held: object) -> Iterator[tuple[object, object]]:
    if isinstance(held, dict):
        yield from held.items()
    elif isinstance(held, (list, tuple)):
        yield from enumerate(held[:_ENTRIES])
