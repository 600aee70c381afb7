"""Recipes as values: what a linear layer's operands are rounded to, by role. Nothing here knows torch.

A layer has three products: forward (inputs, weights), the input gradient (gradients, weights) and the weight gradient
(gradients, inputs). Each contracts over another dimension, and blocks of a scaling lie along it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fp8bench.errors import RecipeRefused
from fp8bench.formats.grids import E4M3, E5M2, Format
from fp8bench.formats.scalings import Scaling

LONGEST_HISTORY = 1 << 16
MOST_MARGIN = 32
# Those of Hopper's FP8 units, and those that a short sum may have: float32's 24 are none.
HOPPER_BITS = 14
SHORT_BITS = range(2, 24)


class Amax(StrEnum):
    """What delayed scaling takes from its history."""

    MAX = "max"
    MOST_RECENT = "most_recent"


class Accumulator(StrEnum):
    """How a product is summed.

    FP32 all along; SHORT with few significant bits, as the 14 of Hopper's FP8 units; PROMOTED the same, but added to a
    float32 sum every 128 elements of the contraction, as DeepSeek-V3 was trained.
    """

    FP32 = "fp32"
    SHORT = "short"
    PROMOTED = "promoted"


@dataclass(frozen=True)
class Delayed:
    """Delayed scaling: a tensor's scale comes from the largest magnitudes of earlier steps.

    scale = largest of the format / (amax * 2^margin), renewed every `interval` casts of a tensor from the last
    `history` of its amaxes. An amax of 0 leaves the scale as it is (1 to begin with).
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
    """What becomes of one role's tensors: their elements' format, their scaling (None: none), their rounding."""

    fmt: Format
    scaling: Scaling | None = None
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.scaling is not None:
            self.scaling.check(self.fmt)


@dataclass(frozen=True)
class Recipe:
    """Formats, scalings and rounding by role, and how products are summed.

    `delayed` takes the place of the current scale of a tensor. `hadamard` turns both operands of the weight gradient
    by random Hadamard matrices of 16. With `high_weight_gradient` that product stays in bf16. Short sums keep
    `accumulator_bits`.
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
        if self.delayed and not self.per_tensor:
            raise RecipeRefused("delayed scaling keeps one scale a tensor: give every role the scaling of a tensor.")
        if self.accumulator_bits not in SHORT_BITS:
            raise RecipeRefused(
                f"short sums keep {SHORT_BITS[0]} to {SHORT_BITS[-1]} bits, not {self.accumulator_bits!r}: choose "
                "accumulator=fp32 for more."
            )
        if self.hadamard and self.high_weight_gradient:
            raise RecipeRefused(
                "Hadamard turns the operands of the weight gradient, and here it stays in bf16: leave one out "
                "(hadamard=off, or weight-gradient=low)."
            )

    @property
    def treatments(self) -> tuple[Treatment, Treatment, Treatment]:
        return self.input, self.weight, self.gradient

    @property
    def per_tensor(self) -> bool:
        """Whether every role has one float32 scale a tensor."""
        return all(
            one.scaling is not None and one.scaling.rows == 0 and one.scaling.scale is None for one in self.treatments
        )

    @property
    def in_blocks(self) -> bool:
        """Whether some role has a scale for less than a row."""
        return any(one.scaling is not None and one.scaling.columns > 0 for one in self.treatments)

    @property
    def products(self) -> tuple[tuple[Treatment, Treatment], ...]:
        """The operands of forward, input gradient and weight gradient; the last is left out where it stays in bf16."""
        low = ((self.input, self.weight), (self.gradient, self.weight), (self.gradient, self.input))
        return low[:2] if self.high_weight_gradient else low

    @property
    def keeps_source(self) -> bool:
        """Whether the other orientation of an operand needs a cast of its own."""
        turned = all(one.scaling is None or one.scaling.turns for one in self.treatments)
        stochastic = any(one.stochastic for one in self.treatments)
        return self.hadamard or self.high_weight_gradient or stochastic or not turned


# Formats of inputs, weights and gradients by the word that FP8 training uses.
FORMATS_BY_ROLE: dict[str, tuple[Format, Format, Format]] = {
    "hybrid": (E4M3, E4M3, E5M2),
    "e4m3": (E4M3, E4M3, E4M3),
    "e5m2": (E5M2, E5M2, E5M2),
}


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RecipeRefused(f"delayed scaling: {name} is a whole number from {low} to {high}, not {value!r}.")
