"""Scalings and recipes as values: which elements share a scale, and what operands are rounded to. Knows no torch.

An operand is a matrix whose last dimension is its product's contraction; a block is `rows` x `columns` of it. A linear
layer has three products: forward (inputs, weights), the input gradient (gradients, weights) and the weight gradient
(gradients, inputs). Each contracts over another dimension, along which blocks lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from fp8bench.errors import RecipeRefused
from fp8bench.formats.grids import E2M1, E4M3, E5M2, E8M0, Format

MX_ELEMENTS = ("e4m3fn", "e5m2", "e3m2", "e2m3", "e2m1")


class ScaleRounding(StrEnum):
    """How the quotient of a block's largest magnitude and the format's becomes a scale.

    float32 scales: EXACT takes the quotient, POWER_OF_TWO the next power of two above it (nothing saturates). e8m0
    scales: FLOOR is the OCP specification's, the difference of the exponents, so that values near the block's largest
    may saturate; EVEN is the same after rounding the largest to the elements' mantissa; CEIL rounds the largest up to a
    power of two first; RCEIL rounds the quotient up, as NVIDIA's training recipes do. e4m3 scales: NEAREST rounds the
    quotient to nearest even, UP to the next value above it.
    """

    EXACT = "exact"
    POWER_OF_TWO = "pow2"
    FLOOR = "floor"
    EVEN = "even"
    CEIL = "ceil"
    RCEIL = "rceil"
    NEAREST = "nearest"
    UP = "up"


ROUNDINGS = {
    None: (ScaleRounding.EXACT, ScaleRounding.POWER_OF_TWO),
    E8M0: (ScaleRounding.FLOOR, ScaleRounding.EVEN, ScaleRounding.CEIL, ScaleRounding.RCEIL),
    E4M3: (ScaleRounding.NEAREST, ScaleRounding.UP),
}


@dataclass(frozen=True)
class Scaling:
    """One scale for each block of `rows` x `columns` elements; 0 stands for all there are.

    `scale` is the format of scales: None is float32, e8m0 a power of two, and e4m3 means a second scale above them, a
    float32 one for the whole tensor.
    """

    rows: int
    columns: int
    scale: Format | None = None
    rounding: ScaleRounding = ScaleRounding.EXACT

    def __post_init__(self) -> None:
        # 1. A block that fits no matrix.
        if min(self.rows, self.columns) < 0 or (self.rows == 0 and self.columns != 0):
            raise RecipeRefused(
                f"a block of {self.rows} x {self.columns} elements does not fit a matrix. Give rows and columns above "
                "0, or 0 columns for a row and 0 x 0 for a tensor."
            )
        # 2. Scales and roundings that no hardware has.
        if self.scale not in ROUNDINGS:
            raise RecipeRefused(f"scales are kept in float32, e8m0 or e4m3fn, not in {_name(self.scale)}.")
        if self.rounding not in ROUNDINGS[self.scale]:
            choices = ", ".join(ROUNDINGS[self.scale])
            raise RecipeRefused(f"scales in {_name(self.scale)} are not rounded by {self.rounding!s}. Give {choices}.")
        # 3. MX and NVFP4 fix the block together with the scale's format.
        if self.scale is E8M0 and (self.rows, self.columns) != (1, 32):
            raise RecipeRefused(f"MX blocks are 1 x 32 elements, not {self.rows} x {self.columns}.")
        if self.scale is E4M3 and (self.rows, self.columns) not in ((1, 16), (16, 16)):
            raise RecipeRefused(f"NVFP4 blocks are 1 x 16 or 16 x 16 elements, not {self.rows} x {self.columns}.")

    @property
    def name(self) -> str:
        """'tensor', 'row', '1x128', '1x32 e8m0' or '1x16 e4m3fn', followed by the rounding of its scales."""
        extent = "tensor" if not self.rows else "row" if not self.columns else f"{self.rows}x{self.columns}"
        scale_format = f" {self.scale.name}" if self.scale else ""
        return f"{extent}{scale_format} {self.rounding}"

    @property
    def turns(self) -> bool:
        """Whether a transposed block is a block: then codes need not be made twice."""
        return self.rows == self.columns

    def check(self, fmt: Format) -> None:
        if self.scale is E8M0 and fmt.name not in MX_ELEMENTS:
            raise RecipeRefused(f"MX blocks hold {', '.join(MX_ELEMENTS)}, not {fmt.name}.")
        if self.scale is E4M3 and fmt is not E2M1:
            raise RecipeRefused(f"NVFP4's scales are for e2m1 elements, not for {fmt.name}.")
        if fmt is E8M0:
            raise RecipeRefused("e8m0 is a format of scales, without sign or zero: choose another for elements.")


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
NVFP4_UP = Scaling(1, 16, E4M3, ScaleRounding.UP)
NVFP4_SQUARE = Scaling(16, 16, E4M3, ScaleRounding.NEAREST)


def _name(scale: Format | None) -> str:
    return scale.name if scale else "float32"


LONGEST_HISTORY = 1 << 16
MOST_MARGIN = 32
# Bits of the sums of Hopper's FP8 units, and the range of short sums, which excludes float32's 24.
HOPPER_BITS = 14
SHORT_BITS = range(2, 24)


class Amax(StrEnum):
    """How delayed scaling takes a magnitude from its history."""

    MAX = "max"
    MOST_RECENT = "most_recent"


class Accumulator(StrEnum):
    """How a product is summed.

    FP32; SHORT: with few significant bits, such as the 14 of Hopper's FP8 units; PROMOTED: short sums that are added to
    a float32 sum every 128 elements of the contraction, as in the training of DeepSeek-V3.
    """

    FP32 = "fp32"
    SHORT = "short"
    PROMOTED = "promoted"


@dataclass(frozen=True)
class Delayed:
    """Delayed scaling: a tensor's scale comes from the largest magnitudes of earlier steps.

    scale = largest of the format / (amax * 2^margin), renewed every `interval` casts of a tensor from the last
    `history` of its amaxes. An amax of 0 leaves the scale unchanged (initially 1).
    """

    history: int = 1024
    algorithm: Amax = Amax.MAX
    margin: int = 0
    interval: int = 1

    def __post_init__(self) -> None:
        _check_whole("history", self.history, 1, LONGEST_HISTORY)
        _check_whole("margin", self.margin, 0, MOST_MARGIN)
        _check_whole("interval", self.interval, 1, LONGEST_HISTORY)


@dataclass(frozen=True)
class Treatment:
    """How one role's tensors are cast: format of elements, scaling (None: without), rounding."""

    fmt: Format
    scaling: Scaling | None = None
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.scaling is not None:
            self.scaling.check(self.fmt)


@dataclass(frozen=True)
class Recipe:
    """Formats, scalings and rounding by role, and how products are summed.

    `delayed` replaces the current scale of a tensor. `hadamard` rotates both operands of the weight gradient by random
    Hadamard matrices of 16. With `high_weight_gradient` that product stays in bf16. Short sums keep `accumulator_bits`.
    """

    input: Treatment
    weight: Treatment
    gradient: Treatment
    delayed: Delayed | None = None
    hadamard: bool = False
    high_weight_gradient: bool = False
    accumulator: Accumulator = Accumulator.FP32
    accumulator_bits: int = HOPPER_BITS

    def __post_init__(self) -> None:
        # Parts of recipes that exclude each other.
        if self.delayed and not self.per_tensor:
            raise RecipeRefused("delayed scaling keeps one scale a tensor: give every role the scaling of a tensor.")
        if self.accumulator_bits not in SHORT_BITS:
            raise RecipeRefused(
                f"short sums keep {SHORT_BITS[0]} to {SHORT_BITS[-1]} bits, not {self.accumulator_bits!r}: choose "
                "accumulator=fp32 for more."
            )
        if self.hadamard and self.high_weight_gradient:
            raise RecipeRefused(
                "Hadamard rotates the operands of the weight gradient, which stays in bf16 here: leave one out "
                "(hadamard=off, or weight-gradient=low)."
            )

    @property
    def treatments(self) -> tuple[Treatment, Treatment, Treatment]:
        return self.input, self.weight, self.gradient

    # Read for every cast.
    @cached_property
    def per_tensor(self) -> bool:
        return all(
            treatment.scaling is not None and treatment.scaling.rows == 0 and treatment.scaling.scale is None
            for treatment in self.treatments
        )

    @property
    def is_unscaled(self) -> bool:
        return all(treatment.scaling is None for treatment in self.treatments)

    @property
    def in_blocks(self) -> bool:
        """Whether some role has a scale for less than a row."""
        return any(treatment.scaling is not None and treatment.scaling.columns > 0 for treatment in self.treatments)

    @property
    def products(self) -> tuple[tuple[Treatment, Treatment], ...]:
        """The operands of forward, input gradient and weight gradient; the last is left out where it stays in bf16."""
        low = ((self.input, self.weight), (self.gradient, self.weight), (self.gradient, self.input))
        return low[:2] if self.high_weight_gradient else low

    @property
    def keeps_source(self) -> bool:
        """Whether the transposed operand needs a separate cast."""
        turned = all(treatment.scaling is None or treatment.scaling.turns for treatment in self.treatments)
        stochastic = any(treatment.stochastic for treatment in self.treatments)
        return self.hadamard or self.high_weight_gradient or stochastic or not turned


# Formats of inputs, weights and gradients by the usual words of FP8 training.
FORMATS_BY_ROLE: dict[str, tuple[Format, Format, Format]] = {
    "hybrid": (E4M3, E4M3, E5M2),
    "e4m3": (E4M3, E4M3, E4M3),
    "e5m2": (E5M2, E5M2, E5M2),
}


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RecipeRefused(f"delayed scaling: {name} is a whole number from {low} to {high}, not {value!r}.")
