"""Matrices and codes without kernels: filled to whole blocks, row by row in memory, and cast by separate operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8bench.formats.code_kernels import SIDE
from fp8bench.formats.codes import DTYPES, torch_codes
from fp8bench.formats.grids import Format
from fp8bench.formats.memory_layout import is_aligned
from fp8bench.formats.recipes import Scaling
from fp8bench.formats.scale_layouts import by_columns
from fp8bench.formats.scale_layouts import squares as by_squares
from fp8bench.formats.scaled import factor, matrix_of, quantise

Memory = tuple[Any, ...]
"""Tensors that a cast writes, None for what it leaves out."""


class DelayedCodes(NamedTuple):
    """The scale of a cast, the scale that decodes, the codes, and with `both` the codes of the transpose."""

    scale: Tensor
    inverse: Tensor
    straight: Tensor
    turned: Tensor | None


def new_memory(device: torch.device, dtype: torch.dtype, *shapes: Sequence[int] | None) -> Memory:
    """Allocates a tensor for each shape, None for None."""
    return tuple(None if shape is None else torch.empty(shape, dtype=dtype, device=device) for shape in shapes)


def memory_for_codes(x: Tensor, fmt: Format, both: bool) -> Memory:
    return new_memory(x.device, DTYPES[fmt.name], x.shape, x.shape[::-1] if both else None)


def memory_with_scales(x: Tensor, fmt: Format, both: bool) -> Memory:
    """Memory for a tensor's scale, its inverse, and codes."""
    return new_memory(x.device, torch.float32, (), ()) + memory_for_codes(x, fmt, both)


def plain_row_codes(x: Tensor, fmt: Format, scaling: Scaling) -> tuple[Tensor, Tensor]:
    if scaling.columns:
        stored = quantise(x, fmt, scaling, checked=False)
        assert stored.scales is not None
        return stored.codes.view(DTYPES[fmt.name]), by_columns(stored.scales)
    scale, inverse = factor(x, fmt, scaling)
    return torch_codes(x, fmt, scale), inverse


def plain_square_codes(x: Tensor, fmt: Format, scaling: Scaling, both: bool) -> tuple[tuple[Tensor, Tensor], ...]:
    stored = quantise(x, fmt, scaling, checked=False)
    assert stored.scales is not None
    data = stored.codes.view(DTYPES[fmt.name])
    straight = data, by_squares(stored.scales)
    return (straight, (data.t().contiguous(), by_squares(stored.scales.t()))) if both else (straight,)


def whole_blocks(x: Tensor, down: int, across: int) -> tuple[Tensor, bool]:
    """The matrix, filled with zeros to whole blocks, and whether it had whole blocks already."""
    height, width = x.shape
    rows, columns = -height % down if down else 0, -width % across if across else 0
    return (pad(x, (0, columns, 0, rows)), False) if rows or columns else (x, True)


def laid(x: Tensor) -> tuple[Tensor, bool]:
    """The matrix that lies row by row, and whether `x` is its transpose. Other layouts are copied first."""
    if x.dim() == 2 and not x.is_contiguous() and x.t().is_contiguous():
        matrix, turned = x.t(), True
    else:
        matrix, turned = x.contiguous().view(matrix_of(x.shape)), False
    return (matrix if is_aligned(matrix) else matrix.clone()), turned


def side_of(lengths: Sequence[int]) -> int:
    return SIDE if not any(length % SIDE for length in lengths) else 1
