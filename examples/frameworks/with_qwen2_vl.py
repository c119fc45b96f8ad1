"""Hugging Face Trainer and a vision-language model: the image part of its processor on the device.

    python with_qwen2_vl.py                 # a tiny model, on pictures that it draws itself
    python with_qwen2_vl.py FOLDER --model Qwen/Qwen2-VL-2B-Instruct
    torchrun --nproc-per-node=2 with_qwen2_vl.py FOLDER

FOLDER holds train/CLASS/*.jpg and val/CLASS/*.jpg; the model learns to name the class. The collate
function makes the text, in the workers. It reads the sizes of pictures from their headers, and puts
as many placeholders into the text as the picture will have merged patches. The device decodes the
pictures in their own sizes, resizes them and cuts them into patches.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from torch.utils.data import Dataset, default_collate
from torchvision.transforms import v2
from transformers import Trainer, TrainingArguments
from with_trainer import Moved

from gpuprefetch import DataPrefetcher, EncodedImageFolder, Patches, SmartResize, image_size

FLIP = (v2.RandomHorizontalFlip(),)  # it changes no size
QUESTION = "<|vision_start|>{image}<|vision_end|> What is it ? {answer}<|endoftext|>"
SPECIAL = ("<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


class Captioned(Dataset):
    """Encoded images and their texts, which have ``{image}`` for the placeholders."""

    def __init__(self, root):
        self.images = EncodedImageFolder(root)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, target = self.images[index]
        return image, QUESTION.format(image="{image}", answer=self.images.classes[target])


class ImagePart:
    """What the image processor of Qwen2-VL does, as transforms and the form of their results."""

    def __init__(self, processor, random=()):
        bounds = (processor.size["shortest_edge"], processor.size["longest_edge"])
        self.factor = processor.patch_size * processor.merge_size
        self.resize = SmartResize(self.factor, *bounds)
        floats = v2.ToDtype(torch.float32, scale=True)
        normalize = v2.Normalize(processor.image_mean, processor.image_std)
        self.transforms = [self.resize, *random, floats, normalize]
        self.results = Patches(
            processor.patch_size, processor.merge_size, processor.temporal_patch_size
        )

    def placeholders(self, image):
        """How many tokens a picture has in the text, by its header."""
        height, width = self.resize.size_of(*image_size(image))
        return height * width // self.factor**2


class Collate:
    """Tokens, labels and encoded images of a batch."""

    def __init__(self, processor, part):
        self.processor = processor
        self.part = part

    def __call__(self, samples):
        images, texts = zip(*samples, strict=True)
        token = self.processor.image_token
        filled = [
            text.format(image=token * self.part.placeholders(image))
            for image, text in zip(images, texts, strict=True)
        ]
        batch = self.processor.tokenizer(filled, padding=True, return_tensors="pt")
        tokens = batch["input_ids"]
        is_image = tokens == self.processor.image_token_id
        return {
            "input_ids": tokens,
            "attention_mask": batch["attention_mask"],
            "mm_token_type_ids": is_image.long(),
            "labels": tokens.masked_fill(is_image | (batch["attention_mask"] == 0), -100),
            "images": default_collate(images),
        }


class VisionLanguageTrainer(Moved, Trainer):
    """Takes an :class:`ImagePart` for training, and one for evaluation."""

    def __init__(self, *args, train_part, eval_part, **options):
        self.train_part = train_part
        self.eval_part = eval_part
        super().__init__(*args, **options)

    def prefetcher(self, loader, training):
        part = self.train_part if training else self.eval_part
        return DataPrefetcher(
            loader, device=self.args.device, transforms=part.transforms, results=part.results
        )

    def training_step(self, model, inputs, *rest):
        return super().training_step(model, named(inputs), *rest)

    def prediction_step(self, model, inputs, *rest, **options):
        return super().prediction_step(model, named(inputs), *rest, **options)


def named(inputs):
    """The inputs of the model by its names: ``pixel_values`` and ``image_grid_thw`` for images."""
    images = inputs.pop("images")
    return {**inputs, **images._asdict()}


def tiny(words):
    """A model of Qwen2-VL's kind with random weights, and a processor that knows these words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = dict.fromkeys([*SPECIAL, "[unknown]", *"What is it ?".split(), *words])
    vocabulary = {word: number for number, word in enumerate(known)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[unknown]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    processor = transformers.Qwen2VLProcessor(
        transformers.Qwen2VLImageProcessor(
            size={"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 16}
        ),
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token=SPECIAL[0],
            eos_token=SPECIAL[0],
            additional_special_tokens=list(SPECIAL[1:]),
        ),
        transformers.Qwen2VLVideoProcessor(),
    )
    start, end, image, video = (vocabulary[token] for token in SPECIAL[1:])
    config = transformers.Qwen2VLConfig(
        text_config={
            "vocab_size": len(vocabulary),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "bos_token_id": vocabulary[SPECIAL[0]],
            "eos_token_id": vocabulary[SPECIAL[0]],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 3, 3],
            },
        },
        vision_config={"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    return transformers.Qwen2VLForConditionalGeneration(config), processor


def main(root, out, name=None, resume=None, random=True, **options):
    train, val = (Captioned(f"{root}/{split}") for split in ("train", "val"))
    torch.manual_seed(0)
    if name is None:
        model, processor = tiny(train.images.classes)
    else:
        model = transformers.AutoModelForImageTextToText.from_pretrained(name)
        processor = transformers.AutoProcessor.from_pretrained(name)
    if resume is not None:
        # Trainer loads a checkpoint by the names of the model's own weights, and transformers 5.24
        # saves those of Qwen2-VL by the names of its first release: Trainer would find none.
        model = type(model).from_pretrained(resume, dtype=model.dtype)
    train_part = ImagePart(processor.image_processor, FLIP if random else ())
    defaults = {"num_train_epochs": 2, "dataloader_num_workers": 2, "learning_rate": 1e-3}
    defaults |= {"eval_strategy": "epoch", "prediction_loss_only": True}
    trainer = VisionLanguageTrainer(
        model,
        TrainingArguments(
            output_dir=out, remove_unused_columns=False, report_to="none", **defaults | options
        ),
        data_collator=Collate(processor, train_part),
        train_dataset=train,
        eval_dataset=val,
        train_part=train_part,
        eval_part=ImagePart(processor.image_processor),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, processor


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", nargs="?")
    parser.add_argument("--model")
    given = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[1] / "imagenet"))
    from draw import drawn_folder

    with tempfile.TemporaryDirectory() as out:
        main(given.data or drawn_folder(), out, given.model)
