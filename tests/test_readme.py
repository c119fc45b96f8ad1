"""What README and CONTRIBUTING print is what runs, here and in CI."""

import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset

import gpuprefetch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CI_RUN = (ROOT / ".ci" / "run").read_text().replace('"$venv"', ".venv")
CI_STEPS = re.sub(r'"\$venv(/.*?)"', r".venv\1", CI_RUN).splitlines()
WORKFLOW_STEPS = re.findall(r"- run: (.*)", (ROOT / ".github/workflows/ci.yml").read_text())

# The loaders below have pin_memory=True, as a reader's with a GPU should.
pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


def blocks(language, text=README):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def side_of_diff(diff, sign):
    """One side of a diff: the lines without a sign and those with ``sign``."""
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] in ("", " ", sign))


def run(source, namespace):
    # A test machine may have fewer cores than workers; DataLoader would warn.
    exec(source.replace("num_workers=8", "num_workers=0"), namespace)


@pytest.fixture
def namespace(tmp_path, monkeypatch):
    """What the README takes as given; the folders "train" and "val" hold 3 photos each."""
    for split in ("train", "val"):
        for index in range(3):
            folder = tmp_path / split / "abc"[index]
            folder.mkdir(parents=True)
            pixels = np.full((40 + 7 * index, 61 - 5 * index, 3), 60 * index, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{index}.jpg")
    monkeypatch.chdir(tmp_path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pool, linear = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Linear(3, 3)
    tensors = TensorDataset(torch.rand(5, 3, 8, 8), torch.arange(5) % 3)
    return {
        "torch": torch,
        "Dataset": Dataset,
        "device": device,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "model": torch.nn.Sequential(pool, torch.nn.Flatten(), linear).to(device),
        "loss_fn": torch.nn.functional.cross_entropy,
        "tensor_loader": DataLoader(tensors, batch_size=2, pin_memory=True),
    }


@pytest.mark.parametrize("sign", ["-", "+"])
def test_both_sides_of_the_diff_train(namespace, sign):
    (diff,) = blocks("diff")
    run(side_of_diff(diff, sign), namespace)
    assert namespace["images"].shape == (3, 3, 224, 224)
    assert namespace["images"].dtype == torch.float32
    assert namespace["target"].sort().values.tolist() == [0, 1, 2]
    assert namespace["loss"].isfinite()


def test_python_blocks_run(namespace):
    (diff,) = blocks("diff")
    run(side_of_diff(diff, "+"), namespace)
    for block in blocks("python"):
        run(block, namespace)

    assert namespace["images"] is namespace["target"] is None  # the manual form has come to its end

    images, _ = next(iter(namespace["val_loader"]))
    assert images.shape == (3, 3, 224, 224)
    assert images.dtype == torch.bfloat16
    assert images.is_contiguous(memory_format=torch.channels_last)

    views, _ = next(iter(namespace["loader"]))
    assert [view.shape for view in views] == [(3, 3, 224, 224)] * 2
    assert torch.equal(views[0], views[1].flip(-1))

    files = [(path, path.stem) for path in sorted(Path("val").rglob("*.jpg"))]
    captions = DataLoader(namespace["Captions"](files), batch_size=3, pin_memory=True)
    batch = next(
        iter(gpuprefetch.DataPrefetcher(captions, transforms=[gpuprefetch.Resize((8, 9))]))
    )
    assert batch["image"].shape == (3, 3, 8, 9)
    assert batch["caption"] == ["0", "1", "2"]


def test_settings_table_is_the_signature():
    (table,) = re.findall(r"\| `DataPrefetcher\(.*?\n\n", README, flags=re.DOTALL)
    names = re.findall(
        r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?`) \|", table, flags=re.MULTILINE))
    )
    parameters = inspect.signature(gpuprefetch.DataPrefetcher).parameters
    assert sorted(names) == sorted(set(parameters) - {"loader"})


def test_shell_commands_are_what_ci_runs():
    (commands,) = blocks("bash")
    for command in commands.splitlines():
        assert set(command.split(" && ")) <= set(CI_STEPS)


def test_contributing_commands_are_the_workflows():
    _, commands = blocks("bash", (ROOT / "CONTRIBUTING.md").read_text())
    commands = {line for line in commands.splitlines() if not line.startswith("#")}
    assert commands <= set(WORKFLOW_STEPS)


@pytest.mark.parametrize("link", re.findall(r"\]\(([^):]+)\)", README))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()
