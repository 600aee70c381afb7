"""What kernels' names say, as libraries were seen to call them."""

from __future__ import annotations

from fp8bench.formats.hardware import foreign_kernel, multiplied_bits

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


def test_bits_of_operands() -> None:
    """The type of the result stands in names as well; who does not multiply, or does not say, has none."""
    wanted = dict.fromkeys(FP8, 8) | WIDE | dict.fromkeys(NO_PRODUCTS)
    assert {name: multiplied_bits(name) for name in wanted} == wanted


def test_a_step_without_a_kernel_of_its_precision() -> None:
    """One is enough: heads and attention multiply wider numbers. What nobody knows accuses nobody."""
    wide = list(WIDE)
    assert foreign_kernel([NO_PRODUCTS[0], *wide], 8) == wide[0]
    assert foreign_kernel([*wide, FP8[0]], 8) == "" and foreign_kernel(wide, 16) == ""
    assert foreign_kernel(NO_PRODUCTS, 8) == "" and foreign_kernel([], 8) == ""
    assert foreign_kernel(FP8, 4) == FP8[0] and foreign_kernel(["cutlass3x_sm100_gemm_e2m1_e2m1_f32"], 4) == ""
