"""Scalings and recipes as values: which elements share a scale, and how operands are rounded. Does not use torch.

An operand is a matrix. Its product sums over the last dimension, the contraction. A block has `rows` x `columns` of
its elements. A linear layer has three products: forward (inputs, weights), input gradient (gradients, weights) and
weight gradient (gradients, inputs). Each sums over another dimension, and blocks run along that dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from fp8bench.errors import RecipeRefused
from fp8bench.formats.grids import E2M1, E4M3, E5M2, E8M0, Format


def count_blocks(length: int, size: int) -> int:
    """Returns how many blocks of this size cover a length. The last block may be incomplete."""
    return -(-length // size)


def round_up(length: int, multiple: int) -> int:
    return count_blocks(length, multiple) * multiple


MX_ELEMENTS = ("e4m3fn", "e5m2", "e3m2", "e2m3", "e2m1")


class ScaleRounding(StrEnum):
    """How the scale of a block is made. The quotient is its largest magnitude divided by the format's largest value.

    float32 scales: EXACT is the quotient. POWER_OF_TWO is the next power of two above the quotient, with which
    nothing saturates.

    e8m0 scales are powers of two. FLOOR rounds the block's largest magnitude and the format's largest value down to
    powers of two before it divides them, as in the OCP specification. Values near the block's largest may then
    saturate. EVEN and CEIL do the same, but first round the largest magnitude: EVEN to the mantissa bits of the
    elements, and CEIL up to a power of two. RCEIL rounds the quotient up to a power of two, as in NVIDIA's training
    recipes.

    e4m3 scales: NEAREST rounds the quotient to nearest even, and UP rounds it up.
    """

    EXACT = "exact"
    POWER_OF_TWO = "pow2"
    FLOOR = "floor"
    EVEN = "even"
    CEIL = "ceil"
    RCEIL = "rceil"
    NEAREST = "nearest"
    UP = "up"


SCALE_ROUNDINGS_BY_FORMAT = {
    None: (ScaleRounding.EXACT, ScaleRounding.POWER_OF_TWO),
    E8M0: (ScaleRounding.FLOOR, ScaleRounding.EVEN, ScaleRounding.CEIL, ScaleRounding.RCEIL),
    E4M3: (ScaleRounding.NEAREST, ScaleRounding.UP),
}


@dataclass(frozen=True)
class Scaling:
    """One scale for each block of `rows` x `columns` elements. 0 means that a block has all rows, or all columns.

    `scale` is the format of scales. None means float32, and e8m0 means powers of two. With e4m3 scales, the whole
    tensor has a second scale in float32.
    """

    rows: int
    columns: int
    scale: Format | None = None
    rounding: ScaleRounding = ScaleRounding.EXACT

    def __post_init__(self) -> None:
        # Refuse rounding modes of scales that no hardware has.
        if self.rounding not in SCALE_ROUNDINGS_BY_FORMAT[self.scale]:
            choices_text = ", ".join(SCALE_ROUNDINGS_BY_FORMAT[self.scale])
            scale_format = self.scale.name if self.scale else "float32"
            raise RecipeRefused(f"scales in {scale_format} are not rounded by {self.rounding!s}. Give {choices_text}.")

    @property
    def name(self) -> str:
        """The name of the scaling: 'tensor', 'row', '1x128', '1x32 e8m0' or '1x16 e4m3fn', followed by the rounding of
        the scales.
        """
        scale_extent_text = "tensor" if not self.rows else "row" if not self.columns else f"{self.rows}x{self.columns}"
        scale_format = f" {self.scale.name}" if self.scale else ""
        return f"{scale_extent_text}{scale_format} {self.rounding}"

    @property
    def turns(self) -> bool:
        """Whether an operand and its transpose have the same blocks."""
        return self.rows == self.columns

    def check(self, fmt: Format) -> None:
        if self.scale is E8M0 and fmt.name not in MX_ELEMENTS:
            raise RecipeRefused(f"MX blocks hold {', '.join(MX_ELEMENTS)}, not {fmt.name}.")
        if self.scale is E4M3 and fmt is not E2M1:
            raise RecipeRefused(f"NVFP4's scales are for e2m1 elements, not for {fmt.name}.")


TENSOR = Scaling(0, 0)
TENSOR_POWER_OF_TWO = Scaling(0, 0, rounding=ScaleRounding.POWER_OF_TWO)
ROW = Scaling(1, 0)
ROW_POWER_OF_TWO = Scaling(1, 0, rounding=ScaleRounding.POWER_OF_TWO)
BLOCK = Scaling(1, 128)
BLOCK_POWER_OF_TWO = Scaling(1, 128, rounding=ScaleRounding.POWER_OF_TWO)
SQUARE = Scaling(128, 128)
SQUARE_POWER_OF_TWO = Scaling(128, 128, rounding=ScaleRounding.POWER_OF_TWO)
MX = Scaling(1, 32, E8M0, ScaleRounding.RCEIL)
NVFP4 = Scaling(1, 16, E4M3, ScaleRounding.NEAREST)
NVFP4_ROUNDED_UP = Scaling(1, 16, E4M3, ScaleRounding.UP)
NVFP4_SQUARE = Scaling(16, 16, E4M3, ScaleRounding.NEAREST)


LONGEST_HISTORY = 1 << 16
MAX_SCALE_MARGIN = 32
# The significant bits of sums in Hopper's FP8 units, and the allowed range for sums with fewer bits than the 24 of
# float32.
HOPPER_SUM_BITS = 14
SHORT_SUM_BITS = range(2, 24)


class Amax(StrEnum):
    """Which of the largest magnitudes in its history delayed scaling uses."""

    MAX = "max"
    MOST_RECENT = "most_recent"


class Accumulator(StrEnum):
    """The precision in which a matrix product accumulates.

    FP32: in float32. SHORT: with few significant bits, such as the 14 of Hopper's FP8 units. PROMOTED: in short sums
    that are added to a float32 sum every 128 elements, as in the training of DeepSeek-V3.
    """

    FP32 = "fp32"
    SHORT = "short"
    PROMOTED = "promoted"


@dataclass(frozen=True)
class DelayedScaling:
    """Delayed scaling: the scale of a tensor is computed from its largest magnitudes in earlier steps.

    The scale is the format's largest value / (amax * 2^margin). It is computed again every `interval` casts, from the
    last `history` amaxes of the tensor. It starts at 1, and an amax of 0 does not change it.
    """

    history: int = 1024
    algorithm: Amax = Amax.MAX
    margin: int = 0
    interval: int = 1


@dataclass(frozen=True)
class Treatment:
    """How tensors of one role are cast: the element format, the scaling, and whether rounding is stochastic. The
    scaling is None if tensors have no scale.
    """

    fmt: Format
    scaling: Scaling | None = None
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.scaling is not None:
            self.scaling.check(self.fmt)


@dataclass(frozen=True)
class Recipe:
    """How each role is cast (formats, scalings and rounding), and how products sum.

    With `delayed`, the scale of a tensor comes from earlier steps. `hadamard` rotates both operands of the weight
    gradient by random Hadamard matrices of size 16. `high_weight_gradient` computes the weight gradient in bf16.
    `accumulator_bits` is the number of significant bits of short sums.
    """

    input: Treatment
    weight: Treatment
    gradient: Treatment
    delayed: DelayedScaling | None = None
    hadamard: bool = False
    high_weight_gradient: bool = False
    accumulator: Accumulator = Accumulator.FP32
    accumulator_bits: int = HOPPER_SUM_BITS

    def __post_init__(self) -> None:
        if self.hadamard and self.high_weight_gradient:
            raise RecipeRefused(
                "Hadamard rotates the operands of the weight gradient, which stays in bf16 here: leave one out "
                "(hadamard=off, or weight-gradient=low)."
            )

    @property
    def treatments(self) -> tuple[Treatment, Treatment, Treatment]:
        return self.input, self.weight, self.gradient

    # Cached, because it is read for every cast.
    @cached_property
    def has_tensor_scales_only(self) -> bool:
        return all(
            treatment.scaling is not None and treatment.scaling.rows == 0 and treatment.scaling.scale is None
            for treatment in self.treatments
        )

    @property
    def is_unscaled(self) -> bool:
        return all(treatment.scaling is None for treatment in self.treatments)

    @property
    def has_block_scaling(self) -> bool:
        """Whether the scaling of any role divides a row into several blocks, each with a scale."""
        return any(treatment.scaling is not None and treatment.scaling.columns > 0 for treatment in self.treatments)

    @property
    def products(self) -> tuple[tuple[Treatment, Treatment], ...]:
        """Pairs of operands, one pair for each product: forward, input gradient and weight gradient. A weight gradient
        that is computed in bf16 is left out.
        """
        operand_pairs = ((self.input, self.weight), (self.gradient, self.weight), (self.gradient, self.input))
        return operand_pairs[:2] if self.high_weight_gradient else operand_pairs

    @property
    def keeps_source(self) -> bool:
        """Whether the transpose of an operand must be cast from the unrounded operand (the source), because transposing
        the codes is not enough.
        """
        do_scalings_suit_transpose = all(
            treatment.scaling is None or treatment.scaling.turns for treatment in self.treatments
        )
        # Stochastic casts of an operand and of its transpose draw different random numbers. `hadamard` rotates the
        # source before it is cast, and `high_weight_gradient` casts it to bf16.
        is_stochastic = any(treatment.stochastic for treatment in self.treatments)
        return self.hadamard or self.high_weight_gradient or is_stochastic or not do_scalings_suit_transpose


# The formats of inputs, weights and gradients, by the names that FP8 training uses.
FORMATS_BY_ROLE: dict[str, tuple[Format, Format, Format]] = {
    "hybrid": (E4M3, E4M3, E5M2),
    "e4m3": (E4M3, E4M3, E4M3),
    "e5m2": (E5M2, E5M2, E5M2),
}
