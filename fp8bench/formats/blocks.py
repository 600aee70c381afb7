"""Scales and elements of blocks for each kind of scaling, as pure functions that torch can trace.

A scale is computed from the largest magnitude of its block, by float32 operations that each round to nearest.
Powers of two are built from bits, because a logarithm would round. Multiplying by a scale decodes: value = element *
scale. `amax` is always float32, and NaN if an element is NaN.

Blocks are complete: incomplete blocks were filled with zeros before. Blocks have one of two layouts. Blocks that are
parts of rows are (blocks, size). Blocks that are rectangles of rows x columns are (down, rows, across, columns), where
`down` and `across` count blocks. The values of blocks are float32. They are in one tensor. If two of them share a
32-bit word, they are in two tensors of equal shape, the lanes: the first values of the words and the second values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from fp8bench.formats.grids import E2M1, E4M3, E8M0, Format
from fp8bench.formats.quantise import (
    copy_signs,
    limit_magnitudes,
    round_magnitudes,
    round_to_grid,
    round_values,
    view_float_as_bits,
)
from fp8bench.formats.recipes import ScaleRounding, Scaling

_EXPONENT_MASK = 0x7F800000
_MANTISSA_MASK = 0x007FFFFF
_MAGNITUDE_MASK = 0x7FFFFFFF
_MANTISSA_BITS = 23
_SIGN_BIT = 31
_EXPONENT_BIAS = 127
# Exponent bits of e mean 2^(e - 127). So the power of two with the exponent bits 254 - e is the reciprocal.
_RECIPROCAL_EXPONENT_BITS = 2 * _EXPONENT_BIAS << _MANTISSA_BITS
_SMALLEST_NORMAL = 2.0**-126
# If a factor were larger than this, its inverse would be a subnormal number.
_LARGEST_SCALE_FACTOR = 2.0**126
_RECTANGLE_DIMENSIONS = 4


def float_factor(amax: Tensor, fmt: Format, rounding: ScaleRounding) -> Tensor:
    """Returns the factor that scales the largest magnitude to the largest value of the format: largest / amax.

    The factor is at most 2^126. It is 1 where amax is zero, infinite or NaN. With POWER_OF_TWO it is rounded down to
    a power of two.
    """
    is_usable_amax = amax.isfinite() & (amax > 0)
    scale_factor = torch.where(
        is_usable_amax, divide_to_nearest_float32(_make_filled_tensor(amax, fmt.largest), amax), 1.0
    ).clamp(max=_LARGEST_SCALE_FACTOR)
    if rounding is ScaleRounding.POWER_OF_TWO:
        scale_factor = scale_factor.view(torch.int32).bitwise_and(_EXPONENT_MASK).view(torch.float32)
    return scale_factor


def divide_to_nearest_float32(dividend: Tensor, divisor: Tensor) -> Tensor:
    """Returns the correctly rounded float32 quotient. In a compiled GPU kernel, the plain quotient by a constant, or
    a reciprocal, may differ from it in the last bit.

    On a GPU it divides in float64. The quotient of two 24-bit numbers is never so close to the middle of two floats
    that rounding it twice gives another result.
    """
    if divisor.device.type == "cpu":
        return dividend / divisor
    return (dividend.to(torch.float64) / divisor.to(torch.float64)).to(torch.float32)


def reciprocal(factor: Tensor) -> Tensor:
    """Returns the correctly rounded float32 reciprocal of a factor."""
    return (
        factor.reciprocal()
        if factor.device.type == "cpu"
        else divide_to_nearest_float32(torch.ones_like(factor), factor)
    )


def mx_scale(amax: Tensor, fmt: Format, rounding: ScaleRounding) -> tuple[Tensor, Tensor]:
    """Returns the e8m0 scale of MX blocks as float32, and its inverse.

    Let E be the exponent of amax, and e the exponent of the format's largest value. With FLOOR the scale is 2^(E -
    e). With EVEN, amax is first rounded to the mantissa bits of the elements. With CEIL, amax is first rounded up to
    a power of two. With RCEIL the scale is the power of two at or above the exact quotient amax / largest.

    The smallest scale is 2^-127, which blocks of zeros have too. The largest is 2^(128 - e), for blocks with an
    infinity. The scale is NaN where amax is NaN. The inverse is a number even there.
    """
    carry_bits = compute_mx_rounding_carry(fmt, rounding)
    bits = amax.view(torch.int32).bitwise_and(_MAGNITUDE_MASK)  # a NaN may have either sign
    # Treat NaN as infinity here, so that the carry cannot reach the sign bit.
    raised_exponent_bits = (bits.clamp(max=_EXPONENT_MASK) + carry_bits).bitwise_and(_EXPONENT_MASK)
    scale_exponent_bits = (raised_exponent_bits - mx_largest_exponent(fmt)).clamp(min=0)
    scale = _make_power_of_two(scale_exponent_bits)
    scale_inverse = _make_power_of_two(_RECIPROCAL_EXPONENT_BITS - scale_exponent_bits)
    # `nan_mask` has all bits set where amax is NaN. It replaces torch.where, which for single blocks would take longer
    # than all other operations.
    nan_mask = (_EXPONENT_MASK - bits).bitwise_right_shift(_SIGN_BIT)
    scale_or_nan = scale.view(torch.int32).bitwise_or(nan_mask).view(torch.float32)
    return scale_or_nan, scale_inverse


def compute_mx_rounding_carry(fmt: Format, rounding: ScaleRounding) -> int:
    """Returns the number that is added to the bits of amax before its mantissa is dropped. A carry into the exponent
    doubles the scale. The carry occurs in these cases.

    - FLOOR: never.
    - EVEN: if amax rounds to the next power of two in the mantissa bits of the elements. A tie rounds up.
    - CEIL: if the mantissa is above zero.
    - RCEIL: if the mantissa is above that of the format's largest value.
    """
    return {
        ScaleRounding.RCEIL: _MANTISSA_MASK - (view_float_as_bits(fmt.largest) & _MANTISSA_MASK),
        ScaleRounding.CEIL: _MANTISSA_MASK,
        ScaleRounding.EVEN: 1 << (_MANTISSA_BITS - fmt.mantissa_bits - 1),
        ScaleRounding.FLOOR: 0,
    }[rounding]


def mx_largest_exponent(fmt: Format) -> int:
    """Returns the exponent of the format's largest value, shifted to the exponent bits of a float32."""
    return fmt.max_exponent << _MANTISSA_BITS


def nvfp4_tensor_scale(amax: Tensor) -> Tensor:
    """Returns the scale of an NVFP4 tensor, amax / (448 * 6). 448 is the largest block scale, and 6 the largest
    element. The scale is at least 2^-126, and 1 where amax is zero, infinite or NaN.
    """
    is_usable_amax = amax.isfinite() & (amax > 0)
    scale = divide_to_nearest_float32(amax, _make_filled_tensor(amax, E4M3.largest * E2M1.largest))
    return torch.where(is_usable_amax, scale, 1.0).clamp(min=_SMALLEST_NORMAL)


def nvfp4_block_scale(amax: Tensor, tensor_scale: Tensor, rounding: ScaleRounding) -> Tensor:
    """Returns the e4m3 scale of NVFP4 blocks as float32: amax / 6 / tensor_scale, rounded to nearest even or up.

    Infinity becomes 448, and NaN stays NaN. If NEAREST rounds a scale to zero, all elements of its block become zero.
    """
    scale = divide_to_nearest_float32(
        divide_to_nearest_float32(amax, _make_filled_tensor(amax, E2M1.largest)), tensor_scale
    )
    return _round_up_to_grid(scale, E4M3) if rounding is ScaleRounding.UP else round_values(scale, E4M3)


def compute_block_maxima(blocks: Tensor, block_dimensions: tuple[int, ...] | None = None) -> Tensor:
    """Returns the largest value of each block, or NaN if a value of the block is NaN. The reduced dimensions stay,
    with size 1.
    """
    return blocks.amax(block_dimensions or ((1, 3) if blocks.dim() == _RECTANGLE_DIMENSIONS else (1,)), keepdim=True)


def compute_decoding_scales(amax: Tensor, fmt: Format, scaling: Scaling) -> Tensor:
    """Returns for each block the number by which its elements are multiplied to decode them. `amax` has the largest
    magnitude of each block. With e8m0 and e4m3 scales, the number is NaN where amax is NaN.
    """
    if scaling.scale is None:
        return reciprocal(float_factor(amax, fmt, scaling.rounding))
    if scaling.scale is E8M0:
        return mx_scale(amax, fmt, scaling.rounding)[0]
    tensor_scale = nvfp4_tensor_scale(amax.amax())
    return nvfp4_block_scale(amax, tensor_scale, scaling.rounding) * tensor_scale


def _make_filled_tensor(amax: Tensor, number: float) -> Tensor:
    """Returns a tensor filled with a number. Divisions need it, because torch may replace a division by a plain
    number by a multiplication.
    """
    return torch.full_like(amax, number)


def _round_up_to_grid(values: Tensor, fmt: Format) -> Tensor:
    """Rounds magnitudes up to the format's grid, at most to the format's largest value."""
    # The grid spacing at a magnitude is the power of two at or below it, divided by 2^mantissa_bits. Below the format's
    # smallest normal number, the spacing is constant.
    smallest_exponent_bits = (fmt.min_exponent + _EXPONENT_BIAS) << _MANTISSA_BITS
    exponent_bits = values.view(torch.int32).bitwise_and(_EXPONENT_MASK).clamp(min=smallest_exponent_bits)
    grid_spacing_bits = exponent_bits - (fmt.mantissa_bits << _MANTISSA_BITS)
    grid_spacing_inverse_bits = _RECIPROCAL_EXPONENT_BITS - grid_spacing_bits
    spacing_multiples = (values * grid_spacing_inverse_bits.view(torch.float32)).ceil()
    return (spacing_multiples * grid_spacing_bits.view(torch.float32)).clamp(max=fmt.largest)


def _make_power_of_two(exponent_bits: Tensor) -> Tensor:
    """Returns the float32 powers of two with these exponent bits, which are already shifted to their position. Exponent
    bits of 0 or less give 2^-127.
    """
    # 2^-127 is subnormal: it has the exponent bits 0, and only the highest mantissa bit is set.
    return exponent_bits.clamp(min=1 << (_MANTISSA_BITS - 1)).view(torch.float32)


TensorLanes = Sequence[Tensor]

# These modes round scales up, so that only an infinite element can saturate. It decodes to infinity in any case.
_SATURATION_FREE_ROUNDINGS = (ScaleRounding.RCEIL, ScaleRounding.CEIL)


def block_values(
    lanes: TensorLanes,
    fmt: Format,
    scaling: Scaling,
    tensor_scale: Tensor | None = None,
    random: TensorLanes | None = None,
) -> list[Tensor]:
    """Returns the values of blocks after rounding with this format and scaling, in the same layout.

    With `random`, which has a number for each element, rounding is stochastic. `tensor_scale` is NVFP4's tensor scale.
    If it is not given, it is computed from these blocks.
    """
    rounded_lanes = block_magnitudes([lane.abs() for lane in lanes], fmt, scaling, tensor_scale, random)
    return [copy_signs(tensor, lane, fmt) for tensor, lane in zip(rounded_lanes, lanes, strict=True)]


def block_magnitudes(
    magnitudes: TensorLanes,
    fmt: Format,
    scaling: Scaling,
    tensor_scale: Tensor | None = None,
    random: TensorLanes | None = None,
    scales_first: bool = False,
) -> list[Tensor]:
    """Rounds magnitudes (numbers without signs) as `block_values` does. With `scales_first`, computes all scales before
    it rounds an element, which makes fused CPU kernels faster.
    """
    scaled_blocks = _scale_blocks(magnitudes, fmt, scaling, tensor_scale, scales_first)
    # Stochastic rounding divides a number by the grid's spacing: it multiplies by a power of two with the exponent bits
    # 254 + mantissa_bits - (those of the number). For infinity (255) and one mantissa bit, this power is 0, and the
    # product is NaN. So such an infinity must saturate first.
    may_lose_infinity = random is not None and fmt.mantissa_bits == 1
    elements = _round_elements(
        scaled_blocks,
        fmt,
        scaling,
        random,
        saturate=may_lose_infinity or scaling.rounding not in _SATURATION_FREE_ROUNDINGS,
    )
    return [element * scaled_blocks.decoding_scales for element in elements]


def block_elements(
    lanes: TensorLanes,
    fmt: Format,
    scaling: Scaling,
    tensor_scale: Tensor | None = None,
    random: TensorLanes | None = None,
    block_dimensions: tuple[int, ...] | None = None,
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Returns elements on the format's grid, the blocks' scales, and NVFP4's tensor scale. In the scales, the
    dimensions of a block have size 1.

    `block_dimensions` are the dimensions of a block, for layouts other than the two of this module. With e8m0 and e4m3
    scales, a NaN makes the scale of its block NaN, and the elements of the block are then meaningless. With float32
    scales only the NaN itself is NaN.
    """
    scaled_blocks = _scale_blocks(
        [lane.abs() for lane in lanes],
        fmt,
        scaling,
        tensor_scale,
        scales_first=False,
        block_dimensions=block_dimensions,
    )
    elements = _round_elements(scaled_blocks, fmt, scaling, random, saturate=True)
    return (
        [copy_signs(element, lane, fmt) for element, lane in zip(elements, lanes, strict=True)],
        scaled_blocks.scales,
        scaled_blocks.tensor_scale,
    )


class _ScaledBlocks(NamedTuple):
    """Blocks that are scaled and not yet rounded. Multiply an element by `decoding_scales` to decode it. `tensor_scale`
    is NVFP4's.
    """

    magnitudes: list[Tensor]
    scales: Tensor
    tensor_scale: Tensor | None
    decoding_scales: Tensor


def _scale_blocks(
    magnitudes: TensorLanes,
    fmt: Format,
    scaling: Scaling,
    tensor_scale: Tensor | None,
    scales_first: bool,
    block_dimensions: tuple[int, ...] | None = None,
) -> _ScaledBlocks:
    amax = compute_block_maxima(reduce(torch.maximum, magnitudes), block_dimensions)
    store_scales_function: Callable[[Tensor], Tensor] = _store_scales if scales_first else lambda scales: scales
    # For float32 scales, multiply by the inverse. Then a kernel divides once for a block instead of once for an
    # element.
    if scaling.scale is None:
        scale_factor = store_scales_function(float_factor(amax, fmt, scaling.rounding))
        scales = store_scales_function(reciprocal(scale_factor))
        return _ScaledBlocks([magnitude * scale_factor for magnitude in magnitudes], scales, None, scales)
    # MX scales are powers of two, so multiplying by the inverse is exact.
    if scaling.scale is E8M0:
        scales, scale_inverse = map(store_scales_function, mx_scale(amax, fmt, scaling.rounding))
        return _ScaledBlocks([magnitude * scale_inverse for magnitude in magnitudes], scales, None, scales)
    # The maximum of all blocks is the maximum of the tensor, so no second pass over the tensor is needed.
    chosen_tensor_scale = nvfp4_tensor_scale(amax.amax()) if tensor_scale is None else tensor_scale
    scales = nvfp4_block_scale(amax, chosen_tensor_scale, scaling.rounding)
    decoding_scales = store_scales_function(scales * chosen_tensor_scale)
    # where a scale is zero, every element becomes zero and keeps its sign
    magnitude_divisor = torch.where(decoding_scales == 0, torch.inf, decoding_scales)
    return _ScaledBlocks(
        [magnitude / magnitude_divisor for magnitude in magnitudes], scales, chosen_tensor_scale, decoding_scales
    )


def _round_elements(
    scaled: _ScaledBlocks, fmt: Format, scaling: Scaling, random: TensorLanes | None, saturate: bool
) -> list[Tensor]:
    random_lanes: Sequence[Tensor | None] = random or [None] * len(scaled.magnitudes)
    lane_pairs = list(zip(scaled.magnitudes, random_lanes, strict=True))
    # A float32 scale is 1 if a block has an infinity or a NaN. So saturate, and keep NaN.
    if scaling.scale is None:
        return [round_magnitudes(tensor, fmt, random_lane) for tensor, random_lane in lane_pairs]
    # If a block has a NaN, any other scale is NaN already, so the elements of the block may be numbers.
    if saturate:
        lane_pairs = [(limit_magnitudes(tensor, fmt), random_lane) for tensor, random_lane in lane_pairs]
    return [round_to_grid(tensor, fmt, random_lane) for tensor, random_lane in lane_pairs]


def _store_scales(scales: Tensor) -> Tensor:
    """Makes torch's compiler (Inductor) store the scales in memory, instead of computing them again. Then the loop that
    it generates handles vectors of scales.
    """
    return scales.as_strided(scales.shape, scales.stride())
