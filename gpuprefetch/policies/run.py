"""Carry out programs: by the kernels on a GPU, by the eager twin elsewhere, or on one sample."""

from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.policies import ops, ops_cpu, spatial
from gpuprefetch.policies.ops import Op, Sample, as_tensor, is_target
from gpuprefetch.policies.ops_launch import Layout, launch
from gpuprefetch.policies.program import AS_IT_IS, Finish, Program, Share
from gpuprefetch.transforms.kernel import HAS_TRITON


def run(
    images: torch.Tensor,
    program: Program | Layout,
    finish: Finish = AS_IT_IS,
    share: Share | None = None,
) -> torch.Tensor:
    """Carry out a program, then normalize, cast and lay out, on the current stream.

    ``images`` are ``(M, C, H, W)`` uint8, or floating point in [0, 1], with C of 1 or 3; they are
    left untouched, and given back where there is nothing to do. A ``program`` that a worker sampled
    is laid out for them. ``share`` gets the tensor for the result before it is written, on the CPU.
    """
    if program.weights is not None:
        return _mixed(images, program, program.weights)
    if isinstance(program, Layout) or (images.is_cuda and HAS_TRITON):
        return launch(images, program, finish)
    return reference(images, program, finish, share)


def _mixed(
    images: torch.Tensor, program: Program | Layout, weights: npt.NDArray[np.float32]
) -> torch.Tensor:
    on_device = torch.from_numpy(weights).to(images.device, non_blocking=True)
    own, *others = on_device[..., None, None, None]
    total: torch.Tensor = images * own
    chains = run(torch.cat([images] * len(others)), replace(program, weights=None))
    for weight, chain in zip(others, chains.view(len(others), *images.shape), strict=True):
        total.addcmul_(chain, weight)
    return total.to(images.dtype)


def reference(
    images: torch.Tensor,
    program: Program,
    finish: Finish = AS_IT_IS,
    share: Share | None = None,
) -> torch.Tensor:
    """Eager twin of :func:`run`: torchvision's functions or ours of ops_cpu.py, image by image."""
    dtype, memory_format = finish.form(images)
    finishes = finish.normalizes or dtype != images.dtype
    if not finishes and not program.ops.any():
        return images.contiguous(memory_format=memory_format)
    out = torch.empty(images.shape, dtype=dtype, device=images.device, memory_format=memory_format)
    if share is not None:
        share(out)
    wide = torch.promote_types(dtype, torch.float32)
    scale, shift = torch.as_tensor(finish.colors(images)).to(images.device, wide)[..., None, None]
    quick = images.device.type == "cpu" and images.dtype == torch.uint8 and images.shape[1] == 3
    for n, given in enumerate(images):
        image = apply_one(given, program, n, quick=quick)
        if finishes:
            image = (image.to(wide) * scale).add_(shift)
        out[n] = apply_one(image.to(dtype), program, n, finals=True) if program.finals else image
    return out


def apply_one(
    sample: Sample, program: Program, row: int, *, finals: bool = False, quick: bool = False
) -> Sample:
    """Do to one sample what the program says of image `row`.

    The sample is an image, ``(C, H, W)`` or PIL, or a mask, boxes or points of
    `torchvision.tv_tensors`, which only ops that move pixels change. ``finals`` runs the slots
    after normalization instead of those before. ``quick`` is for ``(3, H, W)`` uint8 on the CPU.
    What no op touches is the same object.
    """
    if program.weights is not None:
        return _mixed_one(sample, program)
    before = program.ops.shape[1] - program.finals
    slots = slice(before, None) if finals else slice(before)
    target = is_target(sample)
    for code, args in zip(program.ops[row, slots].tolist(), program.args[row, slots], strict=True):
        op = Op(code)
        if op is Op.IDENTITY or (target and not op.moves):
            continue
        done = ops_cpu.apply(op, sample, args) if quick else None
        sample = _twin(op)(sample, args.tolist()) if done is None else done
    return sample


def _twin(op: Op) -> ops.Twin:
    return spatial.twins()[op] if op.is_spatial else ops.twins()[op]


def _mixed_one(sample: Sample, program: Program) -> Sample:
    """Mix one image, with a program of one image."""
    if is_target(sample):
        raise ValueError(
            "AugMix mixes what it moves to different places, and boxes, masks or points cannot "
            "follow. Leave it out where there are some."
        )
    return as_tensor(partial(_run_one, program=program), sample)


def _run_one(image: torch.Tensor, program: Program) -> torch.Tensor:
    return run(image[None], program)[0]
