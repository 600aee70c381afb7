"""Rounding float32 values onto a format's grid, exactly, in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8bench.formats.grids import Format, Overflow

_EXPONENT_MASK = 0x7F800000
_HALF_MANTISSA = 0x00400000
_FLOAT32_BIAS = 127
_FLOAT32_MANTISSA_BITS = 23


def round_to(x: Tensor, fmt: Format, out: Tensor | None = None, *, overflow: Overflow = Overflow.SATURATE) -> Tensor:
    """`x` rounded to the nearest value of `fmt`, ties to even, as float32 (or into `out`).

    Subnormals, the sign of zero and NaN are kept; what is too large becomes the largest value.
    float32, bfloat16 and float16 input of any shape; no gradient flows.
    torch's own casts are not used because their overflow differs between torch versions and between formats.
    """
    values = x.detach().to(torch.float32)
    rounded = _short_mantissa(values, fmt) if overflow is Overflow.INFINITY else _saturating(values, fmt)
    return rounded if out is None else out.copy_(rounded)


def _saturating(values: Tensor, fmt: Format) -> Tensor:
    """Add and subtract, for each value, the constant whose last float32 bit is worth one grid step.

    Clamping first keeps that constant finite.
    """
    clamped = values.clamp(-fmt.largest, fmt.largest)
    smallest = (fmt.min_exponent + _FLOAT32_BIAS) << _FLOAT32_MANTISSA_BITS
    lift = (_FLOAT32_MANTISSA_BITS - fmt.mantissa_bits) << _FLOAT32_MANTISSA_BITS
    exponent = clamped.view(torch.int32).bitwise_and(_EXPONENT_MASK).clamp_(min=smallest)
    constant = exponent.add_(lift).bitwise_or_(_HALF_MANTISSA).view(torch.float32)
    rounded = (clamped + constant).sub_(constant)
    return rounded.copysign_(clamped)  # negative values that round to zero would lose their sign


def _short_mantissa(values: Tensor, fmt: Format) -> Tensor:
    """Round the bits themselves, for formats with float32's own exponents: overflow carries into infinity."""
    if fmt.min_exponent != 1 - _FLOAT32_BIAS:
        raise ValueError(f"{fmt.name} has no float32 exponent and must saturate")
    dropped = _FLOAT32_MANTISSA_BITS - fmt.mantissa_bits
    bits = values.view(torch.int32)
    odd = bits.bitwise_right_shift(dropped).bitwise_and_(1)
    rounded = odd.add_((1 << (dropped - 1)) - 1).add_(bits).bitwise_and_(-(1 << dropped)).view(torch.float32)
    return torch.where(values.isnan(), values, rounded)  # a carry out of NaN's mantissa would give -0
