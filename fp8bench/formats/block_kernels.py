"""Blocks that share a scale: elements and scales of each scaling, as pure functions that can be traced.

Blocks come in one of two layouts, whole (what is missing at an end is filled with zeros): (blocks, size) where a
block is part of a row, and (down, rows, across, columns) where it is a rectangle. Their values are float32, in one
tensor or in several of one shape that together hold the blocks: lanes.py says what that is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from fp8bench.formats.grids import E8M0, Format
from fp8bench.formats.rounding import on_grid, rounded_magnitudes, saturated, signed
from fp8bench.formats.scales import float_factor, mx_scale, nvfp4_block_scale, nvfp4_tensor_scale
from fp8bench.formats.scalings import ScaleRounding, Scaling

RECTANGLE_DIMENSIONS = 4

Lanes = Sequence[Tensor]

_NEVER_ABOVE = (ScaleRounding.RCEIL, ScaleRounding.CEIL)
"""Under them no number exceeds the largest element, but for infinities."""


def block_values(
    lanes: Lanes, fmt: Format, scaling: Scaling, tensor_scale: Tensor | None = None, random: Lanes | None = None
) -> list[Tensor]:
    """What their format and scaling leave of the blocks, in the same layout.

    With `random` numbers for each element rounding is stochastic. `tensor_scale` is NVFP4's, from these blocks unless
    it is given.
    """
    left = magnitudes_left([lane.abs() for lane in lanes], fmt, scaling, tensor_scale, random)
    return [signed(one, lane, fmt) for one, lane in zip(left, lanes, strict=True)]


def magnitudes_left(
    magnitudes: Lanes,
    fmt: Format,
    scaling: Scaling,
    tensor_scale: Tensor | None = None,
    random: Lanes | None = None,
    apart: bool = False,
) -> list[Tensor]:
    """The same of numbers without signs; `apart` has a fused kernel make all scales before the first element."""
    scaled = _scaled(magnitudes, fmt, scaling, tensor_scale, apart)
    # An infinite element stays one under these scales, and so does its value either way.
    elements = _elements(scaled, fmt, scaling, random, saturate=scaling.rounding not in _NEVER_ABOVE)
    return [one * scaled.left for one in elements]


def block_elements(
    lanes: Lanes, fmt: Format, scaling: Scaling, tensor_scale: Tensor | None = None, random: Lanes | None = None
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Elements on the format's grid, the blocks' scales, NVFP4's tensor scale; scales keep reduced dimensions.

    A NaN makes the scale of its block NaN where scales are e8m0 or e4m3 (elements are then numbers without meaning);
    under float32 scales it stays alone.
    """
    scaled = _scaled([lane.abs() for lane in lanes], fmt, scaling, tensor_scale, apart=False)
    elements = _elements(scaled, fmt, scaling, random, saturate=True)
    return [signed(one, lane, fmt) for one, lane in zip(elements, lanes, strict=True)], scaled.scales, scaled.above


def block_amax(magnitudes: Lanes) -> Tensor:
    """The largest of each block, reduced dimensions kept; NaN where one is among them."""
    inside = (1, 3) if magnitudes[0].dim() == RECTANGLE_DIMENSIONS else (1,)
    return reduce(torch.maximum, magnitudes).amax(inside, keepdim=True)


class _Scaled(NamedTuple):
    """Magnitudes before they are rounded, the blocks' scales, NVFP4's tensor scale, and what elements are times."""

    magnitudes: list[Tensor]
    scales: Tensor
    above: Tensor | None
    left: Tensor


def _scaled(magnitudes: Lanes, fmt: Format, scaling: Scaling, tensor_scale: Tensor | None, apart: bool) -> _Scaled:
    amax, kept = block_amax(magnitudes), _kept if apart else _inline
    if scaling.scale is None:
        factor = kept(float_factor(amax, fmt, scaling.rounding))
        scales = kept(factor.reciprocal())
        return _Scaled([one * factor for one in magnitudes], scales, None, scales)
    if scaling.scale is E8M0:
        scales, inverse = map(kept, mx_scale(amax, fmt, scaling.rounding))
        return _Scaled([one * inverse for one in magnitudes], scales, None, scales)
    # From the blocks' amaxes: a pass over the tensor less than if it were asked for its own.
    above = nvfp4_tensor_scale(amax.amax()) if tensor_scale is None else tensor_scale
    scales = nvfp4_block_scale(amax, above, scaling.rounding)
    left = kept(scales * above)
    divisor = torch.where(left == 0, torch.inf, left)  # under a scale of zero every element is zero, with its sign
    return _Scaled([one / divisor for one in magnitudes], scales, above, left)


def _elements(scaled: _Scaled, fmt: Format, scaling: Scaling, random: Lanes | None, saturate: bool) -> list[Tensor]:
    drawn: Sequence[Tensor | None] = random or [None] * len(scaled.magnitudes)
    pairs = list(zip(scaled.magnitudes, drawn, strict=True))
    if scaling.scale is None:
        return [rounded_magnitudes(one, fmt, by) for one, by in pairs]
    # A NaN is in its block's scale already.
    return [on_grid(saturated(one, fmt) if saturate else one, fmt, by) for one, by in pairs]


def _kept(scales: Tensor) -> Tensor:
    """In memory of their own: Inductor repeats no operation before this one, and its loop has vectors of scales."""
    return scales.as_strided(scales.shape, scales.stride())


def _inline(scales: Tensor) -> Tensor:
    return scales
