"""The Triton kernels of :mod:`gpuprefetch.policies.ops`.

Colors are three blocks of float32 in registers: 0 to 255 and whole for ``uint8`` images, else as
they are. An image is handed on as (pointer, stride of channels, stride of pixels, height, width);
one of a single channel has three at the same place, with a stride of 0.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gpuprefetch.transforms.kernel import tl, triton

# Pixels of a program, three channels each. Four pixels to a thread: the lanes of a warp then read
# a line of 128 bytes of uint8 where pixels move, and vectors of four where they do not.
BLOCK, NUM_WARPS = 512, 4
STATISTICS_BLOCK, STATISTICS_WARPS = 2048, 8  # a program takes a whole channel
FIELDS = 12  # words of an op: its code, then arguments in float32
BINS = 256  # floats of the statistics of a channel: EQUALIZE's table, or up to two numbers

if triton is not None:
    from gpuprefetch.transforms.kernel import clamp

    IDENTITY, BRIGHTNESS, CONTRAST, SATURATION, HUE = map(tl.constexpr, range(5))
    POSTERIZE, SOLARIZE, SOLARIZE_ADD, GRAYSCALE, INVERT = map(tl.constexpr, range(5, 10))
    AUTOCONTRAST, EQUALIZE, PERMUTE, ERASE, ERASE_NOISE = map(tl.constexpr, range(10, 15))
    HFLIP, VFLIP, AFFINE_NEAREST, AFFINE_BILINEAR = map(tl.constexpr, range(15, 19))
    PERSPECTIVE_NEAREST, PERSPECTIVE_BILINEAR = map(tl.constexpr, range(19, 21))
    MATRIX_BILINEAR, MATRIX_BICUBIC, SHARPNESS, BLUR = map(tl.constexpr, range(21, 25))
    _FIELDS, _BINS = tl.constexpr(FIELDS), tl.constexpr(BINS)

    # They change from batch to batch: nothing is compiled for their values.
    _kernel = triton.jit(do_not_specialize="n_slots tail pairs start first last end".split())

    @_kernel
    def ops_kernel(
        source_ptr, table_ptr, out_ptr, statistics_ptr, blurred_ptr,
        height, width, stride_n, stride_c, stride_x, n_slots,
        tail, pairs,  # where they begin in the table: what is after the ops, and the pairs
        out_n, out_c, out_x,
        first, last, end,  # slots: before normalization up to last
        UINT8: tl.constexpr,
        MOVES: tl.constexpr,  # whether an image has its pixels moved in the first slot
        FINISH: tl.constexpr,
        VECTOR: tl.constexpr,  # pixels of a row that begin at a multiple of their number
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Slots of all images; in the first one an op may read other pixels."""
        tiles = tl.cdiv(height * width, BLOCK)
        n = tl.program_id(0) // tiles
        pixel = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
        mask = pixel < height * width
        y, x = pixel // width, pixel % width
        op_ptr = table_ptr + (n * n_slots + first) * _FIELDS
        # 64-bit: a batch may pass 2**31 values, an image may not.
        source_ptr += n.to(tl.int64) * stride_n
        image = (source_ptr, stride_c, stride_x, height, width)

        code = tl.load(op_ptr) if MOVES else IDENTITY
        if code < HFLIP:
            colors = _load(image, pixel, mask)
        elif code <= VFLIP:
            across, down = y * width + width - 1 - x, (height - 1 - y) * width + x
            colors = _load(image, tl.where(code == HFLIP, across, down), mask)
        elif code == SHARPNESS:
            colors = _sharpen(image, op_ptr, y, x, mask, UINT8)
        elif code == BLUR:
            plane = height * width
            blurred_ptr += arg(op_ptr, 4).to(tl.int64) * 3 * plane
            planes = (blurred_ptr, plane, 1, height, width)
            sigma, taps = arg(op_ptr, 1), arg(op_ptr, 3)
            colors = _blur(planes, sigma, taps, x, y, width, height, mask, VECTOR)
            colors = rounded(colors, UINT8)
        else:
            colors = _gather(image, op_ptr, code, y, x, mask, UINT8)

        slot = first
        while slot < last:
            colors = point(op_ptr, statistics_ptr, colors, y, x, UINT8)
            op_ptr += _FIELDS
            slot += 1
        if FINISH:
            tail_ptr = table_ptr + tail - 1
            colors = [colors[c] * arg(tail_ptr, c) + arg(tail_ptr, 3 + c) for c in (0, 1, 2)]
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
        n_slots, tail, pairs, start, first, UINT8: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Statistics of one channel of an image, as it is before the slot that needs them."""
        pair = start + tl.program_id(0) // 3
        channel = tl.program_id(0) % 3
        pair_ptr = table_ptr + pairs + 2 * pair
        n, slot = tl.load(pair_ptr), tl.load(pair_ptr + 1)
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
            y, x = pixel // width, pixel % width
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
                value = _pick(colors, channel)
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
            least, most = tl.min(low), tl.max(high)
            scale = (most - least) * (1.0 / 255 if UINT8 else 1.0)
            tl.store(statistics_ptr, tl.where(most == least, 0.0, least))
            tl.store(statistics_ptr + 1, tl.where(most == least, 1.0, scale))
        elif channel == 0:
            tl.store(statistics_ptr, tl.sum(total) / size)

    @_kernel
    def blur_kernel(
        source_ptr, table_ptr, blurred_ptr, height, width, stride_n, stride_c, stride_x,
        n_slots, tail, pairs, start, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """The images of some pairs, blurred along x, in float32 planes one after the other."""
        plane = height * width
        tiles = tl.cdiv(plane, BLOCK)
        place = tl.program_id(0) // tiles
        pair_ptr = table_ptr + pairs + 2 * (start + place)
        n, slot = tl.load(pair_ptr), tl.load(pair_ptr + 1)
        op_ptr = table_ptr + (n * n_slots + slot) * _FIELDS
        source_ptr += n.to(tl.int64) * stride_n
        image = (source_ptr, stride_c, stride_x, height, width)
        pixel = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
        mask = pixel < plane
        x = pixel % width
        colors = _blur(image, arg(op_ptr, 0), arg(op_ptr, 2), pixel - x, x, 1, width, mask, 1)
        blurred_ptr += place.to(tl.int64) * 3 * plane + pixel
        for c in tl.static_range(3):
            tl.store(blurred_ptr + c * plane, colors[c], mask)

    @triton.jit
    def _load(image, at, mask):
        ptr = image[0] + at * image[2]
        return [tl.load(ptr + c * image[1], mask, 0).to(tl.float32) for c in (0, 1, 2)]

    @triton.jit
    def _add(sums, weight, colors):
        return [sums[c] + weight * colors[c] for c in (0, 1, 2)]

    @triton.jit
    def _mix(colors, others, share):
        return [colors[c] + (others[c] - colors[c]) * share for c in (0, 1, 2)]

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
        height, width = image[3], image[4]
        colors = _load(image, y * width + x, mask)
        inside = (y > 0) & (y < height - 1) & (x > 0) & (x < width - 1)
        blurred = [color * (4.0 / 13) for color in colors]
        i = 0
        while i < 9:
            at = (y + i // 3 - 1) * width + x + i % 3 - 1
            blurred = _add(blurred, 1.0 / 13, _load(image, at, mask & inside))
            i += 1
        share = tl.where(inside, 1.0 - arg(op_ptr, 0), 0.0)
        return levels(_mix(colors, rounded(blurred, UINT8), share), UINT8)

    @triton.jit
    def _gather(image, op_ptr, code, y, x, mask, UINT8: tl.constexpr):
        height, width = image[3], image[4]
        # In [-1, 1] as torch's grid_sample has it, and rounded as torchvision rounds on the way.
        base_x, base_y = x + 0.5, y + 0.5
        if code <= AFFINE_BILINEAR:
            base_x, base_y = base_x - 0.5 * width, base_y - 0.5 * height
        scale = base_x * arg(op_ptr, 6) + base_y * arg(op_ptr, 7) + 1.0
        grid_x = base_x * arg(op_ptr, 0) + base_y * arg(op_ptr, 1) + arg(op_ptr, 2)
        grid_y = base_x * arg(op_ptr, 3) + base_y * arg(op_ptr, 4) + arg(op_ptr, 5)
        if code > AFFINE_BILINEAR:
            grid_x = tl.div_rn(grid_x, scale) - 1.0
            grid_y = tl.div_rn(grid_y, scale) - 1.0
        source_x = ((grid_x + 1.0) * width - 1.0) * 0.5
        source_y = ((grid_y + 1.0) * height - 1.0) * 0.5
        repeats = code >= MATRIX_BILINEAR
        taps = tl.where(code == MATRIX_BICUBIC, 4, tl.where(repeats | (code % 2 == 0), 2, 1))
        colors, share = _sample(image, source_y, source_x, taps, repeats, mask)
        if repeats:
            inside = (grid_x >= -1.0) & (grid_x < 1.0) & (grid_y >= -1.0) & (grid_y < 1.0)
            share = tl.where(inside, 1.0, 0.0)
            colors = [clamp(color, 0.0, 255.0 if UINT8 else 1.0) for color in colors]
        fill = [arg(op_ptr, 8 + c) for c in (0, 1, 2)]
        if fill[0] == fill[0]:  # not NaN: there is one
            colors = _mix(fill, colors, share)
        return rounded(colors, UINT8)

    @triton.jit
    def _sample(image, y, x, taps, repeats, mask):
        """Colors between pixels, and the share of them that is from inside.

        Beyond the border the border repeats, or there is nothing.
        """
        height, width = image[3], image[4]
        if taps == 1:
            top, left = nearest(y), nearest(x)
        else:
            top, left = tl.floor(y) - (taps // 2 - 1), tl.floor(x) - (taps // 2 - 1)
        share = tl.zeros_like(x)
        sums = share, share, share
        i = 0
        while i < taps * taps:  # in a loop: unrolled it takes all registers
            row, column = top + i // taps, left + i % taps
            weight = _weight(row - y, taps) * _weight(column - x, taps)
            near_row, near_column = clamp(row, 0.0, height - 1.0), clamp(column, 0.0, width - 1.0)
            inside = (row == near_row) & (column == near_column)
            at = near_row.to(tl.int32) * width + near_column.to(tl.int32)
            sums = _add(sums, weight, _load(image, at, mask & (inside | repeats)))
            share += tl.where(inside, weight, 0.0)
            i += 1
        return sums, share

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

    @triton.jit
    def arg(op_ptr, i):
        return tl.load(op_ptr + 1 + i).to(tl.float32, bitcast=True)

    @triton.jit
    def nearest(value):
        """To the nearest, of two the even one: beyond 2**23 float32 has whole numbers alone."""
        return (value + 12582912.0) - 12582912.0

    @triton.jit
    def rounded(colors, UINT8: tl.constexpr):
        return [nearest(color) for color in colors] if UINT8 else colors

    @triton.jit
    def levels(colors, UINT8: tl.constexpr):
        """In range; torchvision's cast to uint8 truncates."""
        colors = [clamp(color, 0.0, 255.0 if UINT8 else 1.0) for color in colors]
        return [tl.floor(color) for color in colors] if UINT8 else colors

    @triton.jit
    def gray_of(colors, UINT8: tl.constexpr):
        gray = colors[0] * 0.2989 + colors[1] * 0.587 + colors[2] * 0.114
        return tl.floor(gray) if UINT8 else gray

    @triton.jit
    def bin_of(value, UINT8: tl.constexpr):
        if not UINT8:
            value = clamp(value * 255.999, 0.0, 255.0)
        return value.to(tl.int32)

    @triton.jit
    def point(op_ptr, statistics_ptr, colors, y, x, UINT8: tl.constexpr):
        code = tl.load(op_ptr)
        white = 255.0 if UINT8 else 1.0
        # Read in any case: no branch waits for them.
        a0, a1, a2 = arg(op_ptr, 0), arg(op_ptr, 1), arg(op_ptr, 2)
        if (code == CONTRAST) | (code == AUTOCONTRAST) | (code == EQUALIZE):
            statistics_ptr += a1.to(tl.int32) * 3 * _BINS
        if (code == IDENTITY) | (code >= HFLIP):  # done where it was read
            pass
        elif code <= SATURATION:
            other = tl.zeros_like(colors[0])
            if code == CONTRAST:
                other += tl.load(statistics_ptr)
            elif code == SATURATION:
                other = gray_of(colors, UINT8)
            other *= 1.0 - a0
            colors = levels([color * a0 + other for color in colors], UINT8)
        elif code == HUE:
            colors = _hue(colors, a0, UINT8)
        elif code == POSTERIZE:
            colors = [_posterize(color, a0, UINT8) for color in colors]
        elif code == SOLARIZE:
            colors = [tl.where(color >= a0, white - color, color) for color in colors]
        elif code == SOLARIZE_ADD:
            brighter = levels([color + a0 for color in colors], UINT8)
            colors = [tl.where(colors[c] < a1, brighter[c], colors[c]) for c in (0, 1, 2)]
        elif code == GRAYSCALE:
            gray = gray_of(colors, UINT8)
            colors = gray, gray, gray
        elif code == INVERT:
            colors = [white - color for color in colors]
        elif code == AUTOCONTRAST:
            colors = [_stretch(colors[c], statistics_ptr + c * _BINS) for c in (0, 1, 2)]
            colors = levels(colors, UINT8)
        elif code == EQUALIZE:
            bins = [bin_of(color, UINT8) for color in colors]
            colors = [tl.load(statistics_ptr + c * _BINS + bins[c]) for c in (0, 1, 2)]
        elif code == PERMUTE:
            colors = _pick(colors, a0), _pick(colors, a1), _pick(colors, a2)
        else:
            colors = erase(code, op_ptr, colors, y, x, UINT8)
        return colors

    @triton.jit
    def _posterize(value, levels, UINT8: tl.constexpr):
        if UINT8:  # a mask
            return (value.to(tl.int32) & levels.to(tl.int32)).to(tl.float32)
        return clamp(tl.floor(value * levels), 0.0, levels - 1) * (1.0 / levels)

    @triton.jit
    def _stretch(value, statistics_ptr):
        least, scale = tl.load(statistics_ptr), tl.load(statistics_ptr + 1)
        return tl.div_rn(value - least, scale + tl.zeros_like(value))

    @triton.jit
    def _pick(colors, channel):
        return tl.where(channel == 0, colors[0], tl.where(channel == 1, colors[1], colors[2]))

    @triton.jit
    def _hue(colors, shift, UINT8: tl.constexpr):
        r, g, b = [color * (1.0 / 255) for color in colors] if UINT8 else colors
        most = tl.maximum(tl.maximum(r, g), b)
        least = tl.minimum(tl.minimum(r, g), b)
        gray = most == least
        saturation = (most - least) / tl.where(gray, 1.0, most)
        divisor = tl.where(gray, 1.0, most - least)
        rc, gc, bc = (most - r) / divisor, (most - g) / divisor, (most - b) / divisor
        hue = tl.where(most == g, 2.0 + rc - bc, 4.0 + gc - rc)
        hue = tl.where(most == r, bc - gc, hue) * (1.0 / 6) + 1.0
        hue = hue - tl.floor(hue) + shift
        hue = 6.0 * (hue - tl.floor(hue))
        sector = tl.floor(hue)
        part = hue - sector
        sector = tl.where(sector == 6.0, 0.0, sector)
        q = clamp((1.0 - saturation * part) * most, 0.0, 1.0)
        t = clamp((1.0 - saturation + saturation * part) * most, 0.0, 1.0)
        p = clamp((1.0 - saturation) * most, 0.0, 1.0)
        r = tl.where((sector == 0.0) | (sector == 5.0), most, p)
        r = tl.where(sector == 1.0, q, tl.where(sector == 4.0, t, r))
        g = tl.where((sector == 1.0) | (sector == 2.0), most, p)
        g = tl.where(sector == 3.0, q, tl.where(sector == 0.0, t, g))
        b = tl.where((sector == 3.0) | (sector == 4.0), most, p)
        b = tl.where(sector == 5.0, q, tl.where(sector == 2.0, t, b))
        colors = r, g, b
        return [tl.floor(color * 255.999) for color in colors] if UINT8 else colors

    @triton.jit
    def erase(code, op_ptr, colors, y, x, UINT8: tl.constexpr):
        top, left = arg(op_ptr, 0).to(tl.int32), arg(op_ptr, 1).to(tl.int32)
        height, width = arg(op_ptr, 2).to(tl.int32), arg(op_ptr, 3).to(tl.int32)
        values = [arg(op_ptr, 4 + c) for c in (0, 1, 2)]
        inside = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)
        if code == ERASE:
            colors = [tl.where(inside, values[c], colors[c]) for c in (0, 1, 2)]
        elif code == ERASE_NOISE:
            at, size, seed = (y - top) * width + x - left, height * width, values[0].to(tl.int32)
            noise = [_noise(seed, at + c * size, UINT8) for c in (0, 1, 2)]
            colors = [tl.where(inside, noise[c], colors[c]) for c in (0, 1, 2)]
        return colors

    @triton.jit
    def _noise(seed, offset, UINT8: tl.constexpr):
        value = tl.randn(seed, offset)
        if UINT8:  # torch's cast: towards zero, then around
            value = (value.to(tl.int32) & 255).to(tl.float32)
        return value
