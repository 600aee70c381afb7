"""fp8-e5m2: current scaling with one format for everything."""

from __future__ import annotations

from fp8bench.formats.grids import E5M2
from fp8bench.formats.scalings import ScaleRounding
from fp8bench.nn.shared_precisions import ACCUMULATOR, HIGH_WEIGHT_GRADIENT, RecipePrecision, float_scale_option
from fp8bench.registry import precisions


@precisions.register("fp8-e5m2")
class Fp8E5M2(RecipePrecision):
    """What two bits of mantissa cost: no product of two E5M2 tensors exists on NVIDIA's devices."""

    name = "fp8-e5m2"
    summary = (
        "E5M2 for every tensor, one current float32 scale a tensor, elements to nearest even; native on AMD's and "
        "Intel's GPUs alone."
    )
    rank = 45
    words = "FP8"
    element = E5M2
    options = (float_scale_option(ScaleRounding.EXACT), HIGH_WEIGHT_GRADIENT, ACCUMULATOR)
