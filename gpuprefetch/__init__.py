"""Wrap a PyTorch DataLoader in one line: prefetch to the GPU, decode and augment there."""

from gpuprefetch import _connections as _connections  # first: it must precede any CUDA context
from gpuprefetch._accelerate import accelerate
from gpuprefetch._convert import UnsupportedTransformError, convert_transforms
from gpuprefetch._doctor import DoctorReport, doctor
from gpuprefetch._encoded import EncodedImage, EncodedImageFolder, EncodedImages
from gpuprefetch._explain import explain
from gpuprefetch._parity import ParityReport, parity
from gpuprefetch._pipeline import BadImage, BadImageError
from gpuprefetch._prefetcher import DataPrefetcher
from gpuprefetch._selfcheck import SelfcheckReport, selfcheck
from gpuprefetch._stats import Stats
from gpuprefetch._transforms import CenterCrop, RandomResizedCrop, Resize

__version__ = "0.1.0"
__all__ = [
    "BadImage",
    "BadImageError",
    "CenterCrop",
    "DataPrefetcher",
    "DoctorReport",
    "EncodedImage",
    "EncodedImageFolder",
    "EncodedImages",
    "ParityReport",
    "RandomResizedCrop",
    "Resize",
    "SelfcheckReport",
    "Stats",
    "UnsupportedTransformError",
    "accelerate",
    "convert_transforms",
    "doctor",
    "explain",
    "parity",
    "selfcheck",
]
