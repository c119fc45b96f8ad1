"""Lay out a program in one copy to the GPU, and carry it out in few launches."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.policies import ops_kernel as kernel
from gpuprefetch.policies.ops import BINS, STATISTICS, WORDS, Erase, Op, flags
from gpuprefetch.policies.program import AS_IT_IS, Finish, Program
from gpuprefetch.policies.spatial import Blur, coordinates

_Doubles = npt.NDArray[np.float64]
_Singles = npt.NDArray[np.float32]
_Ints = npt.NDArray[np.int32]
_Flags = npt.NDArray[np.bool_]
_Table = npt.NDArray[np.void]  # of WORDS

_IS_SPATIAL = flags(lambda op: op.is_spatial)
_IS_SAMPLED = flags(lambda op: op.family is not None)
_NEEDS_STATISTICS = flags(lambda op: op.needs_statistics)
_NEEDS_COLORS = flags(lambda op: op.needs_colors)


@dataclass(slots=True)
class _Group:
    """Slots that one launch carries out, and what goes before it."""

    first: int  # slot, the only one that may be spatial
    last: int  # the slot after them
    spatial: bool  # whether the first one is
    # Statistics: where the pairs (image, slot) of each round begin, and how many there are.
    rounds: list[tuple[int, int]] = field(default_factory=list)
    blurred: tuple[int, int] = (0, 0)  # likewise, the images that are blurred along x first

    def end_at(self, slot: int) -> None:
        """Carry out the slots before ``slot``."""
        self.last = slot

    def blur(self, start: int, number: int) -> None:
        """Blur the images of ``number`` pairs along x first, from pair ``start`` on."""
        self.blurred = start, number


@dataclass(slots=True)
class Layout:
    """A program as the kernels read it: for images of one form, and one :class:`.program.Finish`.

    Two images and three slots, which are two launches, as a flip is spatial::

        image 0   INVERT     IDENTITY   HFLIP
        image 1   CONTRAST   HUE        IDENTITY

        groups    slots 0 and 1, after one round of statistics for the pair (1, 0); slot 2
        words     6 ops of 12 words, from 0 on: a code and 11 arguments
                  3 scales and 3 shifts, from colors_at = 72 on
                  the pair (1, 0), from pairs_at = 78 on
    """

    words: _Ints  # all that the kernels read but pixels: ops, colors, pairs
    groups: list[_Group]
    n_slots: int
    colors_at: int  # where the scales and shifts are among the words
    pairs_at: int
    n_pairs: int  # how many results have statistics, or are blurred along x
    finishes: bool  # whether the last launch normalizes or casts
    weights: _Singles | None = None  # as in a program


def lay_out(images: torch.Tensor, program: Program, finish: Finish = AS_IT_IS) -> Layout:
    """What :func:`launch` reads; of the images, which may be on "meta", only their form matters."""
    finishes = finish.normalizes or finish.form(images)[0] != images.dtype
    n_slots = program.ops.shape[1]
    before = n_slots - program.finals if finishes else n_slots
    table = _pack(program, images, before)
    codes = table["code"][:, :before]
    groups = _groups(codes)
    pairs = _pairs(groups, table)
    if finishes:  # what stands between them does nothing
        groups = groups or [_Group(before, before, False)]
        groups[-1].end_at(before)
    colors = np.broadcast_to(finish.colors(images), (2, 3)).astype(np.float32)
    ops = table.ravel().view(np.int32)
    return Layout(
        words=np.concatenate([ops, colors.view(np.int32).ravel(), pairs.ravel()]),
        groups=groups,
        n_slots=n_slots,
        colors_at=ops.size,
        pairs_at=ops.size + colors.size,
        n_pairs=len(pairs),
        finishes=finishes,
        weights=program.weights,
    )


def launch(
    images: torch.Tensor, program: Program | Layout, finish: Finish = AS_IT_IS
) -> torch.Tensor:
    """:func:`.run.run` by kernels: on CUDA, or in Triton's interpreter."""
    dtype, memory_format = finish.form(images)
    laid = program if isinstance(program, Layout) else lay_out(images, program, finish)
    if not laid.groups:
        return images.contiguous(memory_format=memory_format)
    if not (images.is_contiguous() or images.is_contiguous(memory_format=torch.channels_last)):
        images = images.contiguous()
    table = torch.from_numpy(laid.words)
    with torch.cuda.device_of(images):
        if images.is_cuda:
            table = table.pin_memory().to(images.device, non_blocking=True)
        shape = (max(laid.n_pairs, 1), 3, BINS)
        statistics = torch.empty(shape, dtype=torch.float32, device=images.device)
        for group in laid.groups:
            final = group is laid.groups[-1]
            out = torch.empty(
                images.shape,
                dtype=dtype if final else images.dtype,
                device=images.device,
                memory_format=memory_format,
            )
            launcher = _Launcher(laid, group, images, table, statistics)
            launcher.make_statistics()
            launcher.carry_out(launcher.blurred(), out, finishes=final and laid.finishes)
            images = out
    return images


class _Launcher:
    """The launches of one group, on images as they are before it."""

    def __init__(
        self,
        laid: Layout,
        group: _Group,
        images: torch.Tensor,
        table: torch.Tensor,
        statistics: torch.Tensor,
    ) -> None:
        self._laid = laid
        self._group = group
        self._images = images
        self._table = table
        self._statistics = statistics
        height, width = images.shape[2:]
        self._pixels = height * width
        self._tiles = -(-self._pixels // kernel.BLOCK)
        self._uint8 = images.dtype == torch.uint8
        # What all three kernels are given after their tensors.
        at = laid.n_slots, laid.colors_at, laid.pairs_at
        self._common = height, width, *_strides(images), *at

    def make_statistics(self) -> None:
        for start, number in self._group.rounds:
            kernel.statistics_kernel[(number * 3,)](
                self._images,
                self._table,
                self._statistics,
                *self._common,
                start,
                self._group.first,
                UINT8=self._uint8,
                BLOCK=kernel.STATISTICS_BLOCK,
                num_warps=kernel.STATISTICS_WARPS,
            )

    def blurred(self) -> torch.Tensor:
        """Float32 planes of the images that are blurred along x first; anything if none is."""
        start, number = self._group.blurred
        if not number:
            return self._statistics  # which is not read for that
        size = number * 3 * self._pixels
        blurred = torch.empty(size, dtype=torch.float32, device=self._images.device)
        kernel.blur_kernel[(number * self._tiles,)](
            self._images,
            self._table,
            blurred,
            *self._common,
            start,
            BLOCK=kernel.BLOCK,
            num_warps=kernel.NUM_WARPS,
        )
        return blurred

    def carry_out(self, blurred: torch.Tensor, out: torch.Tensor, *, finishes: bool) -> None:
        """Write the result of the group's slots."""
        group = self._group
        kernel.ops_kernel[(len(out) * self._tiles,)](
            self._images,
            self._table,
            out,
            self._statistics,
            blurred,
            *self._common,
            *_strides(out),
            group.first,
            group.last,
            self._laid.n_slots if finishes else group.last,
            UINT8=self._uint8,
            MOVES=group.spatial,
            FINISH=finishes,
            VECTOR=1 if out.shape[3] % 4 else 4,
            BLOCK=kernel.BLOCK,
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
    """The launches: a new one for a spatial slot, and for statistics after one."""
    used = np.any(codes, axis=0)
    spatial: _Flags = np.any(_IS_SPATIAL[codes], axis=0)
    statistics: _Flags = np.any(_NEEDS_STATISTICS[codes], axis=0)
    groups: list[_Group] = []
    for slot in np.flatnonzero(used).tolist():
        if groups and not spatial[slot] and not (statistics[slot] and groups[-1].spatial):
            groups[-1].end_at(slot + 1)
        else:
            groups.append(_Group(slot, slot + 1, bool(spatial[slot])))
    return groups


def _pairs(groups: list[_Group], table: _Table) -> _Ints:
    """List what goes before each launch, (P, 2) images and slots, and note its places in args.

    A round has one op of an image at most: the next op of that image needs the result of this one.
    """
    codes = table["code"]
    args = table["args"]
    needs = _NEEDS_STATISTICS[codes]
    pairs = [np.empty((2, 0), np.int64)]
    start = 0
    for group in groups:
        own = needs[:, group.first : group.last]
        order = own.cumsum(1) * own if own.any() else own
        for turn in range(1, int(order.max(initial=0)) + 1):
            image, slot = np.nonzero(order == turn)
            slot += group.first
            args[image, slot, STATISTICS] = np.arange(start, start + len(image))
            group.rounds.append((start, len(image)))
            pairs.append(np.stack([image, slot]))
            start += len(image)
        image = np.flatnonzero(codes[:, group.first] == Op.BLUR)
        if len(image):
            args[image, group.first, Blur.PLANE] = np.arange(len(image))
            group.blur(start, len(image))
            pairs.append(np.stack([image, np.full_like(image, group.first)]))
            start += len(image)
    return np.concatenate(pairs, axis=1).T.astype(np.int32)


# --- Arguments as the kernels read them ---


def _pack(program: Program, images: torch.Tensor, before: int) -> _Table:
    """The table ``(N, S)`` of WORDS. The code of an op that changes nothing is IDENTITY."""
    uint8 = images.dtype == torch.uint8
    table = np.empty(program.ops.shape, WORDS)
    codes = table["code"]
    args = table["args"]
    codes[:] = program.ops
    args[:] = program.args
    used = np.bincount(program.ops.ravel(), minlength=len(Op)) > 0
    _drop_useless(codes, images)
    if used[Op.POSTERIZE]:
        image, slot = np.nonzero(codes == Op.POSTERIZE)
        bits = program.args[image, slot, 0].clip(0, 8)
        args[image, slot, 0] = 256 - 2 ** (8 - bits) if uint8 else 2**bits
    if used[Op.BLUR]:
        image, slot = np.nonzero(codes == Op.BLUR)
        args[image, slot, : Blur.TAPS_X] = _exponents(program.args[image, slot], images)
    if used[Op.ERASE] and uint8:
        image, slot = np.nonzero(codes[:, :before] == Op.ERASE)
        values = slice(Erase.VALUES, Erase.VALUES + 3)
        args[image, slot, values] = np.trunc(program.args[image, slot, values]) % 256
    if used[_IS_SAMPLED].any():
        image, slot = np.nonzero(_IS_SAMPLED[codes])
        given = program.args[image, slot]
        args[image, slot] = coordinates(codes[image, slot], given, images)
    args[codes == Op.IDENTITY] = 0  # the kernels read a box there, too, and it must hold numbers
    return table


def _drop_useless(codes: _Ints, images: torch.Tensor) -> None:
    channels, height, width = images.shape[1:]
    if channels == 1:
        codes[_NEEDS_COLORS[codes]] = Op.IDENTITY
    if min(height, width) <= 2:  # all of it is border, which stays
        codes[codes == Op.SHARPNESS] = Op.IDENTITY


def _exponents(args: _Doubles, images: torch.Tensor) -> _Doubles:
    """What the kernels read instead of both sigmas of a BLUR."""
    height, width = images.shape[2:]
    sigmas = args[:, Blur.SIGMA_X : Blur.TAPS_X]
    taps = args[:, Blur.TAPS_X : Blur.PLANE]
    if (taps // 2 >= (width, height)).any():
        raise ValueError(
            f"images of {height} x {width} are too small for a blur of {taps.max():.0f} pixels: "
            "half of it must be less than a side"
        )
    exponents: _Doubles = (0.5 / sigmas**2).clip(max=1e30)
    return exponents
