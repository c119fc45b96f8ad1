"""Results of train.py by cell and machine, for the tables and for the numbers that pages quote.

Those of sizes.py are by model and file. A file is one machine. The rules by which columns are
compared are protocol.py's.
"""

import json
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import protocol

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OURS = protocol.OURS
TWIN = protocol.TWIN
CONTROL = "gpuprefetch:cpu_share=0.0"
DALI = "dali"
CEILING = "synthetic"
PLAIN = "torchvision"
POLICIES = {"ra": "RandAugment", "ta": "TrivialAugmentWide", "aa": "AutoAugment"}
NO_MODEL = "no model"  # the loader alone
LEAST_GIB = 0.1  # that a process on the GPU needs
MADE_BEFORE = "loader made before"  # of a first epoch: before its clock started
STILL_CACHED = 0.05  # share of the photos' pages that a cold run may find in memory

Document = dict[str, Any]
Result = dict[str, Any]


def read(folder: Path) -> list[Document]:
    """The documents of the benchmarks and checks, by time."""
    documents = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        if "benchmark" in document and "metadata" in document:
            _leave_out_unknown_memory(document["results"])
            documents.append({**document, "file": path.name})
    return sorted(documents, key=lambda document: document["metadata"]["utc"])


def _leave_out_unknown_memory(results: object) -> None:
    """A context alone needs more than that: the memory of the process before was still in use."""
    for result in results if isinstance(results, list) else []:
        if result.get("gpu_peak_gib", LEAST_GIB) < LEAST_GIB:
            del result["gpu_peak_gib"]


def version(document: Document) -> int:
    """The protocol that a document was measured by."""
    return int(document.get("protocol", 1))


def split(column: str) -> tuple[str, str]:
    """A column without its policy, and the policy: protocol 1 has it among the options."""
    loader, _, options = column.partition(":")
    words = {key: value for key, _, value in (w.partition("=") for w in options.split(",") if w)}
    policy = words.pop("policy", "")
    rest = ",".join(f"{key}={value}" for key, value in words.items())
    return f"{loader}:{rest}" if rest else loader, policy


def title(result: Result, affinity: int) -> str:
    """A cell in words: model and mode, and what is not as usual."""
    no_model = result["model"] == "none"
    words = [NO_MODEL if no_model else f"{result['model']} {result['mode']}"]
    words.append(f"batch {result['batch_size']}")
    words += ["12 megapixels"] * (result["photos"] == "large")
    words += [f"photos {result['photos']}"] * (result["photos"] not in ("large", "sample"))
    words += ["no JPEG engines"] * (result["engine"] == "none")
    words += [f"{result['cores']} cores"] * (result["cores"] != affinity)
    words += _epochs(result)
    words += ["default stream"] * (result["stream"] == "default")
    words += ["loss read each step"] * (result["loop"] == "item")
    policy = result.get("policy") or split(result["column"])[1]
    words += filter(None, [POLICIES.get(policy)])
    return ", ".join(words)


def _epochs(result: Result) -> list[str]:
    if not result["epochs"]:
        return []
    if "files" not in result:  # protocol 1
        return [f"{result['epochs']} short epochs"]
    files = f"{result['files']:,} photos"
    if result["cold"]:
        before = not _has_one_clock(result)
        return [f"first epoch of {files} from the disk", *[MADE_BEFORE] * before]
    words = [f"epochs of {files}"]
    words += [f"{result['validate']:,} to validate"] * bool(result["validate"])
    return words + ["new workers each"] * (not result["persistent"])


def _has_one_clock(result: Result) -> bool:
    """Whether the clock of a first epoch started before the loader was made, as of every loader."""
    return not result.get("cold") or "clock_from" in result


@dataclass(frozen=True)
class Machine:
    """A cell in one file: the results of each column, by round."""

    file: str
    commit: str
    version: int
    results: dict[str, dict[int, Result]]
    gpu: str | None = None  # a hash of its UUID
    card: str = ""
    cores: int = 0
    photos: str = ""  # how many different ones and their mean size, ``128 of 100 KB``

    @property
    def rates(self) -> protocol.Rounds:
        return {
            column: {number: protocol.rate_of(r) for number, r in rounds.items()}
            for column, rounds in self.results.items()
        }

    @property
    def settled(self) -> bool:
        return protocol.is_settled(
            [list(rounds.values()) for rounds in self.rates.values()],
        )

    @property
    def is_cut(self) -> bool:
        """Whether the time was over before every column had its second round."""
        return any(len(rounds) < protocol.LEAST_ROUNDS for rounds in self.results.values())

    @property
    def unsettled_starts(self) -> tuple[int, int]:
        """Processes whose rate did not stand still before it was measured, and all of them."""
        flags = [r["settled"] for _, r in self.each() if "settled" in r]
        return flags.count(False), len(flags)

    def paired(self, column: str, other: str) -> list[float]:
        """The column's rates in the rounds that the other one has as well; in all without any."""
        rounds = self.rates.get(column, {})
        shared = rounds.keys() & self.rates.get(other, {}).keys()
        return [rate for number, rate in rounds.items() if number in shared or not shared]

    def each(self) -> list[tuple[str, Result]]:
        return [(c, r) for c, rounds in self.results.items() for r in rounds.values()]

    def median(self, column: str, key: str) -> float:
        """Of the rounds that know it; 0 if none does."""
        known = [r[key] for r in self.results[column].values() if key in r]
        return statistics.median(known or [0.0])

    def twins(self) -> protocol.Rounds:
        """Rates of two labels of one loader: the pair of protocol 2, or what is one by accident.

        In protocol 1 the default and ``cpu_share=0.0`` are one configuration where the workers
        decoded nothing.
        """
        if self.version > 1:
            return self.rates
        alike = {
            number
            for number, r in self.results.get(OURS, {}).items()
            if "stats" in r and r["stats"]["share"] == 0 and r["stats"]["cpu_images"] == 0
        }
        return {
            column: {number: rate for number, rate in rounds.items() if number in alike}
            for column, rounds in self.rates.items()
        }


@dataclass(frozen=True)
class Cell:
    """What is measured, and the machines that measured it by one version of the protocol."""

    title: str
    version: int
    machines: list[Machine]

    @property
    def noise(self) -> float | None:
        pairs = [(OURS, TWIN)] if self.version > 1 else [(OURS, CONTROL)]
        return protocol.noise([m.twins() for m in self.machines], pairs)

    def rates(self, column: str) -> list[float]:
        """Of every round on every machine."""
        return [rate for m in self.machines for rate in m.rates.get(column, {}).values()]

    def compared(self, column: str, other: str) -> protocol.Compared:
        machines = [(m.gpu or m.file, m.rates) for m in self.machines]
        return protocol.compared(machines, column, other, self.noise)

    def with_columns(self, *columns: str) -> list[Machine]:
        return [m for m in self.machines if all(c in m.results for c in columns)]

    @property
    def plain(self) -> str:
        """torchvision's DataLoader: in protocol 2 the fastest of those that ran."""
        return self._fastest(PLAIN)

    @property
    def dali(self) -> str:
        """DALI: in protocol 2 the fastest of the settings that ran."""
        return self._fastest(DALI)

    def _fastest(self, loader: str) -> str:
        if self.version == 1:
            return loader
        columns = {c for m in self.machines for c in m.results if c.partition(":")[0] == loader}
        return max(columns, key=lambda c: statistics.median(self.rates(c)), default=loader)

    @property
    def is_comparable(self) -> bool:
        """Whether its columns may be compared: protocol 2 asks for a noise, and for one clock.

        A clock that starts when the loader is there leaves out what some of them read ahead.
        """
        rounds = [r for m in self.machines for r in m.results.values()]
        one_clock = all(_has_one_clock(result) for r in rounds for result in r.values())
        return self.version == 1 or (self.noise is not None and one_clock)

    @property
    def photos(self) -> str:
        return ", ".join(dict.fromkeys(m.photos for m in self.machines))

    @property
    def state(self) -> str:
        """Whether it is settled, in the words of the table."""
        if self.version > 1 and any(m.is_cut for m in self.machines):
            return "**cut short**"
        if self.version > 1:
            return "settled" if all(m.settled for m in self.machines) else "**unsettled**"
        starts = [m.unsettled_starts for m in self.machines]
        drifting, processes = (sum(counts) for counts in zip(*starts, strict=True))
        if not processes:
            return "not known"
        return f"{processes - drifting} of {processes} processes"

    def order(self) -> tuple[bool, float, str]:
        """Whole epochs first, then the cells that DALI wins."""
        values = self.compared(OURS, self.dali).values
        ratio = statistics.median(values) if values else float("inf")
        return "epoch" not in self.title, ratio, self.title


def train_cells(documents: list[Document], wanted: int | None = None) -> list[Cell]:
    """The cells of the documents of train.py, of one version of the protocol or of all.

    What was measured on other photos is another cell. Protocol 1 has no hash of its photos.
    """
    found: dict[tuple[str, int, str], dict[str, Machine]] = defaultdict(dict)
    for document in documents:
        if document["benchmark"] != "train" or wanted not in (None, version(document)):
            continue
        metadata = document["metadata"]
        for r in document["results"]:
            if "images_per_second" not in r or "error" in r or ": " in r["column"]:
                continue  # it failed, was skipped, or is another version of this library
            photos = document.get("photos", {}).get(r["photos"], {})
            key = (title(r, metadata["affinity"]), version(document), photos.get("sha256", ""))
            machines = found[key]
            empty = Machine(
                document["file"],
                metadata["commit"] or "",
                version(document),
                defaultdict(dict),
                metadata.get("gpu_uuid_hash"),
                _short(metadata["gpu"]),
                r.get("cores", metadata["affinity"]),
                described(photos),
            )
            machine = machines.setdefault(document["file"], empty)
            rounds = machine.results[split(r["column"])[0]]
            number = r.get("round", 0)
            while number in rounds:
                number += 1
            rounds[number] = r
    cells = [Cell(name, v, list(by_file.values())) for (name, v, _), by_file in found.items()]
    return sorted(cells, key=Cell.order)


def described(photos: Document) -> str:
    """Photos in words: ``128 of 100 KB``; "" where a file says nothing of them."""
    if not photos:
        return ""
    return f"{photos['distinct']:,} of {photos['mean_bytes'] / 1000:.0f} KB"


def _short(gpu: str | None) -> str:
    """The name of a card without its maker and memory: ``H100`` for NVIDIA H100 80GB HBM3."""
    words = (gpu or "CPU").removeprefix("NVIDIA ").split()
    return " ".join(words[: next((i for i, word in enumerate(words) if "GB" in word), None)])


def _titles(document: Document) -> list[str]:
    """Of its cells, in the order in which they were measured."""
    cores = document["metadata"]["affinity"]
    return list(dict.fromkeys(title(r, cores) for r in document["results"]))


def broken_rules(document: Document) -> list[str]:
    """How a document of train.py departs from the protocol that it names."""
    if version(document) < protocol.VERSION or document["benchmark"] not in ("train", "sweep"):
        return []
    metadata = document["metadata"]
    found = [] if metadata["commit"] else ["its commit is not known"]
    if metadata["dirty"]:
        found.append(f"its code was not the commit's: {', '.join(metadata['changed'])}")
    if document["benchmark"] == "sweep":
        return found
    failed = {r["column"] for r in document["results"] if "error" in r}  # the table lists them
    kept = [r["page_cache"]["cached_share_after"] for r in document["results"] if "page_cache" in r]
    if any(share > STILL_CACHED for share in kept):
        found.append(f"photos of a cold run were still in the page cache: {max(kept):.0%}")
    in_time = any("--stop-after" in command for command in metadata["commands"])
    last = _titles(document)[-1:]  # what may have been terminated
    for cell in train_cells([document]):
        (machine,) = cell.machines
        few = [c for c, r in machine.results.items() if len(r) < protocol.LEAST_ROUNDS]
        few = [column for column in few if column not in failed]
        may_end = in_time or [cell.title] == last
        in_first_round = may_end and set(few) == set(machine.results)
        in_second = in_time and len(machine.results.get(TWIN, {})) >= protocol.LEAST_ROUNDS
        if not {OURS, TWIN} <= machine.results.keys() and not in_first_round:
            found.append(f"{cell.title}: no pair of the same column, so no noise")
        if few and not (in_first_round or in_second):  # else the table says: cut short
            found.append(f"{cell.title}: fewer than {protocol.LEAST_ROUNDS} rounds of {few}")
        places: dict[int, list[str]] = defaultdict(list)
        for column, r in sorted(machine.each(), key=lambda each: each[1]["place"]):
            places[r["round"]].append(column)
        whole = set(machine.results)
        both = [places[n] for n in (0, 1) if set(places[n]) == whole]
        if len(both) == 2 and both[0] != both[1][::-1]:
            found.append(f"{cell.title}: the second round is not the first one reversed")
    return found


def scaling_rates(results: list[Result]) -> dict[tuple[str, str, int], list[float]]:
    """Images per second in each round, by model, column and number of processes."""
    rates: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for r in results:
        key = r["model"], r["column"], r["processes"]
        rates[key].append(r["images_per_second"]["median"])
    return rates


def sizes_rounds(results: list[Result]) -> dict[str, dict[str, dict[str, dict[int, float]]]]:
    """Rates of sizes.py: model -> file -> column -> round -> images a second.

    The model is "none" where no detector trains. Each result has its file.
    """
    found: dict[str, dict[str, dict[str, dict[int, float]]]] = {}
    for r in results:
        if "images_per_second" in r:
            by_file = found.setdefault(r.get("model", "none"), {})
            rates = by_file.setdefault(r["file"], {}).setdefault(r["column"], {})
            rates[r["round"]] = protocol.rate_of(r)
    return found
