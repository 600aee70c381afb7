"""Scales and elements of blocks under each scaling, as pure functions that can be traced.

Scales come from largest magnitudes: each step is one float32 operation rounded to nearest, and powers of two are made
from bits, because a logarithm would round. Scales decode: value = element * scale. `amax` is always float32, and NaN
where a NaN is among its elements.

Blocks are whole (ends are filled with zeros), in one of two layouts: (blocks, size) where a block is part of a row, and
(down, rows, across, columns) where it is a rectangle. Their values are float32, in one tensor or in several lanes of
one shape that together hold the blocks (see fused.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from fp8bench.formats.grids import E2M1, E4M3, E8M0, E8M0_LARGEST_CODE, Format
from fp8bench.formats.quantise import bits_of, copy_signs, limit_magnitudes, on_grid, round_values, rounded_magnitudes
from fp8bench.formats.recipes import ScaleRounding, Scaling

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
    """The factor of elements, by which the largest magnitude becomes the format's: largest / amax.

    At most 2^126, and 1 where amax is zero, infinite or NaN. POWER_OF_TWO takes the power of two at or below.
    """
    usable = amax.isfinite() & (amax > 0)
    factor = torch.where(usable, quotient(_like(amax, fmt.largest), amax), 1.0).clamp(max=_LARGEST_FACTOR)
    if rounding is ScaleRounding.POWER_OF_TWO:
        factor = factor.view(torch.int32).bitwise_and(_EXPONENT_MASK).view(torch.float32)
    return factor


def quotient(dividend: Tensor, divisor: Tensor) -> Tensor:
    """The nearest float32: compiled for a GPU, a quotient by a constant or a reciprocal may be the next number.

    A quotient of numbers of 24 bits is never so near to the middle of two floats that rounding float64's differs.
    """
    if divisor.device.type == "cpu":
        return dividend / divisor
    return (dividend.to(torch.float64) / divisor.to(torch.float64)).to(torch.float32)


def inverse_of(factor: Tensor) -> Tensor:
    return factor.reciprocal() if factor.device.type == "cpu" else quotient(torch.ones_like(factor), factor)


def mx_scale(amax: Tensor, fmt: Format, rounding: ScaleRounding) -> tuple[Tensor, Tensor]:
    """The e8m0 scale of MX blocks as float32, and its inverse.

    With the exponent E of amax and that of the format's largest value, e: FLOOR takes 2^(E - e); EVEN the same once
    amax is rounded to the elements' mantissa; CEIL once it is rounded up to a power of two; RCEIL the power of two at
    or above the exact quotient amax / largest. From 2^-127 (for zero blocks too) to 2^(128 - e), for blocks with an
    infinity. NaN where amax is: its inverse is then a number.
    """
    carry = mx_carry(fmt, rounding)
    bits = amax.view(torch.int32).bitwise_and(_MAGNITUDE_MASK)  # a NaN may have any sign
    raised = (bits.clamp(max=_EXPONENT_MASK) + carry).bitwise_and(_EXPONENT_MASK)
    exponent = (raised - mx_exponent_of(fmt)).clamp(min=0)
    inverse = _power_of_two((E8M0_LARGEST_CODE << _MANTISSA_BITS) - exponent)
    # All bits set where amax is NaN: `where` would cost more than the rest if a block is done at a time.
    nan = (_EXPONENT_MASK - bits).bitwise_right_shift(_SIGN_PLACE)
    return _power_of_two(exponent).view(torch.int32).bitwise_or(nan).view(torch.float32), inverse


def mx_carry(fmt: Format, rounding: ScaleRounding) -> int:
    """The number added to an amax's bits, to carry into the exponent: for mantissas above the largest value's, above
    zero, from a tie on, or never."""
    return {
        ScaleRounding.RCEIL: _MANTISSA_MASK - (bits_of(fmt.largest) & _MANTISSA_MASK),
        ScaleRounding.CEIL: _MANTISSA_MASK,
        ScaleRounding.EVEN: 1 << (_MANTISSA_BITS - fmt.mantissa_bits - 1),
        ScaleRounding.FLOOR: 0,
    }[rounding]


def mx_exponent_of(fmt: Format) -> int:
    """The exponent of the format's largest value, in the place of a float32's exponent bits."""
    return fmt.max_exponent << _MANTISSA_BITS


def nvfp4_tensor_scale(amax: Tensor) -> Tensor:
    """amax / (448 * 6), the largest block scale times the largest element: at least 2^-126, and 1 where amax is zero,
    infinite or NaN."""
    usable = amax.isfinite() & (amax > 0)
    scale = quotient(amax, _like(amax, E4M3.largest * E2M1.largest))
    return torch.where(usable, scale, 1.0).clamp(min=_SMALLEST_NORMAL)


def nvfp4_block_scale(amax: Tensor, tensor_scale: Tensor, rounding: ScaleRounding) -> Tensor:
    """The e4m3 scale of NVFP4 blocks as float32: amax / 6 / tensor_scale, rounded to nearest even or up.

    Infinity saturates to 448, NaN stays; a scale that NEAREST rounds to zero makes a block of zeros.
    """
    scale = quotient(quotient(amax, _like(amax, E2M1.largest)), tensor_scale)
    return _up(scale, E4M3) if rounding is ScaleRounding.UP else round_values(scale, E4M3)


def largest_of(blocks: Tensor, inside: tuple[int, ...] | None = None) -> Tensor:
    """The largest of each block, with reduced dimensions kept; NaN where one is among them."""
    return blocks.amax(inside or ((1, 3) if blocks.dim() == _RECTANGLE_DIMENSIONS else (1,)), keepdim=True)


def steps_of(amax: Tensor, fmt: Format, scaling: Scaling) -> Tensor:
    """The factor that turns the elements of blocks with these largest magnitudes into values. Under scales in e8m0 and
    e4m3 it is NaN where a magnitude is NaN."""
    if scaling.scale is None:
        return inverse_of(float_factor(amax, fmt, scaling.rounding))
    if scaling.scale is E8M0:
        return mx_scale(amax, fmt, scaling.rounding)[0]
    above = nvfp4_tensor_scale(amax.amax())
    return nvfp4_block_scale(amax, above, scaling.rounding) * above


def _like(amax: Tensor, number: float) -> Tensor:
    """A tensor of a number, to divide by or into: for a bare number torch may multiply by a reciprocal."""
    return torch.full_like(amax, number)


def _up(values: Tensor, fmt: Format) -> Tensor:
    """Rounds magnitudes up to the format's grid, at most to its largest."""
    smallest = (fmt.min_exponent + _BIAS) << _MANTISSA_BITS
    exponent = values.view(torch.int32).bitwise_and(_EXPONENT_MASK).clamp(min=smallest)
    step = exponent - (fmt.mantissa_bits << _MANTISSA_BITS)
    inverse = (2 * _BIAS << _MANTISSA_BITS) - step
    raised = (values * inverse.view(torch.float32)).ceil() * step.view(torch.float32)
    return raised.clamp(max=fmt.largest)


def _power_of_two(exponent: Tensor) -> Tensor:
    """The float32 number with those exponent bits and no mantissa; zero gives 2^-127, a subnormal."""
    return exponent.clamp(min=1 << (_MANTISSA_BITS - 1)).view(torch.float32)


_RECTANGLE_DIMENSIONS = 4

Lanes = Sequence[Tensor]

_NEVER_ABOVE = (ScaleRounding.RCEIL, ScaleRounding.CEIL)
"""With these only infinities exceed the largest element."""


def block_values(
    lanes: Lanes, fmt: Format, scaling: Scaling, tensor_scale: Tensor | None = None, random: Lanes | None = None
) -> list[Tensor]:
    """The values that format and scaling leave of the blocks, in the same layout.

    With `random` numbers for each element rounding is stochastic. `tensor_scale` is NVFP4's, computed from these blocks
    unless it is given.
    """
    rounded = magnitudes_left([lane.abs() for lane in lanes], fmt, scaling, tensor_scale, random)
    return [copy_signs(tensor, lane, fmt) for tensor, lane in zip(rounded, lanes, strict=True)]


def magnitudes_left(
    magnitudes: Lanes,
    fmt: Format,
    scaling: Scaling,
    tensor_scale: Tensor | None = None,
    random: Lanes | None = None,
    apart: bool = False,
) -> list[Tensor]:
    """Like `block_values`, for numbers without signs. With `apart`, a fused kernel computes all scales before the first
    element."""
    scaled = _scale_blocks(magnitudes, fmt, scaling, tensor_scale, apart)
    # An infinite element stays infinite under these scales, saturated or not; but with one bit of mantissa and random
    # numbers the inverse of its step would be 0.
    lost = random is not None and fmt.mantissa_bits == 1
    elements = _elements(scaled, fmt, scaling, random, saturate=lost or scaling.rounding not in _NEVER_ABOVE)
    return [element * scaled.left for element in elements]


def block_elements(
    lanes: Lanes,
    fmt: Format,
    scaling: Scaling,
    tensor_scale: Tensor | None = None,
    random: Lanes | None = None,
    inside: tuple[int, ...] | None = None,
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Elements on the format's grid, the blocks' scales, NVFP4's tensor scale; scales keep reduced dimensions.

    `inside` are the dimensions of a block in any other layout. A NaN makes the scale of its block NaN where scales are
    e8m0 or e4m3 (the elements then mean nothing); under float32 scales it stays alone.
    """
    scaled = _scale_blocks([lane.abs() for lane in lanes], fmt, scaling, tensor_scale, apart=False, inside=inside)
    elements = _elements(scaled, fmt, scaling, random, saturate=True)
    return (
        [copy_signs(element, lane, fmt) for element, lane in zip(elements, lanes, strict=True)],
        scaled.scales,
        scaled.above,
    )


class _Scaled(NamedTuple):
    """Magnitudes before rounding, the blocks' scales, NVFP4's tensor scale, and what elements are multiplied by."""

    magnitudes: list[Tensor]
    scales: Tensor
    above: Tensor | None
    left: Tensor


def _scale_blocks(
    magnitudes: Lanes,
    fmt: Format,
    scaling: Scaling,
    tensor_scale: Tensor | None,
    apart: bool,
    inside: tuple[int, ...] | None = None,
) -> _Scaled:
    # The largest magnitude of each block; `inside` names the dimensions that a block spans.
    amax = largest_of(reduce(torch.maximum, magnitudes), inside)
    store: Callable[[Tensor], Tensor] = _store_scales if apart else lambda scales: scales
    # Plain float scales: multiply by the inverse, so that a kernel divides once a block and not once an element.
    if scaling.scale is None:
        factor = store(float_factor(amax, fmt, scaling.rounding))
        scales = store(inverse_of(factor))
        return _Scaled([magnitude * factor for magnitude in magnitudes], scales, None, scales)
    # MX: the scale is a power of two, so that multiplying by its inverse is exact.
    if scaling.scale is E8M0:
        scales, inverse = map(store, mx_scale(amax, fmt, scaling.rounding))
        return _Scaled([magnitude * inverse for magnitude in magnitudes], scales, None, scales)
    # From the blocks' amaxes, which saves a pass over the tensor.
    above = nvfp4_tensor_scale(amax.amax()) if tensor_scale is None else tensor_scale
    scales = nvfp4_block_scale(amax, above, scaling.rounding)
    decoding = store(scales * above)
    divisor = torch.where(
        decoding == 0, torch.inf, decoding
    )  # under a scale of zero every element is zero, with its sign
    return _Scaled([magnitude / divisor for magnitude in magnitudes], scales, above, decoding)


def _elements(scaled: _Scaled, fmt: Format, scaling: Scaling, random: Lanes | None, saturate: bool) -> list[Tensor]:
    drawn: Sequence[Tensor | None] = random or [None] * len(scaled.magnitudes)
    pairs = list(zip(scaled.magnitudes, drawn, strict=True))
    if scaling.scale is None:
        return [rounded_magnitudes(tensor, fmt, by) for tensor, by in pairs]
    # A NaN is in its block's scale already.
    return [on_grid(limit_magnitudes(tensor, fmt) if saturate else tensor, fmt, by) for tensor, by in pairs]


def _store_scales(scales: Tensor) -> Tensor:
    """Has Inductor store the scales: it does not repeat the operations before, and its loop has vectors of scales."""
    return scales.as_strided(scales.shape, scales.stride())
