"""Train a vision transformer on pictures in their own sizes, packed into batches by patches.

    python train.py                     # a small model, on a small folder that it draws first
    python train.py DATA --budget 16384 --dim 384 --layers 12
    torchrun --nproc-per-node=2 train.py DATA    # each rank has its share of the batches

DATA holds train/CLASS/* and val/CLASS/*. The last line that it prints is a summary in JSON.
"""

import argparse
import json
import os
import sys
import time
from itertools import islice
from pathlib import Path

import kornia.augmentation as K
import torch
from budget import BudgetBatchSampler, count_patches
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from gpuprefetch import DataPrefetcher, EncodedImageFolder, Patches, SmartResize

MEAN = (0.5, 0.5, 0.5)
STD = (0.5, 0.5, 0.5)
PHOTO_DEFAULTS = {"epochs": 100, "budget": 16384, "dim": 384, "layers": 12, "max_patches": 1024}
DRAWN_DEFAULTS = {"epochs": 20, "budget": 512, "dim": 96, "layers": 2, "max_patches": 64}


def build_loader(args, split, *, training):
    """Return a loader of :class:`gpuprefetch.PackedPatches` and labels ``(N,)``."""
    dataset = EncodedImageFolder(args.data / split)
    patch = args.patch_size
    resize = SmartResize(patch, patch**2, args.max_patches * patch**2)
    counts = count_patches([path for path, _ in dataset.samples], resize, patch)
    ranks = dist.get_world_size() if training and dist.is_initialized() else 1
    sampler = BudgetBatchSampler(
        counts,
        args.budget,
        shuffle=training,
        rank=dist.get_rank() if ranks > 1 else 0,
        num_replicas=ranks,
    )
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        pin_memory=args.device.type == "cuda",
    )
    flip = [K.RandomHorizontalFlip()] if training else []
    return DataPrefetcher(
        loader,
        device=args.device,
        transforms=[resize, *flip, K.Normalize(MEAN, STD)],
        results=Patches(patch, merge_size=1, temporal_patch_size=1),
        dtype=torch.bfloat16 if args.device.type == "cuda" else None,
        seed=0,
    )


# ---- model


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, x, mask):
        qkv = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(*qkv[:, None], attn_mask=mask)[0]
        x = x + self.out(attended.transpose(0, 1).flatten(1))
        return x + self.mlp(x)


class PackedTransformer(nn.Module):
    """A vision transformer on packed patches, each of which attends to those of its image."""

    def __init__(self, patch_values, classes, dim, layers, heads=6):
        super().__init__()
        self.embed = nn.Linear(patch_values, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))

    def forward(self, patches, grid):
        """Map patches ``(P, V)`` of images with ``grid`` ``(N, 3)`` to logits ``(N, classes)``."""
        counts = grid.prod(1)
        numbers = torch.arange(len(grid), device=grid.device)
        image = numbers.repeat_interleave(counts, output_size=len(patches))
        first = counts.cumsum(0) - counts
        place = torch.arange(len(patches), device=grid.device) - first[image]
        across = grid[image, 2]
        where = torch.stack([place // across, place % across], 1)
        x = self.embed(patches) + positions(where, grid[image, 1:], self.embed.out_features)
        mask = image[:, None] == image
        for block in self.blocks:
            x = block(x, mask)
        mean = x.new_zeros(len(grid), x.shape[1]).index_add_(0, image, x) / counts[:, None]
        return self.head(mean)


def positions(where, grid, dim):
    """Sines and cosines ``(P, dim)`` of the places ``(P, 2)`` in grids ``(P, 2)`` of any size."""
    share = (where + 0.5) / grid
    waves = torch.pi * 2.0 ** torch.arange(dim // 4, device=where.device).div(dim // 16 + 1)
    angles = (share[:, :, None] * waves).flatten(1)
    return torch.cat([angles.sin(), angles.cos()], 1)


# ---- training


def train(args):
    """Train, and evaluate at the end; returns the summary."""
    torch.manual_seed(0)
    loader = build_loader(args, "train", training=True)
    classes = len(loader.dataset.classes)
    model = PackedTransformer(3 * args.patch_size**2, classes, args.dim, args.layers)
    model.to(args.device)
    trained = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.05)
    losses = []
    images = 0
    patches = 0
    steps = 0
    begin = time.perf_counter()
    for epoch in range(args.epochs):
        loader.set_epoch(epoch)
        factor = min(1, (epoch + 1) / 3) * (1 - epoch / args.epochs)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * factor
        total = torch.zeros((), device=args.device)
        count = 0
        for (values, grid), labels in islice(loader, args.limit_batches):
            with autocast(args):
                loss = F.cross_entropy(trained(values, grid), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.detach()
            count += 1
            images += len(labels)
            patches += len(values)
        steps += count
        losses.append(total.item() / count)
        if is_first():
            print(f"epoch {epoch + 1}: loss {losses[-1]:.3f}")
    seconds = time.perf_counter() - begin
    return {
        "images_per_second": round(images / seconds, 1),
        "share_of_budget": round(patches / steps / args.budget, 3),
        "losses": losses,
        "top1": top1(model, args),
    }


@torch.no_grad()
def top1(model, args):
    """Share of validation pictures whose class comes first."""
    loader = build_loader(args, "val", training=False)
    right = [model(values.float(), grid).argmax(1).eq(labels) for (values, grid), labels in loader]
    return round(torch.cat(right).float().mean().item(), 4)


def autocast(args):
    return torch.autocast(args.device.type, torch.bfloat16, enabled=args.device.type == "cuda")


def is_first():
    return not dist.is_initialized() or dist.get_rank() == 0


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("data", nargs="?", type=Path, metavar="DATA", help="folder with train/ and val/")
    add("--budget", type=int, help="patches of a batch, on each rank")
    add("--max-patches", type=int, help="of an image; larger ones are resized")
    add("--patch-size", type=int, default=16)
    for name in ("epochs", "dim", "layers"):
        add(f"--{name}", type=int)
    add("--lr", type=float, default=1e-3)
    add("--workers", type=int, default=min(8, os.cpu_count()))
    add("--limit-batches", type=int, help="end each epoch after this many")
    parser.set_defaults(**(PHOTO_DEFAULTS if parser.parse_args(argv).data else DRAWN_DEFAULTS))
    args = parser.parse_args(argv)
    if args.data is None:
        sys.path.append(str(Path(__file__).resolve().parents[1] / "imagenet"))
        from draw import drawn_folder

        args.data = drawn_folder()
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if "RANK" in os.environ:
        if args.device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    summary = train(args)
    if is_first():
        print(json.dumps(summary))
    if dist.is_initialized():
        dist.destroy_process_group()
    return summary


if __name__ == "__main__":
    main()
