"""Private names of other libraries: each that the package uses is here, and is there."""

import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import gpuprefetch

PACKAGE = Path(gpuprefetch.__file__).parent
CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
# Each with what has it, or sets it in its code.
NAMES = {
    "torch._C._profiler._RecordFunctionFast": "torch._C._profiler",
    "torch.Tensor._make_wrapper_subclass": "torch:Tensor",
    "torch._sample_dirichlet": "torch",
    "torch._standard_gamma": "torch",
    "torch.utils.data._utils.collate": "torch.utils.data._utils",
    "torch.cuda._sleep": "torch.cuda",
    "torch._utils.ExceptionWrapper": "torch._utils",
    "process._children": "multiprocessing.process",
    "Queue._on_queue_feeder_error": "multiprocessing.queues:Queue",
    "_MapDatasetFetcher": "torch.utils.data._utils.fetch",
    "DataLoader._iterator": "torch.utils.data:DataLoader",
    "DataLoader._get_iterator": "torch.utils.data:DataLoader",
    "_persistent_workers": "torch.utils.data.dataloader:_BaseDataLoaderIter",
    "_workers": "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter",
    "_rcvd_idx": "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter",
    "_task_info": "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter",
    "_data_queue": "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter",
    "_shutdown": "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter",
    "_shutdown_workers": "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter",
    "StatefulDataLoader.next_iter_state": "torchdata.stateful_dataloader:StatefulDataLoader",
    "_initial_iter_for_state_dict": "torchdata.stateful_dataloader:StatefulDataLoader",
    "_is_accelerate_prepared": "accelerate:Accelerator.prepare_data_loader",
    "torchcodec.decoders._image_decoders": "torchcodec.decoders",
    "_decode_jpeg": "torchcodec.decoders._image_decoders",
    "_decode_png": "torchcodec.decoders._image_decoders",
    "_decode_webp": "torchcodec.decoders._image_decoders",
    "_source_to_tensor": "torchcodec.decoders._image_decoders",
    "_detect_image_format": "torchcodec.decoders._image_decoders",
    "torchvision.transforms._presets": "torchvision.transforms",
    "_register_kernel_internal": "torchvision.transforms.v2.functional._utils",
    "_get_fill": "torchvision.transforms.v2._geometry",
    "RandAugment._AUGMENTATION_SPACE": "torchvision.transforms.v2:RandAugment",
    "AugMix._PARTIAL_AUGMENTATION_SPACE": "torchvision.transforms.v2:AugMix",
    "AutoAugment._policies": "torchvision.transforms.v2:AutoAugment",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_there(name):
    where, last = NAMES[name], name.rpartition(".")[2]
    pytest.importorskip(re.match(r"\w+", where)[0])
    owner = pkgutil.resolve_name(where)
    set_here = rf'(self\.|"){last}\b'
    there = hasattr(owner, last) or re.search(set_here, inspect.getsource(owner))
    assert there, f"{name} is gone: see the table in CONTRIBUTING.md"


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
