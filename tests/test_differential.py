"""Configurations compared with the plain DataLoader, and that the comparison finds faults."""

import contextlib
import functools
import importlib
import json
import re
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import pytest
import torch
from children import Watched

import gpuprefetch
from gpuprefetch import DataPrefetcher
from gpuprefetch.transforms.head import Head

CHECKS = str(Path(__file__).parent / "checks")
GROUPS = 12
CANDIDATES = 300
# Settings of a configuration with few values.
SETTINGS = "transforms form data sampler sizes files names alike dtype channels_last depth budget"
SETTINGS += " decoder drop_last in_order seeding story way together between persistent slow"


@pytest.fixture(scope="module")
def differential(scripts):
    module = importlib.import_module("differential")
    module.judging.impatient()
    return module


def kinds(config):
    """The value of each setting, and the pairs of values that meet in the code."""
    workers = config.workers > 0
    faults = (config.on_error, config.bad_kind, config.max_bad is None) if config.bad else ()
    found = {(name, getattr(config, name)) for name in SETTINGS.split()}
    found |= {("bad", fault) for fault in faults}
    found |= {("workers", config.workers), ("count", min(config.count, 3))}
    found |= {("batch", config.batch is None), ("raises", config.raises >= 0)}
    found |= {(workers, config.story), (workers, config.data), (workers, config.reads)}
    found |= {(workers, config.names), (config.data == "folder", config.persistent, config.story)}
    if config.data == "folder" and config.story == "epochs":
        found.add((config.between, config.sampler == "shuffle"))  # whose order is drawn
    return found


def cost(config):
    """About what it costs: most of that is starting workers, in each of its epochs or once."""
    started = config.workers * (1 if config.persistent else 2) + config.other_workers
    return config.world * (1 + started + config.count / 20)


@pytest.fixture(scope="module")
def chosen(differential):
    """Configurations that have each kind of the candidates, the cheapest first.

    None has new interpreters, which take seconds to begin, or many workers.
    """

    def quick(config):
        few = config.workers * config.world < 3 and config.count * config.world < 45
        return few and config.context == "fork" and config.together != "processes"

    drawn = map(differential.configurations.draw, count())
    of = {config: kinds(config) for config in islice(filter(quick, drawn), CANDIDATES)}
    missing = set().union(*of.values())
    found = []
    while missing:
        found.append(max(of, key=lambda config: len(of[config] & missing) / cost(config)))
        missing -= of[found[-1]]
    return found


@pytest.mark.forks("a configuration says how its workers start")
@pytest.mark.parametrize("group", range(GROUPS))
def test_a_slice(differential, chosen, group):
    for config in chosen[group::GROUPS]:
        if findings := differential.judging.check(config):
            script = differential.reproduce.script(config, findings[0])
            pytest.fail("\n".join(map(str, [config, *findings, script])))


@pytest.mark.forks("a configuration says how its workers start")
def test_a_batch_that_the_dataset_has_no_longer_is_not_replayed(differential):
    """Of six samples one goes: the second epoch has no batch, and the first cannot come again."""
    config = differential.configurations.draw(28232546, "cpu")
    assert (config.between, config.story) == ("a sample less", "epochs")
    assert differential.judging.check(config) == []


def test_the_slice_has_all_kinds(differential, chosen):
    known = differential.configurations
    assert {config.transforms for config in chosen} == set(known.LISTS)
    assert {config.form for config in chosen} == set(known.FORMS)
    assert {config.sizes for config in chosen} == set(known.SIZES)
    assert {config.between for config in chosen} == set(known.BETWEEN)
    stories = {"epochs", "early", "resume", "ranks", "numbered", "restarted"}
    for begun_ahead in (True, False):
        assert {c.story for c in chosen if (c.data == "folder") == begun_ahead} == stories
    assert len({config.sampler for config in chosen}) > 9
    assert sum(bool(config.bad) for config in chosen) > 5
    assert 30 < len(chosen) < 50


def test_a_configuration_is_a_function_of_its_seed(differential):
    draw = differential.configurations.draw
    drawn = list(map(draw, range(200)))
    assert drawn == list(map(draw, range(200)))
    assert len({replace(config, seed=0) for config in drawn}) == 200


def test_scripts_are_short_and_use_public_names(differential):
    for config in map(differential.configurations.draw, range(80)):
        for kind in ("order", "label", "pair", "alone", "again", "resume", "ranks", "ending"):
            finding = differential.judging.Finding(
                kind, "", right=[1, 2], other=(config.world - 1, 1, 0)
            )
            script = differential.reproduce.script(config, finding)
            assert len(script.splitlines()) <= 20
            compile(script, "script", "exec")
            assert set(re.findall(r"\bg\.(\w+)", script)) <= set(gpuprefetch.__all__)
            assert "gpuprefetch." not in script


# Faults, each planted in DataPrefetcher; the kind of what has to be found, and where it shows.


def of_loops(change):
    """A loop gets what ``change`` gives of its batches."""

    def plant(monkeypatch):
        whole = DataPrefetcher.__iter__
        monkeypatch.setattr(DataPrefetcher, "__iter__", lambda self: change(whole(self)))

    return plant


def of_batches(change):
    """Every batch of a loop is changed."""
    return of_loops(lambda batches: (change(*batch) for batch in batches))


def twice(images, labels):
    rows = [0, 0, *range(2, len(labels))]
    return [images[rows], labels[rows]]


def swapped(images, labels):
    return [images, labels[[1, 0, *range(2, len(labels))]]]


def brighter(images, labels):
    return [images + 4 / 255, labels]


def one_lost(batches):
    yield from (batch for at, batch in enumerate(batches) if at != 1)


def two_exchanged(batches):
    first, second, *rest = batches
    yield from (second, first, *rest)


def ends_silently(batches):
    with contextlib.suppress(ValueError):
        yield from batches


def repeats_a_batch(monkeypatch):
    whole = DataPrefetcher.load_state_dict

    def load_state_dict(self, state):
        if state["batches"]:
            state = {**state, "batches": state["batches"] - 1}
            state.pop("drawn", None)  # else it is noticed
        whole(self, state)

    monkeypatch.setattr(DataPrefetcher, "load_state_dict", load_state_dict)


def of_draws(change):
    """The keys that random parameters are drawn from are changed."""

    def plant(monkeypatch):
        whole = Head.sample
        monkeypatch.setattr(
            Head,
            "sample",
            lambda self, sizes, keys, *rest, **named: whole(
                self, sizes, change(keys), *rest, **named
            ),
        )

    return plant


def one_for_all(keys):
    return keys[:1].repeat(len(keys))


def by_row(keys):
    return keys + torch.arange(len(keys)).numpy().astype(keys.dtype)


def always_the_first_epoch(monkeypatch):
    whole = DataPrefetcher.__iter__

    def begin(self):
        self.set_epoch(0)
        return whole(self)

    monkeypatch.setattr(DataPrefetcher, "__iter__", begin)


def forgets_a_bad_file(monkeypatch):
    monkeypatch.setattr(DataPrefetcher, "bad_images", property(lambda self: []))


def replays_another(monkeypatch):
    whole = DataPrefetcher.replay

    def replay(self, index, epoch=None, **options):
        images, labels = whole(self, index, epoch, **options)
        return [images.flip(-1), labels]

    monkeypatch.setattr(DataPrefetcher, "replay", replay)


FAULTS = {
    "a sample given twice": (of_batches(twice), "twice", {}),
    "a swapped label": (of_batches(swapped), "label", {}),
    "other pixels": (of_batches(brighter), "pixels", {}),
    "a lost batch": (of_loops(one_lost), "lost", {}),
    "another order": (of_loops(two_exchanged), "order", {}),
    "a shared crop": (of_draws(one_for_all), "shared", {"batch": 6}),
    "a draw of the row": (of_draws(by_row), "alone", {}),
    "a stale epoch number": (always_the_first_epoch, "stale", {}),
    "a resume that repeats a batch": (repeats_a_batch, "twice", {"story": "resume", "taken": 2}),
    "an error that is not told": (
        of_loops(ends_silently),
        "ending",
        {"raises": 7, "raised": "ValueError"},
    ),
    "a bad file that is not listed": (forgets_a_bad_file, "bad", {"bad": (3,), "on_error": "skip"}),
    "a replay of another picture": (replays_another, "replay", {}),
}


@functools.cache  # most faults are planted in one and the same
def is_right(differential, config):
    return differential.judging.check(config) == []


@pytest.mark.forks("a configuration says how its workers start")
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found_and_their_scripts_show_them(differential, monkeypatch, fault):
    # Guards the first test.
    plant, kind, changes = FAULTS[fault]
    config = differential.configurations.draw(0)
    for simple in differential.reproduce.SIMPLER:
        config = replace(config, **simple)
    changes = {"batch": 4} | changes
    config = replace(config, count=12, size=14, alike=False, seed=1, done=0, **changes)
    assert is_right(differential, config)
    with monkeypatch.context() as planted:
        plant(planted)
        findings = differential.judging.check(config)
        found = next((finding for finding in findings if finding.kind == kind), None)
        assert found is not None, findings
        script = compile(differential.reproduce.script(config, found), "script", "exec")
        with pytest.raises((AssertionError, SystemExit)):
            exec(script, {"__name__": "__main__"})
    if kind not in ("pixels", "bad"):  # which are shown, and not judged once more
        exec(script, {"__name__": "__main__"})


@pytest.mark.forks("a configuration says how its workers start")
def test_a_failure_is_made_simpler(differential, monkeypatch):
    of_batches(lambda *batch: swapped(*batch))(monkeypatch)
    changes = {"form": "pair", "world": 1, "story": "epochs", "epochs": (), "together": "alone"}
    config = replace(differential.configurations.draw(3), count=12, batch=4, **changes)
    (found,) = differential.judging.check(config)
    least, still = differential.reproduce.simpler(
        config, found, frozenset(differential.judging.RULES)
    )
    assert (found.kind, still.kind) == ("label", "label")
    assert (least.transforms, least.sampler, least.workers) == ("crop", "sequential", 0)


def test_crashes_and_hangs_are_noticed(differential, monkeypatch):
    # Guards the first test.
    def start(task, out, err):
        code = (
            "import differential, faulthandler, json, sys; faulthandler.enable()\n"
            "differential.run_cases(**json.loads(sys.argv[1]))"
        )
        return Watched(out, err, code, json.dumps(task), PYTHONPATH=CHECKS)

    monkeypatch.setattr(differential, "start", start)
    trap = json.dumps({"0": "crash", "1": "hang"})
    words = ["--cases", "2", "--trap", trap, "--patience", "1"]
    result = differential.differential(differential.parse(words))
    ended = [(failure["seed"], failure["what"]) for failure in result["failures"]]
    assert ended == [(0, ["signal 11"]), (1, ["hangs"])]
    assert all("in run_cases" in failure["traceback"] for failure in result["failures"])
    assert result["cases"] == result["wrong"] == 2
    assert all(len(failure["script"].splitlines()) <= 20 for failure in result["failures"])
