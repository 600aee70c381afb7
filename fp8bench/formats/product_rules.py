"""The rules of low-precision matrix products: which products a class of devices supports, and why it refuses others.
Does not use torch.

A product multiplies a (M, K) by the transpose of b (N, K). A linear layer has three products, and each sums over
another dimension.

torch's CPU kernels accept what its GPU kernels refuse, so the rules cannot be tested on a CPU. Each rule names its
source. Sources are torch 2.13 (scaled_mm for CUDA and ROCm in ScaledBlas.cpp, the row-wise kernels in
RowwiseScaledMM.cu, and shapes that its tests leave out), cuBLAS 12.9, and Transformer Engine 2.20
(pytorch/quantization.py, utils.py and is_quantizable of its quantisers).
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


class ScalingScheme(StrEnum):
    """The kinds of scaled matrix products, by format and by which elements share a scale."""

    TENSOR = "FP8 with a scale a tensor"
    ROW = "FP8 with a scale a row"
    BLOCK = "FP8 with scales of 128 elements"
    MXFP8 = "MXFP8"
    MXFP6 = "MXFP6"
    MXFP4 = "MXFP4"
    NVFP4 = "NVFP4"


MX_SCHEMES = (ScalingScheme.MXFP8, ScalingScheme.MXFP6, ScalingScheme.MXFP4)
FP8_SCHEMES = (ScalingScheme.TENSOR, ScalingScheme.ROW, ScalingScheme.BLOCK)
FNUZ_FORMATS = (E4M3FNUZ, E5M2FNUZ)
_MX_BY_FORMAT = {
    E4M3: ScalingScheme.MXFP8,
    E5M2: ScalingScheme.MXFP8,
    E3M2: ScalingScheme.MXFP6,
    E2M3: ScalingScheme.MXFP6,
    E2M1: ScalingScheme.MXFP4,
}
_FP8_BY_EXTENT = {
    (0, 0): ScalingScheme.TENSOR,
    (1, 0): ScalingScheme.ROW,
    (1, 128): ScalingScheme.BLOCK,
    (128, 128): ScalingScheme.BLOCK,
}


@dataclass(frozen=True)
class Product:
    """One matrix product: its sizes, how its operands are cast, and the other properties that torch checks. If
    `row_major`, the second operand is stored row by row as (K, N).
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
    def scheme(self) -> ScalingScheme | None:
        """The scheme of this product; None if its two operands belong to different schemes."""
        schemes = {_find_operand_scheme(treatment) for treatment in (self.a, self.b)}
        return schemes.pop() if len(schemes) == 1 else None


@dataclass(frozen=True)
class ProductObjection:
    """The reason why a product is refused. The product would be accepted if M, N and K were padded to `multiples`,
    which is None if padding does not help.
    """

    why: str
    multiples: Sides | None = None


def _find_operand_scheme(treatment: Treatment) -> ScalingScheme | None:
    scaling, fmt = treatment.scaling, treatment.fmt
    if scaling is None:  # without scaling, the product gets scales of 1
        return ScalingScheme.TENSOR if fmt in (E4M3, E5M2, *FNUZ_FORMATS) else None
    if scaling.scale is E8M0:
        return _MX_BY_FORMAT[fmt]
    if scaling.scale is E4M3:
        return ScalingScheme.NVFP4
    return _FP8_BY_EXTENT.get((scaling.rows, scaling.columns)) if fmt in (E4M3, E5M2, *FNUZ_FORMATS) else None


BLACKWELL = (10, 0)


def explain_missing_product_kind(product: Product, device: DeviceClass) -> str:
    """Returns why a class of devices cannot compute a product of this kind, whatever its sizes. Returns '' if it
    can.
    """
    scheme = product.scheme
    if scheme is None:
        operands_text = " and ".join(
            dict.fromkeys(_describe_treatment(treatment) for treatment in (product.a, product.b))
        )
        return f"no units multiply {operands_text}"
    return (
        _explain_missing_hardware_units(scheme, device)
        or _explain_other_formats(product, device)
        or _explain_missing_in_torch(scheme, device)
    )


def list_product_objections(product: Product, device: DeviceClass) -> tuple[ProductObjection, ...]:
    """Returns why torch's scaled_mm, or a library that it calls, refuses a product that the class of devices
    supports.
    """
    return (*_list_kind_objections(product, device), *_list_shape_objections(product, device))


def _describe_treatment(treatment: Treatment) -> str:
    return (
        f"{treatment.fmt.name} {f'with scales of {treatment.scaling.name}' if treatment.scaling else 'without a scale'}"
    )


def _explain_missing_hardware_units(scheme: ScalingScheme, device: DeviceClass) -> str:
    # 1. Refuse devices without hardware for low-precision products.
    if not device.is_nvidia and not device.is_amd:
        return "no CPU has units for it: emulated, in any shape"
    # 2. FP8 units exist on NVIDIA's GPUs from Ada on, and on all AMD devices that are listed.
    if scheme in FP8_SCHEMES:
        return (
            ""
            if device.is_amd or device.has_compute_capability(ADA)
            else "NVIDIA's FP8 units begin at compute capability 8.9"
        )
    # 3. Hardware for blocks of 32 elements (MX) or 16 elements (NVFP4) came later. Some devices support only one of the
    # two.
    if device.is_amd and scheme is ScalingScheme.NVFP4:
        return "AMD has no units for NVFP4's scales"
    if device.is_amd:
        return "" if device is MI350X else "AMD's units for MX blocks begin with gfx950, the MI350"
    words = "MX blocks" if scheme in MX_SCHEMES else "NVFP4"
    return (
        ""
        if device.has_compute_capability(BLACKWELL)
        else f"NVIDIA's units for {words} begin at compute capability 10.0"
    )


def _explain_other_formats(product: Product, device: DeviceClass) -> str:
    are_fnuz = [treatment.fmt in FNUZ_FORMATS for treatment in (product.a, product.b)]
    if device is MI300X and not all(are_fnuz):
        return "its FP8 is e4m3fnuz and e5m2fnuz, not e4m3fn and e5m2"
    if device is not MI300X and any(are_fnuz):
        return "its FP8 is e4m3fn and e5m2, not fnuz"
    return ""


def _explain_missing_in_torch(scheme: ScalingScheme, device: DeviceClass) -> str:
    if scheme is ScalingScheme.MXFP6:
        return "it has units for FP6, but torch has neither the format nor the product"
    if scheme is ScalingScheme.BLOCK and device is not H100:
        # cuBLAS supports these scales on compute capability 9.0 only. ROCm's libraries do not support them.
        return "scaled_mm takes scales of 128 elements on compute capability 9.0 only"
    if scheme is ScalingScheme.MXFP4 and device.is_nvidia and device is not B200:
        return "its kernel for MXFP4, FBGEMM's, is for compute capability 10.0 only"
    return ""


def _list_kind_objections(product: Product, device: DeviceClass) -> Iterator[ProductObjection]:
    if product.row_major:
        yield ProductObjection(
            "the second operand is stored row by row, but its contraction must be the innermost dimension"
        )
    if device.is_nvidia and product.a.fmt is E5M2 and product.b.fmt is E5M2:
        # cuBLASLt has this restriction. AMD's libraries do not have it.
        yield ProductObjection("two E5M2 operands are not multiplied on NVIDIA's GPUs")
    if product.scheme is ScalingScheme.ROW and device is not H100:
        # On Hopper cuBLAS supports row scales since 12.9. Elsewhere the kernels of CUTLASS and hipBLASLt accept fewer
        # formats.
        if product.b.fmt not in (E4M3, FNUZ_FORMATS[0]):
            reason = f"with a scale a row the second operand is E4M3, not {product.b.fmt.name}"
            yield ProductObjection(reason)
        if product.output not in _name_row_output_dtypes(device).split(" or "):
            reason = f"with a scale a row the output is {_name_row_output_dtypes(device)}, not {product.output}"
            yield ProductObjection(reason)
    if product.scheme in (ScalingScheme.BLOCK, ScalingScheme.MXFP8) and not product.a.fmt is product.b.fmt is E4M3:
        yield ProductObjection(f"with scales of {_BLOCK_ELEMENTS[product.scheme]} elements both operands are E4M3")
    if product.scheme in MX_SCHEMES and device.is_amd and product.output == "fp32":
        yield ProductObjection("MX products give bf16 or fp16 on AMD's GPUs, not fp32")


_BLOCK_ELEMENTS = {ScalingScheme.BLOCK: 128, ScalingScheme.MXFP8: 32}


def do_row_scales_give_float32(facts: DeviceFacts) -> bool:
    """Returns whether products with a scale for each row return float32.

    cuBLAS returns float32. torch uses cuBLAS on compute capability 9.0 since CUDA 12.9, and torch's tests require
    float32 there. Other kernels return bf16 or fp16.
    """
    cuda_version = tuple(int(number) for number in (facts.cuda or "0.0").split(".")[:2])
    return is_nvidia(facts) and facts.capability == H100.capability and cuda_version >= (12, 9)


def find_grouped_size_multiple(products: Iterable[tuple[Treatment, Treatment]], facts: DeviceFacts) -> int:
    """Returns a number by which the sizes of torch's scaled_grouped_mm must be divisible; 0 if scaled_grouped_mm cannot
    compute these products.

    GroupedBlas.cpp requires E4M3 on compute capability 9 or 10, with one of two kinds of scales. With a scale for each
    row, rows must start at multiples of 16 bytes. With MX blocks, blocks must be complete, and only 10.0 has kernels.
    ROCm's grouped kernels are not used here.
    """
    if not is_nvidia(facts) or facts.capability is None or facts.capability[0] not in (9, 10):
        return 0
    # A scheme does not depend on sizes, so any sizes will do.
    schemes = {Product(32, 32, 32, a, b).scheme if a.fmt is b.fmt is E4M3 else None for a, b in products}
    if schemes == {ScalingScheme.ROW}:
        return 16
    return 32 if schemes == {ScalingScheme.MXFP8} and facts.capability == B200.capability else 0


def _name_row_output_dtypes(device: DeviceClass) -> str:
    return "bf16" if device.is_amd else "bf16 or fp16"


def _list_shape_objections(product: Product, device: DeviceClass) -> Iterator[ProductObjection]:
    for index, side in enumerate("MNK"):
        # A size may violate several rules. Report only the first of these, which has the largest multiple.
        required_multiples = (rule[index] for rule in _list_side_multiples(product.scheme, device))
        if factor := next((factor for factor in required_multiples if product.sides[index] % factor), 0):
            m, n, k = (factor if place == index else 1 for place in range(3))
            yield ProductObjection(f"{side}={product.sides[index]} is no multiple of {factor}", (m, n, k))


def _list_side_multiples(scheme: ScalingScheme | None, device: DeviceClass) -> Iterator[Sides]:
    if scheme in MX_SCHEMES and device.is_amd:
        # scaled_mm requires multiples of 32. Along K, hipBLASLt's kernels need multiples of 128, according to torch's
        # tests and its older entry point.
        yield 32, 32, 128
    elif scheme in MX_SCHEMES:
        yield 1, 1, 32  # the hardware multiplies complete blocks, and torch's tests have no others
    elif scheme is ScalingScheme.NVFP4:
        yield 1, 1, 32  # cuBLAS: a byte has two codes, and rows start at multiples of 16 bytes
    # All scaled products: cuBLASLt needs rows that start at multiples of 16 bytes, for both operands and the output.
    yield 1, 16, 16


HOPPER = (9, 0)
DESKTOP_BLACKWELL = (12, 0)
_TE_SCHEMES = (ScalingScheme.TENSOR, ScalingScheme.BLOCK, ScalingScheme.MXFP8, ScalingScheme.NVFP4)


def explain_te_refusal(product: Product, device: DeviceClass) -> str:
    """Returns why Transformer Engine's recipes refuse a product of this kind on one of NVIDIA's devices, whatever its
    sizes. Returns '' if they accept it or have no recipe for it. The rules are those of check_mxfp8_support and similar
    functions of Transformer Engine.
    """
    scheme = product.scheme
    if scheme not in _TE_SCHEMES:
        return ""
    if not device.has_compute_capability(ADA):
        return "its FP8 begins at compute capability 8.9"
    if scheme is ScalingScheme.BLOCK and not device.has_compute_capability(HOPPER):
        return "its blocks of 128 begin at compute capability 9.0, with CUDA 12.9"
    if scheme is ScalingScheme.MXFP8 and device.has_compute_capability(DESKTOP_BLACKWELL):
        return "it refuses MXFP8 from compute capability 12.0 on, where some layouts of products are missing"
    if scheme in (ScalingScheme.MXFP8, ScalingScheme.NVFP4) and not device.has_compute_capability(BLACKWELL):
        return f"its {scheme} begins at compute capability 10.0"
    return "it has no recipe with E5M2 in every role" if product.a.fmt is product.b.fmt is E5M2 else ""
