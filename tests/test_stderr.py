"""Workers decode down to the crop, and libjpeg's word on the rest of the file reaches nobody."""

import ctypes
import os
from contextlib import contextmanager

import numpy as np
import pictures
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchcodec.decoders import decode_jpeg

from gpuprefetch import DataPrefetcher, EncodedImage, RandomResizedCrop, _format, _host
from gpuprefetch._format import cuts_quietly, decode_cpu, read_header
from gpuprefetch._stderr import Hush

pytestmark = pytest.mark.skipif(
    "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", {}), reason="needs glibc"
)
TALL = pictures.encode_jpeg(pictures.draw(400, 64))


@pytest.fixture
def untried():
    for known in (_format._hush, cuts_quietly):
        known.cache_clear()
    yield
    for known in (_format._hush, cuts_quietly):
        known.cache_clear()


CUT = [{"subsampling": kind} for kind in ("4:4:4", "4:2:2", "4:2:0")]
WHOLE = [{"subsampling": kind} for kind in ("4:4:0", "4:1:1")]
WHOLE += [{"progressive": True}, {"restart_marker_rows": 1}]


@pytest.mark.parametrize("options", CUT + WHOLE)
def test_the_rows_that_are_decoded_are_the_same(options, capfd):
    rng = np.random.default_rng(0)
    fewer = 0
    for seed in range(8):
        picture = pictures.draw(*rng.integers(32, 500, 2), seed=seed)
        data = pictures.encode_jpeg(picture, **options)
        header, whole = read_header(data), decode_cpu(data)
        for bottom in rng.integers(1, header.height + 1, 8).tolist():
            part = decode_cpu(data, rows=header.rows_above(bottom))
            assert part.size(1) >= bottom
            assert torch.equal(part[:, :bottom], whole[:, :bottom])
            fewer += part.size(1) < header.height
    assert bool(fewer) == (options in CUT)
    assert capfd.readouterr().err == ""


def cut(data, rows):
    place = read_header(data).height_at
    return data[:place] + rows.to_bytes(2) + data[place + 2 :]


def test_it_is_heard_elsewhere(capfd):
    # guards the test above, and C's stderr is itself again
    assert decode_cpu(TALL, rows=128).size(1) == 128
    decode_jpeg(torch.frombuffer(bytearray(cut(TALL, 128)), dtype=torch.uint8))
    assert "extraneous bytes" in capfd.readouterr().err


def test_another_word_is_passed_on(capfd):
    libc = ctypes.CDLL(None)
    libc.fputs.argtypes = ctypes.c_char_p, ctypes.c_void_p
    stderr = ctypes.c_void_p.in_dll(libc, "stderr")
    line = b"Corrupt JPEG data: 12 extraneous bytes before marker 0xd9\n"
    hush = Hush()
    for words, rest in ((b"one" + line, "one"), (line, ""), (b"two\n", "two\n"), (b"", "")):
        with hush():
            libc.fputs(words, stderr.value)
            libc.fputs(line, stderr.value)
        assert capfd.readouterr().err == rest
    assert hush.heard == 6
    libc.fputs(line, stderr.value)
    assert capfd.readouterr().err == line.decode()


def test_stderr_is_itself_behind_an_error(monkeypatch, capfd):
    def refuse(*args):
        raise RuntimeError("no decoder")

    with monkeypatch.context() as patch:
        patch.setattr(_format, "_decode", refuse)
        with pytest.raises(ValueError, match="no decoder"):
            decode_cpu(TALL, rows=128)
    test_it_is_heard_elsewhere(capfd)


def test_one_thread_at_a_time(untried):
    hush = _format._hush()
    with hush() as first, hush() as second:
        assert (first, second) == (True, False)
        assert torch.equal(decode_cpu(TALL, rows=128), decode_cpu(TALL))
    with hush() as again:
        assert again


@contextmanager
def deaf(self):
    yield True


def without_glibc(name):
    raise ValueError("unrecognized configuration name")


@pytest.mark.parametrize("flaw", [None, "heard", "not glibc", "another picture"])
def test_it_is_tried_first(monkeypatch, untried, capfd, flaw):
    if flaw == "heard":
        monkeypatch.setattr(Hush, "__call__", deaf)
    elif flaw == "not glibc":
        monkeypatch.setattr(os, "confstr", without_glibc)
    elif flaw == "another picture":
        decode = _format._decode
        monkeypatch.setattr(_format, "_decode", lambda *args: decode(*args) ^ (args[2] == 128))
    assert cuts_quietly() is (flaw is None)
    assert capfd.readouterr().err.count("extraneous") == (flaw == "heard")
    if flaw == "not glibc":
        assert decode_cpu(TALL, rows=128).size(1) == 400


CROP = [RandomResizedCrop(32)]


class Files(Dataset):
    def __init__(self):
        kinds = ("4:4:4", "4:2:0", "4:2:2")
        self.files = [
            pictures.encode_jpeg(pictures.draw(300 + i, 90, seed=i), subsampling=kinds[i % 3])
            for i in range(24)
        ]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return EncodedImage(self.files[index], index), index


@pytest.mark.parametrize("apply_exif", [False, True])
def test_workers_decode_down_to_the_crop(monkeypatch, capfd, apply_exif):
    decoded, decode = torch.zeros(1, dtype=torch.int64).share_memory_(), _format._decode

    def watched(data, header, rows):
        decoded.add_(rows * (rows != 192 and header.height != 192))  # but for the trial's files
        return decode(data, header, rows)

    monkeypatch.setattr(_format, "_decode", watched)

    def epoch(workers):
        loader = DataLoader(Files(), batch_size=8, num_workers=workers)
        decoded.zero_()
        options = {"transforms": CROP, "seed": 5, "apply_exif": apply_exif}
        prefetcher = DataPrefetcher(loader, device="cpu", **options)
        return torch.cat([images for images, _ in prefetcher]), decoded.item()

    whole, rows = epoch(workers=0)
    assert rows == sum(300 + i for i in range(24))
    cut_down, fewer = epoch(workers=1)
    assert fewer < 0.95 * rows
    assert torch.equal(cut_down, whole)
    assert capfd.readouterr().err == ""


def test_workers_without_photos_try_nothing(monkeypatch):
    def tried():
        raise AssertionError("it takes a decoder, and time")

    monkeypatch.setattr(_host, "cuts_quietly", tried)
    loader = DataLoader(torch.arange(4.0), num_workers=1)
    assert torch.cat([*DataPrefetcher(loader, device="cpu")]).tolist() == [0, 1, 2, 3]
    with pytest.raises(AssertionError, match="it takes a decoder"):  # guards the test
        list(DataPrefetcher(DataLoader(Files(), num_workers=1), device="cpu", transforms=CROP))
