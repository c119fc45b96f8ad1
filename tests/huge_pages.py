"""Memory in pages of 2 MiB, so that starting and ending a worker costs a third less.

The tests fork over a thousand workers from processes of a gigabyte. A fork copies the table of all
pages, and a write to a page of 4 KiB after it is a page fault.
"""

import ctypes
import re
from pathlib import Path

SIZE = 1 << 21
MADV_COLLAPSE = 25  # of Linux 6.1. An older one refuses, and its pages stay as they are.

# Read when a process starts: glibc's malloc asks for huge pages, and keeps what is freed.
GLIBC_TUNABLES = ":".join(
    [
        "glibc.malloc.hugetlb=1",
        "glibc.malloc.mmap_threshold=1000000000",
        "glibc.malloc.trim_threshold=1000000000",
        "glibc.malloc.top_pad=67108864",
    ]
)

# A mapping of the heap or of no file, that this process alone writes to.
OWN_MEMORY = re.compile(r"^(\w+)-(\w+) rw-p \S+ \S+ 0 *(?:\[heap\])?$", re.MULTILINE)


def collapse():
    """Move what this process has in memory to huge pages."""
    mappings = Path("/proc/self/maps")
    if not mappings.exists():  # not on Linux
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for ends in OWN_MEMORY.findall(mappings.read_text()):
        first, last = (int(end, 16) for end in ends)
        for start in range(-(-first // SIZE) * SIZE, last - SIZE + 1, SIZE):
            madvise(start, SIZE, MADV_COLLAPSE)
