"""Every recipe of examples/sources runs, and hands out each sample once."""

import copy
import gc
import importlib.util
import io
import json
import multiprocessing
import random
import re
import sys
import types
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from gpuprefetch import BadImageError, CenterCrop, DataPrefetcher, EncodedImage, EncodedImageFolder

FOLDER = Path(__file__).parents[1] / "examples" / "sources"
SHUFFLED = {"shuffle": True, "batch_size": 5}
# Recipe -> the library it needs, and the dataset that it makes of what write() returned.
RECIPES = {
    "from_webdataset": ("webdataset", lambda recipe, data: recipe.WebDatasetImages(data)),
    "from_recordio": ("struct", lambda recipe, data: recipe.RecordImages(data)),
    "from_fsspec": ("fsspec", lambda recipe, data: recipe.RemoteImages(data)),
    "from_jpeg2000": ("PIL", lambda recipe, data: recipe.JPEG2000Images(data)),
    "from_csv": ("csv", lambda recipe, data: recipe.ListedImages(data, cache=True)),
    "from_litdata": ("litdata", lambda recipe, data: recipe.read(data)),
    "from_mosaicml": ("streaming", lambda recipe, data: recipe.MDSImages(local=data, **SHUFFLED)),
    "from_lmdb": ("lmdb", lambda recipe, data: recipe.LMDBImages(data)),
    "from_tfrecord": ("tfrecord", lambda recipe, data: recipe.TFRecordImages(data, shuffle=4)),
    "from_huggingface": ("datasets", lambda recipe, data: recipe.HuggingFaceImages(_table(data))),
    "from_parquet": ("pyarrow", lambda recipe, data: recipe.ParquetImages(data)),
    "from_torchdata": ("torchdata.nodes", lambda recipe, data: EncodedImageFolder(data)),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the libraries' own
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def _table(folder):
    import datasets

    return datasets.Dataset.from_parquet(
        f"{folder}/train.parquet", cache_dir=f"{folder}/cache", keep_in_memory=True
    )


@pytest.fixture(params=RECIPES)
def recipe(request, monkeypatch, tmp_path):
    pytest.importorskip(RECIPES[request.param][0], exc_type=ImportError)
    monkeypatch.syspath_prepend(FOLDER)
    if request.param == "from_huggingface":
        config = importlib.import_module("datasets.config")
        monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    if request.param == "from_torchdata":
        gc.disable()  # its iterators join their threads, and must not be collected in one of them
    start = multiprocessing.get_start_method(allow_none=True)
    yield importlib.import_module(request.param)
    multiprocessing.set_start_method(start, force=True)  # litdata's optimize() changes it
    gc.collect()
    gc.enable()
    for name in ("drawn", request.param):
        sys.modules.pop(name, None)


def loader_of(recipe, data, *, rank=0, ranks=1, workers=2):
    name = recipe.__name__
    dataset = RECIPES[name][1](recipe, data)
    if name == "from_torchdata":
        return recipe.build(dataset, 5, threads=2)
    sampler = None
    if not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(dataset, ranks, rank)
    return DataLoader(dataset, 5, sampler=sampler, num_workers=workers, pin_memory=True)


def read(loader):
    """Label -> decoded picture; a list of pairs, so that duplicates are seen."""
    return [
        (int(label), image.cpu())
        for images, labels in DataPrefetcher(loader, cpu_share=0.0)
        for image, label in zip(images, labels, strict=True)
    ]


@pytest.mark.forks("workers inherit what stands in for torch.distributed")
def test_every_sample_comes_once_whoever_reads_it(recipe, tmp_path, monkeypatch, capsys):
    from drawn import pictures

    data = recipe.write(str(tmp_path))
    recipe.main(data, **{"shuffle": 4} if recipe.__name__ == "from_tfrecord" else {})
    lines = capsys.readouterr().out.splitlines()
    assert sum(int(line[1:].partition(",")[0]) for line in lines if line.startswith("(")) == 24

    files = dict(enumerate(file for file, _ in pictures()))
    loader = loader_of(recipe, data, workers=1)
    orders = []
    for epoch in (None, 2):
        if epoch:
            DataPrefetcher(loader).set_epoch(epoch)
        samples = read(loader)
        orders.append([label for label, _ in samples])
        assert sorted(orders[-1]) == list(range(24))
    assert orders[0] != orders[1]
    # JPEG 2000 keeps what the CPU decoded of the JPEGs; the GPU's decoder is a few levels off.
    decoder = "cpu" if recipe.__name__ == "from_jpeg2000" else "auto"
    alone = [[EncodedImage(files[label], label)] for label, _ in samples]
    wanted = DataPrefetcher(alone, cpu_share=0.0, decoder=decoder)
    for (_, picture), (want,) in zip(samples, wanted, strict=True):
        assert torch.equal(picture, want.cpu())

    if isinstance(getattr(loader, "sampler", None), DistributedSampler):
        return  # the recipe leaves it to torch to share samples out
    if recipe.__name__ == "from_mosaicml":
        return  # its ranks speak to each other: no fake will do
    # Workers and nodes ask torch.distributed who they are; forked workers inherit the answer.
    for name in ("RANK", "WORLD_SIZE"):  # which go before it, where another library has set them
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    shares = []
    for rank in range(2):
        monkeypatch.setattr(dist, "get_rank", lambda group=None, rank=rank: rank)
        shares.append([label for label, _ in read(loader_of(recipe, data, rank=rank, ranks=2))])
    assert len(shares[0]) == len(shares[1]) == 12
    assert sorted(shares[0] + shares[1]) == list(range(24))


# The libraries leave the files open that an interrupted epoch was reading.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_epoch_goes_on_in_its_order(recipe, tmp_path):
    name = recipe.__name__
    if name == "from_mosaicml":
        pytest.skip("docs/sources.md says that it does not")
    data = recipe.write(str(tmp_path))

    def build(workers, seed):
        for seeded in (random.seed, np.random.seed, torch.manual_seed):  # as in another process
            seeded(seed)
        dataset = RECIPES[name][1](recipe, data)
        if name == "from_torchdata":
            return DataPrefetcher(recipe.build(dataset, 5, threads=2), device="cpu")
        shuffle = None if isinstance(dataset, IterableDataset) else True
        return DataPrefetcher(
            DataLoader(dataset, 5, shuffle=shuffle, num_workers=workers), device="cpu"
        )

    def shares_out():
        """Whether its workers share samples out, and not a sampler in the loop's process."""
        return isinstance(RECIPES[name][1](recipe, data), IterableDataset)

    for workers in (0, 2) if shares_out() else (0,):
        prefetcher, labels = build(workers, 0), []
        list(prefetcher)  # the second epoch, which nobody has numbered
        for _, target in prefetcher:
            labels += target.tolist()
            if len(labels) == 10:
                break
        state = json.loads(json.dumps(prefetcher.state_dict()))
        prefetcher = build(workers, 1)
        prefetcher.load_state_dict(state)
        labels += [label for _, target in prefetcher for label in target.tolist()]
        assert sorted(labels) == [*range(24)]


def of(name):
    return pytest.mark.parametrize("recipe", [name], indirect=True)


@of("from_fsspec")
@pytest.mark.parametrize("scheme", ["memory", "simplecache::memory"])
@pytest.mark.forks("a file system in memory is of one process")
def test_fsspec_reads_what_a_url_names(recipe, scheme, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where simplecache keeps files
    url = recipe.write(f"{scheme.removeprefix('simplecache::')}://{tmp_path}/bucket")
    dataset = recipe.RemoteImages(f"{scheme}://{tmp_path}/bucket/train")
    loader = DataLoader(dataset, 5, shuffle=True, num_workers=1)
    assert sorted(label for label, _ in read(loader)) == list(range(24))
    with pytest.raises(FileNotFoundError, match="has no images"):
        recipe.RemoteImages(f"{url}/none")
    sys.modules["fsspec"].filesystem("memory").store.clear()


@of("from_lmdb")
def test_lmdb_is_read_in_workers_where_it_was_read_here(recipe, tmp_path):
    """As after replay(), or a look at a sample: LMDB opens no database twice in a process."""
    dataset = recipe.LMDBImages(recipe.write(str(tmp_path)))
    image, _ = dataset[3]
    assert copy.deepcopy(dataset)[3][0].data == image.data
    assert sorted(label for label, _ in read(DataLoader(dataset, 5, num_workers=1))) == [*range(24)]


@of("from_parquet")
def test_persistent_workers_follow_the_epoch(recipe, tmp_path):
    data = recipe.write(str(tmp_path))

    def orders(epochs, persistent):
        workers = {"num_workers": 2, "persistent_workers": persistent}
        loader = DataLoader(recipe.ParquetImages(data), 5, **workers)
        prefetcher = DataPrefetcher(loader, transforms=[CenterCrop(8)])
        for epoch in epochs:
            prefetcher.set_epoch(epoch)
            yield [label for _, target in prefetcher for label in target.tolist()]

    first, second = orders((0, 3), persistent=True)
    assert first != second
    assert [second] == [*orders((3,), persistent=False)]  # as for an epoch that is resumed


@of("from_jpeg2000")
def test_jpeg2000_is_decoded_here_where_the_gpu_does_it(recipe, tmp_path):
    dataset = recipe.JPEG2000Images(recipe.write(str(tmp_path)))

    def decode(files):  # what nvImageCodec gives, None for what it cannot decode
        return [np.array(Image.open(io.BytesIO(data))) if data else None for data in files]

    loader = DataLoader(dataset, 5, shuffle=True, num_workers=1, collate_fn=recipe.collate)
    prefetcher = DataPrefetcher(recipe.Decoded(loader, decode, 16), device="cpu")
    for _ in range(2):
        batches = list(prefetcher)
        assert all(images.shape[1:] == (3, 16, 16) for images, _ in batches)
        assert sorted(torch.cat([target for _, target in batches]).tolist()) == list(range(24))
    dataset.paths[7].write_bytes(b"")
    with pytest.raises(BadImageError, match=r"7\.jp2 cannot be decoded"):
        list(prefetcher)


@of("from_recordio")
def test_a_record_that_holds_the_magic_number_is_read_as_it_was_written(recipe, tmp_path):
    magic = recipe.MAGIC
    # At a multiple of four it is cut out, elsewhere it stays; one record begins and one ends in it.
    records = [b"ab" + magic, magic, b"abcd" + magic + b"ef", magic * 2 + b"x", b""]
    with (tmp_path / "some.rec").open("w+b") as file:
        offsets = [recipe.write_record(file, record) for record in records]
        assert [recipe.read_record(file, offset) for offset in offsets] == records
        with pytest.raises(ValueError, match="no record begins at byte 4"):
            recipe.read_record(file, 4)


def lines_of(framework):
    page = (FOLDER.parents[1] / "docs" / "sources.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (code,) = (block for block in blocks if "dlpack" in block and f"import {framework}" in block)
    return code


def test_images_go_to_jax_without_a_copy(monkeypatch):
    code = lines_of("jax")
    if importlib.util.find_spec("jax") is None:  # NumPy takes DLPack as well
        monkeypatch.setitem(sys.modules, "jax", types.ModuleType("jax"))
        monkeypatch.setitem(sys.modules, "jax.numpy", np)
        monkeypatch.setattr(sys.modules["jax"], "numpy", np, raising=False)
    samples = [torch.rand(4, 3, 8, 8), torch.arange(4)]
    batches = list(DataPrefetcher([samples], device="cpu"))
    names = {"table_loader": batches}
    exec(code, names)
    ((images, target),) = batches
    assert np.asarray(names["images"]).ctypes.data == images.data_ptr()
    assert names["target"].tolist() == target.tolist()


@pytest.mark.parametrize(
    ("framework", "inner"), [("tensorflow", "experimental"), ("paddle", "utils")]
)
def test_images_go_to_other_frameworks_without_a_copy(monkeypatch, framework, inner):
    # Neither need be there: torch takes DLPack where they would.
    taken = types.SimpleNamespace(dlpack=types.SimpleNamespace(from_dlpack=torch.from_dlpack))
    monkeypatch.setitem(sys.modules, framework, types.SimpleNamespace(**{inner: taken}))
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())
    batches = list(DataPrefetcher([[torch.rand(4, 3, 8, 8), torch.arange(4)]], device="cpu"))
    names = {"torch": torch, "table_loader": batches}
    exec(lines_of(framework), names)
    for name, given in zip(("images", "target"), batches[0], strict=True):
        assert names[name].data_ptr() == given.data_ptr() and torch.equal(names[name], given)


def test_a_custom_op_cuts_each_image_into_four(photo_folder, monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER.parent)
    recipe = importlib.import_module("custom_op")
    whole = torch.arange(2 * 3 * 4 * 6).view(2, 3, 4, 6)
    a, b, c, d = recipe.quarters(whole)
    assert torch.equal(torch.cat([torch.cat([a, b], -1), torch.cat([c, d], -1)], -2), whole)
    recipe.main(photo_folder, batch_size=12, size=16)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("4 x (12, 3, 8, 8) of (12, 3, 16, 16), 12") for line in lines)
