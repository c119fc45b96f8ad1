"""Several processes under torchrun, and a GPU that is not the current one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import kornia.augmentation as K
import pytest
import torch
from torch.utils.data import DataLoader

from gpuprefetch import DataPrefetcher, EncodedImageFolder, RandomResizedCrop

ROOT = Path(__file__).parents[1]


def needs_gpus(count):
    missing = torch.cuda.is_available() and torch.cuda.device_count() < count
    return pytest.mark.skipif(missing, reason=f"needs a machine with {count} GPUs")


def torchrun(processes, folder, *words):
    """The results of benchmarks/distributed.py, by the name of the check."""
    output = folder / "distributed.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", ROOT / "benchmarks" / "distributed.py"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*map(str, command), "--output", str(output), *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(output.read_text())["results"]
    for result in results:
        assert result["ok"], result
        assert set(result["mistakes"].values()) <= {"noticed"}, result
    return {result["check"]: result for result in results}


def test_two_processes(tmp_path):
    results = torchrun(2, tmp_path, *"--cpu --pictures 37 --batch-size 4 --workers 0".split())
    assert results["union"]["repeated"] == [1, 1]  # 37 of 38
    assert results["union, drop_last"]["missing"] == [5, 5]  # 2 x 16 are whole batches
    assert results["shards"]["samples"] == [19, 18]
    assert results["images"]["compared"] == 2 * 38
    assert {result["processes"] for result in results.values()} == {2}
    noticed = [mistake for result in results.values() for mistake in result["mistakes"]]
    assert len(noticed) == len(results) + 1  # one each, two of the union


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
@pytest.mark.parametrize("decoder", ["nvjpeg", "torchcodec", "torchvision"])
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
