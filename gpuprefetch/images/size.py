"""The size of a picture, from the first bytes of its file: for batches that are planned ahead."""

from __future__ import annotations

import os

from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.folder import fault_of, read_open
from gpuprefetch.images.header import ImageHeader, read_header
from gpuprefetch.transforms.sampling import Size

# Bytes of a file that are read first. Metadata before the size of a JPEG may be longer: the whole
# file is read then.
BEGINNING = 64 << 10


def image_size(
    source: bytes | EncodedImage | str | os.PathLike[str], *, apply_exif: bool = False
) -> Size:
    """Read height and width of an image, without decoding it.

    Of a file that is given by its path mostly the first 64 KiB are read. With
    ``resize = SmartResize(28)`` an image has ``prod(resize.size_of(*image_size(path))) // 28 ** 2``
    merged patches, which a sampler may count before any worker runs.

    Args:
        source: path of a file, its bytes, or an :class:`EncodedImage`.
        apply_exif: whether the picture will be turned upright, as for :class:`DataPrefetcher`.

    Returns:
        Height and width in pixels, as :class:`DataPrefetcher` will decode it.

    Raises:
        ValueError: for what is no image by its header, which names the path.
        OSError: for a file that cannot be read.
        TypeError: for something else.
    """
    if isinstance(source, EncodedImage):
        path = source.path
        data = source.data
    elif isinstance(source, bytes):
        path = ""
        data = source
    elif isinstance(source, (str, os.PathLike)):
        return _size_of(_read_path(source, apply_exif=apply_exif), apply_exif=apply_exif)
    else:
        raise TypeError(
            f"image_size takes a path, a file's bytes or an EncodedImage, got "
            f"{type(source).__name__}."
        )
    try:
        header = read_header(data, oriented=apply_exif)
    except ValueError as error:
        raise ValueError(f"{path or 'the bytes'}: {error}") from error
    return _size_of(header, apply_exif=apply_exif)


def _size_of(header: ImageHeader, *, apply_exif: bool) -> Size:
    if apply_exif and header.orientation >= 5:
        return header.width, header.height
    return header.height, header.width


def _read_path(path: str | os.PathLike[str], *, apply_exif: bool) -> ImageHeader:
    status = os.stat(path)  # noqa: PTH116
    name = os.fspath(path)
    if fault := fault_of(status):
        raise ValueError(f"{name}: {fault}")
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        beginning = file.read(BEGINNING)
        # Other formats may have their orientation after the pixels.
        if len(beginning) < status.st_size and (beginning[:2] == b"\xff\xd8" or not apply_exif):
            try:
                return read_header(beginning, oriented=apply_exif)
            except ValueError:
                pass
        file.seek(0)
        data = read_open(file, status.st_size)
    try:
        return read_header(data, oriented=apply_exif)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
