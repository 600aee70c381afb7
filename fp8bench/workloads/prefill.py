"""Prefill: a whole prompt through a model into an empty cache, at once."""

from __future__ import annotations

from fp8bench.nn.served_workloads import ServedWorkload
from fp8bench.protocols import Grid, Precision, Setup
from fp8bench.registry import precisions, workloads
from fp8bench.user_code.named import named


@workloads.register("prefill")
class Prefill(ServedWorkload):
    """All `context` tokens of each sequence at once, given as ids, and the logits of the last. Attention reads keys and
    values as the cache stores them, like later tokens. A step's time is TTFT without queue and tokeniser, and batch x
    context / time is input tokens/s. Scales of a tensor or of heads come from the prompt itself."""

    name = "prefill"
    version = "2"  # tied heads
    summary = "a whole prompt through a GPT into an empty cache of keys and values, at once"
    usual = (("nano", "128"), ("llama-1b", "2048"))
    context_words = "tokens of each prompt"
    named = staticmethod(named)
    history = Grid(
        cpu={"size": ("nano",), "context": ("128",)},
        gpu={"size": ("llama-1b",), "context": ("2048",)},
        phases=("cast", "gemm", "attention", "elementwise"),
        errors=("logits_error",),
        per="tokens",
    )

    def precision(self, setup: Setup) -> Precision:
        return precisions.get(setup.case.precision)
