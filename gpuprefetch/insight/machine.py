"""What this machine decodes with, in a few lines: cores, driver, GPUs and their JPEG engines."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gpuprefetch.core.device import resolve_device
from gpuprefetch.images.decode import NvjpegDecoder
from gpuprefetch.images.share import usable_cores


class Gpu(NamedTuple):
    """A GPU that torch sees."""

    name: str
    decode: str  # what decodes JPEGs for it


def machine() -> str:
    """What a report of an error should say of this machine."""
    return described(usable_cores(), driver_version(), [*map(_gpu, range(_count()))])


def described(cores: int, driver: str | None, gpus: Sequence[Gpu]) -> str:
    """The same in words, of a machine with these ``gpus``."""
    lines = [f"{cores} usable cores, NVIDIA driver {driver or 'not found'}"]
    if not gpus:
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        lines.append(f"torch, which is built {built}, sees no GPU: the workers decode")
    lines += [f"cuda:{n} {gpu.name}, decode by {gpu.decode}" for n, gpu in enumerate(gpus)]
    return "\n".join(lines)


def _count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _gpu(number: int) -> Gpu:
    device = resolve_device(number)
    return Gpu(torch.cuda.get_device_name(device), decode_of(device))


def decode_of(device: torch.device) -> str:
    """What decodes JPEGs for a CUDA device, in words."""
    decoder = NvjpegDecoder(device)
    missing = decoder.missing()
    return f"the workers: {missing}" if missing else decoder.words


def driver_version(nvml: Any = None) -> str | None:
    """The version of NVIDIA's driver by its library ``nvml``; None where there is none."""
    try:
        nvml = nvml or ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, len(text)):
        return None
    return text.value.decode()
