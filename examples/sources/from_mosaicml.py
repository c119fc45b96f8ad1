"""MosaicML Streaming's MDS shards, from a folder or an object store.

    python from_mosaicml.py                            # on shards that it draws itself
    python from_mosaicml.py s3://bucket/train FOLDER

The library downloads shards ahead into the second folder, shares samples between ranks and
workers, and shuffles. The columns here are a file's bytes and a label; change ``__getitem__`` where
yours are others.
"""

import sys
import tempfile

from drawn import pictures
from streaming import MDSWriter, StreamingDataset
from torch.utils.data import DataLoader

from gpuprefetch import DataPrefetcher, EncodedImage, RandomResizedCrop


class MDSImages(StreamingDataset):
    """Iterable for a DataLoader, which must have the same ``batch_size``."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return EncodedImage(sample["image"], index), sample["label"]


def write(folder):
    columns = {"image": "bytes", "label": "int"}
    with MDSWriter(out=f"{folder}/train", columns=columns, size_limit=20_000) as shards:
        for data, label in pictures():
            shards.write({"image": data, "label": label})
    return f"{folder}/train"


def main(data, local=None):
    remote, local = (data, local) if local else (None, data)
    dataset = MDSImages(remote=remote, local=local, shuffle=True, batch_size=8)
    loader = DataLoader(dataset, batch_size=8, num_workers=2, pin_memory=True)
    for images, target in DataPrefetcher(loader, transforms=[RandomResizedCrop(64)]):
        print(tuple(images.shape), images.device, target.tolist())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(*(sys.argv[1:] or [write(folder)]))
