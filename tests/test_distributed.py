"""Several processes under torchrun, and a GPU that is not the current one."""

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import kornia.augmentation as K
import pytest
import torch
import torch.distributed as dist
from children import ROOT, environment, ranks, script
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from gpuprefetch import DataPrefetcher, EncodedImageFolder, RandomResizedCrop


def needs_gpus(count):
    missing = torch.cuda.is_available() and torch.cuda.device_count() < count
    return pytest.mark.skipif(missing, reason=f"needs a machine with {count} GPUs")


CHECK = ROOT / "tests" / "checks" / "distributed.py"


def torchrun(processes, folder, *words):
    """The results of tests/checks/distributed.py, by the name of the check."""
    output = folder / "distributed.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", CHECK, "--output", output, *words]
    options = {"capture_output": True, "text": True, "timeout": 280, "env": environment()}
    done = subprocess.run([*map(str, command)], **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return results_in(output)


def forked(processes, folder, *words):
    """The same of processes that have imported torch already."""
    output = folder / "distributed.json"
    options = {"modules": ["kornia.augmentation"], "PYTHONPATH": str(CHECK.parent), "whole": False}
    children = ranks(processes, script(CHECK), "--output", str(output), *words, **options)
    said = [child.communicate(200) for child in children]
    assert not any(child.returncode for child in children), said
    return results_in(output)


def results_in(output):
    results = json.loads(output.read_text())["results"]
    for result in results:
        assert result["ok"], result
        assert set(result["mistakes"].values()) <= {"noticed"}, result
    return {result["check"]: result for result in results}


def test_two_processes(tmp_path):
    words = "--cpu --pictures 21 --batch-size 4 --workers 0 --crops 300"
    results = forked(2, tmp_path, *words.split())
    assert results["union"]["repeated"] == [1, 1]  # 21 of 22
    assert results["union, drop_last"]["missing"] == [5, 5]  # 2 x 8 are whole batches
    assert results["shards"]["samples"] == [11, 10]
    assert results["images"]["compared"] == 2 * 22
    assert results["repeats, augmentation"]["samples"] == [32, 31]  # 3 x 21
    assert results["repeats, weighted"]["samples"] == [10, 11]
    assert {result["processes"] for result in results.values()} == {2}
    noticed = [mistake for result in results.values() for mistake in result["mistakes"]]
    # One each, one more of the union, and more of crops and colors.
    assert len(noticed) == len(results) + 1 + 2 + 1 + 2
    assert results["images, policies and cpu_share=0.5"]["compared"] == 2 * 22
    assert results["crops, RandomCrop, RandomVerticalFlip"]["crops"] == 300


@pytest.mark.slow
@pytest.mark.usefixtures("scripts")
def test_a_node_that_is_killed_and_resumed(tmp_path, monkeypatch):
    pytest.importorskip("webdataset")
    import nodes

    for folder in ("imagenet", "sources"):
        monkeypatch.syspath_prepend(nodes.EXAMPLES / folder)
    nodes.draw(tmp_path)
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([str(Path(nodes.__file__).parent), str(ROOT)])

    class OneMachine(nodes.Check):
        """Forked processes in place of agents and networks."""

        def run(self, name, words, *, stop_at=0):
            log = tmp_path / f"{name}-"
            options = {
                "LOG": str(log),
                "PYTHONPATH": path,
                "modules": ["webdataset"],
                "whole": False,
            }
            stops = {"of_rank": lambda rank: {"STOP_AT": str(stop_at * rank)}}
            words = ["--rank", *words]
            children = ranks(2, script(nodes.__file__), *words, folder=tmp_path, **options, **stops)
            if stop_at:
                while len(self.logs(log)[1]) < stop_at:
                    assert children[1].poll(0.01) is None, children[1].communicate()[1]
                os.kill(children[1].pid, signal.SIGKILL)
            errors = [child.communicate()[1] for child in children]
            assert any(child.returncode for child in children) == bool(stop_at), errors
            return self.logs(log)

    check = OneMachine(tmp_path, [SimpleNamespace(network="none")], 1)
    result = check.interrupted("shards", [], nodes.expected_of_shards(2), stop_at=5)
    assert result["ok"] and set(result["mistakes"].values()) == {"noticed"}, result
    assert (result["batches_before"], result["batches_after"]) == ([4, 4], [9, 7])


@pytest.fixture
def two_ranks(monkeypatch):
    """This process as the first of two, as far as it is asked."""
    for name, value in {"is_initialized": True, "get_world_size": 2, "get_rank": 0}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)


def told(loader):
    """What two epochs of a prefetcher warn of, where they point here."""
    prefetcher = loader if isinstance(loader, DataPrefetcher) else DataPrefetcher(loader, **CPU)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            assert sum(map(len, prefetcher)) > 0
    return [str(warning.message) for warning in found if warning.filename == __file__]


CPU = {"device": "cpu"}
DATA = range(7)


def stateful():
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(DATA, 2, True)


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DataLoader(DATA, 2), "a SequentialSampler"),
        (lambda: DataLoader(DATA, 2, shuffle=True), "a RandomSampler"),
        (lambda: DataLoader([torch.zeros(2)], batch_size=None), "a SequentialSampler"),
        (lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 2, True)), "a R"),
        (stateful, "a RandomSampler"),
    ],
)
def test_ranks_that_read_everything_are_told_once(two_ranks, make, words):
    (message,) = told(loader := make())
    prepared = "prepared.base_dataloader = DataPrefetcher(prepared.base_dataloader"
    for part in (words, "sampler=DistributedSampler(dataset", "Lightning", prepared):
        assert part in message
    # The line that silences it, as it is written there.
    silence = re.search(r"warnings\.filterwarnings\('ignore', '(.*)'\)", message)[1]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", silence)
        assert len(list(DataPrefetcher(loader, **CPU))) == len(loader)


class Own(RandomSampler):
    """May well give each rank another part."""


class Endless(IterableDataset):
    def __iter__(self):
        return iter(DATA)  # may share out by the rank


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, 2, sampler=DistributedSampler(DATA, 2, 0)),
        DataLoader(DATA, 2, sampler=range(0, 7, 2)),
        DataLoader(DATA, 2, sampler=Own(DATA)),
        DataLoader(DATA, 2, sampler=WeightedRandomSampler([1.0] * 7, 7)),
        DataLoader(DATA, 2, sampler=RandomSampler(DATA, replacement=True)),
        DataLoader(DATA, batch_sampler=[[0, 1], [4, 5]]),  # its `sampler` is one that nobody uses
        DataLoader(Endless(), 2),
        [torch.zeros(2)],
    ],
)
def test_ranks_that_may_share_samples_out_are_not_told(two_ranks, loader):
    assert told(loader) == []


@pytest.mark.parametrize("name", ["get_rank", "get_world_size"])
def test_the_first_of_several_ranks_is_told_for_all(monkeypatch, two_ranks, name):
    monkeypatch.setattr(dist, name, lambda: 1)
    assert told(DataLoader(DATA, 2)) == []


def test_what_accelerate_shares_out_is_not_told(request):
    Accelerator = pytest.importorskip("accelerate").Accelerator
    from accelerate.data_loader import DataLoaderDispatcher

    accelerator = Accelerator(cpu=True)  # a single process: before two are pretended
    prepared = DataLoaderDispatcher(DATA, batch_size=2)  # one rank reads, with torch's samplers
    prepared.base_dataloader = DataPrefetcher(prepared.base_dataloader, **CPU)
    request.getfixturevalue("two_ranks")
    assert sum(map(len, prepared)) == 7
    # It is no DataLoader to accelerate, which hands it back.
    prefetcher = DataPrefetcher(DataLoader(DATA, 2), **CPU)
    assert accelerator.prepare(prefetcher) is prefetcher
    (message,) = told(prefetcher)
    with pytest.raises(TypeError) as error:
        DataPrefetcher(prepared, **CPU)
    shared = re.search(r"put the prefetcher into .*?device\)", str(error.value))[0]
    assert shared in message


@pytest.fixture(scope="module")
def digests():
    return set()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "processes", [1, pytest.param(2, marks=needs_gpus(2)), pytest.param(4, marks=needs_gpus(4))]
)
def test_a_gpu_for_each_process(processes, tmp_path, digests):
    results = torchrun(processes, tmp_path)
    assert results["contexts"]["of_ranks"] == [[rank] for rank in range(processes)]
    digests.add(results["images"]["sha256"])
    assert len(digests) == 1  # the same pictures, however many processes there are


@pytest.mark.gpu
@needs_gpus(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("decoder", ["nvjpeg", "torchvision"])
@pytest.mark.filterwarnings("ignore:.*deprecated")  # torchvision's decoder, from 0.29 on
def test_a_gpu_that_is_not_the_current_one(photo_folder, workers, decoder):
    torch.cuda.set_device(0)

    def images(device):
        loader = DataLoader(
            EncodedImageFolder(photo_folder), batch_size=6, num_workers=workers, pin_memory=True
        )
        transforms = [RandomResizedCrop(16), K.RandomHorizontalFlip(), K.ColorJitter(0.4, 0.4)]
        prefetcher = DataPrefetcher(
            loader, device=device, transforms=transforms, decoder=decoder, seed=3, cpu_share=0.0
        )
        found = [batch for batch, _ in prefetcher]
        assert {str(batch.device) for batch in found} == {device}
        assert prefetcher.stats.gpu_images > 0
        return [batch.cpu() for batch in found]

    def allocated():
        """Bytes ever taken from the first GPU's allocator."""
        return torch.cuda.memory_stats(0).get("allocated_bytes.all.allocated", 0)

    streams = [torch.cuda.current_stream(device) for device in range(2)]
    before = allocated()
    second = images("cuda:1")
    assert allocated() == before
    assert torch.cuda.current_device() == 0
    assert [torch.cuda.current_stream(device) for device in range(2)] == streams
    first = images("cuda:0")
    assert allocated() > before  # guards the test: an image of the first GPU would have counted
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
