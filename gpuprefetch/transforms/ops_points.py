"""What Triton kernels do to each pixel by itself, as jitted functions of three colors.

Colors are float32: 0 to 255 and whole for ``uint8`` images, else as they are.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gpuprefetch.transforms.kernel import tl, triton

# Words of an op: its code, then arguments in float32.
FIELDS = 12
# Floats of the statistics of a channel: the table of EQUALIZE, or up to two numbers.
BINS = 256

if triton is not None:
    IDENTITY, BRIGHTNESS, CONTRAST, SATURATION, HUE = map(tl.constexpr, range(5))
    POSTERIZE, SOLARIZE, SOLARIZE_ADD, GRAYSCALE, INVERT = map(tl.constexpr, range(5, 10))
    AUTOCONTRAST, EQUALIZE, PERMUTE, ERASE, ERASE_NOISE = map(tl.constexpr, range(10, 15))
    HFLIP, VFLIP, AFFINE_NEAREST, AFFINE_BILINEAR = map(tl.constexpr, range(15, 19))
    PERSPECTIVE_NEAREST, PERSPECTIVE_BILINEAR = map(tl.constexpr, range(19, 21))
    MATRIX_BILINEAR, MATRIX_BICUBIC, SHARPNESS, BLUR = map(tl.constexpr, range(21, 25))
    _BINS = tl.constexpr(BINS)

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
            r, g = _posterize(r, a0, UINT8), _posterize(g, a0, UINT8)
            b = _posterize(b, a0, UINT8)
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
            red, green = _pick(r, g, b, a0), _pick(r, g, b, a1)
            b = _pick(r, g, b, a2)
            r, g = red, green
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
            at, size = (y - top) * width + x - left, height * width
            seed = red.to(tl.int32)
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
