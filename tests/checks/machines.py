"""Machines for torchrun on this one: network namespaces that a virtual cable joins.

Making them takes root on Linux. Without that a machine is a loopback address.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench import harness


class Machine:
    """Where one agent of torchrun runs, beside others.

    Args:
        number: of the machine, from 0 on.
        folder: the current one of what it runs.
        namespace: of the network; None for a loopback address.
    """

    def __init__(self, number: int, folder: Path, namespace: str | None) -> None:
        self.folder = folder
        self.address = f"10.213.7.{number + 1}" if namespace else f"127.0.0.{number + 1}"
        self._prefix = ["ip", "netns", "exec", namespace] if namespace else []
        self.network = "namespaces" if namespace else "loopback"
        self._interface = "eth0" if namespace else "lo"

    def torchrun(self, *words: object, output: Path, **variables: object) -> subprocess.Popen:
        """Start an agent; what it and its ranks print is in the file ``output``."""
        command = [*self._prefix, sys.executable, "-m", "torch.distributed.run"]
        command += ["--local-addr", self.address, *map(str, words)]
        path = os.pathsep.join([str(harness.ROOT), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {name: str(value) for name, value in variables.items()}
        env |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        env["GLOO_SOCKET_IFNAME"] = self._interface
        with output.open("w") as out:
            return subprocess.Popen(command, cwd=self.folder, env=env, stdout=out, stderr=out)


@contextlib.contextmanager
def two_machines(folders: list[Path]) -> Iterator[list[Machine]]:
    with contextlib.ExitStack() as stack:
        try:
            names: list[str | None] = [*_namespaces(stack)]
        except (OSError, subprocess.CalledProcessError):
            names = [None, None]
        yield [Machine(number, folders[number], name) for number, name in enumerate(names)]


def _namespaces(stack: contextlib.ExitStack) -> list[str]:
    names = [f"gpuprefetch-{os.getpid()}-{number}" for number in range(2)]
    for name in names:
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "delete", name)
    ends = ["eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1]]
    _ip("link", "add", *ends)
    for number, name in enumerate(names):
        _ip("-n", name, "address", "add", f"10.213.7.{number + 1}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", name, "link", "set", device, "up")
    return names


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def kill(process: subprocess.Popen) -> None:
    """An agent with all that runs under it, at once: none of them says good-bye."""
    if process.poll() is not None:
        return
    listed = subprocess.check_output(["ps", "-eo", "pid=,ppid="], text=True).splitlines()
    parents = dict(map(str.split, listed))
    family = [str(process.pid)]
    for pid in family:  # it grows
        family += [child for child, parent in parents.items() if parent == pid]
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    process.wait()
