"""fp8: the hybrid recipe with current scaling."""

from __future__ import annotations

from fp8bench.formats.recipes import Recipe, Treatment, by_role
from fp8bench.formats.scalings import ScaleRounding, Scaling
from fp8bench.nn.recipe_precision import (
    ACCUMULATOR,
    HIGH_WEIGHT_GRADIENT,
    RecipePrecision,
    float_scale_option,
    formats_option,
)
from fp8bench.registry import precisions


@precisions.register("fp8")
class Fp8(RecipePrecision):
    """More mantissa where the forward pass needs it, more exponent for gradients."""

    name = "fp8"
    summary = (
        "E4M3 inputs and weights, E5M2 gradients, one current float32 scale a tensor (largest / amax, not rounded to "
        "a power of two), elements to nearest even."
    )
    rank = 40
    words = "FP8"
    multiples = (16, 16)
    options = (formats_option("hybrid"), float_scale_option(ScaleRounding.EXACT), HIGH_WEIGHT_GRADIENT, ACCUMULATOR)

    def made(self) -> Recipe:
        scaling = Scaling(0, 0, rounding=self.scale)
        return self.recipe_of(Treatment(fmt, scaling) for fmt in by_role(str(self.chosen["formats"])))
