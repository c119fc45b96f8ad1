"""Write the result tables and the plot from the JSON under benchmarks/results/.

python benchmarks/table.py           # README.md, benchmarks/README.md and docs/results.svg
python benchmarks/table.py --check   # fail where a README does not say what the JSON says

A file of train.py is one machine. Every machine counts: a table has the median and the worst.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLOT = ROOT / "docs" / "results.svg"
START = "<!-- results:start -->"
END = "<!-- results:end -->"
OURS = "gpuprefetch"
CONTROL = "gpuprefetch:cpu_share=0.0"
DALI = "dali"
PLAIN = "torchvision"
POLICIES = {"ra": "RandAugment", "ta": "TrivialAugmentWide", "aa": "AutoAugment"}
NAMES = {
    "synthetic": "resident batch",
    OURS: "**gpuprefetch**",
    CONTROL: "gpuprefetch, `cpu_share=0.0`",
    DALI: "DALI, tuned",
    PLAIN: "DataLoader, torchvision v2",
}
NO_MODEL = "no model"  # the loader alone
PACKAGES = {"torch": "torch", "nvidia-dali-cuda130": "DALI"}

Document = dict[str, Any]
Figures = dict[str, float]  # of a column of a cell on one machine
Machines = dict[str, dict[str, Figures]]  # file -> column -> figures


def read(folder: Path) -> list[Document]:
    """The documents of the benchmarks and checks, by time."""
    documents = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        if "benchmark" in document and "metadata" in document:
            documents.append({**document, "file": path.name})
    return sorted(documents, key=lambda document: document["metadata"]["utc"])


def of(documents: list[Document], benchmark: str) -> list[Document]:
    """Those of a benchmark, of training on a GPU; files of earlier scripts have no "commands"."""
    found = [d for d in documents if d["benchmark"] == benchmark and "commands" in d["metadata"]]
    return [d for d in found if d["metadata"]["gpu"] or benchmark != "train"]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def name(column: str) -> str:
    return NAMES.get(column, f"`{column}`")


def title(result: dict[str, Any], affinity: int) -> str:
    """A cell in words: model and mode, and what is not as usual."""
    no_model = result["model"] == "none"
    words = [NO_MODEL if no_model else f"{result['model']} {result['mode']}"]
    words.append(f"batch {result['batch_size']}")
    words += ["12 megapixels"] * (result["photos"] == "large")
    words += ["no JPEG engines"] * (result["engine"] == "none")
    words += [f"{result['cores']} cores"] * (result["cores"] != affinity)
    words += [f"{result['epochs']} short epochs"] * bool(result["epochs"])
    words += ["default stream"] * (result["stream"] == "default")
    words += ["loss read each step"] * (result["loop"] == "item")
    words += filter(None, [POLICIES.get(split(result["column"])[1])])
    return ", ".join(words)


def split(column: str) -> tuple[str, str]:
    """A column without its policy, and the policy."""
    loader, _, options = column.partition(":")
    words = {key: value for key, _, value in (w.partition("=") for w in options.split(",") if w)}
    policy = words.pop("policy", "")
    rest = ",".join(f"{key}={value}" for key, value in words.items())
    return f"{loader}:{rest}" if rest else loader, policy


def train_cells(documents: list[Document]) -> dict[str, Machines]:
    """Title of a cell -> machine -> column -> figures, over all rounds."""
    rounds: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for document in of(documents, "train"):
        for r in document["results"]:
            if "error" not in r and ": " not in r["column"]:  # of another version
                cell = title(r, document["metadata"]["affinity"])
                rounds[cell, document["file"], split(r["column"])[0]].append(r)
    cells: dict[str, Machines] = {}
    for (cell, machine, column), results in rounds.items():
        speeds = [r["images_per_second"] for r in results]
        figures = {
            "rate": statistics.fmean(speed["median"] for speed in speeds),
            "slowest": min(min(speed["values"]) / speed["median"] for speed in speeds),
            "cpu": statistics.fmean(r["cpu_seconds_per_1000_images"] for r in results),
            "memory": max(r.get("gpu_peak_gib", 0.0) for r in results),
            "between": statistics.fmean(r.get("between_epochs_ms", 0.0) for r in results),
            "first": statistics.fmean(r.get("first_batch_seconds", 0.0) for r in results),
        }
        cells.setdefault(cell, {}).setdefault(machine, {})[column] = figures
    return dict(sorted(cells.items(), key=lambda item: (item[0].startswith(NO_MODEL), item[0])))


def ratios(machines: Machines, column: str, other: str) -> list[float]:
    """Of the rates on each machine that has both."""
    both = [m for m in machines.values() if column in m and other in m]
    return [m[column]["rate"] / m[other]["rate"] for m in both]


def spread(values: list[float]) -> str:
    """The median and the worst."""
    return f"{statistics.median(values):.2f} / {min(values):.2f}" if values else ""


def summary_table(cells: dict[str, Machines]) -> str:
    rows = []
    for cell, machines in cells.items():
        if not (rates := [m[OURS]["rate"] for m in machines.values() if OURS in m]):
            continue
        compared = [(OURS, "synthetic"), (DALI, "synthetic")]
        compared += [(OURS, other) for other in (PLAIN, DALI, CONTROL)]
        row = [cell, str(len(rates)), f"{statistics.median(rates):,.0f}"]
        rows.append(row + [spread(ratios(machines, *pair)) for pair in compared])
    header = ["median / worst machine", "machines", "images/s", "of the ceiling"]
    header += ["DALI, of the ceiling", "**times a DataLoader's**"]
    header += ["**times DALI's**", "times `cpu_share=0.0`"]
    return markdown(header, rows)


def whole(machines: Machines) -> dict[str, dict[str, Figures]]:
    """The machines that ran every loader of the front page, the worst against DALI first."""
    found = {k: m for k, m in machines.items() if {OURS, DALI, PLAIN} <= m.keys()}
    return dict(sorted(found.items(), key=lambda item: ratios({"": item[1]}, OURS, DALI)))


def front_table(cells: dict[str, Machines]) -> str:
    """The cells with every loader, on one machine or several, and what each of them costs."""
    rows = []
    for cell, machines in cells.items():
        if not all(ratios(machines, OURS, other) for other in (PLAIN, DALI)):
            continue
        ours = [m[OURS] for m in machines.values() if OURS in m]
        row = [cell, str(len(ours)), f"{statistics.median(f['rate'] for f in ours):,.0f}"]
        row += [spread(ratios(machines, OURS, o)) or "-" for o in ("synthetic", PLAIN, DALI)]
        both = [m for m in machines.values() if {OURS, DALI} <= m.keys()]
        for figure, digits in (("cpu", 2), ("memory", 1)):
            costs = [statistics.median(m[c][figure] for m in both) for c in (OURS, DALI)]
            row.append(" / ".join(f"{cost:.{digits}f}" for cost in costs))
        rows.append(row)
    header = ["median / worst machine", "machines", "images/s", "of the ceiling"]
    header += ["**times a DataLoader's**", "**times DALI's**"]
    return markdown([*header, "CPU s per 1,000 images / DALI's", "GPU GiB in all / DALI's"], rows)


def machines_table(cells: dict[str, Machines]) -> str:
    """Every column of every cell on every machine."""
    rows = []
    for cell, machines in cells.items():
        for machine, columns in machines.items():
            ceiling = columns.get("synthetic")
            for column, f in sorted(
                columns.items(), key=lambda item: [*NAMES, item[0]].index(item[0])
            ):
                of_ceiling = f"{f['rate'] / ceiling['rate']:.3f}" if ceiling else ""
                known = f["memory"] and (ceiling or cell.startswith(NO_MODEL))
                beyond = f["memory"] - (ceiling["memory"] if ceiling else 0.0)
                epochs = f"{f['between']:.0f}, {f['first']:.1f}" if f["between"] else ""
                figures = [f"{f['rate']:,.0f}", of_ceiling, f"{f['slowest']:.2f}"]
                figures += [f"{f['cpu']:.2f}", f"{beyond:.2f}" if known else "", epochs]
                where = f"[{Path(machine).stem}](results/{machine})"
                rows.append([f"{cell}: {name(column)}", where, *figures])
    header = ["", "machine", "images/s", "of the ceiling", "slowest window, of the median"]
    header += ["CPU seconds per 1,000 images", "GPU memory beyond the ceiling's, GiB"]
    return markdown([*header, "ms between epochs, s to the first batch"], rows)


def failures(documents: list[Document]) -> str:
    """The processes that failed, and how: a column without a number has one of them."""
    found = [
        f"- {title(r, d['metadata']['affinity'])}: {name(r['column'])} on {d['file']}: {r['error']}"
        for d in of(documents, "train")
        for r in d["results"]
        if "error" in r
    ]
    return "\n".join(["Failed:", "", *dict.fromkeys(found)]) if found else ""


def caption(documents: list[Document], links: str) -> str:
    """The machines of a table, the photos, the versions and the commands."""
    machines = []
    for d in documents:
        m = d["metadata"]
        versions = d["metadata"]["versions"]
        words = [m["gpu"] or "no GPU", m["cpu"], f"{m['affinity']} cores", m["commit"] or ""]
        words += [f"{PACKAGES[key]} {versions[key]}" for key in PACKAGES if versions.get(key)]
        machines.append(f"- [{Path(d['file']).stem}]({links}{d['file']}): {', '.join(words)}")
    photos = {kind: f for each in documents for kind, f in each.get("photos", {}).items()}
    kinds = [
        f"{kind}: {f['distinct']} photos of {f['mean_width']} x {f['mean_height']} and "
        f"{f['mean_bytes'] / 1000:.0f} KB on average, repeated to {f['files']:,} files"
        for kind, f in photos.items()
    ]
    commands = dict.fromkeys(c for d in documents for c in d["metadata"]["commands"])
    listed = "\n".join(f"- `{command}`" for command in commands)
    return "\n\n".join(["\n".join(machines), *kinds, f"Measured with\n\n{listed}"])


def pivot(corner: str, cells: dict[tuple[str, str], str]) -> str:
    """A table of (row, column) to what stands there."""
    rows, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    lines = [[row, *(cells.get((row, column), "") for column in columns)] for row in rows]
    return markdown([corner, *columns], lines)


# kornia's policies do less than the others: they choose their ops once a batch.
ONCE_A_BATCH = {("kornia", name) for name in ("RandAugment", "TrivialAugmentWide", "AutoAugment")}
ONCE = (
    "\\* kornia chooses the ops of its policies once for the whole batch, and all other sides for "
    "each image: these times are for less work, and `transforms` refuses these policies."
)


def policy_table(results: list[dict[str, Any]]) -> str:
    cells = {}
    marked = False
    for r in results:
        text = "not there"
        if "median_ms" in r:
            once = (r["side"], r["policy"]) in ONCE_A_BATCH
            marked |= once
            text = f"{r['median_ms']:.2f} ({r['host_ms']:.2f})" + (r" \*" if once else "")
        cells[r["policy"], r["side"]] = text
    written = pivot("GPU ms of the list (ms of the host)", cells)
    return f"{written}\n\n{ONCE}" if marked else written


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


def scaling_table(results: list[dict[str, Any]]) -> str:
    """Images per second of all processes, and in brackets the share of as many times one's."""
    rates = {
        (r["model"], r["column"], r["processes"]): r["images_per_second"]["median"] for r in results
    }
    cells = {}
    for (model, column, processes), rate in sorted(rates.items(), key=lambda item: item[0][2]):
        one = rates.get((model, column, 1))
        share = f" ({rate / (processes * one):.3f})" if one else ""
        cells[f"{model}: {name(column)}", str(processes)] = f"{rate:,.0f}{share}"
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


OTHERS = {
    "policy": ("### Random policies", policy_table),
    "memory": ("### GPU memory", memory_table),
    "scaling": ("### Several GPUs", scaling_table),
    "views": ("### Several views of one decode", views_table),
}


def front_page(documents: list[Document]) -> str:
    """The block of README.md; "" where nothing has been measured yet."""
    if not (cells := train_cells(documents)):
        return ""
    plot = "![Images per second with each loader](docs/results.svg)"
    machines = [d["metadata"]["gpu"] or "no GPU" for d in of(documents, "train")]
    counted = ", ".join(f"{machines.count(gpu)} x {gpu}" for gpu in dict.fromkeys(machines))
    where = f"Machines: {counted}. [Every machine and command](benchmarks/README.md#results)."
    return "\n\n".join([plot, front_table(cells), where])


def all_results(documents: list[Document]) -> str:
    """The block of benchmarks/README.md."""
    parts = []
    if cells := train_cells(documents):
        tables = [summary_table(cells), machines_table(cells)]
        tables += filter(None, [failures(documents)])
        parts += ["### Training", *tables, caption(of(documents, "train"), "results/")]
    for benchmark, (heading, table) in OTHERS.items():
        groups: dict[str, list[Document]] = defaultdict(list)  # by GPU
        for document in of(documents, benchmark):
            groups[document["metadata"]["gpu"] or ""].append(document)
        for found in groups.values():
            results = [result for document in found for result in document["results"]]
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


def draw(cells: dict[str, Machines], path: Path) -> None:
    """Bars for each cell of which a machine ran all loaders: of the worst of these machines."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "gpuprefetch", "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    colors = {PLAIN: "#d3c4a4", DALI: "#8aa39b", OURS: "#2a6f4e"}
    shown = {cell: next(iter(found.items())) for cell, m in cells.items() if (found := whole(m))}
    figure, axis = plt.subplots(figsize=(8, 0.75 * len(shown) + 1), layout="constrained")
    for place, (_, columns) in enumerate(shown.values()):
        for number, (column, color) in enumerate(colors.items()):
            at = place + 0.27 * number
            rate = columns[column]["rate"]
            label = "" if place else name(column).replace("*", "")
            axis.barh(at, rate, 0.26, color=color, label=label)
            ink = "white" if column == OURS else "black"
            axis.text(0, at, f" {rate:,.0f}", va="center", fontsize=8, color=ink)
        if ceiling := columns.get("synthetic"):
            ends = place - 0.16, place + 0.7
            label = "" if place else "no loading at all"
            axis.plot([ceiling["rate"]] * 2, ends, "--", color="black", linewidth=1, label=label)
    names = [f"{cell}\n{Path(machine).stem}" for cell, (machine, _) in shown.items()]
    axis.set_yticks([place + 0.27 for place in range(len(shown))], names)
    axis.set(xlabel="images/s")
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(words)
    documents = read(RESULTS)
    front = front_page(documents)
    everything = all_results(documents)
    pages = {ROOT / "README.md": front, ROOT / "benchmarks" / "README.md": everything}
    refresh(pages, check=args.check)
    if not args.check and (cells := train_cells(documents)):
        draw(cells, PLOT)


if __name__ == "__main__":
    main()
