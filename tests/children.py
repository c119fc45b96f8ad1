"""Python processes that begin at once: forked from one that has imported torch already.

A new interpreter takes seconds to import it. What a child does from there to its end, the end of
its interpreter included, is what ``python -c`` does.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORTED = """
import numpy, torch, PIL.Image, torch.utils.data, gpuprefetch
with contextlib.suppress(Exception):  # TorchCodec may be broken: a child says it better
    import torchcodec.decoders  # imports torch._dynamo: three seconds of a child's first epoch
"""


class Child:
    """As much of a ``subprocess.Popen`` as tests need, in a session of its own.

    Args:
        code: as after ``python -c``.
        arguments: what comes after it.
        forked: or, where it uses a GPU, a new interpreter: a context is of one process only.
        modules: imported before the fork, once for all children to come.
        folder: the current one.
        variables: of the environment.
    """

    def __init__(self, code, *arguments, forked=True, modules=(), folder=".", **variables):
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        for file in self._files:
            file.touch()
        self.returncode = None
        if forked:
            task = {"code": code, "argv": ["-c", *arguments], "files": [*map(str, self._files)]}
            task |= {"modules": modules, "folder": str(folder), "variables": variables}
            self.pid = _ask(task)
            self._poll = functools.partial(_ask, {"wait": self.pid})
        else:
            command = [sys.executable, "-c", code, *arguments]
            with self._files[0].open("w") as out, self._files[1].open("w") as err:
                options = {"stdout": out, "stderr": err, "start_new_session": True, "cwd": folder}
                process = subprocess.Popen(command, env=_environment() | variables, **options)
            self.pid, self._poll = process.pid, process.poll

    def poll(self):
        if self.returncode is None:
            self.returncode = self._poll()
        return self.returncode

    def first_line(self, seconds=60):
        deadline = time.monotonic() + seconds
        while "\n" not in (text := self._files[0].read_text()):
            assert self.poll() is None and time.monotonic() < deadline, self._files[1].read_text()
            time.sleep(0.01)
        return text.splitlines()[0]

    def communicate(self, timeout=60):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a child", timeout)
            time.sleep(0.01)
        with self._folder:
            return [file.read_text() for file in self._files]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _environment():
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@functools.cache
def _parent():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, __file__], env=_environment(), **pipes)
    atexit.register(process.communicate)  # closes its stdin, upon which it ends
    return process


def _ask(task):
    process = _parent()
    process.stdin.write(json.dumps(task) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def _serve():
    """Fork a child for each task that has code; returns that task in the child, None at the end."""
    while line := sys.stdin.readline():
        task = json.loads(line)
        if pid := task.get("wait"):
            ended, status = os.waitpid(pid, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        else:
            for name in task["modules"]:
                with contextlib.suppress(ImportError):  # the child says it better
                    importlib.import_module(name)
            gc.collect()
            gc.freeze()  # children need not look through what was imported
            if not (answer := os.fork()):
                return task
        print(json.dumps(answer), flush=True)
    return None


def _become(task):
    os.setsid()
    files = [os.open(os.devnull, os.O_RDONLY)]
    files += [os.open(name, os.O_WRONLY | os.O_CREAT) for name in task["files"]]
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.update(task["variables"])
    os.chdir(task["folder"])
    sys.path[:0] = filter(None, task["variables"].get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = task["argv"]


if __name__ == "__main__":
    exec(IMPORTED)
    sys.path[:] = ["", *sys.path[1:]]  # as with -c
    if (task := _serve()) is not None:
        _become(task)
        code = task["code"]
        for name in [name for name in globals() if name != "code" and not name.startswith("__")]:
            del globals()[name]
        exec(code)
