"""Fine-tune a classifier of torchvision on a folder of photos, DATA/CLASS/*.jpg.

python finetune.py DATA             # writes preview.png first: what the model will see
python finetune.py DATA --resume    # goes on from finetune.pt, also in the middle of an epoch
"""

import argparse
import math
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision import models
from torchvision.transforms import v2
from tqdm import tqdm

from gpuprefetch import DataPrefetcher, EncodedImageFolder

CHECKPOINT = Path("finetune.pt")
CUDA = torch.cuda.is_available()


def main(argv=None):
    args = parse_args(argv)
    torch.manual_seed(0)
    photos = EncodedImageFolder(args.data)
    # Photos are in the order of their classes: each class has a fifth for validation.
    training = Subset(photos, [i for i in range(len(photos)) if i % 5])
    validation = Subset(photos, range(0, len(photos), 5))
    whole = models.get_model_weights(args.model).DEFAULT.transforms()  # as the weights want photos
    augment = [v2.RandomResizedCrop(whole.crop_size, (0.25, 1.0)), v2.RandomHorizontalFlip()]
    augment += [v2.TrivialAugmentWide(), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    augment += [v2.Normalize(whole.mean, whole.std)]
    options = {"num_workers": args.workers, "pin_memory": CUDA, "batch_size": args.batch_size}
    ours = {"memory_format": torch.channels_last, "on_error": "skip"}
    train_loader = DataLoader(training, shuffle=True, **options)
    train_loader = DataPrefetcher(train_loader, transforms=augment, **ours)
    val_loader = DataPrefetcher(DataLoader(validation, **options), transforms=whole, **ours)
    train_loader.preview(8, draws=3).save("preview.png")
    device = train_loader.device
    model = build_model(args, len(photos.classes)).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    steps = args.epochs * len(train_loader)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: math.cos(1.57 * n / steps))
    parts = {"model": model, "optimizer": optimizer, "lr": falling, "loader": train_loader}
    begin = resume(parts, steps) if args.resume else 0
    for epoch in range(begin, args.epochs):
        model.train()
        for images, target in tqdm(train_loader, f"epoch {epoch + 1}", leave=False, disable=None):
            with torch.autocast(device.type, torch.bfloat16, enabled=CUDA):
                loss = nn.functional.cross_entropy(model(images), target, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            falling.step()
            if falling.last_epoch % args.save_every == 0:
                save(parts, epoch, photos.classes)
        save(parts, epoch + 1, photos.classes)
        model.eval()
        with torch.no_grad():
            hits = torch.cat([model(images).argmax(1) == target for images, target in val_loader])
        print(f"epoch {epoch + 1}: {hits.float().mean():.1%} of {len(hits)} photos are right")
    for bad in train_loader.bad_images + val_loader.bad_images:
        print(f"left out: {bad}")


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", metavar="DATA", help="folder with a folder per class")
    parser.add_argument("--model", default="resnet50", help="a classifier of torchvision")
    parser.add_argument("--weights", default="DEFAULT", help='their name, or "none"')
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate at the start")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--save-every", type=int, default=100, help="steps, and each epoch")
    parser.add_argument("--resume", action="store_true", help=f"go on from {CHECKPOINT}")
    args = parser.parse_args(argv)
    if args.resume and not CHECKPOINT.exists():
        parser.error(f"--resume: there is no {CHECKPOINT} in this folder")
    return args


def build_model(args, classes):
    # A checkpoint has the weights that resume() reads.
    weights = None if args.resume or args.weights == "none" else args.weights
    model = models.get_model(args.model, weights=weights)
    linear = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    if not linear:
        raise SystemExit(f"{args.model} has no linear layer for the classes: take another --model")
    name, last = linear[-1]
    model.set_submodule(name, nn.Linear(last.in_features, classes))
    return model


def save(parts, epoch, classes):
    state = {name: part.state_dict() for name, part in parts.items()}
    state |= {"epoch": epoch, "classes": classes, "random": torch.get_rng_state()}
    torch.save(state, CHECKPOINT.with_suffix(".new"))
    CHECKPOINT.with_suffix(".new").replace(CHECKPOINT)


def resume(parts, steps):
    state = torch.load(CHECKPOINT, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    torch.set_rng_state(state["random"])  # later epochs have the order that they would have had
    print(f"goes on after step {parts['lr'].last_epoch} of {steps}")
    return state["epoch"]


if __name__ == "__main__":
    main()
