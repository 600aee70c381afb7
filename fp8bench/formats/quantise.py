"""Exact rounding of a tensor's elements onto a format's grid, in plain torch operations that can be traced.

Overflow is judged after rounding: what rounds back to the largest value has not overflowed. NaN stays NaN. Random
numbers of stochastic rounding depend on a seed and an element's index only, by integer operations: they are the same
eagerly and fused, on a CPU and on a GPU, in any memory layout.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fp8bench.errors import UsageError
from fp8bench.formats.grids import E8M0, Format, Overflow

RANDOM_BITS = 24

_GOLDEN = -0x61C88647
_WORD = 32
_INDICES = (1 << 31) - 1


class Draw(NamedTuple):
    """Seeds of the next casts: `last` plus each of `steps`. The last one is written to `after`."""

    last: Tensor
    after: Tensor
    steps: tuple[int, ...]


def random_bits(shape: Sequence[int], seed: Tensor) -> Tensor:
    """int32 numbers uniform below 2^24, one for each element in row-major order.

    `seed` is an int64 tensor of one element. Elements 2^32 apart have different keys, so that nothing repeats.
    """
    check_seed(seed)
    if prod(shape) <= _INDICES:
        return drawn_bits(torch.arange(prod(shape), dtype=torch.int32, device=seed.device).view(shape), key_of(seed))
    index = torch.arange(prod(shape), dtype=torch.int64, device=seed.device).view(shape)
    return drawn_bits(_low(index), key_of(seed, index.bitwise_right_shift(_WORD)))


def key_of(seed: Tensor, stretch: Tensor | None = None) -> Tensor:
    """The int32 key of a seed, without dimensions; with `stretch`, the key of each stretch of 2^32 elements."""
    seed = seed.reshape(())
    high = _low(seed.bitwise_right_shift(_WORD))
    first = high if stretch is None else _low(stretch) * _GOLDEN + high
    return _mix_bits(_mix_bits(first) + _low(seed))


def drawn_bits(index: Tensor, key: Tensor) -> Tensor:
    """The random numbers of elements, given their index in their stretch, int32: what a kernel is traced with."""
    return _shift_right(_mix_bits(_mix_bits(index + key) + key * _GOLDEN), _WORD - RANDOM_BITS)


def check_seed(seed: object) -> None:
    """Raises TypeError for anything but an int64 tensor of one element: shifts of a narrower one would be wrong."""
    if not isinstance(seed, Tensor) or seed.dtype is not torch.int64 or seed.numel() != 1:
        raise TypeError("a seed is an int64 tensor of one element, on the device of what is rounded.")


def _low(wide: Tensor) -> Tensor:
    return wide.to(torch.int32)


def _shift_right(word: Tensor, by: int) -> Tensor:
    return word.bitwise_right_shift(by).bitwise_and((1 << (_WORD - by)) - 1)


def _mix_bits(word: Tensor) -> Tensor:
    """A bijection of 32 bits in which every bit depends on every other: C. Wellons' low-bias constants, 2018."""
    word = (word ^ _shift_right(word, 16)) * 0x7FEB352D
    word = (word ^ _shift_right(word, 15)) * -0x7B935975
    return word ^ _shift_right(word, 16)


_EXPONENT_MASK = 0x7F800000
_SIGN = -0x80000000
_HALF_MANTISSA = 0x00400000
_SMALLEST_NORMAL_BITS = 0x00800000
_FLOAT32_BIAS = 127
_MANTISSA_BITS = 23
_MIN_EXPONENT = 1 - _FLOAT32_BIAS


def round_values(
    values: Tensor, fmt: Format, random: Tensor | None = None, overflow: Overflow = Overflow.SATURATE
) -> Tensor:
    """float32 `values` rounded to nearest even (e8m0's ties, between powers of two, go up), or stochastically.

    `random` holds int32 numbers, uniform below 2^24: with them each value becomes one of its two neighbours, so that
    the expectation is the value. A value nearer to a neighbour than 2^-25 of the step between them, as only subnormals
    of the format can be, is rounded to that neighbour.
    """
    if fmt is E8M0:
        return _power_of_two(values, overflow, random)
    return copy_signs(rounded_magnitudes(values.abs(), fmt, random, overflow), values, fmt)


def rounded_magnitudes(
    magnitudes: Tensor, fmt: Format, random: Tensor | None = None, overflow: Overflow = Overflow.SATURATE
) -> Tensor:
    """Like `round_values`, for numbers without sign and formats other than e8m0."""
    if fmt.min_exponent == _MIN_EXPONENT:
        return _apply_overflow(_round_bits(magnitudes, fmt, random), fmt, overflow)
    # High enough that rounding still shows what overflows, and low enough that no sum becomes infinite.
    bound = fmt.largest if overflow is Overflow.SATURATE else 2.0 ** (fmt.max_exponent + 1)
    return _beyond(on_grid(magnitudes.clamp(max=bound), fmt, random), fmt, overflow)


def on_grid(magnitudes: Tensor, fmt: Format, random: Tensor | None = None) -> Tensor:
    """Like `rounded_magnitudes`, without an upper end of exponents, for numbers below the format's next power of two,
    or infinite.

    Rounds to nearest even by adding and subtracting, for each number, the power of two whose last float32 bit is worth
    one grid step.
    """
    # The power of two at or below each magnitude, at least the smallest normal of the format.
    smallest = (fmt.min_exponent + _FLOAT32_BIAS) << _MANTISSA_BITS
    exponent = magnitudes.view(torch.int32).bitwise_and(_EXPONENT_MASK).clamp_(min=smallest)
    if random is not None:
        return _round_stochastically(magnitudes, exponent, fmt, random)
    constant = exponent.add_((_MANTISSA_BITS - fmt.mantissa_bits) << _MANTISSA_BITS).view(torch.float32)
    return (magnitudes + constant).sub_(constant)


def _round_stochastically(magnitudes: Tensor, exponent: Tensor, fmt: Format, random: Tensor) -> Tensor:
    # Both powers of two are put together from their bits, which is exact.
    to_step = fmt.mantissa_bits << _MANTISSA_BITS
    step = (exponent - to_step).view(torch.float32)
    inverse = ((2 * _FLOAT32_BIAS << _MANTISSA_BITS) + to_step - exponent).view(torch.float32)
    steps = magnitudes * inverse
    floor = steps.floor()
    # Not `rest > random`, which would round the tiniest values up as often as 2^-24.
    up = ((steps - floor) * float(1 << RANDOM_BITS)).round() > random
    return (floor + up.to(torch.float32)).mul_(step)


def copy_signs(magnitudes: Tensor, values: Tensor, fmt: Format) -> Tensor:
    """Gives magnitudes the sign of the values, by their bits; fnuz formats have +0 only.

    Not by copysign, which fused on a CPU is a function call for every 16 elements.
    """
    signs = values.view(torch.int32).bitwise_and(_SIGN)
    if not fmt.signed_zero:
        signs = torch.where(magnitudes == 0, 0, signs)
    return signs.bitwise_or_(magnitudes.view(torch.int32)).view(torch.float32)


def limit_magnitudes(magnitudes: Tensor, fmt: Format) -> Tensor:
    """Limits magnitudes to the format's largest, by the bits: a quarter of the instructions of a float minimum.

    NaN becomes the largest, too: callers take care of NaN elsewhere.
    """
    return magnitudes.view(torch.int32).clamp(max=bits_of(fmt.largest)).view(torch.float32)


def bits_of(value: float) -> int:
    return int.from_bytes(struct.pack(">f", value))


def _beyond(magnitudes: Tensor, fmt: Format, overflow: Overflow) -> Tensor:
    """Applies overflow to magnitudes that were rounded without an upper end; saturating ones were clamped before."""
    if overflow is Overflow.SATURATE:
        return magnitudes
    end = float("inf") if overflow is Overflow.INFINITY else float("nan")
    return torch.where(magnitudes > fmt.largest, end, magnitudes)


def _apply_overflow(rounded: Tensor, fmt: Format, overflow: Overflow) -> Tensor:
    """Applies overflow to values whose carry has led to infinity, which is all that tf32 and bf16 overflow to."""
    return rounded.clamp_(-fmt.largest, fmt.largest) if overflow is Overflow.SATURATE else rounded


def _round_bits(values: Tensor, fmt: Format, random: Tensor | None) -> Tensor:
    """Rounds the bits themselves, for formats with float32's own exponents: overflow carries into infinity."""
    dropped = _MANTISSA_BITS - fmt.mantissa_bits
    bits = values.view(torch.int32)
    if random is None:
        addend = bits.bitwise_right_shift(dropped).bitwise_and(1) + ((1 << (dropped - 1)) - 1)
    else:
        addend = random.bitwise_and((1 << dropped) - 1)
    rounded = (bits + addend).bitwise_and(-(1 << dropped))
    finite = bits.bitwise_and(~_SIGN) < _EXPONENT_MASK  # a carry out of NaN's mantissa would give -0
    return torch.where(finite, rounded, bits).view(torch.float32)


def _power_of_two(values: Tensor, overflow: Overflow, random: Tensor | None) -> Tensor:
    """e8m0: code and fraction in one integer, to which a half or a random number is added.

    float32 keeps the octave from 2^-127 to 2^-126 with one bit less, without its leading one.
    """
    bits = values.view(torch.int32)
    lowest = bits.sub(_HALF_MANTISSA).clamp(min=0).bitwise_left_shift(1)
    scale = torch.where(bits < _SMALLEST_NORMAL_BITS, lowest, bits)
    addend = _HALF_MANTISSA if random is None else random.bitwise_and(_SMALLEST_NORMAL_BITS - 1)
    rounded = (scale + addend).bitwise_and(_EXPONENT_MASK).clamp(min=_HALF_MANTISSA).view(torch.float32)
    powers = rounded.clamp(max=E8M0.largest)
    if overflow is Overflow.NAN:
        powers = torch.where(rounded > E8M0.largest, torch.nan, powers)
    # NaN also for what the format has no code for: zero and negative numbers.
    return torch.where(values > 0, powers, torch.nan)


INPUTS = (torch.float32, torch.bfloat16, torch.float16)


def round_to(
    x: Tensor,
    fmt: Format,
    out: Tensor | None = None,
    *,
    overflow: Overflow = Overflow.SATURATE,
    seed: Tensor | None = None,
) -> Tensor:
    """`x` rounded onto the grid of `fmt`, as float32 or into `out`: to nearest even, or stochastically with a seed.

    Subnormals, NaN and the sign of zero (where the format has it) are kept; larger values saturate unless `overflow` is
    different. e8m0 has neither sign nor zero: both become NaN, and its ties go up. Input is float32, bfloat16 or
    float16 of any shape; no gradient flows. `seed` is an int64 tensor of one element on the device of `x`: the same one
    gives the same values on every device. torch's own casts are not used because their overflow differs between torch
    versions and between formats.
    """
    check_input(x)
    overflow = checked_overflow(fmt, overflow)
    if out is not None:
        check_output(out, x)
    values = x.detach().to(torch.float32)
    rounded = round_values(values, fmt, None if seed is None else random_bits(values.shape, seed), overflow)
    return rounded if out is None else out.copy_(rounded)


def check_input(x: Tensor) -> None:
    if x.dtype not in INPUTS:
        raise TypeError(f"cannot quantise {x.dtype}: give a tensor of float32, bfloat16 or float16.")


def checked_overflow(fmt: Format, overflow: Overflow) -> Overflow:
    """Returns `overflow`, which may be given by its word. Raises UsageError where the format has no code for it."""
    if overflow not in fmt.overflows:
        choices = ", ".join(fmt.overflows)
        raise UsageError(f"{fmt.name} has no {overflow!s} to overflow to. Give {choices}.")
    return Overflow(overflow)


def check_output(out: Tensor, x: Tensor) -> None:
    if not out.is_floating_point():
        raise TypeError(f"cannot round into {out.dtype}: give a tensor of a floating-point dtype.")
    if out.shape != x.shape:
        raise ValueError(f"cannot round {tuple(x.shape)} into {tuple(out.shape)}: give a tensor of the same shape.")
