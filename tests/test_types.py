"""What a type checker and an editor find before anything runs: names and values of options."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from gpuprefetch import DataPrefetcher
from gpuprefetch.images.decode import DECODERS
from gpuprefetch.images.options import DecoderName, Keywords

# Each line that is marked has one error, and no other line has any.
PROGRAM = """\
from typing import Any
from torch.utils.data import DataLoader
from gpuprefetch import BadImage, DataPrefetcher, accelerate

def note(bad: BadImage) -> None: ...

def build(loader: DataLoader[Any]) -> None:
    DataPrefetcher(loader, on_error="skip", decoder="cpu", cpu_share="auto", device="cuda:1")
    DataPrefetcher(loader, on_error=note, cpu_share=0.5, device=1, memory_budget="2GiB")
    accelerate(loader, on_error="replace", print_plan=False, max_bad=3, transforms=[print])
    DataPrefetcher(loader, devise="cuda")  # wrong
    DataPrefetcher(loader, on_error="skipp")  # wrong
    DataPrefetcher(loader, decoder="gpu")  # wrong
    DataPrefetcher(loader, cpu_share="all")  # wrong
    accelerate(loader, devise="cuda")  # wrong
    accelerate(loader, on_error="skipp")  # wrong
    accelerate(loader, seed="one")  # wrong
"""
# Only what has the signatures is read: all of it, with torch, would take minutes, and NumPy's stubs
# more than the rest. Other types are Any.
CONFIG = """\
[mypy]
follow_imports = skip
[mypy-gpuprefetch,gpuprefetch.prefetcher,gpuprefetch.migrate.accelerate]
follow_imports = silent
[mypy-gpuprefetch.images.options,gpuprefetch.images.bad,gpuprefetch.images.decode]
follow_imports = silent
[mypy-numpy.*]
follow_imports_for_stubs = True
"""


def test_a_type_checker_finds_wrong_names_and_values(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(CONFIG)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--no-incremental", "--config-file=mypy.ini"]
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [*command, "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(root), "MYPYPATH": str(root)},
    )
    found = [int(number) for number in re.findall(r"program.py:(\d+): error", done.stdout)]
    lines = enumerate(PROGRAM.splitlines(), start=1)
    assert found == [number for number, line in lines if line.endswith("# wrong")], done.stdout
    assert 'did you mean "device"?' in done.stdout


def test_the_keywords_are_the_arguments():
    signature = inspect.signature(DataPrefetcher)
    assert list(Keywords.__annotations__) == list(signature.parameters)[1:]
    assert set(get_args(DecoderName)) == {"auto", "cpu", *DECODERS}
