"""The fused quantisers: which there are, what each computes, and how it reads and writes memory.

A kernel reads words in one canonical layout and writes words of the same shape. A word is a single value, or a pair
of bfloat16 values. On a CPU a loop that mixes 16-bit and 32-bit numbers vectorises badly and has a tenth of the speed
of a copy. A loop over 32-bit words vectorises well, unless it is shorter than a vector. So blocks of fewer than 16
values are read as single values.

The halves of words form two lanes. A lane is a float32 tensor of the words' shape: one has the first values and the
other the second values. Byte order is little-endian, as on all devices of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

import torch
from torch import Tensor

from fp8bench.formats.blocks import block_magnitudes, block_values, reciprocal
from fp8bench.formats.compiling import Kernel, draw_example
from fp8bench.formats.grids import BF16, E4M3, E8M0, Format, Overflow
from fp8bench.formats.quantise import compute_element_random_bits, round_magnitudes, round_values
from fp8bench.formats.recipes import Scaling

_BITS_PER_HALF_WORD = 16
_LOW_HALF_MASK = 0xFFFF
_HIGH_HALF_MASK = -0x10000
_MAGNITUDE_MASK = 0x7FFFFFFF
_HIGH_HALF_MAGNITUDE_MASK = 0x7FFF0000
_LARGEST_NAN_BITS = 0x7FFF0000
_SIGN_MASK = -0x80000000
_BOTH_SIGNS_MASK = -0x7FFF8000
_WORD_BITS = 32
_LOW_WORD_MASK = 0xFFFFFFFF


def view_as_words(x: Tensor, has_pairs: bool) -> Tensor:
    """Returns a view of a contiguous tensor as words. With `has_pairs`, two bfloat16 values share a word, and the view
    has half as many columns.
    """
    return x.view(torch.int32) if has_pairs else x


def view_result_as_words(out: Tensor, has_pairs: bool) -> Tensor:
    """Returns a contiguous output tensor viewed as words. With `has_pairs`, a word holds two numbers: two bfloat16 in
    32 bits, or two float32 in 64 bits.
    """
    if has_pairs:
        return out.view(torch.int32 if out.dtype is torch.bfloat16 else torch.int64)
    return out


def split_words_into_lanes(source: Tensor) -> list[Tensor]:
    """Splits words into lanes, one float32 tensor for each value of a word."""
    if source.dtype is not torch.int32:
        return [source.to(torch.float32)]
    half_words = source.bitwise_left_shift(_BITS_PER_HALF_WORD), source.bitwise_and(_HIGH_HALF_MASK)
    return [half_word.view(torch.float32) for half_word in half_words]


def split_magnitudes(source: Tensor) -> list[Tensor]:
    """Splits words into lanes of magnitudes, which are float32 values without signs."""
    if source.dtype is not torch.int32:
        return [source.to(torch.float32).abs()]
    half_words = (
        source.bitwise_left_shift(_BITS_PER_HALF_WORD).bitwise_and(_MAGNITUDE_MASK),
        source.bitwise_and(_HIGH_HALF_MAGNITUDE_MASK),
    )
    return [half_word.view(torch.float32) for half_word in half_words]


def split_float_lanes(source: Tensor) -> list[Tensor]:
    """Splits words of float32 numbers into lanes. A word of 32 bits holds one number, and a word of 64 bits holds
    two.
    """
    if source.dtype is torch.float32:
        return [source]
    half_words = source.to(torch.int32), source.bitwise_right_shift(_WORD_BITS).to(torch.int32)
    return [half_word.view(torch.float32) for half_word in half_words]


def join_value_lanes(values: Sequence[Tensor], target: torch.dtype, is_exact: bool = False) -> Tensor:
    """Joins two lanes into words of two numbers with the dtype `target`. The first lane has the first number of each
    word. Returns a single lane unchanged. With `is_exact`, `target` can represent every number, so nothing is rounded.
    """
    if len(values) == 1:
        return values[0]
    if target is torch.float32:
        return _join_floats([value.view(torch.int32) for value in values])
    rounded_lanes = values if is_exact else [round_values(value, BF16, overflow=Overflow.INFINITY) for value in values]
    low_bits, high_bits = (tensor.view(torch.int32) for tensor in rounded_lanes)
    return (
        low_bits.bitwise_right_shift(_BITS_PER_HALF_WORD)
        .bitwise_and(_LOW_HALF_MASK)
        .bitwise_or(high_bits.bitwise_and(_HIGH_HALF_MASK))
    )


def join_magnitude_lanes(
    values: Sequence[Tensor], origin: Tensor, target: torch.dtype, is_exact: bool = False
) -> Tensor:
    """Joins lanes of magnitudes into words of numbers with the dtype `target`. The numbers get the signs of `origin`,
    the words from which the magnitudes were computed.
    """
    bits = [value.view(torch.int32) for value in values]
    # With one lane, each word is a single number: take its sign from `origin` as a float32.
    if len(values) == 1:
        sign_bits = origin.to(torch.float32).view(torch.int32).bitwise_and(_SIGN_MASK)
        return bits[0].bitwise_or(sign_bits).view(torch.float32)
    if target is torch.float32:
        words = origin.bitwise_left_shift(_BITS_PER_HALF_WORD), origin
        bit_word_pairs = zip(bits, words, strict=True)
        return _join_floats([bit.bitwise_or(word.bitwise_and(_SIGN_MASK)) for bit, word in bit_word_pairs])
    # Two lanes: a word holds two bfloat16 numbers, each of which is the upper half of a float32.
    low_bits, high_bits = bits if is_exact else map(_round_to_bf16, bits)
    low_bits = low_bits.bitwise_right_shift(_BITS_PER_HALF_WORD).bitwise_and(_LOW_HALF_MASK)
    return low_bits.bitwise_or(high_bits.bitwise_and(_HIGH_HALF_MASK)).bitwise_or(origin.bitwise_and(_BOTH_SIGNS_MASK))


def _join_floats(bits: list[Tensor]) -> Tensor:
    low_bits, high_bits = (bit.to(torch.int64) for bit in bits)
    return low_bits.bitwise_and(_LOW_WORD_MASK).bitwise_or(high_bits.bitwise_left_shift(_WORD_BITS))


def _round_to_bf16(bits: Tensor) -> Tensor:
    """Rounds magnitudes so that the upper half of their bits is the nearest bfloat16. NaN stays NaN, even a NaN with
    all bits set.
    """
    # Limit the bits of a NaN, so that the additions below cannot carry into the sign bit.
    bounded_magnitude_bits = bits.bitwise_and(_MAGNITUDE_MASK).clamp(max=_LARGEST_NAN_BITS)
    return (
        bounded_magnitude_bits
        + bounded_magnitude_bits.bitwise_right_shift(_BITS_PER_HALF_WORD).bitwise_and(1)
        + (_LOW_HALF_MASK >> 1)
    )


class Layout(StrEnum):
    """How a kernel views a row-major matrix in memory.

    FLAT: as one row of elements. ROWS and COLUMNS: as a matrix with a factor for each row, or for each column.
    BLOCKS: as parts of rows, (blocks, size). UPRIGHT: as parts of columns, (down, size, columns). RECTANGLES: as
    rectangles, (down, rows, across, columns). An operand that is transposed in memory has the layout COLUMNS or
    UPRIGHT.
    """

    FLAT = "flat"
    ROWS = "rows"
    BLOCKS = "blocks"
    RECTANGLES = "rectangles"
    COLUMNS = "columns"
    UPRIGHT = "upright"


# The dimensions of the tensor of words whose sizes are dynamic, by layout.
_DYNAMIC_DIMENSIONS_BY_LAYOUT = {
    Layout.FLAT: (0,),
    Layout.ROWS: (0, 1),
    Layout.BLOCKS: (0,),
    Layout.RECTANGLES: (0, 2),
    Layout.COLUMNS: (0, 1),
    Layout.UPRIGHT: (0, 2),
}


# Blocks with at least this many columns are read in pairs of values: half as many words fill a vector of 256 bits.
_MIN_PAIRED_BLOCK_COLUMNS = 16


# Example sizes of the dynamic dimensions. No block has one of these sizes.
_EXAMPLE_ELEMENTS, _EXAMPLE_ROWS, _EXAMPLE_COLUMNS = 1 << 20, 20, 24


@dataclass(frozen=True)
class ValuesKernel(Kernel):
    """A fused quantiser that writes rounded values.

    `scaling` is the scaling of blocks. If `factor` is True, the kernel gets a factor as an argument: the factor of a
    tensor, row or column, or NVFP4's tensor scale for UPRIGHT blocks. Other kernels compute their scales from the
    largest magnitudes of their blocks, which is faster. `block` has the rows and columns of a block in memory, or is
    (0, 0) without blocks.
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
        """Returns for example 'e4m3fn 1x32 e8m0 rceil, float32 to float32, upright, cpu'."""
        scaling_text = f" {self.scaling.name}" if self.scaling else " scaled" if self.factor else ""
        rounding_text = " stochastic" if self.stochastic else ""
        dtypes = " to ".join(str(dtype).removeprefix("torch.") for dtype in (self.source, self.target))
        return f"{self.fmt.name}{scaling_text}{rounding_text}, {dtypes}, {self.layout!s}, {self.device}"

    @property
    def reads_value_pairs(self) -> bool:
        """Whether the kernel reads two bfloat16 values as one 32-bit word. It reads single values if a block in words
        would be shorter than a vector.
        """
        has_short_blocks = (
            self.layout in (Layout.BLOCKS, Layout.RECTANGLES) and self.block[1] < _MIN_PAIRED_BLOCK_COLUMNS
        )
        return self.source is torch.bfloat16 and not has_short_blocks

    @property
    def computes_scales_first(self) -> bool:
        """Whether a CPU kernel computes all scales before it rounds any value. The kernel then reads its input twice,
        which takes less time than computing scales one at a time.
        """
        return self.device == "cpu" and (
            self.reads_value_pairs or (self.scaling is not None and self.scaling.scale is E4M3)
        )

    @property
    def is_exact(self) -> bool:
        """Whether bfloat16 can hold every result without rounding. It can for formats of up to 8 bits, if they have no
        scales or power-of-two scales.
        """
        # Results are exact even where the format's steps are smaller than bfloat16's smallest subnormal. There, numbers
        # are multiples of this subnormal before rounding, and also after it.
        is_unscaled = self.scaling is None and not self.factor
        return self.fmt.bits <= 8 and (is_unscaled or (self.scaling is not None and self.scaling.scale is E8M0))

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        """Reads words from the first argument and writes words to the second. If the kernel has a factor, the factor is
        the third argument. If rounding is stochastic, the key of the seed is the last argument.

        The shape of the factor is (rows, 1) for ROWS, (1, words per row) for COLUMNS, and () otherwise. For UPRIGHT
        blocks of NVFP4 the factor is the tensor scale.
        """
        # `factor` and `stochastic` determine which optional tensors are present.
        source, out, *optional_tensors = tensors
        scale_factor = optional_tensors[0] if self.factor else None
        random_lanes = self._draw_random_lanes(source, optional_tensors[-1]) if self.stochastic else None
        # Magnitudes need fewer instructions than signed numbers, but only work for formats whose zero has a sign.
        if self.fmt.signed_zero:
            rounded_lanes = self._round_value_lanes(split_magnitudes(source), scale_factor, random_lanes)
            out.copy_(join_magnitude_lanes(rounded_lanes, source, self.target, self.is_exact))
        else:
            out.copy_(
                join_value_lanes(
                    self._round_value_lanes(split_words_into_lanes(source), scale_factor, random_lanes),
                    self.target,
                    self.is_exact,
                )
            )
        return ()

    def examples(self) -> list[Tensor]:
        # torch treats equal sizes as one size. So all sizes of an example above 1 differ from each other.
        shapes = {
            Layout.FLAT: (_EXAMPLE_ELEMENTS,),
            Layout.ROWS: (_EXAMPLE_ROWS * 32, _EXAMPLE_COLUMNS * 32),
            Layout.COLUMNS: (_EXAMPLE_ROWS * 32, _EXAMPLE_COLUMNS * 32),
            Layout.BLOCKS: (_EXAMPLE_ELEMENTS >> 4, self.block[1]),
            Layout.UPRIGHT: (_EXAMPLE_ROWS, self.block[0], _EXAMPLE_COLUMNS * 32),
            Layout.RECTANGLES: (_EXAMPLE_ROWS, self.block[0], _EXAMPLE_COLUMNS, self.block[1]),
        }
        x = draw_example(shapes[self.layout], self.source, self.device)
        inputs = view_as_words(x, self.reads_value_pairs)
        out = view_result_as_words(torch.empty_like(x, dtype=self.target), self.reads_value_pairs)
        # The factor is an argument of the kernel. Computing it here would need a second kernel, which reduces the
        # tensor first.
        factor_shapes = {Layout.ROWS: (inputs.shape[0], 1), Layout.COLUMNS: (1, x.shape[-1])}
        scale_factor = torch.full(factor_shapes.get(self.layout, ()), 0.75, dtype=torch.float32, device=self.device)
        if self.layout is Layout.COLUMNS:
            scale_factor = view_result_as_words(scale_factor, self.reads_value_pairs)
        key = torch.zeros((), dtype=torch.int32, device=self.device)
        return [inputs, out, *([scale_factor] if self.factor else []), *([key] if self.stochastic else [])]

    def free(self) -> list[Sequence[int]]:
        free_dimensions = _DYNAMIC_DIMENSIONS_BY_LAYOUT[self.layout]
        factor = {Layout.ROWS: (0,), Layout.COLUMNS: (1,)}.get(self.layout, ())
        return [
            free_dimensions,
            free_dimensions,
            *([factor] if self.factor else []),
            *([()] if self.stochastic else []),
        ]

    def options(self) -> Mapping[str, object]:
        # Inductor's propagation of indices would make Inductor compute the indices in a column one at a time, without
        # vectors.
        is_upright_stochastic = self.stochastic and self.layout is Layout.UPRIGHT
        return {"constant_and_index_propagation": False} if is_upright_stochastic else {}

    def _round_value_lanes(
        self, values: list[Tensor], factor: Tensor | None, random: list[Tensor] | None
    ) -> list[Tensor]:
        """Rounds the lanes `values`, scaled by `factor` or by block scales. Lanes are magnitudes if the format's zero
        has a sign.
        """
        if self.scaling is None:
            return self._round_lanes_with_factor(values, factor, random)
        if self.layout is Layout.UPRIGHT:
            return self._round_upright_blocks(values, factor, random)
        if self.fmt.signed_zero:
            return block_magnitudes(values, self.fmt, self.scaling, factor, random, self.computes_scales_first)
        return block_values(values, self.fmt, self.scaling, factor, random)

    def _round_lanes_with_factor(
        self, values: list[Tensor], factor: Tensor | None, random: list[Tensor] | None
    ) -> list[Tensor]:
        random_lanes: Sequence[Tensor | None] = random or [None] * len(values)
        if factor is None:
            return [
                self._round_lane(value, random_lane) for value, random_lane in zip(values, random_lanes, strict=True)
            ]
        # Each column has its own factor. Two columns that share a word have different factors.
        lane_factors = split_float_lanes(factor) if self.layout is Layout.COLUMNS else [factor] * len(values)
        rounded_lanes = [
            self._round_lane(value * lane_factor, random_bits)
            for value, lane_factor, random_bits in zip(values, lane_factors, random_lanes, strict=True)
        ]
        return [
            tensor * reciprocal(lane_factor) for tensor, lane_factor in zip(rounded_lanes, lane_factors, strict=True)
        ]

    def _round_lane(self, values: Tensor, random: Tensor | None) -> Tensor:
        round_function = round_magnitudes if self.fmt.signed_zero else round_values
        return round_function(values, self.fmt, random, self.overflow)

    def _round_upright_blocks(
        self, values: list[Tensor], factor: Tensor | None, random: list[Tensor] | None
    ) -> list[Tensor]:
        """Rounds blocks that run down columns. Rounds each lane separately, because the two columns in a word belong to
        different blocks.
        """
        assert self.scaling is not None
        rounded_lanes = []
        round_blocks = block_magnitudes if self.fmt.signed_zero else block_values
        for lane, value in enumerate(values):
            random_lane = [random[lane].unsqueeze(-1)] if random else None
            rounded_lanes += round_blocks([value.unsqueeze(-1)], self.fmt, self.scaling, factor, random_lane)
        return [tensor.squeeze(-1) for tensor in rounded_lanes]

    def _draw_random_lanes(self, source: Tensor, key: Tensor) -> list[Tensor]:
        """Returns random numbers for each lane. Elements are counted along the rows of the operand, even if the operand
        is transposed in memory.
        """
        values_per_word = 2 if self.reads_value_pairs else 1
        columns = torch.arange(source.shape[-1], dtype=torch.int32, device=key.device) * values_per_word
        rows = torch.arange(prod(source.shape[:-1]), dtype=torch.int32, device=key.device).view(*source.shape[:-1], 1)
        # Blocks run down a column in memory, but their elements are numbered along the rows of the operand.
        if self.layout is Layout.UPRIGHT:
            columns = columns * (source.shape[0] * source.shape[1])
            return [
                compute_element_random_bits(columns + (rows + lane * source.shape[0] * source.shape[1]), key)
                for lane in range(values_per_word)
            ]
        rows = rows * (source.shape[-1] * values_per_word)
        return [compute_element_random_bits(rows + (columns + lane), key) for lane in range(values_per_word)]
