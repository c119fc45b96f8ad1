"""The examples for sound and video: each file once, what is drawn is what comes, and they train."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "examples"
pytestmark = [
    pytest.mark.usefixtures("ffmpeg", "one_thread"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


@pytest.fixture(scope="module")
def ffmpeg():
    encoders = pytest.importorskip("torchcodec.encoders")
    try:
        encoders.AudioEncoder(torch.zeros(1, 800), sample_rate=8000).to_tensor("flac")
    except RuntimeError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"TorchCodec finds no FFmpeg (apt-get install ffmpeg): {str(error)[:60]}")


def example(name):
    spec = importlib.util.spec_from_file_location(f"{name}_train", FOLDER / name / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def audio():
    return example("audio")


@pytest.fixture(scope="module")
def sounds(audio, tmp_path_factory):
    return audio.write_folder(tmp_path_factory.mktemp("sounds"), 6, 3)


def test_a_sound_is_what_was_drawn(audio, sounds):
    generator = torch.Generator().manual_seed(0)
    drawn = [audio.draw(keyword, generator) for keyword in audio.KEYWORDS for _ in range(6)]
    dataset = audio.Sounds(sounds / "train")
    kinds = {path.suffix for path in dataset.paths}
    assert kinds == {".wav", ".flac", ".ogg"}
    for (wave, label), want, path in zip(dataset, drawn, dataset.paths, strict=True):
        assert dataset.classes[label] == path.parent.name
        whole_blocks = path.suffix == ".ogg"  # it ends with a block of Vorbis
        assert 0 <= len(wave) - len(want) < (1024 if whole_blocks else 1)
        error = (wave[: len(want)] - want).square().mean() / want.square().mean()
        assert error < (0.02 if whole_blocks else 1e-6)


def test_a_padded_sound_has_the_spectrogram_that_it_has_alone(audio, sounds):
    dataset = audio.Sounds(sounds / "val")
    (spectrograms, lengths, target), *_ = audio.build(
        sounds / "val", batch_size=12, num_workers=0, shuffle=False
    )
    assert target.tolist() == [label for _, label in dataset]
    assert len(set(lengths.tolist())) > 6
    for spectrogram, length, (wave, _) in zip(spectrograms, lengths, dataset, strict=True):
        frames = 1 + length // audio.HOP
        alone = audio.MelSpectrogram()(wave[None, None, None])
        assert alone.shape == (1, 1, audio.MELS, frames)
        torch.testing.assert_close(spectrogram[..., :frames].cpu(), alone[0], atol=1e-3, rtol=1e-3)


def test_it_trains_on_sounds_and_hears_each_once(audio, sounds, capsys):
    loader = audio.build(sounds / "train", batch_size=5, num_workers=2, shuffle=True)
    dataset = loader.dataset
    heard = [length for _, lengths, _ in loader for length in lengths.tolist()]
    assert sorted(heard) == sorted(len(wave) for wave, _ in dataset)
    assert 0 <= audio.main(sounds, epochs=1, batch_size=6, num_workers=0) <= 1
    assert "epoch 0: loss " in capsys.readouterr().out
