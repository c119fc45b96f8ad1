"""Random configurations of a loader, each a function of its seed, and the Python that builds it.

``differential.py`` runs that Python, so a script that reproduces a failure is the configuration
itself. Every picture tells what it is: red grows along x, green along y, and blue is its sample.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

Sizes = tuple[tuple[int, int], ...]

LINES = 20  # of a script, at most
LARGER = 2  # times each side, of the second image of "two sizes"
THIN = 12  # pixels: a narrower picture has too few crops to tell two apart
SIZES: dict[str, Sizes] = {
    "equal": ((24, 32),),
    "mixed": ((24, 32), (40, 30), (33, 64)),
    "one pixel wide": ((32, 1), (24, 32), (1, 40)),
}
FILES = {
    "png": '"PNG"',
    "jpeg": '"JPEG", quality=95, subsampling=0',
    "progressive": '"JPEG", quality=95, subsampling=0, progressive=True',
    "mixed": '("PNG", "JPEG")[i % 2], quality=95, subsampling=0, progressive=i % 3 == 0',
}
BAD = {"text": 'b"no picture"', "cut": "file(i)[:40]", "empty": 'b""'}
NAMES = {"index": ", i", "path": ', path=f"{i}.jpg"', "none": ""}
RAISED = {"ValueError": "ValueError", "KeyError": "KeyError", "own": "Trouble"}


@dataclass(frozen=True)
class Form:
    """How a sample and its batch look; ``{image}`` is its image, and ``b`` a batch.

    ``{large}`` is the same picture in twice the size.
    """

    sample: str
    images: str = "(b[0],)"
    label: str = "b[1]"
    before: str = ""
    collate: str = ""


FORMS = {
    "pair": Form("({image}, i)"),
    "list": Form("[{image}, i]"),
    "dict": Form('{{"x": {image}, "y": i, "name": f"s{{i}}"}}', '(b["x"],)', 'b["y"]'),
    "namedtuple": Form(
        "Pair({image}, i)",
        "(b.x,)",
        "b.y",
        'import collections; Pair = collections.namedtuple("Pair", "x y")',
    ),
    "dataclass": Form(
        "({image}, i)",
        "(b.x,)",
        "b.y",
        "from dataclasses import make_dataclass; "
        'Row = make_dataclass("Row", ["x", "y"], namespace={"__module__": __name__})',
        "Row(*default_collate(samples))",
    ),
    "nested": Form(
        '{{"a": [{image}, {{"b": (i, torch.tensor([i, 2 * i]))}}]}}',
        '(b["a"][0],)',
        'b["a"][1]["b"][0]',
    ),
    "extras": Form(
        '{{"x": {image}, "y": i, "no": None, "at": (i, i + 1)}}',
        '(b["x"],)',
        'b["y"]',
        collate='default_collate([s | {"no": 0} for s in samples]) | {"no": [None] * len(samples)}',
    ),
    "two images": Form('{{"A": {image}, "B": {image}, "y": i}}', '(b["A"], b["B"])', 'b["y"]'),
    "two sizes": Form('{{"A": {image}, "B": {large}, "y": i}}', '(b["A"], b["B"])', 'b["y"]'),
}

_CROP = "g.RandomResizedCrop({size}, scale=(0.1, 0.7))"
# The list; what is read back of a picture, if it can be; and whether later ops count batches.
LISTS: dict[str, tuple[str, str, bool]] = {
    "none": ("None", "whole", False),
    "resize": ("[g.Resize(({size}, {size} + 4))]", "resize", False),
    "resize, center": ("[g.Resize({size} + 4), g.CenterCrop({size})]", "center", False),
    "crop": (f"[{_CROP}]", "crop", False),
    "crop, flip": (f"[{_CROP}, K.RandomHorizontalFlip()]", "crop", False),
    "normalize": (
        f"[{_CROP}, v2.RandomHorizontalFlip(), v2.Normalize([0.5] * 3, [0.25] * 3)]",
        "crop",
        False,
    ),
    "views": (f"g.Views([{_CROP}], [{_CROP}, K.RandomHorizontalFlip()])", "crop", False),
    "RandAugment": (f"[{_CROP}, v2.RandAugment()]", "", False),
    "TrivialAugmentWide": (f"[{_CROP}, v2.TrivialAugmentWide()]", "", False),
    "ColorJitter": (f"[{_CROP}, v2.ColorJitter(0.4, 0.4, 0.4)]", "", False),
    "RandomErasing": (f"[{_CROP}, v2.RandomErasing(1.0)]", "", False),
    "kornia": (f"[{_CROP}, K.ColorJitter(0.4, 0.4, 0.4, p=1.0)]", "", True),
    "function": (f"[{_CROP}, lambda x: x + torch.rand_like(x)]", "", True),
    "tensors, crop": ("[K.RandomCrop((16, 20)), K.RandomHorizontalFlip()]", "window", True),
    "tensors, RandAugment": ("[K.RandomCrop((16, 20)), v2.RandAugment()]", "", True),
}
# What a loop does between two epochs of a folder, whose workers may have begun the second one.
BETWEEN = {
    "nothing": "",
    "validation": "list(DataLoader(range(2)))",
    "random numbers": "torch.rand(3)",
    "a sample less": 'del getattr(loader.dataset, "samples", loader.dataset)[-1]',
    "other batches": "loader.batch_sampler.batch_size += 1",
}
POLICIES = {"RandAugment", "TrivialAugmentWide", "ColorJitter", "RandomErasing"}


@dataclass(frozen=True)
class Config:
    """A loader, what a dataset gives it, and what a program does with it."""

    seed: int
    device: str
    count: int  # samples of the dataset
    sizes: str
    files: str
    alike: bool  # one picture for every sample: equal results are equal draws
    transforms: str
    size: int
    names: str
    form: str
    data: str  # samples, subset, concat, stream, folder
    sampler: str
    drawn: int  # samples, of a sampler with replacement
    batches: tuple[tuple[int, ...], ...]  # of the user's own batch sampler
    batch: int | None
    drop_last: bool
    world: int  # ranks that share samples out
    workers: int
    other_workers: int  # of a second run, or after a resume
    persistent: bool
    context: str
    factor: int  # prefetch_factor
    in_order: bool
    dtype: str
    channels_last: bool
    depth: int | None
    budget: str | None
    decoder: str
    bad: tuple[int, ...]
    bad_kind: str
    on_error: str
    max_bad: int | None
    slow: bool
    raises: int  # the sample that raises, -1 for none
    raised: str
    seeding: str  # given, before the prefetcher is built, or late
    draws_seed: int
    story: str
    done: int  # epochs before
    taken: int  # batches of an epoch that ends early
    way: str  # of that end
    epochs: tuple[int, ...]  # numbers that are set
    together: str  # of ranks: one after the other, in threads, in processes
    between: str  # of the epochs, what the loop does

    @property
    def encoded(self) -> bool:
        return not self.transforms.startswith("tensors")

    @property
    def reads(self) -> str:
        """What can be read back of a picture: the whole, a resize, a crop or a window of it."""
        return LISTS[self.transforms][1]

    @property
    def named(self) -> bool:
        """Whether a picture says which sample it is of."""
        return bool(self.reads) and not self.alike

    @property
    def images(self) -> int:
        """How many images a sample has."""
        return 2 if self.form in ("two images", "two sizes") else 1

    @property
    def counts_batches(self) -> bool:
        """Whether some draws depend on the number of the batch."""
        return LISTS[self.transforms][2]

    @property
    def repeats(self) -> bool:
        return self.sampler in ("replacement", "weighted")

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the epochs that the story yields."""
        if self.epochs:
            return self.epochs
        if self.story == "early" and not self.taken:
            return 0, 0  # an iterator that is dropped unused is no epoch
        return tuple(range(3 if self.story == "resume" and self.done else 2))


def _pick(rng: random.Random, **weights: float) -> str:
    return rng.choices(list(weights), list(weights.values()))[0].replace("_", " ")


def draw(seed: int, device: str = "cpu") -> Config:
    """The configuration of a seed."""
    rng = random.Random(seed)
    story = _pick(rng, epochs=4, early=2, resume=3, ranks=3, numbered=1.5, restarted=0.8)
    tensors = rng.random() < 0.15
    transforms = (
        rng.choice(["tensors, crop", "tensors, crop", "tensors, RandAugment"])
        if tensors
        else rng.choice([name for name in LISTS if not name.startswith("tensors")])
    )
    count = rng.choice([0, 1, 2, 3]) if rng.random() < 0.12 else rng.randrange(5, 25)
    world = rng.randrange(2, 5) if story == "ranks" else 1
    shared = ["distributed", "distributed", "range"]
    samplers = "sequential shuffle generator random replacement weighted".split()
    samplers += ["subset random", "batches", "batches", "distributed", "range"]
    sampler = rng.choice(shared if story == "ranks" else samplers)
    if story == "restarted":
        sampler = "distributed"
        world = rng.randrange(1, 3)
    data = _pick(rng, samples=6, subset=1, concat=1, stream=1)
    if not count or (data == "stream" and story in ("ranks", "restarted")):
        data = "samples"
    if data == "stream":
        sampler = "sequential"
    if not count and sampler not in ("range", "distributed"):
        sampler = "sequential"
    workers = rng.choices([0, 1, 2, 3], [5, 3, 2, 0.7])[0]
    batch = rng.randrange(1, 8)
    in_order = workers < 2 or data == "stream" or story != "epochs" or rng.random() < 0.8
    bad = ()
    raises = -1
    faults = story in ("epochs", "ranks", "numbered", "resume") and in_order and count > 0
    if faults and not tensors and rng.random() < 0.4:
        bad = tuple(sorted(rng.sample(range(count), rng.randrange(1, count // 3 + 2))))
    elif faults and story != "resume" and rng.random() < 0.12:
        raises = rng.randrange(count)
    on_error = rng.choice(["raise", "skip", "replace", "replace", "callable"])
    if story == "resume":  # the loop that is left early has no error
        on_error = rng.choice(["skip", "callable"])
        bad = () if count < 5 or sampler in ("replacement", "weighted") else bad
    few = story != "resume" and on_error != "raise" and rng.random() < 0.25
    max_bad = rng.randrange(4) if few else None
    ends = on_error in ("raise", "replace") or max_bad is not None
    if bad and ends and sampler in ("shuffle", "generator", "random"):
        # RandomSampler draws once more at the end of an epoch, which the plain loader reaches.
        sampler = "subset random"
    form = "pair" if tensors else rng.choice(list(FORMS))
    single = sampler not in ("batches",) and story == "epochs" and not tensors
    single = single and in_order and form not in ("dataclass", "extras") and rng.random() < 0.1
    sizes = "equal" if tensors else rng.choice([*SIZES, "mixed"])
    alike = transforms not in ("none", "tensors, crop") and rng.random() < 0.25
    order = list(range(count))
    rng.shuffle(order)
    cuts = sorted(rng.sample(range(1, count), min(rng.randrange(5), count - 1))) if count else []
    parts = zip([0, *cuts], [*cuts, count], strict=True)
    contexts = {"fork": 97, "spawn": 1, "forkserver": 1} if device == "cpu" else {"fork": 1}
    context = _pick(rng, **contexts) if workers else "fork"
    persistent = workers > 0 and rng.random() < 0.4
    ends = [
        "break",
        "close",
        "second",
        "two at once",
    ]  # persistent workers serve one loop at a time
    way = rng.choice(ends[: 3 if persistent else 4])
    taken = rng.randrange(5)
    numbers = {
        "numbered": tuple(sorted(rng.sample(range(6), 2))),
        "restarted": tuple(range(first := rng.randrange(1, 4), first + 2)),
    }
    # The processes are forked, and are no parents of a fork server that was there before.
    forks = device == "cpu" and context == "fork"
    ways = {"alone": 5, "threads": 3} | ({"processes": 0.6} if forks else {})
    together = _pick(rng, **ways) if story == "ranks" else "alone"
    config = Config(
        seed=seed,
        device=device,
        count=count,
        sizes="equal" if alike else sizes,
        files=rng.choice(list(FILES)),
        alike=alike,
        transforms=transforms,
        size=rng.randrange(12, 19),
        names=rng.choice(["index", "index", "path", "none"]),
        form=form,
        data=data,
        sampler=sampler,
        drawn=rng.randrange(1, 25),
        batches=tuple(tuple(order[first:last]) for first, last in parts),
        batch=None if single else batch,
        drop_last=not single and sampler != "batches" and rng.random() < 0.25,
        world=world,
        workers=workers,
        other_workers=workers
        if data == "stream"
        else max(rng.choice([0, 0, 1, 2]), int(persistent)),
        persistent=persistent,
        context=context,
        factor=rng.randrange(1, 4),
        in_order=in_order,
        dtype=_pick(rng, float32=6, float16=1, uint8=1) if transforms == "crop" else "float32",
        channels_last=rng.random() < 0.2,
        depth=rng.choice([None, None, 1, 2, 3]),
        budget=rng.choice([None, None, None, "1MiB"]),
        decoder=_pick(rng, auto=5, cpu=1),
        bad=bad,
        bad_kind=rng.choice(list(BAD)),
        on_error=on_error,
        max_bad=max_bad,
        slow=rng.random() < 0.15,
        raises=raises,
        raised=rng.choice(list(RAISED)),
        seeding=_pick(rng, given=4, before=1.5, late=1.5),
        draws_seed=rng.randrange(1000),
        story=story,
        done=rng.randrange(2),
        taken=max(taken, 1) if way in ("second", "two at once") else taken,
        way=way,
        epochs=numbers.get(story, ()),
        together=together,
        between="nothing",
    )
    # Drawn apart, so that a seed stays the configuration that it was.
    apart = random.Random(f"folder {seed}")
    if data == "samples" and count and not tensors and apart.random() < 0.4:
        # Its workers begin the next epoch ahead of time, if the order is known.
        known = apart.choice(["sequential", "shuffle", "distributed"])
        config = replace(
            config,
            data="folder",
            form="pair",
            names="index",
            sampler=known if story == "epochs" and sampler != "batches" else sampler,
            workers=max(workers, 1),
            raises=-1,
            slow=False,
        )
        if may_fail(config) and config.sampler in ("shuffle", "generator", "random"):
            config = replace(config, sampler="subset random")
    if config.data == "folder" and story == "epochs":
        config = replace(config, between=_pick_between(config))
    if context != "fork":  # each of these workers is seconds of work
        other = 1 if data == "stream" or persistent else min(config.other_workers, 1)
        config = replace(config, workers=1, other_workers=other, world=min(world, 2))
    if story != "resume":
        return config
    return replace(config, taken=min(taken, max(_least_batches(config) - len(bad), 0)))


def _pick_between(config: Config) -> str:
    """What the loop does between two epochs, if that leaves it two of the configuration."""
    choices = [*BETWEEN]
    if config.count < 2 or config.sampler not in ("sequential", "shuffle"):
        choices.remove("a sample less")  # other samplers have counted the samples
    if config.sampler == "batches" or config.batch is None:
        choices.remove("other batches")
    return random.Random(f"between {config.seed}").choice(choices)


def _least_batches(config: Config) -> int:
    """How many batches an epoch has at least."""
    if config.sampler == "batches":
        return len(_within(config))
    count = len(subset(config)) if config.data == "subset" else config.count
    count = {"replacement": config.drawn, "weighted": config.drawn}.get(config.sampler, count)
    count = (count + 1) // 2 if config.sampler == "subset random" else count
    return count // (config.batch or 1)


def _sampler(config: Config) -> str:
    """The arguments of the DataLoader that say which samples come."""
    seeded = f"torch.Generator().manual_seed({config.seed})"
    sampler = {
        "sequential": "",
        "shuffle": "shuffle=True",
        "generator": f"shuffle=True, generator={seeded}",
        "random": f"sampler=RandomSampler(data, generator={seeded})",
        "replacement": f"sampler=RandomSampler(data, True, {config.drawn})",
        "weighted": f"sampler=WeightedRandomSampler([*range(1, len(data) + 1)], {config.drawn})",
        "subset random": "sampler=SubsetRandomSampler(range(0, len(data), 2))",
        "batches": f"batch_sampler={[*map(list, _within(config))]}",
        "distributed": f"sampler=DistributedSampler(data, {config.world}, rank)",
        "range": f"sampler=range(rank, len(data), {config.world})",
    }[config.sampler]
    words = [sampler] if sampler else []
    if config.sampler != "batches":
        words.append(f"batch_size={config.batch}")
    if config.drop_last:
        words.append("drop_last=True")
    return ", ".join(words)


def _within(config: Config) -> Sequence[Sequence[int]]:
    """The user's own batches, of the positions that the dataset has."""
    length = len(subset(config)) if config.data == "subset" else config.count
    batches = [[i for i in batch if i < length] for batch in config.batches]
    return [batch for batch in batches if batch]


def subset(config: Config) -> range:
    """The indices of a Subset: every other sample, the last one first."""
    return range(config.count - 1, -1, -2)


def base(config: Config, plain: str = "") -> str:
    """An expression for the dataset, of all samples; ``plain`` is the argument that it gets."""
    if config.data == "stream":
        return f"Stream({plain})"
    if config.data != "concat":
        return f"Samples({plain})"
    first = f"{plain}, " if plain else ""
    half = config.count // 2
    return (
        f"ConcatDataset([Samples({first}range({half})), "
        f"Samples({first}range({half}, {config.count}))])"
    )


def transforms(config: Config) -> str:
    return LISTS[config.transforms][0].format(size=config.size)


def _imports(config: Config) -> list[str]:
    listed = transforms(config)
    form = FORMS[config.form]
    first = "import io, json, time, numpy as np, torch, gpuprefetch as g; from PIL import Image"
    more = ["from torch.utils.data import *"]
    more += ["from torchvision.transforms import v2"] * ("v2." in listed)
    more += ["import kornia.augmentation as K"] * ("K." in listed)
    more += [form.before] * bool(form.before)
    lines = [first, "; ".join(more)]
    if form.collate:
        lines.append(f"def collate(samples): return {form.collate}")
    if config.raises >= 0 and config.raised == "own":
        lines.append("class Trouble(Exception): pass")
    return lines


def _file(config: Config) -> list[str]:
    sizes = list(SIZES[config.sizes])
    number = "7" if config.alike else "i"
    planes = f"x * 255 // max(w - 1, 1), y * 255 // max(h - 1, 1), 0 * x + 10 * {number}"
    of = "i"
    grid = "np.mgrid[:h, :w]"
    if config.form == "two sizes":
        of = "i, by=1"
        grid = "np.mgrid[: by * h, : by * w] // by"
    return [
        f"def file({of}):  # red grows along x, green along y, blue is the sample",
        f"    (h, w), f = {sizes}[i % {len(sizes)}], io.BytesIO(); y, x = {grid}",
        f"    a = np.stack([{planes}], 2).astype(np.uint8)",
        f"    Image.fromarray(a).save(f, {FILES[config.files]}); return f.getvalue()",
    ]


def _folder(config: Config, data: str, *, plain: bool) -> list[str]:
    """A folder of the files, each a class of its own: its label is its number."""
    numbers = f"range({config.count})"
    made = "g.EncodedImageFolder(root)"
    given = f"[(float(i), i) for i in {numbers}] if plain else {made}" if plain else made
    return [
        "import atexit, pathlib, shutil, tempfile; root = tempfile.mkdtemp()",
        "atexit.register(shutil.rmtree, root, True)",
        f"for i in {numbers}:",
        '    path = pathlib.Path(root, f"{i:03}", f"{i}.jpg"); path.parent.mkdir()',
        f"    path.write_bytes({data})",
        f"def Samples({'plain' * plain}): return {given}",
    ]


def _dataset(config: Config, *, plain: bool) -> list[str]:
    data = "file(i)"
    if config.bad:
        data = f"{BAD[config.bad_kind]} if i in {set(config.bad)} else file(i)"
    if config.data == "folder":
        return _folder(config, data, plain=plain)
    image = f"g.EncodedImage({data}{NAMES[config.names]})"
    if not config.encoded:
        image = "torch.tensor(np.array(Image.open(io.BytesIO(file(i))))).permute(2, 0, 1)"
    if plain:
        image = f"(float(i) if self.plain else {image})"
    large = image.replace("file(i)", f"file(i, {LARGER})")
    sample = FORMS[config.form].sample.format(image=image, large=large)
    body = [f"if i == {config.raises}: raise {RAISED[config.raised]}(i)"] * (config.raises >= 0)
    wait = "time.sleep(i * 7 % 5 / 1000); " * config.slow
    keep = "    def __init__(self, plain): self.plain = plain"
    if config.data == "stream":
        shard = f"w.id if w else 0, {config.count}, w.num_workers if w else 1"
        lines = ["class Stream(IterableDataset):", *[keep] * plain, "    def __iter__(self):"]
        lines += ["        w = get_worker_info()", f"        for i in range({shard}):"]
        return lines + [f"            {line}" for line in [*body, f"{wait}yield {sample}"]]
    lines = ["class Samples(Dataset):"]
    if config.data == "concat":
        given = "plain, numbers" if plain else "numbers"
        sets = "self.plain, self.numbers = plain, numbers" if plain else "self.numbers = numbers"
        lines.append(f"    def __init__(self, {given}): {sets}")
        lines.append("    def __len__(self): return len(self.numbers)")
        body.insert(0, "i = self.numbers[k]")
    else:
        lines += [keep] * plain
        lines.append(f"    def __len__(self): return {config.count}")
    lines.append(f"    def __getitem__(self, {'k' if config.data == 'concat' else 'i'}):")
    return [*lines, *(f"        {line}" for line in [*body, f"{wait}return {sample}"])]


def _options(config: Config) -> str:
    """The arguments of the prefetcher, but its seed."""
    given = [f'device="{config.device}"', f"transforms={transforms(config)}"]
    if config.dtype != "float32":
        given.append(f"dtype=torch.{config.dtype}")
    if config.channels_last and config.transforms != "none":
        given.append("memory_format=torch.channels_last")
    if config.depth is not None:
        given.append(f"device_prefetch_size={config.depth}")
    if config.budget is not None:
        given.append(f'memory_budget="{config.budget}"')
    if config.decoder != "auto":
        given.append(f'decoder="{config.decoder}"')
    if config.bad:
        choice = "lambda bad: None" if config.on_error == "callable" else f'"{config.on_error}"'
        given.append(f"on_error={choice}")
        given += [f"max_bad={config.max_bad}"] * (config.max_bad is not None)
    return ", ".join(given)


def _loading(config: Config) -> str:
    """The arguments of the DataLoader."""
    loading = [_sampler(config), "num_workers=workers"]
    if config.workers:
        loading += ["persistent_workers=workers > 0"] * config.persistent
        loading.append(f"prefetch_factor={config.factor} if workers else None")
    if config.context != "fork":
        loading.append(f'multiprocessing_context="{config.context}" if workers else None')
    loading += ["in_order=False"] * (not config.in_order)
    loading += ["collate_fn=collate"] * bool(FORMS[config.form].collate)
    loading += ["pin_memory=True"] * (config.device == "cuda")
    return ", ".join(word for word in loading if word)


def _loader(config: Config, *, plain: bool) -> list[str]:
    data = base(config, "plain" if plain else "")
    if config.data == "subset":
        data = f"Subset({data}, {subset(config)})"
    seed = config.draws_seed if config.seeding == "given" else None
    give = "loader if plain else ours(loader)" if plain else "ours(loader)"
    return [
        f"def ours(loader, seed={seed}):",
        f"    return g.DataPrefetcher(loader, seed=seed, {_options(config)})",
        f"def make({'plain, ' if plain else ''}rank=0, workers={config.workers}):",
        f"    data = {data}; loader = DataLoader(data, {_loading(config)}); return {give}",
    ]


def _story(config: Config, *, plain: bool) -> list[str]:
    """A generator of epochs, each a list of batches; an error is the last entry of its epoch."""
    lines = []
    every = "list(loader)"
    if may_fail(config):
        lines = ["def batches(loader):", "    try: yield from loader"]
        lines.append("    except Exception as error: yield error")
        every = "list(batches(loader))"
    lines.append(f"def story(loader{', plain, rank=0' if plain else ', rank=0'}):")
    body = _steps(config, every, plain=plain)
    return lines + [f"    {line}" for line in body]


def _steps(config: Config, every: str, *, plain: bool) -> list[str]:
    some = f"[b for _, b in zip(range({config.taken}), it)]"
    match config.story:
        case "numbered":
            call = "loader.set_epoch(e)"
            if plain:
                call = 'getattr(loader.sampler if plain else loader, "set_epoch", int)(e)'
            return [f"for e in {config.epochs}: {call}; yield {every}"]
        case "restarted":
            return [f"for e in {config.epochs}: loader.sampler.set_epoch(e); yield {every}"]
        case "early":
            begin = f"it = iter(loader); had = {some}"
            if config.way == "two at once":
                return [f"{begin}; other = {every}; yield had + list(it); yield other"]
            close = "plain or it.close(); " if plain else "it.close(); "
            end = {"break": "del it; ", "close": close, "second": ""}[config.way]
            return [f"{begin}; {end}yield had; yield {every}"]
        case "resume":
            return _resume(config, every, some, plain=plain)
    between = f"{BETWEEN[config.between]}; " if BETWEEN[config.between] else ""
    return [f"yield {every}; {between}yield {every}"]


def _resume(config: Config, every: str, some: str, *, plain: bool) -> list[str]:
    begin = f"it = iter(loader); had = {some}" if config.taken else "it, had = loader, []"
    begin = f"yield {every}; " * config.done + begin
    again = f"make({'False, ' if plain else ''}rank, {config.other_workers})"
    load = f"state = json.dumps(loader.state_dict()); loader = {again}"
    load += "; loader.load_state_dict(json.loads(state))"
    rest = f"yield had + {every}; yield {every}"
    if not plain:
        return [begin, load, rest]
    whole = f"yield had + list(it); yield {every}; return"
    return [begin, f"if plain: {whole}", load, rest]


def may_fail(config: Config) -> bool:
    """Whether an epoch may end with an error."""
    return bool(config.bad) or config.raises >= 0


def source(config: Config, *, plain: bool = True) -> str:
    """Python that defines ``make()`` and ``story()``; with ``plain`` also of the plain loader."""
    parts = (_imports(config), _file(config), _dataset(config, plain=plain))
    parts += (_loader(config, plain=plain), _story(config, plain=plain))
    return "\n".join(line for part in parts for line in part) + "\n"


def script(config: Config, ending: Sequence[str]) -> str:
    """The configuration on its own, and lines that show what is wrong with it."""
    lines = source(config, plain=False).splitlines()
    if config.context != "fork" and config.workers:
        lines += ['if __name__ == "__main__":', *(f"    {line}" for line in ending)]
    else:
        lines += ending
    return "\n".join(_joined(lines)) + "\n"


_COMPOUND = ("if ", "else", "for ", "try", "except", "def ", "class ", "while ", "with ")


def _joined(lines: list[str]) -> list[str]:
    """The same in fewer lines: bodies of one statement, then whole runs of statements."""

    def depth(line: str) -> int:
        return len(line) - len(line.lstrip())

    def simple(line: str) -> bool:
        return not line.lstrip().startswith(_COMPOUND) and "#" not in line

    at = 0
    while at < len(lines) - 1:
        head, body = lines[at : at + 2]
        alone = at + 2 == len(lines) or depth(lines[at + 2]) <= depth(head)
        if head.endswith(":") and simple(body) and depth(body) > depth(head) and alone:
            lines[at : at + 2] = [f"{head} {body.strip()}"]
        at += 1
    at = 0
    while len(lines) > LINES and at < len(lines) - 1:
        first, second = lines[at : at + 2]
        if simple(first) and simple(second) and depth(first) == depth(second):
            lines[at : at + 2] = [f"{first}; {second.strip()}"]
        else:
            at += 1
    return lines


def counted(config: Config) -> dict[str, Any]:
    """What a document counts configurations by."""
    names = "transforms form data sampler sizes files names story context seeding together".split()
    kinds = {name: getattr(config, name) for name in [*names, "between"]}
    kinds["workers"] = f"{config.workers}{', persistent' * config.persistent}"
    kinds["on_error"] = config.on_error if config.bad else "no bad file"
    return kinds
