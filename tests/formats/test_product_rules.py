"""The rules of native products: cases that torch's own sources and tests name, device by device; names of kernels."""

from __future__ import annotations

from fp8bench.formats.grids import E2M1, E3M2, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, Format
from fp8bench.formats.hardware import (
    A100,
    B200,
    CPU,
    DEVICE_CLASSES,
    H100,
    L40S,
    MI300X,
    MI350X,
    RTX5090,
    DeviceClass,
    find_wider_kernel,
)
from fp8bench.formats.product_rules import (
    Product,
    ScalingScheme,
    do_row_scales_give_float32,
    explain_missing_product_kind,
    explain_te_refusal,
    list_product_objections,
)
from fp8bench.formats.recipes import BLOCK, MX, NVFP4, NVFP4_SQUARE, ROW, SQUARE, TENSOR, Scaling, Treatment
from fp8bench.model import DeviceFacts
from tests.counts import for_each


def product(
    m: int,
    n: int,
    k: int,
    fmt: Format = E4M3,
    scaling: Scaling | None = TENSOR,
    output: str = "bf16",
    rows: bool = False,
) -> Product:
    """A product with both operands rounded alike."""
    one = Treatment(fmt, scaling)
    return Product(m, n, k, one, one, output, rows)


SCHEMES = {
    ScalingScheme.TENSOR: (E4M3, TENSOR),
    ScalingScheme.ROW: (E4M3, ROW),
    ScalingScheme.BLOCK: (E4M3, BLOCK),
    ScalingScheme.MXFP8: (E4M3, MX),
    ScalingScheme.MXFP6: (E3M2, MX),
    ScalingScheme.MXFP4: (E2M1, MX),
    ScalingScheme.NVFP4: (E2M1, NVFP4),
}
# Device classes and their torch products; combinations not listed do not exist.
THERE = {
    A100: set(),
    L40S: {ScalingScheme.TENSOR, ScalingScheme.ROW},
    H100: {ScalingScheme.TENSOR, ScalingScheme.ROW, ScalingScheme.BLOCK},
    B200: {ScalingScheme.TENSOR, ScalingScheme.ROW, ScalingScheme.MXFP8, ScalingScheme.MXFP4, ScalingScheme.NVFP4},
    RTX5090: {ScalingScheme.TENSOR, ScalingScheme.ROW, ScalingScheme.MXFP8, ScalingScheme.NVFP4},
    MI300X: set(),
    MI350X: {ScalingScheme.TENSOR, ScalingScheme.ROW, ScalingScheme.MXFP8, ScalingScheme.MXFP4},
    CPU: set(),
}


@for_each("device", DEVICE_CLASSES)
@for_each("scheme", ScalingScheme)
def test_which_devices_have_which_products(device: DeviceClass, scheme: ScalingScheme) -> None:
    fmt, scaling = SCHEMES[scheme]
    one = product(512, 512, 512, fmt, scaling)

    assert one.scheme is scheme
    result = explain_missing_product_kind(one, device)
    assert (not result) == (scheme in THERE[device])


def test_fnuz_formats_are_those_of_mi300_alone() -> None:
    fnuz = Treatment(E4M3FNUZ, TENSOR), Treatment(E5M2FNUZ, TENSOR)
    one = Product(512, 512, 512, *fnuz)

    assert not explain_missing_product_kind(one, MI300X) and not list_product_objections(one, MI300X)
    assert explain_missing_product_kind(one, H100) and explain_missing_product_kind(product(512, 512, 512), MI300X)


def test_pairs_that_no_library_multiplies() -> None:
    """They are emulated everywhere, and the reason names them.

    Only two mixed pairs are products: DeepSeek's forward one, 1x128 by 128x128, and NVFP4's 1x16 by 16x16.
    """
    for fmt, scaling in ((E3M2, None), (E3M2, TENSOR), (E4M3, Scaling(1, 64)), (E2M1, ROW)):
        one = product(512, 512, 512, fmt, scaling)
        assert one.scheme is None and fmt.name in explain_missing_product_kind(one, B200)
    assert Product(256, 256, 256, Treatment(E4M3, TENSOR), Treatment(E4M3, ROW)).scheme is None
    assert Product(256, 256, 256, Treatment(E4M3, BLOCK), Treatment(E4M3, SQUARE)).scheme is ScalingScheme.BLOCK
    assert Product(256, 256, 256, Treatment(E2M1, NVFP4), Treatment(E2M1, NVFP4_SQUARE)).scheme is ScalingScheme.NVFP4


# torch's tests of mxfp8 and nvfp4 (test_scaled_matmul_cuda.py): M, K, N that they run on CUDA.
RUN_BY_TORCH = [
    (128, 128, 128),
    (128, 256, 512),
    (65, 96, 112),
    (197, 224, 272),
    (1023, 64, 48),
    (31, 1024, 64),
    (45, 96, 1024),
    (2, 1024, 128),
    (127, 96, 1024),
    (1025, 128, 96),
]


@for_each("scheme", [ScalingScheme.MXFP8, ScalingScheme.NVFP4, ScalingScheme.MXFP4])
@for_each(("m", "k", "n"), RUN_BY_TORCH)
def test_what_torch_tests_on_blackwell_is_taken(scheme: ScalingScheme, m: int, k: int, n: int) -> None:
    fmt, scaling = SCHEMES[scheme]

    assert not list_product_objections(product(m, n, k, fmt, scaling), B200)
    assert list_product_objections(product(m, n, k + 16, fmt, scaling), B200)
    if k % 128 and scheme is not ScalingScheme.NVFP4:
        assert list_product_objections(product(m, n, k, fmt, scaling), MI350X)


@for_each("device", [L40S, H100, B200, RTX5090, MI350X])
def test_every_scaled_product_wants_sixteens(device: DeviceClass) -> None:
    assert not list_product_objections(product(17, 48, 32), device)
    columns, contraction = list_product_objections(product(17, 50257, 40), device)

    assert "N=50257 is no multiple of 16" in columns.why and columns.multiples == (1, 16, 1)
    assert "K=40 is no multiple of 16" in contraction.why and contraction.multiples == (1, 1, 16)


def test_one_objection_a_side_and_the_widest() -> None:
    for fmt, scaling in ((E2M1, NVFP4), (E4M3, MX)):
        sides = [one.multiples for one in list_product_objections(product(33, 33, 40, fmt, scaling), B200)]
        assert sides == [(1, 16, 1), (1, 1, 32)]
    sides = [one.multiples for one in list_product_objections(product(40, 40, 40, E4M3, MX), MI350X)]
    assert sides == [(32, 1, 1), (1, 32, 1), (1, 1, 128)]


def test_types_that_padding_does_not_mend() -> None:
    twice = product(64, 64, 64, E5M2)
    mixed = Product(64, 64, 64, Treatment(E5M2, ROW), Treatment(E4M3, ROW))
    turned = Product(64, 64, 64, Treatment(E4M3, ROW), Treatment(E5M2, ROW))
    wide = product(64, 64, 64, E4M3, ROW, output="fp32")

    assert [one.multiples for one in list_product_objections(twice, H100)] == [None] and not list_product_objections(
        twice, MI350X
    )
    assert not list_product_objections(mixed, B200) and not list_product_objections(turned, H100)
    assert "second operand is E4M3" in list_product_objections(turned, B200)[0].why
    assert "not fp32" in list_product_objections(wide, L40S)[0].why and not list_product_objections(wide, H100)
    assert list_product_objections(product(64, 64, 64, E4M3, ROW, output="fp16"), MI350X)
    assert "innermost" in list_product_objections(product(64, 64, 64, rows=True), H100)[0].why
    assert list_product_objections(product(256, 256, 256, E4M3, MX, output="fp32"), MI350X)


def test_transformer_engine_has_rules_of_its_own() -> None:
    """No MXFP8 on desktop Blackwell, no blocks before Hopper; no rules for row scales."""
    mxfp8 = product(64, 64, 64, E4M3, MX)
    assert not explain_missing_product_kind(mxfp8, RTX5090) and "refuses MXFP8" in explain_te_refusal(mxfp8, RTX5090)
    assert explain_te_refusal(mxfp8, B200) == explain_te_refusal(product(64, 64, 64, E4M3, ROW), H100) == ""
    assert "begins at compute capability 10.0" in explain_te_refusal(product(64, 64, 64, E2M1, NVFP4), H100)
    assert "E5M2 in every role" in explain_te_refusal(product(64, 64, 64, E5M2), H100)
    assert "begin at compute capability 9.0" in explain_te_refusal(product(64, 64, 64, E4M3, BLOCK), L40S)
    assert "begins at compute capability 8.9" in explain_te_refusal(product(64, 64, 64), A100)


def test_where_products_by_rows_give_float32() -> None:
    """cuBLAS's do, on Hopper since CUDA 12.9."""
    devices = [((9, 0), "13.0"), ((9, 0), "12.9"), ((9, 0), "12.8"), ((8, 9), "13.0"), ((10, 0), "13.0")]
    facts = [DeviceFacts("cuda", 0, "a GPU", 1, "2.13.0", *device) for device in devices]
    facts.append(DeviceFacts("cuda", 0, "a GPU", 1, "2.13.0", (9, 4), None, "7.0"))
    assert [do_row_scales_give_float32(one) for one in facts] == [True, True, False, False, False, False]


FP8 = (
    "nvjet_qqtst_128x256_128x4_1x2_h_bz_coopA_TNT",
    "nvjet_sm100_qqtst_256x192_128x4_2x1_2cta_v_bz_TNT",
    "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128_warpgroupsize2x1x1",
    "sm89_xmma_gemm_e5m2e4m3_bf16f32_f32_tn_n_tilesize64x64x64",
    "cutlass3x_sm90_tensorop_s64x256x32gemm_e4m3_e4m3_f32_bf16_bf16_128x256x128",
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::float_e4m3_t, cutlass::bfloat16_t>>",
    "f8f8bf16_rowwise_impl_gemm",
    "Cijk_Ailk_Bljk_F8BS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x128",
)
WIDE = {
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT": 16,
    "nvjet_hsh_192x192_64x4_2x1_v_bz_coopA_TNN": 16,
    "nvjet_sm100_tst_256x192_64x5_2x1_2cta_h_bz_TNT": 16,
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize2x1x1": 16,
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn": 16,
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_32x5_tn_align8>": 16,
    "Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64": 16,
    "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16": 32,
    "ampere_sgemm_128x128_tn": 32,
}
NO_PRODUCTS = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::float8_copy_kernel_cuda>",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>",
    "triton_poi_fused__to_copy_clamp_mul_0",
    "Memset (Device)",
    "nvjet_something_new",
)


def test_a_step_without_a_kernel_of_its_precision() -> None:
    wide = list(WIDE)
    assert find_wider_kernel([NO_PRODUCTS[0], *wide], 8) == wide[0]
    assert find_wider_kernel([*wide, FP8[0]], 8) == "" and find_wider_kernel(wide, 16) == ""
    assert find_wider_kernel(NO_PRODUCTS, 8) == "" and find_wider_kernel([], 8) == ""
    assert find_wider_kernel(FP8, 4) == FP8[0] and find_wider_kernel(["cutlass3x_sm100_gemm_e2m1_e2m1_f32"], 4) == ""
