"""Decides how a fused quantiser reads a tensor: in place if possible, and otherwise as a copy.

A row-major matrix is read in place. Its transpose is read in place too, for example as the operand of a backward
product. Tensors with other strides, with other dtypes or with an incomplete last block are copied first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8bench.formats.fused import Layout, ValuesKernel, view_as_words, view_result_as_words
from fp8bench.formats.grids import E4M3, Format, Overflow
from fp8bench.formats.recipes import Scaling, round_up
from fp8bench.formats.scaled import current_tensor_scale, factor, matrix_shape

# The largest number of elements that a kernel's 32-bit indices can count.
MAX_INDEXED_ELEMENTS = (1 << 31) - 1
# A word of two float32 numbers is the largest.
_LARGEST_WORD_BYTES = 8
# Bytes that a compiled GPU kernel reads at once.
_GPU_VECTOR_BYTES = 16


@dataclass(frozen=True)
class Quantisation:
    """The parameters of a quantiser call, without its tensors."""

    fmt: Format
    scaling: Scaling | None = None
    overflow: Overflow = Overflow.SATURATE
    stochastic: bool = False


@dataclass(frozen=True)
class MemoryLayout:
    """A kernel, and the size of the row-major matrix that it reads. If `turned`, this matrix is the transpose of `x`.
    If `is_zero_padded`, the matrix is larger than `x`, because zeros complete its last blocks.
    """

    kernel: ValuesKernel
    height: int
    width: int
    turned: bool
    is_zero_padded: bool

    def matrix(self, x: Tensor) -> Tensor:
        """Returns `x` as the matrix that the kernel reads. Copies `x` only if necessary."""
        matrix = (x.t() if self.turned else x.contiguous()).to(self.kernel.source)
        if self.is_zero_padded:
            rows, columns = matrix_shape(matrix.shape)
            matrix = pad(matrix.view(rows, columns), (0, self.width - columns, 0, self.height - rows))
        return matrix if is_aligned(matrix) else matrix.clone()

    def can_write_into(self, out: Tensor) -> bool:
        """Returns whether the kernel can write into `out` directly."""
        row_major = out.t() if self.turned else out
        return (
            out.dtype is self.kernel.target
            and not self.is_zero_padded
            and row_major.is_contiguous()
            and is_aligned(out)
        )

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.height, self.width, dtype=self.kernel.target, device=device)

    def view_as_words(self, matrix: Tensor) -> Tensor:
        return view_as_words(matrix.view(self._view_shape()), self.kernel.reads_value_pairs)

    def view_result_as_words(self, matrix: Tensor) -> Tensor:
        return view_result_as_words(matrix.view(self._view_shape()), self.kernel.reads_value_pairs)

    def copy_result(self, matrix: Tensor, out: Tensor) -> None:
        if self.is_zero_padded:
            rows, columns = matrix_shape((out.t() if self.turned else out).shape)
            matrix = matrix.view(self.height, self.width)[:rows, :columns]
        out.copy_(matrix.view(out.shape[::-1]).t() if self.turned else matrix.reshape(out.shape))

    def _view_shape(self) -> tuple[int, ...]:
        # The kernel has one loop for each dimension of this view. `Layout` (fused.py) describes the layouts.
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


def choose_layout(x: Tensor, out: Tensor, quantisation: Quantisation) -> MemoryLayout | None:
    """Returns the kernel and layout of a call, which depend only on shapes, strides and dtypes. Returns None in three
    cases: for empty tensors, for huge tensors, and for blocks that span several complete rows.
    """
    scaling = quantisation.scaling
    # A scaling with 0 columns has blocks of complete rows.
    spans_several_rows = scaling is not None and scaling.rows > 1 and scaling.columns == 0
    if not 0 < x.numel() <= MAX_INDEXED_ELEMENTS or spans_several_rows:
        return None
    # 1. Read a transposed matrix in its memory order, along rows.
    is_transposed = _is_read_as_transpose(x, quantisation)
    layout, block = _choose_block_layout(scaling, is_transposed)
    rows, columns = matrix_shape((x.t() if is_transposed else x).shape)
    # 2. Extend the matrix to complete blocks, because kernels do not handle incomplete ones.
    height, width = _round_up_to_block(rows, block[0]), _round_up_to_block(columns, block[1])
    row_length = height * width if layout is Layout.FLAT else width
    # 3. Read two bfloat16 values as a word if no word would be split between two blocks or rows.
    block_or_row_length = block[1] if block[1] > 1 else row_length
    has_value_pairs = x.dtype is torch.bfloat16 and block_or_row_length % 2 == 0
    source = torch.bfloat16 if has_value_pairs else torch.float32
    # 4. Make the kernel. If one scale covers the tensor, a row or a column, the kernel takes factors as an argument.
    # With UPRIGHT blocks of NVFP4, it takes the tensor scale.
    has_blocks = block != (0, 0)
    has_upright_nvfp4_blocks = scaling is not None and scaling.scale is E4M3 and layout is Layout.UPRIGHT
    kernel = ValuesKernel(
        fmt=quantisation.fmt,
        scaling=scaling if has_blocks else None,
        layout=layout,
        source=source,
        target=torch.bfloat16 if has_value_pairs and out.dtype is torch.bfloat16 else torch.float32,
        device=str(x.device),
        block=block,
        overflow=quantisation.overflow,
        factor=has_upright_nvfp4_blocks or (scaling is not None and not has_blocks),
        stochastic=quantisation.stochastic,
    )
    return MemoryLayout(kernel, height, width, is_transposed, (height, width) != (rows, columns))


def compute_kernel_factor(
    x: Tensor, quantisation: Quantisation, layout: MemoryLayout, scale: Tensor | None
) -> Tensor | None:
    """Returns the factor that multiplies elements before their cast, in the shape that the kernel takes. It is made
    from `scale` or computed from `x`. For blocks of NVFP4, it is the tensor scale. Returns None if the kernel takes no
    factor.
    """
    kernel = layout.kernel
    # A kernel for blocks computes their scales itself. The only factor that it may need is NVFP4's tensor scale.
    if quantisation.scaling is None or not kernel.factor:
        return None
    if kernel.scaling is not None:
        return current_tensor_scale(x)
    scale_factors = factor(x, quantisation.fmt, quantisation.scaling)[0] if scale is None else scale.to(torch.float32)
    if kernel.layout is Layout.FLAT:
        return scale_factors.reshape(())
    # A COLUMNS kernel reads the transpose of x, so the factors of x's rows become a row instead of a column.
    row_factors = scale_factors.expand(*x.shape[:-1], 1)
    if kernel.layout is Layout.ROWS:
        return row_factors.reshape(layout.height, 1)
    # If the kernel reads two values as a word, it also reads their two factors as a word.
    return view_result_as_words(row_factors.reshape(1, layout.width).contiguous(), kernel.reads_value_pairs)


def _is_read_as_transpose(x: Tensor, quantisation: Quantisation) -> bool:
    """Returns whether a kernel reads `x` as the transpose of a row-major matrix. With stochastic rounding only UPRIGHT
    blocks can be read as a transpose, because random numbers are counted along the rows of `x`.
    """
    if x.dim() != 2 or x.is_contiguous() or not x.t().is_contiguous():
        return False
    return not quantisation.stochastic or _choose_block_layout(quantisation.scaling, True)[0] is Layout.UPRIGHT


def _choose_block_layout(scaling: Scaling | None, turned: bool) -> tuple[Layout, tuple[int, int]]:
    """Returns the layout, and the rows and columns of a block in memory."""
    if scaling is None or scaling.rows == 0:
        return Layout.FLAT, (0, 0)
    if scaling.columns == 0:
        return (Layout.COLUMNS if turned else Layout.ROWS), (0, 0)
    block_shape = (scaling.columns, scaling.rows) if turned else (scaling.rows, scaling.columns)
    if block_shape[0] == 1:
        return Layout.BLOCKS, block_shape
    return (Layout.UPRIGHT if block_shape[1] == 1 else Layout.RECTANGLES), block_shape


def _round_up_to_block(length: int, block: int) -> int:
    return length if block < 2 else round_up(length, block)


def is_aligned(x: Tensor) -> bool:
    """Returns whether words can be read at the address of a tensor. The address must be a multiple of 16 bytes on a
    GPU, and of 8 bytes elsewhere.
    """
    return x.data_ptr() % (_GPU_VECTOR_BYTES if x.is_cuda else _LARGEST_WORD_BYTES) == 0
