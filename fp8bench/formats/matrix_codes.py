"""Casts matrices to codes with separate torch operations. First fills incomplete blocks, and makes matrices
contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8bench.formats.code_kernels import ALIGNED_SIDE
from fp8bench.formats.codes import CODE_DTYPES, encode_with_torch
from fp8bench.formats.grids import Format
from fp8bench.formats.memory_layout import is_aligned
from fp8bench.formats.recipes import Scaling
from fp8bench.formats.scale_layouts import store_by_columns
from fp8bench.formats.scale_layouts import store_square_scales as by_squares
from fp8bench.formats.scaled import factor, matrix_shape, quantise

# Tensors that a cast writes. None stands for an output that is not needed.
Memory = tuple[Any, ...]


class DelayedScaleCodes(NamedTuple):
    """The results of a cast with a delayed scale: the scale by which the cast multiplied, the inverse of this scale for
    decoding, the codes, and the codes of the transpose, which are None if they were not requested.
    """

    scale: Tensor
    inverse_scale: Tensor
    straight: Tensor
    turned: Tensor | None


def allocate(device: torch.device, dtype: torch.dtype, *shapes: Sequence[int] | None) -> Memory:
    """Allocates a tensor for each of `shapes`. Returns None in place of a shape that is None."""
    return tuple(None if shape is None else torch.empty(shape, dtype=dtype, device=device) for shape in shapes)


def allocate_codes(x: Tensor, fmt: Format, both: bool) -> Memory:
    return allocate(x.device, CODE_DTYPES[fmt.name], x.shape, x.shape[::-1] if both else None)


def allocate_scaled_codes(x: Tensor, fmt: Format, both: bool) -> Memory:
    """Allocates memory for a tensor's scale, the inverse of the scale, and the tensor's codes."""
    return allocate(x.device, torch.float32, (), ()) + allocate_codes(x, fmt, both)


def row_codes_by_operations(x: Tensor, fmt: Format, scaling: Scaling) -> tuple[Tensor, Tensor]:
    if scaling.columns:
        scaled_tensor = quantise(x, fmt, scaling)
        assert scaled_tensor.scales is not None
        return scaled_tensor.codes.view(CODE_DTYPES[fmt.name]), store_by_columns(scaled_tensor.scales)
    scale, inverse = factor(x, fmt, scaling)
    return encode_with_torch(x, fmt, scale), inverse


def square_codes_by_operations(
    x: Tensor, fmt: Format, scaling: Scaling, both: bool
) -> tuple[tuple[Tensor, Tensor], ...]:
    scaled_tensor = quantise(x, fmt, scaling)
    assert scaled_tensor.scales is not None
    untransposed_codes = scaled_tensor.codes.view(CODE_DTYPES[fmt.name])
    untransposed_codes_and_scales = untransposed_codes, by_squares(scaled_tensor.scales)
    return (
        (untransposed_codes_and_scales, (untransposed_codes.t().contiguous(), by_squares(scaled_tensor.scales.t())))
        if both
        else (untransposed_codes_and_scales,)
    )


def pad_to_complete_blocks(x: Tensor, down: int, across: int) -> tuple[Tensor, bool]:
    """Returns the matrix, extended by zeros to complete blocks, and whether its blocks were complete before."""
    height, width = x.shape
    rows, columns = -height % down if down else 0, -width % across if across else 0
    return (pad(x, (0, columns, 0, rows)), False) if rows or columns else (x, True)


def as_row_major(x: Tensor) -> tuple[Tensor, bool]:
    """Returns a row-major matrix, and whether it is the transpose of `x`. If neither `x` nor its transpose is
    row-major, `x` is copied.
    """
    if x.dim() == 2 and not x.is_contiguous() and x.t().is_contiguous():
        matrix, is_transposed = x.t(), True
    else:
        matrix, is_transposed = x.contiguous().view(matrix_shape(x.shape)), False
    # Kernels read words, which must be aligned. A new allocation always is.
    return (matrix if is_aligned(matrix) else matrix.clone()), is_transposed


def choose_aligned_side(lengths: Sequence[int]) -> int:
    # With this side, the compiler of a GPU knows that rows are aligned (code_kernels.py).
    return ALIGNED_SIDE if not any(length % ALIGNED_SIDE for length in lengths) else 1
