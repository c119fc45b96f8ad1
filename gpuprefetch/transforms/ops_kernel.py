"""The Triton kernels of :mod:`gpuprefetch.transforms.ops`.

Colors are float32 in registers: 0 to 255 and whole for ``uint8`` images, else as they are. An
image is handed on as (pointer, stride of channels, stride of pixels, height, width); one of a
single channel has three at the same place, with a stride of 0.
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
    IDENTITY, BRIGHTNESS, CONTRAST, SATURATION, HUE = map(tl.constexpr, range(5))
    POSTERIZE, SOLARIZE, SOLARIZE_ADD, GRAYSCALE, INVERT = map(tl.constexpr, range(5, 10))
    AUTOCONTRAST, EQUALIZE, PERMUTE, ERASE, ERASE_NOISE = map(tl.constexpr, range(10, 15))
    HFLIP, VFLIP, AFFINE_NEAREST, AFFINE_BILINEAR = map(tl.constexpr, range(15, 19))
    PERSPECTIVE_NEAREST, PERSPECTIVE_BILINEAR = map(tl.constexpr, range(19, 21))
    MATRIX_BILINEAR, MATRIX_BICUBIC, SHARPNESS, BLUR = map(tl.constexpr, range(21, 25))
    _FIELDS, _BINS = tl.constexpr(FIELDS), tl.constexpr(BINS)

    # They change from batch to batch: nothing is compiled for their values.
    _kernel = triton.jit(do_not_specialize="n_slots tail rows pairs start first last end".split())

    @_kernel
    def ops_kernel(
        source_ptr, table_ptr, out_ptr, statistics_ptr, blurred_ptr,
        height, width, stride_n, stride_c, stride_x, n_slots,
        tail, rows, pairs,  # where they begin in the table: what is after the ops, and each list
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
        source_ptr += tl.load(table_ptr + rows + n).to(tl.int64) * stride_n
        image = (source_ptr, stride_c, stride_x, height, width)

        if MOVES:
            code = tl.load(op_ptr)
            if code < HFLIP:
                r, g, b = _load(image, pixel, mask)
            elif code <= VFLIP:
                across, down = y * width + width - 1 - x, (height - 1 - y) * width + x
                r, g, b = _load(image, tl.where(code == HFLIP, across, down), mask)
            elif code == SHARPNESS:
                r, g, b = _sharpen(image, op_ptr, y, x, mask, UINT8)
            elif code == BLUR:
                plane = height * width
                blurred_ptr += arg(op_ptr, 4).to(tl.int64) * 3 * plane
                planes = (blurred_ptr, plane, 1, height, width)
                sigma, taps = arg(op_ptr, 1), arg(op_ptr, 3)
                r, g, b = _blur(planes, sigma, taps, x, y, width, height, mask, VECTOR)
                r, g, b = rounded(r, g, b, UINT8)
            else:
                r, g, b = _gather(image, op_ptr, code, y, x, mask, UINT8)
        else:
            r, g, b = _load(image, pixel, mask)

        slot = first
        while slot < last:
            r, g, b = point(op_ptr, statistics_ptr, r, g, b, y, x, UINT8)
            op_ptr += _FIELDS
            slot += 1
        if FINISH:
            colors_ptr = table_ptr + tail
            r = r * arg(colors_ptr, -1) + arg(colors_ptr, 2)
            g = g * arg(colors_ptr, 0) + arg(colors_ptr, 3)
            b = b * arg(colors_ptr, 1) + arg(colors_ptr, 4)
            while slot < end:
                r, g, b = erase(tl.load(op_ptr), op_ptr, r, g, b, y, x, False)
                op_ptr += _FIELDS
                slot += 1
        kind = out_ptr.dtype.element_ty
        out_ptr += n.to(tl.int64) * out_n + pixel * out_x
        tl.store(out_ptr + 2 * out_c, b.to(kind), mask)
        tl.store(out_ptr + out_c, g.to(kind), mask)
        tl.store(out_ptr, r.to(kind), mask)  # last: a single channel is the first one

    @_kernel
    def statistics_kernel(
        source_ptr, table_ptr, statistics_ptr, height, width, stride_n, stride_c, stride_x,
        n_slots, tail, rows, pairs, start, first, UINT8: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Statistics of one channel of an image, as it is before the slot that needs them."""
        pair = start + tl.program_id(0) // 3
        channel = tl.program_id(0) % 3
        pair_ptr = table_ptr + pairs + 2 * pair
        n, slot = tl.load(pair_ptr), tl.load(pair_ptr + 1)
        ops_ptr = table_ptr + n * n_slots * _FIELDS
        code = tl.load(ops_ptr + slot * _FIELDS)
        source_ptr += tl.load(table_ptr + rows + n).to(tl.int64) * stride_n
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
            r, g, b = _load(image, pixel, mask)
            before = first
            while before < slot:
                op_ptr = ops_ptr + before * _FIELDS
                r, g, b = point(op_ptr, statistics_ptr, r, g, b, y, x, UINT8)
                before += 1
            if code == CONTRAST:
                gray = tl.where(stride_c == 0, r, gray_of(r, g, b, UINT8))
                total += tl.where(mask, gray, 0.0)
            else:
                value = tl.where(channel == 0, r, tl.where(channel == 1, g, b))
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
        n_slots, tail, rows, pairs, start, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """The images of some pairs, blurred along x, in float32 planes one after the other."""
        plane = height * width
        tiles = tl.cdiv(plane, BLOCK)
        place = tl.program_id(0) // tiles
        pair_ptr = table_ptr + pairs + 2 * (start + place)
        n, slot = tl.load(pair_ptr), tl.load(pair_ptr + 1)
        op_ptr = table_ptr + (n * n_slots + slot) * _FIELDS
        source_ptr += tl.load(table_ptr + rows + n).to(tl.int64) * stride_n
        image = (source_ptr, stride_c, stride_x, height, width)
        pixel = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
        mask = pixel < plane
        x = pixel % width
        r, g, b = _blur(image, arg(op_ptr, 0), arg(op_ptr, 2), pixel - x, x, 1, width, mask, 1)
        blurred_ptr += place.to(tl.int64) * 3 * plane + pixel
        tl.store(blurred_ptr, r, mask)
        tl.store(blurred_ptr + plane, g, mask)
        tl.store(blurred_ptr + 2 * plane, b, mask)

    @triton.jit
    def _load(image, at, mask):
        ptr = image[0] + at * image[2]
        r = tl.load(ptr, mask, 0).to(tl.float32)
        g = tl.load(ptr + image[1], mask, 0).to(tl.float32)
        b = tl.load(ptr + 2 * image[1], mask, 0).to(tl.float32)
        return r, g, b

    @triton.jit
    def _blur(image, exponent, taps, across, along, stride, size, mask, VECTOR: tl.constexpr):
        """A Gaussian along one axis, whose ends are mirrored."""
        r = tl.zeros(mask.shape, tl.float32)
        g, b = r, r
        norm = 0.0
        half = (taps * 0.5).to(tl.int32)
        d = -half
        while d <= half:
            weight = tl.exp(-(d * d).to(tl.float32) * exponent)
            at = tl.abs(along + d)
            at = (size - 1 - tl.abs(size - 1 - at)) * stride + across
            if VECTOR > 1:
                at = tl.max_contiguous(tl.multiple_of(at, VECTOR), VECTOR)
            red, green, blue = _load(image, at, mask)
            r, g, b = r + weight * red, g + weight * green, b + weight * blue
            norm += weight
            d += 1
        return r / norm, g / norm, b / norm

    @triton.jit
    def _sharpen(image, op_ptr, y, x, mask, UINT8: tl.constexpr):
        height, width = image[3], image[4]
        r, g, b = _load(image, y * width + x, mask)
        inside = (y > 0) & (y < height - 1) & (x > 0) & (x < width - 1)
        red, green, blue = r * (4.0 / 13), g * (4.0 / 13), b * (4.0 / 13)
        i = 0
        while i < 9:
            at = (y + i // 3 - 1) * width + x + i % 3 - 1
            r1, g1, b1 = _load(image, at, mask & inside)
            red, green = red + r1 * (1.0 / 13), green + g1 * (1.0 / 13)
            blue += b1 * (1.0 / 13)
            i += 1
        red, green, blue = rounded(red, green, blue, UINT8)
        share = tl.where(inside, 1.0 - arg(op_ptr, 0), 0.0)
        red, green, blue = r + (red - r) * share, g + (green - g) * share, b + (blue - b) * share
        return levels(red, green, blue, UINT8)

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
        r, g, b, share = _sample(image, source_y, source_x, taps, repeats, mask)
        if repeats:
            inside = (grid_x >= -1.0) & (grid_x < 1.0) & (grid_y >= -1.0) & (grid_y < 1.0)
            share = tl.where(inside, 1.0, 0.0)
            white = 255.0 if UINT8 else 1.0
            r, g, b = clamp(r, 0.0, white), clamp(g, 0.0, white), clamp(b, 0.0, white)
        red, green, blue = arg(op_ptr, 8), arg(op_ptr, 9), arg(op_ptr, 10)
        if red == red:  # not NaN: there is a fill
            r, g = (r - red) * share + red, (g - green) * share + green
            b = (b - blue) * share + blue
        return rounded(r, g, b, UINT8)

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
        r = tl.zeros_like(x)
        g, b, share = r, r, r
        i = 0
        while i < taps * taps:  # in a loop: unrolled it takes all registers
            row, column = top + i // taps, left + i % taps
            weight = _weight(row - y, taps) * _weight(column - x, taps)
            near_row, near_column = clamp(row, 0.0, height - 1.0), clamp(column, 0.0, width - 1.0)
            inside = (row == near_row) & (column == near_column)
            at = near_row.to(tl.int32) * width + near_column.to(tl.int32)
            red, green, blue = _load(image, at, mask & (inside | repeats))
            r, g, b = r + weight * red, g + weight * green, b + weight * blue
            share += tl.where(inside, weight, 0.0)
            i += 1
        return r, g, b, share

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
    def clamp(value, low, high):
        return tl.minimum(tl.maximum(value, low), high)

    @triton.jit
    def nearest(value):
        """To the nearest, of two the even one: beyond 2**23 float32 has whole numbers alone."""
        return (value + 12582912.0) - 12582912.0

    @triton.jit
    def rounded(r, g, b, UINT8: tl.constexpr):
        if UINT8:
            return nearest(r), nearest(g), nearest(b)
        return r, g, b

    @triton.jit
    def levels(r, g, b, UINT8: tl.constexpr):
        """In range; torchvision's cast to uint8 truncates."""
        white = 255.0 if UINT8 else 1.0
        r, g, b = clamp(r, 0.0, white), clamp(g, 0.0, white), clamp(b, 0.0, white)
        if UINT8:
            return tl.floor(r), tl.floor(g), tl.floor(b)
        return r, g, b

    @triton.jit
    def gray_of(r, g, b, UINT8: tl.constexpr):
        gray = r * 0.2989 + g * 0.587 + b * 0.114
        if UINT8:
            gray = tl.floor(gray)
        return gray

    @triton.jit
    def bin_of(value, UINT8: tl.constexpr):
        if not UINT8:
            value = clamp(value * 255.999, 0.0, 255.0)
        return value.to(tl.int32)

    @triton.jit
    def point(op_ptr, statistics_ptr, r, g, b, y, x, UINT8: tl.constexpr):
        code = tl.load(op_ptr)
        white = 255.0 if UINT8 else 1.0
        # Read in any case: no branch waits for them.
        a0, a1, a2 = arg(op_ptr, 0), arg(op_ptr, 1), arg(op_ptr, 2)
        if (code == CONTRAST) | (code == AUTOCONTRAST) | (code == EQUALIZE):
            statistics_ptr += a1.to(tl.int32) * 3 * _BINS
        if (code == IDENTITY) | (code >= HFLIP):  # done where it was read
            pass
        elif code <= SATURATION:
            other = tl.zeros_like(r)
            if code == CONTRAST:
                other += tl.load(statistics_ptr)
            elif code == SATURATION:
                other = gray_of(r, g, b, UINT8)
            other *= 1.0 - a0
            r, g, b = levels(r * a0 + other, g * a0 + other, b * a0 + other, UINT8)
        elif code == HUE:
            r, g, b = _hue(r, g, b, a0, UINT8)
        elif code == POSTERIZE:
            r, g, b = _posterize(r, a0, UINT8), _posterize(g, a0, UINT8), _posterize(b, a0, UINT8)
        elif code == SOLARIZE:
            r, g = tl.where(r >= a0, white - r, r), tl.where(g >= a0, white - g, g)
            b = tl.where(b >= a0, white - b, b)
        elif code == SOLARIZE_ADD:
            red, green, blue = levels(r + a0, g + a0, b + a0, UINT8)
            r, g = tl.where(r < a1, red, r), tl.where(g < a1, green, g)
            b = tl.where(b < a1, blue, b)
        elif code == GRAYSCALE:
            r = gray_of(r, g, b, UINT8)
            g, b = r, r
        elif code == INVERT:
            r, g, b = white - r, white - g, white - b
        elif code == AUTOCONTRAST:
            r, g = _stretch(r, statistics_ptr), _stretch(g, statistics_ptr + _BINS)
            b = _stretch(b, statistics_ptr + 2 * _BINS)
            r, g, b = levels(r, g, b, UINT8)
        elif code == EQUALIZE:
            r = tl.load(statistics_ptr + bin_of(r, UINT8))
            g = tl.load(statistics_ptr + _BINS + bin_of(g, UINT8))
            b = tl.load(statistics_ptr + 2 * _BINS + bin_of(b, UINT8))
        elif code == PERMUTE:
            r, g, b = _pick(r, g, b, a0), _pick(r, g, b, a1), _pick(r, g, b, a2)
        else:
            r, g, b = erase(code, op_ptr, r, g, b, y, x, UINT8)
        return r, g, b

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
    def _pick(r, g, b, channel):
        return tl.where(channel == 0.0, r, tl.where(channel == 1.0, g, b))

    @triton.jit
    def _hue(r, g, b, shift, UINT8: tl.constexpr):
        if UINT8:
            r, g, b = r * (1.0 / 255), g * (1.0 / 255), b * (1.0 / 255)
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
        if UINT8:
            r, g, b = tl.floor(r * 255.999), tl.floor(g * 255.999), tl.floor(b * 255.999)
        return r, g, b

    @triton.jit
    def erase(code, op_ptr, r, g, b, y, x, UINT8: tl.constexpr):
        top, left = arg(op_ptr, 0).to(tl.int32), arg(op_ptr, 1).to(tl.int32)
        height, width = arg(op_ptr, 2).to(tl.int32), arg(op_ptr, 3).to(tl.int32)
        red, green, blue = arg(op_ptr, 4), arg(op_ptr, 5), arg(op_ptr, 6)
        inside = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)
        if code == ERASE:
            r, g = tl.where(inside, red, r), tl.where(inside, green, g)
            b = tl.where(inside, blue, b)
        elif code == ERASE_NOISE:
            at, size, seed = (y - top) * width + x - left, height * width, red.to(tl.int32)
            r = tl.where(inside, _noise(seed, at, UINT8), r)
            g = tl.where(inside, _noise(seed, at + size, UINT8), g)
            b = tl.where(inside, _noise(seed, at + 2 * size, UINT8), b)
        return r, g, b

    @triton.jit
    def _noise(seed, offset, UINT8: tl.constexpr):
        value = tl.randn(seed, offset)
        if UINT8:  # torch's cast: towards zero, then around
            value = (value.to(tl.int32) & 255).to(tl.float32)
        return value
