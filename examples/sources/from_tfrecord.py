"""TFRecord files, through the tfrecord package: no TensorFlow.

    python from_tfrecord.py                 # on files that it draws itself
    python from_tfrecord.py train-*         # ImageNet's, as TensorFlow's own script writes them

A file goes to one worker of one rank, so there should be as many for each of them, and many.
"""

import random
import sys
import tempfile
from pathlib import Path

import tfrecord
import torch
import torch.distributed as dist
from drawn import pictures
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from gpuprefetch import DataPrefetcher, EncodedImage, RandomResizedCrop


class TFRecordImages(IterableDataset):
    """Samples (image, label); ``prefetcher.set_epoch(epoch)`` changes their order."""

    FIELDS = {"image/encoded": "byte", "image/class/label": "int"}  # noqa: RUF012

    def __init__(self, files, *, shuffle=1000, seed=0):
        self.files = sorted(files)
        self.shuffle = shuffle
        self.seed = seed
        self._epoch = torch.tensor(0).share_memory_()  # persistent workers see it change
        # Asked here: a spawned worker is in no process group.
        distributed = dist.is_available() and dist.is_initialized()
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)

    @property
    def epoch(self):  # an int, which the state of a prefetcher keeps
        return int(self._epoch)

    def set_epoch(self, epoch):
        self._epoch.fill_(epoch)

    def __iter__(self):
        files = list(self.files)
        order = random.Random(f"{self.seed} {self.epoch}")
        if self.shuffle:  # in the same way everywhere, before the files are dealt out
            order.shuffle(files)
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        files = files[self.rank :: self.ranks][number::workers]
        samples = (sample for file in files for sample in self.read(file))
        return shuffled(samples, self.shuffle, order) if self.shuffle else samples

    def read(self, file):
        for number, record in enumerate(tfrecord.tfrecord_loader(file, None, self.FIELDS)):
            data, label = (record[name] for name in self.FIELDS)
            yield EncodedImage(data, path=f"{file}/{number}"), int(label[0])


def shuffled(samples, size, order):
    """Shuffle within ``size`` samples. The library's own draws from NumPy, which no state holds."""
    waiting = []
    for sample in samples:
        waiting.append(sample)
        if len(waiting) == size:
            yield waiting.pop(order.randrange(size))
    order.shuffle(waiting)
    yield from waiting


def write(folder, files=4):
    writers = [tfrecord.TFRecordWriter(f"{folder}/{i}.tfrecord") for i in range(files)]
    for data, label in pictures():
        writers[label % files].write(
            {"image/encoded": (data, "byte"), "image/class/label": (label, "int")}
        )
    for writer in writers:
        writer.close()
    return [str(path) for path in Path(folder).iterdir()]


def main(files, shuffle=1000):
    dataset = TFRecordImages(files, shuffle=shuffle)
    loader = DataLoader(dataset, batch_size=8, num_workers=2, pin_memory=True)
    for images, target in DataPrefetcher(loader, transforms=[RandomResizedCrop(64)]):
        print(tuple(images.shape), images.device, target.tolist())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1:]) if sys.argv[1:] else main(write(folder), shuffle=4)
