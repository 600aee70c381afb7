"""Casts to FP8 as Triton kernels. Imports triton, which few installations have, so only launch.py imports this file.

The bits of magnitudes are compared as integers. Their order is the same as that of the magnitudes, and NaN is above
infinity, so that no maximum drops NaN. Quotients are IEEE divisions, as on a CPU. `rows` and `columns` are those of
the row-major matrix in memory. `turned` outputs belong to its transpose.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY_BITS = tl.constexpr(0x7F800000)
MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
HALF_MAGNITUDE_MASK = tl.constexpr(0x7FFF)
FLOAT_ONE_BITS = tl.constexpr(0x3F800000)
LARGEST_SCALE_FACTOR = tl.constexpr(2.0**126)
LARGEST_EXPONENT = tl.constexpr(126)
EXPONENT_BIAS = tl.constexpr(127)
DOUBLED_BITS_OF_ONE = tl.constexpr(2 * 0x3F800000)
MANTISSA_BITS = tl.constexpr(23)
SMALLEST_POWER_BITS = tl.constexpr(1 << 22)
LARGEST_POWER_BITS = tl.constexpr(254 << 23)
NAN_SCALE_CODE = tl.constexpr(255)


@triton.jit
def magnitude_bits(values):
    """Returns the bits of magnitudes as integers that are as wide as the values."""
    if values.dtype == tl.float32:
        return values.to(tl.int32, bitcast=True) & MAGNITUDE_MASK
    else:
        return values.to(tl.int16, bitcast=True) & HALF_MAGNITUDE_MASK


@triton.jit
def widen_bits(bits, dtype: tl.constexpr):
    """Converts the bits of magnitudes of `dtype` to the bits of the same magnitudes in float32."""
    if dtype == tl.float32:
        return bits
    else:  # Triton's maximum of int16 numbers is int32
        return bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def divide(dividend, divisor):
    return tl.div_rn(tl.zeros_like(divisor) + dividend, divisor)


@triton.jit
def scale_factor(bits, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Returns the factor by which elements are multiplied before their cast. `bits` are the bits of the largest
    magnitude among these elements. The factor is that of `blocks.float_factor`.
    """
    is_usable_amax = (bits > 0) & (bits < INFINITY_BITS)
    amax = tl.where(is_usable_amax, bits, FLOAT_ONE_BITS)
    if POWER_OF_TWO:
        # Compute the exponent of LARGEST / amax, rounded down. A division would need more registers in each thread.
        largest = tl.full((), LARGEST, tl.float32).to(tl.int32, bitcast=True)
        exponent = tl.minimum((-amax + largest) >> MANTISSA_BITS, LARGEST_EXPONENT)
        factor = ((exponent + EXPONENT_BIAS) << MANTISSA_BITS).to(tl.float32, bitcast=True)
    else:
        factor = tl.minimum(divide(LARGEST, amax.to(tl.float32, bitcast=True)), LARGEST_SCALE_FACTOR)
    return tl.where(is_usable_amax, factor, 1.0)


@triton.jit
def scale_inverse(factor, POWER_OF_TWO: tl.constexpr):
    if POWER_OF_TWO:
        # The inverse of a power of two has the opposite exponent.
        return (-factor.to(tl.int32, bitcast=True) + DOUBLED_BITS_OF_ONE).to(tl.float32, bitcast=True)
    return divide(1.0, factor)


@triton.jit
def power_of_two(exponent):
    """Returns the float32 number whose exponent bits are `exponent` and whose mantissa is 0. Exponent bits of 0 give
    2^-127, which is subnormal.
    """
    return tl.maximum(exponent, SMALLEST_POWER_BITS).to(tl.float32, bitcast=True)


@triton.jit
def encode(values, factor, LARGEST: tl.constexpr, dtype: tl.constexpr):
    scaled = values.to(tl.float32) * factor
    return tl.clamp(scaled, -LARGEST, LARGEST, tl.PropagateNan.ALL).to(dtype)


@triton.jit
def combine_maxima(state, bits):
    """Combines the largest magnitudes that all programs have found. Returns whether this program is the last, and the
    largest magnitude of all. For other programs the second result is 0.

    `state` holds the largest magnitude and a count of programs. Both are 0 at the start of a launch, and the last
    program sets them to 0 again. The count also orders memory accesses: what a program reads or writes before it is
    counted happens before what the last program does.
    """
    tl.atomic_max(state, bits, sem="relaxed")
    is_last_program = tl.atomic_add(state + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1
    largest = bits * 0
    if is_last_program:
        largest = tl.atomic_xchg(state, 0, sem="relaxed")
        tl.atomic_xchg(state + 1, 0, sem="relaxed")
    return is_last_program, largest


@triton.jit(do_not_specialize_on_alignment=["scale", "inverse", "state"])
def find_scale(x, scale, inverse, state, size, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr):
    """Finds the largest magnitude of a tensor. The program that ends last writes the scale and its inverse."""
    offsets = tl.arange(0, BLOCK)
    largest = magnitude_bits(tl.zeros((BLOCK,), x.dtype.element_ty))
    for start in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        values = tl.load(x + start + offsets, mask=start + offsets < size, other=0.0)
        largest = tl.maximum(largest, magnitude_bits(values))
    is_last_program, bits = combine_maxima(state, widen_bits(tl.max(largest, axis=0), x.dtype.element_ty))
    # Only the last program has the maximum of all programs, so it writes the scale.
    if is_last_program:
        factor = scale_factor(bits, LARGEST, POWER_OF_TWO)
        tl.store(scale, factor)
        tl.store(inverse, scale_inverse(factor, POWER_OF_TWO))


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
    """Stores this cast's scale and inverse scale, then updates the delayed scale as code_kernels.DelayedScaleKernel
    does. Only one program of a launch may call it.
    """
    current_scale = tl.load(scale)
    tl.store(used, current_scale)
    tl.store(inverse, divide(1.0, current_scale))
    # An amax that is not finite changes neither the history nor the scale.
    finite = amax_bits < INFINITY_BITS
    entry = tl.where(finite, amax_bits, 0).to(tl.float32, bitcast=True)
    count = tl.load(casts)
    history_index = count % HISTORY
    largest = entry
    if not MOST_RECENT:
        for start in range(0, HISTORY, CHUNK):
            offsets = start + tl.arange(0, CHUNK)
            entries = tl.load(history + offsets, mask=offsets < HISTORY, other=0.0)
            largest = tl.maximum(largest, tl.max(tl.where(offsets == history_index, 0.0, entries), axis=0))
    tl.store(history + history_index, entry)
    tl.store(casts, count + 1)
    next_scale = scale_factor(largest.to(tl.int32, bitcast=True), LARGEST, False) * SHRINK
    is_due = finite & (largest > 0) & ((count + 1) % INTERVAL == 0)
    tl.store(scale, tl.where(is_due, next_scale, current_scale))


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
    """Writes codes of the matrix (STRAIGHT), of its transpose (TURNED), or of both, with one scale or without a scale.
    Reads each element once.

    If LARGEST is None, x consists of bytes that are only moved. With DELAYED the same pass also finds the largest
    magnitude, and the last program updates the scale.
    """
    factor = 1.0
    if SCALED:
        factor = tl.load(scale)
    tiles_across = tl.cdiv(columns, ACROSS)
    # A variable keeps its type in a loop, so the running maximum starts as a tile of zeros.
    if DELAYED:
        largest = magnitude_bits(tl.zeros((DOWN, ACROSS), x.dtype.element_ty))
    # There may be more tiles than programs, so each program takes several.
    for tile in range(tl.program_id(0), tl.cdiv(rows, DOWN) * tiles_across, tl.num_programs(0)):
        row = (tile // tiles_across) * DOWN + tl.arange(0, DOWN)[:, None]
        column = (tile % tiles_across) * ACROSS + tl.arange(0, ACROSS)[None, :]
        in_bounds = (row < rows) & (column < columns)
        values = tl.load(x + row * columns + column, mask=in_bounds, other=0)
        if LARGEST is None:
            encoded_values = values
        else:
            encoded_values = encode(values, factor, LARGEST, (codes if STRAIGHT else turned).dtype.element_ty)
        if DELAYED:
            largest = tl.maximum(largest, magnitude_bits(values))
        if STRAIGHT:
            tl.store(codes + row * columns + column, encoded_values, mask=in_bounds)
        if TURNED:
            tl.store(turned + column * rows + row, encoded_values, mask=in_bounds)
    # Only the last program knows the largest magnitude of all.
    if DELAYED:
        last, bits = combine_maxima(state, widen_bits(tl.max(tl.max(largest, axis=1), axis=0), x.dtype.element_ty))
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
    """Makes one pass over a matrix. With STRAIGHT the pass writes codes with a scale for each row. With PEAKS it
    finds the largest magnitude of each column.

    A program handles LINES complete rows, DOWN rows at a time. WIDTH is at least `columns`.
    """
    column = tl.arange(0, WIDTH)[None, :]
    largest = magnitude_bits(tl.zeros((WIDTH,), x.dtype.element_ty))
    # All rows of a program share one atomic maximum (below). More of them would limit the speed.
    for step in range(0, LINES, DOWN):
        row = tl.program_id(0) * LINES + step + tl.arange(0, DOWN)
        in_bounds = (row < rows)[:, None] & (column < columns)
        offset = row[:, None] * columns + column
        values = tl.load(x + offset, mask=in_bounds, other=0.0)
        bits = magnitude_bits(values)
        if PEAKS:
            largest = tl.maximum(largest, tl.max(bits, axis=0).to(bits.dtype))
        if STRAIGHT:
            factor = scale_factor(widen_bits(tl.max(bits, axis=1), x.dtype.element_ty), LARGEST, POWER_OF_TWO)
            tl.store(inverse + row, scale_inverse(factor, POWER_OF_TWO), mask=row < rows)
            tl.store(codes + offset, encode(values, factor[:, None], LARGEST, codes.dtype.element_ty), mask=in_bounds)
    if PEAKS:
        peak_columns = tl.arange(0, WIDTH)
        tl.atomic_max(
            peaks + peak_columns,
            widen_bits(largest, x.dtype.element_ty),
            mask=peak_columns < columns,
            sem="relaxed",
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
    """Writes codes with a scale for each row, if rows are too long for registers. A program reads its row twice, the
    second time from the L2 cache.
    """
    row_start = tl.program_id(0) * columns
    offsets = tl.arange(0, WIDTH)
    largest = magnitude_bits(tl.zeros((WIDTH,), x.dtype.element_ty))
    # First pass: find the largest magnitude. The row stays in the L2 cache for the second pass.
    for start in range(0, columns, WIDTH):
        in_bounds = start + offsets < columns
        values = tl.load(x + row_start + start + offsets, mask=in_bounds, other=0.0, eviction_policy="evict_last")
        largest = tl.maximum(largest, magnitude_bits(values))
    factor = scale_factor(widen_bits(tl.max(largest, axis=0), x.dtype.element_ty), LARGEST, POWER_OF_TWO)
    tl.store(inverse + tl.program_id(0), scale_inverse(factor, POWER_OF_TWO))
    # Second pass: write codes. The row is not read again, so the cache may evict it.
    for start in range(0, columns, WIDTH):
        in_bounds = start + offsets < columns
        values = tl.load(x + row_start + start + offsets, mask=in_bounds, other=0.0, eviction_policy="evict_first")
        encoded_values = encode(values, factor, LARGEST, codes.dtype.element_ty)
        tl.store(codes + row_start + start + offsets, encoded_values, mask=in_bounds)


@triton.jit(do_not_specialize_on_alignment=["peaks"])
def find_peaks(x, peaks, rows, columns, LINES: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Finds the largest magnitude of each column. A program handles LINES rows of ACROSS columns."""
    tiles_across = tl.cdiv(columns, ACROSS)
    column = (tl.program_id(0) % tiles_across) * ACROSS + tl.arange(0, ACROSS)
    largest = magnitude_bits(tl.zeros((DOWN, ACROSS), x.dtype.element_ty))
    # Find the maximum of several tiles before the atomic operation. One atomic operation for each tile would limit the
    # speed.
    for step in range(0, LINES, DOWN):
        row = (tl.program_id(0) // tiles_across) * LINES + step + tl.arange(0, DOWN)
        in_bounds = (row < rows)[:, None] & (column < columns)[None, :]
        values = tl.load(x + row[:, None] * columns + column[None, :], mask=in_bounds, other=0.0)
        largest = tl.maximum(largest, magnitude_bits(values))
    tl.atomic_max(
        peaks + column, widen_bits(tl.max(largest, axis=0), x.dtype.element_ty), mask=column < columns, sem="relaxed"
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
    """Casts the transpose of a matrix to codes, with a scale for each row of the transpose. `peaks` has the largest
    magnitudes of these rows.
    """
    tiles_across = tl.cdiv(columns, ACROSS)
    tile_row = tl.program_id(0) // tiles_across
    row = tile_row * DOWN + tl.arange(0, DOWN)
    column = (tl.program_id(0) % tiles_across) * ACROSS + tl.arange(0, ACROSS)
    factor = scale_factor(tl.load(peaks + column, mask=column < columns, other=0), LARGEST, POWER_OF_TWO)
    # All programs of the same columns compute the same inverse scales. The first program writes them.
    if tile_row == 0:
        tl.store(inverse + column, scale_inverse(factor, POWER_OF_TWO), mask=column < columns)
    in_bounds = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(x + row[:, None] * columns + column[None, :], mask=in_bounds, other=0.0)
    encoded_values = encode(values, factor[None, :], LARGEST, turned.dtype.element_ty)
    tl.store(turned + column[None, :] * rows + row[:, None], encoded_values, mask=in_bounds)


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
    """Writes codes with a scale for each SIDE elements of a row, or with SQUARE for each SIDE x SIDE elements. A
    program reads one square once.

    Scales for parts of rows are stored by columns, with `stride` elements between two parts. Scales of squares are
    stored by rows.
    """
    tile_row, tile_column = tl.program_id(0) // across, tl.program_id(0) % across
    row = tile_row * SIDE + tl.arange(0, SIDE)
    column = tile_column * SIDE + tl.arange(0, SIDE)
    in_bounds = (row < rows)[:, None] & (column < columns)[None, :]
    offset = row[:, None] * columns + column[None, :]
    values = tl.load(x + offset, mask=in_bounds, other=0.0)
    bits = magnitude_bits(values)
    # A square and its transpose have the same scale. Parts of rows and parts of columns need different scales.
    if SQUARE:
        factor = scale_factor(
            widen_bits(tl.max(tl.max(bits, axis=1), axis=0), x.dtype.element_ty), LARGEST, POWER_OF_TWO
        )
        tl.store(inverse + tile_row * stride + tile_column, scale_inverse(factor, POWER_OF_TWO))
        tl.store(turned_inverse + tile_column * turned_stride + tile_row, scale_inverse(factor, POWER_OF_TWO))
        encoded_values = encode(values, factor, LARGEST, (codes if STRAIGHT else turned).dtype.element_ty)
        if STRAIGHT:
            tl.store(codes + offset, encoded_values, mask=in_bounds)
        if TURNED:
            tl.store(turned + column[None, :] * rows + row[:, None], encoded_values, mask=in_bounds)
    else:
        if STRAIGHT:
            factor = scale_factor(widen_bits(tl.max(bits, axis=1), x.dtype.element_ty), LARGEST, POWER_OF_TWO)
            tl.store(inverse + tile_column * stride + row, scale_inverse(factor, POWER_OF_TWO), mask=row < rows)
            tl.store(codes + offset, encode(values, factor[:, None], LARGEST, codes.dtype.element_ty), mask=in_bounds)
        if TURNED:
            factor = scale_factor(widen_bits(tl.max(bits, axis=0), x.dtype.element_ty), LARGEST, POWER_OF_TWO)
            tl.store(
                turned_inverse + tile_row * turned_stride + column,
                scale_inverse(factor, POWER_OF_TWO),
                mask=column < columns,
            )
            encoded_values = encode(values, factor[None, :], LARGEST, turned.dtype.element_ty)
            tl.store(turned + column[None, :] * rows + row[:, None], encoded_values, mask=in_bounds)


@triton.jit
def mx_exponent(bits, CARRY: tl.constexpr, EXPONENT: tl.constexpr):
    """Returns the exponent bits of a block's scale, from the bits of the block's largest magnitude. The scale equals
    that of blocks.mx_scale.
    """
    raised = (tl.minimum(bits, INFINITY_BITS) + CARRY) & INFINITY_BITS
    return tl.maximum(raised - EXPONENT, 0)


@triton.jit
def encode_mx(values, bits, exponent, LARGEST: tl.constexpr, E5M2: tl.constexpr):
    """Returns the codes of values as bytes. If a block has a NaN, its scale is NaN and its elements are zeros."""
    finite = tl.where(bits > INFINITY_BITS, 0.0, values.to(tl.float32))
    # The constant comes last, because triton 3.7's interpreter cannot subtract a tensor from a constant.
    inverse = power_of_two(-exponent + LARGEST_POWER_BITS)
    if E5M2:
        encoded_values = encode(finite, inverse, LARGEST, tl.float8e5)
    else:
        encoded_values = encode(finite, inverse, LARGEST, tl.float8e4nv)
    return encoded_values.to(tl.uint8, bitcast=True)


@triton.jit
def mx_scale_byte(bits, exponent):
    return tl.where(bits > INFINITY_BITS, NAN_SCALE_CODE, exponent >> MANTISSA_BITS).to(tl.uint8)


@triton.jit
def compute_scale_index(row, block, across, TILED: tl.constexpr):
    """Returns the index of a block's scale in memory. With TILED, scales are in tiles of 128 x 4 (scale_layouts.py),
    otherwise row by row.
    """
    if TILED:
        tile_index = (row // 128) * (across // 4) + block // 4
        return tile_index * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4
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
    """Writes codes with a power-of-two scale for each 32 elements of a row. STRAIGHT writes those of the matrix, TURNED
    those of its transpose. A program casts one tile.
    """
    tiles = tl.cdiv(columns, ACROSS)
    tile_row, tile_column = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = tile_row * DOWN + tl.arange(0, DOWN)
    column = tile_column * ACROSS + tl.arange(0, ACROSS)
    in_bounds = (row < rows)[:, None] & (column < columns)[None, :]
    offset = row[:, None] * columns + column[None, :]
    values = tl.load(x + offset, mask=in_bounds, other=0.0)
    # Blocks run along rows for STRAIGHT and down columns for TURNED. The tile is loaded only once for both.
    if STRAIGHT:
        parts = tl.reshape(values, (DOWN, ACROSS // 32, 32))
        bits = widen_bits(tl.max(magnitude_bits(parts), axis=2), x.dtype.element_ty)
        exponent = mx_exponent(bits, CARRY, EXPONENT)
        encoded = encode_mx(parts, bits[:, :, None], exponent[:, :, None], LARGEST, E5M2)
        tl.store(codes + offset, tl.reshape(encoded, (DOWN, ACROSS)), mask=in_bounds)
        block = tile_column * (ACROSS // 32) + tl.arange(0, ACROSS // 32)
        block_mask = (row < rows)[:, None] & (block < columns // 32)[None, :]
        scale_offset = compute_scale_index(row[:, None], block[None, :], columns // 32, TILED)
        tl.store(scales + scale_offset, mx_scale_byte(bits, exponent), mask=block_mask)
    if TURNED:
        parts = tl.reshape(values, (DOWN // 32, 32, ACROSS))
        bits = widen_bits(tl.max(magnitude_bits(parts), axis=1), x.dtype.element_ty)
        exponent = mx_exponent(bits, CARRY, EXPONENT)
        encoded = encode_mx(parts, bits[:, None, :], exponent[:, None, :], LARGEST, E5M2)
        tl.store(turned + column[None, :] * rows + row[:, None], tl.reshape(encoded, (DOWN, ACROSS)), mask=in_bounds)
        block = tile_row * (DOWN // 32) + tl.arange(0, DOWN // 32)
        block_mask = (block < rows // 32)[:, None] & (column < columns)[None, :]
        scale_offset = compute_scale_index(column[None, :], block[:, None], rows // 32, TURNED_TILED)
        tl.store(turned_scales + scale_offset, mx_scale_byte(bits, exponent), mask=block_mask)
