"""The device that an argument names."""

from __future__ import annotations

import torch


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """The device with its index; None is CUDA where there is one, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f'device must be "cuda", "cuda:1", an index, a torch.device or "cpu", got {device!r}.'
        ) from error
    if resolved.type == "cpu":
        return resolved
    if resolved.type != "cuda":
        raise ValueError(
            f"device must be CUDA or CPU, got {str(resolved)!r}. "
            f"Use device='cpu', and move the batches in the loop: images.to({str(resolved)!r})."
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if resolved.index is None and count:
        return torch.device("cuda", torch.cuda.current_device())
    if not count or not 0 <= (resolved.index or 0) < count:
        raise ValueError(
            f"device {str(resolved)!r} is not there: torch sees {count} CUDA devices. "
            "Leave device out to use CUDA where there is one and the CPU elsewhere."
        )
    return resolved
