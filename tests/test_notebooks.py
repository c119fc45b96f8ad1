"""The notebooks under docs/ run: their code cells, in one namespace."""

import json
import tempfile
from pathlib import Path

import pytest

# A test machine may have fewer cores than the workers of the loaders.
pytestmark = pytest.mark.filterwarnings("ignore:.*worker processes:UserWarning")
NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.forks("its datasets are of a cell")
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where they draw their pictures
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    namespace = {"__name__": "__main__"}
    for cell in cells:
        assert cell["outputs"] == []  # of whichever machine it was saved on
        exec("".join(cell["source"]), namespace)
    assert isinstance(namespace["report"].as_dict(), dict)
