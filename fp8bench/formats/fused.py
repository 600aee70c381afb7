"""Fused quantisers: which there are, what each computes, and how they read and write.

A kernel reads words in one canonical layout and writes words of the same shape: single values, or pairs of bfloat16
values as halves of a word. On a CPU, a loop over numbers of 16 and of 32 bits vectorises badly (a tenth of the speed of
a copy), and one over words of 32 bits well, unless it is shorter than a vector: blocks of 16 are read as single values.
The halves of a word are two lanes: float32 tensors of the words' shape, one with the first values and one with the
second. Bytes are in little-endian order, as on all devices of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

import torch
from torch import Tensor

from fp8bench.formats.blocks import block_values, inverse_of, magnitudes_left
from fp8bench.formats.compiling import Kernel
from fp8bench.formats.grids import BF16, E4M3, E8M0, Format, Overflow
from fp8bench.formats.quantise import drawn_bits, round_values, rounded_magnitudes
from fp8bench.formats.recipes import Scaling

_HALF = 16
_LOW_HALF = 0xFFFF
_HIGH_HALF = -0x10000
_MAGNITUDE = 0x7FFFFFFF
_HIGH_MAGNITUDE = 0x7FFF0000
_LARGEST_NAN = 0x7FFF0000
_SIGN = -0x80000000
_BOTH_SIGNS = -0x7FFF8000
_WORD = 32
_LOW_WORD = 0xFFFFFFFF


def words(x: Tensor, twos: bool) -> Tensor:
    """A contiguous tensor as words: half as many columns where two bfloat16 values share one."""
    return x.view(torch.int32) if twos else x


def result_words(out: Tensor, twos: bool) -> Tensor:
    """A contiguous output tensor as words, into which lanes are joined."""
    if twos:
        return out.view(torch.int32 if out.dtype is torch.bfloat16 else torch.int64)
    return out


def lanes(source: Tensor) -> list[Tensor]:
    if source.dtype is not torch.int32:
        return [source.to(torch.float32)]
    return [half.view(torch.float32) for half in (source.bitwise_left_shift(_HALF), source.bitwise_and(_HIGH_HALF))]


def magnitudes(source: Tensor) -> list[Tensor]:
    if source.dtype is not torch.int32:
        return [source.to(torch.float32).abs()]
    halves = source.bitwise_left_shift(_HALF).bitwise_and(_MAGNITUDE), source.bitwise_and(_HIGH_MAGNITUDE)
    return [half.view(torch.float32) for half in halves]


def float_lanes(source: Tensor) -> list[Tensor]:
    """The lanes of float32 numbers, one or two of which are in a word (of 64 bits)."""
    if source.dtype is torch.float32:
        return [source]
    halves = source.to(torch.int32), source.bitwise_right_shift(_WORD).to(torch.int32)
    return [half.view(torch.float32) for half in halves]


def join_lanes(values: Sequence[Tensor], target: torch.dtype, exact: bool = False) -> Tensor:
    """Joins two lanes to words of `target` values; returns a single lane unchanged. `exact`: nothing is rounded."""
    if len(values) == 1:
        return values[0]
    if target is torch.float32:
        return _joined_floats([value.view(torch.int32) for value in values])
    rounded = values if exact else [round_values(value, BF16, overflow=Overflow.INFINITY) for value in values]
    low, high = (tensor.view(torch.int32) for tensor in rounded)
    return low.bitwise_right_shift(_HALF).bitwise_and(_LOW_HALF).bitwise_or(high.bitwise_and(_HIGH_HALF))


def joined_magnitudes(values: Sequence[Tensor], origin: Tensor, target: torch.dtype, exact: bool = False) -> Tensor:
    """Joins magnitudes, and gives them the signs of the words that they come from."""
    bits = [value.view(torch.int32) for value in values]
    # One lane: its sign bit is where float32 has it.
    if len(values) == 1:
        return bits[0].bitwise_or(origin.to(torch.float32).view(torch.int32).bitwise_and(_SIGN)).view(torch.float32)
    if target is torch.float32:
        signs = origin.bitwise_left_shift(_HALF), origin
        return _joined_floats([bit.bitwise_or(by.bitwise_and(_SIGN)) for bit, by in zip(bits, signs, strict=True)])
    # Two lanes: the upper halves of two float32 numbers are two bfloat16 ones in a word.
    low, high = bits if exact else map(_nearest_bf16, bits)
    low = low.bitwise_right_shift(_HALF).bitwise_and(_LOW_HALF)
    return low.bitwise_or(high.bitwise_and(_HIGH_HALF)).bitwise_or(origin.bitwise_and(_BOTH_SIGNS))


def _joined_floats(bits: list[Tensor]) -> Tensor:
    low, high = (bit.to(torch.int64) for bit in bits)
    return low.bitwise_and(_LOW_WORD).bitwise_or(high.bitwise_left_shift(_WORD))


def _nearest_bf16(bits: Tensor) -> Tensor:
    """Rounds magnitudes so that their upper half is the nearest bfloat16. A NaN, all bits of which may be set, stays
    one."""
    bounded = bits.bitwise_and(_MAGNITUDE).clamp(max=_LARGEST_NAN)
    return bounded + bounded.bitwise_right_shift(_HALF).bitwise_and(1) + (_LOW_HALF >> 1)


class Layout(StrEnum):
    """How a kernel views a row-major matrix; COLUMNS and UPRIGHT are those of transposed operands.

    FLAT as a row of elements, ROWS and COLUMNS with one factor each, BLOCKS (blocks, size) as parts of rows, UPRIGHT
    (down, size, columns) as parts of columns, RECTANGLES (down, rows, across, columns).
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
"""The dimensions of words whose sizes are free."""


_SHORTEST = 16
"""Columns of a block from which on values are taken in pairs: half as many words fill a vector of 256 bits."""


# Free sizes of examples, different from any block's size.
_MANY, _ROWS, _COLUMNS = 1 << 20, 20, 24


@dataclass(frozen=True)
class ValuesKernel(Kernel):
    """One fused quantiser.

    `scaling` is that of blocks. Kernels with a `factor` are given it: the factor of a tensor, row or column, and
    NVFP4's tensor scale for UPRIGHT blocks; other kernels compute that faster from their own amaxes. `block` has a
    block's rows and columns in memory, 0 x 0 without blocks.
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
        """For example 'e4m3fn 1x32 e8m0 rceil, float32 to float32, upright, cpu'."""
        scaled = f" {self.scaling.name}" if self.scaling else " scaled" if self.factor else ""
        drawn = " stochastic" if self.stochastic else ""
        dtypes = " to ".join(str(dtype).removeprefix("torch.") for dtype in (self.source, self.target))
        return f"{self.fmt.name}{scaled}{drawn}, {dtypes}, {self.layout!s}, {self.device}"

    @property
    def twos(self) -> bool:
        """Whether words hold two bfloat16 values: not where blocks are shorter than a vector of such words."""
        short = self.layout in (Layout.BLOCKS, Layout.RECTANGLES) and self.block[1] < _SHORTEST
        return self.source is torch.bfloat16 and not short

    @property
    def apart(self) -> bool:
        """Whether a CPU computes all scales first: reading words twice costs less than computing scales one at a
        time."""
        return self.device == "cpu" and (self.twos or (self.scaling is not None and self.scaling.scale is E4M3))

    @property
    def exact(self) -> bool:
        """Whether a bfloat16 target can hold every result. It can for formats of at most 8 bits, under power-of-two
        scales as well: a bfloat16 value so small that elements fall below its subnormals is a whole number of their
        steps, before and after rounding."""
        plain = self.scaling is None and not self.factor
        return self.fmt.bits <= 8 and (plain or (self.scaling is not None and self.scaling.scale is E8M0))

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        """Takes words, words to write, and, in kernels with them, the factor and the seed's key.

        Factors are () or (rows, 1), or (1, words) for COLUMNS; for NVFP4's UPRIGHT blocks it is the tensor's scale.
        """
        # Which optional tensors there are is fixed when the kernel is compiled.
        source, out, *optional = tensors
        factor = optional[0] if self.factor else None
        random = self._random(source, optional[-1]) if self.stochastic else None
        # Magnitudes take fewer instructions than signed numbers, but need a format whose zero has a sign.
        if self.fmt.signed_zero:
            rounded = self._left(magnitudes(source), factor, random)
            out.copy_(joined_magnitudes(rounded, source, self.target, self.exact))
        else:
            values = self._left(lanes(source), factor, random)
            out.copy_(join_lanes(values, self.target, self.exact))
        return ()

    def examples(self) -> list[Tensor]:
        # Sizes of the examples decide what torch takes for free, so each layout has distinct ones above 1.
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
        inputs, out = words(x, self.twos), result_words(torch.empty_like(x, dtype=self.target), self.twos)
        # Factors are computed outside: a kernel that reduced the tensor first would be two kernels.
        factors = {Layout.ROWS: (inputs.shape[0], 1), Layout.COLUMNS: (1, x.shape[-1])}
        factor = torch.full(factors.get(self.layout, ()), 0.75, dtype=torch.float32, device=device)
        if self.layout is Layout.COLUMNS:
            factor = result_words(factor, self.twos)
        key = torch.zeros((), dtype=torch.int32, device=device)
        return [inputs, out, *([factor] if self.factor else []), *([key] if self.stochastic else [])]

    def free(self) -> list[Sequence[int]]:
        free = _FREE[self.layout]
        factor = {Layout.ROWS: (0,), Layout.COLUMNS: (1,)}.get(self.layout, ())
        return [free, free, *([factor] if self.factor else []), *([()] if self.stochastic else [])]

    def options(self) -> Mapping[str, object]:
        # Indices of elements stay integer vectors; propagated down the columns they would be computed one by one.
        upright = self.stochastic and self.layout is Layout.UPRIGHT
        return {"constant_and_index_propagation": False} if upright else {}

    def _left(self, values: list[Tensor], factor: Tensor | None, random: list[Tensor] | None) -> list[Tensor]:
        """Returns the rounded values, or rounded magnitudes if the format has a sign for every value."""
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
            return [self._round(value, by) for value, by in zip(values, drawn, strict=True)]
        # Each column has its own factor, also two columns that share a word.
        factors = float_lanes(factor) if self.layout is Layout.COLUMNS else [factor] * len(values)
        rounded = [self._round(value * by, draw) for value, by, draw in zip(values, factors, drawn, strict=True)]
        return [tensor * inverse_of(by) for tensor, by in zip(rounded, factors, strict=True)]

    def _round(self, values: Tensor, random: Tensor | None) -> Tensor:
        how = rounded_magnitudes if self.fmt.signed_zero else round_values
        return how(values, self.fmt, random, self.overflow)

    def _upright(self, values: list[Tensor], factor: Tensor | None, random: list[Tensor] | None) -> list[Tensor]:
        """Each column of words holds columns of elements, whose blocks have separate scales."""
        assert self.scaling is not None
        rounded = []
        blocks = magnitudes_left if self.fmt.signed_zero else block_values
        for lane, value in enumerate(values):
            drawn = [random[lane].unsqueeze(-1)] if random else None
            rounded += blocks([value.unsqueeze(-1)], self.fmt, self.scaling, factor, drawn)
        return [tensor.squeeze(-1) for tensor in rounded]

    def _random(self, source: Tensor, key: Tensor) -> list[Tensor]:
        """Random numbers for each lane, counted along the rows of the operand, which are columns in memory if it is
        transposed."""
        every = 2 if self.twos else 1
        columns = torch.arange(source.shape[-1], dtype=torch.int32, device=key.device) * every
        rows = torch.arange(prod(source.shape[:-1]), dtype=torch.int32, device=key.device).view(*source.shape[:-1], 1)
        # Blocks that run down a column lie apart in memory, but their numbers still count along the rows.
        if self.layout is Layout.UPRIGHT:
            columns = columns * (source.shape[0] * source.shape[1])
            return [
                drawn_bits(columns + (rows + lane * source.shape[0] * source.shape[1]), key) for lane in range(every)
            ]
        rows = rows * (source.shape[-1] * every)
        return [drawn_bits(rows + (columns + lane), key) for lane in range(every)]
