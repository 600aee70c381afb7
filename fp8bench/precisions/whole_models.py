"""Precisions of whole models: Accelerate's conversion of a user's model, and a served model with separate formats."""

from __future__ import annotations

from collections.abc import Callable, Collection

from fp8bench.formats import hardware
from fp8bench.formats.hardware import is_nvidia, refused
from fp8bench.model import DeviceFacts, Support
from fp8bench.nn.served import CARRIERS, KV_FORMATS, SERVED, WEIGHT_FORMATS
from fp8bench.nn.shared_precisions import PlainPrecision
from fp8bench.protocols import Arithmetic, Precision
from fp8bench.protocols.axes import Option, one_of
from fp8bench.registry import precisions

NAME = "accelerate-fp8"
# The package that each recipe needs besides Accelerate, and how to get it.
_PACKAGES = {
    "ao": ("torchao", "pip install torchao"),
    "te": ("transformer_engine", "pip install 'transformer-engine[pytorch]'"),
    "msamp": ("msamp", "no registry has it, so that it is built from github.com/Azure/MS-AMP"),
}


@precisions.register(NAME)
class AccelerateFp8(PlainPrecision):
    """Accelerate's `prepare` converts the model, runs it under bf16's autocast, and wraps the optimizer."""

    name = NAME
    summary = (
        "Accelerator(mixed_precision='fp8').prepare of a model of your own, in the recipe that is chosen, under bf16's "
        "autocast; `fp8bench profile` alone."
    )
    rank = 49
    listed = False
    dtype = "bfloat16"
    carried_by = "bf16"
    options = (
        Option("recipe", "ao: torchao's, te: Transformer Engine's, msamp: MS-AMP's", "ao", one_of(*_PACKAGES)),
        Option("level", "of msamp", "O2", one_of("O1", "O2")),
    )

    def support(self, facts: DeviceFacts) -> Support:
        """Refused; the workload `model` alone overrides that."""
        return refused(f"{self.mode} is a whole model of your own by Accelerate: fp8bench profile MODULE:FUNCTION")

    def arithmetic(self, facts: DeviceFacts) -> Arithmetic:
        from fp8bench.nn.conversion import AcceleratedModel

        return AcceleratedModel(str(self.chosen["recipe"]), str(self.chosen["level"]), facts)

    def prepares(self, facts: DeviceFacts) -> Support:
        recipe = str(self.chosen["recipe"])
        nvidia = is_nvidia(facts) and facts.capability is not None
        package, how = _PACKAGES[recipe]
        # 1. Packages come first: everything else needs them.
        for needed, command in (("accelerate", "pip install accelerate"), (package, how)):
            if recipe != "ao" and not nvidia:
                break  # installing a package would not help there
            if facts.version_of(needed) is None:
                return refused(f"{needed} is not installed here: {command}")
        # 2. Options that belong to other recipes.
        if self.chosen["level"] != "O2" and recipe != "msamp":
            return refused(f"level={self.chosen['level']} is MS-AMP's: choose recipe=msamp, or leave it out")
        # 3. Devices that the recipe does not run on.
        if recipe != "ao" and not nvidia:
            words = {"te": "Transformer Engine", "msamp": "MS-AMP"}[recipe]
            return refused(
                f"Accelerate's recipe {recipe} is {words}'s, which needs an NVIDIA GPU with FP8 units (compute "
                "capability 8.9 or later): choose recipe=ao, or another device"
            )
        if nvidia and facts.capability is not None and facts.capability < (8, 9):
            return refused("Accelerate refuses FP8 on GPUs below compute capability 8.9: choose another device")
        if facts.accelerated and facts.index:
            return refused(f"Accelerate takes a process's first GPU, not {facts.key}: choose {facts.kind}:0")
        # 4. All other cases run, natively or by torch's kernels for CPUs.
        if nvidia:
            return hardware.native(f"Accelerate's recipe {recipe}")
        if facts.accelerated:
            return refused(f"Accelerate's FP8 has not been tried on {facts.kind}: choose cpu or cuda")
        return hardware.emulated("torchao's layers by Accelerate, on torch's CPU kernels: a CPU has no FP8 units")


def _format_of(names: Collection[str]) -> Callable[[str], str]:
    """Returns a parser of a format's name; '' is the carrier."""
    parse = one_of(*names)
    return lambda text: parse(text) if text else ""


@precisions.register(SERVED)
class Served(Precision):
    """An arm of inference: formats of the cache and the weights; everything else is in the carrier."""

    name = SERVED
    summary = "bf16 or fp32, with keys and values, and weights, kept in formats of their own."
    rank = 35
    listed = False
    options = (
        Option("carrier", f"what all else is in: {', '.join(CARRIERS)}", "bf16", one_of(*CARRIERS)),
        Option("kv", "the format of keys and values", "", _format_of(KV_FORMATS)),
        Option("weights", "the format of the blocks' weights", "", _format_of(WEIGHT_FORMATS)),
        Option(
            "activations",
            "low: inputs of those layers are rounded to their weights' format too",
            "high",
            one_of("high", "low"),
        ),
    )

    def support(self, facts: DeviceFacts) -> Support:
        """Refused; the workloads that serve a model override that."""
        return refused("served keeps a model's cache and weights: only prefill, decode and gemm have such")

    def arithmetic(self, facts: DeviceFacts) -> Arithmetic:
        import torch

        from fp8bench.nn.arithmetics import PlainArithmetic

        return PlainArithmetic({"fp32": torch.float32, "bf16": torch.bfloat16}[str(self.chosen["carrier"])])
