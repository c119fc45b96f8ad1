"""Write the README's table of images per second from the files of results.

    python docs/front.py           # write it
    python docs/front.py --check   # fail where it does not follow from the files

A row is a cell that DALI and gpuprefetch have run, and whose noise is known.
Two rows are of whole epochs, then two without end. Of each two the first is the one
that DALI wins by most beyond the noise, and the second the next one that fills
every column. Rows of an older protocol fill up what the newest lacks.
"""

import statistics
import sys
from pathlib import Path

import blocks

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import cells  # noqa: E402
import table  # noqa: E402

README = ROOT / "README.md"
ROWS = 4
OF_EPOCHS = 2
NAMES = {
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "shufflenet_v2_x0_5": "ShuffleNet 0.5",
}
HEADER = ["images/s", "DataLoader", "DALI", "gpuprefetch", "no loading"]
NOTE = (
    "Medians on {cards} by [protocol](docs/measuring.md) {versions}. *No loading*: "
    "the same step on one batch that stays on the GPU. In brackets: how many "
    "different photos, and their mean size. Rows: of whole epochs, and of epochs "
    "without end, the cell that DALI wins by most beyond the noise, and the next "
    "one that fills all columns."
)
NOT_RUN = " -: not run."
SPREAD = " Rounds and [noise](docs/measuring.md#the-rules) of the rows: {each}."
APART = " \\* On another machine than the row's other rates."


def of_machines(machines, column):
    """Return a column's rates on these machines, in rounds that gpuprefetch ran."""
    return [r for m in machines for r in m.paired(column, cells.OURS)]


def chosen(documents):
    """Return the cells of the table."""
    found = {}
    for files in table.by_version(documents).values():
        for cell in cells.train_cells(files):
            if cell.is_comparable and cell.with_columns(cells.OURS, cell.dali):
                found.setdefault(cell.title, cell)
    of_epochs = [cell for cell in found.values() if "epoch" in cell.title]
    others = [cell for cell in found.values() if "epoch" not in cell.title]
    shown = loss_and_whole(of_epochs)[:OF_EPOCHS]
    return shown + loss_and_whole(others)[: ROWS - len(shown)]


def loss_and_whole(found):
    """Return the largest loss, then the cells that fill a row, then the rest."""
    unlike = [c for c in found if not c.compared(cells.OURS, c.dali).equal]
    lost = (unlike or found)[:1]
    others = [c for c in found if c not in lost]
    whole = [c for c in others if "-" not in row_of(c)]
    return [*lost, *whole, *[c for c in others if c not in whole]]


def row_of(cell):
    """Return a row: the cell in words, and a rate for each loader."""
    first, _, rest = cell.title.partition(" ")
    both = cell.with_columns(cells.OURS, cell.dali)
    every = cell.with_columns(cells.OURS, cell.dali, cell.plain)
    sides = [of_machines(every or cell.machines, cell.plain)]
    sides += [of_machines(both, c) for c in (cell.dali, cells.OURS, cells.CEILING)]
    rates = [f"{statistics.median(side):,.0f}" if side else "-" for side in sides]
    if sides[0] and not every:
        rates[0] += " \\*"
    photos = f" ({cell.photos})" if cell.photos else ""
    return [f"{NAMES.get(first, first)} {rest}{photos}", *rates]


def block(documents):
    """Return the table and what to know of it; "" where nothing was measured."""
    shown = chosen(documents)
    if not shown:
        return ""
    rows = [row_of(cell) for cell in shown]
    files = {machine.file for cell in shown for machine in cell.machines}
    machines = [d["metadata"] for d in documents if d["file"] in files]
    gpus = ", ".join(sorted({m["gpu"] for m in machines}))
    cores = " or ".join(map(str, sorted({m["affinity"] for m in machines})))
    versions = " and ".join(map(str, sorted({cell.version for cell in shown})))
    note = NOTE.format(cards=f"{gpus} with {cores} cores", versions=versions)
    spreads = [f"{len(c.rates(cells.OURS))}, {table.noise(c)}" for c in shown]
    note += SPREAD.format(each="; ".join(spreads))
    note += NOT_RUN if any("-" in row for row in rows) else ""
    note += APART if any("*" in row[1] for row in rows) else ""
    return f"{table.markdown(HEADER, rows)}\n\n{note}\n"


def main(words=None, page=README):
    """Write the table, or fail where the page has another one."""
    made = block(cells.read(cells.RESULTS))
    what = "the images per second"
    blocks.refresh(
        page, "rates", made, words, what=what, script="front.py", doc=__doc__
    )


if __name__ == "__main__":
    main()
