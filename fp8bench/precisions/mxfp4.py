"""mxfp4: OCP's four bits."""

from __future__ import annotations

from fp8bench.formats.grids import E2M1, E8M0
from fp8bench.formats.recipes import Recipe, Treatment
from fp8bench.formats.scalings import Scaling
from fp8bench.nn.shared_precisions import (
    HIGH_WEIGHT_GRADIENT,
    MX_SCALE,
    RecipePrecision,
    hadamard_option,
    stochastic_option,
)
from fp8bench.registry import precisions


@precisions.register("mxfp4")
class MxFp4(RecipePrecision):
    """OCP MXFP4, by default without the help (rotations, stochastic rounding) that training in it may need."""

    name = "mxfp4"
    summary = (
        "E2M1 elements for every tensor in blocks of 32 along the contraction, E8M0 block scales "
        "rounded up (RCEIL), elements to nearest even."
    )
    rank = 70
    words = "MXFP4"
    options = (MX_SCALE, stochastic_option("off"), hadamard_option("off"), HIGH_WEIGHT_GRADIENT)

    def made(self) -> Recipe:
        scaling = Scaling(1, 32, E8M0, self.scale)
        plain = Treatment(E2M1, scaling)
        return self.recipe_of((plain, plain, Treatment(E2M1, scaling, self.chosen["stochastic"] == "on")))
