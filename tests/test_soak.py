"""A slice of the soak test, and that it would notice wrong batches and growing memory."""

import importlib
import json
import os
from pathlib import Path

import pytest
import torch
from children import Child
from torch.utils.data import DataLoader

from gpuprefetch import EncodedImage
from gpuprefetch.core.nested import tensors
from gpuprefetch.images import slab as _slab

CHECKS = str(Path(__file__).parent / "checks")


@pytest.fixture
def soak(scripts, monkeypatch):
    """Its measurements set the number of threads; in this process it is to stay.

    Not in those that it forks: a worker's second thread would wait for one that was not forked.
    """
    whole, home = torch.set_num_threads, os.getpid()
    monkeypatch.setattr(
        torch, "set_num_threads", lambda number: None if os.getpid() == home else whole(number)
    )
    return importlib.import_module("soak")


@pytest.mark.filterwarnings("ignore")
def test_a_slice(device, soak):
    if device.type == "cuda":
        size = "--batches 2000 --epochs 20 --epoch-batches 20 --workers 4"
        results = soak.soak(soak.parse(size.split()))
        whats = ["integrity", "policies", "memory", "memory", "colors"]
        assert [result["what"] for result in results] == whats
        integrity, *_ = results
        assert integrity["batches"] == 2000
    else:  # a child alone is as large as its own work makes it
        integrity = soak.integrity("cpu", 1, 20, 60.0)
        code = "import json, soak; print(json.dumps(soak.memory('cpu', 1, 5, 2, 0.5)))"
        child = Child(code, PYTHONPATH=CHECKS, modules=["kornia.augmentation"], whole=False)
        memory = json.loads(child.communicate()[0])
        assert integrity["batches"] == 20
        policies = soak.policies("cpu", 1, 8, 60.0)
        assert policies["batches"] == 8
        results = [integrity, policies, memory, soak.colors("cpu", 0)]
    assert integrity["tensors"] > integrity["batches"]
    for result in results:
        assert not soak.failed(result), json.dumps(result)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", ["tensor", "image", "structure"])
@pytest.mark.parametrize("what", ["integrity", "policies"])
def test_wrong_batches_are_noticed(device, monkeypatch, soak, fault, what):
    # Guards the test above.
    whole = soak.prefetcher_of

    def spoiled(dataset, device, workers, **options):
        made = whole(dataset, device, workers, **options)
        if not workers:  # what others are compared with
            yield from made
            return
        for number, batch in enumerate(made):
            if number == 5 and fault == "tensor":
                batch["structure"] = [torch.zeros_like(t) for t in tensors(batch["structure"])]
            elif number == 5 and fault == "image":
                batch["images"][0, 0, 0, 0] += 1
            elif number == 5:
                batch["number"] = 6
            yield batch

    monkeypatch.setattr(soak, "prefetcher_of", spoiled)
    result = getattr(soak, what)(device.type, 1, 7, 60.0)
    wrong = {name: value for name, value in result.items() if name.startswith("wrong") and value}
    assert len(wrong) == 1
    assert soak.failed(result)


@pytest.mark.filterwarnings("ignore")
def test_wrong_colors_are_noticed(device, monkeypatch, soak):
    # Guards the first test: the list that is given is the faulty one.
    import draws
    import faults

    whole = draws.colors

    def faulty(name, mistake, **options):
        return whole(name, mistake or faults.STD, **options)

    monkeypatch.setattr(draws, "colors", faulty)
    result = soak.colors(device.type, 0)
    assert not any(check["ok"] for check in result["checks"])
    assert soak.failed(result)


@pytest.mark.filterwarnings("ignore")
def test_growth_is_noticed(device, monkeypatch, soak):
    # Guards the first test.
    files, whole = [], soak.holdings

    def leaking(device):
        files.append(Path(__file__).open())
        return whole(device)

    monkeypatch.setattr(soak, "holdings", leaking)
    result = soak.memory(device.type, 0, 6, 1)
    for file in files:
        file.close()
    assert result["spread"]["file_descriptors"] > soak.FLAT
    assert not result["flat"]
    assert soak.failed(result)


NUMBERED = [EncodedImage(bytes([i]) * 5000, i) for i in range(200)]


def test_an_image_taken_out_of_a_batch_stays_as_it_is():
    # Its bytes came in memory that the worker fills again once the batch is gone.
    kept = []
    for images in DataLoader(NUMBERED, batch_size=4, num_workers=1):
        kept.append(images[0])
        del images
    assert [bytes(image.data) for image in kept] == [bytes([4 * i]) * 5000 for i in range(50)]


def test_a_plain_loader_keeps_no_memory_of_dead_workers():
    mapped = []
    for _ in range(4):
        for images in DataLoader(NUMBERED, batch_size=4, num_workers=1):
            del images
        mapped.append(len(_slab.mapped))
    assert max(mapped) <= 2 * _slab.LIMIT  # of this epoch's worker, and the last one's
