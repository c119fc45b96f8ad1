"""A pipeline of torchdata nodes: threads read the files, and no worker process is needed.

    python from_torchdata.py            # on a folder that it draws itself
    python from_torchdata.py FOLDER     # classes in sub-folders

What the GPU does not decode (PNG, CMYK) is decoded in the main process here.
"""

import sys
import tempfile
from pathlib import Path

import torch.distributed as dist
import torchdata.nodes as nodes
from drawn import pictures
from torch.utils.data import DistributedSampler, RandomSampler, default_collate

from gpuprefetch import DataPrefetcher, EncodedImageFolder, RandomResizedCrop


def build(dataset, batch_size, *, threads=8):
    """A loader of batches (images, labels) over a map-style dataset of encoded images."""
    distributed = dist.is_available() and dist.is_initialized()
    sampler = DistributedSampler(dataset) if distributed else RandomSampler(dataset)
    node = nodes.SamplerWrapper(sampler)  # gives the sampler a new epoch each time
    node = nodes.ParallelMapper(node, dataset.__getitem__, num_workers=threads, method="thread")
    node = nodes.Batcher(node, batch_size, drop_last=False)
    node = nodes.Mapper(node, default_collate)
    return nodes.Loader(nodes.Prefetcher(node, 2))


def write(folder):
    for data, label in pictures():
        path = Path(folder, f"class{label:02d}", f"{label}.jpg")
        path.parent.mkdir()
        path.write_bytes(data)
    return folder


def main(folder):
    loader = build(EncodedImageFolder(folder), batch_size=8)
    for images, target in DataPrefetcher(loader, transforms=[RandomResizedCrop(64)]):
        print(tuple(images.shape), images.device, target.tolist())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else write(folder))
