"""The Triton kernels: one launch makes a batch of images, and one colors the corners of canaries.

What they read of each image is laid out in launch_table.py, and reference.py has the eager twin.
"""

# mypy: implicit-reexport, disable-error-code="no-untyped-def, untyped-decorator, assignment"

import os

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = tl = None

from gpuprefetch.transforms.launch_table import (
    COLOR_WORDS,
    IMAGE_WORDS,
    OWN_IMAGE_WORDS,
    offset,
)

HAS_TRITON = triton is not None
# Kernels run on the CPU in Triton's interpreter alone.
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

if triton is not None:
    # Words of the launch table.
    _COLOR_WORDS = tl.constexpr(COLOR_WORDS)
    _IMAGE_WORDS = tl.constexpr(IMAGE_WORDS)
    _MORE_WORDS = tl.constexpr(OWN_IMAGE_WORDS - IMAGE_WORDS)
    _ADDRESS = tl.constexpr(offset("address"))
    _STRIDE_C = tl.constexpr(offset("strides"))
    _STRIDE_Y = tl.constexpr(offset("strides") + 1)
    _STRIDE_X = tl.constexpr(offset("strides") + 2)
    _ROW = tl.constexpr(offset("row"))
    _TAPS_X = tl.constexpr(offset("taps_x"))
    _FILTER_Y = tl.constexpr(offset("filter_y"))
    _FILTER_X = tl.constexpr(offset("filter_x"))
    _EDGES_Y = tl.constexpr(offset("edges_y"))
    _EDGES_X = tl.constexpr(offset("edges_x"))
    _OUT_OFFSET = tl.constexpr(offset("out_offset"))
    _OUT_STRIDES = tl.constexpr(offset("out_strides"))
    _OUT_SIZE = tl.constexpr(offset("out_size"))
    _TILES_BEFORE = tl.constexpr(offset("tiles_before"))

    @triton.jit(do_not_specialize=["from_image", "images"])
    def resample_kernel(
        address, table, from_image, out_ptr, stride_n, stride_c, stride_y, stride_x,
        height, width, survived, images,
        OWN_SIZES: tl.constexpr,  # 1: each image has the size and the place that the table says
        STRIDE_X: tl.constexpr,
        CANARY: tl.constexpr,  # 0: there are none
        CHANNELS: tl.constexpr, SOURCE: tl.constexpr, BICUBIC: tl.constexpr,
        TIE: tl.constexpr,  # 0: no pixel is taken alone
        CLAMP: tl.constexpr, PADDED: tl.constexpr, ROUND: tl.constexpr,
        FILL: tl.constexpr,  # of three channels, in the units of the source
        ROWS: tl.constexpr, COLS: tl.constexpr, STRIPS: tl.constexpr,
    ):  # fmt: skip
        ints_ptr = table.to(tl.pointer_type(tl.int64))
        floats_ptr = table.to(tl.pointer_type(tl.float64))
        # Three channels share their weights. Where the channels do not divide by three, the last
        # group repeats one, and writes the same values twice.
        GROUPS: tl.constexpr = (CHANNELS + 2) // 3
        WORDS: tl.constexpr = _IMAGE_WORDS + OWN_SIZES * _MORE_WORDS
        if CANARY > 0:
            # In separate programs: within the others it would cost registers of each of them.
            beyond = tl.program_id(2) - (GROUPS if OWN_SIZES else images * GROUPS)
            if beyond >= 0:
                image = beyond * tl.num_programs(1) + tl.program_id(1)
                image = image * tl.num_programs(0) + tl.program_id(0)
                if image < images:
                    ints_ptr += _COLOR_WORDS * CHANNELS + (from_image + image) * WORDS
                    _find_canary(address, ints_ptr, survived, CANARY)
                return
        c0 = tl.program_id(2) % GROUPS * 3
        channels = c0, tl.minimum(c0 + 1, CHANNELS - 1), tl.minimum(c0 + 2, CHANNELS - 1)
        scales = [tl.load(floats_ptr + c).to(tl.float32) for c in channels]
        shifts = [tl.load(floats_ptr + CHANNELS + c).to(tl.float32) for c in channels]

        if OWN_SIZES:
            first_ptr = ints_ptr + _COLOR_WORDS * CHANNELS + from_image * WORDS + _TILES_BEFORE
            image = from_image + _image_of(first_ptr, tl.program_id(0), images, WORDS)
        else:
            image = from_image + tl.program_id(2) // GROUPS
        word = _COLOR_WORDS * CHANNELS + image * WORDS
        ints_ptr += word
        floats_ptr += word
        source_ptr = (address + tl.load(ints_ptr + _ADDRESS)).to(tl.pointer_type(SOURCE))
        source_stride_c = tl.load(ints_ptr + _STRIDE_C)
        source_stride_y = tl.load(ints_ptr + _STRIDE_Y)
        source_stride_x = tl.load(ints_ptr + _STRIDE_X)
        if STRIDE_X > 0:
            source_stride_x = STRIDE_X
        if OWN_SIZES:
            out_ptr += tl.load(ints_ptr + _OUT_OFFSET)
            stride_c = tl.load(ints_ptr + _OUT_STRIDES)
            stride_y = tl.load(ints_ptr + _OUT_STRIDES + 1)
            stride_x = tl.load(ints_ptr + _OUT_STRIDES + 2)
            height = tl.load(ints_ptr + _OUT_SIZE).to(tl.int32)
            width = tl.load(ints_ptr + _OUT_SIZE + 1).to(tl.int32)
            tile = tl.program_id(0) - tl.load(ints_ptr + _TILES_BEFORE).to(tl.int32)
            across = (width + COLS - 1) // COLS
            tile_x = tile % across
            tile_y = tile // across
        else:
            out_ptr += tl.load(ints_ptr + _ROW) * stride_n
        taps_x = tl.load(ints_ptr + _TAPS_X).to(tl.int32)

        # Coordinates stay float64 until they are relative to a tap: float32 alone would be off by
        # 5e-4 pixels in a photo of 8192. The taps of a column are moved as one window into the box,
        # where all that have weight are: no load needs a mask, and no tap a check.
        origin, step, radius, squeeze = _load4(floats_ptr + _FILTER_X, tl.float64)
        lo, hi, first, last = _load4(ints_ptr + _EDGES_X, tl.int32)
        left = (tile_x if OWN_SIZES else tl.program_id(0)) * COLS
        cols = left + tl.arange(0, COLS)[None, :]
        center = origin + step * clamp(cols, first, last - 1)
        if TIE > 0:
            center = clamp(tl.floor(center + TIE), lo, hi - 1)
        tap = clamp(tl.floor(center - radius).to(tl.int32) + 1, lo, hi - taps_x)
        tap_x = ((tap - center) * squeeze).to(tl.float32)
        squeeze_x = squeeze.to(tl.float32)
        weight_x = tl.zeros_like(tap_x)
        t = 0
        while t < taps_x:  # the interpreter of Triton 3.6 knows no range() over a tensor
            weight_x += _weight(tap_x + t * squeeze_x, BICUBIC)
            t += 1
        inside_x = (cols >= first) & (cols < last)
        # 64-bit, once a column: an image may be of any size.
        source_ptr += tap.to(tl.int64) * source_stride_x

        origin, step, radius, squeeze = _load4(floats_ptr + _FILTER_Y, tl.float64)
        lo, hi, first, last = _load4(ints_ptr + _EDGES_Y, tl.int32)
        flat = tl.arange(0, ROWS * COLS)
        start = (tile_y if OWN_SIZES else tl.program_id(1)) * ROWS * STRIPS
        bottom = tl.minimum(start + ROWS * STRIPS, height)
        while start < bottom:
            rows = start + tl.arange(0, ROWS)[:, None]
            # The source rows under the strip, from its ends.
            near = clamp(start, first, last - 1)
            far = clamp(start + ROWS - 1, first, last - 1)
            low = origin + step * tl.where(step > 0, near, far) - radius
            high = origin + step * tl.where(step > 0, far, near) + radius
            begin = tl.maximum(tl.floor(low).to(tl.int32) + 1, lo)
            end = tl.minimum(tl.ceil(high).to(tl.int32), hi)
            tap_y = ((begin - (origin + step * near)) * squeeze).to(tl.float32)
            tap_y -= (clamp(rows, first, last - 1) - near) * (step * squeeze).to(tl.float32)
            if TIE > 0:
                center_y = origin + step * clamp(rows, first, last - 1)
                center_y = clamp(tl.floor(center_y + TIE), lo, hi - 1)
                begin = tl.min(center_y).to(tl.int32)
                end = tl.max(center_y).to(tl.int32) + 1
                tap_y = (begin - center_y).to(tl.float32)

            zero = tl.zeros([ROWS, COLS], tl.float32)
            colors = (zero, zero, zero)
            weight_y = zero
            row_ptr = source_ptr + begin.to(tl.int64) * source_stride_y
            # With the number of taps known, their weights along x stay in registers.
            for TAPS in tl.static_range(5):
                if taps_x == TAPS or (TAPS == 0 and taps_x > 4):
                    colors, weight_y = _sum_rows(
                        [row_ptr + c * source_stride_c for c in channels],
                        (source_stride_y, source_stride_x),
                        (end - begin, tap_y, squeeze.to(tl.float32)),
                        (taps_x, tap_x, squeeze_x, 255.0 * weight_x),
                        (colors, weight_y),
                        BICUBIC,
                        CLAMP,
                        TAPS,
                    )

            norm = 1.0 / (weight_y * weight_x)
            inside = (rows >= first) & (rows < last) & inside_x
            colors = [
                _finish_color(
                    colors[i] * norm, inside, scales[i], shifts[i], FILL[i], CLAMP, PADDED, ROUND
                )
                for i in (0, 1, 2)
            ]
            # Stored as a vector: of a tile Triton 3.6 would give the lanes of a warp to rows.
            y = start + flat // COLS
            x = left + flat % COLS
            pixel_ptr = out_ptr + (y * stride_y + x * stride_x)
            mask = (y < height) & (x < width)
            dtype = out_ptr.dtype.element_ty
            for i in tl.static_range(3):
                color = tl.reshape(colors[i], [ROWS * COLS]).to(dtype)
                tl.store(pixel_ptr + channels[i] * stride_c, color, mask)
            start += ROWS

    @triton.jit(do_not_specialize=["from_image"])
    def canary_kernel(address, table, from_image, OWN_SIZES: tl.constexpr, CANARY: tl.constexpr):
        WORDS: tl.constexpr = _IMAGE_WORDS + OWN_SIZES * _MORE_WORDS
        word = _COLOR_WORDS * 3 + (from_image + tl.program_id(0)) * WORDS
        ints_ptr = table.to(tl.pointer_type(tl.int64)) + word
        corners, colors, mask = _corners(address, ints_ptr, CANARY)
        tl.store(corners, colors, mask)

    @triton.jit
    def _image_of(first_ptr, tile, images, WORDS: tl.constexpr):
        """Search for the image of a program: the last one whose own programs begin at or before."""
        low = tile * 0
        beyond = low + images
        while beyond - low > 1:
            middle = (low + beyond) // 2
            begins = tl.load(first_ptr + middle * WORDS) <= tile
            low = tl.where(begins, middle, low)
            beyond = tl.where(begins, beyond, middle)
        return low

    @triton.jit
    def _find_canary(address, ints_ptr, survived, CANARY: tl.constexpr):
        corners, colors, mask = _corners(address, ints_ptr, CANARY)
        other = tl.where(tl.load(corners, mask) == colors, 0, 1)
        differs = tl.min(tl.max(tl.where(mask, other, 0), axis=1), axis=0)
        row = tl.load(ints_ptr + _ROW)
        tl.store((survived + row).to(tl.pointer_type(tl.uint8)), 1, differs == 0)

    @triton.jit
    def _corners(address, ints_ptr, CANARY: tl.constexpr):
        """The first and the last pixel of a box: (2, 4) pointers, colors, and a mask."""
        last = tl.arange(0, 2)[:, None]
        channel = tl.arange(0, 4)[None, :]
        y = tl.load(ints_ptr + _EDGES_Y + last) - last  # low, high - 1
        x = tl.load(ints_ptr + _EDGES_X + last) - last
        offset = y * tl.load(ints_ptr + _STRIDE_Y) + x * tl.load(ints_ptr + _STRIDE_X)
        offset += channel * tl.load(ints_ptr + _STRIDE_C) + tl.load(ints_ptr + _ADDRESS)
        colors = ((CANARY >> (8 * channel)) & 255).to(tl.uint8)
        corners = (address + offset).to(tl.pointer_type(tl.uint8))
        return corners, tl.broadcast_to(colors, [2, 4]), tl.broadcast_to(channel < 3, [2, 4])

    @triton.jit
    def _sum_rows(
        pointers, strides, along_y, along_x, sums,
        BICUBIC: tl.constexpr, CLAMP: tl.constexpr,
        TAPS: tl.constexpr,  # 0: as many as along_x says
    ):  # fmt: skip
        """Add the filtered rows under a strip to its sums."""
        n_rows, tap_y, squeeze_y = along_y
        taps_x, tap_x, squeeze_x, limit_x = along_x
        colors, weight_y = sums
        stride_y, stride_x = strides
        row = 0
        while row < n_rows:
            weight = _weight(tap_y + row * squeeze_y, BICUBIC)
            weight_y += weight
            zero = tl.zeros_like(tap_x)
            line = zero, zero, zero
            if TAPS == 0:
                t = 0
                while t < taps_x:
                    w = _weight(tap_x + t * squeeze_x, BICUBIC)
                    line = _add(line, w, pointers, t * stride_x)
                    t += 1
            else:
                for t in tl.static_range(TAPS):
                    w = _weight(tap_x + t * squeeze_x, BICUBIC)
                    line = _add(line, w, pointers, t * stride_x)
            if CLAMP:
                line = [clamp(color, 0.0, limit_x) for color in line]
            colors = [colors[i] + weight * line[i] for i in (0, 1, 2)]
            pointers = [pointer + stride_y for pointer in pointers]
            row += 1
        return colors, weight_y

    @triton.jit
    def _add(colors, weight, pointers, offset):
        at = [tl.load(pointer + offset).to(tl.float32) for pointer in pointers]
        return [colors[i] + weight * at[i] for i in (0, 1, 2)]

    @triton.jit
    def _finish_color(
        value, inside, scale, shift,
        FILL: tl.constexpr, CLAMP: tl.constexpr, PADDED: tl.constexpr, ROUND: tl.constexpr,
    ):  # fmt: skip
        if CLAMP:
            value = clamp(value, 0.0, 255.0)
        if PADDED:
            value = tl.where(inside, value, FILL)
        value = value * scale + shift
        if ROUND:
            value = tl.floor(clamp(value, 0.0, 255.0) + 0.5)
        return value

    @triton.jit
    def _weight(distance, BICUBIC: tl.constexpr):
        distance = tl.abs(distance)
        if BICUBIC:
            # Factored, so that float32 loses nothing near the zeros.
            near = (1.0 - 1.5 * distance) * distance + 1.0
            far = tl.maximum(2.0 - distance, 0.0)
            return tl.where(distance < 1.0, near, 0.5 * far * far) * (1.0 - distance)
        return tl.maximum(1.0 - distance, 0.0)

    @triton.jit
    def clamp(value, low, high):
        return tl.minimum(tl.maximum(value, low), high)

    @triton.jit
    def _load4(ptr, DTYPE: tl.constexpr):
        return [tl.load(ptr + i).to(DTYPE) for i in (0, 1, 2, 3)]
