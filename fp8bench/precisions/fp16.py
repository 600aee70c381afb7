"""fp16: half precision with loss scaling."""

from __future__ import annotations

from fp8bench.formats import hardware
from fp8bench.model import DeviceFacts, Support
from fp8bench.protocols import Arithmetic, Precision
from fp8bench.registry import precisions


@precisions.register("fp16")
class Fp16(Precision):
    """IEEE half precision."""

    name = "fp16"
    summary = "IEEE float16 for every tensor and product, no scaling of tensors, loss scaled by 1024."
    rank = 20
    loss_scale = 1024.0

    def support(self, facts: DeviceFacts) -> Support:
        if hardware.is_cpu(facts):
            return hardware.native("torch's CPU kernels, slow where the CPU has no float16 products")
        if facts.kind == "cuda":
            return hardware.native("float16 products")
        return hardware.unknown_kind(facts, "fp16")

    def arithmetic(self, facts: DeviceFacts) -> Arithmetic:
        import torch

        from fp8bench.nn.arithmetics import PlainArithmetic

        return PlainArithmetic(torch.float16)
