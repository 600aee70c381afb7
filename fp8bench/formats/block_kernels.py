"""Blocks that share a scale: elements and scales of each scaling, as pure functions that can be traced.

Blocks come in one of two layouts, whole (what is missing at an end is filled with zeros): (blocks, size) where a
block is part of a row, and (down, rows, across, columns) where it is a rectangle. Their values are float32, in one
tensor or in several of one shape that together hold the blocks: lanes.py says what that is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from fp8bench.formats.grids import E8M0, Format
from fp8bench.formats.rounding import drawn_magnitudes, nearest, nearest_magnitudes, saturated, signed, stochastic
from fp8bench.formats.scales import float_factor, mx_scale, nvfp4_block_scale, nvfp4_tensor_scale
from fp8bench.formats.scalings import Scaling

RECTANGLE_DIMENSIONS = 4

Lanes = Sequence[Tensor]


def block_values(
    lanes: Lanes, fmt: Format, scaling: Scaling, tensor_scale: Tensor | None = None, random: Lanes | None = None
) -> list[Tensor]:
    """What their format and scaling leave of the blocks, in the same layout.

    With `random` numbers for each element rounding is stochastic. `tensor_scale` is NVFP4's, from these blocks unless
    it is given.
    """
    elements, scales, above = block_elements(lanes, fmt, scaling, tensor_scale, random)
    left = scales if above is None else scales * above
    return [one * left for one in elements]


def block_elements(
    lanes: Lanes, fmt: Format, scaling: Scaling, tensor_scale: Tensor | None = None, random: Lanes | None = None
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Elements on the format's grid, the blocks' scales, NVFP4's tensor scale; scales keep reduced dimensions.

    A NaN makes the scale of its block NaN where scales are e8m0 or e4m3 (elements are then numbers without meaning);
    under float32 scales it stays alone.
    """
    magnitudes = [lane.abs() for lane in lanes]
    amax = block_amax(magnitudes)
    drawn: Sequence[Tensor | None] = random or [None] * len(lanes)
    if scaling.scale is None:
        factor = float_factor(amax, fmt, scaling.rounding)
        rounded = [_rounded(lane * factor, fmt, one) for lane, one in zip(lanes, drawn, strict=True)]
        return rounded, factor.reciprocal(), None
    if scaling.scale is E8M0:
        scales, inverse = mx_scale(amax, fmt, scaling.rounding)
        scaled = [one * inverse for one in magnitudes]
    else:
        # From the blocks' amaxes: a pass over the tensor less than if it were asked for its own.
        tensor_scale = nvfp4_tensor_scale(amax.amax()) if tensor_scale is None else tensor_scale
        scales = nvfp4_block_scale(amax, tensor_scale, scaling.rounding)
        divisor = _divisor(scales * tensor_scale)
        scaled = [one / divisor for one in magnitudes]
    rounded = [_rounded_magnitudes(saturated(one, fmt), fmt, by) for one, by in zip(scaled, drawn, strict=True)]
    return [signed(one, lane, fmt) for one, lane in zip(rounded, lanes, strict=True)], scales, tensor_scale


def block_amax(magnitudes: Lanes) -> Tensor:
    """The largest of each block, reduced dimensions kept; NaN where one is among them."""
    inside = (1, 3) if magnitudes[0].dim() == RECTANGLE_DIMENSIONS else (1,)
    return reduce(torch.maximum, magnitudes).amax(inside, keepdim=True)


def _rounded(values: Tensor, fmt: Format, random: Tensor | None) -> Tensor:
    return nearest(values, fmt) if random is None else stochastic(values, fmt, random)


def _rounded_magnitudes(magnitudes: Tensor, fmt: Format, random: Tensor | None) -> Tensor:
    return nearest_magnitudes(magnitudes, fmt) if random is None else drawn_magnitudes(magnitudes, fmt, random)


def _divisor(scale: Tensor) -> Tensor:
    """Under a scale of zero every element is zero, with its sign."""
    return torch.where(scale == 0, torch.inf, scale)
