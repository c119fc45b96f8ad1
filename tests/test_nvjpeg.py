import copy
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torchvision
from pictures import draw, encode, encode_jpeg
from torch.utils.data import DataLoader
from torchcodec.decoders import decode_jpeg

from gpuprefetch import (
    CenterCrop,
    DataPrefetcher,
    EncodedImage,
    EncodedImageFolder,
    RandomResizedCrop,
    explain,
)
from gpuprefetch.images import decode as _decode
from gpuprefetch.images import nvjpeg as _nvjpeg
from gpuprefetch.images.decode import NvjpegDecoder, TorchvisionDecoder
from gpuprefetch.images.header import decode_cpu
from gpuprefetch.images.prepared import Call
from gpuprefetch.transforms.launch import CANARY

CPU = torch.device("cpu")
SHAPES = [(24, 32), (17, 19), (40, 20), (33, 65)]


class WithoutEngines:
    """nvJPEG on a GPU that has no engines."""

    def __init__(self, library):
        self.library = library

    def __getattr__(self, name):
        return getattr(self.library, name)

    def nvjpegCreateEx(self, backend, *arguments):
        return 7 if backend == 3 else self.library.nvjpegCreateEx(backend, *arguments)


def encoded(shapes=SHAPES, channels=3, **options):
    files = [encode_jpeg(draw(*hw, channels, i), **options) for i, hw in enumerate(shapes)]
    return [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]


def call_of(data, shapes=SHAPES):
    """The files lie one after the other in their buffer, from byte 12 on."""
    lengths = np.array([len(file) for file in data])
    stops = 12 + np.cumsum(lengths)
    return Call(np.arange(len(data)), np.stack([stops - lengths, stops], axis=1), np.array(shapes))


def pixels(images):
    """All of them in one piece, each (H, W, 3)."""
    return torch.cat([image.permute(1, 2, 0).flatten() for image in images])


def flat(data):
    return torch.cat([torch.zeros(12, dtype=torch.uint8), *data])


def decoded(decoder, data, shapes=SHAPES, device=CPU):
    """A call's images in one piece, which begins after 9 bytes and leaves some."""
    call = call_of(data, shapes)
    out = torch.full((9 + call.size + 4,), 77, dtype=torch.uint8, device=device)
    decoder.decode(call, flat(data), out[9:-4])
    assert bool((out[:9] == 77).all())
    assert bool((out[-4:] == 77).all())
    return out[9:-4]


def test_the_files_of_a_call_go_to_one_place(library):
    decoder, data = NvjpegDecoder(CPU), encoded()
    assert torch.equal(decoded(decoder, data), pixels(map(decode_cpu, data)))
    assert torch.equal(decoded(decoder, data[1:2], SHAPES[1:2]), pixels([decode_cpu(data[1])]))
    assert library.log.count("nvjpegCreateEx") == 1


@pytest.mark.parametrize("refuses", ["nvjpegDecodeBatched", "nvjpegDecodeBatchedInitialize"])
def test_a_decoder_that_failed_is_not_used_again(library, refuses):
    decoder, data = NvjpegDecoder(CPU), encoded()
    library.status = {refuses: 3}
    with pytest.raises(RuntimeError, match=f"{refuses}: bad JPEG"):
        decoded(decoder, data)
    assert library.log[-3:] == ["synchronize", "nvjpegJpegStateDestroy", "nvjpegDestroy"]
    library.status = {}
    expected = pixels(map(decode_cpu, data))
    assert torch.equal(decoded(decoder, data), expected)
    assert library.log.count("nvjpegCreateEx") == 2


@pytest.mark.parametrize("where", ["nvjpegCreateEx", "nvjpegJpegStateCreate"])
def test_no_room_for_a_decoder(library, where):
    library.status = {where: 5}
    with pytest.raises(torch.OutOfMemoryError, match=f"out of memory. {where}: allocator failure"):
        NvjpegDecoder(CPU).canaries  # noqa: B018
    assert library.log.count("nvjpegDestroy") == (where == "nvjpegJpegStateCreate")
    library.status = {}
    assert NvjpegDecoder(CPU).canaries  # it is tried again


def test_without_engines_cuda_kernels_decode_on_several_streams(library, as_nvjpeg):
    library.engines = False
    decoder, data = NvjpegDecoder(CPU), encoded()
    assert torch.equal(decoded(decoder, data), pixels(map(decode_cpu, data)))
    assert "in CUDA kernels, as no JPEG engine can be used" in decoder.words
    assert (decoder.streams, decoder.canaries) == (3, False)
    assert library.log.count("nvjpegCreateEx") == 2
    library.engines = True
    as_nvjpeg(library)
    assert (decoder.streams, decoder.canaries) == (1, True)


@pytest.mark.parametrize(("engines", "count"), [(False, 51), (True, 4)])
def test_a_small_call_is_filled_up_for_cuda_kernels(library, engines, count):
    """Fewer files would be decoded by a core, to other pixels."""
    library.engines = engines
    data = encoded()
    assert torch.equal(decoded(NvjpegDecoder(CPU), data), pixels(map(decode_cpu, data)))
    assert library.asked == count
    many = encoded(15 * SHAPES)
    assert torch.equal(
        decoded(NvjpegDecoder(CPU), many, 15 * SHAPES), pixels(map(decode_cpu, many))
    )
    assert library.asked == 60


def test_torchcodec_is_another_name_of_nvjpeg():
    with pytest.warns(FutureWarning, match='Write decoder="nvjpeg", or leave it out'):
        with pytest.raises(ValueError, match="decoder='nvjpeg' needs a CUDA device"):
            DataPrefetcher([], device="cpu", decoder="torchcodec")


def test_a_gpu_that_nvjpeg_does_not_know(library):
    library.status = {"nvjpegCreateEx": 7}
    with pytest.raises(RuntimeError, match=r'CreateEx: no JPEG engines .*"cpu" the workers'):
        decoded(NvjpegDecoder(CPU), encoded())


def test_a_decoder_stays_on_its_stream(library):
    # Two decoders that changed streams came to a call that never returned.
    with _nvjpeg.lease(CPU) as one, _nvjpeg.lease(CPU) as other:
        one.stream, other.stream = 7, 8
    for stream, expected in [(8, other), (7, one), (7, one), (8, other)]:
        library.current.cuda_stream = stream
        with _nvjpeg.lease(CPU) as decoder:
            assert decoder is expected
    assert library.log.count("nvjpegCreateEx") == 2
    library.current.cuda_stream = 9
    decoded(NvjpegDecoder(CPU), encoded())
    assert library.log.count("nvjpegCreateEx") == 3


class Skipping(NvjpegDecoder):
    """nvJPEG as seen on RTX 50xx: leaves a picture of each call out, and reports success."""

    always = False  # also in calls of one file

    def decode(self, call, buffer, out):
        count = len(call.positions)
        skipped = call.positions == 1 if count > 1 or self.always else np.zeros(count, bool)
        if skipped.all():
            return
        files, pictures = call.order[: 2 * count].reshape(2, count), call.order[2 * count :]
        given = copy.copy(call)
        pictures = pictures.reshape(count, -1)[~skipped].reshape(-1)
        given.order = np.concatenate([files[:, ~skipped].reshape(-1), pictures])
        super().decode(given, buffer, out)


class Unguarded(Skipping):
    canaries = False


class SkippingAgain(Skipping):
    always = True


def batches_of(decoder, device):
    """Two batches of two photos, of the same shapes, decoded into the same memory.

    By the workers where ``decoder`` is None.
    """
    shapes = [(16, 18), (17, 16)]
    batches = [
        [EncodedImage(encode_jpeg(draw(*hw, seed=seed + hw[0]))) for hw in shapes]
        for seed in (0, 50)
    ]
    options = {"device": device, "transforms": [CenterCrop((6, 5))], "cpu_share": 0.0}
    decoder = "cpu" if decoder is None else decoder(device)
    prefetcher = DataPrefetcher(batches, decoder=decoder, **options)
    return torch.stack([images.cpu() for images in prefetcher]), prefetcher.stats


def a_gpu_with_engines():
    device = torch.device("cuda", 0)
    if not _nvjpeg.has_engines(device):
        pytest.skip("no JPEG engines")
    return device


@pytest.fixture
def engines(device, request):
    """A device with JPEG engines, or the CPU taken for one."""
    if device.type == "cpu":
        if torch.cuda.is_available():
            pytest.skip("Triton compiles: the GPU's test does it")
        request.getfixturevalue("library")
        return device
    return a_gpu_with_engines()


@pytest.mark.filterwarnings("ignore:.*does not pin its memory")
@pytest.mark.usefixtures("large_tiles", "threaded")
def test_a_skipped_picture_is_decoded_again(engines):
    # The CPU's way rounds to whole levels.
    expected, _ = batches_of(None if engines.type == "cpu" else NvjpegDecoder, engines)
    got, stats = batches_of(Skipping, engines)
    assert (got - expected).abs().max() * 255 < 1
    assert (stats.missed_images, stats.fallback_images) == (2, 0)
    # Without canaries two photos are what lay there before, in silence.
    got, stats = batches_of(Unguarded, engines)
    assert torch.equal(got[1, 1], got[0, 1])
    assert (expected[1, 1] - expected[0, 1]).abs().max() * 255 > 10
    assert (got - expected)[:, 0].abs().max() * 255 < 1
    assert stats.missed_images == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles: it is for a GPU's memory")
@pytest.mark.usefixtures("large_tiles", "library")
def test_a_picture_that_is_skipped_again_is_decoded_on_the_cpu():
    got, stats = batches_of(SkippingAgain, CPU)
    assert (got - batches_of(None, CPU)[0]).abs().max() * 255 < 1
    assert (stats.missed_images, stats.fallback_images) == (2, 2)


@pytest.mark.filterwarnings("ignore:.*does not pin its memory")
@pytest.mark.usefixtures("large_tiles")
def test_a_worker_decoded_a_picture_of_the_canaries_color(engines):
    green = np.full((17, 16, 3), [*CANARY.to_bytes(3, "little")], np.uint8)
    photo = encode_jpeg(draw(16, 18, seed=1))
    batch = [EncodedImage(photo), EncodedImage(encode(green, "PNG"))]
    options = {"device": engines, "transforms": [CenterCrop((6, 5))], "cpu_share": 0.0}
    prefetcher = DataPrefetcher([batch], decoder=NvjpegDecoder(engines), **options)
    ((_, got),) = prefetcher
    expected = torch.from_numpy(green[:6, :5] / 255).permute(2, 0, 1).to(got)
    torch.testing.assert_close(got, expected)
    assert prefetcher.stats.missed_images == 0


def test_a_picture_of_its_own_memory_that_is_skipped(library):
    library.skips = True
    data = encoded()
    options = {"device": "cpu", "cpu_share": 0.0, "decoder": NvjpegDecoder(CPU)}
    prefetcher = DataPrefetcher([[EncodedImage(data[0])]], **options)
    ((image,),) = prefetcher
    assert torch.equal(image, decode_cpu(data[0]))
    assert (prefetcher.stats.missed_images, prefetcher.stats.fallback_images) == (1, 1)


@pytest.fixture
def gpu_without_nvjpeg(monkeypatch, as_nvjpeg):
    """A machine with a CUDA device, and a TorchCodec that was built for the CPU."""
    as_nvjpeg(None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    error = RuntimeError("no CUDA in this build\nException raised from ...")
    monkeypatch.setattr("torchvision.io.decode_jpeg", Mock(side_effect=error))


@pytest.mark.usefixtures("gpu_without_nvjpeg")
@pytest.mark.parametrize("rocm", [False, True])
def test_without_nvjpeg_the_workers_decode(monkeypatch, rocm):
    reason = "the installed TorchCodec brings no nvJPEG, as a build for the CPU"
    if rocm:
        monkeypatch.setattr(torch.version, "hip", "7.0")
        reason = "torch is built for ROCm"
    prefetcher = DataPrefetcher([], device="cuda:0")
    assert f"by the CPU, in the workers: {reason}" in explain(prefetcher)
    for name in ("nvjpeg", "torchvision"):
        with pytest.raises(ValueError, match=f'\'{name}\' can decode nothing .* "auto" or "cpu"'):
            DataPrefetcher([], device="cuda:0", decoder=name)
    assert 'workers: decoder="cpu"' not in explain(prefetcher)


def test_what_decodes_in_words(library):
    cuda = torch.device("cuda", 0)
    assert _decode.decoded_by(NvjpegDecoder(CPU), cuda) == "nvJPEG's 7 JPEG engines"
    assert _decode.decoded_by(None, cuda) == 'the CPU, in the workers: decoder="cpu"'
    assert "in the workers: no CUDA device" in explain(DataPrefetcher([], device="cpu"))
    library.status = {"nvjpegGetHardwareDecoderInfo": 9}
    assert NvjpegDecoder(CPU).words == "nvJPEG's JPEG engines"
    # No trial, and no memory of the GPU, where the library is there.
    library.log.clear()
    assert NvjpegDecoder(CPU).missing() == ""
    assert library.log == []


def test_a_decoder_short_of_memory_is_not_missing(monkeypatch):
    decode = Mock(side_effect=torch.OutOfMemoryError("no room"))
    monkeypatch.setattr("torchvision.io.decode_jpeg", decode)
    assert TorchvisionDecoder(CPU).missing() == ""


@pytest.mark.gpu
def test_what_decodes_on_this_gpu():
    device = torch.device("cuda", 0)
    assert NvjpegDecoder(device).missing() == TorchvisionDecoder(device).missing() == ""
    text = explain(DataPrefetcher([], device=device))
    assert f"by {NvjpegDecoder(device).words}" in text
    assert ("nvJPEG in CUDA kernels" in text) != _nvjpeg.has_engines(device)


@pytest.mark.parametrize("maps", [FileNotFoundError(), "7f00-7f01 r--p 0 0:0 0 /lib/libc.so.6\n"])
def test_no_library(monkeypatch, maps):
    # As on another platform, or with a TorchCodec that was built for the CPU.
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=[maps]))
    assert _nvjpeg.library.__wrapped__() is None


@pytest.mark.gpu
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0", "gray"])
def test_pixels_are_torchcodecs(subsampling):
    device = a_gpu_with_engines()
    shapes = [(64 + 7 * i, 300 - 11 * i) for i in range(20)]
    gray = {"channels": 1, "subsampling": "4:4:4"}
    files = encoded(shapes, **(gray if subsampling == "gray" else {"subsampling": subsampling}))
    expected = decode_jpeg(files, mode="RGB", device=device)
    got = decoded(NvjpegDecoder(device), files, shapes, device)
    torch.cuda.synchronize()
    assert torch.equal(got, pixels(expected))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*deprecated")  # torchvision's decoder, from 0.29 on
def test_torchvisions_pictures_go_to_one_place():
    device = torch.device("cuda", 0)
    shapes = [(64 + 7 * i, 300 - 11 * i) for i in range(20)]
    files = encoded(shapes)
    want = pixels(torchvision.io.decode_jpeg(files, device=device))
    assert torch.equal(decoded(TorchvisionDecoder(device), files, shapes, device), want)


@pytest.mark.gpu
def test_what_the_engines_refuse_leaves_the_next_call_alone():
    device = a_gpu_with_engines()
    decoder, data = NvjpegDecoder(device), encoded()
    broken = [*data[:2], torch.zeros(len(data[2]), dtype=torch.uint8), data[3]]
    expected = decoded(decoder, data, device=device)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="nvjpeg"):
            decoded(decoder, broken, device=device)
        assert torch.equal(decoded(decoder, data, device=device), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [64, 16])
def test_batches_side_by_side_without_engines(as_nvjpeg, tmp_path, batch):
    """CUDA kernels decode three calls at once, of a batch or of several, in a busy loop."""
    (tmp_path / "a").mkdir()
    for i in range(640):
        picture = draw(200 + 7 * (i % 9), 300 - 5 * (i % 7), seed=i % 32)
        (tmp_path / "a" / f"{i:03d}.jpg").write_bytes(encode_jpeg(picture))
    loader = DataLoader(EncodedImageFolder(tmp_path), batch, num_workers=2, pin_memory=True)

    def run(**options):
        busy, got = torch.rand(4096, 4096, device="cuda"), []
        options = {"transforms": [RandomResizedCrop(64)], "seed": 3, "cpu_share": 0.0} | options
        for images, _ in DataPrefetcher(loader, **options):
            for _ in range(5 * batch // 64 + 1):
                busy @ busy  # reads of this batch wait for it
            got.append(images + 0)
        return torch.cat(got)

    want = run()
    as_nvjpeg(WithoutEngines(_nvjpeg.library()))
    got = run()
    # Another inverse DCT: levels differ by a few.
    assert ((got - want).abs() * 255 < 3).float().mean() > 0.99
    assert torch.equal(got, run())
    assert torch.equal(got, run(memory_budget="1GiB"))  # one call for each batch, one at a time
