"""Python processes that begin at once: forked from one that has imported torch already.

A new interpreter takes seconds to import it. What a child does from there to its end, the end of
its interpreter included, is what ``python -c`` does. One process serves all of ``pytest -n``. It
needs Linux.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

import huge_pages

ROOT = Path(__file__).parents[1]
PR_SET_PDEATHSIG = 1  # Linux's
IMPORTED = """
import numpy.ma, torch, PIL.Image, torch.utils.data, torchvision, gpuprefetch
PIL.Image.init()
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
        whole: whether its interpreter ends as after ``python -c``. Else it leaves its modules as
            they are once exit functions have run: to take them apart costs 0.4 s of CPU time.
        variables: of the environment.
    """

    def __init__(
        self, code, *arguments, forked=True, modules=(), folder=".", whole=True, **variables
    ):
        written = tempfile.mkdtemp()
        self._files = [Path(written) / name for name in ("stdout", "stderr")]
        for file in self._files:
            file.touch()
        self.returncode = None
        if forked:
            task = {"code": code, "argv": ["-c", *arguments], "files": [*map(str, self._files)]}
            task |= {"modules": modules, "folder": str(Path(folder).absolute()), "whole": whole}
            self.pid = _ask(task | {"environment": environment() | variables})
            self._wait = functools.partial(_ask, {"wait": self.pid})
        else:
            command = [sys.executable, "-c", code, *arguments]
            with self._files[0].open("w") as out, self._files[1].open("w") as err:
                options = {"stdout": out, "stderr": err, "start_new_session": True, "cwd": folder}
                process = subprocess.Popen(command, env=environment() | variables, **options)
            self.pid, self._wait = process.pid, process.wait
        self._end = os.pidfd_open(self.pid)  # can be read from when it ends
        weakref.finalize(self, os.close, self._end)
        weakref.finalize(self, shutil.rmtree, written, ignore_errors=True)

    def poll(self, seconds=0):
        if self.returncode is None and select.select([self._end], [], [], seconds)[0]:
            self.returncode = self._wait()
        return self.returncode

    def first_line(self, seconds=60):
        deadline = time.monotonic() + seconds
        while "\n" not in (text := self._files[0].read_text()):
            assert self.poll() is None and time.monotonic() < deadline, self._files[1].read_text()
            time.sleep(0.01)
        return text.splitlines()[0]

    def communicate(self, timeout=60):
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired("a child", timeout)
        return [file.read_text() for file in self._files]


class Watched(Child):
    """A child that is followed by what it writes to files, as ``subprocess`` has it."""

    def __init__(self, out, err, code, *arguments, **options):
        super().__init__(code, *arguments, **options)
        self.copies = [out, err]

    def poll(self, seconds=0):
        super().poll(seconds)
        for written, copy in zip(self._files, self.copies, strict=True):
            copy.seek(0)
            copy.write(written.read_text())
            copy.flush()
        return self.returncode

    def send_signal(self, number):
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def wait(self):
        self.poll(60)


def script(path, before=""):
    """The code that runs a script as its own file does, after some lines."""
    return f"{before}\nimport runpy; runpy.run_path({str(path)!r}, run_name='__main__')"


def ranks(count, code, *arguments, of_rank=lambda rank: {}, **options):
    """Start children that find each other as torchrun's do, without a GPU.

    ``of_rank`` gives more variables for a rank.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    sizes = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    options |= address | sizes | {"CUDA_VISIBLE_DEVICES": ""}
    return [
        Child(code, *arguments, **options, RANK=rank, LOCAL_RANK=rank, **of_rank(int(rank)))
        for rank in map(str, range(count))
    ]


def environment():
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@functools.cache
def _parent():
    """A connection to the process that children are forked from, one for all of pytest -n."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    address = f"\0gpuprefetch {run}"  # of no file: free again when nobody listens
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
            return connection.makefile("rw")
        except ConnectionRefusedError:
            pass
        finally:
            connection.close()  # with the file
        with socket.socket(socket.AF_UNIX) as listener, contextlib.suppress(OSError):
            listener.bind(address)  # or another process was faster
            listener.listen()
            listener.set_inheritable(True)
            command = [sys.executable, __file__, str(listener.fileno())]
            os.posix_spawn(sys.executable, command, environment())
        time.sleep(0.01)


def _ask(task):
    parent = _parent()
    parent.write(json.dumps(task) + "\n")
    parent.flush()
    return json.loads(parent.readline())


def _serve(listener):
    """Fork a child for each task that has code; returns that task in the child, None at the end."""
    clients = {}
    while True:
        for ready in select.select([listener, *clients], [], [])[0]:
            if ready is listener:
                connection = listener.accept()[0]
                clients[connection] = connection.makefile("rw")
            elif line := clients[ready].readline():
                task = json.loads(line)
                answer = _answer(task)
                if "code" in task and answer == 0:  # of the fork
                    return task
                print(json.dumps(answer), file=clients[ready], flush=True)
            else:
                del clients[ready]
        if not clients:
            return None


def _answer(task):
    if pid := task.get("wait"):
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for name in task["modules"]:
        with contextlib.suppress(ImportError):  # the child says it better
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # children need not look through what was imported
    huge_pages.collapse()  # and are forked sooner, as are their workers
    return os.fork()


def _become(task):
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # where a run is broken off
    files = [os.open(os.devnull, os.O_RDONLY)]
    files += [os.open(name, os.O_WRONLY | os.O_CREAT) for name in task["files"]]
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(task["environment"])
    os.chdir(task["folder"])
    sys.path[:0] = filter(None, os.environ["PYTHONPATH"].split(os.pathsep))
    sys.argv = task["argv"]


def _run_and_leave(code, names):
    """Run a child's code, and end as its interpreter would, but for its modules."""
    import atexit  # of this module's own names none is left
    import os
    import sys
    import threading
    import traceback

    status = 0
    try:
        exec(code, names)
    except SystemExit as error:
        status = error.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    gc.disable()  # what is imported stays
    exec(IMPORTED)
    gc.enable()
    sys.path[:] = ["", *sys.path[1:]]  # as with -c
    if (task := _serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        _become(task)
        code = task["code"]
        __run__ = exec if task["whole"] else _run_and_leave
        for name in [name for name in globals() if name != "code" and not name.startswith("__")]:
            del globals()[name]
        __run__(code, globals())
