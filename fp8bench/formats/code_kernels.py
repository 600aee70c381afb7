"""Kernels of native casts. They write float8 codes for hardware, and the scales of these codes. An output has one of
two orientations: `straight` codes are those of the matrix, `turned` codes those of its transpose.

Kernels view a matrix as squares of `side` x `side` elements. A GPU compiler reads and writes sixteen bytes at once only
if it knows that rows start at multiples of sixteen. native_codes.py chooses the kernel of a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8bench.formats.blocks import float_factor, reciprocal
from fp8bench.formats.codes import CODE_DTYPES, cast_elements
from fp8bench.formats.compiling import Kernel, KernelDefinition, draw_example
from fp8bench.formats.grids import Format
from fp8bench.formats.recipes import Amax, DelayedScaling, ScaleRounding, Scaling
from fp8bench.formats.scaled import largest_magnitude, quantise

ALIGNED_SIDE = 16
SQUARE_SIDE = 128
# The sizes of example matrices, in squares. A matrix and a transposed one have different sizes, because one kernel may
# handle both, and torch treats equal sizes as one size.
_EXAMPLE_DOWN, _EXAMPLE_ACROSS = 40, 48
_TURNED_DOWN, _TURNED_ACROSS = 44, 52
_SQUARES_DOWN, _SQUARES_ACROSS = 9, 10
# Inductor's option for writing several scalars in one kernel. By default Inductor makes several kernels, because the
# scalars share no memory.
FUSED_SCALAR_OPTIONS = {"score_fusion_memory_threshold": 1}
# These options of Inductor make loops follow the order of the operand in memory. They also make one kernel find maxima
# and write codes, even if there are few rows.
OPERAND_ORDER_CONFIG = {"pick_loop_orders": False, "split_reductions": False}


def view_squares(matrix: Tensor, side: int) -> Tensor:
    """Returns a view of a contiguous matrix as squares: (squares down, side, squares across, side)."""
    rows, columns = matrix.shape
    return matrix.view(rows // side, side, columns // side, side)


def view_stretches(matrix: Tensor, side: int, block: int, turned: bool = False) -> Tensor:
    """Returns a view of a contiguous matrix, or of its transpose if `turned`, as (stretches, groups of rows, rows,
    groups of columns, columns).

    A stretch is a part of a row with `block` elements, or a whole row if `block` is 0. A group has `side` rows or
    columns, but ALIGNED_SIDE columns if there are blocks.
    """
    if turned:
        parts = (-1, block // ALIGNED_SIDE, ALIGNED_SIDE) if block else (1, len(matrix) // side, side)
        return matrix.view(*parts, matrix.shape[1] // side, side).permute(0, 3, 4, 1, 2)
    parts = (-1, block // ALIGNED_SIDE, ALIGNED_SIDE) if block else (1, matrix.shape[1] // side, side)
    return matrix.view(len(matrix) // side, side, *parts).permute(2, 0, 1, 3, 4)


def view_transposed_squares(matrix: Tensor, side: int) -> Tensor:
    """Returns the transpose of a contiguous matrix, viewed as squares: (squares down, side, squares across, side)."""
    return view_squares(matrix, side).permute(2, 3, 0, 1)


@dataclass(frozen=True)
class CodesKernel(Kernel):
    """Casts with a given scale or without a scale. Writes codes of the matrix, of its transpose, or of both. Reads each
    element once.

    The arguments are the matrix and each output, all viewed as squares (view_squares). If `scaled`, the last argument
    is the scale: a single number, or with `has_scale_per_square` one number for each square, (down, 1, across, 1). If
    the format is None, the matrix consists of bytes that are codes already.
    """

    fmt: Format | None
    source: torch.dtype
    device: str
    side: int
    straight: bool
    turned: bool
    scaled: bool
    has_scale_per_square: bool = False

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        source, *outputs = tensors
        scale = outputs.pop() if self.scaled else None
        codes = source if self.fmt is None else cast_elements(source, self.fmt, scale)
        for out in outputs:
            out.copy_(codes)
        return ()

    def examples(self) -> list[Tensor]:
        squares_down, squares_across = (
            (_SQUARES_DOWN, _SQUARES_ACROSS) if self.has_scale_per_square else (_EXAMPLE_DOWN, _EXAMPLE_ACROSS)
        )
        rows, columns = squares_down * self.side, squares_across * self.side
        # A kernel may write codes of the matrix, of its transpose, or of both.
        outputs = []
        if self.straight:
            outputs.append(view_squares(_allocate_codes(self, rows, columns), self.side))
        if self.turned:
            outputs.append(view_transposed_squares(_allocate_codes(self, columns, rows), self.side))
        shape = (squares_down, 1, squares_across, 1) if self.has_scale_per_square else ()
        scale = [torch.full(shape, 0.75, device=self.device)] if self.scaled else []
        return [view_squares(draw_example((rows, columns), self.source, self.device), self.side), *outputs, *scale]

    def free(self) -> list[Sequence[int]]:
        scale: list[Sequence[int]] = [(0, 2) if self.has_scale_per_square else ()]
        return [*[(0, 2)] * (1 + self.straight + self.turned), *(scale if self.scaled else [])]


@dataclass(frozen=True)
class RowCodesKernel(Kernel):
    """Casts with a current scale for each row, or for each `block` elements of a row. Writes codes and inverse scales.

    The arguments are the operand and memory for codes, both viewed by `view_stretches`, and memory for inverse scales
    with shape (stretches, groups of rows, rows, 1, 1). If `turned`, the matrix in memory is the transpose of the
    operand.
    """

    fmt: Format
    rounding: ScaleRounding
    source: torch.dtype
    device: str
    side: int
    block: int
    turned: bool

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        source, out, scale_inverse = tensors
        scale = float_factor(source.abs().amax((3, 4), keepdim=True).to(torch.float32), self.fmt, self.rounding)
        out.copy_(cast_elements(source, self.fmt, scale))
        scale_inverse.copy_(reciprocal(scale))
        return ()

    def examples(self) -> list[Tensor]:
        down, across = (_TURNED_DOWN, _TURNED_ACROSS) if self.turned else (_EXAMPLE_DOWN, _EXAMPLE_ACROSS)
        rows, columns = down * self.side, across * (self.block or self.side)
        shape = (columns, rows) if self.turned else (rows, columns)
        source = view_stretches(draw_example(shape, self.source, self.device), self.side, self.block, self.turned)
        out = view_stretches(_allocate_codes(self, rows, columns), self.side, self.block)
        return [source, out, torch.empty(len(source), down, self.side, 1, 1, device=self.device)]

    def free(self) -> list[Sequence[int]]:
        return [(0, 1), (0, 1), (0, 1)] if self.block else [(1, 3), (1, 3), (1,)]

    def options(self) -> Mapping[str, object]:
        return OPERAND_ORDER_CONFIG


@dataclass(frozen=True)
class SquareScalesKernel(Kernel):
    """Computes the scale of each square of a matrix, and its inverse.

    The arguments are the matrix as (down, across, block, block), and memory for three results, each (down, across):
    the scales, the inverses for the matrix, and the inverses for its transpose.
    """

    fmt: Format
    rounding: ScaleRounding
    source: torch.dtype
    device: str
    block: int

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        source, scale, scale_inverse, turned_inverse = tensors
        factor = float_factor(source.abs().amax((2, 3)).to(torch.float32), self.fmt, self.rounding)
        scale.copy_(factor)
        for memory in (scale_inverse, turned_inverse):
            memory.copy_(reciprocal(factor))
        return ()

    def examples(self) -> list[Tensor]:
        source = view_squares(
            draw_example((_SQUARES_DOWN * self.block, _SQUARES_ACROSS * self.block), self.source, self.device),
            self.block,
        ).transpose(1, 2)
        scale = torch.empty(_SQUARES_DOWN, _SQUARES_ACROSS, device=self.device)
        # Rows of inverse scales are padded in memory (allocate_square_scales). The padding of the two outputs may
        # differ.
        scale_inverse = torch.empty(_SQUARES_DOWN, _SQUARES_ACROSS + 3, device=self.device)[:, :_SQUARES_ACROSS]
        turned_inverse = torch.empty(_SQUARES_ACROSS, _SQUARES_DOWN + 2, device=self.device)[:, :_SQUARES_DOWN].t()
        return [source, scale, scale_inverse, turned_inverse]

    def free(self) -> list[Sequence[int]]:
        return [(0, 1)] * 4

    def options(self) -> Mapping[str, object]:
        return {**FUSED_SCALAR_OPTIONS, **OPERAND_ORDER_CONFIG}


@dataclass(frozen=True)
class ScaleKernel(Kernel):
    """Computes a tensor's scale from its largest magnitude, and the inverse of the scale. The arguments are the
    magnitude and memory for both results.
    """

    fmt: Format
    rounding: ScaleRounding
    device: str

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        amax, scale, scale_inverse = tensors
        factor = float_factor(amax, self.fmt, self.rounding)
        scale.copy_(factor)
        scale_inverse.copy_(reciprocal(factor))
        return ()

    def examples(self) -> list[Tensor]:
        return [torch.ones((), device=self.device) for _ in range(3)]

    def free(self) -> list[Sequence[int]]:
        return [(), (), ()]

    def options(self) -> Mapping[str, object]:
        return FUSED_SCALAR_OPTIONS


@dataclass(frozen=True)
class DelayedScaleKernel(Kernel):
    """One step of delayed scaling. Copies the scale of this cast and the inverse of that scale, and then updates the
    scale.

    The arguments begin with memory for the copy and for its inverse. Then come the history, the number of casts and the
    scale, which the kernel changes in place. The last argument is the largest magnitude of this cast. The device counts
    the casts, so that a CUDA graph can be replayed.
    """

    fmt: Format
    delayed: DelayedScaling
    device: str

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        used_scale, scale_inverse, history, casts, scale, amax = tensors
        # If amax is not finite, record 0 instead. Otherwise it would spoil all scales until its entry in the history
        # is overwritten.
        is_finite, cast_count = amax.isfinite(), casts + 1
        recorded_amax = torch.where(is_finite, amax, 0.0)
        is_written_entry = torch.arange(len(history), dtype=casts.dtype, device=history.device) == casts.remainder(
            len(history)
        )
        new_history = torch.where(is_written_entry, recorded_amax, history)
        # Compute MAX and MOST_RECENT both as a maximum, so that they compile to the same kernel. For MOST_RECENT,
        # replace all other entries by 0.
        used_amax = (
            new_history if self.delayed.algorithm is Amax.MAX else torch.where(is_written_entry, recorded_amax, 0.0)
        ).amax()
        # This scale is for the next cast. The scale of this cast is copied below.
        next_scale = float_factor(used_amax, self.fmt, ScaleRounding.EXACT) / 2.0**self.delayed.margin
        is_scale_due = is_finite & (used_amax > 0) & (cast_count.remainder(self.delayed.interval) == 0)
        # Copy the scale of this cast first, because compiled code writes memory in the order of the arguments.
        values = scale, reciprocal(scale), new_history, cast_count, torch.where(is_scale_due, next_scale, scale)
        for memory, value in zip((used_scale, scale_inverse, history, casts, scale), values, strict=True):
            memory.copy_(value)
        return ()

    def examples(self) -> list[Tensor]:
        used_scale, scale_inverse, amax, scale = (torch.ones((), device=self.device) for _ in range(4))
        history = torch.zeros(self.delayed.history, device=self.device)
        return [used_scale, scale_inverse, history, torch.zeros((), dtype=torch.int32, device=self.device), scale, amax]

    def free(self) -> list[Sequence[int]]:
        return [()] * 6

    def options(self) -> Mapping[str, object]:
        return {**FUSED_SCALAR_OPTIONS, "split_reductions": False}


@dataclass(frozen=True)
class CurrentScaleCodesKernel(KernelDefinition):
    """Casts a matrix with its current scale. Writes codes of the matrix, of its transpose, or of both.

    The arguments are the row-major matrix, memory for the scale and its inverse, and memory for codes. This definition,
    DelayedCodesKernel and SquareCodesKernel are compiled only as Triton kernels. torch's compiler compiles their steps
    separately.
    """

    fmt: Format
    rounding: ScaleRounding
    source: torch.dtype
    device: str
    straight: bool
    turned: bool

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        x, scale, scale_inverse, *outputs = tensors
        ScaleKernel(self.fmt, self.rounding, self.device)(largest_magnitude(x), scale, scale_inverse)
        return _write_oriented_codes(cast_elements(x, self.fmt, scale), self.straight, outputs)


@dataclass(frozen=True)
class DelayedCodesKernel(KernelDefinition):
    """Casts a matrix with a delayed scale, finds the largest magnitude in the same pass, and then updates the scale.

    The arguments begin with the matrix, the history, the number of casts and the scale. Then comes memory for a copy of
    the scale, for the inverse of that copy, and for codes.
    """

    fmt: Format
    delayed: DelayedScaling
    source: torch.dtype
    device: str
    straight: bool
    turned: bool

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        x, history, casts, scale, used_scale, scale_inverse, *outputs = tensors
        scale_update_kernel = DelayedScaleKernel(self.fmt, self.delayed, self.device)
        scale_update_kernel(used_scale, scale_inverse, history, casts, scale, largest_magnitude(x))
        return _write_oriented_codes(cast_elements(x, self.fmt, used_scale), self.straight, outputs)


@dataclass(frozen=True)
class SquareCodesKernel(KernelDefinition):
    """Casts a matrix with a scale for each 128x128 square. Writes codes of the matrix, of its transpose, or of both.

    The arguments are the matrix, memory for the inverse scales of the matrix (down, across) and of its transpose
    (across, down), and memory for codes. The memory for inverse scales may have additional columns.
    """

    fmt: Format
    rounding: ScaleRounding
    source: torch.dtype
    device: str
    straight: bool
    turned: bool

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        x, scale_inverse, turned_inverse, *outputs = tensors
        stored_tensor = quantise(x, self.fmt, Scaling(SQUARE_SIDE, SQUARE_SIDE, rounding=self.rounding))
        assert stored_tensor.scales is not None
        squares_down, squares_across = stored_tensor.scales.shape
        scale_inverse[:, :squares_across].copy_(stored_tensor.scales)
        turned_inverse[:, :squares_down].copy_(stored_tensor.scales.t())
        return _write_oriented_codes(stored_tensor.codes.view(CODE_DTYPES[self.fmt.name]), self.straight, outputs)


def _write_oriented_codes(codes: Tensor, straight: bool, outputs: Sequence[Tensor]) -> tuple[()]:
    for number, out in enumerate(outputs):
        out.copy_(codes if straight and number == 0 else codes.t())
    return ()


def _allocate_codes(kernel: CodesKernel | RowCodesKernel, rows: int, columns: int) -> Tensor:
    dtype = kernel.source if kernel.fmt is None else CODE_DTYPES[kernel.fmt.name]
    return torch.empty(rows, columns, dtype=dtype, device=kernel.device)
