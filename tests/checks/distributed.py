"""Does each of several processes get its own samples, on its own GPU, and train as one would?

torchrun --standalone --nproc-per-node=2 tests/checks/distributed.py         # NCCL, a GPU each
torchrun --standalone --nproc-per-node=2 tests/checks/distributed.py --cpu   # gloo

The number of pictures is a multiple neither of the batch size nor of the processes. Without
``drop_last`` a ``DistributedSampler`` repeats samples up to a multiple of the processes: the union
of all ranks is exact if each rank gets what its sampler says, nothing is left out and nothing else
is repeated. With ``drop_last`` nothing is repeated, and left out is what fills no batch on every
rank. Shards without padding, as in validation, give each sample once. Where every rank draws its
own repeats, by weight or for repeated augmentation, no two repeats are the same picture, and
another rank that is told whose samples they are makes the same ones. The crops, flips and colors of
all ranks together are torchvision's and NumPy's, also where workers decode and with policies.

Every check is made once more with a mistake in it, which has to be noticed.
"""

import argparse
import ctypes
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import bench
import draws
import faults
import fuzz
import numpy as np
import torch
import torch.distributed as dist
from bench import harness, ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler
from torchvision.transforms import v2

from gpuprefetch import DataPrefetcher, EncodedImage, RandomResizedCrop

RANK = ranks.RANK
WORLD = ranks.WORLD
SEED = 5
CLASSES = 10
# Where workers decode a part, which one depends on the batch, and their decoder is another one. So
# these policies are such that a level stays a level, and pictures may be OFF levels apart on
# average: see fuzz.py.
SHARE = 0.5
POLICIES = (v2.RandomInvert(0.5), v2.RandomGrayscale(0.3))
OFF = fuzz.OFF

Result = dict[str, Any]
Pixels = draws.Pixels
Picture = tuple[int, str]


def gather(value: Any) -> list[Any]:
    """The value of every rank."""
    values = [value] * WORLD
    if WORLD > 1:
        dist.all_gather_object(values, value)
    return values


def joined(parts: Iterable[Iterable[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


class Order(list[Any]):
    """Samples dealt out here; ``rank`` is 0 where no other rank has them, so it does not count."""

    def __init__(self, samples: Iterable[Any], rank: int | None = None) -> None:
        super().__init__(samples)
        self.rank = rank


class Checks:
    """Each returns ``ok`` and figures, the same on every rank; ``mistake`` asks for the control."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args = args
        self.device = device
        files = fuzz.draw_files(args.pictures)
        self.data = [(EncodedImage(file, number), number) for number, file in enumerate(files)]

    def loader(
        self, scale: tuple[float, float] = (0.08, 1.0), share: float = 0.0, **how: Any
    ) -> DataPrefetcher:
        pinned = self.device.type == "cuda"
        loader = DataLoader(self.data, num_workers=self.args.workers, pin_memory=pinned, **how)
        transforms = [RandomResizedCrop(self.args.size, scale), *(POLICIES if share else ())]
        # Without a share one decoder decodes all that it can: another one's pictures differ by
        # rounding.
        return DataPrefetcher(
            loader, device=self.device, transforms=transforms, seed=SEED, cpu_share=share
        )

    def sampler(self, rank: int, drop_last: bool = False) -> DistributedSampler:
        return DistributedSampler(self.data, WORLD, rank, seed=SEED, drop_last=drop_last)

    def orders(self, epoch: int, drop_last: bool = False) -> list[list[int]]:
        """What each rank has to get, said by samplers that no loader has seen."""
        samplers = [self.sampler(rank, drop_last) for rank in range(WORLD)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        return [list(sampler) for sampler in samplers]

    def union(self, mistake: str, *, drop_last: bool) -> Result:
        """Whether all ranks together get what there is, in two epochs."""
        count = len(self.data)
        size = self.args.batch_size
        sampler = range(count) if mistake == "no sampler" else self.sampler(RANK, drop_last)
        loader = self.loader(sampler=sampler, batch_size=size, drop_last=drop_last)
        exact = True
        missing = []
        repeated = []
        for epoch in range(2):
            if mistake != "no set_epoch":
                loader.set_epoch(epoch)
            found = gather(joined(numbers.tolist() for _, numbers in loader))
            orders = self.orders(epoch, drop_last)
            kept = len(orders[0]) // size * size if drop_last else len(orders[0])
            exact &= found == [order[:kept] for order in orders]
            times = Counter(joined(found))
            missing.append(count - len(times))
            repeated.append(times.total() - len(times))
            exact &= missing[-1] == max(count - kept * WORLD, 0)
            exact &= repeated[-1] == max(kept * WORLD - count, 0)
        return {"ok": exact, "missing": missing, "repeated": repeated}

    def shards(self, mistake: str) -> Result:
        """Whether shards of different lengths, without padding, give each sample once."""
        first = 0 if mistake else RANK
        mine = range(first, len(self.data), WORLD)
        loader = self.loader(sampler=mine, batch_size=self.args.batch_size)
        found = gather(joined(numbers.tolist() for _, numbers in loader))
        exact = sorted(joined(found)) == list(range(len(self.data)))
        return {"ok": exact, "samples": [len(part) for part in found]}

    def made(
        self, epoch: int, sampler: Iterable[int], size: int, **how: Any
    ) -> Iterator[tuple[int, Pixels]]:
        """The number of every picture that the loop gets, and its values."""
        loader = self.loader(sampler=sampler, batch_size=size, **how)
        loader.set_epoch(epoch)
        for images, numbers in loader:
            yield from zip(numbers.tolist(), images.cpu().numpy(), strict=True)

    def pictures(self, epoch: int, sampler: Iterable[int], size: int, **how: Any) -> list[Picture]:
        """The same with a digest in place of the values."""
        return [
            (number, hashlib.sha256(image.tobytes()).hexdigest())
            for number, image in self.made(epoch, sampler, size, **how)
        ]

    def images(self, mistake: str) -> Result:
        """Whether a picture is the same on each rank, and alone in batches of another size."""
        size = self.args.batch_size
        found = gather(self.pictures(1, self.sampler(RANK), size))
        alone = dict(self.pictures(0 if mistake else 1, range(len(self.data)), size + 3))
        compared = list(chain.from_iterable(found))
        different = sum(gather(sum(alone[number] != picture for number, picture in compared)))
        summary = hashlib.sha256("".join(alone[number] for number in sorted(alone)).encode())
        return {
            "ok": different == 0,
            "compared": len(compared) * WORLD,
            "different": different,
            "sha256": summary.hexdigest(),  # the same for any number of processes
        }

    def shared(self, mistake: str) -> Result:
        """The same with policies and workers that decode, which are told by the batch what."""
        size = self.args.batch_size
        found = gather(list(self.made(1, self.sampler(RANK), size, share=SHARE)))
        epoch = 0 if mistake else 1
        alone = dict(self.made(epoch, range(len(self.data)), size + 3, share=SHARE))
        compared = list(chain.from_iterable(found))
        apart = [float(np.abs(alone[number] - image).mean()) * 255 for number, image in compared]
        different = sum(gather(sum(levels > OFF for levels in apart)))
        return {
            "ok": different == 0,
            "compared": len(compared) * WORLD,
            "different": different,
            "largest_mean_levels": max(gather(max(apart))),
        }

    def places(self, mistake: str, *, name: str) -> Result:
        """Whether the crops of all ranks together are distributed as torchvision's."""
        placed = draws.PLACES[name]
        file = draws.independent.ramp(*placed.size)
        images = [EncodedImage(file, number) for number in range(self.args.crops)]
        options = {"device": self.device, "workers": self.args.workers, "seed": SEED}
        options |= {"cpu_share": 0.0, "sampler": range(RANK, self.args.crops, WORLD)}
        made = draws.of_ours(placed.pipeline, images, mistake, **options)
        return draws.compared(name, np.concatenate(gather(made)), self.args.crops)

    def colors(self, mistake: str, *, name: str, share: float) -> Result:
        """Whether every rank's normalized pictures are NumPy's."""
        options = {"device": self.device, "workers": self.args.workers, "cpu_share": share}
        options["sampler"] = range(draws.PICTURES)  # all of them on every rank
        each = gather(draws.colors(name, mistake, **options))
        return {
            "ok": all(found["ok"] for found in each),
            "largest_std_error": max(found["std_error"] for found in each),
            "largest_mean_error_levels": max(found["mean_error_levels"] for found in each),
        }

    def drawing(self, kind: str, rank: int) -> Order | WeightedRandomSampler:
        """Of one rank, each with another number of samples."""
        count = len(self.data)
        generator = torch.Generator()
        if kind == "augmentation":  # three times each, to ranks in turn, as torchvision and timm do
            order = torch.randperm(count, generator=generator.manual_seed(SEED))
            return Order(order.repeat_interleave(3).tolist()[rank::WORLD])
        generator.manual_seed(SEED + rank)
        return WeightedRandomSampler(
            range(1, count + 1), count // WORLD + rank, generator=generator
        )

    def repeats(self, mistake: str, *, kind: str) -> Result:
        """Whether repeats are pictures of their own, the same for whoever makes them."""
        size = self.args.batch_size
        mine = self.drawing(kind, RANK)
        other = (RANK + 1) % WORLD
        small = {"scale": (0.02, 0.2)}  # a large crop may not fit, and is the middle each time then
        if mistake:
            mine.rank = 0
        found = gather(self.pictures(0, mine, size, **small))
        others = self.drawing(kind, other)
        others.rank = other  # by itself it is this one
        again = self.pictures(0, others, size + 3, **small)
        orders = [list(self.drawing(kind, rank)) for rank in range(WORLD)]
        exact = [[number for number, _ in part] for part in found] == orders
        pairs = zip(again, found[other], strict=True)
        different = sum(gather(sum(a != b for a, b in pairs)))
        times = Counter(chain.from_iterable(found))
        alike = times.total() - len(times)
        return {
            "ok": exact and different == 0 and alike == 0,
            "samples": [len(part) for part in found],
            "compared": times.total(),
            "different": different,
            "repeats": times.total() - len({number for number, _ in times}),
            "repeats_alike": alike,
        }

    def gradients(self, mistake: str, *, dtype: torch.dtype) -> Result:
        """Whether each step's gradients are those of one process with the samples of all ranks."""
        # Without padding, which one process would draw anew: it has the sample twice.
        size = self.args.batch_size
        orders = self.orders(0, drop_last=True)
        steps = range(0, len(orders[0]), size)
        together = [joined(order[at : at + size] for order in orders) for at in steps]
        if mistake and RANK == WORLD - 1:
            orders[RANK] = [(number + 1) % len(self.data) for number in orders[RANK]]
        torch.manual_seed(SEED)
        model = network().to(self.device, dtype)
        expected = gradients(model, self.loader(batch_sampler=Order(together, 0)), dtype)
        if WORLD > 1:
            ids = [self.device] if self.device.type == "cuda" else None
            model = DistributedDataParallel(model, device_ids=ids)
        mine = Order(orders[RANK], 0)
        found = gradients(model, self.loader(sampler=mine, batch_size=size), dtype)
        pairs = list(zip(found, expected, strict=True))
        return {
            "ok": all(gather(all(close(a, b) for a, b in pairs))),
            "steps": len(steps),
            "largest": max(b.abs().max().item() for _, b in pairs),
            "largest_error": max(gather(max((a - b).abs().max().item() for a, b in pairs))),
        }

    def contexts(self, mistake: str) -> Result:
        """Whether this process has a CUDA context on its own GPU only."""
        if mistake:
            torch.zeros(1, device=f"cuda:{(self.device.index + 1) % torch.cuda.device_count()}")
        driver = ctypes.CDLL("libcuda.so.1")
        flags = ctypes.c_uint()
        active = ctypes.c_int()
        mine = []
        for index in range(torch.cuda.device_count()):
            driver.cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active))
            mine += [index] * active.value
        free, total = torch.cuda.mem_get_info(self.device)
        return {
            "ok": all(gather(mine == [self.device.index])),
            "of_ranks": gather(mine),
            # Of all processes: another one's context would be seen here, too.
            "used_beyond_own_bytes": gather(total - free - torch.cuda.memory_reserved()),
        }


def network() -> nn.Module:
    """Without BatchNorm, whose statistics are each rank's own."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )


def gradients(model: nn.Module, loader: DataPrefetcher, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of every step and parameter, with the weights as they are."""
    found = []
    loader.set_epoch(0)
    for images, numbers in loader:
        model.zero_grad()
        nn.functional.cross_entropy(model(images.to(dtype)), numbers % CLASSES).backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
    return found


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within the tolerance of the dtype that ``torch.testing`` has."""
    try:
        torch.testing.assert_close(found, expected)
    except AssertionError:
        return False
    return True


def plan(checks: Checks) -> Iterator[tuple[str, Callable[..., Result], Result, list[str]]]:
    """Each check with its name, its options and the mistakes it has to notice."""
    several = WORLD > 1
    no_sampler = ["no sampler"] * several
    yield "union", checks.union, {"drop_last": False}, ["no set_epoch", *no_sampler]
    yield "union, drop_last", checks.union, {"drop_last": True}, no_sampler
    yield "shards", checks.shards, {}, ["one shard for all"] * several
    yield "images", checks.images, {}, ["another epoch"]
    yield "images, policies and cpu_share=0.5", checks.shared, {}, ["another epoch"]
    for name, placed in draws.PLACES.items():
        yield f"crops, {name}", checks.places, {"name": name}, list(placed.mistakes)
    for (name, _), share in zip(draws.COLORS.items(), (0.0, SHARE), strict=True):
        options = {"name": name, "share": share}
        wrong = [faults.SWAPPED, faults.STD]
        yield f"colors, {name}, cpu_share={share}", checks.colors, options, wrong
    for kind in ("augmentation", "weighted"):
        yield f"repeats, {kind}", checks.repeats, {"kind": kind}, ["one rank for all"] * several
    for dtype in (torch.float32, torch.float64):
        name = str(dtype).replace("torch.", "gradients, ")
        yield name, checks.gradients, {"dtype": dtype}, ["other samples"]
    if checks.device.type == "cuda":  # last: the control leaves a context behind
        others = torch.cuda.device_count() > 1
        yield "contexts", checks.contexts, {}, ["another GPU"] * others


def run(args: argparse.Namespace, device: torch.device) -> list[Result]:
    checks = Checks(args, device)
    results = []
    for name, check, options, mistakes in plan(checks):
        judged = partial(check, **options)
        result = faults.judged(name, judged, mistakes, processes=WORLD)
        results.append(result)
        if RANK == 0:
            print(json.dumps(result), flush=True)
    return results


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = harness.output_parser(__doc__)
    parser.add_argument("--pictures", type=int, default=211)
    parser.add_argument("--batch-size", type=int, default=8, help="of each process")
    parser.add_argument("--size", type=int, default=32, help="of the crops, in pixels")
    parser.add_argument(
        "--crops", type=int, default=2000, help="of each distribution, of all ranks"
    )
    parser.add_argument("--workers", type=int, default=2, help="of each DataLoader")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU")
    args = parser.parse_args(words)
    if args.pictures <= args.batch_size * WORLD:
        # In one batch a repeated sample gets other random numbers than the first time.
        parser.error("--pictures must be more than one step of all processes takes")
    return args


def main() -> None:
    args = parse()
    if args.cpu:
        torch.set_num_threads(1)
    else:
        torch.backends.cudnn.allow_tf32 = False
    with ranks.process_group(args.cpu) as device:
        results = run(args, device)
    if RANK == 0:
        document = harness.Document("distributed", args, harness.Device(), anew=True)
        for result in results:
            document.keep(result)
    sys.exit(bench.verdict(results))


if __name__ == "__main__":
    main()
