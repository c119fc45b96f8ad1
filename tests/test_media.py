"""The examples for sound and video: each file once, what is drawn is what comes, and they train."""

import os

import kornia.augmentation as K
import pytest
import torch
from fakes import example
from torchvision.transforms import v2

import gpuprefetch
from gpuprefetch import DataPrefetcher

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
        pytest.skip(
            f"TorchCodec finds no FFmpeg (apt-get install ffmpeg): {str(error).splitlines()[0]}"
        )


@pytest.fixture(scope="module")
def audio():
    return example("audio/train")


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


@pytest.mark.forks("its module has another name")
def test_it_trains_on_sounds_and_hears_each_once(audio, sounds, capsys):
    loader = audio.build(sounds / "train", batch_size=5, num_workers=2, shuffle=True)
    dataset = loader.dataset
    heard = [length for _, lengths, _ in loader for length in lengths.tolist()]
    assert sorted(heard) == sorted(len(wave) for wave, _ in dataset)
    assert 0 <= audio.main(sounds, epochs=1, batch_size=6, num_workers=0) <= 1
    assert "epoch 0: loss " in capsys.readouterr().out


@pytest.fixture(scope="module")
def video():
    return example("video/train")


@pytest.fixture(scope="module")
def clips(video, tmp_path_factory):
    return video.write_folder(tmp_path_factory.mktemp("clips"), 4, 2)


def test_a_clip_is_what_was_drawn(video, clips):
    generator = torch.Generator().manual_seed(0)
    drawn = [video.draw(motion, generator) for motion in video.MOTIONS for _ in range(4)]
    dataset = video.Clips(clips / "train")
    codecs = {video.opened(path, "cpu", 0).metadata.codec for path in dataset.paths}
    assert codecs == {"h264", "vp9"}
    for (clip, label), want, path in zip(dataset, drawn, dataset.paths, strict=True):
        assert dataset.classes[label] == path.parent.name
        assert clip.dtype == torch.uint8
        assert clip.shape == (3 * video.FRAMES, video.DECODED, video.DECODED)
        some = want[torch.linspace(0, len(want) - 1, video.FRAMES).long()]
        some = v2.functional.resize(some, [video.DECODED, video.DECODED]).flatten(0, 1)
        assert (clip.float() - some.float()).abs().mean() < 6


@pytest.mark.forks("its module has another name")
def test_it_trains_on_clips_and_sees_each_once(video, clips, capsys):
    loader = video.build(clips / "train", [video.as_clips], batch_size=5, shuffle=True)
    seen = [clip for batch, _ in loader for clip in batch]
    assert all(clip.shape == (video.FRAMES, 3, video.DECODED, video.DECODED) for clip in seen)
    assert sorted(clip.sum().item() for clip in seen) == sorted(
        clip.sum().item() for clip, _ in loader.dataset
    )
    assert 0 <= video.main(clips, epochs=1, batch_size=8, num_workers=0) <= 1
    assert "epoch 0: loss " in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["audio", "video"])
def test_other_folders_in_val_would_number_the_classes_otherwise(kind, tmp_path):
    for name in ("train/a/1.wav", "train/b/1.wav", "val/b/1.wav"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).with_suffix(".mp4" if kind == "video" else ".wav").touch()
    with pytest.raises(ValueError, match="train and val need the same folders"):
        example(f"{kind}/train").main(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"train has no files in CLASS/"):
        example(f"{kind}/train").main(tmp_path / "a")


def prepared(clips, transforms, device):
    """What a prefetcher makes of ``(N, T, 3, H, W)``."""
    options = {"device": device, "seed": 0}
    ((images,),) = DataPrefetcher([[clips.flatten(1, 2)]], transforms=transforms, **options)
    return images


def test_the_frames_of_a_clip_share_what_is_sampled(video, device):
    pictures = torch.randint(0, 256, (5, 1, 3, 72, 72), dtype=torch.uint8)
    still = pictures.repeat(1, video.FRAMES, 1, 1, 1)
    policy = [v2.TrivialAugmentWide(), v2.ToDtype(torch.float32, scale=True), v2.RandomErasing(1.0)]
    crop = gpuprefetch.RandomResizedCrop(video.SIZE)
    for transforms in (
        video.train_transforms(),
        [crop, video.PerClip(policy), video.as_clips],
        [crop, K.RandomAffine(10.0), video.as_clips],
    ):
        images = prepared(still, transforms, device)
        assert images.shape == (5, video.FRAMES, 3, video.SIZE, video.SIZE)
        assert torch.equal(images, images[:, :1].expand_as(images))
        assert len({image.sum().item() for image in images}) == 5
    # Not so where each frame is an image of its own.
    alone = prepared(still.flatten(0, 1)[:, None], video.train_transforms()[:2], device)
    assert not torch.equal(alone[0], alone[1])


def test_frames_become_what_images_become(video, device):
    clips = torch.randint(0, 256, (3, video.FRAMES, 3, 72, 72), dtype=torch.uint8)
    crop = gpuprefetch.CenterCrop(video.SIZE)
    normalize = K.Normalize(torch.tensor(video.MEAN), torch.tensor(video.STD))
    images = prepared(clips.flatten(0, 1)[:, None], [crop, normalize], device)
    want = images.view(3, video.FRAMES, 3, video.SIZE, video.SIZE)
    assert torch.equal(prepared(clips, video.val_transforms(), device), want)


@pytest.mark.gpu
def test_the_gpu_decodes_clips_in_the_main_process(video, clips):
    decoder = video.VideoDecoder(next((clips / "val").glob("*/*.mp4")), device="cuda")
    if decoder.cpu_fallback:
        pytest.skip(f"TorchCodec does not decode on this GPU: {decoder.cpu_fallback}")
    on_cpu, on_gpu = (
        video.build(clips / "val", [video.as_clips], batch_size=3, num_workers=0, decode=decode)
        for decode in ("cpu", "cuda")
    )
    for _ in range(2):  # the second time with decoders that were kept
        for (a, _), (b, _) in zip(on_cpu, on_gpu, strict=True):
            assert a.device == b.device
            assert (a.float() - b.float()).abs().mean() < 4
    assert 0 <= video.main(clips, epochs=1, batch_size=4, decode="cuda") <= 1
