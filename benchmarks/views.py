"""Images/s of the loader alone: one view of each image, beside several views of one decode.

    python benchmarks/views.py --data PHOTOS --output benchmarks/results/views-h100.json

Every view is a random crop, a flip and Normalize: one of 224 x 224 ("1"), or two of these and eight
of 96 x 96 ("2 + 8"), as DINO has them. Rounds take the two in turn and then the other way round.
"""

import argparse
from typing import Any

import clock
import harness
import loaders
import torch
import train

COLUMNS = {"1": (1, 0), "2 + 8": (2, 8)}  # how many views are large, and how many small
SCALES = (0.4, 1.0), (0.05, 0.4)


def build(column: str, settings: loaders.Settings) -> Any:
    # Imported before there is a CUDA context: it prepares the environment for it.
    from torchvision.transforms import v2

    from gpuprefetch import DataPrefetcher, EncodedImageFolder, RandomResizedCrop, Views

    def view(size: int, scale: tuple[float, float]) -> list[Any]:
        crop = RandomResizedCrop(size, scale=scale)
        return [crop, v2.RandomHorizontalFlip(), v2.Normalize(loaders.MEAN, loaders.STD)]

    sizes = settings.size, settings.size * 96 // 224
    pairs = zip(COLUMNS[column], sizes, SCALES, strict=True)
    lists = [view(size, scale) for count, size, scale in pairs for _ in range(count)]
    return DataPrefetcher(
        loaders.data_loader(EncodedImageFolder(settings.data), settings),
        device=settings.device,
        transforms=Views(*lists) if len(lists) > 1 else lists[0],
        dtype=torch.bfloat16,
        memory_format=torch.channels_last,
    )


def measure(column: str, settings: dict[str, Any], timing: dict[str, Any]) -> dict[str, Any]:
    """One column, in this process."""
    shapes: list[list[int]] = []

    def first_view(batch: tuple[Any, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        views = batch[0] if isinstance(batch[0], list) else batch[:1]
        shapes[:] = [list(view.shape) for view in views]
        return views[0], batch[1]

    device = settings["device"]
    batches = build(column, loaders.Settings(**settings))
    with train.stream_of("own", device):
        step = train.make_step("none", "eager", device)
        converted = map(first_view, batches)
        found = clock.measure(converted, step, device=device, loops=["step"], **timing)
    return {"views": shapes, **found["loops"]["step"], "stats": batches.stats.as_dict()}


def main(words: list[str] | None = None) -> None:
    parser = harness.timed_parser(__doc__)
    args: argparse.Namespace = harness.parse_arguments(parser, words, **harness.TIMED_TINY)
    device = harness.Device()
    document = harness.Document("views", args, device, anew=True)
    timing = harness.timing(args)
    for number, column in harness.in_rounds(list(COLUMNS), args.rounds):
        task = {"column": column, "settings": harness.settings(args), "timing": timing}
        found = harness.run_child(__file__, task, device=device, timeout=args.timeout)
        document.add({"column": column, "round": number, "batch_size": args.batch_size} | found)


if __name__ == "__main__":
    harness.child_main(measure)
    main()
