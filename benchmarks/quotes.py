"""Numbers that a page quotes from a file of results, and whether they follow from it.

A comment directly after a number names where it is from: files, cell, columns and quantity.

    ResNet-18 trains 3.5 to 3.8<!-- = train-h100-* | resnet18 eager, batch 256 | gpuprefetch /
    torchvision | times --> times as fast

One number is the median over rounds and machines; ``A to B`` and ``A and B`` are the lowest and the
highest. The values are rounded as the number is. A difference within the noise of its cell must not
be quoted as a number: its quantity is ``equal``, and the comment stands after words.

A number with a unit of a measurement (``MEASURED``) and no comment is an error, unless its
paragraph has a comment that begins with ``not from results:`` and says why. In a section about
speed (``STRICT``) every share, factor and time needs one.
"""

import fnmatch
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import protocol
from cells import RESULTS, Document, Machine, Result, scaling_rates, sizes_rounds, train_cells

NUMBER = r"\d[\d,]*(?:\.\d+)?"
COMMENT = re.compile(r"<!-- = (.*?) -->", flags=re.DOTALL)
NUMBERS_BEFORE = re.compile(rf"({NUMBER})(?:\s+(?:to|and|or)\s+({NUMBER}))?(?:\s*%)?\s*$")
UNITS = (
    r"images/s|images a second|(?:more )?times (?:as|one|the|DALI)|% (?:faster|slower|more|less)"
)
UNITS += r"|ms\b|GiB (?:more|less)"
MEASURED = re.compile(rf"(?:{NUMBER}\s+(?:to|and|or)\s+)?(?<![\w.])({NUMBER})\s*(?:{UNITS})")
STRICT = ("How fast",)  # headings
STRICTLY = re.compile(rf"(?<![\w.])({NUMBER})\s*(?:%|times\b|ms\b|GiB|images/s|images a second)")
GENERATED = re.compile(r"<!-- (\w+):start -->.*?<!-- \1:end -->", flags=re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`\n]*`", flags=re.DOTALL)
EXEMPT = "<!-- not from results: "


@dataclass(frozen=True)
class Quote:
    """Numbers in a text, as they are written, and where they are from."""

    written: tuple[str, ...]
    files: str
    cell: str
    columns: tuple[str, ...]
    quantity: str

    def __str__(self) -> str:
        columns = " / ".join(self.columns)
        where = f"{self.files} | {self.cell} | {columns} | {self.quantity}"
        return f"{' to '.join(self.written) or 'the words'} ({where})"


def quotes(text: str) -> Iterator[Quote]:
    """The quotes of a text."""
    for found in COMMENT.finditer(text):
        parts = [" ".join(part.split()) for part in found[1].split("|")]
        if len(parts) != 4:
            raise ValueError(
                f"{found[0]!r} has {len(parts)} parts; a quote has four: files | cell | columns | "
                "quantity"
            )
        files, cell, columns, quantity = parts
        before = NUMBERS_BEFORE.search(COMMENT.sub("\0", text[: found.start()]))
        written = tuple(number for number in before.groups() if number) if before else ()
        names = tuple(column.strip() for column in columns.split(" / "))
        yield Quote(written, files, cell, names, quantity)


def unmarked(text: str) -> Iterator[str]:
    """Numbers of measurements that no comment follows."""
    text = CODE.sub("", GENERATED.sub("", text))
    pattern = MEASURED
    for paragraph in re.split(r"\n\s*\n", text):
        if heading := re.match(r"#+ (.*)", paragraph):
            pattern = STRICTLY if heading[1] in STRICT else MEASURED
        if EXEMPT in paragraph:
            continue
        marks = COMMENT.sub("\0", paragraph)
        for found in pattern.finditer(marks):
            yield " ".join(found[0].split())


def problems(text: str, documents: list[Document]) -> list[str]:
    """What in a text does not follow from the documents."""
    found = [f"{number!r} has no comment that says where it is from" for number in unmarked(text)]
    for quote in quotes(text):
        try:
            if reason := wrong(quote, documents):
                found.append(f"{quote}: {reason}")
        except LookupError as error:
            found.append(f"{quote}: {error}")
    return found


def wrong(quote: Quote, documents: list[Document]) -> str | None:
    """Why a quote does not follow from the documents; None where it does."""
    chosen = [d for d in documents if fnmatch.fnmatch(Path(d["file"]).stem, quote.files)]
    if not chosen:
        raise LookupError(f"{RESULTS.name}/ has no such file")
    benchmark = chosen[0]["benchmark"]
    if benchmark not in RESOLVERS:
        raise LookupError(f"numbers of {benchmark}.py cannot be quoted; {list(RESOLVERS)} can")
    values, is_equal = RESOLVERS[benchmark](quote, chosen)
    if not values:
        raise LookupError("no result has these columns")
    if quote.quantity == "equal":
        return None if is_equal else f"the difference is not within a measured noise: {values}"
    if is_equal:
        return "the difference is within the noise of the cell; its quantity is: equal"
    if not quote.written:
        return "no number stands before the comment"
    expected = (
        [statistics.median(values)] if len(quote.written) == 1 else [min(values), max(values)]
    )
    rounded = [_as_written(v, w) for v, w in zip(expected, quote.written, strict=True)]
    if rounded != list(quote.written):
        return f"the files have {' to '.join(rounded)}"
    return None


def _as_written(value: float, written: str) -> str:
    """A value with the decimals and separators of a number in the text."""
    decimals = len(written.partition(".")[2])
    return f"{value:,.{decimals}f}" if "," in written or value < 1000 else f"{value:.{decimals}f}"


Values = tuple[list[float], bool]  # of each round, and whether their median is within the noise


def _of_train(quote: Quote, documents: list[Document]) -> Values:
    cells = [cell for cell in train_cells(documents) if cell.title == quote.cell]
    if not cells:
        raise LookupError("no such cell")
    newest = max(each.version for each in cells)  # the newer protocol, where both have it
    cell, *others = [each for each in cells if each.version == newest]
    if others:
        photos = " and on ".join(each.photos for each in (cell, *others))
        raise LookupError(f"it was measured on {photos}: name the files of one of them")
    column = quote.columns[0]
    other = quote.columns[-1]
    costs = {"CPU seconds": "cpu_seconds_per_1000_images", "GiB": "gpu_peak_gib"}
    costs |= {"ms an edge": "edge_ms", "ms between epochs": "between_epochs_ms"}
    costs |= {"s to the first batch": "first_batch_seconds"}
    of_epochs: dict[str, Callable[[list[float]], float]] = {
        "s of the second epoch": lambda seconds: seconds[0],  # the first one is left out
        "s of a later epoch": lambda seconds: statistics.median(seconds[1:]),
    }
    if quote.quantity == "images/s":
        return cell.rates(column), False
    results = [r for m in cell.with_columns(column) for r in m.results[column].values()]
    if quote.quantity == "% noise":
        return [100 * cell.noise] if cell.noise is not None else [], False
    if key := costs.get(quote.quantity):
        return [r[key] for r in results if key in r], False
    if of_epoch := of_epochs.get(quote.quantity):
        return [of_epoch(r["epoch_seconds"]) for r in results], False
    if quote.quantity.removesuffix(" more") in costs:
        key = costs[quote.quantity.removesuffix(" more")]
        return _paired(cell.machines, column, other, key, lambda a, b: a - b), False
    if quote.quantity.removeprefix("times the ") in costs:
        key = costs[quote.quantity.removeprefix("times the ")]
        return _paired(cell.machines, column, other, key, lambda a, b: a / b), False
    compared = cell.compared(column, other)
    forms: dict[str, Callable[[float], float]] = {
        "times": lambda ratio: ratio,
        "equal": lambda ratio: ratio,
        "% faster": lambda ratio: 100 * (ratio - 1),
        "% slower": lambda ratio: 100 * (1 - ratio),
    }
    if quote.quantity not in forms:
        known = [*forms, "images/s", "% noise", *costs, *of_epochs]
        raise LookupError(f"no such quantity; {known} are")
    if not cell.is_comparable:
        why = "its noise was not measured: the cell was cut short in its first round"
        if cell.noise is not None:
            why = "a loader that reads ahead had begun before the clock started"
        raise LookupError(f"its columns cannot be compared; {why}")
    return [forms[quote.quantity](ratio) for ratio in compared.values], compared.equal


def _paired(
    machines: list[Machine],
    column: str,
    other: str,
    key: str,
    combine: Callable[[float, float], float],
) -> list[float]:
    """A figure of a column with that of another one, for each round that has both."""
    values = []
    for machine in machines:
        ours = machine.results.get(column, {})
        theirs = machine.results.get(other, {})
        both = [(ours[n], theirs[n]) for n in ours.keys() & theirs.keys()]
        values += [combine(a[key], b[key]) for a, b in both if key in a and key in b]
    return values


def _of_policy(quote: Quote, documents: list[Document]) -> Values:
    rows = {(r["policy"], r["side"]): r for d in documents for r in d["results"]}
    found = [rows[quote.cell, side] for side in quote.columns if (quote.cell, side) in rows]
    known = [r[quote.quantity] for r in found if quote.quantity in r]
    return known, False


def _of_scaling(quote: Quote, documents: list[Document]) -> Values:
    """Columns are a loader and a number of processes: ``gpuprefetch / 4``."""
    column, processes = quote.columns
    many = int(processes)
    runs = [
        r
        for d in documents
        for r in d["results"]
        if (r["model"], r["column"]) == (quote.cell, column)
    ]
    rates = scaling_rates(runs)
    here = [r for r in runs if r["processes"] == many]
    if not here:
        return [], False
    rate = statistics.median(rates[quote.cell, column, many])
    forms = {"images/s": rate}
    if alone := rates.get((quote.cell, column, 1)):
        one = statistics.median(alone)
        forms |= {"times one": rate / one, "% lost": 100 * (1 - rate / one / many)}
    kept = {"GiB of the host": "host_gib", "GiB shared": "shared_gib", "ms an edge": "edge_ms"}
    forms |= {words: here[0][key] for words, key in kept.items() if key in here[0]}
    if stats := here[0].get("stats"):
        forms["ms to read a batch"] = 1000 * stats["read_seconds"] / stats["batches"]
        forms["ms to pack a batch"] = 1000 * stats["collate_seconds"] / stats["batches"]
        forms["ms to pin a batch"] = 1000 * stats["pin_seconds"] / stats["batches"]
    if quote.quantity not in forms:
        raise LookupError(f"no such quantity; {list(forms)} are")
    return [forms[quote.quantity]], False


def _of_sizes(quote: Quote, documents: list[Document]) -> Values:
    """The cell is the detector that trains, or ``none``; columns are those of sizes.py."""
    results = [{**r, "file": d["file"]} for d in documents for r in d["results"]]
    column = quote.columns[0]
    rows = [r for r in results if (r.get("model", "none"), r["column"]) == (quote.cell, column)]
    measured = [r for r in rows if "images_per_second" in r]
    costs = {"CPU seconds": "cpu_seconds_per_1000_images", "pixels": "pixels"}
    if quote.quantity == "images/s":
        return [protocol.rate_of(r) for r in measured], False
    if key := costs.get(quote.quantity):
        return [float(r[key]) for r in measured], False
    if quote.quantity == "times":
        by_file = sizes_rounds(results).get(quote.cell, {})
        return protocol.compared(by_file.items(), column, quote.columns[-1], None).values, False
    raise LookupError(f"no such quantity; {['images/s', 'times', *costs]} are")


def _of_rows(quote: Quote, documents: list[Document]) -> Values:
    """The cell says what a row has, ``kind=ahead, persistent=True``; the column is another key."""
    wanted = dict(part.strip().split("=") for part in quote.cell.split(","))
    (key,) = quote.columns
    rows = [
        r
        for d in documents
        for r in d["results"]
        if all(str(r.get(name)) == value for name, value in wanted.items())
    ]
    if quote.quantity not in ("value", "thousands"):
        raise LookupError("no such quantity; ['value', 'thousands'] are")
    unit = 1000 if quote.quantity == "thousands" else 1
    return [r[key] / unit for r in rows if key in r], False


def _of_accuracy(quote: Quote, documents: list[Document]) -> Values:
    """The cell is ``policy=ta``; the difference is *equal* where the check says so.

    *% right* is the mean over seeds, and so is a difference. *points at most* is how far from 0 the
    interval of the difference reaches.
    """
    wanted = quote.cell.removeprefix("policy=")
    rows = [r for d in documents for r in d["results"] if r.get("policy") == wanted]
    column = quote.columns[0]
    other = quote.columns[-1]
    forms: dict[str, Callable[[Result], list[float]]] = {
        "% right": lambda r: [100 * r[column]["mean"]],
        "% right, each seed": lambda r: [100 * share for share in r[column]["each"]],
        "seconds": lambda r: r[column]["seconds"],
        "times": lambda r: [
            b / a for a, b in zip(r[column]["seconds"], r[other]["seconds"], strict=True)
        ],
        "points more": lambda r: [100 * (r[column]["mean"] - r[other]["mean"])],
        "points at most": lambda r: [100 * max(map(abs, r["interval"]))],
        "seeds": lambda r: [float(r["seeds"])],
        "equal": lambda r: r["interval"],
    }
    if quote.quantity not in forms:
        raise LookupError(f"no such quantity; {list(forms)} are")
    is_equal = quote.quantity == "equal" and all(r["ok"] for r in rows)
    return [value for r in rows for value in forms[quote.quantity](r)], is_equal


def _of_recipe(quote: Quote, documents: list[Document]) -> Values:
    """The cell is the number of epochs, ``90 epochs``, with a policy ``90 epochs, ta_wide``."""
    runs: dict[str, dict[tuple[str, int], Result]] = {}  # by loader, then by file and round
    for document in documents:
        for r in document["results"]:
            if "seconds" in r:
                cell = ", ".join(filter(None, [f"{r['epochs']} epochs", r["auto_augment"]]))
                if cell == quote.cell:
                    runs.setdefault(r["column"], {})[document["file"], r["round"]] = r
    ours = runs.get(quote.columns[0], {})
    theirs = runs.get(quote.columns[-1], {})
    if quote.quantity == "times":
        both = sorted(ours.keys() & theirs.keys())
        return [theirs[n]["seconds"] / ours[n]["seconds"] for n in both], False
    forms: dict[str, Callable[[Result], float]] = {
        "seconds": lambda r: r["seconds"],
        "minutes": lambda r: r["seconds"] / 60,
        "% right": lambda r: 100 * r["top1"],
    }
    if quote.quantity not in forms:
        raise LookupError(f"no such quantity; {[*forms, 'times']} are")
    return [forms[quote.quantity](r) for r in ours.values()], False


RESOLVERS: dict[str, Callable[[Quote, list[Document]], Values]] = {
    "train": _of_train,
    "policy": _of_policy,
    "scaling": _of_scaling,
    "sizes": _of_sizes,
    "edge": _of_rows,
    "decode": _of_rows,
    "accuracy": _of_accuracy,
    "recipe": _of_recipe,
}


def check(pages: list[Path], documents: list[Document]) -> list[str]:
    """Every problem of the pages, with the page's name."""
    return [f"{page.name}: {p}" for page in pages for p in problems(page.read_text(), documents)]
