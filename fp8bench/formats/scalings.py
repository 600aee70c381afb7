"""Scalings as values: which elements share a scale, and what numbers a scale may be. Nothing here knows torch.

An operand is a matrix whose last dimension is its product's contraction; a block is `rows` x `columns` of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fp8bench.errors import RecipeRefused
from fp8bench.formats.grids import E2M1, E4M3, E8M0, Format

MX_ELEMENTS = ("e4m3fn", "e5m2", "e3m2", "e2m3", "e2m1")


class ScaleRounding(StrEnum):
    """How the quotient of a block's largest magnitude and the format's becomes a scale.

    Of float32 scales: EXACT takes the quotient, POWER_OF_TWO the next power of two above it (nothing saturates).
    Of e8m0 scales: FLOOR is the OCP specification's, the difference of the exponents, so that values near the block's
    largest may saturate; EVEN is the same after rounding the largest to the elements' mantissa; CEIL rounds the
    largest up to a power of two first; RCEIL rounds the quotient up, as NVIDIA's training recipes do.
    Of e4m3 scales: NEAREST rounds the quotient to nearest even, UP to the next value above it.
    """

    EXACT = "exact"
    POWER_OF_TWO = "pow2"
    FLOOR = "floor"
    EVEN = "even"
    CEIL = "ceil"
    RCEIL = "rceil"
    NEAREST = "nearest"
    UP = "up"


ROUNDINGS = {
    None: (ScaleRounding.EXACT, ScaleRounding.POWER_OF_TWO),
    E8M0: (ScaleRounding.FLOOR, ScaleRounding.EVEN, ScaleRounding.CEIL, ScaleRounding.RCEIL),
    E4M3: (ScaleRounding.NEAREST, ScaleRounding.UP),
}


@dataclass(frozen=True)
class Scaling:
    """One scale for each block of `rows` x `columns` elements; 0 stands for all there are.

    `scale` is the format that scales are kept in: None is float32, e8m0 a power of two, and e4m3 means a second scale
    above them, a float32 one for the whole tensor.
    """

    rows: int
    columns: int
    scale: Format | None = None
    rounding: ScaleRounding = ScaleRounding.EXACT

    def __post_init__(self) -> None:
        if min(self.rows, self.columns) < 0 or (self.rows == 0 and self.columns != 0):
            raise RecipeRefused(
                f"a block of {self.rows} x {self.columns} elements does not fit a matrix. Give rows and columns above "
                "0, or 0 columns for a row and 0 x 0 for a tensor."
            )
        if self.scale not in ROUNDINGS:
            raise RecipeRefused(f"scales are kept in float32, e8m0 or e4m3fn, not in {_name(self.scale)}.")
        if self.rounding not in ROUNDINGS[self.scale]:
            known = ", ".join(ROUNDINGS[self.scale])
            raise RecipeRefused(f"scales in {_name(self.scale)} are not rounded by {self.rounding!s}. Give {known}.")
        if self.scale is E8M0 and (self.rows, self.columns) != (1, 32):
            raise RecipeRefused(f"MX blocks are 1 x 32 elements, not {self.rows} x {self.columns}.")
        if self.scale is E4M3 and (self.rows, self.columns) not in ((1, 16), (16, 16)):
            raise RecipeRefused(f"NVFP4 blocks are 1 x 16 or 16 x 16 elements, not {self.rows} x {self.columns}.")

    @property
    def name(self) -> str:
        """'tensor', 'row', '1x128', '1x32 e8m0', '1x16 e4m3fn', with the rounding of its scales behind it."""
        extent = "tensor" if not self.rows else "row" if not self.columns else f"{self.rows}x{self.columns}"
        kept = f" {self.scale.name}" if self.scale else ""
        return f"{extent}{kept} {self.rounding}"

    @property
    def turns(self) -> bool:
        """Whether a block stays one when the matrix is transposed: then codes need not be made twice."""
        return self.rows == self.columns

    def check(self, fmt: Format) -> None:
        """Raise where elements of that format are not scaled so."""
        if self.scale is E8M0 and fmt.name not in MX_ELEMENTS:
            raise RecipeRefused(f"MX blocks hold {', '.join(MX_ELEMENTS)}, not {fmt.name}.")
        if self.scale is E4M3 and fmt is not E2M1:
            raise RecipeRefused(f"NVFP4's scales are for e2m1 elements, not for {fmt.name}.")
        if fmt is E8M0:
            raise RecipeRefused("e8m0 is a format of scales, without sign or zero: choose another for elements.")


TENSOR = Scaling(0, 0)
TENSOR_POWER_OF_TWO = Scaling(0, 0, rounding=ScaleRounding.POWER_OF_TWO)
ROW = Scaling(1, 0)
ROW_POWER_OF_TWO = Scaling(1, 0, rounding=ScaleRounding.POWER_OF_TWO)
BLOCK = Scaling(1, 128)
BLOCK_POWER_OF_TWO = Scaling(1, 128, rounding=ScaleRounding.POWER_OF_TWO)
SQUARE = Scaling(128, 128)
SQUARE_POWER_OF_TWO = Scaling(128, 128, rounding=ScaleRounding.POWER_OF_TWO)
MX = Scaling(1, 32, E8M0, ScaleRounding.RCEIL)
NVFP4 = Scaling(1, 16, E4M3, ScaleRounding.NEAREST)
NVFP4_UP = Scaling(1, 16, E4M3, ScaleRounding.UP)
NVFP4_SQUARE = Scaling(16, 16, E4M3, ScaleRounding.NEAREST)


def _name(scale: Format | None) -> str:
    return scale.name if scale else "float32"
