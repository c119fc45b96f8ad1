"""The Triton kernels of :mod:`gpuprefetch.transforms.ops`; where there is no Triton, none.

Colors are float32 in registers: 0 to 255 and whole for ``uint8`` images, else as they are.
"""

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

# Pixels of a program, three channels each. Four pixels to a thread: the lanes of a warp then read
# a line of 128 bytes of uint8 where pixels move, and vectors of four where they do not.
BLOCK = 512
NUM_WARPS = 4
# One program takes the statistics of a whole channel.
STATISTICS_BLOCK = 4096
STATISTICS_WARPS = 8

# int32 words before the rows of the images: the scales of three channels, and their shifts.
HEADER = 6
# Words of an op: its code, then arguments in float32.
FIELDS = 12
# Floats of the statistics of a channel: the table of EQUALIZE, or up to two numbers.
BINS = 256

if triton is not None:
    (IDENTITY, BRIGHTNESS, CONTRAST, SATURATION, HUE, POSTERIZE, SOLARIZE, SOLARIZE_ADD) = map(
        tl.constexpr, range(8)
    )
    (GRAYSCALE, INVERT, AUTOCONTRAST, EQUALIZE, PERMUTE, ERASE, ERASE_NOISE) = map(
        tl.constexpr, range(8, 15)
    )
    # The launcher makes AFFINE of ROTATE.
    HFLIP, VFLIP, AFFINE_NEAREST, AFFINE_BILINEAR = map(tl.constexpr, range(15, 19))
    PERSPECTIVE_NEAREST, PERSPECTIVE_BILINEAR, ELASTIC_NEAREST = map(tl.constexpr, range(21, 24))
    ELASTIC_BILINEAR, MATRIX_BILINEAR, MATRIX_BICUBIC = map(tl.constexpr, range(24, 27))
    SHARPNESS, BLUR = map(tl.constexpr, range(27, 29))
    _HEADER, _FIELDS, _BINS = map(tl.constexpr, (HEADER, FIELDS, BINS))

    # Counts and places that change from batch to batch: no kernel is compiled for each.
    _CHANGING = ["count", "n_slots", "pairs", "indirect", "start", "first", "last", "end"]

    @triton.jit(do_not_specialize=_CHANGING)  # type: ignore[untyped-decorator]
    def ops_kernel(  # type: ignore[no-untyped-def]
        source_ptr,
        table_ptr,
        out_ptr,
        statistics_ptr,
        blurred_ptr,
        fields_ptr,
        height,
        width,
        stride_n,
        stride_c,
        stride_x,
        count,
        n_slots,
        pairs,
        indirect,  # whether the table says which image a program reads
        out_n,
        out_c,
        out_x,
        first,
        last,  # of the slots before normalization
        end,
        UINT8: tl.constexpr,
        CHANNELS: tl.constexpr,
        MOVES: tl.constexpr,  # whether an image has its pixels moved in the first slot
        FINISH: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        tiles = tl.cdiv(height * width, BLOCK)
        n = tl.program_id(0) // tiles
        pixel = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
        mask = pixel < height * width
        y, x = pixel // width, pixel % width
        op_ptr = table_ptr + _HEADER + count + (n.to(tl.int64) * n_slots + first) * _FIELDS
        # 64-bit: a batch may pass 2**31 values, an image may not.
        source_ptr += _row(table_ptr, n, indirect) * stride_n

        if MOVES:
            code = tl.load(op_ptr)
            if code < HFLIP:
                r, g, b = _load(source_ptr + pixel * stride_x, stride_c, mask, CHANNELS)
            elif code <= VFLIP:
                at = tl.where(
                    code == HFLIP, y * width + width - 1 - x, (height - 1 - y) * width + x
                )
                r, g, b = _load(source_ptr + at * stride_x, stride_c, mask, CHANNELS)
            elif code == SHARPNESS:
                r, g, b = _sharpen(
                    source_ptr,
                    stride_c,
                    stride_x,
                    op_ptr,
                    y,
                    x,
                    height,
                    width,
                    mask,
                    UINT8,
                    CHANNELS,
                )
            elif code == BLUR:
                plane = height * width
                blurred_ptr += _arg(op_ptr, 4).to(tl.int64) * CHANNELS * plane
                r, g, b = _blur(
                    blurred_ptr,
                    plane,
                    width,
                    x,
                    y,
                    height,
                    _arg(op_ptr, 1),
                    _arg(op_ptr, 3),
                    mask,
                    CHANNELS,
                )
                if UINT8:
                    r, g, b = _round(r), _round(g), _round(b)
            else:
                r, g, b = _gather(
                    source_ptr,
                    stride_c,
                    stride_x,
                    op_ptr,
                    code,
                    fields_ptr,
                    y,
                    x,
                    height,
                    width,
                    mask,
                    UINT8,
                    CHANNELS,
                )
        else:
            r, g, b = _load(source_ptr + pixel * stride_x, stride_c, mask, CHANNELS)

        slot = first
        while slot < last:
            r, g, b = _point(op_ptr, statistics_ptr, r, g, b, y, x, UINT8, CHANNELS)
            op_ptr += _FIELDS
            slot += 1
        if FINISH:
            r = r * _arg(table_ptr, -1) + _arg(table_ptr, 2)
            g = g * _arg(table_ptr, 0) + _arg(table_ptr, 3)
            b = b * _arg(table_ptr, 1) + _arg(table_ptr, 4)
            while slot < end:
                r, g, b = _erase(tl.load(op_ptr), op_ptr, r, g, b, y, x, False)
                op_ptr += _FIELDS
                slot += 1
        out_ptr += n.to(tl.int64) * out_n
        kind = out_ptr.dtype.element_ty
        out_ptr += pixel * out_x
        tl.store(out_ptr, r.to(kind), mask)
        if CHANNELS == 3:
            tl.store(out_ptr + out_c, g.to(kind), mask)
            tl.store(out_ptr + 2 * out_c, b.to(kind), mask)

    @triton.jit(do_not_specialize=_CHANGING)  # type: ignore[untyped-decorator]
    def statistics_kernel(  # type: ignore[no-untyped-def]
        source_ptr,
        table_ptr,
        statistics_ptr,
        height,
        width,
        stride_n,
        stride_c,
        stride_x,
        count,
        n_slots,
        pairs,
        indirect,
        start,
        first,
        UINT8: tl.constexpr,
        CHANNELS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Statistics of one channel of an image, as it is before the slot that needs them."""
        pair = start + tl.program_id(0) // CHANNELS
        channel = tl.program_id(0) % CHANNELS
        pair_ptr = table_ptr + pairs + 2 * pair
        n, slot = tl.load(pair_ptr), tl.load(pair_ptr + 1)
        ops_ptr = table_ptr + _HEADER + count + n.to(tl.int64) * n_slots * _FIELDS
        code = tl.load(ops_ptr + slot * _FIELDS)
        source_ptr += _row(table_ptr, n, indirect) * stride_n
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
            r, g, b = _load(source_ptr + pixel * stride_x, stride_c, mask, CHANNELS)
            before = first
            while before < slot:
                op_ptr = ops_ptr + before * _FIELDS
                y, x = pixel // width, pixel % width
                r, g, b = _point(op_ptr, statistics_ptr, r, g, b, y, x, UINT8, CHANNELS)
                before += 1
            value = r
            if channel == 1:
                value = g
            elif channel == 2:
                value = b
            if code == EQUALIZE:
                counts += tl.histogram(_bin(value, UINT8), _BINS, mask)
            elif code == AUTOCONTRAST:
                low = tl.minimum(low, tl.where(mask, value, low))
                high = tl.maximum(high, tl.where(mask, value, high))
            else:
                gray = r
                if CHANNELS == 3:
                    gray = _gray(r, g, b, UINT8)
                total += tl.where(mask, gray, 0.0)
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

    @triton.jit(do_not_specialize=_CHANGING)  # type: ignore[untyped-decorator]
    def blur_kernel(  # type: ignore[no-untyped-def]
        source_ptr,
        table_ptr,
        blurred_ptr,
        height,
        width,
        stride_n,
        stride_c,
        stride_x,
        count,
        n_slots,
        pairs,
        indirect,
        start,
        CHANNELS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """The images of a list blurred along x, in float32 planes one after the other."""
        plane = height * width
        tiles = tl.cdiv(plane, BLOCK)
        place = tl.program_id(0) // tiles
        pair_ptr = table_ptr + pairs + 2 * (start + place)
        n, slot = tl.load(pair_ptr), tl.load(pair_ptr + 1)
        op_ptr = table_ptr + _HEADER + count + (n.to(tl.int64) * n_slots + slot) * _FIELDS
        source_ptr += _row(table_ptr, n, indirect) * stride_n
        pixel = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
        mask = pixel < plane
        x = pixel % width
        r, g, b = _blur(
            source_ptr + (pixel - x) * stride_x,
            stride_c,
            stride_x,
            0,
            x,
            width,
            _arg(op_ptr, 0),
            _arg(op_ptr, 2),
            mask,
            CHANNELS,
        )
        out_ptr = blurred_ptr + place.to(tl.int64) * CHANNELS * plane + pixel
        tl.store(out_ptr, r, mask)
        if CHANNELS == 3:
            tl.store(out_ptr + plane, g, mask)
            tl.store(out_ptr + 2 * plane, b, mask)

    # --- What the kernels share ---

    @triton.jit
    def _arg(op_ptr, i):  # type: ignore[no-untyped-def]
        return tl.load(op_ptr + 1 + i).to(tl.float32, bitcast=True)

    @triton.jit
    def _row(table_ptr, n, indirect):  # type: ignore[no-untyped-def]
        row = n
        if indirect != 0:
            row = tl.load(table_ptr + _HEADER + n)
        return row.to(tl.int64)

    @triton.jit
    def _load(ptr, stride_c, mask, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
        r = tl.load(ptr, mask, 0).to(tl.float32)
        g, b = r, r
        if CHANNELS == 3:
            g = tl.load(ptr + stride_c, mask, 0).to(tl.float32)
            b = tl.load(ptr + 2 * stride_c, mask, 0).to(tl.float32)
        return r, g, b

    @triton.jit
    def _clamp(value, low, high):  # type: ignore[no-untyped-def]
        return tl.minimum(tl.maximum(value, low), high)

    @triton.jit
    def _round(value):  # type: ignore[no-untyped-def]
        """To the nearest, of two the even one: beyond 2**23 float32 has whole numbers alone."""
        return (value + 12582912.0) - 12582912.0

    @triton.jit
    def _level(value, UINT8: tl.constexpr):  # type: ignore[no-untyped-def]
        """In range; torchvision's cast to uint8 truncates."""
        if UINT8:
            return tl.floor(_clamp(value, 0.0, 255.0))
        return _clamp(value, 0.0, 1.0)

    @triton.jit
    def _gray(r, g, b, UINT8: tl.constexpr):  # type: ignore[no-untyped-def]
        gray = r * 0.2989 + g * 0.587 + b * 0.114
        if UINT8:
            gray = tl.floor(gray)
        return gray

    @triton.jit
    def _bin(value, UINT8: tl.constexpr):  # type: ignore[no-untyped-def]
        if not UINT8:
            value = _clamp(value * 255.999, 0.0, 255.0)
        return value.to(tl.int32)

    # --- Ops that take each pixel by itself ---

    @triton.jit
    def _point(  # type: ignore[no-untyped-def]
        op_ptr, statistics_ptr, r, g, b, y, x, UINT8: tl.constexpr, CHANNELS: tl.constexpr
    ):
        code = tl.load(op_ptr)
        white = 255.0 if UINT8 else 1.0
        # Read in any case: no branch waits for them.
        a0, a1 = _arg(op_ptr, 0), _arg(op_ptr, 1)
        if (code == IDENTITY) | (code >= HFLIP):  # done where it was read
            pass
        elif code <= SATURATION:
            other = tl.zeros_like(r)
            if code == CONTRAST:
                other += tl.load(statistics_ptr + a1.to(tl.int32) * 3 * _BINS)
            elif code == SATURATION:
                other = _gray(r, g, b, UINT8)
            other *= 1.0 - a0
            r = _level(r * a0 + other, UINT8)
            g = _level(g * a0 + other, UINT8)
            b = _level(b * a0 + other, UINT8)
        elif code == HUE:
            r, g, b = _hue(r, g, b, a0, UINT8)
        elif code == POSTERIZE:
            r = _posterize(r, a0, a1, UINT8)
            g = _posterize(g, a0, a1, UINT8)
            b = _posterize(b, a0, a1, UINT8)
        elif code == SOLARIZE:
            r = tl.where(r >= a0, white - r, r)
            g = tl.where(g >= a0, white - g, g)
            b = tl.where(b >= a0, white - b, b)
        elif code == SOLARIZE_ADD:
            r = tl.where(r < a1, _level(r + a0, UINT8), r)
            g = tl.where(g < a1, _level(g + a0, UINT8), g)
            b = tl.where(b < a1, _level(b + a0, UINT8), b)
        elif code == GRAYSCALE:
            r = _gray(r, g, b, UINT8)
            g, b = r, r
        elif code == INVERT:
            r, g, b = white - r, white - g, white - b
        elif code == AUTOCONTRAST:
            statistics_ptr += a1.to(tl.int32) * 3 * _BINS
            r = _stretch(r, statistics_ptr, UINT8)
            g = _stretch(g, statistics_ptr + _BINS * (CHANNELS // 3), UINT8)
            b = _stretch(b, statistics_ptr + 2 * _BINS * (CHANNELS // 3), UINT8)
        elif code == EQUALIZE:
            statistics_ptr += a1.to(tl.int32) * 3 * _BINS
            r = tl.load(statistics_ptr + _bin(r, UINT8))
            g = tl.load(statistics_ptr + _BINS * (CHANNELS // 3) + _bin(g, UINT8))
            b = tl.load(statistics_ptr + 2 * _BINS * (CHANNELS // 3) + _bin(b, UINT8))
        elif code == PERMUTE:
            a2 = _arg(op_ptr, 2)
            red, green, blue = r, g, b
            r = tl.where(a0 == 0.0, red, tl.where(a0 == 1.0, green, blue))
            g = tl.where(a1 == 0.0, red, tl.where(a1 == 1.0, green, blue))
            b = tl.where(a2 == 0.0, red, tl.where(a2 == 1.0, green, blue))
        else:
            r, g, b = _erase(code, op_ptr, r, g, b, y, x, UINT8)
        return r, g, b

    @triton.jit
    def _posterize(value, mask, levels, UINT8: tl.constexpr):  # type: ignore[no-untyped-def]
        if UINT8:
            return (value.to(tl.int32) & mask.to(tl.int32)).to(tl.float32)
        return _clamp(tl.floor(value * levels), 0.0, levels - 1) * (1.0 / levels)

    @triton.jit
    def _stretch(value, statistics_ptr, UINT8: tl.constexpr):  # type: ignore[no-untyped-def]
        least, scale = tl.load(statistics_ptr), tl.load(statistics_ptr + 1)
        return _level(tl.div_rn(value - least, scale + tl.zeros_like(value)), UINT8)

    @triton.jit
    def _hue(r, g, b, shift, UINT8: tl.constexpr):  # type: ignore[no-untyped-def]
        if UINT8:
            r, g, b = r * (1.0 / 255), g * (1.0 / 255), b * (1.0 / 255)
        most = tl.maximum(tl.maximum(r, g), b)
        least = tl.minimum(tl.minimum(r, g), b)
        spread = most - least
        gray = most == least
        saturation = spread / tl.where(gray, 1.0, most)
        divisor = tl.where(gray, 1.0, spread)
        rc, gc, bc = (most - r) / divisor, (most - g) / divisor, (most - b) / divisor
        hue = tl.where(most == g, 2.0 + rc - bc, 4.0 + gc - rc)
        hue = tl.where(most == r, bc - gc, hue) * (1.0 / 6) + 1.0
        hue = hue - tl.floor(hue) + shift
        hue = 6.0 * (hue - tl.floor(hue))
        sector = tl.floor(hue)
        part = hue - sector
        q = _clamp((1.0 - saturation * part) * most, 0.0, 1.0)
        t = _clamp((1.0 - saturation + saturation * part) * most, 0.0, 1.0)
        p = _clamp((1.0 - saturation) * most, 0.0, 1.0)
        sector = tl.where(sector == 6.0, 0.0, sector)
        ends, second = (sector == 0.0) | (sector == 5.0), (sector == 1.0) | (sector == 2.0)
        r = tl.where(ends, most, tl.where(sector == 1.0, q, tl.where(sector == 4.0, t, p)))
        g = tl.where(second, most, tl.where(sector == 0.0, t, tl.where(sector == 3.0, q, p)))
        b = tl.where(sector == 5.0, q, tl.where(sector == 2.0, t, p))
        b = tl.where((sector == 3.0) | (sector == 4.0), most, b)
        if UINT8:
            r, g, b = tl.floor(r * 255.999), tl.floor(g * 255.999), tl.floor(b * 255.999)
        return r, g, b

    @triton.jit
    def _erase(code, op_ptr, r, g, b, y, x, UINT8: tl.constexpr):  # type: ignore[no-untyped-def]
        top, left = _arg(op_ptr, 0).to(tl.int32), _arg(op_ptr, 1).to(tl.int32)
        height, width = _arg(op_ptr, 2).to(tl.int32), _arg(op_ptr, 3).to(tl.int32)
        inside = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)
        if code == ERASE:
            r = tl.where(inside, _arg(op_ptr, 4), r)
            g = tl.where(inside, _arg(op_ptr, 5), g)
            b = tl.where(inside, _arg(op_ptr, 6), b)
        elif code == ERASE_NOISE:
            seed = _arg(op_ptr, 4).to(tl.int32)
            offset = (y - top) * width + x - left
            r = tl.where(inside, _noise(seed, offset, UINT8), r)
            g = tl.where(inside, _noise(seed, offset + height * width, UINT8), g)
            b = tl.where(inside, _noise(seed, offset + 2 * height * width, UINT8), b)
        return r, g, b

    @triton.jit
    def _noise(seed, offset, UINT8: tl.constexpr):  # type: ignore[no-untyped-def]
        value = tl.randn(seed, offset)
        if UINT8:  # torch's cast: towards zero, then around
            value = (value.to(tl.int32) & 255).to(tl.float32)
        return value

    # --- Ops that read other pixels ---

    @triton.jit
    def _blur(  # type: ignore[no-untyped-def]
        ptr, stride_c, stride, across, along, size, exponent, taps, mask, CHANNELS: tl.constexpr
    ):
        """A Gaussian along one axis, whose ends are mirrored."""
        r = tl.zeros(mask.shape, tl.float32)
        g, b = r, r
        norm = 0.0
        half = (taps * 0.5).to(tl.int32)
        d = -half
        while d <= half:
            weight = tl.exp(-(d * d).to(tl.float32) * exponent)
            at = tl.abs(along + d)
            at = size - 1 - tl.abs(size - 1 - at)
            red, green, blue = _load(ptr + at * stride + across, stride_c, mask, CHANNELS)
            r += weight * red
            g += weight * green
            b += weight * blue
            norm += weight
            d += 1
        return r / norm, g / norm, b / norm

    @triton.jit
    def _sharpen(  # type: ignore[no-untyped-def]
        ptr,
        stride_c,
        stride_x,
        op_ptr,
        y,
        x,
        height,
        width,
        mask,
        UINT8: tl.constexpr,
        CHANNELS: tl.constexpr,
    ):
        r, g, b = _load(ptr + (y * width + x) * stride_x, stride_c, mask, CHANNELS)
        inside = (y > 0) & (y < height - 1) & (x > 0) & (x < width - 1)
        red, green, blue = r * (4.0 / 13), g * (4.0 / 13), b * (4.0 / 13)
        for i in tl.static_range(9):
            at = (y + i // 3 - 1) * width + x + i % 3 - 1
            r1, g1, b1 = _load(ptr + at * stride_x, stride_c, mask & inside, CHANNELS)
            red += r1 * (1.0 / 13)
            green += g1 * (1.0 / 13)
            blue += b1 * (1.0 / 13)
        if UINT8:
            red, green, blue = _round(red), _round(green), _round(blue)
        share = tl.where(inside, 1.0 - _arg(op_ptr, 0), 0.0)
        r = _level(r + (red - r) * share, UINT8)
        g = _level(g + (green - g) * share, UINT8)
        b = _level(b + (blue - b) * share, UINT8)
        return r, g, b

    @triton.jit
    def _gather(  # type: ignore[no-untyped-def]
        ptr,
        stride_c,
        stride_x,
        op_ptr,
        code,
        fields_ptr,
        y,
        x,
        height,
        width,
        mask,
        UINT8: tl.constexpr,
        CHANNELS: tl.constexpr,
    ):
        # In [-1, 1] as torch's grid_sample has it, and rounded as torchvision rounds on the way.
        if (code == ELASTIC_NEAREST) | (code == ELASTIC_BILINEAR):
            field = _arg(op_ptr, 0).to(tl.int64) * height * width + y * width + x
            grid_x = (2 * x + 1 - width).to(tl.float32) / width
            grid_y = (2 * y + 1 - height).to(tl.float32) / height
            grid_x += tl.load(fields_ptr + 2 * field, mask, 0.0)
            grid_y += tl.load(fields_ptr + 2 * field + 1, mask, 0.0)
        else:
            base_x, base_y = x + 0.5, y + 0.5
            if code <= AFFINE_BILINEAR:
                base_x -= 0.5 * width
                base_y -= 0.5 * height
            scale = base_x * _arg(op_ptr, 6) + base_y * _arg(op_ptr, 7) + 1.0
            grid_x = base_x * _arg(op_ptr, 0) + base_y * _arg(op_ptr, 1) + _arg(op_ptr, 2)
            grid_y = base_x * _arg(op_ptr, 3) + base_y * _arg(op_ptr, 4) + _arg(op_ptr, 5)
            if code > AFFINE_BILINEAR:
                grid_x = tl.div_rn(grid_x, scale) - 1.0
                grid_y = tl.div_rn(grid_y, scale) - 1.0
        source_x = ((grid_x + 1.0) * width - 1.0) * 0.5
        source_y = ((grid_y + 1.0) * height - 1.0) * 0.5
        border = code >= MATRIX_BILINEAR
        if code == MATRIX_BICUBIC:
            r, g, b, share = _sample(
                ptr,
                stride_c,
                stride_x,
                source_y,
                source_x,
                height,
                width,
                mask,
                border,
                4,
                CHANNELS,
            )
        elif border | (code % 2 == 0):
            r, g, b, share = _sample(
                ptr,
                stride_c,
                stride_x,
                source_y,
                source_x,
                height,
                width,
                mask,
                border,
                2,
                CHANNELS,
            )
        else:
            r, g, b, share = _sample(
                ptr,
                stride_c,
                stride_x,
                source_y,
                source_x,
                height,
                width,
                mask,
                border,
                1,
                CHANNELS,
            )
        if border:
            inside = (grid_x >= -1.0) & (grid_x < 1.0) & (grid_y >= -1.0) & (grid_y < 1.0)
            share = tl.where(inside, 1.0, 0.0)
            white = 255.0 if UINT8 else 1.0
            r, g, b = _clamp(r, 0.0, white), _clamp(g, 0.0, white), _clamp(b, 0.0, white)
        red, green, blue = _arg(op_ptr, 8), _arg(op_ptr, 9), _arg(op_ptr, 10)
        if red == red:  # not NaN: there is a fill
            r = (r - red) * share + red
            g = (g - green) * share + green
            b = (b - blue) * share + blue
        if UINT8:
            r, g, b = _round(r), _round(g), _round(b)
        return r, g, b

    @triton.jit
    def _sample(  # type: ignore[no-untyped-def]
        ptr,
        stride_c,
        stride_x,
        source_y,
        source_x,
        height,
        width,
        mask,
        border,  # whether it repeats; else there is nothing beyond it
        TAPS: tl.constexpr,
        CHANNELS: tl.constexpr,
    ):
        """Colors, and the share of them that is from inside."""
        if TAPS == 1:
            top, left = _round(source_y), _round(source_x)
        else:
            top = tl.floor(source_y) - (TAPS // 2 - 1)
            left = tl.floor(source_x) - (TAPS // 2 - 1)
        r = tl.zeros_like(source_x)
        g, b, share = r, r, r
        for i in tl.static_range(TAPS):
            for j in tl.static_range(TAPS):
                row, column = top + i, left + j
                weight = _weight(row - source_y, TAPS) * _weight(column - source_x, TAPS)
                near_row = _clamp(row, 0.0, height - 1.0)
                near_column = _clamp(column, 0.0, width - 1.0)
                inside = (row == near_row) & (column == near_column)
                at = near_row.to(tl.int32) * width + near_column.to(tl.int32)
                red, green, blue = _load(
                    ptr + at * stride_x, stride_c, mask & (inside | border), CHANNELS
                )
                r += weight * red
                g += weight * green
                b += weight * blue
                share += tl.where(inside, weight, 0.0)
        return r, g, b, share

    @triton.jit
    def _weight(distance, TAPS: tl.constexpr):  # type: ignore[no-untyped-def]
        distance = tl.abs(distance)
        if TAPS == 4:  # a = -0.75, as torch has it
            near = (1.25 * distance - 2.25) * distance * distance + 1.0
            far = ((-0.75 * distance + 3.75) * distance - 6.0) * distance + 3.0
            return tl.where(distance <= 1.0, near, far)
        if TAPS == 2:
            return tl.maximum(1.0 - distance, 0.0)
        return tl.full(distance.shape, 1.0, tl.float32)
