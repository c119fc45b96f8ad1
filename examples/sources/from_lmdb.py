"""An LMDB database, through the lmdb package.

    python from_lmdb.py            # on a database that it draws itself
    python from_lmdb.py DATABASE

Here a key is the sample's number, eight digits, and a value four bytes of label and the file's
bytes. Change ``__getitem__`` where yours are others.
"""

import functools
import os
import sys
import tempfile

import lmdb
from drawn import pictures
from torch.utils.data import DataLoader, Dataset

from gpuprefetch import DataPrefetcher, EncodedImage, RandomResizedCrop


@functools.cache
def opened(path):
    """A database, opened once in a process: LMDB refuses to do so twice."""
    return lmdb.open(path, readonly=True, lock=False, readahead=False, meminit=False)


if hasattr(os, "register_at_fork"):  # not on every platform
    os.register_at_fork(after_in_child=opened.cache_clear)  # none must be carried over a fork


class LMDBImages(Dataset):
    """Map-style: shuffle and split between ranks with a sampler, as for any other dataset."""

    def __init__(self, path):
        self.path = path
        self.length = opened(path).stat()["entries"]

    def __getitem__(self, index):
        with opened(self.path).begin() as transaction:
            value = transaction.get(b"%08d" % index)
        return EncodedImage(value[4:], index), int.from_bytes(value[:4], "little")

    def __len__(self):
        return self.length


def write(folder):
    with lmdb.open(folder, map_size=2**30) as database, database.begin(write=True) as transaction:
        for index, (data, label) in enumerate(pictures()):
            transaction.put(b"%08d" % index, label.to_bytes(4, "little") + data)
    return folder


def main(path):
    loader = DataLoader(
        LMDBImages(path), batch_size=8, shuffle=True, num_workers=2, pin_memory=True
    )
    for images, target in DataPrefetcher(loader, transforms=[RandomResizedCrop(64)]):
        print(tuple(images.shape), images.device, target.tolist())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else write(folder))
