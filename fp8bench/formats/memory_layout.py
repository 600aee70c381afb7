"""Decides how a fused quantiser reads a tensor: in place if possible, else as a copy.

A row-major matrix is read in place, and so is the transpose of one, such as an operand of a backward product. Tensors
with other strides, have another dtype or incomplete last blocks are copied first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8bench.formats.fused import Layout, ValuesKernel, result_words, words
from fp8bench.formats.grids import E4M3, Format, Overflow
from fp8bench.formats.recipes import Scaling
from fp8bench.formats.scaled import current_tensor_scale, factor, matrix_of

MOST_ELEMENTS = (1 << 31) - 1
"""The most that a kernel's indices of 32 bits can count."""
_WIDEST_WORD = 8
"""Bytes."""
_GPU_VECTOR = 16
"""Bytes that a compiled GPU kernel takes at once."""


@dataclass(frozen=True)
class Quantisation:
    """The parameters of a quantiser call, apart from its tensors."""

    fmt: Format
    scaling: Scaling | None = None
    overflow: Overflow = Overflow.SATURATE
    stochastic: bool = False


@dataclass(frozen=True)
class MemoryLayout:
    """A kernel, and the matrix that it reads: `turned` if x is the transpose of what lies row by row.

    `filled`: filling to whole blocks makes the matrix larger than x.
    """

    kernel: ValuesKernel
    height: int
    width: int
    turned: bool
    filled: bool

    def matrix(self, x: Tensor) -> Tensor:
        """`x` as that matrix, copied only where it must be."""
        laid = x.t() if self.turned else x.contiguous()
        matrix = laid.to(self.kernel.source)
        if self.filled:
            rows, columns = matrix_of(matrix.shape)
            matrix = pad(matrix.view(rows, columns), (0, self.width - columns, 0, self.height - rows))
        return matrix if is_aligned(matrix) else matrix.clone()

    def takes(self, out: Tensor) -> bool:
        laid = out.t() if self.turned else out
        return out.dtype is self.kernel.target and not self.filled and laid.is_contiguous() and is_aligned(out)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.height, self.width, dtype=self.kernel.target, device=device)

    def words(self, matrix: Tensor) -> Tensor:
        return words(matrix.view(self._shape()), self.kernel.twos)

    def result_words(self, matrix: Tensor) -> Tensor:
        return result_words(matrix.view(self._shape()), self.kernel.twos)

    def keep(self, matrix: Tensor, out: Tensor) -> None:
        if self.filled:
            rows, columns = matrix_of((out.t() if self.turned else out).shape)
            matrix = matrix.view(self.height, self.width)[:rows, :columns]
        out.copy_(matrix.view(out.shape[::-1]).t() if self.turned else matrix.reshape(out.shape))

    def _shape(self) -> tuple[int, ...]:
        # The shape is a view of the words in memory, in which each dimension is a loop of the kernel.
        rows, columns = self.kernel.block
        match self.kernel.layout:
            case Layout.FLAT:
                return (self.height * self.width,)
            case Layout.BLOCKS:
                return self.height * self.width // columns, columns
            case Layout.UPRIGHT:
                return self.height // rows, rows, self.width
            case Layout.RECTANGLES:
                return self.height // rows, rows, self.width // columns, columns
        return self.height, self.width


def layout_of(x: Tensor, out: Tensor, quantisation: Quantisation) -> MemoryLayout | None:
    """The kernel and layout of a call; None for empty and huge tensors, and for blocks of whole rows.

    Depends on shapes, strides and dtypes only.
    """
    scaling = quantisation.scaling
    if not 0 < x.numel() <= MOST_ELEMENTS or (scaling is not None and scaling.rows > 1 and scaling.columns == 0):
        return None
    # 1. Take a transposed matrix as what it is in memory, so that both are read along the rows.
    turned = _is_turned(x, quantisation)
    layout, block = _layout(scaling, turned)
    rows, columns = matrix_of((x.t() if turned else x).shape)
    # 2. Fill up to whole blocks: kernels have no code for a block that is cut off.
    height, width = _whole(rows, block[0]), _whole(columns, block[1])
    divided = block[1] if block[1] > 1 else height * width if layout is Layout.FLAT else width
    # 3. Take two bfloat16 in a word wherever none would be split between blocks.
    paired = x.dtype is torch.bfloat16 and divided % 2 == 0
    source = torch.bfloat16 if paired else torch.float32
    target = torch.bfloat16 if paired and out.dtype is torch.bfloat16 else torch.float32
    # 4. Everything else about the kernel follows from the request.
    kernel = ValuesKernel(
        fmt=quantisation.fmt,
        scaling=scaling if block != (0, 0) else None,
        layout=layout,
        source=source,
        target=target,
        device=str(x.device),
        block=block,
        overflow=quantisation.overflow,
        factor=scaling is not None and (block == (0, 0) or (scaling.scale is E4M3 and layout is Layout.UPRIGHT)),
        stochastic=quantisation.stochastic,
    )
    return MemoryLayout(kernel, height, width, turned, (height, width) != (rows, columns))


def factor_of(x: Tensor, quantisation: Quantisation, layout: MemoryLayout, scale: Tensor | None) -> Tensor | None:
    """The factor in the shape that a kernel takes: `scale`, or computed from `x`. None for kernels without."""
    kernel = layout.kernel
    # Blocks compute their scales inside the kernel; only NVFP4 also needs the tensor's.
    if quantisation.scaling is None or not kernel.factor:
        return None
    if kernel.scaling is not None:
        return current_tensor_scale(x)
    factors = factor(x, quantisation.fmt, quantisation.scaling)[0] if scale is None else scale.to(torch.float32)
    if kernel.layout is Layout.FLAT:
        return factors.reshape(())
    # A kernel over columns has a transposed matrix before it, whose rows are the columns in memory.
    by_row = factors.expand(*x.shape[:-1], 1)
    if kernel.layout is Layout.ROWS:
        return by_row.reshape(layout.height, 1)
    return result_words(by_row.reshape(1, layout.width).contiguous(), kernel.twos)


def _is_turned(x: Tensor, quantisation: Quantisation) -> bool:
    """Whether to take x as the transpose of a matrix; random numbers are counted along rows, or up a column's block."""
    if x.dim() != 2 or x.is_contiguous() or not x.t().is_contiguous():
        return False
    return not quantisation.stochastic or _layout(quantisation.scaling, True)[0] is Layout.UPRIGHT


def _layout(scaling: Scaling | None, turned: bool) -> tuple[Layout, tuple[int, int]]:
    """The layout, and the rows and columns of a block in memory."""
    if scaling is None or scaling.rows == 0:
        return Layout.FLAT, (0, 0)
    if scaling.columns == 0:
        return (Layout.COLUMNS if turned else Layout.ROWS), (0, 0)
    block = (scaling.columns, scaling.rows) if turned else (scaling.rows, scaling.columns)
    if block[0] == 1:
        return Layout.BLOCKS, block
    return (Layout.UPRIGHT if block[1] == 1 else Layout.RECTANGLES), block


def _whole(length: int, block: int) -> int:
    return length if block < 2 else -(-length // block) * block


def is_aligned(x: Tensor) -> bool:
    """Whether words can be read where it lies."""
    return x.data_ptr() % (_GPU_VECTOR if x.is_cuda else _WIDEST_WORD) == 0
