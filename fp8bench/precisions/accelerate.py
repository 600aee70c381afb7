"""accelerate-fp8: what Hugging Face's Accelerate makes of a whole model of a user's own."""

from __future__ import annotations

from fp8bench.formats import hardware
from fp8bench.formats.hardware import is_nvidia, refused
from fp8bench.model import DeviceFacts, Support
from fp8bench.nn.shared_precisions import PlainPrecision
from fp8bench.protocols import Arithmetic
from fp8bench.protocols.axes import Option, one_of
from fp8bench.registry import precisions

NAME = "accelerate-fp8"
# What each recipe needs beside Accelerate, and how it is had.
_PACKAGES = {
    "ao": ("torchao", "pip install torchao"),
    "te": ("transformer_engine", "pip install 'transformer-engine[pytorch]'"),
    "msamp": ("msamp", "no registry has it, so that it is built from github.com/Azure/MS-AMP"),
}


@precisions.register(NAME)
class AccelerateFp8(PlainPrecision):
    """Its `prepare` converts the model, runs it under bf16's autocast, and wraps the optimizer."""

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
        """Refused: the workload `model` alone says otherwise."""
        return refused(f"{self.mode} is a whole model of your own by Accelerate: fp8bench profile MODULE:FUNCTION")

    def arithmetic(self, facts: DeviceFacts) -> Arithmetic:
        from fp8bench.nn.accelerated_model import AcceleratedModel

        return AcceleratedModel(str(self.chosen["recipe"]), str(self.chosen["level"]), facts)

    def prepares(self, facts: DeviceFacts) -> Support:
        """How Accelerate prepares a model for a device."""
        recipe, nvidia = str(self.chosen["recipe"]), is_nvidia(facts) and facts.capability is not None
        package, how = _PACKAGES[recipe]
        for needed, way in (("accelerate", "pip install accelerate"), (package, how)):
            if recipe != "ao" and not nvidia:
                break  # what no installation would mend is said first
            if facts.version_of(needed) is None:
                return refused(f"{needed} is not installed here: {way}")
        if self.chosen["level"] != "O2" and recipe != "msamp":
            return refused(f"level={self.chosen['level']} is MS-AMP's: choose recipe=msamp, or leave it out")
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
        if nvidia:
            return hardware.native(f"Accelerate's recipe {recipe}")
        if facts.accelerated:
            return refused(f"nobody has run Accelerate's FP8 on {facts.kind}: choose cpu or cuda")
        return hardware.emulated("torchao's layers by Accelerate, on torch's CPU kernels: a CPU has no FP8 units")
