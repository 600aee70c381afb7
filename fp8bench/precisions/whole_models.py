"""Precisions of whole models: a user's model that Accelerate converts, and a served model with separate formats for
weights and KV cache.

The protocol `Precision` explains the attributes of these classes. The highest precision has the lowest `rank`. With
`listed = False`, a precision belongs to certain workloads only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from fp8bench.formats import hardware
from fp8bench.formats.hardware import is_nvidia, refused
from fp8bench.model import DeviceFacts, Support
from fp8bench.nn.served import CARRIER_BYTES, KV_FORMATS, SERVED_PRECISION, WEIGHT_FORMATS
from fp8bench.nn.shared_precisions import PlainPrecision
from fp8bench.protocols import Arithmetic, Precision
from fp8bench.protocols.axes import Option, one_of
from fp8bench.registry import precisions

ACCELERATE_FP8 = "accelerate-fp8"
# The package that each recipe needs in addition to Accelerate, and how to install it.
_RECIPE_PACKAGES = {
    "ao": ("torchao", "pip install torchao"),
    "te": ("transformer_engine", "pip install 'transformer-engine[pytorch]'"),
    "msamp": ("msamp", "no registry has it, so build it from github.com/Azure/MS-AMP"),
}


@precisions.register(ACCELERATE_FP8)
class AccelerateFp8(PlainPrecision):
    """Converts a model with Accelerate's `prepare`, which also wraps the optimizer and runs the model under bf16
    autocast.
    """

    name = ACCELERATE_FP8
    summary = (
        "Your own model, converted by Accelerator(mixed_precision='fp8').prepare with the chosen recipe, under bf16's "
        "autocast; only for `fp8bench profile`."
    )
    rank = 49
    listed = False
    dtype = "bfloat16"
    carried_by = "bf16"  # values between products are in bf16
    options = (
        Option("recipe", "ao: torchao's, te: Transformer Engine's, msamp: MS-AMP's", "ao", one_of(*_RECIPE_PACKAGES)),
        Option("level", "optimization level of msamp", "O2", one_of("O1", "O2")),
    )

    def support(self, facts: DeviceFacts) -> Support:
        """Returns a refusal. Only the workload `model` supports this precision."""
        return refused(f"{self.mode} needs your own model, which Accelerate converts: fp8bench profile MODULE:FUNCTION")

    def arithmetic(self, facts: DeviceFacts) -> Arithmetic:
        from fp8bench.nn.conversion import AcceleratedModel

        return AcceleratedModel(str(self.chosen["recipe"]), str(self.chosen["level"]), facts)

    def prepares(self, facts: DeviceFacts) -> Support:
        """Returns how Accelerate supports the chosen recipe on a device. A refusal has the reason."""
        recipe = str(self.chosen["recipe"])
        nvidia_capability = facts.capability if is_nvidia(facts) else None
        lacks_nvidia_gpu = recipe != "ao" and nvidia_capability is None
        package, install_command = _RECIPE_PACKAGES[recipe]
        required_packages = {"accelerate": "pip install accelerate", package: install_command}
        # 1. Look for missing packages first, because everything else needs the packages. Without the GPU that the
        # recipe needs, installing a package would not help.
        if not lacks_nvidia_gpu:
            for required_package, command in required_packages.items():
                if facts.version_of(required_package) is None:
                    return refused(f"{required_package} is not installed here: {command}")
        # 2. Refuse an option that only another recipe has.
        if self.chosen["level"] != "O2" and recipe != "msamp":
            return refused(f"level={self.chosen['level']} is MS-AMP's: choose recipe=msamp, or leave it out")
        # 3. Refuse devices that cannot run the recipe.
        if lacks_nvidia_gpu:
            library = {"te": "Transformer Engine", "msamp": "MS-AMP"}[recipe]
            return refused(
                f"Accelerate's recipe {recipe} is {library}'s, which needs an NVIDIA GPU with FP8 units (compute "
                "capability 8.9 or later): choose recipe=ao, or another device"
            )
        if nvidia_capability is not None and nvidia_capability < (8, 9):
            return refused("Accelerate refuses FP8 on GPUs below compute capability 8.9: choose another device")
        if facts.accelerated and facts.index:
            return refused(f"Accelerate takes a process's first GPU, not {facts.key}: choose {facts.kind}:0")
        # 4. In all other cases the recipe runs, with native products or with torch's CPU kernels.
        if nvidia_capability is not None:
            return hardware.native(f"Accelerate's recipe {recipe}")
        if facts.accelerated:
            return refused(f"Accelerate's FP8 has not been tried on {facts.kind}: choose cpu or cuda")
        return hardware.emulated("torchao's layers by Accelerate, on torch's CPU kernels: a CPU has no FP8 units")


def _make_format_parser(names: Collection[str]) -> Callable[[str], str]:
    """Returns a parser for the name of a format. An empty text means the carrier, the dtype of all other tensors."""
    parse = one_of(*names)
    return lambda text: parse(text) if text else ""


@precisions.register(SERVED_PRECISION)
class ServedModelPrecision(Precision):
    """A served model whose KV cache and weights have chosen formats. All other tensors have one dtype, the carrier."""

    name = SERVED_PRECISION
    summary = "bf16 or fp32, with separate formats for the KV cache and for weights."
    rank = 35
    listed = False
    options = (
        Option("carrier", f"dtype of all other tensors: {', '.join(CARRIER_BYTES)}", "bf16", one_of(*CARRIER_BYTES)),
        Option("kv", "the format of keys and values", "", _make_format_parser(KV_FORMATS)),
        Option("weights", "the format of the blocks' weights", "", _make_format_parser(WEIGHT_FORMATS)),
        Option(
            "activations",
            "low: inputs of these layers are rounded to the format of their weights; high: they are not",
            "high",
            one_of("high", "low"),
        ),
    )

    def support(self, facts: DeviceFacts) -> Support:
        """Returns a refusal. Only workloads that serve a model support this precision."""
        return refused("served describes only a model's cache and weights: choose suite prefill, decode or gemm")

    def arithmetic(self, facts: DeviceFacts) -> Arithmetic:
        import torch

        from fp8bench.nn.arithmetics import PlainArithmetic

        return PlainArithmetic({"fp32": torch.float32, "bf16": torch.bfloat16}[str(self.chosen["carrier"])])
