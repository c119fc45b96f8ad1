"""WebDataset tar shards, through the webdataset library.

    python from_webdataset.py                               # on shards it draws itself
    python from_webdataset.py 'train-{000000..001281}.tar'

A shard goes to one worker of one rank, so there should be as many for each of them, and many. The
decoding steps of a WebDataset pipeline are left out: the prefetcher decodes.
"""

import sys
import tempfile

import webdataset as wds
from drawn import pictures
from torch.utils.data import DataLoader

from gpuprefetch import DataPrefetcher, EncodedImage, RandomResizedCrop


def read(shards, *, shuffle=1000):
    """Samples (image, label) of tar files of ``.jpg`` and ``.cls``."""
    dataset = wds.WebDataset(
        shards, nodesplitter=wds.split_by_node, shardshuffle=100 if shuffle else False
    )
    return dataset.shuffle(shuffle).map(to_sample)


def to_sample(sample):
    path = f"{sample['__url__']}/{sample['__key__']}"  # the name that random crops are keyed to
    return EncodedImage(sample["jpg"], path=path), int(sample["cls"])


def write(folder, shards=4):
    with wds.ShardWriter(f"{folder}/%06d.tar", maxcount=24 // shards, verbose=0) as tar:
        for data, label in pictures(24):
            tar.write({"__key__": f"{label:08d}", "jpg": data, "cls": label})
    return f"{folder}/{{000000..{shards - 1:06d}}}.tar"


def main(shards):
    loader = DataLoader(read(shards), batch_size=8, num_workers=2, pin_memory=True)
    for images, target in DataPrefetcher(loader, transforms=[RandomResizedCrop(64)]):
        print(tuple(images.shape), images.device, target.tolist())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else write(folder))
