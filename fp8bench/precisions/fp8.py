"""fp8: the hybrid recipe with current scaling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8bench.formats import hardware
from fp8bench.formats.grids import E4M3, E5M2, Format
from fp8bench.model import DeviceFacts, Level, Support
from fp8bench.protocols import Arithmetic, Precision, Role
from fp8bench.registry import precisions

if TYPE_CHECKING:
    from torch import Tensor

FORMATS: dict[Role, Format] = {Role.INPUT: E4M3, Role.WEIGHT: E4M3, Role.GRADIENT: E5M2}


@precisions.register("fp8")
class Fp8(Precision):
    """More mantissa where the forward pass needs it, more exponent for gradients."""

    name = "fp8"
    summary = (
        "E4M3 inputs and weights, E5M2 gradients, one current float32 scale a tensor (largest / amax, not rounded to "
        "a power of two), elements to nearest even."
    )
    rank = 40
    carried_by = "bf16"
    multiples = (16, 16)

    def support(self, facts: DeviceFacts) -> Support:
        if hardware.is_cpu(facts):
            return hardware.emulated("no hardware for FP8: values rounded, products in fp32")
        if hardware.is_amd(facts):
            return hardware.emulated(_why_not_on_amd(facts))
        if not hardware.is_nvidia(facts):
            return hardware.unknown_kind(facts, "FP8")
        found = hardware.from_capability(facts, hardware.ADA, "FP8")
        if found.level is Level.NATIVE:
            return hardware.native("torch's scaled product (torch.nn.functional.scaled_mm)")
        return hardware.emulated(f"{found.reason}: values rounded, products in fp32")

    def arithmetic(self, facts: DeviceFacts) -> Arithmetic:
        import torch

        from fp8bench.formats.quantise import round_to
        from fp8bench.formats.scaling import per_tensor_values
        from fp8bench.nn.arithmetics import EmulatedArithmetic, ScaledArithmetic

        if self.support(facts).level is Level.NATIVE:
            return ScaledArithmetic(torch.bfloat16, FORMATS)

        def rounded(tensor: Tensor, role: Role) -> Tensor:
            return per_tensor_values(tensor, FORMATS[role])

        def elements(tensor: Tensor, role: Role) -> Tensor:
            return round_to(tensor, FORMATS[role])

        return EmulatedArithmetic(torch.bfloat16, rounded, elements=elements)


def _why_not_on_amd(facts: DeviceFacts) -> str:
    if hardware.capability(facts) == hardware.CDNA3:
        return "MI300's FP8 is e4m3fnuz and e5m2fnuz, not the E4M3 and E5M2 defined here: values rounded, fp32 products"
    return "no native backend for FP8 on this AMD device yet: values rounded, products in fp32"
