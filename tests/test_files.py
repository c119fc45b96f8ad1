"""check names every file that no loader could decode, and no other one."""

import io
import json
import os
import subprocess
import sys

import pytest
from pictures import draw, write_folder

from gpuprefetch.__main__ import main

COUNT = 6


@pytest.fixture
def folder(tmp_path):
    """Two classes of good JPEGs, and files that are no pictures by their endings."""
    pictures = [draw(48, 64, seed=i) for i in range(COUNT)]
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "LICENSE").write_text("license")
    return write_folder(tmp_path, pictures, "jpg", quality=90)


@pytest.fixture
def check(capsys, device):
    """The exit code of the command, and its report."""

    def run(folder, *words):
        code = main(["check", str(folder), "--workers", "0", "--device", str(device), *words])
        return code, capsys.readouterr().out

    return run


def damage(folder):
    """Files that cannot be decoded, and a part of the reason that each must get."""
    whole = (folder / "a" / "0.jpg").read_bytes()
    deep = folder / "a" / "deep"
    deep.mkdir()
    (deep / "cut.jpeg").write_bytes(whole[: len(whole) // 2])
    (deep / "empty.png").write_bytes(b"")
    (folder / "text.jpg").write_text("no picture")
    (folder / "gone.jpg").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe.jpg")
    return {
        "a/deep/cut.jpeg": "truncated",
        "a/deep/empty.png": "it is empty",
        "gone.jpg": "cannot be opened: No such file",
        "pipe.jpg": "a FIFO",
        "text.jpg": "neither a JPEG nor another image",
    }


def test_all_pictures_are_good(folder, check):
    code, text = check(folder)
    assert code == 0
    assert f"{folder}: all of {COUNT} pictures can be decoded" in text
    assert "Not read, by their endings: 1 without one, 1 .txt" in text


@pytest.mark.parametrize("workers", ["0", "2"])
def test_every_bad_file_is_named(folder, check, workers):
    expected = damage(folder)
    code, text = check(folder, "--json", "--workers", workers)
    report = json.loads(text)
    assert code == 1 and not report["ok"]
    assert report["pictures"] == COUNT + len(expected)
    found = {os.path.relpath(bad["path"], folder): bad["reason"] for bad in report["bad"]}
    assert list(found) == sorted(expected)
    for name, words in expected.items():
        assert words in found[name], name


def test_linked_folders_are_read_once(folder, check, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write_folder(elsewhere, [draw(48, 64, seed=9)], "jpg")
    (folder / "link").symlink_to(elsewhere)
    (folder / "again").symlink_to(elsewhere)
    (elsewhere / "up").symlink_to(folder)
    code, text = check(folder)
    assert code == 0
    assert f"all of {COUNT + 1} pictures" in text


def test_the_report_lists_them(folder, check):
    expected = damage(folder)
    code, text = check(folder)
    assert code == 1
    assert f"{len(expected)} of {COUNT + len(expected)} pictures are bad" in text
    for name, words in expected.items():
        (line,) = [line for line in text.splitlines() if line.startswith(str(folder / name))]
        assert words in line
    assert 'accelerate(loader, on_error="skip")' in text


def test_more_bad_files_than_a_batch_has(tmp_path, check):
    """Batches without one good picture do not end the check, nor hide what follows."""
    for i in range(150):
        (tmp_path / f"{i:03}.jpg").write_bytes(b"bad")
    code, text = check(tmp_path, "--json")
    assert code == 1 and len(json.loads(text)["bad"]) == 150
    write_folder(tmp_path, [draw(48, 64, seed=0)], "jpg")
    code, text = check(tmp_path, "--json")
    assert (len(json.loads(text)["bad"]), json.loads(text)["pictures"]) == (150, 151)


def test_a_folder_without_pictures_is_an_error(tmp_path, capsys):
    for folder, words in ((tmp_path, "no pictures in"), (tmp_path / "gone", "there is no folder")):
        assert main(["check", str(folder), "--device", "cpu"]) == 2
        assert words in capsys.readouterr().err
    (tmp_path / "file.jpg").write_bytes(b"")
    assert main(["check", str(tmp_path / "file.jpg"), "--device", "cpu"]) == 2
    assert "file.jpg: it is a file." in capsys.readouterr().err


@pytest.fixture
def closed(monkeypatch):
    """Folders of this name cannot be listed, not even by root."""
    scandir = os.scandir

    def scan(folder="."):
        if os.fspath(folder).endswith("closed"):
            raise PermissionError(13, "Permission denied", os.fspath(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", scan)
    return "closed"


def test_a_folder_that_cannot_be_listed_is_no_good_one(folder, check, capsys, closed):
    (folder / "a" / closed).mkdir()
    (folder / "a" / closed / "bad.jpg").write_bytes(b"bad")
    code, text = check(folder)
    assert code == 1
    assert "cannot be listed" in text
    assert f"{folder / 'a' / closed}  Permission denied" in text.splitlines()
    code, text = check(folder, "--json")
    report = json.loads(text)
    assert code == 1 and not report["ok"] and not report["bad"]
    assert report["unlisted"] == {str(folder / "a" / closed): "Permission denied"}
    assert main(["check", str(folder / "a" / closed), "--device", "cpu"]) == 2
    assert "Permission denied" in capsys.readouterr().err


def test_a_folder_of_nothing_that_can_be_listed(tmp_path, capsys, closed):
    (tmp_path / closed).mkdir()
    assert main(["check", str(tmp_path), "--device", "cpu"]) == 2
    assert "1 of these cannot be listed" in capsys.readouterr().err


ODD = [b"two\nlines.jpg", b"red\x1b[31m.jpg", b"no text \xff.jpg", "\u00fc.jpg".encode(), b".jpg"]


def test_an_odd_name_is_told_on_a_line_of_its_own(folder, check):
    paths = [os.fsencode(folder / "a") + b"/" + name for name in ODD]
    for path in paths:
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(b"bad")
    code, text = check(folder)
    lines = text.splitlines()
    assert code == 1 and len(lines) == 1 + len(ODD) + 2
    assert all("neither a JPEG nor" in line for line in lines[1:-2])
    assert text.replace("\n", "").isprintable()
    code, text = check(folder, "--json")
    assert code == 1
    found = [os.fsencode(bad["path"]) for bad in json.loads(text)["bad"]]
    assert sorted(found) == sorted(paths)


def test_an_output_that_cannot_show_a_name(folder, check, monkeypatch):
    (folder / "\u00fc.jpg").write_bytes(b"bad")
    output = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", output)
    assert main(["check", str(folder), "--workers", "0", "--device", "cpu"]) == 1
    assert rb"\xfc.jpg" in output.buffer.getvalue()
    monkeypatch.setattr(sys, "stdout", None)  # as where it is closed
    assert main(["check", str(folder), "--workers", "0", "--device", "cpu"]) == 1


def test_nothing_is_said_of_a_loader_that_is_not_the_users(folder):
    words = ["check", str(folder), "--workers", "0", "--device", "cpu"]
    command = [sys.executable, "-m", "gpuprefetch", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "can be decoded" in done.stdout
    assert not done.stderr
