"""Is ``gpuprefetch.doctor`` right? Four loaders, each slow for a reason that is known.

    python benchmarks/doctor.py --data PHOTOS --output benchmarks/results/doctor.json

``slow disk``: one reader at a time, half as fast as the model. ``too few workers``: PIL and
torchvision's transforms, in one worker. ``model-bound``: ready uint8 images, pinned. ``unpinned``:
ready float32 images, not pinned. Each is a process of its own, with the training step of train.py.
The exit code is 0 if all verdicts are right.
"""

import sys
import time
from functools import partial
from typing import Any

import harness
import loaders
import torch
import train
from torch.utils.data import DataLoader, Dataset

# Case -> the verdict, and how the first change starts; with nothing to start with, none may help.
EXPECTED = {
    "slow disk": ("reading", []),
    "too few workers": ("CPU decode", ["num_workers=", "accelerate(loader)"]),
    "model-bound": ("model", []),
    "unpinned": ("transfer", ["pin_memory=True"]),
}
# Without a GPU there are no copies, nothing to pin for, and the model leaves the workers no cores.
EXPECTED_ON_CPU = EXPECTED | {"unpinned": ("model", []), "too few workers": ("CPU decode", [""])}


class Ready(Dataset[Any]):
    """Images that are there already, from a disk that takes ``seconds`` for each, one at a time."""

    def __init__(self, size: int, dtype: torch.dtype, seconds: float = 0.0) -> None:
        self.images = torch.randint(256, (64, 3, size, size)).to(dtype)
        self.seconds, self.disk = seconds, torch.multiprocessing.get_context("fork").Lock()

    def __len__(self) -> int:
        return 1_000_000

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if self.seconds:
            with self.disk:
                time.sleep(self.seconds * len(indices))
        return [(self.images[index % len(self.images)], index % 100) for index in indices]


def build(case: str, settings: loaders.Settings, rate: float) -> DataLoader[Any]:
    """The loader of a case, for a model that takes ``rate`` images/s."""
    options: dict[str, Any] = {"pin_memory": settings.device == "cuda"}
    options |= {"batch_size": settings.batch_size, "num_workers": settings.workers}
    if case == "too few workers":
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        ops = [v2.RandomResizedCrop(settings.size), v2.RandomHorizontalFlip(), v2.PILToTensor()]
        ops += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(loaders.MEAN, loaders.STD)]
        dataset: Dataset[Any] = ImageFolder(settings.data, v2.Compose(ops))
        return DataLoader(dataset, shuffle=True, **(options | {"num_workers": 1}))
    if case == "unpinned":
        return DataLoader(Ready(settings.size, torch.float32), **(options | {"pin_memory": False}))
    seconds = 2 / rate if case == "slow disk" else 0.0
    return DataLoader(Ready(settings.size, torch.uint8, seconds), **options)


def measure(case: str, model: str, settings: dict[str, Any], seconds: float) -> dict[str, Any]:
    import gpuprefetch  # first: it prepares the environment

    shared = loaders.Settings(**settings)
    train_step = train.make_step(model, "eager", shared.device)

    def step(batch: Any) -> None:
        images, target = batch
        scaled = images.float() / 255 if images.dtype == torch.uint8 else images
        train_step(scaled.contiguous(memory_format=torch.channels_last), target)

    doctor = partial(gpuprefetch.doctor, step=step, device=shared.device, seconds=seconds)
    rate = 0.0
    if case == "slow disk":
        rate = doctor(build("model-bound", shared, rate), tune=False).ceiling
    report = doctor(build(case, shared, rate))
    print(report, file=sys.stderr)
    bound, first = (EXPECTED if shared.device == "cuda" else EXPECTED_ON_CPU)[case]
    setting = report.changes[0].setting if report.changes else ""
    right = report.bound == bound and (
        any(setting.startswith(name) for name in first) if first else not setting
    )
    return {"right": right, "expected": bound, "report": report.as_dict(), "text": str(report)}


def main() -> None:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--cases", nargs="+", default=list(EXPECTED), choices=list(EXPECTED))
    args = harness.parse_arguments(parser)
    device = harness.Device()
    document = harness.Document("doctor", args, device)
    shared = {"model": args.model, "settings": harness.settings(args)}
    for case in args.cases:
        task = {"case": case, **shared, "seconds": args.seconds / 2}
        result = harness.run_child(__file__, task, device=device, timeout=args.timeout)
        document.add({"case": case, **result})
    if not all(result.get("right") for result in document.content["results"]):
        raise SystemExit("a verdict is wrong")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        harness.child_main(measure)
    main()
