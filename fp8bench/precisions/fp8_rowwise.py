"""fp8-rowwise: a scale for every row, as in torchao."""

from __future__ import annotations

from fp8bench.formats.scalings import ScaleRounding
from fp8bench.nn.shared_precisions import HIGH_WEIGHT_GRADIENT, RecipePrecision, float_scale_option, formats_option
from fp8bench.registry import precisions


@precisions.register("fp8-rowwise")
class Fp8Rowwise(RecipePrecision):
    """An outlier spoils its own row only, so that no role needs E5M2's range."""

    name = "fp8-rowwise"
    summary = (
        "E4M3 for every tensor, one current power-of-two scale a row along the contraction of each product, elements "
        "to nearest even."
    )
    rank = 42
    words = "row-wise FP8"
    block = (1, 0)
    options = (formats_option("e4m3"), float_scale_option(ScaleRounding.POWER_OF_TWO), HIGH_WEIGHT_GRADIENT)
