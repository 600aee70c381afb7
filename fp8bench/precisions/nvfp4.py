"""nvfp4: NVIDIA's four bits, and its recipe for training in them."""

from __future__ import annotations

from fp8bench.formats.grids import E2M1, E4M3
from fp8bench.formats.recipes import Recipe, ScaleRounding, Scaling, Treatment
from fp8bench.nn.shared_precisions import HIGH_WEIGHT_GRADIENT, RecipePrecision, hadamard_option, stochastic_option
from fp8bench.protocols.axes import Option, one_of
from fp8bench.registry import precisions

_BLOCK = 16


@precisions.register("nvfp4", "fp4")
class NvFp4(RecipePrecision):
    """NVFP4 with the help that NVIDIA's training recipe adds; each part can be switched off."""

    name = "nvfp4"
    aliases = ("fp4",)
    summary = (
        "E2M1 elements, E4M3 block scales under one float32 tensor scale: blocks of 16 along the contraction, 16x16 of "
        "weights; gradients rounded stochastically, operands of the weight gradient turned by Hadamard matrices."
    )
    rank = 60
    words = "NVFP4"
    multiples = (32, 16)
    options = (
        Option("weights", "2d: blocks of 16x16, the same values in both directions; 1d: of 16", "2d",
               one_of("2d", "1d")),
        stochastic_option("on"),
        hadamard_option("on"),
        Option("scale", "block scales to nearest, or up; those of stochastic gradients always up", "nearest",
               one_of(ScaleRounding.NEAREST, ScaleRounding.UP)),
        HIGH_WEIGHT_GRADIENT,
    )  # fmt: skip

    def made(self) -> Recipe:
        rows = _BLOCK if self.chosen["weights"] == "2d" else 1
        stochastic = self.chosen["stochastic"] == "on"
        # Where a scale was rounded down its block's largest values saturate, and their mean is no longer theirs.
        upward = ScaleRounding.UP if stochastic else self.scale
        return self.recipe_of(
            (
                Treatment(E2M1, Scaling(1, _BLOCK, E4M3, self.scale)),
                Treatment(E2M1, Scaling(rows, _BLOCK, E4M3, self.scale)),
                Treatment(E2M1, Scaling(1, _BLOCK, E4M3, upward), stochastic),
            )
        )
