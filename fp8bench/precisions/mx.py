"""OCP's MX, four, six and eight bits in blocks of 32 under a power of two, and NVIDIA's NVFP4 with its recipe."""

from __future__ import annotations

from fp8bench.formats.grids import E2M1, E2M3, E3M2, E4M3, E8M0, Format
from fp8bench.formats.recipes import Recipe, ScaleRounding, Scaling, Treatment
from fp8bench.nn.shared_precisions import (
    HIGH_WEIGHT_GRADIENT,
    MX_SCALE,
    RecipePrecision,
    formats_option,
    hadamard_option,
    stochastic_option,
)
from fp8bench.protocols.axes import Option, one_of
from fp8bench.registry import precisions

_BLOCKS = (
    "elements for every tensor in blocks of 32 along the contraction, E8M0 block scales rounded up (RCEIL), elements "
    "to nearest even."
)


@precisions.register("mxfp4")
class MxFp4(RecipePrecision):
    """OCP MXFP4, by default without the help (rotations, stochastic rounding) that training in it may need."""

    name = "mxfp4"
    summary = f"E2M1 {_BLOCKS}"
    rank = 70
    words = "MXFP4"
    options = (MX_SCALE, stochastic_option("off"), hadamard_option("off"), HIGH_WEIGHT_GRADIENT)

    def made(self) -> Recipe:
        scaling = Scaling(1, 32, E8M0, self.scale)
        plain = Treatment(E2M1, scaling)
        return self.recipe_of((plain, plain, Treatment(E2M1, scaling, self.chosen["stochastic"] == "on")))


_FORMATS = {"e3m2": (E3M2, E3M2, E3M2), "e2m3": (E2M3, E2M3, E2M3), "hybrid": (E2M3, E2M3, E3M2)}


@precisions.register("mxfp6")
class MxFp6(RecipePrecision):
    """OCP MXFP6: three quarters of MXFP8's bytes, at its speed where there are units for it."""

    name = "mxfp6"
    summary = f"E3M2 {_BLOCKS}"
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


@precisions.register("mxfp8")
class MxFp8(RecipePrecision):
    """OCP MXFP8; E4M3 in every role, because blocks of 32 make E5M2's range unnecessary."""

    name = "mxfp8"
    summary = f"E4M3 {_BLOCKS}"
    rank = 50
    words = "MXFP8"
    multiples = (32, 16)
    block = (1, 32)
    kept = E8M0
    options = (MX_SCALE, formats_option("e4m3"), HIGH_WEIGHT_GRADIENT)


_NVFP4_BLOCK = 16


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
        rows = _NVFP4_BLOCK if self.chosen["weights"] == "2d" else 1
        stochastic = self.chosen["stochastic"] == "on"
        # Where a scale was rounded down its block's largest values saturate, and their mean is no longer theirs.
        upward = ScaleRounding.UP if stochastic else self.scale
        return self.recipe_of(
            (
                Treatment(E2M1, Scaling(1, _NVFP4_BLOCK, E4M3, self.scale)),
                Treatment(E2M1, Scaling(rows, _NVFP4_BLOCK, E4M3, self.scale)),
                Treatment(E2M1, Scaling(1, _NVFP4_BLOCK, E4M3, upward), stochastic),
            )
        )
