"""Make a configuration that fails simpler, and write a script that shows what is wrong."""

import time
from dataclasses import replace
from typing import Any

import configurations
from configurations import FORMS, Config
from judging import Finding, check, other_workers


def script(config: Config, finding: Finding) -> str:
    """At most ``configurations.LINES`` lines that show the finding, with public names alone."""
    return configurations.script(config, Ending(config, finding).lines())


class Ending:
    """The last lines of a script: the story once more, and what is to be seen there."""

    def __init__(self, config: Config, finding: Finding) -> None:
        self.config = config
        self.finding = finding
        self.form = FORMS[config.form]
        first = f"{self.form.images}[0]" + "[0]" * (config.transforms == "views")
        self.rows = self._reader("rows", first)
        self.epoch = f"rows(epochs[{finding.epoch}])"
        self.row = f"{self.epoch}[{finding.row}][1]"

    def lines(self) -> list[str]:
        finding = self.finding
        shown = {
            "error": self.as_it_is,
            "epochs": self.as_it_is,
            "structure": self.as_it_is,
            "bad": self.as_it_is,
            "ending": self.ending,
            "label": self.labels,
            "pixels": self.pixels,
            "pair": self.pair,
            "alone": self.alone,
            "seed": self.other_seed,
            "again": self.again,
            "resume": self.again,
            "replay": self.replay,
        }
        if finding.kind in ("lost", "twice", "order", "wrong"):
            shown[finding.kind] = self.order
        run = f"{self._begin('loader', finding.rank)}; epochs = [*story(loader, {finding.rank})]"
        return [run, *shown.get(finding.kind, self.differing)()]

    def _reader(self, name: str, images: str) -> str:
        pairs = f"zip(np.atleast_1d({self.form.label}), {images})"
        kept = "b in e if not isinstance(b, Exception)"
        return f"{name} = lambda e: [(int(y), x.cpu()) for {kept} for y, x in {pairs}]"

    def _begin(self, name: str, rank: int, workers: int | None = None) -> str:
        """Build a loader; where the seed is set late, another one each time before that."""
        config = self.config
        make = [f"rank={rank}"] * bool(rank)
        make += [] if workers is None else [f"workers={workers}"]
        late = config.seeding == "late"
        before = config.draws_seed + (7 * len(name) if late else 0)
        after = f"; torch.manual_seed({config.draws_seed})" if late else ""
        return f"torch.manual_seed({before}); {name} = make({', '.join(make)}){after}"

    def as_it_is(self) -> list[str]:
        return [f"raise SystemExit(epochs)  # {self.finding.words[:60]!r}"]

    def ending(self) -> list[str]:
        last = f"epochs[{self.finding.epoch}][-1:]"
        ended = f"[type(b).__name__ for b in {last} if isinstance(b, Exception)]"
        return _wanted(ended, [self.finding.right] if self.finding.right else [])

    def order(self) -> list[str]:
        number = _read_back(self.config) if self.config.named else "y"
        return [self.rows, *_wanted(f"[{number} for y, x in {self.epoch}]", self.finding.right)]

    def labels(self) -> list[str]:
        if not self.config.named:
            return self.as_it_is()
        both = f"[(y, {_read_back(self.config)}) for y, x in {self.epoch}]"
        return [self.rows, f"got = {both}; print(got); assert all(y == i for y, i in got), epochs"]

    def pixels(self) -> list[str]:
        picture = f"Image.open(io.BytesIO(file({self.finding.number}))).convert('RGB')"
        return [self.rows, f"raise SystemExit(({self.row}, np.array({picture})))"]

    def pair(self) -> list[str]:
        views = "[0]" * (self.config.transforms == "views")
        pairs = f'zip(b["A"]{views}, b["B"]{views})'
        equal = "torch.equal(x, y)"
        if self.config.form == "two sizes":
            equal = "float((1.0 * x[:2] - y[:2]).abs().mean() / x[:2].max()) < 0.04"
        same = f"[{equal} for b in epochs[{self.finding.epoch}] for x, y in {pairs}]"
        return [f"got = {same}; print(got); assert all(got)"]

    def _apart(self, seed: int) -> str:
        """The first of each sample in a batch of its own."""
        config = self.config
        data = configurations.base(config)
        data = f"list({data})" if config.data == "stream" else data
        collate = ", collate_fn=collate" * bool(self.form.collate)
        number = config.numbers[self.finding.epoch]
        loader = f"ours(DataLoader({data}, batch_sampler=[[i] for i in got]{collate}), {seed})"
        first = f"got = dict(reversed({self.epoch}))"
        return f"{first}; one = {loader}; one.set_epoch({number}); right = dict(rows(one))"

    def alone(self) -> list[str]:
        same = "{i: torch.equal(right[i], got[i]) for i in got}"
        apart = self._apart(self.config.draws_seed)
        return [self.rows, apart, f"same = {same}; print(same); assert all(same.values())"]

    def other_seed(self) -> list[str]:
        same = "[torch.equal(right[i], got[i]) for i in got]"
        apart = self._apart(self.config.draws_seed + 1)
        return [self.rows, apart, f"same = {same}; print(same); assert not all(same)"]

    def again(self) -> list[str]:
        config = self.config
        rank = self.finding.rank
        epoch = self.finding.epoch
        workers = other_workers(config)
        story = f"[*story(another, {rank})]"
        if self.finding.kind == "resume":
            story = "[list(another) for _ in epochs]"
        second = f"{self._begin('another', rank, workers)}; others = {story}"
        pairs = f"zip({self.epoch}, rows(others[{epoch}]), strict=True)"
        same = f"[y == z and torch.equal(x, w) for (y, x), (z, w) in {pairs}]"
        return [self.rows, second, f"got = {same}; print(got); assert all(got)"]

    def replay(self) -> list[str]:
        index = self.finding.number
        number = self.config.numbers[self.finding.epoch]
        if self.config.data == "subset":
            index = configurations.subset(self.config).index(index)
        again = f"rows([loader.replay({index}, {number})])[0][1]"
        return [self.rows, f"assert torch.equal({again}, {self.row})"]

    def differing(self) -> list[str]:
        """Two pictures that are cut at the same place, which red and green tell."""
        finding = self.finding
        lines = [self.rows]
        name = "epochs"
        rank, epoch, row = finding.other
        if rank != finding.rank:
            other = f"others = [*story(another, {rank})]"
            lines.append(f"{self._begin('another', rank)}; {other}")
            name = "others"
        second = f"rows({name}[{epoch}])[{row}][1]"
        if finding.kind == "views":
            lines.append(self._reader("seconds", f"{self.form.images}[0][1]"))
            second = f"seconds(epochs[{finding.epoch}])[{finding.row}][1]"
        apart = "(1.0 * a - 1.0 * b).abs().mean() > 0.02 * (1.0 * a).abs().max()"
        return [*lines, f"a, b = {self.row}[:2], {second}[:2]; print(a, b); assert {apart}"]


def _wanted(got: str, right: Any) -> list[str]:
    return [f"got, right = {got}, {right}", "print(got, right, sep='\\n'); assert got == right"]


def _read_back(config: Config) -> str:
    """An expression for the sample that the picture ``x`` is of."""
    value = "x[2].double().mean().item()"
    if config.transforms == "normalize":
        value = f"({value} * 0.25 + 0.5)"
    whole = config.transforms == "none" or config.dtype == "uint8"
    return f"round({value} / 10)" if whole else f"round({value} * 25.5)"


# What a configuration is made simpler by, as long as it fails in the same way.
SIMPLER: tuple[dict[str, Any], ...] = (
    {"together": "alone"},
    {"workers": 0, "persistent": False, "context": "fork"},
    {"other_workers": 0},
    {"bad": ()},
    {"raises": -1},
    {"slow": False},
    {"in_order": True},
    {"form": "two images"},
    {"form": "pair"},
    {"decoder": "auto"},
    {"data": "samples"},
    {"sampler": "sequential", "world": 1},
    {"files": "png"},
    {"names": "index"},
    {"dtype": "float32", "channels_last": False},
    {"depth": None},
    {"budget": None},
    {"drop_last": False},
    {"seeding": "given"},
    {"sizes": "equal"},
    {"transforms": "crop"},
    {"story": "epochs", "epochs": ()},
)


def simpler(
    config: Config, finding: Finding, pending: frozenset[str], seconds: float = 30.0
) -> tuple[Config, Finding]:
    """The configuration with as little in it as the finding needs."""
    until = time.monotonic() + seconds
    for changes in SIMPLER:
        candidate = replace(config, **changes)
        if candidate == config or time.monotonic() > until:
            continue
        try:
            found = check(candidate, pending)
        except Exception:  # what does not go together
            continue
        same = next((other for other in found if other.kind == finding.kind), None)
        if same is not None and (finding.kind != "error" or same.words == finding.words):
            config = candidate
            finding = same
    return config, finding
