"""The public names, what importing costs, and what the repository may hold."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import gpuprefetch
from gpuprefetch import DataPrefetcher
from gpuprefetch.installed import tell_of_a_stranger

ROOT = Path(__file__).parents[1]

# Where somebody's own machine keeps things; the lookbehind lets relative paths and URLs pass.
MACHINE_PATH = re.compile(r"(?<![\w.}])/(?:home|Users|root|work|mnt|tmp)/\w+")


def tracked_files():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).exists()]


def test_public_names_are_one_sorted_list():
    names = {name for name in vars(gpuprefetch) if not name.startswith("_")}
    public = {name for name in names if not isinstance(getattr(gpuprefetch, name), ModuleType)}
    assert public == set(gpuprefetch.__all__)
    assert gpuprefetch.__all__ == sorted(gpuprefetch.__all__)


def test_changelog_describes_this_version():
    versions = re.findall(
        r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE
    )
    assert versions[0] == gpuprefetch.__version__


def test_released_versions_are_dated_and_begin_with_highlights():
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (?!\[Unreleased\])(.*)", text, flags=re.MULTILINE)
    assert headings
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", each) for each in headings)
    latest = text.partition(f"## {headings[0]}\n\n### Highlights\n\n")[2].partition("\n\n")[0]
    assert 1 <= len(latest.splitlines()) <= 10


def test_citation_is_of_this_version():
    assert f"\nversion: {gpuprefetch.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_actions_are_pinned_by_hash():
    """A tag can be moved to other code."""
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        used = re.findall(r"uses: (.*)", workflow.read_text())
        assert used
        assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", each) for each in used), used


def test_no_path_of_a_machine_is_tracked():
    found = {}
    for path in tracked_files():
        matches = MACHINE_PATH.findall(path.read_text(errors="ignore"))
        if matches:
            found[str(path.relative_to(ROOT))] = matches
    assert not found


def test_machine_paths_are_found():
    # Guards the test above: put together here so that this file holds none.
    assert MACHINE_PATH.search("open('/" + "home/me/data')")
    assert not MACHINE_PATH.search("#!/usr/bin/env bash, ../work/x, https://example.org/home/x")


def test_no_photo_is_tracked():
    photos = {".jpg", ".jpeg", ".webp", ".heic", ".tif", ".tiff"}
    found = [path for path in tracked_files() if path.suffix.lower() in photos]
    # All are of a CC0 photo: see the scripts of these names in docs/.
    names = ["boxes.jpg", "forms.jpg", "policies.jpg", "strip.jpg"]
    assert sorted(path.name for path in found) == names


class Loaded(Dataset):
    """Whether a process that has imported gpuprefetch for it has imported more."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        found = {"kornia", "torchvision", "torchcodec", "torch._dynamo"} & {*sys.modules}
        return [*sorted(found), torch.cuda.is_initialized()]


def test_a_spawned_worker_imports_little_and_says_where_a_stranger_has_the_name(
    tmp_path, monkeypatch, capfd
):
    info = tmp_path / "gpuprefetch-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gpuprefetch\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    options = {"num_workers": 1, "multiprocessing_context": "spawn", "collate_fn": list}
    loader = DataLoader(Loaded(), batch_size=2, **options)
    assert list(DataPrefetcher(loader, device="cpu")) == [[[False]] * 2]
    assert "pip uninstall -y gpuprefetch" in capfd.readouterr().err


def test_without_a_stranger_importing_says_nothing(recwarn):
    tell_of_a_stranger()
    assert not recwarn
