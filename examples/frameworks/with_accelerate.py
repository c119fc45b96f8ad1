"""Hugging Face accelerate: prepare the DataLoader as ever, then put a prefetcher inside of it.

    python with_accelerate.py            # on pictures that it draws itself
    accelerate launch with_accelerate.py FOLDER     # train/CLASS/*.jpg and val/CLASS/*.jpg

What ``prepare`` returns splits the data between processes and counts batches around the loader that
it holds; so gradient accumulation and ``gather_for_metrics`` go on working.

A script whose datasets decode and transform in the workers, such as transformers' own
``run_image_classification_no_trainer.py``, changes in three lines::

    from with_accelerate import moved, skip_first_batches
    train_dataloader, eval_dataloader = moved(train_dataloader, eval_dataloader)  # after prepare
    active_dataloader = skip_first_batches(train_dataloader, resume_step)  # to resume
"""

import sys
from pathlib import Path

import accelerate
import kornia.augmentation as K
import torch
import torchvision
from accelerate import Accelerator
from torch.utils.data import DataLoader

import gpuprefetch
from gpuprefetch import (
    CenterCrop,
    DataPrefetcher,
    EncodedImageFolder,
    RandomResizedCrop,
    Resize,
)

MEAN = torch.tensor((0.485, 0.456, 0.406))
STD = torch.tensor((0.229, 0.224, 0.225))


def prepare(accelerator, loader, transforms):
    """``accelerator.prepare(loader)``, with the decode and the transforms on the device."""
    prepared = accelerator.prepare(loader)
    prepared.base_dataloader = DataPrefetcher(
        prepared.base_dataloader, device=accelerator.device, transforms=transforms
    )
    return prepared


def moved(*loaders):
    """Put the decode and the transforms of prepared loaders on their device."""
    for prepared in loaders:
        prepared.base_dataloader = gpuprefetch.accelerate(
            prepared.base_dataloader, device=prepared.device
        )
    return loaders


def skip_first_batches(prepared, count):
    """accelerate's, which makes a loader without the prefetcher: that goes in again."""
    rest = accelerate.skip_first_batches(prepared, count)
    rest.base_dataloader = prepared.base_dataloader.over(rest.base_dataloader)
    return rest


def main(root, epochs=2, batch_size=64, num_workers=2, size=64):
    accelerator = Accelerator()
    train = EncodedImageFolder(f"{root}/train")
    options = {"batch_size": batch_size, "num_workers": num_workers, "pin_memory": True}
    train_loader = prepare(
        accelerator,
        DataLoader(train, shuffle=True, **options),
        [RandomResizedCrop(size), K.RandomHorizontalFlip(), K.Normalize(MEAN, STD)],
    )
    val_loader = prepare(
        accelerator,
        DataLoader(EncodedImageFolder(f"{root}/val"), **options),
        [Resize(size * 8 // 7), CenterCrop(size), K.Normalize(MEAN, STD)],
    )
    model = torchvision.models.resnet18(num_classes=len(train.classes))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
    for epoch in range(epochs):
        model.train()
        for images, target in train_loader:
            accelerator.backward(torch.nn.functional.cross_entropy(model(images), target))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        correct = []
        with torch.no_grad():
            for images, target in val_loader:
                hits = model(images).argmax(1) == target
                correct.append(accelerator.gather_for_metrics(hits))
        accelerator.print(f"epoch {epoch}: top-1 {torch.cat(correct).float().mean():.1%}")


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "imagenet"))
    from draw import drawn_folder

    main(sys.argv[1] if len(sys.argv) > 1 else drawn_folder())
