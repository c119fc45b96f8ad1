"""Parquet files with a column of encoded images, through pyarrow.

    python from_parquet.py               # on files that it draws itself
    python from_parquet.py train-*.parquet

The columns are those of the Hugging Face Hub: ``image``, a struct of ``bytes`` and ``path``, and
``label``. A row group goes to one worker of one rank; many small ones make equal shares.
"""

import random
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from drawn import pictures
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from gpuprefetch import DataPrefetcher, EncodedImage, RandomResizedCrop


class ParquetImages(IterableDataset):
    """Samples (image, label); ``prefetcher.set_epoch(epoch)`` changes their order."""

    def __init__(self, files, *, shuffle=True, seed=0):
        self.shuffle = shuffle
        self.seed = seed
        self._epoch = torch.tensor(0).share_memory_()  # persistent workers see it change
        counts = {file: pq.read_metadata(file).num_row_groups for file in sorted(files)}
        self.groups = [(file, group) for file, count in counts.items() for group in range(count)]
        # Asked here: a spawned worker is in no process group.
        distributed = dist.is_available() and dist.is_initialized()
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)

    @property
    def epoch(self):  # an int, which the state of a prefetcher keeps
        return int(self._epoch)

    def set_epoch(self, epoch):
        self._epoch.fill_(epoch)

    def __iter__(self):
        groups = list(self.groups)
        order = random.Random(f"{self.seed} {self.epoch}")
        if self.shuffle:  # in the same way everywhere, before the groups are dealt out
            order.shuffle(groups)
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        for file, group in groups[self.rank :: self.ranks][number::workers]:
            with pq.ParquetFile(file) as parquet:
                table = parquet.read_row_group(group, columns=["image.bytes", "label"])
            rows = list(range(len(table)))
            if self.shuffle:
                order.shuffle(rows)
            for row in rows:
                data = table["image"][row]["bytes"].as_buffer()  # no copy
                image = EncodedImage(memoryview(data), path=f"{file}/{group}/{row}")
                yield image, table["label"][row].as_py()


def write(folder, files=2):
    rows = [{"image": {"bytes": data, "path": None}, "label": label} for data, label in pictures()]
    for i in range(files):
        table = pa.Table.from_pylist(rows[i::files])
        pq.write_table(table, f"{folder}/{i}.parquet", row_group_size=3)
    return [str(path) for path in Path(folder).iterdir()]


def main(files):
    dataset = ParquetImages(files)
    loader = DataLoader(dataset, batch_size=8, num_workers=2, pin_memory=True)
    for images, target in DataPrefetcher(loader, transforms=[RandomResizedCrop(64)]):
        print(tuple(images.shape), images.device, target.tolist())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1:] or write(folder))
