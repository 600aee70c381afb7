"""bf16: what low precision has to beat."""

from __future__ import annotations

from fp8bench.formats import hardware
from fp8bench.model import DeviceFacts, Support
from fp8bench.nn.shared_precisions import PlainPrecision
from fp8bench.registry import precisions


@precisions.register("bf16")
class Bf16(PlainPrecision):
    """bfloat16: float32's exponents with seven mantissa bits."""

    name = "bf16"
    summary = "bfloat16 for every tensor and product, no scaling."
    rank = 30
    dtype = "bfloat16"

    def support(self, facts: DeviceFacts) -> Support:
        cpu, gpu = hardware.native("torch's CPU kernels"), hardware.native("bfloat16 products")
        nvidia = hardware.from_capability(facts, hardware.AMPERE, "bf16")
        return hardware.of_vendor(facts, "bf16", cpu, gpu, nvidia, intel=gpu)
