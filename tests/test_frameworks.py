"""The recipes of examples/frameworks, with the real libraries, and with two processes."""

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import textwrap
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from children import Child, ranks
from pictures import draw
from PIL import Image
from small_model import get_model
from torch.utils.data import DataLoader

from gpuprefetch import DataPrefetcher, Resize

# Nothing here is about the end of an interpreter.
Child, ranks = (partial(start, whole=False) for start in (Child, ranks))

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "frameworks"
RANKS = 2
COUNT = 18  # pictures of each split: not a multiple of what the ranks take at once

START = """
import contextlib, gc, json, pathlib, sys, torch.distributed as dist, warnings
warnings.simplefilter("ignore")
import gpuprefetch
from gpuprefetch import DataPrefetcher
from torch.utils.data import DataLoader

@contextlib.contextmanager
def told():
    words = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield words
    words += [str(w.message) for w in found if str(w.message).startswith("Every rank")]

"""

FIT = """
import lightning as L, torch
from lightning.pytorch.callbacks import ModelCheckpoint

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.train_seen, self.val_seen = torch.nn.Linear(3, 1), [], []
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def fit(model, data, *callbacks, path=None, **options):
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = L.Trainer(
        accelerator="cpu", logger=False, num_sanity_val_steps=0, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=saves, callbacks=[*callbacks], **options,
    )
    trainer.fit(model, datamodule=data, ckpt_path=path)
    return trainer
"""

LIGHTNING = """
from with_lightning import Accelerated, Images

class Counting(Module):  # the target is the picture's number
    def training_step(self, batch, _):
        images, target = batch
        assert images.device == self.device
        self.train_seen.append([self.current_epoch, target.tolist()])
        return self.layer(images.mean((2, 3))).mean()
    def validation_step(self, batch, _):
        self.val_seen.extend(batch[1].tolist())

class Plain(L.LightningDataModule):  # Lightning adds a sampler to what is a DataLoader
    wrap = staticmethod(lambda loader: loader)
    def loader(self, split, shuffle):
        from torchvision import datasets, transforms as T
        ops = T.Compose([T.Resize((8, 8)), T.ToTensor()])
        folder = datasets.ImageFolder(f"{root}/{split}", ops)
        return self.wrap(DataLoader(folder, 2, shuffle=shuffle))
    def train_dataloader(self):
        return self.loader("train", True)
    def val_dataloader(self):
        return self.loader("val", False)

class Moved(Plain):
    def wrap(self, loader):
        return gpuprefetch.accelerate(loader, device="cpu", print_plan=False)

def fit_ranks(data, *callbacks, **options):
    model = Counting()
    return fit(model, data, *callbacks, devices=ranks, strategy="ddp", **options), model

def fit_recipe(*callbacks, path=None):
    data = Images(root, batch_size=2, num_workers=0, size=8)
    return fit_ranks(data, *callbacks, path=path, max_epochs=2)[1]

with told() as recipe:
    every_step = {"every_n_train_steps": 1, "save_top_k": -1}
    first = fit_recipe(ModelCheckpoint(root + "/saved", "{step}", **every_step))
resumed = {n: fit_recipe(path=f"{root}/saved/step={n}.ckpt").train_seen
           for n in (2, len(first.train_seen) // 2)}
result["lightning"] = {"train": first.train_seen, "val": first.val_seen, "resumed": resumed}
with told() as words:
    fit_ranks(Moved(), max_steps=1, limit_val_batches=0)
with told() as callback:
    trainer, model = fit_ranks(Plain(), Accelerated(), max_epochs=2)
    assert isinstance(trainer.train_dataloader, DataPrefetcher)
    assert isinstance(trainer.val_dataloaders, DataPrefetcher)
    assert "process_dataloader" not in vars(trainer.strategy)
result["lightning"]["plain"] = {"train": model.train_seen, "val": model.val_seen}
result["lightning"]["told"] = recipe + callback, words
"""

ACCELERATE = """
import functools, small_model, torch, torchvision, with_accelerate
from accelerate import Accelerator
from gpuprefetch import EncodedImageFolder, Resize
accelerator = Accelerator(gradient_accumulation_steps=2)
dataset, epochs = EncodedImageFolder(root + "/train"), []
model = accelerator.prepare(torch.nn.Linear(3, 1))
with told() as words:
    for shuffle in (False, True):
        # No workers: forked beside gloo's threads, one in twenty hangs in CPython 3.11's own code.
        loader = DataLoader(dataset, 4, shuffle=shuffle, num_workers=0)
        loader = with_accelerate.prepare(accelerator, loader, [Resize((8, 8))])
        for epoch in range(2):
            mine, gathered, synced = [], [], []
            for images, target in loader:
                assert images.device.type == "cpu" and images.shape[1:] == (3, 8, 8)
                with accelerator.accumulate(model):
                    synced.append(accelerator.sync_gradients)
                mine += target.tolist()
                gathered += accelerator.gather_for_metrics(target).tolist()
            epochs.append({"mine": mine, "gathered": gathered, "synced": synced})
with told() as unlike:
    prepared = accelerator.prepare(DataPrefetcher(DataLoader(range(6), 2), device="cpu"))
    assert len(list(prepared)) == 3  # everything, also on this rank
result["accelerate"] = epochs
result["accelerate_told"] = words, unlike
torchvision.models.resnet18 = functools.partial(small_model.get_model, "resnet18")
with_accelerate.main(root, epochs=1, batch_size=8, num_workers=0, size=32)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("frameworks")
    for split in ("train", "val"):
        for i in range(COUNT):
            path = root / split / f"{i:02d}" / "picture.jpg"
            path.parent.mkdir(parents=True)
            Image.new("RGB", (40 + i, 50), (9 * i, 90, 200)).save(path)
    return root


@pytest.fixture(scope="module")
def lightning():
    """Skip where it cannot be imported, which takes a second: in a process that tests fork from."""
    child = Child("import lightning", modules=["lightning"])
    _, err = child.communicate()
    if child.returncode:
        reason = err.strip().splitlines()[-1]
        assert reason.startswith(("ImportError", "ModuleNotFoundError")), err
        pytest.skip(reason)


# Imported once for both, and without these two part of what is tested is not there.
MODULES = ["torchvision", "kornia.augmentation", "datasets", "lightning", "accelerate"]


@pytest.fixture(scope="module")
def found(folder, tmp_path_factory):
    """What each of two processes found; they find each other as torchrun's do."""
    parts = {"lightning": FIT + LIGHTNING, "accelerate": ACCELERATE}
    code = "".join(parts[name] for name in parts if importlib.util.find_spec(name))
    # In a function: a DDP model that lives on holds the group, whose threads must have ended at
    # exit. One process in a hundred aborted there.
    code = f"def run():\n{textwrap.indent(code, '    ')}\nrun()\n"
    start = f"import faulthandler; faulthandler.enable()\n{START}"
    start += f"root, ranks, result = {str(folder)!r}, {RANKS}, {{}}\n"
    ending = "\npathlib.Path(f'{dist.get_rank()}.json').write_text(json.dumps(result))\n"
    ending += "gc.collect()\ndist.barrier()\ndist.destroy_process_group()\n"
    folder_out = tmp_path_factory.mktemp("ranks")
    path = f"{FOLDER}{os.pathsep}{Path(__file__).parent}"
    options = {"PYTHONPATH": path, "ACCELERATE_USE_CPU": "true", "folder": folder_out}
    children = ranks(RANKS, start + code + ending, modules=MODULES, **options)
    try:
        outputs = [child.communicate(240) for child in children]
    except subprocess.TimeoutExpired:
        for child in children:
            if child.poll() is None:
                os.kill(child.pid, signal.SIGABRT)  # prints each thread's stack
        outputs = [child.communicate() for child in children]
    assert not any(child.returncode for child in children), "\n".join(map(str, outputs))
    return [json.loads((folder_out / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.slow
@pytest.mark.usefixtures("lightning")
def test_lightning_with_two_processes(request):
    results = [result["lightning"] for result in request.getfixturevalue("found")]
    for fits in (results, [result["plain"] for result in results]):  # the module, the callback
        orders = []
        for epoch in range(2):
            seen = [n for r in fits for e, batch in r["train"] if e == epoch for n in batch]
            assert sorted(seen) == list(range(COUNT))  # each sample once, in one of the processes
            orders.append(seen)
        assert orders[0] != orders[1]  # Lightning numbered the sampler's epochs
        val = sorted(n for r in fits for n in r["val"])
        assert val == sorted([*range(COUNT)] * 2)
    recipe, words = results[0]["told"]
    assert not recipe
    assert len(words) == 1
    assert words[0].startswith("Every rank reads the whole dataset")
    for result in results:
        for done, rest in result["resumed"].items():
            assert rest == result["train"][int(done) :]


@pytest.mark.slow
def test_accelerate_with_two_processes(request):
    pytest.importorskip("accelerate")
    found = request.getfixturevalue("found")
    results = [result["accelerate"] for result in found]
    recipe, (words,) = found[0]["accelerate_told"]
    assert not recipe
    assert "prepared.base_dataloader = DataPrefetcher" in words
    for epochs in zip(*results, strict=True):
        for epoch in epochs:
            assert sorted(epoch["gathered"]) == list(range(COUNT))
            assert epoch["synced"] == [False, True, True]  # the last batch always does
        assert set(epochs[0]["mine"]) | set(epochs[1]["mine"]) == set(range(COUNT))
    mine = [result[2]["mine"] for result in results]
    assert mine[0] != results[0][3]["mine"]  # another order in the second epoch
    assert not set(mine[0][:8]) & set(mine[1][:8])


def test_a_prefetcher_goes_into_what_accelerate_prepares():
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    prefetcher = DataPrefetcher(DataLoader(range(42), 4), device="cpu")
    with pytest.raises(TypeError, match=r"prepared\.base_dataloader = DataPrefetcher"):
        accelerator.prepare_data_loader(prefetcher)
    assert accelerator.prepare(prefetcher) is prefetcher  # it is not dropped
    prepared = accelerator.prepare(DataLoader(range(42), 4))
    with pytest.raises(TypeError, match=r"prepared\.base_dataloader = DataPrefetcher"):
        DataPrefetcher(prepared, device="cpu")
    prepared.base_dataloader = DataPrefetcher(prepared.base_dataloader, device="cpu")
    assert sum(map(len, prepared)) == 42


def test_what_accelerate_skips_needs_the_prefetcher_again():
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)

    images = torch.arange(12.0).view(12, 1, 1, 1).expand(12, 3, 2, 2)
    prepared = accelerator.prepare(DataLoader(images, 4))
    loader = DataPrefetcher(prepared.base_dataloader, transforms=[lambda x: x + 1], device="cpu")
    prepared.base_dataloader = loader
    rest = accelerator.skip_first_batches(prepared, 1)
    with pytest.warns(UserWarning, match="not ahead") as told:
        seen = [batch[:, 0, 0, 0].tolist() for batch in rest]
    assert seen == [[5, 6, 7, 8], [9, 10, 11, 12]]
    rest = accelerator.skip_first_batches(prepared, 1)
    words = str(told[0].message)
    exec(words.rpartition(": ")[2].rstrip("."), {"rest": rest, "prepared": prepared})
    assert [batch[:, 0, 0, 0].tolist() for batch in rest] == [[5, 6, 7, 8], [9, 10, 11, 12]]
    assert len(list(prepared)) == 3


# torchdata 0.11 calls a function that torch 2.15 warns of.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize(("seen", "left"), [(3, 7), (None, 10)])  # None: the loop comes to its end
def test_accelerate_saves_where_an_epoch_stands(tmp_path, seen, left):
    accelerate = pytest.importorskip("accelerate")
    pytest.importorskip("torchdata.stateful_dataloader")

    def prepared():
        options = accelerate.DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=options)
        train, val = accelerator.prepare(DataLoader(range(40), 4), DataLoader(range(8), 4))
        for loader in (train, val):
            loader.base_dataloader = DataPrefetcher(loader.base_dataloader, device="cpu")
        return accelerator, train, val

    accelerator, train, _ = prepared()
    for number, _ in enumerate(train, 1):
        if number == seen:
            break
    accelerator.save_state(tmp_path)
    accelerator, train, val = prepared()
    accelerator.load_state(tmp_path)
    assert [len(list(train)) for _ in range(2)] == [left, 10]
    assert len(list(val)) == 2  # which had no epoch


WITHOUT_A_LENGTH = """
import warnings
from torch.utils.data import DataLoader, IterableDataset
from with_lightning import Prefetcher
warnings.simplefilter("error")

class Endless(IterableDataset):
    def __iter__(self):
        yield from range(40)

first, resumed = (Prefetcher(DataLoader(Endless(), 4), device="cpu") for _ in range(2))
next(iter(first))
resumed.load_state_dict(first.state_dict())
assert len(list(resumed)) == 9
"""


@pytest.mark.usefixtures("lightning")
def test_lightning_recipe_without_a_length():
    child = Child(WITHOUT_A_LENGTH, PYTHONPATH=str(FOLDER), modules=["lightning"])
    _, err = child.communicate()
    assert child.returncode == 0, err


EPOCHS = """
import sys, warnings, logging
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
from torch.utils.data import DataLoader, TensorDataset
from with_lightning import Prefetcher

def drawn(x):
    return x + torch.rand(len(x), 1, 1, 1)

class Seeing(Module):
    def training_step(self, batch, _):
        self.train_seen.append(batch[0][:, 0, 0, 0].tolist())
        return self.layer(batch[0].mean((2, 3))).mean()

class Data(L.LightningDataModule):
    def train_dataloader(self):
        data = TensorDataset(torch.zeros(8, 3, 2, 2))
        return Prefetcher(DataLoader(data, 2), transforms=[drawn], device="cpu", seed=0)

def seen(epochs, *callbacks, **options):
    fit(model := Seeing(), Data(), *callbacks, max_epochs=epochs, **options)
    return model.train_seen

whole = seen(3)
assert len({str(batch) for batch in whole}) == 12
assert seen(3, reload_dataloaders_every_n_epochs=1) == whole
saved = ModelCheckpoint(dirpath=sys.argv[1], filename="epoch")
assert seen(2, saved) == whole[:8]
assert seen(3, path=saved.best_model_path) == whole[8:]
steps = ModelCheckpoint(dirpath=sys.argv[1], filename="steps", every_n_train_steps=2)
short = seen(2, limit_train_batches=2)
assert short == whole[:2] + whole[4:6]
assert seen(1, steps, limit_train_batches=2) == short[:2]
assert seen(2, path=steps.best_model_path, limit_train_batches=2) == short[2:]
assert seen(2, overfit_batches=2) == short
"""


@pytest.mark.usefixtures("lightning")
def test_lightning_numbers_the_epochs(tmp_path):
    options = {"PYTHONPATH": str(FOLDER), "CUDA_VISIBLE_DEVICES": "", "modules": ["lightning"]}
    child = Child(FIT + EPOCHS, str(tmp_path), **options)
    _, err = child.communicate(240)
    assert child.returncode == 0, err


PREDICT = """
import sys, warnings, logging
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils.data import DataLoader
from torchvision import datasets, transforms as T
from with_lightning import Accelerated, Images

class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.had = []
    def write_on_batch_end(self, trainer, module, prediction, indices, batch, number, _):
        self.had.append((indices, batch[1].tolist()))
    def write_on_epoch_end(self, trainer, module, predictions, indices):
        self.epoch = indices

class Module(L.LightningModule):
    def predict_step(self, batch, number):
        return batch[1]

class Plain(L.LightningDataModule):
    def predict_dataloader(self):
        ops = T.Compose([T.Resize((8, 8)), T.ToTensor()])
        folder = datasets.ImageFolder(sys.argv[1] + "/val", ops)
        return DataLoader(folder, batch_size=5, num_workers=1)

data = Images(sys.argv[1], batch_size=5, num_workers=1, size=8)
for data, callbacks in ((data, []), (Plain(), [Accelerated()])):
    writer = Writer()
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[writer, *callbacks]
    )
    trainer.predict(Module(), datamodule=data)
    assert [len(indices) for indices, _ in writer.had] == [5, 5, 5, 3]
    assert all(indices == target for indices, target in writer.had), writer.had
    assert writer.epoch == [[indices for indices, _ in writer.had]]
    str(data)
"""


@pytest.mark.usefixtures("lightning")
def test_lightning_says_which_samples_were_predicted(folder):
    options = {"PYTHONPATH": str(FOLDER), "CUDA_VISIBLE_DEVICES": "", "modules": ["lightning"]}
    child = Child("import lightning as L\n" + PREDICT, str(folder), **options)
    _, err = child.communicate(240)
    assert child.returncode == 0, err


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*unclosed file")  # timm leaves that to PIL
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_timm(folder, monkeypatch, capsys):
    timm = pytest.importorskip("timm")
    monkeypatch.setattr(timm, "create_model", get_model)
    monkeypatch.syspath_prepend(FOLDER)
    importlib.import_module("with_timm").main(str(folder), epochs=1, batch_size=6, size=32)
    assert "RandAugment" in (text := capsys.readouterr().out)
    assert "epoch 0: top-1" in text


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_keras(folder, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("KERAS_BACKEND", "torch")  # read when it is imported, as is where it writes
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    pytest.importorskip("keras")
    monkeypatch.syspath_prepend(FOLDER)
    recipe = importlib.import_module("with_keras")
    loader = recipe.for_keras(folder / "train", [Resize((8, 8))], shuffle=True, batch_size=4)
    orders = [[n for _, target in loader for n in target.tolist()] for _ in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(COUNT))
    assert orders[0] != orders[1]
    history, logits = recipe.main(folder, epochs=1, batch_size=6, num_workers=0, size=32)
    assert len(history["loss"]) == len(history["val_accuracy"]) == 1
    assert logits.shape == (COUNT, COUNT)
    assert "3/3" in capsys.readouterr().out


NO_TRAINER = """
import sys, datasets, torch
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from accelerate import Accelerator
from with_accelerate import moved, skip_first_batches

crop = (v1.RandomResizedCrop(16), v1.RandomHorizontalFlip())
floats = (v1.ToTensor(), v1.Normalize((0.5,) * 3, (0.5,) * 3))
pipeline = v1.Compose([*crop, *floats])
center = v1.Compose([v1.Resize(16), v1.CenterCrop(16), *floats])

def loader(split, pipeline, shuffle):
    options = {"data_dir": f"{sys.argv[1]}/{split}", "cache_dir": sys.argv[2]}
    rows = datasets.load_dataset("imagefolder", split="train", **options)

    def preprocess(batch):
        batch["pixel_values"] = [pipeline(image.convert("RGB")) for image in batch["image"]]
        return batch

    def collate(examples):
        images = torch.stack([example["pixel_values"] for example in examples])
        return {"pixel_values": images, "labels": torch.tensor([e["label"] for e in examples])}

    return DataLoader(rows.with_transform(preprocess), 4, shuffle=shuffle, collate_fn=collate)

accelerator = Accelerator(cpu=True)
plain = loader("val", center, False)
(val,) = moved(accelerator.prepare(plain))
for one, other in zip(val, plain, strict=True):
    assert torch.equal(one["labels"], other["labels"])
    assert (one["pixel_values"] - other["pixel_values"]).abs().max() < 0.017  # a level

def begun():
    torch.manual_seed(4)
    (prepared,) = moved(accelerator.prepare(loader("train", pipeline, True)))
    torch.manual_seed(5)
    return prepared

whole = list(begun())
assert sorted(n for batch in whole for n in batch["labels"].tolist()) == list(range(18))
rest = list(skip_first_batches(begun(), 2))
for one, other in zip(rest, whole[2:], strict=True):
    assert torch.equal(one["labels"], other["labels"])
    assert torch.equal(one["pixel_values"], other["pixel_values"])
"""


@pytest.mark.slow
def test_a_prepared_loader_of_rows_is_moved(folder, tmp_path):
    for name in ("accelerate", "datasets"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    options = {"PYTHONPATH": str(FOLDER), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    modules = ["accelerate", "datasets"]
    arguments = NO_TRAINER, str(folder), str(tmp_path)
    child = Child(*arguments, CUDA_VISIBLE_DEVICES="", modules=modules, **options)
    out, err = child.communicate(240)
    assert child.returncode == 0, err
    assert out.count("accelerate: ") == 3  # a plan each


TRAINER = """
import copy, functools, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist, with_trainer

seen = []
load = functools.cache(with_trainer.datasets.load_dataset)  # a second of each run is its search
with_trainer.datasets.load_dataset = lambda *name, **where: copy.copy(load(*name, **where))
small = {"hidden_size": 24, "num_hidden_layers": 1, "intermediate_size": 24}
config = with_trainer.ViTConfig
with_trainer.ViTConfig = lambda **options: config(**options | small)

class Noting:
    def training_step(self, model, inputs, *rest):
        images = inputs["pixel_values"]
        assert images.dtype == torch.float32 and images.shape[1:] == (3, 16, 16)
        seen.append([inputs["labels"].tolist(), images.double().sum().item()])
        return super().training_step(model, inputs, *rest)

class Plain(Noting, with_trainer.Trainer):
    pass

class Moved(Noting, with_trainer.ImageTrainer):
    pass

folder, out = sys.argv[1:]

def run(resume=None, kind=Moved, **options):
    with_trainer.ImageTrainer = kind
    options = {"per_device_train_batch_size": 4, "dataloader_num_workers": 0} | options
    options |= {"disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    seen.clear()
    trainer = with_trainer.main(folder, out, size=16, resume=resume, **options)
    return list(seen), trainer
"""

RESUMED = """
whole, trainer = run(save_strategy="steps", save_steps=1)
assert len(whole) == 10
for epoch in (whole[:5], whole[5:]):
    assert sorted(n for labels, _ in epoch for n in labels) == list(range(18))
assert len({pixels for _, pixels in whole}) == 10
predicted = trainer.predict(trainer.eval_dataset)
assert len(predicted.label_ids) == 18
_, plain = run(kind=Plain, save_strategy="no", max_steps=1)
plain.model = plain.model_wrapped = trainer.model
in_workers = plain.predict(plain.eval_dataset)
assert (in_workers.label_ids == predicted.label_ids).all()
assert abs(in_workers.predictions - predicted.predictions).max() < 0.01
plain_run, _ = run(kind=Plain, save_strategy="no")
assert [labels for labels, _ in plain_run] == [labels for labels, _ in whole]
for step in (2, 5, 8):
    options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    rest, _ = run(f"{out}/checkpoint-{step}", save_strategy="no", **(options if step > 5 else {}))
    assert rest == whole[step:], (step, rest, whole)
"""

RANKS_OF_TRAINER = """
whole, trainer = run(save_strategy="steps", save_steps=2, ddp_backend="gloo")
rest, _ = run(f"{out}/checkpoint-2", save_strategy="no", ddp_backend="gloo")
assert rest == whole[2:]
others = [None] * dist.get_world_size()
dist.all_gather_object(others, [n for labels, _ in whole[:3] for n in labels])
assert len(whole) == 6 and set().union(*others) == set(range(18)), others
assert sum(map(len, others)) < 18 + 4 * 2  # no more than what fills the last batch
assert len(trainer.predict(trainer.eval_dataset).label_ids) == 18
dist.destroy_process_group()
"""


# Imported once for all processes.
OF_TRAINER = ["transformers.trainer", "transformers.models.vit.modeling_vit"]
OF_TRAINER += ["accelerate", "datasets"]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "code"), [(1, RESUMED), (RANKS, RANKS_OF_TRAINER)])
def test_trainer_resumes_with_what_was_left(folder, tmp_path, count, code):
    for name in ("transformers", "accelerate", "datasets"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    options = {"PYTHONPATH": str(FOLDER), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    arguments = TRAINER + code, str(folder), str(tmp_path / "out")
    if count == 1:
        children = [Child(*arguments, CUDA_VISIBLE_DEVICES="", modules=OF_TRAINER, **options)]
    else:
        children = ranks(count, *arguments, modules=OF_TRAINER, **options)
    outputs = [child.communicate(240) for child in children]
    assert not any(child.returncode for child in children), "\n".join(map(str, outputs))


VISION_LANGUAGE = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, with_qwen2_vl
from PIL import Image

folder, out = sys.argv[1:]
seen = []

class Noting(with_qwen2_vl.VisionLanguageTrainer):
    def training_step(self, *given):
        loss = super().training_step(*given)
        seen.append(loss.item())
        return loss

with_qwen2_vl.VisionLanguageTrainer = Noting

def run(resume=None, **options):
    options = {"per_device_train_batch_size": 4, "dataloader_num_workers": 0} | options
    options |= {"disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    seen.clear()
    trainer, processor = with_qwen2_vl.main(folder, out, resume=resume, **options)
    return list(seen), trainer, processor

whole, trainer, processor = run(save_strategy="steps", save_steps=2)
assert len(whole) == 6 and sum(whole[-3:]) < sum(whole[:3])
for step in (2, 4):
    rest, _, _ = run(f"{out}/checkpoint-{step}", save_strategy="no")
    assert rest == whole[step:], (step, rest, whole)

# What the whole processor makes of the same samples: no draws in evaluation.
model = trainer.model.eval()
images = trainer.eval_dataset.images
level = 1 / 255 / min(processor.image_processor.image_std)
first = 0
for batch in trainer.get_eval_dataloader():
    ours = with_qwen2_vl.named(batch)
    count = len(ours["input_ids"])
    samples = range(first, first + count)
    pictures = [Image.open(images.samples[i][0]).convert("RGB") for i in samples]
    texts = [trainer.eval_dataset[i][1].format(image=processor.image_token) for i in samples]
    theirs = processor(images=pictures, text=texts, padding=True, return_tensors="pt")
    assert {*theirs} == {*ours} - {"labels"}
    for name, values in theirs.items():
        if name != "pixel_values":
            assert torch.equal(ours[name], values), name
    off = ours["pixel_values"] - theirs["pixel_values"]
    assert off.abs().max() <= level * 1.01

    def loss(pixels):
        with torch.no_grad():
            return model(**ours | {"pixel_values": pixels}).loss.item()

    plain = loss(theirs["pixel_values"])
    # A level on all values at once may move the loss more than a level on some of them.
    moves = [abs(loss(theirs["pixel_values"] + sign * level) - plain) for sign in (-1, 1)]
    assert abs(loss(ours["pixel_values"]) - plain) <= max(moves) < 0.1, moves
    first += count
assert first == 12
"""


@pytest.mark.slow
def test_a_vision_language_model(tmp_path):
    for name in ("transformers", "datasets"):  # the recipe shares its loop with the Trainer's
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    for split, name, i in product(("train", "val"), "ab", range(6)):
        path = tmp_path / split / name / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw(31 + 40 * i, 170 - 17 * i, seed=i)).save(path)
    options = {"PYTHONPATH": str(FOLDER), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    arguments = VISION_LANGUAGE, str(tmp_path), str(tmp_path / "out")
    child = Child(*arguments, CUDA_VISIBLE_DEVICES="", modules=["transformers"], **options)
    out, err = child.communicate(240)
    assert child.returncode == 0, f"{out}\n{err}"


FASTAI = """
import sys, warnings
warnings.simplefilter("ignore")
import with_fastai
logits, target = with_fastai.main(sys.argv[1], epochs=1, batch_size=6, num_workers=0, size=32)
print(*logits.shape, target.tolist())
"""


def test_fastai(folder):
    if importlib.util.find_spec("fastai") is None:
        pytest.skip("fastai is not installed")
    # In a process of its own: fastai changes torch's and PIL's classes when it is imported.
    child = Child(FASTAI, str(folder), PYTHONPATH=str(FOLDER), CUDA_VISIBLE_DEVICES="")
    out, err = child.communicate(240)
    assert child.returncode == 0, err
    assert out.endswith(f"{COUNT} {COUNT} {list(range(COUNT))}\n")
