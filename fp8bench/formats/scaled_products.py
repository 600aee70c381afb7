"""Products of rounded operands, by kind: what a rule is about, and what it says. Nothing here knows torch.

A product is a (M, K) times b (N, K) transposed. Linear layers have three, and each contracts over another dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from fp8bench.formats.grids import E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0
from fp8bench.formats.recipes import Treatment

OUTPUTS = ("bf16", "fp16", "fp32")
Sides = tuple[int, int, int]


class RuleSource(StrEnum):
    """Whose rule it is."""

    HARDWARE = "hardware"
    TORCH = "torch"
    CUBLAS = "cuBLAS"
    TE = "Transformer Engine"


class Scheme(StrEnum):
    """The kinds of scaled product that there are."""

    TENSOR = "FP8 with a scale a tensor"
    ROW = "FP8 with a scale a row"
    BLOCK = "FP8 with scales of 128 elements"
    MXFP8 = "MXFP8"
    MXFP6 = "MXFP6"
    MXFP4 = "MXFP4"
    NVFP4 = "NVFP4"


MX = (Scheme.MXFP8, Scheme.MXFP6, Scheme.MXFP4)
FP8 = (Scheme.TENSOR, Scheme.ROW, Scheme.BLOCK)
FNUZ = (E4M3FNUZ, E5M2FNUZ)
_MX_BY_FORMAT = {E4M3: Scheme.MXFP8, E5M2: Scheme.MXFP8, E3M2: Scheme.MXFP6, E2M3: Scheme.MXFP6, E2M1: Scheme.MXFP4}
_FP8_BY_EXTENT = {(0, 0): Scheme.TENSOR, (1, 0): Scheme.ROW, (1, 128): Scheme.BLOCK, (128, 128): Scheme.BLOCK}


@dataclass(frozen=True)
class Product:
    """One product: its sides, how its operands are rounded, and what else torch looks at.

    `row_major` says that the second operand is kept as (K, N), row by row.
    """

    m: int
    n: int
    k: int
    a: Treatment
    b: Treatment
    output: str = "bf16"
    row_major: bool = False

    @property
    def sides(self) -> Sides:
        return self.m, self.n, self.k

    @property
    def scheme(self) -> Scheme | None:
        """The kind of product it is; None where no library has one for such a pair of operands."""
        found = {_scheme_of(one) for one in (self.a, self.b)}
        return found.pop() if len(found) == 1 else None

    def bytes_of(self, sides: Sides) -> float:
        """Bytes of both operands, their scales and the output, if its sides were those."""
        m, n, k = sides
        output = m * n * (4 if self.output == "fp32" else 2)
        return _operand_bytes(m, k, self.a) + _operand_bytes(n, k, self.b) + output


@dataclass(frozen=True)
class Objection:
    """Why a product is refused, and by whom.

    `multiples` of M, N and K that would do; None where no padding helps.
    """

    source: RuleSource
    why: str
    multiples: Sides | None = None


def uneven(product: Product, source: RuleSource, multiples: Sides) -> Iterator[Objection]:
    """An objection for every side that is no such multiple."""
    for place, (length, multiple) in enumerate(zip(product.sides, multiples, strict=True)):
        if length % multiple:
            needed = [1, 1, 1]
            needed[place] = multiple
            why = f"{'MNK'[place]}={length} is no multiple of {multiple}"
            yield Objection(source, why, (needed[0], needed[1], needed[2]))


def _scheme_of(treatment: Treatment) -> Scheme | None:
    scaling, fmt = treatment.scaling, treatment.fmt
    if scaling is None:
        return None
    if scaling.scale is E8M0:
        return _MX_BY_FORMAT[fmt]
    if scaling.scale is E4M3:
        return Scheme.NVFP4
    return _FP8_BY_EXTENT.get((scaling.rows, scaling.columns)) if fmt in (E4M3, E5M2, *FNUZ) else None


def _operand_bytes(rows: int, k: int, treatment: Treatment) -> float:
    codes, scaling = rows * k * treatment.fmt.bits / 8, treatment.scaling
    if scaling is None:
        return codes
    down, along = scaling.rows or rows, scaling.columns or k
    blocks = -(-rows // down) * -(-k // along)
    if scaling.scale is None:
        return codes + 4.0 * blocks
    above = 4 if scaling.scale is E4M3 else 0  # NVFP4's scale of the whole tensor
    return codes + blocks * scaling.scale.bits / 8 + above
