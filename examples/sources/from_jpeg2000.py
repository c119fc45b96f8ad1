"""JPEG 2000 files: nvImageCodec where it and a GPU are, Pillow in the workers elsewhere.

    python from_jpeg2000.py            # on files that it draws itself
    python from_jpeg2000.py FOLDER     # CLASS/*.jp2

Pillow's wheels have OpenJPEG, so ``EncodedImage`` alone is enough for any machine. nvImageCodec
(``pip install 'nvidia-nvimgcodec-cu13[nvjpeg2k]'``) decodes in the main process, one batch a call,
and leaves the pixels on the GPU.
"""

import io
import sys
import tempfile
from pathlib import Path

import torch
from drawn import pictures
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from gpuprefetch import BadImageError, DataPrefetcher, EncodedImage, RandomResizedCrop


class JPEG2000Images(Dataset):
    """Map-style: shuffle and split between ranks with a sampler, as for any other dataset."""

    def __init__(self, folder):
        self.paths = sorted(Path(folder).glob("*/*.jp2"))
        if not self.paths:
            raise FileNotFoundError(f"{folder} has no files in CLASS/*.jp2")
        self.classes = sorted({path.parent.name for path in self.paths})

    def __getitem__(self, index):
        path = self.paths[index]
        label = self.classes.index(path.parent.name)
        return EncodedImage(path.read_bytes(), index, str(path)), label

    def __len__(self):
        return len(self.paths)


class Decoded:
    """The batches of a loader of files, decoded in this process and cropped one by one."""

    def __init__(self, loader, decode, size):
        self.loader = loader
        self.decode = decode
        self.crop = RandomResizedCrop(size)

    def __iter__(self):
        for files, target in self.loader:
            images = self.decode([file.data for file in files])
            for file, image in zip(files, images, strict=True):
                if image is None:
                    raise BadImageError(f"{file.path} cannot be decoded")
            # (H, W, 3) uint8 each, of its own size
            crops = [self.crop(torch.as_tensor(image).permute(2, 0, 1)) for image in images]
            yield torch.cat(crops), target


def collate(samples):
    files, labels = zip(*samples, strict=True)
    return files, torch.tensor(labels)


def build(folder, size, **options):
    """A prefetcher over the files of a folder."""
    try:
        from nvidia import nvimgcodec
    except ImportError:
        nvimgcodec = None
    dataset = JPEG2000Images(folder)
    if nvimgcodec is None or not torch.cuda.is_available():
        loader = DataLoader(dataset, pin_memory=True, **options)
        return DataPrefetcher(loader, transforms=[RandomResizedCrop(size)])
    decoder = nvimgcodec.Decoder()

    def decode(files):
        return decoder.decode(files, cuda_stream=torch.cuda.current_stream().cuda_stream)

    loader = DataLoader(dataset, collate_fn=collate, **options)
    return DataPrefetcher(Decoded(loader, decode, size))


def write(folder):
    for data, label in pictures():
        path = Path(folder, f"{label:02d}", f"{label}.jp2")
        path.parent.mkdir()
        Image.open(io.BytesIO(data)).save(path)
    return folder


def main(folder):
    for images, target in build(folder, 64, batch_size=8, shuffle=True, num_workers=2):
        print(tuple(images.shape), images.device, target.tolist())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else write(folder))
