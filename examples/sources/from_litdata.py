"""Lightning's LitData chunks, streamed from a folder or an object store.

    python from_litdata.py                  # on chunks that it draws itself
    python from_litdata.py s3://bucket/train

The library downloads chunks ahead, and shares them between ranks and workers. What is optimized
here are dictionaries of a file's bytes and a label; change ``encoded`` where yours are others.
"""

import sys
import tempfile

from drawn import pictures
from litdata import StreamingDataset, optimize
from torch.utils.data import DataLoader

from gpuprefetch import DataPrefetcher, EncodedImage, RandomResizedCrop


def encoded(sample):
    """What a sample becomes: its name is its label's, since LitData gives no numbers."""
    return EncodedImage(sample["image"], path=sample["name"]), sample["label"]


class LitDataImages(StreamingDataset):
    """Samples (image, label); ``prefetcher.set_epoch(epoch)`` changes their order."""

    @property
    def epoch(self):  # the library's own count, which the state of a prefetcher keeps
        return self.current_epoch


def read(data, *, shuffle=True):
    return LitDataImages(data, shuffle=shuffle, drop_last=False, transform=encoded)


def as_sample(picture):
    data, label = picture
    return {"image": data, "label": label, "name": f"{label:08d}.jpg"}


def write(folder):
    options = {"chunk_size": 3, "num_workers": 1, "verbose": False}
    # The library's own choice, to spawn, would stay that of the DataLoader's workers as well.
    optimize(as_sample, [*pictures()], f"{folder}/train", start_method="fork", **options)
    return f"{folder}/train"


def main(data):
    loader = DataLoader(read(data), batch_size=8, num_workers=2, pin_memory=True)
    for images, target in DataPrefetcher(loader, transforms=[RandomResizedCrop(64)]):
        print(tuple(images.shape), images.device, target.tolist())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else write(folder))
