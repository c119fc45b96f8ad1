"""Images per second of real training, loader by loader, next to the same step on resident data.

    python benchmarks/train.py --data PHOTOS --output benchmarks/results/train.json
    python benchmarks/train.py --data PHOTOS --models resnet50 --modes compile --loaders gpuprefetch
    taskset -c 0-3 python benchmarks/train.py --data PHOTOS --workers 4

The step is bf16 autocast, channels_last, cross entropy, SGD; the loss is never synchronized. All
loaders have it run on a stream of its own, as docs/tuning.md advises, or with ``--stream default``
on CUDA's default stream. A loader may carry options of its factory in loaders.py:
``gpuprefetch:cpu_share=0.0``.
"""

import contextlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import clock
import harness
import loaders

DEFAULT_LOADERS = ["gpuprefetch", "dali", "dali-tuned", "torchvision", "timm"]


# Of torch.compile. CUDA graphs leave the host next to nothing to launch, and loaders to slow.
MODES = {"eager": None, "compile": "default", "graphs": "reduce-overhead"}


def make_step(
    model_name: str, mode: str, device: str, wrap: Callable[[Any], Any] | None = None
) -> Callable[..., Any]:
    """A training step on ``(images, target)`` that returns the loss, still on the device.

    Args:
        model_name: of torchvision.
        mode: a key of ``MODES``.
        device: ``"cuda"`` or ``"cpu"``.
        wrap: gives what is called of the model, such as a DistributedDataParallel.
    """
    import torch
    from torchvision.models import get_model

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True  # the shapes never change
    model = get_model(model_name, weights=None).to(device, memory_format=torch.channels_last)
    forward = model if wrap is None else wrap(model)
    if mode != "eager":
        forward = torch.compile(forward, dynamic=False, mode=MODES[mode])
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)

    def step(images: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss = criterion(forward(images), target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss

    return step


STREAMS = ["own", "high", "default"]


def stream_of(name: str, device: str) -> contextlib.AbstractContextManager[Any]:
    """Makes one of ``STREAMS`` current; the model is to be made in it, too.

    ``"high"`` is a stream of its own whose kernels go before those of the loaders.
    """
    import torch

    if device == "cpu":
        return contextlib.nullcontext()
    if name == "default":
        return torch.cuda.stream(torch.cuda.default_stream())
    return torch.cuda.stream(torch.cuda.Stream(priority=-1 if name == "high" else 0))


def measure(
    model: str,
    mode: str,
    loader: str,
    options: dict[str, Any],
    settings: dict[str, Any],
    timing: dict[str, Any],
    stream: str,
) -> dict[str, Any]:
    """One loader with one model, in this process."""
    shared = loaders.Settings(**settings)
    batches = loaders.build(loader, shared, options)  # first: it may prepare the environment
    # The DataLoader filled its queue during the compilation: do not measure that.
    timing = timing | {"warmup_steps": 3 * shared.workers if timing["warmup"] >= 1 else 1}
    with stream_of(stream, shared.device):
        step = make_step(model, mode, shared.device)
        result = clock.measure(
            batches, step, device=shared.device, workers=shared.workers, **timing
        )
    import torch

    if hasattr(batches, "stats"):
        result["stats"] = batches.stats.as_dict()
    if shared.device == "cuda":
        result["torch_reserved_peak_gib"] = torch.cuda.max_memory_reserved() / harness.GIB
    return result


def plan(args: Any) -> list[tuple[str, str, str, dict[str, Any]]]:
    """(model, mode, loader, options), the ceiling at the start and at the end of each model."""
    tasks = []
    for model in args.models:
        for mode in args.modes:
            ceiling = (model, mode, "synthetic", {})
            others = [
                (model, mode, loader, options)
                for loader in args.loaders
                if loader != "synthetic"
                for options in loaders.variants(loader, args.dali_threads)
            ]
            tasks += [ceiling, *others] + ([] if args.quick else [ceiling])
    return tasks


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each model, mode and loader: the best variant and its ratio to the ceiling."""
    groups: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for result in results:
        if "error" not in result:
            group = groups.setdefault((result["model"], result["mode"]), {})
            group.setdefault(result["loader"], []).append(result)
    rows = []
    for (model, mode), group in groups.items():
        ceilings = [r["images_per_second"]["median"] for r in group.get("synthetic", [])]
        for loader, variants in group.items():
            best = max(variants, key=lambda r: r["images_per_second"]["median"])
            rate = best["images_per_second"]["median"]
            if loader == "synthetic":
                rate = statistics.fmean(ceilings)
            row = {"model": model, "mode": mode, "loader": loader, "rate": rate, "best": best}
            if ceilings:
                row["ratio"] = rate / statistics.fmean(ceilings)
                row["drift"] = ceilings[-1] / ceilings[0] - 1
            rows.append(row)
    return rows


def main() -> None:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet18", "resnet50"])
    parser.add_argument("--modes", nargs="+", default=["eager", "compile"], choices=list(MODES))
    parser.add_argument("--loaders", nargs="+", default=DEFAULT_LOADERS)
    parser.add_argument("--stream", default="own", choices=STREAMS, help="of the training")
    args = harness.parse_arguments(parser)
    for loader in args.loaders:
        loaders.parse(loader)  # a wrong name costs nothing yet
    device = harness.Device()
    document = harness.Document("train", args, device)
    settings = harness.settings(args)
    for model, mode, loader, options in plan(args):
        timing = {"warmup": args.warmup, "seconds": args.seconds, "repeats": args.repeats}
        if loader == "synthetic":  # nothing to settle, and measured twice
            timing.update(warmup=args.warmup / 2, seconds=args.seconds / 2)
        what = {"model": model, "mode": mode, "loader": loader, "options": options}
        result = harness.run_child(
            __file__,
            {**what, "settings": settings, "timing": timing, "stream": args.stream},
            device=device,
            environment=loaders.ENVIRONMENT.get(loaders.parse(loader)[0]),
            timeout=args.timeout,
        )
        document.add({**what, **result})
    for row in summary(document.content["results"]):
        print(
            f"{row['model']:20} {row['mode']:8} {row['loader']:24} {row['rate']:9,.0f} images/s"
            f"  {row.get('ratio', float('nan')):.3f} of the ceiling"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        harness.child_main(measure)
    main()
