"""mxfp8: Blackwell's eight bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8bench.formats import hardware
from fp8bench.formats.grids import E4M3
from fp8bench.model import DeviceFacts, Support
from fp8bench.protocols import Arithmetic, Precision, Role
from fp8bench.registry import precisions

if TYPE_CHECKING:
    from torch import Tensor


@precisions.register("mxfp8")
class MxFp8(Precision):
    """OCP MXFP8; E4M3 in every role, because blocks of 32 make E5M2's range unnecessary."""

    name = "mxfp8"
    summary = (
        "E4M3 elements for every tensor in blocks of 32 along the contraction, E8M0 block scales "
        "rounded up (RCEIL), elements to nearest even."
    )
    rank = 50
    carried_by = "bf16"

    def support(self, facts: DeviceFacts) -> Support:
        return hardware.emulated_everywhere(facts, "MXFP8")

    def arithmetic(self, facts: DeviceFacts) -> Arithmetic:
        import torch

        from fp8bench.formats.quantise import round_to
        from fp8bench.formats.scaling import mx_values
        from fp8bench.nn.arithmetics import EmulatedArithmetic

        def rounded(tensor: Tensor, role: Role) -> Tensor:
            return mx_values(tensor, E4M3)

        def elements(tensor: Tensor, role: Role) -> Tensor:
            return round_to(tensor, E4M3)

        return EmulatedArithmetic(torch.bfloat16, rounded, keeps_source=True, elements=elements)
