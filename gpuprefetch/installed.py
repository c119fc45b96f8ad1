"""Whether a stranger's distribution has put its files into this package."""

from __future__ import annotations

import contextlib
import warnings
from importlib import metadata


def tell_of_a_stranger() -> None:
    """Warn where the distribution ``gpuprefetch`` is installed, which is another project's.

    Ours is ``torch-gpuprefetch``. Both are imported as ``gpuprefetch``, and write the same files.
    """
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = metadata.version("gpuprefetch")
        warnings.warn(
            f"The distribution gpuprefetch {version} is installed. It is another project, and its "
            "files and those of torch-gpuprefetch overwrite each other. Run: "
            "pip uninstall -y gpuprefetch torch-gpuprefetch, and install this project again.",
            stacklevel=3,
        )
