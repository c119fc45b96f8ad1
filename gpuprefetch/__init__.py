"""Wrap a PyTorch DataLoader in one line: prefetch to the GPU, decode and augment there."""

from gpuprefetch import connections as connections  # first: it must precede any CUDA context
from gpuprefetch.core.stats import Stats
from gpuprefetch.images.bad import BadImage, BadImageError
from gpuprefetch.images.encoded import EncodedImage, EncodedImages
from gpuprefetch.images.folder import EncodedImageFolder
from gpuprefetch.insight.doctor import DoctorReport, doctor
from gpuprefetch.insight.selfcheck import SelfcheckReport, selfcheck
from gpuprefetch.installed import tell_of_a_stranger as _tell_of_a_stranger
from gpuprefetch.lists.convert import convert_transforms
from gpuprefetch.lists.views import Views
from gpuprefetch.migrate.accelerate import accelerate
from gpuprefetch.migrate.explain import explain
from gpuprefetch.migrate.parity import ParityReport, parity
from gpuprefetch.policies.known import UnsupportedTransformError
from gpuprefetch.policies.per_image import PerImage
from gpuprefetch.prefetcher import DataPrefetcher
from gpuprefetch.preprocess import preprocess
from gpuprefetch.transforms.head import CenterCrop, RandomResizedCrop, Resize
from gpuprefetch.transforms.results import PaddedImages, Padding

__version__ = "0.2.0"
__all__ = [
    "BadImage",
    "BadImageError",
    "CenterCrop",
    "DataPrefetcher",
    "DoctorReport",
    "EncodedImage",
    "EncodedImageFolder",
    "EncodedImages",
    "PaddedImages",
    "Padding",
    "ParityReport",
    "PerImage",
    "RandomResizedCrop",
    "Resize",
    "SelfcheckReport",
    "Stats",
    "UnsupportedTransformError",
    "Views",
    "accelerate",
    "convert_transforms",
    "doctor",
    "explain",
    "parity",
    "preprocess",
    "selfcheck",
]

_tell_of_a_stranger()
