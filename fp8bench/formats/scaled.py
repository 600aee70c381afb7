"""Tensors under a scaling: the values that are left of them, and how they are stored.

The last dimension is a product's contraction; all others together count rows. Incomplete blocks are filled with zeros
that are not kept. Scales without a finite value (for zeros, infinities, NaN) never turn numbers into NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8bench.formats.blocks import (
    block_elements,
    block_values,
    float_factor,
    inverse_of,
    largest_of,
    nvfp4_tensor_scale,
    steps_of,
)
from fp8bench.formats.codes import encode, pack
from fp8bench.formats.grids import E4M3, Format
from fp8bench.formats.quantise import check_input, check_output, random_bits, round_to
from fp8bench.formats.recipes import Scaling


@dataclass(frozen=True)
class Scaled:
    """A tensor in storage: codes and their scales. value = element * scale (* tensor scale).

    `codes` have the tensor's shape, with two e2m1 codes in a byte of the last dimension. `scales` are bytes of a format
    of scales, else float32: one, one a row (rows, 1), or one a block (down, across). None: no scaling.
    """

    codes: Tensor
    scales: Tensor | None
    tensor_scale: Tensor | None
    fmt: Format
    scaling: Scaling | None
    shape: torch.Size


def values(
    x: Tensor,
    fmt: Format,
    scaling: Scaling | None,
    *,
    seed: Tensor | None = None,
    scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The values that format and scaling leave of `x`: float32, or in `out`.

    Rounded to nearest even, or stochastically with a seed (see round_to; elements are counted row by row, filling
    included). `scale` is a factor that replaces the current one of a tensor or row. An infinity becomes the largest
    value; in an MX block its value is infinity. A NaN stays, and under e8m0 and e4m3 scales makes its whole block NaN.
    """
    check_input(x)
    check_scaling(fmt, scaling, scale)
    # Refused before anything is computed, with the names of the caller's arguments.
    if out is not None:
        check_output(out, x)
    if scaling is None:
        return round_to(x, fmt, out, seed=seed)
    # One scale for a tensor or a row needs no blocks, and nothing to fill up.
    if _whole(scaling):
        elements, inverse = _whole_elements(x, fmt, scaling, seed, scale)
        result = elements.mul_(inverse)
    else:
        blocks = _blocks(x, scaling)
        (result,) = block_values([blocks], fmt, scaling, _empty_scale(x, scaling), _random(blocks, seed))
        result = _from_blocks(result, x.shape, scaling)
    return result if out is None else out.copy_(result)


def factor(x: Tensor, fmt: Format, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """The factor of a tensor's elements, or of each row's, and its inverse, the scale that decodes.

    float32 without dimensions, or with one column for rows, on the tensor's device: the host reads no value.
    """
    check_input(x)
    if not _whole(scaling):
        raise ValueError(f"a tensor or a row has one factor, and {scaling.name} has blocks")
    amax = _row_magnitudes(x.detach()) if scaling.rows == 1 and x.dim() else largest_magnitude(x)
    scale = float_factor(amax, fmt, scaling.rounding)
    return scale, inverse_of(scale)


def quantise(
    x: Tensor,
    fmt: Format,
    scaling: Scaling | None,
    *,
    seed: Tensor | None = None,
    scale: Tensor | None = None,
    checked: bool = True,
) -> Scaled:
    """Returns `x` as codes and scales: element times scale is what `values` returns, bit for bit. Raises UsageError for
    a NaN where neither the format nor the scale has a code for it; if not `checked`, this is not tested, and the host
    does not wait for the device. A block whose scale is NaN is stored as zeros."""
    check_input(x)
    check_scaling(fmt, scaling, scale)
    if scaling is None:
        return _pack_elements(round_to(x, fmt, seed=seed), None, None, fmt, scaling, checked)
    if _whole(scaling):
        elements, scales = _whole_elements(x, fmt, scaling, seed, scale)
        return _pack_elements(elements, scales, None, fmt, scaling, checked)
    blocks = _blocks(x, scaling)
    (elements,), scales, tensor_scale = block_elements(
        [blocks], fmt, scaling, _empty_scale(x, scaling), _random(blocks, seed)
    )
    # A NaN scale decodes to NaN whatever the elements are, so they are stored as zeros.
    if scaling.scale is not None:
        elements = torch.where(scales.isnan(), 0.0, elements)
    return _pack_elements(_from_blocks(elements, x.shape, scaling), scales, tensor_scale, fmt, scaling, checked)


class Blocks(NamedTuple):
    """Magnitudes as blocks that share a scale, the largest of each, and what its elements are multiplied by to become
    values."""

    magnitudes: Tensor
    peaks: Tensor
    steps: Tensor


def blocks_of(magnitudes: Tensor, fmt: Format, scaling: Scaling, scale: Tensor | None = None) -> Blocks:
    """The blocks of a tensor's magnitudes, in a layout of blocks.py, with steps as in `values`. Rounds nothing.

    `scale` replaces the current one of a tensor or row. Ends are filled with zeros.
    """
    check_scaling(fmt, scaling, scale)
    if _whole(scaling):
        peaks = magnitudes.amax(-1, keepdim=True) if scaling.rows else largest_magnitude(magnitudes)
        steps = steps_of(peaks, fmt, scaling) if scale is None else inverse_of(scale)
        return Blocks(magnitudes, peaks, steps)
    blocks = _blocks(magnitudes, scaling)
    peaks = largest_of(blocks)
    return Blocks(blocks, peaks, steps_of(peaks, fmt, scaling))


def check_scaling(fmt: Format, scaling: Scaling | None, scale: Tensor | None = None) -> None:
    if scaling is not None:
        scaling.check(fmt)
    if scale is not None and (scaling is None or not _whole(scaling)):
        raise ValueError(f"a given scale is for the scaling of a tensor or of rows, not {scaling and scaling.name}")


def _whole(scaling: Scaling) -> bool:
    """Whether one float32 scale serves a tensor or a row: then elements can stay where they lie."""
    return scaling.scale is None and scaling.columns == 0 and scaling.rows <= 1


def _whole_elements(
    x: Tensor, fmt: Format, scaling: Scaling, seed: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    scale = factor(x, fmt, scaling)[0] if scale is None else scale
    return round_to(x.detach().to(torch.float32) * scale, fmt, seed=seed), inverse_of(scale)


def largest_magnitude(x: Tensor) -> Tensor:
    """float32 on its device; 0 for a tensor without elements, NaN where one is among them."""
    x = x.detach()
    if not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    if x.is_meta:  # reads as much; torch's norm of a meta tensor would import the compiler
        return torch.sum(x, dtype=torch.float32)
    if x.device.type != "cpu":
        largest: Tensor = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)  # one kernel
        return largest
    # Reads the tensor once, in memory order, without a temporary of its size; abs().amax() is 12 times slower here.
    low, high = torch.aminmax(x.t() if x.dim() == 2 and not x.is_contiguous() else x)
    return torch.maximum(low.neg(), high).abs().to(torch.float32)


def _row_magnitudes(x: Tensor) -> Tensor:
    if not x.numel():
        return torch.zeros((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    return torch.maximum(x.amin(-1, keepdim=True).neg(), x.amax(-1, keepdim=True)).abs().to(torch.float32)


def current_tensor_scale(x: Tensor) -> Tensor:
    return nvfp4_tensor_scale(largest_magnitude(x))


def _empty_scale(x: Tensor, scaling: Scaling) -> Tensor | None:
    """NVFP4's tensor scale for a tensor without blocks to compute it from."""
    return current_tensor_scale(x) if scaling.scale is E4M3 and not x.numel() else None


def _random(blocks: Tensor, seed: Tensor | None) -> list[Tensor] | None:
    return None if seed is None else [random_bits(blocks.shape, seed)]


def _blocks(x: Tensor, scaling: Scaling) -> Tensor:
    down, across, columns = _grid(x.shape, scaling)
    height, width = matrix_of(x.shape)
    matrix = x.detach().reshape(height, width).to(torch.float32)
    if down * scaling.rows != height or across * columns != width:
        matrix = pad(matrix, (0, across * columns - width, 0, down * scaling.rows - height))
    if scaling.rows == 1:
        return matrix.reshape(down * across, columns)
    return matrix.reshape(down, scaling.rows, across, columns)


def _from_blocks(blocks: Tensor, shape: torch.Size, scaling: Scaling) -> Tensor:
    down, across, columns = _grid(shape, scaling)
    height, width = matrix_of(shape)
    filled = blocks.reshape(down * scaling.rows, across * columns)
    return filled[:height, :width].reshape(shape).contiguous()


def _grid(shape: torch.Size, scaling: Scaling) -> tuple[int, int, int]:
    height, width = matrix_of(shape)
    columns = scaling.columns or max(width, 1)
    across = -(-width // columns) if scaling.columns else 1
    return -(-height // scaling.rows), across, columns


def matrix_of(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns of a tensor whose last dimension is its columns; a tensor without dimensions is one element."""
    return prod(shape[:-1]), shape[-1] if shape else 1


def _pack_elements(
    elements: Tensor,
    scales: Tensor | None,
    tensor_scale: Tensor | None,
    fmt: Format,
    scaling: Scaling | None,
    checked: bool,
) -> Scaled:
    shape = elements.shape
    codes = pack(encode(elements if shape else elements.view(1), fmt, checked=checked), fmt)
    if scales is not None and scaling is not None:
        scales = scales if scaling.scale is None else encode(scales, scaling.scale, checked=False)
        scales = scales.reshape(() if not scaling.rows else _grid(shape, scaling)[:2])
    return Scaled(codes, scales, tensor_scale, fmt, scaling, shape)
