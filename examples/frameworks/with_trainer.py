"""Hugging Face Trainer: a mixin whose loaders decode and augment on the device.

    python with_trainer.py            # on pictures that it draws itself
    python with_trainer.py FOLDER     # train/CLASS/*.jpg and val/CLASS/*.jpg
    torchrun --nproc-per-node=2 with_trainer.py FOLDER

The datasets are those of transformers' own ``run_image_classification.py``: ``set_transform`` takes
a function of rows that calls torchvision's transforms. In that script two lines change::

    from with_trainer import ImageTrainer
    trainer = ImageTrainer(  # in place of Trainer(

Evaluation, several ranks and ``train(resume_from_checkpoint=...)`` are the Trainer's own.
"""

import sys
import tempfile
from pathlib import Path

import accelerate
import datasets
import torch
import transformers
from torchvision.transforms import v2
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import gpuprefetch
from gpuprefetch import DataPrefetcher

FLOATS = (v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.5,) * 3, (0.5,) * 3))


def skip_first_batches(prepared, count):
    """accelerate's, which makes a loader without the prefetcher: that goes in again."""
    rest = accelerate.skip_first_batches(prepared, count)
    if isinstance(getattr(prepared, "base_dataloader", None), DataPrefetcher):
        rest.base_dataloader = prepared.base_dataloader.over(rest.base_dataloader)
    return rest


# Called by Trainer.train(resume_from_checkpoint=...).
transformers.trainer.skip_first_batches = skip_first_batches


class Moved:
    """Stands before ``Trainer`` among the bases of a class: its loaders are moved to the device."""

    def get_train_dataloader(self):
        return self.moved(super().get_train_dataloader(), training=True)

    def get_eval_dataloader(self, eval_dataset=None):
        return self.moved(super().get_eval_dataloader(eval_dataset))

    def get_test_dataloader(self, test_dataset):
        return self.moved(super().get_test_dataloader(test_dataset))

    def moved(self, prepared, training=False):
        loader = prepared.base_dataloader
        # With persistent workers the Trainer keeps the loader of the last evaluation.
        if not isinstance(loader, DataPrefetcher):
            prepared.base_dataloader = self.prefetcher(loader, training)
        return prepared

    def prefetcher(self, loader, training):
        """The loader, with decode and transforms on the device; override it for other options."""
        first = self.state.global_step == 0  # a plan is printed once
        return gpuprefetch.accelerate(loader, device=self.args.device, print_plan=first)


class ImageTrainer(Moved, Trainer):
    pass


def load(root, split, pipeline):
    rows = datasets.load_dataset("imagefolder", data_dir=f"{root}/{split}", split="train")

    def transformed(batch):
        pictures = batch["image"]
        batch["pixel_values"] = [pipeline(picture.convert("RGB")) for picture in pictures]
        return batch

    rows.set_transform(transformed)
    return rows


def collate(examples):
    images = torch.stack([example["pixel_values"] for example in examples])
    return {"pixel_values": images, "labels": torch.tensor([e["label"] for e in examples])}


def accuracy(predictions):
    logits, labels = predictions
    return {"accuracy": float((logits.argmax(1) == labels).mean())}


def main(root, out, size=64, resume=None, **options):
    random = (v2.RandomResizedCrop(size), v2.RandomHorizontalFlip())
    center = (v2.Resize(size * 8 // 7), v2.CenterCrop(size))
    train = load(root, "train", v2.Compose([*random, *FLOATS]))
    defaults = {"num_train_epochs": 2, "dataloader_num_workers": 2, "eval_strategy": "epoch"}
    args = TrainingArguments(
        output_dir=out,
        remove_unused_columns=False,  # they are what set_transform reads
        report_to="none",
        **defaults | options,
    )
    config = ViTConfig(
        image_size=size,
        num_labels=len(train.features["label"].names),
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=3,
        intermediate_size=384,
    )
    trainer = ImageTrainer(
        ViTForImageClassification(config),
        args,
        data_collator=collate,
        train_dataset=train,
        eval_dataset=load(root, "val", v2.Compose([*center, *FLOATS])),
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "imagenet"))
    from draw import drawn_folder

    with tempfile.TemporaryDirectory() as out:
        main(sys.argv[1] if len(sys.argv) > 1 else drawn_folder(), out)
