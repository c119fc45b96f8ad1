"""Train a torchvision classifier on a folder in ImageNet's layout, its pictures decoded on the GPU.

    python train.py                                  # on a small folder, which it draws first
    python train.py DATA --model resnet50 --compile  # DATA/{train,val}/CLASS/*.JPEG
    python train.py DATA --loader torchvision        # the same, with PIL decoding in the workers
    python train.py DATA --weights DEFAULT --lr 0.01 # from the weights that torchvision ships
    python train.py DATA --checkpoint-steps 500      # not only after each epoch
    python train.py DATA --resume                    # go on from the checkpoint
    python train.py DATA --auto-augment ta_wide --random-erasing 0.1 --mixup 0.2 --cutmix 1.0
    torchrun --nproc-per-node=8 train.py DATA        # every GPU of a machine; --nnodes for several

The last line it prints is a summary of the run in JSON.
"""

import argparse
import gc
import json
import math
import os
import platform
import re
import shlex
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice, pairwise
from pathlib import Path
from statistics import median

import kornia.augmentation as K
import torch
import torch.distributed as dist
import torchvision
from draw import drawn_folder
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from tqdm import tqdm

import gpuprefetch
from gpuprefetch import (
    CenterCrop,
    DataPrefetcher,
    EncodedImageFolder,
    RandomResizedCrop,
    Resize,
)

# What stands in for an argument that is left out. The drawn folder holds few and simple pictures:
# many small steps on most of each picture learn them in a minute on two CPU cores.
PHOTO_DEFAULTS = {"epochs": 90, "batch_size": 256, "image_size": 224, "min_area": 0.08}
DRAWN_DEFAULTS = {"epochs": 8, "batch_size": 16, "image_size": 48, "min_area": 0.5}
LEARNING_RATE = 0.1  # for 256 images of a step
WARMUP_SHARE = 0.05  # of all steps
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4
LABEL_SMOOTHING = 0.1
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SEED = 0
BAR_STEPS = 20  # from one update of the bar to the next: reading the loss waits for the device
REPORTED_ARGUMENTS = ["model", "loader", "compile", "epochs", "batch_size", "image_size", "workers"]
REPORTED_ARGUMENTS += ["weights", "lr"]
REPORTED_ARGUMENTS += ["auto_augment", "color_jitter", "random_erasing", "mixup", "cutmix"]
# As in torchvision's references.
POLICIES = {
    "ta_wide": v2.TrivialAugmentWide,
    "ra": v2.RandAugment,
    "augmix": v2.AugMix,
    "autoaugment": v2.AutoAugment,
}

# Set by torchrun.
RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
LOCAL_WORLD_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


def main(argv=None):
    start = time.perf_counter()
    args = parse_args(argv)
    args.device = local_device()
    join_processes(args.device)
    args.data = args.data or shared_drawn_folder()
    result = train(args)
    if WORLD_SIZE > 1:
        gc.collect()  # a DDP model is in a cycle and holds the group's threads, which may abort
        dist.destroy_process_group()
    if RANK == 0:
        seconds = round(time.perf_counter() - start, 1)
        report(args, describe(args) | result | {"seconds": seconds})


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("data", nargs="?", type=Path, metavar="DATA", help="folder with train/ and val/")
    add("--model", default="resnet18", help="any classification model of torchvision")
    add("--weights", metavar="NAME", help="weights of torchvision to start from, as DEFAULT")
    add("--lr", type=strength, default=LEARNING_RATE, help="for 256 images of a step, at its peak")
    add("--loader", choices=["gpuprefetch", "torchvision"], default="gpuprefetch")
    add("--epochs", type=positive)
    add("--batch-size", type=positive, help="of each process")
    add("--image-size", type=positive, help="height and width in pixels")
    add("--workers", type=natural, default=default_workers(), help="of each DataLoader")
    add("--auto-augment", choices=POLICIES, help="a policy for each training image")
    add("--color-jitter", type=strength, default=0.0, metavar="S", help="strength, 0.4 for example")
    add("--random-erasing", type=share, default=0.0, metavar="P", help="share of images")
    add("--mixup", type=strength, default=0.0, metavar="A", help="alpha of MixUp")
    add("--cutmix", type=strength, default=0.0, metavar="A", help="alpha of CutMix")
    add("--compile", action="store_true")
    add("--checkpoint", type=Path, default="checkpoint.pt", help="written after each epoch")
    add("--checkpoint-steps", type=positive, metavar="N", help="write it every N steps too")
    add("--resume", action="store_true", help="go on from the checkpoint")
    add("--limit-batches", type=positive, help="end each epoch after this many")
    add("--summary", type=Path, help="file to write the JSON summary to as well")
    args = parser.parse_args(argv)
    for path in filter(None, (args.checkpoint, args.summary)):
        if RANK == 0 and not path.parent.is_dir():  # found here, not after an epoch
            parser.error(f"{path.parent} is no folder to write {path.name} to")
        if path.is_dir():
            parser.error(f"{path} is a folder. Name a file to write.")
    if args.model not in (known := torchvision.models.list_models(torchvision.models)):
        parser.error(f"--model: {args.model} is none of torchvision's: {', '.join(known)}")
    names = torchvision.models.get_model_weights(args.model).__members__
    if args.weights and args.weights not in names:
        parser.error(f"--weights: {args.model} has {', '.join(names)}, got {args.weights}")
    if args.resume and not args.checkpoint.is_file():
        parser.error(f"--resume: there is no checkpoint {args.checkpoint}")
    if args.checkpoint_steps and args.loader == "torchvision":
        parser.error("--checkpoint-steps needs --loader gpuprefetch, which knows where it stands")
    if args.data and not ((args.data / "train").is_dir() and (args.data / "val").is_dir()):
        parser.error(f"{args.data} is no folder with train/CLASS/* and val/CLASS/*")
    parser.set_defaults(**(PHOTO_DEFAULTS if args.data else DRAWN_DEFAULTS))
    return parser.parse_args(argv)


def positive(text):
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def natural(text):
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative")
    return number


def strength(text):
    if not 0 <= (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or above")
    return number


def share(text):
    if (number := strength(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text} is above 1")
    return number


def default_workers():
    return max(1, min(16, usable_cores() // LOCAL_WORLD_SIZE))


def usable_cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def local_device():
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", LOCAL_RANK)
    # Before anything else touches CUDA and opens a context on the first GPU.
    torch.cuda.set_device(device)
    # On the default stream each launch would wait for what other threads launch: docs/tuning.md.
    torch.cuda.set_stream(torch.cuda.Stream())
    torch.backends.cudnn.benchmark = True
    return device


def join_processes(device):
    if WORLD_SIZE == 1:
        return
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")


def shared_drawn_folder():
    """Draw the small folder, once on each machine."""
    if LOCAL_RANK == 0:
        drawn_folder()
    if WORLD_SIZE > 1:
        dist.barrier()
    return drawn_folder()


# ---- data


def build_loader(args, split):
    """Return a loader of batches of images, ``(N, 3, H, W)``, and targets, ``(N,)`` int64.

    gpuprefetch's are on ``args.device``; torchvision's are on the CPU, pinned where there is a GPU.
    """
    folder = args.data / split
    if args.loader == "torchvision":
        return build_dataloader(ImageFolder(folder, pil_transforms(args, split)), args, split)
    return DataPrefetcher(
        build_dataloader(EncodedImageFolder(folder), args, split),
        device=args.device,
        transforms=device_transforms(args, split),
        # What autocast makes of them in the first layer.
        dtype=torch.bfloat16 if args.device.type == "cuda" else torch.float32,
        memory_format=torch.channels_last,
        seed=SEED,
    )


def device_transforms(args, split):
    size = (args.image_size, args.image_size)
    if split == "train":
        crop = RandomResizedCrop(size, scale=(args.min_area, 1.0))
        head = [crop, K.RandomHorizontalFlip(p=0.5)]
        normalize = K.Normalize(MEAN, STD)
        return [*head, *policies(args), normalize, *erasing(args)]
    return [Resize(shorter_side(args)), CenterCrop(size), K.Normalize(MEAN, STD)]


def pil_transforms(args, split):
    """Say :func:`device_transforms` as torchvision's training recipe does, for one PIL image."""
    if split == "train":
        crop = v2.RandomResizedCrop(args.image_size, scale=(args.min_area, 1.0))
        ops = [crop, v2.RandomHorizontalFlip(p=0.5), *policies(args)]
        last = erasing(args)
    else:
        last = []
        ops = [v2.Resize(shorter_side(args)), v2.CenterCrop(args.image_size)]
    to_float = v2.ToDtype(torch.float32, scale=True)
    return v2.Compose([*ops, v2.PILToTensor(), to_float, v2.Normalize(MEAN, STD), *last])


def policies(args):
    """Random transforms after the flip, the same ones for both loaders: each image has a draw."""
    strength = args.color_jitter
    jitter = [v2.ColorJitter(strength, strength, strength)] if strength else []
    return jitter + ([POLICIES[args.auto_augment]()] if args.auto_augment else [])


def erasing(args):
    return [v2.RandomErasing(args.random_erasing)] if args.random_erasing else []


def shorter_side(args):
    return round(args.image_size * 256 / 224)


def build_dataloader(dataset, args, split):
    if split == "train":
        sampler = DistributedSampler(dataset, WORLD_SIZE, RANK, seed=SEED, drop_last=True)
    else:
        # Shards may differ in length: a DistributedSampler would repeat images, counted twice then.
        sampler = range(RANK, len(dataset), WORLD_SIZE)
    return DataLoader(
        dataset,
        batch_size=args.batch_size,
        sampler=sampler,
        drop_last=split == "train",
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        pin_memory=args.device.type == "cuda",
    )


def move(batch, device):
    """Copy a batch to the device; one of gpuprefetch's is there already and comes back as it is."""
    images, target = batch
    images = images.to(device, memory_format=torch.channels_last, non_blocking=True)
    return images, target.to(device, non_blocking=True)


# ---- training


def train(args):
    """Train and validate for the epochs that are left; returns their figures for the summary."""
    train_loader = build_loader(args, "train")
    val_loader = build_loader(args, "val")
    steps = min(len(train_loader), args.limit_batches or len(train_loader))
    if steps == 0:
        raise ValueError(
            f"{len(train_loader.dataset)} training images do not fill a batch of {args.batch_size} "
            f"in each of {WORLD_SIZE} processes. Lower --batch-size."
        )
    classes = train_loader.dataset.classes
    if strangers := set(classes) ^ set(val_loader.dataset.classes):
        raise ValueError(
            f"{args.data}: train and val need the same folders, which number the classes. Only one "
            f"of them has {', '.join(sorted(strangers))}."
        )
    learner = Learner(args, len(classes), steps)
    if args.resume:
        learner.load(args.checkpoint)
    if learner.epoch >= args.epochs:
        raise ValueError(f"{args.checkpoint} has {learner.epoch} epochs already. Raise --epochs.")
    clock = StepClock(args)
    while learner.epoch < args.epochs:
        loss = train_epoch(learner, train_loader, steps, clock)
        top1, top5 = validate(learner, islice(val_loader, args.limit_batches))
        learner.epoch += 1
        learner.best_top1 = max(learner.best_top1, top1)
        if RANK == 0:
            learner.save(args.checkpoint)
            print(f"epoch {learner.epoch}: loss {loss:.3f}, top-1 {top1:.1%}, top-5 {top5:.1%}")
    return clock.summary() | {"top1": top1, "top5": top5, "best_top1": learner.best_top1}


def build_model(args, classes):
    """Make the model; one that starts from weights gets a new last layer for other classes."""
    if args.weights is None:
        return torchvision.models.get_model(args.model, num_classes=classes)
    # A checkpoint has all weights: none are downloaded to be overwritten.
    weights = None if args.resume else args.weights
    model = torchvision.models.get_model(args.model, weights=weights)
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not layers:
        raise ValueError(f"--weights: {args.model} has no linear layer at its end to replace.")
    name, last = layers[-1]
    if last.out_features != classes:
        model.set_submodule(name, nn.Linear(last.in_features, classes))
    return model


class Learner:
    """The model, what trains it and how far it is: all that a checkpoint holds."""

    STATEFUL = ("model", "optimizer", "scheduler")

    def __init__(self, args, classes, steps):
        torch.manual_seed(SEED)
        self.device = args.device
        self.args = args
        self.steps = steps  # of an epoch
        self.model = build_model(args, classes).to(args.device, memory_format=torch.channels_last)
        self.step_model = wrap(self.model, args)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=LABEL_SMOOTHING)
        self.optimizer = build_optimizer(self.model, args)
        self.scheduler = LambdaLR(self.optimizer, lambda n: lr_factor(n, args.epochs * steps))
        self.mix = build_mix(args, classes)
        self.epoch = 0
        self.best_top1 = 0.0
        self.midway = None  # where each rank stands in the epoch that was interrupted

    def step(self, images, target):
        """Train on one batch; returns its loss, on the device."""
        if self.mix is not None:
            images, target = self.mix(images, target)
        with self.autocast():
            loss = self.criterion(logits_of(self.step_model(images)), target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    def autocast(self):
        """Compute in bfloat16 on a GPU, and as written on a CPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def save(self, path, midway=None):
        """Write the checkpoint, from rank 0 only."""
        # Under another name first: a run that is killed here leaves the checkpoint before intact.
        unfinished = path.with_name(f"{path.name}.unfinished")
        parts = {name: getattr(self, name).state_dict() for name in self.STATEFUL}
        progress = {"epoch": self.epoch, "best_top1": self.best_top1, "midway": midway}
        torch.save(parts | progress, unfinished)
        unfinished.replace(path)

    def load(self, path):
        """Read the checkpoint, on every rank."""
        state = torch.load(path, map_location="cpu", weights_only=True)
        base_lrs = self.scheduler.base_lrs
        try:
            for name in self.STATEFUL:
                getattr(self, name).load_state_dict(state[name])
        except (KeyError, RuntimeError):  # which lists all weights
            raise ValueError(
                f"{path} is none of --model {self.args.model} with these classes. Name what it was "
                "written with, or another --checkpoint."
            ) from None
        self.epoch = state["epoch"]
        self.best_top1 = state["best_top1"]
        self.midway = state.get("midway")
        if self.midway and (len(self.midway), self.args.loader) != (WORLD_SIZE, "gpuprefetch"):
            raise ValueError(
                f"{path} was written in the middle of an epoch by {len(self.midway)} processes "
                "with --loader gpuprefetch. Resume it with the same number and loader."
            )
        done = self.midway[RANK]["loader"]["batches"] if self.midway else 0
        if done >= self.steps:
            raise ValueError(f"{path} stands after step {done} of an epoch. Raise --limit-batches.")
        # An epoch has another number of steps with another batch size or number of processes.
        done += self.epoch * self.steps
        self.scheduler.base_lrs = base_lrs
        self.scheduler.last_epoch = done
        factor = lr_factor(done, self.args.epochs * self.steps)
        for group, lr in zip(self.optimizer.param_groups, base_lrs, strict=True):
            group["lr"] = lr * factor

    def start_epoch(self, loader):
        """Return the batches that are left of the epoch, and the number of steps before them."""
        if self.args.loader == "torchvision":
            loader.sampler.set_epoch(self.epoch)
        else:
            loader.set_epoch(self.epoch)
        mine = self.midway and self.midway[RANK]
        self.midway = None
        if mine:
            loader.load_state_dict(mine["loader"])
        # No random number drawn from here on depends on the epochs before, so a run that is resumed
        # after one draws the same ones without having saved any generator. Twice, because workers
        # draw their seed when they start, in whichever epoch that is.
        seed = SEED + WORLD_SIZE * (self.epoch + 1) + RANK
        torch.manual_seed(seed)
        batches = iter(loader)
        torch.manual_seed(seed)
        if mine:
            set_random_states(mine["random"], self.device)
        return batches, mine["loader"]["batches"] if mine else 0

    def save_midway(self, loader):
        """Write a checkpoint that goes on after the last step, together with all ranks."""
        states = [{"loader": loader.state_dict(), "random": random_states(self.device)}]
        if WORLD_SIZE > 1:
            states *= WORLD_SIZE
            dist.all_gather_object(states, states[RANK])
        if RANK == 0:
            self.save(self.args.checkpoint, states)


def random_states(device):
    """Return the states of the generators that the model draws from, in dropout for example."""
    on_gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_gpu]


def set_random_states(states, device):
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


def wrap(model, args):
    """Return the model as the training step calls it; its weights are the ones of ``model``."""
    if WORLD_SIZE > 1:
        on_gpu = args.device.type == "cuda"
        device_ids = [LOCAL_RANK] if on_gpu else None
        model = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
        # As an argument it has another name since torch 2.15. See share_buffers.
        model.broadcast_buffers = False
    return torch.compile(model) if args.compile else model


def build_optimizer(model, args):
    """Build SGD without weight decay on biases and norms, which only shift and scale."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    lr = args.lr / 256 * args.batch_size * WORLD_SIZE
    fused = args.device.type == "cuda"
    return torch.optim.SGD(groups, lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, fused=fused)


def build_mix(args, classes):
    """Return what mixes the images and targets of a batch, one of the two where both are asked."""
    kinds = [(v2.MixUp, args.mixup), (v2.CutMix, args.cutmix)]
    mixes = [kind(alpha=alpha, num_classes=classes) for kind, alpha in kinds if alpha]
    return v2.RandomChoice(mixes) if mixes else None


def lr_factor(step, steps):
    """Rise linearly to 1 over the warm-up, then fall to 0 along a cosine."""
    warmup = math.ceil(WARMUP_SHARE * steps)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def logits_of(output):
    """Leave out the auxiliary heads that Inception and GoogLeNet add in training."""
    return output if isinstance(output, torch.Tensor) else output.logits


def train_epoch(learner, loader, steps, clock):
    """Train for an epoch, shown on rank 0's bar; returns the loss of its last step."""
    learner.model.train()
    clock.begin()
    batches, done = learner.start_epoch(loader)
    title = f"epoch {learner.epoch + 1}"
    every = learner.args.checkpoint_steps
    with tqdm(total=steps, initial=done, desc=title, unit="batch", disable=RANK > 0) as bar:
        for step, batch in enumerate(islice(batches, steps - done), start=done + 1):
            images, target = move(batch, learner.device)
            clock.mark()
            loss = learner.step(images, target)
            clock.mark()
            midway = every and step % every == 0 and step < steps
            if step % BAR_STEPS == 0 or step == steps or midway:
                # Reading the loss waits for the device, which has passed the clock's marks then.
                bar.set_postfix_str(f"loss {loss.item():.3f}, {clock.read()}", refresh=False)
                bar.update(step - bar.n)
            if midway:
                learner.save_midway(loader)
                clock.begin()  # the time it took is no wait for data
    return loss.item()


@torch.no_grad()
def validate(learner, batches):
    """Return top-1 and top-5 accuracy over the images of all ranks, each counted once."""
    learner.model.eval()
    share_buffers(learner.model)
    correct = torch.zeros(2, dtype=torch.int64, device=learner.device)  # top-1, top-5
    images_seen = 0
    for batch in batches:
        images, target = move(batch, learner.device)
        # Not the compiled model, which would be compiled again for the short last batch, and not
        # DDP's, which would wait for ranks that have one batch less.
        with learner.autocast():
            logits = learner.model(images)
        hits = logits.topk(min(5, logits.shape[1])).indices == target[:, None]
        correct += torch.stack([hits[:, 0].sum(), hits.sum()])
        images_seen += len(target)
    counts = torch.cat([correct, correct.new_tensor([images_seen])])
    if WORLD_SIZE > 1:
        dist.all_reduce(counts)
    top1, top5, total = counts.tolist()
    return top1 / total, top5 / total


def share_buffers(model):
    """Give every rank the batch statistics of rank 0, which are the ones a checkpoint holds."""
    if WORLD_SIZE > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


# ---- figures


class StepClock:
    """Times steps, and the waits for their batches, on the device's timeline, without stalling it.

    On the host a wait says little: the host runs ahead of the GPU, which may still have work while
    the host waits. Time between the end of one step and the start of the next is lost for certain.
    """

    def __init__(self, args):
        self.device = args.device
        self.images_per_step = args.batch_size * WORLD_SIZE
        # While the first steps compile, workers fill their queues: batches that cost nothing later.
        self.warmup_steps = 10 + 2 * args.workers
        self.waits = []  # seconds
        self.steps = []  # seconds

    def begin(self):
        """Begin to wait for the next batch."""
        self.marks = [self.now()]

    def mark(self):
        """Note the time: once when a step's batch is there, once at the step's end."""
        self.marks.append(self.now())

    def now(self):
        """Note the time: on the host, or when the GPU comes to it."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self):
        """Take in the steps since the last call, which the device must have finished.

        Returns:
            What the bar says about them.
        """
        ends = self.marks[0::2]
        starts = self.marks[1::2]
        waits = [seconds_between(*pair) for pair in zip(ends, starts, strict=False)]
        steps = [seconds_between(*pair) for pair in pairwise(ends)]
        self.marks = self.marks[-1:]
        self.waits += waits
        self.steps += steps
        speed = self.images_per_step * len(steps) / sum(steps)
        return f"{speed:,.0f} images/s, {sum(waits) / sum(steps):.0%} waiting for data"

    def summary(self):
        """Give the speed of all ranks, and rank 0's waits, over the steps after the warm-up."""
        warmup = min(self.warmup_steps, len(self.steps) // 2)
        waits = self.waits[warmup:]
        steps = self.steps[warmup:]
        return {
            "measured_steps": len(steps),
            # Over the sum, because batches may come in bursts, one from each worker: the median
            # step is then one of those that did not wait.
            "images_per_second": round(self.images_per_step * len(steps) / sum(steps), 1),
            "images_per_second_median_step": round(self.images_per_step / median(steps), 1),
            "data_wait_share": round(sum(waits) / sum(steps), 4),
        }


def seconds_between(start, end):
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000


def describe(args):
    """Say what was run, on what, without the paths of this machine."""
    packages = ["torch", "torchvision", "torchcodec", "kornia"]
    versions = {"python": platform.python_version(), "gpuprefetch": gpuprefetch.__version__}
    on_gpu = args.device.type == "cuda"
    return {
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["train.py", *map(without_folder, sys.argv[1:])]),
        "versions": versions | {package: version(package) for package in packages},
        "device": torch.cuda.get_device_name(args.device) if on_gpu else "cpu",
        "cpu_cores": usable_cores(),
        "world_size": WORLD_SIZE,
    } | {name: getattr(args, name) for name in REPORTED_ARGUMENTS}


def without_folder(argument):
    return re.sub(r"(^|=)/.*/", r"\1", argument)


def report(args, summary):
    print(json.dumps(summary))
    if args.summary:
        args.summary.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
