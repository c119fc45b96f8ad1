"""Write the result tables and the plot from the JSON under benchmarks/results/.

python benchmarks/table.py           # benchmarks/README.md, docs/limits.md and docs/results.svg
python benchmarks/table.py --check   # fail where a page does not follow from the JSON

A file of train.py is one machine. Every machine counts. ``--check`` also fails where a file does
not follow its protocol (cells.py), and where a page quotes a number that does not follow from a
file or is within the noise of its cell (quotes.py).
"""

import argparse
import statistics
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import protocol
import quotes
import sweep
from cells import (
    CEILING,
    CONTROL,
    DALI,
    NO_MODEL,
    OURS,
    PLAIN,
    RESULTS,
    ROOT,
    TWIN,
    Cell,
    Document,
    Machine,
    Result,
    broken_rules,
    read,
    scaling_rates,
    sizes_rounds,
    title,
    train_cells,
    version,
)

PLOT = ROOT / "docs" / "results.svg"
# Pages whose numbers are checked.
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md"]
START = "<!-- results:start -->"
END = "<!-- results:end -->"
NAMES = {
    CEILING: "resident batch",
    OURS: "**gpuprefetch**",
    TWIN: "gpuprefetch, its twin",
    CONTROL: "gpuprefetch, `cpu_share=0.0`",
    DALI: "DALI",
    PLAIN: "DataLoader, torchvision v2 after PIL",
    "torchvision:backend=references": "DataLoader, as torchvision's references",
    "torchvision:backend=tensor": "DataLoader, torchvision v2 on tensors",
    "torchvision:backend=tensor,normalize=gpu": "the same, normalized on the GPU",
}
# Kinds of photos in the table of decoders: quality and shorter side, as decode.py names them.
DECODED = {"as they are": (None, None), "shorter side 256, quality 85": (85, 256)}
PACKAGES = {"torch": "torch", "nvidia-dali-cuda130": "DALI"}
# What a reader must know of each version's numbers.
VERSIONS = {
    1: "**Protocol 1.** Most cells are one round in one order. DALI has 8 threads, which nobody "
    "tuned for the machine, and the DataLoader is the slowest of torchvision's. *Noise* is what "
    "the default and `cpu_share=0.0` differed by where both were the same configuration; "
    "elsewhere it was not measured. *Settled* counts the processes whose rate stood still before "
    "it was measured. Each row has its commits; later ones were not measured.",
    2: "**Protocol 2** ([how we measure](../docs/measuring.md)): rounds in both orders until they "
    "are settled, DALI at the fastest setting that ran (*settings* says which sweep chose it), the "
    "fastest of torchvision's DataLoaders, and the noise of a pair of equal columns. A difference "
    "within it is *equal*. A cell without a noise was cut short in its first round: its ratios "
    "may be chance. Photos are told apart by how many different ones there are, and their mean "
    "size; rates of different photos do not compare.",
}


def of(documents: list[Document], benchmark: str) -> list[Document]:
    """Those of a benchmark, of training on a GPU; files of earlier scripts have no "commands"."""
    found = [d for d in documents if d["benchmark"] == benchmark and "commands" in d["metadata"]]
    return [d for d in found if d["metadata"]["gpu"] or benchmark != "train"]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def name(column: str) -> str:
    return NAMES.get(column, f"`{column}`")


def spread(values: list[float], digits: int = 0) -> str:
    """Median, from the lowest to the highest, and how many there are."""
    if not values:
        return ""
    middle = f"{statistics.median(values):,.{digits}f}"
    if len(values) == 1:
        return f"{middle} (n = 1, no spread)"
    ends = f"{min(values):,.{digits}f} to {max(values):,.{digits}f}"
    return f"{middle} ({ends}; n = {len(values)})"


def noise(cell: Cell) -> str:
    return "not measured" if cell.noise is None else f"{100 * cell.noise:.1f} %"


def commits(cell: Cell) -> str:
    return ", ".join(dict.fromkeys(m.commit for m in cell.machines))


def summary_table(found: list[Cell]) -> str:
    """Every cell of one version of the protocol, over its machines."""
    rows = []
    for cell in found:
        if not (rates := cell.rates(OURS)):
            continue
        pairs = [(OURS, CEILING), (cell.dali, CEILING)]
        pairs += [(OURS, other) for other in (cell.dali, cell.plain, CONTROL)]
        row = [cell.title, spread(rates), *[str(cell.compared(*pair)) for pair in pairs]]
        rows.append([*row, noise(cell), cell.state, cell.photos, commits(cell)])
    header = ["median (lowest to highest; rounds)", "images/s", "of the ceiling"]
    header += ["DALI, of the ceiling", "**times DALI's**", "**times a DataLoader's**"]
    header += ["times `cpu_share=0.0`", "noise", "settled", "photos", "commits"]
    return markdown(header, rows)


def costs_table(found: list[Cell]) -> str:
    """The cells with every loader, on one machine or several, and what each of them costs."""
    rows = []
    for cell in found:
        others = [cell.compared(OURS, other) for other in (cell.dali, cell.plain)]
        if not all(compared.values for compared in others):
            continue
        ceiling = str(cell.compared(OURS, CEILING)) or "-"
        row = [cell.title, spread(cell.rates(OURS)), ceiling, *map(str, others), noise(cell)]
        both = cell.with_columns(OURS, cell.dali)
        for key, digits in (("cpu_seconds_per_1000_images", 2), ("gpu_peak_gib", 1)):
            costs = [statistics.median(m.median(c, key) for m in both) for c in (OURS, cell.dali)]
            row.append(" / ".join(f"{cost:.{digits}f}" for cost in costs))
        rows.append([*row, cell.state, cell.photos, commits(cell)])
    header = ["median (lowest to highest; rounds)", "images/s", "of the ceiling"]
    header += ["**times DALI's**", "**times a DataLoader's**", "noise"]
    header += ["CPU s per 1,000 images / DALI's", "GPU GiB in all / DALI's"]
    header += ["settled", "photos", "commits"]
    return markdown(header, rows)


def beside_dali(cell: Cell) -> list[Machine]:
    """The machines that ran DALI as well, the worst against it first.

    Where some ran torchvision's DataLoader, too, only these. None for a cell that has no noise.
    """
    found = cell.with_columns(OURS, cell.dali) if cell.is_comparable else []

    def against_dali(machine: Machine) -> float:
        return statistics.median(protocol.ratios(machine.rates, OURS, cell.dali) or [1.0])

    return sorted([m for m in found if cell.plain in m.results] or found, key=against_dali)


def machines_table(found: list[Cell]) -> str:
    """Every column of every cell on every machine."""
    rows = [
        [f"{cell.title}: {name(column)}", *figures(cell, machine, column)]
        for cell in found
        for machine in cell.machines
        for column in sorted(machine.results, key=lambda c: [*NAMES, c].index(c))
    ]
    header = ["", "machine", "images/s", "of the ceiling", "slowest window, of the median"]
    header += ["CPU seconds per 1,000 images", "GPU memory beyond the ceiling's, GiB"]
    return markdown([*header, "ms between epochs, ms an edge, s to the first batch"], rows)


def figures(cell: Cell, machine: Machine, column: str) -> list[str]:
    """A row of a column on one machine."""
    results = list(machine.results[column].values())
    rates = list(machine.rates[column].values())
    ceiling = protocol.ratios(machine.rates, column, CEILING)
    speeds = [r["images_per_second"] for r in results]
    slowest = min(min(speed["values"]) / speed["median"] for speed in speeds)
    memory = max(r.get("gpu_peak_gib", 0.0) for r in results)
    resident = machine.results.get(CEILING)
    known = memory and (resident or cell.title.startswith(NO_MODEL))
    idle = max(r.get("gpu_peak_gib", 0.0) for r in resident.values()) if resident else 0.0
    cpu = machine.median(column, "cpu_seconds_per_1000_images")
    return [
        f"[{Path(machine.file).stem}](results/{machine.file})",
        spread(rates),
        f"{statistics.median(ceiling):.3f}" if ceiling else "",
        f"{slowest:.2f}",
        f"{cpu:.2f}",
        f"{memory - idle:.2f}" if known else "",
        _edges(machine, column),
    ]


def _edges(machine: Machine, column: str) -> str:
    between = machine.median(column, "between_epochs_ms")
    if not between:
        return ""
    edge = machine.median(column, "edge_ms") if machine.version > 1 else None
    cost = "-" if edge is None else f"{edge:.0f}"
    return f"{between:.0f}, {cost}, {machine.median(column, 'first_batch_seconds'):.1f}"


def settings_table(documents: list[Document]) -> str:
    """What DALI was given in each cell, and which sweep chose it; "" for protocol 1."""
    rows = {}
    for d in documents:
        for r in d["results"]:
            if "options" in r and r["column"].startswith(DALI):
                control = r.get("control")
                source = "not swept"
                if control:
                    source = f"{control['file']}, {control['model']} {control['mode']}"
                    source += "" if control["exact"] else ": another cell"
                options = ", ".join(f"{key}={value}" for key, value in r["options"].items())
                cell = title(r, d["metadata"]["affinity"])
                rows[cell, d["file"], r["column"]] = [f"{cell}: {r['column']}", options, source]
    return markdown(["DALI", "settings", "swept"], list(rows.values())) if rows else ""


def failures(documents: list[Document]) -> str:
    """The processes that failed or were skipped, and why: a column without a number has one."""
    found = [
        f"- {title(r, d['metadata']['affinity'])}: {name(r['column'])} on {d['file']}: {reason}"
        for d in documents
        for r in d["results"]
        if (reason := r.get("error") or r.get("skipped"))
    ]
    return "\n".join(["Failed or skipped:", "", *dict.fromkeys(found)]) if found else ""


def caption(documents: list[Document], links: str) -> str:
    """The machines of a table, the photos, the versions and the commands."""
    machines = []
    for d in documents:
        m = d["metadata"]
        versions = d["metadata"]["versions"]
        words = [m["gpu"] or "no GPU", m["cpu"], f"{m['affinity']} cores", m["commit"] or ""]
        words += ["edited"] * bool(m.get("dirty"))
        words += [f"{PACKAGES[key]} {versions[key]}" for key in PACKAGES if versions.get(key)]
        machines.append(f"- [{Path(d['file']).stem}]({links}{d['file']}): {', '.join(words)}")
    of_kind: dict[str, list[str]] = defaultdict(list)  # photos in words -> the files
    for d in documents:
        for kind, f in d.get("photos", {}).items():
            size = f"{f['mean_width']} x {f['mean_height']} and {f['mean_bytes'] / 1000:.0f} KB"
            words = f"{kind}: {f['distinct']:,} photos of {size} on average"
            of_kind[f"{words}, repeated to {f['files']:,} files"].append(Path(d["file"]).stem)
    kinds = [f"- {words}: {', '.join(files)}" for words, files in of_kind.items()]
    commands = dict.fromkeys(c for d in documents for c in d["metadata"]["commands"])
    listed = "\n".join(f"- `{command}`" for command in commands)
    parts = ["\n".join(machines), *["Photos\n\n" + "\n".join(kinds)] * bool(kinds)]
    return "\n\n".join([*parts, f"Measured with\n\n{listed}"])


def pivot(corner: str, cells: dict[tuple[str, str], str]) -> str:
    """A table of (row, column) to what stands there."""
    rows, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    lines = [[row, *(cells.get((row, column), "") for column in columns)] for row in rows]
    return markdown([corner, *columns], lines)


# kornia's policies do less than the others: they choose their ops once a batch.
ONCE_A_BATCH = {("kornia", name) for name in ("RandAugment", "TrivialAugmentWide", "AutoAugment")}
WALL = (
    "DALI's first number is wall clock, the other sides' are CUDA events: compare the numbers in "
    "brackets, which are of one kind."
)
ONCE = (
    "\\* kornia chooses the ops of its policies once for the whole batch, and all other sides for "
    "each image: these times are for less work, and `transforms` refuses these policies."
)


def policy_table(results: list[Result]) -> str:
    alike = any("gpu_ms" in r for r in results)
    cells = {}
    marked = False
    for r in results:
        text = "not there"
        if "median_ms" in r or "gpu_ms" in r:
            once = (r["side"], r["policy"]) in ONCE_A_BATCH
            marked |= once
            text = _milliseconds(r) + (r" \*" if once else "")
        cells[r["policy"], r["side"]] = text
    corner = "GPU / host / pipelined loop, ms" if alike else "ms of the list (ms of the host)"
    notes = [ONCE] * marked + [WALL] * (not alike)
    return "\n\n".join([pivot(corner, cells), *notes])


def _milliseconds(result: Result) -> str:
    if "gpu_ms" not in result:  # protocol 1
        return f"{result['median_ms']:.2f} ({result['host_ms']:.2f})"
    return " / ".join(f"{result[key]:.2f}" for key in ("gpu_ms", "host_ms", "loop_ms"))


def memory_table(results: list[dict[str, Any]]) -> str:
    cells = {}
    for r in results:
        if r["what"] == "largest" and r.get("batch_size"):  # a search may have been cut off
            least = "" if r["finished"] else "at least "
            column = f"{r['model']}, largest batch in {r['cap_gib']:g} GiB"
            cells[name(r["column"]), column] = f"{least}{r['batch_size']:,}"
        elif r["what"] == "idle" and "error" not in r:
            for key, column in (("held_gib", "GiB"), ("without_loader_gib", "GiB without it")):
                column = f"a finished validation loader holds, {column}"
                cells[name(r["column"]), column] = f"{r[key]:.3f}"
    return pivot("", cells)


def scaling_table(results: list[Result]) -> str:
    """Images per second of all processes, and in brackets the share of as many times one's."""
    rates = scaling_rates(results)
    cells = {}
    for (model, column, processes), found in sorted(rates.items(), key=lambda item: item[0][2]):
        rate = statistics.median(found)
        one = rates.get((model, column, 1))
        share = f" ({rate / (processes * statistics.median(one)):.3f})" if one else ""
        range_ = f", {min(found):,.0f} to {max(found):,.0f}" if len(found) > 1 else ""
        cells[f"{model}: {name(column)}", str(processes)] = f"{rate:,.0f}{share}{range_}"
    return pivot("images/s (of as many times one GPU's)", cells)


def views_table(results: list[dict[str, Any]]) -> str:
    """Images per second by the number of views, and in brackets the share of one view's."""
    rates: dict[str, list[float]] = defaultdict(list)
    for r in results:
        if "error" not in r:
            rates[r["column"]].append(r["images_per_second"]["median"])
    means = {column: statistics.fmean(found) for column, found in rates.items()}
    row = [f"{rate:,.0f} ({rate / means.get('1', rate):.3f})" for rate in means.values()]
    return markdown(["views of each image", *means], [["images/s (of one view's)", *row]])


def sizes_table(results: list[Result]) -> str:
    """Images per second of results of their own sizes, by those beside them, and what they cost."""
    by_column: dict[tuple[str, str, int], list[Result]] = defaultdict(list)
    for r in results:
        if "images_per_second" in r:
            by_column[r.get("model", "none"), r["column"], r["batch_size"]].append(r)
    by_model = sizes_rounds(results)
    rows = []
    for (model, column, batch_size), found in by_column.items():
        first = found[0]
        kind = column if model == "none" else f"{column}, `{model}`"
        others = [
            f"{compared} of {other}"
            for other in first.get("beside", [])
            if (compared := protocol.compared(by_model[model].items(), column, other, None)).values
        ]
        cost = statistics.median(r["cpu_seconds_per_1000_images"] for r in found)
        rows.append(
            [
                f"{kind}: `{first['resize']}`",
                f"{first['pixels']:,}",
                str(batch_size),
                spread([protocol.rate_of(r) for r in found]),
                ", ".join(others),
                f"{cost:.2f}",
            ]
        )
    header = ["", "pixels of a result", "batch", "images/s", "images/s by another's"]
    header.append("CPU s per 1,000 images")
    return "\n\n".join([markdown(header, rows), *filter(None, [sizes_failures(results)])])


def sizes_failures(results: list[Result]) -> str:
    """The columns that were skipped or failed, and why."""
    reasons = [
        f"- {r['column']}, {r['file']}: {reason}"
        for r in results
        if (reason := r.get("error") or r.get("skipped"))
    ]
    return "\n".join(["Failed or skipped:", "", *dict.fromkeys(reasons)]) if reasons else ""


def recipe_table(results: list[Result]) -> str:
    """The seconds of whole trainings, and how good the networks are."""
    by_loader: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for r in results:
        if "seconds" in r:
            policy = f", {r['auto_augment']}" if r["auto_augment"] else ""
            recipe = f"{r['model']}, {r['epochs']} epochs{policy}"
            by_loader[recipe, r["column"]].append(r)
    rows = []
    for (recipe, column), found in by_loader.items():
        loader = NAMES[OURS] if column == OURS else "DataLoader, PIL and transforms v2"
        seconds = spread([r["seconds"] for r in found])
        right = spread([100 * r["top1"] for r in found], 1)
        rows.append([f"{recipe}: {loader}", seconds, right])
    return markdown(["the ImageNet example", "seconds in all", "top-1, %"], rows)


def decode_table(documents: list[Document]) -> str:
    """The rates of each GPU's decoder alone, and the files that they are from."""
    gpus: dict[str, list[Document]] = defaultdict(list)
    for document in of(documents, "decode"):
        if gpu := document["metadata"]["gpu"]:
            gpus[gpu].append(document)
    rows = [row for gpu, found in sorted(gpus.items()) for row in _decoder_rows(gpu, found)]
    header = ["GPU", "JPEG engines", "photos", "by engines, images/s", "by CUDA kernels, images/s"]
    return markdown([*header, "file"], rows) if rows else ""


def _decoder_rows(gpu: str, found: list[Document]) -> Iterator[list[str]]:
    """A row for each kind of photos. On a GPU without engines ``auto`` stands for CUDA kernels."""
    results = [r for d in found for r in d["results"] if "images_per_second" in r]
    known = {r["engines"] for r in results if r.get("engines") is not None}
    has_engines = known != {0}  # earlier files have no count, and are of GPUs with engines
    count = str(max(known, default=0) or "yes") if has_engines else "none"
    drivers = ", ".join(dict.fromkeys(str(d["metadata"]["driver"]) for d in found))
    links = ", ".join(f"[{d['file']}](../benchmarks/results/{d['file']})" for d in found)
    for kind, (quality, shortest) in DECODED.items():
        those = [r for r in results if (r["quality"], r["shortest"]) == (quality, shortest)]
        if not those:
            continue
        size = statistics.median(r["bytes_per_photo"] for r in those) / 1000
        by_engines = [r for r in those if r["engine"] == "auto" and has_engines]
        by_kernels = [r for r in those if r not in by_engines]
        sides = (by_engines, by_kernels)
        rates = [spread([r["images_per_second"] for r in side]) or "-" for side in sides]
        yield [f"{gpu}, driver {drivers}", count, f"{kind}, {size:.0f} KB", *rates, links]


def sweep_table(results: list[Result]) -> str:
    """Every setting of DALI that was tried, the fastest of each cell first."""
    rows = []
    for (model, mode, engine, cores), rates in sweep.by_cell(results).items():
        where = NO_MODEL if model == "none" else f"{model} {mode}"
        where += f", {cores} cores" + (", no JPEG engines" if engine == "none" else "")
        chosen, _ = sweep.best(rates)
        order = sorted(rates, key=lambda c: (c != chosen, -statistics.fmean(rates[c])))
        for column in order:
            label = f"**`{column}`**" if column == chosen else f"`{column}`"
            rows.append([f"{where}: {label}", spread(rates[column])])
    return markdown(["", "images/s"], rows)


Table = Callable[[list[Result]], str]
OTHERS: dict[str, tuple[str, Table]] = {
    "sweep": ("### DALI's settings", sweep_table),
    "policy": ("### Random policies", policy_table),
    "memory": ("### GPU memory", memory_table),
    "scaling": ("### Several GPUs", scaling_table),
    "views": ("### Several views of one decode", views_table),
    "sizes": ("### Results of their own size", sizes_table),
    "recipe": ("### A whole training", recipe_table),
}


def by_version(documents: list[Document]) -> dict[int, list[Document]]:
    """The documents of training by protocol, the newest first."""
    found: dict[int, list[Document]] = defaultdict(list)
    for document in of(documents, "train"):
        found[version(document)].append(document)
    return dict(sorted(found.items(), reverse=True))


def all_results(documents: list[Document]) -> str:
    """The block of benchmarks/README.md."""
    parts = []
    for number, found in by_version(documents).items():
        measured = train_cells(found)
        tables = [costs_table(measured), summary_table(measured), machines_table(measured)]
        tables += filter(None, [settings_table(found), failures(found)])
        heading = f"### Training, protocol {number}"
        parts += [heading, VERSIONS[number], *tables, caption(found, "results/")]
    for benchmark, (heading, table) in OTHERS.items():
        groups: dict[str, list[Document]] = defaultdict(list)  # by GPU
        for document in of(documents, benchmark):
            groups[document["metadata"]["gpu"] or ""].append(document)
        for found in groups.values():
            results = [{**r, "file": d["file"]} for d in found for r in d["results"]]
            parts += [heading, table(results), caption(found, "results/")]
    return "\n\n".join(parts)


def replace_block(text: str, block: str, path: Path) -> str:
    """``text`` with ``block`` between the two markers; as it is where there is no block."""
    if text.count(START) != 1 or text.count(END) != 1:
        raise ValueError(f"{path.name} must contain {START} and {END}, once each")
    head, _, rest = text.partition(START)
    return f"{head}{START}\n{block}\n{END}{rest.partition(END)[2]}" if block else text


def refresh(blocks: dict[Path, str], *, check: bool) -> None:
    """Write the blocks into their pages, or with ``check`` fail where one says something else."""
    for path, block in blocks.items():
        written = replace_block(path.read_text(), block, path)
        if check and written != path.read_text():
            sys.exit(f"stale: {path.name}; run python {sys.argv[0]}")
        path.write_text(written)


LABELS = {PLAIN: "DataLoader, torchvision", DALI: "DALI", OURS: "gpuprefetch"}


def draw(found: list[Cell], path: Path) -> None:
    """Bars of each cell with DALI and this library, of the machine that is the worst against it.

    On the left images per second, on the right the CPU seconds that 1,000 images cost.
    """
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "gpuprefetch", "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    colors = {PLAIN: "#d3c4a4", DALI: "#8aa39b", OURS: "#2a6f4e"}
    shown = [(cell, machines[0]) for cell in found if (machines := beside_dali(cell))]
    height = 0.75 * len(shown) + 1.2
    figure, (rates, costs) = plt.subplots(
        1, 2, figsize=(8, height), layout="constrained", sharey=True, width_ratios=(2, 1)
    )
    labeled: set[str] = set()  # loaders that the legend has
    for place, (cell, machine) in enumerate(shown):
        for number, (loader, color) in enumerate(colors.items()):
            at = place + 0.27 * number
            column = {PLAIN: cell.plain, DALI: cell.dali}.get(loader, loader)
            if column not in machine.results:
                rates.text(0, at, " not run", va="center", fontsize=8, color="#777777")
                continue
            label = "" if loader in labeled else LABELS[loader]
            labeled.add(loader)
            cost = machine.median(column, "cpu_seconds_per_1000_images")
            rate = statistics.median(machine.paired(column, OURS))
            for axis, value, text in (
                (rates, rate, f"{rate:,.0f}"),
                (costs, cost, f"{cost:.2f}"),
            ):
                axis.barh(at, value, 0.26, color=color, label=label if axis is rates else "")
                ink = "white" if loader == OURS and axis is rates else "black"
                start = 0 if axis is rates else value
                axis.text(start, at, f" {text}", va="center", fontsize=8, color=ink)
        if CEILING in machine.results:
            ends = place - 0.16, place + 0.7
            label = "" if any(CEILING in m.results for _, m in shown[:place]) else "no loading"
            at = [statistics.median(machine.paired(CEILING, OURS))] * 2
            rates.plot(at, ends, "--", color="black", linewidth=1, label=label)
    titles = [textwrap.fill(cell.title, 32) for cell, _ in shown]
    names = [f"{name}\n{where(*each)}" for name, each in zip(titles, shown, strict=True)]
    rates.set_yticks([place + 0.27 for place in range(len(shown))], names)
    rates.set(xlabel="images/s")
    rates.xaxis.set_major_formatter("{x:,.0f}")
    rates.locator_params(axis="x", nbins=5)
    rates.margins(y=0.02)
    rates.invert_yaxis()
    costs.set(xlabel="CPU s per 1,000 images")
    costs.margins(x=0.15)
    handles = dict(zip(*reversed(rates.get_legend_handles_labels()), strict=True))
    order = [label for label in [*LABELS.values(), "no loading"] if label in handles]
    known = [handles[label] for label in order]
    figure.legend(known, order, loc="outside upper center", ncols=4, frameon=False)
    for axis in (rates, costs):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def where(cell: Cell, machine: Machine) -> str:
    """Card, cores, rounds and noise: ``H100, 16 cores, n = 2, noise 1 %``."""
    words = [machine.card, f"{machine.cores} cores", f"n = {len(machine.results[OURS])}"]
    words += [f"noise {noise(cell)}"] * (cell.noise is not None)
    return ", ".join(words)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(words)
    documents = read(RESULTS)
    blocks = {ROOT / "benchmarks" / "README.md": all_results(documents)}
    blocks |= {ROOT / "docs" / "limits.md": decode_table(documents)}
    refresh(blocks, check=args.check)
    if args.check:
        complain(documents)
    elif versions := by_version(documents):
        draw(train_cells(next(iter(versions.values()))), PLOT)


def complain(documents: list[Document]) -> None:
    """Fail where a file does not follow its protocol, or a page its files."""
    pages = [*PAGES, *sorted((ROOT / "docs").glob("*.md"))]
    found = [f"{d['file']}: {rule}" for d in documents for rule in broken_rules(d)]
    found += quotes.check(pages, documents)
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
