"""timm: its datasets, create_loader and Mixup, moved to the device by accelerate().

    python with_timm.py            # on pictures that it draws itself
    python with_timm.py FOLDER     # train/CLASS/*.jpg and val/CLASS/*.jpg

For timm's own train.py: put the two accelerate() lines after its create_loader calls and start it
with ``--no-prefetcher --train-interpolation bicubic`` (``random``, its default, draws between two
filters, and one launch has one). Nothing else in it changes.
"""

import sys
from pathlib import Path

import timm
import torch
from timm.data import Mixup, create_dataset, create_loader

import gpuprefetch


def main(root, epochs=2, batch_size=64, size=64):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    classes = len(list(Path(root, "train").iterdir()))

    def loader(split, **options):
        dataset = create_dataset("", root=root, split=split)
        options = {"num_workers": 2, "pin_memory": True, "interpolation": "bicubic"} | options
        return create_loader(dataset, (3, size, size), batch_size, use_prefetcher=False, **options)

    train_loader = loader(
        "train",
        is_training=True,
        auto_augment="rand-m9-mstd0.5-inc1",
        re_prob=0.25,
        re_mode="pixel",
    )
    train_loader = gpuprefetch.accelerate(train_loader, device=device)
    val_loader = gpuprefetch.accelerate(loader("val"), device=device)

    model = timm.create_model("resnet18", num_classes=classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    mixup = Mixup(mixup_alpha=0.2, num_classes=classes, label_smoothing=0.1)
    for epoch in range(epochs):
        model.train()
        for images, target in train_loader:  # on the device already
            images, target = mixup(images, target)
            torch.nn.functional.cross_entropy(model(images), target).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            hits = [(model(images).argmax(1) == target) for images, target in val_loader]
        print(f"epoch {epoch}: top-1 {torch.cat(hits).float().mean():.1%}")


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "imagenet"))
    from draw import drawn_folder

    main(sys.argv[1] if len(sys.argv) > 1 else drawn_folder())
