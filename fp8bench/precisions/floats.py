"""fp16: half precision with loss scaling; fp32: the reference of all others."""

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


@precisions.register("fp32")
class Fp32(PlainPrecision):
    """IEEE single precision, products included: TF32 is switched off."""

    name = "fp32"
    summary = "IEEE float32 for every tensor and product, TF32 off."
    rank = 0
    dtype = "float32"

    def support(self, facts: DeviceFacts) -> Support:
        return hardware.native("float32 products, TF32 off")
