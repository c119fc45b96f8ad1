"""Images per second of the loaders alone, with no model, and of the stages inside one.

    python benchmarks/loader.py --data PHOTOS --output benchmarks/results/loader.json
    python benchmarks/loader.py --data PHOTOS --stage fetch decode resample
    taskset -c 0,1 python benchmarks/loader.py --data PHOTOS --cpu --loaders gpuprefetch torchvision

Stages: ``all``, the loaders; ``fetch``, the file bytes to pinned batches; ``decode``, TorchCodec
alone, on the CPU cores and on the device; ``resample``, the fused launch through the prefetcher.
"""

import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import clock
import harness
import loaders
import torch
from torch.utils.data import DataLoader, Dataset

DEFAULT_LOADERS = [
    "gpuprefetch",
    "gpuprefetch:cpu_share=0.0",
    "dali",
    "dali-tuned",
    "torchvision",
    "torchvision:backend=tensor",
    "timm",
]
STAGES = ["all", "fetch", "decode", "resample"]
FILES_IN_MEMORY = 2048


class _Decoded(Dataset[int]):
    """Decodes a file to know its size: only the number leaves the worker."""

    def __init__(self, folder: str) -> None:
        self._paths = sorted(str(path) for path in Path(folder).glob("*/*"))

    def __len__(self) -> int:
        return loaders.ENDLESS

    def __getitem__(self, index: int) -> int:
        from torchcodec.decoders import decode_jpeg

        return decode_jpeg(self._paths[index % len(self._paths)]).numel()


def decode_on_cpu(settings: loaders.Settings, workers: int) -> Iterator[tuple[None, Any]]:
    """TorchCodec on the CPU, in this thread (``workers=0``) or in processes."""
    torch.set_num_threads(1)
    batch_size = min(32, settings.batch_size)
    loader = DataLoader(_Decoded(settings.data), batch_size=batch_size, num_workers=workers)
    return ((None, sizes) for sizes in loader)


def decode_on_gpu(settings: loaders.Settings, threads: int) -> Iterator[tuple[None, Any]]:
    """TorchCodec's batched decode of files in memory, each thread on a stream of its own."""
    from torchcodec.decoders import decode_jpeg

    paths = sorted(Path(settings.data).glob("*/*"))[:FILES_IN_MEMORY]
    files = [torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in paths]
    streams = [torch.cuda.Stream() for _ in range(threads)]

    def decode(number: int) -> list[torch.Tensor]:
        start = number * settings.batch_size
        batch = [files[(start + i) % len(files)] for i in range(settings.batch_size)]
        stream = streams[number % threads]
        with torch.cuda.stream(stream):
            decoded = decode_jpeg(batch, device=settings.device)
        stream.synchronize()
        return batch[: len(decoded)]

    # A pool of one thread each keeps a stream, and its decoder, with one thread.
    pools = [ThreadPoolExecutor(1) for _ in range(threads)]
    pending = deque(pools[number % threads].submit(decode, number) for number in range(2 * threads))
    number = len(pending)
    while True:
        yield None, pending.popleft().result()
        pending.append(pools[number % threads].submit(decode, number))
        number += 1


class _Pinned:
    """A DataLoader's batches of encoded images, as ``(None, target)``."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[tuple[None, Any]]:
        return ((None, target) for _, target in self._loader)


def fetch(settings: loaders.Settings) -> _Pinned:
    """Read, collate and pin the encoded files: the DataLoader under the prefetcher."""
    from gpuprefetch import EncodedImageFolder

    return _Pinned(loaders.data_loader(EncodedImageFolder(settings.data), settings))


def resample(settings: loaders.Settings) -> loaders.Batches:
    """The transforms of the training loader on a resident batch of equal photos."""
    from gpuprefetch import DataPrefetcher

    shape = (settings.batch_size, 3, 400, 468)  # the mean size of ImageNet's photos
    images = torch.randint(256, shape, dtype=torch.uint8, device=settings.device)
    target = torch.zeros(settings.batch_size, dtype=torch.int64, device=settings.device)
    return DataPrefetcher(
        loaders.SameBatch((images, target), loaders.ENDLESS),
        device=settings.device,
        transforms=loaders.gpuprefetch_transforms(settings),
        dtype=torch.bfloat16,
        memory_format=torch.channels_last,
    )


STAGE_FACTORIES = {
    "fetch": fetch,
    "decode on CPU": decode_on_cpu,
    "decode on GPU": decode_on_gpu,
    "resample": resample,
}


def measure(
    stage: str,
    loader: str,
    options: dict[str, Any],
    settings: dict[str, Any],
    timing: dict[str, Any],
) -> dict[str, Any]:
    """One loader, or one stage, in this process."""
    shared = loaders.Settings(**settings)
    if stage == "all":
        batches = loaders.build(loader, shared, options)
    else:
        batches = STAGE_FACTORIES[loader](shared, **options)
    result = clock.measure(
        batches, lambda *batch: None, device=shared.device, workers=shared.workers, **timing
    )
    if hasattr(batches, "stats"):
        result["stats"] = batches.stats.as_dict()
    return result


def plan(args: Any) -> list[dict[str, Any]]:
    tasks: list[tuple[str, str, dict[str, Any]]] = []
    if "all" in args.stage:
        for loader in args.loaders:
            variants = loaders.variants(loader, args.dali_threads)
            tasks += [("all", loader, options) for options in variants]
    if "fetch" in args.stage:
        tasks.append(("fetch", "fetch", {}))
    if "decode" in args.stage:
        tasks += [("decode", "decode on CPU", {"workers": n}) for n in (0, args.workers)]
        threads = () if args.cpu else (1, 2, 3)
        tasks += [("decode", "decode on GPU", {"threads": n}) for n in threads]
    if "resample" in args.stage:
        tasks.append(("resample", "resample", {}))
    return [{"stage": s, "loader": name, "options": options} for s, name, options in tasks]


def main() -> None:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--loaders", nargs="+", default=DEFAULT_LOADERS)
    parser.add_argument("--stage", nargs="+", default=["all"], choices=STAGES)
    args = harness.parse_arguments(parser)
    for loader in args.loaders:
        loaders.parse(loader)
    device = harness.Device()
    document = harness.Document("loader", args, device)
    timing = {"warmup": args.warmup, "seconds": args.seconds, "repeats": args.repeats}
    shared = {"settings": harness.settings(args), "timing": timing}
    for task in plan(args):
        name = task["loader"].partition(":")[0]
        result = harness.run_child(
            __file__,
            {**task, **shared},
            device=device,
            environment=loaders.ENVIRONMENT.get(name),
            timeout=args.timeout,
        )
        document.add({**task, **result})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        harness.child_main(measure)
    main()
