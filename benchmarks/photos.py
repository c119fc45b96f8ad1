"""The folder of photos that all loaders read."""

import contextlib
import hashlib
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

IMAGE_SUFFIXES = {".jpg", ".jpeg"}
CLASSES = 100


def photo_folder(source: Path, files: int) -> Path:
    """Repeat the JPEGs under ``source`` into an ImageFolder layout of ``files`` hard links.

    The folder lies in the temporary directory, is named after its content and is reused when it is
    there. Neighbors in a class are different photos, so a reader with a small shuffle buffer (DALI)
    sees the same mix as one that shuffles all.
    """
    photos = sorted(p for p in source.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
    if not photos:
        raise ValueError(f"no JPEGs under {source}; --data takes a folder of .jpg or .jpeg files")
    content = "\n".join(f"{p}:{p.stat().st_size}:{p.stat().st_mtime_ns}" for p in photos)
    digest = hashlib.sha256(f"{files}\n{content}".encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"gpuprefetch-photos-{digest}"
    if folder.is_dir():
        return folder
    building = Path(tempfile.mkdtemp(prefix=folder.name))
    first_copy: dict[Path, Path] = {}
    per_class = -(-files // CLASSES)
    for index in range(files):
        photo = photos[index % len(photos)]
        link = building / f"class_{index // per_class:03d}" / f"{index:06d}_{photo.name}"
        link.parent.mkdir(exist_ok=True)
        _link(first_copy.setdefault(photo, link), photo, link)
    with contextlib.suppress(OSError):  # another run was faster: its folder is the same
        building.rename(folder)
    if building.is_dir():
        shutil.rmtree(building)
    return folder


def _link(copied: Path, photo: Path, link: Path) -> None:
    """Link to the photo, or (another file system) to its first copy, or copy it once more."""
    for target in (photo, copied):
        with contextlib.suppress(OSError):
            os.link(target, link)
            return
    shutil.copyfile(photo, link)


def photo_facts(source: Path, files: int) -> dict[str, Any]:
    """Count, mean bytes and mean size of the photos, for the metadata."""
    from PIL import Image

    photos = [p for p in source.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES]
    sizes = []
    for photo in photos:
        with Image.open(photo) as image:
            sizes.append(image.size)
    return {
        "files": files,
        "distinct": len(photos),
        "mean_bytes": round(statistics.fmean(p.stat().st_size for p in photos)),
        "mean_width": round(statistics.fmean(width for width, _ in sizes)),
        "mean_height": round(statistics.fmean(height for _, height in sizes)),
    }
