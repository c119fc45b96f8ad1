"""Tell a lack of host memory from a bad file, whatever raises it.

on_error leaves out the files that a decoder finds bad. It must not leave out the largest files only
because a worker has too little memory for them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

# torch's allocator, libjpeg in TorchCodec, Pillow's codecs, C++ and the system.
_WORDS = re.compile(
    r"allocate memory|not enough memory|insufficient memory|out of memory|bad_alloc", re.IGNORECASE
)
_ADVICE = (
    "No file is bad, so on_error leaves none out. Give the process more memory, or lower the "
    "DataLoader's num_workers, prefetch_factor or batch_size."
)


def lacks_memory(error: BaseException) -> bool:
    """Whether an error comes from a lack of host memory. Few libraries raise MemoryError for it."""
    if isinstance(error, torch.OutOfMemoryError):
        return False  # the device lacks memory
    return isinstance(error, MemoryError) or _WORDS.search(str(error)) is not None


def has_room(size: int) -> bool:
    """Whether ``size`` bytes could be allocated now. They are not touched."""
    try:
        torch.empty(size, dtype=torch.uint8, device="cpu")
    except (RuntimeError, MemoryError):
        return False
    return True


def no_memory(what: str) -> MemoryError:
    return MemoryError(f"not enough memory for {what}. {_ADVICE}")


@contextlib.contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Raise MemoryError, with what to do, if the block has too little memory for ``what``."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error) or _ADVICE in str(error) or "shared memory" in str(error):
            raise
        raise no_memory(what) from error
