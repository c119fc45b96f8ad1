"""Train a keyword classifier on sound files that the workers decode, padded, on the device ahead.

    python train.py              # on sounds that it draws itself
    python train.py FOLDER       # train/CLASS/* and val/CLASS/*: WAV, FLAC, OGG, MP3, ...

TorchCodec decodes by way of FFmpeg: ``apt-get install ffmpeg``. A batch is waves, padded to the
longest, and their lengths. The mel spectrogram is one of the prefetcher's transforms, so that it is
computed on the device and before the loop asks for it. Transforms take ``(N, C, H, W)``: a wave is
an image of one row.
"""

import argparse
import math
import tempfile
import wave
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from torchcodec.decoders import AudioDecoder
from torchcodec.encoders import AudioEncoder

from gpuprefetch import DataPrefetcher

RATE = 16_000  # samples a second, whatever a file has
WINDOW = 400
HOP = 160
MELS = 40
KINDS = ("wav", "flac", "ogg")
KEYWORDS = ("falling", "rising", "steady", "twice")


class Sounds(Dataset):
    """``(wave (T,), class)``; the files of a folder for each class."""

    def __init__(self, folder):
        self.paths = sorted(path for path in Path(folder).glob("*/*") if path.is_file())
        if not self.paths:
            raise FileNotFoundError(f"{folder} has no files in CLASS/*")
        self.classes = sorted({path.parent.name for path in self.paths})

    def __getitem__(self, index):
        path = self.paths[index]
        # One channel, resampled: what the files have may differ.
        decoder = AudioDecoder(path, sample_rate=RATE, num_channels=1)
        return decoder.get_all_samples().data[0], self.classes.index(path.parent.name)

    def __len__(self):
        return len(self.paths)


def collate(samples):
    """``(waves (N, 1, 1, T) float32 padded by zeros, lengths (N,), classes (N,))``."""
    waves, classes = zip(*samples, strict=True)
    lengths = torch.tensor([*map(len, waves)])
    return pad_sequence(waves, batch_first=True)[:, None, None], lengths, torch.tensor(classes)


def mel_matrix(rate=RATE, window=WINDOW, mels=MELS):
    """``(mels, window // 2 + 1)``: triangles that overlap by half, at equal steps of the scale."""
    top = 2595 * math.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, mels + 2) / 2595) - 1)
    left, center, right = (edges[i : i + mels, None] for i in range(3))
    hertz = torch.linspace(0, rate / 2, window // 2 + 1)
    rises = (hertz - left) / (center - left)
    falls = (right - hertz) / (right - center)
    return torch.minimum(rises, falls).clamp(min=0)


class MelSpectrogram(nn.Module):
    """``(N, 1, 1, T)`` waves to ``(N, 1, MELS, 1 + T // HOP)``, the logarithm of the power."""

    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(WINDOW))
        self.register_buffer("mels", mel_matrix())

    def forward(self, waves):
        self.to(waves.device)
        power = (
            torch.stft(
                waves.flatten(1),
                WINDOW,
                HOP,
                window=self.window,
                pad_mode="constant",
                return_complex=True,
            )
            .abs()
            .square()
        )
        return (self.mels @ power + 1e-6).log()[:, None]


class Keywords(nn.Module):
    """Convolutions over time, and the mean over the frames that are no padding."""

    def __init__(self, classes, width=64):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(MELS, width, 5, padding=2),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Conv1d(width, width, 5, padding=2),
            nn.ReLU(),
        )
        self.last = nn.Linear(width, classes)

    def forward(self, spectrograms, lengths):
        features = self.layers(spectrograms.squeeze(1))
        frames = 1 + lengths // HOP
        used = torch.arange(features.shape[-1], device=features.device) < frames[:, None]
        mean = (features * used[:, None]).sum(-1) / frames[:, None]
        return self.last(mean)


def build(folder, *, batch_size, num_workers, shuffle):
    loader = DataLoader(
        Sounds(folder),
        batch_size,
        shuffle=shuffle,
        num_workers=num_workers,
        collate_fn=collate,
        pin_memory=True,
    )
    return DataPrefetcher(loader, transforms=[MelSpectrogram()])


def main(root, epochs=6, batch_size=16, num_workers=2):
    """Train; returns the share of validation sounds that are told right."""
    torch.manual_seed(0)
    options = {"batch_size": batch_size, "num_workers": num_workers}
    train = build(f"{root}/train", shuffle=True, **options)
    val = build(f"{root}/val", shuffle=False, **options)
    classes = train.dataset.classes
    if val.dataset.classes != classes:
        raise ValueError(f"train and val need the same folders, which number the classes: {root}")
    model = Keywords(len(classes)).to(train.device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for epoch in range(epochs):
        model.train()
        for spectrograms, lengths, target in train:
            loss = nn.functional.cross_entropy(model(spectrograms, lengths), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            hits = [model(s, lengths).argmax(1) == target for s, lengths, target in val]
        accuracy = torch.cat(hits).float().mean().item()
        print(f"epoch {epoch}: loss {loss:.3f}, top-1 {accuracy:.1%}")
    return accuracy


def draw(keyword, generator):
    """A wave ``(T,)`` of 0.3 to 0.6 s: a tone that falls, rises, stays, or comes twice; noise."""
    first, second, seconds, volume = torch.rand(4, generator=generator).tolist()
    count = round(RATE * (0.3 + 0.3 * seconds))
    low = 300 + 300 * first
    high = 1500 + 1500 * second
    ends = {"rising": (low, high), "falling": (high, low)}.get(keyword, (low, low))
    phase = torch.linspace(*ends, count).cumsum(0) * (2 * math.pi / RATE)
    tone = phase.sin() * (0.2 + 0.6 * volume)
    if keyword == "twice":
        tone[count // 3 : count * 2 // 3] = 0
    return (tone + 0.02 * torch.randn(count, generator=generator)).clamp(-1, 1)


def save(samples, path):
    if path.suffix != ".wav":
        AudioEncoder(samples[None], sample_rate=RATE).to_file(path)
        return
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).to(torch.int16).numpy().tobytes())


def write_folder(root, train_per_class=48, val_per_class=12):
    """Draw sounds, as many files of each kind; the same numbers always give the same sounds."""
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", train_per_class), ("val", val_per_class)):
        for keyword in KEYWORDS:
            folder = Path(root, split, keyword)
            folder.mkdir(parents=True)
            for i in range(count):
                save(draw(keyword, generator), folder / f"{i:03d}.{KINDS[i % len(KINDS)]}")
    return root


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", help="with train/ and val/; drawn where left out")
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        main(arguments.folder or write_folder(folder), arguments.epochs)
