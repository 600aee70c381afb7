"""tf32: float32 tensors, products of ten mantissa bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8bench.formats import hardware
from fp8bench.formats.grids import TF32, Overflow
from fp8bench.model import DeviceFacts, Level, Support
from fp8bench.nn.shared_precisions import PlainPrecision
from fp8bench.protocols import Arithmetic, Role
from fp8bench.registry import precisions

if TYPE_CHECKING:
    from torch import Tensor


@precisions.register("tf32")
class Tf32(PlainPrecision):
    """A switch more than a format: tensors stay float32, the tensor cores round what they read."""

    name = "tf32"
    summary = "float32 tensors, products of TF32 values (10 mantissa bits, to nearest even where emulated), fp32 sums."
    rank = 10
    dtype = "float32"
    carried_by = "fp32"
    # One switch for the process: on a GPU the head takes it too. On a CPU it changes no product of TF32 values.
    float32_products = "high"

    def support(self, facts: DeviceFacts) -> Support:
        cpu = hardware.emulated("no hardware for TF32: inputs rounded to 10 mantissa bits, products in fp32")
        amd = hardware.refused("torch gives no TF32 on AMD devices")
        intel = hardware.refused("torch's switch for TF32 on XPUs is not handled here")
        nvidia = hardware.from_capability(facts, hardware.AMPERE, "TF32")
        return hardware.of_vendor(facts, "TF32", cpu, amd, nvidia, intel)

    def laid_out(self, facts: DeviceFacts) -> Arithmetic | str:
        return super().arithmetic(facts)  # hardware rounds what it reads, and keeps nothing of it

    def arithmetic(self, facts: DeviceFacts) -> Arithmetic:
        if self.support(facts).level is Level.NATIVE:
            return super().arithmetic(facts)
        import torch

        from fp8bench.formats.quantise import round_to
        from fp8bench.nn.arithmetics import EmulatedArithmetic

        def rounded(tensor: Tensor, role: Role) -> Tensor:
            return round_to(tensor, TF32, overflow=Overflow.INFINITY)

        return EmulatedArithmetic(torch.float32, rounded)
