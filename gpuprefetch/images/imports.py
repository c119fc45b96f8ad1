"""The modules that workers use, imported before they are forked.

A worker may be forked while another thread imports a module. The worker then has the lock of that
import, but not the thread that holds it, and waits for ever when it imports the module itself.
"""

from gpuprefetch.images.header import load_decoders
from gpuprefetch.images.packer import Packer


def load_worker_modules(packer: Packer) -> None:
    """Import the modules that workers would import at first use."""
    load_decoders()
    if packer.programs or packer.moves:
        from torchvision import tv_tensors  # noqa: F401
        from torchvision.transforms.v2 import functional  # noqa: F401
