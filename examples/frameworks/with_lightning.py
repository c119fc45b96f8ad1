"""PyTorch Lightning: a data module whose loaders are prefetchers, or a callback that makes them.

    python with_lightning.py            # on pictures that it draws itself
    python with_lightning.py FOLDER     # train/CLASS/*.jpg and val/CLASS/*.jpg

The module, the trainer and its callbacks stay as they are. Lightning finds batches on the device
already, numbers the sampler's epochs, and saves where an epoch stands in its checkpoints. Where a
data module with torchvision's folders and transforms is there already, it stays as well:
``Trainer(callbacks=[Accelerated()])``.
"""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import kornia.augmentation as K
import lightning as L
import torch
import torchvision
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import DataLoader, DistributedSampler

import gpuprefetch
from gpuprefetch import (
    CenterCrop,
    DataPrefetcher,
    EncodedImageFolder,
    RandomResizedCrop,
    Resize,
)

MEAN = torch.tensor((0.485, 0.456, 0.406))
STD = torch.tensor((0.229, 0.224, 0.225))


class Numbered:
    """Lets Lightning number the epochs of a prefetcher."""

    @property
    def batch_sampler(self):
        # Lightning numbers the epochs of samplers, also where a run is resumed or a loader is made
        # anew: let it number ours, which numbers those of the samplers. It finds them as `sampler`,
        # which has to stay as it is for `overfit_batches`, and as `batch_sampler.sampler`.
        own = self.__getattr__("batch_sampler")
        # In `predict` Lightning asks this one for the samples of each batch.
        indexed = isinstance(own, _IndexBatchSamplerWrapper)
        return own if indexed else SimpleNamespace(sampler=self)

    def __iter__(self):
        yield from super().__iter__()  # with the first batch: after a resume it is numbered later


class Prefetcher(Numbered, DataPrefetcher):
    """For a data module's own loaders."""


class Accelerated(L.Callback):
    """Makes prefetchers of DataLoaders over torchvision's folders, after Lightning's own sharding.

    Args:
        options: of :func:`gpuprefetch.accelerate`.
    """

    def __init__(self, **options):
        self.options = options

    def setup(self, trainer, pl_module, stage):
        strategy = trainer.strategy
        process = partial(type(strategy).process_dataloader, strategy)

        def prefetched(loader):  # it comes with the DistributedSampler that Lightning has added
            options = {"device": strategy.root_device, "print_plan": False} | self.options
            prefetcher = gpuprefetch.accelerate(process(loader), **options)
            kind = type(prefetcher)
            prefetcher.__class__ = type(kind.__name__, (Numbered, kind), {})
            return prefetcher

        strategy.process_dataloader = prefetched

    def teardown(self, trainer, pl_module, stage):
        vars(trainer.strategy).pop("process_dataloader", None)


class Images(L.LightningDataModule):
    def __init__(self, root, batch_size=64, num_workers=2, size=64):
        super().__init__()
        self.root = root
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.train = [RandomResizedCrop(size), K.RandomHorizontalFlip(), K.Normalize(MEAN, STD)]
        self.val = [Resize(size * 8 // 7), CenterCrop(size), K.Normalize(MEAN, STD)]

    def train_dataloader(self):
        return self.prefetcher("train", self.train, shuffle=True)

    def val_dataloader(self):
        return self.prefetcher("val", self.val, shuffle=False)

    def predict_dataloader(self):
        return self.prefetcher("val", self.val, shuffle=False)

    def __str__(self):
        # Lightning's own looks into what is no DataLoader, and reads a batch.
        return f"{type(self).__name__}({self.root!r}, batch_size={self.batch_size})"

    def prefetcher(self, split, transforms, *, shuffle):
        dataset = EncodedImageFolder(f"{self.root}/{split}")
        sampler = None
        trainer = self.trainer
        if trainer.world_size > 1:  # Lightning adds it to what is a DataLoader, and this is none
            rank = trainer.global_rank
            ranks = trainer.world_size
            sampler = DistributedSampler(dataset, ranks, rank, shuffle=shuffle, drop_last=shuffle)
        loader = DataLoader(
            dataset,
            self.batch_size,
            shuffle=shuffle and sampler is None,
            sampler=sampler,
            num_workers=self.num_workers,
            pin_memory=True,
        )
        if trainer.predicting:  # for a BasePredictionWriter; Lightning wraps those of DataLoaders
            loader = DataLoader(
                dataset,
                batch_sampler=_IndexBatchSamplerWrapper(loader.batch_sampler),
                num_workers=self.num_workers,
                pin_memory=True,
            )
        return Prefetcher(loader, transforms=transforms, device=trainer.strategy.root_device)


class Classifier(L.LightningModule):
    def __init__(self, classes=10):
        super().__init__()
        self.model = torchvision.models.resnet18(num_classes=classes)

    def training_step(self, batch, _):
        images, target = batch
        return torch.nn.functional.cross_entropy(self.model(images), target)

    def validation_step(self, batch, _):
        images, target = batch
        correct = (self.model(images).argmax(1) == target).float().mean()
        self.log("top1", correct, batch_size=len(target), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "imagenet"))
    from draw import drawn_folder

    root = sys.argv[1] if len(sys.argv) > 1 else drawn_folder()
    classes = len(list(Path(root, "train").iterdir()))
    trainer = L.Trainer(max_epochs=2, logger=False, enable_checkpointing=False)
    trainer.fit(Classifier(classes), datamodule=Images(root))
