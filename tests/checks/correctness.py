"""Write the table of docs/correctness.md from the JSON under benchmarks/results/.

python tests/checks/correctness.py           # writes
python tests/checks/correctness.py --check   # fails where the page does not say what the JSON says
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

from bench import table

PAGE = table.ROOT / "docs" / "correctness.md"

Row = tuple[str, str]
Result = dict[str, Any]


def selfcheck_rows(check: Result) -> Iterator[Row]:
    found = check["verdict"]
    if not check["error"]:
        wrong = f"{check['corrupted']:,} of {check['rounds']:,} batches corrupted"
        found = f"{wrong} ({found.partition(':')[0]})"
    yield f"self-check, {check['backend']}, {check['order']} order", found


def soak_rows(result: Result) -> Iterator[Row]:
    if result["what"] == "colors":
        for check in result["checks"]:
            found = "right" if check["ok"] else "WRONG"
            ends = (f"{mistake}: {end}" for mistake, end in check["mistakes"].items())
            yield f"soak, {check['check']}", "; ".join([found, *ends])
        return
    ending = ", workers that decode and policies" * bool(
        result["what"] == "policies" or result.get("share")
    )
    if result["what"] in ("integrity", "policies"):
        wrong = sum(count for name, count in result.items() if name.startswith("wrong"))
        size = f"{result['batches']:,} batches, {result['tensors']:,} tensors"
        yield f"soak, {size}{ending}", f"{wrong:,} mismatches"
        return
    names = {"gpu_reserved_bytes": "GPU memory", "resident_bytes": "resident memory"}
    spread = ", ".join(
        f"{names.get(name, name.replace('_', ' '))} {value:.2%}"
        for name, value in result["spread"].items()
    )
    epochs = result["epochs"] - result["warm_epochs"]
    yield f"soak, spread over {epochs} epochs after {result['warm_epochs']}{ending}", spread


def fuzz_rows(result: Result) -> Iterator[Row]:
    counts = Counter(result["counts"])
    ops = result.get("pipeline", "")
    path, other = ("GPU", "the CPU path") if result["device"] == "cuda" else ("CPU", "PIL")
    compared = {
        "read by both": counts["same"] + counts["differs"],
        "of them with other pixels": counts["differs"],
        "refused by both": counts["both_refuse"],
        f"by {other} alone": counts["only_ours_reads"],
        "by us alone": counts["only_ours_refuses"],
    }
    good = f"{counts['good_wrong']} of {counts['good_batches']:,} good batches wrong"
    found = [f"{len(result['crashes'])} crashes or hangs", good]
    found += [f"{mistake}: {end}" for mistake, end in result.get("mistakes", {}).items()]
    name = f"fuzz, {path} path{', ' * bool(ops)}{ops}"
    yield f"{name}, {result['cases']:,} damaged files", "; ".join(found)
    words = ", ".join(f"{name} {count:,}" for name, count in compared.items())
    yield f"{name} against {other}", words


def differential_rows(result: Result) -> Iterator[Row]:
    counts = Counter(result["counts"])
    path = "GPU" if result["device"] == "cuda" else "CPU"
    compared = {
        "samples": counts["samples"],
        "pictures compared with PIL and eager PyTorch": counts["pictures"],
        "with another run's": counts["draws"],
        "pairs of draws": counts["pairs"],
    }
    words = ", ".join(f"{name} {count:,}" for name, count in compared.items())
    without = f"; not checked: {', '.join(result['without'])}" if result["without"] else ""
    name = f"random configurations, {path} path, {result['cases']:,} of them"
    yield name, f"{result['wrong']:,} wrong; {words}{without}"


def distributed_rows(result: Result) -> Iterator[Row]:
    figures = {
        "missing": "{missing} samples missing in two epochs",
        "repeated": "{repeated} repeated",
        "samples": "{samples} samples of the ranks",
        "different": "{different} of {compared} pictures different",
        "largest_error": "largest error {largest_error:.1e} of up to {largest:.2f}",
        "of_ranks": "devices of the ranks: {of_ranks}",
    }
    found = [text.format(**result) for key, text in figures.items() if key in result]
    found += [f"{mistake}: {end}" for mistake, end in result["mistakes"].items()]
    name = f"{result['processes']} processes, {result['check']}"
    yield name, "; ".join(["exact" if result["ok"] else "WRONG", *found])


def accuracy_rows(result: Result) -> Iterator[Row]:
    """None for a result that has no interval: of an earlier script, or of too few seeds."""
    if "interval" not in result:
        return
    means = [f"{path} {result[path]['mean']:.1%}" for path in ("gpuprefetch", "torchvision")]
    shares = [result["difference"], *result["interval"]]
    # As 0.0 what would be -0.0.
    points = [round(100 * share, 1) + 0.0 for share in shares]
    difference = "difference {} points ({} to {}".format(*points)
    found = ["as good" if result["ok"] else "NOT KNOWN TO BE AS GOOD", ", ".join(means)]
    found += [f"{difference}; allowed: {100 * result['margin']:.0f})"]
    found += [f"{mistake}: {end}" for mistake, end in result["mistakes"].items()]
    pictures = "photos" if result["pictures"] == "photos" else "drawn pictures"
    name = f"ResNet-18 from scratch, {result['images']:,} {pictures}"
    policy = {"none": "crop and flip", "ta": "TrivialAugmentWide", "ra": "RandAugment"}
    how = f"{result['epochs']} epochs, {result['validation']:,} for validation"
    yield f"{name}, {policy[result['policy']]}, {how}, {result['seeds']} seeds", "; ".join(found)


def suite_rows(result: Result) -> Iterator[Row]:
    """A row of a file that failed; the others are in :func:`suite_row`."""
    if result["failed"]:
        yield f"test suite, {result['file']}", f"[{result['failed']} FAILED](#the-test-suite)"


def suite_row(document: dict[str, Any]) -> Row:
    counts = document["summary"]
    where = "GPU" if document["metadata"].get("gpu") else "CPU"
    words = ", ".join(f"{counts[name]:,} {name}" for name in ("passed", "failed", "skipped"))
    missing = counts.get("missing", ())  # of a run that was cut short
    without = f", without {', '.join(missing)}" if missing else ""
    return f"test suite, {where}, {counts['files']} files{without}", words


ROWS = {
    "selfcheck": selfcheck_rows,
    "soak": soak_rows,
    "fuzz": fuzz_rows,
    "differential": differential_rows,
    "distributed": distributed_rows,
    "accuracy": accuracy_rows,
    "suite": suite_rows,
}


def block(documents: list[dict[str, Any]]) -> str:
    lines = ["| test | result | hardware | file |", "| --- | --- | --- | --- |"]
    for benchmark, rows in ROWS.items():
        for document in (d for d in documents if d["benchmark"] == benchmark):
            hardware = _hardware(document["metadata"])
            file = document["file"]
            ending = f"| {hardware} | [{file}](../benchmarks/results/{file}) |"
            whole = [suite_row(document)] if "summary" in document else []
            for test, found in [*whole, *chain.from_iterable(map(rows, document["results"]))]:
                lines.append(f"| {test} | {found} {ending}")
    return "\n".join(lines) if len(lines) > 2 else ""


def _hardware(metadata: dict[str, Any]) -> str:
    versions = metadata["versions"]
    where = metadata.get("gpu") or f"{metadata['affinity']} CPU cores"
    torchcodec = f", TorchCodec {versions['torchcodec']}" if versions.get("torchcodec") else ""
    return f"{where}; torch {versions['torch']}{torchcodec}"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the page is stale")
    check = parser.parse_args(words).check
    table.refresh({PAGE: block(table.read(table.RESULTS))}, check=check)


if __name__ == "__main__":
    main()
