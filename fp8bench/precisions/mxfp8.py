"""mxfp8: Blackwell's eight bits."""

from __future__ import annotations

from fp8bench.formats.grids import E8M0
from fp8bench.formats.recipes import Recipe, Treatment, by_role
from fp8bench.formats.scalings import Scaling
from fp8bench.nn.recipe_precision import HIGH_WEIGHT_GRADIENT, RecipePrecision, formats_option, mx_scale_option
from fp8bench.registry import precisions


@precisions.register("mxfp8")
class MxFp8(RecipePrecision):
    """OCP MXFP8; E4M3 in every role, because blocks of 32 make E5M2's range unnecessary."""

    name = "mxfp8"
    summary = (
        "E4M3 elements for every tensor in blocks of 32 along the contraction, E8M0 block scales "
        "rounded up (RCEIL), elements to nearest even."
    )
    rank = 50
    words = "MXFP8"
    options = (mx_scale_option(), formats_option("e4m3"), HIGH_WEIGHT_GRADIENT)

    def made(self) -> Recipe:
        scaling = Scaling(1, 32, E8M0, self.scale)
        return self.recipe_of(Treatment(fmt, scaling) for fmt in by_role(str(self.chosen["formats"])))
