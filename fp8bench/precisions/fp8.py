"""fp8: the hybrid recipe with current scaling."""

from __future__ import annotations

from fp8bench.formats.scalings import ScaleRounding
from fp8bench.nn.shared_precisions import (
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
    options = (formats_option("hybrid"), float_scale_option(ScaleRounding.EXACT), HIGH_WEIGHT_GRADIENT, ACCUMULATOR)
