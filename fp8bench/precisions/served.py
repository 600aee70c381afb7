"""served: a model whose keys, values and weights are each kept in a format of their own."""

from __future__ import annotations

from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, Support
from fp8bench.nn.served import CARRIERS, KV_FORMATS, SERVED, WEIGHT_FORMATS, kept_word
from fp8bench.protocols import Arithmetic, Precision
from fp8bench.protocols.axes import Option, one_of
from fp8bench.registry import precisions


@precisions.register(SERVED)
class Served(Precision):
    """An arm of inference: what is kept is restored, or multiplied as it is, and everything else is the carrier's."""

    name = SERVED
    summary = "bf16 or fp32, with keys and values, and weights, kept in formats of their own."
    rank = 35
    listed = False
    options = (
        Option("carrier", f"what all else is in: {', '.join(CARRIERS)}", "bf16", one_of(*CARRIERS)),
        Option("kv", "the format of keys and values", "", kept_word(KV_FORMATS)),
        Option("weights", "the format of the blocks' weights", "", kept_word(WEIGHT_FORMATS)),
        Option("activations", "low: inputs of those layers are rounded to their weights' format too", "high",
               one_of("high", "low")),
    )  # fmt: skip

    def support(self, facts: DeviceFacts) -> Support:
        """Refused: the workloads that serve a model alone say otherwise."""
        return refused("served keeps a model's cache and weights: only prefill, decode and gemm have such")

    def arithmetic(self, facts: DeviceFacts) -> Arithmetic:
        import torch

        from fp8bench.nn.arithmetics import PlainArithmetic

        return PlainArithmetic({"fp32": torch.float32, "bf16": torch.bfloat16}[str(self.chosen["carrier"])])
