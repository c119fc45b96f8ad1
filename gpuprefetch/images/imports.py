"""The modules that workers use, imported before they are forked.

A worker that is forked while another thread imports a module has the lock of that import, and not
the thread: it would wait for ever where it imports the module as well.
"""

from gpuprefetch.images.header import load_decoders
from gpuprefetch.images.packer import Packer


def load_worker_modules(packer: Packer) -> None:
    """Import what the workers of a pipeline may import at first use."""
    load_decoders()
    if packer.programs or packer.moves:
        from torchvision import tv_tensors  # noqa: F401
        from torchvision.transforms.v2 import functional  # noqa: F401
