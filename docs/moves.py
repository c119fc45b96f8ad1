"""Write the table of public scripts in migrate.md from its file of results.

    python docs/moves.py           # write it
    python docs/moves.py --check   # fail where it does not follow from the file

The scripts are other projects' and are not part of this repository. Each was run
plain and moved, on the CPU.
"""

import json
from pathlib import Path

import blocks

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "moves-cpu.json"
PAGE = ROOT / "docs" / "migrate.md"
FEW = 3


def table(rows):
    """Return the rows as Markdown, those with the fewest lines first."""
    lines = ["| script | lines | how | validation pixels | resume |"]
    lines.append("| --- | ---: | --- | --- | --- |")
    for row in sorted(rows, key=lambda row: row["changed_lines"]):
        cells = [f"{row['repository']}: {row['script']}", str(row["changed_lines"])]
        cells += [row["way"], pixels(row), row["resume"].partition(" (")[0]]
        lines.append(f"| {' | '.join(cells)} |")
    few = sum(row["changed_lines"] <= FEW for row in rows)
    note = f"{few} of {len(rows)} rows need at most {FEW} lines."
    return "\n".join([*lines, "", note, ""])


def pixels(row):
    """Return how far validation pixels are from the plain run's."""
    most = row["validation_most"]
    if most is None:
        return "not compared"
    # A row says by what Normalize divides: 1.0 where there is none.
    levels = round(most * 255 * row["validation_std"])
    if levels > FEW:
        return f"up to {most:.2f} after Normalize"
    return "equal" if most == 0 else f"within {max(levels, 1)} of 255"


def main(words=None, page=PAGE):
    """Write the table, or fail where the page has another one."""
    made = table(json.loads(RESULTS.read_text())["results"])
    what = "the scripts"
    blocks.refresh(
        page, "moves", made, words, what=what, script="moves.py", doc=__doc__
    )


if __name__ == "__main__":
    main()
