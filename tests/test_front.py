"""What a script in docs/ makes: the README's table, from files of results, and pictures."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]


@pytest.fixture
def docs(monkeypatch):
    """Import a script that lies beside the pages."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def result(column, rate, **more):
    """A row of train.py, without a model unless it says which."""
    cell = {"model": "none", "mode": "eager", "batch_size": 8, "photos": "sample", "engine": "auto"}
    cell |= {"epochs": 0, "cores": 4, "stream": "own", "loop": "step", "column": column}
    return cell | {"images_per_second": {"median": rate, "values": [rate]}} | more


def document(file, *results, protocol=1):
    metadata = {"utc": file, "gpu": "H100", "affinity": 4, "commit": "abc", "commands": ["python"]}
    shared = {"benchmark": "train", "file": file, "metadata": metadata, "protocol": protocol}
    return {**shared, "results": list(results)}


LOADERS = ("torchvision", "dali", "gpuprefetch")


def test_the_table_of_the_readme_follows_from_the_files(docs, tmp_path):
    front = docs("front")
    front.main(["--check"])
    page = tmp_path / "README.md"
    readme = (ROOT / "README.md").read_text()
    page.write_text(re.sub(r"(<!-- rates:start -->\n.*\n.*\n\| )", r"\1old ", readme))
    assert page.read_text() != readme
    with pytest.raises(SystemExit, match=r"stale: .* README.md; run docs/front.py"):
        front.main(["--check"], page)
    front.main([], page)
    assert page.read_text() == readme
    page.write_text("no markers")
    with pytest.raises(ValueError, match="must have the markers"):
        front.main([], page)


def test_the_table_of_public_scripts_follows_from_its_file(docs, tmp_path):
    moves = docs("moves")
    moves.main(["--check"])
    page = tmp_path / "migrate.md"
    written = (ROOT / "docs" / "migrate.md").read_text()
    page.write_text(re.sub(r"\d+ of 24 rows", "24 of 24 rows", written))
    assert page.read_text() != written
    with pytest.raises(SystemExit, match=r"stale: the scripts of migrate.md; run docs/moves.py"):
        moves.main(["--check"], page)
    moves.main([], page)
    assert page.read_text() == written
    row = {"validation_most": 0.018, "validation_std": 0.226}
    assert moves.pixels(row) == "within 1 of 255"
    assert moves.pixels(row | {"validation_most": 0.5}) == "up to 0.50 after Normalize"


def test_rows_have_rates_of_the_same_machines(docs):
    front = docs("front")
    both = document("a", result("dali", 100.0), result("gpuprefetch", 300.0))
    alone = document("b", result("gpuprefetch", 900.0))  # a faster machine, without DALI
    other = document("c", result("torchvision", 20.0))
    assert "| no model, batch 8 | 20 \\* | 100 | 300 | - |" in front.block([both, alone, other])
    both["results"] += [result("torchvision", 30.0), result("synthetic", 400.0)]
    made = front.block([both, alone, other])
    assert "| no model, batch 8 | 30 | 100 | 300 | 400 |" in made
    assert "another machine" not in made and "H100 with 4 cores" in made


def test_rows_are_of_the_newest_protocol_and_losses_come_first(docs):
    front = docs("front")
    rates = {"torchvision": 10.0, "dali": 100.0, "gpuprefetch": 300.0}
    old = [result(c, rates[c], model=m) for c in LOADERS for m in ("resnet18", "resnet50")]
    old += [result(c, rates[c], batch_size=size) for c in LOADERS for size in (1, 2)]
    twin = "gpuprefetch (again)"
    columns = (*LOADERS, twin)
    rates |= {twin: rates["gpuprefetch"]}
    new = [result(c, rates[c] + 1, model="resnet18", round=0, place=0) for c in columns]
    lost = {"torchvision": 1.0, "dali": 9.0, "gpuprefetch": 8.0, twin: 8.0}
    epochs = {"policy": "", "validate": 0, "persistent": True, "cold": False, "epochs": 9}
    sizes = (3, 4, 5)
    new += [result(c, lost[c], files=n, **epochs, place=0) for c in columns for n in sizes]
    files = [document("a", *old), document("b", *new, protocol=2)]
    shown = [front.row_of(cell) for cell in front.chosen(files)]
    assert [row[1:4] for row in shown[:3]] == [["1", "9", "8"]] * 2 + [["11", "101", "301"]]
    assert len(shown) == 4 and "epochs of 3 photos" in shown[0][0]
    assert front.block([]) == ""


def test_each_half_has_a_loss_and_then_a_cell_that_every_loader_ran(docs):
    front = docs("front")
    new = {"policy": "", "files": 9, "validate": 0, "persistent": True, "cold": False, "round": 0}
    rates = {"dali": 100.0, "synthetic": 500.0}
    ours = {1: 80.0, 2: 90.0, 3: 95.0, 4: 70.0, 5: 60.0}  # by batch size, DALI has 100
    twins = ours | {1: 79.0, 5: 200.0}
    results = [
        result(column, rate, model="resnet18", batch_size=size, place=0, **new)
        for size, mine in ours.items()
        for column, rate in (
            *rates.items(),
            ("gpuprefetch", mine),
            ("gpuprefetch (again)", twins[size]),
        )
    ]
    results.append(result("torchvision", 10.0, model="resnet18", batch_size=3, place=0, **new))
    results = [r for r in results if (r["batch_size"], "again" in r["column"]) != (4, True)]
    files = [document("a", *results, protocol=2)]
    photos = {"distinct": 128, "mean_bytes": 99_903, "sha256": "a"}
    files[0]["photos"] = {"sample": photos}
    shown = [front.row_of(cell) for cell in front.chosen(files)]
    label = "ResNet-18 eager, batch {} (128 of 100 KB)"
    # Of batches of 4 the noise is not known, and within that of 5 DALI wins nothing.
    assert [row[0] for row in shown] == [label.format(size) for size in (1, 3, 5, 2)]
    assert shown[0][1:] == ["-", "100", "80", "500"]
    made = front.block(files)
    assert "-: not run" in made and "of the rows: 1, 1.3 %; 1, 0.0 %; 1, 233.3 %; 1, 0.0 %." in made


def test_the_picture_has_a_photo_and_seven_draws_of_it(docs, tmp_path):
    strip = docs("strip")
    photo = tmp_path / "photo.png"
    ramp = np.linspace(0, 255, 320 * 240 * 3).reshape(240, 320, 3).astype(np.uint8)
    Image.fromarray(ramp).save(photo)
    strip.main(photo, tmp_path / "strip.jpg")
    with Image.open(tmp_path / "strip.jpg") as made, Image.open(ROOT / "docs/strip.jpg") as shown:
        assert made.size == shown.size and made.width == 830
        pixels = np.asarray(made)
    width, height = strip.TILE
    steps = (width + strip.GAP, height + strip.CAPTION)
    tiles = [
        pixels[y : y + height, x : x + width]
        for y in range(0, 2 * steps[1], steps[1])
        for x in range(0, 4 * steps[0], steps[0])
    ]
    means = {tuple(tile.mean((0, 1)).round(1)) for tile in tiles}
    assert len(means) == 8  # every draw differs from the photo and from the others


def ramp(folder, size=(451, 300)):
    """A photo of which every part differs, in a file."""
    width, height = size
    across = np.linspace(0, 200, width, dtype=np.uint8)[None].repeat(height, 0)
    down = np.linspace(0, 200, height, dtype=np.uint8)[:, None].repeat(width, 1)
    Image.fromarray(np.stack([across, down, down], axis=-1)).save(folder / "photo.png")
    return folder / "photo.png"


def drawn(script, name, folder):
    """The pixels of a script's picture, which has the size of the one that a page shows."""
    script.main(ramp(folder), folder / name)
    shown = ROOT / "docs" / name
    assert shown.stat().st_size < 120_000
    with Image.open(folder / name) as made, Image.open(shown) as published:
        assert made.size == published.size and made.width == 830
        return np.asarray(made).astype(int)


def test_the_picture_of_forms_has_a_list_padding_and_patches(docs, tmp_path):
    forms = docs("forms")
    pixels = drawn(forms, "forms.jpg", tmp_path)
    white = (pixels > 245).all(-1)
    images = [(140, 196), (196, 140), (168, 168)]  # multiples of 28
    left = 0
    for height, width in images:
        assert not white[32 : 28 + height, left + 2 : left + width - 2].any()
        assert white[46 + height : forms.CAPTION + 196, left + 2 : left + width - 2].all()
        left += width + forms.GAP
    top = forms.CAPTION + 196 + forms.GAP + forms.CAPTION
    for number, (height, width) in enumerate(images):
        tile = pixels[top : top + 196, 197 * number :][:, :196]
        beside = [
            tile[height + 16 : -16, 16:-16],
            tile[16:-16, width + 16 : -16],
        ]  # JPEG's blocks of 16
        for part in filter(np.size, beside):
            assert np.abs(part - 153).max() < 12
        assert tile[:height, :width].std() > 20
    step = forms.PATCH + forms.ROOM
    across = 830 // step
    rows = -(-424 // across)
    patches = pixels[top + 196 + forms.GAP + forms.CAPTION :]
    assert len(patches) == rows * step + forms.GAP
    centers = patches[step // 2 : rows * step : step, step // 2 : across * step : step]
    is_empty = (centers > 235).all(-1).ravel()
    assert not is_empty[:424].any() and is_empty[424:].all()


def test_the_picture_of_boxes_has_what_follows(docs, tmp_path):
    boxes = docs("boxes")
    pixels = drawn(boxes, "boxes.jpg", tmp_path)
    width, height = boxes.TILE
    red, green, blue = np.moveaxis(pixels[:height], -1, 0)
    lines = {
        "red": (red > 200) & (green < 70) & (blue < 70),
        "yellow": (red > 180) & (green > 180) & (blue < 110),
        "cyan": (red < 110) & (green > 180) & (blue > 180),
        "lime": (green - red > 60) & (green - blue > 60),
    }
    seen = []
    for left in range(0, 830, width + boxes.GAP):
        tile = {name: found[:, left : left + width] for name, found in lines.items()}
        seen.append({name for name, found in tile.items() if found.sum() > 20})
    assert seen[0] == seen[2] == seen[3] == {*lines}
    assert seen[1] == {"red", "lime"}  # the one eye that is left
    middles = [
        np.nonzero(lines["red"][:, left : left + width])[1].mean()
        for left in (0, 2 * (width + boxes.GAP))
    ]
    assert middles[0] < width / 2 < middles[1]  # mirrored


def test_pages_link_to_files_of_the_repository_and_offer_no_downloads(tmp_path):
    """By the address of pyproject.toml, and by name where it has none."""
    pytest.importorskip("myst_nb")
    from sphinx.application import Sphinx

    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "index.md").write_text("# Page\n\n[a file](../pyproject.toml)\n")
    (tmp_path / "pyproject.toml").touch()
    conf = (ROOT / "docs" / "conf.py").read_text()
    conf = conf.replace("html_static_path =", "no_static_path =").replace("furo", "basic")
    address = "https://example.org/gpuprefetch"
    shown = {
        None: '<abbr title="pyproject.toml">',
        address: f'href="{address}/blob/main/pyproject.toml"',
    }
    for repository, link in shown.items():
        urls = f"[project.urls]\nRepository = '{repository}'\n" if repository else ""
        (tmp_path / "pyproject.toml").write_text(f"[project]\nname = 'x'\n{urls}")
        (pages / "conf.py").write_text(conf)
        built = tmp_path / f"html{bool(repository)}"
        app = Sphinx(pages, pages, built, built / "doctrees", "html", status=None)
        app.build()
        page = (built / "index.html").read_text()
        assert link in page and "a file" in page
        assert not (built / "_downloads").exists()
