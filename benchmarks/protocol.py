"""The rules by which a cell is measured and by which two columns of it may be compared.

Protocol 2, the current one:

1. A cell runs in rounds. A round runs every column once, each in a separate process. Every second
   round runs the columns in reverse order.
2. Every cell has this library twice, under two labels (``TWIN``). Twice the median of their
   differences in a round is the cell's *noise*, but at most the largest: one outlier must not make
   a loss look equal.
3. Rounds go on, at least ``LEAST_ROUNDS``, until twice the standard error of each column's rate is
   within ``WITHIN`` of it: the cell is *settled*. After ``MOST_ROUNDS``, or where the time was
   over, it is unsettled, and the table says so.
4. Two columns are compared round by round. The result is the median of the ratios over the rounds
   of all machines, from the lowest to the highest. A median within the noise is "equal".

    ours, DALI of three rounds:  (102, 100), (101, 100), (104, 101)
    ratios:                      1.02, 1.01, 1.03     ->  1.02 (1.01 to 1.03; n = 3)
    noise 0.025:                                      ->  equal (1.01 to 1.03; n = 3)

Files without a version are of protocol 1: most of their cells have one round, and no twin.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

VERSION = 2
OURS = "gpuprefetch"
TWIN = "gpuprefetch (again)"  # the same loader under a second label
LEAST_ROUNDS = 2
MOST_ROUNDS = 6
WITHIN = 0.02
FINE = 0.005  # a noise below this needs a third decimal, or 1.003 would look like 1


def loader_of(column: str) -> str:
    """The loader and options of a column's label."""
    return OURS if column == TWIN else column


def rate_of(result: Mapping[str, Any]) -> float:
    """Images a second of one process: over whole epochs with their edges, or a window's median."""
    if result.get("epochs") and "images_per_second_overall" in result:
        return float(result["images_per_second_overall"])
    return float(result["images_per_second"]["median"])


def difference(ratio: float) -> float:
    """How much faster the faster one is: 0.5 and 2 are both a difference of 1."""
    return max(ratio, 1 / ratio) - 1


def half_width(rates: list[float]) -> float:
    """Twice the standard error of the mean, as a share of it; infinite for one rate."""
    if len(rates) < 2:
        return math.inf
    error = statistics.stdev(rates) / math.sqrt(len(rates))
    return 2 * error / statistics.fmean(rates)


def is_settled(
    rates: Iterable[list[float]], *, within: float = WITHIN, least: int = LEAST_ROUNDS
) -> bool:
    """Whether every column's rates of the rounds so far are close enough to stop."""
    columns = list(rates)
    return bool(columns) and all(len(c) >= least and half_width(c) <= within for c in columns)


@dataclass(frozen=True)
class Compared:
    """Ratios of two columns, one for each round of each machine, and the noise of their cell."""

    values: list[float]
    noise: float | None
    where: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def equal(self) -> bool:
        """Whether the difference is within the noise; False where the noise was not measured."""
        return self.noise is not None and difference(self.median) <= self.noise

    @property
    def count(self) -> str:
        """``n = 6 on 2 machines``: rounds, and where they ran."""
        if len(self.values) == 1:
            return "n = 1, no spread"
        return f"n = {len(self.values)}{self.where}"

    def __str__(self) -> str:
        if not self.values:
            return ""
        digits = 3 if self.noise is not None and self.noise < FINE else 2
        least, middle, most = (
            f"{value:.{digits}f}" for value in (min(self.values), self.median, max(self.values))
        )
        value = "equal" if self.equal else middle
        if len(self.values) == 1:
            measured = f"{middle}, " if self.equal else ""
            return f"{value} ({measured}{self.count})"
        return f"{value} ({least} to {most}; {self.count})"


Rounds = Mapping[str, Mapping[int, float]]  # column -> round -> rate, on one machine


def ratios(rounds: Rounds, column: str, other: str) -> list[float]:
    """Rate of a column by another's, for each round that has both."""
    ours = rounds.get(column, {})
    theirs = rounds.get(other, {})
    return [ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys())]


def noise(machines: Iterable[Rounds], pairs: Iterable[tuple[str, str]]) -> float | None:
    """Twice the median difference of two labels of one loader in a round, at most the largest.

    None where no pair ran. Differences of 1, 2 and 9 %: 4 %. Of 1 and 2 %: 2 %.
    """
    pairs = list(pairs)
    found = [
        difference(ratio)
        for rounds in machines
        for column, twin in pairs
        for ratio in ratios(rounds, column, twin)
    ]
    return min(2 * statistics.median(found), max(found)) if found else None


def compared(
    machines: Iterable[tuple[str, Rounds]], column: str, other: str, measured_noise: float | None
) -> Compared:
    """A column by another over the rounds of all machines that have both.

    A machine is known by a hash of its GPU. A file that has none, of protocol 1, is known by its
    name: two such files may be of one machine.
    """
    values: list[float] = []
    names: set[str] = set()
    for name, rounds in machines:
        if found := ratios(rounds, column, other):
            values += found
            names.add(name)
    are_files = any(name.endswith(".json") for name in names)
    where = f" in {len(names)} files" if are_files else f" on {len(names)} machines"
    return Compared(values, measured_noise, where if len(names) > 1 else "")
