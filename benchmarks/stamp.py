"""Which commit a checkout is at, and whether its code is that commit's.

    python benchmarks/stamp.py        # writes benchmarks/stamp.json, for a copy without git

A checkout with git needs no stamp. A copy without git takes the commit and the hashes of its files
from the stamp, and compares the files with them: an edited copy cannot pass for the commit.
"""

import hashlib
import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAMP = "benchmarks/stamp.json"
CODE = ("gpuprefetch", "benchmarks")
RESULTS = "benchmarks/results/"


@dataclass(frozen=True)
class Checkout:
    """Commit of a checkout, None where nothing tells, and the code files that differ from it."""

    commit: str | None
    changed: list[str]

    @property
    def dirty(self) -> bool:
        return bool(self.changed)

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "dirty": self.dirty}


def checkout(root: Path = ROOT) -> Checkout:
    """The commit and the changed files of the checkout at ``root``."""
    stamp = root / STAMP
    listed = [_of_git(root)]
    if stamp.exists():
        written = json.loads(stamp.read_text())
        listed.append((written["commit"], written["files"]))
    found = [Checkout(each[0], _changed(root, each[1])) for each in listed if each is not None]
    # A copy may come with the git of an earlier commit: files that are the stamp's tell.
    return min(found, key=lambda checkout: checkout.dirty, default=Checkout(None, []))


def write(root: Path = ROOT) -> None:
    """Write the stamp of a checkout with git."""
    listed = _of_git(root)
    if listed is None:
        raise SystemExit(f"{root} is no git checkout, so nothing tells its commit")
    commit, files = listed
    (root / STAMP).write_text(json.dumps({"commit": commit, "files": files}) + "\n")
    print(f"{STAMP}: {commit}, {len(files)} files")


def _of_git(root: Path) -> tuple[str, dict[str, str]] | None:
    """Commit, and hash of each code file in it."""
    if not (root / ".git").exists():  # a copy within another checkout is not that checkout
        return None
    commit = _git(root, "rev-parse", "--short=7", "HEAD")
    tree = _git(root, "ls-tree", "-r", "HEAD", "--", *CODE)
    if commit is None or tree is None:
        return None
    files = dict[str, str]()
    for line in tree.splitlines():
        kind, _, path = line.partition("\t")
        if not path.startswith(RESULTS):
            files[path] = kind.split()[2]
    return commit.strip(), files


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # no git here
        return None
    return done.stdout if done.returncode == 0 else None


def _changed(root: Path, files: dict[str, str]) -> list[str]:
    """Files that differ from their hashes or are missing, and Python files that are new."""
    there = {
        str(path.relative_to(root))
        for folder in CODE
        for path in (root / folder).rglob("*.py")
        if path.is_file()
    }
    new = {path for path in there - files.keys() if not path.startswith(RESULTS)}
    differing = {path for path, blob in files.items() if _blob(root / path) != blob}
    return sorted(new | differing)


def _blob(path: Path) -> str | None:
    """The hash that git gives to a file's content."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


if __name__ == "__main__":
    write()
