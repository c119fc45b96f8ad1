"""A Hugging Face dataset, through the datasets library.

    python from_huggingface.py                       # on a dataset that it draws itself
    python from_huggingface.py ILSVRC/imagenet-1k    # what load_dataset() takes: a name, a folder

Any dataset with a column of images works, stored as bytes or as paths.
"""

import sys
import tempfile
from pathlib import Path

import datasets
from drawn import pictures
from torch.utils.data import DataLoader, Dataset

from gpuprefetch import DataPrefetcher, EncodedImage, RandomResizedCrop


class HuggingFaceImages(Dataset):
    """Map-style: shuffle and split between ranks with a sampler, as for any other dataset."""

    def __init__(self, dataset, image="image", label="label"):
        # decode=False hands out the file's bytes, or its path where the dataset holds only that.
        self.dataset = dataset.cast_column(image, datasets.Image(decode=False))
        self.image = image
        self.label = label

    def __getitem__(self, index):
        row = self.dataset[index]
        file = row[self.image]
        data = file["bytes"] or Path(file["path"]).read_bytes()
        return EncodedImage(data, index, file["path"] or ""), row[self.label]

    def __len__(self):
        return len(self.dataset)


def write(folder):
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = [{"image": {"bytes": data, "path": None}, "label": label} for data, label in pictures()]
    dataset = datasets.Dataset.from_list(rows, features=features)
    dataset.to_parquet(f"{folder}/train.parquet")
    return folder


def main(path):
    dataset = HuggingFaceImages(datasets.load_dataset(path, split="train"))
    loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2, pin_memory=True)
    for images, target in DataPrefetcher(loader, transforms=[RandomResizedCrop(64)]):
        print(tuple(images.shape), images.device, target.tolist())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else write(folder))
