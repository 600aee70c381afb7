"""bf16: what low precision has to beat."""

from __future__ import annotations

from fp8bench.formats import hardware
from fp8bench.model import DeviceFacts, Support
from fp8bench.protocols import Arithmetic, Precision
from fp8bench.registry import precisions


@precisions.register("bf16")
class Bf16(Precision):
    """bfloat16: float32's exponents with seven mantissa bits."""

    name = "bf16"
    summary = "bfloat16 for every tensor and product, no scaling."
    rank = 30

    def support(self, facts: DeviceFacts) -> Support:
        if hardware.is_cpu(facts):
            return hardware.native("torch's CPU kernels")
        if hardware.is_amd(facts):
            return hardware.native("bfloat16 products")
        if hardware.is_nvidia(facts):
            return hardware.from_capability(facts, hardware.AMPERE, "bf16")
        return hardware.unknown_kind(facts, "bf16")

    def arithmetic(self, facts: DeviceFacts) -> Arithmetic:
        import torch

        from fp8bench.nn.arithmetics import PlainArithmetic

        return PlainArithmetic(torch.bfloat16)
