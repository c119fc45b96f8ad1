"""Write the result tables and the plot from the JSON under benchmarks/results/.

python benchmarks/table.py           # README.md, benchmarks/README.md and docs/results.svg
python benchmarks/table.py --check   # fail where a README does not say what the JSON says
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import train

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLOT = ROOT / "docs" / "results.svg"
START, END = "<!-- results:start -->", "<!-- results:end -->"
NAMES = {
    "synthetic": "resident batch: the ceiling",
    "ready": "gpuprefetch around ready tensors",
    "gpuprefetch": "**gpuprefetch**",
    "dali": "DALI, as shipped",
    "dali-tuned": "DALI, tuned",
    "torchvision": "DataLoader, torchvision v2",
    "torchvision:backend=tensor": "DataLoader, torchvision v2, `decode_image`",
    "timm": "timm PrefetchLoader",
}
COLORS = {"gpuprefetch": "#2a6f4e", "dali-tuned": "#8aa39b", "dali": "#b9c8c2"}

Document = dict[str, Any]
Row = dict[str, Any]


def name(loader: str) -> str:
    base, _, options = loader.partition(":")
    return NAMES.get(loader) or f"{NAMES.get(base, base)}, `{options}`".replace("**", "")


def order(loader: str) -> tuple[int, str]:
    names = list(NAMES)
    base = loader.partition(":")[0]
    return (names.index(base) if base in names else len(names), loader)


def read(folder: Path) -> list[Document]:
    """Documents by time; where two measured the same, the later one counts."""
    documents = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        if "benchmark" in document and "metadata" in document:
            documents.append({**document, "file": path.name})
    return sorted(documents, key=lambda document: document["metadata"]["utc"])


def groups(documents: list[Document], benchmark: str) -> list[list[Document]]:
    """Documents of a benchmark that belong into one table: same GPU, cores and batch size."""
    found: dict[tuple[Any, ...], list[Document]] = {}
    for document in documents:
        if document["benchmark"] == benchmark:
            metadata, parameters = document["metadata"], document["parameters"]
            key = (metadata["gpu"] or "", metadata["affinity"], parameters["batch_size"])
            found.setdefault(key, []).append(document)
    return [found[key] for key in sorted(found, reverse=True)]


def foremost(documents: list[Document]) -> list[Document]:
    """The training runs to show first: on the machine with the most cores, most models."""
    found = groups(documents, "train")
    cores = max((group[0]["metadata"]["affinity"] for group in found), default=0)
    largest = [group for group in found if group[0]["metadata"]["affinity"] == cores]
    return max(largest, key=lambda group: len(train_rows(group)), default=[])


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def caption(documents: list[Document], links: str, *, latest: bool = False) -> str:
    """Where and how a table was measured; with the command of the ``latest`` document alone."""
    newest = documents[-1]
    metadata, photos, parameters = newest["metadata"], newest["photos"], newest["parameters"]
    versions = metadata["versions"]
    packages = {"torch": "torch", "nvidia-dali-cuda130": "DALI", "timm": "timm"}
    named = [f"{label} {versions[key]}" for key, label in packages.items() if versions.get(key)]
    files = ", ".join(f"[{d['file']}]({links}{d['file']})" for d in documents)
    shown = documents[-1:] if latest else documents
    commands = ", ".join(dict.fromkeys(f"`{d['metadata']['command']}`" for d in shown))
    alike = " and the like, each in its file" if len(shown) < len(documents) else ""
    return (
        f"{metadata['gpu'] or metadata['cpu']}, {metadata['affinity']} CPU cores, batch "
        f"{parameters['batch_size']}, bf16, channels_last, {photos['files']:,} files "
        f"({photos['distinct']} photos of {photos['mean_width']} x {photos['mean_height']} and "
        f"{photos['mean_bytes'] / 1000:.0f} KB on average, repeated), {', '.join(named)}; "
        f"from {files}, measured with {commands}{alike}."
    )


def train_rows(documents: list[Document]) -> dict[tuple[str, str], dict[str, Row]]:
    """(model, mode) to loader to its row; a later document replaces an earlier one's loader."""
    table: dict[tuple[str, str], dict[str, Row]] = {}
    for document in documents:
        for row in train.summary(document["results"]):
            table.setdefault((row["model"], row["mode"]), {})[row["loader"]] = row
    modes = list(train.MODES)
    return {key: table[key] for key in sorted(table, key=lambda key: (key[0], modes.index(key[1])))}


def rate(row: Row | None) -> str:
    if row is None:
        return ""
    ratio = f" ({row['ratio']:.3f})" if "ratio" in row and row["loader"] != "synthetic" else ""
    return f"{row['rate']:,.0f}{ratio}"


def train_table(documents: list[Document]) -> str:
    """Images per second and, in brackets, the ratio to the ceiling of the same run."""
    table = train_rows(documents)
    columns = list(table)
    present = sorted({loader for rows in table.values() for loader in rows}, key=order)
    rows = [[name(loader), *(rate(table[c].get(loader)) for c in columns)] for loader in present]
    return markdown(["images/s (of the ceiling)", *(" ".join(c) for c in columns)], rows)


def details_table(documents: list[Document]) -> str:
    """What else a step costs: waiting, spread, memory, CPU."""
    lines = []
    for (model, mode), rows in train_rows(documents).items():
        for loader in sorted(rows, key=order):
            best = rows[loader]["best"]
            ceiling = rows.get("synthetic", rows[loader])["best"]
            peak, floor = best.get("gpu_peak_gib"), ceiling.get("gpu_peak_gib")
            speed = best["images_per_second"]
            options = ", ".join(f"{key}={value}" for key, value in best["options"].items())
            chosen = f" ({options})" if options and ":" not in loader else ""  # else it is the name
            lines.append(
                [
                    f"{model} {mode}: {name(loader)}{chosen}",
                    f"{speed['median']:,.0f}",
                    f"{speed['q1']:,.0f} to {speed['q3']:,.0f}",
                    f"{best['wait_ms_per_step']:.2f}",
                    "" if peak is None else f"{peak:.2f}",
                    "" if peak is None or floor is None else f"{peak - floor:+.2f}",
                    f"{best['cpu_seconds_per_1000_images']:.2f}",
                ]
            )
    header = ["", "images/s", "quartiles", "wait, ms per step", "peak GPU memory, GiB"]
    header += ["beyond the ceiling's, GiB", "CPU seconds per 1,000 images"]
    return markdown(header, lines)


def runs_table(documents: list[Document]) -> str:
    """Each training run on its own: how far beside DALI, tuned, and with how much memory."""
    lines = []
    for document in documents:
        for (model, mode), rows in train_rows([document]).items():
            dali = [row for loader, row in rows.items() if loader.startswith("dali-tuned")]
            if "synthetic" not in rows or "gpuprefetch" not in rows:
                continue
            ours, other = rows["gpuprefetch"], max(dali, key=lambda row: row["rate"], default=None)
            floor = rows["synthetic"]["best"].get("gpu_peak_gib")
            beyond = [
                f"{row['best']['gpu_peak_gib'] - floor:.2f}" if row and floor is not None else ""
                for row in (ours, other)
            ]
            lines.append(
                [
                    f"[{document['metadata']['commit']}](results/{document['file']})",
                    f"{model} {mode}",
                    f"{ours['ratio']:.3f}",
                    f"{other['ratio']:.3f}" if other else "",
                    f"{ours['rate'] / other['rate']:.3f}" if other else "",
                    *beyond,
                ]
            )
    names = [name(loader).replace("**", "") for loader in ("gpuprefetch", "dali-tuned")]
    header = ["version", "", *(f"{each}, of the ceiling" for each in names), "times DALI's"]
    return markdown([*header, *(f"{each}, GiB beyond it" for each in names)], lines)


def loader_table(documents: list[Document]) -> str:
    best: dict[tuple[str, str], Row] = {}
    for document in documents:
        for result in document["results"]:
            if "error" in result:
                continue
            label = result["loader"]
            if result["stage"] != "all" and result["options"]:
                label += ", " + ", ".join(f"{k} {v}" for k, v in result["options"].items())
            key, speed = (result["stage"], label), result["images_per_second"]["median"]
            same = best.get(key)
            tuned = same is not None and same["document"] is document
            if not tuned or speed > same["images_per_second"]["median"]:
                best[key] = {**result, "document": document}
    rows = [
        [
            name(label) if stage == "all" else f"stage: {label}",
            f"{best[stage, label]['images_per_second']['median']:,.0f}",
            f"{best[stage, label]['cpu_seconds_per_1000_images']:.2f}",
        ]
        for stage, label in sorted(best, key=lambda key: (key[0] != "all", order(key[1])))
    ]
    return markdown(["no model", "images/s", "CPU seconds per 1,000 images"], rows)


def _largest(result: dict[str, Any] | None) -> str:
    """What a search for the largest batch found, which may have been cut off."""
    if result is None or not result.get("batch_size"):
        return ""
    least = "" if result.get("finished", True) else "at least "
    return f"{least}{result['batch_size']:,}"


def memory_tables(documents: list[Document]) -> list[str]:
    results = [result for document in documents for result in document["results"]]
    largest = {(r["model"], r["loader"]): r for r in results if r["what"] == "largest"}
    idle = {r["loader"]: r for r in results if r["what"] == "idle" and "error" not in r}
    tables = []
    if largest:
        models = sorted({model for model, _ in largest})
        present = sorted({loader for _, loader in largest}, key=order)
        cap = next(iter(largest.values()))["cap_gib"]
        rows = []
        for loader in present:
            rows.append([name(loader), *(_largest(largest.get((m, loader))) for m in models)])
        tables.append(markdown([f"largest batch in {cap:g} GiB", *models], rows))
    if idle:
        rows = [
            [name(r["loader"]), f"{r['held_gib']:.3f}", f"{r['without_loader_gib']:.3f}"]
            for r in sorted(idle.values(), key=lambda r: order(r["loader"]))
        ]
        header = ["GiB", "held by a finished validation loader", "and by the process without it"]
        tables.append(markdown(header, rows))
    stages = [r for r in results if r["what"] == "stages" and "error" not in r]
    if stages:
        header = ["device memory, GiB (of it torch's)", *stages[0]["stages"]]
        rows = [
            [f"{r['model']}: {name(r['loader'])}"]
            + [f"{s['device_gib']:.2f} ({s['torch_gib']:.2f})" for s in r["stages"].values()]
            for r in stages
        ]
        tables.append(markdown(header, rows))
    return tables


def scaling_table(documents: list[Document]) -> str:
    """Images per second of all processes, and in brackets the share of as many times one's."""
    rates: dict[tuple[str, str], dict[int, float]] = {}
    for document in documents:
        for r in document["results"]:
            of_loader = rates.setdefault((r["model"], r["loader"]), {})
            of_loader[r["processes"]] = r["images_per_second"]["median"]
    counts = sorted({count for found in rates.values() for count in found})
    rows = []
    for (model, loader), found in rates.items():
        cells = {count: f"{rate:,.0f}" for count, rate in found.items()}
        if 1 in found:
            cells = {n: f"{cells[n]} ({rate / (n * found[1]):.3f})" for n, rate in found.items()}
        rows.append([f"{model}: {name(loader)}", *(cells.get(count, "") for count in counts)])
    return markdown(["images/s (of as many times one GPU's)", *map(str, counts)], rows)


def front_page(documents: list[Document]) -> str:
    """The block of README.md: one training table."""
    if not (first := foremost(documents)):
        return ""
    plot = "![Share of the ceiling that each loader reaches](docs/results.svg)"
    where = caption(first, "benchmarks/results/", latest=True)
    return "\n\n".join([train_table(first), plot, where])


def all_results(documents: list[Document], runs: list[Document]) -> str:
    """The block of benchmarks/README.md; ``runs`` are those that no other table shows."""
    parts = []
    for group in groups(documents, "train"):
        cores, batch = group[0]["metadata"]["affinity"], group[0]["parameters"]["batch_size"]
        heading = f"### Training, {cores} CPU cores, batch {batch}"
        parts += [heading, train_table(group), details_table(group)]
        parts.append(caption(group, "results/"))
    trained = [d for d in documents + runs if d["benchmark"] == "train"]
    if runs and trained:
        trained.sort(key=lambda document: document["metadata"]["utc"])
        parts += ["### Every training run, the latest last", runs_table(trained)]
    for group in groups(documents, "loader"):
        parts += ["### Loaders alone", loader_table(group), caption(group, "results/")]
    for group in groups(documents, "memory"):
        parts += ["### GPU memory", *memory_tables(group), caption(group, "results/")]
    for group in groups(documents, "scaling"):
        parts += ["### Several GPUs, eager", scaling_table(group), caption(group, "results/")]
    return "\n\n".join(parts)


def replace_block(text: str, block: str, path: Path) -> str:
    """``text`` with ``block`` between the two markers."""
    if text.count(START) != 1 or text.count(END) != 1:
        raise ValueError(f"{path.name} must contain {START} and {END}, once each")
    head, _, rest = text.partition(START)
    tail = rest.partition(END)[2]
    return f"{head}{START}\n{block}\n{END}{tail}" if block else f"{head}{START}\n{END}{tail}"


def draw(documents: list[Document], path: Path) -> None:
    """Bars of the ratio to the ceiling, one panel for each model and mode."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "gpuprefetch", "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    table = train_rows(foremost(documents))
    figure, axes = plt.subplots(
        1, len(table), figsize=(3.2 * len(table) + 1.5, 2.8), sharey=True, squeeze=False
    )
    present = {loader for rows in table.values() for loader in rows} - {"synthetic"}
    bars = sorted(present, key=order, reverse=True)
    for axis, ((model, mode), rows) in zip(axes[0], table.items(), strict=True):
        ratios = [rows[loader].get("ratio", 0.0) if loader in rows else 0.0 for loader in bars]
        colors = [COLORS.get(loader.partition(":")[0], "#d5d5d5") for loader in bars]
        drawn = axis.barh([name(loader).replace("*", "") for loader in bars], ratios, color=colors)
        axis.bar_label(drawn, [f"{ratio:.2f}" if ratio else "" for ratio in ratios], padding=2)
        axis.axvline(1.0, color="0.7", linewidth=0.8, zorder=0)
        axis.set(title=f"{model}, {mode}", xlim=(0, 1.15), xlabel="of the ceiling")
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    documents = read(RESULTS)
    runs = [{**run, "file": f"runs/{run['file']}"} for run in read(RESULTS / "runs")]
    blocks = {
        ROOT / "README.md": front_page(documents),
        ROOT / "benchmarks" / "README.md": all_results(documents, runs),
    }
    stale = []
    for path, block in blocks.items():
        text = path.read_text()
        written = replace_block(text, block, path)
        if written != text:
            stale.append(path.name)
            if not args.check:
                path.write_text(written)
    if args.check and stale:
        sys.exit(f"stale: {', '.join(stale)}; run python benchmarks/table.py")
    if not args.check and groups(documents, "train"):
        draw(documents, PLOT)


if __name__ == "__main__":
    main()
