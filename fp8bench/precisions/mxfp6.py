"""mxfp6: OCP's six bits."""

from __future__ import annotations

from fp8bench.formats.grids import E2M3, E3M2, E8M0, Format
from fp8bench.nn.shared_precisions import HIGH_WEIGHT_GRADIENT, MX_SCALE, RecipePrecision
from fp8bench.protocols.axes import Option, one_of
from fp8bench.registry import precisions

_FORMATS = {"e3m2": (E3M2, E3M2, E3M2), "e2m3": (E2M3, E2M3, E2M3), "hybrid": (E2M3, E2M3, E3M2)}


@precisions.register("mxfp6")
class MxFp6(RecipePrecision):
    """OCP MXFP6: three quarters of MXFP8's bytes, at its speed where there are units for it."""

    name = "mxfp6"
    summary = (
        "E3M2 elements for every tensor in blocks of 32 along the contraction, E8M0 block scales "
        "rounded up (RCEIL), elements to nearest even."
    )
    rank = 55
    words = "MXFP6"
    block = (1, 32)
    kept = E8M0
    options = (
        Option("formats", "e3m2 or e2m3: for all; hybrid: E2M3 for inputs and weights, E3M2 for gradients", "e3m2",
               one_of(*_FORMATS), ("format",)),
        MX_SCALE, HIGH_WEIGHT_GRADIENT,
    )  # fmt: skip

    @property
    def formats(self) -> tuple[Format, Format, Format]:
        return _FORMATS[str(self.chosen["formats"])]
