"""GPU time of lists with a random policy, sampled for each image, and of the list without it.

    python benchmarks/policy.py --output benchmarks/results/policy-h100.json
    python benchmarks/policy.py --policies RandAugment --sides gpuprefetch torchvision
    python benchmarks/policy.py --cells dali:RandAugment gpuprefetch:AugMix

Every side takes 256 uint8 images of 224 x 224 on the GPU and gives normalized float32 ones. The
sides are ``PerImage``; torchvision's v2 on one image after the other, on the GPU; CV-CUDA's
``tv.Compose`` likewise, as it samples once a call like torchvision; kornia's equivalent, in
floating point, on the batch and image by image; and DALI's, in a pipeline. A row of a side that is
not there says why.

Every side is timed in the same three ways: ``gpu_ms`` between CUDA events on the current stream,
which waits for all work of the call; ``host_ms`` until a call returns on an idle device; and
``loop_ms``, the wall time of a call in a loop that does not wait, where DALI has its prefetching
pipeline. ``loop_cpu_ms`` is the CPU time of the process in that loop.

kornia's RandAugment, TrivialAugment and AutoAugment choose their ops once a batch: these rows are
less work than the others', and the table marks them. ``kornia each`` does the same work.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import clock
import harness
import torch
from torchvision.transforms import v2

import gpuprefetch  # before the context: it prepares the environment

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
TO_FLOAT = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
POLICIES: dict[str, Callable[[], Any]] = {
    "RandAugment": lambda: v2.RandAugment(2, 9),
    "TrivialAugmentWide": v2.TrivialAugmentWide,
    "AutoAugment": v2.AutoAugment,
    "ColorJitter": lambda: v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
    "RandomErasing": lambda: v2.RandomErasing(1.0),
    "AugMix": v2.AugMix,
    "GaussianBlur": lambda: v2.GaussianBlur(23),
}

Run = Callable[[], Any]


@dataclass(frozen=True)
class Runs:
    """One call whose work the current stream waits for, and the call of a pipelined loop."""

    call: Run
    loop: Run


class Missing(Exception):
    """A side has no such policy, or is not installed."""


def of_gpuprefetch(policy: str | None, images: torch.Tensor) -> Run:
    if not hasattr(gpuprefetch, "PerImage"):
        raise Missing("this version has no PerImage")
    whole = gpuprefetch.PerImage([*([POLICIES[policy]()] if policy else []), *TO_FLOAT])
    return lambda: whole(images)


def _one_by_one(transform: Callable[[torch.Tensor], Any], images: torch.Tensor) -> Run:
    return lambda: torch.stack([transform(image) for image in images])


def of_torchvision(policy: str | None, images: torch.Tensor) -> Run:
    ending = v2.Compose(TO_FLOAT)
    if policy is None:
        return lambda: ending(images)
    every = _one_by_one(POLICIES[policy](), images)
    return lambda: ending(every())


def of_cvcuda(policy: str | None, images: torch.Tensor) -> Run:
    try:
        from cvcuda.tv import Compose
    except ImportError as error:
        raise Missing(f"not installed: {error}") from None
    ending = v2.Compose(TO_FLOAT)
    if policy is None:
        return lambda: ending(images)
    try:
        every = _one_by_one(Compose([POLICIES[policy]()]), images)
    except TypeError as error:
        raise Missing(str(error)) from None
    return lambda: ending(every())


def of_kornia(policy: str | None, images: torch.Tensor) -> Run:
    augment, normalize = _of_kornia(policy)
    whole = torch.nn.Sequential(*augment, normalize)
    return lambda: whole(images.float() / 255)


def of_kornia_each(policy: str | None, images: torch.Tensor) -> Run:
    augment, normalize = _of_kornia(policy)
    if not augment:
        return lambda: normalize(images.float() / 255)
    (op,) = augment

    def run() -> torch.Tensor:
        scaled = images.float() / 255
        return normalize(torch.cat([op(image[None]) for image in scaled]))

    return run


def _of_kornia(policy: str | None) -> tuple[list[Any], Any]:
    """kornia's module for a policy, if any, and its Normalize."""
    try:
        from kornia import augmentation as K
        from kornia.augmentation import auto
    except ImportError as error:
        raise Missing(f"not installed: {error}") from None
    made: dict[str, Callable[[], Any]] = {
        "RandAugment": lambda: auto.RandAugment(n=2, m=9),
        "TrivialAugmentWide": auto.TrivialAugment,
        "AutoAugment": auto.AutoAugment,
        "ColorJitter": lambda: K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=1.0),
        "RandomErasing": lambda: K.RandomErasing(p=1.0),
        "GaussianBlur": lambda: K.RandomGaussianBlur((23, 23), (0.1, 2.0), p=1.0),
    }
    if policy is not None and policy not in made:
        raise Missing(f"kornia has no {policy}")
    normalize = K.Normalize(torch.tensor(MEAN), torch.tensor(STD))
    return ([made[policy]()] if policy else []), normalize


def of_dali(policy: str | None, images: torch.Tensor) -> Runs:
    try:
        from nvidia.dali import fn, pipeline_def, types
        from nvidia.dali.auto_aug import auto_augment, rand_augment, trivial_augment
    except ImportError as error:
        raise Missing(f"not installed: {error}") from None
    uniform = fn.random.uniform

    def jitter(batch: Any) -> Any:
        factors = {name: uniform(range=(0.6, 1.4)) for name in ("brightness", "contrast")}
        hue = uniform(range=(-36.0, 36.0))
        return fn.color_twist(batch, saturation=uniform(range=(0.6, 1.4)), hue=hue, **factors)

    def erasing(batch: Any) -> Any:
        shape = uniform(range=(0.15, 0.5), shape=2)
        anchor = uniform(range=(0.0, 0.5), shape=2)
        options = {"axes": (0, 1), "normalized_anchor": True, "normalized_shape": True}
        return fn.erase(batch, anchor=anchor, shape=shape, **options)

    made: dict[str, Callable[[Any], Any]] = {
        "RandAugment": lambda batch: rand_augment.rand_augment(batch, n=2, m=9),
        "TrivialAugmentWide": trivial_augment.trivial_augment_wide,
        "AutoAugment": auto_augment.auto_augment,
        "ColorJitter": jitter,
        "RandomErasing": erasing,
        "GaussianBlur": lambda batch: fn.gaussian_blur(
            batch, window_size=23, sigma=uniform(range=(0.1, 2.0))
        ),
    }
    if policy is not None and policy not in made:
        raise Missing(f"DALI has no {policy}")
    augment = made[policy] if policy else None
    source = images.permute(0, 2, 3, 1).contiguous()  # (N, H, W, C), as DALI's decoder gives them
    source = source if images.is_cuda else source.numpy()

    cuda = images.is_cuda
    # The source is copied on torch's stream, so that DALI's work begins after what is queued there.
    stream = {"cuda_stream": torch.cuda.current_stream()} if cuda else {}

    def pipeline() -> Any:
        where = "gpu" if cuda else "cpu"
        batch = fn.external_source(
            source=lambda: source, device=where, layout="HWC", batch=True, **stream
        )
        if augment is not None:
            batch = augment(batch)
        mean, std = ([255 * value for value in values] for values in (MEAN, STD))
        return fn.crop_mirror_normalize(batch, mean=mean, std=std, dtype=types.FLOAT)

    shared = {
        "batch_size": len(images),
        "num_threads": min(8, harness.cores()),
        "device_id": 0 if cuda else None,
        "enable_conditionals": True,
        "exec_dynamic": True,  # only then are outputs ordered by a stream
    }
    call = pipeline_def(**shared, prefetch_queue_depth=1)(pipeline)()
    loop = pipeline_def(**shared)(pipeline)()
    call.build()
    loop.build()
    # Its outputs are ready in torch's stream, as they are for DALI's iterator for PyTorch.
    return Runs(lambda: call.run(*stream.values()), lambda: loop.run(*stream.values()))


SIDES: dict[str, Callable[[str | None, torch.Tensor], Run | Runs]] = {
    "gpuprefetch": of_gpuprefetch,
    "torchvision": of_torchvision,
    "cvcuda": of_cvcuda,
    "kornia": of_kornia,
    "kornia each": of_kornia_each,
    "dali": of_dali,
}


def measure(
    side: str, policies: Iterable[str], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Milliseconds of a side's list without a policy ("none"), and with each."""
    shape = (args.images, 3, args.size, args.size)
    images = torch.randint(256, shape, dtype=torch.uint8, device=args.device)

    def timed(policy: str | None) -> dict[str, Any]:
        torch.manual_seed(0)
        try:
            made = SIDES[side](policy, images)
            runs = made if isinstance(made, Runs) else Runs(made, made)
            repeats = {"warmup": args.warmup, "repeats": args.repeats}
            times = clock.time_calls(runs.call, args.device, **repeats)
            named = {"gpu_ms": times["median_ms"], "gpu_iqr_ms": times["iqr_ms"]}
            looped = clock.time_loop(runs.loop, args.device, calls=args.repeats)
            return {**named, "host_ms": times["host_ms"], **looped}
        except Missing as error:
            return {"missing": str(error)}
        except Exception as error:  # of another library: the other rows are still measured
            return {"missing": f"{type(error).__name__}: {error}".partition("\n")[0]}

    for policy in (None, *policies):
        yield {"policy": policy or "none", "side": side, "images": args.images, **timed(policy)}


def main(words: list[str] | None = None) -> None:
    parser = harness.output_parser(__doc__)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    cells = [f"{side}:{policy}" for side in SIDES for policy in POLICIES]
    parser.add_argument("--cells", nargs="+", choices=cells, metavar="SIDE:POLICY")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="try it out: small, on the CPU")
    args = parser.parse_args(words)
    args.device = "cuda"
    if args.tiny:
        vars(args).update(images=3, size=24, repeats=2, warmup=0, device="cpu")
    document = harness.Document("policy", args, harness.Device(), anew=True)
    cells = args.cells or [f"{side}:{policy}" for side in args.sides for policy in args.policies]
    for side in SIDES:
        chosen = [policy for policy in POLICIES if f"{side}:{policy}" in cells]
        for result in measure(side, chosen, args) if chosen else ():
            document.add(result)  # one by one: a peer that ends the process loses its own alone


if __name__ == "__main__":
    main()
