"""Keras on torch: its fit() takes a DataLoader, and a prefetcher goes into one.

    KERAS_BACKEND=torch python with_keras.py            # on pictures that it draws itself
    KERAS_BACKEND=torch python with_keras.py FOLDER     # train/CLASS/*.jpg and val/CLASS/*.jpg

fit, evaluate and predict take torch's own DataLoader and no other iterable. Batches pass through
this one as they are, on the device. ``model.train_on_batch(images, target)`` takes a prefetcher's
batches without it. Keras begins an epoch to see what a batch looks like, and then the first one.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import kornia.augmentation as K
import torch
from torch.utils.data import DataLoader, IterableDataset

from gpuprefetch import (
    CenterCrop,
    DataPrefetcher,
    EncodedImageFolder,
    RandomResizedCrop,
    Resize,
)

MEAN = torch.tensor((0.485, 0.456, 0.406))
STD = torch.tensor((0.229, 0.224, 0.225))


class Batches(IterableDataset):
    """The batches of a prefetcher; each iteration is an epoch."""

    def __init__(self, prefetcher):
        self.prefetcher = prefetcher

    def __iter__(self):
        return iter(self.prefetcher)

    def __len__(self):
        return len(self.prefetcher)


def for_keras(folder, transforms, *, shuffle=False, batch_size=64, num_workers=2):
    loader = DataLoader(
        EncodedImageFolder(folder),
        batch_size,
        shuffle=shuffle,
        num_workers=num_workers,
        pin_memory=True,
    )
    prefetcher = DataPrefetcher(loader, transforms=[*transforms, K.Normalize(MEAN, STD)])
    return DataLoader(Batches(prefetcher), batch_size=None)


def main(root, epochs=2, size=64, **options):
    crop = RandomResizedCrop(size)
    flip = K.RandomHorizontalFlip()
    train = for_keras(f"{root}/train", [crop, flip], shuffle=True, **options)
    val = for_keras(f"{root}/val", [Resize(size * 8 // 7), CenterCrop(size)], **options)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((3, size, size)),
            layers.Permute((2, 3, 1)),  # a view; Keras has channels last
            layers.Conv2D(32, 3, strides=2, activation="relu"),
            layers.Conv2D(64, 3, strides=2, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(len(train.dataset.prefetcher.dataset.classes)),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    history = model.fit(train, validation_data=val, epochs=epochs, shuffle=False, verbose=2)
    return history.history, model.predict(val, verbose=0)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "imagenet"))
    from draw import drawn_folder

    main(sys.argv[1] if len(sys.argv) > 1 else drawn_folder())
