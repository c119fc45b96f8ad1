"""One launch for a batch of images of different sizes: its table, its grid, and its constants."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Unpack

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.transforms import kernel
from gpuprefetch.transforms.launch_table import (
    COLOR_WORDS,
    IMAGE,
    OWN_IMAGE,
    WORD_BYTES,
    Words,
    table_words,
)
from gpuprefetch.transforms.pieces import Places, locate
from gpuprefetch.transforms.reference import (
    SUPPORT,
    TIE,
    Coloring,
    Doubles,
    Ints,
    Numbers,
    Options,
    Request,
    carry_out,
    check,
    check_each,
    check_rows,
    resample_reference,
)
from gpuprefetch.transforms.sampling import Sizes

# A program makes STRIPS strips of ROWS x COLS output pixels. A strip sums its source rows, filtered
# along x, into all of its output rows: taller strips filter fewer rows twice but weigh more of them
# in vain; more strips amortize the set-up but leave longer programs to wait for at the end.
# `benchmarks/kernel.py --sweep` on an H200, 256 photos: 0.14 ms with these, 0.18 with 4 x 32 x 4,
# 0.21 with 8 x 32 x 2, 0.16 with 2 x 128 x 8 in 4 warps.
ROWS = 2
COLS = 32
STRIPS = 8
NUM_WARPS = 1
MAX_REGISTERS: int | None = None

# The color of a picture that no decoder has written yet, red in the lowest byte. See Note
# [Canaries] in images/decode.py.
CANARY = 0x05FC03

# Stands for an address where nothing is launched: as wide as one, and aligned for Triton.
_ANY_ADDRESS = 1 << 40


def runs_on(device: torch.device) -> bool:
    """Whether the kernels run there: compiled on a GPU, in Triton's interpreter on a CPU."""
    return kernel.HAS_TRITON if device.type == "cuda" else kernel.INTERPRETED


def load_triton() -> None:
    """Have Triton do, on the current device, what its first kernel in a process waits for.

    That is a hash of Triton's own files: 0.39 s on 16 cores. The smallest kernel is compiled for
    it, or read from Triton's cache.
    """
    kernel.canary_kernel.warmup(
        _ANY_ADDRESS, _ANY_ADDRESS, 0, OWN_SIZES=0, CANARY=CANARY, num_warps=1, grid=(1,)
    )


def resample(
    images: Sequence[torch.Tensor],
    sampling: torch.Tensor | Doubles,
    size: tuple[int, int],
    **options: Unpack[Options],
) -> torch.Tensor:
    """Resample images of different sizes into one batch.

    Output pixel ``j`` of an axis is centered on the source coordinate ``origin + step * j``, where
    source pixel ``k`` has its center at ``k``; a negative ``step`` flips. The pixel is a weighted
    mean of the source pixels in the box ``lo <= k < hi``, and 0 unless ``first <= j < last``.
    Cropping ``y0 <= y < y0 + h`` and resizing to H rows, for instance, is ``step = h / H``,
    ``origin = y0 + step / 2 - 0.5``, ``lo = y0``, ``hi = y0 + h``, ``first = 0``, ``last = H``.

    On a CUDA device this is one launch on the current stream; ``images`` live until it has run.

    Args:
        images: N ``(C, H_i, W_i)`` of one dtype and device; only uint8 is scaled to [0, 1].
        sampling: ``(N, 2, 6)`` float64 on the CPU: (origin, step, lo, hi, first, last) of y and x.
        size: ``(H, W)`` of the result.
        **options: see :class:`.reference.Options`.

    Returns:
        ``(N, C, H, W)``, on the device of ``images``.

    Raises:
        ValueError: for images of other dtypes, rows that read outside of an image, and another
            number of means or stds than of channels.
    """
    out = options.get("out")
    dtype = options.get("dtype") if out is None else out.dtype
    if _is_fused(images, dtype):
        return resample_triton(images, sampling, size, **options)
    return resample_reference(images, sampling, size, **options)


def resample_each(
    images: Sequence[torch.Tensor],
    sampling: torch.Tensor | Doubles,
    outs: Sequence[torch.Tensor],
    **coloring: Unpack[Coloring],
) -> None:
    """Resample images into results of their own sizes, as :func:`resample` does.

    Args:
        images: N ``(C, H_i, W_i)``.
        sampling: ``(N, 2, 6)``.
        outs: N ``(C, h_i, w_i)`` of one dtype, on the device of ``images``, with any strides.
        **coloring: see :class:`.reference.Coloring`.
    """
    request = check_each(images, sampling, outs, np.arange(len(images)), **coloring)
    if _is_fused(images, outs[0].dtype):
        launch_apart(images, request)
    else:
        carry_out(images, request)


def _is_fused(images: Sequence[torch.Tensor], dtype: torch.dtype | None) -> bool:
    """Whether the kernel runs, which computes in float32."""
    on_gpu = kernel.HAS_TRITON and len(images) > 0 and images[0].is_cuda
    return on_gpu and dtype != torch.float64


def resample_triton(
    images: Sequence[torch.Tensor],
    sampling: torch.Tensor | Doubles,
    size: tuple[int, int],
    **options: Unpack[Options],
) -> torch.Tensor:
    """Run the kernel, on CUDA tensors or, in Triton's interpreter, on CPU tensors."""
    request, out = check(images, sampling, size, **options)
    launch_apart(images, request)
    return out


def launch_apart(images: Sequence[torch.Tensor], request: Request) -> None:
    """Run the kernel on images that lie anywhere, whose table nobody has made yet."""
    out = request.out
    words = _plan(request.strides, request.rows, request.interpolation, request.antialias)
    if not isinstance(out, torch.Tensor):
        words = with_places(words, _places_of(out))
    start = int(request.addresses.min()) & ~15  # Triton compiles another kernel for an odd one
    size = out[0].shape[1:]
    table = arrange(
        words, request.positions, request.addresses - start, [len(words)], (size[0], size[1])
    )
    first = out[0]
    colors = coloring(len(first), images[0].dtype, first.dtype, request.mean, request.std)
    numbers = Launches.numbers(table, colors)
    numbers = numbers.pin_memory() if first.is_cuda else numbers
    numbers = numbers.to(first.device, non_blocking=True)
    with torch.cuda.device_of(first):
        launches = Launches(table, out, images[0].dtype, request.interpolation, request.fill)
        launches.launch(0, start, numbers.data_ptr())


def _places_of(results: Sequence[torch.Tensor]) -> Places:
    """Where results lie, from the first one on."""
    addresses, sizes, strides = locate(results)
    offsets = (addresses - addresses[0]) // results[0].itemsize
    return Places(sizes, offsets, strides, shape=())


def with_places(words: Words, places: Places) -> Words:
    """The words of images whose results have places of their own."""
    own = np.zeros(len(words), OWN_IMAGE)
    for name in words.dtype.names or ():
        own[name] = words[name]
    own["out_offset"] = places.offsets
    own["out_strides"] = places.strides
    own["out_size"] = places.sizes
    return own


def plan_rows(
    sampling: Doubles,
    sizes: Ints,
    transposed: npt.NDArray[np.bool_],
    size: Sizes,
    interpolation: str,
    antialias: bool,
) -> Words:
    """``(N,)``: ahead of time, in a worker, what the kernel reads of images ``(H, W, 3)``.

    ``sizes`` ``(N, 2)`` are their heights and widths; ``transposed`` ``(N,)`` says whether an image
    will lie in memory with its axes changed.
    """
    check_rows(sampling, sizes, size)
    height, width = sizes.T
    down = np.where(transposed, 1, width)
    right = np.where(transposed, height, 1)
    strides = np.stack([np.ones_like(down), 3 * down, 3 * right], axis=1)
    return _plan(strides, sampling, interpolation, antialias)


@dataclass(slots=True)
class Table:
    """All that the kernel reads of the images of some launches but their addresses.

    Two launches, of 3 and of 2 images ``(H, W, 3)``::

        words   5 images: those of the first launch, then those of the second
        firsts  [0, 3, 5]
        steps   [3, 3]     pixels of a row are 3 values apart
    """

    words: Words | None  # (N,), one launch after the other; None once their numbers are kept
    firsts: list[int]  # where the images of each launch begin, and where the last ones end
    steps: list[int]  # the stride along x that the images of each launch share; 0 for none
    padded: bool  # whether any image leaves a part of the result to padding
    # Of each launch, the programs for a group of channels; empty where results have one size.
    tiles: list[int] = field(default_factory=list)

    def without_words(self) -> "Table":
        """The same, where the words lie in a batch's buffer."""
        return replace(self, words=None)


def by_place(words: Words, count: int) -> Words:
    """The words of each of ``count`` rows of the result, zeros where there is no image."""
    placed = np.zeros(count, words.dtype)
    placed[words["row"]] = words
    return placed


def arrange(words: Words, places: Ints, offsets: Ints, counts: Sequence[int], size: Sizes) -> Table:
    """Lay out launches of ``counts`` images each; in a worker, it spares the process that trains.

    ``places`` are the rows of the result that images go to, ``offsets`` their bytes from where
    those of their launch will lie. Words that have sizes of their own are told which programs are
    for which image, and ``size`` is not read.
    """
    # The longest programs of a launch start first.
    order = np.lexsort((-words["taps_x"], np.repeat(np.arange(len(counts)), counts)))
    words = words[order]
    words["address"] = offsets[order]
    words["row"] = places[order]
    firsts = np.cumsum([0, *counts]).tolist()
    steps = []
    for stride in np.split(words["strides"][:, 2], firsts[1:-1]):
        # The kernel is made for planes, and for RGB pixels: that saves address arithmetic.
        known = stride[0] in (1, 3) and (stride == stride[0]).all()
        steps.append(int(stride[0]) if known else 0)
    own_sizes = words.dtype == OWN_IMAGE
    lengths = words["out_size"].T if own_sizes else size
    padded = False
    for edges, length in zip((words["edges_y"], words["edges_x"]), lengths, strict=True):
        _, _, first, last = edges.T
        padded |= bool((first > 0).any() or (last < length).any())
    tiles = []
    if own_sizes:
        for part in np.split(words, firsts[1:-1]):  # views
            across, down = _tiles(*part["out_size"].T)
            ends = np.cumsum(across * down)
            part["tiles_before"] = ends - across * down
            tiles.append(int(ends[-1]))
    return Table(words, firsts, steps, padded, tiles)


def _tiles(height: int | Ints, width: int | Ints) -> tuple[int | Ints, int | Ints]:
    """How many programs make a picture, across and down."""
    return -(-width // COLS), -(-height // (ROWS * STRIPS))


def coloring(
    channels: int, source: torch.dtype, dtype: torch.dtype, mean: Numbers, std: Numbers
) -> Ints:
    """``(COLOR_WORDS * channels,)`` float64, bit by bit: what values are multiplied by, and added.

    For uint8 to float32 with mean 0.5 and std 0.25, a scale is 1 / 0.25 / 255 and a shift -2.
    """
    scale = np.broadcast_to(1 / np.array(std or 1.0), channels).copy()
    shift = -scale * np.array(mean or 0.0)
    white, source_white = (255 if d == torch.uint8 else 1 for d in (dtype, source))
    scale *= white / source_white
    return np.concatenate([scale, shift]).view(np.int64)


class Launches:
    """The launches that resample images of dtype ``source`` to rows of ``out`` on the GPU."""

    @staticmethod
    def numbers(table: Table, colors: Ints) -> torch.Tensor:
        """1-D uint8 on the CPU: the launch table, see launch_table.py."""
        assert table.words is not None
        words = np.concatenate([colors, table.words.view(np.int64)])
        return torch.from_numpy(words.view(np.uint8))

    @staticmethod
    def words(numbers: torch.Tensor, channels: int, *, own_sizes: bool = False) -> Words:
        """The images in such a table."""
        kind = OWN_IMAGE if own_sizes else IMAGE
        words: Words = numbers.numpy()[WORD_BYTES * COLOR_WORDS * channels :].view(kind)
        return words

    @staticmethod
    def room(count: int, channels: int, *, own_sizes: bool = False) -> int:
        """The bytes of the table of ``count`` images."""
        return WORD_BYTES * table_words(count, channels, own_sizes=own_sizes)

    def __init__(
        self,
        table: Table,
        out: torch.Tensor | Sequence[torch.Tensor],
        source: torch.dtype,
        interpolation: str,
        fill: Sequence[float] | None = None,
    ) -> None:
        self._firsts = table.firsts
        self._steps = table.steps
        self._tiles = table.tiles
        # Results of their own sizes lie where the table says, from the first one on.
        first = out if isinstance(out, torch.Tensor) else out[0]
        self._out = first if isinstance(out, torch.Tensor) else [first]
        channels = first.size(-3)
        self._groups = -(-channels // 3)
        bicubic = interpolation == "bicubic"
        self._constants = {
            "OWN_SIZES": int(bool(table.tiles)),
            "CHANNELS": channels,
            "SOURCE": getattr(kernel.tl, str(source).removeprefix("torch.")),
            "BICUBIC": bicubic,
            "TIE": 0.5 + TIE if interpolation == "nearest" else 0.0,
            "CLAMP": bicubic and source == torch.uint8,
            "PADDED": table.padded,
            "ROUND": first.dtype == torch.uint8,
            "FILL": (0.0, 0.0, 0.0) if fill is None else tuple(map(float, fill)),
            "ROWS": ROWS,
            "COLS": COLS,
            "STRIPS": STRIPS,
        }

    def set_canaries(self, number: int, address: int, numbers: int) -> None:
        """Color the corners of what :meth:`launch` will read of each image, ``(H, W, 3)`` uint8."""
        first, last = self._firsts[number : number + 2]
        kernel.canary_kernel[(last - first,)](
            address,
            numbers,
            first,
            OWN_SIZES=self._constants["OWN_SIZES"],
            CANARY=CANARY,
            num_warps=1,
        )

    def launch(self, number: int, address: int, numbers: int, survived: int = 0) -> None:
        """Resample the images of a launch on the current stream and the current device.

        ``numbers`` is the address of what :meth:`numbers` gave. ``survived``, unless it is 0, is
        that of a byte for each row of the result: an image that still has a canary sets it to 1.
        """
        first, last = self._firsts[number : number + 2]
        images = last - first
        if isinstance(self._out, torch.Tensor):
            across, down = _tiles(*self._out.shape[2:])
            layers = images * self._groups
        else:
            across = self._tiles[number]
            down = 1
            layers = self._groups
        checks = -(-images // (across * down)) if survived else 0
        grid = (across, down, layers + checks)
        self._call(kernel.resample_kernel[grid], number, address, numbers, survived)

    def compile(self, *, checked: bool) -> None:
        """Compile the kernel of the first launch for the current device, and launch nothing.

        ``checked`` says whether it is to look for canaries.
        """
        compiled = partial(kernel.resample_kernel.warmup, grid=(1, 1, 1))
        self._call(compiled, 0, _ANY_ADDRESS, _ANY_ADDRESS, _ANY_ADDRESS if checked else 0)

    def _call(
        self,
        run: Callable[..., object],
        number: int,
        address: int,
        numbers: int,
        survived: int,
    ) -> None:
        """Call the kernel, or what compiles it: by these arguments Triton tells kernels apart."""
        first, last = self._firsts[number : number + 2]
        strides: Sequence[int] = (0, 0, 0, 0)  # which the table has
        size: Sequence[int] = (0, 0)
        if isinstance(self._out, torch.Tensor):
            out = self._out
            strides = out.stride()
            size = out.shape[2:]
        else:
            (out,) = self._out
        run(
            address,
            numbers,
            first,
            out,
            *strides,
            *size,
            survived,
            last - first,
            STRIDE_X=self._steps[number],
            CANARY=CANARY if survived else 0,
            **self._constants,
            num_warps=NUM_WARPS,
            maxnreg=MAX_REGISTERS,
            enable_fp_fusion=True,
        )


def _plan(strides: Ints, rows: Doubles, interpolation: str, antialias: bool) -> Words:
    """All that the kernel reads of each image but its address and its row of the result."""
    words = np.zeros(len(rows), IMAGE)
    words["strides"] = strides
    for axis, name in enumerate("yx"):
        origin, step, low, high, first, last = rows[:, axis].T
        empty = first == last  # as in _taps
        origin = np.where(empty, low, origin)
        step = np.where(empty, 0, step)
        widens = antialias and interpolation != "nearest"
        stretch = np.maximum(np.abs(step), 1) if widens else np.ones_like(step)
        # Pixels that are only moved take part alone, so a finished picture costs one read each.
        moved = (np.abs(step) == 1) & (origin == np.floor(origin))
        radius = np.where(moved, 0.5, SUPPORT[interpolation] * stretch)
        words[f"filter_{name}"] = np.stack([origin, step, radius, 1 / stretch], axis=1)
        words[f"edges_{name}"] = np.stack([low, high, first, last], axis=1)
        if name == "x":
            # An open interval of this length; taps beyond it, by rounding, have next to no weight.
            words["taps_x"] = np.minimum(np.ceil(2 * radius - 1e-6), high - low)
    return words
