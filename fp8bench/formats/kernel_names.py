"""What the names of a GPU's kernels say of the numbers that they multiply. No torch: plain words.

Names as libraries give them: cuBLAS (`nvjet_qqtst_...`, `sm90_xmma_gemm_e4m3bf16_...`, `ampere_bf16_s16816gemm_...`),
CUTLASS (`cutlass3x_sm90_tensorop_..._e4m3_e4m3_f32_bf16_...`, or C++ types), FBGEMM (`f8f8bf16_rowwise`), hipBLASLt
(`Cijk_Ailk_Bljk_F8BS_...`), Triton. What none of these words is in is not judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Whether a kernel multiplies matrices; those that add up its parts, and casts, do not.
_MULTIPLIES = re.compile(r"gemm|nvjet|cutlass|xmma|cijk|matmul|scaled_mm|wgmma|f8f8", re.IGNORECASE)
_ADDS_UP = re.compile(r"reduce|splitk_?reduce|memset", re.IGNORECASE)
# Bits of the numbers that are multiplied, the fewest first: a name has its result's type in it, too.
_BITS = (
    (4, re.compile(r"e2m1|float_?4|[mn][xv]_?f(p)?4|(?<![a-z0-9])fp4", re.IGNORECASE)),
    (8, re.compile(r"e4m3|e5m2|float_?8|fp8|f8f8|nvjet_(sm\d+_)?qq|_F8[BHS]?|_b8", re.IGNORECASE)),
    (16, re.compile(r"bf16|bfloat16|f16|half_t|hgemm|16816|nvjet_(sm\d+_)?[th]s[th]|_[BH][BHS]S", re.IGNORECASE)),
    (32, re.compile(r"tf32|sgemm|f32f32|nvjet_(sm\d+_)?sss|_SSS|_SS_|simt", re.IGNORECASE)),
)  # fmt: skip


def multiplied_bits(name: str) -> int | None:
    """How wide the numbers are that a kernel multiplies; None of one that does not, or that does not say."""
    if _ADDS_UP.search(name) or not _MULTIPLIES.search(name):
        return None
    return next((bits for bits, words in _BITS if words.search(name)), None)


def foreign_kernel(names: Iterable[str], most_bits: int) -> str:
    """The first kernel that multiplies wider numbers, where none multiplies so narrow ones; '' if there is one."""
    known = [(name, bits) for name in names if (bits := multiplied_bits(name)) is not None]
    if not known or any(bits <= most_bits for _, bits in known):
        return ""
    return known[0][0]
