"""How long a whole training needs: the ImageNet example with each of its two loaders.

    python benchmarks/recipe.py --data PHOTOS --output benchmarks/results/recipe-h100.json
    python benchmarks/recipe.py --data PHOTOS --loaders gpuprefetch --rounds 5 --output a.json

PHOTOS has ``train`` and ``val``. Each run is ``examples/imagenet/train.py`` with its defaults, in a
process of its own: ResNet-18, 90 epochs, 256 images a step, 224 pixels, a validation and a
checkpoint after each epoch. Its seconds go from the start of the process to its end, so imports and
the first epoch count. The next round has the loaders the other way round. The same command goes on
with a file; with ``--stop-after`` no run begins that may end later.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

EXAMPLE = harness.ROOT / "examples" / "imagenet" / "train.py"
LOADERS = ("torchvision", "gpuprefetch")
# What is kept of the example's summary.
ARGUMENTS = ("model", "epochs", "batch_size", "image_size", "workers", "auto_augment", "device")
FIGURES = ("top1", "best_top1", "images_per_second", "data_wait_share")
OF_TINY = ["--limit-batches", "1", "--batch-size", "4", "--image-size", "32"]


def measure(words: list[str], cpu: bool) -> dict[str, Any]:
    """One run of the example with these arguments: its seconds, and what its summary says."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if cpu else {}
    with tempfile.TemporaryDirectory() as folder:
        summary = Path(folder, "summary.json")
        written = ["--checkpoint", str(Path(folder, "checkpoint.pt")), "--summary", str(summary)]
        command = [sys.executable, str(EXAMPLE), *words, *written]
        start = time.perf_counter()
        run = subprocess.run(command, env=os.environ | hidden, capture_output=True, text=True)
        seconds = time.perf_counter() - start
        if run.returncode:
            raise RuntimeError(f"{EXAMPLE.name} ended with {run.returncode}:\n{run.stderr[-1500:]}")
        found = json.loads(summary.read_text())
    return {"seconds": seconds} | {name: found[name] for name in (*ARGUMENTS, *FIGURES)}


def main(words: list[str] | None = None) -> None:
    parser = harness.output_parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder with train/CLASS/* and val/CLASS/*")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--auto-augment", help="a policy of the example, as ta_wide")
    parser.add_argument("--loaders", nargs="+", default=LOADERS, choices=LOADERS)
    parser.add_argument("--rounds", type=int, default=2, help="each the other way round")
    parser.add_argument("--timeout", type=float, default=560.0, help="seconds for one run")
    parser.add_argument("--stop-after", type=float, help="begin no run that may end later, in s")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU")
    parser.add_argument("--tiny", action="store_true", help="try it out: a step, on the CPU")
    args = parser.parse_args(words)
    if args.tiny:
        vars(args).update(cpu=True, epochs=1, rounds=1)
    elif args.data is None:
        parser.error("--data takes a folder with train/ and val/; --tiny draws some pictures")
    given = [str(args.data.absolute())] if args.data else []
    given += ["--epochs", str(args.epochs)]
    given += ["--auto-augment", args.auto_augment] if args.auto_augment else []
    given += OF_TINY if args.tiny else []
    device = harness.Device(used=not args.cpu)
    document = harness.Document("recipe", args, device)
    recipe = {"epochs": args.epochs, "auto_augment": args.auto_augment}
    rounds = (
        (
            number,
            {"column": loader, **recipe},
            {"words": [*given, "--loader", loader], "cpu": args.cpu},
        )
        for number, loader in harness.in_rounds(args.loaders, args.rounds)
    )
    harness.measure_rounds(__file__, document, rounds, device=device, args=args)


if __name__ == "__main__":
    harness.child_main(measure)
    main()
