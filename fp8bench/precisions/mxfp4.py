"""mxfp4: OCP's four bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8bench.formats import hardware
from fp8bench.formats.grids import E2M1
from fp8bench.model import DeviceFacts, Support
from fp8bench.protocols import Arithmetic, Precision, Role
from fp8bench.registry import precisions

if TYPE_CHECKING:
    from torch import Tensor


@precisions.register("mxfp4")
class MxFp4(Precision):
    """OCP MXFP4 without the help (rotations, stochastic rounding) that training in it may need."""

    name = "mxfp4"
    summary = (
        "E2M1 elements for every tensor in blocks of 32 along the contraction, E8M0 block scales "
        "rounded up (RCEIL), elements to nearest even."
    )
    rank = 70
    carried_by = "bf16"

    def support(self, facts: DeviceFacts) -> Support:
        return hardware.emulated_everywhere(facts, "MXFP4")

    def arithmetic(self, facts: DeviceFacts) -> Arithmetic:
        import torch

        from fp8bench.formats.quantise import round_to
        from fp8bench.formats.scaling import mx_values
        from fp8bench.nn.arithmetics import EmulatedArithmetic

        def rounded(tensor: Tensor, role: Role) -> Tensor:
            return mx_values(tensor, E2M1)

        def elements(tensor: Tensor, role: Role) -> Tensor:
            return round_to(tensor, E2M1)

        return EmulatedArithmetic(torch.bfloat16, rounded, keeps_source=True, elements=elements)
