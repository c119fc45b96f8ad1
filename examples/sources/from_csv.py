"""A list file of ``path,label`` lines, and a cache in memory that all workers share.

    python from_csv.py                       # on files that it draws itself
    python from_csv.py train.csv [--cache]   # paths are relative to the list

With ``--cache`` the files are read once, into one block of shared memory: for a set that fits into
it and a slow disk. The operating system's own cache does the same where nothing else evicts it.
"""

import argparse
import csv
import tempfile
from pathlib import Path

import torch
from drawn import pictures
from torch.utils.data import DataLoader, Dataset

from gpuprefetch import DataPrefetcher, EncodedImage, RandomResizedCrop


class ListedImages(Dataset):
    """Map-style: shuffle and split between ranks with a sampler, as for any other dataset."""

    def __init__(self, path, cache=False):
        self.root = Path(path).parent
        with Path(path).open(newline="") as file:
            self.rows = [(name, int(label)) for name, label in csv.reader(file)]
        self.cache = Cache([self.root / name for name, _ in self.rows]) if cache else None

    def __getitem__(self, index):
        name, label = self.rows[index]
        data = self.cache[index] if self.cache else (self.root / name).read_bytes()
        return EncodedImage(data, index, name), label

    def __len__(self):
        return len(self.rows)


class Cache:
    """The bytes of files in shared memory, each read by the worker that first wants it.

    Workers that read the same file at once write the same bytes.
    """

    def __init__(self, paths):
        self.paths = paths
        self.ends = torch.tensor([path.stat().st_size for path in paths]).cumsum(0).tolist()
        self.memory = torch.empty(self.ends[-1], dtype=torch.uint8).share_memory_()
        self.is_read = torch.zeros(len(paths), dtype=torch.bool).share_memory_()

    def __getitem__(self, index):
        place = self.memory[self.ends[index - 1] if index else 0 : self.ends[index]]
        if not self.is_read[index]:
            data = self.paths[index].read_bytes()
            if len(data) != len(place):
                raise ValueError(f"{self.paths[index]} has changed since the cache was made")
            place.numpy()[:] = memoryview(data)
            self.is_read[index] = True
        return place


def write(folder):
    with Path(folder, "train.csv").open("w", newline="") as file:
        for data, label in pictures():
            Path(folder, f"{label}.jpg").write_bytes(data)
            csv.writer(file).writerow([f"{label}.jpg", label])
    return f"{folder}/train.csv"


def main(path, cache=False):
    loader = DataLoader(
        ListedImages(path, cache), batch_size=8, shuffle=True, num_workers=2, pin_memory=True
    )
    for images, target in DataPrefetcher(loader, transforms=[RandomResizedCrop(64)]):
        print(tuple(images.shape), images.device, target.tolist())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", nargs="?")
    parser.add_argument("--cache", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        main(arguments.path or write(folder), arguments.cache)
