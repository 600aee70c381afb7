"""A step of decoding: one token a sequence through a model with a static cache, at a fixed context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8bench.nn.served_workload import ServedWorkload
from fp8bench.protocols import Grid, Precision, Setup
from fp8bench.registry import precisions, workloads
from fp8bench.user_code.named import named


@workloads.register("decode")
class Decode(ServedWorkload):
    """The cache is filled from the seed before anything is timed, with values like a trained model's, not by a prompt.
    Each step is the same one: its token stands at the last position of the context, and sees all of it. Token ids go
    straight in: no sampler, no tokeniser, no server. So a step's time is TPOT at that context, and batch / time is
    output tokens/s. The embedding, norms and the head stay in the carrier.
    """

    name = "decode"
    summary = "one token a sequence through a GPT with a static cache of keys and values, at a fixed context"
    usual = (("nano", "512"), ("llama-1b", "8192"))
    context_words = "positions that the step's token sees, its own included"
    new = 1
    history = Grid(
        cpu={"size": ("nano",), "context": ("512",)}, gpu={"size": ("llama-1b",), "context": ("8192",)},
        phases=("cast", "gemm", "attention", "elementwise"), errors=("logits_error",), per="tokens",
    )  # fmt: skip

    def named(self, target: str) -> Callable[[], Any]:
        return named(target)

    def precision(self, setup: Setup) -> Precision:
        return precisions.get(setup.case.precision)
