"""The folder of photos that all loaders read, what they are, and whether they are in memory."""

import contextlib
import ctypes
import hashlib
import mmap
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

IMAGE_SUFFIXES = {".jpg", ".jpeg"}
CLASSES = 100
LARGE = (4000, 3000)
LARGE_BYTES = 2_800_000
LARGE_COUNT = 64


def found(source: Path) -> list[Path]:
    """The JPEGs in a folder and below, in order."""
    photos = sorted(p for p in source.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
    if not photos:
        raise ValueError(f"no JPEGs under {source}; --data takes a folder of .jpg or .jpeg files")
    return photos


def _digest(photos: list[Path], salt: object) -> str:
    content = "\n".join(f"{p}:{p.stat().st_size}:{p.stat().st_mtime_ns}" for p in photos)
    return hashlib.sha256(f"{salt}\n{content}".encode()).hexdigest()[:12]


@contextlib.contextmanager
def _built(folder: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``folder`` once it is whole."""
    building = Path(tempfile.mkdtemp(prefix=folder.name))
    yield building
    with contextlib.suppress(OSError):  # another run was faster: its folder is the same
        building.rename(folder)
    if building.is_dir():
        shutil.rmtree(building)


def photo_folder(source: Path, files: int) -> Path:
    """Repeat the JPEGs under ``source`` into an ImageFolder layout of ``files`` hard links.

    The folder lies in the temporary directory, is named after its content and is reused when it is
    there. Neighbors in a class are different photos, so a reader with a small shuffle buffer (DALI)
    sees the same mix as one that shuffles all.
    """
    photos = found(source)
    folder = Path(tempfile.gettempdir()) / f"gpuprefetch-photos-{_digest(photos, files)}"
    if folder.is_dir():
        return folder
    first_copy: dict[Path, Path] = {}
    per_class = -(-files // CLASSES)
    with _built(folder) as building:
        for index in range(files):
            photo = photos[index % len(photos)]
            link = building / f"class_{index // per_class:03d}" / f"{index:06d}_{photo.name}"
            link.parent.mkdir(exist_ok=True)
            _link(first_copy.setdefault(photo, link), photo, link)
    return folder


def _link(copied: Path, photo: Path, link: Path) -> None:
    """Link to the photo, or (another file system) to its first copy, or copy it once more."""
    for target in (photo, copied):
        with contextlib.suppress(OSError):
            os.link(target, link)
            return
    shutil.copyfile(photo, link)


def large(source: Path, count: int = LARGE_COUNT, size: tuple[int, int] = LARGE) -> Path:
    """Photos of 12 megapixels, about 3 MB, 4:2:0, drawn from those under ``source``."""
    photos = found(source)
    photos = [photos[index % len(photos)] for index in range(count)]
    folder = Path(tempfile.gettempdir()) / f"gpuprefetch-large-{_digest(photos, (count, size))}"
    if folder.is_dir():
        return folder

    def draw(index: int) -> None:
        # What enlarging smooths out comes back as grain, of which cameras have some as well.
        grain = np.random.default_rng(index).normal(0, 5, (size[1], size[0], 1)).astype(np.float32)
        with Image.open(photos[index]) as photo:
            pixels = np.asarray(photo.convert("RGB").resize(size, Image.Resampling.BICUBIC))
        picture = Image.fromarray((pixels + grain).clip(0, 255).astype(np.uint8))
        path = building / f"{index:03d}.jpg"
        for quality in range(60, 100, 5):
            picture.save(path, quality=quality, subsampling="4:2:0")
            if path.stat().st_size >= LARGE_BYTES * size[0] * size[1] / (LARGE[0] * LARGE[1]):
                return

    with _built(folder) as building, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(draw, range(count)))
    return folder


def drawn(count: int = 6) -> Path:
    """A few small pictures, to try a script out."""
    folder = Path(tempfile.gettempdir()) / "gpuprefetch-drawn"
    rng = np.random.default_rng(0)
    if not folder.is_dir():
        with _built(folder) as building:
            for number in range(count):
                pixels = rng.integers(0, 256, (40 + number, 60, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(building / f"{number}.JPEG")
    return folder


def photo_facts(source: Path, files: int) -> dict[str, Any]:
    """Count, hash and distribution of the photos: the same hash is the same photos."""
    photos = found(source)
    megapixels = []
    sizes = []
    progressive = 0
    content = hashlib.sha256()
    for photo in photos:
        encoded = photo.read_bytes()
        content.update(photo.relative_to(source).as_posix().encode() + b"\0")
        content.update(hashlib.sha256(encoded).digest())
        with Image.open(photo) as image:
            sizes.append(image.size)
            megapixels.append(image.width * image.height / 1e6)
            progressive += bool(image.info.get("progressive"))
    return {
        "files": files,
        "distinct": len(photos),
        "sha256": content.hexdigest(),
        "mean_bytes": round(statistics.fmean(p.stat().st_size for p in photos)),
        "mean_width": round(statistics.fmean(width for width, _ in sizes)),
        "mean_height": round(statistics.fmean(height for _, height in sizes)),
        "bytes": _distribution([float(p.stat().st_size) for p in photos]),
        "megapixels": _distribution(megapixels),
        "progressive_share": progressive / len(photos),
    }


def _distribution(values: list[float]) -> dict[str, float]:
    """Least, percentiles and most."""
    places = {"least": 0, "p5": 5, "p25": 25, "median": 50, "p75": 75, "p95": 95, "most": 100}
    return {name: round(float(np.percentile(values, place)), 4) for name, place in places.items()}


def drop_page_cache(folder: Path) -> dict[str, Any]:
    """Have the kernel forget the photos, so that they are read from the disk; and what is left.

    Some file systems, such as tmpfs, keep their pages: ``cached_share_after`` is near 1 then.
    """
    os.sync()  # pages that are not written yet cannot be dropped
    by_inode = {photo.stat().st_ino: photo for photo in found(folder)}
    photos = list(by_inode.values())
    before = cached_share(photos)
    for photo in photos:
        handle = os.open(photo, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    return {
        "files": len(photos),
        "bytes": sum(photo.stat().st_size for photo in photos),
        "cached_share_before": round(before, 4),
        "cached_share_after": round(cached_share(photos), 4),
    }


def cached_share(photos: list[Path]) -> float:
    """Share of the pages of files that the kernel has in memory, as mincore tells."""
    libc = ctypes.CDLL(None, use_errno=True)
    cached = 0
    pages = 0
    for photo in photos:
        with photo.open("rb") as file:
            # Private and writable, or Python would not give its address. Nothing is written.
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        count = -(-len(mapped) // mmap.PAGESIZE)
        vector = (ctypes.c_ubyte * count)()
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), vector) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        cached += sum(page & 1 for page in vector)
        pages += count
    return cached / pages
