"""Fused quantisers: which there are, and what each computes.

A kernel reads words (vector_access.py) in one canonical layout and writes words of the same shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

import torch
from torch import Tensor

from fp8bench.formats.blocks import block_values, magnitudes_left
from fp8bench.formats.compiling import Kernel
from fp8bench.formats.grids import E4M3, E8M0, Format, Overflow
from fp8bench.formats.quantise import quantised, rounded_magnitudes
from fp8bench.formats.random_bits import drawn_bits
from fp8bench.formats.scalings import Scaling
from fp8bench.formats.vector_access import (
    float_lanes,
    joined,
    joined_magnitudes,
    lanes,
    magnitudes,
    result_words,
    words,
)


class Layout(StrEnum):
    """How a kernel sees a matrix that lies in memory row by row; the second half are those of transposed operands.

    FLAT as a row of elements, ROWS and COLUMNS with one factor each, BLOCKS (blocks, size) as parts of rows,
    UPRIGHT (down, size, columns) as parts of columns, RECTANGLES (down, rows, across, columns).
    """

    FLAT = "flat"
    ROWS = "rows"
    BLOCKS = "blocks"
    RECTANGLES = "rectangles"
    COLUMNS = "columns"
    UPRIGHT = "upright"


_FREE = {
    Layout.FLAT: (0,),
    Layout.ROWS: (0, 1),
    Layout.BLOCKS: (0,),
    Layout.RECTANGLES: (0, 2),
    Layout.COLUMNS: (0, 1),
    Layout.UPRIGHT: (0, 2),
}
"""The dimensions of words whose sizes a kernel leaves open."""


_SHORTEST = 16
"""Columns of a block whose values are taken by twos: half as many words fill a vector of 256 bits."""


# Free sizes of examples, which are no size of a block.
_MANY, _ROWS, _COLUMNS = 1 << 20, 20, 24


@dataclass(frozen=True)
class ValuesKernel(Kernel):
    """One fused quantiser.

    `scaling` is that of blocks; what has a factor a tensor, row or column is given it (`factor`), and so are NVFP4's
    UPRIGHT blocks the tensor's scale: others make it faster of their own amaxes. `block` is a block's rows and columns
    in memory, 0 x 0 where there are none.
    """

    fmt: Format
    scaling: Scaling | None
    layout: Layout
    source: torch.dtype
    target: torch.dtype
    device: str
    block: tuple[int, int] = (0, 0)
    overflow: Overflow = Overflow.SATURATE
    factor: bool = False
    stochastic: bool = False

    def __str__(self) -> str:
        """'e4m3fn 1x32 e8m0 rceil, float32 to float32, upright, cpu'."""
        scaled = f" {self.scaling.name}" if self.scaling else " scaled" if self.factor else ""
        drawn = " stochastic" if self.stochastic else ""
        dtypes = " to ".join(str(one).removeprefix("torch.") for one in (self.source, self.target))
        return f"{self.fmt.name}{scaled}{drawn}, {dtypes}, {self.layout!s}, {self.device}"

    @property
    def twos(self) -> bool:
        """Whether words hold two values: bfloat16 ones, unless blocks are shorter than a vector of such words."""
        short = self.layout in (Layout.BLOCKS, Layout.RECTANGLES) and self.block[1] < _SHORTEST
        return self.source is torch.bfloat16 and not short

    @property
    def apart(self) -> bool:
        """Whether a CPU makes all scales first: reading words twice costs less than making scales one at a time."""
        return self.device == "cpu" and (self.twos or (self.scaling is not None and self.scaling.scale is E4M3))

    @property
    def exact(self) -> bool:
        """Whether the target has every value that comes out, if it is bfloat16.

        It has those of formats of 8 bits and less. Under a power of two, too: a value of bfloat16's that lies so low
        that elements go below its subnormals is a whole number of their steps, before and after rounding.
        """
        plain = self.scaling is None and not self.factor
        return self.fmt.bits <= 8 and (plain or (self.scaling is not None and self.scaling.scale is E8M0))

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        """Called with words, words to write, and of kernels with one the factor and the seed's key.

        Factors are () or (rows, 1), or (1, words) for COLUMNS; for UPRIGHT blocks of NVFP4's it is the tensor's scale.
        """
        given, out, *others = tensors
        factor = others[0] if self.factor else None
        random = self._random(given, others[-1]) if self.stochastic else None
        if self.fmt.signed_zero:
            left = self._left(magnitudes(given), factor, random)
            out.copy_(joined_magnitudes(left, given, self.target, self.exact))
        else:
            values = self._left(lanes(given), factor, random)
            out.copy_(joined(values, self.target, self.exact))
        return ()

    def examples(self) -> list[Tensor]:
        shapes = {
            Layout.FLAT: (_MANY,),
            Layout.ROWS: (_ROWS * 32, _COLUMNS * 32),
            Layout.COLUMNS: (_ROWS * 32, _COLUMNS * 32),
            Layout.BLOCKS: (_MANY >> 4, self.block[1]),
            Layout.UPRIGHT: (_ROWS, self.block[0], _COLUMNS * 32),
            Layout.RECTANGLES: (_ROWS, self.block[0], _COLUMNS, self.block[1]),
        }
        device = torch.device(self.device)
        x = torch.randn(shapes[self.layout], generator=torch.Generator().manual_seed(0)).to(device, self.source)
        given, out = words(x, self.twos), result_words(torch.empty_like(x, dtype=self.target), self.twos)
        factors = {Layout.ROWS: (given.shape[0], 1), Layout.COLUMNS: (1, x.shape[-1])}
        factor = torch.full(factors.get(self.layout, ()), 0.75, dtype=torch.float32, device=device)
        if self.layout is Layout.COLUMNS:
            factor = result_words(factor, self.twos)
        key = torch.zeros((), dtype=torch.int32, device=device)
        return [given, out, *([factor] if self.factor else []), *([key] if self.stochastic else [])]

    def free(self) -> list[Sequence[int]]:
        free = _FREE[self.layout]
        factor = {Layout.ROWS: (0,), Layout.COLUMNS: (1,)}.get(self.layout, ())
        return [free, free, *([factor] if self.factor else []), *([()] if self.stochastic else [])]

    def options(self) -> Mapping[str, object]:
        # The places of elements stay integers in vectors: as an index down the columns each would be found alone.
        upright = self.stochastic and self.layout is Layout.UPRIGHT
        return {"constant_and_index_propagation": False} if upright else {}

    def _left(self, values: list[Tensor], factor: Tensor | None, random: list[Tensor] | None) -> list[Tensor]:
        """What is left of values, or of their magnitudes, where the format has a sign for every one."""
        if self.scaling is None:
            return self._elements(values, factor, random)
        if self.layout is Layout.UPRIGHT:
            return self._upright(values, factor, random)
        if self.fmt.signed_zero:
            return magnitudes_left(values, self.fmt, self.scaling, factor, random, self.apart)
        return block_values(values, self.fmt, self.scaling, factor, random)

    def _elements(self, values: list[Tensor], factor: Tensor | None, random: list[Tensor] | None) -> list[Tensor]:
        drawn: Sequence[Tensor | None] = random or [None] * len(values)
        if factor is None:
            return [self._rounded(one, by) for one, by in zip(values, drawn, strict=True)]
        # Columns have factors of their own: those of two neighbours stand in a word, too.
        factors = float_lanes(factor) if self.layout is Layout.COLUMNS else [factor] * len(values)
        rounded = [self._rounded(one * by, draw) for one, by, draw in zip(values, factors, drawn, strict=True)]
        return [one * by.reciprocal() for one, by in zip(rounded, factors, strict=True)]

    def _rounded(self, values: Tensor, random: Tensor | None) -> Tensor:
        how = rounded_magnitudes if self.fmt.signed_zero else quantised
        return how(values, self.fmt, random, self.overflow)

    def _upright(self, values: list[Tensor], factor: Tensor | None, random: list[Tensor] | None) -> list[Tensor]:
        """Each column of words holds columns of elements, whose blocks have scales of their own."""
        assert self.scaling is not None
        left = []
        blocks = magnitudes_left if self.fmt.signed_zero else block_values
        for lane, one in enumerate(values):
            drawn = [random[lane].unsqueeze(-1)] if random else None
            left += blocks([one.unsqueeze(-1)], self.fmt, self.scaling, factor, drawn)
        return [one.squeeze(-1) for one in left]

    def _random(self, given: Tensor, key: Tensor) -> list[Tensor]:
        """Numbers for each lane, counted along the rows of the operand, which are columns in memory if it is turned."""
        every = 2 if self.twos else 1
        columns = torch.arange(given.shape[-1], dtype=torch.int32, device=key.device) * every
        rows = torch.arange(prod(given.shape[:-1]), dtype=torch.int32, device=key.device).view(*given.shape[:-1], 1)
        if self.layout is Layout.UPRIGHT:
            columns = columns * (given.shape[0] * given.shape[1])
            return [drawn_bits(columns + (rows + lane * given.shape[0] * given.shape[1]), key) for lane in range(every)]
        rows = rows * (given.shape[-1] * every)
        return [drawn_bits(rows + (columns + lane), key) for lane in range(every)]
