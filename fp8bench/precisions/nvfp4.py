"""nvfp4: NVIDIA's four bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8bench.formats import hardware
from fp8bench.formats.grids import E2M1
from fp8bench.model import DeviceFacts, Support
from fp8bench.protocols import Arithmetic, Precision, Role
from fp8bench.registry import precisions

if TYPE_CHECKING:
    from torch import Tensor


@precisions.register("nvfp4", "fp4")
class NvFp4(Precision):
    """NVFP4 without the help (rotations, stochastic rounding) that NVIDIA's training recipe adds."""

    name = "nvfp4"
    aliases = ("fp4",)
    summary = (
        "E2M1 elements for every tensor in blocks of 16 along the contraction, E4M3 block scales "
        "under one float32 tensor scale, everything to nearest even."
    )
    rank = 60
    carried_by = "bf16"

    def support(self, facts: DeviceFacts) -> Support:
        return hardware.emulated_everywhere(facts, "NVFP4")

    def arithmetic(self, facts: DeviceFacts) -> Arithmetic:
        import torch

        from fp8bench.formats.quantise import round_to
        from fp8bench.formats.scaling import nvfp4_values
        from fp8bench.nn.arithmetics import EmulatedArithmetic

        def rounded(tensor: Tensor, role: Role) -> Tensor:
            return nvfp4_values(tensor)

        def elements(tensor: Tensor, role: Role) -> Tensor:
            return round_to(tensor, E2M1)

        return EmulatedArithmetic(torch.bfloat16, rounded, keeps_source=True, elements=elements)
