"""MXNet's RecordIO, a .rec file with its .idx, without MXNet.

    python from_recordio.py            # on a file that it draws itself
    python from_recordio.py train.rec

A record begins with a magic number and a word that holds its length and a flag: files that contain
the magic number are split there, and joined when they are read. An image record is a header (the
number of further labels, a label, two ids) before the file's bytes; what im2rec wrote with
--pack-label has its labels between them.
"""

import os
import struct
import sys
import tempfile
from pathlib import Path

from drawn import pictures
from torch.utils.data import DataLoader, Dataset

from gpuprefetch import DataPrefetcher, EncodedImage, RandomResizedCrop

MAGIC = struct.pack("<I", 0xCED7230A)
WHOLE, FIRST, MIDDLE, LAST = range(4)
HEADER = struct.Struct("<IfQQ")


class RecordImages(Dataset):
    """Map-style: shuffle and split between ranks with a sampler, as for any other dataset."""

    def __init__(self, path):
        self.path = path
        lines = Path(path).with_suffix(".idx").read_text().split("\n")
        self.offsets = [int(line.split("\t")[1]) for line in lines if line]
        self.opened = None

    def file(self):
        # A file that is carried over a fork shares its position with the parent's.
        if self.opened is None or self.opened[0] != os.getpid():
            self.opened = os.getpid(), Path(self.path).open("rb")
        return self.opened[1]

    def __getstate__(self):
        return {**vars(self), "opened": None}

    def __getitem__(self, index):
        record = read_record(self.file(), self.offsets[index])
        labels, label, *_ = HEADER.unpack_from(record)
        start = HEADER.size + 4 * labels
        if labels:
            label = struct.unpack_from(f"<{labels}f", record, HEADER.size)[0]
        return EncodedImage(record[start:], index), int(label)

    def __len__(self):
        return len(self.offsets)


def read_record(file, offset):
    """The bytes of the record that begins at ``offset``."""
    file.seek(offset)
    parts = []
    flag = None
    while flag not in (WHOLE, LAST):
        head = file.read(8)
        if head[:4] != MAGIC:
            raise ValueError(f"no record begins at byte {offset} of {file.name}; is its .idx old?")
        (word,) = struct.unpack("<I", head[4:])
        flag = word >> 29
        length = word & (1 << 29) - 1
        parts.append(file.read(length))
        if len(parts[-1]) < length:
            raise ValueError(f"{file.name} ends within the record at byte {offset}")
        file.seek(-length % 4, os.SEEK_CUR)
    return MAGIC.join(parts)


def write_record(file, data):
    """Append a record; returns where it begins."""
    offset = file.tell()
    parts = []
    begin = 0
    for at in range(0, len(data) - 3, 4):
        if data[at : at + 4] == MAGIC:
            parts.append(data[begin:at])
            begin = at + 4
    parts.append(data[begin:])
    for number, part in enumerate(parts):
        flag = MIDDLE if number else FIRST
        flag = (flag if number < len(parts) - 1 else LAST) if len(parts) > 1 else WHOLE
        file.write(MAGIC + struct.pack("<I", flag << 29 | len(part)) + part)
        file.write(bytes(-len(part) % 4))
    return offset


def write(folder):
    path = Path(folder, "train.rec")
    with path.open("wb") as file, path.with_suffix(".idx").open("w") as index:
        for data, label in pictures():
            offset = write_record(file, HEADER.pack(0, label, label, 0) + data)
            index.write(f"{label}\t{offset}\n")
    return str(path)


def main(path):
    loader = DataLoader(
        RecordImages(path), batch_size=8, shuffle=True, num_workers=2, pin_memory=True
    )
    for images, target in DataPrefetcher(loader, transforms=[RandomResizedCrop(64)]):
        print(tuple(images.shape), images.device, target.tolist())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else write(folder))
