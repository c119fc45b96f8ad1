"""Variants of the loader in turn, within one process: for differences that machines would hide.

    python benchmarks/variants.py --data PHOTOS --mode compile --variants '{}' \\
        '{"options": {"cpu_share": 0.4}}' '{"constants": {"_engine.REST_SECONDS": 0}}'

A variant has ``options`` of the DataPrefetcher, ``constants`` of this library's modules, and a
``stream`` that it trains on: "own", "high" or "default", see train.py. Each round measures the
resident batch, on the first of these, and all variants, from another one on each time.
"""

import contextlib
import gc
import importlib
import json
from collections import defaultdict
from itertools import repeat
from typing import Any
from unittest import mock

import clock
import harness
import loaders
import train

import gpuprefetch  # noqa: F401  # before the context: it prepares the environment
from gpuprefetch import _turns


@contextlib.contextmanager
def constants(values: dict[str, Any]) -> Any:
    """Other constants, as ``{"_budget.READY": 1}``; what was learnt with others is forgotten."""
    with contextlib.ExitStack() as held:
        for name, value in values.items():
            module, _, constant = name.partition(".")
            held.enter_context(
                mock.patch.object(importlib.import_module(f"gpuprefetch.{module}"), constant, value)
            )
        _turns.turns.clear()
        yield


def step_ms(batches: loaders.Batches, step: Any, args: Any) -> float:
    windows = [args.warmup_steps, args.steps]
    (seconds,) = clock.time_steps(batches, step, device=args.device, windows=windows)
    return 1000 * seconds / args.steps


def run(args: Any) -> None:
    document = harness.Document("variants", args, harness.Device())
    settings = loaders.Settings(**harness.settings(args))
    variants = [json.loads(words) for words in args.variants]
    resident = repeat(next(iter(loaders.synthetic(settings))))
    streams, steps = {}, {}
    for name in dict.fromkeys(variant.get("stream", "own") for variant in variants):
        streams[name] = train.stream_of(name, args.device)
        with streams[name]:
            steps[name] = train.make_step(args.model, args.mode, args.device)
            step_ms(resident, steps[name], args)  # it compiles
    first = next(iter(steps))
    ceiling: list[float] = []
    times: dict[int, list[float]] = defaultdict(list)
    for number in range(args.rounds):
        with streams[first]:
            ceiling.append(step_ms(resident, steps[first], args))
        for i in [(number + k) % len(variants) for k in range(len(variants))]:
            name = variants[i].get("stream", "own")
            with constants(variants[i].get("constants", {})), streams[name]:
                options = variants[i].get("options", {})
                batches = loaders.build("gpuprefetch", settings, options)
                times[i].append(step_ms(batches, steps[name], args))
                del batches
                gc.collect()  # its workers end, and its memory goes
            print(f"round {number}, variant {i}: {times[i][-1]:.2f} ms", flush=True)
    best = clock.quartiles(ceiling)
    document.add({"variant": "resident batch", "step_ms": best})
    for i, variant in enumerate(args.variants):
        found = clock.quartiles(times[i])
        ratio = best["median"] / found["median"]
        document.add({"variant": variant, "step_ms": found, "of_the_ceiling": ratio})


def main() -> None:
    parser = harness.argument_parser(__doc__, timed=False)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--mode", default="eager", choices=list(train.MODES))
    parser.add_argument("--variants", nargs="+", default=["{}"], help="JSON, see above")
    parser.add_argument("--warmup-steps", type=int, default=60)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=4)
    run(harness.parse_arguments(parser))


if __name__ == "__main__":
    main()
