"""DALI's settings: the grid that is tried on each kind of card, and which of them was the fastest.

``train.py --sweep dali`` runs the grid once, then the ``FINALISTS`` fastest settings until their
rates are settled. The fastest of these is the control of later runs on such a card.
"""

import itertools
import json
import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import loaders
import protocol

FINALISTS = 3
THREADS = [4, 8, 16]
QUEUE = [2, 4]
LOAD = [0.65, 0.9]  # 0.65 is DALI's default
HUFFMAN = [None, 100_000, 1]  # pixels; the benchmark's photos have 180,000, DALI's default is 1e6


def grid(engine: str, cores: int) -> list[str]:
    """Columns of a sweep: every combination, with no more threads than cores."""
    threads = [count for count in THREADS if count <= cores] or [cores]
    options: dict[str, list[Any]] = {"threads": threads, "prefetch_queue_depth": QUEUE}
    if engine == "none":
        options |= {"hw_decoder_load": [0.0], "hybrid_huffman_threshold": HUFFMAN}
    else:
        options |= {"hw_decoder_load": LOAD}
    return [
        spec("dali", dict(zip(options, values, strict=True)))
        for values in itertools.product(*options.values())
    ]


def spec(loader: str, options: dict[str, Any]) -> str:
    """A column of a loader with options; those that are None are left out."""
    words = [f"{key}={value}" for key, value in options.items() if value is not None]
    return f"{loader}:{','.join(words)}" if words else loader


@dataclass(frozen=True)
class Fastest:
    """The fastest setting of a sweep, and where it was found."""

    column: str
    file: str
    rate: float
    model: str
    mode: str
    cores: int
    settings_tried: int
    exact: bool  # swept on this very model, mode and number of cores

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def fastest(folder: Path, gpu: str | None, cell: dict[str, Any]) -> Fastest | None:
    """What the sweeps of this kind of card found for a cell, or for the one nearest to it."""
    found: list[tuple[tuple[bool, ...], Fastest]] = []
    for path in sorted(folder.glob("sweep-*.json")):
        document = json.loads(path.read_text())
        if document["metadata"]["gpu"] != gpu:
            continue
        for swept, rates in by_cell(document["results"]).items():
            model, mode, engine, cores = swept
            allowed = {
                column: values
                for column, values in rates.items()
                if loaders.parse(column)[1]["threads"] <= cell["cores"]
            }
            finished = any(len(found) >= protocol.LEAST_ROUNDS for found in rates.values())
            if engine != cell["engine"] or not allowed or not finished:
                continue  # the first settings of a sweep are not its fastest ones
            column, rate = best(allowed)
            alike = (
                model == cell["model"] and mode == cell["mode"],
                cores == cell["cores"],
                (model == "none") == (cell["model"] == "none"),
            )
            exact = alike[0] and alike[1]
            one = Fastest(column, path.name, rate, model, mode, cores, len(rates), exact)
            found.append((alike, one))
    return max(found, key=lambda each: each[0])[1] if found else None


Swept = tuple[str, str, str, int]  # model, mode, engine, cores


def by_cell(results: list[dict[str, Any]]) -> dict[Swept, dict[str, list[float]]]:
    """Cell -> column -> rates of its rounds."""
    cells: dict[Swept, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for r in results:
        if "images_per_second" in r:
            key = (r["model"], r["mode"], r["engine"], r["cores"])
            cells[key][r["column"]].append(protocol.rate_of(r))
    return cells


def best(rates: dict[str, list[float]]) -> tuple[str, float]:
    """The fastest column on average, of those with as many rounds as any has, at least two."""
    most = min(max(map(len, rates.values())), protocol.LEAST_ROUNDS)
    means = {c: statistics.fmean(found) for c, found in rates.items() if len(found) >= most}
    return max(means.items(), key=lambda item: item[1])


def finalists(rates: dict[str, list[float]]) -> list[str]:
    """The fastest settings of the first round."""
    return sorted(rates, key=lambda column: -rates[column][0])[:FINALISTS]
