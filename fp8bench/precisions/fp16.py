"""fp16: half precision with loss scaling."""

from __future__ import annotations

from fp8bench.formats import hardware
from fp8bench.model import DeviceFacts, Support
from fp8bench.nn.shared_precisions import PlainPrecision
from fp8bench.registry import precisions


@precisions.register("fp16")
class Fp16(PlainPrecision):
    """IEEE half precision."""

    name = "fp16"
    summary = "IEEE float16 for every tensor and product, no scaling of tensors, loss scaled by 1024."
    rank = 20
    dtype = "float16"
    loss_scale = 1024.0

    def support(self, facts: DeviceFacts) -> Support:
        cpu = hardware.native("torch's CPU kernels, slow where the CPU has no float16 products")
        gpu = hardware.native("float16 products")
        return hardware.of_vendor(facts, "fp16", cpu, gpu, gpu, intel=gpu)
