"""mxfp8: Blackwell's eight bits."""

from __future__ import annotations

from fp8bench.formats.grids import E8M0
from fp8bench.nn.shared_precisions import HIGH_WEIGHT_GRADIENT, MX_SCALE, RecipePrecision, formats_option
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
    multiples = (32, 16)
    block = (1, 32)
    kept = E8M0
    options = (MX_SCALE, formats_option("e4m3"), HIGH_WEIGHT_GRADIENT)
