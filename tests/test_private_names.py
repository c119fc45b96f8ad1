"""Private names of other libraries: each that the package uses is here, and is there."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as torchs

import gpuprefetch

PACKAGE = Path(gpuprefetch.__file__).parent
CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"


def workers(name):
    """An attribute of the iterator of a DataLoader with workers, by what its code sets."""
    import inspect

    return f"self.{name}" in inspect.getsource(torchs)


def torchdatas(name):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    import inspect

    return name in inspect.getsource(stateful.StatefulDataLoader)


def accelerates(name):
    accelerate = pytest.importorskip("accelerate")
    import inspect

    return name in inspect.getsource(accelerate.Accelerator.prepare_data_loader)


def policy(kind, name):
    from torchvision.transforms import v2

    return hasattr(getattr(v2, kind)(), name)


def torchvisions_presets():
    from torchvision.transforms import _presets

    return hasattr(_presets, "ImageClassification")


NAMES = {
    "torch._C._profiler._RecordFunctionFast": lambda: torch._C._profiler._RecordFunctionFast,
    "torch._sample_dirichlet": lambda: torch._sample_dirichlet,
    "torch._standard_gamma": lambda: torch._standard_gamma,
    "torch.utils.data._utils.collate": lambda: torch.utils.data._utils.collate.collate_tensor_fn,
    "torch.cuda._sleep": lambda: hasattr(torch.cuda, "_sleep") or not torch.version.cuda,
    "DataLoader._iterator": lambda: hasattr(DataLoader([0]), "_iterator"),
    "_persistent_workers": lambda: workers("_persistent_workers"),
    "_shutdown_workers": lambda: hasattr(
        torchs._MultiProcessingDataLoaderIter, "_shutdown_workers"
    ),
    "StatefulDataLoader.next_iter_state": lambda: torchdatas("next_iter_state"),
    "_initial_iter_for_state_dict": lambda: torchdatas("_initial_iter_for_state_dict"),
    "_is_accelerate_prepared": lambda: accelerates("_is_accelerate_prepared"),
    "torchvision.transforms._presets": torchvisions_presets,
    "RandAugment._AUGMENTATION_SPACE": lambda: policy("RandAugment", "_AUGMENTATION_SPACE"),
    "AugMix._PARTIAL_AUGMENTATION_SPACE": lambda: policy("AugMix", "_PARTIAL_AUGMENTATION_SPACE"),
    "AutoAugment._policies": lambda: policy("AutoAugment", "_policies"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_there(name):
    assert NAMES[name](), f"{name} is gone: see the table in CONTRIBUTING.md"


def test_the_table_is_whole():
    text = CONTRIBUTING.read_text()
    assert not [name for name in NAMES if f"`{name}`" not in text]
    known = {part for name in NAMES for part in name.split(".") if part.startswith("_")}
    known |= {"_ExperimentalConfig"}  # in a docstring, for users
    for file in PACKAGE.rglob("*.py"):
        code = re.sub(r"#.*", "", file.read_text())
        found = set(
            re.findall(r"\b(?:torch|torchvision|kornia|timm|PIL)(?:\.\w+)*\.(_[a-zA-Z]\w*)", code)
        )
        found |= set(re.findall(r"attr\(\w+(?:\.\w+)*, \"(_[a-z]\w*)\"", code))
        ours = {"_fields", "_make", "_auto_augment", "_geometry", "_2d"}  # and places of classes
        assert found - ours <= known, (file, found - ours - known)
