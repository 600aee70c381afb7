"""Casts to FP8 as Triton kernels. Imports triton, which few installations have; launch.py alone imports this file.

Magnitudes are compared as integers of their bits: the order is the same, and a NaN is above infinity, so no maximum
drops it. Quotients are IEEE divisions, as a processor's. `rows` and `columns` are those of the matrix in memory, which
lies row by row; `turned` outputs are those of its transpose.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
HALF_MAGNITUDE = tl.constexpr(0x7FFF)
ONE = tl.constexpr(0x3F800000)
LARGEST_FACTOR = tl.constexpr(2.0**126)
LARGEST_EXPONENT = tl.constexpr(126)
BIAS = tl.constexpr(127)
TWICE_ONE = tl.constexpr(2 * 0x3F800000)
MANTISSA_BITS = tl.constexpr(23)
SMALLEST_POWER = tl.constexpr(1 << 22)
LARGEST_POWER = tl.constexpr(254 << 23)
NAN_SCALE = tl.constexpr(255)


@triton.jit
def magnitude(values):
    """The bits of magnitudes, in the width that values have."""
    if values.dtype == tl.float32:
        return values.to(tl.int32, bitcast=True) & MAGNITUDE
    else:
        return values.to(tl.int16, bitcast=True) & HALF_MAGNITUDE


@triton.jit
def widen(bits, dtype: tl.constexpr):
    """The bits of magnitudes as float32."""
    if dtype == tl.float32:
        return bits
    else:  # a maximum of int16 is int32
        return bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def divide(dividend, divisor):
    return tl.div_rn(tl.zeros_like(divisor) + dividend, divisor)


@triton.jit
def factor_of(bits, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The factor of elements, from the bits of their largest magnitude: see blocks.float_factor."""
    usable = (bits > 0) & (bits < INFINITY)
    amax = tl.where(usable, bits, ONE)
    if POWER_OF_TWO:
        # The exponent of the quotient, rounded down: a division would need registers for each scale of a thread.
        largest = tl.full((), LARGEST, tl.float32).to(tl.int32, bitcast=True)
        exponent = tl.minimum((-amax + largest) >> MANTISSA_BITS, LARGEST_EXPONENT)
        factor = ((exponent + BIAS) << MANTISSA_BITS).to(tl.float32, bitcast=True)
    else:
        factor = tl.minimum(divide(LARGEST, amax.to(tl.float32, bitcast=True)), LARGEST_FACTOR)
    return tl.where(usable, factor, 1.0)


@triton.jit
def inverse_of(factor, POWER_OF_TWO: tl.constexpr):
    if POWER_OF_TWO:
        return (-factor.to(tl.int32, bitcast=True) + TWICE_ONE).to(tl.float32, bitcast=True)
    return divide(1.0, factor)


@triton.jit
def power_of_two(exponent):
    """The number with those exponent bits; zero gives 2^-127, a subnormal."""
    return tl.maximum(exponent, SMALLEST_POWER).to(tl.float32, bitcast=True)


@triton.jit
def encode(values, factor, LARGEST: tl.constexpr, dtype: tl.constexpr):
    scaled = values.to(tl.float32) * factor
    return tl.clamp(scaled, -LARGEST, LARGEST, tl.PropagateNan.ALL).to(dtype)


@triton.jit
def arrive(state, bits):
    """Enters a program's largest magnitude. Returns whether all programs have, and the largest, 0 before.

    `state` holds the largest and a count, both 0 before the first program; the last one leaves zeros for the next
    launch. The count orders memory: what a program has read or written before it happened before what the last does.
    """
    tl.atomic_max(state, bits, sem="relaxed")
    last = tl.atomic_add(state + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1
    largest = bits * 0
    if last:
        largest = tl.atomic_xchg(state, 0, sem="relaxed")
        tl.atomic_xchg(state + 1, 0, sem="relaxed")
    return last, largest


@triton.jit(do_not_specialize_on_alignment=["scale", "inverse", "state"])
def find_scale(x, scale, inverse, state, size, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr):
    """The scale of a tensor from its largest magnitude, and the inverse, written by the program that ends last."""
    offsets = tl.arange(0, BLOCK)
    largest = magnitude(tl.zeros((BLOCK,), x.dtype.element_ty))
    for start in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        values = tl.load(x + start + offsets, mask=start + offsets < size, other=0.0)
        largest = tl.maximum(largest, magnitude(values))
    last, bits = arrive(state, widen(tl.max(largest, axis=0), x.dtype.element_ty))
    # The last program has everyone's maximum: it alone writes the scale.
    if last:
        factor = factor_of(bits, LARGEST, POWER_OF_TWO)
        tl.store(scale, factor)
        tl.store(inverse, inverse_of(factor, POWER_OF_TWO))


@triton.jit
def renew_scale(
    amax_bits,
    scale,
    history,
    casts,
    used,
    inverse,
    LARGEST: tl.constexpr,
    HISTORY: tl.constexpr,
    MOST_RECENT: tl.constexpr,
    SHRINK: tl.constexpr,
    INTERVAL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A step of delayed scaling, by one program: see code_kernels.DelayedScaleKernel."""
    current = tl.load(scale)
    tl.store(used, current)
    tl.store(inverse, divide(1.0, current))
    # An amax that is not finite leaves the history and the scale alone.
    finite = amax_bits < INFINITY
    entry = tl.where(finite, amax_bits, 0).to(tl.float32, bitcast=True)
    count = tl.load(casts)
    place = count % HISTORY
    largest = entry
    if not MOST_RECENT:
        for start in range(0, HISTORY, CHUNK):
            offsets = start + tl.arange(0, CHUNK)
            entries = tl.load(history + offsets, mask=offsets < HISTORY, other=0.0)
            largest = tl.maximum(largest, tl.max(tl.where(offsets == place, 0.0, entries), axis=0))
    tl.store(history + place, entry)
    tl.store(casts, count + 1)
    next_scale = factor_of(largest.to(tl.int32, bitcast=True), LARGEST, False) * SHRINK
    due = finite & (largest > 0) & ((count + 1) % INTERVAL == 0)
    tl.store(scale, tl.where(due, next_scale, current))


@triton.jit(do_not_specialize_on_alignment=["scale", "state", "history", "casts", "used", "inverse"])
def cast(
    x,
    codes,
    turned,
    scale,
    state,
    history,
    casts,
    used,
    inverse,
    rows,
    columns,
    LARGEST: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TURNED: tl.constexpr,
    SCALED: tl.constexpr,
    DELAYED: tl.constexpr,
    HISTORY: tl.constexpr,
    MOST_RECENT: tl.constexpr,
    SHRINK: tl.constexpr,
    INTERVAL: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """Codes under one scale, or none, in either orientation or both; each element is read once.

    Without LARGEST, x has bytes that are moved only. With DELAYED the largest magnitude is found in the same pass, and
    the last program to end renews the scale.
    """
    factor = 1.0
    if SCALED:
        factor = tl.load(scale)
    across = tl.cdiv(columns, ACROSS)
    # Loops have one type for each variable, so the running maximum starts as zeros of a tile.
    if DELAYED:
        largest = magnitude(tl.zeros((DOWN, ACROSS), x.dtype.element_ty))
    # Programs share the tiles: there may be more tiles than programs.
    for tile in range(tl.program_id(0), tl.cdiv(rows, DOWN) * across, tl.num_programs(0)):
        row = (tile // across) * DOWN + tl.arange(0, DOWN)[:, None]
        column = (tile % across) * ACROSS + tl.arange(0, ACROSS)[None, :]
        inside = (row < rows) & (column < columns)
        values = tl.load(x + row * columns + column, mask=inside, other=0)
        if LARGEST is None:
            coded = values
        else:
            coded = encode(values, factor, LARGEST, (codes if STRAIGHT else turned).dtype.element_ty)
        if DELAYED:
            largest = tl.maximum(largest, magnitude(values))
        if STRAIGHT:
            tl.store(codes + row * columns + column, coded, mask=inside)
        if TURNED:
            tl.store(turned + column * rows + row, coded, mask=inside)
    # Only the last program has seen all magnitudes.
    if DELAYED:
        last, bits = arrive(state, widen(tl.max(tl.max(largest, axis=1), axis=0), x.dtype.element_ty))
        if last:
            renew_scale(
                bits, scale, history, casts, used, inverse,
                LARGEST, HISTORY, MOST_RECENT, SHRINK, INTERVAL, 1024,
            )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["inverse", "peaks"])
def cast_rows(
    x,
    codes,
    inverse,
    peaks,
    rows,
    columns,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    STRAIGHT: tl.constexpr,
    PEAKS: tl.constexpr,
    LINES: tl.constexpr,
    DOWN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Codes with a scale a row (STRAIGHT), and the largest magnitude of each column (PEAKS), in one pass.

    A program takes LINES rows, DOWN at a time, each whole: WIDTH is at least `columns`.
    """
    column = tl.arange(0, WIDTH)[None, :]
    largest = magnitude(tl.zeros((WIDTH,), x.dtype.element_ty))
    # A program takes several rows so that the atomic maximum of columns is needed once for all of them.
    for step in range(0, LINES, DOWN):
        row = tl.program_id(0) * LINES + step + tl.arange(0, DOWN)
        inside = (row < rows)[:, None] & (column < columns)
        place = row[:, None] * columns + column
        values = tl.load(x + place, mask=inside, other=0.0)
        bits = magnitude(values)
        if PEAKS:
            largest = tl.maximum(largest, tl.max(bits, axis=0).to(bits.dtype))
        if STRAIGHT:
            factor = factor_of(widen(tl.max(bits, axis=1), x.dtype.element_ty), LARGEST, POWER_OF_TWO)
            tl.store(inverse + row, inverse_of(factor, POWER_OF_TWO), mask=row < rows)
            tl.store(codes + place, encode(values, factor[:, None], LARGEST, codes.dtype.element_ty), mask=inside)
    if PEAKS:
        columns_of_peaks = tl.arange(0, WIDTH)
        tl.atomic_max(
            peaks + columns_of_peaks, widen(largest, x.dtype.element_ty), mask=columns_of_peaks < columns, sem="relaxed"
        )


@triton.jit(do_not_specialize_on_alignment=["inverse"])
def cast_long_rows(
    x,
    codes,
    inverse,
    rows,
    columns,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Codes with a scale a row, for rows too long for registers: each program reads its row twice, from L2 the second
    time."""
    place = tl.program_id(0) * columns
    offsets = tl.arange(0, WIDTH)
    largest = magnitude(tl.zeros((WIDTH,), x.dtype.element_ty))
    # First pass: the largest magnitude. The row stays in L2 for the second.
    for start in range(0, columns, WIDTH):
        inside = start + offsets < columns
        values = tl.load(x + place + start + offsets, mask=inside, other=0.0, eviction_policy="evict_last")
        largest = tl.maximum(largest, magnitude(values))
    factor = factor_of(widen(tl.max(largest, axis=0), x.dtype.element_ty), LARGEST, POWER_OF_TWO)
    tl.store(inverse + tl.program_id(0), inverse_of(factor, POWER_OF_TWO))
    # Second pass: codes. Nobody reads the row again, so it may leave the cache.
    for start in range(0, columns, WIDTH):
        inside = start + offsets < columns
        values = tl.load(x + place + start + offsets, mask=inside, other=0.0, eviction_policy="evict_first")
        coded = encode(values, factor, LARGEST, codes.dtype.element_ty)
        tl.store(codes + place + start + offsets, coded, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["peaks"])
def find_peaks(x, peaks, rows, columns, LINES: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """The largest magnitude of each column, by programs that take LINES rows of ACROSS columns."""
    across = tl.cdiv(columns, ACROSS)
    column = (tl.program_id(0) % across) * ACROSS + tl.arange(0, ACROSS)
    largest = magnitude(tl.zeros((DOWN, ACROSS), x.dtype.element_ty))
    # Several tiles down before the atomic maximum, which would otherwise be the bottleneck.
    for step in range(0, LINES, DOWN):
        row = (tl.program_id(0) // across) * LINES + step + tl.arange(0, DOWN)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        values = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
        largest = tl.maximum(largest, magnitude(values))
    tl.atomic_max(
        peaks + column, widen(tl.max(largest, axis=0), x.dtype.element_ty), mask=column < columns, sem="relaxed"
    )


@triton.jit(do_not_specialize_on_alignment=["inverse", "peaks"])
def cast_columns(
    x,
    turned,
    inverse,
    peaks,
    rows,
    columns,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """Codes of the transpose with a scale for each of its rows, whose largest magnitudes are in `peaks`."""
    across = tl.cdiv(columns, ACROSS)
    line = tl.program_id(0) // across
    row = line * DOWN + tl.arange(0, DOWN)
    column = (tl.program_id(0) % across) * ACROSS + tl.arange(0, ACROSS)
    factor = factor_of(tl.load(peaks + column, mask=column < columns, other=0), LARGEST, POWER_OF_TWO)
    # All lines of tiles compute the same inverse; one writes it.
    if line == 0:
        tl.store(inverse + column, inverse_of(factor, POWER_OF_TWO), mask=column < columns)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    coded = encode(values, factor[None, :], LARGEST, turned.dtype.element_ty)
    tl.store(turned + column[None, :] * rows + row[:, None], coded, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["inverse", "turned_inverse"])
def cast_blocks(
    x,
    codes,
    inverse,
    turned,
    turned_inverse,
    rows,
    columns,
    across,
    stride,
    turned_stride,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SQUARE: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TURNED: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Codes with a scale for SIDE elements of a row, or SIDE x SIDE (SQUARE): a program takes one square, once.

    Scales of parts of rows are stored by columns, with `stride` from one part to the next; scales of squares by rows.
    """
    tile_row, tile_column = tl.program_id(0) // across, tl.program_id(0) % across
    row = tile_row * SIDE + tl.arange(0, SIDE)
    column = tile_column * SIDE + tl.arange(0, SIDE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    values = tl.load(x + place, mask=inside, other=0.0)
    bits = magnitude(values)
    # A square has one scale for both orientations, parts of rows have one for each.
    if SQUARE:
        factor = factor_of(widen(tl.max(tl.max(bits, axis=1), axis=0), x.dtype.element_ty), LARGEST, POWER_OF_TWO)
        tl.store(inverse + tile_row * stride + tile_column, inverse_of(factor, POWER_OF_TWO))
        tl.store(turned_inverse + tile_column * turned_stride + tile_row, inverse_of(factor, POWER_OF_TWO))
        coded = encode(values, factor, LARGEST, (codes if STRAIGHT else turned).dtype.element_ty)
        if STRAIGHT:
            tl.store(codes + place, coded, mask=inside)
        if TURNED:
            tl.store(turned + column[None, :] * rows + row[:, None], coded, mask=inside)
    else:
        if STRAIGHT:
            factor = factor_of(widen(tl.max(bits, axis=1), x.dtype.element_ty), LARGEST, POWER_OF_TWO)
            tl.store(inverse + tile_column * stride + row, inverse_of(factor, POWER_OF_TWO), mask=row < rows)
            tl.store(codes + place, encode(values, factor[:, None], LARGEST, codes.dtype.element_ty), mask=inside)
        if TURNED:
            factor = factor_of(widen(tl.max(bits, axis=0), x.dtype.element_ty), LARGEST, POWER_OF_TWO)
            tl.store(
                turned_inverse + tile_row * turned_stride + column,
                inverse_of(factor, POWER_OF_TWO),
                mask=column < columns,
            )
            coded = encode(values, factor[None, :], LARGEST, turned.dtype.element_ty)
            tl.store(turned + column[None, :] * rows + row[:, None], coded, mask=inside)


@triton.jit
def mx_exponent(bits, CARRY: tl.constexpr, EXPONENT: tl.constexpr):
    """The exponent bits of a block's scale, from those of its largest magnitude: see blocks.mx_scale."""
    raised = (tl.minimum(bits, INFINITY) + CARRY) & INFINITY
    return tl.maximum(raised - EXPONENT, 0)


@triton.jit
def encode_mx(values, bits, exponent, LARGEST: tl.constexpr, E5M2: tl.constexpr):
    """Bytes of codes. A block with a NaN has it in its scale: its elements are zeros."""
    finite = tl.where(bits > INFINITY, 0.0, values.to(tl.float32))
    # The constant comes last: triton 3.7's interpreter subtracts no tensor from one.
    inverse = power_of_two(-exponent + LARGEST_POWER)
    if E5M2:
        coded = encode(finite, inverse, LARGEST, tl.float8e5)
    else:
        coded = encode(finite, inverse, LARGEST, tl.float8e4nv)
    return coded.to(tl.uint8, bitcast=True)


@triton.jit
def mx_byte(bits, exponent):
    return tl.where(bits > INFINITY, NAN_SCALE, exponent >> MANTISSA_BITS).to(tl.uint8)


@triton.jit
def tile_place(row, block, across, TILED: tl.constexpr):
    """Where the scale of a row's block lies: in tiles of 128 x 4 (scale_layouts.py), or row by row."""
    if TILED:
        tile = (row // 128) * (across // 4) + block // 4
        return tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4
    return row * across + block


@triton.jit(do_not_specialize_on_alignment=["scales", "turned_scales"])
def cast_mx(
    x,
    codes,
    scales,
    turned,
    turned_scales,
    rows,
    columns,
    LARGEST: tl.constexpr,
    E5M2: tl.constexpr,
    CARRY: tl.constexpr,
    EXPONENT: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TURNED: tl.constexpr,
    TILED: tl.constexpr,
    TURNED_TILED: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """Codes with a power of two for 32 elements of a row, in either orientation or both; a program takes one tile."""
    tiles = tl.cdiv(columns, ACROSS)
    tile_row, tile_column = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = tile_row * DOWN + tl.arange(0, DOWN)
    column = tile_column * ACROSS + tl.arange(0, ACROSS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    values = tl.load(x + place, mask=inside, other=0.0)
    # Blocks run along the rows here, and down the columns below; both read the tile from registers.
    if STRAIGHT:
        parts = tl.reshape(values, (DOWN, ACROSS // 32, 32))
        bits = widen(tl.max(magnitude(parts), axis=2), x.dtype.element_ty)
        exponent = mx_exponent(bits, CARRY, EXPONENT)
        coded = encode_mx(parts, bits[:, :, None], exponent[:, :, None], LARGEST, E5M2)
        tl.store(codes + place, tl.reshape(coded, (DOWN, ACROSS)), mask=inside)
        block = tile_column * (ACROSS // 32) + tl.arange(0, ACROSS // 32)
        filled = (row < rows)[:, None] & (block < columns // 32)[None, :]
        where = tile_place(row[:, None], block[None, :], columns // 32, TILED)
        tl.store(scales + where, mx_byte(bits, exponent), mask=filled)
    if TURNED:
        parts = tl.reshape(values, (DOWN // 32, 32, ACROSS))
        bits = widen(tl.max(magnitude(parts), axis=1), x.dtype.element_ty)
        exponent = mx_exponent(bits, CARRY, EXPONENT)
        coded = encode_mx(parts, bits[:, None, :], exponent[:, None, :], LARGEST, E5M2)
        tl.store(turned + column[None, :] * rows + row[:, None], tl.reshape(coded, (DOWN, ACROSS)), mask=inside)
        block = tile_row * (DOWN // 32) + tl.arange(0, DOWN // 32)
        filled = (block < rows // 32)[:, None] & (column < columns)[None, :]
        where = tile_place(column[None, :], block[:, None], rows // 32, TURNED_TILED)
        tl.store(turned_scales + where, mx_byte(bits, exponent), mask=filled)
