"""Train a classifier of motion on video clips, cropped and colored ahead on the device.

    python train.py                      # on clips that it draws itself
    python train.py FOLDER               # train/CLASS/* and val/CLASS/*: H.264, VP9, ...
    python train.py --decode cuda        # on the GPU, in the main process

TorchCodec decodes by way of FFmpeg (``apt-get install ffmpeg``): in the workers, or on the GPU
where the build has that. A clip ``(T, 3, H, W)`` goes through the transforms as one image of T * 3
channels, so that its frames share one crop and one flip. ``PerClip`` does the same for policies.
"""

import argparse
import functools
import math
import os
import tempfile
from pathlib import Path

import kornia.augmentation as K
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchcodec.decoders import VideoDecoder
from torchcodec.encoders import VideoEncoder
from torchvision.transforms import v2

from gpuprefetch import CenterCrop, DataPrefetcher, PerImage, RandomResizedCrop

FRAMES = 8  # of a clip
DECODED = 72  # pixels a side, as read
SIZE = 64  # pixels a side, as trained on
LEARNING_RATE = 3e-3
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
MOTIONS = ("growing", "shrinking", "still", "swaying")
FILES = {".mp4": "libx264", ".webm": "libvpx-vp9"}


@functools.lru_cache(maxsize=64)
def opened(path, device, _process):
    """A decoder, kept: to open one scans the file, and on the GPU sets up a session."""
    return VideoDecoder(path, device=device)


class Clips(Dataset):
    """``(clip (T * 3, H, W) uint8, class)``; the files of a folder for each class."""

    def __init__(self, folder, device="cpu"):
        self.device = device
        self.paths = sorted(path for path in Path(folder).glob("*/*") if path.is_file())
        if not self.paths:
            raise FileNotFoundError(f"{folder} has no files in CLASS/*")
        self.classes = sorted({path.parent.name for path in self.paths})

    def __getitem__(self, index):
        path = self.paths[index]
        # A decoder that is carried over a fork would share its place in the file.
        decoder = opened(path, self.device, os.getpid())
        last = decoder.metadata.num_frames - 1
        frames = decoder.get_frames_at(torch.linspace(0, last, FRAMES).long().tolist()).data
        frames = v2.functional.resize(frames, [DECODED, DECODED])
        return frames.flatten(0, 1), self.classes.index(path.parent.name)

    def __len__(self):
        return len(self.paths)


class PerClip(nn.Module):
    """A random policy on ``(N, T * 3, H, W)``, sampled once for each clip, not for each frame."""

    def __init__(self, transform):
        super().__init__()
        self.policy = PerImage(transform)

    def forward(self, clips):
        frames = clips.unflatten(1, (-1, 3)).unbind(1)
        sampled = self.policy.draw(frames[0])
        done = [self.policy.carry_out(frame.contiguous(), sampled) for frame in frames]
        return torch.cat(done, 1)


def as_clips(images):
    """``(N, T * 3, H, W)`` to ``(N, T, 3, H, W)``."""
    return images.unflatten(1, (-1, 3))


def train_transforms():
    crop = RandomResizedCrop(SIZE, scale=(0.6, 1.0))
    jitter = v2.ColorJitter(0.4, 0.4, 0.4)
    policy = PerClip([jitter, v2.Normalize(MEAN, STD)])
    return [crop, K.RandomHorizontalFlip(), policy, as_clips]


def val_transforms():
    # One mean and one std for each channel, as often as there are frames.
    normalize = K.Normalize(torch.tensor(MEAN * FRAMES), torch.tensor(STD * FRAMES))
    return [CenterCrop(SIZE), normalize, as_clips]


def build(folder, transforms, *, batch_size, num_workers=2, shuffle=False, decode="cpu"):
    on_gpu = decode == "cuda"  # a worker's CUDA context would cost memory, and the copy back time
    loader = DataLoader(
        Clips(folder, decode),
        batch_size,
        shuffle=shuffle,
        num_workers=0 if on_gpu else num_workers,
        pin_memory=not on_gpu,
    )
    return DataPrefetcher(loader, transforms=transforms)


class Motion(nn.Module):
    """Convolutions over time and space of ``(N, T, 3, H, W)``."""

    def __init__(self, classes, width=24):
        super().__init__()
        layers = []
        for before, after in ((3, width), (width, 2 * width), (2 * width, 2 * width)):
            conv = nn.Conv3d(before, after, 3, stride=(1, 2, 2), padding=1, bias=False)
            layers += [conv, nn.BatchNorm3d(after), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool3d((4, 1, 1)), nn.Flatten())
        self.last = nn.Linear(4 * 2 * width, classes)

    def forward(self, clips):
        return self.last(self.layers(clips.transpose(1, 2)))


def main(root, epochs=4, **options):
    """Train; returns the share of validation clips that are told right."""
    torch.manual_seed(0)
    options = {"batch_size": 16} | options
    train = build(f"{root}/train", train_transforms(), shuffle=True, **options)
    val = build(f"{root}/val", val_transforms(), **options)
    classes = train.dataset.classes
    if val.dataset.classes != classes:
        raise ValueError(f"train and val need the same folders, which number the classes: {root}")
    model = Motion(len(classes)).to(train.device)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=epochs * len(train)
    )
    for epoch in range(epochs):
        model.train()
        for clips, target in train:
            loss = nn.functional.cross_entropy(model(clips), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            hits = [model(clips).argmax(1) == target for clips, target in val]
        accuracy = torch.cat(hits).float().mean().item()
        print(f"epoch {epoch}: loss {loss:.3f}, top-1 {accuracy:.1%}")
    return accuracy


def draw(motion, generator, frames=12):
    """``(frames, 3, H, W)`` uint8 of a disk in motion, of another size, place and color each."""
    numbers = torch.rand(10, generator=generator).tolist()
    height, width = (2 * round(40 + 16 * number) for number in numbers[:2])
    y, x = torch.meshgrid(torch.arange(height) / height, torch.arange(width) / width, indexing="ij")
    front, back = torch.tensor(numbers[2:8]).view(2, 3, 1, 1)
    clip = []
    phase = 2 * math.pi * numbers[8]
    for time in torch.linspace(0, 1, frames).tolist():
        sway = 0.3 * math.sin(2 * math.pi * time + phase) if motion == "swaying" else 0
        size = {"growing": time, "shrinking": 1 - time}.get(motion, numbers[9])
        inside = (x - 0.5 - sway).square() + (y - 0.5).square() < (0.1 + 0.2 * size) ** 2
        clip.append(torch.where(inside, 0.4 * front + 0.6, 0.4 * back))
    return (torch.stack(clip) * 255).to(torch.uint8)


def write_folder(root, train_per_class=32, val_per_class=10):
    """Draw clips, half of each codec; the same numbers always give the same clips."""
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", train_per_class), ("val", val_per_class)):
        for motion in MOTIONS:
            folder = Path(root, split, motion)
            folder.mkdir(parents=True)
            for i in range(count):
                suffix, codec = list(FILES.items())[i % len(FILES)]
                encoder = VideoEncoder(draw(motion, generator), frame_rate=12)
                path = folder / f"{i:03d}{suffix}"
                encoder.to_file(path, codec=codec, pixel_format="yuv420p", crf=20)
    return root


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", help="with train/ and val/; drawn where left out")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--decode", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.folder or write_folder(folder)
        main(root, arguments.epochs, decode=arguments.decode)
