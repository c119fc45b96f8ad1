"""What README, the pages under docs/ and CONTRIBUTING print is what runs, here and in CI."""

import ast
import inspect
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from tqdm import tqdm

import gpuprefetch
from gpuprefetch import EncodedImageFolder

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
CI_RUN = (ROOT / ".ci" / "run").read_text().replace('"$venv"', ".venv")
CI_STEPS = re.sub(r'"\$venv(/.*?)"', r".venv\1", CI_RUN).splitlines()
WORKFLOW_STEPS = re.findall(r"- run: (.*)", (ROOT / ".github/workflows/ci.yml").read_text())

pytestmark = [
    # The loaders below have pin_memory=True, as a reader's with a GPU should.
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    # torchvision's, of decode_image().
    pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning"),
]


def blocks(language, text=README):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def side_of_diff(diff, sign):
    """One side of a diff: the lines without a sign and those with ``sign``."""
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] in ("", " ", sign))


def run(source, namespace):
    for shown, small in SMALL.items():
        source = source.replace(shown, small)
    exec(source, namespace)


# A test machine may have fewer cores than workers, of which DataLoader would warn. A full batch
# takes all photos of a folder, and the doctor is to look only.
SMALL = {
    "num_workers=8": "num_workers=0",
    "batch_size=256": "batch_size=3",
    "batch_size=64": "batch_size=3",
    "doctor(loader, step)": "doctor(loader, step, seconds=0.01, tune=False)",
}
BLOCK = re.compile(
    r"(?P<mark><!-- not run: [^\n]+ -->\n)?```(?P<language>python|diff)\n(?P<source>.*?)```"
    r"(?:\n\n```text\n(?P<output>.*?)```)?",
    flags=re.DOTALL,
)


def run_page(name, namespace, capsys):
    """Run the blocks of a page in order: of a diff what is new, with what it is to print."""
    for block in BLOCK.finditer(DOCS[name]):
        if block["mark"]:
            compile(block["source"], name, "exec")
            continue
        diff = block["language"] == "diff"
        capsys.readouterr()
        run(side_of_diff(block["source"], "+") if diff else block["source"], namespace)
        if block["output"]:
            assert capsys.readouterr().out == block["output"]


@pytest.fixture
def namespace(tmp_path, monkeypatch):
    """What the pages take as given; the folders "train" and "val" hold 3 photos each."""
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
    model = torch.nn.Sequential(pool, torch.nn.Flatten(), linear).to(device)
    ops = [v2.RandomResizedCrop(224), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    return {
        "torch": torch,
        "tqdm": partial(tqdm, disable=True),
        "Dataset": Dataset,
        "DataLoader": DataLoader,
        "ImageFolder": ImageFolder,
        "device": device,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "transform": v2.Compose(ops),
        "sampler": range(3),
        "rank": 0,
        "world_size": 1,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": torch.nn.functional.cross_entropy,
        "tensor_loader": DataLoader(tensors, batch_size=2, pin_memory=True),
    }


@pytest.fixture
def wrapped(namespace):
    """What the pages after the first take as given as well."""
    exec("import gpuprefetch, kornia.augmentation as K\nfrom gpuprefetch import *", namespace)
    namespace["train_loader"] = namespace["DataPrefetcher"](namespace["tensor_loader"])
    return namespace


def test_the_script_that_resumes_goes_on_where_it_was_killed(wrapped, monkeypatch):
    (source,) = (block for block in blocks("python", DOCS["loop.md"]) if "--resume" in block)
    source = source.replace("step % 100 == 99", "True")
    calls = []

    def loss_fn(output, target):
        calls.append(target.tolist())
        if len(calls) == killed:
            raise KeyboardInterrupt
        return torch.nn.functional.cross_entropy(output, target)

    def start(*words):
        torch.manual_seed(3)
        photos = EncodedImageFolder("train")
        shuffled = DataLoader(photos, batch_size=1, shuffle=True)
        crop = gpuprefetch.RandomResizedCrop(8)
        to_float = v2.ToDtype(torch.float32, scale=True)
        loader = gpuprefetch.DataPrefetcher(shuffled, transforms=[crop, to_float], device="cpu")
        monkeypatch.setattr("sys.argv", ["script.py", *words])
        run(
            source,
            wrapped | {"loader": loader, "loss_fn": loss_fn, "model": wrapped["model"].cpu()},
        )

    killed = 0
    start()
    whole = calls.copy()
    assert len(whole) == 9
    for killed in (2, 3, 5):
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            start()
        begun = calls[:-1]  # the last one was not trained with
        killed = 0
        calls.clear()
        start("--resume")
        assert begun + calls == whole


@pytest.mark.parametrize("sign", ["-", "+"])
def test_both_sides_of_the_diff_train(namespace, sign):
    (diff,) = blocks("diff")
    run(side_of_diff(diff, sign), namespace)
    assert namespace["images"].shape == (3, 3, 224, 224)
    assert namespace["images"].dtype == torch.float32
    assert namespace["target"].sort().values.tolist() == [0, 1, 2]
    assert namespace["loss"].isfinite()


def test_every_page_of_use_is_run():
    run_here = {"index.md", "loop.md", "transforms.md", "detection.md", "sources.md", "migrate.md"}
    run_here |= {"memory.md", "distributed.md", "troubleshooting.md"}
    run_here |= {"finetune.md"}  # in test_finetune.py
    shown_only = {"correctness.md"}  # the race, in code that nobody should run
    assert {name for name, text in DOCS.items() if BLOCK.search(text)} == run_here | shown_only


def test_the_one_line_of_the_readme_moves_a_pipeline(namespace, capsys):
    line, source = blocks("python")
    assert source.endswith(line)
    run(source, namespace)
    assert "RandAugment" in capsys.readouterr().out
    images, target = next(iter(namespace["loader"]))
    assert images.shape == (3, 3, 224, 224) and images.dtype == torch.float32
    assert target.sort().values.tolist() == [0, 1, 2]


def test_index_runs(namespace, capsys):
    run_page("index.md", namespace, capsys)
    assert namespace["images"].shape == (3, 3, 224, 224)  # of the loader that accelerate gave
    assert "gpuprefetch doctor" in capsys.readouterr().out
    images, target = next(iter(namespace["loader"]))
    assert images.shape == (3, 3, 224, 224)
    assert images.device == target.device and images.device.type == namespace["device"].type


def test_loop_runs(wrapped, capsys):
    run_page("loop.md", wrapped, capsys)
    # An epoch of the manual form had come to its end.
    assert wrapped["prefetcher"].next()[0] is not None
    images, _ = next(iter(wrapped["val_loader"]))
    assert images.shape == (3, 3, 224, 224)
    assert images.dtype == torch.bfloat16
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert [len(target) for _, target in wrapped["rest"]] == [2, 1]

    files = [(path, path.stem) for path in sorted(Path("val").rglob("*.jpg"))]
    captions = DataLoader(wrapped["Captions"](files), batch_size=3, pin_memory=True)
    (batch,) = wrapped["DataPrefetcher"](captions, transforms=[wrapped["Resize"]((8, 9))])
    assert batch["image"].shape == (3, 3, 8, 9)
    assert batch["caption"] == ["0", "1", "2"]


def test_transforms_run(wrapped, capsys):
    run_page("transforms.md", wrapped, capsys)
    views, _ = next(iter(wrapped["loader"]))
    assert [view.shape for view in views] == [(3, 3, 224, 224)] * 2
    assert torch.equal(views[0], views[1].flip(-1))
    for pipeline in ("train_loader", "validation_loader"):
        images, _ = next(iter(wrapped[pipeline]))
        assert images.dtype == torch.float32 and images.shape[1:] == (3, 224, 224)
    sides = [crop.shape[-1] for crop in wrapped["crops"]]
    assert sides == [224] * 2 + [96] * 8


def test_migration_runs(wrapped, capsys, monkeypatch, tmp_path):
    data = pytest.importorskip("timm.data")
    config = pytest.importorskip("datasets.config")
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    # Without workers there are none to keep, and timm before 1.0.29 keeps them by default.
    create_loader = partial(data.create_loader, persistent_workers=False)
    wrapped |= {"create_dataset": data.create_dataset, "create_loader": create_loader}
    run_page("migrate.md", wrapped, capsys)
    assert wrapped["images"] is None  # Apex's loop has come to its end
    assert wrapped["loss"].isfinite()


def test_sources_run(wrapped, capsys):
    files = sorted(Path("train").rglob("*.jpg"))
    wrapped["rows"] = [(path.read_bytes(), label) for label, path in enumerate(files)]
    run_page("sources.md", wrapped, capsys)
    images, target = next(iter(wrapped["table_loader"]))
    assert images.shape == (3, 3, 224, 224)
    assert target.tolist() == [0, 1, 2]


def test_detection_runs(wrapped, capsys):
    seen = []
    wrapped["detector"] = lambda images, targets: seen.extend(zip(images, targets, strict=True))
    wrapped["items"] = []
    for path in sorted(Path("train").rglob("*.jpg")):
        with Image.open(path) as image:
            width, height = image.size
        boxes = torch.tensor([[0.0, 0.0, width, height]])
        wrapped["items"].append((path, height, width, boxes, torch.tensor([7])))
    run_page("detection.md", wrapped, capsys)
    assert [image.shape for image, _ in seen[:3]] == [(3, 512, 512)] * 3
    assert len({image.shape for image, _ in seen[3:]}) > 1 and len(seen) == 6
    for image, target in seen:  # a box around the whole picture is one around any crop of it
        height, width = image.shape[1:]
        assert target["labels"].tolist() == [7]
        (box,) = target["boxes"].tolist()
        assert box == pytest.approx([0, 0, width, height])


@pytest.mark.parametrize("name", ["memory.md", "distributed.md", "troubleshooting.md"])
def test_other_pages_run(name, wrapped, capsys):
    run_page(name, wrapped, capsys)
    images, _ = next(iter(wrapped["loader"]))
    assert images.shape == (3, 3, 224, 224)


def texts_of(path):
    """The strings of a module; what an f-string fills in is a null character."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [getattr(part, "value", "") for part in node.values]
            yield "".join(part if isinstance(part, str) else "\0" for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_quoted_messages_are_the_packages():
    texts = [text for path in (ROOT / "gpuprefetch").rglob("*.py") for text in texts_of(path)]
    # The first column of the tables whose head says that it quotes us.
    table = re.compile(r"^\| (?:message|text|doctor says) \|.*\n.*\n((?:\|.*\n)+)", re.MULTILINE)
    tables = "".join(table.findall(DOCS["troubleshooting.md"]))
    quotes = re.findall(r"^\| `(.*?)` \|", tables, flags=re.MULTILINE)
    assert len(quotes) > 50
    for quote in quotes:
        pieces = map(re.escape, re.split(r" ?\.\.\. ?", quote))
        assert any(map(re.compile(".*".join(pieces)).search, texts)), quote


def test_lines_of_code_fit_the_page():
    """84 columns; what is printed, in blocks of text, has a smaller type."""
    code = re.compile(r"```(?:python|diff|bash)\n(.*?)```", flags=re.DOTALL)
    found = "".join(code.findall("\n".join(DOCS.values())))
    assert max(map(len, found.splitlines())) <= 84


def test_settings_table_is_the_signature():
    (table,) = re.findall(r"\| `DataPrefetcher\(.*?\n\n", DOCS["tuning.md"], flags=re.DOTALL)
    columns = re.findall(r"^\| (`.*?`) \|", table, flags=re.MULTILINE)
    names = re.findall(r"`(\w+)`", " ".join(columns))
    parameters = inspect.signature(gpuprefetch.DataPrefetcher).parameters
    assert sorted(names) == sorted(set(parameters) - {"loader"})


def test_api_page_has_every_name():
    names = re.findall(r"auto(?:class|function|exception):: (\w+)", DOCS["api.md"])
    assert sorted(names) == gpuprefetch.__all__


def test_shell_commands_are_what_ci_runs():
    (commands,) = blocks("bash")
    for command in commands.splitlines():
        assert set(command.split(" && ")) <= set(CI_STEPS)


def test_contributing_commands_are_the_workflows():
    _, commands = blocks("bash", (ROOT / "CONTRIBUTING.md").read_text())
    commands = {line for line in commands.splitlines() if not line.startswith("#")}
    assert commands <= set(WORKFLOW_STEPS)


def test_commands_of_the_pages_exist():
    """The script, or our command line, and each of its options."""
    commands = "".join(block for text in DOCS.values() for block in blocks("bash", text))
    for command in commands.replace("\\\n", "").splitlines():
        _, program, arguments = re.split(r"(\S+\.py|-m gpuprefetch)", command)
        ours = program == "-m gpuprefetch"
        source = (ROOT / ("gpuprefetch/__main__.py" if ours else program)).read_text()
        if program.startswith("benchmarks/"):  # which share some options
            source += (ROOT / "benchmarks" / "harness.py").read_text()
        words = re.findall(r"--[\w-]+", arguments) + arguments.split()[:ours]
        assert all(f'"{word}"' in source for word in words), command


def test_what_the_pages_name_is_there():
    links = re.findall(r"\]\(([^):]+)\)", README)  # those under docs/ are Sphinx's to check
    files = re.findall(r"`(\w+/\w+\.py)`", "".join(DOCS.values()))
    assert links and files
    paths = [link.partition("#")[0] for link in links] + files
    there = (ROOT, ROOT / "gpuprefetch")
    assert [path for path in paths if not any((root / path).exists() for root in there)] == []
