"""Wrap a PyTorch DataLoader in one line: prefetch to the GPU, decode and augment there."""

__version__ = "0.1.0"
__all__: list[str] = []
