"""C's stderr, kept from what libjpeg says of files that were cut on purpose."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
from collections.abc import Iterator

# Note [Bytes that are left]
# Of a file that was cut (Note [Rows that nobody reads]) libjpeg says on stderr that there are bytes
# behind its last row, and TorchCodec lets it: a line for each photo. It writes to C's `stderr`, a
# variable of the C library. While such a file is decoded that is another stream, into memory, and
# what came there of anything else is passed on behind the decode. Python's sys.stderr and the
# traceback of a crash go to the descriptor, as always. This is for worker processes, which do
# little else at that time; for glibc, since elsewhere the variable may be read-only; for one thread
# at a time; and where a trial has shown that it works (_format.cuts_quietly).
_LEFT = re.compile(rb"Corrupt JPEG data: \d+ extraneous bytes before marker 0xd9\n")
_UNBUFFERED = 2  # setvbuf's _IONBF


class Hush:
    """Keeps that line from stderr.

    Attributes:
        heard: lines that were kept from it.

    Raises:
        OSError: if this is not glibc.
    """

    def __init__(self) -> None:
        try:
            known = os.confstr("CS_GNU_LIBC_VERSION")
        except (AttributeError, ValueError):  # not on every platform
            known = None
        if not known:
            raise OSError("the C library is not glibc")
        libc = ctypes.PyDLL(None)
        libc.fmemopen.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
        libc.fmemopen.restype = ctypes.c_void_p
        libc.setvbuf.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        libc.rewind.argtypes = (ctypes.c_void_p,)
        self._rewind, self._stderr = libc.rewind, ctypes.c_void_p.in_dll(libc, "stderr")
        self._room = ctypes.create_string_buffer(1 << 16)
        self._memory = libc.fmemopen(self._room, len(self._room), b"w")
        if not self._memory or libc.setvbuf(self._memory, None, _UNBUFFERED, 0):
            raise OSError("no stream into memory")
        self._lock = threading.Lock()
        self.heard = 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[bool]:
        """Keep it inside; gives whether that is so, and another thread is not at it."""
        if not self._lock.acquire(blocking=False):
            yield False
            return
        shown, self._stderr.value = self._stderr.value, self._memory
        try:
            yield True
        finally:
            self._stderr.value = shown
            if said := self._room.value:
                self._rewind(self._memory)
                ctypes.memset(self._room, 0, len(said))
                rest, lines = _LEFT.subn(b"", said)
                self.heard += lines
                if rest:
                    with contextlib.suppress(OSError):  # it may be closed
                        os.write(2, rest)
            self._lock.release()
