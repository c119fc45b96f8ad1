"""CUDA_DEVICE_MAX_CONNECTIONS: keep decode and training apart in the GPU's hardware queues.

A CUDA context has 8 hardware work queues by default, and one nvJPEG decoder opens 14 streams.
Streams that share a queue wait for each other: a decode then waits for a whole queued training
step. 32 queues keep them apart. CUDA reads the variable when it makes the context, so the variable
is set on import.
"""

from __future__ import annotations

import os

import torch

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
WANTED = 32

_too_late = VARIABLE not in os.environ and torch.cuda.is_initialized()
if VARIABLE not in os.environ and not _too_late:
    os.environ[VARIABLE] = str(WANTED)


def shortage() -> str:
    """Why the GPU's queues are too few for decoding beside training; empty where they are not."""
    value = os.environ.get(VARIABLE, "")
    if not (_too_late or (value.isdigit() and int(value) < WANTED)):
        return ""
    reason = (
        "CUDA was in use before gpuprefetch was imported"
        if _too_late
        else f"{VARIABLE}={value} is set in the environment"
    )
    return (
        f"{reason}, so GPU decoding and training share hardware queues and wait for each other: up "
        "to a third of the images/s of a fast model was lost to it. Import gpuprefetch before the "
        f"first CUDA call, or set {VARIABLE}={WANTED} before the program starts."
    )
