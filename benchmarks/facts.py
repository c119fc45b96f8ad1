"""What a file of results says by itself of code, hardware and software.

The parent of the measurements asks NVML, which needs no CUDA context. Without a GPU, or for what a
driver does not tell, a fact is None.
"""

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import stamp

PACKAGES = "torch torchvision torchcodec kornia triton nvidia-dali-cuda130 timm pillow".split()
PACKAGES += ["cvcuda-cu13", "nvidia-nvjpeg", "nvidia-nvjpeg-cu12", "spdl-io", "ffcv"]
PACKAGES += ["transformers"]
CORES = len(os.sched_getaffinity(0))  # before a benchmark takes fewer
# Of nvmlClocksEventReasons: why the clocks are below their maximum.
THROTTLE = {
    0x2: "applications clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
CLOCKS = {"sm": 1, "memory": 2}  # nvmlClockType_t
SAMPLE_SECONDS = 1.0
FREED_SECONDS = 10.0


class Device:
    """The first visible GPU through NVML, which needs no CUDA context in this process.

    Args:
        nvml: the library; None looks for it.
        used: whether the GPU is used at all. One that is not is as good as none.
    """

    def __init__(self, nvml: Any = None, *, used: bool = True) -> None:
        self._nvml: Any = None
        self._handle = ctypes.c_void_p()
        if not used:
            return
        with contextlib.suppress(OSError):
            nvml = nvml or ctypes.CDLL("libnvidia-ml.so.1")
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
            if nvml.nvmlInit_v2() != 0:
                return
            handle = ctypes.byref(self._handle)
            if visible.isdigit():
                status = nvml.nvmlDeviceGetHandleByIndex_v2(int(visible), handle)
            else:
                status = nvml.nvmlDeviceGetHandleByUUID(visible.encode(), handle)
            if status == 0:
                self._nvml = nvml

    def used_bytes(self) -> int | None:
        """Memory in use on the device, of all processes; None where NVML cannot tell."""
        memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
        if not self._asked("nvmlDeviceGetMemoryInfo", ctypes.byref(memory)):
            return None
        return memory[2]

    def wait_until_freed(self, most: int) -> None:
        """Wait until no more than so many bytes are in use: a context goes after its process.

        For ``FREED_SECONDS`` at most: another process may have taken memory meanwhile.
        """
        end = time.monotonic() + FREED_SECONDS
        while (self.used_bytes() or 0) > most and time.monotonic() < end:
            time.sleep(0.05)

    def facts(self) -> dict[str, Any]:
        """What does not change from one measurement to the next."""
        uuid = self._text("nvmlDeviceGetUUID")
        power = self._number("nvmlDeviceGetEnforcedPowerLimit")
        cuda = ctypes.c_int()
        has_driver = self._nvml is not None
        if has_driver:
            self._nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
        driver = ctypes.create_string_buffer(96)
        if has_driver:
            self._nvml.nvmlSystemGetDriverVersion(driver, 96)
        return {
            "gpu": self._text("nvmlDeviceGetName"),
            "gpu_uuid_hash": hashlib.sha256(uuid.encode()).hexdigest()[:12] if uuid else None,
            "driver": driver.value.decode() or None,
            "driver_cuda": f"{cuda.value // 1000}.{cuda.value % 1000 // 10}"
            if cuda.value
            else None,
            "power_limit_w": power and power / 1000,
            "most_clocks_mhz": {
                name: self._number("nvmlDeviceGetMaxClockInfo", kind)
                for name, kind in CLOCKS.items()
            },
        }

    def state(self) -> dict[str, Any]:
        """Clocks, power, temperature and throttle reasons now; {} without a GPU."""
        if self._nvml is None:
            return {}
        power = self._number("nvmlDeviceGetPowerUsage")
        reasons = ctypes.c_ulonglong()
        self._asked("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.byref(reasons))
        return {
            "sm_mhz": self._number("nvmlDeviceGetClockInfo", CLOCKS["sm"]),
            "memory_mhz": self._number("nvmlDeviceGetClockInfo", CLOCKS["memory"]),
            "power_w": power and power / 1000,
            "celsius": self._number("nvmlDeviceGetTemperature", 0),
            "throttle": [name for bit, name in THROTTLE.items() if reasons.value & bit],
            "others_busy": self._others_busy(),
        }

    def _others_busy(self) -> int:
        """How many other GPUs of the machine are at work now, in any process."""
        count = ctypes.c_uint()
        if self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return 0
        busy = 0
        for index in range(count.value):
            handle = ctypes.c_void_p()
            used = (ctypes.c_uint * 2)()  # nvmlUtilization_t: gpu and memory, in percent
            found = self._nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0
            if found and handle.value != self._handle.value:
                asked = self._nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(used))
                busy += asked == 0 and used[0] > 0
        return busy

    def _asked(self, function: str, *arguments: Any) -> bool:
        call = getattr(self._nvml, function, None)  # a driver may not have it
        return call is not None and call(self._handle, *arguments) == 0

    def _number(self, function: str, *arguments: int) -> int | None:
        value = ctypes.c_uint()
        known = self._asked(function, *arguments, ctypes.byref(value))
        return value.value if known else None

    def _text(self, function: str) -> str | None:
        value = ctypes.create_string_buffer(96)
        known = self._asked(function, value, 96)
        return value.value.decode() if known else None


class States:
    """The states of a GPU while a child runs, one a second."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._states: list[dict[str, Any]] = []
        self._next = 0.0

    def sample(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + SAMPLE_SECONDS
        if state := self._device.state():
            self._states.append(state)

    def summary(self) -> dict[str, Any]:
        """Lowest and highest of each number, every throttle reason, the most other GPUs at work.

        {} without a GPU.
        """
        if not self._states:
            return {}
        found: dict[str, Any] = {}
        for key in ("sm_mhz", "memory_mhz", "power_w", "celsius"):
            values = [state[key] for state in self._states if state[key] is not None]
            found[key] = [min(values), max(values)] if values else None
        seen = {reason for state in self._states for reason in state["throttle"]}
        others = max(state["others_busy"] for state in self._states)
        found |= {"throttle": sorted(seen), "others_busy": others}
        return {**found, "samples": len(self._states)}


def machine(device: Device) -> dict[str, Any]:
    """Code, hardware and software: what is the same for all results of a document."""
    code = stamp.checkout()
    return {
        "commit": code.commit,
        "dirty": code.dirty,
        "changed": code.changed,
        **device.facts(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "affinity": CORES,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cuda": _torch_cuda(),
        "versions": {package: _version(package) for package in PACKAGES},
    }


def host_memory() -> dict[str, float]:
    """Memory of the whole machine in use, and what of it is shared (``/dev/shm``), in GiB."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    used = kib["MemTotal"] - kib["MemAvailable"]
    return {"host_gib": used / 2**20, "shared_gib": kib["Shmem"] / 2**20}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """The CUDA that torch is built for, without importing torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    version = Path(found.origin).with_name("version.py")
    cuda = re.search(r"^cuda.*= '([\d.]+)'", version.read_text(), flags=re.MULTILINE)
    return cuda and cuda[1]


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
