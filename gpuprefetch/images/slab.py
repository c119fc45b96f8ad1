"""Slabs: shared memory that a worker fills again and again, and its parent pins in place.

A DataLoader worker sends each batch in new shared memory. Mapping and unmapping 25 MB of photos
costs the training thread 4 ms. A slab stays mapped on both sides, and only its key is sent::

    byte 0    1 to 63    64 to the end
    busy      unused     data of one batch, and unused memory

    worker: take a slab that is not busy, set busy to 1, fill in a batch, send (key, size)
    parent: look up the key, pin the slab the first time, read the batch, set busy to 0
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

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

# Bytes before the data of a slab: the first says whether the parent still reads the data, the rest
# aligns it.
HEADER = 64
# Slabs of one worker. A worker makes as many as are in flight; one more batch has its own memory.
LIMIT = 8
# Bytes of the largest tensor that is sent by value. A copy of so many costs some microseconds.
# Opening the shared memory of a tensor costs the parent a file descriptor, and the GIL for 0.4 ms.
SMALL = 16 << 10
# Size of a new slab, relative to its first batch: a larger batch then fits. The parent page-locks
# each new slab, and the training thread cannot launch for the milliseconds that this needs.
SLACK = 1.25
# A free slab is replaced by a smaller one if it has more than SPARE times the size of the largest
# of its worker's RECENT latest batches. A single small batch, the last one of an epoch, is not
# enough for that.
SPARE = 4
RECENT = 4


def into_shared_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, whose memory other processes can map from now on."""
    try:
        return tensor.share_memory_()  # type: ignore[no-any-return]
    except RuntimeError as error:
        left = ""
        with contextlib.suppress(OSError):  # not on every platform
            total, _, free = shutil.disk_usage("/dev/shm")
            left = f", and /dev/shm has {free >> 20} of {total >> 20} MiB left"
        raise RuntimeError(
            f"A worker needs {-(-tensor.nbytes >> 20)} MiB of shared memory for a batch{left} "
            f"({error}). Start the container with docker run --shm-size=16g or --ipc=host, or "
            "lower the DataLoader's num_workers, prefetch_factor or batch_size."
        ) from error


Key = tuple[int, int]  # of a slab: the number of its worker's process, and its own


class _Slab:
    """A slab, as its worker or the parent sees it.

    Attributes:
        key: the worker's process, and the number of the slab among this worker's.
        memory: 1-D uint8, the header and the data.
        busy: one byte, whether the parent still reads the data.
        sent: whether the parent has the memory; only the worker's own object knows.
    """

    def __init__(self, key: Key, memory: torch.Tensor) -> None:
        self.key = key
        self.memory = memory
        self.busy: npt.NDArray[np.uint8] = memory[:1].numpy()
        self.sent = False

    def memory_to_send(self) -> torch.Tensor | None:
        """The memory, the first time. Later the parent knows it by the slab's key."""
        memory = None if self.sent else self.memory
        self.sent = True
        return memory

    @cached_property
    def pinned(self) -> bool:
        """Whether the slab is page-locked, which is tried once."""
        start = self.memory.data_ptr()
        locked = not int(torch.cuda.cudart().cudaHostRegister(start, self.memory.numel(), 0))
        if locked:
            # The memory lives as long as the function that unlocks it.
            unlock = weakref.finalize(self, _unpin, self.memory, os.getpid())
            unlock.atexit = False
        return locked


def _unpin(memory: torch.Tensor, owner: int) -> None:
    if os.getpid() == owner:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


# In a worker: its slabs, and the sizes of its latest batches in bytes.
_ring: list[_Slab] = []
_recent: deque[int] = deque(maxlen=RECENT)
# In the parent: the slabs of all workers.
mapped: dict[Key, _Slab] = {}


def _take(size: int) -> _Slab | None:
    """A slab of this worker's with room for ``size`` bytes, busy now; None if all are in flight."""
    _recent.append(size)
    slab = _free_slab(size)
    if slab is not None:
        slab.busy[0] = 1
    return slab


def _free_slab(size: int) -> _Slab | None:
    """A slab that the parent does not read: one that fits, else a new one."""
    free = [slab for slab in _ring if not slab.busy[0]]
    largest = max(_recent)
    spare = [slab for slab in free if slab.memory.numel() > HEADER + SPARE * SLACK * largest]
    if spare and len(_recent) == RECENT:
        return _make(_ring.index(spare[0]), largest)
    for slab in free:
        if slab.memory.numel() >= HEADER + size:
            return slab
    if free:
        return _make(_ring.index(free[0]), size)
    return _make(len(_ring), size) if len(_ring) < LIMIT else None


def _make(number: int, size: int) -> _Slab:
    """A new slab of this worker's. It replaces an earlier one with the same number."""
    if not _ring:  # a worker exits without the interpreter's exit, which would free the slabs
        util.Finalize(None, _ring.clear, exitpriority=0)
    memory = torch.empty(HEADER + int(size * SLACK), dtype=torch.uint8, device="cpu")
    slab = _Slab((os.getpid(), number), into_shared_memory(memory))
    _ring[number : number + 1] = [slab]
    return slab


class Buffer:
    """A flat uint8 buffer that a worker hands to its parent without a copy.

    The parent must hold the buffer while it reads the memory: once the buffer is dropped, the
    worker may fill the memory again. The buffer lies in ``memory`` from byte ``start`` on. All
    buffers of a slab share its ``memory``, and the parent makes no tensor for a batch: making one
    acquires the GIL several times.

    Example:
        A buffer of 1,000 bytes in a slab has ``start=64`` and ``size=1000``, and its ``memory`` has
        the slab's 1,314 bytes. A buffer without a slab has ``start=0``.
    """

    __slots__ = ("_reader", "_slab", "is_pinned", "memory", "size", "start")

    def __init__(
        self,
        memory: torch.Tensor,
        size: int | None = None,
        slab: _Slab | None = None,
        *,
        is_pinned: bool = False,
    ) -> None:
        self.memory = memory
        self.start = 0 if slab is None else HEADER
        self.size = memory.numel() if size is None else size
        self.is_pinned = is_pinned
        self._slab = slab
        self._reader = os.getpid()

    @staticmethod
    def empty(size: int) -> Buffer:
        """A buffer that is not initialized. In a worker it lies in a slab, if one is free."""
        in_worker = get_worker_info() is not None
        slab = _take(size) if in_worker else None
        if slab is not None:
            return Buffer(slab.memory, size, slab)
        memory = torch.empty(max(size, 1), dtype=torch.uint8, device="cpu")
        return Buffer(into_shared_memory(memory) if in_worker else memory, size)

    def sent(self) -> tuple[Callable[..., Buffer], tuple[object, ...]]:
        """What another process calls to receive the buffer, and with which arguments."""
        slab = self._slab
        if slab is None:
            return Buffer, (self.memory, self.size)
        self._slab = None  # from now on the parent says when the slab is free
        return _receive, (slab.key, slab.memory_to_send(), self.size)

    @property
    def tensor(self) -> torch.Tensor:
        """``(size,)`` uint8 on the CPU, a view of the buffer."""
        return self.memory[self.start : self.start + self.size]

    def __reduce__(self) -> tuple[type[Buffer], tuple[torch.Tensor]]:
        return Buffer, (self.tensor.clone(),)

    def pinned(self) -> Buffer:
        """The buffer in pinned memory: this one if its slab can be page-locked, else a copy."""
        if self._slab is None or not self._slab.pinned:
            return Buffer(self.tensor.pin_memory(), is_pinned=True)
        self.is_pinned = True
        return self

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:  # os is gone at exit
        # A worker that is forked later has a copy of this object. It must not free the slab, which
        # the parent still reads.
        if self._slab is not None and self._reader == getpid():
            self._slab.busy[0] = 0


# Pickling for another process; copies and files use __reduce__.
ForkingPickler.register(Buffer, Buffer.sent)


def _receive(key: Key, memory: torch.Tensor | None, size: int) -> Buffer:
    if memory is not None:
        mapped[key] = _Slab(key, memory)
        _unmap_with_worker(mapped[key])
    slab = mapped[key]
    return Buffer(slab.memory, size, slab)


def _unmap_with_worker(slab: _Slab) -> None:
    """Unmap a slab once its worker's process object is gone, with its loader or its epoch."""
    for child in active_children():
        if child.pid == slab.key[0]:
            unmap = weakref.finalize(child, _unmap, slab.key, weakref.ref(slab))
            unmap.atexit = False


def _unmap(key: Key, slab: weakref.ref[_Slab]) -> None:
    if mapped.get(key) is slab():  # else a new process has the number of the worker
        mapped.pop(key, None)


def unmap_dead() -> None:
    """Unmap the slabs of processes that have ended, even if their process object is still held."""
    known = list(mapped)  # first: other threads receive slabs of new workers meanwhile
    alive = {child.pid for child in active_children()}
    for key in known:
        if key[0] not in alive:
            mapped.pop(key, None)


class _Value:
    """A small tensor on its way to another process, where it arrives as a tensor again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.array: npt.NDArray[np.generic] = tensor.numpy()

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[npt.NDArray[np.generic]]]:
        return torch.from_numpy, (self.array,)


def by_value(leaf: object) -> object:
    """What to send for a leaf of a batch: a small tensor without shared memory, others as is."""
    if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.nbytes > SMALL:
        return leaf
    try:
        return _Value(leaf) if leaf.is_contiguous() else leaf
    except (TypeError, RuntimeError):  # another device, gradients, bfloat16, lazy conjugates
        return leaf
