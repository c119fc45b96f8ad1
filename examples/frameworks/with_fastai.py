"""fastai: prefetchers are the loaders of a Learner.

    python with_fastai.py            # on pictures that it draws itself
    python with_fastai.py FOLDER     # train/CLASS/*.jpg and val/CLASS/*.jpg

``DataLoaders`` takes loaders that fastai did not make. Then fit, fit_one_cycle, lr_find, validate,
callbacks and mixed precision work as ever; what fastai makes from its own data blocks does not
(show_batch, learn.predict, test_dl): to predict, use ``gpuprefetch.preprocess``.
"""

import sys
from pathlib import Path

import kornia.augmentation as K
import torch
import torchvision
from fastai.callback.schedule import Learner  # with fit_one_cycle and lr_find
from fastai.data.core import DataLoaders
from fastai.metrics import accuracy
from torch.utils.data import DataLoader

from gpuprefetch import (
    CenterCrop,
    DataPrefetcher,
    EncodedImageFolder,
    RandomResizedCrop,
    Resize,
)

MEAN = torch.tensor((0.485, 0.456, 0.406))
STD = torch.tensor((0.229, 0.224, 0.225))


def prefetcher(folder, transforms, **options):
    loader = DataLoader(EncodedImageFolder(folder), pin_memory=True, **options)
    return DataPrefetcher(loader, transforms=[*transforms, K.Normalize(MEAN, STD)])


def main(root, epochs=2, batch_size=64, num_workers=2, size=64):
    options = {"batch_size": batch_size, "num_workers": num_workers}
    crop = RandomResizedCrop(size)
    flip = K.RandomHorizontalFlip()
    train = prefetcher(f"{root}/train", [crop, flip], shuffle=True, drop_last=True, **options)
    val = prefetcher(f"{root}/val", [Resize(size * 8 // 7), CenterCrop(size)], **options)
    model = torchvision.models.resnet18(num_classes=len(train.dataset.classes))
    learner = Learner(DataLoaders(train, val), model, torch.nn.CrossEntropyLoss(), metrics=accuracy)
    learner.fit_one_cycle(epochs, 1e-3)
    logits, targets = learner.get_preds(dl=val)
    return logits, targets


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "imagenet"))
    from draw import drawn_folder

    main(sys.argv[1] if len(sys.argv) > 1 else drawn_folder())
