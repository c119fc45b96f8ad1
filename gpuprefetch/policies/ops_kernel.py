"""The Triton kernels that carry out programs.

Colors are three blocks of float32 in registers: 0 to 255 and whole for ``uint8`` images, else as
they are. An image is handed on as (pointer, stride of channels, stride of pixels, height, width);
one of a single channel has three at the same place, with a stride of 0.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gpuprefetch.policies.ops import BINS, FIELDS, Op
from gpuprefetch.policies.spatial import Blur, Grid
from gpuprefetch.transforms.kernel import tl, triton

# Pixels of a program, three channels each. Four pixels to a thread: the lanes of a warp then read
# a line of 128 bytes of uint8 where pixels move, and vectors of four where they do not.
BLOCK = 512
NUM_WARPS = 4
# A program makes the statistics of a whole channel.
STATISTICS_BLOCK = 2048
STATISTICS_WARPS = 8

if triton is not None:
    from gpuprefetch.policies.ops import (
        AUTOCONTRAST,
        CONTRAST,
        EQUALIZE,
        FIRST_SPATIAL,
        IDENTITY,
        arg,
        bin_of,
        erase,
        float_at,
        gray_of,
        levels,
        nearest,
        pick,
        point,
        rounded,
    )
    from gpuprefetch.transforms.kernel import clamp

    HFLIP = tl.constexpr(Op.HFLIP.value)
    VFLIP = tl.constexpr(Op.VFLIP.value)
    AFFINE_NEAREST = tl.constexpr(Op.AFFINE_NEAREST.value)
    AFFINE_BILINEAR = tl.constexpr(Op.AFFINE_BILINEAR.value)
    PERSPECTIVE_NEAREST = tl.constexpr(Op.PERSPECTIVE_NEAREST.value)
    MATRIX_BILINEAR = tl.constexpr(Op.MATRIX_BILINEAR.value)
    MATRIX_BICUBIC = tl.constexpr(Op.MATRIX_BICUBIC.value)
    SHARPNESS = tl.constexpr(Op.SHARPNESS.value)
    BLUR = tl.constexpr(Op.BLUR.value)
    _FIELDS = tl.constexpr(FIELDS)
    _BINS = tl.constexpr(BINS)
    # Arguments.
    _EXPONENT_X = tl.constexpr(Blur.SIGMA_X.value)
    _EXPONENT_Y = tl.constexpr(Blur.SIGMA_Y.value)
    _TAPS_X = tl.constexpr(Blur.TAPS_X.value)
    _TAPS_Y = tl.constexpr(Blur.TAPS_Y.value)
    _PLANE = tl.constexpr(Blur.PLANE.value)
    _A = tl.constexpr(Grid.A.value)
    _B = tl.constexpr(Grid.B.value)
    _C = tl.constexpr(Grid.C.value)
    _D = tl.constexpr(Grid.D.value)
    _E = tl.constexpr(Grid.E.value)
    _F = tl.constexpr(Grid.F.value)
    _G = tl.constexpr(Grid.G.value)
    _H = tl.constexpr(Grid.H.value)
    _FILL = tl.constexpr(Grid.FILL.value)

    # They change from batch to batch: nothing is compiled for their values.
    _kernel = triton.jit(
        do_not_specialize="n_slots colors_at pairs_at start first last end".split()
    )

    @_kernel
    def ops_kernel(
        source_ptr, table_ptr, out_ptr, statistics_ptr, blurred_ptr,
        height, width, stride_n, stride_c, stride_x, n_slots,
        colors_at, pairs_at,  # where the final scales and shifts, and the pairs are in the table
        out_n, out_c, out_x,
        first, last, end,  # slots: before normalization up to last
        UINT8: tl.constexpr,
        MOVES: tl.constexpr,  # whether an image has its pixels moved in the first slot
        FINISH: tl.constexpr,
        VECTOR: tl.constexpr,  # pixels of a row that begin at a multiple of their number
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Carry out slots of all images; in the first one an op may read other pixels."""
        tiles = tl.cdiv(height * width, BLOCK)
        n = tl.program_id(0) // tiles
        pixel = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
        mask = pixel < height * width
        y = pixel // width
        x = pixel % width
        op_ptr = table_ptr + (n * n_slots + first) * _FIELDS
        # 64-bit: a batch may pass 2**31 values, an image may not.
        source_ptr += n.to(tl.int64) * stride_n
        image = (source_ptr, stride_c, stride_x, height, width)

        code = tl.load(op_ptr) if MOVES else IDENTITY
        if code < FIRST_SPATIAL:
            colors = _load(image, pixel, mask)
        elif (code == HFLIP) | (code == VFLIP):
            across = y * width + width - 1 - x
            down = (height - 1 - y) * width + x
            colors = _load(image, tl.where(code == HFLIP, across, down), mask)
        elif code == SHARPNESS:
            colors = _sharpen(image, op_ptr, y, x, mask, UINT8)
        elif code == BLUR:
            plane = height * width
            blurred_ptr += arg(op_ptr, _PLANE).to(tl.int64) * 3 * plane
            planes = (blurred_ptr, plane, 1, height, width)
            exponent = arg(op_ptr, _EXPONENT_Y)
            taps = arg(op_ptr, _TAPS_Y)
            colors = _blur(planes, exponent, taps, x, y, width, height, mask, VECTOR)
            colors = rounded(colors, UINT8)
        else:
            colors = _gather(image, op_ptr, code, y, x, mask, UINT8)

        slot = first
        while slot < last:
            colors = point(op_ptr, statistics_ptr, colors, y, x, UINT8)
            op_ptr += _FIELDS
            slot += 1
        if FINISH:
            scale_ptr = table_ptr + colors_at
            shift_ptr = scale_ptr + 3
            colors = [
                colors[c] * float_at(scale_ptr + c) + float_at(shift_ptr + c) for c in (0, 1, 2)
            ]
            while slot < end:
                colors = erase(tl.load(op_ptr), op_ptr, colors, y, x, False)
                op_ptr += _FIELDS
                slot += 1
        kind = out_ptr.dtype.element_ty
        out_ptr += n.to(tl.int64) * out_n + pixel * out_x
        for c in tl.static_range(2, -1, -1):  # the first one last: it may be the only one
            tl.store(out_ptr + c * out_c, colors[c].to(kind), mask)

    @_kernel
    def statistics_kernel(
        source_ptr, table_ptr, statistics_ptr, height, width, stride_n, stride_c, stride_x,
        n_slots, colors_at, pairs_at, start, first, UINT8: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Statistics of one channel of an image, as it is before the slot that needs them."""
        pair = start + tl.program_id(0) // 3
        channel = tl.program_id(0) % 3
        pair_ptr = table_ptr + pairs_at + 2 * pair
        n = tl.load(pair_ptr)
        slot = tl.load(pair_ptr + 1)
        ops_ptr = table_ptr + n * n_slots * _FIELDS
        code = tl.load(ops_ptr + slot * _FIELDS)
        source_ptr += n.to(tl.int64) * stride_n
        image = (source_ptr, stride_c, stride_x, height, width)
        size = height * width
        counts = tl.zeros([_BINS], tl.int32)
        low = tl.full([BLOCK], float("inf"), tl.float32)
        high = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        begin = 0
        # The gray mean is for the first channel's program.
        stop = tl.where((code == CONTRAST) & (channel > 0), 0, size)
        while begin < stop:
            pixel = begin + tl.arange(0, BLOCK)
            mask = pixel < size
            y = pixel // width
            x = pixel % width
            colors = _load(image, pixel, mask)
            before = first
            while before < slot:
                op_ptr = ops_ptr + before * _FIELDS
                colors = point(op_ptr, statistics_ptr, colors, y, x, UINT8)
                before += 1
            if code == CONTRAST:
                gray = tl.where(stride_c == 0, colors[0], gray_of(colors, UINT8))
                total += tl.where(mask, gray, 0.0)
            else:
                value = pick(colors, channel)
                if code == EQUALIZE:
                    counts += tl.histogram(bin_of(value, UINT8), _BINS, mask)
                else:
                    low = tl.minimum(low, tl.where(mask, value, low))
                    high = tl.maximum(high, tl.where(mask, value, high))
            begin += BLOCK
        statistics_ptr += (pair * 3 + channel) * _BINS
        if code == EQUALIZE:
            index = tl.arange(0, _BINS)
            brightest = tl.max(tl.where(counts > 0, index, 0))
            step = (size - tl.sum(tl.where(index == brightest, counts, 0))) // 255
            table = (tl.cumsum(counts) + step // 2) // tl.maximum(step, 1)
            table = tl.where(step == 0, index + 1, tl.minimum(table, 255)).to(tl.float32)
            if not UINT8:
                table *= 1.0 / 255
            tl.store(statistics_ptr, 0.0)
            tl.store(statistics_ptr + 1 + index, table, index < _BINS - 1)
        elif code == AUTOCONTRAST:
            least = tl.min(low)
            most = tl.max(high)
            scale = (most - least) * (1.0 / 255 if UINT8 else 1.0)
            tl.store(statistics_ptr, tl.where(most == least, 0.0, least))
            tl.store(statistics_ptr + 1, tl.where(most == least, 1.0, scale))
        elif channel == 0:
            tl.store(statistics_ptr, tl.sum(total) / size)

    @_kernel
    def blur_kernel(
        source_ptr, table_ptr, blurred_ptr, height, width, stride_n, stride_c, stride_x,
        n_slots, colors_at, pairs_at, start, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Blur the images of some pairs along x, into float32 planes one after the other."""
        plane = height * width
        tiles = tl.cdiv(plane, BLOCK)
        place = tl.program_id(0) // tiles
        pair_ptr = table_ptr + pairs_at + 2 * (start + place)
        n = tl.load(pair_ptr)
        slot = tl.load(pair_ptr + 1)
        op_ptr = table_ptr + (n * n_slots + slot) * _FIELDS
        source_ptr += n.to(tl.int64) * stride_n
        image = (source_ptr, stride_c, stride_x, height, width)
        pixel = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
        mask = pixel < plane
        x = pixel % width
        exponent = arg(op_ptr, _EXPONENT_X)
        taps = arg(op_ptr, _TAPS_X)
        colors = _blur(image, exponent, taps, pixel - x, x, 1, width, mask, 1)
        blurred_ptr += place.to(tl.int64) * 3 * plane + pixel
        for c in tl.static_range(3):
            tl.store(blurred_ptr + c * plane, colors[c], mask)

    @triton.jit
    def _load(image, at, mask):
        source_ptr, stride_c, stride_x, _, _ = image
        ptr = source_ptr + at * stride_x
        return [tl.load(ptr + c * stride_c, mask, 0).to(tl.float32) for c in (0, 1, 2)]

    @triton.jit
    def _add(sums, weight, colors):
        return [sums[c] + weight * colors[c] for c in (0, 1, 2)]

    @triton.jit
    def _mix(colors, others, weight):
        return [colors[c] + (others[c] - colors[c]) * weight for c in (0, 1, 2)]

    @triton.jit
    def _blur(image, exponent, taps, across, along, stride, size, mask, VECTOR: tl.constexpr):
        """A Gaussian along one axis, whose ends are mirrored."""
        zero = tl.zeros(mask.shape, tl.float32)
        sums = zero, zero, zero
        norm = 0.0
        half = (taps * 0.5).to(tl.int32)
        d = -half
        while d <= half:
            weight = tl.exp(-(d * d).to(tl.float32) * exponent)
            at = tl.abs(along + d)
            at = (size - 1 - tl.abs(size - 1 - at)) * stride + across
            if VECTOR > 1:
                at = tl.max_contiguous(tl.multiple_of(at, VECTOR), VECTOR)
            sums = _add(sums, weight, _load(image, at, mask))
            norm += weight
            d += 1
        return [total / norm for total in sums]

    @triton.jit
    def _sharpen(image, op_ptr, y, x, mask, UINT8: tl.constexpr):
        _, _, _, height, width = image
        colors = _load(image, y * width + x, mask)
        inside = (y > 0) & (y < height - 1) & (x > 0) & (x < width - 1)
        blurred = [color * (4.0 / 13) for color in colors]
        i = 0
        while i < 9:
            at = (y + i // 3 - 1) * width + x + i % 3 - 1
            blurred = _add(blurred, 1.0 / 13, _load(image, at, mask & inside))
            i += 1
        weight = tl.where(inside, 1.0 - arg(op_ptr, 0), 0.0)
        return levels(_mix(colors, rounded(blurred, UINT8), weight), UINT8)

    @triton.jit
    def _gather(image, op_ptr, code, y, x, mask, UINT8: tl.constexpr):
        _, _, _, height, width = image
        # In [-1, 1] as torch's grid_sample has it, and rounded as torchvision rounds on the way.
        base_x = x + 0.5
        base_y = y + 0.5
        centered = (code == AFFINE_NEAREST) | (code == AFFINE_BILINEAR)
        if centered:
            base_x -= 0.5 * width
            base_y -= 0.5 * height
        scale = base_x * arg(op_ptr, _G) + base_y * arg(op_ptr, _H) + 1.0
        grid_x = base_x * arg(op_ptr, _A) + base_y * arg(op_ptr, _B) + arg(op_ptr, _C)
        grid_y = base_x * arg(op_ptr, _D) + base_y * arg(op_ptr, _E) + arg(op_ptr, _F)
        if not centered:
            grid_x = tl.div_rn(grid_x, scale) - 1.0
            grid_y = tl.div_rn(grid_y, scale) - 1.0
        source_x = ((grid_x + 1.0) * width - 1.0) * 0.5
        source_y = ((grid_y + 1.0) * height - 1.0) * 0.5
        repeats = (code == MATRIX_BILINEAR) | (code == MATRIX_BICUBIC)
        nearest_pixel = (code == AFFINE_NEAREST) | (code == PERSPECTIVE_NEAREST)
        taps = tl.where(code == MATRIX_BICUBIC, 4, tl.where(nearest_pixel, 1, 2))
        colors, coverage = _sample(image, source_y, source_x, taps, repeats, mask)
        if repeats:
            inside = (grid_x >= -1.0) & (grid_x < 1.0) & (grid_y >= -1.0) & (grid_y < 1.0)
            coverage = tl.where(inside, 1.0, 0.0)
            colors = [clamp(color, 0.0, 255.0 if UINT8 else 1.0) for color in colors]
        fill = [arg(op_ptr, _FILL + c) for c in (0, 1, 2)]
        if fill[0] == fill[0]:  # not NaN: there is one
            colors = _mix(fill, colors, coverage)
        return rounded(colors, UINT8)

    @triton.jit
    def _sample(image, y, x, taps, repeats, mask):
        """Colors between pixels, and how much of each comes from inside of the image.

        Outside, the border ``repeats``, or there is nothing.
        """
        _, _, _, height, width = image
        if taps == 1:
            top = nearest(y)
            left = nearest(x)
        else:
            top = tl.floor(y) - (taps // 2 - 1)
            left = tl.floor(x) - (taps // 2 - 1)
        coverage = tl.zeros_like(x)
        sums = coverage, coverage, coverage
        i = 0
        while i < taps * taps:  # in a loop: unrolled, it needs all registers
            row = top + i // taps
            column = left + i % taps
            weight = _weight(row - y, taps) * _weight(column - x, taps)
            near_row = clamp(row, 0.0, height - 1.0)
            near_column = clamp(column, 0.0, width - 1.0)
            inside = (row == near_row) & (column == near_column)
            at = near_row.to(tl.int32) * width + near_column.to(tl.int32)
            sums = _add(sums, weight, _load(image, at, mask & (inside | repeats)))
            coverage += tl.where(inside, weight, 0.0)
            i += 1
        return sums, coverage

    @triton.jit
    def _weight(distance, taps):
        distance = tl.abs(distance)
        weight = tl.maximum(1.0 - distance, 0.0)
        if taps == 1:
            weight = tl.full(distance.shape, 1.0, tl.float32)
        elif taps == 4:  # a = -0.75, as torch has it
            near = (1.25 * distance - 2.25) * distance * distance + 1.0
            far = ((-0.75 * distance + 3.75) * distance - 6.0) * distance + 3.0
            weight = tl.where(distance <= 1.0, near, far)
        return weight
