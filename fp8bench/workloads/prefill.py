"""The suite prefill: a whole prompt goes through a language model at once, into an empty KV cache."""

from __future__ import annotations

from fp8bench.nn.served_workloads import ServedWorkload
from fp8bench.protocols import Grid, Precision, Setup
from fp8bench.registry import precisions, workloads
from fp8bench.user_code.named import named


@workloads.register("prefill")
class Prefill(ServedWorkload):
    """Times prefill: all `context` token ids of each sequence at once, and the logits of the last token. Attention
    reads keys and values in the format of the cache, as it does for later tokens. Scales for a tensor or a head are
    computed from the prompt.

    The time of a step is the time to first token (TTFT) without queue and tokeniser, and batch x context / time is
    input tokens/s.
    """

    name = "prefill"
    version = "2"  # since version 2 of this suite, the head shares the embedding's weights
    summary = "a whole prompt through a GPT into an empty cache of keys and values, at once"
    default_sizes = (("nano", "128"), ("llama-1b", "2048"))
    context_description = "tokens of each prompt"
    find_make_function = staticmethod(named)
    history = Grid(
        cpu={"size": ("nano",), "context": ("128",)},
        gpu={"size": ("llama-1b",), "context": ("2048",)},
        phases=("cast", "gemm", "attention", "elementwise"),
        errors=("logits_error",),
        per="tokens",
    )

    def precision(self, setup: Setup) -> Precision:
        return precisions.get(setup.case.precision)
