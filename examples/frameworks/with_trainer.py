"""Hugging Face Trainer: a mixin whose loaders decode and augment on the device.

    python with_trainer.py            # on pictures that it draws itself
    python with_trainer.py FOLDER     # train/CLASS/*.jpg and val/CLASS/*.jpg
    torchrun --nproc-per-node=2 with_trainer.py FOLDER

The dataset is one of ``datasets`` whose files are not decoded: ``set_transform`` hands them out as
they are. Evaluation, several ranks and ``train(resume_from_checkpoint=...)`` are the Trainer's own.
"""

import sys
import tempfile
from pathlib import Path

import accelerate
import datasets
import torch
import transformers
from torch.utils.data import default_collate
from torchvision.transforms import v2
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from gpuprefetch import DataPrefetcher, EncodedImage

FLOATS = (v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.5,) * 3, (0.5,) * 3))


def skip_first_batches(prepared, count):
    """accelerate's, which makes a loader without the prefetcher: that goes in again."""
    rest = accelerate.skip_first_batches(prepared, count)
    if isinstance(getattr(prepared, "base_dataloader", None), DataPrefetcher):
        rest.base_dataloader = prepared.base_dataloader.over(rest.base_dataloader)
    return rest


# Called by Trainer.train(resume_from_checkpoint=...).
transformers.trainer.skip_first_batches = skip_first_batches


class Prefetched:
    """Stands before ``Trainer`` among the bases of a class.

    Its attributes are the transforms, as a ``DataPrefetcher`` takes them.
    """

    train_transforms = ()
    eval_transforms = ()

    def get_train_dataloader(self):
        return self.prefetched(super().get_train_dataloader(), self.train_transforms)

    def get_eval_dataloader(self, eval_dataset=None):
        return self.prefetched(super().get_eval_dataloader(eval_dataset), self.eval_transforms)

    def get_test_dataloader(self, test_dataset):
        return self.prefetched(super().get_test_dataloader(test_dataset), self.eval_transforms)

    def prefetched(self, prepared, transforms):
        loader = prepared.base_dataloader
        # With persistent workers the Trainer keeps the loader of the last evaluation.
        if not isinstance(loader, DataPrefetcher):
            prepared.base_dataloader = DataPrefetcher(
                loader, device=self.args.device, transforms=transforms
            )
        return prepared


def encoded(rows):
    """For ``set_transform``: the files of some rows, encoded, under the names of the model."""
    files = rows["image"]
    data = [file["bytes"] or Path(file["path"]).read_bytes() for file in files]
    images = [EncodedImage(d, path=file["path"] or "") for d, file in zip(data, files, strict=True)]
    return {"pixel_values": images, "labels": rows["label"]}


def load(root, split):
    files = datasets.load_dataset("imagefolder", data_dir=f"{root}/{split}", split="train")
    files = files.cast_column("image", datasets.Image(decode=False))
    files.set_transform(encoded)
    return files


def accuracy(predictions):
    logits, labels = predictions
    return {"accuracy": float((logits.argmax(1) == labels).mean())}


def main(root, out, size=64, resume=None, **options):
    class ImageTrainer(Prefetched, Trainer):
        train_transforms = (v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *FLOATS)
        eval_transforms = v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size), *FLOATS])

    train = load(root, "train")
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
        data_collator=default_collate,
        train_dataset=train,
        eval_dataset=load(root, "val"),
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "imagenet"))
    from draw import drawn_folder

    with tempfile.TemporaryDirectory() as out:
        main(sys.argv[1] if len(sys.argv) > 1 else drawn_folder(), out)
