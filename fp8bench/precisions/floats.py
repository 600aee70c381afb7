"""Precisions that are torch's own dtypes: fp32 (the reference), tf32, fp16 with loss scaling, and bf16. The precision
`untouched` is that of an unchanged model. `rank` orders precisions: a higher precision has a lower rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fp8bench.formats import hardware
from fp8bench.formats.grids import TF32, Overflow
from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, Support
from fp8bench.nn.shared_precisions import PlainPrecision
from fp8bench.protocols import Arithmetic, Role
from fp8bench.registry import precisions

if TYPE_CHECKING:
    from torch import Tensor


@precisions.register("bf16")
class Bf16(PlainPrecision):
    """bfloat16: the exponent range of float32 with seven mantissa bits."""

    name = "bf16"
    summary = "bfloat16 for every tensor and product, no scaling."
    rank = 30
    dtype = "bfloat16"

    def support(self, facts: DeviceFacts) -> Support:
        cpu_support = hardware.native("torch's CPU kernels")
        gpu_support = hardware.native("bfloat16 products")
        nvidia_support = hardware.support_from_capability(facts, hardware.AMPERE, "bf16")
        return hardware.select_by_vendor(
            facts, "bf16", cpu=cpu_support, amd=gpu_support, nvidia=nvidia_support, intel=gpu_support
        )


@precisions.register("fp16")
class Fp16(PlainPrecision):
    """IEEE half precision."""

    name = "fp16"
    summary = "IEEE float16 for every tensor and product, no scaling of tensors, loss scaled by 1024."
    rank = 20
    dtype = "float16"
    # Without a scaled loss, small gradients would underflow.
    loss_scale = 1024.0

    def support(self, facts: DeviceFacts) -> Support:
        cpu_support = hardware.native("torch's CPU kernels, slow where the CPU has no float16 products")
        gpu_support = hardware.native("float16 products")
        return hardware.select_by_vendor(
            facts, "fp16", cpu=cpu_support, amd=gpu_support, nvidia=gpu_support, intel=gpu_support
        )


@precisions.register("fp32")
class Fp32(PlainPrecision):
    """IEEE single precision, for products too, because TF32 is switched off."""

    name = "fp32"
    summary = "IEEE float32 for every tensor and product, TF32 off."
    rank = 0
    dtype = "float32"

    def support(self, facts: DeviceFacts) -> Support:
        return hardware.native("float32 products, TF32 off")


@precisions.register("tf32")
class Tf32(PlainPrecision):
    """TF32, which is a switch and not a format: tensors stay float32, and tensor cores round their inputs."""

    name = "tf32"
    summary = "float32 tensors, products of TF32 values (10 mantissa bits, to nearest even where emulated), fp32 sums."
    rank = 10
    dtype = "float32"
    carried_by = "fp32"
    # torch's TF32 switch applies to the whole process, so on a GPU fp32 layers use TF32 too. On a CPU, `arithmetic`
    # rounds operands to TF32 before it multiplies, and the switch does not change products of such values.
    float32_products = "high"

    def support(self, facts: DeviceFacts) -> Support:
        cpu_support = hardware.emulated("no hardware for TF32: inputs rounded to 10 mantissa bits, products in fp32")
        amd_support = hardware.refused("torch gives no TF32 on AMD devices")
        intel_support = hardware.refused("torch's switch for TF32 on XPUs is not handled here")
        nvidia_support = hardware.support_from_capability(facts, hardware.AMPERE, "TF32")
        return hardware.select_by_vendor(
            facts, "TF32", cpu=cpu_support, amd=amd_support, nvidia=nvidia_support, intel=intel_support
        )

    def laid_out(self, facts: DeviceFacts) -> Arithmetic | str:
        """Returns the arithmetic that is used to count memory. It stores tensors as TF32 hardware does: in float32,
        because the hardware rounds the operands only when it multiplies.
        """
        return super().arithmetic(facts)

    def arithmetic(self, facts: DeviceFacts) -> Arithmetic:
        if self.support(facts).is_native:
            return super().arithmetic(facts)
        import torch

        from fp8bench.formats.quantise import round_to
        from fp8bench.nn.arithmetics import EmulatedArithmetic

        def round_to_tf32(tensor: Tensor, role: Role) -> Tensor:
            return round_to(tensor, TF32, overflow=Overflow.INFINITY)

        return EmulatedArithmetic(torch.float32, round_to_tf32)


@precisions.register("untouched")
class Untouched(PlainPrecision):
    """A user's unchanged model, with its own dtypes, autocast and switches."""

    name = "untouched"
    summary = "An unchanged model, in its own dtypes."
    rank = -1
    dtype = "float32"  # every case gets an Arithmetic, but an unchanged model does not use it
    listed = False

    def support(self, facts: DeviceFacts) -> Support:
        """Returns a refusal. Only the workload `model` supports this precision."""
        return refused(
            "untouched is your model unchanged, and no model was given. Give it: `fp8bench train net.py:make --dtypes "
            "untouched,fp8`, or `fp8bench profile net.py:make`"
        )

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Changes no settings of the process, such as TF32. Other precisions do."""
        yield
