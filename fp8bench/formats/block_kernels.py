"""Blocks that share a scale: elements and scales of each scaling, as pure functions that can be traced.

Blocks come in one of two layouts, whole (what is missing at an end is filled with zeros): (blocks, size) where a
block is part of a row, and (down, rows, across, columns) where it is a rectangle. float32, bfloat16 or float16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8bench.formats.grids import E4M3, E8M0, Format
from fp8bench.formats.rounding import nearest, stochastic
from fp8bench.formats.scales import float_factor, mx_scale, nvfp4_block_scale
from fp8bench.formats.scalings import Scaling

RECTANGLE_DIMENSIONS = 4


def block_values(
    blocks: Tensor, fmt: Format, scaling: Scaling, tensor_scale: Tensor | None = None, random: Tensor | None = None
) -> Tensor:
    """`blocks` as the float32 values that their format and scaling leave of them, in the same layout.

    `tensor_scale` is NVFP4's; with `random` numbers for each element rounding is stochastic.
    """
    elements, scales = block_elements(blocks, fmt, scaling, tensor_scale, random)
    return elements * (scales if tensor_scale is None else scales * tensor_scale)


def block_elements(
    blocks: Tensor, fmt: Format, scaling: Scaling, tensor_scale: Tensor | None = None, random: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Elements on the format's grid and the blocks' scales, all of them float32; scales keep reduced dimensions.

    A NaN makes the scale of its block NaN where scales are e8m0 or e4m3; under float32 scales it stays alone.
    """
    values = blocks.to(torch.float32)
    amax = block_amax(values)
    if scaling.scale is E8M0:
        scales, inverse = mx_scale(amax, fmt, scaling.rounding)
        scaled = values * inverse
    elif scaling.scale is E4M3:
        assert tensor_scale is not None
        scales = nvfp4_block_scale(amax, tensor_scale, scaling.rounding)
        scaled = values / _divisor(scales * tensor_scale)
    else:
        factor = float_factor(amax, fmt, scaling.rounding)
        scales, scaled = factor.reciprocal(), values * factor
    return nearest(scaled, fmt) if random is None else stochastic(scaled, fmt, random), scales


def block_amax(blocks: Tensor) -> Tensor:
    """The largest magnitude of each block, reduced dimensions kept; NaN where one is among them."""
    inside = (1, 3) if blocks.dim() == RECTANGLE_DIMENSIONS else (1,)
    # On a CPU, abs() would write a tensor of the same size first: eight times slower.
    return torch.maximum(blocks.amax(inside, keepdim=True), -blocks.amin(inside, keepdim=True)).abs()


def _divisor(scale: Tensor) -> Tensor:
    """Under a scale of zero every element is zero, with its sign."""
    return torch.where(scale == 0, torch.inf, scale)
