"""Low-precision products: their kinds, which of them a class of devices takes or refuses, and why. Knows no torch.

A product is a (M, K) times b (N, K) transposed. Linear layers have three, and each contracts over another dimension.

torch's kernels for processors take what its kernels for GPUs refuse, so the rules cannot be tried on a processor and
are written down here, each with its source. They were read from torch 2.13 (scaled_mm for CUDA and ROCm in
ScaledBlas.cpp, its row-wise kernels in RowwiseScaledMM.cu, and the shapes that its tests leave out) and cuBLAS 12.9;
Transformer Engine's own checks from 2.20 (pytorch/quantization.py, utils.py and its quantisers' is_quantizable).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from fp8bench.formats.grids import E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0
from fp8bench.formats.hardware import ADA, B200, H100, MI300X, MI350X, DeviceClass, is_nvidia
from fp8bench.formats.recipes import Treatment
from fp8bench.model import DeviceFacts

Sides = tuple[int, int, int]


class Scheme(StrEnum):
    """The kinds of scaled products."""

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
    """One product: its sides, the treatment of its operands, and what else torch looks at.

    `row_major`: the second operand is stored as (K, N), row by row.
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
        schemes = {_scheme_of(treatment) for treatment in (self.a, self.b)}
        return schemes.pop() if len(schemes) == 1 else None


@dataclass(frozen=True)
class Objection:
    """Why a product is refused. `multiples` of M, N and K would be accepted; None where no padding helps."""

    why: str
    multiples: Sides | None = None


def _scheme_of(treatment: Treatment) -> Scheme | None:
    scaling, fmt = treatment.scaling, treatment.fmt
    if scaling is None:  # the product's scales are 1
        return Scheme.TENSOR if fmt in (E4M3, E5M2, *FNUZ) else None
    if scaling.scale is E8M0:
        return _MX_BY_FORMAT[fmt]
    if scaling.scale is E4M3:
        return Scheme.NVFP4
    return _FP8_BY_EXTENT.get((scaling.rows, scaling.columns)) if fmt in (E4M3, E5M2, *FNUZ) else None


BLACKWELL = (10, 0)


def missing(product: Product, device: DeviceClass) -> str:
    """Why a class of devices has no such product, whatever its shape; '' if it has one."""
    scheme = product.scheme
    if scheme is None:
        pair = " and ".join(dict.fromkeys(_words(treatment) for treatment in (product.a, product.b)))
        return f"no units multiply {pair}"
    return _without_units(scheme, device) or _other_formats(product, device) or _lacking_in_torch(scheme, device)


def objections(product: Product, device: DeviceClass) -> tuple[Objection, ...]:
    """Returns why torch's scaled_mm, or a library it calls, refuses a product that the class supports."""
    return (*_of_kind(product, device), *_of_shape(product, device))


def _words(treatment: Treatment) -> str:
    return (
        f"{treatment.fmt.name} {f'with scales of {treatment.scaling.name}' if treatment.scaling else 'without a scale'}"
    )


def _without_units(scheme: Scheme, device: DeviceClass) -> str:
    # 1. Devices without any units.
    if not device.is_nvidia and not device.is_amd:
        return "no CPU has units for it: emulated, in any shape"
    # 2. FP8 comes with Ada; AMD's devices here all have it.
    if scheme in FP8:
        return "" if device.is_amd or device.at_least(ADA) else "NVIDIA's FP8 units begin at compute capability 8.9"
    # 3. Blocks of 32 or 16 elements came later, and not everywhere in both kinds.
    if device.is_amd and scheme is Scheme.NVFP4:
        return "AMD has no units for NVFP4's scales"
    if device.is_amd:
        return "" if device is MI350X else "AMD's units for MX blocks begin with gfx950, the MI350"
    words = "MX blocks" if scheme in MX else "NVFP4"
    return "" if device.at_least(BLACKWELL) else f"NVIDIA's units for {words} begin at compute capability 10.0"


def _other_formats(product: Product, device: DeviceClass) -> str:
    fnuz = [treatment.fmt in FNUZ for treatment in (product.a, product.b)]
    if device is MI300X and not all(fnuz):
        return "its FP8 is e4m3fnuz and e5m2fnuz, not e4m3fn and e5m2"
    if device is not MI300X and any(fnuz):
        return "its FP8 is e4m3fn and e5m2, not fnuz"
    return ""


def _lacking_in_torch(scheme: Scheme, device: DeviceClass) -> str:
    if scheme is Scheme.MXFP6:
        return "it has units for FP6, but torch has neither the format nor the product"
    if scheme is Scheme.BLOCK and device is not H100:
        # cuBLAS has these scales for compute capability 9.0 only; ROCm's libraries have none.
        return "scaled_mm takes scales of 128 elements on compute capability 9.0 only"
    if scheme is Scheme.MXFP4 and device.is_nvidia and device is not B200:
        return "its kernel for MXFP4, FBGEMM's, is for compute capability 10.0 only"
    return ""


def _of_kind(product: Product, device: DeviceClass) -> Iterator[Objection]:
    if product.row_major:
        yield Objection("the second operand lies row by row, and its contraction must be innermost")
    if device.is_nvidia and product.a.fmt is E5M2 and product.b.fmt is E5M2:
        # A restriction of cuBLASLt, not of AMD's libraries.
        yield Objection("two E5M2 operands are not multiplied on NVIDIA's GPUs")
    if product.scheme is Scheme.ROW and device is not H100:
        # On Hopper cuBLAS scales rows since 12.9; elsewhere CUTLASS's kernel and hipBLASLt accept less.
        if product.b.fmt not in (E4M3, FNUZ[0]):
            reason = f"with a scale a row the second operand is E4M3, not {product.b.fmt.name}"
            yield Objection(reason)
        if product.output not in _row_outputs(device).split(" or "):
            reason = f"with a scale a row the output is {_row_outputs(device)}, not {product.output}"
            yield Objection(reason)
    if product.scheme in (Scheme.BLOCK, Scheme.MXFP8) and not product.a.fmt is product.b.fmt is E4M3:
        yield Objection(f"with scales of {_SPANS[product.scheme]} elements both operands are E4M3")
    if product.scheme in MX and device.is_amd and product.output == "fp32":
        yield Objection("MX products give bf16 or fp16 on AMD's GPUs, not fp32")


_SPANS = {Scheme.BLOCK: 128, Scheme.MXFP8: 32}


def rows_give_float32(facts: DeviceFacts) -> bool:
    """Whether products with a scale a row return float32.

    cuBLAS's do, which torch uses on compute capability 9.0 since CUDA 12.9: its own tests require it there. All other
    kernels return bf16 or fp16.
    """
    version = tuple(int(part) for part in (facts.cuda or "0.0").split(".")[:2])
    return is_nvidia(facts) and facts.capability == H100.capability and version >= (12, 9)


def grouped_multiple(products: Iterable[tuple[Treatment, Treatment]], facts: DeviceFacts) -> int:
    """The number that sides must be multiples of for torch's scaled_grouped_mm; 0 where it cannot be used.

    GroupedBlas.cpp requires E4M3 on compute capability 9 or 10: with a scale a row, and rows that begin at 16 bytes; or
    in whole MX blocks, whose kernels are those of 10.0. Its kernels for ROCm are not used here.
    """
    if not is_nvidia(facts) or facts.capability is None or facts.capability[0] not in (9, 10):
        return 0
    schemes = {Product(32, 32, 32, a, b).scheme if a.fmt is b.fmt is E4M3 else None for a, b in products}
    if schemes == {Scheme.ROW}:
        return 16
    return 32 if schemes == {Scheme.MXFP8} and facts.capability == B200.capability else 0


def _row_outputs(device: DeviceClass) -> str:
    return "bf16" if device.is_amd else "bf16 or fp16"


def _of_shape(product: Product, device: DeviceClass) -> Iterator[Objection]:
    for place, side in enumerate("MNK"):
        # The widest rules come first, and one objection a side is enough.
        broken = (rule for rule in _multiples(product.scheme, device) if product.sides[place] % rule[place])
        for rule in broken:
            multiples = [1, 1, 1]
            multiples[place] = rule[place]
            reason = f"{side}={product.sides[place]} is no multiple of {rule[place]}"
            yield Objection(reason, (multiples[0], multiples[1], multiples[2]))
            break


def _multiples(scheme: Scheme | None, device: DeviceClass) -> Iterator[Sides]:
    if scheme in MX and device.is_amd:
        # scaled_mm requires 32s; hipBLASLt's kernels 128 along K, by torch's tests and its older entry.
        yield 32, 32, 128
    elif scheme in MX:
        yield 1, 1, 32  # a block is multiplied as a whole by the hardware: torch tests no other
    elif scheme is Scheme.NVFP4:
        yield 1, 1, 32  # cuBLAS: two codes a byte, and rows begin at 16 bytes
    # For every scaled product: in cuBLASLt the rows of both operands and of the output begin at 16 bytes.
    yield 1, 16, 16


HOPPER = (9, 0)
BLACKWELL_FOR_THE_DESK = (12, 0)
_TE_SCHEMES = (Scheme.TENSOR, Scheme.BLOCK, Scheme.MXFP8, Scheme.NVFP4)


def te_refusal(product: Product, device: DeviceClass) -> str:
    """Why Transformer Engine's recipes refuse such a product on one of NVIDIA's devices, in any shape
    (check_mxfp8_support and its neighbours); '' where they accept it or have no recipe for it."""
    scheme = product.scheme
    if scheme not in _TE_SCHEMES:
        return ""
    # In the order in which devices gained the recipes.
    if not device.at_least(ADA):
        return "its FP8 begins at compute capability 8.9"
    if scheme is Scheme.BLOCK and not device.at_least(HOPPER):
        return "its blocks of 128 begin at compute capability 9.0, with CUDA 12.9"
    if scheme is Scheme.MXFP8 and device.at_least(BLACKWELL_FOR_THE_DESK):
        return "it refuses MXFP8 from compute capability 12.0 on, where not every layout of a product is there"
    if scheme in (Scheme.MXFP8, Scheme.NVFP4) and not device.at_least(BLACKWELL):
        return f"its {scheme} begins at compute capability 10.0"
    return "it has no recipe with E5M2 in every role" if product.a.fmt is product.b.fmt is E5M2 else ""
