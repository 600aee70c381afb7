"""Scales from largest magnitudes, in plain torch operations that can be traced.

Each step is one float32 operation rounded to nearest, and powers of two are made of bits: a logarithm would round.
Scales decode: value = element * scale. `amax` is float32 throughout, NaN where a NaN is among its elements.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from fp8bench.formats.grids import E2M1, E4M3, E8M0_LARGEST_CODE, Format
from fp8bench.formats.rounding import nearest
from fp8bench.formats.scalings import ScaleRounding

_EXPONENT_MASK = 0x7F800000
_MANTISSA_MASK = 0x007FFFFF
_MAGNITUDE_MASK = 0x7FFFFFFF
_MANTISSA_BITS = 23
_SIGN_PLACE = 31
_BIAS = 127
_SMALLEST_NORMAL = 2.0**-126
_LARGEST_FACTOR = 2.0**126
"""Above it the factor's inverse would be a subnormal number."""


def float_factor(amax: Tensor, fmt: Format, rounding: ScaleRounding) -> Tensor:
    """What elements are multiplied by so that the largest magnitude becomes the format's: largest / amax.

    At most 2^126, and 1 where amax is zero, infinite or NaN. POWER_OF_TWO takes the power of two at or below.
    """
    usable = amax.isfinite() & (amax > 0)
    factor = torch.where(usable, _like(amax, fmt.largest) / amax, 1.0).clamp(max=_LARGEST_FACTOR)
    if rounding is ScaleRounding.POWER_OF_TWO:
        factor = factor.view(torch.int32).bitwise_and(_EXPONENT_MASK).view(torch.float32)
    return factor


def mx_scale(amax: Tensor, fmt: Format, rounding: ScaleRounding) -> tuple[Tensor, Tensor]:
    """The e8m0 scale of MX blocks as float32, and its inverse.

    With the exponent E of amax and that of the format's largest value, e: FLOOR takes 2^(E - e); EVEN the same once
    amax is rounded to the elements' mantissa; CEIL once it is rounded up to a power of two; RCEIL the power of two at
    or above the exact quotient amax / largest. From 2^-127 (of zero blocks too) to 2^(128 - e), that of blocks with an
    infinity. NaN where amax is: its inverse is then a number.
    """
    # What carries into the exponent: mantissas above that of the largest value, above zero, from a tie on, or none.
    carry = {
        ScaleRounding.RCEIL: _MANTISSA_MASK - (_bits(fmt.largest) & _MANTISSA_MASK),
        ScaleRounding.CEIL: _MANTISSA_MASK,
        ScaleRounding.EVEN: 1 << (_MANTISSA_BITS - fmt.mantissa_bits - 1),
        ScaleRounding.FLOOR: 0,
    }[rounding]
    bits = amax.view(torch.int32).bitwise_and(_MAGNITUDE_MASK)  # a NaN may have any sign
    raised = (bits.clamp(max=_EXPONENT_MASK) + carry).bitwise_and(_EXPONENT_MASK)
    exponent = (raised - (fmt.max_exponent << _MANTISSA_BITS)).clamp(min=0)
    inverse = _power_of_two((E8M0_LARGEST_CODE << _MANTISSA_BITS) - exponent)
    # All bits where amax is NaN: not by `where`, which costs more than all the rest if a block is done at a time.
    nan = (_EXPONENT_MASK - bits).bitwise_right_shift(_SIGN_PLACE)
    return _power_of_two(exponent).view(torch.int32).bitwise_or(nan).view(torch.float32), inverse


def nvfp4_tensor_scale(amax: Tensor) -> Tensor:
    """The scale above all block scales: it takes a tensor's amax to the largest block scale times the largest element.

    amax / (448 * 6), at least 2^-126, and 1 where amax is zero, infinite or NaN.
    """
    usable = amax.isfinite() & (amax > 0)
    return torch.where(usable, amax / _like(amax, E4M3.largest * E2M1.largest), 1.0).clamp(min=_SMALLEST_NORMAL)


def nvfp4_block_scale(amax: Tensor, tensor_scale: Tensor, rounding: ScaleRounding) -> Tensor:
    """The e4m3 scale of NVFP4 blocks as float32: amax / 6 / tensor_scale, rounded to nearest even or up.

    Infinity saturates to 448, NaN stays; what NEAREST rounds to zero makes a block of zeros.
    """
    quotient = amax / _like(amax, E2M1.largest) / tensor_scale
    return _up(quotient, E4M3) if rounding is ScaleRounding.UP else nearest(quotient, E4M3)


def _like(amax: Tensor, number: float) -> Tensor:
    """A number to divide by or into: with a bare one torch multiplies by a reciprocal, in places and on GPUs."""
    return torch.full_like(amax, number)


def _up(values: Tensor, fmt: Format) -> Tensor:
    """Magnitudes rounded to the format's next value at or above, its largest at most."""
    smallest = (fmt.min_exponent + _BIAS) << _MANTISSA_BITS
    exponent = values.view(torch.int32).bitwise_and(_EXPONENT_MASK).clamp(min=smallest)
    step = exponent - (fmt.mantissa_bits << _MANTISSA_BITS)
    inverse = (2 * _BIAS << _MANTISSA_BITS) - step
    raised = (values * inverse.view(torch.float32)).ceil() * step.view(torch.float32)
    return raised.clamp(max=fmt.largest)


def _power_of_two(exponent: Tensor) -> Tensor:
    """The float32 number with those bits for exponent and none for mantissa; that of zero is 2^-127, a subnormal."""
    return exponent.clamp(min=1 << (_MANTISSA_BITS - 1)).view(torch.float32)


def _bits(value: float) -> int:
    """Of a positive number as float32."""
    return int.from_bytes(struct.pack(">f", value))
