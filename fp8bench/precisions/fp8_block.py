"""fp8-block: DeepSeek-V3's scaling."""

from __future__ import annotations

from fp8bench.formats.grids import E4M3
from fp8bench.formats.recipes import Recipe, Treatment
from fp8bench.formats.scalings import ScaleRounding, Scaling
from fp8bench.nn.shared_precisions import ACCUMULATOR, HIGH_WEIGHT_GRADIENT, RecipePrecision, float_scale_option
from fp8bench.registry import precisions


@precisions.register("fp8-block")
class Fp8Block(RecipePrecision):
    """Scales small enough for outliers, and large enough to be applied where sums are promoted anyway."""

    name = "fp8-block"
    summary = (
        "E4M3 for every tensor, one power-of-two float32 scale for 1x128 of inputs and gradients along the contraction "
        "and for 128x128 of weights, elements to nearest even."
    )
    rank = 43
    words = "block-scaled FP8"
    compiled_multiple = 128  # torch's shape function counts whole blocks only, where its kernels take a part of one
    options = (float_scale_option(ScaleRounding.POWER_OF_TWO), ACCUMULATOR, HIGH_WEIGHT_GRADIENT)

    def made(self) -> Recipe:
        rows = Treatment(E4M3, Scaling(1, 128, rounding=self.scale))
        squares = Treatment(E4M3, Scaling(128, 128, rounding=self.scale))
        return self.recipe_of((rows, squares, rows))
