"""Shared buffers that workers fill again and again, mapped by the parent once.

A DataLoader worker sends each batch in new shared memory: pages to clear for the worker, to map for
the parent, and to unmap under its interpreter lock, 4 ms for the 25 MB of a batch of photos, taken
from the training thread. A slab stays mapped on both sides and travels by its name.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
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
MOST_ROOM = 64 << 20  # beyond what a batch takes, whatever is expected of later ones


def _shared(size: int) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    return empty.set_(torch.UntypedStorage._new_shared(size, device="cpu"))


class _Slab:
    """A slab as its worker sees it."""

    def __init__(self, number: int, size: int) -> None:
        self.key = (os.getpid(), number)
        self.memory = _shared(HEADER + size)
        self.state: npt.NDArray[np.uint8] = self.memory[:1].numpy()
        self.state[0] = 0
        self.sent = False


class _Mapping:
    """A slab as the parent sees it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.state: npt.NDArray[np.uint8] = memory[:1].numpy()
        self.pinned: bool | None = None

    def pin(self) -> bool:
        """Page-lock the slab, once; whether it is."""
        if self.pinned is None:
            start, size = self.memory.data_ptr(), self.memory.numel()
            self.pinned = not int(torch.cuda.cudart().cudaHostRegister(start, size, 0))
            if self.pinned:
                # The memory lives as long as the function that unlocks it.
                weakref.finalize(self, _unpin, self.memory, os.getpid()).atexit = False
        return self.pinned


def _unpin(memory: torch.Tensor, owner: int) -> None:
    if os.getpid() == owner:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


_ring: list[_Slab] = []  # this worker's
_mapped: dict[tuple[int, int], _Mapping] = {}  # the parent's


def _take(size: int, room: int) -> _Slab | None:
    room = max(int(size * SLACK), min(room, size + MOST_ROOM))
    free = [slab for slab in _ring if not slab.state[0]]
    slab = next((slab for slab in free if slab.memory.numel() >= HEADER + size), None)
    if slab is None and free:
        slab = _Slab(free[0].key[1], room)  # takes the name and the place of a small one
        _ring[_ring.index(free[0])] = slab
    elif slab is None and len(_ring) < LIMIT:
        if not _ring:  # a worker ends without the interpreter's end, which would give them back
            util.Finalize(None, _ring.clear, exitpriority=0)
        slab = _Slab(len(_ring), room)
        _ring.append(slab)
    if slab is not None:
        slab.state[0] = 1
    return slab


class Buffer:
    """A flat uint8 buffer that a worker hands to its parent without a copy.

    Once the parent drops it, the worker may fill its memory again: whoever reads that holds the
    buffer.

    Args:
        memory: 1-D uint8 on the CPU, and no view of another tensor.
        size: of the buffer in it; None for all of it.

    Attributes:
        memory: what the buffer lies in. The parent has one for each slab, and makes no tensor of
            a batch: each takes torch, and the GIL, several times.
        start: of the buffer in that.
        size: in bytes.
    """

    __slots__ = ("_mapping", "_reader", "_slab", "memory", "size", "start")

    def __init__(
        self,
        memory: torch.Tensor,
        size: int | None = None,
        slab: _Slab | None = None,
        mapping: _Mapping | None = None,
    ) -> None:
        self.memory, self._slab, self._mapping = memory, slab, mapping
        self.start = 0 if slab is None and mapping is None else HEADER
        self.size = memory.numel() if size is None else size
        self._reader = os.getpid()

    @staticmethod
    def empty(size: int, room: int = 0) -> Buffer:
        """A buffer that is not initialized; in a worker in a slab where one is free.

        Args:
            size: of it.
            room: that later ones are likely to need.
        """
        if get_worker_info() is None:
            return Buffer(torch.empty(size, dtype=torch.uint8))
        slab = _take(size, room)
        if slab is None:
            return Buffer(_shared(max(size, 1)), size)
        return Buffer(slab.memory, size, slab)

    @property
    def tensor(self) -> torch.Tensor:
        """``(size,)`` uint8 on the CPU, a view of the buffer."""
        return self.memory[self.start : self.start + self.size]

    def __reduce__(self) -> tuple[Any, ...]:
        return Buffer, (self.tensor.clone(),)

    def pin(self) -> bool:
        """Page-lock the buffer where it lies; False where that cannot be done."""
        return self._mapping is not None and self._mapping.pin()

    @property
    def is_pinned(self) -> bool:
        """Whether :meth:`pin` has been called, and could be."""
        return self._mapping is not None and bool(self._mapping.pinned)

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:  # os is gone at exit
        # A worker forked later has a copy of this object: not to free what the parent reads.
        owned = self._mapping or self._slab  # a slab that was not sent
        if owned is not None and self._reader == getpid():
            owned.state[0] = 0


def _send(buffer: Buffer) -> tuple[Any, ...]:
    """How a buffer is pickled for another process; copies and files take ``__reduce__``."""
    slab, buffer._slab = buffer._slab, None
    if buffer._mapping is not None:  # passed on by the parent: the worker fills it again
        return Buffer, (buffer.tensor.clone(),)
    if slab is None:
        return Buffer, (buffer.memory, buffer.size)
    memory = None if slab.sent else slab.memory
    slab.sent = True
    return _receive, (slab.key, memory, buffer.size)


ForkingPickler.register(Buffer, _send)


class _Value:
    """A tensor on its way to another process, where it arrives as what it is."""

    __slots__ = ("array",)

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.from_numpy, (self.array,)


def by_value(leaf: Any) -> Any:
    """What to send of a batch's leaf: a small tensor without shared memory, others as they are."""
    if type(leaf) is not torch.Tensor or leaf.device.type != "cpu" or leaf.requires_grad:
        return leaf
    if leaf.layout != torch.strided or leaf.nbytes > SMALL or not leaf.is_contiguous():
        return leaf
    try:
        return _Value(leaf.numpy())
    except (TypeError, RuntimeError):  # bfloat16, for one, and lazy conjugates
        return leaf


def _receive(key: tuple[int, int], memory: torch.Tensor | None, size: int) -> Buffer:
    if memory is not None:
        unmap_dead()  # here too: a loader without a prefetcher has nobody else to do it
        _mapped[key] = _Mapping(memory)
    mapping = _mapped[key]
    return Buffer(mapping.memory, size, mapping=mapping)


def unmap_dead() -> None:
    """Drop the slabs of workers that are gone."""
    for pid in {pid for pid, _ in list(_mapped)}:  # a copy: other threads receive slabs meanwhile
        try:
            if sys.platform != "win32":
                os.kill(pid, 0)
            elif all(child.pid != pid for child in active_children()):  # signal 0 is Ctrl-C there
                raise ProcessLookupError
        except ProcessLookupError:
            for key in [key for key in list(_mapped) if key[0] == pid]:
                _mapped.pop(key, None)
        except PermissionError:  # not ours any more, but somebody's
            continue
