"""How long a thread sleeps for Python's lock, by sampling what it waits for. Linux only.

    with Sleeps() as sleeps:  # of the calling thread
        work()
    print(sleeps.python, sleeps.count)

Python's lock lies among the static data of the interpreter, other locks elsewhere, and
``/proc/PID/task/TID/syscall`` has the address of the futex that a thread sleeps on. Another process
reads it, some thousand times a second: a thread of this one would take part in the game.
"""

import json
import os
import platform
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

FUTEX = {"x86_64": b"202", "aarch64": b"98"}
PERIOD = 1e-4  # seconds between samples, at least


class Sleeps:
    """Watch the calling thread from ``__enter__`` to ``__exit__``.

    Attributes:
        python: share of the time for which it slept for Python's lock; None where that cannot be
            seen.
        count: of these sleeps a second, at least: short ones fall between two samples.
    """

    python: float | None = None
    count: float | None = None

    def __enter__(self) -> "Sleeps":
        words = [sys.executable, __file__, str(os.getpid()), str(threading.get_native_id())]
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
        assert self._child.stdout is not None
        self._child.stdout.readline()  # it has begun
        return self

    def __exit__(self, *error: Any) -> None:
        found = json.loads(self._child.communicate()[0] or "{}")
        self.python, self.count = found.get("python"), found.get("count")


def interpreter_data(pid: int) -> list[tuple[int, int]]:
    """Addresses of the static data of a process's interpreter."""
    ranges: list[tuple[int, int]] = []
    ours = False
    with Path(f"/proc/{pid}/maps").open() as maps:
        for line in maps:
            words = line.split(None, 5)
            first, last = (int(word, 16) for word in words[0].split("-"))
            name = Path(words[5].strip()).name if len(words) > 5 else ""
            # What is not in the file, as it is zero at first, lies behind it without a name.
            behind = ours and not name and first == ranges[-1][1]
            ours = behind or name.startswith(("python", "libpython"))
            if ours:
                ranges.append((first, last))
    return ranges


def watch(pid: int, thread: int) -> dict[str, float]:
    """Sample a thread until standard input ends."""
    futex = FUTEX[platform.machine()]
    data = interpreter_data(pid)
    samples = asleep = count = 0
    was = False
    with Path(f"/proc/{pid}/task/{thread}/syscall").open("rb", buffering=0) as file:
        file.read(200)  # or it is not allowed
        print("begun", flush=True)
        started = time.perf_counter()
        while not select.select([sys.stdin], [], [], PERIOD)[0]:
            file.seek(0)
            words = file.read(200).split()
            waits = words[0] == futex and any(a <= int(words[1], 16) < b for a, b in data)
            samples, asleep, count = samples + 1, asleep + waits, count + (waits and not was)
            was = waits
        seconds = time.perf_counter() - started
    return {"python": asleep / samples, "count": count / seconds} if samples else {}


if __name__ == "__main__":
    try:
        print(json.dumps(watch(int(sys.argv[1]), int(sys.argv[2]))))
    except (OSError, KeyError) as error:  # another system, or not allowed
        print(f"sleeps cannot be watched: {error!r}", file=sys.stderr)
