"""Tensors with scales: their values after rounding, and how they are stored.

A product sums over the last dimension of a tensor, the contraction. All other dimensions together count as rows.
Incomplete blocks are filled with zeros, which are dropped afterwards. A block of zeros, or a block with an infinity,
gets a scale that turns no number into NaN.
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
    compute_block_maxima,
    compute_decoding_scales,
    float_factor,
    nvfp4_tensor_scale,
    reciprocal,
)
from fp8bench.formats.codes import encode, pack_codes
from fp8bench.formats.grids import E4M3, Format
from fp8bench.formats.quantise import check_input, random_bits, round_to
from fp8bench.formats.recipes import Scaling, count_blocks


@dataclass(frozen=True)
class ScaledTensor:
    """A stored tensor: codes and their scales. value = element * scale (* tensor scale).

    `codes` have the tensor's shape, but in the last dimension two e2m1 codes share a byte. `scales` are codes of the
    scale format, or float32. There is one for the tensor, one for each row (rows, 1), or one for each block (down,
    across). None means no scaling.
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
    """Returns the values of `x` after rounding with this format and scaling, as float32 or in `out`.

    Rounding is to nearest even, or stochastic with a seed (see round_to). For random numbers, elements are counted row
    by row, including those that fill blocks. `scale` is a factor for the tensor or for each row, which replaces the
    factor computed from `x`. An infinity becomes the largest value, but in an MX block it stays infinite. A NaN stays
    NaN, and with e8m0 or e4m3 scales its whole block becomes NaN.
    """
    check_input(x)
    if scaling is None:
        return round_to(x, fmt, out, seed=seed)
    # If the tensor or each row has one scale, no blocks are needed, so nothing is filled with zeros.
    if _has_no_blocks(scaling):
        elements, inverse = _scale_elements(x, fmt, scaling, seed, scale)
        result = elements.mul_(inverse)
    else:
        blocks = _split_blocks(x, scaling)
        (result,) = block_values([blocks], fmt, scaling, _make_empty_scale(x, scaling), _draw_random_bits(blocks, seed))
        result = _join_blocks(result, x.shape, scaling)
    return result if out is None else out.copy_(result)


def factor(x: Tensor, fmt: Format, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Returns the factor by which elements are multiplied before their cast, for the tensor or for each row. Also
    returns the inverse of the factor, which decodes.

    Both results are float32 on the tensor's device. They have no dimensions, or one column if each row has a factor.
    The host does not wait for them.
    """
    check_input(x)
    amax = _find_row_magnitudes(x.detach()) if scaling.rows == 1 and x.dim() else largest_magnitude(x)
    scale = float_factor(amax, fmt, scaling.rounding)
    return scale, reciprocal(scale)


def quantise(
    x: Tensor,
    fmt: Format,
    scaling: Scaling | None,
    *,
    seed: Tensor | None = None,
) -> ScaledTensor:
    """Returns `x` as codes and scales. Decoding them (element * scale) gives the result of `values` bit for bit. A
    block whose scale is NaN is stored as zeros. A NaN gets an arbitrary code if neither the format nor the scale has a
    code for it.
    """
    check_input(x)
    if scaling is None:
        return _pack_elements(round_to(x, fmt, seed=seed), None, None, fmt, scaling)
    if _has_no_blocks(scaling):
        elements, scales = _scale_elements(x, fmt, scaling, seed, None)
        return _pack_elements(elements, scales, None, fmt, scaling)
    blocks = _split_blocks(x, scaling)
    (elements,), scales, tensor_scale = block_elements(
        [blocks], fmt, scaling, _make_empty_scale(x, scaling), _draw_random_bits(blocks, seed)
    )
    # Store zeros where the scale is NaN. They decode to NaN anyway.
    if scaling.scale is not None:
        elements = torch.where(scales.isnan(), 0.0, elements)
    return _pack_elements(_join_blocks(elements, x.shape, scaling), scales, tensor_scale, fmt, scaling)


class ScaleBlocks(NamedTuple):
    """The magnitudes of a tensor in blocks that share a scale. `peaks` are the largest magnitudes of the blocks.
    `decoding_scales` has a number for each block, by which its elements are multiplied to decode them.
    """

    magnitudes: Tensor
    peaks: Tensor
    decoding_scales: Tensor


def split_into_blocks(magnitudes: Tensor, fmt: Format, scaling: Scaling, scale: Tensor | None = None) -> ScaleBlocks:
    """Splits the magnitudes of a tensor into blocks, in a layout of blocks.py, without rounding. The blocks have the
    same decoding scales as in `values`.

    `scale` is a factor that replaces the factor computed from a tensor or row. Incomplete blocks are filled with zeros.
    """
    if _has_no_blocks(scaling):
        largest_magnitudes = magnitudes.amax(-1, keepdim=True) if scaling.rows else largest_magnitude(magnitudes)
        decoding_scales = (
            compute_decoding_scales(largest_magnitudes, fmt, scaling) if scale is None else reciprocal(scale)
        )
        return ScaleBlocks(magnitudes, largest_magnitudes, decoding_scales)
    blocks = _split_blocks(magnitudes, scaling)
    largest_magnitudes = compute_block_maxima(blocks)
    return ScaleBlocks(blocks, largest_magnitudes, compute_decoding_scales(largest_magnitudes, fmt, scaling))


def _has_no_blocks(scaling: Scaling) -> bool:
    """Returns whether elements need no blocks, because the tensor or each of its rows has a single float32 scale."""
    return scaling.scale is None and scaling.columns == 0 and scaling.rows <= 1


def _scale_elements(
    x: Tensor, fmt: Format, scaling: Scaling, seed: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    scale = factor(x, fmt, scaling)[0] if scale is None else scale
    return round_to(x.detach().to(torch.float32) * scale, fmt, seed=seed), reciprocal(scale)


def largest_magnitude(x: Tensor) -> Tensor:
    """Returns the largest magnitude of a tensor as float32 on its device. It is 0 for an empty tensor, and NaN if an
    element is NaN.
    """
    x = x.detach()
    if not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    if x.is_meta:  # the sum reads as many bytes as the norm below, which would import torch's compiler
        return torch.sum(x, dtype=torch.float32)
    if x.device.type != "cpu":
        largest: Tensor = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)  # runs as a single GPU kernel
        return largest
    # On a CPU read the tensor once, in memory order, without a temporary tensor of its size. abs().amax() takes 12
    # times as long here.
    smallest_value, largest_value = torch.aminmax(x.t() if x.dim() == 2 and not x.is_contiguous() else x)
    # abs() turns -0.0 into 0.0.
    return torch.maximum(smallest_value.neg(), largest_value).abs().to(torch.float32)


def _find_row_magnitudes(x: Tensor) -> Tensor:
    if not x.numel():
        return torch.zeros((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    return torch.maximum(x.amin(-1, keepdim=True).neg(), x.amax(-1, keepdim=True)).abs().to(torch.float32)


def current_tensor_scale(x: Tensor) -> Tensor:
    return nvfp4_tensor_scale(largest_magnitude(x))


def _make_empty_scale(x: Tensor, scaling: Scaling) -> Tensor | None:
    """Returns NVFP4's tensor scale for an empty tensor, which has no blocks from which the scale could be computed.
    Returns None in all other cases.
    """
    return current_tensor_scale(x) if scaling.scale is E4M3 and not x.numel() else None


def _draw_random_bits(blocks: Tensor, seed: Tensor | None) -> list[Tensor] | None:
    return None if seed is None else [random_bits(blocks.shape, seed)]


def _split_blocks(x: Tensor, scaling: Scaling) -> Tensor:
    blocks_down, blocks_across, columns = _count_blocks(x.shape, scaling)
    height, width = matrix_shape(x.shape)
    matrix = x.detach().reshape(height, width).to(torch.float32)
    if blocks_down * scaling.rows != height or blocks_across * columns != width:
        matrix = pad(matrix, (0, blocks_across * columns - width, 0, blocks_down * scaling.rows - height))
    if scaling.rows == 1:
        return matrix.reshape(blocks_down * blocks_across, columns)
    return matrix.reshape(blocks_down, scaling.rows, blocks_across, columns)


def _join_blocks(blocks: Tensor, shape: torch.Size, scaling: Scaling) -> Tensor:
    blocks_down, blocks_across, columns = _count_blocks(shape, scaling)
    height, width = matrix_shape(shape)
    return (
        blocks.reshape(blocks_down * scaling.rows, blocks_across * columns)[:height, :width].reshape(shape).contiguous()
    )


def _count_blocks(shape: torch.Size, scaling: Scaling) -> tuple[int, int, int]:
    height, width = matrix_shape(shape)
    columns = scaling.columns or max(width, 1)
    return count_blocks(height, scaling.rows), count_blocks(width, columns) if scaling.columns else 1, columns


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Returns the rows and columns that a tensor has as a matrix. The columns are its last dimension. A tensor
    without dimensions is 1 x 1.
    """
    return prod(shape[:-1]), shape[-1] if shape else 1


def _pack_elements(
    elements: Tensor,
    scales: Tensor | None,
    tensor_scale: Tensor | None,
    fmt: Format,
    scaling: Scaling | None,
) -> ScaledTensor:
    shape = elements.shape
    # Codes are packed along the last dimension, which a scalar lacks.
    codes = pack_codes(encode(elements if shape else elements.view(1), fmt), fmt)
    if scales is not None and scaling is not None:
        scales = scales if scaling.scale is None else encode(scales, scaling.scale)
        scales = scales.reshape(() if not scaling.rows else _count_blocks(shape, scaling)[:2])
    return ScaledTensor(codes, scales, tensor_scale, fmt, scaling, shape)
