"""Rounds elements of a tensor exactly to a format's grid, with plain torch operations that can be traced.

Overflow is judged after rounding: a value that rounds to the largest value has not overflowed. NaN stays NaN.
Stochastic rounding needs random numbers. Integer operations compute them from a seed and the index of an element. So
they are the same in eager and fused code, on CPU and GPU, and in any memory layout.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fp8bench.formats.grids import E8M0, Format, Overflow

ROUNDING_RANDOM_BITS = 24

# 2^32 divided by the golden ratio, as an int32.
_GOLDEN_RATIO = -0x61C88647
_WORD_BITS = 32
_LARGEST_INDEX = (1 << 31) - 1


class Draw(NamedTuple):
    """The seeds of the next casts: `last` plus each number in `steps`. `last` is the seed that was used last. The
    kernel writes the last of the next seeds to `after`.
    """

    last: Tensor
    after: Tensor
    steps: tuple[int, ...]


def random_bits(shape: Sequence[int], seed: Tensor) -> Tensor:
    """Returns uniform int32 numbers below 2^24, one for each element in row-major order.

    `seed` is an int64 tensor of one element. Each stretch of 2^32 elements has a separate key, so that no numbers
    repeat.
    """
    if prod(shape) <= _LARGEST_INDEX:
        return compute_element_random_bits(
            torch.arange(prod(shape), dtype=torch.int32, device=seed.device).view(shape), compute_seed_key(seed)
        )
    # Indices of this many elements overflow int32.
    element_index = torch.arange(prod(shape), dtype=torch.int64, device=seed.device).view(shape)
    return compute_element_random_bits(
        _get_low_32_bits(element_index), compute_seed_key(seed, element_index.bitwise_right_shift(_WORD_BITS))
    )


def compute_seed_key(seed: Tensor, stretch: Tensor | None = None) -> Tensor:
    """Returns the int32 key of a seed, as a tensor without dimensions. With `stretch`, the number of each element's
    stretch (2^32 consecutive elements), returns a key for each element.
    """
    seed = seed.reshape(())
    high_word = _get_low_32_bits(seed.bitwise_right_shift(_WORD_BITS))
    first_word = high_word if stretch is None else _get_low_32_bits(stretch) * _GOLDEN_RATIO + high_word
    return _hash_word_bits(_hash_word_bits(first_word) + _get_low_32_bits(seed))


def compute_element_random_bits(index: Tensor, key: Tensor) -> Tensor:
    """Returns the random number of each element. `index` is the int32 index of the element in its stretch (2^32
    consecutive elements). Traced kernels contain this function.
    """
    return _shift_right(
        _hash_word_bits(_hash_word_bits(index + key) + key * _GOLDEN_RATIO), _WORD_BITS - ROUNDING_RANDOM_BITS
    )


def _get_low_32_bits(wide: Tensor) -> Tensor:
    return wide.to(torch.int32)


def _shift_right(word: Tensor, count: int) -> Tensor:
    """Shifts int32 words by this number of bits as if they had no sign: the highest bits become 0."""
    return word.bitwise_right_shift(count).bitwise_and((1 << (_WORD_BITS - count)) - 1)


def _hash_word_bits(word: Tensor) -> Tensor:
    """Mixes the bits of a word of 32 bits. Different words get different results, and every bit of the result depends
    on every bit of the word. The constants are those of C. Wellons' low-bias hash (2018).
    """
    word = (word ^ _shift_right(word, 16)) * 0x7FEB352D
    word = (word ^ _shift_right(word, 15)) * -0x7B935975
    return word ^ _shift_right(word, 16)


_EXPONENT_MASK = 0x7F800000
_SIGN_MASK = -0x80000000
_HALF_MANTISSA_RANGE = 0x00400000
# The bits of 2^-127, the smallest value of e8m0, as a float32.
_SMALLEST_E8M0_BITS = 0x00400000
_SMALLEST_NORMAL_BITS = 0x00800000
_FLOAT32_BIAS = 127
_MANTISSA_BITS = 23
_FLOAT32_MIN_EXPONENT = 1 - _FLOAT32_BIAS


def round_values(
    values: Tensor, fmt: Format, random: Tensor | None = None, overflow: Overflow = Overflow.SATURATE
) -> Tensor:
    """Rounds float32 `values` to nearest even, or stochastically. In e8m0 a tie between two powers of two goes up.

    `random` holds uniform int32 numbers below 2^24. With them each value becomes one of its two neighbours on the grid,
    so that the expected result is the value itself. Exception: among subnormals of the format, a value whose distance
    to a neighbour is below 2^-25 of the step always becomes this neighbour.
    """
    if fmt is E8M0:
        return _round_to_power_of_two(values, overflow, random)
    return copy_signs(round_magnitudes(values.abs(), fmt, random, overflow), values, fmt)


def round_magnitudes(
    magnitudes: Tensor, fmt: Format, random: Tensor | None = None, overflow: Overflow = Overflow.SATURATE
) -> Tensor:
    """Rounds numbers without signs as `round_values` does, for formats other than e8m0."""
    has_float32_exponents = fmt.min_exponent == _FLOAT32_MIN_EXPONENT
    if has_float32_exponents:
        return _apply_overflow_rule(_round_float32_bits(magnitudes, fmt, random), fmt, overflow)
    # `round_to_grid` takes numbers of at most 2^(max_exponent + 1). Magnitudes that are clamped to this limit still
    # show overflow after rounding.
    clamp_limit = fmt.largest if overflow is Overflow.SATURATE else 2.0 ** (fmt.max_exponent + 1)
    return _replace_overflow(round_to_grid(magnitudes.clamp(max=clamp_limit), fmt, random), fmt, overflow)


def round_to_grid(magnitudes: Tensor, fmt: Format, random: Tensor | None = None) -> Tensor:
    """Rounds as `round_magnitudes` does, but without an upper limit. The numbers must be infinite, or at most
    2^(fmt.max_exponent + 1).

    It rounds to nearest even by adding a power of two and subtracting it again. Each number has its own power of two:
    the one whose last float32 bit is worth one step of the grid.
    """
    # Round each magnitude down to a power of two, but not below the format's smallest normal number.
    smallest_exponent_bits = (fmt.min_exponent + _FLOAT32_BIAS) << _MANTISSA_BITS
    exponent_bits = magnitudes.view(torch.int32).bitwise_and(_EXPONENT_MASK).clamp_(min=smallest_exponent_bits)
    if random is not None:
        return _round_stochastically(magnitudes, exponent_bits, fmt, random)
    grid_rounding_addend = exponent_bits.add_((_MANTISSA_BITS - fmt.mantissa_bits) << _MANTISSA_BITS).view(
        torch.float32
    )
    return (magnitudes + grid_rounding_addend).sub_(grid_rounding_addend)


def _round_stochastically(magnitudes: Tensor, exponent: Tensor, fmt: Format, random: Tensor) -> Tensor:
    # Build both powers of two from bits, which is exact.
    exponent_shift = fmt.mantissa_bits << _MANTISSA_BITS
    step = (exponent - exponent_shift).view(torch.float32)
    step_inverse = ((2 * _FLOAT32_BIAS << _MANTISSA_BITS) + exponent_shift - exponent).view(torch.float32)
    steps = magnitudes * step_inverse
    floor_steps = steps.floor()
    # Round the remainder to 24 bits first. Otherwise even the tiniest values would be rounded up with a probability of
    # 2^-24.
    round_up_mask = ((steps - floor_steps) * float(1 << ROUNDING_RANDOM_BITS)).round() > random
    return (floor_steps + round_up_mask.to(torch.float32)).mul_(step)


def copy_signs(magnitudes: Tensor, values: Tensor, fmt: Format) -> Tensor:
    """Returns magnitudes with the signs of values. The signs are copied as bits. fnuz formats only have +0.

    torch.copysign is not used, because in fused CPU code it is a function call for every 16 elements.
    """
    signs = values.view(torch.int32).bitwise_and(_SIGN_MASK)
    if not fmt.signed_zero:
        signs = torch.where(magnitudes == 0, 0, signs)
    return signs.bitwise_or_(magnitudes.view(torch.int32)).view(torch.float32)


def limit_magnitudes(magnitudes: Tensor, fmt: Format) -> Tensor:
    """Limits magnitudes to the format's largest value. It compares them as integers, which takes a quarter of the
    instructions of a float minimum.

    NaN becomes the largest value too, so callers must handle NaN.
    """
    return magnitudes.view(torch.int32).clamp(max=view_float_as_bits(fmt.largest)).view(torch.float32)


def view_float_as_bits(value: float) -> int:
    """Returns the bits of a float32 as an integer."""
    return int.from_bytes(struct.pack(">f", value))


def _replace_overflow(magnitudes: Tensor, fmt: Format, overflow: Overflow) -> Tensor:
    """Replaces magnitudes above the largest value by infinity or NaN. With SATURATE returns them unchanged, because
    they were limited before rounding.
    """
    if overflow is Overflow.SATURATE:
        return magnitudes
    overflow_value = float("inf") if overflow is Overflow.INFINITY else float("nan")
    return torch.where(magnitudes > fmt.largest, overflow_value, magnitudes)


def _apply_overflow_rule(rounded: Tensor, fmt: Format, overflow: Overflow) -> Tensor:
    """Replaces infinities by the format's largest value, if values saturate. This is for tf32 and bf16: their only
    other overflow is infinity, which rounding already gives.
    """
    return rounded.clamp_(-fmt.largest, fmt.largest) if overflow is Overflow.SATURATE else rounded


def _round_float32_bits(values: Tensor, fmt: Format, random: Tensor | None) -> Tensor:
    """Rounds float32 values by their bits. This is for formats with the exponents of float32, in which an overflow
    carries into infinity.
    """
    dropped_mantissa_bits = _MANTISSA_BITS - fmt.mantissa_bits
    bits = values.view(torch.int32)
    if random is None:
        rounding_addend = bits.bitwise_right_shift(dropped_mantissa_bits).bitwise_and(1) + (
            (1 << (dropped_mantissa_bits - 1)) - 1
        )
    else:
        rounding_addend = random.bitwise_and((1 << dropped_mantissa_bits) - 1)
    rounded_bits = (bits + rounding_addend).bitwise_and(-(1 << dropped_mantissa_bits))
    # do not change NaN: a carry out of its mantissa would give -0
    is_finite = bits.bitwise_and(~_SIGN_MASK) < _EXPONENT_MASK
    return torch.where(is_finite, rounded_bits, bits).view(torch.float32)


def _round_to_power_of_two(values: Tensor, overflow: Overflow, random: Tensor | None) -> Tensor:
    """Rounds values to e8m0, whose values are powers of two. Adds half the range of the mantissa, or random bits, to
    the bits of each float32. A carry out of the mantissa then rounds the exponent up.
    """
    bits = values.view(torch.int32)
    # Between 2^-127 and 2^-126 a float32 is subnormal. Remove its leading bit and shift its mantissa, so that it looks
    # like a normal number with the exponent bits 0.
    subnormal_bits = bits.sub(_SMALLEST_E8M0_BITS).clamp(min=0).bitwise_left_shift(1)
    scale_bits = torch.where(bits < _SMALLEST_NORMAL_BITS, subnormal_bits, bits)
    rounding_addend = _HALF_MANTISSA_RANGE if random is None else random.bitwise_and(_SMALLEST_NORMAL_BITS - 1)
    # If the exponent bits are still 0 after rounding, the result is 2^-127.
    rounded_powers = (
        (scale_bits + rounding_addend).bitwise_and(_EXPONENT_MASK).clamp(min=_SMALLEST_E8M0_BITS).view(torch.float32)
    )
    clamped_powers = rounded_powers.clamp(max=E8M0.largest)
    if overflow is Overflow.NAN:
        clamped_powers = torch.where(rounded_powers > E8M0.largest, torch.nan, clamped_powers)
    # e8m0 has no code for zero and negative numbers, so they become NaN.
    return torch.where(values > 0, clamped_powers, torch.nan)


INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def round_to(
    x: Tensor,
    fmt: Format,
    out: Tensor | None = None,
    *,
    overflow: Overflow = Overflow.SATURATE,
    seed: Tensor | None = None,
) -> Tensor:
    """Rounds `x` to the grid of `fmt`. Rounding is to nearest even, or stochastic with a seed. The result is float32,
    or has the dtype of `out`.

    Subnormals and NaN are kept, and the sign of zero if the format has one. Values above the largest saturate, or
    become infinity or NaN, as `overflow` requires. e8m0 has neither sign nor zero: negative numbers and zeros become
    NaN, and ties go up.

    `x` is float32, bfloat16 or float16 of any shape. No gradient flows. `seed` is an int64 tensor of one element on the
    device of `x`. Equal seeds give equal values on all devices. torch's own casts are not used, because their overflow
    differs between versions of torch and between formats.
    """
    check_input(x)
    values = x.detach().to(torch.float32)
    rounded_values = round_values(values, fmt, None if seed is None else random_bits(values.shape, seed), overflow)
    return rounded_values if out is None else out.copy_(rounded_values)


def check_input(x: Tensor) -> None:
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"cannot quantise {x.dtype}: give a tensor of float32, bfloat16 or float16.")
