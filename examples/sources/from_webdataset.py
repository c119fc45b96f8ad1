"""WebDataset tar shards, through the webdataset library.

    python from_webdataset.py                               # on shards it draws itself
    python from_webdataset.py 'train-{000000..001281}.tar'

A shard goes to one worker of one rank, so there should be as many for each of them, and many. The
decoding steps of a WebDataset pipeline are left out: the prefetcher decodes.
"""

import random
import sys
import tempfile

import torch
import webdataset as wds
from drawn import pictures
from torch.utils.data import DataLoader, IterableDataset

from gpuprefetch import DataPrefetcher, EncodedImage, RandomResizedCrop


class WebDatasetImages(IterableDataset):
    """Samples (image, label) of tar files of ``.jpg`` and ``.cls``.

    ``prefetcher.set_epoch(epoch)`` changes their order. The library's own shuffle takes its seed
    from the time and the process, so an epoch could not be resumed in its order.
    """

    def __init__(self, shards, *, shuffle=1000, seed=0):
        one = isinstance(shards, str)  # such as train-{000000..001281}.tar
        self.shards = wds.shardlists.expand_urls(shards) if one else list(shards)
        self.shuffle = shuffle
        self.seed = seed
        self._epoch = torch.tensor(0).share_memory_()  # persistent workers see it change

    @property
    def epoch(self):  # an int, which the state of a prefetcher keeps
        return int(self._epoch)

    def set_epoch(self, epoch):
        self._epoch.fill_(epoch)

    def __iter__(self):
        shards = list(self.shards)
        order = random.Random(f"{self.seed} {self.epoch}")
        if self.shuffle:  # in the same way everywhere, before the shards are dealt out
            order.shuffle(shards)
        dataset = wds.WebDataset(shards, nodesplitter=wds.split_by_node, shardshuffle=False)
        if self.shuffle:
            dataset = dataset.shuffle(self.shuffle, rng=order)
        return iter(dataset.map(to_sample))


def to_sample(sample):
    path = f"{sample['__url__']}/{sample['__key__']}"  # the name that random crops are keyed to
    return EncodedImage(sample["jpg"], path=path), int(sample["cls"])


def write(folder, shards=4):
    with wds.ShardWriter(f"{folder}/%06d.tar", maxcount=24 // shards, verbose=0) as tar:
        for data, label in pictures(24):
            tar.write({"__key__": f"{label:08d}", "jpg": data, "cls": label})
    return f"{folder}/{{000000..{shards - 1:06d}}}.tar"


def main(shards):
    loader = DataLoader(WebDatasetImages(shards), batch_size=8, num_workers=2, pin_memory=True)
    for images, target in DataPrefetcher(loader, transforms=[RandomResizedCrop(64)]):
        print(tuple(images.shape), images.device, target.tolist())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else write(folder))
