"""Counter-based random numbers: each is a function of its key alone, in any process, at any time.

The generator is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014), used as a hash of (seed, epoch, sample, ...) followed by a counter.
"""

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import get_worker_info

from gpuprefetch.core.errors import scope

Keys = npt.NDArray[np.uint64]
Uniforms = npt.NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: Keys) -> Keys:
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def fold(keys: Keys | int, data: npt.ArrayLike) -> Keys:
    """Derive one key per element of ``data`` from ``keys``. Negative integers are allowed."""
    base = np.asarray(keys & 0xFFFFFFFFFFFFFFFF if isinstance(keys, int) else keys, dtype=np.uint64)
    values = np.asarray(data).astype(np.int64).view(np.uint64)
    with np.errstate(over="ignore"):
        return _mix(_mix(base + _GOLDEN) + (values + np.uint64(1)) * _GOLDEN)


def uniform(keys: Keys, count: int) -> Uniforms:
    """``(N, count)`` float64 in [0, 1): independent numbers for each of the ``(N,)`` keys."""
    counter = np.arange(1, count + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        bits = _mix(keys[:, None] + counter * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def head_keys(keys: Keys, view: int = 0) -> Keys:
    """``(N,)`` for the fused transforms of a view, from those of the images."""
    own = fold(keys, 0)
    return fold(own, -view) if view else own


def tail_keys(keys: Keys, view: int = 0) -> Keys:
    """``(N,)`` for the transforms after the fused ones, from those of the images."""
    own = fold(keys, 1)
    return fold(own, -view) if view else own


def op_keys(keys: Keys, position: int) -> Keys:
    """``(N,)`` for the op at a position among those transforms."""
    return fold(keys, position)


def derive(keys: Keys | int, data: int) -> int:
    return int(fold(keys, data)[()] >> np.uint64(1))


@lru_cache
def _epoch_keys(seed: int, epoch: int) -> Keys:
    return fold(fold(seed, epoch), -1)


def batch_seed(seed: int, epoch: int, number: int) -> int:
    """The seed of what the transforms after the fused ones sample for a whole batch."""
    return derive(_epoch_keys(seed, epoch), number)


def view_seed(seed: int, number: int) -> int:
    """The seed of one view of a batch, from the batch's: the first view has that one."""
    return derive(seed, -2 - number) if number else seed


_FUNCTIONS = (
    "rand randn randint randperm normal bernoulli binomial multinomial poisson _sample_dirichlet"
    " _standard_gamma"
).split()
_METHODS = (
    "bernoulli multinomial bernoulli_ uniform_ normal_ random_ exponential_ log_normal_ geometric_"
    " cauchy_"
).split()
_Function = Callable[..., Any]
_RANDOM: set[_Function] = {getattr(torch, name) for name in _FUNCTIONS}
_RANDOM |= {getattr(torch.Tensor, name) for name in _METHODS}
_LIKE: dict[_Function, _Function] = {
    torch.rand_like: torch.rand,
    torch.randn_like: torch.randn,
    torch.randint_like: torch.randint,
}


class SeededDraws(TorchFunctionMode):
    """Take torch's random numbers from separate generators instead of the process-wide ones.

    The default generators are shared by all threads: transforms that run ahead on a prefetch thread
    would use up numbers of the training thread at random moments, and neither could be repeated. A
    function mode is local to its thread.
    """

    def __init__(
        self, seed: int, begun: Mapping[torch.device, torch.Generator] | None = None
    ) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = dict(begun or {})

    def copied(self) -> "SeededDraws":
        """Others that go on with the same numbers as these."""
        begun = {device: each.clone_state() for device, each in self._generators.items()}
        return SeededDraws(self._seed, begun)

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = dict(kwargs or {})
        if func in _LIKE:
            like, *args = args or (kwargs.pop("input"),)
            kwargs = {"device": like.device, "dtype": like.dtype, "size": like.shape} | kwargs
            kwargs.pop("memory_format", None)
            func = _LIKE[func]
        if func in _RANDOM and kwargs.get("generator") is None:
            values = (*args, *kwargs.values())
            given = next((value for value in values if isinstance(value, torch.Tensor)), None)
            device = given.device if given is not None else kwargs.get("device")
            device = torch.device(device or torch.get_default_device())
            if device not in self._generators:
                self._generators[device] = torch.Generator(device).manual_seed(self._seed)
            kwargs["generator"] = self._generators[device]
        return func(*args, **kwargs)


@scope
def _restored() -> Iterator[None]:
    """Leave Python's and NumPy's generators as they are now."""
    python = random.getstate()
    numpy = np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@scope
def trial_draws() -> Iterator[None]:
    """Try transforms without taking numbers from the user's generators."""
    with _restored(), SeededDraws(0):
        yield


def owns_generators() -> bool:
    """Whether nobody else takes numbers from NumPy's and Python's generators meanwhile.

    All threads of a process share these. A worker process of a DataLoader has one thread that reads
    samples; in the loop's process the training thread may sample at any moment.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and get_worker_info() is not None


def draws_of_sample(seed: int) -> AbstractContextManager[object]:
    """Take the random numbers of torch from ``seed``, and restore its generator.

    In a worker also those of NumPy and Python: elsewhere other threads would get these.
    """
    return draws_of_worker(seed) if owns_generators() else SeededDraws(seed)


@scope
def seeded_everywhere(seed: int) -> Iterator[None]:
    """Take the random numbers of torch, NumPy and Python from ``seed``, and restore all three.

    For a thread that :func:`owns_generators`, or that tries something.
    """
    with _restored(), SeededDraws(seed):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield


@scope
def draws_of_worker(seed: int) -> Iterator[None]:
    """The same numbers as in :func:`seeded_everywhere`, for a worker that owns its generators.

    A function mode would cost each call of torch 2 us, and a transform of boxes calls it a thousand
    times.
    """
    state = torch.get_rng_state()
    with _restored():
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            torch.set_rng_state(state)
