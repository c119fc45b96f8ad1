"""Write the table of docs/correctness.md from the JSON under benchmarks/results/.

python tests/checks/correctness.py           # writes
python tests/checks/correctness.py --check   # fails where the page does not say what the JSON says
"""

import argparse
import sys
from typing import Any

from bench import table

PAGE = table.ROOT / "docs" / "correctness.md"

Row = tuple[str, str]
Document = dict[str, Any]


def selfcheck_rows(document: Document) -> list[Row]:
    rows = []
    for check in document["results"]:
        name = f"self-check, {check['backend']}, {check['order']} order"
        if check["error"]:
            rows.append((name, check["verdict"]))
            continue
        found = f"{check['corrupted']:,} of {check['rounds']:,} batches corrupted"
        rows.append((name, f"{found} ({check['verdict'].partition(':')[0]})"))
    return rows


def soak_rows(document: Document) -> list[Row]:
    rows = []
    for result in document["results"]:
        if result["what"] == "integrity":
            wrong = sum(count for name, count in result.items() if name.startswith("wrong"))
            size = f"{result['batches']:,} batches, {result['tensors']:,} tensors"
            rows.append((f"soak, {size}", f"{wrong:,} mismatches"))
        else:
            names = {"gpu_reserved_bytes": "GPU memory", "resident_bytes": "resident memory"}
            spread = ", ".join(
                f"{names.get(name, name.replace('_', ' '))} {value:.2%}"
                for name, value in result["spread"].items()
            )
            epochs = result["epochs"] - result["warm_epochs"]
            rows.append(
                (f"soak, spread over {epochs} epochs after {result['warm_epochs']}", spread)
            )
    return rows


def fuzz_rows(document: Document) -> list[Row]:
    (result,) = document["results"]
    counts = {"same": 0, "differs": 0, "both_refuse": 0, "only_ours_reads": 0, **result["counts"]}
    path, other = ("GPU", "the CPU path") if result["device"] == "cuda" else ("CPU", "PIL")
    compared = [
        f"read by both {counts['same'] + counts['differs']:,}",
        f"of them with other pixels {counts['differs']:,}",
        f"refused by both {counts['both_refuse']:,}",
        f"by {other} alone {counts['only_ours_reads']:,}",
        f"by us alone {counts.get('only_ours_refuses', 0):,}",
    ]
    return [
        (
            f"fuzz, {path} path, {result['cases']:,} damaged files",
            f"{len(result['crashes'])} crashes or hangs; "
            f"{counts['good_wrong']} of {counts['good_batches']:,} good batches wrong",
        ),
        (f"fuzz, {path} path against {other}", ", ".join(compared)),
    ]


def distributed_rows(document: Document) -> list[Row]:
    rows = []
    for result in document["results"]:
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
        rows.append((name, "; ".join(["exact" if result["ok"] else "WRONG", *found])))
    return rows


ROWS = {
    "selfcheck": selfcheck_rows,
    "soak": soak_rows,
    "fuzz": fuzz_rows,
    "distributed": distributed_rows,
}


def block(documents: list[Document]) -> str:
    lines = ["| test | result | hardware | file |", "| --- | --- | --- | --- |"]
    for benchmark, rows in ROWS.items():
        for document in (d for d in documents if d["benchmark"] == benchmark):
            hardware = _hardware(document["metadata"])
            file = f"[{document['file']}](../benchmarks/results/{document['file']})"
            lines += [
                f"| {test} | {found} | {hardware} | {file} |" for test, found in rows(document)
            ]
    return "\n".join(lines) if len(lines) > 2 else ""


def _hardware(metadata: dict[str, Any]) -> str:
    versions = metadata["versions"]
    where = metadata.get("gpu") or f"{metadata['affinity']} CPU cores"
    torchcodec = f", TorchCodec {versions['torchcodec']}" if versions.get("torchcodec") else ""
    return f"{where}; torch {versions['torch']}{torchcodec}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the page is stale")
    check = parser.parse_args().check
    text = PAGE.read_text()
    written = table.replace_block(text, block(table.read(table.RESULTS)), PAGE)
    if check:
        sys.exit("stale: run python tests/checks/correctness.py" if written != text else 0)
    PAGE.write_text(written)


if __name__ == "__main__":
    main()
