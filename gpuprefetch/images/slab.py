"""Slabs: shared memory that a worker fills again and again, and its parent pins in place.

A DataLoader worker sends each batch in new shared memory. To map and unmap it takes 4 ms of the
training thread for 25 MB of photos. A slab stays mapped on both sides and travels by its name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import weakref
from collections import deque
from collections.abc import Callable
from functools import cached_property
from multiprocessing import active_children, util
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

# First bytes of a slab: one says whether the parent still reads it, the rest aligns the data.
HEADER = 64
# Slabs of one worker. Only as many are made as are in flight; a batch beyond has its own memory.
LIMIT = 8
# Bytes of a tensor that is sent by value. To open the shared memory of one costs the parent 0.4 ms,
# with the GIL, and a file descriptor; to copy these some microseconds.
SMALL = 16 << 10
# Room for a larger batch: the parent page-locks each new slab, milliseconds in which the training
# thread cannot launch.
SLACK = 1.25
# A free slab of more than SPARE times what any of its worker's latest RECENT batches took is
# replaced by a smaller one. The last batch of an epoch is often small, and the next one is not.
SPARE, RECENT = 4, 4


def share(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return tensor.share_memory_()  # type: ignore[no-any-return]
    except RuntimeError as error:
        left = ""
        with contextlib.suppress(OSError):  # not on every platform
            total, _, free = shutil.disk_usage("/dev/shm")
            left = f", and /dev/shm has {free >> 20} of {total >> 20} MiB left"
        raise RuntimeError(
            f"A worker needs {-(-tensor.nbytes >> 20)} MiB of shared memory for a batch{left} "
            f"({error}). Start the container with more, as in docker run --shm-size=16g, or with "
            "--ipc=host, or lower the DataLoader's num_workers, prefetch_factor or batch_size."
        ) from error


class _Slab:
    """A slab, as its worker or the parent sees it: 1-D uint8, the header and the data."""

    def __init__(self, key: tuple[int, int], memory: torch.Tensor) -> None:
        self.key = key  # the worker's process, and which of its slabs it is
        self.memory = memory
        self.busy: npt.NDArray[np.uint8] = memory[:1].numpy()  # whether the parent still reads it
        self.sent = False  # whether the parent has it, in the worker

    @cached_property
    def pinned(self) -> bool:
        """Whether it is page-locked, which is tried once."""
        start, size = self.memory.data_ptr(), self.memory.numel()
        locked = not int(torch.cuda.cudart().cudaHostRegister(start, size, 0))
        if locked:
            # The memory lives as long as the function that unlocks it.
            weakref.finalize(self, _unpin, self.memory, os.getpid()).atexit = False
        return locked


def _unpin(memory: torch.Tensor, owner: int) -> None:
    if os.getpid() == owner:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


_ring: list[_Slab] = []  # this worker's
_recent: deque[int] = deque(maxlen=RECENT)  # bytes of this worker's latest batches
_mapped: dict[tuple[int, int], _Slab] = {}  # the parent's


def _take(size: int) -> _Slab | None:
    """A slab of this worker's that the parent does not read; None where all are in flight."""
    _recent.append(size)
    free = [slab for slab in _ring if not slab.busy[0]]
    most = max(_recent)
    spare = [slab for slab in free if slab.memory.numel() > HEADER + SPARE * SLACK * most]
    slab: _Slab | None
    if spare and len(_recent) == RECENT:
        slab = _make(_ring.index(spare[0]), most)
    else:
        slab = next((slab for slab in free if slab.memory.numel() >= HEADER + size), None)
    if slab is None and (free or len(_ring) < LIMIT):
        slab = _make(_ring.index(free[0]) if free else len(_ring), size)
    if slab is not None:
        slab.busy[0] = 1
    return slab


def _make(number: int, size: int) -> _Slab:
    """A new slab of this worker's. It takes over the name and the place of an earlier one."""
    if not _ring:  # a worker ends without the interpreter's end, which would give them back
        util.Finalize(None, _ring.clear, exitpriority=0)
    memory = torch.empty(HEADER + int(size * SLACK), dtype=torch.uint8, device="cpu")
    slab = _Slab((os.getpid(), number), share(memory))
    _ring[number : number + 1] = [slab]
    return slab


class Buffer:
    """A flat uint8 buffer that a worker hands to its parent without a copy.

    Once the parent drops it, the worker may fill its memory again: whoever reads that holds the
    buffer. It lies in ``memory`` from byte ``start`` on. The parent has one ``memory`` for each
    slab, and makes no tensor of a batch: each takes the GIL several times.
    """

    __slots__ = ("_reader", "_slab", "is_pinned", "memory", "size", "start")

    def __init__(
        self, memory: torch.Tensor, size: int | None = None, slab: _Slab | None = None
    ) -> None:
        self.memory, self._slab = memory, slab
        self.start = 0 if slab is None else HEADER
        self.size = memory.numel() if size is None else size
        self.is_pinned = False
        self._reader = os.getpid()

    @staticmethod
    def empty(size: int) -> Buffer:
        """A buffer that is not initialized; in a worker in a slab where one is free."""
        in_worker = get_worker_info() is not None
        slab = _take(size) if in_worker else None
        if slab is not None:
            return Buffer(slab.memory, size, slab)
        memory = torch.empty(max(size, 1), dtype=torch.uint8, device="cpu")
        return Buffer(share(memory) if in_worker else memory, size)

    @property
    def tensor(self) -> torch.Tensor:
        """``(size,)`` uint8 on the CPU, a view of the buffer."""
        return self.memory[self.start : self.start + self.size]

    def __reduce__(self) -> tuple[Any, ...]:
        return Buffer, (self.tensor.clone(),)

    def pinned(self) -> Buffer:
        """The buffer in pinned memory: where it lies if that is a slab, else a copy."""
        locked = self._slab is not None and self._slab.pinned
        buffer = self if locked else Buffer(self.tensor.pin_memory())
        buffer.is_pinned = True
        return buffer

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:  # os is gone at exit
        # A worker forked later has a copy of this object: not to free what the parent reads.
        if self._slab is not None and self._reader == getpid():
            self._slab.busy[0] = 0


def _send(buffer: Buffer) -> tuple[Any, ...]:
    """How a buffer is pickled for another process; copies and files take ``__reduce__``."""
    slab = buffer._slab
    if slab is None:
        return Buffer, (buffer.memory, buffer.size)
    memory = None if slab.sent else slab.memory
    buffer._slab, slab.sent = None, True  # the parent's from now on
    return _receive, (slab.key, memory, buffer.size)


ForkingPickler.register(Buffer, _send)


def _receive(key: tuple[int, int], memory: torch.Tensor | None, size: int) -> Buffer:
    if memory is not None:
        _mapped[key] = _Slab(key, memory)
        _unmap_with_worker(_mapped[key])
    slab = _mapped[key]
    return Buffer(slab.memory, size, slab)


def _unmap_with_worker(slab: _Slab) -> None:
    """Unmap a slab once nobody has its worker's process any more: its loader is gone, or done."""
    for child in active_children():
        if child.pid == slab.key[0]:
            weakref.finalize(child, _unmap, slab.key, weakref.ref(slab)).atexit = False


def _unmap(key: tuple[int, int], slab: weakref.ref[_Slab]) -> None:
    if _mapped.get(key) is slab():  # else the number of the process is another one's by now
        _mapped.pop(key, None)


def unmap_dead() -> None:
    """Unmap the slabs of processes that have ended, though somebody may still have them."""
    known = list(_mapped)  # first: other threads receive slabs of new workers meanwhile
    alive = {child.pid for child in active_children()}
    for key in known:
        if key[0] not in alive:
            _mapped.pop(key, None)


class _Value:
    """A tensor on its way to another process, where it arrives as what it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.array = tensor.numpy()

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.from_numpy, (self.array,)


def by_value(leaf: Any) -> Any:
    """What to send of a batch's leaf: a small tensor without shared memory, others as they are."""
    if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.nbytes > SMALL:
        return leaf
    try:
        return _Value(leaf) if leaf.is_contiguous() else leaf
    except (TypeError, RuntimeError):  # another device, gradients, bfloat16, lazy conjugates
        return leaf
