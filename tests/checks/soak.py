"""Soak: many batches of random structure at random times, and memory that stays as it is.

    python tests/checks/soak.py --output benchmarks/results/soak.json
    python tests/checks/soak.py --cpu --batches 200 --epochs 12

Measurements, each in a process of its own. ``integrity``: every batch is checksummed on the device,
by kernels queued after random sleeps, and compared with the worker's checksum of the same tensors;
encoded images are compared with an undisturbed decode. ``policies``: the same, where workers decode
half of the images, which get random policies; they are compared with the same batches, undisturbed.
``memory``: epochs of a loader of encoded images, with and without workers that decode and policies,
and after each the GPU memory reserved, the process's resident memory, its file descriptors and its
threads. ``colors``: normalized pictures against NumPy, and once more with each mistake that has to
be noticed.
"""

import argparse
import contextlib
import ctypes
import gc
import os
import random
import statistics
import sys
import threading
import time
import warnings
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench
import kornia.augmentation as K
import numpy as np
import torch
from bench import clock, harness, pictures
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

# Before there is a CUDA context: it prepares the environment.
from gpuprefetch import DataPrefetcher, EncodedImage, RandomResizedCrop, Resize
from gpuprefetch.core.nested import map_leaves, tensors

PICTURES = 64
SIZE = 64
MEAN = torch.tensor([0.485, 0.456, 0.406])
STD = torch.tensor([0.229, 0.224, 0.225])
DTYPES = (torch.uint8, torch.int32, torch.int64, torch.float32, torch.float16)
# Share of batches for which producer, consumer and GPU take their time.
SLOW = 0.03
SLOW_SECONDS = 0.008
SLOW_CYCLES = 4_000_000
WARM_EPOCHS = 0.2  # share of the epochs behind which memory must be flat
FLAT = 0.01
# Policies sample how many images each launch has, so that a batch may need more than all before.
FLAT_OF_POLICIES = 0.03
MOST = 2000  # batches with policies: those that they are compared with are kept
SHARE = 0.5  # of the images that workers decode, where they do
# Sampled for each image, and one op that the GPU launches for the whole batch at the end.
POLICIES = (v2.TrivialAugmentWide(), v2.RandomErasing(0.5))

Pair = namedtuple("Pair", "first second")


def draw_pictures(sides: tuple[int, int] = (120, 400)) -> list[bytes]:
    """JPEGs whose sides are drawn from a range ``[low, high)``."""
    rng = np.random.default_rng(0)
    files = []
    for _ in range(PICTURES):
        coarse = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
        picture = coarse.resize(tuple(rng.integers(*sides, 2)), Image.Resampling.BICUBIC)
        files.append(pictures.encode(picture, "JPEG", quality=90))
    return files


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A weighted sum of the bytes, on the tensor's device: () int64."""
    data = tensor.contiguous().flatten().view(torch.uint8).to(torch.int64)
    return (data * (torch.arange(len(data), device=data.device) % 8191 + 1)).sum()


class Batches(Dataset):
    """Whole batches of random nested structure, a function of their number.

    ``sums`` are the checksums of the structure's tensors, in order; ``pictures`` number the encoded
    images.
    """

    def __init__(self, count: int, files: list[bytes]) -> None:
        self.count = count
        self.files = files

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        rng = random.Random(number)
        sums: list[int] = []
        structure = self._structure(rng, sums, depth=0)
        pictures = [rng.randrange(PICTURES) for _ in range(rng.randrange(1, 5))]
        if rng.random() < SLOW:
            time.sleep(rng.random() * SLOW_SECONDS)
        images = [EncodedImage(self.files[picture], picture) for picture in pictures]
        return {
            "number": number,
            "structure": structure,
            "sums": sums,
            "pictures": pictures,
            "images": images,
        }

    def _structure(self, rng: random.Random, sums: list[int], depth: int) -> Any:
        kind = rng.choice("ttttldps") if depth < 3 else "t"
        if kind == "t":
            shape = [rng.randrange(1, 40) for _ in range(rng.randrange(1, 4))]
            dtype = rng.choice(DTYPES)
            generator = torch.Generator().manual_seed(rng.randrange(1 << 40))
            tensor = torch.randint(0, 200, shape, generator=generator).to(dtype)
            sums.append(int(checksum(tensor)))
            return tensor
        if kind == "s":
            return rng.choice(["text", 7, None])
        children = [self._structure(rng, sums, depth + 1) for _ in range(rng.randrange(1, 4))]
        if kind == "d":
            return {str(key): child for key, child in enumerate(children)}
        return Pair(children[0], children[-1]) if kind == "p" and len(children) == 2 else children


def as_it_is(batch: Any) -> Any:
    return batch


def skeleton(structure: Any) -> Any:
    """The structure with a (dtype, shape) in place of each tensor."""
    return map_leaves(
        lambda leaf: (leaf.dtype, leaf.shape) if isinstance(leaf, torch.Tensor) else leaf, structure
    )


NORMALIZED = (Resize((SIZE, SIZE)), K.Normalize(MEAN, STD))


def prefetcher_of(dataset: Any, device: str, workers: int, **options: Any) -> Any:
    loading = {"batch_size": None, "pin_memory": device == "cuda", "num_workers": workers}
    loader = DataLoader(dataset, **(loading | options.pop("loading", {})))
    options = {"transforms": list(NORMALIZED), "cpu_share": 0.0, "seed": 0} | options
    return DataPrefetcher(loader, device=device, **options)


def undisturbed(batches: Dataset, device: str, count: int, **options: Any) -> list[torch.Tensor]:
    """The images of the first batches, one after the other, made in this process alone."""
    found = []
    for batch in prefetcher_of(batches, device, 0, loading={"collate_fn": as_it_is}, **options):
        clock.synchronize(device)
        found.append(batch["images"].clone())
        if len(found) == count:
            break
    clock.synchronize(device)
    return found


def integrity(device: str, workers: int, batches: int, seconds: float) -> dict[str, Any]:
    """Batches until ``batches`` or ``seconds`` are reached, and how many came out wrong."""
    prepare()
    files = draw_pictures()
    every_picture = [EncodedImage(file, number) for number, file in enumerate(files)]
    (whole,) = prefetcher_of([{"images": every_picture}], device, 0)
    reference = whole["images"].clone()
    clock.synchronize(device)
    dataset = Batches(batches, files)

    def expected(number: int, batch: Any) -> torch.Tensor:
        return torch.stack([reference[picture] for picture in batch["pictures"]])

    return disturbed(dataset, device, workers, seconds, expected)


def policies(device: str, workers: int, batches: int, seconds: float) -> dict[str, Any]:
    """The same with workers that decode and with policies, which another run has sampled alike."""
    prepare()
    dataset = Batches(batches, draw_pictures())
    options = {"transforms": [NORMALIZED[0], *POLICIES, NORMALIZED[1]], "cpu_share": SHARE}
    reference = undisturbed(dataset, device, batches, **options)

    def expected(number: int, batch: Any) -> torch.Tensor:
        return reference[number]

    return disturbed(dataset, device, workers, seconds, expected, **options)


def disturbed(
    dataset: Batches,
    device: str,
    workers: int,
    seconds: float,
    expected: Callable[[int, Any], torch.Tensor],
    **options: Any,
) -> dict[str, Any]:
    """How many batches came out wrong, while workers, loop and GPU pause at random.

    ``expected`` gives the images of a batch with this number.
    """
    rng = random.Random(0)
    wrong = torch.zeros(3, dtype=torch.int64, device=device)  # sums, images, anything else
    tensors_seen = done = 0
    started = time.monotonic()
    for batch in prefetcher_of(
        dataset, device, workers, loading={"collate_fn": as_it_is}, **options
    ):
        if rng.random() < SLOW:
            time.sleep(rng.random() * SLOW_SECONDS)
        if device == "cuda" and rng.random() < 3 * SLOW:
            torch.cuda._sleep(SLOW_CYCLES)  # what follows reads the batch late
        found = list(tensors(batch["structure"]))
        for tensor, sum_of_worker in zip(found, batch["sums"], strict=True):
            wrong[0] += checksum(tensor) != sum_of_worker
        # Nothing here waits for the GPU: the batch is dropped while it is still to be read.
        other = batch["number"] != done
        wrong[1] += (batch["images"] != expected(done, batch)).any()
        if done % 50 == 0:  # making a batch again is slow
            other |= skeleton(batch["structure"]) != skeleton(dataset[done]["structure"])
        wrong[2] += other
        tensors_seen += len(found)
        done += 1
        del batch, found
        if time.monotonic() - started > seconds:
            break
    sums, images, others = wrong.tolist()
    return {
        "batches": done,
        "tensors": tensors_seen,
        "wrong_tensors": sums,
        "wrong_image_batches": images,
        "wrong_structures": others,
        "seconds": round(time.monotonic() - started, 1),
    }


def colors(device: str, workers: int) -> dict[str, Any]:
    """Whether an undisturbed decode is right: what the others are compared with."""
    import draws
    import faults

    prepare()
    checked = []
    for name in draws.COLORS:
        for share in (0.0, SHARE):
            options = {"device": device, "workers": workers, "cpu_share": share}
            checked.append(
                faults.judged(
                    f"{name}, cpu_share={share}",
                    lambda mistake, name=name, options=options: draws.colors(
                        name, mistake, **options
                    ),
                    [faults.SWAPPED, faults.STD],
                )
            )
    return {"ok": bench.verdict(checked) == 0, "checks": checked}


def memory(
    device: str, workers: int, epochs: int, epoch_batches: int, share: float = 0.0
) -> dict[str, Any]:
    """What the process holds after each epoch, and how much it varies once it is warm.

    With a ``share`` for the workers there are policies, too.
    """
    prepare()
    # Each batch takes the same memory, so that any rise is one. Of random sizes and flips now and
    # then one takes more than all before, and torch's allocator another 2 MiB.
    files = draw_pictures((300, 301))
    flip = K.RandomHorizontalFlip(p=1.0)
    others = set(threading.enumerate())
    ops = POLICIES if share else ()
    transforms = [RandomResizedCrop(SIZE), flip, *ops, K.Normalize(MEAN, STD)]
    loading = {"batch_size": 32, "shuffle": True}
    options = {"loading": loading, "transforms": transforms, "cpu_share": share}
    dataset = [(EncodedImage(files[i % PICTURES], i), i) for i in range(32 * epoch_batches)]
    prefetcher = prefetcher_of(dataset, device, workers, **options)
    held: dict[str, list[int]] = {}
    for _ in range(epochs):
        for images, _target in prefetcher:
            images.mean()
        del images, _target
        gc.collect()
        clock.synchronize(device)
        end_of_feeders(others)
        for name, value in holdings(device).items():
            held.setdefault(name, []).append(value)
    warm = int(WARM_EPOCHS * epochs)
    spread = {
        name: (max(values[warm:]) - min(values[warm:])) / max(statistics.median(values[warm:]), 1)
        for name, values in held.items()
    }
    limit = FLAT_OF_POLICIES if share else FLAT
    flat = all(value <= limit for value in spread.values())
    found = {"epochs": epochs, "warm_epochs": warm, "share": share, "flat": flat}
    return found | {"spread": spread, "held": held}


def end_of_feeders(others: set[threading.Thread], seconds: float = 10.0) -> None:
    """Wait for the threads of the DataLoader's queues, which it tells to end but does not join.

    ``others`` are the threads from before, which may go on.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        threads = set(threading.enumerate()) - others
        if not any(thread.name.startswith("QueueFeeder") for thread in threads):
            return
        time.sleep(0.01)


def holdings(device: str) -> dict[str, int]:
    """GPU bytes reserved, resident bytes, open files and threads of this process.

    Resident is what is in use: pages that the C library keeps for later come and go by 10 %.
    """
    with contextlib.suppress(AttributeError):  # of glibc
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    reserved = torch.cuda.memory_reserved() if device == "cuda" else 0
    return {
        "gpu_reserved_bytes": reserved,
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "file_descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
    }


def prepare() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def measure(what: str, **task: Any) -> dict[str, Any]:
    measurements = {"integrity": integrity, "policies": policies, "memory": memory}
    return (measurements | {"colors": colors})[what](**task)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = harness.output_parser(__doc__)
    parser.add_argument("--batches", type=int, default=20_000, help="checksummed")
    parser.add_argument("--seconds", type=float, default=120.0, help="for them, at most")
    parser.add_argument("--epochs", type=int, default=50, help="of the memory measurement")
    parser.add_argument("--epoch-batches", type=int, default=40)
    parser.add_argument("--workers", type=int, default=max(harness.cores() - 2, 1))
    parser.add_argument("--cpu", action="store_true", help="run on the CPU")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one child")
    return parser.parse_args(words)


def soak(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All measurements, a child each."""
    shared = {"device": "cpu" if args.cpu else "cuda", "workers": args.workers}
    tasks = [
        {"what": "integrity", "batches": args.batches, "seconds": args.seconds},
        {"what": "policies", "batches": min(args.batches, MOST), "seconds": args.seconds},
        {"what": "memory", "epochs": args.epochs, "epoch_batches": args.epoch_batches},
        {"what": "memory", "epochs": args.epochs, "epoch_batches": args.epoch_batches}
        | {"share": SHARE},
        {"what": "colors"},
    ]
    child = {"device": harness.Device(), "timeout": args.timeout}
    return [
        {"what": task["what"], **harness.run_child(__file__, shared | task, **child)}
        for task in tasks
    ]


def failed(result: dict[str, Any]) -> bool:
    return (
        "error" in result
        or not result.get("flat", True)
        or not result.get("ok", True)
        or any(value for name, value in result.items() if name.startswith("wrong"))
    )


def main() -> None:
    args = parse()
    document = harness.Document("soak", args, harness.Device(), anew=True)
    results = soak(args)
    for result in results:
        document.add(result)
    if any(failed(result) for result in results):
        sys.exit(1)


if __name__ == "__main__":
    harness.child_main(measure)
    main()
