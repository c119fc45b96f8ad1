"""Files in an object store, or wherever else fsspec reads, in a folder for each class.

    python from_fsspec.py                         # on files that it draws itself
    python from_fsspec.py s3://bucket/train       # pip install s3fs
    python from_fsspec.py gs://bucket/train       # pip install gcsfs
    python from_fsspec.py simplecache::s3://bucket/train    # each file is kept when it was read

A request for each file needs many workers. Where files are small, shards are faster: see
from_webdataset.py.
"""

import sys
import tempfile

from drawn import pictures
from fsspec.core import url_to_fs
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS

from gpuprefetch import DataPrefetcher, EncodedImage, RandomResizedCrop


class RemoteImages(Dataset):
    """Map-style: shuffle and split between ranks with a sampler, as for any other dataset."""

    def __init__(self, url, **options):
        self.url = url
        self.options = options
        files, root = url_to_fs(url, **options)
        self.paths = [p for p in sorted(files.find(root)) if p.lower().endswith(IMG_EXTENSIONS)]
        if not self.paths:
            raise FileNotFoundError(f"{url} has no images in it")
        self.classes = sorted({path.split("/")[-2] for path in self.paths})

    def __getitem__(self, index):
        # Asked in the worker: a connection must not be carried over a fork. fsspec keeps it.
        files, _ = url_to_fs(self.url, **self.options)
        path = self.paths[index]
        label = self.classes.index(path.split("/")[-2])
        return EncodedImage(files.cat_file(path), index, path), label

    def __len__(self):
        return len(self.paths)


def write(url):
    files, root = url_to_fs(url)
    for data, label in pictures():
        files.makedirs(f"{root}/train/{label:02d}", exist_ok=True)
        files.pipe_file(f"{root}/train/{label:02d}/{label}.jpg", data)
    return f"{url}/train"


def main(url):
    loader = DataLoader(
        RemoteImages(url), batch_size=8, shuffle=True, num_workers=2, pin_memory=True
    )
    for images, target in DataPrefetcher(loader, transforms=[RandomResizedCrop(64)]):
        print(tuple(images.shape), images.device, target.tolist())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else write(folder))
