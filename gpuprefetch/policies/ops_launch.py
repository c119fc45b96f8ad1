"""Lay out a program in one copy to the GPU, and carry it out in few launches."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.policies import ops_kernel as kernel
from gpuprefetch.policies.ops import AS_IT_IS, NAMES, OPS, Finish, Program
from gpuprefetch.policies.ops_kernel import BINS, FIELDS

_Doubles = npt.NDArray[np.float64]
_Singles = npt.NDArray[np.float32]
_Ints = npt.NDArray[np.int32]
_Flags = npt.NDArray[np.bool_]

_MOVING = OPS["HFLIP"]  # this one, and all after it, read other pixels
_NEEDS_STATISTICS = np.isin(NAMES, ["CONTRAST", "AUTOCONTRAST", "EQUALIZE"])
# Between these pixels are sampled.
_FIRST, _LAST = OPS["AFFINE_NEAREST"], OPS["MATRIX_BICUBIC"]
_OF_COLORS = [OPS[name] for name in ("SATURATION", "HUE", "GRAYSCALE", "PERMUTE")]


@dataclass(slots=True)
class _Group:
    """Slots that one launch carries out, and what goes before it."""

    first: int  # slot, the only one that may move pixels
    last: int  # the slot after them
    moves: bool  # whether the first one moves pixels
    # Of statistics: where their pairs (image, slot) begin, and how many there are.
    rounds: list[tuple[int, int]] = field(default_factory=list)
    blurred: tuple[int, int] = (0, 0)  # likewise, of the images that are blurred along x first


@dataclass(slots=True)
class Layout:
    """A program as the kernels read it: for images of one form, and one :class:`.ops.Finish`."""

    words: _Ints  # all that the kernels read but pixels: ops, colors, pairs
    groups: list[_Group]
    places: tuple[int, int, int]  # the number of slots, and where colors and pairs begin
    pairs: int  # how many results have statistics
    finishes: bool  # whether the last launch normalizes or casts
    weights: _Singles | None = None  # as in a program


def lay_out(images: torch.Tensor, program: Program, finish: Finish = AS_IT_IS) -> Layout:
    """What :func:`launch` reads; of the images, which may be on "meta", only their form matters."""
    finishes = finish.normalizes or finish.form(images)[0] != images.dtype
    n_slots = program.ops.shape[1]
    before = n_slots - program.finals if finishes else n_slots
    table, codes, params = _pack(program, images, before)
    needs = _NEEDS_STATISTICS[codes[:, :before]]
    groups = _groups(codes[:, :before], needs)
    pairs = _pairs(groups, codes, needs, params)
    if finishes:  # what stands between them does nothing
        groups = groups or [_Group(before, before, False)]
        groups[-1].last = before
    colors = np.broadcast_to(finish.colors(images), (2, 3)).astype(np.float32)
    words = np.concatenate([table.ravel(), colors.view(np.int32).ravel(), pairs.ravel()])
    places = n_slots, table.size, table.size + colors.size
    return Layout(words, groups, places, len(pairs), finishes, program.weights)


def launch(
    images: torch.Tensor, program: Program | Layout, finish: Finish = AS_IT_IS
) -> torch.Tensor:
    """:func:`gpuprefetch.policies.ops.run` by kernels: on CUDA, or in Triton's interpreter."""
    dtype, memory_format = finish.form(images)
    laid = program if isinstance(program, Layout) else lay_out(images, program, finish)
    if not laid.groups:
        return images.contiguous(memory_format=memory_format)
    if not (images.is_contiguous() or images.is_contiguous(memory_format=torch.channels_last)):
        images = images.contiguous()
    table, uint8 = torch.from_numpy(laid.words), images.dtype == torch.uint8
    height, width = images.shape[2:]
    tiles = -(-height * width // kernel.BLOCK)
    with torch.cuda.device_of(images):
        if images.is_cuda:
            table = table.pin_memory().to(images.device, non_blocking=True)
        empty = partial(torch.empty, device=images.device)
        statistics = empty((max(laid.pairs, 1), 3, BINS), dtype=torch.float32)
        for group in laid.groups:
            final = group is laid.groups[-1]
            kind = dtype if final else images.dtype
            out = empty(images.shape, dtype=kind, memory_format=memory_format)
            common = height, width, *_strides(images), *laid.places
            for start, number in group.rounds:
                given = images, table, statistics, *common, start, group.first, uint8
                kernel.statistics_kernel[(number * 3,)](
                    *given, kernel.STATISTICS_BLOCK, num_warps=kernel.STATISTICS_WARPS
                )
            blurred, (start, number) = statistics, group.blurred
            if number:
                blurred = empty(number * 3 * height * width, dtype=torch.float32)
                kernel.blur_kernel[(number * tiles,)](
                    images, table, blurred, *common, start, kernel.BLOCK, num_warps=kernel.NUM_WARPS
                )
            finishes = final and laid.finishes
            slots = group.first, group.last, laid.places[0] if finishes else group.last
            tensors = images, table, out, statistics, blurred
            constants = uint8, group.moves, finishes, 1 if width % 4 else 4, kernel.BLOCK
            kernel.ops_kernel[(len(out) * tiles,)](
                *tensors, *common, *_strides(out), *slots, *constants, num_warps=kernel.NUM_WARPS
            )
            images = out
    return images


def _strides(images: torch.Tensor) -> tuple[int, int, int]:
    """Between images, channels and pixels; a single channel is read as three."""
    channels, height, width = images.shape[1:]
    plane = height * width
    if channels == 1:
        return plane, 0, 1
    return (3 * plane, plane, 1) if images.is_contiguous() else (3 * plane, 1, 3)


def _groups(codes: _Ints, needs: _Flags) -> list[_Group]:
    """The launches: a new one where pixels move, and for statistics of what has moved."""
    highest, statistics = codes.max(0, initial=0), np.any(needs, axis=0)
    groups: list[_Group] = []
    for slot in np.flatnonzero(highest).tolist():
        moves = bool(highest[slot] >= _MOVING)
        if groups and not moves and not (statistics[slot] and groups[-1].moves):
            groups[-1].last = slot + 1
        else:
            groups.append(_Group(slot, slot + 1, moves))
    return groups


def _pairs(groups: list[_Group], codes: _Ints, needs: _Flags, params: _Singles) -> _Ints:
    """List what goes before each launch, (P, 2) images and slots, and note its places in params.

    A round takes an op of each image: the next one of an image needs what this one has made.
    """
    pairs, start = [np.empty((2, 0), np.int64)], 0
    for group in groups:
        own = needs[:, group.first : group.last]
        order = own.cumsum(1) * own if own.any() else own
        for turn in range(1, int(order.max(initial=0)) + 1):
            image, slot = np.nonzero(order == turn)
            slot += group.first
            params[image, slot, 1] = np.arange(start, start + len(image))
            group.rounds.append((start, len(image)))
            pairs.append(np.stack([image, slot]))
            start += len(image)
        image = np.flatnonzero(codes[:, group.first] == OPS["BLUR"])
        if len(image):
            params[image, group.first, 4] = np.arange(len(image))
            group.blurred = start, len(image)
            pairs.append(np.stack([image, np.full_like(image, group.first)]))
            start += len(image)
    return np.concatenate(pairs, axis=1).T.astype(np.int32)


# --- Arguments as the kernels take them ---


def _pack(program: Program, images: torch.Tensor, before: int) -> tuple[_Ints, _Ints, _Singles]:
    """The table ``(N, S, FIELDS)``, and views of it: codes (N, S) and parameters (N, S, 11).

    Of ops that change nothing the code is 0.
    """
    channels, height, width = images.shape[1:]
    uint8 = images.dtype == torch.uint8
    args = program.args
    table = np.empty((*program.ops.shape, FIELDS), np.int32)
    codes, params = table[..., 0], table.view(np.float32)[..., 1:]
    codes[:], params[:] = program.ops, args[..., : FIELDS - 1]
    used = np.bincount(program.ops.ravel(), minlength=len(OPS)).tolist()
    if channels == 1:
        codes[np.isin(codes, _OF_COLORS)] = 0
    if used[OPS["SHARPNESS"]] and min(height, width) <= 2:
        codes[codes == OPS["SHARPNESS"]] = 0
    if used[OPS["POSTERIZE"]]:
        n, slot = np.nonzero(codes == OPS["POSTERIZE"])
        bits = args[n, slot, 0].clip(0, 8)
        params[n, slot, 0] = 256 - 2 ** (8 - bits) if uint8 else 2**bits
    if used[OPS["BLUR"]]:
        n, slot = np.nonzero(codes == OPS["BLUR"])
        sigma, taps = args[n, slot, :2], args[n, slot, 2:4]
        if (taps // 2 >= (width, height)).any():
            raise ValueError(
                f"images of {height} x {width} are too small for a blur of {taps.max():.0f} "
                "pixels: half of it must be less than a side"
            )
        params[n, slot, :2] = (0.5 / sigma**2).clip(max=1e30)
    if used[OPS["ERASE"]] and uint8:
        n, slot = np.nonzero(codes[:, :before] == OPS["ERASE"])
        params[n, slot, 4:7] = np.trunc(args[n, slot, 4:7]) % 256
    if any(used[_FIRST : _LAST + 1]):
        n, slot = np.nonzero((codes >= _FIRST) & (codes <= _LAST))
        params[n, slot] = coordinates(codes[n, slot], args[n, slot], images)
    params[codes == 0] = 0  # the kernels read a box there, too, and it must hold numbers
    return table, codes, params


def coordinates(codes: _Ints, args: _Doubles, images: torch.Tensor) -> _Singles:
    """``(K, 11)`` for K ops that sample between pixels.

    A matrix and its denominator, from output to source on torch's grid from -1 to 1, then the fill.
    An affine one is from the middle, the others from the corner.
    """
    height, width = images.shape[-2:]
    kinds = (codes - _FIRST) >> 1  # affine, perspective, matrix
    columns = args.T[: FIELDS - 1]
    params = np.zeros((len(args), FIELDS - 1), np.float32)
    matrices, fill, centered = columns[:6], columns[8:], kinds == 0
    if centered.all():
        matrices = _affine_matrices(columns, height, width)
    else:
        matrices = matrices.copy()
        matrices[:, centered] = _affine_matrices(columns[:, centered], height, width)
        projects, plain = kinds == 1, kinds == 2
        params[projects, 6:8] = args[projects, 6:8]
        given = columns[6:9]
        given = np.trunc(given) % 256 if images.dtype == torch.uint8 else given
        fill = np.where(plain, given, fill)
    # In float32 from here on, as torchvision has it.
    halves = np.array([0.5 * width, 0.5 * height], np.float32).repeat(3)
    params[:, :6] = matrices.T.astype(np.float32) / halves
    # Of the nearest pixel, or with a border that repeats, no fill is black.
    black = np.isnan(fill[0]) & (((codes - _FIRST) & 1 == 0) | (kinds == 2))
    params[:, 8:] = np.where(black, 0, fill).T
    return params


def _affine_matrices(args: _Doubles, height: int, width: int) -> _Doubles:
    """``(6, K)`` of ``(ARGS, K)``: output to source, from the middle, as torchvision has it."""
    angle, shear_x, shear_y = np.radians(args[[0, 4, 5]])
    scale = args[3]
    center = args[6:8] - ((0.5 * width,), (0.5 * height,))
    center[np.isnan(center)] = 0
    moved = center + args[1:3]
    turned, cos_y = angle - shear_y, np.cos(shear_y)
    a, c = np.cos(turned) / cos_y, np.sin(turned) / cos_y
    tan_x = np.tan(shear_x)
    b, d = -(a * tan_x + np.sin(angle)), np.cos(angle) - c * tan_x
    a, b, c, d = d / scale, -b / scale, -c / scale, a / scale
    x = center[0] - (a * moved[0] + b * moved[1])
    y = center[1] - (c * moved[0] + d * moved[1])
    return np.stack([a, b, x, c, d, y])
