"""fp8-e4m3: current scaling with one format for everything."""

from __future__ import annotations

from fp8bench.formats.grids import E4M3
from fp8bench.formats.scalings import ScaleRounding
from fp8bench.nn.shared_precisions import ACCUMULATOR, HIGH_WEIGHT_GRADIENT, RecipePrecision, float_scale_option
from fp8bench.registry import precisions


@precisions.register("fp8-e4m3")
class Fp8E4M3(RecipePrecision):
    """Mantissa for gradients too, for those whose range a tensor's scale covers."""

    name = "fp8-e4m3"
    summary = "E4M3 for every tensor, gradients included, one current float32 scale a tensor, elements to nearest even."
    rank = 44
    words = "FP8"
    element = E4M3
    options = (float_scale_option(ScaleRounding.EXACT), HIGH_WEIGHT_GRADIENT, ACCUMULATOR)
