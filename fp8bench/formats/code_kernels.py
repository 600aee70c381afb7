"""Kernels of native casts: float8 codes as hardware multiplies them, in one or both orientations, and their scales.

A matrix is viewed in squares of `side`: a GPU's compiler reads and writes sixteen bytes at once only where it knows
that rows begin at multiples of them. native_codes.py decides which kernel a call takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8bench.formats.blocks import float_factor, inverse_of
from fp8bench.formats.codes import DTYPES, elements
from fp8bench.formats.compiling import Definition, Kernel
from fp8bench.formats.grids import Format
from fp8bench.formats.recipes import Amax, Delayed, ScaleRounding, Scaling
from fp8bench.formats.scaled import largest_magnitude, quantise

SIDE = 16
SQUARE = 128
# Free sizes of examples, in squares. Transposed ones differ, because a pair of kernels may have both.
_DOWN, _ACROSS = 40, 48
_TURNED_DOWN, _TURNED_ACROSS = 44, 52
_FEW, _MORE = 9, 10
# Makes Inductor write several scalars in one kernel, which share no memory worth one otherwise.
TOGETHER = {"score_fusion_memory_threshold": 1}
# Loops in the operand's order, and one kernel for maxima and codes, even for few rows.
IN_ORDER = {"pick_loop_orders": False, "split_reductions": False}


def squares(matrix: Tensor, side: int) -> Tensor:
    """A contiguous matrix as (down, side, across, side)."""
    rows, columns = matrix.shape
    return matrix.view(rows // side, side, columns // side, side)


def stretches(matrix: Tensor, side: int, block: int, turned: bool = False) -> Tensor:
    """A contiguous matrix, or the transpose of one, as (stretches, rows, side, length, side).

    A stretch is `block` elements of a row, or all of them without blocks.
    """
    if turned:
        parts = (-1, block // SIDE, SIDE) if block else (1, len(matrix) // side, side)
        return matrix.view(*parts, matrix.shape[1] // side, side).permute(0, 3, 4, 1, 2)
    parts = (-1, block // SIDE, SIDE) if block else (1, matrix.shape[1] // side, side)
    return matrix.view(len(matrix) // side, side, *parts).permute(2, 0, 1, 3, 4)


def turned_squares(matrix: Tensor, side: int) -> Tensor:
    """The transpose of a contiguous matrix, with elements in the places of `squares` of the original."""
    return squares(matrix, side).permute(2, 3, 0, 1)


@dataclass(frozen=True)
class CodesKernel(Kernel):
    """Codes under a given scale, or none: in the matrix's orientation, transposed, or both, each element read once.

    Takes the matrix in squares, each output in the same places, and the scale if it is `scaled`: of the matrix, or
    (down, 1, across, 1) of its squares. Without a format the matrix holds bytes, which are codes already.
    """

    fmt: Format | None
    source: torch.dtype
    device: str
    side: int
    straight: bool
    turned: bool
    scaled: bool
    by_square: bool = False

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        source, *outputs = tensors
        scale = outputs.pop() if self.scaled else None
        codes = source if self.fmt is None else elements(source, self.fmt, scale)
        for out in outputs:
            out.copy_(codes)
        return ()

    def examples(self) -> list[Tensor]:
        down, across = (_FEW, _MORE) if self.by_square else (_DOWN, _ACROSS)
        rows, columns = down * self.side, across * self.side
        # Memory for codes only in the orientations that the kernel writes.
        outputs = []
        if self.straight:
            outputs.append(squares(_empty_codes(self, rows, columns), self.side))
        if self.turned:
            outputs.append(turned_squares(_empty_codes(self, columns, rows), self.side))
        shape = (down, 1, across, 1) if self.by_square else ()
        scale = [torch.full(shape, 0.75, device=self.device)] if self.scaled else []
        return [squares(_numbers(self, rows, columns), self.side), *outputs, *scale]

    def free(self) -> list[Sequence[int]]:
        scale: list[Sequence[int]] = [(0, 2) if self.by_square else ()]
        return [*[(0, 2)] * (1 + self.straight + self.turned), *(scale if self.scaled else [])]


@dataclass(frozen=True)
class RowCodesKernel(Kernel):
    """Codes with a scale for each row, or each `block` elements of one, from their magnitudes, and the scales'
    inverses.

    Takes the operand and memory for codes in `stretches`, those of a `turned` matrix in the operand's places, and
    memory for the inverses, (stretches, rows, side, 1, 1).
    """

    fmt: Format
    rounding: ScaleRounding
    source: torch.dtype
    device: str
    side: int
    block: int
    turned: bool

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        source, out, inverse = tensors
        amax = source.abs().amax((3, 4), keepdim=True).to(torch.float32)
        scale = float_factor(amax, self.fmt, self.rounding)
        out.copy_(elements(source, self.fmt, scale))
        inverse.copy_(inverse_of(scale))
        return ()

    def examples(self) -> list[Tensor]:
        down, across = (_TURNED_DOWN, _TURNED_ACROSS) if self.turned else (_DOWN, _ACROSS)
        rows, columns = down * self.side, across * (self.block or self.side)
        shape = (columns, rows) if self.turned else (rows, columns)
        source = stretches(_numbers(self, *shape), self.side, self.block, self.turned)
        out = stretches(_empty_codes(self, rows, columns), self.side, self.block)
        return [source, out, torch.empty(len(source), down, self.side, 1, 1, device=self.device)]

    def free(self) -> list[Sequence[int]]:
        return [(0, 1), (0, 1), (0, 1)] if self.block else [(1, 3), (1, 3), (1,)]

    def options(self) -> Mapping[str, object]:
        return IN_ORDER


@dataclass(frozen=True)
class SquareScalesKernel(Kernel):
    """The scale of every square of a matrix, and the inverse twice: for the matrix, and for its transpose.

    Takes the matrix as (down, across, block, block), and memory for all three, each (down, across).
    """

    fmt: Format
    rounding: ScaleRounding
    source: torch.dtype
    device: str
    block: int

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        source, scale, inverse, turned = tensors
        current = float_factor(source.abs().amax((2, 3)).to(torch.float32), self.fmt, self.rounding)
        scale.copy_(current)
        for memory in (inverse, turned):
            memory.copy_(inverse_of(current))
        return ()

    def examples(self) -> list[Tensor]:
        source = squares(_numbers(self, _FEW * self.block, _MORE * self.block), self.block).transpose(1, 2)
        scale = torch.empty(_FEW, _MORE, device=self.device)
        # Rows of inverses are filled up, to different lengths.
        inverse = torch.empty(_FEW, _MORE + 3, device=self.device)[:, :_MORE]
        turned = torch.empty(_MORE, _FEW + 2, device=self.device)[:, :_FEW].t()
        return [source, scale, inverse, turned]

    def free(self) -> list[Sequence[int]]:
        return [(0, 1)] * 4

    def options(self) -> Mapping[str, object]:
        return {**TOGETHER, **IN_ORDER}


@dataclass(frozen=True)
class ScaleKernel(Kernel):
    """A tensor's scale from its largest magnitude, and the inverse. Takes the magnitude, and memory for both."""

    fmt: Format
    rounding: ScaleRounding
    device: str

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        amax, scale, inverse = tensors
        current = float_factor(amax, self.fmt, self.rounding)
        scale.copy_(current)
        inverse.copy_(inverse_of(current))
        return ()

    def examples(self) -> list[Tensor]:
        return [torch.ones((), device=self.device) for _ in range(3)]

    def free(self) -> list[Sequence[int]]:
        return [(), (), ()]

    def options(self) -> Mapping[str, object]:
        return TOGETHER


@dataclass(frozen=True)
class DelayedScaleKernel(Kernel):
    """A step of delayed scaling: copies the present scale for this cast, with its inverse, then renews it.

    Takes memory for the copy and its inverse; history, count of casts and scale, which are changed in place; and this
    cast's largest magnitude. The host counts nothing, so that a CUDA graph can be replayed.
    """

    fmt: Format
    delayed: Delayed
    device: str

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        used, inverse, history, casts, scale, amax = tensors
        # An amax that is not finite would poison the history until its entry is overwritten.
        finite, count = amax.isfinite(), casts + 1
        entry = torch.where(finite, amax, 0.0)
        at_place = torch.arange(len(history), dtype=casts.dtype, device=history.device) == casts.remainder(len(history))
        entered = torch.where(at_place, entry, history)
        # The most recent amax is also computed as a maximum, so that both algorithms share a kernel.
        largest = (entered if self.delayed.algorithm is Amax.MAX else torch.where(at_place, entry, 0.0)).amax()
        # The next cast uses this scale; the present one was already taken.
        next_scale = float_factor(largest, self.fmt, ScaleRounding.EXACT) / 2.0**self.delayed.margin
        renewed = finite & (largest > 0) & (count.remainder(self.delayed.interval) == 0)
        # Copies of the present scale come first: compiled code writes memory in the arguments' order.
        values = scale, inverse_of(scale), entered, count, torch.where(renewed, next_scale, scale)
        for memory, value in zip((used, inverse, history, casts, scale), values, strict=True):
            memory.copy_(value)
        return ()

    def examples(self) -> list[Tensor]:
        used, inverse, amax, scale = (torch.ones((), device=self.device) for _ in range(4))
        history = torch.zeros(self.delayed.history, device=self.device)
        return [used, inverse, history, torch.zeros((), dtype=torch.int32, device=self.device), scale, amax]

    def free(self) -> list[Sequence[int]]:
        return [()] * 6

    def options(self) -> Mapping[str, object]:
        return {**TOGETHER, "split_reductions": False}


@dataclass(frozen=True)
class CurrentCodesKernel(Definition):
    """Codes of a matrix under its current scale, in one orientation or both.

    Takes the matrix, which lies row by row, memory for scale and inverse, and for codes. Written in Triton alone, as
    are the next two: torch's compiler makes the steps that they consist of.
    """

    fmt: Format
    rounding: ScaleRounding
    source: torch.dtype
    device: str
    straight: bool
    turned: bool

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        x, scale, inverse, *outputs = tensors
        ScaleKernel(self.fmt, self.rounding, self.device)(largest_magnitude(x), scale, inverse)
        return _write_codes(elements(x, self.fmt, scale), self.straight, outputs)


@dataclass(frozen=True)
class DelayedCodesKernel(Definition):
    """Codes of a matrix under a delayed scale, which is then renewed: the largest magnitude is found while casting.

    Takes the matrix, history, count of casts and scale; memory for a copy of the scale, its inverse, and codes.
    """

    fmt: Format
    delayed: Delayed
    source: torch.dtype
    device: str
    straight: bool
    turned: bool

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        x, history, casts, scale, used, inverse, *outputs = tensors
        step = DelayedScaleKernel(self.fmt, self.delayed, self.device)
        step(used, inverse, history, casts, scale, largest_magnitude(x))
        return _write_codes(elements(x, self.fmt, used), self.straight, outputs)


@dataclass(frozen=True)
class SquareCodesKernel(Definition):
    """Codes of a matrix with a scale for each 128x128 square, in one orientation or both.

    Takes the matrix, memory for the inverses of its scales and of the transpose's, (down, across) and (across, down) or
    wider, and for codes.
    """

    fmt: Format
    rounding: ScaleRounding
    source: torch.dtype
    device: str
    straight: bool
    turned: bool

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        x, inverse, turned_inverse, *outputs = tensors
        stored = quantise(x, self.fmt, Scaling(SQUARE, SQUARE, rounding=self.rounding), checked=False)
        assert stored.scales is not None
        down, across = stored.scales.shape
        inverse[:, :across].copy_(stored.scales)
        turned_inverse[:, :down].copy_(stored.scales.t())
        return _write_codes(stored.codes.view(DTYPES[self.fmt.name]), self.straight, outputs)


def _write_codes(codes: Tensor, straight: bool, outputs: Sequence[Tensor]) -> tuple[()]:
    for number, out in enumerate(outputs):
        out.copy_(codes if straight and number == 0 else codes.t())
    return ()


def _numbers(kernel: CodesKernel | RowCodesKernel | SquareScalesKernel, rows: int, columns: int) -> Tensor:
    numbers = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    return numbers.to(torch.device(kernel.device), kernel.source)


def _empty_codes(kernel: CodesKernel | RowCodesKernel, rows: int, columns: int) -> Tensor:
    dtype = kernel.source if kernel.fmt is None else DTYPES[kernel.fmt.name]
    return torch.empty(rows, columns, dtype=dtype, device=kernel.device)
