"""Lay out a program in one copy to the GPU, and carry it out in few launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.transforms import ops_kernel as kernel
from gpuprefetch.transforms.ops import OPS, Program, check, colors_of, memory_format_of
from gpuprefetch.transforms.ops_points import BINS, FIELDS

_Doubles = npt.NDArray[np.float64]
_Singles = npt.NDArray[np.float32]
_Ints = npt.NDArray[np.int32]
_ChannelValues = Sequence[float] | torch.Tensor | None

_CODES = {name: op.code for name, op in OPS.items()}
_MOVING = _CODES["HFLIP"]  # this one, and all after it, read other pixels
_NEEDS_STATISTICS = np.array([op.statistics is not None for op in OPS.values()])


@dataclass(slots=True)
class _Group:
    """Slots that one launch carries out, and what goes before it.

    Attributes:
        first: slot, the only one that may move pixels.
        last: the slot after them.
        end: the slot after those that come after normalization.
        moves: whether the first one moves pixels.
        rounds: of statistics: where their pairs (image, slot) begin, and how many there are.
        blurred: likewise, of the images that are blurred along x first.
    """

    first: int
    last: int
    end: int
    moves: bool
    rounds: list[tuple[int, int]] = field(default_factory=list)
    blurred: tuple[int, int] = (0, 0)


def launch(
    images: torch.Tensor,
    program: Program,
    *,
    mean: _ChannelValues = None,
    std: _ChannelValues = None,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """:func:`gpuprefetch.transforms.ops.run` by kernels: on CUDA, or in Triton's interpreter."""
    dtype = check(images, program, mean, std, dtype)
    memory_format = memory_format or memory_format_of(images)
    finish = dtype != images.dtype or mean is not None or std is not None
    n_slots, count = program.ops.shape
    before = n_slots - program.finals if finish else n_slots
    codes, params = _pack(program, images, before)
    groups = _groups(codes[:before])
    if not groups:
        if not finish and program.rows is None:
            return images.contiguous(memory_format=memory_format)
        groups = [_Group(before, before, before, False)]
    if finish:  # what stands between them does nothing
        groups[-1].last, groups[-1].end = before, n_slots
    pairs = _pairs(groups, codes, params)
    colors = _colors(images, mean, std) if finish else np.zeros(6, np.float32)
    table = _table(program, codes, params, colors, pairs)
    tail = codes.size * FIELDS
    own = tail + 6
    starts = own if program.rows is None else own + count + pairs.size
    if not (images.is_contiguous() or images.is_contiguous(memory_format=torch.channels_last)):
        images = images.contiguous()
    with torch.cuda.device_of(images):
        if images.is_cuda:
            table = table.pin_memory().to(images.device, non_blocking=True)
        empty = partial(torch.empty, device=images.device)
        shape = count, *images.shape[1:]
        statistics = empty((max(len(pairs), 1), 3, BINS), dtype=torch.float32)
        fields = statistics if program.fields is None else program.fields.contiguous()
        for group in groups:
            final = group is groups[-1]
            kind = dtype if final else images.dtype
            out = empty(shape, dtype=kind, memory_format=memory_format)
            places = n_slots, tail, starts, own + count
            _launch(images, table, out, statistics, fields, group, places, finish and final)
            images, starts = out, own
    return images


def _launch(
    source: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    statistics: torch.Tensor,
    fields: torch.Tensor,
    group: _Group,
    places: tuple[int, int, int, int],
    finish: bool,
) -> None:
    uint8, plane = source.dtype == torch.uint8, out[0, 0].numel()
    tiles = -(-plane // kernel.BLOCK)
    common = *out.shape[2:], *_strides(source), *places
    for start, number in group.rounds:
        kernel.statistics_kernel[(number * 3,)](
            source,
            table,
            statistics,
            *common,
            start,
            group.first,
            uint8,
            kernel.STATISTICS_BLOCK,
            num_warps=kernel.STATISTICS_WARPS,
        )
    blurred, (start, number) = statistics, group.blurred
    if number:
        blurred = torch.empty(number * 3 * plane, dtype=torch.float32, device=out.device)
        kernel.blur_kernel[(number * tiles,)](
            source, table, blurred, *common, start, kernel.BLOCK, num_warps=kernel.NUM_WARPS
        )
    kernel.ops_kernel[(len(out) * tiles,)](
        source,
        table,
        out,
        statistics,
        blurred,
        fields,
        *common,
        *_strides(out),
        group.first,
        group.last,
        group.end,
        uint8,
        group.moves,
        finish,
        1 if out.shape[3] % 4 else 4,
        kernel.BLOCK,
        num_warps=kernel.NUM_WARPS,
    )


def _strides(images: torch.Tensor) -> tuple[int, int, int]:
    """Between images, channels and pixels; a single channel is read as three."""
    channels, height, width = images.shape[1:]
    plane = height * width
    if channels == 1:
        return plane, 0, 1
    return (3 * plane, plane, 1) if images.is_contiguous() else (3 * plane, 1, 3)


def _groups(codes: _Ints) -> list[_Group]:
    """The launches: a new one where pixels move, and for statistics of what has moved."""
    moves = (codes.max(1, initial=0) >= _MOVING).tolist()
    statistics = [row.any() for row in _NEEDS_STATISTICS[codes]]
    groups: list[_Group] = []
    for slot in np.flatnonzero(codes.any(1)).tolist():
        if groups and not moves[slot] and not (statistics[slot] and groups[-1].moves):
            groups[-1].last = groups[-1].end = slot + 1
        else:
            groups.append(_Group(slot, slot + 1, slot + 1, moves[slot]))
    return groups


def _pairs(groups: list[_Group], codes: _Ints, params: _Singles) -> _Ints:
    """List what goes before each launch, (P, 2) images and slots, and note its places in params.

    A round takes an op of each image: the next one of an image needs what this one has made.
    """
    pairs = [np.empty((0, 2), np.int32)]
    for group in groups:
        start = sum(map(len, pairs))
        needs = _NEEDS_STATISTICS[codes[group.first : group.last]]
        order = needs.cumsum(0) * needs
        for turn in range(1, int(order.max(initial=0)) + 1):
            slot, image = np.nonzero(order == turn)
            slot += group.first
            params[slot, image, 1] = start + np.arange(len(slot))
            group.rounds.append((start, len(slot)))
            pairs.append(np.stack([image, slot], 1).astype(np.int32))
            start += len(slot)
        if group.moves:
            image = np.flatnonzero(codes[group.first] == _CODES["BLUR"])
            params[group.first, image, 4] = np.arange(len(image))
            group.blurred = start, len(image)
            pairs.append(np.stack([image, np.full_like(image, group.first)], 1).astype(np.int32))
    return np.concatenate(pairs)


def _colors(images: torch.Tensor, mean: _ChannelValues, std: _ChannelValues) -> _Singles:
    """(6,), what three channels are multiplied by at the end, and what is added."""
    means, stds = (np.resize(values, 3) for values in colors_of(mean, std, images.shape[1]))
    white = 255.0 if images.dtype == torch.uint8 else 1.0
    return np.concatenate([1 / (white * stds), -means / stds]).astype(np.float32)


def _table(
    program: Program, codes: _Ints, params: _Singles, colors: _Singles, pairs: _Ints
) -> torch.Tensor:
    """All that the kernels read but pixels, 1-D int32.

    Ops, colors, the rows as they are, pairs, and at last the rows that the results start from.
    """
    slots, count = codes.shape
    ops = np.empty((count, slots, FIELDS), np.int32)
    ops[..., 0] = codes.T
    ops[..., 1:] = params.view(np.int32).transpose(1, 0, 2)
    own = np.arange(count, dtype=np.int32)
    rows = own[:0] if program.rows is None else program.rows.astype(np.int32)
    parts = ops.ravel(), colors.view(np.int32), own, pairs.ravel(), rows
    return torch.from_numpy(np.concatenate(parts))


# --- Arguments as the kernels take them ---


def _pack(program: Program, images: torch.Tensor, before: int) -> tuple[_Ints, _Singles]:
    """Codes (S, N) and parameters (S, N, 11): of ops that change nothing the code is 0."""
    channels, height, width = images.shape[1:]
    uint8 = images.dtype == torch.uint8
    codes, args = program.ops.copy(), program.args
    params = args[..., : FIELDS - 1].astype(np.float32)
    names = list(OPS)
    for code in np.bincount(codes.ravel()).nonzero()[0].tolist():
        name, at = names[code], np.equal(codes, code)
        mine = args[at]
        if channels == 1 and name in ("SATURATION", "HUE", "GRAYSCALE", "PERMUTE"):
            codes[at] = 0
        elif name == "SHARPNESS" and min(height, width) <= 2:
            codes[at] = 0
        elif name == "POSTERIZE":
            bits = mine[:, 0].clip(0, 8)
            params[at, 0] = 256 - 2 ** (8 - bits) if uint8 else 2**bits
        elif name == "BLUR":
            if (mine[:, 2:4] // 2 >= (width, height)).any():
                raise ValueError(
                    f"images of {height} x {width} are too small for a blur of "
                    f"{mine[:, 2:4].max():.0f} pixels: half of it must be less than a side"
                )
            params[at, :2] = (0.5 / mine[:, :2] ** 2).clip(max=1e30)
        elif name == "ERASE" and uint8:
            at[before:] = False
            params[at, 4:7] = _as_uint8(args[at, 4:7])
        elif OPS[name].kind == "gather" and "_" in name:
            n_fields = 0 if program.fields is None else len(program.fields)
            if name.startswith("ELASTIC") and mine[:, 0].max() >= n_fields:
                raise ValueError(f"ELASTIC ops refer to more than the {n_fields} fields there are")
            params[at] = _coordinates(name, mine, images)
            if name.startswith("ROTATE"):
                codes[at] = code + _CODES["AFFINE_NEAREST"] - _CODES["ROTATE_NEAREST"]
    params[codes == 0] = 0  # the kernels read a box there, too, and it must hold numbers
    return codes, params


def _as_uint8(values: _Doubles) -> _Doubles:
    return np.trunc(values) % 256


def _no_nan(values: _Doubles) -> _Doubles:
    return np.where(np.isnan(values), 0.0, values)


def _coordinates(name: str, args: _Doubles, images: torch.Tensor) -> _Singles:
    """(K, 11): a matrix and its denominator on torch's grid from -1 to 1, then the fill."""
    height, width = images.shape[2:]
    params = np.zeros((len(args), FIELDS - 1), np.float32)
    family, mode = name.split("_")
    fills = {"AFFINE": 8, "ROTATE": 3, "PERSPECTIVE": 8, "ELASTIC": 1, "MATRIX": 6}
    fill = args[:, fills[family] : fills[family] + 3]
    if mode == "NEAREST" or family == "MATRIX":
        fill = _no_nan(fill)
    if family == "MATRIX" and images.dtype == torch.uint8:
        fill = _as_uint8(fill)
    params[:, 8:11] = fill
    if family == "ELASTIC":
        params[:, 0] = args[:, 0]
        return params
    matrix = args[:, :6]
    if family == "ROTATE":
        zero, one = np.zeros(len(args)), np.ones(len(args))
        turned = [-(args[:, 0] % 360), zero, zero, one, zero, zero, args[:, 1], args[:, 2]]
        matrix = _affine_matrices(np.stack(turned, axis=1), height, width)
    elif family == "AFFINE":
        matrix = _affine_matrices(args, height, width)
    elif family == "PERSPECTIVE":
        params[:, 6:8] = args[:, 6:8]
    # In float32 from here on, as torchvision has it.
    halves = np.repeat(np.array([0.5 * width, 0.5 * height], np.float32), 3)
    params[:, :6] = matrix.astype(np.float32) / halves
    return params


def _affine_matrices(args: _Doubles, height: int, width: int) -> _Doubles:
    """From output to source, (K, 6), both in pixels from the middle, as torchvision has it."""
    angle, shear_x, shear_y = np.radians(args[:, [0, 4, 5]]).T
    scale = args[:, 3]
    center = _no_nan(args[:, 6:8] - (0.5 * width, 0.5 * height))
    moved = (center + args[:, 1:3]).T
    a = np.cos(angle - shear_y) / np.cos(shear_y)
    b = -(a * np.tan(shear_x) + np.sin(angle))
    c = np.sin(angle - shear_y) / np.cos(shear_y)
    d = np.cos(angle) - c * np.tan(shear_x)
    a, b, c, d = d / scale, -b / scale, -c / scale, a / scale
    x = center[:, 0] - (a * moved[0] + b * moved[1])
    y = center[:, 1] - (c * moved[0] + d * moved[1])
    return np.stack([a, b, x, c, d, y], axis=1)
